"""Blocks that stand in several strategy files are the same to the letter, and within their budgets of lines."""
import pathlib
import re

import pytest
from models import ENGINES

ROOT = pathlib.Path(__file__).resolve().parent.parent
# lines, comments included
BUDGET = {"launch": 50, "meta": 36, "failures": 30, "adam": 168, "adam library": 40, "loss scale": 40, "fragments": 50, "batch": 55,
          "pieces": 60, "meeting": 50, "checkpoint": 145, "checkpoint files": 145, "full state": 105,
          "casts": 30, "slices": 110, "graph": 140}
SOME = {"casts", "slices", "meta", "graph"}  # only where weights are cast, or sharded, ...
FILES = sorted({f"{module}.py" for module, _, _ in ENGINES.values()})


def blocks(text):
    return dict(re.findall(r"# >>> shared block: (.+?)\n(.*?)# <<< shared block: \1\n", text, re.S))


def differences(texts: dict[str, str]) -> list[str]:
    """Names of blocks that are not the same in all files that have them; {file name: text}."""
    versions: dict[str, set[str]] = {}
    for text in texts.values():
        for name, body in blocks(text).items():
            versions.setdefault(name, set()).add(body)
    return sorted(name for name, bodies in versions.items() if len(bodies) > 1)


def test_copies_are_identical():
    assert differences({f: (ROOT / f).read_text() for f in FILES}) == []


def test_a_changed_copy_is_found():
    text = (ROOT / "ddp.py").read_text()
    assert differences({"a": text, "b": text.replace("MAX_SKIPS = 40", "MAX_SKIPS = 41")}) == ["loss scale"]


@pytest.mark.parametrize("file", FILES)
def test_budgets(file):
    text = (ROOT / file).read_text()
    found = {name: body.count("\n") for name, body in blocks(text).items()}
    assert text.count("# >>> shared block") == text.count("# <<< shared block") == len(found)
    assert BUDGET.keys() - SOME <= found.keys() <= BUDGET.keys()
    assert {n: lines for n, lines in found.items() if lines > BUDGET[n]} == {}


@pytest.mark.parametrize("file", FILES)
def test_strategies_import_no_sibling_and_call_no_torch_strategy(file):
    text = (ROOT / file).read_text()
    imports = set(re.findall(r"^\s*(?:from|import) ([\w.]+)", text, re.M))
    assert not {i.split(".")[0] for i in imports} & {"ddp", "zero", "fsdp", "gemini", "hybrid", "train_glue", "train_cifar"}
    code = re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.S)
    for taken in ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "ZeroRedundancyOptimizer", "DTensor",
                  "distribute_tensor", "distributed.pipelining", "GradScaler"):
        assert taken not in code, taken
