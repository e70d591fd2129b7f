"""Our engines and their peers on several GPUs: tokens per second and card, scaling from one card, hidden communication, memory.

    torchrun --standalone --nproc_per_node 1 benchmarks/scale.py --json    # one card first: scaling is measured from these rows
    torchrun --standalone --nproc_per_node 8 benchmarks/scale.py --json
    torchrun --standalone --nproc_per_node 4 benchmarks/scale.py --work bert-large --rows ddp "hybrid tp2 pp2" "torch DDP"
    python benchmarks/scale.py --largest fsdp --ranks 2 --json             # the largest GPT-2 of width 5120; starts its own ranks
    torchrun --standalone --nproc_per_node 2 benchmarks/scale.py --work bert --precision fp32 --steps 4    # two CPU ranks

Works: bert-large, 335 M parameters, 32 x 128 tokens a card; gpt2-xl, 1.56 B, 8 x 512; bert, 5.3 M, 8 x 64, to try this script.
Rows: ddp, zero1, zero2, fsdp, gemini, hybrid and its mixes ("hybrid tp2 pp2", sp with ring attention; what ranks are left over are
copies; with a pipeline 4 micro-batches a stage), torch DDP, torch fsdp2, deepspeed2, deepspeed3, on one rank plain torch. A row
that cannot be on so many ranks, or that its engine refuses, says so. All have AdamW, clipping at 1 and the same work per card: the
ranks of one copy share the batch that they have elsewhere.

BERT: all engines are there at once, and each takes `--block` steps in turn. GPT-2 XL has no room for that: each engine is built,
measured and freed, one after the other, and all of it `--rounds` times. ms: mean of a block of steps between two barriers, so that
a step overlaps with the next one as in training; the median of the blocks. Ratio: tokens per second over those of torch DDP.
Scaling: tokens per second and card over those of one card, from the last such row of the file (hybrid mixes: of "hybrid").
NCCL, hidden: milliseconds a step in which a NCCL kernel is on the GPU, waiting for other ranks included, and the part of them in
which another kernel computes: torch.profiler, two steps, mean over ranks. GiB: the most that an engine's steps have allocated.
"""
import argparse
import contextlib
import copy
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date

import step
import torch
import torch.distributed as dist
from plot import ROOT, commit

from ddp import distributed
from fsdp import FSDP
from gemini import Gemini
from hybrid import Hybrid

GIB = 2**30
RESULTS = os.path.join(ROOT, "benchmarks", "results", "scale.jsonl")


# ---- what is trained ---------------------------------------------------------------------------------------------------


def bert_large(device):
    """BERT-large with a head of 2 labels, 335 M parameters; 32 sequences of 128 tokens per rank."""
    from transformers import BertConfig, BertForSequenceClassification
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config), step.sentences(30522, 32, 128, device), None


WORKS = {"bert-large": bert_large, "gpt2-xl": step.gpt2_xl, "bert": step.bert}
ALONE = {"gpt2-xl"}  # no room for all engines at once


# ---- engines: step.py's, and those that it does not have ---------------------------------------------------------------------

ROWS = {"ddp": step.ENGINES["ddp"], "zero1": step.ENGINES["zero1"], "zero2": step.ENGINES["zero2"], "fsdp": step.ENGINES["fsdp"],
        "gemini": step.ours(Gemini), "torch DDP": step.torch_ddp, "torch fsdp2": step.torch_fsdp2, "plain torch": step.plain_torch,
        "deepspeed2": step.deepspeed(2), "deepspeed3": step.deepspeed(3)}
MIXES = ("hybrid", "hybrid tp2", "hybrid pp2", "hybrid sp2", "hybrid tp2 pp2")


def default_rows(ranks):
    """torch DDP, beside which the others stand, first; DeepSpeed, which does not give back all it took, last."""
    ours = [name for name in ("ddp", "zero1", "zero2", "fsdp", "gemini", *MIXES) if ranks % ranks_of_a_copy(name) == 0]
    peers = ["torch fsdp2"] + ["deepspeed2", "deepspeed3"] * (importlib.util.find_spec("deepspeed") is not None)
    return ["torch DDP"] + ["plain torch"] * (ranks == 1) + ours + peers


def mesh_of(name):
    """{"tp": 2, "pp": 2} of "hybrid tp2 pp2"; empty for other engines."""
    return {axis: int(size) for axis, size in re.findall(r" (tp|pp|sp)(\d+)", name)}


