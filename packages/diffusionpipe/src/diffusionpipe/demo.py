"""The demo: two ranks train a Stable Diffusion pipeline on digits, frozen parts first and filled in.

Beside it four simulated devices, which show what filling gives where ranks share no cores; the long
form also runs them as ranks whose computation sleeps.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from diffusionpipe.report import draw_steps, list_measured_bars
from shared.claims import Claim, finish, pair_turns
from shared.comms import RankPool
from shared.comms.handicap import handicap
from shared.training.progress import show_progress

if TYPE_CHECKING:
    from diffusionpipe.job.job import Batch, Job
    from diffusionpipe.profiler.job_profile import JobProfile
    from diffusionpipe.runtime.records import RunReport

__all__ = [
    "TrainedTurns",
    "judge_simulation",
    "judge_sleeping",
    "judge_training",
    "judge_waits",
    "run",
]

_SOURCE = "diffusionpipe demo"
_BATCH, _MICRO_BATCHES, _IMAGE_SIZE, _CHANNELS = 8, 2, 32, (32, 32)
_MODULES = (
    "diffusionpipe.runtime.engine",
    "diffusionpipe.runtime.virtual",
    "diffusionpipe.job.pipelines.stable_diffusion",
    "transformers.models.bert.modeling_bert",
    "sklearn.datasets",
    "torch._dynamo",
)
"""What ranks import, once for all where they are forked."""
_DEVICES, _RATIO, _ROWS = 4, 0.85, 64
"""Sleeping devices, their frozen part over their training's time, and rows of their batch."""
_PASS_S = 0.06
"""Seconds of a sleeping device's forward and backward pass of a micro-batch."""


