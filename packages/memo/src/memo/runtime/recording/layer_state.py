"""What a layer's forward sees beside its arguments and parameters, so that it sees the same when it runs again.

Restored are attributes of the layer's modules, their buffers, submodules and hooks, the global random generators,
context variables, autocast and settings of torch. What lies deeper (in objects, globals, closures) is not: whether
it mattered shows in fingerprints of saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from copy import copy
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from memo.runtime.recording.arguments import tensors_in
from memo.runtime.recording.items import Watch, can_watch
from memo.runtime.recording.random_state import Generators

__all__ = ["LayerState"]

T = TypeVar("T")

# Parameters are compared by name and version: FSDP2 replaces them between a forward and its backward.
_PARAMETERS = "_parameters"

_REGISTRIES = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)}
"""Attributes in which torch keeps a module's buffers, submodules and hooks: restored by what is in them."""

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
"""How to read and set what `torch.nn.attention.sdpa_kernel` and others change for a while."""

_ABSENT: Any = object()

_MOST_BYTES = 1 << 16
"""Largest array whose contents are remembered, so that an error can name it."""


class LayerState:
    """What one forward of a layer sees, from before it until its backward."""

    def __init__(self, layer: nn.Module, source: Tensor) -> None:
        """Notes everything as it is now.

        Args:
            layer: whose forward is about to run.
            source: its input, on whose device it computes.
        """
        self._modules = {module: _attributes(module) for module in layer.modules()}
        self._names = {module: name for name, module in layer.named_modules()}
        self._contents = {
            (module, name): _contents(value)
            for module, attributes in self._modules.items()
            for name, value in attributes.items()
            if name not in _REGISTRIES and not isinstance(value, _IMMUTABLE)
        }
        self._watches = {
            (module, name): Watch(value)
            for module, attributes in self._modules.items()
            for name, value in attributes.items()
            if isinstance(value, Tensor) and can_watch(value)
        }
        self._dropped: set[tuple[nn.Module, str]] = set()
        self._context = copy_context()
        self._settings = [read() for read, _ in _SETTINGS]
        self._generators = Generators(source)
        self._autocast = _Autocast(source.device.type)

    def finish(self) -> None:
        """Lets go of what a second forward does not need, when the first one is over.

        Tensors that the forward itself replaced are mostly results which it leaves behind; they would
        stay in memory here.
        """
        self._generators.keep_drawn()
        for module, attributes in self._modules.items():
            own = vars(module)
            for name, value in list(attributes.items()):
                is_replaced = name not in _REGISTRIES and own.get(name) is not value
                if is_replaced and any(True for _ in tensors_in(value)):
                    del attributes[name]
                    self._dropped.add((module, name))
                    self._watches.pop((module, name), None)

    @property
    def written(self) -> list[str]:
        """Attributes whose tensors were written to in place since."""
        return [self._path(*key) for key, watch in self._watches.items() if watch.has_changed]

    @property
    def drawn(self) -> list[str]:
        """Names of the global random generators that have drawn since."""
        return self._generators.drawn

    @property
    def changed(self) -> list[str]:
        """Attributes that are not what they were, or do not hold what they held."""
        replaced = [
            self._path(module, name)
            for module, attributes in self._modules.items()
            for name, value in attributes.items()
            if name not in _REGISTRIES and vars(module).get(name, _ABSENT) is not value
        ]
        added = [
            self._path(module, name)
            for module, attributes in self._modules.items()
            for name in vars(module)
            if name not in attributes and name not in _REGISTRIES
        ]
        return list(dict.fromkeys([*replaced, *added, *self.suspects()]))

    def run(self, function: Callable[[], T]) -> T:
        """Calls a function that sees everything as it was; afterwards all is as before the call."""
        return self._context.copy().run(self._run, function)

    def suspects(self) -> list[str]:
        """What has changed since and is not restored, by the names of attributes."""
        changed = [
            self._path(module, name)
            for (module, name), contents in self._contents.items()
            if name in self._modules[module] and _contents(self._modules[module][name]) != contents
        ]
        return [*(self._path(*key) for key in self._dropped), *self.written, *changed]

    def _run(self, function: Callable[[], T]) -> T:
        with (
            self._restored(),
            self._generators.replay(),
            self._autocast.enter(),
            torch.enable_grad(),
        ):
            return function()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        now = {module: _attributes(module) for module in self._modules}
        settings = [read() for read, _ in _SETTINGS]
        wanted = {module: {**attributes} for module, attributes in self._modules.items()}
        for module, name in self._dropped:
            if name in now[module]:
                wanted[module][name] = now[module][name]
        try:
            for module, attributes in wanted.items():
                _restore(module, attributes)
            _set(self._settings, settings)
            yield
        finally:
            for module, attributes in now.items():
                _restore(module, attributes)
            _set(settings, [read() for read, _ in _SETTINGS])

    def _path(self, module: nn.Module, name: str) -> str:
        prefix = self._names[module]
        return f"{prefix}.{name}" if prefix else name


class _Autocast:
    """Autocast's settings of a device, to be entered again."""

    def __init__(self, device_type: str) -> None:
        """Notes them as they are now."""
        self._type = device_type
        self._is_enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)
        self._has_cache = torch.is_autocast_cache_enabled()

    def enter(self) -> torch.autocast:
        """A context in which they hold."""
        return torch.autocast(
            self._type, dtype=self._dtype, enabled=self._is_enabled, cache_enabled=self._has_cache
        )


_IMMUTABLE = (
    nn.Module, Tensor, bool, int, float, complex, str, bytes, type(None), tuple, frozenset, type, torch.dtype,
    torch.device,
)  # fmt: skip
"""Attributes that are compared by identity, or by other means."""


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes by name; of registries copies, without empty ones."""
    return {
        name: copy(value) if name in _REGISTRIES else value
        for name, value in vars(module).items()
        if name != _PARAMETERS and (name not in _REGISTRIES or value)
    }


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Gives a module attributes that `_attributes` returned."""
    own = vars(module)
    for name in list(own):
        if name in _REGISTRIES:
            if name != _PARAMETERS and not _has_same(own[name], attributes.get(name, ())):
                own[name].clear()
                own[name].update(attributes.get(name, ()))
        elif name not in attributes:
            del own[name]
    for name, value in attributes.items():
        if name not in _REGISTRIES and own.get(name, _ABSENT) is not value:
            own[name] = value


def _has_same(registry: Any, wanted: Any) -> bool:
    """Whether a registry has the same entries in the same order."""
    if len(registry) != len(wanted):
        return False
    if isinstance(registry, set):
        return registry == wanted
    pairs = zip(registry.items(), wanted.items(), strict=True) if wanted else ()
    return all(key == other and value is same for (key, value), (other, same) in pairs)


def _set(wanted: list[Any], current: list[Any]) -> None:
    for (_, write), value, present in zip(_SETTINGS, wanted, current, strict=True):
        if value != present:
            write(value)


def _contents(value: Any) -> Any:
    """What an object holds, as far as it is cheap to compare: identities of its parts, or an array's bytes."""
    if isinstance(value, dict):
        return [*value, *map(id, value.values())]
    if isinstance(value, list | set):
        return list(map(id, value))
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _MOST_BYTES else None
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return list(map(id, getattr(value, "__dict__", {}).values()))
