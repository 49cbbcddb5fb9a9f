"""A frozen function whose outputs are kept in a folder, a file a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.job.batches import Batch, flatten, unflatten
from diffusionpipe.job.closeness import is_close
from shared.errors import ConfigError, DataError
from shared.files import write_atomically

__all__ = ["CachedFunction", "list_keys", "remove_caches"]


@dataclass(frozen=True, eq=False)
class CachedFunction:
    """Computes a frozen function for samples that its folder does not have yet, and reads the others.

    The rank that encodes a sample writes its file, complete or not at all, and all read it back to
    the bit.

    Attributes:
        name: of the function.
        function: of a batch.
        folder: of the files.
        example: outputs of some rows, as `encode` names them; other samples' have the same types,
            shapes and device.
        compared: key of the sample for which file and function were compared; empty before.
    """

    name: str
    function: Callable[[Batch], Any]
    folder: Path
    example: Mapping[str, Tensor]
    compared: list[str] = field(default_factory=list)

    def __call__(self, batch: Batch) -> Any:
        """Returns what the function returns for some rows.

        Args:
            batch: rows, named by "keys".

        Raises:
            ConfigError: the folder has another function's outputs.
            DataError: keys are missing, or a file is damaged.
            OSError: a file cannot be read or written.
        """
        self.compare(batch)
        keys = list_keys(batch)
        rows = [self.read(key) for key in keys]
        missing = [index for index, row in enumerate(rows) if row is None]
        if missing:
            output = self.function({name: _pick(v, missing) for name, v in batch.items()})
            for position, index in enumerate(missing):
                row = {k: t[position].cpu() for k, t in flatten(self.name, output).items()}
                rows[index] = row
                self._write(keys[index], row)
        values = {}
        for name, like in self.example.items():
            value = torch.stack([row[name] for row in rows if row]).to(like.device)
            # Kernels round by the order of values in memory.
            if like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last):
                value = value.contiguous(memory_format=torch.channels_last)
            values[name] = value
        return unflatten(values)[self.name]

    def compare(self, batch: Batch) -> None:
        """Computes one sample that the folder has again, the first that comes, and compares both.

        Args:
            batch: rows, named by "keys".

        Raises:
            ConfigError: they differ.
            DataError: keys are missing, or a file is damaged.
            OSError: a file cannot be read.
        """
        for index, key in enumerate(list_keys(batch)):
            row = None if self.compared else self.read(key)
            if row is None:
                continue
            with torch.no_grad():
                output = self.function({name: _pick(v, [index]) for name, v in batch.items()})
            values = flatten(self.name, output)
            if not all(is_close(row[name], value[0].cpu()) for name, value in values.items()):
                raise ConfigError(
                    f"{self.folder}: expected for {key!r} what frozen[{self.name!r}] returns, got other "
                    "values: the function or the sample has changed; do delete the folder, or name "
                    "another one"
                )
            self.compared.append(key)

    def read(self, key: str) -> dict[str, Tensor] | None:
        """Reads a sample's outputs; None where they were not written yet.

        Raises:
            DataError: the file is damaged, or has other types and shapes than the function returns.
            OSError: it cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        path = self._find_path(key)
        try:
            row = load(path.read_bytes())
        except FileNotFoundError:
            return None
        except SafetensorError as error:
            raise DataError(
                f"{path}: expected outputs of frozen[{self.name!r}] for {key!r}, got a damaged file "
                f"({error}); do delete it"
            ) from error
        shapes = {k: (t.dtype, list(t.shape)) for k, t in row.items()}
        expected = {k: (t.dtype, list(t.shape[1:])) for k, t in self.example.items()}
        if shapes != expected:
            raise DataError(
                f"{path}: expected outputs of frozen[{self.name!r}] for {key!r} of the types and "
                f"shapes {expected}, got {shapes}; do cache samples of another shape in a folder of "
                "their own"
            )
        return row

    def _write(self, key: str, row: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save

        path = self._find_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, save({k: tensor.contiguous() for k, tensor in row.items()}))

    def _find_path(self, key: str) -> Path:
        # A key may be any text, and no folder gets too many files.
        digest = hashlib.sha256(f"{self.name}.{key}".encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest}.safetensors"


def list_keys(batch: Batch) -> Sequence[str]:
    """Returns the names of a batch's samples.

    Raises:
        DataError: they are missing, or are not texts.
    """
    keys = batch.get("keys")
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise DataError(
            f"batch['keys']: expected a list of texts, which name the samples to cache, got "
            f"{type(keys).__name__} in a batch of {', '.join(batch)}; do give each sample a name of "
            "its own"
        )
    return keys


def remove_caches(frozen: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Functions that always compute, for checks that watch them."""
    return {n: f.function if isinstance(f, CachedFunction) else f for n, f in frozen.items()}


def _pick(value: Any, indices: list[int]) -> Any:
    return [value[i] for i in indices] if isinstance(value, list | tuple) else value[indices]
