import copy
import json
from functools import cache

import pytest
import torch
from small_models import controlled, image_unet, text_unet
from torch import nn

import diffusionpipe as dp
from diffusionpipe.data import build_vae
from diffusionpipe.job.draws import decide
from shared.errors import ConfigError, DataError


def _batch(rows=4, *, dtype=torch.float32):
    torch.manual_seed(7)
    return {
        "pixels": torch.rand((rows, 3, 16, 16), dtype=dtype) * 2 - 1,
        "ids": torch.randint(0, 20, (rows, 5)),
    }


class _Encoders:
    """A VAE of diffusers and an embedding, in one precision."""

    def __init__(self, dtype=torch.float32):
        torch.manual_seed(0)
        self.vae = build_vae((8, 8), 16, groups=4).to(dtype).eval()
        self.text = nn.Embedding(20, 12).to(dtype)

    def frozen(self):
        return {
            "z": lambda b: self.vae.encode(b["pixels"]).latent_dist.parameters,
            "h": lambda b: self.text(b["ids"]),
        }


@cache
def _encoders(dtype=torch.float32):
    """Encoders that no test changes."""
    return _Encoders(dtype)


def _scheduler():
    from diffusers import DDPMScheduler

    return DDPMScheduler()


def _job(unet, encoders, **options):
    inputs, loss = dp.losses.epsilon(_scheduler(), latents="z", text="h")
    return dp.Job(dp.chain(unet), encoders.frozen(), inputs, loss, **options)


