"""Checkpoints: saved by one strategy, resumed by another on another number of ranks, killed half way, damaged, refused.

Compared: a resumed run with one that was never interrupted (bitwise on the same ranks; in float64 at 1e-10 on others, and
with one process); the geometry of fragments with index sets; the files with what the safetensors package reads; what is left
after a kill before each single file operation with the old and the new checkpoint; Adam's state with torch's AdamW.
Models have prime sizes, zero elements, scalars and fewer elements than ranks. One to four CPU ranks; about 80 s, the sweep ten
minutes.
"""
import builtins
import contextlib
import copy
import ctypes
import dataclasses
import importlib
import itertools
import json
import math
import os
import random as python_random
import shutil
import signal
import types
from datetime import timedelta

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from models import (
    ENGINES,
    FEWER,
    Plain,
    Reference,
    build,
    build_engine,
    fewer_engines,
    global_batch,
    in_sweep,
    loss_of,
    raises,
    rows,
    two_groups,
    whole,
)
from test_contract import LivePeak
from torch import nn

SAMPLES = 12  # of the global batch, whatever the number of ranks
FILES = [*{module: name for name, (module, *_) in reversed(ENGINES.items())}.values()][::-1]  # the first engine of each
files = pytest.mark.parametrize("name", FILES)
# Blocks that are the same in all files to the letter (test_copies.py) are tried in the first; in all of them in the sweep.
blocks = pytest.mark.parametrize("name", in_sweep(FILES, lambda name: name != FILES[0]))
pairs = pytest.mark.parametrize("first, then", in_sweep(  # by default from and to the first strategy, and once without it
    itertools.permutations(ENGINES, 2),
    lambda *pair: pair != ("zero2", "fsdp") and not (FILES[0] in pair and {*pair} <= {*FEWER})))


def file_of(name):
    """The strategy's module: its constants and its CheckpointError."""
    return importlib.import_module(ENGINES[name][0])


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=tolerance, atol=tolerance, check_dtype=False)


def differences(a, b, where="") -> list[str]:
    """Where two nested structures differ; tensors are compared bit by bit, so that NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        raw = lambda t: t.detach().contiguous().reshape(-1).view(torch.uint8)
        same = (a.shape, a.dtype) == (b.shape, b.dtype) and (not a.numel() or torch.equal(raw(a), raw(b)))
        return [] if same else [where]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for k in a for d in differences(a[k], b[k], f"{where}.{k}")]
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b)) for d in differences(x, y, f"{where}[{i}]")]
    return [] if a == b else [f"{where}: {a!r} is not {b!r}"]


def assert_same(a, b):
    found = differences(a, b)
    assert not found, f"{len(found)} differ: {found[:5]}"


def state_of(engine) -> dict:
    """Copies of all that a checkpoint holds of this rank, and its random numbers. No collective, so of weights that are sharded
    this rank's slices, with which a gather begins."""
    adam, sharded = engine.optimizer, getattr(engine, "flats", None) or getattr(engine, "chunks", None)
    # a store is the master, or a copy of it in the weights' dtype, which may depend on where it is
    weights = [x.store.to(x.full.dtype) for x in sharded] if sharded else engine.module.parameters()
    return {
        "fragments": {(f.name, str(f.boxes), f.start, kind): getattr(f, kind).clone()
                      for f in (*engine.fragments, *engine.kept()) for kind in f.kinds()},
        "model": [t.detach().clone() for t in (*weights, *engine.module.buffers())],
        "steps": adam.steps.clone(),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in adam.param_groups],
        "scaler": engine.scaler.state.clone(),
        "torch": torch.get_rng_state(),
        "python": python_random.getstate(),
    }


class Noisy(Plain):
    """Dropout draws torch's random numbers, a factor Python's."""

    def forward(self, x):
        x = nn.functional.dropout(x, 0.3, self.training)
        return super().forward(x) * (1 + python_random.random())


