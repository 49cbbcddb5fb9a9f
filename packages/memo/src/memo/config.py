"""What a user states: how much memory there is, and what a plan that exceeds it raises."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigError
from shared.units import parse_bytes

__all__ = ["Budget", "DoesNotFit"]


class DoesNotFit(ConfigError):
    """A training step exceeds the budget under every plan; raised before any step."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Hard limits of memory.

    Attributes:
        device: most bytes that the process may hold on the device, parameters, gradients and optimizer
            state among them: a number, or a text such as "6GiB". The device is the model's: a GPU, or
            RAM.
        store: most bytes of activations outside of it: in pinned host memory for a GPU, in a file for RAM.
            0 is no store.
        store_at: where these lie: "memory", "pinned" or "file:DIR"; None chooses pinned memory for a GPU
            and a file in the folder of temporary files for RAM.
    """

    device: int | str
    store: int | str = 0
    store_at: str | None = None

    def __post_init__(self) -> None:
        for name in ("device", "store"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, parse_bytes(value))
            except ConfigError as error:
                raise ConfigError(f"budget.{name}: {error}") from error
        if self.device_bytes == 0:
            raise ConfigError(
                "budget.device: expected more than 0 bytes; say how much memory there is"
            )

    @property
    def device_bytes(self) -> int:
        """Limit of the device in bytes."""
        return int(self.device)

    @property
    def store_bytes(self) -> int:
        """Limit of the store in bytes."""
        return int(self.store)
