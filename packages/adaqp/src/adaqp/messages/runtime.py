"""Executes a policy: every aggregation of a training run passes through one `Messages`.

A training step begins with the first aggregation after a backward pass, so any training loop works
unchanged. The n-th exchange of a step is a `Channel` with the sides "forward<n>" and "backward<n>".
Exchanges that return the halo's rows have the prefix "halo-", because their gradients always take
the push route. Outside autograd (evaluation) messages are exact unless a width is set.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from adaqp.messages.assigner import assign_widths
from adaqp.messages.channel import Channel, ChannelSide
from adaqp.messages.clock import Clock
from adaqp.messages.exchange import Flight, send
from adaqp.messages.graph_share import GraphShare
from adaqp.messages.network import LinkTable
from adaqp.partitioning.part import Operator, RowRoute
from adaqp.planner.widths import AS_IS, DROPPED, WIDTHS
from adaqp.policy import Adaptive, Policy
from shared.comms.collectives import post_rounds
from shared.errors import ConfigError
from shared.kernels.segment import spmm

__all__ = ["Messages"]


class Messages:
    """The state of message passing under one policy, on one rank.

    Args:
        share: routes, group and sizes of the rank, such as a `DistGraph`.
        policy: the widths of rows, and whether they arrive a step late.
        overlap: local aggregation done while rows are in transit: "edges" (over all local edges),
            "nodes" (of rows without remote neighbours) or None (nothing).
        backward: "pull" sends output gradients along the forward lists (symmetric graphs only),
            "push" sends the halo's input gradients back; "auto" pulls where the graph allows it.
        wire_dtype: dtype of a row's scale and zero point.
        seed: seed of the stochastic rounding.
        links: costs of the links; None: probed at the first assignment.

    Raises:
        ConfigError: an unknown setting, "pull" on a graph that is not symmetric, or links of
            another number of ranks.
    """

    def __init__(
        self,
        share: GraphShare,
        policy: Policy,
        *,
        overlap: str | None = "edges",
        backward: str = "auto",
        wire_dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        links: LinkTable | None = None,
    ) -> None:
        if overlap not in ("edges", "nodes", None):
            raise ConfigError(f"overlap: expected 'edges', 'nodes' or None, got {overlap!r}")
        if backward not in ("auto", "push", "pull"):
            raise ConfigError(f"backward: expected 'auto', 'push' or 'pull', got {backward!r}")
        if backward == "pull" and not share.is_symmetric:
            raise ConfigError(
                "backward='pull' needs a symmetric graph, but this one has edges without their "
                "reverse; use backward='push'"
            )
        if wire_dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(
                f"wire_dtype: expected torch.bfloat16 or torch.float32, got {wire_dtype}"
            )
        if links is not None and links.world_size != share.num_parts:
            raise ConfigError(
                f"links: expected costs between {share.num_parts} ranks, one per part, got "
                f"{links.world_size}; measure these ranks with `adaqp probe-links`"
            )
        self.share, self.policy, self.overlap = share, policy, overlap
        self.wire_dtype, self.seed, self.links = wire_dtype, seed, links
        self.pulls = share.is_symmetric if backward == "auto" else backward == "pull"
        self.clock = Clock()
        # Sides of training steps by name, in the order of their first use.
        self.sides: dict[str, ChannelSide] = {}
        self.step = -1
        self.num_assignments = 0
        self.is_dry = False
        # Makes autograd run the backward pass of exchanges without gradient: it ends the step.
        self.anchor = torch.zeros((), requires_grad=True)
        self._num_exchanges = 0
        self._channels: dict[tuple[str, int], Channel] = {}
        self._evaluations: dict[int, Channel] = {}
        self._is_stepping = False
        self._eval_bits = AS_IS
        self._late: dict[str, Flight] = {}

    # -- steps ------------------------------------------------------------------------------

    def next_channel(self, kind: Literal["", "halo-"] = "") -> Channel:
        """The channel of the exchange about to start; outside autograd, that of evaluation.

        Args:
            kind: "" for an aggregation, "halo-" for the halo's rows.
        """
        if not torch.is_grad_enabled():
            return self._evaluation_channel()
        if not self._is_stepping:
            self._begin_step()
        number = self._num_exchanges
        self._num_exchanges += 1
        if (kind, number) not in self._channels:
            back = self.share.pull if self.pulls and not kind else self.share.push
            self._channels[kind, number] = Channel(
                self._side(f"{kind}forward{number}", self.share.pull),
                self._side(f"{kind}backward{number}", back),
            )
        return self._channels[kind, number]

    def _side(self, name: str, route: RowRoute) -> ChannelSide:
        # The side exists if it was loaded from a checkpoint.
        if name in self.sides:
            return self.sides[name]
        return ChannelSide.uniform(name, route, self.policy.start_bits)

    def _evaluation_channel(self) -> Channel:
        bits = self._eval_bits
        if bits not in self._evaluations:
            side = ChannelSide.uniform("evaluation", self.share.pull, bits, is_trained=False)
            self._evaluations[bits] = Channel(side, side)
        return self._evaluations[bits]

    def end_step(self) -> None:
        """Ends the step; every backward pass calls it, and the next aggregation begins a step."""
        self._is_stepping = False

    def _begin_step(self) -> None:
        self.step += 1
        self._num_exchanges = 0
        self._is_stepping = True
        policy = self.policy
        if isinstance(policy, Adaptive) and self.step:
            is_due = self.step == policy.first_at or self.step % policy.every == 0
            if is_due and self.share.group is not None:
                with self.clock.phase("assign"):
                    self.assign()

    def assign(self) -> None:
        """Reassigns the widths from the ranges seen so far; all ranks call it together.

        Training calls it at the steps that the policy sets.

        Raises:
            ConfigError: the policy is not adaptive, or there is one rank only.
        """
        if not isinstance(self.policy, Adaptive) or self.share.group is None:
            raise ConfigError(f"assign() needs Adaptive() and several ranks, got {self.policy}")
        if self.links is None:
            self.links = self.share.probe_links()
        assign_widths(self.share.group, self.sides, self.policy, self.links, self.wire_dtype)
        self.num_assignments += 1

    @contextmanager
    def evaluation(self, bits: int = AS_IS) -> Iterator[None]:
        """Inside, exchanges outside autograd send `bits` bits a value (32: exact, 0: nothing).

        The clock discards the seconds spent inside.
        """
        clock, self.clock = self.clock, Clock()
        try:
            with self._carrying(bits):
                yield
        finally:
            self.clock = clock

    @contextmanager
    def _carrying(self, bits: int) -> Iterator[None]:
        if bits not in (DROPPED, *WIDTHS):
            raise ConfigError(f"bits: expected one of {(DROPPED, *WIDTHS)}, got {bits!r}")
        before, self._eval_bits = self._eval_bits, bits
        try:
            yield
        finally:
            self._eval_bits = before

    @property
    def drops_input(self) -> bool:
        """Whether remote feature rows count as zeros too."""
        if torch.is_grad_enabled():
            return self.policy.start_bits == DROPPED
        return self._eval_bits == DROPPED

    def aggregate_input(self, x: Tensor, op: Operator) -> Tensor:
        """A x of the constant features: exact, or of local rows only if messages are dropped."""
        bits = DROPPED if self.drops_input else AS_IS
        with torch.no_grad(), self._carrying(bits):
            return self.aggregate(x, op, self._evaluation_channel().forward)

    # -- exchanges --------------------------------------------------------------------------

    def aggregate(
        self,
        x: Tensor,
        op: Operator,
        side: ChannelSide,
        meanwhile: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """A x for this rank's rows, [num_local, dim]; the halo's part is added when it arrives.

        `meanwhile` is called before that, with a tensor whose first `num_central` rows are final.
        """
        flight = self.send(x, side, op)
        if self.overlap is None:
            flight.collect()
        sent_at = time.perf_counter()
        out = x.new_empty(self.share.num_local, x.shape[1])
        central, marginal = out[: self.share.num_central], out[self.share.num_central :]
        spmm(op.central, x, out=central)
        if self.overlap != "nodes":
            spmm(op.marginal, x, out=marginal)
        if meanwhile:
            meanwhile(out)
        self._update_hidden(side, sent_at)
        halo = flight.collect()
        if self.overlap == "nodes":
            spmm(op.marginal, x, out=marginal)
        spmm(op.halo, halo, out=marginal, accumulate=True)
        return out

    def push(
        self,
        grad: Tensor,
        op: Operator,
        side: ChannelSide,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """A^T grad for this rank's rows; the halo's part is computed first and sent to its owners.

        `meanwhile` is called while that part is in transit.
        """
        num_central = self.share.num_central
        at_halo = spmm(op.halo, grad[num_central:], transpose=True)
        flight = self.send(at_halo, side, None)
        if self.overlap is None:
            flight.collect()
        sent_at = time.perf_counter()
        out = spmm(op.central, grad[:num_central], transpose=True)
        spmm(op.marginal, grad[num_central:], transpose=True, out=out, accumulate=True)
        if meanwhile:
            meanwhile()
        self._update_hidden(side, sent_at)
        out.index_add_(0, self.share.pull.send_rows, flight.collect())
        return out

    def _update_hidden(self, side: ChannelSide, sent_at: float) -> None:
        """Updates the moving average of the seconds of local work between sending and waiting."""
        if side.is_trained and self.overlap is not None:
            spent = time.perf_counter() - sent_at
            side.hidden_s = 0.5 * (side.hidden_s + spent) if side.hidden_s else spent

    def send(self, x: Tensor, side: ChannelSide, op: Operator | None) -> Flight:
        """Starts an exchange of rows of `x` under the policy; never waits.

        Args:
            x: float tensor [num_rows, dim].
            side: route and widths.
            op: the aggregation that the receivers apply to the rows; None: they use each row once.
        """
        adapts = isinstance(self.policy, Adaptive) and side.is_trained
        if side.is_trained and side.name not in self.sides:
            self.sides[side.name] = side
            if adapts and op is not None:
                side.alpha_sq = self.share.alpha_sq_at_owner(op)
        flight = send(
            self.share.group,
            side.route,
            x,
            sent=lambda peer: side.sent(peer, x, self.wire_dtype),
            received=lambda peer: side.received(peer, x, self.wire_dtype),
            seeds=(self.seed, self.step, int.from_bytes(side.name.encode(), "big") % 2**64),
            phase=side.name,
            clock=self.clock,
            row_names=self.share.row_names(side.route),
            all_spreads=adapts,
            # Rows sent outside a step (the first layer's) are kept, so they must be real.
            dry=self.is_dry and side.is_trained,
        )
        if not side.is_trained:
            return flight
        if isinstance(self.policy, Adaptive):
            side.observe(flight.spread, x, self.policy.decay)
        if self.policy.is_late:
            before, self._late[side.name] = self._late.get(side.name, flight), flight
            return before
        return flight

    # -- state and report -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Everything the next step depends on, as flat tensors of this rank."""
        state = {"step": torch.tensor([self.step, self.num_assignments])}
        if self.links is not None:
            table = self.links
            links = np.stack([table.s_per_byte, table.latency_s, table.clamped.astype(float)])
            state["links"] = torch.from_numpy(links)
        for name, side in self.sides.items():
            state |= {f"{name}.{k}": v for k, v in side.state().items()}
            state[f"{name}.pushes"] = torch.tensor(side.route is self.share.push)
        for name, flight in self._late.items():
            state[f"{name}.late"] = flight.collect()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads what `state_dict` returned; the next step continues that run."""
        self.step, self.num_assignments = state["step"].tolist()
        self._is_stepping = False
        if "links" in state:
            s_per_byte, latency_s, clamped = state["links"].cpu().numpy()
            self.links = LinkTable(
                s_per_byte=s_per_byte, latency_s=latency_s, clamped=clamped.astype(bool)
            )
        self._channels.clear()
        for name in sorted({key.rpartition(".")[0] for key in state} - {""}):
            mine = {k[len(name) + 1 :]: v for k, v in state.items() if k.startswith(name + ".")}
            route = self.share.push if mine["pushes"] else self.share.pull
            self.sides[name] = ChannelSide.from_state(name, mine, route)
            if "late" in mine:
                self._late[name] = Flight.landed(mine["late"], route, self.clock)

    def settle(self) -> None:
        """Waits for late messages and this rank's own sends, so that none is in transit afterwards."""
        for flight in self._late.values():
            flight.collect()
        # Rounds end in the order posted, so all earlier ones have ended when these have.
        if self.share.group is not None:
            post_rounds(self.share.group, ()).wait_all()

    def report(self) -> dict[str, dict[int, float]]:
        """Share of this rank's rows at each width, by side: {"forward1": {2: 0.8, 8: 0.2}}."""
        shares = {}
        for name, side in self.sides.items():
            widths, counts = side.send_bits.unique(return_counts=True)
            total = max(len(side.send_bits), 1)
            shares[name] = {int(w): int(c) / total for w, c in zip(widths, counts, strict=True)}
        return shares
