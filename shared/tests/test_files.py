"""What is written is there whole or not at all: after errors, after kills, and while it is written."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from shared import files
from shared.errors import DiskFullError, RankFailure
from shared.files import (
    atomic_file,
    atomic_folder,
    find_folders,
    naming_full_disk,
    publish,
    recover_folders,
    remove_folder,
    sync_folder,
    write_atomically,
)
from shared.process_mark import mark


@pytest.fixture
def calls(monkeypatch):
    """What is synced and renamed, in order: names of files, or of folders with a slash."""
    seen, names = [], {}
    real = {name: getattr(os, name) for name in ("open", "fsync", "replace", "rename")}

    def opened(path, *args, **kwargs):
        descriptor = real["open"](path, *args, **kwargs)
        names[descriptor] = Path(path).name + ("/" if Path(path).is_dir() else "")
        return descriptor

    def synced(descriptor):
        seen.append(("sync", names[descriptor]))
        real["fsync"](descriptor)

    def moved(source, target, **kwargs):
        seen.append(("rename", Path(target).name))
        real["replace"](source, target, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
    monkeypatch.setattr(os, "rename", moved)
    return seen


@pytest.mark.parametrize(("data", "stored"), [(b"\r\n\0", b"\r\n\0"), ("\u00e9\n", b"\xc3\xa9\n")])
def test_bytes_and_text_replace_what_is_there(tmp_path, data, stored):
    path = tmp_path / "a.json"
    path.write_text("old")
    write_atomically(str(path), data)
    assert path.read_bytes() == stored
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_is_synced_renamed_and_its_folder_synced(tmp_path, calls):
    write_atomically(tmp_path / "a", b"new")
    [(first, partial), *rest] = calls
    assert first == "sync"
    assert partial.startswith(".a.")
    assert partial.endswith(".partial")
    assert rest == [("rename", "a"), ("sync", tmp_path.name + "/")]


def test_a_folder_is_synced_with_all_that_is_in_it(tmp_path, calls):
    with atomic_folder(tmp_path / "run") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("1")
        (folder / "b").symlink_to("nowhere")
    synced = [name for what, name in calls[: calls.index(("rename", "run"))] if what == "sync"]
    assert sorted(synced) == ["a", "inner/", f"{folder.name}/"]
    assert calls[-2:] == [("rename", "run"), ("sync", tmp_path.name + "/")]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_are_the_umasks(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "a", b"")
        with atomic_folder(tmp_path / "b"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there(tmp_path, error):
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "old").write_text("old")

    def fail(path, written):
        written.write_text("new")
        assert path.exists()
        raise error

    with pytest.raises(error), atomic_file(tmp_path / "a") as file:
        fail(tmp_path / "a", file)
    with pytest.raises(error), atomic_folder(tmp_path / "b") as folder:
        fail(tmp_path / "b" / "old", folder / "new")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "old"]
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_disk_leaves_what_was_there(tmp_path, monkeypatch, call):
    (tmp_path / "a").write_text("old")

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_what_was_not_written_is_said(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "a"):
        pass
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "a", b"")
    assert os.listdir(tmp_path) == []


def test_a_folder_replaces_the_one_there_was(tmp_path):
    for content in ("one", "two"):
        with atomic_folder(tmp_path / "deep" / "run") as folder:
            (folder / content).write_text(content)
    assert [path.name for path in (tmp_path / "deep" / "run").iterdir()] == ["two"]
    assert os.listdir(tmp_path / "deep") == ["run"]


def test_a_folder_that_cannot_be_renamed_gives_its_place_back(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "old").write_text("old")
    (tmp_path / "fresh").mkdir()
    real = os.rename

    def fail(source, target, **kwargs):
        if Path(source).name == "fresh":
            raise OSError(5, "Input/output error")
        real(source, target, **kwargs)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        publish(tmp_path / "fresh", tmp_path / "run")
    assert (tmp_path / "run" / "old").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["fresh", "run"]


KILLED = """
import os, signal, sys
from pathlib import Path
from shared.files import atomic_file, atomic_folder
write = atomic_folder if sys.argv[2:] else atomic_file
with write(Path(sys.argv[1])) as place:
    (place / "a" if sys.argv[2:] else place).write_text("begun")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_began_is_removed_by_the_next_write(tmp_path):
    path = tmp_path / "a[1]"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2
    with atomic_file(path) as mine:
        mine.write_text("mine")
        # A write that goes on is left alone by another.
        write_atomically(path, b"other")
        assert mine.read_text() == "mine"
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["a[1]"]


