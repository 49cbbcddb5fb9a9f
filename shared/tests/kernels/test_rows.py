import threading

import pytest
import torch

from shared.kernels import rows
from shared.kernels.rows import over_ranges, over_rows


@pytest.mark.parametrize("num_rows", [0, 1, 2, 1001])
def test_every_row_is_handled_once(two_threads, num_rows):
    seen = torch.zeros(num_rows, dtype=torch.int64)

    def visit(start: int, stop: int) -> None:
        seen[start:stop] += 1

    over_rows(visit, num_rows, 1 << 30)
    assert bool((seen == 1).all())


def test_large_work_runs_side_by_side(two_threads):
    meet = threading.Barrier(2, timeout=60)
    over_rows(lambda start, stop: meet.wait(), 10, 1 << 30)
    assert not meet.broken


def test_small_work_stays_on_the_calling_thread(two_threads):
    threads = []
    over_rows(lambda start, stop: threads.append(threading.current_thread()), 10, 1000)
    assert threads == [threading.current_thread()]


def test_an_error_in_any_range_surfaces(two_threads):
    def fail(start: int, stop: int) -> None:
        if start:
            raise ValueError(f"rows from {start}")

    with pytest.raises(ValueError, match="rows from 5"):
        over_ranges(fail, [0, 5, 10])


def test_one_thread_means_one_task():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert rows.num_tasks(1 << 40) == 1
    finally:
        torch.set_num_threads(before)
