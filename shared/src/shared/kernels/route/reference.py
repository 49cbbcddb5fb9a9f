"""Slots of tokens in plain torch: the definition."""

import torch
from torch import Tensor

__all__ = ["route"]


def route(experts: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [n] of choices [n], one after another, and the slots used [num_experts] afterwards."""
    is_chosen = experts[:, None] == torch.arange(len(used), device=used.device)
    until = used + is_chosen.cumsum(0)
    slots = until.gather(1, experts[:, None].long())[:, 0] - 1
    return slots, used + is_chosen.sum(0)
