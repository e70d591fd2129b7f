"""Every strategy against one process in float64: the engine contract, once per strategy.

Compared: gradients (`full_grad`) at 1e-10, parameters after 1 and 3 steps at 1e-10 with eps=1e-3 (so that a gradient whose true
value is 0 is not multiplied by lr/eps), losses, norms; ranks bitwise. float64 leaves only the order of summation, some
1e-16 per operation; 1e-10 is far above that and far below any wrong factor. Two CPU ranks and more; about 85 s. What several
rows would show in the same way runs once by default, for the engines that are `FEWER` in models.py, and for all in the sweep.
Numbers in test names ("case 1") are those of the list of faults that users of comparable systems reported.
"""
import collections
import copy
import gc
import importlib
import itertools
import tempfile
import warnings
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from models import (
    ENGINES,
    FEWER,
    Reference,
    assert_same_on_all_ranks,
    build,
    build_engine,
    cross_entropy,
    engines,
    fewer_engines,
    global_batch,
    in_sweep,
    live_tensors,
    loss_of,
    raises,
    random,
    rows,
    two_groups,
    whole,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ddp import sent_bytes

KINDS = ["plain", "awkward", "tied", "checkpoint", "batchnorm", "bert", "bert-mlm", "gpt2"]


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=tolerance, atol=tolerance, check_dtype=False)


def chunk_bytes(numel, itemsize):
    """Of a chunk of gemini.py with room for so many elements: it is cut into slices for all ranks, in steps of 16 bytes in half."""
    step = 8 * dist.get_world_size()
    return -(-numel // step) * step * itemsize


def weights_of(engine):
    """Copies of all weights, whole."""
    with whole(engine) as model:
        return [p.detach().clone() for p in model.parameters()]


# ---- 1. equal to one process -------------------------------------------------------------------------------------------


def train_beside_reference(name, kind, micro_batches=2, own_loop=False, steps=3, eps=1e-3, max_norm=0.5, tolerance=1e-10,
                           at_end=lambda *args: None, **knobs):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(kind)
    reference = Reference(model, two_groups, max_norm, lr=0.01, eps=eps)
    engine = build_engine(name, model, two_groups(model), lr=0.01, eps=eps, precision="fp32", max_norm=max_norm, **knobs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler that does not find its optimizer stepped only warns
        warnings.filterwarnings("ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor)", FutureWarning)  # NCCL, torch 2.14
        schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)) for o in (engine.optimizer, reference.optimizer)]
        for step in range(steps):
            share = 2 * micro_batches
            batch, loss_fn = global_batch(kind, share * ranks, step)
            mine = rows(batch, share * rank, share * (rank + 1))
            pieces = None
            if kind == "batchnorm":
                pieces = [[rows(batch, i, i + 2) for i in range(share * r, share * (r + 1), 2)] for r in range(ranks)]
            expected_loss = reference.backward(batch, loss_fn, pieces)
            if own_loop:
                for k in range(micro_batches):
                    piece = rows(mine, 2 * k, 2 * k + 2)
                    if k < micro_batches - 1:
                        with engine.no_sync():
                            engine.backward(loss_of(engine, piece, loss_fn) / micro_batches)
                    else:
                        engine.backward(loss_of(engine, piece, loss_fn) / micro_batches)
            else:
                close(engine.forward_backward(mine, micro_batches, loss_fn), expected_loss, tolerance)
            for n, p in reference.model.named_parameters():
                if p.requires_grad:
                    close(engine.full_grad(n), torch.zeros_like(p) if p.grad is None else p.grad, tolerance)
            expected_norm = reference.step()
            engine.step()
            close(engine.grad_norm, expected_norm, tolerance)
            for schedule in schedules:
                schedule.step()
            ours, theirs = dict(engine.named_parameters()), dict(reference.model.named_parameters())
            assert ours.keys() == theirs.keys()
            with whole(engine):
                for n, p in theirs.items():
                    close(ours[n].detach(), p.detach(), tolerance)
                    assert ours[n].shape == p.shape
                for (n, b), (_, c) in zip(engine.module.named_buffers(), reference.model.named_buffers(), strict=True):
                    assert b.dtype == c.dtype, n
                    close(b, c, tolerance)
                assert_same_on_all_ranks([*engine.module.parameters(), *engine.module.buffers()])
    at_end(engine, mine, micro_batches, loss_fn)


@pytest.mark.parametrize("name, kind", in_sweep(
    itertools.product(ENGINES, KINDS), lambda name, kind: name not in FEWER and kind not in ("awkward", "bert")))
def test_equal_to_one_process(pool, name, kind):
    pool.run(2, train_beside_reference, name, kind)


@pytest.mark.parametrize("name, kind", in_sweep(
    itertools.product(ENGINES, ["plain", "awkward", "batchnorm"]), lambda name, kind: name not in FEWER or kind != "awkward"))
def test_equal_to_one_process_on_three_ranks(pool, name, kind):
    pool.run(3, train_beside_reference, name, kind, micro_batches=1)


@pytest.mark.parametrize("name, kind", in_sweep(
    itertools.product(ENGINES, ["plain", "awkward", "bert"]), lambda name, kind: name not in FEWER or kind == "plain"))
def test_own_loop_equals_one_process(pool, name, kind):
    pool.run(2, train_beside_reference, name, kind, micro_batches=3, own_loop=True)


@fewer_engines
def test_usual_eps_equals_one_process(pool, name):
    """eps=1e-8 multiplies the rounding of a gradient near 0 by up to lr/eps = 1e6: 1e-16 becomes 1e-10, and this checks 1e-7."""
    pool.run(2, train_beside_reference, name, "plain", eps=1e-8, tolerance=1e-7)


@fewer_engines
def test_one_rank_equals_one_process(pool, name):
    pool.run(1, train_beside_reference, name, "awkward")


@pytest.mark.sweep
@engines
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize("own_loop", [False, True])
def test_sweep(pool, name, kind, ranks, own_loop):
    pool.run(ranks, train_beside_reference, name, kind, micro_batches=3, own_loop=own_loop, limit_s=120)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in ENGINES if not name.startswith("fsdp")])
@pytest.mark.parametrize("size_mb", [1e-6, 1e-3, 25.0])
def test_sweep_bucket_sizes(pool, name, size_mb):
    """Of buckets, or of chunks; gemini's then without a budget, since a chunk may be larger than the usual one."""
    sizes = dict(bucket_mb=size_mb, first_bucket_mb=size_mb)
    if name.startswith("gemini"):
        sizes = dict(chunk_mb=size_mb, **(dict(device_budget=None) if name == "gemini" else {}))
    pool.run(3, train_beside_reference, name, "awkward", **sizes)


def gathers_of_a_step(engine, *arguments):
    """Of each chunk, in the second of two more steps: it begins with what the first has fetched ahead, and fetches that again."""
    for _ in range(2):
        before = [chunk.gathers for chunk in engine.chunks]
        engine.forward_backward(*arguments)
        engine.step()
    return [chunk.gathers - b for chunk, b in zip(engine.chunks, before, strict=True)]


