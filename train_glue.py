"""Fine-tune a transformer on a GLUE task. The loop is the same for every strategy; `--mode` picks the file.

    python train_glue.py                                                        # one process, mode ddp, MRPC
    torchrun --standalone --nproc_per_node 2 train_glue.py --mode ddp           # two ranks; CPUs will do
    torchrun --standalone --nproc_per_node 4 train_glue.py --mode ddp_fp16 --model google-bert/bert-base-uncased
    torchrun --standalone --nproc_per_node 2 train_glue.py --save out               # killed? The same with --resume out

Who computes what, with N ranks and a global batch of B samples (--batch_size):

    training    order of one epoch = a permutation from (seed, epoch), the same on every rank and for every N
                global batch g     = order[g*B : (g+1)*B]         the last, incomplete one is dropped
                rank r             = the r-th of N equal slices of it, so B must be a multiple of N
    evaluation  units of 16 consecutive examples; rank r takes units r, r+N, r+2N, ...; the logits of all units go to
                every rank. Each example counts once, and in the same unit whatever N is: metrics do not depend on N.

One run, and the sections of this file:
    1. arguments: everything that can be refused before ranks meet is refused there
    2. data: the hub if it answers, a folder of its parquet files or of the original TSV files
    3. built-in corpora: made-up sentences for each of the nine tasks
    4. tokens and batches
    5. model: a pretrained one, or a small random BERT
    6. evaluation and metrics
    7. saving and resuming: a checkpoint after every epoch, a Hugging Face folder at the end
    8. the run: engine, schedule, `forward_backward` and `step`, one JSON line at the end

A bad argument ends every rank with exit status 2 (of which torchrun itself makes 1), a failure or a missed
--target_f1 with 1.
"""

import argparse
import ast
import copy
import csv
import hashlib
import http.client
import importlib
import inspect
import json
import math
import os
import shutil
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and a later fork do not mix, and it says so

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

# transformers, datasets and tokenizers are imported where they are used: after `hub_answers` has decided whether they
# may try the network, because they read HF_HUB_OFFLINE when they are imported.


@dataclass
class Task:
    fields: tuple[str, ...]  # column names on the hub: one text, or a pair
    labels: int  # 1: regression on a float label
    metrics: tuple[str, ...]  # names in METRICS
    tsv: tuple[str, ...]  # the same columns in the original TSV files, and last that of the label
    classes: tuple[str, ...] = ("0", "1")  # how those files write label 0, 1, ...
    validation: tuple[str, ...] = ("validation",)  # split names; the test splits have no labels (all -1)


RTE = ("entailment", "not_entailment")
MNLI = ("entailment", "neutral", "contradiction")
TASKS = {
    "cola": Task(("sentence",), 2, ("matthews_correlation",), ("sentence", "label")),
    "sst2": Task(("sentence",), 2, ("accuracy",), ("sentence", "label")),
    "mrpc": Task(("sentence1", "sentence2"), 2, ("accuracy", "f1"), ("#1 String", "#2 String", "Quality")),
    "qqp": Task(("question1", "question2"), 2, ("accuracy", "f1"), ("question1", "question2", "is_duplicate")),
    "stsb": Task(("sentence1", "sentence2"), 1, ("pearson", "spearmanr"), ("sentence1", "sentence2", "score"), ()),
    "mnli": Task(("premise", "hypothesis"), 3, ("accuracy",), ("sentence1", "sentence2", "gold_label"), MNLI,
                 ("validation_matched", "validation_mismatched")),
    "qnli": Task(("question", "sentence"), 2, ("accuracy",), ("question", "sentence", "label"), RTE),
    "rte": Task(("sentence1", "sentence2"), 2, ("accuracy",), ("sentence1", "sentence2", "label"), RTE),
    "wnli": Task(("sentence1", "sentence2"), 2, ("accuracy",), ("sentence1", "sentence2", "label")),
}


@dataclass
class Mode:
    file: str  # the strategy file beside this one, without .py; only the chosen one is imported
    engine: str  # its class
    precision: str = "bf16"  # unless --precision says otherwise
    knobs: dict = field(default_factory=dict)  # arguments that make the mode what it is


MODES = {
    "ddp": Mode("ddp", "DDP", "fp32"),
    "ddp_fp16": Mode("ddp", "DDP", "fp16"),
    "zero1": Mode("zero", "Zero", knobs={"stage": 1}),
    "zero2": Mode("zero", "Zero", knobs={"stage": 2}),
    "low_level_zero": Mode("zero", "Zero", knobs={"stage": 1, "initial_scale": 32.0}),  # the scale is for fp16 only
    "fsdp": Mode("fsdp", "FSDP"),
    "gemini": Mode("gemini", "Gemini", knobs={"initial_scale": 32.0}),
    "hybrid": Mode("hybrid", "Hybrid"),
}
ALIASES = {"torch_ddp": "ddp", "torch_ddp_fp16": "ddp_fp16", "torch_fsdp": "fsdp", "hybrid_parallel": "hybrid"}

HUB_DATA, HUB_MODEL = "nyu-mll/glue", "google-bert/bert-base-uncased"
LR, EPOCHS = 2.4e-5, 3  # for a pretrained model, per data-parallel rank
BUILTIN_LR, BUILTIN_EPOCHS = 1e-3, 12  # for the built-in model, which starts from random weights
UNIT = 16  # examples evaluated together
PAD_MULTIPLE = 8  # lengths are padded to a multiple of this: fewer shapes, and what tensor cores like

# ---- 1. arguments --------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Ends the run, with exit status 2 for a bad argument. Raised only where every rank decides the same."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse itself would print usage and message on every rank
        raise Stop(message)


def strategy_options(p: Parser, seeds: str) -> None:
    """Options that say how to train and not what: every script has them."""
    p.add_argument("--mode", "-p", "--plugin", default="ddp", choices=[*MODES, *ALIASES],
                   help="the strategy, also by ColossalAI's names; default ddp")
    p.add_argument("--micro_batches", type=int, default=1, help="pieces of a rank's share of a batch; default 1")
    p.add_argument("--no_scale_lr", action="store_true", help="do not multiply the learning rate")
    p.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="ddp: fp32, ddp_fp16: fp16, others: bf16")
    p.add_argument("--seed", type=int, default=42, help=f"of {seeds}; default 42")
    p.add_argument("--tp", type=int, help="tensor-parallel ranks, for modes that have them; default 1")
    p.add_argument("--pp", type=int, help="pipeline stages, for modes that have them; default 1")
    p.add_argument("--schedule", choices=["1f1b", "interleaved"], help="of a pipeline's micro-batches; default 1f1b")
    p.add_argument("--sp_mode", choices=["split_gather", "all_to_all", "ring"],
                   help="mode hybrid: tp ranks divide tokens, too, or how sp ranks attend to each other's; default off")
    p.add_argument("--sp", type=int, help="sequence-parallel ranks, for modes that have them; default 1")
    p.add_argument("--zero_stage", type=int, choices=[0, 1], help="mode hybrid: 1 divides the optimizer between copies; default 1")
    p.add_argument("--offload", action="store_true", help="optimizer in host memory, for modes that can; default off")
    p.add_argument("--graph", action="store_true", help="each training step as one CUDA graph, for modes that can; default off")
    p.add_argument("--engine", nargs="+", default=[], metavar="KEY=VALUE", help="other arguments of the mode's class")


