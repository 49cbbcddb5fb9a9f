"""A run that was cut anywhere goes on as if it had not been."""

import errno
import io
import itertools
import json
import os
import stat
from pathlib import Path

import pytest
import torch

from gnnflow.features.store import FeatureStore
from gnnflow.models import TGAT
from gnnflow.sampling.sampler import TemporalSampler
from gnnflow.training.checkpoint import Checkpoint, describe_run
from gnnflow.training.replay import StructureReplay
from shared.data.events import Events
from shared.errors import DataError


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fresh_optimizer": False, "policy": "uniform", "window": "2h", "negatives": "historical"},
        {"model": "remembers", "epochs": 2, "checkpoint_every": 2, "replay": StructureReplay},
        {"fresh_optimizer": False, "optimizer": "sgd", "cache": {"edge": 0.1}, "warmup": 0.0},
    ],
)
def test_resumes_to_the_same_curve_bit_for_bit(toy, tmp_path, settings):
    events = toy.clubs(420, seed=5)

    def make(folder):
        torch.manual_seed(6)
        given = dict(settings)
        if "model" in given:
            given["model"] = toy.Remembers()
        if "replay" in given:
            given["replay"] = given["replay"](0.2, seed=3)
        if given.get("optimizer") == "sgd":
            given["optimizer"] = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
        return toy.trainer_of(events, **given, checkpoint=folder)

    whole = make(None)
    expected = toy.curve(whole.run(events))
    assert len(expected) >= 3
    folder = tmp_path / "run"
    resumed = None
    for cut in (1, 2, None):
        resumed = make(folder)
        run = resumed.run(events)
        # What comes before the cut was yielded by the run before too.
        found = toy.curve(itertools.islice(run, cut))
        run.close()
        assert found == expected[:cut]
    if whole.warmed:
        assert resumed.warmed.loss == whole.warmed.loss
    for one, other in ((resumed.model, whole.model), (resumed.head, whole.head)):
        for name, tensor in other.state_dict().items():
            assert torch.equal(one.state_dict()[name], tensor)
    assert sorted(path.name for path in folder.iterdir()) == ["after-420.safetensors", "state.json"]
    # Once more: everything is there, and nothing is computed.
    again = make(folder)
    assert toy.curve(again.run(events)) == expected
    assert again.history.graph.num_edges == whole.history.graph.num_edges


def test_the_random_state_of_the_process_decides_nothing_and_is_left_alone(toy):
    events = toy.clubs(150)
    found = []
    for seed in (1, 2):
        trainer = toy.trainer_of(events, policy="uniform")
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(toy.curve(trainer.run(events)))
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]
    other = toy.trainer_of(events, policy="uniform", seed=1)
    assert toy.curve(other.run(events)) != found[0]


