"""`qsync demo`: MiniLM learns to tell books of the Bible apart on two unlike ranks, with a plan and without.

The fast rank has a core of its own, and is too old for bf16. The slow one is newer, and has a share of
a core; without root two slow ranks share a core instead. After planning, float32 training under torch's
DDP and training by the plan take turns step by step, with the same batches.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from qsync.report import draw_waits
from shared.claims import Claim, finish, pair_turns
from shared.comms.handicap import HandicapUnavailable, handicap
from shared.comms.launch import RankPool
from shared.training.progress import show_progress

if TYPE_CHECKING:
    from torch import Tensor, nn

    from qsync.planner.plan import Plan

__all__ = ["FULL", "SHORT", "RankRecord", "Size", "TurnRecord", "choose_ranks", "judge", "run"]

_FAST, _SLOW = 0, -1
_SHARE = 0.7
_TIMEOUT = timedelta(minutes=10)
# Largest ratio of a prediction to what was measured, either way round: other work may slow either.
_FACTOR = 3.0
# Largest difference of a step's loss from float32's, in nats.
_LOSS_BOUND = 0.05


class Size(NamedTuple):
    """How much the demo does.

    Attributes:
        length: tokens of a passage.
        batch_size: passages of a rank's batch.
        num_frozen: encoder layers that are not trained; the embeddings never are.
        num_planned: batches that planning reads.
        num_turns: timed steps of each way of training; one more warms up.
        precisions: those that the plan may use.
    """

    length: int
    batch_size: int
    num_frozen: int
    num_planned: int
    num_turns: int
    precisions: tuple[str, ...]


SHORT = Size(32, 4, num_frozen=3, num_planned=1, num_turns=7, precisions=("fp32", "bf16"))
FULL = Size(128, 16, num_frozen=0, num_planned=2, num_turns=15, precisions=("fp32", "bf16", "int8"))


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What a rank took in the timed steps of one way of training.

    Attributes:
        step_s: seconds of each step, from barrier to barrier.
        backward_s: seconds of each step until the backward pass and its all-reduces had ended.
        busy_s: seconds of each step until the last gradient was there, and of the optimizer.
        losses: this rank's loss in each step.
    """

    step_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def wait_s(self) -> list[float]:
        """Seconds of each step in which the rank computed nothing."""
        return [step - busy for step, busy in zip(self.step_s, self.busy_s, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank measured.

    Attributes:
        plan: the plan of all ranks.
        plan_s: seconds that planning took.
        float32, planned: steps of both ways of training.
        noise: squared relative error of this rank's gradient by the plan, on one batch.
        uniform_noise: the same with all operators in the lowest precision.
    """

    plan: Plan
    plan_s: float
    float32: TurnRecord
    planned: TurnRecord
    noise: float
    uniform_noise: float


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json, the plan and a picture to `out`.

    Returns:
        Whether every claim's result was correct.

    Raises:
        ConfigError: the model or the text is not installed.
    """
    prefixes, slow = choose_ranks()
    with (
        show_progress("qsync: planning MiniLM and training it in turns"),
        RankPool(len(prefixes), prefix=prefixes, timeout=_TIMEOUT) as pool,
    ):
        ranks = pool.run(train, FULL if is_full else SHORT).results
    plan = ranks[_FAST].plan
    plan.save(out / "plan.json")
    (out / "plan.txt").write_text(plan.explain() + "\n", encoding="utf-8")
    rows = {
        f"rank {number}, {name}": (median(turns.busy_s), median(turns.wait_s))
        for number, rank in enumerate(ranks)
        for name, turns in (("float32", rank.float32), ("planned", rank.planned))
    }
    draw_waits(rows, f"A step of MiniLM on unlike ranks: {slow}", out / "waits.svg")
    steps = [{"float32_s": r.float32.step_s, "planned_s": r.planned.step_s} for r in ranks]
    figures = {"plan_s": ranks[_FAST].plan_s, "slow": slow, "steps": steps}
    return finish(out, "qsync", judge(ranks, slow), figures)


def choose_ranks() -> tuple[list[list[str]], str]:
    """Chooses what makes ranks unlike on this machine.

    Returns:
        Words before each rank's command, and what slows the last rank, in words.
    """
    cores = sorted(os.sched_getaffinity(0))
    fast = handicap(isa="AVX512", cores=cores[:1])
    try:
        slow = handicap(cores=cores[-1:], share=_SHARE)
    except HandicapUnavailable:
        shared = handicap(cores=cores[-1:])
        return [fast, shared, shared], "two share a core"
    return [fast, slow], f"one has {_SHARE:.0%} of a core"


def train(size: Size) -> RankRecord:
    """Plans, then trains by the plan and in float32 in turns; every rank calls it."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from qsync import DDP, apply, plan
    from qsync.data import classify, load_bible_books, load_minilm
    from qsync.profiler.gradients import measure_noises
    from shared.comms import Group

    torch.manual_seed(0)
    model = load_minilm(4, dropout=0.0)
    model.encoder.embeddings.requires_grad_(False)
    layers: Any = model.get_submodule("encoder.encoder.layer")
    for layer in layers[: size.num_frozen]:
        layer.requires_grad_(False)
    batches, _ = load_bible_books(
        4, length=size.length, batch_size=size.batch_size, seed=Group.world().rank
    )
    started = time.perf_counter()
    chosen = plan(model, islice(batches, size.num_planned), classify, precisions=size.precisions)
    plan_s = time.perf_counter() - started

    samples = iter(batches)
    own = dict(chosen.rank(Group.world().rank).lowered)
    lowest = dict.fromkeys(chosen.operators, size.precisions[-1])
    noise, uniform_noise = measure_noises(model, [next(samples)], classify, [own, lowest])
    ways: dict[str, nn.Module] = {
        "float32": DistributedDataParallel(deepcopy(model)),
        "planned": DDP(apply(model, chosen)),
    }
    return RankRecord(
        plan=chosen,
        plan_s=plan_s,
        noise=noise,
        uniform_noise=uniform_noise,
        **_take_turns(ways, [next(samples) for _ in range(size.num_turns + 1)]),
    )


def judge(ranks: Sequence[RankRecord], slow: str) -> list[Claim]:
    """Makes the demo's claims of what ranks measured; `slow` says what slows the last one."""
    fast, last = ranks[_FAST], ranks[_SLOW]
    plan, own = last.plan, last.plan.ranks[_SLOW]
    difference = max(
        abs(a - b)
        for rank in ranks
        for a, b in zip(rank.planned.losses, rank.float32.losses, strict=True)
    )
    common: dict[str, Any] = {
        "baseline_name": "float32 under torch's DDP",
        "correct": difference <= _LOSS_BOUND,
        "detail": f"MiniLM on {len(ranks)} ranks, {slow}; {len(own.lowered)} of its "
        f"{len(plan.operators)} operators are lowered; losses differ by at most {difference:.4f} "
        f"nats, {_LOSS_BOUND} allowed",
        "source": "qsync demo",
    }
    predicted_s, predicted = plan.step_s or 0.0, own.noise or 0.0
    backward_s = median(map(max, zip(*(rank.planned.backward_s for rank in ranks), strict=True)))
    claims = [
        Claim(
            name="seconds of a step on unlike ranks",
            unit="s",
            **pair_turns(fast.planned.step_s, fast.float32.step_s),
            **common,
        ),
        Claim(
            name="seconds of that step without the optimizer, predicted before it ran",
            unit="s",
            ours=predicted_s,
            baseline=backward_s,
            higher_is_better=False,
            **common
            | {
                "baseline_name": "measured",
                "correct": _is_close(predicted_s, backward_s),
                "detail": f"from the seconds of single operators; correct within {_FACTOR:g} times, "
                "as other work may slow either",
            },
        ),
        Claim(
            name="seconds of a step in which the fast rank waits, transfers included",
            unit="s",
            **pair_turns(fast.planned.wait_s, fast.float32.wait_s),
            **common,
        ),
        Claim(
            name="loss after training",
            unit="nats",
            ours=fmean(rank.planned.losses[-1] for rank in ranks),
            baseline=fmean(rank.float32.losses[-1] for rank in ranks),
            higher_is_better=False,
            **common,
        ),
    ]
    if last.noise == predicted == 0:  # nothing is lowered: zero has no ratio
        return claims
    error = Claim(
        name="gradient error of the slow rank",
        unit="share",
        ours=math.sqrt(last.noise),
        baseline=math.sqrt(last.uniform_noise),
        higher_is_better=False,
        **common
        | {
            "baseline_name": "all of its operators lowered",
            "correct": _is_close(last.noise, predicted),
            "detail": f"predicted {math.sqrt(predicted):.2%}, measured {math.sqrt(last.noise):.2%} on "
            f"one batch; squares within a factor of {_FACTOR:g}",
        },
    )
    return [*claims, error]


def _is_close(a: float, b: float) -> bool:
    return min(a, b) > 0 and max(a / b, b / a) <= _FACTOR


def _take_turns(
    ways: dict[str, nn.Module], batches: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, TurnRecord]:
    """Takes a step of each way on each batch; the first batch warms up and is not recorded."""
    import torch

    from qsync.data import classify
    from shared.comms import Group, barrier

    group = Group.world()
    last_s = 0.0

    def mark(_: Tensor) -> None:
        nonlocal last_s
        last_s = time.perf_counter()

    optimizers = {}
    for name, way in ways.items():
        trained = [each for each in way.parameters() if each.requires_grad]
        optimizers[name] = torch.optim.AdamW(trained, 1e-4, fused=True)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(mark)
    records = {name: TurnRecord() for name in ways}
    for turn, batch in enumerate(batches):
        for name, way in ways.items():
            optimizers[name].zero_grad()
            barrier(group)
            start_s = time.perf_counter()
            loss = classify(way, batch)
            loss.backward()
            summed_s = time.perf_counter()
            optimizers[name].step()
            done_s = time.perf_counter()
            barrier(group)
            if turn:
                record = records[name]
                record.step_s.append(time.perf_counter() - start_s)
                record.backward_s.append(summed_s - start_s)
                record.busy_s.append(last_s - start_s + done_s - summed_s)
                record.losses.append(loss.item())
    return records
