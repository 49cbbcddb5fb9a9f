"""Training on pairs of images of which one is preferred, against a frozen reference model.

After "Diffusion Model Alignment Using Direct Preference Optimization" (arXiv 2311.12908): both images
of a pair get the same noise, and the loss rewards a backbone that denoises the preferred one better,
compared with the other, than the reference does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from diffusionpipe.job.batches import Batch
from diffusionpipe.job.chain import chain
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.losses import Noising, mean_square
from shared.errors import ConfigError

__all__ = ["PairedNoising", "preference"]

_REFERENCE = "reference"


def preference(
    noising: Noising, model: nn.Module, *, beta: float = 5000.0
) -> tuple[dict[str, Callable[..., Any]], PairedNoising, Callable[..., Tensor]]:
    """Makes a job's parts of direct preference optimisation.

    Args:
        noising: what `epsilon`, `velocity` or `flow` return first. Its latents have a pair a sample,
            [num_samples, 2, channels, rows, columns], the preferred one first.
        model: the reference, a frozen copy of the backbone.
        beta: how strongly to prefer.

    Returns:
        A frozen function by name, to be declared behind those it needs; `inputs`; and `loss`. The
        backbone gets two rows a sample.
    """
    inputs = PairedNoising(noising.bind(chain(model), has_estimate=False))

    def compute_errors(batch: Batch, frozen: Mapping[str, Any], draw: Draw) -> Tensor:
        """The reference's error of each image: [num_samples, 2]."""
        keywords = inputs.make_keywords(batch, frozen, draw)
        target = keywords.pop("target")
        return mean_square(model(**keywords, return_dict=False)[0], target).unflatten(0, (-1, 2))

    def compare(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        noise, reference = target
        errors = mean_square(output, noise).unflatten(0, (-1, 2))
        gain = (errors - reference.to(errors)).diff(dim=1).flatten()
        return -functional.logsigmoid(0.5 * beta * gain)

    return {_REFERENCE: compute_errors}, inputs, compare


@dataclass(frozen=True)
class PairedNoising:
    """Adds the same noise to both images of each pair.

    Attributes:
        noising: makes noisy latents and targets of single images.
    """

    noising: Noising

    def __call__(self, batch: Batch, frozen: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
        """Makes a backbone's keyword arguments; the target has the reference's errors too."""
        keywords = self.make_keywords(batch, frozen, draw)
        return {**keywords, "target": (keywords["target"], frozen[_REFERENCE])}

    def make_keywords(self, batch: Batch, frozen: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
        """Makes a backbone's keyword arguments and what it shall predict, two rows a sample."""
        name = self.noising.latents
        latents = frozen[name] if name in frozen else batch[name]
        if latents.ndim != 5 or latents.shape[1] != 2:
            raise ConfigError(
                f"{name}: expected pairs, [num_samples, 2, channels, rows, columns], got "
                f"{list(latents.shape)}; do stack the preferred and the other image"
            )
        others = {
            key: tree_map(_repeat, value)
            for key, value in (*batch.items(), *frozen.items())
            if key not in (name, _REFERENCE)
        }
        noising = replace(self.noising, latents="pair")
        return noising(
            others, {"pair": latents.flatten(0, 1)}, _PairedDraw(draw.seed, draw.step, draw.samples)
        )


class _PairedDraw(Draw):
    """Draws once a pair, apart from what turns a distribution into latents."""

    def normal(self, shape: Any = (), name: str = "noise", *, like: Tensor | None = None) -> Tensor:
        if name == "latents":
            return super().normal((2, *shape), name, like=like).flatten(0, 1)
        return _repeat(super().normal(shape, name, like=like))

    def uniform(
        self, shape: Any = (), name: str = "uniform", *, like: Tensor | None = None
    ) -> Tensor:
        return _repeat(super().uniform(shape, name, like=like))

    def integers(self, low: int, high: int, name: str = "timestep", **options: Any) -> Tensor:
        return _repeat(super().integers(low, high, name, **options))


def _repeat(value: Any) -> Any:
    return value.repeat_interleave(2, dim=0) if isinstance(value, torch.Tensor) else value
