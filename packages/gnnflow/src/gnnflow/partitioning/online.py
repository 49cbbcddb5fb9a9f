"""Online partitioning: each source of a stream gets a part as batches arrive, and keeps it.

After GNNFlow: a node gets a part when it is first seen as a source, and its edges, features and
memory are stored there.
Fennel ("FENNEL: Streaming Graph Partitioning for Massive Scale Graphs") and linear
deterministic greedy ("Streaming Graph Partitioning for Large Distributed Graphs") place a source
where its neighbours are, less a price for crowded parts. Departures: neighbours count in both
directions, an event each, whenever they were seen, since an edge is cut whoever its source is; and
hashing is a fixed mixer, the same in every process.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from gnnflow.partitioning import online_compiled as compiled
from shared.errors import ConfigError, DataError

__all__ = [
    "Fennel",
    "Hashed",
    "LeastEdges",
    "LinearGreedy",
    "OnlinePartitioner",
    "RoundRobin",
    "mix_ids",
]

_UNSEEN = -1


def mix_ids(ids: np.ndarray, seed: int = 0) -> np.ndarray:
    """64 well-mixed bits of each id, uint64: the finaliser of SplitMix64."""
    with np.errstate(over="ignore"):
        word = ids.astype(np.uint64) + np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95)
        word += np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))


class OnlinePartitioner(ABC):
    """Gives parts to sources batch by batch.

    The edges of an undirected graph have two sources: give them in both directions.

    Args:
        num_parts: how many parts.

    Raises:
        ConfigError: fewer than one part.
    """

    def __init__(self, num_parts: int) -> None:
        if num_parts < 1:
            raise ConfigError(f"expected at least 1 part, got num_parts={num_parts}")
        self.num_parts = num_parts
        self._owners = np.empty(0, np.int64)  # with room at its end
        self._num_nodes = 0
        self._sizes = np.zeros(num_parts, np.int64)

    @property
    def owners(self) -> Int64[Tensor, " num_nodes"]:
        """The part of every node seen so far, -1 where it was no source yet; a copy."""
        return torch.from_numpy(self._owners[: self._num_nodes].copy())

    @property
    def num_nodes_by_part(self) -> list[int]:
        """Nodes that each part has got."""
        return self._sizes.tolist()

    def assign(
        self, src: Int64[Tensor, " edges"], dst: Int64[Tensor, " edges"]
    ) -> Int64[Tensor, " edges"]:
        """Takes a batch of edges in the order of the stream and gives its new sources their parts.

        Takes time in proportion to the batch, amortised, whatever the size of the graph.

        Args:
            src, dst: node ids of at least 0.

        Returns:
            The part where each edge lives: that of its source.

        Raises:
            DataError: lengths differ, or something is no id. Nothing was changed.
        """
        for name, ids in (("src", src), ("dst", dst)):
            if ids.dtype != torch.int64 or ids.ndim != 1 or len(ids) != len(src):
                raise DataError(
                    f"expected src and dst int64 of one length, got {name} {ids.dtype} "
                    f"{list(ids.shape)} beside {list(src.shape)}"
                )
            if len(ids) and int(ids.min()) < 0:
                row = int((ids < 0).nonzero()[0])
                raise DataError(f"{name} of edge {row}: expected 0 or more, got {int(ids[row])}")
        sources = np.ascontiguousarray(src.cpu().numpy())
        others = np.ascontiguousarray(dst.cpu().numpy())
        if not len(sources):
            return torch.empty(0, dtype=torch.int64)
        self._grow(int(max(sources.max(), others.max())) + 1)
        self._place(sources, others)
        return torch.from_numpy(self._owners[sources])

    def assign_rest(self, num_nodes: int | None = None) -> Int64[Tensor, " num_nodes"]:
        """Gives a part to every node that was no source yet, so that its features have a home.

        Args:
            num_nodes: ids are below it; the nodes seen when None.

        Returns:
            `owners`, all of which have a part.
        """
        self._grow(self._num_nodes if num_nodes is None else num_nodes)
        self._place_rest(self._owners[: self._num_nodes])
        return self.owners

    def _grow(self, num_nodes: int) -> None:
        if num_nodes > len(self._owners):
            room = max(num_nodes, 2 * len(self._owners))
            grown = np.full(room, _UNSEEN, np.int64)
            grown[: len(self._owners)] = self._owners
            self._owners = grown
        self._num_nodes = max(self._num_nodes, num_nodes)

    @abstractmethod
    def _place(self, src: np.ndarray, dst: np.ndarray) -> None: ...

    @abstractmethod
    def _place_rest(self, owners: np.ndarray) -> None: ...


class Hashed(OnlinePartitioner):
    """By a hash of the id: no table is needed to know a node's part, and every edge may be cut.

    The same for any order and any cut into batches.
    """

    def __init__(self, num_parts: int, seed: int = 0) -> None:
        super().__init__(num_parts)
        self.seed = seed

    def part_of(self, ids: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """The part of any node, seen or not."""
        return torch.from_numpy(self._part_of(ids.cpu().numpy()))

    def _part_of(self, ids: np.ndarray) -> np.ndarray:
        return (mix_ids(ids, self.seed) % np.uint64(self.num_parts)).astype(np.int64)

    def _place(self, src: np.ndarray, dst: np.ndarray) -> None:
        new = src[self._owners[src] < 0]
        self._owners[new] = self._part_of(new)
        # A new source may come several times in a batch.
        self._sizes += np.bincount(self._part_of(np.unique(new)), minlength=self.num_parts)

    def _place_rest(self, owners: np.ndarray) -> None:
        rest = np.flatnonzero(owners < 0)
        self._place(rest, rest)


class RoundRobin(OnlinePartitioner):
    """By turns, in the order in which sources appear. The same for any cut into batches."""

    def _place(self, src: np.ndarray, dst: np.ndarray) -> None:
        compiled.assign_by_turns(src, self._owners, self._sizes)

    def _place_rest(self, owners: np.ndarray) -> None:
        rest = np.flatnonzero(owners < 0)
        self._place(rest, rest)


class LeastEdges(OnlinePartitioner):
    """Where the fewest edges are when a source appears. The same for any cut into batches."""

    def __init__(self, num_parts: int) -> None:
        super().__init__(num_parts)
        self._num_edges = np.zeros(num_parts, np.int64)

    def _place(self, src: np.ndarray, dst: np.ndarray) -> None:
        compiled.assign_by_edges(src, self._owners, self._sizes, self._num_edges)

    def _place_rest(self, owners: np.ndarray) -> None:
        # They have no edges of their own to weigh.
        compiled.assign_rest_by_size(owners, self._sizes)


class Fennel(OnlinePartitioner):
    """Where argmax_p |edges to V_p| - alpha gamma |V_p|^(gamma - 1), below a part's capacity.

    alpha = sqrt(P) m / n^1.5 for P parts, n nodes and m edges. Within a batch sources are placed in the
    order in which they appear, each with all the edges that are known by then, so that larger batches
    cut less; the answer depends on how the stream is cut. A node takes four bytes a part.

    Args:
        num_parts: how many parts.
        num_nodes, num_edges: expected totals; the counts so far when larger, or when None.
        gamma: exponent of the penalty for large parts, above 1.
        slack: capacity of a part over the mean number of nodes, at least 1.

    Raises:
        ConfigError: a number is outside its range.
    """

    def __init__(
        self,
        num_parts: int,
        *,
        num_nodes: int | None = None,
        num_edges: int | None = None,
        gamma: float = 1.5,
        slack: float = 1.1,
    ) -> None:
        super().__init__(num_parts)
        if not gamma > 1 or not slack >= 1:
            raise ConfigError(
                f"expected gamma above 1 and slack of at least 1, got {gamma} and {slack}"
            )
        self.gamma, self.slack = gamma, slack
        self._expected_nodes, self._expected_edges = num_nodes or 0, num_edges or 0
        self._num_edges = 0
        self._known = np.zeros((0, num_parts), np.int32)
        self._head = np.empty(0, np.int64)

    @property
    def capacity(self) -> int:
        """The most nodes a part may have, by the nodes that are expected or have got a part."""
        return self._capacity(int(self._sizes.sum()))

    def _capacity(self, num_nodes: int) -> int:
        return math.ceil(self.slack * max(num_nodes, self._expected_nodes) / self.num_parts)

    def _slope(self, num_nodes: int) -> float:
        num_edges = max(self._num_edges, self._expected_edges)
        alpha = (
            math.sqrt(self.num_parts) * num_edges / max(num_nodes, self._expected_nodes, 1) ** 1.5
        )
        return alpha * self.gamma

    def _grow(self, num_nodes: int) -> None:
        super()._grow(num_nodes)
        held, room = len(self._head), len(self._owners)
        if room > held:
            known = np.zeros((room, self.num_parts), np.int32)
            known[:held] = self._known
            self._known, self._head = known, np.full(room, -1, np.int64)

    def _place(self, src: np.ndarray, dst: np.ndarray) -> None:
        self._num_edges += len(src)
        num_nodes = int(self._sizes.sum()) + int(compiled.count_new(src, self._owners))
        compiled.assign_by_neighbours(
            src, dst, self._owners, self._sizes, self._known, self._head,
            np.empty(2 * len(src), np.int64), *self._rule(num_nodes),
        )  # fmt: skip

    def _place_rest(self, owners: np.ndarray) -> None:
        rule = self._rule(len(owners))
        compiled.assign_rest_by_neighbours(owners, self._sizes, self._known, *rule)

    def _rule(self, num_nodes: int) -> tuple[int, float, float]:
        return self._capacity(num_nodes), self._slope(num_nodes), self.gamma - 1


class LinearGreedy(Fennel):
    """Where argmax_p |edges to V_p| (1 - |V_p| / capacity); of equal ones where the fewest nodes are.

    Else as `Fennel`, whose gamma it does not use.
    """

    def _slope(self, num_nodes: int) -> float:
        return -1.0
