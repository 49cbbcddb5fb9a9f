"""Maps parts of Hugging Face's weights to a decoder's parameters.

A piece is a Hugging Face name, a box of that weight, and the rows of the parameter that hold it.
All code that converts layouts (loading, resharding, weight sync, checkpoints, export) works on
pieces, independently of fused and sharded parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.models.config import DecoderConfig
from hybridflow.models.decoder import Decoder, Layer, Shard
from shared.errors import DataError
from shared.kernels.philox import stream_key
from shared.topology.boxes import Box

__all__ = ["Piece", "initialize", "load", "local", "pieces", "weight_shapes"]


class Piece(NamedTuple):
    """A part of a weight.

    Attributes:
        name: Hugging Face's name of the weight.
        box: position in the whole weight in Hugging Face's layout.
        parameter: name of the decoder's parameter that holds it.
        rows: rows of that parameter.
        is_transposed: whether the parameter holds the transpose.
    """

    name: str
    box: Box
    parameter: str
    rows: slice
    is_transposed: bool = False

    def view(self, model: Decoder) -> Tensor:
        """A view of its values in a decoder, of the box's shape."""
        found = local(model.get_parameter(self.parameter).data)
        return found[self.rows].t() if self.is_transposed else found[self.rows]

    def cut(self, rows: range) -> Piece | None:
        """The part of it in some rows of the parameter, for a rank that holds only these rows."""
        start, stop = max(self.rows.start, rows.start), min(self.rows.stop, rows.stop)
        if start >= stop:
            return None
        dim = 1 if self.is_transposed else 0
        offsets, sizes = list(self.box.offsets), list(self.box.sizes)
        offsets[dim] += start - self.rows.start
        sizes[dim] = stop - start
        held = slice(start - rows.start, stop - rows.start)
        return self._replace(box=Box(tuple(offsets), tuple(sizes)), rows=held)


def local(values: Any) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return values.to_local() if hasattr(values, "to_local") else values


