"""What plans that were never run take, beside what their profile says; and the pipeline beside its bound.

SmolLM2-135M-Instruct, 16 prompts of 64 tokens (a third of them padded), 16 new ones, float32, groups
of 64, two ranks on a core each over loopback, the second held to AVX2. Plans are drawn: order, split,
a width of 3, 4, 8 or 16 bits for every layer, and both micro-batches. Memory is the ranks' own, with
glibc told to give back what is freed. The pipeline answers 32 prompts of 128 tokens with 32 new ones.
"""

import re
import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch

from llmpq.config import ModelSpec, Quality, Workload
from llmpq.data import smollm2
from llmpq.planner.candidates import Candidates
from llmpq.planner.plan import Plan, Stage
from llmpq.planner.problem import batch_s
from llmpq.profiler.layer_times import measure_device
from llmpq.profiler.links import measure_links
from llmpq.profiler.profile import Profile
from llmpq.runtime.loader import load, load_stage
from llmpq.runtime.pipeline import Pipeline
from llmpq.runtime.stage import Batch, StageWorker
from llmpq.simulator import simulate
from shared.claims import Claim
from shared.comms import Group, RankPool, barrier
from shared.comms.handicap import handicap

BITS, GROUP = (3, 4, 8, 16), 64
WORK = Workload(num_prompts=16, prompt_tokens=64, new_tokens=16)
PLANS, TURNS = 12, 3
PIPELINED = Workload(num_prompts=32, prompt_tokens=128, new_tokens=32)
PIPELINED_TURNS = 2
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
COMMAND = "hatch run bench llmpq -k prediction"
PEERS = [
    {
        "peer": "the ring bound",
        "setting": "batch_s of the stages' seconds, each measured alone while the other rank rests",
        "why": "no schedule of the same micro-batches ends before its slowest stage",
    },
    {
        "peer": "the same stages in turn",
        "setting": "one micro-batch of all prompts in both phases",
        "why": "the fewest steps: what layers spread over devices do without micro-batches",
    },
]


def prompts(work=WORK):
    torch.manual_seed(0)
    ids = torch.randint(3, 40000, (work.num_prompts, work.prompt_tokens))
    mask = torch.ones_like(ids)
    mask[::3, : work.prompt_tokens // 4] = 0
    return ids, mask


def profiled(folder):
    rank = Group.world().rank
    found = measure_device(
        folder, kind=f"rank{rank}", bits=BITS, group_size=GROUP, batches=(1, 2, 4, 8, 16),
        prompt_tokens=WORK.prompt_tokens, new_tokens=WORK.new_tokens, limit_s=60.0,
    )  # fmt: skip
    return found, measure_links(Group.world())


def resident(key):
    text = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"{key}:\s+(\d+)", text)
    return int(kilobytes) * 1024


def ran(plan, folder, turns, work=WORK):
    """Tokens, seconds and stages' seconds of each turn, bytes of loading and at most, bytes read."""
    ids, mask = prompts(work)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    taken = []
    with Pipeline(plan, folder) as pipe:
        loading = resident("VmHWM") - before
        for _ in range(turns):
            barrier(Group.world())
            begun = time.perf_counter()
            tokens = pipe.generate(ids, mask, max_new_tokens=work.new_tokens)
            taken.append((time.perf_counter() - begun, pipe.stage_s))
        most, read = resident("VmHWM") - before, pipe.read_bytes
    return tokens, taken, loading, most, read


def make_plan(order, cut, bits, prefill, decode, forms):
    stages = Stage(rank=order[0], layers=(0, cut)), Stage(rank=order[1], layers=(cut, 30))
    return Plan(
        stages=stages, bits=bits, group_size=GROUP, prefill_size=prefill, decode_size=decode,
        forms=forms,
    )  # fmt: skip


def draw_plan(draw, forms):
    decode = int(draw.choice([4, 8, 16]))
    prefill = int(draw.choice([size for size in (1, 2, 4, 8, 16) if decode % size == 0]))
    bits = tuple(int(width) for width in draw.choice(BITS, 30))
    order = [0, 1] if draw.random() < 0.5 else [1, 0]
    return make_plan(order, int(draw.integers(8, 23)), bits, prefill, decode, forms)


def problem_of(plan, profile, folder):
    candidates = Candidates(
        model=ModelSpec.from_hf(folder), costs=profile, noise=np.zeros((30, len(profile.bits))),
        workload=WORK, quality=Quality(), bits=profile.bits, group_size=GROUP, dtype=plan.dtype,
    )  # fmt: skip
    order, sizes = [stage.rank for stage in plan.stages], (plan.prefill_size, plan.decode_size)
    bounds = [0, *(stage.layers[1] for stage in plan.stages)]
    choice = [profile.bits.index(width) for width in plan.bits]
    return candidates.problem(order, sizes), bounds, choice


def counts(plan, work=WORK):
    return {
        "num_prefill": work.num_prompts // plan.prefill_size,
        "num_decode": work.num_prompts // plan.decode_size,
        "new_tokens": work.new_tokens,
    }


