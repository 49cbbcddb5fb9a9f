import json
import logging
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.storage import open_storage
from bytecheckpoint.storage.files import commit
from shared.errors import ConfigError


class Model(nn.Module):
    """Dropout, so that random numbers matter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, x, y):
        return {"loss": (self.layers(x).squeeze(-1) - y).square().mean()}


def samples():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 4, generator=generator)
    return [{"x": row, "y": row.sum()} for row in x]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def hugging_face(tmp_path, url, max_steps, every_n_steps=3, save_steps=0, **options):
    transformers = pytest.importorskip("transformers")
    from bytecheckpoint.integrations.transformers import CheckpointCallback

    callback = CheckpointCallback(url, every_n_steps=every_n_steps, **({"keep": 2} | options))
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"),
        per_device_train_batch_size=4,
        max_steps=max_steps,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=7,
        save_strategy="steps" if save_steps else "no",
        save_steps=save_steps or 500,
        save_only_model=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=5,
    )
    model = Model()
    trainer = transformers.Trainer(model, args, train_dataset=samples(), callbacks=[callback])
    return trainer, callback, model


@pytest.mark.slow  # importing the Trainer alone takes seconds
def test_transformers_goes_on_where_it_stopped(tmp_path, caplog):
    # 10 steps an epoch: the interruption is in the middle of the second.
    trainer, callback, whole = hugging_face(tmp_path, tmp_path / "a", 16)
    assert callback.resume_folder() is None
    trainer.train()
    trainer, callback, _ = hugging_face(tmp_path, tmp_path / "b", 14)
    trainer.train()
    with bcp.Checkpointer(tmp_path / "b") as ckpt:
        assert ckpt.steps() == [9, 12]
    trainer, callback, resumed = hugging_face(tmp_path, tmp_path / "b", 16)
    with caplog.at_level(logging.ERROR):
        trainer.train(resume_from_checkpoint=callback.resume_folder())
    assert trainer.state.global_step == 16
    assert_equal(whole.state_dict(), resumed.state_dict())
    with bcp.Checkpointer(tmp_path / "b") as ckpt:
        assert ckpt.steps() == [12, 15]
    with bcp.open(tmp_path / "b" / "step_00000015") as checkpoint:
        assert json.loads(checkpoint.extra["trainer_state"])["global_step"] == 15


@pytest.mark.slow  # importing the Trainer alone takes seconds
def test_transformers_saves_when_the_trainer_does(tmp_path):
    trainer, _, _ = hugging_face(tmp_path, tmp_path / "a", 7, every_n_steps=None, save_steps=3)
    trainer.train()
    with bcp.Checkpointer(tmp_path / "a") as ckpt:
        # The Trainer saves at the end too.
        assert ckpt.steps() == [6, 7]


@pytest.mark.slow  # importing the Trainer alone takes seconds
def test_transformers_keeps_the_best_by_a_metric(tmp_path):
    with pytest.raises(ConfigError, match="keep_best: expected a metric with each save"):
        hugging_face(tmp_path, tmp_path / "a", 7, keep=1, keep_best=1)
    scores = iter([0.5, 0.25, 0.75, 1.0])
    best = {"keep": 1, "keep_best": 1, "best": "min"}
    trainer, _, _ = hugging_face(tmp_path, tmp_path / "a", 13, metric=scores.__next__, **best)
    trainer.train()
    with bcp.Checkpointer(tmp_path / "a") as ckpt:
        assert ckpt.steps() == [6, 12]


def accelerated():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    # A training that was interrupted amid an accumulation leaves this off, for the whole process.
    accelerator.sync_gradients = True
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return (accelerator, *accelerator.prepare(model, optimizer))


def test_accelerate_saves_models_in_our_format_and_loads_them(tmp_path):
    from bytecheckpoint.integrations.accelerate import attach

    accelerator, model, optimizer = accelerated()
    attach(accelerator, {"model": model, "optimizer": optimizer})
    batch = torch.utils.data.default_collate(samples()[:8])
    for _ in range(2):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(str(tmp_path / "state"))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert not list((tmp_path / "state").glob("*.safetensors"))
    with bcp.open(tmp_path / "state" / "bytecheckpoint") as checkpoint:
        assert "optimizer.state.model.layers.0.weight.exp_avg" in checkpoint.names
    drawn = torch.rand(3)
    accelerator, model, optimizer = accelerated()
    attach(accelerator, {"model": model, "optimizer": optimizer})
    accelerator.load_state(str(tmp_path / "state"))
    assert_equal(saved, model.state_dict())
    assert optimizer.state_dict()["state"][0]["step"] == 2
    assert torch.equal(torch.rand(3), drawn)


def test_accelerate_refuses_to_drop_a_model_it_was_not_given(tmp_path):
    from bytecheckpoint.integrations.accelerate import attach

    accelerator, _, optimizer = accelerated()
    attach(accelerator, {"optimizer": optimizer})
    with pytest.raises(ConfigError, match="give attach"):
        accelerator.save_state(str(tmp_path / "state"))


class BareCallback:
    """What Lightning's callbacks derive from."""

    state_key = "bare"

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state, "it kept nothing"

    def on_save_checkpoint(self, trainer, module, checkpoint):
        """Nothing to add."""

    on_load_checkpoint = on_save_checkpoint


