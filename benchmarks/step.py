"""Step times of our engines beside their peers: same model, same data, in turn in one run; ratios of medians.

    torchrun --standalone --nproc_per_node 2 benchmarks/step.py                    # BERT and ResNet-18, ours beside the peers
    torchrun --standalone --nproc_per_node 2 benchmarks/step.py --work bert --precision bf16 --engines zero2 deepspeed2
    torchrun --standalone --nproc_per_node 2 benchmarks/step.py --work bert --engines "hybrid tp2"
    python benchmarks/step.py --work bert-base --precision bf16 --max-norm 1 --engines "plain torch" fsdp "torch fsdp2"    # a GPU
    python benchmarks/step.py --work bert-base --precision bf16 --engines ddp "ddp graph" zero2 "zero2 graph"

Every engine trains its own copy of the model. In each round every one of them takes `--block` steps, one after the other, so that a
machine whose speed drifts slows all of them alike. All see the same samples in a step: the two ranks of a tp group share one batch
of the rows that both have elsewhere. Bytes are those that rank 0's sockets deliver, per step and parameter of the whole model
(Linux, CPU ranks). Peak memory (GPUs) is what the engine holds between steps and the most that one of its steps adds; of a row
"graph", each of whose steps is one CUDA graph, it is only what the engine holds: torch does not count what replays use. "again" is
torch DDP's same copy a second time in each round: how far its ratio is from 1 says how much of the other ratios is noise. Prints
one table and, with --json, appends one line per row to a file.
"""
import argparse
import copy
import importlib.util
import json
import os
import platform
import statistics
import sys
import time

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from ddp import DDP, distributed, sent_bytes  # noqa: E402
from fsdp import FSDP  # noqa: E402
from hybrid import Hybrid, plan_of  # noqa: E402
from zero import Zero  # noqa: E402


def sentences(vocabulary, rows, length, device, padded=False):
    """Batches by rank: words and a label of two. padded: sentences of a quarter of the length and more, and a mask."""
    def batch(rank):
        g = torch.Generator().manual_seed(rank)
        words = dict(input_ids=torch.randint(vocabulary, (rows, length), generator=g),
                     labels=torch.randint(2, (rows,), generator=g))
        if padded:
            lengths = torch.randint(length // 4, length + 1, (rows, 1), generator=g)
            words["attention_mask"] = (torch.arange(length) < lengths).long()
        return {key: x.to(device) for key, x in words.items()}
    return batch


def bert(device):
    """4 layers of width 256, 5.3 M parameters; 8 sequences of 64 tokens per rank."""
    from transformers import BertConfig, BertForSequenceClassification
    config = BertConfig(vocab_size=8192, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config), sentences(8192, 8, 64, device), None


def resnet18(device):
    """torchvision's ResNet-18 with 10 classes, 11.2 M parameters; 16 images of 32 x 32 per rank."""
    from torchvision.models import resnet18

    def batch(rank):
        g = torch.Generator().manual_seed(rank)
        return torch.randn(16, 3, 32, 32, generator=g).to(device), torch.randint(10, (16,), generator=g).to(device)
    return resnet18(num_classes=10), batch, lambda out, b: torch.nn.functional.cross_entropy(out, b[1])


def bert_base(device, padded=False):
    """BERT-base with a head of 2 labels, 109.5 M parameters; 32 sequences of 128 tokens per rank."""
    from transformers import BertConfig, BertForSequenceClassification
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config), sentences(30522, 32, 128, device, padded), None


def gpt2_xl(device):
    """GPT-2 XL, 1.56 B parameters; 8 sequences of 512 tokens per rank."""
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(n_embd=1600, n_layer=48, n_head=25, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)

    def batch(rank):
        tokens = torch.randint(50257, (8, 512), generator=torch.Generator().manual_seed(rank)).to(device)
        return dict(input_ids=tokens, labels=tokens)
    with device:  # random numbers for so many weights take a CPU half a minute
        model = GPT2LMHeadModel(config)
    return model.cpu(), batch, None


