from dataclasses import replace

import pytest
import torch

import diffusionpipe as dp
from diffusionpipe.job.losses import mean_square, sample_latents
from shared.errors import ConfigError

DRAW = dp.Draw(0, 3, range(5))


@pytest.fixture
def frozen():
    torch.manual_seed(0)
    return {
        "z": torch.randn(5, 4, 6, 6, dtype=torch.float64),
        "text": {"states": torch.randn(5, 7, 8), "pooled": torch.randn(5, 9)},
    }


@pytest.mark.parametrize("prediction", ["epsilon", "velocity"])
def test_noising_is_the_schedulers_own(prediction, frozen):
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler()
    make = getattr(dp.losses, prediction)
    inputs, loss = make(scheduler, latents="z", text="text.states", scaling=0.5, shift=0.1)
    made = inputs({"unused": [0] * 5}, frozen, DRAW)
    clean = (frozen["z"] - 0.1) * 0.5
    noise = DRAW.normal(clean.shape[1:], like=clean)
    timestep = DRAW.integers(0, 1000)
    assert torch.equal(made["timestep"], timestep)
    assert torch.equal(made["sample"], scheduler.add_noise(clean, noise, timestep))
    expected = noise if prediction == "epsilon" else scheduler.get_velocity(clean, noise, timestep)
    assert torch.equal(made["target"], expected)
    assert made["encoder_hidden_states"] is frozen["text"]["states"]
    output = torch.randn_like(clean)
    losses = loss(output, made["target"])
    assert losses.shape == (5,)
    assert torch.allclose(losses.mean(), torch.nn.functional.mse_loss(output, expected), atol=1e-15)


def test_flow_matching_is_diffusers_training_script(frozen):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    inputs, _ = dp.losses.flow(scheduler, latents="z", text="text.states")
    # Sampling with the same scheduler meanwhile changes nothing.
    scheduler.set_timesteps(7)
    made = inputs({}, frozen, DRAW)
    fresh = FlowMatchEulerDiscreteScheduler(shift=3.0)
    index = (torch.sigmoid(DRAW.normal((), "timestep")) * 1000).long()
    assert torch.equal(made["timestep"], fresh.timesteps[index])
    noise = DRAW.normal(frozen["z"].shape[1:], like=frozen["z"])
    assert torch.equal(made["target"], noise - frozen["z"])
    sigma = (made["timestep"] / 1000).double()[:, None, None, None]
    assert torch.allclose(made["sample"], (1 - sigma) * frozen["z"] + sigma * noise, atol=1e-7)


def test_distributions_become_latents_by_the_samples_draws():
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    torch.manual_seed(0)
    parameters = torch.randn(5, 8, 3, 3)
    parameters[0, 4:] = 30.0  # a logarithm of variances beyond those that diffusers takes
    drawn = sample_latents(parameters, 4, DRAW)
    theirs = DiagonalGaussianDistribution(parameters)
    noise = DRAW.normal((4, 3, 3), "latents")
    assert torch.equal(drawn, theirs.mean + theirs.std * noise)
    assert sample_latents(parameters, 8, DRAW) is parameters
    assert sample_latents(parameters, None, DRAW) is parameters
    parts = [
        sample_latents(parameters[piece.start : piece.stop], 4, dp.Draw(0, 3, piece))
        for piece in (range(2), range(2, 5))
    ]
    assert torch.equal(torch.cat(parts), drawn)


def test_nested_arguments_and_functions_find_their_values(frozen):
    from diffusers import DDPMScheduler

    inputs, _ = dp.losses.epsilon(
        DDPMScheduler(),
        latents="z",
        added_cond_kwargs={"text_embeds": "text.pooled", "rows": lambda b, f: len(f["z"])},
        class_labels="labels",
    )
    made = inputs({"labels": torch.arange(5)}, frozen, DRAW)
    assert made["added_cond_kwargs"]["text_embeds"] is frozen["text"]["pooled"]
    assert made["added_cond_kwargs"]["rows"] == 5
    assert torch.equal(made["class_labels"], torch.arange(5))
    with pytest.raises(
        ConfigError, match=r"expected 'labels' among the frozen outputs \(z, text\)"
    ):
        inputs({"x": torch.zeros(5)}, frozen, DRAW)


