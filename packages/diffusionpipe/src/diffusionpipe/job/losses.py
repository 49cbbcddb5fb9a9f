"""Inputs and losses of diffusion training: noise added to latents, and what a backbone predicts.

Each function returns `inputs(batch, frozen, draw)` and `loss(output, target)` for a `Job`. They
follow diffusers' training scripts: the mean of squared differences, weighted by nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.job.batches import Batch
from diffusionpipe.job.draws import Draw
from shared.errors import ConfigError

__all__ = ["Noising", "epsilon", "flow", "mean_square", "sample_latents", "velocity"]

# Bounds of a variance's logarithm, as AutoencoderKL's distribution has them.
_LOG_VARIANCES = (-30.0, 20.0)


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
        density: of the times of "flow": "logit_normal" or "uniform".
        sample: name of the backbone's argument that takes noisy latents.
        num_channels: channels of latents that the backbone takes; None where it does not say.
        has_estimate: whether the backbone takes an earlier estimate of the clean latents as further
            channels.
    """

    scheduler: Any
    prediction: str
    latents: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    scaling: float = 1.0
    shift: float = 0.0
    density: str = "logit_normal"
    sample: str = "sample"
    num_channels: int | None = None
    has_estimate: bool = False

    def bind(self, chain: Any, *, has_estimate: bool) -> Noising:
        """Learns from a backbone what its latents are called and how many channels they have.

        Args:
            chain: a `Chain`.
            has_estimate: whether the job is self-conditioned.
        """
        channels = getattr(getattr(chain.model, "config", None), "in_channels", None)
        if channels is not None and has_estimate:
            channels //= 2
        sample = "hidden_states" if "hidden_states" in chain.inputs else "sample"
        return replace(self, sample=sample, num_channels=channels, has_estimate=has_estimate)

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
        noisy, target = self._add_noise(clean, noise, level, timestep)
        if self.has_estimate:
            estimate = torch.zeros_like(clean)
            if "estimate" in frozen:
                estimate = self._estimate_clean(frozen["estimate"].detach(), noisy, level, timestep)
            noisy = torch.cat([noisy, estimate], dim=1)
        keywords = {name: self._find(a, batch, frozen) for name, a in self.arguments.items()}
        return {self.sample: noisy, "timestep": timestep, "target": target, **keywords}

    def _draw_times(self, clean: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Levels of noise, one a sample, and the times that the backbone reads."""
        count = self.scheduler.config.num_train_timesteps
        if self.prediction != "flow":
            timestep = draw.integers(0, count, "timestep", device=clean.device)
            cumulative = self.scheduler.alphas_cumprod.to(clean.device, clean.dtype)
            return _spread(cumulative[timestep], clean), timestep
        if self.density == "uniform":
            position = draw.uniform((), "timestep")
        else:
            position = torch.sigmoid(draw.normal((), "timestep"))
        index = (position * count).long().clamp(max=count - 1)
        sigma = self.scheduler.sigmas.cpu()[index].to(clean.device, clean.dtype)
        return _spread(sigma, clean), self.scheduler.timesteps.cpu()[index].to(clean.device)

    def _add_noise(
        self, clean: Tensor, noise: Tensor, level: Tensor, timestep: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.prediction == "flow":
            return (1.0 - level) * clean + level * noise, noise - clean
        noisy = self.scheduler.add_noise(clean, noise, timestep)
        if self.prediction == "epsilon":
            return noisy, noise
        return noisy, self.scheduler.get_velocity(clean, noise, timestep)

    def _estimate_clean(
        self, output: Tensor, noisy: Tensor, level: Tensor, timestep: Tensor
    ) -> Tensor:
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
        if first in frozen or first in batch:
            value = frozen[first] if first in frozen else batch[first]
            for part in path:
                value = value[part]
            return value
        raise ConfigError(
            f"expected {name!r} among the frozen outputs ({', '.join(frozen) or 'none'}) or in the "
            f"batch ({', '.join(batch)}), got neither; do name one of them"
        )


def epsilon(
    scheduler: Any,
    *,
    latents: str,
    text: str | None = None,
    scaling: float = 1.0,
    shift: float = 0.0,
    **arguments: Any,
) -> tuple[Noising, Any]:
    """Predicts the noise that was added.

    Args:
        scheduler: of diffusers, as DDPMScheduler().
        latents: name of the latents among frozen outputs, or in the batch; see `Noising`.
        text: name of the text states, the backbone's `encoder_hidden_states`; None for none.
        scaling: factor of the latents, a VAE's `scaling_factor`.
        shift: taken from the latents before, a VAE's `shift_factor`.
        **arguments: further keyword arguments of the backbone, as `Noising.arguments`.

    Returns:
        `inputs` and `loss` of a `Job`.
    """
    return _build(scheduler, "epsilon", latents, text, scaling, shift, arguments)


def velocity(
    scheduler: Any,
    *,
    latents: str,
    text: str | None = None,
    scaling: float = 1.0,
    shift: float = 0.0,
    **arguments: Any,
) -> tuple[Noising, Any]:
    """Predicts the velocity between data and noise; arguments as for `epsilon`."""
    return _build(scheduler, "velocity", latents, text, scaling, shift, arguments)


def flow(
    scheduler: Any,
    *,
    latents: str,
    text: str | None = None,
    scaling: float = 1.0,
    shift: float = 0.0,
    density: str = "logit_normal",
    **arguments: Any,
) -> tuple[Noising, Any]:
    """Predicts the direction from data to noise (flow matching, as SD3 and Flux).

    Args:
        scheduler: of diffusers, as FlowMatchEulerDiscreteScheduler().
        latents: as for `epsilon`.
        text: as for `epsilon`.
        scaling: as for `epsilon`.
        shift: as for `epsilon`.
        density: of the drawn times: "logit_normal" or "uniform".
        **arguments: as for `epsilon`.
    """
    if density not in ("logit_normal", "uniform"):
        raise ConfigError(
            f"density: expected 'logit_normal' or 'uniform', got {density!r}; do choose one of them"
        )
    # Times of inference, if somebody has set them, are fewer than those of training.
    fresh = type(scheduler).from_config(scheduler.config)
    inputs, loss = _build(fresh, "flow", latents, text, scaling, shift, arguments)
    return replace(inputs, density=density), loss


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """The mean of squared differences of each sample, at least in float32: [num_samples].

    An output with twice the target's channels is a mean and a variance, whose mean is compared.
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


def _build(
    scheduler: Any,
    prediction: str,
    latents: str,
    text: str | None,
    scaling: float,
    shift: float,
    arguments: dict[str, Any],
) -> tuple[Noising, Any]:
    if text is not None:
        arguments = {"encoder_hidden_states": text, **arguments}
    noising = Noising(
        scheduler=scheduler,
        prediction=prediction,
        latents=latents,
        arguments=arguments,
        scaling=scaling,
        shift=shift,
    )
    return noising, mean_square


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """One value a sample, as many dimensions as `like`."""
    return values.reshape(-1, *([1] * (like.ndim - 1)))
