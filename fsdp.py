"""FSDP: every rank stores 1/N of everything and borrows the rest, one unit at a time.

A unit is a block of the model, a BERT layer say. Just before it computes, its weights are gathered from all ranks; just after,
they are freed again. Backward gathers them once more, and its gradients leave at once, summed, for their owners.

                 rank 0      rank 1      bytes per rank; Ψ parameters, N ranks, half precision
    master, m, v [ A |   ]   [   | B ]   12Ψ/N     fp32 weights and Adam's two moments, all that is kept between steps; as
                                                   much for fp32 models, whose weights are their own masters
    grads        [ A |   ]   [   | B ]   2Ψ/N      from backward to step; 4Ψ/N where several micro-batches add up in fp32
    gathered     [ A | B ]   [ A | B ]             weights of the root, and of at most two units
    unreduced    [ A | B ]   [ A | B ]             gradients of the root, and of at most two units
                                                   (gloo: and (N-1)/N of one unit, for what is received)
    GPT-2 XL (Ψ = 1.56e9) on N = 8: 2.7 GB kept, and at most 2 x 164 MB (root) and 4 x 61 MB in passing; ddp.py has 24.9 GB.

    units        root: embeddings, pooler, head, whatever is in no other unit or in two | layer 1 | layer 2 | layer 3
    forward      gather root, 1 | gather 2, compute 1, free 1 | gather 3, compute 2, free 2 | compute 3, free 3
    backward     gather 3       | gather 2, compute 3 | send 3, gather 1, compute 2 | send 2, compute 1 | send 1 and the root

    The weights of a unit are one flat tensor, cut into N equal slices; a parameter, a view of it, may lie across two of them:

        flat     | weight 1           | bias 1 | weight 2                     | bias 2 |.. |    .. padding
        slices   |       rank 0           |       rank 1           |      rank 2           |

    all-gather:     every rank brings one slice and leaves with all N.
    reduce-scatter: every rank brings N slices, rank r leaves with the sum of all slices r.

    1. forward        before a unit computes: wait for its gather, start the next one's. After it: free.
    2. backward       autograd reaches a unit's output: copy the gradients of the unit that it has left over that unit's weights
                      and send them; wait for this unit's gather, start the next one's.
    3. step           squares of the own gradients, summed over ranks: norm, overflow, clip. Adam on the own slices. Then
                      nothing need be sent: the next gather rounds and sends what is new.

    Bytes sent per rank and step, half precision: (N-1)/N * 2Ψ for each of two gathers (one for the root, which stays from the
    first forward to the last backward, and one for all with reshard=False), and as much for the reduce-scatter: 1.5 times
    what DDP's all-reduce sends. k micro-batches: k times as much, but for the root's gather. GPT-2 XL on 8 ranks, bf16: 8.0 GB.

Freeing a unit means that its storage becomes empty (`resize_(0)`), and that its parameters get a single NaN for all data and
another class (class Sharded), whose torch functions raise an error that names parameter and unit: nobody computes with what is
not there. To read or set weights between steps: `with engine.gathered(): ...`. Tensors that autograd has saved point at the same
storage, which is full again before they are read: of the nodes that are ready autograd runs the one that forward made last, so
when a gradient reaches the output of a unit, all that forward computed later is done. Hence a rule: what a unit computes leaves
it as its output, or in an attribute of one of its modules.

Modules with running statistics (BatchNorm), and those that keep_fp32= names, keep fp32 parameters and buffers, and inputs
and outputs are cast around them. Other floating buffers are cast with the parameters if they are in the state dict; what is not
(tables computed by the model) stays as it is. Frozen parameters are cast and sharded too. Flattening makes parameters contiguous.

A model built on the `meta` device takes no memory: FSDP(model, device=...) makes 1/N of it, and `load` (a checkpoint of any
strategy) or `load_pretrained` (safetensors as the Hugging Face hub has them) read each rank's slices alone.

`offload=True` keeps in host memory, per rank: masters and moments 12Ψ/N, a half-precision copy of the own slice 2Ψ/N, which gathers
begin with, and gradients 2Ψ/N, with micro-batches that add up 6Ψ/N. Adam runs on the CPU. (fp32: 12Ψ/N, no copy, 4Ψ/N, 8Ψ/N.)

All ranks run the same units in the same order, as often; under NCCL `step` compares, skips the step where they differ, and the next
one raises. A rank that has no samples for a micro-batch repeats the gathers and sums of its last one; if there was none, it
takes it that units run in the order in which they are registered. Left out: a second mesh axis that replicates shards, sparse
gradients, complex parameters, models spread over several devices, a unit inside a unit. Not here yet, and an error that says
so: capture.

ZeRO stage 3, arXiv:1910.02054 (§5.3; traffic §7.2.2); PyTorch FSDP, arXiv:2304.11277 (units §3.2.1, prefetch §3.3.2).

    engine = FSDP(model, lr=1e-4, weight_decay=0.01, precision="bf16")
    for batch in loader:                                    # this rank's share of the global batch
        loss = engine.forward_backward(batch, micro_batches=4)
        engine.step()

`python fsdp.py` trains a small transformer on two CPU ranks, puts the formulas above beside what it measures, and the weights
beside those of one process.
"""
import contextlib
import copy
import ctypes
import dataclasses
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
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGN = 8  # elements: parameters and slices start on 16 bytes in half precision, so 16-byte accesses fit
ENGINES = weakref.WeakKeyDictionary()  # model -> a weak reference to its engine's `_let_go`, which the next engine calls
HALF = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(eq=False)
class Flat:
    """Parameters of one unit that have one dtype and are all trained or all frozen, one after the other. Full tensors are
    (N*S,), slices (S,); rank r's is [r*S, (r+1)*S). `views[i]`: parameter i's place in `full`, its .data while it is there."""

    full: Tensor  # weights from gather to free; in backward then gradients, until summed; else its storage is empty
    views: dict[int, Tensor]
    starts: dict[int, int]  # where those begin
    own: slice
    master: Tensor  # (S,), all that is kept of the weights, in fp32 or what is wider; frozen weights as they are
    store: Tensor  # (S,) what a gather begins with: the master or, offloaded, its half-precision copy in host memory
    trained: bool
    tag: int  # of its messages under gloo: 2 * tag for gathers, 2 * tag + 1 for sums
    shard: Tensor | None = None  # (S,) gradient; its storage is empty from step to backward
    address: int = 0  # of `shard`, as Adam knows it
    rows: tuple[int, int] = (0, 0)  # from, to: its fragments in Adam's table
    landing: Tensor | None = None  # (S,) offload: where summed gradients land in host memory
    landed: "Fence | None" = None  # the copy into it
    adds_up: bool = False  # what has landed is to be added to `shard`, not to replace it
    whole_grad: Tensor | None = None  # (N*S,) reduce_each=False: gradients of this rank's micro-batches so far
    owned: "list[tuple[Fragment, int]]" = dataclasses.field(default_factory=list)  # this rank's, each with its start in the slice
    gathering: "SliceGather | Fence | None" = None  # the gather in flight
    summing: "SliceSum | None" = None  # the reduce-scatter in flight


@dataclasses.dataclass(eq=False)
class Unit:
    """Modules that are gathered and freed together."""

    name: str
    number: int  # 0 is the root
    module: nn.Module
    members: list[int]  # indices of its parameters in engine.all_params
    flats: list[Flat] = dataclasses.field(default_factory=list)
    state: str = "sharded"  # -> "gathering" -> "whole" -> "sharded", or in backward "whole" -> "summing" -> "sharded"
    calls: int = 0  # forwards whose output backward has not reached yet; 0 again at its end
    launched: bool = False  # its gradients have been sent in this backward
    gathers: int = 0  # since construction


@dataclasses.dataclass(eq=False)
class Call:
    """One forward of one unit."""

    unit: Unit
    encloses: bool  # another unit's forward began inside this one
    version: int  # of the weights
    reached: bool = False  # by a backward, at its output


