"""Galvatron's planner: a parallel strategy for each layer of a model, for jobs of a fixed shape.

After Galvatron (arXiv 2211.13878): strategies are decision trees over the devices of a pipeline stage,
and the layers' strategies are chosen by dynamic programming over the memory that is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.errors import ConfigError

__all__ = ["LayerPlan", "ParallelStrategy", "plan_layers", "strategies"]

_KINDS = ("dp", "sdp", "tp")


@dataclass(frozen=True, kw_only=True)
class ParallelStrategy:
    """How the devices of a pipeline stage share a layer.

    Attributes:
        pp: pipeline stages.
        levels: kinds ("dp", "sdp" for sharded data parallelism, "tp") with their degrees, from the
            outermost to the innermost, whose devices are closest.
    """

    pp: int
    levels: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return "-".join([f"pp{self.pp}", *(f"{kind}{degree}" for kind, degree in self.levels)])


def strategies(num_devices: int, is_pruned: bool = True) -> list[ParallelStrategy]:
    """All decision trees over a power of two of devices.

    Args:
        num_devices: in all.
        is_pruned: leave out those that mix plain and sharded data parallelism, which one of them alone
            is never worse than.

    Raises:
        ConfigError: the number is not a power of two.
    """
    if num_devices < 1 or num_devices & (num_devices - 1):
        raise ConfigError(f"strategies: expected a power of two of devices, got {num_devices}")
    found, pp = [], num_devices
    while pp >= 1:
        for levels in _trees(num_devices // pp, _KINDS):
            kinds = {kind for kind, _ in levels}
            if not (is_pruned and {"dp", "sdp"} <= kinds):
                found.append(ParallelStrategy(pp=pp, levels=levels))
        pp //= 2
    return found


def _trees(devices: int, kinds: tuple[str, ...]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Levels of degrees of at least 2 whose product is `devices`, no kind twice."""
    if devices == 1:
        yield ()
        return
    for kind in kinds:
        rest = tuple(other for other in kinds if other != kind)
        degree = 2
        while degree <= devices:
            for inner in _trees(devices // degree, rest):
                yield ((kind, degree), *inner)
            degree *= 2


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlan:
    """A strategy for each layer.

    Attributes:
        choice: number of each layer's strategy [layer].
        seconds: of all layers, changes of strategy between them included.
        memory: units of memory in all.
    """

    choice: Int[np.ndarray, " layer"]
    seconds: float
    memory: int


def plan_layers(
    seconds: Float[np.ndarray, "layer strategy"],
    memory: Int[np.ndarray, "layer strategy"],
    change_s: Float[np.ndarray, "strategy strategy"],
    limit: int,
) -> LayerPlan:
    """The strategies of least seconds whose memory keeps within a limit; exact.

    C(l, e, s) = seconds(l, s) + min over s' of C(l - 1, e - memory(l, s), s') + change(s', s).

    Args:
        seconds: of a layer under a strategy.
        memory: whole units (megabytes, say) of a layer under a strategy.
        change_s: seconds to bring activations from one strategy's layout to another's.
        limit: units in all.

    Raises:
        ConfigError: shapes that differ, or nothing keeps within the limit.
    """
    layers, count = seconds.shape
    if memory.shape != (layers, count) or change_s.shape != (count, count):
        raise ConfigError(
            f"plan_layers: expected memory of {(layers, count)} and changes of {(count, count)}, got "
            f"{memory.shape} and {change_s.shape}"
        )
    # best[s, e]: least seconds of the layers so far with e units or fewer left over, the last one s.
    best = np.where(np.arange(limit + 1) >= memory[0][:, None], seconds[0][:, None], np.inf)
    came = np.zeros((layers, count, limit + 1), dtype=np.int16)
    for layer in range(1, layers):
        now = np.full_like(best, np.inf)
        for s in range(count):
            sums = best + change_s[:, s, None]
            origin = sums.argmin(axis=0)
            least = sums[origin, np.arange(limit + 1)]
            used = int(memory[layer, s])
            if used <= limit:
                now[s, used:] = least[: limit + 1 - used] + seconds[layer, s]
                came[layer, s, used:] = origin[: limit + 1 - used]
        best = now
    last = int(best[:, limit].argmin())
    total = float(best[last, limit])
    if not np.isfinite(total):
        raise ConfigError(
            f"plan_layers: expected a strategy for each layer within {limit} units of memory, got at "
            f"least {int(memory.min(axis=1).sum())} in all; give more memory"
        )
    choice, left = np.zeros(layers, dtype=np.int64), limit
    for layer in range(layers - 1, -1, -1):
        choice[layer] = last
        step = int(memory[layer, last])
        last = int(came[layer, last, left])
        left -= step
    return LayerPlan(
        choice=choice, seconds=total, memory=int(memory[np.arange(layers), choice].sum())
    )
