"""Self-conditioning and two backbones: weights are those of plain training."""

import pytest
import torch

from diffusionpipe.job.draws import Draw, decide
from diffusionpipe.runtime.engine import Engine
from shared.errors import ConfigError

from .toy import (
    BATCH,
    CONDITIONED_PLANS,
    PLANS,
    PROBABILITY,
    WIDTH,
    encode_ids,
    encode_pixels,
    make_batches,
    make_conditioned_job,
    make_inputs,
    make_job,
    make_job_of_two,
    make_model,
    make_opposite_plan,
    make_sgd,
    make_slow_sgd,
    square,
    train_conditioned_plainly,
    train_two_plainly,
)


def gather(engine, batches):
    """Losses, and this rank's weights by name."""
    losses = list(engine.steps(batches))
    held = {
        f"{backbone}.{key}" if len(engine.job.chains) > 1 else key
        for stage in engine.plan.stages_of(engine.rank)
        for backbone in [engine.plan.backbones[stage]]
        for layer in range(*engine.plan.spans[stage])
        for key in engine.job.chains[backbone].list_parameters(layer)
    }
    return losses, {key: engine.job.trained[key].detach().clone() for key in held}


def check(results, expected, names):
    losses, weights = expected
    weights = dict(zip(names, weights.values(), strict=True))
    for got_losses, got in results:
        assert got_losses == pytest.approx(losses, rel=1e-11)
        for key, value in got.items():
            torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-11)
    assert {key for _, got in results for key in got} == set(weights)


def train_conditioned(name, batches):
    plan = CONDITIONED_PLANS[name]()
    return gather(Engine(make_conditioned_job(), plan, make_slow_sgd), batches)


def test_some_steps_predict_twice_and_some_once():
    decided = [decide(0, step, PROBABILITY) for step in range(5)]
    assert 0 < sum(decided) < 5


@pytest.mark.parametrize(
    ("name", "last_rows"),
    [
        ("one process", BATCH),
        ("chain of 2", BATCH),
        ("data 2", BATCH),
        ("chain of 2, replicated", BATCH),
        ("folded 2", 5),
        ("chain of 3 and 1 replicas", 5),
        *(
            pytest.param(name, BATCH, marks=pytest.mark.slow)
            for name in ("folded 2", "chain of 4", "chain of 3 and 1 replicas")
        ),
    ],
)
def test_self_conditioned_weights_are_those_of_one_process(pair, ranks, name, last_rows):
    batches = make_batches(5, last_rows)
    expected = train_conditioned_plainly(batches)
    names = list(make_conditioned_job().trained)
    num_ranks = CONDITIONED_PLANS[name]().num_ranks
    if num_ranks == 1:
        results = [train_conditioned(name, batches)]
    else:
        pool = {2: pair, 4: ranks}[num_ranks]
        results = pool.run(train_conditioned, name, batches).results
    check(results, expected, names)


def test_a_plan_without_the_second_pass_is_refused():
    with pytest.raises(
        ConfigError, match=r"plan.estimate_order: expected orders of steps with self"
    ):
        Engine(make_conditioned_job(), PLANS["one process"](), make_sgd)


def train_two(num_devices, num_micro_batches, batches):
    plan = make_opposite_plan(num_devices, num_micro_batches)
    return gather(Engine(make_job_of_two(), plan, make_sgd), batches)


@pytest.mark.parametrize(
    ("num_devices", "num_micro_batches"),
    [pytest.param(2, 2, marks=pytest.mark.slow), (2, 4), (4, 4)],
)
def test_two_backbones_in_opposite_directions_train_as_alone(
    pair, ranks, num_devices, num_micro_batches
):
    batches = make_batches(3)
    pool = {2: pair, 4: ranks}[num_devices]
    results = pool.run(train_two, num_devices, num_micro_batches, batches).results
    check(results, train_two_plainly(batches), list(make_job_of_two().trained))


def encode_with_noise(batch, frozen, draw):
    """What a locked half of a ControlNet does: it needs the step's draws."""
    clean = encode_pixels(batch)
    return clean + 0.5 * draw.normal((WIDTH,), "frozen", like=clean)


def train_with_frozen_draws(name, batches):
    job = make_job(frozen={"z": encode_with_noise, "text": encode_ids})
    return gather(Engine(job, PLANS[name](), make_sgd), batches)


@pytest.mark.parametrize("name", ["one process", "chain of 2", "data 2"])
def test_frozen_functions_draw_as_in_the_step_that_they_are_for(pair, name):
    batches, model = make_batches(3), make_model()
    own, losses = make_sgd(list(model.parameters())), []
    for step, batch in enumerate(batches):
        draw = Draw(0, step, range(BATCH))
        frozen = {"z": encode_with_noise(batch, {}, draw), "text": encode_ids(batch)}
        made = make_inputs(batch, frozen, draw)
        target = made.pop("target")
        loss = square(model(**made), target).mean()
        own.zero_grad()
        loss.backward()
        own.step()
        losses.append(float(loss.detach()))
    weights = {key: value.detach() for key, value in model.named_parameters()}
    is_alone = name == "one process"
    results = (
        [train_with_frozen_draws(name, batches)]
        if is_alone
        else pair.run(train_with_frozen_draws, name, batches).results
    )
    check(results, (losses, weights), list(make_job().trained))
