"""Folders of safetensors files in the layout of Hugging Face's `save_pretrained`."""

from __future__ import annotations

import json
import math
import os
import posixpath
from collections.abc import Callable, Iterable
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from bytecheckpoint.formats.hf import INDEX_NAME
from bytecheckpoint.loading.checkpoint import Checkpoint
from bytecheckpoint.storage.files.dtypes import get_safetensors_name, parse_dtype
from bytecheckpoint.storage.files.index import Index
from bytecheckpoint.tools.writers.new_path import make_new
from bytecheckpoint.tools.writers.slabs import cut_slabs, view_bytes
from shared.errors import ConfigError, DataError
from shared.topology.boxes import Box

__all__ = ["write_hf"]

_COPIED = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "config.json",
    "generation_config.json", "merges.txt", "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json",
)  # fmt: skip


def write_hf(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 1000**3,
    prefix: str | None = None,
    config: str | os.PathLike[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a model's weights as safetensors files, in the layout of `save_pretrained`.

    Args:
        checkpoint: the source.
        folder: made here; appears when it is whole and on disk.
        max_shard_bytes: no file has more bytes of tensors, unless a single one is larger.
        prefix: which tensors are written, and what is cut from their names; by default "model."
            where names begin with it, unless the source is a folder of safetensors itself.
        config: folder of config.json and perhaps a tokenizer, which are copied; by default the
            source, if it is a folder of safetensors.
        progress: called with the number of bytes written since its last call.

    Raises:
        ConfigError: the folder exists, or `config` names one without a config.json.
        DataError: no name begins with the prefix, or safetensors has no name for a type.
    """
    index = checkpoint.index
    beside = _read_beside(checkpoint, config)
    if prefix is None:
        is_state = any(name.startswith("model.") for name in index.names)
        prefix = "model." if is_state and checkpoint.source.has_values else ""
    names = [name for name in index.names if name.startswith(prefix)]
    if not names:
        raise DataError(
            f"expected tensors with names that begin with {prefix!r}, got "
            f"{', '.join(index.names[:3])}, ...; pass the prefix of the model's names"
        )
    shards = _group_names(index, names, max_shard_bytes)
    metadata = {"format": "pt"}
    for alias, name in index.aliases.items():
        if alias.startswith(prefix) and name.startswith(prefix):
            metadata[alias.removeprefix(prefix)] = name.removeprefix(prefix)
    weight_map = {}
    with make_new(Path(folder)) as making:
        making.mkdir()
        for name, content in beside.items():
            (making / name).write_bytes(content)
        for at, shard in enumerate(shards, 1):
            file_name = f"model-{at:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) == 1:
                file_name = "model.safetensors"
            with (making / file_name).open("wb") as file:
                _write_file(file, checkpoint, shard, prefix, metadata, progress)
            weight_map.update((name.removeprefix(prefix), file_name) for name in shard)
        if len(shards) > 1:
            total = sum(_count_bytes(index, name) for name in names)
            content = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (making / INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n")


def _read_beside(checkpoint: Checkpoint, config: str | os.PathLike[str] | None) -> dict[str, bytes]:
    """The small files of a Hugging Face folder that are no weights, by name."""
    if config is not None:
        folder = Path(config)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"config: expected a folder with config.json, {folder} has none; name the folder of "
                "the model that was trained"
            )
        return {name: (folder / name).read_bytes() for name in _COPIED if (folder / name).is_file()}
    if checkpoint.kind != "hf":
        return {}
    storage, path = checkpoint.source.storage, checkpoint.source.summary.folder
    there = [name for name in storage.list(path) if name in _COPIED]
    return {name: bytes(storage.read(posixpath.join(path, name))) for name in there}


def _count_bytes(index: Index, name: str) -> int:
    at = index.position[name]
    return math.prod(index.shapes[at]) * int(index.itemsizes[at])


def _group_names(index: Index, names: list[str], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name in names:
        num_bytes = _count_bytes(index, name)
        if held and held + num_bytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += num_bytes
    return shards


def _write_file(
    file: BufferedIOBase,
    checkpoint: Checkpoint,
    names: Iterable[str],
    prefix: str,
    metadata: dict[str, str],
    progress: Callable[[int], None] | None,
) -> None:
    index = checkpoint.index
    # Larger elements first, so that each tensor is aligned without gaps.
    names = sorted(names, key=lambda name: -int(index.itemsizes[index.position[name]]))
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        at = index.position[name]
        dtype = get_safetensors_name(parse_dtype(index.dtypes[at]))
        if dtype is None:
            raise DataError(
                f"{name}: safetensors has no name for {index.dtypes[at]}; write DCP or torch files"
            )
        begin, end = end, end + _count_bytes(index, name)
        entries[name.removeprefix(prefix)] = {
            "dtype": dtype,
            "shape": list(index.shapes[at]),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        at = index.position[name]
        whole = Box((0,) * len(index.shapes[at]), index.shapes[at])
        for box in cut_slabs(whole, int(index.itemsizes[at])):
            file.write(view_bytes(checkpoint.read(name, box)))
            if progress is not None:
                progress(box.numel * int(index.itemsizes[at]))