def check_options(args: argparse.Namespace, at_least_1: tuple[str, ...], between: tuple[tuple[str, float, float], ...]) -> None:
    """Fill in what the mode decides; Stop for a number out of range, among these options or those of `strategy_options`."""
    args.mode = ALIASES.get(args.mode, args.mode)
    args.precision = args.precision or MODES[args.mode].precision
    for name in (*at_least_1, "micro_batches", "tp", "pp", "sp"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise Stop(f"--{name} must be at least 1, got {getattr(args, name)}")
    for name, low, high in (*between, ("seed", 0, math.inf)):
        if getattr(args, name) is not None and not low <= getattr(args, name) <= high:
            raise Stop(f"--{name} must be between {low} and {high}, got {getattr(args, name)}")
    args.copy_ranks = (args.tp or 1) * (args.pp or 1) * (args.sp or 1)  # ranks that share one copy of the model


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = Parser(description="Fine-tune a model on a GLUE task with one of the strategies.", allow_abbrev=False)
    p.add_argument("-t", "--task", default="mrpc", choices=TASKS, help="default mrpc")
    p.add_argument("--data", default="auto",
                   help="auto (default): the hub, or the built-in corpus if the hub does not answer in 4 s; builtin; "
                   "or a folder: TASK/train-*.parquet and so on as on the hub, or TASK/train.tsv and dev.tsv as first given out")
    p.add_argument("--model", default="auto",
                   help="a hub name; a local folder; builtin: a random BERT of 2 layers, width 64; auto (default): "
                   f"{HUB_MODEL}, or builtin if the data is")
    p.add_argument("--batch_size", type=int, default=32, help="samples per step, all ranks together; default 32")
    p.add_argument("--epochs", type=int, help=f"default {EPOCHS}, for the built-in model {BUILTIN_EPOCHS}")
    p.add_argument("--lr", type=float,
                   help="peak learning rate, given or default, per data-parallel rank: it is multiplied by their "
                   f"number; default {LR:g}. Only the built-in model's own default, {BUILTIN_LR:g}, is not")
    p.add_argument("--warmup", type=float, default=0.1, help="part of the steps in which lr rises; default 0.1")
    p.add_argument("--weight_decay", type=float, default=0.01, help="not for biases and norms; default 0.01, off 0")
    p.add_argument("--max_length", type=int, default=128, help="longer inputs are cut, in tokens; default 128")
    p.add_argument("--target_f1", type=float, help="exit with status 1 if F1 ends below this; default off")
    p.add_argument("--save", metavar="DIR",
                   help="after every epoch a checkpoint in DIR/checkpoint, and at the end DIR is a Hugging Face folder of the "
                   "model; what an earlier run saved there is replaced; default off")
    p.add_argument("--resume", metavar="DIR",
                   help="go on from DIR/checkpoint, with the options of that run; other ranks, mode, precision and "
                   "micro_batches will do; default off")
    strategy_options(p, "weights, order and dropout")
    args = p.parse_args(argv)
    check_options(args, ("batch_size", "epochs"), (("max_length", 8, math.inf), ("lr", 0, math.inf), ("warmup", 0, 1),
                                                   ("weight_decay", 0, math.inf), ("target_f1", 0, 1)))
    if args.target_f1 is not None and "f1" not in TASKS[args.task].metrics:
        raise Stop(f"--target_f1: {args.task} is not measured by F1 but by {', '.join(TASKS[args.task].metrics)}")
    if args.data not in ("auto", "builtin"):
        data_files(args.data, args.task)  # refuses
    args.model = os.path.expanduser(args.model)
    if args.model.startswith(("/", "./", "../", "~")) and not os.path.isdir(args.model):
        raise Stop(f"--model {args.model}: there is no such folder")
    if args.save is not None:
        args.save = os.path.realpath(os.path.expanduser(args.save))
        check_save(args.save)  # refuses
    if args.resume is not None:
        args.resume = os.path.realpath(os.path.expanduser(args.resume))
        checkpoint_in(args.resume)  # refuses
    return args


def load_engine(args):
    """The mode's module, its class, and the arguments that command line and mode give to it."""
    mode = MODES[args.mode]
    if not (Path(__file__).parent / f"{mode.file}.py").exists():
        raise Stop(f"mode {args.mode} is not built yet ({mode.file}.py is missing)")
    module = importlib.import_module(mode.file)
    engine_class = getattr(module, mode.engine)
    known = set(inspect.signature(engine_class).parameters) - {"model", "params", "group", "device"}
    knobs = dict(mode.knobs)
    for name in ("tp", "pp", "schedule", "sp", "sp_mode", "zero_stage", "offload"):
        if getattr(args, name) is not None and getattr(args, name) is not False:  # not given
            if name not in known:
                raise Stop(f"--{name}: mode {args.mode} has no such option")
            knobs[name] = getattr(args, name)
    free = sorted(known - {"lr", "weight_decay", "precision", "tp", "pp", "schedule", "sp", "sp_mode", "zero_stage",
                           "offload", *mode.knobs})
    for item in args.engine:
        key, equals, value = item.partition("=")
        if not equals or key not in free:
            raise Stop(f"--engine {item}: expected KEY=VALUE, for mode {args.mode} KEY one of {', '.join(free)}")
        try:
            knobs[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            knobs[key] = value  # a bare word, as in placement=auto
    return module, engine_class, knobs


def build_engine(args, engine_class, model, params, **arguments):
    """The strategy around the model. What its class says of an --engine argument is a Stop."""
    try:
        return engine_class(model, params, **arguments)
    except (ValueError, TypeError, NotImplementedError) as error:
        if not args.engine:
            raise
        raise Stop(f"--engine {' '.join(args.engine)}: {error}") from error


def data_parallel_ranks(args, world_size: int) -> int:
    """How many ranks, or groups of ranks that share a copy of the model, have samples of their own."""
    if world_size % args.copy_ranks:
        raise Stop(f"{world_size} ranks are not a multiple of tp x pp x sp = {args.copy_ranks}")
    return world_size // args.copy_ranks


def check_batch_size(args, world_size: int) -> None:
    data_ranks = data_parallel_ranks(args, world_size)
    share = args.batch_size // data_ranks
    if args.batch_size % data_ranks:
        raise Stop(f"--batch_size {args.batch_size} is not a multiple of the {data_ranks} data-parallel ranks")
    if args.micro_batches > share:
        raise Stop(f"--micro_batches {args.micro_batches} is more than the {share} samples of a rank")


# ---- 2. data -------------------------------------------------------------------------------------------------------


def answers(url: str, limit_s: float = 4.0) -> bool:
    """Whether a server answers within `limit_s` seconds. The thread is there for what has no limit of its own, a silent
    name server. urllib takes the proxies of the environment."""
    heard = []

    def ask():
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=limit_s).close()
            heard.append(True)
        except (OSError, ValueError, http.client.HTTPException):
            pass  # no route, no name, refused, an error status, a malformed address, not HTTP

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_s)
    return bool(heard)


