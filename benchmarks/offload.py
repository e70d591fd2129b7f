"""GPT-2 XL under a memory budget on one GPU: gemini.py beside FSDP2 and DeepSpeed with CPU offload, and beside plain torch.

    python benchmarks/offload.py                                  # the table
    python benchmarks/offload.py --rows gemini:19.4 fsdp2 deepspeed3 plain --checkpoint 0 1
    python benchmarks/offload.py --largest                        # the largest GPT that each can train

Engines: gemini:GIB (device_budget of so many GiB), gemini:all (whatever is free), gemini:offload (everything in host memory),
fsdp2 (torch's, CPUOffloadPolicy, fused AdamW on the CPU), fsdp2:unclipped, deepspeed3 (ZeRO-3, parameters and optimizer on the
CPU), plain (torch under autocast, nothing offloaded). All train the same weights on the same batch in bf16, AdamW, clipping at 1.

Each row is a process of its own, one after the other, so memory of one is not in the next one's way. Three steps to warm up,
then `--steps` measured ones. fwd+bwd: until the GPU is through with backward. peak: the most that torch had allocated on the GPU
in the measured steps. RSS: the most host memory resident in the process, construction included. For gemini: chunks whose
optimizer is on the GPU, of all; gathers in the last step and as planned; GB that it moved to and from the GPU. A row that fails,
takes longer than `--limit`, or nears the end of host memory prints why, and the next one starts. Engines print to stderr.
"""
import argparse
import contextlib
import ctypes
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from datetime import date

import torch
import torch.distributed as dist

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, ".."))
from gemini import NEVER, Gemini  # noqa: E402

GIB = 2**30
ADAM = dict(lr=1e-4, weight_decay=0.01)
ROWS = [("gemini:19.4", 0), ("gemini:24", 0), ("gemini:32", 0), ("gemini:48", 0), ("gemini:all", 0), ("gemini:19.4", 1),
        ("fsdp2", 0), ("fsdp2:unclipped", 0), ("deepspeed3", 0), ("plain", 0)]
MARGIN = 0.94  # of host memory: a process is ended before the system does it, perhaps to another one
# Where `--largest` begins, bytes per parameter. plain, on the GPU: fp32 weights, gradients, two moments. gemini: those on the GPU
# and in host memory together. The others: in host memory, where torch rounds pinned tensors to powers of two.
FIRST_GUESS = {"plain": dict(device=16), "gemini": dict(both=17)}
SPAWN = multiprocessing.get_context("spawn")


# ---- what is trained ---------------------------------------------------------------------------------------------------


def build(job, device):
    """GPT-2 with GPT-2's initial values, made on the device, where random numbers take no time; and a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    config = GPT2Config(n_embd=job["width"], n_layer=job["layers"], n_head=job["heads"], n_positions=max(1024, job["length"]),
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    # Of the largest models not even the GPU has room for fp32 weights beside the rest. Gemini's masters are fp32 either way.
    torch.set_default_dtype(torch.bfloat16 if job["largest"] and job["engine"].startswith("gemini") else torch.float32)
    with device:
        model = GPT2LMHeadModel(config)
    torch.set_default_dtype(torch.float32)
    if job["checkpoint"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    tokens = torch.randint(50257, (job["batch"], job["length"]), generator=torch.Generator().manual_seed(0)).to(device)
    return model, dict(input_ids=tokens, labels=tokens)


# ---- engines: each returns step(batch, mark) -> loss, which calls mark() between backward and the optimizer ----------------


def gemini(model, knob, device):
    knobs = dict(offload=True) if knob == "offload" else {} if knob == "all" else dict(device_budget=int(float(knob) * GIB))
    engine = Gemini(model, precision="bf16", max_norm=1.0, device=device, **ADAM, **knobs)

    def step(batch, mark):
        before = sum(chunk.gathers for chunk in engine.chunks)
        loss = engine.forward_backward(batch)
        mark()
        engine.step()
        step.gathers = sum(chunk.gathers for chunk in engine.chunks) - before
        return loss

    def facts():
        budget = engine.plan.budget / GIB if engine.placement == "auto" and engine.plan.budget < NEVER else None
        return dict(chunks=len(engine.chunks), on_gpu=sum(chunk.on_device for chunk in engine.chunks), budget_gib=budget,
                    gathers=step.gathers, planned=sum(engine._simulate().gathers.values()),
                    to_device_gb=engine.traffic.get("to_device", 0) / 1e9, to_host_gb=engine.traffic.get("to_host", 0) / 1e9)
    step.facts = facts
    return step


def torch_step(model, optimizer, device, autocast=False, clip=True):
    def step(batch, mark):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        mark()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    return step


def plain(model, knob, device):
    """As "plain torch" in step.py: fp32 weights under autocast, torch's fused AdamW."""
    return torch_step(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM), device, autocast=True)


