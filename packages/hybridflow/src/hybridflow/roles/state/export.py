"""Export of a model's whole weights to a folder that transformers' `from_pretrained` loads.

Ranks send their pieces of one weight after another to the group's first rank, whatever the layout.
That rank writes each weight to a safetensors file before the next arrives, so that no rank needs
memory for more than one whole weight beside its own part.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.models.config import DecoderConfig
from hybridflow.models.decoder import Decoder
from hybridflow.models.pieces import Piece, weight_shapes
from hybridflow.reshard.planner import Boxes, plan_boxes
from hybridflow.tasks.tokenizer_files import write_tokenizer
from hybridflow.tasks.tokenizers import Tokenizer
from hybridflow.workers.worker_group import WorkerGroup
from shared.comms import reshard
from shared.comms.group import Group
from shared.errors import ConfigError, DataError
from shared.files import atomic_folder
from shared.topology.boxes import Box

__all__ = ["Held", "check_folder", "export", "write_folder"]

# Dtypes of workers, and their names in safetensors.
_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"}
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_COPIED = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "merges.txt", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "vocab.json",
)  # fmt: skip


# Each is a tokenizer without the others.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def export(
    group: WorkerGroup,
    folder: str | PathLike[str],
    *,
    max_file_bytes: int = 5 << 30,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Writes a Hugging Face folder: config.json, safetensors files, the source's tokenizer.

    The folder can be the model of the next recipe.

    Args:
        group: an actor, critic or another group whose workers hold a decoder.
        folder: on a disk that the group's first rank sees too; must be empty or not exist. It
            appears only once it is complete.
        max_file_bytes: size above which weights are split over several files with an index; a
            single weight is never split.
        tokenizer: what the model was trained with: one of ours is written for a model that came
            from no folder with a tokenizer.

    Returns:
        The folder.

    Raises:
        ConfigError: if the folder is not empty, or the limit not positive.
        RankFailure: if a file cannot be written.

    Example:
        >>> export(actor, "runs/sort/model")  # doctest: +SKIP
    """
    path = Path(folder).absolute()
    if max_file_bytes < 1:
        raise ConfigError(f"max_file_bytes: expected at least 1, got {max_file_bytes}")
    check_folder(path)
    if path.exists():
        path.rmdir()
    with atomic_folder(path) as partial:
        group.call("export_weights", str(partial), max_file_bytes).result()
        if tokenizer is not None and not any((partial / name).exists() for name in _TOKENIZERS):
            write_tokenizer(tokenizer, partial)
    return path


def check_folder(path: Path) -> None:
    """Refuses a folder that cannot be exported to.

    Raises:
        ConfigError: it is not empty, or no folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path}: expected an empty folder or none; export to another one")


class Held(NamedTuple):
    """The parts of a model that a group's ranks hold.

    Attributes:
        model, pieces: this rank's part.
        boxes: boxes of weights that each rank holds, by rank.
        group: the ranks' group; None if this rank is alone.
    """

    model: Decoder
    pieces: Sequence[Piece]
    boxes: Sequence[Boxes]
    group: Group | None


def write_folder(held: Held, folder: Path, max_file_bytes: int, source: str | Path | None) -> None:
    """Writes a model's folder on the group's first rank; all ranks of the group must call this.

    Args:
        held: the parts that the ranks hold.
        folder: folder to write to.
        max_file_bytes: as in `export`.
        source: folder whose tokenizer is copied; None, or a preset's name: none is.

    Raises:
        DataError: if a file cannot be written.
    """
    weights = _gathered(held)
    try:
        if held.group is None or held.group.rank == 0:
            _write_weights(held.model, weights, folder, max_file_bytes)
            kind = next(held.model.parameters()).dtype
            tree = hugging_face_config(held.model.config, held.model.head_kind, kind)
            (folder / "config.json").write_text(json.dumps(tree, indent=2) + "\n")
            found = [] if source is None else [Path(source) / name for name in _COPIED]
            for file in filter(Path.is_file, found):
                shutil.copy(file, folder)
            ends, settings = held.model.config.end_tokens, folder / "generation_config.json"
            if ends and not settings.is_file():
                settings.write_text(json.dumps({"eos_token_id": list(ends)}) + "\n")
    except OSError as error:
        raise DataError(f"{folder}: {error}; free space there, or export elsewhere") from error
    finally:
        # Drains the remaining weights, because the other ranks send all of them.
        for _ in weights:
            pass


def hugging_face_config(config: DecoderConfig, head: str, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of config.json, from which transformers finds class and dtype."""
    tree: dict[str, Any] = dict(config.raw) or _fields(config)
    if not tree.get("architectures"):
        # Written explicitly, as transformers' default ids fit Llama's vocabulary only.
        tree = {"bos_token_id": None, "eos_token_id": None, **tree}
    task = "SequenceClassification" if head == "scalar" else "CausalLM"
    tree["architectures"] = [f"{_FAMILIES[str(tree['model_type'])]}For{task}"]
    tree["torch_dtype"] = str(dtype).removeprefix("torch.")
    tree.pop("dtype", None)
    if head == "scalar":
        tree |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return tree


