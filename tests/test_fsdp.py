"""What is particular to fsdp.py: units of all shapes, gathers counted, stray reads, models built on meta, memory limits.

Compared: one process in float64 at 1e-10 (as test_contract.py, which asks every strategy the same), gathers of each unit and bytes
sent with the formulas of the docstring, live storages with root and units, engines built on meta with those of real models bit for
bit. Whatever is not supported must be an error that names parameter or unit, with the process alive and a good step after it.
Two to four CPU ranks; about 80 s, the sweep six minutes more.
"""
import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import io
import json
import os
import pathlib
import pickle
import random as random_module
import resource
import shutil
import struct
import weakref
from datetime import timedelta

import pool as pool_module
import pytest
import torch
import torch.distributed as dist
from models import Reference, assert_same_on_all_ranks, build, global_batch, raises, random, tiny_hf, two_groups
from test_contract import LivePeak, close
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp import DDP
from fsdp import FSDP, CheckpointError, tensors_in
from zero import Zero

ADAM = dict(lr=0.01, eps=1e-3, max_norm=0.5, precision="fp32")


# ---- 1. units of all shapes -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """What the default takes for a unit: a child of a ModuleList, having children."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    """Units in a ModuleList and a head in the root; `order`: which are called."""

    def __init__(self, block=Block, order=(0, 1, 2, 3)):
        super().__init__()
        self.blocks, self.head, self.order = nn.ModuleList(block() for _ in range(4)), nn.Linear(7, 3), order

    def forward(self, x):
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x)


@dataclasses.dataclass
class Outputs:
    h: torch.Tensor
    more: list


class Thing:
    def __init__(self, h):
        self.h = h


class Several(Block):
    """Two tensors in a container, beside what is no tensor; arguments of all kinds."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x, scale, *, note):
        h = super().forward(x) * scale
        g = torch.tanh(self.a(h))
        assert note in ("text", None)
        return {"tuple": (h, g, None, 3), "dict": dict(h=h, g=g, n=3), "dataclass": Outputs(h, [g]), "object": Thing([h, {"g": g}]),
                "nested": [(h,), {"k": (g, "text")}]}[self.how]


class SeveralNet(Net):
    def __init__(self, how, drop_first=False):
        super().__init__(lambda: Several(how))
        self.how, self.drop_first = how, drop_first

    def forward(self, x):
        total = 0
        for i, block in enumerate(self.blocks):
            h, g = [t for t in tensors_in(block(x, 0.5, note="text") if i % 2 else block(x, scale=torch.tensor(2.0), note=None))]
            x, total = (g if self.drop_first else h), total + g
        return self.head(x) + (0 if self.drop_first else total[:, :3])


class Identity(Block):
    def forward(self, x):
        return x


class Calls(Block):
    """Its forward calls another unit, which is not its child."""

    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def forward(self, x):
        return self.b(torch.tanh(self.other[0](self.a(x))))


class CallsNet(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1], self.blocks[3] = Calls(self.blocks[0]), Calls(self.blocks[2])

    def forward(self, x):
        x = self.blocks[1](x)
        return self.head(self.blocks[3](x) + self.blocks[0](x))


class TwoParents(nn.Module):
    def __init__(self):
        super().__init__()
        shared = Block()
        self.one, self.two, self.head = nn.ModuleList([shared, Block()]), nn.ModuleList([Block(), shared]), nn.Linear(7, 3)

    def forward(self, x):
        for block in (*self.one, *self.two):
            x = block(x)
        return self.head(x)


class SharedInside(Net):
    """A Linear of two units, and a weight of two units: they belong to the root."""

    def __init__(self):
        super().__init__()
        self.blocks[1].a = self.blocks[0].a
        self.blocks[2].b.weight = self.blocks[1].b.weight


class Frozen(Net):
    def __init__(self, *which):
        super().__init__()
        for name in which:
            self.get_submodule(name).requires_grad_(False)


class OneBias(Net):
    """All frozen but one bias in the middle."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.blocks[1].a.bias.requires_grad_(True)


class Odds(nn.Module):
    """0-d, smaller than the world, zero elements."""

    def __init__(self):
        super().__init__()
        self.scale, self.one = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.ones(1))
        self.empty, self.inner = nn.Linear(7, 0), nn.Linear(7, 7, bias=False)

    def forward(self, x):
        return torch.cat([torch.tanh(self.inner(x)) * self.scale + self.one, self.empty(x)], 1)


class ScaleOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.3)), nn.Linear(7, 0)

    def forward(self, x):
        return torch.cat([x * self.scale, self.empty(x)], 1)


class EmptyOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.empty = nn.Linear(7, 0)

    def forward(self, x):
        return torch.cat([x, self.empty(x)], 1)


class Varies(Net):
    """Another way through the units in each step."""

    def forward(self, x):
        self.calls = getattr(self, "calls", -1) + 1
        self.order = [(0, 2), (1, 3), (3, 2, 1, 0), (0, 1)][self.calls % 4]
        return super().forward(x)


class InVain(Net):
    """Units whose output nobody uses."""

    def forward(self, x):
        self.blocks[1](x), self.blocks[3](x)
        return self.head(self.blocks[2](self.blocks[0](x)))


class Detached(Net):
    """No unit's input has a gradient in the middle; and none is made for the first two at all."""

    def __init__(self, no_grad):
        super().__init__()
        self.no_grad = no_grad

    def forward(self, x):
        with torch.no_grad() if self.no_grad else contextlib.nullcontext():
            x = self.blocks[1](self.blocks[0](x)).detach()
        return self.head(self.blocks[3](self.blocks[2](x)))


class Branches(Net):
    def forward(self, x):
        b = self.blocks
        return self.head(b[0](x) + b[1](x) * b[2](x) + b[3](b[0](x)))


class InPlace(Net):
    """The root changes a unit's output in place; so does a hook of the user."""

    def __init__(self):
        super().__init__()
        self.blocks[1].register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x += 1
            x.mul_(0.9)
        return self.head(x)


class Weights(Block):
    """A unit's output is made of its weights alone."""

    def forward(self, x):
        return self.a.weight * 2 + self.b.weight


class WeightsNet(Net):
    def __init__(self):
        super().__init__()
        self.blocks[0] = Weights()

    def forward(self, x):
        weight = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x) + nn.functional.linear(x, weight)[:, :3]


class Alone(nn.Module):
    """All of it is the root."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Headless(Net):
    """The root has no parameter."""

    def __init__(self):
        super().__init__()
        self.head = nn.Tanh()


class OnFirst(Net):
    """A unit between detached ones has its gradient; units inside Sequentials inside a Sequential: the outermost ones."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Tanh()), nn.Linear(7, 7))

    def forward(self, x):
        return self.head(self.blocks(x))


IN_VAIN = {"in vain": [0, 0, 0, 0, 1], "detached": [0, 0, 1, 0, 0]}  # gathered ahead in backward, which does not come to them
UNITS = {  # kind: (model, gathers of the root and of each unit per micro-batch; the root's are per step)
    "plain": (Net, [1, 2, 2, 2, 2]),
    **{f"outputs in a {how}": (functools.partial(SeveralNet, how), [1, 2, 2, 2, 2])
       for how in ("tuple", "dict", "dataclass", "object", "nested")},
    "second output alone": (lambda: SeveralNet("tuple", drop_first=True), [1, 2, 2, 2, 2]),
    "identity": (lambda: Net(Identity), [1, 1, 1, 1, 1]),
    "calls another": (CallsNet, [1, 4, 2, 2, 2]),
    "two parents": (TwoParents, [1, 2, 2]),
    "shared inside": (SharedInside, [1, 2, 2, 2, 2]),
    "unused": (lambda: Net(order=(0, 2)), [1, 2, 0, 2, 0]),
    "twice": (lambda: Net(order=(0, 0, 1)), [1, 3, 2, 0, 0]),
    "twice, apart": (lambda: Net(order=(0, 1, 0, 2, 1, 3, 0)), [1, 6, 4, 2, 2]),
    "in vain": (InVain, [1, 2, 1, 2, 1]),
    "varies": (Varies, None),
    "detached": (lambda: Detached(False), [1, 1, 1, 2, 2]),
    "no_grad": (lambda: Detached(True), [1, 1, 1, 2, 2]),
    "branches": (Branches, [1, 4, 2, 2, 2]),
    "in place": (InPlace, [1, 2, 2, 2, 2]),
    "weights": (WeightsNet, [1, 2, 2, 2, 2]),
    "first frozen": (lambda: Frozen("blocks.0"), [1, 1, 2, 2, 2]),
    "middle frozen": (lambda: Frozen("blocks.1", "blocks.2"), [1, 2, 2, 2, 2]),
    "last frozen": (lambda: Frozen("blocks.3"), [1, 2, 2, 2, 2]),
    "head frozen": (lambda: Frozen("head"), [1, 2, 2, 2, 2]),
    "units frozen": (lambda: Frozen("blocks"), [1, 1, 1, 1, 1]),
    "one bias": (OneBias, [1, 1, 2, 2, 2]),
    "odd sizes": (lambda: Net(Odds), [1, 2, 2, 2, 2]),
    "one element": (lambda: Net(ScaleOnly), [1, 2, 2, 2, 2]),
    "no element": (lambda: Net(EmptyOnly), [1, 2, 2, 2, 2]),
    "root alone": (Alone, [1]),
    "headless": (Headless, [1, 2, 2, 2, 2]),
    "sequentials": (OnFirst, [1, 2, 2]),
}


def square_loss(output, *_):
    """Rows stay apart, so that the loss of all ranks' rows is the mean of theirs."""
    return sum(t.square().mean() for t in tensors_in(output) if t.is_floating_point())


def start(make=Net, seed=0, **knobs):
    """An engine, and one process with the same weights."""
    torch.manual_seed(seed)
    model = make().double()
    reference = Reference(model, None, ADAM["max_norm"], lr=0.01, eps=1e-3)
    return FSDP(model, **{**ADAM, **knobs}), reference