def under_fractions(kind, shard, param, optim):
    """Static placement: the numbers of one process, chunks where the fractions say, and as many bytes as that takes."""
    def counted(engine, *arguments):
        gathers = gathers_of_a_step(engine, *arguments)
        for fraction, there in ((optim, [c.on_device for c in engine.chunks]), (param, [c.store_on_device for c in engine.chunks])):
            assert there == sorted(there)  # the first ones are in host memory
            assert all(there) if fraction == 0 else not any(there) if fraction == 1 else there[0] < there[-1], (fraction, there)
        # Of a slice: master and moments. Where the optimizer is in host memory, also where sums land and, as two micro-batches
        # add up, what they are added to; and what gathers begin with, if that is on the device.
        parameters = gradients = optimizer = on_device = 0
        for chunk in engine.chunks:
            slice_bytes, trained = chunk.master.numel() * 8, chunk.exp_avg is not None
            copied = trained and not chunk.on_device and chunk.store_on_device
            ahead = chunk.full.untyped_storage().nbytes()  # gathered for the next forward
            assert ahead in (0, chunk.room_bytes)
            parameters += slice_bytes * (1 + copied) + ahead
            gradients += 2 * slice_bytes * (trained and not chunk.on_device)
            optimizer += 2 * slice_bytes * trained
            on_device += slice_bytes * (3 if trained and chunk.on_device else chunk.store_on_device) + ahead
        held = {kind: sum(by_device.values()) for kind, by_device in engine.memory().items()}
        assert held == dict(parameters=parameters, gradients=gradients, optimizer=optimizer, buffers=held["buffers"])
        assert engine.device_bytes == on_device
        if shard == 0:
            assert max(gathers) <= 2, gathers  # once a micro-batch
        elif kind == "bert":
            assert max(gathers[: len(gathers) // 3]) > 2, gathers

    train_beside_reference("gemini_static", kind, at_end=counted, shard_param_frac=shard, offload_param_frac=param,
                           offload_optim_frac=optim)


FRACTIONS = [(shard, param, optim) for shard in (0, 0.5, 1) for param in (0, 0.5, 1) for optim in (0, 0.5, 1) if param <= optim]
FEW_KINDS = ["awkward", "bert", "batchnorm"]


@pytest.mark.parametrize("kind, shard, param, optim", in_sweep(
    [(kind, *fractions) for kind in FEW_KINDS for fractions in FRACTIONS], lambda *case: case != ("awkward", 0, 0, 0.5)))
def test_static_placement_equals_one_process(pool, kind, shard, param, optim):
    """shard_param_frac, offload_param_frac, offload_optim_frac."""
    pool.run(2, under_fractions, kind, shard, param, optim)


def under_budget(kind, share):
    """device_budget from what the tightest moment needs (share 0) to what all chunks and their optimizers take (1)."""
    rank = dist.get_rank()
    free = build_engine("gemini", build(kind), precision="fp32", device_budget=None)
    batch, loss_fn = global_batch(kind, 8, 0)
    for step in range(2):
        free.forward_backward(rows(batch, 4 * rank, 4 * rank + 4), 2, loss_fn)
        if step == 0:  # no optimizer is on the device yet
            least = free._simulate(budget=0).most
        free.step()
    widest = free.most_device_bytes + max(chunk.room_bytes for chunk in free.chunks)  # and one that might be fetched ahead
    budget = int(least + share * (widest - least))

    def counted(engine, *arguments):
        """Two more steps: no moment takes more than the budget. In the tightest one no optimizer is on the device, and a chunk is
        gathered for forward and again for backward; in the widest all is there, and each is gathered once a micro-batch."""
        engine.most_device_bytes, gathers = 0, gathers_of_a_step(engine, *arguments)
        assert engine.most_device_bytes <= budget
        on_device = [chunk.on_device for chunk in engine.chunks if chunk.exp_avg is not None]
        if share == 1:
            assert all(on_device) and max(gathers) == 2, (on_device, gathers)
        if share == 0:
            assert not any(on_device), on_device
            assert max(gathers) > 2 or least >= sum(chunk.room_bytes for chunk in engine.chunks), gathers

    train_beside_reference("gemini", kind, device_budget=budget, at_end=counted)


@pytest.mark.parametrize("kind, share", in_sweep(
    itertools.product(KINDS, [0, 0.1, 0.25, 0.5, 0.75, 1]), lambda kind, share: kind != "awkward" or 0 < share))
def test_budgets_equal_one_process(pool, kind, share):
    pool.run(2, under_budget, kind, share)


# ---- 2. memory ---------------------------------------------------------------------------------------------------------


class LivePeak(TorchDispatchMode):
    """The largest total of live storages that appear while it is on, other than those of `known` tensors. After each operation the
    sizes are read anew: a storage may have been emptied or filled in place (`resize_`)."""

    def __init__(self, known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.known:
                s = t.untyped_storage()
                self.storages[s._cdata] = StorageWeakRef(s)
        live = {k: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for k, ref in self.storages.items()}
        self.storages = {k: self.storages[k] for k, storage in live.items() if storage is not None}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in live.values() if storage is not None))
        return out


def held_memory(name, precision, micro_batches):
    """Eight layers of 400 x 400: 5 MB in fp32. The batch is one sample, so that activations do not show."""
    torch.manual_seed(0)
    layer, layers, n = 400 * 400, 8, dist.get_world_size()
    model = nn.Sequential(*[nn.Linear(400, 400, bias=False) for _ in range(layers)])
    engine = build_engine(name, model, precision=precision, bucket_mb=1.0, first_bucket_mb=1.0)
    for _ in range(3):
        known = [t for b in engine.buckets for t in vars(b).values() if isinstance(t, torch.Tensor)]
        known += [*getattr(engine, "_room", []), *getattr(engine, "_received", {}).values()]
        with LivePeak([*model.parameters(), *known]) as live:
            engine.forward_backward(torch.randn(micro_batches, 400), micro_batches, lambda out, x: out.float().square().mean())
        held = {kind: sum(by_device.values()) for kind, by_device in engine.memory().items()}
        engine.step()
    # ddp holds fp32 weights whatever the precision; elsewhere weights that are not fp32 have fp32 masters. Offloaded, masters are
    # apart in fp32, too, and what lands in host memory is there beside what it is added to.
    width = 2 if precision == "bf16" and name != "ddp" else 4
    offload, stage_1, accumulates = "offload" in name, name.startswith(("zero1", "hybrid")), micro_batches > 1
    optimizer = 8 if name == "ddp" else (8 if width == 4 and not offload else 12) / n
    gradients = 4 if name == "ddp" else width if stage_1 else (4 if accumulates else width) / n
    if offload and (stage_1 or accumulates):
        gradients += width / n
    rooms = [] if name == "ddp" else engine._received.values() if name == "hybrid" else engine._room
    room = sum(t.numel() * t.element_size() for t in rooms)
    assert room <= (1 if stage_1 else 2) * 2**20  # two buckets of 1 MiB, what gloo receives included
    assert stage_1 or name == "ddp" or room >= 2**20
    if name == "hybrid":  # what others send of the largest bucket: as many layers as fit into 1 MiB
        assert room == (n - 1) / n * (2**20 // (layer * width)) * layer * width
    held["gradients"] -= room
    for kind, expected in dict(parameters=width, gradients=gradients, optimizer=optimizer, buffers=0).items():
        assert abs(held[kind] - expected * layers * layer) <= 0.01 * expected * layers * layer, (kind, held[kind], expected)
    # What backward allocates on top: the gradient that autograd has just made, and another while it is copied; for ddp the
    # weights as autocast casts them. Sums are made in pieces of 64 KiB; activations of one sample.
    bound = 2 * layer * width + (2 * layers * layer if name == "ddp" and precision == "bf16" else 0) + 2**17 + 400 * 4 * 50
    assert layer * width <= live.peak <= bound, (live.peak, bound)


def held_memory_of_units(name, precision, micro_batches):
    """fsdp.py with the same eight layers, the last two in the root, so that the root's gradients are there while units compute."""
    torch.manual_seed(0)
    layer, layers, n = 400 * 400, 8, dist.get_world_size()
    model = nn.Sequential(*[nn.Linear(400, 400, bias=False) for _ in range(layers)])
    model[6].read_outside = model[7].read_outside = True
    engine = build_engine(name, model, precision=precision)
    for _ in range(3):
        kept = [t for f in engine.flats for t in (f.master, f.store, f.shard, f.landing)]
        kept += [t for f in engine.fragments for t in (f.exp_avg, f.exp_avg_sq)]
        kept = [t for t in kept if t is not None]
        with LivePeak(kept) as forward, torch.no_grad():
            engine(torch.randn(1, 400))
        with LivePeak(kept) as live:
            engine.forward_backward(torch.randn(micro_batches, 400), micro_batches, lambda out, x: out.float().square().mean())
        held = {kind: sum(by_device.values()) for kind, by_device in engine.memory().items()}
        engine.step()
        between = {kind: sum(by_device.values()) for kind, by_device in engine.memory().items()}
    # Weights that are not fp32 have fp32 masters, and offloaded a copy in their own dtype; fp32 weights are their own. Sums of
    # several micro-batches add up in fp32 unless whole gradients wait for the last one (reduce_each=False). Offloaded, what
    # lands in host memory stays, and where it is added to something, that too.
    width, offload, whole_gradients = 2 if precision == "bf16" else 4, name == "fsdp_offload", name == "fsdp_no_reshard"
    gradients = 4 if micro_batches > 1 and not whole_gradients else width
    if offload and micro_batches > 1:
        gradients += width
    weights = 4 if width == 4 else 2 if offload else 0
    formula = dict(parameters=weights / n, optimizer=(8 if width == 4 else 12) / n, buffers=0)
    for found, expected in ((held, dict(formula, gradients=gradients / n)),
                            (between, dict(formula, gradients=gradients / n if offload else 0))):
        for kind, per_element in expected.items():
            assert abs(found[kind] - per_element * layers * layer) <= 0.01 * per_element * layers * layer, (kind, found, expected)
    # Beside that, in layers: forward has the root (2) and two units, one if none is gathered ahead. Backward has the root, its
    # gradients (2), the unit that computes, its gradients, the unit before it, whose memory holds gradients on their way, the
    # next one's weights, and under gloo (N-1)/N of a unit for what is received. Kept from forward to backward (reshard=False)
    # there are all weights; with whole gradients beside them nothing is sent before the first of those has been added.
    ahead = 0 if offload else 1
    in_forward, in_backward = 3 + ahead, 2 + 2 + 3 + ahead + (n - 1) / n
    if whole_gradients:
        in_backward = layers + 2 + 1 + (n - 1) / n if micro_batches == 1 else 2 * layers + 2 + 1
    slack = 2**17 + 400 * 4 * 50  # sums are made in pieces of 64 KiB; activations of one sample: less than a layer
    for live_peak, of_layers in ((forward.peak, in_forward), (live.peak, in_backward)):
        assert 0 <= live_peak - of_layers * layer * width <= slack < layer * width, (live_peak / layer / width, of_layers)


def held_memory_of_chunks(name, precision, micro_batches):
    """gemini.py with the same eight layers, a chunk each."""
    torch.manual_seed(0)
    layer, layers, n = 400 * 400, 8, dist.get_world_size()
    width, accumulates = 2 if precision == "bf16" else 4, micro_batches > 1
    wide = 4 if accumulates else width  # of a gradient slice: what micro-batches add up is in fp32
    room, slice_, knobs = layer * width, layer // n, dict(chunk_mb=layer * width / 2**20)
    # How many chunks are there of which host memory holds everything; nothing?
    everything, nothing = {"gemini_offload": (8, 0), "gemini_static": (2, 2)}.get(name, (5, 3))
    if name == "gemini":
        # Room for the tightest moment, one chunk, for one that is fetched ahead, and for three optimizers with gradients and 0.4 of
        # one. What is left beside the three has place for `fit` gathered chunks, until gradients are summed, if they do not add up.
        knobs["device_budget"] = budget = int(2 * room + 3.4 * slice_ * (3 * 4 + wide))
        fit = (budget - 3 * slice_ * (3 * 4 + wide * accumulates)) // room
    model = nn.Sequential(*[nn.Linear(400, 400, bias=False) for _ in range(layers)])
    engine = build_engine(name, model, precision=precision, **knobs)
    assert [chunk.room_bytes for chunk in engine.chunks] == [room] * layers
    for _ in range(3):
        kept = [t for c in engine.chunks for t in (c.master, c.store, c.exp_avg, c.exp_avg_sq, c.shard, c.landing)]
        kept, engine.most_device_bytes = [t for t in kept if t is not None], 0
        with LivePeak(kept) as forward, torch.no_grad():
            engine(torch.randn(1, 400))
        with LivePeak(kept) as live:
            engine.forward_backward(torch.randn(micro_batches, 400), micro_batches, lambda out, x: out.float().square().mean())
        held, on_device = {kind: sum(by_device.values()) for kind, by_device in engine.memory().items()}, engine.device_bytes
        engine.step()
        between = {kind: sum(by_device.values()) for kind, by_device in engine.memory().items()}
        assert name != "gemini" or engine.most_device_bytes <= budget, (engine.most_device_bytes, budget)
    early = sum(chunk.full.untyped_storage().nbytes() for chunk in engine.chunks) // room  # gathered for the next forward
    assert early == 1 or name == "gemini" and early == 0
    assert name != "gemini" or engine.most_device_bytes >= 3 * 3 * 4 * slice_ + fit * room
    # Per element of a slice. fp32 weights are their own masters. A chunk whose optimizer is in host memory has a copy of its
    # weights where gathers begin, if that is on the device or if weights are not fp32; and a place where summed gradients land,
    # beside the slice if that adds up. On the device slices are there from backward to step. Of gathered chunks nothing is left.
    optimizer_away = layers - nothing
    copies = width * (optimizer_away if width == 2 else optimizer_away - everything)
    weights = (4 * layers if width == 4 else 0) + copies
    landing = optimizer_away * (width + (4 if accumulates else 0))
    formula = dict(parameters=weights, optimizer=(8 if width == 4 else 12) * layers, buffers=0)
    for found, expected, gathered in ((held, dict(formula, gradients=landing + nothing * wide), 0),
                                      (between, dict(formula, gradients=landing), early)):
        for kind, per_slice in expected.items():
            n_bytes = per_slice * slice_ + (gathered * room if kind == "parameters" else 0)
            assert abs(found[kind] - n_bytes) <= 0.01 * n_bytes, (kind, found, n_bytes)
    # The ledger of what is on the device: optimizers there with their gradients, and copies of weights whose optimizer is not.
    there = nothing * 3 * 4 + (optimizer_away - everything) * width
    assert on_device == (there + nothing * wide) * slice_, (on_device / slice_, there)
    assert engine.device_bytes == there * slice_ + early * room, (engine.device_bytes / slice_, there, early)
    # Gathered chunks. Under a budget as many as there is room for. Static placement has the chunk that is read, and the next; in
    # backward also the one before, whose memory holds gradients on their way; and in any case those that stay, here four.
    # Beside them the gradient that autograd has just made, and under gloo (N-1)/N of a chunk for what is received.
    in_forward, in_backward = {"gemini_static": (4, 4), "gemini_offload": (2, 3)}.get(name) or (fit, fit)
    in_backward += 1 + (n - 1) / n
    slack = 2**17 + 400 * 4 * 50  # sums are made in pieces of 64 KiB; activations of one sample: less than a layer
    for live_peak, of_layers in ((forward.peak, in_forward), (live.peak, in_backward)):
        assert 0 <= live_peak - of_layers * room <= slack < room, (live_peak / room, of_layers)


@pytest.mark.parametrize("name, precision, micro_batches", in_sweep(
    itertools.product(ENGINES, ["fp32", "bf16"], [1, 3]),
    lambda name, *of: name not in FEWER and of not in [("fp32", 3), ("bf16", 1)]))
def test_memory_equals_the_formula(pool, name, precision, micro_batches):
    held = {"fsdp": held_memory_of_units, "gemini": held_memory_of_chunks}.get(ENGINES[name][0], held_memory)
    pool.run(2, held, name, precision, micro_batches)


def live_bytes():
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():  # parameters that are not here have storages, too
        storages = [t.untyped_storage() for t in live_tensors()]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def grows_not(name, steps=22):
    model = build("awkward")
    engine = build_engine(name, model, precision="fp16", initial_scale=8.0)
    at = {}
    for step in range(steps):
        batch, loss_fn = global_batch("awkward", 4, step)
        if step % 7 == 5:  # a skipped step
            batch = (batch[0] * float("inf"), batch[1])
        engine.forward_backward(batch, 1 + step % 3, loss_fn)
        engine.step()
        with torch.no_grad():
            engine.eval()(batch[0])
        engine.train()
        if step in (3, steps - 1):
            at[step] = live_bytes()
    assert engine.skipped_steps == (steps + 1) // 7
    assert at[steps - 1] == at[3], at


@pytest.mark.parametrize("name, steps", in_sweep(
    itertools.product(ENGINES, [22, 50]), lambda name, steps: name not in FEWER or steps > 22))
def test_nothing_grows(pool, name, steps):
    """Case 50: live bytes after step 3 and after the last one, with accumulation, skipped steps and evaluation in between."""
    pool.run(2, grows_not, name, steps)


# ---- 3. bytes on the wire ------------------------------------------------------------------------------------------------


# Chunks are read in the order 0 1 2 3 3 2 1 0. With room for three, number 0 goes for number 3. What static placement does not
# keep (it keeps 2 and 3 in one row, none in the other) is released when the next one is read, unless it comes after that one.
GATHERS = {"gemini": [2, 1, 1, 1], "gemini_static": [2, 2, 1, 1], "gemini_offload": [2, 2, 1, 1]}


def wire_bytes(name, width, precision, **knobs):
    """Bytes that this rank sends in the third step of four layers of width x width (for fsdp, one in the root; for gemini, each a
    chunk, and room for three): on the wire, and as the engine counts."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    model[0].read_outside = True
    if name.startswith("gemini"):
        room = chunk_bytes(width * (width + 1) + 8, 2 if precision == "bf16" else 4)
        knobs["chunk_mb"] = room / 2**20
    if name == "gemini":
        knobs.update(device_budget=3 * room, prefetch=2)  # which leaves no room for optimizers
    engine = build_engine(name, model, precision=precision, **{"bucket_mb": 4.0, **knobs})
    x = torch.randn(2, width)
    for _ in range(3):
        dist.barrier()
        before, gathers_before = sent_bytes(), [chunk.gathers for chunk in getattr(engine, "chunks", [])]
        engine.forward_backward(x, loss_fn=lambda out, x: out.float().square().mean())
        engine.step()
        engine.named_parameters()  # waits for what `step` has left under way
        dist.barrier()
        sent = sent_bytes() - before
        gathers = [chunk.gathers - b for chunk, b in zip(getattr(engine, "chunks", []), gathers_before, strict=True)]
    assert gathers == GATHERS.get(name, []), gathers
    return sent, sum(engine.traffic.values()), sum(p.numel() for p in engine.module.parameters())


def mean_over_ranks(results):
    return [sum(values) / len(values) for values in zip(*results, strict=True)]


def check_wire_bytes(pool, name, ranks, precision="fp32", width=1300):
    """6.8e6 parameters: 27 MB in fp32 on 2 ranks. An all-reduce, or a reduce-scatter and a gather, which send as much. fsdp
    gathers units (three of the four layers) a second time, for backward, unless they stay (reshard=False); gemini as many times as
    GATHERS says."""
    empty, _, _ = mean_over_ranks(pool.run(ranks, wire_bytes, name, 8, precision))
    sent, counted, numel = mean_over_ranks(pool.run(ranks, wire_bytes, name, width, precision))
    collectives = 2 + 3 / 4 if name in ("fsdp", "fsdp_offload") else 1 + sum(GATHERS.get(name, [4])) / 4
    formula = collectives * (ranks - 1) / ranks * (2 if precision == "bf16" and name != "ddp" else 4) * numel
    assert abs((sent - empty) / formula - 1) < 0.01, (sent, empty, formula)
    assert abs(counted / formula - 1) < 0.01, (counted, formula)


@pytest.mark.parametrize("name, ranks", in_sweep(  # with three ranks (N-1)/N is not 1/N
    itertools.product(ENGINES, [2, 3, 4]), lambda name, ranks: name not in FEWER or ranks != 3))
def test_bytes_on_the_wire_equal_the_formula(pool, name, ranks):
    check_wire_bytes(pool, name, ranks)


@pytest.mark.parametrize("name, ranks", in_sweep(
    itertools.product([name for name in ENGINES if name != "ddp"], [2, 4]), lambda name, ranks: name not in FEWER or ranks != 2))
def test_half_precision_sends_half_the_bytes(pool, name, ranks):
    check_wire_bytes(pool, name, ranks, "bf16", width=1900)


# ---- 4. micro-batches, order and overlap -----------------------------------------------------------------------------------


def accumulation_numbers(name):
    """Case 1: w * x / 2 for x = (1, 3) on rank 0 and (5, 9) on rank 1. The gradient is 4.5 on both, whichever way."""
    xs = [(1.0, 3.0), (5.0, 9.0)][dist.get_rank()]

    def engine():
        model = nn.Linear(1, 1, bias=False).double()
        return build_engine(name, model, precision="fp32", lr=0.0)

    def loss(e, x):
        return e(torch.tensor([[x]], dtype=torch.float64)).sum() / 2

    def around_both(e):
        with e.no_sync():
            e.backward(loss(e, xs[0]))
        e.backward(loss(e, xs[1]))

    def around_backward_only(e):
        first = loss(e, xs[0])
        with e.no_sync():
            e.backward(first)
        e.backward(loss(e, xs[1]))

    def around_forward_only(e):
        with e.no_sync():
            first = loss(e, xs[0])
        e.backward(first)
        e.backward(loss(e, xs[1]))

    def never_synchronised(e):  # step and full_grad reduce what is left
        with e.no_sync():
            for x in xs:
                e.backward(loss(e, x))

    def micro_batches(e):
        e.forward_backward(torch.tensor([[xs[0]], [xs[1]]], dtype=torch.float64), 2, lambda out, x: out.mean())

    for way in (around_both, around_backward_only, around_forward_only, never_synchronised, micro_batches):
        e = engine()
        for _ in range(3):  # also after a step, after zero_grad, and after the buckets were rebuilt
            way(e)
            assert e.full_grad("weight").item() == 4.5, way.__name__
            e.zero_grad()
            way(e)
            e.step()
            assert e.grad_norm.item() == 4.5, way.__name__
            with e.no_sync():  # asked for inside, too, the sum is that over the ranks
                never_synchronised(e)
                assert e.full_grad("weight").item() == 4.5
                e.zero_grad()
                never_synchronised(e)
                e.step()
            assert e.grad_norm.item() == 4.5


@fewer_engines
def test_case_1_accumulation(pool, name):
    pool.run(2, accumulation_numbers, name)


def varying_micro_batches(name):
    """Case 2 and 4: 3 micro-batches, then 1, then 2; sequence lengths that differ; three buckets or more at the first step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build("tied")
    reference = Reference(model, None, 0.0, lr=0.01, eps=1e-3)
    engine = build_engine(name, model, precision="fp32", lr=0.01, eps=1e-3, bucket_mb=1e-4, first_bucket_mb=1e-4)
    for step, k in enumerate((3, 1, 2)):
        for j in range(k):
            x = random(2 * ranks, 3 + 2 * j, high=19, seed=10 * step + j)
            y = random(2 * ranks, high=19, seed=100 + 10 * step + j)
            (cross_entropy(reference.model(x), (x, y)) / k).backward()
            mine = slice(2 * rank, 2 * rank + 2)
            loss = cross_entropy(engine(x[mine]), (x, y[mine])) / k
            if j < k - 1:
                with engine.no_sync():
                    engine.backward(loss)
            else:
                engine.backward(loss)
        for n, p in reference.model.named_parameters():
            close(engine.full_grad(n), p.grad)
        reference.step()
        engine.step()
        with whole(engine) as model, torch.no_grad():
            for p, q in zip(model.parameters(), reference.model.parameters(), strict=True):
                close(p, q)


@fewer_engines
def test_cases_2_and_4_varying_micro_batches(pool, name):
    pool.run(2, varying_micro_batches, name)


def uneven_ranks(name):
    """7 samples on 2 ranks as 5 and 2, then 7 and 0, cut into 3 micro-batches: the mean over all samples, each once."""
    model = build("plain")
    reference = Reference(model, None, 0.0, lr=0.01, eps=1e-3)
    engine = build_engine(name, model, precision="fp32", lr=0.01, eps=1e-3)
    for step, cut in enumerate((5, 7, 1)):
        batch, loss_fn = global_batch("plain", 7, step)
        expected = reference.backward(batch, loss_fn)
        mine = rows(batch, 0, cut) if dist.get_rank() == 0 else rows(batch, cut, 7)
        loss = engine.forward_backward(mine if len(mine[1]) else None, 3, loss_fn)
        close(loss, expected)
        assert_same_on_all_ranks([loss])
        for n, p in reference.model.named_parameters():
            close(engine.full_grad(n), p.grad)
        reference.step()
        engine.step()


@fewer_engines
def test_uneven_batches_and_missing_micro_batches(pool, name):
    pool.run(2, uneven_ranks, name)


def weighted_mean(name):
    """Case 7: one token with loss 4 on rank 0, three with loss 0 on rank 1: the mean over tokens is 1, the mean of means 2."""
    engine = build_engine(name, nn.Linear(1, 1, bias=False), precision="fp32", lr=0.0)
    with whole(engine, write=True) as model:
        nn.init.ones_(model.weight)
    tokens = torch.tensor([[4.0]]) if dist.get_rank() == 0 else torch.zeros(3, 1)
    assert engine.forward_backward(tokens, loss_fn=lambda out, x: out.mean()) == 1.0
    assert engine.full_grad("weight").item() == 1.0
    engine.zero_grad()
    # the same as one sample each, with the number of tokens as the weight
    sample = (torch.tensor([[tokens.sum() / len(tokens)]]), torch.tensor([len(tokens)]))
    assert engine.forward_backward(sample, loss_fn=lambda out, b: out.mean(), weight=lambda b: b[1].sum()) == 1.0
    assert engine.full_grad("weight").item() == 1.0
    engine.zero_grad()
    # a weight of 0 does not let its NaN through; a total of 0 neither
    nan = torch.tensor([[float("nan") if dist.get_rank() else 2.0]])
    loss = engine.forward_backward(nan, loss_fn=lambda out, x: out.nan_to_num(5.0).mean(), weight=lambda b: b.isfinite().sum())
    assert loss == 2.0
    assert engine.forward_backward(nan, loss_fn=lambda out, x: out.sum() * 0, weight=lambda b: 0) == 0.0


@fewer_engines
def test_case_7_weighted_mean(pool, name):
    pool.run(2, weighted_mean, name)


def token_weights(name):
    """Labels that count, unevenly spread over micro-batches and ranks, for a causal and a masked language model in fp32
    (transformers computes the causal loss in fp32 whatever the model): relative 1e-5 is its rounding."""
    for kind in ("gpt2", "bert-mlm"):
        model = build(kind, dtype=torch.float32)
        reference = build(kind, dtype=torch.float32)
        tokens = random(8, 11, high=61, seed=3)
        labels = tokens.masked_fill(random(8, 11, high=100, seed=4) < torch.linspace(5, 95, 8)[:, None], -100)
        labels[7] = -100  # one micro-batch of the last rank has no label at all: its mean is NaN
        batch = dict(input_ids=tokens, labels=labels)
        expected = reference(**batch).loss
        expected.backward()
        engine = build_engine(name, model, precision="fp32")
        rank = dist.get_rank()
        close(engine.forward_backward(rows(batch, 4 * rank, 4 * rank + 4), 4), expected.detach(), 1e-5)
        for n, p in reference.named_parameters():
            torch.testing.assert_close(engine.full_grad(n), p.grad.cpu(), rtol=1e-4, atol=1e-6)


@fewer_engines
def test_tokens_weigh_micro_batches(pool, name):
    pool.run(2, token_weights, name)


def overlap_log(name):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    engine = build_engine(name, model, precision="fp32", bucket_mb=0.02, first_bucket_mb=0.02)
    log, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **k: (log.append(tensor.numel()), all_reduce(tensor, *a, **k))[1]
    model[0].weight.register_post_accumulate_grad_hook(lambda p: log.append("first layer"))
    try:
        for _ in range(2):  # before and after the buckets are rebuilt
            log.clear()
            engine.forward_backward(torch.randn(4, 64), 2, lambda out, x: out.square().mean())
            last_backward = len(log) - 1 - log[::-1].index("first layer")
            # beside the buckets: one element for the sum of weights, one for the loss; last the presence of each parameter
            sizes, last = [b.flat.numel() for b in engine.buckets], len(engine.params)
            assert len(sizes) >= 6 and [e for e in log if e != "first layer"] == [1, 1, *sizes, last], log
            assert log[:last_backward].count("first layer") == 1 and len(log[:last_backward]) >= 3 + len(sizes) - 1, log
            engine.step()
    finally:
        dist.all_reduce = all_reduce


def test_ddp_reduces_while_backward_runs(pool):
    """With 2 micro-batches each bucket is sent once, in order, and all but the last before the first layer's gradient exists."""
    pool.run(2, overlap_log, "ddp")


def events_of_units(name):
    """What fsdp.py does in the second step, in order: gathers and sums of each layer, its output, its gradient."""
    torch.manual_seed(0)
    fsdp, layers, log = importlib.import_module("fsdp"), 5, []
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
    engine = build_engine(name, model, precision="fp32")
    unit_of = {2 * flat.tag: int(unit.name) for unit in engine.units for flat in unit.flats}
    gather, add_up = fsdp.SliceGather, fsdp.SliceSum
    fsdp.SliceGather = lambda e, flat, tag: (log.append(("gather", unit_of[tag])), gather(e, flat, tag))[1]
    fsdp.SliceSum = lambda e, flat, tag, room: (log.append(("sum", unit_of[tag - 1])), add_up(e, flat, tag, room))[1]
    for i, module in enumerate(model):
        module.register_forward_hook(lambda *_, i=i: log.append(("output", i)))
        module.weight.register_post_accumulate_grad_hook(lambda p, i=i: log.append(("gradient", i)))
    try:
        for _ in range(2):  # in the first one forward knows no order, and gathers nothing ahead
            log.clear()
            engine.forward_backward(torch.randn(4, 64), 2, lambda out, x: out.square().mean())
            engine.step()
    finally:
        fsdp.SliceGather, fsdp.SliceSum = gather, add_up

    def in_turn(order, *steps):
        """Layer after layer: each step with that layer, or with the one `late` before it in `order`; late = -1 is the next one."""
        last = len(order)
        return [(what, order[k - late]) for k in range(-1, last + 1) for what, late in steps if 0 <= k - late < last]

    ahead = -1 if engine.prefetch else 0  # a gather starts before the layer ahead of it computes
    forward, backward = range(layers), range(layers)[::-1]
    reshard = [("gather", ahead)] if engine.reshard else []
    micro_batches = []
    for last in (False, True):
        micro_batches += in_turn(forward, ("gather", ahead), ("output", 0))
        # the sum of a layer is sent before the gradient of the next one is made, the last layer's, number 0, after all
        sums = [("sum", 1)] if engine.reduce_each or last else []
        micro_batches += in_turn(backward, *sums, *reshard, ("gradient", 0))
    assert log == micro_batches, (log, micro_batches)
    assert log.index(("sum", layers - 1)) < len(log) - 1 - log[::-1].index(("gradient", 0))
    # k reduce-scatters for k micro-batches, one if whole gradients wait; gathers in each
    sums = 2 if engine.reduce_each else 1
    one_of_all = sum(flat.full.numel() for flat in engine.flats) * 4 // 2
    assert engine.traffic["reduce_scatter"] == sums * one_of_all
    assert engine.traffic["all_gather"] == 2 * (2 if engine.reshard else 1) * one_of_all


@pytest.mark.parametrize("name", [name for name in ENGINES if name.startswith("fsdp")])
def test_fsdp_gathers_and_sends_while_others_compute(pool, name):
    """Sums: all but the last before the first layer's gradient exists."""
    pool.run(2, events_of_units, name)


def events_of_chunks(name):
    """What gemini.py does in the third step, in order: as `events_of_units`, with each layer in a chunk."""
    torch.manual_seed(0)
    gemini, layers, log = importlib.import_module("gemini"), 5, []
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
    room = chunk_bytes(64 * 64 + 64, 4)
    others = 0  # on a GPU also what libraries keep there, which counts, too
    if name == "gemini" and torch.get_default_device().type == "cuda":
        free = build_engine(name, copy.deepcopy(model), precision="fp32", chunk_mb=room / 2**20)
        free.forward_backward(torch.randn(4, 64), 2, lambda out, x: out.square().mean())
        others = max(free.plan.others)
        del free
        gc.collect()
    budget = dict(device_budget=3 * room + others, prefetch=2) if name == "gemini" else {}
    engine = build_engine(name, model, precision="fp32", chunk_mb=room / 2**20, **budget)
    gather, add_up = gemini.SliceGather, gemini.SliceSum
    gemini.SliceGather = lambda e, flat, tag: (log.append(("gather", tag // 2)), gather(e, flat, tag))[1]
    gemini.SliceSum = lambda e, flat, tag, room: (log.append(("sum", tag // 2)), add_up(e, flat, tag, room))[1]
    for i, module in enumerate(model):
        module.register_forward_hook(lambda *_, i=i: log.append(("output", i)))
        module.weight.register_post_accumulate_grad_hook(lambda p, i=i: log.append(("gradient", i)))
    try:
        for _ in range(3):  # the first one learns, the second has nothing fetched ahead by the first
            log.clear()
            engine.forward_backward(torch.randn(4, 64), 2, lambda out, x: out.square().mean())
            engine.step()
    finally:
        gemini.SliceGather, gemini.SliceSum = gather, add_up
    words = " ".join(f"{what[0]}{layer}" if what in ("gather", "sum") else f"{what}{layer}" for what, layer in log)
    # g: gather, s: sum. A gather starts before the layer ahead of it computes; what static placement does not keep goes when the
    # next layer is read, unless it is read after that: number 3, which forward reads before 4, and backward after it. With room
    # for three chunks, 0, 1 and 2 come as a micro-batch begins; as 1 is read, 3 takes the place of 0, then 4 that of 1. In `step`
    # up to `prefetch` of the first ones start already. A sum starts before the gradient of the layer in front exists; that of
    # layer 0 after all.
    if name == "gemini":
        first, forward = ["g0", "g1", "g2"], "output0 g3 output1 g4 output2 output3 output4"
        backward = "gradient4 s4 gradient3 s3 g1 gradient2 s2 g0 gradient1 s1 gradient0 s0"
    else:
        first, forward = ["g0"], "g1 output0 g2 output1 g3 output2 g4 output3 output4"
        backward = "gradient4 s4 g2 gradient3 s3 g1 gradient2 s2 g0 gradient1 s1 gradient0 s0"
    assert words in [" ".join([*first[early:], forward, backward, *first, forward, backward, *first[:early]])
                     for early in range(1, engine.prefetch + 1)], words
    # k reduce-scatters for k micro-batches
    one_of_all = sum(chunk.full.numel() for chunk in engine.chunks) * 4 // 2
    assert engine.traffic["reduce_scatter"] == 2 * one_of_all
    assert engine.traffic["all_gather"] == [what for what, _ in log].count("gather") * one_of_all // layers


@pytest.mark.parametrize("name", [name for name in ENGINES if name.startswith("gemini")])
def test_gemini_gathers_and_sends_while_others_compute(pool, name):
    pool.run(2, events_of_chunks, name)


def opposite_order(name):
    """Case 10: y = a(x) + b(x), evaluated in the opposite order on rank 1; then b is skipped on rank 1."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)
            for module in (self.a, self.b, self.c):  # fsdp: in the root, since units must run in one order
                module.read_outside = True

        def forward(self, x, order):
            return sum(getattr(self, branch)(x) for branch in order) / len(order)

    x = random(2 * ranks, 5, seed=1)
    mine = x[2 * rank : 2 * rank + 2]
    engine = build_engine(name, Two().double(), precision="fp32", lr=0.1, weight_decay=0.1, bucket_mb=1e-6, first_bucket_mb=1e-6)
    for orders in (("ab", "ba"), ("ab", "a"), ("a", "b"), ("b", "ab")):
        plain, before = Two().double(), weights_of(engine)
        for p, q in zip(plain.parameters(), before, strict=True):
            p.data.copy_(q)
        sum(plain(x[2 * r : 2 * r + 2], orders[r]).square().mean() / ranks for r in range(ranks)).backward()
        engine.backward(engine(mine, orders[rank]).square().mean())
        for n, p in plain.named_parameters():
            close(engine.full_grad(n), torch.zeros_like(p) if p.grad is None else p.grad)
        engine.step()
        after = weights_of(engine)
        assert_same_on_all_ranks(after)
        assert all(torch.equal(p, q) for p, q in zip(after[4:], before[4:], strict=True))  # c: no decay either


@fewer_engines
def test_case_10_ranks_use_parameters_in_different_order(pool, name):
    pool.run(2, opposite_order, name)


class EitherFirst(nn.Module):
    """Two layers of one size, each a unit of fsdp.py; rank 1 computes them in the other order if `turned`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, turned):
        first, second = (self.b, self.a) if turned and dist.get_rank() else (self.a, self.b)
        return first(torch.tanh(second(x)))


def units_in_opposite_order(name):
    """gloo's messages carry the unit's number, so the ranks wait for each other until the group's time is over."""
    engine = build_engine(name, EitherFirst(), precision="fp32", group=dist.new_group(timeout=timedelta(seconds=2)))
    with raises(RuntimeError, f"gathering {'ab'[1 - dist.get_rank()]}", "every rank must run the same units"):
        engine(torch.randn(4, 8), turned=True)


def chunks_in_opposite_order(name):
    """The same for chunks, whose messages carry their numbers."""
    engine = build_engine(name, EitherFirst(), precision="fp32", chunk_mb=chunk_bytes(8 * 8 + 8, 4) / 2**20,
                          group=dist.new_group(timeout=timedelta(seconds=2)))
    number = 1 - dist.get_rank()
    with raises(RuntimeError, f"gathering chunk {number} ({'ab'[number]}.weight", "every rank must read the same parameters"):
        engine(torch.randn(4, 8), turned=True)


@pytest.mark.parametrize("name", ["gemini", *in_sweep(["gemini_static", "gemini_offload"], lambda name: True)])
def test_case_10_chunks_in_different_order_end_in_an_error(pool, name):
    pool.run(2, chunks_in_opposite_order, name)


@pytest.mark.parametrize("name", ["fsdp", pytest.param("fsdp_offload", marks=pytest.mark.sweep)])
def test_case_10_units_in_different_order_end_in_an_error(pool, name):
    pool.run(2, units_in_opposite_order, name)


# ---- 5. clipping and overflow ----------------------------------------------------------------------------------------------


class ThreeAndFour(nn.Module):
    """These are its gradients."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self):
        return 3 * self.a.sum() + 4 * self.b.sum()


def clip_numbers(name):
    """Cases 27 and 25: gradients 3 and 4, max_norm 1: norm 5, clipped to 0.6 and 0.8, seen in exp_avg = 0.1 g."""
    for scale in (1.0, 1024.0):
        engine = build_engine(name, ThreeAndFour(), precision="fp16", initial_scale=scale, max_norm=1.0)
        engine.backward(engine())
        engine.step()
        assert engine.grad_norm == 5.0 and not engine.skipped
        state = engine.optimizer.state_dict().get("state")  # on rank 0
        assert not state or abs(state["a"]["exp_avg"] - 0.06) < 1e-7 and abs(state["b"]["exp_avg"] - 0.08) < 1e-7, state


@fewer_engines
def test_cases_25_and_27_clip_by_the_global_norm(pool, name):
    pool.run(2, clip_numbers, name)


def scale_changes_nothing(name):
    """Scales 1 and 1024 are powers of two: with clipping active, parameters are bitwise equal. In
    float64, which autocast leaves alone: fp16 itself loses small gradients at scale 1."""
    def run(scale):
        engine = build_engine(name, build("plain"), precision="fp16", initial_scale=scale, max_norm=0.1)
        for step in range(5):
            batch, loss_fn = global_batch("plain", 4, step + 10 * dist.get_rank())
            engine.forward_backward(batch, 2, loss_fn)
            engine.step()
            assert engine.grad_norm > 0.1
        return weights_of(engine)
    assert all(torch.equal(p, q) for p, q in zip(run(1.0), run(1024.0), strict=True))


@fewer_engines
def test_case_25_scale_changes_no_bit(pool, name):
    pool.run(2, scale_changes_nothing, name)


def overflow_on_one_rank(name, precision):
    """Case 23: an inf in a gradient of rank 1 only."""
    engine = build_engine(name, build("plain", dtype=torch.float32), precision=precision, lr=0.1, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    batch, loss_fn = global_batch("plain", 4, dist.get_rank(), torch.float32)

    def state():
        moments = [t for f in engine.fragments for t in (f.exp_avg, f.exp_avg_sq)]
        return weights_of(engine) + [t.clone() for t in (*moments, engine.optimizer.steps)]

    for step in range(4):
        before, scale = state(), engine.scale
        bad = step in (0, 2)
        factor = float("inf") if bad and dist.get_rank() == 1 else 1.0
        loss = engine.forward_backward(batch, loss_fn=lambda out, b, factor=factor: cross_entropy(out, b) * factor)
        assert bad or loss.isfinite()
        engine.step()
        schedule.step()
        assert engine.skipped == bad and engine.skipped_steps == 1 + step // 2
        assert engine.scale == scale * (0.5 if bad and precision == "fp16" else 1)
        unchanged = [torch.equal(p, q) for p, q in zip(before, state(), strict=True)]
        assert all(unchanged) if bad else not any(unchanged)
        assert_same_on_all_ranks([*weights_of(engine), engine.optimizer.steps])
        assert schedule.last_epoch == step + 1  # a schedule counts calls, skipped or not


@pytest.mark.parametrize("name, precision", in_sweep(
    itertools.product(ENGINES, ["fp16", "bf16", "fp32"]), lambda name, precision: name not in FEWER and precision != "fp16"))
def test_case_23_overflow_on_one_rank_skips_everywhere(pool, name, precision):
    pool.run(2, overflow_on_one_rank, name, precision)


def stuck(name):
    engine = build_engine(name, build("plain", dtype=torch.float32), precision="fp16", initial_scale=4.0)
    batch, _ = global_batch("plain", 4, 0, torch.float32)
    for _ in range(39):
        engine.forward_backward(batch, loss_fn=lambda out, b: out.mean() * float("nan"))
        engine.step()
    engine.forward_backward(batch, loss_fn=lambda out, b: out.mean() * float("nan"))
    with raises(RuntimeError, "40 steps in a row", "loss scale 1 ", "floor 1"):
        engine.step()


@fewer_engines
def test_case_26_endless_overflow_ends_in_an_error(pool, name):
    pool.run(2, stuck, name)


# ---- 6. awkward models and wrong use ---------------------------------------------------------------------------------------


def reentrant(name):
    """Case 14: under reentrant checkpointing the gradient of a weight used twice arrives twice, first in part. It is right if
    its bucket had not been sent, refused by name if it had."""
    model = build("reentrant")
    batch, loss_fn = global_batch("plain", 4, dist.get_rank())
    batch = (batch[0].requires_grad_(), batch[1])
    one_bucket = build_engine(name, model, precision="fp32", bucket_mb=1.0, first_bucket_mb=1.0)
    one_bucket.backward(loss_fn(one_bucket(batch[0]), batch))
    plain = build("checkpoint")
    for r in range(dist.get_world_size()):
        batch_of_r, _ = global_batch("plain", 4, r)
        (loss_fn(plain(batch_of_r[0]), batch_of_r) / dist.get_world_size()).backward()
    for n, p in plain.named_parameters():
        close(one_bucket.full_grad(n), p.grad)
    many = build_engine(name, build("reentrant"), precision="fp32", bucket_mb=1e-6, first_bucket_mb=1e-6)
    with raises(RuntimeError, "block.", "use_reentrant=False"):
        many.backward(loss_fn(many(batch[0]), batch))


def test_case_14_reentrant_checkpointing_is_right_or_refused(pool):
    pool.run(2, reentrant, "ddp")


def tied_and_saved(name):
    """Case 15: one update, counted once in the norm, both names in the state dict, loadable by the plain model."""
    for kind in ("gpt2", "bert-mlm"):
        model = build(kind)
        engine = build_engine(name, model, precision="fp32", lr=0.1)
        batch, loss_fn = global_batch(kind, 4, dist.get_rank())
        engine.forward_backward(batch, loss_fn=loss_fn)
        engine.step()
        tied = [("transformer.wte.weight", "lm_head.weight")] if kind == "gpt2" else [
            ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
            ("cls.predictions.bias", "cls.predictions.decoder.bias")]
        for a, b in tied:
            assert engine.module.get_parameter(a) is engine.module.get_parameter(b)
        saved = engine.state_dict()
        assert (dist.get_rank() == 0) == bool(saved)
        with torch.no_grad():
            logits = engine(**batch[0]).logits
        if saved:
            plain = build(kind, seed=1)
            plain.load_state_dict(saved, strict=True)
            close(plain(**batch[0]).logits, logits)


@fewer_engines
def test_case_15_tied_weights_stay_tied(pool, name):
    pool.run(2, tied_and_saved, name)


def several_dtypes(name):
    """Case 18: fp32, bf16 and float64 parameters in one model and one group, beside torch's AdamW tensor by tensor."""
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear, self.head = nn.LayerNorm(6), nn.Linear(6, 6).bfloat16(), nn.Linear(6, 2).double()
            self.norm.weight.data.fill_(1 + 2**-12)  # bf16 would round this to 1

        def forward(self, x):
            return self.head(self.linear(self.norm(x).bfloat16()).double())

    model, plain = Mixed(), Mixed()
    plain.load_state_dict(model.state_dict())
    engine = build_engine(name, model, precision="fp32", lr=0.01)
    with whole(engine):
        assert (model.norm.weight == 1 + 2**-12).all()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    x = random(4, 6, seed=2, dtype=torch.float32)
    for _ in range(3):
        engine.backward(engine(x).square().mean())
        plain(x).square().mean().backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        with whole(engine):
            for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert p.dtype == q.dtype
                torch.testing.assert_close(p, q, msg=n)  # torch's defaults for the dtype: both ranks saw the same samples
    assert engine.optimizer.steps.tolist() == [3.0] * 6


@fewer_engines
def test_case_18_several_dtypes(pool, name):
    pool.run(2, several_dtypes, name)


def batch_norm_policy(name, precision):
    """Cases 31 and 33: running statistics averaged; integer counters untouched; the same evaluation on every rank."""
    model = build("batchnorm", seed=dist.get_rank(), dtype=torch.float32)  # case 79: other seeds, the same start
    engine = build_engine(name, model, precision=precision)
    assert_same_on_all_ranks([*weights_of(engine), *model.buffers()])
    for step in range(3):
        batch, loss_fn = global_batch("batchnorm", 4, step + 10 * dist.get_rank(), torch.float32)
        engine.forward_backward(batch, loss_fn=loss_fn)
        engine.step()
    norm = model.net[1]
    assert norm.num_batches_tracked.dtype == torch.int64 and norm.num_batches_tracked == 3
    assert norm.running_mean.dtype == norm.running_var.dtype == torch.float32
    fixed, _ = global_batch("batchnorm", 4, 99, torch.float32)
    with torch.no_grad():
        assert_same_on_all_ranks([engine.eval()(fixed[0]), norm.running_mean, norm.running_var])


@fewer_engines
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_cases_31_33_79_batch_norm(pool, name, precision):
    pool.run(2, batch_norm_policy, name, precision)


def same_as_construction(name):
    """Cases 79 and 33: seeds differ per rank; parameters, buffers and non-persistent buffers are rank 0's after wrapping."""
    model = build("bert", seed=dist.get_rank())
    position_ids = model.bert.embeddings.position_ids
    engine = build_engine(name, model, precision="fp32")
    weights = weights_of(engine)
    assert_same_on_all_ranks([*weights, *model.buffers()])
    assert torch.equal(engine.module.bert.embeddings.position_ids, position_ids)
    if dist.get_rank() == 0:
        reference = build("bert", seed=0)
        assert all(torch.equal(p, q) for p, q in zip(weights, reference.parameters(), strict=True))


@fewer_engines
def test_case_79_seeds(pool, name):
    pool.run(2, same_as_construction, name)


def groups_and_strays(name):
    """Parameters in no group, empty groups, tensors of another model; groups are the user's, in the user's order."""
    model = build("plain")
    head = model.layers[5]
    groups = [dict(params=[]), dict(params=[head.bias], lr=0.5), dict(params=[head.weight])]
    engine = build_engine(name, model, groups, precision="fp32", lr=0.1)
    assert [g["params"] for g in engine.optimizer.param_groups] == [[], [head.bias], [head.weight]]
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    before = weights_of(engine)
    batch, loss_fn = global_batch("plain", 4, dist.get_rank())
    engine.forward_backward(batch, loss_fn=loss_fn)
    with raises(ValueError, "layers.0.weight", "not a trained parameter"):
        engine.full_grad("layers.0.weight")
    engine.step()
    moved = {n for (n, _), p, q in zip(model.named_parameters(), weights_of(engine), before, strict=True) if not torch.equal(p, q)}
    assert moved == {"layers.5.weight", "layers.5.bias"}
    with raises(ValueError, "not the model's", "(3, 2)"):
        build_engine(name, build("plain"), [nn.Parameter(torch.zeros(3, 2))], precision="fp32")


@fewer_engines
def test_cases_19_20_groups(pool, name):
    pool.run(2, groups_and_strays, name)


def wrong_use(name):
    rank = dist.get_rank()
    batch, loss_fn = global_batch("plain", 4, 0)
    engine = build_engine(name, build("plain"), precision="fp32")
    with raises(RuntimeError, "engine.backward(loss)"):
        loss_fn(engine(batch[0]), batch).backward()
    with raises(ValueError, "scalar", "(4, 3)"):
        engine.backward(engine(batch[0]))
    with raises(ValueError, "loss_fn"):
        engine.forward_backward(batch)
    with raises(ValueError, "micro_batches", "0"):
        engine.forward_backward(batch, 0, loss_fn)
    with raises(ValueError, "agree in dim 0", "[3, 4]"):
        engine.forward_backward((batch[0], batch[1][:3]), 1, loss_fn)
    with raises(ValueError, "precision", "fp8"):
        build_engine(name, build("plain"), precision="fp8")
    with raises(RuntimeError, "fixed"):
        engine.optimizer.add_param_group(dict(params=[]))
    if name == "ddp":
        with raises(ValueError, "compression", "fp7"):
            build_engine(name, build("plain"), compression="fp7")
    if name.startswith("zero"):
        with raises(ValueError, "stage", "3"):
            build_engine(name, build("plain"), stage=3)
    if name == "ddp" or name.startswith("zero"):  # what they capture: test_gpu.py
        with raises(ValueError, "capture", "offload" if "offload" in name else "needs a GPU, the model is on cpu"):
            engine.capture(batch, 2, loss_fn)
    else:
        with raises(NotImplementedError, "CUDA graph" if name.startswith("gemini") else "not in"):
            engine.capture(batch)
    model = build("plain")
    model.layers[0].weight.requires_grad_(False)
    frozen = build_engine(name, model, precision="fp32")
    model.layers[0].weight.requires_grad_(True)
    with raises(RuntimeError, "layers.0.weight", "frozen"):
        frozen.forward_backward(batch, 1, loss_fn)
    model = nn.Embedding(5, 3, sparse=True)
    with raises(RuntimeError, "sparse", "weight"):
        e = build_engine(name, model, precision="fp32")
        e.backward(e(torch.tensor([1])).sum())
    with raises(ValueError, "different models"):
        build_engine(name, nn.Linear(3, 3 + rank), precision="fp32")
    moved = build_engine(name, build("plain"), precision="fp32")
    with raises(RuntimeError, "layers.0.weight", {"fsdp": "sharded", "gemini": "not here"}.get(ENGINES[name][0], "moved")):
        moved.module.float()
        moved.forward_backward((batch[0].float(), batch[1]), 1, loss_fn)


def taken_over(name):
    """What must not silently go wrong: a second engine for a model, errors that are caught, half losses, odd batches."""
    batch, loss_fn = global_batch("plain", 4, dist.get_rank())
    model = build("plain")
    for _ in range(2):  # the second engine takes the model over; the first one's hooks would refuse its backward
        engine = build_engine(name, model, precision="fp32")
        engine.forward_backward(batch, loss_fn=loss_fn)
        expected = engine.full_grad("layers.0.weight")
    engine.zero_grad()

    def again():
        engine.forward_backward(batch, loss_fn=loss_fn)
        assert torch.equal(engine.full_grad("layers.0.weight"), expected)
        engine.zero_grad()

    # an exception in the second micro-batch's forward, caught: the first one's gradient must not stay
    calls = []
    with raises(ZeroDivisionError, "division"):
        engine.forward_backward(batch, 2, lambda out, b: 1 // 0 if calls else (calls.append(0), cross_entropy(out, b))[1])
    again()
    with raises(RuntimeError, "engine.backward(loss)"):
        loss_fn(engine(batch[0]), batch).backward()
    again()
    engine.forward_backward(batch, loss_fn=loss_fn)
    model.zero_grad()
    if not name.startswith(("zero2", "fsdp", "gemini")):  # where there is no .grad between backward and step, that removes nothing
        with raises(RuntimeError, ".grad was replaced or removed"):
            engine.step()
    engine.zero_grad()
    again()
    # a loss of shape (1,), a named tuple, scalars beside tensors
    named = collections.namedtuple("Batch", "x y note")(*batch, 3)
    loss = engine.forward_backward(named, 2, lambda out, b: cross_entropy(out, (b.x, b.y)).reshape(1))
    assert loss.shape == ()
    torch.testing.assert_close(engine.full_grad("layers.0.weight"), expected)
    engine.zero_grad()
    with raises(ValueError, "agree in dim 0", "str"):
        engine.forward_backward("no tensor", loss_fn=loss_fn)
    with raises(ValueError, "cannot cut a list of int"):
        engine.forward_backward((batch[0], [0, 1, 2, 0]), 2, loss_fn)
    # half-precision losses: 65536 is past fp16's end
    half = build_engine(name, build("plain", dtype=torch.float32), precision="fp16")
    x = batch[0].float()
    half.backward(half(x).mean())
    assert half(x).dtype == torch.float16
    half.step()
    assert not half.skipped
    # settings and memory layouts that differ between ranks
    layout = torch.channels_last if dist.get_rank() else torch.contiguous_format
    if name == "ddp":  # the others make parameters contiguous
        with raises(ValueError, "strides"):
            build_engine(name, nn.Conv2d(2, 2, 3).to(memory_format=layout), precision="fp32")
    with raises(ValueError, "settings"):
        build_engine(name, build("plain"), precision="fp32", max_norm=float(dist.get_rank()))


@fewer_engines
def test_nothing_goes_wrong_silently(pool, name):
    pool.run(2, taken_over, name)


def test_tokens_are_counted_by_the_model_class():
    """Causal: the first label of each row has nothing to predict it. Also through torch.compile's wrapper."""
    from ddp import default_weight
    labels = torch.tensor([[1, 2, -100, 3], [-100, -100, 4, 5]])
    causal, masked = build("gpt2"), build("bert-mlm")
    assert default_weight(causal, dict(labels=labels)) == 4 and default_weight(masked, dict(labels=labels)) == 5
    assert default_weight(torch.compile(causal), dict(labels=labels)) == 4
    assert default_weight(causal, dict(labels=labels), loss_fn=len) == 2  # the loss is the caller's: samples
    assert default_weight(causal, dict(labels=labels.float())) == 2 and default_weight(causal, (labels,)) == 2


@fewer_engines
def test_wrong_use_is_refused_by_name(pool, name):
    pool.run(2, wrong_use, name)


def state_dicts(name):
    """Case 44: what rank 0 loads, every rank has; what does not fit changes nothing anywhere and names the names."""
    engine = build_engine(name, build("plain"), precision="fp32", lr=0.1)
    batch, loss_fn = global_batch("plain", 4, dist.get_rank())
    other = build("plain", seed=5).state_dict()
    before = weights_of(engine)
    for bad, word in (({k: v for k, v in other.items() if k != "layers.0.bias"}, "layers.0.bias"),
                      ({**other, "more": torch.zeros(1)}, "more"),
                      ({**other, "layers.5.bias": torch.zeros(2)}, "layers.5.bias (2,) instead of (3,)")):
        with raises(ValueError, word):
            engine.load_state_dict(bad if dist.get_rank() == 0 else {})
        assert all(torch.equal(p, q) for p, q in zip(weights_of(engine), before, strict=True))
    engine.load_state_dict(other if dist.get_rank() == 0 else {})
    with whole(engine) as model:
        assert all(torch.equal(p, other[n]) for n, p in model.named_parameters())
    reference = Reference(build("plain", seed=5), None, 0.0, lr=0.1, weight_decay=0.0)
    engine.forward_backward(batch, loss_fn=loss_fn)  # and it trains on from there
    batches = [global_batch("plain", 4, r)[0] for r in range(dist.get_world_size())]
    reference.backward(None, loss_fn, [[b] for b in batches])
    reference.step()
    engine.step()
    for p, q in zip(weights_of(engine), reference.model.parameters(), strict=True):
        close(p, q, 1e-7)


@fewer_engines
def test_case_44_state_dict(pool, name):
    pool.run(2, state_dicts, name)


class Buffers(nn.Module):
    """Buffers of dtypes that gloo does not know, and a module with running statistics that has children."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
        self.register_buffer("short", torch.full((3,), 1 + dist.get_rank(), dtype=torch.int16))
        self.register_buffer("flags", torch.tensor([dist.get_rank() == 0, True]))
        self.running = nn.Module()
        self.running.register_buffer("running_scale", torch.ones(3))
        self.running.child = nn.Linear(3, 3)
        self.running.forward = lambda x: self.running.child(x) * self.running.running_scale

    def forward(self, x):
        return self.running(self.layers(x))


def several_engines(name):
    """A second engine on the same model: refused, it leaves the first alone; built, it goes on from masters as they are, and the
    first one says so. Engines that nobody holds are freed."""
    batch, loss_fn = global_batch("plain", 4, dist.get_rank(), torch.float32)

    def step(engine):
        before = weights_of(engine)
        engine.forward_backward(batch, loss_fn=loss_fn)
        engine.step()
        assert not engine.skipped and not any(torch.equal(p, q) for p, q in zip(before, weights_of(engine), strict=True))

    for precision in ("fp32", "bf16"):
        model = build("plain", dtype=torch.float32)
        first = build_engine(name, model, precision=precision, lr=0.1)
        step(first)
        with raises(ValueError, "not the model's"):
            build_engine(name, model, [nn.Parameter(torch.zeros(2))], precision=precision)
        with raises(ValueError, "settings"):
            build_engine(name, model, precision=precision, max_norm=1.0 + dist.get_rank())
        step(first)
        expected = first.state_dict()
        second = build_engine(name, model, precision=precision, lr=0.1)
        found = second.state_dict()
        assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in expected.items())
        with raises(RuntimeError, "another engine has taken this model over"):
            first.forward_backward(batch, loss_fn=loss_fn)
        second.zero_grad()
        step(second)
        engine, held = weakref.ref(second), weakref.ref(model)
        del first, second, model
        gc.collect()
        assert engine() is None and held() is None
    model = Buffers()
    engine = build_engine(name, model, precision="bf16", lr=0.1)
    assert model.short.tolist() == [1, 1, 1] and model.flags.tolist() == [True, True]
    step(engine)
    assert model.running.child.weight.dtype == torch.float32
    model.layers[1].__class__ = type("WithState", (nn.Tanh,), dict(get_extra_state=lambda self: {"more": 1}))
    with whole(engine):
        state_dict = model.state_dict()
    for refused in (lambda: engine.save(tempfile.gettempdir() + "/never"), lambda: engine.load_state_dict(state_dict)):
        with raises(ValueError, "extra state", "layers.1._extra_state"):
            refused()


@fewer_engines
def test_several_engines_and_odd_buffers(pool, name):
    pool.run(2, several_engines, name)


# ---- 8. half precision -----------------------------------------------------------------------------------------------------


def half_oracle(name, precision, max_norm):
    """One rank beside plain torch, bit for bit over 10 steps. ddp's half precision is autocast over fp32 weights; elsewhere the
    model itself is in half precision, fp32 masters are updated and copied back."""
    dtype = dict(bf16=torch.bfloat16, fp16=torch.float16)[precision]
    model, masters, plain = (build("bert", dtype=torch.float32) for _ in range(3))
    if name == "ddp":
        plain = masters
    else:
        plain.to(dtype)
    engine = build_engine(name, model, two_groups(model), precision=precision, max_norm=max_norm, lr=0.01, initial_scale=2.0**14)
    optimizer = torch.optim.AdamW(two_groups(masters), lr=0.01, fused=True)
    scale = 2.0**14 if precision == "fp16" else 1.0
    for step in range(10):
        batch, _ = global_batch("bert", 6, step)
        with torch.autocast("cpu", dtype, enabled=name == "ddp"):
            loss = plain(**batch).loss.float()
        (loss * scale).backward()
        grads = [p.grad.float() for p in plain.parameters()]
        norm = torch.stack(torch._foreach_norm(grads)).double().square().sum().sqrt() / scale
        clip = min(1.0, max_norm / (norm.item() + 1e-6)) if max_norm else 1.0
        if clip / scale != 1.0:
            torch._foreach_mul_(grads, clip / scale)
        for p, grad in zip(masters.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step()
        plain.zero_grad()
        with torch.no_grad():
            for p, q in zip(plain.parameters(), masters.parameters(), strict=True):
                p.copy_(q)
        assert torch.equal(engine.forward_backward(batch), loss.detach())
        engine.step()
        close(engine.grad_norm, norm, 1e-14)  # squares summed in float64, in another order
        assert not max_norm or step or norm > max_norm
        with whole(engine):
            for (_, p), q in zip(engine.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(p, q)
        for f in engine.fragments:
            assert torch.equal(f.master.view(-1), masters.get_parameter(f.name).detach().view(-1)[f.start : f.end])


@pytest.mark.parametrize("name, precision, max_norm", in_sweep(
    itertools.product(ENGINES, ["bf16", "fp16"], [0.0, 0.1]),
    lambda name, precision, max_norm: name not in FEWER and (precision, max_norm) != ("bf16", 0.1)))
def test_half_precision_equals_plain_torch_bit_for_bit(pool, name, precision, max_norm):
    pool.run(1, half_oracle, name, precision, max_norm)


def half_gradients(name, precision):
    """Each gradient of N ranks in half precision beside one process in fp32: relative error below 2^-6, or below 1.25 times
    that of one process in the same half precision, where a gradient that nearly cancels (a query's) loses more already."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = dict(bf16=torch.bfloat16, fp16=torch.float16)[precision]
    model, plain, half = (build("bert", dtype=torch.float32) for _ in range(3))
    engine = build_engine(name, model, precision=precision, initial_scale=2.0**12)
    batch, _ = global_batch("bert", 4 * ranks, 0)
    plain(**batch).loss.backward()
    if name != "ddp":
        half.to(dtype)
    with torch.autocast(batch["labels"].device.type, dtype, enabled=name == "ddp"):
        loss = half(**batch).loss.float()
    (loss * 2.0**12).backward()
    engine.forward_backward(rows(batch, 4 * rank, 4 * rank + 4), 2)
    for (n, p), q in zip(plain.named_parameters(), half.parameters(), strict=True):
        if "key.bias" in n:  # softmax does not see it: the true gradient is 0
            continue
        true = p.grad.cpu()
        error = (engine.full_grad(n) - true).norm() / true.norm()
        bound = 1.25 * (q.grad.cpu().float() / 2.0**12 - true).norm() / true.norm()
        assert error < max(2**-6, bound), (n, error, bound)


@fewer_engines
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_gradients(pool, name, precision):
    pool.run(2, half_gradients, name, precision)
