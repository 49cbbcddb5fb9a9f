"""The plan of one captured graph: the order of its operations and what it promises."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path

from lancet.graph.operations import LaunchOrder, Op, OpGraph
from lancet.planner.all_reduces import (
    fit_all_reduces,
    list_all_reduces_last,
    list_averages_last,
)
from lancet.planner.batch_cut import MAX_PARTS, BatchCut
from lancet.planner.fusion import Fusion, fuse, replay_groups
from lancet.planner.groups import contract_groups, expand_groups, fuse_tensors
from lancet.planner.memory import KeptTensor, LiveBytes
from lancet.planner.networks import scale_communication
from lancet.planner.weight_gradients import Reordering, schedule
from lancet.simulator import simulate
from shared.errors import ConfigError, DataError
from shared.files import read_json, write_atomically

__all__ = ["Plan", "load_plans", "make_plan", "replan", "save_plans"]

_FORMAT = 3
# How often the slack is halved for an order that some rank has no memory for.
_HALVINGS = 4
# Seconds of the search for groups in each order that is tried, while the other ranks wait.
_SEARCH_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What planning needs to know of a graph's all-reduces.

    Attributes:
        latency_s: seconds that an all-reduce of nothing takes.
        dtypes: of the all-reduces that may run in groups, by name.
        num_ranks: ranks that add up.
    """

    latency_s: float = 0.0
    dtypes: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An order of a graph's operations and groups of its all-reduces, the same on all ranks.

    Attributes:
        graph: name of the graph.
        digest: of the graph, as captured.
        torch: version of torch that captured it.
        ops: the operations in captured order, with the seconds that were planned with.
        order: names of all operations in launch order.
        groups: names of all-reduces that run as one, neighbours in `order`.
        sums: what was planned with to choose groups.
        cut: the parts of the batch that the graph has.
        before_s: replayed seconds of the captured order.
        makespan_s: replayed seconds of this order.
        exposed_before_s: replayed seconds of the captured order in which nothing is computed.
        exposed_s: the same of this order.
    """

    graph: str
    digest: str
    torch: str
    ops: tuple[Op, ...]
    order: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    sums: Sums
    cut: BatchCut
    before_s: float
    makespan_s: float
    exposed_before_s: float
    exposed_s: float

    @property
    def launches(self) -> LaunchOrder:
        """The order with its groups."""
        return LaunchOrder(self.order, self.groups)

    @property
    def fused_ops(self) -> tuple[Op, ...]:
        """The operations in launch order, each group as one."""
        return tuple(contract_groups(self.ops, self.launches, self.sums.latency_s))

    @property
    def ordered_ops(self) -> tuple[Op, ...]:
        """The operations in launch order."""
        by_name = {op.name: op for op in self.ops}
        return tuple(by_name[name] for name in self.order)

    @property
    def moved(self) -> dict[str, tuple[str, ...]]:
        """For each collective, the operations launched after it that were captured before it."""
        place = {op.name: number for number, op in enumerate(self.ops)}
        kinds = {op.name: op.kind for op in self.ops}
        rank = {name: number for number, name in enumerate(self.order)}
        # An operation moved behind a collective: captured before it and launched after it, and
        # listed with the last such collective.
        moved: dict[str, list[str]] = {name: [] for name in self.order if kinds[name] != "compute"}
        collectives = list(moved)
        for name in self.order:
            passed = [
                other
                for other in collectives
                if kinds[name] == "compute"
                and place[name] < place[other]
                and rank[name] > rank[other]
            ]
            if passed:
                moved[passed[-1]].append(name)
        return {name: tuple(names) for name, names in moved.items()}

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; one of format 1 has no groups, one of format 2 no parts.

        Raises:
            DataError: the text is no plan of this format.
        """
        values = json.loads(text)
        version = values.pop("format", None) if isinstance(values, dict) else None
        if version == 1:
            values |= {"groups": [], "sums": {}}
        if version in (1, 2):
            values |= {"cut": {}}
        elif version != _FORMAT:
            raise DataError(
                f"expected a plan of format {_FORMAT}, got format {version!r}; plan again with this "
                f"version of lancet"
            )
        expected = {field.name for field in fields(cls)}
        if set(values) != expected:
            raise DataError(
                f"expected a plan with {', '.join(sorted(expected))}, got "
                f"{', '.join(sorted(values))}; plan again"
            )
        ops = tuple(
            Op(op["name"], op["kind"], op["time_s"], tuple(op["after"])) for op in values.pop("ops")
        )
        groups = tuple(tuple(group) for group in values.pop("groups"))
        order, sums = tuple(values.pop("order")), Sums(**values.pop("sums"))
        cut = BatchCut.from_values(values.pop("cut"))
        return cls(ops=ops, order=order, groups=groups, sums=sums, cut=cut, **values)


