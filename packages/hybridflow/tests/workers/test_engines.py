"""One suite for all engines: the same script has to mean the same wherever its workers run.

One file of more than 500 lines, as each engine is started once for all of its tests.
"""

import gc
import os
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridflow import Batch, Future, Protocol, Ragged, Worker, WorkerGroup, Workers, remote
from hybridflow.workers.batch.batch import PADDING
from hybridflow.workers.pool import ResourcePool
from shared.errors import ConfigError, DataError, RankFailure

_SPLIT = Protocol(
    name="split-and-list",
    shares=lambda mesh: [(rank, mesh.num_ranks) for rank in range(mesh.num_ranks)],
    collectors=lambda mesh: range(mesh.num_ranks),
    answer="list",
)
_LOG: list[str] = []  # of a rank's process, so that all groups on it write to one


def _wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("60 s have not been enough")
        time.sleep(0.002)


def _wait_for(path):
    _wait_until(Path(path).exists)


class Toy(Worker):
    def __init__(self, offset=0):
        self.offset = offset
        self.closed_at = None

    @remote("dp")
    def add(self, batch, number=0, *, other=None):
        more = 0 if other is None else other["x"]
        return Batch(x=batch["x"] + number + more + self.offset)

    @remote("dp")
    def fill(self, batch, width):
        return Batch(y=batch["x"].float().view(-1, 1).repeat(1, width))

    @remote("dp")
    def both(self, batch):
        return Batch(x=batch["x"] + batch["y"][:, 0].to(torch.int64))

    @remote("dp")
    def echo(self, batch):
        return batch

    @remote(_SPLIT)
    def saw(self, batch):
        marks = batch[PADDING].tolist() if PADDING in batch else None
        return batch["x"].tolist(), marks, sorted(batch.keys())

    @remote("3d")
    def whole_replica(self, batch):
        return Batch(x=batch["x"] + 100 * self.rank, rank=[self.rank] * len(batch))

    @remote(_SPLIT)
    def total(self, batch):
        return float(batch["y"].sum())

    @remote()
    def spoil(self, batch, tensor):
        batch["y"] += 1
        tensor += 1
        return float(batch["y"].sum() + tensor.sum())

    @remote()
    def peek(self, value):
        return value

    @remote()
    def mapped(self, values):
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {str(Path(line.split()[-1]).parent) for line in lines if "hybridflow-" in line}

    @remote("all-to-all")
    def mine(self, number):
        return self.rank, number

    @remote("rank-zero", is_blocking=True)
    def ask_first(self):
        return self.rank, os.getpid()

    @remote()
    def note(self, text, batch=None):
        _LOG.append(text)

    @remote()
    def log(self):
        found = list(_LOG)
        _LOG.clear()
        return found

    @remote("rank-zero")
    def wait_for(self, path):
        _wait_for(path)
        return Batch(x=torch.arange(3))

    @remote()
    def meet(self, mine, other):
        Path(mine).touch()
        _wait_for(other)
        return True

    @remote()
    def reduced(self):
        group = self.subgroup("all")
        value = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(value, group=group.process_group)
        return float(value), torch.get_num_threads()

    @remote()
    def fail(self):
        raise ArithmeticError(f"rank {self.rank} can not count")

    @remote()
    def num_references(self):
        import ray

        return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())

    def close(self):
        _LOG.append(f"closed {self.rank}")


@pytest.fixture(
    scope="module",
    params=[
        "inline",
        "local",
        pytest.param("torchrun-two-machines", marks=pytest.mark.slow),
        pytest.param("torchrun", marks=pytest.mark.slow),
        pytest.param("ray", marks=pytest.mark.slow),
    ],
)
def workers(request, torchrun_job):
    if request.param.startswith("torchrun"):
        ranks_per_machine = 1 if request.param == "torchrun-two-machines" else 2
        with torchrun_job(2, ranks_per_machine) as (started, others):
            yield started
        assert [process.returncode for process in others] == [0]
        return
    if request.param == "local":
        yield request.getfixturevalue("two_processes")
        request.getfixturevalue("two_processes").clear()
        return
    if request.param == "ray":
        request.getfixturevalue("ray_start")
    start = {"inline": Workers.inline, "ray": _ray}[request.param]
    with start(2) as started:
        yield started


