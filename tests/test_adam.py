"""The shared blocks `fragments`, `loss scale` and `adam`, and adam_cuda.cu behind them, without any strategy around.

What is compared: class Adam over hand-made fragments with torch.optim.Adam and AdamW, in float64 on the CPU and one
tensor after the other (never the fused code under test), fed the gradients as rounded to their own dtype. What must
not change, or must be the same in two ways, is compared bit for bit.
Every test that takes `device` runs three times: on the CPU, through adam_cuda.cu, and with torch's fused Adam on the
GPU, as on a machine without nvcc. ddp.py stands for all strategy files: test_copies.py keeps their blocks identical.
Needs nothing; without a GPU two thirds are skipped. About 10 s on two CPU cores, 50 s with a GPU, half of it
compiling (`-m sweep` adds one tensor of more than 2^31 elements, and NVIDIA's compute-sanitizer).
"""
import copy
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import ddp
from ddp import FACTOR, GRAD_NORM, SCALE, SKIPPED, SKIPPED_IN_A_ROW, SKIPPED_STEPS, Adam, Fragment, LossScale

# 0: no chunk refers to it. 1, 3: the tail alone. 4095: vectors and a tail. 16384: one chunk of adam_cuda.cu exactly.
# 65537: one element more than 4 chunks, and than one piece of the CPU's norm. 200003: 13 chunks, 4 pieces.
SIZES = (0, 1, 3, 4095, 16384, 65537, 200003)
COUNTERS = (SCALE, ddp.GOOD_STEPS, SKIPPED, SKIPPED_STEPS, SKIPPED_IN_A_ROW)
GUARD = 7.0  # stands around views; exact in every dtype
# eps = 1e-3: with 1e-8, where gradient and L2 decay happen to cancel, what rounding leaves of them moves p by lr.
HYPER = dict(lr=0.1, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.01, adamw=True)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# fp32: a step rounds p, m and v once or twice, by 2^-24 of values of about 1; four steps stay below 1e-6. lr = 0.1
# keeps that sharp: a step that is 1e-5 off shows, and so would 1 - 0.999f in v, which is 1.3e-5 off.
TOLERANCE = {FP32: dict(rtol=1e-6, atol=1e-6), FP64: dict(rtol=1e-12, atol=1e-12)}
TORCH_ON_GPU = {**TOLERANCE, FP32: dict(rtol=1e-5, atol=1e-5)}  # torch's own rounding: 5e-6 seen after 20 steps

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU: adam_cuda.cu cannot run here")


def library() -> None:
    """adam_cuda.cu must be what runs: with a compiler there, falling back to torch would be a failure, not a skip."""
    from torch.utils import cpp_extension

    if not shutil.which("nvcc") and not cpp_extension.CUDA_HOME:
        pytest.skip("a GPU but no nvcc: adam_cuda.cu cannot be built here")
    assert ddp.adam_library(torch.device("cuda", 0)), "nvcc is there, but adam_cuda.cu was not built or not loaded"


@pytest.fixture(params=["cpu", *(pytest.param(p, marks=needs_gpu) for p in ("cuda", "cuda-without-kernel"))])
def device(request, monkeypatch):
    if request.param == "cuda":
        library()
    if request.param == "cuda-without-kernel":
        monkeypatch.setattr(ddp, "adam_library", lambda device: False)
    return torch.device("cpu") if request.param == "cpu" else torch.device("cuda", 0)


@pytest.fixture(params=[pytest.param("kernel", marks=needs_gpu)])
def gpu(request):
    library()
    return torch.device("cuda", 0)


