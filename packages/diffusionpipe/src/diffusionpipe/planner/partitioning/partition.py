"""Stages of one backbone and their replicas: after DiffusionPipe (arXiv 2405.01248), section 4.

Minimises (M + 2S - 2) W + Y, with W the period (the longest stage or used cut) and Y what remains
exposed of the sums of gradients. As the two terms are maxima of different things, the best
beginning of a partition need not be part of the best partition; we keep a Pareto set of (W, Y) in
each state. Two departures. The paper goes from the first stage to the last; we go backwards, because
what hides a stage's sum is the backward time of earlier stages, which then only lowers Y. And we go
through intervals of W from the least possible one on: within one, the best objective so far and the
fewest devices that each beginning needs rule out most states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diffusionpipe.planner.partitioning.partition_compiled import count_fewest_devices, find_stages
from shared.errors import ConfigError

__all__ = [
    "Partition",
    "StageTables",
    "check_chain",
    "check_numbers",
    "partition",
    "solve_stages",
    "sum_spans",
]

# Width of the first interval of periods and of those after it, and of what is known of the least
# period before, as shares of the period.
_FIRST_WIDTH, _WIDTH, _PRECISION = 0.03, 0.1, 1e-4
# Factor over the least period's share beyond which a greedy solution of any period is looked for.
_GREEDY = 1.5

Numbers = Sequence[float] | np.ndarray


@dataclass(frozen=True, slots=True)
class Partition:
    """Consecutive stages of a chain.

    Attributes:
        stages: by stage, the first layer and the one after the last.
        replicas: devices of each stage.
        objective_s: (M + 2S - 2) W + Y in seconds.
    """

    stages: list[tuple[int, int]]
    replicas: list[int]
    objective_s: float


@dataclass(frozen=True, slots=True)
class StageTables:
    """What a stage of layers i to j on r devices takes; arrays are [i, j, r] over layers and devices.

    Attributes:
        time_s: seconds of both passes of a micro-batch, or of its messages if they take longer;
            infinite where r is not allowed.
        backward_s: seconds of the backward pass.
        sync_s: seconds of the sum of gradients.
        cut_s: seconds of a micro-batch's messages across the cut before layer i [i].
        fixed_bytes: bytes that layers i to j need whatever is computed [i, j].
        flight_bytes: bytes that a micro-batch in flight keeps there.
        limit_bytes: memory of a device.
    """

    time_s: np.ndarray
    backward_s: np.ndarray
    sync_s: np.ndarray
    cut_s: np.ndarray
    fixed_bytes: np.ndarray
    flight_bytes: np.ndarray
    limit_bytes: float = np.inf


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
        An optimal partition. O(stages x layers^2 x devices^2) at worst, times the size of Pareto sets.

    Raises:
        ConfigError: the lists do not fit each other, a number is negative or not finite, or there are
            fewer layers or devices than stages.
    """
    layers = len(forward_s)
    # The last layer has no cut behind it.
    cuts = list(cut_s)[:-1] if len(cut_s) == layers else list(cut_s)
    check_chain(forward_s, backward_s, cuts, num_stages, num_micro_batches)
    check_numbers("gradient_bytes", gradient_bytes, layers)
    check_numbers("sync_s_per_byte", [sync_s_per_byte], 1)
    if num_devices < num_stages:
        raise ConfigError(
            f"num_devices: expected one a stage or more, got {num_devices} for {num_stages} stages; "
            f"ask for at most {num_devices} stages"
        )
    replicas = np.arange(num_devices + 1)
    share = 1.0 / np.maximum(replicas, 1)
    backward = sum_spans(backward_s)
    tables = StageTables(
        time_s=(sum_spans(forward_s) + backward)[..., None] * share,
        backward_s=backward[..., None] * share,
        sync_s=sum_spans(gradient_bytes)[..., None]
        * (2 * sync_s_per_byte * np.maximum(replicas - 1, 0) * share),
        cut_s=np.array([0.0, *cuts, 0.0]),
        fixed_bytes=np.zeros((layers + 1, layers + 1)),
        flight_bytes=np.zeros((layers + 1, layers + 1, num_devices + 1)),
    )
    result = solve_stages(tables, num_stages, num_micro_batches)
    assert result is not None, "every chain of enough layers has a partition"
    return result