class TrainedTurns(NamedTuple):
    """What a rank measured while two plans took turns on the same batches.

    Attributes:
        filled_s, first_s: seconds of each step, frozen parts filled in and first.
        filled_losses, first_losses: of each step.
        reference_losses: of the first two steps, of one process that computes whole batches.
        reports: records of both runs.
    """

    filled_s: list[float]
    first_s: list[float]
    filled_losses: list[float]
    first_losses: list[float]
    reference_losses: list[float]
    reports: tuple[RunReport, RunReport]


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json and a picture to `out`.

    Returns:
        Whether every claim's result was correct.
    """
    out.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    words = [handicap(cores=cores[:1]), handicap(cores=cores[-1:])]
    with (
        ThreadPoolExecutor(1) as beside,
        show_progress("diffusionpipe: starting ranks, importing diffusers") as status,
    ):
        # Ranks start on one core, and measure nothing yet.
        simulation = beside.submit(judge_simulation)
        beside.submit(import_module, "matplotlib.figure")
        with RankPool(2, prefix=words, modules=_MODULES) as pool:
            status.update("diffusionpipe: two ranks train, frozen parts first and filled in turns")
            turns = 15 if is_full else 5
            trained = pool.run(train_in_turns, turns, timeout=timedelta(minutes=10)).results[0]
        claims = [judge_training(trained), judge_waits(trained), simulation.result()]
        data = {"filled_s": trained.filled_s, "first_s": trained.first_s}
        if is_full:
            status.update(f"diffusionpipe: {_DEVICES} sleeping devices, first and filled in turns")
            with RankPool(_DEVICES, modules=("diffusionpipe.runtime.virtual",)) as pool:
                filled_s, first_s, predicted_s = pool.run(sleep_in_turns, 8).results[0]
            claims.append(judge_sleeping(filled_s, first_s, predicted_s))
            data |= {"slept_filled_s": filled_s, "slept_first_s": first_s}
    steps = {
        "frozen parts first": list_measured_bars(trained.reports[1]),
        "frozen parts filled in": list_measured_bars(trained.reports[0]),
    }
    draw_steps(steps, out / "steps.svg", "A measured step of a pipeline of two ranks")
    return finish(out, "diffusionpipe", claims, data)


def train_in_turns(num_turns: int) -> TrainedTurns:
    """Trains on digits with both plans, a step of each a turn; each rank calls it."""
    import torch

    from diffusionpipe.data import build_pipeline, iterate_batches, load_digits
    from diffusionpipe.job.job import Job
    from diffusionpipe.planner.costs import PlanInputs
    from diffusionpipe.planner.search.assembly import assemble
    from diffusionpipe.planner.search.search import plan as make_plan
    from diffusionpipe.profiler.measure import profile as measure
    from diffusionpipe.runtime.engine import Engine

    pipeline = build_pipeline(channels=_CHANNELS, image_size=_IMAGE_SIZE)
    job = Job.from_pipeline(pipeline)
    samples = load_digits(_IMAGE_SIZE)
    batches = iterate_batches(samples, _BATCH)
    batch = next(batches)
    profile = measure(job, batch, sizes=(1, _BATCH // _MICRO_BATCHES), repeats=1)
    cluster = make_cluster(2)
    filled = make_plan(
        job, profile, cluster, batch_size=_BATCH, num_stages=2, num_micro_batches=_MICRO_BATCHES,
        placement="chain",
    )  # fmt: skip
    # An engine takes its job's weights for itself, so that each needs a job of its own.
    jobs = [job, *(Job.from_pipeline(copy.deepcopy(pipeline)) for _ in range(2))]
    reference = train_plainly(jobs.pop(), [batch, next(batches)])
    plans = [filled, assemble(filled, PlanInputs(profile, cluster), "first")]
    engines = [
        Engine(own, plan, lambda p: torch.optim.AdamW(p, 1e-4))
        for own, plan in zip(jobs, plans, strict=True)
    ]
    runs = [engine.steps(iterate_batches(samples, _BATCH)) for engine in engines]
    losses = [[float(next(run)) for run in runs] for _ in range(num_turns + 1)]
    reports = tuple(engine.report() for engine in engines)
    seconds = [read_seconds(report) for report in reports]
    return TrainedTurns(
        filled_s=seconds[0],
        first_s=seconds[1],
        filled_losses=[pair[0] for pair in losses],
        first_losses=[pair[1] for pair in losses],
        reference_losses=reference,
        reports=(reports[0], reports[1]),
    )


def train_plainly(job: Job, batches: Sequence[Batch]) -> list[float]:
    """Losses of one process that computes whole batches, without an engine."""
    import torch

    optimizer = torch.optim.AdamW(job.trained.values(), 1e-4)
    losses = []
    for step, batch in enumerate(batches):
        is_last = step == len(batches) - 1
        with torch.set_grad_enabled(not is_last):
            loss = job.compute_loss(batch, seed=0, step=step)
        losses.append(float(loss.detach()))
        if not is_last:
            loss.backward()
            optimizer.step()
    return losses


def sleep_in_turns(num_turns: int) -> tuple[list[float], list[float], float]:
    """Runs both plans on devices that sleep; each rank calls it.

    Returns:
        Seconds of a step filled in and frozen parts first, and the filled one's prediction.
    """
    from diffusionpipe.planner.costs import PlanInputs
    from diffusionpipe.planner.search.assembly import assemble
    from diffusionpipe.planner.search.search import plan as make_plan
    from diffusionpipe.runtime.virtual import run_virtual

    profile, cluster = describe_sleepers(), make_cluster(_DEVICES)
    filled = make_plan(
        None, profile, cluster, batch_size=_ROWS, num_stages=_DEVICES,
        num_micro_batches=_DEVICES, placement="chain",
    )  # fmt: skip
    first = assemble(filled, PlanInputs(profile, cluster), "first")
    filled_s, first_s = [], []
    for _ in range(num_turns):
        filled_s += read_seconds(run_virtual(filled, profile, 2))
        first_s += read_seconds(run_virtual(first, profile, 2))
    return filled_s, first_s, filled.predicted_s


def make_cluster(num_ranks: int) -> Any:
    """Ranks of this machine."""
    from shared.topology import Cluster
    from shared.topology.device import CPU

    return Cluster.uniform(1, num_ranks, CPU)


def describe_sleepers() -> JobProfile:
    """A profile of a chain of layers, one a device, whose micro-batch takes `_PASS_S`."""
    from diffusionpipe.profiler.job_profile import ChainProfile, JobProfile

    keys = [*(f"h{layer}" for layer in range(_DEVICES - 1)), "output"]
    rows = _ROWS // _DEVICES
    chain = ChainProfile(
        layers=tuple(f"layer {layer}" for layer in range(_DEVICES)),
        reads=tuple((key,) for key in ("sample", *keys[:-1])),
        writes=tuple((key,) for key in keys),
        differentiable=tuple(keys),
        feeds={"sample": ("z",), "target": ("z",)},
        forward_s=((_PASS_S / 3 / rows, _PASS_S / 3),) * _DEVICES,
        backward_s=((_PASS_S * 2 / 3 / rows, _PASS_S * 2 / 3),) * _DEVICES,
        parameter_bytes=(1000,) * _DEVICES,
        gradient_bytes=(1000,) * _DEVICES,
        saved_bytes=(1000,) * _DEVICES,
        value_bytes=dict.fromkeys(("sample", "target", *keys), 1000),
    )
    frozen_s = _RATIO * _PASS_S * _DEVICES * _DEVICES / _ROWS
    return JobProfile(
        sizes=(1, rows), chains=(chain,), frozen_s={"z": (frozen_s, rows * frozen_s)}, frozen_outputs={"z": ("z",)},
        frozen_bytes={"z": 1000}, frozen_parameter_bytes={"z": 0}, step_s_per_byte=0.0,
        self_conditioning=0.0, device="sleeps", num_ranks=1,
    )  # fmt: skip


def read_seconds(report: RunReport) -> list[float]:
    """Seconds of each step, of the slowest rank; without the first, which warms up."""
    return [max(step.seconds for step in ranks) for ranks in zip(*report.steps, strict=True)][1:]


def judge_training(turns: TrainedTurns) -> Claim:
    """Seconds of a step on real ranks; right if `check_training` says so."""
    predicted = [report.predicted_s for report in turns.reports]
    return Claim(
        name="a training step of a pipeline of two ranks", unit="s",
        **pair_turns(turns.filled_s, turns.first_s),
        baseline_name="the same plan, frozen parts first", correct=check_training(turns),
        detail=f"digits with captions, MiniLM, a VAE and a U-Net; batch {_BATCH} in {_MICRO_BATCHES} "
        f"micro-batches; losses are one process' to 1e-4; predicted {predicted[0]:.3g} and "
        f"{predicted[1]:.3g} s",
        source=_SOURCE,
    )  # fmt: skip


def judge_waits(turns: TrainedTurns) -> Claim:
    """Seconds in which the ranks of these steps wait for messages; right if the steps are."""
    filled_s, first_s = (
        [sum(step.waited_s for step in ranks) for ranks in zip(*report.steps, strict=True)][1:]
        for report in turns.reports
    )
    return Claim(
        name="waits of both ranks in such a step", unit="s", **pair_turns(filled_s, first_s),
        baseline_name="the same plan, frozen parts first",
        correct=check_training(turns) and min(first_s) > 0,
        detail="the sum of what each rank waits for the other's messages; the steps of the claim above",
        source=_SOURCE,
    )  # fmt: skip


def check_training(turns: TrainedTurns) -> bool:
    """Whether losses are one process' and each step encodes the next batch."""
    references = [
        *zip(turns.filled_losses, turns.reference_losses, strict=False),
        *zip(turns.first_losses, turns.filled_losses, strict=True),
    ]
    are_alike = all(abs(ours - theirs) <= 1e-4 * theirs for ours, theirs in references)
    # A run without frozen parts, or whose weights do not change, would be fast.
    has_encoded = all(
        sum(rank[step].filled_s for rank in report.steps) > 0
        for report in turns.reports
        for step in range(len(turns.filled_losses))
    )
    return are_alike and has_encoded


