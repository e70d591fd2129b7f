"""The pictures in benchmarks/results: memory per rank, a step's timeline, pipeline schedules. Measured here, drawn by matplotlib.

    python benchmarks/plot.py                                  # starts its own CPU ranks, measures, draws: 75 s on two cores
    python benchmarks/plot.py --only timeline                  # that picture alone
    python benchmarks/plot.py --only timeline --device cuda    # two ranks on GPUs, by torch.profiler: timeline-cuda.svg
    python benchmarks/plot.py --draw-only                      # from benchmarks/results/plot.json, without measuring

memory     engine.memory(), that is bytes of live storages, after the last backward and before `step`, beside the formulas of the
           files' docstrings; on top the most that the engine holds at any hook of forward and backward. Not in it: activations,
           the half-precision copies that autocast makes for ddp.py, what `step` allocates for a moment. Not in the formulas:
           gradients that autograd has just made.
timeline   CPU ranks: time stamps of rank 0, taken around the functions of torch.distributed and in hooks of the model; the fastest
           of twelve steps. A collective lasts from its launch until the wait for it is over: it may have arrived long before,
           which gloo does not tell. GPUs: kernels and copies by the GPU's own clock, one lane for each kind of stream.
pipeline   the lists of hybrid.py's `schedule`; a backward takes twice as long as a forward, to send takes no time.

The strategy files know nothing of this: functions are wrapped from outside. All numbers go to plot.json, with the command, the
hardware, versions and the commit; the pictures are drawn from that file, the same to the letter each time.
"""
import argparse
import contextlib
import functools
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
RESULTS = os.path.join(ROOT, "benchmarks", "results")
sys.path.insert(0, ROOT)
PICTURES = ("memory", "timeline", "pipeline")
RANKS = {"memory": (2, 4), "timeline": (2,)}
BUCKET_MB = 1.0  # memory: of buckets and chunks; a layer's largest matrix takes half of it in bf16
SMALL_BYTES = 2**14  # timeline: below, only the wait for a collective is drawn: losses, norms


