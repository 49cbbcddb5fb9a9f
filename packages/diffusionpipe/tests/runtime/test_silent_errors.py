"""What would train wrongly without a word is refused or put right."""

import gc
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from diffusionpipe.job.chain import chain
from diffusionpipe.job.job import Job
from diffusionpipe.runtime.agreement import sketch_batch
from diffusionpipe.runtime.engine import Engine
from diffusionpipe.runtime.shapes import Shapes, ValueShape
from diffusionpipe.runtime.stages import GradientSums, StageCompute
from shared.comms import Group
from shared.errors import CommError, ConfigError, DataError, DivergenceError

from .toy import (
    PLANS,
    WIDTH,
    encode_pixels,
    make_batch,
    make_batches,
    make_inputs,
    make_job,
    make_model,
    make_plan,
    make_sgd,
    train_plainly,
)


def make_engine(job=None):
    return Engine(job or make_job(), PLANS["one process"](), make_sgd)


def test_frozen_outputs_that_nothing_should_need_are_nan():
    shapes = Shapes(
        [{}],
        {"z": ValueShape((0, 3), (1, 0), torch.float32), "n": ValueShape((0,), (1,), torch.int64)},
        torch.device("cpu"),
    )
    filled = shapes.fill_frozen({}, 2)
    assert filled["z"].shape == (2, 3)
    assert filled["z"].isnan().all()
    assert filled["n"].tolist() == [0, 0]
    assert shapes.fill_frozen({"z": torch.ones(2, 3)}, 2)["z"].tolist() == [[1.0] * 3] * 2


def pad_to_longest(batch):
    """A one for each token, as wide as the longest text of these rows."""
    lengths = batch["ids"][:, :1] + 1
    return (torch.arange(int(lengths.max())) < lengths).double()


def use_mean(batch, frozen, draw):
    text = frozen["text"].mean(1, keepdim=True).expand(-1, WIDTH)
    return make_inputs(batch, {**frozen, "text": text}, draw)


def test_texts_padded_to_the_longest_are_refused_where_the_first_two_are_equally_long():
    batch = make_batch(0)
    batch["ids"][:, 0] = torch.tensor([2, 2, *[5] * 10])
    job = make_job(frozen={"z": encode_pixels, "text": pad_to_longest}, inputs=use_mean)
    told = r"of the next batch: expected text of shape \[1, 3\] and torch.float64, .* got \[1, 6\]"
    with pytest.raises(DataError, match=told):
        next(make_engine(job).steps([batch]))


class Adapter(nn.Module):
    """As of LoRA: its output is zero until it is trained."""

    def __init__(self):
        super().__init__()
        self.inner, self.a, self.b = (
            nn.Linear(WIDTH, WIDTH, bias=False).double() for _ in range(3)
        )
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.inner(x) + self.b(self.a(x))


def begin_with_other_adapters():
    torch.manual_seed(0)
    layers = [Adapter(), nn.Linear(WIDTH, WIDTH).double()]
    if Group.world().rank == 1:
        nn.init.ones_(layers[0].a.weight)
    job = Job(
        chain(layers),
        {"z": encode_pixels, "text": encode_pixels},
        lambda batch, frozen, draw: {"sample": frozen["z"], "target": frozen["text"]},
        lambda output, target: (output - target).square().mean(1),
    )
    engine = Engine(job, make_plan("data", [[0, 1]], 1, num_layers=2), make_sgd)
    with pytest.raises(CommError) as told:
        next(engine.steps(make_batches(1)))
    return str(told.value)


def test_adapters_that_differ_but_change_no_output_yet_are_refused(pair):
    for text in pair.run(begin_with_other_adapters).results:
        assert "expected the same weights, by a sketch of '0.a.weight', on all ranks" in text


def test_gradients_that_lie_there_already_are_not_added():
    losses, _ = train_plainly(make_batches())
    job = make_job()
    for weight in job.trained.values():
        weight.grad = torch.ones_like(weight)
    assert list(make_engine(job).steps(make_batches())) == pytest.approx(losses, rel=1e-12)