class Engine:
    """The least that class Adam needs of a strategy: a module, fragments, the three calls of a step in their order.

    values: name -> initial value, on the CPU; its dtype is the master's, its strides everybody's. half: the dtype of
    the parameter proper, a copy beside the master; without it the master is the parameter. groups: as for Adam, with
    names in place of parameters. offsets: tensor kind -> elements between its allocation's aligned start and its own.
    """

    def __init__(self, values: dict[str, Tensor], device, *, groups=None, half=None, grad_dtype=None, offsets=None,
                 max_norm=0.0, scale=1.0, dynamic=False, rule=None, **hyper):
        self.device, self.flats, self.offsets = device, [], offsets or {}
        self.module = nn.Module()
        fragments = []
        for index, (name, value) in enumerate(values.items()):
            half_dtype = half.get(name) if isinstance(half, dict) else half
            master = self.place("master", value, value.dtype)
            copy = self.place("half", value, half_dtype) if half_dtype else None
            self.module.register_parameter(name, nn.Parameter(master if copy is None else copy))
            moments = (self.place(kind, torch.zeros_like(value), value.dtype) if self.offsets else None
                       for kind in ("exp_avg", "exp_avg_sq"))
            grad = self.place("grad", torch.zeros_like(value), grad_dtype or value.dtype)
            boxes = (tuple(slice(0, s) for s in value.shape),)
            shape = tuple(value.shape)
            fragments.append(Fragment(name, index, shape, boxes, 0, value.numel(), master, grad, copy, *moments))
        self.scaler = LossScale(device, scale, dynamic, **(rule or {}))
        params = dict(self.module.named_parameters())
        groups = groups and [{**g, "params": [params[n] for n in g["params"]]} for g in groups]
        self.optimizer = Adam(self, groups, {**HYPER, **hyper}, max_norm, self.scaler)
        index = {name: i for i, name in enumerate(self.optimizer.names)}
        self.fragments = [f for f in fragments if f.name in index]
        for f in self.fragments:
            f.index = index[f.name]
        self.optimizer.own(self.fragments)

    def place(self, kind: str, value: Tensor, dtype) -> Tensor:
        if kind not in self.offsets:
            return torch.empty_like(value, dtype=dtype, device=self.device).copy_(value)
        flat, start = torch.full((value.numel() + 8,), GUARD, dtype=dtype, device=self.device), self.offsets[kind]
        end = start + value.numel()
        self.flats.append((kind, flat, start, end))
        return flat[start:end].view(value.shape).copy_(value)

    def give(self, grads) -> list:
        """What backward does: write gradients times the loss scale, None for none. Returns them as they really
        arrived, rounded to their dtype, in float64 and without the scale."""
        arrived = []
        for f, grad in zip(self.fragments, grads, strict=True):
            self.optimizer.present[f.index] = grad is not None
            f.grad.copy_((grad if grad is not None else torch.zeros(())).to(self.device) * self.scaler.state[SCALE])
            arrived.append(None if grad is None else f.grad.to("cpu", FP64, copy=True) / self.state(SCALE))
        return arrived

    def _step(self) -> None:
        self.optimizer.send_presence()
        self.optimizer.send_hyperparameters()
        self.optimizer.square_sum()
        self.optimizer.update()
        self.zero_grad()
        self.scaler.raise_if_stuck()

    def zero_grad(self) -> None:
        self.optimizer.present[:] = bytes(len(self.optimizer.params))

    def run(self, grads) -> list:
        arrived = self.give(grads)
        self.optimizer.step()
        return arrived

    def state(self, place: int) -> float:
        return self.scaler.state[place].item()

    def tensors(self) -> list[Tensor]:
        """Everything that a step may change, except for the loss scale: clones."""
        found = [t for f in self.fragments for t in (f.master, f.exp_avg, f.exp_avg_sq, f.half) if t is not None]
        return [t.clone() for t in (*found, self.optimizer.steps)]


class Reference:
    """torch.optim.Adam or AdamW for the same groups, in float64, from the engine's values as they are now."""

    def __init__(self, engine: Engine):
        names = {p: n for n, p in engine.module.named_parameters()}
        masters = {f.name: nn.Parameter(f.master.detach().to("cpu", FP64, copy=True)) for f in engine.fragments}
        self.params, self.optimizers = list(masters.values()), []
        for group in engine.optimizer.param_groups:
            hyper = {k: group[k] for k in ("lr", "betas", "eps", "weight_decay")}
            mine = [masters[names[p]] for p in group["params"]]
            if mine:
                kind = torch.optim.AdamW if group["adamw"] else torch.optim.Adam
                self.optimizers.append(kind(mine, **hyper, foreach=False))

    def step(self, grads, max_norm: float = 0.0) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = None if grad is None else grad.clone()
        if max_norm:
            nn.utils.clip_grad_norm_(self.params, max_norm)
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self, engine: Engine) -> None:
        state = {p: s for optimizer in self.optimizers for p, s in optimizer.state.items()}
        tolerance = TORCH_ON_GPU if engine.device.type == "cuda" and not engine.optimizer.cuda else TOLERANCE
        for f, p in zip(engine.fragments, self.params, strict=True):
            expected = state.get(p, dict(step=0.0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)))
            label = functools.partial("{1}, {0}".format, f"{f.name} {f.shape} {f.grad.dtype} {f.half is not None=}")
            expected = {**expected, "master": p.detach()}
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                got = getattr(f, kind).to("cpu", FP64)
                torch.testing.assert_close(got, expected[kind], **tolerance[f.master.dtype], msg=label)
            assert engine.optimizer.steps[f.index].item() == float(expected["step"]), f.name
            if f.half is not None:  # to nearest even, so exactly what .to() gives
                assert torch.equal(f.half, f.master.to(f.half.dtype)), f.name