def bert(layers, width=256, vocabulary=1000):
    """BERT for two labels. As it is by default, layers of 0.79 M parameters are most of it, not the embedding."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        intermediate_size=4 * width, max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def sentences(rows, length, device, seed=0):
    import torch
    g = torch.Generator().manual_seed(seed)
    return dict(input_ids=torch.randint(1000, (rows, length), generator=g).to(device),
                labels=torch.randint(2, (rows,), generator=g).to(device))


# ---- memory: what each rank holds ------------------------------------------------------------------------------------------

HELD = ("weights", "gradients", "fp32 masters", "Adam's moments", "gathered or on its way, at most")


def memory_formulas(name, n, engine, numel):
    """Bytes per parameter in the order of HELD, by the file's docstring; the last is a bound, but for gradients that autograd has
    just made. engine: only for the sizes of units and of local parameters, which are counts, not measurements."""
    bucket, received = BUCKET_MB * 2**20 / numel, (n - 1) / n  # received: gloo has a place for what it receives
    if name == "ddp":
        return 4, 4, 0, 8, 0
    if name == "zero1":
        return 2, 2, 4 / n, 8 / n, received * bucket
    if name == "zero2":
        return 2, 2 / n, 4 / n, 8 / n, 2 * bucket
    if name == "fsdp":  # weights and gradients of the root and of two units, and what is received of one unit
        root, unit = (2 * sum(flat.full.numel() for flat in u.flats) / numel for u in engine.units[:2])
        return 0, 2 / n, 4 / n, 8 / n, 2 * (root + 2 * unit) + received * unit
    if name == "gemini":  # chunks: the one that is read, the next, the last, whose gradients leave; and what is received of one
        return 0, 2 / n, 4 / n, 8 / n, (3 + received) * bucket
    local, copies = sum(p.numel() for p in engine.params) / numel, engine.dp.world_size  # hybrid: Ψd/T + Ψw
    return 2 * local, 2 * local, 4 * local / copies, 8 * local / copies, (copies - 1) / copies * bucket


def measure_memory(device):
    """{strategy: {"measured": bytes per parameter by HELD, "formula": the same}}, of the rank that holds most."""
    import torch.distributed as dist

    from ddp import DDP, storage_bytes
    from fsdp import FSDP
    from gemini import Gemini
    from hybrid import Hybrid
    from zero import Zero
    n, buckets = dist.get_world_size(), dict(bucket_mb=BUCKET_MB)
    engines = {"ddp": (DDP, buckets), "zero1": (Zero, dict(buckets, stage=1)), "zero2": (Zero, dict(buckets, stage=2)),
               "fsdp": (FSDP, {}), "gemini": (Gemini, dict(placement="static", chunk_mb=BUCKET_MB)),
               "hybrid tp 2": (Hybrid, dict(buckets, tp=2))}
    rows, layers = {}, 12
    for name, (engine_class, knobs) in engines.items():
        model = bert(layers).to(device)
        numel = sum(p.numel() for p in model.parameters())
        engine = engine_class(model, precision="bf16", **knobs)
        batch, most = sentences(2, 64, device), 0

        def held(engine=engine):
            """Bytes by kind of memory(); room: what is there for sending and receiving alone."""
            found = {kind: sum(by_device.values()) for kind, by_device in engine.memory().items()}
            room = [*getattr(engine, "_room", ()), *(() if hasattr(engine, "_room") else getattr(engine, "_received", {}).values())]
            found["room"] = sum(storage_bytes(room).values())
            return found

        def look(*_, held=held):
            nonlocal most
            found = held()
            most = max(most, sum(found[kind] for kind in ("parameters", "gradients", "optimizer")))

        hooks = [p.register_post_accumulate_grad_hook(look) for p in engine.params]
        hooks += [m.register_forward_hook(look) for m in model.modules()]
        for _ in range(2):
            most = 0
            engine.forward_backward(batch)
            look()
            found = held()
            moments = sum(storage_bytes(t for f in engine.fragments for t in (f.exp_avg, f.exp_avg_sq)).values())
            engine.step()
        kept = [found["parameters"], found["gradients"] - found["room"], found["optimizer"] - moments, moments]
        measured = [x / numel for x in (*kept, most - sum(kept))]
        everyone = [None] * n
        dist.all_gather_object(everyone, measured)
        rows[name] = dict(measured=max(everyone, key=sum), formula=memory_formulas(name.split()[0], n, engine, numel))
        for hook in hooks:
            hook.remove()
    return dict(numel=numel, model=f"BERT, {layers} layers of width 256", precision="bf16", bucket_mb=BUCKET_MB, rows=rows)


# ---- timeline: who computes, sends and waits when --------------------------------------------------------------------------


class Recorder:
    """Time stamps on CPUs, in seconds: `stretches` of computing [kind, label, from, to], and `collectives`."""

    def __init__(self):
        self.stretches, self.collectives, self.open, self.kind = [], [], None, None

    def mark(self, kind, label=""):
        """From here on this is computed."""
        now = time.perf_counter()
        if self.open:
            self.stretches.append([*self.open, now])
        self.open = [kind, label, now] if kind else None

    @contextlib.contextmanager
    def one(self, kind):
        """What is launched inside is one collective."""
        before, self.kind = self.kind, dict(kind=kind, launch=time.perf_counter(), end=None, bytes=0, waits=[])
        self.collectives.append(self.kind)
        try:
            yield
        finally:
            self.kind = before

    def launched(self, function, name):
        """A function of torch.distributed, which returns a Work, or None when all is over."""
        @functools.wraps(function)
        def call(tensor, *args, **kwargs):
            with contextlib.nullcontext() if self.kind else self.one(name):
                own, begin = self.kind, time.perf_counter()
                own["bytes"] += tensor.numel() * tensor.element_size() * (function.__name__ != "irecv")
                work = function(tensor, *args, **kwargs)
                if work is None:
                    own["waits"].append([begin, time.perf_counter()])
                    own["end"] = own["waits"][-1][1]
                return work and Watched(work, own)
        return call


class Watched:
    """A Work whose wait leaves its time."""

    def __init__(self, work, own):
        self.work, self.own = work, own

    def wait(self, *args):
        begin = time.perf_counter()
        result = self.work.wait(*args)
        self.own["end"] = time.perf_counter()
        self.own["waits"].append([begin, self.own["end"]])
        return result

    def __getattr__(self, name):
        return getattr(self.work, name)


@contextlib.contextmanager
def wrapped(*changes):
    """(object, attribute, new) while inside."""
    before = [getattr(where, name) for where, name, _ in changes]
    for where, name, new in changes:
        setattr(where, name, new)
    try:
        yield
    finally:
        for (where, name, _), old in zip(changes, before):
            setattr(where, name, old)


def watch(recorder, strategy):
    """All of torch.distributed that the strategies use, and the two classes of theirs that make one collective of several
    messages. strategy: the module."""
    import torch.distributed as dist
    changes = [(dist, name, recorder.launched(getattr(dist, name), kind)) for name, kind in (
        ("all_reduce", "all-reduce"), ("isend", "send"), ("irecv", "send"), ("broadcast", "broadcast"),
        ("reduce_scatter_tensor", "reduce-scatter"), ("all_gather_into_tensor", "all-gather"))]

    def named(make, kind):
        def init(self, *args, **kwargs):
            with recorder.one(kind):
                make(self, *args, **kwargs)
        return init
    for name, kind in (("SliceSum", "reduce-scatter"), ("SliceGather", "all-gather")):
        if hasattr(strategy, name):
            changes.append((getattr(strategy, name), "__init__", named(getattr(strategy, name).__init__, kind)))
    return wrapped(*changes)


def mark_blocks(recorder, blocks):
    """Forward: where a block begins and ends. Backward: where the gradient of its output is complete, there its own begins, and
    that of the block behind it is over."""
    def begins(label):
        return lambda recorder=recorder: recorder.mark("forward", label)

    def reached(label):
        return lambda grad: recorder.mark("backward", label)

    hooks = []
    for k, block in enumerate(blocks):
        def before(module, args, k=k):
            recorder.mark("forward", str(k))
            if k == 0 and args[0].requires_grad:
                args[0].register_hook(reached("E"))

        def after(module, args, output, k=k):
            recorder.mark("forward", "H" if k == len(blocks) - 1 else "")
            (output[0] if isinstance(output, tuple) else output).register_hook(reached(str(k)))
        hooks += [block.register_forward_pre_hook(before), block.register_forward_hook(after)]
    return hooks


def timeline_engines(device):
    """{name: (module, class, knobs)}. On CPUs buckets and chunks of 2 MiB (zero.py makes three of two there), on GPUs of 25."""
    import ddp
    import fsdp
    import gemini
    import zero
    cpu = device.type == "cpu"
    buckets, chunks = dict(bucket_mb=2.0 if cpu else 25.0), dict(chunk_mb=2.0 if cpu else 25.0)
    place = dict(placement="static") if cpu else dict(offload=True)  # where there is a copy stream, something must be copied
    return {"ddp": (ddp, ddp.DDP, buckets), "zero2": (zero, zero.Zero, dict(bucket_mb=3.0 if cpu else 25.0, stage=2)),
            "fsdp": (fsdp, fsdp.FSDP, {}), "gemini": (gemini, gemini.Gemini, dict(place, **chunks))}


def measure_timeline(device):
    """{strategy: spans of one step and of the next one's forward}, of rank 0, in ms from the step's begin."""
    import torch
    import torch.distributed as dist
    on_gpu, found = device.type == "cuda", {}
    layers, width, vocabulary, rows, length = (12, 768, 30522, 32, 128) if on_gpu else (4, 256, 1000, 8, 64)
    precision = "bf16" if on_gpu else "fp32"
    for name, (module, engine_class, knobs) in timeline_engines(device).items():
        model = bert(layers, width, vocabulary).to(device)
        engine = engine_class(model, precision=precision, max_norm=1.0, **knobs)
        batch = sentences(rows, length, device, seed=dist.get_rank())
        recorder = Phases() if on_gpu else Recorder()
        hooks = [] if on_gpu else mark_blocks(recorder, list(model.bert.encoder.layer))

        def step(engine=engine, recorder=recorder, batch=batch):
            recorder.mark("forward", "E")
            engine.forward_backward(batch)
            recorder.mark("step")
            engine.step()

        def backward(loss, *args, recorder=recorder, backward=torch.Tensor.backward, **kwargs):
            recorder.mark("backward", "H")
            backward(loss, *args, **kwargs)
            recorder.mark("backward")  # what the engine does after autograd

        with wrapped((torch.Tensor, "backward", backward)), contextlib.nullcontext() if on_gpu else watch(recorder, module):
            for _ in range(3):
                step()
            dist.barrier()
            found[name] = profile(step, recorder) if on_gpu else one_step(step, recorder)
        for hook in hooks:
            hook.remove()
    return dict(model=f"BERT, {layers} layers of width {width}, {rows} x {length} tokens per rank", precision=precision, rows=found)


def less(span, holes):
    """The parts of [from, to] that no hole covers."""
    (start, end), parts = span, []
    for a, b in sorted(holes):
        if b > start and a < end:
            if a > start:
                parts.append([start, a])
            start = max(start, b)
    return parts + ([[start, end]] if start < end else [])


def one_step(step, recorder, steps=12):
    """Spans [lane, kind, label, from ms, to ms] of the fastest step, which others on the machine have disturbed least, and of the
    forward behind it. Lane "network" is what is on its way, lane "waited" when this thread did nothing but wait for it: the label
    is the collective's number."""
    begins = []
    for _ in range(steps + 2):
        begins.append(time.perf_counter())
        step()
    recorder.mark(None)
    lengths = [b - a for a, b in zip(begins, begins[1:-1])]
    k = lengths.index(min(lengths))
    begin, next_, after_next = begins[k : k + 3]
    end = max(to for kind, _, start, to in recorder.stretches if kind == "forward" and next_ <= start < after_next)
    waits, spans = [wait for c in recorder.collectives for wait in c["waits"]], []

    def add(lane, kind, label, start, to):
        if to > begin and start < end:
            spans.append([lane, kind, label, round((max(start, begin) - begin) * 1e3, 2), round((min(to, end) - begin) * 1e3, 2)])
    for kind, label, start, to in recorder.stretches:
        for part in less([start, to], waits):
            add("compute", kind, label, *part)
    for number, c in enumerate(recorder.collectives):
        name = c["kind"] if c["bytes"] >= SMALL_BYTES else "small"
        if name != "small" and c["end"]:  # the last step's may have none
            add("network", name, number, c["launch"], c["end"])
        for wait in c["waits"]:
            if wait[1] - wait[0] > 1e-4:
                add("waited", name, number, *wait)
    first = min((label for lane, _, label, *_ in spans if lane != "compute"), default=0)
    spans = [[lane, kind, label - first if lane != "compute" else label, a, b] for lane, kind, label, a, b in spans]
    return dict(spans=spans, next_ms=round((next_ - begin) * 1e3, 2), end_ms=round((end - begin) * 1e3, 2))


# On a GPU: kernels and copies as torch.profiler has them. The phase of a kernel is that in which the host launched it.


class Phases:
    """Names the host's phases for the profiler."""

    def __init__(self):
        self.open = None

    def mark(self, kind, label=""):
        import torch
        if self.open:
            self.open.__exit__(None, None, None)
        self.open = torch.profiler.record_function(f"phase {kind}") if kind else None
        if self.open:
            self.open.__enter__()


def profile(step, recorder):
    """Two steps under the profiler."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for _ in range(2):
            step()
        recorder.mark(None)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        prof.export_chrome_trace(path)
        with open(path) as f:
            return spans_of_trace(json.load(f)["traceEvents"])


def spans_of_trace(events):
    """As `one_step`, from a trace of two steps: lanes compute, network, copies. Neighbours of one kind become one span."""
    phases = sorted((e["ts"], e["ts"] + e["dur"], e["name"].split()[1]) for e in events
                    if e.get("cat") == "user_annotation" and e["name"].startswith("phase "))
    launched = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")
                and "correlation" in e.get("args", {})}

    def phase_of(e):
        """(number, name) of the phase in which the host launched it."""
        at = launched.get(e["args"].get("correlation"), e["ts"])
        return next(((k, name) for k, (a, b, name) in enumerate(phases) if a <= at < b), (0, "forward"))

    raw = []
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name, (number, phase) = e["name"], phase_of(e)
            if e["cat"] == "gpu_memcpy" and re.search("HtoD|DtoH", name):
                lane, kind = "copies", "to the GPU" if "HtoD" in name else "from the GPU"
            elif "nccl" in name.lower():
                words = (("ReduceScatter", "reduce-scatter"), ("AllGather", "all-gather"), ("AllReduce", "all-reduce"))
                lane, kind = "network", next((kind for word, kind in words if word in name), "small")
            else:
                lane, kind = "compute", phase
            raw.append((e["ts"], e["ts"] + e["dur"], lane, kind, number))
    second = [k for k, (_, _, name) in enumerate(phases) if name == "forward"][1]  # phases: forward, backward, step, forward, ...
    begin = min(a for a, *_ in raw)
    next_ = min(a for a, _, lane, _, number in raw if number >= second and lane == "compute")
    end = max(b for _, b, lane, _, number in raw if number == second and lane == "compute")
    spans, gap_ms = [], (end - begin) / 1e3 / 500
    for a, b, lane, kind, _ in sorted(raw):
        if a < end:
            a, b = (a - begin) / 1e3, (min(b, end) - begin) / 1e3
            last = next((s for s in reversed(spans) if s[0] == lane), None)
            if last and last[1] == kind and a - last[4] < gap_ms:
                last[4] = round(max(b, last[4]), 3)
            else:
                spans.append([lane, kind, "", round(a, 3), round(b, 3)])
    return dict(spans=spans, next_ms=round((next_ - begin) / 1e3, 3), end_ms=round((end - begin) / 1e3, 3))


# ---- pipeline: the schedule's lists, put in time ---------------------------------------------------------------------------


def pipeline(ranks=4, micro_batches=8):
    """{schedule: spans [rank, "F" or "B", stage, micro-batch, from, to], idle}. A whole rank's forward takes 1, its backward 2."""
    from hybrid import schedule
    found = {}
    for name, chunks in (("1F1B", 1), ("interleaved", 2)):
        lists = [list(tasks) for tasks in schedule(ranks, micro_batches, chunks)]
        stages, ends, free, spans = ranks * chunks, {}, [0.0] * ranks, []
        while any(lists):
            for rank, tasks in enumerate(lists):
                while tasks:
                    kind, stage, k = tasks[0]
                    before = [("F", stage - 1, k)] * (stage > 0) if kind == "F" else [
                        ("F", stage, k), *[("B", stage + 1, k)] * (stage < stages - 1)]
                    if not all(task in ends for task in before):
                        break
                    start = max([free[rank], *(ends[task] for task in before)])
                    free[rank] = ends[kind, stage, k] = start + {"F": 1, "B": 2}[kind] / chunks
                    spans.append([rank, kind, stage, k, start, free[rank]])
                    tasks.pop(0)
        busy = sum(to - start for *_, start, to in spans)
        idle = 1 - busy / (ranks * max(free))
        formula = (ranks - 1) / (chunks * micro_batches + ranks - 1)
        assert math.isclose(idle, formula), (idle, formula)
        found[name] = dict(spans=sorted(spans), idle=round(idle, 4), chunks=chunks)
    return dict(ranks=ranks, micro_batches=micro_batches, rows=found)


# ---- drawing -----------------------------------------------------------------------------------------------------------------

# Mid-tones, since the background may be white or nearly black: the grey has a contrast of 4.3 to both.
GREY = "#7a7a7a"
BLUE, ORANGE, GREEN, VIOLET, RED, TEAL = "#3f7fc4", "#d07f2c", "#3f9a5f", "#9a6bc0", "#c9524e", "#2f9aa0"


def figure(width, height, rows, **knobs):
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "plot", "font.family": ["DejaVu Sans"], "font.size": 9, "text.color": GREY,
        "axes.labelcolor": GREY, "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "axes.titlecolor": GREY,
        "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "hatch.linewidth": 0.9,
        "axes.axisbelow": True, "grid.color": GREY, "grid.alpha": 0.25, "grid.linewidth": 0.6})
    fig, axes = plt.subplots(rows, 1, figsize=(width, height), layout="constrained", squeeze=False, **knobs)
    return fig, list(axes[:, 0])


