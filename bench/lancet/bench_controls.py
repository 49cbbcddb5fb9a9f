"""Controls of plans: exchanges that take no time, wrong times, bytes sent, planning time, and memory.

One capture of a Qwen3-MoE of four layers on two hosts at 100 Mbit/s, a core each. Exchanges of no time must
leave the graph as it is. Plans made from times that are wrong by a factor of 10 run beside the right one, in
turns: slower, but with the same bits. Bytes sent are those of the routing, counted by hooks on the routers.
Planning is timed on 3,000 operations, the backward graph repeated. Memory is torch's own allocations in the
backward pass, seen by its profiler, in captured order and by a plan that may take no more.
"""

import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import lancet
from lancet.graph.fused_sums import list_sum_dtypes
from lancet.graph.operations import Op, OpGraph
from lancet.graph.reachability import find_descendants
from lancet.planner.networks import scale_communication
from lancet.planner.plan import Plan, Sums, make_plan
from lancet.runtime.executor import GraphExecutor
from shared.claims import Claim, pair_turns
from shared.comms import Group, NetLab, netlab
from shared.comms.handicap import handicap

sys.path.insert(0, str(Path(__file__).parent))

from moe_jobs import (
    Job,
    Step,
    Turns,
    build,
    collect,
    compare_gradients,
    share_ops,
    take_turns,
    typical,
)

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

RATE, TURNS = "100mbit", 9
SIZES = Job()
NUM_NODES, PLANNING_AIM_S = 3000, 5.0
RIGHT, TENTH, TENFOLD, MIXED = (
    "planned",
    "exchanges a tenth as long",
    "exchanges ten times as long",
    "each time ten times or a tenth",
)
WRONG = (TENTH, TENFOLD, MIXED)
REVISION = 2
COMMAND = "hatch run bench lancet/controls"


class Measured(NamedTuple):
    """One rank's results; peaks are bytes by order."""

    num_moved: int
    num_moved_free: int
    turns: Turns
    same_bits: dict[str, bool]
    sent_bytes: int
    routed_bytes: int
    planning_s: float
    num_planned: int
    peaks: dict[str, int]
    num_moved_limited: int


def count_moved(ops: Sequence[Op]) -> int:
    """Operations that a plan moves."""
    return sum(map(len, plan_ops(ops).moved.values()))


def plan_ops(
    ops: Sequence[Op],
    sums: Sums | None = None,
    tensors: Any = (),
    memory_bytes: int | None = None,
) -> Plan:
    return make_plan("backward", "", torch.__version__, list(ops), tensors, memory_bytes, sums)


def share_plan(plan: Plan) -> Plan:
    """Rank 0's plan: the search for groups has a time limit, and others may end elsewhere."""
    return Plan.from_json(collect(plan.to_json())[0])


def describe_sums(executor: GraphExecutor, group: Group) -> Sums:
    """Sums that may run in groups, as the backend describes them."""
    dtypes = list_sum_dtypes(executor.captured.module.graph, group.checked().group_name)
    latency_s = min(collect(executor.sum_latency_s))
    return Sums(latency_s=latency_s, dtypes=dtypes, num_ranks=group.world_size)


def draw_wrong(ops: Sequence[Op]) -> list[Op]:
    """Each time ten times as long or a tenth, drawn alike on all ranks."""
    draw = random.Random(0)
    return [replace(op, time_s=op.time_s * draw.choice((0.1, 10.0))) for op in ops]


def repeat(ops: Sequence[Op], num_ops: int) -> list[Op]:
    """The graph again and again, each copy after what its predecessor's last all-to-all leads to."""
    graph = OpGraph(ops)
    last = [i for i in graph.communications if ops[i].kind == "all_to_all"][-1]
    behind = find_descendants(graph.needs)[last].bit_length() - 1
    copies: list[Op] = []
    number = 0
    while len(copies) < num_ops:
        previous = (f"{ops[behind].name} of {number - 1}",) if number else ()
        for op in ops:
            after = tuple(f"{name} of {number}" for name in op.after) or previous
            copies.append(replace(op, name=f"{op.name} of {number}", after=after))
        number += 1
    return copies[:num_ops]


