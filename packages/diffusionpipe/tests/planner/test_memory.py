"""Memory as a bound: peaks of a plan by hand, and partitions within a limit against brute force."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionpipe import plan
from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.memory import find_peak_bytes
from diffusionpipe.planner.partitioning.partition import StageTables, solve_stages, sum_spans
from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.schedule import order_1f1b
from shared.errors import ConfigError
from shared.topology import Cluster
from shared.topology.device import CPU

from .test_partition import cut, share


def test_peaks_are_those_by_hand(make_profile):
    # Four layers of 1,000 bytes of weights; two rows a micro-batch, eight a step.
    profile = make_profile(4, gradient_bytes=1000, saved_bytes=10)
    passes = order_1f1b(2, 4)
    encode = Action("encode", name="z", samples=(0, 8))
    plan = Plan(
        placement="chain", num_stages=2, num_micro_batches=4, batch_size=8,
        spans=((0, 1), (1, 4)), devices=((0,), (1,)),
        order=((encode, *passes[0], Action("step")), (*passes[1], Action("step"))),
    )  # fmt: skip
    inputs = PlanInputs(profile, Cluster.uniform(2, 1, CPU))
    first, second = find_peak_bytes(plan, inputs)
    # Weights, gradients and two moments; saved values of two and of one micro-batch in flight; the
    # frozen outputs of eight rows (500 bytes each) twice; the encoder's weights where it runs.
    assert first == 4 * 1000 + 10 * 2 * 2 + 2 * 8 * 500 + 2_000_000
    assert second == 3 * 4 * 1000 + 3 * 10 * 2 * 1 + 2 * 8 * 500
    # Steps that predict twice have another order, here with two more micro-batches in flight.
    ahead = [Action(kind, 0, m) for kind in ("forward", "backward") for m in range(4)]
    twice = replace(plan, estimate_order=((*ahead, Action("step")), plan.order[1]))
    assert find_peak_bytes(twice, inputs) == [first + 10 * 2 * 2, second]


def test_an_encoders_intermediate_values_count_while_passes_are_in_flight(make_profile):
    passes = order_1f1b(2, 4)
    jobs = [Action("encode", name="z", samples=samples) for samples in ((0, 5), (5, 8))]
    plan = Plan(
        placement="chain", num_stages=2, num_micro_batches=4, batch_size=8,
        spans=((0, 1), (1, 4)), devices=((0,), (1,)),
        order=((*jobs, *passes[0], Action("step")), (*passes[1], Action("step"))),
    )  # fmt: skip
    plain = make_profile(4, gradient_bytes=1000, saved_bytes=10)
    cluster = Cluster.uniform(2, 1, CPU)
    without = find_peak_bytes(plan, PlanInputs(plain, cluster))
    profile = replace(plain, frozen_working_bytes={"z": 700})
    first, second = find_peak_bytes(plan, PlanInputs(profile, cluster))
    # The larger of the two jobs, on the rank that encodes.
    assert (first, second) == (without[0] + 5 * 700, without[1])


def test_a_stage_whose_micro_batches_in_flight_do_not_fit_is_not_used():
    # Two equal layers a stage are fastest, but the first stage keeps two micro-batches of 10 bytes;
    # one layer keeps two of 5, and the three others one of 15.
    tables = StageTables(
        time_s=sum_spans([1.0] * 4)[..., None] * np.ones(2),
        backward_s=np.zeros((5, 5, 2)),
        sync_s=np.zeros((5, 5, 2)),
        cut_s=np.zeros(5),
        fixed_bytes=np.zeros((5, 5, 2)),
        flight_bytes=sum_spans([5.0] * 4)[..., None] * np.ones(2),
        limit_bytes=np.full((3, 2), 15.0),
    )
    result = solve_stages(tables, 2, 2, 2)
    assert result is not None
    assert result.stages == [(0, 1), (1, 4)]
    assert solve_stages(tables._replace(limit_bytes=np.full((3, 2), 20.0)), 2, 2, 2).stages == [
        (0, 2),
        (2, 4),
    ]


@pytest.mark.unchecked
@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_partitions_within_memory_equal_brute_force(seed):
    source = random.Random(seed)
    layers = source.randint(1, 5)
    time, back, sync, fixed, flight = (
        [float(source.randint(0, 9)) for _ in range(layers)] for _ in range(5)
    )
    if source.random() < 0.5:
        sync = [0.0] * layers  # then many ways expose as little, and only memory tells them apart
    num_stages, micro_batches = source.randint(1, layers), source.randint(1, 4)
    devices = source.randint(num_stages, 6)
    # Not all numbers of replicas are allowed, as where they do not divide the rows.
    allowed = {1, *source.sample(range(2, 7), source.randint(0, 5))}

    # Some devices have more memory than others; stages take them in order.
    extra = [source.choice([0, 0, 0, 5, 20]) for _ in range(devices)]

    def find_peak(ends, counts):
        """The least common part of all devices' memory with which these stages fit."""
        firsts = np.cumsum([0, *counts])
        return max(
            sum(fixed[a:b]) + min(num_stages - stage, micro_batches) * sum(flight[a:b]) / r
            - min(extra[firsts[stage] : firsts[stage] + r])
            for stage, ((a, b), r) in enumerate(zip(ends, counts, strict=True))
        )  # fmt: skip

    # One way, or about one, fits just so: then the limit often excludes the fastest.
    ways = list(product(cut(layers, num_stages), share(devices, num_stages)))
    limit = find_peak(*source.choice(ways)) - source.choice([0, 0, 2]) + 0.05
    replicas = np.arange(devices + 1)
    ratio = 1.0 / np.maximum(replicas, 1)
    time_s = sum_spans(np.add(time, back))[..., None] * ratio
    time_s[..., [count for count in replicas if count not in allowed]] = np.inf
    limits = np.full((devices + 1, devices + 1), np.inf)
    for first in range(devices):
        for count in range(1, devices - first + 1):
            limits[first, count] = limit + min(extra[first : first + count])
    tables = StageTables(
        time_s=time_s,
        backward_s=sum_spans(back)[..., None] * ratio,
        sync_s=sum_spans(sync)[..., None] * (replicas > 1),
        cut_s=np.zeros(layers + 1),
        fixed_bytes=sum_spans(fixed)[..., None] * np.ones(devices + 1),
        flight_bytes=sum_spans(flight)[..., None] * ratio,
        limit_bytes=limits,
    )
    best = np.inf
    for ends, counts in ways:
        period = exposed = hidden = 0.0
        fits = set(counts) <= allowed and find_peak(ends, counts) <= limit
        for (a, b), r in zip(ends, counts, strict=True):
            period = max(period, (sum(time[a:b]) + sum(back[a:b])) / r)
            exposed = max(exposed, sum(sync[a:b]) * (r > 1) - hidden)
            hidden += sum(back[a:b]) / r
        if fits:
            best = min(best, (micro_batches + 2 * num_stages - 2) * period + exposed)
    result = solve_stages(tables, num_stages, devices, micro_batches)
    assert (result.objective_s if result else np.inf) == pytest.approx(best)
    if result:
        assert find_peak(result.stages, result.replicas) <= limit


