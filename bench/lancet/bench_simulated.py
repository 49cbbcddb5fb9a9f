"""Simulated: weight gradients alone beside all-to-alls, in backward graphs of three small models.

Two ranks capture a step of each model; operators' seconds are measured on this machine. The replay then
gives all-to-alls equal shares of 0.25 to 2 times the computing, and sums over ranks none. Compared are the
captured order, starts hoisted and waits sunk, Inductor's overlap pass with the same times, and
`lancet.schedule`. Weight gradients are all operations that some all-to-all neither waits for nor precedes,
whatever their names. How well the replay predicts real steps is measured by lancet/replay.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import lancet
from lancet.graph.operations import Op, OpGraph
from lancet.graph.reachability import find_ancestors, find_descendants
from lancet.simulator import simulate
from shared.claims import Claim
from shared.comms import Group, RankPool

sys.path.insert(0, str(Path(__file__).parent))

from moe_jobs import HOISTED, INDUCTOR, share_ops, spread_routers
from rival_orders import hoist_starts, order_by_inductor

PEERS = [
    {
        "peer": "Inductor's overlap pass",
        "setting": "torch 2.13, its own limits of memory and distance, no bucketing; fed the same times, "
        "experts' products entered as computation, waits at their first readers",
        "why": "without measured times it needs a GPU, and waits where it puts them end earlier than they must",
    },
]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3MoeConfig", {"moe_intermediate_size": 512, "num_experts": 8, "head_dim": 32}),
    "Mixtral": ("MixtralConfig", {"intermediate_size": 512, "num_local_experts": 8}),
    "OLMoE": ("OlmoeConfig", {"intermediate_size": 512, "num_experts": 8}),
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_experts_per_tok": 2, "output_router_logits": False, "use_cache": False,
}  # fmt: skip
NUM_SEQUENCES, NUM_TOKENS = 2, 128
RATIOS = (0.25, 0.5, 1.0, 2.0)
"""All-to-alls over computing."""
AIM, HIDDEN_AIM, LEAST = 1 / 0.3, 0.8, 0.01
"""Inductor's exposed seconds over ours up to a ratio of 0.5; hidden share of what can be hidden; exposed shares of
communication below this count as this."""
OURS, CAPTURED = "ours", "captured order"
COMMAND = "hatch run bench lancet/simulated"


class Point(NamedTuple):
    """A backward graph at one length of communication; seconds by way."""

    ratio: float
    communication_s: float
    weights_s: float
    exposed_s: dict[str, float]
    is_valid: bool


def build_model(name: str) -> torch.nn.Module:
    import transformers

    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES, **sizes)
    return spread_routers(transformers.AutoModelForCausalLM.from_config(config))


def run(name: str) -> list[Point]:
    """Captures a step of a model and replays its backward graph."""
    torch.set_num_threads(1)
    group = Group.world()
    model = lancet.parallelize(build_model(name), group)
    backend = lancet.Backend(group, partition=None)
    step = torch.compile(model, backend=backend, fullgraph=True)
    tokens = torch.randint(SIZES["vocab_size"], (NUM_SEQUENCES, NUM_TOKENS))
    step(input_ids=tokens, labels=tokens).loss.backward()
    (executor,) = (e for e in backend.executors if e.captured.direction == "backward")
    ops = share_ops(executor)
    return [replay(executor.captured.module, scale(ops, ratio), ratio) for ratio in RATIOS]


def scale(ops: Sequence[Op], ratio: float) -> list[Op]:
    """All-to-alls that take `ratio` times as long as all computing, in equal shares; sums take none."""
    compute_s = sum(op.time_s for op in ops if op.kind == "compute")
    share_s = ratio * compute_s / sum(op.kind == "all_to_all" for op in ops)
    seconds = {"all_to_all": share_s, "all_reduce": 0.0}
    return [replace(op, time_s=seconds.get(op.kind, op.time_s)) for op in ops]


def replay(module: torch.fx.GraphModule, ops: list[Op], ratio: float) -> Point:
    by_name = {op.name: op for op in ops}
    inductor = order_by_inductor(module, {op.name: op.time_s for op in ops})
    orders = {
        CAPTURED: list(by_name),
        HOISTED: hoist_starts(ops),
        INDUCTOR: [name for name in inductor if name in by_name],
        OURS: list(lancet.schedule(ops).order),
    }
    listed = {name: [by_name[op] for op in order] for name, order in orders.items()}
    timelines = {name: simulate(order) for name, order in listed.items()}
    return Point(
        ratio,
        sum(op.time_s for op in ops if op.kind == "all_to_all"),
        sum_weights(ops),
        {name: timeline.exposed_s for name, timeline in timelines.items()},
        all(sorted(order) == sorted(by_name) for order in orders.values())
        and abs(relax(listed[OURS]) - timelines[OURS].makespan_s) < 1e-9,
    )


def sum_weights(ops: Sequence[Op]) -> float:
    """Seconds of all that can run beside some all-to-all and does not wait for a sum over ranks."""
    graph = OpGraph(ops)
    ancestors, descendants = find_ancestors(graph.needs), find_descendants(graph.needs)
    movable, waiting = 0, 0
    everything = (1 << len(ops)) - 1
    for i in graph.communications:
        if ops[i].kind == "all_to_all":
            movable |= everything & ~(ancestors[i] | descendants[i])
        else:
            waiting |= descendants[i]
    return sum(graph.time_s[i] for i in graph.compute if movable & ~waiting & 1 << i)


def relax(ops: Sequence[Op]) -> float:
    """Makespan in seconds, by a replay that shares nothing with the package's."""
    ends: dict[str, float] = {}
    free_s = {True: 0.0, False: 0.0}
    for op in ops:
        is_compute = op.kind == "compute"
        start_s = max([free_s[is_compute], *(ends[name] for name in op.after)])
        ends[op.name] = free_s[is_compute] = start_s + op.time_s
    return max(ends.values())