class BareModule(Model):
    """What Lightning's modules derive from."""

    strict_loading = True

    def on_save_checkpoint(self, checkpoint):
        """Nothing to add."""

    on_load_checkpoint = on_save_checkpoint


class Hooked(BareModule):
    """A module that counts, and saves its count by hooks."""

    count = 0

    def on_save_checkpoint(self, checkpoint):
        checkpoint["count"] = self.count
        checkpoint["means"] = torch.full((3,), float(self.count))

    def on_load_checkpoint(self, checkpoint):
        assert torch.equal(checkpoint["means"], torch.full((3,), float(checkpoint["count"])))
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()
        self.count = checkpoint["count"]


class Average(BareCallback):
    """A callback that puts an average in the weights' place, as Lightning's own does."""

    state_key = "Average"
    mean, num_updates = 0.0, 0

    def state_dict(self):
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state):
        self.num_updates = state["num_updates"]

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["current"] = checkpoint["state_dict"]
        means = {name: torch.full_like(v, 7.0) for name, v in checkpoint["current"].items()}
        checkpoint["state_dict"] = means

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.mean = checkpoint["state_dict"]["layers.0.bias"][0].item()
        assert module.layers[0].bias[0] == self.mean
        module.load_state_dict(checkpoint["current"])


class Plugin:
    """A precision plugin or data module with a state."""

    scale = 1

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]