def save(fig, name, title):
    """As SVG, without a date or anything else that differs from one run to the next."""
    import matplotlib.pyplot as plt
    path = os.path.join(RESULTS, name)
    fig.savefig(path, transparent=True, metadata={"Date": None, "Creator": None, "Title": title})
    plt.close(fig)
    with open(path) as f:
        text = f.read()
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")  # where it is not installed
    text = re.sub(r"^ *<!-- .*? -->\n", "", text, flags=re.M)  # each text's own words once more
    text = re.sub(r"^ +| +$", "", text, flags=re.M)
    text = re.sub(r"(?<=\.\d\d)\d+", "", text)  # hundredths of a point are enough
    with open(path, "w") as f:
        f.write(text)
    print(f"{os.path.relpath(path)}: {len(text) / 1e3:.0f} kB")


def draw_memory(data):
    from matplotlib.patches import Patch
    measured = {int(n): part for n, part in data["ranks"].items()}
    colours = (BLUE, GREEN, VIOLET, ORANGE, GREY)
    fig, axes = figure(8.2, 6.4, len(measured), sharex=True)
    for ax, (n, part) in zip(axes, measured.items()):
        rows = part["rows"]
        for y, (_, row) in enumerate(rows.items()):
            for at, which in ((y - 0.21, "measured"), (y + 0.21, "formula")):
                left = 0.0
                for value, colour in zip(row[which], colours):
                    style = dict(facecolor=colour, linewidth=0)
                    if which == "formula":
                        style = dict(facecolor="none", edgecolor=colour, linewidth=0.8, hatch="////")
                    ax.barh(at, value, left=left, height=0.36, **style)
                    left += value
                ax.text(left + 0.15, at, f"{sum(row[which]):.2f}", va="center", fontsize=7.5)
        ax.set_yticks(range(len(rows)), list(rows))
        ax.invert_yaxis()
        ax.set_title(f"{n} ranks", loc="left")
        ax.grid(axis="x")
        ax.set_xlim(0, 18)
    axes[-1].set_xlabel(f"bytes per parameter and rank; {part['model']}, {part['numel'] / 1e6:.1f} M parameters, "
                        f"{part['precision']}, buckets and chunks of {part['bucket_mb']:g} MiB")
    handles = [Patch(facecolor=c, label=name) for c, name in zip(colours, HELD)]
    handles.append(Patch(facecolor="none", edgecolor=GREY, hatch="////", label="hatched: by formula"))
    fig.legend(handles=handles, loc="outside upper center", ncols=3)
    save(fig, "memory.svg", "Memory per rank by strategy, measured and by formula")


