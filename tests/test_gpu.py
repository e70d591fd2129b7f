"""The contract on CUDA with NCCL: what test_contract.py compares, with the model on a GPU; one rank, and two where ranks can have
a GPU each or NCCL (2.30 or newer) lets them share one. Skipped without a GPU. float64 takes torch's fused Adam, fp32 takes
adam_cuda.cu, whose own tests are in test_adam.py. 150 s on one H200 with three ranks on the card.
"""
import ctypes
import warnings

import pytest
import test_contract as contract
import test_ddp
import torch
import torch.distributed as dist
from models import Reference, assert_same_on_all_ranks, build, build_engine, global_batch, rows, two_groups

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


@pytest.fixture(params=rank_counts(), ids=lambda n: f"{n}ranks")
def run(pool, request):
    return lambda *args, **kwargs: pool.run(request.param, on_cuda, *args, backend="nccl", limit_s=120, **kwargs)


@pytest.mark.parametrize("kind", contract.KINDS)
@pytest.mark.parametrize("own_loop", [False, True], ids=["forward_backward", "own_loop"])
def test_float64_equals_one_process(run, kind, own_loop):
    run(contract.train_beside_reference, "ddp", kind, own_loop=own_loop)


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
        engine.forward_backward(rows(batch, 4 * rank, 4 * rank + 4), 2, loss_fn)
        norm = reference.step()
        engine.step()
        contract.close(engine.grad_norm, norm, 1e-4)
        for p, q in zip(engine.module.parameters(), reference.model.parameters(), strict=True):
            contract.close(p.detach(), q.detach(), 1e-4)
        assert_same_on_all_ranks(engine.module.parameters())


@pytest.mark.parametrize("kind", ["plain", "awkward", "tied", "bert", "gpt2"])
def test_fp32_equals_one_process(run, kind):
    run(fp32_beside_reference, "ddp", kind)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_overflow_on_one_rank(pool, precision):
    if len(rank_counts()) < 2:
        pytest.skip("needs two ranks: two GPUs, or NCCL 2.30 to share one")
    pool.run(2, on_cuda, contract.overflow_on_one_rank, "ddp", precision, backend="nccl", limit_s=120)


@pytest.mark.parametrize("case", ["accumulation_numbers", "varying_micro_batches", "uneven_ranks", "weighted_mean",
                                  "opposite_order", "taken_over"])
def test_cases_on_two_ranks(pool, case):
    if len(rank_counts()) < 2:
        pytest.skip("needs two ranks: two GPUs, or NCCL 2.30 to share one")
    pool.run(2, on_cuda, getattr(contract, case), "ddp", backend="nccl", limit_s=120)


def test_several_dtypes(pool):
    """One rank: what bf16 makes of 1/3 three times over is not 1, and two are compared on the CPU."""
    pool.run(1, on_cuda, contract.several_dtypes, "ddp", backend="nccl", limit_s=120)


@pytest.mark.parametrize("case", ["clip_numbers", "scale_changes_nothing", "tied_and_saved", "grows_not"])
def test_cases(run, case):
    run(getattr(contract, case), "ddp")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_batch_norm(run, precision):
    run(contract.batch_norm_policy, "ddp", precision)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_gradients(run, precision):
    run(contract.half_gradients, "ddp", precision)


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
def test_no_host_wait(run, precision):
    run(no_host_wait, "ddp", precision)


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


def test_a_step_can_be_captured(pool):
    pool.run(1, on_cuda, capture_a_step, backend="nccl", limit_s=120)


@pytest.mark.parametrize("case", ["compressed_specials", "compressed"])
@pytest.mark.parametrize("compression", ["bf16", "fp16", "fp8"])
def test_compression(pool, case, compression):
    if len(rank_counts()) < 2:
        pytest.skip("needs two ranks: two GPUs, or NCCL 2.30 to share one")
    pool.run(2, on_cuda, getattr(test_ddp, case), compression, backend="nccl", limit_s=120)


def test_sync_batch_norm(run):
    run(test_ddp.sync_batch_norm, 2)


@pytest.mark.parametrize("case", ["failed_backward", "two_backwards_before_a_step", "buckets_follow_arrival"])
def test_cases_of_ddp(pool, case):
    if len(rank_counts()) < 2:
        pytest.skip("needs two ranks: two GPUs, or NCCL 2.30 to share one")
    pool.run(2, on_cuda, getattr(test_ddp, case), backend="nccl", limit_s=120)
