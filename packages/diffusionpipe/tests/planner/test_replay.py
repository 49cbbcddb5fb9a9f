"""Replays of plans: the runtime's own messages and bytes, and closed forms."""

import itertools
from dataclasses import replace

import pytest

from diffusionpipe import plan
from diffusionpipe.planner.costs import PlanInputs
from diffusionpipe.planner.replay import PlanReplay
from diffusionpipe.planner.search.assembly import assemble
from diffusionpipe.runtime.instructions import compile_programs
from diffusionpipe.runtime.virtual import read_values
from shared.topology import Cluster, Link
from shared.topology.device import CPU
from shared.units import Gbps, Mbps


def make_cluster(hosts, rate=100 * Mbps):
    return Cluster.uniform(hosts, 1, CPU, network=Link.from_rate(rate, alpha_s=1e-4))


@pytest.mark.parametrize(
    ("placement", "ranks", "stages", "chains"),
    [("data", 2, 1, 1), ("chain", 2, 2, 1), ("chain", 4, 4, 1), ("chain", 4, 3, 1), ("folded", 2, 2, 1),
     ("folded", 4, 2, 1), ("folded", 4, 4, 1), ("opposite", 2, 2, 2)],
)  # fmt: skip
def test_bytes_are_those_of_the_runtimes_messages(make_profile, placement, ranks, stages, chains):
    profile = make_profile(9, skips=True, chains=chains)
    chosen = plan(
        None, profile, make_cluster(ranks), batch_size=16, placement=placement, num_stages=stages
    )
    flow, _ = read_values(profile)
    sent = {}
    for program in compile_programs(chosen, flow):
        for message in program.messages:
            if message.sender != program.rank:
                continue
            tables = [chain.value_bytes for chain in profile.chains]
            table = profile.frozen_bytes if message.kind == "frozen" else tables[message.backbone]
            rows = sum(stop - first for first, stop in message.ranges)
            edge = message.sender, message.receiver
            sent[edge] = sent.get(edge, 0) + rows * sum(table[key] for key in message.keys)
    assert sent == dict(chosen.edges)
    assert all(sender != receiver for sender, receiver in sent)


def test_a_chain_without_links_takes_its_closed_form(make_profile):
    # Eight equal layers on two stages: t = 4 x 0.03 s a sample; nothing frozen, no optimizer.
    profile = make_profile(8, frozen_s=0.0)
    cluster = make_cluster(2, rate=1e6 * Gbps)
    chosen = plan(
        None, profile, cluster, batch_size=16, num_stages=2, num_micro_batches=4, placement="chain"
    )
    replay = PlanReplay(chosen, PlanInputs(profile, cluster))
    period_s = 4 * 0.03 * 4
    assert replay.run(is_passes_only=True).makespan_s == pytest.approx(
        (4 + 2 - 1) * period_s, rel=0.01
    )


def test_a_sum_starts_inside_the_last_backward_pass(make_profile):
    profile = make_profile(4, frozen_s=0.0, gradient_bytes=5_000_000)
    chosen = plan(
        None, profile, make_cluster(2), batch_size=4, placement="data", num_micro_batches=1
    )
    replay = PlanReplay(chosen, PlanInputs(profile, make_cluster(2)))
    timeline = replay.run()
    # Buckets of 5 MB are layers here; a sum over two ranks at 12.5 MB/s takes 0.4 s and 4 messages.
    sums = [timeline.span_s(("sum", 0, bucket)) for bucket in range(4)]
    assert sums[0][0] == pytest.approx(2 * 4 * 0.01 + 2 * 0.02)
    assert all(stop - start == pytest.approx(0.4, rel=0.01) for start, stop in sums)
    assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(sums))
    # No rank updates its weights before the last sum is complete.
    assert timeline.span_s(("agreement",))[0] == sums[-1][1]


def test_frozen_work_hides_under_a_sum(make_profile):
    # The sum is exposed for over a second; 0.4 s of frozen work a rank fit under it.
    profile = make_profile(4, frozen_s=0.1, gradient_bytes=5_000_000)
    chosen = plan(
        None, profile, make_cluster(2), batch_size=8, placement="data", num_micro_batches=1
    )
    assert chosen.predicted_s == pytest.approx(chosen.cached_s, rel=1e-6)
    assert chosen.unfilled_s == pytest.approx(chosen.predicted_s + 0.4, rel=1e-3)


