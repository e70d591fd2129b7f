"""Hybrid parallelism: one mesh of ranks, along whose axes batch, blocks, matrices and optimizer are divided at the same time.

A rank has one coordinate on each axis. Along dp, copies of the model see different samples. Along pp, ranks share the blocks of one
copy, in stages through which micro-batches go one after the other. Along sp, ranks share a sample's tokens. Along tp, ranks share
the matrices of a stage, each with some heads and some hidden units. The model keeps its own forward: a plan, a table of module
names and styles, says which linears are divided how, and where the blocks are; those get another class.

    8 ranks, dp = 2, pp = 2, sp = 1, tp = 2: rank = (dp * 2 + pp) * 2 + tp    W: the matrices of a stage, a half on each tp rank

               pp 0: embedding, first blocks     pp 1: last blocks, head
               tp 0         tp 1                 tp 0         tp 1
    dp 0    | W0[0] |    | W0[1] |   -->      | W1[0] |    | W1[1] |       along tp: all-reduce of activations, within each block
    dp 1    | W0[0] |    | W0[1] |   -->      | W1[0] |    | W1[1] |       along pp: activations there, their gradients back
                                                                           along dp: gradients summed, weights gathered

                      bytes per rank; Ψ parameters of its stage, of which Ψd are divided and Ψw whole, D dp ranks, T tp ranks
    weights           2(Ψd/T + Ψw)            half precision
    gradients         2(Ψd/T + Ψw)
    master, m, v      12(Ψd/T + Ψw)/D         zero_stage=0: without /D
    activations       of at most P - p micro-batches on rank p of P along pp; in blocks, 1/S with S ranks along sp

    A block is two pairs of linears, query-key-value with output and up with down; each pair, X (B, S, H) whole on every tp rank:

        forward    X --copy--> X A_r --f--> H_r --> H_r B_r --sum over tp--> Y (B, S, H)      A by columns, B by rows
        backward   dX <--sum over tp-- dH_r A_r^T <-- dH_r <-- dY B_r^T <--copy-- dY

    1. forward        embedding: each rank looks up the words of its part of the vocabulary, the sum over tp has all. Blocks: two
                      all-reduces of B*S*H elements each along tp. Behind its last block a stage sends hidden states to the next.
                      Head: each rank has the scores of its part of the vocabulary, and cross entropy is found from three numbers
                      a token, without ever gathering them (class ShardedLogits).
    2. backward       two all-reduces a block again; a stage sends the gradient of what it received back. Each rank does forward of
                      some micro-batches ahead, then one backward for one forward (`schedule`). Gradients of divided weights are
                      whole where the weight is; those of whole weights are the same on all tp ranks, except where each rank uses
                      them for its own heads (norms of queries and keys; keys and values that several ranks share): these are
                      summed along tp; an embedding tied to the head, along pp; weights of the blocks, along sp. Along dp, once a
                      step: as zero.py, stage 1.
    3. step           squares summed over all axes, each element counted once: norm, overflow, clip. Adam on the own slices.
    4. gather         slices go round along dp.

    Bytes sent per rank: dp, each step, 2(D-1)/D * 2(Ψd/T + Ψw); tp, each micro-batch of B samples, 2(T-1)/T * 2 * B*S*H for each of
    4 all-reduces in each block, and for one of an embedding and one of a head that are divided; pp, each micro-batch, 2 * B*S*H to
    the next stage and as much to the one before; sp, each micro-batch and block, all_to_all 8(S-1)/S^2 * 2 * B*L*H, L tokens, ring
    (S-1)/S * 4 + 4 for each element of keys and values, 2(S-1)/S * 2 * B*L*H at both ends, and of the blocks' gradients, each step,
    2(S-1)/S of their bytes.

Dropout must drop the same where activations are whole on every tp rank, and differ where they are divided: ranks of a tp group
have the same random numbers, and between a column linear and its row linear each goes on with numbers of its own; each stage, too,
and in a block each rank along sp.

Modules with running statistics (BatchNorm) keep parameters and buffers in fp32, inputs and outputs cast around them. RMS norms
that transformers writes out in five operators become torch's one kernel where that computes the same. A plan comes from PLANS
below, from the model (transformers' base_model_tp_plan and _tp_plan) or from `plan=`; without one tp = pp = sp = 1.
Where ranks outnumber key and value heads, neighbours share one. A vocabulary that tp does not divide is padded on its last rank;
nobody reads the padding, and a checkpoint has none.

A model that no rank can hold is built on `meta` and loaded from a checkpoint: a rank only ever has its own part.

All ranks of one copy are given the same batch, all ranks make the same calls. Between steps parameters are the own part (shape
and all), and of other stages' one element; whole weights are in `state_dict` and in checkpoints, which any strategy resumes. With
a pipeline a batch's forward and backward go together in `forward_backward`; `engine(...)` evaluates, and gives every rank the
last stage's output. Tokens are divided along sp, with `sp_mode="all_to_all"` or "ring"; with "split_gather" tp ranks divide by
tokens what lies between their pairs of linears, which they else have whole each. To read the logits of a divided head is a
collective: on one rank alone, `print(logits)` waits for ever.

How to write a plan, for a model that has none: `plan={name: style}`, * for a number, styles as above PLANS.
    1. Blocks: names begin with the name of their list, an nn.ModuleList: "layers.*.". pp and sp need one such name and no more.
    2. Pairs: a linear that leads from hidden states to heads or hidden units is "colwise", the one that leads back "rowwise"; what
       lies between them must act on each head or unit for itself. Several matrices in one weight: "packed_colwise".
    3. Weights between the two, as a norm of queries: "replicated_with_grad_allreduce". A forward that meets others refuses them.
    4. Words, if you like: the embedding "embedding_rowwise", the head "colwise_gather_output".
    5. Attention that counts heads in attributes of other names than HEAD_COUNTS needs them in ATTRIBUTES.
    6. Compare in float64: engine.full_grad(name) on two ranks, with tp=2, with p.grad of one process.

Not here yet, by name: capture. Left out: sparse gradients, complex parameters, experts (MoE); models in whose blocks more than
hidden states depends on weights (pp, sp); a loss that reads weights, which sees this rank's part (tp) or counts them on each rank
(sp); a head's logits in other hands than torch functions' (a C++ extension needs `logits.gathered()`).

Megatron-LM, arXiv:1909.08053 (§3: pairs of linears, vocabulary); ZeRO, arXiv:1910.02054 (§5.1); grouped heads, arXiv:2305.13245;
1F1B: arXiv:2006.09503 §3; interleaved: arXiv:2104.04473 §2.2; tokens: arXiv:2205.05198, 2309.14509, 2310.01889; mixed precision
with masters: arXiv:1710.03740 §3.1; loss scale §3.2.

    engine = Hybrid(model, tp=2, pp=2, lr=1e-4, weight_decay=0.01, precision="bf16")    # dp = all ranks / 4
    for batch in loader:                                    # this copy's share: key the sampler by engine.dp.rank
        loss = engine.forward_backward(batch, micro_batches=4)
        engine.step()

`python hybrid.py` divides a small Llama between two CPU ranks, by matrices, by blocks and by tokens, prints the mesh, who owns what
and a timeline, puts the formulas above beside what it measures, and the weights beside those of one process.
"""
import contextlib
import copy
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import pickle
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
AXES = ("dp", "pp", "sp", "tp")  # from the outermost to the innermost: ranks of one tp group are neighbours

# ---- plans: which module is divided how ------------------------------------------------------------------------------------
#
# Names are those below the base model, `*` is a layer's number; names of heads are those in the whole model. Styles:
#   colwise                         a linear's outputs are divided: each rank has some heads, or some hidden units
#   colwise_gather_output           the same, and every rank gets all outputs (for the head: when somebody asks for them)
#   rowwise                         a linear's inputs are divided: each rank's product is a part of the sum
#   rowwise_split_input             the same, of inputs that every rank has whole
#   packed_colwise, packed_rowwise  several matrices side by side in one weight (gate and up), each divided
#   embedding_rowwise               the vocabulary is divided
#   replicated_with_grad_allreduce  every rank has it whole, and uses it for its own heads, so gradients are summed
# ATTRIBUTES: what of a module counts columns of all ranks and has to count this rank's alone.

PLANS = {
    "bert": {
        "embeddings.word_embeddings": "embedding_rowwise",
        "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise",
        "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
        "cls.predictions.decoder": "colwise_gather_output",
        "lm_head.decoder": "colwise_gather_output",  # RoBERTa's
        "generator_lm_head": "colwise_gather_output",  # ELECTRA's
    },
    "bloom": {
        "word_embeddings": "embedding_rowwise",
        "h.*.self_attention.query_key_value": "colwise",  # of each head after the other, so a rank has those of its heads
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    "distilbert": {
        "embeddings.word_embeddings": "embedding_rowwise",
        "transformer.layer.*.attention.q_lin": "colwise",
        "transformer.layer.*.attention.k_lin": "colwise",
        "transformer.layer.*.attention.v_lin": "colwise",
        "transformer.layer.*.attention.out_lin": "rowwise",
        "transformer.layer.*.ffn.lin1": "colwise",
        "transformer.layer.*.ffn.lin2": "rowwise",
        "vocab_projector": "colwise_gather_output",
    },
    "gpt2": {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": "packed_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    "opt": {
        "decoder.embed_tokens": "embedding_rowwise",
        "decoder.layers.*.self_attn.q_proj": "colwise",
        "decoder.layers.*.self_attn.k_proj": "colwise",
        "decoder.layers.*.self_attn.v_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    "vit": {
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    },
}
PLANS |= dict.fromkeys(("roberta", "xlm-roberta", "camembert", "electra"), PLANS["bert"])
ADDED = {  # model type -> what the declared plan lacks: weights that each rank uses for its own heads or hidden units
    "apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    "apertus1p5_text": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    "muse_glimmer_assistant": {"layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
                               "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce"},
}
ATTRIBUTES = {"gpt2": {"h.*.attn": ("split_size",)}}
PER_HEAD = {"bloom": {"h.*.self_attention": "alibi"}}  # module -> the argument that has samples x heads of all ranks along dim 0


# ---- the mesh ------------------------------------------------------------------------------------------------------------


class Axis:
    """One axis of the mesh as this rank sees it: the group of ranks whose coordinates differ from its own in this one alone. Who
    holds what before and after a collective, and who waits, is said where its method is called; bytes are counted here.

    lists: the ranks of this axis, and those of the ranks elsewhere in the mesh; `rank` is the place in the own list.
    """

    def __init__(self, engine, name: str, lists: "list[list[int]]" = ()):
        self.engine, self.name, self.lists = weakref.ref(engine), name, [*lists] or [[engine.rank]]
        own = next((ranks for ranks in self.lists if engine.rank in ranks), [engine.rank])
        self.world_size, self.rank = len(own), own.index(engine.rank)
        everybody = self.lists == [[*range(engine.world_size)]]  # for whom there is the default group, None
        self.group = None if everybody or len(self.lists[0]) == 1 else own_group(self.lists)
        self.device = engine.device
        backends = dist.get_backend(self.group) if self.world_size > 1 else ""
        self.by_hand = self.world_size > 1 and backends != "nccl" and f"{self.device.type}:nccl" not in backends  # see SliceSum

    def _count(self, collective: str, sent_bytes: int) -> None:
        if (engine := self.engine()) is not None:
            engine._count(f"{self.name} {collective}", sent_bytes)

    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM, async_op: bool = False) -> dist.Work | None:
        """In place; counts what a ring sends. None without `async_op`, on one rank, or for no elements."""
        if self.world_size == 1 or tensor.numel() == 0:
            return None
        self._count("all_reduce", 2 * (self.world_size - 1) * tensor.numel() * tensor.element_size() // self.world_size)
        return dist.all_reduce(tensor, op=op, group=self.group, async_op=async_op)

    def sum(self, x: Tensor) -> Tensor:
        """A new tensor: the sum over the axis."""
        x = x.clone(memory_format=torch.contiguous_format)
        self.all_reduce(x)
        return x

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The axis' tensors of one shape, side by side along a dim."""
        if self.world_size == 1:
            return x
        self._count("all_gather", (self.world_size - 1) * x.numel() * x.element_size())
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def part(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of a tensor that is the same on all ranks of the axis."""
        return x.chunk(self.world_size, dim)[self.rank]

    def part_of_sum(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum over the axis. Under gloo parts are exchanged and added here: its own reduce-scatter sends
        as much as an all-reduce."""
        self._count("reduce_scatter", (self.world_size - 1) * x.numel() * x.element_size() // self.world_size)
        parts = [part.contiguous() for part in x.chunk(self.world_size, dim)]
        if self.by_hand:
            return self._swap(parts).sum(0).to(x.device)
        part = torch.empty_like(parts[0])
        dist.reduce_scatter(part, parts, group=self.group)
        return part

    def exchange(self, x: Tensor, cut: int, join: int) -> Tensor:
        """Part r of x along a dim `cut` goes to rank r; what comes lies side by side along `join`."""
        self._count("all_to_all", (self.world_size - 1) * x.numel() * x.element_size() // self.world_size)
        return torch.cat(self._swap(x.chunk(self.world_size, cut)).to(x.device).unbind(), join)

    def _swap(self, parts: "list[Tensor]") -> Tensor:
        sent = torch.stack(parts)
        sent = sent.cpu() if self.by_hand else sent
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received

    def pass_on(self, x: Tensor) -> tuple:
        """Round the ring, to the next rank and from the one before; `arrived` waits for what comes."""
        self._count("send", x.numel() * x.element_size())
        x = x.cpu() if self.by_hand else x.contiguous()
        coming, n = torch.empty_like(x), self.world_size
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, group=self.group, group_peer=(self.rank + 1) % n),
                                        dist.P2POp(dist.irecv, coming, group=self.group, group_peer=(self.rank - 1) % n)])
        return coming, works, x  # which must live until it has left

    def arrived(self, passed: tuple) -> Tensor:
        coming, works, _ = passed
        for work in works:
            work.wait()
        return coming.to(self.device)


def own_group(lists: list[list[int]]):
    """A new process group for each list of ranks, made on all ranks in the same order, as torch asks; returns this rank's, if it
    has one."""
    groups = [(ranks, dist.new_group(ranks)) for ranks in lists]
    return next((group for ranks, group in groups if dist.get_rank() in ranks), None)


def make_mesh(engine, sizes: dict[str, int]) -> dict[str, Axis]:
    """Axes of a mesh over all ranks. Rank = ((dp * PP + pp) * SP + sp) * TP + tp, coordinates in small letters."""
    axes = {}
    for name in AXES:
        size, stride = sizes[name], math.prod(sizes[other] for other in AXES[AXES.index(name) + 1 :])
        firsts = [rank for rank in range(engine.world_size) if rank // stride % size == 0]  # whose coordinate is 0
        axes[name] = Axis(engine, name, [[first + k * stride for k in range(size)] for first in firsts])
    return axes


# ---- tensor parallelism: a pair of linears, divided between the ranks of the tp axis -----------------------------------------
#
# X whole on every rank; A divided by columns, B by rows:   Y = f(X A) B = sum over ranks of  f(X A_r) B_r
#
#     forward     X --copy--> X A_r --f--> H_r --> H_r B_r --sum over tp--> Y          one all-reduce of Y's size
#     backward    dX <--sum over tp-- dH_r A_r^T <-- dH_r <-- dY B_r^T <--copy-- dY    one of X's size
#
# The two are each other's backward (Megatron-LM, arXiv:1909.08053, §3: f and g).


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        # before: each rank has what its own columns say of x's gradient.  after: all have the sum.
        # sends: 2(N-1)/N of x's bytes; the backward of what came before x waits.
        return Sum.apply(grad, ctx.tp), None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        # before: each rank has the product of its own rows.  after: all have the sum.
        # sends: 2(N-1)/N of x's bytes; what comes next waits.
        return tp.sum(x)

    @staticmethod
    def backward(ctx, grad):
        return Copy.apply(grad, ctx.tp), None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp, dim):
        ctx.tp, ctx.dim = tp, dim
        # before: each rank has its own part along dim.  after: all have all.  sends: (N-1)/N of the whole's bytes; all wait.
        return tp.gather(x, dim)

    @staticmethod
    def backward(ctx, grad):
        return Split.apply(grad, ctx.tp, ctx.dim), None, None


class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp, dim):
        ctx.tp, ctx.dim = tp, dim
        return tp.part(x, dim).contiguous()

    @staticmethod
    def backward(ctx, grad):
        # before: each rank has the gradient of its own part.  after: all have all.  sends: (N-1)/N of the whole's bytes; all wait.
        return Gather.apply(grad, ctx.tp, ctx.dim), None, None


# What torch.compile does not follow: it compiles what lies between two collectives.
sum_over = torch.compiler.disable(Sum.apply)
gather = torch.compiler.disable(lambda x, axis, dim=-1: Gather.apply(x, axis, dim))
split = torch.compiler.disable(lambda x, axis, dim=-1: Split.apply(x, axis, dim))


