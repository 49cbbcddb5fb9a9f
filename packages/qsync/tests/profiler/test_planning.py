from datetime import timedelta

import pytest
import torch
from torch import nn

import qsync
from qsync.planner.blocks import Infeasible
from qsync.profiler import planning
from qsync.profiler.profile import profile_model
from qsync.runtime.modules import MatMul
from shared.comms.launch import RankPool
from shared.errors import ConfigError, DataError


def _mean_square(model, batch):
    return model(batch).square().mean()


def _build(width=16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 4))
    return model, [torch.randn(6, 8), torch.randn(6, 8), None]


def _scale(profile, factors, cast_s=0.0):
    """A profile whose operators take 1 s in float32 forward and backward, and less when lowered."""
    from dataclasses import replace

    linears = {profile.graph.ops[i].name for i in profile.graph.linears}
    seconds = {
        name: dict(factors) if name in linears else {"fp32": 0.0} for name in profile.forward_s
    }
    casts = {
        pair: type(fit)(alpha_s=cast_s, beta_s_per_byte=0.0) for pair, fit in profile.casts.items()
    }
    return replace(profile, forward_s=seconds, backward_s=seconds, casts=casts)


@pytest.fixture
def measured(monkeypatch):
    """Replaces measured seconds by chosen ones; everything else is real."""
    factors = {"fp32": 1.0, "bf16": 0.5, "int8": 0.25}

    def profile(model, batches, loss_fn, *, precisions):
        return _scale(profile_model(model, batches, loss_fn, precisions=precisions), factors)

    monkeypatch.setattr(planning, "profile_model", profile)
    return factors


def test_a_model_in_half_is_refused_before_it_is_measured():
    model, batches = _build()
    model[3].bfloat16()
    with pytest.raises(ConfigError, match=r"expected float32 weights.*bfloat16 in '3'"):
        qsync.plan(model, batches, _mean_square)


def test_one_rank_takes_the_fastest_step_and_explains_it(measured):
    model, batches = _build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = qsync.plan(model, batches, _mean_square)
    assert [plan.precision(name) for name in ("0", "3")] == ["int8", "int8"]
    assert (plan.step_s, plan.float32_s) == (1.0, 4.0)
    assert plan.noise > 0
    assert "2 of 2 operators are lowered: 2 in int8" in plan.explain()
    assert "idle" not in plan.explain(), "there is nobody to wait for"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    qsync.apply(model, plan)
    _mean_square(model, batches[0]).backward()
    assert model[0].weight.grad.dtype == torch.float32


def test_a_target_leaves_the_more_sensitive_operator_in_float32(measured):
    model, batches = _build()
    noise = qsync.sensitivity(model, batches[:2], _mean_square).noise
    plan = qsync.plan(model, batches, _mean_square, target_time="0.75x")
    assert plan.is_target_met
    assert plan.step_s <= 3.0
    # 1 s has to be saved: both in bf16, or one in int8 or bf16.
    best = min(noise["0"]["bf16"], noise["3"]["bf16"], noise["0"]["bf16"] + noise["3"]["bf16"])
    assert plan.noise == pytest.approx(best, rel=1e-6)


def test_a_target_out_of_reach_is_flagged(measured):
    plan = qsync.plan(*_build(), _mean_square, target_time=0.5)
    assert not plan.is_target_met
    assert "is not met: this is the fastest plan" in plan.explain()


class _Named(nn.Module):
    """Layers whose input is given by name."""

    def __init__(self):
        super().__init__()
        self.inner, self.product, self.outer = nn.Linear(8, 16), MatMul(), nn.Linear(16, 4)

    def forward(self, x):
        x = self.inner(input=x).tanh()
        return self.outer(input=self.product(b=x.t() @ x, a=x))


def test_inputs_may_be_named():
    plan = qsync.plan(_Named(), [torch.randn(6, 8)], _mean_square)
    assert list(plan.operators) == ["inner", "product", "outer"]
    assert not any("FX failed" in note for note in plan.notes)


def test_frozen_parameters_have_no_gradient_and_no_moments():
    model, batches = _build()
    model[0].requires_grad_(False)
    profile = profile_model(model, batches[:2], _mean_square, precisions=["int8"])
    sizes = [4 * p.numel() * (4 if p.requires_grad else 1) for p in model.parameters()]
    assert profile.parameter_bytes == sum(sizes)


def test_memory_below_the_lowest_plan_is_infeasible():
    with pytest.raises(Infeasible, match="expected precisions that fit in 1000 B"):
        qsync.plan(*_build(), _mean_square, memory="1KB")


def test_casts_within_operators_are_not_counted_twice():
    model, batches = _build()
    profile = profile_model(model, batches[:2], _mean_square, precisions=["bf16", "int8"])
    factors = {"fp32": 1.0, "bf16": 0.5, "int8": 0.25}
    costs = _scale(profile, factors, cast_s=0.01).costs()
    mapper = qsync.CostMapper(
        profile.graph,
        kernel_s=costs.kernel_s,
        cast_s=costs.cast_s,
        backward_kernel_s=costs.backward_kernel_s,
    )
    mapper.set("0", "int8")
    mapper.set("3", "bf16")
    assert len(mapper.casts()) > 4
    assert mapper.total_s == pytest.approx(2 * (0.25 + 0.5))


