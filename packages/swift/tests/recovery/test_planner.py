from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import DataError
from swift.recovery.planner import Decision, decide

LOST = None


def apply(sets, decision: Decision):
    """Carry a decision out on the versions; every fetch must find its source at the target."""
    undone = [
        {
            rank: None
            if versions is None
            else [v - (p in decision.undo.get(rank, [])) for p, v in enumerate(versions)]
            for rank, versions in ranks.items()
        }
        for ranks in sets
    ]
    result = []
    for place, ranks in enumerate(undone):
        if place in decision.replay:
            for rank in ranks:
                assert rank not in decision.undo
                assert rank not in decision.fetch
            continue
        num_parameters = next(len(v) for v in ranks.values() if v is not None)
        for rank, versions in ranks.items():
            now = [None] * num_parameters if versions is None else list(versions)
            for parameter, source in decision.fetch.get(rank, {}).items():
                assert source != rank
                assert ranks[source] is not None, "the source is of the same set, and lives"
                now[parameter] = ranks[source][parameter]
            result.append(now)
    return result


def reachable(sets, logged, target, newest):
    """By the definition, tried out: can every set come to `target`?"""
    for place, ranks in enumerate(sets):
        alive = [v for v in ranks.values() if v is not None]
        full = any(all(x == newest for x in v) for v in alive)
        parts = zip(*alive, strict=True)
        within = bool(alive) and all(any(x in (newest - 1, newest) for x in of) for of in parts)
        if target == newest:
            if not (full or (not within and logged[place])):
                return False
        elif not (full or within or logged[place]):
            return False
    return True


