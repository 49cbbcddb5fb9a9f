"""Replayed events are past ones, in order, repeatable, and distributed as the policy says."""

import pytest
import torch

from gnnflow.training.replay import DegreeClasses, StructureReplay, UniformReplay
from shared.data.events import Events
from shared.errors import ConfigError


def random_events(count=400, num_nodes=30, seed=0):
    draw = torch.Generator().manual_seed(seed)
    src = torch.randint(0, num_nodes, (count,), generator=draw)
    return Events(src, torch.randint(0, num_nodes, (count,), generator=draw), range(count))


@pytest.mark.parametrize("policy", [UniformReplay, StructureReplay])
def test_draws_a_share_of_the_past_in_order_and_repeatably(policy):
    events = random_events()

    def drawn(seed, cuts, round_index=2):
        replay = policy(0.5, seed=seed)
        for start, end in zip([0, *cuts], [*cuts, 400], strict=True):
            replay.observe(events[start:end])
        return replay.draw(40, 300, round_index).tolist()

    one = drawn(1, [300])
    assert len(one) == 130
    assert one == sorted(one)
    assert min(one) >= 40
    assert max(one) < 300
    assert one == drawn(1, [7, 120, 300])
    assert one != drawn(2, [300])
    assert one != drawn(1, [300], round_index=3)


@pytest.mark.parametrize("policy", [UniformReplay, StructureReplay])
def test_without_a_past_or_a_share_there_is_nothing(policy):
    replay = policy(0.5)
    replay.observe(random_events(10))
    assert replay.draw(0, 0, 0).tolist() == []
    none = policy(0.0)
    none.observe(random_events(10))
    assert none.draw(0, 8, 0).tolist() == []


def test_uniform_replay_is_with_replacement_and_even():
    drawn = torch.cat([UniformReplay(2.0).draw(5, 25, at) for at in range(500)])
    counts = torch.bincount(drawn, minlength=25)
    assert counts[:5].sum() == 0
    expected = len(drawn) / 20
    assert (counts[5:] - expected).abs().max() < 4 * expected**0.5


def test_structure_replay_follows_the_increments_degrees():
    # 100 events between strangers, then 100 between one pair; the increment is of that pair too.
    strangers = Events(range(0, 200, 2), range(1, 200, 2), range(100))
    pair = Events([500] * 130, [501] * 130, range(100, 230))
    replay = StructureReplay(1.0, uniform=0.0)
    replay.observe(strangers)
    replay.observe(pair[:100])
    replay.observe(pair[100:])
    # Degrees 100 to 129: the classes of the increment are [64, 128) and [128, 256), and of these
    # the past has the first alone.
    assert set(replay.draw(0, 200, 0).tolist()) == set(range(164, 200))
    mixed = StructureReplay(1.0, uniform=0.5)
    for events in (strangers, pair[:100], pair[100:]):
        mixed.observe(events)
    drawn = torch.cat([mixed.draw(0, 200, at) for at in range(50)])
    assert float((drawn < 100).double().mean()) == pytest.approx(0.25, abs=0.02)


def test_structure_replay_counts_degrees_before_each_event():
    events = random_events(60, num_nodes=4)
    classes = DegreeClasses()
    found = [*classes.classify(events[:33]), *classes.classify(events[33:])]
    degree, expected = [0] * 4, []
    for src, dst in zip(events.src.tolist(), events.dst.tolist(), strict=True):
        expected.append(degree[src].bit_length() * 64 + degree[dst].bit_length())
        degree[src] += 1
        degree[dst] += 1
    assert found == expected


def test_structure_replay_of_a_new_kind_of_increment_is_even():
    strangers = Events(range(0, 40, 2), range(1, 40, 2), range(20))
    crowd = Events([0] * 9, [1] * 9, range(20, 29))
    replay = StructureReplay(1.0, uniform=0.0)
    replay.observe(strangers)
    replay.observe(crowd)
    # Nothing of the past is like it: degrees 1 and more against 0.
    drawn = torch.cat([replay.draw(0, 20, at) for at in range(20)])
    assert set(drawn.tolist()) == set(range(20))


@pytest.mark.parametrize("policy", [UniformReplay, StructureReplay])
def test_refuses(policy):
    for share in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="expected a share of 0 or more"):
            policy(share)
    with pytest.raises(ConfigError, match="expected uniform from 0 to 1"):
        StructureReplay(uniform=1.5)
