import importlib.util
import logging
import math
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from shared.comms import Group, RankPool
from shared.errors import ConfigError
from shared.training.log_lines import show_log_lines
from shared.units import parse_bytes


@dataclass(frozen=True)
class Point:
    x: int


class Namespace:
    @staticmethod
    def triple(value: int) -> int:
        return 3 * value


def moved(point: Point, by: torch.Tensor) -> tuple[Point, torch.Tensor]:
    return Point(point.x + dist.get_rank()), by + dist.get_rank()


def environment() -> dict:
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MINE")
    return {key: os.environ.get(key) for key in keys}


def threads() -> tuple[int, int]:
    return torch.get_num_threads(), os.getpid()


def heavy_modules() -> list[str]:
    return [name for name in ("numba", "triton", "dgl", "scipy", "pytest") if name in sys.modules]


def list_imported(names: list[str]) -> list[str]:
    return [name for name in names if name in sys.modules]


def world() -> tuple[int, int, str]:
    group = Group.world()
    assert group is Group.world()
    return group.rank, group.world_size, group.backend


def test_nothing_heavy_is_imported_before_the_function(pool):
    # First in this file: the pool's ranks import what later functions' files import.
    assert pool.run(os.getpid).results == pool.pids
    assert pool.run(len, ()).results == [0, 0]


def test_classes_of_the_functions_own_file_travel_both_ways(pool):
    run = pool.run(moved, Point(10), torch.zeros(3))
    assert [point for point, _ in run.results] == [Point(10), Point(11)]
    assert torch.equal(run.results[1][1], torch.ones(3))
    assert len(run.seconds) == 2
    assert run.slowest_s == max(run.seconds) > 0


def test_functions_of_installed_and_built_in_modules(pool):
    assert pool.run(parse_bytes, "1KiB").results == [1024, 1024]
    assert pool.run(math.sqrt, 16.0).results == [4.0, 4.0]
    assert pool.run(Namespace.triple, 2).results == [6, 6]


def test_function_of_a_file_that_no_path_leads_to(pool, tmp_path):
    file = tmp_path / "bench_loose.py"
    file.write_text(
        "def rank_times(n):\n    import torch.distributed as d\n    return n * d.get_rank()\n"
    )
    spec = importlib.util.spec_from_file_location("somewhere.bench_loose", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        assert pool.run(module.rank_times, 5).results == [0, 5]
    finally:
        del sys.modules[spec.name]


def test_ranks_have_torchruns_environment_and_ours(tmp_path):
    with RankPool(2, env={"MINE": "yes"}, threads_per_rank=2, ranks_per_host=1) as pool:
        first, second = pool.run(environment).results
        assert first == {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "2",
            "MINE": "yes",
        }
        assert second["RANK"] == "1"
        assert second["LOCAL_RANK"] == "0"
        assert [count for count, _ in pool.run(threads).results] == [2, 2]


def test_world_is_there(pool):
    assert pool.run(world).results == [(0, 2, "gloo"), (1, 2, "gloo")]


def test_closures_and_lambdas_are_refused_before_anything_runs(pool):
    def inner() -> None:
        pass

    for function in (inner, lambda: None):
        with pytest.raises(ConfigError, match="top level of a file"):
            pool.run(function)
    assert pool.run(world).results[0][1] == 2


def test_arguments_that_cannot_be_pickled_leave_the_pool_usable(pool):
    with pytest.raises(ConfigError, match="arguments of moved cannot be pickled"):
        pool.run(moved, lambda: None, None)
    assert pool.run(world).results[0][1] == 2


def test_pool_outside_its_block_is_closed():
    closed = RankPool(2)
    with pytest.raises(ConfigError, match="this pool is closed"):
        closed.run(world)


@pytest.mark.parametrize(
    "options",
    [{"num_ranks": 0}, {"num_ranks": 2, "prefix": [[]]}, {"num_ranks": 1, "threads_per_rank": 0}],
)
def test_bad_numbers_are_refused(options):
    with pytest.raises(ConfigError, match=r"at least one rank|as many prefixes"):
        RankPool(**options)


def test_a_rank_whose_pool_was_left_meanwhile_ends_in_silence(tmp_path):
    ours, theirs = socket.socketpair()
    words = (os.getpid(), 1, theirs.fileno(), 0, 1, 1, 60.0, tmp_path / "gone", "", "")
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-m", "shared.comms.launch.rank", *map(str, words)],
            pass_fds=[theirs.fileno()], capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_fresh_ranks_import_the_modules_that_they_are_told():
    # An environment of their own makes them fresh processes.
    with RankPool(1, env={"OF_ITS_OWN": "1"}, modules=["wave", "xml.dom.minidom"]) as pool:
        assert pool.run(list_imported, ["wave", "xml.dom.minidom", "turtle"]).results == [
            ["wave", "xml.dom.minidom"]
        ]


SCRIPT = """
from dataclasses import dataclass
from shared.comms import RankPool

@dataclass
class Answer:
    value: int

def answer(a):
    print("printed by a rank")
    return Answer(a.value + 1)

if __name__ == "__main__":
    with RankPool(1) as pool:
        print(pool.run(answer, Answer(41)).results[0].value)
"""


def test_function_of_a_script_and_where_its_ranks_print(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "42\n"
    assert "printed by a rank" in done.stderr


def log_a_line() -> None:
    for name in ("yard.deep", "other"):
        logging.getLogger(name).info("chosen")


@pytest.mark.parametrize(
    "env",
    [{}, pytest.param({"MINE": "fresh"}, marks=pytest.mark.slow)],
    ids=["forked", "fresh"],
)
def test_log_lines_that_the_parent_shows_are_shown_of_ranks_too(capfd, env):
    with show_log_lines(["yard", "more"]), RankPool(2, env=env) as pool:
        pool.run(log_a_line)
    lines = [line for line in capfd.readouterr().err.splitlines() if "chosen" in line]
    assert sorted(lines) == ["rank 0: yard.deep: chosen", "rank 1: yard.deep: chosen"]
    with RankPool(2, env=env) as pool:
        pool.run(log_a_line)
    assert "chosen" not in capfd.readouterr().err
