"""ZeRO-1 and ZeRO-2: every rank holds the weights, and 1/N of what the optimizer needs; each updates its part and hands it round.

In ddp.py all ranks do the same Adam step on the same gradients. Here rank r does it for the r-th slice of the weights
alone, so only r needs that slice's fp32 master weights and moments (stage 1), and, once summed, its gradient (stage 2).

                 rank 0      rank 1      bytes per rank; Ψ parameters, N ranks, half precision
    weights      [ A | B ]   [ A | B ]   2Ψ        bf16 or fp16, what forward and backward compute with
    master, m, v [ A |   ]   [   | B ]   12Ψ/N     fp32 weights and Adam's two moments (fp32 models: 8Ψ/N, weights are masters)
    grads, 1     [ A | B ]   [ A | B ]   2Ψ        stage 1: whole gradients, the own slice summed over the ranks
    grads, 2     [ A |   ]   [   | B ]   2Ψ/N      stage 2: the own slice, 4Ψ/N where several micro-batches add up in fp32;
                                                   and room for two buckets, so it saves where they are small beside Ψ
                                                   (gloo, both stages: and (N-1)/N of a bucket, for what is received)
    BERT-base (Ψ = 109.5e6), N = 8: stage 1 602 MB, stage 2 411 MB and two buckets, where ddp.py has 16Ψ = 1.75 GB. A bucket
    takes 25 MiB, or one parameter that is larger: here the word embeddings' 45 MiB.

    A bucket is a stretch of parameters and is cut into N equal slices; a parameter may lie across two of them:

        bucket   | weight 9          | bias 9 | weight 8                     | bias 8 |.. |    .. padding
        slices   |       rank 0           |       rank 1           |      rank 2          |

    reduce-scatter: every rank brings N slices, rank r leaves with the sum of all slices r.
    all-gather:     every rank brings one slice and leaves with all N.

    1. forward        who touches a weight first waits for its bucket's gather, which the last step has started (4).
    2. backward       gradients are copied into the flat tensor of their bucket; when all are there it is reduce-scattered, while
                      autograd goes on. Stage 1 does so in the last micro-batch, after adding up in the weights' dtype. Stage 2
                      does so in every one and adds to its slice; two flat tensors serve all buckets in turn.
    3. step           squares of the own gradients, summed over ranks: norm, overflow, clip. Adam on the own slices.
    4. gather         each bucket's slices go to everybody, those that forward needs first; nobody waits for it yet.

    Bytes sent per rank and step, half precision: (N-1)/N * 2Ψ for the reduce-scatters of a backward, all buckets together, and
    as much for the gathers: what DDP's all-reduce sends, cut in two, with Adam between the halves. Stage 2 with k
    micro-batches: k reduce-scatters of each bucket. BERT-base on 8 ranks: 383 MB a step in bf16, 766 MB in fp32.

Modules with running statistics (BatchNorm) keep parameters and buffers in fp32, their inputs and outputs are cast around
them. Other floating buffers are cast with the parameters if they are in the state dict; what is not (tables computed by
the model) stays as it is. Frozen parameters are cast too. Flattening makes parameters contiguous.

`offload=True` keeps masters, moments and gradient slices in host memory: 12Ψ/N, 2Ψ/N for what travels, 4Ψ/N more where micro-
batches add up. Backward only copies slices there; Adam runs on the CPU, bucket by bucket, and one bucket's new weights travel
to the GPU while the next is updated.

A module waits for its own parameters as it begins; whoever else touches a Parameter whose weights are on their way waits, too
(class Pending): a parent, your own code between two steps, an average of the weights that you keep. What reads weights without
any torch function cannot be seen: for TorchScript and compiled code forward waits for all; for a view that you took before
the step, or a C++ extension that is given another module's weight, call `wait_for_weights` or use overlap_gather=False.

All ranks must make the same calls, with the same number of micro-batches. Left out: sparse gradients, complex
parameters, models spread over several devices (refused by name), and an order of buckets other than that of the parameters
backwards.

ZeRO, arXiv:1910.02054 (stages 1 and 2: §5.1, §5.2; traffic §7.2.1); ZeRO-Offload, arXiv:2101.06840 (§4);
mixed precision with masters: arXiv:1710.03740 §3.1; loss scale §3.2.

    engine = Zero(model, lr=1e-4, weight_decay=0.01, precision="bf16", stage=2)
    for batch in loader:                                    # this rank's share of the global batch
        loss = engine.forward_backward(batch, micro_batches=4)
        engine.step()

`python zero.py` trains a small transformer on two CPU ranks under both stages, puts the formulas above beside what it
measures, and the weights beside those of one process.
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
import warnings
import weakref
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGN = 8  # elements: parameters and slices start on 16 bytes in half precision, so 16-byte accesses fit
# Gradients of so many elements are copied into their bucket as they come, which frees autograd's copy; smaller ones all
# at once when the bucket is complete, which saves a kernel launch for each.
COPY_NUMEL = 2**15
ENGINES = weakref.WeakKeyDictionary()  # model -> its engine's `_let_go`, weakly; a new engine for the same model calls it
HALF = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass
class Bucket:
    """Parameters whose gradients and weights travel together. Full tensors are (N*S,), slices (S,); rank r's is
    [r*S, (r+1)*S). `views[i]`: parameter i's place in `weights`, which is its .data; `starts[i]`: where that begins."""

    weights: Tensor
    starts: dict[int, int]
    views: dict[int, Tensor]
    own: slice
    master: Tensor  # (S,); the own slice of `weights` itself where that is precise enough
    shard: Tensor | None = None  # (S,) gradient of the own slice; in stage 1 a part of `grads`, offloaded in host memory
    grads: Tensor | None = None  # (N*S,) gradients of this rank: always there in stage 1, in stage 2 from filling to sending
    flat: Tensor | None = None  # stage 2: one of the two tensors for that, as long as the largest bucket; `grads` is its beginning
    landing: Tensor | None = None  # (S,) offload: where slices land in host memory, and from where new weights leave it
    owned: "list[tuple[Fragment, int]]" = dataclasses.field(default_factory=list)  # the optimizer's part; place in the slice
    missing: int = 0  # gradients of this backward that have not arrived yet
    launched: bool = False  # in this backward
    summing: "SliceSum | None" = None  # the reduce-scatter in flight
    gathering: "SliceGather | Fence | None" = None  # the gather in flight
    classes: dict[int, type] = dataclasses.field(default_factory=dict)  # while gathering: the parameters' own classes, by index
    stand_ins: dict[type, type] = dataclasses.field(default_factory=dict)  # own class -> its subclass of Pending, made once
    landed: "Fence | None" = None  # offload: the copy into `landing`
    adds_up: bool = False  # what has landed is to be added to `shard`, not to replace it