def test_three_steps_are_those_of_plain_diffusers_code_in_float64():
    encoders, unet = _encoders(torch.float64), text_unet().double()
    plain, scheduler = copy.deepcopy(unet), _scheduler()
    job = _job(unet, encoders)
    ours = torch.optim.SGD(unet.parameters(), 0.1)
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(3):
        batch = _batch(dtype=torch.float64)
        draw = dp.Draw(11, step, range(4))
        ours.zero_grad()
        loss = job.compute_loss(batch, seed=11, step=step)
        loss.backward()
        ours.step()

        with torch.no_grad():
            posterior = encoders.vae.encode(batch["pixels"]).latent_dist
            noise = draw.normal(posterior.mean.shape[1:], "latents", like=posterior.mean)
            latents = posterior.mean + posterior.std * noise
            states = encoders.text(batch["ids"])
        noise = draw.normal(latents.shape[1:], "noise", like=latents)
        timestep = draw.integers(0, 1000)
        noisy = scheduler.add_noise(latents, noise, timestep)
        theirs.zero_grad()
        prediction = plain(noisy, timestep, encoder_hidden_states=states).sample
        expected = nn.functional.mse_loss(prediction, noise)
        expected.backward()
        theirs.step()
        assert torch.allclose(loss, expected, rtol=1e-13)
    for parameter, other in zip(unet.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pieces", [(4,), (2, 2), (1, 1, 2)])
def test_micro_batches_add_up_to_the_whole_batch(pieces):
    """What the engine does: encoded, prepared and compared piece by piece, in any pieces."""
    encoders, unet = _encoders(torch.float64), text_unet().double()
    job, batch = _job(unet, encoders), _batch(dtype=torch.float64)
    whole = job.compute_loss(batch, seed=1, step=2)
    total, first = 0.0, 0
    for size in pieces:
        samples = range(first, first + size)
        rows, draw = job.take(batch, samples), dp.Draw(1, 2, samples)
        values = job.encode("z", rows, draw) | job.encode("h", rows, draw)
        (prepared,) = job.prepare(rows, values, draw)
        output = job.chains[0].run(prepared.state)["output"]
        total += float(job.compute_losses(output, prepared.target, size).sum())
        first += size
    assert total / 4 == pytest.approx(float(whole), rel=1e-12)


def test_checks_pass_and_name_what_is_needed():
    job, batch = _job(text_unet(), _encoders()), _batch()
    job.check(batch)
    assert job.components == {"z": ("z",), "h": ("h",)}
    assert job.feeds(job.take(batch, range(2))) == (
        {
            "sample": ("z",),
            "timestep": (),
            "encoder_hidden_states": ("h",),
            # The target of epsilon is noise alone.
            "target": (),
        },
    )
    with pytest.raises(DataError, match="expected at least two rows to check, got 1"):
        job.check(_batch(1))


def test_a_target_of_velocity_needs_latents():
    encoders = _encoders()
    inputs, loss = dp.losses.velocity(_scheduler(), latents="z", text="h")
    job = dp.Job(dp.chain(text_unet()), encoders.frozen(), inputs, loss)
    (feeds,) = job.feeds(_batch(2))
    assert feeds["target"] == ("z",)


@pytest.mark.parametrize("is_followed", [True, False])
def test_outputs_that_only_a_change_of_form_shows_are_traced(is_followed):
    """Normalised values, whole numbers and flags; by operators of torch, or through numpy."""

    def inputs(batch, frozen, draw):
        if not is_followed:
            frozen = {name: torch.from_numpy(value.numpy()) for name, value in frozen.items()}
        scaled = frozen["z"] / frozen["z"].norm(dim=1, keepdim=True)
        return {
            "sample": scaled + frozen["index"][:, None] * frozen["flag"][:, None],
            "target": frozen["z"],
        }

    frozen = {
        "z": lambda b: b["x"],
        "index": lambda b: torch.arange(1, 3),
        "flag": lambda b: torch.tensor([True, False]),
    }
    job = dp.Job(dp.chain([nn.Linear(3, 3)]), frozen, inputs, lambda o, t: (o - t).mean(1))
    feeds = {"sample": ("z", "index", "flag"), "target": ("z",)}
    assert job.feeds({"x": torch.randn(2, 3)}) == (feeds,)


@pytest.mark.parametrize("is_written", [False, True])
def test_outputs_that_draws_hardly_ever_select_are_followed(is_written):
    """Labels of one sample in a million; and a target that has a frozen output's shape only."""

    def inputs(batch, frozen, draw):
        is_labelled, labels = draw.uniform() < 1e-6, torch.zeros(2, dtype=torch.int64)
        if is_written:
            labels[is_labelled] = frozen["label"][is_labelled]
        else:
            labels = torch.where(is_labelled, frozen["label"], labels)
        sample = frozen["z"] + labels[:, None]
        return {"sample": sample, "target": torch.zeros_like(frozen["z"])}

    frozen = {"z": lambda b: b["x"], "label": lambda b: torch.arange(1, 3)}
    job = dp.Job(dp.chain([nn.Linear(3, 3)]), frozen, inputs, lambda o, t: (o - t).mean(1))
    feeds = {"sample": ("z", "label"), "target": ()}
    assert job.feeds({"x": torch.randn(2, 3)}) == (feeds,)


def test_halves_of_one_output_are_told_apart():
    job = dp.Job(
        dp.chain([nn.Linear(3, 3)]),
        {"pair": lambda b: b["x"].chunk(2, 1)},
        lambda batch, frozen, draw: {"sample": frozen["pair"][0], "target": frozen["pair"][1]},
        lambda output, target: (output - target).mean(1),
    )
    feeds = {"sample": ("pair.0",), "target": ("pair.1",)}
    assert job.feeds({"x": torch.randn(2, 6)}) == (feeds,)


def test_indices_that_are_changed_stay_within_their_table():
    """Tokens, whose embedding is an input."""
    table = torch.eye(3)
    job = dp.Job(
        dp.chain([nn.Linear(3, 3)]),
        {"ids": lambda b: b["ids"]},
        lambda batch, frozen, draw: {"sample": table[frozen["ids"]], "target": batch["x"]},
        lambda output, target: (output - target).mean(1),
    )
    feeds = {"sample": ("ids",), "target": ()}
    assert job.feeds({"x": torch.randn(2, 3), "ids": torch.tensor([2, 0])}) == (feeds,)


def test_self_conditioning_runs_twice_in_its_share_of_steps():
    encoders, unet = _encoders(torch.float64), text_unet(in_channels=8).double()
    job, batch = _job(unet, encoders, self_conditioning=0.5), _batch(dtype=torch.float64)
    scheduler = _scheduler()
    kinds = set()
    for step in range(6):
        draw = dp.Draw(3, step, range(4))
        with torch.no_grad():
            posterior = encoders.vae.encode(batch["pixels"]).latent_dist
            noise = draw.normal(posterior.mean.shape[1:], "latents", like=posterior.mean)
            clean = posterior.mean + posterior.std * noise
            states = encoders.text(batch["ids"])
        noise, timestep = draw.normal(clean.shape[1:], like=clean), draw.integers(0, 1000)
        noisy, estimate = scheduler.add_noise(clean, noise, timestep), torch.zeros_like(clean)
        kinds.add(decide(3, step, 0.5))
        if decide(3, step, 0.5):
            with torch.no_grad():
                first = unet(torch.cat([noisy, estimate], 1), timestep, states).sample
            level = scheduler.alphas_cumprod.double()[timestep][:, None, None, None]
            estimate = (noisy - (1 - level).sqrt() * first) / level.sqrt()
        output = unet(torch.cat([noisy, estimate], 1), timestep, states).sample
        expected = nn.functional.mse_loss(output, noise)
        assert torch.allclose(job.compute_loss(batch, seed=3, step=step), expected, rtol=1e-11)
    assert kinds == {True, False}
    assert job.feeds(job.take(batch, range(2)))[0]["sample"] == ("z", "estimate")


def test_two_backbones_train_in_one_step():
    small, large = image_unet(), text_unet()
    encoders = _encoders()
    (low, loss), (high, _) = (
        dp.losses.epsilon(_scheduler(), latents="small"),
        dp.losses.epsilon(_scheduler(), latents="z", text="h"),
    )
    high = high.bind(dp.chain(large), has_estimate=False)
    frozen = {
        **encoders.frozen(),
        "small": lambda b: nn.functional.avg_pool2d(b["pixels"], 2),
    }
    job = dp.Job(
        (dp.chain(small), dp.chain(large)),
        frozen,
        lambda b, f, d: (low(b, f, d), high(b, f, d)),
        loss,
    )
    batch = _batch()
    job.check(batch)
    apart = [
        dp.Job(dp.chain(model), frozen, inputs, loss).compute_loss(batch, seed=0, step=0)
        for model, inputs in ((small, low), (large, high))
    ]
    assert torch.allclose(job.compute_loss(batch, seed=0, step=0), sum(apart))
    assert {name.split(".")[0] for name in job.trained} == {"0", "1"}
    feeds = job.feeds(job.take(batch, range(2)))
    assert [table["sample"] for table in feeds] == [("small",), ("z",)]


def test_two_backbones_with_common_weights_are_refused():
    unet, encoders = text_unet(), _encoders()
    inputs, loss = dp.losses.epsilon(_scheduler(), latents="z", text="h")
    job = dp.Job((dp.chain(unet), dp.chain(unet)), encoders.frozen(), inputs, loss)
    with pytest.raises(ConfigError, match="expected two backbones without common weights"):
        job.validate()


def test_a_locked_unet_is_a_frozen_function_of_draws():
    model, encoders = controlled(), _encoders()
    inputs, loss = dp.losses.epsilon(
        _scheduler(), latents="z", text="h", controlnet_cond="edges", locked="locked"
    )
    frozen = {**encoders.frozen(), "locked": model.lock(inputs)}
    job = dp.Job(dp.chain(model), frozen, inputs, loss)
    batch = {**_batch(), "edges": torch.randn(4, 3, 64, 64)}
    job.check(batch)
    draw = dp.Draw(2, 0, range(4))
    made = job.inputs(batch, {"locked": None, **_encode_all(job, batch, draw)}, draw)
    plain = model(made["sample"], made["timestep"], made["encoder_hidden_states"], batch["edges"])
    expected = nn.functional.mse_loss(plain, made["target"])
    assert torch.allclose(job.compute_loss(batch, seed=2, step=0), expected, rtol=1e-6)


def _encode_all(job, batch, draw):
    functions = {name: function for name, function in job.frozen.items() if name != "locked"}
    with torch.no_grad():
        return {name: function(batch) for name, function in functions.items()}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"backbone": nn.Linear(2, 2)}, "backbone: expected what diffusionpipe.chain makes"),
        ({"self_conditioning": 1.5}, "self_conditioning: expected a probability, got 1.5"),
        ({"frozen": {"a.b": len}}, "expected names without"),
    ],
)
@pytest.mark.unchecked
def test_wrong_parts_are_refused(change, match):
    inputs, loss = dp.losses.epsilon(_scheduler(), latents="z", text="h")
    parts = {"backbone": dp.chain(text_unet()), "frozen": {}, "inputs": inputs, "loss": loss}
    with pytest.raises(ConfigError, match=match):
        dp.Job(**{**parts, **change})