class TensorParallel:
    """The tp axis at work: what divided modules share in a forward."""

    def __init__(self, axis: Axis, model: nn.Module, layouts: "dict[nn.Parameter, Layout]"):
        self.axis, self.model, self.layouts = axis, weakref.ref(model), layouts
        self.generator = default_generator(axis.device)
        self.inside = False  # between a column linear and its row linear
        self.tokens: Tokens | None = None  # sp_mode split_gather: what tp ranks divide between those pairs, too
        self._saved: Tensor | None = None  # the state of the generator outside of what is divided
        self._copied: tuple | None = None  # (weakly x, grad mode, Copy(x)) of the last x that was copied

    def __deepcopy__(self, memo):
        return self  # a copy of the model is divided in the same way

    @torch.compiler.disable
    def copy(self, x: Tensor) -> Tensor:
        """Copy(x), once for linears that read the same x (query, key and value): one all-reduce in backward for all of them."""
        last = self._copied
        if last is None or last[0]() is not x or last[1] != torch.is_grad_enabled():
            self._copied = last = weakref.ref(x), torch.is_grad_enabled(), Copy.apply(x, self.axis)
        return last[2]

    @torch.compiler.disable
    def enter(self, training: bool) -> None:
        """From here to `leave` activations are divided, so dropout must differ between ranks; everywhere else it must not. The
        seed is drawn from the CPU's generator, which is in step on all ranks and which checkpointing sets back."""
        self.inside = True
        if training and self._saved is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
            self._saved = self.generator.get_state()
            self.generator.manual_seed(seed + self.axis.rank)

    @torch.compiler.disable
    def leave(self) -> None:
        self._copied, self.inside = None, False
        if self._saved is not None:
            self.generator.set_state(self._saved)
            self._saved = None

    def check(self, module: nn.Module) -> None:
        """A module's forward begins. Weights that are whole must not meet activations that are divided: each rank would find a part
        of their gradient, and the plan does not say that these are to be added up."""
        if isinstance(module, (ColumnParallel, RowParallel)) or not torch.is_grad_enabled():
            return  # a row linear's bias is added to the sum
        weights = [self.layouts.get(p) for p in module._parameters.values() if p is not None and p.requires_grad]
        name = lambda: f"{next((n for n, m in self.model().named_modules() if m is module), '')} ({type(module).__name__})"
        if self.inside and None in weights:
            raise RuntimeError(f"{name()} has weights that the plan does not name, and sees activations that are divided between "
                               'tp ranks: give it the style "replicated_with_grad_allreduce", or use tp=1')
        if self.tokens and self.tokens.inside and not self.inside:
            for layout in weights:
                if (own := layout is not None and layout.own_tokens) == self.tokens.gathered:
                    seen = "all tokens" if own else "its own tokens alone"
                    raise RuntimeError(f"{name()} sees {seen}, other than its place in the model says: use sp_mode=None")


# What `divide` gives these modules: _tp, the TensorParallel of the model; _style; _transposed, is it a Conv1D?; _is_head; _whole,
# outputs or words of all ranks; an embedding also _first, this rank's first word, and _padding, its word that gets no gradient.


class ColumnParallel:
    """In the class of a linear whose outputs are divided."""

    def forward(self, input):
        tp = self._tp
        if not (tp.tokens and self._inside):
            input = tp.copy(input)
        elif self._gathers:
            input = tp.tokens.gather(input)
        y = super().forward(input)
        if self._style == "colwise_gather_output":
            tp.leave()
            if self._is_head:
                return ShardedLogits.of(y, tp.axis, self._whole)
            return gather(y, tp.axis)[..., : self._whole].contiguous()
        tp.enter(self.training)
        return y


class RowParallel:
    """In the class of a linear whose inputs are divided."""

    def forward(self, input):
        tp = self._tp
        tp.leave()  # before the product, in which checkpointing may find that it has computed enough again, and stop
        x = split(input, tp.axis) if self._style == "rowwise_split_input" else input
        y = x @ self.weight if self._transposed else nn.functional.linear(x, self.weight)
        y = tp.tokens.scatter(y) if self._inside and tp.tokens else sum_over(y, tp.axis)
        return y if self.bias is None else y + self.bias  # once, to the sum


class PerHead:
    """In the class of an attention that is given something for each head of all ranks."""

    def forward(self, hidden_states, *args, **kwargs):
        every = kwargs[self._per_head].unflatten(0, (len(hidden_states), -1))
        kwargs[self._per_head] = self._tp.axis.part(every, 1).flatten(0, 1)
        return super().forward(hidden_states, *args, **kwargs)


class VocabParallel(nn.Embedding):
    """In the class of an embedding, behind the class that it had, which may scale what this returns: this rank has the rows of the
    words [_first, _first + rows), every other rank's are zeros here, and the sum has all."""

    def forward(self, ids):
        check_ids((ids >= 0) & (ids < self._whole), f"a token outside of the vocabulary of {self._whole}")
        local = ids - self._first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = nn.functional.embedding(local.masked_fill(elsewhere, 0), self.weight, self._padding)
        return sum_over(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._tp.axis)


@torch.compiler.disable
def check_ids(good: Tensor, message: str) -> None:
    """IndexError, or on a GPU a failed assertion there, as torch has it: no rank has what another one would look up."""
    if good.is_cuda:
        torch._assert_async(good.all(), message)
    elif not good.all():
        raise IndexError(message)


