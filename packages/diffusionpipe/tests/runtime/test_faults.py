"""Bad input, ranks that disagree and ranks that die: what is told, and that nothing waits without end."""

import os
import re
import signal
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

import diffusionpipe as dp
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.layers import OUTPUT, ChainLayer
from diffusionpipe.runtime.engine import Engine
from diffusionpipe.runtime.links import Links
from diffusionpipe.runtime.stages import GradientSums, StageCompute
from diffusionpipe.runtime.weights import is_freed
from shared.comms import Group, RankPool
from shared.errors import CommError, ConfigError, DataError, DivergenceError, RankFailure
from shared.topology import Cluster
from shared.topology.device import CPU

from .conftest import MODULES
from .test_engine import train
from .toy import (
    BATCH,
    PLANS,
    encode_ids,
    encode_pixels,
    make_batch,
    make_batches,
    make_inputs,
    make_job,
    make_model,
    make_plan,
    make_sgd,
    train_plainly,
)


def die(name, victim, kind):
    """Kills a rank as it begins a pass of micro-batch 1 in step 1."""
    run = getattr(StageCompute, kind)
    count = 0

    def run_or_die(self, stage, micro_batch, *rest, **options):
        nonlocal count
        count += micro_batch == 1
        if Group.world().rank == victim and micro_batch == 1 and count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, stage, micro_batch, *rest, **options)

    with mock.patch.object(StageCompute, kind, run_or_die):
        train(name, make_batches(3))


