"""The contract on CUDA with NCCL: what test_contract.py compares, with the model on a GPU; one rank, and two where ranks can have
a GPU each or NCCL (2.30 or newer) lets them share one. Skipped without a GPU. float64 takes torch's fused Adam, fp32 takes
adam_cuda.cu, whose own tests are in test_adam.py. ddp runs on one, two and three ranks; the others on two, zero2 and fsdp on one,
too. Six minutes for ddp and zero on one H200 that all ranks share.
"""
import contextlib
import ctypes
import warnings

import pytest
import test_contract as contract
import test_ddp
import torch
import torch.distributed as dist
from models import (
    ENGINES,
    Reference,
    assert_same_on_all_ranks,
    build,
    build_engine,
    engines,
    global_batch,
    raises,
    rows,
    two_groups,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def nccl_shares_gpus():
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value >= 23000


def rank_counts():
    if not torch.cuda.is_available():
        return [1]
    return [1, 2, 3] if nccl_shares_gpus() else [n for n in (1, 2, 3) if n <= torch.cuda.device_count()]


def on_cuda(function, *args, **kwargs):
    torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    try:
        function(*args, **kwargs)
    finally:
        torch.set_default_device(None)


def pairs(sharded=tuple(n for n in ENGINES if n != "ddp")):
    """(engine, ranks): ddp on every number of ranks, the sharded ones on two, and zero2 and fsdp on one, too."""
    found = [("ddp", n) for n in rank_counts()] + [("zero2", 1), ("fsdp", 1)]
    return found + ([(name, 2) for name in sharded] if 2 in rank_counts() else [])


def in_words(value):
    return value if isinstance(value, str) else f"{value}ranks"


engine_and_ranks = pytest.mark.parametrize("name, ranks", pairs(), ids=in_words)
on_two_ranks = pytest.mark.skipif(torch.cuda.is_available() and len(rank_counts()) < 2,
                                  reason="needs two ranks: two GPUs, or NCCL 2.30 to share one")
fsdp_engines = pytest.mark.parametrize("name", [name for name in ENGINES if name.startswith("fsdp")])


@pytest.fixture
def run(pool):
    return lambda ranks, *args, **kwargs: pool.run(ranks, on_cuda, *args, backend="nccl", limit_s=120, **kwargs)


@pytest.mark.parametrize("kind", contract.KINDS)
@engine_and_ranks
def test_float64_equals_one_process(run, name, ranks, kind):
    run(ranks, contract.train_beside_reference, name, kind)


@pytest.mark.parametrize("kind", ["awkward", "batchnorm", "bert"])
@engine_and_ranks
def test_own_loop_equals_one_process(run, name, ranks, kind):
    run(ranks, contract.train_beside_reference, name, kind, own_loop=True)


def fp32_beside_reference(name, kind):
    """adam_cuda.cu inside an engine, beside torch: fp32 rounding of gradients near 0 is multiplied by lr/eps = 10 (eps=1e-3)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(kind, dtype=torch.float32)
    reference = Reference(model, two_groups, 0.5, lr=0.01, eps=1e-3)
    engine = build_engine(name, model, two_groups(model), lr=0.01, eps=1e-3, precision="fp32", max_norm=0.5)
    assert engine.optimizer.cuda, "adam_cuda.cu was not used"
    for step in range(3):
        batch, loss_fn = global_batch(kind, 4 * ranks, step, torch.float32)
        reference.backward(batch, loss_fn)
        units = getattr(engine, "units", [])
        gathers = sum(unit.gathers for unit in units)
        engine.forward_backward(rows(batch, 4 * rank, 4 * rank + 4), 2, loss_fn)
        # fsdp: with two micro-batches each unit twice or more, the root once, one of "awkward" never; also at one rank
        assert sum(unit.gathers for unit in units) - gathers >= len(units)
        norm = reference.step()
        engine.step()
        contract.close(engine.grad_norm, norm, 1e-4)
        weights = contract.weights_of(engine)
        for p, q in zip(weights, reference.model.parameters(), strict=True):
            contract.close(p, q.detach(), 1e-4)
        assert_same_on_all_ranks(weights)
        assert name == "ddp" or ranks == 1 or {"reduce_scatter", "all_gather"} <= engine.traffic.keys()


@pytest.mark.parametrize("kind", ["plain", "awkward", "tied", "bert", "gpt2"])
@engine_and_ranks
def test_fp32_equals_one_process(run, name, ranks, kind):
    run(ranks, fp32_beside_reference, name, kind)


@on_two_ranks
@engines
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_overflow_on_one_rank(run, name, precision):
    run(2, contract.overflow_on_one_rank, name, precision)


@on_two_ranks
@engines
@pytest.mark.parametrize("case", ["accumulation_numbers", "varying_micro_batches", "uneven_ranks", "weighted_mean",
                                  "opposite_order", "taken_over"])
def test_cases_on_two_ranks(run, name, case):
    run(2, getattr(contract, case), name)


@engines
def test_several_dtypes(run, name):
    """One rank: what bf16 makes of 1/3 three times over is not 1, and two are compared on the CPU."""
    run(1, contract.several_dtypes, name)


@pytest.mark.parametrize("case", ["clip_numbers", "scale_changes_nothing", "tied_and_saved", "grows_not"])
@engine_and_ranks
def test_cases(run, name, ranks, case):
    run(ranks, getattr(contract, case), name)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@engine_and_ranks
def test_batch_norm(run, name, ranks, precision):
    run(ranks, contract.batch_norm_policy, name, precision)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@engine_and_ranks
def test_half_precision_gradients(run, name, ranks, precision):
    run(ranks, contract.half_gradients, name, precision)


def no_host_wait(name, precision):
    """A steady step of an engine makes no call that waits for the device."""
    engine = build_engine(name, build("plain", dtype=torch.float32), precision=precision, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda t: 1 / (1 + t))
    batch, loss_fn = global_batch("plain", 8, dist.get_rank(), torch.float32)
    for step in range(6):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "set_sync_debug_mode is a prototype feature"
            engine.forward_backward(batch, 2, loss_fn)
            engine.step()
            schedule.step()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name, ranks", pairs(tuple(n for n in ENGINES if n != "ddp" and "offload" not in n)), ids=in_words)
def test_no_host_wait(run, name, ranks, precision):
    run(ranks, no_host_wait, name, precision)


def late_collectives_and_copies(name, runs=20):
    """Race conditions: every collective is issued from a stream that has slept first, and so is every copy of an offloaded slice,
    one in twenty per run, each in turn. Whoever uses a result without waiting for it computes something else. Bit for bit."""
    count, delayed = 0, range(0)

    def late():
        nonlocal count
        count += 1
        return count % runs in delayed

    def delay(collective):
        def issue(*args, **kwargs):
            if not late():
                return collective(*args, **kwargs)
            sleeper = torch.cuda.Stream()
            sleeper.wait_stream(torch.cuda.current_stream())
            with stream_context(sleeper):
                torch.cuda._sleep(20_000_000)  # some 10 ms
                work = collective(*args, **kwargs)
            if work is None:  # a call that is not asynchronous: the caller's stream goes on after it
                torch.cuda.current_stream().wait_stream(sleeper)
            return work
        return issue

    @contextlib.contextmanager
    def sleepy_stream(stream):
        with stream_context(stream):
            if stream is not None and late():
                torch.cuda._sleep(20_000_000)
            yield

    stream_context = torch.cuda.stream
    originals = {n: getattr(dist, n) for n in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")}

    def train():
        nonlocal count
        count = 0
        model = build("bert", dtype=torch.float32)
        engine = build_engine(name, model, two_groups(model), precision="bf16", max_norm=0.5, lr=0.01)
        for step in range(5):
            batch, _ = global_batch("bert", 8, step + 10 * dist.get_rank())
            engine.forward_backward(batch, 1 + step % 2)
            engine.step()
        return contract.weights_of(engine) + [t.clone() for f in engine.fragments for t in (f.master, f.exp_avg, f.exp_avg_sq)]

    expected = train()
    torch.cuda.stream = sleepy_stream  # copies between host and device run inside it
    for n, collective in originals.items():
        setattr(dist, n, delay(collective))
    try:
        for k in range(runs):
            delayed = range(k, k + 1)
            assert all(torch.equal(a, b) for a, b in zip(train(), expected, strict=True)), k
            assert count >= runs
        delayed = range(runs)
        assert all(torch.equal(a, b) for a, b in zip(train(), expected, strict=True)), "all of them late"
    finally:
        torch.cuda.stream = stream_context
        for n, collective in originals.items():
            setattr(dist, n, collective)


@on_two_ranks
@engines
def test_late_collectives_and_copies_change_no_bit(run, name):
    run(2, late_collectives_and_copies, name)


def checkpoint_on_gpu(name, directory):
    """A GPU run saved and resumed on as many ranks: bit for bit."""
    def engine_of(seed):
        model = build("bert", seed=seed, dtype=torch.float32)
        return build_engine(name, model, two_groups(model), precision="bf16", max_norm=0.5, lr=0.01)

    def train(engine, steps):
        for step in steps:
            batch, _ = global_batch("bert", 8, step + 10 * dist.get_rank())
            engine.forward_backward(batch, 2)
            engine.step()

    first, second = engine_of(0), engine_of(1)
    train(first, range(3))
    first.save(directory, note=7)
    expected = torch.rand(3, device="cuda")
    train(first, range(3, 6))
    assert second.load(directory) == {"note": 7}
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    train(second, range(3, 6))
    names = [n for n, _ in first.named_parameters()]
    for n, p, q in zip(names, contract.weights_of(first), contract.weights_of(second), strict=True):
        assert torch.equal(p, q), n
    for f, g in zip(first.fragments, second.fragments, strict=True):
        assert torch.equal(f.master, g.master) and torch.equal(f.exp_avg_sq, g.exp_avg_sq)


@engine_and_ranks
def test_checkpoint_resumes_bit_for_bit(run, name, ranks, tmp_path):
    run(ranks, checkpoint_on_gpu, name, str(tmp_path / "checkpoint"))


@on_two_ranks
@fsdp_engines
def test_fsdp_gathers_and_sends_while_others_compute(run, name):
    """The same events in the same order as on CPUs: autograd's hooks run in a thread of its own here."""
    run(2, contract.events_of_units, name)


def units_in_opposite_order(name):
    """NCCL takes the gather of one unit for that of the other, which has as many elements, without a word. In the first step,
    where nothing is gathered ahead, both ranks send as many collectives of each kind. The step is skipped, the next one raises."""
    engine = build_engine(name, contract.EitherFirst(), precision="fp32", lr=0.1, weight_decay=0.1)
    before, x = contract.weights_of(engine), torch.randn(4, 8)
    engine.backward(engine(x, turned=True).square().mean())
    engine.step()
    assert engine.skipped and engine.skipped_steps == 1
    assert all(torch.equal(p, q) for p, q in zip(contract.weights_of(engine), before, strict=True))
    torch.cuda.synchronize()  # what the ranks have compared is read a step later, without waiting for it
    with raises(RuntimeError, "the ranks ran different units, or in another order", "skipped"):
        engine.step()


def units_in_one_order(name):
    """The same model with the units in one order: steps are not skipped, and weights move."""
    engine = build_engine(name, contract.EitherFirst(), precision="fp32", lr=0.1, weight_decay=0.1)
    for _ in range(3):
        before = contract.weights_of(engine)
        engine.backward(engine(torch.randn(4, 8), turned=False).square().mean())
        engine.step()
        assert not engine.skipped
        assert not any(torch.equal(p, q) for p, q in zip(contract.weights_of(engine), before, strict=True))
        torch.cuda.synchronize()


@on_two_ranks
@fsdp_engines
@pytest.mark.parametrize("case", [units_in_opposite_order, units_in_one_order])
def test_fsdp_compares_the_order_of_units(run, name, case):
    run(2, case, name)


def held_on_the_host():
    """With offload the GPU keeps nothing, neither from backward to step nor from step to forward."""
    engine = build_engine("fsdp_offload", build("plain", dtype=torch.float32), precision="bf16")
    batch, loss_fn = global_batch("plain", 8, dist.get_rank(), torch.float32)
    for _ in range(2):
        for act in (lambda: engine.forward_backward(batch, 2, loss_fn), engine.step):
            act()
            held = engine.memory()
            for kind in ("parameters", "gradients", "optimizer"):
                assert held[kind]["cpu"] > 0 and sum(held[kind].values()) == held[kind]["cpu"], held


@pytest.mark.parametrize("ranks", [n for n in rank_counts() if n < 3])
def test_fsdp_offload_keeps_nothing_on_the_gpu(run, ranks):
    run(ranks, held_on_the_host)


def capture_a_step():
    """A whole step as one CUDA graph, by hand: nothing in the blocks may stand in its way. Beside the eager engine, bit for bit
    over 10 steps with a schedule and one overflow; what the host sends (learning rates) is sent before each replay."""
    def schedule(engine):
        return torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda t: 1 / (1 + t))

    loss_fn = contract.cross_entropy
    engines = [build_engine("ddp", build("plain", dtype=torch.float32), precision="fp16", max_norm=0.5, lr=0.01) for _ in range(2)]
    eager, captured = engines
    schedules = [schedule(e) for e in engines]
    batches = [global_batch("plain", 8, step, torch.float32)[0] for step in range(14)]
    batches[9] = (batches[9][0] * float("inf"), batches[9][1])

    def step(engine, batch):
        loss = engine.forward_backward(batch, 2, loss_fn)
        engine.step()
        return loss

    static = tuple(t.clone() for t in batches[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for k in range(4):
            for t, new in zip(static, batches[k], strict=True):
                t.copy_(new)
            step(captured, static)
            schedules[1].step()
    torch.cuda.current_stream().wait_stream(side)
    for k in range(4):
        step(eager, batches[k])
        schedules[0].step()
    adam, graph = captured.optimizer, torch.cuda.CUDAGraph()
    sent, adam._send = adam._send, lambda *_: None
    captured.scaler.raise_if_stuck = lambda: None
    with torch.cuda.graph(graph):
        loss = step(captured, static)
    adam._send = sent
    adam.present[:] = b"\x01" * len(adam.present)
    adam.send_presence()
    for k in range(4, 14):
        for t, new in zip(static, batches[k], strict=True):
            t.copy_(new)
        adam.send_hyperparameters()
        graph.replay()
        schedules[1].step()
        assert torch.equal(step(eager, batches[k]), loss) or k == 9
        schedules[0].step()
        assert captured.skipped == (k == 9) and captured.scale == eager.scale
        for p, q in zip(captured.module.parameters(), eager.module.parameters(), strict=True):
            assert torch.equal(p, q), k


def test_a_step_can_be_captured(run):
    run(1, capture_a_step)


@on_two_ranks
@pytest.mark.parametrize("case", ["compressed_specials", "compressed"])
@pytest.mark.parametrize("compression", ["bf16", "fp16", "fp8"])
def test_compression(run, case, compression):
    run(2, getattr(test_ddp, case), compression)


@pytest.mark.parametrize("ranks", rank_counts())
def test_sync_batch_norm(run, ranks):
    run(ranks, test_ddp.sync_batch_norm, 2)


@on_two_ranks
@pytest.mark.parametrize("case", ["failed_backward", "two_backwards_before_a_step", "buckets_follow_arrival"])
def test_cases_of_ddp(run, case):
    run(2, getattr(test_ddp, case))