class Run:
    """An engine with two groups, clipping and a schedule, and the steps that it takes."""

    def __init__(self, name, kind, seed=0, dtype=torch.float64, spoiled=(), change=None, groups=two_groups, micro_batches=2,
                 **knobs):
        self.kind, self.dtype, self.spoiled, self.micro_batches = kind, dtype, spoiled, micro_batches
        self.rank, self.ranks = rank_and_size()
        torch.manual_seed(seed)
        model = Noisy().to(dtype) if kind == "noisy" else build(kind, seed, dtype)
        if change:
            change(model)
        knobs = {**dict(lr=0.01, eps=1e-3, max_norm=0.5, precision="fp32"), **knobs}
        self.engine = build_engine(name, model, groups(model), **knobs)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.engine.optimizer, lambda t: 1 / (1 + t))
        torch.manual_seed(100 * seed + self.rank)
        python_random.seed(100 * seed + self.rank)

    def train(self, steps):
        losses = []
        for step in steps:
            batch, loss_fn = global_batch(self.kind, SAMPLES, step, self.dtype)
            if step in self.spoiled:
                batch = (batch[0] * float("inf"), *batch[1:])
            mine = rows(batch, SAMPLES * self.rank // self.ranks, SAMPLES * (self.rank + 1) // self.ranks)
            losses.append(self.engine.forward_backward(mine, self.micro_batches, loss_fn))
            self.engine.step()
            self.schedule.step()
        return losses


# ---- 1. on as many ranks: bit for bit -----------------------------------------------------------------------------------


def resumed_bitwise(name, kind, directory, saved_after=2, steps=4, **options):
    straight = Run(name, kind, **options)
    expected = straight.train(range(steps))[saved_after:]

    first = Run(name, kind, **options)
    first.train(range(saved_after))
    before = state_of(first.engine)
    first.engine.save(directory, scheduler=first.schedule, epoch=2)
    assert_same(before, state_of(first.engine))
    del first

    second = Run(name, kind, seed=5, **options)
    assert differences(before, state_of(second.engine))
    assert second.engine.load(directory, scheduler=second.schedule) == {"epoch": 2}
    assert_same(before, state_of(second.engine))
    assert_same(expected, second.train(range(saved_after, steps)))

    a, b = straight.engine, second.engine
    assert_same(state_of(a), state_of(b))
    with whole(a) as model, whole(b) as resumed:
        assert_same([p.detach() for p in model.parameters()], [p.detach() for p in resumed.parameters()])
    assert_same(a.state_dict(), b.state_dict())
    assert_same(a.optimizer.state_dict(), b.optimizer.state_dict())
    assert (a.scale, a.skipped_steps, a.grad_norm) == (b.scale, b.skipped_steps, b.grad_norm)
    assert straight.schedule.state_dict() == second.schedule.state_dict()
    draws = [None] * straight.ranks
    dist.all_gather_object(draws, (torch.rand(1).item(), python_random.random()))
    assert len({d for draw in draws for d in draw}) == 2 * straight.ranks  # each rank goes on with its own
    return b.scale.item(), b.skipped_steps.item()


RESUMED = [("awkward", 3), ("batchnorm", 2), ("bert", 2), ("noisy", 2), ("tied", 3),
           ("plain", 2), ("plain", 3), ("awkward", 2), ("tied", 2), ("batchnorm", 3), ("bert", 3), ("noisy", 3), ("gpt2", 4)]


@pytest.mark.parametrize("name, kind, ranks", in_sweep(  # by default the first of these, or three of them, or five
    [(name, *of) for name in ENGINES for of in RESUMED],
    lambda name, *of: of not in RESUMED[: 5 if name == FILES[0] else 3 if name in FEWER else 1]))
def test_resumed_on_as_many_ranks_bit_for_bit(pool, tmp_path, name, kind, ranks):
    """Case 42: weights, buffers, moments, learning rates, losses, each rank's random numbers."""
    pool.run(ranks, resumed_bitwise, name, kind, f"{tmp_path}/run")


@pytest.mark.parametrize("name", in_sweep(ENGINES, lambda name: name != "gemini"))
def test_resumed_with_whole_batches(pool, tmp_path, name):
    """Nothing adds up, so gradients that go to host memory need no slice beside the place where they land."""
    pool.run(2, resumed_bitwise, name, "bert", f"{tmp_path}/run", dtype=torch.float32, precision="bf16", max_norm=0.05,
             micro_batches=1)


@fewer_engines
def test_resumed_before_the_first_step(pool, tmp_path, name):
    """Orders that an engine learns in its first step are learnt by the resumed one too."""
    pool.run(3, resumed_bitwise, name, "awkward", f"{tmp_path}/run", saved_after=0)


@fewer_engines
def test_resumed_loss_scale(pool, tmp_path, name):
    """fp16: step 0 is skipped, steps 1 and 2 are finite, so the scale doubles in step 2 only if the count of step 1 is kept."""
    result = pool.run(2, resumed_bitwise, name, "plain", f"{tmp_path}/run", dtype=torch.float32, spoiled=[0],
                      precision="fp16", initial_scale=64.0, growth_interval=2)
    assert result == [(64.0, 1)] * 2


def other_precision(name, directory):
    half = dict(dtype=torch.float32, precision="fp16", initial_scale=64.0, growth_interval=3)
    full = Run(name, "plain", dtype=torch.float32)
    full.train(range(2))
    full.engine.save(f"{directory}/full")
    run = Run(name, "plain", seed=5, **half)
    run.train(range(2))
    run.engine.save(f"{directory}/half")
    run.engine.load(f"{directory}/full")
    run.train([2])  # the third finite step in a row
    assert (run.engine.scale, run.engine.skipped_steps) == (128.0, 0)
    full.engine.load(f"{directory}/half")
    full.train([2])
    assert full.engine.scale == 1.0


@fewer_engines
def test_resumed_in_another_precision(pool, tmp_path, name):
    """fp16 on one side only: the loss scale, and the count towards its next doubling, stay what they are."""
    pool.run(2, other_precision, name, str(tmp_path))


# ---- 2. and 3. on another number of ranks, under another strategy --------------------------------------------------------


def save_half_way(name, kind, directory):
    """Two steps, save, two more; the end of this uninterrupted run goes to a file beside the checkpoint."""
    run = Run(name, kind)
    run.train(range(2))
    run.engine.save(directory, scheduler=run.schedule)
    run.train(range(2, 4))
    weights, adam = run.engine.state_dict(), run.engine.optimizer.state_dict()
    if run.rank == 0:
        torch.save((weights, adam["state"]), f"{directory}-end.pt")


def resume_beside_one_process(name, kind, directory):
    reference = Reference(build(kind), two_groups, 0.5, lr=0.01, eps=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(reference.optimizer, lambda t: 1 / (1 + t))
    expected_losses = []
    for step in range(4):
        batch, loss_fn = global_batch(kind, SAMPLES, step)
        expected_losses.append(reference.backward(batch, loss_fn))
        reference.step()
        schedule.step()

    run = Run(name, kind, seed=7)
    random_before = torch.get_rng_state()
    assert run.engine.load(directory, scheduler=run.schedule) == {}
    assert torch.equal(torch.get_rng_state(), random_before)  # those of other ranks would be nobody's
    for loss, expected in zip(run.train(range(2, 4)), expected_losses[2:], strict=True):
        close(loss, expected)

    weights, adam = run.engine.state_dict(), run.engine.optimizer.state_dict()
    for parameter in run.engine.module.parameters():
        assert parameter.dtype == torch.float64
    if run.rank > 0:
        return
    straight_weights, straight_adam = torch.load(f"{directory}-end.pt")
    assert weights.keys() == straight_weights.keys() == reference.model.state_dict().keys()
    for key, tensor in reference.model.state_dict().items():
        close(weights[key], tensor)
        close(weights[key], straight_weights[key])
    build(kind, seed=3).load_state_dict(weights, strict=True)  # case 15: with both names of tied weights
    names = {p: n for n, p in reference.model.named_parameters()}
    theirs = {names[p]: state for p, state in reference.optimizer.state.items()}
    assert adam["state"].keys() == theirs.keys() == straight_adam.keys()
    for key, state in theirs.items():
        for kind_, tensor in state.items():
            close(adam["state"][key][kind_], tensor)
            close(adam["state"][key][kind_], straight_adam[key][kind_])


@pytest.mark.parametrize("name, kind, saved, resumed", in_sweep(  # by default to one rank and from an even number to an odd one
    [(name, kind, *ranks) for name in ENGINES for kind in ("awkward", "tied", "gpt2", "bert-mlm", "plain")
     for ranks in [(2, (1, 3)), (4, (3,)), (1, (2, 4)), (2, (4,)), (3, (1, 2, 4)), (4, (1, 2))]],
    lambda name, *of: name not in FEWER or of not in [("awkward", 2, (1, 3)), ("awkward", 4, (3,))][: 2 if name == "zero2" else 1]))
def test_resumed_on_other_ranks(pool, tmp_path, name, kind, saved, resumed):
    """Cases 15, 16, 39 and 40. "awkward" has sizes that no number of ranks divides, none at all, and one."""
    pool.run(saved, save_half_way, name, kind, f"{tmp_path}/run")
    for ranks in resumed:
        pool.run(ranks, resume_beside_one_process, name, kind, f"{tmp_path}/run")


@pairs
def test_resumed_under_another_strategy(pool, tmp_path, first, then):
    pool.run(2, save_half_way, first, "awkward", f"{tmp_path}/run")
    pool.run(3, resume_beside_one_process, then, "awkward", f"{tmp_path}/run")


# ---- 4. geometry: fragments, and who hands out what ----------------------------------------------------------------------


def layouts(rng):
    """(shape, boxes, dim along which they are joined) as strategies make them: see the comment beside each."""
    shape = tuple(rng.choice([0, 1, 2, 3, 4, 5, 7]) for _ in range(rng.randint(0, 3)))
    whole = tuple(slice(0, s) for s in shape)
    yield shape, (whole,), 0
    for d, size in enumerate(shape):  # rows (column-parallel), columns (row-parallel), something in between
        lo, hi = sorted(rng.randint(0, size) for _ in range(2))
        yield shape, ((*whole[:d], slice(lo, hi), *whole[d + 1 :]),), d
    if shape:  # a block that is cut in every dim
        yield shape, (tuple(slice(*sorted(rng.randint(0, size) for _ in range(2))) for size in shape),), 0
    for d in range(len(shape)):  # fused QKV: the same slice of each third, along any dim
        h = rng.randint(1, 6)
        lo, hi = sorted(rng.randint(0, h) for _ in range(2))
        fused = (*shape[:d], 3 * h, *shape[d + 1 :])
        yield fused, tuple((*whole[:d], slice(k * h + lo, k * h + hi), *whole[d + 1 :]) for k in range(3)), d


def indices(shape, boxes, dim, start=0, end=None):
    """Places in the flattened full parameter of the elements of a fragment, by indexing."""
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    blocks = [full[box] for box in boxes]
    local = torch.cat(blocks, dim) if len(blocks) > 1 else blocks[0]
    return local.flatten()[start:end].tolist()


def spread_out(stretches, numel):
    """What `stretches` says, element by element; None where it says nothing, an error where it says something twice."""
    places = [None] * numel
    for full, own, n in stretches:
        assert n > 0 and places[own : own + n] == [None] * n
        places[own : own + n] = range(full, full + n)
    return places


@blocks
def test_stretches_are_those_of_indexing(name):
    rng = python_random.Random(0)
    for _ in range(300):
        for shape, boxes, dim in layouts(rng):
            numel = len(indices(shape, boxes, dim))
            ranges = [(0, numel), *[sorted(rng.randint(0, numel) for _ in range(2)) for _ in range(2)]]
            for start, end in ranges:
                found = file_of(name).stretches(shape, boxes, start, end)
                assert spread_out(found, end - start) == indices(shape, boxes, dim, start, end), (shape, boxes, start, end)


@blocks
def test_stretches_are_few(name):
    """One for a whole parameter and for rows of it, one per row for columns, three for a fused QKV joined along dim 0."""
    stretches, everything = file_of(name).stretches, slice(0, 1000)
    assert stretches((1000, 1000), ((everything, everything),), 5, 999_999) == [(5, 0, 999_994)]
    assert stretches((1000, 1000), ((slice(500, 1000), everything),), 0, 500_000) == [(500_000, 0, 500_000)]
    assert len(stretches((1000, 1000), ((everything, slice(500, 1000)),), 0, 500_000)) == 1000
    assert len(stretches((3000, 1000), tuple((slice(a, a + 500), everything) for a in (0, 1000, 2000)), 0, 1_500_000)) == 3


@blocks
def test_overlaps_are_those_of_index_sets(name):
    rng, module = python_random.Random(1), file_of(name)
    for _ in range(150):
        of_shape = {}
        for shape, boxes, dim in [*layouts(rng), *layouts(rng)]:
            of_shape.setdefault(shape, []).append((boxes, dim))
        for shape, some in of_shape.items():
            fragments = []
            for boxes, dim in some:
                start, end = sorted(rng.randint(0, len(indices(shape, boxes, dim))) for _ in range(2))
                fragments.append((module.stretches(shape, boxes, start, end), indices(shape, boxes, dim, start, end)))
            for (own, own_places), (other, other_places) in itertools.product(fragments, fragments):
                pairs_found = [(a + k, b + k) for a, b, n in module.overlaps(own, other) for k in range(n)]
                where = {place: i for i, place in enumerate(other_places)}
                expected = [(i, where[place]) for i, place in enumerate(own_places) if place in where]
                assert sorted(pairs_found) == expected, (shape, some)


@blocks
@pytest.mark.parametrize("spread", [True, False])
def test_deal_covers_every_element_once(name, spread):
    """Ranges that several ranks hold, that ranks share out, that overlap in part; a buffer comes from its first holder."""
    rng, module = python_random.Random(2), file_of(name)
    box = lambda lo, hi: ((slice(0, 5), slice(lo, hi)),)
    for _ in range(300):
        ranks = rng.randint(1, 5)
        held = [[] for _ in range(ranks)]
        expected = {}
        for parameter in range(3):
            halves = rng.choice([[box(0, 7)], [box(0, 3), box(3, 7)]])  # whole, or two blocks of columns
            for boxes in halves:
                numel = len(indices((5, 7), boxes, 1))
                kind = rng.choice(["replicated", "sharded", "overlapping", "buffer"])
                cuts = sorted(rng.randint(0, numel) for _ in range(ranks - 1))
                for r in range(ranks):
                    start, end = {"sharded": ([0, *cuts][r], [*cuts, numel][r]),
                                  "overlapping": tuple(sorted(rng.randint(0, numel) for _ in range(2)))}.get(kind, (0, numel))
                    index = module.BUFFER if kind == "buffer" else parameter
                    held[r].append(module.Fragment(f"p{parameter}", index, (5, 7), boxes, start, end, torch.empty(0)))
                    for i in range(start, end):
                        expected.setdefault((f"p{parameter}", repr(boxes), i), []).append((r, kind))
        found = {}
        for key, pieces in module.deal(held, spread).items():
            for rank, boxes, lo, hi in pieces:
                assert lo < hi
                for i in range(lo, hi):
                    assert (key, repr(boxes), i) not in found
                    found[key, repr(boxes), i] = rank
                # `save` and `gather_full` look for one fragment that holds the whole of a piece
                assert any((f.name, f.boxes) == (key, boxes) and f.start <= lo and hi <= f.end for f in held[rank])
        assert found.keys() == expected.keys()
        for key, rank in found.items():
            holders = [r for r, _ in expected[key]]
            assert rank in holders
            assert rank == holders[0] or spread and expected[key][0][1] != "buffer"


@blocks
def test_deal_spreads_what_is_replicated(name):
    module = file_of(name)
    fragment = module.Fragment("p", 0, (10,), ((slice(0, 10),),), 0, 10, torch.empty(0))
    pieces = module.deal([[fragment]] * 4)["p"]
    assert [(rank, lo, hi) for rank, _, lo, hi in pieces] == [(0, 0, 2), (1, 2, 5), (2, 5, 7), (3, 7, 10)]
    assert module.deal([[dataclasses.replace(fragment, shape=(0,), boxes=((slice(0, 0),),), end=0)]] * 4) == {"p": []}


# ---- 5. tensor parallelism with sharded optimizer states, by hand ---------------------------------------------------------


class Mixed(nn.Module):
    """The parameters of a tensor-parallel layer, whole."""

    def __init__(self):
        super().__init__()
        self.row = nn.Parameter(torch.zeros(5, 9))  # Linear, columns over tp
        self.qkv = nn.Parameter(torch.zeros(5, 12))  # Conv1D, thirds side by side
        self.qkv_rows = nn.Parameter(torch.zeros(12, 3))  # Linear, thirds below each other
        self.column = nn.Parameter(torch.zeros(7, 3))  # Linear, rows over tp
        self.norm = nn.Parameter(torch.zeros(5))
        self.scale = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("table", torch.zeros(4))

    def parts(self, tp):
        """name -> (boxes, dim along which they are joined) of one of two tensor-parallel ranks."""
        cut = lambda size: slice(*((0, size // 2) if tp == 0 else (size // 2, size)))
        thirds = [slice(4 * k + 2 * tp, 4 * k + 2 * tp + 2) for k in range(3)]
        split = {"row": ([(slice(0, 5), cut(9))], 1), "column": ([(cut(7), slice(0, 3))], 0),
                 "qkv": ([(slice(0, 5), s) for s in thirds], 1), "qkv_rows": ([(s, slice(0, 3)) for s in thirds], 0)}
        whole = {n: ([tuple(slice(0, s) for s in t.shape)], 0) for n, t in (*self.named_parameters(), *self.named_buffers())}
        return {n: (tuple(boxes), dim) for n, (boxes, dim) in (whole | split).items()}

    def values(self, kind):
        """name -> tensor in which every element of every tensor is another number."""
        first = {"master": 0, "exp_avg": 1000, "exp_avg_sq": 2000}[kind]
        tensors = [*self.named_parameters(), *self.named_buffers()]
        return {n: first + 100 * i + torch.arange(float(t.numel())).view(t.shape) for i, (n, t) in enumerate(tensors)}

    STEPS = {"row": 3.0, "qkv": 4.0, "qkv_rows": 5.0, "column": 6.0, "norm": 7.0, "scale": 8.0}


class ByHand:
    """What a checkpoint needs of an engine, on four ranks: tp = 2 x dp = 2, each local tensor cut over dp in unequal parts."""

    def __init__(self, module, fill):
        self.module, self.group, self.device = Mixed(), None, torch.device("cpu")
        self.rank, self.world_size = rank_and_size()
        trained = [n for n, p in self.module.named_parameters() if p.requires_grad]
        group_of = {n: 2 if p.ndim == 1 else 0 for n, p in self.module.named_parameters()}  # two_groups
        values, every = {kind: self.module.values(kind) for kind in ("master", *module.MOMENTS)}, []
        for name, (boxes, dim) in self.module.parts(self.rank // 2).items():
            index = trained.index(name) if name in trained else module.BUFFER if name == "table" else module.FROZEN
            local_numel = len(indices(values["master"][name].shape, boxes, dim))
            cut = 2 * local_numel // 3
            start, end = (0, local_numel) if index < 0 else (0, cut) if self.rank % 2 == 0 else (cut, local_numel)
            places = indices(values["master"][name].shape, boxes, dim, start, end)
            make = lambda kind: values[kind][name].flatten()[places] if fill else torch.zeros(end - start)  # noqa: B023
            moments = [make(kind) for kind in module.MOMENTS] if index >= 0 else [None, None]
            every.append(module.Fragment(name, index, tuple(values["master"][name].shape), boxes, start, end, make("master"),
                                         None, None, *moments))
        self.fragments, self.rest = [f for f in every if f.index >= 0], [f for f in every if f.index < 0]
        if fill and self.rank > 0:
            self.rest[-1].master.fill_(-1)  # the buffer differs: the first rank's counts
        group = lambda lr: dict(params=[], lr=lr, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.25, adamw=True)
        self.optimizer = types.SimpleNamespace(
            names=trained, group_list=[group_of[n] for n in trained], param_groups=[group(lr) for lr in (0.5, 0.25, 0.125)],
            steps=torch.tensor([Mixed.STEPS[n] * fill for n in trained]))
        for name, p in self.module.named_parameters():
            self.optimizer.param_groups[group_of[name]]["params"].append(p)
        self.scaler = module.LossScale(self.device, 1.0, False)

    def kept(self):
        return self.rest


def save_by_hand(name, directory):
    module = file_of(name)
    engine = ByHand(module, fill=True)
    module.save_checkpoint(engine, directory, {"epoch": 1})
    state = module.export_adam(engine)  # whole tensors from the same fragments
    if engine.rank == 0:
        for kind in module.MOMENTS:
            assert_same({n: s[kind] for n, s in state["state"].items()},
                        {n: t for n, t in engine.module.values(kind).items() if n in Mixed.STEPS})
    again = ByHand(module, fill=False)
    module.import_adam(again, state)
    for a, b in zip(engine.fragments, again.fragments, strict=True):
        assert_same([a.exp_avg, a.exp_avg_sq], [b.exp_avg, b.exp_avg_sq])
    assert_same(engine.optimizer.steps, again.optimizer.steps)


def load_what_was_made_by_hand(name, directory, directory_2):
    model = Mixed()
    engine = build_engine(name, model, two_groups(model), precision="fp32")
    assert engine.load(directory) == {"epoch": 1}
    weights, adam = engine.state_dict(), engine.optimizer.state_dict()
    if engine.rank == 0:
        assert_same(weights, model.values("master"))
        for kind in ("exp_avg", "exp_avg_sq"):
            assert_same({n: s[kind] for n, s in adam["state"].items()},
                        {n: t for n, t in model.values(kind).items() if n in Mixed.STEPS})
        assert {n: s["step"].item() for n, s in adam["state"].items()} == Mixed.STEPS
        assert [(g["lr"], g["betas"], g["eps"], g["weight_decay"]) for g in adam["param_groups"]] == [
            (lr, (0.8, 0.9), 1e-5, 0.25) for lr in (0.5, 0.25, 0.125)]
    engine.save(directory_2)


def load_by_hand(name, directory):
    module = file_of(name)
    engine, expected = ByHand(module, fill=False), ByHand(module, fill=True)
    module.load_checkpoint(engine, directory, {})
    for f, g in zip(engine.fragments + engine.rest, expected.fragments + expected.rest, strict=True):
        right = g.master if g.index != module.BUFFER else engine.module.values("master")[g.name]
        assert_same([f.master, f.exp_avg, f.exp_avg_sq], [right, g.exp_avg, g.exp_avg_sq])
    assert_same(engine.optimizer.steps, expected.optimizer.steps)


@fewer_engines
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.sweep)])
def test_tensor_parallel_fragments_to_an_engine_and_back(pool, tmp_path, name, ranks):
    pool.run(4, save_by_hand, name, f"{tmp_path}/by-hand")
    pool.run(ranks, load_what_was_made_by_hand, name, f"{tmp_path}/by-hand", f"{tmp_path}/engine")
    pool.run(4, load_by_hand, name, f"{tmp_path}/engine")
    pool.run(4, load_by_hand, name, f"{tmp_path}/by-hand")


# ---- 6. killed before every single file operation --------------------------------------------------------------------------


class Death:
    """While it is on, counts file operations and ends the process before the n-th, or in the middle of it if that is a write:
    half of it has reached the file then. What is still in a file object's buffer is lost, as with kill -9."""

    OPERATIONS = ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "makedirs", "open")  # of os

    def __init__(self, n):
        self.n, self.done = n, 0

    def __enter__(self):
        self.saved = {name: getattr(os, name) for name in self.OPERATIONS}
        self.open = builtins.open
        for name, function in self.saved.items():
            setattr(os, name, self.counted(function))
        builtins.open = lambda *args, **kwargs: DyingFile(self, self.counted(self.open)(*args, **kwargs))

    def __exit__(self, *_):
        builtins.open = self.open
        for name, function in self.saved.items():
            setattr(os, name, function)

    def counted(self, function, last_act=lambda *args: None):
        def call(*args, **kwargs):
            self.done += 1
            if self.done == self.n:
                last_act(*args)
                os._exit(9)
            return function(*args, **kwargs)
        return call


class DyingFile:
    def __init__(self, death, file):
        self.file, self.fileno = file, file.fileno
        self.write = death.counted(file.write, self.half)
        self.flush, self.close = death.counted(file.flush), death.counted(file.close)

    def half(self, part):
        part = bytes(part)
        self.file.write(part[: len(part) // 2])
        self.file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def fork(function, *args) -> int:
    """`function(*args)` in a child process, which gets 30 s; its process id."""
    if pid := os.fork():
        return pid
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        function(*args)
        os._exit(0)
    except BaseException:
        os._exit(1)


def exit_codes(pids) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def die_in_save(engine, directory, n, epoch):
    with Death(n):
        engine.save(directory, epoch=epoch)


def loaded(name, kind, directory):
    """What a fresh engine finds: its state after loading (random numbers apart) and the epoch; None if there is no checkpoint."""
    engine = Run(name, kind, seed=9).engine
    try:
        extra = engine.load(directory)
    except file_of(name).CheckpointError as error:
        assert f"there is no checkpoint in {directory}" in str(error)
        return None
    state = state_of(engine)
    return {k: v for k, v in state.items() if k not in ("torch", "python")}, extra["epoch"]


def is_one_of(found, allowed):
    assert any(found is other is None or None not in (found, other) and not differences(found, other) for other in allowed), (
        found and found[1], [other and other[1] for other in allowed])


def old_and_new(name, tmp_path):
    """Two engines that have come to different places, the checkpoint of the first, and what loading either must give."""
    runs = [Run(name, "tied", seed=s) for s in (0, 1)]
    for epoch, run in enumerate(runs):
        run.train(range(epoch + 1))
        run.engine.save(f"{tmp_path}/{epoch}", epoch=epoch)
    old, new = (loaded(name, "tied", f"{tmp_path}/{epoch}") for epoch in range(2))
    assert differences(old, new)
    return f"{tmp_path}/0", runs[1].engine, old, new


@blocks
@pytest.mark.parametrize("overwrites", [True, False])
def test_killed_at_every_file_operation(tmp_path, name, overwrites):
    """Case 43. In a child process, before its n-th operation, n = 1, 2, ... until a save runs through."""
    base, engine, old, new = old_and_new(name, tmp_path)
    directory = f"{tmp_path}/place/run"
    seen = set()
    for n in itertools.count(1):
        shutil.rmtree(f"{tmp_path}/place", ignore_errors=True)
        os.mkdir(f"{tmp_path}/place")
        if overwrites:
            shutil.copytree(base, directory)
        [code] = exit_codes([fork(die_in_save, engine, directory, n, 1)])
        found = loaded(name, "tied", directory)
        seen.add(found and found[1])
        if code == 0:
            break
        assert code == 9
        is_one_of(found, [old if overwrites else None, new])
        engine.save(directory, epoch=1)
        assert os.listdir(f"{tmp_path}/place") == ["run"]  # neither run.tmp nor run.old
        is_one_of(loaded(name, "tied", directory), [new])
    is_one_of(found, [new])
    assert os.listdir(f"{tmp_path}/place") == ["run"]
    assert n > 30
    assert seen == {0, 1} if overwrites else {None, 1}


@blocks
@pytest.mark.parametrize("emptied", [False, pytest.param(True, id="empty folder")])
def test_killed_between_the_renames_and_again(tmp_path, name, emptied):
    """The next save starts where `run` is absent, or has been made anew by a script and is empty, `run.old` and `run.tmp` are
    complete; it too is killed at every operation."""
    base, engine, old, new = old_and_new(name, tmp_path)
    directory = f"{tmp_path}/place/run"
    for n in itertools.count(1):
        shutil.rmtree(f"{tmp_path}/place", ignore_errors=True)
        os.mkdir(f"{tmp_path}/place")
        shutil.copytree(base, f"{directory}.old")
        shutil.copytree(base, f"{directory}.tmp")
        if emptied:
            os.mkdir(directory)
        [code] = exit_codes([fork(die_in_save, engine, directory, n, 1)])
        is_one_of(loaded(name, "tied", directory), [old, new] if code else [new])
        if code == 0:
            break
    assert n > 30
    assert os.listdir(f"{tmp_path}/place") == ["run"]


def one_of_two_dies(name, base, directory, store, rank, victim, n):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=15))
    engine = Run(name, "tied", seed=1).engine
    engine.load(base)
    with Death(n if rank == victim else 0):
        engine.save(directory, epoch=1)


def save_with_two(name, directory, seed):
    run = Run(name, "tied", seed=seed)
    run.train(range(1))
    run.engine.save(directory, epoch=seed)


@blocks
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.sweep)])
def test_one_of_two_ranks_killed(pool, tmp_path, name, victim, stride):
    """A checkpoint of several files is all old or all new, whichever rank dies; the other one ends too."""
    for seed in (0, 1):
        pool.run(2, save_with_two, name, f"{tmp_path}/{seed}", seed)
    old, new = (loaded(name, "tied", f"{tmp_path}/{seed}") for seed in (0, 1))
    directory = f"{tmp_path}/place/run"
    for n in itertools.count(1 + stride // 2, stride):
        shutil.rmtree(f"{tmp_path}/place", ignore_errors=True)
        os.mkdir(f"{tmp_path}/place")
        shutil.copytree(f"{tmp_path}/0", directory)
        codes = exit_codes([fork(one_of_two_dies, name, f"{tmp_path}/1", directory, f"{tmp_path}/store{n}", rank, victim, n)
                            for rank in range(2)])
        if codes == [0, 0]:
            break
        assert codes[victim] == 9 and codes[1 - victim] == 1, codes
        is_one_of(loaded(name, "tied", directory), [old, new])
    is_one_of(loaded(name, "tied", directory), [new])
    assert n > (10 if victim == 1 else 30)


# ---- 7. what does not fit, is damaged or cannot be written -------------------------------------------------------------------


@contextlib.contextmanager
def refused(name, run, *words):
    """CheckpointError with these words, and the engine, its schedule and all random numbers as they were, bit for bit."""
    before = state_of(run.engine), run.schedule.state_dict()
    with raises(file_of(name).CheckpointError, *words):
        yield
    assert_same(before, (state_of(run.engine), run.schedule.state_dict()))


def save_one(name, kind, directory, epoch=1, **options):
    run = Run(name, kind, **options)
    run.train(range(1))
    run.engine.save(directory, scheduler=run.schedule, epoch=epoch)


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """saved(name, kind): the folder of a checkpoint of two ranks, written once, only to be read or copied."""
    made = {}

    def get(name, kind="awkward"):
        if (name, kind) not in made:
            made[name, kind] = f"{tmp_path_factory.mktemp('saved')}/run"
            pool.run(2, save_one, name, kind, made[name, kind])
        return made[name, kind]
    return get


def edit(path, change):
    with open(path, "rb") as file:
        data = bytearray(file.read())
    changed = change(data)
    data = data if changed is None else changed
    with open(path, "wb") as file:
        file.write(data)


def flip(place):
    def change(data):
        data[place] ^= 4
    return change


def replaced(old, new):
    def change(data):
        assert data.count(old) >= 1
        return data.replace(old, new, 1)
    return change


DAMAGE = {  # what is done to a file; words of the message
    "rank file absent": ("rank_00001.safetensors", os.unlink, ["missing"]),
    "rank file cut short": ("rank_00001.safetensors", lambda path: edit(path, lambda data: data[:-1]), ["bytes instead of"]),
    "rank file empty": ("rank_00000.safetensors", lambda path: edit(path, lambda data: b""), []),
    "rank file longer": ("rank_00000.safetensors", lambda path: edit(path, lambda data: data + b"\0"), ["bytes instead of"]),
    "header flipped": ("rank_00001.safetensors", lambda path: edit(path, flip(100)), ["damaged header"]),
    "length of header smaller": ("rank_00001.safetensors", lambda path: edit(path, flip(0)), ["damaged header"]),
    "length of header huge": ("rank_00001.safetensors", lambda path: edit(path, flip(6)), ["damaged header"]),
    "meta.json absent": ("meta.json", os.unlink, []),
    "meta.json no JSON": ("meta.json", lambda path: edit(path, lambda data: data[:-20]), ["damaged"]),
    "meta.json no text": ("meta.json", lambda path: edit(path, lambda data: b"\xff" + data), ["damaged"]),
    "meta.json another number": ("meta.json", lambda path: edit(path, replaced(b'"lr": 0.0', b'"lr": 0.1')), ["damaged"]),
    # The next two and the last two fail: the message does not name the file.
    "meta.json no pair": ("meta.json", lambda path: edit(path, lambda data: b"5"), ["damaged"]),
    "meta.json pair of others": ("meta.json", lambda path: edit(path, lambda data: b"[1, 2]"), []),
    "newer format": ("meta.json", lambda path: edit(path, replaced(b'"format": 1', b'"format": 2')), ["format 2", "format 1"]),
    "extra.pt absent": ("extra.pt", os.unlink, []),
    "extra.pt cut short": ("extra.pt", lambda path: edit(path, lambda data: data[:-100]), []),
    "extra.pt empty": ("extra.pt", lambda path: edit(path, lambda data: b""), []),
}


def load_refused(name, kind, directory, words, misfit=None):
    change, groups = MISFITS[misfit][:2] if misfit else (None, two_groups)
    run = Run(name, kind, seed=5, change=change, groups=groups)
    with refused(name, run, *words):
        run.engine.load(directory, scheduler=run.schedule)


@blocks
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged(pool, tmp_path, saved, name, damage):
    """Case 44. The message names the file; both ranks raise; nothing has changed."""
    file, do, words = DAMAGE[damage]
    directory = shutil.copytree(saved(name), f"{tmp_path}/run")
    do(f"{directory}/{file}")
    words = [f"{tmp_path}/run" if "meta.json absent" in damage else f"{tmp_path}/run/{file}", *words]
    pool.run(2, load_refused, name, "awkward", directory, words, limit_s=20)


@files
def test_no_checkpoint(pool, tmp_path, name):
    os.mkdir(f"{tmp_path}/empty")
    for place in ("empty", "absent"):
        words = ["there is no checkpoint in", f"{tmp_path}/{place}"]
        pool.run(2, load_refused, name, "plain", f"{tmp_path}/{place}", words, limit_s=20)
    assert os.listdir(tmp_path) == ["empty"]


def add(name, make):
    return lambda model: setattr(model, name, make())


def freeze(name, trained):
    return lambda model: model.get_parameter(name).requires_grad_(trained)


def numbers(*shape):
    return nn.Parameter(torch.ones(shape, dtype=torch.float64))


def another_group(model):
    first, empty, last = two_groups(model)
    moved = first["params"].pop(next(i for i, p in enumerate(first["params"]) if p is model.turned))
    return [first, {**empty, "params": [moved]}, last]


MISFITS = {  # change of the model, its param groups, words of the message
    "shape": (add("three", lambda: numbers(4)), two_groups, ["three has shape (3,) instead of (4,)"]),
    "transposed": (add("turned", lambda: numbers(7, 3)), two_groups, ["turned has shape (3, 7) instead of (7, 3)"]),
    "missing": (lambda model: delattr(model, "three"), two_groups, ["three is unexpected"]),
    "extra": (add("more", lambda: numbers(4)), two_groups, ["more is missing"]),
    "extra buffer": (lambda model: model.register_buffer("more", numbers(4).data), two_groups, ["more is missing"]),
    "frozen": (freeze("twice.weight", False), two_groups, ["twice.weight", "group 0 instead of None"]),
    "trained": (freeze("frozen.weight", True), two_groups, ["frozen.weight", "group None instead of 0"]),
    "number of groups": (None, lambda model: two_groups(model)[::2], ["3 param groups instead of 2"]),
    "another group": (None, another_group, ["turned", "group 0 instead of 1"]),
    "labels": (add("classifier", lambda: nn.Linear(20, 3).double()), two_groups,
               ["classifier.weight has shape (2, 20) instead of (3, 20)", "classifier.bias"]),
}


@blocks
@pytest.mark.parametrize("misfit", MISFITS)
def test_other_model(pool, saved, name, misfit):
    """Case 44. Names and numbers of both sides are in the message."""
    kind = "bert" if misfit == "labels" else "awkward"
    pool.run(2, load_refused, name, kind, saved(name, kind), MISFITS[misfit][2], misfit, limit_s=20)


def other_objects(name, directory):
    run = Run(name, "awkward", seed=5)
    with refused(name, run, "sampler", "epoch, scheduler"):
        run.engine.load(directory, scheduler=run.schedule, sampler=run.schedule)
    with refused(name, run, "epoch"):  # a number has no state to take over
        run.engine.load(directory, epoch=run.schedule)
    extra = run.engine.load(directory)  # what nobody asked for is returned as it was saved
    assert extra["epoch"] == 1 and extra["scheduler"]["last_epoch"] == 1 and extra.keys() == {"epoch", "scheduler"}


@files
def test_objects_that_were_not_saved(pool, saved, name):
    pool.run(2, other_objects, name, saved(name), limit_s=20)


class Custom:
    pass


def contents(folder) -> dict:
    """Every file below a folder, by path, with its bytes."""
    found = {}
    for place, folders, files in os.walk(folder):
        found |= {os.path.join(place, f): None for f in folders}
        for file in files:
            with open(os.path.join(place, file), "rb") as f:
                found[os.path.join(place, file)] = f.read()
    return found


@contextlib.contextmanager
def save_refused(name, run, directory, *words, leftovers=()):
    """As `refused`; and every file around stays as it is, but for what is left of a save that had begun."""
    def around():
        dist.barrier()
        found = contents(os.path.dirname(directory))
        dist.barrier()
        return {path: data for path, data in found.items() if not path.startswith(tuple(leftovers))}

    before = around()
    with refused(name, run, *words):
        yield
    assert before == around()


def unsaveable(name, directory):
    run = Run(name, "awkward", seed=5)
    for thing in (Custom(), lambda: 0, Custom):
        with save_refused(name, run, directory, "odd_extra"):
            run.engine.save(directory, epoch=1, odd_extra=thing)
    with save_refused(name, run, directory, "_mine", "engine's own"):
        run.engine.save(directory, epoch=1, _mine=1)
    with save_refused(name, run, directory, "rank [1]"):  # on one rank only
        run.engine.save(directory, thing=Custom() if run.rank else 0)
    run.engine.save(directory, epoch=1, thing={"a": [1, 2.5, "b", None, True], "b": torch.ones(3), "c": (1, 2)})
    thing = run.engine.load(directory)["thing"]
    assert_same(thing, {"a": [1, 2.5, "b", None, True], "b": torch.ones(3), "c": (1, 2)})


@blocks
def test_extra_that_cannot_be_saved(pool, tmp_path, saved, name):
    """Refused when saving: `load` would refuse it, as it runs no code from a file."""
    pool.run(2, unsaveable, name, shutil.copytree(saved(name), f"{tmp_path}/run"), limit_s=20)


def odd_dtype(name, directory):
    run = Run(name, "awkward", change=lambda model: model.register_buffer("phase", torch.ones(2, dtype=torch.complex64)))
    with save_refused(name, run, directory, "phase", "complex64"):
        run.engine.save(directory)


@blocks
def test_dtype_that_the_format_does_not_know(pool, tmp_path, name):
    pool.run(2, odd_dtype, name, f"{tmp_path}/run", limit_s=20)


def in_the_way(name, directory, words):
    run = Run(name, "plain", seed=5)
    with save_refused(name, run, directory, *words):
        run.engine.save(directory)


@blocks
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("foreign", ["run", "run.old", "run.tmp"])
@pytest.mark.parametrize("what", ["file inside", "folder inside", "file instead"])
def test_foreign_files_are_left_alone(pool, tmp_path, saved, name, foreign, what, exists):
    """Whether there is a checkpoint already, or not; nothing of the user's is removed or renamed."""
    if exists and foreign != "run":
        shutil.copytree(saved(name), f"{tmp_path}/run")
    if what == "file instead":
        (tmp_path / foreign).write_text("mine")
    else:
        if exists:
            shutil.copytree(saved(name), tmp_path / foreign)
        (tmp_path / foreign / ("notes" if what == "folder inside" else "")).mkdir(parents=True, exist_ok=True)
        (tmp_path / foreign / "notes" if what == "folder inside" else tmp_path / foreign).joinpath("notes.txt").write_text("mine")
    words = [f"{tmp_path}/{foreign}", "in the way"]
    pool.run(2, in_the_way, name, f"{tmp_path}/run", words, limit_s=20)


@contextlib.contextmanager
def impatient(name):
    module = file_of(name)
    before, module.MEETING_S = module.MEETING_S, 0.25
    try:
        yield
    finally:
        module.MEETING_S = before


def alone(name, directory):
    run = Run(name, "awkward", seed=5)
    with impatient(name):
        for one in range(run.ranks):
            others = str([r for r in range(run.ranks) if r != one])
            for call in (run.engine.save, run.engine.load):
                if run.rank == one:
                    with refused(name, run, call.__name__, others, "0.25 s"):
                        call(directory)
                dist.barrier()
        # one saves while the others load: neither finds the others
        with save_refused(name, run, directory, "rank [1, 2]" if run.rank == 0 else "rank [0"):
            (run.engine.load if run.rank else run.engine.save)(directory)
    run.engine.save(directory, epoch=7)
    state = state_of(run.engine)
    other = Run(name, "awkward", seed=6)
    assert other.engine.load(directory) == {"epoch": 7}
    assert_same(state, state_of(other.engine))


@blocks
def test_case_38_one_rank_alone(pool, tmp_path, name):
    """It waits for the others, 0.25 s here, then names them; afterwards all are in step again."""
    pool.run(3, alone, name, f"{tmp_path}/run", limit_s=40)


def disk_full(name, directory):
    run = Run(name, "awkward", seed=5)
    module = file_of(name)

    def full(file):
        def write_file(path, parts):
            if path.endswith(file):
                with open(path, "wb") as f:
                    f.write(b"half of it")
                    raise OSError(28, "No space left on device", path)
            return original(path, parts)
        return write_file

    original = module.write_file
    for rank, file in ((1, "rank_00001.safetensors"), (0, "rank_00000.safetensors"), (0, "extra.pt"), (0, "meta.json")):
        try:
            module.write_file = full(file)
            words = f"rank [{rank}]", "No space left on device", file
            with save_refused(name, run, directory, *words, leftovers=[f"{directory}.tmp"]):
                run.engine.save(directory, epoch=2)
        finally:
            module.write_file = original
        other = Run(name, "awkward", seed=6)
        assert other.engine.load(directory)["epoch"] == 1  # the previous checkpoint is there to be read
    run.engine.save(directory, epoch=2)
    assert other.engine.load(directory) == {"epoch": 2}
    dist.barrier()
    assert os.listdir(os.path.dirname(directory)) == ["run"]


@blocks
def test_disk_full_on_one_rank(pool, tmp_path, saved, name):
    """Every rank says which one could not write, and why; the previous checkpoint stays."""
    pool.run(2, disk_full, name, shutil.copytree(saved(name), f"{tmp_path}/run"), limit_s=40)


def different_folders(name, directory):
    run = Run(name, "plain")
    with save_refused(name, run, directory, f"{directory}0", f"{directory}1"):
        run.engine.save(f"{directory}{run.rank}")
    run.engine.save(f"{os.path.dirname(directory)}/./run/")  # one folder, spelt in another way


@blocks
def test_different_folders(pool, tmp_path, name):
    pool.run(2, different_folders, name, f"{tmp_path}/run", limit_s=20)
    assert os.listdir(tmp_path) == ["run"]


@blocks
def test_fewer_ranks_overwrite_more(pool, tmp_path, name):
    """No file of the larger checkpoint stays."""
    for ranks in (3, 1, 2):
        pool.run(ranks, save_one, name, "plain", f"{tmp_path}/run")
        files = [f"rank_{r:05d}.safetensors" for r in range(ranks)]
        assert sorted(os.listdir(f"{tmp_path}/run")) == ["extra.pt", "meta.json", *files]


# ---- 8. host memory -----------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """`count` parameters of `numel` elements each."""

    def __init__(self, count, numel):
        super().__init__()
        self.blocks = nn.ParameterList([nn.Parameter(torch.full((numel,), float(i))) for i in range(count)])
        self.blocks.read_outside = True  # by forward, below

    def forward(self, x):
        return sum((block * x).sum() for block in self.blocks)


def live_peaks(name, directory):
    largest = 2**18 * 4
    engine = build_engine(name, Blocks(6, 2**18), precision="fp32")
    held = [t for f in engine.fragments for t in (f.master, f.grad, f.exp_avg, f.exp_avg_sq, f.half) if t is not None]
    peaks = []
    for call in (file_of(name).save_checkpoint, file_of(name).load_checkpoint):
        with whole(engine) as model:
            live = LivePeak([*held, *model.parameters()])
        with live:
            call(engine, directory, {})
        peaks.append(live.peak)
    assert peaks[0] <= 2**16, peaks  # CPU tensors are written from where they are; 2^16: random states, what ranks tell each other
    assert peaks[1] <= largest + 2**16, peaks


@fewer_engines
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.sweep)])
def test_new_storages_are_no_larger_than_one_parameter(pool, tmp_path, name, ranks):
    pool.run(ranks, live_peaks, name, f"{tmp_path}/run")


