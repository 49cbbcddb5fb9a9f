"""Ranks and folders of parts that several test files share."""

import sys
from datetime import timedelta
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from graphs import plan_by_hand

from heta.graph.part_files import write_parts
from shared.comms import RankPool

_MODULES = ("torch_geometric.nn", "heta.training.trainer", "heta.nn")


# Each group that a rank has made keeps a thread that wakes up a hundred times a second until it ends.
@pytest.fixture(scope="module")
def open_pool():
    """open_pool(ranks) -> a pool that goes on to the next test, or a fresh one if that has failed."""
    pools = {}

    def choose(num_ranks):
        pool = pools.get(num_ranks)
        if pool is None or not pool.pids:  # a failed one has no ranks
            pool = RankPool(num_ranks, timeout=timedelta(seconds=120), modules=_MODULES)
            pools[num_ranks] = pool.__enter__()
        return pools[num_ranks]

    yield choose
    for pool in pools.values():
        pool.__exit__(None, None, None)


@pytest.fixture(scope="module")
def template(open_pool):
    """Imports once what all ranks need, those that commands start included."""
    open_pool(2)


@pytest.fixture(scope="session")
def parts_of(tmp_path_factory):
    """parts_of(graph, assignment, ...) -> the folder of these parts."""

    def write(graph, assignment, owners=None, **options):
        folder = tmp_path_factory.mktemp("parts") / "folder"
        write_parts(plan_by_hand(graph, assignment, **options), graph, folder, owners)
        return str(folder)

    return write