def test_a_step_that_is_broken_off_leaves_no_gradients():
    losses, _ = train_plainly(make_batches())
    engine = make_engine()
    with (
        mock.patch.object(StageCompute, "flush", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        list(engine.steps(make_batches()))
    assert all(weight.grad is None for weight in engine.job.trained.values())
    assert list(engine.steps(make_batches())) == pytest.approx(losses, rel=1e-12)


def test_a_report_of_no_step_is_refused():
    engine = make_engine()
    bad = make_batch(0)
    bad["pixels"][0] = torch.nan
    assert list(engine.steps([])) == []
    with pytest.raises(ConfigError, match="expected steps to report on, got none yet"):
        engine.report()
    # The checks before step 0 run on this sample too.
    with pytest.raises(DivergenceError, match=r"got NaN or infinity in .* samples \[0\]"):
        list(engine.steps([bad]))
    with pytest.raises(ConfigError, match="expected steps to report on, got none yet"):
        engine.report()


def count_sums():
    gc.collect()
    return sum(isinstance(one, GradientSums) for one in gc.get_objects())


def test_parameters_do_not_keep_an_engine():
    """Its hooks would keep its graph and the optimizer's state for as long as the model lives."""
    gc.freeze()  # so that only what follows is looked at
    job = make_job()
    engine = make_engine(job)
    list(engine.steps(make_batches(1)))
    assert count_sums() == 1
    del engine
    assert count_sums() == 0


def test_batches_of_one_row_are_checked_too():
    model = make_model()
    model.down[0].inner = nn.Sequential(model.down[0].inner, nn.Dropout(0.5))
    engine = Engine(make_job(model), make_plan("data", [[0]], 1, batch_size=1), make_sgd)
    with pytest.raises(ConfigError, match="draw"):
        next(engine.steps([make_batch(0, 1)]))
    plain = Engine(make_job(), make_plan("data", [[0]], 1, batch_size=1), make_sgd)
    losses, _ = train_plainly([make_batch(0, 1), make_batch(1, 1)])
    assert list(plain.steps([make_batch(0, 1), make_batch(1, 1)])) == pytest.approx(
        losses, rel=1e-12
    )
    # Shapes are learned from it too, for longer batches.
    batches = [make_batch(0, 1), make_batch(1)]
    losses, _ = train_plainly(batches)
    assert list(make_engine().steps(batches)) == pytest.approx(losses, rel=1e-12)


def test_steps_train_where_gradients_are_switched_off():
    losses, _ = train_plainly(make_batches())
    with torch.no_grad():
        assert list(make_engine().steps(make_batches())) == pytest.approx(losses, rel=1e-12)


def export_badly():
    engine = Engine(make_job(), PLANS["chain of 2"](), make_sgd)
    with (
        mock.patch.object(Job, "export", side_effect=ValueError("no such adapter")),
        pytest.raises((ValueError, CommError)) as told,
    ):
        engine.export("out")
    return type(told.value).__name__, str(told.value)


def test_an_export_that_fails_ends_all_ranks(pair):
    first, second = pair.run(export_badly).results
    assert first == ("ValueError", "no such adapter")
    assert second[0] == "CommError"
    assert "'no such adapter' on the ranks [0]" in second[1]


def test_addresses_are_no_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (make_engine().save, make_engine().load):
        with pytest.raises(
            ConfigError, match=r"s3://bucket/x: expected a folder .* got an address"
        ):
            call("s3://bucket/x")
    assert not list(tmp_path.iterdir())


def test_started_ranks_without_a_world_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"a world of the 2 ranks .* shared.comms.init_from_env\(\)"
    ):
        make_engine()


def test_flipped_arrays_are_sketched():
    images = np.arange(24.0).reshape(2, 3, 4)
    assert sketch_batch({"x": images[:, :, ::-1]}) == sketch_batch({"x": images[:, :, ::-1].copy()})
