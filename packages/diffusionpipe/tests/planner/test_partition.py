"""Partitions against brute force over every way to cut and replicate."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionpipe.planner.partitioning.bidirectional import (
    fold_stages,
    partition_bidirectional,
)
from diffusionpipe.planner.partitioning.partition import partition, sum_spans
from shared.errors import ConfigError


def cut(layers, stages):
    """Every way to cut so many layers into non-empty stages."""
    for ends in combinations(range(1, layers), stages - 1):
        yield list(zip((0, *ends), (*ends, layers), strict=True))


def share(devices, stages):
    """Every way to give each stage a device or more, all of them used."""
    for ends in combinations(range(1, devices), stages - 1):
        yield [b - a for a, b in zip((0, *ends), (*ends, devices), strict=True)]


def objective_s(stages, replicas, forward, backward, cuts, gradients, micro_batches, sync):
    """The issue's formula, word by word."""
    period = exposed = hidden = 0.0
    for (a, b), r in zip(stages, replicas, strict=True):
        period = max(period, (sum(forward[a:b]) + sum(backward[a:b])) / r)
        if b < len(forward):
            period = max(period, cuts[b - 1])
        exposed = max(exposed, 2 * (r - 1) / r * sum(gradients[a:b]) * sync - hidden)
        hidden += sum(backward[a:b]) / r
    return (micro_batches + 2 * len(stages) - 2) * period + exposed


numbers = st.floats(0, 4, allow_nan=False).map(lambda value: round(value, 2))


@st.composite
def chains(draw, most_layers=6, fewest=1):
    layers = draw(st.integers(fewest, most_layers))
    return [draw(st.lists(numbers, min_size=layers, max_size=layers)) for _ in range(4)]


@pytest.mark.unchecked
@settings(max_examples=150)
@given(chains(), st.data())
def test_partition_equals_brute_force(chain, data):
    forward, backward, cuts, gradients = chain
    stages = data.draw(st.integers(1, len(forward)))
    devices = data.draw(st.integers(stages, 7))
    micro_batches = data.draw(st.integers(1, 6))
    sync = data.draw(st.sampled_from([0.0, 0.1, 1.0, 5.0, 200.0]))
    result = partition(
        forward, backward, cuts, gradients, num_stages=stages, num_devices=devices,
        num_micro_batches=micro_batches, sync_s_per_byte=sync,
    )  # fmt: skip
    rest = (forward, backward, cuts, gradients, micro_batches, sync)
    best = min(
        objective_s(ends, replicas, *rest)
        for ends, replicas in product(cut(len(forward), stages), share(devices, stages))
    )
    assert result.objective_s == pytest.approx(best, rel=1e-9, abs=1e-12)
    # What it says of itself is true: the stages tile the chain, all devices are used.
    assert sum(result.replicas) == devices
    assert [a for a, _ in result.stages] == [0, *(b for _, b in result.stages)][:-1]
    assert all(a < b for a, b in result.stages)
    assert result.stages[-1][1] == len(forward)
    own = objective_s(result.stages, result.replicas, *rest)
    assert own == pytest.approx(result.objective_s, rel=1e-9, abs=1e-12)


def test_partition_by_hand():
    # Four layers of 3 s, two stages, two devices: two layers each, no sums.
    result = partition(
        [1.0] * 4, [2.0] * 4, [0.0] * 4, [1.0] * 4, num_stages=2, num_devices=2,
        num_micro_batches=4, sync_s_per_byte=1.0,
    )  # fmt: skip
    assert result.stages == [(0, 2), (2, 4)]
    assert result.replicas == [1, 1]
    assert result.objective_s == (4 + 2) * 6


def test_a_used_cut_counts_and_an_unused_one_does_not():
    # The even cut costs 9 s, so that the uneven one of 9 s is as good and cheaper behind layer 0.
    kwargs = {"num_stages": 2, "num_devices": 2, "num_micro_batches": 1, "sync_s_per_byte": 0.0}
    even = partition([1.0] * 4, [2.0] * 4, [0, 100, 0], [0] * 4, **kwargs)
    assert even.stages in ([(0, 1), (1, 4)], [(0, 3), (3, 4)])
    assert even.objective_s == 3 * 9


def test_earlier_backward_passes_hide_a_sum():
    # With one stage the sum of 2 x 1/2 x 6 bytes is exposed; as a second stage 4 s of it are hidden.
    alone = partition(
        [0.0],
        [4.0],
        [],
        [6.0],
        num_stages=1,
        num_devices=2,
        num_micro_batches=1,
        sync_s_per_byte=1.0,
    )
    assert alone.objective_s == 1 * 2 + 6
    behind = partition(
        [0.0, 0.0], [4.0, 8.0], [0.0], [0.0, 6.0], num_stages=2, num_devices=3, num_micro_batches=1,
        sync_s_per_byte=1.0,
    )  # fmt: skip
    assert behind.replicas == [1, 2]
    assert behind.objective_s == 3 * 4 + (6 - 4)