def judge_sleeping(
    filled_s: Sequence[float], first_s: Sequence[float], predicted_s: float
) -> Claim:
    """Seconds of a step on devices that sleep; right if they slept for all that was planned.

    A busy machine only makes a step longer than predicted.
    """
    error = abs(median(filled_s) / predicted_s - 1)
    return Claim(
        name=f"a step of {_DEVICES} devices whose computation sleeps", unit="s",
        **pair_turns(filled_s, first_s),
        baseline_name="the same plan, frozen parts first",
        correct=0.97 * predicted_s <= min(filled_s) and predicted_s > 0,
        detail=f"messages are real; frozen part {_RATIO:g} of the training's time; predicted "
        f"{predicted_s:.3g} s, off by {error:.1%}",
        source=_SOURCE,
    )  # fmt: skip


def judge_simulation() -> Claim:
    """The sleeping devices' step without messages, simulated; right within 4 % of the closed form's limit."""
    from diffusionpipe.simulator import simulate

    forward_s, backward_s = [_PASS_S / 3] * _DEVICES, [_PASS_S * 2 / 3] * _DEVICES
    frozen_s = _RATIO * _PASS_S * _DEVICES * _DEVICES
    filled_s, first_s = (
        simulate(
            forward_s, backward_s, _DEVICES, frozen_s=frozen_s, job_s=_PASS_S / 60, fill=fill
        ).makespan_s
        for fill in ("owned", "first")
    )
    limit_s = max(2 * _DEVICES - 1, (1 + _RATIO) * _DEVICES) * _PASS_S
    return Claim(
        name=f"a step of {_DEVICES} devices, simulated", unit="s", ours=filled_s, baseline=first_s,
        baseline_name="frozen parts first", higher_is_better=False, kind="simulated",
        correct=limit_s * 0.999 <= filled_s <= limit_s * 1.04,
        detail=f"the limit is {limit_s:.3g} s: passes and their ramp, or all work spread evenly",
        source=_SOURCE,
    )  # fmt: skip
