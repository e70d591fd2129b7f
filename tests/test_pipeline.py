"""Pipelines of hybrid.py: blocks dealt out in stages along pp, with and without tp and dp beside them.

Compared: one process in float64, as in test_hybrid.py, whose models these are, here with four blocks or as many as it says. Losses,
norms and logits are the same on every rank, those of other stages included. The order of tasks is played through without ranks.
Bytes on the wire, live storages and what autograd keeps beside the formulas of hybrid.py; checkpoints across strategies; errors.
Two and four CPU ranks, three once; about 70 s. Numbers in test names are those of the list of known faults.
"""
import contextlib
import copy
import itertools
import pathlib
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from models import Reference, assert_same_on_all_ranks, build_engine, in_sweep, raises, random, rows, two_groups
from test_contract import LivePeak, close, mean_over_ranks
from test_hybrid import LOSS_IN_FP32, MORE, VOCAB, batch_of, build, forward_of, own_loss, part_of, plain_norms, resumed
from torch import nn

import hybrid
from hybrid import Hybrid, schedule, sent_bytes, timeline

BLOCKS = dict(num_hidden_layers=4)
INTERLEAVED = dict(pp=2, schedule="interleaved", chunks=2)
# (rows for each copy, micro-batches, tokens in a row): the batch is not divided evenly, nor are micro-batches a multiple of stages;
# fewer rows than micro-batches, of another length, and the last of several copies has none; fewer micro-batches than stages.
STEPS = ((7, 6, 7), (2, 4, 5), (4, 1, 7))


def absent(p):
    """Has another stage this parameter? Then one element stands for all of it."""
    return p.numel() > 1 and p.untyped_storage().nbytes() == p.element_size()


def assert_stages_equal(engine, reference, tolerance=1e-10):
    """What this rank has of the model is that part of the reference's, and all stages together have all, and only tied weights
    more than once."""
    ours, theirs = dict(engine.named_parameters()), dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    present = [name for name, p in ours.items() if not absent(p)]
    for name in present:
        layout, local = engine.layout(ours[name]), ours[name].detach()
        expected = part_of(layout, theirs[name].detach())
        close(local[: len(expected)] if local.ndim else local, expected, tolerance)
    stages = [None] * dist.get_world_size()
    place = engine.dp.rank, engine.sp.rank, engine.tp.rank
    dist.all_gather_object(stages, (place, engine.pp.rank, present))
    lists = [(pp, names) for elsewhere, pp, names in stages if elsewhere == place]
    assert sorted(pp for pp, _ in lists) == list(range(engine.pp.world_size))
    counts = {name: sum(name in names for _, names in lists) for name in theirs}
    tied = {name for name, p in theirs.items() if sum(p is q for _, q in reference.named_parameters(remove_duplicate=False)) > 1}
    assert all(count == 1 or name in tied and count == 2 for name, count in counts.items()), counts


HEADS = ("classifier", "cls.", "score", "lm_head", "embed_out", "ln_f", "model.norm", "final_layer_norm")
FREEZE = {  # of four blocks stage 1 of 2 has the last two
    "nothing": lambda name: False,
    "embeddings": lambda name: any(word in name for word in ("wte", "wpe", "embed")),
    "blocks of stage 1": lambda name: any(f".{k}." in name for k in (2, 3)),
    "all but the head": lambda name: not any(word in name for word in HEADS),
}


def beside_one_process(kinds, *, with_loss_fn=True, tolerance=1e-10, frozen="nothing", config=(), steps=STEPS, **knobs):
    """Steps as in STEPS; every rank reads what users read."""
    config = BLOCKS | dict(config)
    loss_fn = own_loss if with_loss_fn else None
    for kind in kinds:
        model, whole = build(kind, seed=dist.get_rank(), **config), plain_norms(build(kind, **config))
        for name, p in itertools.chain(model.named_parameters(), whole.named_parameters()):
            p.requires_grad_(not FREEZE[frozen](name))
        reference = Reference(whole, two_groups, 0.5, lr=0.01, eps=1e-3)
        engine = Hybrid(model, two_groups(model), lr=0.01, eps=1e-3, max_norm=0.5, precision="fp32", bucket_mb=0.004, **knobs)
        rank, copies = engine.dp.rank, engine.dp.world_size
        assert engine.pp.world_size == knobs["pp"]

        def logits(inputs, engine=engine, reference=reference):
            with torch.no_grad():
                close(engine.eval()(**inputs).logits, reference.model.eval()(**inputs).logits, tolerance)
            engine.train()
            reference.model.train()

        try:
            for step, (samples, micro_batches, length) in enumerate(steps):
                batch, ends = batch_of(kind, samples * copies, step, length), [samples * r for r in range(copies + 1)]
                if step == 1 and copies > 1:
                    ends[-2] = ends[-1]
                mine = rows(batch, ends[rank], ends[rank + 1]) if ends[rank] < ends[rank + 1] else None
                expected = forward_of(reference.model, batch, loss_fn)
                expected.backward()
                loss = engine.forward_backward(mine, micro_batches, loss_fn)
                close(loss, expected.detach(), tolerance)
                for name, p in reference.model.named_parameters():
                    if p.requires_grad and step < 2:
                        close(engine.full_grad(name), torch.zeros_like(p) if p.grad is None else p.grad, tolerance)
                norm = reference.step()
                engine.step()
                close(engine.grad_norm, norm, tolerance)
                assert_same_on_all_ranks([loss, engine.grad_norm])
                assert norm > 0.5 or step or frozen == "all but the head", "clips at least once"
                assert_stages_equal(engine, reference.model, tolerance)
                if step == 0:  # and then goes on to train: nothing is left on its way
                    logits({k: v for k, v in batch.items() if k != "labels"})
            logits({k: v for k, v in batch.items() if k != "labels"})
            saved, expected = engine.state_dict(), reference.model.state_dict()
            if dist.get_rank() == 0:
                assert saved.keys() == expected.keys()
                for name, tensor in expected.items():
                    assert saved[name].dtype == tensor.dtype, name
                    close(saved[name], tensor, tolerance)
                build(kind, seed=9, **config).load_state_dict(saved, strict=True)
        except Exception as error:
            error.add_note(f"with {kind}, {knobs}, {copies} copies")
            raise


