"""What must hold for any rows: bounds, unbiasedness, the variance that planners predict."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels.quantize import BITS, dequantize, quantize, reference
from shared.kernels.quantize import cpu as cpu_form

WIRE = [torch.float32, torch.bfloat16]


@st.composite
def rows(draw) -> torch.Tensor:
    num_rows, dim = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    extreme = draw(st.sampled_from([2.0**-126, 2.0**-10, 1.0, 10_000.0, 2.0**126]))
    flat = draw(
        st.lists(
            st.floats(-extreme, extreme, width=32), min_size=num_rows * dim, max_size=num_rows * dim
        )
    )
    shift = draw(st.sampled_from([0.0, 1.0, -100.0]))
    return torch.tensor(flat, dtype=torch.float32).view(num_rows, dim) + shift


keys = st.integers(0, 2**64 - 1)


@given(rows(), st.sampled_from(BITS), keys, st.sampled_from(WIRE), st.booleans())
def test_the_cpu_form_is_the_reference(x, bits, key, wire, stochastic):
    results = []
    for form in (reference, cpu_form):
        data = torch.empty(len(x), -(-x.shape[1] * bits // 8), dtype=torch.uint8)
        params = torch.empty(len(x), 2, dtype=wire)
        form.quantize(x, bits, key, None, stochastic, data, params)
        results.append((data, params.view(torch.int16)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@given(rows(), st.sampled_from(BITS), keys, st.sampled_from(WIRE))
def test_codes_stay_on_the_grid_and_errors_below_a_step(x, bits, key, wire):
    levels = 2**bits - 1
    for rounding, steps in (("stochastic", 1.0), ("nearest", 0.5)):
        packed = quantize(x, bits, key=key, rounding=rounding, wire_dtype=wire)
        zero, scale = packed.params.double().unbind(1)
        finite = packed.params.isfinite().all(1)
        assert bool((zero <= x.double().amin(1))[finite].all())
        grain = 2**-22 * (zero.abs() + scale * levels)  # of float32 at this size
        assert bool((zero + scale * levels + grain >= x.double().amax(1))[finite].all())
        ones = torch.tensor([[0.0, 1.0]]).expand(len(x), 2)
        codes = dequantize(packed.data, ones, bits, x.shape[1])
        assert float(codes.max()) <= levels
        error = (dequantize(*packed).double() - x.double()).abs()
        # Beside the step: the 16th fractional bit.
        allowed = scale * (steps + 2**-15) + grain
        assert bool((error <= allowed[:, None])[finite].all())


@settings(max_examples=30)
@given(rows(), keys, st.randoms(use_true_random=False))
def test_permuting_the_index_permutes_the_result(x, key, random):
    order = list(range(len(x))) * 2
    random.shuffle(order)
    index = torch.tensor(order)
    whole, some = quantize(x, 4, key=key), quantize(x, 4, key=key, index=index)
    assert torch.equal(some.data, whole.data[index])
    assert torch.equal(some.params.view(torch.int32), whole.params.view(torch.int32)[index])


@pytest.mark.parametrize("wire", WIRE)
@pytest.mark.parametrize("bits", BITS)
def test_stochastic_rounding_is_unbiased_with_the_predicted_variance(bits, wire):
    draws, dim = 20_000, 64
    row = torch.randn(dim, generator=torch.Generator().manual_seed(bits))
    # The same row 20,000 times: each copy has a number, and so a noise, of its own.
    packed = quantize(row.expand(draws, dim), bits, key=77, wire_dtype=wire)
    zero, scale = packed.params[0].double()
    values = dequantize(*packed).double()
    fraction = ((row.double() - zero) / scale) % 1.0
    variance = scale**2 * fraction * (1 - fraction)

    error = values.mean(0) - row.double()
    # Five standard errors, and the grain of 16-bit noise and of float32.
    allowed = 5 * (variance / draws).sqrt() + scale * 2**-15 + 1e-6
    assert bool((error.abs() <= allowed).all())
    # A bias common to all columns would show in their mean long before it does in one of them.
    assert abs(float(error.mean())) <= 5 * float(variance.sum() / draws) ** 0.5 / dim + 1e-6

    measured = ((values - row.double()) ** 2).sum(1).mean()
    assert float(measured / variance.sum()) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_variance_on_spread_rows_follows_the_planners_formula(bits):
    # (D - 2) S^2 / 6: the two extremes of a row are exact, every other column costs S^2 / 6.
    x = torch.randn(4000, 128, generator=torch.Generator().manual_seed(9))
    packed = quantize(x, bits, key=5)
    measured = ((dequantize(*packed) - x).double() ** 2).sum(1)
    predicted = 126 * packed.params[:, 1].double() ** 2 / 6
    ratio = float(measured.sum() / predicted.sum())
    # At 2 bits a normal row's fractions are not uniform; the formula is an approximation there.
    assert ratio == pytest.approx(1.0, abs=0.1 if bits == 2 else 0.02)


def test_rounding_parameters_first_keeps_bfloat16_unbiased():
    # Rounding zero point and scale after quantising shifts every value of a row the same way.
    x = torch.randn(3000, 128, generator=torch.Generator().manual_seed(10)) + 7
    packed = quantize(x, 8, key=6, wire_dtype=torch.bfloat16)
    error = (dequantize(*packed) - x).double()
    step = float(packed.params[:, 1].double().mean())
    assert abs(float(error.mean())) < 5 * step / (6 * x.numel()) ** 0.5
    exact = quantize(x, 8, key=6)
    late = dequantize(exact.data, exact.params.bfloat16(), 8, 128)
    per_row = (late - x).double().mean(1).abs().mean()
    assert float(error.mean(1).abs().mean()) < float(per_row) / 2
