"""How runs end: every way in which a rank can fail ends all ranks, with a message that names the rank, and leaves no process.

Each test starts torchrun on a few lines of a script, under a time limit. About 60 s: a start of two ranks takes 6.
"""
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEAD = """
import os, sys, time, signal
import torch, torch.distributed as dist
from ddp import DDP, distributed
torch.set_num_threads(1)
"""
TRAIN = """
    torch.manual_seed(0)
    engine = DDP(torch.nn.Linear(40, 40), lr=1e-3)
    for step in range(STEPS):
        %s
        engine.forward_backward(torch.randn(4, 40), loss_fn=lambda out, x: out.square().mean())
        engine.step()
    sys.stdout.write(f"done {dist.get_rank()}\\n")
"""


def torchrun(tmp_path, body, ranks=2, limit_s=90, timeout_s=60, steps=3, wait=True, options=("--standalone",), after=""):
    """Run `body` inside `with distributed()` and `after` behind it on some ranks; (exit code, stdout, stderr, seconds), or the
    process."""
    script = tmp_path / "script.py"
    script.write_text(f"{HEAD}\nSTEPS = {steps}\nwith distributed(timeout_s={timeout_s}) as device:\n{body}\n{after}")
    marker = f"MARK{os.getpid()}x{time.monotonic_ns()}"  # in every process's environment, to find orphans by
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MARKER": marker}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc_per_node", str(ranks), str(script)]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)
    process.marker = marker
    return finish(process, start, limit_s) if wait else process


def finish(process, start, limit_s=90):
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"still running after {limit_s} s\n{out}\n{err}")
    deadline = time.monotonic() + 5
    while (orphans := alive(process.marker)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not orphans, f"processes left: {orphans}\n{err}"
    return process.returncode, out, err, time.monotonic() - start


def alive(marker):
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes() and (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass  # ended meanwhile
    return found


def test_a_normal_end_says_nothing(tmp_path):
    """No warning about a process group that was not destroyed, none about renamed collectives, no noise from rank 1. And the group
    is gone: while gloo's threads live on with tensors of theirs, Python's end can abort the process (seen once in 30 runs)."""
    after = 'print("threads", *[open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")])'
    code, out, err, _ = torchrun(tmp_path, TRAIN % "pass", after=after)
    assert code == 0 and out.count("done") == 2, (out, err)
    assert out.count("threads") == 2 and "gloo" not in out, out
    noise = [line for line in err.splitlines() if line.strip() and "adam: torch's fused Adam" not in line]
    assert not noise, noise


def test_sys_exit_inside_is_a_normal_end(tmp_path):
    threads = '[open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]'
    body = TRAIN % "pass" + f"    import atexit; atexit.register(lambda: print('threads', {threads}))\n    sys.exit(0)\n"
    code, out, err, _ = torchrun(tmp_path, body)
    assert code == 0 and out.count("threads") == 2 and "gloo" not in out, (out, err)
    assert "destroy_process_group" not in err, err


def test_one_rank_raises(tmp_path):
    code, out, err, seconds = torchrun(tmp_path, TRAIN % 'assert dist.get_rank() == 0 or step < 1, "bad sample 17"')
    assert code == 1 and "done" not in out
    assert "rank 1 of 2: AssertionError: bad sample 17 (the first to fail)" in err
    assert re.search(r"rank\s*: 1 .*", err), err  # torchrun's summary
    assert err.count("Traceback (most recent call last)") <= 2, err  # the rank's own, and torchrun's
    assert seconds < 40


def test_all_ranks_raise(tmp_path):
    code, _, err, _ = torchrun(tmp_path, TRAIN % 'assert step < 1, "everywhere"')
    assert code == 1 and re.search(r"rank [01] of 2: AssertionError: everywhere \(the first to fail\)", err), err


def test_one_rank_is_killed(tmp_path):
    body = TRAIN % "step == 1 and dist.get_rank() == 1 and os.kill(os.getpid(), signal.SIGKILL)"
    code, out, err, seconds = torchrun(tmp_path, body)
    assert code == 1 and "done" not in out and seconds < 40
    assert re.search(r"rank\s*: 1 .*", err) and "Signal 9 (SIGKILL)" in err, err  # torchrun's summary


def test_one_rank_is_late(tmp_path):
    """Rank 1 of 3 sleeps past the limit of 4 s: the others fail then, and name it."""
    body = TRAIN % "step == 1 and dist.get_rank() == 1 and time.sleep(1000)"
    code, out, err, seconds = torchrun(tmp_path, body, ranks=3, timeout_s=4)
    assert code == 1 and "done" not in out and seconds < 60
    assert "no word from rank 1: killed, or late" in err, err


def test_ctrl_c(tmp_path):
    process = torchrun(tmp_path, TRAIN % 'print("step", flush=True); time.sleep(0.1)', steps=10_000, wait=False)
    start = time.monotonic()
    assert process.stdout.readline().startswith("step")  # two ranks write into one line at times
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to torchrun and to its ranks
    code, _, err, seconds = finish(process, start, 60)
    assert code != 0 and seconds < 40
    assert "interrupted" in err


def test_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ("--master_addr", "127.0.0.1", "--master_port", str(port), "--nnodes", "1")
        code, _, err, _ = torchrun(tmp_path, TRAIN % "pass", options=options)
    assert code != 0 and str(port) in err and re.search("EADDRINUSE|already in use|failed to listen|failed to bind", err), err


def test_plain_python_is_one_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{HEAD}\nSTEPS = 2\nwith distributed() as device:\n{TRAIN % 'pass'}")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and run.stdout == "done 0\n", run.stderr
