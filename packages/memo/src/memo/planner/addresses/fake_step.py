"""Records what a training step would allocate, on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shared.errors import DataError

__all__ = ["record_step"]


class _StorageRecorder(TorchDispatchMode):
    """Writes an event for each storage that an operator makes, and one when it is released."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.events: list[tuple] = []
        # By storage rather than by tensor: views share one. torch keeps a storage's Python object as
        # long as its bytes, so that its identity is theirs; the known are held for that.
        self._known = [tensor.untyped_storage() for tensor in known]
        self._alive: dict[int, Any] = {id(storage): storage for storage in self._known}
        self._num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return made

    def _follow(self, storage: Any) -> None:
        identity = id(storage)
        if identity in self._alive:
            return
        number = self._num_seen
        self._num_seen += 1

        def release(_: Any) -> None:
            del self._alive[identity]
            self.events.append(("free", number))

        self._alive[identity] = weakref.ref(storage, release)
        self.events.append(("alloc", number, storage.nbytes()))


class _Step(torch.nn.Module):
    """Forward and backward in one call, so that parameters are replaced for both."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> None:
        made = self.model(**batch) if isinstance(batch, Mapping) else self.model(batch)
        loss = made if isinstance(made, torch.Tensor) else getattr(made, "loss", None)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise DataError(
                "from_fake: expected the model to return a loss that depends on its parameters, as a "
                f"tensor or as .loss, got {type(made).__name__}; pass labels in the batch"
            )
        (loss if loss.ndim == 0 else loss.sum()).backward()


def record_step(model: torch.nn.Module, batch: Any) -> list[tuple]:
    """Events of one forward and backward, as `Trace.from_events` takes them.

    Args:
        model: see `Trace.from_fake`.
        batch: see there.
    """
    with FakeTensorMode():

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            like = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            return like.requires_grad_(tensor.requires_grad)

        # Tied parameters are one object, and stay one.
        fakes = {tensor: fake(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        named = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        replaced = {f"model.{name}": fakes[tensor] for name, tensor in named.items()}
        batch = tree_map_only(
            torch.Tensor, fake, dict(batch) if isinstance(batch, Mapping) else batch
        )
        given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        recorder = _StorageRecorder([*fakes.values(), *given])
        with recorder:
            torch.func.functional_call(_Step(model), replaced, (batch,))
        # What lives on, gradients among it, is released after the step and is none of it.
        return list(recorder.events)
