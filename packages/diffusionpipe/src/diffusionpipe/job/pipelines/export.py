"""Saves what was trained in the folders that diffusers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["save_backbone", "save_pipeline"]


def save_pipeline(pipeline: Any, model: nn.Module, folder: Path) -> None:
    """Saves a pipeline's folder; with an adapter on its backbone, the adapter's weights alone.

    Args:
        pipeline: of diffusers.
        model: its backbone.
        folder: is created.
    """
    if not _has_adapter(model):
        pipeline.save_pretrained(folder)
        return
    from peft.utils import get_peft_model_state_dict

    part = next(n for n in ("unet", "transformer") if getattr(pipeline, n, None) is not None)
    name, config = next(iter(getattr(model, "peft_config", {}).items()))
    pipeline.save_lora_weights(
        folder,
        **{
            f"{part}_lora_layers": get_peft_model_state_dict(model, adapter_name=name),
            # Without it, a reader would assume that the scaling is 1.
            f"{part}_lora_adapter_metadata": config.to_dict(),
        },
    )


def save_backbone(model: nn.Module, folder: Path) -> None:
    """Saves a backbone's folder; a list of modules as model.safetensors."""
    owner: Any = model
    if _has_adapter(model):
        owner.save_lora_adapter(folder)
    elif hasattr(model, "save_pretrained"):
        owner.save_pretrained(folder)
    else:
        from safetensors.torch import save_model

        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, str(folder / "model.safetensors"))


def _has_adapter(model: nn.Module) -> bool:
    """Whether adapters of peft were added to a model of diffusers in place, without a wrapper."""
    return bool(getattr(model, "peft_config", None)) and not hasattr(model, "get_base_model")