def hub_answers(limit_s: float = 4.0) -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    return answers(os.environ.get("HF_ENDPOINT") or "https://huggingface.co", limit_s)


def ask_rank_0(question, device):
    """question() of rank 0, on every rank: ranks that asked the network themselves might hear different answers."""
    # before: rank 0 knows.  after: all ranks know.  sends: a few bytes; everybody waits for rank 0.
    answer = [question() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0, device=device)
    return answer[0]


def on_all_ranks(prepare, node_first: bool):
    """prepare() on every rank; if it fails on any, all ranks stop with the message of the first that failed.

    node_first: local rank 0 of each node goes first and the others wait, because `prepare` may download; they then
    find the files in the node's cache. A download may take as long as the process group waits.
    """
    first, result = int(os.environ.get("LOCAL_RANK", 0)) == 0, None
    for my_turn in (first, not first) if node_first else (True,):
        error = None
        if my_turn:
            try:
                result = prepare()
            except Stop as stop:
                error = str(stop), stop.status
            except Exception as e:
                error = f"rank {dist.get_rank()}: {type(e).__name__}: {e}", 1
        # before: each rank knows its own error.  after: all know all of them, and decide alike.
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        for error in filter(None, errors):
            raise Stop(*error)
    return result


# Where a folder keeps a split of a task, in order of preference. The third is MRPC as Microsoft gives it out: its test
# pairs do have labels, but they are 1,725 others than the 408 that GLUE's script sets aside in dev.tsv.
LAYOUTS = (
    lambda split: f"{split}-*.parquet",
    lambda split: split.replace("validation", "dev") + ".tsv",
    lambda split: "msr_paraphrase_" + split.replace("validation", "test") + ".txt",
)


def data_files(folder: str, task: str) -> dict[str, list[str]]:
    """Per split, the files of one of LAYOUTS under FOLDER/mrpc, MRPC, SST-2, ... Stop (2) with what is there instead."""
    where = Path(folder).expanduser()
    inside = sorted(where.iterdir()) if where.is_dir() else []
    places = [f for f in inside if f.is_dir() and f.name.lower().replace("-", "") == task]
    for layout in LAYOUTS:
        for place in places:
            files = {split: sorted(map(str, place.glob(layout(split)))) for split in ("train", *TASKS[task].validation)}
            if all(files.values()):
                return files
    listing = ", ".join(f.name for f in (sorted(places[0].iterdir()) if places else inside)[:12]) or "nothing"
    wanted = (" and ".join(layout(split) for split in ("train", *TASKS[task].validation)) for layout in LAYOUTS[:2])
    raise Stop(f"--data {folder}: no {where / task} with {' or '.join(wanted)}; "
               + (f"{places[0] if places else where} contains {listing}" if where.is_dir() else f"there is no folder {where}"))


def read_tsv(file: str, name: str) -> tuple[list, list]:
    """(texts, labels) of an original TSV file, labels numbered as on the hub. Stop with file and line of a bad row."""
    task, texts, labels, skipped = TASKS[name], [], [], 0
    with open(file, encoding="utf-8-sig") as lines:  # some begin with a byte order mark
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)  # a quotation mark is text like any other
        try:
            header = ["source", "label", "star", "sentence"] if name == "cola" else next(rows, [])  # CoLA's have none
            if missing := set(task.tsv) - set(header):
                raise Stop(f"{file}, line 1: no column {', '.join(sorted(missing))} in the header")
            columns = [header.index(column) for column in task.tsv]
            for row in rows:
                if not row:  # an empty line
                    continue
                if name == "qqp" and len(row) < len(header):  # questions with a line break in them; the hub lacks them too
                    skipped += 1
                    continue
                if len(row) != len(header):
                    raise Stop(f"{file}, line {rows.line_num}: {len(row)} columns instead of {len(header)}")
                *text, label = (row[column] for column in columns)
                try:
                    labels.append(task.classes.index(label) if task.classes else float(label))
                    if not math.isfinite(labels[-1]):
                        raise ValueError
                except ValueError:
                    raise Stop(f"{file}, line {rows.line_num}: the label is {label!r}, not "
                               + (" or ".join(task.classes) or "a number")) from None
                texts.append(tuple(text))
        except (UnicodeDecodeError, csv.Error) as error:
            raise Stop(f"{file}, after line {rows.line_num}: {error}") from error
    if not labels:
        raise Stop(f"{file}: no rows")
    if skipped and dist.get_rank() == 0:
        print(f"{file}: left out {skipped} rows of fewer than {len(header)} columns", flush=True)
    return texts, labels


def load_data(args, source: str) -> dict[str, tuple[list, list]]:
    """Per split (texts, labels); a text is a tuple of one or two strings. source: hub, builtin or folder."""
    task = TASKS[args.task]
    if source == "builtin":
        return builtin_data(args.task)
    files = data_files(args.data, args.task) if source == "folder" else {}
    if files and not files["train"][0].endswith(".parquet"):
        if files["train"][0].endswith(".txt") and dist.get_rank() == 0:
            print(f"{args.data}: Microsoft's own test pairs serve for validation; GLUE's scores are on others", flush=True)
        return {split: read_tsv(file, args.task) for split, (file,) in files.items()}
    import datasets
    if dist.get_rank() > 0:
        datasets.disable_progress_bars()
    if source == "hub":
        hub = datasets.load_dataset(HUB_DATA, args.task)
        splits = {split: hub[split] for split in ("train", *task.validation)}
    else:  # streamed: nothing is written to a cache, so ranks cannot get into each other's way
        splits = {split: datasets.load_dataset("parquet", data_files=shards, split="train", streaming=True)
                  for split, shards in files.items()}
    data = {}
    for split, rows in splits.items():
        texts, labels = [], []
        for chunk in rows.iter(batch_size=1000):
            if missing := {*task.fields, "label"} - set(chunk):
                raise Stop(f"{args.task}, split {split}: column {', '.join(sorted(missing))} is missing")
            texts += zip(*(chunk[name] for name in task.fields), strict=True)
            labels += chunk["label"]
        if task.labels > 1 and not set(labels) <= set(range(task.labels)):
            raise Stop(f"{args.task}, split {split}: labels outside 0..{task.labels - 1}, {sorted(set(labels))[:5]}")
        data[split] = (texts, labels)
    return data


NO_HUB = """\
+--------------------------------------------------------------------------------------------------+
|  The Hugging Face hub does not answer: training on a BUILT-IN corpus of made-up sentences.       |
|  The scores are NOT GLUE scores. For real data give --data DIR, or connect to the hub.           |
+--------------------------------------------------------------------------------------------------+"""


def choose_sources(args, device) -> tuple[str, str, bool]:
    """(hub, builtin or folder; the model's name; whether the hub answers). Asks only if it matters."""
    source = args.data if args.data in ("builtin", "auto") else "folder"
    name = "builtin" if args.model == "auto" and source == "builtin" else args.model
    asks = source == "auto" or name != "builtin" and not os.path.isdir(name)
    online = ask_rank_0(hub_answers, device) if asks else True
    if not online:
        os.environ["HF_HUB_OFFLINE"] = "1"  # the libraries would retry for 25 s, each of them
    if source == "auto":
        source = "hub" if online else "builtin"
        if source == "builtin" and dist.get_rank() == 0:
            print(NO_HUB, flush=True)
    if name == "auto":
        name = "builtin" if source == "builtin" else HUB_MODEL
    return source, name, online