def ranks_of_a_copy(name):
    mesh = mesh_of(name)
    return mesh.get("tp", 1) * mesh.get("pp", 1) * mesh.get("sp", 1)


def row_name(text):
    if text in ROWS or re.fullmatch(r"hybrid( tp[1-9]\d*)?( pp[1-9]\d*)?( sp[1-9]\d*)?", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: {', '.join(ROWS)}, or hybrid with tp, pp and sp: 'hybrid tp2 pp2'")


def hybrid(name):
    mesh = mesh_of(name)
    if mesh.get("sp", 1) > 1:
        mesh["sp_mode"] = "ring"  # all_to_all would want heads that sp divides: GPT-2 XL has 25

    def build(model, loss_fn, precision, max_norm):
        engine = Hybrid(model, lr=1e-4, weight_decay=0.01, precision=precision, max_norm=max_norm, **mesh)

        def take_step(batch):
            pieces = min(4 * mesh["pp"], len(batch["input_ids"])) if mesh.get("pp", 1) > 1 else 1
            loss = engine.forward_backward(batch, micro_batches=pieces, loss_fn=loss_fn)
            engine.step()
            return loss
        take_step.mean, take_step.copy = True, engine.dp.rank
        return take_step
    return build


class Row:
    """An engine on its own copy of the model, warmed up."""

    def __init__(self, name, model, batch_of, loss_fn, args, device):
        self.name, self.device, self.times, self.loss = name, device, [], None
        self.at_first = allocated(device)
        build = ROWS.get(name) or hybrid(name)
        self.step = build(copy.deepcopy(model), loss_fn, args.precision, 1.0)
        n = ranks_of_a_copy(name)
        first = getattr(self.step, "copy", dist.get_rank()) * n
        self.batch = step.together([batch_of(first + k) for k in range(n)])
        for _ in range(3):
            self.step(self.batch)
        wait(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            self.step(self.batch)
        wait(device)
        peak = torch.cuda.max_memory_allocated() - self.at_first if device.type == "cuda" else 0
        self.peak_gib = over_ranks(peak / GIB, device, dist.ReduceOp.MAX)

    def take(self, steps):
        """A block of steps, as training makes them; their mean in ms."""
        wait(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.loss = self.step(self.batch)
        wait(self.device)
        self.times.append((time.perf_counter() - start) / steps * 1e3)

    def communication(self):
        """(ms of NCCL kernels in a step, the part of that in which others compute), means over ranks; None without a GPU."""
        if self.device.type != "cuda":
            return None, None
        from torch.profiler import ProfilerActivity, profile
        wait(self.device)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:
            for _ in range(2):
                self.step(self.batch)
            wait(self.device)
        busy, hidden = overlap([(e.name, e.time_range.start, e.time_range.end) for e in prof.events()
                                if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation])
        busy, hidden = (over_ranks(us / 2e3, self.device) / dist.get_world_size() for us in (busy, hidden))
        return busy, hidden / busy if busy else None

    def close(self):
        getattr(self.step, "close", lambda: None)()
        self.step = self.batch = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def allocated(device):
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def over_ranks(value, device, op=dist.ReduceOp.SUM):
    value = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(value, op=op)
    return value.item()


# ---- hidden communication: kernels as torch.profiler has them ---------------------------------------------------------------


def union(spans):
    """Spans [from, to) in order, those that touch as one."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def overlap(kernels):
    """(time in which a NCCL kernel runs, time in which one runs and another kernel, too) of (name, from, to); copies and memsets
    are neither."""
    is_nccl = lambda name: name.lower().startswith("nccl")
    nccl = union((a, b) for name, a, b in kernels if is_nccl(name))
    others = union((a, b) for name, a, b in kernels if not is_nccl(name) and not name.startswith("Mem"))
    both, k = 0.0, 0
    for a, b in nccl:
        while k < len(others) and others[k][1] <= a:
            k += 1
        j = k
        while j < len(others) and others[j][0] < b:
            both += min(b, others[j][1]) - max(a, others[j][0])
            j += 1
    return sum(b - a for a, b in nccl), both


# ---- one work, all rows --------------------------------------------------------------------------------------------------------


def measure(work, args, device, where):
    torch.manual_seed(0)
    model, batch_of, loss_fn = WORKS[work](device)
    model = model.to(device)
    rows, facts, refused = {}, {}, {}

    def open_row(name):
        """Engines refuse before they communicate, all ranks alike."""
        try:
            if dist.get_world_size() % ranks_of_a_copy(name):
                raise ValueError(f"not on {dist.get_world_size()} ranks")
            return Row(name, model, batch_of, loss_fn, args, device)
        except (ValueError, NotImplementedError) as error:
            refused[name] = str(error).partition("\n")[0][:150]
            say(f"{work:12}{name:17}{refused[name]}")

    def done(name, row):
        facts[name] = dict(loss=over_ranks(row.loss, device) / dist.get_world_size(), peak_gib=row.peak_gib, times=row.times,
                           tokens=row.batch["input_ids"].numel() / ranks_of_a_copy(name))
        facts[name]["nccl_ms"], facts[name]["hidden"] = row.communication()
        row.close()

    blocks = max(args.steps // args.block, 1)
    if work in ALONE:
        for _ in range(args.rounds):
            for name in args.rows:
                row = None if name in refused else open_row(name)
                if row:
                    row.times += facts.get(name, {}).get("times", [])
                    for _ in range(max(blocks // args.rounds, 1)):
                        row.take(args.block)
                    done(name, row)
    else:
        for name in args.rows:
            rows[name] = open_row(name)
        rows = {name: row for name, row in rows.items() if row}
        names = list(rows)
        for k in range(blocks):
            for name in names[k % len(names) :] + names[: k % len(names)]:  # nobody always comes first
                rows[name].take(args.block)
        for name in names:
            done(name, rows.pop(name))
    speed = {name: fact["tokens"] / statistics.median(fact["times"]) * 1e3 for name, fact in facts.items()}
    for name, fact in facts.items():
        alone = speed[name] if dist.get_world_size() == 1 else None
        if where["cards"] > 1:  # ranks that share a card say nothing about scaling
            alone = one_card(args.json or RESULTS, work, name, args.precision, where["machine"])
        row = dict(work=work, engine=name, ranks=dist.get_world_size(), precision=args.precision,
                   ms=statistics.median(fact["times"]), best_ms=min(fact["times"]), tokens_per_second_per_card=speed[name],
                   ratio=speed[name] / speed["torch DDP"] if "torch DDP" in speed else None,
                   scaling=speed[name] / alone if alone else None, nccl_ms=fact["nccl_ms"], hidden=fact["hidden"],
                   peak_gib=fact["peak_gib"], loss=fact["loss"], in_turn=work not in ALONE, **where)
        say(line(row))
        save(row, args)


def one_card(file, work, engine, precision, machine):
    """Tokens per second on one card of the same kind, from the last row of the file that tells; None if none does."""
    found = None
    if os.path.exists(file):
        with open(file) as f:
            for r in map(json.loads, f):
                if (r.get("ranks"), r.get("work"), r.get("precision"), r.get("machine")) == (1, work, precision, machine) and (
                        r["engine"] == (engine if not mesh_of(engine) else "hybrid")):
                    found = r["tokens_per_second_per_card"]
    return found


HEAD = "model       engine           ranks  median ms  best ms  tokens/s/card  ratio  scaling  NCCL ms  hidden     GiB     loss"


def line(r):
    number = lambda x, form: format(x, form) if x is not None else "-".rjust(int(re.match(r"\d+", form)[0]))
    return (f"{r['work']:12}{r['engine']:17}{r['ranks']:5}{r['ms']:11.1f}{r['best_ms']:9.1f}{r['tokens_per_second_per_card']:15.0f}"
            f"{number(r['ratio'], '7.3f')}{number(r['scaling'], '9.1%')}{number(r['nccl_ms'], '9.2f')}{number(r['hidden'], '8.0%')}"
            f"{r['peak_gib']:8.2f}{r['loss']:9.4f}")


def say(text):
    if int(os.environ.get("RANK", 0)) == 0:
        print(text, flush=True)


def save(row, args):
    if args.json and int(os.environ.get("RANK", 0)) == 0:
        with open(args.json, "a") as f:
            f.write(json.dumps(row) + "\n")


def facts_of(device, ranks):
    """Where a row was measured."""
    cpu = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    found = dict(machine=torch.cuda.get_device_name() if device.type == "cuda" else cpu, backend=dist.get_backend(),
                 cards=min(torch.cuda.device_count(), ranks) if device.type == "cuda" else 0, commit=commit(),
                 date=str(date.today()))
    for package in ("torch", "transformers", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | dict(command=this_command())


def this_command():
    return " ".join([f"benchmarks/{os.path.basename(sys.argv[0])}", *sys.argv[1:]])


# ---- the largest model -------------------------------------------------------------------------------------------------------


def bytes_per_parameter(name, n):
    """On the card after backward, by the table in README.md; where a search begins."""
    m = mesh_of(name)
    part = m.get("tp", 1) * m.get("pp", 1)
    return {"ddp": 16, "torch DDP": 20, "zero1": 4 + 12 / n, "zero2": 2 + 14 / n, "fsdp": 14 / n, "gemini": 16 / n}.get(
        name, 4 / part + 12 / part / (n // ranks_of_a_copy(name)))


def train_one_size(args, device):
    """A rank of one trial: some steps of a GPT-2 of args.layers blocks, activations checkpointed, one sequence a card."""
    from transformers import GPT2Config, GPT2LMHeadModel
    name, n = args.largest, ranks_of_a_copy(args.largest)
    config = GPT2Config(n_embd=args.width, n_layer=args.layers, n_head=max(args.width // 128, 2), n_positions=1024, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    on_meta, fp32 = name == "fsdp" or name.startswith("hybrid"), name in ("ddp", "torch DDP")
    torch.manual_seed(0)
    # Not even a card has room for fp32 weights beside the rest, where an engine has none; masters are fp32 either way.
    torch.set_default_dtype(torch.float32 if fp32 else torch.bfloat16)
    with torch.device("meta") if on_meta else device:
        model = GPT2LMHeadModel(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    numel = sum(p.numel() for p in model.parameters())
    if on_meta:
        engine = FSDP(model, device=device, **BF16) if name == "fsdp" else Hybrid(model, device=device, **BF16, **mesh_of(name))
        give_values(engine)
        take, copy_ = None, engine.dp.rank if name != "fsdp" else dist.get_rank()
    else:
        engine, copy_ = None, dist.get_rank()
        take = ROWS[name](model, None, "bf16", 1.0)
    del model
    generator = torch.Generator().manual_seed(copy_)
    tokens = torch.randint(50257, (n, args.length), generator=generator).to(device)
    batch = dict(input_ids=tokens, labels=tokens)
    times, losses = [], []
    for _ in range(2 + args.steps):
        wait(device)
        start = time.perf_counter()
        if engine:
            loss = engine.forward_backward(batch, micro_batches=n if mesh_of(name).get("pp", 1) > 1 else 1)
            engine.step()
        else:
            loss = take(batch)
        wait(device)
        times.append((time.perf_counter() - start) * 1e3)
        losses.append(over_ranks(loss, device) / dist.get_world_size())
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    return dict(work="largest", engine=name, ranks=dist.get_world_size(), layers=args.layers, width=args.width, length=args.length,
                params=numel, ms=statistics.median(times[2:]), peak_gib=over_ranks(peak, device, dist.ReduceOp.MAX),
                first_loss=losses[0], last_loss=losses[-1], **facts_of(device, dist.get_world_size()))


BF16 = dict(lr=1e-4, weight_decay=0.01, precision="bf16", max_norm=1.0)


def give_values(engine):
    """A model that was built on meta has no weights, and a checkpoint of the largest one would be long in writing: GPT-2's initial
    values, each rank its own, in place of what `load` reads."""
    for f in engine.fragments:
        if len(f.shape) > 1:
            f.master.normal_(0, 0.02)
        else:
            f.master.fill_(1.0 if f.name.endswith("weight") else 0.0)  # one dim: LayerNorm's weights, and biases
    engine._masters_changed() if isinstance(engine, FSDP) else engine._refresh_weights()


def trial(args, layers, limit_s):
    """One size on ranks of its own, which end with whatever goes wrong on one of them."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = os.path.join(folder, "row.json"), os.path.join(folder, "log")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
        script = [os.path.abspath(__file__), "--largest", args.largest, "--ranks", str(args.ranks), "--layers", str(layers),
                  "--width", str(args.width), "--length", str(args.length), "--steps", str(args.steps), "--rank-out", out]
        with open(log, "w") as f:
            process = subprocess.Popen(torchrun + script, stdout=f, stderr=f, start_new_session=True,
                                       env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks
                process.wait()
                return dict(error=f"not done after {limit_s:.0f} s", late=True)
        if os.path.exists(out):
            with open(out) as f:
                return json.load(f)
        with open(log) as f:
            text = f.read()
        if "unrecognized arguments" in text or "ModuleNotFoundError" in text:
            raise SystemExit(text)
        lines = re.findall(r"^.*(?:Error|error):.*$", text, re.M) or text.splitlines()[-1:]
        return dict(error=next((x for x in lines if "memory" in x.lower()), lines[0] if lines else "?")[:200])


def largest(args):
    """Grow by an eighth, or shrink, until a number of layers fits and another does not; then halve the gap, to a sixteenth."""
    per_layer, ends = 12 * args.width**2 + 13 * args.width, (50257 + 1024) * args.width
    code = "import torch; print(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0)"
    card = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout  # here it would take memory itself
    params = 0.9 * int(card or 0) / bytes_per_parameter(args.largest, args.ranks)
    layers = args.layers or max(int((params - ends) / per_layer), 1)
    good, bad, best, end = 0, None, None, time.monotonic() + args.limit
    while bad is None or bad - good > max(1, good // 16):
        r = trial(args, layers, max(end - time.monotonic(), 1))
        what = r.get("error") or (
            f"{r['params'] / 1e9:.2f} billion parameters, {r['ms']:.0f} ms a step, peak {r['peak_gib']:.1f} GiB, "
            f"loss {r['first_loss']:.2f} {r['last_loss']:.2f}")
        print(f"    {layers} layers: {what}", flush=True)
        if "late" in r:
            break
        if "error" in r:
            bad = layers
        else:
            good, best = layers, {**r, "what": what}
        if bad is None:
            layers = min(layers + max(1, layers // 8), args.most or sys.maxsize)
        else:
            layers = (good + bad) // 2 if good else bad - max(1, bad // 8)
        if layers < 1 or layers == good:
            break
    found = f"{best['layers']} layers, {best.pop('what')}" if best else "none was trained"
    print(f"{args.largest} on {args.ranks} ranks: {found}", flush=True)
    if best:
        save({**best, "failed_layers": bad, "command": this_command()}, args)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["bert-large", "gpt2-xl"], help="models (bert-large gpt2-xl)")
    parser.add_argument("--rows", nargs="+", type=row_name, metavar="ROW", help="engines (all that there can be)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16", help="of every engine (bf16)")
    parser.add_argument("--steps", type=int, help="timed steps per engine (40; --largest: 3)")
    parser.add_argument("--block", type=int, default=5, help="steps between two barriers (5)")
    parser.add_argument("--rounds", type=int, default=2, help="where engines come one after the other: how often (2)")
    parser.add_argument("--json", nargs="?", const=RESULTS, metavar="FILE", help="append rows to a file (off; scale.jsonl)")
    parser.add_argument("--largest", type=row_name, metavar="ROW", help="find the largest GPT-2 that this engine trains (off)")
    parser.add_argument("--ranks", type=int, default=1, help="--largest: how many to start (1)")
    parser.add_argument("--width", type=int, default=5120, help="--largest: of the model (5120)")
    parser.add_argument("--length", type=int, default=512, help="--largest: tokens a card (512)")
    parser.add_argument("--layers", type=int, help="--largest: the number to try first (by the formula)")
    parser.add_argument("--most", type=int, help="--largest: no more layers than this (no limit)")
    parser.add_argument("--limit", type=float, default=500.0, help="--largest: seconds for the search (500)")
    parser.add_argument("--rank-out", help=argparse.SUPPRESS)  # this process is a rank of a trial and writes its row here
    args = parser.parse_args()
    args.steps = args.steps or (3 if args.largest else 40)
    if args.largest in ("plain torch", "torch fsdp2", "deepspeed2", "deepspeed3"):
        parser.error(f"--largest {args.largest}: of the peers only torch DDP")
    if args.largest and args.ranks % ranks_of_a_copy(args.largest):
        parser.error(f"--largest {args.largest!r}: not on {args.ranks} ranks")
    if args.largest and not args.rank_out:
        return largest(args)
    with distributed() as device:
        if args.rank_out:
            row = train_one_size(args, device)
            if dist.get_rank() == 0:
                with open(args.rank_out, "w") as f:
                    json.dump(row, f)
            return
        n = dist.get_world_size()
        args.rows = args.rows or default_rows(n)
        where = facts_of(device, n)
        say(", ".join(f"{key} {value}" for key, value in where.items() if key != "command") + f", {n} ranks\n{HEAD}")
        for work in args.work:
            measure(work, args, device, where)


if __name__ == "__main__":
    main()
