import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, DataError
from shared.kernels.neighbors import cpu, reference, relabel, sample
from shared.kernels.philox import stream_key
from shared.kernels.segment import CSR

KEY = 0xDEADBEEFCAFEF00D
FANOUTS = [-1, 0, 1, 2, 3, 10, 16, 17, 63, 64, 65, 130, 10_000]


def skewed_csr(num_rows=40, nnz=3000, seed=0) -> CSR:
    g = torch.Generator().manual_seed(seed)
    # Cubed: from rows without entries to rows of some hundred.
    dst = (torch.rand(nnz, generator=g) ** 3 * num_rows).long()
    return CSR.from_coo(dst, torch.randint(0, 100, (nnz,), generator=g), num_rows + 3, 100)


def run(form, csr: CSR, rows, fanout, key=KEY):
    csr = csr.to(form.device)
    indptr, entries = form.of("neighbors").sample(csr.indptr, rows.to(form.device), fanout, key)
    return indptr.cpu(), entries.cpu()


@pytest.mark.parametrize("fanout", FANOUTS)
def test_numba_draws_what_the_reference_draws(fanout):
    csr = skewed_csr()
    rows = torch.cat([torch.arange(csr.num_rows), torch.tensor([1, 0, 1])])
    theirs = reference.sample(csr.indptr, rows, fanout, KEY)
    assert all(map(torch.equal, sample(csr, rows, fanout, KEY), theirs))


@pytest.mark.parametrize("fanout", [-1, 0, 1, 7, 17])
def test_every_form_draws_what_the_reference_draws(form, fanout):
    csr, rows = skewed_csr(), torch.tensor([0, 42, 39, 1, 0, 12])
    theirs = reference.sample(csr.indptr, rows, fanout, KEY)
    assert all(map(torch.equal, run(form, csr, rows, fanout), theirs))


@pytest.mark.parametrize("fanout", FANOUTS)
def test_entries_are_distinct_ascending_and_of_their_row(fanout):
    csr = skewed_csr()
    rows = torch.randperm(csr.num_rows)
    indptr, entries = sample(csr, rows, fanout, KEY)
    assert (int(indptr[0]), int(indptr[-1])) == (0, len(entries))
    for i, row in enumerate(rows.tolist()):
        mine = entries[indptr[i] : indptr[i + 1]].tolist()
        first, end = csr.indptr[row : row + 2].tolist()
        assert len(mine) == (end - first if fanout < 0 else min(end - first, fanout))
        assert mine == sorted(set(mine))
        assert all(first <= entry < end for entry in mine)


@given(st.lists(st.integers(0, 42), max_size=60), st.integers(0, 80), st.integers(0, 2**64 - 1))
def test_a_row_draws_the_same_wherever_and_with_whomever_it_stands(rows, fanout, key):
    csr = skewed_csr()
    together, entries = sample(csr, torch.tensor(rows, dtype=torch.int64), fanout, key)
    for i, row in enumerate(rows):
        _, alone = sample(csr, torch.tensor([row]), fanout, key)
        assert torch.equal(entries[together[i] : together[i + 1]], alone)


def test_a_part_with_some_of_the_rows_draws_the_same_neighbours():
    """Other rows' entries move a row's own ones, which are drawn by their number within the row."""
    csr, rows = skewed_csr(), torch.arange(0, 40, 2)
    counts = csr.indptr.diff().clone()
    counts[1::2] = 0
    row_of = torch.repeat_interleave(torch.arange(csr.num_rows), csr.indptr.diff())
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    part = CSR(indptr, csr.indices[row_of % 2 == 0], csr.num_cols)
    whole_indptr, whole = sample(csr, rows, 7, KEY)
    part_indptr, own = sample(part, rows, 7, KEY)
    assert torch.equal(whole_indptr, part_indptr)
    assert torch.equal(csr.indices[whole], part.indices[own])


def test_several_threads_draw_the_same(two_threads):
    csr = skewed_csr(num_rows=3000, nnz=200_000)
    rows = torch.arange(3000).repeat(40)
    for fanout in (-1, 10, 70):
        parallel = sample(csr, rows, fanout, KEY)
        torch.set_num_threads(1)
        assert all(map(torch.equal, parallel, sample(csr, rows, fanout, KEY)))
        torch.set_num_threads(2)


@pytest.mark.parametrize(("degree", "fanout"), [(7, 1), (5, 3), (12, 5), (90, 70)])
def test_draws_are_uniform(degree, fanout):
    """Chi-square of entries and of pairs of them over independent rows, below its 1 - 1e-6 quantile."""
    num_rows = 40_000 if fanout < 10 else 4_000
    csr = CSR(torch.arange(num_rows + 1) * degree, torch.zeros(num_rows * degree).long(), 1)
    _, entries = sample(csr, torch.arange(num_rows), fanout, stream_key(3, degree))
    offsets = entries.view(num_rows, fanout) % degree
    drawn = torch.zeros(num_rows, degree).scatter_(1, offsets, 1)
    pairs = drawn.double().T @ drawn.double()
    singles = pairs.diagonal()
    # Draws without replacement are negatively correlated: their variance is that of one row's.
    share = fanout / degree
    variance = num_rows * share * (1 - share) * degree / (degree - 1)
    statistic = float(((singles - num_rows * share) ** 2).sum()) / variance
    assert statistic < degree + 8 * degree**0.5 + 20
    if fanout > 1:
        upper = pairs[torch.triu(torch.ones(degree, degree), 1) > 0]
        expected = num_rows * share * (fanout - 1) / (degree - 1)
        worst = float((upper - expected).abs().max()) / expected**0.5
        assert worst < 6


