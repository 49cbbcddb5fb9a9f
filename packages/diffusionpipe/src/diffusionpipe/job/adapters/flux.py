"""Flux: a head, blocks of image and text tokens in two streams, blocks of one stream, a tail."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.job.adapters.transformer_steps import EMBEDDING, HIDDEN, TEXT
from diffusionpipe.job.layers import OUTPUT, ChainLayer, State, keep_modules

__all__ = ["cut_flux"]

_POOLED = "pooled_projections"
# Positions, from which each block computes its rotations anew: they are inputs and cost no message,
# the rotations would.
_POSITIONS = ("txt_ids", "img_ids")
# Times come from 0 to 1.
_TIME_SCALE = 1000


def cut_flux(model: Any) -> tuple[nn.Module, list[ChainLayer], set[str]]:
    """Cuts a FluxTransformer2DModel."""
    has_guidance = model.config.guidance_embeds

    def run_head(state: State) -> dict[str, Tensor]:
        hidden = model.x_embedder(state[HIDDEN])
        times = [state[key].to(hidden.dtype) * _TIME_SCALE for key in time_keys]
        return {
            "h0": hidden,
            "text0": model.context_embedder(state[TEXT]),
            EMBEDDING: model.time_text_embed(*times, state[_POOLED]),
        }

    def run_tail(state: State) -> dict[str, Tensor]:
        return {OUTPUT: model.proj_out(model.norm_out(state[hidden], state[EMBEDDING]))}

    time_keys = ("timestep", "guidance") if has_guidance else ("timestep",)
    reads = (HIDDEN, TEXT, _POOLED, *time_keys)
    modules = (model.x_embedder, model.context_embedder, model.time_text_embed)
    layers = [ChainLayer("head", run_head, reads, ("h0", "text0", EMBEDDING), modules)]
    hidden, text = "h0", "text0"
    names = [("double", block) for block in model.transformer_blocks]
    names += [("single", block) for block in model.single_transformer_blocks]
    for index, (kind, block) in enumerate(names):
        reads = (hidden, text, EMBEDDING, *_POSITIONS)
        hidden, text = f"h{index + 1}", f"text{index + 1}"
        # Behind the last block nobody reads the text.
        written = (hidden, text) if index + 1 < len(names) else (hidden,)
        call = partial(_run_block, model.pos_embed, block, reads, written)
        layers.append(ChainLayer(f"{kind}{index}", call, reads, written, keep_modules(block)))
    tail = (model.norm_out, model.proj_out)
    layers.append(ChainLayer("tail", run_tail, (hidden, EMBEDDING), (OUTPUT,), tail))
    return model, layers, {EMBEDDING}


def _run_block(
    embed_positions: Any,
    block: Any,
    reads: tuple[str, ...],
    written: tuple[str, ...],
    state: State,
) -> dict[str, Tensor]:
    positions = torch.cat([_drop_batch(state[key]) for key in _POSITIONS], dim=0)
    text, hidden = block(
        hidden_states=state[reads[0]],
        encoder_hidden_states=state[reads[1]],
        temb=state[reads[2]],
        image_rotary_emb=embed_positions(positions),
    )
    return dict(zip(written, (hidden, text), strict=False))


def _drop_batch(positions: Tensor) -> Tensor:
    return positions[0] if positions.ndim == 3 else positions
