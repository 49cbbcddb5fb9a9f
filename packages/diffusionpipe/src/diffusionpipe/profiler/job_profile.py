"""A job's figures: seconds by layer and size of a micro-batch, bytes by layer and value."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shared.errors import DataError
from shared.files import read_json, write_atomically

__all__ = ["ChainProfile", "JobProfile"]

# Of the file's form; another one is refused.
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProfile:
    """Figures of one backbone. Tables of seconds have a row a layer, and in it a figure a size.

    Attributes:
        layers: names.
        reads: by layer, keys.
        writes: by layer, keys.
        differentiable: keys of values that gradients go through.
        feeds: by input key and "target", the frozen outputs that it depends on.
        forward_s: by layer and size.
        backward_s: by layer and size, with the sum of gradients of its inputs.
        parameter_bytes: by layer.
        gradient_bytes: by layer, of trainable parameters only.
        saved_bytes: by layer and sample, what is kept for backward apart from weights and the
            backbone's inputs; a tensor that two layers keep counts at the first.
        value_bytes: by key and sample, of inputs, values, "output" and "target".
        sum_bytes: by layer, of the sums of gradients, which are float32 at least; empty where that is
            `gradient_bytes`.
        whole: keys of values that have not one row a sample.
    """

    layers: tuple[str, ...]
    reads: tuple[tuple[str, ...], ...]
    writes: tuple[tuple[str, ...], ...]
    differentiable: tuple[str, ...]
    feeds: dict[str, tuple[str, ...]]
    forward_s: tuple[tuple[float, ...], ...]
    backward_s: tuple[tuple[float, ...], ...]
    parameter_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    value_bytes: dict[str, int]
    sum_bytes: tuple[int, ...] = ()
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """Figures of a job, the same on all ranks that measured them together.

    Attributes:
        sizes: numbers of samples that were timed, ascending.
        chains: of each backbone. `forward_s` and the like are the first one's.
        frozen_s: by component, a figure a size.
        frozen_outputs: by component, names of its outputs.
        frozen_bytes: by output and sample.
        frozen_parameter_bytes: by component.
        frozen_working_bytes: by component and sample, most of its intermediate values at once.
        step_s_per_byte: seconds of the optimizer (AdamW) a byte of trainable parameters.
        self_conditioning: probability that a step predicts twice.
        device: that was measured.
        num_ranks: that measured at the same time.
        message_s: seconds of computation that a rank loses to a message that it sends and one that it
            receives, whatever their sizes.
        message_s_per_byte: the same, a byte of each.
        fingerprints: of the job that was measured, as `Job.list_fingerprints` says; empty if unknown.
    """

    sizes: tuple[int, ...]
    chains: tuple[ChainProfile, ...]
    frozen_s: dict[str, tuple[float, ...]]
    frozen_outputs: dict[str, tuple[str, ...]]
    frozen_bytes: dict[str, int]
    frozen_parameter_bytes: dict[str, int]
    step_s_per_byte: float
    self_conditioning: float
    device: str
    num_ranks: int
    message_s: float = 0.0
    message_s_per_byte: float = 0.0
    frozen_working_bytes: dict[str, int] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name in ChainProfile.__dataclass_fields__:
            return getattr(self.chains[0], name)
        raise AttributeError(f"JobProfile has no attribute {name!r}")

    def seconds(self, row: Sequence[float], size: float) -> float:
        """Reads a table's row between the measured sizes.

        Args:
            row: of `forward_s`, `backward_s` or `frozen_s`.
            size: number of samples.

        Returns:
            Seconds on the line between the neighbouring sizes. Beyond the largest size the last
            line goes on; below the smallest the seconds stay as they are.
        """
        if size <= self.sizes[0]:
            return row[0]
        if len(self.sizes) == 1:
            return row[0] * size / self.sizes[0]
        right = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        low, high = self.sizes[right - 1], self.sizes[right]
        slope = (row[right] - row[right - 1]) / (high - low)
        return max(row[right - 1] + slope * (size - low), 0.0)

    def to_json(self) -> str:
        """The profile as JSON."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1)

    def save(self, path: str | Path) -> None:
        """Writes the profile's JSON to a file, replaced at once."""
        write_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> JobProfile:
        """Reads a file of `save`.

        Raises:
            DataError: there is none, or it is no profile of this version.
        """
        tree = read_json(path, "a profile")
        version = tree.pop("version", None) if isinstance(tree, dict) else None
        names, inner = ({each.name for each in fields(kind)} for kind in (cls, ChainProfile))
        if (
            version != _VERSION
            or set(tree) != names
            or any(set(chain) != inner for chain in tree["chains"])
        ):
            raise DataError(
                f"{path}: expected a profile of version {_VERSION} as this release writes it, got version "
                f"{version} or other fields; do write it again by `diffusionpipe profile`"
            )
        chains = tuple(ChainProfile(**_freeze(chain)) for chain in tree.pop("chains"))
        return cls(chains=chains, **_freeze(tree))


def _freeze(value: Any) -> Any:
    """Lists of JSON as tuples."""
    if isinstance(value, dict):
        return {key: _freeze(entry) for key, entry in value.items()}
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
