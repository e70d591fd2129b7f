"""What is particular to hybrid.py's sequence parallelism: tokens divided between tp ranks (split_gather).

Compared as in test_hybrid.py: one process in float64 at 1e-10, every rank's own part of every parameter. Rows of 7 tokens, which
neither 2 nor 4 ranks divide, with right-hand padding. Two and four CPU ranks; about 20 s.
"""
import copy

import pytest
import torch
import torch.distributed as dist
from models import raises, random
from test_contract import close
from test_hybrid import batch_of, beside_one_process, build, own_loss, plain_norms
from test_pipeline import beside_one_process as stages_beside_one_process
from torch import nn

from hybrid import Hybrid

DIVIDED = dict(sp_mode="split_gather")
OTHERS = ["gpt2-classes", "llama-classes", "mistral", "gemma", "phi3", "gptj", "llama-mqa"]
KINDS = ["bert-classes", "bert", "gpt2", "llama", "qwen3", "neox"]


def with_copies():
    beside_one_process(["bert-classes", "gpt2"], 2, **DIVIDED)
    stages_beside_one_process(["gpt2", "llama-classes"], pp=2, tp=2, **DIVIDED)


def test_two_ranks(pool):
    pool.run(2, beside_one_process, ["bert-classes", "gpt2", "qwen3"], 2, **DIVIDED)


def test_two_copies_and_two_stages_of_two_ranks(pool):
    pool.run(4, with_copies)


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


def kept(**knobs):
    """Bytes that autograd keeps of what is as wide as hidden states, in one forward of BERT without dropout."""
    model, storages = build("bert-classes", num_hidden_layers=4), {}
    engine = Hybrid(model, precision="fp32", tp=2, **knobs)
    weights = {p.data_ptr() for p in model.parameters()}

    def pack(t):
        if t.is_floating_point() and t.ndim == 3 and t.shape[-1] == 16 and t.data_ptr() not in weights:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    batch = batch_of("bert-classes", 8, 0, length=16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = own_loss(engine(**batch), batch)
    total = sum(storages.values())
    engine.backward(loss)
    engine.step()
    return total, engine.traffic


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
    for knobs in (dict(sp=2), dict(tp=2, sp_mode="ring"), dict(tp=2, sp_mode="all_to_all")):
        with raises(NotImplementedError, "sp"):
            Hybrid(model, precision="fp32", **knobs)
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
