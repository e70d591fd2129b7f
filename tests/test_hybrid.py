"""What is particular to hybrid.py: matrices divided along tp, with and without copies along dp.

Compared: one process in float64, gradients, parameters, losses and logits at 1e-10 (only the order of summation differs); its RMS
norms are torch's kernel, as hybrid.py's are, for transformers' own go through fp32. Every rank's own part of every parameter is
compared with that part of the reference's, and what is whole is the same on all ranks bit for bit. Dropout masks, bytes on the
wire and live storages beside the formulas of the docstring; checkpoints across strategies. Two and four CPU ranks; about 80 s.
test_contract.py asks the same of tp=1 as of every strategy. Numbers in test names are those of the list of known faults.
"""
import contextlib
import copy
import functools
import gc
import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist
from models import Reference, assert_same_on_all_ranks, build_engine, in_sweep, raises, random, rows, two_groups
from test_contract import close, mean_over_ranks
from torch import nn

import hybrid
from hybrid import Hybrid, sent_bytes

VOCAB = 53  # 27 rows on each of 2 ranks, 14 on each of 4: the last rank has padding


def build(kind, seed=0, dtype=torch.float64, **changes):
    """A model of transformers with 2 blocks of 4 heads; "-classes": with a classifier; "-mqa": keys and values of one head."""
    import transformers as hf
    family, _, variant = kind.partition("-")
    sizes = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
                 max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="sdpa")
    rotary = dict(sizes, num_key_value_heads=1 if variant == "mqa" else 2)
    no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    no_drop = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    classes, config = {
        "bert": ("Bert", sizes | no_dropout), "gpt2": ("GPT2", sizes | no_drop), "llama": ("Llama", rotary),
        "qwen3": ("Qwen3", dict(rotary, head_dim=8)), "mistral": ("Mistral", rotary),
        "gemma": ("Gemma", dict(rotary, head_dim=4, num_key_value_heads=1)), "phi3": ("Phi3", rotary),
        "neox": ("GPTNeoX", dict(sizes, hidden_dropout=0.0, attention_dropout=0.0)),
        "gptj": ("GPTJ", {k: v for k, v in (sizes | no_drop).items() if k != "attn_implementation"} | dict(rotary_dim=4)),
        "opt": ("OPT", sizes | dict(ffn_dim=24, word_embed_proj_dim=16, dropout=0.0)),
        "bloom": ("Bloom", {k: v for k, v in sizes.items() if k != "attn_implementation"} | dict(
            hidden_dropout=0.0, attention_dropout=0.0)),
        "vit": ("ViT", {k: v for k, v in (sizes | no_dropout).items() if "_id" not in k} | dict(
            image_size=8, patch_size=4, num_channels=1)),
    }[family]
    head = "ForSequenceClassification" if variant == "classes" else "ForMaskedLM" if family == "bert" else "ForCausalLM"
    head = "ForImageClassification" if family == "vit" else head
    head = "LMHeadModel" if (family, head) == ("gpt2", "ForCausalLM") else head
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = getattr(hf, classes + head)(getattr(hf, classes + "Config")(**{**config, **changes}))
        for p in model.parameters():  # biases and norms, too, are nothing special
            p.data = p.data + 0.1 * torch.randn(p.shape) if p.ndim == 1 else 0.2 * torch.randn(p.shape)
    if getattr(model.config, "pad_token_id", None) == 0 and family != "vit":
        model.get_input_embeddings().weight.data[0] = 0.3  # a row that may have no gradient, but is read
    return model.to(dtype).to(torch.get_default_device())


class PlainNorm(nn.Module):
    """Stands in the class of an RMS norm: in the dtype of x, as hybrid.py computes it."""

    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight + self.one, self.eps)


def plain_norms(model):
    for module in model.modules():
        if (name := type(module).__name__).endswith("RMSNorm"):
            module.one, module.eps = float("Gemma" in name), getattr(module, "variance_epsilon", getattr(module, "eps", None))
            module.__class__ = PlainNorm
    return model


