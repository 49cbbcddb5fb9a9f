"""Published models on meta tensors: floating-point operations and bytes of each layer, as profiles of GPUs.

Nothing is computed. A layer's seconds are its operations over a share of the device's bf16 peak that is
the same for all layers; its backward pass takes twice its forward pass, once where it trains nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import diffusionpipe as dp
from diffusionpipe.job.adapters.controlnet import ControlledUNet
from diffusionpipe.job.adapters.unet import cut_front
from diffusionpipe.profiler.job_profile import ChainProfile, JobProfile
from shared.topology.device import Device

__all__ = ["EFFICIENCY", "MODELS", "Published", "count_published", "make_profile"]

EFFICIENCY = 0.4
"""Share of the bf16 peak that all layers reach."""
_GRADIENT_BYTES = 4
"""Of a trained parameter: gradients are summed in float32."""
_ATTENTION = 1024
"""Square matrices of at least so many rows are attention weights, which fused kernels do not keep."""


_SIZES = 1, 8
"""Numbers of samples whose seconds are given, in proportion; encoders take no more at once."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model's operations and bytes for one sample.

    Attributes:
        chain: of its layers.
        forward_flops: by layer.
        saved_bytes: by layer.
        value_bytes: of inputs and values.
        feeds: by input, the frozen outputs that it depends on.
        frozen_flops: by component.
        frozen_outputs: names by component.
        frozen_bytes: of each output.
        frozen_parameters: numbers by component.
    """

    chain: dp.Chain
    forward_flops: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    value_bytes: dict[str, int]
    feeds: dict[str, tuple[str, ...]]
    frozen_flops: dict[str, int]
    frozen_outputs: dict[str, tuple[str, ...]]
    frozen_bytes: dict[str, int]
    frozen_parameters: dict[str, int]

    def count_backward(self, layer: int) -> int:
        """Operations of a layer's backward pass."""
        trains = any(p.requires_grad for p in self.chain.list_parameters(layer).values())
        return (2 if trains else 1) * self.forward_flops[layer]

    @property
    def ratio(self) -> float:
        """The frozen part's operations over the trained part's, both passes."""
        layers = range(len(self.chain))
        trained = sum(self.forward_flops[i] + self.count_backward(i) for i in layers)
        return sum(self.frozen_flops.values()) / trained


def half(*shape: int) -> Tensor:
    """A sample's tensor in bf16 that has no memory."""
    return torch.empty(1, *shape, dtype=torch.bfloat16, device="meta")


def make_on_meta(make: Callable[[], Any]) -> Any:
    """A model in bf16 without memory."""
    with torch.device("meta"):
        return make().to(torch.bfloat16)


def count_flops(run: Callable[[], Any]) -> tuple[int, Any]:
    """Floating-point operations of a call, and its result."""
    with FlopCounterMode(display=False) as counter:
        result = run()
    return counter.get_total_flops(), result


def count_layers(chain: dp.Chain, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Operations, kept bytes and values of each layer."""
    values: dict[str, Tensor] = chain.flatten(inputs)
    known = [*chain.model.parameters(), *chain.model.buffers(), *values.values()]
    seen = {StorageWeakRef(t.untyped_storage()).cdata for t in known}
    flops, saved, alive, sizes = [], [], [], {k: t.nbytes for k, t in values.items()}
    for index, layer in enumerate(chain.layers):
        kept: list[Tensor] = []

        def pack(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        read = {
            k: values[k].detach().requires_grad_(values[k].is_floating_point()) for k in layer.reads
        }
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            own, written = count_flops(lambda i=index, r=read: chain.run_layer(i, r))
        flops.append(own)
        num_bytes = 0
        for tensor in kept:
            storage = StorageWeakRef(tensor.untyped_storage())
            is_attention = tensor.ndim > 2 and tensor.shape[-1] == tensor.shape[-2] >= _ATTENTION
            if storage.cdata not in seen and not is_attention:
                seen.add(storage.cdata)
                num_bytes += tensor.untyped_storage().nbytes()
        alive.append(kept)  # a freed storage's address could be given out again
        saved.append(num_bytes)
        values |= written
        sizes |= {key: tensor.nbytes for key, tensor in written.items()}
    return {
        "forward_flops": tuple(flops), "saved_bytes": tuple(saved), "value_bytes": sizes,
    }  # fmt: skip


def encode_pixels(size: int, latent_channels: int) -> tuple[int, int]:
    """Operations of an AutoencoderKL's encoder for an image, and its parameters."""
    from diffusers import AutoencoderKL

    vae = make_on_meta(
        lambda: AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=latent_channels, sample_size=size,
        )
    )  # fmt: skip
    with torch.no_grad():
        flops, _ = count_flops(lambda: vae.encode(half(3, size, size)))
    return flops, sum(p.numel() for p in vae.encoder.parameters())