def test_functions_that_return_something_else_are_refused():
    encoders, batch = _encoders(), _batch()
    good, mean = dp.losses.epsilon(_scheduler(), latents="z", text="h")
    chain = dp.chain(text_unet())

    def without_target(b, f, d):
        made = good(b, f, d)
        del made["target"]
        return made

    job = dp.Job(chain, encoders.frozen(), without_target, mean)
    with pytest.raises(ConfigError, match="inputs: expected 1 dictionaries of the backbone's"):
        job.check(batch)
    job = dp.Job(
        chain, encoders.frozen(), lambda b, f, d: {**good(b, f, d), "extra": b["ids"]}, mean
    )
    with pytest.raises(ConfigError, match="leave out extra"):
        job.check(batch)
    job = dp.Job(chain, encoders.frozen(), good, lambda output, target: output.mean())
    with pytest.raises(
        ConfigError, match=r"loss: expected a value a sample, shape \[4\], got \[\]"
    ):
        job.compute_loss(batch, seed=0, step=0)


def test_frozen_weights_of_the_backbone_and_frozen_backbones_are_refused():
    unet, encoders = text_unet(), _encoders()
    inputs, loss = dp.losses.epsilon(_scheduler(), latents="z", text="h")
    frozen = {
        **encoders.frozen(),
        "tied": lambda b: unet.conv_in.weight.sum().repeat(len(b["ids"])),
    }
    job = dp.Job(dp.chain(unet), frozen, inputs, loss)
    with pytest.raises(
        ConfigError, match=r"frozen\['tied'\]: .* got conv_in\.weight of the backbone"
    ):
        job.check(_batch())
    unet.requires_grad_(False)
    with pytest.raises(ConfigError, match="UNet2DConditionModel: expected parameters that train"):
        _job(unet, encoders).validate()