def _ray(num_ranks):
    return Workers.ray(num_ranks=num_ranks)


@pytest.fixture
def pool(workers):
    return ResourcePool(workers, (0, 1))


@pytest.fixture
def toy(pool):
    return WorkerGroup(Toy, pool)


def _needs_processes(workers):
    if workers.engine.name == "inline":
        pytest.skip("the inline engine runs one call after another")


def _rows(count):
    return Batch(x=torch.arange(count))


def test_rows_go_out_and_come_back_in_order(toy):
    assert toy.add(_rows(4), 10).result()["x"].tolist() == [10, 11, 12, 13]
    assert toy.add(_rows(4), number=1).result()["x"].tolist() == [1, 2, 3, 4]
    assert toy.add(_rows(4), other=_rows(4)).result()["x"].tolist() == [0, 2, 4, 6]


def test_workers_are_made_with_their_arguments(pool):
    first, second = WorkerGroup(Toy, pool, 7), WorkerGroup(Toy, pool, offset=70)
    assert first.name != second.name
    assert first.add(_rows(2)).result()["x"].tolist() == [7, 8]
    assert second.add(_rows(2)).result()["x"].tolist() == [70, 71]


def test_padding_rows_are_marked_and_dropped(toy):
    assert toy.saw(_rows(3)).result() == [
        ([0, 1], None, ["x"]),
        ([2, 0], [False, True], [PADDING, "x"]),
    ]
    result = toy.echo(_rows(3)).result()
    assert result["x"].tolist() == [0, 1, 2]
    assert result.keys() == ["x"]
    # Dropped also where the worker does not hand the mark on, and where a rank has nothing else.
    assert toy.add(_rows(3)).result()["x"].tolist() == [0, 1, 2]
    assert toy.add(_rows(1), 5).result()["x"].tolist() == [5]


def test_a_padded_result_is_split_again_without_its_padding(toy):
    assert toy.saw(toy.add(toy.add(_rows(5)))).result() == [
        ([0, 1, 2], None, ["x"]),
        ([3, 4, 0], [False, False, True], [PADDING, "x"]),
    ]


def test_tensor_shards_get_the_rows_of_their_replica(pool):
    shards = WorkerGroup(Toy, pool, layout="1-2-1")
    result = shards.whole_replica(_rows(3)).result()
    assert (result["x"].tolist(), result["rank"]) == ([0, 1, 2], [0, 0, 0])
    stages = WorkerGroup(Toy, pool, layout="2-1-1")
    assert stages.whole_replica(_rows(3)).result()["rank"] == [1, 1, 1]


def test_every_kind_of_column_and_value_survives(toy):
    batch = Batch(
        half=torch.linspace(0, 1, 8).to(torch.bfloat16).view(4, 2),
        truth=torch.tensor([True, False, True, True]),
        text=["a", "b", "c", "d"],
        tokens=Ragged.of([torch.arange(k) for k in (3, 0, 2, 1)]),
        large=torch.randn(4, 9000),
        none=torch.empty(4, 0),
        meta={"temperature": 0.5},
    )
    result = toy.echo(batch).result()
    assert result.keys() == batch.keys()
    assert result.meta == batch.meta
    for name in ("half", "truth", "large", "none"):
        assert result[name].dtype == batch[name].dtype
        assert torch.equal(result[name], batch[name])
    assert result["text"] == batch["text"]
    assert result["tokens"] == batch["tokens"]
    value = {"a": [torch.arange(3), None], "b": (1, "x"), "large": torch.ones(100_000)}
    for found in toy.peek(value).result():
        assert found["a"][0].tolist() == [0, 1, 2]
        assert (found["a"][1], found["b"]) == (None, (1, "x"))
        assert torch.equal(found["large"], value["large"])


def test_only_part_of_a_storage_is_read(toy):
    whole = torch.arange(200_000).view(-1, 2)
    view = whole[10:20:2, 1]
    assert toy.echo(Batch(x=view)).result()["x"].tolist() == view.tolist()


