"""Times of kernels on one device, in turns with a device copy and a baseline."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured kernel.

    `shape` is the input's, the same in every run; what a run found goes into `note`. `bytes_moved` is what the operation must read and write once; `baseline_s` the time of
    `baseline` on the same input, None where there is none; `package` whose claim it is, `aim` the ratio aimed at, and `copy_name` what is copied beside it.
    """

    kernel: str
    shape: str
    median_s: float
    low_s: float
    high_s: float
    bytes_moved: int
    copy_bytes_per_s: float
    correct: bool
    baseline: str = ""
    baseline_s: float | None = None
    note: str = ""
    package: str = "shared"
    aim: float | None = None
    copy_name: str = "a device copy"

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth, of the bytes that must move."""
        return self.bytes_moved / self.median_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Two numbers that are no times of a kernel: what was predicted beside what came, say.

    `ratio` is what is claimed, the larger the better; None, as `ours`, where there is none.
    """

    name: str
    shape: str
    unit: str
    ours: float | None
    baseline: float
    baseline_name: str
    ratio: float | None
    correct: bool
    note: str = ""
    package: str = "shared"
    aim: float | None = None


def timed(
    functions: dict[str, Callable[[], object]], turns: int, warm_turns: int = 2
) -> dict[str, list[float]]:
    """Seconds of each function [turns], run in turns; by CUDA events where there is a device."""
    import torch

    on_gpu = torch.cuda.is_available()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(turns + warm_turns):
        for name, function in functions.items():
            if on_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # Behind this the launch is queued before the device gets to it: without, a short
                # kernel is timed together with Python.
                torch.cuda._sleep(1_000_000)
                start.record()
                function()
                end.record()
                torch.cuda.synchronize()
                took = start.elapsed_time(end) / 1e3
            else:
                began = time.perf_counter()
                function()
                took = time.perf_counter() - began
            if turn >= warm_turns:  # the first turns compile and warm up
                seconds[name].append(took)
    return seconds


def measure(
    kernel: str,
    shape: str,
    ours: Callable[[], object],
    *,
    bytes_moved: int,
    copy: tuple[Callable[[], object], int],
    correct: bool,
    turns: int,
    baseline: tuple[str, Callable[[], object]] | None = None,
    note: str = "",
    package: str = "shared",
    aim: float | None = None,
    copy_name: str = "a device copy",
    warm_turns: int = 2,
) -> Row:
    """Times `ours` in turns with a device copy and a baseline."""
    functions = {"ours": ours, "copy": copy[0]}
    if baseline:
        functions["baseline"] = baseline[1]
    times = timed(functions, turns, warm_turns)
    low, _, high = statistics.quantiles(times["ours"], n=4)
    row = Row(
        kernel=kernel,
        shape=shape,
        median_s=statistics.median(times["ours"]),
        low_s=low,
        high_s=high,
        bytes_moved=bytes_moved,
        copy_bytes_per_s=copy[1] / statistics.median(times["copy"]),
        correct=correct,
        baseline=baseline[0] if baseline else "",
        baseline_s=statistics.median(times["baseline"]) if baseline else None,
        note=note,
        package=package,
        aim=aim,
        copy_name=copy_name,
    )
    print(line(row), flush=True)
    return row


def line(row: Row) -> str:
    """What a run prints of a kernel as soon as it is measured."""
    against = (
        "" if row.baseline_s is None else f", {row.baseline_s / row.median_s:.2f}x {row.baseline}"
    )
    return (
        f"{row.kernel}, {row.shape}: {row.median_s * 1e3:.3f} ms, {row.bytes_per_s / 1e9:.0f} GB/s"
        f"{against}{'' if row.correct else ', NOT CORRECT'}"
    )
