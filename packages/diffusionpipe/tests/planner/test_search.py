"""The whole search: what it chooses where, and that what it chooses holds together."""

import random
import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diffusionpipe import Job, Plan, chain, plan
from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.plan import Action
from diffusionpipe.planner.replay import PlanReplay
from diffusionpipe.planner.schedule import order_1f1b
from diffusionpipe.planner.search.candidates import Constraints, list_sketches
from shared.errors import ConfigError
from shared.topology import Cluster, Link
from shared.topology.device import CPU
from shared.units import Gbps, Mbps


def make_cluster(hosts, per_host=1, rate=100 * Mbps, device=CPU):
    return Cluster.uniform(
        hosts, per_host, device, network=Link.from_rate(rate, alpha_s=1e-4),
        local=Link.from_rate(100 * Gbps, alpha_s=1e-5),
    )  # fmt: skip


def check_holds_together(chosen, profile, execute):
    """Every sample of every component once, every pass once, no deadlock, consistent bytes."""
    for name in profile.frozen_s:
        rows = [
            row
            for actions in chosen.order
            for action in actions
            if action.kind == "encode" and action.name == name
            for row in range(*action.samples)
        ]
        assert sorted(rows) == list(range(chosen.batch_size))
        owned = [
            (rank, row)
            for rank, ranges in enumerate(chosen.owners[name])
            for first, stop in ranges
            for row in range(first, stop)
        ]
        encoded = [
            (rank, row)
            for rank, actions in enumerate(chosen.order)
            for action in actions
            if action.kind == "encode" and action.name == name
            for row in range(*action.samples)
        ]
        assert sorted(owned) == sorted(encoded)
    for rank, actions in enumerate(chosen.order):
        stages = chosen.stages_of(rank)
        assert actions[-1].kind == "step"
        for stage in stages:
            kinds = [each.kind for each in actions if each.stage == stage]
            assert kinds.count("forward") == kinds.count("backward") == chosen.num_micro_batches
            assert kinds.count("sum") == (len(chosen.devices[stage]) > 1)
            if "sum" in kinds:
                assert kinds[-1] == "sum"
    for stage, ranks in enumerate(chosen.devices):
        rows = [
            row
            for m in range(chosen.num_micro_batches)
            for rank in ranks
            for row in chosen.samples(stage, m, rank)
        ]
        assert sorted(rows) == list(range(chosen.batch_size))
    # One group's lists run to their end on their own.
    group = [
        [each for each in chosen.order[rank] if each.kind in ("forward", "backward")]
        for rank in dict.fromkeys(own[0] for own in chosen.devices)
    ]
    execute(group, [len(chosen.spans)])