def test_descriptions_tell_jobs_apart():
    encoders = _encoders()
    first = json.loads(_job(text_unet(), encoders).describe())
    assert first == json.loads(_job(text_unet(), encoders).describe())
    assert first != json.loads(_job(text_unet(channels=(8, 8)), encoders).describe())
    assert first["components"] == {"z": ["z"], "h": ["h"]}
    assert first != json.loads(_job(text_unet(text_dim=16), encoders).describe())
    partly = text_unet()
    partly.conv_in.requires_grad_(False)
    assert first != json.loads(_job(partly, encoders).describe())


def test_a_plain_jobs_export_is_its_backbones_folder(tmp_path):
    from diffusers import ControlNetModel, UNet2DConditionModel

    unet, encoders = text_unet(), _encoders()
    _job(unet, encoders).export(tmp_path / "unet")
    loaded = UNet2DConditionModel.from_pretrained(tmp_path / "unet")
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), unet.parameters(), strict=True)
    )
    model = controlled()
    inputs, loss = dp.losses.epsilon(
        _scheduler(), latents="z", text="h", controlnet_cond="edges", locked="locked"
    )
    dp.Job(dp.chain(model), encoders.frozen(), inputs, loss).export(tmp_path / "control")
    loaded = ControlNetModel.from_pretrained(tmp_path / "control")
    assert torch.equal(loaded.conv_in.weight, model.controlnet.conv_in.weight)
    modules = nn.ModuleList([nn.Linear(2, 2)])
    dp.Job(dp.chain(modules), {}, inputs, loss).export(tmp_path / "list")
    assert (tmp_path / "list" / "model.safetensors").is_file()


def test_losses_that_depend_on_other_samples_are_refused():
    encoders, batch = _encoders(), _batch()
    good, mean = dp.losses.epsilon(_scheduler(), latents="z", text="h")
    chain = dp.chain(text_unet())
    good = good.bind(chain, has_estimate=False)

    def ranked(output, target):
        losses = mean(output, target)
        return losses / losses.sum()

    with pytest.raises(ConfigError, match="loss: expected row i to need row i only"):
        dp.Job(chain, encoders.frozen(), good, ranked).check(batch)

    def centred(b, f, d):
        made = good(b, f, d)
        return {**made, "sample": made["sample"] - made["sample"].mean(0)}

    with pytest.raises(ConfigError, match="loss: expected row i to need row i only"):
        dp.Job(chain, encoders.frozen(), centred, mean).check(batch)

    def drawing(b, f, d):
        made = good(b, f, d)
        return {**made, "sample": made["sample"] + torch.randn(1)}

    with pytest.raises(ConfigError, match="loss: expected the same values of the same rows"):
        dp.Job(chain, encoders.frozen(), drawing, mean).check(batch)


def test_outputs_that_draws_seldom_let_through_are_traced():
    """Captions are dropped at random, in the first trial all of them."""
    first = dp.Draw(0, 0, range(2)).uniform(name="drop").max()

    def inputs(batch, frozen, draw):
        is_kept = draw.uniform(name="drop") > first
        return {"sample": frozen["z"] + is_kept[:, None] * frozen["text"], "target": frozen["z"]}

    frozen = {"z": lambda b: b["x"], "text": lambda b: 2 * b["x"]}
    job = dp.Job(dp.chain([nn.Linear(3, 3)]), frozen, inputs, lambda o, t: (o - t).mean(1))
    assert job.feeds({"x": torch.randn(2, 3)}) == ({"sample": ("z", "text"), "target": ("z",)},)


def test_exports_go_to_folders_only(tmp_path):
    job = _job(text_unet(), _encoders())
    for folder in ("s3://bucket/out", tmp_path / "s3://bucket"):
        with pytest.raises(ConfigError, match="export: expected a folder, got the address"):
            job.export(folder)


def test_a_controlled_unet_recomputes_where_asked(monkeypatch):
    model = controlled()
    assert not model.is_gradient_checkpointing
    model.controlnet.enable_gradient_checkpointing()
    assert model.is_gradient_checkpointing
