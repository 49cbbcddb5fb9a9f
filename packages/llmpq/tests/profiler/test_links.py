"""Links measured between ranks, and put into a cluster."""

import pytest

from llmpq.profiler.links import measure_links, put_links
from shared.comms import Group, RankPool
from shared.errors import ConfigError
from shared.topology.cluster import Cluster, Host
from shared.topology.device import CPU
from shared.topology.link import Link


def measured():
    return measure_links(Group.world(), limit_s=0.2)


def test_every_pair_has_a_link_that_all_ranks_know():
    with RankPool(3) as pool:
        results = pool.run(measured).results
    assert results[0] == results[1] == results[2]
    assert sorted(results[0]) == [(0, 1), (0, 2), (1, 2)]
    for link in results[0].values():
        assert link.time_s(1 << 20) > 0


def test_a_cluster_takes_the_slowest_link_of_its_hosts():
    rates = {(0, 1): 1e9, (0, 2): 1e6, (1, 2): 2e6}
    links = {pair: Link.from_rate(rate) for pair, rate in rates.items()}
    hosts = (Host(name="x", devices=(CPU, CPU)), Host(name="y", devices=(CPU,)))
    found = put_links(Cluster(hosts=hosts), links)
    assert found.link(0, 1) == links[0, 1]
    assert found.link(0, 2) == found.link(1, 2) == links[0, 2]
    assert Cluster.from_yaml(found.to_yaml()) == found


def test_a_rank_that_the_cluster_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"links\[\(0, 1\)\]"):
        put_links(Cluster(hosts=(Host(name="x", devices=(CPU,)),)), {(0, 1): Link.from_rate(1.0)})
