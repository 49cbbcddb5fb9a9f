import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError, DataError
from shared.kernels.scaled_matmul import (
    DTYPES,
    FP8_MAX,
    ScaledRows,
    quantize_rows,
    reference,
    scaled_matmul,
)

INF = float("inf")


def spread_rows(rows=7, columns=53, seed=0):
    """Rows of magnitudes from 1e-6 to 1e6, one of zeros, with exact halves and tiny elements."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g)
    x *= 10.0 ** torch.randint(-6, 7, (rows, 1), generator=g)
    if rows > 3 and columns > 5:
        x[1] = 0
        x[2, :6] = torch.tensor([127.0, 0.5, 1.5, -2.5, -0.5, 126.5])
        x[2, 6:] = 0
        x[3, 4] *= 1e-7
    return x


def e4m3_values():
    """All finite non-negative e4m3 numbers, from the format's definition."""
    subnormals = [m * 2.0**-9 for m in range(8)]
    normals = [(1 + m / 8) * 2.0**e for e, m in product(range(-6, 9), range(8))]
    return torch.tensor(subnormals + normals[:-1])  # the last pattern is NaN


def code_rows(form, x, dtype, largest=None):
    x = x.to(form.device)
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(len(x), device=x.device)
    if largest is not None:
        largest = largest.to(form.device)
    form.of("scaled_matmul").quantize_rows(x, largest, codes, scale)
    return codes.cpu(), scale.cpu()


def test_int8_codes_are_within_half_a_step_and_reach_127():
    x = spread_rows()
    codes, scale = quantize_rows(x, torch.int8)
    assert scale[1] == 1
    assert not codes[1].any()
    torch.testing.assert_close(scale, (x.abs().amax(1) / 127).masked_fill(x.abs().amax(1) == 0, 1))
    error = (codes.float() * scale[:, None] - x).abs()
    assert bool((error <= scale[:, None] * 0.5000001).all())
    assert codes.abs().amax(1)[[0, 2, 3]].tolist() == [127, 127, 127]
    # Ties go to even.
    assert codes[2, :6].tolist() == [127, 0, 2, -2, 0, 126]


def test_fp8_codes_are_the_nearest_numbers_of_the_format():
    x = spread_rows(columns=200)
    codes, scale = quantize_rows(x, torch.float8_e4m3fn)
    exponents = scale.log2()
    assert torch.equal(exponents, exponents.round())
    fractions = x / scale[:, None]
    tops = fractions.abs().amax(1)
    assert bool((tops <= FP8_MAX).all())
    assert bool(((tops > FP8_MAX / 2) | (tops == 0)).all())
    values = e4m3_values()
    nearest = (fractions.abs().flatten()[:, None] - values).abs().min(1).values
    error = (codes.float() - fractions).abs().flatten()
    torch.testing.assert_close(error, nearest, rtol=0, atol=0)


def test_fp8_ties_go_to_even_and_scales_go_up(form):
    values = e4m3_values()
    middles = (values[:-1] + values[1:]) / 2
    # Numbers follow each other by their last bit, so every second one is even.
    even = torch.where(torch.arange(len(middles)) % 2 == 0, values[:-1], values[1:])
    codes, scale = code_rows(
        form, torch.cat([middles, -middles, values])[None], torch.float8_e4m3fn
    )
    assert scale.item() == 1
    assert torch.equal(codes.float()[0], torch.cat([even, -even, values]))
    top = torch.nextafter(torch.tensor([[FP8_MAX]]), torch.tensor([[INF]]))
    codes, scale = code_rows(form, top, torch.float8_e4m3fn)
    assert (codes.float().item(), scale.item()) == (FP8_MAX / 2, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 53), (5, 1025), (70, 64)])
