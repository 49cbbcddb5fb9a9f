"""Published models on meta tensors: nothing is computed, but shapes and cuts are those of training."""

import pytest
import torch

import diffusionpipe as dp


def _half(*shape):
    return torch.empty(1, *shape, dtype=torch.half)


def test_stable_diffusion_2_has_29_layers_and_its_known_cuts():
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(
            sample_size=64,
            attention_head_dim=(5, 10, 20, 20),
            cross_attention_dim=1024,
            use_linear_projection=True,
        ).half()
        example = {
            "sample": _half(4, 64, 64),
            "timestep": torch.empty(1, dtype=torch.long),
            "encoder_hidden_states": _half(77, 1024),
        }
    chain = dp.chain(model)
    assert len(chain) == 29
    cuts = chain.cuts(**example)
    assert len(cuts) == 28
    middle = max(cuts, key=lambda cut: cut.skip_bytes)
    assert (middle.skip_bytes, middle.hidden_bytes) == (13_271_040, 163_840)
    assert {cut.shared_bytes for cut in cuts[:-2]} == {2 * 1280}
    folded = chain.cuts("folded", **example)
    assert [cut.hidden_bytes for cut in folded] == [cut.hidden_bytes for cut in cuts]
    assert max(cut.skip_bytes for cut in folded) == 0


@pytest.mark.slow
def test_xl_has_51_megabytes_of_skips():
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ).half()
        example = {
            "sample": _half(4, 128, 128),
            "timestep": torch.empty(1, dtype=torch.long),
            "encoder_hidden_states": _half(77, 2048),
            "added_cond_kwargs": {"text_embeds": _half(1280), "time_ids": _half(6)},
        }
    cuts = dp.chain(model).cuts(**example)
    assert max(cut.skip_bytes for cut in cuts) == 51_118_080


@pytest.mark.slow
def test_transformers_hand_over_their_tokens_and_no_skip():
    from diffusers import FluxTransformer2DModel, SD3Transformer2DModel

    with torch.device("meta"):
        sd3 = SD3Transformer2DModel(
            sample_size=128,
            in_channels=16,
            num_layers=24,
            attention_head_dim=64,
            num_attention_heads=24,
            joint_attention_dim=4096,
            caption_projection_dim=1536,
            pooled_projection_dim=2048,
            out_channels=16,
            pos_embed_max_size=192,
        ).half()
        flux = FluxTransformer2DModel(guidance_embeds=True).half()
        sd3_example = {
            "hidden_states": _half(16, 128, 128),
            "encoder_hidden_states": _half(333, 4096),
            "pooled_projections": _half(2048),
            "timestep": torch.empty(1),
        }
        flux_example = {
            "hidden_states": _half(4096, 64),
            "encoder_hidden_states": _half(512, 4096),
            "pooled_projections": _half(768),
            "timestep": torch.empty(1),
            "guidance": torch.empty(1),
            "txt_ids": torch.empty(512, 3),
            "img_ids": torch.empty(4096, 3),
        }
    for model, example, num_layers, tokens, dim in (
        (sd3, sd3_example, 26, 4096 + 333, 1536),
        (flux, flux_example, 59, 4096 + 512, 3072),
    ):
        chain = dp.chain(model)
        assert len(chain) == num_layers
        cuts = chain.cuts(**example)
        assert {cut.skip_bytes for cut in cuts} == {0}
        # Behind the last block, the text is of no more use.
        assert {cut.hidden_bytes for cut in cuts[:-1]} == {tokens * dim * 2}
        assert cuts[-1].hidden_bytes == 4096 * dim * 2