def boxes(ax, colour, found, alpha=1.0, edge="none"):
    """Rectangles (from, to, middle, height) as one collection."""
    from matplotlib.collections import PolyCollection
    corners = [[(a, y - h / 2), (b, y - h / 2), (b, y + h / 2), (a, y + h / 2)] for a, b, y, h in found]
    ax.add_collection(PolyCollection(corners, facecolors=colour, edgecolors=edge, linewidths=0.5 * (edge != "none"), alpha=alpha))


def rows_of(flights):
    """What is on its way at the same time lies below each other: {label: row}."""
    ends, rows = [], {}
    for _, _, label, start, to in sorted(flights, key=lambda s: s[3]):
        row = next((k for k, end in enumerate(ends) if end <= start), len(ends))
        ends[row : row + 1] = [to]
        rows[label] = row
    return rows


def arrange(row):
    """A strategy's spans in the plane: [colour's name, from, to, y, height, pale], labels [x, y, text], ticks [y, lane], depth."""
    lanes = {lane: [s for s in row["spans"] if s[0] == lane] for lane in ("compute", "network", "waited", "copies")}
    found, labels = [[kind, a, b, 0.0, 0.7, False] for _, kind, _, a, b in lanes["compute"]], {}
    for _, kind, label, a, b in lanes["compute"]:  # a block's name once, in its longest piece
        step = kind, label, a > row["next_ms"]
        if label and b - a > max(0.012 * row["end_ms"], labels.get(step, [0])[0]):
            labels[step] = [b - a, (a + b) / 2, 0.0, label]
    ticks, y = [[0.0, "compute"]], 0.9
    if lanes["waited"] or not lanes["network"]:
        rows = rows_of(lanes["network"])
        depth = 1 + max(rows.values(), default=0)
        found += [[kind, a, b, y + 0.5 * rows[label], 0.42, True] for _, kind, label, a, b in lanes["network"]]
        found += [[kind, a, b, y + 0.5 * rows.get(label, 0), 0.42, False] for _, kind, label, a, b in lanes["waited"]]
    else:  # on a GPU: one stream, and nobody's wait can be seen
        depth = 1
        found += [[kind, a, b, y, 0.42, False] for _, kind, _, a, b in lanes["network"]]
    ticks.append([y + 0.25 * (depth - 1), "network"])
    y += 0.5 * depth + 0.2
    if lanes["copies"]:
        found += [[kind, a, b, y, 0.42, False] for _, kind, _, a, b in lanes["copies"]]
        ticks.append([y, "copies"])
        y += 0.7
    return found, [label[1:] for label in labels.values()], ticks, y