def together(batches):
    """The rows of several batches as one."""
    if isinstance(batches[0], dict):
        return {k: torch.cat([b[k] for b in batches]) for k in batches[0]}
    return tuple(map(torch.cat, zip(*batches)))


WORKS = {  # of a device: a model on the CPU, batches by rank, a loss function or None for the model's own
    "bert": bert, "resnet18": resnet18, "bert-base": bert_base,
    "bert-base-padded": lambda device: bert_base(device, padded=True), "gpt2-xl": gpt2_xl}


def ours(engine_class, graph=False, **knobs):
    def build(model, loss_fn, precision, max_norm):
        engine, captured = engine_class(model, lr=1e-4, weight_decay=0.01, precision=precision, max_norm=max_norm, **knobs), []

        def step(batch):
            if graph and not captured:
                captured.append(engine.capture(batch, loss_fn=loss_fn))
            if graph:
                return captured[0](batch)
            loss = engine.forward_backward(batch, loss_fn=loss_fn)
            engine.step()
            return loss
        step.mean = True  # the loss is that of all ranks
        return step
    build.tp = knobs.get("tp", 1)
    return build


def loss_of(model, batch, loss_fn):
    output = model(batch[0]) if loss_fn else model(**batch)
    return loss_fn(output, batch) if loss_fn else output.loss


def torch_loop(model, wrapped, optimizer, loss_fn, half, max_norm):
    """The usual loop around a wrapped model. half: for autocast."""
    device = next(model.parameters()).device

    def step(batch):
        with torch.autocast(device.type, half, enabled=half is not None):
            loss = loss_of(wrapped, batch, loss_fn)
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    return step


ADAM = dict(lr=1e-4, weight_decay=0.01, fused=True)
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plain_torch(model, loss_fn, precision, max_norm):
    """One rank, or ranks that know nothing of each other."""
    return torch_loop(model, model, torch.optim.AdamW(model.parameters(), **ADAM), loss_fn, HALF.get(precision), max_norm)


def torch_graph(model, loss_fn, precision, max_norm):
    """plain_torch's step as one CUDA graph by torch's own recipe: steps on a stream of its own, then the capture."""
    step = torch_loop(model, model, torch.optim.AdamW(model.parameters(), capturable=True, **ADAM), loss_fn, HALF.get(precision),
                      max_norm)
    graph, kept = torch.cuda.CUDAGraph(), {}

    def replay(batch):
        keys = list(batch) if isinstance(batch, dict) else range(len(batch))
        if not kept:
            static = {key: batch[key].clone() for key in keys}
            kept["batch"] = static if isinstance(batch, dict) else tuple(static.values())
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    step(kept["batch"])
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                kept["loss"] = step(kept["batch"])
        for key in keys:
            kept["batch"][key].copy_(batch[key], non_blocking=True)
        graph.replay()
        return kept["loss"].clone()
    return replay


def torch_ddp(model, loss_fn, precision, max_norm, zero=False):
    """DistributedDataParallel with gradient_as_bucket_view and torch's fused AdamW: its fastest setting here. zero: with
    ZeroRedundancyOptimizer around AdamW, parameters_as_bucket_view."""
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAM)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    return torch_loop(model, wrapped, optimizer, loss_fn, HALF.get(precision), max_norm)


def blocks(model):
    """What fsdp.py makes a unit by default."""
    lists = [m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))]
    return [child for listed in lists for child in listed.children() if any(True for _ in child.children())]


def torch_fsdp2(model, loss_fn, precision, max_norm):
    """fully_shard around the same blocks, mixed precision by its own policy, torch's fused AdamW on its DTensors."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy(param_dtype=HALF.get(precision))
    for block in blocks(model):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return torch_loop(model, model, torch.optim.AdamW(model.parameters(), **ADAM), loss_fn, None, max_norm)


def torch_fsdp1(model, loss_fn, precision, max_norm):
    """FullyShardedDataParallel around the same blocks, with the original parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import CustomPolicy
    units, half = set(blocks(model)), HALF.get(precision)
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=CustomPolicy(lambda m: m in units), use_orig_params=True,
        mixed_precision=MixedPrecision(half, half) if half else None, device_id=next(model.parameters()).device)
    return torch_loop(wrapped, wrapped, torch.optim.AdamW(wrapped.parameters(), **ADAM), loss_fn, None, max_norm)