class Zero:
    """ZeRO-1 or ZeRO-2 training of `model` with Adam; see the file's docstring for the idea and the list of steps.

    params: None for all parameters, or param groups as any torch optimizer takes them. A parameter that is in no group is
    not trained; set its requires_grad to False, or it gathers gradients for nobody. precision: "fp32" leaves the model as it
    is, its weights being their own masters; "bf16" and "fp16" cast it and keep fp32 masters, fp16 with a dynamic loss
    scale. max_norm: clip to this global L2 norm, 0 for off. stage: 1 or 2. offload: optimizer and gradient slices in host
    memory. bucket_mb: capacity of the buckets in MiB of weights (a larger parameter has one for itself); stage 2 has room for
    two of the largest. overlap_gather: False makes `step` wait for the gathered weights. initial_scale, growth_interval,
    min_scale, max_scale: of fp16's loss scale, see LossScale. group: the process group to shard over, None for all ranks
    (or a single process without any group).
    Parameters and buffers are broadcast from the group's first rank, so models may be built with different seeds. An engine
    built on the model of another Zero takes it over, with its masters.
    Raises ValueError where ranks bring different models, parameters live on several devices, or an argument is wrong.
    """

    def __init__(self, model: nn.Module, params=None, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                 adamw=True, precision="bf16", max_norm=0.0, initial_scale=2.0**16, growth_interval=2000, min_scale=1.0,
                 max_scale=2.0**24, stage=2, offload=False, bucket_mb=25.0, overlap_gather=True, group=None):
        if precision not in HALF:
            raise ValueError(f"precision must be one of {', '.join(HALF)}, got {precision!r}")
        if stage not in (1, 2):
            raise ValueError(f"stage must be 1 or 2, got {stage!r}: parameters are sharded in fsdp.py and gemini.py")
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, got {growth_interval}")
        if bucket_mb <= 0:
            raise ValueError(f"bucket_mb must be positive, got {bucket_mb}")
        devices = {t.device for t in (*model.parameters(), *model.buffers())}
        if len(devices) != 1:
            raise ValueError(f"the model must live on one device, found {sorted(map(str, devices)) or 'no parameters'}")
        self._model, self.device, self.group = model, devices.pop(), group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        backends = dist.get_backend(group) if self.world_size > 1 else ""
        self.by_hand = self.world_size > 1 and backends != "nccl" and f"{self.device.type}:nccl" not in backends  # see SliceSum
        self.half, self.stage, self.offload, self.overlap_gather = HALF[precision], stage, offload, overlap_gather
        self.bucket_bytes, self.buckets = bucket_mb * 2**20, []
        self.traffic: dict[str, int] = {}  # bytes that this rank sent in the last step, by collective
        self._sent_bytes: dict[str, int] = {}  # the same, of the step that is under way

        self.scaler = LossScale(self.device, initial_scale if precision == "fp16" else 1.0, precision == "fp16",
                                growth_interval, min_scale, max_scale)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adamw=adamw)
        self.optimizer = Adam(self, params, defaults, max_norm, self.scaler)
        self.params, self.names = self.optimizer.params, self.optimizer.names  # what is trained, in the model's order
        for name, p in zip(self.names, self.params):
            if p.is_complex():
                raise ValueError(f"complex parameters are not supported: {name} is {p.dtype}")
        self._index = {p: i for i, p in enumerate(self.params)}
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self._check_same_model((precision, stage, offload, bucket_mb, max_norm, adamw, initial_scale, growth_interval,
                                min_scale, max_scale, bool(self.optimizer.cuda)))
        if (let_go := ENGINES.pop(model, lambda: None)()) is not None:
            let_go()
        # before: every rank has its own initial values.  after: all have those of the group's first rank.
        # sends: each tensor once, at construction only (not in `traffic`); everybody waits.
        for t in (*model.parameters(), *model.buffers()):
            self._broadcast(t.data)

        self._side = torch.cuda.Stream(self.device) if offload and self.device.type == "cuda" else None
        self._pinned = True  # until the system refuses it
        self._plain_dtypes = {name: t.dtype for name, t in model.state_dict().items() if isinstance(t, Tensor)}
        hooks = self._cast_model()
        self._lay_out_buckets()
        self._lay_out_running_statistics()
        self._sync = True  # False inside no_sync
        self._in_backward = False
        self._arrived = [False] * len(self.params)  # in this backward
        self._launched = 0  # buckets of this backward whose reduce-scatter has been issued
        self._in_flight: list[Bucket] = []
        self._reduced = False  # the shards hold sums over the ranks
        # Compiled code reads weights without asking: once torch.compile has been seen at work, forward waits for all.
        self._wait_for_all = any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
        me = weakref.ref(self)  # the garbage collector does not see through hooks of tensors: a plain reference would stay for ever

        def on_grad(index, param):
            if (engine := me()) is not None:
                engine._on_grad(index, param)

        hooks += [p.register_post_accumulate_grad_hook(functools.partial(on_grad, i)) for i, p in enumerate(self.params)]
        # lambdas: a deepcopy of the model shares them, while bound methods would be copied with their engine
        hooks += [m.register_forward_pre_hook(lambda m, _: self._before_module(m)) for m in model.modules() if m._parameters]
        hooks.append(model.register_forward_pre_hook(torch.compiler.disable(lambda *_: self._before_model()), prepend=True))
        self._hooks = hooks
        ENGINES[model] = weakref.WeakMethod(self._let_go)
        self.zero_grad()  # gradients from before belong to nobody
        self._sent_bytes = {}  # what construction sent is no step's

    # ---- 0. before training: who holds what --------------------------------------------------------------------------

    def _cast_model(self) -> list:
        """Decide the dtype that each trained parameter will have in its bucket; cast what has none, frozen parameters and
        buffers, now. Returns the hooks around modules with running statistics, which stay in fp32 with all inside them."""
        self._dtypes, hooks, in_fp32 = [p.dtype for p in self.params], [], set()
        for module in self._model.modules() if self.half else ():
            if any(name.startswith("running_") for name, b in module.named_buffers(recurse=False) if b.is_floating_point()):
                hooks += [module.register_forward_pre_hook(to_fp32, with_kwargs=True), module.register_forward_hook(back_to_given)]
                in_fp32.update(module.modules())
        for module in self._model.modules() if self.half else ():
            dtype = torch.float32 if module in in_fp32 else self.half
            for p in module.parameters(recurse=False):
                if p.is_floating_point() and p in self._index:
                    self._dtypes[self._index[p]] = dtype
                elif p.is_floating_point():
                    p.data = p.data.to(dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                    buffer.data = buffer.data.to(dtype)
        return hooks

    def _lay_out_buckets(self) -> None:
        """Cut the parameters, from the last to the first as backward meets them, into buckets of one dtype each, move the
        weights there, and take the own slices' masters from the weights as they were before the cast."""
        open_, closed = {}, []  # dtype -> parameter indices; the buckets' index lists in the order in which they filled
        size_bytes = dict.fromkeys(self._dtypes, 0)
        # Stage 2 has room for two buckets. gloo needs a third, for what is received, and gets three of 2/3 the size.
        capacity = self.bucket_bytes * (2 / 3 if self.by_hand and self.stage == 2 else 1)
        for i in reversed(range(len(self.params))):
            dtype = self._dtypes[i]
            p_bytes = aligned(self.params[i].numel()) * dtype.itemsize
            if open_.get(dtype) and size_bytes[dtype] + p_bytes > capacity:
                closed.append(open_.pop(dtype))
                size_bytes[dtype] = 0
            open_.setdefault(dtype, []).append(i)
            size_bytes[dtype] += p_bytes
        self._bucket_of = [0] * len(self.params)
        self.fragments: list[Fragment] = []
        for indices in closed + list(open_.values()):
            # part 0, which Adam updates first, is the last bucket, which forward reads first
            self.buckets.append(self._make_bucket(indices, part=len(closed) + len(open_) - 1 - len(self.buckets)))
        self._make_room()
        self._point_at_gradients()

    def _let_go(self) -> None:
        """Another engine takes the model over: give it whole weights as precise as the masters. Collectives."""
        for hook in self._hooks:
            hook.remove()
        self.wait_for_weights()
        for bucket in self.buckets:
            whole = torch.zeros(bucket.weights.numel(), dtype=bucket.master.dtype, device=self.device)
            whole[bucket.own].copy_(bucket.master)
            SliceGather(self, whole, tag=0).wait()
            for i, start in bucket.starts.items():
                self.params[i].data = whole[start : start + self.params[i].numel()].view(self.params[i].shape).clone()
        trained = set(self.params)
        for name, t in self._model.state_dict(keep_vars=True).items():
            if isinstance(t, Tensor) and t not in trained and t.dtype != self._plain_dtypes.get(name, t.dtype):
                t.data = t.data.to(self._plain_dtypes[name])

    def _make_room(self) -> None:
        """Memory that every backward uses again. Stage 2: two flat tensors of each dtype, one that is being filled with gradients
        and one on its way. gloo: one for what is received, see SliceSum."""
        largest: dict[torch.dtype, int] = {}
        for b in self.buckets:
            largest[b.weights.dtype] = max(largest.get(b.weights.dtype, 0), b.weights.numel())
        count = lambda dtype: min(2, sum(b.weights.dtype == dtype for b in self.buckets))
        self._spare = {dtype: [(torch.zeros(numel, dtype=dtype, device=self.device), Fence(None)) for _ in range(count(dtype))]
                       for dtype, numel in largest.items() if self.stage == 2}
        self._received = {dtype: torch.zeros(numel // self.world_size * (self.world_size - 1), dtype=dtype, device="cpu")
                          for dtype, numel in largest.items() if self.by_hand}
        self._room = [flat for spare in self._spare.values() for flat, _ in spare] + list(self._received.values())

    def _make_bucket(self, indices: list[int], part: int) -> Bucket:
        starts, numel = {}, 0
        for i in indices:
            starts[i] = numel
            numel += aligned(self.params[i].numel())
            self._bucket_of[i] = len(self.buckets)
        n, dtype = self.world_size, self._dtypes[indices[0]]
        slice_numel = aligned(-(-numel // n))
        own = slice(self.rank * slice_numel, (self.rank + 1) * slice_numel)
        weights = torch.zeros(n * slice_numel, dtype=dtype, device=self.device)
        views = {i: weights[start : start + self.params[i].numel()].view(self.params[i].shape) for i, start in starts.items()}
        master_dtype = torch.float32 if dtype == self.half else dtype
        needs_master = self.offload or master_dtype != dtype
        master = self._zeros(slice_numel, master_dtype) if needs_master else weights[own]
        bucket = Bucket(weights, starts, views, own, master)
        moments = [self._zeros(slice_numel, master.dtype) for _ in range(2)]
        if self.offload:
            bucket.landing = self._zeros(slice_numel, dtype)
        if self.stage == 1:
            bucket.grads = torch.zeros_like(weights)
        for i, start in starts.items():
            p, end = self.params[i], start + self.params[i].numel()
            lo, hi = max(start, own.start), min(end, own.stop)  # the part of it that is in the own slice
            if p.numel() == 0:
                lo = hi = own.start  # of a parameter without elements every rank has an empty fragment, so that all know it
            if lo < hi or p.numel() == 0:
                at, first = slice(lo - own.start, hi - own.start), max(lo - start, 0) if p.numel() else 0
                half = None if self.offload or master.dtype == dtype else weights[own][at]
                f = Fragment(self.names[i], i, tuple(p.shape), (tuple(slice(0, size) for size in p.shape),), first, first + hi - lo,
                             master[at], half=half, exp_avg=moments[0][at], exp_avg_sq=moments[1][at], part=part)
                if needs_master:
                    f.master.copy_(p.data.reshape(-1)[f.start : f.end])
                bucket.owned.append((f, at.start))
                self.fragments.append(f)
            views[i].copy_(p.data)
            p.data = views[i]
        return bucket

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros for the optimizer: on the device, or with `offload` in host memory, pinned, so that copies run beside
        everything else. Where pinning fails, says so once and goes on without."""
        if not self.offload:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        host = torch.zeros(numel, dtype=dtype, device="cpu")
        if self.device.type == "cuda" and self._pinned:
            try:
                return host.pin_memory()
            except RuntimeError as error:
                self._pinned = False
                print(f"zero: rank {self.rank}: host memory cannot be pinned, copies will be slower: {error}", file=sys.stderr)
        return host

    def _point_at_gradients(self, accumulate: bool = False) -> None:
        """(Re)make the gradient slices, what they hold moving along, and tell Adam. Once they are fp32 they stay so.

                                        `shard`, the gradient of the own slice       `grads`, whole gradients
            stage 1                     the own slice of `grads`                     always there
            stage 2                     a tensor of its own, weights' dtype          one of two flat tensors, while needed
            stage 2, accumulating       the same, at least fp32                      the same
            offload, stage 1 or 2       `landing` itself                             as without
            offload, 2, accumulating    a tensor of its own in host memory, fp32     the same
        """
        for bucket in self.buckets:
            dtype = torch.promote_types(bucket.weights.dtype, torch.float32) if accumulate else bucket.weights.dtype
            if self.stage == 1 and not self.offload:
                bucket.shard = bucket.grads[bucket.own]
            elif self.offload and not accumulate:
                bucket.shard = bucket.landing
            elif bucket.shard is None or bucket.shard is bucket.landing or bucket.shard.dtype != dtype:
                self._absorb(bucket)  # before what has landed is copied on
                shard = self._zeros(bucket.master.numel(), dtype)
                if bucket.shard is not None:
                    shard.copy_(bucket.shard)
                bucket.shard = shard
            for f, at in bucket.owned:
                f.grad = bucket.shard[at : at + f.end - f.start]
        self._accumulates = accumulate
        self.optimizer.own(self.fragments)

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
        text = repr([(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in self._model.named_parameters()]
                    + [(n, tuple(b.shape), b.dtype) for n, b in self._model.named_buffers()]
                    + [(n, k) for n, k in zip(self.names, self.optimizer.group_list)]
                    + [options_of(group) for group in self.optimizer.param_groups]
                    + [options_of(group) for group in self.optimizer.param_groups]) + repr(settings)
        digest = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
        ends = torch.tensor([digest, -digest], device=self.device)
        # before: each rank's hash h and -h.  after: [max h, -min h] everywhere.  sends: 2(N-1)/N * 16 bytes, once; all wait.
        self._all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends[0] != -ends[1]:
            raise ValueError("the ranks bring different models (names, shapes, dtypes), param groups or settings; "
                             f"rank {self.rank} has {len(self.names)} trained parameters and {settings}")

    # ---- 1. forward: a weight is waited for when it is read ----------------------------------------------------------

    def __call__(self, *args, **kwargs):
        return self._model(*cast(args, self.half), **cast(kwargs, self.half))

    def wait_for_weights(self) -> None:
        """Wait for every weight that the last `step` updated: under NCCL the current stream does, under gloo this thread."""
        for bucket in self.buckets:
            if bucket.gathering is not None:
                self._wait_for_gather(bucket)

    def _before_module(self, module: nn.Module) -> None:
        """A module's forward begins: its own parameters must be there, even if it hands them to code that torch does not see."""
        if torch.compiler.is_compiling():
            self._wait_for_all = True  # torch.compile traces this: what it makes of it will not ask, so from now on nobody needs to
        else:
            for p in module._parameters.values():
                if isinstance(p, Pending):
                    p.wait()

    def _before_model(self) -> None:
        if self._wait_for_all:
            self.wait_for_weights()

    def _wait_for_gather(self, bucket: Bucket) -> None:
        gathering, bucket.gathering = bucket.gathering, None
        for i, own_class in bucket.classes.items():
            self.params[i].__class__ = own_class
        bucket.classes = {}
        gathering.wait()
        if self.device.type == "cuda" and torch.cuda.current_stream(self.device) != self._stream:
            with torch.cuda.stream(self._stream):  # the training stream must wait, too: the parameter is marked no longer
                gathering.wait()
        if torch.compiler.is_compiling():
            self._wait_for_all = True

    def _mark_pending(self, bucket: Bucket) -> None:
        """From here on, whoever touches a parameter of this bucket waits first (class Pending)."""
        bucket.classes = {i: type(self.params[i]) for i in bucket.views}
        for i, own_class in bucket.classes.items():
            if own_class not in bucket.stand_ins:
                bucket.stand_ins[own_class] = type("Pending" + own_class.__name__, (Pending, own_class), {
                    "wait": staticmethod(torch.compiler.disable(
                        lambda: self._wait_for_gather(bucket) if bucket.gathering is not None else None))})
            self.params[i].__class__ = bucket.stand_ins[own_class]

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
                    else:  # its gradients are zeros, but the others wait for them
                        self._begin_backward()
                        self._end_backward(self._reducing)
            wait(loss_work)
        in_float64 = self.params and self.params[0].dtype == torch.float64  # as full_grad: fp32 but for float64 models
        return loss_sum if in_float64 else loss_sum.float()

    # ---- 2. backward, and the reduce-scatters inside it --------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Backward of this rank's mean loss; ranks count 1/N each. For a loop of your own, with `no_sync` around all but
        the last micro-batch; there, dividing by the number of micro-batches is yours. An exception discards what has
        accumulated."""
        with self._discard_on_error():
            self._backward(loss, 1.0 / self.world_size)

    @contextlib.contextmanager
    def no_sync(self):
        """Around `backward` of all micro-batches but the last; all ranks or none. Stage 1 then only accumulates on this rank, in
        the weights' dtype; stage 2 does reduce, since it has no room for whole gradients, but adds up in fp32 from the first
        on. If no later backward reduces what stage 1 has accumulated, `step` does."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def _discard_on_error(self):
        """After an exception some buckets may be summed and others not, so all that has accumulated goes."""
        try:
            yield
        except BaseException as error:
            self._in_backward = False
            in_flight, self._in_flight = self._in_flight, []
            for bucket in in_flight if isinstance(error, Exception) else ():  # Ctrl-C waits for nobody
                with contextlib.suppress(RuntimeError):  # a connection that is lost
                    bucket.summing.wait()
            for bucket in self.buckets:
                bucket.summing = None
                if bucket.flat is not None:
                    self._give_back(bucket)
            self.zero_grad()
            raise

    def _backward(self, loss: Tensor, share) -> None:
        """Autograd starts from `scale * share` instead of 1. The share, 1/N or micro-batch over total weight, comes in here
        and not after the sum: no further pass over the buckets, and the sum over ranks cannot overflow where one rank's
        gradient would not. In fp16 it makes small gradients smaller, which the loss scale makes up for as it grows."""
        if loss.numel() != 1:
            raise ValueError(f"backward needs a scalar loss, got shape {tuple(loss.shape)}")
        if loss.dtype in (torch.bfloat16, torch.float16):
            loss = loss.float()  # fp16 ends at 65504, and the first scale is 65536
        self._begin_backward()
        loss.backward(gradient=(self.scaler.state[SCALE] * share).to(loss.dtype).reshape(loss.shape))
        self._end_backward(self._reducing)

    def _check_model(self) -> None:
        """Is the model still as it was when the engine was built, and are its weights there?"""
        holder = ENGINES.get(self._model)
        if holder is None or holder() != self._let_go:
            raise RuntimeError("another engine has taken this model over: use that one")
        for name, p in self._frozen:
            if p.requires_grad:
                raise RuntimeError(f"{name} was frozen when the engine was built and has no bucket: unfreeze it before")
        self.wait_for_weights()  # of what this forward did not touch
        self._check_not_moved()

    def _begin_backward(self) -> None:
        self._check_model()
        if self.stage == 2 and not self._accumulates and (self._reduced or not self._sync):
            self._point_at_gradients(accumulate=True)
        if self.stage == 1 and self._reduced:  # a second backward before step adds to the sum, which only its owner holds
            for bucket in self.buckets:
                bucket.grads[: bucket.own.start].zero_()
                bucket.grads[bucket.own.stop :].zero_()
            self._reduced = False
        for bucket in self.buckets:
            bucket.missing, bucket.launched = len(bucket.views), False
        self._arrived = [False] * len(self.params)
        self._launched = 0
        self._in_backward = True

    def _check_not_moved(self) -> None:
        for i, p in enumerate(self.params):
            if p.data_ptr() != self.buckets[self._bucket_of[i]].views[i].data_ptr():
                raise RuntimeError(f"{self.names[i]} has moved since the engine was built, as by module.to(): "
                                   "move the model before")

    def _on_grad(self, index: int, param: nn.Parameter) -> None:
        """Autograd calls this after it has added a gradient into `param.grad`."""
        if not self._in_backward:
            self.zero_grad()
            raise RuntimeError("call engine.backward(loss) instead of loss.backward(): the gradient would miss the "
                               "loss scale, the average over ranks and the flush of unused parameters")
        if param.grad.is_sparse:
            raise RuntimeError(f"sparse gradients are not supported: {self.names[index]}; use sparse=False")
        bucket = self.buckets[self._bucket_of[index]]
        if self._arrived[index]:  # reentrant checkpointing brings it once per use: `.grad` has the sum, in time if not yet sent
            if bucket.launched:
                raise RuntimeError(f"the gradient of {self.names[index]} arrived again after its bucket was sent, as with "
                                   "reentrant activation checkpointing; use torch.utils.checkpoint(..., use_reentrant=False)")
            return
        self._arrived[index] = True
        self.optimizer.present[index] = 1
        bucket.missing -= 1
        # of later buckets autograd keeps the gradients until a flat tensor is free
        if self.stage == 1 or self._bucket_of[index] < self._launched + 2:
            if param.numel() >= COPY_NUMEL:
                self._fill(bucket, [index])
            if bucket.missing == 0:
                self._fill(bucket, bucket.views)
        while self._reducing and self._launched < len(self.buckets) and self.buckets[self._launched].missing == 0:
            self._launch(self.buckets[self._launched])

    _reducing = property(lambda self: self._sync or self.stage == 2, doc="does this backward end in sums over the ranks?")

    def _fill(self, bucket: Bucket, indices) -> None:
        """Copy gradients that autograd allocated into the bucket's flat tensor, in one call, and let `.grad` be the views: later
        gradients add up in place, and autograd's copy is freed. Zeros where no gradient came."""
        if bucket.grads is None:
            if not self._spare[bucket.weights.dtype]:
                self._finish(next(b for b in self._in_flight if b.weights.dtype == bucket.weights.dtype))
            bucket.flat, read = self._spare[bucket.weights.dtype].pop()
            read.wait()
            bucket.grads = bucket.flat[: bucket.weights.numel()]
        places, grads, absent = [], [], []
        for i in indices:
            p = self.params[i]
            place = bucket.grads[bucket.starts[i] : bucket.starts[i] + p.numel()].view(p.shape)
            if p.grad is not None and p.grad.data_ptr() == place.data_ptr() and p.numel():
                continue
            if p.grad is None:
                absent.append(place)
                if self.stage == 1:
                    self.optimizer.present[i] = 0  # if it was 1, the user has set an earlier micro-batch's gradient to None
            else:
                places.append(place)
                grads.append(p.grad)
            p.grad = place
        if len(places) == 1:  # copy_ takes the whole GPU for one tensor, _foreach_copy_ one block for each 65,536 elements
            places[0].copy_(grads[0])
        elif places:
            torch._foreach_copy_(places, grads)
        if absent:
            torch._foreach_zero_(absent)

    def _launch(self, bucket: Bucket) -> None:
        """Issue the next bucket's reduce-scatter. Always in the buckets' order, whatever the order of the gradients."""
        self._fill(bucket, bucket.views)
        if self.stage == 2:
            for i in bucket.views:
                self.params[i].grad = None  # what has been sent is no gradient any more
        while self.by_hand and self._in_flight:  # there is one place for what is received
            self._finish(self._in_flight[0])
        # starts the reduce-scatter; who holds what and what is sent: SliceSum
        bucket.summing = SliceSum(self, bucket.grads, self._launched, self._received.get(bucket.weights.dtype))
        bucket.launched = True
        self._launched += 1
        self._in_flight.append(bucket)

    def _finish(self, bucket: Bucket) -> None:
        """Wait for a reduce-scatter, put the sum where the optimizer finds it, give back what only the journey needed."""
        self._in_flight.remove(bucket)
        total, bucket.summing = bucket.summing.wait(), None
        if self.offload:
            self._land(bucket, total)
        elif self.stage == 2:
            bucket.shard.add_(total) if self._reduced else bucket.shard.copy_(total)
        if self.stage == 2:
            self._give_back(bucket)

    def _give_back(self, bucket: Bucket) -> None:
        """The flat tensor may be filled again, when a copy of its slice to host memory, on another stream, has read it."""
        self._spare[bucket.weights.dtype].append((bucket.flat, Fence(self._side)))
        bucket.grads = bucket.flat = None

    def _land(self, bucket: Bucket, total: Tensor) -> None:
        """Offload: copy the own slice to host memory, on a stream of its own, while backward goes on."""
        self._absorb(bucket)
        bucket.adds_up = self._reduced and self.stage == 2
        if self._side:
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            bucket.landing.copy_(total, non_blocking=True)
            bucket.landed = Fence(self._side)

    def _absorb(self, bucket: Bucket) -> None:
        """Offload: wait for the last copy into `landing` and, where micro-batches add up, add it to the slice's gradient."""
        if bucket.landed is not None:
            bucket.landed.wait_on_host()
            bucket.landed = None
            if bucket.shard is not bucket.landing:
                bucket.shard.add_(bucket.landing) if bucket.adds_up else bucket.shard.copy_(bucket.landing)

    def _end_backward(self, reduce: bool) -> None:
        """Autograd is through. Send the buckets that still miss a gradient, which will not come, and those queued behind them,
        and wait for all; under NCCL the stream waits, under gloo this thread."""
        self._in_backward = False
        if reduce:
            for bucket in self.buckets[self._launched :]:
                self._launch(bucket)
            while self._in_flight:
                self._finish(self._in_flight[0])
            self._reduced = True

    def _reduce_what_is_left(self) -> None:
        """Reduce now if no backward since the last step has: there was none (then zeros, as the other ranks do), or all were
        inside no_sync of stage 1."""
        if not self._reduced:
            self._begin_backward()
            self._end_backward(True)
        for bucket in self.buckets:
            self._absorb(bucket)

    # ---- 3. step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One optimizer step: what is left to reduce, norm, overflow check, clip, Adam on the own slices, gather."""
        self.optimizer.step()  # through the optimizer, so that schedulers see the call; it calls `_step`

    def _step(self) -> None:
        self._reduce_what_is_left()
        self._check_gradients_in_place()
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
        self._stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        if self._side:  # backward has read the old weights
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        adam.update(len(self.buckets), after=self._gather)
        for flat, work in zip(self._statistics, statistics_works):
            wait(work)
            flat.div_(self.world_size)
        # A CUDA graph (`capture`) must end with its gathers done: there they hide behind nothing.
        if not self.overlap_gather or self._stream and torch.cuda.is_current_stream_capturing():
            self.wait_for_weights()
        self.zero_grad()
        self.traffic, self._sent_bytes = self._sent_bytes, {}
        self.scaler.raise_if_stuck()

    def _check_gradients_in_place(self) -> None:
        for bucket in self.buckets if self.stage == 1 else ():
            for i, start in bucket.starts.items():
                grad = self.params[i].grad
                if grad is None or grad.numel() and grad.data_ptr() != bucket.grads[start:].data_ptr():
                    raise RuntimeError(f"{self.names[i]}.grad was replaced or removed before step: change it in place")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard what has accumulated since the last step. `step` does so itself; calling it again is harmless."""
        for p in self.params:
            p.grad = None
        for bucket in self.buckets:
            self._absorb(bucket)
        self.optimizer.present[:] = bytes(len(self.params))
        self._reduced = False

    # ---- 4. gather ---------------------------------------------------------------------------------------------------

    def _gather(self, part: int) -> None:
        """Adam has updated part 0, the bucket that forward reads first, then 1, ...: send its own slice to everybody."""
        bucket = self.buckets[len(self.buckets) - 1 - part]
        with torch.cuda.stream(self._side):
            if self.offload:  # Adam, in host memory, is done with the gradients in `landing`: new weights leave from there
                bucket.landing.copy_(bucket.master)
                bucket.weights[bucket.own].copy_(bucket.landing, non_blocking=True)
            # starts the all-gather; who holds what and what is sent: SliceGather. Tags 0 to B-1 are the reduce-scatters'.
            bucket.gathering = SliceGather(self, bucket.weights, tag=len(self.buckets) + part)
            if self._side and self.world_size == 1:
                bucket.gathering = Fence(self._side)  # alone there is nothing to gather, only the copy
        self._mark_pending(bucket)

    # ---- what users read ---------------------------------------------------------------------------------------------

    grad_norm = property(lambda self: self.scaler.state[GRAD_NORM].clone(), doc="true global L2 norm before clipping")
    scale = property(lambda self: self.scaler.state[SCALE].clone(), doc="loss scale, a device tensor")
    skipped = property(lambda self: self.scaler.state[SKIPPED] > 0, doc="was the last step skipped for an overflow?")
    skipped_steps = property(lambda self: self.scaler.state[SKIPPED_STEPS].long(), doc="how many were")

    @property
    def module(self) -> nn.Module:
        """The model, all its weights in place."""
        self.wait_for_weights()
        return self._model

    def train(self, mode: bool = True) -> "Zero":
        self._model.train(mode)
        return self

    def eval(self) -> "Zero":
        return self.train(False)

    def named_parameters(self):
        return self.module.named_parameters()

    def full_grad(self, name: str) -> Tensor:
        """The averaged, unscaled, unclipped gradient of one parameter, whole, on the CPU, fp32 (float64 for float64);
        zeros where no rank had one. A collective, between the last backward and `step`."""
        if name not in self.names:
            raise ValueError(f"{name!r} is not a trained parameter; trained are {', '.join(self.names[:8])}, ...")
        reduced = self._reduced
        self._reduce_what_is_left()
        self._reduced = reduced or self.stage == 1  # of no backward at all, the next one is not a second
        index = self.names.index(name)
        p = self.params[index]
        full = torch.zeros(p.numel(), dtype=torch.promote_types(p.dtype, torch.float32), device=self.device)
        for f in self.fragments:
            if f.index == index:
                full[f.start : f.end] = f.grad.to(self.device)
        # before: each rank has its own slice's part, zeros beside it.  after: all have the whole.  sends: 2(N-1)/N of it; all wait.
        self._all_reduce(full)
        return full.view(p.shape).cpu() / self.scaler.state[SCALE].item()

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of live storages on this rank, by kind and device: parameters, gradients, optimizer, buffers."""
        separate = [b for b in self.buckets if b.master.data_ptr() != b.weights[b.own].data_ptr()]
        held = {
            "parameters": [*self._model.parameters()],
            "gradients": [*(t for b in self.buckets for t in (b.grads, b.shard, b.landing)), *(p.grad for p in self.params),
                          *self._room],
            "optimizer": [b.master for b in separate] + [t for f in self.fragments for t in (f.exp_avg, f.exp_avg_sq)],
            "buffers": [*self._model.buffers()],
        }
        return {kind: storage_bytes(tensors) for kind, tensors in held.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The plain model's state dict, weights from the masters, as copies on the CPU of rank 0; an empty dict on the others.
        A collective. dtypes are those the model came with."""
        masters = dict(gather_full(self, self.fragments, "master"))
        if self.rank != 0:
            return {}
        full = {}
        for key, value in self.module.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter) and value in self._index:
                value = masters[self.names[self._index[value]]]
            if isinstance(value, Tensor):
                value = value.detach().to("cpu", self._plain_dtypes.get(key, value.dtype), copy=True)
            full[key] = value
        return full

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load rank 0's full state dict (what other ranks pass is ignored) on every rank, masters included; a collective.
        Adam's moments stay. Raises CheckpointError, a ValueError, on all ranks and before anything changes, for missing or
        unexpected names and for other shapes."""
        own = self.module.state_dict(keep_vars=True)

        def check():
            refuse_extra_state(own)
            if self.rank == 0:
                missing, extra = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
                shapes = [f"{k} {tuple(state_dict[k].shape)} instead of {tuple(v.shape)}" for k, v in own.items()
                          if isinstance(v, Tensor) and k in state_dict and state_dict[k].shape != v.shape]
                if missing or extra or shapes:
                    raise CheckpointError(f"the state dict does not fit: missing {missing}, unexpected {extra}, "
                                          f"other shapes {shapes}")

        together(self, check)
        name_of = {key: self.names[self._index[v]] for key, v in own.items() if isinstance(v, nn.Parameter) and v in self._index}
        masters = {name: state_dict[key] for key, name in name_of.items()} if self.rank == 0 else {}
        scatter_full(self, self.fragments, "master", masters)
        for key, value in own.items():
            if key not in name_of and isinstance(value, Tensor):
                if self.rank == 0:
                    value.data.copy_(state_dict[key])
                self._broadcast(value.data)
        self._refresh_weights()

    def _refresh_weights(self) -> None:
        """After the masters have changed otherwise than by Adam: round them into the weights and send those round."""
        for bucket in self.buckets:
            if bucket.master.data_ptr() != bucket.weights[bucket.own].data_ptr():
                bucket.weights[bucket.own].copy_(bucket.master)
            SliceGather(self, bucket.weights, tag=0).wait()
        self._sent_bytes = {}

    def save(self, directory: str, **extra) -> None:
        """Write a checkpoint that any strategy resumes on any number of ranks: fp32 masters, moments, step counts, buffers,
        param groups' options, loss scale, each rank's random numbers (torch's and Python's), and `extra`: plain data, and
        objects like schedulers by their state_dict(). A collective, between steps; every rank sees the same file system.
        Overwrites a checkpoint, never anything else; killed at any moment it leaves a complete one. Raises CheckpointError.
        """
        if own := [name for name in extra if name.startswith("_")]:
            raise CheckpointError(f"names with _ in front are the engine's own: {', '.join(own)}")
        self.wait_for_weights()
        self._check_not_moved()
        save_checkpoint(self, directory, extra)

    def load(self, directory: str, **objects) -> dict:
        """Continue from a checkpoint of any strategy: engine.load(dir, scheduler=scheduler) gives each object the state that was
        saved under its name and returns the other extras. On as many ranks the run goes on bit for bit, random numbers
        included; on another number they are left as they are. Discards gradients. Raises CheckpointError, on all ranks and
        before anything changes, for what is missing, damaged, of another shape or in another param group."""
        self.wait_for_weights()
        self._check_not_moved()
        extra = load_checkpoint(self, directory, objects)
        self.zero_grad()
        self._refresh_weights()
        return {k: v for k, v in extra.items() if not k.startswith("_")}

    def kept(self) -> "list[Fragment]":
        """What a checkpoint holds beside what is trained: frozen parameters, and the buffers that are in the state dict."""
        trained, persistent = set(self.names), refuse_extra_state(self._model.state_dict())
        rest = [(n, p.data, FROZEN) for n, p in self._model.named_parameters() if n not in trained]
        rest += [(n, b, BUFFER) for n, b in self._model.named_buffers() if n in persistent]
        return [Fragment(n, i, tuple(t.shape), (tuple(slice(0, s) for s in t.shape),), 0, t.numel(), t) for n, t, i in rest]

    def capture(self, batch, micro_batches: int = 1, loss_fn=None, weight=None) -> "StepGraph":
        """A step, `forward_backward` and `step`, as one CUDA graph; arguments as for `forward_backward`. Takes no step. Returns
        train_step: train_step(batch) copies a batch of the same shapes and dtypes into the graph's own tensors, replays, and
        returns the loss. A collective, between steps; with GPUs, NCCL, adam_cuda.cu and fp32 masters only.

        Bit for bit the eager step, learning rates and other options being what the groups have by then. Eager steps, evaluation,
        `save` and `load` may come in between. What Python decides in the model, loss_fn and weight stays as it was; their hooks
        do not run. The gathers end with the graph, as with overlap_gather=False. Keep no outputs of eager steps: parts of
        autograd stay with them, on another stream. Let go of train_step before the process group is destroyed: NCCL waits for the
        end of graphs that use it.
        Raises ValueError or RuntimeError, and nothing has changed, where the step waits for the device or draws random numbers on
        the host, a batch does not fit, or gradients have accumulated."""
        if self.offload:
            raise ValueError("Zero.capture: with offload=True the CPU runs Adam and waits for the norm, which no graph can hold")
        return StepGraph(self, batch, micro_batches, loss_fn, weight)

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


# ---- who touches a weight that is on its way waits for it -------------------------------------------------------------


class Pending:
    """Stands in the class of a parameter whose new weights are on their way: any torch function that gets the parameter waits,
    gives it its own class back, and goes on. It matters not who calls: a module, its parent, an LSTM with a list of its
    own, a penalty on the weights, a copy for an average of them. What only asks for shape, dtype or `.grad` need not wait."""

    wait = None  # of each bucket's own subclass

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in NO_WEIGHTS_READ:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        for kind in types:
            if issubclass(kind, Pending):
                kind.wait()
        return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo):
        self.wait()  # and now it is a plain parameter again
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol):
        self.wait()
        return self.__reduce_ex__(protocol)


NO_WEIGHTS_READ = {getattr(Tensor, name).__get__ for name in (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "is_cuda", "itemsize", "nbytes")}
NO_WEIGHTS_READ |= {Tensor.grad.__set__, Tensor.grad.__delete__, Tensor.size, Tensor.numel, Tensor.dim, Tensor.stride,
                    Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__}


# ---- shared blocks: the same text in every strategy file -------------------------------------------------------------


# >>> shared block: graph
class StepGraph:
    """A training step as one CUDA graph: the host starts hundreds of kernels with one call. `capture` makes it.

    Which kernels run, in which order, on which memory, has been decided once. What changes from step to step is on the device: the
    batch, the groups' options and which parameters will have a gradient are sent there before each replay; loss scale, skips,
    step counts and random numbers go on by themselves.
    """

    def __init__(self, engine, batch, *how):
        adam, name = engine.optimizer, f"{type(engine).__name__}.capture"
        backend = dist.get_backend(engine.group) if engine.world_size > 1 else "nccl"
        if engine.device.type != "cuda":
            raise ValueError(f"{name}: a CUDA graph needs a GPU, the model is on {engine.device}")
        if backend != "nccl" and "cuda:nccl" not in backend:
            raise ValueError(f"{name}: collectives must be NCCL's, those of {backend} wait on the host")
        if not adam.cuda or adam.calls:
            raise ValueError(f"{name}: needs adam_cuda.cu and fp32 masters; torch's fused Adam, in other cases, asks the host")
        self.engine, self.how, self.graph, self.items = engine, how, None, {}
        self._check()
        place = lambda x: torch.empty_like(x, device=engine.device).copy_(x.detach()) if isinstance(x, Tensor) else x
        self.batch = visit(batch, lambda path, x: self.items.setdefault(path, place(x)))
        self._record()

    def _check(self) -> None:
        self.engine._check_model()
        if self.engine._reduced or any(self.engine.optimizer.present) or any(p.grad is not None for p in self.engine.params):
            raise RuntimeError("there are gradients since the last step, which a graph would not see: call step() or zero_grad()")

    def _run(self) -> Tensor:
        torch.clear_autocast_cache()  # where the caller has a region of autocast: casts of weights as they once were
        loss = self.engine.forward_backward(self.batch, *self.how)
        self.engine._step()
        torch.clear_autocast_cache()
        return loss

    def _record(self) -> None:
        """Two rehearsals, then the capture, which runs nothing. The first builds what is built once (buckets in their final order,
        NCCL's connections, cuBLAS's memory). In the second, waiting for the device is an error, and a model that asks is told that
        it is captured: a capture that failed would leave torch's allocator and random numbers in disorder.

        A rehearsal is a step with an infinite loss scale: no gradient is finite, so Adam leaves weights, moments and step counts
        alone, as after any overflow. What else it changes is put back: loss scale, buffers, random numbers, `traffic`."""
        engine, adam, scaler, device = self.engine, self.engine.optimizer, self.engine.scaler, self.engine.device
        torch.cuda.synchronize(device)  # the graph that this one replaces may be at work
        self.graph = self.loss = None
        kept, traffic = [(t, t.clone()) for t in (scaler.state, *engine.module.buffers())], engine.traffic
        drawn = torch.get_rng_state(), random.getstate(), torch.cuda.get_rng_state(device)
        mode, attempt = torch.cuda.get_sync_debug_mode(), "rehearsal"
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream), warnings.catch_warnings(), \
                    instead(scaler, raise_if_stuck=lambda: None):
                warnings.filterwarnings("ignore", "Synchronization debug mode")  # is a prototype
                torch.cuda.set_sync_debug_mode("default")
                scaler.state[SCALE] = math.inf
                self._run()
                attempt = "dress rehearsal"
                with instead(torch.cuda, is_current_stream_capturing=lambda: True):
                    torch.cuda.set_sync_debug_mode("error")
                    self._run()
                    torch.cuda.set_sync_debug_mode("default")
                if not torch.equal(torch.get_rng_state(), drawn[0]) or random.getstate() != drawn[1]:
                    raise RuntimeError("The model draws random numbers on the host, and a graph would repeat what came of them")
                attempt, note = "capture", lambda: setattr(self, "present", bytes(adam.present))
                # thread_local: other threads, a data loader's or NCCL's, may go on calling CUDA
                with instead(adam, send_hyperparameters=lambda: None, send_presence=note), \
                        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    self.loss = self._run()
        except Exception as error:
            engine.zero_grad()
            if attempt == "rehearsal":
                raise  # an eager step would not run, either
            if attempt == "capture":  # the default generator still counts for a graph, and would refuse to draw outside one
                torch.cuda.default_generators[device.index].graphsafe_set_state(torch.Generator(device))
            raise RuntimeError(f"{type(engine).__name__}.capture: this step cannot be a graph, which neither waits for the device "
                               f"nor asks the host; nothing has changed. {error.__context__ or error}") from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.synchronize(device)
            for t, value in kept:
                t.data.copy_(value)
            torch.set_rng_state(drawn[0])
            random.setstate(drawn[1])
            torch.cuda.set_rng_state(drawn[2], device)
            self.traffic, engine.traffic = engine.traffic, traffic
        self.graph, self.table, self.training = graph, adam.table, engine.module.training

    def __call__(self, batch) -> Tensor:
        """One step on a batch like the captured one. Returns its loss."""
        engine, given, words = self.engine, {}, lambda x: f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)
        visit(batch, given.__setitem__)
        pairs = {path: (words(given.get(path)), words(self.items.get(path))) for path in {**self.items, **given}}
        if faults := [f"{path} is {new} instead of {old}" for path, (new, old) in pairs.items() if new != old]:
            raise ValueError(f"the step was captured for another batch: {', '.join(faults)}; use forward_backward and step here")
        self._check()
        if engine.module.training != self.training:
            raise RuntimeError(f"the step was captured after engine.{'train' if self.training else 'eval'}(): call that first")
        if self.graph is None or self.table is not engine.optimizer.table:  # `load`, or a step of another kind, has moved tensors
            self._record()
        for path, place in self.items.items():
            if isinstance(place, Tensor):
                place.copy_(given[path].detach(), non_blocking=True)
        with instead(engine, _step=self._replay):  # through the optimizer: schedulers see the call, hooks of its `step` run
            engine.step()
        return self.loss.clone()  # the next replay writes into `loss`

    def _replay(self) -> None:
        engine, adam = self.engine, self.engine.optimizer
        adam.present[:] = self.present
        adam.send_hyperparameters()
        adam.send_presence()
        adam.present[:] = bytes(len(self.present))
        self.graph.replay()
        engine.traffic = dict(self.traffic)
        engine.scaler.raise_if_stuck()


def visit(x, leaf, path="batch"):
    """The same containers with leaf(path, item) in the place of every item."""
    if isinstance(x, Mapping):
        return {key: visit(value, leaf, f"{path}[{key!r}]") for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return getattr(type(x), "_make", type(x))([visit(value, leaf, f"{path}[{i}]") for i, value in enumerate(x)])
    return leaf(path, x)


@contextlib.contextmanager
def instead(thing, **functions):
    """Inside, `thing` has these functions in the place of its own."""
    own = {name: vars(thing)[name] for name in functions if name in vars(thing)}
    vars(thing).update(functions)
    try:
        yield
    finally:
        for name in functions:
            del vars(thing)[name]
        vars(thing).update(own)
# <<< shared block: graph


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


# ---- demonstration: python zero.py -----------------------------------------------------------------------------------


def demonstration(device: torch.device) -> None:
    """Train a small transformer for three steps in float64 beside one process that sees the whole batch, then in bf16 under both
    stages, and print what is held and sent beside the formulas of the docstring."""
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

    lines = []
    for stage in (1, 2):
        model, plain = build(torch.float64), build(torch.float64)
        engine = Zero(model, lr=1e-3, eps=1e-3, weight_decay=0.01, max_norm=1.0, precision="fp32", stage=stage, bucket_mb=1.0)
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
        gap = max((p - q).abs().max().item() for (_, p), q in zip(engine.named_parameters(), plain.parameters()))

        engine = Zero(build(torch.float32), lr=1e-3, precision="bf16", stage=stage, bucket_mb=0.5)
        numel = sum(p.numel() for p in engine.module.parameters())
        for _ in range(2):
            engine.wait_for_weights()
            dist.barrier()
            before = sent_bytes()
            loss = engine.forward_backward((tokens[mine], labels[mine]), loss_fn=loss_fn)
            held = engine.memory()
            engine.step()
            engine.wait_for_weights()
            dist.barrier()
            wire = sent_bytes() - before
        lines.append(f"\nstage {stage}: last loss {loss:.4f} in bf16; largest distance from one process, float64, 3 steps: "
                     f"gradients {grad_gap:.1e}, parameters {gap:.1e}")
        lines.append(f"{'bytes per parameter on rank 0, bf16':48}{'formula':>10}{'measured':>10}")
        room = sum(t.numel() * t.element_size() for t in engine._room)
        held["gradients"]["room"] = -room
        for kind, formula in (("parameters", 2), ("gradients", 2 if stage == 1 else 2 / n), ("optimizer", 12 / n)):
            lines.append(f"{kind:48}{formula:10.2f}{sum(held[kind].values()) / numel:10.2f}")
        at_most = (1.0 if stage == 2 else 0.5) * 2**20 / numel  # two buckets; in stage 1 what gloo receives
        lines.append(f"{'room for buckets on their way, at most':48}{at_most:10.2f}{room / numel:10.2f}")
        for collective in ("reduce_scatter", "all_gather"):
            counted = engine.traffic.get(collective, 0) / numel
            lines.append(f"{collective + ' per step, counted by the engine':48}{(n - 1) / n * 2:10.2f}{counted:10.2f}")
        if wire:
            lines.append(f"{'sent per step, as the sockets count it':48}{(n - 1) / n * 4:10.2f}{wire / numel:10.2f}")
    if rank == 0:
        print(f"\n{n} ranks on {device.type}, {numel:,} parameters")
        print("\n".join(lines))


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
