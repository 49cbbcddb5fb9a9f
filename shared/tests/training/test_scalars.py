"""What is written is what TensorBoard's own reader finds."""

import math

import pytest

from shared.errors import ConfigError
from shared.training import progress
from shared.training.progress import ScalarWriter


def read(folder):
    """Steps and values by name, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        name: [(one.step, one.value) for one in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def test_scalars_come_back_by_name_and_step(tmp_path):
    pytest.importorskip("tensorboard")
    with ScalarWriter(tmp_path / "board") as writer:
        writer.write(0, {"loss": 2.0, "seconds/wait": 0.25})
        writer.write(7, {"loss": 1.5})
    assert read(tmp_path / "board") == {
        "loss": [(0, 2.0), (7, 1.5)], "seconds/wait": [(0, 0.25)],
    }  # fmt: skip


def test_a_resumed_run_replaces_what_came_after_its_first_step(tmp_path):
    pytest.importorskip("tensorboard")
    for first, loss in ((0, 1.0), (2, 0.5)):
        with ScalarWriter(tmp_path) as writer:
            for step in range(first, first + 4):
                writer.write(step, {"loss": loss})
    assert read(tmp_path) == {
        "loss": [(0, 1.0), (1, 1.0), (2, 0.5), (3, 0.5), (4, 0.5), (5, 0.5)],
    }


def test_a_value_that_is_not_finite_is_written_as_it_is(tmp_path):
    pytest.importorskip("tensorboard")
    with ScalarWriter(tmp_path) as writer:
        writer.write(0, {"loss": math.nan})
    assert math.isnan(read(tmp_path)["loss"][0][1])


def test_without_a_folder_nothing_is_needed_and_nothing_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    with ScalarWriter(None) as writer:
        writer.write(0, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        ScalarWriter(tmp_path / "board")
    assert str(caught.value) == (
        f"tensorboard: expected the package tensorboard, to write {tmp_path / 'board'}, but it is not "
        "installed; do `pip install tensorboard`"
    )
    assert not (tmp_path / "board").exists()