def resident(kind):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(kind))


def resident_peaks(name, directory):
    """Into `directory`/peaks: by how many bytes the resident memory of this process rises in save and in load."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD, else what is freed stays resident or not, as malloc has learnt to do
    engine = build_engine(name, Blocks(9, 2**21), precision="fp32")
    engine.forward_backward(torch.ones(1))
    engine.step()
    engine.save(f"{directory}/run")
    engine.load(f"{directory}/run")  # what is loaded and allocated once
    peaks = []
    for call in (file_of(name).save_checkpoint, file_of(name).load_checkpoint):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts from what is resident now
        before = resident("VmRSS")
        call(engine, f"{directory}/run", {})
        peaks.append(resident("VmHWM") - before)
    with open(f"{directory}/peaks", "w") as file:
        json.dump(peaks, file)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux: the peak of resident memory, reset")
@files
def test_resident_memory(tmp_path, name):
    """In a process of its own: saving and loading 226 MB in parameters of 8 MB takes no more than one of them and 4 MB."""
    assert exit_codes([fork(resident_peaks, name, tmp_path)]) == [0]
    assert os.path.getsize(tmp_path / "run" / "rank_00000.safetensors") > 200e6
    peaks = json.loads((tmp_path / "peaks").read_text())
    assert max(peaks) <= 2**23 + 2**22, peaks
    shutil.rmtree(tmp_path / "run")


# ---- 9. the files -------------------------------------------------------------------------------------------------------------


def exact_model(seed):
    """1 + 2^-23 is the fp32 number above 1: no half precision holds it."""
    model = build("plain", seed, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.flatten()[0] = 1 + 2**-23
    return model


def save_exactly(name, precision, directory):
    engine = build_engine(name, exact_model(0), precision=precision, lr=0.0)
    batch, loss_fn = global_batch("plain", 4, 0, torch.float32)
    engine.forward_backward(batch, 1, loss_fn)
    engine.step()  # lr = 0: moments move, weights do not
    engine.save(directory)
    loader = build_engine(name, exact_model(1), precision=precision, lr=0.0)
    loader.load(directory)
    assert_same(state_of(engine), state_of(loader))
    return engine.optimizer.state_dict()


@fewer_engines
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_files_are_safetensors(pool, tmp_path, name, precision):
    """The safetensors package reads them; pieces, joined as meta.json says, are the fp32 masters and moments."""
    adam = pool.run(2, save_exactly, name, precision, f"{tmp_path}/run")[0]
    with open(tmp_path / "run" / "meta.json") as file:
        meta, _ = json.load(file)
    files = [safetensors.torch.load_file(tmp_path / "run" / f"rank_{r:05d}.safetensors") for r in range(2)]
    assert sum(len(f) for f in files) == 2 * 2 + sum(3 * len(p["pieces"]) for p in meta["parameters"].values())
    assert meta["world_size"] == 2 and meta["mode"] == ENGINES[name][1]
    for key, parameter in exact_model(0).named_parameters():
        info = meta["parameters"][key]
        assert (tuple(info["shape"]), info["group"], info["step"]) == (parameter.shape, 0, 1)
        for kind, expected in (("master", parameter.detach()), *[(m, adam["state"][key][m]) for m in ("exp_avg", "exp_avg_sq")]):
            whole = torch.full((parameter.numel(),), math.nan)
            for i, (rank, boxes, start, end) in enumerate(info["pieces"]):
                places = indices(parameter.shape, [tuple(slice(*ends) for ends in box) for box in boxes], 0, start, end)
                whole[places] = files[rank][f"{key}.{kind}.{i}"]
            assert_same(whole.view(parameter.shape), expected)


# ---- 10. Adam's state as torch has it -----------------------------------------------------------------------------------------


def numbered(state_dict):
    """Names become the places in the groups, in order: what torch writes."""
    names = [n for group in state_dict["param_groups"] for n in group["params"]]
    number = {n: i for i, n in enumerate(names)}
    return {"state": {number[n]: s for n, s in state_dict["state"].items()},
            "param_groups": [{**g, "params": [number[n] for n in g["params"]]} for g in state_dict["param_groups"]]}


def adam_to_torch(name, kind):
    run = Run(name, kind, max_norm=0.0)
    run.train(range(2))
    adam, weights = run.engine.optimizer.state_dict(), run.engine.state_dict()
    run.train([2])
    end, end_adam = run.engine.state_dict(), run.engine.optimizer.state_dict()
    if run.rank > 0:
        assert adam == weights == end == end_adam == {}
        return
    plain = build(kind, seed=4)
    plain.load_state_dict(weights)
    optimizer = torch.optim.AdamW(two_groups(plain), lr=7.0, eps=7.0)  # all options come from the state dict
    optimizer.load_state_dict(numbered(adam))
    batch, loss_fn = global_batch(kind, SAMPLES, 2)
    loss_of(plain, batch, loss_fn).backward()
    optimizer.step()
    for key, tensor in plain.state_dict().items():
        close(end[key], tensor)
    names = {p: n for n, p in plain.named_parameters()}
    assert end_adam["state"].keys() == {names[p] for p in optimizer.state}
    for p, state in optimizer.state.items():
        assert state.keys() == end_adam["state"][names[p]].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, tensor in state.items():
            close(end_adam["state"][names[p]][key], tensor)
    if kind == "awkward":
        assert not {"unused.weight", "frozen.weight", "layers.0.bias"} & end_adam["state"].keys()


def filled_groups(model):
    """torch's own optimizer takes no empty group among named ones."""
    return [g for g in two_groups(model) if g["params"]]


