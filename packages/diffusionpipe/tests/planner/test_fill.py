"""Frozen parts in idle time: everything once, nothing late, idle time used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.planner.fill import (
    DeviceSlots,
    FrozenCost,
    encode_first,
    fill_idle,
    find_slots,
    split_evenly,
)
from shared.topology import Operation, Replay

from .test_partition import share


def replay(*operations):
    return Replay([Operation(*each) for each in operations]).run()


def test_free_time_of_a_pass_is_used_up_to_who_waits_for_it():
    # B on rank 0 starts at 4 and ends at 5; D on rank 1 waits for it from 5 on, so B cannot move.
    # C ends at 2 and nobody waits for it before the end at 8: the time behind it is one gap.
    timeline = replay(
        ("A", "rank 1", 4), ("B", "rank 0", 1, ["A"]), ("D", "rank 1", 1, ["B"]),
        ("E", "rank 0", 1, ["D"]), ("F", "rank 1", 2),
    )  # fmt: skip
    first, second = find_slots(timeline, ["rank 0", "rank 1"])
    assert timeline.makespan_s == 8
    assert first.latest_s == [4, 7]
    offered = []
    first.walk(lambda position, available_s: offered.append((position, available_s)) or 0.0)
    assert offered == [(0, 4), (1, 2), (2, 1)]
    offered = []
    second.walk(lambda position, available_s: offered.append((position, available_s)) or 0.0)
    assert offered == [(1, 1), (3, 0)]


def test_a_message_that_can_wait_lets_its_pass_wait():
    # The message of 1 s is needed at 6 only; so its pass may end at 5 instead of 1.
    timeline = replay(
        ("A", "rank 0", 1), ("send", "0 to 1", 1, ["A"]), ("B", "rank 1", 6),
        ("C", "rank 1", 1, ["send"]),
    )  # fmt: skip
    slots = find_slots(timeline, ["rank 0", "rank 1"])
    assert slots[0].latest_s == [4]


def test_a_message_does_not_wait_into_the_next_one_of_its_link():
    # Y needs A's message at 5 only, but from 2 on the link is busy with B's, for which X waits.
    operations = (
        ("A", "rank 0", 1), ("B", "rank 1", 2), ("send A", "out", 1, ["A"]),
        ("send B", "out", 1, ["B"]), ("X", "rank 2", 2, ["send B"]), ("Y", "rank 2", 1, ["send A"]),
    )  # fmt: skip
    queues = {"rank 0": "given", "rank 1": "given", "rank 2": "given", "out": "readiness"}
    timeline = Replay([Operation(*each) for each in operations], queues).run()
    assert timeline.makespan_s == 6
    assert [each.latest_s for each in find_slots(timeline, ["rank 0", "rank 1"])] == [[0], [0]]


def test_a_pass_moves_only_as_far_as_later_insertions_let_it():
    # Between A's end and B's latest start 1.5 of 4 s are taken: A may start at 1.5 instead of 1.
    slots = DeviceSlots("AB", [1.0, 4.0], [1.0, 1.0], [3.0, 4.0], 5.0, [0.0, 1.5, 0.0])
    offered = []
    slots.walk(lambda position, available_s: offered.append((position, available_s)) or 0.0)
    assert offered == [(0, 1.5), (1, 0.5), (2, 0)]


def test_samples_are_shared_by_largest_remainders():
    # Room for 3 and 4 samples: 5 x 3 / 7 is 2 and 1 / 7, 5 x 4 / 7 is 2 and 6 / 7.
    slots = [DeviceSlots("A", [each], [1.0], [each], each + 1) for each in (3.0, 4.0)]
    insertions = fill_idle(slots, [FrozenCost("vae", [0.0, 1.0])], 5)
    assert [(each.device, each.count) for each in insertions] == [(0, 2), (1, 3)]


def test_work_is_inserted_before_the_pass_that_waits():
    slots = DeviceSlots("AB", [1.0, 4.0], [1.0, 1.0], [1.0, 4.0], 6.0)
    cost = FrozenCost("vae", [0.0, 0.5, 1.0])
    insertions = fill_idle([slots], [cost], 5)
    assert [(each.position, each.count) for each in insertions] == [(0, 2), (1, 3)]
    assert slots.finish_s == 5


def test_what_fits_nowhere_goes_to_the_end_of_who_finishes_first():
    early = DeviceSlots("A", [0.0], [2.0], [8.0], 3.0)
    late = DeviceSlots("A", [0.0], [3.0], [7.0], 3.0)
    cost = FrozenCost("vae", [0.0, 2.0])
    insertions = fill_idle([early, late], [cost], 3)
    counts = [sum(each.count for each in insertions if each.device == device) for device in (0, 1)]
    assert counts == [2, 1]
    assert max(early.finish_s, late.finish_s) == 6


def test_quotas_are_kept():
    slots = [DeviceSlots("A", [0.0], [1.0], [9.0], 10.0) for _ in range(2)]
    insertions = fill_idle(slots, [FrozenCost("vae", [0.0, 1.0])], 6, {"vae": [5, 1]})
    assert [(each.device, each.count) for each in insertions] == [(0, 5), (1, 1)]


def test_frozen_cost_counts_in_chunks():
    cost = FrozenCost("vae", [0.0, 2.0, 3.0])
    assert [cost.time_s(count) for count in range(6)] == [0, 2, 3, 5, 6, 8]
    fits = [(1.9, 0), (2.0, 1), (3.0, 2), (4.9, 2), (5, 3), (6, 4), (100, 9)]
    assert [cost.count_fitting(available, 9) for available, _ in fits] == [each for _, each in fits]


@given(st.floats(0, 50), st.integers(1, 30))
def test_what_is_said_to_fit_fits(available_s, num_samples):
    cost = FrozenCost("vae", [0.0, 1.0, 1.5, 4.0])
    count = cost.count_fitting(available_s, num_samples)
    assert 0 <= count <= num_samples
    assert cost.time_s(count) <= available_s * (1 + 1e-9)


times = st.floats(0, 2).map(lambda value: round(value, 2))


@pytest.mark.unchecked
@given(st.integers(1, 4), st.integers(0, 20), st.data())
def test_every_sample_is_encoded_once_and_nothing_gets_late(devices, num_samples, data):
    slots = []
    for _ in range(devices):
        gaps = data.draw(st.lists(st.tuples(times, times), min_size=1, max_size=5))
        start, clock = [], 0.0
        for gap, duration in gaps:
            start.append(clock + gap)
            clock += gap + duration
        durations = [each for _, each in gaps]
        slots.append(DeviceSlots(start, start, durations, start, clock))
    end_s = max(each.end_s for each in slots)
    for each in slots:
        each.end_s = end_s
    costs = [FrozenCost("vae", [0.0, 0.3, 0.5]), FrozenCost("text", [0.0, 0.02])]
    insertions = fill_idle(slots, costs, num_samples)
    for cost in costs:
        own = [each.count for each in insertions if each.name == cost.name]
        assert sum(own) == num_samples
        assert all(count > 0 for count in own)
    # Passes start no later than before: what was inserted ends by then.
    for device, each in enumerate(slots):
        clock = 0.0
        for position, (start, duration) in enumerate(
            zip(each.start_s, each.duration_s, strict=True)
        ):
            clock += each.inserted_s[position]
            assert clock <= start + 1e-9
            clock = start + duration
        work = sum(
            cost.time_s(insertion.count)
            for insertion in insertions
            for cost in costs
            if (insertion.device, insertion.name) == (device, cost.name)
        )
        assert sum(each.inserted_s) == pytest.approx(work)


@pytest.mark.unchecked
@given(st.lists(st.floats(0, 10), min_size=1, max_size=4), st.integers(0, 7))
def test_tails_end_as_early_as_possible(finish_s, num_samples):
    cost = FrozenCost("vae", [0.0, 1.0, 1.5, 4.0])
    # Devices without idle time: all samples go behind the last entries.
    slots = [DeviceSlots("A", [0.0], [each], [0.0], each) for each in finish_s]
    counts = [0] * len(slots)
    for each in fill_idle(slots, [cost], num_samples):
        assert each.position == 1
        counts[each.device] += each.count
    assert sum(counts) == num_samples

    def find_end_s(counts):
        ends = zip(finish_s, counts, strict=True)
        return max(finish + cost.time_s(count) for finish, count in ends)

    ways = share(num_samples + len(slots), len(slots))
    best = min(find_end_s([count - 1 for count in way]) for way in ways)
    assert find_end_s(counts) == pytest.approx(best)


def test_first_encodes_even_shares():
    insertions = encode_first(3, [FrozenCost("vae", [0.0, 1.0])], 5)
    assert [(each.device, each.position, each.count) for each in insertions] == [
        (0, 0, 2), (1, 0, 2), (2, 0, 1),
    ]  # fmt: skip
    assert split_evenly(7, 3) == [3, 2, 2]


def test_first_encodes_where_the_weights_have_room():
    vae = FrozenCost("vae", [0.0, 1.0])
    insertions = encode_first(3, [vae], 5, {"vae": [True, False, True]})
    assert [(each.device, each.count) for each in insertions] == [(0, 3), (2, 2)]
    assert encode_first(3, [vae], 5, {"vae": [False] * 3}) == encode_first(3, [vae], 5)