def test_a_folder_that_a_killed_process_began_is_removed_by_the_next_write(tmp_path):
    path = tmp_path / "run[1]"
    done = subprocess.run([sys.executable, "-c", KILLED, path, "folder"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    assert not path.exists()
    with atomic_folder(path) as folder:
        (folder / "new").write_text("new")
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["new", "run[1]"]


def test_two_writers_of_a_folder_do_not_meet(tmp_path):
    with atomic_folder(tmp_path / "run") as one:
        (one / "one").write_text("one")
        with atomic_folder(tmp_path / "run") as other:
            assert list(other.iterdir()) == []
            (other / "other").write_text("other")
            assert [path.name for path in one.iterdir()] == ["one"]
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["other"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["one", "run"]


def test_a_write_leaves_that_of_a_longer_name_alone(tmp_path):
    with atomic_file(tmp_path / "a.json") as partial:
        partial.write_text("new")
        write_atomically(tmp_path / "a", b"")
    assert (tmp_path / "a.json").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["a", "a.json"]


def test_folders_of_a_killed_write_are_found_and_put_back(tmp_path):
    for name in ("step-1", "step-2", "step-2.replaced", "step-3.replaced", "step-4.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    found = find_folders(tmp_path, "step-*")
    assert {name: path.name for name, path in found.items()} == {
        "step-1": "step-1", "step-2": "step-2", "step-3": "step-3.replaced",
    }  # fmt: skip
    assert find_folders(tmp_path, "step-3") == {"step-3": tmp_path / "step-3.replaced"}
    assert find_folders(tmp_path, "step-2") == {"step-2": tmp_path / "step-2"}
    assert find_folders(tmp_path, "step-4") == {}
    recover_folders(tmp_path, "step-*")
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2", "step-3"]
    assert (tmp_path / "step-3" / "step-3.replaced").exists()
    remove_folder(tmp_path / "step-1")
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]


def test_only_folders_are_synced_as_folders(tmp_path):
    sync_folder(tmp_path)
    (tmp_path / "a").write_text("")
    with pytest.raises(NotADirectoryError):
        sync_folder(tmp_path / "a")


def test_what_killed_writes_left_is_in_nobodys_way(tmp_path):
    for name in ("run", "run.partial", "run.replaced", "gone", "gone.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text("old")
    with atomic_folder(tmp_path / "run") as folder:
        assert list(folder.iterdir()) == []
        (folder / "new").write_text("new")
    remove_folder(tmp_path / "gone")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "run"]


def test_a_file_is_no_folder_that_is_found(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-2").write_text("a note")
    assert find_folders(tmp_path, "step-*") == {"step-1": tmp_path / "step-1"}
    assert find_folders(tmp_path, "step-2") == {}


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    for text in ("new", "newer"):
        write_atomically(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "target").read_text() == text
    (tmp_path / "disk").mkdir()
    (tmp_path / "folder").symlink_to("disk", target_is_directory=True)
    for text in ("one", "two", "three"):
        with atomic_folder(tmp_path / "folder") as folder:
            (folder / "file").write_text(text)
        assert (tmp_path / "folder").is_symlink()
        assert (tmp_path / "disk/file").read_text() == text
    assert {path.name for path in tmp_path.iterdir()} == {"target", "link", "disk", "folder"}


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_files_with_the_endings_of_folders_are_no_leftovers(tmp_path):
    (tmp_path / "step-x.partial").write_text("a user's own")
    (tmp_path / "step-1.partial").mkdir()
    recover_folders(tmp_path, "step-*")
    assert [path.name for path in tmp_path.iterdir()] == ["step-x.partial"]


@pytest.mark.parametrize(("age_hours", "stays"), [(0, True), (23, True), (25, False)])
def test_a_leftover_of_another_container_goes_after_a_day(tmp_path, age_hours, stays):
    pid, ticks, _ = mark().split("-")
    theirs = tmp_path / f".a.{pid}-{ticks}-00000000-0.partial"
    theirs.write_text("perhaps still being written")
    then = time.time() - 3600 * age_hours
    os.utime(theirs, (then, then))
    write_atomically(tmp_path / "a", "new")
    assert theirs.exists() == stays


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_mode_of_the_umask_whoever_wrote_them(tmp_path, umask):
    def write_private(path):
        path.write_bytes(b"rows")
        path.chmod(0o600)

    before = os.umask(umask)
    try:
        with atomic_file(tmp_path / "one") as partial:
            write_private(partial)
        write_atomically(tmp_path / "two", "text")
        with atomic_folder(tmp_path / "folder") as partial:
            write_private(partial / "three")
            (partial / "four").write_text("text")
    finally:
        os.umask(before)
    written = [tmp_path / "one", tmp_path / "two", *(tmp_path / "folder").iterdir()]
    assert len(written) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o666 & ~umask}


def test_the_umask_is_found_where_the_kernel_does_not_tell_it(tmp_path, monkeypatch):
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: "" if path.name == "status" else read(path))
    before = os.umask(0o026)
    try:
        write_atomically(tmp_path / "file", "text")
        assert os.umask(0o026) == 0o026, "left as it was"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


ROOM, MORE = 65_536, 200_000


def save_by_numpy(path):
    with atomic_file(path) as partial, partial.open("wb") as file:
        np.save(file, np.zeros(MORE, np.uint8))


def save_by_safetensors(path):
    numpy_forms = pytest.importorskip("safetensors.numpy", reason="safetensors is a package's need")
    with atomic_file(path) as partial:
        numpy_forms.save_file({"a": np.zeros(MORE, np.uint8)}, partial)


def save_by_torch(path):
    with atomic_file(path) as partial, partial.open("wb") as file:
        torch.save({"a": torch.zeros(MORE, dtype=torch.uint8)}, file)


def save_a_folder(path):
    with atomic_folder(path) as partial:
        (partial / "a").write_bytes(bytes(MORE))


@pytest.mark.parametrize(
    "save",
    [
        lambda path: write_atomically(path, bytes(MORE)),
        *(save_by_numpy, save_by_safetensors, save_by_torch, save_a_folder),
    ],
)
def test_a_full_disk_is_named_with_its_free_bytes_and_left_as_it_was(small_disk, save):
    folder = small_disk(ROOM)
    path = folder / "saved"
    with pytest.raises(DiskFullError) as caught:
        save(path)
    assert str(caught.value) == (
        f"{path}: expected room on the disk for what is written there, got 65,536 bytes free; free "
        "some, or write to another disk"
    )
    assert caught.value.errno == 28
    assert isinstance(caught.value, OSError)
    assert os.listdir(folder) == []


def test_other_errors_of_a_writer_stay_what_they_are(tmp_path):
    with pytest.raises(ValueError, match="rows"), atomic_file(tmp_path / "a"):
        raise ValueError("rows: got 3")
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(tmp_path / "nowhere" / "a", "text")
    assert not isinstance(caught.value, DiskFullError)


def test_a_guess_leaves_the_name_that_an_error_has(tmp_path):
    with (
        pytest.raises(DiskFullError, match=f"^{tmp_path}/a: expected room"),
        naming_full_disk("out", is_guess=True),
    ):
        raise OSError(28, "No space left on device", f"{tmp_path}/a")
    with (
        pytest.raises(DiskFullError, match=r"^out: expected room"),
        naming_full_disk("out", is_guess=True),
    ):
        raise OSError(28, "No space left on device")
    told = RankFailure("rank 1 of 2 failed: No space left on device")
    with pytest.raises(RankFailure), naming_full_disk("out", is_guess=True):
        raise told
    with pytest.raises(DiskFullError), naming_full_disk("out"):
        raise told


@pytest.mark.parametrize(
    ("text", "is_full"),
    [
        ("4096 requested and 1024 written", True),
        ("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0", True),
        ("I/O error: No space left on device (os error 28)", True),
        ("2 ranks are requested and 1 is there", False),
        ("all were requested and 3 written", False),
        ("the model requested and the one found differ", False),
    ],
)
def test_words_of_libraries_tell_a_full_disk(text, is_full):
    kind = DiskFullError if is_full else RuntimeError
    with pytest.raises(kind, match="expected room" if is_full else text), naming_full_disk("out"):
        raise RuntimeError(text)
