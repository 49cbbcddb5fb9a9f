"""Sketches of batches: unlike ones differ, and rounding does not matter."""

import numpy as np
import torch

from diffusionpipe.runtime.agreement import sketch_batch


def make_batch():
    generator = torch.Generator().manual_seed(0)
    return {
        "pixels": torch.randn(16, 3, 32, 32, generator=generator),
        "ids": torch.randint(0, 1000, (16, 20), generator=generator),
        "captions": [f"a picture of {number}" for number in range(16)],
        "labels": np.arange(16),
    }


def test_rounding_hardly_changes_a_sketch():
    batch = make_batch()
    rounded = {**batch, "pixels": batch["pixels"] * (1 + 1e-6)}
    assert abs(sketch_batch(rounded) - sketch_batch(batch)) < 1e-5
    assert sketch_batch(make_batch()) == sketch_batch(batch)


def test_each_entry_changes_a_sketch():
    batch = make_batch()
    others = [
        {"pixels": batch["pixels"].flip(0)},
        {"pixels": batch["pixels"] * 2},
        {"pixels": batch["pixels"].clone().index_fill_(0, torch.tensor([7]), 0.0)},
        {"ids": batch["ids"].flip(0)},
        {"captions": [*batch["captions"][:-1], "another one"]},
        {"labels": batch["labels"] + 1},
    ]
    sketches = [sketch_batch(batch), *(sketch_batch({**batch, **other}) for other in others)]
    for index, one in enumerate(sketches):
        assert all(abs(one - other) > 1e-2 for other in sketches[:index])


def test_what_has_no_numbers_or_addresses_as_texts_is_left_out():
    assert sketch_batch({"images": [object()]}) == sketch_batch({"images": [object()]})
    assert sketch_batch({"x": torch.tensor([float("nan")])}) == sketch_batch(
        {"x": torch.tensor([float("nan")])}
    )
