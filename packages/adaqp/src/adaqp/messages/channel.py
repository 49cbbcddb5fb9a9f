"""What one kind of exchange knows: the widths of its rows, and how much noise each row would bring.

A *channel* is one layer in one direction ("forward1", "backward2"). The sender follows a moving
average of every row's squared range; with the weights its receivers give the row, that is the
variance its quantisation adds to the aggregated output, up to the factor 1 / (2^b - 1)^2.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaqp.messages.wire import Layout
from adaqp.partitioning.part import Route

__all__ = ["Channel", "noise_per_step_sq"]


def noise_per_step_sq(dim: int) -> float:
    """Sum over a row's columns of the variance of stochastic rounding, in squared steps.

    A column between two levels errs by 1/6 of a squared step on average over a uniform place; the
    smallest and the largest column lie on levels and do not err.
    """
    return max(dim - 2, 0) / 6


@dataclass(slots=True)
class Channel:
    """State of one layer in one direction on one rank.

    Attributes:
        route: who sends which rows to whom.
        alpha_sq: float32 [num_send], weight of each row's noise at its receivers.
        send_bits: uint8 [num_send]; recv_bits: uint8 [num_recv]: widths on both sides.
        version: number of the assignment the widths come from.
        spread_sq: float32 [num_send], moving average of (max - min)^2.
        dim, itemsize: columns of a row and bytes of a value, as last seen.
        hidden_s: seconds of local work the exchange could hide behind, moving average.
    """

    route: Route
    alpha_sq: Tensor
    send_bits: Tensor
    recv_bits: Tensor
    version: int = 0
    spread_sq: Tensor | None = None
    dim: int = 0
    itemsize: int = 4
    hidden_s: float = 0.0
    _layouts: dict[tuple, Layout] = field(default_factory=dict)

    def observe(self, spread: Tensor, x: Tensor, decay: float) -> None:
        """Takes the ranges of the rows of `x` just sent into the moving average."""
        squared = spread.square()
        if self.spread_sq is None:
            self.spread_sq = squared
        else:
            self.spread_sq.lerp_(squared, 1 - decay)
        self.dim, self.itemsize = x.shape[1], x.element_size()

    def beta(self) -> Tensor:
        """float32 [num_send]: variance each row adds at width b, times (2^b - 1)^2."""
        assert self.spread_sq is not None, "beta() before the first observe()"
        return self.alpha_sq * self.spread_sq * noise_per_step_sq(self.dim)

    def set_bits(self, send_bits: Tensor, recv_bits: Tensor) -> None:
        """Takes the widths of a new assignment."""
        self.send_bits, self.recv_bits = send_bits, recv_bits
        self.version += 1
        self._layouts.clear()

    def sent(self, peer: int, x: Tensor, wire_dtype: torch.dtype) -> Layout:
        """Layout of the buffer to `peer` for rows like those of `x`."""
        return self._layout(self.send_bits[self.route.sent_to(peer)], ("to", peer), x, wire_dtype)

    def received(self, peer: int, x: Tensor, wire_dtype: torch.dtype) -> Layout:
        """Layout of the buffer from `peer` for rows like those of `x`."""
        bits = self.recv_bits[self.route.received_from(peer)]
        return self._layout(bits, ("from", peer), x, wire_dtype)

    def _layout(self, bits: Tensor, end: tuple, x: Tensor, wire_dtype: torch.dtype) -> Layout:
        name = (*end, x.shape[1], x.dtype, wire_dtype)
        if name not in self._layouts:
            self._layouts[name] = Layout(bits, x.shape[1], x.dtype, wire_dtype, self.version)
        return self._layouts[name]

    def state(self) -> dict[str, Tensor]:
        """The channel as flat tensors, for a checkpoint; the route is not among them."""
        state = {
            "alpha_sq": self.alpha_sq,
            "send_bits": self.send_bits,
            "recv_bits": self.recv_bits,
            "shape": torch.tensor([self.version, self.dim, self.itemsize]),
            "hidden_s": torch.tensor(self.hidden_s, dtype=torch.float64),
        }
        return state if self.spread_sq is None else state | {"spread_sq": self.spread_sq}

    @classmethod
    def from_state(cls, state: dict[str, Tensor], route: Route) -> "Channel":
        """A channel from its checkpoint."""
        version, dim, itemsize = state["shape"].tolist()
        return cls(
            route,
            state["alpha_sq"],
            state["send_bits"],
            state["recv_bits"],
            version,
            state.get("spread_sq"),
            dim,
            itemsize,
            float(state["hidden_s"]),
        )
