"""A Trainer whose training raises: the model has no plan afterwards, and goes on as any model."""

import copy

import pytest
import torch

pytest.importorskip("accelerate", reason="transformers' Trainer asks for it")

from transformers import Trainer, TrainerCallback, TrainingArguments

from memo import Plan, apply
from memo.integrations.trainer import MemoCallback

from ..runtime.models import assert_same_step, make_batch, make_model, train

pytestmark = pytest.mark.unchecked

HALF = Plan.fixed(alpha=0.5)


class Interrupts(TrainerCallback):
    """Raises where it is asked to."""

    def __init__(self, event, error):
        self.error = error
        setattr(self, event, self.fail)

    def fail(self, *_, **__):
        raise self.error


class Rows(torch.utils.data.Dataset):
    error: BaseException | None = None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.error is not None and index == 2:
            raise self.error
        ids = make_batch(index, rows=1)[0]
        return {"input_ids": ids, "labels": ids}


def make_trainer(folder, model, callbacks, rows):
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=1, num_train_epochs=1, report_to=[],
        disable_tqdm=True, use_cpu=True, save_strategy="no",
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)


def fail_in_backward(model, error):
    def fail(*_):
        raise error

    return model.model.layers[1].mlp.register_full_backward_hook(fail)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("data", KeyboardInterrupt()),
        ("forward", ValueError("bad row")),
        ("backward", KeyboardInterrupt()),
        pytest.param("on_step_end", KeyboardInterrupt(), marks=pytest.mark.slow),
        pytest.param("on_train_begin", ValueError("bad setting"), marks=pytest.mark.slow),
    ],
)
def test_a_model_is_as_before_when_training_raises(tmp_path, place, error):
    model, rows = make_model("llama"), Rows()
    attributes = [set(vars(one)) for one in model.model.modules()]
    callbacks, handle = [MemoCallback(HALF)], None
    if place == "data":
        rows.error = error
    elif place == "forward":
        handle = model.model.layers[1].mlp.register_forward_hook(Interrupts("on_log", error).fail)
    elif place == "backward":
        handle = fail_in_backward(model, error)
    else:
        callbacks.append(Interrupts(place, error))
    trainer = make_trainer(tmp_path, model, callbacks, rows)
    with pytest.raises(type(error)):
        trainer.train()
    if handle is not None:
        handle.remove()
    assert [set(vars(one)) for one in model.model.modules()] == attributes
    fresh = make_model("llama")
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    expected = train(fresh, num_batches=1)
    assert_same_step(train(model, num_batches=1), expected)
    with apply(model, HALF):
        assert_same_step(train(model, num_batches=1), expected)


def test_training_begins_again_after_an_interrupt(tmp_path):
    model, rows = make_model("llama"), Rows()
    callback = MemoCallback(HALF)
    trainer = make_trainer(tmp_path, model, [callback], rows)
    rows.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    rows.error = None
    trainer.train()
    assert callback.run is not None
    assert callback.run.num_restored == 4 * 3
    assert not any("forward" in vars(layer) for layer in model.model.layers)