class FSDP:
    """Fully sharded training of `model` with Adam; see the file's docstring for the idea and the list of steps.

    params: None for all parameters, or param groups as any torch optimizer takes them. A parameter that is in no group is
    not trained. precision: "fp32" leaves the model as it is; "bf16" and "fp16" compute in that and keep fp32 masters, fp16 with
    a dynamic loss scale. max_norm: clip to this global L2 norm, 0 for off.
    wrap: which modules are units, by default every child, itself having children, of an nn.ModuleList or nn.Sequential; the
    outermost ones. keep_fp32: which modules stay in fp32 in a half-precision model. Both: a function of the module, or class names
    ("BertLayer,BertPooler"). reshard: False keeps weights from forward to backward, for fewer gathers. prefetch: False starts
    no gather ahead of its unit. reduce_each: False lets micro-batches inside `no_sync` keep whole gradients, 2Ψ in the weights'
    dtype, which the last one sends: one reduce-scatter instead of k. offload: what is kept, in host memory. device: where a model
    that was built on `meta` shall live; by default the current GPU, or under gloo the CPU. initial_scale, growth_interval,
    min_scale, max_scale: of fp16's loss scale, see LossScale. group: the process group to shard over, None for all ranks (or a
    single process without any group).
    Parameters and buffers are broadcast from the group's first rank, so models may be built with different seeds. An engine
    built on the model of another FSDP takes it over, with its masters.
    Raises ValueError where ranks bring different models, parameters live on several devices, or an argument is wrong.
    """

    def __init__(self, model: nn.Module, params=None, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                 adamw=True, precision="bf16", max_norm=0.0, initial_scale=2.0**16, growth_interval=2000, min_scale=1.0,
                 max_scale=2.0**24, wrap=None, keep_fp32=None, reshard=True, prefetch=True, reduce_each=True, offload=False,
                 device=None, group=None):
        if precision not in HALF:
            raise ValueError(f"precision must be one of {', '.join(HALF)}, got {precision!r}")
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, got {growth_interval}")
        self.group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        holder = ENGINES.get(model, lambda: None)()  # of another engine, which must let the model go
        self._blank = any(p.is_meta for p in model.parameters())  # True until weights are loaded
        if self._blank:
            leave_meta(model, device)
        self._blank = self._blank or holder is not None and holder.__self__._blank
        devices = {t.device for t in (*model.parameters(), *model.buffers())}
        if len(devices) != 1:
            raise ValueError(f"the model must live on one device, found {sorted(map(str, devices)) or 'no parameters'}")
        self._model, self.device = model, devices.pop()
        backends = dist.get_backend(group) if self.world_size > 1 else ""
        self.by_hand = self.world_size > 1 and backends != "nccl" and f"{self.device.type}:nccl" not in backends  # see SliceSum
        self.half, self.offload = HALF[precision], offload
        self.reshard, self.prefetch, self.reduce_each = reshard, prefetch, reduce_each
        self.traffic: dict[str, int] = {}  # bytes that this rank sent in the last step, by collective
        self._sent_bytes: dict[str, int] = {}  # the same, of the step that is under way

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
        self.units = self._find_units(matcher(model, "wrap", wrap))
        kept = matcher(model, "keep_fp32", keep_fp32)
        stays = [name for name, module in model.named_modules() if kept and kept(module)]
        self._check_same_model((stays, precision, offload, reshard, prefetch, reduce_each, max_norm, adamw, initial_scale,
                                growth_interval, min_scale, max_scale, self._blank, bool(self.optimizer.cuda)))
        if holder is not None:
            holder()
        self._plain_dtypes = {name: t.dtype for name, t in model.state_dict().items() if isinstance(t, Tensor)}
        # before: every rank has its own initial values.  after: all have those of the group's first rank.
        # sends: each tensor once, at construction only (not in `traffic`); everybody waits.
        for t in (*(() if self._blank else model.parameters()), *model.buffers()):
            self._broadcast(t.data)

        self._side = torch.cuda.Stream(self.device) if offload and self.device.type == "cuda" else None
        self._pinned = True  # until the system refuses it
        hooks = self._cast_model(kept)
        me = weakref.ref(self)  # the garbage collector does not see through hooks of tensors: a plain reference would stay for ever

        def on_grad(index, param):
            if (engine := me()) is not None:
                engine._on_grad(index, param)

        hooks += [self.all_params[i].register_post_accumulate_grad_hook(functools.partial(on_grad, i)) for i in self._trained]
        self._classes = [type(p) for p in self.all_params]
        self._sharded_classes = [sharded_class(*of) for of in zip(self._classes, self.all_names, self._unit_names())]
        self._lent_classes = {own: type("Lent" + own.__name__, (Lent, own), {"engine": me}) for own in set(self._classes)}
        self._absent = [torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=self.device).expand(shape)
                        for dtype, shape in zip(self._dtypes.values(), self._shapes)]  # of one element each
        self._lay_out()
        self._make_shards()
        self._lay_out_running_statistics()

        self._sync = True  # False inside no_sync
        self._in_backward = False
        self._reduced = False  # the shards hold sums over the ranks
        self._running: list[Unit] = []  # whose forward has begun and not ended
        self._enclosing: set[Unit] = set()  # those inside whose forward another unit's has begun
        self._order: list[Unit] = []  # of this forward
        self._last_order: list[Unit] = []  # of the forward before, by which gathers are started ahead
        self._ahead: Unit | None = None  # gathered ahead of its time
        self._calls: list[Call] = []  # of the last forward, in order: backward meets them from the end
        self._version = 0  # of the weights: graphs made with another are of no use
        self._lent = False  # inside gathered()
        self.backward_needs_all = False  # a graph has grown from weights that gathered() lent
        self._open: list[Unit] = []  # reached by this backward, gradients not sent yet
        self._recomputed: Unit | None = None  # by activation checkpointing, last
        self._in_flight: list[Unit] = []  # gradients sent and not received yet: one unit at most
        self._log: list[tuple[str, Unit]] = []  # gathers and sums of this backward, without the root's
        self._usual_forward: list[Unit] = self.units[1:]  # for a rank without samples: what the last forward ran,
        self._usual_backward: list[tuple[str, Unit]] | None = None  # and what the last backward gathered and summed
        self._history, self._compared = 0, None  # a hash of all gathers and sums since the last step; have the ranks the same?
        for unit in self.units:
            hooks += self._hook(unit)
        self._hooks = hooks
        ENGINES[model] = weakref.WeakMethod(self._let_go)
        self.zero_grad()  # gradients from before belong to nobody
        self._sent_bytes = {}  # what construction sent is no step's

    # ---- 0. before training: who holds what --------------------------------------------------------------------------

    def _find_units(self, is_unit) -> list[Unit]:
        """The root, and the outermost modules that are units. A parameter belongs to the unit that holds all its users, else to the
        root."""
        chosen: list[tuple[str, nn.Module]] = []

        def visit(prefix, parent):
            listed = isinstance(parent, (nn.ModuleList, nn.Sequential))
            for name, child in parent.named_children():
                if is_unit(child) if is_unit else listed and any(True for _ in child.children()):
                    chosen.append((prefix + name, child))
                else:
                    visit(f"{prefix}{name}.", child)

        visit("", self._model)
        inside = [set(module.modules()) for _, module in chosen]
        homes: dict[nn.Parameter, set[int]] = {p: set() for p in self.all_params}
        for module in self._model.modules():
            for p in module._parameters.values():
                if p is not None:
                    homes[p].update([k for k, modules in enumerate(inside, 1) if module in modules] or [0])
        unit_of = [home.pop() if len(home) == 1 else 0 for home in homes.values()]
        found = [Unit("the root", 0, self._model, [i for i, k in enumerate(unit_of) if k == 0])]
        for k, (name, module) in enumerate(chosen, 1):
            if members := [i for i, home in enumerate(unit_of) if home == k]:
                found.append(Unit(name, len(found), module, members))
        self._unit_of = {i: unit for unit in found for i in unit.members}
        return found

    def _unit_names(self) -> list[str]:
        return [self._unit_of[i].name for i in range(len(self.all_params))]

    def _cast_model(self, keeps_fp32) -> list:
        """Decide the dtype in which each parameter will be gathered, and cast buffers. Returns the hooks around modules that
        stay in fp32, with all inside them: those with running statistics, and those that keep_fp32 names."""
        self._dtypes, hooks, in_fp32 = {p: p.dtype for p in self.all_params}, [], set()
        for module in self._model.modules() if self.half else ():
            running = [b for n, b in module.named_buffers(recurse=False) if n.startswith("running_") and b.is_floating_point()]
            if module not in in_fp32 and (running or keeps_fp32 and keeps_fp32(module)):
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

    def _lay_out(self) -> None:
        """Give each unit its flat tensors, take the own slices' masters from the weights as they came, free everything else.
        Unit by unit: at no time is there more than the model as it came, the slices, and one unit."""
        self.fragments: list[Fragment] = []
        self.frozen_fragments: list[Fragment] = []
        self.flats: list[Flat] = []
        for unit in self.units:
            kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
            for i in unit.members:
                kinds.setdefault((self._dtypes[self.all_params[i]], i in self._trained), []).append(i)
            for (dtype, trained), indices in kinds.items():
                self.flats.append(self._make_flat(unit, indices, dtype, trained))
                unit.flats.append(self.flats[-1])
            self._empty(unit)

    def _make_flat(self, unit: Unit, indices: list[int], dtype: torch.dtype, trained: bool) -> Flat:
        starts, numel = {}, 0
        for i in indices:
            starts[i] = numel
            numel += aligned(math.prod(self._shapes[i]))
        slice_numel = aligned(-(-numel // self.world_size))
        own = slice(self.rank * slice_numel, (self.rank + 1) * slice_numel)
        full = torch.zeros(self.world_size * slice_numel, dtype=dtype, device=self.device)
        views = {i: full[start : start + math.prod(self._shapes[i])].view(self._shapes[i]) for i, start in starts.items()}
        master_dtype = torch.promote_types(dtype, torch.float32) if trained and dtype == self.half else dtype
        master = self._zeros(slice_numel, master_dtype)
        store = self._zeros(slice_numel, dtype) if self.offload and master_dtype != dtype else master
        flat = Flat(full, views, starts, own, master, store, trained, tag=len(self.flats))
        moments = [self._zeros(slice_numel, master_dtype) for _ in range(2)] if trained else [None, None]
        if trained and self.offload:
            flat.landing = self._zeros(slice_numel, dtype)
        for i, start in starts.items():
            p, shape = self.all_params[i], self._shapes[i]
            lo, hi = max(start, own.start), min(start + p.numel(), own.stop)  # the part of it that is in the own slice
            if p.numel() == 0:
                lo = hi = own.start  # a parameter without elements is everybody's
            if lo < hi or p.numel() == 0:
                at, first = slice(lo - own.start, hi - own.start), max(lo - start, 0) if p.numel() else 0
                f = Fragment(self.all_names[i], self._trained.get(i, FROZEN), shape, (tuple(slice(0, size) for size in shape),),
                             first, first + hi - lo, master[at], half=store[at] if store is not master else None, part=flat.tag)
                if trained:
                    f.exp_avg, f.exp_avg_sq = (moment[at] for moment in moments)
                    flat.owned.append((f, at.start))
                (self.fragments if trained else self.frozen_fragments).append(f)
                if not self._blank:
                    f.master.copy_(p.data.reshape(-1)[f.start : f.end])
            p.data = views[i]
        store.copy_(master)
        return flat

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros for what is kept: on the device, or with `offload` in host memory, pinned, so that copies run beside
        everything else. Where pinning fails, says so once and goes on without."""
        if not self.offload:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        host = torch.zeros(numel, dtype=dtype, device="cpu")
        if self.device.type == "cuda" and self._pinned:
            try:
                return host.pin_memory()
            except RuntimeError as error:
                self._pinned = False
                print(f"fsdp: rank {self.rank}: host memory cannot be pinned, copies will be slower: {error}", file=sys.stderr)
        return host

    def _make_shards(self, accumulate: bool = False) -> None:
        """(Re)make the gradient slices and tell Adam; what they hold moves along. In the weights' dtype, or at least fp32 where
        micro-batches add up; once they are wide they stay so. Offloaded without adding up, `shard` is `landing` itself."""
        rows, empty = 0, []
        for flat in self.flats:
            if flat.trained:
                dtype = torch.promote_types(flat.full.dtype, torch.float32) if accumulate else flat.full.dtype
                if flat.shard is None or flat.shard.dtype != dtype or flat.shard is flat.landing:
                    shard = flat.landing if self.offload and not accumulate else self._zeros(flat.master.numel(), dtype)
                    self._absorb(flat)  # before what has landed is copied on
                    if flat.shard is not None and flat.shard.untyped_storage().nbytes():
                        shard.copy_(flat.shard)
                    flat.shard = shard
                if not self.offload and not flat.shard.untyped_storage().nbytes():
                    fill_storage(flat.shard)
                    empty.append(flat)
                for f, at in flat.owned:
                    f.grad = flat.shard[at : at + f.end - f.start]
                in_table = self.optimizer.cuda and not self.offload and flat.master.dtype == torch.float32
                flat.rows = rows, rows + (len(flat.owned) if in_table else 0)
                rows = flat.rows[1]
                flat.address = flat.shard.data_ptr()
        self._accumulates = accumulate
        self.optimizer.own(self.fragments)  # looks at addresses
        for flat in empty:
            flat.shard.untyped_storage().resize_(0)

    def _hold(self, flat: Flat) -> None:
        """Give a gradient slice its memory. On a GPU that may be another place than last time, which Adam's table must know; the
        correction is a kernel in the stream, so nobody waits."""
        if not flat.shard.untyped_storage().nbytes():
            fill_storage(flat.shard)
            moved, flat.address = flat.shard.data_ptr() - flat.address, flat.shard.data_ptr()
            if moved and flat.rows[1] > flat.rows[0]:
                self.optimizer.table[slice(*flat.rows), 1] += moved

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
        text = repr([(n, shape, p.dtype, p.requires_grad, unit)
                     for n, shape, p, unit in zip(self.all_names, self._shapes, self.all_params, self._unit_names())]
                    + [(n, tuple(b.shape), b.dtype) for n, b in self._model.named_buffers()]
                    + [(n, k) for n, k in zip(self.names, self.optimizer.group_list)]
                    + [options_of(group) for group in self.optimizer.param_groups]) + repr(settings)
        digest = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
        ends = torch.tensor([digest, -digest], device=self.device)
        # before: each rank's hash h and -h.  after: [max h, -min h] everywhere.  sends: 2(N-1)/N * 16 bytes, once; all wait.
        self._all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends[0] != -ends[1]:
            raise ValueError("the ranks bring different models (names, shapes, dtypes, units), param groups or settings; "
                             f"rank {self.rank} has {len(self.names)} trained parameters and {settings}")

    def _hook(self, unit: Unit) -> list:
        """Before and after each forward of the unit's module; a copy of the module, which copies hooks, is none of ours."""
        before = torch.compiler.disable(lambda m, _: self._before_forward(unit) if m is unit.module else None)
        after = torch.compiler.disable(lambda m, _, output: self._after_forward(unit, output) if m is unit.module else None)
        return [unit.module.register_forward_pre_hook(before, prepend=True),
                unit.module.register_forward_hook(after, always_call=True)]  # after an exception, too

    def _let_go(self) -> None:
        """Another engine takes the model over: give it whole weights as precise as the masters. Collectives."""
        for hook in self._hooks:
            hook.remove()
        self._reshard_all()
        for flat in self.flats:
            whole = torch.zeros(flat.full.numel(), dtype=flat.master.dtype, device=self.device)
            whole[flat.own].copy_(flat.master)
            SliceGather(self, whole, tag=2 * flat.tag).wait()
            self._show({i: whole[start : start + view.numel()].view(view.shape).clone()
                        for (i, view), start in zip(flat.views.items(), flat.starts.values())})
        trained = set(self.params)
        for name, t in self._model.state_dict(keep_vars=True).items():
            if isinstance(t, Tensor) and t not in trained and t.dtype != self._plain_dtypes.get(name, t.dtype):
                t.data = t.data.to(self._plain_dtypes[name])
        self.units, self.flats = [], []  # whatever is called here from now on, the parameters are another's

    # ---- gather and free ---------------------------------------------------------------------------------------------

    def _gather(self, unit: Unit) -> None:
        """Start the unit's gather, unless its weights are there or on their way."""
        if unit.state == "summing":  # needed again while its memory holds gradients
            self._finish(unit)
        if unit.state != "sharded":
            return
        unit.state, unit.gathers = "gathering", unit.gathers + 1
        self._note("gather", unit)
        for flat in unit.flats:
            fill_storage(flat.full)
            if self._side:
                self._side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._side):
                flat.full[flat.own].copy_(flat.store, non_blocking=True)  # rounds the fp32 master
                # starts the all-gather; who holds what and what is sent: SliceGather
                flat.gathering = SliceGather(self, flat.full, tag=2 * flat.tag)
                if self._side and self.world_size == 1:
                    flat.gathering = Fence(self._side)  # alone there is nothing to gather, only the copy

    def _use(self, unit: Unit) -> None:
        """The unit's weights must be there: under NCCL the current stream waits for them, under gloo this thread."""
        self._gather(unit)
        if unit.state == "gathering":
            self._wait(unit)
            for flat in unit.flats:
                self._show(flat.views)
            unit.state = "whole"

    def _wait(self, unit: Unit) -> None:
        for flat in unit.flats:
            gathering, flat.gathering = flat.gathering, None
            try:
                wait(gathering)
            except RuntimeError as error:
                raise RuntimeError(f"gathering {unit.name}: {error}; every rank must run the same units") from error

    def _free(self, unit: Unit) -> None:
        """Give the memory of the unit's weights back; on a GPU to the stream that has computed with them."""
        if unit.state == "gathering":
            self._wait(unit)
        if unit.state in ("gathering", "whole"):
            self._empty(unit)

    def _empty(self, unit: Unit) -> None:
        self._hide(unit)
        for flat in unit.flats:
            flat.full.untyped_storage().resize_(0)
        unit.state = "sharded"

    def _hide(self, unit: Unit) -> None:
        """From here on, whoever reads a parameter of this unit gets an error that names both (class Sharded)."""
        for flat in unit.flats:
            for i in flat.views:
                p = self.all_params[i]
                p.__class__ = self._classes[i]
                p.data = self._absent[i]
                p.__class__ = self._sharded_classes[i]

    def _show(self, values: dict[int, Tensor]) -> None:
        for i, value in values.items():
            p = self.all_params[i]
            p.__class__ = self._classes[i]
            p.data = value

    def _reshard_all(self, but_root: bool = False) -> None:
        self._ahead = self._recomputed = None
        for unit in self.units[1:] if but_root else self.units:
            self._free(unit)

    def _note(self, what: str, unit: Unit) -> None:
        """Remember a collective: for a rank that has to repeat it without samples, and to compare with the other ranks."""
        if unit is not self.units[0] and self._in_backward:
            self._log.append((what, unit))
        if what == "sum" and not self._reducing:
            return
        self._history = (self._history * 31 + 2 * unit.number + (what == "sum") + 1) % 2**31

    @contextlib.contextmanager
    def gathered(self, write: bool = False):
        """Inside, the whole weights are there, to be read, and forward gathers nothing; what you keep of them stays. With `write`,
        what you change (on all ranks alike) goes to the masters. A collective, outside of forward and backward; needs the
        memory for all. A loss computed inside may join one that `backward` gets outside, which then gathers all."""
        if self._in_backward or self._running or self._lent:
            raise RuntimeError("gathered() is for between forward, backward and step")
        self._check_usable()
        for unit in self.units:
            self._use(unit)
            copies = {i: view.clone() for flat in unit.flats for i, view in flat.views.items()}
            self._free(unit)
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
            for unit in self.units:
                self._hide(unit)
            if write and wrong:
                raise ValueError(f"nothing is written: {'; '.join(wrong[:5])}")
            if write:
                self._masters_changed()

    # ---- 1. forward --------------------------------------------------------------------------------------------------

    def __call__(self, *args, **kwargs):
        self._check_usable()
        try:
            return self._model(*cast(args, self.half), **cast(kwargs, self.half))
        except Exception:
            if not self._in_backward:
                for call in self._calls:  # of a forward that no backward will follow
                    call.unit.calls -= 1
                self._running, self._enclosing, self._calls = [], set(), []
                self._reshard_all()
            raise

    def _before_forward(self, unit: Unit) -> None:
        """A unit's forward begins: its weights must be there, and those of the next unit may start on their way."""
        root = self.units[0]
        if self._lent:
            return
        if self._in_backward:  # activation checkpointing computes it again; of several units one after the other, one at a time
            if self._recomputed not in (None, unit, root, *self._open[-1:]):
                self._free(self._recomputed)
            self._recomputed = unit
            self._use(unit)
            return
        self._check_usable()
        if unit is root:
            self._last_order, self._order, self._running, self._calls = self._order, [], [], []
        self._enclosing.update(self._running[1:])
        self._running.append(unit)
        if self._ahead not in (None, unit):  # this forward takes another way than the last
            self._free(self._ahead)
        self._ahead = None
        self._use(unit)
        if self._running[0] is root:  # else your code has called a part of the model alone
            self._order.append(unit)
            k = len(self._order)
            following = self._last_order[k : k + 1] if self.prefetch and self._last_order[k - 1 : k] == [unit] else []
            if following and following[0].state == "sharded":
                self._ahead = following[0]
                self._gather(self._ahead)

    def _after_forward(self, unit: Unit, output) -> None:
        """A unit's forward is over. Backward will begin where its output's gradient is complete: leave word there."""
        root, call = self.units[0], None
        if self._lent:
            return
        if torch.is_grad_enabled():
            storages = {flat.full.untyped_storage()._cdata for flat in unit.flats}
            try:
                found = [*tensors_in(output), *left_in(unit.module)]
            except TypeError as error:
                raise RuntimeError(f"{unit.name}: {error}") from error
            for t in found:
                if unit is not root and t.untyped_storage()._cdata in storages:
                    raise RuntimeError(f"{unit.name} returns a view of its own weights, which are freed now: return a copy of it")
                if t.requires_grad and not t.is_leaf and getattr(t, "_made_by", None) is not t.grad_fn:
                    t._made_by = t.grad_fn  # what a unit hands on as it got it is not its own
                    call = call or Call(unit, unit in self._enclosing, self._version)
                    t.register_hook(functools.partial(reach, weakref.ref(self), call))
        if call is not None and not self._in_backward:
            self._calls.append(call)
            unit.calls += 1
        if self._in_backward:
            return
        if self._running[-1:] == [unit]:
            self._running.pop()
            self._enclosing.discard(unit)
        if unit is root:
            if self._calls:
                self._usual_forward = self._order[1:]
            if self._ahead:
                self._free(self._ahead)
                self._ahead = None
        if unit is root and not self._calls or unit is not root and (call is None or self.reshard):  # no backward: free
            self._free(unit)

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
        """There is nothing to compute here, but the others need this rank's slices: the gathers of its last forward."""
        self._check_usable()
        self._last_order, self._order = self._order, [self.units[0], *self._usual_forward]
        for unit in self._order:
            self._use(unit)
            if self.reshard and unit is not self.units[0]:
                self._free(unit)

    def _backward_without_samples(self) -> None:
        """The same, and sums in which this rank's gradients are zeros."""
        self._begin_backward()
        usual = self._usual_backward
        if usual is None:  # none yet; with three units and prefetch it will be gather 3, gather 2, sum 3, gather 1, sum 2, sum 1
            gathers = [("gather", unit) for unit in self.units[:0:-1] if self.reshard]
            sums, ahead = [("sum", unit) for unit in self.units[:0:-1]], 2 if self.prefetch else 1
            usual = gathers[:ahead] + [step for pair in itertools.zip_longest(sums, gathers[ahead:]) for step in pair if step]
        for what, unit in usual:
            if what == "sum":
                self._launch(unit)
            else:
                self._use(unit)
                self._free(unit)
        self._end_backward()

    # ---- 2. backward, and the reduce-scatters inside it --------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Backward of this rank's mean loss; ranks count 1/N each. For a loop of your own, with `no_sync` around all but
        the last micro-batch; there, dividing by the number of micro-batches is yours. An exception discards what has
        accumulated."""
        with self._discard_on_error():
            self._backward(loss, 1.0 / self.world_size)

    @contextlib.contextmanager
    def no_sync(self):
        """Around `backward` of all micro-batches but the last; all ranks or none. By default gradients are reduced all the same,
        since there is no room for whole ones, but add up in fp32 from the first on, and the root stays gathered. With
        reduce_each=False they stay whole, in the weights' dtype; if no later backward reduces them, `step` does."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def _discard_on_error(self):
        """After an exception some units may be summed and others not, so all that has accumulated goes."""
        try:
            yield
        except BaseException as error:
            self._in_backward, self._running, self._enclosing, self._open = False, [], set(), []
            self._ahead = self._recomputed = None
            self._in_flight, self._calls, self.backward_needs_all = [], [], False
            for flat in self.flats:
                for work in (flat.gathering, flat.summing) if isinstance(error, Exception) else ():  # Ctrl-C waits for nobody
                    with contextlib.suppress(RuntimeError):  # a connection that is lost
                        wait(work)
                flat.gathering = flat.summing = None
            for unit in self.units:
                unit.calls = 0
                self._empty(unit)
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
        usual = sum(unit.calls for unit in self.units) == len(self._calls)  # no other forward waits for its backward
        self._begin_backward()
        for unit in self.units if self.backward_needs_all else ():
            self._use(unit)
        try:
            loss.backward(gradient=(self.scaler.state[SCALE] * share).to(loss.dtype).reshape(loss.shape))
        except RuntimeError as error:
            if "storage of size 0" not in str(error):
                raise
            raise RuntimeError("backward needs weights of a unit that it has not reached: something has left a unit otherwise than "
                               f"as its output or in an attribute ({error})") from error
        self._end_backward()
        if usual:
            self._usual_backward = list(self._log)

    def _begin_backward(self) -> None:
        if self._lent:
            raise RuntimeError("inside gathered() there is no backward and no step")
        self._check_usable()
        for name, p in self._frozen:
            if p.requires_grad:
                raise RuntimeError(f"{name} was frozen when the engine was built and has no gradient: unfreeze it before")
        if not self._accumulates and (self._reduced or self.reduce_each and not self._sync):
            self._make_shards(accumulate=True)
        for unit in self.units:
            unit.launched = False
        self._open, self._recomputed, self._log = [], None, []
        self._in_backward = True

    def _reach(self, call: Call) -> None:
        """Autograd has come to a unit's output, that is, it has left the units that forward came to later.

            forward 1 2 3:   reach 3: gather 2   reach 2: send 3, gather 1   reach 1: send 2              end: send 1, the root
            forward 1 2 1:   reach 1: gather 2   reach 2: free 1, gather 1   reach 1: send 2              end: send 1, the root
        """
        unit = call.unit
        if call.version != self._version:
            raise RuntimeError("this graph was made before the last step, with weights that are gone: run forward again")
        self._use(self.units[0])
        if not self._in_backward:  # a derivative that your code takes, a gradient penalty say: weights stay until the next backward
            self._use(unit)
            return
        if not call.reached:
            call.reached = True
            unit.calls -= 1
            if call.encloses:
                self._enclosing.add(unit)
            if unit is not self.units[0]:
                self._leave_behind(unit)
                self._open += [unit] if unit not in self._open else []
                if self._ahead not in (None, unit):
                    self._free(self._ahead)
                self._ahead = None
        self._use(unit)
        if self.prefetch and self._ahead is None:
            following = [c.unit for c in self._calls if not c.reached and c.unit is not self.units[0]][-1:]
            if following and following[0].state == "sharded":
                self._ahead = following[0]
                self._gather(self._ahead)

    def _leave_behind(self, reached: Unit) -> None:
        """Send the gradients of units that will not come again in this backward, free those that may. That depends on nothing but
        the sequence of forwards and backwards, which all ranks share."""
        if self.backward_needs_all:  # until its end
            return
        for unit in [u for u in self._open if u not in {reached, *self._enclosing}]:
            self._open.remove(unit)
            if unit.calls > 0:
                self._free(unit)
            else:
                self._launch(unit)

    def _on_grad(self, index: int, param: nn.Parameter) -> None:
        """Autograd calls this after it has added a gradient into `param.grad`."""
        name = self.all_names[index]
        if not self._in_backward:
            self.zero_grad()
            raise RuntimeError("call engine.backward(loss) instead of loss.backward(): the gradient would miss the "
                               "loss scale, the average over ranks and the flush of unused parameters")
        if param.grad.is_sparse:
            raise RuntimeError(f"sparse gradients are not supported: {name}; use sparse=False")
        if self._unit_of[index].launched:
            raise RuntimeError(f"the gradient of {name} arrived after those of {self._unit_of[index].name} were sent, as with "
                               "reentrant activation checkpointing (use torch.utils.checkpoint(..., use_reentrant=False)), or "
                               "where something leaves a unit otherwise than as its output")
        self.optimizer.present[self._trained[index]] = 1

    _reducing = property(lambda self: self._sync or self.reduce_each, doc="does this backward end in sums over the ranks?")

    def _launch(self, unit: Unit) -> None:
        """The unit's gradients are all there. Copy them to where its weights were and start the reduce-scatter. Always at the
        same place in the sequence of units, however gradients came: all ranks issue their collectives in one order."""
        unit.launched = True
        while self._in_flight:
            self._finish(self._in_flight[0])
        if unit.state == "gathering":
            self._wait(unit)
        stays = unit is self.units[0] and not self._sync and unit.state == "whole"  # the root, and micro-batches follow
        if not stays:
            unit.state = "summing"
            self._hide(unit)
        self._note("sum", unit)
        if self._reducing:
            self._in_flight.append(unit)
        for flat in unit.flats:
            if flat.trained:
                if not stays:
                    fill_storage(flat.full)
                gradients = self._collect(flat, torch.empty_like(flat.full) if stays else flat.full)
                if self._reducing:
                    room = None
                    if self.by_hand:  # gloo: for what is received; freed with the sum
                        room = torch.empty((self.world_size - 1) * flat.master.numel(), dtype=flat.full.dtype, device="cpu")
                    # starts the reduce-scatter; who holds what and what is sent: SliceSum
                    flat.summing = SliceSum(self, gradients, 2 * flat.tag + 1, room)
            else:
                for i in flat.views:
                    self.all_params[i].grad = None  # of one that is in no param group
                if not stays:
                    flat.full.untyped_storage().resize_(0)
        if not self._reducing and not stays:
            self._empty(unit)

    def _collect(self, flat: Flat, to: Tensor) -> Tensor:
        """Copy gradients that autograd allocated into the flat tensor `to`, in one call, and release them; zeros where none
        came. What earlier micro-batches have kept is added, or all kept for the next."""
        places, grads, absent = [], [], []
        for i, view in flat.views.items():
            p = self.all_params[i]
            if to is not flat.full:
                view = to[flat.starts[i] : flat.starts[i] + view.numel()].view(view.shape)
            if p.grad is None:
                absent.append(view)
            else:
                places.append(view)
                grads.append(p.grad)
                p.grad = None
        if places:
            torch._foreach_copy_(places, grads)
        if absent:
            torch._foreach_zero_(absent)
        if flat.whole_grad is not None:
            to.add_(flat.whole_grad)
            flat.whole_grad = None
        if not self._reducing:
            flat.whole_grad = to.clone() if to is flat.full else to
        return to

    def _finish(self, unit: Unit) -> None:
        """Wait for a reduce-scatter, add the sum to the own slice's gradient, free the unit."""
        self._in_flight.remove(unit)
        for flat in unit.flats:
            if flat.summing is not None:
                summing, flat.summing = flat.summing, None
                try:
                    total = summing.wait()
                except RuntimeError as error:
                    raise RuntimeError(f"summing gradients of {unit.name}: {error}; every rank must run the same units") from error
                if self.offload:
                    self._land(flat, total)
                else:
                    self._hold(flat)
                    flat.shard.add_(total) if self._reduced else flat.shard.copy_(total)
        if unit.state == "summing":
            self._empty(unit)

    def _land(self, flat: Flat, total: Tensor) -> None:
        """Offload: copy the own slice to host memory, on a stream of its own, while backward goes on."""
        self._absorb(flat)
        flat.adds_up = self._reduced
        if self._side:
            self._side.wait_stream(torch.cuda.current_stream(self.device))
            total.record_stream(self._side)  # its memory is given back at once, and must not be used before the copy has read it
        with torch.cuda.stream(self._side):
            flat.landing.copy_(total, non_blocking=True)
            flat.landed = Fence(self._side)

    def _absorb(self, flat: Flat) -> None:
        """Offload: wait for the last copy into `landing` and, where micro-batches add up, add it to the slice's gradient."""
        if flat.landed is not None:
            flat.landed.wait_on_host()
            flat.landed = None
            if flat.shard is not flat.landing:
                flat.shard.add_(flat.landing) if flat.adds_up else flat.shard.copy_(flat.landing)

    def _end_backward(self) -> None:
        """Autograd is through. Send the units that are still here, then those that it never came to, whose gradients are zeros,
        and the root; wait for all. Under NCCL the stream waits, under gloo this thread."""
        self._in_backward = False
        rest = [unit for unit in reversed(self.units[1:]) if unit not in self._open]
        for unit in (*self._open, *rest, self.units[0]):
            if not unit.launched:
                self._launch(unit)
        while self._in_flight:
            self._finish(self._in_flight[0])
        self._reduced = self._reduced or self._reducing
        self._open, self._enclosing, self._calls, self.backward_needs_all = [], set(), [], False
        for unit in self.units:
            unit.calls = 0
        self._reshard_all(but_root=not self._sync)

    def _reduce_what_is_left(self) -> None:
        """Reduce now if no backward since the last step has: there was none (then zeros, as the other ranks do), or all were
        inside no_sync with reduce_each=False."""
        if not self._reduced:
            before, self._sync = self._sync, True  # `step` may be called inside no_sync
            self._begin_backward()
            self._end_backward()
            self._sync = before
        for flat in self.flats:
            self._absorb(flat)

    # ---- 3. step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One optimizer step: what is left to reduce, norm, overflow check, clip, Adam on the own slices."""
        self.optimizer.step()  # through the optimizer, so that schedulers see the call; it calls `_step`

    def _step(self) -> None:
        self._reduce_what_is_left()
        # before: BatchNorm's running means and variances of rank r's samples.  after: their sum, then the mean, each rank
        # counting once, however many samples it had.
        # sends: 2(N-1)/N * 4 bytes per element; needed by nobody before the next forward.
        statistics_works = [self._all_reduce(flat, async_op=True) for flat in self._statistics]
        adam = self.optimizer
        adam.send_hyperparameters()
        adam.send_presence()
        adam.square_sum()
        # before: rank r has the sum of squares of its own slices, and knows which parameters received a gradient on r.
        # after:  all ranks have the sum over all slices, so the true norm, and on how many ranks each parameter had one.
        # sends:  2(N-1)/N * 8 bytes for each parameter tensor and one more; Adam waits for it.
        self._all_reduce(adam.inputs[adam.n_hyper :])
        self._compare_ranks(adam.inputs[adam.n_hyper])
        adam.update(len(self.flats))  # on CPUs flat by flat: the fp32 copies of gradients that it needs are small
        for flat, work in zip(self._statistics, statistics_works):
            wait(work)
            flat.div_(self.world_size)
        self._reshard_all()  # the root may still be there, with the old weights, if the last backward was inside no_sync
        self._version += 1
        self.zero_grad()
        self.traffic, self._sent_bytes = self._sent_bytes, {}
        self.scaler.raise_if_stuck()

    def _compare_ranks(self, square_sum: Tensor) -> None:
        """NCCL matches collectives by their order, and units of one size would be mixed up without a word. So the ranks compare
        what they have gathered and summed since the last step; where that differs the step is skipped, and the next one raises. By
        hand, under gloo, messages carry the flat's tag, and nothing can be mixed up."""
        if self.world_size == 1 or self.by_hand:
            return
        if self._compared is None:
            self._signs = torch.tensor([1, -1], device=self.device)
            self._compared = torch.zeros((), dtype=torch.int64, device="cpu").pin_memory(), torch.cuda.Event()
        difference, copied = self._compared
        copied.synchronize()  # written a step ago, so this does not wait; the same on all ranks
        if difference != 0:
            raise RuntimeError("the ranks ran different units, or in another order, before the last step, which was skipped: with "
                               "NCCL all must run the same")
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
        for flat in self.flats:
            self._absorb(flat)
            flat.whole_grad = None
            if flat.trained and not self.offload:
                flat.shard.untyped_storage().resize_(0)
        self.optimizer.present[:] = bytes(len(self.params))
        self._reduced = False

    # ---- what users read ---------------------------------------------------------------------------------------------

    grad_norm = property(lambda self: self.scaler.state[GRAD_NORM].clone(), doc="true global L2 norm before clipping")
    scale = property(lambda self: self.scaler.state[SCALE].clone(), doc="loss scale, a device tensor")
    skipped = property(lambda self: self.scaler.state[SKIPPED] > 0, doc="was the last step skipped for an overflow?")
    skipped_steps = property(lambda self: self.scaler.state[SKIPPED_STEPS].long(), doc="how many were")
    module = property(lambda self: self._model, doc="the model; its weights are there inside `gathered` and forward alone")

    def train(self, mode: bool = True) -> "FSDP":
        self._model.train(mode)
        return self

    def eval(self) -> "FSDP":
        return self.train(False)

    def named_parameters(self):
        """Names and Parameters, as the model has them. Their values: inside `gathered`, or `state_dict`."""
        return self._model.named_parameters()

    def full_grad(self, name: str) -> Tensor:
        """The averaged, unscaled, unclipped gradient of one parameter, whole, on the CPU, fp32 (float64 for float64);
        zeros where no rank had one. A collective, between the last backward and `step`."""
        if name not in self.names:
            raise ValueError(f"{name!r} is not a trained parameter; trained are {', '.join(self.names[:8])}, ...")
        reduced = self._reduced or any(flat.whole_grad is not None for flat in self.flats)
        self._reduce_what_is_left()
        self._reduced = reduced  # of no backward at all, the next one is not a second
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
        other master), gradients, optimizer, buffers."""
        masters = {flat: flat.trained and flat.master.dtype != flat.full.dtype for flat in self.flats}
        held = {
            "parameters": [t for flat in self.flats for t in (flat.full, flat.store) if t is not flat.master or not masters[flat]],
            "gradients": [*(t for f in self.flats for t in (f.shard, f.landing, f.whole_grad)), *(p.grad for p in self.params),
                          *(f.summing.received for f in self.flats if f.summing)],
            "optimizer": [*(f.master for f in self.flats if masters[f]),
                          *(t for f in self.fragments for t in (f.exp_avg, f.exp_avg_sq))],
            "buffers": [*self._model.buffers()],
        }
        return {kind: storage_bytes(tensors) for kind, tensors in held.items()}

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

    def load_pretrained(self, path: str, strict: bool = True) -> tuple[list[str], list[str]]:
        """Load weights from safetensors: a file, or a folder as the Hugging Face hub and `save_pretrained` have it. Each rank reads
        its own slices alone, so the model is whole nowhere. A collective. Adam's moments stay. Names are those of the state dict,
        tied weights under any of theirs, with or without transformers' prefix of the base model ("bert.").
        Returns (missing, unexpected) names; with `strict` those are a CheckpointError, as are other shapes, unknown dtypes and
        damaged files, on all ranks and before anything changes. What is missing keeps its value, so a model built on `meta` must
        find all."""
        self._check_can_load()
        names, buffers = self._places()
        prefix = getattr(self._model, "base_model_prefix", "") + "."
        shape_of = dict(zip(self.all_names, self._shapes)) | {key: tuple(b.shape) for key, b in buffers.items()}
        entries, sources = {}, {}  # key in the file -> where; name of a parameter or buffer -> key

        def check():
            for file in safetensors_files(path):
                entries.update(open_safetensors(file))
            for key, name in [*names.items(), *((key, key) for key in buffers)]:
                for there in (key, prefix + key, key.removeprefix(prefix)):
                    if there in entries and name not in sources:
                        sources[name] = there
            expected = {other for key in (*names, *dict(self._model.named_buffers()))
                        for other in (key, prefix + key, key.removeprefix(prefix))}
            missing, extra = sorted(shape_of.keys() - sources.keys()), sorted(entries.keys() - expected)
            info = {name: entries[key][1][key] for name, key in sources.items()}
            faults = [f"{name} has shape {tuple(entry['shape'])} instead of {shape_of[name]}" for name, entry in info.items()
                      if tuple(entry["shape"]) != shape_of[name]]
            faults += [f"{name} is of dtype {entry['dtype']}" for name, entry in info.items() if entry["dtype"] not in DTYPES]
            if missing and (strict or self._blank):
                faults.append(f"missing {', '.join(missing[:10])}")
            if extra and strict:
                faults.append(f"unexpected {', '.join(extra[:10])}")
            if faults:
                raise CheckpointError(f"{path} does not fit: {'; '.join(faults[:10])}")
            return missing, extra

        def read():
            for name, tensor, lo, hi in [*((f.name, f.master, f.start, f.end) for f in self.fragments + self.frozen_fragments),
                                         *((key, b.data, 0, b.numel()) for key, b in buffers.items())]:
                if name in sources and hi > lo:
                    key = sources[name]
                    tensor.copy_(read_tensor(hi - lo, [(*entries[key], key, 0, lo, hi - lo)]).view(tensor.shape))

        try:
            found = together(self, check)[self.rank]
            together(self, read)
        finally:
            for file in {file for file, _, _ in entries.values()}:
                file.close()
        self._masters_changed()
        return found

    def _check_can_load(self) -> None:
        if self._lent:
            raise RuntimeError("inside gathered() nothing can be loaded")

    def _masters_changed(self) -> None:
        """Otherwise than by Adam: the next gathers must begin with the new weights."""
        self._blank = False
        self._version += 1
        self._reshard_all()
        for flat in self.flats:
            if flat.store is not flat.master:
                flat.store.copy_(flat.master)
        self._sent_bytes = {}

    def _check_usable(self) -> None:
        holder = ENGINES.get(self._model)
        if holder is None or holder() != self._let_go:
            raise RuntimeError("another engine has taken this model over: use that one")
        if self._blank:
            raise RuntimeError("the model was built on meta and has no weights yet: load, load_pretrained or load_state_dict first")

    def save(self, directory: str, **extra) -> None:
        """Write a checkpoint that any strategy resumes on any number of ranks: fp32 masters, moments, step counts, buffers,
        param groups' options, loss scale, each rank's random numbers (torch's and Python's), and `extra`: plain data, and
        objects like schedulers by their state_dict(). A collective, between steps; every rank sees the same file system.
        Overwrites a checkpoint, never anything else; killed at any moment it leaves a complete one. Raises CheckpointError.
        """
        if own := [name for name in extra if name.startswith("_")]:
            raise CheckpointError(f"names with _ in front are the engine's own: {', '.join(own)}")
        self._check_usable()
        save_checkpoint(self, directory, extra)

    def load(self, directory: str, **objects) -> dict:
        """Continue from a checkpoint of any strategy: engine.load(dir, scheduler=scheduler) gives each object the state that was
        saved under its name and returns the other extras. On as many ranks the run goes on bit for bit, random numbers
        included; on another number they are left as they are. Discards gradients. Raises CheckpointError, on all ranks and
        before anything changes, for what is missing, damaged, of another shape or in another param group."""
        self._check_can_load()
        extra = load_checkpoint(self, directory, objects)
        self.zero_grad()
        self._masters_changed()
        return {k: v for k, v in extra.items() if not k.startswith("_")}

    def kept(self) -> "list[Fragment]":
        """What a checkpoint holds beside what is trained: frozen parameters, and the buffers that are in the state dict."""
        persistent = self._places()[1]
        buffers = [(n, b) for n, b in self._model.named_buffers() if n in persistent]
        return self.frozen_fragments + [Fragment(n, BUFFER, tuple(b.shape), (tuple(slice(0, s) for s in b.shape),), 0, b.numel(), b)
                                        for n, b in buffers]

    def capture(self, batch, micro_batches: int = 1, loss_fn=None):
        raise NotImplementedError("FSDP.capture: CUDA graphs are not in fsdp.py yet")

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


def fill_storage(tensor: Tensor) -> None:
    """Give a tensor whose storage was emptied its memory again; what is in it is whatever was there."""
    storage, n_bytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if storage.nbytes() != n_bytes:
        storage.resize_(n_bytes)


def reach(engine: "weakref.ref[FSDP]", call: Call, grad: Tensor) -> None:
    """Autograd calls this with the complete gradient of a unit's output, before it goes on into the unit."""
    if engine() is not None:
        engine()._reach(call)


