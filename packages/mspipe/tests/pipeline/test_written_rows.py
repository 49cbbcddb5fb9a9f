"""Claims tell who writes a row last and where; the ring holds the last iterations' rows and no more."""

import torch

from mspipe.pipeline.written_rows import WrittenRows


def test_the_last_claim_owns_a_node():
    written = WrittenRows(6)
    assert written.claim(torch.tensor([4, 1]), 0).tolist() == [-1, -1]
    assert written.claim(torch.tensor([5, 3, 4]), 1).tolist() == [-1, -1, 0]
    owners, places = written.find_owners(torch.tensor([0, 1, 3, 4]))
    assert owners.tolist() == [-1, 0, 1, 1]
    assert places[1:].tolist() == [1, 1, 2]


def test_the_ring_keeps_as_many_iterations_as_it_is_deep():
    written = WrittenRows(6)
    rows = [torch.full((size, 5), float(size)) for size in (1, 2, 3, 4)]
    # Bytes of all that is kept: float32 words of at most three iterations.
    held = [written.keep(index, rows[index], 3) for index in range(4)]
    assert held == [20, 20 * (1 + 2), 20 * (1 + 2 + 3), 20 * (2 + 3 + 4)]
    assert written.get(0) is None
    assert written.get(1) is rows[1]
    assert written.get(9) is None
    assert written.keep(4, rows[0], 1) == 20
    assert written.get(3) is None
    written.clear()
    assert written.get(4) is None
