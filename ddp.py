"""DDP: every rank holds the whole model and its own share of the batch; gradients are summed over the ranks.

Each rank runs forward and backward on different samples. Before the optimizer step the gradients are averaged over
all ranks, so every rank applies the same update to the same weights and the replicas never part.

                 rank 0      rank 1      bytes per rank; Ψ parameters, N ranks
    p            [ A | B ]   [ A | B ]   4Ψ    fp32 weights; in fp16 and bf16 autocast's half copies of them
                                                 take up to 2Ψ more from forward to backward
    m, v         [ A | B ]   [ A | B ]   8Ψ    Adam's two moments
    grads        [ A | B ]   [ A | B ]   4Ψ    in flat buckets; parts of the mean, summed over the ranks during backward
    batch        [ x0 x1 ]   [ x2 x3 ]         what differs
    BERT-base (Ψ = 109.5e6): 16Ψ = 1.75 GB on every rank, however many there are; zero.py divides it.

    1. forward        on this rank's samples; 8 bytes sum the batches' weights over the ranks, 8 more later their losses.
    2. backward       the last layer's gradient comes first. As soon as every gradient of a bucket is there, and all
                      buckets before it have been sent, it is all-reduced while autograd computes the next layers:

                      compute   | grad layer 4 | grad layer 3 | grad layer 2 | grad layer 1 |
                      network                  | all-reduce 4 | all-reduce 3 | all-reduce 2 | all-reduce 1 |

    3. step           norm over all gradients, overflow check, clip, Adam: the same arithmetic on every rank, and so the
                      same weights. BatchNorm's running statistics are averaged.

Autograd allocates each gradient anew; it is copied into its bucket, and `.grad` becomes a view of it, to which further
micro-batches add in place. Between steps `.grad` is None. Which parameters had a gradient, hooks note: all
ranks leave alone those that had none on any of them (8 bytes per parameter tensor, summed behind the last bucket).

    An all-reduce of B bytes over a ring sends 2(N-1)/N * B bytes per rank: each rank sums one N-th, which takes (N-1)/N, and
    handing the sums round takes as much. 4Ψ bytes of gradients on 8 ranks: 7Ψ bytes, 766 MB a step for BERT-base.

Why buckets: one collective per parameter would pay the latency 200 times, one for all parameters could not start
before backward ends. Why in a fixed order: collectives are matched by position. If rank 0 sent bucket 2 while rank 1
sent bucket 1, they would hang, or, being of one size, be added up without an error.

After construction nothing keeps replicas equal but equal arithmetic: buffers other than running statistics are never
communicated. All ranks must make the same calls in the same order (backward, no_sync, zero_grad, step); an exception on
one of them ends the run. Left out: sparse gradients, complex parameters and models spread over several devices (refused
by name).

PyTorch Distributed, arXiv:2006.15704 (buckets §3.2.2, overlap and unused parameters §3.2.3, no_sync §3.2.4);
ring all-reduce: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009), §3; loss scale: arXiv:1710.03740 §3.2.

    engine = DDP(model, [{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-4, weight_decay=0.01)
    for batch in loader:                                    # this rank's share of the global batch
        loss = engine.forward_backward(batch)               # or: loss = engine(x).mean(); engine.backward(loss)
        engine.step()

`python ddp.py` trains a small transformer on two CPU ranks, puts the formulas above beside what it measures, and the
weights beside those of one process. Two sections may be skipped on a first reading: compressed gradients, SyncBatchNorm.
"""
import contextlib
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
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGN = 8  # elements: each parameter starts on 32 bytes in fp32 and 16 in half precision, so 16-byte accesses fit
# Gradients of so many elements are copied into their bucket as they come, which frees autograd's copy; smaller ones all
# at once when the bucket is complete, which saves a kernel launch for each.
COPY_NUMEL = 2**15
HOOKS = weakref.WeakKeyDictionary()  # model -> the hooks of its engine; a new engine for the same model removes them
HALF = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass
class Bucket:
    """Gradients that travel together. `flat` (numel,) holds them one after the other, `views[i]` is the part of parameter
    i, with its shape and strides; padding between them stays zero."""

    flat: Tensor
    views: dict[int, Tensor]
    missing: int = 0  # gradients of this backward that have not arrived yet
    work: "dist.Work | HalfSum | Fp8Sum | None" = None  # the reduction in flight