def torch_to_adam(name, kind):
    plain = build(kind)
    names = {p: n for n, p in plain.named_parameters()}
    groups = [{**g, "params": [(names[p], p) for p in g["params"]]} for g in filled_groups(plain)]
    optimizer = torch.optim.AdamW(groups, eps=1e-3, betas=(0.8, 0.99))

    def step(k):
        batch, loss_fn = global_batch(kind, SAMPLES, k)
        optimizer.zero_grad()
        loss_of(plain, batch, loss_fn).backward()
        optimizer.step()

    step(0)
    step(1)
    run = Run(name, kind, seed=4, max_norm=0.0, groups=filled_groups)
    mine = run.rank == 0
    run.engine.load_state_dict(plain.state_dict() if mine else {})
    run.engine.optimizer.load_state_dict(optimizer.state_dict() if mine else {})
    assert [(g["lr"], g["betas"], g["eps"], g["weight_decay"], g["adamw"]) for g in run.engine.optimizer.param_groups] == [
        (g["lr"], (0.8, 0.99), 1e-3, g["weight_decay"], True) for g in optimizer.param_groups]
    run.train([2])
    step(2)
    weights = run.engine.state_dict()
    if mine:
        for key, tensor in plain.state_dict().items():
            close(weights[key], tensor)


