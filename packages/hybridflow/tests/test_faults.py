"""What goes wrong with ranks, and how soon and how clearly the controller says so."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import hybridflow as hy
from hybridflow import Worker, WorkerGroup, Workers
from hybridflow.training.checkpoints.checkpoint import Checkpoint
from hybridflow.training.config import read_recipe
from hybridflow.training.runtime import Run
from shared.errors import ConfigError, RankFailure
from shared.process_mark import mark

from .frail import Frail, rows
from .processes import assert_gone, runs, with_variable


@pytest.fixture
def inline():
    with Workers.inline(2) as workers:
        yield WorkerGroup(Frail, workers.pool(2))


@pytest.fixture
def local():
    with Workers.local(2) as workers:
        yield WorkerGroup(Frail, workers.pool(2))


@pytest.fixture
def folders():
    """Tells what local engines that were started since keep in shared memory."""

    def found():
        return set(Path("/dev/shm").glob(f"meshyard-hybridflow-{mark()}-*"))

    before = found()
    return lambda: sorted(found() - before)


# What a rank raises.


def test_a_failure_names_rank_method_and_cause_with_its_traceback(inline):
    with pytest.raises(RankFailure) as caught:
        inline.lose(rows(2)).result()
    assert caught.value.rank == 0
    message = str(caught.value)
    assert message.startswith("rank 0 of 2 raised in Frail.lose: LookupError: rank 0 lost its rows")
    assert 'raise LookupError(f"rank {self.rank} lost its rows")' in message
    assert "rank 1 too: LookupError: rank 1 lost its rows" in message


def test_a_failure_passes_down_a_chain_of_calls_and_ends_there(inline):
    lost = inline.lose(rows(4))
    end = inline.add(inline.add(lost, 1) | rows(4), 1)
    with pytest.raises(RankFailure, match=r"raised in Frail\.lose"):
        end.result()
    assert inline.add(rows(2), 1).result()["x"].tolist() == [1, 2]


def test_a_failure_reaches_calls_that_wait_for_it(pools):
    left, right = (WorkerGroup(Frail, pool) for pool in pools)
    waiting = right.add(right.add(left.lose(rows(4)), 1), 1)
    after = right.add(rows(2), 5)
    with pytest.raises(RankFailure, match="rank 0 lost its rows"):
        waiting.result(60)
    assert after.result(60)["x"].tolist() == [5, 6]


def test_a_worker_that_can_not_be_made(inline):
    with pytest.raises(RankFailure, match="ValueError: no weights here"):
        WorkerGroup(Frail, inline.pool, fails=True)
    assert inline.echo(1).result() == [1, 1]


def test_a_result_that_can_not_travel(inline):
    with pytest.raises(RankFailure, match=r"a lock cannot be sent to another process"):
        inline.unpicklable().result()


# What the caller gets wrong.


def test_arguments_that_can_not_travel(inline):
    future = inline.echo(lambda: None)
    with pytest.raises(ConfigError, match="top level"):
        future.result()
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        inline.echo(threading.Lock()).result()
    assert inline.echo(1).result() == [1, 1]


def test_workers_of_a_function_are_refused(inline):
    class Local(Worker):
        pass

    with pytest.raises(ConfigError, match="top level"):
        WorkerGroup(Local, inline.pool)


@pytest.mark.parametrize("name", ["ad", "not_remote"])
def test_methods_that_are_not_remote(inline, name):
    with pytest.raises(AttributeError, match=rf"Frail has no remote method '{name}'; it has add,"):
        getattr(inline, name)
    with pytest.raises(ConfigError, match=r"Mark a method with @hybridflow\.remote"):
        inline.call(name)


def test_wrong_arguments_are_told_like_python_does(inline):
    with pytest.raises(RankFailure, match="unexpected keyword argument 'numbr'"):
        inline.add(rows(2), numbr=1).result()


def test_a_pool_larger_than_the_workers():
    with Workers.inline(3) as workers:
        workers.pool(2)
        with pytest.raises(ConfigError, match=r"at most the 1 free of 3, got 2; start more"):
            workers.pool(2)
        with pytest.raises(ConfigError, match="got 0; start more"):
            workers.pool(0)
        assert workers.pool(1).ranks == (2,)


def test_a_layout_that_does_not_fill_its_pool(inline):
    with pytest.raises(ConfigError, match="1-3-1 takes 3 ranks, and there are 2; the nearest"):
        WorkerGroup(Frail, inline.pool, layout="1-3-1")


@pytest.mark.parametrize(
    ("make", "layout", "told"),
    [
        (hy.Actor, "1-8-1", r"8 tensor shards do not divide 4 query heads.*; 1, 2, 4 do"),
        (hy.Critic, "8-1-1", "8 pipeline stages need a layer each, and there are 2"),
        (hy.RewardModel, "1-8-1", "8 tensor shards do not divide"),
        (hy.Reference, "8-1-1", "8 pipeline stages need a layer each"),
    ],
)
def test_a_layout_that_does_not_divide_its_model_is_refused_before_any_rank_is_asked(
    make, layout, told, monkeypatch
):
    with Workers.inline(8) as workers:
        pool = workers.pool(8)
        monkeypatch.setattr(workers, "call", None)
        with pytest.raises(ConfigError, match=told):
            make("config:tiny-llama", pool, train=layout)


def test_closed_workers_take_no_calls_and_have_no_more_results():
    with Workers.local(2) as workers:
        group = WorkerGroup(Frail, workers.pool(2))
        read, unread = group.grow(rows(2)), group.grow(rows(2))
        read.result()
        group.echo(None).result()  # so that the one before is there too
        assert unread.is_done
    assert float(read.result()["y"].sum()) == 100_000
    with pytest.raises(ConfigError, match="these workers were closed"):
        unread.result()
    with pytest.raises(ConfigError, match="these workers were closed, and results not read"):
        group.echo(1)
    with pytest.raises(ConfigError, match="these workers were closed"):
        WorkerGroup(Frail, group.pool)
    workers.close()  # a second time does nothing


def test_calls_under_way_end_when_workers_are_closed():
    workers = Workers.local(1)
    group = WorkerGroup(Frail, workers.pool(1))
    future = group.sleep_for_ever()
    waits = threading.Event()
    errors = []

    def wait():
        waits.set()
        try:
            future.result()
        except ConfigError as error:
            errors.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    waits.wait()
    workers.close()
    waiter.join(60)
    assert errors == ["the workers were closed before this call was answered"]


def test_ray_that_is_not_installed_is_named_with_the_cure(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("hybridflow.workers.engines.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'ray>=2\.50'"):
        Workers.ray()


def test_importing_hybridflow_does_not_import_ray():
    script = "import sys, hybridflow.workers.controller; sys.exit('ray' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", script], env=env, check=True)


# Ranks that die or hang.


def test_a_killed_rank_is_found_at_once(folders, local):
    workers = local.pool.workers
    kept = local.grow(rows(2))
    kept.result()
    pid = local.pid().result()[1]
    future = local.sleep_for_ever()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankFailure, match="rank 1 of 2 died: killed by SIGKILL") as caught:
        future.result(60)  # it would sleep for ever
    assert caught.value.rank == 1
    with pytest.raises(RankFailure, match="rank 1 of 2 died"):
        local.echo(1)
    assert float(kept.result()["y"].sum()) == 100_000
    workers.close()
    assert folders() == []


@pytest.mark.slow
def test_a_killed_rank_is_found_within_a_second(local):
    pid = local.pid().result()[1]
    future = local.sleep_for_ever()
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankFailure, match="rank 1 of 2 died"):
        future.result(30)
    assert time.monotonic() - begin < 1


@pytest.mark.slow
def test_a_rank_killed_between_calls_is_found_by_the_next(local):
    pid = local.pid().result()[0]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankFailure, match="rank 0 of 2 died"):
        local.echo(1).result(30)


def test_shared_memory_is_empty_after_closing(folders):
    with Workers.local(2) as workers:
        group = WorkerGroup(Frail, workers.pool(2))
        future = group.grow(rows(4))
        value = future.result()
        assert len(folders()) == 1
        assert any(file.name.startswith("rank") for file in folders()[0].iterdir())
    assert folders() == []
    assert float(value["y"].sum()) == 200_000


def test_a_rank_that_raises_frees_those_that_wait_for_it(local, tmp_path, monkeypatch):
    monkeypatch.setattr("hybridflow.workers.controller.CANCEL_S", 2.0)
    pids = local.pid().result()
    future = local.hang_in_collective(str(tmp_path / "told"))
    with pytest.raises(RankFailure, match="ArithmeticError: rank 1 gives up") as caught:
        future.result(60)  # messages between these ranks time out after five minutes
    assert caught.value.rank == 1
    assert (tmp_path / "told").exists()
    with pytest.raises(RankFailure, match="rank 1 gives up"):
        local.echo(1)
    local.pool.workers.close()
    assert_gone(pids)


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_goes_on_to_the_same_end(tmp_path):
    recipe = read_recipe("ppo-sort", {"steps": "4", "batch_size": "32"})
    recipe = replace(recipe, placement=replace(recipe.placement, engine="local", num_ranks=2))

    def steps(folder, told, killed_after=None):
        with Workers.local(2) as workers:
            for step in Run.set_up(recipe, workers).steps(Checkpoint(folder), every=1):
                kept = ("step", "reward", "loss", "value_loss", "grad_norm", "entropy")
                told.append({name: step[name] for name in kept})
                if len(told) == killed_after:
                    os.kill(workers.engine.pids[1], signal.SIGKILL)
        return told

    whole, before = steps(tmp_path / "whole", []), []
    with pytest.raises(RankFailure, match="rank 1 of 2 died: killed by SIGKILL"):
        steps(tmp_path / "parts", before, killed_after=3)
    after = steps(tmp_path / "parts", [])
    # The step after which it was killed had not been saved.
    assert before == whole[:3]
    assert after == whole[2:]


# Ray.


@pytest.mark.slow
def test_what_ray_has_no_places_for_is_refused_at_once(ray_start):
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        Workers.ray(num_ranks=4)
    message = str(caught.value)
    assert "4 ranks want 1 CPUs and 0 GPUs each, and Ray's machines have places for 3" in message
    assert "3 CPUs and 0 GPUs in all, of which 3 CPUs and 0 GPUs are free" in message
    with pytest.raises(ConfigError, match="1 ranks want 4 CPUs"):
        Workers.ray(num_ranks=1, cpus_per_rank=4)
    with pytest.raises(ConfigError, match="want 1 CPUs and 1 GPUs each"):
        Workers.ray(num_ranks=1, gpus_per_rank=1)
    with pytest.raises(ConfigError, match="got 1 ranks of 0 CPUs and 0 GPUs"):
        Workers.ray(num_ranks=1, cpus_per_rank=0)
    assert time.monotonic() - begin < 10


@pytest.mark.slow
def test_what_others_hold_of_ray_is_waited_for_and_refused(ray_start):
    from ray.util.placement_group import placement_group, remove_placement_group

    other = placement_group([{"CPU": 2}])
    assert other.wait(60)
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="of which 1 CPUs and 0 GPUs were for 8 s free"):
        Workers.ray(num_ranks=2)
    assert time.monotonic() - begin < 10
    remove_placement_group(other)


@pytest.mark.slow
def test_rays_faults_are_told_like_the_others(ray_start, tmp_path):
    with Workers.ray(num_ranks=2) as workers:
        group = WorkerGroup(Frail, workers.pool(2))
        with pytest.raises(RankFailure, match=r"rank 0 of 2 raised in Frail\.lose: LookupError"):
            group.lose(rows(2)).result(60)
        unread = group.grow(rows(2))
        pids = group.pid().result(60)
        future = group.sleep_for_ever()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankFailure, match="rank 1 of 2 died") as caught:
            future.result(60)
        assert caught.value.rank == 1
        with pytest.raises(RankFailure, match="rank 1 of 2 died"):
            unread.result()
    assert_gone(pids)
    assert ray_start.is_initialized()  # it is not ours to end


@pytest.mark.slow
def test_a_rank_of_ray_that_raises_frees_those_that_wait_for_it(ray_start, tmp_path, monkeypatch):
    monkeypatch.setattr("hybridflow.workers.controller.CANCEL_S", 2.0)
    with Workers.ray(num_ranks=2) as workers:
        group = WorkerGroup(Frail, workers.pool(2))
        pids = group.pid().result(60)
        with pytest.raises(RankFailure, match="ArithmeticError: rank 1 gives up"):
            group.hang_in_collective(str(tmp_path / "told")).result(60)
    assert_gone(pids)


_OWN_RAY = """
import os, sys
from hybridflow import Workers

if __name__ == "__main__":
    with Workers.ray(num_ranks=1) as workers:
        print("ranks", workers.num_ranks, flush=True)
    import ray
    assert not ray.is_initialized()
"""


@pytest.mark.slow
def test_ray_started_by_workers_ends_with_them(tmp_path):
    pytest.importorskip("ray", reason="the ray engine needs Ray")
    script = tmp_path / "script.py"
    script.write_text(_OWN_RAY)
    tag = f"hybridflow-test-{os.getpid()}"
    path = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": path, "HYBRIDFLOW_TEST": tag}
    ran = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "ranks 1" in ran.stdout
    # All that the script started has inherited its environment.
    left = [pid for pid in with_variable(tag.encode()) if runs(pid)]
    assert_gone(left)
