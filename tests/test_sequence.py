"""What is particular to hybrid.py's sequence parallelism: tokens divided between tp ranks (split_gather), or between ranks of
an axis of their own (all_to_all, ring).

Compared as in test_hybrid.py: one process in float64 at 1e-10, every rank's own part of every parameter. Rows of 7 tokens, which
neither 2 nor 4 ranks divide, or of 33, with right-hand padding. Two to four CPU ranks; about 40 s.
"""
import copy
import functools
import types

import pytest
import torch
import torch.distributed as dist
from models import raises, random, rows
from test_contract import close
from test_hybrid import batch_of, beside_one_process, build, own_loss, plain_norms
from test_pipeline import beside_one_process as stages_beside_one_process
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybrid import Axis, Hybrid, Ring, RingCall, attend

DIVIDED = dict(sp_mode="split_gather")
ALL_TO_ALL, RING = (dict(sp=2, sp_mode=mode) for mode in ("all_to_all", "ring"))
OTHERS = ["gpt2-classes", "llama-classes", "mistral", "gemma", "phi3", "gptj", "llama-mqa"]
KINDS = ["bert-classes", "bert", "gpt2", "llama", "qwen3", "neox"]


def two_ranks():
    beside_one_process(["bert-classes", "gpt2", "qwen3", "bloom"], 2, **DIVIDED)
    beside_one_process(["bert-classes", "gpt2", "llama-mqa", "opt"], 1, **ALL_TO_ALL)
    beside_one_process(["bert-classes", "gpt2", "llama-mqa", "vit"], 1, **RING)


def four_ranks():
    """Copies, stages, and both axes; all mixes with all models are in the sweep."""
    stages_beside_one_process(["llama-classes"], pp=2, tp=2, **DIVIDED)
    beside_one_process(["bert-classes"], 1, **ALL_TO_ALL)
    stages_beside_one_process(["gpt2"], pp=2, **ALL_TO_ALL)
    stages_beside_one_process(["bert-classes"], pp=2, schedule="interleaved", **RING)
    beside_one_process(["llama-mqa"], 2, **RING)
    exceptions_in_divided_heads()


def long_rows(kinds, sp, **config):
    """Causal attention over 33 tokens, with a mask, and without one, of which later ranks see more."""
    for mode in ("all_to_all", "ring"):
        beside_one_process(kinds, 1, sp=sp, sp_mode=mode, length=33, config=dict(max_position_embeddings=40, **config))


def test_two_ranks(pool):
    pool.run(2, two_ranks)


def test_four_ranks(pool):
    pool.run(4, four_ranks, limit_s=120)


@pytest.mark.parametrize("ranks, config", [(3, dict(num_attention_heads=6, hidden_size=24, num_key_value_heads=2)), (4, {})],
                         ids=["3", "4"])
def test_33_causal_tokens(pool, ranks, config):
    pool.run(ranks, long_rows, ["llama"], ranks, **config)


def everything(kind):
    """Each model with each kind of tokens, alone, with copies and with stages, on the four ranks that there are."""
    for knobs in (DIVIDED | dict(tp=2), ALL_TO_ALL, RING, RING | dict(zero_stage=0)):
        if not kind.startswith("bloom") or knobs["sp_mode"] == "split_gather":
            own = dict(tp=1) | knobs
            beside_one_process([kind], **own)
            if "sp" in own:
                beside_one_process([kind], **own | dict(tp=2))
            stages_beside_one_process([kind], pp=2, **knobs)
            beside_one_process([kind], **own | dict(zip(("tp", "sp"), (4, 1) if knobs["sp_mode"] == "split_gather" else (1, 4))))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["bert", "bert-classes", "gpt2", "gpt2-classes", "llama", "llama-classes", "opt", "opt-classes",
                                  "bloom", "bloom-classes", "vit"])
def test_sweep_of_modes(pool, kind):
    pool.run(4, everything, kind, limit_s=200)