@pytest.mark.parametrize("placement", ["data", "chain", "folded"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_plans_hold_together(make_profile, execute, placement, hosts):
    profile = make_profile(9, skips=True)
    chosen = plan(None, profile, make_cluster(hosts), batch_size=16, placement=placement)
    assert chosen.placement == placement
    check_holds_together(chosen, profile, execute)
    assert chosen.predicted_s >= chosen.limit_s
    assert chosen.cached_s <= chosen.predicted_s * (1 + 1e-9)
    assert chosen.predicted_s <= chosen.unfilled_s * (1 + 1e-9)


def test_slow_links_choose_a_pipeline_and_fast_ones_do_not(make_profile):
    profile = make_profile(9, gradient_bytes=6_000_000)
    slow = plan(None, profile, make_cluster(2), batch_size=16)
    assert slow.placement in ("chain", "folded")
    assert "Do not pipeline" not in slow.explain()
    fast = plan(None, profile, make_cluster(2, rate=1000 * Gbps), batch_size=16)
    assert fast.placement == "data"
    assert fast.explain().startswith("Do not pipeline. Data parallelism on 2 ranks")


def test_heavy_skips_choose_folding(make_profile):
    profile = make_profile(9, skips=True, gradient_bytes=6_000_000, hidden_bytes=60_000)
    chosen = plan(None, profile, make_cluster(2), batch_size=16)
    assert chosen.placement == "folded"
    chain = plan(None, profile, make_cluster(2), batch_size=16, placement="chain")
    assert chain.predicted_s > chosen.predicted_s
    count = sum(chosen.edges.values()) / sum(chain.edges.values())
    assert count < 0.5


def test_explain_names_the_runner_up_the_limit_and_the_cache(make_profile):
    text = plan(None, make_profile(9), make_cluster(2), batch_size=16).explain()
    for words in (
        "Runner-up: ",
        "Limit: ",
        "Idle time left: ",
        "cached it would take ",
        "With links ",
    ):
        assert words in text


def test_memory_is_a_hard_bound(make_profile):
    # Weights, gradients and moments of 8 layers need 4 x 8 x 100 MB; two stages halve that.
    profile = make_profile(8, gradient_bytes=100_000_000, frozen_s=0.0)
    small = replace(CPU, memory_bytes=2_000_000_000)
    chosen = plan(None, profile, make_cluster(2, rate=1000 * Gbps, device=small), batch_size=16)
    assert chosen.placement != "data"
    assert all(each.peak_bytes <= small.memory_bytes for each in chosen.ranks)
    assert "too much" in chosen.explain()
    tiny = replace(CPU, memory_bytes=1_000_000_000)
    with pytest.raises(ConfigError, match=r"plan: expected a plan within 954 MiB a device, got"):
        plan(None, profile, make_cluster(2, device=tiny), batch_size=16)


def test_each_device_must_fit(make_profile):
    # Three layers of 400 MB with moments: two on the outer device of a folded chain, one on the inner.
    profile = make_profile(3, gradient_bytes=100_000_000, frozen_s=0.0)
    small = replace(CPU, memory_bytes=600_000_000)
    with pytest.raises(ConfigError, match=r"within 572 MiB a device, got 763 MiB"):
        plan(
            None, profile, make_cluster(2, device=small), batch_size=8, num_stages=2,
            placement="folded",
        )  # fmt: skip


@pytest.mark.parametrize(("placement", "ramp"), [("chain", 1), ("folded", 1 / 2)])
def test_estimates_of_stages_without_links_are_closed_forms(make_profile, placement, ramp):
    inputs = PlanInputs(make_profile(8, frozen_s=0.0), make_cluster(2, rate=1000 * Gbps))
    (sketch,) = list_sketches(inputs, Constraints(16, 2, 4, placement))
    # Four of eight equal layers a device, four samples a micro-batch.
    assert sketch.predicted_s == pytest.approx((4 + ramp) * 4 * 4 * 0.03)


def test_a_chosen_plan_is_saved_and_read(make_profile, tmp_path):
    chosen = plan(None, make_profile(6), make_cluster(2), batch_size=8)
    chosen.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == chosen


def test_fixed_numbers_are_kept(make_profile):
    chosen = plan(
        None, make_profile(8), make_cluster(4), batch_size=16, num_stages=4, num_micro_batches=8
    )
    assert (chosen.num_stages, chosen.num_micro_batches) == (4, 8)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_micro_batches": 3}, r"one of 1, 2, 4, 8, 16, got 3"),
        ({"num_stages": 3}, r"num_stages: expected 1 to 2 \(2 ranks, 8 layers\), got 3"),
        (
            {"placement": "ring"},
            "placement: expected one of data, chain, folded for a job of 1 backbones",
        ),
        ({"batch_size": 0}, "batch_size: expected 1 or more, got 0"),
        (
            {"num_stages": 5, "placement": "folded", "ranks": 5},
            "expected at most 4 for a folded chain of 8 layers",
        ),
        ({"num_stages": 2, "placement": "data"}, "expected 1 for placement 'data'"),
        (
            {"placement": "chain", "ranks": 1},
            "placement: expected 'data', as 'chain' needs 2 ranks and 2 layers or more, got 'chain' for 1 and 8",
        ),
        ({"batch_size": 7, "placement": "data"}, "choose a multiple of 2"),
    ],
)
def test_bad_choices_are_refused(make_profile, options, text):
    cluster = make_cluster(options.pop("ranks", 2))
    with pytest.raises(ConfigError, match=text):
        plan(None, make_profile(8), cluster, **{"batch_size": 16} | options)


def test_a_profile_of_another_job_is_refused(make_profile):
    job = Job(chain([nn.Linear(3, 3)]), {}, lambda *_: {}, lambda *_: None)
    with pytest.raises(
        ConfigError, match=r"profile: expected one of this job, .* \(layer0, layer1"
    ):
        plan(job, make_profile(8), make_cluster(2), batch_size=16)


