"""Stable Diffusion 3: a head, joint blocks of image and text tokens, a tail."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from diffusionpipe.job.adapters.transformer_steps import EMBEDDING, HIDDEN, TEXT, join_patches
from diffusionpipe.job.layers import OUTPUT, ChainLayer, State

__all__ = ["cut_sd3"]

_POOLED = "pooled_projections"


def cut_sd3(model: Any) -> tuple[nn.Module, list[ChainLayer], set[str]]:
    """Cuts an SD3Transformer2DModel."""

    def run_head(state: State) -> dict[str, Tensor]:
        return {
            "h0": model.pos_embed(state[HIDDEN]),
            "text0": model.context_embedder(state[TEXT]),
            EMBEDDING: model.time_text_embed(state["timestep"], state[_POOLED]),
        }

    def run_tail(state: State) -> dict[str, Tensor]:
        tokens = model.proj_out(model.norm_out(state[hidden], state[EMBEDDING]))
        patch = model.config.patch_size
        rows, columns = (size // patch for size in state[HIDDEN].shape[-2:])
        return {OUTPUT: join_patches(tokens, rows, columns, patch)}

    modules = (model.pos_embed, model.context_embedder, model.time_text_embed)
    reads = (HIDDEN, TEXT, _POOLED, "timestep")
    layers = [ChainLayer("head", run_head, reads, ("h0", "text0", EMBEDDING), modules)]
    hidden, text = "h0", "text0"
    for index, block in enumerate(model.transformer_blocks):
        # The last block drops the text.
        is_last = block.context_pre_only
        written = (f"h{index + 1}",) if is_last else (f"h{index + 1}", f"text{index + 1}")
        reads = (hidden, text, EMBEDDING)
        layers.append(
            ChainLayer(
                f"block{index}",
                partial(_run_block, block, reads, written),
                reads,
                written,
                (block,),
            )
        )
        hidden, text = written[0], written[-1]
    # Of the noisy latents, only rows and columns are read.
    reads = (hidden, EMBEDDING, HIDDEN)
    layers.append(ChainLayer("tail", run_tail, reads, (OUTPUT,), (model.norm_out, model.proj_out)))
    return model, layers, {EMBEDDING}


def _run_block(
    block: Any, reads: tuple[str, ...], written: tuple[str, ...], state: State
) -> dict[str, Tensor]:
    text, hidden = block(
        hidden_states=state[reads[0]], encoder_hidden_states=state[reads[1]], temb=state[reads[2]]
    )
    return dict(zip(written, (hidden, text), strict=False))
