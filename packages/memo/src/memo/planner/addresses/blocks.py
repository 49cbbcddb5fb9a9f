"""Pools of blocks as PyTorch's CUDA caching allocator keeps them, by its published rules.

Sizes are rounded up to 512 bytes. Up to 1 MiB come from a pool of segments of 2 MiB, others from one of
segments of 20 MiB, or of a multiple of 2 MiB from 10 MiB on. The smallest free block that is large enough
is taken, and split if what is left is worth it; a freed block joins its free neighbours. No segment is
given back. With expandable segments a pool is one range of addresses that grows at its end by pages of
2 or 20 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from memo.planner.addresses.trace import Trace

__all__ = ["reserve_expandable", "reserve_segments"]

_ROUND = 512
_MIB = 1 << 20
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
_SEGMENT_ROUND = 2 * _MIB


@dataclass(slots=True, eq=False)
class _Block:
    """A run of bytes of a segment, and its neighbours there."""

    address: int
    num_bytes: int
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.num_bytes, self.address


class _Pool:
    """Blocks of one size class. `is_expandable`: one range that grows, in place of segments."""

    def __init__(self, *, is_small: bool, is_expandable: bool) -> None:
        self._is_small, self._is_expandable = is_small, is_expandable
        self._free: list[tuple[int, int]] = []
        self._at: dict[int, _Block] = {}
        self._last: _Block | None = None
        self.reserved_bytes = 0

    def take(self, num_bytes: int) -> _Block:
        """A block of at least `num_bytes`, already rounded."""
        slot = bisect_left(self._free, (num_bytes, 0))
        if slot < len(self._free):
            block = self._at[self._free[slot][1]]
        elif self._is_expandable:
            block = self._grow(num_bytes)
        else:
            block = self._add(self._segment_bytes(num_bytes))
        self._free.remove(block.key)
        block.is_free = False
        left = block.num_bytes - num_bytes
        if left >= _ROUND if self._is_small or self._is_expandable else left > _SMALL:
            self._split(block, num_bytes)
        return block

    def give_back(self, block: _Block) -> None:
        """Frees a block, which joins its free neighbours."""
        block.is_free = True
        if block.after and block.after.is_free:
            self._free.remove(block.after.key)
            self._join(block, block.after)
        if block.before and block.before.is_free:
            self._free.remove(block.before.key)
            block = self._join(block.before, block)
        insort(self._free, block.key)

    def _segment_bytes(self, num_bytes: int) -> int:
        if self._is_small:
            return _SMALL_SEGMENT
        if num_bytes < _OWN_SEGMENT:
            return _LARGE_SEGMENT
        return _round_up(num_bytes, _SEGMENT_ROUND)

    def _add(self, num_bytes: int) -> _Block:
        """A new free block behind all others, of a segment of its own."""
        block = _Block(self.reserved_bytes, num_bytes)
        self.reserved_bytes += num_bytes
        self._at[block.address] = block
        insort(self._free, block.key)
        return block

    def _grow(self, num_bytes: int) -> _Block:
        """Maps pages at the end, behind what is free there."""
        last = self._last
        at_hand = last.num_bytes if last and last.is_free else 0
        page = _SMALL_SEGMENT if self._is_small else _LARGE_SEGMENT
        block = self._add(_round_up(num_bytes - at_hand, page))
        if last:
            block.before, last.after = last, block
            if last.is_free:
                self._free.remove(last.key)
                self._free.remove(block.key)
                block = self._join(last, block)
                insort(self._free, block.key)
        self._last = block
        return block

    def _split(self, block: _Block, num_bytes: int) -> None:
        rest = _Block(
            block.address + num_bytes, block.num_bytes - num_bytes, before=block, after=block.after
        )
        if block.after:
            block.after.before = rest
        block.num_bytes, block.after = num_bytes, rest
        self._at[rest.address] = rest
        insort(self._free, rest.key)
        if self._last is block:
            self._last = rest

    def _join(self, first: _Block, second: _Block) -> _Block:
        first.num_bytes += second.num_bytes
        first.after = second.after
        if second.after:
            second.after.before = first
        del self._at[second.address]
        if self._last is second:
            self._last = first
        return first


def reserve_segments(traces: Iterable[Trace]) -> int:
    """Bytes of segments after the traces, one after another, with the caching allocator."""
    return _reserve(traces, is_expandable=False)


def reserve_expandable(traces: Iterable[Trace]) -> int:
    """Bytes mapped after the traces, one after another, with expandable segments."""
    return _reserve(traces, is_expandable=True)


def _reserve(traces: Iterable[Trace], *, is_expandable: bool) -> int:
    small = _Pool(is_small=True, is_expandable=is_expandable)
    large = _Pool(is_small=False, is_expandable=is_expandable)
    for trace in traces:
        # What stops goes before what starts at the same time: intervals are half-open.
        events = sorted(
            event
            for number, (start, stop, num_bytes) in enumerate(trace.intervals)
            if num_bytes and start < stop
            for event in ((start, 1, number), (stop, 0, number))
        )
        held: dict[int, tuple[_Pool, _Block]] = {}
        for _, is_start, number in events:
            if is_start:
                num_bytes = _round_up(trace.intervals[number][2], _ROUND)
                pool = small if num_bytes <= _SMALL else large
                held[number] = pool, pool.take(num_bytes)
            else:
                pool, block = held.pop(number)
                pool.give_back(block)
    return small.reserved_bytes + large.reserved_bytes


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
