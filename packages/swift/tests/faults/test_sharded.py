"""Two replicas of two shards: ranks are killed at every point, and the states are an undisturbed run's."""

import json
import random

import launching
import pytest
import sharded_training
import torch

from swift.training.data import reseed, step_positions

SCRIPT = launching.SCRIPT.with_name("sharded_training.py")
STEPS = 14
BUCKETS = 6


def run(driver, folder, spares=1, steps=STEPS, **given):
    options = ("-n", "4", "--spares", str(spares))
    return driver.train(folder, *options, script=SCRIPT, steps=steps, **given)


@pytest.fixture(scope="module")
def undisturbed(driver, tmp_path_factory):
    """Digests of each step of a run without faults, by its options; each once."""
    known = {}

    def states(**given):
        key = json.dumps(given, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            run(driver, folder, 0, **given)
            assert launching.failures(folder) == []
            known[key] = launching.states(folder)
            # One of each shard: replicas are equal, and every step changes both.
            assert all(len(found) == 2 for found in known[key].values())
            assert len(set().union(*known[key].values())) == 2 * len(known[key])
        return known[key]

    return states


def draw_faults(seed, count, steps=STEPS):
    """Kills in one run, one after another, over rank x bucket x step."""
    draw = random.Random(seed)
    points = ["forward", "backward", "start", "start", "reduce", "update", "finish"]
    return [
        {
            "rank": draw.randrange(4),
            "recovery": number,
            "step": step,
            "point": (point := draw.choice(points)),
            "bucket": draw.randrange(BUCKETS) if point in ("start", "reduce", "update") else None,
        }
        for number, step in enumerate(sorted(draw.sample(range(steps), count)))
    ]


def check(folder, expected, ranks):
    """The states are those expected, and exactly these ranks were lost, in this order."""
    assert launching.states(folder) == expected
    told = launching.failures(folder)
    # One recovery repairs two losses when the second comes before its end.
    assert [one["rank"] for failure in told for one in failure["lost"]] == ranks
    return told


def ranks_of(faults):
    return [one["rank"] for one in faults]


def count_undone(told):
    return sum(rank["undone"] for one in told for rank in one["ranks"].values())


def test_a_killed_shard_is_refilled_and_every_state_is_as_it_was(driver, tmp_path, undisturbed):
    faults = [{"rank": 3, "recovery": 0, "step": 1, "point": "update", "bucket": 2}]
    run(driver, tmp_path, 1, 3, faults=faults)
    check(tmp_path, undisturbed(steps=3), [3])


@pytest.mark.slow
def test_shards_are_killed_one_after_another(driver, tmp_path, undisturbed):
    faults = [
        {"rank": 0, "recovery": 0, "step": 1, "point": "start", "bucket": 3},
        {"rank": 3, "recovery": 1, "step": 3, "point": "update", "bucket": 2},
    ]
    run(driver, tmp_path, 2, 5, faults=faults)
    check(tmp_path, undisturbed(steps=5), [0, 3])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("seed", range(4))
def test_kills_in_one_long_run(driver, tmp_path, undisturbed, optimizer, seed):
    faults = draw_faults(seed, 7)
    run(driver, tmp_path, 4, faults=faults, optimizer=optimizer)
    told = check(tmp_path, undisturbed(optimizer=optimizer), ranks_of(faults))
    assert count_undone(told) > 0


@pytest.mark.slow
def test_kills_while_it_recovers(driver, tmp_path, undisturbed):
    faults = [
        {"rank": 1, "recovery": 0, "step": 0, "point": "start", "bucket": 2},
        {"rank": 0, "recovery": 1, "point": "join"},
        {"rank": 2, "recovery": 2, "step": 4, "point": "update", "bucket": 2},
        {"rank": 3, "recovery": 3, "point": "undo"},
        {"rank": 1, "recovery": 4, "step": 7, "point": "reduce", "bucket": 2},
        {"rank": 0, "recovery": 5, "point": "transfer"},
        {"rank": 0, "recovery": 6, "step": 11, "point": "forward"},
        {"rank": 3, "recovery": 7, "point": "verify"},
    ]
    run(driver, tmp_path, 5, faults=faults)
    check(tmp_path, undisturbed(), ranks_of(faults))


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"clip_norm": 0.1}, {"optimizer": "adagrad"}], ids=str)
def test_clipping_and_state_from_the_start(driver, tmp_path, undisturbed, given):
    faults = [
        {"rank": 1, "recovery": 0, "step": 0, "point": "update", "bucket": 2},
        {"rank": 2, "recovery": 1, "step": 5, "point": "start", "bucket": 3},
    ]
    run(driver, tmp_path, 2, faults=faults, **given)
    check(tmp_path, undisturbed(**given), ranks_of(faults))


@pytest.mark.slow
def test_tensor_parallel_replicas(driver, tmp_path, undisturbed):
    given = {"kind": "tensor", "dropout": 0.0}
    faults = draw_faults(1, 5)
    run(driver, tmp_path, 3, faults=faults, **given)
    check(tmp_path, undisturbed(**given), ranks_of(faults))


