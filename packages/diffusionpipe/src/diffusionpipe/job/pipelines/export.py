"""Saves what was trained in the folders that diffusers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from shared.errors import ConfigError

__all__ = ["find_adapter", "save_backbone", "save_pipeline"]


def find_adapter(model: nn.Module) -> str | None:
    """Returns the name of the adapter that trains; None where a model's own weights do.

    Raises:
        ConfigError: there are adapters, but not one of them and nothing else trains.
    """
    # A wrapper of peft saves its adapters by itself.
    if not getattr(model, "peft_config", None) or hasattr(model, "get_base_model"):
        return None
    adapters: Any = model.peft_config
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    owners = {name: set(name.split(".")) & set(adapters) for name in trained}
    used = sorted({adapter for own in owners.values() for adapter in own})
    others = [name for name, own in owners.items() if not own]
    if len(used) != 1 or others:
        raise ConfigError(
            f"{type(model).__name__}: expected one adapter that trains, and nothing beside it, got "
            f"{', '.join([*used, *others[:3]]) or 'none'} of the adapters {', '.join(adapters)}; do set "
            "requires_grad_(False) on what shall stay, or merge adapters into the model"
        )
    return used[0]


def save_pipeline(pipeline: Any, model: nn.Module, folder: Path) -> None:
    """Saves a pipeline's folder; with an adapter on its backbone, the adapter's weights alone.

    Args:
        pipeline: of diffusers.
        model: its backbone.
        folder: is created.
    """
    adapter = find_adapter(model)
    if adapter is None:
        pipeline.save_pretrained(folder)
        return
    from peft.utils import get_peft_model_state_dict

    owner: Any = model
    part = next(n for n in ("unet", "transformer") if getattr(pipeline, n, None) is not None)
    pipeline.save_lora_weights(
        folder,
        **{
            f"{part}_lora_layers": get_peft_model_state_dict(owner, adapter_name=adapter),
            # Without it, a reader would assume that the scaling is 1.
            f"{part}_lora_adapter_metadata": owner.peft_config[adapter].to_dict(),
        },
    )


def save_backbone(model: nn.Module, folder: Path) -> None:
    """Saves a backbone's folder; a list of modules as model.safetensors."""
    owner: Any = model
    adapter = find_adapter(model)
    if adapter is not None:
        owner.save_lora_adapter(folder, adapter_name=adapter)
    elif hasattr(model, "save_pretrained"):
        owner.save_pretrained(folder)
    else:
        from safetensors.torch import save_model

        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, str(folder / "model.safetensors"))
