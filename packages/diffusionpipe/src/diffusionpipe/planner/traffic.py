"""Which values travel from which stage to which: follows from what layers read and write.

A value goes from the stage that writes it directly to each device that reads it, once; a skip that
begins and ends on one device does not travel. Gradients take the same routes back. Planner and
runtime both use these functions, so that their bytes agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from diffusionpipe.planner.plan import Plan

__all__ = ["Route", "find_feeds", "find_routes", "match_rows"]

Keys = Sequence[Sequence[str]]


class Route(NamedTuple):
    """Values that travel together, one message a micro-batch and pair of ranks with common rows.

    Attributes:
        source: virtual stage that writes them.
        target: first virtual stage on the reading ranks that reads one of them. Its backward pass is
            the last one there, so that gradients go back behind it.
        keys: names of the values, in the order written.
    """

    source: int
    target: int
    keys: tuple[str, ...]


def find_routes(
    reads: Keys,
    writes: Keys,
    spans: Sequence[tuple[int, int]],
    devices: Sequence[tuple[int, ...]],
    *,
    first_stage: int = 0,
) -> tuple[Route, ...]:
    """Finds the routes of one backbone's values.

    Args:
        reads, writes: names of values by layer.
        spans: layers of each stage of this backbone, in the order of its forward pass.
        devices: ranks of each of these stages.
        first_stage: number of the first of these stages in the plan.

    Returns:
        Routes, sorted by source and target. Stages on the same ranks need none.
    """
    # Keys by (source, target), counted from this backbone's first stage.
    routes: dict[tuple[int, int], list[str]] = {}
    stage_of = [v for v, (first, stop) in enumerate(spans) for _ in range(first, stop)]
    source_of = {key: stage_of[layer] for layer, keys in enumerate(writes) for key in keys}
    sent: set[tuple[str, tuple[int, ...]]] = set()
    for layer, keys in enumerate(reads):
        target = stage_of[layer]
        for key in keys:
            source = source_of.get(key)
            if source is None or devices[source] == devices[target]:
                continue
            if (key, devices[target]) not in sent:
                sent.add((key, devices[target]))
                routes.setdefault((source, target), []).append(key)
    rank_of = {key: i for i, key in enumerate(key for keys in writes for key in keys)}
    return tuple(
        Route(
            first_stage + source, first_stage + target, tuple(sorted(keys, key=rank_of.__getitem__))
        )
        for (source, target), keys in sorted(routes.items())
    )


def find_feeds(
    reads: Keys,
    writes: Keys,
    spans: Sequence[tuple[int, int]],
    feeds: Mapping[str, Sequence[str]],
) -> tuple[tuple[str, ...], ...]:
    """Finds the frozen outputs that each stage's ranks need, for their inputs and for the target.

    Args:
        reads, writes: names of values by layer.
        spans: layers of each stage.
        feeds: frozen outputs on which an input, or "target", depends.

    Returns:
        Names of frozen outputs by stage, sorted.
    """
    written = {key for keys in writes for key in keys}
    by_stage = []
    for first, stop in spans:
        inputs = {key for keys in reads[first:stop] for key in keys} - written
        if any("output" in keys for keys in writes[first:stop]):
            inputs.add("target")
        by_stage.append(tuple(sorted({name for key in inputs for name in feeds.get(key, ())})))
    return tuple(by_stage)


def match_rows(
    plan: Plan, source: int, target: int, micro_batch: int
) -> Iterator[tuple[int, int, range]]:
    """Yields (sender, receiver, common rows) of a micro-batch between two stages.

    Args:
        plan: plan.
        source, target: virtual stages.
        micro_batch: index of the micro-batch.
    """
    if len(plan.devices[source]) == len(plan.devices[target]):
        for sender, receiver in zip(plan.devices[source], plan.devices[target], strict=True):
            yield sender, receiver, plan.samples(source, micro_batch, sender)
        return
    for sender in plan.devices[source]:
        rows = plan.samples(source, micro_batch, sender)
        for receiver in plan.devices[target]:
            others = plan.samples(target, micro_batch, receiver)
            common = range(max(rows.start, others.start), min(rows.stop, others.stop))
            if common:
                yield sender, receiver, common