def share(x, n=4):
    return x[n * dist.get_rank() : n * dist.get_rank() + n]


def batch_of(step, n=4):
    return random(n * dist.get_world_size(), 7, seed=step)


def all_sharded(engine):
    assert {f.full.untyped_storage().nbytes() for f in engine.flats} == {0}
    assert {u.state for u in engine.units} == {"sharded"} and not engine._running


def same_gradients(engine, reference):
    for n, p in reference.model.named_parameters():
        if p.requires_grad:
            close(engine.full_grad(n), torch.zeros_like(p) if p.grad is None else p.grad)


def same_weights(engine, reference):
    with engine.gathered() as model:
        for (n, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-10, atol=1e-10, msg=lambda m, n=n: f"{n}: {m}")


def good_steps(engine, reference, seed=77, steps=2, micro_batches=1, loss=square_loss):
    """Steps equal to one process, units empty after each. Returns the gathers of the last one."""
    for step in range(seed, seed + steps):
        x, before = batch_of(step), [u.gathers for u in engine.units]
        expected = loss(reference.model(x))
        expected.backward()
        close(engine.forward_backward(share(x), micro_batches, loss), expected.detach())
        all_sharded(engine)
        same_gradients(engine, reference)
        reference.step()
        engine.step()
        gathers = [u.gathers - b for u, b in zip(engine.units, before)]
    same_weights(engine, reference)
    all_sharded(engine)
    return gathers


def units_of_all_shapes(kinds, micro_batches=1, **knobs):
    for kind in kinds:
        make, gathers = UNITS[kind]
        engine, reference = start(make, **knobs)
        found = good_steps(engine, reference, steps=4, micro_batches=micro_batches)
        if gathers:
            if knobs.get("prefetch", True):
                gathers = [a + b for a, b in zip(gathers, IN_VAIN.get(kind, [0] * 5))]
            assert found == [gathers[0], *[g * micro_batches for g in gathers[1:]]], (kind, found)


@pytest.mark.parametrize("ranks, micro_batches, knobs", [
    (2, 1, {}), *[pytest.param(*case, marks=pytest.mark.sweep) for case in ((2, 1, dict(prefetch=False)), (3, 2, {}))],
    *[pytest.param(ranks, k, knobs, marks=pytest.mark.sweep) for ranks in (1, 4) for k in (1, 2)
      for knobs in ({}, dict(prefetch=False), dict(reduce_each=False), dict(offload=True))]], ids=str)
def test_units_of_all_shapes(pool, ranks, micro_batches, knobs):
    kinds = [k for k in UNITS if k not in ("twice, apart", "varies") or micro_batches == 1]
    if ranks == 1:
        kinds.remove("weights")  # its output has no rows; with one rank and two micro-batches that is another loss
    pool.run(ranks, units_of_all_shapes, kinds, micro_batches, limit_s=120, **knobs)


def once(micro_batches, **knobs):
    """reshard=False: one gather, of the root one in a step."""
    for kind in ("plain", "unused", "outputs in a dict", "shared inside", "units frozen", "odd sizes"):
        engine, reference = start(UNITS[kind][0], reshard=False, **knobs)
        found = good_steps(engine, reference, micro_batches=micro_batches)
        assert found == [1, *[micro_batches if g else 0 for g in UNITS[kind][1][1:]]], (kind, found)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_without_resharding_there_is_one_gather(pool, micro_batches):
    pool.run(2, once, micro_batches)


class RandomGraph(Net):
    """A program of random calls of units, of sums, of detours through checkpoints, detached or without gradients."""

    def __init__(self, seed):
        super().__init__()
        dice = random_module.Random(seed)
        for block in self.blocks:
            if dice.random() < 0.2:
                block.requires_grad_(False)
        kinds = ["call"] * 5 + ["checkpoint", "checkpoint two", "detach", "no_grad", "in vain"]
        self.program = [(dice.choice(kinds), *[dice.randrange(high) for high in (4, 4, 100, 100)])
                        for _ in range(dice.randrange(3, 9))]

    def forward(self, x):
        found = [x]
        for what, i, j, left, right in self.program:
            one, two, x = self.blocks[i], self.blocks[j], found[left % len(found)] + found[right % len(found)]
            if what == "checkpoint":
                found.append(checkpoint(one, x, use_reentrant=False))
            elif what == "checkpoint two":
                found.append(checkpoint(lambda h, one=one, two=two: two(one(h)), x, use_reentrant=False))
            elif what == "no_grad":
                with torch.no_grad():
                    found.append(one(x))
            elif what == "in vain":
                one(x)
            else:
                found.append(torch.tanh(one(x)))
                if what == "detach":
                    found[-1] = found[-1].detach()
        return self.head(torch.tanh(sum(found[-3:])))


def random_graphs(seeds, **knobs):
    for seed in seeds:
        engine, reference = start(lambda seed=seed: RandomGraph(seed), **knobs)
        good_steps(engine, reference, micro_batches=1 + seed % 2)


@pytest.mark.parametrize("ranks, seeds, knobs", [
    (2, range(12), {}), (3, range(12, 18), dict(reshard=False)),
    *[pytest.param(ranks, range(20 * k, 20 * k + 20), knobs, marks=pytest.mark.sweep) for ranks in (2, 4)
      for k, knobs in enumerate([{}, dict(prefetch=False), dict(reduce_each=False), dict(reshard=False)], 1)]], ids=str)
def test_random_graphs(pool, ranks, seeds, knobs):
    pool.run(ranks, random_graphs, seeds, limit_s=120, **knobs)


def wrapped():
    def names(wrap):
        engine, reference = start(wrap=wrap)
        good_steps(engine, reference)
        return [u.name for u in engine.units]

    linears = [f"blocks.{i}.{ab}" for i in range(4) for ab in "ab"]
    assert names("Block,Linear") == ["the root", *[f"blocks.{i}" for i in range(4)], "head"]  # the outermost ones
    assert names(["Linear"]) == ["the root", *linears, "head"]
    assert names(lambda module: False) == ["the root"]
    for wrap in ("Blok", ["Block", "Blok"]):
        with raises(ValueError, "wrap", "Blok", "Linear, ModuleList, Net"):
            FSDP(Net(), wrap=wrap)
    with raises(ValueError, "keep_fp32", "Norm"):
        FSDP(Net(), keep_fp32="Norm")


def test_wrap(pool):
    pool.run(2, wrapped)


class Differs(Net):
    """Another way on rank 1."""

    def __init__(self, how):
        super().__init__()
        self.how, self.rank = how, dist.get_rank()

    def forward(self, x):
        if self.rank != 1 or self.how == "detached":
            for i, block in enumerate(self.blocks):
                x = block(x.detach() if self.rank == 1 and i == 2 else x)
        for i in dict(unused=(0, 2, 3), swapped=(0, 2, 1, 3)).get(self.how, ()) if self.rank == 1 else ():
            x = self.blocks[i](x)
        return self.head(x)


def only_some_ranks(how):
    """Right, or an error within the group's time that names a unit."""
    engine, reference = start(lambda: Differs(how), group=dist.new_group(timeout=timedelta(seconds=2)))
    x, n = batch_of(0), dist.get_world_size()
    for reference.model.rank in range(n):
        (square_loss(reference.model(x.view(n, 4, 7)[reference.model.rank])) / n).backward()
    try:
        engine.forward_backward(share(x), 1, square_loss)
        same_gradients(engine, reference)
    except RuntimeError as error:
        return str(error)
    return "right, blocks.0 to blocks.3"


@pytest.mark.parametrize("how", ["unused", "detached", pytest.param("swapped", marks=pytest.mark.sweep)])  # as test_contract.py's
def test_case_10_units_that_some_ranks_run(pool, how):
    messages = pool.run(2, only_some_ranks, how)
    assert any("blocks." in message for message in messages), messages  # the other one may have lost its connection by then


# ---- 2. activation checkpointing --------------------------------------------------------------------------------------------


class Checkpointing(Net):
    def __init__(self, around, use_reentrant, frozen_norm=False):
        super().__init__()
        self.around, self.use_reentrant = around, use_reentrant
        if frozen_norm:  # case 12
            for i in range(4):
                self.blocks[i].a = nn.Sequential(nn.LayerNorm(7).requires_grad_(False), nn.Linear(7, 7))

    def forward(self, x):
        ckpt, b = functools.partial(checkpoint, use_reentrant=self.use_reentrant), self.blocks
        if self.use_reentrant:
            x = x.clone().requires_grad_()
        if self.around == "inside":
            for block in b:
                x = x + ckpt(lambda h, block=block: block.b(torch.tanh(block.a(h))), x)  # by the root, of a part of the unit
        elif self.around == "a unit":
            for block in b:
                x = ckpt(block, x)
        elif self.around == "two units":
            x = ckpt(lambda h: b[3](b[2](h)), ckpt(lambda h: b[1](b[0](h)), x))
        elif self.around == "all":
            x = ckpt(lambda h: b[3](b[2](b[1](b[0](h)))), x)
        elif self.around == "each other":
            x = ckpt(lambda h: ckpt(b[3], ckpt(b[2], b[1](b[0](h)))), x)
        elif self.around == "a unit, again":
            for i in (0, 1, 0, 2):
                x = ckpt(b[i], x)
        elif self.around == "everything":
            return ckpt(lambda h: self.head(b[1](b[0](h))), x)
        return self.head(x)


class CheckpointInside(Block):
    """Case 52: FSDP(checkpoint(x)); the others here are checkpoint(FSDP(x))."""

    use_reentrant = False

    def forward(self, x):
        return x + checkpoint(lambda h: self.b(torch.tanh(self.a(h))), x, use_reentrant=self.use_reentrant)


class CheckpointInsideReentrant(CheckpointInside):
    use_reentrant = True


class Needs(Net):
    """Reentrant checkpointing needs an input with a gradient."""

    def forward(self, x):
        return super().forward(x.clone().requires_grad_())


AROUND = ["a unit", "two units", "all", "each other", "a unit, again", "everything"]


