"""Random numbers of a training step, keyed by seed, step and sample.

A sample's noise depends on nothing else: not on the micro-batch it is in, on the rank that draws
it, or on what was drawn before. So losses and weights are the same for every plan, a batch that is
encoded again after a restart gets the noise it had, and a frozen function that needs noisy inputs
draws the same ones as the backbone's inputs, a step earlier and on another rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.philox import stream_key

__all__ = ["Draw", "decide"]


@dataclass(frozen=True, slots=True)
class Draw:
    """Draws for a range of a step's samples: the same name gives the same numbers every time.

    Attributes:
        seed: of the training run.
        step: counts from 0.
        samples: positions in the whole batch, a row each.
    """

    seed: int
    step: int
    samples: range

    def normal(
        self, shape: Sequence[int] = (), name: str = "noise", *, like: Tensor | None = None
    ) -> Tensor:
        """Draws from the normal distribution.

        Args:
            shape: of one sample.
            name: what the numbers are for; two names are independent of each other.
            like: tensor whose type and device the result gets; float32 on the CPU when left out.

        Returns:
            [num_samples, *shape].
        """
        return self._fill(name, lambda g: torch.randn(tuple(shape), generator=g), like)

    def uniform(
        self, shape: Sequence[int] = (), name: str = "uniform", *, like: Tensor | None = None
    ) -> Tensor:
        """Draws evenly from 0 to 1; arguments as for `normal`."""
        return self._fill(name, lambda g: torch.rand(tuple(shape), generator=g), like)

    def integers(
        self,
        low: int,
        high: int,
        name: str = "timestep",
        *,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Draws a whole number a sample, from `low` to `high - 1`: [num_samples]."""
        return self._fill(name, lambda g: torch.randint(low, high, (), generator=g), None).to(
            device
        )

    def _fill(
        self, name: str, draw_row: Callable[[torch.Generator], Tensor], like: Tensor | None
    ) -> Tensor:
        # Drawn on the CPU, so that ranks with unlike devices agree.
        generator = torch.Generator()
        stream = zlib.crc32(name.encode())
        rows = []
        for sample in self.samples:
            generator.manual_seed(stream_key(self.seed, self.step, sample, stream))
            rows.append(draw_row(generator))
        if not rows:
            raise ConfigError(
                f"draw {name!r}: expected at least one sample, got {self.samples}; do draw for the "
                "rows at hand"
            )
        drawn = torch.stack(rows)
        return drawn if like is None else drawn.to(like)


def decide(seed: int, step: int, probability: float) -> bool:
    """Decides whether something happens in a step, the same on every rank."""
    generator = torch.Generator().manual_seed(stream_key(seed, step, zlib.crc32(b"decide")))
    return bool(torch.rand((), generator=generator) < probability)
