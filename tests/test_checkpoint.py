"""Checkpoints: saved by one strategy, resumed by another on another number of ranks, killed half way, damaged, refused.

Compared: a resumed run with one that was never interrupted (bitwise on the same ranks; in float64 at 1e-10 on others, and
with one process); the geometry of fragments with index sets; the files with what the safetensors package reads; what is left
after a kill before each single file operation with the old and the new checkpoint; Adam's state with torch's AdamW.
Models have prime sizes, zero elements, scalars and fewer elements than ranks. One to four CPU ranks; about 40 s.
"""
import contextlib
import dataclasses
import importlib
import itertools
import random as python_random
import types

import pytest
import torch
import torch.distributed as dist
from models import ENGINES, Plain, Reference, build, build_engine, global_batch, rows, two_groups
from torch import nn

SAMPLES = 12  # of the global batch, whatever the number of ranks
engines = pytest.mark.parametrize("name", ENGINES)
pairs = pytest.mark.parametrize("first, then", list(itertools.product(ENGINES, ENGINES)))


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
    """Copies of all that a checkpoint holds of this rank, and its random numbers."""
    adam = engine.optimizer
    return {
        "fragments": {(f.name, str(f.boxes), f.start, kind): getattr(f, kind).clone()
                      for f in (*engine.fragments, *engine.kept()) for kind in f.kinds()},
        "model": [t.detach().clone() for t in (*engine.module.parameters(), *engine.module.buffers())],
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

    def __init__(self, name, kind, seed=0, dtype=torch.float64, spoiled=(), **knobs):
        self.kind, self.dtype, self.spoiled = kind, dtype, spoiled
        self.rank, self.ranks = rank_and_size()
        torch.manual_seed(seed)
        model = Noisy().to(dtype) if kind == "noisy" else build(kind, seed, dtype)
        knobs = {**dict(lr=0.01, eps=1e-3, max_norm=0.5, precision="fp32"), **knobs}
        self.engine = build_engine(name, model, two_groups(model), **knobs)
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
            losses.append(self.engine.forward_backward(mine, 2, loss_fn))
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
    assert_same(a.state_dict(), b.state_dict())
    assert_same(a.optimizer.state_dict(), b.optimizer.state_dict())
    assert (a.scale, a.skipped_steps, a.grad_norm) == (b.scale, b.skipped_steps, b.grad_norm)
    assert straight.schedule.state_dict() == second.schedule.state_dict()
    draws = [None] * straight.ranks
    dist.all_gather_object(draws, (torch.rand(1).item(), python_random.random()))
    assert len({d for draw in draws for d in draw}) == 2 * straight.ranks  # each rank goes on with its own
    return b.scale.item(), b.skipped_steps.item()


@engines
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["plain", "awkward", "tied", "batchnorm", "bert", "noisy"])
def test_resumed_on_as_many_ranks_bit_for_bit(pool, tmp_path, name, kind, ranks):
    """Case 42: weights, buffers, moments, learning rates, losses, each rank's random numbers."""
    pool.run(ranks, resumed_bitwise, name, kind, f"{tmp_path}/run")


@engines
def test_resumed_before_the_first_step(pool, tmp_path, name):
    """Orders that an engine learns in its first step are learnt by the resumed one too."""
    pool.run(3, resumed_bitwise, name, "awkward", f"{tmp_path}/run", saved_after=0)


@engines
def test_resumed_loss_scale(pool, tmp_path, name):
    """fp16: step 0 is skipped, steps 1 and 2 are finite, so the scale doubles in step 2 only if the count of step 1 is kept."""
    result = pool.run(2, resumed_bitwise, name, "plain", f"{tmp_path}/run", dtype=torch.float32, spoiled=[0],
                      precision="fp16", initial_scale=64.0, growth_interval=2)
    assert result == [(64.0, 1)] * 2


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


@engines
@pytest.mark.parametrize("kind, saved, resumed", [
    ("awkward", 2, (1, 3)), ("awkward", 4, (3,)), ("tied", 2, (3,)), ("gpt2", 2, (3,)),
    *[pytest.param(kind, *ranks, marks=pytest.mark.sweep) for kind in ("awkward", "tied", "gpt2", "bert-mlm", "plain")
      for ranks in [(1, (2, 4)), (2, (1, 3, 4)), (3, (1, 2, 4)), (4, (1, 2, 3))]]])
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


@engines
def test_stretches_are_those_of_indexing(name):
    rng = python_random.Random(0)
    for _ in range(300):
        for shape, boxes, dim in layouts(rng):
            numel = len(indices(shape, boxes, dim))
            ranges = [(0, numel), *[sorted(rng.randint(0, numel) for _ in range(2)) for _ in range(2)]]
            for start, end in ranges:
                found = file_of(name).stretches(shape, boxes, start, end)
                assert spread_out(found, end - start) == indices(shape, boxes, dim, start, end), (shape, boxes, start, end)


@engines
def test_stretches_are_few(name):
    """One for a whole parameter and for rows of it, one per row for columns, three for a fused QKV joined along dim 0."""
    stretches, everything = file_of(name).stretches, slice(0, 1000)
    assert stretches((1000, 1000), ((everything, everything),), 5, 999_999) == [(5, 0, 999_994)]
    assert stretches((1000, 1000), ((slice(500, 1000), everything),), 0, 500_000) == [(500_000, 0, 500_000)]
    assert len(stretches((1000, 1000), ((everything, slice(500, 1000)),), 0, 500_000)) == 1000
    assert len(stretches((3000, 1000), tuple((slice(a, a + 500), everything) for a in (0, 1000, 2000)), 0, 1_500_000)) == 3


@engines
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


@engines
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


@engines
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


@engines
@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_parallel_fragments_to_an_engine_and_back(pool, tmp_path, name, ranks):
    pool.run(4, save_by_hand, name, f"{tmp_path}/by-hand")
    pool.run(ranks, load_what_was_made_by_hand, name, f"{tmp_path}/by-hand", f"{tmp_path}/engine")
    pool.run(4, load_by_hand, name, f"{tmp_path}/engine")
    pool.run(4, load_by_hand, name, f"{tmp_path}/by-hand")