def join_group(device, backend):
    """A group of this process alone."""
    dist.init_process_group(backend if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)


def fsdp2(model, knob, device):
    """fully_shard around each block and the rest, with CPUOffloadPolicy; torch's fused AdamW on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    join_group(device, "cpu:gloo,cuda:nccl")  # gloo, too: the norm of gradients in host memory is a sum on the CPU
    knobs = dict(mp_policy=MixedPrecisionPolicy(torch.bfloat16), offload_policy=CPUOffloadPolicy(device.type == "cuda"))
    for part in (*model.transformer.h, model):
        fully_shard(part, **knobs)
    return torch_step(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM), device, clip=knob != "unclipped")


def deepspeed3(model, knob, device):
    """ZeRO-3 with DeepSpeedCPUAdam, parameters and optimizer in pinned host memory."""
    os.environ.update(DS_ACCELERATOR=device.type, LOCAL_RANK="0")
    join_group(device, "nccl")
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    on_cpu = dict(device="cpu", pin_memory=device.type == "cuda")
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
              "zero_optimization": {"stage": 3, "offload_optimizer": on_cpu, "offload_param": on_cpu}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), **ADAM), config=config)

    def step(batch, mark):
        loss = engine(**batch).loss
        engine.backward(loss)
        mark()
        engine.step()
        return loss.detach()
    return step


ENGINES = {"gemini": gemini, "fsdp2": fsdp2, "deepspeed3": deepspeed3, "plain": plain}


def engine_name(text):
    if re.fullmatch(r"gemini:(all|offload|\d*\.?\d+)|fsdp2(:unclipped)?|deepspeed3|plain", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: gemini:GIB, gemini:all, gemini:offload, fsdp2[:unclipped], deepspeed3 or plain")


# ---- a row, in its process -----------------------------------------------------------------------------------------------


def this_machine(job):
    """Runs in a process of its own, so that the parent holds no memory on the GPU."""
    cores = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    if torch.cuda.is_available():
        return dict(machine=f"{torch.cuda.get_device_name()}, {cores}", device_bytes=torch.cuda.mem_get_info()[0])
    return dict(machine=cores, device_bytes=0)


def measure(job):
    """Train for some steps and return the row."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu, begin, (kind, _, knob) = device.type == "cuda", time.monotonic(), job["engine"].partition(":")
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    model, batch = build(job, device)
    numel = sum(p.numel() for p in model.parameters())
    step = ENGINES[kind](model, knob, device)
    if on_gpu:
        torch.cuda.empty_cache()  # the model as it came is not there any more, or not whole
    ready, whole_ms, half_ms, losses = time.monotonic(), [], [], []
    for k in range(job["warm_up"] + job["steps"]):
        if k == job["warm_up"] and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        wait()
        start, events, marks = time.perf_counter(), [torch.cuda.Event(enable_timing=True) for _ in range(2 * on_gpu)], []
        if on_gpu:
            events[0].record()
        loss = step(batch, events[1].record if on_gpu else lambda marks=marks: marks.append(time.perf_counter()))
        wait()
        whole_ms.append((time.perf_counter() - start) * 1e3)
        half_ms.append(events[0].elapsed_time(events[1]) if on_gpu else (marks[0] - start) * 1e3)
        losses.append(loss.item())
    measured = slice(job["warm_up"], None)
    return dict(ms=statistics.median(whole_ms[measured]), best_ms=min(whole_ms[measured]), params=numel,
                forward_backward_ms=statistics.median(half_ms[measured]), first_step_ms=whole_ms[0],
                peak_gib=torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0, first_loss=losses[0], last_loss=losses[-1],
                start_s=ready - begin, **getattr(step, "facts", dict)())


