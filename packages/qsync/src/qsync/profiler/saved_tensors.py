"""Records what a float32 step keeps for its backward pass, by `saved_tensors_hooks`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from qsync.planner.memory import SavedTensor
from qsync.profiler.gradients import LossFunction
from qsync.profiler.state import in_float32, preserve_state
from qsync.profiler.step_timing import END, watch_operators
from qsync.runtime.modules import MatMul, list_operators

__all__ = ["measure_saved_bytes", "record_saved_tensors"]


class _Recorder:
    """Collects saved tensors; storages are told apart by their address while they are alive."""

    def __init__(self, model: nn.Module) -> None:
        self.saved: list[SavedTensor] = []
        self._operators = list_operators(model)
        # Buffers and parameters are there anyway. Kept alive, no address is used twice.
        self._alive: list[Any] = [*model.parameters(), *model.buffers()]
        self._own = {each.untyped_storage().data_ptr() for each in self._alive}
        # What each running operator has saved, by address.
        self._running: list[dict[int, Tensor]] = []

    def enter(self, _: str, __: tuple[Any, ...]) -> None:
        """Begins an operator."""
        self._running.append({})

    def leave(self, name: str, inputs: tuple[Any, ...], _: Any) -> None:
        """Records the factors that the operator has saved, of which a lowered one keeps copies."""
        saved = self._running.pop()
        module: Any = self._operators[name]
        if isinstance(module, nn.Embedding) or not saved:
            return
        if isinstance(module, MatMul):
            for factor, other, dim in (*inputs, -1), (*inputs[::-1], -2):
                if other.requires_grad:
                    self._note(name, "operand", factor, factor.numel() // factor.shape[dim])
            return
        weight = module.weight
        is_saved = saved.pop(weight.untyped_storage().data_ptr(), None) is not None
        # torch's convolutions keep both factors even if only one's gradient is asked for.
        if is_saved and inputs[0].requires_grad:
            self._note(name, "weight", weight, weight.shape[0])
        role = "operand" if weight.requires_grad else "unused"
        # The input as it was multiplied, which may be a padded copy.
        for factor in saved.values():
            is_linear = isinstance(module, nn.Linear)
            num_rows = factor.numel() // factor.shape[-1] if is_linear else factor.shape[0]
            self._note(name, role, factor, num_rows)

    def pack(self, tensor: Tensor) -> Tensor:
        """Records a tensor that is kept; operators' own factors are recorded by `leave`."""
        storage = tensor.untyped_storage()
        if self._running and tensor.is_floating_point():
            self._running[-1][storage.data_ptr()] = tensor
            return tensor
        if storage.data_ptr() in self._own:
            return tensor
        self._alive.append(storage)
        is_float32 = tensor.dtype == torch.float32
        self.saved.append(
            SavedTensor(
                op=END,
                source=str(storage.data_ptr()),
                numel=storage.nbytes() // 4 if is_float32 else storage.nbytes(),
                role="result" if is_float32 else "constant",
            )
        )
        return tensor

    def _note(self, name: str, role: Any, tensor: Tensor, num_scales: int) -> None:
        self._alive.append(tensor.untyped_storage())
        self.saved.append(
            SavedTensor(
                op=name,
                source=str(tensor.untyped_storage().data_ptr()),
                numel=tensor.numel(),
                role=role,
                num_scales=num_scales,
            )
        )


def record_saved_tensors(
    model: nn.Module, batch: Any, loss_fn: LossFunction
) -> tuple[SavedTensor, ...]:
    """Runs one forward pass in float32 and records what it keeps.

    Args:
        model: model; it is left as it was.
        batch: a training batch.
        loss_fn: returns the loss of (model, batch).
    """
    recorder = _Recorder(model)
    with (
        preserve_state(model),
        in_float32(model),
        torch.enable_grad(),
        watch_operators(model, recorder.enter, recorder.leave),
        saved_tensors_hooks(recorder.pack, lambda tensor: tensor),
    ):
        loss = loss_fn(model, batch)
    del loss
    return tuple(recorder.saved)


def measure_saved_bytes(model: nn.Module, batch: Any, loss_fn: LossFunction) -> int:
    """Counts the bytes of all storages that a forward pass keeps, at the model's precisions.

    Parameters and buffers do not count.
    """
    own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with (
        preserve_state(model),
        torch.enable_grad(),
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        loss = loss_fn(model, batch)
    del loss
    return sum(storage.nbytes() for storage in storages.values())
