"""What the planner asks of a profile: seconds and bytes on each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["Costs", "FreeCosts"]


@runtime_checkable
class Costs(Protocol):
    """Times and memory of the devices that a plan may use, by their number from 0.

    A measured profile is one; a roofline of data sheets, for simulations, another.
    """

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        ...

    @property
    def bits(self) -> tuple[int, ...]:
        """Weight widths that were measured, ascending."""
        ...

    def kind(self, device: int) -> str:
        """Name of the device's kind: devices of one kind have equal times and memory."""
        ...

    def prefill_s(self, device: int, bits: int, *, batch: int, tokens: int) -> float:
        """Seconds of one decoder layer for `batch` prompts of `tokens` tokens each.

        Raises:
            ConfigError: the device was not measured at this width; names both.
        """
        ...

    def decode_s(self, device: int, bits: int, *, batch: int, past: int) -> float:
        """Seconds of one decoder layer for one new token of each of `batch` prompts.

        Args:
            device: the device's number.
            bits: weight width.
            batch: prompts in the micro-batch.
            past: tokens before the new one.
        """
        ...

    def ends_s(self, device: int, *, batch: int, tokens: int) -> float:
        """Seconds of embedding `batch` x `tokens` tokens, and of head and sampling for `batch`."""
        ...

    def send_s(self, sender: int, receiver: int, num_bytes: int) -> float:
        """Seconds of a message; 0 from a device to itself."""
        ...

    def memory_bytes(self, device: int) -> int:
        """Bytes that weights, caches and temporaries may take."""
        ...


class FreeCosts:
    """Devices that take no time, for checks of memory before anything is measured."""

    def __init__(self, bits: Sequence[int], memory: Sequence[int]) -> None:
        """Takes the widths, and the bytes of each device."""
        self.bits, self._memory = tuple(bits), tuple(memory)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self._memory)

    def kind(self, device: int) -> str:
        """One kind for each size of memory."""
        return f"{self._memory[device]} bytes"

    def prefill_s(self, device: int, bits: int, *, batch: int, tokens: int) -> float:
        """No time."""
        return 0.0

    def decode_s(self, device: int, bits: int, *, batch: int, past: int) -> float:
        """No time."""
        return 0.0

    def ends_s(self, device: int, *, batch: int, tokens: int) -> float:
        """No time."""
        return 0.0

    def send_s(self, sender: int, receiver: int, num_bytes: int) -> float:
        """No time."""
        return 0.0

    def memory_bytes(self, device: int) -> int:
        """Bytes that the device may hold."""
        return self._memory[device]
