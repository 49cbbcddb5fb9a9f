import itertools
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.comms import Group, RankPool, reshard
from shared.comms.courier import connect
from shared.comms.reshard import Move, Transfer
from shared.errors import ConfigError, DataError, RankFailure
from shared.topology import Box, decompose, intersect

SHAPE = (4, 6)


def elements(box: Box) -> set[tuple[int, ...]]:
    axes = (range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*axes))


def whole(shape) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def sharded(shape, dim: int, num_ranks: int) -> list[list[Box]]:
    """As DTensor cuts: equal parts rounded up, the last ranks get less or nothing."""
    part = -(-shape[dim] // num_ranks)
    layout = []
    for rank in range(num_ranks):
        start, stop = (min(at * part, shape[dim]) for at in (rank, rank + 1))
        offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
        sizes = tuple(stop - start if d == dim else n for d, n in enumerate(shape))
        layout.append([Box(offsets, sizes)])
    return layout


def flat(shape, num_ranks: int) -> list[list[Box]]:
    """As ZeRO cuts: equal ranges of the flat tensor."""
    numel = torch.Size(shape).numel()
    bounds = [numel * rank // num_ranks for rank in range(num_ranks + 1)]
    return [decompose(shape, *pair) for pair in itertools.pairwise(bounds)]


def layouts(shape, num_ranks: int) -> dict[str, list[list[Box]]]:
    found = {f"dim{d}": sharded(shape, d, num_ranks) for d in range(len(shape))}
    found["flat"] = flat(shape, num_ranks)
    found["replicated"] = [[whole(shape)] for _ in range(num_ranks)]
    found["one"] = [[whole(shape)], *([] for _ in range(num_ranks - 1))]
    return found


@st.composite
def any_layouts(draw):
    """Destinations are disjoint flat ranges on each rank; sources any ranges that hold them all."""
    num_ranks = draw(st.integers(1, 4))
    bounds = st.lists(st.integers(0, 24), min_size=2, max_size=4)
    wanted = []
    for _ in range(num_ranks):
        cuts = sorted(draw(bounds))
        wanted.append([b for pair in itertools.pairwise(cuts) for b in decompose(SHAPE, *pair)])
    held = [decompose(SHAPE, *sorted(draw(st.tuples(*[st.integers(0, 24)] * 2)))) for _ in wanted]
    held[draw(st.integers(0, num_ranks - 1))] += flat(SHAPE, 3)[0]
    rest = draw(st.integers(0, num_ranks - 1))
    held[rest] += [box for boxes in flat(SHAPE, 3)[1:] for box in boxes]
    return held, wanted


@given(any_layouts())
def test_every_wanted_element_comes_once_and_only_if_it_must(found):
    held, wanted = found
    transfers = reshard.plan(held, wanted, 4)
    for rank, boxes in enumerate(wanted):
        arriving = [t for t in transfers if t.dst == rank]
        want = set().union(*map(elements, boxes))
        assert sum(t.box.numel for t in arriving) == len(want)
        assert set().union(*(elements(t.box) for t in arriving)) == want
        own = set().union(*map(elements, held[rank]))
        from_others = sum(t.box.numel for t in arriving if t.src != rank)
        assert from_others == len(want - own)
    for src, dst, box in transfers:
        assert any(intersect(box, outer) == box for outer in held[src])
        assert any(intersect(box, outer) == box for outer in wanted[dst])
    assert sum(reshard.sent_bytes(transfers, 4, len(held))) == 4 * sum(
        t.box.numel for t in transfers if t.src != t.dst
    )


def test_replicas_share_the_sending():
    held = [[whole((8, 10))]] * 4 + [[]] * 4
    wanted = [[]] * 4 + sharded((8, 10), 0, 4)
    transfers = reshard.plan(held, wanted, 2)
    assert reshard.sent_bytes(transfers, 2, 8) == [40] * 4 + [0] * 4


def test_what_is_sent_already_counts():
    held = [[whole((6,))], [whole((6,))], []]
    wanted = [[], [], [whole((6,))]]
    assert reshard.plan(held, wanted, 4, already_sent=[24, 0, 0])[0].src == 1
    assert reshard.plan(held, wanted, 4, already_sent=[0, 24, 0])[0].src == 0


def test_what_is_there_is_not_sent():
    layout = flat((5, 7), 3)
    assert all(t.src == t.dst for t in reshard.plan(layout, layout, 8))


def test_unheld_boxes_are_named():
    with pytest.raises(DataError, match=r"rank 1 wants Box\(offsets=\(4,\), sizes=\(2,\)\)"):
        reshard.plan([[Box((0,), (4,))], []], [[], [Box((2,), (4,))]], 4)
    with pytest.raises(DataError, match="no rank holds"):
        reshard.plan([[], []], [[], [whole(())]], 4)


def test_layouts_of_different_worlds():
    with pytest.raises(ConfigError, match="2 sources, 1 destinations"):
        reshard.plan([[], []], [[]], 4)


def values_of(shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256 if dtype != torch.bool else 2, (count,), generator=noise)
    return raw.to(torch.uint8).view(dtype).view(shape)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    one, two = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, two)


def moving(
    tensors: list[tuple[tuple, torch.dtype, str, str]], is_begun_first: bool
) -> tuple[int, int, int, int]:
    """Moves tensors of all kinds together; bytes planned and counted, sent and received.

    Or each by itself, with all begun before the first is waited for.
    """
    group = Group.world()
    rank, size = group.rank, group.world_size
    moves, checks, load, expected = [], [], [0] * size, 0
    for seed, (shape, dtype, source, target) in enumerate(tensors):
        held, wanted = layouts(shape, size)[source], layouts(shape, size)[target]
        full = values_of(shape, dtype, seed)
        transfers = reshard.plan(held, wanted, dtype.itemsize, already_sent=load)
        sent = reshard.sent_bytes(transfers, dtype.itemsize, size)
        load = [a + b for a, b in zip(load, sent, strict=True)]
        expected += sum(t.box.numel * dtype.itemsize for t in transfers if t.dst == rank != t.src)
        mine = [(box, full[box.within(whole(shape))]) for box in held[rank]]
        places = [(box, torch.zeros(box.sizes, dtype=dtype)) for box in wanted[rank]]
        moves.append(Move(transfers=transfers, held=mine, wanted=places))
        checks += [(place, full[box.within(whole(shape))]) for box, place in places]
    before = group.ledger.snapshot()
    if is_begun_first:
        for begun in [reshard.start(group, [move], "moving") for move in moves]:
            begun.wait()
    else:
        reshard.run(group, moves, "moving")
    moved = group.ledger.snapshot().diff(before).by_phase().get("moving")
    assert checks
    assert all(same_bytes(place, values) for place, values in checks)
    return load[rank], moved.sent_bytes, expected, moved.received_bytes


KINDS = [
    ((9, 5), torch.float32, "dim0", "dim1"),
    ((9, 5), torch.bfloat16, "flat", "dim0"),
    ((3, 4, 5), torch.complex64, "dim2", "flat"),
    ((7,), torch.bool, "one", "replicated"),
    ((), torch.float64, "replicated", "replicated"),
    ((6, 2), torch.float8_e4m3fn, "dim1", "replicated"),
    ((2, 3), torch.int8, "dim0", "dim1"),
    ((0, 3), torch.float32, "dim1", "dim0"),
]


@pytest.mark.parametrize("is_begun_first", [False, True])
def test_moved_values_and_bytes_are_those_planned(pool_of_four, is_begun_first):
    results = pool_of_four.run(moving, KINDS, is_begun_first).results
    for planned, sent, expected, received in results:
        assert planned == sent
        assert expected == received
    assert sum(result[0] for result in results) > 0


def rounds_under_way() -> int:
    """The most rounds whose buffers exist at one time while every rank sends to every other."""
    group = Group.world()
    size, rank = group.world_size, group.rank
    held, wanted = layouts((8, 8), size)["dim0"], layouts((8, 8), size)["dim1"]
    move = Move(
        transfers=reshard.plan(held, wanted, 4),
        held=[(box, torch.ones(box.sizes)) for box in held[rank]],
        wanted=[(box, torch.zeros(box.sizes)) for box in wanted[rank]],
    )
    post = reshard.post_rounds
    open_rounds, most = 0, 0

    class Counted:
        """A round under way, until it is waited for."""

        def __init__(self, pending):
            nonlocal open_rounds, most
            self.pending = pending
            open_rounds += 1
            most = max(most, open_rounds)

        def wait_all(self):
            nonlocal open_rounds
            self.pending.wait_all()
            open_rounds -= 1

    with mock.patch.object(reshard, "post_rounds", lambda *a, **k: Counted(post(*a, **k))):
        reshard.run(group, [move])
    assert open_rounds == 0
    assert all(bool((values == 1).all()) for _, values in move.wanted)
    return most


def test_buffers_are_of_two_rounds_at_a_time(pool_of_four):
    assert pool_of_four.run(rounds_under_way).results == [2] * 4


def moving_into_place(num_columns: int) -> bool:
    """Whether rows of a table, some columns of them, came to their places without a copy."""
    group = Group.world()
    size, rank = group.world_size, group.rank
    table = torch.arange(2.0 * size * 5).view(2 * size, 5)
    target = torch.zeros_like(table)
    held = sharded(table.shape, 0, size)
    wanted = [[Box((0, 0), (2 * size, num_columns))]] * size
    move = Move(
        transfers=reshard.plan(held, wanted, 4),
        held=[(box, table[box.within(whole(table.shape))]) for box in held[rank]],
        wanted=[(wanted[rank][0], target[:, :num_columns])],
    )
    places, post = [], reshard.post_rounds

    def posted(group, rounds, *given, **settings):
        places.extend(one.recv.data_ptr() for one in rounds)
        return post(group, rounds, *given, **settings)

    with mock.patch.object(reshard, "post_rounds", posted):
        reshard.run(group, [move])
    assert torch.equal(target[:, :num_columns], table[:, :num_columns])
    assert not target[:, num_columns:].any()
    start = target.data_ptr()
    return all(start <= one < start + target.nbytes for one in places)


@pytest.mark.parametrize(("num_columns", "is_in_place"), [(5, True), (3, False), (1, False)])
def test_a_contiguous_box_arrives_in_its_place(pool_of_four, num_columns, is_in_place):
    found = pool_of_four.run(moving_into_place, num_columns).results
    assert found == [is_in_place] * 4


def moving_beside_others() -> list[float]:
    """Two threads reshard at the same time, each on its lane, in another order on every rank."""
    group = Group.world()
    size, rank = group.world_size, group.rank
    connect(group, ["beside"])
    held, wanted = layouts((8, 8), size)["dim0"], layouts((8, 8), size)["dim1"]

    def move(value: float) -> torch.Tensor:
        found = torch.zeros(wanted[rank][0].sizes)
        transfers = reshard.plan(held, wanted, 4)
        mine = [(box, torch.full(box.sizes, value)) for box in held[rank]]
        moves = [Move(transfers=transfers, held=mine, wanted=[(wanted[rank][0], found)])]
        lane = "rounds" if value < 10 else "beside"
        for _ in range(5):
            reshard.run(group, moves, lane=lane)
        return found

    values = [1.0, 11.0] if rank % 2 else [11.0, 1.0]
    with ThreadPoolExecutor(2) as threads:
        moved = dict(zip(values, threads.map(move, values), strict=True))
    return [moved[value].mean().item() for value in (1.0, 11.0)]


def test_lanes_do_not_mix(pool_of_four):
    assert pool_of_four.run(moving_beside_others).results == [[1.0, 11.0]] * 4


def moving_what_is_not_there() -> None:
    group = Group.world()
    move = Move(transfers=[Transfer(0, 1, whole((4,)))], held=[], wanted=[])
    reshard.run(group, [move])


def test_a_side_that_does_not_fit_the_plan():
    with RankPool(2) as pool, pytest.raises(RankFailure, match="expected a tensor that holds Box"):
        pool.run(moving_what_is_not_there)
