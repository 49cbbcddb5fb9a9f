"""Ranks and partitions that several test files share."""

from datetime import timedelta

import pytest
import torch

from adaqp.graphs import generated
from adaqp.graphs.graph import Graph, from_edge_index
from adaqp.partitioning.partitioner import partition
from shared.comms import RankPool


@pytest.fixture(scope="session")
def pool2():
    with RankPool(2, timeout=timedelta(seconds=60)) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool3():
    with RankPool(3, timeout=timedelta(seconds=60)) as pool:
        yield pool


@pytest.fixture(scope="session")
def sbm() -> Graph:
    return generated.sbm(600, blocks=6, degree=8, feat=20, seed=3)


@pytest.fixture(scope="session")
def directed() -> Graph:
    """A directed multigraph with self loops, duplicates and isolated nodes."""
    draw = torch.Generator().manual_seed(5)
    num_nodes = 300
    src = torch.randint(0, num_nodes - 5, (2000,), generator=draw)
    dst = torch.randint(0, num_nodes - 5, (2000,), generator=draw)
    role = torch.randint(0, 3, (num_nodes,), generator=draw)
    return from_edge_index(
        src,
        dst,
        num_nodes,
        torch.randn(num_nodes, 12, generator=draw),
        torch.randint(0, 4, (num_nodes,), generator=draw),
        role == 0,
        role == 1,
        role == 2,
    )


@pytest.fixture(scope="session")
def cut(tmp_path_factory):
    """cut(graph, parts, method) -> folder, each made once."""
    made = {}

    def make(graph: Graph, parts: int, method: str = "random") -> str:
        name = (graph.fingerprint(), parts, method)
        if name not in made:
            folder = tmp_path_factory.mktemp("parts") / f"{parts}{method}"
            partition(graph, parts, method=method, out=folder)
            made[name] = str(folder)
        return made[name]

    return make
