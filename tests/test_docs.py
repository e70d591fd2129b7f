"""What README.md and benchmarks/one-step.md name exists, found by reading the sources (ast) without importing them; and the figures
of one-step.md are what two CPU ranks measure. 12 s, most of it the start of the ranks."""
import ast
import importlib
import pathlib
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
STRATEGIES = ("ddp.py", "zero.py", "fsdp.py", "gemini.py", "hybrid.py")
SCRIPTS = ("train_glue.py", "train_cifar.py", *(f"benchmarks/{name}.py" for name in ("adam", "memory", "step", "scale", "offload", "plain", "plot")))
NOT_OURS = {"--standalone", "--nproc_per_node", "--nnodes", "--node_rank", "--rdzv_backend", "--rdzv_endpoint", "--rdzv_id",
            "-r", "-m", "--help"}  # of torchrun; of pip, pytest, argparse
WRITTEN = {"meta.json"}  # files that runs write


def names_in(file):
    """Top-level names of a Python file, and "Class.name" for methods, fields and what methods set on self."""
    def stored(node):
        return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]

    assigns, defines, found = (ast.Assign, ast.AnnAssign), (ast.FunctionDef, ast.ClassDef), set()
    for node in ast.parse((ROOT / file).read_text()).body:
        found.update([node.name] if isinstance(node, defines) else stored(node) if isinstance(node, assigns) else [])
        if isinstance(node, ast.ClassDef):
            own = [line.name for line in node.body if isinstance(line, defines)]
            own += [name for line in node.body if isinstance(line, assigns) for name in stored(line)]
            own += [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                    and isinstance(n.value, ast.Name) and n.value.id == "self"]
            found.update(f"{node.name}.{name}" for name in own)
    return found


def wrong_names(text):
    """Of `file.py: name`, `Class.name` and `Class`: those that do not exist. Below a heading that names a file they must be in that
    file, elsewhere in any strategy's."""
    wrong = []
    for section in re.split(r"^(?=## )", text, flags=re.M):
        files = re.findall(r"\w+\.py", section.splitlines()[0]) if section.startswith("## ") else []
        known = {file: names_in(file) for file in files or STRATEGIES}
        anywhere = set().union(*known.values())
        for token in re.findall(r"`([^`\n]+)`", section):
            if found := re.fullmatch(r"(\w+\.py): ([\w.]+)", token):
                if not (ROOT / found[1]).exists() or found[2] not in names_in(found[1]):
                    wrong.append(token)
            elif re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)?", token) and token not in anywhere:
                wrong.append(token)
    return wrong


def code_in(text):
    """What stands between backticks, in indented and in fenced blocks, a piece a line."""
    return "\n".join(filter(None, sum(re.findall(r"```(.*?)```|`([^`\n]+)`|^ {4}([^\n]*)$", text, re.M | re.S), ())))


def wrong_flags(text):
    """Options in code that no argparse of a script here has; and of `--engine key=value` the keys that no engine takes."""
    known, arguments = set(NOT_OURS), set()
    for file in SCRIPTS:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                known.update(a.value for a in node.args if isinstance(a, ast.Constant))
    for file in STRATEGIES:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments.update(a.arg for a in node.args.kwonlyargs)
    code = code_in(text)
    flags = re.findall(r"(?<![\w-])(--[a-z][\w-]*|-[a-z])(?![\w-])", code)
    keys = re.findall(r"--engine (\w+)=", code)
    return sorted({flag for flag in flags if flag not in known} | {key for key in keys if key not in {*arguments, "key"}})


def wrong_files(text, folder=ROOT):
    """Files and folders that are named in code, or linked, and are not there; paths are from the root or from `folder`."""
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    files = re.findall(r"(?<![\w/.*-])[\w./-]+\.(?:py|cu|md|svg|jsonl|json|txt|toml)\b", code_in(text))
    folders = re.findall(r"(?<![\w/.])[a-z.]+/(?=\s|$)", code_in(text))
    return sorted(name for name in {*links, *files, *folders} - WRITTEN
                  if not (ROOT / name).exists() and not (folder / name).exists())


@pytest.mark.parametrize("file", ["README.md", "benchmarks/one-step.md"])
def test_what_is_named_exists(file):
    text = (ROOT / file).read_text()
    assert wrong_files(text, (ROOT / file).parent) == []
    assert wrong_flags(text) == []
    if file != "README.md":
        assert wrong_names(text) == []
        assert len(re.findall(r"`(?:Zero|Gemini)\.\w+`", text)) > 30


def test_what_is_not_there_is_found():
    steps = (ROOT / "benchmarks" / "one-step.md").read_text()
    assert wrong_names(steps.replace("`Zero._on_grad`", "`Zero._on_gradient`")) == ["Zero._on_gradient"]
    assert wrong_names(steps.replace("`Gemini._reach`", "`Zero._launch`")) == ["Zero._launch"]  # below the other file's heading
    assert wrong_names("`zero.py: Zero._gather` `zero.py: gather` `Bucket.shard` `Bucket.sharded` `SliceSum` `SliceSums`") == [
        "zero.py: gather", "Bucket.sharded", "SliceSums"]
    code = "`--mode ddp --tpp 2 -q`, `--engine bucket_mb=1 --engine bucket=1`\n\n    python x --dta=3\n\nwords --outside of code"
    assert wrong_flags(code) == ["--dta", "--tpp", "-q", "bucket"]
    assert wrong_files("`zero.py`, `zeros.py`, [rows](benchmarks/results/none.jsonl), `tests/` and `test/`") == [
        "benchmarks/results/none.jsonl", "test/", "zeros.py"]