def checkpointed(use_reentrant, micro_batches, **knobs):
    inside = CheckpointInsideReentrant if use_reentrant else CheckpointInside
    cases = {"inside": lambda: Needs(inside)}
    cases |= {around: functools.partial(Checkpointing, around, use_reentrant) for around in AROUND}
    cases |= {f"{around}, frozen norm": functools.partial(Checkpointing, around, use_reentrant, True)
              for around in ("a unit", "two units")}
    for case, make in cases.items():
        engine, reference = start(make, **knobs)
        try:
            root, *found = good_steps(engine, reference, micro_batches=micro_batches)
        except RuntimeError as error:  # case 14: the gradients of a unit that is called twice arrive twice, the first time in part
            assert use_reentrant and "again" in case and "blocks.0" in str(error) and "use_reentrant=False" in str(error), error
            all_sharded(engine)
            continue
        calls = dict(everything=[1, 1, 0, 0]).get(case, [2, 1, 1, 0] if "again" in case else [1] * 4)
        once_more = 0 if case == "inside" or case.startswith("a unit,") and "again" not in case or case == "a unit" else 1
        assert root == 1
        for gathers, n in zip(found, calls):  # for forward, and for backward: once, or once to recompute and once more
            low, high = (1 if "reshard" in knobs else 2) * n, (2 + once_more) * n
            if case == "each other" and use_reentrant:
                high += 1  # a checkpoint in a checkpoint is recomputed twice
            assert (low if n == 1 else n) * micro_batches <= gathers <= high * micro_batches, (case, found)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("micro_batches, knobs", [(1, {}), (2, dict(reshard=False)), pytest.param(
    1, dict(prefetch=False), marks=pytest.mark.sweep), pytest.param(2, dict(reduce_each=False), marks=pytest.mark.sweep)], ids=str)
def test_cases_12_14_51_52_checkpointing(pool, use_reentrant, micro_batches, knobs):
    pool.run(2, checkpointed, use_reentrant, micro_batches, **knobs)


# ---- 3. models of Hugging Face and torchvision ------------------------------------------------------------------------------


def hf_model(kind, device=None):
    """Tiny, without dropout, in fp32, from one seed; everything that is random is drawn on `device`."""
    import transformers as hf
    small = dict(vocab_size=61, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=30)
    causal = dict(small, num_key_value_heads=1, max_position_embeddings=32)
    makers = {
        "bert": lambda: tiny_hf("bert"), "bert-mlm": lambda: tiny_hf("bert-mlm"), "gpt2": lambda: tiny_hf("gpt2"),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**causal)),
        "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**causal, head_dim=10)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**causal, num_local_experts=4, output_router_logits=True,
                                                                  router_aux_loss_coef=1.0, experts_implementation="eager")),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=61, d_model=20, d_kv=10, d_ff=30, num_layers=2, num_decoder_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0)),
        "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(
            vocab_size=61, d_model=20, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=30, decoder_ffn_dim=30, max_position_embeddings=32, dropout=0.0)),
    }
    torch.manual_seed(0)
    with torch.device(device or "cpu"):
        return makers[kind]()


def hf_batch(kind, seed, n=4):
    """labels of `bert` are classes, of the others tokens."""
    labels = random(n, high=2, seed=100 + seed) if kind == "bert" else random(n, 11, high=60, seed=100 + seed) + 1
    return dict(input_ids=random(n, 11, high=60, seed=seed) + 1, labels=labels)


def hf_families(kind, checkpointing=None, more=False):
    """Beside the plain model, each rank's loss taken apart, as the causal ones are means over tokens. `more`: the loss is also made
    of hidden states and attention weights, which transformers collects with hooks. Losses and rotary tables are computed in fp32
    by transformers whatever the model's precision: 1e-5."""
    model = hf_model(kind).double()
    extra = {}
    if more:
        model.set_attn_implementation("eager")
        extra = dict(output_hidden_states=True, output_attentions=True)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(dict(use_reentrant=checkpointing))
    model.train()
    plain = copy.deepcopy(model)
    engine = FSDP(model, **ADAM)
    assert len(engine.units) == 1 + {"bert-mlm": 1, "t5": 4, "bart": 4}.get(kind, 2)

    def loss_of(m, batch):
        output = m(**batch, **extra)
        collected = [*output.hidden_states, *output.attentions] if more else []
        return output.loss.double() + sum(h.square().mean() for h in collected)

    n, gathers = dist.get_world_size(), [u.gathers for u in engine.units]
    for step in range(2):
        batches = [hf_batch(kind, 10 * step + r) for r in range(n)]
        for batch in batches:
            (loss_of(plain, batch) / n).backward()
        engine.backward(loss_of(engine, batches[dist.get_rank()]))
        all_sharded(engine)
        for name, p in plain.named_parameters():
            close(engine.full_grad(name), torch.zeros_like(p) if p.grad is None else p.grad, 1e-5)
        plain.zero_grad()
        engine.zero_grad()
    root, *found = [(u.gathers - g) / 2 for u, g in zip(engine.units, gathers)]
    assert root == 1 and (set(found) == {2} if checkpointing is None else set(found) <= {2, 3}), found


@pytest.mark.parametrize("kind, more", [
    ("bert", True), ("gpt2", True), ("t5", False), ("llama", False), ("mixtral", False),
    pytest.param("bart", False, marks=pytest.mark.sweep), pytest.param("gemma2", False, marks=pytest.mark.sweep)])
def test_families(pool, kind, more):
    pool.run(2, hf_families, kind, None, more)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["bert-mlm", "gpt2", pytest.param("t5", marks=pytest.mark.sweep),
                                  pytest.param("llama", marks=pytest.mark.sweep)])
def test_families_with_checkpointing(pool, kind, use_reentrant):
    pool.run(2, hf_families, kind, use_reentrant)


def generates():
    """generate() of a tied GPT-2, its cache in use, before and after a step; and with the weights whole."""
    model = hf_model("gpt2").double()
    plain = copy.deepcopy(model)
    engine = FSDP(model, **ADAM)
    prompt = hf_batch("gpt2", 0)["input_ids"][:, :4]
    for step in range(2):
        expected = plain.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert expected.shape == (4, 10)
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0), expected)
        engine.backward(engine(**hf_batch("gpt2", step)).loss.double())
        engine.step()
        with engine.gathered() as gathered:
            plain.load_state_dict(gathered.state_dict())


def test_generate(pool):
    pool.run(2, generates)


def resnet():
    import torchvision
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    engine = FSDP(model, precision="bf16", lr=1e-3)
    assert [u.name for u in engine.units] == ["the root", *[f"layer{i}.{j}" for i in range(1, 5) for j in (0, 1)]]
    r, losses = dist.get_rank(), []
    batch = random(4, 3, 32, 32, seed=r, dtype=torch.float32), random(4, high=10, seed=r)
    for _ in range(4):
        losses.append(engine.forward_backward(batch, 1, lambda out, b: nn.functional.cross_entropy(out.float(), b[1])).item())
        engine.step()
    assert losses[3] < losses[2] < losses[1] < losses[0] and losses[3] < 0.5, losses
    assert [u.gathers for u in engine.units] == [4, *[8] * 8]
    assert {str(f.full.dtype) for u in engine.units for f in u.flats} == {"torch.bfloat16", "torch.float32"}  # BatchNorm
    assert model.bn1.running_mean.dtype == torch.float32 and model.bn1.num_batches_tracked == 4
    assert_same_on_all_ranks(model.buffers())


def test_resnet_in_bf16(pool):
    pool.run(2, resnet)


# ---- 4. peaks of memory -----------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Two matrices, so that the default takes it for a unit: 1 MiB in fp32."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(362, 362, bias=False), nn.Linear(362, 362, bias=False)

    def forward(self, x):
        return torch.tanh(self.b(torch.tanh(self.a(x))))


class Eight(nn.Module):
    """Eight equal units; the root has half as much. `frozen`: every second one."""

    def __init__(self, frozen=False):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Wide() for _ in range(8)), nn.Linear(362, 362, bias=False)
        for i in range(1, 8, 2) if frozen else ():
            self.blocks[i].requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def peak_of_eight(precision, frozen):
    torch.manual_seed(0)
    n, width = dist.get_world_size(), 2 if precision == "bf16" else 4
    engine = FSDP(Eight(frozen), precision=precision)
    unit = 2 * 362 * 362 * width
    numel = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    all_numel = sum(p.numel() for p in engine.module.parameters())
    for _ in range(3):
        kept = [t for f in engine.flats for t in (f.master, f.store, f.shard) if t is not None]
        kept += [t for f in engine.fragments for t in (f.exp_avg, f.exp_avg_sq)]
        with LivePeak(kept) as forward:
            loss = engine(torch.randn(1, 362)).float().square().mean()
        with LivePeak(kept) as backward:
            engine.backward(loss)
        after = sum(sum(d.values()) for d in engine.memory().values())
        engine.step()
        between = sum(sum(d.values()) for d in engine.memory().values())
    slack = 2**17 + 50 * 362 * 4  # pieces of 64 KiB in which sums are made, activations of one sample
    assert 0 <= forward.peak - 2.5 * unit <= slack < unit / 2, forward.peak / unit
    # root and its gradients, two units and two units' gradients, what gloo receives; the sum of a frozen unit is nobody's
    bound = 5 * unit + (n - 1) / n * unit + slack
    assert 3 * unit <= backward.peak <= bound, (backward.peak / unit, bound / unit)
    if not frozen:
        assert backward.peak >= 4.5 * unit
    kept_width = 12  # master and moments, or weights that are their own masters, and moments
    frozen_bytes = (all_numel - numel) * width / n
    assert abs(between - kept_width * numel / n - frozen_bytes) <= 0.01 * between
    assert abs(after - (kept_width + width) * numel / n - frozen_bytes) <= 0.01 * after
    return backward.peak / unit


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks, frozen", [(2, False), (2, True), pytest.param(4, False, marks=pytest.mark.sweep)])
def test_case_49_peak_of_eight_units(pool, precision, ranks, frozen):
    """Without activation checkpointing: what autograd keeps of a unit is empty until it is needed."""
    pool.run(ranks, peak_of_eight, precision, frozen)


