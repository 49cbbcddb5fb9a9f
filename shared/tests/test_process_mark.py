"""A mark is of one process: not of another with its number, and not of what only looks like a mark.

A folder is judged by the lock that its maker holds, in whichever container that lives.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from shared import process_mark
from shared.process_mark import (
    is_alive,
    make_marked_folder,
    mark,
    remove_marked_folder,
    sweep_marked_folders,
)

HOLDER = """
import sys
from shared.process_mark import make_marked_folder
print(make_marked_folder(sys.argv[1], "ours-"), flush=True)
sys.stdin.read()
"""


def holder(parent, *before):
    """Starts a process that makes a marked folder in `parent` and holds it; returns both."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", HOLDER, parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, Path(process.stdout.readline().strip())


def killed(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_mark_is_of_the_process_that_made_it():
    pid, ticks, namespace = mark().split("-")
    assert int(pid) == os.getpid()
    assert is_alive(mark())
    assert is_alive(f"{mark()}-7")
    assert not is_alive(f"{pid}-{int(ticks) + 1}-{namespace}"), "another process had this number"


def test_a_process_that_ended_is_not_alive():
    program = "from shared.process_mark import mark; print(mark())"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert not is_alive(done.stdout.strip())


def test_a_process_of_another_container_is_not_judged():
    pid, ticks, _ = mark().split("-")
    assert is_alive(f"{pid}-{int(ticks) + 1}-00000000")


def test_names_that_are_no_marks():
    for name in ("", "-", "backup", "backup-2", "1x-3", "backup-2-3", str(os.getpid())):
        assert not is_alive(name)


def test_a_process_may_have_any_name():
    """The kernel writes the name in parentheses before the tick, whatever is in it."""
    before, comm = mark(), Path("/proc/self/comm")
    name = comm.read_text()
    try:
        comm.write_text("a) b (c")
        assert mark() == before
    finally:
        comm.write_text(name)


def test_a_folder_lives_as_long_as_its_maker(tmp_path):
    process, folder = holder(tmp_path)
    (folder / "values").write_text("here")
    other = tmp_path / "others-1"
    other.mkdir()
    try:
        assert sweep_marked_folders(tmp_path, "ours-") == []
        assert (folder / "values").read_text() == "here"
    finally:
        killed(process)
    assert sweep_marked_folders(tmp_path, "ours-") == [folder]
    assert not folder.exists()
    assert other.is_dir(), "another prefix"


def test_a_folder_of_another_container_lives_by_its_lock(tmp_path):
    process, folder = holder(tmp_path)
    pid, ticks, _, rest = folder.name.removeprefix("ours-").split("-")
    theirs = folder.with_name(f"ours-{pid}-{int(ticks) + 1}-00000000-{rest}")
    folder.rename(theirs)  # the lock is of the folder, whatever its name
    try:
        assert sweep_marked_folders(tmp_path, "ours-") == []
    finally:
        killed(process)
    assert sweep_marked_folders(tmp_path, "ours-") == [theirs]


def test_a_folder_of_this_process_stays_until_it_is_removed(tmp_path):
    folder = make_marked_folder(tmp_path, "ours-")
    assert folder.name.startswith(f"ours-{mark()}-")
    assert sweep_marked_folders(tmp_path, "ours-") == []
    assert num_open(folder) == 1
    remove_marked_folder(folder)
    assert not folder.exists()
    assert num_open(folder) == 0, "the lock goes with the folder"
    remove_marked_folder(folder)  # once more, as after an error


def num_open(folder):
    """How many descriptors of a folder, there or removed, this process has."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed since
            found += os.readlink(f"/proc/self/fd/{name}").startswith(str(folder))
    return found


@pytest.mark.parametrize("between", ["mkdtemp", "open"])
def test_a_folder_swept_before_its_maker_has_locked_it_is_made_anew(tmp_path, monkeypatch, between):
    module = process_mark.tempfile if between == "mkdtemp" else process_mark.os
    real, made = getattr(module, between), []

    def swept(*args, **options):
        result = real(*args, **options)
        if len(made) < 2:
            made.append(Path(result if between == "mkdtemp" else args[0]))
            if len(made) == 1:
                monkeypatch.setattr(module, between, real)
                made[0].rmdir()  # as a sweep in another container does
                monkeypatch.setattr(module, between, swept)
        return result

    monkeypatch.setattr(module, between, swept)
    folder = make_marked_folder(tmp_path, "ours-")
    monkeypatch.undo()
    assert folder == made[1]
    assert folder.is_dir()
    remove_marked_folder(folder)


def test_a_folder_of_a_running_process_stays_where_locks_mean_nothing(tmp_path, monkeypatch):
    process, folder = holder(tmp_path)
    monkeypatch.setattr(process_mark.fcntl, "flock", lambda *_: None)
    try:
        assert sweep_marked_folders(tmp_path, "ours-") == []
        assert folder.is_dir()
    finally:
        killed(process)
    assert sweep_marked_folders(tmp_path, "ours-") == [folder]


def test_a_link_is_neither_followed_nor_removed(tmp_path):
    target = tmp_path / "precious"
    target.mkdir()
    (tmp_path / "ours-link").symlink_to(target)
    assert sweep_marked_folders(tmp_path, "ours-") == []
    assert target.is_dir()


@pytest.mark.netns
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_another_container_takes_nothing_from_a_running_job(tmp_path):
    """In a PID namespace of its own every process has a small number, which others have too."""
    apart = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    process, folder = holder(tmp_path, *apart)
    try:
        theirs = folder.name.removeprefix("ours-")
        assert theirs.split("-")[2] != mark().split("-")[2]
        assert is_alive(theirs), "not judged by a number of another namespace"
        assert sweep_marked_folders(tmp_path, "ours-") == []
        # And from within another namespace, ours.
        ours = make_marked_folder(tmp_path, "ours-")
        sweep = "import sys; from shared.process_mark import sweep_marked_folders as s; print(s(sys.argv[1], 'ours-'))"
        done = subprocess.run(
            [*apart, sys.executable, "-c", sweep, tmp_path],
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == "[]"
        remove_marked_folder(ours)
    finally:
        killed(process)
    assert sweep_marked_folders(tmp_path, "ours-") == [folder]