@pytest.mark.parametrize("placement", ["data", "opposite"])
def test_two_backbones_share_devices(make_profile, execute, placement):
    profile = make_profile(6, chains=2)
    chosen = plan(None, profile, make_cluster(2), batch_size=8, placement=placement)
    assert chosen.placement == placement
    passes = [
        [each for each in actions if each.kind in ("forward", "backward")]
        for actions in (chosen.order if placement == "opposite" else chosen.order[:1])
    ]
    execute(passes, [chosen.num_stages] * 2)
    if placement == "opposite":
        assert chosen.devices == ((0,), (1,), (1,), (0,))
        assert [span[0] for span in chosen.spans] == [0, chosen.spans[0][1]] * 1 + [
            0, chosen.spans[2][1]
        ]  # fmt: skip
        assert chosen.backbones == (0, 0, 1, 1)
    rows = [
        row
        for actions in chosen.order
        for action in actions
        if action.kind == "encode"
        for row in range(*action.samples)
    ]
    assert sorted(rows) == list(range(8))


def test_two_backbones_do_not_fold(make_profile):
    with pytest.raises(
        ConfigError, match="expected one of data, opposite for a job of 2 backbones"
    ):
        plan(None, make_profile(6, chains=2), make_cluster(2), batch_size=8, placement="folded")


@pytest.mark.parametrize("placement", ["data", "chain", "folded"])
def test_a_step_that_predicts_twice_has_an_order_of_its_own(make_profile, placement):
    profile = make_profile(8)
    chain = replace(profile.chains[0], feeds={"x": ("z", "estimate"), "target": ("z",)})
    profile = replace(profile, self_conditioning=0.5, chains=(chain,))
    chosen = plan(None, profile, make_cluster(2), batch_size=8, placement=placement)
    stages, count = len(chosen.spans), chosen.num_micro_batches
    for rank, actions in enumerate(chosen.estimate_order):
        estimates = [each for each in actions if each.kind == "estimate"]
        assert len(estimates) == len(chosen.stages_of(rank)) * count
        # The same rank encodes the same rows in both kinds of steps.
        assert sorted(each for each in actions if each.kind == "encode" and each.name == "z") != []
        rows = [
            sorted(row for each in own if each.kind == "encode" for row in range(*each.samples))
            for own in (actions, chosen.order[rank])
        ]
        assert rows[0] == rows[1]
    plain = plan(
        None, make_profile(8), make_cluster(2), batch_size=8, placement=placement,
        num_micro_batches=count,
    )  # fmt: skip
    # Half of the steps have one more forward pass.
    assert plain.predicted_s < chosen.predicted_s < 1.4 * plain.predicted_s
    assert stages == len(plain.spans)


def test_the_named_change_of_links_changes_the_choice(make_profile):
    profile = make_profile(9, gradient_bytes=6_000_000)
    chosen = plan(None, profile, make_cluster(2), batch_size=16)
    match = re.search(
        r"With links (\d+) times faster, data parallelism would be the fastest", chosen.explain()
    )
    assert match
    rate = 100 * Mbps * int(match[1])
    faster = Cluster.uniform(
        2, 1, CPU, network=Link.from_rate(rate, alpha_s=1e-4),
        local=Link.from_rate(100 * Gbps, alpha_s=1e-5),
    )  # fmt: skip
    assert plan(None, profile, faster, batch_size=16).placement == "data"


def test_memory_bound_jobs_say_what_more_memory_would_give(make_profile):
    profile = make_profile(8, gradient_bytes=100_000_000, frozen_s=0.0)
    small = replace(CPU, memory_bytes=2_000_000_000)
    cluster = make_cluster(2, rate=1000 * Gbps, device=small)
    text = plan(None, profile, cluster, batch_size=16).explain()
    assert text.startswith("Pipeline. ")
    assert "Data parallelism does not fit: it needs 2.98 GiB of memory a rank." in text
    assert "a rank, too much" in text


def test_slow_links_keep_more_in_flight(make_profile):
    # A message takes as long as a pass: 1F1B alone would wait for each.
    profile = make_profile(4, hidden_bytes=500_000, frozen_s=0.0)
    chosen = plan(
        None, profile, make_cluster(2), batch_size=8, num_stages=2, num_micro_batches=8,
        placement="chain",
    )  # fmt: skip
    first = [each.kind for each in chosen.order[0]].index("backward")
    assert first > 2
    plain = replace(chosen, order=tuple((*own, Action("step")) for own in order_1f1b(2, 8)))
    inputs = PlanInputs(profile, make_cluster(2))
    slower = PlanReplay(plain, inputs).run().makespan_s
    assert chosen.predicted_s < 0.95 * slower


