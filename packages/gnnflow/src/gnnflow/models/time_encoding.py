"""The functional encoding of time spans of "Inductive Representation Learning on Temporal Graphs".

(TGAT, arXiv 2002.07962.) Frequencies are a geometric series. As published they are learned; here they
are constant, as in GraphMixer (arXiv 2302.11636): a step of 0.001 in a frequency turns the angle
of a month, 2.6 million seconds, by 2,600 radians, so that learning them would scramble every phase
at each step. Phases are computed in float64: float32 would round the fast components' angles at a
month to a quarter of a radian.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from shared.errors import ConfigError

__all__ = ["TimeEncoding", "encode"]

_DECADES = 9


def encode(
    spans: Shaped[Tensor, " *spans"],
    frequency: Float[Tensor, " dim"],
    phase: Float[Tensor, " dim"],
) -> Float[Tensor, "*spans dim"]:
    """cos(span * frequency + phase), in the type of `frequency`."""
    angle = spans.double()[..., None] * frequency.double() + phase.double()
    return angle.cos().to(frequency.dtype)


class TimeEncoding(nn.Module):
    """cos(w dt + b) with w_i = 10^(-9 i / (dim - 1)) and b = 0.

    Both are parameters without gradients; `requires_grad_()` makes them learned, as published.

    Args:
        dim: number of components, at least 1.

    Raises:
        ConfigError: `dim` is below 1.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim < 1:
            raise ConfigError(f"expected at least one component of time, got dim={dim}")
        exponents = torch.linspace(0, -_DECADES, dim, dtype=torch.float64)
        self.frequency = nn.Parameter((10**exponents).float(), requires_grad=False)
        self.phase = nn.Parameter(torch.zeros(dim), requires_grad=False)

    def forward(self, spans: Shaped[Tensor, " *spans"]) -> Float[Tensor, "*spans dim"]:
        """Encodes time spans of any type and shape."""
        return encode(spans, self.frequency, self.phase)