@pytest.mark.parametrize("name", list(MODELS))
def bench_simulated(benchmark, record_claim, name):
    with RankPool(2, timeout=timedelta(minutes=5)) as pool:
        points = benchmark.pedantic(lambda: pool.run(run, name).results[0], rounds=1)
    rows = "; ".join(
        f"{point.ratio:g}: weight gradients {point.weights_s:.3f} s, communication {point.communication_s:.3f} s, "
        "exposed " + ", ".join(f"{way} {seconds:.3f}" for way, seconds in point.exposed_s.items())
        for point in points
    )
    # Nothing would be exposed, or all of it in every order, if nothing had been captured or planned.
    is_right = all(
        point.is_valid
        and point.weights_s > 0
        and 0.9 * point.communication_s < point.exposed_s[CAPTURED] < 1.01 * point.communication_s
        and point.exposed_s[OURS] < point.exposed_s[CAPTURED]
        for point in points
    )
    common: dict[str, Any] = {
        "unit": "of communication", "kind": "simulated", "correct": is_right, "detail": rows,
        "source": f'{COMMAND} -k "{name}"',
    }  # fmt: skip
    for point in points:
        shares = {
            way: max(seconds / point.communication_s, LEAST)
            for way, seconds in point.exposed_s.items()
        }
        for baseline in (CAPTURED, HOISTED, INDUCTOR):
            record_claim(
                Claim(
                    name=f"exposed by weight gradients alone, {name}, communication / computing {point.ratio:g}",
                    ours=shares[OURS], baseline=shares[baseline], baseline_name=baseline,
                    higher_is_better=False, **common,
                ),
                aim=AIM if baseline == INDUCTOR and point.ratio <= 0.5 else None,
            )  # fmt: skip
    hidden = [
        (point.communication_s - point.exposed_s[OURS])
        / min(point.weights_s, point.communication_s)
        for point in points
    ]
    record_claim(
        Claim(
            name=f"least hidden share of what weight gradients can hide, {name}",
            ours=min(hidden), baseline=HIDDEN_AIM, baseline_name="the aim",
            higher_is_better=True, **(common | {"unit": "share"}),
        ),
        aim=1.0, spread=(min(hidden) / HIDDEN_AIM, max(hidden) / HIDDEN_AIM),
    )  # fmt: skip