class DDP:
    """Data-parallel training of `model` with Adam; see the file's docstring for the idea and the list of steps.

    params: None for all parameters, or param groups as any torch optimizer takes them. A parameter that is in no group
    is not trained: its gradient stays local, as with a plain optimizer. precision: "fp32" leaves the model as it is,
    "bf16" and "fp16" run it under autocast, fp16 with a dynamic loss scale. max_norm: clip to this global L2 norm, 0
    for off. bucket_mb, first_bucket_mb: capacity of the buckets in MiB; a small first one lets communication start
    early. initial_scale, growth_interval, min_scale, max_scale: of fp16's loss scale, see LossScale. compression: send
    gradients as "bf16", "fp16" or "fp8". group: the process group to average over, None for all ranks (or a single
    process without any group).
    Parameters and buffers are broadcast from the group's first rank, so models may be built with different seeds.
    Raises ValueError where ranks bring different models, parameters live on several devices, or an argument is wrong.
    """

    def __init__(self, model: nn.Module, params=None, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                 adamw=True, precision="fp32", max_norm=0.0, initial_scale=2.0**16, growth_interval=2000, min_scale=1.0,
                 max_scale=2.0**24, bucket_mb=25.0, first_bucket_mb=1.0, compression=None, group=None):
        if precision not in HALF:
            raise ValueError(f"precision must be one of {', '.join(HALF)}, got {precision!r}")
        if compression not in (None, *COMPRESSION):
            raise ValueError(f"compression must be None or one of {', '.join(COMPRESSION)}, got {compression!r}")
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, got {growth_interval}")
        if bucket_mb <= 0 or first_bucket_mb <= 0:
            raise ValueError(f"bucket_mb and first_bucket_mb must be positive, got {bucket_mb} and {first_bucket_mb}")
        devices = {t.device for t in (*model.parameters(), *model.buffers())}
        if len(devices) != 1:
            raise ValueError(f"the model must live on one device, found {sorted(map(str, devices)) or 'no parameters'}")
        self.module, self.device, self.group = model, devices.pop(), group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.half, self.compression = HALF[precision], COMPRESSION.get(compression)
        self.bucket_bytes, self.first_bucket_bytes = bucket_mb * 2**20, first_bucket_mb * 2**20
        self.traffic: dict[str, int] = {}  # bytes that a ring sends from this rank, in the last step, by collective
        self._sent: dict[str, int] = {}  # the same, of the step that is under way

        self.scaler = LossScale(self.device, initial_scale if precision == "fp16" else 1.0, precision == "fp16",
                                growth_interval, min_scale, max_scale)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adamw=adamw)
        self.optimizer = Adam(self, params, defaults, max_norm, self.scaler)
        self.params, self.names = self.optimizer.params, self.optimizer.names  # what is trained, in the model's order
        for name, p in zip(self.names, self.params):
            if p.is_complex():
                raise ValueError(f"complex parameters are not supported: {name} is {p.dtype}")
            if torch.empty_like(p).stride() != p.stride():  # holes or overlap: a slice or an expanded view of something
                p.data = p.data.contiguous()
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]

        self._check_same_model((precision, compression, bucket_mb, first_bucket_mb, max_norm, adamw, initial_scale,
                                growth_interval, min_scale, max_scale, bool(self.optimizer.cuda)))
        # before: every rank has its own initial values.  after: all have those of the group's first rank.
        # sends: each tensor once, at construction only (not in `traffic`); everybody waits.
        for t in (*model.parameters(), *model.buffers()):
            self._broadcast(t.data)

        # What the optimizer owns here (class Fragment, below): whole parameters, the gradients being views of buckets.
        self.fragments = [Fragment(n, i, tuple(p.shape), (tuple(slice(0, s) for s in p.shape),), 0, p.numel(), p.data)
                          for i, (n, p) in enumerate(zip(self.names, self.params))]
        self._lay_out_buckets(list(reversed(range(len(self.params)))))  # a guess: backward runs from the end
        self._lay_out_running_statistics()
        self._sync = True  # False inside no_sync
        self._in_backward = False
        self._arrived = [False] * len(self.params)  # in this backward
        self._order: list[int] = []  # parameters in the order in which their gradients arrived in this backward
        self._launched = 0  # buckets of this backward whose all-reduce has been issued
        self._reduced = False  # the buckets hold sums over the ranks
        self._first_order: list[int] = []  # _order of the first backward; the buckets are rebuilt by it
        self._rebuilt = False
        for hook in HOOKS.pop(model, ()):
            hook.remove()
        me = weakref.ref(self)  # the garbage collector does not see through hooks of tensors: a plain reference would stay for ever

        def on_grad(index, param):
            if (engine := me()) is not None:
                engine._on_grad(index, param)

        self._hooks = HOOKS[model] = [p.register_post_accumulate_grad_hook(functools.partial(on_grad, i))
                                      for i, p in enumerate(self.params)]
        self.zero_grad()  # gradients from before belong to nobody
        self._sent = {}  # what construction sent is no step's

    # ---- 0. before training: who holds what --------------------------------------------------------------------------

    def _lay_out_buckets(self, order: list[int]) -> None:
        """Cut the parameters, in this order, into buckets of one dtype each, and point Adam at the gradients in them.

        A bucket is closed when the next parameter would exceed its capacity; a larger parameter has one for itself.
        """
        open_, closed = {}, []  # dtype -> parameter indices; the buckets' index lists in the order in which they filled
        size_bytes = dict.fromkeys((p.dtype for p in self.params), 0)
        for i in order:
            p = self.params[i]
            p_bytes = -(-p.numel() // ALIGN) * ALIGN * p.element_size()
            capacity = self.bucket_bytes if closed else self.first_bucket_bytes
            if open_.get(p.dtype) and size_bytes[p.dtype] + p_bytes > capacity:
                closed.append(open_.pop(p.dtype))
                size_bytes[p.dtype] = 0
            open_.setdefault(p.dtype, []).append(i)
            size_bytes[p.dtype] += p_bytes
        self.buckets: list[Bucket] = []
        self._bucket_order = order
        self._bucket_of = [0] * len(self.params)
        for indices in closed + list(open_.values()):
            starts, numel = [], 0
            for i in indices:
                starts.append(numel)
                numel += -(-self.params[i].numel() // ALIGN) * ALIGN
                self._bucket_of[i] = len(self.buckets)
            flat = torch.zeros(numel, dtype=self.params[indices[0]].dtype, device=self.device)
            views = {i: flat.as_strided(self.params[i].shape, self.params[i].stride(), start)
                     for i, start in zip(indices, starts)}
            for i, view in views.items():
                self.fragments[i].grad = view
            self.buckets.append(Bucket(flat, views))
        self.optimizer.own(self.fragments)

    def _lay_out_running_statistics(self) -> None:
        """Make BatchNorm's running means and variances views of one flat tensor per dtype, to be averaged at once."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name, buffer in self.module.named_buffers():
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
        text = repr([(n, tuple(p.shape), p.stride(), p.dtype, p.requires_grad) for n, p in self.module.named_parameters()]
                    + [(n, tuple(b.shape), b.dtype) for n, b in self.module.named_buffers()]
                    + [(n, k) for n, k in zip(self.names, self.optimizer.group_list)]
                    + [options_of(group) for group in self.optimizer.param_groups]) + repr(settings)
        digest = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
        ends = torch.tensor([digest, -digest], device=self.device)
        # before: each rank's hash h and -h.  after: [max h, -min h] everywhere.  sends: 2(N-1)/N * 16 bytes, once; all wait.
        self._all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends[0] != -ends[1]:
            raise ValueError("the ranks bring different models (names, shapes, strides, dtypes), param groups or settings; "
                             f"rank {self.rank} has {len(self.names)} trained parameters and {settings}")

    # ---- 1. forward --------------------------------------------------------------------------------------------------

    def _autocast(self):
        """Half-precision matrix products over fp32 weights; the casts made for forward are kept until it ends."""
        return torch.autocast(self.device.type, self.half, enabled=self.half is not None)

    def __call__(self, *args, **kwargs):
        with self._autocast():
            return self.module(*args, **kwargs)

    def forward_backward(self, batch, micro_batches: int = 1, loss_fn=None, weight=None) -> Tensor:
        """Forward and backward over this rank's `batch` in `micro_batches` pieces, then the reduction. Returns the
        weighted mean loss over all pieces of all ranks: a device scalar, the same number on every rank.

        batch: a Mapping (the model's keyword arguments), a tuple or list (its first item goes to the model, the rest is
        for loss_fn) or a tensor; tensors are cut along dim 0. None, or no rows: this rank has no samples this time.
        loss_fn(output, micro_batch), under autocast as the model is, returns the mean over the micro-batch; without it
        the output, or its `loss`, is the loss. weight(micro_batch): what a micro-batch counts, a number or a device
        scalar that depends on the batch alone; see `default_weight`; 0 does not hide a gradient that is inf or
        NaN. An exception discards what has accumulated.
        """
        with self._discard_on_error():
            pieces = split_batch(batch, micro_batches)
            weigh = weight or (lambda piece: default_weight(self.module, piece, loss_fn))
            counts = [torch.zeros((), dtype=torch.float64, device=self.device) + weigh(piece) for piece in pieces]
            total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.float64, device=self.device)
            # before: each rank knows the weight of its own pieces.  after: every rank the sum over all of them.
            # sends: 2(N-1)/N * 8 bytes; needed when the first backward starts, so it overlaps with the first forward.
            total_work = self._all_reduce(total, async_op=True)
            loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
            for k, (piece, count) in enumerate(zip(pieces, counts)):
                with self._autocast():
                    loss = model_loss(self.module, piece, loss_fn)
                if k == 0:
                    wait(total_work)
                share = torch.where(total > 0, count / total, 0.0)
                loss_sum += torch.where(share > 0, loss.detach().double() * share, 0.0)  # a mean over no labels is NaN
                if k < len(pieces) - 1:
                    with self.no_sync():
                        self._backward(loss, share)
            # before: each rank has the weighted losses of its own pieces.  after: all have the sum.
            # sends: 2(N-1)/N * 8 bytes while the last backward runs.
            loss_work = self._all_reduce(loss_sum, async_op=True)
            if pieces:
                self._backward(loss, share)
            else:  # the gradients of this rank are zeros, but the others wait for them
                wait(total_work)
                self._begin_backward()
                self._end_backward()
            wait(loss_work)
        in_float64 = self.params and self.params[0].dtype == torch.float64  # as full_grad: fp32 but for float64 models
        return loss_sum if in_float64 else loss_sum.float()

    # ---- 2. backward, and the reduction inside it --------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Backward of this rank's mean loss; ranks count 1/N each. For a loop of your own, with `no_sync` around all but
        the last micro-batch; there, dividing by the number of micro-batches is yours. When it returns, `.grad` holds
        the average over the ranks, times the loss scale. An exception discards what has accumulated."""
        with self._discard_on_error():
            self._backward(loss, 1.0 / self.world_size)

    @contextlib.contextmanager
    def no_sync(self):
        """Inside, `backward` only accumulates on this rank; all ranks or none. The flag is read in backward alone, so forward
        may be inside or outside. If no later backward reduces what has accumulated, `step` does."""
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
            for bucket in self.buckets:
                if isinstance(error, Exception):  # Ctrl-C waits for nobody
                    with contextlib.suppress(RuntimeError):  # a connection that is lost
                        wait(bucket.work)
                bucket.work = None
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
        self._end_backward()

    def _check_model(self) -> None:
        """Is the model still as it was when the engine was built?"""
        if HOOKS.get(self.module) is not self._hooks:
            raise RuntimeError("another engine has taken this model over: use that one")
        for name, p in self._frozen:
            if p.requires_grad:
                raise RuntimeError(f"{name} was frozen when the engine was built and has no bucket: unfreeze it before")
        self._check_not_moved()

    def _begin_backward(self) -> None:
        self._check_model()
        if self._reduced:  # a second backward before step: only rank 0 keeps the old sum, so that it counts once
            if self.rank != 0:
                for bucket in self.buckets:
                    bucket.flat.zero_()
            self._reduced = False
        for bucket in self.buckets:
            bucket.missing = len(bucket.views)
        self._arrived = [False] * len(self.params)
        self._launched, self._order = 0, []
        self._in_backward = True

    def _check_not_moved(self) -> None:
        for p, f in zip(self.params, self.fragments):
            if p.data_ptr() != f.master.data_ptr():
                raise RuntimeError(f"{f.name} has moved since the engine was built, as by module.to(): move the model before")

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
            if bucket.work is not None:
                raise RuntimeError(f"the gradient of {self.names[index]} arrived again after its bucket was sent, as with "
                                   "reentrant activation checkpointing; use torch.utils.checkpoint(..., use_reentrant=False)")
            return
        self._arrived[index] = True
        self.optimizer.present[index] = 1
        self._order.append(index)
        bucket.missing -= 1
        if param.numel() >= COPY_NUMEL:
            self._fill(bucket, [index])
        if bucket.missing == 0:
            self._fill(bucket, bucket.views)
            while self._sync and self._launched < len(self.buckets) and self.buckets[self._launched].missing == 0:
                self._launch(self.buckets[self._launched])

    def _fill(self, bucket: Bucket, indices) -> None:
        """Copy gradients that autograd allocated into the bucket, in one call, and let `.grad` be the views: further
        micro-batches are added in place, and the memory is there once. Zeros where no gradient came."""
        new_views, new_grads, absent = [], [], []
        for i in indices:
            view, grad = bucket.views[i], self.params[i].grad
            if grad is view:
                continue
            if grad is None:
                absent.append(view)
                self.optimizer.present[i] = 0  # 1 only if the user set an earlier micro-batch's gradient to None
            else:
                new_views.append(view)
                new_grads.append(grad)
            self.params[i].grad = view
        if len(new_views) == 1:  # copy_ takes the whole GPU for one tensor, _foreach_copy_ one block for each 65,536 elements
            new_views[0].copy_(new_grads[0])
        elif new_views:
            torch._foreach_copy_(new_views, new_grads)
        if absent:
            torch._foreach_zero_(absent)

    def _launch(self, bucket: Bucket) -> None:
        """Issue the next bucket's all-reduce. Always in the buckets' order, whatever the order of the gradients."""
        # before: rank r holds flat_r (numel,), its own gradients times share and scale.  after: all hold sum_r flat_r.
        # sends: 2(N-1)/N * numel * 4 bytes in fp32. NCCL works on its own stream, gloo in its own thread: until `_end_backward`
        # waits, autograd computes the layers nearer to the input.
        if self.compression is None or self.world_size == 1:
            bucket.work = self._all_reduce(bucket.flat, async_op=True)
        else:
            if self._launched:
                self.buckets[self._launched - 1].work.advance()
            bucket.work = self.compression(self, bucket)
        self._launched += 1

    def _end_backward(self) -> None:
        """Autograd is through; what follows depends on no_sync alone."""
        self._in_backward = False
        self._first_order = self._first_order or self._order
        if self._sync:
            self._reduce()

    def _reduce(self) -> None:
        """Send the buckets of this backward that are not under way, then wait for all of them; under NCCL the stream waits,
        under gloo this thread."""
        for bucket in self.buckets[self._launched :]:  # a gradient of theirs never came
            self._fill(bucket, bucket.views)
            self._launch(bucket)
        # before: rank r knows which parameters received a gradient on r.  after: on how many ranks, for each parameter.
        # sends: 2(N-1)/N * 8 bytes per parameter tensor, behind the last bucket.
        self.optimizer.send_presence()
        presence_work = self._all_reduce(self.optimizer.presence, async_op=True)
        for bucket in self.buckets:
            wait(bucket.work)
            bucket.work = None
        wait(presence_work)
        self._reduced = True

    def _reduce_what_is_left(self) -> None:
        """Where every backward since the last step was inside no_sync, or there was none: reduce as at the end of one."""
        if not self._reduced:
            self._begin_backward()
            self._in_backward = False
            self._reduce()

    # ---- 3. step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One optimizer step: what is left to reduce, norm, overflow check, clip, Adam, running statistics."""
        self.optimizer.step()  # through the optimizer, so that schedulers see the call; it calls `_step`

    def _step(self) -> None:
        self._reduce_what_is_left()
        for bucket in self.buckets:
            for i, view in bucket.views.items():
                if self.params[i].grad is not view:
                    raise RuntimeError(f"{self.names[i]}.grad was replaced or removed before step: change it in place")
        # before: BatchNorm's running means and variances of rank r's samples.  after: their sum, then the mean, each rank
        # counting once, however many samples it had.
        # sends: 2(N-1)/N * 4 bytes per element; needed by nobody before the next forward.
        statistics_works = [self._all_reduce(flat, async_op=True) for flat in self._statistics]
        # Every rank has the same gradients, so it finds the same norm, the same inf and the same update (class Adam, below).
        self.optimizer.send_hyperparameters()
        self.optimizer.square_sum()
        self.optimizer.update()
        for flat, work in zip(self._statistics, statistics_works):
            wait(work)
            flat.div_(self.world_size)
        if not self._rebuilt:
            self._rebuild_buckets()
        self.zero_grad()
        self.traffic, self._sent = self._sent, {}
        self.scaler.raise_if_stuck()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard what has accumulated since the last step. `step` does so itself; calling it again is harmless."""
        for p in self.params:
            p.grad = None
        self.optimizer.present[:] = bytes(len(self.params))
        self._reduced = False

    def _rebuild_buckets(self) -> None:
        """Once, after the first step: buckets in the order in which gradients arrived on rank 0 (if they did there), since
        every rank must use the same one. Parameters that had no gradient come last, where they hold nobody up. Nothing
        is lost: the step has just consumed what the old buckets held."""
        seen = set(self._first_order)
        order = self._first_order + [i for i in reversed(range(len(self.params))) if i not in seen]
        # before: each rank has its own order.  after: all have rank 0's.  sends: 8 bytes per parameter tensor, once; the
        # host waits here, in this one step.
        self._replace_buckets(self._broadcast(torch.tensor(order, device=self.device)).tolist())

    def _replace_buckets(self, order: list[int]) -> None:
        for p in self.params:
            p.grad = None
        for fragment in self.fragments:
            fragment.grad = None
        self.optimizer.own([])
        self.buckets = []  # the old memory is free before the new is taken
        self._lay_out_buckets(order)
        self._rebuilt = True

    # ---- what users read ---------------------------------------------------------------------------------------------

    grad_norm = property(lambda self: self.scaler.state[GRAD_NORM].clone(), doc="true global L2 norm before clipping")
    scale = property(lambda self: self.scaler.state[SCALE].clone(), doc="loss scale, a device tensor")
    skipped = property(lambda self: self.scaler.state[SKIPPED] > 0, doc="was the last step skipped for an overflow?")
    skipped_steps = property(lambda self: self.scaler.state[SKIPPED_STEPS].long(), doc="how many were")

    def train(self, mode: bool = True) -> "DDP":
        self.module.train(mode)
        return self

    def eval(self) -> "DDP":
        return self.train(False)

    def named_parameters(self):
        return self.module.named_parameters()

    def full_grad(self, name: str) -> Tensor:
        """The averaged, unscaled, unclipped gradient of one parameter, whole, on the CPU, fp32 (float64 for float64);
        zeros where no rank had one. A collective, between the last backward and `step`."""
        if name not in self.names:
            raise ValueError(f"{name!r} is not a trained parameter; trained are {', '.join(self.names[:8])}, ...")
        self._reduce_what_is_left()
        grad = self.fragments[self.names.index(name)].grad
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        return grad.to("cpu", dtype, copy=True) / self.scaler.state[SCALE].item()

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of live storages on this rank, by kind and device: parameters, gradients, optimizer, buffers."""
        held = {
            "parameters": [*self.module.parameters()],
            "gradients": [b.flat for b in self.buckets] + [p.grad for p in self.module.parameters() if p.grad is not None],
            "optimizer": [t for f in self.fragments for t in (f.exp_avg, f.exp_avg_sq)],
            "buffers": [*self.module.buffers()],
        }
        return {kind: storage_bytes(tensors) for kind, tensors in held.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The plain model's state dict, as copies on the CPU of rank 0; an empty dict on the others."""
        if self.rank != 0:
            return {}
        return {k: v.detach().to("cpu", copy=True) for k, v in self.module.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load rank 0's full state dict (what other ranks pass is ignored) on every rank; a collective. Adam's moments stay.
        Raises ValueError on all ranks, before anything changes, for missing or unexpected names and for other shapes."""
        error = [None]
        if self.rank == 0:
            own = self.module.state_dict()
            try:
                missing, extra = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
                shapes = [f"{k} {tuple(state_dict[k].shape)} instead of {tuple(v.shape)}" for k, v in own.items()
                          if isinstance(v, Tensor) and k in state_dict and state_dict[k].shape != v.shape]
                refuse_extra_state(own)
                if missing or extra or shapes:
                    raise ValueError(f"missing {missing}, unexpected {extra}, other shapes {shapes}")
                self.module.load_state_dict(state_dict)
            except Exception as e:
                error = [f"the state dict does not fit: {e}"]
        if self.world_size > 1:
            # before: rank 0 knows whether it fits.  after: all do.  sends: a few bytes; everybody waits.
            dist.broadcast_object_list(error, group=self.group, group_src=0, device=self.device)
        if error[0]:
            raise ValueError(error[0])
        for t in (*self.module.parameters(), *self.module.buffers()):  # weights are their own masters here
            self._broadcast(t.data)

    def save(self, directory: str, **extra) -> None:
        """Write a checkpoint that any strategy resumes on any number of ranks: weights, moments, step counts, buffers, param
        groups' options, loss scale, each rank's random numbers (torch's and Python's), and `extra`: plain data, and objects
        like schedulers by their state_dict(). A collective, between steps; every rank sees the same file system.
        Overwrites a checkpoint, never anything else; killed at any moment it leaves a complete one. Raises CheckpointError.
        """
        if own := [name for name in extra if name.startswith("_")]:
            raise CheckpointError(f"names with _ in front are the engine's own: {', '.join(own)}")
        self._check_not_moved()
        order = [self.names[i] for i in self._bucket_order] if self._rebuilt else []
        save_checkpoint(self, directory, {**extra, "_bucket_order": order})

    def load(self, directory: str, **objects) -> dict:
        """Continue from a checkpoint of any strategy: engine.load(dir, scheduler=scheduler) gives each object the state that was
        saved under its name and returns the other extras. On as many ranks the run goes on bit for bit, random numbers
        included; on another number they are left as they are. Discards gradients. Raises CheckpointError, on all ranks and
        before anything changes, for what is missing, damaged, of another shape or in another param group."""
        self._check_not_moved()
        extra = load_checkpoint(self, directory, objects)
        self.zero_grad()
        order = extra.get("_bucket_order")  # decides how a ring adds; [] before the first step, None of other strategies
        if order == [] and self._rebuilt:
            self._replace_buckets(list(reversed(range(len(self.params)))))
            self._rebuilt, self._first_order = False, []
        elif order and sorted(order) == sorted(self.names):
            self._replace_buckets([self.names.index(name) for name in order])
        return {k: v for k, v in extra.items() if not k.startswith("_")}

    def kept(self) -> "list[Fragment]":
        """What a checkpoint holds beside what is trained: frozen parameters, and the buffers that are in the state dict."""
        trained, persistent = set(self.names), refuse_extra_state(self.module.state_dict())
        rest = [(n, p.data, FROZEN) for n, p in self.module.named_parameters() if n not in trained]
        rest += [(n, b, BUFFER) for n, b in self.module.named_buffers() if n in persistent]
        return [Fragment(n, i, tuple(t.shape), (tuple(slice(0, s) for s in t.shape),), 0, t.numel(), t) for n, t, i in rest]

    def capture(self, batch, micro_batches: int = 1, loss_fn=None, weight=None) -> "StepGraph":
        """A step, `forward_backward` and `step`, as one CUDA graph; arguments as for `forward_backward`. Takes no step. Returns
        train_step: train_step(batch) copies a batch of the same shapes and dtypes into the graph's own tensors, replays, and
        returns the loss. A collective, between steps; with GPUs, NCCL, adam_cuda.cu and fp32 masters only.

        Bit for bit the eager step, learning rates and other options being what the groups have by then. Eager steps, evaluation,
        `save` and `load` may come in between. What Python decides in the model, loss_fn and weight stays as it was; their hooks
        do not run. An engine that has taken no step yet gets its buckets in their final order now, and not after the first one.
        Keep no outputs of eager steps: parts of autograd stay with them, on another stream. Let go of train_step before the
        process group is destroyed: NCCL waits for the end of graphs that use it.
        Raises ValueError or RuntimeError, and nothing has changed, where the step waits for the device or draws random numbers on
        the host, a batch does not fit, or gradients have accumulated."""
        return StepGraph(self, batch, micro_batches, loss_fn, weight)

    # ---- the two collectives, and their bytes ------------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM, async_op: bool = False) -> dist.Work | None:
        """All-reduce in place and count what a ring sends; None without `async_op`, on one rank, or for no elements."""
        if self.world_size == 1 or tensor.numel() == 0:
            return None
        self._count("all_reduce", 2 * (self.world_size - 1) * tensor.numel() * tensor.element_size() // self.world_size)
        return dist.all_reduce(tensor, op=op, group=self.group, async_op=async_op)

    def _count(self, collective: str, sent_bytes: int) -> None:
        self._sent[collective] = self._sent.get(collective, 0) + sent_bytes

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor`, any strides, with that of the group's first rank."""
        if self.world_size > 1 and tensor.numel():
            sent = tensor.contiguous()
            dist.broadcast(sent.view(-1).view(torch.uint8), group=self.group, group_src=0)  # gloo does not know every dtype
            tensor.copy_(sent)
        return tensor


def wait(work) -> None:
    """Wait for a collective, if there is one: on one rank there is not."""
    if work is not None:
        work.wait()


# ---- compressed gradients: may be skipped on a first reading -----------------------------------------------------------


class HalfSum:
    """A bucket's all-reduce in bf16 or fp16: half the bytes of fp32. `start` sends, `wait` puts the sum into the bucket.

    Each of the N - 1 additions of the ring rounds to 8 (bf16) or 11 (fp16) bits. fp16 overflows above 65504 and loses what
    is below 6e-8; an overflow is an inf in the sum, which skips the step.
    """

    def __init__(self, engine: DDP, flat: Tensor, dtype: torch.dtype):
        self.flat, self.small = flat, flat.to(dtype)
        self.work = engine._all_reduce(self.small, async_op=True)

    def advance(self) -> None:
        """There is one phase only."""

    def wait(self) -> None:
        wait(self.work)
        self.flat.copy_(self.small)


class Fp8Sum:
    """A bucket's all-reduce in fp8, a quarter of the bytes of fp32, without ever adding in fp8.

                 rank 0              rank 1
    quantize     [ a0 | a1 ]         [ b0 | b1 ]           e4m3 (4 significant bits) and one fp32 scale per 256 elements
    all-to-all   [ a0 | b0 ]         [ a1 | b1 ]           slice r of everybody goes to rank r
    sum          a0 + b0             a1 + b1               in fp32, then quantized again
    all-gather   [ sum0 | sum1 ]     [ sum0 | sum1 ]       the same bytes on every rank, so the same gradient

    Sends 2 (N-1)/N bytes per element, and 1/64 more for the scales. Rounds each addend and the sum once, by 2^-4 of its own
    size at most, so the error of a gradient is a few percent of its norm (test_ddp.py states it). inf and NaN turn their
    block into NaN, which skips the step; padding between parameters stays zero.
    """

    BLOCK = 256

    def __init__(self, engine: DDP, bucket: Bucket):
        self.engine, self.bucket, self.gather, flat = engine, bucket, None, bucket.flat
        n = engine.world_size
        self.slice_numel = -(-flat.numel() // (n * self.BLOCK)) * self.BLOCK
        padded = nn.functional.pad(flat.float(), (0, n * self.slice_numel - flat.numel()))
        packed = self._pack(padded.view(n, self.slice_numel))
        self.received = torch.empty_like(packed)
        # before: rank r holds packed (N, bytes), row s its share of slice s.  after: received, row s what rank s had of
        # slice r.  sends: (N-1)/N of (1 + 1/64) bytes per element; `advance` waits, before the next bucket is sent.
        self.exchange = dist.all_to_all_single(self.received, packed, group=engine.group, async_op=True)
        engine._count("all_to_all", packed.numel() * (n - 1) // n)

    def advance(self) -> None:
        """Second phase: sum the own slice in fp32 and send it to everybody."""
        if self.gather is None:
            self.exchange.wait()
            own = self._pack(self._unpack(self.received).sum(0, keepdim=True))
            # before: rank r holds the sum of slice r.  after: all hold all slices, in order.  sends: as much as the first.
            self.gather = dist.all_gather_into_tensor(self.received, own, group=self.engine.group, async_op=True)
            self.engine._count("all_gather", own.numel() * (self.engine.world_size - 1))

    def wait(self) -> None:
        self.advance()
        self.gather.wait()
        total = self._unpack(self.received).view(-1)
        views = list(self.bucket.views.values())
        torch._foreach_copy_(views, [total.as_strided(v.shape, v.stride(), v.storage_offset()) for v in views])

    def _pack(self, x: Tensor) -> Tensor:
        """(rows, numel) fp32 -> (rows, numel + numel / 64) bytes: the fp8 values, then the scales. As bytes, because not every
        backend knows fp8; nobody adds them."""
        blocks = x.view(len(x), -1, self.BLOCK)
        largest = blocks.abs().amax(-1, keepdim=True)
        scale = (largest / 448).clamp(min=torch.finfo(torch.float32).tiny)  # 448 is e4m3's largest number
        values = (blocks / scale).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
        return torch.cat([values, scale.flatten(1).contiguous().view(torch.uint8)], dim=1)

    def _unpack(self, packed: Tensor) -> Tensor:
        """The inverse: (rows, numel) fp32."""
        values = packed[:, : self.slice_numel].contiguous().view(torch.float8_e4m3fn).float()
        scale = packed[:, self.slice_numel :].contiguous().view(torch.float32)
        return (values.view(len(packed), -1, self.BLOCK) * scale.unsqueeze(-1)).flatten(1)


COMPRESSION = {
    "bf16": lambda engine, bucket: HalfSum(engine, bucket.flat, torch.bfloat16),
    "fp16": lambda engine, bucket: HalfSum(engine, bucket.flat, torch.float16),
    "fp8": Fp8Sum,
}


# ---- BatchNorm over the samples of all ranks: may be skipped on a first reading -----------------------------------------


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm whose mean and variance are those of all ranks' samples together, in forward and in backward.

    Input (samples, C, ...), as many samples on each rank as it likes; in training every rank must call it equally often.
    Equal to nn.BatchNorm in one process on the whole batch. In evaluation, and on one rank, it is nn.BatchNorm.
    With an engine that waits inside backward for room, as all but DDP do, all ranks must also use the same parameters: others
    would wait there for a bucket that one rank completes after backward, and that rank in a BatchNorm for them.
    `sync_batchnorm(model)` puts it in the place of every nn.BatchNorm. Its own traffic is not in `engine.traffic`.
    """

    channel = None

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs (samples, channels, ...), got shape {tuple(x.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if not self.training or not dist.is_initialized() or dist.get_world_size(self.channel.group) == 1:
            return super().forward(x)
        y, mean, var, count = _SyncNorm.apply(x, self.weight, self.bias, self.eps, self.channel())
        if self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                factor = self.momentum
                if factor is None:  # the plain mean over all batches so far
                    factor = (1 / self.num_batches_tracked.double()).to(self.running_mean.dtype)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), factor)  # unbiased
        return y


class _Channel:
    """A process group of the same ranks, for SyncBatchNorm alone. In one group all ranks must begin their collectives in one
    order, and a bucket of which a gradient never comes goes out after BatchNorm's backward, while on other ranks it came before."""

    def __init__(self, group=None):
        self.group, self.own = group, None

    def __call__(self):
        if self.own is None:  # by the first forward, so all ranks are here
            self.own = dist.new_group(dist.get_process_group_ranks(self.group or dist.group.WORLD), use_local_synchronization=True)
        return self.own

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return _Channel, (self.group,)


class _SyncNorm(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, arXiv:1502.03167 Algorithm 1, with mean and var over all ranks."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        wide = x if x.dtype == torch.float64 else x.float()
        dims = [d for d in range(x.dim()) if d != 1]
        numel = x.numel() // x.shape[1]
        var, mean = torch.var_mean(wide, dims, correction=0) if numel else wide.new_zeros(2, x.shape[1])
        own = torch.cat([mean, var, mean.new_full((1,), numel)])
        everyone = own.new_empty(dist.get_world_size(group) * len(own))
        # before: rank r holds (2C + 1,): mean, variance and number of its own values.  after: all hold everybody's.
        # sends: (N-1) * (2C + 1) * 4 bytes; the next operation needs it, so everybody waits.
        dist.all_gather_into_tensor(everyone, own, group=group)
        means, variances, counts = everyone.view(-1, len(own)).split([x.shape[1], x.shape[1], 1], dim=1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        var = (counts * (variances + (means - mean).square())).sum(0) / count  # within the ranks and between them
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), count)
        ctx.group, ctx.dims = group, dims
        ctx.mark_non_differentiable(mean, var, count)
        y = nn.functional.batch_norm(wide, mean, var, weight, bias, training=False, eps=eps)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx, grad, *_):
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        grad = grad.to(mean.dtype)
        normed = (x.to(mean.dtype) - mean.view(shape)) * inverse_std.view(shape)
        grad_bias, grad_weight = grad.sum(ctx.dims), (grad * normed).sum(ctx.dims)
        sums = torch.cat([grad_bias, grad_weight])
        # before: sums over the own samples.  after: over all samples.  sends: 2(N-1)/N * 2C * 4 bytes; everybody waits.
        # weight and bias get the sums of this rank alone: their gradients are reduced later, like all others.
        dist.all_reduce(sums, group=ctx.group)
        mean_grad, mean_grad_normed = (sums / count).view(2, -1)
        grad_x = grad - mean_grad.view(shape) - normed * mean_grad_normed.view(shape)
        grad_x = grad_x * (inverse_std if weight is None else inverse_std * weight).view(shape)
        has_affine = weight is not None
        return grad_x.to(x.dtype), grad_weight if has_affine else None, grad_bias if has_affine else None, None, None


def sync_batchnorm(module: nn.Module, group=None) -> nn.Module:
    """Replace every nn.BatchNorm1d/2d/3d in `module` by SyncBatchNorm, with the same parameter and buffer objects, before the
    engine is built. Returns the module (a new one if it is itself a BatchNorm). group: None for all ranks."""
    channel = group if isinstance(group, _Channel) else _Channel(group)
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        synced = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            setattr(synced, name, tensor)
        synced.channel = channel
        return synced.train(module.training)
    for name, child in module.named_children():
        setattr(module, name, sync_batchnorm(child, channel))
    return module


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


# ---- demonstration: python ddp.py ------------------------------------------------------------------------------------


def demonstration(device: torch.device) -> None:
    """Train a small transformer for three steps in float64 beside one process that sees the whole batch, then once in
    fp32, and print what is held and sent beside the formulas of the docstring."""
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
    engine = DDP(model, lr=1e-3, eps=1e-3, weight_decay=0.01, max_norm=1.0)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.01)
    grad_gap = 0.0
    for _ in range(3):
        loss = engine.forward_backward((tokens[mine], labels[mine]), micro_batches=2, loss_fn=loss_fn)
        adam.zero_grad()
        plain_loss = loss_fn(plain(tokens), (tokens, labels))
        plain_loss.backward()
        for name, p in plain.named_parameters():
            grad_gap = max(grad_gap, (engine.full_grad(name) - p.grad.cpu()).abs().max().item())
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()
        engine.step()
    gap = max((p - q).abs().max().item() for p, q in zip(model.parameters(), plain.parameters()))

    engine = DDP(build(torch.float32), lr=1e-3)
    numel = sum(p.numel() for p in engine.module.parameters())
    for _ in range(2):
        dist.barrier()
        before = sent_bytes()
        engine.forward_backward((tokens[mine], labels[mine]), loss_fn=loss_fn)
        held = engine.memory()
        engine.step()
        dist.barrier()
        wire = sent_bytes() - before
    if rank != 0:
        return
    print(f"\n{n} ranks on {device.type}, {numel:,} parameters, last loss {loss:.4f} (one process {plain_loss:.4f})")
    print(f"largest distance from one process, float64, 3 steps: gradients {grad_gap:.1e}, parameters {gap:.1e}\n")
    print(f"{'bytes per parameter on rank 0':42}{'formula':>10}{'measured':>10}")
    for kind, formula in (("parameters", 4), ("gradients", 4), ("optimizer", 8)):
        print(f"{kind:42}{formula:10.2f}{sum(held[kind].values()) / numel:10.2f}")
    formula = 2 * (n - 1) / n * 4
    counted = engine.traffic.get("all_reduce", 0) / numel
    print(f"{'all-reduce per step, counted by the engine':42}{formula:10.2f}{counted:10.2f}")
    if wire:
        print(f"{'sent per step, as the sockets count it':42}{formula:10.2f}{wire / numel:10.2f}")


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
