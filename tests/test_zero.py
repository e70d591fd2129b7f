"""What is particular to zero.py: lazy gathers, the order of the sums, peaks of memory, offload, checkpoints across strategies.

Compared: one process in float64 at 1e-10 (as test_contract.py, which asks every strategy the same), plain runs without offload
bit for bit, event logs of the collectives of slices, live storages with the formulas of the docstring. What has not been waited
for is NaN here, so that nobody reads it unnoticed. One to four CPU ranks; about 60 s, the sweep 120 more (needs timm).
"""
import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist
from models import Reference, build, build_engine, global_batch, raises, rows
from test_contract import close
from torch import nn

import zero

stages = pytest.mark.parametrize("name", ["zero1", "zero2"])


# ---- 1. gathers are lazy, and whoever reads a weight waits ------------------------------------------------------------------


class LateGather(zero.SliceGather):
    """Sends at once, but what others send arrives in `wait` alone: until then their slices are NaN."""

    sends: list = []
    log: list = []

    def __init__(self, engine, flat, tag):
        n, r = engine.world_size, engine.rank
        self.slices, self.engine, self.tag = flat.view(n, -1), engine, tag
        own = self.slices[r].clone()
        for other in range(n):
            if other != r:
                work = dist.isend(zero.as_bytes(own), group=engine.group, group_dst=other, tag=tag)
                LateGather.sends.append((own, work))
                self.slices[other] = float("nan")
        LateGather.log.append(("start", flat.data_ptr()))

    def wait(self):
        for other in range(self.engine.world_size):
            if other != self.engine.rank:
                slice_ = torch.empty_like(self.slices[other])
                dist.recv(zero.as_bytes(slice_), group=self.engine.group, group_src=other, tag=self.tag)
                self.slices[other] = slice_
        LateGather.log.append(("wait", self.slices.data_ptr()))


@contextlib.contextmanager
def late_gathers():
    """zero.py's gathers, late; yields the log of their starts and waits."""
    real, zero.SliceGather = zero.SliceGather, LateGather
    LateGather.log.clear()
    try:
        yield LateGather.log
    finally:
        zero.SliceGather = real
    for _, work in LateGather.sends:
        work.wait()
    LateGather.sends.clear()


