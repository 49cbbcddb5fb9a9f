"""Simulated hosts."""

import pytest

from heta.partitioning.planner import plan
from heta.simulator import PUBLISHED, format_table, simulate
from shared.topology import Link


@pytest.mark.parametrize(
    ("name", "num_nodes"), [("mag240m", 244_160_499), ("igb-het", 547_306_935)]
)
def test_published_graphs_have_their_published_nodes(name, num_nodes):
    schema = PUBLISHED.get(name)()
    assert sum(schema.num_nodes.values()) == num_nodes
    back = {(dst, src): count for (src, _, dst), count in schema.num_edges.items()}
    assert all(back[src, dst] == count for (src, _, dst), count in schema.num_edges.items())


def test_igb_het_has_its_published_edges():
    forward = [
        count
        for (_, name, _), count in PUBLISHED.get("igb-het")().num_edges.items()
        if not name.startswith("rev_")
    ]
    assert sum(forward) == 5_812_005_639


def test_each_number_of_hosts_is_planned():
    schema, link = PUBLISHED.get("mag240m")(), Link.from_rate(1e9, alpha_s=1e-4)
    results = simulate(schema, (2, 6), link=link, uses_dst=True)
    assert [each.hosts for each in results] == [2, 6]
    default = simulate(schema, (2,))[0]
    assert default.forecasts == plan(schema, parts=2, uses_dst=False).alternatives
    assert default.forecasts != results[0].forecasts
    table = format_table(results, "Simulated")
    assert table.startswith("Simulated\n\n| hosts |")
    assert table.count("\n| 6 |") == 3
    assert table.count("(fastest)") == 2


def test_what_does_not_fit_is_not_the_fastest():
    schema = PUBLISHED.get("mag240m")()
    free = simulate(schema, (4,))[0]
    held = {each.strategy: each.held_bytes for each in free.forecasts}
    limited = simulate(schema, (4,), memory_bytes=held[free.strategy] - 1)[0]
    assert limited.strategy != free.strategy
    assert simulate(schema, (4,), memory_bytes=1)[0].strategy is None