def batch_of(kind, samples, seed, length=7):
    """Rows of different lengths, padded; labels that do not count are the same in all rows, so that all rows count alike. For vit,
    images of 4 patches."""
    if kind.startswith("vit"):
        return dict(pixel_values=random(samples, 1, 8, 8, seed=seed), labels=random(samples, high=2, seed=2000 + seed))
    ids = 1 + random(samples, length, high=VOCAB - 1, seed=1000 + seed)
    mask = torch.ones_like(ids)
    mask[::3, length - 2 :] = 0
    if kind.endswith("classes"):
        labels = random(samples, high=2, seed=2000 + seed)
    else:
        labels = ids.clone() if not kind.startswith("bert") else random(samples, length, high=VOCAB, seed=2000 + seed)
        labels[:, length // 2] = -100
    return dict(input_ids=ids * mask, attention_mask=mask, labels=labels)


def own_loss(output, batch):
    """In the precision of the model, where transformers' own goes through fp32."""
    logits, labels = output.logits, batch["labels"]
    if labels.ndim == 1:
        return nn.functional.cross_entropy(logits, labels)
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def forward_of(model, batch, loss_fn):
    return loss_fn(model(**batch), batch) if loss_fn else model(**batch).loss


def part_of(layout, whole):
    """A rank's own part of a whole tensor, without rows that pad the vocabulary."""
    dim = next((d for d in range(whole.ndim) if len({(b[d].start, b[d].stop) for b in layout.boxes}) > 1), 0)
    return torch.cat([whole[box] for box in layout.boxes], dim)


def assert_parameters_equal(engine, reference, tolerance=1e-10):
    ours, theirs = dict(engine.named_parameters()), dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    whole = []
    for name, p in theirs.items():
        layout, local = engine.layout(ours[name]), ours[name].detach()
        assert layout.shape == p.shape, name
        expected = part_of(layout, p.detach())
        close(local[: len(expected)], expected, tolerance)
        assert not local[len(expected) :].any(), f"padding of {name} has changed"
        if layout.numel == p.numel():
            whole.append(local)
    assert_same_on_all_ranks(whole)
    assert len(whole) < len(ours) or engine.tp.world_size == 1


FROZEN = {"bert": "attention.self.query", "gpt2": "c_fc.bias", "llama": "up_proj", "qwen3": "k_norm", "neox": "dense_h_to_4h",
          "gptj": "fc_in", "phi3": "gate_up_proj"}


def beside_one_process(kinds, tp, with_loss_fn=True, tolerance=1e-10, steps=3, frozen=False, config=(), length=7, **knobs):
    """Steps of 2, 1 and 2 micro-batches. The first is divided evenly between copies; in the second the last copy has none."""
    ranks = tp * knobs.get("sp", 1)
    rank, copies = dist.get_rank() // ranks, dist.get_world_size() // ranks
    loss_fn = own_loss if with_loss_fn else None
    for kind in kinds:
        model, whole = build(kind, seed=dist.get_rank(), **dict(config)), plain_norms(build(kind, **dict(config)))
        for m in (model, whole) if frozen else ():
            for name, p in m.named_parameters():
                p.requires_grad_(FROZEN.get(kind.partition("-")[0], "o_proj") not in name)
        reference = Reference(whole, two_groups, 0.5, lr=0.01, eps=1e-3)
        engine = Hybrid(model, two_groups(model), lr=0.01, eps=1e-3, max_norm=0.5, precision="fp32", tp=tp,
                        **{"bucket_mb": 0.004, **knobs})
        try:
            for step in range(steps):
                batch, micro_batches = batch_of(kind, 4 * copies, step, length), 1 if step == 1 else 2
                ends = [4 * r for r in range(copies + 1)]
                if step == 1 and copies > 1:
                    ends[-2] = ends[-1]
                mine = rows(batch, ends[rank], ends[rank + 1]) if ends[rank] < ends[rank + 1] else None
                expected = forward_of(reference.model, batch, loss_fn)
                expected.backward()
                loss = engine.forward_backward(mine, micro_batches, loss_fn)
                close(loss, expected.detach(), tolerance)
                assert_same_on_all_ranks([loss])
                for name, p in reference.model.named_parameters():
                    if p.requires_grad:
                        close(engine.full_grad(name), torch.zeros_like(p) if p.grad is None else p.grad, tolerance)
                norm = reference.step()
                engine.step()
                close(engine.grad_norm, norm, tolerance)
                assert norm > 0.5 or step, "clips at least once"
                assert_parameters_equal(engine, reference.model, tolerance)
            with torch.no_grad():
                inputs = {k: v for k, v in batch.items() if k != "labels"}
                close(engine.eval()(**inputs).logits, reference.model.eval()(**inputs).logits, tolerance)
            saved, expected = engine.state_dict(), reference.model.state_dict()
            if dist.get_rank() == 0:
                assert saved.keys() == expected.keys()
                for name, tensor in expected.items():
                    assert saved[name].shape == tensor.shape and saved[name].dtype == tensor.dtype, name
                    close(saved[name], tensor, tolerance)
                build(kind, seed=9, **dict(config)).load_state_dict(saved, strict=True)
        except Exception as error:
            error.add_note(f"with {kind}, tp={tp}, {copies} copies")
            raise


# ---- 1. equal to one process ---------------------------------------------------------------------------------------------

KINDS = ["bert", "bert-classes", "gpt2", "gpt2-classes", "llama", "llama-classes", "llama-mqa", "qwen3", "qwen3-classes"]
MORE = ["mistral", "gemma", "neox", "gptj", "phi3", "mistral-classes", "gptj-classes"]
LOSS_IN_FP32 = 2e-6  # transformers casts logits to fp32, and here the softmax' sum is in another order: some 6e-8 each


def test_two_ranks_share_each_model(pool):
    pool.run(2, beside_one_process, KINDS, 2)


def test_models_own_loss(pool):
    pool.run(2, beside_one_process, ["bert", "gpt2", "llama", "qwen3-classes"], 2, with_loss_fn=False, steps=2,
             tolerance=LOSS_IN_FP32)


@pytest.mark.parametrize("zero_stage", in_sweep([1, 0], lambda zero_stage: zero_stage == 0))
def test_two_copies_on_two_ranks_each(pool, zero_stage):
    """Also cases 10 and 63: the second copy has no rows in the second step, and ranks of a copy get the same ones."""
    pool.run(4, beside_one_process, ["gpt2", "llama-mqa"], 2, zero_stage=zero_stage)


def test_frozen_parts(pool):
    pool.run(2, beside_one_process, ["bert-classes", "gpt2", "llama", "qwen3"], 2, frozen=True)


def test_cases_59_and_60_fewer_key_and_value_heads_than_ranks(pool):
    """Two on four ranks, which share each with a neighbour; gradients are the sum of what both find."""
    pool.run(4, beside_one_process, ["llama", "qwen3"], 4, steps=2)


@pytest.mark.sweep
@pytest.mark.parametrize("kinds", [KINDS[:4], KINDS[4:], MORE], ids=" ".join)
@pytest.mark.parametrize("ranks, tp", [(1, 1), (2, 1), (2, 2), (4, 4), (4, 2), (8, 4)])
@pytest.mark.parametrize("frozen, with_loss_fn, zero_stage", [(False, True, 1), (True, True, 0), (False, False, 1)])
def test_sweep(pool, kinds, ranks, tp, frozen, with_loss_fn, zero_stage):
    tolerance = LOSS_IN_FP32 if not with_loss_fn else 1e-10
    pool.run(ranks, beside_one_process, kinds, tp, with_loss_fn, tolerance, frozen=frozen, zero_stage=zero_stage, limit_s=200)


def several_backwards(tp, zero_stage):
    """Two backwards before one step add up, what heads of several ranks say of shared weights included; so does no_sync."""
    for kind in ("llama-mqa", "qwen3"):
        model, whole = build(kind), plain_norms(build(kind))
        engine = Hybrid(model, precision="fp32", tp=tp, zero_stage=zero_stage, bucket_mb=0.004)
        copies = dist.get_world_size() // tp
        for step in range(4):
            batch = batch_of(kind, 2 * copies, step)
            mine = rows(batch, 2 * engine.dp.rank, 2 * engine.dp.rank + 2)
            own_loss(whole(**batch), batch).backward()
            with engine.no_sync() if step == 2 else contextlib.nullcontext():
                engine.backward(own_loss(engine(**mine), mine))
        for name, p in whole.named_parameters():
            close(engine.full_grad(name), p.grad)


def test_several_backwards_add_up(pool):
    pool.run(4, several_backwards, 2, 1)
    pool.run(4, several_backwards, 2, 0)


# ---- 2. what is divided: heads, vocabulary, biases, tied weights -----------------------------------------------------------


def refusals():
    def built(kind="llama", changes=(), **arguments):
        model = build(kind, **dict(changes))
        before = [type(m) for m in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}
        try:
            Hybrid(model, **{"precision": "fp32", "tp": 2, **arguments})
        except (ValueError, NotImplementedError):
            assert [type(m) for m in model.modules()] == before[0], "a refused engine has changed the model"
            assert all(torch.equal(v, before[1][k]) for k, v in model.state_dict().items())
            raise

    with raises(ValueError, "3 attention heads", "tp=2"):
        built(changes=dict(num_attention_heads=3, num_key_value_heads=3, hidden_size=24))
    with raises(ValueError, "25 rows", "tp=2", "gate_proj"):
        built(changes=dict(intermediate_size=25))
    with raises(ValueError, "styles", "sideways", "rowwise"):
        built(plan={"model.layers.*.mlp.up_proj": "sideways"})
    with raises(ValueError, "wte", "tied"):
        built("gpt2", plan={"lm_head": "rowwise"})
    with raises(ValueError, "norm", "only linears"):
        built(plan={"model.norm": "colwise"})
    for name, wrong in dict(tp=0, pp=0.5, sp="2").items():
        with raises(ValueError, name, repr(wrong)):
            built(**{name: wrong})
    with raises(ValueError, "tp=3", "2 ranks"):
        built(tp=3)
    with raises(ValueError, "zero_stage", "2"):
        built(zero_stage=2)
    with raises(ValueError, "settings"):
        built(zero_stage=dist.get_rank())
    with raises(ValueError, "sp=2", "sp_mode None"):
        built(tp=1, sp=2)
    import transformers as hf
    config = hf.Qwen3MoeConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                               intermediate_size=24, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=4)
    with raises(ValueError, "qwen3_moe", "moe_tp_experts"):
        Hybrid(hf.Qwen3MoeForCausalLM(config), tp=2)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with raises(ValueError, "Sequential", "no plan", "bert", "gpt2", "plan="):
        Hybrid(plain, tp=2)
    engine = Hybrid(plain, tp=1, precision="fp32")
    before = plain[0].weight.detach().clone()
    engine.forward_backward(random(4, 7, seed=0), loss_fn=lambda out, batch: out.square().mean())
    engine.step()
    assert not torch.equal(engine.module[0].weight, before)


def test_case_59_and_arguments_that_are_wrong(pool):
    pool.run(2, refusals)


def refused_beside_another():
    """An engine that is refused leaves the one that has the model alone."""
    model = build("llama")
    first = Hybrid(model, precision="fp32", tp=2)
    for wrong in (dict(plan={"model.layers.*.mlp.up_proj": "sideways"}), dict(max_norm=1.0 + dist.get_rank()), dict(tp=3),
                  dict(plan={"model.norm": "colwise"})):
        with raises(ValueError):
            Hybrid(model, **{"precision": "fp32", "tp": 2, **wrong})
        first.forward_backward(batch_of("llama", 2, 0), loss_fn=own_loss)
        first.step()


def test_a_refused_engine_leaves_the_first_alone(pool):
    pool.run(2, refused_beside_another)


class Pair(nn.Module):
    """No model of transformers; a plan of the user's own."""

    def __init__(self):
        super().__init__()
        self.enter, self.up, self.down, self.leave = nn.Linear(7, 5), nn.Linear(5, 6), nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.leave(self.down(torch.tanh(self.up(self.enter(x)))))


def own_plan():
    torch.manual_seed(0)
    model = Pair().double()
    reference = Reference(model, None, lr=0.01, eps=1e-3)
    engine = Hybrid(model, precision="fp32", tp=2, lr=0.01, eps=1e-3,
                    plan={"up": "colwise", "down": "rowwise", "leave": "colwise_gather_output"})
    assert model.up.weight.shape == (3, 5) and model.down.weight.shape == (5, 3) and model.leave.weight.shape == (2, 5)
    for step in range(2):
        x = random(4, 7, seed=step)
        loss = reference.model(x).square().mean()
        loss.backward()
        close(engine.forward_backward(x, 2, lambda out, x: out.square().mean()), loss.detach())
        for name, p in reference.model.named_parameters():
            close(engine.full_grad(name), p.grad)
        reference.step()
        engine.step()
        assert_parameters_equal(engine, reference.model)


def test_a_plan_of_ones_own(pool):
    pool.run(2, own_plan)


def ten_words():
    """10 words on 4 ranks, 3 rows each, the last two of them padding that has no share in the softmax."""
    for kind in ("llama", "gpt2"):
        model = build(kind, vocab_size=10)
        engine = Hybrid(model, precision="fp32", tp=4)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert head.weight.shape[0] == 3 and embedding.weight.shape[0] == (3 if kind == "gpt2" else 10)  # llama's plan has the head
        with torch.no_grad():
            head.weight.zero_()
        ids = random(2, 7, high=10, seed=0)
        loss = engine.forward_backward(dict(input_ids=ids, labels=ids), loss_fn=own_loss)
        assert abs(loss.item() - math.log(10)) < 1e-12  # 2.302585; with the padding it would be ln 12
        saved = engine.state_dict()
        if dist.get_rank() == 0:
            words = [v for n, v in saved.items() if n.endswith(("wte.weight", "embed_tokens.weight", "lm_head.weight"))]
            assert [len(v) for v in words] == [10, 10]
        assert engine(input_ids=ids).logits.shape == (2, 7, 10)


def test_case_59_vocabulary_that_is_padded(pool):
    pool.run(4, ten_words)


def biases_and_ties():
    """Case 61: bias of a row linear once. Tied weights are one parameter, updated once."""
    model = build("gpt2")
    engine = Hybrid(model, precision="fp32", tp=2, lr=0.01)
    block = model.transformer.h[0].mlp
    with torch.no_grad():
        block.c_proj.weight.zero_()
        seen = block(random(1, 3, 16, seed=0))
    assert torch.equal(seen, block.c_proj.bias.detach().expand(1, 3, 16))
    assert model.transformer.wte.weight is model.lm_head.weight
    assert sum(name.endswith(("wte.weight", "lm_head.weight")) for name, _ in engine.named_parameters()) == 1
    before = model.lm_head.weight.detach().clone()
    engine.forward_backward(batch_of("gpt2", 2, 0), loss_fn=own_loss)
    engine.step()
    moved = (engine.module.lm_head.weight.detach() - before).abs()
    assert 0.0099 < moved.max() < 0.010001  # the first update of Adam is lr
    assert engine.optimizer.steps.unique().tolist() == [1.0]