@pytest.mark.parametrize(
    ("name", "victim", "kind", "told"),
    [
        ("chain of 2", 1, "forward", r"rank 0: .* rank 1 failed .*micro-batch \d, stage \d to \d"),
        pytest.param(
            "chain of 4",
            2,
            "backward",
            r"rank 1: .* rank 2 failed .*micro-batch \d, stage \d to \d",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "data 2",
            0,
            "backward",
            r"rank 1: .*(rank 0 failed|ranks \[0, 1\] failed in phase)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_killed_rank_ends_the_others_with_the_edge_and_micro_batch(name, victim, kind, told):
    num_ranks = PLANS[name]().num_ranks
    with RankPool(num_ranks, modules=MODULES) as pool, pytest.raises(RankFailure) as failure:
        pool.run(die, name, victim, kind)
    text = str(failure.value)
    assert f"rank {victim} of {num_ranks} failed running die: killed by SIGKILL" in text
    assert re.search(told, text), text
    assert "in step 1" in text


def test_a_sum_of_gradients_that_fails_names_its_step():
    engine = make_alone()
    with (
        mock.patch.object(GradientSums, "wait", side_effect=CommError("rank 1 failed")),
        pytest.raises(CommError) as failure,
    ):
        list(engine.steps(make_batches(1)))
    assert failure.value.__notes__ == ["rank 0 was at the sums of gradients in step 0"]


def make_unlike(fact):
    """Engines whose rank 1 has something else; returns what each rank is told."""
    is_other = Group.world().rank == 1
    plan, job, seed = PLANS["chain of 2"](), make_job(), 0
    if fact == "plan" and is_other:
        plan = make_plan("chain", [[0], [1]], 3)
    if fact == "seed" and is_other:
        seed = 1
    if fact == "job" and is_other:
        model = make_model()
        model.down[0].inner.bias.requires_grad_(False)
        job = make_job(model)
    with pytest.raises(CommError) as told:
        Engine(job, plan, make_sgd, seed)
    return str(told.value)


@pytest.mark.parametrize("fact", ["plan", "seed", "job"])
def test_unlike_ranks_are_refused_before_step_0(pair, fact):
    first, second = pair.run(make_unlike, fact).results
    assert first == second
    assert f"expected the same {fact} on all ranks" in first
    assert "on the ranks [1]" in first


def encode_twice(batch):
    return 2 * encode_pixels(batch)


def begin_unlike(what):
    is_other = Group.world().rank == 1
    model = make_model(seed=is_other and what == "weights")
    encode = encode_twice if is_other and what == "encoders" else encode_pixels
    job = make_job(model, frozen={"z": encode, "text": encode_ids})
    engine = Engine(job, PLANS["chain of 2"](), make_sgd)
    with pytest.raises(CommError) as told:
        next(engine.steps(make_batches(2)))
    return str(told.value)


@pytest.mark.parametrize(
    ("what", "told"), [("weights", "the output of backbone 0"), ("encoders", "frozen 'z'")]
)
def test_unlike_weights_are_refused_before_step_0(pair, what, told):
    for text in pair.run(begin_unlike, what).results:
        assert "expected the same weights, by the mean size of" in text
        assert told in text


def make_broken():
    """An engine whose rank 1 has a BatchNorm that trains."""
    model = make_model()
    if Group.world().rank == 1:
        model.down[1].add_module("norm", nn.BatchNorm1d(6))
    error = ConfigError if Group.world().rank == 1 else CommError
    with pytest.raises(error) as told:
        Engine(make_job(model), PLANS["chain of 2"](), make_sgd)
    return str(told.value)


def test_a_rank_that_cannot_go_on_stops_all(pair):
    first, second = pair.run(make_broken).results
    assert "BatchNorm" in second
    assert "on the ranks [1]" in first


def is_unchanged(before, job):
    """Whether the weights that this rank keeps are as they were."""
    pairs = zip(before, job.trained.values(), strict=True)
    kept = [torch.equal(old, new) for old, new in pairs if not is_freed(new)]
    return bool(kept) and all(kept)


def diverge(name, batches, model=None, **settings):
    """What is told, whether weights changed, and losses of good batches afterwards."""
    job = make_job(model, **settings)
    engine = Engine(job, PLANS[name](), make_sgd)
    before = [value.clone() for value in job.trained.values()]
    with pytest.raises(DivergenceError) as told:
        list(engine.steps(batches))
    same = is_unchanged(before, job)
    gradients = [value.grad for value in job.trained.values()]
    return str(told.value), same, gradients, list(engine.steps(make_batches(2)))


@pytest.mark.parametrize("name", ["chain of 2", "folded 2", "data 2"])
def test_nan_is_told_with_stage_and_samples_and_changes_no_weight(pair, name):
    bad = make_batch(0)
    bad["pixels"][7, 2] = torch.nan
    losses, _ = train_plainly(make_batches(2))
    for told, same, gradients, later in pair.run(diverge, name, [bad]).results:
        assert "step 0: expected finite numbers, got NaN or infinity in" in told
        assert "samples [7]" in told
        assert "stage 0" in told
        assert same
        assert all(one is None for one in gradients)
        assert later == pytest.approx(losses, rel=1e-12)


def square_root(output, target):
    """Zero, with an infinite derivative, for samples whose target begins with a positive number."""
    value = (output - target).square().mean(1)
    return (value * (target[:, 0] <= 0)).sqrt()


def find_positive(batch):
    """Samples of step 0 whose target begins with a positive number."""
    frozen = {"z": encode_pixels(batch), "text": encode_ids(batch)}
    target = make_inputs(batch, frozen, Draw(0, 0, range(BATCH)))["target"]
    return [row for row in range(BATCH) if target[row, 0] > 0]


def test_a_gradient_that_is_not_finite_names_the_stage_that_sends_it_back(pair):
    samples = find_positive(make_batches(1)[0])
    assert 0 < len(samples) < BATCH
    for told, same in pair.run(diverge_backward_only, "chain of 2").results:
        assert f"in the gradients that stage 1 sends back, samples {samples}" in told
        assert same


def diverge_backward_only(name):
    engine = Engine(make_job(loss=square_root), PLANS[name](), make_sgd)
    before = [value.clone() for value in engine.job.trained.values()]
    with pytest.raises(DivergenceError) as told:
        list(engine.steps(make_batches(1)))
    return str(told.value), is_unchanged(before, engine.job)


def move_all(name, batches):
    """Weights where from step 2 on every wait is over when it is looked for; and how many jobs moved."""
    engine = Engine(make_job(), PLANS[name](), make_sgd)

    def has_arrived(*_):
        return engine.step >= 2

    with mock.patch.object(Links, "has_arrived", has_arrived):
        losses = list(engine.steps(batches))
    report = engine.report()
    return losses, [[step.num_late for step in steps] for steps in report.steps]


def test_late_frozen_jobs_move_to_the_end_and_are_counted(pair):
    batches = make_batches(6)
    losses, _ = train_plainly(batches)
    for got, num_late in pair.run(move_all, "chain of 2", batches).results:
        assert got == pytest.approx(losses, rel=1e-12)
        # Rank 0 waits for gradients before each of 4 backward passes; rank 1 for none. Where as many
        # waits were over as not, the plan is taken to mean it so.
        assert num_late == [[0, 0, 4, 4, 0, 0], [0, 0, 0, 0, 0, 0]]


def test_a_plan_for_another_number_of_ranks_is_refused():
    with pytest.raises(ConfigError, match=r"a plan for 1 ranks, got one for 2; start as many"):
        Engine(make_job(), PLANS["chain of 2"](), make_sgd)


def test_a_plan_for_another_job_or_torch_is_refused():
    job, plan = make_job(), PLANS["one process"]()
    prints = job.list_fingerprints()
    Engine(job, replace(plan, fingerprints=prints), make_sgd)
    narrow = make_job(make_model(dtype=torch.float32)).list_fingerprints()
    with pytest.raises(
        ConfigError, match=rf"for this job \({prints['job']}\), got .* another \({narrow['job']}\)"
    ):
        Engine(job, replace(plan, fingerprints=narrow), make_sgd)
    with pytest.raises(
        ConfigError, match=r"made for this torch .* got one made for another \(1.0\); profile"
    ):
        Engine(job, replace(plan, fingerprints=prints | {"torch": "1.0"}), make_sgd)


def test_a_profile_of_the_same_layers_with_other_weights_is_refused(tmp_path):
    job, narrow = make_job(), make_job(make_model(dtype=torch.float32))
    dp.profile(job, make_batch(0), sizes=[1], repeats=1).save(tmp_path / "profile.json")
    measured = dp.JobProfile.load(tmp_path / "profile.json")
    alone = Cluster.uniform(1, 1, CPU)
    # A plan that was made without the job is for this job too.
    by_profile = dp.plan(None, measured, alone, batch_size=BATCH)
    assert by_profile.fingerprints == job.list_fingerprints()
    assert dp.plan(job, measured, alone, batch_size=BATCH).fingerprints == by_profile.fingerprints
    own, other = (each.list_fingerprints()["job"] for each in (narrow, job))
    with pytest.raises(ConfigError, match=rf"one of this job \({own}\), .* functions \({other}\)"):
        dp.plan(narrow, measured, alone, batch_size=BATCH)


@pytest.mark.unchecked
def test_a_made_optimizer_is_refused():
    job = make_job()
    made = torch.optim.SGD(list(job.trained.values()))
    with pytest.raises(ConfigError, match=r"expected what makes one, .* got a made SGD"):
        Engine(job, PLANS["one process"](), made)  # pyrefly: ignore[bad-argument-type]


def make_alone(job=None):
    return Engine(job or make_job(), PLANS["one process"](), make_sgd)


def test_batches_of_another_size_than_planned_are_refused():
    with pytest.raises(DataError, match=r"step 0: expected 1 to 12 samples, .* got 13"):
        next(make_alone().steps([make_batch(0, BATCH + 1)]))
    with pytest.raises(DataError, match=r"step 0: expected 1 to 12 samples, .* got 0"):
        next(make_alone().steps([make_batch(0, 0)]))


def test_a_plan_of_other_layers_is_refused():
    job = make_job()
    short = replace(PLANS["one process"](), spans=((0, 8),))
    with pytest.raises(ConfigError, match=r"plan.spans: expected the 9 layers of backbone 0 once"):
        next(Engine(job, short, make_sgd).steps(make_batches(1)))


def test_a_plan_that_encodes_other_components_is_refused():
    plan = PLANS["one process"]()
    order = [a._replace(name="clip") if a.name == "text" else a for a in plan.order[0]]
    with pytest.raises(
        ConfigError, match=r"frozen components \['text', 'z'\], got \['clip', 'z'\]"
    ):
        next(
            Engine(make_job(), replace(plan, order=(tuple(order),)), make_sgd).steps(
                make_batches(1)
            )
        )


def test_a_value_without_a_row_a_sample_is_not_cut(ranks):
    for told in ranks.run(cut_pairs).results:
        assert "as many replicas of the stages 0 and 1, as 'pairs' has not one row a sample" in told


def cut_pairs():
    torch.manual_seed(0)
    linear = nn.Linear(6, 6).double()
    layers = [
        ChainLayer("a", lambda s: {"pairs": linear(s["sample"]).repeat(2, 1)}, ("sample",), ("pairs",), (linear,)),
        ChainLayer("b", lambda s: {OUTPUT: s["pairs"][: len(s["pairs"]) // 2]}, ("pairs",), (OUTPUT,), ()),
    ]  # fmt: skip
    job = make_job_of(layers)
    plan = replace(make_plan("chain", [[0, 1, 2], [3]], 2), spans=((0, 1), (1, 2)))
    with pytest.raises(ConfigError) as told:
        next(Engine(job, plan, make_sgd).steps(make_batches(1)))
    return str(told.value)


def make_job_of(layers):
    from diffusionpipe.job.chain import chain
    from diffusionpipe.job.job import Job

    from .toy import encode_ids, encode_pixels, square

    def inputs(batch, frozen, draw):
        return {"sample": frozen["z"], "target": frozen["text"]}

    return Job(chain(layers), {"z": encode_pixels, "text": encode_ids}, inputs, square)


def train_unused():
    """Whether weights changed whose value the next stage reads without a gradient; and others'."""
    torch.manual_seed(0)
    used, unused, last = (nn.Linear(6, 6).double() for _ in range(3))
    layers = [
        ChainLayer("a", lambda s: {"h": used(s["sample"]), "x": unused(s["sample"])}, ("sample",), ("h", "x"), (used, unused)),
        ChainLayer("b", lambda s: {OUTPUT: last(s["h"] + s["x"].detach())}, ("h", "x"), (OUTPUT,), (last,)),
    ]  # fmt: skip
    before = [linear.weight.detach().clone() for linear in (used, unused)]
    plan = replace(make_plan("chain", [[0], [1]], 2), spans=((0, 1), (1, 2)))
    list(Engine(make_job_of(layers), plan, make_sgd).steps(make_batches(2)))
    return [
        not torch.equal(*pair) for pair in zip(before, (used.weight, unused.weight), strict=True)
    ]


def test_a_value_that_changes_no_loss_gets_a_gradient_of_zero(pair):
    first, _ = pair.run(train_unused).results
    assert first == [True, False]
