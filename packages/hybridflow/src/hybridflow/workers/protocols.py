"""Transfer protocols: how a call's rows are split over a group's ranks, and whose results count.

After HybridFlow (arXiv 2409.19256), section 4.1: a protocol is a pair of functions, distribute and
collect, that a worker's method declares, so that a node of the dataflow can change its parallelism
without changes to its neighbours. Here both are data: which even share of the rows each rank gets,
and which ranks' results are joined. A result can then be passed on before it exists, and each rank
fetches only its own rows from the rank that made them.

Only a `Batch` (or the future of one) is ever split. Every rank gets any other argument whole,
unless the protocol has `own_arguments`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from hybridflow.workers.batch.layout import GenerationGroups, Layout, generation_layout
from shared.errors import ConfigError

__all__ = ["BUILT_IN", "Mesh", "Protocol", "Share", "remote"]

Share = tuple[int, int] | None
"""Index and number of even shares of the rows; None is all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Coordinates of a group's ranks in training and in generation, as protocols see them."""

    train: Layout
    generate: GenerationGroups

    @staticmethod
    def of(train: Layout, generate: str | None = None) -> Mesh:
        """The mesh of a layout; generation is laid out like training when not given.

        Raises:
            ConfigError: as `generation_layout`.
        """
        return Mesh(
            train=train, generate=generation_layout(train, generate or f"{train.pp}-{train.tp}")
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the group."""
        return self.train.num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How one method's arguments are distributed, and its results collected.

    Attributes:
        name: by which `remote` finds a built-in protocol.
        shares: function of the mesh: each rank's share of the rows.
        collectors: function of the mesh: the ranks whose results are used, in order.
        answer: "rows" joins the collectors' batches and drops padding rows; "list" returns all
            results; "one" returns the only result; or a function of the list.
        runs_on: "all" ranks or the "collectors" only.
        own_arguments: whether each argument is a sequence with one entry per rank.
    """

    name: str
    shares: Callable[[Mesh], Sequence[Share]]
    collectors: Callable[[Mesh], Sequence[int]]
    answer: Literal["rows", "list", "one"] | Callable[[list[Any]], Any]
    runs_on: Literal["all", "collectors"] = "all"
    own_arguments: bool = False

    def checked(self, mesh: Mesh) -> tuple[list[Share], list[int]]:
        """Shares and collectors on a mesh.

        Raises:
            ConfigError: if a custom protocol does not give each rank a share, names ranks that do
                not exist, or has shares that do not cover all rows.
        """
        shares, collectors = list(self.shares(mesh)), list(self.collectors(mesh))
        counts = {share[1] for share in shares if share is not None}
        if len(shares) != mesh.num_ranks or len(counts) > 1:
            raise ConfigError(
                f"protocol {self.name!r}: expected {mesh.num_ranks} shares of one number of parts, "
                f"got {shares}"
            )
        for share in shares:
            if share is not None and not 0 <= share[0] < share[1]:
                raise ConfigError(f"protocol {self.name!r}: there is no share {share}")
        given = {share[0] for share in shares if share is not None}
        if counts and given != set(range(*counts)):
            raise ConfigError(
                f"protocol {self.name!r}: expected each of {max(counts)} parts to go to some "
                f"rank, got only {sorted(given)}; the rows of the others would be lost"
            )
        places = set(collectors)
        if not places or len(places) < len(collectors) or not places <= set(_all(mesh)):
            raise ConfigError(
                f"protocol {self.name!r}: expected collectors among the ranks "
                f"0..{mesh.num_ranks - 1}, each once, got {collectors}"
            )
        if self.answer == "one" and len(collectors) != 1:
            raise ConfigError(
                f"protocol {self.name!r}: answer 'one' needs one collector, got {len(collectors)}"
            )
        return shares, collectors


def _all(mesh: Mesh) -> list[int]:
    return list(range(mesh.num_ranks))


def _whole(mesh: Mesh) -> list[Share]:
    return [None] * mesh.num_ranks


def _by_replica(mesh: Mesh) -> list[Share]:
    return [(mesh.train.coordinates(rank)[2], mesh.train.dp) for rank in _all(mesh)]


def _last_stage(mesh: Mesh) -> list[int]:
    return [mesh.train.rank(mesh.train.pp - 1, 0, dp) for dp in range(mesh.train.dp)]


def _by_generating_replica(mesh: Mesh) -> list[Share]:
    groups = mesh.generate
    return [(groups.coordinates(rank).replica, groups.num_replicas) for rank in _all(mesh)]


def _first_of_generating_replica(mesh: Mesh) -> list[int]:
    at = {rank: mesh.generate.coordinates(rank) for rank in _all(mesh)}
    firsts = [rank for rank in _all(mesh) if (at[rank].pp, at[rank].tp) == (0, 0)]
    return sorted(firsts, key=lambda rank: at[rank].replica)


def _by_stage_and_replica(mesh: Mesh) -> list[Share]:
    layout = mesh.train
    parts = layout.dp * layout.pp
    places = (layout.coordinates(rank) for rank in _all(mesh))
    return [(dp * layout.pp + pp, parts) for pp, _, dp in places]


def _first_shards(mesh: Mesh) -> list[int]:
    layout = mesh.train
    return [layout.rank(pp, 0, dp) for dp in range(layout.dp) for pp in range(layout.pp)]


BUILT_IN = {
    protocol.name: protocol
    for protocol in (
        Protocol(name="one-to-all", shares=_whole, collectors=_all, answer="list"),
        Protocol(name="3d", shares=_by_replica, collectors=_last_stage, answer="rows"),
        Protocol(
            name="3d-all-micro-dp",
            shares=_by_generating_replica,
            collectors=_first_of_generating_replica,
            answer="rows",
        ),
        Protocol(
            name="3d-pp-only",
            shares=_whole,
            collectors=lambda mesh: [mesh.train.rank(pp, 0, 0) for pp in range(mesh.train.pp)],
            answer="list",
        ),
        Protocol(
            name="dp",
            shares=lambda mesh: [(rank, mesh.num_ranks) for rank in _all(mesh)],
            collectors=_all,
            answer="rows",
        ),
        Protocol(
            name="all-to-all", shares=_whole, collectors=_all, answer="list", own_arguments=True
        ),
        Protocol(
            name="pp-as-dp", shares=_by_stage_and_replica, collectors=_first_shards, answer="rows"
        ),
        Protocol(name="3d-metrics", shares=_by_replica, collectors=_last_stage, answer="list"),
        Protocol(
            name="rank-zero",
            shares=_whole,
            collectors=lambda mesh: [0],
            answer="one",
            runs_on="collectors",
        ),
    )
}
"""The protocols of HybridFlow's Table 3 and those its official code added, by name."""


@dataclass(frozen=True, slots=True)
class Remote:
    """The mark that `remote` sets on a method."""

    protocol: Protocol
    is_blocking: bool = field(default=False)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def remote(
    protocol: str | Protocol = "one-to-all", *, is_blocking: bool = False
) -> Callable[[_Method], _Method]:
    """Marks a worker's method as callable on a group.

    Args:
        protocol: name of a built-in protocol, or a `Protocol`.
        is_blocking: whether a call waits and returns the result; else it returns a future.

    Raises:
        ConfigError: if there is no protocol of that name.

    Example:
        >>> class Adder(Worker):
        ...     @remote(protocol="dp")
        ...     def add(self, batch, number):
        ...         return Batch(sum=batch["x"] + number)
    """
    if isinstance(protocol, str):
        if protocol not in BUILT_IN:
            raise ConfigError(
                f"there is no protocol {protocol!r}; use a built-in one ({', '.join(BUILT_IN)}) "
                f"or a hybridflow.Protocol of your own"
            )
        protocol = BUILT_IN[protocol]
    mark = Remote(protocol, is_blocking)

    def note(method: _Method) -> _Method:
        method.remote_mark = mark  # type: ignore[attr-defined]
        return method

    return note
