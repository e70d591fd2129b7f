"""Ranks for the tests: up to eight worker processes, forked once and kept for the whole run.

Starting a Python with torch takes seconds, so one forkserver imports it once and workers are forked from that. A test on
n ranks gets a fresh process group on the first n workers, through a file store, and destroys it. After a failure or a
time limit every rank's stack is printed, all workers are ended, and the next test forks new ones.
"""
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta

# Before torch is imported anywhere: one thread per rank, and gloo on the loopback device.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # several ranks on one GPU, from NCCL 2.30 on
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
PRELOAD = ["torch", "torch.distributed.nn", "torchvision", "transformers.models.bert.modeling_bert",
           "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"]
GRACE_S = 3.0  # how long the other ranks may still run after one has failed


def _work(pipe, stack_file: str) -> None:
    """A worker's life: take (function, rank, ranks, ...), run it in a process group, answer, and again."""
    import torch
    import torch.distributed as dist

    stacks = open(stack_file, "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's, which ends the workers
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        function, rank, ranks, store, backend, timeout_s, args, kwargs = task
        try:
            if backend == "nccl":
                torch.cuda.set_device(rank % torch.cuda.device_count())
            dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks,
                                    timeout=timedelta(seconds=timeout_s))
            result = function(*args, **kwargs)
            dist.destroy_process_group()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Pool:
    def __init__(self):
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.workers = []  # (process, pipe, file of its stacks)
        self.runs = 0

    def run(self, ranks: int, function, *args, limit_s: float = 60.0, backend: str = "gloo", **kwargs) -> list:
        """`function(*args, **kwargs)` on each of `ranks` ranks; their results in order. Raises AssertionError with the
        traceback of every rank that failed and the stack of every rank that hung."""
        while len(self.workers) < ranks:
            here, there = self.context.Pipe()
            stacks = os.path.join(self.folder.name, f"stack-{self.runs}-{len(self.workers)}")
            process = self.context.Process(target=_work, args=(there, stacks), daemon=True)
            process.start()
            self.workers.append((process, here, stacks))
        self.runs += 1
        store = os.path.join(self.folder.name, f"store-{self.runs}")
        team = self.workers[:ranks]
        for rank, (_, pipe, _) in enumerate(team):
            pipe.send((function, rank, ranks, store, backend, limit_s, args, kwargs))
        answers, deadline = {}, time.monotonic() + limit_s
        waiting = {pipe: rank for rank, (_, pipe, _) in enumerate(team)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, f"the process ended (exit code {team[rank][0].exitcode})")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting or not all(ok for ok, _ in answers.values()):
            report = [f"rank {rank}: {text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
            report += [f"rank {rank} was still running:\n{self._stack(*team[rank])}" for rank in waiting.values()]
            self.close()
            raise AssertionError(f"{function.__name__} on {ranks} ranks\n" + "\n".join(report))
        return [answers[rank][1] for rank in range(ranks)]

    def _stack(self, process, _, stacks: str) -> str:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        with open(stacks) as f:
            return f.read()

    def close(self) -> None:
        """End all workers by id; the next `run` forks new ones."""
        for process, _, _ in self.workers:
            process.kill()
        for process, _, _ in self.workers:
            process.join()
        self.workers = []
