"""Logs of boundary messages: what is read back, and every way in which a file goes bad."""

import logging
import os
import resource
import shutil
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from shared.errors import ConfigError, DataError
from swift.pipeline import log, records
from swift.pipeline.chunks import ChunkFile, scan_chunk, verify_logs
from swift.pipeline.log import BoundaryLog
from swift.pipeline.records import Key, Kind

NUM = 3
"""Micro-batches."""


def message(iteration, k):
    draw = torch.Generator().manual_seed(97 * iteration + k)
    return torch.randn(4, 5, generator=draw)


def fill(writer, iterations, kind=Kind.ACTIVATION):
    for iteration in iterations:
        for k in range(NUM):
            writer.append(Key(kind, iteration, k), message(iteration, k))


@pytest.fixture
def opened(tmp_path, request):
    """Opens a log in `tmp_path`, and closes it at the end."""

    def make(run="run-1", stage=2, **settings):
        writer = BoundaryLog(tmp_path, **settings).open(run, stage)
        request.addfinalizer(writer.close)
        return writer

    return make


def file_of(tmp_path, number=0, stage=2):
    return tmp_path / f"stage-{stage}" / f"{number:06d}.log"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([1.5, -0.0, float("nan"), float("inf")], dtype=torch.bfloat16),
        torch.tensor(2.5, dtype=torch.float64),
        torch.empty(0, 7),
        torch.ones(1, 2, 1, 2, 1, 2, 1, 2, dtype=torch.float16),
    ],
    ids=["matrix", "strided", "bfloat16", "scalar", "empty", "dimensions"],
)
def test_messages_of_any_form_come_back_bit_for_bit(opened, tensor):
    writer = opened()
    key = Key(Kind.GRADIENT, 2**40, 7)
    writer.append(key, tensor)
    found = writer.read(key)
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    same = [each.contiguous().view(-1).view(torch.uint8).tolist() for each in (found, tensor)]
    assert same[0] == same[1]
    assert writer.describe(key) == (tuple(tensor.shape), tensor.dtype)


def test_whatever_fails_in_the_writing_thread_ends_the_interval_only(opened, monkeypatch):
    def fail(*_):
        raise MemoryError

    writer = opened()
    with monkeypatch.context() as patched:
        patched.setattr(ChunkFile, "append", fail)
        fill(writer, [0])
        writer.flush()
    assert "logging stopped at activation of iteration 0" in writer.unreplayable
    assert "as MemoryError()" in writer.unreplayable
    writer.start_interval(1)
    fill(writer, [1])
    assert torch.equal(writer.read(Key(Kind.ACTIVATION, 1, 2)), message(1, 2))


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.int32), torch.ones([1] * 9)])
def test_messages_that_no_record_holds_end_the_interval(opened, tensor):
    writer = opened()
    writer.append(Key(Kind.ACTIVATION, 0, 0), tensor)
    writer.flush()
    assert "expected at most 8 dimensions and a type among torch.float32" in writer.unreplayable


def test_receipts_keep_a_digest_and_no_bytes(opened, tmp_path):
    writer = opened()
    big = torch.ones(100_000)
    writer.append(Key(Kind.ACTIVATION_RECEIPT, 0, 0), big)
    writer.append(Key(Kind.ACTIVATION, 0, 0), message(0, 0))
    sent, received = Key(Kind.ACTIVATION, 0, 0), Key(Kind.ACTIVATION_RECEIPT, 0, 0)
    assert writer.digest_of(received) == records.digest(big)
    assert writer.digest_of(sent) == records.digest(message(0, 0))
    assert writer.digest_of(Key(Kind.GRADIENT_RECEIPT, 0, 0)) is None
    assert file_of(tmp_path).stat().st_size < 1000
    assert writer.logged_bytes == 80


