"""One region of memory for the weights of two layouts, whose buckets trade places one by one.

Freed weights are of no use to fresh ones of another size: malloc splits what it keeps, and gives
pages back only for the price of faulting them in again. So both layouts have fixed places in one
region. Generation's buckets are stacked from its bottom, training's from its top, both in the order
in which they move; a bucket of generation then grows into what buckets of training have left, and
on the way back, last bucket first, the other way round.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["Region"]

_ALIGNMENT_BYTES = 64


class Region:
    """Places for two layouts' weights, of which one layout's or the other's hold values.

    Attributes:
        num_bytes: what both take at most at any time of a move.
        rising: generation's weights, by parameter.
        falling: training's.
    """

    def __init__(
        self, rising: Sequence[Mapping[str, Tensor]], falling: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Reserves the memory, in huge pages where the kernel has them; nothing is touched.

        Args:
            rising: for each bucket, tensors of generation's sizes and types, on any device.
            falling: for each bucket, tensors of training's.
        """
        ups = [sum(map(_size_bytes, bucket.values())) for bucket in rising]
        downs = [sum(map(_size_bytes, bucket.values())) for bucket in falling]
        # While a bucket moves, it is in both layouts.
        both = zip(accumulate(ups), accumulate(downs), downs, strict=True)
        self.num_bytes = max((up + sum(downs) - end + down for up, end, down in both), default=0)
        self._num_spare_bytes = self.num_bytes - sum(downs)
        self._memory = mmap.mmap(-1, max(self.num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # a system without them
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.rising = self._place(rising, 0)
        self.falling = self._place(falling, self._num_spare_bytes)

    def give_back(self) -> None:
        """Lets the kernel take what training's weights leave free, generation's values with it.

        It does so when memory is short. Until then the pages stay, as faulting them in again would
        cost more than the messages of a move.
        """
        num_bytes = self._num_spare_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if num_bytes:
            with suppress(OSError, AttributeError):  # then the memory stays with this process
                self._memory.madvise(mmap.MADV_FREE, 0, num_bytes)

    def _place(self, buckets: Sequence[Mapping[str, Tensor]], offset: int) -> dict[str, Tensor]:
        places = {}
        for bucket in buckets:
            for name, like in bucket.items():
                if not like.numel():
                    places[name] = torch.empty(like.shape, dtype=like.dtype)
                    continue
                # Each has a storage of its own, so that saving one does not save the region.
                places[name] = torch.frombuffer(
                    self._memory, dtype=like.dtype, count=like.numel(), offset=offset
                ).view(like.shape)
                offset += _size_bytes(like)
        return places


def _size_bytes(like: Tensor) -> int:
    return -(-like.numel() * like.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
