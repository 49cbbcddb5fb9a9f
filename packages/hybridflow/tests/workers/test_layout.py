"""Ranks of layouts, and generation's groups in training's: the paper's example, all pairs."""

import itertools

import pytest

from hybridflow.models.parallel import stage_layers
from hybridflow.workers.batch.layout import (
    ORDERS,
    GenerationGroups,
    Layout,
    generation_groups,
    generation_layout,
)
from shared.errors import ConfigError

SIZES = (1, 2, 4, 8)


def divisors(number):
    return [k for k in range(1, number + 1) if number % k == 0]


def inner_pairs(max_ranks):
    """All p, t, d and the p_g, t_g that divide them."""
    for p, t, d in itertools.product(SIZES, repeat=3):
        if p * t * d <= max_ranks:
            for p_g, t_g in itertools.product(divisors(p), divisors(t)):
                yield p, t, d, p_g, t_g


def interval(count, index, parts):
    """Which of `count` units, of which `parts` divides, an index has."""
    size = count // parts
    return set(range(index * size, (index + 1) * size))


def test_the_papers_example_counted_from_zero():
    groups = generation_groups("1-4-2", "1-2-2-2")
    assert groups.tp == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups.micro_dp == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups.pp == [[rank] for rank in range(8)]
    assert (groups.micro_dp_size, groups.num_replicas) == (2, 4)
    assert groups == generation_groups("1-4-2", "1-2")
    assert [groups.coordinates(rank).replica for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_and_coordinates_are_a_bijection_and_groups_a_partition(order):
    for p, t, d in itertools.product((1, 2, 3, 4), repeat=3):
        layout = Layout(p, t, d, order)
        assert layout.num_ranks == p * t * d
        coordinates = [layout.coordinates(rank) for rank in range(layout.num_ranks)]
        assert sorted(coordinates) == list(itertools.product(range(p), range(t), range(d)))
        assert [layout.rank(*at) for at in coordinates] == list(range(layout.num_ranks))
        for k, axis in enumerate(("pp", "tp", "dp")):
            groups = layout.groups(axis)
            assert sorted(itertools.chain(*groups)) == list(range(layout.num_ranks))
            for group in groups:
                # In order of the axis, and everything else is the same.
                assert [coordinates[rank][k] for rank in group] == list(range((p, t, d)[k]))
                rest = {coordinates[rank][:k] + coordinates[rank][k + 1 :] for rank in group}
                assert len(rest) == 1


def test_axes_run_from_slow_to_fast_as_the_order_says():
    ours, megatron = Layout(2, 2, 2), Layout(2, 2, 2, "pp-dp-tp")
    assert ours.groups("tp") == megatron.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ours.groups("pp") == megatron.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert ours.groups("dp") == megatron.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("order", ORDERS)
def test_a_training_shard_lies_in_the_ranks_generation_shard_for_all_pairs(order):
    for p, t, d, p_g, t_g in inner_pairs(64):
        layout = Layout(p, t, d, order)
        groups = generation_groups(layout, f"{p_g}-{t_g}")
        for rank in range(layout.num_ranks):
            pp, tp, dp = layout.coordinates(rank)
            at = groups.coordinates(rank)
            assert interval(8, pp, p) <= interval(8, at.pp, p_g)
            assert interval(8, tp, t) <= interval(8, at.tp, t_g)
            assert set(stage_layers(8, p, pp)) == interval(8, pp, p)
            assert at.replica // groups.micro_dp_size == dp
            assert at.replica % groups.micro_dp_size == at.micro


@pytest.mark.parametrize("order", ORDERS)
def test_generation_groups_partition_the_ranks_and_make_whole_models(order):
    for p, t, d, p_g, t_g in inner_pairs(64):
        layout = Layout(p, t, d, order)
        groups = generation_groups(layout, f"{p_g}-{t_g}")
        ranks = list(range(layout.num_ranks))
        d_g = p * t // (p_g * t_g)
        assert groups.micro_dp_size == d_g
        assert groups.num_replicas == d * d_g
        at = [groups.coordinates(rank) for rank in ranks]
        for found, size in ((groups.micro_dp, d_g), (groups.tp, t_g), (groups.pp, p_g)):
            assert sorted(itertools.chain(*found)) == ranks
            assert {len(group) for group in found} == {size}
        for group in groups.micro_dp:
            # Training shards of one micro-DP group are disjoint and make up a generation shard.
            held = [
                set(itertools.product(interval(8, pp, p), interval(8, tp, t)))
                for pp, tp, _ in map(layout.coordinates, group)
            ]
            one = at[group[0]]
            wanted = set(itertools.product(interval(8, one.pp, p_g), interval(8, one.tp, t_g)))
            assert sum(map(len, held)) == len(wanted)
            assert set().union(*held) == wanted
            assert {(at[rank].pp, at[rank].tp) for rank in group} == {(one.pp, one.tp)}
            assert [at[rank].micro for rank in group] == list(range(d_g))
        for group in groups.tp:
            assert [at[rank].tp for rank in group] == list(range(t_g))
            assert len({(at[rank].pp, at[rank].replica) for rank in group}) == 1
        for group in groups.pp:
            assert [at[rank].pp for rank in group] == list(range(p_g))
            assert len({(at[rank].tp, at[rank].replica) for rank in group}) == 1
        # Replicas are numbered without gaps, and each is a whole model once.
        whole = itertools.product(range(d * d_g), range(p_g), range(t_g))
        assert sorted((a.replica, a.pp, a.tp) for a in at) == list(whole)


def test_stages_are_even_and_lie_in_those_of_fewer_for_any_number_of_layers():
    for layers in range(1, 40):
        for p in range(1, layers + 1):
            stages = [stage_layers(layers, p, k) for k in range(p)]
            assert [layer for stage in stages for layer in stage] == list(range(layers))
            assert {len(stage) for stage in stages} <= {layers // p, -(-layers // p)}
            for p_g in divisors(p):
                for k, stage in enumerate(stages):
                    assert set(stage) <= set(stage_layers(layers, p_g, k // (p // p_g)))


def test_generation_as_training_has_micro_groups_of_one():
    groups = generation_groups("2-2-2", "2-2")
    assert groups.micro_dp == [[rank] for rank in range(8)]
    assert groups.num_replicas == 2


def test_layouts_are_read_and_told():
    assert str(Layout.parse("2-4-1")) == "2-4-1"
    assert Layout.parse("2-4-1", "pp-dp-tp") == Layout(2, 4, 1, "pp-dp-tp")
    layout = Layout(1, 2, 3)
    assert Layout.parse(layout) is layout
    assert layout.other("1-3") == Layout(1, 3, 2)
    assert layout.other("2-1-2") == Layout(2, 1, 2)


@pytest.mark.parametrize(
    "text", ["", "1-2", "1-2-3-4", "a-b-c", "1--2", "1-2-x", "-1-2-3", "1 2 3"]
)
def test_texts_that_are_no_layout_are_refused(text):
    with pytest.raises(ConfigError, match="expected a layout p-t-d"):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["0-1-1", "1-0-1", "1-1-0"])
def test_layouts_of_nothing_are_refused(text):
    with pytest.raises(ConfigError, match=f"at least one stage, shard and replica, got {text}"):
        Layout.parse(text)
    with pytest.raises(ConfigError, match="order: expected one of dp-pp-tp, pp-dp-tp, got 'tp'"):
        Layout(1, 1, 1, "tp")


def test_a_wrong_number_of_ranks_names_the_nearest_layouts():
    Layout.parse("1-2-4").check(8)
    with pytest.raises(ConfigError) as told:
        Layout.parse("1-4-3").check(8, "train")
    assert "train: 1-4-3 takes 12 ranks, and there are 8; the nearest" in str(told.value)
    near = str(told.value).rsplit("are ", 1)[1].split(", ")
    assert near[0] == "1-4-2"
    assert len(near) == 3
    assert all(Layout.parse(text).num_ranks == 8 for text in near)
    with pytest.raises(ConfigError, match=r"the nearest that fit are 1-1-1$"):
        Layout.parse("2-2-2").check(1)


def test_generation_that_has_no_groups_in_training_is_refused_with_what_has():
    with pytest.raises(
        ConfigError, match=r"stages must be one of \[1, 2\] and its shards one of \[1, 2, 4\]"
    ):
        generation_groups("2-4-1", "1-3")
    with pytest.raises(ConfigError, match="does not divide"):
        generation_groups("2-4-1", "0-2")
    with pytest.raises(ConfigError, match="has 4 replicas in each of 3: 1-2-4-3"):
        generation_groups("2-4-3", "1-2-2-3")
    for text in ("2", "1-2-3", "x"):
        with pytest.raises(ConfigError, match="expected a layout p-t, such as 1-2"):
            generation_groups("2-4-3", text)


def test_generation_stands_in_groups_where_it_can_and_else_beside_them():
    train = Layout.parse("1-4-2")
    assert generation_layout(train, "1-2") == generation_groups("1-4-2", "1-2")
    assert generation_layout(train, "1-2-2-2") == generation_groups("1-4-2", "1-2")
    beside = generation_layout(train, "1-8")
    assert beside.other == Layout(1, 8, 1)
    assert beside.micro_dp == beside.tp == [list(range(8))]
    assert beside.num_replicas == 1
    with pytest.raises(ConfigError, match="1-8-1 has no groups inside training 1-4-2"):
        _ = beside.micro_dp_size
    beside = generation_layout(Layout(1, 2, 3), "1-3")
    assert beside.tp == [[0, 1, 2], [3, 4, 5]]
    assert [beside.coordinates(rank).replica for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [beside.coordinates(rank).tp for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert isinstance(beside, GenerationGroups)


@pytest.mark.parametrize("text", ["1-3", "1-16", "1-1-16", "2-8-2"])
def test_generation_that_does_not_fill_the_ranks_is_refused(text):
    with pytest.raises(ConfigError, match=r"takes \d+ ranks, and there are 8; the nearest"):
        generation_layout(Layout.parse("1-4-2"), text)


@pytest.mark.parametrize("text", ["1", "1-1-1-1-1", "two", ""])
def test_generation_that_is_no_layout_is_refused(text):
    with pytest.raises(ConfigError, match="expected a layout p-t"):
        generation_layout(Layout.parse("1-4-2"), text)