def child(answer, function, job):
    os.setsid()  # what it starts (compilers) can be ended with it
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no GPU stays taken when the parent is ended
    os.dup2(2, 1)  # engines print
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # if the system must end somebody, then this process and not the one that prints the table
    try:
        answer.send(function(job))
    except Exception as error:
        traceback.print_exc()
        answer.send(dict(error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"))
    sys.stderr.flush()
    os._exit(0)  # at once: nothing that an engine does at its end matters


# ---- and the process that watches it ---------------------------------------------------------------------------------------


def host_memory():
    """(bytes of memory, bytes in use) of this machine, or of the container if that has less; without cached files."""
    with open("/proc/meminfo") as f:
        info = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in f}
    total, used = info["MemTotal"], info["MemTotal"] - info["MemAvailable"]
    for limit, usage, stat in (("memory.max", "memory.current", "memory.stat"),
                               ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")):
        with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is "max"
            limit, usage, stat = (open(f"/sys/fs/cgroup/{name}").read() for name in (limit, usage, stat))
            if int(limit) < total:
                cached = sum(int(n) for key, n in map(str.split, stat.splitlines()) if key in ("active_file", "inactive_file"))
                total, used = int(limit), int(usage) - cached
    return total, used


def resident_bytes(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as f:
        return sum(int(line.split()[1]) * 1024 for line in f if line.startswith("VmRSS"))
    return 0


def in_process(function, job, limit_s, host_limit):
    """function(job) in a new process; a dict of what it returns, or of `error`, with the host memory that it took."""
    receive, send = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=child, args=(send, function, job), daemon=True)
    before, rss_peak, used_peak, result = host_memory()[1], 0, 0, None
    begin = time.monotonic()
    process.start()
    send.close()
    while result is None:
        if receive.poll(0.1):
            try:
                result = receive.recv()
            except EOFError:
                process.join()
                result = dict(error=f"the process ended with {process.exitcode} (-9: killed, likely for host memory)")
        (total, used), rss = host_memory(), resident_bytes(process.pid)
        rss_peak, used_peak = max(rss_peak, rss), max(used_peak, used - before)
        if result is None and (rss > host_limit or used > MARGIN * total):
            result = dict(error=f"host memory: {rss / GIB:.1f} GiB of this process, {used / GIB:.1f} of {total / GIB:.1f} in use")
        if result is None and time.monotonic() - begin > limit_s:
            result = dict(error=f"not done after {limit_s:.0f} s", late=True)
    if "error" in result:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()  # its memory is free again
    return {**result, "rss_gib": rss_peak / GIB, "host_gib": used_peak / GIB, "seconds": time.monotonic() - begin}


HEAD = ("engine           ckpt  median ms  best ms  fwd+bwd  peak GiB  RSS GiB  first and last loss"
        " |  budget  optimizers  gathers (planned)  GB to, from")


def line(r):
    text = f"{r['engine']:17}{r['checkpoint']:4}"
    if "error" in r:
        return f"{text}  {r['error']}"
    text += (f"{r['ms']:11.1f}{r['best_ms']:9.1f}{r['forward_backward_ms']:9.1f}{r['peak_gib']:10.2f}{r['rss_gib']:9.1f}"
             f"{r['first_loss']:12.3f}{r['last_loss']:9.3f}")
    if "chunks" in r:
        budget = f"{r['budget_gib']:8.2f}" if r["budget_gib"] else f"{'-':>8}"
        optimizers, gathers = f"{r['on_gpu']}/{r['chunks']}", f"{r['gathers']} ({r['planned']})"
        text += f" |{budget}{optimizers:>12}{gathers:>19}{r['to_device_gb']:11.2f}{r['to_host_gb']:6.2f}"
    return text


def over_rounds(rows):
    """One row of all rounds: medians of their medians; the rest from the last that was done."""
    done = [r for r in rows if "error" not in r]
    if not done:
        return rows[-1]
    middle = {key: statistics.median(r[key] for r in done) for key in ("ms", "forward_backward_ms")}
    return {**done[-1], **middle, "best_ms": min(r["best_ms"] for r in done), "ms_rounds": [r["ms"] for r in done],
            "failed_rounds": len(rows) - len(done)}


def table(args, save, sizes):
    rows = ROWS
    if args.rows or args.checkpoint:
        engines = args.rows or list(dict.fromkeys(name for name, _ in ROWS))
        rows = list(itertools.product(engines, args.checkpoint or [0]))
    results = {row: [] for row in rows}
    for number in range(args.rounds):
        print(HEAD if args.rounds == 1 else f"{HEAD}\nround {number + 1}", flush=True)
        for row in rows:
            job = dict(engine=row[0], checkpoint=row[1], steps=args.steps, warm_up=3, largest=False, **sizes)
            results[row].append({**job, **in_process(measure, job, args.limit or 180, args.host_gib * GIB)})
            print(line(results[row][-1]), flush=True)
            if number == args.rounds - 1:
                save(over_rounds(results[row]))
    if args.rounds > 1:
        print("\n".join(["medians", *(line(over_rounds(r)) for r in results.values())]))


def largest(name, args, save, sizes, device_bytes):
    """Grow, or shrink by a quarter, until a number of layers fits and another does not; then halve the gap, to a sixteenth."""
    host_bytes, width = min(args.host_gib * GIB, MARGIN * host_memory()[0]), sizes["width"]
    have = dict(host=host_bytes, device=MARGIN * device_bytes or host_bytes, both=host_bytes + MARGIN * device_bytes)
    params = min(have[place] / per_param for place, per_param in FIRST_GUESS.get(name.partition(":")[0], dict(host=22)).items())
    per_layer = 12 * width**2 + 13 * width
    layers = args.layers or max(int((params - (50257 + 1024) * width) / per_layer), 1)
    good, bad, best, end = 0, None, None, time.monotonic() + (args.limit or 270)
    while bad is None or bad - good > max(1, good // 16):
        job = dict(engine=name, checkpoint=1, steps=min(args.steps, 3), warm_up=2, largest=True, **{**sizes, "layers": layers})
        r = {**job, **in_process(measure, job, max(end - time.monotonic(), 1), args.host_gib * GIB)}
        what = r.get("error") or (
            f"{r['params'] / 1e9:.2f} billion parameters, {r['ms']:.0f} ms a step, peak {r['peak_gib']:.1f} GiB on the GPU, "
            f"{r['rss_gib']:.1f} in host memory, loss {r['first_loss']:.2f} {r['last_loss']:.2f}")
        print(f"    {layers} layers: {what} ({r['seconds']:.0f} s)", flush=True)
        if "late" in r:
            break
        if "error" in r:
            bad = layers
        else:
            good, best = layers, {**r, "what": what}
        if bad is None:  # as far as memory goes by what was measured, but at most half as many again
            used, room = (r["peak_gib"], have["device"]) if name == "plain" and device_bytes else (r["rss_gib"], host_bytes)
            layers += max(1, min(layers // 2, int((room / GIB / used - 1) * r["params"] / per_layer)))
        else:
            layers = (good + bad) // 2 if good else bad - max(1, bad // 4)
        if layers < 1:
            break
    print(f"{name}: {best['layers']} layers, {best.pop('what')}" if best else f"{name}: none was trained", flush=True)
    if best:
        save({**best, "failed_layers": bad})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=engine_name, metavar="ENGINE", help="(all; --largest: gemini:all plain)")
    parser.add_argument("--checkpoint", nargs="+", type=int, choices=[0, 1], help="activation checkpointing (0)")
    parser.add_argument("--largest", action="store_true", help="find the largest model that each engine trains, by layers")
    parser.add_argument("--steps", type=int, default=6, help="measured steps (6; --largest: at most 3)")
    parser.add_argument("--rounds", type=int, default=1, help="how often to go through the rows; medians are printed (1)")
    parser.add_argument("--limit", type=float, help="seconds for a row (180); --largest: for the search of an engine (270)")
    parser.add_argument("--host-gib", type=float, default=float("inf"), help="end a process that takes more of it (no limit)")
    parser.add_argument("--layers", type=int, help="blocks (48); --largest: the number to try first")
    parser.add_argument("--width", type=int, help="of the model (1600; --largest: 5120)")
    parser.add_argument("--heads", type=int, help="attention heads (width / 64)")
    parser.add_argument("--batch", type=int, help="sequences (8; --largest: 1)")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence (512)")
    default = os.path.join(HERE, "results", "offload.jsonl")
    parser.add_argument("--json", nargs="?", const=default, metavar="FILE", help="append rows to a file (off; offload.jsonl)")
    args = parser.parse_args()
    width = args.width or (5120 if args.largest else 1600)
    sizes = dict(layers=args.layers or 48, width=width, heads=args.heads or max(width // 64, 1),
                 batch=args.batch or (1 if args.largest else 8), length=args.length)
    found = in_process(this_machine, None, 120, float("inf"))
    if "error" in found:
        raise SystemExit(found["error"])
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        git = ["git", "rev-parse", "--short", "HEAD"]
        found["commit"] = subprocess.check_output(git, cwd=HERE, text=True, stderr=subprocess.DEVNULL).strip()
    for package in ("torch", "transformers", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    where = {key: found[key] for key in ("machine", "torch", "transformers", "deepspeed", "commit") if key in found}
    where |= dict(host_memory_gib=round(host_memory()[0] / GIB), date=str(date.today()))
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(", ".join(f"{key} {value}" for key, value in sizes.items() if key != "layers" or not args.largest))

    def save(row):
        if args.json:
            with open(args.json, "a") as f:
                f.write(json.dumps({**row, **where}) + "\n")
    if not args.largest:
        table(args, save, sizes)
    for name in (args.rows or ["gemini:all", "plain"]) if args.largest else []:
        largest(name, args, save, sizes, found["device_bytes"])


if __name__ == "__main__":
    main()
