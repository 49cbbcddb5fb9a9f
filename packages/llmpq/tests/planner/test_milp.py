"""What HiGHS prints by itself does not reach stdout."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

from llmpq.planner.milp import prints_to_stderr


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
