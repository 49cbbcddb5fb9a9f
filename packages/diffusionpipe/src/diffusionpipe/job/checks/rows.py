"""Checks frozen functions: row i depends on row i alone, and nothing that trains is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from diffusionpipe.job.batches import Batch, take_rows
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.frozen import Frozen, encode
from shared.errors import ConfigError

__all__ = ["check_losses", "check_rows", "check_untrained", "find_parameters"]

# Largest difference between an output's row alone and among others, relative to its largest value.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 3e-2
# Products in TF32, which GPUs may use for float32.
_GPU_TOLERANCE = 5e-3


def check_rows(frozen: Frozen, batch: Batch, draw: Draw) -> None:
    """Checks that each output's row i depends on row i of the batch alone.

    Args:
        frozen: functions of a component.
        batch: at least two rows.
        draw: for all of them.

    Raises:
        ConfigError: an output has another number of rows, differs from run to run, or has rows that
            change with the others; or a BatchNorm trains.
    """
    num_rows = len(draw.samples)
    whole, watches = _encode_watched(frozen, batch, draw)
    for name, watch in watches.items():
        if watch.has_batch_norm:
            raise ConfigError(
                f"frozen[{name!r}]: expected row i to need row i only, got a BatchNorm in training "
                "mode; do call eval() on its modules"
            )
    again = encode(frozen, batch, draw)
    for name, value in whole.items():
        if value.ndim == 0 or len(value) != num_rows:
            raise ConfigError(
                f"frozen[{name!r}]: expected an output with {num_rows} rows, one a sample, got "
                f"shape {list(value.shape)}; do keep the batch as the first dimension"
            )
        if not _is_close(again[name], value):
            raise ConfigError(
                f"frozen[{name!r}]: expected the same output of the same rows, got another one; do "
                "call eval() on its modules and draw noise in `inputs`, of latents too (return the "
                "distribution's parameters)"
            )
    for piece in (range(1), range(1, num_rows)):
        samples = draw.samples[piece.start : piece.stop]
        part = encode(frozen, take_rows(batch, piece), replace(draw, samples=samples))
        for name, value in part.items():
            if not _is_close(value, whole[name][piece.start : piece.stop]):
                raise ConfigError(
                    f"frozen[{name!r}]: expected row i to need row i only, got other values when "
                    f"rows {piece.start} to {piece.stop - 1} came alone; do pad texts to a fixed "
                    "length and compare no rows"
                )


def check_untrained(
    frozen: Frozen, batch: Batch, draw: Draw, trained: Mapping[str, nn.Parameter]
) -> None:
    """Checks that no frozen function uses a parameter that trains.

    Args:
        frozen: functions of a component.
        batch: rows to run them on.
        draw: for these rows.
        trained: parameters that the job trains, by name.

    Raises:
        ConfigError: one does; or its own parameters are partly trainable, as with an adapter.
    """
    names = {id(parameter): name for name, parameter in trained.items()}
    for function, used in find_parameters(frozen, batch, draw).items():
        tied = [names[id(parameter)] for parameter in used if id(parameter) in names]
        if tied:
            raise ConfigError(
                f"frozen[{function!r}]: expected a function without weights that train, got "
                f"{', '.join(tied[:5])} of the backbone; do use a copy of them"
            )
        trainable = [parameter for parameter in used if parameter.requires_grad]
        # Whole models come with all weights trainable; some of them trainable is somebody's choice.
        if trainable and len(trainable) < len(used):
            shapes = ", ".join(str(list(parameter.shape)) for parameter in trainable[:3])
            raise ConfigError(
                f"frozen[{function!r}]: expected a function without weights that train, got "
                f"{len(trainable)} trainable parameters among {len(used)} (shapes {shapes}, ...); "
                "do call requires_grad_(False) on its modules if nothing shall train them"
            )


def check_losses(compute: Callable[[range], Tensor], num_rows: int) -> None:
    """Checks that the losses of some samples are the same alone and among others.

    Args:
        compute: from a range of samples to their losses, [num_backbones, num_samples].
        num_rows: number of samples, at least two.

    Raises:
        ConfigError: they differ, or differ from run to run.
    """
    whole = compute(range(num_rows))
    if not _is_close(compute(range(num_rows)), whole):
        raise ConfigError(
            "inputs: expected the same losses of the same samples, got others; do draw random "
            "numbers by `draw` alone"
        )
    for piece in (range(1), range(1, num_rows)):
        if not _is_close(compute(piece), whole[:, piece.start : piece.stop]):
            raise ConfigError(
                "expected a loss of sample i that needs sample i only, got others when samples "
                f"{piece.start} to {piece.stop - 1} came alone; do compare no rows in `inputs`, in "
                "the backbone or in `loss`"
            )


def find_parameters(frozen: Frozen, batch: Batch, draw: Draw) -> dict[str, list[nn.Parameter]]:
    """Runs a component's functions and lists the parameters that each of them computes with."""
    _, watches = _encode_watched(frozen, batch, draw)
    return {name: list(watch.seen.values()) for name, watch in watches.items()}


def _encode_watched(
    frozen: Frozen, batch: Batch, draw: Draw
) -> tuple[dict[str, Tensor], dict[str, _FunctionWatch]]:
    watches = {name: _FunctionWatch() for name in frozen}
    return encode(frozen, batch, draw, watches.__getitem__), watches


class _FunctionWatch(TorchFunctionMode):
    """Sees torch's functions: the parameters they compute with, and norms over a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, nn.Parameter] = {}
        self.has_batch_norm = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name == "batch_norm":
            # The sixth argument, `training`, of both functions of this name.
            self.has_batch_norm |= bool(args[5] if len(args) > 5 else (kwargs or {})["training"])
        # Reading a parameter's type or device is no use of its values.
        if name != "__get__":
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter):
                    self.seen[id(leaf)] = leaf
        return func(*args, **(kwargs or {}))


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape or not ours.is_floating_point():
        return torch.equal(ours, theirs)
    tolerance = _TOLERANCES.get(ours.dtype, _LOW_PRECISION_TOLERANCE)
    if ours.is_cuda:
        tolerance = max(tolerance, _GPU_TOLERANCE)
    scale = float(theirs.abs().max()) if theirs.numel() else 0.0
    return torch.allclose(ours, theirs, rtol=0.0, atol=tolerance * scale, equal_nan=True)
