"""A training job: a backbone, frozen functions, the backbone's inputs and its loss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.job import frozen as frozen_parts
from diffusionpipe.job.batches import Batch, count_rows, take_rows, unflatten
from diffusionpipe.job.cached_function import remove_caches
from diffusionpipe.job.chain import Chain
from diffusionpipe.job.checks.feeds import find_feeds
from diffusionpipe.job.checks.rows import check_rows, check_untrained
from diffusionpipe.job.draws import Draw, decide
from diffusionpipe.job.layers import ESTIMATE, OUTPUT
from diffusionpipe.job.losses import Noising
from diffusionpipe.job.pipelines.export import find_adapter, save_backbone, save_pipeline
from shared.errors import ConfigError, DataError

__all__ = ["Job", "Prepared"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a backbone gets for some samples.

    Attributes:
        state: its arguments by key, as its layers read them.
        target: what the loss compares its output with.
    """

    state: dict[str, Tensor]
    target: Any


@dataclass(frozen=True, eq=False)
class Job:
    """A diffusion model's training, apart from where and when its parts run.

    Attributes:
        backbone: what trains; two of them for a cascade, which train in one step.
        frozen: by name, functions of a batch, or of (batch, frozen, draw) if they need draws or
            others' outputs. They run without gradients; row i of their output must need row i only.
        inputs: from (batch, frozen, draw) to the backbone's keyword arguments and "target"; of two
            backbones, to two of these dictionaries.
        loss: from (output, target) to a value a sample.
        self_conditioning: probability that a step predicts twice, the second time with the first
            prediction among its inputs, as `frozen["estimate"]`.
        pipeline: of diffusers, whose parts these are; `export` saves it.
        components: names of frozen functions that one rank runs together for a sample, by name of
            the component.

    Raises:
        ConfigError: a part is of another kind, or a frozen function has a wrong name or signature.
    """

    backbone: Chain | tuple[Chain, Chain]
    frozen: Mapping[str, Callable[..., Any]]
    inputs: Callable[..., Any]
    loss: Callable[..., Any]
    self_conditioning: float = 0.0
    pipeline: Any = None
    components: Mapping[str, tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        if not self.chains or not all(isinstance(chain, Chain) for chain in self.chains):
            raise ConfigError(
                "backbone: expected what diffusionpipe.chain makes, or two of them, got "
                f"{type(self.backbone).__name__}; do call chain(model)"
            )
        if not 0.0 <= self.self_conditioning <= 1.0:
            raise ConfigError(
                f"self_conditioning: expected a probability, got {self.self_conditioning}; do choose "
                "0 to 1"
            )
        if self.self_conditioning and len(self.chains) > 1:
            raise ConfigError(
                "self_conditioning: expected one backbone, got two; do set it to 0 or train them "
                "one by one"
            )
        if isinstance(self.inputs, Noising):
            bound = self.inputs.bind(self.chains[0], has_estimate=self.self_conditioning > 0)
            object.__setattr__(self, "inputs", bound)
        object.__setattr__(self, "components", frozen_parts.group_components(self.frozen))

    @classmethod
    def from_pipeline(cls, pipeline: Any) -> Job:
        """Makes the job of fine-tuning a pipeline's backbone on "pixels" and "captions".

        Args:
            pipeline: of diffusers, text to image: Stable Diffusion 1, 2, XL or 3, or Flux.1.

        Raises:
            ConfigError: another pipeline.
        """
        from diffusionpipe.job.pipelines.describe import describe_pipeline

        return cls(*describe_pipeline(pipeline), pipeline=pipeline)

    @property
    def chains(self) -> tuple[Chain, ...]:
        """The backbones."""
        return self.backbone if isinstance(self.backbone, tuple) else (self.backbone,)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name; of two backbones, behind "0." and "1."."""
        if len(self.chains) == 1:
            return self.chains[0].trained
        return {
            f"{index}.{name}": parameter
            for index, chain in enumerate(self.chains)
            for name, parameter in chain.trained.items()
        }

    def num_samples(self, batch: Batch) -> int:
        """Counts a batch's samples."""
        return count_rows(batch)

    def take(self, batch: Batch, samples: range) -> dict[str, Any]:
        """Cuts the rows of a range of samples out of a batch."""
        return take_rows(batch, samples)

    def encode(self, component: str, rows: Batch, draw: Draw) -> dict[str, Tensor]:
        """Runs a component's frozen functions without gradients.

        Args:
            component: one of `components`.
            rows: of a batch.
            draw: for these rows.

        Returns:
            Outputs by name, nested ones as "name.0" or "name.key".
        """
        return frozen_parts.encode(self.list_functions(component), rows, draw)

    def encode_all(self, rows: Batch, draw: Draw) -> dict[str, Tensor]:
        """Runs all components; arguments and outputs as of `encode`."""
        outputs = [self.encode(component, rows, draw) for component in self.components]
        return {name: value for values in outputs for name, value in values.items()}

    def list_functions(self, component: str) -> dict[str, Callable[..., Any]]:
        """A component's frozen functions by name, in order."""
        return {name: self.frozen[name] for name in self.components[component]}

    def prepare(
        self, rows: Batch, values: Mapping[str, Tensor], draw: Draw
    ) -> tuple[Prepared, ...]:
        """Makes each backbone's arguments and target.

        Args:
            rows: of a batch.
            values: frozen outputs of these rows, as `encode` returns them; for a second pass with
                the first one's output as "estimate".
            draw: for these rows.

        Raises:
            ConfigError: `inputs` returns no target, or other arguments than the backbone takes.
        """
        made = self.inputs(rows, unflatten(values), draw)
        made = (made,) if isinstance(made, Mapping) else tuple(made)
        if len(made) != len(self.chains) or any("target" not in each for each in made):
            raise ConfigError(
                f"inputs: expected {len(self.chains)} dictionaries of the backbone's arguments and "
                f"'target', got {len(made)} with {', '.join(made[0]) if made else 'nothing'}; do "
                "return what each backbone takes, and the target"
            )
        return tuple(
            Prepared(
                chain.flatten({k: v for k, v in keywords.items() if k != "target"}),
                keywords["target"],
            )
            for chain, keywords in zip(self.chains, made, strict=True)
        )

    def compute_losses(self, output: Tensor, target: Any, num_samples: int) -> Tensor:
        """Computes the loss of each sample: [num_samples].

        Raises:
            ConfigError: the loss function returns another shape.
        """
        losses = self.loss(output, target)
        if not isinstance(losses, Tensor) or losses.shape != (num_samples,):
            shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ConfigError(
                f"loss: expected a value a sample, shape [{num_samples}], got {shape}; do take the "
                "mean over all dimensions but the first"
            )
        return losses

    def compute_loss(self, batch: Batch, *, seed: int, step: int) -> Tensor:
        """Computes a step's loss in this process, all of it at once, with gradients.

        It is what every plan computes, up to rounding: the mean over the batch, of two backbones
        the sum of both means.
        """
        draw = Draw(seed, step, range(count_rows(batch)))
        values = self.encode_all(batch, draw)
        if self.self_conditioning and decide(seed, step, self.self_conditioning):
            with torch.no_grad():
                (prepared,) = self.prepare(batch, values, draw)
                values[ESTIMATE] = self.chains[0].run(prepared.state)[OUTPUT]
        return self._compute_all_losses(batch, values, draw).mean(1).sum()

    def _compute_all_losses(self, batch: Batch, values: Mapping[str, Tensor], draw: Draw) -> Tensor:
        """Losses of each backbone and sample: [num_backbones, num_samples]."""
        pairs = zip(self.chains, self.prepare(batch, values, draw), strict=True)
        outputs = [(chain.run(made.state)[OUTPUT], made.target) for chain, made in pairs]
        return torch.stack([self.compute_losses(*each, len(draw.samples)) for each in outputs])

    def feeds(self, batch: Batch) -> tuple[dict[str, tuple[str, ...]], ...]:
        """Finds which frozen outputs each input of each backbone depends on.

        Args:
            batch: a few rows.

        Returns:
            For each backbone, names of frozen outputs by input key; "target" is one of the keys. A
            self-conditioned job's "estimate" counts as a frozen output.
        """
        return find_feeds(self, batch)

    def validate(self) -> None:
        """Checks what needs no data.

        Raises:
            ConfigError: a BatchNorm trains, nothing trains, a trainable parameter is in two layers or in
                none, or trains beside an adapter.
        """
        for chain in self.chains:
            chain.validate()
            if not chain.trained:
                raise ConfigError(
                    f"{type(chain.model).__name__}: expected parameters that train, got none; do "
                    "call requires_grad_(True), or add an adapter"
                )
            find_adapter(chain.model)
        owners: dict[int, str] = {}
        for name, parameter in self.trained.items():
            if id(parameter) in owners:
                raise ConfigError(
                    f"{name}: expected two backbones without common weights, got "
                    f"{owners[id(parameter)]} in both; do use a copy of them"
                )
            owners[id(parameter)] = name

    def check(self, batch: Batch, *, seed: int = 0) -> None:
        """Checks what needs data, and all of `validate`.

        Args:
            batch: at least two rows, a few are enough.
            seed: of the draws.

        Raises:
            ConfigError: layers and the model's forward differ, a forward or `inputs` draws random
                numbers by itself, a frozen function trains weights, a sample depends on others, or
                a function returns other shapes.
            DataError: the batch has fewer than two rows.
        """
        self.validate()
        num_samples = count_rows(batch)
        if num_samples < 2:
            raise DataError(
                f"expected at least two rows to check, got {num_samples}; do hand over more"
            )
        draw = Draw(seed, 0, range(num_samples))
        uncached = replace(self, frozen=remove_caches(self.frozen))

        def encode(samples: range, component: str) -> dict[str, Tensor]:
            rows = take_rows(batch, samples)
            values = uncached.encode(component, rows, Draw(seed, 0, samples))
            return {f"frozen[{name!r}]": value for name, value in values.items()}

        for component in self.components:
            check_untrained(self.list_functions(component), batch, draw, self.trained)
            check_rows(partial(encode, component=component), num_samples)
        values = uncached.encode_all(batch, draw)
        for chain, prepared in zip(self.chains, self.prepare(batch, values, draw), strict=True):
            chain.check(**unflatten(prepared.state))

        def compute(samples: range) -> dict[str, Tensor]:
            rows = {name: value[samples.start : samples.stop] for name, value in values.items()}
            piece = take_rows(batch, samples), rows, Draw(seed, 0, samples)
            return {"loss": self._compute_all_losses(*piece).T}

        with torch.no_grad():
            check_rows(compute, num_samples)

    def describe(self) -> str:
        """What has to be the same on all ranks, and for a plan to fit: JSON of layers and weights."""
        chains = [
            {
                "layers": [[layer.name, layer.reads, layer.writes] for layer in chain.layers],
                "parameters": [
                    [name, list(p.shape), str(p.dtype), p.requires_grad]
                    for name, p in chain.model.named_parameters()
                ],
            }
            for chain in self.chains
        ]
        about = {
            "chains": chains,
            "components": {name: list(names) for name, names in self.components.items()},
            "self_conditioning": self.self_conditioning,
        }
        return json.dumps(about)

    def list_fingerprints(self) -> dict[str, str]:
        """What profiles and plans are made for: a hash of `describe` as "job", and torch's version."""
        digest = hashlib.sha256(self.describe().encode()).hexdigest()
        return {"job": digest[:16], "torch": version("torch")}

    def export(self, folder: str | Path) -> None:
        """Saves the pipeline's folder, or the backbone's; an adapter alone if it trains.

        Raises:
            ConfigError: the folder is an address.
        """
        if ":/" in str(folder):  # a Path has dropped one of two slashes
            raise ConfigError(
                f"export: expected a folder, got the address {folder}; do export to a folder and copy it"
            )
        path = Path(folder)
        if self.pipeline is not None:
            save_pipeline(self.pipeline, self.chains[0].model, path)
            return
        for index, chain in enumerate(self.chains):
            save_backbone(chain.model, path / str(index) if len(self.chains) > 1 else path)