def solve_stages(
    tables: StageTables, num_stages: int, num_micro_batches: int, ceiling_s: float = np.inf
) -> Partition | None:
    """Finds the best partition by tables.

    Args:
        tables: what stages take.
        num_stages: of the pipeline.
        num_micro_batches: of a step.
        ceiling_s: objective beyond which no solution is of interest.

    Returns:
        The partition; None if no stages fit into memory, or none is within the ceiling.
    """
    devices = tables.time_s.shape[2] - 1
    weight = num_micro_batches + 2 * num_stages - 2
    low_s, high_s = _bracket_period(tables, num_stages, devices)
    # Every solution's period is a stage's time or a cut's.
    longest_s = max(tables.time_s[np.isfinite(tables.time_s)].max(), tables.cut_s.max())
    best, bound_s = None, ceiling_s

    def look(low_s: float, limit_s: float, is_greedy: bool = False) -> None:
        """Looks for a better solution whose period is in an interval."""
        nonlocal best, bound_s
        stops, replicas = np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64)
        objective_s = find_stages(
            tables.time_s, tables.backward_s, tables.sync_s, tables.cut_s, tables.fixed_bytes,
            tables.flight_bytes, tables.limit_bytes, num_stages, num_micro_batches, float(weight),
            low_s, limit_s, bound_s, is_greedy, stops, replicas,
        )  # fmt: skip
        if objective_s < bound_s:
            stages = list(zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True))
            counts = replicas.tolist()
            best = Partition(stages, counts, _objective_s(tables, stages, counts, weight))
            bound_s = best.objective_s

    limit_s = high_s * (1 + _FIRST_WIDTH)
    look(low_s, limit_s)
    if bound_s > _GREEDY * weight * low_s:
        # Sums matter: a good solution of any period spares most states of the intervals.
        look(low_s, longest_s, is_greedy=True)
    while limit_s <= longest_s and weight * limit_s < bound_s:
        low_s, limit_s = limit_s, limit_s * (1 + _WIDTH)
        look(low_s, limit_s)
    return best


def sum_spans(values: Numbers) -> np.ndarray:
    """Sums of values i to j [i, j]; 0 where j <= i. Leading axes of `values` are kept at the end.

    Args:
        values: by layer, perhaps by other things too [layer, ...].
    """
    values = np.asarray(values, dtype=float)
    ends = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
    return np.maximum(ends[None, :] - ends[:, None], 0.0)


def _bracket_period(tables: StageTables, num_stages: int, num_devices: int) -> tuple[float, float]:
    """A period that no partition is below, and one for which enough devices are there."""

    def is_enough(limit_s: float) -> bool:
        fewest = count_fewest_devices(tables.time_s, tables.cut_s, num_stages, limit_s)
        return bool(fewest[-1, -1] <= num_devices)

    low_s = 0.0
    positive = tables.time_s[0, -1][np.isfinite(tables.time_s[0, -1])]
    high_s = max(float(positive[positive > 0].min(initial=np.inf)), 1e-12)
    if not np.isfinite(high_s):
        high_s = 1e-12
    while not is_enough(high_s):
        if high_s > 1e30:
            return 0.0, high_s
        low_s, high_s = high_s, 2 * high_s
    while high_s - low_s > max(_PRECISION * high_s, 1e-15):
        middle_s = (low_s + high_s) / 2
        if is_enough(middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s, high_s


def _objective_s(
    tables: StageTables,
    stages: Sequence[tuple[int, int]],
    replicas: Sequence[int],
    weight: float,
) -> float:
    period_s, exposed_s, hidden_s = 0.0, 0.0, 0.0
    for (first, stop), count in zip(stages, replicas, strict=True):
        period_s = max(period_s, tables.time_s[first, stop, count], tables.cut_s[first])
        exposed_s = max(exposed_s, tables.sync_s[first, stop, count] - hidden_s)
        hidden_s += tables.backward_s[first, stop, count]
    return float(weight * period_s + exposed_s)


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
    check_numbers(f"{name}forward_s", forward_s, layers)
    check_numbers(f"{name}backward_s", backward_s, layers)
    check_numbers(f"{name}cut_s", cut_s, layers - 1)
    if not 1 <= num_stages <= layers:
        raise ConfigError(
            f"num_stages: expected 1 to {layers}, one layer a stage or more, got {num_stages}; cut "
            "the model into more layers or ask for fewer stages"
        )
    if num_micro_batches < 1:
        raise ConfigError(f"num_micro_batches: expected 1 or more, got {num_micro_batches}")


def check_numbers(name: str, values: Numbers, count: int) -> None:
    """Refuses a list that has not as many numbers, or one below 0 or not finite."""
    numbers = np.asarray(values, dtype=float)
    if numbers.shape != (count,) or not (np.isfinite(numbers) & (numbers >= 0)).all():
        raise ConfigError(
            f"{name}: expected {count} finite numbers of 0 or more, one for each layer, got "
            f"{numbers.tolist()}"
        )