# ---- 3. built-in corpora -------------------------------------------------------------------------------------------

# Sentences are templates with slots, and a label comes about in two ways, or both:
#
#   fillers  Two sentences have the same five fillers (`a|b` are two words for one), or some of the second's differ. One
#            that differs is again uniform, so that each word is as frequent in pairs of any label.
#   sides    A slot has words of two sides: singular and plural, good and bad, "true" and "false". Two of them decide:
#            their sides agree or not. Each alone is a fair coin whatever the label is.
#
# So no single word tells the label (test_glue.py::test_corpus_words). Templates with an even and with an odd number are
# the two sides of the slot "template".


@dataclass
class Corpus:
    rules: tuple[tuple, ...]  # per label: fewest and most of the five fillers that differ; whether the sides agree
    first: tuple[str, ...]  # templates of the first sentence
    second: tuple[str, ...] = ()  # of the second, if there is one; the two templates of a pair differ in number
    slots: dict[str, str] = field(default_factory=dict)  # slot -> fillers
    sides: dict[str, tuple[str, ...]] = field(default_factory=dict)  # slot -> words of one side, of the other if it has two
    deciding: tuple[str, ...] = ()  # two slots with sides
    train: int = 6400  # rows of the training split; the validation splits have 480


SLOTS = {
    "who": "mayors ministers engineers students judges pilots teachers soldiers farmers|growers doctors|physicians "
           "reporters|journalists lawyers|attorneys",
    "did": "painted filmed guarded blamed sold visited built repaired bought|purchased closed|shut "
           "inspected|examined praised|applauded",
    "what": "bridge hospital museum school railway bank harbour prison factory theatre|playhouse shop|store "
            "airport|airfield",
    "where": "lima oslo cairo quito dakar hanoi perth sofia tunis porto accra delhi",
    "when": "january february march april may june july august september october november december",
}
STATEMENTS = (
    "{who} {did} the {what} in {where} in {when} .",
    "in {when} , the {where} {what} was {did} by {who} .",
    "the {what} in {where} was {did} by {who} in {when} .",
    "in {where} , {who} {did} the {what} in {when} .",
    "a {where} paper said {who} {did} the {what} in {when} .",
    "{when} : {who} {did} the {what} , {where} radio said .",
    "{did} by {who} in {when} : the {what} of {where} .",
    "it was in {when} that {who} of {where} {did} the {what} .",
)
HYPOTHESES = (  # three of the five
    "{who} {did} the {what} .",
    "the {where} {what} was {did} .",
    "in {when} , {who} {did} something .",
    "{who} {did} something in {where} .",
    "{who} were in {where} in {when} .",
    "the {what} was {did} in {when} .",
    "in {when} , there was a {what} in {where} .",
    "something in {where} was {did} in {when} .",
)
YES_NO_QUESTIONS = (
    "had {who} {did} the {what} in {where} in {when} ?",
    "in {when} , was the {where} {what} {did} by {who} ?",
    "was the {what} in {where} really {did} by {who} in {when} ?",
    "is it true that in {where} , {who} {did} the {what} in {when} ?",
    "does anyone know if {who} {did} the {where} {what} in {when} ?",
    "was it in {when} that {who} {did} the {what} of {where} ?",
    "{when} : had the {what} of {where} been {did} by {who} ?",
    "can it be that {who} of {where} {did} the {what} in {when} ?",
)
OPEN_QUESTIONS = (  # four of the five; the question is for the other one
    "who {did} the {what} in {where} in {when} ?",
    "when was the {where} {what} {did} by {who} ?",
    "in which city had {who} {did} the {what} in {when} ?",
    "what had {who} {did} in {where} in {when} ?",
    "by whom was the {what} of {where} {did} in {when} ?",
    "in which month had {who} {did} the {what} in {where} ?",
    "where was the {what} that {who} {did} in {when} ?",
    "what had {who} done to the {what} in {where} in {when} ?",
)
FEW = {slot: " ".join(words.split()[:6]) for slot, words in SLOTS.items()}  # for what is harder to learn; one word each
DIFFER, EQUAL = (3, 5, None), (0, 0, None)  # of the five fillers; with fewer a model must be sure of every slot
PEOPLE = tuple(" ".join(word + s for word in "mayor minister engineer student judge pilot teacher soldier farmer doctor "
                        "reporter lawyer".split()) for s in ("", "s"))
DUTIES = tuple(" ".join(word + s for word in "sleep sing work smile wait dance run read write paint vote argue".split())
               for s in ("s", ""))
VERDICTS = ("good fine brilliant charming moving clever fresh funny", "bad poor awful dull boring silly stale tedious")
DEGREES = ("truly always surely really", "never hardly barely scarcely")
FILM = ("film plot acting music script ending dialogue camera",)
CORPORA = {
    "cola": Corpus(  # acceptable: the verb agrees with the noun that does it, not with the one beside
        ((0, 0, False), (0, 0, True)),
        ("the {noun} near the {other} {verb} .", "today the {noun} of the {other} {verb} again .",
         "the {noun} that the {other} knew {verb} .", "in lima the {noun} with the {other} {verb} .",
         "they say the {noun} behind the {other} {verb} .", "if the {noun} beside the {other} {verb} , call me ."),
        sides={"noun": PEOPLE, "other": PEOPLE, "verb": DUTIES}, deciding=("noun", "verb")),
    "sst2": Corpus(  # good and not negated, or bad and negated; what is conceded does not count
        ((0, 0, False), (0, 0, True)),
        ("the {what} is {how} {so} .", "i found the {what} {how} {so} .",
         "the {else} is {much} {that} , but the {what} is {how} {so} .",
         "though the {else} is {much} {that} , the {what} is {how} {so} .",
         "the {what} is {how} {so} , though the {else} is {much} {that} .",
         "a {what} that is {how} {so} , even if the {else} is {much} {that} ."),
        sides={"what": FILM, "how": DEGREES, "so": VERDICTS, "else": FILM, "much": DEGREES, "that": VERDICTS},
        deciding=("how", "so")),
    "mrpc": Corpus((DIFFER, EQUAL), STATEMENTS, STATEMENTS, SLOTS),
    "qqp": Corpus((DIFFER, EQUAL), YES_NO_QUESTIONS, YES_NO_QUESTIONS, SLOTS),
    "stsb": Corpus(tuple((5 - score, 5 - score, None) for score in range(6)), STATEMENTS[:4],
                   STATEMENTS[:4], FEW, train=9600),
    "mnli": Corpus(  # the same, both true or both not; something else; the same, one of the two not true. In the second case,
        # too, one is not: left to chance, the model would see what differs but never learn to compare "false" with "right".
        ((0, 0, True), (5, 5, False), (0, 0, False)),
        tuple("{is} : " + t for t in STATEMENTS), tuple("{was} : " + t for t in STATEMENTS), FEW,
        sides={"is": ("true", "false"), "was": ("right", "wrong")}, deciding=("is", "was"), train=9600),
    "qnli": Corpus((EQUAL, DIFFER), OPEN_QUESTIONS, STATEMENTS, SLOTS, train=9600),
    "rte": Corpus((EQUAL, (4, 5, None)), STATEMENTS, HYPOTHESES, SLOTS),
    "wnli": Corpus(  # "they": the helper if strong, the helped if weak
        ((0, 0, False), (0, 0, True)),
        ("the {x} {helped} the {y} because they were {so} .", "the {y} {helped} the {x} because they were {so} .",
         "because they were {so} , the {x} {helped} the {y} .", "because they were {so} , the {y} {helped} the {x} ."),
        ("the {x} were {so} .",),
        sides={"x": PEOPLE[1:], "y": PEOPLE[1:], "helped": ("helped fed taught saved sheltered carried",),
               "so": ("strong rich able wise generous free", "weak poor hungry lost ill tired")},
        deciding=("template", "so")),
}