# ---- 5. stray reads ---------------------------------------------------------------------------------------------------------


NAMED = [  # what reads a weight: an error that names the parameter and its unit
    lambda m, p, x: sum(q.square().sum() for q in m.parameters()), lambda m, p, x: nn.functional.linear(x, p),
    lambda m, p, x: torch.nn.utils.parameters_to_vector(m.parameters()), lambda m, p, x: x @ p, lambda m, p, x: x * p[0],
    lambda m, p, x: torch.save(m.state_dict(), io.BytesIO()), lambda m, p, x: {k: v.sum() for k, v in m.state_dict().items()},
    lambda m, p, x: copy.deepcopy(m), lambda m, p, x: copy.copy(p), lambda m, p, x: copy.deepcopy(p),
    lambda m, p, x: p.data, lambda m, p, x: p.detach(), lambda m, p, x: p.detach().numpy(), lambda m, p, x: p.numpy(),
    lambda m, p, x: p.tolist(), lambda m, p, x: list(p), lambda m, p, x: p[0, 0], lambda m, p, x: bool(p), lambda m, p, x: p == p,
    lambda m, p, x: torch.equal(p, p), lambda m, p, x: setattr(p, "data", torch.zeros(7, 7)), lambda m, p, x: nn.init.zeros_(p),
    lambda m, p, x: p.untyped_storage(), lambda m, p, x: p.data_ptr(), lambda m, p, x: p.to(torch.float32),
    lambda m, p, x: p.half(), lambda m, p, x: p.cpu(), lambda m, p, x: p.T,
    lambda m, p, x: p.view(-1), lambda m, p, x: torch.isnan(p).any(),
    lambda m, p, x: torch.cat([torch.zeros(1, 7).double(), p]), lambda m, p, x: torch._foreach_norm([p]),
    lambda m, p, x: torch.einsum("bi,oi->bo", x, p), lambda m, p, x: torch.add(torch.ones(7, 7), 1, out=p),
    lambda m, p, x: torch.ops.aten.sum(p), lambda m, p, x: torch._C._nn.linear(x, p), lambda m, p, x: dist.all_reduce(p),
    lambda m, p, x: nn.Parameter(p), lambda m, p, x: m.to(torch.float32), lambda m, p, x: m.half(),
    lambda m, p, x: m.share_memory(),
    lambda m, p, x: m.blocks[0].a(x), lambda m, p, x: torch.optim.swa_utils.AveragedModel(m),
    lambda m, p, x: m.load_state_dict(Net().double().state_dict()), lambda m, p, x: m.blocks.apply(zero_weights),
]
FATAL = {  # these read memory in C++ without asking the tensor's class
    "tensor": lambda m, p, x: torch.tensor(p), "subclass": lambda m, p, x: p.as_subclass(torch.Tensor).sum(),
    "vmap": lambda m, p, x: torch.vmap(lambda w: w.sum())(p),
}
ANSWERED = [  # what needs no weight
    lambda m, p, x: p.shape == (7, 7) and p.dtype == torch.float64 and p.requires_grad and p.is_leaf and p.ndim == 2,
    lambda m, p, x: p.grad is None and p.numel() == 49 and len(p) == 7 and p.size(0) == 7 and p.stride() == (7, 1),
    lambda m, p, x: isinstance(p, nn.Parameter) and torch.is_tensor(p) and hash(p) == hash(p) and str(p.device) == "cpu",
    lambda m, p, x: [n for n, _ in m.named_parameters()][:2] == ["blocks.0.a.weight", "blocks.0.a.bias"],
    lambda m, p, x: sum(q.numel() for q in m.parameters()) == 472, lambda m, p, x: "blocks.0.a.weight" in repr(p),
    lambda m, p, x: "(7, 7)" in str(p), lambda m, p, x: "sharded" in f"{p}", lambda m, p, x: "Linear" in repr(m),
    lambda m, p, x: m.zero_grad() is None, lambda m, p, x: m.train() is m.eval().train(),
]


def zero_weights(module):
    if hasattr(module, "weight"):
        nn.init.zeros_(module.weight)


def strays():
    engine, reference = start()
    good_steps(engine, reference)
    model, p, x = engine.module, engine.module.blocks[0].a.weight, share(batch_of(0))
    for i, read in enumerate(NAMED):
        try:
            read(model, p, x)
        except RuntimeError as error:
            assert "blocks.0.a.weight" in str(error) and "blocks.0, to which" in str(error), (i, error)
        else:
            raise AssertionError(f"read {i} went through")
    with raises(RuntimeError, "head.weight", "the root"):
        model.head(x)
    for i, ask in enumerate(ANSWERED):
        assert ask(model, p, x), i
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for q in model.parameters():
        q.grad = torch.zeros(q.shape, dtype=q.dtype)
    with raises(RuntimeError, "blocks.0.a.weight"):
        optimizer.step()
    assert all(q.grad is not None for q in model.parameters())
    optimizer.zero_grad()
    for dump in (lambda: torch.save(model, io.BytesIO()), lambda: pickle.dumps(model)):
        with pytest.raises((RuntimeError, AttributeError, pickle.PicklingError)):
            dump()
    close(model.blocks[0](x), reference.model.blocks[0](x))  # a unit may be called alone
    with torch.no_grad():
        close(model.blocks[2](x), reference.model.blocks[2](x))
    assert model.blocks[0].a.weight is p
    good_steps(engine, reference)


def test_case_54_stray_reads_are_errors(pool):
    pool.run(2, strays)


def fatal_read(how):
    engine, reference = start()
    with contextlib.suppress(RuntimeError):
        FATAL[how](engine.module, engine.module.blocks[0].a.weight, None)
    good_steps(engine, reference)


@pytest.mark.parametrize("how", FATAL)
def test_case_54_reads_past_the_class(pool, how):
    """An error or any value, but no end of the process."""
    pool.run(2, fatal_read, how)


class OfAnother(Net):
    def forward(self, x):
        return super().forward(x) + nn.functional.linear(x, self.blocks[0].a.weight)[:, :3]


class View(Block):
    """The output is memory of the weight itself."""

    def forward(self, x):
        return self.a.weight[0]


class ViewNet(WeightsNet):
    def __init__(self):
        super().__init__()
        self.blocks[0] = View()

    def forward(self, x):
        row = self.blocks[0](x)
        return self.head(self.blocks[1](x)) + row[:3]


class Aside(Block):
    """A tensor that does not leave as the output. `late`: made after it; `early`: before, but not on the way to it."""

    late, multiply = True, False

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x):
        side = lambda: x * self.scale if self.multiply else torch.tanh(self.a(x))
        if not self.late:
            self.side = side()
        y = super().forward(x) * self.scale
        if self.late:
            self.side = side()
        return y


class Early(Aside):
    late = False


class Multiplied(Aside):
    multiply = True


class FrozenAside(Aside):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class FrozenMultiplied(FrozenAside):
    multiply = True


class AsideNet(Net):
    def __init__(self, block, which):
        super().__init__(block)
        self.which, self.first = which, nn.Linear(7, 7)

    def forward(self, x):
        y = super().forward(self.first(x))
        return y + sum(self.blocks[i].side[:, :3] for i in self.which)


class Slots:
    __slots__ = ("h",)

    def __init__(self, h):
        self.h = h


class Hides(Block):
    """The output is in an object that nobody can look into."""

    def __init__(self, how):
        super().__init__()
        self.how, self.norm, self.scale = how, nn.LayerNorm(7), nn.Parameter(torch.ones(7))

    def forward(self, x):
        h = self.norm(super().forward(x)) * self.scale
        return Slots(h) if self.how == "slots" else lambda: h


class HidesNet(Net):
    def __init__(self, how):
        super().__init__(lambda: Hides(how))
        self.first = nn.Linear(7, 7)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            hidden = block(x)
            x = hidden.h if isinstance(hidden, Slots) else hidden()
        return self.head(x)


class Recursive(Block):
    def forward(self, x, depth=2):
        y = super().forward(x)
        return y if depth == 0 else self(y, depth - 1) + self.a(x)


BROKEN_RULES = {
    "another's weight": OfAnother, "a view": ViewNet, "recursion": lambda: Net(Recursive),
    **{f"{block.__name__} {which}": functools.partial(AsideNet, block, which)
       for block in (Aside, Early, Multiplied, FrozenAside, FrozenMultiplied) for which in ((0,), (1,), (3,), (0, 1, 2, 3))},
    **{how: functools.partial(HidesNet, how) for how in ("slots", "closure")},
}


def right_or_refused(kinds, **knobs):
    """Weights read outside their unit, results that leave it otherwise than as its output: right, or an error that names it."""
    for kind in kinds:
        engine, reference = start(BROKEN_RULES[kind], **knobs)
        try:
            good_steps(engine, reference)
        except RuntimeError as error:
            assert "blocks." in str(error), (kind, error)
            engine.zero_grad()
            all_sharded(engine)


@pytest.mark.parametrize("kinds", [[k for k in BROKEN_RULES if k.startswith(first)] for first in (
    "another", "a view", "recursion", "Aside", "Early", "Multiplied", "FrozenAside", "FrozenMultiplied", "slots", "closure")],
    ids=lambda kinds: kinds[0])
@pytest.mark.parametrize("prefetch", [True, False])
def test_case_54_what_leaves_a_unit_otherwise(pool, kinds, prefetch):
    pool.run(2, right_or_refused, kinds, prefetch=prefetch)


# ---- 6. any order of calls --------------------------------------------------------------------------------------------------


