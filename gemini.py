"""Gemini: ZeRO-3 in chunks of one size, which move between GPU and host memory as the GPU has room.

Parameters of a model differ in size; memory is easiest to manage in pieces that do not. So parameters lie one after the other in
chunks, and a chunk is what is gathered, released, summed and moved. Every rank keeps 1/N of each chunk. The first step
writes down which chunks are read when, and how much memory everything else takes at each moment; from then on the future is
known: what to keep, what to give up, what to fetch ahead.

    chunk 0                              chunk 1                             chunk 2
    | embeddings            |weight 1|.. | bias 1 |weight 2| bias 2|weight 3 | ...          |............|   .. empty
    |   rank 0   |   rank 1   |  ...

                      rank 0      rank 1      bytes per rank; Ψ parameters, N ranks, half precision
    master, m, v      [ A |   ]   [   | B ]   12Ψ/N    fp32, per chunk on the GPU or in host memory
    copy of weights   [ A |   ]   [   | B ]   2Ψ/N     for chunks whose optimizer is in host memory: the source of gathers
    gradients         [ A |   ]   [   | B ]   2Ψ/N     where the optimizer is: on the GPU from sum to step, in host memory always;
                                                       where micro-batches add up 4Ψ/N, in host memory 6Ψ/N
    gathered chunks   [ A | B ]   [ A | B ]            as many as there is room for; at least those that an operator and the
                                                       backward at hand read, and one whose gradients are on their way
                                                       (gloo: and (N-1)/N of one in host memory, for what is received)
    GPT-2 XL (Ψ = 1.56e9), N = 1: 25 GB in all, wherever they are. In bf16 with 8 x 512 tokens everything else takes up to 18.8 GiB
    of the GPU; README has what steps take under five budgets.

    A parameter, and with it its place in a chunk, goes round like this:

         +------- released: its chunk will be read last of all -------+---------------------------+
         v                                                            |                           |
        FREE --gather--> HOLD --operator--> COMPUTE --operator is through--> HOLD_AFTER_FWD --backward--> COMPUTE
         ^                                                                                                  |
         |                                                                             its gradient takes its place
         |                                                                                                  v
         +--- reduce-scatter, memory free <--- READY_FOR_REDUCE <--all of the chunk have come--- HOLD_AFTER_BWD

    1. forward        before an operator reads a parameter: make room, gather its chunk, start the gather of what comes next.
    2. backward       autograd reaches an operator's output: the same. A gradient is copied to where its weights were. When no
                      operator is left that reads a chunk, it is reduce-scattered, and its memory is free.
    3. step           squares of the own gradients, summed over ranks: norm, overflow, clip. Adam: one kernel updates all chunks on
                      the GPU and, over the bus, about half of those in host memory (gpu_adam_frac), while the CPU updates the
                      others, chunk by chunk; then the first gather of the next forward starts.
    4. once           after the first step: where the budget allows, optimizers move to the GPU.

    placement="auto": `device_budget` bytes (by default what is free on the GPU) hold the optimizers of as many chunks as leave
    room for the tightest moment, and, at each moment, the chunks that will be read soonest: when room is needed, the chunk
    whose next use is furthest away goes (Belady, 1966: of chunks of one size no other choice gathers less).
    placement="static": three fractions of the chunks: shard_param_frac are released after use, the others stay from first use to
    gradient; offload_optim_frac have their optimizer in host memory, offload_param_frac also what gathers begin with.
    offload=True: all three are 1.

    Bytes sent per rank and step: (N-1)/N * 2Ψ for each time that all chunks are gathered (once if everything fits, more often the
    less does; `engine.plan` knows) and for the reduce-scatter. Over the bus: 2Ψ/N up for each gather of chunks in host memory,
    2Ψ/N down for their gradients, and 14 bytes up and down for each element whose Adam the GPU does there.

An operator is any torch function that is given a parameter (class Chunked), in whichever module, or a tensor that shares its
memory, like weight.t(). So a tied weight, a module used twice or a penalty on the weights are nothing special. Between steps
weights are read, or set, inside `with engine.gathered(): ...`; set in place elsewhere they raise.

What autograd has saved points at the chunk's storage, which is filled again before backward reads it. Why a hook on an operator's
output is enough for that: of the nodes that are ready autograd runs the one that forward made last, so when a gradient reaches the
output, all that forward computed later is done.

A pass lasts from a forward to the backward after which no graph is left, and is planned moment by moment like the first one: two
forwards with one backward, or derivatives inside, are a pass like any other. One that goes another way than the first goes on
without a plan, releasing whatever is not at hand.

Modules with running statistics (BatchNorm) keep fp32 parameters and buffers, in chunks of their own, and inputs and outputs are
cast around them. Other floating buffers are cast with the parameters if they are in the state dict; what is not stays as it is.
A model on the CPU is taken chunk by chunk: Gemini(model, device="cuda") never has it whole on the GPU.

The budget is kept as long as batches need no more memory than the first, so begin with the longest; that first pass resets torch's
record of the most memory. Host memory that was pinned once stays with the engine. All ranks read the same
parameters in the same order; under NCCL `step` compares, skips the step where they differ, and the next one raises. A rank that
has no samples for a micro-batch makes the gathers and sums of the plan, so in its first step it must have some. Reentrant
checkpointing is right but sends some chunks twice in the first step, and keeps fp32 gradients from then on. With auto placement
frozen chunks stay in host memory, and go up in each pass. Left out: sparse
gradients, complex parameters, models spread over several devices, torch.compile and TorchScript (they read weights without
asking), capture (a CUDA graph cannot follow chunks that move).

Gemini: arXiv:2108.05818 (PatrickStar, chunks and tracing, §5 to §7); ZeRO, arXiv:1910.02054 (§5.3); ZeRO-Offload, arXiv:2101.06840;
Belady, A study of replacement algorithms for a virtual-storage computer, 1966.

    engine = Gemini(model, lr=1e-4, weight_decay=0.01, precision="bf16", device_budget=16 * 2**30)
    for batch in loader:                                    # this rank's share of the global batch
        loss = engine.forward_backward(batch, micro_batches=4)
        engine.step()

`python gemini.py` trains a small transformer on two CPU ranks under several budgets, puts the formulas above beside what it
measures, the weights beside those of one process, and shows the second step's comings and goings.
"""
import bisect
import contextlib
import copy
import ctypes
import dataclasses
import enum
import fcntl
import functools
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import socket
import struct
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGN = 8  # elements: parameters and slices start on 16 bytes in half precision, so 16-byte accesses fit
ENGINES = weakref.WeakKeyDictionary()  # model -> a weak reference to its engine's `_let_go`, which the next engine calls
HALF = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SEARCH_MB = 16, 64  # chunk sizes that the search tries, MiB; smaller for models of less than eight of the smallest
NEVER = 2**62  # a moment that does not come


class State(enum.Enum):
    """Of one parameter; the docstring draws how they follow each other, `Gemini.state` says which it is."""

    FREE = "its chunk is not gathered"
    HOLD = "gathered, not read yet in this pass"
    COMPUTE = "an operator, or the backward of one, is reading it"
    HOLD_AFTER_FWD = "read in forward, and again in backward"
    HOLD_AFTER_BWD = "its gradient stands in its place, others of the chunk are still to come"
    READY_FOR_REDUCE = "so do those of the whole chunk"


@dataclasses.dataclass(eq=False)
class Chunk:
    """Parameters of one dtype, all trained or all frozen, one after the other in memory. Full tensors are (N*S,), slices (S,);
    rank r's is [r*S, (r+1)*S). `views[i]`: parameter i's place in `full`, which is its .data."""

    number: int
    full: Tensor  # weights, from gather to release; then gradients, until they are summed; else its storage is empty
    room_bytes: int  # of that storage, the same for all chunks of a dtype but those of a single large parameter
    views: dict[int, Tensor]
    starts: dict[int, int]  # where those begin
    own: slice
    trained: bool
    sharded: bool = True  # static placement: released after use; else it stays from its first use to its gradients
    master: Tensor | None = None  # (S,) in fp32 or what is wider; frozen weights as they are
    store: Tensor | None = None  # (S,) the source of gathers: the master, or its copy in the weights' dtype
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    shard: Tensor | None = None  # (S,) gradient; on the device its storage is empty from step to backward
    shard_kind: tuple | None = None  # its dtype, is it on the device, is it apart from `landing`
    landing: Tensor | None = None  # (S,) optimizer in host memory: where summed gradients land
    on_device: bool = False  # the optimizer's tensors
    store_on_device: bool = False
    address: int = 0  # of `shard`, as Adam knows it
    rows: tuple[int, int] = (0, 0)  # from, to: its fragments in Adam's table
    landed: "Fence | None" = None  # the copy into `landing`
    filled: bool = False  # `shard` (or `landing`) holds a sum of gradients
    adds_up: bool = False  # what has landed is to be added to `shard`, not to replace it
    visited: bool = False  # optimizer in host memory, but updated by the GPU, over the bus
    owned: "list[tuple[Fragment, int]]" = dataclasses.field(default_factory=list)  # the optimizer's part; place in the slice
    where: str = "free"  # -> "gathering" -> "gathered" -> "free", or in backward "gathered" -> "summing" -> "free"
    calls: int = 0  # operators that have read it and that a backward is still to reach
    touched: int = -1  # the moment when, in this backward, an operator read it or a gradient of it came last
    launched: bool = False  # its gradients have been sent in this backward
    arrived: set[int] = dataclasses.field(default_factory=set)  # parameters whose gradient stands in `full`
    sent: set[int] = dataclasses.field(default_factory=set)  # those whose gradient did, when this backward sent them
    gathering: "SliceGather | Fence | None" = None  # the gather in flight
    summing: "SliceSum | None" = None  # the reduce-scatter in flight
    gathers: int = 0  # since construction


@dataclasses.dataclass(eq=False)
class Call:
    """One operator that has read parameters, and whose output leads back to it in backward."""

    indices: list[int]
    chunks: tuple[Chunk, ...]
    version: int  # of the weights
    forward: int  # in which it ran
    expected: bool = True  # a backward is still to reach it


# ---- the rules: which chunk comes, stays and goes, without a tensor --------------------------------------------------------


@dataclasses.dataclass
class Plan:
    """What a pass does, learnt from the first. A moment lasts until an operator reads a chunk that the one before did not."""

    order: list[list[int]] = dataclasses.field(default_factory=list)  # at each moment: the chunks that are read
    busy: list[list[int]] = dataclasses.field(default_factory=list)  # not to be released: read now, or by the backward at hand
    backward: list[bool] = dataclasses.field(default_factory=list)  # is it a moment of backward?
    others: list[int] = dataclasses.field(default_factory=list)  # bytes on the device that are not the engine's
    grads: list[list[int]] = dataclasses.field(default_factory=list)  # [moment, chunk]: its first gradient comes
    sums: list[list[int]] = dataclasses.field(default_factory=list)  # [moment, chunk]: the last that touches it; then it is sent
    back: list[list[int]] = dataclasses.field(default_factory=list)  # [moment, chunk]: weights are read after gradients came
    n_forward: int = 0  # moments of forward
    budget: int = 0
    placed: bool = False  # optimizers are where they will stay
    eager: bool = False  # may what is fetched ahead drive out what is read later?

    @functools.cached_property
    def uses(self) -> dict[int, list[int]]:
        """Chunk -> the moments when it is read."""
        uses: dict[int, list[int]] = {}
        for moment, chunks in enumerate(self.order):
            for chunk in chunks:
                uses.setdefault(chunk, []).append(moment)
        return uses

    @functools.cached_property
    def _happens(self) -> dict[tuple[str, int], list[int]]:
        found: dict[tuple[str, int], list[int]] = {}
        for what in ("grads", "sums", "back"):
            for moment, chunk in getattr(self, what):
                found.setdefault((what, moment), []).append(chunk)
        return found

    def at(self, what: str, moment: int) -> list[int]:
        """The chunks to which this happens at that moment."""
        return self._happens.get((what, moment), [])

    def next_use(self, chunk: int, moment: int) -> int:
        uses = self.uses.get(chunk, [])
        k = bisect.bisect_right(uses, moment)
        return uses[k] if k < len(uses) else NEVER

    def upcoming(self, moment: int, depth: int) -> list[int]:
        """The next chunks that are not read now, `depth` of them."""
        found: list[int] = []
        now = self.order[moment] if moment >= 0 else []
        for k in range(moment + 1, len(self.order)):
            for chunk in self.order[k]:
                if len(found) == depth:
                    return found
                if chunk not in now and chunk not in found:
                    found.append(chunk)
        return found


class Residency:
    """The rules by which chunks come and go, without a tensor. What they decide is carried out by `do`, the engine or a Simulation:
    gather(chunk), release(chunk), finish(chunk), too_small(needed, budget)."""

    def __init__(self, rooms: list[int], do, depth: int, auto: bool, stays: set[int]):
        self.rooms, self.do, self.depth, self.auto, self.stays = rooms, do, depth, auto, stays
        self.fixed = 0  # bytes on the device that no rule moves
        self.shards = [0] * len(rooms)  # bytes on the device of a chunk's summed gradients
        self.forget()

    def forget(self) -> None:
        self.gathered: set[int] = set()  # weights there, or on their way
        self.dirty: set[int] = set()  # those of them that hold gradients
        self.busy: set[int] = set()  # read by the operator at hand, and by that whose backward is at hand
        self.in_flight: list[int] = []  # gradients sent and not received yet: one chunk at most
        self.used = 0  # bytes of all these
        self.filled: set[int] = set()  # summed since the last step

    def copy(self, do) -> "Residency":
        new = Residency(self.rooms, do, self.depth, self.auto, self.stays)
        new.fixed, new.shards = self.fixed, self.shards
        return new

    def bytes(self) -> int:
        return self.fixed + self.used + sum(self.shards[k] for k in self.filled)

    def come_to(self, moment: int, chunks: list[int], plan: Plan | None) -> None:
        """What is read now must be there; what comes next may start on its way. plan: None for a pass that is like no other."""
        soon = plan.upcoming(moment, self.depth) if plan else []
        self.busy = self.busy | set(chunks)
        self.make_room(sum(self.rooms[k] for k in chunks if k not in self.gathered), moment, plan, soon)
        for k in chunks:
            self.gather(k)
        for k in soon:
            if k not in self.gathered and k not in self.in_flight:
                if plan.eager and self.auto:
                    self.make_room_ahead(k, moment, plan)
                if not self.auto or self.fits(self.rooms[k], moment, plan):
                    self.gather(k)

    def fetch_early(self, plan: Plan, updated: float = math.inf) -> None:
        """Between passes: start on their way those that the next pass begins with, none above `updated`, the chunk that Adam has
        come to."""
        for k in plan.upcoming(-1, self.depth):
            if k > updated:
                return
            if k not in self.gathered and (not self.auto or self.fits(self.rooms[k], 0, plan)):
                self.gather(k)

    def fits(self, n_bytes: int, moment: int, plan: Plan) -> bool:
        return self.bytes() + n_bytes + plan.others[moment] <= plan.budget

    def make_room(self, n_bytes: int, moment: int, plan: Plan | None, soon=()) -> None:
        """auto, with a plan: release the chunk that will be read last of all (Belady, 1966) until what is needed fits.
        Static, or without a plan: all but what is read now, is read next, or stays."""
        free_to_go = self.gathered - self.busy - self.dirty
        if not (self.auto and plan):
            if self.auto:
                self.finish()
            for k in sorted(free_to_go - self.stays - set(soon)):
                self.release(k)
            return
        while not self.fits(n_bytes, moment, plan):
            if self.in_flight:
                self.finish()
            elif free_to_go:
                last = max(free_to_go, key=lambda k: (plan.next_use(k, moment), k))
                free_to_go.remove(last)
                self.release(last)
            else:
                self.do.too_small(self.bytes() + n_bytes + plan.others[moment], plan.budget)
                return

    def make_room_ahead(self, chunk: int, moment: int, plan: Plan) -> None:
        """For what is fetched ahead: release what will be read later still. The next moment might have found room without that,
        so it is done only where it costs no more gathers (`eager`)."""
        use = plan.next_use(chunk, moment)
        going = sorted(self.gathered - self.busy - self.dirty, key=lambda k: (plan.next_use(k, moment), k))
        while going and not self.fits(self.rooms[chunk], moment, plan) and plan.next_use(going[-1], moment) > use:
            self.release(going.pop())

    def gather(self, chunk: int) -> None:
        if chunk in self.in_flight:
            self.finish()
        if chunk not in self.gathered:
            self.gathered.add(chunk)
            self.used += self.rooms[chunk]
            self.do.gather(chunk)

    def release(self, chunk: int) -> None:
        self.gathered.remove(chunk)
        self.used -= self.rooms[chunk]
        self.do.release(chunk)

    def take_back(self, chunk: int) -> None:
        """The gradients in a chunk have moved out, since its weights are needed once more."""
        self.dirty.discard(chunk)
        if chunk in self.gathered:
            self.release(chunk)

    def send(self, chunk: int, moment: int, plan: Plan | None) -> None:
        """A chunk's gradients leave. Its memory is theirs until `finish`, before which no other's leave."""
        self.finish()
        if chunk in self.gathered:
            self.dirty.add(chunk)
        room = 0 if chunk in self.gathered else self.rooms[chunk]
        self.make_room(room + (0 if chunk in self.filled else self.shards[chunk]), moment, plan)
        self.used += room
        self.filled.add(chunk)
        self.gathered.discard(chunk)
        self.dirty.discard(chunk)
        self.in_flight.append(chunk)

    def finish(self) -> None:
        for chunk in self.in_flight:
            self.used -= self.rooms[chunk]
            self.do.finish(chunk)
        self.in_flight = []

    def release_all(self) -> None:
        self.busy, self.dirty = set(), set()
        for chunk in sorted(self.gathered):
            self.release(chunk)


class Simulation:
    """Counts what a Residency decides."""

    def __init__(self):
        self.gathers: dict[int, int] = {}
        self.bytes: list[int] = []  # on the device, after each of the calls
        self.summed: dict[int, int] = {}  # chunk -> from which of these on its sum is there

    most = property(lambda self: max(self.bytes), doc="bytes on the device")

    def run(self, home: Residency, plan: Plan) -> None:
        """The same calls, in the same order, as Gemini makes them (`_next_moment`, `_end_backward`, `_step`)."""
        for moment, chunks in enumerate(plan.order):
            for chunk in plan.at("back", moment):
                home.take_back(chunk)
            home.busy = {*plan.busy[moment]} - {*chunks} if home.auto else {*plan.busy[moment]}
            for chunk in plan.at("sums", moment - 1):
                self.send(home, chunk, moment - 1, plan)
            home.busy = {*plan.busy[moment]}
            home.come_to(moment, chunks, plan)
            home.dirty.update(k for k in plan.at("grads", moment) if k in home.gathered)
            self.bytes.append(home.bytes() + plan.others[moment])
        home.busy = set()
        for chunk in plan.at("sums", len(plan.order) - 1):
            self.send(home, chunk, len(plan.order) - 1, plan)
        home.finish()
        home.release_all()
        home.filled = set()
        home.fetch_early(plan)

    def send(self, home: Residency, chunk: int, moment: int, plan: Plan) -> None:
        home.send(chunk, moment, plan)
        self.summed.setdefault(chunk, len(self.bytes))
        self.bytes.append(home.bytes() + plan.others[moment])

    def gather(self, chunk: int) -> None:
        self.gathers[chunk] = self.gathers.get(chunk, 0) + 1

    def release(self, chunk: int) -> None:
        pass

    def finish(self, chunk: int) -> None:
        pass

    def too_small(self, needed: int, budget: int) -> None:
        self.bytes.append(needed)


# ---- the engine, which carries them out --------------------------------------------------------------------------------------


