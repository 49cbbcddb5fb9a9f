"""Columns that travel together: against plain lists of rows, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.workers.batch.batch import PADDING, Batch
from hybridflow.workers.batch.ragged import Ragged
from shared.errors import ConfigError, DataError

ROWS = st.lists(
    st.tuples(st.integers(-9, 9), st.lists(st.integers(0, 99), max_size=3), st.text(max_size=2)),
    min_size=1,
    max_size=9,
)
"""Rows as a number, a list of any length, and an object."""


def batch_of(rows, **meta):
    return Batch(
        number=torch.tensor([row[0] for row in rows], dtype=torch.int32),
        pair=torch.tensor([[row[0], -row[0]] for row in rows], dtype=torch.bfloat16).view(-1, 2),
        tail=Ragged(
            torch.tensor([value for row in rows for value in row[1]], dtype=torch.int16),
            torch.tensor([len(row[1]) for row in rows], dtype=torch.int64),
        ),
        told=[row[2] for row in rows],
        meta=meta,
    )


def rows_of(batch):
    """The same rows back; dtypes must not have changed on the way."""
    assert batch["number"].dtype == torch.int32
    assert batch["pair"].dtype == torch.bfloat16
    assert batch["tail"].values.dtype == torch.int16
    assert batch["tail"].lengths.dtype == torch.int64
    number = batch["number"].tolist()
    assert batch["pair"].tolist() == [[value, -value] for value in number]
    assert len(batch) == len(batch["tail"]) == len(batch["told"]) == len(number)
    tails = [row.tolist() for row in batch["tail"]]
    return list(zip(number, tails, batch["told"], strict=True))


@given(rows=ROWS, data=st.data())
def test_chunks_are_consecutive_of_like_lengths_and_concat_undoes_them(rows, data):
    parts = data.draw(st.integers(1, len(rows)))
    batch = batch_of(rows, temperature=0.5)
    chunks = batch.chunk(parts)
    sizes = [len(chunk) for chunk in chunks]
    assert len(chunks) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows
    joined = Batch.concat(chunks)
    assert rows_of(joined) == rows
    assert [part.meta for part in (*chunks, joined)] == [{"temperature": 0.5}] * (parts + 1)


@given(rows=ROWS, data=st.data())
def test_reorder_repeat_and_rows_are_those_of_lists(rows, data):
    batch = batch_of(rows, kept=1)
    index = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=12))
    taken = batch.reorder(index)
    assert rows_of(taken) == [rows[k] for k in index]
    assert rows_of(batch.reorder(torch.tensor(index, dtype=torch.int32))) == rows_of(taken)
    times = data.draw(st.integers(0, 3))
    assert rows_of(batch.repeat(times)) == [row for row in rows for _ in range(times)]
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows) + 2))
    assert rows_of(batch.rows(start, stop)) == rows[start:stop]
    assert taken.meta == batch.repeat(times).meta == batch.rows(start, stop).meta == {"kept": 1}


@given(rows=ROWS, divisor=st.integers(1, 12))
def test_padding_takes_rows_from_the_first_and_is_stripped_wherever_it_lies(rows, divisor):
    batch = batch_of(rows, kept=1)
    padded = batch.pad_to(divisor)
    total = -(-len(rows) // divisor) * divisor
    assert rows_of(padded) == [rows[k % len(rows)] for k in range(total)]
    assert padded[PADDING].tolist() == [k >= len(rows) for k in range(total)]
    assert PADDING not in batch
    assert rows_of(padded.without_padding()) == rows
    assert rows_of(padded.reorder(range(total - 1, -1, -1)).without_padding()) == rows[::-1]
    assert PADDING not in padded.without_padding()
    assert padded.meta == padded.without_padding().meta == {"kept": 1}


@given(batches=st.lists(ROWS, min_size=1, max_size=4))
def test_concat_is_that_of_lists(batches):
    joined = Batch.concat([batch_of(rows, place=k) for k, rows in enumerate(batches)])
    assert rows_of(joined) == [row for rows in batches for row in rows]
    assert joined.meta == {"place": 0}


def test_what_has_no_rows_stays_a_table():
    batch = batch_of([], kept=1)
    assert len(batch) == 0
    assert rows_of(batch.repeat(3)) == rows_of(batch.reorder([])) == rows_of(batch.rows(0, 4)) == []
    assert rows_of(Batch.concat([batch, batch_of([(1, [2], "a")]), batch])) == [(1, [2], "a")]
    assert rows_of(batch | batch_of([])) == []
    with pytest.raises(DataError, match=r"1 parts, got 0 rows.*pad_to\(1\)"):
        batch.chunk(1)
    with pytest.raises(DataError, match="an empty batch cannot be padded"):
        batch.pad_to(2)
    assert len(Batch()) == 0
    assert (Batch() | batch).keys() == batch.keys()
    with pytest.raises(ConfigError, match="at least one batch"):
        Batch.concat([])


def test_rows_and_chunks_are_views_and_reordered_rows_are_not():
    batch = batch_of([(k, [k] * k, "") for k in range(5)])
    last = batch.chunk(2)[1]
    assert last["pair"].data_ptr() == batch["pair"][3].data_ptr()
    assert last["tail"].values.data_ptr() == batch["tail"].values[3:].data_ptr()
    batch["pair"][4] = 7
    assert last["pair"][1].tolist() == [7, 7]
    apart = batch.reorder(range(5))
    batch["pair"][4] = 8
    assert apart["pair"][4].tolist() == [7, 7]
    assert batch.to("cpu")["pair"] is batch["pair"]
    assert batch.select("pair")["pair"] is batch["pair"]


def test_select_drop_and_lookups_name_what_is_there():
    batch = batch_of([(1, [], "a")], kept=1)
    assert batch.select("told", "number").keys() == ["told", "number"]
    assert batch.drop("told", "nothing").keys() == ["number", "pair", "tail"]
    assert batch.select().meta == batch.drop("told").meta == {"kept": 1}
    assert "told" in batch
    assert list(batch) == batch.keys() == [name for name, _ in batch.items()]
    with pytest.raises(DataError, match="no column 'x'; there are number, pair, tail, told"):
        batch["x"]
    with pytest.raises(DataError, match="no column 'x'; there are none"):
        Batch()["x"]
    assert repr(batch) == (
        "Batch(1 rows; number: int32[1], pair: bfloat16[1, 2], "
        "tail: ragged int16[1, 0 in all], told: objects)"
    )


def test_columns_of_other_lengths_or_without_rows_are_refused():
    with pytest.raises(DataError, match=r"column 'b' has 3 rows, and 'a' 2"):
        Batch(a=[1, 2], b=torch.zeros(3))
    with pytest.raises(DataError, match="column 'a': expected one value a row"):
        Batch(a=torch.tensor(1))
    batch = Batch(a=[1, 2])
    batch["a"] = [1, 2, 3]  # the only column may change its length
    assert len(batch) == 3


def test_a_mask_is_no_positions():
    with pytest.raises(DataError, match="expected positions of rows, got a mask"):
        Batch(a=[1, 2]).reorder(torch.tensor([False, True]))


EQUAL = [
    torch.tensor([[1.0, float("nan")], [float("-inf"), 2.0]]),
    torch.tensor([1, 2]),
    torch.tensor([True, False]),
    Ragged.of([torch.tensor([1.0, float("nan")]), torch.tensor([])]),
    ["a", {"b": [1, None]}],
    [float("nan"), 1.0],
    [torch.tensor([1.0]), torch.tensor([float("nan"), 2.0])],
]


@pytest.mark.parametrize("column", EQUAL, ids=lambda column: type(column).__name__)
def test_union_takes_equal_columns_and_nan_equals_itself(column):
    copy = Ragged(column.values.clone(), column.lengths) if isinstance(column, Ragged) else None
    copy = column.clone() if isinstance(column, torch.Tensor) else copy
    copy = list(column) if copy is None else copy
    joined = Batch(a=column, meta={"x": 1, "y": 1}) | Batch(a=copy, b=[0, 0], meta={"y": 2})
    assert joined.keys() == ["a", "b"]
    assert joined.meta == {"x": 1, "y": 2}


DIFFERENT = [
    (torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([[1.0, 2], [3, 0], [0, 6]]), 1),
    (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]), 2),
    (torch.tensor([True, False, True]), torch.tensor([False, False, True]), 0),
    (torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, float("nan"), 1.0]), 1),
    (
        Ragged(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 0])),
        Ragged(torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1])),
        1,
    ),
    (
        Ragged(torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1])),
        Ragged(torch.tensor([1, 2, 4]), torch.tensor([1, 1, 1])),
        2,
    ),
    (["a", "b", {"c": 1}], ["a", "b", {"c": 2}], 2),
    ([torch.ones(2), torch.ones(2), 0], [torch.ones(2), torch.zeros(2), 1], 1),
    ([torch.ones(2), 1, 0], [torch.ones(3), 1, 0], 0),
]


@pytest.mark.parametrize(("ours", "theirs", "row"), DIFFERENT)
def test_union_names_the_column_and_the_first_row_that_differ(ours, theirs, row):
    with pytest.raises(DataError, match=f"column 'a' is in both .*first in row {row};"):
        Batch(b=[0, 0, 0], a=ours) | Batch(a=theirs)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 1), torch.zeros(2)),
        (torch.zeros(2), [0.0, 0.0]),
        (torch.zeros(2), torch.zeros(3)),
        ([1], [1, 2]),
    ],
)
def test_union_refuses_columns_of_another_kind(ours, theirs):
    with pytest.raises(DataError, match=r"column 'a' .* in kind, shape or length"):
        Batch(a=ours) | Batch(a=theirs)


def test_union_refuses_another_number_of_rows():
    with pytest.raises(DataError, match="column 'b' has 3 rows, and 'a' 2"):
        Batch(a=[1, 2]) | Batch(b=[1, 2, 3])
    with pytest.raises(TypeError):
        Batch(a=[1]) | {"b": [1]}


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ([1], torch.ones(1), r"column 'a' is \['Tensor', 'list'\]"),
        (torch.ones(1), torch.ones(1, 2), r"column 'a': rows of \[\(\), \(2,\)\]"),
        (torch.ones(1), torch.ones(1).long(), r"column 'a': .*'torch.float32', 'torch.int64'"),
        (
            Ragged.of([torch.ones(1)]),
            Ragged.of([torch.ones(1).long()]),
            r"column 'a': .*'torch.float32', 'torch.int64'",
        ),
    ],
)
def test_concat_refuses_columns_of_another_kind(first, second, told):
    with pytest.raises(DataError, match=told):
        Batch.concat([Batch(a=first), Batch(a=second)])


def test_concat_refuses_other_columns_and_matches_them_by_name():
    with pytest.raises(DataError, match=r"batch 1 has the columns \['a', 'b'\], and the first"):
        Batch.concat([Batch(a=[1]), Batch(a=[1], b=[1])])
    assert Batch.concat([Batch(a=[1], b=[2]), Batch(b=[3], a=[4])])["a"] == [1, 4]


@given(rows=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6))
def test_ragged_rows_pad_on_the_right(rows):
    column = Ragged(
        torch.tensor([value for row in rows for value in row], dtype=torch.int64),
        torch.tensor([len(row) for row in rows], dtype=torch.int64),
    )
    width = max(map(len, rows), default=0)
    assert column.padded(-1).shape == (len(rows), width)
    assert column.padded(-1).tolist() == [row + [-1] * (width - len(row)) for row in rows]
    assert [row.tolist() for row in column] == rows
    if rows:
        assert Ragged.of([torch.tensor(row, dtype=torch.int64) for row in rows]) == column


@pytest.mark.parametrize(
    ("num_values", "lengths"), [(3, [1, 1]), (3, [4, -1]), (2, [[1], [1]]), (1, [])]
)
def test_lengths_that_do_not_add_up_are_refused(num_values, lengths):
    with pytest.raises(DataError, match=f"that add up to {num_values} values"):
        Ragged(torch.zeros(num_values), torch.tensor(lengths, dtype=torch.int64))


def test_ragged_columns_are_cut_in_consecutive_rows_only():
    column = Ragged.of([torch.zeros(k) for k in (1, 2, 3)])
    assert [column[a:b].lengths.tolist() for a, b in ((0, 2), (1, 9), (2, 1))] == [
        [1, 2],
        [2, 3],
        [],
    ]
    with pytest.raises(DataError, match="every 2th; use `take`"):
        column[::2]
    with pytest.raises(DataError, match="at least one row"):
        Ragged.of([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_large_columns_are_joined_as_small_ones_are(dtype):
    parts = [torch.arange(k, k + (3 << 18)).view(-1, 4).to(dtype) for k in range(1, 4)]
    found = Batch.concat([Batch(x=part) for part in parts])["x"]
    assert torch.equal(found, torch.cat(parts))
    found[0] = 0  # and may be written to
    assert not found[0].any()