def deepspeed(stage):
    """DeepSpeed's ZeRO with torch's fused AdamW, where it is installed."""
    def build(model, loss_fn, precision, max_norm):
        os.environ.setdefault("DS_ACCELERATOR", next(model.parameters()).device.type)
        import deepspeed
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
                  "bf16": {"enabled": precision == "bf16"}, "fp16": {"enabled": precision == "fp16"}, "gradient_clipping": max_norm}
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        half = HALF.get(precision, torch.float32)

        def step(batch):
            if loss_fn:
                batch = (batch[0].to(half), *batch[1:])
            loss = loss_of(engine, batch, loss_fn)
            engine.backward(loss)
            engine.step()
            return loss.detach()
        step.close = engine.destroy  # scale.py frees one engine before it builds the next
        return step
    return build


ENGINES = {
    "ddp": ours(DDP), "zero1": ours(Zero, stage=1), "zero2": ours(Zero, stage=2), "fsdp": ours(FSDP), "hybrid": ours(Hybrid),
    "ddp graph": ours(DDP, graph=True), "zero1 graph": ours(Zero, graph=True, stage=1),
    "zero2 graph": ours(Zero, graph=True, stage=2), "fsdp graph": ours(FSDP, graph=True),
    "hybrid graph": ours(Hybrid, graph=True),
    "hybrid tp2": ours(Hybrid, tp=2), "hybrid compiled": ours(Hybrid, compile=True),
    "plain torch": plain_torch, "plain torch graph": torch_graph,
    "torch zero": lambda *args: torch_ddp(*args, zero=True), "torch fsdp1": torch_fsdp1,
    "torch fsdp2": torch_fsdp2, "deepspeed1": deepspeed(1), "deepspeed2": deepspeed(2),
}


def formula(name, precision, ranks, model, batch, local_numel):
    """Bytes per parameter, rank and step that the ring formulas give: what is summed and, in ZeRO, the weights handed round; fully
    sharded the blocks' weights twice and the rest once. Along tp: activations, four times in a block, once for an embedding and
    once for a head that are divided; then along dp what this rank has of the weights, `local_numel`."""
    width = 2 if precision != "fp32" and not name.startswith(("ddp", "torch DDP", "torch zero")) else 4
    times, numel, tp = 2.0, sum(p.numel() for p in model.parameters()), tp_of(name)
    if "fsdp" in name:
        in_blocks = sum(p.numel() for p in {p for block in blocks(model) for p in block.parameters()})
        times += in_blocks / numel
    if tp > 1:
        there = {module for module, _ in model.named_modules()}
        ends = sum(module in there and style in ("embedding_rowwise", "colwise_gather_output")
                   for module, style in plan_of(model).items())
        activations = batch["input_ids"].numel() * model.config.hidden_size * (4 * model.config.num_hidden_layers + ends)
        copies = ranks // tp
        return 2 * width * ((tp - 1) / tp * activations + (copies - 1) / copies * local_numel) / numel
    return 0.0 if name.startswith("plain torch") else times * (ranks - 1) / ranks * width


def tp_of(name):
    return getattr(ENGINES.get(name), "tp", 1)