def mean_stages(found):
    """A rank's mean seconds of a prefill and of a token, its head's added."""
    parts = found.prefill, found.head_prefill, found.decode, found.head_decode
    means = [float(np.mean(part)) if part else 0.0 for part in parts]
    return means[0] + means[1], means[2] + means[3]


@pytest.fixture(scope="module")
def folder():
    return smollm2()


@pytest.fixture(scope="module")
def unlike():
    words = [handicap(cores=[0]), handicap(cores=[1], isa="AVX2")]
    with RankPool(2, prefix=words, env=GLIBC) as pool:
        yield pool


def claim(record_claim, name, values, limit, *, correct, detail, unit="%", of=np.mean):
    record_claim(
        Claim(
            name=name, unit=unit, ours=float(of(values)), baseline=limit,
            baseline_name="the aim", higher_is_better=False, correct=correct, detail=detail,
            source=COMMAND,
        ),
        aim=1.0,
        spread=(limit / max(*values, 1e-9), limit / max(min(values), 1e-9)),
    )  # fmt: skip


def bench_prediction_of_plans_never_run(benchmark, record_claim, folder, unlike):
    found = unlike.run(profiled, folder).results
    enough = dict.fromkeys(range(2), 10**12)
    profile = Profile(devices=tuple(one for one, _ in found), memory=enough, links=found[0][1])
    draw = np.random.default_rng(1)
    plans = [draw_plan(draw, profile.forms) for _ in range(PLANS)]
    runs = []

    def turns():
        unlike.run(ran, plans[0], folder, 1)  # libraries' own memory
        runs.extend(unlike.run(ran, plan, folder, TURNS).results for plan in plans)

    benchmark.pedantic(turns, rounds=1)
    times, replays, memory, loading, reads = [], [], [], [], []
    phases = {(phase, rank): [] for phase in ("prefill", "decode") for rank in range(2)}
    for plan, results in zip(plans, runs, strict=True):
        problem, bounds, choice = problem_of(plan, profile, folder)
        measured_s = median(seconds for seconds, _ in results[0][1])
        times.append(100 * abs(problem.seconds(bounds, choice) / measured_s - 1))
        expected_s = problem.stage_s(bounds, choice)
        spans = []
        for turn in range(TURNS):
            stages = [mean_stages(results[stage.rank][1][turn][1]) for stage in plan.stages]
            prefill_s, decode_s = zip(*stages, strict=True)
            spans.append(
                simulate(
                    prefill_s, decode_s, **counts(plan),
                    prefill_send_s=problem.prefill_send_s[[0, 1], [1, 0]].tolist(),
                    decode_send_s=problem.decode_send_s[[0, 1], [1, 0]].tolist(),
                ).makespan_s
                / results[0][1][turn][0]
            )  # fmt: skip
        replays.append(100 * abs(median(spans) - 1))
        temporary = enough[0] - problem.memory_bytes
        held = problem.used_bytes(bounds, choice)
        layer = 2 * ModelSpec.from_hf(folder).layer_bytes(16, None)  # float32
        for place, stage in enumerate(plan.stages):
            _, taken, peak, most, read = results[stage.rank]
            stage_s = np.median([mean_stages(found) for _, found in taken], axis=0)
            for number, phase in enumerate(("prefill", "decode")):
                phases[phase, stage.rank].append(expected_s[number][place] / stage_s[number])
            memory.append(100 * abs((held[place] + temporary[place]) / most - 1))
            print(
                f"{plan.prefill_size}/{plan.decode_size} rank {stage.rank}, stage {place}: layers and "
                f"cache {held[place] / 1e6:.1f} MB, temporaries {temporary[place] / 1e6:.1f} MB, "
                f"measured {most / 1e6:.1f} MB"
            )
            low, high = stage.layers
            own = (high - low) * layer + (place == 0) * problem.ends_bytes
            reads.append(read / own)
            weights = sum(problem.weight_bytes[at, choice[at]] for at in range(low, high))
            loading.append(peak / (weights + (place == 0) * problem.ends_bytes + layer))
    shape = (WORK.num_prompts, WORK.new_tokens)
    right = all(
        tuple(results[0][0].shape) == shape and starts_as_alone(plan, folder, results[0][0])
        for plan, results in zip(plans, runs, strict=True)
    )
    claim(
        record_claim, f"seconds of {PLANS} plans never run, from the profile: mean error", times, 8.0,
        correct=bool(right and max(times) <= 15),
        detail=f"largest {max(times):.1f} %, at most 15; seconds of a stage, predicted over measured: "
        + ", ".join(
            f"{phase} on rank {rank} {min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}"
            for (phase, rank), ratios in phases.items()
        ),
    )  # fmt: skip
    claim(
        record_claim, "the same plans, measured stages replayed: mean error", replays, 5.0,
        correct=right, detail=f"largest {max(replays):.1f} %",
    )  # fmt: skip
    claim(
        record_claim, "most memory of each rank: mean error of the planner's bytes", memory, 2.0,
        correct=right, detail=f"largest {max(memory):.1f} %, median {median(memory):.1f} %; weights, cache and "
        "temporaries",
    )  # fmt: skip
    claim(
        record_claim, "bytes that a stage reads over those of its tensors, the worst stage", reads,
        1.02, correct=bool(min(reads) > 0.99), detail=f"{min(reads):.4f}-{max(reads):.4f}",
        unit="x", of=max,
    )  # fmt: skip
    claim(
        record_claim, "most memory while loading over stage and one layer, the worst stage", loading,
        1.02, correct=bool(min(loading) > 0.5),
        detail=f"{min(loading):.3f}-{max(loading):.3f}, mean {np.mean(loading):.3f}", unit="x", of=max,
    )  # fmt: skip