def make_plan(
    graph: str,
    digest: str,
    torch_version: str,
    ops: Sequence[Op],
    tensors: Sequence[Sequence[KeptTensor]],
    memory_bytes: int | None,
    sums: Sums | None = None,
    cut: BatchCut | None = None,
) -> Plan:
    """Plans a graph: weight gradients beside all-to-alls, and all-reduces in groups.

    All-reduces that no all-to-all waits for are tried at their captured turns, behind all all-to-alls,
    and, once weight gradients are moved, between these. In each of these orders neighbours are
    fused, and all-reduces are put between all-to-alls once more, in the best one's groups. What
    replays fastest is taken. So moves and groups are not chosen at once, as DisCo (arXiv 2209.12769)
    does.

    Args:
        graph: its name.
        digest: of the graph.
        torch_version: of the torch that captured it.
        ops: in captured order.
        tensors: of each rank.
        memory_bytes: bytes by which each rank's peak may exceed that of the captured order; None for
            no limit.
        sums: of its all-reduces; None: they run one by one.
        cut: the parts of the batch that the graph has, whose all-to-alls need not keep their captured
            order; None: it has none.
    """
    sums = Sums() if sums is None else sums
    cut = BatchCut() if cut is None else cut
    keeps_order = not cut.ranges
    by_name = {op.name: op for op in ops}
    orders = [_schedule_within(ops, ops, tensors, memory_bytes, keeps_order)]
    if any(op.kind == "all_reduce" for op in ops):
        last = _schedule_within(list_all_reduces_last(ops), ops, tensors, memory_bytes, keeps_order)
        names = by_name if last is None else last.order
        fitted = fit_all_reduces([by_name[name] for name in names])
        orders += [last, _schedule_within(fitted, ops, tensors, memory_bytes, keeps_order)]
        if sums.latency_s and sums.dtypes:
            late = list_averages_last(ops)
            orders.append(_schedule_within(late, ops, tensors, memory_bytes, keeps_order))
    before_s = simulate(ops).makespan_s
    candidates = [
        (LaunchOrder(result.order), result.makespan_s) for result in orders if result is not None
    ]
    if sums.latency_s and sums.dtypes:
        limits = _MemoryLimits(ops, tensors, memory_bytes, sums.num_ranks)
        candidates += _list_fused(ops, [launches.names for launches, _ in candidates], sums, limits)
    best, makespan_s = LaunchOrder(tuple(by_name)), before_s
    for launches, launches_s in candidates:
        if launches_s < makespan_s:
            best, makespan_s = launches, launches_s
    compute_s = sum(op.time_s for op in ops if op.kind == "compute")
    return Plan(
        graph=graph,
        digest=digest,
        torch=torch_version,
        ops=tuple(ops),
        order=best.names,
        groups=best.groups,
        sums=sums,
        cut=cut,
        before_s=before_s,
        makespan_s=makespan_s,
        exposed_before_s=max(before_s - compute_s, 0.0),
        exposed_s=max(makespan_s - compute_s, 0.0),
    )


