import operator
from functools import reduce

import pytest
import torch

from shared.comms import Group, merge_all_reduce
from shared.comms.merging.wire import RowFormat
from shared.errors import ConfigError
from shared.kernels.edge_softmax import SoftmaxState

INF = float("inf")
ROWS = [0, 1, 3, 21]


def merge_softmax(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    maximum = torch.maximum(a.maximum, b.maximum)
    shift = maximum.masked_fill(maximum == -INF, 0)
    of_a, of_b = (a.maximum - shift).exp(), (b.maximum - shift).exp()
    return SoftmaxState(
        maximum,
        a.total * of_a + b.total * of_b,
        a.weighted * of_a[..., None] + b.weighted * of_b[..., None],
    )


def take_last(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Associative, but not commutative: shows the order in which ranks are merged."""
    return torch.where(b >= 0, b, a)


def softmax_of(rank: int, num_rows: int) -> SoftmaxState:
    """A rank's state, in which some rows have no edge."""
    g = torch.Generator().manual_seed(rank)
    state = SoftmaxState(
        torch.randn(num_rows, 2, generator=g),
        torch.rand(num_rows, 2, generator=g) + 1,
        torch.randn(num_rows, 2, 9, generator=g),
    )
    empty = torch.arange(num_rows) % 5 == rank
    if num_rows:
        empty[0] = True
    for part, identity in zip(state, (-INF, 0, 0), strict=True):
        part[empty] = identity
    return state


def maxima_of(rank: int, num_rows: int) -> torch.Tensor:
    rows = torch.randn(num_rows, 20, generator=torch.Generator().manual_seed(50 + rank))
    rows[torch.arange(num_rows) % 3 == rank] = -INF
    return rows


def merge_states(num_rows: int, wire: str | None) -> list[torch.Tensor]:
    """Merges of one call each; the rank's own inputs must not change."""
    group = Group.world()
    softmax, maxima = softmax_of(group.rank, num_rows), maxima_of(group.rank, num_rows)
    counts = torch.full((num_rows,), group.rank + 1)
    flags = torch.full((num_rows, 3), group.rank % 2 == 1)
    last = torch.where(torch.arange(num_rows) % (group.rank + 1) == 0, group.rank, -1)
    merged = merge_all_reduce(group, softmax, merge_softmax, wire)
    assert isinstance(merged, SoftmaxState)
    both = merge_all_reduce(group, (counts, flags), lambda a, b: (a[0] + b[0], a[1] | b[1]), wire)
    assert isinstance(both, tuple)
    out = [
        *merged,
        *both,
        merge_all_reduce(group, maxima, torch.maximum, wire),
        merge_all_reduce(group, maxima.double(), torch.maximum, wire),
        merge_all_reduce(group, last, take_last, wire),
    ]
    assert all(map(torch.equal, softmax, softmax_of(group.rank, num_rows)))
    return out


def expected_states(size: int, num_rows: int) -> list[torch.Tensor]:
    ranks = range(size)
    last = torch.zeros(num_rows, dtype=torch.int64)
    for rank in ranks:
        last[torch.arange(num_rows) % (rank + 1) == 0] = rank
    maxima = reduce(torch.maximum, [maxima_of(rank, num_rows) for rank in ranks])
    return [
        *reduce(merge_softmax, [softmax_of(rank, num_rows) for rank in ranks]),
        torch.full((num_rows,), size * (size + 1) // 2),
        torch.ones(num_rows, 3, dtype=torch.bool),
        maxima,
        maxima.double(),
        last,
    ]


def check_states(results: list, wire: str | None, num_rows: int) -> None:
    expected = expected_states(len(results), num_rows)
    for ours in results:
        # Rank 0's own: the same bits everywhere.
        assert all(map(torch.equal, ours, results[0]))
        for index, (mine, right) in enumerate(zip(ours, expected, strict=True)):
            assert (mine.dtype, mine.shape) == (right.dtype, right.shape)
            assert not mine.isnan().any() if mine.is_floating_point() else True
            is_exact = wire is None or not mine.is_floating_point()
            if is_exact and index not in (1, 2):
                assert torch.equal(mine, right)
            elif mine.numel():
                error = {None: 1e-6, "float32": 1e-6, "bfloat16": 0.02, "int8": 0.04}[wire]
                torch.testing.assert_close(mine, right, rtol=error, atol=2 * error)
    narrow = results[0][:2]
    # Maxima of a softmax are exponents: they and totals stay in float32.
    for mine, right in zip(narrow, expected, strict=False):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("wire", [None, "float32", "bfloat16", "int8"])
def test_two_ranks_have_the_same_merged_rows(pool, wire):
    for num_rows in ROWS:
        check_states(pool.run(merge_states, num_rows, wire).results, wire, num_rows)


@pytest.mark.parametrize("wire", [None, "float32", "bfloat16", "int8"])
def test_four_ranks_have_the_same_merged_rows(pool_of_four, wire):
    for num_rows in ROWS:
        check_states(pool_of_four.run(merge_states, num_rows, wire).results, wire, num_rows)


def bytes_moved(num_rows: int, wire: str | None) -> dict:
    group = Group.world()
    before = group.ledger.snapshot()
    with group.ledger.phase("merge"):
        merge_all_reduce(group, softmax_of(group.rank, num_rows), merge_softmax, wire)
    return group.ledger.snapshot().diff(before).by_peer()


def test_bytes_are_those_of_the_closed_form(pool, pool_of_four):
    # A row of two heads: maximum and total in 4 bytes; 18 numbers, or as codes with two parameters.
    row_bytes = {None: 8 + 8 + 72, "bfloat16": 8 + 8 + 36, "int8": 8 + 8 + 18 + 8}
    for wire, num_bytes in row_bytes.items():
        for peers in pool.run(bytes_moved, 10, wire).results:
            assert [t.sent_bytes for t in peers.values()] == [10 * num_bytes]
        parts = [2, 3, 2, 3]
        for rank, peers in enumerate(pool_of_four.run(bytes_moved, 10, wire).results):
            for peer, traffic in peers.items():
                assert traffic.sent_bytes == (parts[peer] + parts[rank]) * num_bytes
                assert traffic.received_bytes == traffic.sent_bytes


def refuse_bad_states() -> None:
    group = Group.world()
    rows = torch.ones(3, 2)
    with pytest.raises(ConfigError, match="float32, bfloat16, int8, got 'int4'"):
        merge_all_reduce(group, rows, operator.add, "int4")
    for state in ((rows, rows[:2]), (rows, torch.tensor(1.0)), torch.tensor(1.0), ()):
        with pytest.raises(ConfigError, match="tensors with the same number of rows, got"):
            merge_all_reduce(group, state, lambda a, b: a)
    for merge in (lambda a, b: a[:1], lambda a, b: a.double(), lambda a, b: (a, b)):
        with pytest.raises(ConfigError, match="expected merge to return what it takes"):
            merge_all_reduce(group, rows, merge)


def test_bad_states_are_refused(pool):
    pool.run(refuse_bad_states)


def merge_alone(num_rows: int) -> None:
    groups = [Group.of([rank]) for rank in range(2)]
    group = groups[Group.world().rank]
    rows = maxima_of(1, num_rows)
    assert merge_all_reduce(group, rows, torch.maximum, "int8") is rows
    with pytest.raises(ConfigError, match="is not in the group of ranks"):
        merge_all_reduce(groups[1 - Group.world().rank], rows, torch.maximum)


def test_one_rank_keeps_its_state(pool):
    pool.run(merge_alone, 4)


def test_merging_is_not_differentiable(pool):
    pool.run(merge_leaf)


def merge_leaf() -> None:
    leaf = torch.ones(3, 2, requires_grad=True)
    assert not merge_all_reduce(Group.world(), leaf, operator.add).requires_grad


@pytest.mark.parametrize("wire", [None, "float32", "bfloat16", "int8"])
def test_rows_of_one_value_and_strided_tensors_travel_exactly(wire):
    rows = torch.tensor([0.0, -2.5, INF, -INF])[:, None].expand(4, 32)
    form = RowFormat([rows, rows[:, :3].double()], wire)
    decoded = form.decode(form.encode([rows, rows[:, :3].double()]))
    assert torch.equal(decoded[0], rows)
    assert torch.equal(decoded[1], rows[:, :3].double())
    assert (decoded[0].dtype, decoded[1].dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("shape", [(3, 0), (0, 0), (0, 40), (1, 40)])
@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
def test_rows_of_any_number_and_width_travel(wire, shape):
    state = [torch.zeros(shape), torch.ones(shape[0], dtype=torch.int16), torch.zeros(shape)]
    for tensors in (state, state[:1]):
        form = RowFormat(tensors, wire)
        assert all(map(torch.equal, form.decode(form.encode(tensors)), tensors))


def test_nothing_is_widened_on_the_way_and_nan_stays_visible():
    half = torch.randn(5, 20).half()
    for wire in ("float32", "bfloat16"):
        assert torch.equal(*(RowFormat([half], wire).decode(half.view(torch.uint8))[0], half))
    mixed = torch.randn(3, 20)
    mixed[1, 4] = -INF
    form = RowFormat([mixed], "int8")
    decoded = form.decode(form.encode([mixed]))[0]
    assert decoded.isnan().all(1).tolist() == [False, True, False]


def test_codes_are_rounded_to_nearest():
    rows = torch.randn(50, 30)
    form = RowFormat([rows], "int8")
    error = (form.decode(form.encode([rows]))[0] - rows).abs()
    step = (rows.amax(1) - rows.amin(1)) / 255
    assert bool((error <= step[:, None] * 0.501).all())