TEXT_PARAMETERS = {
    "CLIP-L": 12 * 12 * 768**2,
    "OpenCLIP-H": 23 * 12 * 1024**2,
    "OpenCLIP-bigG": 32 * 12 * 1280**2,
    "T5-XXL": 24 * (4 * 4096**2 + 3 * 4096 * 10240),
}
"""Of text encoders' layers, without embeddings."""


def make_published(
    chain: dp.Chain,
    inputs: Mapping[str, Any],
    vae: tuple[int, int],
    texts: Mapping[str, int],
    latent_bytes: int,
    text_bytes: int,
    feeds: Mapping[str, tuple[str, ...]],
) -> Published:
    """Joins a backbone and its encoders; texts are tokens by encoder's name."""
    text_flops = sum(2 * TEXT_PARAMETERS[name] * tokens for name, tokens in texts.items())
    return Published(
        chain=chain, **count_layers(chain, inputs), feeds=dict(feeds),
        frozen_flops={"z": vae[0], "h": text_flops},
        frozen_outputs={"z": ("z",), "h": ("h",)},
        frozen_bytes={"z": latent_bytes, "h": text_bytes},
        frozen_parameters={"z": vae[1], "h": sum(TEXT_PARAMETERS[name] for name in texts)},
    )  # fmt: skip


_UNET_FEEDS = {"sample": ("z",), "timestep": (), "encoder_hidden_states": ("h",), "target": ()}