def normal(*shape, seed=0, dtype=FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def values_of(sizes=SIZES, dtype=FP32) -> dict[str, Tensor]:
    return {f"p{k}_{n}": normal(n, seed=k, dtype=dtype) for k, n in enumerate(sizes)}


def grads_of(engine: Engine, step: int) -> list[Tensor]:
    return [normal(*f.shape, seed=1000 * (step + 1) + k, dtype=f.master.dtype)
            for k, f in enumerate(engine.fragments)]


def compare(engine: Engine, steps: int = 4, max_norm: float = 0.0) -> None:
    reference = Reference(engine)
    for step in range(steps):
        reference.step(engine.run(grads_of(engine, step)), max_norm)
    reference.check(engine)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bitwise: torch.equal takes 0.0 for -0.0."""
    return len(a) == len(b) and all(torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))
                                    for x, y in zip(a, b, strict=True))


# ---- 1. the formula, for every dtype and layout --------------------------------------------------------------------


@pytest.mark.parametrize("adamw", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("grad_dtype, half", [
    (FP32, None), (FP32, BF16), (FP32, FP16), (BF16, BF16), (BF16, None), (FP16, FP16), (FP16, None),
], ids=str)  # fmt: skip
def test_dtypes_and_sizes(device, grad_dtype, half, adamw):
    """fp32 masters; all sizes in one model, so chunks of several tensors stand side by side in one launch."""
    compare(Engine(values_of(), device, grad_dtype=grad_dtype, half=half, adamw=adamw))


@pytest.mark.parametrize("adamw", [True, False], ids=["AdamW", "Adam"])
def test_float64(device, adamw):
    compare(Engine(values_of(dtype=FP64), device, adamw=adamw, max_norm=5.0), max_norm=5.0)


@pytest.mark.parametrize("grad_dtype, half", [(FP32, None), (BF16, BF16), (FP16, FP16)])
def test_unaligned_views_and_their_neighbours(device, grad_dtype, half):
    offsets = dict(master=1, grad=1, exp_avg=2, exp_avg_sq=3, half=1)
    engine = Engine(values_of(), device, grad_dtype=grad_dtype, half=half, offsets=offsets)
    assert all(getattr(f, kind).data_ptr() % 16 for f in engine.fragments[1:] for kind in list(offsets)[:4])
    compare(engine)
    for kind, flat, start, end in engine.flats:
        assert (flat[:start] == GUARD).all() and (flat[end:] == GUARD).all(), f"{kind} wrote outside its view"


@pytest.mark.parametrize("grad_dtype, half", [(FP32, None), (BF16, BF16)])
def test_strides(device, grad_dtype, half):
    """channels_last and transposed: dense, but not row-major; each element must meet its own gradient and moments."""
    values = {  # "row": a dim of size 1 may have any stride
        "conv": torch.empty(5, 7, 3, 3).copy_(normal(5, 7, 3, 3)).to(memory_format=torch.channels_last),
        "transposed": normal(33, 17).t(), "row": normal(1, 9).t(), "scalar": normal(),
    }
    engine = Engine(values, device, grad_dtype=grad_dtype, half=half)
    assert not any(engine.fragments[k].master.is_contiguous() for k in (0, 1))
    compare(engine)


def test_a_thousand_tensors(device):
    compare(Engine(values_of([k % 97 + 1 for k in range(1000)]), device, max_norm=1.0), steps=3, max_norm=1.0)


def test_groups_each_with_its_own_hyperparameters(device):
    """Adam and AdamW in one launch; the groups are in another order than the model, and one of them is empty."""
    groups = [
        dict(params=["p3_4095", "p0_8"], lr=0.1, weight_decay=0.1),
        dict(params=[], lr=123.0, weight_decay=9.0),
        dict(params=["p2_70000"], lr=0.01, betas=(0.8, 0.95), eps=1e-2, weight_decay=0.2, adamw=False),
        dict(params=["p1_3"], lr=0.3, betas=(0.0, 0.5), weight_decay=0.0),
    ]
    engine = Engine(values_of([8, 3, 70000, 4095, 5]), device, groups=groups)
    assert engine.optimizer.names == ["p0_8", "p1_3", "p2_70000", "p3_4095"]  # the model's order; p4_5 is in no group
    assert [len(g["params"]) for g in engine.optimizer.param_groups] == [2, 0, 1, 1]
    untrained = engine.module.p4_5.clone()
    compare(engine)
    assert torch.equal(engine.module.p4_5, untrained)


def test_bf16_without_a_master(device):
    """State in bf16, as torch keeps it; vector and scalar code may differ by one unit in the last place, 2^-7."""
    engine = Engine(values_of(dtype=BF16), device)
    plain = [nn.Parameter(f.master.clone()) for f in engine.fragments]
    adam = torch.optim.AdamW(plain, **{k: v for k, v in HYPER.items() if k != "adamw"}, fused=True)
    for step in range(4):
        engine.give(grads_of(engine, step))
        for f, p in zip(engine.fragments, plain, strict=True):
            p.grad = f.grad.clone()
        engine.optimizer.step()
        adam.step()
    for f, p in zip(engine.fragments, plain, strict=True):
        assert f.exp_avg.dtype == BF16
        torch.testing.assert_close(f.master, p.detach(), rtol=2**-7, atol=0)


def test_dtypes_in_one_group_count_each_step_once(device):
    """Case 18: a loop over dtypes inside the group must not advance the step for each of them."""
    values = {str(k): normal(9, seed=k, dtype=dtype) for k, dtype in enumerate((FP32, BF16, FP64, FP32))}
    engine = Engine(values, device)
    before = [f.master.clone() for f in engine.fragments]
    for step in range(3):
        engine.run(grads_of(engine, step))
    assert engine.optimizer.steps.tolist() == [3, 3, 3, 3]
    assert [f.master.dtype for f in engine.fragments] == [FP32, BF16, FP64, FP32]
    assert not any((f.master == b).any() for f, b in zip(engine.fragments, before, strict=True))


def test_half_copies_for_some_of_a_group(device):
    """One group with fp32 gradients (accumulated, as in ZeRO-2): fp32 BatchNorm beside bf16 and fp16 weights."""
    for order in (("norm", "bf16", "fp16"), ("bf16", "fp16", "norm")):
        values = {name: normal(11, seed=k) for k, name in enumerate(order)}
        compare(Engine(values, device, half={"bf16": BF16, "fp16": FP16}))


def test_moments_and_counts_survive_moved_gradients(device):
    """What a bucket rebuild does: new gradient buffers, `own` again; the rest goes on where it was."""
    engine = Engine(values_of(), device)
    reference = Reference(engine)
    for step in range(4):
        reference.step(engine.run(grads_of(engine, step)))
        for f in reversed(engine.fragments):
            f.grad = torch.full_like(f.grad, torch.nan)
        engine.optimizer.own(engine.fragments)
    reference.check(engine)


@pytest.mark.parametrize("adamw, expected", [(True, 0.999), (False, 0.990)], ids=["AdamW", "Adam"])
def test_decay_decoupled_or_in_the_gradient(device, adamw, expected):
    """Case 75: p = 1, g = 0. AdamW multiplies by 1 - lr*wd; Adam sees a gradient of 0.1 and moves by lr."""
    engine = Engine({"p": torch.ones(1)}, device, lr=0.01, weight_decay=0.1, eps=1e-8, adamw=adamw)
    engine.run([torch.zeros(1)])
    assert engine.module.p.item() == pytest.approx(expected, rel=2e-7)  # fp32: eps / g = 1e-7 and one rounding


# ---- 2. parameters without a gradient ------------------------------------------------------------------------------


def test_late_first_gradient_moves_by_lr(device):
    """By 1.000 lr; with a step count that all share, 0.1 / (1 - 0.9^4) / sqrt(0.001 / (1 - 0.999^4)) = 0.58 lr."""
    engine = Engine({"early": torch.zeros(1), "late": torch.zeros(1)}, device, lr=0.01, weight_decay=0.0, eps=1e-8)
    for _ in range(3):
        engine.run([torch.ones(1), None])
    assert engine.module.late.item() == 0.0
    engine.run([torch.ones(1), torch.full((1,), 0.37)])
    assert engine.module.late.item() == pytest.approx(-0.01, rel=1e-6)  # g / (|g| + 1e-8), and fp32
    assert engine.optimizer.steps.tolist() == [4, 1]


@pytest.mark.parametrize("adamw", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("half", [None, BF16])
def test_absent_gradient_leaves_everything_alone(device, adamw, half):
    """No decay, no moments that fade, no step count, not one bit; the others go on."""
    engine = Engine(values_of([20000, 20000, 7]), device, weight_decay=0.5, adamw=adamw, half=half)
    reference = Reference(engine)
    reference.step(engine.run(grads_of(engine, 0)))
    f = engine.fragments[1]
    kept = [t for t in (f.master, f.exp_avg, f.exp_avg_sq, f.half) if t is not None]
    before = [t.clone() for t in kept]
    for step in (1, 2):
        first, _, last = grads_of(engine, step)
        reference.step(engine.run([first, None, last]))
        assert same(before, kept)
    assert engine.optimizer.steps.tolist() == [3, 1, 3]
    reference.step(engine.run(grads_of(engine, 3)))
    reference.check(engine)


def test_no_gradient_at_all(device):
    engine = Engine(values_of([5, 0]), device, weight_decay=0.5, max_norm=1.0)
    before = engine.tensors()
    engine.run([None, None])
    assert same(before, engine.tensors()) and engine.state(GRAD_NORM) == 0 and engine.state(SKIPPED) == 0


# ---- 3. norm and clip ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**-3])
def test_clip_3_4_5(device, scale):
    """Case 27; after one step exp_avg is (1 - beta1) times the gradient as clipped."""
    engine = Engine({"a": torch.ones(1), "b": torch.ones(1)}, device, max_norm=1.0, scale=scale)
    engine.run([torch.tensor([3.0]), torch.tensor([4.0])])
    clipped = [f.exp_avg.item() / (1 - 0.9) for f in engine.fragments]
    assert clipped == pytest.approx([0.6, 0.8], rel=5e-7)  # 1e-6 / 5 from the clip, fp32 for the rest
    assert engine.state(GRAD_NORM) == 5.0 and engine.state(FACTOR) == pytest.approx(0.2 / scale, rel=3e-7)


def test_norm_below_max_changes_no_bit(device):
    without, with_ = (Engine(values_of(), device, max_norm=m) for m in (0.0, 1000.0))
    for step in range(3):
        for engine in (without, with_):
            engine.run(grads_of(engine, step))
    assert 500 < with_.state(GRAD_NORM) < 1000 and with_.state(FACTOR) == 1.0
    assert same(without.tensors(), with_.tensors())


@pytest.mark.parametrize("grad_dtype, half", [(FP32, None), (FP16, FP16)])
def test_a_power_of_two_as_scale_changes_no_bit(device, grad_dtype, half):
    """Case 25: unscale, then clip, each once. Gradients between 2^-10 and 2^3, so that 1024 times them fits fp16."""
    engines = [Engine(values_of(), device, grad_dtype=grad_dtype, half=half, max_norm=1.0, scale=scale)
               for scale in (1.0, 1024.0)]
    for step in range(3):
        for engine in engines:
            engine.run([g.abs().clamp(2**-10, 8) * g.sign() for g in grads_of(engine, step)])
    assert engines[0].state(FACTOR) < 0.01 and engines[0].state(GRAD_NORM) == engines[1].state(GRAD_NORM)
    assert same(engines[0].tensors(), engines[1].tensors())


@pytest.mark.parametrize("grad_dtype", [FP32, BF16])
def test_norm_of_five_million(device, grad_dtype):
    """One running sum in fp32 would lose 3e-4 here; pieces, added in float64, keep 1e-6. The squares of bf16 numbers
    have many zero bits, so sums of them often lie between two fp32 numbers and rounding has a bias: 1.6e-6 seen."""
    engine = Engine({"big": torch.zeros(5_000_003), "small": torch.zeros(3)}, device, grad_dtype=grad_dtype)
    (big, small) = engine.run([1 + normal(5_000_003), torch.ones(3)])
    expected = (big.square().sum() + small.square().sum()).sqrt().item()
    assert engine.state(GRAD_NORM) == pytest.approx(expected, rel=1e-6 if grad_dtype == FP32 else 4e-6)


# ---- 4. overflow and the loss scale --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("grad_dtype, half", [(FP32, None), (FP16, FP16), (FP64, None)])
def test_overflow_skips_everything(device, bad, grad_dtype, half):
    """Case 23: one bad element, the last one of the last tensor; no bit of any tensor changes, the scale halves."""
    values = values_of([70000, 5, 4095], dtype=FP64 if grad_dtype == FP64 else FP32)
    engine = Engine(values, device, grad_dtype=grad_dtype, half=half, max_norm=1.0, scale=64.0, dynamic=True)
    reference = Reference(engine)
    reference.step(engine.run(grads_of(engine, 0)), max_norm=1.0)
    before = engine.tensors()
    for k in (1, 2):
        grads = grads_of(engine, k)
        grads[-1][-1] = bad
        engine.run(grads)
        assert same(before, engine.tensors())
        assert [engine.state(place) for place in COUNTERS] == [64.0 / 2**k, 0, 1, k, k]
        assert not torch.tensor(engine.state(GRAD_NORM)).isfinite()
    reference.step(engine.run(grads_of(engine, 3)), max_norm=1.0)
    assert [engine.state(place) for place in COUNTERS] == [16, 1, 0, 2, 0]
    reference.check(engine)


def scales(device, finite: str, **rule) -> list[float]:
    """The scale after each step: "." a finite one, "x" an overflow."""
    engine, found = Engine({"p": torch.zeros(2)}, device, **rule), []
    for step in finite:
        engine.run([torch.full((2,), 0.5 if step == "." else torch.inf)])
        found.append(engine.state(SCALE))
    return found


def test_scale_grows_backs_off_and_stays_in_its_limits(device):
    def rule(**limits):
        return dict(dynamic=True, rule=dict(interval=3, **limits))
    assert scales(device, "......", scale=4.0, **rule()) == [4, 4, 8, 8, 8, 16]
    assert scales(device, "..x...", scale=4.0, **rule()) == [4, 4, 2, 2, 2, 4]  # an overflow starts the count anew
    assert scales(device, "......", scale=4.0, **rule(ceiling=6.0)) == [4, 4, 6, 6, 6, 6]
    assert scales(device, "xxx", scale=4.0, **rule(floor=1.5)) == [2, 1.5, 1.5]
    assert scales(device, "...x", scale=9.0, **rule(growth=3.0, backoff=0.1)) == pytest.approx([9, 9, 27, 2.7])
    assert scales(device, "....xx..", scale=4.0, dynamic=False, rule=dict(interval=3)) == [4] * 8


def test_rule_of_200_random_steps(device):
    """The engine's counters beside LossScale.update on the CPU (on a GPU, adam_prepare has the rule again) and beside
    the rule in plain Python. Both limits are reached: about 30 % overflows, growth after 2 finite steps."""
    rule = dict(interval=2, floor=1.0, ceiling=64.0)
    engine = Engine({"p": torch.zeros(1)}, device, scale=8.0, dynamic=True, rule=rule)
    on_cpu = LossScale(torch.device("cpu"), 8.0, True, **rule)
    scale, good, total, row = 8.0, 0, 0, 0
    draw, seen = random.Random(0), set()
    for step in range(200):
        skip = draw.random() < 0.3
        engine.run([torch.tensor([torch.inf if skip else 1.0])])
        on_cpu.update(torch.tensor(skip))
        good, total, row = (0, total + 1, row + 1) if skip else (good + 1, total, 0)
        scale = max(1.0, scale / 2) if skip else scale
        if good == 2:
            scale, good = min(64.0, 2 * scale), 0
        assert engine.scaler.state[:5].tolist() == on_cpu.state[:5].tolist() == [scale, good, skip, total, row], step
        seen.add(scale)
    assert seen == {1, 2, 4, 8, 16, 32, 64}
    assert engine.optimizer.steps.item() == 200 - total


def test_forty_overflows_in_a_row_raise(device):
    """Case 26. On a GPU it is read from a copy that nobody waits for; the ring of 4 slots bounds how late."""
    engine = Engine({"p": torch.zeros(1)}, device, scale=2.0**16, dynamic=True, rule=dict(floor=0.25))
    message = r"4\d steps in a row skipped, 4\d in all: .* not finite even at loss scale 0.25 \(floor 0.25\)"
    calls = 0
    with pytest.raises(RuntimeError, match=message):
        for calls in range(1, 60):  # noqa: B007
            engine.run([torch.full((1,), torch.nan)])
    assert calls == 40 if device.type == "cpu" else 40 <= calls <= 46


def test_a_finite_step_in_between_is_enough(device):
    engine = Engine({"p": torch.zeros(1)}, device, dynamic=True)
    for _ in range(2):
        for _ in range(39):
            engine.run([torch.full((1,), torch.inf)])
        engine.run([torch.ones(1)])
    if device.type == "cuda":
        torch.cuda.synchronize()
    engine.scaler.raise_if_stuck()
    assert engine.state(SKIPPED_STEPS) == 78 and engine.state(SKIPPED_IN_A_ROW) == 0


# ---- 5. a real torch optimizer: schedulers and refusals ------------------------------------------------------------


@pytest.mark.parametrize("schedule", [
    lambda optimizer: LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=8),  # cycles betas[0] too
], ids=["LambdaLR", "OneCycleLR"])  # fmt: skip
def test_schedulers_attach_and_every_change_is_seen(device, schedule):
    """Case 19: torch with the same scheduler, step by step; any warning is an error."""
    groups = [dict(params=["p1_3"], lr=0.1), dict(params=["p0_70000"], lr=0.05)]
    engine = Engine(values_of([70000, 3]), device, groups=groups)
    reference = Reference(engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [schedule(optimizer) for optimizer in (engine.optimizer, *reference.optimizers)]
        seen = set()
        for step in range(6):
            reference.step(engine.run(grads_of(engine, step)))
            seen.add((engine.optimizer.param_groups[0]["lr"], engine.optimizer.param_groups[0]["betas"][0]))
            for scheduler in schedulers:
                scheduler.step()
            reference.check(engine)
    assert len(seen) == 6


def test_quick_changes_of_lr_stay_in_their_step(device):
    """20 steps are enqueued while the GPU sleeps. A pinned slot written again too early would give a step the lr of
    a later one; here these differ by factors."""
    engine = Engine(values_of([5, 20000]), device, weight_decay=0.0)
    reference = Reference(engine)
    grads = [[grad.to(device) for grad in grads_of(engine, 0)] for _ in range(20)]
    arrived = engine.give(grads[0])  # warm-up for what allocates
    engine.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)  # about half a second
    for step in range(20):
        lr = 0.1 * 2.0 ** -(step % 7)
        engine.optimizer.param_groups[0]["lr"] = reference.optimizers[0].param_groups[0]["lr"] = lr
        for f, grad in zip(engine.fragments, grads[step], strict=True):
            f.grad.copy_(grad)
            engine.optimizer.present[f.index] = 1
        engine.optimizer.step()
        reference.step(arrived)
    reference.check(engine)


def test_refusals(device):
    engine = Engine(values_of([3]), device)
    adam = engine.optimizer
    with pytest.raises(RuntimeError, match="param groups are fixed when the engine is built"):
        adam.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="closures are not supported"):
        adam.step(lambda: 0.0)
    stray = nn.Parameter(torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"not the model's parameters, of shapes \[\(4, 5\)\]"):
        Adam(engine, [*engine.module.parameters(), stray], HYPER, 0.0, engine.scaler)
    assert len(adam.param_groups) == 1 and isinstance(adam, torch.optim.Optimizer)
    assert adam.param_groups[0]["params"][0] is engine.module.p0_3


def test_frozen_parameters_are_left_out(device):
    """Case 11: they may stand in a group; they get no moments, no place in the tables, and no bit changes."""
    engine = Engine(values_of([6, 4]), device)
    engine.module.p0_6.requires_grad_(False)
    adam = Adam(engine, None, HYPER, 0.0, engine.scaler)
    assert adam.names == ["p1_4"] and len(adam.present) == 1 and adam.steps.shape == (1,)
    assert [len(g["params"]) for g in adam.param_groups] == [2]


# ---- 6. only the kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype, half", [(FP32, None), (BF16, BF16), (FP16, FP16)])
def test_five_runs_give_the_same_bits(gpu, grad_dtype, half):
    def run():
        engine = Engine(values_of(), gpu, grad_dtype=grad_dtype, half=half, max_norm=1.0)
        for step in range(3):
            engine.run(grads_of(engine, step))
        return [*engine.tensors(), engine.scaler.state.clone()]
    first = run()
    assert all(same(first, run()) for _ in range(4))


@pytest.mark.parametrize("kinds", [
    ("master",), ("grad",), ("exp_avg",), ("exp_avg_sq",), ("half",),
    ("master", "grad", "exp_avg", "exp_avg_sq", "half"),
], ids="+".join)  # fmt: skip
@pytest.mark.parametrize("grad_dtype, half", [(FP32, BF16), (BF16, BF16), (FP16, FP16)])
def test_an_address_changes_no_bit(gpu, grad_dtype, half, kinds):
    """Vector and scalar path; otherwise replicas whose buffers lie differently would part."""
    engines = [Engine(values_of(), gpu, grad_dtype=grad_dtype, half=half, max_norm=1.0, offsets=offsets)
               for offsets in (None, dict.fromkeys(kinds, 1))]
    for step in range(3):
        for engine in engines:
            engine.run(grads_of(engine, step))
    assert same(engines[0].tensors(), engines[1].tensors())
    assert torch.equal(engines[0].scaler.state, engines[1].scaler.state)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_never_waits(gpu):
    """Twice: by torch's own alarm, and by a GPU that is still asleep when the host has enqueued 3 of the 4 slots."""
    engine = Engine(values_of(), gpu, grad_dtype=FP16, half=FP16, max_norm=1.0, dynamic=True)
    engine.run(grads_of(engine, 0))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(10**9)
        for _ in range(3):
            engine.optimizer.present[:] = bytes([1] * len(engine.fragments))
            engine.optimizer.step()
        asleep = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert asleep, "the host waited for the GPU"
    assert engine.optimizer.steps.tolist() == [4] * len(engine.fragments)


def test_a_parameter_on_the_cpu_beside_one_on_the_gpu(gpu):
    """Offload: the fragment's tensors are CPU tensors, flag and hyperparameters are the GPU's."""
    engine = Engine(values_of([70000, 20000]), gpu, max_norm=1.0)
    reference = Reference(engine)
    moved = engine.fragments[1]
    moved.master, moved.grad, moved.exp_avg, moved.exp_avg_sq = (
        t.cpu() for t in (moved.master, moved.grad, moved.exp_avg, moved.exp_avg_sq))
    engine.optimizer.own(engine.fragments)
    for step in range(3):
        grads = grads_of(engine, step)
        engine.give([grads[0], None])
        moved.grad.copy_(grads[1])
        engine.optimizer.present[1] = 1
        engine.optimizer.step()
        reference.step([g.double() for g in grads], max_norm=1.0)
    reference.check(engine)


@pytest.mark.sweep
@pytest.mark.parametrize("grad_dtype, half", [(BF16, BF16), (FP32, None)])
def test_more_than_2_to_the_31_elements(gpu, grad_dtype, half):
    """Case 73: 16 B per element, 34 GB, and scratch. Each gradient is 1 or -1 by chance, so an element that met another one's
    would move the wrong way, and one that was left out, or updated twice, not by lr. 5 past 2^31: a tail of one."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip(f"needs 60 GB of free GPU memory, {torch.cuda.mem_get_info()[0] / 1e9:.0f} GB are free")
    numel, lr = 2**31 + 5, 0.25
    master, grad = torch.zeros(numel, device=gpu), torch.empty(numel, dtype=grad_dtype, device=gpu)
    grad.bernoulli_(0.5).mul_(2).sub_(1)
    p = nn.Parameter(torch.zeros(numel, dtype=half, device=gpu) if half else master)
    engine = Engine({"tiny": torch.zeros(1)}, gpu)
    engine.module.register_parameter("big", p)
    fragment = Fragment("big", 1, (numel,), ((slice(0, numel),),), 0, numel, master, grad, p.data if half else None)
    engine.optimizer = Adam(engine, None, {**HYPER, "lr": lr, "eps": 1e-8}, 0.0, engine.scaler)
    engine.fragments[0].grad.fill_(1.0)
    engine.fragments.append(fragment)
    engine.optimizer.own(engine.fragments)
    engine.optimizer.present[:] = bytes([1, 1])
    engine.optimizer.step()
    if half:
        assert torch.equal(p, grad * -lr)
    error = grad.float().mul_(lr).add_(master).abs_().max()
    assert error < 1e-6 * lr, f"{error.item()} off"
    assert engine.state(GRAD_NORM) == pytest.approx((numel + 1) ** 0.5, rel=1e-12)  # sums of 64 ones are exact
    del engine, fragment, master, grad, p
    torch.cuda.empty_cache()


SANITIZED = """
import torch
from test_adam import BF16, FP16, FP32, Engine, grads_of, values_of

for grad_dtype, half in ((FP32, None), (BF16, BF16), (FP16, FP16)):
    for offsets in (None, dict(master=1, grad=1, exp_avg=2, exp_avg_sq=3, half=1)):
        engine = Engine(values_of(), torch.device("cuda", 0), grad_dtype=grad_dtype, half=half, offsets=offsets, max_norm=1.0,
                        scale=4.0, dynamic=True)
        for step in range(2):
            engine.run(grads_of(engine, step))
        torch.cuda.synchronize()
        assert engine.optimizer.cuda and engine.optimizer.steps.tolist() == [2] * len(engine.fragments)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("tool, clean", [
    ("memcheck", "ERROR SUMMARY: 0 errors"), ("racecheck", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"),
])  # fmt: skip
def test_compute_sanitizer(gpu, tool, clean):
    """Our four kernels alone, all sizes and dtypes, aligned or not. Without torch's cache each tensor is an allocation of its own,
    so that one element too far is outside. 11 s each on an H200. (initcheck would have to follow torch's kernels, too.)"""
    from torch.utils import cpp_extension

    sanitizer = shutil.which("compute-sanitizer") or os.path.join(cpp_extension.CUDA_HOME or "", "bin", "compute-sanitizer")
    if not os.path.exists(sanitizer):
        pytest.skip("no compute-sanitizer")
    paths = [os.path.dirname(ddp.__file__), os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ours = "kns=adam_cuda_cu"  # part of their mangled names: of a namespace without a name, nvcc makes one of the file's
    done = subprocess.run([sanitizer, "--tool", tool, "--kernel-name", ours, sys.executable, "-c", SANITIZED],
                          env=env, text=True, capture_output=True, timeout=280)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and clean in output, output[-4000:]


# ---- 7. building adam_cuda.cu, and doing without -------------------------------------------------------------------


def adam_lines(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("adam: ")]


def test_without_a_gpu_it_says_so_once(capsys):
    ddp.adam_library.cache_clear()
    for _ in range(3):
        assert Engine(values_of([3]), torch.device("cpu")).optimizer.cuda is False
    assert adam_lines(capsys) == ["adam: torch's fused Adam instead of adam_cuda.cu: no GPU"]


@pytest.fixture
def a_gpu_to_build_for(monkeypatch, tmp_path):
    """Nothing is built or launched in these tests, so where there is no GPU its architecture is enough."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("PATH", os.environ["PATH"])  # adam_library appends to it: put back afterwards
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return torch.device("cuda", 0)


def test_without_the_source_it_falls_back(a_gpu_to_build_for, monkeypatch, tmp_path, capsys):
    """ddp.py copied alone into another project."""
    monkeypatch.setattr(ddp, "__file__", str(tmp_path / "ddp.py"))
    assert ddp.adam_library.__wrapped__(a_gpu_to_build_for) is False
    (line,) = adam_lines(capsys)
    assert "instead of adam_cuda.cu" in line and str(tmp_path / "adam_cuda.cu") in line


def test_without_nvcc_it_falls_back(a_gpu_to_build_for, monkeypatch, tmp_path, capsys):
    from torch.utils import cpp_extension

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert ddp.adam_library.__wrapped__(a_gpu_to_build_for) is False
    assert len(adam_lines(capsys)) == 1


def test_where_it_may_not_write_it_falls_back(a_gpu_to_build_for, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "below"))
    assert ddp.adam_library.__wrapped__(a_gpu_to_build_for) is False
    assert len(adam_lines(capsys)) == 1


BUILD = """
import torch, ddp
{patch}
assert ddp.adam_library(torch.device("cuda", 0)), "fell back"
print("loaded", flush=True)
"""


def build(extensions: Path) -> subprocess.Popen:
    """A process that builds or loads the library; its own session, so that it can be ended with its compilers."""
    patch = "" if torch.cuda.is_available() else "torch.cuda.get_device_capability = lambda device=None: (9, 0)"
    path = os.pathsep.join([os.path.dirname(ddp.__file__), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(extensions), "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", BUILD.format(patch=patch)], env=env, text=True,
                            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_killed_build_then_two_at_once(gpu, tmp_path):
    """Case 77. kill -9 leaves torch's lock file, on which torch itself would wait for ever; then two processes start
    on this folder: one compiles, the other waits, so ninja's log has each file once; a third finds all done."""
    first = build(tmp_path)
    deadline = time.monotonic() + 120
    while not (locks := list(tmp_path.glob("adam_cuda_*/lock"))):
        assert first.poll() is None and time.monotonic() < deadline, "torch's lock file was never seen"
        time.sleep(0.001)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    (lock,) = locks
    lock.touch()  # there already, unless the build was over before the signal
    for left in lock.parent.glob("*.so"):
        left.unlink()
    both = [build(tmp_path) for _ in range(2)]
    try:
        for process in both:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0 and output.rstrip().endswith("loaded"), output
        built = [line.split("\t")[3] for line in (lock.parent / ".ninja_log").read_text().splitlines()[1:]]
        assert sorted(built) == ["adam_cuda.cuda.o", "adam_cuda.so"], built
        library, done = lock.parent / "adam_cuda.so", [build(tmp_path)]
        both += done
        mtime = library.stat().st_mtime_ns
        output, _ = done[0].communicate(timeout=120)
        assert done[0].returncode == 0 and library.stat().st_mtime_ns == mtime, output
    finally:
        for process in both:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_tensors_go_in_pieces(dtype):
    """torch's Adam on CPUs gets a million elements at a time: a matrix of 1.2 million and many small ones, three steps,
    beside torch's own over whole tensors. The pieces are of whole vector registers, so not a bit differs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1100, 1100), *[nn.Linear(7, 5) for _ in range(9)]).to(dtype)
    plain = copy.deepcopy(model)
    engine = ddp.DDP(model, precision="fp32", lr=0.01, weight_decay=0.1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    cut = [len(batch) for rows in engine.optimizer.calls.values() for batch in engine.optimizer._cut(rows)]
    assert len(cut) == 2 and sum(cut) == 21  # the matrix in two, its bias, eighteen small ones
    for _ in range(3):
        engine.backward(sum(p.square().sum() * (1 + i) for i, p in enumerate(model.parameters())))
        sum(p.square().sum() * (1 + i) for i, p in enumerate(plain.parameters())).backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
