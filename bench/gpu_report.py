"""The report of the kernels on one GPU, and the history's lines of its claims.

A kernel with a baseline claims its time against the baseline's; one without claims its bandwidth
against that of a device copy in the same turns. A figure claims its own ratio.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from gpu_clock import Figure, Row
from history import ClaimRun, format_number
from report import header, run_table, table

__all__ = ["benchmark_name", "claim_run", "render_gpu_report"]

_READING = """\
Times are medians and quartiles over interleaved turns, by CUDA events. Bandwidth counts what the
operation must read and write once; the share is of a device copy in the same turns. SpMM and
attention count each edge's row, of which caches serve some. What bounds log-probabilities is
products: they are to be read by their speed against torch."""


def benchmark_name(device: str) -> str:
    """Returns the benchmark's name on a device: "gpu-nvidia-h200"."""
    return f"gpu-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}"


def claim_run(row: Row | Figure, told: dict[str, Any], benchmark: str) -> ClaimRun:
    """Returns what a row claims, as a line of the history.

    Args:
        row: a measured kernel, or a figure.
        told: command, commit, date, machine, versions and the benchmark's revision.
        benchmark: what `benchmark_name` returned.
    """
    common: dict[str, Any] = {
        "package": row.package,
        "benchmark": benchmark,
        "spread": None,
        "correct": row.correct,
        "kind": "measured",
        "aim": row.aim,
        "source": "bench/gpu.py",
        **told,
    }
    if isinstance(row, Figure):
        return ClaimRun(
            name=f"{row.name}, {row.shape}",
            unit=row.unit,
            ours=row.ours,
            baseline=row.baseline,
            baseline_name=row.baseline_name,
            higher_is_better=True,
            ratio=row.ratio,
            detail=row.note,
            **common,
        )
    share = row.bytes_per_s / row.copy_bytes_per_s
    figures: dict[str, Any]
    if row.baseline_s is None:
        figures = {
            "unit": "GB/s",
            "ours": row.bytes_per_s / 1e9,
            "baseline": row.copy_bytes_per_s / 1e9,
            "baseline_name": f"{row.copy_name} in the same turns",
            "higher_is_better": True,
            "ratio": share,
        }
    else:
        figures = {
            "unit": "ms",
            "ours": row.median_s * 1e3,
            "baseline": row.baseline_s * 1e3,
            "baseline_name": row.baseline,
            "higher_is_better": False,
            "ratio": row.baseline_s / row.median_s,
        }
    return ClaimRun(
        name=f"{row.kernel}, {row.shape}",
        **figures,
        detail="; ".join(filter(None, [f"{share:.0%} of {row.copy_name}'s bandwidth", row.note])),
        **common,
    )


def render_gpu_report(
    device: str,
    rows: Iterable[Row | Figure],
    told: dict[str, Any],
    tests: str,
    took_s: float,
    failed: Sequence[str] = (),
) -> str:
    """Writes the Markdown of one device.

    Args:
        device: the device's name.
        rows: the measured kernels, and figures.
        told: command, commit, date, machine, versions and the benchmark's revision.
        tests: the last line of the tests on the device.
        took_s: seconds of the whole run.
        failed: parts of the rows that ended in an error.
    """
    rows = list(rows)
    heads = ("kernel and input", "ms", "GB/s (share of a copy)", "speed against", "correct")
    kernels = [_cells(row) for row in rows if isinstance(row, Row)]
    figures = [_figure_cells(row) for row in rows if isinstance(row, Figure)]
    passed = (
        "Tests on the device (integers equal numba's on 10^7 values at 2, 4 and 8 bits): "
        f"{tests}. {took_s:.0f} s in all."
    )
    parts = [
        f"# Kernels on {device}",
        run_table(header(told, told["versions"])),
        passed,
        _READING,
        table(heads, kernels),
    ]
    if failed:
        parts.append(f"No rows, because they ended in an error: {', '.join(failed)}.")
    if figures:
        parts += [table(("figure and input", "ours", "against", "ratio", "correct"), figures)]
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    low, middle, high = (format_number(s * 1e3) for s in (row.low_s, row.median_s, row.high_s))
    share = row.bytes_per_s / row.copy_bytes_per_s
    against = ""
    if row.baseline_s is not None:
        against = f"{format_number(row.baseline_s / row.median_s)}x {row.baseline}"
    return (
        "; ".join(filter(None, [f"{row.kernel}, {row.shape}", row.note])),
        f"{middle} ({low} to {high})",
        f"{format_number(row.bytes_per_s / 1e9)} ({share:.0%})",
        against,
        "yes" if row.correct else "NO",
    )


def _figure_cells(row: Figure) -> tuple[str, ...]:
    return (
        "; ".join(filter(None, [f"{row.name}, {row.shape}", row.note])),
        f"{format_number(row.ours)} {row.unit}",
        f"{format_number(row.baseline)} {row.unit}, {row.baseline_name}",
        format_number(row.ratio),
        "yes" if row.correct else "NO",
    )