def test_lists_and_single_answers(toy):
    assert toy.mine([5, 6]).result() == [(0, 5), (1, 6)]
    rank, pid = toy.ask_first()
    assert rank == 0
    assert (pid == os.getpid()) == (toy.pool.workers.engine.name == "inline")
    assert toy.note("x").result() == [None, None]
    toy.log().result()
    # The answer of several ranks is handed on as the list it is.
    assert toy.peek(toy.mine([5, 6])).result() == [[(0, 5), (1, 6)]] * 2
    assert toy.peek(toy.note("x")).result() == [[None, None]] * 2
    assert toy.peek(value=None).result() == [None, None]
    toy.log().result()
    with pytest.raises(DataError, match="one entry for each of 2 ranks, got a list of length 3"):
        toy.mine([5, 6, 7]).result()


def test_futures_of_different_splits_are_joined_in_the_workers(workers, toy):
    single = WorkerGroup(Toy, ResourcePool(workers, (1,)))
    names = Batch(name=list("abcde"))
    joined = toy.add(_rows(5)) | single.fill(_rows(5), 2) | names
    assert toy.both(joined).result()["x"].tolist() == [0, 2, 4, 6, 8]
    assert single.both(joined).result()["x"].tolist() == [0, 2, 4, 6, 8]
    here = joined.result()
    assert sorted(here.keys()) == ["name", "x", "y"]
    assert len(here) == 5
    assert (names | toy.add(_rows(5))).result()["name"] == list("abcde")