def _list_fused(
    ops: Sequence[Op], orders: Iterable[tuple[str, ...]], sums: Sums, limits: _MemoryLimits
) -> list[tuple[LaunchOrder, float]]:
    """Each order with its best groups, and the best of these with all-reduces put elsewhere."""
    by_name = {op.name: op for op in ops}
    results = []
    for order in orders:
        listing = [by_name[name] for name in order]
        fusion = fuse(listing, latency_s=sums.latency_s, time_limit_s=_SEARCH_S, dtypes=sums.dtypes)
        results += _split_groups(listing, fusion, sums, limits)
    if results:
        best, _ = min(results, key=lambda result: result[1])
        contracted = contract_groups(ops, best, sums.latency_s)
        fitted = schedule(fit_all_reduces(list_all_reduces_last(contracted)))
        names, groups = expand_groups(fitted.order, best.groups)
        listing = [by_name[name] for name in names]
        fusion = replay_groups(listing, groups, latency_s=sums.latency_s)
        results += _split_groups(listing, fusion, sums, limits)
    return results


def _split_groups(
    listing: Sequence[Op], fusion: Fusion, sums: Sums, limits: _MemoryLimits
) -> list[tuple[LaunchOrder, float]]:
    """Halves the largest groups until all ranks have the memory; nothing if that does not help."""
    while True:
        names = tuple(name for group in fusion.groups for name in group)
        groups = [group for group in fusion.groups if len(group) > 1]
        launches = LaunchOrder(names, tuple(groups))
        if limits.allow(launches):
            return [(launches, fusion.makespan_s)]
        if not groups:
            return []
        largest = max(groups, key=limits.count_bytes)
        half = len(largest) // 2
        groups[groups.index(largest) : groups.index(largest) + 1] = largest[:half], largest[half:]
        fusion = replay_groups(listing, groups, latency_s=sums.latency_s)


class _MemoryLimits:
    """How much memory each rank has for a launch order."""

    def __init__(
        self,
        ops: Sequence[Op],
        tensors: Sequence[Sequence[KeptTensor]],
        memory_bytes: int | None,
        num_ranks: int,
    ) -> None:
        self._ops, self._num_ranks = ops, num_ranks
        self._tensors = () if memory_bytes is None else tensors
        graph = OpGraph(ops)
        self._limits = [
            LiveBytes(graph, own).peak_bytes(range(len(ops))) + (memory_bytes or 0)
            for own in self._tensors
        ]
        self._sum_bytes = {t.maker: t.num_bytes for own in self._tensors for t in own}

    def count_bytes(self, group: Iterable[str]) -> int:
        """Bytes that a group's all-reduces add up."""
        return sum(self._sum_bytes.get(name, 0) for name in group)

    def allow(self, launches: LaunchOrder) -> bool:
        """Whether no rank exceeds its limit."""
        graph = OpGraph(contract_groups(self._ops, launches, 0.0))
        return all(
            LiveBytes(graph, fuse_tensors(own, self._ops, launches, self._num_ranks)).peak_bytes(
                range(len(graph.ops))
            )
            <= limit_bytes
            for own, limit_bytes in zip(self._tensors, self._limits, strict=True)
        )


def _schedule_within(
    variant: Sequence[Op],
    ops: Sequence[Op],
    tensors: Sequence[Sequence[KeptTensor]],
    memory_bytes: int | None,
    keeps_order: bool,
) -> Reordering | None:
    """An order whose peak on each rank is within the limit; None if halving the slack finds none."""
    if memory_bytes is None:
        return schedule(variant, keeps_order=keeps_order)
    graph = OpGraph(ops)
    ranks = [LiveBytes(graph, rank_tensors) for rank_tensors in tensors]
    captured = range(len(ops))
    merged, slack_bytes = _merge(tensors), memory_bytes
    for _ in range(_HALVINGS):
        result = schedule(variant, tensors=merged, slack_bytes=slack_bytes, keeps_order=keeps_order)
        order = [graph.index[name] for name in result.order]
        excess_bytes = max(rank.peak_bytes(order) - rank.peak_bytes(captured) for rank in ranks)
        if excess_bytes <= memory_bytes:
            return result
        slack_bytes //= 2
    return None