def tensors_in(x, seen: set | None = None):
    """All tensors in nested containers and objects, such as a cache of keys and values. TypeError for what may hide tensors."""
    seen = set() if seen is None else seen
    if isinstance(x, Tensor):
        yield x
    elif id(x) not in seen and not isinstance(x, (nn.Module, type, str, bytes, int, float)) and x is not None:
        seen.add(id(x))
        if isinstance(x, (types.FunctionType, types.MethodType, functools.partial, Iterator)):
            raise TypeError(f"no tensors can be found in a {type(x).__name__} that a unit returns: use containers or objects")
        listed = x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list, set)) else ()
        slots = [slot for kind in type(x).__mro__ for slot in vars(kind).values() if isinstance(slot, types.MemberDescriptorType)]
        for item in (*listed, *(s.__get__(x) for s in slots if hasattr(x, s.__name__)), *getattr(x, "__dict__", {}).values()):
            yield from tensors_in(item, seen)


def left_in(module: nn.Module):
    """Tensors that forward has left in attributes of a module and its children, such as an auxiliary loss."""
    for m in module.modules():
        for value in vars(m).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield value


def matcher(model: nn.Module, argument: str, modules):
    """A test of modules: the function itself, or one for class names, "BertLayer,BertPooler"; None for None. ValueError for a name
    that no module of the model has."""
    if modules is None or callable(modules):
        return modules
    names = {name.strip() for name in (modules.split(",") if isinstance(modules, str) else modules)}
    known = {type(module).__name__ for module in model.modules()}
    if names - known:
        raise ValueError(f"{argument}: the model has no module of class {', '.join(sorted(names - known))}, "
                         f"but of {', '.join(sorted(known))}")
    return lambda module: type(module).__name__ in names