@pytest.mark.parametrize("is_one_scale", [False, True])
def test_every_form_has_the_references_codes_to_the_bit(form, dtype, rows, columns, is_one_scale):
    x = spread_rows(rows, columns)
    largest = x.abs().amax().expand(rows).contiguous() if is_one_scale else None
    codes, scale = code_rows(form, x, dtype, largest)
    expected, expected_scale = torch.empty_like(codes), torch.empty_like(scale)
    reference.quantize_rows(x, largest, expected, expected_scale)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0)
    assert torch.equal(codes.float(), expected.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_below_normal_numbers_have_the_smallest_normal_scale(form, dtype):
    x = torch.tensor([[1e-44, 0.0, -3e-42], [2.0**-130, 2.0**-126, 0.0]])
    for module in (form.of("scaled_matmul"), reference):
        codes, scale = torch.empty(2, 3, dtype=dtype), torch.empty(2)
        inputs = [each.to(form.device) for each in (x, codes, scale)]
        module.quantize_rows(inputs[0], None, *inputs[1:])
        codes, scale = (each.cpu() for each in inputs[1:])
        assert scale.tolist() == [2.0**-126] * 2
        assert bool(((codes.float() * scale[:, None] - x).abs() <= scale[:, None] / 2).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_becomes_nan_and_no_other(form, dtype):
    x = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [INF, 1.0], [-INF, 0.0], [0.0, 0.0]])
    codes, scale = code_rows(form, x, dtype)
    assert scale.isnan().tolist() == [False, True, True, True, False]
    assert not codes.float()[1:].any()
    rows = ScaledRows(codes, scale)
    product_is_nan = scaled_matmul(rows, rows).isnan()
    assert torch.equal(product_is_nan, scale.isnan()[:, None] | scale.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "b_rows", "columns"), [(1, 1, 1), (17, 3, 53), (65, 66, 130), (2, 129, 64)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_form_multiplies_as_float64_does(form, dtype, rows, b_rows, columns, has_bias):
    a = quantize_rows(spread_rows(rows, columns), dtype)
    b = quantize_rows(spread_rows(b_rows, columns, seed=1), dtype)
    bias = torch.randn(b_rows) if has_bias else None
    wide_a, wide_b = (m.codes.double() * m.scale.double()[:, None] for m in (a, b))
    expected = wide_a @ wide_b.t() + (0 if bias is None else bias.double())
    bound = wide_a.abs() @ wide_b.abs().t() + (0 if bias is None else bias.double().abs())
    inputs = [None if each is None else each.to(form.device) for each in (*a, *b, bias)]
    out = torch.empty(rows, b_rows, device=form.device)
    form.of("scaled_matmul").scaled_matmul(*inputs, out)
    # int8 sums are exact; the CPU rounds a sum of fp8 products to bfloat16.
    relative = 2.0**-22 if dtype == torch.int8 or form.name == "gpu" else 2.0**-8
    assert bool(((out.cpu().double() - expected).abs() <= relative * bound + 1e-30).all())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    rows=st.integers(0, 9),
    columns=st.integers(0, 70),
    b_rows=st.integers(0, 9),
    scales=st.sampled_from(["row", "tensor"]),
)
def test_products_of_any_shape_stay_within_the_rounding_of_their_factors(
    seed, rows, columns, b_rows, scales
):
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(rows, columns, generator=g), torch.randn(b_rows, columns, generator=g)
    a, b = (quantize_rows(each, torch.int8, scales=scales) for each in (x, w))
    if scales == "tensor":
        assert len(set(a.scale.tolist())) <= 1
    out = scaled_matmul(a, b, dtype=torch.float32)
    assert out.shape == (rows, b_rows)
    half_a, half_b = a.scale[:, None] / 2, b.scale / 2
    bound = half_a * w.abs().sum(1) + x.abs().sum(1)[:, None] * half_b + columns * half_a * half_b
    assert bool(((out - x @ w.t()).abs() <= bound * 1.001 + 1e-5).all())


