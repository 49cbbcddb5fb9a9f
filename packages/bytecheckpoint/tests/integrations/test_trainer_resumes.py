"""Trainer runs that are killed and resumed, beside the run that nothing interrupts."""

import gc
import json
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import bytecheckpoint as bcp
from shared.errors import ConfigError

# Importing the Trainer alone takes seconds; checks of signatures draw from Python's generator.
pytestmark = [pytest.mark.slow, pytest.mark.unchecked]
transformers = pytest.importorskip("transformers")

NUM_ROWS = 24


class Model(nn.Module):
    """Dropout, so that random numbers matter; rows of any length."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(50, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, input_ids, labels):
        return {"loss": (self.layers(input_ids).mean((1, 2)) - labels).square().mean()}

    def num_parameters(self, exclude_embeddings):
        return 9


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (NUM_ROWS,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(50, (n,), generator=generator), "labels": torch.tensor(n / 9)}
        for n in lengths
    ]


def collate(batch):
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in batch], batch_first=True)
    return {"input_ids": ids, "labels": torch.stack([row["labels"] for row in batch])}


def make_killer(kill_step):
    """A callback that ends training as a signal does, after the optimizer's step of a number."""

    class Killer(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **objects):
            if state.global_step == kill_step:
                raise KeyboardInterrupt

    return Killer()


def run(
    folder, rows, *, kill_step=None, saving=None, resume=None, sampler=None, callbacks=(), **options
):
    """Trains, and returns the Trainer, its weights and the rate of each step that it made."""
    from bytecheckpoint.integrations.transformers import CheckpointCallback

    for seed in (random.seed, np.random.seed):
        seed(0)
    rates = {}

    class Rates(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer, **objects):
            rates[state.global_step + 1] = optimizer.param_groups[0]["lr"]

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, dataset=None):
            return super()._get_train_sampler(dataset) if sampler is None else sampler

    settings = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    own = []
    if saving is not None:
        own = [CheckpointCallback(folder / "run", **saving)]
        resume = own[0].resume_folder()
    model = Model()
    trainer = Trainer(
        model,
        transformers.TrainingArguments(str(folder / "out"), **(settings | options)),
        train_dataset=rows,
        eval_dataset=rows[:4],
        data_collator=collate,
        callbacks=[Rates(), *own, *(make() for make in callbacks), make_killer(kill_step)],
    )
    try:
        trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        assert kill_step is not None
        own[0].close()
    return trainer, model.state_dict(), rates


def assert_resumes(folder, rows, kill_step, saving, resumed_at, **options):
    """Compares a resumed run with one that nothing interrupts, and returns the latter's Trainer."""
    whole, weights, rates = run(folder / "whole", rows, **options)
    run(folder, rows, kill_step=kill_step, saving=saving, **options)
    again, resumed, later_rates = run(folder, rows, saving=saving, **options)
    assert min(later_rates) == resumed_at + 1
    assert later_rates == {step: rates[step] for step in later_rates}
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert again.state.global_step == whole.state.global_step
    assert again.state.best_metric == whole.state.best_metric
    assert again.state.total_flos == whole.state.total_flos > 0
    steps = [[entry["step"] for entry in one.state.log_history] for one in (whole, again)]
    assert steps[0] == steps[1]
    return whole


GROUPED = {"train_sampling_strategy": "group_by_length"}
PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
    "metric_for_best_model": "loss",
}