# ---- a model that was built on meta ----------------------------------------------------------------------------------


# >>> shared block: meta
def leave_meta(model: nn.Module, device) -> None:
    """Put a model that was built on `meta` on a device: parameters with a shape and without memory, the same Parameter objects, so
    that param groups still hold them; buffers of the state dict as zeros, to be loaded; others, tables that no checkpoint
    holds, as transformers' _init_weights computes them. ValueError where nobody does."""
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if not all(p.is_meta for p in model.parameters()):
        raise ValueError("some parameters are on meta and some are not: all or none")
    parents = [(name + "." if name else "", m) for name, m in model.named_modules() if hasattr(m, "_init_weights")]
    for path, module in model.named_modules():
        tables = {}
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                whole_number = not buffer.is_floating_point() and buffer.dtype != torch.bool
                unset = torch.iinfo(buffer.dtype).min if whole_number else torch.nan
                persistent = name not in module._non_persistent_buffers_set
                module._buffers[name] = torch.full_like(buffer, 0 if persistent else unset, device=device)
                if not persistent:
                    tables[name] = torch.full_like(buffer, unset, device=device)
            elif buffer is not None:
                module._buffers[name] = buffer.to(device)
        if tables and (owners := [m for prefix, m in parents if f"{path}.".startswith(prefix)]):
            with torch.no_grad():
                owners[-1]._init_weights(module)
        for name, unset in tables.items():
            if torch.equal(module._buffers[name].nan_to_num(), unset.nan_to_num()):
                raise ValueError(f"the buffer {path}.{name} was built on meta and no checkpoint holds it: give it its values first")
    for p in set(model.parameters()):  # one element stands for all
        one = torch.full((), torch.nan if p.is_floating_point() else 0, dtype=p.dtype, device=device)
        torch.utils.swap_tensors(p, nn.Parameter(one.expand(p.shape), requires_grad=p.requires_grad))