def several(*runs):
    """(kinds, knobs) in turn: starting ranks costs more than a run."""
    for kinds, knobs in runs:
        beside_one_process(kinds, **knobs)


# ---- 1. equal to one process -----------------------------------------------------------------------------------------------

FAMILIES = ["bert-classes", "gpt2", "llama", "neox"]
OTHERS = ["bert", "gpt2-classes", "llama-classes", "neox-classes"]  # the same families with the other head


def test_two_stages(pool):
    pool.run(2, several, (FAMILIES, dict(pp=2)), (["gpt2-classes", "llama-classes"], dict(pp=2, zero_stage=0)))


def test_two_chunks_on_each_of_two_ranks(pool):
    pool.run(2, several, (["bert-classes", "gpt2", "llama", "neox"], INTERLEAVED), (["gpt2"], INTERLEAVED | dict(zero_stage=0)))


def test_models_own_loss(pool):
    pool.run(2, beside_one_process, ["bert", "gpt2", "llama-classes"], pp=2, with_loss_fn=False, steps=STEPS[:2],
             tolerance=LOSS_IN_FP32)


def test_four_ranks(pool):
    """Also cases 65 and 69, where copies have their own micro-batches and one of them has none."""
    pool.run(4, several, (["gpt2", "bert-classes"], dict(pp=4)), (["gpt2", "llama"], dict(pp=2, tp=2)),
             (["gpt2", "neox"], dict(pp=2)), (["llama-classes"], dict(pp=2, zero_stage=0)), limit_s=100)


@pytest.mark.sweep
@pytest.mark.parametrize("kinds", [FAMILIES, OTHERS], ids=" ".join)
@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("ranks, knobs", [
    (2, dict(pp=2)), (4, dict(pp=4)), (4, dict(pp=2, tp=2)), (4, dict(pp=2)), (8, dict(pp=2, tp=2)), (8, dict(pp=4, tp=2)),
    (2, INTERLEAVED), (4, INTERLEAVED), (4, INTERLEAVED | dict(tp=2)), (8, INTERLEAVED | dict(tp=2)),
    (4, INTERLEAVED | dict(pp=4, config=dict(num_hidden_layers=9)))])
def test_sweep(pool, kinds, zero_stage, ranks, knobs):
    pool.run(ranks, beside_one_process, kinds, zero_stage=zero_stage, limit_s=300, **knobs)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks, knobs", [(2, INTERLEAVED), (4, dict(pp=4)), (4, dict(pp=2, tp=2))])
def test_other_families_sweep(pool, ranks, knobs):
    pool.run(ranks, beside_one_process, MORE + ["llama-mqa", "qwen3"], limit_s=300, **knobs)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks, knobs", [(2, INTERLEAVED), (4, dict(pp=4)), (4, dict(pp=2, tp=2)), (4, dict(pp=2))])
def test_models_own_loss_sweep(pool, ranks, knobs):
    pool.run(ranks, beside_one_process, FAMILIES + OTHERS, with_loss_fn=False, tolerance=LOSS_IN_FP32, limit_s=300, **knobs)


def test_case_67_blocks_that_stages_do_not_divide(pool):
    """5 on 2 and on 3 stages; 1 on 2 and 2 on 4, where stages are empty; 3 in four chunks of two ranks."""
    five, one, two, three = (dict(config=dict(num_hidden_layers=n)) for n in (5, 1, 2, 3))
    pool.run(2, several, (["gpt2"], five | dict(pp=2)), (["llama-classes", "gpt2"], one | dict(pp=2)),
             (["bert-classes"], three | INTERLEAVED))
    pool.run(3, several, (["bert-classes", "llama"], five | dict(pp=3)))
    pool.run(4, several, (["gpt2", "llama"], two | dict(pp=4)))


def test_frozen_parts(pool):
    """Without a gradient for the embeddings; through blocks that have none; not beyond the head."""
    cases = {"embeddings": ["gpt2", "llama"], "blocks of stage 1": ["gpt2", "bert-classes"], "all but the head": ["llama-classes"]}
    pool.run(2, several, *[(kinds, dict(pp=2, frozen=frozen, steps=STEPS[:2])) for frozen, kinds in cases.items()])


@pytest.mark.sweep
@pytest.mark.parametrize("frozen", [frozen for frozen in FREEZE if frozen != "nothing"])
@pytest.mark.parametrize("ranks, knobs", [(4, dict(pp=2, tp=2)), (4, dict(pp=2, zero_stage=0)), (4, dict(pp=4)), (2, INTERLEAVED)])
def test_frozen_sweep(pool, ranks, knobs, frozen):
    pool.run(ranks, beside_one_process, FAMILIES + OTHERS, frozen=frozen, limit_s=300, **knobs)


def several_passes():
    """What two calls find before one step is added up, weights that two stages share included; so it is with no_sync."""
    for hold_back in (False, True):
        model = build("gpt2")
        reference, engine = Reference(model), Hybrid(model, precision="fp32", pp=2, bucket_mb=0.004)
        copies, rank = engine.dp.world_size, engine.dp.rank
        for step in range(3):
            batch = batch_of("gpt2", 4 * copies, step)
            own_loss(reference.model(**batch), batch).backward()
            with engine.no_sync() if hold_back and step < 2 else contextlib.nullcontext():
                engine.forward_backward(rows(batch, 4 * rank, 4 * rank + 4), 2, own_loss)
        for name, p in reference.model.named_parameters():
            close(engine.full_grad(name), p.grad)


def test_several_passes_add_up(pool):
    pool.run(2, several_passes)
    pool.run(4, several_passes)