@settings(max_examples=2 * settings().max_examples)
@given(
    st.lists(
        st.none() | st.lists(st.sampled_from([4, 5]), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_where_undo_is_inexact_all_end_with_bits_that_nobody_undid_or_all_did(ranks):
    sets = [dict(enumerate(ranks))]
    decision = decide(sets, undo_is_exact=False)
    assert decision.target == decide(sets).target
    if decision.target is None:
        return
    # Values: "kept" of a rank that never left the target, "undone" of one that went back to it.
    values = {}
    for rank, held in sets[0].items():
        values[rank] = (
            [None] * 3 if held is None else ["kept" if v == decision.target else v for v in held]
        )
        for p in decision.undo.get(rank, []):
            assert held[p] == decision.target + 1
            values[rank][p] = "undone"
    given = {
        (rank, p): values[source][p]
        for rank, sources in decision.fetch.items()
        for p, source in sources.items()
    }
    for (rank, p), value in given.items():
        values[rank][p] = value
    for column in zip(*values.values(), strict=True):
        assert set(column) in ({"kept"}, {"undone"})


versions = st.lists(st.integers(3, 5), min_size=2, max_size=2)
worlds = st.lists(
    st.tuples(st.lists(st.none() | versions, min_size=1, max_size=3), st.booleans()),
    min_size=1,
    max_size=3,
)


@settings(max_examples=4 * settings().max_examples)
@given(worlds)
def test_all_ranks_come_to_the_newest_version_that_brute_force_finds(world):
    numbers = iter(range(100))
    sets = [{next(numbers): v for v in ranks} for ranks, _ in world]
    logged = [flag for _, flag in world]
    decision = decide(sets, logged)
    alive = [v for ranks in sets for v in ranks.values() if v is not None]
    newest = max((max(v) for v in alive), default=None)
    possible = [
        target
        for target in (newest, None if newest is None else newest - 1)
        if target is not None and reachable(sets, logged, target, newest)
    ]
    assert decision.from_checkpoint == (not possible)
    if decision.from_checkpoint:
        assert decision.target is None
        assert decision.undo == decision.fetch == {}
        assert decision.replay == []
        return
    assert decision.target == possible[0]
    assert all(now == [decision.target] * 2 for now in apply(sets, decision))
    # Nobody does more than it must.
    for ranks in sets:
        for rank, held in ranks.items():
            for p, version in enumerate(held or []):
                if version == decision.target:
                    assert p not in decision.undo.get(rank, [])
                    assert p not in decision.fetch.get(rank, {})
    assert decision.undo == {r: p for r, p in decision.undo.items() if p}
    assert decision.fetch == {r: p for r, p in decision.fetch.items() if p}


def test_one_who_holds_all_rolls_the_others_forward():
    decision = decide([{0: [7, 7], 1: [7, 6], 2: LOST}])
    assert decision.target == 7
    assert decision.undo == {}
    assert decision.fetch == {1: {1: 0}, 2: {0: 1, 1: 0}}
    assert decision.replay == []
    assert decision.reason == (
        "every replica set can be at version 7: 3 parameters fetched by ranks 1, 2"
    )


def test_a_torn_step_is_undone_where_nobody_holds_all_of_it():
    decision = decide([{0: [7, 6], 1: [6, 7], 2: LOST}])
    assert decision.target == 6
    assert decision.undo == {0: [0], 1: [1]}
    assert set(decision.fetch) == {2}
    assert set(decision.fetch[2]) == {0, 1}
    assert decision.reason == (
        "no rank of replica set 0 (ranks 0, 1, 2) holds all parameters at version 7, so all go to 6: "
        "2 parameters undone by ranks 0, 1; 2 parameters fetched by rank 2"
    )


def test_where_undo_is_inexact_what_a_rank_still_has_is_fetched():
    decision = decide([{0: [7, 6, 7], 1: [6, 6, 7], 2: LOST}], undo_is_exact=False)
    assert decision.target == 6
    assert decision.undo == {0: [2], 1: [2]}
    assert decision.fetch[0] == {0: 1}
    assert decision.fetch[2][0] == 1


def test_a_set_that_is_ahead_waits_for_one_that_is_not():
    decision = decide([{0: [7], 1: LOST}, {2: [6], 3: [6]}])
    assert decision.target == 6
    assert decision.undo == {0: [0]}
    assert decision.fetch == {1: {0: 0}}


def test_a_rank_that_cannot_undo_what_it_has_fetched_counts_as_lost():
    # Rank 2 has fetched step 8 from rank 0; then the one that had all of the other set's died.
    held = [{0: [8, 8], 2: [8, 8], 4: LOST}, {1: LOST, 3: [7, 8], 5: LOST}]
    decision = decide(held)
    assert decision.target == 7
    assert decision.undo == {0: [0, 1], 2: [0, 1], 3: [1]}
    decision = decide([{0: [7, 7], 2: LOST, 4: LOST}, {1: LOST, 3: [7, 7], 5: LOST}])
    assert (decision.target, decision.undo) == (7, {})
    assert decision.fetch == {rank: {0: 0, 1: 0} for rank in (2, 4)} | {
        rank: {0: 3, 1: 3} for rank in (1, 5)
    }


@pytest.mark.parametrize(("logged", "replay"), [(True, [1]), (False, None)])
def test_a_lost_stage_replays_its_logs_or_all_go_back(logged, replay):
    decision = decide([{0: [7]}, {1: LOST}], [False, logged])
    if logged:
        assert (decision.target, decision.replay) == (7, replay)
        assert decision.fetch == decision.undo == {}
    else:
        assert decision.from_checkpoint
        assert "replica set 1" in decision.reason


def test_a_half_filled_newcomer_gives_only_what_it_has():
    assert decide([{0: LOST, 1: [7, 0]}]).from_checkpoint
    decision = decide([{0: [7, 7], 1: [7, 0]}])
    assert decision.fetch == {1: {1: 0}}


def test_sources_share_the_work():
    decision = decide([{rank: [3] * 40 for rank in range(4)} | {4: LOST, 5: LOST}])
    for newcomer in (4, 5):
        sources = list(decision.fetch[newcomer].values())
        assert {sources.count(rank) for rank in range(4)} == {10}
    assert all(decision.fetch[4][p] != decision.fetch[5][p] for p in range(40))


def test_two_hosts_of_possibilities_agree_with_the_rule():
    """All worlds of one set, two ranks and two parameters at 6 or 7, or lost."""
    for one, two in product([LOST, *product((6, 7), repeat=2)], repeat=2):
        decision = decide([{0: one, 1: two}])
        alive = [v for v in (one, two) if v is not None]
        if not alive:
            assert decision.from_checkpoint
            continue
        newest = max(map(max, alive))
        rolls = any(v == (newest, newest) for v in alive)
        assert decision.target == (newest if rolls else newest - 1)


@pytest.mark.parametrize(
    ("sets", "logged", "words"),
    [
        ([], None, "at least one rank"),
        ([{}], None, "at least one rank"),
        ([{0: [1]}, {0: [1]}], None, "rank 0 in set 1"),
        ([{0: [1], 1: [1, 1]}], None, "same parameters"),
        ([{0: [1]}], [True, False], "got 2 values"),
    ],
)
def test_bad_worlds_are_refused(sets, logged, words):
    with pytest.raises(DataError, match=words):
        decide(sets, logged)


class Counted(list):
    """Versions that count how often they are read from begin to end."""

    num_reads = 0

    def __iter__(self):
        Counted.num_reads += 1
        return super().__iter__()


@pytest.mark.parametrize("num_sets", [10, 1000])
def test_versions_are_read_a_few_times_each_however_many_ranks_there_are(num_sets):
    held = [8] * 50 + [7] * 50
    sets = [
        {10 * i + j: LOST if j == 3 else Counted(held) for j in range(10)} for i in range(num_sets)
    ]
    Counted.num_reads = 0
    decision = decide(sets)
    assert 0 < Counted.num_reads <= 6 * 9 * num_sets
    assert decision.target == 7
    assert len(decision.undo) == 9 * num_sets
    assert len(decision.fetch) == num_sets
