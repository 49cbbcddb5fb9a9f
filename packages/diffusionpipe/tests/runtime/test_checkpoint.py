"""A run that is saved goes on in another layout with the losses of one that was never stopped."""

import pytest
import torch

from diffusionpipe.runtime.checkpoint import save_state
from diffusionpipe.runtime.engine import Engine
from shared.errors import ConfigError, DataError

from .toy import PLANS, make_adam, make_batches, make_job, make_model, train_plainly


def train_and_save(name, folder, num_steps):
    engine = Engine(make_job(), PLANS[name](), make_adam)
    losses = list(engine.steps(make_batches(num_steps)))
    engine.save(folder)
    return losses


def resume(name, folder, batches):
    engine = Engine(make_job(make_model(seed=5)), PLANS[name](), make_adam)
    engine.load(folder)
    return list(engine.steps(batches[engine.step :])), engine.step


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("folded 4", "chain of 3 and 1 replicas"),
        ("chain of 2, replicated", "folded 4"),
        pytest.param("data 4", "chain of 4", marks=pytest.mark.slow),
        pytest.param("chain of 4", "chain of 4", marks=pytest.mark.slow),
    ],
)
def test_resuming_gives_the_uninterrupted_losses(ranks, before, after, tmp_path):
    batches = make_batches(5)
    expected, _ = train_plainly(batches, make_adam)
    folder = str(tmp_path / "checkpoint")
    for losses in ranks.run(train_and_save, before, folder, 2).results:
        assert losses == pytest.approx(expected[:2], rel=1e-9)
    for losses, step in ranks.run(resume, after, folder, batches).results:
        assert losses == pytest.approx(expected[2:], rel=1e-9)
        assert step == 5
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_four_ranks_checkpoint_loads_into_one_and_back(ranks, tmp_path):
    batches = make_batches(5)
    expected, _ = train_plainly(batches, make_adam)
    folder = str(tmp_path / "checkpoint")
    ranks.run(train_and_save, "folded 2, replicated", folder, 2)
    losses, _ = resume("one process", folder, batches)
    assert losses == pytest.approx(expected[2:], rel=1e-9)
    train_and_save("one process", folder, 3)
    for losses, _ in ranks.run(resume, "folded 4", folder, batches).results:
        assert losses == pytest.approx(expected[3:], rel=1e-9)


def run_through(name, batches):
    return list(Engine(make_job(), PLANS[name](), make_adam).steps(batches))


def test_the_same_plan_resumes_to_the_bit(pair, tmp_path):
    batches = make_batches(4)
    folder = str(tmp_path / "checkpoint")
    whole = pair.run(run_through, "folded 2", batches).results[0]
    pair.run(train_and_save, "folded 2", folder, 2)
    assert pair.run(resume, "folded 2", folder, batches).results[0][0] == whole[2:]


def test_a_checkpoint_holds_weights_state_and_step_by_name(tmp_path):
    folder = str(tmp_path / "checkpoint")
    train_and_save("one process", folder, 2)
    import torch.distributed.checkpoint as dcp

    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    names = list(make_job().trained)
    assert {f"model.{name}" for name in names} <= set(entries)
    assert {f"optimizer.state.{name}.exp_avg" for name in names} <= set(entries)
    assert {"engine.step", "engine.seed"} <= set(entries)


def test_other_jobs_seeds_and_folders_are_refused(tmp_path):
    folder = tmp_path / "checkpoint"
    train_and_save("one process", str(folder), 1)
    model = make_model()
    model.down[2].inner.bias.requires_grad_(False)
    with pytest.raises(DataError, match=r"checkpoint: expected .* as in this run"):
        Engine(make_job(model), PLANS["one process"](), make_adam).load(folder)
    engine = Engine(make_job(), PLANS["one process"](), make_adam, seed=3)
    with pytest.raises(ConfigError, match=r"a checkpoint of seed 3, got one of seed 0"):
        engine.load(folder)
    check_untouched(engine)
    engine = Engine(make_job(), PLANS["one process"](), make_adam)
    with pytest.raises(DataError, match=r"expected a checkpoint, there is nothing"):
        engine.load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"a checkpoint of torch.distributed.checkpoint"):
        engine.load(tmp_path / "empty")
    torch.distributed.checkpoint.save(
        {"model": {"0": torch.zeros(2)}}, checkpoint_id=tmp_path / "other", no_dist=True
    )
    with pytest.raises(DataError, match=r"that an engine wrote, got one without 'engine.format'"):
        engine.load(tmp_path / "other")


def check_untouched(engine):
    assert engine.step == 0
    assert not engine.optimizer.state
    for name, weight in make_job().trained.items():
        assert torch.equal(engine.job.trained[name], weight)


# Adam has all of AdamW's options and state, so that only its name tells them apart.
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_checkpoint_of_another_optimizer_is_refused(kind, tmp_path):
    folder = tmp_path / "checkpoint"
    train_and_save("one process", str(folder), 1)
    engine = Engine(make_job(), PLANS["one process"](), lambda p: kind(p, 0.1))
    told = rf"checkpoint of the optimizer {kind.__name__}, got one of AdamW; make the engine"
    with pytest.raises(ConfigError, match=told):
        engine.load(folder)
    check_untouched(engine)
    assert engine.optimizer.param_groups[0]["lr"] == 0.1


def test_the_saved_learning_rate_comes_back(tmp_path):
    folder = str(tmp_path / "checkpoint")
    train_and_save("one process", folder, 1)
    engine = Engine(make_job(), PLANS["one process"](), lambda p: torch.optim.AdamW(p, 0.5))
    engine.load(folder)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-2]


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    engine = Engine(make_job(make_model(seed=5)), PLANS["one process"](), make_adam)
    facts = {"format": 1, "step": 1, "seed": 0}
    save_state(tmp_path / "checkpoint", engine.job.trained, None, facts, None)
    engine = Engine(make_job(), PLANS["one process"](), make_adam)
    with pytest.raises(DataError, match=r"a checkpoint of format 2, got format 1; load it with"):
        engine.load(tmp_path / "checkpoint")
    check_untouched(engine)


def test_damaged_checkpoints_and_folders_that_cannot_be_written_are_named(tmp_path):
    folder = tmp_path / "checkpoint"
    train_and_save("one process", str(folder), 1)
    engine = Engine(make_job(), PLANS["one process"](), make_adam)
    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(DataError, match=r"checkpoint: expected a checkpoint that can be read, got"):
        engine.load(folder)
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(DataError, match=r"that can be read, got EOFError"):
        engine.load(folder)
    assert engine.step == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        engine.save(tmp_path / "file" / "checkpoint")