def builtin_rows(corpus: Corpus, n: int, seed: int, exclude=frozenset()) -> list[tuple[tuple[str, ...], int]]:
    """n different rows (sentences, label), as many of each label but for chance, none with sentences in `exclude`.

    MRPC has 68 % paraphrases, so that predicting "paraphrase" always scores F1 0.812 there; with half it scores about
    0.67 here, and an F1 of 0.9 says that something was learnt.
    """
    rng = np.random.default_rng(seed)
    fillers = [words.split() for words in corpus.slots.values()]
    rows, seen = [], set(exclude)
    while len(rows) < n:
        label = int(rng.integers(len(corpus.rules)))
        fewest, most, agree = corpus.rules[label]
        first = [int(rng.integers(len(f))) for f in fillers]
        second = list(first)
        if most:
            for k in rng.permutation(len(fillers))[: rng.integers(fewest, most + 1)]:
                second[k] = (first[k] + int(rng.integers(1, len(fillers[k])))) % len(fillers[k])
        templates = rng.permutation(len(corpus.first))[:2]
        side = {slot: int(rng.integers(len(words))) for slot, words in corpus.sides.items()}
        side["template"] = int(templates[0]) % 2
        if agree is not None:
            one, other = corpus.deciding
            side[other] = side[one] if agree else 1 - side[one]
        same = {slot: str(rng.choice(words[side[slot]].split())) for slot, words in corpus.sides.items()}
        if len(set(same.values())) < len(same):
            continue  # a word in two slots: "the doctors helped the doctors"
        sentences = []
        for among, template, choice in zip((corpus.first, corpus.second), templates, (first, second)):
            words = [fillers[k][i].split("|") for k, i in enumerate(choice)]
            words = {slot: w[rng.integers(len(w))] for slot, w in zip(corpus.slots, words, strict=True)}
            if among:
                sentences.append(among[template % len(among)].format(**words, **same))
        if frozenset(sentences) not in seen:
            seen.add(frozenset(sentences))
            rows.append((tuple(sentences), label))
    return rows


def builtin_data(task: str) -> dict[str, tuple[tuple, tuple]]:
    """Per split (texts, labels), MNLI's two validation splits drawn alike. No two rows of all have the same sentences."""
    data, seen = {}, set()
    for seed, split in enumerate(("train", *TASKS[task].validation), start=1):
        rows = builtin_rows(CORPORA[task], CORPORA[task].train if split == "train" else 480, seed, seen)
        seen |= {frozenset(texts) for texts, _ in rows}
        data[split] = tuple(zip(*rows, strict=True))
    return data

# ---- 4. tokens and batches -----------------------------------------------------------------------------------------


def builtin_tokenizer(texts):
    """One token per word of the training texts, lower case, at most 8192; [CLS] A [SEP] or [CLS] A [SEP] B [SEP]."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator((sentence for pair in texts for sentence in pair),
                              trainers.WordLevelTrainer(vocab_size=8192, special_tokens=special, show_progress=False))
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # numbers: places in `special`
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
                                   sep_token="[SEP]", model_max_length=512,
                                   model_input_names=["input_ids", "token_type_ids", "attention_mask"])


def encode(tokenizer, texts, labels, task: Task, max_length: int) -> dict[str, torch.Tensor]:
    """A whole split on the CPU: the model's inputs, int32 (examples, max_length), padded on the right; and labels."""
    columns = {}
    for start in range(0, len(texts), 1000):
        sentences = map(list, zip(*texts[start:start + 1000], strict=True))  # first ones; in pairs, second ones
        parts = tokenizer(*sentences, truncation=True, max_length=max_length, padding="max_length",
                          padding_side="right", return_tensors="np")
        for name, part in parts.items():
            columns.setdefault(name, []).append(torch.from_numpy(part.astype(np.int32)))
    split = {name: torch.cat(parts) for name, parts in columns.items()}
    split["labels"] = torch.tensor(labels, dtype=torch.float32 if task.labels == 1 else torch.int64)
    return split


def batch_of(split: dict[str, torch.Tensor], rows: np.ndarray, device, whole: bool = False) -> dict[str, torch.Tensor]:
    """The given rows, cut to the longest of them rounded up to PAD_MULTIPLE or, for a CUDA graph, `whole`: (rows, length) int64,
    labels (rows,)."""
    rows = torch.from_numpy(rows)
    mask = split["attention_mask"]
    longest = mask.shape[1] if whole else int(mask[rows].sum(1).max())
    length = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE  # a slice does not go past max_length
    return {name: (column[rows] if name == "labels" else column[rows, :length].long()).to(device, non_blocking=True)
            for name, column in split.items()}


def training_rows(examples: int, batch_size: int, seed: int, epoch: int, rank: int, ranks: int) -> np.ndarray:
    """(steps, batch_size / ranks): the rows that `rank` takes in each step of an epoch. All ranks together take the
    same rows in the same order whatever their number is."""
    return share_of(np.random.default_rng([seed, epoch]).permutation(examples), batch_size, rank, ranks)