def test_joining_refuses_columns_that_differ(toy):
    same = toy.add(_rows(4)) | _rows(4)
    assert toy.add(same).result()["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(RankFailure, match="column 'x' is in both tables and differs, first in row"):
        toy.add(toy.add(_rows(4), 1) | _rows(4)).result()
    with pytest.raises(DataError, match="got 4 and 3 rows"):
        toy.add(toy.add(_rows(4), 1) | _rows(3)).result()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_mini_batches_of_joined_futures_make_up_the_whole(toy, count):
    joined = toy.add(_rows(7)) | toy.fill(_rows(7), 3)
    parts = [toy.both(joined.share(k, count)).result()["x"].tolist() for k in range(count)]
    assert [x for part in parts for x in part] == [0, 2, 4, 6, 8, 10, 12]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert joined.share(0, count).result()["x"].tolist() == list(range(len(parts[0])))


def test_more_mini_batches_than_rows_are_refused(toy):
    with pytest.raises(DataError, match="3 rows are too few for that many parts"):
        toy.add(toy.add(_rows(3)).share(0, 5)).result()
    with pytest.raises(ConfigError, match=r"part of 0\.\.2, got 3"):
        toy.add(_rows(3)).share(3, 3)


def test_columns_that_are_not_selected_are_not_there(toy):
    future = toy.echo(Batch(x=torch.arange(4), y=torch.ones(4, 9000)))
    assert [columns for _, _, columns in toy.saw(future.select("x")).result()] == [["x"]] * 2
    assert future.select("x").result().keys() == ["x"]
    with pytest.raises(ConfigError, match="select columns before futures are joined"):
        (future | _rows(4)).select("x")


@pytest.mark.parametrize("width", [4, 20_000], ids=["small", "large"])
def test_what_a_worker_writes_to_is_its_own(toy, width):
    batch, tensor = Batch(y=torch.ones(2, width)), torch.ones(width)
    for _ in range(2):
        # Each rank adds one to what it was given, not to what another had added to.
        assert toy.spoil(batch, tensor).result() == [6.0 * width] * 2
    assert float(batch["y"].sum() + tensor.sum()) == 3 * width
    made = toy.fill(Batch(x=torch.ones(2)), width)
    assert toy.spoil(made, tensor).result() == [6.0 * width] * 2
    assert toy.total(made).result() == [width, width]
    made.result()["y"] += 1
    assert toy.total(made).result() == [width, width]


def _weighed(workers, monkeypatch):
    """Bytes of the messages that the controller sends and takes, and the values it reads."""
    engine, seen = workers.engine, {"bytes": 0, "loads": 0}
    submit, receive, load = engine.submit, engine.receive, engine.store.load

    def weighed_submit(rank, task):
        seen["bytes"] += len(pickle.dumps(task))
        submit(rank, task)

    def weighed_receive(timeout_s):
        replies = receive(timeout_s)
        seen["bytes"] += sum(len(pickle.dumps(reply)) for reply in replies)
        return replies

    def counted_load(handle, wanted=None):
        seen["loads"] += 1
        return load(handle, wanted)

    monkeypatch.setattr(engine, "submit", weighed_submit)
    monkeypatch.setattr(engine, "receive", weighed_receive)
    monkeypatch.setattr(engine.store, "load", counted_load)
    return seen


def test_bulk_data_does_not_pass_the_controller(workers, toy, monkeypatch):
    _needs_processes(workers)
    seen = _weighed(workers, monkeypatch)
    made = toy.fill(_rows(4), 500_000)  # 8 MB
    assert toy.total(made).result() == [500_000.0, 2_500_000.0]
    assert seen["loads"] == 2  # the two sums, never what they were taken of
    assert seen["bytes"] < 20_000
    sent = Batch(x=torch.arange(4), y=torch.ones(4, 500_000), text=["x" * 100_000] * 4)
    assert toy.total(toy.echo(sent)).result() == [1_000_000.0] * 2
    assert seen["bytes"] < 40_000


def test_shared_memory_is_read_on_its_own_machine_only(workers, toy):
    if workers.engine.name != "torchrun":
        pytest.skip("the engine knows one machine, or leaves it to Ray where values are")
    made = toy.peek(torch.ones(100_000))  # one on each rank, and each reads both
    places = [workers.engine.store.places[rank] for rank in range(2)]
    for place, found in zip(places, toy.mapped(made).result(), strict=True):
        near = {other.folder for other in places if other.machine == place.machine}
        assert found & {other.folder for other in places} == near


def test_chains_of_futures_need_no_waiting(toy):
    future = toy.add(_rows(5))
    for _ in range(10):
        future = toy.add(future, 1)
    assert future.result()["x"].tolist() == [10, 11, 12, 13, 14]


def test_colocated_groups_run_in_call_order(pool):
    first, second = WorkerGroup(Toy, pool), WorkerGroup(Toy, pool)
    first.log().result()
    for k in range(6):
        (first, second)[k % 2].note(str(k))
    logs = second.log().result()
    if pool.workers.engine.name == "inline":  # where both ranks write to one
        assert logs == [sorted("012345" * 2), []]
    else:
        assert logs == [list("012345")] * 2


def test_disjoint_pools_overlap_in_time(workers, tmp_path):
    _needs_processes(workers)
    left = WorkerGroup(Toy, ResourcePool(workers, (0,)))
    right = WorkerGroup(Toy, ResourcePool(workers, (1,)))
    # Each waits for the other to have begun.
    one = left.meet(str(tmp_path / "a"), str(tmp_path / "b"))
    two = right.meet(str(tmp_path / "b"), str(tmp_path / "a"))
    assert (one.result(60), two.result(60)) == ([True], [True])


def test_calls_made_while_another_thread_waits_are_answered(workers, tmp_path):
    _needs_processes(workers)
    left = WorkerGroup(Toy, ResourcePool(workers, (0,)))
    right = WorkerGroup(Toy, ResourcePool(workers, (1,)))
    slow = left.wait_for(str(tmp_path / "go"))
    waiter = threading.Thread(target=slow.result)
    waiter.start()
    for _ in range(3):
        assert right.peek(1).result(60) == [1]
    assert not slow.is_done
    (tmp_path / "go").touch()
    waiter.join(60)
    assert slow.is_done


def test_deferred_calls_keep_their_order_on_a_rank(workers, tmp_path):
    left = WorkerGroup(Toy, ResourcePool(workers, (0,)))
    right = WorkerGroup(Toy, ResourcePool(workers, (1,)))
    right.log().result()
    if workers.engine.name == "inline":
        (tmp_path / "go").touch()
    made = left.wait_for(str(tmp_path / "go"))
    right.note("first", made)
    second = right.note("second")
    if workers.engine.name != "inline":
        assert not second.is_done
    (tmp_path / "go").touch()
    second.result(60)
    assert right.log().result() == [["first", "second"]]


def test_a_future_is_handed_on_before_it_is_there(workers, tmp_path, monkeypatch):
    _needs_processes(workers)
    left = WorkerGroup(Toy, ResourcePool(workers, (0,)))
    right = WorkerGroup(Toy, ResourcePool(workers, (1,)))
    read, result = [], Future.result

    def reading(future, *arguments):
        read.append(future)
        return result(future, *arguments)

    monkeypatch.setattr(Future, "result", reading)
    made = left.wait_for(str(tmp_path / "go"))
    sums = right.peek(right.add(made, 1))
    assert not made.is_done
    (tmp_path / "go").touch()
    assert sums.result(60)[0]["x"].tolist() == [1, 2, 3]
    assert sums in read
    assert made not in read  # nobody has read it here


def test_any_number_of_calls_is_made_before_an_answer_is_read(toy):
    text = "x" * 10_000
    futures = [toy.peek(text) for _ in range(300)]
    assert [future.result(60) for future in futures] == [[text, text]] * 300


def test_waiting_ends_when_the_time_is_up(workers, toy, tmp_path):
    _needs_processes(workers)
    future = toy.wait_for(str(tmp_path / "go"))
    with pytest.raises(TimeoutError, match=r"Toy\S*\.wait_for has not answered within 0\.05 s"):
        future.result(timeout_s=0.05)
    assert not future.is_done
    (tmp_path / "go").touch()
    assert len(future.result(60)) == 3


def test_ranks_exchange_messages(workers, toy):
    if workers.engine.name == "inline":
        with pytest.raises(RankFailure, match=r"use Workers\.local\(2\)"):
            toy.reduced().result()
    else:
        assert toy.reduced().result() == [(3.0, 1)] * 2


def test_what_raises_is_told_and_work_goes_on(toy):
    future = toy.fail()
    with pytest.raises(RankFailure, match=r"(?s)rank 0 of 2 raised in Toy\S*\.fail.*rank 1 too"):
        future.result()
    assert toy.peek(1).result() == [1, 1]


def test_removed_groups_are_closed_and_answer_no_more(toy):
    toy.log().result()
    other = WorkerGroup(Toy, toy.pool)
    toy.remove()
    assert sorted(line for log in other.log().result() for line in log) == ["closed 0", "closed 1"]
    with pytest.raises(ConfigError, match=r"Toy\S* was removed from its ranks"):
        toy.peek(1)


def test_empty_batches_are_refused(toy):
    with pytest.raises(DataError, match="expected a batch with a row or more"):
        toy.add(_rows(0)).result()


def test_values_are_removed_once_nobody_holds_them(workers, toy):
    if workers.engine.name == "inline":
        pytest.skip("the inline engine keeps values in its handles")
    if workers.engine.name == "torchrun":
        _wait_until(lambda: _kept(toy) == 0)  # what tests before this have let go of
    before = _kept(toy)
    made = toy.fill(Batch(x=torch.arange(4), y=torch.ones(4, 50_000)), 50_000)
    value = made.result()["y"]
    assert _kept(toy) == before + 2  # one of each rank; the argument's is gone
    del made
    _wait_until(lambda: _kept(toy) == before)  # other processes come to it in their time
    assert float(value.sum()) == 6 * 50_000  # what was read stays readable


def _kept(toy):
    """How many values the engine keeps apart from its messages."""
    gc.collect()
    engine = toy.pool.workers.engine
    if engine.name == "ray":
        return sum(toy.num_references().result())
    is_local = engine.name == "local"
    folders = (
        [engine.store.folder] if is_local else [p.folder for p in engine.store.places.values()]
    )
    files = [file for folder in folders for file in Path(folder).iterdir()]
    # What is free may be written to again.
    return len([file for file in files if not file.is_socket() and file.suffix != ".free"])


def test_ranks_are_free_again_after_their_groups_were_taken_off(workers):
    before = WorkerGroup(Toy, ResourcePool(workers, (0, 1)))
    workers.clear()
    after = WorkerGroup(Toy, workers.pool(2))
    with pytest.raises(ConfigError, match="at most the 0 free of 2"):
        workers.pool(1)
    with pytest.raises(ConfigError, match="was removed from its ranks"):
        before.peek(1)
    assert after.peek(1).result() == [1, 1]
    workers.clear()
    assert workers.groups == []
