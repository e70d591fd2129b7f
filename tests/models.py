"""Small models with awkward parts, the batches that go with them, and one process as the reference.

Sizes are odd so that buckets and shards end in padding. Everything is built in float64 from one seed.
"""
import contextlib
import copy
import gc
import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


def leaf_units(module):
    """fsdp's `wrap` for these small models: whatever has parameters and no children. Not so where another module reads the
    parameters, which must then be the root's."""
    has_parameters = any(True for _ in module.parameters(recurse=False))
    return has_parameters and not any(True for _ in module.children()) and not getattr(module, "read_outside", False)


CHUNK_BYTES = 1536  # on 1, 2, 3, 4 and 8 ranks slices of 16 bytes in half precision fill it
CHUNKS = dict(chunk_mb=CHUNK_BYTES / 2**20)
ENGINES = {  # name: (module, class, knobs that make several buckets or units of these small models)
    "ddp": ("ddp", "DDP", dict(bucket_mb=0.002, first_bucket_mb=0.001)),
    "zero1": ("zero", "Zero", dict(bucket_mb=0.002, stage=1)),
    "zero2": ("zero", "Zero", dict(bucket_mb=0.002, stage=2)),
    "zero1_offload": ("zero", "Zero", dict(bucket_mb=0.002, stage=1, offload=True)),
    "zero2_offload": ("zero", "Zero", dict(bucket_mb=0.002, stage=2, offload=True)),
    "fsdp": ("fsdp", "FSDP", dict(wrap=leaf_units)),
    "fsdp_no_reshard": ("fsdp", "FSDP", dict(wrap=leaf_units, reshard=False, reduce_each=False)),
    "fsdp_offload": ("fsdp", "FSDP", dict(wrap=leaf_units, offload=True, prefetch=False)),
    "gemini": ("gemini", "Gemini", CHUNKS),  # on CPUs under a budget, see `tight_budget`
    # the first quarter of the chunks is in host memory, the next half has its optimizer there; the first half is released after use
    "gemini_static": ("gemini", "Gemini", dict(CHUNKS, placement="static", shard_param_frac=0.5, offload_param_frac=0.25,
                                               offload_optim_frac=0.75)),
    "gemini_offload": ("gemini", "Gemini", dict(CHUNKS, offload=True)),
    "hybrid": ("hybrid", "Hybrid", dict(bucket_mb=0.002)),  # tp=1; what tp divides: test_hybrid.py
}
# Of each file; of zero.py both stages, one with offload. hybrid is like zero1 there: what is its own, test_hybrid.py shows.
FEWER = ("ddp", "zero1_offload", "zero2", "fsdp", "gemini")


def in_sweep(values, when=lambda *_: True):
    """A test's parameters, tuples for several at once; those where `when(*values)` is true run in the sweep alone."""
    tuples = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=pytest.mark.sweep if when(*value) else []) for value in tuples]


engines = pytest.mark.parametrize("name", ENGINES)
fewer_engines = pytest.mark.parametrize("name", in_sweep(ENGINES, lambda name: name not in FEWER))


def build_engine(name, model, params=None, **arguments):
    """A strategy's engine. Only ddp.py has a bucket size of its own for the first bucket; fsdp.py has units and gemini.py
    chunks, not buckets."""
    first = ("first_bucket_mb",)
    module, cls, knobs = ENGINES[name]
    for argument in {"ddp": (), "zero": first, "hybrid": first}.get(module, ("bucket_mb", *first)):
        arguments.pop(argument, None)
    if name == "gemini" and all(p.device.type == "cpu" for p in model.parameters()):
        arguments.setdefault("device_budget", tight_budget(model))
    return getattr(importlib.import_module(module), cls)(model, params, **{**knobs, **arguments})


def tight_budget(model):
    """Bytes with which gemini.py's chunks come and go, and optimizers stay in host memory: little more than the tightest moment
    takes. That is two chunks of the small models here, three of "awkward"; of transformers' models the largest parameter, which
    is a chunk of its own, and one beside it."""
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    return int(max(min(max(1.2 * sum(sizes), 2.2 * CHUNK_BYTES), 3.2 * CHUNK_BYTES), max(sizes) + 1.5 * CHUNK_BYTES))


