"""DiT: patches, blocks whose norms read time and class, a tail."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from diffusionpipe.job.adapters.transformer_steps import EMBEDDING, HIDDEN, join_patches
from diffusionpipe.job.layers import OUTPUT, ChainLayer, State

__all__ = ["cut_dit"]

_CONDITIONS = ("timestep", "class_labels")


def cut_dit(model: Any) -> tuple[nn.Module, list[ChainLayer], set[str]]:
    """Cuts a DiTTransformer2DModel. Its blocks embed time and class each for itself."""
    first, *others = model.transformer_blocks

    def run_head(state: State) -> dict[str, Tensor]:
        hidden = _run_block(first, model.pos_embed(state[HIDDEN]), state)
        # The tail's condition comes from the first block's embedding, whose weights live here.
        timestep, labels = (state[key] for key in _CONDITIONS)
        condition = first.norm1.emb(timestep, labels, hidden_dtype=hidden.dtype)
        return {"h0": hidden, EMBEDDING: condition}

    def run_tail(state: State) -> dict[str, Tensor]:
        value = state[hidden]
        shift, scale = model.proj_out_1(functional.silu(state[EMBEDDING])).chunk(2, dim=1)
        tokens = model.proj_out_2(model.norm_out(value) * (1 + scale[:, None]) + shift[:, None])
        # DiT takes square images only.
        side = int(tokens.shape[1] ** 0.5)
        return {OUTPUT: join_patches(tokens, side, side, model.patch_size)}

    reads = (HIDDEN, *_CONDITIONS)
    layers = [ChainLayer("block0", run_head, reads, ("h0", EMBEDDING), (model.pos_embed, first))]
    for index, block in enumerate(others):
        call = partial(_step, block, f"h{index}", f"h{index + 1}")
        reads = (f"h{index}", *_CONDITIONS)
        layers.append(ChainLayer(f"block{index + 1}", call, reads, (f"h{index + 1}",), (block,)))
    hidden = layers[-1].writes[0]
    tail = (model.norm_out, model.proj_out_1, model.proj_out_2)
    layers.append(ChainLayer("tail", run_tail, (hidden, EMBEDDING), (OUTPUT,), tail))
    return model, layers, {EMBEDDING}


def _step(block: Any, read: str, written: str, state: State) -> dict[str, Tensor]:
    return {written: _run_block(block, state[read], state)}


def _run_block(block: Any, hidden: Tensor, state: State) -> Tensor:
    timestep, labels = (state[key] for key in _CONDITIONS)
    return block(hidden, timestep=timestep, class_labels=labels)