def test_few_are_in_flight_where_more_do_not_fit(make_profile):
    # Two layers of 4 MB, and 20 MB for each micro-batch in flight: 48 MB for two, 68 MB for three.
    profile = make_profile(4, hidden_bytes=500_000, frozen_s=0.0, saved_bytes=10_000_000)
    options = {"batch_size": 8, "num_stages": 2, "num_micro_batches": 8, "placement": "chain"}
    firsts = []
    for limit_bytes in (55_000_000, 1_000_000_000):
        cluster = make_cluster(2, device=replace(CPU, memory_bytes=limit_bytes))
        chosen = plan(None, profile, cluster, **options)
        assert chosen.ranks[0].peak_bytes <= limit_bytes
        firsts.append([each.kind for each in chosen.order[0]].index("backward"))
    assert firsts[0] == 2 < firsts[1]


@pytest.mark.unchecked
@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1))
def test_no_choice_of_numbers_gives_a_plan_faster_by_more_than_three_percent(make_profile, seed):
    source = random.Random(seed)
    layers, batch_size = source.randint(3, 7), 8
    hosts, per_host = source.choice([(2, 1), (3, 1), (2, 2)])
    profile = make_profile(
        layers, skips=source.random() < 0.5, frozen_s=source.choice([0.0, 0.02, 0.1]),
        forward_by_layer=[source.uniform(0.002, 0.02) for _ in range(layers)],
        gradient_bytes=int(10 ** source.uniform(3, 7)), hidden_bytes=int(10 ** source.uniform(3, 5)),
    )  # fmt: skip
    profile = replace(profile, frozen_bytes={"z": int(10 ** source.uniform(2, 6))})
    cluster = make_cluster(hosts, per_host, rate=10 ** source.uniform(7, 9))
    best = plan(None, profile, cluster, batch_size=batch_size)
    assert best.predicted_s <= best.unfilled_s * (1 + 1e-9)
    seconds = {}
    for placement, stages, count in product(
        ("data", "chain", "folded"), range(1, 1 + hosts * per_host), (1, 2, 4, 8)
    ):
        try:
            seconds[placement, stages, count] = plan(
                None, profile, cluster, batch_size=batch_size, placement=placement,
                num_stages=stages, num_micro_batches=count,
            ).predicted_s  # fmt: skip
        except ConfigError:
            continue  # the layers or rows are too few for these stages
    assert len(seconds) >= 4
    assert (1 - 0.03) * best.predicted_s <= min(seconds.values())
    own = best.placement, best.num_stages, best.num_micro_batches
    assert seconds[own] == pytest.approx(best.predicted_s)


def test_unequal_memory_is_used(make_profile):
    # Eight layers of 0.8 GB with moments: 2 and 6 of them fit into 2 and 8 GB.
    profile = make_profile(8, gradient_bytes=200_000_000, frozen_s=0.0)
    link = Link.from_rate(1000 * Gbps, alpha_s=1e-5)
    hosts = tuple(
        replace(host, devices=(replace(CPU, memory_bytes=memory),), name=name)
        for host, memory, name in zip(
            Cluster.uniform(2, 1, CPU, network=link).hosts, (2 * 10**9, 8 * 10**9), ("small", "large"), strict=True
        )
    )  # fmt: skip
    chosen = plan(
        None, profile, Cluster(hosts=hosts, network=link), batch_size=8, placement="chain"
    )
    assert chosen.spans == ((0, 2), (2, 8))
    swapped = Cluster(hosts=hosts[::-1], network=link)
    assert plan(None, profile, swapped, batch_size=8, placement="chain").spans == ((0, 6), (6, 8))


def test_values_without_a_row_a_sample_need_equal_replicas(make_profile):
    # On three ranks the cheap first layers take one, the dear last ones two.
    profile = make_profile(3, forward_by_layer=[0.01, 0.02, 0.02], frozen_s=0.0)
    options = {"batch_size": 8, "num_stages": 2, "placement": "chain"}
    free = plan(None, profile, make_cluster(3, rate=1000 * Gbps), **options)
    assert sorted(map(len, free.devices)) == [1, 2]
    chain = replace(profile.chains[0], whole=("h0",))
    with pytest.raises(ConfigError, match="expected one that micro-batches and ranks divide"):
        plan(None, replace(profile, chains=(chain,)), make_cluster(3), **options)
    even = plan(None, replace(profile, chains=(chain,)), make_cluster(4), **options)
    assert {len(ranks) for ranks in even.devices} == {2}


