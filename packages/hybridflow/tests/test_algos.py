"""What holds for every algorithm: the first update sees the policy that drew the responses."""

from dataclasses import replace

import pytest

from hybridflow.controller import Workers
from hybridflow.recipe import built_in, read_recipe
from hybridflow.training import Run


@pytest.mark.parametrize("name", sorted(built_in()))
def test_ratios_are_one_at_any_temperature_before_weights_have_moved(name):
    recipe = replace(read_recipe(name), temperature=0.6, steps=1, batch_size=32, num_updates=1)
    with Workers.inline() as workers:
        (told,) = Run.set_up(recipe, workers).steps()
    assert told["ratio"] == pytest.approx(1, abs=1e-5)
    assert told["k3"] == pytest.approx(0, abs=1e-6)


def test_the_reference_is_asked_at_the_temperature_of_drawing():
    recipe = replace(
        read_recipe("grpo-sort"), temperature=0.6, steps=1, batch_size=32, num_updates=1, beta=0.1
    )
    with Workers.inline() as workers:
        (told,) = Run.set_up(recipe, workers).steps()
    # The same weights at the same temperature: nothing has diverged.
    assert told["kl"] == pytest.approx(0, abs=1e-6)