@pytest.mark.parametrize(
    ("kill_step", "every_n_steps", "resumed_at", "options"),
    [
        (6, 4, 4, {}),
        (13, 12, 12, {}),
        (13, 4, 12, {"eval_strategy": "epoch"}),
        (6, 4, 4, GROUPED),
        (18, 4, 16, GROUPED),
        (6, 4, 4, GROUPED | {"gradient_accumulation_steps": 2}),
        (6, 4, 4, PLATEAU | {"eval_strategy": "steps", "eval_steps": 4}),
        (14, 12, 12, PLATEAU | {"eval_strategy": "epoch"}),
        (18, 4, 16, {"accelerator_config": {"use_seedable_sampler": False}}),
        (6, 4, 4, {"logging_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 5}),
    ],
    ids=[
        "in an epoch",
        "at its end",
        "at its end, evaluated",
        "grouped",
        "grouped, second epoch",
        "grouped, accumulated",
        "plateau",
        "plateau of epochs",
        "order by the global generator",
        "logs",
    ],
)
def test_a_killed_run_resumes_to_the_bit(
    tmp_path, rows, kill_step, every_n_steps, resumed_at, options
):
    saving = {"every_n_steps": every_n_steps}
    assert_resumes(tmp_path, rows, kill_step, saving, resumed_at, **options)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_run_saved_with_the_trainers_own_resumes_to_the_bit(tmp_path, rows, strategy):
    options = {"save_strategy": strategy, "save_steps": 4, "save_only_model": True}
    at = {"steps": 4, "epoch": 12}[strategy]
    assert_resumes(tmp_path, rows, at + 2, {}, at, eval_strategy="epoch", **(PLATEAU | options))


class Shuffled(torch.utils.data.Sampler):
    """A sampler that draws its order from a global generator."""

    def __init__(self, shuffle):
        self.shuffle = shuffle

    def __len__(self):
        return NUM_ROWS

    def __iter__(self):
        return iter(self.shuffle())


def shuffle_by_python():
    order = list(range(NUM_ROWS))
    random.shuffle(order)
    return order


SHUFFLES = {
    "torch": lambda: torch.randperm(NUM_ROWS).tolist(),
    "numpy": lambda: np.random.permutation(NUM_ROWS).tolist(),
    "python": shuffle_by_python,
}


@pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES)
def test_samplers_that_draw_from_a_global_generator_keep_their_order(tmp_path, rows, shuffle):
    assert_resumes(tmp_path, rows, 18, {"every_n_steps": 4}, 16, sampler=Shuffled(shuffle))


def test_callbacks_that_keep_a_state_get_it_back_where_the_trainer_restores_them(tmp_path, rows):
    class Freezer(transformers.TrainerCallback):
        """As programs do before they fork: the collector no longer lists what exists."""

        def on_init_end(self, *args, **objects):
            gc.freeze()

    options = {
        "callbacks": [lambda: transformers.EarlyStoppingCallback(3), Freezer],
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "learning_rate": 0.0,  # no evaluation is better than the first one
        "restore_callback_states_from_checkpoint": True,
    }
    try:
        whole = assert_resumes(tmp_path, rows, 6, {"every_n_steps": 4}, 4, **options)
    finally:
        gc.unfreeze()
    assert whole.state.global_step == 8, "the third evaluation after the first one stops it"
    with bcp.open(tmp_path / "run" / "step_00000004") as checkpoint:
        kept = json.loads(checkpoint.extra["trainer_state"])["stateful_callbacks"]
    assert kept["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"] == 1
    assert kept.keys() == {"EarlyStoppingCallback", "TrainerControl"}, "as the Trainer's own file"


def test_a_resume_that_skips_no_data_is_as_the_trainers_own(tmp_path, rows):
    options = {"sampler": Shuffled(SHUFFLES["torch"]), "ignore_data_skip": True}
    own = {"save_strategy": "steps", "save_steps": 4}
    run(tmp_path, rows, kill_step=6, saving={"every_n_steps": 4}, **options, **own)
    (tmp_path / "run").rename(tmp_path / "kept")
    _, expected, _ = run(tmp_path, rows, resume=tmp_path / "out" / "checkpoint-4", **options)
    (tmp_path / "kept").rename(tmp_path / "run")
    _, resumed, _ = run(tmp_path, rows, saving={"every_n_steps": 4}, **options)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def make_scaled(scale):
    """What a Trainer gives callbacks that trains by float16 under Accelerate."""
    model = Model()
    wrapped = SimpleNamespace(
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        scaler=torch.amp.GradScaler("cpu", init_scale=scale),
    )
    scheduler = torch.optim.lr_scheduler.ConstantLR(wrapped.optimizer)
    return {"model": model, "optimizer": wrapped, "lr_scheduler": scheduler}


def test_a_gradient_scaler_gets_its_scale_back_and_a_new_training_nothing_due(tmp_path):
    from bytecheckpoint.integrations.transformers import CheckpointCallback

    def begin(callback, scale, step):
        state, control = transformers.TrainerState(global_step=step), transformers.TrainerControl()
        objects = make_scaled(scale)
        arguments = (SimpleNamespace(ignore_data_skip=False), state, control)
        callback.on_train_begin(*arguments, **objects)
        return objects, arguments

    callback = CheckpointCallback(tmp_path / "run", every_n_steps=1)
    objects, arguments = begin(callback, 8.0, 1)
    callback.on_step_end(*arguments, **objects)
    callback.close()  # as an exception in this step ends training, before it is saved
    objects, arguments = begin(callback, 16.0, 2)
    callback.on_epoch_begin(*arguments, **objects)
    callback.on_step_end(*arguments, **objects)
    callback.on_step_begin(*arguments, **objects)
    callback.on_train_end()
    with bcp.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.steps() == [2]
    folder = callback.resume_folder()
    objects, _ = begin(callback, 1.0, 2)
    assert objects["optimizer"].scaler.get_scale() == 16.0
    callback.on_train_end()
    assert not os.path.exists(folder)
    objects, _ = begin(callback, 1.0, 0)
    assert objects["optimizer"].scaler.get_scale() == 1.0, "another training begins anew"
    callback.on_train_end()


def test_a_killed_first_save_and_a_run_that_ended_resume(tmp_path, rows):
    os.makedirs(tmp_path / "run" / "step_00000004" / "data-0123456789ab")
    trainer, weights, rates = run(tmp_path, rows, saving={"every_n_steps": 24})
    assert min(rates) == 1
    again, resumed, rates = run(tmp_path, rows, saving={"every_n_steps": 24})
    assert not rates
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    ends = [one.state.log_history[-1]["step"] for one in (trainer, again)]
    assert ends == [24, 24]
    assert len(again.state.log_history) == len(trainer.state.log_history)


def test_the_last_step_is_saved_before_the_best_weights_are_loaded(tmp_path, rows):
    options = {"eval_strategy": "steps", "eval_steps": 12, "learning_rate": 0.5}
    trainer, _, _ = run(tmp_path / "plain", rows, **options)
    last = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    best = {"save_strategy": "steps", "save_steps": 12, "metric_for_best_model": "loss"}
    best |= {"load_best_model_at_end": True, "greater_is_better": False}
    trainer, weights, _ = run(tmp_path, rows, saving={"every_n_steps": 24}, **(options | best))
    assert trainer.state.best_global_step == 12
    with bcp.open(tmp_path / "run" / "step_00000024") as checkpoint:
        for name, value in last.items():
            assert torch.equal(checkpoint.read(f"model.{name}"), value)
    assert not all(torch.equal(last[name], weights[name]) for name in last)


def test_a_resume_without_the_folder_is_refused(tmp_path, rows):
    from bytecheckpoint.integrations.transformers import CheckpointCallback

    run(tmp_path, rows, saving={"every_n_steps": 4}, max_steps=4)
    callback = CheckpointCallback(tmp_path / "run", every_n_steps=4)
    callback.resume_folder()
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), report_to=[], use_cpu=True, save_strategy="no"
    )
    trainer = transformers.Trainer(
        Model(), arguments, train_dataset=rows, data_collator=collate, callbacks=[callback]
    )
    with pytest.raises(ConfigError, match=r"resume from step 4 .* got step 0; call"):
        trainer.train()
