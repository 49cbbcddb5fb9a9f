"""Models of diffusers from small configurations, and arguments of their forwards."""

from typing import Any

import torch

from diffusionpipe.data import build_unet


def randomize(model, seed=0):
    """Gives every parameter random values: some are zero at first, and would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def text_unet(**changes):
    """A UNet2DConditionModel as Stable Diffusion's, with two samplers."""
    torch.manual_seed(0)
    options = {"channels": (8, 16), "text_dim": 12, "sample_size": 8, "layers_per_block": 1}
    return randomize(build_unet(**{"groups": 4, **options, **changes}))


def text_unet_inputs(rows=2, *, size=8, text_dim=12, dtype=torch.float32):
    torch.manual_seed(1)
    return {
        "sample": torch.randn(rows, 4, size, size, dtype=dtype),
        "timestep": torch.randint(0, 1000, (rows,)),
        "encoder_hidden_states": torch.randn(rows, 5, text_dim, dtype=dtype),
    }


def xl_unet():
    """A UNet2DConditionModel with XL's added conditions."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=6 * 4 + 10,
        norm_num_groups=4,
    )
    return randomize(model)


def xl_unet_inputs(rows=2):
    return {
        **text_unet_inputs(rows),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(rows, 10),
            "time_ids": torch.randint(0, 64, (rows, 6)).float(),
        },
    }


def image_unet(**changes):
    """A UNet2DModel, without text."""
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    options = {
        "sample_size": 8,
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": (8, 16),
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    }
    return randomize(UNet2DModel(**{**options, **changes}))


def image_unet_inputs(rows=2):
    torch.manual_seed(1)
    return {"sample": torch.randn(rows, 3, 8, 8), "timestep": torch.randint(1, 1000, (rows,))}


def sd3():
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return randomize(model)


def sd3_inputs(rows=2):
    torch.manual_seed(1)
    return {
        "hidden_states": torch.randn(rows, 4, 8, 4),
        "encoder_hidden_states": torch.randn(rows, 5, 12),
        "pooled_projections": torch.randn(rows, 10),
        "timestep": torch.rand(rows) * 1000,
    }


def flux(*, guidance=True):
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 4, 8),
    )
    return randomize(model)


def flux_inputs(rows=2, *, guidance=True):
    torch.manual_seed(1)
    positions = torch.zeros(16, 3)
    positions[:, 1] = torch.arange(16) // 4
    positions[:, 2] = torch.arange(16) % 4
    inputs = {
        "hidden_states": torch.randn(rows, 16, 16),
        "encoder_hidden_states": torch.randn(rows, 5, 12),
        "pooled_projections": torch.randn(rows, 10),
        "timestep": torch.rand(rows),
        "img_ids": positions,
        "txt_ids": torch.zeros(5, 3),
    }
    return {**inputs, "guidance": torch.ones(rows)} if guidance else inputs


def dit():
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        norm_num_groups=4,
        sample_size=8,
        num_embeds_ada_norm=10,
    )
    # In training mode its embedding drops labels at random.
    return randomize(model).eval()


def dit_inputs(rows=2):
    torch.manual_seed(1)
    return {
        "hidden_states": torch.randn(rows, 4, 8, 8),
        "timestep": torch.randint(0, 1000, (rows,)),
        "class_labels": torch.randint(0, 10, (rows,)),
    }


def controlled(*, is_xl=False):
    """A ControlNet made of a U-Net, with its exits away from zero."""
    from diffusers import ControlNetModel

    from diffusionpipe.job.adapters.controlnet import ControlledUNet

    unet = xl_unet() if is_xl else text_unet(channels=(8, 16), layers_per_block=2)
    torch.manual_seed(2)
    from_unet: Any = ControlNetModel.from_unet
    controlnet = from_unet(unet, conditioning_channels=3)
    return ControlledUNet(randomize(controlnet), unet)


def controlled_inputs(rows=2, *, is_xl=False):
    inputs = xl_unet_inputs(rows) if is_xl else text_unet_inputs(rows)
    return {**inputs, "controlnet_cond": torch.randn(rows, 3, 64, 64)}
