"""What cannot be read is told by one sentence, whichever kind of file was expected."""

import os
import subprocess
from pathlib import Path

import pytest

from shared.errors import DataError
from shared.files import check_not_empty, read_json, read_model_config, read_text

MISSING = {
    "none": "none: expected rows, there is nothing; check the path",
    "none/in": "none/in: expected rows, there is nothing; check the path",
    "folder": "folder: expected rows, got a folder; name a file",
    "empty": "empty: expected rows, the file is empty; check what wrote it",
}


@pytest.mark.parametrize("name", MISSING)
@pytest.mark.parametrize("read", [check_not_empty, read_text, read_json])
def test_what_cannot_be_read_is_told_alike(tmp_path, monkeypatch, name, read):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("empty").touch()
    with pytest.raises(DataError) as caught:
        read(name, "rows")
    assert str(caught.value) == MISSING[name]


def test_a_text_is_read_without_its_mark_and_bytes_are_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\xc3\xa9\n")
    assert read_text(path, "rows") == "\u00e9\n"
    path.write_bytes(b"a" * 1234 + b"\xff")
    told = "expected rows, got bytes that are no UTF-8 text, first at byte 1,234; name another file"
    with pytest.raises(DataError, match=told):
        read_text(path, "rows")
    with pytest.raises(DataError, match=told):
        read_json(path, "rows")
    check_not_empty(path, "rows")


def test_a_text_that_may_not_be_read_says_so(tmp_path, monkeypatch):
    def refuse(self, **options):
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "a").write_text("mine")
    monkeypatch.setattr(Path, "read_text", refuse)
    told = "a: expected rows that this user may read, got 'Permission denied'; change its owner"
    with pytest.raises(DataError, match=told):
        read_text(tmp_path / "a", "rows")


def test_a_pipe_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["bash", "-c", f"echo text > {tmp_path}/pipe"]):
        assert read_text(tmp_path / "pipe", "rows") == "text\n"


def test_json_that_is_none_is_told_with_its_place(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[1, 2]")
    assert read_json(path, "rows") == [1, 2]
    path.write_text("[1,\n2")
    told = (
        r"a.json: expected rows as JSON, got Expecting .* line 2 column 2 .*; check what wrote it"
    )
    with pytest.raises(DataError, match=told):
        read_json(path, "rows")


def test_a_models_configuration_is_found_by_its_folder_or_itself(tmp_path):
    file = tmp_path / "config.json"
    told = (
        f"{tmp_path}: expected a model's folder with config.json, got a folder without it; give a "
    )
    with pytest.raises(DataError) as caught:
        read_model_config(tmp_path)
    assert str(caught.value).startswith(told)
    with pytest.raises(
        DataError, match=r"config.json, or one of a, b, there is nothing; give a fol"
    ):
        read_model_config(tmp_path / "none", "one of a, b")
    file.write_text('{"layers": 2}')
    assert read_model_config(tmp_path) == ({"layers": 2}, file)
    assert read_model_config(file) == ({"layers": 2}, file)
    assert read_model_config(tmp_path, may_be_file=False) == ({"layers": 2}, file)
    with pytest.raises(DataError, match=r"config.json: expected a model's folder with config.json"):
        read_model_config(file, may_be_file=False)
    file.write_text("[2]")
    with pytest.raises(DataError, match="expected a model's configuration, got a list; save it"):
        read_model_config(tmp_path)
    file.write_text("")
    with pytest.raises(DataError, match="expected a model's configuration, the file is empty"):
        read_model_config(tmp_path)