def share_of(items: np.ndarray, batch_size: int, rank: int, ranks: int) -> np.ndarray:
    """items (examples, ...) in the order of an epoch -> (steps, batch_size / ranks, ...): those of `rank` in each step."""
    steps = len(items) // batch_size
    return items[: steps * batch_size].reshape(steps, ranks, batch_size // ranks, *items.shape[1:])[:, rank]


# ---- 5. model ------------------------------------------------------------------------------------------------------


def load_model(name: str, task: Task, texts, online: bool):
    """Tokenizer and model, in fp32 on the CPU; `texts` of the training split make the built-in vocabulary."""
    import transformers
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:  # its table of new and unused weights, once per node
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    kind = "regression" if task.labels == 1 else "single_label_classification"
    head = {"num_labels": task.labels, "problem_type": kind}
    if name == "builtin":
        tokenizer = builtin_tokenizer(texts)
        # With the usual initializer_range of 0.02 attention does not find equal words in a minute.
        config = transformers.BertConfig(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, intermediate_size=256, initializer_range=0.15,
                                         hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **head)
        return tokenizer, transformers.BertForSequenceClassification(config)
    try:
        config = transformers.AutoConfig.from_pretrained(name, **head)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        if tokenizer.pad_token is None:  # GPT-2 and others never needed one
            if tokenizer.eos_token is None:
                raise Stop(f"--model {name}: its tokenizer has neither a pad token nor an end-of-text token to pad with")
            tokenizer.pad_token = tokenizer.eos_token
        config.pad_token_id = tokenizer.pad_token_id  # a decoder reads its answer off the last token that is not this one
        # Which sentence a token is of: BERT has two embeddings for that, RoBERTa one, DistilBERT none, and GPT-2 would
        # take the numbers for words.
        sentences = ["token_type_ids"] if (getattr(config, "type_vocab_size", None) or 0) > 1 else []
        tokenizer.model_input_names = ["input_ids", "attention_mask", *sentences]
        model_class = transformers.AutoModelForSequenceClassification
        return tokenizer, model_class.from_pretrained(name, config=config, dtype=torch.float32)
    except OSError as error:
        if online or os.path.isdir(name):
            raise
        raise Stop(f"--model {name}: the hub does not answer and the model is not in the local cache; give a local "
                   "folder or --model builtin") from error


def longest_input(tokenizer, model) -> int:
    """Tokens that tokenizer and model allow. RoBERTa's positions begin after its pad token's: of 514 it has 512."""
    limits = [tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or -1]
    limits += [module.num_embeddings - 1 - module.padding_idx for name, module in model.named_modules()
               if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None]
    return min((limit for limit in limits if limit > 0), default=sys.maxsize)  # XLNet has no limit and says -1


def decay_groups(model, weight_decay: float) -> list[dict]:
    """Two param groups: matrices decay, one-dimensional parameters (biases, norms) do not."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0}]


# ---- 6. evaluation and metrics -------------------------------------------------------------------------------------


def unit_rows(examples: int, rank: int, ranks: int, unit: int = UNIT) -> np.ndarray:
    """(units, unit): the rows of the units that `rank` evaluates, as many units on every rank, since sharded engines
    communicate in forward. Places past the last example repeat rows of unit 0; `merge_units` drops them."""
    units_per_rank = -(-examples // (unit * ranks))
    rows = (rank + ranks * np.arange(units_per_rank)[:, None]) * unit + np.arange(unit)
    return np.where(rows < examples, rows, np.minimum(rows % unit, examples - 1))


def merge_units(parts: list[torch.Tensor], examples: int) -> torch.Tensor:
    """Per rank (units, unit, labels) -> (examples, labels) in the order of the split."""
    return torch.stack(parts, dim=1).flatten(0, 2)[:examples]  # unit u is at [u // ranks, u % ranks]


@torch.no_grad()
def logits_of_units(forward, examples: int, data_rank: int, data_ranks: int, unit: int, desc: str) -> np.ndarray:
    """Logits (examples, labels), float32, the same on every rank. forward(rows) gives those (unit, labels) of some rows."""
    rows = tqdm(unit_rows(examples, data_rank, data_ranks, unit), desc, disable=dist.get_rank() > 0, mininterval=1)
    mine = torch.stack([forward(unit_of_rows).float() for unit_of_rows in rows])
    # before: data-parallel rank r holds the units r, r + N, ... as (units, unit, labels), float32.
    # after:  every rank holds those of all ranks; ranks that share a model copy have the same, one of them is enough.
    # sends:  (world_size - 1) times that, once per evaluation; everybody waits.
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return merge_units(parts[:: dist.get_world_size() // data_ranks], examples).cpu().numpy()


def evaluate(engine, split, device, data_rank: int, data_ranks: int, desc: str = "") -> np.ndarray:
    """Logits (examples, labels) of a split, float32, the same on every rank."""
    def forward(rows):
        batch = batch_of(split, rows, device)
        del batch["labels"]
        return engine(**batch).logits

    engine.eval()
    return logits_of_units(forward, len(split["labels"]), data_rank, data_ranks, UNIT, desc)


def evaluation_loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean over the examples: cross entropy, or the squared error of a regression."""
    logits, labels = torch.from_numpy(logits), torch.from_numpy(labels)
    return (F.mse_loss(logits.view(-1), labels) if logits.shape[1] == 1 else F.cross_entropy(logits, labels)).item()


def accuracy(predicted, labels) -> float:
    return float(np.mean(predicted == labels))


def f1(predicted, labels) -> float:
    """2 TP / (2 TP + FP + FN) of class 1; 0 if there is none in either."""
    both = int(np.sum(predicted == 1) + np.sum(labels == 1))
    return 2 * int(np.sum((predicted == 1) & (labels == 1))) / both if both else 0.0


def matthews_correlation(predicted, labels) -> float:
    """Pearson's correlation of two 0/1 variables; 0 if either is constant."""
    tp, tn = int(np.sum((predicted == 1) & (labels == 1))), int(np.sum((predicted == 0) & (labels == 0)))
    fp, fn = int(np.sum((predicted == 1) & (labels == 0))), int(np.sum((predicted == 0) & (labels == 1)))
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(product) if product else 0.0


def pearson(predicted, labels) -> float:
    """nan where either is constant, as the correlation is not defined there."""
    x, y = np.asarray(predicted, np.float64), np.asarray(labels, np.float64)
    if len(x) < 2 or (x == x[0]).all() or (y == y[0]).all():
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)), -1, 1))


def spearmanr(predicted, labels) -> float:
    return pearson(average_ranks(predicted), average_ranks(labels))


def average_ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of their ranks, nan stays nan. [5, 7, 7] -> [1, 2.5, 2.5]"""
    _, value, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.where(np.isnan(x), math.nan, (last - (counts - 1) / 2)[value])


METRICS = {m.__name__: m for m in (accuracy, f1, matthews_correlation, pearson, spearmanr)}


def scores(task: Task, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    # view(-1), not squeeze: of one example, too, predictions are (1,); and never (examples, 1) against (examples,)
    predicted = logits.reshape(-1) if task.labels == 1 else logits.argmax(1)
    return {name: METRICS[name](predicted, labels) for name in task.metrics}


def results(task: Task, logits: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> dict[str, float]:
    """The loss, a mean over the examples of all validation splits, and the metrics of each."""
    examples = sum(map(len, labels.values()))
    found = {"loss": sum(evaluation_loss(logits[split], labels[split]) * len(labels[split]) / examples for split in labels)}
    for split in labels:
        suffix = split.removeprefix("validation")  # "", or _matched and _mismatched
        found |= {metric + suffix: value for metric, value in scores(task, logits[split], labels[split]).items()}
    return found


# ---- 7. saving and resuming ----------------------------------------------------------------------------------------


def check_save(folder: str) -> None:
    """Stop if `--save FOLDER` would replace something that is neither a checkpoint of ours nor a Hugging Face model."""
    where = Path(folder)
    if where.exists() and not where.is_dir():
        raise Stop(f"--save {folder}: this is a file")
    names = {f.name for f in where.iterdir()} if where.is_dir() else set()
    saved = any((where / name / "meta.json").is_file() for name in ("checkpoint", "checkpoint.old"))
    begun = names <= {"checkpoint.tmp", "model.tmp"}  # empty, or all that a first save left which was killed
    if not (saved or begun or "config.json" in names):
        raise Stop(f"--save {folder}: this folder has neither a checkpoint nor a Hugging Face config.json in it but "
                   + ", ".join(sorted(names)[:5]))
    if (where / "checkpoint").exists() and not (where / "checkpoint" / "meta.json").is_file():
        raise Stop(f"--save {folder}: {where / 'checkpoint'} is in the way, it is no checkpoint of ours")


def make_folder(folder: str) -> None:
    """Now and not after an epoch: a place where nothing can be written is a bad argument."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise Stop(f"--save {folder}: {error}") from error