def test_a_message_that_is_logged_again_replaces_the_first(opened):
    writer, key = opened(), Key(Kind.ACTIVATION, 0, 1)
    fill(writer, range(1))
    writer.append(key, message(5, 5))
    assert torch.equal(writer.read(key), message(5, 5))
    assert torch.equal(writer.read(Key(Kind.ACTIVATION, 0, 0)), message(0, 0))
    writer.start_interval(0)
    writer.append(key, message(6, 6))  # in another file
    assert torch.equal(writer.read(key), message(6, 6))


def test_gaps_are_named(opened):
    writer = opened()
    fill(writer, range(2, 5))
    assert writer.find_gap(Kind.ACTIVATION, 2, 5, NUM) is None
    assert writer.find_gap(Kind.ACTIVATION, 3, 3, NUM) is None
    for start, stop, num, text in (
        (1, 5, NUM, "activation of iteration 1, micro-batch 0"),
        (2, 6, NUM, "activation of iteration 5, micro-batch 0"),
        (2, 5, NUM + 1, "activation of iteration 2, micro-batch 3"),
    ):
        assert text in writer.find_gap(Kind.ACTIVATION, start, stop, num)
    assert "gradient of iteration 2" in writer.find_gap(Kind.GRADIENT, 2, 3, NUM)
    with pytest.raises(
        DataError, match="stage 2 has not logged the gradient of iteration 9, micro-"
    ):
        writer.read(Key(Kind.GRADIENT, 9, 0))


def test_intervals_have_files_of_their_own_that_go_when_they_are_no_longer_needed(opened, tmp_path):
    writer = opened()
    for start in (0, 2, 4):
        if start:
            writer.start_interval(start)
        fill(writer, range(start, start + 2))
    writer.forget(1)
    assert file_of(tmp_path, 0).exists()
    writer.forget(3)
    assert [file_of(tmp_path, number).exists() for number in range(3)] == [False, True, True]
    assert writer.find_gap(Kind.ACTIVATION, 0, 2, NUM) is not None
    assert writer.find_gap(Kind.ACTIVATION, 2, 6, NUM) is None
    writer.forget(100)
    assert file_of(tmp_path, 2).exists()
    writer.close(remove=True)
    assert list(tmp_path.rglob("*.log")) == []


def test_closed_logs_are_whole_and_unclosed_ones_are_said_to_be(opened, tmp_path):
    writer = opened()
    fill(writer, range(2))
    writer.start_interval(2)
    fill(writer, range(2, 3))
    writer.flush()
    first, second = verify_logs(tmp_path)
    assert (first.is_closed, second.is_closed) == (True, False)
    assert (first.num_records, second.num_records) == (6, 3)
    assert first.damage == second.damage == []
    assert (first.header.run, first.header.stage, second.header.iteration) == ("run-1", 2, 2)


def test_a_torn_end_of_any_length_costs_the_last_message_only(opened, tmp_path):
    writer = opened()
    fill(writer, range(1))
    writer.flush()
    whole = file_of(tmp_path).read_bytes()
    last = records.RECORD_BYTES + 80
    torn = tmp_path / "torn.log"
    for cut in range(1, last + 1):
        torn.write_bytes(whole[:-cut])
        chunk = scan_chunk(torn)
        assert sorted(chunk.records) == [Key(Kind.ACTIVATION, 0, k) for k in range(NUM - 1)]
        assert (chunk.torn_bytes, chunk.damage, chunk.is_closed) == (last - cut, [], False)


def test_every_flipped_bit_is_found(opened, tmp_path):
    writer = opened()
    fill(writer, range(1))
    writer.close()
    path = file_of(tmp_path)
    whole = path.read_bytes()
    assert verify_logs(tmp_path)[0].damage == []
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        try:
            (chunk,) = verify_logs(tmp_path)
        except DataError as error:
            assert "expected a log of boundary messages" in str(error)  # noqa: PT017
            continue
        assert chunk.damage or not chunk.is_closed, f"bit {at % 8} of byte {at}"