@pytest.mark.sweep
@pytest.mark.parametrize("kinds", [KINDS, OTHERS], ids=" ".join)
@pytest.mark.parametrize("ranks, tp", [(2, 2), (4, 4), (4, 2)])
def test_sweep(pool, kinds, ranks, tp):
    pool.run(ranks, beside_one_process, kinds, tp, zero_stage=ranks // tp % 2, **DIVIDED)


def whole_norms():
    """OLMo2's plan gathers queries and keys and lets every rank norm them whole: those weights are not summed over tp."""
    import transformers as hf
    torch.manual_seed(0)
    config = hf.Olmo2Config(vocab_size=53, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                            intermediate_size=24, max_position_embeddings=32, pad_token_id=0)
    model = hf.Olmo2ForCausalLM(config).double()
    for p in model.parameters():
        p.data = p.data + 0.1 * torch.randn(p.shape)
    plain = plain_norms(copy.deepcopy(model))
    engine, batch = Hybrid(model, precision="fp32", tp=2, **DIVIDED), batch_of("llama", 4, 0)
    own_loss(plain(**batch), batch).backward()
    engine.forward_backward(batch, 2, own_loss)
    for name, p in plain.named_parameters():
        close(engine.full_grad(name), p.grad)


def other_lengths():
    """Forwards of other lengths, evaluation between forward and backward, and what checkpointing computes again."""
    model = build("llama")
    plain = plain_norms(copy.deepcopy(model))
    engine = Hybrid(model, precision="fp32", tp=2, **DIVIDED)
    short, long = batch_of("llama", 2, 0, length=5), batch_of("llama", 2, 1, length=7)
    for m in (model, plain):
        m.gradient_checkpointing_enable(dict(use_reentrant=False))
    for batch in (short, long):
        (own_loss(plain(**batch), batch) / 2).backward()
        loss = own_loss(engine(**batch), batch) / 2
        with torch.no_grad():
            engine(**long)
        if batch is short:
            with engine.no_sync():
                engine.backward(loss)
        else:
            engine.backward(loss)
    for name, p in plain.named_parameters():
        close(engine.full_grad(name), p.grad)
    engine.zero_grad()
    first, second = own_loss(engine(**short), short), own_loss(engine(**long), long)
    with raises(RuntimeError, "checkpointing", "5, 7"):
        engine.backward(first + second)
    engine.forward_backward(long, 1, own_loss)
    engine.step()


class Alone:
    """As much of an engine as an axis over all ranks needs."""

    def __init__(self):
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
        self.tp, self.sent = types.SimpleNamespace(rank=0), {}

    def _count(self, collective, sent_bytes):
        self.sent[collective] = self.sent.get(collective, 0) + sent_bytes


def ring_beside_whole():
    """Attention on the ring, which never has all scores, and its gradients, beside the formula: groups of queries, masks of all
    kinds, rows that see nothing, a rank without tokens, and dropout, which must be the same in backward."""
    engine = Alone()
    axis, cases = Axis(engine, "sp", [[0, 1, 2]]), 0
    for length, heads, kv_heads, causal, kind, dropout in [
            (7, 4, 2, True, None, 0.0), (7, 4, 2, False, None, 0.3), (4, 2, 2, True, None, 0.3), (7, 2, 1, False, "bool", 0.3),
            (7, 4, 4, False, "heads", 0.0), (7, 4, 2, False, "heads", 0.3), (5, 2, 2, False, "blind", 0.3),
            (1, 2, 1, True, None, 0.0)]:
        q, k, v = (random(2, n, length, d, seed=seed).requires_grad_() for seed, n, d in (
            (0, heads, 4), (1, kv_heads, 4), (2, kv_heads, 6)))
        mask = None
        if kind == "heads":
            mask = random(2, heads, length, length, seed=3)
        elif kind:
            mask = random(2, 1, length, length, seed=3) > -0.5
            mask[:, :, :, 0] = True  # each sees something
            if kind == "blind":
                mask[0, :, 1] = mask[1, :, 4] = False
        torch.manual_seed(engine.rank)
        tokens = types.SimpleNamespace(axis=axis)
        ring = RingCall(tokens, length, heads // kv_heads, mask, causal, 0.5, dropout, q.dtype)
        places = [ring.place(rank) for rank in range(3)]
        own = places[engine.rank]
        mine = [x.detach()[:, :, own].requires_grad_() for x in (q, k, v)]
        out = Ring.apply(*mine, ring)
        grad = random(2, heads, length, 6, seed=4)
        out.backward(grad[:, :, own])

        keep = torch.ones(2, heads, length, length)
        if dropout:
            size = lambda place: place.stop - place.start
            row = [ring.drop(torch.empty(2, kv_heads, heads // kv_heads * size(own), size(there)), source).view(
                2, heads, size(own), size(there)) for source, there in enumerate(places)]
            rows_of_keep = [None] * 3
            dist.all_gather_object(rows_of_keep, torch.cat(row, -1))
            keep = torch.cat(rows_of_keep, 2)
            assert 0.5 < (keep > 0).double().mean() < 0.9 or length < 5
            assert length < 7 or not torch.equal(keep[:, :, :3, :3], keep[:, :, 3:6, :3]), "each rank drops its own"
        k_all, v_all = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = q @ k_all.mT * 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        blind = (scores == -torch.inf).all(-1, keepdim=True)
        shares = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        expected = (shares * keep) @ v_all
        expected.backward(grad)
        close(out, expected.detach()[:, :, own])
        for ours, theirs in zip(mine, (q, k, v)):
            close(ours.grad, theirs.grad[:, :, own])
        with raises(RuntimeError, "second derivative", "all_to_all"):
            torch.autograd.grad(Ring.apply(*mine, ring).sum(), mine[0], create_graph=True)
        cases += 1
    assert cases == 8


def masks_of_own_tokens(mode):
    """In the blocks each rank drops of its own tokens, or heads, as it likes; outside of them all drop alike."""
    model = build("bert", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.25)
    engine, seen = Hybrid(model, precision="fp32", sp=2, sp_mode=mode), {}
    hooks = [m.register_forward_hook(lambda m, args, out, name=name: seen.update({name: (out == 0) & (args[0] != 0)}))
             for name, m in model.named_modules() if isinstance(m, nn.Dropout) and "attention.self" not in name]
    batch = batch_of("bert", 4, 0, length=8)
    engine.forward_backward(batch, 1, own_loss)
    for hook in hooks:
        hook.remove()
    masks, states = [None] * 2, [None] * 2
    dist.all_gather_object(masks, seen)
    assert len(seen) == 5
    for name in seen:
        assert masks[0][name].shape[1] == (4 if "layer" in name else 8), name
        assert torch.equal(masks[0][name], masks[1][name]) == ("layer" not in name), name
    dist.all_gather_object(states, torch.get_rng_state())
    assert torch.equal(*states), "outside of blocks ranks stay in step"


def computed_again():
    """Activation checkpointing computes attention again, with the same dropout, for each of two lengths."""
    for knobs in (ALL_TO_ALL, RING):
        grads = []
        for checkpointing in (False, True):
            torch.manual_seed(3)
            model = build("gpt2", attn_pdrop=0.3, resid_pdrop=0.2, attn_implementation="sdpa")
            engine = Hybrid(model, precision="fp32", **knobs)
            if checkpointing:
                model.gradient_checkpointing_enable(dict(use_reentrant=False))
            torch.manual_seed(4)
            for length in (5, 7):
                batch = batch_of("gpt2", 2, 0, length)
                with engine.no_sync():
                    engine.backward(own_loss(engine(**batch), batch))
            grads.append({name: engine.full_grad(name) for name, _ in engine.named_parameters()})
        for name, grad in grads[0].items():
            close(grads[1][name], grad)


def masks():
    """In the blocks each rank drops of its own tokens, and of its own hidden units, as it likes; outside of them all drop alike."""
    model = build("bert", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0)
    engine, seen = Hybrid(model, precision="fp32", tp=2, **DIVIDED), {}
    dropouts = {name: m for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p}
    hooks = [m.register_forward_hook(lambda m, args, out, name=name: seen.update({name: (out == 0) & (args[0] != 0)}))
             for name, m in dropouts.items()]
    batch = batch_of("bert", 4, 0, length=8)
    engine.forward_backward(batch, 1, own_loss)
    for hook in hooks:
        hook.remove()
    masks = [None] * 2
    dist.all_gather_object(masks, seen)
    for name in seen:
        same = torch.equal(masks[0][name], masks[1][name])
        assert same == ("layer" not in name), name
        assert "layer" not in name or masks[0][name].shape[1] == 4, "every rank has half the tokens"
    states = [None] * 2
    dist.all_gather_object(states, torch.get_rng_state())
    assert torch.equal(*states), "outside of blocks ranks stay in step"


def kept_of_a_step(engine, batch, counts):
    """Bytes that autograd keeps of one forward's tensors that count, weights apart, and bytes sent in the step."""
    storages, weights = {}, {p.data_ptr() for p in engine.module.parameters()}

    def pack(t):
        if t.is_floating_point() and t.data_ptr() not in weights and counts(t):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = own_loss(engine(**batch), batch)
    total = sum(storages.values())
    engine.backward(loss)
    engine.step()
    return total, engine.traffic


def kept(**knobs):
    """Of what is as wide as hidden states, in BERT without dropout."""
    engine = Hybrid(build("bert-classes", num_hidden_layers=4), precision="fp32", tp=2, **knobs)
    return kept_of_a_step(engine, batch_of("bert-classes", 8, 0, length=16), lambda t: t.ndim == 3 and t.shape[-1] == 16)


def memory_and_bytes():
    (whole, sent), (divided, sent_divided) = kept(), kept(**DIVIDED)
    assert divided < 0.8 * whole, (divided, whole)
    hidden = 8 * 16 * 16 * 8
    # four all-reduces a block become a gather and a scatter each, of the same bytes; that of the embedding stays; one split, whose
    # backward gathers, and one gather behind the blocks
    assert sent["tp all_reduce"] - sent_divided["tp all_reduce"] == 4 * 4 * hidden - small(sent_divided), (sent, sent_divided)
    assert sent_divided["tp reduce_scatter"] == 4 * 4 * hidden // 2
    assert sent_divided["tp all_gather"] - sent.get("tp all_gather", 0) == (4 * 4 + 2) * hidden // 2


def small(traffic):
    """Gradients of norms and biases, summed over tp: one all-reduce of each bucket that has them."""
    model = build("bert-classes", num_hidden_layers=4)
    numel = sum(p.numel() + -p.numel() % 8 for name, p in model.named_parameters() if ".layer." in name and (
        "LayerNorm" in name or "output.dense.bias" in name))
    return numel * 8


class Mixing(nn.Module):
    """A block whose plan leaves something out that mixes tokens."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.mix = nn.Linear(6, 8), nn.Linear(8, 6), nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x):
        return self.mix((x + self.down(self.up(x).tanh())).mT).mT


class Stack(nn.Module):
    def __init__(self, flat=False):
        super().__init__()
        self.layers, self.flat = nn.ModuleList([Mixing()]), flat

    def forward(self, x):
        return self.layers[0](x.flatten(0, 1) if self.flat else x)


PAIR = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def refusals():
    model = build("llama")
    with raises(ValueError, "split_gather", "tp=2"):
        Hybrid(model, precision="fp32", **DIVIDED)
    with raises(ValueError, "sp_mode", "sideways"):
        Hybrid(model, precision="fp32", tp=2, sp_mode="sideways")
    with raises(ValueError, "layers.0.mix.weight", "not in the plan", "sp_mode=None"):
        Hybrid(Stack(), precision="fp32", tp=2, plan=PAIR, **DIVIDED)
    flat = Stack(flat=True)
    flat.layers[0].mix = nn.Identity()
    engine = Hybrid(flat.double(), precision="fp32", tp=2, plan=PAIR, **DIVIDED)
    with raises(RuntimeError, "(12, 6)", "sp_mode=None"):
        engine.forward_backward(random(4, 3, 6, seed=0), 1, lambda out, x: out.sum())


@pytest.mark.parametrize("case", [whole_norms, other_lengths, masks, memory_and_bytes, refusals])
def test_divided_tokens(pool, case):
    pool.run(2, case)


def kept_in_blocks(sp, mode):
    """In the blocks of a Llama, with rows of 12 tokens."""
    model, inside = build("llama", num_hidden_layers=3), []
    engine = Hybrid(model, precision="fp32", **dict(sp=sp, sp_mode=mode) if sp > 1 else {})
    model.model.layers[0].register_forward_pre_hook(lambda *_: inside.append(1))
    model.model.layers[-1].register_forward_hook(lambda *_: inside.clear())
    batch = batch_of("llama", 4, 0, length=12)
    batch["attention_mask"][:] = 1
    return kept_of_a_step(engine, batch, lambda t: inside and t.numel() > 100)  # not positions


def memory_and_bytes_of_own_tokens(mode):
    n = dist.get_world_size()
    (whole, _), (own, sent) = kept_in_blocks(1, None), kept_in_blocks(n, mode)
    # An n-th, but for statistics of norms, too small to be counted here, and for keys that ranks have several times.
    assert 0.95 * whole / n < own < 1.15 * whole / n, (whole, own)
    tokens, hidden, keys, layers = 4 * 12, 16, 8, 3  # 8 bytes an element; keys and values of 2 heads of 4
    if mode == "all_to_all":  # forward and backward: queries and output, keys and values, whose 2 heads 4 ranks have twice
        per_layer = 2 * (2 * hidden + 2 * keys * n // 2) * tokens * 8 // n * (n - 1) // n
        assert sent.pop("sp all_to_all") == layers * per_layer
    else:  # keys and values round in forward and in backward, and their gradients one place further
        assert sent.pop("sp send") == layers * (3 * n - 2) * 2 * keys * tokens * 8 // n
    assert sent.pop("sp all_gather") == 2 * (n - 1) * tokens * hidden * 8 // n, "behind the blocks, and the gradient before them"
    numel = sum(p.numel() for name, p in build("llama", num_hidden_layers=3).named_parameters() if ".layers." in name)
    assert 0 <= sent.pop("sp all_reduce") - 2 * (n - 1) * numel * 8 // n < 512, "gradients of weights in the blocks"
    assert set(sent) <= {"world all_reduce"}, sent


def refusals_of_own_tokens():
    import transformers as hf
    llama = build("llama")
    for knobs, words in [(dict(sp=2), ("sp=2", "all_to_all and ring")), (dict(sp_mode="ring"), ("sp=1", "ring")),
                         (dict(sp=2, tp=2, sp_mode="split_gather"), ("split_gather", "sp=1")),
                         (dict(sp=2, tp=2, **dict(sp_mode="ring")), ("cannot be arranged", "sp=2"))]:
        with raises(ValueError, *words):
            Hybrid(llama, precision="fp32", **knobs)
    with raises(ValueError, "BloomForCausalLM", "attention interface", "split_gather"):
        Hybrid(build("bloom"), precision="fp32", **RING)
    with raises(ValueError, "no plan"):
        Hybrid(nn.Linear(2, 2), precision="fp32", **RING)
    with raises(ValueError, "3 attention heads", "sp=2", "ring"):
        Hybrid(build("llama", num_attention_heads=3, hidden_size=24, num_key_value_heads=3), precision="fp32", **ALL_TO_ALL)
    mixing = build("llama")
    mixing.model.layers[1].mix = nn.Conv1d(6, 6, 3, padding=1).double()
    with raises(ValueError, "layers.1.mix.weight", "mixes tokens"):
        Hybrid(mixing, precision="fp32", **RING)
    shared = build("gpt2")
    shared.transformer.h[0].extra = shared.lm_head
    with raises(ValueError, "wte.weight", "elsewhere"):
        Hybrid(shared, precision="fp32", **RING)
    batch = batch_of("gpt2", 2, 0)
    with raises(RuntimeError, "softcap"):
        Hybrid(hf.Gemma2ForCausalLM(hf.Gemma2Config(
            vocab_size=53, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
            intermediate_size=16)), precision="fp32", **RING).forward_backward(batch)
    decoder = hf.BertLMHeadModel(hf.BertConfig(
        vocab_size=53, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, is_decoder=True,
        add_cross_attention=True))
    engine = Hybrid(decoder, precision="fp32", **RING)
    with raises(RuntimeError, "encoder_hidden_states"):
        engine.forward_backward(dict(batch, encoder_hidden_states=torch.randn(2, 4, 16)))
    engine = Hybrid(llama, precision="fp32", **ALL_TO_ALL)
    for option in ("output_attentions", "output_hidden_states", "use_cache"):
        with raises(ValueError, option, "tokens"):
            engine(**batch, **{option: True})
    llama.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with raises(RuntimeError, "LlamaDecoderLayer", "attention interface"):
        engine.forward_backward(batch)
    del llama.model.layers[0].self_attn.forward
    engine.forward_backward(batch)
    before = llama.config._attn_implementation
    Hybrid(llama, precision="fp32")
    assert (before, llama.config._attn_implementation) == ("own_tokens", "sdpa"), "another engine finds the model as it was"
    llama(**batch)


# ---- what was found by attacking it -------------------------------------------------------------------------------------------


class Backwards(nn.ModuleList):
    def __getitem__(self, index):
        found = super().__getitem__(index)
        return list(found)[::-1] if isinstance(index, slice) else found


class UnitNorm(nn.Module):
    """Without eps: zeros would give NaN."""

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)


def gradients_equal(model, batch, **knobs):
    plain = plain_norms(copy.deepcopy(model))
    own_loss(plain(**batch), batch).backward()
    engine = Hybrid(model, precision="fp32", **knobs)
    engine.forward_backward(batch, 1, own_loss)
    for name, p in plain.named_parameters():
        close(engine.full_grad(name), p.grad)
    return engine


def odd_models(knobs):
    batch = batch_of("llama", 4, 0)
    skipping = build("opt", num_hidden_layers=4, layerdrop=0.4)
    engine, skipped = Hybrid(skipping, precision="fp32", **knobs), 0
    for seed in range(12):  # each forward ends well, or skips on all ranks and says so
        torch.manual_seed(seed)
        try:
            engine.forward_backward(batch_of("opt", 4, 0), 1, own_loss)
        except RuntimeError as error:
            assert "layerdrop" in f"{error}", error
            skipped += 1
        states = [None] * 2
        dist.all_gather_object(states, (skipped, torch.get_rng_state().tolist()))
        assert states[0] == states[1]
    assert 0 < skipped
    backwards = build("llama")
    backwards.model.layers.__class__ = Backwards
    with raises(RuntimeError, "block 1 where block 0", "sp_mode=None"):
        Hybrid(backwards, precision="fp32", **knobs).forward_backward(batch, 1, own_loss)
    normed = build("llama")
    normed.model.layers[1].extra = nn.BatchNorm1d(16).double()
    with raises(ValueError, "layers.1.extra", "BatchNorm1d"):
        Hybrid(normed, precision="fp32", **knobs)
    dropping = build("llama")
    dropping.config.drop_path_rate = 0.1
    with raises(ValueError, "drop_path_rate"):
        Hybrid(dropping, precision="fp32", **knobs)
    unit = build("llama")
    for layer in unit.model.layers:
        layer.input_layernorm = UnitNorm()
    gradients_equal(unit, batch, **knobs)
    between = build("llama")
    between.between = nn.LayerNorm(16).double()
    between.model.layers[0].register_forward_hook(lambda layer, args, out: between.between(out))
    with raises(RuntimeError, "between (LayerNorm)", "its own tokens"):
        Hybrid(between, precision="fp32", **knobs).forward_backward(batch, 1, own_loss)
    outside = build("llama")
    outside.model.norm.register_forward_hook(lambda norm, args, out: outside.model.layers[0].mlp(out))
    with raises(RuntimeError, "layers.0.mlp", "outside of"):
        Hybrid(outside, precision="fp32", **knobs).forward_backward(batch, 1, own_loss)


def checkpointing_around_blocks(knobs):
    """A user's own, with dropout: the same masks again, and random numbers in step afterwards."""
    grads = []
    for again in (False, True):
        model = build("gpt2", attn_pdrop=0.3, resid_pdrop=0.3)
        engine = Hybrid(model, precision="fp32", **knobs)
        if again:
            model.transformer.h.__class__ = Checkpointed
        torch.manual_seed(4)
        engine.forward_backward(batch_of("gpt2", 2, 0), 1, own_loss)
        grads.append({name: engine.full_grad(name) for name, _ in engine.named_parameters()})
        states = [None] * 2
        dist.all_gather_object(states, torch.get_rng_state())
        assert torch.equal(*states)
    for name, grad in grads[0].items():
        close(grads[1][name], grad)


class Checkpointed(nn.ModuleList):
    """Its blocks are called through torch's checkpoint."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return [functools.partial(checkpoint, block, use_reentrant=False) for block in found] if isinstance(index, slice) else found

    def __iter__(self):
        return iter([functools.partial(checkpoint, block, use_reentrant=False) for block in super().__iter__()])


def odd_inputs(knobs):
    batch = batch_of("llama", 4, 0)
    keys = dict(batch, attention_mask=batch["attention_mask"].bool()[:, None, None])
    gradients_equal(build("bert", attn_implementation="sdpa"), keys | dict(labels=batch["labels"]), **knobs)  # (B, 1, 1, S)
    learned, slope = build("llama"), nn.Parameter(torch.ones((), dtype=torch.float64))
    learned.model.layers[1].self_attn.register_forward_pre_hook(
        lambda m, args, kwargs: (args, kwargs | dict(attention_mask=slope * torch.zeros(4, 1, 7, 7).double())), with_kwargs=True)
    engine = Hybrid(learned, precision="fp32", **knobs)
    if knobs["sp_mode"] == "ring":
        with raises(RuntimeError, "depends on weights", "all_to_all"):
            engine.forward_backward(batch, 1, own_loss)
    else:
        engine.forward_backward(batch, 1, own_loss)
    with raises(RuntimeError, "sinks", knobs["sp_mode"]):
        attend(learned.model.layers[0].self_attn, *[torch.zeros(1, 2, 4, 4)] * 3, None, sinks=torch.zeros(2), sliding_window=3)
    engine = Hybrid(build("llama"), precision="fp32", **knobs)
    engine.module.gradient_checkpointing_enable(dict(use_reentrant=False))
    engine(**batch_of("llama", 4, 0, length=5))  # whose backward never comes
    engine.zero_grad()
    engine.backward(own_loss(engine(**batch), batch))
    engine.module.model.norm.register_forward_pre_hook(out_of_memory)
    fresh = Hybrid(build("llama"), precision="fp32", **knobs)
    fresh.module.model.norm.register_forward_pre_hook(out_of_memory)
    with raises(torch.OutOfMemoryError, "no room"):
        fresh.forward_backward(batch, 1, own_loss)


def out_of_memory(*_):
    raise torch.OutOfMemoryError("no room")


def shared_configs(knobs):
    """Another model with the same config is as it was; separate configs that are equal are all changed."""
    first, batch = build("llama"), batch_of("llama", 4, 0)
    second = type(first)(first.config).double()
    engines = [Hybrid(m, precision="fp32", **knobs) for m in (first, second)]
    engines[0] = Hybrid(first, precision="fp32")
    for engine in engines:
        engine.forward_backward(batch, 1, own_loss)
        engine.step()
    Hybrid(second, precision="fp32")
    assert first.config is second.config and (first.config._attn_implementation, first.config.use_cache) == ("sdpa", True)
    separate = build("llama")
    for layer in separate.model.layers:
        layer.self_attn.config = copy.deepcopy(separate.config)
    gradients_equal(separate, batch, **knobs)


def exceptions_in_divided_heads():
    """tp and sp: after an exception between a column and a row linear, in the model itself, random numbers are in step again."""
    for mode in ("all_to_all", "ring"):
        model = build("gpt2", resid_pdrop=0.3, attn_pdrop=0.3)
        engine, batch = Hybrid(model, precision="fp32", tp=2, sp=2, sp_mode=mode), batch_of("gpt2", 4, 0)
        handle = model.transformer.h[1].mlp.act.register_forward_pre_hook(out_of_memory)
        with raises(torch.OutOfMemoryError, "no room"):
            model(**batch)
        handle.remove()
        engine.forward_backward(batch, 1, own_loss)
        states = [None] * 4
        dist.all_gather_object(states, torch.get_rng_state())
        assert all(torch.equal(states[0], state) for state in states)


@pytest.mark.parametrize("case", [odd_models, odd_inputs, checkpointing_around_blocks, shared_configs])
def test_attacks(pool, case):
    for knobs in (ALL_TO_ALL, RING):
        pool.run(2, case, knobs)


def resumes_in_other_modes(folder):
    """Two steps with sp=2, saved; on goes another copy of the run, on the ring, and without sp; all as if nothing had been."""
    batches, results = [batch_of("bert-classes", 4, seed) for seed in range(4)], []
    knobs = dict(precision="fp32", lr=0.01, max_norm=0.5)

    def train(engine, batches):
        for batch in batches:
            first = 2 * engine.dp.rank
            engine.forward_backward(rows(batch, first, first + 2) if engine.dp.world_size > 1 else batch, 1, own_loss)
            engine.step()
        return engine

    whole = train(Hybrid(build("bert-classes"), **knobs, **ALL_TO_ALL), batches)
    train(Hybrid(build("bert-classes"), **knobs, **ALL_TO_ALL), batches[:2]).save(folder)
    for other in (ALL_TO_ALL, RING, {}):
        engine = Hybrid(build("bert-classes", seed=5), **knobs, **other)
        engine.load(folder)
        train(engine, batches[2:])
        results.append({name: p.clone() for name, p in engine.named_parameters()})
    for name, p in whole.named_parameters():
        assert torch.equal(results[0][name], p), name
        close(results[1][name], p)
        close(results[2][name], p)


@pytest.mark.parametrize("ranks, case, mode", [
    (3, ring_beside_whole, []), (2, masks_of_own_tokens, ["all_to_all"]), (2, masks_of_own_tokens, ["ring"]),
    (2, computed_again, []),
    (2, memory_and_bytes_of_own_tokens, ["all_to_all"]), (4, memory_and_bytes_of_own_tokens, ["all_to_all"]),
    (2, memory_and_bytes_of_own_tokens, ["ring"]), (4, memory_and_bytes_of_own_tokens, ["ring"]), (2, refusals_of_own_tokens, [])])
def test_own_tokens(pool, ranks, case, mode):
    pool.run(ranks, case, *mode)


def test_own_tokens_resume(pool, tmp_path):
    pool.run(2, resumes_in_other_modes, str(tmp_path / "checkpoint"))