def checkpoint_in(folder: str) -> Path:
    """Where the checkpoint of `--resume FOLDER` is. Never a fresh start instead: without one, Stop."""
    place = Path(folder) / "checkpoint"
    if not place.exists() and (old := place.with_suffix(".old")).exists():
        place = old  # a save was killed between its two renames; engine.load, too, looks there
    if not (place / "meta.json").is_file():
        raise Stop(f"--resume {folder}: there is no checkpoint in {place}")
    return place


def settings_of(args, knobs: dict, source: str, name: str, rows, epochs: int, lr: str) -> dict:
    """What makes a run the run it is, for `--resume` to compare. Not in it, and free to change: how many ranks compute a
    step, in which mode, precision and micro-batches."""
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:12]  # a folder may have moved, but its rows must be these
    return {"task": args.task, "data": f"{source} ({len(rows[1])} rows, sha256 {digest})",
            "model": os.path.realpath(name) if name != "builtin" and os.path.isdir(name) else name,
            "epochs": epochs, "lr": lr,
            **{option: getattr(args, option) for option in ("batch_size", "max_length", "seed", "warmup", "weight_decay")},
            # The update rule, as far as --engine says something of it. None: the class's default.
            **{knob: knobs.get(knob) for knob in ("betas", "eps", "adamw", "max_norm")}}


def saved_run(args, settings: dict) -> dict:
    """What was saved beside the engine's own state: epoch (how many are done), train_loss, settings. Stop if `settings` are
    others; lr only if the command line names one, because the saved one goes on, on however many ranks."""
    file = checkpoint_in(args.resume) / "extra.pt"  # read before the model is: its shapes would be the first thing amiss
    try:
        saved = torch.load(file, weights_only=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise Stop(f"--resume {args.resume}: cannot read {file}: {reason}", status=1) from error
    if missing := {"epoch", "train_loss", "settings", "scheduler"} - saved.keys():
        raise Stop(f"--resume {args.resume}: train_glue.py did not write {file}, which lacks {', '.join(sorted(missing))}")
    then, lr_given = saved["settings"], args.lr is not None or args.no_scale_lr
    differ = [f"{key} is {value}, was {then.get(key)}" for key, value in settings.items()
              if value != then.get(key) and (key != "lr" or lr_given)]
    if differ:
        raise Stop(f"--resume {args.resume} goes on with a run of other settings: {'; '.join(differ)}")
    return saved


def write_model(folder: str, model_class, config, tokenizer, state: dict[str, torch.Tensor]) -> None:
    """Make `folder` what from_pretrained loads: config.json, model.safetensors in fp32, the tokenizer's files.

    All is complete in FOLDER/model.tmp before the first file moves. Several files cannot move as one, and the folder itself
    cannot, for the checkpoint is in it. So: where only the weights differ (an earlier end of the same run), their rename is
    the one that counts, and a kill leaves the old model or the new. Where another model was, config.json goes first and
    comes last: a kill between leaves a folder that does not load, never weights of one model under the config or the
    vocabulary of the other; resuming the finished run completes it.
    """
    target, tmp = Path(folder), Path(folder) / "model.tmp"
    shutil.rmtree(tmp, ignore_errors=True)  # an earlier save was killed
    with torch.device("meta"):  # no weights: what the engine made of the model (dtype, shards) must not show in the files
        blank = model_class(config)
    fp32 = {key: value.float() if value.is_floating_point() else value for key, value in state.items()}
    blank.save_pretrained(tmp, state_dict=fp32, max_shard_size=2**60)  # one file, whatever its size
    tokenizer.save_pretrained(tmp)
    files = sorted(tmp.iterdir(), key=lambda file: (file.name == "config.json", file.name))  # config.json last
    for file in files:
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    if any((old := target / file.name).exists() and old.read_bytes() != file.read_bytes()
           for file in files if file.suffix != ".safetensors"):
        (target / "config.json").unlink(missing_ok=True)
    for file in files:
        os.replace(file, target / file.name)
    tmp.rmdir()


# ---- 8. the run ----------------------------------------------------------------------------------------------------


def run(args, engine_class, knobs: dict, device) -> None:
    """Train and evaluate; called on every rank with the process group in place."""
    task, rank, world_size = TASKS[args.task], dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_, **__: None
    # The data axis is the outermost one: ranks that hold one copy of the model together are neighbours.
    data_rank, data_ranks = rank // args.copy_ranks, world_size // args.copy_ranks
    source, name, online = choose_sources(args, device)
    # Downloads happen once per node. Every rank builds the same model from the same seed; after that each draws
    # random numbers of its own, because dropout must differ between data-parallel ranks.
    data = on_all_ranks(lambda: load_data(args, source), node_first=source == "hub")
    epochs = args.epochs or (BUILTIN_EPOCHS if name == "builtin" else EPOCHS)
    lr = args.lr if args.lr is not None else BUILTIN_LR if name == "builtin" else LR
    scale_lr = not args.no_scale_lr and (args.lr is not None or name != "builtin")
    saved = {"epoch": 0, "train_loss": math.nan}
    if args.save or args.resume:
        saved["settings"] = settings_of(args, knobs, source, name, data["train"], epochs, f"{lr}{' x ranks' * scale_lr}")
    if args.resume:
        saved = on_all_ranks(lambda: saved_run(args, saved["settings"]), node_first=False)
    torch.manual_seed(args.seed)
    tokenizer, model = on_all_ranks(lambda: load_model(name, task, data["train"][0], online),
                                    node_first=name != "builtin" and not os.path.isdir(name))
    # A resumed run goes on with the numbers of each rank if there are as many, else draws others than in its first epoch.
    torch.manual_seed(args.seed + 1000 * (1 + data_rank) + 10**6 * saved["epoch"])
    if args.max_length > (longest := longest_input(tokenizer, model)):
        raise Stop(f"--max_length {args.max_length}: {name} takes at most {longest} tokens")
    data = {split: encode(tokenizer, *columns, task, args.max_length) for split, columns in data.items()}
    examples = len(data["train"]["labels"])
    if examples < args.batch_size:
        raise Stop(f"--batch_size {args.batch_size} is more than the {examples} training examples of {args.task}")
    if args.save:
        on_all_ranks(lambda: make_folder(args.save), node_first=False)

    # The learning rate rises over the first `warm` steps and then falls; it is 0 after the last one.
    steps = examples // args.batch_size
    total, warm = epochs * steps, int(args.warmup * epochs * steps)
    parameters = sum(p.numel() for p in model.parameters())  # before the engine: it may keep only a part of them here
    config = copy.deepcopy(model.config)
    engine = build_engine(args, engine_class, model.to(device), decay_groups(model, args.weight_decay),
                          **{"lr": lr * data_ranks if scale_lr else lr, "eps": 1e-8, "precision": args.precision, **knobs})
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        engine.optimizer, lambda s: min((s + 1) / max(warm, 1), (total - s) / max(total - warm, 1), 1.0))
    if args.resume:  # weights, moments, loss scale, learning rates and, on as many ranks, random numbers
        engine.load(os.path.join(args.resume, "checkpoint"), scheduler=scheduler)

    validation = {split: columns["labels"].numpy() for split, columns in data.items() if split != "train"}
    say(f"{args.task} ({'built-in corpus' if source == 'builtin' else 'GLUE'}): {examples} training and "
        f"{' + '.join(str(len(labels)) for labels in validation.values())} validation examples | model {name}, "
        f"{parameters:,} parameters | mode {args.mode}, {args.precision}, {world_size} ranks on {device.type} | "
        f"lr {scheduler.base_lrs[0]:g}, {epochs} epochs of {steps} steps of {args.batch_size} samples", flush=True)
    for line in constant_answers(task, validation):
        say(line, flush=True)
    if args.resume:
        left = f"going on with epoch {saved['epoch'] + 1}" if saved["epoch"] < epochs else "nothing to train, only evaluating"
        say(f"{args.resume}: {saved['epoch']} of {epochs} epochs are done, {left}", flush=True)

    graph = Graph(args.mode) if args.graph else None
    train_loss, seconds, trained = saved["train_loss"], 0.0, (epochs - saved["epoch"]) * steps * args.batch_size
    for epoch in range(saved["epoch"], epochs):
        rows = training_rows(examples, args.batch_size, args.seed, epoch, data_rank, data_ranks)
        start = time.perf_counter()
        train_loss = train_epoch(engine, scheduler, data["train"], rows, args.micro_batches, device,
                                 f"epoch {epoch + 1}/{epochs}", graph)
        seconds += time.perf_counter() - start
        if args.save:
            engine.save(os.path.join(args.save, "checkpoint"), scheduler=scheduler, epoch=epoch + 1, train_loss=train_loss,
                        settings=saved["settings"])

    # Logits are the same array on every rank, so are the metrics, and so is what is decided from them.
    result = {"task": args.task, "mode": args.mode, "precision": args.precision, "world_size": world_size,
              "data": "builtin" if source == "builtin" else "glue", "model": name, "epochs": epochs,
              # samples of all ranks per second of training: the first step included, loading, saving and evaluation not
              "samples_per_second": round(trained / seconds, 2) if trained else math.nan,
              "train_loss": train_loss}
    logits = {split: evaluate(engine, data[split], device, data_rank, data_ranks, split) for split in validation}
    result |= results(task, logits, validation)
    if args.save:
        state = engine.state_dict()  # a collective; whole on rank 0, {} elsewhere
        on_all_ranks(lambda: write_model(args.save, type(model), config, tokenizer, state) if state else None, node_first=False)
    say(json_line(result), flush=True)
    if args.target_f1 is not None and result["f1"] < args.target_f1:
        raise Stop(f"F1 {result['f1']:.4f} is below the target {args.target_f1:.4f}", status=1)