def repeat_sums(sums: Sums, nodes: Sequence[Op]) -> Sums:
    """The sums of all copies that `repeat` made."""
    origins = {op.name: op.name.rpartition(" of ")[0] for op in nodes}
    dtypes = {
        name: sums.dtypes[origin] for name, origin in origins.items() if origin in sums.dtypes
    }
    return replace(sums, dtypes=dtypes)


def count_routed_bytes(model: Any, batch: Mapping[str, Tensor]) -> int:
    """Bytes that a step must send: rows to the other rank and back in both passes, and sums over ranks."""
    group, chosen = Group.world(), []
    gates = [layer.mlp.gate for layer in model.model.layers]
    handles = [
        gate.register_forward_hook(lambda _m, _i, outputs: chosen.append(outputs[2]))
        for gate in gates
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    num_local = SIZES.num_experts // group.world_size
    leaving = torch.tensor([int((ids // num_local != group.rank).sum()) for ids in chosen])
    # This rank's tokens leave it and their gradients come back; the other's results leave it.
    num_rows = 2 * sum(int(counts.sum()) for counts in collect(leaving))
    counts_bytes = 8 * num_local * len(chosen)
    replicated = sum(w.nbytes for name, w in model.named_parameters() if "experts" not in name)
    return num_rows * SIZES.hidden_size * 4 + counts_bytes + replicated


def measure_peak(step: Step, batch: Mapping[str, Tensor]) -> int:
    """Most bytes that torch has allocated in a backward pass beyond those at its start."""
    assert step.backend is not None
    step.backend.use_order(step.order)
    step.model.zero_grad()
    loss = step.run(**batch).loss
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as watched:
        loss.backward()
    results: Any = watched.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def run(num_turns: int) -> Measured:
    torch.set_num_threads(1)
    group = Group.world()
    model = lancet.parallelize(build(SIZES), group)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    backend = lancet.Backend(group, partition=None, memory_bytes=1 << 40)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    batches = SIZES.batches(group.rank)
    batch = next(batches)
    ways = {name: Step(compiled, model, optimizer, backend, name) for name in (RIGHT, *WRONG)}
    ways[RIGHT].differentiate(batch)
    (executor,) = (e for e in backend.executors if e.captured.direction == "backward")
    ops = share_ops(executor)
    wrong = {
        TENTH: scale_communication(ops, 0.1),
        TENFOLD: scale_communication(ops, 10.0),
        MIXED: draw_wrong(ops),
    }
    sums = describe_sums(executor, group)
    for name, listed in wrong.items():
        executor.add_order(name, share_plan(plan_ops(listed, sums)).launches)
    captured = Step(compiled, model, optimizer, backend, "captured")
    compared = compare_gradients([captured, *ways.values()], batch)[1:]
    routed_bytes = count_routed_bytes(model, batch)
    before = group.ledger.snapshot()
    captured.differentiate(batch)
    sent = group.ledger.snapshot().diff(before).by_op()
    sent_bytes = sum(sent[op].sent_bytes for op in ("exchange", "all_reduce"))

    # Long exchanges move most; a group's buffer would hide what moves cost.
    longer = wrong[TENFOLD]
    limited = share_plan(plan_ops(longer, None, collect(executor.tensors), 0))
    executor.add_order("no limit", share_plan(plan_ops(longer)).launches)
    executor.add_order("limited", limited.launches)
    peaks = {
        name: measure_peak(Step(compiled, model, optimizer, backend, name), batch)
        for name in ("captured", "no limit", "limited")
    }

    nodes = repeat(ops, NUM_NODES)
    began = time.thread_time()
    plan_ops(nodes, repeat_sums(sums, nodes))
    planning_s = time.thread_time() - began
    return Measured(
        count_moved(ops),
        count_moved(scale_communication(ops, 0.0)),
        take_turns(ways, batches, num_turns),
        {name: is_equal for name, (is_equal, _) in zip(ways, compared, strict=True)},
        sent_bytes,
        routed_bytes,
        planning_s,
        len(nodes),
        peaks,
        sum(map(len, limited.moved.values())),
    )


def bench_controls(benchmark, record_claim):
    words = [handicap(cores=[0]), handicap(cores=[1])]
    with (
        NetLab(hosts=2, rate=RATE) as lab,
        lab.pool(handicaps=words, timeout=timedelta(minutes=9)) as pool,
    ):
        ranks = benchmark.pedantic(lambda: pool.run(run, TURNS).results, rounds=1)
    for record in (record_free, record_wrong, record_bytes, record_planning, record_memory):
        record(ranks, record_claim)


def record_free(ranks: Sequence[Measured], record_claim: Any) -> None:
    """Nothing is moved for exchanges that take no time."""
    first = ranks[0]
    record_claim(
        Claim(
            name="operations moved for exchanges of no time", unit="operations",
            ours=first.num_moved_free, baseline=0, baseline_name="none", higher_is_better=False,
            correct=first.num_moved_free == 0 and first.num_moved > 0,
            detail=f"with measured times {first.num_moved} operations are moved",
            source=COMMAND,
        )
    )  # fmt: skip


def record_wrong(ranks: Sequence[Measured], record_claim: Any) -> None:
    """Plans made from times that are wrong by a factor of 10."""
    seconds = {
        name: [max(own) for own in zip(*(rank.turns.seconds[name] for rank in ranks), strict=True)]
        for name in (RIGHT, *WRONG)
    }
    detail = "gradients of all plans have the captured order's bits; seconds: " + ", ".join(
        f"{name} {typical(own)}" for name, own in seconds.items()
    )
    for name in WRONG:
        figures = pair_turns(seconds[RIGHT], seconds[name])
        record_claim(
            Claim(
                name="training step by the right times, 100 Mbit/s", unit="s", baseline_name=name,
                correct=all(all(rank.same_bits.values()) for rank in ranks), detail=detail,
                source=COMMAND, **figures,
            ),
            aim=1.0,
        )  # fmt: skip


def record_bytes(ranks: Sequence[Measured], record_claim: Any) -> None:
    """What the ledger counted in a step beside what the routing asks for."""
    sent, routed = (sum(getattr(r, key) for r in ranks) for key in ("sent_bytes", "routed_bytes"))
    record_claim(
        Claim(
            name="bytes that two ranks send in a step", unit="MB", ours=sent / 1e6,
            baseline=routed / 1e6, baseline_name="the routing's rows, numbers of rows and dense gradients",
            higher_is_better=False, correct=sent == routed > 0,
            detail=f"{sent:,} and {routed:,} bytes, rows counted by hooks on the routers",
            source=COMMAND,
        ),
        aim=1.0,
    )  # fmt: skip


def record_planning(ranks: Sequence[Measured], record_claim: Any) -> None:
    """Planning 3,000 operations on one core."""
    first = ranks[0]
    record_claim(
        Claim(
            name="planning 3,000 operations, one core", unit="s", ours=first.planning_s,
            baseline=PLANNING_AIM_S, baseline_name="the aim", higher_is_better=False,
            correct=first.num_planned == NUM_NODES and first.num_moved > 0,
            detail="processor time of the planning thread; the captured backward graph repeated",
            source=COMMAND,
        ),
        aim=1.0,
    )  # fmt: skip


def record_memory(ranks: Sequence[Measured], record_claim: Any) -> None:
    """The peak of a plan that may exceed the captured order's by nothing."""
    ratios = [rank.peaks["captured"] / rank.peaks["limited"] for rank in ranks]
    words = "; ".join(
        f"rank {number}: "
        + ", ".join(f"{name} {peak / 2**20:.2f} MiB" for name, peak in rank.peaks.items())
        for number, rank in enumerate(ranks)
    )
    moved = min(rank.num_moved_limited for rank in ranks)
    record_claim(
        Claim(
            name="peak of a plan without more memory, beyond the start of the backward pass",
            unit="of the captured order's", ours=1 / min(ratios), baseline=1.0,
            baseline_name="the captured order", higher_is_better=False, correct=moved > 0,
            detail=f"{moved} operations moved, sums one by one; {words}; where no order without a limit takes "
            "more than the captured one, the limit does not bind", source=COMMAND,
        ),
        aim=1.0, spread=(min(ratios), max(ratios)),
    )  # fmt: skip
