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
from torch import Tensor

from shared.errors import DataError
from swift.undo.torch_step import local

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

    Buffers are looked up in the module whenever they are used, as a forward pass may replace one.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        stateful: Sequence[Stateful] = (),
        frozen: str = "",
    ) -> None:
        """Keeps nothing yet.

        Args:
            module: whose buffers are meant.
            optimizer: whose hyperparameters are.
            stateful: schedulers and the like.
            frozen: describes parameters that no step changes; a state is taken only where it is the same.
        """
        self._frozen = frozen
        self._optimizer = optimizer
        self._stateful = tuple(stateful)
        self._kept: dict[int, Any] = {}
        self._module = module
        self._saved = frozenset(module.state_dict())

    def rebind(self, module: torch.nn.Module) -> None:
        """Takes the buffers of a module like the one before, as they are."""
        self._module = module

    @property
    def buffers(self) -> dict[str, Tensor]:
        """All buffers by name, of DTensors the parts on this rank."""
        return {name: local(one) for name, one in self._module.named_buffers()}

    @property
    def shared_buffers(self) -> list[Tensor]:
        """Those of the module's state dict, which forward passes change, as BatchNorm its running means.

        All ranks take rank 0's. The other buffers are constants.
        """
        return [one for name, one in self.buffers.items() if name in self._saved]

    def keep(self, version: int) -> None:
        """Keeps a copy for `restore`, as of `version` steps, and that of the version before."""
        before = {at: kept for at, kept in self._kept.items() if at == version - 1}
        self._kept = {**before, version: _copied(self._live())}

    def restore(self, version: int) -> None:
        """Puts back what `keep` kept of a version."""
        self._load(_copied(self._kept[version]))

    def pack(self) -> Tensor:
        """Everything as bytes, equal where the values are equal."""
        return pack(self._live())

    def load(self, packed: Tensor) -> None:
        """Takes what another rank has packed."""
        self._load(unpack(packed))

    def _live(self) -> dict[str, Any]:
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        return {
            "buffers": self.buffers,
            "groups": groups,
            "stateful": [one.state_dict() for one in self._stateful],
            "frozen": self._frozen,
        }

    def _load(self, state: dict[str, Any]) -> None:
        if state["frozen"] != self._frozen:
            raise DataError(
                f"expected frozen parameters as the state was trained with, {state['frozen']}, got "
                f"{self._frozen}; load the same base model before the loop"
            )
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                buffer.copy_(state["buffers"][name])
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
        return {key: _copied(one) for key, one in value.items()}
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
        return {key: _replaced(one, kind, replace) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(one, kind, replace) for one in value)
    return value
