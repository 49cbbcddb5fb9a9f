"""Carries a policy out: every aggregation of a training run passes through one `Messages`.

A training step begins with the first aggregation after a backward pass, so any training loop works
unchanged; the n-th exchange of a step is channel "forward<n>", its gradient "backward<n>"; with
"halo-" in front where the caller asked for the halo's rows instead of an aggregation, as their
gradients travel other ways. Outside autograd (evaluation) messages are exact unless a width is
asked for.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from adaqp.messages.assigner import assign_channels
from adaqp.messages.channel import Channel
from adaqp.messages.clock import Clock
from adaqp.messages.exchange import Flight, send
from adaqp.messages.network import LinkTable
from adaqp.messages.wire import WIDTHS
from adaqp.partitioning.part import Operator, Route
from adaqp.policy import Adaptive, Drop, Exact, Fixed, Policy, Stale
from shared.errors import ConfigError
from shared.kernels.segment import spmm

if TYPE_CHECKING:
    from adaqp.messages.distgraph import DistGraph

__all__ = ["Messages"]


class Messages:
    """The state of message passing under one policy, on one rank.

    Args:
        dg: the rank's share of the graph.
        policy: how rows travel.
        overlap: what hides the sending: "edges" (all local edges), "nodes" (rows without remote
            neighbours) or None.
        backward: "pull" sends output gradients along the forward lists (symmetric graphs only),
            "push" sends the halo's input gradients back; "auto" pulls where the graph allows it.
        wire_dtype: dtype of a row's scale and zero point.
        seed: of the stochastic rounding.
        links: what the links cost; probed at the first assignment if None.

    Raises:
        ConfigError: an unknown setting, pull on a directed graph, or links of other ranks.
    """

    def __init__(
        self,
        dg: "DistGraph",
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
        if backward == "pull" and not dg.is_symmetric:
            raise ConfigError(
                "backward='pull' needs a symmetric graph, and this one has edges without their "
                "reverse; use backward='push'"
            )
        if wire_dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(
                f"wire_dtype: expected torch.bfloat16 or torch.float32, got {wire_dtype}"
            )
        if links is not None and links.world_size != dg.num_parts:
            raise ConfigError(
                f"links: expected costs between {dg.num_parts} ranks, one a part, got "
                f"{links.world_size}; measure these ranks with `adaqp probe-links`"
            )
        self.dg, self.policy, self.overlap = dg, policy, overlap
        self.wire_dtype, self.seed, self.links = wire_dtype, seed, links
        self.pulls = dg.is_symmetric if backward == "auto" else backward == "pull"
        self.clock = Clock()
        self.channels: dict[str, Channel] = {}
        self.step = -1
        self.num_assignments = 0
        self.is_dry = False
        # Lets the backward pass through exchanges of rows that need no gradient: it ends the step.
        self.anchor = torch.zeros((), requires_grad=True)
        self._calls = 0
        self._is_stepping = False
        self._eval_bits = 32
        self._late: dict[str, Flight] = {}

    # -- steps ------------------------------------------------------------------------------

    def next_call(self, kind: str = "") -> str | None:
        """Names the exchange about to start: "<kind>forward<n>", or None outside autograd."""
        if not torch.is_grad_enabled():
            return None
        if not self._is_stepping:
            self._begin_step()
        self._calls += 1
        return f"{kind}forward{self._calls - 1}"

    def end_step(self) -> None:
        """Called by every backward pass: the next aggregation begins a new step."""
        self._is_stepping = False

    def _begin_step(self) -> None:
        self.step += 1
        self._calls = 0
        self._is_stepping = True
        policy = self.policy
        if isinstance(policy, Adaptive) and self.step:
            is_due = self.step == policy.first_at or self.step % policy.every == 0
            if is_due and self.dg.group is not None:
                with self.clock.phase("assign"):
                    self.assign()

    def assign(self) -> None:
        """Chooses the widths anew from the ranges seen so far; all ranks call it together.

        Training does so by itself, as often as the policy says.

        Raises:
            ConfigError: the policy is not adaptive, or there is one rank only.
        """
        if not isinstance(self.policy, Adaptive) or self.dg.group is None:
            raise ConfigError(f"assign() needs Adaptive() and several ranks, got {self.policy}")
        if self.links is None:
            self.links = self.dg.probe_links()
        channels = self.trained_channels()
        assign_channels(self.dg.group, channels, self.policy, self.links, self.wire_dtype)
        self.num_assignments += 1

    @contextmanager
    def evaluation(self, bits: int = 32) -> Iterator[None]:
        """Inside, exchanges outside autograd carry `bits` bits a value (32: exact, 0: nothing).

        Their seconds are no step's, and are forgotten.
        """
        clock, self.clock = self.clock, Clock()
        try:
            with self._carrying(bits):
                yield
        finally:
            self.clock = clock

    @contextmanager
    def _carrying(self, bits: int) -> Iterator[None]:
        if bits not in WIDTHS:
            raise ConfigError(f"bits: expected one of {WIDTHS}, got {bits!r}")
        before, self._eval_bits = self._eval_bits, bits
        try:
            yield
        finally:
            self._eval_bits = before

    @property
    def drops_input(self) -> bool:
        """Whether remote rows of the features, too, are seen as zeros."""
        if torch.is_grad_enabled():
            return isinstance(self.policy, Drop)
        return self._eval_bits == 0

    def aggregate_input(self, x: Tensor, op: Operator) -> Tensor:
        """A x of the constant features, exact or, where messages are dropped, of local rows only."""
        bits = 0 if self.drops_input else 32
        with torch.no_grad(), self._carrying(bits):
            return self.aggregate(x, op, None)

    # -- exchanges --------------------------------------------------------------------------

    def aggregate(
        self,
        x: Tensor,
        op: Operator,
        call: str | None,
        meanwhile: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """A x for this rank's rows, [num_local, dim]; the halo's part is added when it lands.

        `meanwhile` is called before that, with a tensor whose first `num_central` rows are final.
        """
        flight = self.send(x, self.dg.pull, op, call)
        if self.overlap is None:
            flight.collect()
        sent_at = time.perf_counter()
        out = x.new_empty(self.dg.num_local, x.shape[1])
        central, marginal = out[: self.dg.num_central], out[self.dg.num_central :]
        spmm(op.central, x, out=central)
        if self.overlap != "nodes":
            spmm(op.marginal, x, out=marginal)
        if meanwhile:
            meanwhile(out)
        self._note_hidden(call, sent_at)
        halo = flight.collect()
        if self.overlap == "nodes":
            spmm(op.marginal, x, out=marginal)
        spmm(op.halo, halo, out=marginal, accumulate=True)
        return out

    def push(
        self, grad: Tensor, op: Operator, call: str, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """A^T grad for this rank's rows; the halo's share is computed first and sent to owners.

        `meanwhile` is called while it travels.
        """
        num_central = self.dg.num_central
        at_halo = spmm(op.halo, grad[num_central:], transpose=True)
        flight = self.send(at_halo, self.dg.push, None, call)
        if self.overlap is None:
            flight.collect()
        sent_at = time.perf_counter()
        out = spmm(op.central, grad[:num_central], transpose=True)
        spmm(op.marginal, grad[num_central:], transpose=True, out=out, accumulate=True)
        if meanwhile:
            meanwhile()
        self._note_hidden(call, sent_at)
        out.index_add_(0, self.dg.pull.send_rows, flight.collect())
        return out

    def _note_hidden(self, call: str | None, sent_at: float) -> None:
        """Follows how much local work stands between sending and waiting."""
        if call is not None and self.overlap is not None:
            channel = self.channels[call]
            spent = time.perf_counter() - sent_at
            channel.hidden_s = 0.5 * (channel.hidden_s + spent) if channel.hidden_s else spent

    def send(self, x: Tensor, route: Route, op: Operator | None, call: str | None) -> Flight:
        """Starts the exchange `call` of rows of `x` under the policy; never waits.

        Args:
            x: float tensor [num_rows, dim].
            route: who sends which rows to whom.
            op: what the receivers do with the rows; None: use each as it is.
            call: name of the channel, None for evaluation.
        """
        channel = self._channel(route, op, call)
        name = call or "evaluation"
        flight = send(
            self.dg.group,
            route,
            x,
            sent=lambda peer: channel.sent(peer, x, self.wire_dtype),
            received=lambda peer: channel.received(peer, x, self.wire_dtype),
            seeds=(self.seed, self.step, int.from_bytes(name.encode(), "big") % 2**64),
            phase=name,
            clock=self.clock,
            row_names=self.dg.row_names(route),
            all_spreads=isinstance(self.policy, Adaptive) and call is not None,
            # What is sent outside a step is kept (the first layer's rows), so it must be real.
            dry=self.is_dry and call is not None,
        )
        if call is None:
            return flight
        if isinstance(self.policy, Adaptive):
            channel.observe(flight.spread, x, self.policy.decay)
        if isinstance(self.policy, Stale):
            before, self._late[call] = self._late.get(call, flight), flight
            return before
        return flight

    def _channel(self, route: Route, op: Operator | None, call: str | None) -> Channel:
        name = call or f"evaluation at {self._eval_bits} bits"
        if name not in self.channels:
            bits = _first_bits(self.policy) if call else self._eval_bits
            num_send, num_recv = len(route.send_rows), route.num_recv
            device = route.send_rows.device
            adapts = isinstance(self.policy, Adaptive) and call is not None
            alpha_sq = (
                self.dg.alpha_sq_at_owner(op)
                if adapts and op is not None
                else torch.ones(num_send, device=device)
            )
            self.channels[name] = Channel(
                route,
                alpha_sq,
                torch.full((num_send,), bits, dtype=torch.uint8, device=device),
                torch.full((num_recv,), bits, dtype=torch.uint8, device=device),
            )
        return self.channels[name]

    def trained_channels(self) -> dict[str, Channel]:
        """The channels of training steps, by name; evaluation's are left out."""
        return {n: c for n, c in self.channels.items() if not n.startswith("evaluation")}

    # -- state and report -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Everything the next step depends on, as flat tensors of this rank."""
        state = {"step": torch.tensor([self.step, self.num_assignments])}
        if self.links is not None:
            table = self.links
            links = np.stack([table.s_per_byte, table.latency_s, table.clamped.astype(float)])
            state["links"] = torch.from_numpy(links)
        for name, channel in self.trained_channels().items():
            state |= {f"{name}.{k}": v for k, v in channel.state().items()}
            state[f"{name}.pushes"] = torch.tensor(channel.route is self.dg.push)
        for name, flight in self._late.items():
            state[f"{name}.late"] = flight.collect()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state_dict` gave; the next step continues where that run was."""
        self.step, self.num_assignments = state["step"].tolist()
        self._is_stepping = False
        if "links" in state:
            s_per_byte, latency_s, clamped = state["links"].cpu().numpy()
            self.links = LinkTable(
                s_per_byte=s_per_byte, latency_s=latency_s, clamped=clamped.astype(bool)
            )
        for name in sorted({key.rpartition(".")[0] for key in state} - {""}):
            mine = {k[len(name) + 1 :]: v for k, v in state.items() if k.startswith(name + ".")}
            route = self.dg.push if mine["pushes"] else self.dg.pull
            self.channels[name] = Channel.from_state(mine, route)
            if "late" in mine:
                self._late[name] = Flight.landed(mine["late"], route, self.clock)

    def settle(self) -> None:
        """Lets messages still under way land, so that nothing is left on the wires."""
        for flight in self._late.values():
            flight.collect()

    def report(self) -> dict[str, dict[int, float]]:
        """Share of this rank's rows at each width, by channel: {"forward1": {2: 0.8, 8: 0.2}}."""
        shares = {}
        for name, channel in self.trained_channels().items():
            widths, counts = channel.send_bits.unique(return_counts=True)
            total = max(len(channel.send_bits), 1)
            shares[name] = {int(w): int(c) / total for w, c in zip(widths, counts, strict=True)}
        return shares


def _first_bits(policy: Policy) -> int:
    match policy:
        case Exact() | Stale():
            return 32
        case Drop():
            return 0
        case Fixed(bits=bits) | Adaptive(first_bits=bits):
            return bits
