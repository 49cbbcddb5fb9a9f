"""Stages of one backbone and their replicas: after DiffusionPipe (arXiv 2405.01248), section 4.

Minimises (M + 2S - 2) W + Y, with W the period (the longest stage or used cut) and Y what remains
exposed of the sums of gradients. Two departures. The paper goes from the first stage to the last; we
go backwards, because what hides a stage's sum is the backward time of earlier stages, which then
only lowers Y. And as the best beginning of a partition need not be part of the best one, we fix W,
find the least Y for it, and walk down the periods that can still be better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from diffusionpipe.planner.partitioning.partition_compiled import count_fewest_devices, find_stages
from shared.errors import ConfigError

__all__ = ["Partition", "StageTables", "check_chain", "partition", "solve_stages", "sum_spans"]

# Halvings of the range of periods before those left in it are listed.
_NUM_HALVINGS = 16

Numbers = Sequence[float] | np.ndarray


@dataclass(frozen=True, slots=True)
class Partition:
    """Consecutive stages of a chain.

    Attributes:
        stages: by stage, the first layer and the one after the last.
        replicas: devices of each stage.
        objective_s: (M + 2S - 2) W + Y in seconds.
        period_s: W, the seconds of the longest stage or used cut.
    """

    stages: list[tuple[int, int]]
    replicas: list[int]
    objective_s: float
    period_s: float


class StageTables(NamedTuple):
    """Costs of a stage of layers i to j on r devices; arrays are [i, j, r] over layers and devices.

    Attributes:
        time_s: seconds of both passes of a micro-batch, or of its messages if they take longer;
            infinite where r is not allowed.
        backward_s: seconds of the backward pass.
        sync_s: seconds of the sum of gradients.
        cut_s: seconds of a micro-batch's messages across the cut before layer i [i].
        fixed_bytes: bytes that layers i to j need whatever is computed.
        flight_bytes: bytes that a micro-batch in flight keeps there.
        limit_bytes: least memory of devices i to i + r, over devices and counts [i, r]: stages take the
            devices in order.
    """

    time_s: np.ndarray
    backward_s: np.ndarray
    sync_s: np.ndarray
    cut_s: np.ndarray
    fixed_bytes: np.ndarray
    flight_bytes: np.ndarray
    limit_bytes: np.ndarray


def partition(
    forward_s: Numbers,
    backward_s: Numbers,
    cut_s: Numbers,
    gradient_bytes: Numbers,
    *,
    num_stages: int,
    num_devices: int,
    num_micro_batches: int,
    sync_s_per_byte: float,
) -> Partition:
    """Cuts a chain of layers into stages with replicas, by the paper's objective.

    A stage's r replicas share each micro-batch: its passes take sum(F + B) / r seconds, the sum of
    its gradients 2 (r - 1) / r x bytes x sync_s_per_byte, of which the backward passes of earlier
    stages hide sum(B) / r each.

    Args:
        forward_s, backward_s: seconds of a micro-batch by layer on one device.
        cut_s: seconds of a micro-batch's messages behind each layer; the last layer's may be left out.
        gradient_bytes: by layer.
        num_stages: of the pipeline.
        num_devices: over which all stages' replicas are spread; all are used.
        num_micro_batches: of a step.
        sync_s_per_byte: seconds that a byte of gradients takes on a link.

    Returns:
        An optimal partition. O(stages x layers^2 x devices^2) for each period looked at.

    Raises:
        ConfigError: the lists do not fit each other, a number is negative or not finite, or there are
            fewer layers or devices than stages.
    """
    layers = len(forward_s)
    # The last layer has no cut behind it.
    cuts = list(cut_s)[:-1] if len(cut_s) == layers else list(cut_s)
    check_chain(forward_s, backward_s, cuts, num_stages, num_micro_batches)
    _check_numbers("gradient_bytes", gradient_bytes, layers)
    _check_numbers("sync_s_per_byte", [sync_s_per_byte], 1)
    if num_devices < num_stages:
        raise ConfigError(
            f"num_devices: expected one a stage or more, got {num_devices} for {num_stages} stages; "
            f"ask for at most {num_devices} stages"
        )
    # No stage has more replicas than the other stages leave.
    replicas = np.arange(num_devices - num_stages + 2)
    share = 1.0 / np.maximum(replicas, 1)
    backward = sum_spans(backward_s)
    tables = StageTables(
        time_s=(sum_spans(forward_s) + backward)[..., None] * share,
        backward_s=backward[..., None] * share,
        sync_s=sum_spans(gradient_bytes)[..., None]
        * (2 * sync_s_per_byte * np.maximum(replicas - 1, 0) * share),
        cut_s=np.array([0.0, *cuts, 0.0]),
        fixed_bytes=np.zeros((layers + 1, layers + 1, len(replicas))),
        flight_bytes=np.zeros((layers + 1, layers + 1, len(replicas))),
        limit_bytes=np.full((num_devices + 1, len(replicas)), np.inf),
    )
    result = solve_stages(tables, num_stages, num_devices, num_micro_batches)
    assert result is not None, "every chain of enough layers has a partition"
    return result


def solve_stages(
    tables: StageTables,
    num_stages: int,
    num_devices: int,
    num_micro_batches: int,
) -> Partition | None:
    """Finds the best partition by tables.

    Args:
        tables: costs of stages, up to the most replicas that one may have.
        num_stages: of the pipeline.
        num_devices: of all stages together.
        num_micro_batches: of a step.

    Returns:
        The partition; None if no stages fit into memory.
    """
    weight = num_micro_batches + 2 * num_stages - 2
    times_s = tables.time_s[np.triu_indices(len(tables.cut_s), 1)]
    times_s = np.concatenate([times_s[np.isfinite(times_s)], tables.cut_s])
    shortest_s = _find_shortest(tables, times_s, num_stages, num_devices)
    best, best_s = None, np.inf

    def look(limit_s: float, least_s: float) -> tuple[float, float]:
        """Least exposed seconds within a period, and that period; infinite if none is better."""
        nonlocal best, best_s
        stops, replicas = np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64)
        exposed_s = find_stages(
            *tables, num_stages, num_devices, num_micro_batches, limit_s, best_s - weight * least_s, stops, replicas,
        )  # fmt: skip
        if exposed_s == np.inf:
            return exposed_s, limit_s
        stages = list(zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True))
        period_s = max(
            max(tables.time_s[first, stop, count], tables.cut_s[first])
            for (first, stop), count in zip(stages, replicas, strict=True)
        )
        objective_s = float(weight * period_s + exposed_s)
        if objective_s < best_s:
            best = Partition(stages, replicas.tolist(), objective_s, float(period_s))
            best_s = objective_s
        return exposed_s, period_s

    most_s, _ = look(shortest_s, shortest_s)
    if best_s <= weight * shortest_s:
        return best
    periods_s = np.unique(times_s[(times_s >= shortest_s) & (weight * times_s < best_s)])
    if len(periods_s) < 2:
        return best
    # Open intervals of periods, with the exposed seconds at their ends: the longer a period, the less
    # is exposed, so what is exposed at an interval's end bounds all within.
    least_s, period_s = look(periods_s[-1], periods_s[1])
    intervals = [(0, most_s, int(np.searchsorted(periods_s, period_s)), least_s)]
    while intervals:
        low, most_s, high, least_s = intervals.pop()
        high = min(high, int(np.searchsorted(periods_s, (best_s - least_s) / weight)))
        if high - low > 1 and most_s > least_s:
            middle = (low + high) // 2
            exposed_s, period_s = look(periods_s[middle], periods_s[low + 1])
            intervals.append((middle, exposed_s, high, least_s))
            intervals.append((low, most_s, int(np.searchsorted(periods_s, period_s)), exposed_s))
    return best


def sum_spans(values: Numbers) -> np.ndarray:
    """Sums values i to j [i, j]; 0 where j <= i.

    Args:
        values: by layer.
    """
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
    return np.maximum(ends[None, :] - ends[:, None], 0.0)


def check_chain(
    forward_s: Numbers,
    backward_s: Numbers,
    cut_s: Numbers,
    num_stages: int,
    num_micro_batches: int,
    name: str = "",
) -> None:
    """Refuses lists of a chain that do not fit each other, and impossible numbers."""
    layers = len(forward_s)
    _check_numbers(f"{name}forward_s", forward_s, layers)
    _check_numbers(f"{name}backward_s", backward_s, layers)
    _check_numbers(f"{name}cut_s", cut_s, layers - 1)
    if not 1 <= num_stages <= layers:
        raise ConfigError(
            f"num_stages: expected 1 to {layers}, one layer a stage or more, got {num_stages}; cut "
            "the model into more layers or ask for fewer stages"
        )
    if num_micro_batches < 1:
        raise ConfigError(f"num_micro_batches: expected 1 or more, got {num_micro_batches}")


def _find_shortest(
    tables: StageTables, times_s: np.ndarray, num_stages: int, num_devices: int
) -> float:
    """Returns the shortest of some times for which the devices are enough, or the longest time."""

    def is_enough(limit_s: float) -> bool:
        fewest = count_fewest_devices(tables.time_s, tables.cut_s, num_stages, limit_s)
        return bool(fewest[-1, -1] <= num_devices)

    low_s, high_s = 0.0, float(times_s.max())
    for _ in range(_NUM_HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if is_enough(middle_s) else (middle_s, high_s)
    candidates = np.unique(times_s[(times_s >= low_s) & (times_s <= high_s)])
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(candidates[middle]) else (middle + 1, high)
    return float(candidates[low])


def _check_numbers(name: str, values: Numbers, count: int) -> None:
    """Refuses a list of another length, or with a number below 0 or not finite."""
    numbers = np.asarray(values, dtype=float)
    if numbers.shape != (count,) or not (np.isfinite(numbers) & (numbers >= 0)).all():
        raise ConfigError(
            f"{name}: expected {count} finite numbers of 0 or more, one for each layer, got "
            f"{numbers.tolist()}"
        )
