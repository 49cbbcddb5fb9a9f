"""What needs all ranks' experts at once: a Hugging Face folder, and the norm of all gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lancet.moe.experts import group_of
from shared.comms import Group, all_reduce, barrier

__all__ = ["clip_grad_norm_", "export"]


def export(model: nn.Module, folder: str | Path) -> None:
    """Writes a divided model as a Hugging Face folder with whole experts.

    Every rank calls it; rank 0 gathers one weight after another in its memory, and writes.

    Args:
        model: a transformers model that `lancet.parallelize` has divided, compiled or not.
        folder: written to as by `save_pretrained`.

    Raises:
        ConfigError: the model is not divided.
        CommError: a rank died or the timeout passed.
    """
    group = group_of(model)
    whole: Any = getattr(model, "_orig_mod", model)
    state = {}
    for name, tensor in whole.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if group.rank == 0:
            state[name] = full.cpu()
    if group.rank == 0:
        whole.save_pretrained(folder, state_dict=state)
    barrier(group)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients so that their norm over all ranks' experts is at most `max_norm`.

    torch's function of this name would see a rank's own experts only. Every rank calls this one.

    Args:
        model: divided by `lancet.parallelize`, compiled or not.
        max_norm: largest norm that is left as it is.

    Returns:
        The norm before, the same on every rank.

    Raises:
        ConfigError: the model is not divided.
        CommError: a rank died or the timeout passed.
    """
    group = group_of(model)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    experts = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    replicated = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    squares = all_reduce(group, _sum_squares(experts, group)) + _sum_squares(replicated, group)
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*experts, *replicated):
        gradient.mul_(scale.to(gradient.dtype))
    return norm.float()


def _sum_squares(tensors: list[Tensor], group: Group) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=group.device)
    for tensor in tensors:
        total += tensor.norm(dtype=torch.promote_types(tensor.dtype, torch.float32)).double() ** 2
    return total
