"""Digests of words in Triton: blocks add their sums atomically, in any order."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["sums"]

_BLOCK = 4096
_NUM_WARPS = 8


@triton.jit
def _sum(words, total, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = offsets < n
    x = tl.load(words + offsets, mask=live, other=0).to(tl.uint64, bitcast=True)
    x += (offsets + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    mixed = tl.where(live, x.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(total, tl.sum(mixed, 0))


def sums(words: Sequence[Tensor]) -> list[int]:
    """For each tensor (int64 [n], all on one device), the sum of its mixed words, signed."""
    totals = torch.zeros(len(words), dtype=torch.int64, device=words[0].device)
    for place, tensor in enumerate(words):
        grid = (triton.cdiv(len(tensor), _BLOCK),)
        _sum[grid](tensor, totals[place], len(tensor), BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return totals.tolist()