def draw_timeline(data, file):
    from matplotlib.patches import Patch
    colours = {"forward": BLUE, "backward": ORANGE, "step": GREEN, "all-reduce": VIOLET, "reduce-scatter": RED, "all-gather": TEAL,
               "small": GREY, "to the GPU": "#868c2c", "from the GPU": "#b0589a"}
    arranged = {name: arrange(row) for name, row in data["rows"].items()}
    depths = [depth + 1.1 for *_, depth in arranged.values()]
    fig, axes = figure(9.4, 1.3 + 0.33 * sum(depths), len(depths), sharex=True, gridspec_kw=dict(height_ratios=depths))
    for ax, (name, (found, labels, ticks, depth)) in zip(axes, arranged.items()):
        next_ms = data["rows"][name]["next_ms"]
        for kind, pale in dict.fromkeys((kind, pale) for kind, *_, pale in found):
            boxes(ax, colours[kind], [place for k, *place, p in found if (k, p) == (kind, pale)], 0.45 if pale else 1.0)
        for x, y, label in labels:
            ax.text(x, y, label, ha="center", va="center_baseline", color="white", fontsize=6.5)
        ax.axvline(next_ms, color=GREY, linewidth=0.8, linestyle=(0, (3, 2)))
        ax.text(next_ms, -0.48, " next step", fontsize=7, va="bottom")
        ax.set_yticks([at for at, _ in ticks], [lane for _, lane in ticks])
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(depth - 0.3, -0.5)
        ax.set_title(f"{name}: {next_ms:.0f} ms" if next_ms >= 100 else f"{name}: {next_ms:.1f} ms", loc="left")
        ax.grid(axis="x")
    axes[-1].set_xlim(0, 1.01 * max(row["end_ms"] for row in data["rows"].values()))
    axes[-1].set_xlabel(f"ms from the begin of the step on rank 0; {data['ranks']} ranks, {data['backend']}, {data['machine']}, "
                        f"{data['precision']}\n{data['model']}")
    there = {kind for found, *_ in arranged.values() for kind, *_ in found}
    names = dict(forward="forward (layer; E, H: embedding, head)", step="norm, Adam", small="losses, norm")
    handles = [Patch(facecolor=c, linewidth=0, label=names.get(kind, kind)) for kind, c in colours.items() if kind in there]
    if any(pale for found, *_ in arranged.values() for *_, pale in found):
        handles.append(Patch(facecolor=GREY, alpha=0.45, linewidth=0, label="faint: on its way, full: waited for"))
    fig.legend(handles=handles, loc="outside upper center", ncols=3)
    save(fig, file, "One training step of four strategies: computing, sending, waiting")