def looks_between(**knobs):
    """Evaluation between a training forward and its backward, before any step, direct calls of the module, inference_mode."""
    engine, reference = start(**knobs)
    for look in (torch.no_grad, torch.inference_mode):
        with look():
            close(engine(share(batch_of(3))), reference.model(share(batch_of(3))))
    all_sharded(engine)
    for step, look in enumerate((torch.no_grad, torch.inference_mode, torch.no_grad)):
        x, other = batch_of(step), share(batch_of(50 + step))
        loss = square_loss(engine.module(share(x)))
        with look():
            engine.eval()
            for _ in range(2):
                close(engine(other), reference.model(other))
            engine.train()
        with engine.gathered() as model:
            assert all(p.isfinite().all() for p in model.parameters())
        engine.backward(loss)
        square_loss(reference.model(x)).backward()
        all_sharded(engine)
        same_gradients(engine, reference)
        reference.step()
        engine.step()
    good_steps(engine, reference)


def losses_of_several(**knobs):
    """Two forwards before one backward (contrastive), two losses with a backward each, a loss and an output that stay alive, an
    output that is thrown away, an input that wants its gradient."""
    engine, reference = start(**knobs)
    alive = []
    for step in range(3):
        a, b = batch_of(step), batch_of(step + 30)
        pair = lambda f, a, b: (f(a) * f(b)).sum(1).mean()
        loss = pair(engine, share(a), share(b))
        pair(reference.model, a, b).backward()
        alive += [loss, engine(share(b))]
        engine.backward(loss)
        same_gradients(engine, reference)
        all_sharded(engine)
        engine(share(a))
        reference.step()
        engine.step()
    for step in range(3):
        a, b = batch_of(step), batch_of(step + 30)
        one, two = engine(share(a)), engine(share(b))
        with engine.no_sync():
            engine.backward(one.square().mean())
        engine.backward(two.sin().mean())
        reference.model(a).square().mean().backward()
        reference.model(b).sin().mean().backward()
        same_gradients(engine, reference)
        all_sharded(engine)
        reference.step()
        engine.step()
    x = batch_of(7).requires_grad_()
    mine = share(batch_of(7)).requires_grad_()
    square_loss(reference.model(x)).backward()
    engine.backward(square_loss(engine(mine)))
    close(mine.grad, share(x.grad))
    engine.zero_grad()
    reference.optimizer.zero_grad()
    good_steps(engine, reference)


def penalised(**knobs):
    """A penalty on the gradient of the input, and a derivative whose graph is thrown away."""
    engine, reference = start(**knobs)

    def loss(f, x):
        x = x.clone().requires_grad_()
        y = f(x)
        grad, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y.square().mean() + grad.square().sum(1).mean()

    for step in range(3):
        x = batch_of(step)
        loss(reference.model, x).backward()
        engine.backward(loss(engine, share(x)))
        same_gradients(engine, reference)
        all_sharded(engine)
        reference.step()
        engine.step()
    x = share(batch_of(0)).requires_grad_()
    plain = share(batch_of(0)).requires_grad_()
    close(*(torch.autograd.grad(f(t).sum(), t)[0] for f, t in ((engine, x), (reference.model, plain))))
    good_steps(engine, reference)


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, place, broken):
        ctx.place, ctx.broken = place, broken
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.place in ctx.broken:
            raise ZeroDivisionError("in backward")
        return grad, None, None


class Breaks(Net):
    """Raises in forward, inside a unit or after it, or in backward; `catch`: the model's own code goes on."""

    def __init__(self):
        super().__init__()
        self.broken, self.catch = set(), False
        for i, block in enumerate(self.blocks):
            block.a.register_forward_hook(lambda *_, i=i: 1 / (("inside", i) not in self.broken) and None)

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            try:
                x = Fuse.apply(block(x), ("backward", i), self.broken)
            except ZeroDivisionError:
                if not self.catch:
                    raise
            if ("after", i) in self.broken:
                raise ZeroDivisionError("in forward")
        return self.head(x)


