"""What only ddp.py has: the numbers in its docstring, the order of its collectives, a failed backward, its demonstration.

The contract that it shares with the other strategies is in test_contract.py. About 15 s, of which the demonstration takes 10.
"""
import pathlib
import re
import subprocess
import sys

import torch
import torch.distributed as dist
from models import assert_same_on_all_ranks, build, build_engine, cross_entropy, global_batch, raises
from torch import nn

import ddp

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_numbers_of_the_docstring():
    from transformers import BertConfig, BertForSequenceClassification
    with torch.device("meta"):
        params = list(BertForSequenceClassification(BertConfig()).parameters())
    numel = sum(p.numel() for p in params)
    assert f"Ψ = {numel / 1e6:.1f}e6" in ddp.__doc__
    assert f"16Ψ = {16 * numel / 1e9:.2f} GB" in ddp.__doc__
    assert f"{7 * numel / 1e6:.0f} MB a step for BERT-base" in ddp.__doc__ and 2 * 7 / 8 * 4 == 7
    assert round(len(params), -2) == 200 and "the latency 200 times" in ddp.__doc__


def failed_backward():
    """An error in the middle of backward: what has accumulated is gone, nothing is in flight, and training goes on."""
    engine = build_engine("ddp", build("plain"), precision="fp32", lr=0.1)
    batch, loss_fn = global_batch("plain", 4, dist.get_rank())
    engine.forward_backward(batch, loss_fn=loss_fn)
    expected = engine.full_grad("layers.0.weight")
    engine.zero_grad()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("in the middle")

    middle = engine.module.layers[3]
    forward = middle.forward
    middle.forward = lambda x: forward(Fails.apply(x))
    with raises(RuntimeError, "in the middle"):
        engine.forward_backward(batch, 2, loss_fn)
    middle.forward = forward
    engine.forward_backward(batch, loss_fn=loss_fn)
    assert torch.equal(engine.full_grad("layers.0.weight"), expected)
    engine.step()
    assert_same_on_all_ranks(engine.module.parameters())


def test_failed_backward(pool):
    pool.run(2, failed_backward)


def two_backwards_before_a_step():
    """Each synchronised: the second must not count the first sum N times, whatever the number of ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    engine = build_engine("ddp", build("awkward"), precision="fp32")
    plain = build("awkward")
    for step in range(3):
        for r in range(ranks):
            batch, _ = global_batch("plain", 4, 10 * step + r)
            (cross_entropy(plain(batch[0]), batch) / ranks).backward()
        batch, _ = global_batch("plain", 4, 10 * step + rank)
        engine.backward(cross_entropy(engine(batch[0]), batch))
        for n, p in plain.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(engine.full_grad(n), p.grad, rtol=1e-10, atol=1e-10)
                torch.testing.assert_close(dict(engine.named_parameters())[n].grad, p.grad, rtol=1e-10, atol=1e-10)


def test_two_backwards_before_a_step(pool):
    pool.run(3, two_backwards_before_a_step)


def buckets_follow_arrival():
    """After the first step buckets are in rank 0's order of arrival, with the parameters that had no gradient last. Before it
    and after it, `.grad` is a view of its bucket."""
    class Crossed(nn.Module):  # registered a, b, unused, c; gradients arrive b, c, a on rank 0 and b, a, c on rank 1
        def __init__(self):
            super().__init__()
            self.a, self.b, self.unused, self.c = (nn.Linear(3, 3, bias=False) for _ in range(4))

        def forward(self, x):
            first, second = (self.a, self.c) if dist.get_rank() == 0 else (self.c, self.a)
            return self.b(torch.tanh(second(torch.tanh(first(x)))))

    engine = build_engine("ddp", Crossed(), precision="fp32", bucket_mb=1e-6, first_bucket_mb=1e-6)

    def order():
        return [engine.names[i][0] for bucket in engine.buckets for i in bucket.views]
    assert order() == ["c", "u", "b", "a"]
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 3)).square().mean())
        for bucket in engine.buckets:
            for i, view in bucket.views.items():
                assert engine.params[i].grad is view
        engine.step()
        assert order() == ["b", "c", "a", "u"]


def test_buckets_follow_arrival(pool):
    pool.run(2, buckets_follow_arrival)


def test_demonstration():
    """`python ddp.py`: measured beside predicted, and the distance from one process at rounding level in float64."""
    run = subprocess.run([sys.executable, "ddp.py"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    gaps = [float(x) for x in re.findall(r"(?:gradients|parameters) (\d\.\de-\d+)", run.stdout)]
    assert len(gaps) == 2 and max(gaps) < 1e-14, run.stdout
    rows = re.findall(r"^(\w.*?) +(\d+\.\d\d) +(\d+\.\d\d)$", run.stdout, re.M)
    assert len(rows) >= 4
    for what, formula, measured in rows:
        slack = 1.05 if what.startswith("sent") else 1.01  # other programs may use the loopback device meanwhile
        assert float(formula) / 1.01 <= float(measured) <= float(formula) * slack, run.stdout
