"""The exchanges of a training step: the widths of their rows, and the noise each row would add.

A `Channel` is one exchange of a step, with a side for the rows ("forward1") and one for their
gradients ("backward1"). On each side the sender keeps a moving average of every row's squared
range. Its product with the squared weights that the receivers give the row and a constant of the
row's length, divided by (2^b - 1)^2, is the variance that b bits add to the aggregated output.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaqp.messages.wire import BufferLayout
from adaqp.partitioning.part import RowRoute

__all__ = ["Channel", "ChannelSide", "noise_per_step_sq"]


def noise_per_step_sq(dim: int) -> float:
    """Sum over a row's columns of the variance of stochastic rounding, in squared steps.

    A column's variance is 1/6 of a squared step, averaged over a uniform position between two
    levels; the smallest and the largest column lie on levels and have none.
    """
    return max(dim - 2, 0) / 6


@dataclass(slots=True)
class ChannelSide:
    """One direction of a channel on one rank.

    Attributes:
        name: name of the exchange in the ledger, reports and checkpoints.
        route: which rows each rank sends to each peer.
        alpha_sq: float32 [num_send], squared weights of each row, summed over its receivers.
        send_bits: uint8 [num_send], widths of the rows sent.
        recv_bits: uint8 [num_recv], widths of the rows received.
        is_trained: False for evaluation, whose widths are fixed and which keeps no state.
        version: number of the assignment that set the widths; 0 before the first one.
        spread_sq: float32 [num_send], moving average of (max - min)^2; None before the first step.
        dim: number of columns of the rows last sent.
        itemsize: bytes per value of the rows last sent.
        hidden_s: moving average of the seconds of local work between sending and waiting.
    """

    name: str
    route: RowRoute
    alpha_sq: Tensor
    send_bits: Tensor
    recv_bits: Tensor
    is_trained: bool = True
    version: int = 0
    spread_sq: Tensor | None = None
    dim: int = 0
    itemsize: int = 4
    hidden_s: float = 0.0
    _layouts: dict[tuple, BufferLayout] = field(default_factory=dict)

    @classmethod
    def uniform(
        cls, name: str, route: RowRoute, bits: int, *, is_trained: bool = True
    ) -> "ChannelSide":
        """A side whose rows all have the same width and weight 1."""
        num_send, device = len(route.send_rows), route.send_rows.device
        return cls(
            name,
            route,
            torch.ones(num_send, device=device),
            torch.full((num_send,), bits, dtype=torch.uint8, device=device),
            torch.full((route.num_recv,), bits, dtype=torch.uint8, device=device),
            is_trained,
        )

    def observe(self, spread: Tensor, x: Tensor, decay: float) -> None:
        """Updates the moving average of squared ranges with the rows of `x` just sent.

        Args:
            spread: float32 [num_send], max - min of each row.
            x: float tensor [num_rows, dim].
            decay: weight of the previous average, in [0, 1).
        """
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
        """Sets the widths of a new assignment, for rows sent and rows received."""
        self.send_bits, self.recv_bits = send_bits, recv_bits
        self.version += 1
        self._layouts.clear()

    def sent(self, peer: int, x: Tensor, wire_dtype: torch.dtype) -> BufferLayout:
        """Layout of the buffer to `peer` for rows like those of `x`."""
        return self._layout(self.send_bits[self.route.sent_to(peer)], ("to", peer), x, wire_dtype)

    def received(self, peer: int, x: Tensor, wire_dtype: torch.dtype) -> BufferLayout:
        """Layout of the buffer from `peer` for rows like those of `x`."""
        bits = self.recv_bits[self.route.received_from(peer)]
        return self._layout(bits, ("from", peer), x, wire_dtype)

    def _layout(self, bits: Tensor, end: tuple, x: Tensor, wire_dtype: torch.dtype) -> BufferLayout:
        name = (*end, x.shape[1], x.dtype, wire_dtype)
        if name not in self._layouts:
            self._layouts[name] = BufferLayout(bits, x.shape[1], x.dtype, wire_dtype, self.version)
        return self._layouts[name]

    def state(self) -> dict[str, Tensor]:
        """The side as flat tensors, for a checkpoint, without name and route."""
        state = {
            "alpha_sq": self.alpha_sq,
            "send_bits": self.send_bits,
            "recv_bits": self.recv_bits,
            "shape": torch.tensor([self.version, self.dim, self.itemsize]),
            "hidden_s": torch.tensor(self.hidden_s, dtype=torch.float64),
        }
        return state if self.spread_sq is None else state | {"spread_sq": self.spread_sq}

    @classmethod
    def from_state(cls, name: str, state: dict[str, Tensor], route: RowRoute) -> "ChannelSide":
        """A side from the tensors that `state` returned."""
        version, dim, itemsize = state["shape"].tolist()
        return cls(
            name,
            route,
            state["alpha_sq"],
            state["send_bits"],
            state["recv_bits"],
            version=version,
            spread_sq=state.get("spread_sq"),
            dim=dim,
            itemsize=itemsize,
            hidden_s=float(state["hidden_s"]),
        )


@dataclass(frozen=True, slots=True)
class Channel:
    """One exchange of a step, in both directions.

    Attributes:
        forward: the rows' direction, to other ranks.
        backward: the direction of their gradients; never used in an evaluation.
    """

    forward: ChannelSide
    backward: ChannelSide
