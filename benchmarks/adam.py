"""The optimizer step of our engines on a GPU: its share of the rate at which that GPU copies, and torch's own parts beside it.

    python benchmarks/adam.py                                    # GPT-2 XL, BERT-base, ResNet-18; fp32 and bf16 gradients
    python benchmarks/adam.py --work resnet18 --profile          # and how long each kernel takes

ours    what every engine does in `step`: hyperparameters and presence bytes to the device, norm, overflow check, clip, AdamW,
        half copy; all of it in four kernels of adam_cuda.cu. Layout "separate": every parameter has tensors of its own, as in
        ddp.py, with a half copy beside the master. Layout "zero": the fragments of rank 0 of two under zero.py, stage 2, in a
        process group in which only this rank exists (torch's "fake" backend): a real engine, whose collectives do nothing. fp32
        gradients are then those that it adds up over micro-batches.
torch   the same by torch's parts, over tensors of the same sizes: (bf16 gradients: copied to fp32,) unscaled and checked as
        GradScaler does, clip_grad_norm_, fused AdamW, _foreach_copy_ to bf16. No part of it waits for the GPU.
copy    device to device, bytes read and written: of 4 GiB, and of as many bytes as our step moves (at most 4 GiB), since what
        is left in the L2 cache at the end counts for much where a step moves little. Shares are of the second.

Bytes per element: gradient read twice (norm, update), master and two moments read and written, half copy written; for torch what
each part reads and writes. All in turn, medians of `--steps`. ms: the GPU's own time, between events, with the host ahead (the
GPU is kept busy until all is launched) and nothing of it in the L2 cache, through which a buffer of 256 MiB is read before.
latency: from an idle GPU, what the host needs to launch it included. Prints one table; --json appends a line for each row.
"""
import argparse
import collections
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import time
from datetime import date

import torch
import torch.distributed as dist
import transformers
from plot import commit
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, ".."))
from zero import Adam, Fragment, LossScale, Zero  # noqa: E402

GIB = 2**30
CLOCKS_PER_MS = 2e6  # of torch.cuda._sleep: at most 2 GHz, where a clock is slower it sleeps longer
HYPER = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


# ---- what is updated ---------------------------------------------------------------------------------------------------


def model_of(work):
    """On `meta`: of a model's own values nothing is needed."""
    with torch.device("meta"):
        if work == "gpt2-xl":
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25))
        if work == "bert-base":
            return transformers.BertForSequenceClassification(transformers.BertConfig())
        from torchvision.models import resnet18
        return resnet18(num_classes=10)


WORKS = ("gpt2-xl", "bert-base", "resnet18")
GRADS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Separate:
    """The least that class Adam needs of an engine, over a tensor of each kind for each parameter."""

    def __init__(self, model, device, grad_dtype):
        self.module = nn.Module()
        new = lambda p, dtype: torch.empty(p.shape, dtype=dtype, device=device)
        for name, p in model.named_parameters():
            self.module.register_parameter(name.replace(".", "/"), nn.Parameter(new(p, torch.bfloat16)))
        self.scaler = LossScale(device, 1.0, False)
        self.optimizer = Adam(self, None, {**HYPER, "adamw": True}, 1.0, self.scaler)
        self.fragments = [Fragment(name, i, tuple(p.shape), (tuple(map(slice, p.shape)),), 0, p.numel(),
                                   new(p, torch.float32), new(p, grad_dtype), p.data)
                          for i, (name, p) in enumerate(self.module.named_parameters())]
        self.optimizer.own(self.fragments)


