"""Paths that are no folder: named, with what to do, before anything is written."""

import os

import pytest
import torch

import bytecheckpoint as bcp
from shared.errors import ConfigError, DataError

STATE = {"t": {"x": torch.ones(1)}}


@pytest.mark.parametrize("below", ["", "run", "run/deeper"])
def test_a_link_to_a_folder_that_is_missing_is_named(tmp_path, below):
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    message = r"expected a folder at .*/runs, got a link to .*/disk, which does not exist; mount"
    with pytest.raises(ConfigError, match=message):
        bcp.Checkpointer(tmp_path / "runs" / below).save(1, STATE)
    with pytest.raises(ConfigError, match=message):
        bcp.save(tmp_path / "runs" / below / "one", STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    (tmp_path / "disk").mkdir()
    bcp.save(tmp_path / "runs" / below / "one", STATE)
    bcp.load(tmp_path / "disk" / below / "one", STATE)


@pytest.mark.parametrize("below", ["", "run", "run/deeper"])
def test_a_file_in_a_folders_place_is_named(tmp_path, below):
    (tmp_path / "runs").touch()
    message = r"expected a folder at .*/runs, got a file; choose"
    with pytest.raises(ConfigError, match=message):
        bcp.Checkpointer(tmp_path / "runs" / below).save(1, STATE)
    with pytest.raises(ConfigError, match=message):
        bcp.save(tmp_path / "runs" / below / "one", STATE)


def test_a_pipe_in_a_folders_place_is_named(tmp_path):
    os.mkfifo(tmp_path / "runs")
    with pytest.raises(ConfigError, match=r"expected a folder at .*/runs, got a file; choose"):
        bcp.Checkpointer(tmp_path / "runs" / "run").save(1, STATE)


@pytest.mark.parametrize("read", [lambda path: bcp.load(path, STATE), bcp.open])
def test_a_file_that_is_read_as_a_folder_is_told_apart_from_nothing(tmp_path, read):
    torch.save(STATE, tmp_path / "x.pt")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(DataError, match=r"x\.pt: expected the folder .*, got a file; .* --to dcp"):
        read(tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError, match="y"):
        read(tmp_path / "y.pt")
