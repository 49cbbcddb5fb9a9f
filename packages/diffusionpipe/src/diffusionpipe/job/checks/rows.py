"""Checks that values of a sample depend on that sample alone, and that frozen functions train nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from diffusionpipe.job.batches import Batch
from diffusionpipe.job.cached_function import remove_caches
from diffusionpipe.job.closeness import is_close
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.frozen import Frozen, encode
from shared.errors import ConfigError

__all__ = ["check_rows", "check_untrained", "find_parameters"]


def check_rows(compute: Callable[[range], dict[str, Tensor]], num_rows: int) -> None:
    """Computes values of all samples, once more, and of some alone, and compares them.

    Args:
        compute: from a range of samples to values by name.
        num_rows: number of samples, at least two.

    Raises:
        ConfigError: a value has another number of rows, differs from run to run, or has rows that
            change with the others.
    """
    whole = compute(range(num_rows))
    for name, value in whole.items():
        if value.ndim == 0 or len(value) != num_rows:
            raise ConfigError(
                f"{name}: expected a value with {num_rows} rows, one a sample, got shape "
                f"{list(value.shape)}; do keep the batch as the first dimension"
            )
    for piece in (range(num_rows), range(1), range(1, num_rows)):
        for name, value in compute(piece).items():
            if is_close(value, whole[name][piece.start : piece.stop]):
                continue
            if len(piece) == num_rows:
                raise ConfigError(
                    f"{name}: expected the same values of the same rows, got others in a second run; "
                    "do call eval() on its modules, and draw random numbers by `draw` alone (of "
                    "latents, return the distribution's parameters)"
                )
            raise ConfigError(
                f"{name}: expected row i to need row i only, got other values when rows "
                f"{piece.start} to {piece.stop - 1} came alone; do pad texts to a fixed length, and "
                "compare no samples"
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
        ConfigError: one does; its own parameters are partly trainable, as with an adapter; or a
            BatchNorm runs in training mode.
    """
    names = {id(parameter): name for name, parameter in trained.items()}
    for function, used in find_parameters(frozen, batch, draw).items():
        trainable = [parameter for parameter in used if parameter.requires_grad]
        tied = [names[id(parameter)] for parameter in used if id(parameter) in names]
        if tied:
            uses = f"{', '.join(tied[:5])} of the backbone; do use a copy of them"
        # Whole models come with all weights trainable; some of them trainable is somebody's choice.
        elif trainable and len(trainable) < len(used):
            shapes = ", ".join(str(list(parameter.shape)) for parameter in trainable[:3])
            uses = (
                f"{len(trainable)} trainable parameters among {len(used)} (shapes {shapes}, ...); "
                "do call requires_grad_(False) on its modules if nothing shall train them"
            )
        else:
            continue
        raise ConfigError(
            f"frozen[{function!r}]: expected a function without weights that train, got {uses}"
        )


def find_parameters(frozen: Frozen, batch: Batch, draw: Draw) -> dict[str, list[nn.Parameter]]:
    """Runs a component's functions and lists the parameters that each of them computes with.

    Raises:
        ConfigError: a BatchNorm runs in training mode.
    """
    watches = {name: _ParameterWatch(name) for name in frozen}
    encode(remove_caches(frozen), batch, draw, watches.__getitem__)
    return {name: list(watch.parameters.values()) for name, watch in watches.items()}


class _ParameterWatch(TorchFunctionMode):
    """Sees the parameters that torch's functions compute with, and refuses norms over a batch."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function
        self.parameters: dict[int, nn.Parameter] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name, keywords = getattr(func, "__name__", ""), kwargs or {}
        # The sixth argument, `training`, of both functions of this name.
        if name == "batch_norm" and (args[5] if len(args) > 5 else keywords["training"]):
            raise ConfigError(
                f"frozen[{self.function!r}]: expected row i to need row i only, got a BatchNorm in "
                "training mode; do call eval() on its modules"
            )
        # Reading a parameter's type or device is no use of its values.
        if name != "__get__":
            for leaf in tree_leaves((args, keywords)):
                if isinstance(leaf, nn.Parameter):
                    self.parameters[id(leaf)] = leaf
        return func(*args, **keywords)