def test_reading_a_damaged_message_says_which(opened, tmp_path):
    writer = opened()
    fill(writer, range(1))
    writer.flush()
    path = file_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 16
    path.write_bytes(data)
    assert torch.equal(writer.read(Key(Kind.ACTIVATION, 0, 1)), message(0, 1))
    with pytest.raises(
        DataError, match="activation of iteration 0, micro-batch 2: expected the 80"
    ):
        writer.read(Key(Kind.ACTIVATION, 0, 2))
    path.write_bytes(data[:-4])
    with pytest.raises(DataError, match="micro-batch 2: expected the 80 bytes of digest"):
        writer.read(Key(Kind.ACTIVATION, 0, 2))


def test_a_missing_file_is_named(opened, tmp_path):
    writer = opened()
    for start in (0, 1, 2):
        if start:
            writer.start_interval(start)
        fill(writer, range(start, start + 1))
    writer.flush()
    file_of(tmp_path, 1).unlink()
    with pytest.raises(DataError, match=r"000001.log, which holds the activation of .* is missing"):
        writer.read(Key(Kind.ACTIVATION, 1, 0))
    damage = {chunk.header.sequence: chunk.damage for chunk in verify_logs(tmp_path)}
    assert damage == {0: [], 2: ["file 000001 before this one is missing"]}


def test_messages_of_another_run_are_refused(opened, tmp_path):
    mine = opened()
    fill(mine, range(1))
    mine.flush()
    other = BoundaryLog(tmp_path / "other").open("run-2", 2)
    fill(other, range(1))
    other.close()
    assert verify_logs(tmp_path / "other", run="run-2")[0].damage == []
    (chunk,) = verify_logs(tmp_path / "other", run="run-1")
    assert chunk.damage == ["expected messages of run 'run-1', got run 'run-2'"]
    shutil.copy(file_of(tmp_path / "other"), file_of(tmp_path))
    with pytest.raises(DataError, match="expected messages of run 'run-1', got run 'run-2'"):
        mine.read(Key(Kind.ACTIVATION, 0, 0))


def test_a_new_log_removes_what_its_stage_left_and_nothing_else(opened, tmp_path):
    for stage in (1, 2):
        writer = BoundaryLog(tmp_path).open("old", stage)
        fill(writer, range(2))
        writer.close()
    opened("new", 2)
    assert [chunk.header.run for chunk in verify_logs(tmp_path)] == ["old", "new"]


def test_no_log_is_said(tmp_path):
    with pytest.raises(DataError, match=r"expected logs .* got none"):
        verify_logs(tmp_path)