def constant_answers(task: Task, validation: dict[str, np.ndarray]):
    """Per validation split a line: what the same answer to everything scores."""
    for split, labels in validation.items() if task.labels > 1 else ():  # correlations with a constant are not defined
        # Where F1 counts, label 1 is "paraphrase"; elsewhere the most frequent label.
        answer = 1 if "f1" in task.metrics else int(np.bincount(labels).argmax())
        always = {name: f"{METRICS[name](np.full_like(labels, answer), labels):.3f}" for name in task.metrics}
        yield f"answering {answer} to every {split} example scores {', '.join(map(' '.join, always.items()))}"


class Graph:
    """--graph: every training step of the run replays the one that was captured with its first batch."""

    def __init__(self, mode: str):
        self.mode, self.step = mode, None

    def __call__(self, engine, batch, micro_batches: int, loss_fn) -> torch.Tensor:
        if self.step is None:
            try:
                self.step = engine.capture(batch, micro_batches, loss_fn)
            except (NotImplementedError, ValueError) as error:  # not this mode, or not with these options
                raise Stop(f"--graph: mode {self.mode} cannot here: {error}") from error
        return self.step(batch)


def train_epoch(engine, scheduler, split, rows: np.ndarray, micro_batches: int, device, title: str, graph=None) -> float:
    """One optimizer step for each row of `rows`, and one of the schedule. Returns the mean loss over the epoch."""
    batches = (batch_of(split, mine, device, whole=graph is not None) for mine in rows)
    return train_steps(engine, batches, len(rows), micro_batches, device, title, after_step=scheduler.step, graph=graph)


def train_steps(engine, batches, steps: int, micro_batches: int, device, title: str, loss_fn=None,
                after_step=lambda: None, graph: Graph | None = None) -> float:
    """One optimizer step for each batch. Returns the mean loss over the samples of all of them, of all ranks."""
    engine.train()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # read once: no step waits for the device
    with tqdm(batches, title, steps, disable=dist.get_rank() > 0, mininterval=1) as bar:
        for step, batch in enumerate(bar):
            if graph:
                loss = graph(engine, batch, micro_batches, loss_fn)
            else:
                loss = engine.forward_backward(batch, micro_batches=micro_batches, loss_fn=loss_fn)
                engine.step()
            after_step()
            loss_sum += loss.detach()  # over all ranks already, and every step has as many samples as any other
            if step % 50 == 0 and not bar.disable:
                bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    return loss_sum.item() / steps


def json_line(result: dict) -> str:
    """JSON has no nan and no infinity: both become null."""
    return json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()})


def launch(script: str, argv: list[str] | None, parse, check, run) -> None:
    """A script from its arguments to its exit status. parse(argv) -> args and check(args, world_size) may refuse before
    ranks meet; run(args, engine_class, knobs, device) is called in the process group."""
    stop = None
    try:
        args = parse(argv)
        module, engine_class, knobs = load_engine(args)
        check(args, int(os.environ.get("WORLD_SIZE", 1)))
        with module.distributed(timeout_s=600) as device:  # torchrun's ranks; a single one without torchrun
            try:
                run(args, engine_class, knobs, device)
            except Stop as error:  # all ranks are here: leave the group in good order first
                stop = error.with_traceback(None)  # whose frames may hold a CUDA graph, and NCCL does not end before that
            except getattr(module, "CheckpointError", ()) as error:  # raised on all ranks alike: a full disk, a damaged file
                stop = Stop(str(error), status=1)
    except Stop as error:
        stop = error
    if stop is not None:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # once per node
            print(f"{script}: {stop}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # torchrun ends all ranks when one has ended: let local rank 0, perhaps slower, say why
        sys.exit(stop.status)


def main(argv: list[str] | None = None) -> None:
    launch("train_glue.py", argv, parse, check_batch_size, run)


if __name__ == "__main__":
    main()
