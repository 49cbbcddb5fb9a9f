"""What a step changes besides parameters and their optimizer state, kept, put back and packed.

Buffers, the optimizer's hyperparameters, and the states of schedulers, scalers and the like.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from io import BytesIO
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from shared.errors import DataError
from swift.undo.torch_step import load_plain_values, local, plain_values

__all__ = ["Rest", "Stateful", "pack", "unpack"]


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, a scaler, or anything else whose state a step changes."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state of `state_dict`."""
        ...


class Rest:
    """The rest of a rank's state, and its copies as of the beginning of this step and the one before.

    Buffers of the module's state dict, as BatchNorm's running means, are looked up whenever they are used, as
    a forward pass may replace one. Other buffers are constants: tables as the module was built with them.

    Attributes:
        frozen: describes parameters that no step changes; a state is taken only where it is the same.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        stateful: Sequence[Stateful] = (),
    ) -> None:
        self.frozen = ""
        self._optimizer = optimizer
        self._stateful = tuple(stateful)
        self._kept: dict[int, Any] = {}
        self.rebind(module)

    def rebind(self, module: nn.Module) -> None:
        """Takes the buffers of a module like the one before, as they are."""
        self._module = module
        saved = module.state_dict().keys()
        self._names = [name for name, _ in module.named_buffers()]
        self._shared = frozenset(self._names) & saved
        self._constants = {
            name: local(one) for name, one in module.named_buffers() if name not in saved
        }

    @property
    def buffers(self) -> dict[str, Tensor]:
        """All buffers by name that the module was built with, of DTensors the parts on this rank."""
        live = dict(self._module.named_buffers())
        return {name: local(live[name]) for name in self._names if name in live}

    @property
    def shared_buffers(self) -> list[Tensor]:
        """Those that forward passes change; all ranks take rank 0's."""
        return [one for name, one in self.buffers.items() if name in self._shared]

    def keep(self, version: int) -> None:
        """Keeps a copy for `restore`, as of `version` steps, and that of the version before."""
        before = {at: kept for at, kept in self._kept.items() if at == version - 1}
        self._kept = {**before, version: _copied(self._state(self.buffers))}

    def restore(self, version: int) -> None:
        """Puts back what `keep` kept of a version."""
        self._load(_copied(self._kept[version]))

    def pack(self) -> Tensor:
        """Everything as bytes, equal where the values are equal.

        So is what the optimizer keeps about parameters besides tensors. `keep` leaves it out, as undoing
        a parameter's step restores it.
        """
        shared = {name: one for name, one in self.buffers.items() if name in self._shared}
        values = plain_values(self._optimizer)
        return pack({**self._state({**self._constants, **shared}), "values": values})

    def load(self, packed: Tensor) -> None:
        """Takes what another rank has packed.

        Raises:
            DataError: it was trained with other frozen parameters.
        """
        state = unpack(packed)
        frozen = state.get("frozen", self.frozen)
        if frozen != self.frozen:
            raise DataError(
                f"expected frozen parameters as the state was trained with, {frozen}, got "
                f"{self.frozen}; load the same base model before the loop"
            )
        with torch.no_grad():
            for name, constant in self._constants.items():
                constant.copy_(state["buffers"].pop(name))
        load_plain_values(self._optimizer, state.get("values", {}))
        self._load(state)

    def _state(self, buffers: dict[str, Tensor]) -> dict[str, Any]:
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        return {
            "buffers": buffers,
            "groups": groups,
            "stateful": [one.state_dict() for one in self._stateful],
            "frozen": self.frozen,
        }

    def _load(self, state: dict[str, Any]) -> None:
        live = self.buffers
        with torch.no_grad():
            for name, saved in state["buffers"].items():
                if name in live and live[name].shape == saved.shape:
                    live[name].copy_(saved)
                else:
                    path, _, own_name = name.rpartition(".")
                    setattr(self._module.get_submodule(path), own_name, saved)
        for one, saved in zip(self._stateful, state["stateful"], strict=True):
            one.load_state_dict(saved)
        for group, saved in zip(self._optimizer.param_groups, state["groups"], strict=True):
            for name, value in saved.items():
                # A scheduler writes into a tensor learning rate, and must find it again.
                if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return _rebuilt(value, {key: _copied(one) for key, one in value.items()})
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class _TensorBytes:
    """A tensor as it is pickled: equal tensors give equal bytes, which torch's own do not."""

    def __init__(self, tensor: Tensor) -> None:
        whole = tensor.detach().cpu().contiguous()
        self.dtype = str(whole.dtype).removeprefix("torch.")
        self.shape = tuple(whole.shape)
        self.data = whole.reshape(-1).view(torch.uint8).numpy().tobytes()

    def tensor(self) -> Tensor:
        """The tensor."""
        dtype = getattr(torch, self.dtype)
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)


def pack(value: Any) -> Tensor:
    """Dictionaries, lists, tensors and plain values as bytes [n], equal where the values are."""
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    # Without its memo, which objects are the same and which only equal leaves no trace.
    pickler.fast = True
    pickler.dump(_replaced(value, Tensor, _TensorBytes))
    return torch.from_numpy(np.frombuffer(buffer.getvalue(), dtype=np.uint8).copy())


def unpack(packed: Tensor) -> Any:
    """What `pack` packed."""
    value = pickle.loads(packed.cpu().numpy().tobytes())
    return _replaced(value, _TensorBytes, _TensorBytes.tensor)


def _replaced(value: Any, kind: type, replace: Any) -> Any:
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        items = {key: _replaced(one, kind, replace) for key, one in value.items()}
        return _rebuilt(value, items)
    if type(value) in (list, tuple):
        return type(value)(_replaced(one, kind, replace) for one in value)
    return value


def _rebuilt(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """A dictionary of the kind of `value`, as a Counter, with other values."""
    if type(value) is dict:
        return items
    rebuilt = copy.copy(value)
    for key, item in items.items():
        rebuilt[key] = item  # a Counter's `update` would add
    return rebuilt