def measure(work, precision, args, device):
    """Rows {engine, ms, ratio, bytes, GiB, loss} of one model, equal on all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, batch_of, loss_fn = WORKS[work](device)
    numel = sum(p.numel() for p in model.parameters())
    builders = {"torch DDP": torch_ddp, **{name: ENGINES[name] for name in args.engines}}
    on_gpu = device.type == "cuda"
    allocated = torch.cuda.memory_allocated if on_gpu else lambda: 0

    def wait():
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
    steps, times, sent, losses, peak, formulas, batches = {}, {}, {}, {}, {}, {}, {}
    for name, build in builders.items():
        tp = tp_of(name)
        batches[name] = batch = together([batch_of(rank // tp * tp + k) for k in range(tp)])
        at_first = allocated()
        own = copy.deepcopy(model).to(device)
        steps[name] = step = build(own, loss_fn, precision, args.max_norm)
        formulas[name] = formula(name, precision, ranks, model, batch, sum(p.numel() for p in own.parameters()))
        del own
        for _ in range(3):
            step(batch)
        wait()
        before, held = sent_bytes(), allocated()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(5):  # of a strategy that gathers while the next step begins, one step sends what the last one left
            step(batch)
        wait()
        sent[name] = (sent_bytes() - before) / numel / 5
        peak[name] = torch.cuda.max_memory_allocated() - at_first if on_gpu else 0
        assert not on_gpu or allocated() <= held + 2**20, name
    for kept in (steps, batches, formulas):
        kept["torch DDP again"] = kept["torch DDP"]
    names = list(steps)
    times = {name: [] for name in names}
    for k in range(args.steps // args.block):
        for name in names[k % len(names) :] + names[: k % len(names)]:  # nobody always comes first
            for _ in range(args.block):
                wait()
                start = time.perf_counter()
                losses[name] = steps[name](batches[name])
                wait()
                times[name].append((time.perf_counter() - start) * 1e3)
    median = {name: statistics.median(t) for name, t in times.items()}
    loss = {name: value.double().reshape(1).clone() for name, value in losses.items()}
    for name, value in loss.items():
        if not getattr(steps[name], "mean", False):
            dist.all_reduce(value)
            value /= ranks
    return [dict(work=work, precision=precision, ranks=ranks, engine=name, ms=median[name], best_ms=min(times[name]),
                 ratio=median[name] / median["torch DDP"], bytes_per_param=sent.get(name, 0.0),
                 formula=formulas[name], peak_gib=peak.get(name, 0) / 2**30, max_norm=args.max_norm,
                 loss=loss[name].item()) for name in steps]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["bert", "resnet18"], help="models (bert resnet18)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=None, help="beside torch DDP (all of tp=1 that are "
                        "installed, but plain and compiled ones and graphs)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of every engine (fp32)")
    parser.add_argument("--max-norm", type=float, default=0.0, help="clip gradients to this global norm (0: off)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per engine (30)")
    parser.add_argument("--block", type=int, default=3, help="steps in a row per engine and round (3)")
    parser.add_argument("--json", metavar="FILE", help="append the rows to this file, one JSON object a line (off)")
    args = parser.parse_args()
    if args.engines is None:
        installed = importlib.util.find_spec("deepspeed")
        args.engines = [name for name in ENGINES if tp_of(name) == 1 and name not in ("plain torch", "hybrid compiled")
                        and "graph" not in name
                        and (installed or "deepspeed" not in name)]
    with distributed() as device:
        rows = [row for work in args.work for row in measure(work, args.precision, args, device)]
        if dist.get_rank() == 0:
            machine = f"{os.cpu_count()} CPU cores ({platform.machine()})"
            machine = torch.cuda.get_device_name() if device.type == "cuda" else machine
            print(f"{dist.get_world_size()} ranks, {dist.get_backend()}, {machine}, torch {torch.__version__}")
            print("model            precision  engine            median ms  best ms  ratio  B/param  formula  peak GiB     loss")
            for r in rows:
                print(f"{r['work']:17}{r['precision']:11}{r['engine']:18}{r['ms']:10.1f}{r['best_ms']:9.1f}{r['ratio']:7.3f}"
                      f"{r['bytes_per_param']:9.2f}{r['formula']:9.2f}{r['peak_gib']:10.2f}{r['loss']:9.4f}")
            if args.json:
                with open(args.json, "a") as f:
                    where = dict(machine=machine, torch=torch.__version__, transformers=transformers.__version__,
                                 command=" ".join(["benchmarks/step.py", *sys.argv[1:]]))
                    f.writelines(json.dumps({**r, **where}) + "\n" for r in rows)


if __name__ == "__main__":
    main()
