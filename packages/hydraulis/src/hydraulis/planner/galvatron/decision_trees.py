"""Strategies as decision trees over the devices of a pipeline stage, after Galvatron (arXiv 2211.13878)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared.errors import ConfigError

__all__ = ["ParallelStrategy", "strategies"]

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
