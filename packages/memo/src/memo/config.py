"""What a user states: how much memory there is, and what a plan that exceeds it raises."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigError
from shared.units import parse_bytes

__all__ = ["Budget", "DoesNotFit", "check_store", "read_bytes", "shown"]


class DoesNotFit(ConfigError):
    """A training step exceeds the budget under every plan; raised before any step."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Hard limits of memory.

    Attributes:
        device: most bytes that the process may hold on the device, parameters, gradients and optimizer
            state among them: a number, or a text such as "6GiB". The device is the model's: a GPU, or
            RAM. Of a GPU it is what `torch.cuda.max_memory_allocated` counts: what the allocator
            reserves beyond that, see `memo.emulate`, needs room of its own.
        store: most bytes of activations outside of it: in pinned host memory for a GPU, in a file for RAM.
            0 is no store.
        store_at: where these lie: "memory", "pinned" or "file:DIR"; None chooses pinned memory for a GPU
            and a file in the folder of temporary files for RAM.

    Raises:
        ConfigError: a size is none, the device has none, no store has this name, or the one named has no bytes.
    """

    device: int | str
    store: int | str = 0
    store_at: str | None = None

    def __post_init__(self) -> None:
        for name in ("device", "store"):
            value = read_bytes(f"budget.{name}", getattr(self, name))
            object.__setattr__(self, name, value)
        if self.device_bytes == 0:
            raise ConfigError(
                "budget.device: expected more than 0 bytes, got 0; say how much memory there is"
            )
        if self.store_at is not None:
            check_store("budget.store_at", self.store_at)
            if self.store_bytes == 0:
                raise ConfigError(
                    f"budget.store: expected more than 0 bytes at {self.store_at!r}, got 0; say how much the store "
                    "may take, or leave store_at out"
                )

    @property
    def device_bytes(self) -> int:
        """Limit of the device in bytes."""
        return int(self.device)

    @property
    def store_bytes(self) -> int:
        """Limit of the store in bytes."""
        return int(self.store)


def check_store(where: str, name: object) -> None:
    """Refuses what names no store.

    Args:
        where: the setting, for the message.
        name: what it is set to.

    Raises:
        ConfigError: with the names there are.
    """
    is_folder = isinstance(name, str) and name.startswith("file:") and name != "file:"
    if name not in ("memory", "pinned") and not is_folder:
        is_path = isinstance(name, str) and "/" in name
        advice = f"for a folder write 'file:{name}'" if is_path else "take one of these"
        raise ConfigError(
            f"{where}: expected 'memory', 'pinned' or 'file:DIR', got {name!r}; {advice}"
        )


def read_bytes(where: str, value: object) -> int:
    """Reads a size, a number of bytes or a text such as "6GiB".

    Args:
        where: the setting, for the message.
        value: what it is set to.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{where}: expected a size such as '6GiB', got {value!r}; state one")
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def shown(value: object) -> str:
    """A value as a message shows it: on one line, at most 60 characters of it."""
    return " ".join(repr(value).split())[:60]
