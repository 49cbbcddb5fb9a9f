"""A rank's share of a partitioned graph: its data, and the exchanges its models are built from."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from adaqp.messages.autograd import HaloInFlight, aggregate, aggregate_linear, send_rows
from adaqp.messages.graph_share import GraphShare
from adaqp.messages.runtime import Messages
from adaqp.partitioning.part import GraphPart, Operator, operator
from adaqp.policy import Exact, Policy
from shared.comms.collectives import all_gather
from shared.comms.group import Group
from shared.errors import CommError, ConfigError, DataError, TopologyError

__all__ = ["DistGraph", "load"]

_FORMAT = 1


class DistGraph(GraphShare):
    """One rank's share of a graph; made by `adaqp.load`.

    Attributes:
        feat: float [num_local, num_feat]; label: int64 [num_local] or float [num_local, classes].
        train_mask, val_mask, test_mask: bool [num_local].
        global_ids: int64 [num_local], the rows' node ids in the whole graph.
        group: the ranks, None for a single one.
        meta: properties of the whole graph, from the partition's meta.json.
    """

    def __init__(
        self, part: GraphPart, data: dict[str, Tensor], meta: dict[str, Any], group: Group | None
    ) -> None:
        super().__init__(part, group, is_symmetric=meta["symmetric"])
        self.meta = meta
        self.global_ids = part.global_ids
        self.feat, self.label = data["feat"], data["label"]
        self.train_mask, self.val_mask = data["train_mask"], data["val_mask"]
        self.test_mask = data["test_mask"]
        self._operators: dict[tuple[str, bool], Operator] = {}
        self._input: dict[tuple[str, bool], Tensor] = {}
        self._messages = Messages(self, Exact())

    # -- sizes ------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self.meta["num_nodes"]

    @property
    def num_classes(self) -> int:
        """Classes, or targets of a multilabel graph."""
        return self.meta["num_classes"]

    @property
    def device(self) -> torch.device:
        """The device that holds the rows."""
        return self.feat.device

    # -- messages ---------------------------------------------------------------------------

    @contextmanager
    def messages(self, policy: Policy, **settings: Any) -> Iterator[Messages]:
        """Inside, every exchange follows `policy`.

        Args:
            policy: `Exact()`, `Fixed(bits)`, `Adaptive(...)`, `Stale()` or `Drop()`.
            settings: overlap="edges" | "nodes" | None, backward="auto" | "push" | "pull",
                wire_dtype, seed, links (see `adaqp.messages.runtime.Messages`).

        Raises:
            ConfigError: an unknown setting.
        """
        inside = Messages(self, policy, **settings)
        with self.using(inside):
            yield inside
        # Not after an error: what is in transit then fails with it, and would hide its sentence.
        inside.settle()

    @contextmanager
    def using(self, messages: Messages) -> Iterator[None]:
        """Inside, `messages` executes the exchanges; lets several runs alternate."""
        before, self._messages = self._messages, messages
        try:
            yield
        finally:
            self._messages = before

    @property
    def current_messages(self) -> Messages:
        """What executes exchanges now; outside `messages()` they are exact, overlapped by edges."""
        return self._messages

    def aggregate(self, h: Float[Tensor, "num_local dim"], weight: str = "gcn") -> Tensor:
        """Sums over in-neighbours, local and remote: row v is the sum of w(u, v) h[u].

        The aggregation of `dg.feat` itself is computed once, without quantisation under any
        policy, and kept because inputs never change.

        Args:
            h: float tensor [num_local, dim].
            weight: "gcn", out_degree(u)^-1/2 in_degree(v)^-1/2 with one self loop a node (equals
                `dgl.nn.GraphConv(norm="both")` on the graph with self loops); "mean"; "sum".

        Returns:
            float tensor [num_local, dim], differentiable in `h`.

        Raises:
            ConfigError: unknown weight.
            DataError: `h` has another number of rows, or holds NaN where it is quantised.
            CommError: a peer died or sent nothing within the timeout.
        """
        self._check_rows(h, "aggregate")
        messages = self._messages
        if h is self.feat and not h.requires_grad:
            name = (weight, messages.drops_input)
            if name not in self._input:
                self._input[name] = messages.aggregate_input(h, self.operator(weight))
            return self._input[name]
        transposed = self.operator(weight, transposed=True) if messages.pulls else None
        channel = messages.next_channel()
        return aggregate(h.contiguous(), self.operator(weight), transposed, messages, channel)

    def aggregate_linear(
        self,
        h: Float[Tensor, "num_local in_dim"],
        matrix: Float[Tensor, "in_dim out_dim"],
        bias: Float[Tensor, " out_dim"] | None = None,
        weight: str = "gcn",
    ) -> Tensor:
        """`aggregate(h, weight) @ matrix + bias`; part of the product overlaps with the sending.

        Args:
            h: float tensor [num_local, in_dim].
            matrix: [in_dim, out_dim].
            bias: [out_dim], zeros if None.
            weight: as in `aggregate`.

        Returns:
            float tensor [num_local, out_dim], differentiable.

        Raises:
            ConfigError, DataError, CommError: as `aggregate`.
        """
        if bias is None:
            bias = matrix.new_zeros(matrix.shape[1])
        if not h.requires_grad:
            return torch.addmm(bias, self.aggregate(h, weight), matrix)
        self._check_rows(h, "aggregate_linear")
        messages, op = self._messages, self.operator(weight)
        transposed = self.operator(weight, transposed=True) if messages.pulls else None
        channel = messages.next_channel()
        return aggregate_linear(h.contiguous(), matrix, bias, op, transposed, messages, channel)

    def send(self, h: Float[Tensor, "num_local dim"]) -> HaloInFlight:
        """Starts sending the rows of `h` that others need; `.receive()` waits for the halo rows.

        Computation between the two calls overlaps with the sending, in the backward pass too.
        """
        self._check_rows(h, "send")
        return send_rows(h.contiguous(), self._messages, self._messages.next_channel("halo-"))

    def halo(self, h: Float[Tensor, "num_local dim"]) -> Tensor:
        """Local rows followed by halo rows, [num_local + num_halo, dim], differentiable.

        `dg.edge_index()` refers to these rows, so any PyTorch Geometric convolution runs on them.
        """
        return torch.cat([h, self.send(h).receive()])

    def edge_index(self) -> Tensor:
        """int64 [2, num_edges]: edges into local rows, sources as rows of `dg.halo(h)`."""
        rows = torch.arange(self.num_local, device=self.device)
        return torch.stack(
            [self.part.indices.long(), torch.repeat_interleave(rows, self.part.indptr.diff())]
        )

    # -- what the exchanges need ------------------------------------------------------------

    def operator(self, weight: str, *, transposed: bool = False) -> Operator:
        """The aggregation with one weighting, built on first use.

        Args:
            weight: "gcn", "mean" or "sum" over a node's incoming edges.
            transposed: of the reversed edges, as gradients travel.

        Raises:
            ConfigError: the weighting is none of these.
        """
        if weight not in ("gcn", "mean", "sum"):
            raise ConfigError(f"weight: expected 'gcn', 'mean' or 'sum', got {weight!r}")
        # In a symmetric graph both directions have equal degrees, so "gcn" and "sum" equal their
        # transposes.
        transposed = transposed and weight == "mean"
        name = (weight, transposed)
        if name not in self._operators:
            self._operators[name] = operator(self.part, weight, transposed=transposed)
        return self._operators[name]

    def _check_rows(self, h: Tensor, where: str) -> None:
        if h.ndim != 2 or h.shape[0] != self.num_local:
            raise DataError(
                f"dg.{where}: expected a tensor [num_local={self.num_local}, dim], got "
                f"{list(h.shape)} on rank {self.rank}; rows are the rank's own, in the order of "
                "dg.global_ids"
            )


def load(
    folder: str | Path, *, group: Group | None = None, device: torch.device | str | None = None
) -> DistGraph:
    """Loads this rank's share of a graph that `adaqp.partition` cut.

    Args:
        folder: the folder that `adaqp.partition(..., out=folder)` wrote.
        group: the ranks; None: the default process group, or a single rank without one.
        device: device that holds the rows; None: the group's device.

    Raises:
        DataError: no partition there, a file that cannot be read or is of another partition, or an
            unknown format.
        TopologyError: the number of ranks is not the number of parts.
    """
    folder = Path(folder)
    if group is None:
        with suppress(CommError):  # no process group: a single rank
            group = Group.world()
    rank, num_ranks = (group.rank, group.world_size) if group else (0, 1)
    meta = _read_meta(folder)
    if meta["parts"] != num_ranks:
        raise TopologyError(
            f"{folder} was cut into {meta['parts']} parts, but there are {num_ranks} ranks; start "
            f"{meta['parts']} ranks, or cut it again with parts={num_ranks}"
        )
    path = folder / f"part{rank}.safetensors"
    if not path.exists():
        raise DataError(f"rank {rank}: {path} is missing; copy the whole folder to every host")
    try:
        # safetensors calls a file missing that it may not read; Python says why it cannot.
        path.open("rb").close()
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            data = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"rank {rank}: {path} cannot be read: {error}; let this user read it, or copy the "
            "folder again"
        ) from error
    if header.get("fingerprint") != meta["fingerprint"] or header.get("rank") != str(rank):
        raise DataError(
            f"rank {rank}: {path} belongs to graph {header.get('fingerprint')!r} rank "
            f"{header.get('rank')}, but meta.json says {meta['fingerprint']!r}; the folder mixes "
            "two partitions: cut the graph again into an empty folder"
        )
    if group is not None:
        _check_same_graph(group, meta["fingerprint"])
    where = torch.device(device) if device else (group.device if group else torch.device("cpu"))
    data = {name: tensor.to(where) for name, tensor in data.items()}
    part = GraphPart(
        rank=rank,
        parts=num_ranks,
        num_central=meta["parts_info"][rank]["num_central"],
        in_degree=torch.cat([data["in_degree"], data["halo_in_degree"]]),
        out_degree=torch.cat([data["out_degree"], data["halo_out_degree"]]),
        loops=torch.cat([data["loops"], data["halo_loops"]]),
        **{
            name: data[name]
            for name in (
                "global_ids",
                "indptr",
                "indices",
                "halo_ids",
                "halo_offsets",
                "send_rows",
                "send_offsets",
            )
        },
    )
    return DistGraph(part, data, meta, group)


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not path.exists():
        raise DataError(
            f"{folder} holds no partition (no meta.json); make one with "
            f"adaqp.partition(graph, parts=..., out={str(folder)!r})"
        )
    meta = json.loads(path.read_text())
    if meta.get("format") != _FORMAT:
        raise DataError(
            f"{path}: expected format {_FORMAT}, got {meta.get('format')}; cut the graph again"
        )
    return meta


def _check_same_graph(group: Group, fingerprint: str) -> None:
    """Refuses a run whose hosts hold partitions of different graphs."""
    mine = torch.tensor([int(fingerprint[:15], 16)], device=group.device)
    theirs = [int(t) for t in all_gather(group, mine)]
    odd = [rank for rank, other in enumerate(theirs) if other != theirs[0]]
    if odd:
        raise DataError(
            f"ranks {odd} hold parts of another graph than rank 0 (fingerprints differ); copy one "
            "partition folder to every host"
        )