class Attention(nn.Module):
    """nn.MultiheadAttention reads out_proj.weight without calling out_proj."""

    def __init__(self):
        super().__init__()
        self.enter, self.attention, self.leave = nn.Linear(7, 6), nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        h = self.enter(x).unsqueeze(1) * torch.linspace(-1, 1, 4, dtype=x.dtype)[None, :, None]
        return self.leave(self.attention(h, h, h, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    """nn.LSTM reads its weights from a list of its own."""

    def __init__(self):
        super().__init__()
        self.lstm, self.leave = nn.LSTM(7, 5, num_layers=2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.leave(self.lstm(x.unsqueeze(1) * torch.linspace(-1, 1, 4, dtype=x.dtype)[None, :, None])[0].mean(1))


class TiedByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.middle, self.enter = nn.Linear(3, 3), nn.Linear(7, 3, bias=False)

    def forward(self, x):
        h = torch.tanh(self.enter(x))
        return self.middle(nn.functional.linear(h, self.enter.weight.t())[:, :3])


class Branches(nn.Module):
    """Another path in every step, also one that the last did not take."""

    def __init__(self):
        super().__init__()
        self.paths, self.leave, self.calls = nn.ModuleList(nn.Linear(7, 5) for _ in range(3)), nn.Linear(5, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.leave(torch.tanh(self.paths[(self.calls * self.calls) % 3](x)))


class Hidden(nn.Module):
    """Parameters kept in a plain list. `by_name`: also looked up in this call, after use; `turns`: by name and from the list in
    turn."""

    def __init__(self, by_name=False, turns=False):
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(7, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        self.mine, self.by_name, self.turns, self.calls = [self.middle.weight, self.middle.bias], by_name, turns, 0

    def forward(self, x):
        self.calls += 1
        h = self.enter(x)
        listed = not self.turns or self.calls % 2 == 0
        h = nn.functional.linear(h, *self.mine) if listed else self.middle(h)
        y = self.leave(torch.tanh(h))
        return y + 1e-2 * self.middle.weight.sum() if self.by_name else y


class CompiledInside(nn.Module):
    """A compiled method: no module shows that it is. `turns`: compiled and not in turn."""

    def __init__(self, turns=False):
        super().__init__()
        self.turns, self.calls = turns, 0
        self.enter, self.leave = nn.Linear(7, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(5))

    @functools.partial(torch.compile, backend="eager")
    def inner(self, x):
        return self.leave(torch.tanh(self.enter(x)) * self.scale)

    def forward(self, x):
        self.calls += 1
        if self.turns and self.calls % 2:
            return self.leave(torch.tanh(self.enter(x)) * self.scale)
        return self.inner(x)


def normed_weights(modern):
    norm = nn.utils.parametrizations.weight_norm if modern else nn.utils.weight_norm
    with torch.no_grad():  # otherwise the older one leaves weights that cannot be copied
        return nn.Sequential(norm(nn.Linear(7, 5)), nn.Tanh(), norm(nn.Linear(5, 3)))


OWN = {
    "attention": Attention, "lstm": Recurrent, "tied by hand": TiedByHand, "branches": Branches, "hidden": Hidden,
    "hidden, then by name": lambda: Hidden(by_name=True), "hidden in turn": lambda: Hidden(turns=True),
    "compiled inside": CompiledInside, "compiled in turn": lambda: CompiledInside(turns=True),
    "parametrized": lambda: normed_weights(True), "weight norm": lambda: normed_weights(False),
}


def build_any(kind, seed=0):
    torch.manual_seed(seed)
    torch._dynamo.reset()
    return OWN[kind]().double() if kind in OWN else build(kind, seed)


def share(batch, share=4):
    rank = dist.get_rank()
    return rows(batch, share * rank, share * (rank + 1))


def nobody_reads_too_early(name, kinds, call="engine", steps=4, penalty=False, peek=False):
    """call: what the user calls forward with. penalty: the loss reads all weights, after forward has. peek: so does the user."""
    for kind in kinds:
        batch_kind = "plain" if kind in OWN else kind
        model = build_any(kind)
        reference = Reference(build_any(kind), None, 0.5, lr=0.01, eps=1e-3)
        if call == "compiled before":
            model = torch.compile(model, backend="eager", fullgraph=kind == "plain")
        if call == "compiled and warm":
            model(share(global_batch("plain", 4 * dist.get_world_size(), 0)[0])[0])
        engine = build_engine(name, model, lr=0.01, eps=1e-3, max_norm=0.5, precision="fp32", bucket_mb=1e-6)
        forward = engine if call == "engine" else model
        if call == "compiled after":
            forward = torch.compile(model, backend="eager")
        if call == "compiled in place":
            model.compile(backend="eager")
        with late_gathers() as log:
            for step in range(steps):
                batch, loss_fn = global_batch(batch_kind, 4 * dist.get_world_size(), step)
                for m, call_it, b, backward in ((reference.model, reference.model, batch, torch.Tensor.backward),
                                                (model, forward, share(batch), engine.backward)):
                    loss = loss_fn(call_it(b[0]), b)
                    if penalty:
                        loss = loss + 1e-2 * sum(p.square().sum() for p in m.parameters() if p.requires_grad)
                    backward(loss)
                if peek:
                    engine.memory()
                    list(model.named_parameters())
                reference.step()
                log.clear()
                engine.step()
                assert len(log) == len(engine.buckets) >= 3 and {what for what, _ in log} == {"start"}, kind
                assert all(b.weights.isnan().any() for b in engine.buckets if b.weights.numel()), kind  # the poison is there
            for p, q in zip(engine.module.parameters(), reference.model.parameters(), strict=True):
                close(p.detach(), q.detach())


@pytest.mark.parametrize("name, kinds", [
    ("zero2", ["plain", "awkward", "tied", "checkpoint"]), ("zero1", ["awkward", "branches"]), ("zero1_offload", ["awkward"]),
    ("zero2", ["attention", "lstm", "tied by hand", "branches", "parametrized", "weight norm"]),
    ("zero2", ["hidden", "hidden, then by name", "hidden in turn"])], ids=str)
def test_nobody_reads_a_weight_too_early(pool, name, kinds):
    pool.run(2, nobody_reads_too_early, name, kinds)


@pytest.mark.parametrize("call", ["model", "compiled before", "compiled after", "compiled in place"])
def test_whoever_calls_the_model_waits(pool, call):
    pool.run(2, nobody_reads_too_early, "zero2", ["plain", "hidden", "branches"], call, limit_s=120)


@pytest.mark.parametrize("call", ["engine", "compiled and warm"])
def test_compiled_methods_wait(pool, call):
    pool.run(2, nobody_reads_too_early, "zero2", ["compiled inside", "compiled in turn"], call, limit_s=120)


@pytest.mark.parametrize("how", [dict(penalty=True), dict(peek=True)])
def test_reads_outside_forward_do_not_count(pool, how):
    """A weight that forward takes from a list, and that something else reads by name, too: memory(), an L2 term in the loss."""
    pool.run(2, nobody_reads_too_early, "zero2", ["lstm", "hidden"], **how)


def reentrant(bucket_mb):
    """One bucket: right. Many: refused by name, and a later step is right again."""
    engine = build_engine("zero2", build("reentrant"), precision="fp32", lr=0.01, eps=1e-3, bucket_mb=bucket_mb)
    reference = Reference(build("checkpoint"), None, 0.0, lr=0.01, eps=1e-3)
    with late_gathers():
        for step in range(3):
            batch, loss_fn = global_batch("plain", 4 * dist.get_world_size(), step)
            reference.backward(batch, loss_fn)
            x, y = share(batch)
            x.requires_grad_()
            if bucket_mb < 1e-3:
                with raises(RuntimeError, "block.", "use_reentrant=False"):
                    engine.backward(loss_fn(engine(x), (x, y)))
                engine.module.use_reentrant = False
            engine.backward(loss_fn(engine(x), (x, y)))
            engine.module.use_reentrant = True
            reference.step()
            engine.step()
        for p, q in zip(engine.module.parameters(), reference.model.parameters(), strict=True):
            close(p.detach(), q.detach())


@pytest.mark.parametrize("bucket_mb", [1.0, 1e-6])
def test_case_14_reentrant_checkpointing_is_right_or_refused(pool, bucket_mb):
    pool.run(2, reentrant, bucket_mb)


def readers(name, directory):
    """Each way to look at the weights, first thing after a step."""
    model = build("awkward")
    reference = Reference(model, None, 0.0, lr=0.01, eps=1e-3)
    engine = build_engine(name, model, precision="fp32", lr=0.01, eps=1e-3, bucket_mb=1e-6)

    def of_state_dict():
        saved = engine.state_dict()
        return [saved[n] for n, _ in reference.model.named_parameters()] if saved else list(reference.model.parameters())

    def of_checkpoint():
        engine.save(directory)
        other = build_engine(name, build("awkward", seed=5), precision="fp32")
        other.load(directory)
        return other.module.parameters()

    def of_evaluation():
        x = global_batch("awkward", 4, 77)[0][0]
        with torch.no_grad():
            model.eval()
            close(model(x), reference.model(x))
            model.train()
        return model.parameters()

    def of_second_engine():  # the last one here: it takes the model over
        return build_engine(name, model, precision="fp32").module.parameters()

    names = [n for n, _ in reference.model.named_parameters()]
    owners = [(model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in names]
    ways = {
        "parameters": model.parameters, "named": lambda: [p for _, p in engine.named_parameters()],
        "module": lambda: engine.module.parameters(), "plain state_dict": lambda: [model.state_dict()[n] for n in names],
        "by name": lambda: [getattr(m, n) for m, n in owners], "get": lambda: [m._parameters.get(n) for m, n in owners],
        "dict": lambda: [dict(m._parameters)[n] for m, n in owners],
        "deepcopy": lambda: copy.deepcopy(model).parameters(), "state_dict": of_state_dict, "checkpoint": of_checkpoint,
        "evaluation": of_evaluation, "own list": lambda: engine.wait_for_weights() or [
            next((q for m, q in zip(engine.names, engine.params) if m == n), dict(engine._frozen).get(n)) for n in names],
        "second engine": of_second_engine,
    }
    with late_gathers():
        for step, (way, read) in enumerate(ways.items()):
            batch, loss_fn = global_batch("awkward", 4 * dist.get_world_size(), step)
            reference.backward(batch, loss_fn)
            engine.forward_backward(share(batch), 2, loss_fn)
            for n, p in reference.model.named_parameters():
                if p.requires_grad:
                    close(engine.full_grad(n), torch.zeros_like(p) if p.grad is None else p.grad)
            reference.step()
            engine.step()
            assert any(b.gathering is not None for b in engine.buckets)
            for p, q in zip(read(), reference.model.parameters(), strict=True):
                assert torch.allclose(p, q, rtol=1e-10, atol=1e-10), way
            engine.wait_for_weights()


@stages
def test_readers_wait(pool, tmp_path, name):
    pool.run(2, readers, name, f"{tmp_path}/run")


def lazy_log(overlap_gather):
    """Six layers in six buckets: when each computes, the later ones' gathers have not been waited for."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(6)])
    engine = build_engine("zero2", model, precision="fp32", bucket_mb=1e-6, overlap_gather=overlap_gather)
    of_bucket = {b.weights.data_ptr(): 5 - k for k, b in enumerate(engine.buckets)}
    with late_gathers() as log:
        for i, layer in enumerate(model):
            layer.register_forward_hook(lambda *_, i=i: log.append(("layer", i)))
        for step in range(4):
            log.clear()
            engine.forward_backward(torch.randn(4, 16), 1 + step % 2, lambda out, x: out.square().mean())
            forward = [(what, of_bucket.get(which, which)) for what, which in log[: log.index(("layer", 5)) + 1]]
            expected = [[("wait", i), ("layer", i)] if step and overlap_gather else [("layer", i)] for i in range(6)]
            assert forward == sum(expected, []), forward
            log.clear()
            engine.step()
            started = [(what, of_bucket[which]) for what, which in log if what == "start"]
            assert started == [("start", i) for i in range(6)], started  # B gathers a step, in the order that forward needs
            assert [b.gathering is None for b in engine.buckets] == [not overlap_gather] * 6
        engine.wait_for_weights()


@pytest.mark.parametrize("overlap_gather", [True, False])
def test_gathers_are_lazy(pool, overlap_gather):
    pool.run(2, lazy_log, overlap_gather)