def starts_as_alone(plan, folder, tokens, work=WORK):
    """Whether first tokens are those of the same rounded model in one process, nine of ten at least.

    Text of random tokens has near ties, which forms of another rounding may turn.
    """
    ids, mask = prompts(work)
    with torch.no_grad():
        alone = load(folder, plan).generate(
            ids, attention_mask=mask, max_new_tokens=1, do_sample=False, min_new_tokens=1
        )[:, -1]
    return bool((tokens[:, 0] == alone).float().mean() >= 0.9)


def timed_without_messages(plan, folder, ranks, work):
    """Mean seconds of a stage on the micro-batches of a plan, at once on these ranks; others rest."""
    if Group.world().rank not in ranks:
        return None
    number = [stage.rank for stage in plan.stages].index(Group.world().rank)
    spec = ModelSpec.from_hf(folder)
    worker = StageWorker(load_stage(folder, plan, number)[0], plan, spec, torch.device("cpu"))
    ids, mask = prompts(work)
    batch = Batch(mask, work.new_tokens, plan.prefill_size, plan.decode_size)
    hidden = torch.randn(*ids.shape, spec.hidden_size)
    given = ids if number == 0 else hidden
    worker.begin(batch)
    for micro in range(batch.num_decode):
        first, end = batch.rows(micro)
        for low, high in batch.chunks(micro):
            out = worker.prefill(micro, low, high, given[first + low : first + high])
            if number == 0:
                with worker.timed("head_prefill"), torch.no_grad():
                    worker.model.logits(out[:, -1]).argmax(-1)
        for _ in range(work.new_tokens - 1):
            out = worker.decode(micro, given[first:end, :1])
            if number == 0:
                with worker.timed("head_decode"), torch.no_grad():
                    worker.model.logits(out[:, -1]).argmax(-1)
    return mean_stages(worker.seconds)


def bench_prediction_pipeline_against_its_bound(benchmark, record_claim, folder):
    pipelined = make_plan([0, 1], 13, (4,) * 30, 4, 16, {})
    in_turn = make_plan([0, 1], 13, (4,) * 30, 32, 32, {})
    rows = []
    with RankPool(2, prefix=[handicap(cores=[0]), handicap(cores=[1])]) as pool:

        def timed(*ranks):
            found = pool.run(timed_without_messages, pipelined, folder, ranks, PIPELINED).results
            return [found[rank] for rank in ranks]

        def turns():
            for _ in range(PIPELINED_TURNS):
                alone, beside = timed(0) + timed(1), timed(0, 1)
                ours, theirs = (
                    pool.run(ran, plan, folder, 2, PIPELINED).results
                    for plan in (pipelined, in_turn)
                )
                inside = [mean_stages(taken[-1][1]) for _, taken, *_ in ours]
                rows.append(((alone, beside, inside), ours[0], theirs[0]))

        benchmark.pedantic(turns, rounds=1)
    right = all(starts_as_alone(pipelined, folder, ours[0], PIPELINED) for _, ours, _ in rows)
    right = right and all((ours[0] == theirs[0]).float().mean() > 0.9 for _, ours, theirs in rows)
    ours_s = [ours[1][-1][0] for _, ours, _ in rows]
    theirs_s = [theirs[1][-1][0] for *_, theirs in rows]
    # Of stages timed alone, beside each other without messages, and in the pipeline itself.
    bounds, besides, insides = (
        [batch_s(*zip(*stages[way], strict=True), **counts(pipelined, PIPELINED))
         for stages, *_ in rows]
        for way in range(3)
    )  # fmt: skip
    detail = (
        f"{PIPELINED_TURNS} turns; 32 prompts of 128 tokens, 32 new ones, prefills of 4 prompts, decodes "
        f"of 16, 4 bits; ring bound of stages timed alone {median(bounds):.1f} s, at once but without "
        f"messages {median(besides):.1f} s, in the pipeline {median(insides):.1f} s"
    )
    for name, baseline, aim in (
        ("two stages against the ring bound of their seconds alone", bounds, 0.92),
        ("two stages in micro-batches against the same in turn, whole batch", theirs_s, 1.3),
    ):
        ratios = [base / own for base, own in zip(baseline, ours_s, strict=True)]
        record_claim(
            Claim(
                name=name, unit="s", ours=median(ours_s), baseline=median(baseline),
                baseline_name=PEERS[0 if aim < 1 else 1]["peer"], higher_is_better=False,
                correct=right, detail=detail,
                source=COMMAND,
            ),
            aim=aim,
            spread=(min(ratios), max(ratios)),
        )  # fmt: skip