@fewer_engines
@pytest.mark.parametrize("kind", ["awkward", pytest.param("gpt2", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("way", [adam_to_torch, torch_to_adam])
def test_adam_state_to_and_from_torch(pool, name, kind, way):
    """Numbered, it continues in torch.optim.AdamW; torch's own, of named parameters, continues in the engine."""
    pool.run(2, way, name, kind)


def changed(state_dict, change):
    state_dict = copy.deepcopy(state_dict)
    change(state_dict)
    return state_dict


def rename(state_dict):
    state_dict["state"]["other"] = state_dict["state"].pop("three")
    group = next(g for g in state_dict["param_groups"] if "three" in g["params"])
    group["params"][group["params"].index("three")] = "other"


def move(state_dict):
    first, empty, last = state_dict["param_groups"]
    last["params"].remove("three")
    empty["params"].append("three")


def wrong_adam_states(name):
    run = Run(name, "awkward")
    run.train(range(1))
    good = run.engine.optimizer.state_dict()
    run.train(range(1, 2))

    def set_(group, key, value):
        return lambda s: s["param_groups"][group].update({key: value})

    cases = {
        "another name": (rename, ["other is not a trained parameter"]),
        "shape": (lambda s: s["state"]["three"].update(exp_avg=torch.zeros(4)), ["three", "(4,)", "(3,)"]),
        "one moment": (lambda s: s["state"]["three"].pop("exp_avg_sq"), ["exp_avg_sq"]),
        "missing": (lambda s: s["param_groups"][2]["params"].remove("three"), ["missing three"]),
        "groups": (lambda s: s["param_groups"].pop(), ["2 param groups instead of 3"]),
        "another group": (move, ["three", "group 1", "group 2"]),
        "amsgrad": (set_(1, "amsgrad", True), ["group 1", "amsgrad"]),
        "maximize": (set_(2, "maximize", True), ["group 2", "maximize"]),
        "empty": (dict.clear, ["param_groups"]),
        "numbers": (lambda s: s.update(numbered(s)), ["is not a trained parameter"]),
    }
    for case, (change, words) in cases.items():
        try:
            with refused(name, run, *words):
                run.engine.optimizer.load_state_dict(changed(good, change) if run.rank == 0 else {})
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    run.engine.optimizer.load_state_dict(good)
    assert_same(good, run.engine.optimizer.state_dict())


@files
def test_wrong_adam_states_are_refused(pool, name):
    pool.run(2, wrong_adam_states, name, limit_s=30)


# ---- 11. and 12. buffers, frozen parameters, and what load does to the engine ----------------------------------------------------


def evaluated(engine):
    with torch.no_grad():
        return engine.eval()(global_batch("batchnorm", 8, 99)[0][0])


def scratch(model):
    model.register_buffer("scratch", torch.full((3,), float(rank_and_size()[0] + 1)).double(), persistent=False)


def save_batchnorm(name, directory):
    run = Run(name, "batchnorm", change=scratch)
    run.train(range(3))
    run.engine.save(directory)
    return evaluated(run.engine)


def load_batchnorm(name, directory, change=None):
    engine = Run(name, "batchnorm", seed=5, change=change).engine
    before = engine.module.scratch.clone() if change else None
    engine.load(directory)
    if change:
        assert_same(before, engine.module.scratch)
    norm = engine.module.net[1]
    assert norm.num_batches_tracked.dtype == torch.int64 and norm.num_batches_tracked.item() == 6  # micro-batches
    return evaluated(engine)


@fewer_engines
def test_case_31_batchnorm_on_other_ranks(pool, tmp_path, name):
    """Evaluation after loading is that of the saving run, bit for bit; buffers that are not in the state dict are not saved."""
    expected = pool.run(2, save_batchnorm, name, f"{tmp_path}/run")
    with open(f"{tmp_path}/run/meta.json") as file:
        names = json.load(file)[0]["parameters"].keys()
    assert names == build("batchnorm").state_dict().keys()
    for ranks, change in ((1, None), (3, scratch)):
        for output in pool.run(ranks, load_batchnorm, name, f"{tmp_path}/run", change):
            assert_same(output, expected[0])


def load_frozen(name, directory):
    run = Run(name, "awkward", seed=5)
    run.engine.load(directory)
    expected = build("awkward")
    frozen = [n for n, p in expected.named_parameters() if not p.requires_grad]
    assert frozen == ["layers.0.bias", "frozen.weight", "frozen.bias"]
    weights = run.engine.state_dict()
    if run.rank == 0:
        assert_same([weights[n] for n in frozen], [expected.get_parameter(n).detach() for n in frozen])
    return frozen


@files
def test_case_11_frozen_parameters(pool, saved, name):
    """They are in the checkpoint, once and without moments."""
    frozen = pool.run(3, load_frozen, name, saved(name))[0]
    keys = []
    for rank in range(2):
        keys += [k for k in safetensors.torch.load_file(f"{saved(name)}/rank_{rank:05d}.safetensors")]
    for n in frozen:
        assert {k.split(".")[-2] for k in keys if k.startswith(n)} == {"master"}
    with open(f"{saved(name)}/meta.json") as file:
        parameters = json.load(file)[0]["parameters"]
    assert not any("group" in parameters[n] or "step" in parameters[n] for n in frozen)


def load_between_backward_and_step(name, directory):
    expected, run = Run(name, "awkward", seed=5), Run(name, "awkward", seed=6)
    expected.engine.load(directory, scheduler=expected.schedule)
    run.train(range(2))
    if not name.startswith("gemini"):  # whose weights are there in forward alone
        run.engine.backward(run.engine.module.unused(torch.ones(2, 5, dtype=torch.float64)).sum())  # else it never has a gradient
    with run.engine.no_sync():  # after which fsdp keeps the root's weights for the micro-batches that follow
        run.engine.backward(run.engine(global_batch("awkward", 2, 9)[0][0]).sum())
    run.engine.load(directory, scheduler=run.schedule)
    assert_same(expected.train(range(1, 3)), run.train(range(1, 3)))
    assert_same(state_of(expected.engine), state_of(run.engine))


@pytest.mark.parametrize("name", in_sweep(ENGINES, lambda name: name not in (*FEWER, "fsdp_no_reshard")))  # has whole gradients
def test_load_discards_gradients(pool, saved, name):
    """An engine that has trained, and has a gradient, is as good as a new one."""
    pool.run(2, load_between_backward_and_step, name, saved(name))


@blocks
@pytest.mark.parametrize("kind", ["one cycle", "cosine", "plateau", "sequence"])
def test_schedulers(tmp_path, name, kind):
    """One process without a group. Those that also write betas, keep nested schedulers or the best loss so far."""
    schedules = torch.optim.lr_scheduler
    make = {
        "one cycle": lambda o: schedules.OneCycleLR(o, [0.1, 0.2, 0.3], total_steps=20),
        "cosine": lambda o: schedules.CosineAnnealingLR(o, 10),
        "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
        "sequence": lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.5)], [3]),
    }[kind]
    runs = [Run(name, "plain", seed=s) for s in (0, 1)]
    for run in runs:
        for group in run.engine.optimizer.param_groups:
            group.pop("initial_lr")
        run.schedule = make(run.engine.optimizer)
    step = (lambda run, t: run.schedule.step(1.0)) if kind == "plateau" else (lambda run, t: run.schedule.step())
    options = lambda run: [{k: v for k, v in g.items() if k != "params"} for g in run.engine.optimizer.param_groups]
    for t in range(2):
        runs[0].engine.step()
        step(runs[0], t)
    runs[0].engine.save(f"{tmp_path}/run", scheduler=runs[0].schedule)
    runs[1].engine.load(f"{tmp_path}/run", scheduler=runs[1].schedule)
    for t in range(2, 6):
        for run in runs:
            run.engine.step()
            step(run, t)
        assert options(runs[0]) == options(runs[1])
