"""Predicts plans for clusters that are not here: V100 and T4 ranks, from data sheets alone.

After the evaluation of QSync (arXiv 2407.02327), which trains BERT-base on V100 and T4 ranks together.
Nothing here is measured: products take the larger of operations over a share of the peak and bytes
over the memory's rate, casts take bytes over the memory's rate, and each operator's noise is that of
a rounded operand drawn from a normal distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from qsync.planner.cost_mapper import CostMapper
from qsync.planner.graph import Graph, Op
from qsync.planner.ranks import RankCosts, allocate
from qsync.planner.replayer import GradientBuckets, RankSeconds, StepReplay
from qsync.precisions import HIGHEST, PRECISIONS
from shared.errors import ConfigError
from shared.topology import Link
from shared.topology.cost import ring_all_reduce_s
from shared.topology.device import T4, V100_32, Device
from shared.units import MiB, format_s

__all__ = ["SimulatedPlan", "build_bert", "format_simulation", "simulate"]

# Share of its peak that a product of matrices of this size reaches on a GPU.
_EFFICIENCY = 0.5
_BUCKET_BYTES = 25 * MiB
# Squared relative error of a rounded operand: 0.045 / 4^m of a float with m bits, and S^2 / 12 of
# fixed point whose largest of 127 steps is four standard deviations.
_FIXED_NOISE = (4 / 127) ** 2 / 12


class SimulatedPlan(NamedTuple):
    """A way of training on the simulated cluster.

    Attributes:
        name: what ranks do.
        step_s: simulated seconds of a step.
        idle_share: share of the step in which the idlest rank computes nothing.
        num_lowered: lowered operators of a slow rank.
        noise: predicted squared relative gradient error of a slow rank.
    """

    name: str
    step_s: float
    idle_share: float
    num_lowered: int
    noise: float


def build_bert(num_tokens: int, num_layers: int = 12, hidden: int = 768) -> Graph:
    """Builds the operators of a BERT encoder for `num_tokens` tokens a rank."""
    ops: list[Op] = []
    before = ""
    for layer in range(num_layers):
        name = f"layer{layer}."
        outputs = num_tokens * hidden
        for part in ("query", "key", "value"):
            inputs = (before,) if before else ()
            ops.append(Op(name + part, "linear", inputs, outputs, hidden * hidden))
        attended = (name + "query", name + "key", name + "value")
        ops += [
            Op(name + "attention", "fixed", attended, outputs),
            Op(name + "output", "linear", (name + "attention",), outputs, hidden * hidden),
            Op(name + "norm", "fixed", (name + "output",), outputs),
            Op(name + "up", "linear", (name + "norm",), 4 * outputs, 4 * hidden * hidden),
            Op(name + "gelu", "fixed", (name + "up",), 4 * outputs),
            Op(name + "down", "linear", (name + "gelu",), outputs, 4 * hidden * hidden),
            Op(name + "end", "fixed", (name + "down",), outputs),
        ]
        before = name + "end"
    return Graph(ops)


def simulate(
    devices: Sequence[Device] = (V100_32,) * 16 + (T4,) * 16,
    *,
    num_tokens: int = 12 * 384,
    link: Link | None = None,
) -> list[SimulatedPlan]:
    """Simulates a BERT's step with the slow ranks in one precision, and under a plan.

    Args:
        devices: one for each rank.
        num_tokens: tokens of a rank's batch.
        link: between ranks; None for 100 Gbit/s, where hosts add up their own gradients first.

    Raises:
        ConfigError: there is no rank.
    """
    if not devices:
        raise ConfigError("devices: expected one for each rank, got none; name V100_32 or T4")
    graph = build_bert(num_tokens)
    link = link or Link.from_rate(100e9 / 8, alpha_s=2e-5)
    costs = {device: _price(device, num_tokens) for device in dict.fromkeys(devices)}
    ranks = [costs[device] for device in devices]
    buckets = _fill_buckets(graph, link, len(devices))
    slow = min(costs, key=lambda device: device.flops_fp32_per_s)
    precisions = [HIGHEST, "fp16", *(["int8"] if slow.int8_ops_per_s else [])]
    noise = {
        graph.ops[i].name: {name: _round_noise(name) / len(graph.linears) for name in precisions}
        for i in graph.linears
    }
    plan = allocate(
        graph, noise, ranks, precisions=precisions, operators=dict.fromkeys(noise, "linear"),
        buckets=buckets,
    )  # fmt: skip
    lowered = plan.ranks[devices.index(slow)]
    step_s = cast("float", plan.step_s)
    return [
        *(
            _run_uniformly(graph, ranks, buckets, slow, precision, noise)
            for precision in precisions
        ),
        SimulatedPlan(
            name="planned",
            step_s=step_s,
            idle_share=max(cast("float", rank.idle_s) for rank in plan.ranks) / step_s,
            num_lowered=len(lowered.lowered),
            noise=cast("float", lowered.noise),
        ),
    ]


def _run_uniformly(
    graph: Graph,
    ranks: Sequence[RankCosts],
    buckets: GradientBuckets,
    slow: Device,
    precision: str,
    noise: Mapping[str, Mapping[str, float]],
) -> SimulatedPlan:
    """Replays a step with all operators of slow ranks in one precision, those of others in float32."""
    seconds = {}
    for costs in dict.fromkeys(ranks):
        mapper = CostMapper(
            graph, kernel_s=costs.kernel_s, cast_s=costs.cast_s,
            backward_kernel_s=costs.backward_kernel_s,
        )  # fmt: skip
        if costs.device == slow.name and precision != HIGHEST:
            for name in noise:
                mapper.set(name, precision)
        seconds[costs] = RankSeconds(forward_s=mapper.forward_s, backward_s=mapper.backward_s)
    step = StepReplay(graph, buckets, len(ranks)).run([seconds[costs] for costs in ranks])
    return SimulatedPlan(
        name=f"{slow.name} in {precision}",
        step_s=step.step_s,
        idle_share=max(step.idle_s) / step.step_s,
        num_lowered=0 if precision == HIGHEST else len(noise),
        noise=sum(row[precision] for row in noise.values()),
    )


def format_simulation(plans: Sequence[SimulatedPlan]) -> str:
    """Writes the ways of training as a table in Markdown, marked as simulated."""
    lines = [
        "Simulated from data sheets; nothing here was measured.",
        "",
        "| slow ranks | simulated step | idlest rank | lowered operators | noise |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for each in plans:
        lines.append(
            f"| {each.name} | {format_s(each.step_s)} | {each.idle_share:.0%} | "
            f"{each.num_lowered} | {each.noise:.2g} |"
        )
    return "\n".join(lines)


def _price(device: Device, num_tokens: int) -> RankCosts:
    rates = {
        HIGHEST: device.flops_fp32_per_s,
        "fp16": device.flops_per_s,
        "int8": device.int8_ops_per_s or device.flops_fp32_per_s,
    }

    def multiply_s(op: Op, precision: str) -> float:
        inputs = num_tokens * op.weight_numel // max(op.numel // num_tokens, 1)
        moved = PRECISIONS[precision].bits // 8 * (inputs + op.weight_numel + op.numel)
        flops = 2 * num_tokens * op.weight_numel
        return max(flops / (_EFFICIENCY * rates[precision]), moved / device.memory_bytes_per_s)

    def kernel_s(op: Op, precision: str) -> float:
        if op.kind == "linear":
            return multiply_s(op, precision)
        return 4 * 2 * op.numel / device.memory_bytes_per_s

    def backward_kernel_s(op: Op, precision: str) -> float:
        return 2 * kernel_s(op, PRECISIONS[precision].backward.replace("bf16", "fp16"))

    def cast_s(source: str, target: str, numel: int) -> float:
        moved = PRECISIONS[source].bits // 8 + PRECISIONS[target].bits // 8
        return moved * numel / device.memory_bytes_per_s

    return RankCosts(
        kernel_s=kernel_s, backward_kernel_s=backward_kernel_s, cast_s=cast_s, device=device.name
    )


def _fill_buckets(graph: Graph, link: Link, num_ranks: int) -> GradientBuckets:
    names: list[list[str]] = [[]]
    sizes = [0]
    for i in reversed(graph.linears):
        if sizes[-1] >= _BUCKET_BYTES:
            names.append([])
            sizes.append(0)
        names[-1].append(graph.ops[i].name)
        sizes[-1] += 4 * graph.ops[i].weight_numel
    return GradientBuckets(
        ops=names, transfer_s=[ring_all_reduce_s(link, size, num_ranks) for size in sizes]
    )


def _round_noise(precision: str) -> float:
    if precision == HIGHEST:
        return 0.0
    kind = PRECISIONS[precision]
    return _FIXED_NOISE if kind.is_fixed else 0.045 / 4**kind.mantissa_bits