@contextlib.contextmanager
def rank_0_of(world_size):
    """A process group of which only this rank exists: what it sends goes nowhere, and what it receives stays as it was."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(model, device, grad_dtype):
    """A Zero engine as on rank 0 of two. Of another backend than NCCL it fills buckets to two thirds only: 37.5 makes 25 of it."""
    model.to_empty(device=device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # GPT-2's head is its embedding; to_empty has made two of it
    with rank_0_of(2):
        engine = Zero(model, precision="bf16", stage=2, bucket_mb=37.5, max_norm=1.0, **HYPER)
        engine._point_at_gradients(accumulate=grad_dtype == torch.float32)
    return engine


def fill(tensors):
    """With random numbers: on zeros a GPU can be faster."""
    for t in tensors:
        t.normal_(0, 1e-3)


def ours(engine):
    """The step, and the bytes that it moves by the formula."""
    adam = engine.optimizer
    fill(t for f in engine.fragments for t in (f.master, f.grad))

    def step():
        adam.present[:] = b"\1" * len(adam.params)
        adam.send_hyperparameters()
        adam.send_presence()
        adam.square_sum()
        adam.update()
    per_element = lambda f: 24 + 2 * f.grad.element_size() + (0 if f.half is None else f.half.element_size())
    return step, sum(f.master.numel() * per_element(f) for f in engine.fragments)


def torch_parts(fragments, device):
    """The same of tensors of the same sizes."""
    params = [nn.Parameter(torch.empty(f.master.numel(), device=device)) for f in fragments]
    halves = [torch.empty_like(p, dtype=torch.bfloat16) for p, f in zip(params, fragments) if f.half is not None]
    of_halves = [p for p, f in zip(params, fragments) if f.half is not None]
    fill([p.data for p in params])
    for p in params:
        p.grad = torch.empty_like(p)
    half = [(p.grad, torch.empty_like(p, dtype=f.grad.dtype)) for p, f in zip(params, fragments) if f.grad.dtype != p.dtype]
    fill([half_grad for _, half_grad in half] + [p.grad for p in params])
    optimizer = torch.optim.AdamW(params, fused=True, **HYPER)
    grads, scale_inverse = [p.grad for p in params], torch.ones((), device=device)
    optimizer.found_inf = found_inf = torch.zeros((), device=device)  # as GradScaler hands it to fused optimizers

    def step():
        if half:
            torch._foreach_copy_(*map(list, zip(*half)))
        found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, scale_inverse)
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        torch._foreach_copy_(halves, of_halves)
    # unscale 8, norm 4, clip 8, AdamW 28; to the half copy 4 + 2; from half gradients 2 + 4
    return step, sum(48 * p.numel() for p in params) + sum(6 * p.numel() for p in of_halves) + sum(6 * g.numel() for g, _ in half)


def copy_of(n_bytes, device):
    """Copies so that n_bytes are moved, half of them read, half written."""
    numel = n_bytes // 8
    source, to = (torch.empty(numel, device=device).normal_() for _ in range(2))
    return lambda: to.copy_(source)


# ---- time --------------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, device):
        self.buffer, self.sleep_ms = torch.ones(256 * 2**20 // 4, device=device), collections.defaultdict(lambda: 1.0)

    def gpu_ms(self, step):
        """Between events on the GPU, which sleeps until the host has launched all; with a longer sleep again if it woke before."""
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.buffer.sum()
            torch.cuda._sleep(int(self.sleep_ms[step] * CLOCKS_PER_MS))
            begin.record()
            step()
            end.record()
            late = begin.query()
            torch.cuda.synchronize()
            if not late:
                return begin.elapsed_time(end)
            self.sleep_ms[step] *= 2

    def latency_ms(self, step):
        self.buffer.sum()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3


def in_turn(clock, steps, times):
    """{name: (median GPU ms, median latency)} of {name: step}."""
    measured = {name: ([], []) for name in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(times):
        for name, step in steps.items():
            measured[name][0].append(clock.gpu_ms(step))
            measured[name][1].append(clock.latency_ms(step))
    return {name: tuple(map(statistics.median, pair)) for name, pair in measured.items()}


def profile(clock, step, times):
    """{kernel: (median microseconds, times in a step)} of what the GPU does in a step, of all from begin to end, and of gaps."""
    kernels = collections.defaultdict(list)
    for _ in range(times):
        clock.buffer.sum()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as prof:
            torch.cuda._sleep(int(clock.sleep_ms[step] * CLOCKS_PER_MS))
            step()
            torch.cuda.synchronize()
        events = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA and "spin_kernel" not in e.name]
        for e in events:
            name = next((k for k in ("square_sums", "total", "prepare", "update") if f"{k}_kernel" in e.name), e.name)
            kernels[name].append(e.time_range.end - e.time_range.start)
        first, last = min(e.time_range.start for e in events), max(e.time_range.end for e in events)
        kernels["first to last"].append(last - first)
        kernels["between them"].append(last - first - sum(e.time_range.end - e.time_range.start for e in events))
    return {name: (statistics.median(us), len(us) / times) for name, us in kernels.items()}


# ---- the table ---------------------------------------------------------------------------------------------------------


HEAD = ("model      layout    grads  tensors  M elements | TB/s: 4 GiB   same | ours: B/el       ms   TB/s  share"
        " | torch: B/el       ms  ratio | latency: ours   torch  ratio")


def line(r):
    return (f"{r['work']:11}{r['layout']:10}{r['grads']:5}{r['tensors']:9}{r['numel'] / 1e6:12.2f} |{r['large_copy_tbs']:12.3f}"
            f"{r['copy_tbs']:7.3f} |{r['bytes'] / r['numel']:11.1f}{r['ms']:9.3f}{r['tbs']:7.3f}{r['share']:7.1%} |"
            f"{r['torch_bytes'] / r['numel']:12.1f}{r['torch_ms']:9.3f}{r['ratio']:7.2f} |"
            f"{r['latency_ms']:14.3f}{r['torch_latency_ms']:8.3f}{r['latency_ratio']:7.2f}")


def measure(work, layout, grads, large, args, device):
    clock = Clock(device)
    engine = {"separate": Separate, "zero": sharded}[layout](model_of(work), device, GRADS[grads])
    assert engine.optimizer.cuda, "adam_cuda.cu does not run here"
    numel = sum(f.master.numel() for f in engine.fragments)
    step, n_bytes = ours(engine)
    theirs, their_bytes = torch_parts(engine.fragments, device)
    moved = min(n_bytes, 4 * GIB)
    found = in_turn(clock, {"large": large, "copy": copy_of(moved, device), "ours": step, "torch": theirs}, args.steps)
    tbs = lambda n, name: n / found[name][0] / 1e9
    row = dict(work=work, layout=layout, grads=grads, tensors=len(engine.fragments), numel=numel, bytes=n_bytes,
               ms=found["ours"][0], tbs=tbs(n_bytes, "ours"), copy_tbs=tbs(moved, "copy"), large_copy_tbs=tbs(4 * GIB, "large"),
               torch_bytes=their_bytes, torch_ms=found["torch"][0], latency_ms=found["ours"][1], torch_latency_ms=found["torch"][1])
    row |= dict(share=row["tbs"] / row["copy_tbs"], share_of_large=row["tbs"] / row["large_copy_tbs"],
                ratio=row["torch_ms"] / row["ms"], latency_ratio=row["torch_latency_ms"] / row["latency_ms"])
    print(line(row), flush=True)
    if args.profile:
        row["profile_us"] = profile(clock, step, min(args.steps, 10))
        for name, (us, count) in row["profile_us"].items():
            print(f"    {name:40.40}{us:10.2f} us  x {count:.0f}", flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=WORKS, help="whose shapes (all)")
    parser.add_argument("--layout", nargs="+", choices=["separate", "zero"], default=["separate", "zero"], help="(both)")
    parser.add_argument("--grads", nargs="+", choices=GRADS, default=list(GRADS), help="dtype of the gradients (both)")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each (30)")
    parser.add_argument("--profile", action="store_true", help="the time of each kernel of ours, too (off)")
    default = os.path.join(HERE, "results", "adam.jsonl")
    parser.add_argument("--json", nargs="?", const=default, metavar="FILE", help="append rows to a file (off; adam.jsonl)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/adam.py measures adam_cuda.cu: it needs a GPU")
    device = torch.device("cuda", 0)
    where = dict(machine=torch.cuda.get_device_name(), torch=torch.__version__, cuda=torch.version.cuda, commit=commit(),
                 command=" ".join(["python benchmarks/adam.py", *sys.argv[1:]]), date=str(date.today()))
    print(", ".join(f"{key} {value}" for key, value in where.items() if key != "command"), f"medians of {args.steps}", sep=", ")
    print(HEAD, flush=True)
    large = copy_of(4 * GIB, device)
    for case in itertools.product(args.work, args.layout, args.grads):
        row = measure(*case, large, args, device)
        if args.json:
            with open(args.json, "a") as f:
                f.write(json.dumps({**row, **where}) + "\n")
        gc.collect()  # an engine is a cycle


if __name__ == "__main__":
    main()
