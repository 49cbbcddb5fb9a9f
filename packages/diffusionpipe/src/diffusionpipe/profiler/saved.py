"""Counts what each layer keeps for its backward, and what an encoder needs while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffusionpipe.job.chain import Chain
from diffusionpipe.job.layers import OUTPUT, State

__all__ = ["count_saved_bytes", "count_working_bytes"]


def count_saved_bytes(
    chain: Chain, state: State, loss: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[int], dict[str, Tensor]]:
    """Runs all layers and counts the memory that they keep.

    Args:
        chain: of layers.
        state: the backbone's inputs.
        loss: of the output; what it keeps, such as output and target, counts at the last layer.

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
            if loss is not None and index == len(chain) - 1:
                loss(values[OUTPUT])
    return counts, values


def count_working_bytes(run: Callable[[], object]) -> int:
    """Runs a function and counts the most memory of its intermediate values and results at once."""
    with _LiveStorages() as live:
        run()
    return live.peak_bytes


class _LiveStorages(TorchDispatchMode):
    """Follows the memory that operators give out, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._live: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        # Views of weights and of inputs are nothing new.
        old = {id(storage) for storage in _list_storages((args, kwargs))}
        for storage in _list_storages(results):
            if id(storage) not in old:
                self._live[storage] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return results


def _list_storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