# <<< shared block: meta


def safetensors_files(path: str) -> list[str]:
    """The file itself, or those of a folder: model.safetensors, or what model.safetensors.index.json lists."""
    if not os.path.isdir(path):
        return [path]
    index = os.path.join(path, "model.safetensors.index.json")
    if not os.path.exists(index):
        return [os.path.join(path, "model.safetensors")]
    try:
        with open(index) as file:
            return [os.path.join(path, name) for name in sorted(set(json.load(file)["weight_map"].values()))]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error}") from error


def open_safetensors(path: str) -> dict[str, tuple]:
    """Each key -> (open file, header, where the tensors begin). CheckpointError for a file that is not whole."""
    if not os.path.exists(path):
        raise CheckpointError(f"{path} is missing")
    file = open(path, "rb")
    try:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, os.path.getsize(path))))
        header.pop("__metadata__", None)
        for key, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype, numel = DTYPES.get(entry["dtype"]), math.prod(entry["shape"])
            if begin < 0 or dtype is not None and end - begin != numel * dtype.itemsize:
                raise ValueError(f"{key} of {entry['shape']} {entry['dtype']} has bytes {begin} to {end}")
        spans = [(0, 0), *sorted(tuple(entry["data_offsets"]) for entry in header.values())]
        if any(last != begin for (_, last), (begin, _) in zip(spans, spans[1:])):
            raise ValueError("tensors overlap or leave gaps")
        end = spans[-1][1]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a damaged header: {error}") from error
    if os.path.getsize(path) != 8 + length + end:
        raise CheckpointError(f"{path} has {os.path.getsize(path)} bytes instead of {8 + length + end}")
    return {key: (file, header, 8 + length) for key in header}


