"""Small Mixture-of-Experts models, their batches, and steps of one capture in several orders, in turns."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from rival_orders import hoist_starts, order_by_inductor
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

import lancet
from lancet.data import build_qwen3_moe, load_text_batches
from lancet.graph.fused_sums import list_sum_dtypes
from lancet.graph.operations import LaunchOrder, Op
from lancet.planner.fusion import fuse
from shared.comms import Group, barrier

__all__ = [
    "GROUPED",
    "GROUPED_INDUCTOR",
    "HOISTED",
    "INDUCTOR",
    "Costs",
    "Job",
    "Step",
    "Turns",
    "add_rivals",
    "balance_ranks",
    "build",
    "collect",
    "compare_gradients",
    "list_orders",
    "measure_costs",
    "share_ops",
    "spread_routers",
    "take_turns",
    "typical",
]

HOISTED, INDUCTOR = "starts hoisted, waits sunk", "Inductor's overlap pass"
GROUPED, GROUPED_INDUCTOR = (
    "captured order, sums in groups",
    "Inductor's overlap pass, sums in groups",
)
"""Names of the rivals' orders."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A Qwen3-MoE over bytes and the batches of a rank.

    Attributes:
        is_balanced: whether the experts of two ranks get about as many rows.
    """

    hidden_size: int = 256
    num_layers: int = 4
    num_experts: int = 8
    expert_width: int = 768
    num_sequences: int = 4
    num_tokens: int = 128
    is_balanced: bool = True

    @property
    def exchange_bytes(self) -> float:
        """Bytes that leave one of two ranks in a step, if routing is even: rows there and back, twice."""
        num_rows = self.num_sequences * self.num_tokens * 2 / 2
        return self.num_layers * 4 * num_rows * self.hidden_size * 4

    def batches(self, rank: int) -> Any:
        return load_text_batches(self.num_sequences, self.num_tokens, seed=rank)


def build(job: Job) -> nn.Module:
    """The model, the same on every rank."""
    model = build_qwen3_moe(
        hidden_size=job.hidden_size,
        num_layers=job.num_layers,
        num_experts=job.num_experts,
        expert_width=job.expert_width,
    )
    spread_routers(model)
    if job.is_balanced:
        balance_ranks(model, job)
    return model


def balance_ranks(model: nn.Module, job: Job) -> None:
    """Reorders routers' rows, so that two ranks' experts get equal shares of the first batches.

    Training balances routers; those just drawn send most rows to one rank.
    """
    batches = [next(iter(job.batches(rank))) for rank in range(2)]
    half = job.num_experts // 2
    for name, gate in model.named_modules():
        if not name.endswith("mlp.gate"):
            continue
        counts = count_choices(model, gate, batches)
        shares = counts / counts.sum(1, keepdim=True) - 0.5 / half
        first = min(
            combinations(range(job.num_experts), half),
            key=lambda experts, shares=shares: float(shares[:, list(experts)].sum(1).abs().max()),
        )
        others = [expert for expert in range(job.num_experts) if expert not in first]
        weight: Any = gate.weight
        weight.data = weight.data[[*first, *others]]


def count_choices(model: nn.Module, gate: Any, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """How many tokens of each batch choose each expert of a router [batches, experts]."""
    rows: list[Tensor] = []
    hook = gate.register_forward_pre_hook(lambda _, given: rows.append(given[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
        chosen = [(own @ gate.weight.T).topk(gate.top_k).indices.flatten() for own in rows]
    hook.remove()
    return torch.stack([own.bincount(minlength=len(gate.weight)) for own in chosen])


def spread_routers(model: nn.Module) -> nn.Module:
    """Draws routers' weights, so that tokens choose unlike experts; returns the model."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                weight.normal_(std=0.5, generator=generator)
    return model


def collect(value: Any) -> list[Any]:
    """A value of each rank, on every rank."""
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def share_ops(executor: Any) -> list[Op]:
    """The graph's operations with seconds of all ranks, as plans have them."""
    ops, times = executor.list_ops(), collect(executor.time_s)
    return [replace(op, time_s=mean(own[op.name] for own in times)) for op in ops]


def add_rivals(backend: lancet.Backend) -> None:
    """Adds the rivals' orders to all graphs of a backend, which has run a step; two also with sums in groups."""
    for executor in backend.executors:
        orders = list_orders(backend, executor)
        for name in (HOISTED, INDUCTOR):
            executor.add_order(name, LaunchOrder(tuple(orders[name])))
        for grouped, name in ((GROUPED, "captured"), (GROUPED_INDUCTOR, INDUCTOR)):
            # Rank 0's: the search for groups has a time limit.
            executor.add_order(grouped, collect(group_sums(executor, orders[name]))[0])


def group_sums(executor: Any, order: Sequence[str]) -> LaunchOrder:
    """An order with its neighbouring all-reduces in the groups that replay fastest."""
    by_name = {op.name: op for op in share_ops(executor)}
    group_name = Group.world().checked().group_name
    dtypes = list_sum_dtypes(executor.captured.module.graph, group_name)
    latency_s = min(collect(executor.sum_latency_s))
    if not dtypes or not latency_s:
        return LaunchOrder(tuple(order))
    fusion = fuse([by_name[name] for name in order], latency_s=latency_s, dtypes=dtypes)
    return LaunchOrder(
        tuple(name for group in fusion.groups for name in group),
        tuple(group for group in fusion.groups if len(group) > 1),
    )


