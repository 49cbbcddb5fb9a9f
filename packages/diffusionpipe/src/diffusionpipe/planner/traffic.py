"""Which values travel from which stage to which: follows from what layers read and write.

A value goes from the stage that writes it directly to each device that reads it, once; a skip that
begins and ends on one device does not travel. Gradients take the same routes back. A frozen output
goes from the rank that encodes a sample to each rank whose inputs depend on it. Planner and runtime
both use these functions, so that their bytes agree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from diffusionpipe.planner.plan import Action, Kind, Order

if TYPE_CHECKING:
    from diffusionpipe.planner.plan import Plan

__all__ = [
    "MessageKind",
    "PlannedMessage",
    "Route",
    "Rows",
    "find_feeds",
    "find_routes",
    "find_stage_feeds",
    "join_ranges",
    "list_messages",
]

Keys = Sequence[Sequence[str]]
Rows = tuple[int, int]
"""The first row of a batch, and the one after the last."""

MessageKind = Literal["values", "gradients", "frozen"]
"""Values go to later stages, gradients back, frozen outputs to the next step's readers."""

_ESTIMATE = "estimate"
"""The input of a second prediction that the first one gives."""


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


class PlannedMessage(NamedTuple):
    """Values that one rank sends to another, once a step.

    Attributes:
        sent_by: the sender's action that completes it.
        used_by: the receiver's action that needs it; None for frozen outputs, which the next step
            needs.
        sender, receiver: ranks.
        keys: names of the values.
        ranges: rows of the batch.
        backbone: whose values these are; -1 for frozen outputs.
        number: position in the order of a program's messages; -1 outside of programs.
    """

    sent_by: Action
    used_by: Action | None
    sender: int
    receiver: int
    keys: tuple[str, ...]
    ranges: tuple[Rows, ...]
    backbone: int
    number: int = -1

    @property
    def kind(self) -> MessageKind:
        """Which of the three kinds of values it carries."""
        if self.used_by is None:
            return "frozen"
        return "gradients" if self.sent_by.kind == "backward" else "values"

    @property
    def stages(self) -> tuple[int, int]:
        """Virtual stages of both ends; -1 for frozen outputs."""
        return self.sent_by.stage, -1 if self.used_by is None else self.used_by.stage

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return sum(stop - first for first, stop in self.ranges)

    @property
    def label(self) -> str:
        """What errors and traces call it."""
        edge = f"rank {self.sender} to {self.receiver}"
        if self.used_by is None:
            first, stop = self.ranges[0][0], self.ranges[-1][1]
            names = ", ".join(self.keys)
            return f"{names} of samples {first} to {stop - 1} of the next batch, {edge}"
        source, target = self.stages
        what = "estimates" if self.sent_by.kind == "estimate" else self.kind
        return (
            f"{what} of micro-batch {self.sent_by.micro_batch}, stage {source} to {target}, {edge}"
        )


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
    stage_of = [v for v, (first, stop) in enumerate(spans) for _ in range(first, stop)]
    first_reader: dict[tuple[str, tuple[int, ...]], int] = {}
    for layer, keys in enumerate(reads):
        for key in keys:
            first_reader.setdefault((key, devices[stage_of[layer]]), stage_of[layer])
    # Keys by (source, target), in the order written.
    routes: dict[tuple[int, int], list[str]] = {}
    for layer, keys in enumerate(writes):
        source = stage_of[layer]
        for key in keys:
            for ranks in dict.fromkeys(devices):
                target = first_reader.get((key, ranks))
                if target is not None and ranks != devices[source]:
                    routes.setdefault((source, target), []).append(key)
    return tuple(
        Route(first_stage + source, first_stage + target, tuple(keys))
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


def find_stage_feeds(plan: Plan, chains: Sequence[Any]) -> list[tuple[str, ...]]:
    """Finds the frozen outputs, and "estimate", that each virtual stage of a plan needs."""
    feeds: list[tuple[str, ...]] = [()] * len(plan.spans)
    for backbone, chain in enumerate(chains):
        own = plan.list_backbone(backbone)
        needed = find_feeds(chain.reads, chain.writes, [plan.spans[v] for v in own], chain.feeds)
        for v, names in zip(own, needed, strict=True):
            feeds[v] = names
    return feeds


def list_messages(
    plan: Plan,
    chains: Sequence[Any],
    components: Mapping[str, Sequence[str]],
    order: Order,
    senders: Collection[int] | None = None,
) -> Iterator[PlannedMessage]:
    """Lists the messages of a step.

    Args:
        plan: plan.
        chains: of each backbone, its `reads`, `writes`, `feeds` and `differentiable` names.
        components: names of each frozen component's outputs.
        order: the plan's order, or that of a step with a self-conditioning pass.
        senders: ranks whose messages are listed; all by default.
    """
    feeds = find_stage_feeds(plan, chains)
    senders = range(plan.num_ranks) if senders is None else senders
    has_estimate = any(action.kind == "estimate" for actions in order for action in actions)
    for backbone, chain in enumerate(chains):
        own = plan.list_backbone(backbone)
        spans, devices = [plan.spans[v] for v in own], [plan.devices[v] for v in own]
        routes = find_routes(chain.reads, chain.writes, spans, devices, first_stage=own[0])
        for source, target, keys in routes:
            back = tuple(key for key in keys if key in chain.differentiable)
            yield from _match(
                plan, senders, backbone, ("forward", source), ("forward", target), keys
            )
            if back:
                yield from _match(
                    plan, senders, backbone, ("backward", target), ("backward", source), back
                )
            if has_estimate:
                yield from _match(
                    plan, senders, backbone, ("estimate", source), ("estimate", target), keys
                )
        # The estimate goes from the last stage to the first on each device that needs it.
        readers = {plan.devices[v]: v for v in reversed(own) if _ESTIMATE in feeds[v]}
        for v in readers.values() if has_estimate else ():
            yield from _match(
                plan, senders, backbone, ("estimate", own[-1]), ("forward", v), ("output",)
            )
    yield from _list_frozen(plan, senders, feeds, components, order)


def join_ranges(ranges: Iterable[Rows]) -> list[Rows]:
    """Returns the same rows in as few ranges as possible, in order."""
    joined: list[Rows] = []
    for first, stop in sorted(set(ranges)):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((first, stop))
    return joined


def _match(
    plan: Plan,
    senders: Collection[int],
    backbone: int,
    sent_by: tuple[Kind, int],
    used_by: tuple[Kind, int],
    keys: tuple[str, ...],
) -> Iterator[PlannedMessage]:
    """Yields the messages between passes of two stages, of all micro-batches."""
    sources, targets = plan.devices[sent_by[1]], plan.devices[used_by[1]]
    num_sources, num_targets = (len(own) // plan.num_groups for own in (sources, targets))
    # Both stages' ranks share a group's rows of a micro-batch evenly, in order.
    rows = plan.batch_size // (plan.num_groups * plan.num_micro_batches)
    given, needed = rows // num_sources, rows // num_targets
    pairs = []
    for index, sender in enumerate(sources):
        if sender not in senders:
            continue
        group, own = divmod(index, num_sources)
        first, stop = own * given, (own + 1) * given
        base = group * rows * plan.num_micro_batches
        for other in range(first // needed, -(-stop // needed)):
            receiver = targets[group * num_targets + other]
            if receiver != sender:
                common = max(first, other * needed), min(stop, (other + 1) * needed)
                pairs.append((sender, receiver, base + common[0], base + common[1]))
    for m in range(plan.num_micro_batches):
        ends = Action(*sent_by, m), Action(*used_by, m)
        for sender, receiver, first, stop in pairs:
            ranges = ((first + m * rows, stop + m * rows),)
            yield PlannedMessage(*ends, sender, receiver, keys, ranges, backbone)


def _list_frozen(
    plan: Plan,
    senders: Collection[int],
    feeds: Sequence[tuple[str, ...]],
    components: Mapping[str, Sequence[str]],
    order: Order,
) -> Iterator[PlannedMessage]:
    jobs = [(r, action) for r in senders for action in order[r] if action.kind == "encode"]
    if not jobs:
        return
    names, needed = [], []
    for rank in range(plan.num_ranks):
        stages = plan.stages_of(rank)
        names.append({name for stage in stages for name in feeds[stage]})
        # A rank's stages have the same rows.
        rows = [plan.samples(stages[0], m, rank) for m in range(plan.num_micro_batches)]
        needed.append(join_ranges((each.start, each.stop) for each in rows))
    # Few of all ranks read a row, as copies of the pipeline and replicas share the batch.
    readers: list[list[int]] = [[] for _ in range(plan.batch_size)]
    for reader, ranges in enumerate(needed):
        for first, stop in ranges:
            for row in range(first, stop):
                readers[row].append(reader)
    for owner, action in jobs:
        first, stop = action.samples
        for reader in sorted({reader for own in readers[first:stop] for reader in own}):
            keys = tuple(key for key in components[action.name] if key in names[reader])
            if keys and reader != owner:
                ranges = needed[reader]
                low = bisect_right(ranges, first, key=itemgetter(1))
                high = bisect_left(ranges, stop, key=itemgetter(0))
                common = tuple(
                    (max(begin, first), min(end, stop)) for begin, end in ranges[low:high]
                )
                yield PlannedMessage(action, None, owner, reader, keys, common, -1)
