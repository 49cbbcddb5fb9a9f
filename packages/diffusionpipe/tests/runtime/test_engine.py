"""Weights after some steps are those of plain training, whatever the plan: of a U-Net and of a toy."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from diffusionpipe.planner.plan import Action
from diffusionpipe.runtime.engine import Engine
from diffusionpipe.runtime.stages import StageCompute
from shared.comms import RankPool

from . import unets
from .conftest import MODULES
from .toy import (
    BATCH,
    PLANS,
    make_adam,
    make_batches,
    make_job,
    make_plan,
    make_sgd,
    train_plainly,
)

TOLERANCE = 1e-12
"""Relative, in float64: only the order of additions differs."""


@pytest.fixture(scope="module")
def unet_pair():
    """Comes first in this file, so that ranks are forked from a process that has imported diffusers."""
    with RankPool(2, modules=(*MODULES, *unets.MODULES)) as pool:
        yield pool


def check_unet(pool, name, has_lora):
    expected_losses, expected = unets.train_plainly(has_lora)
    results = pool.run(unets.train, name, has_lora).results
    for losses, weights in results:
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        for key, value in weights.items():
            scale = float(expected[key].abs().max())
            assert float((value - expected[key]).abs().max()) <= 1e-9 * scale
    assert {key for _, weights in results for key in weights} == set(expected)


@pytest.mark.parametrize(
    ("name", "has_lora"),
    [
        ("folded", False),
        ("chain", True),
        pytest.param("chain", False, marks=pytest.mark.slow),
        pytest.param("data", False, marks=pytest.mark.slow),
        pytest.param("folded", True, marks=pytest.mark.slow),
    ],
)
def test_a_unets_weights_are_those_of_plain_diffusers_code(unet_pair, name, has_lora):
    check_unet(unet_pair, name, has_lora)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "has_lora"), [("folded of 4", False), ("chain, replicated", True)]
)
def test_a_unets_weights_on_four_ranks_are_those_of_plain_diffusers_code(ranks, name, has_lora):
    check_unet(ranks, name, has_lora)


def train(name, batches, optimizer=make_sgd, model=None):
    """Losses of this rank, and the weights of its stages."""
    engine = Engine(make_job(model), PLANS[name](), optimizer, seed=0)
    losses = list(engine.steps(batches))
    own = engine.job.trained
    held = {
        key
        for stage in engine.plan.stages_of(engine.rank)
        for layer in range(*engine.plan.spans[stage])
        for key in engine.job.chains[0].list_parameters(layer)
    }
    return losses, {key: own[key].detach().clone() for key in held}


def measure_error(results, batches, optimizer=make_sgd, model=None):
    """Largest difference of losses and weights to plain training, relative to the largest weight."""
    losses, weights = train_plainly(batches, optimizer, model=model)
    # The job's model is a list of modules in the order of layers.
    expected = dict(zip(make_job().trained, weights.values(), strict=True))
    errors = []
    seen = set()
    for got_losses, got in results:
        errors += [abs(a - b) / abs(b) for a, b in zip(got_losses, losses, strict=True)]
        for key, value in got.items():
            reference = expected[key]
            errors.append(float((value - reference).abs().max() / reference.abs().max()))
        seen |= set(got)
    assert seen == set(expected)
    return max(errors)


def pool_of(name, pair, ranks):
    return {2: pair, 4: ranks}[PLANS[name]().num_ranks]


SLOW = ("chain of 2, replicated", "chain of 1, 2 and 1 replicas", "data 4")
"""Their weights are seen by default behind a short batch, or behind steps that predict twice."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in PLANS
        if name != "one process"
    ],
)
def test_weights_after_three_steps_are_those_of_one_process(pair, ranks, name):
    results = pool_of(name, pair, ranks).run(train, name, make_batches()).results
    assert measure_error(results, make_batches()) < TOLERANCE


def test_one_process_needs_no_ranks():
    assert measure_error([train("one process", make_batches())], make_batches()) < TOLERANCE


@pytest.mark.parametrize("name", ["folded 2", "data 2", "chain of 2"])
def test_an_optimizer_with_state_takes_the_same_steps(pair, name):
    results = pair.run(train, name, make_batches(), make_adam).results
    # Adam divides by small second moments.
    assert measure_error(results, make_batches(), make_adam) < 1e-8


def train_stale(name, batches):
    """As `train`, but encodes the batch of the step again in place of the next one."""
    begin = StageCompute.begin

    def begin_stale(self, step, batch, following):
        begin(self, step, batch, batch if batch and following else following)

    with mock.patch.object(StageCompute, "begin", begin_stale):
        return train(name, batches)


def test_the_previous_batchs_frozen_output_gives_other_weights(pair):
    results = pair.run(train_stale, "folded 2", make_batches()).results
    assert measure_error(results, make_batches()) > 1e-3