def draw_chain(chain, source):
    """The same chain with other bytes of weights and of kept values by layer, and other feeds."""
    weights, saved = (tuple(source.randint(0, most) for _ in chain.layers) for most in (1000, 2000))
    feeds = {key: source.choice([(), ("z",)]) for key in ("x", "target")}
    return replace(
        chain, parameter_bytes=weights, gradient_bytes=weights, saved_bytes=saved, feeds=feeds
    )


def find_least_peaks(profile, spans_by_device, rows, micro_batches):
    """Least bytes of each device: one micro-batch in flight, of one backbone at a time."""
    peaks = []
    for own in spans_by_device:
        fixed, saved, feeds = 0, {}, set()
        for backbone, (first, stop) in own:
            chain = profile.chains[backbone]
            fixed += 4 * sum(chain.gradient_bytes[first:stop])
            saved[backbone] = saved.get(backbone, 0) + sum(chain.saved_bytes[first:stop])
            feeds.update(chain.feeds["x"] if first == 0 else ())
            feeds.update(chain.feeds["target"] if stop == len(chain.layers) else ())
        outputs = 2 * rows * micro_batches * profile.frozen_bytes["z"] * len(feeds)
        peaks.append(fixed + rows * max(saved.values()) + outputs)
    return peaks


@pytest.mark.unchecked
@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["folded", "opposite"]))
def test_two_spans_a_device_are_chosen_if_and_only_if_some_fit(make_profile, seed, placement):
    source = random.Random(seed)
    stages, micro_batches = source.randint(2, 3), source.choice([1, 2, 4])
    rows = source.randint(1, 3)
    fewest = 2 * stages - 1 if placement == "folded" else stages
    layers = source.randint(fewest, fewest + 2)
    frozen_s = source.choice([0.0, 0.01])
    profile = make_profile(layers, chains=1 + (placement == "opposite"), frozen_s=frozen_s)
    frozen = source.randint(0, 8000) if frozen_s else 0
    profile = replace(
        profile, chains=tuple(draw_chain(each, source) for each in profile.chains),
        frozen_parameter_bytes={"z": frozen} if frozen_s else {},
    )  # fmt: skip
    peaks = []
    if placement == "folded":
        for ends in cut(layers, 2 * stages - 1):
            pairs = [{ends[d], ends[2 * stages - 2 - d]} for d in range(stages)]
            devices = [[(0, span) for span in own] for own in pairs]
            peaks.append(find_least_peaks(profile, devices, rows, micro_batches))
    else:
        for down, up in product(cut(layers, stages), repeat=2):
            devices = [[(0, down[d]), (1, up[stages - 1 - d])] for d in range(stages)]
            peaks.append(find_least_peaks(profile, devices, rows, micro_batches))
    # Some device encodes, and so holds the encoder's weights.
    needs = [max(max(own), min(own) + frozen) for own in peaks]
    limit = max(min(needs) + source.choice([-1, 0, 0, 100]), 1)
    cluster = Cluster.uniform(stages, 1, replace(CPU, memory_bytes=limit))
    options = {"num_stages": stages, "num_micro_batches": micro_batches, "placement": placement}
    if limit < min(needs):
        with pytest.raises(ConfigError, match="expected a plan within"):
            plan(None, profile, cluster, batch_size=rows * micro_batches, **options)
        return
    chosen = plan(None, profile, cluster, batch_size=rows * micro_batches, **options)
    assert max(each.peak_bytes for each in chosen.ranks) <= limit
    assert sum(each.kind == "encode" for own in chosen.order for each in own) >= bool(frozen_s)


def test_narrow_weights_have_wide_sums(make_profile):
    # A layer of 1,000 bytes in bfloat16: sums of 2,000 in float32, two moments and the step's gradients
    # as narrow as the weights.
    profile = make_profile(4, gradient_bytes=1000, saved_bytes=0, frozen_s=0.0)
    chain = replace(profile.chains[0], sum_bytes=(2000,) * 4)
    wide = replace(profile, chains=(chain,))
    cluster = Cluster.uniform(2, 1, CPU)
    options = {"batch_size": 4, "placement": "data", "num_micro_batches": 1}
    plans = [plan(None, each, cluster, **options) for each in (profile, wide)]
    frozen_outputs = 2 * 2 * 500
    peaks = [each.ranks[0].peak_bytes - frozen_outputs for each in plans]
    assert peaks == [4 * 4 * 1000, 4 * (1000 + 2000 + 2 * 1000 + 1000)]
    # A ring of two: each sends all sums once.
    assert [each.ranks[0].sent_bytes for each in plans] == [4 * 1000, 4 * 2000]
