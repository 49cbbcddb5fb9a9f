"""Words before a rank's command that make it an older or slower machine, for tests and benchmarks.

Unlike ranks on one machine: a cap on the instruction set that libraries use, a core of its own, or a
share of a core. All words end in running the command itself, as `RankPool(prefix=...)` and
`NetLab.pool(handicaps=...)` need.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shared.errors import ConfigError

__all__ = ["ISAS", "HandicapUnavailable", "handicap", "read_words"]

# numba keeps the host's features under another processor's name, unless features are named too.
ISAS = {
    "AVX2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+sse4.1,+sse4.2,+popcnt",
    },
    "AVX512": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "NUMBA_CPU_NAME": "skylake-avx512",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+sse4.1,+sse4.2,+popcnt,"
        "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl",
    },
}
"""Variables by which oneDNN, ATen, MKL and numba use no newer instructions, by their name."""

_PERIOD_US = 10_000
_GROUP = "meshyard-share-"
_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"))
# $1 is the group's folder, $2 and $3 the file and text of its quota, $4 the file to enter it by.
_IN_GROUP = (
    'd="$1$$"; f="$2"; q="$3"; p="$4"; shift 4; mkdir "$d" && { [ -z "$p" ] || '
    'echo "$p" > "$d/cpu.cfs_period_us"; } && echo "$q" > "$d/$f" && '
    'echo $$ > "$d/cgroup.procs" && exec "$@"'
)


class HandicapUnavailable(ConfigError):
    """This machine or user cannot slow a process down in the way that was asked for."""


def handicap(
    *, isa: str | None = None, cores: Sequence[int] | None = None, share: float | None = None
) -> list[str]:
    """Words before a command.

    Args:
        isa: newest instruction set that libraries may use, a key of `ISAS`; all by default.
        cores: processors that the command may run on; all by default.
        share: share of one core's time that it may take, in (0, 1]; measured over 10 ms.

    Returns:
        The words, none where nothing is asked for.

    Raises:
        ConfigError: the instruction set or the share is none, or a core is not there.
        HandicapUnavailable: a share needs root and the cgroup controller "cpu".
    """
    words: list[str] = []
    if isa is not None:
        if isa not in ISAS:
            raise ConfigError(f"isa: expected one of {', '.join(ISAS)}, got {isa!r}")
        # ATen would run instructions that the processor lacks; without them there is nothing to cap.
        if isa != "AVX512" or "avx512f" in _read_processor():
            words += ["env", *(f"{key}={value}" for key, value in ISAS[isa].items())]
    if cores is not None:
        there = os.sched_getaffinity(0)
        if not cores or not set(cores) <= there:
            raise ConfigError(f"cores: expected some of {sorted(there)}, got {list(cores)}")
        words += ["taskset", "-c", ",".join(map(str, cores))]
    if share is not None:
        if not 0 < share <= 1:
            raise ConfigError(f"share: expected a number in (0, 1], got {share}")
        words += _in_group(share)
    return words


def _read_processor() -> list[str]:
    """Words of the kernel's description of the processors."""
    return Path("/proc/cpuinfo").read_text(encoding="utf-8").split()


def read_words(words: Sequence[str]) -> tuple[dict[str, str], set[int]] | None:
    """Environment and processors that words set (none: all processors); None if they do more.

    Args:
        words: "env KEY=VALUE ..." and "taskset -c CORES", in this order, either or both or neither.
    """
    rest, env, cores = list(words), {}, set()
    if rest[:1] == ["env"]:
        del rest[0]
        while rest and "=" in rest[0]:
            key, _, value = rest.pop(0).partition("=")
            env[key] = value
    if rest[:2] == ["taskset", "-c"]:
        cores = {int(core) for core in rest[2].split(",")}
        del rest[:3]
    return None if rest else (env, cores)


def _in_group(share: float) -> list[str]:
    quota = max(1000, round(share * _PERIOD_US))
    root = next((root for root in _ROOTS if _controls_time(root)), None)
    if os.geteuid() != 0 or root is None or not os.access(root, os.W_OK):
        raise HandicapUnavailable(
            "a share of a core needs root and the cgroup controller 'cpu'; expected a writable "
            f"{' or '.join(map(str, _ROOTS))} with it; leave `share` out, or run as root"
        )
    for old in root.glob(f"{_GROUP}*"):
        with suppress(OSError):  # a process is still in it
            old.rmdir()
    if (root / "cgroup.controllers").exists():
        setting = ["cpu.max", f"{quota} {_PERIOD_US}", ""]
    else:
        setting = ["cpu.cfs_quota_us", str(quota), str(_PERIOD_US)]
    return ["sh", "-c", _IN_GROUP, "sh", f"{root}/{_GROUP}", *setting]


def _controls_time(root: Path) -> bool:
    try:
        return "cpu" in (root / "cgroup.controllers").read_text().split()
    except OSError:
        return (root / "cpu.cfs_quota_us").exists()
