"""Links measured between ranks."""

from llmpq.profiler.links import measure_links
from shared.comms import Group, RankPool


def measured():
    return measure_links(Group.world(), limit_s=0.2)


def test_every_pair_has_a_link_that_all_ranks_know():
    with RankPool(3) as pool:
        results = pool.run(measured).results
    assert results[0] == results[1] == results[2]
    assert sorted(results[0]) == [(0, 1), (0, 2), (1, 2)]
    for link in results[0].values():
        assert link.time_s(1 << 20) > 0
