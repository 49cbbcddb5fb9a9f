"""Seconds of links and sums, and sizes of buckets, against the formulas by hand."""

import numpy as np
import pytest

from diffusionpipe import plan
from diffusionpipe.planner.costs import PlanInputs
from shared.topology import Cluster, Link
from shared.topology.device import CPU
from shared.units import Gbps, Mbps

RATE = 1_000_000


def make_inputs(profile, hosts, per_host):
    network = Link.from_rate(RATE, alpha_s=0.5)
    local = Link.from_rate(1000 * RATE, alpha_s=0.001)
    return PlanInputs(profile, Cluster.uniform(hosts, per_host, CPU, local=local, network=network))


def test_replicas_of_a_host_share_its_link(make_profile):
    num_bytes = np.array([0.0, 2.0 * RATE])
    alone = make_inputs(make_profile(4), 2, 1)
    assert alone.find_link_s([(0,), (1,)], num_bytes).tolist() == [0.0, 2 * 0.5 + 2]
    both = make_inputs(make_profile(4), 2, 2)
    assert both.find_link_s([(0, 1), (2, 3)], num_bytes).tolist() == [0.0, 2 * 0.5 + 2 * 2]
    # Pipelines inside hosts use their local links.
    assert both.find_link_s([(0, 2), (1, 3)], num_bytes)[1] == pytest.approx(2 * 0.001 + 0.002)


def test_sums_take_a_ring_over_the_slowest_link(make_profile):
    inputs = make_inputs(make_profile(4), 2, 2)
    # 2 (r - 1) messages of a share 1 / r.
    assert inputs.find_sync_s(4.0 * RATE, (0, 1, 2, 3)) == pytest.approx(6 * (0.5 + 1))
    assert inputs.find_sync_s(4.0 * RATE, (0, 1)) == pytest.approx(2 * (0.001 + 0.002))
    assert inputs.find_sync_s(np.array([0, 5.0]), (3,)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("rate", "alpha_s", "num_bytes"),
    [(100 * Mbps, 1e-4, 1_000_000), (10 * Gbps, 1e-4, 5_000_000), (100 * Gbps, 1e-3, 25_000_000)],
)
def test_buckets_are_as_small_as_latency_allows(make_profile, rate, alpha_s, num_bytes):
    # On a ring of two, latency is 1 / 20 of a bucket's time at 2 alpha x 20 bytes over the rate.
    cluster = Cluster.uniform(2, 1, CPU, network=Link.from_rate(rate, alpha_s=alpha_s))
    chosen = plan(None, make_profile(4), cluster, batch_size=8, placement="data")
    assert chosen.bucket_bytes == pytest.approx(num_bytes, rel=1e-6)
