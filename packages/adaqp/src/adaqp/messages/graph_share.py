"""The parts of a rank's share that messages need: the ranks, the routes of rows, and sizes."""

import torch
from torch import Tensor

from adaqp.messages.network import LinkTable, probe
from adaqp.partitioning.part import GraphPart, Operator, RowRoute, routes
from shared.comms.collectives import all_to_all_v
from shared.comms.group import Group
from shared.errors import ConfigError

__all__ = ["GraphShare"]


class GraphShare:
    """The routes, the group and the sizes of a rank's share.

    Args:
        part: the rank's rows, halo and edges.
        group: the ranks, None for a single one.
        is_symmetric: every edge of the whole graph has its reverse, equally often.

    Attributes:
        pull: route by which owners send their rows into the halo.
        push: route by which gradients of the halo's rows return to the owners.
    """

    def __init__(self, part: GraphPart, group: Group | None, *, is_symmetric: bool) -> None:
        self.part, self.group, self.is_symmetric = part, group, is_symmetric
        self.pull, self.push = routes(part)
        self._alpha_sq: dict[int, Tensor] = {}

    @property
    def rank(self) -> int:
        """This rank."""
        return self.part.rank

    @property
    def num_parts(self) -> int:
        """Ranks the graph is cut for."""
        return self.part.parts

    @property
    def num_local(self) -> int:
        """Rows this rank owns."""
        return self.part.num_local

    @property
    def num_central(self) -> int:
        """Leading rows without a remote in-neighbour."""
        return self.part.num_central

    @property
    def num_halo(self) -> int:
        """Rows of other ranks that edges into this rank start from."""
        return self.part.num_halo

    def row_names(self, route: RowRoute) -> Tensor:
        """Node ids of the rows that a route sends from, int64 [num_local] or [num_halo]."""
        return self.part.halo_ids if route is self.push else self.part.global_ids

    def alpha_sq_at_owner(self, op: Operator) -> Tensor:
        """Squared weights of the rows that this rank sends, summed over each receiver's rows.

        The first call with an operator sends them from the receivers to the owners, so all ranks
        call it together.

        Returns:
            float32 [num_send]: factor from each row's noise variance to the aggregated output's.
        """
        if id(op) not in self._alpha_sq:
            alpha_sq = torch.empty(len(self.pull.send_rows))
            if self.group is not None:
                here = op.alpha_sq.to(self.group.device)
                alpha_sq = alpha_sq.to(self.group.device)
                peers = range(self.num_parts)
                sends = [here[self.pull.received_from(p)] for p in peers]
                recvs = [alpha_sq[self.pull.sent_to(p)] for p in peers]
                all_to_all_v(self.group, sends, recvs)
            self._alpha_sq[id(op)] = alpha_sq.to(self.pull.send_rows.device)
        return self._alpha_sq[id(op)]

    def probe_links(self, fallback_bytes_per_s: float | None = None) -> LinkTable:
        """Measures the seconds per byte and per message between every two ranks.

        Args:
            fallback_bytes_per_s: rate for pairs whose measured times do not rise with the size;
                None: the rate of the largest message.

        Raises:
            ConfigError: there is a single rank.
        """
        if self.group is None:
            raise ConfigError(
                "probe_links: expected 2 or more ranks, got 1, which has no links; start more ranks"
            )
        return probe(self.group, fallback_bytes_per_s=fallback_bytes_per_s)