def draw_pipeline(data):
    from matplotlib.patches import Patch
    colours = {("F", 0): BLUE, ("B", 0): "#b8661c", ("F", 1): "#7a6cc4", ("B", 1): "#b24a6a"}
    fig, axes = figure(9.4, 4.2, len(data["rows"]), sharex=True)
    for ax, (name, row) in zip(axes, data["rows"].items()):
        tasks = {}
        for rank, kind, stage, k, start, to in row["spans"]:
            tasks.setdefault((kind, stage // data["ranks"]), []).append((start, to, rank, 0.84))
            ax.text((start + to) / 2, rank, str(k), ha="center", va="center_baseline", color="white",
                    fontsize=7 if row["chunks"] == 1 else 6)
        for kind, found in tasks.items():
            boxes(ax, colours[kind], found, edge="white")
        ax.set_ylim(data["ranks"] - 0.4, -0.6)
        ax.set_yticks(range(data["ranks"]), [f"rank {r}" for r in range(data["ranks"])])
        stages = data["ranks"] * row["chunks"]
        formula = "(P-1)/(M+P-1)" if row["chunks"] == 1 else "(P-1)/(2M+P-1)"
        ax.set_title(f"{name}, {stages} stages: idle {row['idle']:.1%} = {formula}", loc="left")
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    axes[-1].set_xlim(0, max(s[-1] for row in data["rows"].values() for s in row["spans"]) + 0.2)
    axes[-1].set_xlabel(f"time in forwards of one rank's part; P = {data['ranks']} ranks, M = {data['micro_batches']} "
                        "micro-batches, numbered; a backward takes two")
    names = {("F", 0): "forward", ("B", 0): "backward", ("F", 1): "forward, the rank's second stage",
             ("B", 1): "backward, the rank's second stage"}
    fig.legend(handles=[Patch(facecolor=colours[kind], label=label) for kind, label in names.items()],
               loc="outside upper center", ncols=4)
    save(fig, "pipeline.svg", "Pipeline schedules: 1F1B and interleaved")


# ---- command line ------------------------------------------------------------------------------------------------------------


def commit():
    """Of the strategy files; + where they differ from it."""
    git = lambda *args: subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True)
    try:
        head = git("rev-parse", "--short", "HEAD").stdout.strip() or "unknown"
        files = ("ddp.py", "zero.py", "fsdp.py", "gemini.py", "hybrid.py")
        return head + "+" * bool(git("diff", "--name-only", "HEAD", "--", *files).stdout.strip())
    except OSError:
        return "unknown"


def on_ranks(what, n, device):
    """This script again on n ranks; what rank 0 has measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.json")
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n)]
        script = [os.path.abspath(__file__), "--only", what, "--device", device, "--rank-out", out]
        subprocess.run(torchrun + script, env=env, check=True)
        with open(out) as f:
            return json.load(f)


def as_rank(what, out):
    import torch
    import torch.distributed as dist

    from ddp import distributed
    with distributed() as device:
        found = {"memory": measure_memory, "timeline": measure_timeline}[what](device)
        machine = f"{os.cpu_count()} CPU cores ({platform.machine()})" if device.type == "cpu" else torch.cuda.get_device_name()
        found |= dict(machine=machine, backend=dist.get_backend(), torch=torch.__version__)
        if dist.get_rank() == 0:
            with open(out, "w") as f:
                json.dump(found, f)


def measure(what, device):
    import torch
    import transformers
    found = dict(command=" ".join(["python benchmarks/plot.py", *sys.argv[1:]]), commit=commit(), python=platform.python_version(),
                 torch=torch.__version__, transformers=transformers.__version__)
    if what == "pipeline":
        return found | pipeline()
    parts = {n: on_ranks(what, n, device) for n in RANKS[what]}
    if what == "memory":
        return found | dict(machine=parts[2]["machine"], ranks=parts)
    return found | parts[2] | dict(ranks=2)


def rounded(x):
    """Numbers with four decimals."""
    if isinstance(x, dict):
        return {str(k): rounded(v) for k, v in x.items()}
    return [rounded(v) for v in x] if isinstance(x, (list, tuple)) else round(x, 4) if isinstance(x, float) else x


def write(data):
    """A line for each list of numbers or spans."""
    text = json.dumps(rounded(data), indent=1, ensure_ascii=False)
    one_line = lambda m: re.sub(r"\s*\n\s*", " ", m[0])
    text = re.sub(r"\[(?:\[[^][]*\]|[^][])*\]", one_line, text)
    with open(os.path.join(RESULTS, "plot.json"), "w") as f:
        f.write(text + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES), help="which pictures (all)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the timeline is recorded (cpu); memory is "
                        "measured on CPUs")
    parser.add_argument("--draw-only", action="store_true", help="from benchmarks/results/plot.json, without measuring (off)")
    parser.add_argument("--rank-out", help=argparse.SUPPRESS)  # this process is a rank and writes what it has measured here
    args = parser.parse_args()
    if args.rank_out:
        return as_rank(args.only[0], args.rank_out)
    path, data = os.path.join(RESULTS, "plot.json"), {}
    if os.path.exists(path):
        with open(path) as f:
            data = json.load(f)
    for what in () if args.draw_only else args.only:
        device = args.device if what == "timeline" else "cpu"
        data[what if device == "cpu" else "timeline-cuda"] = rounded(measure(what, device))
        write(data)
    for what in args.only:
        if what == "memory" and what in data:
            draw_memory(data[what])
        elif what == "pipeline" and what in data:
            draw_pipeline(data[what])
        for name in ("timeline", "timeline-cuda") if what == "timeline" else ():
            if name in data:
                draw_timeline(data[name], f"{name}.svg")


if __name__ == "__main__":
    main()
