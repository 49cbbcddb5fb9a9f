from dataclasses import replace

import numpy as np
import pytest
from planner_graphs import SHARE, cast_s, chain

from qsync import CostMapper
from qsync.planner.blocks import Infeasible
from qsync.planner.memory import SavedTensor
from qsync.planner.ranks import RankCosts, allocate, read_target_s
from qsync.planner.replayer import GradientBuckets, RankSeconds, StepReplay
from shared.errors import ConfigError, DataError

ALLOWED = ("fp32", "bf16", "int8")


def costs(slowness, share=SHARE, **fields):
    """A rank whose kernels take `slowness` times as long, and float32 as long again as `share` says."""
    return RankCosts(
        kernel_s=lambda op, precision: slowness * op.numel * share[precision] * 0.1,
        backward_kernel_s=lambda op, precision: slowness * op.numel * share[precision] * 0.2,
        cast_s=lambda source, target, numel: slowness * cast_s(source, target, numel) / 10,
        **fields,
    )


FLOAT32_ONLY = dict.fromkeys(SHARE, 2.0) | {"fp32": 1.0}


def problem(num_ops=24, seed=0):
    random = np.random.default_rng(seed)
    graph = chain(num_ops, numel=20)
    names = [op.name for op in graph.ops]
    errors = random.lognormal(-8, 1.5, num_ops).tolist()
    noise = {n: {"int8": 3 * e, "bf16": e} for n, e in zip(names, errors, strict=True)}
    buckets = GradientBuckets(
        ops=[names[num_ops // 2 :], names[: num_ops // 2]], transfer_s=[0.1, 0.1]
    )
    return graph, noise, buckets, dict.fromkeys(names, "Linear 2x1")


def plan_for(ranks, num_ops=24, **fields):
    graph, noise, buckets, operators = problem(num_ops)
    options = {"precisions": ALLOWED, "operators": operators, "buckets": buckets} | fields
    return allocate(graph, noise, ranks, **options)


def replay_plan(plan, ranks):
    """The step of a plan from the definition: mappers built anew and all ranks replayed."""
    graph, _, buckets, operators = problem()
    seconds = []
    for rank, each in enumerate(ranks):
        mapper = CostMapper(
            graph,
            kernel_s=each.kernel_s,
            cast_s=each.cast_s,
            backward_kernel_s=each.backward_kernel_s,
        )
        for name in operators:
            mapper.set(name, plan.precision(name, rank))
        seconds.append(
            RankSeconds(
                forward_s=mapper.forward_s, backward_s=mapper.backward_s, rest_s=each.rest_s
            )
        )
    return StepReplay(graph, buckets, len(ranks)).run(seconds)


def test_slow_rank_lowers_only_what_it_is_waited_for():
    ranks = [costs(1.0, FLOAT32_ONLY), costs(1.3)]
    plan = plan_for(ranks)
    assert plan.ranks[0].lowered == {}
    assert 0 < len(plan.ranks[1].lowered) < 24
    replayed = replay_plan(plan, ranks)
    assert plan.step_s == replayed.step_s
    # The fast rank's float32 step, which no plan for the slow rank can beat, sets the pace.
    fast_s = replay_plan(plan_for([ranks[0]]), [ranks[0]]).step_s
    assert plan.step_s <= 1.02 * fast_s + 1e-9
    assert plan.float32_s > 1.25 * fast_s
    # Lowering everything would have cost far more noise.
    _, noise, _, _ = problem()
    lowest = sum(row["int8"] for row in noise.values())
    assert plan.ranks[1].noise <= lowest / 3
    assert plan.ranks[1].noise == pytest.approx(
        sum(noise[name][precision] for name, precision in plan.ranks[1].lowered.items())
    )


def test_more_time_means_less_noise():
    noises = [plan_for([costs(1.0)], target_time=f"{share}x").noise for share in (0.5, 0.7, 0.9)]
    assert noises[0] > noises[1] > noises[2] > 0
    assert plan_for([costs(1.0)], target_time="1x").ranks[0].lowered == {}


def test_target_that_is_out_of_reach_gives_the_fastest_plan():
    plan = plan_for([costs(1.0)], target_time="0.01x")
    assert not plan.is_target_met
    fastest = plan_for([costs(1.0)])
    assert fastest.is_target_met
    assert fastest.target_s is None
    assert plan.step_s <= fastest.step_s <= 1.02 * plan.step_s
    assert "is not met" in plan.explain()


def test_rank_with_slack_recovers_even_if_the_target_is_out_of_reach():
    plan = plan_for([costs(1.0, FLOAT32_ONLY), costs(1.3)], target_time="0.01x")
    assert not plan.is_target_met
    assert not plan.ranks[0].lowered
    assert len(plan.ranks[1].lowered) < 24


def test_target_in_seconds_equals_the_share():
    ranks = [costs(1.0)]
    plan = plan_for(ranks, target_time="0.7x")
    assert plan == plan_for(ranks, target_time=0.7 * plan.float32_s)
    assert plan.is_target_met
    assert plan.step_s == replay_plan(plan, ranks).step_s


def test_equal_ranks_get_equal_plans_and_float32_where_nobody_waits():
    slow = costs(1.5)
    plan = plan_for([slow, costs(1.0, FLOAT32_ONLY), slow])
    assert plan.ranks[0] == plan.ranks[2]
    assert plan.ranks[0].lowered
    assert not plan.ranks[1].lowered
    assert not any(each.lowered for each in plan_for([slow, slow]).ranks)


def test_denied_raises_say_what_more_time_would_give():
    plan = plan_for([costs(1.0)], target_time="0.7x")
    denied = plan.ranks[0].denied
    assert len(denied) == 3
    assert all(each.added_s > 0 and each.noise_removed > 0 for each in denied)
    looser = plan_for(
        [costs(1.0)], target_time=plan.target_s + max(each.added_s for each in denied)
    )
    assert looser.noise <= plan.noise - min(each.noise_removed for each in denied)


def test_memory_limit_lowers_a_fast_rank_too():
    graph, _, _, operators = problem(8)
    saved = [SavedTensor(op=op.name, source=op.name, numel=100, role="operand") for op in graph.ops]
    fast = costs(1.0, FLOAT32_ONLY, saved=saved, other_bytes=50, limit_bytes=50 + 8 * 250)
    plan = plan_for([fast, costs(1.2)], 8)
    used = sum({"fp32": 400, "bf16": 200, "int8": 104}[plan.precision(name)] for name in operators)
    assert used <= 8 * 250
    assert plan.ranks[0].lowered
    with pytest.raises(Infeasible, match="memory: expected precisions that fit"):
        plan_for([replace(fast, limit_bytes=50 + 8 * 100), costs(1.2)], 8)


def test_ranks_of_unlike_batches_are_planned_by_their_own_tensors():
    """A rank with twice the batch casts twice the elements, and needs twice the memory."""
    graph = chain(8, numel=40)
    saved = [SavedTensor(op=op.name, source=op.name, numel=200, role="operand") for op in graph.ops]
    large = costs(1.0, graph=graph, saved=saved)
    seconds = [plan_for([each], 8).ranks[0].float32_s for each in (costs(1.0), large)]
    assert seconds[1] == pytest.approx(2 * seconds[0])
    limited = replace(large, limit_bytes=8 * 500)
    plan = plan_for([costs(1.0), limited], 8, target_time="1x")
    assert not plan.ranks[0].lowered
    used = sum(
        {"fp32": 800, "bf16": 400, "int8": 204}[plan.precision(op.name, 1)] for op in graph.ops
    )
    assert used <= 8 * 500


@pytest.mark.parametrize("row", [{"bf16": 0.1}, {"bf16": 0.1, "int8": float("inf")}])
def test_missing_and_infinite_noise_is_named(row):
    graph, noise, buckets, operators = problem()
    noise["fc3"] = row
    with pytest.raises(DataError, match="expected a finite one of 'fc3' in int8"):
        allocate(
            graph, noise, [costs(1.0)], precisions=ALLOWED, operators=operators, buckets=buckets
        )


@pytest.mark.parametrize("target", ["fast", "0x", "-1x", 0, "nan", "infx"])
def test_bad_target_is_refused(target):
    with pytest.raises(ConfigError, match="target_time: expected a share"):
        read_target_s(target, 1.0)


def test_good_targets():
    assert read_target_s("0.8x", 2.0) == 1.6
    assert read_target_s(0.25, 2.0) == 0.25
    assert read_target_s("0.25", 2.0) == 0.25
    assert read_target_s(None, 2.0) is None