def test_arguments_get_the_backbones_type_and_whole_numbers_keep_theirs(frozen):
    from diffusers import DDPMScheduler

    inputs, _ = dp.losses.epsilon(
        DDPMScheduler(), latents="z", text="text.states", class_labels="labels"
    )
    made = replace(inputs, dtype=torch.bfloat16)({"labels": torch.arange(5)}, frozen, DRAW)
    assert made["sample"].dtype == made["encoder_hidden_states"].dtype == torch.bfloat16
    assert made["class_labels"].dtype == made["timestep"].dtype == torch.int64
    assert made["target"].dtype == torch.float64


def test_an_estimate_passes_no_gradient(frozen):
    from diffusers import DDPMScheduler

    inputs, _ = dp.losses.epsilon(DDPMScheduler(), latents="z")
    estimate = torch.zeros_like(frozen["z"]).requires_grad_()
    made = replace(inputs, has_estimate=True)({}, {**frozen, "estimate": estimate}, DRAW)
    assert not made["sample"].requires_grad


@pytest.mark.parametrize("prediction", ["epsilon", "velocity", "flow"])
def test_a_perfect_prediction_estimates_the_clean_latents(prediction, frozen):
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler() if prediction == "flow" else DDPMScheduler()
    inputs, _ = getattr(dp.losses, prediction)(scheduler, latents="z")

    class Backbone:
        inputs = ("sample",)
        model = type("Model", (), {"config": type("Config", (), {"in_channels": 8})()})()

    bound = inputs.bind(Backbone(), has_estimate=True)
    assert bound.num_channels == 4
    first = bound({}, frozen, DRAW)
    assert first["sample"].shape[1] == 8
    assert torch.equal(first["sample"][:, 4:], torch.zeros_like(frozen["z"]))
    second = bound({}, {**frozen, "estimate": first["target"]}, DRAW)
    assert torch.equal(second["sample"][:, :4], first["sample"][:, :4])
    assert torch.allclose(second["sample"][:, 4:], frozen["z"], atol=1e-6)


def test_losses_compare_means_and_refuse_other_shapes():
    target = torch.randn(3, 4, 2, 2)
    output = torch.cat([target + 1, torch.randn_like(target)], dim=1)
    assert torch.allclose(mean_square(output, target), torch.ones(3))
    assert mean_square(target.bfloat16(), target.bfloat16()).dtype == torch.float32
    assert mean_square(target.double(), target.double()).dtype == torch.float64
    with pytest.raises(
        ConfigError, match=r"expected an output of the target's shape \[3, 4, 2, 2\]"
    ):
        mean_square(target[:, :3], target)


@pytest.mark.parametrize("kind", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_schedulers_for_sampling_train_like_that_of_training(kind, frozen):
    import diffusers

    reference, _ = dp.losses.velocity(diffusers.DDPMScheduler(), latents="z")
    ours, _ = dp.losses.velocity(getattr(diffusers, kind)(), latents="z")
    expected, made = (inputs({}, frozen, DRAW) for inputs in (reference, ours))
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-6)


def test_schedulers_of_another_kind_are_refused():
    import diffusers

    flow, ddpm = diffusers.FlowMatchEulerDiscreteScheduler(), diffusers.DDPMScheduler()
    for make in (dp.losses.epsilon, dp.losses.velocity):
        with pytest.raises(
            ConfigError, match=r"expected one with alphas_cumprod, .* got FlowMatch"
        ):
            make(flow, latents="z")
    with pytest.raises(ConfigError, match=r"expected one of flow matching, .* got DDPMScheduler"):
        dp.losses.flow(ddpm, latents="z")
