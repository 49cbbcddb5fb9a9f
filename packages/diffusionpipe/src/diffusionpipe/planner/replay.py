"""Replays a plan on a cluster: passes, messages, sums and frozen parts of all ranks.

A rank runs its list as it stands. A message starts when the pass or job that makes it ends, and
takes its turn at its sender's and its receiver's host; ranks of one host have a link of their own
for each pair. Sums go around a ring by buckets, which start during the last backward pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from diffusionpipe.planner.costs import ChainCosts
from diffusionpipe.planner.memory import stage_feeds
from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.traffic import Route, find_feeds, find_routes, match_rows
from shared.topology import Cluster, Operation, Replay, Timeline
from shared.topology.cost import ring_all_reduce_s
from shared.topology.replay import Order

if TYPE_CHECKING:
    from diffusionpipe.profiler.job_profile import JobProfile

__all__ = ["Delivery", "PlanReplay"]

ESTIMATE = "estimate"
"""The input of a second prediction that the first one gives."""


class Delivery(NamedTuple):
    """A message of a step.

    Attributes:
        kind: "forward", "estimate" or "backward", of the pass behind which it is sent, or "encode".
        stage, micro_batch: of that pass; -1 for a frozen output.
        target: stage whose pass needs it; -1 for a frozen output, which the next step needs.
        sender, receiver: ranks.
        num_bytes: its size.
        action: encode action behind which a frozen output is sent.
        needed_by: kind of the pass that needs it; by default that of the pass behind which it is sent.
    """

    kind: str
    stage: int
    micro_batch: int
    target: int
    sender: int
    receiver: int
    num_bytes: int
    action: Action | None = None
    needed_by: str = ""


class PlanReplay:
    """A plan with what its passes and messages take.

    Args:
        plan: plan with its orders.
        profile: measured figures.
        cluster: ranks and links.
        costs: of each backbone.
        has_estimate: replay a step that predicts twice, by the plan's other order.
    """

    def __init__(
        self,
        plan: Plan,
        profile: JobProfile,
        cluster: Cluster,
        costs: Sequence[ChainCosts],
        *,
        has_estimate: bool = False,
    ) -> None:
        self._plan, self._profile, self._cluster, self._costs = plan, profile, cluster, costs
        self._order = plan.estimate_order if has_estimate else plan.order
        self._has_estimate = has_estimate
        self.deliveries = [*self._list_values(), *self._list_frozen()]
        self._buckets = [self._cut_buckets(stage) for stage in range(len(plan.spans))]

    @property
    def mean_message_s(self) -> float:
        """Mean seconds of the messages between stages; 0 without any."""
        seconds = [
            self._cluster.link(each.sender, each.receiver).time_s(each.num_bytes)
            for each in self.deliveries
            if each.kind != "encode"
        ]
        return sum(seconds) / len(seconds) if seconds else 0.0

    def run(self, num_steps: int = 1, *, is_passes_only: bool = False) -> Timeline:
        """Replays steps one after another.

        Args:
            num_steps: number of steps; frozen outputs of a step are needed in the next.
            is_passes_only: leave out the optimizer steps.

        Returns:
            The timeline; ranks are the queues "rank 0", ...
        """
        queues: dict[str, Order] = {f"rank {r}": "given" for r in range(self._plan.num_ranks)}
        operations: list[Operation] = []
        for step in range(num_steps):
            operations += self._list_step(step, is_passes_only)
        for operation in operations:
            held = operation.queue
            for queue in (held,) if isinstance(held, str) else held:
                queues.setdefault(queue, "readiness")
        return Replay(operations, queues).run()

    def predict_s(self) -> float:
        """Seconds of a step that follows another one."""
        timeline = self.run(2)
        ends = [
            max(timeline.span_s(("step", rank, step))[1] for rank in range(self._plan.num_ranks))
            for step in range(2)
        ]
        return ends[1] - ends[0]

    def list_entries(self, rank: int) -> list[int]:
        """The index of its action for each entry of a rank's queue, with passes only."""
        entries = []
        for index, action in enumerate(self._order[rank]):
            if action.kind in ("forward", "estimate", "backward"):
                entries += [index] * len(self._pieces(action))
        return entries

    def sum_seconds(self, rank: int) -> tuple[float, float]:
        """Seconds of a step in which a rank computes passes and the optimizer step, and encodes."""
        pass_s = encode_s = 0.0
        for action in self._order[rank]:
            if action.kind == "encode":
                encode_s += self._encode_s(action)
            elif action.kind == "step":
                pass_s += self._step_s(rank)
            elif action.kind != "sum":
                pass_s += sum(self._pass_s(action, rank))
        return pass_s, encode_s

    def count_edges(self) -> dict[tuple[int, int], int]:
        """Bytes of a step by sender and receiver, without sums."""
        edges: dict[tuple[int, int], int] = {}
        for each in self.deliveries:
            edge = each.sender, each.receiver
            edges[edge] = edges.get(edge, 0) + each.num_bytes
        return edges

    def count_sum_bytes(self, rank: int) -> int:
        """Bytes of a step that a rank sends in sums of gradients."""
        total = 0
        for stage in self._plan.stages_of(rank):
            count = len(self._plan.devices[stage])
            total += 2 * (count - 1) * sum(size for size, _ in self._buckets[stage]) // count
        return total

    def _list_step(self, step: int, is_passes_only: bool) -> Iterator[Operation]:
        needs: dict[Hashable, list[Hashable]] = {}
        arrivals: dict[int, list[Hashable]] = {}  # frozen outputs of the step before
        for number, each in enumerate(self.deliveries):
            name = ("message", number, step)
            sent_by = self._sending_pass(each)
            yield Operation(
                name,
                self._link_queues(each.sender, each.receiver),
                self._cluster.link(each.sender, each.receiver).time_s(each.num_bytes),
                [self._name_last(sent_by, each.sender, step)],
            )
            if each.kind == "encode":
                if step:
                    arrivals.setdefault(each.receiver, []).append(("message", number, step - 1))
            else:
                needs.setdefault(
                    (each.needed_by or each.kind, each.target, each.micro_batch, each.receiver), []
                ).append(name)
        last: list[Hashable] = []
        for rank, actions in enumerate(self._order):
            arrived = arrivals.get(rank, [])
            names: list[Hashable] = []
            for action in actions:
                if action.kind in ("sum", "step"):
                    continue
                after = needs.get((*action[:3], rank), [])
                if arrived and action.kind in ("forward", "estimate"):
                    # The first pass waits for all: only rows of the last micro-batches could be late.
                    after, arrived = [*after, *arrived], []
                for piece, seconds in enumerate(self._pass_s(action, rank)):
                    names.append(self._name(action, rank, step, piece))
                    yield Operation(names[-1], f"rank {rank}", seconds, after if not piece else ())
            last += names[-1:]
        sums = list(self._list_sums(step))
        yield from sums
        if not is_passes_only:
            agree_s = 2 * (self._plan.num_ranks - 1).bit_length() * self._latency_s()
            last += [operation.name for operation in sums]
            yield Operation(("agreement", step), "agreement", agree_s, last)
            for rank in range(self._plan.num_ranks):
                yield Operation(
                    ("step", rank, step), f"rank {rank}", self._step_s(rank), [("agreement", step)]
                )

    def _list_sums(self, step: int) -> Iterator[Operation]:
        plan = self._plan
        for stage, ranks in enumerate(plan.devices):
            if len(ranks) == 1:
                continue
            link = max(
                (
                    self._cluster.link(left, right)
                    for left, right in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
                ),
                key=lambda each: each.time_s(1_000_000),
            )
            hosts = sorted({self._cluster.host(rank).name for rank in ranks})
            queues = tuple(f"{host} {way}" for host in hosts for way in ("out", "in"))
            action = Action("backward", stage, plan.num_micro_batches - 1)
            before: Hashable = None
            for bucket, (num_bytes, _) in enumerate(self._buckets[stage]):
                if not num_bytes:
                    continue
                name = ("sum", stage, bucket, step)
                yield Operation(
                    name,
                    queues if len(hosts) > 1 else f"sum of stage {stage}",
                    ring_all_reduce_s(link, num_bytes, len(ranks)),
                    [
                        *(self._name(action, rank, step, bucket) for rank in ranks),
                        *([before] if before else []),
                    ],
                )
                before = name

    def _list_values(self) -> Iterator[Delivery]:
        for backbone, chain in enumerate(self._profile.chains):
            value_bytes = chain.value_bytes
            for route in self._find_routes(backbone):
                out = sum(value_bytes[key] for key in route.keys)
                back = sum(value_bytes[key] for key in route.keys if key in chain.differentiable)
                ends = (route.source, route.target)
                yield from self._list_messages("forward", *ends, out)
                if self._has_estimate:
                    yield from self._list_messages("estimate", *ends, out)
                if back:
                    yield from self._list_messages("backward", *ends[::-1], back)
            if self._has_estimate:
                yield from self._list_estimates(backbone)

    def _list_messages(
        self, kind: str, source: int, target: int, num_bytes: int
    ) -> Iterator[Delivery]:
        """One message a micro-batch and pair of ranks with common rows."""
        for m in range(self._plan.num_micro_batches):
            for sender, receiver, rows in match_rows(self._plan, source, target, m):
                if sender != receiver:
                    size = num_bytes * len(rows)
                    yield Delivery(kind, source, m, target, sender, receiver, size)

    def _list_estimates(self, backbone: int) -> Iterator[Delivery]:
        """The estimate goes from the last stage to those whose inputs depend on it."""
        chain = self._profile.chains[backbone]
        own = [v for v, each in enumerate(self._plan.backbones) if each == backbone]
        needed = find_feeds(
            chain.reads, chain.writes, [self._plan.spans[v] for v in own], chain.feeds
        )
        reached: set[tuple[int, ...]] = set()
        for v, names in zip(own, needed, strict=True):
            if ESTIMATE in names and self._plan.devices[v] not in reached:
                reached.add(self._plan.devices[v])
                for each in self._list_messages(
                    "estimate", own[-1], v, chain.value_bytes["output"]
                ):
                    yield each._replace(needed_by="forward")

    def _find_routes(self, backbone: int) -> tuple[Route, ...]:
        plan, chain = self._plan, self._profile.chains[backbone]
        own = [v for v, each in enumerate(plan.backbones) if each == backbone]
        return find_routes(
            chain.reads,
            chain.writes,
            [plan.spans[v] for v in own],
            [plan.devices[v] for v in own],
            first_stage=own[0],
        )

    def _list_frozen(self) -> Iterator[Delivery]:
        plan, profile = self._plan, self._profile
        feeds = stage_feeds(plan, profile)
        names = [
            {name for stage in plan.stages_of(rank) for name in feeds[stage]}
            for rank in range(plan.num_ranks)
        ]
        needed = [self._find_rows(rank) for rank in range(plan.num_ranks)]
        for owner, actions in enumerate(self._order):
            for action in actions:
                if action.kind != "encode":
                    continue
                for reader in range(plan.num_ranks):
                    outputs = names[reader] & set(profile.frozen_outputs[action.name])
                    num_rows = len(needed[reader].intersection(range(*action.samples)))
                    if reader != owner and outputs and num_rows:
                        size = num_rows * sum(profile.frozen_bytes[name] for name in outputs)
                        yield Delivery("encode", -1, -1, -1, owner, reader, size, action)

    def _find_rows(self, rank: int) -> set[int]:
        """Rows of the batch that a rank computes."""
        stages = self._plan.stages_of(rank)
        return {
            row
            for m in range(self._plan.num_micro_batches)
            for stage in stages[:1]
            for row in self._plan.samples(stage, m, rank)
        }

    def _cut_buckets(self, stage: int) -> list[tuple[int, float]]:
        """Bytes of each bucket of a stage's gradients and its share of the backward time."""
        plan = self._plan
        costs = self._costs[plan.backbones[stage]]
        span = plan.spans[stage]
        if len(plan.devices[stage]) == 1:
            return [(0, 1.0)]
        rows = len(plan.samples(stage, 0, plan.devices[stage][0]))
        seconds = costs.layer_seconds(rows)[1]
        total_s = float(seconds[slice(*span)].sum())
        buckets, size, own_s = [], 0, 0.0
        for layer in reversed(range(*span)):
            size += costs.chain.gradient_bytes[layer]
            own_s += float(seconds[layer])
            if size >= plan.bucket_bytes or layer == span[0]:
                buckets.append((size, own_s / total_s if total_s else 0.0))
                size, own_s = 0, 0.0
        return buckets

    def _pieces(self, action: Action) -> list[float]:
        """Shares of a pass's time; the last backward pass has one for each bucket."""
        if action.kind == "backward" and action.micro_batch == self._plan.num_micro_batches - 1:
            return [share for _, share in self._buckets[action.stage]]
        return [1.0]

    def _pass_s(self, action: Action, rank: int) -> list[float]:
        """Seconds of an action, in pieces."""
        if action.kind == "encode":
            return [self._encode_s(action)]
        plan = self._plan
        rows = len(plan.samples(action.stage, action.micro_batch, rank))
        costs = self._costs[plan.backbones[action.stage]]
        forward_s, backward_s = costs.span_seconds(plan.spans[action.stage], rows)
        if action.kind != "backward":
            return [forward_s]
        return [share * backward_s for share in self._pieces(action)]

    def _encode_s(self, action: Action) -> float:
        rows = action.samples[1] - action.samples[0]
        return self._profile.seconds(self._profile.frozen_s[action.name], rows)

    def _step_s(self, rank: int) -> float:
        plan = self._plan
        trained = sum(
            float(self._costs[plan.backbones[stage]].gradient_table[plan.spans[stage]])
            for stage in plan.stages_of(rank)
        )
        return trained * self._profile.step_s_per_byte

    def _latency_s(self) -> float:
        cluster = self._cluster
        is_local = len(cluster.hosts) == 1
        return float((cluster.hosts[0].link if is_local else cluster.network).alpha_s)

    def _link_queues(self, sender: int, receiver: int) -> str | tuple[str, str]:
        source, target = self._cluster.host(sender).name, self._cluster.host(receiver).name
        if source == target:
            return f"rank {sender} to {receiver}"
        return f"{source} out", f"{target} in"

    def _sending_pass(self, delivery: Delivery) -> Action:
        if delivery.action is not None:
            return delivery.action
        return Action(delivery.kind, delivery.stage, delivery.micro_batch)  # type: ignore[arg-type]

    def _name(self, action: Action, rank: int, step: int, piece: int = 0) -> Hashable:
        if action.kind == "encode":
            return ("encode", action.name, *action.samples, rank, step)
        return (*action[:3], rank, step, piece)

    def _name_last(self, action: Action, rank: int, step: int) -> Hashable:
        """The last piece of an action."""
        return self._name(action, rank, step, max(len(self._pieces(action)) - 1, 0))