def _fields(config: DecoderConfig) -> dict[str, Any]:
    family = "qwen3" if config.has_qk_norm else "qwen2" if config.has_qkv_bias else "llama"
    return {
        "model_type": family, "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions, "tie_word_embeddings": config.is_tied,
        "initializer_range": config.initializer_range, "rope_parameters": dict(config.rope),
    }  # fmt: skip


@torch.no_grad()
def _gathered(held: Held) -> Iterator[tuple[str, Tensor]]:
    """Yields weights by name; whole on the first rank, where each overwrites the previous one."""
    shapes = weight_shapes(held.model.config, held.model.head_kind)
    boxes = {name: Box((0,) * len(shape), shape) for name, shape in shapes.items()}
    like = next(held.model.parameters())
    nothing: list[Boxes] = [{} for _ in held.boxes[1:]]
    wanted = [{name: [box] for name, box in boxes.items()}, *nothing]
    transfers = plan_boxes(held.boxes, wanted, like.element_size()).transfers
    is_first = held.group is None or held.group.rank == 0
    largest = max(map(math.prod, shapes.values())) if is_first else 0
    space = torch.empty(largest, dtype=like.dtype, device=like.device)
    for name, shape in shapes.items():
        whole = space[: math.prod(shape)].view(shape) if is_first else space
        own = [(p.box, p.view(held.model)) for p in held.pieces if p.name == name]
        if held.group is None:
            whole.copy_(own[0][1])
        else:
            landing = [(boxes[name], whole)] if is_first else []
            move = reshard.Move(transfers=transfers[name], held=own, wanted=landing)
            reshard.run(held.group, [move], phase="export")
        yield name, whole


def _write_weights(
    model: Decoder, weights: Iterator[tuple[str, Tensor]], folder: Path, max_file_bytes: int
) -> None:
    dtype = next(model.parameters()).dtype
    shapes = weight_shapes(model.config, model.head_kind)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    files: list[list[str]] = [[]]
    for name, size in sizes.items():
        if files[-1] and sum(sizes[other] for other in files[-1]) + size > max_file_bytes:
            files.append([])
        files[-1].append(name)
    places = {}
    for k, names in enumerate(files, 1):
        file = f"model-{k:05d}-of-{len(files):05d}.safetensors"
        file = file if len(files) > 1 else "model.safetensors"
        places |= dict.fromkeys(names, file)
        _write_file(folder / file, {name: shapes[name] for name in names}, dtype, weights)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)


def _write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    weights: Iterator[tuple[str, Tensor]],
) -> None:
    """Writes the next weights in the safetensors format, and releases each once written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        place = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        header[name] = place
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the values
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, (_, whole) in zip(shapes, weights, strict=False):
            file.write(whole.cpu().view(torch.uint8).numpy().data)