def test_real_seconds_add_up_to_the_step():
    model, batches = _build(256)
    profile = profile_model(model, batches[:2], _mean_square, precisions=["int8"])
    costs = profile.costs()
    mapper = qsync.CostMapper(
        profile.graph,
        kernel_s=costs.kernel_s,
        cast_s=costs.cast_s,
        backward_kernel_s=costs.backward_kernel_s,
    )
    assert mapper.total_s == pytest.approx(profile.step_s)
    before_s = mapper.total_s
    mapper.set("3", "int8")
    parts = (profile.forward_s["3"], profile.backward_s["3"])
    # The casts that an operator's seconds hold are not counted twice.
    least_s = sum(part["int8"] - part["fp32"] for part in parts)
    assert mapper.total_s - before_s >= least_s - 1e-12
    assert profile.parameter_bytes == 4 * 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batches": []}, DataError, "batches: expected at least one, got none"),
        ({"model": nn.Tanh()}, ConfigError, "there is nothing to lower"),
        ({"precisions": ("int3",)}, ConfigError, "got 'int3'"),
        ({"precisions": ()}, ConfigError, "precisions: expected names such as"),
        ({"precisions": "bf16"}, ConfigError, "precisions: expected names such as"),
        ({"model": torch.compile(_build()[0])}, ConfigError, "expected one that is not compiled"),
        ({"target_time": "fast"}, ConfigError, "target_time: expected a share"),
        ({"target_time": "-1x"}, ConfigError, "target_time: expected a share"),
        ({"loss_fn": lambda model, batch: batch.mean()}, DataError, "the model's operators"),
        ({"loss_fn": lambda model, batch: model(batch)}, ConfigError, r"scalar.*got \[6, 4\]"),
        ({"model": _build()[0].requires_grad_(False)}, ConfigError, r"got \[\] without a gradient"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    model, batches = _build()
    given = {"model": model, "batches": batches, "loss_fn": _mean_square} | arguments
    with pytest.raises(error, match=message):
        qsync.plan(**given)


def _plan_on_a_rank(case):
    from torch import distributed

    rank = distributed.get_rank()
    factors = {"fp32": 1.0 + rank, "bf16": 0.6 * (1 + rank), "int8": 0.5 * (1 + rank)}
    planning.profile_model = lambda *arguments, **words: _scale(
        profile_model(*arguments, **words), factors
    )
    model, batches = _build(32 if case == "models" and rank == 1 else 16)
    if case == "batches" and rank == 1:
        batches = []
    if case == "frozen" and rank == 1:
        model[2].requires_grad_(False)
    planning.time_summed_steps = lambda model, batches, loss_fn: 10.0 * (case == "rest")
    try:
        plan = qsync.plan(model, batches, _mean_square)
    except (ConfigError, DataError) as error:
        return f"{type(error).__name__}: {error}"
    own = qsync.sensitivity(model, batches[:2], _mean_square, seed=rank).noise
    lowered = [dict(each.lowered) for each in plan.ranks]
    return plan.fingerprint(), lowered, plan.step_s, plan.noise, own["0"]["int8"] + own["3"]["int8"]


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=timedelta(seconds=60)) as pool:
        yield pool


def test_only_the_slow_rank_lowers_operators(pool):
    first, second = pool.run(_plan_on_a_rank, "alike").results
    assert first[:3] == second[:3]
    assert first[1][0] == {}
    assert first[1][1] == {"0": "int8", "3": "int8"}
    # The fast rank computes for 4 s in float32, as the slow one does now; all-reduces come on top.
    assert first[2] == pytest.approx(4.0, rel=0.05)
    assert first[3] == 0.0
    assert second[3] == pytest.approx((first[4] + second[4]) / 2)


def test_what_a_measured_step_takes_beside_its_replay_is_added_to_each_step(pool):
    alike, rest = (pool.run(_plan_on_a_rank, case).results[0] for case in ("alike", "rest"))
    assert rest[1] == alike[1]
    # Float32 steps take 8 s by their replay and 10 s as measured.
    assert rest[2] == pytest.approx(alike[2] + 2.0, rel=0.05)


def _sum_in_buckets(_):
    from torch import distributed

    from qsync.profiler.transfers import BucketSums

    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(4, 3, sparse=True),
            "inner": nn.Linear(3, 5),
            "unused": nn.Linear(2, 2),
            "outer": nn.Linear(5, 2),
        }
    )

    def loss_fn(model, ids):
        return model["outer"](model["inner"](model["table"](ids)).tanh()).square().sum()

    batches = [torch.tensor([each]) for each in (1, 3)]
    expected = torch.zeros(2, 5)
    for batch in batches:
        model.zero_grad()
        loss_fn(model, batch).backward()
        expected += model["outer"].weight.grad / 2
    model.zero_grad()
    sums = BucketSums(model)
    for _ in range(2):
        model.zero_grad()
        sums.run(loss_fn, model, batches[rank])
    return torch.allclose(model["outer"].weight.grad, expected)


def test_gradients_are_summed_as_ddp_does(pool):
    assert pool.run(_sum_in_buckets, None).results == [True, True]


def test_what_one_rank_refuses_is_raised_on_all(pool):
    first, second = pool.run(_plan_on_a_rank, "batches").results
    assert second.startswith("DataError: batches: expected at least one")
    assert first.startswith("ConfigError: rank 1 failed to plan: DataError: batches: expected")
    for text in pool.run(_plan_on_a_rank, "models").results:
        assert "expected rank 0's 2 operators on every rank, got others on rank 1" in text
    for text in pool.run(_plan_on_a_rank, "frozen").results:
        assert "expected rank 0's 6 trained parameters on every rank, got others on rank 1" in text
