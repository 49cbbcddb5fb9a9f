"""Split the rows of a CPU kernel over threads.

The kernels are serial and release the interpreter lock; the pool is ours because numba's own
collapses when another process wants the cores. `torch.set_num_threads` says how many to use.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import torch

__all__ = ["over_ranges", "over_rows"]

# Handing a task over costs some 20 microseconds: a thread must get several times that to do.
BYTES_PER_TASK = 1 << 20


def num_tasks(num_bytes: int) -> int:
    """How many threads work that touches `num_bytes` is worth."""
    return max(1, min(torch.get_num_threads(), num_bytes // BYTES_PER_TASK))


def over_rows(kernel: Callable[[int, int], None], num_rows: int, num_bytes: int) -> None:
    """Run `kernel(start, stop)` over [0, num_rows), cut evenly.

    Args:
        kernel: Handles one range of rows and touches no other.
        num_rows: How many rows there are.
        num_bytes: Memory that all rows together read and write.
    """
    tasks = num_tasks(num_bytes)
    over_ranges(kernel, [num_rows * i // tasks for i in range(tasks + 1)])


def over_ranges(kernel: Callable[[int, int], None], bounds: list[int]) -> None:
    """Run `kernel(bounds[i], bounds[i + 1])` for every i, side by side; an error surfaces."""
    ranges = list(pairwise(bounds))
    if len(ranges) == 1:
        kernel(*ranges[0])
        return
    pool = _pool(os.getpid(), torch.get_num_threads())
    pending = [pool.submit(kernel, start, stop) for start, stop in ranges[1:]]
    kernel(*ranges[0])
    for task in pending:
        task.result()


# Keyed by process: a forked child inherits the object but not its threads.
@lru_cache(maxsize=2)
def _pool(pid: int, num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix=f"kernels-{pid}")
