"""The pool of ranks itself: a rank that fails, hangs or dies ends the test with every rank's traceback or stack, and the next test
gets fresh workers. A pool of its own, so that the shared one keeps its workers. About 15 s.
"""
import os
import signal
import time

import pool as pool_module
import pytest
import torch
import torch.distributed as dist


def add_up():
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item(), dist.get_world_size()


def fails_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("nobody home")
    add_up()


def hangs_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(1000)
    add_up()


def dies_on_rank_1():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    add_up()


def test_a_bad_rank_ends_the_test_and_not_the_run():
    own = pool_module.Pool()
    try:
        assert own.run(3, add_up) == [(3.0, 3)] * 3
        kept = [process.pid for process, _, _ in own.workers]
        assert own.run(2, add_up) == [(1.0, 2)] * 2 and [p.pid for p, _, _ in own.workers] == kept
        for function, limit_s, words in (
            (fails_on_rank_1, 30, ["rank 1: Traceback", "KeyError: 'nobody home'"]),
            (hangs_on_rank_1, 3, ["rank 1 was still running", "in hangs_on_rank_1", "rank 0"]),
            (dies_on_rank_1, 30, ["rank 1: the process ended"]),
        ):
            old = [process.pid for process, _, _ in own.workers]
            start = time.monotonic()
            with pytest.raises(AssertionError) as error:
                own.run(2, function, limit_s=limit_s)
            assert time.monotonic() - start < 20
            assert all(word in str(error.value) for word in words), str(error.value)
            assert own.workers == [] and not any(os.path.exists(f"/proc/{pid}") for pid in old)
            assert own.run(2, add_up) == [(1.0, 2)] * 2
    finally:
        own.close()
        own.folder.cleanup()
