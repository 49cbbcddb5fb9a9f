"""What HiGHS prints by itself does not reach stdout."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from llmpq.planner.milp import prints_to_stderr, solve_counts, solve_layers
from llmpq.planner.problem import Problem


def print_in_c(number):
    with prints_to_stderr():
        ctypes.CDLL(None).puts(b"from C %d" % number)


def test_what_c_prints_goes_to_stderr_until_the_last_solver_is_done(capfd):
    os.write(1, b"before\n")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(print_in_c, range(40)))
    os.write(1, b"after\n")
    found = capfd.readouterr()
    assert found.out == "before\nafter\n"
    assert sorted(found.err.split("\n"))[1:] == sorted(f"from C {n}" for n in range(40))


def six_layers(memory, ends_bytes):
    """Layers of a byte on devices of which the first is the fastest."""
    seconds = np.broadcast_to(np.array([1.0, 9.0])[: len(memory), None], (6, len(memory), 1))
    return Problem(
        seconds, seconds / 10, np.ones((6, 1)), np.zeros(6), np.array(memory), np.zeros((6, 1)),
        1, 1, 4, ends_bytes=ends_bytes,
    )  # fmt: skip


@pytest.mark.parametrize(("ends_bytes", "num_first"), [(0.0, 5), (2.0, 3), (5.0, 0)])
def test_the_first_stage_holds_embedding_and_head_beside_its_layers(ends_bytes, num_first):
    held = solve_layers(six_layers([5.0, 11.0], ends_bytes)).held
    assert held is not None
    assert np.rint(held.sum(axis=(0, 2))).tolist() == [num_first, 6 - num_first]


@pytest.mark.parametrize("solve", [solve_counts, solve_layers])
@pytest.mark.parametrize("is_relaxed", [True, False])
def test_what_embedding_and_head_leave_no_room_for_is_infeasible(solve, is_relaxed):
    assert np.isfinite(solve(six_layers([7.0], 1.0), relaxed=is_relaxed).lower_bound)
    assert np.isinf(solve(six_layers([7.0], 2.0), relaxed=is_relaxed).lower_bound)