def test_case_61_biases_and_tied_weights(pool):
    pool.run(2, biases_and_ties)


# ---- 3. divided scores ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def an_axis():
    """All ranks on one tp axis, without an engine; yields it and the list of what was sent: (collective, bytes)."""
    log = []
    engine = type("Engine", (), dict(device=torch.device("cpu"), rank=dist.get_rank(), world_size=dist.get_world_size(),
                                     _count=lambda self, *what: log.append(what)))()
    yield hybrid.Axis(engine, "tp", [[*range(engine.world_size)]]), log


def divided(axis, whole):
    """A leaf with this rank's columns, padded with what must not count, and what the model would return."""
    n = -(-whole.shape[-1] // axis.world_size)
    padded = nn.functional.pad(whole.detach(), (0, n * axis.world_size - whole.shape[-1]), value=1e6)
    local = padded[..., n * axis.rank : n * (axis.rank + 1)].clone().requires_grad_()
    return local, hybrid.ShardedLogits.of(local * 1, axis, whole.shape[-1])


def scores_and_targets():
    """Case 64: values and gradients beside torch's cross entropy, and not one score sent."""
    with an_axis() as (axis, log):
        for vocabulary in (10, 8, 3, 1):
            width, n = -(-vocabulary // axis.world_size), axis.world_size
            borders = [t for k in range(n) for t in (k * width, k * width + width - 1) if t < vocabulary] + [vocabulary - 1]
            for scale, ignored, ignore_index, reduction in (
                    (1.0, [], -100, "mean"), (1e4, [1], -100, "mean"), (1.0, [0, 2], 0, "sum"), (1e4, [0], -100, "none"),
                    (1.0, range(len(borders)), -100, "sum"), (1.0, range(len(borders)), -100, "mean")):
                target = torch.tensor(borders)
                target[list(ignored)] = ignore_index
                whole = (scale * random(len(borders), vocabulary, seed=1)).requires_grad_()
                local, logits = divided(axis, whole)
                kwargs = dict(ignore_index=ignore_index, reduction=reduction)
                log.clear()
                found, expected = (nn.functional.cross_entropy(scores, target, **kwargs) for scores in (logits, whole))
                case = (vocabulary, scale, ignored, reduction)
                torch.testing.assert_close(found.detach().as_subclass(torch.Tensor), expected.detach(), rtol=1e-12, atol=1e-12,
                                           equal_nan=True, msg=lambda m, case=case: f"{case}: {m}")
                if expected.isnan().any():
                    continue
                weights = random(*expected.shape, seed=2)
                (found * weights).sum().backward()
                (expected * weights).sum().backward()
                own = nn.functional.pad(whole.grad, (0, width * n - vocabulary))[:, width * axis.rank : width * (axis.rank + 1)]
                torch.testing.assert_close(local.grad, own, rtol=1e-12, atol=1e-12)
                assert {what for what, _ in log} == {"tp all_reduce"}, (case, log)
        whole = random(2, 10, seed=1)
        module_loss = nn.CrossEntropyLoss()(divided(axis, whole)[1], torch.tensor([3, 9]))
        close(module_loss.detach(), nn.functional.cross_entropy(whole, torch.tensor([3, 9])), 1e-12)
        assert {what for what, _ in log} == {"tp all_reduce"}, log
        with raises(ValueError, "bogus"):
            nn.functional.cross_entropy(divided(axis, whole)[1], torch.tensor([3, 9]), reduction="bogus")
        for kwargs in (dict(label_smoothing=0.1), dict(weight=torch.linspace(1, 2, 10).double()), dict(reduce=False),
                       dict(size_average=False)):  # by way of whole scores
            found = nn.functional.cross_entropy(divided(axis, whole)[1], torch.tensor([3, 9]), **kwargs)
            close(found.detach(), nn.functional.cross_entropy(whole, torch.tensor([3, 9]), **kwargs), 1e-12)


@pytest.mark.parametrize("ranks", in_sweep([2, 3, 4], lambda ranks: ranks != 3))
def test_case_64_cross_entropy_of_divided_scores(pool, ranks):
    pool.run(ranks, scores_and_targets)


READS = {
    "argmax": lambda x: x.argmax(-1), "softmax": lambda x: x.softmax(-1), "log softmax": lambda x: nn.functional.log_softmax(x, -1),
    "slice of rows": lambda x: x[:, :-1], "one row": lambda x: x[1], "last of each": lambda x: x[:, -1, :],
    "dots": lambda x: x[..., :-1, :], "some words": lambda x: x[..., 2:5], "one word": lambda x: x[0, 0, 7],
    "by mask": lambda x: x[torch.tensor([True, False])], "by index": lambda x: x[torch.tensor([1, 0]), torch.tensor([0, 2])],
    "view": lambda x: x.view(-1, 10), "reshape": lambda x: x.reshape(6, 10), "inferred": lambda x: x.view(6, -1),
    "flat": lambda x: x.reshape(-1), "other shape": lambda x: x.view(2, 3, 5, 2), "float": lambda x: x.float(),
    "flatten": lambda x: x.flatten(0, 1), "to": lambda x: x.to(torch.float32), "plus": lambda x: x + 1,
    "plus from left": lambda x: 1 + x,
    "times itself": lambda x: x * x, "stack": lambda x: torch.stack([x, x]), "topk": lambda x: x.topk(3).values,
    "contiguous": lambda x: x.contiguous(), "clone": lambda x: x.clone(), "detach": lambda x: x.detach(),
    "transpose": lambda x: x.mT,
    "new row": lambda x: x[None], "cpu": lambda x: x.cpu(), "max": lambda x: x.max(), "list": lambda x: torch.tensor(x.tolist()),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()), "item": lambda x: torch.tensor(x.sum().item()),
    "iteration": lambda x: torch.stack([row.sum() for row in x]), "float and view": lambda x: x.float().view(-1, 10)[1:],
    "size": lambda x: torch.tensor([*x.shape, x.size(-1), x.size(dim=0), x.numel(), x.ndim, len(x)]),
    "by keyword": lambda x: torch.softmax(input=x, dim=-1), "lists by keyword": lambda x: torch.cat(tensors=[x, x]),
    "matmul": lambda x: x @ torch.ones(10, 2, dtype=x.dtype), "where": lambda x: torch.where(x > 0, x, 0.0),
}


def readers():
    """Whoever reads divided scores finds what he would in whole ones, gradients too."""
    with an_axis() as (axis, log):
        for name, read in READS.items():
            whole = random(2, 3, 10, seed=3).requires_grad_()
            local, logits = divided(axis, whole)
            found, expected = read(logits), read(whole)
            assert found.shape == expected.shape and found.dtype == expected.dtype, (name, found.shape, expected.shape)
            plain = found.gathered() if isinstance(found, hybrid.ShardedLogits) else found
            torch.testing.assert_close(plain.detach(), expected.detach(), msg=lambda m, name=name: f"{name}: {m}")
            if expected.requires_grad:
                weights = random(*expected.shape, seed=4).to(expected.dtype)
                (plain * weights).sum().backward()
                (expected * weights).sum().backward()
                own = nn.functional.pad(whole.grad, (0, 5))[..., local.shape[-1] * axis.rank : local.shape[-1] * (axis.rank + 1)]
                torch.testing.assert_close(local.grad, own, msg=lambda m, name=name: f"{name}: {m}")
        log.clear()
        kept = divided(axis, random(2, 3, 10, seed=3))[1].float()[:, :-1].contiguous().view(-1, 10)
        assert isinstance(kept, hybrid.ShardedLogits) and not log


@pytest.mark.parametrize("ranks", [2, 4])
def test_case_64_divided_scores_read_like_whole_ones(pool, ranks):
    pool.run(ranks, readers)


# ---- 4. norm and overflow --------------------------------------------------------------------------------------------------


def overflow_on_one(tp):
    """Case 23: an inf in the part of a gradient that one tp rank has. All skip, nothing changes, the scale is halved once."""
    model = build("llama-mqa", dtype=torch.float32)
    engine = Hybrid(model, precision="fp16", tp=tp, initial_scale=64.0, bucket_mb=0.004)
    batch, last = batch_of("llama-mqa", 2, engine.dp.rank), tp - 1
    for place in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):  # divided: no other rank has that part
        engine.forward_backward(batch)
        engine.step()
        assert not engine.skipped and engine.grad_norm.isfinite()
        kinds = ("master", "exp_avg", "exp_avg_sq")
        before = [getattr(f, kind).clone() for f in engine.fragments for kind in kinds]
        steps, scale, weights = engine.optimizer.steps.clone(), engine.scale, [p.clone() for p in engine.module.parameters()]
        engine.forward_backward(batch)
        if dist.get_rank() == last:
            next(f for f in engine.fragments if f.name == place).grad.view(-1)[-1] = torch.inf
        engine.step()
        assert engine.skipped and not engine.grad_norm.isfinite() and engine.scale == scale / 2, place
        after = [getattr(f, kind) for f in engine.fragments for kind in kinds]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert torch.equal(engine.optimizer.steps, steps)
        assert all(torch.equal(p, q) for p, q in zip(engine.module.parameters(), weights, strict=True))
        assert_same_on_all_ranks([engine.scale, engine.grad_norm])


