"""Parts that U-Nets and ControlNets share: embeddings, and blocks as steps of one hidden state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.job.layers import Layer, State, keep_modules
from shared.errors import ConfigError, DataError

__all__ = [
    "EMBEDDING",
    "TEXT",
    "Step",
    "build_layer",
    "embed",
    "embedding_modules",
    "embedding_reads",
    "list_block_steps",
    "list_middle_steps",
    "refuse_uneven",
    "text_key",
]

# Key of the time embedding, and of the text as it is given.
EMBEDDING = "emb"
TEXT = "encoder_hidden_states"

_ADDED = "added_cond_kwargs"
# A block of these classes computes its resnets, each followed by its attention if it has one, and
# then its sampler. Other blocks go other ways.
_BLOCKS = (
    "AttnDownBlock2D",
    "AttnUpBlock2D",
    "CrossAttnDownBlock2D",
    "CrossAttnUpBlock2D",
    "DownBlock2D",
    "UpBlock2D",
)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the hidden state.

    Attributes:
        name: of the layer.
        run: from the hidden state, the time embedding and the text to the next hidden state.
        modules: that hold its parameters.
        reads_time: whether it reads the time embedding.
        reads_text: whether it reads the text.
        is_pair: whether it is a resnet with its attention; in the second half these read a skip.
    """

    name: str
    run: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    modules: tuple[nn.Module, ...]
    reads_time: bool
    reads_text: bool
    is_pair: bool


def build_layer(
    step: Step,
    hidden: str,
    written: str,
    text: str | None,
    skip: tuple[str, ...] = (),
    time: str = EMBEDDING,
) -> Layer:
    """Makes a layer of a step.

    Args:
        step: what it computes.
        hidden: key of the hidden state that it reads.
        written: key of the one that it writes.
        text: key of the text.
        skip: keys of a skip, whose sum is joined to the hidden state's channels.
        time: key of the time embedding.
    """
    time_key = time if step.reads_time else None
    words_key = text if step.reads_text else None

    def call(state: State) -> dict[str, Tensor]:
        value = state[hidden]
        if skip:
            joined = state[skip[0]]
            for key in skip[1:]:
                joined = joined + state[key]
            value = torch.cat([value, joined], dim=1)
        emb = state[time_key] if time_key else None
        return {written: step.run(value, emb, state[words_key] if words_key else None)}

    reads = (hidden, *(key for key in (time_key, words_key) if key), *skip)
    return Layer(step.name, call, reads, (written,), step.modules)


def list_block_steps(block: Any, name: str) -> list[Step]:
    """Lists a block's pairs and its sampler.

    Raises:
        ConfigError: a block of another kind.
    """
    kind = type(block).__name__
    if kind not in _BLOCKS:
        raise ConfigError(
            f"{name}: expected a block of the kinds {', '.join(_BLOCKS)}, got {kind}; do hand over "
            "a list of layers instead of the model"
        )
    attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
    reads_text = _has_text(block)
    steps = [
        Step(
            f"{name}.{index}",
            partial(_run_pair, resnet, attention),
            keep_modules(resnet, attention),
            reads_time=True,
            reads_text=reads_text,
            is_pair=True,
        )
        for index, (resnet, attention) in enumerate(zip(block.resnets, attentions, strict=True))
    ]
    kinds = (getattr(block, "downsample_type", None), getattr(block, "upsample_type", None))
    samplers = getattr(block, "downsamplers", None) or getattr(block, "upsamplers", None) or ()
    steps += [
        Step(
            f"{name}.sampler",
            partial(_run_sampler, sampler),
            (sampler,),
            reads_time="resnet" in kinds,
            reads_text=False,
            is_pair=False,
        )
        for sampler in samplers
    ]
    return steps


def list_middle_steps(model: Any) -> list[Step]:
    """Lists a model's middle block, if it has one."""
    middle = model.mid_block
    if middle is None:
        return []
    reads_text = _has_text(middle)
    run = partial(_run_middle, middle)
    return [Step("middle", run, (middle,), reads_time=True, reads_text=reads_text, is_pair=False)]


def text_key(model: Any) -> str | None:
    """The key of the text that attentions read: projected by the head, as given, or None."""
    if not any(_has_text(block) for block in (*model.down_blocks, model.mid_block)):
        return None
    return TEXT if getattr(model, "encoder_hid_proj", None) is None else "text"