# ---- 2. weights that two stages use, norm and overflow -----------------------------------------------------------------------


def ones(kinds, **knobs):
    """Case 28: all gradients are 1, so the square of the norm is the number of the model's elements."""
    for kind, changes in kinds:
        engine = Hybrid(build(kind, **changes), precision="fp32", lr=0.0, bucket_mb=0.004, **knobs)
        numel = sum(p.numel() for p in build(kind, **changes).parameters())
        engine.forward_backward(batch_of(kind, 2, 0), 2, own_loss)
        for f in engine.fragments:
            f.grad.fill_(1.0)
        engine.step()
        close(engine.grad_norm, torch.tensor(numel, dtype=torch.float64).sqrt(), 1e-12)


def one_update(kind, changes, **knobs):
    """Case 68: the first update of Adam is lr, of a weight that is used twice, too; both stages' copies have the same bits."""
    engine = Hybrid(build(kind, **changes), precision="fp32", lr=0.01, bucket_mb=0.004, **knobs)
    weight = engine.module.get_output_embeddings().weight
    uses = engine.pp.rank in (0, engine.pp.world_size - 1)
    assert absent(weight) != uses
    before = weight.detach().clone()
    for step in range(3):
        engine.forward_backward(batch_of(kind, 2, engine.dp.rank), 2, own_loss)
        engine.step()
        engine.wait_for_weights()
        if step == 0 and uses:
            assert 0.0099 < (weight.detach() - before).abs().max() < 0.010001
            assert not torch.equal(weight, before)
        copies = [None] * dist.get_world_size()
        dist.all_gather_object(copies, (engine.tp.rank, uses, weight.detach().clone()))
        alike = [other for tp, has, other in copies if has and tp == engine.tp.rank]
        assert len(alike) == 2 * engine.dp.world_size and all(torch.equal(other, alike[0]) for other in alike)
        assert engine.optimizer.steps.unique().tolist() == [step + 1.0]
    saved = engine.state_dict()
    if dist.get_rank() == 0:
        words = [v for name, v in saved.items() if name.endswith(("wte.weight", "embed_tokens.weight", "lm_head.weight"))]
        assert len(words) == 2 and torch.equal(*words) and len(words[0]) == VOCAB
        build(kind, seed=3, **changes).load_state_dict(saved, strict=True)


def tied_weights(**knobs):
    tied = dict(tie_word_embeddings=True)
    ones([("gpt2", {}), ("llama", tied), ("gpt2", dict(tie_word_embeddings=False)), ("llama", {})], **knobs)
    one_update("gpt2", {}, **knobs)
    one_update("llama", tied, **knobs)
    beside_one_process(["llama"], config=tied, steps=STEPS[:2], **knobs)
    beside_one_process(["gpt2"], config=dict(tie_word_embeddings=False), steps=STEPS[:1], **knobs)


def test_cases_28_and_68_tied_weights(pool):
    pool.run(2, tied_weights, pp=2)
    pool.run(4, tied_weights, pp=2, tp=2)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks, knobs", [(2, INTERLEAVED), (4, dict(pp=4)), (4, dict(pp=2)), (4, dict(pp=2, zero_stage=0)),
                                          (8, dict(pp=2, tp=2)), (8, dict(pp=2, tp=2, zero_stage=0))])
def test_tied_weights_sweep(pool, ranks, knobs):
    pool.run(ranks, tied_weights, limit_s=200, **knobs)


def overflow_on_the_last_stage(**knobs):
    """Case 23: an inf where one stage alone can see it, also in the copy of a tied weight that the norm does not count. All skip,
    nothing changes, the scale is halved once."""
    model = build("gpt2", dtype=torch.float32, **BLOCKS)
    engine = Hybrid(model, precision="fp16", initial_scale=64.0, bucket_mb=0.004, lr=0.01, **knobs)
    batch = batch_of("gpt2", 4, engine.dp.rank)
    is_last = engine.pp.rank == engine.pp.world_size - 1
    for place in ("transformer.h.3.mlp.c_fc.weight", "transformer.ln_f.bias", "transformer.wte.weight"):
        before = engine.state_dict()
        engine.forward_backward(batch, 2)
        engine.step()
        assert not engine.skipped and engine.grad_norm.isfinite()
        assert not before or any(not torch.equal(v, before[k].to(v)) for k, v in engine.module.state_dict().items() if v.ndim == 1)
        kinds = ("master", "exp_avg", "exp_avg_sq")
        before = [getattr(f, kind).clone() for f in engine.fragments for kind in kinds]
        steps, scale, weights = engine.optimizer.steps.clone(), engine.scale, [p.clone() for p in engine.module.parameters()]
        engine.forward_backward(batch, 2)
        mine = [f for f in engine.fragments if f.name == place] if is_last else []
        if mine and engine.dp.rank == engine.tp.rank == 0:
            mine[0].grad.view(-1)[0] = torch.inf
        engine.step()
        assert engine.skipped and not engine.grad_norm.isfinite() and engine.scale == scale / 2, place
        after = [getattr(f, kind) for f in engine.fragments for kind in kinds]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert torch.equal(engine.optimizer.steps, steps)
        assert all(torch.equal(p, q) or p.isnan().all() for p, q in zip(engine.module.parameters(), weights, strict=True))
        assert_same_on_all_ranks([engine.scale, engine.grad_norm])


def test_case_23_overflow_on_the_last_stage(pool):
    pool.run(2, overflow_on_the_last_stage, pp=2)


@pytest.mark.sweep
@pytest.mark.parametrize("knobs", [dict(pp=4), dict(pp=2, zero_stage=0), dict(pp=2, tp=2), INTERLEAVED], ids=str)
def test_overflow_sweep(pool, knobs):
    pool.run(4, overflow_on_the_last_stage, **knobs)


# ---- 3. the order of tasks ---------------------------------------------------------------------------------------------------


