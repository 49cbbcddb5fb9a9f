"""Counts what each layer keeps for its backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from diffusionpipe.job.chain import Chain
from diffusionpipe.job.layers import State

__all__ = ["count_saved_bytes"]


def count_saved_bytes(chain: Chain, state: State) -> tuple[list[int], dict[str, Tensor]]:
    """Runs all layers and counts the memory that they keep.

    Args:
        chain: of layers.
        state: the backbone's inputs.

    Returns:
        Bytes by layer, without parameters and inputs, each piece of memory once; and all values.
    """
    values: dict[str, Tensor] = dict(state)
    kept = [*chain.model.parameters(), *chain.model.buffers(), *state.values()]
    seen = {tensor.untyped_storage().data_ptr() for tensor in kept}
    counts = [0] * len(chain)
    # Memory must not be freed and given out again while its addresses are compared.
    alive: list[Tensor] = []

    for index, layer in enumerate(chain.layers):

        def pack(tensor: Tensor, index: int = index) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                counts[index] += storage.nbytes()
                alive.append(tensor.detach())
            # An output that its own backward keeps would else keep itself, and all weights, for ever.
            return tensor.detach()

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            read = {
                k: values[k].detach().requires_grad_(values[k].requires_grad) for k in layer.reads
            }
            values.update(chain.run_layer(index, read))
    return counts, values
