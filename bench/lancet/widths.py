"""Compiled steps, and experts so wide that communication takes a share of computation that is asked for."""

import time
from dataclasses import replace
from itertools import islice
from statistics import median

import torch
from eager_ways import time_alone
from moe_jobs import Costs, Job, Step, build, collect, measure_costs

import lancet
from lancet.runtime.reduction import PendingSum
from shared.comms import Group, barrier

__all__ = ["compile_step", "find_job"]

WIDTHS, STEP = (256, 1024), 32
"""Widths of experts between which the right one is looked for, and the grid of widths."""
EXCHANGES = 5
"""Of a layer: numbers of rows, tokens, results, and the gradients of both."""


def find_job(sizes: Job, ratio: float, bytes_per_s: float) -> Job:
    """The job with experts at whose width communication / computation is about `ratio`.

    The width is estimated, and corrected once by what a captured step takes.
    """
    group = Group.world()
    width, slope = choose_width(sizes, ratio, bytes_per_s)
    step = compile_step(set_width(sizes, width), group, partition=None)
    for batch in islice(sizes.batches(group.rank), 2):
        step(batch)
    assert step.backend is not None
    width = correct_width(width, slope, measure_costs(step.backend, step.optimizer_s[-1]), ratio)
    torch._dynamo.reset()
    return set_width(sizes, width)


def compile_step(job: Job, group: Group, *, partition: str | int | None, dw: bool = True) -> Step:
    """A model of its own, compiled and with an optimizer."""
    model = lancet.parallelize(build(job), group)
    backend = lancet.Backend(group, dw=dw, partition=partition)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    return Step(compiled, model, torch.optim.AdamW(model.parameters(), 1e-4), backend)


def choose_width(job: Job, ratio: float, bytes_per_s: float) -> tuple[int, float]:
    """The experts' width at which communication is about `ratio` times as long as computation.

    Returns:
        The width, and seconds of computation that one of it takes.
    """
    seconds = [time_alone(set_width(job, width)) for width in WIDTHS]
    slope = (seconds[1] - seconds[0]) / (WIDTHS[1] - WIDTHS[0])
    whole = [w.nbytes for name, w in build(job).named_parameters() if "experts" not in name]
    # Frames' headers take 66 of 1,514 bytes. A sum over two ranks has two rounds, an exchange one.
    sent_s = (job.exchange_bytes + sum(whole)) * 1514 / 1448 / bytes_per_s
    sent_s += measure_small_sum() * (len(whole) + EXCHANGES / 2 * job.num_layers)
    return round_width(WIDTHS[0] + (sent_s / ratio - seconds[0]) / slope), slope


def correct_width(width: int, slope: float, costs: Costs, ratio: float) -> int:
    """The width again, by what a captured step's operators took."""
    missing_s = costs.communication_s / ratio - costs.compute_s - costs.optimizer_s
    return round_width(width + missing_s / slope)


def round_width(width: float) -> int:
    return max(STEP, STEP * round(width / STEP))


def set_width(job: Job, width: int) -> Job:
    return replace(job, expert_width=width)


def measure_small_sum(num_calls: int = 9) -> float:
    """Seconds of a sum of one number over the ranks, the slower rank's."""
    group, seconds = Group.world(), []
    for _ in range(num_calls):
        barrier(group)
        began = time.perf_counter()
        PendingSum(group, torch.zeros(1), "probe").wait()
        seconds.append(time.perf_counter() - began)
    return max(collect(median(seconds)))