@pytest.mark.parametrize(
    ("name", "last_rows"),
    [
        ("chain of 2", 1),
        ("folded 2", 5),
        ("data 2", 1),
        ("data 4", 5),
        ("chain of 1, 2 and 1 replicas", 1),
        pytest.param("chain of 1, 2 and 1 replicas", BATCH - 1, marks=pytest.mark.slow),
    ],
)
def test_a_short_last_batch_counts_its_samples_only(pair, ranks, name, last_rows):
    batches = make_batches(3, last_rows)
    results = pool_of(name, pair, ranks).run(train, name, batches).results
    assert measure_error(results, batches) < TOLERANCE


def run_in_parts(name, batches):
    """Steps by two calls, and none by a third; a loop that is left early is no hindrance."""
    engine = Engine(make_job(), PLANS[name](), make_sgd)
    losses = []
    for loss in engine.steps(batches):
        losses.append(loss)
        if len(losses) == 2:
            break
    losses += engine.steps(batches[2:])
    losses += engine.steps([])
    return losses, engine.step


@pytest.mark.parametrize("name", ["folded 2", "data 2"])
def test_a_loader_may_end_anywhere(pair, name):
    batches = make_batches(5)
    losses, _ = train_plainly(batches)
    for got, step in pair.run(run_in_parts, name, batches).results:
        assert got == pytest.approx(losses, rel=TOLERANCE)
        assert step == 5


def read_ahead(name, num_steps):
    """Number of batches that were read when each step's loss came."""
    count = 0

    def generate():
        nonlocal count
        for batch in make_batches(num_steps):
            count += 1
            yield batch

    engine = Engine(make_job(), PLANS[name](), make_sgd)
    return [count for _ in engine.steps(generate())]


def test_batches_are_read_one_ahead():
    assert read_ahead("one process", 4) == [2, 3, 4, 4]


def export_weights(name, folder, batches):
    engine = Engine(make_job(), PLANS[name](), make_sgd)
    list(engine.steps(batches))
    engine.export(folder)


@pytest.mark.parametrize("name", ["folded 4", "chain of 3 and 1 replicas"])
def test_the_exported_weights_are_those_of_one_process(ranks, name, tmp_path):
    ranks.run(export_weights, name, str(tmp_path / "out"), make_batches())
    export_weights("one process", str(tmp_path / "alone"), make_batches())
    files = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "out").iterdir())
    for path in (tmp_path / "alone").iterdir():
        ours, alone = (torch.load(folder / path.name) for folder in (tmp_path / "out", path.parent))
        for key, value in alone.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-12, atol=1e-14)


def report(name, num_steps):
    engine = Engine(make_job(), PLANS[name](), make_sgd)
    list(engine.steps(make_batches(num_steps)))
    return engine.report()


def test_a_report_tells_bytes_by_edge_and_seconds_by_rank(pair):
    mine, other = pair.run(report, "chain of 2", 4).results
    assert str(mine) == str(other)
    assert len(mine.steps) == 2
    assert [len(steps) for steps in mine.steps] == [4, 4]
    for steps in mine.steps:
        for step in steps:
            assert 0 < step.pass_s + step.filled_s <= step.seconds
            kinds = {action.kind for action in step.actions}
            assert {"forward", "backward", "update", "wait"} <= kinds
            assert ("encode" in kinds) == (step.step < 3)
    # Behind layer 4 of 9: the hidden state, which is a skip too, three more skips and the embedding.
    row_bytes = 6 * 8
    between = 5 * row_bytes * BATCH
    # Both stages need text, and latents: for the first input and for the target.
    frozen = 2 * row_bytes * BATCH // 2
    assert mine.edges == {(0, 1): between + frozen, (1, 0): between + frozen}


def train_backward_order(batches):
    """As `train`, with a rank that takes the last micro-batch first, against the order of sending."""
    plan = make_plan("chain", [[0], [1]], 6)
    orders = [[Action(kind, 0, m) for kind in ("forward", "backward") for m in range(6)], []]
    for m in reversed(range(6)):
        orders[1] += [Action("forward", 1, m), Action("backward", 1, m)]
    encodes = [[a for a in own if a.kind == "encode"] for own in plan.order]
    order = tuple(
        (*own, *encode, Action("step")) for own, encode in zip(orders, encodes, strict=True)
    )
    engine = Engine(make_job(), replace(plan, order=order), make_sgd)
    return list(engine.steps(batches))


def test_messages_may_be_used_in_another_order_than_they_are_sent(pair):
    losses, _ = train_plainly(make_batches())
    for got in pair.run(train_backward_order, make_batches()).results:
        assert got == pytest.approx(losses, rel=TOLERANCE)