def embed(model: Any, state: State) -> Tensor:
    """Computes the embedding of time, class and added conditions.

    Args:
        model: a U-Net or a ControlNet.
        state: holds the keys of `embedding_reads`.
    """
    sample = state["sample"]
    timestep = state["timestep"].to(sample.device).expand(len(sample))
    emb = model.time_embedding(model.time_proj(timestep).to(dtype=sample.dtype))
    if model.class_embedding is not None:
        labels = state["class_labels"]
        if model.config.class_embed_type == "timestep":
            labels = model.time_proj(labels).to(dtype=sample.dtype)
        labels = model.class_embedding(labels).to(dtype=sample.dtype)
        is_joined = getattr(model.config, "class_embeddings_concat", False)
        emb = torch.cat([emb, labels], dim=-1) if is_joined else emb + labels
    kind = _added_kind(model)
    if kind == "text":
        emb = emb + model.add_embedding(state[TEXT])
    elif kind == "text_time":
        text, ids = state[f"{_ADDED}.text_embeds"], state[f"{_ADDED}.time_ids"]
        times = model.add_time_proj(ids.flatten()).reshape(len(text), -1)
        emb = emb + model.add_embedding(torch.cat([text, times], dim=-1).to(emb.dtype))
    activation = getattr(model, "time_embed_act", None)
    return emb if activation is None else activation(emb)


def embedding_reads(model: Any) -> tuple[str, ...]:
    """Keys that `embed` and a text's projection read.

    Raises:
        ConfigError: the model adds conditions or projects texts in a way not known here.
    """
    reads = ["sample", "timestep"]
    if model.class_embedding is not None:
        reads.append("class_labels")
    kind = _added_kind(model)
    if kind == "text_time":
        reads += [f"{_ADDED}.text_embeds", f"{_ADDED}.time_ids"]
    elif kind not in (None, "text"):
        raise ConfigError(
            f"addition_embed_type: expected None, 'text' or 'text_time', got {kind!r}; do hand over "
            "a list of layers instead of the model"
        )
    projection = getattr(model, "encoder_hid_proj", None)
    if projection is not None and model.config.encoder_hid_dim_type != "text_proj":
        raise ConfigError(
            "encoder_hid_dim_type: expected None or 'text_proj', got "
            f"{model.config.encoder_hid_dim_type!r}; do hand over a list of layers instead of the "
            "model"
        )
    if projection is not None or kind == "text":
        reads.append(TEXT)
    return tuple(reads)


def embedding_modules(model: Any) -> tuple[nn.Module, ...]:
    """Modules of `embed` and of a text's projection."""
    names = ("time_proj", "time_embedding", "class_embedding", "add_time_proj", "add_embedding")
    return keep_modules(*(getattr(model, name, None) for name in (*names, "encoder_hid_proj")))


def refuse_uneven(model: Any, sample: Tensor) -> None:
    """Refuses images that do not halve evenly: a sampler would need the size of a pending skip.

    Raises:
        DataError: rows or columns are no multiple of the product of all halvings.
    """
    factor = 2 ** sum(bool(getattr(block, "downsamplers", None)) for block in model.down_blocks)
    if any(size % factor for size in sample.shape[-2:]):
        raise DataError(
            f"sample: expected rows and columns that are multiples of {factor}, got "
            f"{list(sample.shape[-2:])}; do crop or pad the images"
        )


def _added_kind(model: Any) -> str | None:
    return getattr(model.config, "addition_embed_type", None)


def _run_pair(
    resnet: Any, attention: Any, hidden: Tensor, emb: Tensor | None, text: Tensor | None
) -> Tensor:
    hidden = resnet(hidden, emb)
    if attention is None:
        return hidden
    if text is None:
        return attention(hidden)
    return attention(hidden, encoder_hidden_states=text, return_dict=False)[0]


def _run_middle(middle: Any, hidden: Tensor, emb: Tensor | None, text: Tensor | None) -> Tensor:
    if text is None:
        return middle(hidden, emb)
    return middle(hidden, emb, encoder_hidden_states=text)


def _run_sampler(sampler: Any, hidden: Tensor, emb: Tensor | None, _: Tensor | None) -> Tensor:
    return sampler(hidden) if emb is None else sampler(hidden, temb=emb)


def _has_text(block: Any) -> bool:
    return bool(getattr(block, "has_cross_attention", False))
