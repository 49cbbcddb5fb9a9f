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
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from shared.claims import Claim, finish, pair_turns
from shared.comms.handicap import HandicapUnavailable, handicap
from shared.comms.launch import RankPool
from shared.training.pictures import new_picture, save_picture
from shared.training.progress import show_progress

if TYPE_CHECKING:
    from torch import Tensor, nn

    from qsync.planner.plan import Plan

__all__ = [
    "FULL",
    "SHORT",
    "RankRecord",
    "Size",
    "TurnRecord",
    "choose_ranks",
    "draw",
    "judge",
    "run",
]

_SOURCE = "qsync demo"
_FAST, _SLOW = 0, -1
_SHARE = 0.7
_TIMEOUT = timedelta(minutes=10)
# Largest ratio of a measured gradient error's square to the predicted one, either way round, and
# largest difference of a step's loss from float32's, in nats.
_NOISE_BOUND, _LOSS_BOUND = 3.0, 0.05
_COLORS = {"computes": "#0b7285", "waits": "#99d5df"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
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


SHORT = Size(
    length=32,
    batch_size=4,
    num_frozen=3,
    num_planned=1,
    num_turns=7,
    precisions=("fp32", "bf16"),
)
FULL = Size(
    length=128,
    batch_size=16,
    num_frozen=0,
    num_planned=2,
    num_turns=15,
    precisions=("fp32", "bf16", "int8"),
)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What a rank took in the timed steps of one way of training.

    Attributes:
        step_s: seconds of each step, from barrier to barrier.
        busy_s: seconds of each step until the last gradient was there, and of the optimizer.
        losses: this rank's loss in each step.
    """

    step_s: list[float] = field(default_factory=list)
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
    out.mkdir(parents=True, exist_ok=True)
    size = FULL if is_full else SHORT
    prefixes, slow = choose_ranks()
    with (
        show_progress("qsync: planning MiniLM and training it in turns"),
        RankPool(len(prefixes), prefix=prefixes, timeout=_TIMEOUT) as pool,
    ):
        ranks = pool.run(train, size).results
    plan = ranks[_FAST].plan
    plan.save(out / "plan.json")
    (out / "plan.txt").write_text(plan.explain() + "\n", encoding="utf-8")
    draw(ranks, f"A step of MiniLM on unlike ranks: {slow}", out / "waits.svg")
    figures = {
        "plan_s": ranks[_FAST].plan_s,
        "predicted_step_s": plan.step_s,
        "slow": slow,
        "steps": [
            {"float32_s": rank.float32.step_s, "planned_s": rank.planned.step_s} for rank in ranks
        ],
    }
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

    from qsync import DDP, Plan, apply, plan
    from qsync.data import classify, load_bible_books, load_minilm
    from shared.comms import Group

    group = Group.world()
    torch.manual_seed(0)
    model = load_minilm(4, dropout=0.0)
    model.encoder.embeddings.requires_grad_(False)
    layers: Any = model.get_submodule("encoder.encoder.layer")
    for layer in layers[: size.num_frozen]:
        layer.requires_grad_(False)
    batches, _ = load_bible_books(
        4, length=size.length, batch_size=size.batch_size, seed=group.rank
    )
    started = time.perf_counter()
    chosen = plan(model, islice(batches, size.num_planned), classify, precisions=size.precisions)
    plan_s = time.perf_counter() - started

    samples = iter(batches)
    lowest = Plan.uniform(model, size.precisions[-1])
    gradient = partial(_measure_gradient, model, next(samples))
    exact, own, uniform = gradient(), gradient(chosen), gradient(lowest)
    float32 = apply(model, Plan.uniform(model, "fp32"))
    ways: dict[str, nn.Module] = {
        "float32": DistributedDataParallel(deepcopy(float32)),
        "planned": DDP(apply(model, chosen)),
    }
    records = _take_turns(ways, [next(samples) for _ in range(size.num_turns + 1)])
    return RankRecord(
        plan=chosen,
        plan_s=plan_s,
        noise=_compare(own, exact),
        uniform_noise=_compare(uniform, exact),
        **records,
    )


def judge(ranks: Sequence[RankRecord], slow: str) -> list[Claim]:
    """Makes the demo's claims of what ranks measured; `slow` says what slows the last one."""
    fast, last = ranks[_FAST], ranks[_SLOW]
    predicted = last.plan.ranks[_SLOW].noise or 0.0
    difference = max(
        abs(a - b)
        for rank in ranks
        for a, b in zip(rank.planned.losses, rank.float32.losses, strict=True)
    )
    is_exact = last.noise == predicted == 0.0
    is_predicted = is_exact or (
        min(last.noise, predicted) > 0
        and max(last.noise / predicted, predicted / last.noise) <= _NOISE_BOUND
    )
    lowered, whole = len(last.plan.ranks[_SLOW].lowered), len(last.plan.operators)
    detail = f"MiniLM on {len(ranks)} ranks, {slow}; {lowered} of its {whole} operators are lowered; losses differ by at most {difference:.4f} nats, {_LOSS_BOUND} allowed"
    common: dict[str, Any] = {
        "baseline_name": "float32 under torch's DDP",
        "correct": difference <= _LOSS_BOUND,
        "detail": detail,
        "source": _SOURCE,
    }
    return [
        Claim(
            name="seconds of a step on unlike ranks",
            unit="s",
            **pair_turns(fast.planned.step_s, fast.float32.step_s),
            **common,
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
            ours=_average(rank.planned.losses[-1] for rank in ranks),
            baseline=_average(rank.float32.losses[-1] for rank in ranks),
            higher_is_better=False,
            **common,
        ),
        Claim(
            name="gradient error of the slow rank",
            unit="share",
            ours=math.sqrt(last.noise),
            baseline=math.sqrt(last.uniform_noise),
            higher_is_better=False,
            **common
            | {
                "baseline_name": "all of its operators lowered",
                "correct": is_predicted,
                "detail": f"predicted {math.sqrt(predicted):.2%}, measured "
                f"{math.sqrt(last.noise):.2%} on one batch; squares within a factor of "
                f"{_NOISE_BOUND:g}",
            },
        ),
    ]


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
            barrier(group)
            start_s = time.perf_counter()
            optimizers[name].zero_grad()
            loss = classify(way, batch)
            loss.backward()
            summed_s = time.perf_counter()
            optimizers[name].step()
            done_s = time.perf_counter()
            barrier(group)
            if turn:
                record = records[name]
                record.step_s.append(time.perf_counter() - start_s)
                record.busy_s.append(last_s - start_s + done_s - summed_s)
                record.losses.append(loss.item())
    return records


def _measure_gradient(
    model: nn.Module, batch: tuple[Tensor, Tensor], plan: Plan | None = None
) -> list[Tensor]:
    """The gradient of a batch by a plan, in float32 if there is none; it leaves the model as it is."""
    import torch

    from qsync import apply
    from qsync.data import classify

    trained = [each for each in model.parameters() if each.requires_grad]
    lowered = model if plan is None else apply(deepcopy(model), plan)
    own = trained if plan is None else [each for each in lowered.parameters() if each.requires_grad]
    return list(torch.autograd.grad(classify(lowered, batch), own))


def _compare(gradient: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The squared relative error of a gradient."""
    error = sum(float((a - b).square().sum()) for a, b in zip(gradient, exact, strict=True))
    return error / sum(float(each.square().sum()) for each in exact)


def _average(values: Any) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def draw(ranks: Sequence[RankRecord], title: str, path: Path) -> None:
    """Bars of each rank's step, in float32 and by the plan: computing, then waiting."""
    figure = new_picture(1.4 + 0.6 * len(ranks))
    axes = figure.add_subplot()
    rows = [
        (f"rank {number}, {name}", record)
        for number, rank in enumerate(ranks)
        for name, record in (("float32", rank.float32), ("planned", rank.planned))
    ]
    busy = [median(record.busy_s) * 1e3 for _, record in rows]
    waits = [median(record.wait_s) * 1e3 for _, record in rows]
    names = [name for name, _ in rows]
    axes.barh(names, busy, color=_COLORS["computes"], label="computes")
    bars = axes.barh(names, waits, left=busy, color=_COLORS["waits"], label="waits")
    axes.bar_label(bars, [f"{each:.0f}" for each in waits], padding=2)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="milliseconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    save_picture(figure, path, title)
