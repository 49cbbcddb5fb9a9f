"""Batches that are unlike the first one, or differ between ranks, are refused before weights change."""

import numpy as np
import pytest
import torch
from torch import nn

from diffusionpipe.job.chain import chain
from diffusionpipe.job.job import Job
from diffusionpipe.runtime.agreement import check_form, describe_batch
from diffusionpipe.runtime.engine import Engine
from diffusionpipe.runtime.weights import is_freed
from shared.comms import Group
from shared.errors import CommError, DataError

from .toy import BATCH, PLANS, make_batches, make_job, make_plan, make_sgd, train_plainly


def read_unlike(step, change):
    """Trains; rank 1's batch of a step is another one. What is told, the steps done, and losses of good batches."""
    engine = Engine(make_job(), PLANS["chain of 2"](), make_sgd)
    batches = make_batches(3)
    if Group.world().rank == 1:
        change(batches, step)
    with pytest.raises((CommError, DataError)) as told:
        list(engine.steps(batches))
    num_steps = engine.step
    return str(told.value), num_steps, list(engine.steps(make_batches(3)[num_steps:]))


def swap(batches, step):
    batches[step] = make_batches(step + 5)[-1]


def change_ids(batches, step):
    batches[step]["ids"] = (batches[step]["ids"] + 1) % 6


def swap_rows(batches, step):
    batches[step] = {name: value.roll(1, 0) for name, value in batches[step].items()}


def shorten(batches, step):
    batches[step] = {name: value[:-1] for name, value in batches[step].items()}


def end(batches, step):
    del batches[step:]


@pytest.mark.parametrize(
    ("step", "change"),
    [
        (0, swap_rows),
        (2, swap),
        (1, change_ids),
        (2, shorten),
        (0, end),
        (1, end),
    ],
)
def test_unlike_batches_are_refused_in_every_step(pair, step, change):
    losses, _ = train_plainly(make_batches(3))
    for text, num_steps, later in pair.run(read_unlike, step, change).results:
        assert f"batch of step {step}: expected the same batch on all ranks" in text
        assert "on the ranks [1]" in text
        # A batch is read a step ahead, and then no part of it is encoded.
        assert num_steps == max(0, step - 1)
        assert later == pytest.approx(losses[num_steps:], rel=1e-12)


def widen(batches, step):
    """A batch that only rank 1 refuses, alone."""
    batches[step]["ids"] = batches[step]["ids"].float()


def test_a_rank_that_refuses_its_batch_stops_all(pair):
    losses, _ = train_plainly(make_batches(3))
    first, second = pair.run(read_unlike, 2, widen).results
    assert "batch of step 2: expected the same batch on all ranks" in first[0]
    assert "expected ids of type int64 as in the first batch, got float32; make all" in second[0]
    for _, num_steps, later in (first, second):
        assert num_steps == 1
        assert later == pytest.approx(losses[1:], rel=1e-12)


def make_images(size, dtype=torch.float32, **more):
    generator = torch.Generator().manual_seed(size)
    pixels = torch.randn(BATCH, 3, size, size, generator=generator).to(dtype)
    return {"pixels": pixels, "captions": [f"a {number}" for number in range(BATCH)], **more}


def train_images(batch):
    """Layers of any image size, trained on the batch behind two others: what is told, and which weights changed."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(2)]
    job = Job(
        chain(convolutions),
        {"z": lambda b: b["pixels"].float(), "text": lambda b: torch.zeros(len(b["pixels"]), 1)},
        lambda batch, frozen, draw: {"sample": frozen["z"], "target": frozen["z"]},
        lambda output, target: (output - target).square().mean((1, 2, 3)),
    )
    engine = Engine(job, make_plan("chain", [[0], [1]], 2, num_layers=2), make_sgd)
    losses = []
    with pytest.raises(DataError) as told:
        losses += engine.steps([make_images(8), batch])
    kept = [weight for weight in job.trained.values() if not is_freed(weight)]
    torch.manual_seed(0)
    started = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(2)][Group.world().rank]
    same = all(torch.equal(*two) for two in zip(kept, started.parameters(), strict=True))
    return str(told.value), same, len(list(engine.steps([make_images(8)])))


CASES = [
    (make_images(16), "pixels of shape [3, 8, 8] as in the first batch, got [3, 16, 16]"),
    (make_images(8, torch.float64), "pixels of type float32 as in the first batch, got float64"),
    (
        make_images(8) | {"captions": list(range(BATCH))},
        "captions to be a list of texts as in the first batch, got a list of numbers",
    ),
    (
        {"pixels": make_images(8)["pixels"]},
        "captions to be a list of texts as in the first batch, got left out",
    ),
    (
        make_images(8, masks=torch.ones(BATCH)),
        "masks to be left out as in the first batch, got a tensor",
    ),
]


@pytest.mark.parametrize(("batch", "told"), CASES)
def test_batches_of_another_form_are_refused_before_any_weight_changes(pair, batch, told):
    for text, same, num_later in pair.run(train_images, batch).results:
        assert f"batch of step 1: expected {told}; make all batches alike, or plan for each" in text
        assert same
        assert num_later == 1


def test_arrays_and_tensors_have_one_form_and_missing_captions_are_texts_too():
    tensors, arrays = make_images(4), make_images(4)
    arrays["pixels"] = arrays["pixels"].numpy()
    arrays["captions"][2] = None
    check_form(describe_batch(arrays), describe_batch(tensors), 1)
    arrays["captions"] = np.array([str(number) for number in range(BATCH)])
    check_form(describe_batch(arrays), describe_batch(tensors), 1)