def breaks(**knobs):
    """An exception anywhere, in whatever was called; then a good step."""
    engine, reference = start(Breaks, **knobs)
    ways = [lambda: engine.forward_backward(share(batch_of(0)), 2, square_loss),
            lambda: engine.backward(square_loss(engine(share(batch_of(0))))),
            lambda: engine.backward(square_loss(engine.module(share(batch_of(0)))))]
    for step, (what, i) in enumerate([("after", 0), ("after", 3), ("inside", 0), ("inside", 2), ("backward", 3), ("backward", 0)]):
        for way in ways:
            engine.module.broken.add((what, i))
            with pytest.raises(ZeroDivisionError):
                way()
            engine.module.broken.clear()
            with engine.gathered() as model:
                assert all(p.isfinite().all() for p in model.parameters())
        good_steps(engine, reference, seed=100 + step, steps=1)
    handle = engine.module.blocks[1].a.weight.register_hook(lambda grad: 1 // 0)
    with raises(ZeroDivisionError):
        ways[0]()
    handle.remove()
    all_sharded(engine)
    good_steps(engine, reference)
    for model in (engine.module, reference.model):  # the exception of a unit that the model itself catches
        model.catch = True
        model.broken.add(("inside", 1))
    good_steps(engine, reference, seed=130)


def wrong_calls(**knobs):
    """Each is refused, and a good step comes after it; what is harmless is."""
    engine, reference = start(**knobs)
    x = share(batch_of(0))
    with raises(RuntimeError, "engine.backward(loss)"):
        square_loss(engine(x)).backward()
    good_steps(engine, reference)
    output = engine(x)
    with engine.no_sync():
        engine.backward(output.square().mean())
    with raises(RuntimeError, "second time"):
        engine.backward(output.sin().mean())
    good_steps(engine, reference)
    engine.forward_backward(x, 2, square_loss)
    engine.zero_grad()
    engine(x)
    engine.zero_grad()
    engine.step()  # nothing to do
    assert engine.grad_norm == 0
    same_weights(engine, reference)
    good_steps(engine, reference)
    # Plain torch refuses backward through weights that a step has changed meanwhile; other numbers would be wrong.
    output = engine(x)
    good_steps(engine, reference)
    with raises(RuntimeError):
        engine.backward(square_loss(output))
    good_steps(engine, reference)


@pytest.mark.parametrize("calls", [looks_between, losses_of_several, penalised, breaks, wrong_calls])
@pytest.mark.parametrize("knobs", [{}, dict(reshard=False), *[pytest.param(knobs, marks=pytest.mark.sweep) for knobs in (
    dict(prefetch=False), dict(reduce_each=False), dict(offload=True))]], ids=str)
def test_any_order_of_calls(pool, calls, knobs):
    pool.run(2, calls, **knobs)


# ---- 7. accumulation --------------------------------------------------------------------------------------------------------


def accumulates(cuts, micro_batches, own_loop, **knobs):
    """Uneven rows in each step; gathers, and bytes by the formula: (N-1)/N of a unit's bytes for each gather and each sum."""
    engine, reference = start(**knobs)
    n, r, k = dist.get_world_size(), dist.get_rank(), micro_batches
    unit_bytes = [sum(f.full.numel() for f in u.flats) * 8 for u in engine.units]
    reshard, reduce_each = knobs.get("reshard", True), knobs.get("reduce_each", True)
    for step, cut in enumerate(cuts):
        before, x = [u.gathers for u in engine.units], random(sum(cut), 7, seed=step)
        mine = x[sum(cut[:r]) : sum(cut[: r + 1])]
        loss = lambda out, *_: out.square().mean()
        expected = loss(reference.model(x))
        expected.backward()
        if own_loop:
            for j, piece in enumerate(mine.chunk(k)):
                with engine.no_sync() if j < k - 1 else contextlib.nullcontext():
                    engine.backward(loss(engine(piece)) / k)
        else:
            close(engine.forward_backward(mine if len(mine) else None, k, loss), expected.detach())
        same_gradients(engine, reference)
        all_sharded(engine)
        reference.step()
        engine.step()
        gathers = [1, *[k * (2 if reshard else 1)] * 4]
        assert [u.gathers - b for u, b in zip(engine.units, before)] == gathers
        part = (n - 1) / n
        assert engine.traffic["all_gather"] == sum(part * size * g for size, g in zip(unit_bytes, gathers))
        if step == 0:  # full_grad reads between: none of its bytes is in a sum of slices
            assert engine.traffic["reduce_scatter"] == part * sum(unit_bytes) * (k if reduce_each else 1)
    same_weights(engine, reference)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("knobs", [{}, dict(reduce_each=False), dict(reshard=False), dict(prefetch=False), pytest.param(
    dict(reshard=False, reduce_each=False), marks=pytest.mark.sweep), pytest.param(dict(offload=True), marks=pytest.mark.sweep)],
    ids=str)
def test_accumulation_and_its_traffic(pool, micro_batches, knobs):
    """Even and uneven rows; a loop of one's own."""
    pool.run(2, accumulates, [(6, 6), (6, 6)], micro_batches, True, **knobs)
    pool.run(2, accumulates, [(4, 4), (7, 3), (3, 6)], micro_batches, False, **knobs)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("knobs", [{}, dict(reduce_each=False, reshard=False), pytest.param(
    dict(prefetch=False), marks=pytest.mark.sweep), pytest.param(dict(reduce_each=False), marks=pytest.mark.sweep)], ids=str)
def test_ranks_without_rows(pool, micro_batches, knobs):
    """A rank without any rows in a later step, or with fewer than micro-batches; in the first one."""
    pool.run(2, accumulates, [(4, 4), (7, 0), (1, 6), (0, 5), (3, 3)], micro_batches, False, limit_s=30, **knobs)
    pool.run(2, accumulates, [(0, 5), (2, 5), (0, 3)], micro_batches, False, limit_s=30, **knobs)


# ---- 8. gathered(), state, other engines ------------------------------------------------------------------------------------


def gathered_weights():
    engine, reference = start()
    good_steps(engine, reference)
    saved = engine.state_dict()
    with engine.gathered() as model:
        if saved:
            assert all(torch.equal(v, saved[k]) for k, v in model.state_dict().items()) and len(saved) == 18
        close(model(share(batch_of(1))), reference.model(share(batch_of(1))))  # and forward leaves them there
        close(model(share(batch_of(1))), reference.model(share(batch_of(1))))
        assert torch.equal(model.head.weight, copy.deepcopy(model).head.weight)
        copied = copy.deepcopy(model.blocks)
    close(copied[0](share(batch_of(1))), reference.model.blocks[0](share(batch_of(1))))
    all_sharded(engine)
    with contextlib.suppress(ZeroDivisionError), engine.gathered(write=True) as model:
        with torch.no_grad():
            model.head.bias.fill_(7)
        raise ZeroDivisionError
    all_sharded(engine)
    other = build_net(5)
    with engine.gathered(write=True) as model:
        model.load_state_dict(other.state_dict())
    reference.model.load_state_dict(other.state_dict())
    good_steps(engine, reference)


def build_net(seed):
    torch.manual_seed(seed)
    return Net().double()


def kept_values(how):
    """What was read inside stays what it was, whatever the engine does later."""
    engine, reference = start()
    expected = {k: v.clone() for k, v in reference.model.state_dict().items()}
    with engine.gathered() as model:
        if how == "state_dict":
            kept = model.state_dict()
        else:
            kept = {n: p.data if how == "data" else p.detach().view(-1) for n, p in model.named_parameters()}
    good_steps(engine, reference)
    for k, v in kept.items():
        assert torch.equal(v.view(-1), expected[k].view(-1)), k


@pytest.mark.parametrize("how", ["state_dict", "data", "view"])
def test_values_read_inside_gathered_stay(pool, how):
    pool.run(2, kept_values, how)


def l2_inside_gathered(when):
    """Case 54: an L2 term made where the message of a stray read says. Right, or an error; not the end of the process."""
    engine, reference = start()
    x = batch_of(0)
    l2 = lambda model: sum((p * p).sum() for p in model.parameters())
    output = engine(share(x)) if when == "after forward" else None
    with engine.gathered() as model:
        penalty = l2(model)
    if when == "before forward":
        output = engine(share(x))
    loss = penalty if when == "alone" else square_loss(output) + penalty
    (l2(reference.model) + (0 if when == "alone" else square_loss(reference.model(x)))).backward()
    try:
        engine.backward(loss)
        same_gradients(engine, reference)
    except RuntimeError as error:
        assert "gathered" in str(error) or "blocks." in str(error), error
    engine.zero_grad()
    reference.optimizer.zero_grad()
    good_steps(engine, reference)


@pytest.mark.parametrize("when", ["before forward", "after forward", "alone"])
def test_case_54_l2_inside_gathered(pool, when):
    pool.run(2, l2_inside_gathered, when)


def writes():
    """write=True: an init after construction (case 54); what is not changed keeps its fp32 master bit for bit."""
    torch.manual_seed(0)
    engine = FSDP(Net(), precision="bf16", lr=0.01)
    x = random(4, 7, seed=dist.get_rank(), dtype=torch.float32)
    for offset in range(2):
        engine.forward_backward(x, 1, lambda out, b: out.float().square().mean())
        engine.step()
        before = [f.master.clone() for f in engine.flats]
        assert any((m != m.bfloat16()).any() for m in before)  # masters have bits that weights do not
        with engine.gathered(write=True):
            pass
        assert all(map(torch.equal, before, [f.master for f in engine.flats]))
        with engine.gathered(write=True) as model, torch.no_grad():
            model.head.weight[0, 0] = 3 + offset
            nn.init.constant_(model.blocks[1].a.bias, 0.25 + offset)
        changed = torch.stack([(m != f.master).sum() for m, f in zip(before, engine.flats)]).sum()
        dist.all_reduce(changed)
        assert changed == 1 + 7
        saved = engine.state_dict()
        if saved:
            assert saved["head.weight"][0, 0] == 3 + offset and (saved["blocks.1.a.bias"] == 0.25 + offset).all()
            assert saved["head.weight"].dtype == torch.float32
    # a parameter's memory that is replaced would be lost: written, or refused by name; then forward and state_dict agree
    engine, reference = start()
    try:
        with engine.gathered(write=True) as model:
            model.head.weight.data = torch.ones_like(model.head.weight)
    except RuntimeError as error:
        assert "head.weight" in str(error)
    saved = engine.state_dict()
    if saved:
        reference.model.load_state_dict(saved)
    expected = reference.model(random(4, 7, seed=5))
    dist.broadcast(expected := expected.detach().clone(), 0)
    with torch.no_grad():
        close(engine(random(4, 7, seed=5)), expected)


def refused_inside():
    """gathered() in the middle of forward or backward."""
    class Looks(Net):
        where = None

        def forward(self, x):
            if self.where == "root":
                self.look()
            return super().forward(x)

    engine, reference = start(Looks)
    model = engine.module

    def look(*_):
        with engine.gathered():
            pass

    model.look, model.where = look, "root"
    with raises(RuntimeError, "gathered()"):
        engine(share(batch_of(0)))
    model.where = None
    good_steps(engine, reference)
    for register in (model.blocks[1].a.register_forward_hook, model.blocks[1].a.weight.register_hook):
        handle = register(look)
        with raises(RuntimeError, "gathered()"):
            engine.forward_backward(share(batch_of(0)), 1, square_loss)
        handle.remove()
        good_steps(engine, reference)


@pytest.mark.parametrize("what", [gathered_weights, writes, refused_inside])
def test_gathered(pool, what):
    pool.run(2, what)


def state_and_takeover(precision):
    """state_dict loads strictly in the plain model, tied too; another engine takes the model over, masters and all; an engine is
    freed with its model."""
    for kind in ("gpt2", "bert-mlm"):
        model = build(kind, dtype=torch.float32)
        names = set(model.state_dict())
        engine = FSDP(model, precision=precision, lr=0.1)
        batch, loss_fn = global_batch(kind, 4, dist.get_rank())
        for _ in range(2):
            engine.forward_backward(batch, 1, loss_fn)
            engine.step()
        saved = engine.state_dict()
        assert set(saved) == (names if dist.get_rank() == 0 else set())
        if saved:
            plain = build(kind, seed=1, dtype=torch.float32)
            plain.load_state_dict(saved, strict=True)
            assert {v.dtype for v in saved.values()} == {torch.float32}
        again = FSDP(build(kind, seed=2, dtype=torch.float32), precision=precision, lr=0.1)
        again.load_state_dict(saved)
        second = FSDP(model, precision=precision, lr=0.1)
        for other in (again, second):
            found = other.state_dict()
            assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in saved.items())
        with raises(RuntimeError, "another engine has taken this model over"):
            engine.forward_backward(batch, 1, loss_fn)
        for other in (again, second):
            loss = other.forward_backward(batch, 1, loss_fn)
            other.step()
        close(again.grad_norm, second.grad_norm, 1e-12)
        held = weakref.ref(second), weakref.ref(engine), weakref.ref(model)
        del engine, second, other, model, loss
        gc.collect()
        assert [ref() for ref in held] == [None] * 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_case_15_state_and_takeover(pool, precision):
    pool.run(2, state_and_takeover, precision)


# ---- 9. half precision, offload, compile ------------------------------------------------------------------------------------


class NormBlock(Block):
    def __init__(self, seen):
        super().__init__()
        self.norm, self.seen = nn.LayerNorm(7), seen

    def forward(self, x):
        h = self.norm(x)
        self.seen.update({"block": x.dtype, "out": h.dtype, "weight": self.norm.weight.dtype, "a": self.a.weight.dtype})
        return x + self.b(torch.tanh(self.a(h)))


def keeps_fp32(precision):
    """Inside the norms fp32, outside half; gradients near those in fp32; both dtypes have a flat tensor."""
    half, seen = dict(bf16=torch.bfloat16, fp16=torch.float16)[precision], {}
    torch.manual_seed(0)
    model = Net(lambda: NormBlock(seen))
    plain = copy.deepcopy(model)
    engine = FSDP(model, precision=precision, keep_fp32="LayerNorm", lr=0.01, initial_scale=2.0**10)
    x = random(8, 7, seed=1, dtype=torch.float32)
    plain(x).square().mean().backward()
    inside = []
    real, nn.functional.layer_norm = nn.functional.layer_norm, lambda x, *a, **k: inside.append(x.dtype) or real(x, *a, **k)
    try:
        output = engine(share(x))
    finally:
        nn.functional.layer_norm = real
    assert inside == [torch.float32] * 4 and output.dtype == half
    assert seen == dict(block=half, out=half, weight=torch.float32, a=half)
    engine.backward(output.float().square().mean())
    for n, p in plain.named_parameters():
        assert (engine.full_grad(n) - p.grad).norm() < 2**-4 * p.grad.norm(), n
    for unit in engine.units[1:]:
        assert {(f.full.dtype, f.master.dtype) for f in unit.flats} == {(half, torch.float32), (torch.float32, torch.float32)}
    engine.step()
    assert not engine.skipped
    model = Net()
    engine = FSDP(model, precision=precision, keep_fp32=lambda module: module is model.blocks[1], lr=0.01)
    assert [f.full.dtype for u in engine.units for f in u.flats] == [half, half, torch.float32, half, half]
    assert engine(share(x)).dtype == half


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_keep_fp32(pool, precision):
    pool.run(2, keeps_fp32, precision)


def offloaded(precision, micro_batches):
    """Five steps, the third overflows on one rank: masters, moments, gradients, the half copy, bit for bit."""
    states = []
    for offload in (False, True):
        torch.manual_seed(0)
        engine = FSDP(Net(), precision=precision, lr=0.01, offload=offload, initial_scale=2.0**10, max_norm=0.3, weight_decay=0.1)
        found = []
        for step in range(5):
            x = random(6, 7, seed=step + 10 * dist.get_rank(), dtype=torch.float32)
            if step == 2 and dist.get_rank() == 1:
                x = x * float("inf")
            kept = [f.master.clone() for f in engine.flats] + [f.store.clone() for f in engine.flats]
            engine.forward_backward(x, micro_batches or 1 + step % 3, lambda out, b: out.float().square().mean())
            gradient = engine.full_grad("head.weight")
            engine.step()
            assert engine.skipped == (step == 2)
            now = [f.master for f in engine.flats] + [f.store for f in engine.flats]
            assert all(map(torch.equal, kept, now)) == (step == 2)
            assert not offload or all(torch.equal(f.store, f.master.to(f.store.dtype)) for f in engine.flats)
            found += [f.master.clone() for f in engine.flats]
            found += [gradient, *(t.clone() for f in engine.fragments for t in (f.exp_avg, f.exp_avg_sq))]
        states.append(found)
    assert len(states[0]) > 50 and all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp32", pytest.param("fp16", marks=pytest.mark.sweep)])
