"""Reads the Chrome traces that torch.profiler exports, one for each rank of a job."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qsync.diagnosis.traces.events import MemorySample, TraceSpan, collect_fields
from shared.errors import DataError
from shared.files import check_not_empty, read_text

__all__ = ["RankTrace", "read_traces"]

_WHAT = "a trace of torch.profiler"
_CUT = "record it again, and let export_chrome_trace return before the process ends"


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank did.

    Attributes:
        path: the file.
        rank, world_size: as the trace tells; None if it does not.
        steps: `TraceSpan` of each step, called by its number.
        lane: operators or kernels in order, none overlapping another; the loader is `LOADER`.
        collectives: in order of their starts.
        enqueued_s: when each collective was enqueued, aligned with `collectives`.
        memory: samples in order, if memory was profiled.
    """

    path: str
    rank: int | None
    world_size: int | None
    steps: tuple[TraceSpan, ...]
    lane: tuple[TraceSpan, ...]
    collectives: tuple[TraceSpan, ...]
    enqueued_s: tuple[float, ...]
    memory: tuple[MemorySample, ...] = ()


def read_traces(paths: Sequence[str | os.PathLike[str]]) -> list[RankTrace]:
    """Reads the traces of all ranks of a job.

    Args:
        paths: one file of each rank, in any order; in the order of ranks if the traces do not tell
            theirs.

    Returns:
        The traces in the order of ranks.

    Raises:
        DataError: a file cannot be read or is cut, a trace has no collectives, a rank is missing
            or there twice, or traces are of jobs of unlike sizes.
    """
    names = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if len(names) < 2:
        raise DataError(
            "traces: expected those of all ranks, at least two files, got "
            f"{', '.join(str(name) for name in names) or 'none'}; export one with torch.profiler on each rank"
        )
    origin_ns: int | None = None
    traces = []
    for path in names:
        trace, origin_ns = _read(os.fspath(path), origin_ns)
        traces.append(trace)
    if all(trace.rank is None for trace in traces):
        return [replace(trace, rank=rank) for rank, trace in enumerate(traces)]
    by_rank: dict[int, RankTrace] = {}
    for trace in traces:
        if trace.rank is None:
            raise DataError(
                f"{trace.path}: expected its rank in distributedInfo, as other traces have it, got "
                "none; record it after init_process_group"
            )
        if trace.rank in by_rank:
            raise DataError(
                f"{trace.path}: expected one trace of each rank, got rank {trace.rank} here and in "
                f"{by_rank[trace.rank].path}; leave one out"
            )
        by_rank[trace.rank] = trace
    sizes = {trace.world_size for trace in traces} - {None}
    if len(sizes) > 1:
        raise DataError(
            f"expected traces of one job, got world sizes {sorted(map(str, sizes))}; name only "
            "files of the same run"
        )
    world_size = max([*by_rank, *(size - 1 for size in sizes if size)]) + 1
    if missing := [rank for rank in range(world_size) if rank not in by_rank]:
        raise DataError(
            f"expected traces of all {world_size} ranks, got ranks {sorted(by_rank)}; add the "
            f"trace of rank {', '.join(map(str, missing))}"
        )
    return [by_rank[rank] for rank in range(world_size)]


def _read(path: str, origin_ns: int | None) -> tuple[RankTrace, int]:
    """Reads a trace; seconds count from `origin_ns`, else from this trace's own base."""
    content = _load(path)
    events = [event for event in content["traceEvents"] if isinstance(event, dict)]
    base_ns = int(content.get("baseTimeNanoseconds", 0))
    # Differences of whole nanoseconds are exact; seconds since 1970 as floats are not.
    origin_ns = base_ns if origin_ns is None else origin_ns
    shift_s = (base_ns - origin_ns) / 1e9
    about = content.get("distributedInfo", {})
    try:
        fields = collect_fields(events, shift_s)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: expected events of torch.profiler, got a malformed one "
            f"({type(error).__name__}: {error}); {_CUT}"
        ) from error
    if not fields["collectives"]:
        raise DataError(
            f"{path}: expected collectives, such as gloo:all_reduce or kernels of NCCL, got none "
            f"among {len(events):,} events; profile whole steps of a job of several ranks"
        )
    trace = RankTrace(
        path=path, rank=about.get("rank"), world_size=about.get("world_size"), **fields
    )
    return trace, origin_ns


def _load(path: str) -> dict[str, Any]:
    check_not_empty(path, _WHAT)
    with open(path, "rb") as file:
        is_zipped = file.read(2) == b"\x1f\x8b"
    try:
        data = gzip.decompress(Path(path).read_bytes()) if is_zipped else read_text(path, _WHAT)
        content = json.loads(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: expected a whole .gz file, got {error}; {_CUT}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: expected a complete trace as JSON, got {error}: the file is cut or no trace; "
            f"{_CUT}"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise DataError(
            f"{path}: expected an object with traceEvents, got {type(content).__name__} without "
            "it; name a file that torch.profiler exported"
        )
    return content