class ShardedLogits(torch.Tensor):
    """Scores of which each rank has those of its part of the vocabulary, (..., V/N), and which say that they are (..., V).

    cross_entropy over them needs no more; casts, views and slices of the other dims stay divided; for everything else they are
    gathered, so whoever reads them finds whole logits. The last ranks' rows beyond V are padding.
    """

    @staticmethod
    def of(local: Tensor, axis: Axis, whole: int) -> "ShardedLogits":
        new = local.as_subclass(ShardedLogits)
        new.axis, new.whole = axis, whole
        return new

    def gathered(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            local = self.as_subclass(Tensor)
        return gather(local, self.axis)[..., : self.whole].contiguous()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs, self, name = kwargs or {}, args[0] if args else None, getattr(function, "__name__", "")
        mine = isinstance(self, ShardedLogits)
        if isinstance(kwargs.get("out"), ShardedLogits) or mine and (
                function in (Tensor.register_hook, Tensor.retain_grad, Tensor.__setitem__) or kwargs.get("inplace")
                or name.endswith("_") and not name.endswith("__")):
            raise RuntimeError(f"{name}: logits are divided between ranks and cannot be changed in place or hooked: "
                               "use logits.gathered()")
        if mine and function in KEEP_DIVIDED and not kwargs.get("copy"):
            with torch._C.DisableTorchFunctionSubclass():
                local = self.as_subclass(Tensor)
                shape = (*local.shape[:-1], self.whole)
                if function == Tensor.shape.__get__:
                    return torch.Size(shape)
                if function is Tensor.size:
                    dim = args[1] if len(args) > 1 else kwargs.get("dim")
                    return torch.Size(shape) if dim is None else shape[dim]
                if function is Tensor.numel:
                    return math.prod(shape)
                if function in (Tensor.view, Tensor.reshape):
                    new = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
                    if isinstance(new, (tuple, list, torch.Size)) and len(new) and new[-1] == self.whole:
                        return cls.of(function(local, *new[:-1], local.shape[-1]), self.axis, self.whole)
                elif function is Tensor.flatten:
                    start, end = (args[1:] + (0, -1)[len(args) - 1 :])[:2]
                    if not kwargs and end % local.ndim != local.ndim - 1:
                        return cls.of(local.flatten(start, end), self.axis, self.whole)
                elif function is Tensor.__getitem__:
                    index = args[1] if isinstance(args[1], tuple) else (args[1],)
                    reaches_last = Ellipsis in index or len(index) == local.ndim
                    if all(isinstance(i, (int, slice)) or i is Ellipsis for i in index) and (
                            not reaches_last or index[-1] == slice(None) and len(index) <= local.ndim):
                        return cls.of(local[args[1]], self.axis, self.whole)
                else:
                    output = function(local, *args[1:], **kwargs)
                    return cls.of(output, self.axis, self.whole) if isinstance(output, Tensor) else output
        if mine and function is nn.functional.cross_entropy and self.ndim == 2:
            options = {"weight": None, "size_average": None, "ignore_index": -100, "reduce": None, "reduction": "mean",
                       "label_smoothing": 0.0} | kwargs
            target = options.pop("target", args[1] if len(args) == 2 else None)
            ignore_index, reduction = options.pop("ignore_index"), options.pop("reduction")
            defaults = options.pop("label_smoothing") == 0.0 and all(v is None for v in options.values())
            if defaults and reduction in ("mean", "sum", "none") and isinstance(target, Tensor) and not target.is_floating_point():
                with torch._C.DisableTorchFunctionSubclass():
                    losses = VocabCrossEntropy.apply(self.as_subclass(Tensor), target, self.axis, self.whole, ignore_index)
                    count = (target != ignore_index).sum() if reduction == "mean" else 1
                return losses if reduction == "none" else losses.sum() / count

        def whole(x):
            if isinstance(x, ShardedLogits):
                return x.gathered()
            return type(x)(map(whole, x)) if type(x) in (tuple, list) else x
        return function(*map(whole, args), **{k: whole(v) for k, v in kwargs.items()})


KEEP_DIVIDED = {Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.__getitem__,
                Tensor.float, Tensor.double, Tensor.to, Tensor.contiguous, Tensor.dim, Tensor.ndim.__get__, Tensor.dtype.__get__,
                Tensor.device.__get__, Tensor.requires_grad.__get__, Tensor.grad_fn.__get__, Tensor.is_floating_point,
                Tensor.layout.__get__, Tensor.is_leaf.__get__, Tensor.element_size}


class VocabCrossEntropy(torch.autograd.Function):
    """Cross entropy (T,) of divided scores (T, V/N): the largest score, the sum of exponentials and the score of the target are
    each found on this rank and then over the axis; a target belongs to one rank."""

    @staticmethod
    def forward(ctx, local, target, axis, whole, ignore_index):
        ctx.dtype, first = local.dtype, axis.rank * local.shape[1]
        local = local.to(torch.promote_types(local.dtype, torch.float32))
        real = min(max(whole - first, 0), local.shape[1])  # without the padding
        most = local[:, :real].amax(1) if real else local.new_full((len(local),), -torch.inf)
        # before: the largest of each row, the own ones'.  after: of all.  sends: 2(N-1)/N * T numbers; all wait, also below.
        axis.all_reduce(most, op=dist.ReduceOp.MAX)
        shares = (local[:, :real] - most[:, None]).exp()
        ignored = target == ignore_index
        check_ids(ignored | (target >= 0) & (target < whole), f"a target outside of the vocabulary of {whole}")
        here = (target >= first) & (target < first + real) & ~ignored
        place = (target - first).masked_fill(~here, 0)
        score = torch.where(here, local.gather(1, place[:, None])[:, 0] - most, 0.0)
        sums = torch.stack([shares.sum(1), score])
        # before: sums of the own exponentials, and the target's score where it is here.  after: of all.
        # sends: 2(N-1)/N * 2T numbers; all wait.
        axis.all_reduce(sums)
        ctx.save_for_backward(shares / sums[0][:, None], place, here, ignored)
        ctx.padding = local.shape[1] - real
        return torch.where(ignored, 0.0, sums[0].log() - sums[1])

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("cross entropy of divided logits has no second derivative: use logits.gathered()")
        shares, place, here, ignored = ctx.saved_tensors  # softmax, less 1 at the target
        if shares.shape[1]:
            shares = shares.scatter_add(1, place[:, None], -here.to(shares.dtype)[:, None])
        shares = torch.where(ignored[:, None], 0.0, shares * grad[:, None])
        return nn.functional.pad(shares, (0, ctx.padding)).to(ctx.dtype), None, None, None, None


# ---- dividing a model by its plan ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Layout:
    """Which part of a parameter a rank has of those that its stage has, by its coordinate on the tp axis."""

    shape: tuple[int, ...]  # of the whole
    boxes: tuple[tuple[slice, ...], ...]  # of which this rank's tensor is made, see Fragment
    holders: int = 1  # so many neighbours on the tp axis have the same part
    partial: bool = False  # and what each finds is a part of its gradient
    own_tokens: bool = False  # because each uses it for its own tokens

    numel = property(lambda self: sum(math.prod(s.stop - s.start for s in box) for box in self.boxes), doc="without padding")


def whole_layout(shape, holders: int, partial: bool = False) -> Layout:
    return Layout(tuple(shape), (tuple(slice(0, size) for size in shape),), holders, partial)


def plan_of(model: nn.Module) -> dict[str, str]:
    """Names (with * for a number) -> styles: our own plan, or what the model's config and class declare. Empty where neither is."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    prefix = prefix_of(model)
    if kind in PLANS:
        heads = {name for name, _ in model.named_modules() if prefix and not name.startswith(prefix)}
        return {name if name in heads else prefix + name: style for name, style in PLANS[kind].items()}
    declared = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    declared = declared | ADDED.get(kind, {}) if declared else {}
    return {prefix + name: style for name, style in declared.items()} | dict(getattr(type(model), "_tp_plan", None) or {})


def prefix_of(model: nn.Module) -> str:
    """Of the base model's names in the whole model."""
    prefix = getattr(model, "base_model_prefix", "")
    return prefix + "." if prefix and hasattr(model, prefix) else ""


def embeddings_of(model: nn.Module, end: str) -> nn.Module | None:
    """Its first ("input") or last ("output") matrix of words; None in a model without words."""
    with contextlib.suppress(NotImplementedError):
        return getattr(model, f"get_{end}_embeddings", lambda: None)()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer, the blocks of a ResNet: what nn.ModuleLists and nn.Sequentials list and has submodules itself,
    the outermost ones."""
    found, inside = [], set()
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and module not in inside:
            blocks = [child for child in module if any(True for _ in child.children())]
            found += blocks
            inside.update(m for block in blocks for m in block.modules())
    return found


def generic(name: str) -> str:
    """With * for numbers."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(name, plan.get(generic(name)))


def numbers_of(model: nn.Module, n: int):
    """(kind of model, its config, attention heads, heads of keys and values); n and n where nothing says how many."""
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = next((getattr(config, k) for k in ("num_attention_heads", "n_head") if getattr(config, k, None)), n)
    kv_heads = None
    with contextlib.suppress(RuntimeError):  # transformers': layers differ
        kv_heads = getattr(config, "num_key_value_heads", None)
    return getattr(config, "model_type", type(model).__name__), config, heads, kv_heads or heads


def check_plan(model: nn.Module, plan: Mapping[str, str], n: int, sp: int) -> None:
    """What can be refused before another engine has let the model go. sp: between so many ranks heads are divided once more."""
    kind, config, heads, kv_heads = numbers_of(model, n)
    if kind == "bloom" and config.slow_but_exact and config.pretraining_tp > 1 and n > 1:
        raise ValueError("bloom with slow_but_exact multiplies by weights past its linears: use tp=1")
    if heads % n:
        raise ValueError(f"{heads} attention heads cannot be divided between tp={n} ranks")
    if heads % (n * sp):
        raise ValueError(f"{heads} attention heads cannot be divided between tp={n} times sp={sp} ranks: use sp_mode ring")
    if kv_heads % n and n % kv_heads:
        raise ValueError(f"{kv_heads} key and value heads can be neither divided between tp={n} ranks nor given to equally many")
    if unknown := sorted({plan[name] for name in plan} - STYLES):
        raise ValueError(f"{kind}: styles {', '.join(unknown)} are not supported; supported are {', '.join(sorted(STYLES))}")


def plan_layouts(model: nn.Module, plan: Mapping[str, str], n: int, rank: int, shape_of, blocks: str = ""):
    """What the plan means for this model: (modules it names, their styles, layouts of the parameters that are not simply whole).
    shape_of(parameter): of the whole. Changes nothing. Raises ValueError for numbers that tp does not divide, modules of another
    kind, and tied weights of which a module has no style."""
    kind, _, heads, kv_heads = numbers_of(model, n)
    modules = {name: module for name, module in model.named_modules() if style_of(name, plan)}
    layouts: dict[nn.Parameter, Layout] = {}
    input_, output = (embeddings_of(model, end) for end in ("input", "output"))
    styles = {name: style_of(name, plan) for name in modules}
    for name, module in model.named_modules():  # a head that is divided divides the embedding whose weight it shares
        if module is input_ and name not in modules and output in modules.values() and output.weight is input_.weight:
            modules[name], styles[name] = module, "embedding_rowwise"

    def note(name, p, layout):
        if p in layouts and layouts[p] != layout:
            raise ValueError(f"{name} is tied to a weight that is divided otherwise")
        layouts[p] = layout

    def cut(name, p, dim, pieces=1, units=None, pad=False):
        """Divide a dim into n equal parts, or each of `pieces` stretches; fewer `units` than ranks go to n/units ranks each."""
        shape, holders = shape_of(p), 1
        size = shape[dim]
        if pad:
            rows = -(-size // n)
            ends = [(min(rank * rows, size), min((rank + 1) * rows, size))]
        elif units and units < n:
            holders, one = n // units, size // units
            ends = [(rank // holders * one, (rank // holders + 1) * one)]
        else:
            if size % (pieces * n):
                raise ValueError(f"{name} has {size} {'columns' if dim else 'rows'}, which cannot be divided between tp={n} ranks"
                                 + f" in {pieces} pieces" * (pieces > 1))
            step = size // pieces // n
            ends = [(k * n * step + rank * step, k * n * step + (rank + 1) * step) for k in range(pieces)]
        boxes = tuple(tuple(slice(*end) if d == dim else slice(0, s) for d, s in enumerate(shape)) for end in ends)
        note(name, p, Layout(shape, boxes, holders, partial=holders > 1))

    def packed(name, column):
        """How many matrices lie side by side in a packed weight: so many times what its partner has in one."""
        near = [(m, styles[other]) for other, m in modules.items() if other.rpartition(".")[0] == name.rpartition(".")[0]]
        side = lambda m, outputs: shape_of(m.weight)[outputs != isinstance(m, nn.Linear)]
        size = side(modules[name], column)
        counts = {size / side(m, not column) for m, style in near if ("rowwise" in style) == column and style in STYLES}
        if len(counts) != 1 or not next(iter(counts)).is_integer():
            raise ValueError(f"{name}: how many matrices are packed in its weight does not follow from those beside it")
        return int(counts.pop())

    for name, module in modules.items():
        style, pieces = styles[name], 1
        if style == "replicated_with_grad_allreduce":
            for key, p in module.named_parameters():
                note(f"{name}.{key}", p, whole_layout(shape_of(p), n, partial=True))
            continue
        if style == "embedding_rowwise":
            if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                raise ValueError(f"{name} is a {type(module).__name__}; only a plain nn.Embedding can be divided by rows")
            cut(f"{name}.weight", module.weight, 0, pad=True)
            continue
        if not (isinstance(module, nn.Linear) or "Conv1D" in type(module).__name__):
            raise ValueError(f"{name} is a {type(module).__name__}; only linears can be divided as {style}")
        if "weight" not in module._parameters:
            raise ValueError(f"{name}.weight is computed from other parameters (weight_norm?), which {style} cannot divide")
        if type(module).forward is not nn.Linear.forward and "Conv1D" not in type(module).__name__ and (
                not isinstance(module, (ColumnParallel, RowParallel))):
            raise ValueError(f"{name} is a {type(module).__name__} with a forward of its own, which {style} would not call")
        out, in_ = (0, 1) if isinstance(module, nn.Linear) else (1, 0)  # Conv1D keeps [in, out]
        if style.startswith("packed"):
            pieces = packed(name, "colwise" in style)
        if "rowwise" in style:
            cut(f"{name}.weight", module.weight, in_, pieces)
        else:
            parent, layer_kv = model.get_submodule(name.rpartition(".")[0]), kv_heads
            is_kv = re.search(r"(^|\.)(k|v)_proj$|\.(key|value)$", name)
            if is_kv and hasattr(parent, "num_key_value_groups") and isinstance(getattr(parent, "head_dim", None), int):
                keys = modules.get(re.sub(r"v_proj$", "k_proj", name), module)  # each layer may have its own number of them
                layer_kv = shape_of(keys.weight)[out] // parent.head_dim
                if not layer_kv or layer_kv % n and n % layer_kv:
                    raise ValueError(f"{name}: {layer_kv} heads can be neither divided between tp={n} ranks nor given to equally "
                                     "many")
            is_kv = is_kv and layer_kv != heads
            head = module is output or style == "colwise_gather_output"
            cut(f"{name}.weight", module.weight, out, pieces, layer_kv if is_kv else None, pad=head)
            if module.bias is not None:
                cut(f"{name}.bias", module.bias, 0, pieces, layer_kv if is_kv else None, pad=head)
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if p in layouts and not any(name == m or name.startswith(m + ".") for m in modules):
                if not (key == "bias" and p.ndim == 1 and name.endswith(("predictions", "lm_head"))):  # BERT has it twice
                    raise ValueError(f"{name}.{key} is tied to a weight that is divided, but {kind}'s plan does not name {name}")
    if all(module in (input_, output) or styles[name].startswith("replicated") for name, module in modules.items()):
        raise ValueError(f"{kind}: the plan divides no linear but the head, so each rank would have all blocks whole: use tp=1, or "
                         "give plan={name: style}")
    gathering = gathering_modules(styles, blocks)
    for name, module in model.named_modules() if blocks else ():
        all_tokens = any(f"{name}.".startswith(f"{parent}.") for parent in gathering)
        for key, p in module.named_parameters(recurse=False) if name.startswith(f"{blocks}.") else ():
            if p not in layouts and (not all_tokens or key == "bias" and "rowwise" in styles.get(name, "")):
                if p.ndim > 1:  # norms and biases are for each token; this may be of a convolution, or a recurrence
                    raise ValueError(f"{name}.{key} is in a block but not in the plan, so its module would see its own tokens "
                                     "alone and may be one that mixes them: use sp_mode=None")
                layouts[p] = dataclasses.replace(whole_layout(shape_of(p), n, partial=True), own_tokens=True)
    for name in modules:
        parent = model.get_submodule(name.rpartition(".")[0])
        own = parent.named_parameters(recurse=False) if styles[name] in COLUMNS else ()
        if strays := [key for key, p in own if p.requires_grad and p not in layouts]:
            raise ValueError(f"{name.rpartition('.')[0]} has weights of its own, {', '.join(strays)}, beside linears that are "
                             "divided: each rank would find a part of their gradient; use tp=1")
    return modules, styles, layouts


def gathering_modules(styles: Mapping[str, str], blocks: str) -> list[str]:
    """Where tokens are divided: names of what has column linears, attention and MLP, which therefore read all tokens. Not a block
    itself, whose column linears gather each for itself, nor what is inside of another one."""
    parents = {name.rpartition(".")[0] for name, style in styles.items()
               if name.startswith(f"{blocks}.") and style.startswith(("colwise", "packed_colwise"))}
    parents = {name for name in parents if not name.removeprefix(f"{blocks}.").isdecimal()}
    return sorted(name for name in parents if not any(name.startswith(f"{other}.") for other in parents))


def divide(model: nn.Module, modules: dict, styles: dict, layouts: dict, tp: Axis, absent: set, blocks: str, changes: list
           ) -> TensorParallel:
    """Leave each rank its part of the modules that the plan names (see `plan_layouts`); note in `changes` what modules were.
    absent: parameters that another stage has, which take no memory. blocks: the name of their list, where tokens are divided."""
    n, prefix = tp.world_size, prefix_of(model)
    kind, _, heads, kv_heads = numbers_of(model, n)
    output = embeddings_of(model, "output")
    shared = TensorParallel(tp, model, layouts)
    for p, layout in layouts.items():
        source = p.data.to("meta") if p in absent else p.data
        parts = [source[box] for box in layout.boxes]
        dim = next((d for d in range(p.ndim) if len({(b[d].start, b[d].stop) for b in layout.boxes}) > 1), 0)
        local = torch.cat(parts, dim)
        rows = -(-layout.shape[0] // n)
        if layout.holders == 1 and local.shape[0] < rows and local.shape[1:] == p.shape[1:]:  # the vocabulary's last rows: zeros
            local = torch.cat([local, local.new_zeros(rows - local.shape[0], *local.shape[1:])])
        set_data(p, blank(p).expand(local.shape) if p in absent else local.clone(memory_format=torch.contiguous_format))
    layer_kv: dict[nn.Module, int] = {}  # attention -> heads of its keys and values, before it is divided
    counted: set[tuple] = set()  # (module, attribute) that already counts this rank's alone
    for name, module in modules.items():
        style = styles[name]
        if style == "replicated_with_grad_allreduce" or isinstance(module, AbsentEmbedding):
            continue
        base = VocabParallel if style == "embedding_rowwise" else RowParallel if "rowwise" in style else ColumnParallel
        whole = layouts[module.weight].shape
        own_class, transposed = type(module), "Conv1D" in type(module).__name__
        changes.append((module, "__class__", own_class))
        module.__class__ = mixed(own_class, base) if base is VocabParallel else mixed(base, own_class)
        whole, local = (x[1] if transposed else x[0] for x in (whole, module.weight.shape))
        parent = model.get_submodule(name.rpartition(".")[0])
        mark(changes, module, _tp=shared, _style=style, _transposed=transposed, _is_head=module is output, _whole=whole,
             _inside=name.startswith(f"{blocks}.") if blocks else False, _gathers=isinstance(parent, Staged))
        if base is ColumnParallel:
            key = "nf" if transposed else "out_features"
            changes.append((module, key, getattr(module, key)))
            setattr(module, key, local)
        if base is VocabParallel:
            first, padding = tp.rank * local, -1 if module.padding_idx is None else module.padding_idx - tp.rank * local
            mark(changes, module, _first=first, _padding=padding if 0 <= padding < local else None)  # its row gets no gradient
        if style not in COLUMNS:
            continue
        groups = getattr(parent, "num_key_value_groups", 0)
        layer_kv.setdefault(parent, heads // groups if groups else kv_heads)
        counts = [(key, layer_kv[parent] if "key_value" in key or "kv" in key else heads) for key in HEAD_COUNTS]
        own = ATTRIBUTES.get(kind, {})
        mine = own.get(generic(name.rpartition(".")[0]).removeprefix(prefix), ())
        for key, total in counts + [(key, getattr(parent, key)) for key in mine]:
            if getattr(parent, key, None) == total and (parent, key) not in counted:
                counted.add((parent, key))
                changes.append((parent, key, total))
                setattr(parent, key, max(total // n, 1))
        if hasattr(parent, "num_key_value_groups"):
            changes.append((parent, "num_key_value_groups", parent.num_key_value_groups))
            parent.num_key_value_groups = (heads // n) // max(layer_kv[parent] // n, 1)
    for name, module in model.named_modules():
        if key := PER_HEAD.get(kind, {}).get(generic(name).removeprefix(prefix)):
            changes.append((module, "__class__", type(module)))
            module.__class__ = mixed(PerHead, type(module))
            mark(changes, module, _tp=shared, _per_head=key)
    return shared


COLUMNS = ("colwise", "packed_colwise")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "num_key_value_heads", "n_kv_heads")
STYLES = {"colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "packed_colwise", "packed_rowwise",
          "embedding_rowwise", "replicated_with_grad_allreduce"}


MISSING = object()  # in `changes`: the attribute was not there


def own_configs(model: nn.Module, changes: list) -> None:
    """Give the modules copies of their configs, which other models may share, to be changed. They use no cache: it would hold keys
    and values of a rank's own blocks or tokens alone, and for each place in it torch.compile would compile a block anew."""
    copies: dict[int, tuple] = {}  # id -> (config, which keeps the id its own; its copy)
    for module in model.modules():
        if (config := module.__dict__.get("config")) is not None:
            if id(config) not in copies:
                copies[id(config)] = config, copy.copy(config)
            changes.append((module, "config", config))
            module.config = copies[id(config)][1]
    for _, new in copies.values():
        for key, value in vars(new).items():
            if id(value) in copies:
                vars(new)[key] = copies[id(value)][1]
        if getattr(new, "use_cache", False):
            new.use_cache = False


def mark(changes: list, module: nn.Module, **attributes) -> None:
    """Give a module attributes, past nn.Module's own bookkeeping; note that it had none."""
    for key, value in attributes.items():
        changes.append((module, key, MISSING))
        object.__setattr__(module, key, value)


def set_data(p: nn.Parameter, data: Tensor) -> None:
    """p.data = data of another shape. A change of dtype makes autograd forget the node that gathers p's gradient, which knows the
    shape, and which a graph that is still alive would keep."""
    p.data = torch.empty(0, dtype=torch.float16 if p.dtype != torch.float16 else torch.float32, device=p.device)
    p.data = data


@functools.cache  # torch.compile compiles a block once, and not once for each layer, where layers have the same classes
def mixed(first: type, second: type) -> type:
    """A class that is both, and looks into the first one first."""
    return second if issubclass(second, first) else type(first.__name__ + second.__name__, (first, second), {})


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]
    return torch.default_generator


class FusedRMSNorm:
    """In the class of an RMS norm that transformers writes out in five operators: torch's one kernel, in the dtype of x."""

    def forward(self, x):
        weight = self.weight + self._offset if self._offset else self.weight
        return nn.functional.rms_norm(x, weight.shape, weight, self._eps)


def fuse_norms(model: nn.Module, changes: list) -> None:
    """Let RMS norms be one kernel, where it computes the same: that is tried, on a copy of the module with random weights."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if weight is None or weight.ndim != 1 or not isinstance(eps, float) or not type(module).__name__.endswith("RMSNorm"):
            continue
        if len(inspect.signature(type(module).forward).parameters) != 2:  # self and x
            continue
        generator = torch.Generator().manual_seed(0)
        w, x = (torch.randn(*shape, len(weight), generator=generator, device="cpu") for shape in ((), (2, 3)))
        trial = copy.deepcopy(module).to("cpu", torch.float32)
        trial.weight.data, found = w, []
        with torch.no_grad(), contextlib.suppress(TypeError, RuntimeError):  # one of another kind
            found = [offset for offset in (0.0, 1.0) if all(torch.allclose(
                trial(x * size), nn.functional.rms_norm(x * size, w.shape, w + offset, eps), atol=1e-5) for size in (1.0, 1e-3))]
        if found:
            changes.append((module, "__class__", type(module)))
            module.__class__ = mixed(FusedRMSNorm, type(module))
            mark(changes, module, _offset=found[0], _eps=eps)


# ---- pipeline parallelism: blocks dealt out in stages --------------------------------------------------------------------
#
# Rank p of P has the blocks of stage p, and with C chunks those of the stages p, p + P, ...; forward goes up the stages, backward
# comes down. Every rank runs the model's own forward on the whole micro-batch: masks and positions are its own; blocks of earlier
# stages hand their input on, the last of them what has been received; behind its last block a stage leaves forward. Of the modules
# outside the blocks, those before them belong to the first stage and those behind to the last; elsewhere they have no memory.
#
#     1F1B, 3 ranks, 4 micro-batches      rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3        a rank runs ahead of its backward by
#     (F forward, B backward, .. idle)    rank 1      F0 F1 .. B0 F2 B1 F3 B2 .. B3           as many forwards as stages follow:
#                                         rank 2         F0 B0 F1 B1 F2 B2 F3 B3              rank 0 keeps P activations, not M
#
# Idle are P - 1 of M + P - 1 turns; with C chunks turns are 1/C as long, and the P - 1 idle ones with them. (1F1B: PipeDream-Flush,
# arXiv:2006.09503, §3; interleaved: arXiv:2104.04473, §2.2.)


def schedule(ranks: int, micro_batches: int, chunks: int = 1) -> list[list[tuple[str, int, int]]]:
    """Each rank's tasks in order: ("F" or "B", stage, micro-batch). With chunks, P micro-batches go through a rank's first stage,
    then the same P through its second, ...; for other than multiples of P the missing ones are left out of the order for more."""
    padded = -(-micro_batches // ranks) * ranks if chunks > 1 else micro_batches
    lists = []
    for rank in range(ranks):
        ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        turns = []
        for turn in range(padded * chunks):
            group, place = divmod(turn, ranks * chunks)
            chunk, k = divmod(place, ranks)
            turns.append((chunk, group * ranks + k))
        forward = [("F", chunk * ranks + rank, k) for chunk, k in turns]
        backward = [("B", (chunks - 1 - chunk) * ranks + rank, k) for chunk, k in turns]
        ahead = min(ahead, len(turns))
        tasks = forward[:ahead]
        for f, b in zip(forward[ahead:], backward):
            tasks += [f, b]
        tasks += backward[len(turns) - ahead :]
        lists.append([task for task in tasks if task[2] < micro_batches])
    return lists


class StageEnd(Exception):
    """Leaves the model's forward behind the last block of a stage."""

    def __init__(self, hidden: Tensor):
        self.hidden = hidden


class Staged:
    """In the class of a block: it runs in its own stage; in later ones it hands on, in earlier ones forward ends here."""

    def __call__(self, *args, **kwargs):
        return self._pipeline.block(self, super().__call__, args, kwargs)


def own_name(block: nn.Module) -> str:
    """Of the class that it had."""
    return type(block).__mro__[2].__name__


class AbsentEmbedding(nn.Embedding):
    """In the class of an embedding that another stage has. What depends on it is NaN, and dropped where blocks begin."""

    def forward(self, ids):
        return blank(self.weight).expand(*ids.shape, self.embedding_dim)


def blank(p: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """One element that stands for all of a parameter that another stage has; whoever should compute with it sees NaN."""
    dtype = dtype or p.dtype
    return torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=p.device)


class Pipeline:
    """The pp axis at work: which stage has what, and what goes on between neighbours. One stage, and no neighbours, where only
    tokens are divided, which is from the first block on, too."""

    def __init__(self, axis: Axis, model: nn.Module, plan: Mapping[str, str], chunks: int, changes: list):
        self.axis, self.chunks, self.stages = axis, chunks, axis.world_size * chunks
        self.own = range(axis.rank, self.stages, axis.world_size)
        self.name, blocks = block_list(model, plan)
        self.begins = [-(-len(blocks) * stage // self.stages) for stage in range(self.stages + 1)]  # the earlier ones have more
        # The stage whose forward is being run, and what came from the one before.
        self.running, self.received = 0 if self.stages == 1 else None, None
        self.tokens: Tokens | None = None  # sequence parallelism
        self.in_tuples = 0  # how long are the tuples that blocks return, if they do? Known to the first stage, which tells the next
        self.known: dict[tuple, tuple] = {}  # (stage, shapes of a micro-batch) -> what is sent from it to the next
        self.coming: dict[tuple, tuple] = {}  # ("F" or "B", stage, micro-batch) -> (tensor, work) that has been asked for ahead
        self.sending: dict[tuple, list] = {}  # the same -> (tensor, work) of what is on its way, the oldest first
        self.lost: list[dict] = []  # what was on its way when an exception came
        self.calls = 0  # of forward_backward and forward: the tag of their messages, so that none is taken for another call's
        stage_of = self._stages_by_module(model, plan)
        holders: dict[nn.Parameter, set[int]] = {}
        for name, module in model.named_modules():
            for p in module.parameters(recurse=False):
                holders.setdefault(p, set()).add(stage_of[name])
        of_rank = lambda stages: {stage % axis.world_size for stage in stages}
        self.absent = {p for p, stages in holders.items() if axis.rank not in of_rank(stages)}
        # Weights that several ranks use, as a head tied to the embedding: each has them, and their gradients are added up.
        self.shared = {p: tuple(sorted(of_rank(stages))) for p, stages in holders.items() if len(of_rank(stages)) > 1}
        for name, module in model.named_modules():
            inside = name.startswith(self.name + ".")
            if name.removeprefix(self.name + ".").isdecimal():
                changes.append((module, "__class__", type(module)))
                module.__class__ = mixed(Staged, type(module))
                mark(changes, module, _pipeline=self, _block=blocks.index(module))
            elif not inside and stage_of[name] not in self.own and any(p in self.absent for p in module.parameters(recurse=False)):
                if isinstance(module, nn.Embedding):
                    changes.append((module, "__class__", type(module)))
                    module.__class__ = mixed(type(module), AbsentEmbedding)
                mark(changes, module, _elsewhere=(name, stage_of[name]))
        for p in self.absent:
            p.data = blank(p).expand(p.shape)
        if self.stages > 1:
            self._connect()

    def __deepcopy__(self, memo):
        return self  # a copy of the model has the same place

    def _stages_by_module(self, model, plan) -> dict[str, int]:
        """Module name -> stage. Outside of the blocks, the first or the last, by the order in which modules are registered, or by
        transformers' base_model_pp_plan, where the config declares one."""
        prefix, names = prefix_of(model), [name for name, _ in model.named_modules()]
        config, at = getattr(model, "config", None), names.index(self.name)
        behind = set(BEHIND.get(getattr(config, "model_type", None), ()))
        declared = list(getattr(config, "base_model_pp_plan", None) or {})
        if self.name.removeprefix(prefix) in declared:
            behind.update(declared[declared.index(self.name.removeprefix(prefix)) + 1 :])
        stages = {}
        for k, name in enumerate(names):
            block = name.removeprefix(self.name + ".").partition(".")[0]
            if name.startswith(self.name + ".") and block.isdecimal():
                stages[name] = next(s for s in range(self.stages) if self.begins[s] <= int(block) < self.begins[s + 1])
            else:
                head = bool(prefix and name) and not f"{name}.".startswith(prefix)  # XLM-RoBERTa's is registered first
                last = k > at or head or any(f"{name}.".startswith(f"{prefix}{other}.") for other in behind)
                stages[name] = self.stages - 1 if last else 0
        return stages

    # -- one stage's forward --

    def block(self, block: nn.Module, run, args: tuple, kwargs: dict):
        if self.running is None:
            raise RuntimeError("the model is divided into stages: call engine.forward_backward(batch), or engine(...) under "
                               "torch.no_grad()")
        stage, index = self.running, block._block
        begin, end = self.begins[stage : stage + 2]
        first = None if args else "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))  # the argument that they are
        hidden = args[0] if args else kwargs[first]
        others, tokens = [None] * (self.in_tuples - 1), self.tokens
        if tokens:
            tokens.come_to(index)
        if tokens and index == 0:
            tokens.begin(hidden)
        if begin <= index < end:
            if tokens:
                tokens.enter_block(block.training)
                hidden = tokens.part(hidden) if index == 0 else hidden
                args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {first: hidden})
                args, kwargs = tokens.beside(block, args, kwargs, first)
            try:
                output = run(*args, **kwargs)
            except BaseException:  # also checkpointing's own, when it has computed enough again
                if tokens:
                    tokens.axis.engine()._leave_divided()
                raise
            if tokens:
                tokens.leave_block()
                if not tokens.attended:
                    raise RuntimeError(f"{own_name(block)} did not call transformers' attention interface, which {tokens.mode} "
                                       "needs: use sp_mode split_gather or None")
            self.in_tuples = len(output) if isinstance(output, tuple) else 0
            hidden, *others = output if self.in_tuples else (output,)
        elif index == begin - 1:
            if self.received is None:
                raise RuntimeError(f"forward passes block {index} of {self.name} more than once: this model needs pp=1")
            hidden, self.received = self.received, None
        if tokens and index == end - 1:
            tokens.leave_blocks()
            hidden = tokens.whole(hidden) if stage == self.stages - 1 else hidden
        leaves = index == end - 1 and stage < self.stages - 1
        beside = (args[1:], {key: x for key, x in kwargs.items() if key != first}) if leaves or tokens else ()
        if more := [x for x in tensors_in(beside) if x.requires_grad]:
            why = "between stages go hidden states alone" if leaves else "of tokens only theirs are divided"
            raise RuntimeError(f"{own_name(block)} is given {len(more)} tensors beside hidden states that depend on weights; "
                               f"{why}, so this model needs {'pp=1' if leaves else 'sp_mode=None'}")
        if leaves:
            raise StageEnd(hidden)
        return (hidden, *others) if self.in_tuples else hidden

    def forward(self, stage: int, received: Tensor | None, run):
        """run() is the model's forward and, on the last stage, the loss. Returns what it returns, or the stage's hidden states."""
        self.running, self.received = stage, received
        try:
            output = run()
        except StageEnd as end:
            output = end.hidden
        else:
            if stage < self.stages - 1:
                raise RuntimeError(f"on stage {stage} of {self.stages} forward came to its end without the blocks that follow")
        finally:
            self.running = None
        if self.received is not None:
            raise RuntimeError(f"forward did not pass block {self.begins[stage] - 1}, behind which stage {stage} begins")
        return output

    def check_present(self, name: str, stage: int) -> None:
        """A module that another stage has is being run. That is well while forward has not come to the own blocks."""
        if self.running is not None and not (stage == 0 < self.running and self.received is not None):
            raise RuntimeError(f"{name} is on stage {stage}, but forward reads it on stage {self.running} of {self.stages}: "
                               "this model needs pp=1")

    # -- between neighbours --

    def _connect(self) -> None:
        """Make the lines: for each direction a group of its own, so that what goes up never waits for what comes down; one more
        each between the last rank and the first, of which P = 2 has no other pair. Neighbours meet once, in order: NCCL makes a
        connection when it is first used, and then waits for both ends."""
        pp, wraps = self.axis, (False, True) if self.chunks > 1 else (False,)
        self.groups = {line: own_group(pp.lists) for line in itertools.product((1, -1), wraps)}
        # before and after: nothing that anybody needs.  sends: 4 bytes each way along each line, once; neighbours wait.
        for stage in range(min(self.stages, pp.world_size + 1) - 1):
            for source, to in ((stage, stage + 1), (stage + 1, stage)):
                if source % pp.world_size == pp.rank:
                    self.send(torch.zeros(1, device=pp.device), source, to, 0)
                if to % pp.world_size == pp.rank:
                    self._receive((1,), torch.float32, source, to)[1].wait()
        self.finish()

    def _line(self, source: int, to: int):
        return self.groups[to - source, max(source, to) % self.axis.world_size == 0]

    def send(self, x: Tensor, source: int, to: int, k: int) -> None:
        # before: this rank has x.  after: so has the rank of the next stage, or of the one before.
        # sends: x's bytes, while this rank goes on; x is kept until it is known to have arrived (`sent`).
        x = x.detach().contiguous()
        x = x.cpu() if self.axis.by_hand else x
        self.axis._count("send", x.numel() * x.element_size())
        work = dist.isend(x, group=self._line(source, to), group_dst=to % self.axis.world_size, tag=self.calls)
        self.sending.setdefault(("F" if to > source else "B", source, k), []).append((x, work))

    def sent(self, key: tuple) -> None:
        """Wait until this has arrived."""
        for _, work in self.sending.pop(key, ()):
            work.wait()

    def finish(self) -> None:
        for key in list(self.sending):
            self.sent(key)
        self.lost = []

    def forget(self) -> None:
        """After an exception, which all ranks have met, or those that wait run into their time limit."""
        self.lost.append(self.sending)  # a message that has not left yet would go nowhere if nobody held it
        self.known, self.coming, self.sending = {}, {}, {}

    def _receive(self, shape, dtype: torch.dtype, source: int, to: int) -> tuple[Tensor, dist.Work]:
        x = torch.empty(shape, dtype=dtype, device="cpu" if self.axis.by_hand else self.axis.device)
        return x, dist.irecv(x, group=self._line(source, to), group_src=source % self.axis.world_size, tag=self.calls)

    def _arrived(self, coming) -> Tensor:
        x, work = coming
        work.wait()
        return x.to(self.axis.device)

    def send_hidden(self, hidden: Tensor, stage: int, k: int, shapes: tuple) -> None:
        """To the next stage. The first time that a micro-batch has these shapes, a header goes ahead: dims, dtype, does it want a
        gradient back, how long are blocks' tuples. Both ends remember, so later ones come without, and nobody waits for one."""
        header = [hidden.ndim, *hidden.shape, CODES.index(hidden.dtype), hidden.requires_grad, self.in_tuples]
        known = self.known.setdefault((stage, shapes), header)
        if known is header:
            padded = torch.tensor(header + [0] * (16 - len(header)), dtype=torch.int64, device=self.axis.device)
            self.send(padded, stage, stage + 1, k)
        elif known != header:
            raise RuntimeError(f"stage {stage} sends {header} where a micro-batch of the same shapes gave {known} before")
        self.send(hidden, stage, stage + 1, k)

    def ask(self, kind: str, stage: int, k: int, shapes: tuple, held: Mapping) -> bool:
        """Ask for what a task receives, if it is known already what that will be; in the order of tasks, which is that of sending.
        held: (stage, micro-batch) -> (input, output). False: it is not known, so nothing behind it may be asked for."""
        key = kind, stage, k
        if key in self.coming or (stage == 0 if kind == "F" else stage == self.stages - 1):
            return True
        if kind == "F" and (stage - 1, shapes) in self.known:
            ndim, *rest = self.known[stage - 1, shapes]
            self.coming[key] = self._receive(rest[:ndim], CODES[rest[ndim]], stage - 1, stage)
        elif kind == "B" and (stage, k) in held:
            hidden = held[stage, k][1]
            if hidden.requires_grad:
                self.coming[key] = self._receive(hidden.shape, hidden.dtype, stage + 1, stage)
        else:
            return False
        return True

    def may_wait(self, kind: str) -> bool:
        """May this rank compute while a receive of this kind waits? Under NCCL that is a kernel which runs until something comes,
        and whatever waits for the whole device (CUDA, when it loads a kernel on first use or frees memory) waits for it, too: two
        ranks that each wait for what the other is computing would wait for ever. Gradients come down the line, whose last rank
        waits for none; with chunks the line is a ring."""
        return self.axis.by_hand or kind == "B" and self.chunks == 1

    def receive_hidden(self, stage: int, k: int, shapes: tuple) -> Tensor:
        if (stage - 1, shapes) not in self.known:
            header = self._arrived(self._receive((16,), torch.int64, stage - 1, stage)).tolist()
            self.known[stage - 1, shapes] = header[: header[0] + 4]
        self.ask("F", stage, k, shapes, {})
        *_, wants_grad, in_tuples = self.known[stage - 1, shapes]
        self.in_tuples = in_tuples
        return self._arrived(self.coming.pop(("F", stage, k))).requires_grad_(bool(wants_grad) and torch.is_grad_enabled())

    def receive_grad(self, stage: int, k: int) -> Tensor:
        """Of what was sent to the next stage; it has been asked for."""
        grad = self._arrived(self.coming.pop(("B", stage, k)))
        self.sent(("F", stage, k))  # what comes back has arrived before
        return grad

    def send_grad(self, received: Tensor, stage: int, k: int) -> None:
        self.send(torch.zeros_like(received) if received.grad is None else received.grad, stage, stage - 1, k)
        # The rank below has gone two micro-batches on since it took this, or is only taking what comes. With chunks it may lag
        # behind by all that it runs ahead.
        on_their_way = [key for key in self.sending if key[0] == "B"]
        if len(on_their_way) > (2 if self.chunks == 1 else 2 * self.stages):
            self.sent(on_their_way[0])

    def to_all(self, output):
        """The last stage's output, whatever it is made of, on every rank of the axis."""
        pp, tensors, last = self.axis, [], self.axis.world_size - 1
        if pp.rank == last:
            file = io.BytesIO()
            pickler = pickle.Pickler(file)
            pickler.persistent_id = lambda x: self._note(x, tensors) if isinstance(x, Tensor) else None
            pickler.dump(output)
            parcel = [(file.getvalue(), [(tuple(x.shape), x.dtype) for x in tensors])]
        else:
            parcel = [None]
        # before: the last stage has the output.  after: all have what it is made of, and then its tensors.
        # sends: all of it, of divided logits this rank's part; everybody waits.
        dist.broadcast_object_list(parcel, group=pp.group, group_src=last, device=pp.device)
        data, about = parcel[0]
        tensors = tensors or [torch.empty(shape, dtype=dtype, device=pp.device) for shape, dtype in about]
        for x in tensors:
            if x.numel():
                dist.broadcast(as_bytes(x.view(-1)), group=pp.group, group_src=last)
        if pp.rank == last:
            return output
        unpickler = pickle.Unpickler(io.BytesIO(data))
        tp = pp.engine().tp
        unpickler.persistent_load = lambda about: (
            tensors[about[0]] if about[1] is None else ShardedLogits.of(tensors[about[0]], tp, about[1]))
        return unpickler.load()

    def _note(self, x: Tensor, tensors: list) -> tuple[int, int | None]:
        whole = x.whole if isinstance(x, ShardedLogits) else None
        with torch._C.DisableTorchFunctionSubclass():
            tensors.append(x.as_subclass(Tensor).detach().contiguous())
        return len(tensors) - 1, whole


CODES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Model type -> modules of the base model that are registered before the blocks, but run behind them.
BEHIND = {"opt": ("decoder.final_layer_norm", "decoder.project_out"), "llama4_vision_model": ("layernorm_post",)}


def block_list(model: nn.Module, plan: Mapping[str, str]) -> tuple[str, list[nn.Module]]:
    """The list of blocks that the plan names, and its name."""
    modules = dict(model.named_modules())
    names = {generic(name).partition(".*.")[0] for name in plan if ".*." in generic(name)}
    lists = [name for name in names if isinstance(modules.get(name), nn.ModuleList)]
    for name, module in modules.items() if not names else ():  # a plan of nothing but the vocabulary: the outermost list of blocks
        blocks = isinstance(module, nn.ModuleList) and any(True for block in module for _ in block.children())
        if blocks and not any(name.startswith(f"{other}.") for other in lists):
            lists.append(name)
    if len(lists) != 1:
        raise ValueError(f"pipelines and divided tokens need one list of blocks; the plan of {type(model).__name__} names "
                         f"{', '.join(sorted(names or lists)) or 'none'}")
    return lists[0], list(model.get_submodule(lists[0]))


def tensors_in(x) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    values = x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else ()
    return [t for value in values for t in tensors_in(value)]


# ---- sequence parallelism: tokens divided between ranks -------------------------------------------------------------------
#
# From the first block to behind the last a rank has S/N of the S tokens, (B, S/N, H): Pipeline.block, of one stage where there is
# no pipeline, divides them before the first block and gathers them behind the last. Embeddings, poolers, heads and losses see all
# tokens, on all ranks alike. Norms, linears and dropout are for each token; attention is not, and the three modes differ in what
# they do about it.
#
# Gradients: loss and head are computed on each rank, the same. Behind the blocks a rank takes its own tokens' gradient, before them
# all get all. So what lies outside has its whole gradient on each rank; weights in the blocks have seen the own tokens alone and
# find a part, which is summed over the axis.
#
# Tensor parallelism leaves what lies between its pairs of linears whole on every rank. `split_gather` divides that between the same
# ranks: attention and MLP gather tokens first, and what was a sum over tp becomes the own tokens of the sum:
#
#     forward     X_t --gather tokens--> X --> X A_r --f--> H_r --> H_r B_r --own tokens of the sum--> Y_t
#     backward    dX_t <--own tokens of the sum-- dH_r A_r^T <-- dH_r <-- dY B_r^T <--gather tokens-- dY_t
#
# An all-reduce is a reduce-scatter and an all-gather, so the bytes are the same. (Megatron-LM, arXiv:2205.05198, §4.2.2.)
#
# The other two divide tokens along an axis of their own, sp, with or without tp, and need transformers' attention interface:
#
#     all_to_all   queries, keys and values of all heads for own tokens --> of own heads for all tokens; torch's attention; its
#                  output back. 4 exchanges of (B, S/N, H), of which a rank keeps 1/N, and 4 more in backward. Where ranks outnumber
#                  heads of keys, these are sent several times. (Ulysses, arXiv:2309.14509, §3.)
#     ring         queries stay; keys and values go round, N - 1 times one place on, and what the own queries see of them is added
#                  up. No rank has all scores of a row, nor need N divide heads. Backward sends keys and values round again, and
#                  their gradients, in fp32 or more, N times. (Ring Attention, arXiv:2310.01889, §3.) Of causal attention later
#                  ranks have more to do: no zigzag.
#
# A mask stays whole on each rank, (B, 1, S, S); most causal models need none. Refused by name is what else in a block might mix
# tokens, or depend on weights beside hidden states, as cross attention does; a hook on a block sees own tokens.


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        # before: each rank has its own tokens.  after: all have all.  sends: (N-1)/N of the whole's bytes; what comes next waits.
        return axis.gather(x, 1)

    @staticmethod
    def backward(ctx, grad):
        # before: each rank has what its own columns say of all tokens' gradient.  after: the sum, for its own tokens.
        # sends: (N-1)/N of the whole's bytes; the backward of what came before waits.
        return ScatterTokens.apply(grad, ctx.axis), None


class ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        # before: each rank has a part of the sum, for all tokens.  after: the sum, for its own.
        # sends: (N-1)/N of the whole's bytes; what comes next waits.
        return axis.part_of_sum(x, 1)

    @staticmethod
    def backward(ctx, grad):
        # before: each rank has the gradient of its own tokens of the sum.  after: all have all.
        # sends: (N-1)/N of the whole's bytes; the backward of what came before waits.
        return GatherTokens.apply(grad, ctx.axis), None


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, cut, join):
        ctx.axis, ctx.back = axis, (join, cut)
        # before: each rank has all along dim `cut`, its own part along `join`.  after: the other way round.
        # sends: (N-1)/N of x's bytes; what comes next waits.
        return axis.exchange(x, cut, join)

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.axis, *ctx.back), None, None, None


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, (B, K, ., .) each, in fp32 or more, of whatever precision the factors are."""
    if a.is_cuda and a.element_size() == 2:
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])
    dtype = torch.promote_types(a.dtype, torch.float32)
    return a.to(dtype) @ b.to(dtype)


class Ring(torch.autograd.Function):
    """Attention of the own queries (B, K*G, R, D) to all keys (B, K, ., D) and values (B, K, ., E), of which each rank has those of
    its own R tokens: (B, K*G, R, E). G queries share a key.

    Softmax divides by a row's sum of exponentials, of which the log, lse, grows block by block, and `out` is corrected:

        new = log(e^lse + sum of e^scores);   out = out * e^(lse - new) + e^(scores - new) V;   lse = new

    Kept for backward are q, k, v, out and lse; a block's shares P = e^(scores - lse) are computed again:

        dV = P^T dOut;   dScores = P * (dOut V^T - delta), delta = sum of dOut * out;   dQ += dScores K;   dK = dScores^T Q
    """

    @staticmethod
    def forward(ctx, q, k, v, ring):
        axis, own, ctx.ring = ring.axis, torch.cat([k, v], -1), ring
        rows = ring.rows(q, k)
        out = torch.zeros(*rows.shape[:-1], v.shape[-1], dtype=ring.dtype, device=q.device)
        lse = torch.full_like(out[..., :1], -torch.inf)
        block = ring.pad(own)
        for turn in range(axis.world_size):
            source, last = (axis.rank - turn) % axis.world_size, turn == axis.world_size - 1
            # before: this rank has the keys and values of rank `source`.  after: those of the one before it.
            # sends: their bytes, N - 1 times, while it computes.
            passed = None if last else axis.pass_on(block)
            if ring.sees(source):
                keys, values = ring.unpad(block, source).split([k.shape[-1], v.shape[-1]], -1)
                scores = ring.scores(rows, keys, source)
                new = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
                shift = new.masked_fill(new == -torch.inf, 0.0)  # a row that has seen nothing yet
                shares = (scores - shift).exp_()
                shares = shares if ring.drop is None else shares * ring.drop(shares, source)
                out = out * (lse - shift).exp() + product(shares.to(v.dtype), values)
                lse = new
            block = block if last else axis.arrived(passed)
        ctx.save_for_backward(q, k, v, out, lse)
        return out.view(*q.shape[:-1], v.shape[-1]).to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("attention on a ring has no second derivative: use sp_mode all_to_all")
        (q, k, v, out, lse), ring = ctx.saved_tensors, ctx.ring
        axis, rows, block = ring.axis, ring.rows(q, k), ring.pad(torch.cat([k, v], -1))
        grad = grad.reshape(out.shape)
        delta = (grad * out).sum(-1, keepdim=True)
        shift = lse.masked_fill(lse == -torch.inf, 0.0)
        d_rows, d_passed = torch.zeros(rows.shape, dtype=ring.dtype, device=q.device), None
        for turn in range(axis.world_size):
            source, last = (axis.rank - turn) % axis.world_size, turn == axis.world_size - 1
            # before, after, sends: as in forward
            passed = None if last else axis.pass_on(block)
            found = torch.zeros(block.shape, dtype=ring.dtype, device=q.device)
            if ring.sees(source):
                keys, values = ring.unpad(block, source).split([k.shape[-1], v.shape[-1]], -1)
                shares = (ring.scores(rows, keys, source) - shift).exp_()
                d_shares, kept = product(grad, values.mT), None if ring.drop is None else ring.drop(shares, source)
                dropped = shares if kept is None else shares * kept
                d_shares = d_shares if kept is None else d_shares * kept
                d_scores = (shares * (d_shares - delta)).to(q.dtype)
                d_rows += product(d_scores, keys)
                real = keys.shape[-2]
                found[..., :real, : k.shape[-1]] = product(d_scores.mT, rows)
                found[..., :real, k.shape[-1] :] = product(dropped.to(v.dtype).mT, grad)
            found = found if d_passed is None else axis.arrived(d_passed) + found
            # before: this rank has the gradients that it and those before it found for rank `source`.  after: so has the next one,
            # which adds its own; in the end, rank `source`.  sends: their bytes in fp32 or more, N times.
            d_passed = axis.pass_on(found)
            block = block if last else axis.arrived(passed)
        d_k, d_v = ring.unpad(axis.arrived(d_passed), axis.rank).split([k.shape[-1], v.shape[-1]], -1)
        return (d_rows * ring.scale).view(q.shape).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None


class RingCall:
    """One attention on the ring: what its blocks have in common, in forward and backward."""

    def __init__(self, tokens: "OwnTokens", length: int, groups: int, mask: Tensor | None, causal: bool, scale: float,
                 dropout: float, q_dtype: torch.dtype):
        self.axis, self.groups, self.causal, self.scale = tokens.axis, groups, causal, scale
        self.mask = None if mask is None else mask.expand(-1, -1, length, length)
        self.length, self.per_rank = length, -(-length // tokens.axis.world_size)  # all tokens; a rank's with padding
        self.dtype = torch.promote_types(q_dtype, torch.float32)
        self.drop = None
        if dropout:  # the seed is drawn where dropout differs between ranks anyway, and checkpointing sets it back
            seed = int(torch.randint(2**62, (), device="cpu")) + tokens.axis.engine().tp.rank * 2**20
            self.drop = functools.partial(self._drop, seed, dropout)

    @staticmethod
    def _drop(seed: int, p: float, shares: Tensor, source: int) -> Tensor:
        """0 or 1 / (1 - p) for each score of a block, the same in backward."""
        generator = torch.Generator(shares.device).manual_seed(seed + source)
        return (torch.rand(shares.shape, generator=generator, device=shares.device) >= p) / (1 - p)

    def place(self, rank: int) -> slice:
        """The tokens that a rank has."""
        return slice(min(rank * self.per_rank, self.length), min((rank + 1) * self.per_rank, self.length))

    def pad(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 0, self.per_rank - x.shape[-2]))

    def unpad(self, x: Tensor, rank: int) -> Tensor:
        return x[..., : self.place(rank).stop - self.place(rank).start, :]

    def sees(self, source: int) -> bool:
        place = self.place(source)
        return place.stop > place.start and not (self.causal and source > self.axis.rank)

    def rows(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, K*G, R, D) -> (B, K, G*R, D), scaled: G queries of R tokens, one below the other, meet the same key."""
        return (q * self.scale).reshape(*k.shape[:2], self.groups * q.shape[2], q.shape[-1])

    def scores(self, rows: Tensor, keys: Tensor, source: int) -> Tensor:
        """(B, K, G*R, R') of the own queries and R' keys of another rank; -inf where the mask says so."""
        scores = product(rows, keys.mT)
        here, there = self.place(self.axis.rank), self.place(source)
        by_group = scores.unflatten(2, (self.groups, here.stop - here.start))
        if self.causal and source == self.axis.rank:
            later = torch.ones(by_group.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            by_group = by_group.masked_fill(later, -torch.inf)
        if self.mask is not None:
            mask = self.mask[:, :, here, there]
            mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, by_group.shape[1:3])
            by_group = by_group.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else by_group + mask
        return by_group.reshape(scores.shape)


class Tokens:
    """The tokens of a forward, divided between the ranks of an axis; behind them may be padding, which attention never sees."""

    def __init__(self, axis: Axis):
        self.axis, self.length = axis, 0  # of the whole sequence
        self.lengths: set[int] = set()  # of forwards whose backward is still to come, for activation checkpointing
        self.proven = False  # has a forward come to its end?
        self.inside = False  # between the first and the last of the own blocks
        self.in_block, self.last = False, -1  # in one of them; the number of the last that was called
        self.gathered = False  # split_gather, in a block: in attention or MLP, which read all tokens
        self.attended = True  # all_to_all, ring: has the block called `attend`?
        self.generators = {torch.default_generator, default_generator(axis.device)}
        self._saved: list | None = None  # states of the generators outside of a block

    def __deepcopy__(self, memo):
        return self  # a copy of the model is divided in the same way

    def come_to(self, index: int) -> None:
        """Forward comes to a block. Tokens are divided before the first and whole again behind the last."""
        if not self.computing_again():
            if index != self.last + 1:
                raise RuntimeError(f"forward comes to block {index} where block {self.last + 1} was to follow; tokens are divided "
                                   "from the first block to the last (no layerdrop, no block used twice): use sp_mode=None")
            self.last = index

    def computing_again(self) -> bool:
        """Is this checkpointing's second forward?"""
        return (engine := self.axis.engine()) is not None and engine._in_backward

    def begin(self, whole: Tensor) -> None:
        """A forward comes to the first block with hidden states (B, S, H)."""
        if whole.ndim != 3:
            raise RuntimeError(f"hidden states of shape {tuple(whole.shape)} have no dim of tokens behind one of rows: "
                               "use sp_mode=None")
        self.length = whole.shape[1]
        if torch.is_grad_enabled():
            self.lengths.add(self.length)

    def now(self) -> int:
        """The length of this forward, or of the one that is computed again."""
        if not self.computing_again():
            return self.length
        if len(self.lengths) > 1:
            raise RuntimeError("activation checkpointing with divided tokens needs backward after each forward, or forwards of one "
                               f"length; since the last one there were lengths {sorted(self.lengths)}")
        return next(iter(self.lengths), self.length)

    def enter_block(self, training: bool) -> None:
        """In a block dropout must differ between ranks, whose tokens do. The seed is drawn in step, from numbers that checkpointing
        sets back."""
        self.inside, self.in_block, self.gathered = not self.computing_again(), True, False
        if training and self._saved is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
            self._saved = [(generator, generator.get_state()) for generator in self.generators]
            for generator in self.generators:
                generator.manual_seed(seed + self.axis.rank)

    def beside(self, block: nn.Module, args: tuple, kwargs: dict, first: str | None) -> tuple[tuple, dict]:
        """What a block is given beside hidden states."""
        return args, kwargs

    def leave_block(self) -> None:
        self.in_block = self.gathered = False
        for generator, state in self._saved or ():
            generator.set_state(state)
        self._saved = None

    def leave_blocks(self) -> None:
        self.leave_block()
        self.inside, self.last = False, -1

    def explain(self, model: nn.Module, error: BaseException) -> None:
        """Forward has ended with an error. If it is the first one, the model may not fit: RuntimeError that says so, too."""
        if isinstance(error, StageEnd):
            self.proven = True
        elif isinstance(error, (torch.OutOfMemoryError, dist.DistError)) or re.search("use (tp=1|sp_mode)|gloo|NCCL", str(error)):
            return
        elif not self.proven and isinstance(error, (RuntimeError, IndexError)):
            raise RuntimeError(f"{type(model).__name__}'s first forward with divided tokens failed: {error}. If it works without "
                               "them, its blocks do with shapes what tokens do not allow: use sp_mode=None") from error

    def padded(self, x: Tensor, dim: int = 1) -> Tensor:
        """With the last token once more, as often as needed: zeros are nothing that every norm can divide by."""
        more = -self.now() % self.axis.world_size
        return torch.cat([x, *[x.narrow(dim, -1, 1).detach()] * more], dim) if more else x

    def part(self, x: Tensor) -> Tensor:
        """(B, S, H), whole on all ranks -> the own tokens (B, ceil(S/N), H)."""
        return split(self.padded(x), self.axis, 1)

    def whole(self, x: Tensor) -> Tensor:
        """The own tokens -> all of them, on all ranks, which go on alike."""
        return gather(x, self.axis, 1)[:, : self.length].contiguous()


class SplitGather(Tokens):
    """Tokens that the ranks of a tp axis divide where they do not divide heads or hidden units."""

    def by_rows(self, x: Tensor, length: int) -> Tensor:
        """(B, length, K), also of what a model has flattened to (B * length, K), as OPT does before its MLP."""
        return x if x.ndim == 3 else x.view(-1, length, x.shape[-1])

    @torch.compiler.disable
    def gather(self, x: Tensor) -> Tensor:
        """The own tokens -> all of them, for what each rank does with its own heads or hidden units."""
        whole = GatherTokens.apply(self.by_rows(x, -(-self.now() // self.axis.world_size)), self.axis)[:, : self.now()].contiguous()
        return whole if x.ndim == 3 else whole.flatten(0, 1)

    @torch.compiler.disable
    def scatter(self, y: Tensor) -> Tensor:
        """Products of the own rows, for all tokens -> their sum over the ranks, for the own tokens."""
        self.gathered = False
        own = ScatterTokens.apply(self.padded(self.by_rows(y, self.now())), self.axis)
        return own if y.ndim == 3 else own.flatten(0, 1)

    @torch.compiler.disable
    def before_gathering(self, module: nn.Module, args: tuple, kwargs: dict):
        """Forward pre-hook of what has column linears, attention or MLP: it reads all tokens."""
        self.gathered = True
        if args:
            return (self.gather(args[0]), *args[1:]), kwargs
        first = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, kwargs | {first: self.gather(kwargs[first])}


class OwnTokens(Tokens):
    """Tokens along the sp axis: attention alone sees other ranks'."""

    def __init__(self, axis: Axis, mode: str):
        super().__init__(axis)
        self.mode = mode

    def install(self, model: nn.Module, blocks: str, changes: list) -> None:
        """Let the attention of the blocks go through `attend`; masks stay whole, as for torch's attention."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        ALL_ATTENTION_FUNCTIONS.register("own_tokens", attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register("own_tokens", sdpa_mask)
        for module in model.get_submodule(blocks).modules():
            mark(changes, module, _own_tokens=self)
            if hasattr(config := getattr(module, "config", None), "_attn_implementation"):
                config._attn_implementation = "own_tokens"

    def beside(self, block: nn.Module, args: tuple, kwargs: dict, first: str | None) -> tuple[tuple, dict]:
        """Positions of the own tokens; masks are for all of them. RuntimeError for what else has tokens."""
        self.attended = False
        names = [*inspect.signature(block.forward).parameters] + [""] * len(args)
        args = args[:1] + tuple(self._own(name, x, block) for name, x in zip(names[1:], args[1:]))
        return args, {key: x if key == first else self._own(key, x, block) for key, x in kwargs.items()}

    def _own(self, name: str, x, block: nn.Module):
        if isinstance(x, Mapping):
            return {key: self._own(name, y, block) for key, y in x.items()}
        if type(x) in (tuple, list):
            return type(x)(self._own(name, y, block) for y in x)
        if not isinstance(x, Tensor) or x.ndim == 0 or "mask" in name and "encoder" not in name:
            return x
        # Rotations, as cosines (B, S, D), or numbers, as position_ids (B, S).
        dim = -2 if (x.is_floating_point() or x.is_complex()) and x.ndim > 1 else -1
        if name.startswith(("position_ids", "position_embeddings", "cache_position")) and x.shape[dim] == self.length:
            return self.axis.part(self.padded(x, dim), dim)
        if "encoder" in name or self.length in x.shape:
            raise RuntimeError(f"{own_name(block)} is given {name or 'a tensor'} of shape {tuple(x.shape)}, of which it is not "
                               "known how its tokens are to be divided: use sp_mode split_gather or None")
        return x

    def check(self, module: nn.Module, own: "set[nn.Parameter]", name) -> None:
        """A module's forward begins: weights of the blocks meet own tokens, others all tokens, or their gradients are not whole."""
        if torch.is_grad_enabled() and not self.computing_again():
            for p in module._parameters.values():
                if p is not None and p.requires_grad and (not self.in_block if p in own else self.inside):
                    where, seen = ("outside of", "all") if p in own else ("between", "its own")
                    raise RuntimeError(f"{name(module)} is run {where} the blocks, where a rank has {seen} tokens, other than its "
                                       "place in the model says (layerdrop?): use sp_mode=None")

    @torch.compiler.disable
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None, causal: bool
               ) -> Tensor:
        """Own tokens' queries (B, H, s, D), keys (B, K, s, D) and values (B, K, s, E) -> (B, s, H, E); mask (B, 1 or H, S, S)."""
        self.attended, n, length = True, self.axis.world_size, self.now()
        if mask is not None and mask.requires_grad and self.mode == "ring":
            raise RuntimeError("a mask that depends on weights has no gradient on a ring: use sp_mode all_to_all")
        if len({x.shape[2] for x in (q, k, v)} | {-(-length // n)}) > 1:
            raise RuntimeError(f"attention of {q.shape[2]} queries to {k.shape[2]} keys, where this rank has {-(-length // n)} of "
                               f"{length} tokens: use sp_mode split_gather or None")
        causal, groups = causal and mask is None, q.shape[1] // k.shape[1]
        if self.mode == "ring":
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            ring = RingCall(self, length, groups, mask, causal, scale, dropout, q.dtype)
            out = Ring.apply(*(ring.unpad(x, self.axis.rank) for x in (q, k, v)), ring)
            return ring.pad(out).transpose(1, 2).contiguous()
        # Fewer heads of keys and values than ranks, or not equally many for each: each of them several times. Of 4 heads and 1 of
        # keys, groups is 4; between 2 ranks the one is sent twice, and the 2 queries there share it.
        times = next(t for t in range(1, groups + 1) if groups % t == 0 and k.shape[1] * t % n == 0)
        k, v = (x.repeat_interleave(times, 1) if times > 1 else x for x in (k, v))
        q, k, v = (Exchange.apply(x, self.axis, 1, 2)[:, :, :length] for x in (q, k, v))
        mask = mask if mask is None or mask.shape[1] == 1 else self.axis.part(mask, 1)
        k, v = (x.repeat_interleave(groups // times, 1) if groups > times else x for x in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal and length > 1, scale=scale)
        return Exchange.apply(self.padded(out, 2).transpose(1, 2), self.axis, 1, 2)


def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **options):
    """An attention function of transformers'. Outside of the blocks it is torch's."""
    own = module.__dict__.get("_own_tokens")
    if own is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **options)
    if given := [name for name, value in options.items() if value is not None and name not in HARMLESS]:
        raise RuntimeError(f"attention with {', '.join(given)} is not supported by {own.mode}: use sp_mode split_gather or None")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return own.attend(query, key, value, attention_mask, dropout, scaling, causal), None


# What transformers hands to attention and what torch's attention does not read either: masks already say it.
HARMLESS = {"sliding_window", "position_ids", "cache_position", "use_cache", "cache", "past_key_values", "output_attentions",
            "output_hidden_states", "return_dict", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
            "num_items_in_batch", "deterministic", "layer_idx"}


def check_mixing(model: nn.Module, blocks: str) -> None:
    """ValueError for what in blocks is known to look at several tokens, or to treat a sample's tokens alike."""
    for name, module in model.get_submodule(blocks).named_modules():
        if isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm)):
            raise ValueError(f"{blocks}.{name} is a {type(module).__name__}, whose statistics are of several tokens: "
                             "use sp_mode=None")
    if getattr(getattr(model, "config", None), "drop_path_rate", None):
        raise ValueError("drop_path_rate drops whole samples, of which a rank has some tokens: use drop_path_rate=0 or "
                         "sp_mode=None")


def check_own_tokens(model: nn.Module, blocks: str, mode: str) -> set[nn.Parameter]:
    """Parameters of the blocks, which see the own tokens alone. Raises ValueError for what cannot divide them."""
    other = "use sp_mode split_gather (with tp) or None"
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{type(model).__name__}'s attention does not go through transformers' attention interface, which {mode} "
                         f"needs: {other}")
    inside, outside = set(), set()
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            (inside if name.startswith(f"{blocks}.") else outside).add(p)
            if p in inside and p.ndim > 1 and not isinstance(module, nn.Linear) and "Conv1D" not in type(module).__name__:
                raise ValueError(f"{name}.{key} is in a block and is no linear's, so its module may be one that mixes tokens, of "
                                 f"which a rank has its own: {other}")
    if both := [name for name, p in model.named_parameters() if p in inside and p in outside]:
        raise ValueError(f"{both[0]} is used in the blocks, for own tokens, and elsewhere, for all of them: {other}")
    return inside


# ---- the engine ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bucket:
    """Parameters whose gradients and weights travel together along dp: local tensors (what tp has left this rank), all of one dtype
    and one kind. Full tensors are (N*S,), slices (S,), N the dp ranks; rank r's is [r*S, (r+1)*S)."""

    weights: Tensor
    starts: dict[int, int]  # where a parameter begins
    views: dict[int, Tensor]  # its place, which is its .data
    own: slice
    master: Tensor  # (S,); the own slice of `weights` itself where that is precise enough
    grads: Tensor  # (N*S,) gradients of this rank
    sums: "list[Axis]"  # groups of ranks that have the same parameters and find parts of their gradients
    counted: bool  # is this rank the one that counts them in the norm?
    owned: "list[tuple[Fragment, int]]" = dataclasses.field(default_factory=list)  # the optimizer's part; place in the slice
    missing: int = 0  # gradients of this backward that have not arrived yet
    launched: bool = False  # in this backward
    summing: "SliceSum | None" = None  # the reduce-scatter in flight
    gathering: "SliceGather | None" = None  # the gather in flight
    classes: dict[int, type] = dataclasses.field(default_factory=dict)  # while gathering: the parameters' own classes, by index
    stand_ins: dict[type, type] = dataclasses.field(default_factory=dict)  # own class -> its subclass of Pending, made once

    shard = property(lambda self: self.grads[self.own], doc="(S,) gradient of the own slice, once summed")


class Hybrid:
    """Training of `model` with Adam on a mesh of tp * sp * pp ranks for each copy of it, and as many copies as there are ranks for.

    params: None for all parameters, or param groups as any torch optimizer takes them. precision: "fp32" leaves the model as it
    is, "bf16" and "fp16" cast it and keep fp32 masters, fp16 with a dynamic loss scale. max_norm: clip to this global L2
    norm, 0 for off. tp: ranks that share a stage's matrices. pp: ranks that share a copy's blocks. schedule: "1f1b", one stage a
    rank, or "interleaved", `chunks` of them. sp: ranks that share a sample's tokens; sp_mode: how, "all_to_all", for which sp must
    divide a tp rank's heads, or "ring"; or "split_gather": tp ranks divide tokens where they do not divide heads or hidden units.
    zero_stage: 1, the optimizer is divided between copies, or 0, each has all. plan: module names (* for a number) -> styles; None
    for the one in PLANS or the one that the model declares.
    bucket_mb: capacity of the buckets in MiB of weights. overlap_gather: False makes `step` wait for the gathered weights.
    device: where a model that was built on `meta` shall live; by default the current GPU, else the CPU; weights come from `load`.
    compile: torch.compile each block (`blocks_of`) after the first step; forward then waits for all weights before it begins.
    initial_scale, growth_interval, min_scale, max_scale: of fp16's loss scale, see LossScale.
    Parameters, buffers and, along tp and sp, random numbers are those of the first rank, so models may be built with different
    seeds; who seeds later does so alike on the ranks of a copy.
    axes: the mesh by name, each with its rank and world_size; dp, pp, sp and tp are members, too.
    Raises ValueError where ranks bring different models, for sizes that do not divide, or an argument that is wrong.
    """

    def __init__(self, model: nn.Module, params=None, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                 adamw=True, precision="bf16", max_norm=0.0, initial_scale=2.0**16, growth_interval=2000, min_scale=1.0,
                 max_scale=2.0**24, tp=1, pp=1, sp=1, sp_mode=None, schedule="1f1b", chunks=2, zero_stage=1, plan=None,
                 bucket_mb=25.0, overlap_gather=True, compile=False, device=None):
        if precision not in HALF:
            raise ValueError(f"precision must be one of {', '.join(HALF)}, got {precision!r}")
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, got {growth_interval}")
        if not 0 < bucket_mb < 2**20:
            raise ValueError(f"bucket_mb must be positive, got {bucket_mb}")
        if zero_stage not in (0, 1):
            raise ValueError(f"zero_stage must be 0 or 1, got {zero_stage!r}")
        for name, size in (("tp", tp), ("pp", pp), ("sp", sp)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a number of ranks, 1 or more, got {size!r}")
        if sp_mode not in (None, "split_gather", "all_to_all", "ring"):
            raise ValueError(f"sp_mode must be None, split_gather, all_to_all or ring, got {sp_mode!r}")
        if sp_mode == "split_gather" and (tp == 1 or sp > 1):
            raise ValueError("sp_mode split_gather divides tokens between tp ranks: it needs tp=2 or more, and sp=1")
        if (sp > 1) != (sp_mode in ("all_to_all", "ring")):
            raise ValueError(f"sp={sp} with sp_mode {sp_mode}: all_to_all and ring need sp=2 or more, and sp one of them")
        if schedule not in ("1f1b", "interleaved"):
            raise ValueError(f"schedule must be 1f1b or interleaved, got {schedule!r}")
        if not isinstance(chunks, int) or chunks < 2:
            raise ValueError(f"chunks must be a number of stages on each rank, 2 or more, got {chunks!r}")
        if schedule == "interleaved" and pp == 1:
            raise ValueError("schedule interleaved needs a pipeline: pp=2 or more")
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        if self.world_size % (tp * pp * sp):
            raise ValueError(f"{self.world_size} ranks cannot be arranged as dp x pp={pp} x sp={sp} x tp={tp}")
        let_go = ENGINES.get(model, lambda: None)()  # of the engine that has the model so far, whose parameters may be divided
        self._blank = any(p.is_meta for p in model.parameters())  # True until weights are loaded
        if self._blank:
            leave_meta(model, device)
        self._blank = self._blank or let_go is not None and let_go.__self__._blank
        devices = {t.device for t in (*model.parameters(), *model.buffers())}
        if len(devices) != 1:
            raise ValueError(f"the model must live on one device, found {sorted(map(str, devices)) or 'no parameters'}")
        self._model, self.device = model, devices.pop()
        if device is not None and torch.device(device).type != self.device.type:
            raise ValueError(f"device={device} is for a model built on meta; this one is on {self.device}: move it before")
        self.group = None  # all ranks: what checkpoints and whole tensors go through
        for name, p in model.named_parameters():
            if p.is_complex():
                raise ValueError(f"complex parameters are not supported: {name} is {p.dtype}")
        self.half, self.overlap_gather = HALF[precision], overlap_gather
        self.bucket_bytes, self.buckets = bucket_mb * 2**20, []
        self.traffic: dict[str, int] = {}  # bytes that this rank sent in the last step, by axis and collective
        self._sent_bytes: dict[str, int] = {}  # the same, of the step that is under way
        if plan is not None:
            names = {form for name, _ in model.named_modules() for form in (name, generic(name))}
            if strays := sorted(plan.keys() - names):
                raise ValueError(f"the plan names {', '.join(strays[:5])}, which {type(model).__name__} does not have")
        plan = plan_of(model) if plan is None else dict(plan)
        if tp * pp * sp > 1 and not plan:
            raise ValueError(f"{type(model).__name__} has no plan, so tp, pp and sp must be 1; there are plans for "
                             f"{', '.join(PLANS)} and for the models of transformers whose config declares one, or give "
                             "plan={name: style}")
        blocks = block_list(model, plan)[0] if pp > 1 or sp_mode else ""
        self._own_tokens = check_own_tokens(model, blocks, sp_mode) if sp > 1 else set()
        if sp_mode:
            check_mixing(model, blocks)
        if tp * pp * sp > 1:
            check_plan(model, plan, tp, sp if sp_mode == "all_to_all" else 1)
        if pp > 1:
            if names := [n for n, _ in model.named_buffers() if n.rpartition(".")[2].startswith("running_")]:
                raise ValueError(f"running statistics are not supported with pp > 1: {', '.join(names[:3])}")

        self.scaler = LossScale(self.device, initial_scale if precision == "fp16" else 1.0, precision == "fp16",
                                growth_interval, min_scale, max_scale)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adamw=adamw)
        self.optimizer = Adam(self, params, defaults, max_norm, self.scaler)
        self.params, self.names = self.optimizer.params, self.optimizer.names  # what is trained, in the model's order
        self._index = {p: i for i, p in enumerate(self.params)}
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self.axes = make_mesh(self, dict(dp=self.world_size // (tp * pp * sp), pp=pp, sp=sp, tp=tp))
        self.world = Axis(self, "world", [[*range(self.world_size)]])
        self.dp, self.pp, self.sp, self.tp = self.axes.values()
        self._slices = self.dp if zero_stage else Axis(self, "dp")  # between whom buckets are cut into slices
        self._check_same_model((precision, max_norm, adamw, initial_scale, growth_interval, min_scale, max_scale, tp, pp, sp,
                                sp_mode, schedule, chunks, zero_stage, bucket_mb, sorted(plan.items()), self._blank,
                                bool(self.optimizer.cuda)))
        shape_of = lambda p: tuple(p.shape) if let_go is None else let_go.__self__.layout(p).shape
        gathering = blocks if sp_mode == "split_gather" else ""
        layouts = plan_layouts(model, plan, tp, self.tp.rank, shape_of, gathering) if tp > 1 else None
        # From here on nothing is refused.
        ENGINES.pop(model, None)
        if let_go is not None:
            let_go()
        # before: every rank has its own initial values.  after: all have those of rank 0.
        # sends: each tensor once, at construction only (not in `traffic`); everybody waits.
        for t in (*(() if self._blank else model.parameters()), *model.buffers()):
            self._broadcast(t.data)
        self._plain_dtypes = {name: t.dtype for name, t in model.state_dict().items() if isinstance(t, Tensor)}
        self.changes: list[tuple] = []  # (module, attribute, what it was): made to the model, and taken back by `_let_go`
        self.layouts, self._tensor_parallel, self.pipeline = {}, None, None
        self._absent, self._shared = set(), {}
        tokens_hooks, stages, tokens = [], None, None
        if sp_mode:
            tokens = SplitGather(self.tp) if gathering else OwnTokens(self.sp, sp_mode)
        if pp > 1 or sp_mode:
            stages = Pipeline(self.pp, model, plan, chunks if schedule == "interleaved" else 1, self.changes)
            stages.tokens = tokens
        if pp > 1:
            self.pipeline, self._absent, self._shared = stages, stages.absent, stages.shared
        self._tokens = tokens
        self._chunks = self.pipeline.chunks if self.pipeline else 1
        if tp > 1:
            self.layouts = layouts[2]
            self._tensor_parallel = divide(model, *layouts, self.tp, self._absent, gathering, self.changes)
            if gathering:
                self._tensor_parallel.tokens = tokens
                tokens_hooks = [model.get_submodule(name).register_forward_pre_hook(tokens.before_gathering, with_kwargs=True)
                                for name in gathering_modules(layouts[1], blocks)]
        if pp > 1 or sp > 1 or compile:
            own_configs(model, self.changes)
        if sp > 1:
            tokens.install(model, blocks, self.changes)
        self._same_random_numbers()
        if self._blank:
            for _, p in self._frozen:
                p.data = p.data if p in self._absent else p.data.clone(memory_format=torch.contiguous_format)
        fuse_norms(model, self.changes)
        # Who else has a parameter: by size, neighbours on the tp axis; by coordinates on the pp axis, the stages that use it.
        self._holders = {1: Axis(self, "tp"), tp: self.tp}
        for size in sorted({layout.holders for layout in self.layouts.values()} - self._holders.keys()):
            self._holders[size] = Axis(self, "tp", [[*range(first, first + size)] for first in range(0, self.world_size, size)])
        self._sharing = {stages: Axis(self, "pp", [[ranks[stage] for stage in stages] for ranks in self.pp.lists])
                         for stages in sorted(set(self._shared.values()))}
        hooks = self._cast_model() + tokens_hooks
        self._lay_out_buckets()
        self._lay_out_running_statistics()
        self._sync = True  # False inside no_sync
        self._in_backward = False
        self._arrived = [False] * len(self.params)  # in this backward
        self._launched = 0  # buckets of this backward whose reduce-scatter has been issued
        self._in_flight: list[Bucket] = []
        self._reduced = False  # the slices hold sums over the ranks
        me = weakref.ref(self)  # the garbage collector does not see through hooks of tensors: a plain reference would stay for ever

        def on_grad(index, param):
            if (engine := me()) is not None:
                engine._on_grad(index, param)

        hooks += [p.register_post_accumulate_grad_hook(functools.partial(on_grad, i)) for i, p in enumerate(self.params)]
        # Compiled code reads weights without asking: once torch.compile has been seen at work, forward waits for all.
        self._asks_nobody = compile or any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
        self._to_compile = blocks_of(model) or [model] if compile else []
        self._module_hooks = [m.register_forward_pre_hook(lambda m, _: self._before_module(m))
                              for m in model.modules() if m._parameters]
        hooks += self._module_hooks
        before = torch.compiler.disable(lambda module, args, kwargs: self._before_model(kwargs))
        hooks.append(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._hooks = hooks
        ENGINES[model] = weakref.WeakMethod(self._let_go)
        self.zero_grad()  # gradients from before belong to nobody
        self._sent_bytes = {}  # what construction sent is no step's

    # ---- 0. before training: who holds what --------------------------------------------------------------------------

    def _same_random_numbers(self) -> None:
        """Dropout of what ranks along tp and sp have whole must drop the same: they go on with the first one's random numbers."""
        for axis in (axis for axis in (self.tp, self.sp) if axis.world_size > 1):
            for generator in dict.fromkeys([torch.default_generator, default_generator(self.device)]):
                state = generator.get_state().to(self.device)
                # before: each rank's own state.  after: that of the group's first.  sends: some KB, once; all wait.
                dist.broadcast(state, group=axis.group, group_src=0)
                generator.set_state(state.cpu())

    def layout(self, p: nn.Parameter) -> Layout:
        """Which part of it this rank's tensor is."""
        return self.layouts.get(p) or whole_layout(p.shape, self.tp.world_size)

    def _cast_model(self) -> list:
        """Decide the dtype that each trained parameter will have in its bucket; cast what has none, frozen parameters and
        buffers, now. Returns the hooks around modules with running statistics, which stay in fp32 with all inside them."""
        self._dtypes, hooks, in_fp32 = [p.dtype for p in self.params], [], set()
        for module in self._model.modules() if self.half else ():
            if any(name.startswith("running_") for name, b in module.named_buffers(recurse=False) if b.is_floating_point()):
                hooks += [module.register_forward_pre_hook(to_fp32, with_kwargs=True), module.register_forward_hook(back_to_given)]
                in_fp32.update(module.modules())
        for module in self._model.modules() if self.half else ():
            if module in in_fp32:
                continue
            for p in module.parameters(recurse=False):
                if p.is_floating_point() and p in self._index:
                    self._dtypes[self._index[p]] = self.half
                if p in self._absent and p.is_floating_point():
                    p.data = blank(p, self.half).expand(p.shape)
                elif p.is_floating_point() and p not in self._index:
                    p.data = p.data.to(self.half)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                    buffer.data = buffer.data.to(self.half)
        return hooks

    def _lay_out_buckets(self) -> None:
        """Cut the parameters, from the last to the first as backward meets them, into buckets of one dtype and one kind each, move
        the weights there, and take the own slices' masters from the weights as they were before the cast."""
        open_, closed, size_bytes = {}, [], {}
        for i in reversed(range(len(self.params))):
            if self.params[i] in self._absent:
                continue
            layout, dtype = self.layout(self.params[i]), self._dtypes[i]
            key = (dtype, layout.holders, layout.partial, self._shared.get(self.params[i], ()), self.params[i] in self._own_tokens)
            p_bytes = aligned(self.params[i].numel()) * dtype.itemsize
            if open_.get(key) and size_bytes[key] + p_bytes > self.bucket_bytes:
                closed.append((key, open_.pop(key)))
            if key not in open_:
                size_bytes[key] = 0
            open_.setdefault(key, []).append(i)
            size_bytes[key] += p_bytes
        self._bucket_of: list[int | None] = [None] * len(self.params)  # None: another stage has the parameter
        self.fragments: list[Fragment] = []
        lists = sorted(closed + list(open_.items()), key=lambda entry: -max(entry[1]))
        for (_, *kind), indices in lists:
            self.buckets.append(self._make_bucket(indices, *kind, part=len(lists) - 1 - len(self.buckets)))
        self._received = {}  # under gloo: room for what the others send of a bucket (SliceSum), one for each dtype
        for b in self.buckets:
            if self._slices.by_hand:
                numel = b.master.numel() * (self._slices.world_size - 1)
                if numel > len(self._received.get(b.weights.dtype, ())):
                    self._received[b.weights.dtype] = torch.zeros(numel, dtype=b.weights.dtype, device="cpu")
        self.optimizer.own(self.fragments)
        adam = self.optimizer
        self._counted_pieces = {key: p for key, p in adam.pieces.items() if self._bucket_of_part(key[0]).counted}
        if adam.cuda:
            rows = [f for f in self.fragments if f.master.dtype == torch.float32]
            counted = torch.tensor([self._bucket_of_part(f.part).counted for f in rows], dtype=torch.bool, device=self.device)
            self._counted_blocks = adam.chunks[counted[adam.chunks[:, 0].long()]] if len(adam.chunks) else adam.chunks

    def _bucket_of_part(self, part: int) -> Bucket:
        """Parts count from what forward reads first, buckets from what backward meets first."""
        return self.buckets[len(self.buckets) - 1 - part]

    def _make_bucket(self, indices: list[int], holders: int, partial: bool, stages: tuple, own_tokens: bool, part: int) -> Bucket:
        starts, numel = {}, 0
        for i in indices:
            starts[i] = numel
            numel += aligned(self.params[i].numel())
            self._bucket_of[i] = len(self.buckets)
        n, dtype = self._slices.world_size, self._dtypes[indices[0]]
        slice_numel = aligned(-(-numel // n))
        own = slice(self._slices.rank * slice_numel, (self._slices.rank + 1) * slice_numel)
        weights = torch.zeros(n * slice_numel, dtype=dtype, device=self.device)
        views = {i: weights[start : start + self.params[i].numel()].view(self.params[i].shape) for i, start in starts.items()}
        master_dtype = torch.float32 if dtype == self.half else dtype
        needs_master = master_dtype != dtype
        master = torch.zeros(slice_numel, dtype=master_dtype, device=self.device) if needs_master else weights[own]
        sums = [axis for axis, needed in (
            (self._holders[holders], partial), (self._sharing.get(stages), stages), (self.sp, own_tokens)) if needed]
        counted = (self.tp.rank % holders == 0 and self.sp.rank == 0 and (self._slices is self.dp or self.dp.rank == 0)
                   and (not stages or self.pp.rank == stages[0]))
        bucket = Bucket(weights, starts, views, own, master, torch.zeros_like(weights), sums, counted)
        moments = [torch.zeros_like(master) for _ in range(2)]
        for i, start in starts.items():
            p, layout = self.params[i], self.layout(self.params[i])
            end = start + layout.numel  # behind it may be rows that pad the vocabulary
            lo, hi = max(start, own.start), min(end, own.stop)  # the part of it that is in the own slice
            if layout.numel == 0:
                lo = hi = own.start  # a parameter without elements is everybody's
            if lo < hi or layout.numel == 0:
                at, first = slice(lo - own.start, hi - own.start), max(lo - start, 0) if layout.numel else 0
                f = Fragment(self.names[i], i, layout.shape, layout.boxes, first, first + hi - lo, master[at], bucket.shard[at],
                             weights[own][at] if needs_master else None, moments[0][at], moments[1][at], part)
                if needs_master:
                    f.master.copy_(p.data.reshape(-1)[f.start : f.end])
                bucket.owned.append((f, at.start))
                self.fragments.append(f)
            views[i].copy_(p.data)
            p.data = views[i]
        return bucket

    def _let_go(self) -> None:
        """Another engine takes the model over: give it whole weights as precise as the masters. Collectives."""
        for hook in self._hooks:
            hook.remove()
        if self._tensor_parallel is not None:
            self._tensor_parallel.leave()
        self.wait_for_weights()
        fragments = self.fragments + [f for f in self.kept() if f.index == FROZEN]
        dtypes = {name: dtype for theirs in together(self, lambda: [(f.name, f.master.dtype) for f in fragments])
                  for name, dtype in theirs}
        param_of = dict(self._model.named_parameters())
        for name, full in gather_full(self, fragments, "master"):
            full = torch.empty(self.layout(param_of[name]).shape, dtype=dtypes[name], device="cpu") if full is None else full
            # before: rank 0 has it whole.  after: all have it.  sends: the whole of it, once; all wait.
            set_data(param_of[name], self._broadcast(full.to(self.device)))
        for name, t in self._model.state_dict(keep_vars=True).items():
            if isinstance(t, Tensor) and t not in self._index and t.dtype != self._plain_dtypes.get(name, t.dtype):
                t.data = t.data.to(self._plain_dtypes[name])
        for thing, key, before in reversed(self.changes):
            setattr(thing, key, before) if before is not MISSING else object.__delattr__(thing, key)

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
                    + [options_of(group) for group in self.optimizer.param_groups]) + repr(settings)
        digest = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
        ends = torch.tensor([digest, -digest], device=self.device)
        # before: each rank's hash h and -h.  after: [max h, -min h] everywhere.  sends: 2(N-1)/N * 16 bytes, once; all wait.
        self.world.all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends[0] != -ends[1]:
            raise ValueError("the ranks bring different models (names, shapes, dtypes), param groups or settings; "
                             f"rank {self.rank} has {len(self.names)} trained parameters and {settings}")

    # ---- 1. forward: a weight is waited for when it is read ----------------------------------------------------------

    def __call__(self, *args, **kwargs):
        """Forward. With a pipeline under no_grad alone, on all its ranks with the same input: each gets the last stage's output."""
        if self.pipeline is None:
            return self._forward(*args, **kwargs)
        if torch.is_grad_enabled():
            raise RuntimeError("with a pipeline forward and backward of a batch go together: call engine.forward_backward(batch), "
                               "or engine(...) under torch.no_grad()")
        self._refuse(kwargs)  # on all ranks alike, before one waits for another
        self.pipeline.calls += 1
        try:
            for stage in self.pipeline.own:
                output = self._forward_stage(stage, 0, self._shapes((args, kwargs)), lambda: self._forward(*args, **kwargs))[1]
            self.pipeline.finish()
        except BaseException:
            self.pipeline.forget()
            raise
        return self.pipeline.to_all(output)

    def _shapes(self, batch) -> tuple:
        """Of its tensors, and what else decides what is sent between stages."""
        return tuple(tuple(t.shape) for t in tensors_in(batch)), torch.is_grad_enabled(), self._model.training

    def _forward_stage(self, stage: int, k: int, shapes: tuple, run) -> tuple[Tensor | None, Tensor]:
        """What came from the stage before, and what `run` makes of it, which the next stage is sent."""
        line = self.pipeline
        received = line.receive_hidden(stage, k, shapes) if stage else None
        with self._own_random_numbers(stage):
            output = line.forward(stage, received, run)
        if stage < line.stages - 1:
            line.send_hidden(output, stage, k, shapes)
        return received, output

    @contextlib.contextmanager
    def _own_random_numbers(self, stage: int):
        """Stages drop independently. The seed is drawn from the CPU's generator, and outside of stages ranks stay in step."""
        if not self._model.training:
            yield
            return
        seed, generators = int(torch.randint(2**62, (), device="cpu")), {torch.default_generator, default_generator(self.device)}
        saved = [(generator, generator.get_state()) for generator in generators]
        for generator in generators:
            generator.manual_seed(seed + stage * self.tp.world_size)
        try:
            yield
        finally:
            for generator, state in saved:
                generator.set_state(state)

    def _forward(self, *args, **kwargs):
        try:
            output = self._model(*cast(args, self.half), **cast(kwargs, self.half))
        except BaseException as error:
            self._leave_divided()
            if self._tokens:
                self._tokens.explain(self._model, error)
            raise
        if self._tokens and self._tokens.inside:
            raise RuntimeError(f"forward has ended after block {self._tokens.last}, where tokens are still divided (layerdrop?): "
                               "use sp_mode=None")
        if self._tokens:
            self._tokens.proven = True
        return output

    def _leave_divided(self) -> None:
        """Random numbers of what is divided end; those of heads and hidden units lie inside those of tokens."""
        if self._tensor_parallel is not None:
            self._tensor_parallel.leave()
        if self._tokens:
            self._tokens.leave_blocks()

    def wait_for_weights(self) -> None:
        """Wait for every weight that the last `step` updated: under NCCL the current stream does, under gloo this thread."""
        for bucket in self.buckets:
            if bucket.gathering is not None:
                self._wait_for_gather(bucket)

    def _before_module(self, module: nn.Module) -> None:
        """A module's forward begins: its own parameters must be there, even if it hands them to code that torch does not see."""
        if self._tensor_parallel is not None:
            self._tensor_parallel.check(module)
        if self._own_tokens:
            self._tokens.check(module, self._own_tokens, self._name_and_class)
        if self.pipeline is not None and (elsewhere := module.__dict__.get("_elsewhere")):
            self.pipeline.check_present(*elsewhere)
        if torch.compiler.is_compiling():
            self._asks_nobody = True  # torch.compile is following this code, and does so after its own has run
        else:
            for p in module._parameters.values():
                if isinstance(p, Pending):
                    p.wait()

    def _name_and_class(self, module: nn.Module) -> str:
        return f"{next((n for n, m in self._model.named_modules() if m is module), '')} ({type(module).__name__})"

    def _refuse(self, options) -> None:
        """No weights; or options of which a rank could give those of its own heads or blocks alone."""
        if self._blank:
            raise RuntimeError("the model was built on meta and has no weights yet: load or load_state_dict first")
        config, options = getattr(self._model, "config", None), options if isinstance(options, Mapping) else {}
        refused = ["output_attentions"] if self.tp.world_size * self.pp.world_size * self.sp.world_size > 1 else []
        refused += ["output_hidden_states"] if self.pipeline or self._tokens else []
        refused += ["use_cache"] if self.pipeline or self.sp.world_size > 1 else []
        for option in refused:
            if options.get(option) or getattr(config, option, False):
                raise ValueError(f"{option} would give each rank those of its own heads, blocks or tokens alone: "
                                 "use tp=1, pp=1, sp=1")

    def _before_model(self, options) -> None:
        self._refuse(options)
        self._leave_divided()  # where an exception may have left the last forward
        if self._asks_nobody:
            self.wait_for_weights()

    def _wait_for_gather(self, bucket: Bucket) -> None:
        gathering, bucket.gathering = bucket.gathering, None
        for i, own_class in bucket.classes.items():
            self.params[i].__class__ = own_class
        bucket.classes = {}
        gathering.wait()
        if self.device.type == "cuda" and torch.cuda.current_stream(self.device) != self._stream:
            with torch.cuda.stream(self._stream):  # the stream that trains must wait, too: nobody will ask it to later
                gathering.wait()
        if torch.compiler.is_compiling():
            self._asks_nobody = True

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
        """Forward and backward over this copy's `batch`, the same on all ranks of the copy, in `micro_batches` pieces, with the
        reduce-scatters. Returns the weighted mean loss over all pieces of all copies: a device scalar, the same everywhere.

        With a pipeline, micro_batches is how many go through its stages, and P - 1 of micro_batches + P - 1 turns are idle.
        batch: a Mapping (the model's keyword arguments), a tuple or list (its first item goes to the model, the rest is
        for loss_fn) or a tensor; tensors are cut along dim 0. None, or no rows: this copy has no samples this time.
        loss_fn(output, micro_batch) returns the mean over the micro-batch; without it the output, or its `loss`, is the
        loss. weight(micro_batch): what a micro-batch counts, a number or a device scalar that depends on the batch alone;
        see `default_weight`; where it is 0 the gradient must be finite all the same. micro_batches is the same on all ranks. An
        exception discards what has accumulated.
        """
        with self._discard_on_error():
            pieces = split_batch(batch, micro_batches)
            if self._tokens:
                self._tokens.lengths.clear()
            if self.pipeline:
                self._refuse(batch)
                self.pipeline.calls += 1
            weigh = weight or (lambda piece: default_weight(self._model, piece, loss_fn))
            counts = [torch.zeros((), dtype=torch.float64, device=self.device) + weigh(piece) for piece in pieces]
            total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.float64, device=self.device)
            # before: each rank knows the weight of its own pieces.  after: every rank the sum over all of them.
            # sends: 2(N-1)/N * 8 bytes; needed when the first backward starts, so it overlaps with the first forward.
            total_work = self.dp.all_reduce(total, async_op=True)
            loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
            tasks = schedule(self.pp.world_size, micro_batches, self._chunks)[self.pp.rank]
            held: dict[tuple, tuple] = {}  # (stage, micro-batch) -> (input, output), from its forward to its backward
            shapes, first, last_stage = [self._shapes(piece) for piece in pieces], True, self.pp.world_size * self._chunks - 1
            for turn, (kind, stage, k) in enumerate(tasks):
                mine, last = k < len(pieces), turn == len(tasks) - 1  # a copy may have fewer pieces than the others
                if self.pipeline and mine:  # ask for what the next task needs, too, to come while this one computes
                    following = (task for task in tasks[turn + 1 :] if task[2] < len(pieces))
                    ahead = [task for task in itertools.islice(following, 1) if self.pipeline.may_wait(task[0])]
                    for task in ((kind, stage, k), *ahead):
                        if not self.pipeline.ask(*task, shapes[task[2]], held):
                            break
                if kind == "F":
                    if mine:
                        run = functools.partial(model_loss, self._forward, pieces[k], loss_fn)
                        held[stage, k] = self._forward_stage(stage, k, shapes[k], run) if self.pipeline else (None, run())
                    continue
                received, output = held.pop((stage, k), (None, None))
                if first:
                    wait(total_work)
                    first = False
                if mine and stage == last_stage:
                    share = torch.where(total > 0, counts[k] / total, 0.0)
                    loss_sum += torch.where(share > 0, output.detach().double() * share, 0.0)  # a mean over no labels is NaN
                if last:
                    # before: each rank has the weighted losses of its own pieces.  after: all have the sum.
                    # sends: 2(N-1)/N * 8 bytes while the last backward runs.
                    loss_work = self.dp.all_reduce(loss_sum, async_op=True)
                with contextlib.nullcontext() if last else self.no_sync():
                    if mine and stage == last_stage:
                        self._backward(output, share)
                    elif mine:
                        self._backward_stage(stage, k, output)
                    elif last:  # its gradients are zeros, but the others wait for them
                        self._propagate(None, None)
                if received is not None and received.requires_grad:
                    self.pipeline.send_grad(received, stage, k)
            wait(loss_work)
            if self.pipeline:
                self.pipeline.finish()
                if self._sync:
                    self._sum_shared()
                # before: the last stage has the loss, the others 0.  after: all have it.  sends: 2(N-1)/N * 8 bytes; all wait.
                self.pp.all_reduce(loss_sum)
        in_float64 = self.params and self.params[0].dtype == torch.float64  # as full_grad: fp32 but for float64 models
        return loss_sum if in_float64 else loss_sum.float()

    # ---- 2. backward, and the reduce-scatters inside it --------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Backward of this copy's mean loss; copies count 1/N each. For a loop of your own, with `no_sync` around all but
        the last micro-batch; there, dividing by the number of micro-batches is yours. An exception discards what has
        accumulated."""
        if self.pipeline:
            raise RuntimeError("with a pipeline forward and backward of a batch go together: call engine.forward_backward(batch)")
        with self._discard_on_error():
            self._backward(loss, 1.0 / self.dp.world_size)
        if self._tokens:
            self._tokens.lengths.clear()

    @contextlib.contextmanager
    def no_sync(self):
        """Around `backward` of all micro-batches but the last; all ranks or none: gradients only accumulate on this rank, in the
        weights' dtype. The flag is read in backward alone. If no later backward reduces what has accumulated, `step` does."""
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
            self._leave_divided()
            if self.pipeline:
                self.pipeline.forget()
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
        self._propagate(loss, (self.scaler.state[SCALE] * share).to(loss.dtype).reshape(loss.shape))

    def _backward_stage(self, stage: int, k: int, hidden: Tensor) -> None:
        """Backward of a stage that is not the last: the gradient of what it has sent comes back, scaled and weighted already."""
        grad = self.pipeline.receive_grad(stage, k) if hidden.requires_grad else None
        self._propagate(hidden if hidden.requires_grad else None, grad)

    def _propagate(self, output: Tensor | None, grad: Tensor | None) -> None:
        self._begin_backward()
        if output is not None:
            output.backward(gradient=grad)
        self._end_backward()

    def _begin_backward(self) -> None:
        holder = ENGINES.get(self._model)
        if holder is None or holder() != self._let_go:
            raise RuntimeError("another engine has taken this model over: use that one")
        for name, p in self._frozen:
            if p.requires_grad:
                raise RuntimeError(f"{name} was frozen when the engine was built and has no bucket: unfreeze it before")
        self.wait_for_weights()  # of what this forward did not touch
        self._check_not_moved()
        if self._reduced:  # a second backward before step adds to the sum, which only its owner holds
            for bucket in self.buckets:
                bucket.grads[: bucket.own.start].zero_()
                bucket.grads[bucket.own.stop :].zero_()
                if any(axis.rank for axis in bucket.sums) or self._slices is not self.dp and self.dp.rank > 0:
                    bucket.shard.zero_()  # the others have it, too, and it will be added up again
            self._reduced = False
        for bucket in self.buckets:
            bucket.missing, bucket.launched = len(bucket.views), False
        self._arrived = [False] * len(self.params)
        self._launched = 0
        self._in_backward = True

    def _check_not_moved(self) -> None:
        for i, p in enumerate(self.params):
            if self._bucket_of[i] is not None and p.data_ptr() != self.buckets[self._bucket_of[i]].views[i].data_ptr():
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
        if self._bucket_of[index] is None:
            raise RuntimeError(f"{self.names[index]} belongs to another stage, but forward reads it on rank {self.pp.rank} of the "
                               f"{self.pp.world_size} of pp, too: this model needs pp=1")
        bucket = self.buckets[self._bucket_of[index]]
        if self._arrived[index]:  # reentrant checkpointing, one backward per use: autograd has added it, if not too late
            if bucket.launched:
                raise RuntimeError(f"the gradient of {self.names[index]} arrived again after its bucket was sent, as with "
                                   "reentrant activation checkpointing; use torch.utils.checkpoint(..., use_reentrant=False)")
            return
        self._arrived[index] = True
        self.optimizer.present[index] = 1
        bucket.missing -= 1
        if param.numel() >= COPY_NUMEL:
            self._fill(bucket, [index])
        if bucket.missing == 0:
            self._fill(bucket, bucket.views)
        while self._sync and self._launched < len(self.buckets) and self.buckets[self._launched].missing == 0:
            self._launch(self.buckets[self._launched])

    def _fill(self, bucket: Bucket, indices) -> None:
        """Copy gradients that autograd allocated into the bucket's flat tensor, in one call, and let `.grad` be the views: what is
        added later, is added there, and the memory is there once. Zeros where no gradient came."""
        places, grads, absent = [], [], []
        for i in indices:
            p = self.params[i]
            place = bucket.grads[bucket.starts[i] : bucket.starts[i] + p.numel()].view(p.shape)
            if p.grad is not None and p.grad.data_ptr() == place.data_ptr() and p.numel():
                continue
            if p.grad is None:
                absent.append(place)
                self.optimizer.present[i] = 0  # if it was 1, the user has set an earlier micro-batch's gradient to None
            else:
                places.append(place)
                grads.append(p.grad)
            p.grad = place
        if places:
            torch._foreach_copy_(places, grads)
        if absent:
            torch._foreach_zero_(absent)

    def _launch(self, bucket: Bucket) -> None:
        """Issue the next bucket's reduce-scatter. Always in the buckets' order, whatever the order of the gradients."""
        self._fill(bucket, bucket.views)
        while self._slices.by_hand and self._in_flight:  # there is one place for what is received
            self._finish(self._in_flight[0])
        if self._slices is self.dp:
            # starts the reduce-scatter along dp; who holds what and what is sent: SliceSum
            bucket.summing = SliceSum(self.dp, bucket.grads, self._launched, self._received.get(bucket.weights.dtype))
        else:
            # before: each copy has its own gradients.  after: all have the sum.  sends: 2(N-1)/N of the bucket's bytes along dp
            # while autograd goes on.
            bucket.summing = self.dp.all_reduce(bucket.grads, async_op=True)
        bucket.launched = True
        self._launched += 1
        self._in_flight.append(bucket)

    def _finish(self, bucket: Bucket) -> None:
        """Wait for a sum along dp. Where neighbours on the tp axis use the same weights for heads of their own, or those on the sp
        axis for tokens of their own, add theirs."""
        self._in_flight.remove(bucket)
        summing, bucket.summing = bucket.summing, None
        wait(summing)
        for axis in bucket.sums:
            if axis.name != "pp":
                # before: each holder has the part of the gradient that its heads or tokens give.  after: all have the sum.
                # sends: 2(H-1)/H of the slice's bytes, H the holders; backward is through or goes on when it comes.
                axis.all_reduce(bucket.shard)

    def _sum_shared(self) -> None:
        """Weights that several stages use, as an embedding tied to the head. Last of all, when no stage waits for another one."""
        for bucket in self.buckets:
            for axis in bucket.sums:
                if axis.name == "pp":
                    # before: each of these stages has its part of the gradient.  after: all have the sum.
                    # sends: 2(H-1)/H of the slice's bytes, H the stages; they wait.
                    axis.all_reduce(bucket.shard)

    def _end_backward(self) -> None:
        """Autograd is through. Send the buckets that still miss a gradient, which will not come, and those queued behind them,
        and wait for all; under NCCL the stream waits, under gloo this thread."""
        self._in_backward = False
        if self._sync:
            for bucket in self.buckets[self._launched :]:
                self._launch(bucket)
            while self._in_flight:
                self._finish(self._in_flight[0])
            self._reduced = True

    def _reduce_what_is_left(self) -> None:
        """Reduce now if no backward since the last step has: there was none (then zeros, as the other ranks do), or all were
        inside no_sync."""
        if not self._reduced:
            before, self._sync = self._sync, True
            self.wait_for_weights()  # no forward may have read them since the last step
            for bucket in self.buckets:
                bucket.launched = False
            self._launched = 0
            self._end_backward()
            self._sum_shared()
            self._sync = before

    # ---- 3. step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One optimizer step: what is left to reduce, norm, overflow check, clip, Adam on the own slices, gather."""
        self.optimizer.step()  # through the optimizer, so that schedulers see the call; it calls `_step`

    def _step(self) -> None:
        self._reduce_what_is_left()
        self._check_gradients_in_place()
        # before: BatchNorm's running means and variances of this copy's samples.  after: their sum, then the mean, each copy
        # counting once, however many samples it had.
        # sends: 2(N-1)/N * 4 bytes per element along dp; needed by nobody before the next forward.
        statistics_works = [self.dp.all_reduce(flat, async_op=True) for flat in self._statistics]
        adam = self.optimizer
        adam.send_hyperparameters()
        adam.send_presence()
        self._square_sum()
        # before: each rank has the sum of squares of what it counts, and knows which parameters received a gradient there.
        # after:  all have the sum over all axes, each element once, so the true norm; a NaN anywhere is a NaN everywhere.
        # sends:  2(N-1)/N * 8 bytes for each parameter tensor and one more, N all ranks; Adam waits for it.
        self.world.all_reduce(adam.inputs[adam.n_hyper :])
        self._stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        adam.update(len(self.buckets), after=self._gather)
        for flat, work in zip(self._statistics, statistics_works):
            wait(work)
            flat.div_(self.dp.world_size)
        if not self.overlap_gather:
            self.wait_for_weights()
        self.zero_grad()
        self.traffic, self._sent_bytes = self._sent_bytes, {}
        self.scaler.raise_if_stuck()
        if self._to_compile:  # the first step ran as it is, and hooks have seen that the plan fits
            self._compile()

    def _compile(self) -> None:
        for hook in self._module_hooks:
            hook.remove()
        for block in self._to_compile:
            self.changes.append((block, "_compiled_call_impl", block._compiled_call_impl))
            block.compile()
        self._to_compile = []

    def _square_sum(self) -> None:
        """Of the gradients that this rank counts: what several ranks hold alike, the first of them does. The shared Adam sums over
        `pieces` and `chunks`, so for the moment these are the counted ones."""
        adam = self.optimizer
        everything = adam.pieces, adam.cuda and adam.chunks
        adam.pieces = self._counted_pieces
        if adam.cuda:
            adam.chunks = self._counted_blocks
        adam.square_sum()
        adam.pieces = everything[0]
        if adam.cuda:
            adam.chunks = everything[1]
        for bucket in self.buckets:
            if not bucket.counted:  # but what is not finite here alone must be known everywhere
                finite = bucket.shard.sum(dtype=torch.float64).isfinite()
                adam.inputs[adam.n_hyper] += torch.where(finite, 0.0, torch.nan)

    def _check_gradients_in_place(self) -> None:
        for bucket in self.buckets:
            for i, start in bucket.starts.items():
                grad = self.params[i].grad
                if grad is None or grad.numel() and grad.data_ptr() != bucket.grads[start:].data_ptr():
                    raise RuntimeError(f"{self.names[i]}.grad was replaced or removed before step: change it in place")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard what has accumulated since the last step. `step` does so itself; calling it again is harmless."""
        for p in self.params:
            p.grad = None
        self.optimizer.present[:] = bytes(len(self.params))
        self._reduced = False
        if self._tokens:
            self._tokens.lengths.clear()

    # ---- 4. gather ---------------------------------------------------------------------------------------------------

    def _gather(self, part: int) -> None:
        """Adam has updated part 0, the bucket that forward reads first, then 1, ...: send its own slice to the other copies."""
        bucket = self._bucket_of_part(part)
        # starts the all-gather along dp; who holds what and what is sent: SliceGather. Tags 0 to B-1 are the reduce-scatters'.
        bucket.gathering = SliceGather(self._slices, bucket.weights, tag=len(self.buckets) + part)
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

    def train(self, mode: bool = True) -> "Hybrid":
        self._model.train(mode)
        return self

    def eval(self) -> "Hybrid":
        return self.train(False)

    def named_parameters(self):
        return self.module.named_parameters()

    def full_grad(self, name: str) -> Tensor:
        """The averaged, unscaled, unclipped gradient of one parameter, whole, on the CPU, fp32 (float64 for float64);
        zeros where no rank had one. A collective, between the last backward and `step`."""
        if name not in self.names:
            raise ValueError(f"{name!r} is not a trained parameter; trained are {', '.join(self.names[:8])}, ...")
        self._reduce_what_is_left()
        grads = [dataclasses.replace(f, master=f.grad.to(f.master.dtype)) for f in self.fragments if f.name == name]
        full = dict(gather_full(self, grads, "master"))[name]
        p = self.params[self.names.index(name)]
        if self.rank > 0:
            full = torch.zeros(self.layout(p).shape, dtype=torch.promote_types(p.dtype, torch.float32))
        # before: rank 0 has the whole, of all axes' parts.  after: all have it.  sends: the whole of it; all wait.
        full = self._broadcast(full.to(self.device)).cpu()
        return full / self.scaler.state[SCALE].item()

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of live storages on this rank, by kind and device: parameters, gradients, optimizer, buffers."""
        separate = [b for b in self.buckets if b.master.data_ptr() != b.weights[b.own].data_ptr()]
        held = {
            "parameters": [*self._model.parameters()],
            "gradients": [*(b.grads for b in self.buckets), *(p.grad for p in self.params), *self._received.values()],
            "optimizer": [b.master for b in separate] + [t for f in self.fragments for t in (f.exp_avg, f.exp_avg_sq)],
            "buffers": [*self._model.buffers()],
        }
        return {kind: storage_bytes(tensors) for kind, tensors in held.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The plain model's state dict, weights from the masters, as copies on the CPU of rank 0; an empty dict on the others.
        A collective. dtypes are those the model came with."""
        name_of, frozen = self._name_of(), [f for f in self.kept() if f.index == FROZEN]
        whole = dict(gather_full(self, self.fragments + frozen, "master"))
        if self.rank != 0:
            return {}
        full = {}
        for key, value in self.module.state_dict(keep_vars=True).items():
            value = whole[name_of[value]] if isinstance(value, nn.Parameter) else value
            if isinstance(value, Tensor):
                value = value.detach().to("cpu", self._plain_dtypes.get(key, value.dtype), copy=True)
            full[key] = value
        return full

    def _name_of(self) -> dict[nn.Parameter, str]:
        return {p: name for name, p in self._model.named_parameters()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load rank 0's full state dict (what other ranks pass is ignored) on every rank, masters included; a collective.
        Adam's moments stay. Raises CheckpointError, a ValueError, on all ranks and before anything changes, for missing or
        unexpected names and for other shapes."""
        own, name_of = self.module.state_dict(keep_vars=True), self._name_of()
        shape = lambda value: self.layout(value).shape if isinstance(value, nn.Parameter) else tuple(value.shape)

        def check():
            refuse_extra_state(own)
            if self.rank == 0:
                missing, extra = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
                shapes = [f"{k} {tuple(state_dict[k].shape)} instead of {shape(v)}" for k, v in own.items()
                          if isinstance(v, Tensor) and k in state_dict and tuple(state_dict[k].shape) != shape(v)]
                if missing or extra or shapes:
                    raise CheckpointError(f"the state dict does not fit: missing {missing}, unexpected {extra}, "
                                          f"other shapes {shapes}")

        together(self, check)
        keys = {name_of[v]: key for key, v in own.items() if isinstance(v, nn.Parameter)}
        masters = {name: state_dict[key] for name, key in keys.items()} if self.rank == 0 else {}
        scatter_full(self, self.fragments + [f for f in self.kept() if f.index == FROZEN], "master", masters)
        for key, value in own.items():
            if not isinstance(value, nn.Parameter) and isinstance(value, Tensor):
                if self.rank == 0:
                    value.data.copy_(state_dict[key])
                self._broadcast(value.data)
        self._refresh_weights()

    def _refresh_weights(self) -> None:
        """After the masters have changed otherwise than by Adam: round them into the weights and send those round."""
        self._blank = False
        for bucket in self.buckets:
            if bucket.master.data_ptr() != bucket.weights[bucket.own].data_ptr():
                bucket.weights[bucket.own].copy_(bucket.master)
            SliceGather(self._slices, bucket.weights, tag=0).wait()
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
        self._same_random_numbers()  # a checkpoint of another strategy gave each rank numbers of its own
        self.zero_grad()
        self._refresh_weights()
        return {k: v for k, v in extra.items() if not k.startswith("_")}

    def kept(self) -> "list[Fragment]":
        """What a checkpoint holds beside what is trained: frozen parameters, and the buffers that are in the state dict."""
        trained, persistent = set(self.names), refuse_extra_state(self._model.state_dict())
        frozen = [(n, p, self.layout(p)) for n, p in self._model.named_parameters()
                  if n not in trained and p not in self._absent]
        kept = [Fragment(n, FROZEN, layout.shape, layout.boxes, 0, layout.numel, p.data.view(-1)[: layout.numel])
                for n, p, layout in frozen]
        buffers = [(n, b) for n, b in self._model.named_buffers() if n in persistent]
        return kept + [Fragment(n, BUFFER, tuple(b.shape), (tuple(slice(0, s) for s in b.shape),), 0, b.numel(), b)
                       for n, b in buffers]

    def capture(self, batch, micro_batches: int = 1, loss_fn=None):
        raise NotImplementedError("Hybrid.capture: CUDA graphs are not in hybrid.py yet")

    # ---- collectives of whole tensors, and the count of bytes ----------------------------------------------------------

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


# ---- demonstration: python hybrid.py ---------------------------------------------------------------------------------


def demonstration(device: torch.device) -> None:
    """A small Llama divided between all ranks: its matrices (tp), its blocks (pp), its tokens (sp). Each trains three steps in
    float64 beside one process, then in bf16. Prints the mesh, who owns what, and what is held and sent beside the docstring's
    formulas."""
    from transformers import LlamaConfig, LlamaForCausalLM
    rank, n, width, batch, length, micro_batches = dist.get_rank(), dist.get_world_size(), 128, 8, 32, 4
    layers = 2 * n

    def build(dtype):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=1001, hidden_size=width, intermediate_size=384, num_hidden_layers=layers, num_attention_heads=2 * n,
            num_key_value_heads=n, max_position_embeddings=64)).to(device, dtype)

    def loss_fn(output, given):
        return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), given["input_ids"][:, 1:].flatten())

    torch.manual_seed(1)
    tokens = torch.randint(1001, (batch, length)).to(device)

    def distance(**mesh) -> str:
        model, plain = build(torch.float64), build(torch.float64)
        fuse_norms(plain, [])
        engine = Hybrid(model, lr=1e-3, eps=1e-3, weight_decay=0.01, max_norm=1.0, precision="fp32", **mesh)
        adam, grad_gap = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.01), 0.0
        for _ in range(3):
            engine.forward_backward(dict(input_ids=tokens), micro_batches, loss_fn)
            adam.zero_grad()
            loss_fn(plain(tokens), dict(input_ids=tokens)).backward()
            for name, p in plain.named_parameters():
                grad_gap = max(grad_gap, (engine.full_grad(name) - p.grad.cpu()).abs().max().item())
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            adam.step()
            engine.step()
        whole = engine.state_dict()
        gap = max((whole[name] - p.cpu()).abs().max().item() for name, p in plain.state_dict().items()) if rank == 0 else 0.0
        return f"largest distance from one process, float64, 3 steps: gradients {grad_gap:.1e}, parameters {gap:.1e}"

    def trained(**mesh):
        """An engine in bf16, its last loss, and the bytes that left this rank in the third forward and backward."""
        engine = Hybrid(build(torch.float32), lr=1e-3, precision="bf16", **mesh)
        for _ in range(3):
            engine.wait_for_weights()
            before = sent_bytes()
            loss = engine.forward_backward(dict(input_ids=tokens), micro_batches, loss_fn)
            sockets = sent_bytes() - before
            engine.step()
        return engine, loss, sockets

    say = print if rank == 0 else lambda *_: None
    for mesh in (dict(tp=n), dict(pp=n), dict(sp=n, sp_mode="ring")):
        gap, (engine, loss, sockets), axis = distance(**mesh), trained(**mesh), next(iter(mesh))
        own = [p for p in engine.params if p not in engine._absent]
        owned = [(name, tuple(p.shape), engine.layout(p)) for name, p in engine.named_parameters() if p in set(own)]
        numel, held = sum(p.numel() for p in own), {kind: sum(places.values()) for kind, places in engine.memory().items()}
        everyone = [None] * n
        dist.all_gather_object(everyone, (owned, numel, held, {name: a.rank for name, a in engine.axes.items()}))
        say(f"\n{axis}: {n} ranks on {device.type}: " + ", ".join(f"{name} {a.world_size}" for name, a in engine.axes.items()))
        say("  " + "; ".join(f"rank {r}: " + " ".join(f"{name} {k}" for name, k in place.items()) for r, place in enumerate(
            [one[3] for one in everyone])))
        activations = batch * length * width * 2
        if axis == "tp":
            for k, (name, _, layout) in enumerate(owned):
                if layout.holders < n and not re.search(r"\.[1-9]", name):
                    places = ["".join(f"[{', '.join(f'{s.start}:{s.stop}' for s in box)}]" for box in theirs[0][k][2].boxes)
                              for theirs in everyone]
                    say(f"  {name:42}{str(layout.shape):14} {'   '.join(places)}")
            formula = 2 * (n - 1) / n * ((4 * layers + 1) * activations + 3 * 4 * batch * (length - 1))
            counted = engine.traffic["tp all_reduce"]
        elif axis == "sp":
            say("  " + "; ".join(f"rank {r}: tokens {r * length // n} to {(r + 1) * length // n - 1}" for r in range(n)))
            keys = activations // 2  # elements of keys and values: half as many heads as queries, twice; gradients in fp32
            formula = layers * keys * 2 / n * ((n - 1) * 2 + n * 2) + 2 * (n - 1) / n * activations
            formula += 2 * (n - 1) / n * 2 * sum(p.numel() for p in engine._own_tokens)
            counted = sum(engine.traffic[f"sp {what}"] for what in ("send", "all_gather", "all_reduce"))
        else:
            for stage, (theirs, *_) in enumerate(everyone):
                blocks = sorted({name.split(".")[2] for name, *_ in theirs if ".layers." in name})
                beside = sorted({name.rpartition(".")[0] for name, *_ in theirs if ".layers." not in name})
                say(f"  stage {stage}: blocks {', '.join(blocks)}; {', '.join(beside) or 'nothing else'}")
            lines, idle = timeline(schedule(n, micro_batches))
            say("\n".join(f"  rank {k}  {line}" for k, line in enumerate(lines)))
            say(f"  idle {idle:.3f} of all turns; formula (P-1)/(M+P-1) {(n - 1) / (micro_batches + n - 1):.3f}")
            formula, counted = (1 if rank in (0, n - 1) else 2) * activations, engine.traffic["pp send"]
        for r, (_, numel, held, _) in enumerate(everyone):
            say(f"  rank {r}: {numel:,} parameters; bytes held and by formula: weights {held['parameters']:,} {2 * numel:,}, "
                f"gradients {held['gradients']:,} {2 * numel:,}, optimizer {held['optimizer']:,} {12 * numel:,}")
        say(f"  rank 0 sent in forward and backward: by sockets {sockets:,}, counted {counted:,}, formula {formula:,.0f}")
        say(f"  loss in bf16 {loss:.4f}; {gap}")


def timeline(lists: list[list[tuple[str, int, int]]]) -> tuple[list[str], float]:
    """What each rank does in each turn, if forward and backward take one each, and the share of turns in which nothing is done."""
    stages = 1 + max(stage for tasks in lists for _, stage, _ in tasks)
    rows, done = [[] for _ in lists], {}
    waiting = [list(tasks) for tasks in lists]
    for turn in itertools.count():
        if not any(waiting):
            break
        for tasks, row in zip(waiting, rows):
            kind, stage, k = tasks[0] if tasks else ("", 0, 0)
            needs = [("F", stage - 1, k)] * (stage > 0) if kind == "F" else [
                ("F", stage, k), *[("B", stage + 1, k)] * (stage < stages - 1)]
            ready = tasks and all(done.get(need, turn) < turn for need in needs)
            row.append(f"{kind}{k}" if ready else "..")
            if ready:
                done[tasks.pop(0)] = turn
    return [" ".join(row) for row in rows], sum(row.count("..") for row in rows) / (len(rows) * len(rows[0]))


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