def played(lists, stages, waits=None):
    """One turn for each task, which begins when its inputs are there: the turns that it takes, and when each task has ended. waits:
    so many gradients of a rank may be on their way down; for the oldest it waits until the rank below has begun to take it."""
    ranks, done, free, place = len(lists), {}, [0] * len(lists), [0] * len(lists)
    while any(place[r] < len(lists[r]) for r in range(ranks)):
        went_on = False
        for r in range(ranks):
            while place[r] < len(lists[r]):
                kind, stage, k = lists[r][place[r]]
                needs = [("F", stage - 1, k)] if kind == "F" else [("F", stage, k), ("B", stage + 1, k)]
                needs = [task for task in needs if 0 <= task[1] < stages]
                sent = [task for task in lists[r][: place[r]] if task[0] == "B" and task[1] > 0]
                if waits is not None and len(sent) > waits:  # the last task has sent its gradient, and then waited for this one
                    kind_, stage_, k_ = sent[-waits - 1]
                    needs.append((kind_, stage_ - 1, k_))
                if not all(task in done for task in needs):
                    break
                free[r] = max([free[r], *(done[task] for task in needs)]) + 1
                done[kind, stage, k] = free[r]
                place[r], went_on = place[r] + 1, True
        assert went_on, f"stuck before {[tasks[place[r]] for r, tasks in enumerate(lists) if place[r] < len(tasks)]}"
    return max(free, default=0), done


def in_flight(tasks):
    """The most (stage, micro-batch) that are between their forward and their backward."""
    now = most = 0
    for kind, _, _ in tasks:
        now += 1 if kind == "F" else -1
        most = max(most, now)
    return most


def test_schedules():
    """Equal times for all tasks. 1F1B takes M + P - 1 pairs of turns, of which P - 1 are idle; with chunks, a C-th as long, they
    are M * C + P - 1 where P divides M."""
    for ranks, micro_batches, chunks in itertools.product(range(1, 7), range(1, 10), range(1, 4)):
        lists, case = schedule(ranks, micro_batches, chunks), (ranks, micro_batches, chunks)
        assert len(lists) == ranks
        for rank, tasks in enumerate(lists):
            stages = range(rank, ranks * chunks, ranks)
            assert sorted(tasks) == sorted(itertools.product("BF", stages, range(micro_batches))), case
            if chunks == 1:
                assert in_flight(tasks) == min(micro_batches, ranks - rank), case
            else:  # what it runs ahead, and one more; by so much it is more than with one chunk
                assert in_flight(tasks) <= min(micro_batches * chunks, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1), case
        turns, _ = played(lists, ranks * chunks)
        if chunks == 1 or micro_batches % ranks == 0:
            assert turns == 2 * (micro_batches * chunks + ranks - 1), (case, turns)
        played(lists, ranks * chunks, waits=2 if chunks == 1 else 2 * ranks * chunks)  # as Pipeline.send_grad does


def test_the_timeline_that_is_drawn():
    """The picture in the section on pipelines, where idle turns before a rank's first task are blank."""
    lines, idle = timeline(schedule(3, 4))
    for rank, line in enumerate(lines):
        assert f"rank {rank}   {rank * '   '}{line.strip(' .')}  " in pathlib.Path(hybrid.__file__).read_text(), line
    assert idle == 2 / 6  # (P-1)/(M+P-1)


# ---- 4. bytes ----------------------------------------------------------------------------------------------------------------


def traffic_of(kind, samples, length, micro_batches, hidden=16, **knobs):
    """Of the first step, which has headers, and the second: what this rank sent along pp and along dp; and what it should."""
    model = build(kind, dtype=torch.float32, hidden_size=hidden, intermediate_size=hidden, max_position_embeddings=128, **BLOCKS)
    engine = Hybrid(model, precision="fp32", bucket_mb=0.004, **knobs)
    mine, found = batch_of(kind, samples, engine.dp.rank, length), []
    for _ in range(2):
        dist.barrier()
        before = sent_bytes()
        engine.forward_backward(mine, micro_batches, own_loss)
        engine.step()
        engine.wait_for_weights()
        dist.barrier()
        found.append((dict(engine.traffic), sent_bytes() - before))
    chunks = knobs.get("chunks", 1)
    last, own = engine.pp.world_size * chunks - 1, range(engine.pp.rank, engine.pp.world_size * chunks, engine.pp.world_size)
    up, down = sum(stage < last for stage in own), sum(stage > 0 for stage in own)
    buckets = [(b.master.numel() * b.master.element_size(), bool(b.sums)) for b in engine.buckets]
    return found, (up + down) * samples * length * hidden * 4, up, buckets, engine.dp.world_size


def bytes_sent(**knobs):
    """Every micro-batch's hidden states once over each border, and their gradients once back, whatever tp is; a header of 16
    numbers for each shape of a micro-batch, the first time alone. Along dp nothing depends on how many micro-batches there are."""
    for kind, samples, micro_batches, shapes in (("gpt2", 4, 4, 1), ("gpt2", 5, 3, 2), ("llama", 4, 1, 1)):
        (first, second), formula, up, buckets, copies = traffic_of(kind, samples, 6, micro_batches, **knobs)
        assert second[0].get("pp send", 0) == formula, (second, formula)
        assert first[0].get("pp send", 0) == formula + 128 * up * shapes, (first, formula)
        sums = {what: n for what, n in second[0].items() if what.startswith("dp") and "all_reduce" not in what}
        if copies > 1:  # slices of all buckets but the own: reduced once, gathered once
            assert sum(sums.values()) == 2 * (copies - 1) * sum(n for n, _ in buckets), (sums, buckets)
        else:
            assert not any(sums.values())
        shared = sum(n for n, is_shared in buckets if is_shared) if kind == "gpt2" and knobs.get("tp", 1) == 1 else None
        if shared is not None and knobs["pp"] == 2:  # all-reduces of 2 stages send 2 * 1/2 of it, and of 8 bytes of loss
            assert shared > 0 and second[0]["pp all_reduce"] == shared + 8, (second, shared)
        if knobs["pp"] == 2 and kind == "llama":
            assert second[0]["pp all_reduce"] == 8