def test_offload_changes_no_bit(pool, precision):
    for micro_batches in (1, 3, 0):
        pool.run(2, offloaded, precision, micro_batches)


def compiled(how, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net().double()
    reference = Reference(model, None, 0.5, lr=0.01, eps=1e-3)
    if how == "model before":
        model = torch.compile(model, backend=backend)
    elif how == "in place":
        model.compile(backend=backend)
    elif how == "units in place":
        for block in model.blocks:
            block.compile(backend=backend)
    elif how == "units before":
        for i in range(4):
            model.blocks[i] = torch.compile(model.blocks[i], backend=backend)
    engine = forward = FSDP(model, **ADAM)
    assert len(engine.units) == 5
    if how == "model after":
        forward = torch.compile(model, backend=backend)
    for step in range(3):
        x = batch_of(step)
        square_loss(reference.model(x)).backward()
        engine.backward(square_loss(forward(share(x))))
        for n, p in zip(engine.names, reference.model.parameters(), strict=True):
            close(engine.full_grad(n), p.grad)
        reference.step()
        engine.step()
        all_sharded(engine)
    assert [u.gathers for u in engine.units] == [3, 6, 6, 6, 6]


@pytest.mark.parametrize("how", ["model before", "model after", "in place", "units before", "units in place"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.sweep)])
def test_compiled(pool, how, backend):
    pool.run(2, compiled, how, backend, limit_s=120)


# ---- 10. models built on meta -----------------------------------------------------------------------------------------------


def from_pretrained(kind, precision, folder):
    """The engine of a model on meta, after load_pretrained, beside the engine of the real model: bit for bit over three steps."""
    real, meta = hf_model(kind), hf_model(kind, "meta")
    identities = [id(p) for p in meta.parameters()]
    groups = two_groups(meta)
    ours, theirs = FSDP(meta, groups, precision=precision, lr=0.01), FSDP(real, two_groups(real), precision=precision, lr=0.01)
    assert [id(p) for p in meta.parameters()] == identities
    assert [p for g in ours.optimizer.param_groups for p in g["params"]] and not any(b.is_meta for b in meta.buffers())
    batch = hf_batch(kind, dist.get_rank())
    with contextlib.ExitStack() as stack:
        for refused in (lambda: ours(**batch), lambda: ours.forward_backward(batch), ours.state_dict, ours.step,
                        lambda: ours.save(folder + "/never"), lambda: stack.enter_context(ours.gathered())):
            with raises(RuntimeError, "built on meta", "load_pretrained"):
                refused()
    assert ours.load_pretrained(folder) == ([], [])
    for step in range(3):
        batch = hf_batch(kind, 10 * step + dist.get_rank())
        assert torch.equal(ours.forward_backward(batch, 2), theirs.forward_backward(batch, 2))
        ours.step()
        theirs.step()
    found, expected = ours.state_dict(), theirs.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in expected.items())
    for (n, b), (m, c) in zip(meta.named_buffers(), real.named_buffers(), strict=True):
        assert n == m and torch.equal(b, c) and b.dtype == c.dtype, n
    with torch.no_grad():
        assert torch.equal(ours.eval()(**batch).logits, theirs.eval()(**batch).logits)


@pytest.mark.parametrize("kind, precision, shards", [
    ("bert-mlm", "fp32", False), ("bert-mlm", "bf16", True), ("gpt2", "bf16", True), ("llama", "bf16", False), ("t5", "fp32", True),
    ("gemma2", "fp32", False)])
def test_meta_from_pretrained(pool, tmp_path, kind, precision, shards):
    hf_model(kind).save_pretrained(tmp_path, **(dict(max_shard_size="9KB") if shards else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == shards
    pool.run(2, from_pretrained, kind, precision, str(tmp_path))


def meta_net(make=Net, dtype=torch.float64):
    with torch.device("meta"):
        return make().to(dtype)


class Tables(nn.Module):
    def __init__(self, with_init):
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.register_buffer("table", torch.arange(7.0), persistent=False)
        if with_init:
            self._init_weights = lambda module: module.table.copy_(torch.arange(7.0)) if hasattr(module, "table") else None

    def forward(self, x):
        return self.inner(x) + self.table


def other_sources(folder, ranks_before):
    """load_state_dict, and checkpoints of four engines, on other numbers of ranks than this one's."""
    expected = torch.load(f"{folder}/expected.pt")
    for name in ("state_dict", "ddp", "zero", "fsdp", "file"):
        engine = FSDP(meta_net(), **ADAM)
        assert sum(sum(d.values()) for d in engine.memory().values()) < 1.5 * 3 * 8 * 472 / dist.get_world_size() + 3000
        if name == "state_dict":
            engine.load_state_dict(expected)
        elif name == "file":
            engine.load_pretrained(f"{folder}/model.safetensors")
        else:
            engine.load(f"{folder}/{name}")
        found = engine.state_dict()
        assert not found or found.keys() == expected.keys()
        for k, v in found.items():
            assert torch.equal(v, expected[k]) or name != "state_dict" and torch.allclose(v, expected[k], rtol=1e-10, atol=1e-10), k
        reference = build_net(3)
        reference.load_state_dict(expected)
        if name in ("state_dict", "file"):
            good_steps(engine, Reference(reference, None, 0.5, lr=0.01, eps=1e-3))
    engine = FSDP(meta_net(), **ADAM)
    with raises(CheckpointError, "no checkpoint", "nowhere"):
        engine.load(f"{folder}/nowhere")
    with raises(ValueError, "head.weight"):
        engine.load_state_dict({k: v for k, v in expected.items() if k != "head.weight"})
    with raises(RuntimeError, "built on meta"):
        engine(share(batch_of(0)))
    with raises(ValueError, "on meta", "all or none"):
        half = Net()
        half.head = nn.Linear(7, 3, device="meta")
        FSDP(half)
    with raises(ValueError, "table", "built on meta"):
        FSDP(meta_net(lambda: Tables(False)))
    engine = FSDP(meta_net(lambda: Tables(True)), **ADAM)
    assert torch.equal(engine.module.table, torch.arange(7.0).double()) and not engine.module.inner.weight.is_meta


def write_checkpoints(folder):
    for name, cls in (("ddp", DDP), ("zero", Zero), ("fsdp", FSDP)):
        engine = cls(build_net(0), **ADAM)
        for step in range(2):
            engine.forward_backward(random(4, 7, seed=step), 1, square_loss)
            engine.step()
        engine.save(f"{folder}/{name}")
        saved = engine.state_dict()
    if saved:
        from safetensors.torch import save_file
        torch.save(saved, f"{folder}/expected.pt")
        save_file(saved, f"{folder}/model.safetensors")


def test_meta_from_other_sources(pool, tmp_path):
    pool.run(3, write_checkpoints, str(tmp_path))
    pool.run(2, other_sources, str(tmp_path), 3)


KEY = "bert.embeddings.LayerNorm.weight"


def safetensors_bytes(tensors, change=None):
    """A file of fp32 tensors by hand, so that it can be damaged: `change` gets the header."""
    header, parts, end = {"__metadata__": {"format": "pt"}}, [], 0
    for name, t in tensors.items():
        parts.append(t.contiguous().numpy().tobytes())
        header[name] = dict(dtype="F32", shape=list(t.shape), data_offsets=[end, end + len(parts[-1])])
        end += len(parts[-1])
    if change:
        header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def write_damaged(folder):
    """case: (strict?, words of the error, or None where it is right). Folders as save_pretrained makes them."""
    good = {k: v.clone() for k, v in hf_model("bert-mlm").state_dict().items()}
    name, index = "model.safetensors", "model.safetensors.index.json"
    cases = {}

    def case(title, strict, words, files):
        os.makedirs(f"{folder}/{title}")
        for file, content in files.items():
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            pathlib.Path(f"{folder}/{title}/{file}").write_bytes(content)
        cases[title] = strict, words

    def header(change):
        return {name: safetensors_bytes(good, change)}

    def entry(**values):
        return lambda h: h[KEY].update({k: v(h[KEY]) if callable(v) else v for k, v in values.items()})

    whole, without = safetensors_bytes(good), {k: v for k, v in good.items() if k != KEY}
    case("right", True, None, {name: whole})
    case("no prefix", True, None, {name: safetensors_bytes({k.removeprefix("bert."): v for k, v in good.items()})})
    case("tied under the other name", True, None, {name: safetensors_bytes({k: v for k, v in good.items() if "word_emb" not in k})})
    case("no file", True, [name, "is missing"], {"else": b""})
    case("missing", True, [KEY, "missing"], {name: safetensors_bytes(without)})
    case("missing, not strict", False, None, {name: safetensors_bytes(without)})
    case("unexpected", True, ["unexpected", "more"], {name: safetensors_bytes(good | {"more": torch.zeros(2)})})
    case("unexpected, not strict", False, None, {name: safetensors_bytes(good | {"more": torch.zeros(2)})})
    for strict in (True, False):
        case(f"shape {strict}", strict, [KEY, "(3,)", "(20,)"], {name: safetensors_bytes(good | {KEY: torch.zeros(3)})})
    turned = "bert.encoder.layer.0.intermediate.dense.weight"
    case("transposed", False, [turned, "(20, 30)", "(30, 20)"], {name: safetensors_bytes(good | {turned: torch.zeros(20, 30)})})
    case("truncated", True, [name, "bytes instead of"], {name: whole[:-4]})
    case("longer", True, [name, "bytes instead of"], {name: whole + b"more"})
    case("empty", True, [name], {name: b""})
    case("garbage", True, [name], {name: random_module.Random(0).randbytes(999)})
    case("no end", True, [name], {name: struct.pack("<Q", 2**63) + b"{}"})
    case("dtype", True, [KEY, "F8_E4M3"], header(entry(dtype="F8_E4M3")))
    case("dtype of another size", True, [KEY], header(entry(dtype="F64")))
    case("dtype of another size, smaller", True, [KEY], header(entry(dtype="BF16")))
    place = lambda e: e["data_offsets"]
    case("offsets of another size", True, [KEY], header(entry(data_offsets=lambda e: [place(e)[0], place(e)[1] - 8])))
    case("offsets below 0", True, [KEY], header(entry(data_offsets=[-80, 0])))
    case("offsets overlap", True, [name], header(entry(data_offsets=lambda e: [o - 4 for o in place(e)])))
    case("no shape", True, [name], header(lambda h: h[KEY].pop("shape") and None))
    case("no dtype", True, [name], header(lambda h: h[KEY].pop("dtype") and None))
    case("a list", True, [name], header(lambda h: b"[1, 2]"))
    case("a number", True, [name], header(lambda h: b'{"a": 3}'))
    keys = sorted(good)
    shards = {"a.safetensors": safetensors_bytes({k: good[k] for k in keys[::2]}),
              "b.safetensors": safetensors_bytes({k: good[k] for k in keys[1::2]})}
    of = {k: "ab"[i % 2] + ".safetensors" for i, k in enumerate(keys)}
    case("two shards", True, None, {**shards, index: dict(weight_map=of)})
    case("index of nothing", True, [index], {**shards, index: b"{"})
    case("index without map", True, [index], {**shards, index: {"x": 1}})
    case("index of numbers", True, [index], {**shards, index: dict(weight_map={"a": 3})})
    case("index of more", True, ["c.safetensors", "is missing"], {**shards, index: dict(weight_map=of | {"z": "c.safetensors"})})
    case("index of less", True, ["missing", keys[1]], {**shards, index: dict(weight_map={keys[0]: "a.safetensors"})})
    return cases


def damaged_files(folder, cases):
    """What does not fit is named on every rank, and nothing has changed; then the engine trains on."""
    engine = FSDP(hf_model("bert-mlm"), precision="bf16")
    fits = engine.state_dict()
    engine.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in fits.items()})
    before = [f.master.clone() for f in engine.flats]
    faults = []
    for title, (strict, words) in cases.items():
        changed = torch.zeros(1)
        try:
            missing, unexpected = engine.load_pretrained(f"{folder}/{title}", strict=strict)
            found = None
            assert missing == ([KEY] if title.startswith("missing") else []), (title, missing)
            assert unexpected == (["more"] if title.startswith("unexpected") else []), (title, unexpected)
        except CheckpointError as error:
            found = str(error)
        changed[0] = not all(map(torch.equal, before, [f.master for f in engine.flats]))
        dist.all_reduce(changed)
        if words is None and (found or not changed) or words is not None and (
                changed or found is None or any(word not in found for word in words)):
            faults.append(f"{title}: {found!r}, {'changed' if changed else 'unchanged'}, expected {words}")
        if changed:
            engine.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in fits.items()})
    assert not faults, "\n".join(faults)
    with raises(CheckpointError, "[1]", "nowhere"):  # one rank alone does not see the file
        engine.load_pretrained(f"{folder}/right" if dist.get_rank() == 0 else "nowhere")
    assert all(map(torch.equal, before, [f.master for f in engine.flats]))
    engine.load_pretrained(f"{folder}/right")
    found = engine.state_dict()
    assert all(torch.equal(v, fits[k]) for k, v in found.items())
    engine.forward_backward(hf_batch("bert-mlm", 3))
    engine.step()
    assert not engine.skipped
    blank = FSDP(hf_model("bert-mlm", "meta"), precision="bf16")
    with raises(CheckpointError, KEY):  # nothing has a value to keep
        blank.load_pretrained(f"{folder}/missing", strict=False)
    assert blank.load_pretrained(f"{folder}/two shards") == ([], [])