def _build_sd(**settings: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return make_on_meta(lambda: UNet2DConditionModel(use_linear_projection=True, **settings))


_SD2 = {"sample_size": 64, "attention_head_dim": (5, 10, 20, 20), "cross_attention_dim": 1024}


def _example_sd(size: int, dim: int) -> dict[str, Any]:
    timestep = torch.empty(1, dtype=torch.long, device="meta")
    return {"sample": half(4, size, size), "timestep": timestep, "encoder_hidden_states": half(77, dim)}  # fmt: skip


def describe_sd() -> Published:
    chain = dp.chain(_build_sd(**_SD2))
    return make_published(
        chain, _example_sd(64, 1024), encode_pixels(512, 4), {"OpenCLIP-H": 77},
        2 * 2 * 4 * 64**2, 2 * 77 * 1024, _UNET_FEEDS,
    )  # fmt: skip


def describe_controlnet() -> Published:
    from diffusers import ControlNetModel

    settings = {**_SD2, "cross_attention_dim": 768, "attention_head_dim": 8}
    unet = _build_sd(**settings)
    build: Any = ControlNetModel
    control = make_on_meta(
        lambda: build(
            cross_attention_dim=768, attention_head_dim=8, use_linear_projection=True,
            conditioning_channels=3,
        )
    )  # fmt: skip
    chain = dp.chain(ControlledUNet(control, unet))
    inputs = _example_sd(64, 768)
    front, _ = cut_front(unet)
    locked: dict[str, Tensor] = {}

    def run() -> None:
        state = dict(inputs)
        for layer in front:
            locked.update(layer.call(state | locked))

    with torch.no_grad():
        flops, _ = count_flops(run)
    used = {key: value for key, value in locked.items() if f"locked.{key}" in chain.inputs}
    own = {**inputs, "controlnet_cond": half(3, 512, 512), "locked": used}
    vae, text = encode_pixels(512, 4), TEXT_PARAMETERS["CLIP-L"]
    names = tuple(f"locked.{key}" for key in used)
    component = "z+h+locked"
    outputs = {"z": 2 * 2 * 4 * 64**2, "h": 2 * 77 * 768}
    return Published(
        chain=chain, **count_layers(chain, own),
        feeds={**_UNET_FEEDS, "controlnet_cond": (), **{name: (name,) for name in names}},
        frozen_flops={component: vae[0] + 2 * text * 77 + flops},
        frozen_outputs={component: ("z", "h", *names)},
        frozen_bytes={**outputs, **{f"locked.{k}": t.nbytes for k, t in used.items()}},
        frozen_parameters={component: vae[1] + text + sum(p.numel() for p in unet.parameters()) // 2},
    )  # fmt: skip


def describe_xl() -> Published:
    chain = dp.chain(
        _build_sd(
            sample_size=128, block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048, addition_embed_type="text_time", addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
    )  # fmt: skip
    added = {"text_embeds": half(1280), "time_ids": half(6)}
    feeds = {**_UNET_FEEDS, **{f"added_cond_kwargs.{key}": ("h",) for key in added}}
    return make_published(
        chain, {**_example_sd(128, 2048), "added_cond_kwargs": added}, encode_pixels(1024, 4),
        {"CLIP-L": 77, "OpenCLIP-bigG": 77}, 2 * 2 * 4 * 128**2, 2 * (77 * 2048 + 1280), feeds,
    )  # fmt: skip


def describe_sd3() -> Published:
    from diffusers import SD3Transformer2DModel

    model = make_on_meta(
        lambda: SD3Transformer2DModel(
            sample_size=128, in_channels=16, num_layers=24, attention_head_dim=64,
            num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536,
            pooled_projection_dim=2048, out_channels=16, pos_embed_max_size=192,
        )
    )  # fmt: skip
    inputs = {
        "hidden_states": half(16, 128, 128), "encoder_hidden_states": half(333, 4096),
        "pooled_projections": half(2048), "timestep": torch.empty(1, device="meta"),
    }  # fmt: skip
    feeds = {
        "hidden_states": ("z",), "encoder_hidden_states": ("h",), "pooled_projections": ("h",),
        "timestep": (), "target": ("z",),
    }  # fmt: skip
    return make_published(
        dp.chain(model), inputs, encode_pixels(1024, 16),
        {"CLIP-L": 77, "OpenCLIP-bigG": 77, "T5-XXL": 256},
        2 * 2 * 16 * 128**2, 2 * (333 * 4096 + 2048), feeds,
    )  # fmt: skip


def describe_flux() -> Published:
    from diffusers import FluxTransformer2DModel

    model = make_on_meta(lambda: FluxTransformer2DModel(guidance_embeds=True))
    timestep = torch.empty(1, device="meta")
    inputs = {
        "hidden_states": half(4096, 64), "encoder_hidden_states": half(512, 4096),
        "pooled_projections": half(768), "timestep": timestep, "guidance": timestep,
        "txt_ids": torch.empty(512, 3, device="meta"), "img_ids": torch.empty(4096, 3, device="meta"),
    }  # fmt: skip
    feeds = {
        "hidden_states": ("z",), "encoder_hidden_states": ("h",), "pooled_projections": ("h",),
        "timestep": (), "guidance": (), "txt_ids": (), "img_ids": (), "target": ("z",),
    }  # fmt: skip
    return make_published(
        dp.chain(model), inputs, encode_pixels(1024, 16), {"CLIP-L": 77, "T5-XXL": 512},
        2 * 2 * 16 * 128**2, 2 * (512 * 4096 + 768), feeds,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Published]] = {
    "SD 2.1": describe_sd,
    "ControlNet": describe_controlnet,
    "SDXL": describe_xl,
    "SD3": describe_sd3,
    "Flux": describe_flux,
}


def list_seconds(sample_s: float) -> tuple[float, ...]:
    """Seconds of each number of samples in a profile."""
    return tuple(size * sample_s for size in _SIZES)


@cache
def count_published(name: str) -> Published:
    """Counts a model of `MODELS`."""
    return MODELS[name]()


def make_profile(model: Published, device: Device) -> JobProfile:
    """A profile of a GPU that takes as long as a model's operations say."""
    chain, rate = model.chain, EFFICIENCY * device.flops_per_s
    layers = range(len(chain))
    parameters = [list(chain.list_parameters(index).values()) for index in layers]
    trained = [sum(p.numel() for p in own if p.requires_grad) for own in parameters]
    own = ChainProfile(
        layers=tuple(layer.name for layer in chain.layers),
        reads=tuple(layer.reads for layer in chain.layers),
        writes=tuple(layer.writes for layer in chain.layers),
        differentiable=tuple(key for layer in chain.layers for key in layer.writes),
        feeds=model.feeds,
        forward_s=tuple(list_seconds(flops / rate) for flops in model.forward_flops),
        backward_s=tuple(list_seconds(model.count_backward(index) / rate) for index in layers),
        parameter_bytes=tuple(sum(p.nbytes for p in own) for own in parameters),
        gradient_bytes=tuple(_GRADIENT_BYTES * count for count in trained),
        saved_bytes=model.saved_bytes,
        value_bytes={**model.value_bytes, "target": model.frozen_bytes["z"] // 2},
    )
    return JobProfile(
        sizes=_SIZES, chains=(own,),
        frozen_s={name: list_seconds(flops / rate) for name, flops in model.frozen_flops.items()},
        frozen_outputs=model.frozen_outputs, frozen_bytes=model.frozen_bytes,
        frozen_parameter_bytes={name: 2 * n for name, n in model.frozen_parameters.items()},
        # AdamW reads and writes weight, gradient and two moments: seven times a gradient's bytes.
        step_s_per_byte=7 / device.memory_bytes_per_s, self_conditioning=0.0, device=device.name,
        num_ranks=1,
    )  # fmt: skip