def all_bytes_sent(*cases):
    for knobs in cases:
        bytes_sent(**knobs)


def test_bytes_along_pp(pool):
    pool.run(2, all_bytes_sent, INTERLEAVED)
    pool.run(4, all_bytes_sent, dict(pp=2, tp=2))


@pytest.mark.sweep
def test_bytes_along_pp_sweep(pool):
    pool.run(2, all_bytes_sent, dict(pp=2))
    pool.run(4, all_bytes_sent, dict(pp=2), dict(pp=4))


@pytest.mark.parametrize("knobs", in_sweep([dict(pp=2), INTERLEAVED], lambda knobs: knobs is INTERLEAVED), ids=str)
def test_bytes_on_the_wire(pool, knobs):
    """By the sockets, less what a batch of two tokens sends: within 1 %, frames and acknowledgements included."""
    def of(length):
        results = pool.run(2, traffic_of, "llama", 8, length, 4, 256, **knobs)
        return mean_over_ranks([(found[1][1], formula, found[1][0]["pp send"]) for found, formula, *_ in results])
    empty, small, _ = of(2)
    sent, formula, counted = of(128)
    assert counted == formula
    assert abs((sent - empty) / (formula - small) - 1) < 0.01, (sent, empty, formula, small)


def gradients_that_do_not_travel():
    """Where nothing before a stage is trained, nothing is sent back."""
    for kind, frozen in (("llama-classes", "all but the head"), ("llama-classes", "embeddings")):
        model = build(kind, **BLOCKS)
        for name, p in model.named_parameters():
            p.requires_grad_(not FREEZE[frozen](name))
        engine = Hybrid(model, precision="fp32", pp=2)
        for _ in range(2):
            engine.forward_backward(batch_of(kind, 4, 0), 2, own_loss)
            engine.step()
        expected = 4 * 7 * 16 * 8 if engine.pp.rank == 0 or frozen == "embeddings" else 0
        assert engine.traffic.get("pp send", 0) == expected, (engine.traffic, frozen)


def test_no_gradient_is_sent_to_what_is_frozen(pool):
    pool.run(2, gradients_that_do_not_travel)


# ---- 5. memory ---------------------------------------------------------------------------------------------------------------


def own_weights(kind, **knobs):
    """Other stages' weights take no memory: in fp32 4, 4 and 8 bytes for each parameter of the own ones, in bf16 2, 2 and 12."""
    changes = dict(hidden_size=64, intermediate_size=256, vocab_size=500, max_position_embeddings=16, **BLOCKS)
    for precision, width, state in (("fp32", 4, 8), ("bf16", 2, 12)):
        plain, model = (build(kind, dtype=torch.float32, **changes) for _ in range(2))
        engine = Hybrid(model, precision=precision, bucket_mb=0.25, **knobs)
        pp, chunks = engine.pp, knobs.get("chunks", 1)
        stages, blocks = pp.world_size * chunks, BLOCKS["num_hidden_layers"]
        own = [k for k in range(blocks) if k * stages // blocks % pp.world_size == pp.rank]
        names = [name for name, _ in plain.named_parameters() if any(f".{k}." in name for k in own)]
        ends = dict(gpt2=(("wte", "wpe"), ("wte", "ln_f")), llama=(("embed_tokens",), ("norm.weight", "lm_head")))[kind]
        for is_own, words in zip((pp.rank == 0, pp.rank == pp.world_size - 1), ends):
            names += [n for n, _ in plain.named_parameters() if is_own and "layers." not in n and any(w in n for w in words)]
        numel = sum(p.numel() for name, p in plain.named_parameters() if name in names)
        engine.forward_backward(batch_of(kind, 2, 0), 2)
        held = {what: sum(places.values()) for what, places in engine.memory().items()}
        engine.step()
        for what, n_bytes in dict(parameters=width, gradients=width, optimizer=state).items():
            assert abs(held[what] - n_bytes * numel) <= 0.01 * n_bytes * numel, (kind, precision, what, held, numel)
        assert numel < 0.8 * sum(p.numel() for p in plain.parameters())


def activations(**knobs):
    """What autograd keeps, while 8 micro-batches go through: that of P - p of them on rank p of P, and not of 8. Bytes of all live
    storages say the same, messages under way and what a block computes with included: less than half of one more."""
    def most(micro_batches):
        torch.manual_seed(0)
        model = Stack(4 * knobs["pp"]).float()
        engine = Hybrid(model, precision="fp32", plan=PLAN, **knobs)
        x, loss_fn = torch.ones(200 * micro_batches, 7), lambda out, _: out.square().mean()
        engine.forward_backward(x, micro_batches, loss_fn)  # and now headers are known, and .grad is there
        engine.step()
        kept, counts = weakref.WeakSet(), []

        class Kept:
            def __init__(self, x):
                self.x = x
                kept.add(self)
                counts.append(len(kept))

        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda k: k.x):
            engine.forward_backward(x, micro_batches, loss_fn)
        assert not kept and counts
        known = [t for b in engine.buckets for t in (b.weights, b.grads, b.master)]
        with LivePeak([x, *model.parameters(), *known]) as live:
            engine.forward_backward(x, micro_batches, loss_fn)
        return max(counts), live.peak

    (one, one_bytes), (eight, eight_bytes) = most(1), most(8)
    rank, ranks, chunks = dist.get_rank(), knobs["pp"], knobs.get("chunks", 1)
    if chunks == 1:
        alive = ranks - rank
        assert eight == alive * one, (eight, one, alive)
        assert eight_bytes < (alive + 0.5) * one_bytes, (eight_bytes, one_bytes, alive)
    else:  # of a micro-batch's stages on this rank, not all of one size, so many are alive at once
        alive = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
        assert eight <= -(-alive // chunks) * one, (eight, one, alive)


def memory_and_activations(*cases):
    for knobs in cases:
        for kind in ("gpt2", "llama"):
            own_weights(kind, **knobs)
        activations(**knobs)


def test_other_stages_take_no_memory(pool):
    pool.run(2, memory_and_activations, dict(pp=2), INTERLEAVED)
    pool.run(4, memory_and_activations, dict(pp=4))


# ---- 6. plain modules, and what is refused -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, beside=None):
        y = self.down(torch.tanh(self.up(x)))
        return x + (y if beside is None else y * beside)


class Stack(nn.Module):
    """Blocks in a list, and what a pipeline cannot take: `kind`."""

    def __init__(self, blocks=4, kind=None):
        super().__init__()
        self.enter = nn.Linear(7, 6)
        if kind == "norm before":
            self.norm = nn.LayerNorm(6)
        if kind == "scale":
            self.scale = nn.Parameter(torch.tensor(1.5))
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.leave = nn.Linear(6, 3)
        self.kind, self.skip = kind, ()
        if kind == "two lists":
            self.others = nn.ModuleList(Block() for _ in range(blocks))
        if kind == "statistics":
            self.leave = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, x):
        x = self.enter(x)
        beside = x.mean() if self.kind == "beside" else torch.ones(()) if self.kind == "beside, no gradient" else None
        for k, block in enumerate(self.layers):
            if k not in self.skip:
                x = block(x, beside)
        x = self.leave(self.norm(x) if self.kind == "norm before" else x)
        return x * self.scale if self.kind == "scale" else x


PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def squares(output, batch):
    return output.square().mean()


def plain_modules(**knobs):
    """A plan of the user's own; styles say nothing where tp is 1."""
    for kind in (None, "beside, no gradient"):
        torch.manual_seed(0)
        model = Stack(5, kind).double()
        reference = Reference(model, None, lr=0.01, eps=1e-3)
        engine = Hybrid(model, precision="fp32", plan=PLAN, lr=0.01, eps=1e-3, **knobs)
        for step in range(2):
            x = random(5, 7, seed=step)
            loss = squares(reference.model(x), x)
            loss.backward()
            close(engine.forward_backward(x, 3, squares), loss.detach())
            for name, p in reference.model.named_parameters():
                close(engine.full_grad(name), p.grad)
            reference.step()
            engine.step()
            assert_stages_equal(engine, reference.model)
        with torch.no_grad():
            close(engine(x), reference.model(x))


def test_a_plan_of_ones_own(pool):
    pool.run(2, plain_modules, pp=2)
    pool.run(4, plain_modules, pp=2, tp=2)


def refusals():
    def refused(kind=None, model=None, words=(), error=ValueError, **arguments):
        model = Stack(4, kind) if model is None else model
        classes, before = [type(m) for m in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}
        with raises(error, *words):
            Hybrid(model, **{"precision": "fp32", "pp": 2, "plan": PLAN, **arguments})
        assert [type(m) for m in model.modules()] == classes, "a refused engine has changed the model"
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    import transformers as hf
    refused(words=("Stack", "no plan", "plan="), plan=None)
    refused(model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), words=("one list of blocks", "Sequential", "none"),
            plan={"0": "colwise"})
    refused("two lists", words=("one list of blocks", "layers", "others"), plan=PLAN | {"others.*.up": "colwise"})
    refused("statistics", words=("running statistics", "leave.0.running_mean", "pp"))
    refused(words=("schedule", "1f1b", "interleaved", "'gpipe'"), schedule="gpipe")
    refused(words=("chunks", "2 or more", "1"), schedule="interleaved", chunks=1)
    refused(words=("chunks", "2.5"), schedule="interleaved", chunks=2.5)
    refused(words=("interleaved", "pp=2 or more"), schedule="interleaved", pp=1)
    refused(words=("2 ranks", "pp=3"), pp=3)
    refused(words=("2 ranks", "pp=2", "tp=2"), tp=2)
    refused(words=("pp", "0"), pp=0)
    refused(words=("settings",), bucket_mb=1.0 + dist.get_rank())
    sizes = dict(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
    refused(model=hf.T5ForConditionalGeneration(hf.T5Config(**sizes)), words=("T5", "no plan"), plan=None)
    plan = {f"{side}.block.*.layer.*.SelfAttention.q": "colwise" for side in ("encoder", "decoder")}
    refused(model=hf.T5ForConditionalGeneration(hf.T5Config(**sizes)), plan=plan,
            words=("one list of blocks", "encoder.block", "decoder.block"))
    experts = hf.Qwen3MoeConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                intermediate_size=24, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=4)
    refused(model=hf.Qwen3MoeForCausalLM(experts), words=("qwen3_moe", "moe_tp_experts"), plan=None)


def calls():
    """Calls that cannot be right fail on all ranks alike, and the engine goes on."""
    torch.manual_seed(0)
    model = Stack().double()
    reference, engine = Reference(model, None, lr=0.01), Hybrid(model, precision="fp32", pp=2, plan=PLAN, lr=0.01)
    x = random(4, 7, seed=0)

    def step():
        close(engine.forward_backward(x, 2, squares), reference.backward((x,), squares))
        reference.step()
        engine.step()
        assert_stages_equal(engine, reference.model)

    step()
    with raises(RuntimeError, "forward_backward(batch)", "no_grad"):
        engine(x)
    with raises(RuntimeError, "forward_backward(batch)"):
        engine.backward(torch.ones((), requires_grad=True))
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context, raises(RuntimeError, "divided into stages", "forward_backward(batch)"):
            engine.module(x)
    step()

    tokens = batch_of("gpt2", 2, 0)
    other = Hybrid(build("gpt2"), precision="fp32", pp=2)
    for option in ("output_hidden_states", "output_attentions", "use_cache"):
        with torch.no_grad(), raises(ValueError, option, "pp=1"):
            other(input_ids=tokens["input_ids"], **{option: True})
        with raises(ValueError, option, "pp=1"):
            other.forward_backward(tokens | {option: True}, 2)
    close(other.forward_backward(tokens, 2, own_loss), own_loss(build("gpt2")(**tokens), tokens))

    def heavy(piece):
        raise KeyError("no weight")

    with raises(KeyError, "no weight"):
        engine.forward_backward(x, 2, squares, weight=heavy)
    with raises(ValueError, "dim 0"):
        engine.forward_backward((x, x[:1]), 2, squares)
    step()
    # Rank 1 fails in the loss of the first micro-batch, rank 0 in the second's forward, before it has sent anything of it. Rank 1
    # comes late, and finds what it has been sent.
    count = []

    def fail(*_):
        count.append(1)
        if engine.pp.rank == 0 and len(count) < 2:
            return
        raise KeyError("not this batch")

    hook = engine.module.register_forward_pre_hook(fail) if engine.pp.rank == 0 else contextlib.nullcontext()
    time.sleep(0.3 * engine.pp.rank)
    with raises(KeyError, "not this batch"):
        engine.forward_backward(x, 2, squares if engine.pp.rank == 0 else lambda output, batch: fail())
    if engine.pp.rank == 0:
        hook.remove()
    step()