def test_one_scale_serves_strided_and_narrow_inputs():
    x = spread_rows(6, 40)[:, ::2].to(torch.bfloat16)
    codes, scale = quantize_rows(x, torch.int8, scales="tensor")
    assert torch.equal(scale, (x.float().abs().max() / 127).expand(6))
    assert torch.equal(codes, (x.float() / scale[0]).round().to(torch.int8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_one_scale_of_zeros_is_one(dtype, zero):
    codes, scale = quantize_rows(torch.full((3, 5), zero), dtype, scales="tensor")
    assert scale.tolist() == [1.0] * 3
    assert not codes.float().any()


def test_one_scale_may_be_expanded_and_codes_strided(form, monkeypatch):
    if form.name == "gpu":
        monkeypatch.setenv("MESHYARD_KERNELS", "triton")
    x = torch.randint(-127, 128, (34, 5), dtype=torch.int8, device=form.device)
    strided = ScaledRows(x.t(), torch.tensor([0.5], device=form.device).expand(5))
    dense = ScaledRows(x.t().contiguous(), torch.full((5,), 0.5, device=form.device))
    expected = (dense.codes.double() @ dense.codes.double().t() / 4).float()
    torch.testing.assert_close(scaled_matmul(strided, strided), expected, rtol=1e-6, atol=0)


def test_a_type_of_the_result_is_rounded_once():
    a = quantize_rows(torch.randn(5, 30), torch.int8)
    b = quantize_rows(torch.randn(4, 30), torch.int8)
    bias = torch.randn(4)
    wide = scaled_matmul(a, b, bias)
    assert torch.equal(scaled_matmul(a, b, bias, dtype=torch.bfloat16), wide.to(torch.bfloat16))


def test_mistakes_are_named():
    a = quantize_rows(torch.randn(5, 30), torch.int8)
    fp8 = quantize_rows(torch.randn(4, 30), torch.float8_e4m3fn)
    narrow = quantize_rows(torch.randn(4, 29), torch.int8)
    for other in (fp8, narrow):
        with pytest.raises(DataError, match="one type and number of columns"):
            scaled_matmul(a, other)
    with pytest.raises(DataError, match="a bias of 5 elements, got \\[4\\]"):
        scaled_matmul(a, a, torch.zeros(4))
    for short in (a._replace(scale=a.scale[:1]), a._replace(scale=a.scale[0])):
        with pytest.raises(DataError, match=r"a scale of a of 5 elements, got \["):
            scaled_matmul(short, a)
        with pytest.raises(DataError, match=r"a scale of b of 5 elements, got \["):
            scaled_matmul(a, short)
    elsewhere = ScaledRows(*(each.to("meta") for each in a))
    with pytest.raises(DataError, match="one device, got cpu, meta"):
        scaled_matmul(a, elsewhere)
    long = ScaledRows(torch.zeros(1, 140_000, dtype=torch.int8), torch.ones(1))
    with pytest.raises(DataError, match="split the columns"):
        scaled_matmul(long, long)
    with pytest.raises(ConfigError, match=r"torch.int8 or torch.float8_e4m3fn, got torch.uint8"):
        quantize_rows(torch.ones(1, 1), torch.uint8)
    with pytest.raises(ConfigError, match="'row' or 'tensor', got 'column'"):
        quantize_rows(torch.ones(1, 1), torch.int8, scales="column")


_ON_OLD_PROCESSOR = """
import torch
from shared.kernels.scaled_matmul import ScaledRows, scaled_matmul

torch.manual_seed(0)
a, b = (torch.randint(-127, 128, (33, 70), dtype=torch.int8) for _ in range(2))
ones = torch.ones(33)
out = scaled_matmul(ScaledRows(a, ones), ScaledRows(b, ones))
assert torch.equal(out, (a.long() @ b.long().t()).float())
"""


def test_int8_sums_do_not_saturate_on_processors_without_vnni():
    done = subprocess.run(
        [sys.executable, "-c", _ON_OLD_PROCESSOR],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