def whole(engine, write=False):
    """The model, with weights that can be read inside, or set on all ranks alike: a collective where an engine shards them."""
    return engine.gathered(write=write) if hasattr(engine, "gathered") else contextlib.nullcontext(engine.module)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.GELU(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3))

    def forward(self, x):
        return self.layers(x)


class Awkward(Plain):
    """One of everything that breaks walks over parameters: see the comment beside each."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))  # 0-d
        self.one = nn.Parameter(torch.ones(1))  # smaller than the world
        self.three = nn.Parameter(torch.randn(3))
        self.empty = nn.Linear(7, 0)  # zero elements, of shapes (0, 7) and (0,)
        self.unused = nn.Linear(5, 5)  # never called
        self.twice = nn.Linear(7, 7)  # called twice
        self.turned = nn.Parameter(torch.randn(7, 3).t())  # strides (1, 3)
        self.holes = nn.Parameter(torch.randn(3, 14)[:, ::2])  # strides with holes
        self.conv = nn.Conv2d(2, 3, (2, 3)).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.layers[0].bias.requires_grad_(False)  # one bias in the middle
        self.layers[3].read_outside = True  # by forward, below

    def forward(self, x):
        x = self.twice(torch.tanh(self.twice(x))) + self.frozen(x)
        x = torch.cat([x, self.empty(x)], dim=1) * self.scale + self.one
        image = torch.stack([x, -x], dim=1).unsqueeze(2).expand(-1, 2, 2, 7)
        y = super().forward(x) + x @ self.turned.t() + x @ self.holes.t() + self.three
        return y + self.conv(image).mean((2, 3)) + 1e-2 * self.layers[3].weight.square().sum()  # read outside its owner


class Tied(nn.Module):
    """Embedding and head share one weight; the head also multiplies outside any module."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(19, 10)
        self.middle = nn.Linear(10, 10)
        self.head = nn.Linear(10, 19)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        h = torch.tanh(self.middle(self.embedding(x).mean(1)))
        return self.head(h) + nn.functional.linear(h, self.embedding.weight)


class Checkpointed(nn.Module):
    """One Linear used twice inside checkpointed blocks: its hook fires twice under reentrant checkpointing."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda h: torch.tanh(self.block(h)), x, use_reentrant=self.use_reentrant)
        return self.last(x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4, 3))

    def forward(self, x):
        return self.net(x)


def tiny_hf(kind):
    import transformers as hf
    if kind == "bert":
        config = hf.BertConfig(vocab_size=61, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=30,
                               max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return hf.BertForSequenceClassification(config)
    if kind == "bert-mlm":  # decoder.weight and decoder.bias are both tied; the pooler is absent
        config = hf.BertConfig(vocab_size=61, hidden_size=20, num_hidden_layers=1, num_attention_heads=2, intermediate_size=30,
                               max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return hf.BertForMaskedLM(config)
    config = hf.GPT2Config(vocab_size=61, n_embd=20, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
                           attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return hf.GPT2LMHeadModel(config)


def cross_entropy(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def token_loss(output, batch):
    """Mean over all tokens, in the model's own precision: transformers' own causal loss goes through fp32."""
    logits = output.logits if hasattr(output, "logits") else output
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def build(kind, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    models = {"plain": Plain, "awkward": Awkward, "tied": Tied, "batchnorm": Normed, "checkpoint": lambda: Checkpointed(False),
              "reentrant": lambda: Checkpointed(True)}
    with torch.device("cpu"):  # the same numbers on every device
        model = (models[kind]() if kind in models else tiny_hf(kind)).to(dtype)
    return model.to(torch.get_default_device())


def random(*shape, seed, high=None, dtype=torch.float64):
    """Normal numbers, or integers below `high`: drawn on the CPU, so the same on every device, then on the default device."""
    g = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn(shape, generator=g, dtype=dtype, device="cpu") if high is None else torch.randint(
        high, shape, generator=g, device="cpu")
    return made.to(torch.get_default_device())


def global_batch(kind, samples, seed, dtype=torch.float64):
    """The batch of all ranks together, and the loss function."""
    def integers(high, *shape):
        return random(samples, *shape, high=high, seed=1000 + seed)
    if kind in ("bert-mlm", "gpt2"):
        return (dict(input_ids=integers(61, 11)), integers(60, 11)), token_loss
    if kind == "bert":
        return dict(input_ids=integers(61, 11), labels=integers(2)), None
    if kind == "tied":
        return (integers(19, 5), integers(18)), cross_entropy
    shape = (3, 4, 4) if kind == "batchnorm" else (7,)
    return (random(samples, *shape, seed=1000 + seed, dtype=dtype), integers(3)), cross_entropy


def rows(batch, lo, hi):
    """Rows [lo, hi) of every tensor of a batch."""
    if isinstance(batch, torch.Tensor):
        return batch[lo:hi]
    return {k: rows(v, lo, hi) for k, v in batch.items()} if isinstance(batch, dict) else tuple(rows(v, lo, hi) for v in batch)


def loss_of(model, batch, loss_fn):
    """The plain loop's forward: a dict is the model's arguments, otherwise the first item is the input."""
    x = batch[0] if isinstance(batch, tuple) else batch
    output = model(**x) if isinstance(x, dict) else model(x)
    return loss_fn(output, batch) if loss_fn else output.loss


def two_groups(model):
    """Groups in another order than model.parameters(), one of them empty, each with its own lr and decay."""
    named = [(n, p) for n, p in model.named_parameters()]
    return [dict(params=[p for n, p in reversed(named) if p.ndim != 1], lr=0.02, weight_decay=0.1), dict(params=[]),
            dict(params=[p for n, p in named if p.ndim == 1], lr=0.003, weight_decay=0.0)]


def live_tensors():
    """All tensors of this process that hold memory: not torch.compile's stand-ins, which tests of that may have left."""
    return [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and type(t).__name__ != "FakeTensor"]


