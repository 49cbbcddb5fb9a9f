"""What an allocator reserves for a trace, beside what is needed: fragmentation, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memo.planner.addresses.blocks import reserve_expandable, reserve_segments
from memo.planner.addresses.packing import pack
from memo.planner.addresses.trace import Trace
from shared.errors import ConfigError
from shared.registry import Registry

__all__ = ["ALLOCATORS", "Emulation", "emulate"]

_PLANNING_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """Memory that an allocator takes; simulated, not measured.

    Attributes:
        allocator: its name.
        reserved_bytes: bytes taken from the device and never given back.
        needed_bytes: the most bytes that are alive at once, over all traces.
    """

    allocator: str
    reserved_bytes: int
    needed_bytes: int

    @property
    def overhead(self) -> float:
        """Reserved bytes a byte needed."""
        return self.reserved_bytes / self.needed_bytes if self.needed_bytes else 1.0


def _reserve_planned(traces: Sequence[Trace]) -> int:
    """One arena for all traces, as large as the largest of their plans."""
    share_s = _PLANNING_S / len(traces)
    return max(pack(trace, time_limit_s=share_s).peak for trace in traces)


ALLOCATORS: Registry[str, Callable[[Sequence[Trace]], int]] = Registry("allocator")
ALLOCATORS.add("caching", reserve_segments, "PyTorch's caching allocator, which never flushes")
ALLOCATORS.add("expandable", reserve_expandable, "the same with expandable segments")
ALLOCATORS.add("planned", _reserve_planned, "static addresses of `pack`")


def emulate(trace: Trace | Sequence[Trace], allocator: str = "caching") -> Emulation:
    """What an allocator reserves for one step, or for steps one after another.

    Between two traces everything is freed, and nothing is given back to the device.

    Args:
        trace: one, or several in order.
        allocator: "caching" is PyTorch's, which never flushes; "expandable" the same with expandable
            segments; "planned" the static addresses of `pack`.

    Returns:
        Bytes that are reserved, beside the most that are alive at once.

    Raises:
        ConfigError: there is no such allocator, or no trace.
    """
    ALLOCATORS.check(allocator)
    traces = list(trace) if isinstance(trace, Iterable) else [trace]
    if not traces or not all(isinstance(one, Trace) for one in traces):
        raise ConfigError(
            f"emulate: expected at least one trace, each a memo.Trace, got {trace!r:.60}; read one by "
            "Trace.from_csv or Trace.from_cuda_snapshot"
        )
    return Emulation(
        allocator=allocator,
        reserved_bytes=ALLOCATORS.get(allocator)(traces),
        needed_bytes=max(one.load_bytes for one in traces),
    )