@pytest.mark.slow
def test_arithmetic_undo_differs(driver, tmp_path, undisturbed):
    """The control: what rounds is seen."""
    fault = {"rank": 0, "recovery": 0, "step": 5, "point": "start", "bucket": 3, "after_s": 1.0}
    faults = [fault]  # its replica has updated three buckets by then, the other column all
    expected = undisturbed(mode="arith")
    run(driver, tmp_path, 1, faults=faults, mode="arith")
    found = launching.states(tmp_path)
    assert count_undone(launching.failures(tmp_path)) > 0
    assert [found[step] == expected[step] for step in (4, 5, STEPS)] == [True, False, False]


@pytest.mark.slow
def test_a_shard_without_a_survivor_goes_back_to_the_checkpoint(driver, tmp_path, undisturbed):
    faults = [{"rank": rank, "recovery": 0, "step": 6, "point": "forward"} for rank in (1, 3)]
    run(driver, tmp_path, 2, faults=faults, checkpoint=4)
    assert launching.states(tmp_path) == undisturbed(checkpoint=4)
    told = launching.failures(tmp_path)
    # Either is seen first.
    assert {one["rank"] for failure in told for one in failure["lost"]} == {1, 3}
    assert "replica set 1 (ranks 1, 3) has parameters that no survivor holds" in told[0]["reason"]
    assert told[0]["target"] == 4


@pytest.mark.slow
def test_without_a_checkpoint_it_is_said_which_shard_is_lost(driver, tmp_path):
    faults = [{"rank": rank, "recovery": 0, "step": 2, "point": "forward"} for rank in (1, 3)]
    printed = run(driver, tmp_path, 2, 5, faults=faults, status=1)
    assert "expected a checkpoint to go back to, got none: replica set 1 (ranks 1, 3)" in printed


@pytest.mark.slow
def test_where_the_last_holder_of_a_shard_hangs_the_checkpoint_decides(
    driver, tmp_path, undisturbed
):
    # Rank 1 hangs by then.
    faults = [{"rank": 3, "recovery": 0, "step": 6, "point": "forward", "after_s": 0.3}]
    given = {"faults": faults, "hangs": [1, 6]}
    printed = run(driver, tmp_path / "a", 2, checkpoint=4, **given)
    assert "was not free of lost ranks in 0.5 s and ends" in printed
    told = check(tmp_path / "a", undisturbed(checkpoint=4), [3, 1])
    assert told[-1]["target"] == 4
    printed = run(driver, tmp_path / "b", 2, status=1, **given)
    assert "expected a checkpoint to go back to, got none: replica set 1 (ranks 1, 3)" in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shards", "tensor"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_weights_are_those_of_one_process_in_float64(driver, tmp_path, kind, optimizer):
    faults = [{"rank": 2, "recovery": 0, "step": 3, "point": "update", "bucket": 2}]
    run(driver, tmp_path, 1, 8, faults=faults, dropout=0.0, optimizer=optimizer, kind=kind)
    expected = train_alone(8, optimizer, kind)
    for replica in (0, 1):
        parts = [torch.load(tmp_path / f"state-{2 * replica + at}") for at in (0, 1)]
        names = {name.split("/", 1)[1].rsplit("/", 1)[0] for name in parts[0]}
        assert names == set(expected)
        for name, one in expected.items():
            found = [
                next(
                    part[f"shard{at}/{name}/{key}"]
                    for key in ("param", "constant")
                    if f"shard{at}/{name}/{key}" in part
                )
                for at, part in enumerate(parts)
            ]
            torch.testing.assert_close(
                sharded_training.join_parts(name, found, one), one.float(), rtol=1e-3, atol=1e-4
            )


def train_alone(steps, optimizer, kind):
    """Parameters by plain autograd in one process, each rank's samples one after another."""
    reseed(0, 0, 0)
    model = sharded_training.Model(0.0).double()
    trained = [one for one in model.parameters() if one.requires_grad]
    opt = sharded_training.OPTIMIZERS[optimizer](trained)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 3, 0.9)
    ids, targets = sharded_training.make_data().tensors
    num_parts = 2 if kind == "tensor" else 4
    for step in range(steps):
        where = torch.tensor(step_positions(len(ids), sharded_training.BATCH, 3, step))
        mean, after = model.mean.clone(), []
        opt.zero_grad()
        for part in where.chunk(num_parts):
            model.mean.copy_(mean)
            for half in (part[::2], part[1::2]):
                loss = sharded_training.loss_of(model, ids[half], targets[half])
                (loss / 2 / num_parts).backward()
            after.append(model.mean.clone())
        model.mean.copy_(after[0])  # the first rank's counts
        opt.step()
        schedule.step()
    return {name: one.detach() for name, one in model.named_parameters()}