def list_orders(backend: lancet.Backend, executor: Any) -> dict[str, list[str]]:
    """By name, the orders of a graph that has run: captured, planned and the rivals'."""
    ops = share_ops(executor)
    names = [op.name for op in ops]
    plan = backend.plans.get(executor.name)
    order = order_by_inductor(executor.captured.module, {op.name: op.time_s for op in ops})
    return {
        "captured": names,
        "planned": names if plan is None else list(plan.order),
        HOISTED: hoist_starts(ops),
        INDUCTOR: [name for name in order if name in {*names}],
    }


class Costs(NamedTuple):
    """Seconds of a step's operations without anything beside them, as ranks measured them."""

    compute_s: float
    communication_s: float
    optimizer_s: float

    @property
    def ratio(self) -> float:
        """Communication over computation, the optimizer's among it."""
        return self.communication_s / (self.compute_s + self.optimizer_s)

    @property
    def limit_s(self) -> float:
        """No order takes less."""
        return max(self.compute_s + self.optimizer_s, self.communication_s)


def measure_costs(backend: lancet.Backend, optimizer_s: float) -> Costs:
    ops = [op for executor in backend.executors for op in share_ops(executor)]
    seconds = {
        is_compute: sum(op.time_s for op in ops if (op.kind == "compute") == is_compute)
        for is_compute in (True, False)
    }
    return Costs(seconds[True], seconds[False], max(collect(optimizer_s)))


@dataclass
class Step:
    """A way to train a step: a model as called, its optimizer, and the order that its backend runs."""

    run: Callable[..., Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    backend: lancet.Backend | None = None
    order: str = "planned"
    after_backward: Callable[[], None] | None = None
    optimizer_s: list[float] = field(default_factory=list)

    def differentiate(self, batch: Mapping[str, Tensor]) -> float:
        """Forward and backward pass; returns the loss."""
        if self.backend is not None:
            self.backend.use_order(self.order)
        self.model.zero_grad()
        loss = self.run(**batch).loss
        loss.backward()
        if self.after_backward is not None:
            self.after_backward()
        return float(loss.detach())

    def __call__(self, batch: Mapping[str, Tensor]) -> float:
        loss = self.differentiate(batch)
        began = time.perf_counter()
        self.optimizer.step()
        self.optimizer_s.append(time.perf_counter() - began)
        return loss

    def waited_s(self) -> float:
        """Seconds of the last step in which this rank waited for collectives."""
        return 0.0 if self.backend is None else self.backend.report().exposed_s

    def describe_batch(self) -> str:
        """What has become of the batch."""
        return "" if self.backend is None else self.backend.report().batch


class Turns(NamedTuple):
    """What one rank measured, by way and turn.

    Attributes:
        seconds: of a step.
        waits_s: in which it waited for collectives.
        sent_bytes: that the ledger counted.
        losses: of all steps.
    """

    seconds: dict[str, list[float]]
    waits_s: dict[str, list[float]]
    sent_bytes: dict[str, list[int]]
    losses: list[float]


def take_turns(
    ways: Mapping[str, Step],
    batches: Any,
    num_turns: int,
    *,
    num_warm: int = 1,
) -> Turns:
    """Runs a step of each way a turn, beginning with another one each turn; a barrier before each."""
    group, names = Group.world(), list(ways)
    empty: list[Any] = [{name: [] for name in names} for _ in range(3)]
    turns = Turns(*empty, losses=[])
    for turn, batch in enumerate(islice(batches, num_warm + num_turns)):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            before = group.ledger.snapshot()
            barrier(group)
            began = time.perf_counter()
            turns.losses.append(ways[name](batch))
            took_s = time.perf_counter() - began
            if turn >= num_warm:
                turns.seconds[name].append(took_s)
                turns.waits_s[name].append(ways[name].waited_s())
                sent = group.ledger.snapshot().diff(before)
                turns.sent_bytes[name].append(sent.sent_bytes)
    return turns


def _copy_gradients(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each gradient."""
    gradients = {}
    for name, weight in model.named_parameters():
        grad: Any = weight.grad
        if grad is not None:
            own = grad.to_local() if isinstance(grad, DTensor) else grad
            gradients[name] = own.detach().clone()
    return gradients


def compare_gradients(
    ways: Sequence[Step], batch: Mapping[str, Tensor]
) -> list[tuple[bool, float]]:
    """Whether each way's gradients have the first one's bits, and the largest relative difference.

    A gradient of nothing but zeros is equal to none.
    """
    collected = []
    for way in ways:
        way.differentiate(batch)
        collected.append(_copy_gradients(way.model))
    reference = collected[0]
    results = []
    for own in collected:
        is_equal = own.keys() == reference.keys() and all(
            torch.equal(own[name], reference[name]) for name in own
        )
        is_equal = is_equal and any(bool(own[name].any()) for name in own)
        difference = max(
            float((own[name] - reference[name]).abs().max() / reference[name].abs().max().clamp_min(1e-30))
            for name in own
        )  # fmt: skip
        results.append((is_equal, difference))
    return results


def typical(values: Sequence[float]) -> str:
    """Median and range in words."""
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