def test_case_23_overflow_on_one_rank(pool):
    pool.run(2, overflow_on_one, 2)


def counted_once(zero_stage):
    """Case 28: each element of the whole model's gradient once; all gradients are 1, so the square of the norm is their number."""
    for kind in ("gpt2", "llama-mqa"):
        engine = Hybrid(build(kind), precision="fp32", tp=2, zero_stage=zero_stage, bucket_mb=0.004, lr=0.0)
        total = sum(p.numel() for p in build(kind).parameters())
        engine.forward_backward(batch_of(kind, 2, 0), loss_fn=own_loss)
        for f in engine.fragments:
            f.grad.fill_(1.0)
        engine.step()
        close(engine.grad_norm, torch.tensor(total, dtype=torch.float64).sqrt(), 1e-12)


@pytest.mark.parametrize("ranks, zero_stage", in_sweep([(2, 1), (2, 0), (4, 1), (4, 0)], lambda *case: case != (4, 0)))
def test_case_28_the_norm_counts_each_element_once(pool, ranks, zero_stage):
    pool.run(ranks, counted_once, zero_stage)


# ---- 5. dropout and activation checkpointing ---------------------------------------------------------------------------------

DROPOUT = {"bert-classes": dict(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5),
           "gpt2": dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5), "llama": dict(attention_dropout=0.5)}


def masks(tp):
    """All heads of a layer are alike, so contexts differ between ranks only by what attention drops; what is whole is the same."""
    for dropout in (0.0, 0.5):
        model = build("bert-classes", attn_implementation="eager", attention_probs_dropout_prob=dropout, hidden_dropout_prob=0.5)
        for layer in model.bert.encoder.layer:
            for linear in (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value):
                for p in (linear.weight, linear.bias):
                    p.data = p.data[:4].repeat(4, *[1] * (p.ndim - 1))
        torch.manual_seed(100 + dist.get_rank())
        engine = Hybrid(model, precision="fp32", tp=tp)
        whole, contexts = [], []
        for layer in model.bert.encoder.layer:
            layer.register_forward_hook(lambda m, i, out, whole=whole: whole.append(out[0] if isinstance(out, tuple) else out))
            layer.attention.output.dense.register_forward_pre_hook(lambda m, given, contexts=contexts: contexts.append(given[0]))
        for step in range(2):
            engine.forward_backward(batch_of("bert-classes", 2, step), loss_fn=own_loss)
            engine.step()
        alike = []
        for tensor in (*whole, *contexts, torch.get_rng_state()):
            others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(others, tensor.detach().contiguous())
            first = dist.get_rank() // tp * tp
            alike.append([torch.equal(tensor, others[first + k]) for k in range(tp) if first + k != dist.get_rank()])
            if dist.get_world_size() > tp:  # the other copy drops others
                assert not torch.equal(tensor, others[(first + tp) % dist.get_world_size()])
        assert all(map(all, alike[: len(whole)])) and len(whole) == 4, "what is whole"
        assert all(alike[-1]), "random numbers outside"
        inside = alike[len(whole) : -1]
        assert len(inside) == 4 and (not any(map(any, inside)) if dropout else all(inside[0])), (dropout, inside)


def test_dropout_is_the_same_where_activations_are_whole(pool):
    pool.run(4, masks, 2)


def recomputed(tp):
    """Gradients with activation checkpointing, bit for bit those without, and the same random numbers after it."""
    for kind, changes in DROPOUT.items():
        found = []
        for recompute in (False, True):
            model = build(kind, **changes)
            if recompute:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            engine = Hybrid(model, precision="fp32", tp=tp, lr=0.01, eps=1e-3)
            torch.manual_seed(5)
            engine.train()
            grads = []
            for step in range(2):
                engine.forward_backward(batch_of(kind, 4, step), 2, own_loss)
                grads += [engine.full_grad(name) for name in engine.names]
                engine.step()
            found.append([*grads, torch.get_rng_state()])
            assert_same_on_all_ranks([torch.get_rng_state()])
        for k, (plain, again) in enumerate(zip(*found, strict=True)):
            assert torch.equal(plain, again), (kind, [*engine.names, *engine.names, "random numbers"][k])


def test_dropout_under_activation_checkpointing(pool):
    """llama.py drops in attention alone: recomputation stops inside the last linear, where activations are still divided."""
    pool.run(2, recomputed, 2)


# ---- 6. bytes ----------------------------------------------------------------------------------------------------------------


def sent_in_a_step(kind, tp, samples, length, hidden):
    changes = dict(hidden_size=hidden, intermediate_size=hidden, vocab_size=4 * hidden + 1, max_position_embeddings=length)
    model = build(kind, dtype=torch.float32, **changes)
    blocks = model.config.num_hidden_layers
    engine = Hybrid(model, precision="fp32", tp=tp, bucket_mb=4.0)
    batch = batch_of(kind, samples, 0, length)
    for _ in range(2):
        dist.barrier()
        before = sent_bytes()
        engine.forward_backward(batch, loss_fn=own_loss)
        engine.step()
        engine.wait_for_weights()
        dist.barrier()
        sent = sent_bytes() - before
    local = sum(p.numel() for p in engine.module.parameters())
    t, d = tp, dist.get_world_size() // tp
    activations, ends = 4 * samples * length * hidden, 2 if kind == "gpt2" else 1  # llama's embedding is whole
    expected = {"tp": 2 * (t - 1) / t * activations * (4 * blocks + ends), "dp": 2 * (d - 1) / d * 4 * local}
    counted = {axis: sum(n for what, n in engine.traffic.items() if what.startswith(axis)) for axis in expected}
    for axis, n_bytes in expected.items():
        assert length == 2 or abs(counted[axis] - n_bytes) <= 0.01 * n_bytes, (axis, counted, expected)
    assert not any("gather" in what for what in engine.traffic if what.startswith("tp")), engine.traffic
    return sent, sum(expected.values()), sum(engine.traffic.values())


@pytest.mark.parametrize("ranks, kind", in_sweep([(2, "llama"), (4, "gpt2"), (4, "llama"), (2, "gpt2")],
                                                 lambda ranks, kind: (ranks, kind) in [(4, "llama"), (2, "gpt2")]))
def test_bytes_along_each_axis_equal_the_formula(pool, ranks, kind):
    """Counted, by axis, and on the wire, less what a batch of two tokens sends: four sums of B*S*H in a block, one for a divided
    embedding and one for the head. What cross entropy needs, three numbers a token, and the norm are below 1 %."""
    empty, _, small = mean_over_ranks(pool.run(ranks, sent_in_a_step, kind, 2, 1, 2, 256))
    sent, formula, counted = mean_over_ranks(pool.run(ranks, sent_in_a_step, kind, 2, 8, 128, 256))
    assert abs((sent - empty) / (counted - small) - 1) < 0.01, (sent, empty, counted, small)
    assert abs(counted / formula - 1) < 0.01, (counted, formula)


def held(kind, tp, zero_stage, precision):
    """Between backward and step, rank for rank; Ψw: norms, positions, biases of sums, llama's embedding."""
    changes = dict(hidden_size=128, intermediate_size=256, vocab_size=1000, max_position_embeddings=16)
    model = build(kind, dtype=torch.float32, **changes)
    whole_names = ("norm", "ln_", "wpe", "c_proj.bias", "embed_tokens")
    # in how many parts: keys and values have two heads, which tp ranks beyond those share
    parts = lambda name: 1 if any(w in name for w in whole_names) else min(tp, 2) if re.search("[kv]_proj", name) else tp
    sizes = {name: p.numel() / parts(name) for name, p in model.named_parameters()}
    engine = Hybrid(model, precision=precision, tp=tp, zero_stage=zero_stage, bucket_mb=0.25)
    for _ in range(2):
        engine.forward_backward(batch_of(kind, 2, 0), loss_fn=lambda out, batch: own_loss(out, batch).float())
        found = {kind: sum(by_device.values()) for kind, by_device in engine.memory().items()}
        engine.step()
    copies = dist.get_world_size() // tp
    slices = copies if zero_stage else 1
    local, width = sum(sizes.values()), 2 if precision == "bf16" else 4
    received = sum(t.numel() * t.element_size() for t in engine._received.values())
    assert received <= (slices - 1) / slices * 1.01 * max(2**18, max(sizes.values()) * width)
    assert bool(received) == (slices > 1)
    found["gradients"] -= received
    expected = dict(parameters=width * local, gradients=width * local, optimizer=(12 if width == 2 else 8) * local / slices)
    for what, n_bytes in expected.items():
        assert abs(found[what] - n_bytes) <= 0.01 * n_bytes, (what, found, expected)


@pytest.mark.parametrize("ranks, tp, zero_stage, precision", in_sweep(
    [(r, tp, z, p) for r, tp in ((2, 2), (4, 2), (4, 4)) for z in (0, 1) for p in ("bf16", "fp32")],
    lambda *case: case not in [(4, 2, 1, "bf16"), (4, 2, 0, "fp32"), (2, 2, 1, "fp32")]))
def test_memory_equals_the_formula(pool, ranks, tp, zero_stage, precision):
    for kind in ("llama", "gpt2"):
        pool.run(ranks, held, kind, tp, zero_stage, precision)


# ---- 7. checkpoints, precision, engines that follow --------------------------------------------------------------------------