def test_case_44_damaged_files_are_named(pool, tmp_path):
    cases = write_damaged(str(tmp_path))
    pool.run(2, damaged_files, str(tmp_path), cases, limit_s=100)


# ---- 11. a model that does not fit ------------------------------------------------------------------------------------------


class Large(nn.Module):
    """Equal blocks of two width x width matrices, small beside the whole."""

    def __init__(self, width, n_blocks):
        super().__init__()
        self.blocks = nn.ModuleList(LargeBlock(width) for _ in range(n_blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class LargeBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def write_large(path, width, n_blocks):
    """One block's numbers after the other."""
    header, bytes_each = {}, width * width * 2
    for i in range(n_blocks):
        for j, name in enumerate("ab"):
            at = (2 * i + j) * bytes_each
            header[f"blocks.{i}.{name}.weight"] = dict(dtype="BF16", shape=[width, width], data_offsets=[at, at + bytes_each])
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for k in range(2 * n_blocks):
            numbers = random(width, width, seed=k % 7, dtype=torch.float32) / width**0.5 / 4
            file.write(numbers.bfloat16().view(torch.int16).numpy().tobytes())


def data_bytes():
    """Private writable memory of this process, as RLIMIT_DATA counts it."""
    line = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


M_MMAP_THRESHOLD = -3  # of mallopt(3)


def large_on_meta(path, width, n_blocks):
    # glibc would take memory of less than a growing size from its heap, where what is freed need not fit what is asked for next
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    with torch.device("meta"):
        model, control = Large(width, n_blocks), Large(width, n_blocks)
    numel = sum(p.numel() for p in model.parameters())
    x = random(2, width, seed=dist.get_rank(), dtype=torch.float32)
    y = random(2, width, seed=9 + dist.get_rank(), dtype=torch.float32)
    warm = FSDP(Large(16, 2), precision="bf16")  # connections, threads, libraries
    warm.forward_backward(x[:, :16].contiguous(), 1, lambda out, b: out.float().square().mean())
    warm.step()
    del warm
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # masters and moments 12/4, gradients 2/4, 4 units and a root without parameters; the parameters alone would need 4, in fp32
    limit = data_bytes() + int(3.8 * numel)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        with pytest.raises(RuntimeError, match="allocate"):
            control.to_empty(device="cpu")
        control = None
        engine = FSDP(model, precision="bf16", lr=2e-5)
        assert engine.load_pretrained(path) == ([], [])
        losses = []
        for _ in range(3):
            losses.append(engine.forward_backward((x, y), 1, lambda out, b: (out.float() - b[1]).square().mean()).item())
            engine.step()
        assert not engine.skipped_steps and losses[2] < losses[1] < losses[0] < 100, losses
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    held = sum(sum(d.values()) for d in engine.memory().values())
    assert abs(held - 3 * numel) < 0.01 * held  # 12/4 bytes each
    return limit


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's account of memory")
@pytest.mark.parametrize("width, n_blocks", [(512, 76), pytest.param(512, 192, marks=pytest.mark.sweep)])
def test_model_larger_than_memory_allows(tmp_path, width, n_blocks):
    """40 million parameters (sweep: 100) in bf16 on 4 ranks, each limited to less than the parameters need in fp32. Ranks of its
    own: what other tests have left in a process would count."""
    assert shutil.disk_usage(tmp_path).free > 10**9
    write_large(tmp_path / "model.safetensors", width, n_blocks)
    ranks = pool_module.Pool()
    try:
        ranks.run(4, large_on_meta, str(tmp_path), width, n_blocks, limit_s=200)
    finally:
        ranks.close()
        ranks.folder.cleanup()


# ---- 12. what a reader of the file suspected, and was right ---------------------------------------------------------------------


def suspicions():
    """Gradients read twice, a parameter in no group; a model in half precision, and one on meta, that change hands."""
    engine, reference = start(reduce_each=False)
    x = batch_of(0)
    with engine.no_sync():  # so that nothing is reduced before full_grad asks
        engine.backward(square_loss(engine(share(x))))
    square_loss(reference.model(x)).backward()
    for _ in range(2):
        same_gradients(engine, reference)
    close(reference.step(), (engine.step(), engine.grad_norm)[1])
    with engine.no_sync():  # and step itself, inside, where there is no memory for sums yet
        engine.backward(square_loss(engine(share(x))))
        square_loss(reference.model(x)).backward()
        same_gradients(engine, reference)
        close(reference.step(), (engine.step(), engine.grad_norm)[1])
    with torch.no_grad():
        for _ in range(3):
            engine(share(x))
    assert not engine._log, "evaluation leaves nothing behind"

    torch.manual_seed(0)
    model = Net()
    engine = FSDP(model, list(model.blocks.parameters()), precision="fp32")
    for _ in range(2):
        engine.backward(square_loss(engine(x.float())))
        assert model.head.weight.grad is None
        engine.step()

    engine = FSDP(Net().bfloat16(), precision="bf16", lr=1e-4)
    engine.backward(square_loss(engine(x.bfloat16()).float()))
    engine.step()
    before = [f.master.clone() for f in engine.fragments]
    assert any((m != m.bfloat16()).any() for m in before)  # so that rounding would show
    second = FSDP(engine.module, precision="bf16")
    assert all(map(torch.equal, before, [f.master for f in second.fragments]))

    before = second.state_dict()
    with raises(ValueError, "nothing is written", "head.weight was given shape (2, 7) instead of (3, 7)"):  # on all ranks
        with second.gathered(write=True) as model:
            model.head.weight.data = torch.zeros(2, 7, dtype=torch.bfloat16)
            model.head.bias.data.zero_()
    with second.gathered(), raises(RuntimeError, "nothing can be loaded"):
        second.load_state_dict({key: torch.zeros_like(value) for key, value in before.items()})
    after = second.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    all_sharded(second)

    with torch.device("meta"):
        model = Net()
    FSDP(model, precision="fp32", device="cpu")
    second = FSDP(model, precision="fp32")
    with raises(RuntimeError, "has no weights yet"):
        second(x.float())


def test_what_a_reader_suspected(pool):
    pool.run(2, suspicions)
