"""Planning over orders and micro-batches, what is refused, and what a time limit leaves."""

from functools import cache
from itertools import permutations

import numpy as np
import pytest

from llmpq.config import ModelSpec, Quality, Workload
from llmpq.planner import BASELINES
from llmpq.planner.baselines import plan_baseline
from llmpq.planner.candidates import Candidates
from llmpq.planner.plan import Plan
from llmpq.planner.problem import InfeasiblePlan, Problem
from llmpq.planner.search import plan, solve
from shared.errors import ConfigError

from .problems import SheetCosts, best_by_brute_force

BITS = (4, 8, 16)


def llama(num_layers: int) -> ModelSpec:
    return ModelSpec.from_hf(
        {
            "model_type": "llama",
            "num_hidden_layers": num_layers,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 64,
            "tie_word_embeddings": True,
        }
    )


def draw_noise(num_layers: int, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return np.exp(draw.normal(0, 0.7, num_layers))[:, None] * np.array([0.01, 1e-4, 0.0])


FEW = Workload(num_prompts=2, prompt_tokens=8, new_tokens=5)
WORKLOAD = Workload(num_prompts=4, prompt_tokens=8, new_tokens=5)


def make_plan(kinds, num_layers=4, quality=None, **options):
    costs = SheetCosts(kinds, **options.pop("sheet", {}))
    return plan(
        llama(num_layers),
        costs,
        draw_noise(num_layers),
        options.pop("workload", WORKLOAD),
        quality or Quality(max_kl=0.02),
        bits=BITS,
        group_size=16,
        **options,
    )


@cache
def best_of_all(byte_s: float) -> float:
    """The least objective over all orders, micro-batches, splits and widths of 3 layers."""
    candidates = Candidates(
        model=llama(3),
        costs=SheetCosts(("slow", "fast", "slow"), byte_s=byte_s),
        noise=draw_noise(3),
        workload=FEW,
        quality=Quality(max_kl=0.02),
        bits=BITS,
        group_size=16,
        dtype="bfloat16",
    )
    return min(
        best_by_brute_force(candidates.problem(order, sizes))
        for order in permutations(range(3))
        for sizes in ((1, 1), (1, 2), (2, 2))
    )


@pytest.mark.parametrize("byte_s", [0.0, 1e-5])
@pytest.mark.parametrize("solver", ["milp", "heuristic"])
def test_a_plan_is_the_best_of_all_orders_and_micro_batches(solver, byte_s):
    found = plan(
        llama(3),
        SheetCosts(("slow", "fast", "slow"), byte_s=byte_s),
        draw_noise(3),
        FEW,
        Quality(max_kl=0.02),
        bits=BITS,
        group_size=16,
        dtype="bfloat16",
        solver=solver,
        gap=0.0,
    )
    best = best_of_all(byte_s)
    assert found.objective == pytest.approx(best, rel=1e-6 if solver == "milp" else 0.02)
    assert found.lower_bound <= best * (1 + 1e-7)


def test_a_plan_keeps_within_its_limits_and_can_be_saved(tmp_path):
    found = make_plan(("fast", "slow"))
    written = found.plan
    written.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == written
    assert written.num_layers == 4
    assert written.decode_size % written.prefill_size == 0
    assert found.nats <= 0.02
    assert written.predicted["seconds"] == pytest.approx(found.seconds)
    assert found.tokens_per_s == pytest.approx(4 * 5 / found.seconds)
    assert found.gap <= 0.01
    assert found.is_optimal


def test_the_explanation_names_stages_bottleneck_headroom_and_help():
    text = make_plan(("fast", "slow")).explain()
    for word in ("device", "bottleneck", "free", "nats", "tokens/s", "faster", "help most"):
        assert word in text


def test_a_useless_device_is_left_out():
    sheet = {"speed": {"fast": 1.0, "slow": 1e-4}}
    found = make_plan(("fast", "slow"), sheet=sheet)
    assert [stage.rank for stage in found.plan.stages] == [0]
    assert "left out: device 1" in found.explain()


def test_slow_links_leave_all_but_one_device_out():
    found = make_plan(("fast", "fast"), sheet={"byte_s": 1e-2})
    assert len(found.plan.stages) == 1


def test_more_devices_than_layers():
    found = make_plan(("fast", "fast", "slow", "slow"), num_layers=2)
    assert found.plan.num_layers == 2
    assert 1 <= len(found.plan.stages) <= 2


@pytest.mark.parametrize("kinds", [("fast",), ("slow", "fast")])
def test_one_new_token_is_planned_for_prefill_alone(kinds):
    workload = Workload(num_prompts=3, prompt_tokens=4, new_tokens=1)
    found = make_plan(kinds, workload=workload)
    assert found.seconds > 0
    assert found.is_optimal


def test_without_enough_memory_the_device_the_bytes_and_a_batch_that_fits_are_named():
    sheet = {"memory": {"fast": 600_000, "slow": 500_000}}
    workload = Workload(num_prompts=64, prompt_tokens=8, new_tokens=5)
    with pytest.raises(InfeasiblePlan, match=r"device \d.* MB short.*\d+ prompts at a time"):
        make_plan(("fast", "slow"), sheet=sheet, workload=workload)
    with pytest.raises(InfeasiblePlan, match=r"embedding and head take .* device 0, holds 0 MB"):
        make_plan(("fast",), sheet={"memory": {"fast": 10}})


def test_a_quality_out_of_reach_is_told():
    with pytest.raises(InfeasiblePlan, match="noise of at most"):
        plan(
            llama(4),
            SheetCosts(("fast",)),
            draw_noise(4)[:, :2],
            WORKLOAD,
            Quality(max_kl=1e-9),
            bits=(4, 8),
            group_size=16,
        )


def test_memory_and_quality_that_exclude_each_other_are_told():
    problem = Problem(
        np.ones((4, 1, 2)),
        np.ones((4, 1, 2)),
        np.tile([1.0, 4.0], (4, 1)),
        np.zeros(4),
        np.array([8.0]),
        np.tile([1.0, 0.0], (4, 1)),
        1,
        1,
        2,
        max_noise=1.0,
    )
    with pytest.raises(InfeasiblePlan, match="but not as devices hold whole layers, with a noise"):
        solve(problem)


def test_a_width_that_was_not_measured_is_named():
    with pytest.raises(ConfigError, match=r"device 0.*got 3"):
        plan(
            llama(2),
            SheetCosts(("fast",)),
            np.ones((2, 2)),
            WORKLOAD,
            Quality(),
            bits=(3, 16),
            group_size=16,
        )


def test_noise_of_another_shape_and_unknown_names_are_refused():
    with pytest.raises(ConfigError, match=r"noise: expected .*\(3, 3\)"):
        plan(llama(3), SheetCosts(("fast",)), np.ones((2, 3)), WORKLOAD, Quality(), bits=BITS)
    with pytest.raises(ConfigError, match="solver"):
        make_plan(("fast",), solver="guess")
    with pytest.raises(ConfigError, match="baseline"):
        plan_baseline(
            "best", llama(3), SheetCosts(("fast",)), np.ones((3, 3)), WORKLOAD, Quality(), bits=BITS
        )


def big_problem() -> Problem:
    noise = draw_noise(24, seed=1)
    speed = np.array([1.0, 1.0, 0.5, 0.2])[:, None]
    widths = np.array([4.0, 8.0, 16.0])
    return Problem(
        np.broadcast_to((1 + 1 / widths) / speed, (24, 4, 3)),
        np.broadcast_to(0.01 * widths / speed, (24, 4, 3)),
        np.broadcast_to(widths, (24, 3)),
        np.ones(24),
        np.full(4, 90.0),
        noise,
        8,
        4,
        100,
        max_noise=float(0.5 * noise[:, 0].sum()),
    )


def test_a_time_limit_returns_the_best_plan_with_its_gap():
    problem = big_problem()
    found = solve(problem, "milp", gap=1e-9, time_limit_s=0.01)
    assert problem.is_feasible(found.bounds, found.choice)
    assert not found.is_optimal
    assert 0 < found.gap < 0.2


def test_a_bound_holds_for_the_micro_batches_that_a_time_limit_left_out():
    many = Workload(num_prompts=24, prompt_tokens=8, new_tokens=20)
    hurried, whole = (
        make_plan(("fast", "slow") * 2, 8, workload=many, solver="heuristic", time_limit_s=limit_s)
        for limit_s in (1e-4, 20.0)
    )
    assert 0 < hurried.lower_bound <= whole.objective
    assert hurried.gap > whole.gap


def test_the_heuristic_is_within_two_percent_of_a_proven_bound():
    problem = big_problem()
    proven = solve(problem, "milp", gap=0.01, time_limit_s=30)
    assert proven.gap <= 0.01 + 1e-6
    assert solve(problem, "heuristic").objective <= proven.objective * 1.02


@pytest.mark.parametrize("name", BASELINES)
def test_no_baseline_beats_the_joint_plan(name):
    costs = SheetCosts(("fast", "slow"), byte_s=1e-7)
    settings = (llama(6), costs, draw_noise(6), WORKLOAD, Quality(max_kl=0.03))
    ours = plan(*settings, bits=BITS, group_size=16)
    theirs = plan_baseline(name, *settings, bits=BITS, group_size=16)
    assert theirs.nats <= 0.03
    assert theirs.method == name
    assert ours.objective <= theirs.objective * 1.01


def test_pipeedge_minimises_its_slowest_stage():
    costs = SheetCosts(("fast", "slow"))
    found = plan_baseline(
        "pipeedge",
        llama(6),
        costs,
        draw_noise(6)[:, 1:2],
        WORKLOAD,
        Quality(),
        bits=(8,),
        group_size=16,
    )
    sizes = [stage.layers[1] - stage.layers[0] for stage in found.plan.stages]
    by_rank = dict(zip([stage.rank for stage in found.plan.stages], sizes, strict=True))
    # Speeds are 1 and 0.3: of six layers the slow device's fair share is 1.4.
    assert by_rank == {0: 5, 1: 1}


def test_a_baseline_without_a_plan_says_so():
    with pytest.raises(InfeasiblePlan, match="even: expected a plan within memory"):
        plan_baseline(
            "even",
            llama(4),
            SheetCosts(("fast",)),
            draw_noise(4)[:, :1],
            WORKLOAD,
            Quality(max_kl=0.0),
            bits=(4,),
            group_size=16,
        )
