"""What each strategy holds on a GPU, beside the formulas, beside plain torch, torch DDP and FSDP2; and the peak of its steps.

    python benchmarks/memory.py --json                                              # one GPU: BERT-base and GPT-2 XL
    torchrun --standalone --nproc_per_node 2 benchmarks/memory.py --work gpt2-xl --rows zero1 zero2 "hybrid pp2" fsdp

memory()  bytes of live storages after the last backward, by kind, as the engine itself counts them; of it, formula: weights,
          gradients and Adam's state by the table in README.md. What is above it are buckets and units on their way.
torch     what torch has allocated for the engine: between two steps, as the optimizer's step begins, and the most in two steps,
          with activations. The engines get the same batch a rank, and are built, measured and freed one after the other.

All in bytes per parameter of the whole model, on the rank that has most. On CPU ranks (to try this script) only memory() is known.
How much of a step's peak is what, hook by hook, on CPU ranks and as a picture: benchmarks/plot.py.
"""
import argparse
import os

import scale
import step
import torch
import torch.distributed as dist
from plot import ROOT, memory_formulas
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp import distributed

RESULTS = os.path.join(ROOT, "benchmarks", "results", "memory.jsonl")
WORKS = {"bert-base": step.bert_base, **scale.WORKS}
KINDS = ("parameters", "gradients", "optimizer")


def formula(name, ranks, engine, numel):
    """Bytes per parameter after backward, of what stays: README's table. Peers: fp32 weights, gradients and two moments."""
    if engine is None:
        return 16 / ranks if name == "torch fsdp2" else 16
    if name.startswith("hybrid"):  # Ψd/T + Ψw of this stage; other stages' parameters have a shape here, and no memory
        local = sum(p.numel() for p in engine.params if p.untyped_storage().nbytes() >= p.numel() * p.element_size()) / numel
        return 4 * local + 12 * local / engine.dp.world_size
    return sum(memory_formulas(name, ranks, engine, numel)[:4])


def measure(work, args, device, where):
    torch.manual_seed(0)
    model, batch_of, loss_fn = WORKS[work](device)
    model, numel, ranks = model.to(device), sum(p.numel() for p in model.parameters()), dist.get_world_size()
    for name in args.rows:
        seen, at_first = {}, scale.allocated(device)

        def look(optimizer, *_, name=name, seen=seen, at_first=at_first):
            """As a step of any optimizer begins, ours included: its gradients are there, and nothing of the step yet."""
            engine = getattr(optimizer, "engine", None)
            seen.update(backward=scale.allocated(device) - at_first, formula=formula(name, ranks, engine, numel) * numel)
            if engine:
                seen.update((kind, sum(by_device.values())) for kind, by_device in engine.memory().items() if kind in KINDS)

        handle = register_optimizer_step_pre_hook(look)
        try:
            row = scale.Row(name, model, batch_of, loss_fn, args, device)
        except ValueError as error:  # an engine refuses on all ranks alike, and before it communicates
            scale.say(f"{work:12}{name:17}{error}")
            continue
        finally:
            handle.remove()
        seen.update(between=scale.allocated(device) - at_first, peak=row.peak_gib * scale.GIB)
        row.close()
        most = {key: scale.over_ranks(n_bytes, device, dist.ReduceOp.MAX) / numel for key, n_bytes in seen.items()}
        found = dict(work=work, engine=name, ranks=ranks, precision=args.precision, params=numel, bytes_per_param=most, **where)
        scale.say(line(found, device.type == "cuda"))
        scale.save(found, args)


HEAD = ("model       engine           ranks | memory(): weights    grads     Adam   formula | torch: between  backward     peak"
        "  peak GiB")


def line(r, on_gpu):
    b = r["bytes_per_param"]
    ours = "".join(f"{b[kind]:9.2f}" if kind in b else f"{'-':>9}" for kind in KINDS)
    text = f"{r['work']:12}{r['engine']:17}{r['ranks']:5} |{'':9}{ours}{b['formula']:10.2f} |"
    return text + (f"{b['between']:15.2f}{b['backward']:10.2f}{b['peak']:9.2f}{b['peak'] * r['params'] / scale.GIB:10.2f}"
                   if on_gpu else f"{'-':>15}{'-':>10}{'-':>9}{'-':>10}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["bert-base", "gpt2-xl"], help="models (bert-base gpt2-xl)")
    parser.add_argument("--rows", nargs="+", type=scale.row_name, metavar="ROW", help="engines, as scale.py knows them (all but "
                        "DeepSpeed)")
    parser.add_argument("--json", nargs="?", const=RESULTS, metavar="FILE", help="append rows to a file (off; memory.jsonl)")
    args = parser.parse_args(namespace=argparse.Namespace(precision="bf16"))  # the formulas' precision
    with distributed() as device:
        rows = [name for name in scale.default_rows(dist.get_world_size()) if "deepspeed" not in name]
        args.rows = args.rows or rows
        where = scale.facts_of(device, dist.get_world_size())
        scale.say(", ".join(f"{key} {value}" for key, value in where.items() if key != "command"))
        scale.say(f"bytes per parameter\n{HEAD}")
        for work in args.work:
            measure(work, args, device, where)


if __name__ == "__main__":
    main()