def test_copies_of_a_pipeline_share_their_hosts_link(make_profile):
    # Two copies of two stages: each stage's ranks are one host, and their messages share its link.
    profile = make_profile(8, frozen_s=0.0, hidden_bytes=5_000_000, gradient_bytes=0)
    options = {"num_stages": 2, "num_micro_batches": 4, "placement": "chain"}
    alone = plan(None, profile, make_cluster(2), batch_size=16, **options)
    network = Link.from_rate(100 * Mbps, alpha_s=1e-4)
    both = Cluster.uniform(2, 2, CPU, network=network)
    twice = plan(None, profile, both, batch_size=32, **options)
    # The choice keeps each copy inside a host, where it does not wait for the other.
    assert twice.devices == ((0, 2), (1, 3))
    assert len(twice.edges) == 2 * len(alone.edges)
    order = [twice.order[rank] for rank in (0, 0, 1, 1)]
    across = replace(twice, devices=((0, 1), (2, 3)), order=tuple(order))
    across_s = PlanReplay(across, PlanInputs(profile, both)).run().makespan_s
    # The link is the bottleneck: 4 + 4 messages of 4 x 5 MB in each direction and 12.5 MB/s.
    message_s = 4 * 5_000_000 / 12.5e6
    assert alone.predicted_s > 4 * message_s
    assert 8 * message_s < across_s
    assert 1.7 * alone.predicted_s < across_s < 2.1 * alone.predicted_s
    assert twice.predicted_s < alone.predicted_s


def test_ranks_agree_when_frozen_outputs_are_sent(make_profile):
    profile = make_profile(4, frozen_s=0.1)
    object.__setattr__(profile, "frozen_bytes", {"z": 5_000_000})
    chosen = plan(
        None, profile, make_cluster(2), batch_size=8, num_stages=2, num_micro_batches=4,
        placement="chain",
    )  # fmt: skip
    inputs = PlanInputs(profile, make_cluster(2))
    # Encoded in idle time, which delays the step here.
    timeline = PlanReplay(assemble(chosen, inputs), inputs).run()
    sent = [
        timeline.span_s(operation.name)[1]
        for operation in timeline.graph.operations
        if operation.name[0] == "message"
    ]
    agreed_s = timeline.span_s(("agreement",))[0]
    # Eight outputs of 5 MB travel at 12.5 MB/s: they end last.
    assert agreed_s == max(sent)
    assert agreed_s > max(timeline.span_s(name)[1] for name in timeline.graph.index
                          if name[0] not in ("message", "agreement", "step"))  # fmt: skip


def test_messages_take_computation_from_both_ends(make_profile):
    # Two stages, one micro-batch: a message of h3 and emb goes there, its gradients come back.
    profile = make_profile(8, frozen_s=0.0)
    cluster = make_cluster(2)
    options = {"batch_size": 4, "num_stages": 2, "num_micro_batches": 1, "placement": "chain"}
    free = plan(None, profile, cluster, **options)
    dear = replace(profile, message_s=0.1, message_s_per_byte=1e-4)
    costly = plan(None, dear, cluster, **options)
    assert costly.spans == free.spans == ((0, 4), (4, 8))
    # Four passes in a row each bear half of a message.
    message_s = 0.1 + 4 * (1000 + 10) * 1e-4
    assert costly.predicted_s - free.predicted_s == pytest.approx(4 * message_s / 2)


@pytest.mark.parametrize("gradient_bytes", [100_000, 5_000_000])
def test_sums_take_computation_too(make_profile, gradient_bytes):
    # One bucket, or one a layer.
    profile = make_profile(4, frozen_s=0.0, gradient_bytes=gradient_bytes)
    cluster = make_cluster(2, rate=1e6 * Gbps)
    options = {"batch_size": 4, "placement": "data", "num_micro_batches": 1}
    free = plan(None, profile, cluster, **options)
    costly = plan(None, replace(profile, message_s_per_byte=1e-8), cluster, **options)
    # On a ring of two ranks each sends and receives 2 (2 - 1) / 2 of all gradients.
    assert costly.predicted_s - free.predicted_s == pytest.approx(4 * gradient_bytes * 1e-8)


def test_a_frozen_output_costs_its_sender(make_profile):
    profile = replace(make_profile(4, frozen_s=0.1), message_s=1.0)
    cluster = make_cluster(2, rate=1e6 * Gbps)
    options = {"batch_size": 4, "num_stages": 2, "num_micro_batches": 1, "placement": "chain"}
    chosen = plan(None, profile, cluster, **options)
    free = replace(profile, message_s=0.0)
    replays = [PlanReplay(chosen, PlanInputs(each, cluster)) for each in (profile, free)]
    sent = [
        sum(m.used_by is None and m.sender == rank for m in replays[0].messages) for rank in (0, 1)
    ]
    assert sum(sent) > 0
    for rank in (0, 1):
        costly_s, free_s = (sum(each.sum_seconds(rank)) for each in replays)
        # Beside frozen outputs, a half of the values' message and of their gradients'.
        assert costly_s - free_s == pytest.approx(sent[rank] + 1.0)
