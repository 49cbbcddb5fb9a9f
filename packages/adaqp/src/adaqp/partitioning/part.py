"""One rank's share of a graph: its rows, its send lists, and the aggregation split for overlap.

Local rows are ordered central first (no remote in-neighbour), then marginal, so that both are
slices. The edges into a rank's rows form three matrices: central rows over local sources, marginal
rows over local sources, marginal rows over halo sources. Sum and mean are linear in the sources, so
the first two can be computed while the halo rows are in transit (the edge split; AdaQP's node split
overlaps the central rows only, and METIS leaves few of those).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.segment import CSR

__all__ = ["GraphPart", "Operator", "RowRoute", "operator", "routes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPart:
    """The part that `adaqp.partition` wrote for one rank, on the rank's device.

    Attributes:
        global_ids: int64 [num_local], node ids of the local rows: central rows first, and both
            halves ordered by cluster and id.
        num_central: number of rows without a remote in-neighbour.
        indptr, indices: in-edges of each local row as CSR; an index of num_local or more is a halo
            row.
        halo_ids: int64 [num_halo], node ids of the halo rows by owner, in the owner's row order.
        halo_offsets: int64 [parts + 1], each owner's slice of halo_ids.
        send_rows: int64 [num_send], local rows to send by peer, in the peer's halo order.
        send_offsets: int64 [parts + 1], each peer's slice of send_rows.
        in_degree, out_degree, loops: int64 [num_local + num_halo], degrees in the whole graph with
            self loops and duplicates counted, and the number of self loops.
    """

    rank: int
    parts: int
    num_central: int
    global_ids: Tensor
    indptr: Tensor
    indices: Tensor
    halo_ids: Tensor
    halo_offsets: Tensor
    send_rows: Tensor
    send_offsets: Tensor
    in_degree: Tensor
    out_degree: Tensor
    loops: Tensor

    @property
    def num_local(self) -> int:
        """Rows this rank owns."""
        return len(self.global_ids)

    @property
    def num_halo(self) -> int:
        """Rows of other ranks that this rank's edges start from."""
        return len(self.halo_ids)


@dataclass(frozen=True, slots=True)
class Operator:
    """The aggregation with one weighting, as the three matrices that overlap needs.

    Attributes:
        central: [num_central, num_local], central rows over local sources.
        marginal: [num_marginal, num_local], marginal rows over local sources.
        halo: [num_marginal, num_halo], marginal rows over halo sources.
        alpha_sq: float32 [num_halo], the sum of squared weights of each halo row over this rank's
            rows: the factor from the row's quantisation variance to the output's.
    """

    central: CSR
    marginal: CSR
    halo: CSR
    alpha_sq: Tensor


def operator(part: GraphPart, weight: str, *, transposed: bool = False) -> Operator:
    """Builds the weighted aggregation of one part.

    Args:
        part: the rank's share.
        weight: "gcn" is out_degree(u)^-1/2 in_degree(v)^-1/2 with exactly one self loop per node;
            "mean" is 1 / in_degree(v); "sum" is 1.
        transposed: give edge (u, v) the weight of (v, u). On a symmetric graph the result is the
            transposed aggregation, with the same halo.
    """
    num_local = part.num_local
    rows = torch.repeat_interleave(
        torch.arange(num_local, device=part.indices.device), part.indptr.diff()
    )
    cols = part.indices
    if weight == "gcn":
        is_edge = rows != cols
        loop = torch.arange(num_local, device=rows.device)
        rows, cols = torch.cat([rows[is_edge], loop]), torch.cat([cols[is_edge], loop])
        to = (part.in_degree - part.loops + 1).double().rsqrt()
        out = (part.out_degree - part.loops + 1).double().rsqrt()
        to, out = (out, to) if transposed else (to, out)
        weights = (to[rows] * out[cols]).float()
    elif weight == "mean":
        share = part.in_degree.clamp(min=1).double().reciprocal().float()
        weights = share[cols] if transposed else share[rows]
    else:
        weights = None
    is_halo = cols >= num_local
    num_marginal = num_local - part.num_central

    def cut(keep: Tensor, first_row: int, first_col: int, num_rows: int, num_cols: int) -> CSR:
        weight = None if weights is None else weights[keep]
        dst, src = rows[keep] - first_row, cols[keep] - first_col
        return CSR.from_coo(dst, src, num_rows, num_cols, weight)

    is_central = rows < part.num_central
    halo = cut(is_halo, part.num_central, num_local, num_marginal, part.num_halo)
    # Parallel edges carry one row, whose weights add up before they are squared.
    width = max(part.num_halo, 1)
    pairs, pair_of = torch.unique(
        rows[is_halo] * width + cols[is_halo] - num_local, return_inverse=True
    )
    each = torch.ones(halo.nnz, device=rows.device) if weights is None else weights[is_halo]
    alpha = torch.zeros(len(pairs), device=rows.device).index_add_(0, pair_of, each)
    alpha_sq = torch.zeros(part.num_halo, device=rows.device)
    alpha_sq.index_add_(0, pairs % width, alpha.square())
    return Operator(
        central=cut(is_central, 0, 0, part.num_central, num_local),
        marginal=cut(~is_central & ~is_halo, part.num_central, 0, num_marginal, num_local),
        halo=halo,
        alpha_sq=alpha_sq,
    )


@dataclass(frozen=True, slots=True)
class RowRoute:
    """Which rows each rank sends to each peer, for one kind of exchange.

    Attributes:
        send_rows: int64 [num_send], rows of the tensor to send, by peer.
        send_offsets, recv_offsets: parts + 1 offsets of the peers' slices.
    """

    send_rows: Tensor
    send_offsets: list[int]
    recv_offsets: list[int]

    @property
    def num_recv(self) -> int:
        """Number of rows that arrive."""
        return self.recv_offsets[-1]

    def sent_to(self, peer: int) -> slice:
        """The peer's slice of `send_rows`."""
        return slice(self.send_offsets[peer], self.send_offsets[peer + 1])

    def received_from(self, peer: int) -> slice:
        """The peer's slice of the rows that arrive."""
        return slice(self.recv_offsets[peer], self.recv_offsets[peer + 1])


def routes(part: GraphPart) -> tuple[RowRoute, RowRoute]:
    """The two kinds of exchange: `pull` fills the halo, `push` returns the halo's gradients."""
    send, halo = part.send_offsets.tolist(), part.halo_offsets.tolist()
    pull = RowRoute(part.send_rows, send, halo)
    push = RowRoute(torch.arange(part.num_halo, device=part.send_rows.device), halo, send)
    return pull, push