def test_a_checkpoint_that_is_damaged_or_of_another_run_is_refused(toy, tmp_path):
    events = toy.clubs(300)
    folder = tmp_path / "run"

    def make(**changes):
        return toy.trainer_of(events, checkpoint=folder, **changes)

    next(make().run(events))
    state, tensors = folder / "state.json", next(folder.glob("*.safetensors"))
    good = state.read_text(), tensors.read_bytes()

    for change, told in (
        ({"batch_size": 20}, "with batch_size 50, this run has 20"),
        ({"replay": 0.5}, "with replay .*0.05.*, this run has .*0.5"),
        ({"seed": 4}, "with "),
        ({"grain": "batch"}, "with grain 'event', this run has 'batch'"),
        ({"fanouts": (6,)}, "with sampler "),
    ):
        with pytest.raises(DataError, match=told):
            next(make(**change).run(events))
    with pytest.raises(DataError, match="written with events "):
        next(make().run(toy.clubs(300, seed=9)))
    used = make()
    used.history.graph.add_edges([0], [1], [0])
    with pytest.raises(DataError, match="written with edges before 0, this run has 1"):
        next(used.run(events))
    wide = TGAT(dim=16, node_dim=toy.num_groups, num_layers=1, num_heads=2, time_dim=8)
    with pytest.raises(
        DataError, match="resume with the model's settings that it was written with"
    ):
        next(make(model=wide).run(events))

    about = json.loads(good[0])
    del about["run"]["grain"], about["run"]["neighbor_times"]
    state.write_text(json.dumps(about))
    next(make().run(events))  # written before there was a choice
    with pytest.raises(DataError, match="with grain 'event', this run has 'batch'"):
        next(make(grain="batch").run(events))

    tensors.write_bytes(good[1][: len(good[1]) // 2])
    with pytest.raises(DataError, match=r"damaged .*remove the folder to begin again"):
        next(make().run(events))
    tensors.unlink()
    with pytest.raises(DataError, match="damaged"):
        next(make().run(events))
    for text in (good[0][:-9], "{}", "[]", json.dumps({"format": "gnnflow continual 0"})):
        state.write_text(text)
        with pytest.raises(DataError, match=r"damaged|expected the format"):
            next(make().run(events))


@pytest.mark.parametrize("name", ["state.json", "after-160.safetensors"])
def test_a_checkpoint_that_may_not_be_read_is_told_as_that(toy, tmp_path, monkeypatch, name):
    events = toy.clubs(300)
    run = toy.trainer_of(events, checkpoint=tmp_path, warmup=0.2).run(events)
    next(run)
    run.close()
    assert (tmp_path / name).exists()
    opened = io.open

    def refused(path, *args, **kwargs):
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(io, "open", refused)  # root may read everything
    with pytest.raises(DataError, match=rf"{name}: expected a file that this user may read"):
        next(toy.trainer_of(events, checkpoint=tmp_path, warmup=0.2).run(events))


def test_files_of_a_checkpoint_have_one_mode(toy, tmp_path):
    events = toy.clubs(300)
    next(toy.trainer_of(events, checkpoint=tmp_path).run(events))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    (tmp_path / "plain").touch()
    assert modes == {stat.S_IMODE((tmp_path / "plain").stat().st_mode)}


def test_a_crash_while_writing_leaves_the_checkpoint_before(toy, tmp_path, monkeypatch):
    events = toy.clubs(300)
    expected = toy.curve(toy.trainer_of(events).run(events))
    folder = tmp_path / "run"
    run = toy.trainer_of(events, checkpoint=folder).run(events)
    next(run)
    replace = "shared.files.os.replace"
    for at in (1, 2):
        # The first renaming is of the tensors, the second of the state that names them.
        count = itertools.count(1)
        with monkeypatch.context() as patch:
            real = os.replace

            def dies(source, target, at=at, count=count, real=real):
                if next(count) == at:
                    raise KeyboardInterrupt
                real(source, target)

            patch.setattr(replace, dies)
            with pytest.raises(KeyboardInterrupt):
                next(run)
        run = toy.trainer_of(events, checkpoint=folder).run(events)
        assert toy.curve([next(run)]) == expected[:1]
    assert toy.curve(run) == expected[1:]
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("num_rows", [0, 126, 150])
def test_a_run_whose_store_had_rows_already_is_resumed(toy, tmp_path, num_rows):
    events = toy.clubs(420)

    def make():
        trainer = toy.trainer_of(events, checkpoint=tmp_path)
        features = FeatureStore(node=toy.node_rows(), edge=events.features[:num_rows])
        trainer.history.features = features
        return trainer, features

    run = make()[0].run(events)
    first = next(run)
    run.close()
    trainer, features = make()
    found = list(trainer.run(events))
    assert found[0] == first
    assert torch.equal(features.gather("edge", events.eid), events.features)


def test_an_insertion_that_is_refused_leaves_no_rows(toy):
    events = toy.clubs(50)
    trainer = toy.trainer_of(events)
    trainer.history.features = features = FeatureStore(edge=events.features[:0])
    bad = Events([2**50], [1], [10**6], [0], events.features[:1])
    with pytest.raises(DataError, match="number sparse ids from 0"):
        trainer.history.insert(bad)
    assert features.num_rows("edge") == 0
    assert trainer.history.graph.num_edges == 0


def state_of(**changes):
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"model": {"weight": weight}, "head": {}, "memory": None, "optimizer": None}
    return state | {"curve": []} | changes


def test_tensors_that_share_memory_and_views_are_kept(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    saved = Checkpoint(tmp_path, {"seed": 3})
    saved.write(7, state_of(model={"weight": weight, "tied": weight, "turned": weight.T}))
    done, state = saved.read()
    assert done == 7
    for name, expected in (("weight", weight), ("tied", weight), ("turned", weight.T)):
        assert torch.equal(state["model"][name], expected)


def test_an_optimizers_numbers_and_tensors_are_kept(tmp_path):
    group = {"lr": 0.1, "params": [0, 1]}
    steps = {0: {"step": 3, "average": torch.ones(2)}, 1: {"step": 4, "average": None}}
    saved = Checkpoint(tmp_path, {})
    saved.write(1, state_of(optimizer={"state": steps, "param_groups": [group]}))
    found = saved.read()[1]["optimizer"]
    assert found["param_groups"] == [group]
    assert torch.equal(found["state"][0].pop("average"), steps[0]["average"])
    assert found["state"] == {0: {"step": 3}, 1: steps[1]}


def test_a_number_that_json_cannot_hold_leaves_the_checkpoint_before(tmp_path):
    saved = Checkpoint(tmp_path, {})
    saved.write(1, state_of())
    with pytest.raises(ValueError, match="not JSON compliant"):
        saved.write(2, state_of(curve=[float("nan")]))
    assert saved.read()[0] == 1


@pytest.mark.parametrize(
    "change",
    [{"fanouts": [6]}, {"policy": "uniform"}, {"replace": False}, {"window": 9}, {"seed": 9}],
)
def test_a_run_is_described_with_how_it_samples(toy, change):
    events = toy.clubs(20)
    trainer = toy.trainer_of(events)
    others = trainer.history, trainer.settings
    sampler = TemporalSampler(trainer.sampler.graph, **({"fanouts": [5], "seed": 2} | change))
    told = describe_run(events, sampler, *others)["sampler"]
    before = describe_run(events, trainer.sampler, *others)["sampler"]
    assert {name: told[name] for name in told if told[name] != before[name]} == change
    as_of_roots = TemporalSampler(trainer.sampler.graph, [5], neighbor_times="root")
    assert describe_run(events, as_of_roots, *others)["neighbor_times"] == "root"