def go_on(name, kind, directory, start, steps, **knobs):
    """As in test_zero.py: steps of a global batch of 12, from a checkpoint; the model begins with other weights."""
    model = build(kind, seed=10 + start if start else 0)
    model = model if name == "hybrid" else plain_norms(model)
    engine = build_engine(name, model, two_groups(model), lr=0.01, eps=1e-3, max_norm=0.5, precision="fp32", **knobs)
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda t: 1 / (1 + t))
    if start:
        assert engine.load(directory, schedule=schedule) == {"step": start}
    tp = knobs.get("tp", 1)
    rank, copies = dist.get_rank() // tp, dist.get_world_size() // tp
    for step in range(start, start + steps):
        batch = batch_of(kind, 12, step)
        engine.forward_backward(rows(batch, 12 * rank // copies, 12 * (rank + 1) // copies), 2, own_loss)
        engine.step()
        schedule.step()
    engine.save(directory, schedule=schedule, step=start + steps)
    return engine.state_dict()


CHAINS = {"hybrid first": [("hybrid", 2, 2), ("zero2", 2, 1), ("hybrid", 4, 4), ("ddp", 1, 1)],  # (name, ranks, tp)
          "fsdp first": [("fsdp", 2, 1), ("hybrid", 4, 2), ("hybrid", 2, 1)]}


@pytest.mark.parametrize("kind, chain", in_sweep(
    itertools.product(["gpt2", "llama-mqa", "bert-classes"], CHAINS), lambda *case: case != ("gpt2", "hybrid first")))
def test_case_39_chain_of_strategies(pool, tmp_path, kind, chain):
    """Each takes two steps and hands on; after each, equal to one process that was never interrupted."""
    reference = Reference(plain_norms(build(kind)), two_groups, 0.5, lr=0.01, eps=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(reference.optimizer, lambda t: 1 / (1 + t))
    for link, (name, ranks, tp) in enumerate(CHAINS[chain]):
        for step in (2 * link, 2 * link + 1):
            batch = batch_of(kind, 12, step)
            own_loss(reference.model(**batch), batch).backward()
            reference.step()
            schedule.step()
        knobs = dict(tp=tp) if name == "hybrid" else {}
        saved = pool.run(ranks, go_on, name, kind, f"{tmp_path}/run", 2 * link, 2, **knobs)[0]
        expected = reference.model.state_dict()
        assert saved.keys() == expected.keys()
        for key, tensor in expected.items():
            close(saved[key], tensor)


def resumed(directory, changes=(), **knobs):
    """Four steps in a row, and two, a checkpoint, and two by another engine: bit for bit, dropout included. Returns that engine
    and how to build one more."""
    def engine_of(seed):
        model = build("gpt2", seed, torch.float32, **DROPOUT["gpt2"], **dict(changes))
        return Hybrid(model, precision="bf16", lr=0.01, bucket_mb=0.004, **knobs)

    def train(engine, numbers):
        losses = []
        for k in numbers:
            losses.append(engine.forward_backward(batch_of("gpt2", 4, 10 * k + engine.dp.rank), 2))
            engine.step()
        return losses

    torch.manual_seed(dist.get_rank())
    first = engine_of(0)
    train(first, (0, 1))
    first.save(directory)
    expected = [*train(first, (2, 3)), *[f.master for f in first.fragments], *[f.exp_avg for f in first.fragments]]
    torch.manual_seed(50)
    second = engine_of(7)
    second.load(directory)
    found = [*train(second, (2, 3)), *[f.master for f in second.fragments], *[f.exp_avg for f in second.fragments]]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return second, engine_of


def resumed_along_tp(directory):
    resumed(directory, tp=2)


def test_resumed_bit_for_bit(pool, tmp_path):
    pool.run(4, resumed_along_tp, f"{tmp_path}/run")


def half_gradients(kind, tp):
    """As in test_contract.py: below 2^-5, or twice what one process in bf16 loses: each rank rounds its part of a sum, too."""
    model, plain, half = (build(kind, dtype=torch.float32) for _ in range(3))
    half.bfloat16()
    engine = Hybrid(model, precision="bf16", tp=tp)
    batch = batch_of(kind, 4, 0)
    for m in (plain, half):
        own_loss(m(**batch), batch).backward()
    engine.forward_backward(batch, 2, own_loss)
    for (name, p), q in zip(plain.named_parameters(), half.parameters(), strict=True):
        if "key.bias" not in name:  # softmax does not see it: the true gradient is 0
            bound = 2 * (q.grad.float() - p.grad).norm() / p.grad.norm()
            error = (engine.full_grad(name) - p.grad).norm() / p.grad.norm()
            assert error < max(2**-5, bound), (kind, name, error, bound)


def test_bf16_gradients(pool):
    for kind in ("bert-classes", "llama-mqa", "gpt2"):
        pool.run(2, half_gradients, kind, 2)


def taken_over():
    """A new engine on the same model: whole weights are given back, as precise as the masters, and the model runs as before."""
    for kind in ("gpt2", "llama-mqa", "bert"):
        for precision in ("fp32", "bf16"):
            model = build(kind, dtype=torch.float32)
            classes = [type(m) for m in model.modules()]
            attributes = [{k: v for k, v in vars(m).items() if isinstance(v, int)} for m in model.modules()]
            first = Hybrid(model, precision=precision, tp=2, lr=0.01)
            batch = batch_of(kind, 2, 0)
            first.forward_backward(batch)
            first.step()
            expected = first.state_dict()
            second = Hybrid(model, precision=precision, tp=1 if precision == "fp32" else 2, lr=0.01)
            found = second.state_dict()
            assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in expected.items())
            assert found.keys() == expected.keys()
            with raises(RuntimeError, "another engine has taken this model over"):
                first.forward_backward(batch)
            before = [p.detach().clone() for p in second.module.parameters()]
            second.forward_backward(batch)
            second.step()
            assert not any(torch.equal(p, q) for p, q in zip(second.module.parameters(), before, strict=True))
            second._let_go()
            for m, own_class, own in zip(model.modules(), classes, attributes, strict=True):
                assert type(m) is own_class and all(getattr(m, k) == v for k, v in own.items()), (kind, own_class)
            plain = build(kind, seed=3, dtype=torch.float32)
            plain.load_state_dict(model.state_dict())
            with torch.no_grad():
                logits = model.eval()(input_ids=batch["input_ids"]).logits
                assert torch.equal(logits, plain.eval()(input_ids=batch["input_ids"]).logits)
            assert_same_on_all_ranks([logits])


def test_another_engine_takes_over(pool):
    pool.run(2, taken_over)


def deep_copies_of_inputs():
    """A second input of the same shape in one forward, and forwards without gradients between: copies are not mixed up."""
    model = build("llama")
    whole = plain_norms(copy.deepcopy(model))
    engine = Hybrid(model, precision="fp32", tp=2)
    batch = batch_of("llama", 2, 0)
    other = batch_of("llama", 2, 1)
    with torch.no_grad():
        engine(**other)
    loss = own_loss(engine(**batch), batch) + 2 * own_loss(engine(**other), other)
    with torch.no_grad():
        engine(**batch)
    engine.backward(loss)
    (own_loss(whole(**batch), batch) + 2 * own_loss(whole(**other), other)).backward()
    for name, p in whole.named_parameters():
        close(engine.full_grad(name), p.grad)


def steps_without_backward():
    """Nobody has read the weights that the last step gathers when the next one begins; no gradient came, so nothing changes."""
    batch = batch_of("gpt2", 2, 0)
    for tp in (1, 2):
        engine = Hybrid(build("gpt2"), precision="fp32", lr=0.01, weight_decay=0.1, tp=tp)
        engine.forward_backward(batch, 1, own_loss)
        engine.step()
        before = {name: p.clone() for name, p in engine.named_parameters()}
        engine.step()
        engine.step()
        for name, p in engine.named_parameters():
            assert torch.equal(p, before[name]), name
        engine.forward_backward(batch, 1, own_loss)
        engine.step()
        assert not torch.equal(p, before[name])


def test_steps_without_backward(pool):
    pool.run(2, steps_without_backward)


def test_two_forwards_in_one_backward(pool):
    pool.run(2, deep_copies_of_inputs)


def overflow_in_a_copy():
    """A weight that both ranks of a tp group have whole is counted in the norm by the first; an inf is seen wherever it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3))
    engine = Hybrid(model, tp=2, precision="fp32", plan={"0": "colwise", "2": "rowwise"})
    for bad in (None, 0, 1):
        engine.forward_backward(torch.ones(4, 6), loss_fn=lambda output, _: output.square().mean())
        if dist.get_rank() == bad:
            model[3].bias.grad[0] = torch.inf
        engine.step()
        assert engine.skipped.item() == (bad is not None), bad


def test_case_23_overflow_in_the_copy_that_is_not_counted(pool):
    pool.run(2, overflow_in_a_copy)


# ---- 8. what an attacker found ---------------------------------------------------------------------------------------------
#
# Each function is one of the ways in which numbers were wrong without a word, or a run ended in somebody else's message. All
# copies are given the same batch, so that each is equal to one process whatever the mesh.


def beside(model, tp, params=None, **knobs):
    """(engine, reference) that begin with the same weights."""
    reference = Reference(plain_norms(copy.deepcopy(model)), params, lr=0.01, eps=1e-3)
    params = params(model) if params else None
    return Hybrid(model, params, **{"precision": "fp32", "tp": tp, "lr": 0.01, "eps": 1e-3, "bucket_mb": 0.004, **knobs}), reference


def trains_right(engine, reference, batch, loss_fn=own_loss, micro_batches=2):
    """A step of both, equal to each other; gradients, loss, parameters."""
    expected = hybrid.model_loss(reference.model, batch, loss_fn)
    expected.backward()
    close(engine.forward_backward(batch, micro_batches, loss_fn), expected.detach())
    for name, p in reference.model.named_parameters():
        if p.requires_grad:
            close(engine.full_grad(name), torch.zeros_like(p) if p.grad is None else p.grad)
    reference.step()
    engine.step()
    assert_parameters_equal(engine, reference.model)


@contextlib.contextmanager
def unchanged(model):
    """A refusal that leaves the model as it was."""
    classes, weights = [type(m) for m in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}
    numbers = [{k: v for k, v in vars(m).items() if isinstance(v, int)} for m in model.modules()]
    try:
        yield
    finally:
        assert [type(m) for m in model.modules()] == classes, "a refused engine has changed the model"
        assert [{k: v for k, v in vars(m).items() if isinstance(v, int)} for m in model.modules()] == numbers
        assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def mean_square(output, batch):
    return output.square().mean()


class Between(nn.Module):
    """A pair of linears of the user's own, and between them whatever is given."""

    def __init__(self, between=None, up=nn.Linear, down=nn.Linear, scale=False, leave=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.up, self.between, self.down, self.leave = (
            nn.Linear(7, 8), up(8, 12), between or nn.Tanh(), down(12, 8), leave(8, 3))
        self.scale = nn.Parameter(torch.tensor([0.7])) if scale else 1.0
        self.double()

    def forward(self, x):
        return self.leave(self.down(input=self.between(self.scale * self.up(input=self.enter(x)))))


PAIR = {"up": "colwise", "down": "rowwise"}


def weights_between(tp):
    """1, 13, 21: weights that the plan does not name, and that see a rank's own heads or hidden units."""
    engine, reference = beside(Between(nn.PReLU()), tp, plan=PAIR)
    x = random(4, 7, seed=0)
    for act in (lambda: engine.forward_backward(x, 1, mean_square), lambda: engine(x), lambda: engine.module(x)):
        with raises(RuntimeError, "between (PReLU)", "replicated_with_grad_allreduce", "tp=1"):
            act()
    for m in (engine.module, reference.model):  # it is the gradient that would be wrong
        m.between.weight.requires_grad_(False)
    for step in range(2):
        trains_right(engine, reference, random(4, 7, seed=step), mean_square)
    engine, reference = beside(Between(nn.PReLU()), tp, plan=PAIR | {"between": "replicated_with_grad_allreduce"})
    for step in range(2):
        trains_right(engine, reference, random(4, 7, seed=step), mean_square)
    model = Between(scale=True)
    with unchanged(model), raises(ValueError, "scale", "tp=1"):
        Hybrid(model, precision="fp32", tp=tp, plan=PAIR)
    model.scale.requires_grad_(False)
    trains_right(*beside(model, tp, plan=PAIR), x, mean_square)


def declared_plans_that_lack_something(tp):
    """1, 13: of transformers' own. What they lack is named, and with it in the plan they are right."""
    import transformers as hf
    sizes = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=24, max_position_embeddings=32, pad_token_id=0)
    lacks = {"Apertus": ({}, ["model.layers.*.mlp.act_fn"]),
             "Phi": (dict(qk_layernorm=True), [f"model.layers.*.self_attn.{k}_layernorm" for k in "qk"])}
    for family, (more, names) in lacks.items():
        torch.manual_seed(0)
        model = getattr(hf, family + "ForCausalLM")(getattr(hf, family + "Config")(**sizes, **more)).double()
        again, batch = copy.deepcopy(model), batch_of("llama", 4, 0)
        plan = {name: style for name, style in hybrid.plan_of(again).items() if name not in names}  # as it is declared
        engine = Hybrid(model, precision="fp32", tp=tp, plan=plan)
        with raises(RuntimeError, names[0].replace("*", "0"), "replicated_with_grad_allreduce"):
            engine.forward_backward(batch, 1, own_loss)
        plan |= dict.fromkeys(names, "replicated_with_grad_allreduce")
        trains_right(*beside(again, tp, plan=plan), batch)


class LowRank(nn.Linear):
    def __init__(self, in_, out):
        super().__init__(in_, out)
        self.a, self.b = nn.Parameter(torch.randn(2, in_)), nn.Parameter(torch.randn(out, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T


class OtherName(nn.Linear):
    pass


def linears_of_another_class(tp):
    """2: a forward of their own would not be called, or meet a part of what it expects."""
    for place in PAIR:
        model = Between(**{place: LowRank})
        with unchanged(model), raises(ValueError, place, "LowRank", "forward of its own", PAIR[place]):
            Hybrid(model, precision="fp32", tp=tp, plan=PAIR)
    model = Between(leave=LowRank)
    with unchanged(model), raises(ValueError, "leave", "LowRank", "colwise_gather_output"):
        Hybrid(model, precision="fp32", tp=tp, plan=PAIR | {"leave": "colwise_gather_output"})
    trains_right(*beside(Between(leave=LowRank), tp, plan=PAIR), random(4, 7, seed=0), mean_square)  # not divided
    trains_right(*beside(Between(up=OtherName, down=OtherName), tp, plan=PAIR), random(4, 7, seed=0), mean_square)


def set_item(x):
    x[..., 3] = -torch.inf


def set_by_mask(x):
    x[x > 0] = 0.0


def times_two(x):
    x *= 2


CHANGES = {
    "mul_": lambda x: x.mul_(2), "mul_ by operator": times_two, "__setitem__": set_item, "__setitem__ by mask": set_by_mask,
    "masked_fill_": lambda x: x.masked_fill_(x > 0, -torch.inf), "zero_": lambda x: x[:, 0].zero_(),
    "copy_": lambda x: x.copy_(x + 1), "div_": lambda x: x.float().div_(2), "relu_": torch.relu_,
    "scatter_": lambda x: x.scatter_(-1, (x > 0).long(), 0.0),
    "add": lambda x: torch.add(torch.ones(2, 3, 10), 1, out=x), "relu": lambda x: nn.functional.relu(x, inplace=True),
    "register_hook": lambda x: x.register_hook(print), "retain_grad": lambda x: x.retain_grad(),
}


def scores_that_would_be_changed(tp):
    """3, 4: in place, on a copy, would be lost; hooks would hang on another tensor. Whole scores can do all that."""
    with an_axis() as (axis, _):
        for name, change in CHANGES.items():
            scores = divided(axis, random(2, 3, 10, seed=3))[1]
            with raises(RuntimeError, name.split()[0] + ":", "in place", "logits.gathered()"):
                change(scores)
    batch = batch_of("gpt2", 4, 0)
    engine, reference = beside(build("gpt2"), tp)

    def without_a_word(output, given, scores):
        hooked = []
        scores.register_hook(hooked.append)
        scores.retain_grad()
        kept = scores * 1
        kept[..., 3] = -1e3
        kept.div_(2)
        loss = nn.functional.cross_entropy(kept.view(-1, VOCAB), given["labels"].view(-1))
        grad, = torch.autograd.grad(loss, scores, retain_graph=True)
        assert len(hooked) == 1 and torch.equal(hooked[0], grad) and grad.shape == scores.shape
        return loss

    def refused(output, given):
        output.logits[..., 3] = -1e3
        return own_loss(output, given)

    for _ in range(2):
        with raises(RuntimeError, "logits.gathered()"):
            engine.forward_backward(batch, 2, refused)
        trains_right(engine, reference, batch)
    gathered = lambda out, given: without_a_word(out, given, getattr(out.logits, "gathered", lambda: out.logits)())
    trains_right(engine, reference, batch, gathered)


def words_outside_of_the_vocabulary(tp):
    """5: no rank has them, so rows of zeros; a target of no rank, so a loss that is NaN with gradients that are not."""
    engine, reference = beside(build("gpt2"), tp)
    batch = batch_of("gpt2", 4, 0)
    for wrong in (VOCAB, VOCAB + 1, 2 * VOCAB, -1, -100):  # on the last rank VOCAB is a row of padding
        ids = batch["input_ids"].clone()
        ids[0, 1] = wrong
        for act in (lambda ids=ids: engine.forward_backward(batch | dict(input_ids=ids), 2, own_loss),
                    lambda ids=ids: engine.module(input_ids=ids)):
            with raises(IndexError, f"token outside of the vocabulary of {VOCAB}"):
                act()
    for wrong in (VOCAB, VOCAB + 1, -1, -99):
        labels = batch["labels"].clone()
        labels[-1, 1] = wrong
        with raises(IndexError, f"target outside of the vocabulary of {VOCAB}"):
            engine.forward_backward(batch | dict(labels=labels), 2, own_loss)
    for _ in range(2):  # nothing has accumulated, and no step was taken
        trains_right(engine, reference, batch)


def attentions_of_all_heads(tp):
    """9: each rank would return those of its own heads."""
    for kind in ("bert", "llama"):
        engine, reference = beside(build(kind, attn_implementation="eager"), tp)
        batch = batch_of(kind, 4, 0)
        with raises(ValueError, "output_attentions", "tp=1"):
            engine(**batch, output_attentions=True)
        for act in (lambda engine=engine, batch=batch: engine.forward_backward(batch | dict(output_attentions=True), 1),
                    lambda engine=engine, batch=batch: engine.module(**batch, output_attentions=True)):
            with raises(ValueError, "output_attentions", "tp=1"):
                act()
        engine.module.config.output_attentions = True
        with raises(ValueError, "output_attentions", "tp=1"):
            engine.forward_backward(batch, 1, own_loss)
        engine.module.config.output_attentions = False
        trains_right(engine, reference, batch)
        found, expected = (m(**batch, output_hidden_states=True).hidden_states for m in (engine, reference.model))
        for x, y in zip(found, expected, strict=True):
            close(x.detach(), y.detach())


class Packed(nn.Module):
    """Queries, keys and values in one weight; and a linear that reads two functions of one other's output side by side."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attn = nn.ModuleDict(dict(qkv=nn.Linear(8, 24), o=nn.Linear(8, 8)))
        self.mlp = nn.ModuleDict(dict(up=nn.Linear(8, 12), down=nn.Linear(24, 8)))
        self.double()

    def forward(self, x):
        q, k, v = self.attn["qkv"](x).chunk(3, -1)
        x = x + self.attn["o"](torch.tanh(q * k) + v)
        h = self.mlp["up"](x)
        return self.mlp["down"](torch.cat([h.sin(), h.tanh()], -1))


def packed_matrices(tp):
    """6: as many as the linear beside it says, not two."""
    plan = {"attn.qkv": "packed_colwise", "attn.o": "rowwise", "mlp.up": "colwise", "mlp.down": "packed_rowwise"}
    engine, reference = beside(Packed(), tp, plan=plan)
    weight = engine.module.attn["qkv"].weight
    assert weight.shape == (24 // tp, 8) and len(engine.layout(weight).boxes) == 3
    for step in range(2):
        trains_right(engine, reference, random(4, 8, seed=step), mean_square)
    model = Packed()
    with unchanged(model), raises(ValueError, "attn.qkv", "packed"):
        Hybrid(model, precision="fp32", tp=tp, plan={"attn.qkv": "packed_colwise"})


def forward_that_ends_between(tp):
    """8: what draws random numbers next draws the same on all ranks of a tp group, however the last forward ended."""
    for kind in ("bert-classes", "gpt2"):
        model, batch = build(kind, **DROPOUT[kind]), batch_of(kind, 4, 0)
        engine = Hybrid(model, precision="fp32", tp=tp, lr=0.01, eps=1e-3)
        torch.manual_seed(5 + engine.dp.rank)
        last = "attention.output.dense" if kind == "bert-classes" else "attn.c_proj"
        row = next(m for name, m in model.named_modules() if name.endswith(last))
        first = model.get_input_embeddings()
        seen = []
        dropped = next(m for m in model.modules() if isinstance(m, nn.Dropout))  # of the embeddings
        dropped.register_forward_hook(lambda m, given, out, seen=seen: seen.append(out.detach()))
        for run in (engine.train(), engine.module, functools.partial(forward_backward, engine)):
            hook = row.register_forward_pre_hook(lambda *_: 1 / 0)
            with raises(ZeroDivisionError):
                run(**batch)
            hook.remove()
            seen.clear()
            with torch.no_grad():
                engine.module(**batch)
            engine.forward_backward(batch, 2, own_loss)
            engine.step()
            same_in_tp_groups(engine, [*seen, torch.get_rng_state(), *whole_parameters(engine)])
        assert len(seen) == 3 and first.weight.shape[0] == -(-VOCAB // tp)


def forward_backward(engine, **batch):
    return engine.forward_backward(batch, 1, own_loss)


def whole_parameters(engine):
    whole = [p.detach() for p in engine.module.parameters() if p not in engine.layouts]
    assert len(whole) > 4
    return whole


def same_in_tp_groups(engine, tensors):
    """Bit for bit."""
    assert tensors
    for tensor in tensors:
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor.contiguous())
        first = engine.rank - engine.tp.rank
        assert all(torch.equal(tensor, other) for other in others[first : first + engine.tp.world_size])


def checkpoint_of_another_strategy(tp, directory):
    """10: as many ranks, so it brings each rank's random numbers; tp ranks go on with the same ones."""
    for name in ("zero2", "ddp"):
        for kind in ("bert-classes", "gpt2"):
            torch.manual_seed(100 + dist.get_rank())
            other = build_engine(name, build(kind, **DROPOUT[kind]), precision="fp32", lr=0.01)
            other.train().forward_backward(batch_of(kind, 2, dist.get_rank()), 1, own_loss)
            torch.manual_seed(100 + dist.get_rank())
            other.step()
            other.save(f"{directory}/{name}-{kind}")
            engine = Hybrid(build(kind, seed=3, **DROPOUT[kind]), precision="fp32", tp=tp, lr=0.01)
            engine.load(f"{directory}/{name}-{kind}")
            same_in_tp_groups(engine, [torch.get_rng_state()])
            if dist.get_world_size() > tp:  # the other copies go on with theirs
                states = [torch.empty_like(torch.get_rng_state()) for _ in range(dist.get_world_size())]
                dist.all_gather(states, torch.get_rng_state())
                assert not torch.equal(states[0], states[tp])
            for step in range(2):
                engine.train().forward_backward(batch_of(kind, 4, step), 2, own_loss)
                engine.step()
                same_in_tp_groups(engine, [torch.get_rng_state(), *whole_parameters(engine)])


def evaluation_in_between(tp):
    """11: what is evaluated between steps, and how often, draws no random numbers, as in plain torch."""
    for kind in DROPOUT:
        found = []
        for evaluations in (0, 2):
            torch.manual_seed(0)
            engine = Hybrid(build(kind, **DROPOUT[kind]), precision="fp32", tp=tp, lr=0.01)
            torch.manual_seed(7)
            for step in range(2):
                engine.train().forward_backward(batch_of(kind, 4, step), 2, own_loss)
                engine.step()
                engine.eval()
                before = torch.get_rng_state()
                for k in range(evaluations):
                    with torch.no_grad() if k % 2 else contextlib.nullcontext():
                        engine(**batch_of(kind, 2, k))
                    assert torch.equal(torch.get_rng_state(), before)
            found.append([p.detach().clone() for p in engine.module.parameters()] + [torch.get_rng_state()])
        assert all(torch.equal(p, q) for p, q in zip(*found, strict=True)), kind


def graphs_of_the_engine_before(tp):
    """14, 14b: autograd's node of a parameter knows its shape, and outputs that are kept keep it alive."""
    for kind in ("gpt2", "llama", "bert"):
        model, batch = build(kind), batch_of(kind, 4, 0)
        kept, whole = [model(**batch)], plain_norms(build(kind))  # the first from before there was an engine
        for size in (tp, 1, tp):
            engine = Hybrid(model, precision="fp32", tp=size, lr=0.01, eps=1e-3)
            reference = Reference(whole, None, lr=0.01, eps=1e-3)
            kept.append(engine(**batch))  # never goes backward
            trains_right(engine, reference, batch, micro_batches=1)
            kept.append(engine(**batch))
            whole = reference.model
            close(kept[-1].logits.detach() * 1, whole(**batch).logits.detach())
        gc.collect()
        for output in kept:  # also those of engines that are gone
            assert output.logits.argmax(-1).shape == (4, 7)


class Flat(nn.Module):
    """Whole outputs of a linear that is divided, read by a view that merges their last dim."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 5), nn.Linear(15, 3)
        self.double()

    def forward(self, x):  # (B, 3, 7)
        return self.second(torch.tanh(self.first(x).view(-1)).view(len(x), -1))


def weighted_sum(output, batch):
    flat = output.logits.view(-1)
    return (flat * torch.linspace(-1, 1, len(flat), dtype=flat.dtype)).mean()


def views_that_merge_the_vocabulary(tp):
    """15: gathered without the padding, and contiguous, as whole scores are."""
    for kind in ("gpt2", "llama", "bert"):
        engine, reference = beside(build(kind), tp)
        trains_right(engine, reference, batch_of(kind, 4, 0), weighted_sum, micro_batches=1)
        logits = engine(**batch_of(kind, 2, 0)).logits
        assert logits.gathered().is_contiguous() and logits.view(-1).shape == (2 * 7 * VOCAB,)
        assert logits.view(2, -1).shape == (2, 7 * VOCAB) and logits.view(7 * VOCAB, 2).shape == (7 * VOCAB, 2)
    trains_right(*beside(Flat(), tp, plan={"first": "colwise_gather_output"}), random(4, 3, 7, seed=0), mean_square)


def penalized(model, embeddings, batch, loss_of_output):
    """The loss and ten times the square of its gradient by what the embeddings give."""
    x = embeddings(batch["input_ids"]).detach().requires_grad_()
    loss = loss_of_output(model(inputs_embeds=x, attention_mask=batch["attention_mask"]), batch)
    grad, = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 10 * grad.square().sum()


def log_softmax_loss(output, batch):
    return nn.functional.nll_loss(output.logits.log_softmax(-1).flatten(0, 1), batch["labels"].flatten())


def gathered_loss(output, batch):
    scores = getattr(output.logits, "gathered", lambda: output.logits)()
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def gradient_penalty(tp):
    """17: a second derivative goes through the collectives. Not through cross entropy of divided scores, which says so."""
    for kind, loss_of_output in (("bert-classes", own_loss), ("gpt2", log_softmax_loss), ("gpt2", gathered_loss),
                                 ("llama", gathered_loss)):
        engine, reference = beside(build(kind, attn_implementation="eager"), tp)
        batch = batch_of(kind, 4, 0)
        if kind == "gpt2":
            with raises(RuntimeError, "divided", "logits.gathered()"):
                engine.backward(penalized(engine, engine.module.get_input_embeddings(), batch, own_loss))
        loss = penalized(engine, engine.module.get_input_embeddings(), batch, loss_of_output)
        engine.backward(loss)
        expected = penalized(reference.model, reference.model.get_input_embeddings(), batch, loss_of_output)
        expected.backward()
        close(loss.detach(), expected.detach())
        for name, p in reference.model.named_parameters():
            close(engine.full_grad(name), torch.zeros_like(p) if p.grad is None else p.grad)
        reference.step()
        engine.step()
        trains_right(engine, reference, batch)


def copies_of_the_model(tp):
    """A copy as for a running mean of the weights: it has this rank's part, and evaluates as the model did when it was made."""
    for kind in ("gpt2", "llama", "qwen3"):
        engine, reference = beside(build(kind), tp)
        batch = batch_of(kind, 4, 0)
        trains_right(engine, reference, batch, micro_batches=1)
        old, old_reference = copy.deepcopy(engine.module), copy.deepcopy(reference.model)
        for step in (1, 2):
            trains_right(engine, reference, batch_of(kind, 4, step), micro_batches=1)
            with torch.no_grad():
                close(old(**batch).logits * 1, old_reference(**batch).logits)
                for p, q in zip(old.parameters(), engine.module.parameters(), strict=True):
                    p.lerp_(q, 0.5)
                for p, q in zip(old_reference.parameters(), reference.model.parameters(), strict=True):
                    p.lerp_(q, 0.5)


class GatedRMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 1.5, size)), 1e-6

    def forward(self, x, gate):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight * gate


class OptionalRMSNorm(GatedRMSNorm):
    def forward(self, x, gate=None):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return y if gate is None else y * gate


class ChannelRMSNorm(GatedRMSNorm):
    def forward(self, x):  # over dim 1, which is the last of two
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + self.eps) * self.weight


class OutsideRMSNorm(GatedRMSNorm):
    def forward(self, x):  # eps outside of the root
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class RightRMSNorm(GatedRMSNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Normalized(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear, self.gated = norm(6), nn.Linear(6, 6, bias=False), norm in (GatedRMSNorm, OptionalRMSNorm)
        self.double()

    def forward(self, x):
        y = self.linear(x)
        return (self.norm(y, y) if self.gated else self.norm(y)).sin()


def norms_of_another_kind(tp):
    """18: named RMSNorm, but with a gate, over another dim, or with eps elsewhere. One that is what it says becomes a kernel."""
    for norm in (GatedRMSNorm, OptionalRMSNorm, ChannelRMSNorm, OutsideRMSNorm, RightRMSNorm):
        for size in (1, tp):
            model, plan = Normalized(norm), {"linear": "colwise_gather_output"}
            reference = Reference(model, None, lr=0.01, eps=1e-3)
            engine = Hybrid(model, precision="fp32", tp=size, lr=0.01, eps=1e-3, plan=plan if size > 1 else None)
            assert (type(model.norm) is norm) == (norm is not RightRMSNorm), norm
            for step in range(2):
                x = random(4, 6, 6, seed=step) * (1e-5 if norm is OutsideRMSNorm else 1.0)
                trains_right(engine, reference, x, mean_square)


def refused_and_the_first_goes_on(tp):
    """19: whatever the second engine is refused for, the first has the model, its weights and its optimizer."""
    model = build("llama", intermediate_size=25)
    first, reference = beside(model, 1)
    for words, wrong in ((("25 rows", "gate_proj"), {}), (("norm", "only linears"), dict(plan={"model.norm": "colwise"})),
                         (("25", "up_proj"), dict(plan={"model.layers.*.mlp.up_proj": "packed_colwise",
                                                        "model.layers.*.mlp.down_proj": "rowwise"}))):
        with raises(ValueError, *words):
            Hybrid(model, precision="fp32", tp=tp, **wrong)
        trains_right(first, reference, batch_of("llama", 4, 0), micro_batches=1)
    model = build("gpt2")
    first, reference = beside(model, tp)
    for words, wrong in ((("tied",), {"lm_head": "rowwise"}), (("attn", "only linears"), {"transformer.h.*.attn": "rowwise"})):
        with raises(ValueError, *words):
            Hybrid(model, precision="fp32", tp=tp, plan=wrong)
        trains_right(first, reference, batch_of("gpt2", 4, 0), micro_batches=1)


class OwnDropout(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.p = rate

    def forward(self, x):
        return nn.functional.dropout(x, self.p, self.training)


class NamelessDropout(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.kept = 1 - rate

    def forward(self, x):
        return nn.functional.dropout(x, 1 - self.kept, self.training)


def dropout_in_other_forms(tp):
    """20: what is divided is dropped otherwise on each rank of a tp group, whoever drops it."""
    for dropout in (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, OwnDropout, NamelessDropout):
        model = Between(dropout(0.5)).double()
        for p in (model.up.weight, model.up.bias):
            p.data.fill_(0.1)  # so it is the mask that differs, or nothing
        engine = Hybrid(model, precision="fp32", tp=tp, plan=PAIR)
        seen = []
        engine.module.between.register_forward_hook(lambda m, given, out, seen=seen: seen.append(out.detach()))
        for training in (True, False):
            torch.manual_seed(0)
            seen.clear()
            engine.train(training)(torch.ones(64, 7).double())
            others = [torch.empty_like(seen[0]) for _ in range(dist.get_world_size())]
            dist.all_gather(others, seen[0])
            first = engine.rank - engine.tp.rank
            alike = [torch.equal(seen[0], others[first + k]) for k in range(tp) if first + k != engine.rank]
            assert not any(alike) if training else all(alike), (engine.module.between, training)
            same_in_tp_groups(engine, [torch.get_rng_state()])


REFUSED = [weights_between, declared_plans_that_lack_something, linears_of_another_class, scores_that_would_be_changed,
           words_outside_of_the_vocabulary, attentions_of_all_heads, refused_and_the_first_goes_on]
EQUAL = [packed_matrices, forward_that_ends_between, checkpoint_of_another_strategy, evaluation_in_between,
         graphs_of_the_engine_before, views_that_merge_the_vocabulary, gradient_penalty, copies_of_the_model,
         norms_of_another_kind, dropout_in_other_forms]


def in_turn(functions, tp, directory):
    for function in functions:
        try:
            function(tp, *[directory] if function is checkpoint_of_another_strategy else [])
        except Exception as error:
            error.add_note(f"in {function.__name__}, tp={tp}")
            raise


MESHES = in_sweep([(2, 2), (4, 2), (4, 4)], lambda ranks, tp: ranks > 2)


@pytest.mark.parametrize("ranks, tp", MESHES)
def test_what_was_silently_wrong_is_refused_by_name(pool, tmp_path, ranks, tp):
    pool.run(ranks, in_turn, REFUSED, tp, f"{tmp_path}")


@pytest.mark.parametrize("ranks, tp", MESHES)
def test_what_was_silently_wrong_is_equal_to_one_process(pool, tmp_path, ranks, tp):
    pool.run(ranks, in_turn, EQUAL, tp, f"{tmp_path}")


def compiled(kinds, tp, backend="inductor", **changes):
    """Blocks are compiled after the first step. Three steps of two micro-batches, and logits in evaluation, beside an engine
    whose blocks are not. Returns how many graphs training has."""
    own, changes = nn.Module.compile, {"use_cache": False} | changes  # a cache counts layers, so each would be compiled by itself
    nn.Module.compile = lambda module: own(module, backend=backend)
    try:
        for kind in kinds:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            engines = [Hybrid(build(kind, **changes), precision="fp32", tp=tp, lr=0.01, eps=1e-3, bucket_mb=0.004, compile=compile)
                       for compile in (False, True)]
            graphs = []
            for step in range(3):
                batch = batch_of(kind, 4, step)
                losses = [engine.forward_backward(batch, 2, own_loss) for engine in engines]
                close(losses[1], losses[0])
                for name in engines[0].names:
                    close(engines[1].full_grad(name), engines[0].full_grad(name))
                for engine in engines:
                    engine.step()
                graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            assert graphs[0] == 0 < graphs[1] == graphs[2], (kind, graphs)  # nothing is compiled again in the third step
            with torch.no_grad():
                expected, found = (engine.eval()(**batch).logits * 1 for engine in engines)
            close(found, expected)
            assert_same_on_all_ranks([found])
    finally:
        nn.Module.compile = own
        torch._dynamo.reset()
    return graphs[-1]


def test_compiled_blocks(pool):
    """Layers share their classes, and what is compiled does not know which of them it is: once for all. Without the last part
    of compilation, which takes most of the time: code in C++ is compared in the sweep, and tp, too."""
    few, many = (pool.run(1, compiled, ["llama"], 1, "aot_eager", num_hidden_layers=layers, limit_s=120.0)[0] for layers in (2, 4))
    assert few == many


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["bert-classes", "gpt2", "llama-mqa", "qwen3"])
@pytest.mark.parametrize("ranks, tp", [(1, 1), (2, 2), (4, 2)])
def test_compiled_blocks_of_each_model(pool, kind, ranks, tp):
    few, many = (pool.run(ranks, compiled, [kind], tp, num_hidden_layers=layers, limit_s=250.0)[0] for layers in (2, 4))
    assert few == many