def models_that_do_not_fit():
    """Of a stage alone, for the others would wait: what the first rank that notices says."""
    def stage(kind, number, skip=(), words=()):
        torch.manual_seed(0)
        model = Stack(4, kind).double()
        engine = Hybrid(model, precision="fp32", pp=2, plan=PLAN)
        model.skip, x = skip, random(4, 7, seed=0)
        if engine.pp.rank == number:
            with raises(RuntimeError, *words):
                output = engine.pipeline.forward(number, random(4, 6, seed=1) if number else None, lambda: engine._forward(x))
                engine._propagate(output.sum(), None)

    stage("beside", 0, words=("Block", "1 tensors", "pp=1"))
    stage("norm before", 1, words=("norm is on stage 0", "stage 1 of 2", "pp=1"))
    stage(None, 1, skip=(1,), words=("did not pass block 1", "stage 1"))
    stage(None, 0, skip=(1, 2, 3), words=("leave", "stage 0"))  # the head, which the last stage has
    stage("scale", 1, words=("scale", "another stage", "pp=1"))


def errors():
    refusals()
    calls()
    models_that_do_not_fit()


def test_case_70_and_what_is_refused(pool):
    pool.run(2, errors)


# ---- 7. dropout, activation checkpointing, precision ---------------------------------------------------------------------------

DROPS = dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)


def recomputed(**knobs):
    """Gradients with activation checkpointing, bit for bit those without, and the same random numbers after it."""
    found = {}
    for recompute in (None, False, True):
        model = build("gpt2", **BLOCKS, **DROPS)
        if recompute is not None:
            model.gradient_checkpointing_enable({"use_reentrant": recompute})
        engine = Hybrid(model, precision="fp32", lr=0.01, eps=1e-3, **knobs)
        torch.manual_seed(5)
        engine.train()
        grads = []
        for step in range(2):
            engine.forward_backward(batch_of("gpt2", 4, step), 2, own_loss)
            grads += [engine.full_grad(name) for name in engine.names]
            engine.step()
        found[recompute] = [*grads, torch.get_rng_state()]
    for recompute in (False, True):
        for k, (plain, again) in enumerate(zip(found[None], found[recompute], strict=True)):
            assert torch.equal(plain, again), (recompute, [*engine.names, *engine.names, "random numbers"][k])
    model = build("gpt2", **BLOCKS)
    engine = Hybrid(model, precision="fp32", **knobs)
    engine.forward_backward(batch_of("gpt2", 4, 0), 2, own_loss)
    assert not torch.equal(engine.full_grad(engine.names[0]), found[None][0]), "nothing was dropped"


def masks(**knobs):
    """Ranks have the same random numbers, outside of the blocks too, and yet no two blocks or micro-batches drop alike; those that
    share a block drop the same of what they have whole."""
    model = build("gpt2", **BLOCKS, resid_pdrop=0.5)
    torch.manual_seed(5)
    engine, found = Hybrid(model, precision="fp32", **knobs), []
    for block in model.transformer.h:
        block.mlp.dropout.register_forward_hook(lambda m, given, out: found.append(out == 0))
    engine.forward_backward(batch_of("gpt2", 4, 0), 2, own_loss)
    engine.step()
    state = torch.get_rng_state()
    assert_same_on_all_ranks([state])
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (engine.tp.rank, found))
    assert len(found) == 2 * BLOCKS["num_hidden_layers"] // engine.pp.world_size
    assert all(0.3 < mask.float().mean() < 0.7 for mask in found)
    for tp in range(engine.tp.world_size):
        everywhere = [mask for rank, own in everyone if rank == tp for mask in own]
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(everywhere, 2))
        assert all(map(torch.equal, everywhere, [mask for rank, own in everyone if rank == 0 for mask in own]))
    with torch.no_grad():
        engine.eval()(input_ids=batch_of("gpt2", 4, 0)["input_ids"])
    assert torch.equal(torch.get_rng_state(), state)


def half_gradients(kind):
    """As in test_hybrid.py: below 2^-5, or twice what one process in bf16 loses."""
    model, plain, half = (build(kind, dtype=torch.float32, **BLOCKS) for _ in range(3))
    half.bfloat16()
    engine = Hybrid(model, precision="bf16", pp=2)
    batch = batch_of(kind, 4, 0)
    for m in (plain, half):
        own_loss(m(**batch), batch).backward()
    engine.forward_backward(batch, 2, own_loss)
    for (name, p), q in zip(plain.named_parameters(), half.parameters(), strict=True):
        if "key.bias" not in name:  # softmax does not see it: the true gradient is 0
            bound = 2 * (q.grad.float() - p.grad).norm() / p.grad.norm()
            error = (engine.full_grad(name) - p.grad).norm() / p.grad.norm()
            assert error < max(2**-5, bound), (kind, name, error, bound)


