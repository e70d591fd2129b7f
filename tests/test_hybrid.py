"""What is particular to hybrid.py: matrices divided along tp, with and without copies along dp.

Compared: one process in float64, gradients, parameters, losses and logits at 1e-10 (only the order of summation differs); its RMS
norms are torch's kernel, as hybrid.py's are, for transformers' own go through fp32. Every rank's own part of every parameter is
compared with that part of the reference's, and what is whole is the same on all ranks bit for bit. Dropout masks, bytes on the
wire and live storages beside the formulas of the docstring; checkpoints across strategies. Two and four CPU ranks; about 60 s.
test_contract.py asks the same of tp=1 as of every strategy. Numbers in test names are those of the list of known faults.
"""
import contextlib
import copy
import itertools
import math

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
    }[family]
    head = "ForSequenceClassification" if variant == "classes" else "ForMaskedLM" if family == "bert" else "ForCausalLM"
    head = "LMHeadModel" if (family, head) == ("gpt2", "ForCausalLM") else head
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = getattr(hf, classes + head)(getattr(hf, classes + "Config")(**{**config, **changes}))
        for p in model.parameters():  # biases and norms, too, are nothing special
            p.data = p.data + 0.1 * torch.randn(p.shape) if p.ndim == 1 else 0.2 * torch.randn(p.shape)
    if getattr(model.config, "pad_token_id", None) == 0:
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
    """Rows of different lengths, padded; labels that do not count are the same in all rows, so that all rows count alike."""
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


def beside_one_process(kinds, tp, with_loss_fn=True, tolerance=1e-10, steps=3, frozen=False, config=(), **knobs):
    """Steps of 2, 1 and 2 micro-batches. The first is divided evenly between copies; in the second the last copy has none."""
    rank, copies = dist.get_rank() // tp, dist.get_world_size() // tp
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
                batch, micro_batches = batch_of(kind, 4 * copies, step), 1 if step == 1 else 2
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
    with raises(NotImplementedError, "sp"):
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
    engine = type("Engine", (), {"device": torch.device("cpu"), "_count": lambda self, *what: log.append(what)})()
    yield hybrid.Axis(engine, "tp", dist.get_world_size(), dist.get_rank(), None), log


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
        for kwargs in (dict(label_smoothing=0.1), dict(weight=torch.linspace(1, 2, 10).double())):  # by way of whole scores
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
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    whole = sum(n for name, n in sizes.items() if any(w in name for w in whole_names))
    divided = sum(sizes.values()) - whole
    engine = Hybrid(model, precision=precision, tp=tp, zero_stage=zero_stage, bucket_mb=0.25)
    for _ in range(2):
        engine.forward_backward(batch_of(kind, 2, 0), loss_fn=lambda out, batch: own_loss(out, batch).float())
        found = {kind: sum(by_device.values()) for kind, by_device in engine.memory().items()}
        engine.step()
    copies = dist.get_world_size() // tp
    slices = copies if zero_stage else 1
    local, width = divided / tp + whole, 2 if precision == "bf16" else 4
    received = sum(t.numel() * t.element_size() for t in engine._received.values())
    assert received <= (slices - 1) / slices * 1.01 * max(2**18, max(sizes.values()) / tp * width)
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


def resumed(directory):
    """Four steps in a row, and two, a checkpoint, and two by another engine: bit for bit, dropout included."""
    def engine_of(seed):
        model = build("gpt2", seed, torch.float32, **DROPOUT["gpt2"])
        return Hybrid(model, precision="bf16", tp=2, lr=0.01, bucket_mb=0.004)

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


def test_resumed_bit_for_bit(pool, tmp_path):
    pool.run(4, resumed, f"{tmp_path}/run")


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