def test_keys_and_rows_draw_independently():
    csr = CSR(torch.tensor([0, 1000, 2000]), torch.zeros(2000).long(), 1)
    draws = [
        sample(csr, torch.tensor([row]), 50, key)[1] % 1000 for row in (0, 1) for key in (1, 2)
    ]
    for i, first in enumerate(draws):
        for second in draws[:i]:
            assert len(set(first.tolist()) & set(second.tolist())) < 15


def test_a_row_with_many_entries_takes_no_longer_than_its_fanout():
    """A hub of 2^30 entries, whose indices nothing may read, let alone walk through."""
    indptr = torch.tensor([0, 1 << 30, (1 << 30) + 3])
    rows = torch.tensor([0, 1, 0])
    ends, entries = cpu.sample(indptr, rows, 100, KEY)
    assert ends.tolist() == [0, 100, 103, 203]
    assert int(entries[:100].max()) > 1 << 29
    assert torch.equal(entries, reference.sample(indptr, rows, 100, KEY)[1])


def test_no_rows_and_no_entries():
    csr = skewed_csr()
    nothing = torch.zeros(0, dtype=torch.int64)
    assert [part.tolist() for part in sample(csr, nothing, 5, KEY)] == [[0], []]
    empty = CSR(torch.zeros(4, dtype=torch.int64), nothing, 0)
    assert [part.tolist() for part in sample(empty, torch.tensor([2, 0]), 5, KEY)] == [[0] * 3, []]


def test_bad_samples_are_refused():
    csr = skewed_csr()
    with pytest.raises(ConfigError, match="or -1 for all entries, got -2"):
        sample(csr, torch.tensor([0]), -2, KEY)
    with pytest.raises(ConfigError, match=r"key in \[0, 2\^64\), got -1"):
        sample(csr, torch.tensor([0]), 2, -1)
    with pytest.raises(DataError, match=r"rows in \[0, 43\), got 0 to 43"):
        sample(csr, torch.tensor([0, 43]), 2, KEY)


def run_relabel(form, ids, num_nodes, first, table=None):
    device = form.device
    table = None if table is None else table.to(device)
    parts = form.of("neighbors").relabel(ids.to(device), num_nodes, first.to(device), table)
    return [part.cpu() for part in parts]


@given(st.lists(st.integers(0, 30), max_size=80), st.lists(st.integers(0, 30), max_size=20))
def test_relabel_numbers_by_first_appearance(ids, first):
    ids, first = (torch.tensor(each, dtype=torch.int64) for each in (ids, first))
    table = torch.full((31,), -1, dtype=torch.int32)
    unique, positions = relabel(ids, 31, first, table)
    assert torch.equal(unique[positions], ids)
    assert torch.equal(unique[: len(first)], first)
    fresh = [node for node in dict.fromkeys(ids.tolist()) if node not in first.tolist()]
    assert unique[len(first) :].tolist() == fresh
    lowest = [first.tolist().index(node) for node in ids.tolist() if node in first.tolist()]
    assert positions[positions < len(first)].tolist() == lowest
    assert bool((table == -1).all())


def test_every_form_relabels_alike(form):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 100, (400,), generator=g)
    for first in (torch.tensor([5, 7, 5, 99]), torch.zeros(0, dtype=torch.int64)):
        for part in (ids, ids[:0]):
            expected = reference.relabel(part, 100, first, None)
            assert all(map(torch.equal, run_relabel(form, part, 100, first), expected))


def test_several_tensors_are_read_as_one():
    ids = [torch.tensor([4, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([2, 9])]
    unique, positions = relabel(ids, 10, torch.tensor([9]))
    assert (unique.tolist(), positions.tolist()) == ([9, 4, 2], [1, 2, 2, 0])
    unique, positions = relabel([], 10, torch.tensor([9]))
    assert (unique.tolist(), positions.tolist()) == ([9], [])


def test_bad_ids_are_refused_and_leave_the_table():
    table = torch.full((10,), -1, dtype=torch.int32)
    with pytest.raises(DataError, match=r"ids in \[0, 10\), got 3 to 10"):
        relabel(torch.tensor([3, 10]), 10, torch.tensor([1]), table)
    with pytest.raises(DataError, match=r"first in \[0, 10\), got -1 to 1"):
        relabel(torch.tensor([3]), 10, torch.tensor([1, -1]), table)
    assert bool((table == -1).all())
    check = getattr(relabel, "__wrapped__", relabel)
    with pytest.raises(DataError, match=r"table to be torch.int32 \[10\], got torch.int32 \[9\]"):
        check(torch.tensor([3]), 10, torch.tensor([1]), table[:9])