def dropout_and_precision():
    for knobs in (dict(pp=2), INTERLEAVED):
        masks(**knobs)
        recomputed(**knobs)
    half_gradients("bert-classes")
    half_gradients("gpt2")


def test_dropout_under_activation_checkpointing_and_bf16(pool):
    pool.run(2, dropout_and_precision)
    pool.run(4, masks, pp=2, tp=2)


@pytest.mark.sweep
def test_dropout_under_activation_checkpointing_sweep(pool):
    pool.run(4, recomputed, pp=2, tp=2)
    pool.run(4, recomputed, pp=4)


# ---- 8. checkpoints, engines that follow ---------------------------------------------------------------------------------------


def go_on(name, directory, start, steps, **knobs):
    """As in test_hybrid.py: steps of a global batch of 12, from a checkpoint; the model begins with other weights."""
    model = build("gpt2", seed=10 + start if start else 0)
    model = model if name == "hybrid" else plain_norms(model)
    for key, p in model.named_parameters():
        p.requires_grad_(key not in FROZEN_HERE)
    engine = build_engine(name, model, two_groups(model), lr=0.01, eps=1e-3, max_norm=0.5, precision="fp32", **knobs)
    if start:
        assert engine.load(directory) == {"step": start}
    copies = getattr(engine, "dp", None)
    rank, ranks = (copies.rank, copies.world_size) if copies else (dist.get_rank(), dist.get_world_size())
    for step in range(start, start + steps):
        batch = batch_of("gpt2", 12, step)
        engine.forward_backward(rows(batch, 12 * rank // ranks, 12 * (rank + 1) // ranks), 2, own_loss)
        engine.step()
    engine.save(directory, step=start + steps)
    return engine.state_dict()


FROZEN_HERE = {"transformer.h.0.ln_1.weight", "transformer.h.1.attn.c_attn.weight", "transformer.ln_f.bias"}  # each on one stage
CHAINS = {"tp and pp first": [("hybrid", 4, dict(tp=2, pp=2)), ("zero2", 2, {}), ("hybrid", 2, dict(pp=2)), ("ddp", 1, {})],
          "fsdp first": [("fsdp", 2, {}), ("hybrid", 4, dict(pp=2)), ("hybrid", 2, INTERLEAVED), ("gemini", 2, {})]}


@pytest.mark.parametrize("chain", in_sweep(CHAINS, lambda chain: chain != "tp and pp first"))
def test_case_39_chain_of_strategies(pool, tmp_path, chain):
    """Each takes a step and hands on, frozen parameters, too; after each, equal to one process that was never interrupted."""
    whole = plain_norms(build("gpt2"))
    for key, p in whole.named_parameters():
        p.requires_grad_(key not in FROZEN_HERE)
    reference = Reference(whole, two_groups, 0.5, lr=0.01, eps=1e-3)
    for step, (name, ranks, knobs) in enumerate(CHAINS[chain]):
        batch = batch_of("gpt2", 12, step)
        own_loss(reference.model(**batch), batch).backward()
        reference.step()
        saved = pool.run(ranks, go_on, name, f"{tmp_path}/run", step, 1, **knobs)[0]
        expected = reference.model.state_dict()
        assert saved.keys() == expected.keys()
        for key, tensor in expected.items():
            close(saved[key], tensor)


def resumed_on_stages(directory):
    second, engine_of = resumed(directory, BLOCKS, pp=2)
    # load_state_dict: rank 0's alone, of which each stage takes what is its own
    third, whole = engine_of(8), second.state_dict()
    third.load_state_dict(whole if dist.get_rank() == 0 else {})
    loaded = third.state_dict()
    assert loaded.keys() == whole.keys() and all(torch.equal(loaded[k], v) for k, v in whole.items())
    inputs = dict(input_ids=batch_of("gpt2", 2, 0)["input_ids"])
    with torch.no_grad():
        assert torch.equal(third.eval()(**inputs).logits, second.eval()(**inputs).logits)


def test_resumed_bit_for_bit(pool, tmp_path):
    pool.run(2, resumed_on_stages, f"{tmp_path}/run")


def taken_over(*settings):
    """A new engine on the same model: whole weights are given back, as precise as the masters, and the model runs as before."""
    for kind, precision in (("gpt2", "fp32"), ("llama", "bf16")):
        model = build(kind, dtype=torch.float32, **BLOCKS)
        classes, use_cache = [type(m) for m in model.modules()], model.config.use_cache
        batch, first, saved = batch_of(kind, 4, 0), None, None
        for knobs in settings:
            engine = Hybrid(model, precision=precision, lr=0.01, **knobs)
            found = engine.state_dict()
            assert saved is None or found.keys() == saved.keys() and all(torch.equal(v, saved[k]) for k, v in found.items())
            if first is not None:
                with raises(RuntimeError, "another engine has taken this model over"):
                    first._begin_backward()
            before = engine.state_dict()
            engine.forward_backward(batch, 2)
            engine.step()
            first, saved = engine, engine.state_dict()
            assert dist.get_rank() > 0 or any(not torch.equal(v, before[k]) for k, v in saved.items())
        engine._let_go()
        assert [type(m) for m in model.modules()] == classes and model.config.use_cache == use_cache
        plain = build(kind, seed=3, dtype=torch.float32, **BLOCKS)
        plain.load_state_dict(model.state_dict())
        with torch.no_grad():
            logits = model.eval()(input_ids=batch["input_ids"]).logits
            assert torch.equal(logits, plain.eval()(input_ids=batch["input_ids"]).logits)
        assert_same_on_all_ranks([logits])
        copy.deepcopy(model)


def test_another_engine_takes_over(pool):
    pool.run(2, taken_over, dict(pp=2), dict(pp=2), INTERLEAVED, dict(pp=1))
    pool.run(4, taken_over, dict(pp=4), dict(pp=2), dict(pp=2, tp=2))
