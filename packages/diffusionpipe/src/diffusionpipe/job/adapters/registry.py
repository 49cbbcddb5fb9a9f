"""Models that can be cut into layers, by the name of their class.

An adapter is a function of the model. It returns the model whose parameters are trained, the
layers, and the keys that many layers read.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from diffusionpipe.job.layers import ChainLayer
from shared.registry import Registry

__all__ = ["ADAPTERS", "CutModel"]

CutModel = Callable[[Any], tuple[nn.Module, list[ChainLayer], set[str]]]

ADAPTERS: Registry[str, CutModel] = Registry("backbone")

_HOME = "diffusionpipe.job.adapters"

for _name, _entry, _about in (
    ("UNet2DConditionModel", "unet:cut_unet", "U-Nets of Stable Diffusion 1, 2 and XL"),
    ("UNet2DModel", "unet:cut_unet", "U-Nets without text"),
    ("SD3Transformer2DModel", "sd3:cut_sd3", "Stable Diffusion 3 and 3.5"),
    ("FluxTransformer2DModel", "flux:cut_flux", "Flux.1"),
    ("DiTTransformer2DModel", "dit:cut_dit", "DiT"),
    ("ControlledUNet", "controlnet:cut_controlled", "a ControlNet with its locked U-Net"),
    ("ModuleList", "lists:cut_list", "modules in a row, or layers of your own"),
    ("list", "lists:cut_list", "modules in a row, or layers of your own"),
    ("tuple", "lists:cut_list", "modules in a row, or layers of your own"),
):
    ADAPTERS.add(_name, f"{_HOME}.{_entry}", _about)