class Reference:
    """One process, plain torch, the whole batch; `slices` (with BatchNorm): pieces in turn, averaged, and the running
    statistics of each rank's pieces averaged over the ranks."""

    def __init__(self, model, params=None, max_norm=0.0, **adam):
        self.model, self.max_norm = copy.deepcopy(model), max_norm
        params = self.model.parameters() if params is None else params(self.model)
        adamw = adam.pop("adamw", True)
        adam.setdefault("weight_decay", 0.0)  # torch's AdamW has 0.01
        self.optimizer = (torch.optim.AdamW if adamw else torch.optim.Adam)(params, **adam)

    def backward(self, batch, loss_fn, pieces=None):
        """pieces: per rank a list of batches; None for the whole batch at once. Returns the loss."""
        if pieces is None:
            loss = loss_of(self.model, batch, loss_fn)
            loss.backward()
            return loss.detach()
        total, count = 0.0, sum(len(p) for p in pieces)
        start = {k: v.clone() for k, v in self.model.named_buffers()}
        ends = []
        for rank_pieces in pieces:
            for k, v in self.model.named_buffers():
                v.copy_(start[k])
            for piece in rank_pieces:
                loss = loss_of(self.model, piece, loss_fn) / count
                loss.backward()
                total += loss.detach()
            ends.append({k: v.clone() for k, v in self.model.named_buffers()})
        for k, v in self.model.named_buffers():
            v.copy_(torch.stack([e[k] for e in ends]).mean(0) if v.is_floating_point() else ends[0][k])
        return total

    def step(self):
        params = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(params, self.max_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def assert_same_on_all_ranks(tensors):
    """Bitwise: every rank's bytes beside rank 0's."""
    flat = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors if t.numel()])
    other = flat.clone()
    dist.broadcast(other, 0)
    assert torch.equal(flat, other), f"rank {dist.get_rank()} differs from rank 0 in {(flat != other).sum()} bytes"


def refused(script, capsys, argv, status):
    """Lines on stderr of a script that ends with this exit status; the last one is its own, and no process group is left."""
    with pytest.raises(SystemExit) as ended:
        script.main([str(a) for a in argv])
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == status and lines[-1].startswith(f"{script.__name__}.py: "), (ended.value.code, lines)
    assert not dist.is_initialized()
    return lines


@contextlib.contextmanager
def raises(kind, *words):
    """Like pytest.raises, inside a rank; every word must be in the message."""
    try:
        yield
    except kind as error:
        missing = [w for w in words if w not in str(error)]
        assert not missing, f"{missing} not in {error!r}"
    else:
        raise AssertionError(f"{kind.__name__} not raised")
