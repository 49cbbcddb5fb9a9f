"""Units of data, rate and time: factors, parsing and formatting.

Sizes are in bytes, rates in bytes per second and times in seconds throughout the yard; the
factors here turn a written quantity into those (`3 * GiB`, `10 * Gbps`). Links are sold in bits,
memory in bytes, so a `b` after a decimal prefix is a bit and a `B` a byte, and the words that
Linux's `tc` reads (`100mbit`, `1gbit`) are understood as well.
"""

import math
import re

from shared.errors import ConfigError

__all__ = [
    "GB",
    "KB",
    "MB",
    "Gbps",
    "GiB",
    "Kbps",
    "KiB",
    "Mbps",
    "MiB",
    "Tbps",
    "TiB",
    "format_bytes",
    "format_rate",
    "format_s",
    "parse_bytes",
    "parse_rate",
]

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

KB = 1000
MB = 1000 * KB
GB = 1000 * MB

# Bytes per second, so that `num_bytes / (100 * Mbps)` is a time in seconds.
Kbps = 1e3 / 8
Mbps = 1e6 / 8
Gbps = 1e9 / 8
Tbps = 1e12 / 8

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    value = float(match[1]) if match else math.inf
    if match is None or not math.isfinite(value):
        raise ConfigError(
            f"expected {what} such as {example}, got {text!r}; write a number and a unit"
        )
    return value, match[2]


def _factor(prefix: str) -> float | None:
    prefix = prefix.lower()
    return _PREFIX.get(prefix, _BINARY.get(prefix))


def parse_bytes(text: str | float) -> int:
    """Reads a size: `"512"`, `"64KiB"`, `"1.5 GB"`, `"2G"` (decimal without the i).

    Args:
        text: a number of bytes, or a number followed by a unit.

    Returns:
        The size in bytes, rounded to the nearest whole byte.

    Raises:
        ConfigError: when the text is no size, is negative or not finite, or names bits.
    """
    example = "'64KiB' or '1.5GB'"
    if isinstance(text, int | float):
        return round(_checked(float(text), "a size in bytes", example))
    value, unit = _split(text, "a size", example)
    factor = _factor(unit.removesuffix("B"))
    if factor is None:
        raise ConfigError(
            f"expected a size such as {example}, got {text!r}: unit {unit!r} is none of "
            "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB; use one of these"
        )
    return round(value * factor)


def parse_rate(text: str | float) -> float:
    """Reads a rate: `"100mbit"`, `"1Gbps"`, `"10Gbit/s"`, `"25GB/s"`, `"8GiB/s"`.

    A lower-case `b`, `bit`, `bps` or `bit/s` counts bits; an upper-case `B/s` or `Bps` counts
    bytes. A number without a unit is bytes per second already.

    Args:
        text: a number of bytes per second, or a number followed by a unit.

    Returns:
        The rate in bytes per second.

    Raises:
        ConfigError: when the text is no rate, or is not positive and finite.
    """
    example = "'100mbit', '10Gbps' or '25GB/s'"
    if isinstance(text, int | float):
        rate = _checked(float(text), "a rate in bytes per second", example)
    else:
        value, unit = _split(text, "a rate", example)
        rate = value * _rate_factor(unit, text, example)
    if rate == 0:
        raise ConfigError(f"expected a rate above zero, got {text!r}; write for example {example}")
    return rate


def _rate_factor(unit: str, text: str, example: str) -> float:
    if not unit:
        return 1.0
    for ending, per_byte in (
        ("bit/s", 8.0),
        ("bits/s", 8.0),
        ("bit", 8.0),
        ("bps", 8.0),
        ("b/s", 8.0),
        ("Bps", 1.0),
        ("B/s", 1.0),
    ):
        factor = _factor(unit.removesuffix(ending)) if unit.endswith(ending) else None
        if factor is not None:
            return factor / per_byte
    raise ConfigError(
        f"expected a rate such as {example}, got {text!r}: unit {unit!r} is none of "
        "bit, bit/s, bps (bits) or B/s, Bps (bytes) with K, M, G, T; use one of these"
    )


def _checked(value: float, what: str, example: str) -> float:
    if not math.isfinite(value) or value < 0:
        raise ConfigError(
            f"expected {what}, zero or more and finite, got {value!r}; write for example {example}"
        )
    return value


def _three_digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(decimals, 2)}f}"


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for factor, unit in steps:
        # 999.5 of one unit would print as 1000 of it: that is 1 of the next.
        if abs(value) >= factor * 0.9995:
            return f"{_three_digits(value / factor)} {unit}"
    factor, unit = steps[-1]
    return f"{_three_digits(value / factor)} {unit}"


def format_bytes(num_bytes: float) -> str:
    """Writes a size with three digits: `1536` gives `"1.50 KiB"`.

    Args:
        num_bytes: size in bytes; may be negative (a difference).
    """
    if abs(num_bytes) < KiB:
        return f"{num_bytes:.0f} B"
    return _scaled(num_bytes, ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")))


def format_s(time_s: float) -> str:
    """Writes a time with three digits and a fitting unit: `0.00123` gives `"1.23 ms"`.

    Args:
        time_s: time in seconds; may be negative (a difference).
    """
    if time_s == 0:
        return "0 s"
    if 120 <= abs(time_s) < math.inf:
        minutes, seconds = divmod(round(abs(time_s)), 60)
        return f"{'-' if time_s < 0 else ''}{minutes} min {seconds:02d} s"
    return _scaled(time_s, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def format_rate(bytes_per_s: float) -> str:
    """Writes a link's rate in bits: `12.5e6` bytes per second give `"100 Mbit/s"`.

    Args:
        bytes_per_s: rate in bytes per second.
    """
    steps = ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "Kbit/s"), (1.0, "bit/s"))
    return _scaled(bytes_per_s * 8, steps)
