"""Rows in shared memory: what killed processes leave, and what others have put in their place."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mspipe.memory.node_memory import NodeMemory
from shared.errors import ConfigError, DataError, DiskFullError

USER = """
import sys
import torch
from mspipe.memory.node_memory import NodeMemory
memory = NodeMemory(4, 2, 1, place=sys.argv[1])
memory.write(torch.tensor([2]), torch.ones(1, 2), torch.tensor([5.0], dtype=torch.float64))
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path():
    path = Path(f"/dev/shm/mspipe-test-shared-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


@contextmanager
def user_of(place):
    command = [sys.executable, "-c", USER, place]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout.readline() == "written\n"
            yield process
        finally:
            process.kill()


def place_of(path):
    return f"shm:{path.name.removeprefix('mspipe-')}"


@pytest.mark.slow  # two processes that import torch
def test_rows_of_a_killed_process_are_not_taken_over(path, caplog):
    place = place_of(path)
    with user_of(place) as maker, user_of(place) as other:
        memory = NodeMemory(4, 2, 1, place=place)
        assert memory.version == 2
        assert memory.read(torch.tensor([2])).memory.tolist() == [[1, 1]]
        memory.close()
        del memory
        maker.send_signal(signal.SIGKILL)
        maker.wait()
        with pytest.raises(DataError, match=rf"{path}: expected its maker, process {maker.pid}"):
            NodeMemory(4, 2, 1, place=place)
        other.kill()
        other.wait()
        assert path.exists()
        memory = NodeMemory(9, 2, 1, place=place)  # sizes of the killed ones do not matter
        assert "left by a process that was killed" in caplog.text
        assert memory.version == 0
        assert not memory.read(torch.arange(9)).memory.any()
        memory.close()
    assert not path.exists()


def test_a_file_that_nobody_uses_is_made_anew(path, caplog):
    path.write_bytes(b"\1" * 4096)
    memory = NodeMemory(4, 2, 1, place=place_of(path))
    assert "left by a process that was killed" in caplog.text
    assert not memory.read(torch.arange(4)).memory.any()
    memory.close()


def test_only_its_user_can_open_it(path):
    before = os.umask(0)
    try:
        memory = NodeMemory(4, 2, 1, place=place_of(path))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    memory.close()


def test_links_are_not_followed(path, tmp_path):
    aim = tmp_path / "precious"
    aim.write_bytes(bytes(256))
    path.symlink_to(aim)
    with pytest.raises(DataError, match=rf"{path}: expected shared memory of this user"):
        NodeMemory(4, 2, 1, place=place_of(path))
    assert aim.read_bytes() == bytes(256)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="take another name"):
        NodeMemory(4, 2, 1, place=place_of(path))
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(ConfigError, match="expected a name without '/'"):
        NodeMemory(4, 2, 1, place=f"shm:x/../../../{tmp_path}/precious")


def test_rows_without_room_are_refused_and_leave_no_file(path, monkeypatch):
    before = set(os.listdir("/dev/shm"))

    def refuse(descriptor, offset, num_bytes):
        assert num_bytes == 128 + 4 * 8 * 4, "all of the rows are asked for"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DiskFullError, match=r"256 bytes free in /dev/shm, got .*; enlarge it"):
        NodeMemory(4, 2, 1, place=place_of(path))
    assert not path.exists()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(".mspipe")}


def test_nothing_is_left_beside_the_name(path):
    def listed():
        # Of this process alone: others' tests may run beside these.
        return {
            name for name in os.listdir("/dev/shm") if f"mspipe-test-shared-{os.getpid()}" in name
        }

    before = listed()
    memory = NodeMemory(4, 2, 1, place=place_of(path))
    second = NodeMemory(4, 2, 1, place=place_of(path))
    assert listed() - before == {path.name}
    second.close()
    memory.close()
    NodeMemory(0, 2, 1, place=place_of(path)).close()
    assert listed() == before
