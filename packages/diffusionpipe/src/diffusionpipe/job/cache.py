"""Caches the outputs of a job's frozen functions in a folder: the rival of filling.

Where samples come back unchanged, each is encoded once, and later epochs read. What is cached comes
before any draw, so noise and latents still differ from step to step.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from diffusionpipe.job.batches import Batch, take_two
from diffusionpipe.job.cached_function import CachedFunction, list_keys, remove_caches
from diffusionpipe.job.checks.rows import find_parameters
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.frozen import encode, takes_draw
from diffusionpipe.job.job import Job
from shared.errors import ConfigError
from shared.files import read_json, write_atomically

__all__ = ["cache"]


def cache(
    job: Job, batch: Batch, folder: str | os.PathLike[str], *, names: Iterable[str] | None = None
) -> Job:
    """Makes the same job with frozen functions that read a sample which was encoded before.

    Every rank calls it, with a folder that all ranks see. Batches need "keys", a text a sample; two
    samples that differ, as by another crop, need two keys.

    Args:
        job: stays as it is.
        batch: as for training; the job is checked on two of its rows.
        folder: is created; gets a safetensors file a function and sample.
        names: of the functions to cache; all when left out.

    Raises:
        ConfigError: a function takes draws, there is none of this name, the folder was written by
            other functions or weights, or `job.check` refuses.
        DataError: the batch has no keys, or a file is damaged.
        OSError: the folder cannot be read or written.
    """
    names = tuple(job.frozen if names is None else names)
    _check_names(job, names)
    list_keys(batch)
    rows, draw = take_two(batch), Draw(0, 0, range(2))
    job.check(rows)
    frozen = remove_caches({name: job.frozen[name] for name in names})
    outputs, buffers = {}, {}
    for name, function in frozen.items():
        with _watch_buffers() as buffers[name]:
            outputs |= encode({name: function}, rows, draw)
    used = find_parameters(frozen, rows, draw)
    hashes = {name: _hash_weights([*used[name], *buffers[name].values()]) for name in frozen}
    path = Path(folder)
    is_new = _check_record(path, hashes)
    cached = {}
    for name, function in frozen.items():
        example = {k: value for k, value in outputs.items() if k.split(".")[0] == name}
        cached[name] = CachedFunction(name, function, path, example)
        if is_new:
            # What this run writes needs no comparison with what it computes.
            cached[name].compared.append("")
        cached[name].compare(rows)
    return replace(job, frozen={**job.frozen, **cached})


def _check_names(job: Job, names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in job.frozen]
    if unknown:
        raise ConfigError(
            f"names: expected frozen functions among {', '.join(job.frozen)}, got {unknown[0]!r}; do "
            "name some of these"
        )
    drawing = [name for name in names if takes_draw(name, job.frozen[name])]
    if drawing:
        others = [name for name in names if name not in drawing]
        raise ConfigError(
            f"frozen[{drawing[0]!r}]: expected a function of a batch alone, got one of (batch, frozen, "
            f"draw), whose outputs differ from step to step; do cache the others by names={others}"
        )


def _check_record(folder: Path, weights: dict[str, str]) -> bool:
    """Compares hashes with those in the folder; writes them and returns True if it is new."""
    path = folder / "cache.json"
    record = {"version": 1, "weights": weights}
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record, indent=1))
        return True
    written = read_json(path, "a cache's record")
    if written != record:
        other = written.get("weights", {}) if isinstance(written, dict) else {}
        changed = [k for k in {**weights, **other} if weights.get(k) != other.get(k)]
        raise ConfigError(
            f"{folder}: expected a cache of the frozen functions {', '.join(weights)} with these "
            f"weights, got another one's ({', '.join(changed) or 'another version'}); do delete the "
            "folder, or name another one"
        )
    return False


@contextmanager
def _watch_buffers() -> Iterator[dict[int, Tensor]]:
    """Collects the buffers of modules that run meanwhile, as statistics of norms."""
    buffers: dict[int, Tensor] = {}

    def note(module: nn.Module, arguments: object) -> None:
        buffers.update((id(buffer), buffer) for buffer in module.buffers(recurse=False))

    handle = register_module_forward_pre_hook(note)
    try:
        yield buffers
    finally:
        handle.remove()


def _hash_weights(weights: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(f"{weight.dtype} {list(weight.shape)} ".encode())
        flat = weight.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
