import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import units
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512 B", 512),
        ("64KiB", 64 * 1024),
        ("64kiB", 64 * 1024),
        ("1.5 GB", 1_500_000_000),
        ("2G", 2_000_000_000),
        ("1e3 MiB", 1000 * 2**20),
        (" 3TiB ", 3 * 2**40),
        (4096, 4096),
        (10.4, 10),
    ],
)
def test_sizes_read_as_written(text, num_bytes):
    assert units.parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("100mbit", 12.5e6),
        ("1gbit", 125e6),
        ("10Gbps", 1.25e9),
        ("10 Gbit/s", 1.25e9),
        ("8bps", 1.0),
        ("25GB/s", 25e9),
        ("25GBps", 25e9),
        ("8GiB/s", 8 * 2**30),
        ("125e6", 125e6),
        (5, 5.0),
    ],
)
def test_rates_tell_bits_from_bytes(text, bytes_per_s):
    assert units.parse_rate(text) == pytest.approx(bytes_per_s, rel=1e-12)


@pytest.mark.parametrize("text", ["", "fast", "-3KB", "3XB", "3 Kbit", "1e999", math.nan, -1.0])
def test_no_size_is_refused_with_a_way_out(text):
    with pytest.raises(ConfigError, match="KiB"):
        units.parse_bytes(text)


@pytest.mark.parametrize("text", ["", "0mbit", 0, math.inf, "10XB/s", "10mb", "-5Gbps"])
def test_no_rate_is_refused_with_a_way_out(text):
    with pytest.raises(ConfigError, match="100mbit"):
        units.parse_rate(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (-2048, "-2.00 KiB"),
        (150 * 2**30, "150 GiB"),
    ],
)
def test_sizes_print_with_three_digits(num_bytes, text):
    assert units.format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0, "0 s"),
        (1.23e-3, "1.23 ms"),
        (0.99996, "1.00 s"),
        (59.99, "60.0 s"),
        (120, "2 min 00 s"),
        (-3725, "-62 min 05 s"),
        (math.inf, "inf s"),
        (42e-9, "42.0 ns"),
    ],
)
def test_times_print_with_a_fitting_unit(time_s, text):
    assert units.format_s(time_s) == text


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [(12.5e6, "100 Mbit/s"), (125e6, "1.00 Gbit/s"), (0.125, "1.00 bit/s"), (0, "0 bit/s")],
)
def test_rates_print_in_bits(bytes_per_s, text):
    assert units.format_rate(bytes_per_s) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_printed_size_reads_back_within_half_a_percent(num_bytes):
    assert units.parse_bytes(units.format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=5e-3)


@given(st.floats(min_value=1.0, max_value=1e15))
def test_printed_rate_reads_back_within_half_a_percent(bytes_per_s):
    assert units.parse_rate(units.format_rate(bytes_per_s)) == pytest.approx(bytes_per_s, rel=5e-3)


def test_link_factors_turn_bytes_into_seconds():
    assert 12_500_000 / (100 * units.Mbps) == 1.0
    assert units.GiB == 2**30