def test_zero_seconds_have_a_partition():
    result = partition(
        [0.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3, num_stages=2, num_devices=3,
        num_micro_batches=2, sync_s_per_byte=1.0,
    )  # fmt: skip
    assert result.objective_s == 0.0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_stages": 4}, "num_stages: expected 1 to 3, one layer a stage or more, got 4"),
        ({"num_stages": 0}, "num_stages: expected 1 to 3"),
        ({"num_devices": 1}, "num_devices: expected one a stage or more, got 1 for 2 stages"),
        ({"num_micro_batches": 0}, "num_micro_batches: expected 1 or more, got 0"),
        ({"sync_s_per_byte": -1.0}, "sync_s_per_byte: expected 1 finite numbers"),
    ],
)
def test_bad_numbers_are_refused(change, text):
    kwargs = {"num_stages": 2, "num_devices": 2, "num_micro_batches": 1, "sync_s_per_byte": 0.0}
    with pytest.raises(ConfigError, match=text):
        partition([1.0] * 3, [1.0] * 3, [0.0] * 3, [1.0] * 3, **kwargs | change)


@pytest.mark.parametrize(
    ("lists", "text"),
    [
        (([1, 1], [1], [0], [0, 0]), "backward_s: expected 2 finite numbers"),
        (([1, 1], [1, float("nan")], [0], [0, 0]), "backward_s: expected 2"),
        (([1, 1], [1, 1], [0, 0, 0], [0, 0]), "cut_s: expected 1 finite numbers"),
        (([1, 1], [1, 1], [0], [0]), "gradient_bytes: expected 2 finite numbers"),
    ],
)
def test_bad_lists_are_refused(lists, text):
    with pytest.raises(ConfigError, match=text):
        partition(*lists, num_stages=1, num_devices=1, num_micro_batches=1, sync_s_per_byte=0.0)


@pytest.mark.unchecked
@given(chains(5), chains(5), st.data())
def test_bidirectional_equals_brute_force(first, second, data):
    down, up = first[:3], second[:3]
    stages = data.draw(st.integers(1, min(len(down[0]), len(up[0]))))
    micro_batches = data.draw(st.integers(1, 6))
    result = partition_bidirectional(
        tuple(down), tuple(up), num_stages=stages, num_micro_batches=micro_batches
    )

    def period_s(down_stages, up_stages):
        period = 0.0
        for chain, ends in ((down, down_stages), (up, up_stages)):
            for _, b in ends[:-1]:
                period = max(period, chain[2][b - 1])
        for device in range(stages):
            total = 0.0
            for chain, (a, b) in (
                (down, down_stages[device]),
                (up, up_stages[stages - 1 - device]),
            ):
                total += sum(chain[0][a:b]) + sum(chain[1][a:b])
            period = max(period, total)
        return period

    best = min(
        period_s(*ends) for ends in product(cut(len(down[0]), stages), cut(len(up[0]), stages))
    )
    weight = micro_batches + 2 * stages - 2
    assert result.objective_s == pytest.approx(weight * best, rel=1e-9, abs=1e-12)
    own = period_s(list(result.down), list(result.up))
    assert weight * own == pytest.approx(result.objective_s, rel=1e-9, abs=1e-12)
    for chain, ends in ((down, result.down), (up, result.up)):
        assert ends[0][0] == 0
        assert ends[-1][1] == len(chain[0])
        assert all(a < b for a, b in ends)


@pytest.mark.parametrize(
    ("cuts", "stages"), [([50, 0], [(0, 2), (2, 3)]), ([0, 50], [(0, 1), (1, 3)])]
)
def test_a_slow_cut_of_either_chain_is_not_used(cuts, stages):
    # Either cut of a chain gives three of the six equal layers a device; one of them takes 50 s.
    slow, fast = ([1] * 3, [2] * 3, cuts), ([1] * 3, [2] * 3, [0, 0])
    options = {"num_stages": 2, "num_micro_batches": 1}
    down = partition_bidirectional(slow, fast, **options)
    assert (list(down.down), down.period_s) == (stages, 9)
    up = partition_bidirectional(fast, slow, **options)
    assert (list(up.up), up.period_s) == (stages, 9)


def test_bidirectional_refuses_short_chains():
    with pytest.raises(ConfigError, match=r"num_stages: expected 1 to 2"):
        partition_bidirectional(
            ([1] * 4, [1] * 4, [0] * 4),
            ([1] * 2, [1] * 2, [0] * 2),
            num_stages=3,
            num_micro_batches=1,
        )
    with pytest.raises(ConfigError, match=r"up.backward_s: expected 2 finite numbers"):
        partition_bidirectional(
            ([1] * 2, [1] * 2, [0] * 2), ([1] * 2, [1], [0] * 2), num_stages=1, num_micro_batches=1
        )


@pytest.mark.unchecked
@given(chains(7), st.data())
def test_folded_spans_equal_brute_force(chain, data):
    forward, backward = chain[:2]
    layers = len(forward)
    stages = data.draw(st.integers(1, (layers + 1) // 2))
    flat = st.lists(numbers, min_size=(layers + 1) ** 2, max_size=(layers + 1) ** 2)
    link = np.array(data.draw(flat)).reshape(layers + 1, layers + 1)
    time = sum_spans(forward) + sum_spans(backward)
    spans, period_s = fold_stages(time, link, stages)

    def longest(ends):
        worst = 0.0
        for device in range(stages):
            own = {device, 2 * stages - 2 - device}
            worst = max(worst, sum(time[ends[v]] for v in own))
            if device < stages - 1:
                worst = max(worst, link[ends[device][1], ends[2 * stages - 2 - device][0]])
        return worst

    assert period_s == pytest.approx(min(map(longest, cut(layers, 2 * stages - 1))), rel=1e-9)
    assert longest(list(spans)) == pytest.approx(period_s, rel=1e-9)
    assert len(spans) == 2 * stages - 1
