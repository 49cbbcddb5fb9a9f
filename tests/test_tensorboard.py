"""`--tensorboard DIR` of every package that trains, read by TensorBoard's own reader."""

from importlib import import_module

import pytest

from shared.training import progress

FAST = ("--dim", "16", "--epochs", "1", "--batch-size", "100")
TRAIN = {
    "adaqp": ["train", "parts", "--epochs", "3", "--eval-every", "2", "--model.hidden", "16"],
    "gnnflow": ["train", "zipf:60:600", *FAST, "--fanouts", "4", "4"],
    "mspipe": ["train", "zipf:60:600", *FAST, "--num-negatives", "5"],
    "hybridflow": ["train", "grpo-sort", "--set", "steps=2"],
}
SCALARS = {
    "adaqp": {"loss": [1, 2, 3], "bytes": [1, 2, 3], "seconds/compile": [1, 2, 3],
              "accuracy/test": [2, 3]},
    "gnnflow": {"loss": [1, 2], "ap": [1, 2], "mrr": [1, 2], "seconds/train": [1, 2]},
    "mspipe": {"loss": [0, 1, 2, 3, 4], "epoch/loss": [5], "epoch/ap": [5], "epoch/seconds": [5]},
    "hybridflow": {"reward": [0, 1], "seconds": [0, 1]},
}  # fmt: skip


def run(package, folder, monkeypatch):
    monkeypatch.chdir(folder)
    main = import_module(f"{package}.cli").main
    if package == "adaqp":
        nodes = ("--num-nodes", "3000", "--parts", "1", "--method", "random")
        assert main(["partition", "sbm", "--out", "parts", *nodes]) == 0
    return main([*TRAIN[package], "--tensorboard", "board"])


@pytest.mark.unchecked
@pytest.mark.parametrize("package", TRAIN)
def test_metrics_over_steps_are_shown_by_tensorboard(package, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(package, tmp_path, monkeypatch) == 0
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    steps = {name: [one.step for one in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert {name: steps.get(name) for name in SCALARS[package]} == SCALARS[package]


@pytest.mark.parametrize("package", TRAIN)
def test_a_missing_tensorboard_is_told_in_a_sentence(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    assert run(package, tmp_path, monkeypatch) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"{package}: tensorboard: expected the package tensorboard, to write board, but it is not "
        "installed; do `pip install tensorboard`"
    )
    assert not (tmp_path / "board").exists()