def weight_shapes(config: DecoderConfig, head: str = "vocabulary") -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights of a model, in order of the layers."""
    width, ffn, e = config.hidden_size, config.ffn_size, config.head_dim
    q, kv = config.num_heads * e, config.num_kv_heads * e
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for index in range(config.num_layers):
        at = f"model.layers.{index}"
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, width)
            if config.has_qkv_bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        if config.has_qk_norm:
            shapes[f"{at}.self_attn.q_norm.weight"] = (e,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (e,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (width, q)
        shapes[f"{at}.mlp.gate_proj.weight"] = (ffn, width)
        shapes[f"{at}.mlp.up_proj.weight"] = (ffn, width)
        shapes[f"{at}.mlp.down_proj.weight"] = (width, ffn)
        shapes[f"{at}.input_layernorm.weight"] = (width,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    if head == "scalar":
        shapes["score.weight"] = (1, width)
    elif not config.is_tied:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def pieces(model: Decoder, share: tuple[int, int] = (0, 1)) -> list[Piece]:
    """All pieces of a decoder, which together are all of its parameters.

    Args:
        model: a decoder on any device.
        share: this rank's index among the replicas that shard the parameters (FSDP2), and their
            number: each holds ceil(rows / number) consecutive rows, the last ones fewer or none.
    """
    index, count = share
    if count == 1:
        return list(_pieces(model))
    kept = []
    for piece in _pieces(model):
        total = len(model.get_parameter(piece.parameter))
        size = -(-total // count)
        part = piece.cut(range(min(index * size, total), min((index + 1) * size, total)))
        kept += [] if part is None else [part]
    return kept


def _pieces(model: Decoder) -> Iterator[Piece]:
    config, shard, e = model.config, model.shard, model.config.head_dim
    width = config.hidden_size

    def rows(name: str, start: int, values: Tensor, at: str, part: slice | None = None) -> Piece:
        part = slice(0, len(values)) if part is None else part
        offsets = (start,) + (0,) * (values.dim() - 1)
        return Piece(name, Box(offsets, (part.stop - part.start, *values.shape[1:])), at, part)

    if model.embedding is not None:
        start = shard.tp * len(model.embedding)
        yield rows("model.embed_tokens.weight", start, model.embedding, "embedding")
    for place, layer in enumerate(model.layers):
        assert isinstance(layer, Layer), "layers are made here"
        at, own = f"model.layers.{layer.index}", f"layers.{place}"
        first = 0
        for name, start, count in (
            ("q", shard.tp * shard.num_heads * e, shard.num_heads * e),
            ("k", shard.first_kv_head * e, shard.num_kv_heads * e),
            ("v", shard.first_kv_head * e, shard.num_kv_heads * e),
        ):
            part, to = slice(first, first + count), f"{at}.self_attn.{name}_proj"
            first += count
            yield rows(f"{to}.weight", start, layer.qkv, f"{own}.qkv", part)
            if layer.qkv_bias is not None:
                yield rows(f"{to}.bias", start, layer.qkv_bias, f"{own}.qkv_bias", part)
        for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
            if norm is not None:
                yield rows(f"{at}.self_attn.{name}.weight", 0, norm, f"{own}.{name}")
        ffn = len(layer.down)
        for to, name in ((f"{at}.self_attn.o_proj", "output"), (f"{at}.mlp.down_proj", "down")):
            size = len(getattr(layer, name))
            box = Box((0, shard.tp * size), (width, size))
            yield Piece(f"{to}.weight", box, f"{own}.{name}", slice(0, size), is_transposed=True)
        for k, name in enumerate(("gate", "up")):
            part = slice(k * ffn, (k + 1) * ffn)
            to = f"{at}.mlp.{name}_proj.weight"
            yield rows(to, shard.tp * ffn, layer.gate_up, f"{own}.gate_up", part)
        yield rows(f"{at}.input_layernorm.weight", 0, layer.input_norm, f"{own}.input_norm")
        to = f"{at}.post_attention_layernorm.weight"
        yield rows(to, 0, layer.post_norm, f"{own}.post_norm")
    if model.norm is not None:
        yield rows("model.norm.weight", 0, model.norm, "norm")
    if model.head is not None:
        name = "score.weight" if model.head_kind == "scalar" else "lm_head.weight"
        start = 0 if model.head_kind == "scalar" else shard.tp * len(model.head)
        yield rows(name, start, model.head, "head")


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """Initialises weights: norms one, biases zero, the rest normal; the same in every layout.

    Call it before `hybridflow.models.sharding.shard_over`.
    """
    names = list(weight_shapes(model.config, model.head_kind))
    shapes = weight_shapes(model.config, model.head_kind)
    for piece in pieces(model):
        view = piece.view(model)
        if piece.name.endswith("norm.weight"):
            view.fill_(1.0)
        elif piece.name.endswith("bias"):
            view.zero_()
        else:
            key = stream_key(seed, names.index(piece.name)) & (2**63 - 1)
            draw = torch.Generator().manual_seed(key)
            # Always in float32, so that a model in float64 starts from the same values.
            whole = torch.randn(shapes[piece.name], generator=draw)
            whole *= model.config.initializer_range
            view.copy_(whole[piece.box.within(Box((0,) * whole.dim(), tuple(whole.shape)))])


@torch.no_grad()
def load(
    model: Decoder, read: Callable[[str, Box], Tensor | None], share: tuple[int, int] = (0, 1)
) -> list[str]:
    """Fills a decoder piece by piece.

    Args:
        model: the decoder to fill.
        read: function that returns a box of a named weight, or None if there is no such weight.
        share: as in `pieces`.

    Returns:
        Names that were not found; their values are unchanged.

    Raises:
        DataError: if a weight has another shape.
    """
    missing = []
    for piece in pieces(model, share):
        found, view = read(piece.name, piece.box), piece.view(model)
        if found is None:
            missing.append(piece.name)
        elif found.shape != view.shape:
            raise DataError(
                f"{piece.name}: expected {list(view.shape)}, got {list(found.shape)}; the "
                f"weights belong to another config.json"
            )
        else:
            view.copy_(found)
    return missing


def folder_reader(
    folder: str | Path, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Callable[[str, Box], Tensor | None]:
    """Returns a reader of boxes in the safetensors files of `save_pretrained`; reads only boxes.

    Args:
        folder: folder of the files.
        shapes: of whole weights by config.json; the reader then refuses other shapes.

    Raises:
        DataError: if the folder has no such files.
    """
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder}: no .safetensors file there; save_pretrained writes them")
    opened = [safe_open(file, framework="pt") for file in files]
    holding = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - no mapping

    def read(name: str, box: Box) -> Tensor | None:
        expected = None if shapes is None else shapes[name]
        if name not in holding:
            # Files of a base model without a head have no prefix.
            name = name.removeprefix("model.")
        if name not in holding:
            return None
        part = holding[name].get_slice(name)
        if expected is not None and tuple(part.get_shape()) != expected:
            raise DataError(
                f"{folder}: {name} is {list(part.get_shape())}, and by config.json "
                f"{list(expected)}; the files belong to another model"
            )
        return part[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]

    return read


def num_bytes(config: DecoderConfig, itemsize: int, head: str = "vocabulary") -> int:
    """Bytes of a whole model's weights."""
    return itemsize * sum(map(math.prod, weight_shapes(config, head).values()))


def shard_boxes(
    config: DecoderConfig, shard: Shard, head: str = "vocabulary", share: tuple[int, int] = (0, 1)
) -> dict[str, list[Box]]:
    """The boxes that a rank holds, by name, without allocating them; `share` as in `pieces`."""
    found: dict[str, list[Box]] = {}
    for piece in pieces(Decoder(config, shard, head, device="meta"), share):
        found.setdefault(piece.name, []).append(piece.box)
    return found