def example(name):
    """The engine of one-step.md's example, and its buckets or chunks."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(9)])
    if name == "zero":
        engine = importlib.import_module("zero").Zero(model, precision="bf16", stage=2, bucket_mb=2.3)
        pieces, members = engine.buckets, [[8, 7, 6], [5, 4, 3], [2, 1, 0]]
    else:
        engine = importlib.import_module("gemini").Gemini(model, precision="bf16", placement="static", chunk_mb=1.5)
        pieces, members = engine.chunks, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [list(piece.views) for piece in pieces] == members
    return model, engine, pieces


def figures(name):
    """On each rank: what one-step.md must say of the third step, as measured; and the states that `1.weight` goes through."""
    model, engine, pieces = example(name)
    ours = next(piece for piece in pieces if 1 in piece.views)
    fragment, = (f for f in engine.fragments if f.name == "1.weight")
    assert (fragment.start, fragment.end) == ((0, 131072) if dist.get_rank() == 0 else (131072, 262144))
    assert ours.starts[1] == 262144 and (fragment.half is None) == (name == "gemini")
    n_bytes = lambda t: t.numel() * t.element_size()
    bytes_held = lambda: {kind: sum(places.values()) for kind, places in engine.memory().items()}
    states = []
    note = lambda *_: states.append(engine.state("1.weight").name) if name == "gemini" else None
    hooks = [layer.register_forward_pre_hook(note) for layer in model] + [model[1].register_forward_hook(note)]
    hooks += [p.register_post_accumulate_grad_hook(note) for p in model.parameters()]
    for _ in range(3):
        gathers, between = [getattr(piece, "gathers", 0) for piece in pieces], bytes_held()
        states.clear()
        engine.forward_backward(torch.randn(4, 512), loss_fn=lambda out, x: out.float().square().mean())
        note()
        held = bytes_held()
        engine.step()
    for hook in hooks:
        hook.remove()
    whole, room = ours.weights if name == "zero" else ours.full, sum(map(n_bytes, getattr(engine, "_room", ())))
    b = lambda t, times=1: f"{times * n_bytes(t):,} bytes"
    numel, gradients, update = sum(p.numel() for p in model.parameters()), held["gradients"] - room, b(fragment.master, 3)
    norm_bytes = 8 * (1 + len(engine.params))
    said = [f"= {model[1].weight.numel():,} elements, that is {b(ours.views[1])}", f"Ψ = {numel:,} elements",
            f": {whole.numel():,} elements, {b(whole)}", f"rank 0: {ours.master.numel():,} elements | rank 1"]
    if name == "zero":
        assert held == between
        said += [f"{held['parameters']:,} bytes of weights (2Ψ), {held['optimizer']:,} of masters and moments (12Ψ/2), ",
                 f"(12Ψ/2), {gradients:,} of gradient slices (2Ψ/2)", f"adds {room:,} bytes for what travels",
                 f"all, bf16 | {n_bytes(ours.views[1]):,} |", f"were rounded | {n_bytes(fragment.master):,} |",
                 f"half, fp32 | {2 * n_bytes(fragment.exp_avg):,} |", f"used up | {n_bytes(fragment.grad):,} |",
                 f"to rank 1, {b(ours.shard)}, of which {n_bytes(fragment.half):,}", f"all-reduced: {norm_bytes} bytes",
                 f"moments, {update}, and their bf16 copy, {b(fragment.half)}", f"rank 0's slice, {b(ours.shard)}, of which",
                 "all nine {reduce_scatter:,} and {all_gather:,} (`Zero.traffic`), and {all_reduce} bytes".format(**engine.traffic)]
    else:
        assert held["parameters"] == between["gradients"] == 0 and between["parameters"] == n_bytes(whole)  # gathered early
        gathers = [piece.gathers - before for piece, before in zip(pieces, gathers)]
        assert gathers == [2, 1, 1] and engine.plan.order == [[0], [1], [2], [2], [1], [0]]
        said += [f"of them, {update}, and nothing else", f"all nine {held['optimizer']:,} bytes (12Ψ/2)",
                 f"gives the chunk its {b(whole)}", f"that slice, {b(ours.shard)}, of which {n_bytes(fragment.grad):,}",
                 f"its memory, {b(ours.shard)}", f"Of all chunks {gradients:,} bytes of gradients",
                 f"{norm_bytes} bytes all-reduced", f"moments, {update}, and no bf16 copy",
                 f"{engine.traffic['all_gather']:,} bytes of weights in {sum(gathers)} gathers",
                 f"gathers, and {engine.traffic['reduce_scatter']:,} of gradients"]
    return said, states


@pytest.mark.parametrize("name", ["zero", "gemini"])
def test_figures_of_one_step(pool, name):
    head, *sections = re.split(r"^## ", (ROOT / "benchmarks" / "one-step.md").read_text(), flags=re.M)
    text = " ".join((head + next(section for section in sections if f"{name}.py" in section.splitlines()[0])).split())
    for said, states in pool.run(2, figures, name):
        assert [figure for figure in said if figure not in text] == []
        if name == "gemini":
            # Before each layer, and after the second; the first asks while chunk 0 is on its way. Then at the gradients of 8 to 0.
            assert states == ["FREE", "HOLD", "COMPUTE", "COMPUTE", "HOLD_AFTER_FWD", *["FREE"] * 5,
                              *["FREE"] * 6, "HOLD_AFTER_FWD", "HOLD_AFTER_BWD", "READY_FOR_REDUCE", "FREE"]
