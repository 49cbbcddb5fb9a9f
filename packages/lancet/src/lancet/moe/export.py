"""What needs all ranks' experts at once: a folder of whole weights, and the norm of all gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lancet.moe.experts import group_of
from lancet.moe.layer import ExpertLayers
from shared.comms import Group, all_reduce, barrier
from shared.files import atomic_file

__all__ = ["clip_grad_norm_", "export"]


def export(model: nn.Module, folder: str | Path) -> None:
    """Writes a divided model with whole experts.

    A transformers model becomes a Hugging Face folder. No configuration describes another model, or
    one with `lancet.moe.Layer`s: its folder has `model.safetensors` alone, which `load_state_dict`
    takes where the model is built anew, before it is divided.

    Every rank calls it; rank 0 gathers one weight after another in its memory, and writes.

    Args:
        model: divided by `lancet.parallelize`, compiled or not.
        folder: made if it is missing.

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
        if _is_described(whole):
            whole.save_pretrained(folder, state_dict=state)
        else:
            _save_state(state, Path(folder))
    barrier(group)


def _is_described(model: nn.Module) -> bool:
    """Whether a configuration describes the whole model."""
    has_layers = any(isinstance(part, ExpertLayers) for part in model.modules())
    return hasattr(model, "save_pretrained") and not has_layers


def _save_state(state: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors, storages = {}, set()
    for name, tensor in state.items():
        # safetensors refuses tied weights, which have several names.
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in storages else tensor.contiguous()
        storages.add(storage)
    with atomic_file(folder / "model.safetensors") as partial:
        save_file(tensors, partial, {"format": "pt"})


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
