import json
import logging

import numpy as np
import pytest

from adaqp.messages.network import LinkTable, probe
from shared.comms import Group, NetLab
from shared.comms import netlab as lab
from shared.errors import ConfigError
from shared.units import KiB, MiB, parse_rate


def probed(sizes, budget_s):
    group = Group.world()
    before = group.ledger.snapshot()
    table = probe(group, sizes, budget_s)
    return table.to_json(), before != group.ledger.snapshot()


def test_all_ranks_get_the_same_plausible_table(pool3):
    answers = pool3.run(probed, None, 0.5).results
    assert len({text for text, _ in answers}) == 1
    assert all(sent for _, sent in answers)
    table = LinkTable.from_json(answers[0][0])
    others = ~np.eye(3, dtype=bool)
    assert (table.s_per_byte[others] > 0).all()
    assert (table.s_per_byte[others] < 1e-5).all()
    assert (np.diag(table.s_per_byte) == 0).all()
    assert (np.diag(table.latency_s) == 0).all()


def test_given_sizes_are_all_sent(pool3):
    text, _ = pool3.run(probed, [4 * KiB, 64 * KiB, MiB], 0.001).results[0]
    assert LinkTable.from_json(text).world_size == 3


def alone():
    world = Group.world()
    singles = [Group.of([rank]) for rank in range(world.world_size)]
    return probe(singles[world.rank])


def test_one_rank_has_no_links(pool3):
    for table in pool3.run(alone).results:
        assert table.s_per_byte.tolist() == [[0.0]]


def falling(fallback):
    """Probe a network on which large messages seem faster than small ones."""
    group = Group.world()
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger()
    logger.addHandler(handler)

    def measure(group, num_bytes):
        return np.full(group.world_size - 1, 1.0 / num_bytes)

    try:
        return probe(group, [1000, 2000], 1.0, fallback, measure=measure), seen
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(("fallback", "expected"), [(1e6, 1e-6), (None, 1 / 2000 / 2000)])
def test_an_impossible_line_is_replaced_marked_and_reported_once(pool3, fallback, expected):
    (table, seen), (other, quiet), _ = pool3.run(falling, fallback).results
    others = ~np.eye(3, dtype=bool)
    assert table.to_json() == other.to_json()
    assert table.s_per_byte[others] == pytest.approx(expected)
    assert table.latency_s[others] == pytest.approx(1 / 1000)
    np.testing.assert_array_equal(table.clamped, others)
    assert len(seen) == 1
    assert "0->1, 0->2, 1->0" in seen[0]
    assert quiet == []


def refused(arguments):
    with pytest.raises(ConfigError) as caught:
        probe(Group.world(), **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes_bytes": [1024]}, "sizes_bytes: expected two or more"),
        ({"sizes_bytes": [0, 1024]}, "sizes_bytes: expected two or more"),
        ({"budget_s": 0}, "budget_s > 0"),
        ({"fallback_bytes_per_s": -1.0}, "fallback_bytes_per_s > 0"),
    ],
)
def test_impossible_requests_are_refused(arguments, message, pool3):
    for refusal in pool3.run(refused, arguments).results:
        assert message in refusal


def test_uniform_table():
    table = LinkTable.uniform(4, 1e6, 2e-3)
    assert table.time_s(0, 3, 500_000) == pytest.approx(0.502)
    assert table.time_s(2, 2, 500_000) == 0
    assert not table.clamped.any()
    with pytest.raises(ConfigError, match="rate > 0"):
        LinkTable.uniform(4, 0.0)
    with pytest.raises(ConfigError, match="1 or more ranks"):
        LinkTable.uniform(0, 1.0)


def test_json_round_trip_and_unknown_keys():
    table = LinkTable.uniform(3, 3e6, 1e-4)
    again = LinkTable.from_json(table.to_json())
    for name in ("s_per_byte", "latency_s", "clamped"):
        np.testing.assert_array_equal(getattr(again, name), getattr(table, name))
        assert getattr(again, name).dtype == getattr(table, name).dtype
    text = json.dumps({**json.loads(table.to_json()), "extra": 1})
    with pytest.raises(ConfigError, match="expected format 1 with the keys"):
        LinkTable.from_json(text)


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_impossible_costs_are_refused(value):
    good = LinkTable.uniform(2, 1.0)
    with pytest.raises(ConfigError, match="latency_s: expected a table"):
        LinkTable(
            s_per_byte=good.s_per_byte,
            latency_s=np.full((2, 2), value),
            clamped=good.clamped,
        )


@pytest.mark.netns
@pytest.mark.skipif(lab.available() is not None, reason=str(lab.available()))
def test_probe_finds_the_rate_of_a_real_slow_network():
    s_per_byte = 1 / parse_rate("100mbit")
    with NetLab(hosts=2, rate="100mbit") as net, net.pool() as ranks:
        for _ in range(5):  # a busy machine makes any link slow
            text, _ = ranks.run(probed, None, 2.0).results[0]
            found = LinkTable.from_json(text).s_per_byte
            assert min(found[0, 1], found[1, 0]) > 0.88 * s_per_byte
            if max(found[0, 1], found[1, 0]) < 1.12 * s_per_byte:
                break
    assert found[0, 1] == pytest.approx(s_per_byte, rel=0.12)
    assert found[1, 0] == pytest.approx(s_per_byte, rel=0.12)