# ---- nobody reads a weight that is not there --------------------------------------------------------------------------


class Sharded:
    """Stands in the class of a parameter whose weights are not here: any torch function that gets the parameter raises, in your
    code, in another module's forward, in a copy. Shape, dtype, `.grad` and the like are there."""

    name = unit = ""  # of each parameter's own subclass

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function in NO_WEIGHTS_READ:
                return function(*args, **(kwargs or {}))
            if function in (Tensor.stride, Tensor.is_contiguous):  # as they are when the weights are here
                return function(torch.empty(args[0].shape, device="meta"), *args[1:], **(kwargs or {}))
            if function in (Tensor.__repr__, Tensor.__format__):
                return f"Parameter {args[0].name} of {tuple(args[0].shape)}, {args[0].dtype}, sharded"
        next(kind for kind in types if issubclass(kind, Sharded)).refuse()

    @classmethod
    def refuse(cls, *_, **__):
        raise RuntimeError(f"the weights of {cls.name} are not here: they are sharded, and {cls.unit}, to which they "
                           "belong, is not running. Read them inside `with engine.gathered():`, or make what reads them part of "
                           "that unit (a parameter that two units use belongs to the root)")

    as_subclass = __dlpack__ = refuse  # those ask no torch function


def sharded_class(own_class: type, name: str, unit: str) -> type:
    return type("Sharded" + own_class.__name__, (Sharded, own_class), {"name": name, "unit": unit})