@pytest.mark.parametrize("per_host", [(3, 1), (1, 3)])
def test_the_slowest_copy_decides(make_profile, per_host):
    # Of two copies one lies inside a host, the other one sends over the network.
    profile = make_profile(6, hidden_bytes=200_000, frozen_s=0.0)
    whole = Cluster.uniform(
        2, 3, CPU, network=Link.from_rate(100 * Mbps, alpha_s=1e-4),
        local=Link.from_rate(100 * Gbps, alpha_s=1e-5),
    )  # fmt: skip
    hosts = tuple(
        replace(host, devices=host.devices[:count])
        for host, count in zip(whole.hosts, per_host, strict=True)
    )
    cluster = replace(whole, hosts=hosts)
    inputs = PlanInputs(profile, cluster)
    chosen = plan(
        None, profile, cluster, batch_size=8, placement="chain", num_stages=2, num_micro_batches=2
    )
    assert chosen.num_groups == 2
    seconds = [PlanReplay(chosen, inputs, group=group).run().makespan_s for group in (0, 1)]
    assert chosen.predicted_s == max(seconds) > 1.1 * min(seconds)


def test_explain_says_what_was_not_tried(make_profile):
    profile = make_profile(8)
    text = plan(None, profile, make_cluster(2), batch_size=13).explain()
    assert "Data parallelism was left out: it needs micro-batches that 2 ranks" in text
    assert not text.startswith("Pipeline.")
    fixed = plan(None, profile, make_cluster(2), batch_size=16, placement="data").explain()
    assert not fixed.startswith("Do not pipeline")
    fast = Cluster.uniform(2, 1, CPU).hosts
    slow = replace(fast[1], devices=(replace(CPU, flops_per_s=CPU.flops_per_s / 10),))
    mixed = Cluster(hosts=(fast[0], slow), network=Link.from_rate(100 * Mbps, alpha_s=1e-4))
    assert (
        "All devices count as equally fast" in plan(None, profile, mixed, batch_size=16).explain()
    )
    assert "equally fast" not in text


def test_more_micro_batches_than_are_searched_may_be_given(make_profile):
    chosen = plan(
        None, make_profile(4), make_cluster(2), batch_size=256, num_micro_batches=256, num_stages=2
    )
    assert chosen.num_micro_batches == 256


def test_frozen_outputs_that_would_be_in_the_way_come_first(make_profile):
    # Outputs of 3 MB a sample take longer on the link than all passes do. Encoded in idle time they leave
    # late, and the step waits for them; encoded first they leave early, while the link is free.
    profile = replace(make_profile(4, frozen_s=0.02), frozen_bytes={"z": 3_000_000})
    options = {"num_stages": 2, "num_micro_batches": 4, "placement": "chain"}
    chosen = plan(None, profile, make_cluster(2), batch_size=8, **options)
    kinds = [[each.kind for each in own] for own in chosen.order]
    assert all("encode" not in own[own.index("forward") :] for own in kinds)
    assert chosen.predicted_s == chosen.unfilled_s
    assert "before the passes" in chosen.explain()
    small = plan(None, make_profile(4, frozen_s=0.02), make_cluster(2), batch_size=8, **options)
    assert small.predicted_s < small.unfilled_s
    assert "before the passes" not in small.explain()


def test_frozen_outputs_come_first_on_the_devices_that_have_room_for_their_weights(make_profile):
    # The first device has no room for them; the second encodes all samples before its passes.
    profile = replace(
        make_profile(4, frozen_s=0.005),
        frozen_bytes={"z": 1_000_000},
        frozen_parameter_bytes={"z": 10**9},
    )
    hosts = make_cluster(2).hosts
    small = replace(hosts[0], devices=(replace(CPU, memory_bytes=10**9),))
    cluster = replace(make_cluster(2), hosts=(small, hosts[1]))
    chosen = plan(
        None, profile, cluster, batch_size=8, num_stages=2, num_micro_batches=4, placement="chain"
    )
    assert chosen.owners["z"] == ((), ((0, 8),))
    kinds = [each.kind for each in chosen.order[1]]
    assert "encode" not in kinds[kinds.index("forward") :]
    assert chosen.predicted_s == chosen.unfilled_s