def test_lightning_callback_by_its_protocol(tmp_path, monkeypatch):
    if find_spec("lightning"):
        pytest.skip("the tests below run the real one")
    stand_in = ModuleType("lightning.pytorch")
    kinds = {"Callback": BareCallback, "LightningModule": BareModule, "Trainer": object}
    stand_in.__dict__.update(kinds | {"__version__": "2"})
    package = ModuleType("lightning")
    package.__dict__["pytorch"] = stand_in
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stand_in)
    monkeypatch.delitem(sys.modules, "bytecheckpoint.integrations.lightning", raising=False)
    from bytecheckpoint.integrations.lightning import CheckpointCallback

    class Loop:
        def __init__(self):
            self.progress = {"ready": 0}

        def state_dict(self):
            return {"progress": dict(self.progress), "state_dict": {"combined_loader": [{"a": 1}]}}

        def load_state_dict(self, state):
            assert state["state_dict"] == {}, "loaders differ by rank and are not the loop's"
            self.progress = state["progress"]

    with pytest.raises(ConfigError, match="keep_best: expected a metric with each save"):
        CheckpointCallback(tmp_path, keep=1, keep_best=1)

    def made():
        model = Hooked()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        trainer = SimpleNamespace(
            model=model,
            optimizers=[optimizer],
            lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)],
            fit_loop=Loop(),
            global_step=0,
            current_epoch=0,
            lightning_module=model,
            callbacks=[Average()],
            precision_plugin=Plugin(),
            datamodule=None,
        )
        callback = CheckpointCallback(
            tmp_path, every_n_steps=2, keep=1, keep_best=1, metric=lambda: 0.5
        )
        trainer.callbacks.append(callback)
        callback.on_fit_start(trainer, model)
        return trainer, callback

    trainer, callback = made()
    batch = torch.utils.data.default_collate(samples()[:4])
    saved, drawn = {}, torch.zeros(0)
    for at in range(6):
        # Two batches a step.
        callback.on_train_batch_start(trainer, trainer.model, batch, at)
        trainer.model(**batch)["loss"].backward()
        if at % 2:
            trainer.optimizers[0].step()
            trainer.lr_scheduler_configs[0].scheduler.step()
            trainer.global_step += 1
            trainer.model.count += 1
            trainer.callbacks[0].num_updates += 2
            trainer.precision_plugin.scale *= 2
            trainer.fit_loop.progress["ready"] += 1
        callback.on_train_batch_end(trainer, trainer.model, {}, batch, at)
        if trainer.global_step == 2 and at % 2:
            saved = {name: value.clone() for name, value in trainer.model.state_dict().items()}
            drawn = torch.rand(2)
    callback.on_fit_end(trainer, trainer.model)
    with bcp.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [2]
    assert commit.read_manifest(open_storage(tmp_path), commit.format_step(2)).metric == 0.5
    trainer, callback = made()
    assert_equal(saved, trainer.model.state_dict())
    assert trainer.fit_loop.progress == {"ready": 2}
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2
    average = trainer.callbacks[0]
    assert (trainer.model.count, trainer.precision_plugin.scale) == (2, 4)
    assert (average.num_updates, average.mean) == (4, 7.0)
    torch.rand(5)
    callback.on_train_batch_start(trainer, trainer.model, batch, 4)
    assert torch.equal(torch.rand(2), drawn)


@pytest.mark.parametrize("every_n_steps", [3, 5])
def test_lightning_goes_on_where_it_stopped(tmp_path, every_n_steps):
    # 10 steps an epoch: 3 interrupts in the middle of the second, 5 at the end of the first.
    lightning = pytest.importorskip("lightning.pytorch", reason="not in the environment")
    from bytecheckpoint.integrations.lightning import CheckpointCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.count = Model(), 0

        def training_step(self, batch, at):
            self.count += 1
            return self.model(**batch)["loss"]

        def on_save_checkpoint(self, checkpoint):
            checkpoint["count"] = self.count

        def on_load_checkpoint(self, checkpoint):
            self.count = checkpoint["count"]

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def fit(url, max_steps):
        module = Module()
        torch.manual_seed(3)
        order = bcp.LoaderState(40, seed=1)
        loader = order.track(torch.utils.data.DataLoader(samples(), batch_size=4, sampler=order))
        trainer = lightning.Trainer(
            max_steps=max_steps,
            callbacks=[
                lightning.callbacks.EMAWeightAveraging(decay=0.9),
                CheckpointCallback(url, every_n_steps=every_n_steps, extra={"l": loader}),
            ],
            enable_checkpointing=False,
            logger=False,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
        return trainer, module

    trainer, whole = fit(tmp_path / "a", 16)
    averages = trainer.callbacks[0]
    fit(tmp_path / "b", 14)
    trainer, resumed = fit(tmp_path / "b", 16)
    assert trainer.global_step == 16
    assert trainer.fit_loop.epoch_progress.current.ready == 2
    assert_equal(whole.state_dict(), resumed.state_dict())
    assert resumed.count == whole.count == 16
    assert trainer.callbacks[0].state_dict() == averages.state_dict()
    with bcp.Checkpointer(tmp_path / "b") as ckpt:
        assert ckpt.steps() == list(range(every_n_steps, 17, every_n_steps))


@pytest.mark.slow
def test_the_guides_trainer_resumes_to_the_bit(tmp_path):
    """The block is left out where the page's blocks are run, as it imports transformers."""
    pytest.importorskip("transformers")
    page = Path(__file__).parents[2] / "docs" / "guide.md"
    text = page.read_text(encoding="utf-8")
    section = text.partition("\n## Resume with the Trainer of Transformers\n")[2]
    block = section.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "script.py").write_text(block)
    names = runpy.run_path(tmp_path / "script.py")
    assert names["resumed"].keys() == names["whole"].keys()