@contextmanager
def files_limited_to(num_bytes):
    """The operating system refuses to let files grow further, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_interval_and_not_training(opened, tmp_path, caplog):
    writer = opened()
    fill(writer, range(1))
    writer.flush()
    size = file_of(tmp_path).stat().st_size
    with files_limited_to(size + records.RECORD_BYTES + 10), caplog.at_level(logging.WARNING):
        fill(writer, range(1, 3))
        writer.flush()
    assert "at activation of iteration 1, micro-batch 0, as [Errno 27]" in writer.unreplayable
    assert "cannot be replayed before the next checkpoint" in caplog.text
    assert writer.unreplayable in writer.find_gap(Kind.ACTIVATION, 0, 2, NUM)
    assert file_of(tmp_path).stat().st_size == size
    writer.start_interval(3)
    fill(writer, range(3, 4))
    assert writer.find_gap(Kind.ACTIVATION, 3, 4, NUM) is None
    assert writer.unreplayable is None
    writer.close()
    assert [chunk.damage for chunk in verify_logs(tmp_path)] == [[], []]


def test_a_full_disk_at_an_intervals_start_costs_that_interval(opened, tmp_path):
    writer = opened()
    fill(writer, range(1))
    writer.flush()
    with files_limited_to(records.CHUNK_BYTES - 1):
        writer.start_interval(1)
        fill(writer, range(1, 2))
        writer.flush()
    assert "at iteration 1, as [Errno 27]" in writer.unreplayable
    writer.start_interval(2)
    fill(writer, range(2, 3))
    assert writer.find_gap(Kind.ACTIVATION, 0, 1, NUM) is None
    assert writer.find_gap(Kind.ACTIVATION, 1, 2, NUM) is not None
    assert writer.find_gap(Kind.ACTIVATION, 2, 3, NUM) is None
    assert [chunk.damage for chunk in verify_logs(tmp_path)] == [[], []]


def test_a_disk_that_is_full_as_a_log_is_opened_costs_that_interval(opened, tmp_path):
    """As on a newcomer, whose recovery it must not end."""
    with files_limited_to(records.CHUNK_BYTES - 1):
        writer = opened()
        fill(writer, range(1))
        writer.flush()
    assert "at iteration 0, as [Errno 27]" in writer.unreplayable
    assert "[Errno 27]" in writer.find_gap(Kind.ACTIVATION, 0, 1, NUM)
    writer.start_interval(1)
    fill(writer, range(1, 2))
    assert writer.find_gap(Kind.ACTIVATION, 1, 2, NUM) is None
    assert [chunk.damage for chunk in verify_logs(tmp_path)] == [[]]
    writer.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_a_budget_bounds_the_files_and_is_free_again_when_older_ones_go(opened, tmp_path):
    budget = records.CHUNK_BYTES + 4 * (records.RECORD_BYTES + 80)
    writer = opened(budget=budget)
    fill(writer, range(2))
    writer.flush()
    assert f"the budget of {budget} B is used up" in writer.unreplayable
    assert "iteration 1, micro-batch 1" in writer.unreplayable
    assert file_of(tmp_path).stat().st_size == budget
    writer.start_interval(2)
    writer.forget(2)
    fill(writer, range(2, 3))
    assert writer.find_gap(Kind.ACTIVATION, 2, 3, NUM) is None
    writer.start_interval(3)  # all files count
    fill(writer, range(3, 4))
    writer.flush()
    assert "logging stopped at activation of iteration 3" in writer.unreplayable


@pytest.fixture
def held(monkeypatch):
    """The writing thread stops at each message until the event is set."""
    may_write, digest = threading.Event(), records.digest

    def wait(tensor):
        assert may_write.wait(30)
        return digest(tensor)

    monkeypatch.setattr(records, "digest", wait)
    return may_write


def test_a_full_queue_drops_the_interval_if_asked(opened, held):
    writer = opened(queue=3 * 80, when_full="drop")
    fill(writer, range(2))
    assert "iteration 1, micro-batch 0, as 240 B waited for the disk" in writer.unreplayable
    held.set()
    writer.start_interval(2)
    fill(writer, range(2, 3))
    assert writer.find_gap(Kind.ACTIVATION, 2, 3, NUM) is None
    assert writer.waited_s == 0


def test_a_full_queue_blocks_training_until_the_disk_has_caught_up(opened, held):
    writer = opened(queue=3 * 80)
    fill(writer, range(1))
    blocked = threading.Thread(target=fill, args=(writer, range(1, 2)))
    blocked.start()
    blocked.join(0.2)
    assert blocked.is_alive()
    held.set()
    blocked.join(30)
    assert not blocked.is_alive()
    assert writer.find_gap(Kind.ACTIVATION, 0, 2, NUM) is None
    assert writer.waited_s >= 0.15


def test_a_message_larger_than_the_queue_is_logged(opened):
    writer = opened(queue=8, when_full="drop")
    writer.append(Key(Kind.ACTIVATION, 0, 0), message(0, 0))
    assert writer.find_gap(Kind.ACTIVATION, 0, 1, 1) is None


@pytest.fixture
def gathered(monkeypatch):
    """Messages are gathered for longer than any test lasts; gives the calls that wrote."""
    calls, writev = [], os.writev

    def write(file, parts):
        calls.append(len(parts))
        return writev(file, parts)

    monkeypatch.setattr(log, "GATHER_S", 1000.0)
    monkeypatch.setattr(os, "writev", write)
    return calls


def wait_for_bytes(path, num_bytes):
    end = time.monotonic() + 60
    while path.stat().st_size < num_bytes:
        assert time.monotonic() < end, f"{path.stat().st_size} of {num_bytes} bytes"
        time.sleep(0.005)


def test_gathered_messages_are_written_in_one_call(opened, gathered, tmp_path):
    writer = opened()
    gathered.clear()
    fill(writer, range(2))
    time.sleep(0.05)
    assert gathered == []
    writer.flush()
    assert gathered == [2 * 2 * NUM]
    time.sleep(0.05)  # else the thread that just wrote takes what comes
    fill(writer, range(2, 3))
    writer.close()
    assert sum(gathered) == 3 * 2 * NUM + 1, "what waited, and the footer"
    assert verify_logs(tmp_path)[0].num_records == 3 * NUM


def test_more_messages_than_one_call_takes_are_written(opened, gathered):
    writer = opened()
    gathered.clear()
    fill(writer, range(200))
    assert writer.find_gap(Kind.ACTIVATION, 0, 200, NUM) is None
    assert gathered == [1024, 2 * 200 * NUM - 1024]
    assert torch.equal(writer.read(Key(Kind.ACTIVATION, 199, 2)), message(199, 2))


def test_calls_that_write_a_part_are_followed_by_others(opened, monkeypatch, tmp_path):
    whole = opened(stage=1)
    fill(whole, range(2))
    whole.close()
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, [parts[0][:7]]))
    writer = opened(stage=2)
    fill(writer, range(2))
    writer.close()
    found = [file_of(tmp_path, stage=stage).read_bytes() for stage in (1, 2)]
    assert found[0][records.CHUNK_BYTES :] == found[1][records.CHUNK_BYTES :]


def test_a_disk_that_takes_a_part_and_no_more_leaves_whole_records(opened, monkeypatch, tmp_path):
    writer, writev, calls = opened(), os.writev, []
    fill(writer, range(1))
    writer.flush()
    size = file_of(tmp_path).stat().st_size

    def write(file, parts):
        calls.append(len(parts))
        if len(calls) > 1:
            raise MemoryError
        return writev(file, parts[:3])

    with monkeypatch.context() as patched:
        patched.setattr(log, "GATHER_S", 1000.0)
        patched.setattr(os, "writev", write)
        fill(writer, range(1, 2))
        writer.flush()
    assert len(calls) > 1
    # The first flush may have ended this gathering too: one message is then written by itself.
    assert file_of(tmp_path).stat().st_size - size in (0, records.RECORD_BYTES + 80)
    assert "MemoryError" in writer.find_gap(Kind.ACTIVATION, 1, 2, NUM)
    writer.close()
    assert verify_logs(tmp_path)[0].damage == []


def test_half_a_queue_is_written_before_it_is_full(opened, gathered, tmp_path):
    writer = opened(queue=4 * 80)
    gathered.clear()
    fill(writer, range(1))  # three of four
    wait_for_bytes(file_of(tmp_path), records.CHUNK_BYTES + NUM * (records.RECORD_BYTES + 80))
    assert gathered == [2] * NUM, "an eighth of the queue at once, or one message"
    assert writer.waited_s == 0


def test_a_message_that_has_to_wait_for_room_ends_the_gathering(opened, gathered):
    writer = opened(queue=5 * 80)
    writer.append(Key(Kind.ACTIVATION, 0, 0), message(0, 0))
    writer.append(Key(Kind.ACTIVATION, 0, 1), torch.ones(5 * 20))
    assert writer.find_gap(Kind.ACTIVATION, 0, 1, 2) is None


def test_messages_that_nobody_waits_for_are_written_all_the_same(opened, tmp_path):
    fill(opened(), range(1))
    wait_for_bytes(file_of(tmp_path), records.CHUNK_BYTES + NUM * (records.RECORD_BYTES + 80))


def test_settings_that_fit_nothing_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected when_full 'block' or 'drop', got 'wait'"):
        BoundaryLog(tmp_path, when_full="wait")
    with pytest.raises(ConfigError, match="lots"):
        BoundaryLog(tmp_path, budget="lots")
