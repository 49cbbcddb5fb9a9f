"""What every training run tells its user in the same words.

That its loss is not finite, that a checkpoint is of another model, that there is no GPU, that ids are
too sparse, and where it resumed. Nothing heavy is imported here.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from shared.errors import ConfigError, DataError, DivergenceError
from shared.units import format_bytes

__all__ = [
    "check_device",
    "check_gpu",
    "check_loss",
    "check_num_nodes",
    "check_shapes",
    "log_resumed",
    "show_resumed",
]

_log = logging.getLogger(__name__)


def check_loss(loss: float, where: str = "") -> None:
    """Refuses a loss that has diverged.

    Args:
        loss: of a step.
        where: the step, as in "epoch 3, batch 7"; left out where the caller adds it.

    Raises:
        DivergenceError: the loss is NaN or infinite.
    """
    if not math.isfinite(loss):
        raise DivergenceError(
            f"{where}{': ' if where else ''}expected a finite loss, got {loss}; lower the learning rate, clip gradients, "
            "or look for features of extreme size"
        )


def check_shapes(
    path: str | os.PathLike[str],
    saved: Mapping[str, Sequence[int]],
    here: Mapping[str, Sequence[int]],
) -> None:
    """Refuses a checkpoint of another model, before anything of it is loaded.

    Args:
        path: the checkpoint.
        saved: shapes of its tensors, by key.
        here: shapes of this run's tensors, by key.

    Raises:
        DataError: a shape differs, or a key is in one of them only; names the first.
    """
    advice = "resume with the model's settings that it was written with, or give another folder"
    for key in [*here, *(key for key in saved if key not in here)]:
        ours, theirs = (
            f"shape {list(one[key])}" if key in one else "none" for one in (here, saved)
        )
        if ours != theirs:
            raise DataError(
                f"{os.fspath(path)}: expected {key} of {ours} as in this run, got {theirs}; {advice}"
            )


def check_device(option: str, device: str) -> None:
    """Refuses a device that is not there.

    Args:
        option: what the user sets, as the message names it.
        device: torch's name of a device, such as "cpu" or "cuda:1".

    Raises:
        ConfigError: it is no device's name, or torch has no such GPU.
    """
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConfigError(
            f"{option}: expected cpu, cuda or cuda:N, got {device!r}; give one of them"
        )
    if kind == "cuda":
        check_gpu(option, device, int(index or 0))


def check_gpu(option: str, value: str, index: int = 0) -> None:
    """Refuses what needs a GPU where there is none.

    Args:
        option: what the user sets, as the message names it.
        value: what it is set to.
        index: number of the GPU.

    Raises:
        ConfigError: torch has no such GPU.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise ConfigError(
            f"{option}: expected a GPU for {value!r}, got {count} that torch can use; give cpu, or "
            "install a driver and a build of torch with CUDA"
        )


def check_num_nodes(num_nodes: int, node_bytes: int) -> None:
    """Refuses ids of nodes that are so sparse that memory could not hold a row each.

    Args:
        num_nodes: the largest id and one more.
        node_bytes: of a node's row.

    Raises:
        DataError: the rows take more bytes than this machine's memory has.
    """
    room_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_nodes * node_bytes > room_bytes:
        raise DataError(
            f"nodes: expected ids whose rows fit into this machine's {format_bytes(room_bytes)}, got "
            f"ids up to {num_nodes - 1:,} at {node_bytes:,} bytes each; number sparse ids from 0, for "
            "instance by pandas.factorize"
        )


def log_resumed(step: int, path: str | os.PathLike[str], *, unit: str = "step") -> None:
    """Logs, at level INFO, that a run resumed from a checkpoint; `show_resumed` prints it.

    Args:
        step: number of steps that are done, as the package counts them.
        path: the folder or file of the checkpoint.
        unit: what the package counts, if not steps.
    """
    _log.info("resumed from %s %d of %s", unit, step, os.fspath(path))


@contextmanager
def show_resumed(prog: str) -> Iterator[None]:
    """Prints to stderr what `log_resumed` logs in this block, behind a program's name.

    Within such a block another one changes nothing.
    """
    if any(isinstance(one, _ToStderr) for one in _log.handlers):
        yield
        return
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter(f"{prog}: %(message)s"))
    before = _log.level, _log.propagate
    _log.setLevel(logging.INFO)
    _log.propagate = False  # once is enough
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.propagate = before[1]
        _log.setLevel(before[0])


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # A progress bar may have replaced sys.stderr since the handler was made.
        sys.stderr.write(f"{self.format(record)}\n")
        sys.stderr.flush()
