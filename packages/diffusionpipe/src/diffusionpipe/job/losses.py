"""Inputs and losses of diffusion training: noise added to latents, and what a backbone predicts.

Each function returns `inputs(batch, frozen, draw)` and `loss(output, target)` for a `Job`. They
follow diffusers' training scripts: the mean of squared differences, weighted by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from diffusionpipe.job.batches import Batch
from diffusionpipe.job.draws import Draw
from shared.errors import ConfigError

__all__ = ["Noising", "epsilon", "flow", "mean_square", "sample_latents", "velocity"]

# Bounds of a variance's logarithm, as AutoencoderKL's distribution has them.
_LOG_VARIANCES = (-30.0, 20.0)

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Noising:
    """Adds noise to latents and says what the backbone shall predict.

    A `Job` binds it to its backbone; call `bind` before you wrap it in a function of your own.

    Attributes:
        scheduler: of diffusers.
        prediction: "epsilon", "velocity" or "flow".
        latents: name of the latents among a batch's frozen outputs, or in the batch. With twice the
            channels that the backbone takes, they are means and logarithms of variances to draw from.
        arguments: the backbone's other keyword arguments: names of frozen outputs or of the batch's
            entries ("text.pooled" for a part of one), functions of (batch, frozen), or dictionaries
            of these.
        scaling: factor of the latents, a VAE's `scaling_factor`.
        shift: taken from the latents before, a VAE's `shift_factor`.
        sample: name of the backbone's argument that takes noisy latents.
        num_channels: channels of latents that the backbone takes; None where it does not say.
        dtype: of the backbone, which latents and other arguments are cast to; None for no cast.
        has_estimate: whether the backbone takes an earlier estimate of the clean latents as further
            channels.
    """

    scheduler: Any
    prediction: str
    latents: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    scaling: float = 1.0
    shift: float = 0.0
    sample: str = "sample"
    num_channels: int | None = None
    dtype: torch.dtype | None = None
    has_estimate: bool = False

    def bind(self, chain: Any, *, has_estimate: bool) -> Noising:
        """Learns from a backbone what its latents are called, their channels and their type.

        Args:
            chain: a `Chain`.
            has_estimate: whether the job is self-conditioned.
        """
        channels = getattr(getattr(chain.model, "config", None), "in_channels", None)
        if channels is not None and has_estimate:
            channels //= 2
        sample = "hidden_states" if "hidden_states" in chain.inputs else "sample"
        return replace(
            self,
            sample=sample,
            num_channels=channels,
            dtype=getattr(chain.model, "dtype", None),
            has_estimate=has_estimate,
        )

    def __call__(self, batch: Batch, frozen: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
        """Makes a backbone's keyword arguments, and the target.

        Args:
            batch: rows of a batch.
            frozen: outputs of frozen functions for these rows; "estimate" is what the backbone
                predicted in an earlier pass.
            draw: for these rows.
        """
        clean = sample_latents(self._find(self.latents, batch, frozen), self.num_channels, draw)
        clean = (clean - self.shift) * self.scaling
        noise = draw.normal(clean.shape[1:], "noise", like=clean)
        level, timestep = self._draw_times(clean, draw)
        noisy, target = self._add_noise(clean, noise, level)
        if self.has_estimate:
            estimate = torch.zeros_like(clean)
            if "estimate" in frozen:
                estimate = self._estimate_clean(frozen["estimate"].detach(), noisy, level)
            noisy = torch.cat([noisy, estimate], dim=1)
        keywords = {name: self._find(a, batch, frozen) for name, a in self.arguments.items()}
        # Encoders often compute in another type than the backbone.
        keywords = tree_map(partial(self._cast, noisy.device), {self.sample: noisy, **keywords})
        return {"timestep": timestep, "target": target, **keywords}

    def _cast(self, device: torch.device, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, self.dtype if value.is_floating_point() else None)

    def _draw_times(self, clean: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Levels of noise, shaped to multiply latents, and the times that the backbone reads."""
        count = self.scheduler.config.num_train_timesteps
        if self.prediction == "flow":
            position = torch.sigmoid(draw.normal((), "timestep"))
            index = (position * count).long().clamp(max=count - 1)
            levels = self.scheduler.sigmas.cpu()[index].to(clean.device, clean.dtype)
            timestep = self.scheduler.timesteps.cpu()[index].to(clean.device)
        else:
            timestep = draw.integers(0, count, "timestep", device=clean.device)
            levels = self.scheduler.alphas_cumprod.to(clean.device, clean.dtype)[timestep]
        return levels.reshape(-1, *([1] * (clean.ndim - 1))), timestep

    def _add_noise(self, clean: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        if self.prediction == "flow":
            return (1.0 - level) * clean + level * noise, noise - clean
        # Not by the scheduler: some for sampling scale noise in another way.
        signal_scale, noise_scale = level.sqrt(), (1.0 - level).sqrt()
        noisy = signal_scale * clean + noise_scale * noise
        if self.prediction == "epsilon":
            return noisy, noise
        return noisy, signal_scale * noise - noise_scale * clean

    def _estimate_clean(self, output: Tensor, noisy: Tensor, level: Tensor) -> Tensor:
        if self.prediction == "flow":
            return noisy - level * output
        if self.prediction == "epsilon":
            return (noisy - (1 - level).sqrt() * output) / level.sqrt()
        return level.sqrt() * noisy - (1 - level).sqrt() * output

    def _find(self, name: Any, batch: Batch, frozen: Mapping[str, Any]) -> Any:
        if isinstance(name, Mapping):
            return {key: self._find(inner, batch, frozen) for key, inner in name.items()}
        if callable(name):
            return name(batch, frozen)
        first, *path = name.split(".")
        if first not in frozen and first not in batch:
            raise ConfigError(
                f"expected {name!r} among the frozen outputs ({', '.join(frozen) or 'none'}) or in "
                f"the batch ({', '.join(batch)}), got neither; do name one of them"
            )
        value = frozen[first] if first in frozen else batch[first]
        for part in path:
            value = value[part]
        return value


def epsilon(scheduler: Any, *, latents: str, **options: Any) -> tuple[Noising, Loss]:
    """Predicts the noise that was added.

    Args:
        scheduler: of diffusers, as DDPMScheduler().
        latents: name of the latents among frozen outputs, or in the batch; see `Noising`.
        **options: `text`, the name of the text states, which the backbone's `encoder_hidden_states`
            takes; `scaling` and `shift` as of `Noising`; all others are further arguments of the
            backbone, as `Noising.arguments`.

    Returns:
        `inputs` and `loss` of a `Job`.

    Raises:
        ConfigError: the scheduler has no alphas_cumprod.
    """
    return _predict("epsilon", scheduler, latents, options)


def velocity(scheduler: Any, *, latents: str, **options: Any) -> tuple[Noising, Loss]:
    """Predicts the velocity between data and noise; arguments and errors as for `epsilon`."""
    return _predict("velocity", scheduler, latents, options)


def flow(scheduler: Any, *, latents: str, **options: Any) -> tuple[Noising, Loss]:
    """Predicts the direction from data to noise, at times of a normal's sigmoid, as SD3 and Flux.

    Args:
        scheduler: of diffusers, as FlowMatchEulerDiscreteScheduler().
        latents: as for `epsilon`.
        **options: as for `epsilon`.

    Raises:
        ConfigError: the scheduler is of another kind than flow matching.
    """
    if not type(scheduler).__name__.startswith("FlowMatch"):
        raise ConfigError(
            "scheduler: expected one of flow matching, as FlowMatchEulerDiscreteScheduler, got "
            f"{type(scheduler).__name__}; do train with the scheduler that the model came with"
        )
    # Times of inference, if somebody has set them, are fewer than those of training.
    fresh = type(scheduler).from_config(scheduler.config)
    return _predict("flow", fresh, latents, options)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """The mean of squared differences of each sample, at least in float32: [num_samples].

    An output with twice the target's channels is a mean and a variance, whose mean is compared.

    Raises:
        ConfigError: other shapes.
    """
    if output.ndim == target.ndim and output.shape[1] == 2 * target.shape[1]:
        output = output[:, : target.shape[1]]
    if output.shape != target.shape:
        raise ConfigError(
            f"expected an output of the target's shape {list(target.shape)}, got "
            f"{list(output.shape)}; do compare them in a loss of your own"
        )
    kind = torch.promote_types(output.dtype, torch.float32)
    return (output.to(kind) - target.to(kind)).square().flatten(1).mean(1)


def sample_latents(latents: Tensor, num_channels: int | None, draw: Draw) -> Tensor:
    """Draws latents if they are given as a distribution, with twice the channels; else the same."""
    if num_channels is None or latents.shape[1] != 2 * num_channels:
        return latents
    mean, log_variance = latents.chunk(2, dim=1)
    deviation = torch.exp(0.5 * log_variance.clamp(*_LOG_VARIANCES))
    return mean + deviation * draw.normal(mean.shape[1:], "latents", like=mean)


def _predict(
    prediction: str, scheduler: Any, latents: str, options: dict[str, Any]
) -> tuple[Noising, Loss]:
    if prediction != "flow" and not hasattr(scheduler, "alphas_cumprod"):
        raise ConfigError(
            f"scheduler: expected one with alphas_cumprod, as DDPMScheduler, got "
            f"{type(scheduler).__name__}; do train with the scheduler that the model came with"
        )
    settings = {name: options.pop(name) for name in ("scaling", "shift") if name in options}
    text = options.pop("text", None)
    if text is not None:
        options = {"encoder_hidden_states": text, **options}
    noising = Noising(
        scheduler=scheduler, prediction=prediction, latents=latents, arguments=options, **settings
    )
    return noising, mean_square