def _merge(tensors: Sequence[Sequence[KeptTensor]]) -> list[KeptTensor]:
    """Each tensor with its bytes on the rank where it is largest.

    A rank without rows has empty tensors, which it may take for views of one another.
    """
    merged: dict[tuple[str | None, int], KeptTensor] = {}
    for rank_tensors in tensors:
        num_made: Counter[str | None] = Counter()
        for tensor in rank_tensors:
            key = tensor.maker, num_made[tensor.maker]
            num_made[tensor.maker] += 1
            other = merged.get(key, tensor)
            merged[key] = replace(
                tensor,
                num_bytes=max(tensor.num_bytes, other.num_bytes),
                readers=tuple({*tensor.readers, *other.readers}),
            )
    return list(merged.values())


def replan(plan: Plan, network: float) -> Plan:
    """Plans the same operations for a network that is `network` times as fast, without a memory limit.

    Raises:
        ConfigError: the network's factor is not positive.
    """
    if not network > 0:
        raise ConfigError(f"network: expected more than 0, got {network:g}; 2 is twice as fast")
    ops = scale_communication(plan.ops, 1 / network)
    sums = replace(plan.sums, latency_s=plan.sums.latency_s / network)
    return make_plan(plan.graph, plan.digest, plan.torch, ops, [], None, sums, plan.cut)


def save_plans(path: str | Path, plans: Iterable[Plan]) -> None:
    """Writes plans as JSON, the file replaced at once."""
    write_atomically(path, json.dumps({"plans": [json.loads(plan.to_json()) for plan in plans]}))


def load_plans(path: str | Path) -> list[Plan]:
    """Reads a file of `save_plans`.

    Raises:
        DataError: there is none, it holds no plans of this format, or a plan's order is not one of
            its operations.
    """
    tree = read_json(path, "a plan")
    if not isinstance(tree, dict) or not isinstance(tree.get("plans"), list):
        raise DataError(
            f"{path}: expected a plan of format {_FORMAT} with a list of plans, got other JSON; name a "
            f"file of `lancet profile` or Backend.save_plan"
        )
    try:
        plans = [Plan.from_json(json.dumps(plan)) for plan in tree["plans"]]
        for plan in plans:
            _check(plan)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: expected a plan of format {_FORMAT}, got values of other names or types "
            f"({type(error).__name__}: {error}); plan again"
        ) from None
    return plans


def _check(plan: Plan) -> None:
    """Refuses an order that is not one of the plan's operations, and seconds that cannot be."""
    if sorted(plan.order) != sorted(op.name for op in plan.ops):
        raise DataError(
            f"{plan.graph}: expected an order of the plan's {len(plan.ops)} operations, got "
            f"{len(plan.order)} names, some of others; plan again"
        )
    OpGraph(plan.ops)
    OpGraph(plan.ordered_ops)
    rank = {name: number for number, name in enumerate(plan.order)}
    members = [name for group in plan.groups for name in group]
    for group in plan.groups:
        first = rank.get(group[0], 0) if group else 0
        dtypes = {plan.sums.dtypes.get(name) for name in group}
        is_row = group == plan.order[first : first + len(group)]
        is_apart = len(group) > 1 and all(members.count(name) == 1 for name in group)
        if not is_apart or not is_row or len(dtypes) > 1 or None in dtypes:
            raise DataError(
                f"{plan.graph}: expected groups of two or more all-reduces of one dtype, in a row, each "
                f"in one group, got {', '.join(group)}; plan again"
            )
    OpGraph(plan.fused_ops)
    ends = [0, *(stop for _, stop, _ in plan.cut.ranges)]
    if not all(
        end <= first < stop and 1 < num_parts <= MAX_PARTS
        for end, (first, stop, num_parts) in zip(ends, plan.cut.ranges, strict=False)
    ):
        raise DataError(
            f"{plan.graph}: expected ranges one after another, each in 2 to {MAX_PARTS} parts, got "
            f"{plan.cut.ranges}; plan again"
        )
    seconds = (
        plan.sums.latency_s,
        plan.before_s,
        plan.makespan_s,
        plan.exposed_before_s,
        plan.exposed_s,
    )
    if not all(isfinite(value) and value >= 0 for value in seconds):
        raise DataError(
            f"{plan.graph}: expected finite seconds of 0 or more, got {seconds}; plan again"
        )
