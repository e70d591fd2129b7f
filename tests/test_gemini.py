"""What is particular to gemini.py: who is on the device when, under a budget; operators of all kinds; passes unlike the first.

Compared: one process in float64 at 1e-10 (as test_contract.py, which asks every strategy the same, and gemini.py at other fractions
and budgets), gathers with the plan's, the plan's with the fewest of all ways to release, which are tried, the ledger of bytes with
live storages, the most of it with the budget. A `device_budget` is mostly `least`: what the error names when there is next to none.
Whatever is not supported must be an error that names the parameter, with the process alive and a good step after it.
By default most rows are on one rank, where everything moves but nothing is sent, and of each kind some on two; the sweep has them
all on two, and a few on three. About 45 s, the sweep some seven minutes more.
"""
import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import random as random_module
import re
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Reference, build, global_batch, in_sweep, live_tensors, loss_of, raises, random, rows
from test_contract import LivePeak, close
from test_fsdp import (
    ANSWERED,
    AROUND,
    BROKEN_RULES,
    UNITS,
    Breaks,
    Checkpointing,
    Net,
    batch_of,
    build_net,
    hf_batch,
    hf_model,
    same_gradients,
    same_weights,
    share,
    square_loss,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini
from gemini import Gemini, Plan, Residency, Simulation, State, fill_chunks, search_chunk

ADAM = dict(lr=0.01, eps=1e-3, max_norm=0.5, precision="fp32")
SMALL = 0.0005  # MiB: 64 elements in float64, so that a matrix of 7 x 7 and a bias fill a chunk


# ---- 1. the rules, without a tensor -----------------------------------------------------------------------------------------


def fewest(plan, places):
    """The fewest gathers of all ways to release, by trying them; room for `places[moment]` chunks of one size. None if there is no
    way. Tried is every choice of what to release when there is no room; releasing earlier helps nobody."""
    none = frozenset()
    best = {(none, none): 0}  # (gathered, those of them that hold gradients): gathers so far

    def cheapest(ways):
        found = {}
        for held, dirty, cost in ways:
            found[held, dirty] = min(found.get((held, dirty), 10**6), cost)
        return found

    def without(held, too_many, keep):
        """All ways to release `too_many` of `held` that are not in `keep`."""
        return [held - set(gone) for gone in itertools.combinations(sorted(held - keep), too_many)] if too_many > 0 else [held]

    def sent(best, chunk, busy, n):
        """Its gradients leave. Without weights to stand in place of they need a place of their own."""
        return cheapest((left - {chunk}, dirty - {chunk}, cost) for (held, dirty), cost in best.items()
                        for left in without(held, len(held) + (chunk not in held) - n, busy | dirty))

    for moment, chunks in enumerate(plan.order):
        back, now, busy = frozenset(plan.at("back", moment)), frozenset(chunks), frozenset(plan.busy[moment])
        best = cheapest((held - back, dirty - back, cost) for (held, dirty), cost in best.items())
        for chunk in plan.at("sums", moment - 1):
            best = sent(best, chunk, busy, places[moment - 1])
        grads = frozenset(plan.at("grads", moment))
        best = cheapest((left, dirty | grads & left, cost + len(now - held)) for (held, dirty), cost in best.items()
                        for left in without(held | now, len(held | now) - places[moment], now | busy | dirty))
    for chunk in plan.at("sums", len(plan.order) - 1):
        best = sent(best, chunk, none, places[-1])
    return min(best.values(), default=None)


def random_plan(dice, n_chunks, n_moments):
    """A forward of random reads and its backward, in which what was read last may have to stay. Some chunks are frozen, some never
    read; of others, gradients stand there early, of those, weights are read once more after that."""
    order = [sorted(dice.sample(range(n_chunks), dice.choice((1, 1, 1, 2)))) for _ in range(n_moments)]
    order = [c for k, c in enumerate(order) if not k or c != order[k - 1]]
    n_forward = len(order)
    order += [c for k, c in enumerate(reversed(order)) if k]
    plan = Plan(order, [*map(list, order)], [k >= n_forward for k in range(len(order))], [dice.choice((0, 0, 1)) for _ in order],
                n_forward=n_forward)
    for moment in range(n_forward + 1, len(order)):
        if dice.random() < 0.2:
            plan.busy[moment] = sorted({*order[moment], *order[moment - 1]})
    for chunk in range(n_chunks):
        reads = [m for m in plan.uses.get(chunk, []) if m >= n_forward - 1]
        if dice.random() < 0.8:
            plan.sums.append([reads[-1] if reads else len(order) - 1, chunk])
            if reads and dice.random() < 0.8:
                plan.grads.append([reads[-1], chunk])
                if len(reads) > 1 and dice.random() < 0.5:
                    plan.grads.append([reads[0], chunk])
                    plan.back += [[m, chunk] for m in reads[1:]]
    plan.sums.sort()
    return plan


def simulated(plan, rooms, budget, depth=0, passes=1):
    """In a second pass what was fetched early is there."""
    home = Residency(rooms, None, depth, True, set())
    for _ in range(passes):
        home.do = counts = Simulation()
        counts.run(home, dataclasses.replace(plan, budget=budget))
    return counts


def optimal(plan):
    """The plan's rules gather as few as can be, with as many places as are needed at least, up to one for each chunk, and with one
    place less nobody can. Returns the gathers for each number of places. `others` counts in rooms."""
    read = {k for chunks in plan.order for k in chunks}
    n_rooms = max(read | {k for _, k in plan.sums}) + 1
    others, room, found = plan.others, 64, []
    plan = dataclasses.replace(plan, others=[room * o for o in others])
    needed = simulated(plan, [room] * n_rooms, 0).most
    assert needed % room == 0
    for places in range(needed // room, max(needed // room, len(read)) + 3):
        counts = simulated(plan, [room] * n_rooms, places * room + room // 2)  # half a place is none
        assert counts.most <= places * room
        gathers = sum(counts.gathers.values())
        few = fewest(plan, [places - o for o in others])
        assert few <= gathers <= few + len(plan.back), (plan, places)  # what is to be taken back need not stay until then
        found.append(gathers)
    assert fewest(plan, [needed // room - 1 - o for o in others]) is None, (plan, needed)
    return found


@pytest.mark.parametrize("seeds", in_sweep([range(200), range(1000, 4000)], lambda seeds: len(seeds) > 200), ids=str)
def test_no_other_choice_gathers_less(seeds):
    several = 0
    for seed in seeds:
        dice = random_module.Random(seed)
        plan = random_plan(dice, dice.randrange(2, 6), dice.randrange(2, 7))
        found = optimal(plan)
        if not plan.back:  # else an unlucky chunk that stays is read again in vain: its gradients come, and it is taken back
            assert found == sorted(found, reverse=True) and found[-1] == len(plan.uses)
        several += len(set(found)) > 2
    assert several > len(seeds) // 6  # plans in which room matters


@pytest.mark.parametrize("seeds", in_sweep([range(70), range(70, 400)], lambda seeds: len(seeds) > 70), ids=str)
def test_budgets_and_unequal_rooms(seeds):
    """Rooms of any size, with chunks fetched ahead: the budget is kept from the least on, below it the rules say how much."""
    for seed in seeds:
        dice = random_module.Random(seed)
        plan = random_plan(dice, dice.randrange(2, 7), dice.randrange(2, 9))
        run = functools.partial(simulated, plan, [dice.choice((1, 2, 5)) for _ in range(7)], passes=2)
        least = run(0).most
        for depth in (0, 1, 2, 9):
            assert run(0, depth).most == least
            for budget in range(least, least + 15):
                assert run(budget, depth).most <= budget, (seed, depth, budget)
            assert run(least - 1, depth).most == least


def recorded(kind, use_reentrant):
    model = build(kind)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
    engine = Gemini(model.train(), chunk_mb=0.0125, **ADAM)
    batch, loss_fn = global_batch(kind, 2, seed=dist.get_rank())
    engine.forward_backward(batch, 1, loss_fn)
    return engine.plan, {chunk.room_bytes for chunk in engine.chunks}


@pytest.mark.parametrize("kind, use_reentrant", in_sweep(
    [("bert", None), ("gpt2", None), ("gpt2", False), ("bert", True)], lambda kind, use_reentrant: use_reentrant is not None))
def test_no_other_choice_gathers_less_in_recorded_passes(pool, kind, use_reentrant):
    (plan, rooms), (other, _) = pool.run(2, recorded, kind, use_reentrant)
    assert dataclasses.asdict(plan) == dataclasses.asdict(other) and len(rooms) == 1 and not any(plan.others)
    found = optimal(plan)
    assert len(set(found)) > 3 and found == sorted(found, reverse=True)


def waste_of(numels, align, capacity):
    chunks = fill_chunks(numels, capacity)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(numels)))
    assert all(len(chunk) == 1 or sum(numels[i] for i in chunk) <= capacity for chunk in chunks)
    return 1 - sum(numels) / sum(max(capacity, -(-sum(numels[i] for i in chunk) // align) * align) for chunk in chunks)


def test_case_57_chunks_are_filled_and_waste_least():
    assert fill_chunks([3, 3, 3, 9, 1], 7) == [[0, 1], [3], [2, 4]] and fill_chunks([], 7) == []
    assert fill_chunks([8, 8, 8], 8) == [[0], [1], [2]]
    dice = random_module.Random(0)
    for align in 50 * (8, 24, 64):
        numels = [8 * dice.randrange(1, 200) for _ in range(dice.randrange(1, 30))]
        wanted_mb = dice.choice((None, 0.001, 0.0005))
        capacity, waste = search_chunk(numels, 4, align, wanted_mb)
        assert capacity % align == 0 and waste == waste_of(numels, align, capacity) and 0 <= waste < 1
        if wanted_mb:
            assert 0 <= capacity - wanted_mb * 2**18 < align
        else:  # none of those that were tried wastes less: an eighth to a quarter of all, in 32 steps
            low, high = max(sum(numels) // 8, 1), max(sum(numels) // 4, 1)
            tried = [max(-(-(low + (high - low) * k // 31) // align), 1) * align for k in range(32)]
            wasted = [waste_of(numels, align, c) for c in tried]
            assert waste == min(wasted) and capacity == max(c for c, w in zip(tried, wasted) if w == waste)


# ---- engines and what is asked of them --------------------------------------------------------------------------------------


def start(make=Net, seed=0, **knobs):
    """An engine, and one process with the same weights."""
    torch.manual_seed(seed)
    model = make().double()
    reference = Reference(model, None, ADAM["max_norm"], lr=0.01, eps=1e-3)
    return Gemini(model, **{**ADAM, "chunk_mb": SMALL, **knobs}), reference


def least(make=Net, run=None, **knobs):
    """The budget that the error names when there is next to none, for a first pass that is `run`."""
    engine, _ = start(make, device_budget=1, **knobs)
    try:
        run(engine) if run else engine.forward_backward(share(batch_of(0)), 1, square_loss)
    except RuntimeError as error:
        found = re.fullmatch(r"device_budget is 1 bytes; this model, with batches like the first, needs (\d+)", str(error))
        assert found, error
        return int(found[1])
    raise AssertionError("a budget of one byte is enough")


def memory_while_it_is_built():
    """16 bytes an element in the end, and beside them one chunk's values on the way: weights go when their masters are there."""
    model = nn.Sequential(*[nn.Linear(200, 200, bias=False) for _ in range(8)])
    numel, n = 8 * 200 * 200, dist.get_world_size()
    weights = [p.data for p in model.parameters()]  # alive, so that nothing else gets their place
    with LivePeak(weights) as live:
        engine = Gemini(model, precision="bf16", chunk_mb=2 * 200 * 200 / 2**20)
    assert len(engine.chunks) == 8
    # 4 bytes of a chunk's values and 4 of the new master's zeros, of each of 8 chunks; 10 KB for what is small (scale, inputs)
    assert 16 * numel / n <= live.peak < (16 + 8 / 8) * numel / n + 10_000, (live.peak, numel)


def test_memory_while_it_is_built(pool):
    pool.run(2, memory_while_it_is_built)


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, x):
        return self.used(x)


def nothing_between_parameters():
    """A chunk that nobody read gets memory in which anything may be; sums, and a norm over whole slices, must find zeros."""
    resize, launched = torch.UntypedStorage.resize_, []

    def dirty(storage, n_bytes):
        grown = n_bytes > storage.nbytes()
        resize(storage, n_bytes)
        if grown:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # NaN in every float

    class Watched(gemini.SliceSum):
        def __init__(self, engine, flat, *args):
            launched.append(bool(flat.isfinite().all()))
            super().__init__(engine, flat, *args)

    engine = Gemini(HalfUsed().double(), precision="fp32", chunk_mb=SMALL / 8, placement="static")
    assert len(engine.chunks) > 1
    with mock.patch.object(torch.UntypedStorage, "resize_", dirty), mock.patch.object(gemini, "SliceSum", Watched):
        for _ in range(2):
            engine.forward_backward(random(2, 3, seed=0), 1, lambda out, x: out.square().mean())
            engine.step()
    assert len(launched) == 2 * len(engine.chunks) and all(launched), launched


def test_nothing_between_parameters(pool):
    pool.run(2, nothing_between_parameters)


def live_bytes(engine):
    """Storages of what is on the device: chunks' weights, and the optimizers and slices that are placed there."""
    held = [c.full for c in engine.chunks]
    for c in engine.chunks:
        if c.on_device and c.trained:
            held += [c.master, c.exp_avg, c.exp_avg_sq, c.shard]
        if c.store_on_device:
            held.append(c.store)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())


def watch(engine):
    """The ledger is compared with live storages before and after each moment of a pass."""
    come_to = engine.home.come_to

    def compared(moment, chunks, plan):
        assert engine.device_bytes == live_bytes(engine), (moment, chunks)
        come_to(moment, chunks, plan)
        assert engine.device_bytes == live_bytes(engine), (moment, chunks)

    engine.home.come_to = compared
    return engine


def all_away(engine):
    early = engine.home.gathered  # fetched for the next pass
    assert {c.full.untyped_storage().nbytes() for c in engine.chunks if c.number not in early} <= {0}
    assert not engine._forwards and not engine._in_backward and not engine._calls and not any(engine._unreached)
    assert all(p.grad is None for p in engine.params)
    assert engine.device_bytes == live_bytes(engine)


@contextlib.contextmanager
def within(engine):
    """Once there is a plan, the budget is kept."""
    planned, engine.most_device_bytes = engine.plan is not None, engine.device_bytes
    yield
    if planned and engine.placement == "auto":
        assert engine.most_device_bytes <= engine.plan.budget, (engine.most_device_bytes, engine.plan.budget)


def gathers_of(engine):
    return sum(chunk.gathers for chunk in engine.chunks)


def planned_gathers(engine):
    return sum(engine._simulate().gathers.values())


def end_step(engine, reference):
    """After the backwards of both."""
    same_gradients(engine, reference)
    reference.step()
    engine.step()
    all_away(engine)


def good_steps(engine, reference, seed=77, steps=2, micro_batches=1, loss=square_loss, budget=True):
    """Steps equal to one process, the budget kept. Returns the gathers of the last one."""
    for step in range(seed, seed + steps):
        x, before = batch_of(step), gathers_of(engine)
        expected = loss(reference.model(x))
        expected.backward()
        with within(engine) if budget else contextlib.nullcontext():
            close(engine.forward_backward(share(x), micro_batches, loss), expected.detach())
            all_away(engine)
            end_step(engine, reference)
        gathers = gathers_of(engine) - before
    same_weights(engine, reference)
    all_away(engine)
    return gathers


# ---- 2. many budgets --------------------------------------------------------------------------------------------------------


def hf_start(kind, checkpointing=None, **knobs):
    def make():
        model = build(kind)
        if checkpointing is not None:
            model.gradient_checkpointing_enable(dict(use_reentrant=checkpointing))
        return model.train()
    return functools.partial(start, make, chunk_mb=0.0125, **knobs)


def hf_step(kind, engine, reference, seed, micro_batches=1, scale=1.0, check=True):
    """One step beside the reference's; `scale`: infinite for a step that is skipped. Returns its gathers."""
    n, r, before = dist.get_world_size(), dist.get_rank(), gathers_of(engine)
    batch, loss_fn = global_batch(kind, 4 * n, seed)
    pieces = [rows(batch, lo, lo + 4 // micro_batches) for lo in range(4 * r, 4 * r + 4, 4 // micro_batches)]
    with within(engine):
        for k, piece in enumerate(pieces):
            loss = loss_of(engine, piece, loss_fn) * scale / micro_batches
            assert engine.device_bytes == live_bytes(engine)
            with engine.no_sync() if k < micro_batches - 1 else contextlib.nullcontext():
                engine.backward(loss)
            all_away(engine)
        if scale == 1.0:
            loss_of(reference.model, batch, loss_fn).backward()
            if check:
                same_gradients(engine, reference)
            reference.step()
        engine.step()
    assert bool(engine.skipped) == (scale != 1.0)
    all_away(engine)
    return gathers_of(engine) - before


def range_of_budgets(kind, begin, how_many):
    """From the least to one that holds everything: optimizers, slices, all chunks."""
    def run(engine):
        batch, loss_fn = global_batch(kind, 4, seed=dist.get_rank())
        engine.forward_backward(batch, 1, loss_fn)
    make = begin.args[0]
    low = least(make, run, **begin.keywords)
    engine, _ = start(make, **begin.keywords)
    for _ in range(2):
        run(engine)
        engine.step()
    assert all(chunk.on_device for chunk in engine.chunks if chunk.trained)
    high = engine.most_device_bytes + (engine.prefetch + 1) * max(chunk.room_bytes for chunk in engine.chunks)
    return [low + (high - low) * k // (how_many - 1) for k in range(how_many)]


def at_budgets(kind, checkpointing, how_many, prefetch):
    begin, placed = hf_start(kind, checkpointing, prefetch=prefetch), []
    for budget in range_of_budgets(kind, begin, how_many):
        engine, reference = begin(device_budget=budget)
        watch(engine)
        for seed in range(3):
            hf_step(kind, engine, reference, seed, check=seed != 1)
        planned = engine._simulate()
        gathers = hf_step(kind, engine, reference, 3, check=False)
        assert gathers == sum(planned.gathers.values()), (budget, gathers, planned.gathers)
        part = (dist.get_world_size() - 1) / dist.get_world_size()
        sent = sum(c.full.numel() * 8 * planned.gathers.get(c.number, 0) for c in engine.chunks)
        assert engine.traffic.get("all_gather", 0) == part * sent
        assert engine.traffic.get("reduce_scatter", 0) == part * sum(c.full.numel() * 8 for c in engine.chunks if c.trained)
        assert not {"to_device", "to_host"} & engine.traffic.keys()  # there is no bus
        placed.append(sum(c.on_device for c in engine.chunks))
        masters = [c.master.clone() for c in engine.chunks]
        hf_step(kind, engine, reference, 5, scale=float("inf"))
        assert all(map(torch.equal, masters, [c.master for c in engine.chunks]))
        batch, loss_fn = global_batch(kind, 4, seed=dist.get_rank())
        for seed, micro_batches in ((6, 2), (7, 1)):
            with torch.no_grad(), within(engine):
                close(loss_of(engine, batch, loss_fn), loss_of(reference.model, batch, loss_fn))
            hf_step(kind, engine, reference, seed, micro_batches)
        same_weights(engine, reference)
    assert placed == sorted(placed) and placed[0] == 0 and placed[-1] == len(engine.chunks), placed


@pytest.mark.parametrize("ranks, kind, checkpointing, how_many, prefetch", in_sweep(
    [(1, "bert", None, 10, 1), (1, "gpt2", None, 10, 1), (2, "gpt2", None, 3, 1), (2, "bert", None, 10, 1),
     (2, "gpt2", None, 10, 1), (2, "bert", True, 3, 1), (2, "gpt2", False, 4, 1), (2, "gpt2", True, 4, 3),
     *[(2, kind, None, 4, prefetch) for kind in ("bert", "gpt2") for prefetch in (0, 3)]],
    lambda ranks, kind, checkpointing, how_many, prefetch: ranks == 2 and (kind, checkpointing, how_many) != ("gpt2", None, 3)))
def test_budgets(pool, ranks, kind, checkpointing, how_many, prefetch):
    """The budget and the plan are kept, the numbers right: over a skipped step, looks between, micro-batches that add up."""
    pool.run(ranks, at_budgets, kind, checkpointing, how_many, prefetch, limit_s=120)


def gathers_at_budgets(kind, prefetch):
    """Optimizers stay where they are. Of each budget: gathers of a step, and the fewest of all ways to release."""
    begin, found = hf_start(kind, prefetch=prefetch), []
    engine, reference = begin(device_budget=range_of_budgets(kind, begin, 2)[0])
    hf_step(kind, engine, reference, 0)
    room, = {chunk.room_bytes for chunk in engine.chunks}
    assert engine.plan.placed and not engine.home.fixed
    for budget in range(engine.plan.budget, (len(engine.chunks) + 2) * room, room // 2):
        engine.plan.budget, engine.plan.eager = budget, False  # eager is for budgets where it costs nothing, which placing decides
        hf_step(kind, engine, reference, 1, check=False)  # what the last step fetched early, it did under the budget before
        gathers = hf_step(kind, engine, reference, 2, check=False)
        assert gathers == planned_gathers(engine)
        found.append((gathers, fewest(engine.plan, [budget // room] * len(engine.plan.order))))
    return found, len(engine.chunks)


@pytest.mark.parametrize("kind, prefetch", in_sweep(
    itertools.product(("bert", "gpt2"), (0, 1, 3)), lambda kind, prefetch: (kind, prefetch) != ("bert", 1)))
def test_steps_gather_as_few_as_can_be_and_fewer_with_more_room(pool, kind, prefetch):
    """What is fetched early for the next pass, or ahead, is not given up before it is read: that would be a gather more."""
    (found, n_chunks), _ = pool.run(2, gathers_at_budgets, kind, prefetch, limit_s=120)
    assert all(gathers == few for gathers, few in found), found
    assert found == sorted(found, reverse=True) and found[0][0] > found[len(found) // 2][0] > found[-1][0] == n_chunks, found


def too_small_budget():
    """The error comes with the first backward, again with the next one, and on all ranks; a byte less than the least is too little,
    the least is enough."""
    low = least()
    for budget in (1, low - 1):
        engine, _ = start(device_budget=budget)
        for _ in range(2):
            with raises(RuntimeError, f"device_budget is {budget} bytes", f"needs {low}"):
                engine.forward_backward(share(batch_of(0)), 1, square_loss)
        all_away(engine)
    engine, reference = start(device_budget=low)
    good_steps(engine, reference)
    with within(engine):
        good_steps(engine, reference)
        assert engine.most_device_bytes == low  # not a byte less would have been


def test_a_budget_that_is_too_small(pool):
    pool.run(2, too_small_budget)


def placed_within(kind, prefetch):
    """At many budgets, without training."""
    begin, found = hf_start(kind, prefetch=prefetch), []
    engine, reference = begin()
    hf_step(kind, engine, reference, 0)
    for budget in range(*range_of_budgets(kind, begin, 2), 1999):
        engine.plan.budget = budget
        engine._place_optimizers()
        assert engine._simulate().most <= budget, (budget, engine._simulate().most)
        found.append(sum(chunk.on_device for chunk in engine.chunks))
    assert found[0] == 0 and len({*found}) > len(engine.chunks) // 2, found


@pytest.mark.parametrize("kind", in_sweep(["bert", "gpt2"], lambda kind: kind == "gpt2"))
def test_optimizers_leave_room_for_every_moment(pool, kind):
    for prefetch in (0, 1, 3):
        pool.run(1, placed_within, kind, prefetch)


class Recorded(Simulation):
    """The sequence of what a Residency decides."""

    def __init__(self):
        super().__init__()
        self.log = []

    def gather(self, chunk):
        self.log.append(("gather", chunk))

    def release(self, chunk):
        self.log.append(("release", chunk))

    def send(self, home, chunk, moment, plan):
        super().send(home, chunk, moment, plan)
        self.log.append(("sum", chunk, moment))


def timelines(budgets):
    """What happens in a step, and when, is what the rules say of the plan."""
    for share_of_all in budgets:
        engine, reference = start(UNITS["twice, apart"][0], device_budget=share_of_all and int(share_of_all * least()))
        good_steps(engine, reference)
        for _ in range(2):  # `good_steps` ends with a look, for which what was fetched early has gone
            engine.timeline = []
            engine.forward_backward(share(batch_of(0)), 1, square_loss)
            engine.step()
        home, log = engine.home.copy(None), Recorded()
        for _ in range(2):
            home.do = log = Recorded()
            log.run(home, engine.plan)
        assert [(what, chunk, *([moment] if what == "sum" else [])) for moment, what, chunk in engine.timeline] == log.log
        assert [[m, c] for m, what, c in engine.timeline if what == "sum"] == engine.plan.sums


@pytest.mark.parametrize("ranks, budgets", in_sweep(
    [(1, [1, 1.5, 3, None]), (2, [1]), (2, [1.5, 3, None])], lambda ranks, budgets: (ranks, len(budgets)) == (2, 3)), ids=str)
def test_timeline(pool, ranks, budgets):
    pool.run(ranks, timelines, budgets)


# ---- 3. models of all shapes, each under three budgets ----------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """An operator of the user's own, which reads its weight again in backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Shifted(torch.autograd.Function):
    """One that does not."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum(0)


class Program(Net):
    """Steps (what, one, two, left, right): `what` is done to the sum of two results so far with two of four blocks."""

    def __init__(self, *programs):
        super().__init__()
        self.table, self.programs, self.which, self.broken = nn.Parameter(0.3 * torch.randn(7, 21)), programs, 0, False

    def forward(self, x):
        program, found, b = self.programs[self.which], [x], self.blocks
        if any(what in REENTRANT for what, *_ in program) and torch.is_grad_enabled() and not x.requires_grad:
            found = [x.clone().requires_grad_()]  # as reentrant checkpointing wants it
        for k, (what, i, j, left, right) in enumerate(program):
            if self.broken and k == len(program) // 2:
                raise ZeroDivisionError
            found.append(torch.tanh(OPERATORS[what](self, b[i], b[j], found[left % len(found)] + found[right % len(found)])))
        return self.head(torch.tanh(sum(found[-3:])))


def without_gradients(net, one, two, x):
    with torch.no_grad():
        return one(x)


def row_by_row(net, one, two, x):
    y = x
    for row, column in [*zip(one.a.weight, two.b.weight.unbind(1))][:3]:
        y = torch.tanh(two.a(y) * row) + y * column
    return y


OPERATORS = {
    "call": lambda net, one, two, x: one(x), "same twice": lambda net, one, two, x: one(torch.tanh(one(x))),
    "in vain": lambda net, one, two, x: (one(x), x)[1], "detach": lambda net, one, two, x: one(x).detach(),
    "no_grad": without_gradients, "rows": row_by_row,
    "checkpoint": lambda net, one, two, x: checkpoint(one, x, use_reentrant=False),
    "checkpoint two": lambda net, one, two, x: checkpoint(lambda h: two(one(h)), x, use_reentrant=False),
    "reentrant": lambda net, one, two, x: checkpoint(one, x, use_reentrant=True),
    "reentrant two": lambda net, one, two, x: checkpoint(lambda h: two(one(h)), x, use_reentrant=True),
    "reentrant nested": lambda net, one, two, x: checkpoint(
        lambda h: checkpoint(two, one(h), use_reentrant=True), x, use_reentrant=True),
    "weights": lambda net, one, two, x: nn.functional.linear(x, one.a.weight, two.b.bias),
    "without": lambda net, one, two, x: nn.functional.linear(x, one.a.weight.detach()),
    "views": lambda net, one, two, x: x @ one.a.weight.t() @ two.b.weight.view(-1).view(7, 7) + (
        x @ one.a.weight[:3].t()).sum(1, keepdim=True),
    "several": lambda net, one, two, x: torch.cat([x, x], 1) @ torch.cat([one.a.weight, two.b.weight]) + x @ torch.stack(
        [block.b.weight for block in net.blocks]).tanh().sum(0),  # else torch lets gradients share memory, and clips them twice
    "table": lambda net, one, two, x: x @ net.table @ net.table.t(),
    "penalty": lambda net, one, two, x: x + 1e-2 * (one.a.weight.square().sum() + two.b.bias.square().sum()
                                                    + net.table.square().sum()),
    "norms": lambda net, one, two, x: x + 1e-3 * torch.nn.utils.parameters_to_vector(net.parameters()).square().sum(),
    "own": lambda net, one, two, x: Scaled.apply(x, one.a.weight),
    "own shift": lambda net, one, two, x: Shifted.apply(x, two.a.bias),
}
REENTRANT = ("reentrant", "reentrant two", "reentrant nested")


def chain(*steps):
    return lambda: Program([(what, i, j, -1, -1) for what, i, j in steps])


CHAINS = {
    "views": chain(("views", 0, 3), ("call", 0, 0), ("call", 1, 0), ("views", 3, 0), ("call", 3, 0), ("views", 1, 1)),
    "rows": chain(("rows", 0, 3), ("call", 1, 0), ("rows", 3, 1), ("call", 2, 0)),
    "weights of others": chain(("weights", 3, 2), ("call", 0, 0), ("call", 3, 0), ("weights", 0, 1), ("weights", 3, 0)),
    "several": chain(("several", 0, 3), ("call", 1, 0), ("several", 2, 1)),
    "table": chain(("call", 0, 0), ("table", 0, 0), ("call", 1, 0), ("table", 0, 0)),
    "with, then without": chain(("call", 0, 0), ("weights", 1, 1), ("without", 1, 0), ("call", 2, 0)),
    "without, then with": chain(("without", 1, 0), ("call", 0, 0), ("weights", 1, 1), ("call", 2, 0)),
    "penalty": chain(("call", 0, 0), ("penalty", 0, 3), ("call", 1, 0), ("norms", 0, 0), ("call", 2, 0)),
    "own, between": chain(("call", 0, 0), ("own", 1, 0), ("call", 1, 0), ("own", 2, 0), ("call", 2, 0), ("own", 2, 0)),
    "own, first": chain(("own", 0, 0), ("own shift", 1, 1), ("call", 1, 0), ("call", 0, 0)),
    "own, alone": chain(("call", 0, 0), ("own", 1, 0), ("own shift", 2, 2), ("call", 3, 0)),
}


class Large(nn.Module):
    """Parameters larger than a chunk, between small ones."""

    def __init__(self):
        super().__init__()
        self.first, self.large, self.second = nn.Linear(7, 5), nn.Linear(5, 51), nn.Linear(51, 3)
        self.table = nn.Embedding(37, 5)

    def forward(self, x):
        h = torch.tanh(self.first(x)) + self.table((x[:, 0] * 10).long().abs() % 37)
        return self.second(torch.tanh(self.large(h)))


class Layers(nn.Module):
    """What torch.nn computes in C++ of several weights at once."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.attention = nn.Linear(1, 6), nn.GroupNorm(1, 6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.lstm = nn.LSTM(6, 3, 2, batch_first=True, bidirectional=True)
        self.layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
        self.conv, self.turned, self.head = nn.Conv1d(6, 3, 3), nn.ConvTranspose1d(3, 2, 3), nn.Bilinear(2, 6, 3)

    def forward(self, x):
        h, (last, _) = self.lstm(self.first(x[..., None]))
        h = self.norm((h + last[0].repeat(1, 2)[:, None]).transpose(1, 2)).transpose(1, 2)
        out, weights = self.attention(h, h, h)
        h = self.layer(h + out + weights.mean(2, keepdim=True))
        return self.head(self.turned(self.conv(h.transpose(1, 2)).relu_()).amax(2), h.mean(1))


SHAPES = {**{kind: make for kind, (make, _) in UNITS.items()}, **CHAINS, "large": Large, "layers": Layers,
          **{f"broken rule: {kind}": make for kind, make in BROKEN_RULES.items()}}
SENT = ["views", "weights of others", "penalty", "own, between", "twice, apart", "varies"]
ALONE = [*[kind for kind in CHAINS if kind not in SENT], "large", "layers", "unused", "middle frozen", "odd sizes", "in vain",
         "detached", "no_grad"]
OWN = [kind for kind in CHAINS if kind.startswith("own")]
ONE_PIECE = ("weights", "varies")  # another loss with micro-batches: not made of rows alone, or another way each time


def all_shapes(kinds, budgets, micro_batches=1, **knobs):
    """budgets: beside the least, in terms of that; None for no limit."""
    for kind in kinds:
        make, budget = SHAPES[kind], 0
        try:
            low = least(make, **knobs)
            for budget in (low, *[b and int(b * low) for b in budgets]):
                engine, reference = start(make, device_budget=budget, **knobs)
                good_steps(watch(engine), reference, steps=3, micro_batches=micro_batches, budget=kind != "varies")
        except Exception as error:
            error.add_note(f"kind {kind}, budget {budget}")
            raise


@pytest.mark.parametrize("ranks, kinds, budgets, chunk_mb", in_sweep(
    [(2, SENT, [], SMALL), (1, ALONE, [], SMALL), (1, OWN, [None], 0.002), (2, ALONE, [], SMALL), (2, OWN, [None], 0.002)],
    lambda ranks, kinds, *_: ranks == 2 and kinds is not SENT), ids=lambda x: f"{len(x)}" if isinstance(x, list) else None)
def test_shapes(pool, ranks, kinds, budgets, chunk_mb):
    """Case 11, a module used twice, operators that autograd knows and that it does not, in small chunks and in one with others."""
    pool.run(ranks, all_shapes, kinds, budgets, limit_s=100, chunk_mb=chunk_mb)


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("ranks, micro_batches, knobs", [
    (3, 2, dict(prefetch=0)), (1, 1, dict(prefetch=3)), (2, 1, dict(chunk_mb=0.001))], ids=str)
@pytest.mark.sweep
def test_shapes_at_more_budgets(pool, part, ranks, micro_batches, knobs):
    kinds = [k for k in SHAPES if not (k in ONE_PIECE and micro_batches > 1) and not ("weights" in k and ranks == 1)]
    pool.run(ranks, all_shapes, kinds[part::3], [2], micro_batches, limit_s=200, **knobs)


# ---- 4. activation checkpointing, families ----------------------------------------------------------------------------------


def checkpointed(use_reentrant, micro_batches, tight, part):
    cases = {around: functools.partial(Checkpointing, around, use_reentrant) for around in ("inside", *AROUND)}
    cases |= {f"{around}, frozen norm": functools.partial(Checkpointing, around, use_reentrant, True)  # case 12
              for around in ("a unit", "two units")}
    for case, make in [*cases.items()][part]:
        try:
            engine, reference = start(make, device_budget=least(make) if tight else None)
            good_steps(watch(engine), reference, micro_batches=micro_batches, steps=3)
        except Exception as error:
            error.add_note(f"case {case}")
            raise


@pytest.mark.parametrize("ranks, use_reentrant, tight, micro_batches, part", in_sweep(
    [(2, True, True, 1, slice(1, None, 2)), (1, True, True, 1, slice(0, None, 2)), (1, False, True, 1, slice(None)),
     *[(2, *case, slice(None)) for case in itertools.product((False, True), (True, False), (1, 2))]],
    lambda ranks, use_reentrant, tight, micro_batches, part: ranks == 2 and part == slice(None)),
                         ids=lambda x: f"from {x.start}" if isinstance(x, slice) else None)
def test_cases_12_14_56_checkpointing(pool, ranks, use_reentrant, tight, micro_batches, part):
    """Reentrant, gradients of a weight that is used twice come in two parts, and a chunk may have been sent meanwhile."""
    pool.run(ranks, checkpointed, use_reentrant, micro_batches, tight, part)


def hf_families(kind, checkpointing, budgets):
    """Beside the plain model, each rank's loss taken apart, as the causal ones are means over tokens. Losses and rotary tables are
    computed in fp32 by transformers whatever the model's precision: 1e-5."""
    def make():
        model = hf_model(kind).double()
        if checkpointing is not None:
            model.gradient_checkpointing_enable(dict(use_reentrant=checkpointing))
        return model.train()

    plain, n = make(), dist.get_world_size()
    run = lambda engine: engine.backward(engine(**hf_batch(kind, dist.get_rank())).loss.double())
    low = least(make, run, chunk_mb=0.0125)
    for budget in budgets:
        engine, _ = start(make, device_budget=budget and int(budget * low), chunk_mb=0.0125)
        watch(engine)
        for step in range(3):
            batches = [hf_batch(kind, 10 * step + r) for r in range(n)]
            for batch in batches:
                (plain(**batch).loss.double() / n).backward()
            with within(engine):
                engine.backward(engine(**batches[dist.get_rank()]).loss.double())
            all_away(engine)
            for name, p in plain.named_parameters():
                close(engine.full_grad(name), torch.zeros_like(p) if p.grad is None else p.grad, 1e-5)
            plain.zero_grad()
            engine.zero_grad()
            if step == 1:  # no step, so that weights are the plain model's
                engine._place_optimizers()


FAMILIES = ["gpt2", "llama", "bert", "bert-mlm", "t5", "mixtral", "bart", "gemma2"]


@pytest.mark.parametrize("ranks, kind, checkpointing", in_sweep(
    [(2, "gpt2", [True]), (1, "gpt2", [None, False]), (1, "llama", [None, False, True]),
     *[(2, kind, [None, False, True]) for kind in FAMILIES]],
    lambda ranks, kind, checkpointing: ranks == 2 and len(checkpointing) > 1), ids=str)
def test_case_56_families(pool, ranks, kind, checkpointing):
    for how in checkpointing:
        pool.run(ranks, hf_families, kind, how, [1] if how is not None else [1, 2], limit_s=100)


# ---- 5. micro-batches, large parameters, states ------------------------------------------------------------------------------


def case_55(budgets):
    """Three micro-batches: each one's loss, as the chunk that held gradients holds weights again; steps of 3, 1, 2, 3."""
    for budget in budgets:
        engine, reference = start(device_budget=budget and budget * least())
        for step, k in enumerate((3, 1, 2, 3)):
            x, losses = batch_of(step, 6), []
            mine = share(x, 6)
            with within(engine):
                for j, piece in enumerate(mine.chunk(k)):
                    loss = square_loss(engine(piece))
                    losses.append(loss.item())
                    with engine.no_sync() if j < k - 1 else contextlib.nullcontext():
                        engine.backward(loss / k)
            with torch.no_grad():
                expected = [square_loss(reference.model(piece)).item() for piece in mine.chunk(k)]
                close(torch.tensor(losses).double(), torch.tensor(expected).double())
            square_loss(reference.model(x)).backward()
            end_step(engine, reference)
        same_weights(engine, reference)


@pytest.mark.parametrize("ranks, budgets", in_sweep(
    [(2, [1]), (1, [2, None]), (2, [2, None])], lambda ranks, budgets: (ranks, len(budgets)) == (2, 2)), ids=str)
def test_case_55_losses_of_micro_batches(pool, ranks, budgets):
    pool.run(ranks, case_55, budgets)


def accumulation_begins_late(precision, n_budgets):
    """Slices become wider when micro-batches begin to add up, after optimizers were placed, some of which leave again: within the
    budget all the same."""
    def run(engine, k=1):
        x = random(4 * k, 7, seed=dist.get_rank(), dtype=torch.float32)
        engine.forward_backward(x, k, lambda out, b: out.float().square().mean())

    def begin(**knobs):
        torch.manual_seed(0)
        return Gemini(Net(), precision=precision, lr=0.01, chunk_mb=0.0003, **knobs)

    with pytest.raises(RuntimeError) as caught:
        run(begin(device_budget=1))
    low, left = int(str(caught.value).split()[-1]), 0
    engine = begin()
    run(engine), engine.step(), run(engine), engine.step()
    high = engine.most_device_bytes
    for k in range(n_budgets):
        engine = begin(device_budget=low + (high - low) * k // (n_budgets - 1))
        for micro_batches in (1, 1, 3, 1, 2):
            before = [c.on_device for c in engine.chunks]
            with within(engine):
                run(engine, micro_batches)
                engine.step()
            left += before > [c.on_device for c in engine.chunks]
            assert engine.device_bytes == live_bytes(engine)
            assert {c.shard.dtype for c in engine.chunks} == {torch.float32 if engine._accumulates else engine.chunks[0].full.dtype}
    assert left == 0 if precision == "fp32" else left > 0


@pytest.mark.parametrize("precision, n_budgets", in_sweep([("bf16", 6), ("bf16", 40), ("fp32", 20)], lambda *case: case[1] > 6))
def test_accumulation_begins_late(pool, precision, n_budgets):
    pool.run(2, accumulation_begins_late, precision, n_budgets)


def case_57(n_ranks):
    for mb in (1e-6, 0.0001, 0.0003, 0.0007, 0.5, None):
        engine, reference = start(Large, chunk_mb=mb)
        (capacity,), (waste,) = engine.chunk_numel.values(), engine.waste.values()
        assert capacity % n_ranks == 0
        room = sum(c.room_bytes for c in engine.chunks) // 8
        numel = sum(-(-p.numel() // 8) * 8 for p in reference.model.parameters())
        assert waste == 1 - numel / room
        for c in engine.chunks:
            assert c.full.numel() % n_ranks == 0 and c.room_bytes >= capacity * 8
            assert len(c.views) == 1 or c.full.numel() <= capacity
        good_steps(engine, reference)


@pytest.mark.parametrize("ranks", [1, 3])
def test_case_57_parameters_larger_than_a_chunk(pool, ranks):
    pool.run(ranks, case_57, ranks)


def states_seen(engine, name, run):
    """What `state` says after whatever the engine does, and before chunks are sent or released."""
    seen, kept = [engine.state(name)], {}

    def note():
        if engine.state(name) != seen[-1]:
            seen.append(engine.state(name))

    def noting(method):
        def call(*args, **kwargs):
            (method is kept["_launch"] or method is kept["release"]) and note()
            result = method(*args, **kwargs)
            note()
            return result
        return call

    for what in ("_come_to", "_use", "gather", "release", "finish", "_on_grad", "_launch", "_after_read", "_end_pass"):
        kept[what] = getattr(engine, what)
        setattr(engine, what, noting(kept[what]))
    run()
    for what, method in kept.items():
        setattr(engine, what, method)
    return seen


def states():
    S, name = State, "blocks.1.b.weight"  # its chunk begins with blocks.1.a, whose gradient comes last
    stays = [S.FREE, S.HOLD, S.COMPUTE, S.HOLD_AFTER_FWD, S.COMPUTE, S.HOLD_AFTER_BWD, S.READY_FOR_REDUCE, S.FREE]
    goes = [*stays[:4], S.FREE, *stays[4:]]
    low = least(chunk_mb=0.001)
    for budget, expected in ((None, stays), (low, goes)):
        engine, reference = start(device_budget=budget, chunk_mb=0.001)
        good_steps(engine, reference)
        x = share(batch_of(0))
        assert states_seen(engine, name, functools.partial(engine.forward_backward, x, 1, square_loss)) == expected
        with torch.no_grad():
            assert states_seen(engine, name, functools.partial(engine, x)) == [S.FREE, S.HOLD, S.COMPUTE, S.HOLD, S.FREE]
        assert {engine.state(n) for n in engine.all_names} == {S.FREE}


def test_states(pool):
    pool.run(2, states)


# ---- 6. passes of several forwards and backwards, passes unlike the first -----------------------------------------------------


class Factors(Net):
    """Operators that keep their weights for the backward of the backward, as they are and transposed."""

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block.b(x * block.a.bias))
        return self.head(x)


def pair(f, a, b):
    """Two forwards before one backward, as in contrastive losses."""
    return (f(a) * f(b)).sum(1).mean()


def penalty(f, a, create_graph=True):
    """On the gradient of the input; or that taken as a number."""
    x = a.clone().requires_grad_()
    y = f(x)
    grad, = torch.autograd.grad(y.square().sum(), x, retain_graph=True, create_graph=create_graph)
    return square_loss(y) + (grad.square().sum(1) if create_graph else y.sum(1) * grad.sum(1)).mean()


def l2(f, a):
    """The loss reads weights after forward, even such as nobody but checkpoints has read."""
    return square_loss(f(a)) + 0.1 * sum(p.square().sum() for p in getattr(f, "module", f).parameters())


PASSES = {  # losses, each with its backward; all forwards come first
    "one": lambda f, a, b: [square_loss(f(a))], "pair": lambda f, a, b: [pair(f, a, b)], "l2": lambda f, a, b: [l2(f, a)],
    "two": lambda f, a, b: [square_loss(f(a)), f(b).sin().mean()], "two, turned": lambda f, a, b: PASSES["two"](f, a, b)[::-1],
    "penalty": lambda f, a, b: [penalty(f, a)], "derivative": lambda f, a, b: [penalty(f, a, create_graph=False)],
    "penalty and more": lambda f, a, b: [penalty(f, a) + square_loss(f(b))]}


def look(engine, reference, step, mode=torch.no_grad):
    with mode():
        close(engine(share(batch_of(step))), share(reference.model(batch_of(step))))


def look_inside(engine, reference, step):
    most = engine.most_device_bytes
    with engine.gathered() as model:
        assert all(p.isfinite().all() for p in model.parameters())
    engine.most_device_bytes = most  # which wants all of it


BETWEEN = {  # before a pass, or after its forwards
    "nothing": lambda *_: None, "look": look, "inference": functools.partial(look, mode=torch.inference_mode),
    "gathered": look_inside, "abandoned": lambda engine, reference, step: engine(share(batch_of(step)))}


def one_pass(kind, engine, step, between=lambda: None):
    losses = PASSES[kind](engine, share(batch_of(step)), share(batch_of(step + 30)))
    between()
    for k, loss in enumerate(losses):
        with engine.no_sync() if k < len(losses) - 1 else contextlib.nullcontext():
            engine.backward(loss)


def beside_reference(engine, reference, kind, step, before="nothing", between="nothing"):
    """One step of both."""
    BETWEEN[before](engine, reference, step + 50)
    one_pass(kind, engine, step, functools.partial(BETWEEN[between], engine, reference, step + 60))
    "abandoned" in (before, between) or all_away(engine)
    for loss in PASSES[kind](reference.model, batch_of(step), batch_of(step + 30)):
        loss.backward()
    end_step(engine, reference)


def steps_of(kinds, make=Net, before="nothing", between="nothing", **knobs):
    """Steps of these kinds, from the third on with something before or between. device_budget: in terms of the least for all of
    them. It is kept by passes that are like the first one or a part of it; the former gather as planned."""
    chunk_mb = knobs.setdefault("chunk_mb", SMALL)
    if share_of_all := knobs.get("device_budget"):
        low = max(least(make, functools.partial(one_pass, kind, step=0), chunk_mb=chunk_mb) for kind in {*kinds})
        knobs["device_budget"] = int(share_of_all * low)
    engine, reference = start(make, **knobs)
    watch(engine)
    try:
        for step, kind in enumerate(kinds):
            usual = step > 2 and {kind, *kinds[: step]} == {kind} and before == between == "nothing"
            gathers, planned = gathers_of(engine), usual and planned_gathers(engine)
            with within(engine) if kind in ("one", kinds[0]) else contextlib.nullcontext():
                beside_reference(engine, reference, kind, step, *(("nothing", "nothing") if step < 2 else (before, between)))
            assert not planned or gathers_of(engine) - gathers == planned
        same_weights(engine, reference)
    except Exception as error:
        error.add_note(f"step {step} of {kinds}, {before} before, {between} between, {knobs}")
        raise


def several_passes(budgets, passes):
    for budget, (kind, make, more) in itertools.product(budgets, SEVERAL[passes]):
        steps_of([kind] * 4 + ["one", kind], make, **more, **(dict(device_budget=budget) if budget else {}))
        if not more and budget != 1:
            steps_of(["one", "one", kind, "one"], make, **(dict(device_budget=budget) if budget else {}))


SEVERAL = {
    "sent": [("pair", Net, {}), ("two", UNITS["twice, apart"][0], {}), ("penalty", Factors, dict(between="gathered")),
             ("one", Net, dict(before="abandoned", between="look"))],
    "alone": [*[(kind, Net, {}) for kind in ("l2", "two", "two, turned", "penalty", "derivative", "penalty and more")],
              ("penalty", Factors, {}), *[("penalty", Factors, dict(between=what)) for what in ("look", "abandoned")],
              ("one", Net, dict(before="gathered", between="inference")),
              ("one", Net, dict(before="inference", between="gathered")), ("penalty", Net, dict(before="abandoned")),
              *[(kind, UNITS["middle frozen"][0], dict(chunk_mb=0.0003)) for kind in ("two", "two, turned")]]}  # all biases in one


@pytest.mark.parametrize("ranks, budgets, passes", in_sweep(
    [(2, [1], "sent"), (1, [1], "alone"), (2, [1], "alone"), (2, [2, None], "sent"), (2, [2, None], "alone")],
    lambda ranks, budgets, passes: len(budgets) > 1 or ranks == 2 and passes == "alone"), ids=str)
def test_passes_of_all_kinds(pool, ranks, budgets, passes):
    pool.run(ranks, several_passes, budgets, passes, limit_s=120)


def reentrant_passes(around, placements, chunks):
    """Two forwards with one backward after a step, and the other way round; a penalty on weights that only checkpoints have read:
    forward ends without a graph that leads to any of them."""
    for knobs, chunk_mb, prefetch in itertools.product(placements, chunks, (0, 3) if len(chunks) > 1 else (1,)):
        for first in ("one", "pair", "l2"):
            steps_of([first, first, "one", "pair", "l2", "one"], functools.partial(Checkpointing, around, True), chunk_mb=chunk_mb,
                     prefetch=prefetch, **knobs)


STATIC = [dict(placement="static"), dict(placement="static", shard_param_frac=0.0), dict(offload=True),
          dict(placement="static", shard_param_frac=0.5, offload_optim_frac=0.6, offload_param_frac=0.3)]


@pytest.mark.parametrize("ranks, around, placements, chunks", in_sweep(
    [(1, "everything", [{}], [SMALL]), (2, "a unit", [dict(device_budget=1)], [0.001]), (1, "a unit", [STATIC[2]], [0.001]),
     (2, "everything", [{}], [SMALL]), (2, "a unit", [dict(device_budget=1), STATIC[2]], [0.001]),
     *[(2, around, [{}, dict(device_budget=1), *STATIC], [0.0003, 0.001]) for around in ("two units", "a unit, again")]],
    lambda ranks, around, placements, chunks: ranks == 2 and (around, len(placements)) != ("a unit", 1)),
                         ids=lambda x: f"{len(x)}" if isinstance(x, list) else None)
def test_case_56_reentrant_passes_of_all_kinds(pool, ranks, around, placements, chunks):
    pool.run(ranks, reentrant_passes, around, placements, chunks, limit_s=120)


def random_program(dice, operators):
    return [(dice.choice(operators), *[dice.randrange(high) for high in (4, 4, 100, 100)]) for _ in range(dice.randrange(2, 9))]


def random_model(seed, with_reentrant, which):
    """Three programs of random operators; some parameters frozen, sometimes one tied. Derivatives and reentrant checkpoints exclude
    each other, in torch as well."""
    dice = random_module.Random(seed)
    operators = [*["call"] * 6, *[what for what in OPERATORS if with_reentrant or what not in REENTRANT]]
    model = Program(*[random_program(dice, operators) for _ in range(3)])
    for p in model.parameters():
        p.requires_grad_(dice.random() < 0.88)
    if dice.random() < 0.3:
        model.blocks[3].a.weight = model.blocks[0].b.weight
    model.which = which
    return model


def fuzzed(seeds):
    """Random graphs, knobs, orders of calls. Most do in each step what the first did; if nothing is between, the budget is kept.
    Returns for how many seeds plain torch trains the model."""
    trained = 0
    for seed in seeds:
        dice = random_module.Random(10**6 + seed)
        with_reentrant, constant = dice.random() < 0.5, dice.random() < 0.6
        kinds = [kind for kind in PASSES if kind[:2] not in ("pe", "de") or not with_reentrant]
        knobs = dict(chunk_mb=dice.choice((0.0003, SMALL, SMALL, 0.001)), prefetch=dice.choice((0, 1, 1, 3)))
        steps = [(dice.choice(kinds), dice.randrange(3), dice.choice([*BETWEEN, *["nothing"] * 8]), dice.choice(
            [*BETWEEN, *["nothing"] * 8]), dice.choice(("break", "discard", *[None] * 8))) for _ in range(7)]
        steps = [(*(steps[0] if constant or k < 2 else step)[:2], *(("nothing", "nothing", None) if k < 2 else step[2:]))
                 for k, step in enumerate(steps)]
        make = functools.partial(random_model, seed, with_reentrant, steps[0][1])
        budgets = [1, dice.choice((1.2, 1.5, 2, 3)), dice.choice((6, None))] if dice.random() < 0.8 else [None]
        if budgets == [None]:
            knobs |= dice.choice(STATIC)
        model = start(make)[1].model
        if not trains(model, steps[0][0]):
            continue
        trained += 1
        low = least(make, functools.partial(one_pass, steps[0][0], step=0), **knobs) if budgets[0] else 0
        for budget in budgets:
            try:
                fuzz(make, steps, constant, **knobs, **(dict(device_budget=int(budget * low)) if budget else {}))
            except Exception as error:
                error.add_note(f"seed {seed}, {knobs}, budget {budget} * {low}, {steps}")
                raise
    return trained


def trains(model, kind):
    """Does plain torch?"""
    try:
        for loss in PASSES[kind](model, batch_of(0), batch_of(30)):
            loss.backward()
    except RuntimeError:
        return False
    return any(p.grad is not None for p in model.parameters())


def fuzz(make, steps, constant, **knobs):
    engine, reference = start(make, **knobs)
    watch(engine)
    for step, (kind, which, before, between, more) in enumerate(steps):
        engine.module.which = reference.model.which = which
        if not trains(copy.deepcopy(reference.model), kind):
            return
        usual = constant and (before, between, more) == ("nothing", "nothing", None)
        with within(engine) if usual else contextlib.nullcontext():
            if more == "break":
                engine.module.broken = True
                with pytest.raises(ZeroDivisionError):
                    engine.forward_backward(share(batch_of(step)), 1, square_loss)
                engine.module.broken = False
            if more == "discard":
                engine.forward_backward(share(batch_of(step)), 1, square_loss)
                engine.zero_grad()
            beside_reference(engine, reference, kind, step, before, between)
    same_weights(engine, reference)


@pytest.mark.parametrize("ranks, seeds", in_sweep(
    [(1, range(4)), (1, range(4, 40)), (1, range(40, 80)), (1, range(80, 120)), (2, range(120, 140)), (3, range(140, 150))],
    lambda ranks, seeds: seeds != range(4)), ids=str)
def test_fuzz(pool, ranks, seeds):
    assert pool.run(ranks, fuzzed, seeds, limit_s=280)[0] > 0.7 * len(seeds)


def breaks(**knobs):
    """An exception anywhere, in whatever was called; then a good step, within the budget."""
    engine, reference = start(Breaks, **knobs)
    good_steps(engine, reference, seed=200)
    ways = [lambda: engine.forward_backward(share(batch_of(0)), 2, square_loss),
            lambda: engine.backward(square_loss(engine(share(batch_of(0))))),
            lambda: engine.backward(square_loss(engine.module(share(batch_of(0)))))]
    for step, (what, i) in enumerate([("after", 0), ("after", 3), ("inside", 2), ("backward", 3), ("backward", 0)]):
        for way in ways:
            engine.module.broken.add((what, i))
            with pytest.raises(ZeroDivisionError):
                way()
            if way is ways[1]:
                all_away(engine)
                with raises(RuntimeError, "gathered()"):
                    engine.module.head.weight.sum()
            engine.module.broken.clear()
            good_steps(engine, reference, seed=100 + step, steps=1)
    handle = engine.module.blocks[1].a.weight.register_hook(lambda grad: 1 // 0)
    with raises(ZeroDivisionError):
        ways[0]()
    handle.remove()
    all_away(engine)
    good_steps(engine, reference)


def wrong_calls(**knobs):
    """Each is refused, and a good step comes after it; what is harmless is."""
    engine, reference = start(**knobs)
    x = share(batch_of(0))
    for _ in range(2):
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
    output = engine(x)  # plain torch refuses backward through weights that a step has changed meanwhile
    good_steps(engine, reference)
    with raises(RuntimeError, "weights that are gone"):
        engine.backward(square_loss(output))
    with raises(ValueError, "scalar", "(4, 3)"):
        engine.backward(engine(x))
    good_steps(engine, reference)
    loss = square_loss(engine(x))
    engine.forward_backward(x, 1, square_loss)  # which does not wait for graphs that were made before
    gradient = engine.full_grad("head.weight")
    engine.backward(loss)
    close(engine.full_grad("head.weight"), 2 * gradient)
    engine.zero_grad()
    good_steps(engine, reference)


def abandoned(**knobs):
    """Forwards whose outputs are kept and never used, also between backward and step: the next ones read new weights."""
    engine, reference = start(**knobs)
    kept = []
    for step in range(4):
        x = batch_of(step)
        with within(engine):
            kept.append(engine(share(batch_of(step + 9))))
            square_loss(reference.model(x)).backward()
            engine.forward_backward(share(x), 1, square_loss)
            kept.append(engine(share(x)))
            reference.step()
            engine.step()
            close(engine(share(x)).detach(), share(reference.model(x).detach()))
    good_steps(engine, reference)


def varies(**knobs):
    """Another number of rows in each step, and another way through the units: within a budget that is enough for each of them."""
    orders = [(0, 1, 2, 3), (0, 1, 2, 3), (3, 2, 1, 0), (0, 2), (0, 1, 2, 3, 2, 1), (), (0, 1, 2, 3)]
    if low := knobs.get("device_budget"):
        knobs["device_budget"] = max(low, *[least(lambda order=order: Net(order=order)) for order in {*orders}])
    engine, reference = start(**knobs)
    for step, order in enumerate(orders):
        engine.module.order = reference.model.order = order
        x = batch_of(step, n=2 + 3 * (step % 3))
        square_loss(reference.model(x)).backward()
        with within(engine):
            engine.forward_backward(share(x, 2 + 3 * (step % 3)), 1, square_loss)
            all_away(engine)
            end_step(engine, reference)
    assert good_steps(engine, reference, steps=3) == planned_gathers(engine)


def eval_first(**knobs):
    """A look, then `step` or `full_grad` without a backward, before the first pass: the plan is not made of those."""
    for look in ("step", "full_grad"):
        engine, reference = start(**knobs)
        with torch.no_grad():
            engine(share(batch_of(0)))
        if look == "step":
            engine.step()
        else:
            assert not engine.full_grad("head.weight").any()
        assert engine.plan is None
        assert good_steps(engine, reference, steps=4) == planned_gathers(engine)


def frozen_later(**knobs):
    """A parameter that is frozen after construction gets no gradient, as in torch; one that was frozen cannot be trained."""
    engine, reference = start(lambda: UNITS["first frozen"][0](), **knobs)
    good_steps(engine, reference)
    for model in (engine.module, reference.model):
        model.blocks[2].a.weight.requires_grad_(False)
    x = batch_of(0)
    for _ in range(2):
        square_loss(reference.model(x)).backward()
        engine.forward_backward(share(x), 1, square_loss)
        reference.step()
        engine.step()
    same_weights(engine, reference)
    engine.module.blocks[0].a.weight.requires_grad_(True)
    with raises(RuntimeError, "blocks.0.a.weight", "frozen"):
        engine.forward_backward(share(x), 1, square_loss)
    engine.module.blocks[0].a.weight.requires_grad_(False)
    same_weights(engine, reference)


class Renormed(nn.Module):
    """An operator that changes its weight."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 7, max_norm=0.5), nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.table((x[:, 0] * 10).long().abs() % 11))


class Sets(Net):
    """`setting`: a name, and what changes that weight; `catch`: the model's own code goes on."""

    setting, catch = None, False

    def forward(self, x):
        if self.setting:
            with torch.no_grad(), contextlib.suppress(RuntimeError) if self.catch else contextlib.nullcontext():
                self.setting[1](self.get_parameter(self.setting[0]))
        return super().forward(x)


def changed_in_place(**knobs):
    """Weights that change in forward: refused by name, and what was changed is undone."""
    if "device_budget" in knobs:
        engine, _ = start(Renormed)
        with raises(RuntimeError, "table.weight", "in place", "gathered(write=True)"):
            engine.forward_backward(share(batch_of(0)), 1, square_loss)
        for chunk in engine.chunks:
            assert not chunk.full.untyped_storage().nbytes()
    engine, reference = start(Sets, **knobs)
    for step, (name, change) in enumerate([
            ("head.weight", lambda w: w.clamp_(-0.05, 0.05)), ("head.weight", lambda w: w.data.add_(1)),
            ("blocks.3.b.weight", lambda w: w[1].zero_()), ("blocks.0.a.bias", lambda w: torch.nn.init.zeros_(w)),
            ("blocks.1.a.weight", lambda w: torch.add(w, 1, out=w)), ("blocks.2.a.weight", lambda w: w.view(-1).mul_(2))]):
        engine.module.setting = name, change
        for _ in range(2):
            with raises(RuntimeError, name, "in place"):
                engine.forward_backward(share(batch_of(0)), 1, square_loss)
            all_away(engine)
        with torch.no_grad(), raises(RuntimeError, name, "in place"):
            engine(share(batch_of(0)))
        engine.module.catch = True
        good_steps(engine, reference, seed=step)
        engine.module.setting, engine.module.catch = None, False
        good_steps(engine, reference, seed=step)


CALLS = {eval_first: Net, breaks: Breaks, wrong_calls: Net, changed_in_place: Sets, frozen_later: UNITS["first frozen"][0],
         abandoned: Net, varies: Net}


CALLED_ALONE = [calls for calls in CALLS if calls is not breaks]
LEAST = [dict(device_budget=1)]


@pytest.mark.parametrize("ranks, calls, several_knobs", in_sweep(
    [*[(1, calls, LEAST) for calls in CALLED_ALONE],
     *itertools.product([2], CALLS, [LEAST, [dict(device_budget=2), {}], STATIC])],
    lambda ranks, calls, several_knobs: ranks == 2 and (several_knobs is not LEAST or calls in CALLED_ALONE)),
                         ids=lambda x: f"{len(x)}" if isinstance(x, list) else getattr(x, "__name__", None))
def test_any_order_of_calls(pool, ranks, calls, several_knobs):
    """device_budget: in terms of the least."""
    for knobs in several_knobs:
        pool.run(ranks, in_order, calls, **knobs)


def in_order(calls, **knobs):
    if budget := knobs.get("device_budget"):
        knobs["device_budget"] = budget * least(CALLS[calls])
    calls(**knobs)


def without_rows(cuts, budgets):
    for budget, micro_batches in itertools.product(budgets, (1, 3)):
        engine, reference = start(device_budget=budget and int(budget * least()))
        r = dist.get_rank()
        for step, cut in enumerate(cuts):
            x = random(sum(cut), 7, seed=step)
            mine = x[sum(cut[:r]) : sum(cut[: r + 1])]
            loss = lambda out, *_: out.square().mean()
            expected = loss(reference.model(x))
            expected.backward()
            with within(engine):
                close(engine.forward_backward(mine if len(mine) else None, micro_batches, loss), expected.detach())
                all_away(engine)
                end_step(engine, reference)
        same_weights(engine, reference)
    engine, _ = start()
    with raises(RuntimeError, "no samples in its first step", f"rank {r}"):
        engine.forward_backward(None, 1, loss)


@pytest.mark.parametrize("budgets", in_sweep([[1], [None, 1.5, 2, 5]], lambda budgets: len(budgets) > 1), ids=str)
def test_ranks_without_rows(pool, budgets):
    pool.run(2, without_rows, [(4, 4), (7, 0), (0, 5), (3, 3), (0, 6)], budgets, limit_s=40)


def resumed(directory, cases):
    """At a tight budget, and where micro-batches add up: a new engine takes the plan over and goes on bit for bit, with the same
    gathers and within the budget from its first step on; one with another budget makes its own."""
    for share_of_all, micro_batches in cases:
        def steps(engine, seeds, micro_batches=micro_batches):
            found = []
            for seed in seeds:
                before = gathers_of(engine)
                with within(engine):
                    engine.forward_backward(share(batch_of(seed)), micro_batches, square_loss)
                    engine.step()
                found.append(gathers_of(engine) - before)
            return found
        low = least()
        first, _ = start(device_budget=share_of_all * low)
        steps(first, range(3))
        first.save(directory)
        second, _ = start(seed=1, device_budget=share_of_all * low)
        second.load(directory)
        assert second.plan == first.plan and [c.on_device for c in second.chunks] == [c.on_device for c in first.chunks]
        assert any(c.on_device for c in first.chunks) == (share_of_all > 1)
        one, other = steps(second, range(3, 6)), steps(first, range(3, 6))
        assert one[1:] == other[1:] and one[0] - other[0] in (0, 1)  # nothing was fetched early
        for one, other in zip(first.chunks, second.chunks):
            assert all(map(torch.equal, (one.master, one.exp_avg, one.exp_avg_sq), (other.master, other.exp_avg, other.exp_avg_sq)))
        third, _ = start(seed=2, device_budget=(share_of_all + 1) * low)
        third.load(directory)
        assert third.plan is None
        steps(third, range(3, 6))
        for one, other in zip(first.chunks, third.chunks):
            close(one.master, other.master)


@pytest.mark.parametrize("ranks, cases", in_sweep(
    [(1, [(1, 1), (4, 1)]), (2, [(4, 2)]), (2, [(1, 1), (4, 1)])], lambda ranks, cases: ranks == len(cases) == 2), ids=str)
def test_plan_is_taken_over_from_a_checkpoint(pool, tmp_path, ranks, cases):
    pool.run(ranks, resumed, str(tmp_path / "checkpoint"), cases)


# ---- 7. between steps -------------------------------------------------------------------------------------------------------


NAMED = [  # what reads a weight
    lambda m, p, x: sum(q.square().sum() for q in m.parameters()), lambda m, p, x: nn.functional.linear(x, p),
    lambda m, p, x: torch.nn.utils.parameters_to_vector(m.parameters()), lambda m, p, x: x @ p, lambda m, p, x: x * p[0],
    lambda m, p, x: {k: v.sum() for k, v in m.state_dict().items()}, lambda m, p, x: copy.deepcopy(m), lambda m, p, x: copy.copy(p),
    lambda m, p, x: p.data, lambda m, p, x: p.detach().numpy(), lambda m, p, x: p.numpy(), lambda m, p, x: p.tolist(),
    lambda m, p, x: list(p), lambda m, p, x: p[0, 0], lambda m, p, x: bool(p), lambda m, p, x: torch.equal(p, p),
    lambda m, p, x: setattr(p, "data", torch.zeros(7, 7)), lambda m, p, x: nn.init.zeros_(p), lambda m, p, x: p.untyped_storage(),
    lambda m, p, x: p.data_ptr(), lambda m, p, x: p.half(), lambda m, p, x: p.cpu(), lambda m, p, x: p.T,
    lambda m, p, x: torch._foreach_norm([p]), lambda m, p, x: torch.einsum("bi,oi->bo", x, p),
    lambda m, p, x: torch.add(torch.ones(7, 7), 1, out=p), lambda m, p, x: torch.ops.aten.sum(p),
    lambda m, p, x: torch._C._nn.linear(x, p), lambda m, p, x: dist.all_reduce(p), lambda m, p, x: nn.Parameter(p),
    lambda m, p, x: m.to(torch.float32), lambda m, p, x: m.share_memory(), lambda m, p, x: m.blocks[0](x),
    lambda m, p, x: torch.optim.swa_utils.AveragedModel(m), lambda m, p, x: m.load_state_dict(Net().double().state_dict()),
]
FATAL = [  # these read memory in C++ without asking the tensor's class
    lambda p: torch.tensor(p), lambda p: p.as_subclass(torch.Tensor).sum(), lambda p: torch.vmap(lambda w: w.sum())(p),
    lambda p: dist.broadcast(p, 0)]


def strays():
    engine, reference = start(device_budget=least())
    good_steps(engine, reference)
    model, p, x = engine.module, engine.module.blocks[0].a.weight, share(batch_of(0))
    through = []
    for i, read in enumerate(NAMED):
        try:
            read(model, p, x)
        except RuntimeError as error:
            assert "blocks.0.a.weight" in str(error) and "chunk 0" in str(error) and "gathered()" in str(error), (i, error)
        else:
            through.append(i)
    assert not through, through
    for i, ask in enumerate(ANSWERED):
        assert i in (1, 6, 7) or ask(model, p, x), i  # those are of fsdp.py's texts and strides
    assert p.numel() == 49 and len(p) == 7 and p.size(0) == 7 and p.grad is None
    assert "blocks.0.a.weight" in repr(p) and "(7, 7)" in str(p) and "chunk" in f"{p}"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for q in model.parameters():
        q.grad = torch.zeros(q.shape, dtype=q.dtype)
    with raises(RuntimeError, "blocks.0.a.weight"):
        optimizer.step()
    optimizer.zero_grad()
    assert model.blocks[0].a.weight is p
    good_steps(engine, reference)
    for between in (engine.step, lambda: None):
        with contextlib.nullcontext() if between is engine.step else torch.no_grad():
            engine(x)
        between()
        with raises(RuntimeError, "gathered()"):
            p.sum()
    same_weights(engine, reference)
    for read in FATAL:  # an error or any value, but no end of the process
        with contextlib.suppress(RuntimeError):
            read(p)
        good_steps(engine, reference, steps=1)


@pytest.mark.parametrize("ranks", in_sweep([1, 2], lambda ranks: ranks == 2))
def test_case_54_stray_reads_are_errors(pool, ranks):
    pool.run(ranks, strays)


def gathered_weights():
    engine, reference = start(device_budget=least())
    good_steps(engine, reference)
    saved, x = engine.state_dict(), share(batch_of(1))
    with engine.gathered() as model, torch.no_grad():
        if saved:
            assert all(torch.equal(v, saved[k]) for k, v in model.state_dict().items()) and len(saved) == 18
        for _ in range(2):  # and forward leaves them there
            close(model(x), reference.model(x))
            close(engine(x), reference.model(x))
        copied, kept, one = copy.deepcopy(model), model.state_dict(), copy.deepcopy(model.head.weight)
        views = {n: p.detach().view(-1) for n, p in model.named_parameters()}
    all_away(engine)
    before = {k: v.clone() for k, v in reference.model.state_dict().items()}
    good_steps(engine, reference)
    assert type(one) is nn.Parameter and {type(p) for p in copied.parameters()} == {nn.Parameter}
    for k, v in before.items():  # what was read inside stays what it was
        close(kept[k], v), close(views[k], v.view(-1)), close(copied.state_dict()[k], v)
    square_loss(copied(batch_of(0))).backward()  # a copy is a plain model
    square_loss(reference.model.requires_grad_()(batch_of(0)))
    assert all(p.grad is not None for p in copied.parameters())
    Gemini(copy.deepcopy(copied), **ADAM)
    inside = [lambda m: engine.backward(square_loss(m(x))), lambda m: m(x), lambda m: m.head.weight.view(-1),
              lambda m: sum(p.square().sum() for p in m.parameters()), lambda m: m.blocks[0](x), lambda m: engine.step(),
              lambda m: engine.forward_backward(x, 1, square_loss), lambda m: engine.gathered().__enter__(),
              lambda m: engine.load_state_dict({k: v + 1 for k, v in saved.items()})]
    for refused in inside:
        with raises(RuntimeError, "gathered()"), engine.gathered() as model:
            refused(model)
        good_steps(engine, reference, steps=1)
    same_weights(engine, reference)


def writes(*several_knobs):
    """write=True: what is not changed keeps its fp32 master bit for bit; what is, arrives."""
    for knobs in several_knobs:
        torch.manual_seed(0)
        engine = Gemini(Net(), precision="bf16", lr=0.01, chunk_mb=0.0002, **knobs)
        x = random(4, 7, seed=dist.get_rank(), dtype=torch.float32)
        for offset in range(2):
            engine.forward_backward(x, 1, lambda out, b: out.float().square().mean())
            engine.step()
            before = [c.master.clone() for c in engine.chunks]
            with engine.gathered(write=True):
                pass
            assert all(map(torch.equal, before, [c.master for c in engine.chunks]))
            with engine.gathered(write=True) as model, torch.no_grad():
                model.head.weight[0, 0] = 3 + offset
                nn.init.constant_(model.blocks[1].a.bias, 0.25 + offset)
            changed = torch.stack([(m != c.master).sum() for m, c in zip(before, engine.chunks)]).sum()
            dist.all_reduce(changed)
            assert changed == 1 + 7
            if saved := engine.state_dict():
                assert saved["head.weight"][0, 0] == 3 + offset and (saved["blocks.1.a.bias"] == 0.25 + offset).all()
            with engine.gathered() as model, torch.no_grad():
                assert model.head.weight[0, 0].item() == 3 + offset
    engine, reference = start(device_budget=least())
    good_steps(engine, reference)
    with raises(ValueError, "head.bias", "(4,)", "(3,)"), engine.gathered(write=True) as model:
        model.head.bias.data = torch.zeros(4).double()
    good_steps(engine, reference)
    with engine.gathered(write=True) as model:
        model.load_state_dict(build_net(5).state_dict())
        model.head.weight.data = torch.ones_like(model.head.weight.data)
    reference.model.load_state_dict(build_net(5).state_dict())
    reference.model.head.weight.data.fill_(1)
    good_steps(engine, reference)


def graph_over_gathered():
    """A graph made before `gathered(write=True)` is of weights that are gone; one before `gathered()` is still good."""
    for write in (False, True):
        engine, reference = start(device_budget=least())
        good_steps(engine, reference)
        x = batch_of(0)
        loss = square_loss(engine(share(x)))
        with engine.gathered(write=write) as model, torch.no_grad():
            if write:
                model.head.weight.mul_(2)
                reference.model.head.weight.mul_(2)
        if write:
            with raises(RuntimeError, "weights that are gone"):
                engine.backward(loss)
        else:
            square_loss(reference.model(x)).backward()
            engine.backward(loss)
            end_step(engine, reference)
        good_steps(engine, reference)


WRITTEN_ALONE = dict(offload=True), dict(placement="static", offload_optim_frac=0.5)


@pytest.mark.parametrize("ranks, what, several_knobs", in_sweep(
    [(2, gathered_weights, ()), (2, writes, ({},)), (1, writes, WRITTEN_ALONE), (1, graph_over_gathered, ()),
     (2, writes, WRITTEN_ALONE), (2, graph_over_gathered, ())],
    lambda ranks, what, several_knobs: ranks == 2 and (what is graph_over_gathered or several_knobs is WRITTEN_ALONE)),
                         ids=lambda x: f"{len(x)}" if isinstance(x, tuple) else getattr(x, "__name__", None))
def test_gathered(pool, ranks, what, several_knobs):
    pool.run(ranks, what, *several_knobs)


def taken_over_in_the_middle(*several):
    """With a graph alive, gradients accumulated, chunks fetched early; by an engine with other chunks. Nobody holds them then."""
    for when in several:
        engine, reference = start(device_budget=None if when == "early" else least())
        good_steps(engine, reference)
        if when != "early":
            output = engine(share(batch_of(0)))
        if when == "backward":
            engine.backward(square_loss(output))
        second = Gemini(engine.module, chunk_mb=0.001, **ADAM)
        reference.optimizer = torch.optim.AdamW(reference.model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)
        if when == "forward":
            with raises(RuntimeError, "taken this model over"):
                engine.backward(square_loss(output))
        good_steps(second, reference)
        output, held = None, [weakref.ref(o) for o in (second, engine, engine.module, next(engine.module.parameters()))]
        del engine, second
        gc.collect()
        assert [ref() for ref in held] == [None] * 4


@pytest.mark.parametrize("ranks, several", in_sweep(
    [(2, ["backward"]), (1, ["early", "forward"]), (2, ["early", "forward"])],
    lambda ranks, several: ranks == len(several) == 2), ids=str)
def test_taken_over_in_the_middle(pool, ranks, several):
    pool.run(ranks, taken_over_in_the_middle, *several)


def grows_not(budgets):
    """Case 50: storages and objects after steps 5 and 15; micro-batches, skipped steps, looks, exceptions between."""
    def held():
        gc.collect()
        with torch._C.DisableTorchFunctionSubclass():
            objects = live_tensors()
            return len(objects), sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in objects}.values())

    for budget in budgets:
        engine, _ = start(Breaks, device_budget=budget and int(budget * least(Breaks)))
        counts = []
        for step in range(15):
            x = share(batch_of(step % 5))
            loss = square_loss if step % 7 != 3 else lambda out, *_: square_loss(out) * float("inf")
            engine.forward_backward(x, 1 + step % 3, loss)
            engine.step()
            with torch.no_grad():
                engine(x)
            if step % 10 == 4:
                engine.module.broken.add(("after", 1))
                with pytest.raises(ZeroDivisionError):
                    engine.forward_backward(x, 1, square_loss)
                engine.module.broken.clear()
                engine(x)
                engine.forward_backward(x, 2, square_loss)
                engine.step()
                sizes = [len(v) for v in vars(engine).values() if isinstance(v, (list, dict, set))]
                counts.append((*held(), engine.device_bytes, *sizes))
        assert len(counts) == 2 and len(set(counts)) == 1, counts


@pytest.mark.parametrize("ranks, budgets", in_sweep(
    [(1, [3]), (2, [3]), (2, [1, None])], lambda ranks, budgets: ranks == 2), ids=str)
def test_case_50_nothing_grows(pool, ranks, budgets):
    pool.run(ranks, grows_not, budgets)


# ---- 8. knobs ---------------------------------------------------------------------------------------------------------------


REFUSED = [  # what, and the words of the error
    (dict(placement="static", shard_param_frac=1.1), ["shard_param_frac", "1.1"]),
    (dict(placement="static", shard_param_frac=-0.1), ["shard_param_frac", "-0.1"]),
    (dict(placement="static", offload_optim_frac=2), ["offload_optim_frac", "2"]),
    (dict(placement="static", offload_param_frac=-1), ["offload_param_frac", "-1"]),
    (dict(placement="static", offload_param_frac=float("nan")), ["offload_param_frac", "nan"]),
    (dict(placement="static", offload_param_frac=0.5), ["offload_param_frac", "offload_optim_frac", "0.5"]),
    (dict(placement="static", device_budget=10**6), ["device_budget", "static"]),
    (dict(offload=True, device_budget=10**6), ["device_budget"]), (dict(offload=True, shard_param_frac=0.5), ["shard_param_frac"]),
    (dict(placement="best"), ["placement", "best"]), (dict(gpu_adam_frac=1.5), ["gpu_adam_frac", "1.5"]),
    (dict(chunk_mb=0), ["chunk_mb", "0"]), (dict(chunk_mb=-1), ["chunk_mb", "-1"]),
    (dict(chunk_mb=float("nan")), ["chunk_mb", "nan"]), (dict(chunk_mb=float("inf")), ["chunk_mb", "inf"]),
    (dict(device_budget=-5), ["device_budget", "-5"]), (dict(device_budget=0), ["device_budget", "0"]),
    (dict(precision="fp8"), ["precision", "fp8"]), (dict(growth_interval=0), ["growth_interval"]),
    (dict(prefetch=-1), ["prefetch", "-1"]), (dict(prefetch=0.5), ["prefetch", "0.5"]),
    (dict(shard_param_frac=0.5), ["shard_param_frac", "static"]), (dict(offload_optim_frac=0.5), ["offload_optim_frac", "static"])]


def test_knobs_are_refused_by_name(monkeypatch):
    for arguments, words in REFUSED:
        with raises(ValueError, *words):
            Gemini(Net(), **arguments)
    model = Net()
    model.blocks[1] = torch.jit.script(nn.Linear(7, 7))
    with raises(ValueError, "compiled", "blocks.1"):
        Gemini(model)
    model = Net()
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)  # the real one takes seconds
    model.blocks[2].compile()
    with raises(ValueError, "compiled", "blocks.2"):
        Gemini(model)
    model = Net()
    model.head.weight = nn.Parameter(torch.zeros(3, 7, dtype=torch.complex64))
    with raises(ValueError, "complex", "head.weight"):
        Gemini(model)
