"""Replays a plan on a cluster: passes, messages, sums and frozen parts of all ranks.

A rank runs its list as it stands. A message starts when the pass or job that makes it ends, and
takes its turn at its sender's and its receiver's host; ranks of one host have a link of their own
for each pair. Copies of a pipeline run the same lists: one of them is replayed, and where several send
from one host at the same time, its messages take that many times as long. Sums go around a ring by buckets, which start during the last backward pass.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from functools import cached_property

from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.traffic import PlannedMessage, list_messages
from shared.topology import Link, Operation, Replay, Timeline
from shared.topology.cost import ring_all_reduce_s

__all__ = ["PlanReplay", "list_patterns", "list_queues"]


class PlanReplay:
    """A plan with the seconds of its passes and messages.

    Operations are named (action, rank, piece) for passes and jobs, ("message", number), ("sum", stage,
    bucket), ("agreement",) and ("step", rank); ranks are the queues "rank 0", ... All ranks agree at
    the end of a step, so that a step is replayed alone.

    Args:
        plan: plan with its orders.
        inputs: profile and cluster.
        has_estimate: replay a step that predicts twice, by the plan's other order.
        group: the copy of the pipeline that is replayed.
    """

    def __init__(
        self, plan: Plan, inputs: PlanInputs, *, has_estimate: bool = False, group: int = 0
    ) -> None:
        self._plan, self._inputs = plan, inputs
        self._order = plan.estimate_order if has_estimate else plan.order
        chains, components = inputs.profile.chains, inputs.profile.frozen_outputs
        self._groups = [plan.list_group(each) for each in range(plan.num_groups)]
        self.ranks = self._groups[group]
        messages = list_messages(plan, chains, components, self._order, self.ranks)
        self.messages = tuple(messages)
        self._buckets = [self._cut_buckets(stage) for stage in range(len(plan.spans))]
        self._edges: dict[tuple[int, int], tuple[Link, str | tuple[str, str], int]] = {}
        self._sends: dict[tuple[int, int, int], tuple[str | tuple[str, str], float]] = {}
        self._pass_s: dict[tuple[str, int, bool], list[float]] = {}

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each message."""
        profile = self._inputs.profile
        tables = [*(chain.value_bytes for chain in profile.chains), profile.frozen_bytes]
        kinds = {(each.backbone, each.keys) for each in self.messages}
        row_bytes = {kind: sum(tables[kind[0]][key] for key in kind[1]) for kind in kinds}
        return [each.num_rows * row_bytes[each.backbone, each.keys] for each in self.messages]

    @cached_property
    def _lost_s(self) -> dict[tuple[int, Action], float]:
        """Seconds of computation that messages cost, by rank and action: half at each end.

        A frozen output is used in the next step; there its sender bears the whole.
        """
        profile, lost_s = self._inputs.profile, defaultdict[tuple[int, Action], float](float)
        for message, size in zip(self.messages, self.sizes, strict=True):
            seconds = profile.message_s + size * profile.message_s_per_byte
            used_by = message.used_by
            lost_s[message.sender, message.sent_by] += seconds / (1 if used_by is None else 2)
            if used_by is not None:
                lost_s[message.receiver, used_by] += seconds / 2
        return lost_s

    @property
    def mean_message_s(self) -> float:
        """Mean seconds of the messages between stages; 0 without any."""
        seconds = [
            self._find_edge(message)[0].time_s(size)
            for message, size in zip(self.messages, self.sizes, strict=True)
            if message.used_by is not None
        ]
        return sum(seconds) / max(len(seconds), 1)

    def run(self, *, is_passes_only: bool = False) -> Timeline:
        """Replays a step.

        Args:
            is_passes_only: leave out the agreement and the optimizer steps.
        """
        operations = list(self._list_operations(is_passes_only))
        ranks = {f"rank {rank}": "given" for rank in self.ranks}
        held = dict.fromkeys(operation.queue for operation in operations)
        links = {name: "readiness" for queue in held for name in list_queues(queue)}
        return Replay(operations, links | ranks).run()  # type: ignore[arg-type]

    def sum_seconds(self, rank: int) -> tuple[float, float]:
        """Seconds of a step in which a rank computes passes and the optimizer step, and encodes."""
        pass_s, encode_s = self._inputs.find_update_s(self._plan, rank), 0.0
        for action in self._order[rank]:
            if action.kind == "encode":
                encode_s += sum(self._list_pieces_s(action, rank))
            elif action.kind not in ("sum", "step"):
                pass_s += sum(self._list_pieces_s(action, rank))
        return pass_s, encode_s

    def list_sends(self) -> list[Operation]:
        """All messages, with their seconds on their links, by the name of the message."""
        pairs = zip(self.messages, self.sizes, strict=True)
        return [Operation(each, *self._find_send(each, size)) for each, size in pairs]

    def count_edges(self) -> dict[tuple[int, int], int]:
        """Counts a step's bytes by sender and receiver, without sums."""
        own: dict[tuple[int, int], int] = defaultdict(int)
        for message, size in zip(self.messages, self.sizes, strict=True):
            own[message.sender, message.receiver] += size
        index = {rank: i for i, rank in enumerate(self.ranks)}
        # All copies of the pipeline send the same.
        return {
            (ranks[index[sender]], ranks[index[receiver]]): num_bytes
            for (sender, receiver), num_bytes in own.items()
            for ranks in self._groups
        }

    def count_sum_bytes(self, rank: int) -> int:
        """Counts a step's bytes that a rank sends in sums of gradients."""
        total = 0
        for stage in self._plan.stages_of(rank):
            replicas = len(self._plan.devices[stage])
            total += 2 * (replicas - 1) * sum(size for size, _ in self._buckets[stage]) // replicas
        return total

    def _list_operations(self, is_passes_only: bool) -> Iterator[Operation]:
        needs: dict[tuple[int, Action], list[Hashable]] = defaultdict(list)
        for number, (message, size) in enumerate(zip(self.messages, self.sizes, strict=True)):
            last_piece = len(self._list_buckets(message.sent_by)) - 1
            sent_by = message.sent_by, message.sender, last_piece
            name = ("message", number)
            yield Operation(name, *self._find_send(message, size), [sent_by])
            if message.used_by is not None:
                needs[message.receiver, message.used_by].append(name)
        last: list[Hashable] = []
        for rank in self.ranks:
            names: list[Hashable] = []
            for action in self._order[rank]:
                if action.kind in ("sum", "step"):
                    continue
                after = needs[rank, action]
                for piece, seconds in enumerate(self._list_pieces_s(action, rank)):
                    names.append((action, rank, piece))
                    yield Operation(names[-1], f"rank {rank}", seconds, [] if piece else after)
            last.append(names[-1])
        sums = list(self.list_sums())
        yield from sums
        if not is_passes_only:
            cluster = self._inputs.cluster
            link = cluster.network if len(cluster.hosts) > 1 else cluster.hosts[0].link
            # Two small all-reduces: on batches before the step, on losses behind it. A rank takes part
            # in the latter when its sums are complete and its messages are sent.
            agree_s = 4 * (self._plan.num_ranks - 1).bit_length() * float(link.alpha_s)
            last += [operation.name for operation in sums]
            last += [
                ("message", number)
                for number, message in enumerate(self.messages)
                if message.used_by is None
            ]
            yield Operation(("agreement",), "agreement", agree_s, last)
            for rank in self.ranks:
                update_s = self._inputs.find_update_s(self._plan, rank)
                yield Operation(("step", rank), f"rank {rank}", update_s, [("agreement",)])

    def list_sums(self) -> Iterator[Operation]:
        """Yields the sum of each bucket, named ("sum", stage, bucket), behind its backward pass."""
        plan, cluster = self._plan, self._inputs.cluster
        for stage, ranks in enumerate(plan.devices):
            if len(ranks) == 1:
                continue
            link = self._inputs.find_ring_link(ranks)
            hosts = sorted({cluster.host(rank).name for rank in ranks})
            queues = tuple(f"{host} {way}" for host in hosts for way in ("out", "in"))
            action = Action("backward", stage, plan.num_micro_batches - 1)
            for bucket, (num_bytes, _) in enumerate(self._buckets[stage]):
                if num_bytes:
                    name = ("sum", stage, bucket)
                    own = [rank for rank in ranks if rank in self.ranks]
                    after = [(action, rank, bucket) for rank in own]
                    queue = queues if len(hosts) > 1 else f"sum of stage {stage}"
                    seconds = ring_all_reduce_s(link, num_bytes, len(ranks))
                    yield Operation(name, queue, seconds, after)

    def _cut_buckets(self, stage: int) -> list[tuple[int, float]]:
        """Bytes of each bucket of a stage's gradients and its share of the backward time."""
        plan = self._plan
        span, ranks = plan.spans[stage], plan.devices[stage]
        if len(ranks) == 1:
            return [(0, 1.0)]
        costs = self._inputs.costs[plan.backbones[stage]]
        seconds = costs.layer_seconds(len(plan.samples(stage, 0, ranks[0])))[1]
        total_s = float(seconds[slice(*span)].sum()) or 1.0
        buckets, size, own_s = [], 0, 0.0
        for layer in reversed(range(*span)):
            size += costs.sum_bytes[layer]
            own_s += float(seconds[layer])
            if size >= plan.bucket_bytes or layer == span[0]:
                buckets.append((size, own_s / total_s))
                size, own_s = 0, 0.0
        return buckets

    def _list_buckets(self, action: Action) -> list[tuple[int, float]]:
        """A pass' pieces, bytes and share of its time: the last backward pass has one a bucket."""
        is_last = action.micro_batch == self._plan.num_micro_batches - 1
        return self._buckets[action.stage] if is_last and action.kind == "backward" else [(0, 1.0)]

    def _list_pieces_s(self, action: Action, rank: int) -> list[float]:
        """Seconds of a pass or job, in pieces, with what messages cost it."""
        profile = self._inputs.profile
        if action.kind == "encode":
            rows = action.samples[1] - action.samples[0]
            pieces_s = [profile.seconds(profile.frozen_s[action.name], rows)]
        else:
            pieces_s = self._list_pass_s(action, rank)
        lost_s = self._lost_s.get((rank, action), 0.0)
        return [pieces_s[0] + lost_s, *pieces_s[1:]]

    def _list_pass_s(self, action: Action, rank: int) -> list[float]:
        """Seconds of a pass by itself; sums of gradients cost as much computation as messages do."""
        plan = self._plan
        buckets = self._list_buckets(action)
        # All ranks and micro-batches of a stage have as many rows.
        key = (action.kind, action.stage, buckets is self._buckets[action.stage])
        if key not in self._pass_s:
            rows = len(plan.samples(action.stage, action.micro_batch, rank))
            costs = self._inputs.costs[plan.backbones[action.stage]]
            forward_s, backward_s = costs.span_seconds(plan.spans[action.stage], rows)
            seconds = backward_s if action.kind == "backward" else forward_s
            replicas = len(plan.devices[action.stage])
            byte_s = 2 * (replicas - 1) / replicas * self._inputs.profile.message_s_per_byte
            self._pass_s[key] = [share * seconds + size * byte_s for size, share in buckets]
        return self._pass_s[key]

    def _find_send(self, message: PlannedMessage, size: int) -> tuple[str | tuple[str, str], float]:
        """The queues of a message, and its seconds while all groups send theirs."""
        key = message.sender, message.receiver, size
        if key not in self._sends:
            link, queues, share = self._find_edge(message)
            self._sends[key] = queues, link.time_s(size * share)
        return self._sends[key]

    def _find_edge(self, message: PlannedMessage) -> tuple[Link, str | tuple[str, str], int]:
        """The link of a message, the queues it waits in, and how many groups share them."""
        edge = message.sender, message.receiver
        if edge not in self._edges:
            cluster = self._inputs.cluster
            source, target = (cluster.host(rank).name for rank in edge)
            is_local = source == target
            queues = (
                f"link {edge[0]} to {edge[1]}" if is_local else (f"{source} out", f"{target} in")
            )
            index = self.ranks.index(message.sender)
            senders = [cluster.host(ranks[index]).name for ranks in self._groups]
            share = 1 if is_local else senders.count(source)
            self._edges[edge] = cluster.link(*edge), queues, share
        return self._edges[edge]


def list_queues(queue: str | tuple[str, ...]) -> tuple[str, ...]:
    """Names of the queues that an operation holds, one or several."""
    return (queue,) if isinstance(queue, str) else queue


def list_patterns(plan: Plan, inputs: PlanInputs) -> list[int]:
    """A copy of the pipeline for each pattern of hosts and links."""
    cluster = inputs.cluster
    if plan.num_groups == 1:
        return [0]
    groups = [plan.list_group(group) for group in range(plan.num_groups)]
    names = [[cluster.host(rank).name for rank in ranks] for ranks in groups]
    patterns: dict[Hashable, int] = {}
    for group, ranks in enumerate(groups):
        own = names[group]
        places = tuple(own.index(name) for name in own)
        shared = tuple(
            sum(other[index] == name for other in names) for index, name in enumerate(own)
        )
        links = (cluster.link(a, b) for a, b in itertools.permutations(ranks, 2))
        rates = tuple((float(each.alpha_s), float(each.beta_s_per_byte)) for each in links)
        patterns.setdefault((places, shared, rates), group)
    return list(patterns.values())