class Lent:
    """In the class of parameters inside `gathered`: if a graph grows from one, the next backward will need all weights."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            output = function(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and any(t.grad_fn is not None for t in tensors_in(output)):
            cls.engine().backward_needs_all = True
        return output


NO_WEIGHTS_READ = {getattr(Tensor, name).__get__ for name in (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "is_cuda", "is_meta", "itemsize",
    "nbytes")}
NO_WEIGHTS_READ |= {Tensor.grad.__set__, Tensor.grad.__delete__, Tensor.size, Tensor.numel, Tensor.dim, Tensor.element_size,
                    Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.requires_grad_,
                    Tensor.requires_grad.__set__, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}


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


# ---- demonstration: python fsdp.py -----------------------------------------------------------------------------------


def demonstration(device: torch.device) -> None:
    """Train a small transformer for three steps in float64 beside one process that sees the whole batch, then in bf16, and print
    what is held and sent beside the formulas of the docstring."""
    rank, n, n_layers = dist.get_rank(), dist.get_world_size(), 6

    def build(dtype):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Embedding(1000, 128), nn.TransformerEncoder(layer, n_layers), nn.Flatten(), nn.Linear(2048, 10))
        return model.to(device, dtype)

    torch.manual_seed(1)
    tokens, labels = torch.randint(1000, (4 * n, 16)).to(device), torch.randint(10, (4 * n,)).to(device)
    mine = slice(4 * rank, 4 * rank + 4)

    def loss_fn(logits, batch):
        return nn.functional.cross_entropy(logits, batch[1])

    model, plain = build(torch.float64), build(torch.float64)
    layer_class = "TransformerEncoderLayer"
    engine = FSDP(model, lr=1e-3, eps=1e-3, weight_decay=0.01, max_norm=1.0, precision="fp32", wrap=layer_class)
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
    with engine.gathered() as whole:
        gap = max((p - q).abs().max().item() for p, q in zip(whole.parameters(), plain.parameters()))

    engine = FSDP(build(torch.float32), lr=1e-3, precision="bf16", wrap=layer_class)
    numel = sum(p.numel() for p in engine.module.parameters())
    root, unit = (sum(flat.full.numel() for flat in u.flats) for u in engine.units[:2])
    most = {"gathered": 0.0, "with gradients": 0.0}

    def look(*_):
        whole = sum(flat.full.untyped_storage().nbytes() for flat in engine.flats) / numel
        unreduced = sum(p.grad.numel() * 2 for p in engine.params if p.grad is not None) / numel
        most["gathered"] = max(most["gathered"], whole if not engine._in_backward else 0)
        most["with gradients"] = max(most["with gradients"], whole + unreduced)

    for module in engine.module.modules():
        module.register_forward_hook(look)
    for p in engine.params:
        p.register_post_accumulate_grad_hook(look)
    for _ in range(2):
        before, gathers = sent_bytes(), [u.gathers for u in engine.units]
        loss = engine.forward_backward((tokens[mine], labels[mine]), loss_fn=loss_fn)
        held = engine.memory()
        engine.step()
        dist.barrier()
        wire, gathers = sent_bytes() - before, [u.gathers - g for u, g in zip(engine.units, gathers)]
    kept = engine.memory()
    if rank:
        return
    print(f"\n{n} ranks on {device.type}, {numel:,} parameters, {n_layers} units and the root; last loss {loss:.4f} in bf16")
    print(f"largest distance from one process, float64, 3 steps: gradients {grad_gap:.1e}, parameters {gap:.1e}")
    print(f"gathers per step: root {gathers[0]}, units {', '.join(map(str, gathers[1:]))}")
    print(f"{'bytes per parameter on rank 0, bf16':58}{'formula':>10}{'measured':>10}")
    total = {kind: sum(by_device.values()) / numel for kind, by_device in kept.items()}
    sent, part = engine.traffic, (n - 1) / n * 2 / numel
    for what, formula, measured in (
            ("between steps: masters and moments", 12 / n, sum(total.values())),
            ("gradients after backward", 2 / n, sum(held["gradients"].values()) / numel),
            ("weights in forward: root and two units", 2 * (root + 2 * unit) / numel, most["gathered"]),
            ("weights and whole gradients, at most: of root and four units", 4 * (root + 2 * unit) / numel, most["with gradients"]),
            ("all_gather per step, counted by the engine", part * (2 * numel - root), sent.get("all_gather", 0) / numel),
            ("reduce_scatter per step, counted by the engine", part * numel, sent.get("reduce_scatter", 0) / numel),
            ("sent per step, as the sockets count it", part * (3 * numel - root), wire / numel)):
        print(f"{what:58}{formula:10.2f}{measured:10.2f}")


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
