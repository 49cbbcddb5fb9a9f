"""Slots of tokens in Triton: each block ranks its own choices, then adds the counts before it.

No atomics, so that a choice's slot does not depend on which block runs first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["route"]

# Every choice of a block is compared with every other.
_BLOCK = 128


@triton.jit
def _rank(experts, slots, counts, n, num_experts, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    choices = block * BLOCK + lanes
    is_choice = choices < n
    # A lane beyond the end has an expert of its own.
    expert = tl.load(experts + choices, mask=is_choice, other=-1).to(tl.int64)
    is_same = expert[:, None] == expert[None, :]
    rank = tl.sum((is_same & (lanes[None, :] < lanes[:, None])).to(tl.int64), 1)
    num_later = tl.sum((is_same & (lanes[None, :] > lanes[:, None])).to(tl.int32), 1)
    tl.store(slots + choices, rank, mask=is_choice)
    # The last of an expert's choices knows how many there are. Bad experts are not written.
    is_last = is_choice & (num_later == 0) & (expert >= 0) & (expert < num_experts)
    tl.store(counts + (block + 1) * num_experts + expert, rank + 1, mask=is_last)


@triton.jit
def _shift(experts, slots, starts, n, num_experts, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    block = tl.program_id(0).to(tl.int64)
    choices = block * BLOCK + tl.arange(0, BLOCK)
    is_choice = choices < n
    expert = tl.load(experts + choices, mask=is_choice, other=0).to(tl.int64)
    is_expert = is_choice & (expert >= 0) & (expert < num_experts)
    start = tl.load(starts + block * num_experts + expert, mask=is_expert, other=0)
    rank = tl.load(slots + choices, mask=is_choice, other=0)
    tl.store(slots + choices, start + rank, mask=is_choice)


def route(experts: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [n] of choices [n], one after another, and the slots used [num_experts] afterwards."""
    n, num_experts = len(experts), len(used)
    slots = torch.empty(n, dtype=torch.int64, device=experts.device)
    num_blocks = triton.cdiv(n, _BLOCK)
    # Row b + 1 holds block b's counts, so that the sums are where each block starts.
    starts = torch.zeros(num_blocks + 1, num_experts, dtype=torch.int64, device=experts.device)
    starts[0] = used
    if n:
        _rank[(num_blocks,)](experts, slots, starts, n, num_experts, BLOCK=_BLOCK)
        starts = starts.cumsum(0)
        _shift[(num_blocks,)](experts, slots, starts, n, num_experts, BLOCK=_BLOCK)
    return slots, starts[-1]