class Gemini:
    """Training of `model` with Adam in chunks; see the file's docstring for the idea and the list of steps.

    params: None for all parameters, or param groups as any torch optimizer takes them. A parameter that is in no group is
    not trained. precision: "fp32" leaves the model as it is; "bf16" and "fp16" compute in that and keep fp32 masters, fp16 with
    a dynamic loss scale. max_norm: clip to this global L2 norm, 0 for off.
    placement: "auto" with device_budget bytes for everything on the device, or "static" with shard_param_frac (default 1),
    offload_param_frac (0) and offload_optim_frac (0) of the chunks; offload: static, all in host memory. gpu_adam_frac: of the
    optimizers in host memory, the part that the GPU updates over the bus while the CPU updates the others. chunk_mb: size of
    a chunk of weights in MiB; None searches for the size that wastes least. prefetch: how many chunks are fetched ahead. device:
    where to train a model that is still on the CPU. initial_scale, growth_interval, min_scale, max_scale: of fp16's loss scale, see
    LossScale. group: the process group to shard over, None for all ranks (or a single process without any group).
    Parameters and buffers are broadcast from the group's first rank, so models may be built with different seeds. An engine
    built on the model of another Gemini takes it over, with its masters.
    Raises ValueError where ranks bring different models, parameters live on several devices, or an argument is wrong;
    RuntimeError after the first forward and backward where device_budget is too small, with the bytes that are needed.
    """

    def __init__(self, model: nn.Module, params=None, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                 adamw=True, precision="bf16", max_norm=0.0, initial_scale=2.0**16, growth_interval=2000, min_scale=1.0,
                 max_scale=2.0**24, placement="auto", device_budget=None, shard_param_frac=None, offload_param_frac=None,
                 offload_optim_frac=None, offload=False, gpu_adam_frac=0.55, chunk_mb=None, prefetch=1, device=None, group=None):
        if precision not in HALF:
            raise ValueError(f"precision must be one of {', '.join(HALF)}, got {precision!r}")
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, got {growth_interval}")
        if placement not in ("auto", "static"):
            raise ValueError(f"placement must be auto or static, got {placement!r}")
        fractions = {"shard_param_frac": shard_param_frac, "offload_param_frac": offload_param_frac,
                     "offload_optim_frac": offload_optim_frac}
        given = [name for name, value in fractions.items() if value is not None]
        if given and (placement == "auto" or offload):
            raise ValueError(f"{given[0]} is for placement='static'" + ", without offload, which means 1 for all" * offload)
        if offload:  # everything that can be is in host memory
            placement, fractions = "static", dict.fromkeys(fractions, 1.0)
        shard_param_frac, offload_param_frac, offload_optim_frac = (
            default if value is None else value for default, value in zip((1.0, 0.0, 0.0), fractions.values()))
        for name, value in (*fractions.items(), ("gpu_adam_frac", gpu_adam_frac)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {value}")
        if offload_param_frac > offload_optim_frac:
            raise ValueError(f"offload_param_frac {offload_param_frac} is more than offload_optim_frac {offload_optim_frac}: where "
                             "the optimizer is on the device, the weights are there already")
        if placement == "static" and device_budget is not None:
            raise ValueError("device_budget is for placement='auto'; static placement has three fractions")
        if device_budget is not None and not 0 < device_budget < NEVER:
            raise ValueError(f"device_budget must be a positive number of bytes, got {device_budget}")
        if chunk_mb is not None and not 0 < chunk_mb < 2**20:
            raise ValueError(f"chunk_mb must be a positive number of MiB, got {chunk_mb}")
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch must be a number of chunks, 0 or more, got {prefetch!r}")
        if odd := [n or "the model" for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)
                   or hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None]:
            raise ValueError(f"compiled modules read weights without asking and are not supported: {', '.join(odd[:5])}")
        devices = {t.device for t in (*model.parameters(), *model.buffers())}
        if len(devices) != 1 or torch.device("meta") in devices:
            raise ValueError(f"the model must live on one device, found {sorted(map(str, devices)) or 'no parameters'}")
        self._model, self.device, self.group = model, torch.device(device or devices.pop()), group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        backends = dist.get_backend(group) if self.world_size > 1 else ""
        self.by_hand = self.world_size > 1 and backends != "nccl" and f"{self.device.type}:nccl" not in backends  # see SliceSum
        self.half, self.placement, self.prefetch, self.device_budget = HALF[precision], placement, prefetch, device_budget
        self.traffic: dict[str, int] = {}  # bytes that this rank sent in the last step, by collective; to_device and to_host, too
        self._sent_bytes: dict[str, int] = {}  # the same, of the step that is under way

        for name, buffer in [*model.named_buffers()]:
            model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.to(self.device)
        self.scaler = LossScale(self.device, initial_scale if precision == "fp16" else 1.0, precision == "fp16",
                                growth_interval, min_scale, max_scale)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adamw=adamw)
        self.optimizer = Adam(self, params, defaults, max_norm, self.scaler)
        self.params, self.names = self.optimizer.params, self.optimizer.names  # what is trained, in the model's order
        self.all_names, self.all_params = map(list, zip(*model.named_parameters()))
        for name, p in zip(self.all_names, self.all_params):
            if p.is_complex():
                raise ValueError(f"complex parameters are not supported: {name} is {p.dtype}")
        position = {p: i for i, p in enumerate(self.all_params)}
        self._trained = {position[p]: k for k, p in enumerate(self.params)}  # index in all_params -> among the trained ones
        self._frozen = [(n, p) for n, p in zip(self.all_names, self.all_params) if not p.requires_grad]
        self._shapes = [tuple(p.shape) for p in self.all_params]
        self._check_same_model((precision, placement, device_budget, shard_param_frac, offload_param_frac, offload_optim_frac,
                                gpu_adam_frac, chunk_mb, prefetch, max_norm, adamw, initial_scale, growth_interval, min_scale,
                                max_scale, bool(self.optimizer.cuda)))
        if (holder := ENGINES.get(model, lambda: None)()) is not None:  # another engine, which must let the model go
            holder()
        self._plain_dtypes = {name: t.dtype for name, t in model.state_dict().items() if isinstance(t, Tensor)}
        # before: every rank has its own initial values.  after: all have those of the group's first rank.
        # sends: each tensor once, at construction only (not in `traffic`); everybody waits.
        for t in (*model.parameters(), *model.buffers()):
            self._broadcast(t.data)

        on_gpu = self.device.type == "cuda"  # weights up and gradients down, each on a stream of its own
        self._up, self._down = (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)) if on_gpu else (None, None)
        self.gpu_adam_frac = gpu_adam_frac if self.optimizer.cuda else 0.0
        model_bytes = sum(p.numel() * p.element_size() for p in self.all_params)
        self.pool = HostPool(on_gpu, slab_bytes=2 ** min(max((2 * model_bytes // self.world_size).bit_length() - 1, 16), 31))
        self.device_bytes = 0  # the ledger: what the engine holds on the device now, and the most it has held
        self.most_device_bytes = 0
        hooks = self._cast_model()
        me = weakref.ref(self)  # the garbage collector does not see through hooks of tensors: a plain reference would stay for ever

        def on_grad(index, param):
            if (engine := me()) is not None:
                engine._on_grad(index, param)

        self._classes = [type(p) for p in self.all_params]
        self._chunked_classes = [chunked_class(self, i, own) for i, own in enumerate(self._classes)]
        self._absent = [torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=self.device).expand(shape)
                        for dtype, shape in zip(self._dtypes.values(), self._shapes)]  # of one element each
        self._lent_classes = {own: type("Lent" + own.__name__, (Lent, own), {}) for own in set(self._classes)}
        self._view_classes: dict[int, type] = {}  # of tensors that share a parameter's memory, by its index
        self._accumulates = False
        self._lay_out(chunk_mb, shard_param_frac, offload_param_frac, offload_optim_frac)
        hooks += [self.all_params[i].register_post_accumulate_grad_hook(functools.partial(on_grad, i)) for i in self._trained]
        self.home = Residency([chunk.room_bytes for chunk in self.chunks], self, prefetch, placement == "auto",
                              {chunk.number for chunk in self.chunks if not chunk.sharded})
        self._tell_adam()
        self._lay_out_running_statistics()

        self._sync = True  # False inside no_sync
        self._in_backward = False
        self._reduced = False  # the shards hold sums over the ranks
        self._forwards = 0  # that have begun and not ended
        self._lent = False  # inside gathered()
        self._version = 0  # of the weights: graphs made with another are of no use
        self._calls: list[Call] = []  # those that a backward is still to reach
        self._unreached = [0] * len(self.all_params)  # how many of them have read a parameter
        self._forward_number = 0  # of the last one that began
        self._reached: set[int] = set()  # the forwards that this backward has come to
        self._backward_began = 0  # the moment
        self._open: list[Chunk] = []  # reached by this backward, gradients not sent yet
        self._now: tuple[Chunk, ...] = ()  # what the operator at hand reads
        self._backward_now: tuple[Chunk, ...] = ()  # what the operator whose backward is at hand reads
        self._for_derivatives: set[Chunk] = set()  # read again by the backward of a derivative
        self._history, self._compared = 0, None  # a hash of gathers and sums since the last step; have all ranks the same?
        self._in_pass = False  # a pass: from the first forward to the backward after which no graph is left
        self._moment = -1  # which of a pass
        self._reading: list[int] = []  # chunks read at this moment
        self._ledger_then = 0  # when it began
        self._on_plan = False  # this pass has been like the first so far
        self._seen = Plan()  # of this pass, as long as there is no plan
        self.plan: Plan | None = None  # made of the first pass
        self.timeline: list[tuple] | None = None  # set to [] to have what happens recorded: (moment, what, chunk)
        before = torch.compiler.disable(lambda m, _: self._before_forward() if m is self._model else None)
        after = torch.compiler.disable(lambda m, _, output: self._after_forward(output) if m is self._model else None)
        hooks += [model.register_forward_pre_hook(before, prepend=True), model.register_forward_hook(after, always_call=True)]
        self._hooks = hooks
        ENGINES[model] = weakref.WeakMethod(self._let_go)
        self.zero_grad()  # gradients from before belong to nobody
        self._sent_bytes = {}  # what construction sent is no step's

    # ---- 0. before training: who holds what --------------------------------------------------------------------------

    def _cast_model(self) -> list:
        """Decide the dtype that each parameter will have in its chunk; cast buffers. Returns the hooks around modules with
        running statistics, which stay in fp32 with all inside them."""
        self._dtypes, hooks, in_fp32 = {p: p.dtype for p in self.all_params}, [], set()
        for module in self._model.modules() if self.half else ():
            if any(name.startswith("running_") for name, b in module.named_buffers(recurse=False) if b.is_floating_point()):
                hooks += [module.register_forward_pre_hook(to_fp32, with_kwargs=True), module.register_forward_hook(back_to_given)]
                in_fp32.update(module.modules())
        for module in self._model.modules() if self.half else ():
            if module in in_fp32:
                continue
            for p in module.parameters(recurse=False):
                if p.is_floating_point():
                    self._dtypes[p] = self.half
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                    buffer.data = buffer.data.to(self.half)
        return hooks

    def _lay_out(self, chunk_mb, shard_param_frac, offload_param_frac, offload_optim_frac) -> None:
        """Cut the parameters, in the model's order, into chunks; take the own slices' masters from the weights as they came. With
        auto placement everything begins in host memory."""
        self.chunks: list[Chunk] = []
        self.fragments: list[Fragment] = []
        self.frozen_fragments: list[Fragment] = []
        self._chunk_of: dict[int, Chunk] = {}
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for i, p in enumerate(self.all_params):
            kinds.setdefault((self._dtypes[p], i in self._trained), []).append(i)
        lists = []
        self.chunk_numel, self.waste = {}, {}
        for (dtype, trained), indices in kinds.items():
            numels = [aligned(math.prod(self._shapes[i])) for i in indices]
            capacity, waste = search_chunk(numels, dtype.itemsize, self.world_size * ALIGN, chunk_mb)
            self.chunk_numel[dtype, trained], self.waste[dtype, trained] = capacity, waste
            for members in fill_chunks(numels, capacity):
                lists.append((min(indices[m] for m in members), [indices[m] for m in members], dtype, trained, capacity))
        lists.sort(key=lambda entry: entry[0])
        # In host memory an element takes a master, two moments, a copy and a gradient; what has no room there begins on the device.
        numel_of = lambda members: sum(math.prod(self._shapes[i]) for i in members)
        host_bytes = [(3 * max(dtype.itemsize, 4) + 2 * dtype.itemsize) * numel_of(members) // self.world_size
                      for _, members, dtype, _, _ in lists]
        too_much = sum(host_bytes) - self._host_room()
        total, seen = numel_of(range(len(self._shapes))), 0
        for (_, members, dtype, trained, capacity), n_bytes in zip(lists, host_bytes):
            auto = self.placement == "auto"
            share = lambda fraction, before=seen: before < fraction * total  # the first chunks, up to this part of all parameters
            chunk = self._make_chunk(members, dtype, trained, capacity)
            chunk.sharded = auto or share(shard_param_frac)
            no_room = auto and trained and too_much > 0
            too_much -= n_bytes * no_room
            self._place(chunk, optimizer=no_room or not (auto or share(offload_optim_frac)),
                        store=no_room or not (auto or share(offload_param_frac)), initial=True)
            seen += numel_of(members)

    def _host_room(self) -> int:
        """Bytes of host memory for this rank, the least of any rank: of what is available now and what the model gives back 0.85.
        The rest is for the process beside them, CUDA's and libraries' own, and for slabs of pinned memory that do not fill up."""
        if self.device.type != "cuda":
            return NEVER
        given_back = sum(p.numel() * p.element_size() for p in self.all_params if p.device.type == "cpu")
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        room = torch.tensor(int(0.85 * (host_memory_available() / sharing + given_back)), device=self.device)
        # before: each rank's own figure.  after: the least.  sends: 2(N-1)/N * 8 bytes, once; all wait.
        self._all_reduce(room, op=dist.ReduceOp.MIN)
        return int(room)

    def _make_chunk(self, members: list[int], dtype: torch.dtype, trained: bool, capacity: int) -> Chunk:
        starts, numel = {}, 0
        for i in members:
            starts[i] = numel
            numel += aligned(math.prod(self._shapes[i]))
        slice_numel = aligned(-(-numel // self.world_size))
        own = slice(self.rank * slice_numel, (self.rank + 1) * slice_numel)
        room = torch.empty(max(capacity, self.world_size * slice_numel), dtype=dtype, device=self.device)
        full = room[: self.world_size * slice_numel]
        views = {i: full[start : start + math.prod(self._shapes[i])].view(self._shapes[i]) for i, start in starts.items()}
        room.untyped_storage().resize_(0)
        chunk = Chunk(len(self.chunks), full, room.numel() * dtype.itemsize, views, starts, own, trained)
        self.chunks.append(chunk)
        master_dtype = torch.promote_types(dtype, torch.float32) if trained and dtype == self.half else dtype
        values = torch.zeros(slice_numel, dtype=master_dtype, device="cpu")  # of the own slice, from the weights before the cast
        no_memory = values.new_empty(0)  # for fragments until `_tell_adam`: views would keep the values of all chunks
        for i, start in starts.items():
            p, shape = self.all_params[i], self._shapes[i]
            self._chunk_of[i] = chunk
            lo, hi = max(start, own.start), min(start + p.numel(), own.stop)  # the part of it that is in the own slice
            if p.numel() == 0:
                lo = hi = own.start  # a parameter without elements is everybody's
            if lo < hi or p.numel() == 0:
                at, first = slice(lo - own.start, hi - own.start), max(lo - start, 0) if p.numel() else 0
                values[at] = p.data.reshape(-1)[first : first + hi - lo]
                f = Fragment(self.all_names[i], self._trained.get(i, FROZEN), shape, (tuple(slice(0, size) for size in shape),),
                             first, first + hi - lo, no_memory, part=chunk.number)
                chunk.owned.append((f, at.start))
                (self.fragments if trained else self.frozen_fragments).append(f)
            if p.device != self.device:  # the same Parameter object, on another device
                there = nn.Parameter(p.data.new_empty(0, device=self.device), requires_grad=p.requires_grad)
                there.__dict__.update(p.__dict__)
                torch.utils.swap_tensors(p, there)
            p.data = self._absent[i]
            p.__class__ = self._chunked_classes[i]
        chunk.master = values
        return chunk

    def _place(self, chunk: Chunk, optimizer: bool, store: bool, initial: bool = False) -> None:
        """Put the optimizer's tensors and the source of gathers (the store) on the device (True) or into host memory. An optimizer
        on the device implies a store there. Afterwards `_tell_adam` must run, which moves the gradients."""
        dtype = chunk.full.dtype
        if not initial and (chunk.on_device, chunk.store_on_device) == (optimizer, store or optimizer):
            return
        before, numel = 0 if initial else self._kept_on_device(chunk), chunk.master.numel()
        self._absorb(chunk)

        def moved(tensor, on_device):
            new = self._zeros(numel, chunk.master.dtype, on_device)
            if tensor is not None:
                new.copy_(tensor)
                self.pool.give_back(tensor)
            return new

        if not initial and chunk.store is not chunk.master:
            self.pool.give_back(chunk.store)
        chunk.master = moved(chunk.master, optimizer if chunk.trained else store)
        if chunk.trained:
            chunk.exp_avg, chunk.exp_avg_sq = moved(chunk.exp_avg, optimizer), moved(chunk.exp_avg_sq, optimizer)
        separate = chunk.trained and not optimizer and (store or dtype != chunk.master.dtype)
        chunk.store = self._zeros(numel, dtype, store).copy_(chunk.master) if separate else chunk.master
        chunk.on_device, chunk.store_on_device = optimizer, store or optimizer
        self._account(self._kept_on_device(chunk) - before)

    def _kept_on_device(self, chunk: Chunk) -> int:
        """Bytes between steps: the optimizer's three tensors, and the store if it is one of its own."""
        held = [chunk.exp_avg, chunk.exp_avg_sq, chunk.master] if chunk.on_device and chunk.trained else []
        if chunk.store_on_device and not any(chunk.store is t for t in held):
            held.append(chunk.store)
        return sum(t.numel() * t.element_size() for t in held)

    def _account(self, n_bytes: int) -> None:
        self.device_bytes += n_bytes
        self.most_device_bytes = max(self.most_device_bytes, self.device_bytes)

    def _zeros(self, numel: int, dtype: torch.dtype, on_device: bool) -> Tensor:
        """Zeros on the device, or in host memory from the pool."""
        return torch.zeros(numel, dtype=dtype, device=self.device) if on_device else self.pool.take(numel, dtype)

    def _tell_adam(self) -> None:
        """Give each chunk's gradient slice the dtype and the place it should have, and tell Adam about all that has moved. The
        dtype is that of the weights, or at least fp32 where micro-batches add up. In host memory, and not adding up, a slice
        is `landing` itself."""
        host_numel = sum(c.master.numel() for c in self.chunks if c.trained and not c.on_device)
        rows, empty, seen = 0, [], 0
        for chunk in filter(lambda chunk: chunk.trained, self.chunks):
            self._place_gradients(chunk)
            if chunk.on_device and not chunk.shard.untyped_storage().nbytes():  # Adam looks at addresses: memory for that long
                chunk.shard.untyped_storage().resize_(chunk.shard.numel() * chunk.shard.element_size())
                empty.append(chunk)
            seen += chunk.master.numel() * (not chunk.on_device)
            # The kernel writes copies in half precision alone: an fp32 one on the device is the CPU's to send.
            kernel_can = chunk.master.dtype == torch.float32 and (chunk.store is chunk.master or chunk.store.dtype != torch.float32)
            chunk.visited = not chunk.on_device and seen > (1 - self.gpu_adam_frac) * host_numel and (
                kernel_can and chunk.master.is_pinned() and chunk.shard.is_pinned())
            tensors = [chunk.master, chunk.shard, chunk.exp_avg, chunk.exp_avg_sq]
            if chunk.store is not chunk.master and (chunk.visited or not chunk.store_on_device):
                tensors.append(chunk.store)
            if chunk.visited:
                tensors = [seen_by_gpu(t, self.device) for t in tensors]
            for f, at in chunk.owned:
                part = slice(at, at + f.end - f.start)
                f.master, f.grad, f.exp_avg, f.exp_avg_sq, f.half = [*(t[part] for t in tensors), None][:5]
            in_table = self.optimizer.cuda and (chunk.on_device or chunk.visited) and chunk.master.dtype == torch.float32
            chunk.rows = rows, rows + (len(chunk.owned) if in_table else 0)
            rows, chunk.address = chunk.rows[1], chunk.shard.data_ptr()
        for chunk in self.chunks:
            for f, at in () if chunk.trained else chunk.owned:
                f.master = chunk.master[at : at + f.end - f.start]
        self._count_fixed(self.home, {chunk for chunk in self.chunks if chunk.on_device and chunk.trained})
        self.optimizer.own(self.fragments)
        if self._sums_on_the_way():  # squares of slices in host memory were taken on the way: leave those out
            adam, at_home = self.optimizer, [k for c in self.chunks if c.on_device for k in range(*c.rows)]
            adam.pieces = {key: pieces for key, pieces in adam.pieces.items() if self.chunks[key[0]].on_device}
            if adam.cuda:
                self._blocks_at_home = adam.chunks[torch.isin(adam.chunks.view(-1, 2)[:, 0],
                                                              torch.tensor(at_home, dtype=torch.int32, device=self.device))]
        for chunk in empty:
            chunk.shard.untyped_storage().resize_(0)

    def _place_gradients(self, chunk: Chunk) -> None:
        """A gradient slice of the dtype and in the place that it should have; what it holds moves along."""
        numel, dtype = chunk.master.numel(), chunk.full.dtype
        wanted = (torch.promote_types(dtype, torch.float32) if self._accumulates else dtype, chunk.on_device,
                  chunk.on_device or self._accumulates)
        if chunk.shard_kind == wanted:
            return
        self._absorb(chunk)  # before what has landed is copied on
        old, old_landing, old_kind, chunk.shard_kind = chunk.shard, chunk.landing, chunk.shard_kind, wanted
        if chunk.on_device or old_landing is None:
            chunk.landing = None if chunk.on_device else self._zeros(numel, dtype, False)
        chunk.shard = self._zeros(numel, wanted[0], chunk.on_device) if wanted[2] else chunk.landing
        self._account(chunk.on_device * chunk.shard.untyped_storage().nbytes())
        if chunk.filled:
            chunk.shard.copy_(old)
        elif chunk.on_device:
            self._account(-chunk.shard.untyped_storage().nbytes())
            chunk.shard.untyped_storage().resize_(0)
        if old is not None and old_kind[1]:
            self._account(-old.untyped_storage().nbytes())
        for t in (old, *([old_landing] if old_landing is not old else [])):
            if t is not None and t is not chunk.shard and t is not chunk.landing:
                self.pool.give_back(t)

    def _count_fixed(self, home: "Residency", on_device: set[Chunk]) -> None:
        """Tell the rules what would be on the device if the optimizers of these chunks were: always, and from sum to step."""
        width = lambda chunk: max(chunk.full.element_size(), 4 * self._accumulates)
        home.fixed = sum(3 * c.master.numel() * c.master.element_size() for c in on_device)
        home.fixed += sum(self._kept_on_device(c) for c in self.chunks if not c.on_device)
        home.shards = [c.master.numel() * width(c) * (c in on_device) for c in self.chunks]
        if self._accumulates:  # also while the next micro-batch is under way
            home.fixed, home.shards = home.fixed + sum(home.shards), [0] * len(self.chunks)

    def _make_slice(self, chunk: Chunk) -> None:
        """Give a gradient slice on the device its memory. That may be another place than last time, which Adam's table must know;
        the correction is a kernel in the stream, so nobody waits."""
        if not chunk.shard.untyped_storage().nbytes():
            chunk.shard.untyped_storage().resize_(chunk.shard.numel() * chunk.shard.element_size())
            self._account(chunk.shard.untyped_storage().nbytes())
            moved, chunk.address = chunk.shard.data_ptr() - chunk.address, chunk.shard.data_ptr()
            if moved and chunk.rows[1] > chunk.rows[0]:
                self.optimizer.table[slice(*chunk.rows), 1] += moved

    def _lay_out_running_statistics(self) -> None:
        """Make BatchNorm's running means and variances views of one flat tensor per dtype, to be averaged at once."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name, buffer in self._model.named_buffers():
            if name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self._statistics = []
        for buffers in by_dtype.values():
            flat = torch.cat([b.reshape(-1) for b in buffers])
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers])):
                buffer.data = part.view(buffer.shape)
            self._statistics.append(flat)

    def _check_same_model(self, settings: tuple) -> None:
        """Ranks that differ would meet in collectives of different sizes, hang or add up nonsense: say so first."""
        text = repr([(n, shape, p.dtype, p.requires_grad) for n, shape, p in zip(self.all_names, self._shapes, self.all_params)]
                    + [(n, tuple(b.shape), b.dtype) for n, b in self._model.named_buffers()]
                    + [(n, k) for n, k in zip(self.names, self.optimizer.group_list)]
                    + [options_of(group) for group in self.optimizer.param_groups]) + repr(settings)
        digest = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
        ends = torch.tensor([digest, -digest], device=self.device)
        # before: each rank's hash h and -h.  after: [max h, -min h] everywhere.  sends: 2(N-1)/N * 16 bytes, once; all wait.
        self._all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends[0] != -ends[1]:
            raise ValueError("the ranks bring different models (names, shapes, dtypes), param groups or settings; "
                             f"rank {self.rank} has {len(self.names)} trained parameters and {settings}")

    def _let_go(self) -> None:
        """The end: another engine takes the model over. Give it whole weights as precise as the masters. Collectives."""
        for hook in self._hooks:
            hook.remove()
        self._forget()
        self._end_pass()
        for chunk in self.chunks:
            whole = torch.zeros(chunk.full.numel(), dtype=chunk.master.dtype, device=self.device)
            whole[chunk.own].copy_(chunk.master)
            SliceGather(self, whole, tag=2 * chunk.number).wait()
            self._show({i: whole[start : start + chunk.views[i].numel()].view(self._shapes[i]).clone()
                        for i, start in chunk.starts.items()})
            for i in chunk.views:
                self.all_params[i].__class__ = self._classes[i]
        trained = set(self.params)
        for name, t in self._model.state_dict(keep_vars=True).items():
            if isinstance(t, Tensor) and t not in trained and t.dtype != self._plain_dtypes.get(name, t.dtype):
                t.data = t.data.to(self._plain_dtypes[name])
        self.chunks = []  # whatever is called here from now on, the parameters are another's

    # ---- gather and release ------------------------------------------------------------------------------------------

    def gather(self, number: int) -> None:
        """Start a chunk's gather. Called by `home`, which has made room for it."""
        chunk = self.chunks[number]
        chunk.where, chunk.gathers = "gathering", chunk.gathers + 1
        self._note("gather", chunk)
        chunk.full.untyped_storage().resize_(chunk.room_bytes)
        self._account(chunk.room_bytes)
        from_host = self._up is not None and not chunk.store_on_device
        if from_host:
            self._up.wait_stream(torch.cuda.current_stream(self.device))
            self._count("to_device", chunk.store.numel() * chunk.store.element_size())
        with torch.cuda.stream(self._up if from_host else None):
            chunk.full[chunk.own].copy_(chunk.store, non_blocking=True)  # rounds, where the store is the fp32 master
            # starts the all-gather; who holds what and what is sent: SliceGather
            chunk.gathering = SliceGather(self, chunk.full, tag=2 * chunk.number)
            if from_host and self.world_size == 1:
                chunk.gathering = Fence(self._up)  # alone there is nothing to gather, only the copy

    def _use(self, chunk: Chunk) -> None:
        """The chunk's weights must be there: under NCCL the current stream waits for them, under gloo this thread."""
        self.home.gather(chunk.number)
        if chunk.where == "gathering":
            gathering, chunk.gathering = chunk.gathering, None
            try:
                gathering.wait()
            except RuntimeError as error:
                names = f"chunk {chunk.number} ({self.all_names[next(iter(chunk.views))]}, ...)"
                raise RuntimeError(f"gathering {names}: {error}; every rank must read the same parameters") from error
            chunk.where = "gathered"
            self._show(chunk.views)

    def release(self, number: int) -> None:
        """Give the memory of a chunk's weights back; on a GPU to the stream that has computed with them. Called by `home`."""
        chunk = self.chunks[number]
        if chunk.where == "gathering":
            chunk.gathering.wait()
            chunk.gathering = None
        self._note_time("release", chunk)
        self._empty(chunk)

    def _empty(self, chunk: Chunk) -> None:
        self._account(-chunk.full.untyped_storage().nbytes())
        chunk.full.untyped_storage().resize_(0)
        chunk.where = "free"
        self._show({i: self._absent[i] for i in chunk.views})
        chunk.arrived.clear()

    def _show(self, values: dict[int, Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for i, value in values.items():
                self.all_params[i].data = value

    def state(self, name: str) -> State:
        """Where a parameter is on its way round; see the picture in the file's docstring."""
        index = self.all_names.index(name)
        chunk = self._chunk_of[index]
        if chunk.where not in ("gathered", "summing"):
            return State.FREE
        if chunk.where == "summing" or index in chunk.arrived:
            whole = chunk.where == "summing" or len(chunk.arrived) == len(chunk.views)
            return State.READY_FOR_REDUCE if whole else State.HOLD_AFTER_BWD
        if index in self._read_now:
            return State.COMPUTE
        return State.HOLD_AFTER_FWD if self._unreached[index] else State.HOLD

    def _note(self, what: str, chunk: Chunk) -> None:
        """Remember a collective, to compare with the other ranks."""
        self._history = (self._history * 31 + 2 * chunk.number + (what == "sum") + 1) % 2**31
        self._note_time(what, chunk)

    def _note_time(self, what: str, chunk: Chunk) -> None:
        if self.timeline is not None:
            self.timeline.append((self._moment, what, chunk.number))

    def too_small(self, needed: int, budget: int) -> None:
        raise RuntimeError(f"device_budget is {budget} bytes and {needed} are needed at moment {self._moment} of a pass")

    # ---- who reads what, when ----------------------------------------------------------------------------------------

    def _read(self, indices: list[int]) -> tuple[Chunk, ...]:
        """An operator is about to read these parameters: their chunks must be there, and what comes next may start on its way."""
        chunks = tuple(sorted({self._chunk_of[i] for i in indices}, key=lambda chunk: chunk.number))
        if not self._in_pass:
            raise RuntimeError(f"the weights of {self.all_names[indices[0]]} are not here: they are in chunk {chunks[0].number}, "
                               "which is gathered while the model runs. Read them inside `with engine.gathered():`")
        self._now = chunks
        self._come_to(indices, chunks)
        return chunks

    def _come_to(self, indices: list[int], chunks: tuple[Chunk, ...]) -> None:
        """The next moment of this pass, unless nothing else is read than just before."""
        self._read_now = indices
        for chunk in chunks:
            if not chunk.arrived.isdisjoint(indices):
                self._take_back(chunk)
            elif self.plan is None and not chunk.sent.isdisjoint(indices):  # next time they will still be here, to be taken back
                self._seen.back.append([self._moment + 1, chunk.number])
        numbers, at_hand = [chunk.number for chunk in chunks], {*self._now, *self._backward_now}
        busy = {chunk.number for chunk in at_hand | self._for_derivatives}
        if not (set(numbers) <= set(self._reading) and set(numbers) <= self.home.gathered):
            self._next_moment(numbers, busy)
        self.home.busy = busy
        for chunk in chunks:
            self._use(chunk)
        for chunk in at_hand if self._in_backward else ():
            chunk.touched = self._moment

    def _next_moment(self, numbers: list[int], busy: set[int]) -> None:
        plan, moment = self.plan, self._moment + 1
        self._measure_others()
        here = [numbers, sorted(busy), self._in_backward]
        self._on_plan = self._on_plan and moment < len(plan.order) and here == [
            plan.order[moment], plan.busy[moment], plan.backward[moment]]
        self.home.busy = busy - {*numbers} if self._on_plan and self.home.auto else busy  # nobody has read these yet
        if self._in_backward:
            self._send_planned() if self._on_plan else self._send_left_behind()
        self.home.busy = busy
        self._moment, self._reading = moment, numbers
        if plan is None:
            for seen, value in zip((self._seen.order, self._seen.busy, self._seen.backward), here):
                seen.append(value)
        self.home.come_to(moment, numbers, plan if self._on_plan else None)
        if self._on_plan and self._in_backward:
            self.home.dirty.update(k for k in plan.at("grads", moment) if k in self.home.gathered)
        self._ledger_then = self.device_bytes
        if plan is None and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _measure_others(self) -> None:
        """What is on the device beside the engine's, at most, since the last moment began."""
        if self.plan is None and self._moment >= 0:
            most = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else self._ledger_then
            self._seen.others.append(max(most - self._ledger_then, 0))

    def _take_back(self, chunk: Chunk) -> None:
        """Weights are to be read in whose place a gradient stands (a shared weight, under reentrant checkpointing): what has
        come moves out, to `.grad`, where more is added, and the chunk is gathered once more."""
        if self.plan is None:
            self._seen.back.append([self._moment + 1, chunk.number])
        for i in chunk.arrived:
            self.all_params[i].grad = chunk.views[i].clone()
        self.home.take_back(chunk.number)

    def _begin_pass(self) -> None:
        self._in_pass, self._moment, self._reading, self._seen = True, -1, [], Plan()
        self._on_plan = self.plan is not None and bool(self.plan.order)

    def _end_pass(self, learn: bool = False) -> None:
        """No graph is left: what is gathered can go."""
        self._measure_others()
        self._in_pass, self._for_derivatives = False, set()
        self._now = self._backward_now = self._read_now = ()
        self.home.release_all()
        if learn and self.plan is None and self._seen.order:
            self._learn()

    def _expect(self, call: Call) -> None:
        """A backward is to reach this operator."""
        self._calls.append(call)
        for i in call.indices:
            self._unreached[i] += 1
        for chunk in call.chunks:
            chunk.calls += 1

    def _no_more(self, call: Call) -> None:
        """It has, or it never will."""
        if call.expected:
            call.expected = False
            for i in call.indices:
                self._unreached[i] -= 1
            for chunk in call.chunks:
                chunk.calls -= 1

    def _forget(self, which=lambda call: True) -> None:
        """These graphs are gone."""
        for call in filter(which, self._calls):
            self._no_more(call)
        self._calls = [call for call in self._calls if call.expected]

    # ---- 1. forward --------------------------------------------------------------------------------------------------

    def __call__(self, *args, **kwargs):
        self._check_usable()
        try:
            return self._model(*cast(args, self.half), **cast(kwargs, self.half))
        except Exception:
            if not self._in_backward:
                self._forwards = 0
                self._forget(lambda call: call.forward == self._forward_number)
                if not self._calls:
                    self._end_pass()
            raise

    def _check_usable(self) -> None:
        holder = ENGINES.get(self._model)
        if holder is None or holder() != self._let_go:
            raise RuntimeError("another engine has taken this model over: use that one")

    def _before_forward(self) -> None:
        self._check_usable()
        if self._lent:
            return
        if not self._in_pass:
            self._begin_pass()
        if not self._forwards and not self._in_backward:
            self._forward_number += 1
            self._now = self._backward_now = ()
        self._forwards += 1

    def _after_forward(self, output) -> None:
        if self._lent:
            return
        self._forwards = max(self._forwards - 1, 0)
        if not self._forwards and not self._in_backward:
            self._now = self._backward_now = self._read_now = ()
            # An output may require gradients without any such operator: all of forward may be inside reentrant checkpoints.
            if not self._calls and not any(t.requires_grad for t in tensors_in(output)):  # no backward will come
                self._end_pass()

    def _after_read(self, indices: list[int], chunks: tuple[Chunk, ...], output) -> None:
        """An operator has read parameters. Its backward begins where its output's gradient is complete: leave word there."""
        call = None
        for t in tensors_in(output) if torch.is_grad_enabled() else ():
            if t.requires_grad and not t.is_leaf:
                if call is None:  # in backward it may be the original or a copy, for checkpointing, that nobody will come to
                    call = Call(indices, chunks, self._version, self._forward_number, expected=not self._in_backward)
                    if call.expected:
                        self._expect(call)
                t.register_hook(functools.partial(reach, weakref.ref(self), call))

    def _mark_views(self, indices: list[int], output):
        """What shares memory with a chunk is read like the parameter itself, so it gets a class that asks, too."""
        storages = {self._chunk_of[i].full.untyped_storage()._cdata: i for i in indices}

        def mark(t):
            if isinstance(t, Tensor) and not isinstance(t, Chunked) and (i := storages.get(t.untyped_storage()._cdata)) is not None:
                return t.as_subclass(self._view_class(i))
            return t
        if isinstance(output, (tuple, list)) and type(output) in (tuple, list):
            return type(output)(map(mark, output))
        return mark(output)

    def _view_class(self, index: int) -> type:
        if index not in self._view_classes:
            self._view_classes[index] = chunked_class(self, index, Tensor)
        return self._view_classes[index]

    # ---- one step's micro-batches: 1 and 2 for each ------------------------------------------------------------------

    def forward_backward(self, batch, micro_batches: int = 1, loss_fn=None, weight=None) -> Tensor:
        """Forward and backward over this rank's `batch` in `micro_batches` pieces, with the reduce-scatters. Returns the
        weighted mean loss over all pieces of all ranks: a device scalar, the same number on every rank.

        batch: a Mapping (the model's keyword arguments), a tuple or list (its first item goes to the model, the rest is
        for loss_fn) or a tensor; tensors are cut along dim 0. None, or no rows: this rank has no samples this time.
        loss_fn(output, micro_batch) returns the mean over the micro-batch; without it the output, or its `loss`, is the
        loss. weight(micro_batch): what a micro-batch counts, a number or a device scalar that depends on the batch alone;
        see `default_weight`; where it is 0 the gradient must be finite all the same. micro_batches is the same on all ranks. An
        exception discards what has accumulated.
        """
        with self._discard_on_error():
            if self._in_pass and not self._forwards:  # graphs that were made before are not expected to be gone through any more
                self._forget()
                self._end_pass()
            pieces = split_batch(batch, micro_batches)
            weigh = weight or (lambda piece: default_weight(self._model, piece, loss_fn))
            counts = [torch.zeros((), dtype=torch.float64, device=self.device) + weigh(piece) for piece in pieces]
            total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.float64, device=self.device)
            # before: each rank knows the weight of its own pieces.  after: every rank the sum over all of them.
            # sends: 2(N-1)/N * 8 bytes; needed when the first backward starts, so it overlaps with the first forward.
            total_work = self._all_reduce(total, async_op=True)
            loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
            for k in range(micro_batches):
                mine, last = k < len(pieces), k == micro_batches - 1  # a rank may have fewer pieces than the others
                if mine:
                    loss = model_loss(self, pieces[k], loss_fn)
                else:
                    self._forward_without_samples()
                if k == 0:
                    wait(total_work)
                if mine:
                    share = torch.where(total > 0, counts[k] / total, 0.0)
                    loss_sum += torch.where(share > 0, loss.detach().double() * share, 0.0)  # a mean over no labels is NaN
                if last:
                    # before: each rank has the weighted losses of its own pieces.  after: all have the sum.
                    # sends: 2(N-1)/N * 8 bytes while the last backward runs.
                    loss_work = self._all_reduce(loss_sum, async_op=True)
                with contextlib.nullcontext() if last else self.no_sync():
                    if mine:
                        self._backward(loss, share)
                    else:
                        self._backward_without_samples()
            wait(loss_work)
        in_float64 = self.params and self.params[0].dtype == torch.float64  # as full_grad: fp32 but for float64 models
        return loss_sum if in_float64 else loss_sum.float()

    def _forward_without_samples(self) -> None:
        """There is nothing to compute here, but the others need this rank's slices: the gathers of a pass as planned."""
        self._check_usable()
        if self.plan is None or not self.plan.order:
            raise RuntimeError(f"rank {self.rank} has no samples in its first step, in which the order of chunks is learnt: "
                               "give every rank at least one")
        if not self._in_pass:
            self._begin_pass()
        for moment in range(self.plan.n_forward):
            self._pretend(moment)

    def _backward_without_samples(self) -> None:
        """The same, and sums in which this rank's gradients are zeros."""
        self._begin_backward()
        for moment in range(self.plan.n_forward, len(self.plan.order)):
            self._pretend(moment)
        self._end_backward()

    def _pretend(self, moment: int) -> None:
        """Come to a moment of the plan as if there were operators."""
        for number in self.plan.at("back", moment):
            self._take_back(self.chunks[number])
        self._now = tuple(self.chunks[k] for k in self.plan.busy[moment])
        self._come_to([], tuple(self.chunks[k] for k in self.plan.order[moment]))

    # ---- 2. backward, and the reduce-scatters inside it --------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Backward of this rank's mean loss; ranks count 1/N each. For a loop of your own, with `no_sync` around all but
        the last micro-batch; there, dividing by the number of micro-batches is yours. An exception discards what has
        accumulated."""
        with self._discard_on_error():
            self._backward(loss, 1.0 / self.world_size)

    @contextlib.contextmanager
    def no_sync(self):
        """Around `backward` of all micro-batches but the last; all ranks or none. Gradients are reduced all the same, since there
        is no room for whole ones, but add up in fp32 from the first on. The flag is read in backward alone."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def _discard_on_error(self):
        """After an exception some chunks may be summed and others not, so all that has accumulated goes."""
        try:
            yield
        except BaseException as error:
            self._in_backward, self._forwards, self._open = False, 0, []
            for chunk in self.chunks:
                for work in filter(None, (chunk.gathering, chunk.summing)):
                    if isinstance(error, Exception) or isinstance(work, Fence):  # Ctrl-C waits for no other rank
                        with contextlib.suppress(RuntimeError):  # a connection that is lost
                            work.wait()
            for chunk in self.chunks:
                chunk.gathering = chunk.summing = None
                self._empty(chunk)
            self.home.forget()
            self._forget()
            self._in_pass and self._end_pass()
            self.zero_grad()
            raise

    def _backward(self, loss: Tensor, share) -> None:
        """Autograd starts from `scale * share` instead of 1. The share, 1/N or micro-batch over total weight, comes in here
        and not after the sum: no further pass over the gradients, and the sum over ranks cannot overflow where one rank's
        gradient would not. In fp16 it makes small gradients smaller, which the loss scale makes up for as it grows."""
        if loss.numel() != 1:
            raise ValueError(f"backward needs a scalar loss, got shape {tuple(loss.shape)}")
        if loss.dtype in (torch.bfloat16, torch.float16):
            loss = loss.float()  # fp16 ends at 65504, and the first scale is 65536
        self._begin_backward()
        loss.backward(gradient=(self.scaler.state[SCALE] * share).to(loss.dtype).reshape(loss.shape))
        self._end_backward()

    def _begin_backward(self) -> None:
        self._check_usable()
        if self._lent:
            raise RuntimeError("inside gathered() there is no backward and no step")
        for name, p in self._frozen:
            if p.requires_grad:
                raise RuntimeError(f"{name} was frozen when the engine was built and has no gradient: unfreeze it before")
        if not self._in_pass:
            self._begin_pass()
        if not self._sync or any(chunk.filled for chunk in self.chunks):
            self._widen()
        for chunk in self.chunks:
            chunk.launched, chunk.touched, chunk.sent = False, -1, set()
        self._open, self._reached, self._backward_began = [], set(), self._moment + 1
        self._reading = []  # so that it begins with a moment of its own
        self._now = self._backward_now = ()
        self._seen.n_forward = self._seen.n_forward or len(self._seen.order)
        self._in_backward = True

    def _widen(self) -> None:
        """From now on gradients add up, so their slices become fp32, for which optimizers may have to leave the device."""
        if not self._accumulates:
            self._accumulates = True
            if self.placement == "auto" and self.plan is not None and self.plan.placed:
                if self._in_backward:  # a pass unlike the first: they leave after the step
                    self.plan.placed = False
                else:
                    self.home.release_all()  # makes room for what moves; backward gathers again what it needs
                    self._place_optimizers()
            self._tell_adam()

    def _reach(self, call: Call) -> None:
        """Autograd has come to the output of an operator, that is, it has left those that forward came to later."""
        if call.version != self._version:
            raise RuntimeError("this graph was made before the last step, with weights that are gone: run forward again")
        if not self._in_pass:
            raise RuntimeError("this graph's backward has been, and its weights are gone: run forward again")
        if self._in_backward:
            self._no_more(call)
            self._reached.add(call.forward)
            for chunk in call.chunks:
                chunk.launched = False  # else its gradients were sent too early (reentrant checkpointing), and are sent again
                if chunk.trained and chunk not in self._open:
                    self._open.append(chunk)
        elif torch.is_grad_enabled():  # a derivative of your code, with create_graph: its own backward will read the weights again
            self._for_derivatives.update(call.chunks)
        self._now, self._backward_now = (), call.chunks
        self._come_to(call.indices, call.chunks)

    def _send_left_behind(self) -> None:
        """Without a plan: send the gradients of chunks that no operator of forward is left to come to."""
        at_hand = {*self._now, *self._backward_now}
        for chunk in [c for c in self._open if c.calls <= 0 and c not in at_hand]:
            self._launch(chunk)

    def _send_planned(self) -> None:
        """With a plan: send those that this moment was the last to touch."""
        for number in self.plan.at("sums", self._moment) if self._moment >= self._backward_began else ():
            if not self.chunks[number].launched:
                self._launch(self.chunks[number])

    def _on_grad(self, index: int, param: nn.Parameter) -> None:
        """Autograd calls this after it has added a gradient into `param.grad`. It moves to the weights' place, if no operator is
        left that will read them; else when the chunk is sent."""
        name, chunk = self.all_names[index], self._chunk_of[index]
        if not self._in_backward:
            self.zero_grad()
            raise RuntimeError("call engine.backward(loss) instead of loss.backward(): the gradient would miss the "
                               "loss scale, the average over ranks and the flush of unused parameters")
        if param.grad.is_sparse:
            raise RuntimeError(f"sparse gradients are not supported: {name}; use sparse=False")
        if chunk.launched:  # too early: an autograd.Function asks nobody for weights, so nobody knew that it would bring a gradient
            chunk.launched = False
            self._open.append(chunk)
        self.optimizer.present[self._trained[index]] = 1
        chunk.touched = self._moment
        if index in chunk.arrived:
            chunk.views[index].add_(param.grad)
            param.grad = None
        elif chunk.where == "gathered" and not self._unreached[index] and (not self._on_plan or chunk.number in self.home.dirty):
            if self.plan is None and not chunk.arrived:
                self._seen.grads.append([self._moment, chunk.number])
            chunk.views[index].copy_(param.grad)
            param.grad = None
            chunk.arrived.add(index)
            self.home.dirty.add(chunk.number)

    def _launch(self, chunk: Chunk) -> None:
        """Start the reduce-scatter of a chunk's gradients. Always at the same place in the sequence of operators, however
        gradients came: all ranks issue their collectives in one order."""
        chunk.launched = True
        if chunk in self._open:
            self._open.remove(chunk)
        if chunk.where == "gathering":
            self._use(chunk)
        self.home.send(chunk.number, self._moment, self.plan if self._on_plan and self._moment >= 0 else None)
        if chunk.filled:  # by an earlier backward or, in this one, too early
            self._widen()
        if chunk.where == "free":  # nobody has read it, or it was released since
            chunk.full.untyped_storage().resize_(chunk.room_bytes)
            chunk.full.zero_()  # between parameters and behind them nothing may be that the norm would count
            self._account(chunk.room_bytes)
        self._note("sum", chunk)
        for i in chunk.views.keys() - chunk.arrived:
            grad = self.all_params[i].grad
            chunk.views[i].zero_() if grad is None else chunk.views[i].copy_(grad)
            self.all_params[i].grad = None
        chunk.where, chunk.sent, chunk.arrived = "summing", chunk.sent | chunk.arrived, set()
        room = None
        if self.by_hand:  # gloo: for what is received, in host memory; freed with the sum
            room = torch.empty((self.world_size - 1) * chunk.master.numel(), dtype=chunk.full.dtype, device="cpu")
        # starts the reduce-scatter; who holds what and what is sent: SliceSum
        chunk.summing = SliceSum(self, chunk.full, 2 * chunk.number + 1, room)
        if not chunk.on_device and self._down and not self.by_hand:
            self._land(chunk)

    def finish(self, number: int) -> None:
        """Wait for a reduce-scatter, add the sum to the own slice's gradient, free the chunk. Called by `home`."""
        chunk = self.chunks[number]
        total = chunk.summing.wait()
        if chunk.on_device:
            self._make_slice(chunk)
            chunk.shard.add_(total) if chunk.filled else chunk.shard.copy_(total)
        else:
            if self._sums_on_the_way():
                self._squares += square_sum(total)
            if self.by_hand or not self._down:
                self._land(chunk, total)
            chunk.landed.wait()  # before the memory is used again
        chunk.summing, chunk.filled = None, True
        self._empty(chunk)

    def _land(self, chunk: Chunk, total: Tensor | None = None) -> None:
        """Optimizer in host memory: the own slice goes there as soon as it is summed, on a stream of its own, beside backward."""
        self._absorb(chunk)
        chunk.adds_up = chunk.filled
        if self._down:
            self._down.wait_stream(torch.cuda.current_stream(self.device))
            self._count("to_host", chunk.landing.numel() * chunk.landing.element_size())
        with torch.cuda.stream(self._down):
            chunk.landing.copy_(chunk.summing.wait() if total is None else total, non_blocking=True)
            chunk.landed = Fence(self._down)

    def _sums_on_the_way(self) -> bool:
        """Are the squares of gradients that go to host memory summed before they leave the GPU? There it costs nothing. (On CPUs,
        and where micro-batches add up in host memory, Adam's own sum takes them all.)"""
        return self.device.type == "cuda" and not self._accumulates

    def _absorb(self, chunk: Chunk) -> None:
        """Wait for the last copy into `landing` and, where micro-batches add up, add it to the slice's gradient."""
        if chunk.landed is not None:
            chunk.landed.wait_on_host()
            chunk.landed = None
            if chunk.shard is not chunk.landing:
                chunk.shard.add_(chunk.landing) if chunk.adds_up else chunk.shard.copy_(chunk.landing)

    def _end_backward(self) -> None:
        """Autograd is through. Send what is still here and, as zeros, what it never came to; wait for all. Under NCCL the stream
        waits, under gloo this thread."""
        self._now = self._backward_now = ()
        self.home.busy = set()
        if self._on_plan:
            self._send_planned()
        for chunk in sorted(reversed(self.chunks), key=lambda chunk: chunk.touched < 0):  # first those that hold memory
            if chunk.trained:
                self._seen.sums.append([chunk.touched if chunk.touched >= 0 else self._moment, chunk.number])
                if not chunk.launched:
                    self._launch(chunk)
        self.home.finish()
        self._in_backward, self._reduced, self._open = False, True, []
        self._forget(lambda call: call.forward in self._reached)  # parts of these graphs that lead to no loss
        if not self._calls:
            self._end_pass(learn=True)

    def _reduce_what_is_left(self) -> None:
        """Reduce now if no backward since the last step has: then zeros, as the other ranks do."""
        if not self._reduced:
            self._begin_backward()
            self._end_backward()
        for chunk in self.chunks:
            self._absorb(chunk)

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def _room_on_device(self) -> int:
        """Bytes of the GPU that this rank may fill: 0.92 of what is free, of which ranks on one GPU have equal parts, and of what
        torch has already."""
        if self.device.type != "cuda":
            return NEVER
        which = socket.gethostname(), str(torch.cuda.get_device_properties(self.device).uuid)
        sharing = together(self, lambda: which).count(which)
        free, _ = torch.cuda.mem_get_info(self.device)
        return int((free / sharing + torch.cuda.memory_reserved(self.device)) * 0.92)

    def _learn(self) -> None:
        """After the first pass, if it was the same on all ranks: what else is on the device is the most of any rank."""
        budget = self.device_budget
        if budget is None:
            budget = self._room_on_device()
        seen = self._seen
        what = seen.order, seen.busy, seen.backward, seen.sums, seen.grads, seen.back, seen.n_forward
        answers = together(self, lambda: (what, seen.others, budget))
        budget = min(theirs for _, _, theirs in answers)
        if any(theirs != answers[0][0] for theirs, _, _ in answers):
            self.plan = Plan(budget=budget)  # ranks that go different ways have no common future
            return
        others = [max(most) for most in zip(*(others for _, others, _ in answers))]
        self.plan = dataclasses.replace(seen, others=others, budget=budget)
        needed = self._simulate(budget=0).most
        if self.placement == "auto" and needed > budget:
            self.plan = None
            raise RuntimeError(f"device_budget is {budget} bytes; this model, with batches like the first, needs {needed}")

    def _place_optimizers(self) -> None:
        """auto: the optimizers of as many chunks on the device as leave room for the tightest moment. First those that are there,
        then the first chunks: their gradients are the last to arrive."""
        self.plan.placed = self.placement == "static" or bool(self.plan.order)
        if self.placement == "static" or not self.plan.order:
            return
        least = self._simulate(budget=0, on_device=set())  # all that can go away does
        ahead = self.prefetch * max(chunk.room_bytes for chunk in self.chunks)
        room, wanted = [self.plan.budget - ahead - n_bytes for n_bytes in least.bytes], {}
        for chunk in sorted(self.chunks, key=lambda chunk: not chunk.on_device):
            if chunk.trained:
                always = 3 * chunk.master.numel() * chunk.master.element_size()
                summed = chunk.master.numel() * max(chunk.full.element_size(), 4 * self._accumulates)
                since = 0 if self._accumulates else least.summed[chunk.number]
                left = [free - always - summed * (k >= since) for k, free in enumerate(room)]
                wanted[chunk] = min(left) >= 0
                room = left if wanted[chunk] else room
        for chunk in sorted(wanted, key=lambda chunk: wanted[chunk]):  # first those that leave
            self._place(chunk, optimizer=wanted[chunk], store=wanted[chunk])
        self._tell_adam()
        gathers = {}
        for self.plan.eager in (False, True):
            gathers[self.plan.eager] = sum(self._simulate().gathers.values())
        self.plan.eager = gathers[True] <= gathers[False]

    def _simulate(self, budget: int | None = None, on_device: set[Chunk] | None = None) -> "Simulation":
        """A steady pass by the same rules, without tensors: what is gathered, released and summed, and the most bytes. With
        another budget, or with other optimizers on the device, if these are given."""
        plan, home = self.plan, self.home.copy(None)
        plan = plan if budget is None else dataclasses.replace(plan, budget=budget)
        if on_device is not None:
            self._count_fixed(home, on_device)
        for _ in range(2):  # the first begins with nothing fetched early
            home.do = counts = Simulation()
            counts.run(home, plan)
        return counts

    # ---- 3. step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One optimizer step: what is left to reduce, norm, overflow check, clip, Adam on the own slices."""
        self.optimizer.step()  # through the optimizer, so that schedulers see the call; it calls `_step`

    def _step(self) -> None:
        self._reduce_what_is_left()
        self._forget()  # graphs that nobody has gone back through
        if self._in_pass:
            self._end_pass(learn=bool(self._seen.sums))  # a graph was left behind, so the backward did not end the pass
        # before: BatchNorm's running means and variances of rank r's samples.  after: their sum, then the mean, each rank
        # counting once, however many samples it had.
        # sends: 2(N-1)/N * 4 bytes per element; needed by nobody before the next forward.
        statistics_works = [self._all_reduce(flat, async_op=True) for flat in self._statistics]
        adam = self.optimizer
        adam.send_hyperparameters()
        adam.send_presence()
        self._square_sum()
        # before: rank r has the sum of squares of its own slices, and knows which parameters received a gradient on r.
        # after:  all ranks have the sum over all slices, so the true norm, and on how many ranks each parameter had one.
        # sends:  2(N-1)/N * 8 bytes for each parameter tensor and one more; Adam waits for it.
        self._all_reduce(adam.inputs[adam.n_hyper :])
        self._compare_ranks(adam.inputs[adam.n_hyper])
        for chunk in self.chunks:
            if chunk.visited:  # over the bus: masters, moments and gradients, and back what has changed
                there = [chunk.master, chunk.exp_avg, chunk.exp_avg_sq]
                n_bytes = sum(t.numel() * t.element_size() for t in there)
                self._count("to_device", n_bytes + chunk.shard.numel() * chunk.shard.element_size())
                self._count("to_host", n_bytes + chunk.store.numel() * chunk.store.element_size() * (
                    chunk.store is not chunk.master and not chunk.store_on_device))
        adam.update(len(self.chunks), after=self._send_up)
        for flat, work in zip(self._statistics, statistics_works):
            wait(work)
            flat.div_(self.world_size)
        self._version += 1
        self.zero_grad()
        if self.plan is not None:
            if not self.plan.placed:
                self._place_optimizers()
            self.home.fetch_early(self.plan)
        self.traffic, self._sent_bytes = self._sent_bytes, {}
        self.scaler.raise_if_stuck()

    def _square_sum(self) -> None:
        """Of this rank's gradients. Of those that went to host memory it is known already, see `finish`."""
        adam = self.optimizer
        if not self._sums_on_the_way():
            return adam.square_sum()
        if adam.cuda:
            all_blocks, adam.chunks = adam.chunks, self._blocks_at_home
        adam.square_sum()
        if adam.cuda:
            adam.chunks = all_blocks
        adam.inputs[adam.n_hyper] += self._squares

    def _send_up(self, number: int) -> None:
        """Adam has updated a chunk, if in host memory by the CPU. Where gathers begin on the device its new weights go there; where
        the next forward begins with it, its gather starts. Meanwhile Adam goes on with the next chunk."""
        chunk = self.chunks[number]
        if chunk.trained and not chunk.on_device and chunk.store_on_device and not chunk.visited:
            chunk.landing.copy_(chunk.master)  # its gradients are used up
            if self._up:
                self._count("to_device", chunk.landing.numel() * chunk.landing.element_size())
                self._up.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._up):
                chunk.store.copy_(chunk.landing, non_blocking=True)
            if self._up:
                torch.cuda.current_stream(self.device).wait_stream(self._up)
        if self.plan is not None and self.plan.placed:
            self.home.fetch_early(self.plan, updated=number)

    def _compare_ranks(self, square_sum: Tensor) -> None:
        """NCCL matches collectives by their order, and chunks of one size would be mixed up without a word. So the ranks compare
        what they have gathered and summed since the last step; where that differs the step is skipped, and the next one raises. By
        hand, under gloo, messages carry the chunk's number, and nothing can be mixed up."""
        if self.world_size == 1 or self.by_hand:
            return
        if self._compared is None:
            self._signs = torch.tensor([1, -1], device=self.device)
            self._compared = torch.zeros((), dtype=torch.int64, device="cpu").pin_memory(), torch.cuda.Event()
        difference, copied = self._compared
        copied.synchronize()  # of the step before this one: long over, and all ranks see the same
        if difference != 0:
            raise RuntimeError("the ranks read different parameters, or in another order, before the last step, which was skipped: "
                               "with NCCL all must do the same")
        ends = self._signs * self._history
        # before: each rank's hash h and -h.  after: [max h, -min h] everywhere.  sends: 2(N-1)/N * 16 bytes; Adam waits for it.
        self._all_reduce(ends, op=dist.ReduceOp.MAX)
        square_sum.copy_(torch.where(ends.sum() == 0, square_sum, torch.nan))
        difference.copy_(ends.sum(), non_blocking=True)  # max h - min h; not waited for: it is read a step later
        copied.record()
        self._history = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard what has accumulated since the last step. `step` does so itself; calling it again is harmless."""
        for p in self.all_params:
            p.grad = None
        self.home.filled = set()
        for chunk in self.chunks:
            self._absorb(chunk)
            chunk.filled = False
            if chunk.on_device and chunk.trained and chunk.shard.untyped_storage().nbytes():
                self._account(-chunk.shard.untyped_storage().nbytes())
                chunk.shard.untyped_storage().resize_(0)
        self.optimizer.present[:] = bytes(len(self.params))
        self._squares = torch.zeros((), dtype=torch.float64, device=self.device)
        self._reduced = False

    # ---- what users read ---------------------------------------------------------------------------------------------

    grad_norm = property(lambda self: self.scaler.state[GRAD_NORM].clone(), doc="true global L2 norm before clipping")
    scale = property(lambda self: self.scaler.state[SCALE].clone(), doc="loss scale, a device tensor")
    skipped = property(lambda self: self.scaler.state[SKIPPED] > 0, doc="was the last step skipped for an overflow?")
    skipped_steps = property(lambda self: self.scaler.state[SKIPPED_STEPS].long(), doc="how many were")
    module = property(lambda self: self._model, doc="the model; its weights are there inside `gathered` and forward alone")

    def train(self, mode: bool = True) -> "Gemini":
        self._model.train(mode)
        return self

    def eval(self) -> "Gemini":
        return self.train(False)

    def named_parameters(self):
        """Names and Parameters, as the model has them. Their values: inside `gathered`, or `state_dict`."""
        return self._model.named_parameters()

    @contextlib.contextmanager
    def gathered(self, write: bool = False):
        """Inside, the whole weights are there, to be read, and forward gathers nothing; what you keep of them stays. With `write`,
        what you change (on all ranks alike) goes to the masters. A collective, outside of forward and backward; needs the
        memory for all, whatever the budget. For reading: a penalty on the weights belongs into forward or the loss."""
        if self._in_backward or self._forwards or self._lent:
            raise RuntimeError("gathered() is for between forward, backward and step")
        self._check_usable()
        if not self._calls:
            self._end_pass()  # what was fetched early, too
        for chunk in self.chunks:
            there = chunk.number in self.home.gathered  # a backward may still need it
            self._use(chunk)
            copies = {i: view.clone() for i, view in chunk.views.items()}
            if not there:
                self.home.release(chunk.number)
            self._show(copies)
            for i in copies:
                self.all_params[i].__class__ = self._lent_classes[self._classes[i]]
        self._lent = True
        try:
            yield self._model
        finally:
            self._lent = False
            params = dict(zip(self.all_names, self.all_params))
            wrong = [f"{n} was given shape {tuple(p.shape)} instead of {shape}"
                     for (n, p), shape in zip(params.items(), self._shapes) if tuple(p.shape) != shape]
            for f in self.fragments + self.frozen_fragments if write and not wrong else ():
                new = params[f.name].data.reshape(-1)[f.start : f.end].to(f.master.device)
                f.master.copy_(torch.where(new == f.master.to(new.dtype), f.master, new.to(f.master.dtype)))
            for chunk in self.chunks:
                there = chunk.where in ("gathered", "summing")
                self._show({i: chunk.views[i] if there else self._absent[i] for i in chunk.views})
                for i in chunk.views:
                    self.all_params[i].__class__ = self._chunked_classes[i]
            if write and wrong:
                raise ValueError(f"nothing is written: {'; '.join(wrong[:5])}")
            if write:
                self._masters_changed()

    def undo(self, chunks: tuple[Chunk, ...]) -> None:
        """What was written into weights in place goes: the next operator that reads them gathers them again."""
        for chunk in chunks:
            if chunk.number in self.home.gathered - self.home.dirty:
                self.home.release(chunk.number)

    def full_grad(self, name: str) -> Tensor:
        """The averaged, unscaled, unclipped gradient of one parameter, whole, on the CPU, fp32 (float64 for float64);
        zeros where no rank had one. A collective, between the last backward and `step`."""
        if name not in self.names:
            raise ValueError(f"{name!r} is not a trained parameter; trained are {', '.join(self.names[:8])}, ...")
        reduced = self._reduced
        self._reduce_what_is_left()
        if not reduced:  # there was no backward at all, and the next one is not a second
            self._reduced = False
            for chunk in self.chunks:
                chunk.filled = False
        index = self.all_names.index(name)
        shape, dtype = self._shapes[index], torch.promote_types(self._dtypes[self.all_params[index]], torch.float32)
        full = torch.zeros(math.prod(shape), dtype=dtype, device=self.device)
        for f in self.fragments:
            if f.name == name:
                full[f.start : f.end] = f.grad.to(self.device)
        # before: each rank has its own slice's part, zeros beside it.  after: all have the whole.  sends: 2(N-1)/N of it; all wait.
        self._all_reduce(full)
        return full.view(shape).cpu() / self.scaler.state[SCALE].item()

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of live storages on this rank, by kind and device: parameters (what is gathered; slices where the model needs no
        other master), gradients (and under gloo what is received of a chunk), optimizer, buffers."""
        apart = {chunk: chunk.trained and chunk.master.dtype != chunk.full.dtype for chunk in self.chunks}
        held = {
            "parameters": [t for c in self.chunks for t in (c.full, c.store, None if apart[c] else c.master)
                           if t is not c.master or not apart[c]],
            "gradients": [*(t for c in self.chunks for t in (c.shard, c.landing, c.summing and c.summing.received)),
                          *(p.grad for p in self.params)],
            "optimizer": [t for c in self.chunks for t in (c.master if apart[c] else None, c.exp_avg, c.exp_avg_sq)],
            "buffers": [*self._model.buffers()],
        }
        if not self.pool.pinned:
            return {kind: storage_bytes(tensors) for kind, tensors in held.items()}
        bytes_of = {}
        for kind, tensors in held.items():  # slices of the pool share storages
            tensors = [t for t in tensors if t is not None]
            bytes_of[kind] = storage_bytes(t for t in tensors if t.device.type != "cpu")
            pooled = {t.data_ptr(): t.numel() * t.element_size() for t in tensors if t.device.type == "cpu"}
            bytes_of[kind]["cpu"] = sum(pooled.values())
        return bytes_of

    def _places(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Of the plain model's state dict: key -> name of its parameter (tied ones have several keys), and the buffers."""
        if extra := [f"{name}._extra_state" for name, module in self._model.named_modules()
                     if type(module).get_extra_state is not nn.Module.get_extra_state]:
            raise CheckpointError(f"extra state of modules is not supported: {', '.join(extra[:5])}")
        name_of = {id(p): name for name, p in zip(self.all_names, self.all_params)}
        names = {key: name_of[id(p)] for key, p in self._model.named_parameters(remove_duplicate=False)}
        buffers = {k: b for k, b in self._model.named_buffers(remove_duplicate=False) if k in self._plain_dtypes}
        if foreign := self._plain_dtypes.keys() - names.keys() - buffers.keys():
            raise CheckpointError(f"state that is neither parameter nor buffer is not supported: {', '.join(sorted(foreign)[:5])}")
        return {key: names[key] for key in self._plain_dtypes if key in names}, buffers

    def state_dict(self) -> dict[str, Tensor]:
        """The plain model's state dict, weights from the masters, as copies on the CPU of rank 0; an empty dict on the others.
        A collective. dtypes are those the model came with."""
        self._check_usable()
        names, buffers = self._places()
        masters = dict(gather_full(self, self.fragments + self.frozen_fragments, "master"))
        if self.rank != 0:
            return {}
        return {key: (masters[names[key]] if key in names else buffers[key]).detach().to("cpu", dtype, copy=True)
                for key, dtype in self._plain_dtypes.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load rank 0's full state dict (what other ranks pass is ignored) on every rank, masters included; a collective.
        Adam's moments stay. Raises CheckpointError, a ValueError, on all ranks and before anything changes, for missing or
        unexpected names and for other shapes."""
        self._check_can_load()
        names, buffers = self._places()
        shape_of = dict(zip(self.all_names, self._shapes))
        own = {k: shape_of[names[k]] if k in names else tuple(buffers[k].shape) for k in self._plain_dtypes}

        def check():
            if self.rank == 0:
                missing, extra = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
                shapes = [f"{k} {tuple(state_dict[k].shape)} instead of {v}" for k, v in own.items()
                          if k in state_dict and tuple(state_dict[k].shape) != v]
                if missing or extra or shapes:
                    raise CheckpointError(f"the state dict does not fit: missing {missing}, unexpected {extra}, "
                                          f"other shapes {shapes}")

        together(self, check)
        full = {name: state_dict[key] for key, name in names.items()} if self.rank == 0 else {}
        scatter_full(self, self.fragments + self.frozen_fragments, "master", full)
        for key, buffer in buffers.items():
            if self.rank == 0:
                buffer.data.copy_(state_dict[key])
            self._broadcast(buffer.data)
        self._masters_changed()

    def _check_can_load(self) -> None:
        self._check_usable()
        if self._lent or self._in_backward or self._forwards:
            raise RuntimeError("weights are loaded between forward, backward and step, and outside of gathered()")

    def _masters_changed(self) -> None:
        """Otherwise than by Adam: the next gathers must begin with the new weights, and graphs made with the old are of no use."""
        self._version += 1
        self._forget()
        self._end_pass()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the GPU may still be writing into host memory
        for chunk in self.chunks:
            if chunk.store is not chunk.master:
                chunk.store.copy_(chunk.master)
        self._sent_bytes = {}

    def save(self, directory: str, **extra) -> None:
        """Write a checkpoint that any strategy resumes on any number of ranks: fp32 masters, moments, step counts, buffers,
        param groups' options, loss scale, each rank's random numbers (torch's and Python's), and `extra`: plain data, and
        objects like schedulers by their state_dict(). A collective, between steps; every rank sees the same file system.
        Overwrites a checkpoint, never anything else; killed at any moment it leaves a complete one. Raises CheckpointError.
        """
        if own := [name for name in extra if name.startswith("_")]:
            raise CheckpointError(f"names with _ in front are the engine's own: {', '.join(own)}")
        self._check_usable()
        save_checkpoint(self, directory, {**extra, "_plan": self._plan_state()})

    def load(self, directory: str, **objects) -> dict:
        """Continue from a checkpoint of any strategy: engine.load(dir, scheduler=scheduler) gives each object the state that was
        saved under its name and returns the other extras. On as many ranks the run goes on bit for bit, random numbers
        included; on another number they are left as they are. Discards gradients. Raises CheckpointError, on all ranks and
        before anything changes, for what is missing, damaged, of another shape or in another param group."""
        self._check_can_load()
        extra = load_checkpoint(self, directory, objects)
        self._forget()
        self._end_pass()
        self.zero_grad()
        self._take_over_plan(extra.get("_plan"))
        self._masters_changed()
        return {k: v for k, v in extra.items() if not k.startswith("_")}

    def _plan_state(self) -> dict:
        """The plan and what follows from it, as plain data: a resumed run goes on as this one, bit for bit, though Adam on the CPU
        and on the GPU round differently."""
        layout = [[self.all_names[i] for i in chunk.views] for chunk in self.chunks]
        about = [self.world_size, self.device.type, self.placement, self.device_budget, self.home.depth, str(self.half), layout]
        plan = self.plan and dataclasses.asdict(self.plan)
        return {"about": hashlib.sha256(json.dumps(about).encode()).hexdigest(), "plan": plan, "accumulates": self._accumulates,
                "on_device": [chunk.on_device for chunk in self.chunks]}

    def _take_over_plan(self, saved: dict | None) -> None:
        mine = saved and saved["plan"] and saved["about"] == self._plan_state()["about"]
        if mine and self.device_budget is None:  # the plan was made for what was free then: a smaller GPU needs a plan of its own
            room = self._room_on_device()
            mine = min(together(self, lambda: room)) > 0.9 * saved["plan"]["budget"]
        if mine:
            self.plan, self._accumulates = Plan(**saved["plan"]), saved["accumulates"]
            placed = [*zip(self.chunks, saved["on_device"])] if self.placement == "auto" else []
            for chunk, on_device in sorted(placed, key=lambda pair: pair[1]):  # first those that leave
                if chunk.trained:
                    self._place(chunk, optimizer=on_device, store=on_device)
            self._tell_adam()

    def kept(self) -> "list[Fragment]":
        """What a checkpoint holds beside what is trained: frozen parameters, and the buffers that are in the state dict."""
        persistent = self._places()[1]
        buffers = [(n, b) for n, b in self._model.named_buffers() if n in persistent]
        return self.frozen_fragments + [Fragment(n, BUFFER, tuple(b.shape), (tuple(slice(0, s) for s in b.shape),), 0, b.numel(), b)
                                        for n, b in buffers]

    def capture(self, batch, micro_batches: int = 1, loss_fn=None):
        raise NotImplementedError("Gemini.capture: chunks move between devices, which a CUDA graph cannot follow")

    # ---- collectives of whole tensors, and the count of bytes ----------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM, async_op: bool = False) -> dist.Work | None:
        """All-reduce in place and count what a ring sends; None without `async_op`, on one rank, or for no elements."""
        if self.world_size == 1 or tensor.numel() == 0:
            return None
        self._count("all_reduce", 2 * (self.world_size - 1) * tensor.numel() * tensor.element_size() // self.world_size)
        return dist.all_reduce(tensor, op=op, group=self.group, async_op=async_op)

    def _count(self, collective: str, sent_bytes: int) -> None:
        self._sent_bytes[collective] = self._sent_bytes.get(collective, 0) + sent_bytes

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor`, any strides, with that of the group's first rank."""
        if self.world_size > 1 and tensor.numel():
            sent = tensor.contiguous()
            dist.broadcast(as_bytes(sent.view(-1)), group=self.group, group_src=0)
            tensor.copy_(sent)
        return tensor


def aligned(numel: int) -> int:
    """The next multiple of ALIGN."""
    return -(-numel // ALIGN) * ALIGN


def wait(work) -> None:
    """Wait for a collective, if there is one: on one rank there is not."""
    if work is not None:
        work.wait()


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares of a 1-D tensor in float64; fp32 (float64 of float64) over 65,536 elements, as `Adam.square_sum` has it."""
    dtype, whole = torch.promote_types(x.dtype, torch.float32), len(x) // 65536 * 65536
    parts = [x[:whole].view(-1, 65536)] if whole else []
    parts += [x[None, whole:]] if whole < len(x) else []
    return sum((torch.linalg.vector_norm(part, dim=1, dtype=dtype).double().square().sum() for part in parts),
               torch.zeros((), dtype=torch.float64, device=x.device))


# ---- host memory ------------------------------------------------------------------------------------------------------


class HostPool:
    """Slices of host memory, cut from pinned slabs, so that copies run beside everything else and the GPU can read and write
    there itself. What is given back is used again. Where pinning is refused, says so once and goes on with ordinary memory.

    A pinned allocation takes the next power of two (torch's allocator) and milliseconds: hence slabs, which are one.
    """

    def __init__(self, pinned: bool, slab_bytes: int):
        self.pinned, self.slab_bytes = pinned, slab_bytes
        self.slabs: list[Tensor] = []  # what is left of each
        self.free: dict[int, list[Tensor]] = {}  # by bytes
        self.given: set[int] = set()  # addresses

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros (numel,)."""
        n_bytes = numel * dtype.itemsize
        piece = self.free[n_bytes].pop() if self.free.get(n_bytes) else self._cut(n_bytes)
        return torch.zeros(numel, dtype=dtype, device="cpu") if piece is None else piece.zero_().view(dtype)

    def _cut(self, n_bytes: int) -> Tensor | None:
        k = next((k for k, slab in enumerate(self.slabs) if len(slab) >= n_bytes), None)
        if k is None and self.pinned:
            try:
                size = max(self.slab_bytes, 2 ** (n_bytes - 1).bit_length())
                self.slabs.append(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True))
                k = len(self.slabs) - 1
            except RuntimeError as error:
                self.pinned = False
                print(f"gemini: host memory cannot be pinned, copies will be slower: {error}", file=sys.stderr)
        if k is None:
            return None
        piece, self.slabs[k] = self.slabs[k][:n_bytes], self.slabs[k][-(-n_bytes // 512) * 512 :]
        self.given.add(piece.data_ptr())
        return piece

    def give_back(self, t: Tensor) -> None:
        """Nobody uses this slice any more. What is not from the pool is left to torch."""
        if t.device.type == "cpu" and t.data_ptr() in self.given:
            self.free.setdefault(t.numel() * t.element_size(), []).append(as_bytes(t))


def host_memory_available() -> int:
    """Bytes that this machine, or the container that it gave us (cgroup v2), can still hand out; Linux."""
    found = []
    with contextlib.suppress(OSError), open("/proc/meminfo") as f:
        found += [1024 * int(line.split()[1]) for line in f if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):
        root = "/sys/fs/cgroup/memory."
        limit, used = (int(open(root + what).read()) for what in ("max", "current"))
        cache = re.search(r"^inactive_file (\d+)", open(root + "stat").read(), re.MULTILINE)
        found.append(limit - used + int(cache[1]))
    return min(found, default=NEVER)


class OnTheBus:
    """Tells torch, by the array interface of CUDA, where pinned memory is, which the GPU addresses like its own."""

    def __init__(self, host: Tensor):
        self.host = host  # keeps it alive
        kind = {4: "<f4", 2: "<i2"}[host.element_size()]  # the interface knows no bfloat16
        self.__cuda_array_interface__ = dict(shape=tuple(host.shape), typestr=kind, data=(host.data_ptr(), False), version=3)


def seen_by_gpu(host: Tensor, device: torch.device) -> Tensor:
    """The same pinned memory as a tensor of the GPU, whose kernels then read and write it over the bus."""
    with torch.cuda.device(device):
        there = torch.as_tensor(OnTheBus(host), device=device)
    assert there.data_ptr() == host.data_ptr()
    return there.view(host.dtype)


# ---- chunks of one size ----------------------------------------------------------------------------------------------


def fill_chunks(numels: list[int], capacity: int) -> list[list[int]]:
    """Indices into `numels`, cut into chunks of at most `capacity` in order. What is larger has a chunk of its own, beside which
    the one at hand stays open."""
    chunks, open_, used = [], [], 0
    for i, numel in enumerate(numels):
        if numel > capacity:
            chunks.append([i])
            continue
        if open_ and used + numel > capacity:
            chunks.append(open_)
            open_, used = [], 0
        open_.append(i)
        used += numel
    return chunks + ([open_] if open_ else [])


def search_chunk(numels: list[int], itemsize: int, align: int, chunk_mb: float | None) -> tuple[int, float]:
    """(capacity in elements, share of it that stays empty): of 32 capacities the one that wastes least, the larger of equals."""
    total = sum(numels)
    low, high = (int(mb * 2**20 / itemsize) for mb in ((chunk_mb, chunk_mb) if chunk_mb else SEARCH_MB))
    if not chunk_mb:
        high = max(min(high, total // 4), 1)
        low = min(low, max(total // 8, 1), high)
    best = None
    for k in range(32):
        capacity = max(-(-(low + (high - low) * k // 31) // align), 1) * align
        chunks = fill_chunks(numels, capacity)
        room = sum(max(capacity, -(-sum(numels[i] for i in chunk) // align) * align) for chunk in chunks)
        waste = 1 - total / room if room else 0.0
        if best is None or waste <= best[1]:
            best = capacity, waste
    return best


def tensors_in(x):
    """All tensors in what a torch function returns."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        for item in x.values():
            yield from tensors_in(item)
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from tensors_in(item)


def reach(engine: "weakref.ref[Gemini]", call: Call, grad: Tensor) -> None:
    """Autograd calls this with the complete gradient of an operator's output, before it goes on into the operator."""
    if engine() is not None:
        engine()._reach(call)


# ---- whoever reads a parameter asks for its chunk ----------------------------------------------------------------------


class Chunked:
    """In the class of every parameter, and of every tensor that shares its memory (`weight.t()`): each torch function that gets one
    asks the engine for the chunks first. It matters not who calls: a module, its parent, a penalty on the weights."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in NO_WEIGHTS_READ:
                return function(*args, **kwargs)
        read = [t for t in tensors_in((args, kwargs)) if isinstance(t, Chunked)]
        engine, indices = read[0]._chunked_engine(), list(dict.fromkeys(t._chunked_index for t in read))
        if any(t._chunked_engine() is not engine for t in read):
            raise RuntimeError(f"{getattr(function, '__name__', function)} is given parameters of two engines, such as "
                               f"{engine.all_names[indices[0]]}: take those of one out of `with engine.gathered():`")
        if function in (Tensor.__repr__, Tensor.__format__):
            return f"Parameter {engine.all_names[indices[0]]} of {tuple(args[0].shape)}, {args[0].dtype}, in a chunk"
        chunks = engine._read(indices)
        with torch._C.DisableTorchFunctionSubclass():
            before = [(t, t._version) for t in read if not t.is_inference()]
            output = function(*args, **kwargs)
            if changed := {engine.all_names[t._chunked_index] for t, version in before if t._version != version}:
                engine.undo(chunks)
                raise RuntimeError(f"{getattr(function, '__name__', function)} changes {', '.join(sorted(changed))} in place, "
                                   "which would be lost with the chunk: use `with engine.gathered(write=True):`")
            engine._after_read(indices, chunks, output)
            return engine._mark_views(indices, output)

    def as_subclass(self, cls):  # asks no torch function
        return self.detach().as_subclass(cls)

    def __deepcopy__(self, memo):
        with torch._C.DisableTorchFunctionSubclass():
            own_class = self._chunked_engine()._classes[self._chunked_index]
        copied = self.detach().clone()
        with torch._C.DisableTorchFunctionSubclass():
            copied.__class__ = Tensor
            return nn.Parameter(copied, self.requires_grad) if issubclass(own_class, nn.Parameter) else copied


class Lent:
    """In the class of parameters inside `gathered`: no graph may grow from them, since backward would not find them."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            output = function(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and any(t.grad_fn is not None for t in tensors_in(output)):
            raise RuntimeError("inside gathered() weights are for reading, under torch.no_grad(): a penalty on them belongs into "
                               "forward or the loss")
        return output

    def __deepcopy__(self, memo):
        """An ordinary Parameter, for a model that no engine holds."""
        with torch._C.DisableTorchFunctionSubclass():
            return type(self).__mro__[2](self.detach().clone(), self.requires_grad)


def chunked_class(engine: Gemini, index: int, base: type) -> type:
    return type("Chunked" + base.__name__, (Chunked, base), {"_chunked_engine": weakref.ref(engine), "_chunked_index": index})


NO_WEIGHTS_READ = {getattr(Tensor, name).__get__ for name in (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "_version")}
NO_WEIGHTS_READ |= {getattr(Tensor, name) for name in (
    "size", "numel", "nelement", "dim", "ndimension", "stride", "element_size", "storage_offset", "type", "get_device",
    "is_complex", "is_floating_point", "is_signed", "is_contiguous", "is_inference", "is_pinned", "is_same_size", "__len__",
    "__hash__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook")}
NO_WEIGHTS_READ |= {Tensor.grad.__set__, Tensor.grad.__delete__, Tensor.requires_grad.__set__}


# ---- shared blocks: the same text in every strategy file -------------------------------------------------------------


# >>> shared block: batch
def batch_size(batch) -> int:
    """Samples in a batch: dim 0 of every tensor in it. 0 for None. Raises ValueError where the tensors disagree or where
    there are none."""
    def sizes(x):
        items = x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else ()
        return {len(x)} if isinstance(x, Tensor) and x.ndim else set().union(*map(sizes, items))
    found = {0} if batch is None else sizes(batch)
    if len(found) != 1:
        raise ValueError(f"the tensors of a batch must agree in dim 0, found {sorted(found)} in a {type(batch).__name__}")
    return found.pop()


def split_batch(batch, micro_batches: int) -> list:
    """Cut along dim 0 into pieces whose sizes differ by one at most; with fewer samples than pieces, fewer pieces."""
    def cut(x, lo, hi):
        if isinstance(x, Tensor):
            return x[lo:hi] if x.ndim else x
        if isinstance(x, Mapping):
            return {k: cut(v, lo, hi) for k, v in x.items()}
        if isinstance(x, (tuple, list)):
            if x and not any(isinstance(v, (Tensor, Mapping, tuple, list)) for v in x):
                raise ValueError(f"cannot cut a {type(x).__name__} of {type(x[0]).__name__}: use tensors")
            return getattr(type(x), "_make", type(x))(cut(v, lo, hi) for v in x)
        return x
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, got {micro_batches}")
    n = batch_size(batch)
    ends = [n * k // micro_batches for k in range(micro_batches + 1)]
    return [cut(batch, lo, hi) for lo, hi in zip(ends, ends[1:]) if hi > lo]


def default_weight(model: nn.Module, micro_batch, loss_fn=None) -> Tensor | int:
    """What a micro-batch counts in the mean: its samples. Where the model computes the mean over tokens itself (integer
    `labels` of two dims, no loss_fn), the labels that are not -100, less each row's first for a causal model."""
    labels = micro_batch.get("labels") if isinstance(micro_batch, Mapping) and loss_fn is None else None
    if labels is None or labels.is_floating_point() or labels.ndim < 2:
        return batch_size(micro_batch)
    causal = type(getattr(model, "_orig_mod", model)).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return ((labels[..., 1:] if causal else labels) != -100).sum()


def model_loss(model: nn.Module, micro_batch, loss_fn=None) -> Tensor:
    """Forward; a scalar. Raises ValueError where neither loss_fn nor the model's output gives one."""
    x = micro_batch[0] if isinstance(micro_batch, (tuple, list)) else micro_batch
    output = model(**x) if isinstance(x, Mapping) else model(x)
    if loss_fn is not None:
        loss = loss_fn(output, micro_batch)
    else:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(f"no scalar loss in the output of {type(model).__name__}: pass loss_fn(output, micro_batch), or labels")
    return loss.reshape(())
# <<< shared block: batch


# >>> shared block: fragments
FROZEN, BUFFER = -1, -2  # in the place of `index`: not trained, but part of a checkpoint
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass
class Fragment:
    """What this rank's optimizer owns of one parameter.

    `boxes` are blocks of the full parameter, one slice per dim; joined along one dim they are this rank's local tensor:
    a single box, the whole parameter, except under tensor parallelism (three boxes for a fused QKV slice). The
    fragment is the range [start, end) of the flattened (row-major) local tensor, and its tensors, all of one memory
    layout, hold that range: the master that Adam updates, its gradient, both moments, and the half-precision copy that
    the update refreshes. Optimizer and checkpoint see nothing else of a strategy's way of sharding.
    """

    name: str
    index: int  # of the parameter among this rank's trained ones, in the model's order; or FROZEN or BUFFER
    shape: tuple[int, ...]  # of the full parameter
    boxes: tuple[tuple[slice, ...], ...]
    start: int
    end: int
    master: Tensor
    grad: Tensor | None = None
    half: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    part: int = 0  # Adam on the CPU goes part by part, so that what follows on one can start before the next

    def kinds(self) -> tuple[str, ...]:
        """Which of its tensors a checkpoint holds."""
        return ("master", *(kind for kind in MOMENTS if self.index >= 0))

    def bare(self) -> "Fragment":
        """Without its tensors, for other ranks to know about; an empty one says the dtype."""
        return Fragment(self.name, self.index, self.shape, self.boxes, self.start, self.end, self.master.new_empty(0, device="cpu"))


def storage_bytes(tensors) -> dict[str, int]:
    """Bytes of the storages behind these tensors by device, each counted once however many views it has."""
    storages = {}
    for t in tensors:
        if t is not None:
            storages[t.device, t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    total: dict[str, int] = {}
    for (device, _), n_bytes in storages.items():
        total[str(device)] = total.get(str(device), 0) + n_bytes
    return total
# <<< shared block: fragments


# >>> shared block: casts
def cast(x, dtype: torch.dtype | None):
    """The floating tensors in nested containers in another dtype; everything else, and the containers' types, as they are."""
    if dtype is None:
        return x
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    if isinstance(x, Mapping):  # transformers' BatchEncoding and ModelOutput are more than dicts
        new = copy.copy(x) if isinstance(x, MutableMapping) else dict(x)
        for key, value in x.items():
            new[key] = cast(value, dtype)
        return new
    if isinstance(x, (tuple, list)):
        return getattr(type(x), "_make", type(x))(cast(v, dtype) for v in x)
    return x


def to_fp32(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Before a module with running statistics: it computes in the dtype of its parameters ..."""
    floating = [x.dtype for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
    module.__dict__.setdefault("_given", []).append(floating[0] if floating else None)
    return cast(args, torch.float32), cast(kwargs, torch.float32)


def back_to_given(module: nn.Module, args: tuple, output):
    """... and after it: it hands on what it was given."""
    return cast(output, module.__dict__["_given"].pop())
# <<< shared block: casts


# >>> shared block: slices
class SliceSum:
    """Reduce-scatter of `flat` (N*S,), in place: `wait` returns rank r's slice (S,) of it, summed over the ranks.

    NCCL has it. gloo's reduce_scatter sends as much as an all-reduce, so there each rank sends slice s straight to rank s and
    adds up what it receives: (N-1)/N of the bytes, the sum rounded once.
    """

    def __init__(self, engine, flat: Tensor, tag: int, room: Tensor | None):
        """room: in host memory, where gloo may put what it receives, at least N-1 slices, until `wait`; None for NCCL."""
        n, r = engine.world_size, engine.rank
        slices = flat.view(n, -1)
        self.own, self.works, self.received = slices[r], [], None
        if n == 1:
            return
        engine._count("reduce_scatter", (n - 1) * self.own.numel() * flat.element_size())
        # before: rank r holds flat_r, its own gradients times share and scale.  after: slice r of it is sum_q flat_q[slice r].
        # sends: (N-1)/N of flat's bytes per rank, while autograd computes the earlier layers; `wait` comes when room is needed.
        if not engine.by_hand:
            self.works = [dist.reduce_scatter_tensor(self.own, flat, group=engine.group, async_op=True)]
            return
        self.received = room[: (n - 1) * self.own.numel()].view(n - 1, -1)
        for k in range(1, n):
            self.works += [dist.irecv(as_bytes(self.received[k - 1]), group=engine.group, group_src=(r - k) % n, tag=tag),
                           dist.isend(as_bytes(slices[(r + k) % n].cpu()), group=engine.group, group_dst=(r + k) % n, tag=tag)]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        if self.received is not None:
            for own, *others in zip(*(part.to(self.own.device).split(2**14) for part in (self.own, *self.received))):
                total = own.to(torch.promote_types(own.dtype, torch.float32))  # `own` itself where that is its dtype
                for other in others:
                    total += other
                own.copy_(total)
        return self.own


class SliceGather:
    """All-gather of `flat` (N*S,), in place: after `wait` all slices are those of their owners."""

    def __init__(self, engine, flat: Tensor, tag: int):
        n, r = engine.world_size, engine.rank
        slices, self.works, self.received = flat.view(n, -1), [], []
        if n == 1:
            return
        engine._count("all_gather", (n - 1) * slices[r].numel() * flat.element_size())
        # before: of flat, only slice r is up to date on rank r.  after: all of it.
        # sends: (N-1)/N of flat's bytes per rank, while what comes before is computed; whoever reads a weight waits.
        if not engine.by_hand:
            self.works = [dist.all_gather_into_tensor(flat, slices[r], group=engine.group, async_op=True)]
            return
        sent = as_bytes(slices[r].cpu())
        for k in range(1, n):
            place = slices[(r - k) % n]
            received = place if place.device.type == "cpu" else torch.empty_like(place, device="cpu")
            self.received.append((place, received))
            self.works += [dist.irecv(as_bytes(received), group=engine.group, group_src=(r - k) % n, tag=tag),
                           dist.isend(sent, group=engine.group, group_dst=(r + k) % n, tag=tag)]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for place, received in self.received:
            if place is not received:
                place.copy_(received)


def as_bytes(x: Tensor) -> Tensor:
    """gloo does not know every dtype, and sending needs none."""
    return x.view(torch.uint8)


class Fence:
    """A place in a CUDA stream; without a stream, on CPUs, there is nothing to wait for."""

    def __init__(self, stream: "torch.cuda.Stream | None"):
        self.event = stream.record_event() if stream else None

    def wait(self) -> None:
        """The current stream goes on when the other has come here."""
        if self.event:
            self.event.wait()

    def wait_on_host(self) -> None:
        if self.event:
            self.event.synchronize()
# <<< shared block: slices


# >>> shared block: loss scale
SCALE, GOOD_STEPS, SKIPPED, SKIPPED_STEPS, SKIPPED_IN_A_ROW, GRAD_NORM, FACTOR = range(7)  # places in LossScale.state
MAX_SKIPS = 40  # in a row; they take a scale of 65536 to its floor of 1 more than twice over, so more will not help


class LossScale:
    """Dynamic loss scale (arXiv:1710.03740, §3.2) and what the last step found, in one device tensor that the host never
    waits for. `state`, float64 (8,): the scale; finite steps since it changed; was the last step skipped; how many
    were, in total and in a row; the last gradient norm; factor = clip / scale, by which Adam multiplies gradients.

    fp16 loses gradients below 6e-8, so the loss is multiplied by the scale. A step whose gradients are not finite is
    skipped and halves it, `interval` finite ones double it, within [floor, ceiling]. Not dynamic: it stays as it is.
    """

    def __init__(self, device, initial, dynamic, interval=2000, floor=1.0, ceiling=2.0**24, growth=2.0, backoff=0.5):
        self.growth, self.backoff, self.floor, self.ceiling = growth, backoff, floor, ceiling
        self.interval = interval if dynamic else 0
        self.state = torch.zeros(8, dtype=torch.float64, device=device)
        self.state[SCALE] = initial
        self.seen = torch.zeros(8, dtype=torch.float64, device="cpu")
        if device.type == "cuda":
            self.seen = self.seen.pin_memory()

    def update(self, skip: Tensor) -> None:
        """After a step: the rule above, as adam_prepare in adam_cuda.cu has it."""
        scale, good, _, total, row = self.state[:5]
        if self.interval:
            grow = ~skip & (good + 1 >= self.interval)
            grown = torch.where(grow, (scale * self.growth).clamp(max=self.ceiling), scale)
            scale, good = torch.where(skip, (scale * self.backoff).clamp(min=self.floor), grown), (good + 1) * ~(skip | grow)
        self.state[:5] = torch.stack([scale, good, skip.double(), total + skip, (row + 1) * skip])

    def raise_if_stuck(self) -> None:
        """RuntimeError after 40 skips in a row. On a GPU the copy is not waited for, so it comes a few steps late."""
        self.seen.copy_(self.state, non_blocking=True)
        if self.seen[SKIPPED_IN_A_ROW] >= MAX_SKIPS:
            raise RuntimeError(f"{self.seen[SKIPPED_IN_A_ROW]:.0f} steps in a row skipped, {self.seen[SKIPPED_STEPS]:.0f} in all: "
                               f"gradients are not finite even at loss scale {self.seen[SCALE]:g} (floor {self.floor:g})")
# <<< shared block: loss scale


# >>> shared block: adam
class Adam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980, Algorithm 1) and AdamW (arXiv:1711.05101, Algorithm 2) over the fragments of this rank.

    Schedulers see a torch optimizer with the user's groups and Parameters; `step` and `zero_grad` are the engine's, which
    calls `send_presence`, `send_hyperparameters`, `square_sum`, sums over ranks what they do not share, then `update`.
    fp32 masters on a GPU go through adam_cuda.cu, all in one launch; everything else through torch's fused Adam.
    `inputs`, float64 on the device: six hyperparameters per group | sum of squares | per parameter: had it a gradient?
    """

    def __init__(self, engine, params, defaults: dict, max_norm: float, scaler: LossScale):
        names = {p: name for name, p in engine.module.named_parameters()}
        self.engine, self.max_norm, self.scaler, self._built = engine, max_norm, scaler, False
        super().__init__(list(names) if params is None else params, defaults)
        group_of = {p: k for k, group in enumerate(self.param_groups) for p in group["params"]}
        strays = [tuple(p.shape) for p in group_of if p not in names]
        if strays:
            raise ValueError(f"param groups hold tensors that are not the model's parameters, of shapes {strays[:5]}")
        self.params = [p for p in names if p.requires_grad and p in group_of]
        self.names = [names[p] for p in self.params]
        self.present = bytearray(len(self.params))  # hooks write 1 for a parameter that received a gradient
        self.n_hyper, device = 6 * len(self.param_groups), scaler.state.device
        self.group_list = [group_of[p] for p in self.params]
        self.group_of = torch.tensor(self.group_list, dtype=torch.int64, device=device)
        self.inputs = torch.zeros(self.n_hyper + 1 + len(self.params), dtype=torch.float64, device=device)
        self.presence = self.inputs[self.n_hyper + 1 :]
        self.steps = torch.zeros(len(self.params), dtype=torch.float32, device=device)  # updates each parameter has had
        self.cuda = adam_library(device)
        if self.cuda:
            self.constants = torch.zeros(len(self.params), 8, device=device)  # bias corrections and the like
            self.ring = [(torch.zeros_like(self.inputs, device="cpu").pin_memory(), torch.cuda.Event()) for _ in range(8)]
        self.sent, self._built = 0, True

    def add_param_group(self, group) -> None:
        if getattr(self, "_built", False):
            raise RuntimeError("param groups are fixed when the engine is built: build a new engine for another set")
        super().add_param_group(group)

    def step(self, closure=None):
        if closure is not None:
            raise ValueError("closures are not supported: a step's gradients come from the engine's backward")
        self.engine._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.zero_grad()

    def state_dict(self) -> dict:
        return export_adam(self.engine)

    def load_state_dict(self, state_dict: Mapping) -> None:
        import_adam(self.engine, state_dict)

    def own(self, fragments: list[Fragment]) -> None:
        """Take over fragments, or take note that tensors of theirs moved. New ones get moments of zero."""
        flat = lambda t: None if t is None else t.as_strided((t.numel(),), (1,))  # in memory order, whatever the strides
        rows, self.calls = [], {}
        for f in fragments:
            if f.exp_avg is None:
                f.exp_avg, f.exp_avg_sq = torch.zeros_like(f.master), torch.zeros_like(f.master)
            for t in filter(lambda t: t is not None, (f.grad, f.exp_avg, f.exp_avg_sq, f.half)):
                assert (t.shape, t.stride(), t.device) == (f.master.shape, f.master.stride(), f.master.device), f.name
            if self.cuda and f.master.is_cuda and f.master.dtype == torch.float32:
                rows.append(f)
            elif f.master.numel():
                key = f.part, self.group_list[f.index], f.master.device, f.master.dtype, f.grad.dtype
                self.calls.setdefault(key, []).append(
                    (f.index, *map(flat, (f.master, f.grad, f.exp_avg, f.exp_avg_sq, f.half))))
        # Squares are summed in fp32 over 65,536 elements and in float64 above that: over 5e6 in fp32, 3e-4 is lost.
        self.pieces = {key: [c for row in call for c in row[2].split(65536)] for key, call in self.calls.items()}
        if self.cuda:
            code = {None: 0, torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
            address = [[0 if t is None else t.data_ptr() for t in (f.master, f.grad, f.exp_avg, f.exp_avg_sq, f.half)]
                       + [f.master.numel(), f.index, code[f.grad.dtype] + 4 * code[getattr(f.half, "dtype", None)]] for f in rows]
            chunks = [(r, c) for r, f in enumerate(rows) for c in range(-(-f.master.numel() // self.cuda.adam_chunk_numel()))]
            self.table = torch.tensor(address, dtype=torch.int64, device=self.inputs.device)
            self.chunks = torch.tensor(chunks, dtype=torch.int32, device=self.inputs.device)
            self.sums = torch.zeros(len(chunks), dtype=torch.float64, device=self.inputs.device)
        self.fragments = fragments  # keeps alive what the table points at

    def send_hyperparameters(self) -> None:
        rows = [[g["lr"], *g["betas"], g["eps"], g["weight_decay"], g["adamw"]] for g in self.param_groups]
        self._send(self.inputs[: self.n_hyper + 1], torch.tensor(sum(rows, []) + [0], dtype=torch.float64, device="cpu"))

    def send_presence(self) -> None:
        if self.params:
            self._send(self.presence, torch.frombuffer(self.present, dtype=torch.uint8))

    def _send(self, to: Tensor, values: Tensor) -> None:
        """Copy host values to the device without waiting. On a GPU through a pinned slot, which is used again only when the
        copy from it, several steps ago, is over."""
        if self.cuda:
            slot, event = self.ring[self.sent % len(self.ring)]
            event.synchronize()
            values = slot[: len(values)].copy_(values)
        to.copy_(values, non_blocking=True)
        if self.cuda:
            event.record(torch.cuda.current_stream(self.inputs.device))
            self.sent += 1

    def square_sum(self) -> None:
        """inputs[n_hyper] = sum of squares of this rank's gradients as they stand, still times the loss scale."""
        if self.cuda:
            self._call("adam_square_sums", self.table, self.chunks, len(self.chunks), self.sums)
            self._call("adam_total", self.sums, len(self.sums), self.inputs[self.n_hyper :])
        for (_, _, _, dtype, _), pieces in self.pieces.items():
            norms = torch._foreach_norm(pieces, 2, torch.promote_types(dtype, torch.float32))
            self.inputs[self.n_hyper] += torch.stack(norms).double().square().sum().to(self.inputs.device)

    def update(self, parts: int = 1, after=lambda part: None) -> None:
        """Norm, overflow flag, clip factor, loss scale and step counts, then Adam: left alone are parameters without a
        gradient on any rank, and everything if the sum of squares is not finite. after(part): called when one is done."""
        s, total, present = self.scaler, self.inputs[self.n_hyper], self.presence
        if self.cuda:
            self._call("adam_prepare", self.inputs[self.n_hyper :], self.inputs, self.group_of, present, len(self.params),
                       self.steps, self.constants, s.state, float(self.max_norm), float(s.growth), float(s.backoff),
                       float(s.interval), float(s.floor), float(s.ceiling))
        else:
            norm = total.sqrt() / s.state[SCALE]
            clip = (self.max_norm / (norm + 1e-6)).clamp(max=1.0) if self.max_norm > 0 else torch.ones_like(norm)
            s.state[GRAD_NORM], s.state[FACTOR] = norm, clip / s.state[SCALE]
            s.update(~total.isfinite())
            self.steps += (present > 0) & total.isfinite()
        skip = bool(self.calls) and bool(s.state[SKIPPED])  # torch's Adam takes lists from the host: on a GPU it waits here
        factor, alive = (float(s.state[FACTOR]), (present > 0).tolist()) if self.calls else (1.0, [])
        steps = {device: self.steps.to(device) for _, _, device, *_ in self.calls}
        if self.cuda:  # after all waiting: the GPU and the CPU update side by side
            self._call("adam_update", self.table, self.chunks, len(self.chunks), self.constants, s.state)
        for part in range(parts):
            for (of_part, k, device, dtype, _), call in self.calls.items() if not skip else ():
                rows = [row for row in call if alive[row[0]]] if of_part == part else []
                if rows:
                    self._torch_adam(self.param_groups[k], rows, steps[device], dtype, factor)
            after(part)

    def _torch_adam(self, group, rows, steps, dtype, factor) -> None:
        fused = torch._fused_adamw_ if group["adamw"] else torch._fused_adam_
        for batch in [rows] if rows[0][1].is_cuda else self._cut(rows):
            index, master, grad, exp_avg, exp_avg_sq, half = map(list, zip(*batch))
            grad = [g.to(dtype) for g in grad]
            if factor != 1.0:
                torch._foreach_mul_(grad, factor)
            fused(master, grad, exp_avg, exp_avg_sq, [], [steps[i] for i in index], lr=float(group["lr"]),
                  beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
                  amsgrad=False, maximize=False)
            copies = [(h, p) for h, p in zip(half, master) if h is not None]
            if copies:
                torch._foreach_copy_(*map(list, zip(*copies)))

    def _cut(self, rows, numel=2**20):
        """Batches of about so many elements: what one pass over them writes, the next still finds in the CPU's caches."""
        batch, room = [], numel
        for index, *tensors in rows:
            for lo in range(0, tensors[0].numel(), numel):
                batch.append((index, *(t if t is None else t[lo : lo + numel] for t in tensors)))
                room -= batch[-1][1].numel()
                if room <= 0:
                    yield batch
                    batch, room = [], numel
        if batch:
            yield batch

    def _call(self, function: str, *args) -> None:
        """One launch on the current stream. Tensors pass as addresses; an error is raised with CUDA's own text."""
        c = {Tensor: lambda t: ctypes.c_void_p(t.data_ptr()), int: ctypes.c_int64, float: ctypes.c_double}
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.inputs.device).cuda_stream)
        with torch.cuda.device(self.inputs.device):
            code = getattr(self.cuda, function)(*(c[type(a)](a) for a in args), stream)
        if code:
            raise RuntimeError(f"{function}: {self.cuda.adam_error(code).decode()}")
# <<< shared block: adam


# >>> shared block: adam library
@functools.cache
def adam_library(device: torch.device):
    """adam_cuda.cu, beside this file, built for this GPU and loaded; False, said once, where that cannot be.

    Only C functions and no torch headers: seconds to build, not a minute. The lock is the kernel's and ends with its
    holder: one process builds, the others wait, and torch's own lock file, left by a build that was killed, is removed.
    """
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "adam_cuda.cu")
    try:
        if device.type != "cuda":
            raise OSError("no GPU")
        from torch.utils import cpp_extension
        arch = "%d%d" % torch.cuda.get_device_capability(device)
        with open(source, "rb") as f:
            key = hashlib.sha256(f.read() + arch.encode() + torch.__version__.encode()).hexdigest()[:12]
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
        folder = os.path.join(root, f"adam_cuda_{key}")
        os.makedirs(folder, exist_ok=True)
        os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)  # where pip puts ninja
        with open(os.path.join(folder, "builder"), "w") as builder:
            fcntl.flock(builder, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, "lock"))
            cpp_extension.load("adam_cuda", [source], build_directory=folder, is_python_module=False,
                               extra_cuda_cflags=["-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}"])
        library = ctypes.CDLL(os.path.join(folder, "adam_cuda.so"))
    except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError) as error:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0 or device.type == "cuda":
            print(f"adam: torch's fused Adam instead of adam_cuda.cu: {error}", file=sys.stderr)
        return False
    library.adam_error.restype, library.adam_chunk_numel.restype = ctypes.c_char_p, ctypes.c_int64
    return library
# <<< shared block: adam library


# >>> shared block: pieces
def stretches(shape, boxes, start: int, end: int) -> list[tuple[int, int, int]]:
    """A fragment as (place in the flattened full parameter, place in the fragment, numel), contiguous in both: one for a
    range of a whole parameter, one per row for a box of columns."""
    if not shape:
        shape, boxes = (1,), ((slice(0, 1),),)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    cut = [d for box in boxes for d, s in enumerate(box) if (s.start, s.stop) != (0, shape[d])]
    last = max(cut, default=0)  # behind this dim every box is whole, so a stretch runs through
    joined = next((d for d in range(len(shape)) if len({(box[d].start, box[d].stop) for box in boxes}) > 1), 0)
    found, local = [], 0
    for outer in itertools.product(*(range(s.start, s.stop) for s in boxes[0][:joined])):
        for box in boxes:
            for inner in itertools.product(*(range(s.start, s.stop) for s in box[joined:last])):
                full = sum(i * stride for i, stride in zip(outer + inner, strides)) + box[last].start * strides[last]
                numel = (box[last].stop - box[last].start) * strides[last]
                lo, hi = max(local, start), min(local + numel, end)
                if lo < hi:
                    found.append((full + lo - local, lo - start, hi - lo))
                local += numel
    return found


def overlaps(own: list, other: list) -> list[tuple[int, int, int]]:
    """What two lists of stretches of one parameter share: (place in the one fragment, place in the other, numel)."""
    own, other, shared, i, j = sorted(own), sorted(other), [], 0, 0
    while i < len(own) and j < len(other):
        (a, a_place, a_numel), (b, b_place, b_numel) = own[i], other[j]
        lo, hi = max(a, b), min(a + a_numel, b + b_numel)
        if lo < hi:
            shared.append((a_place + lo - a, b_place + lo - b, hi - lo))
        i, j = (i + 1, j) if a + a_numel <= b + b_numel else (i, j + 1)
    return shared


def deal(held: list[list[Fragment]], spread: bool = True) -> dict[str, list[tuple]]:
    """Who hands out what, each element once: name -> pieces (rank, boxes, start, end). held[r]: the fragments of rank r.

    What several ranks hold alike is cut into one piece for each of them or, without `spread`, taken from the first. A buffer
    is always taken from the first: nobody promises that buffers are alike."""
    pieces, blocks = {}, {}
    for rank, fragments in enumerate(held):
        for f in fragments:
            pieces.setdefault(f.name, [])
            blocks.setdefault((f.name, repr(f.boxes)), []).append((rank, f))
    for (name, _), holders in blocks.items():
        ends = sorted({e for _, f in holders for e in (f.start, f.end)})
        for lo, hi in zip(ends, ends[1:]):
            ranks = [r for r, f in holders if f.start <= lo and hi <= f.end]
            ranks = ranks if spread and holders[0][1].index != BUFFER else ranks[:1]
            cuts = [lo + (hi - lo) * k // max(len(ranks), 1) for k in range(len(ranks) + 1)]
            pieces[name] += [(r, holders[0][1].boxes, a, b) for r, a, b in zip(ranks, cuts, cuts[1:]) if a < b]
    return pieces
# <<< shared block: pieces


# >>> shared block: meeting
MEETING_S = 60.0  # how long a rank waits for the others to make the same call


class CheckpointError(ValueError):
    """What is wrong with a checkpoint or a state dict, or kept one from being written; raised on all ranks alike."""


def meet(engine, what: str) -> None:
    """Wait until every rank of the engine has come here; CheckpointError with those that have not after MEETING_S. Through the
    store, not by a collective, which a rank that comes alone could never leave."""
    if engine.world_size == 1:
        return
    me, ranks = dist.get_rank(), dist.get_process_group_ranks(engine.group)
    store = dist.distributed_c10d._get_default_store()
    visits = lambda r, more=0: store.add(f"{what} {ranks} {r}", more)  # a counter of each rank's calls
    own, deadline, late = visits(me, 1), time.monotonic() + MEETING_S, ranks
    while any(visits(r) < own for r in ranks):
        late = [r for r in late if visits(r) < own]  # one that came may give up and withdraw before we look again
        if time.monotonic() > deadline:
            visits(me, -1)  # the next call counts afresh
            if any(visits(r) < own for r in ranks if r != me):
                raise CheckpointError(f"{what} is for all ranks together: rank {late} did not call it within {MEETING_S:g} s")
            visits(me, 1)  # they came at the last moment, and count on this rank
            return
        time.sleep(0.01)


def together(engine, action) -> list:
    """action() on every rank; the results of all, in order of rank. What fails on one rank is a CheckpointError on all."""
    result = error = None
    try:
        result = action()
    except Exception as e:
        error = e
    answers = [(result, error and f"{type(error).__name__}: {error}".removeprefix("CheckpointError: "))]
    if engine.world_size > 1:
        # before: each rank has its result or its error.  after: all have those of all.  sends: what they pickle to; all wait.
        mine, answers = answers[0], [None] * engine.world_size
        dist.all_gather_object(answers, mine, group=engine.group)
    reasons: dict[str, list[int]] = {}
    for rank, (_, reason) in enumerate(answers):
        if reason:
            reasons.setdefault(reason, []).append(rank)
    if reasons:
        raise CheckpointError("; ".join(reason if len(ranks) == engine.world_size else f"rank {ranks}: {reason}"
                                        for reason, ranks in reasons.items())) from error
    return [result for result, _ in answers]
# <<< shared block: meeting


# >>> shared block: checkpoint
FORMAT = 1  # of the folder that `save` writes; any other is refused
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
OURS = re.compile(r"rank_\d{5}\.safetensors|meta\.json|extra\.pt")  # nothing else is ever removed
RANK_FILE = "rank_{:05d}.safetensors".format


def save_checkpoint(engine, directory: str, extra: dict) -> None:
    """Write rank_00000.safetensors ... (each rank's share of all fragments, and its random numbers' state), meta.json (who
    wrote which piece of what) and extra.pt. A collective; all ranks must see one file system.

        directory.tmp, synced | directory -> directory.old | directory.tmp -> directory | directory.old is removed

    Killed at any moment, this leaves a complete checkpoint, the old or the new one, where `load` finds it.
    """
    meet(engine, "save")
    directory, fragments, adam = os.path.realpath(directory), engine.fragments + engine.kept(), engine.optimizer
    tmp, old, steps = f"{directory}.tmp", f"{directory}.old", adam.steps.tolist()

    def describe():
        for key, value in extra.items():
            try:  # what `load` could not read is refused now
                torch.load(io.BytesIO(pickled({key: value})), weights_only=True)
            except Exception as e:
                raise CheckpointError(f"{key}: neither plain data nor an object whose state_dict() is, but {value!r:.80}") from e
        if unknown := [f"{f.name} ({f.master.dtype})" for f in fragments if f.master.dtype not in DTYPES.values()]:
            raise CheckpointError(f"the format does not know the dtype of {', '.join(unknown)}")
        trained = {f.name: {"group": adam.group_list[f.index], "step": steps[f.index]} for f in engine.fragments}
        return directory, [f.bare() for f in fragments], trained

    everyone = together(engine, describe)
    pieces = deal([bare for _, bare, _ in everyone])

    def prepare():
        if places := {place for place, _, _ in everyone} - {directory}:
            raise CheckpointError(f"ranks save to different folders: {directory} and {', '.join(places)}")
        if engine.rank == 0:
            for place in (directory, tmp, old):  # refuses before anything is touched
                files_of(place)
            if checkpoint_in(directory) == old:
                remove(directory)
                os.rename(old, directory)
            remove(tmp)
            remove(old)
            os.makedirs(tmp)

    def write():
        entries = [(f"random.{k}", t, 0, t.numel()) for k, t in random_states(engine.device).items()]
        for name, parts in pieces.items():
            for i, (rank, boxes, lo, hi) in enumerate(parts):
                if rank == engine.rank:
                    f = next(f for f in fragments if (f.name, f.boxes) == (name, boxes) and f.start <= lo and hi <= f.end)
                    entries += [(f"{name}.{kind}.{i}", getattr(f, kind), lo - f.start, hi - f.start) for kind in f.kinds()]
        return write_tensors(os.path.join(tmp, RANK_FILE(engine.rank)), entries)

    def publish():
        if engine.rank == 0:
            parameters = {f.name: {"shape": f.shape, "pieces": [
                (rank, [[(s.start, s.stop) for s in box] for box in boxes], lo, hi) for rank, boxes, lo, hi in pieces[f.name]]}
                for _, bare, _ in everyone for f in bare}
            for _, _, trained in everyone:
                for name in trained:
                    parameters[name] |= trained[name]
            meta = {"format": FORMAT, "mode": type(engine).__name__, "world_size": engine.world_size, "parameters": parameters,
                    "groups": [options_of(group) for group in adam.param_groups], "scale": engine.scaler.state.tolist(),
                    "dynamic_scale": bool(engine.scaler.interval), "files": {RANK_FILE(r): info for r, info in enumerate(files)}}
            write_file(os.path.join(tmp, "extra.pt"), [pickled(extra)])
            write_file(os.path.join(tmp, "meta.json"), [json.dumps([meta, digest(meta)]).encode()])
            sync(tmp)
            if os.path.exists(directory):
                os.rename(directory, old)
            os.rename(tmp, directory)
            sync(os.path.dirname(directory))
            remove(old)

    together(engine, prepare)
    files = together(engine, write)
    together(engine, publish)


def load_checkpoint(engine, directory: str, objects: dict) -> dict:
    """Take over what `save` wrote, under any strategy on any number of ranks, and give each of `objects` its state; returns the
    rest of `extra`. A collective; each rank reads its own slices only. All is checked before anything changes."""
    meet(engine, "load")
    directory, fragments = checkpoint_in(os.path.realpath(directory)), engine.fragments + engine.kept()
    adam, scaler = engine.optimizer, engine.scaler
    names = {}  # of all ranks: a pipeline stage knows only its own
    for own in together(engine, lambda: {f.name: (f.shape, adam.group_list[f.index] if f.index >= 0 else None) for f in fragments}):
        names |= own
    meta, extra, files, plan = {}, {}, {}, []

    def check():
        meta.update(read_meta(directory))
        saved = meta["parameters"]
        faults = [f"{name} is missing" for name in sorted(names.keys() - saved.keys())]
        faults += [f"{name} is unexpected" for name in sorted(saved.keys() - names.keys())]
        for name in sorted(names.keys() & saved.keys()):
            there = tuple(saved[name]["shape"]), saved[name].get("group")
            faults += [f"{name} has {what} {theirs} instead of {own}"
                       for what, theirs, own in zip(("shape", "param group"), there, names[name]) if theirs != own]
        if len(meta["groups"]) != len(adam.param_groups):
            faults.insert(0, f"{len(meta['groups'])} param groups instead of {len(adam.param_groups)}")
        if faults:
            raise CheckpointError(f"{directory} does not fit: {'; '.join(faults[:10])}")
        for file, info in meta["files"].items():
            files[file] = open_tensors(os.path.join(directory, file), info)
        try:
            extra.update(torch.load(os.path.join(directory, "extra.pt"), weights_only=True))
        except Exception as e:
            raise CheckpointError(f"{os.path.join(directory, 'extra.pt')} is missing or damaged: {type(e).__name__}: {e}") from e
        if absent := [key for key in objects if not isinstance(extra.get(key), Mapping)]:
            raise CheckpointError(f"{directory} has no state of {', '.join(absent)}; it has {', '.join(sorted(extra)) or 'none'}")
        for f in fragments:
            parts, own = [], stretches(f.shape, f.boxes, f.start, f.end)
            for i, (rank, boxes, lo, hi) in enumerate(saved[f.name]["pieces"]):
                boxes = [[slice(*ends) for ends in box] for box in boxes]
                parts += [(RANK_FILE(rank), i, *shared) for shared in overlaps(own, stretches(f.shape, boxes, lo, hi))]
            if sum(numel for *_, numel in parts) != f.end - f.start:
                raise CheckpointError(f"{directory} has not all of {f.name}")
            plan.append((f, parts))

    def read():
        for f, parts in plan:
            for kind in f.kinds() if parts else ():
                places = [(*files[file], f"{f.name}.{kind}.{i}", own, other, numel) for file, i, own, other, numel in parts]
                getattr(f, kind).copy_(read_tensor(f.end - f.start, places).view(getattr(f, kind).shape))
        adam.steps.copy_(torch.tensor([meta["parameters"][name]["step"] for name in adam.names], device="cpu"))
        for group, options in zip(adam.param_groups, meta["groups"]):
            set_options(group, options)
        kept = scaler.state[:2].clone()
        scaler.state.copy_(torch.tensor(meta["scale"], dtype=torch.float64, device="cpu"))
        if not (scaler.interval and meta["dynamic_scale"]):  # fp16 on one side only: the scale stays
            scaler.state[:2] = kept
        if meta["world_size"] == engine.world_size:
            set_random_states(engine.device, *files[RANK_FILE(engine.rank)])
        for key, thing in objects.items():
            thing.load_state_dict(extra.pop(key))

    try:
        together(engine, check)
        together(engine, read)
    finally:
        for file, _, _ in files.values():
            file.close()
    return extra
# <<< shared block: checkpoint


# >>> shared block: checkpoint files
def write_tensors(path: str, entries: list[tuple[str, Tensor, int, int]]) -> dict:
    """The safetensors format: length of the header, header, raw bytes. (key, tensor, start, end): elements [start, end) of the
    flattened tensor. They pass through host memory one at a time, for which the safetensors package has no call."""
    entries = sorted(entries, key=lambda entry: -entry[1].element_size())  # so each starts at a multiple of its element's size
    name_of, header, offset = {dtype: name for name, dtype in DTYPES.items()}, {}, 0
    for key, t, lo, hi in entries:
        ends = [offset, offset := offset + (hi - lo) * t.element_size()]
        header[key] = {"dtype": name_of[t.dtype], "shape": [hi - lo], "data_offsets": ends}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = (t.detach().reshape(-1)[lo:hi].to("cpu").contiguous().view(torch.uint8).numpy() for _, t, lo, hi in entries)
    write_file(path, itertools.chain([len(text).to_bytes(8, "little") + text], parts))
    return {"bytes": 8 + len(text) + offset, "header_sha256": hashlib.sha256(text).hexdigest()}


def open_tensors(path: str, info: dict) -> tuple:
    """(open file, header, where the tensors begin). CheckpointError unless size and header are as they were written."""
    if not os.path.exists(path):
        raise CheckpointError(f"{path} is missing")
    if (size := os.path.getsize(path)) != info["bytes"]:
        raise CheckpointError(f"{path} has {size} bytes instead of {info['bytes']}")
    file = open(path, "rb")
    length = int.from_bytes(file.read(8), "little")
    text = file.read(min(length, size))
    if hashlib.sha256(text).hexdigest() != info["header_sha256"]:
        raise CheckpointError(f"{path} has a damaged header")
    return file, json.loads(text), 8 + length


def read_tensor(numel: int, places: list[tuple]) -> Tensor:
    """(numel,) on the CPU, put together from (file, header, begin, key, own place, place in the entry, numel)."""
    out = torch.empty(numel, dtype=DTYPES[places[0][1][places[0][3]]["dtype"]], device="cpu")
    size, view = out.element_size(), memoryview(out.view(torch.uint8).numpy())
    for file, header, begin, key, own, other, n in places:
        file.seek(begin + header[key]["data_offsets"][0] + other * size)
        if file.readinto(view[own * size : (own + n) * size]) != n * size:
            raise CheckpointError(f"{file.name} ends in {key}")
    return out


def checkpoint_in(directory: str) -> str:
    """The folder itself or, if a save was killed between its renames, directory.old."""
    complete = [os.path.exists(os.path.join(place, "meta.json")) for place in (directory, f"{directory}.old")]
    return f"{directory}.old" if complete == [False, True] else directory


def refuse_extra_state(state_dict: dict) -> dict:
    """The state dict itself. CheckpointError if it holds more than tensors, from a module's get_extra_state()."""
    if extra := [key for key, value in state_dict.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(f"extra state of modules is not supported: {', '.join(extra[:5])}")
    return state_dict


def read_meta(directory: str) -> dict:
    path = os.path.join(directory, "meta.json")
    if not os.path.exists(path):
        raise CheckpointError(f"there is no checkpoint in {directory}")
    try:
        with open(path) as file:
            meta, written = json.load(file)
        version = meta["format"]
    except (ValueError, TypeError, LookupError) as e:
        raise CheckpointError(f"{path} is damaged: {e}") from e
    if version != FORMAT:
        raise CheckpointError(f"{path} is of format {version}; this code reads format {FORMAT}")
    if digest(meta) != written:
        raise CheckpointError(f"{path} is damaged: its checksum is another")
    return meta


def digest(meta: dict) -> str:
    return hashlib.sha256(json.dumps(json.loads(json.dumps(meta)), sort_keys=True).encode()).hexdigest()


def pickled(extra: dict) -> bytes:
    file = io.BytesIO()
    torch.save({k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in extra.items()}, file)
    return file.getvalue()


def options_of(group: dict) -> dict:
    """A param group's options, lr and the like, as JSON takes them."""
    options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
    return {k: v for k, v in options.items() if isinstance(v, (int, float, str, tuple, type(None)))}


def set_options(group: dict, options: dict) -> None:
    for key, value in options.items():
        if isinstance(group.get(key), Tensor):  # a learning rate that the user keeps on the device
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state(), "python": torch.tensor(random.getstate()[1], device="cpu")}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_states(device: torch.device, file, header: dict, begin: int) -> None:
    """Those of this rank's file; another strategy's rank draws other numbers in its place, but as random ones."""
    for kind in random_states(device):
        if (key := f"random.{kind}") in header:
            state = read_tensor(header[key]["shape"][0], [(file, header, begin, key, 0, 0, header[key]["shape"][0])])
            if kind == "torch":
                torch.set_rng_state(state)
            elif kind == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                random.setstate((3, tuple(state.tolist()), None))


def write_file(path: str, parts) -> None:
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: str) -> None:
    """Names, too, are on the disk only after an fsync, that of their folder."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def files_of(folder: str) -> list[str]:
    """The files in a checkpoint's folder, none if there is no such folder. CheckpointError for anything else in it."""
    names = os.listdir(folder) if os.path.isdir(folder) else [folder] if os.path.exists(folder) else []
    if foreign := [name for name in names if not OURS.fullmatch(name)]:
        raise CheckpointError(f"{folder} is in the way: {', '.join(sorted(foreign)[:3])} is not part of a checkpoint")
    return [os.path.join(folder, name) for name in names]


def remove(folder: str) -> None:
    for file in files_of(folder):
        os.unlink(file)
    if os.path.isdir(folder):
        os.rmdir(folder)
# <<< shared block: checkpoint files


# >>> shared block: full state
def gather_full(engine, fragments: list[Fragment], kind: str):
    """Yield (name, the whole tensor on the CPU of rank 0 or None elsewhere) for one parameter after the other; a collective.
    kind: master, exp_avg, exp_avg_sq."""
    held = together(engine, lambda: [f.bare() for f in fragments])
    of_name = {f.name: f for bare in held for f in bare}
    for name, parts in deal(held, spread=False).items():
        shape, dtype = of_name[name].shape, of_name[name].master.dtype
        full = torch.empty(math.prod(shape), dtype=dtype, device="cpu") if engine.rank == 0 else None
        for rank, boxes, lo, hi in parts:
            piece = None
            if engine.rank == rank:
                f = next(f for f in fragments if (f.name, f.boxes) == (name, boxes) and f.start <= lo and hi <= f.end)
                piece = getattr(f, kind).reshape(-1)[lo - f.start : hi - f.start]
            # before: `rank` holds the piece.  after: rank 0 too.  sends: the piece, and both wait.
            if rank > 0 and engine.rank == rank:
                dist.send(piece.to(engine.device).contiguous(), group=engine.group, group_dst=0)
            if rank > 0 and engine.rank == 0:
                piece = torch.empty(hi - lo, dtype=dtype, device=engine.device)
                dist.recv(piece, group=engine.group, group_src=rank)
            if engine.rank == 0:
                for place, own, numel in stretches(shape, boxes, lo, hi):
                    full[place : place + numel] = piece[own : own + numel]
        yield name, None if full is None else full.view(shape)


def scatter_full(engine, fragments: list[Fragment], kind: str, full: Mapping[str, Tensor]) -> None:
    """The inverse: rank 0 has `full`, whole tensors by name (absent: zeros), every rank gets what its fragments hold. Rank 0 has
    checked names and shapes; one parameter at a time is whole on the device."""
    held = together(engine, lambda: [f.bare() for f in fragments])
    for name, some in {f.name: f for bare in held for f in bare}.items():
        whole = torch.zeros(some.shape, dtype=some.master.dtype, device=engine.device)
        if engine.rank == 0 and name in full:
            whole.copy_(full[name])
        if engine.world_size > 1 and whole.numel():
            # before: rank 0 has the tensor.  after: all have it.  sends: the whole of it, and everybody waits.
            dist.broadcast(whole, group=engine.group, group_src=0)
        for f in fragments:
            if f.name == name:
                target = torch.empty(f.end - f.start, dtype=whole.dtype, device=engine.device)
                for place, own, numel in stretches(f.shape, f.boxes, f.start, f.end):
                    target[own : own + numel] = whole.view(-1)[place : place + numel]
                getattr(f, kind).copy_(target.view(getattr(f, kind).shape))


def export_adam(engine) -> dict:
    """Adam's state as torch.optim.AdamW.state_dict() has it, with parameter names for numbers, on the CPU of rank 0; {} on the
    others. A collective."""
    name_of, adam = {p: name for name, p in engine.module.named_parameters()}, engine.optimizer
    steps = dict(zip(adam.names, adam.steps.tolist()))
    everyone = together(engine, lambda: (steps, [[name_of[p] for p in g["params"]] for g in adam.param_groups]))
    state: dict[str, dict] = {}
    for own, _ in everyone:
        for name, step in own.items():
            if step:  # torch, too, has no entry for a parameter that was never updated
                state[name] = {"step": torch.tensor(step, device="cpu")}
    for kind in MOMENTS:
        for name, tensor in gather_full(engine, engine.fragments, kind):
            if name in state:
                state[name][kind] = tensor
    groups = [{**{k: v for k, v in group.items() if k != "params"}, "decoupled_weight_decay": group["adamw"],
               "params": list(dict.fromkeys(name for _, names in everyone for name in names[k]))}
              for k, group in enumerate(adam.param_groups)]
    return {"state": state, "param_groups": groups} if engine.rank == 0 else {}


def import_adam(engine, state_dict: Mapping) -> None:
    """Take over rank 0's `state_dict`: what `export_adam` returns, or torch's own of an AdamW that was given named parameters.
    A collective. CheckpointError, and nothing changed, for other names, shapes or groups."""
    adam, given = engine.optimizer, {}
    everyone = together(engine, lambda: {f.name: (f.shape, adam.group_list[f.index]) for f in engine.fragments})
    own = {name: entry for names in everyone for name, entry in names.items()}

    def check():
        if engine.rank > 0:
            return None
        groups = state_dict["param_groups"]
        if len(groups) != len(adam.param_groups):
            raise CheckpointError(f"{len(groups)} param groups instead of {len(adam.param_groups)}")
        for k, group in enumerate(groups):
            if group.get("amsgrad") or group.get("maximize"):
                raise CheckpointError(f"param group {k}: amsgrad and maximize are not supported")
            for key, name in zip(group["params"], group.get("param_names", group["params"])):
                entry = state_dict["state"].get(key, {})
                if name not in own and entry:
                    raise CheckpointError(f"{name} is not a trained parameter")
                shapes = [tuple(entry[kind].shape) for kind in MOMENTS if entry]
                if name in own and (own[name][1] != k or set(shapes) - {own[name][0]}):
                    raise CheckpointError(f"{name}: shapes {shapes} in group {k} instead of {own[name][0]} in group {own[name][1]}")
                given[name] = entry
        if missing := own.keys() - given:
            raise CheckpointError(f"missing {', '.join(sorted(missing))}")
        options = [{k: v for k, v in options_of(group).items() if k in old}
                   | {"adamw": group.get("decoupled_weight_decay", old["adamw"])} for group, old in zip(groups, adam.param_groups)]
        return {name: float(entry.get("step", 0)) for name, entry in given.items()}, options

    steps, options = together(engine, check)[0]
    for kind in MOMENTS:
        scatter_full(engine, engine.fragments, kind, {name: entry[kind] for name, entry in given.items() if entry})
    adam.steps.copy_(torch.tensor([steps[name] for name in adam.names], device="cpu"))
    for group, new in zip(adam.param_groups, options):
        set_options(group, new)
# <<< shared block: full state


# >>> shared block: launch
@contextlib.contextmanager
def distributed(timeout_s: float = 600.0):
    """Join the ranks that torchrun started (none: this process is the only one) and yield this rank's device.

    NCCL where there are GPUs, gloo elsewhere. More local ranks than GPUs share them: through NCCL from 2.30 on,
    through gloo below. A collective that waits longer than `timeout_s` fails. However a rank ends, all of them end, and
    the message names the rank that failed first. The group is destroyed at a normal exit.
    """
    # 2.14 renames them to all_gather_single and reduce_scatter_single; 2.11 knows only these names.
    warnings.filterwarnings("ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor)", FutureWarning)
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    n_gpus, limit = torch.cuda.device_count(), timedelta(seconds=timeout_s)
    device = torch.device("cuda", local_rank % n_gpus) if n_gpus else torch.device("cpu")
    backend = "nccl" if n_gpus else "gloo"
    if n_gpus:
        torch.cuda.set_device(device)
    if local_size > n_gpus > 0:
        version = ctypes.c_int()  # of the library that is loaded; torch.cuda.nccl.version() is the one torch was built with
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
        backend = "nccl" if version.value >= 23000 else "gloo"
        os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0")
        if local_rank == 0:
            print(f"{local_size} ranks share {n_gpus} GPU(s) through {backend} (NCCL {version.value})", file=sys.stderr)
    # The optimizer's first use imports this module, whose functions have the then current group as a default argument: a group
    # that outlives destroy_process_group and whose gloo threads can abort the process at exit. So import it before.
    from torch.distributed.nn import functional  # noqa: F401
    alone = dist.HashStore(), 0, 1
    store, rank, size = next(dist.rendezvous("env://", timeout=limit)) if "RANK" in os.environ else alone
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=limit)
    try:
        yield device
    except Exception as error:
        if size > 1 and explain_failure(store, rank, size, error):
            raise SystemExit(1) from None  # another rank's traceback is the one to read
        raise
    except KeyboardInterrupt:
        raise SystemExit(f"rank {rank} of {size}: interrupted") from None
    except SystemExit:  # sys.exit() inside is an end as normal as any
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def start_two_cpu_ranks() -> None:
    """`python file.py`: this process becomes `torchrun --nproc_per_node 2 file.py` without GPUs."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    os.execve(sys.executable, torchrun + sys.argv, env)
# <<< shared block: launch


# >>> shared block: failures
def explain_failure(store: dist.Store, rank: int, size: int, error: Exception) -> bool:
    """Say on stderr, in one line a rank, which rank failed first and why. True if that was another rank.

    Through the store, which lives in torchrun's own process: the first to fail leaves its reason there. A rank that lost a
    connection or waited too long is rarely the first; it gives the others time to speak, and names those who do not.
    """
    own = f"rank {rank} of {size}: {type(error).__name__}: {error}"
    lost = re.search(r"(?i)timed? ?out|timeout|connection (closed|reset)|broken pipe|no longer alive", str(error))
    first, silent = own, []
    with contextlib.suppress(Exception):  # the store is gone if torchrun or its node is
        time.sleep(1 if lost else 0)
        first = store.compare_set("first failure", "", own).decode()
        store.set(f"failed {rank}", own)
        time.sleep(2 if lost else 0)  # torchrun ends all ranks when the first one exits
        silent = [r for r in range(size) if not store.check([f"failed {r}"])]
    if first != own:
        print(f"rank {rank} of {size}: ends because of {first}", file=sys.stderr, flush=True)
    elif lost and silent:
        who = ", ".join(map(str, silent))
        print(f"rank {rank} of {size}: no word from rank {who}: killed, or late", file=sys.stderr, flush=True)
    else:
        print(f"{own.splitlines()[0]} (the first to fail)", file=sys.stderr, flush=True)
    return first != own
# <<< shared block: failures


# ---- demonstration: python gemini.py ---------------------------------------------------------------------------------


def demonstration(device: torch.device) -> None:
    """Train a small transformer for three steps in float64 beside one process that sees the whole batch, then in bf16 under several
    budgets, and print what is held, sent and moved beside the formulas of the docstring, and a timeline."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def build(dtype):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Embedding(1000, 128), nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.Linear(16 * 128, 10))
        return model.to(device, dtype)

    torch.manual_seed(1)
    tokens, labels = torch.randint(1000, (4 * n, 16)).to(device), torch.randint(10, (4 * n,)).to(device)
    mine = slice(4 * rank, 4 * rank + 4)

    def loss_fn(logits, batch):
        return nn.functional.cross_entropy(logits, batch[1])

    model, plain = build(torch.float64), build(torch.float64)

    def others(dtype, **knobs):
        """Bytes on the device that are not the engine's; none on CPUs, where nobody counts them."""
        engine = Gemini(build(dtype), **knobs)
        engine.forward_backward((tokens[mine], labels[mine]), loss_fn=loss_fn)
        return max(engine.plan.others) + (device.type == "cuda") * 2**20

    engine = Gemini(model, lr=1e-3, eps=1e-3, weight_decay=0.01, max_norm=1.0, precision="fp32", chunk_mb=0.5,
                    device_budget=others(torch.float64, precision="fp32", chunk_mb=0.5) + 6 * 2**20)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.01)
    grad_gap = 0.0
    for _ in range(3):
        engine.forward_backward((tokens[mine], labels[mine]), micro_batches=2, loss_fn=loss_fn)
        adam.zero_grad()
        loss_fn(plain(tokens), (tokens, labels)).backward()
        for name, p in plain.named_parameters():
            grad_gap = max(grad_gap, (engine.full_grad(name) - p.grad.cpu()).abs().max().item())
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()
        engine.step()
    with engine.gathered() as whole, torch.no_grad():
        gap = max((p - q).abs().max().item() for p, q in zip(whole.parameters(), plain.parameters()))

    lines, shown = [], None
    numel = sum(p.numel() for p in plain.parameters())
    room = others(torch.float32, chunk_mb=0.25)
    for budget in (1.3, 2.0, 4.0, 8.0, 16.0):  # bytes per parameter
        engine = Gemini(build(torch.float32), lr=1e-3, precision="bf16", chunk_mb=0.25, device_budget=room + int(budget * numel))
        for step in range(3):
            engine.most_device_bytes, before = 0, [chunk.gathers for chunk in engine.chunks]
            there, engine.timeline = {*engine.home.gathered}, []
            loss = engine.forward_backward((tokens[mine], labels[mine]), loss_fn=loss_fn)
            if budget == 1.3 and step == 1:
                shown = timeline_of(engine, there)
            engine.step()
            gathers = sum(chunk.gathers - g for chunk, g in zip(engine.chunks, before))
        on_device = sum(chunk.on_device for chunk in engine.chunks)
        lines.append(f"{budget:8.1f}{engine.most_device_bytes / numel:10.2f}{on_device:12}/{len(engine.chunks)}"
                     f"{sum(engine._simulate().gathers.values()):12}{gathers:10}{engine.traffic.get('all_gather', 0) / numel:12.2f}"
                     f"{engine.traffic.get('reduce_scatter', 0) / numel:16.2f}{loss:8.4f}")
    if rank:
        return
    waste = max(engine.waste.values())
    print(f"\n{n} ranks on {device.type}, {numel:,} parameters in {len(engine.chunks)} chunks, {waste:.1%} of their room empty")
    print(f"largest distance from one process, float64, 3 steps: gradients {grad_gap:.1e}, parameters {gap:.1e}")
    print("bytes per parameter on the device, Adam there, chunks gathered, bytes sent per parameter; rank 0, bf16, third step")
    print("  budget      most   optimizers     planned  gathered  all_gather  reduce_scatter    loss")
    print("\n".join(lines))
    print("\n".join(shown))


def timeline_of(engine: Gemini, there: set[int]) -> list[str]:
    """What happened in a pass under the tightest budget, a line a moment, at most 30 in all. there: chunks gathered before it."""
    lines = ["second step at 1.3 bytes per parameter, chunks by number; (moment) of backward",
             " moment   reads     fetched   prefetched  evicted   sent      gathered then"]
    for moment, reads in enumerate(engine.plan.order[:28]):
        what = {"gather": [], "release": [], "sum": []}
        for when, name, chunk in engine.timeline:
            if when == moment:
                what[name].append(chunk)
        there = (there | {*what["gather"]}) - {*what["release"], *what["sum"]}
        columns = (reads, [k for k in what["gather"] if k in reads], [k for k in what["gather"] if k not in reads], what["release"],
                   what["sum"], sorted(there))
        name = f"({moment})" if engine.plan.backward[moment] else f"{moment} "
        lines.append(f"{name:>7}   " + "".join(f"{' '.join(map(str, chunks)) or '-':{width}}"
                                               for chunks, width in zip(columns, (10, 10, 12, 10, 10, 0))))
    return lines


def sent_bytes() -> int:
    """Bytes that this process's TCP connections have delivered so far, as Linux counts them; 0 elsewhere."""
    total = 0
    for fd in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as s:
                    if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                        info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                        total += struct.unpack_from("Q", info, 120)[0]  # tcp_info.tcpi_bytes_acked
    return total


if __name__ == "__main__":
    if "RANK" not in os.environ:
        start_two_cpu_ranks()
    with distributed() as rank_device:
        demonstration(rank_device)
