"""Products against float64 autograd over the factors that the precision leaves."""

from itertools import product

import pytest
import torch
from torch.nn import functional

import qsync
from qsync.runtime.functions import ConvolutionGeometry
from qsync.runtime.products import convolve, embed, matmul
from qsync.runtime.quantizers import round_rows
from shared.errors import ConfigError, DataError

LOW = ["fp8", "int8", "bf16", "fp16"]
# Half a unit of bf16's or fp16's last place, as a share of a result.
ROUNDING = {"fp8": 2**-8, "int8": 2**-8, "bf16": 2**-8, "fp16": 2**-11}


def _draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _round(factor, precision):
    """A factor as the definition rounds it, in float64."""
    return round_rows(factor.flatten(1), precision).view(factor.shape).double()


def _assert_near(measured, expected, precision, times=4.0):
    """Errors are within some roundings of the largest element."""
    assert measured.dtype == torch.float32
    limit = times * ROUNDING[precision] * float(expected.abs().max())
    assert float((measured.double() - expected).abs().max()) <= limit


def _differentiate(function, tensors, direction):
    leaves = [each.detach().clone().requires_grad_() for each in tensors]
    out = function(*leaves)
    out.backward(direction.to(out.dtype))
    return out.detach(), [each.grad for each in leaves]


def _compare(low, exact, tensors, rounded, precision):
    """Compares outputs and gradients with those of float64 at the rounded factors."""
    direction = _draw(*exact(*[each.double() for each in tensors]).shape, seed=9)
    out, grads = _differentiate(low, tensors, direction)
    expected, expected_grads = _differentiate(exact, rounded, direction)
    _assert_near(out, expected, precision)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        _assert_near(grad, expected_grad, precision)
    if len(grads) == 3:  # that of a bias is summed in float32
        torch.testing.assert_close(grads[2].double(), expected_grads[2], rtol=1e-5, atol=1e-5)
    return out, expected


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("batch", [(), (7,), (2, 3), (0,)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_float64_at_rounded_factors(precision, batch, has_bias):
    x, weight, bias = _draw(*batch, 33), _draw(5, 33, seed=1), _draw(5, seed=2)
    tensors = [x, weight, bias] if has_bias else [x, weight]
    rows = _round(x.reshape(-1, 33), precision).view(x.shape)
    rounded = [rows, _round(weight, precision), bias.double()][: len(tensors)]
    low = lambda *each: qsync.linear(*each, precision=precision)
    if 0 in batch:
        assert low(*tensors).shape == (0, 5)
        return
    out, expected = _compare(low, functional.linear, tensors, rounded, precision)
    if precision == "int8":
        # Sums of codes are exact.
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_linear_of_the_highest_precision_is_torchs():
    x, weight, bias = _draw(4, 8), _draw(3, 8), _draw(3)
    assert torch.equal(
        qsync.linear(x, weight, bias, precision="fp32"), functional.linear(x, weight, bias)
    )


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_one_scale_a_tensor_rounds_as_fake_quantize(precision):
    x, weight = _draw(6, 40), _draw(5, 40, seed=1) * torch.logspace(-2, 1, 5)[:, None]
    out = qsync.linear(x, weight, precision=precision, scales="tensor")
    factors = [qsync.fake_quantize(each, precision, rounding="nearest") for each in (x, weight)]
    expected = functional.linear(*[each.double() for each in factors])
    _assert_near(out, expected, precision)
    exact = functional.linear(x.double(), weight.double())
    by_rows = qsync.linear(x, weight, precision=precision)
    if precision == "int8":
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        assert (by_rows - exact)[:, 0].norm() < 0.2 * (out - exact)[:, 0].norm()


@pytest.mark.parametrize(
    ("precision", "bytes_an_element"), [("int8", 1), ("fp8", 1), ("bf16", 2), ("fp16", 2)]
)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_product_saves_codes_of_the_factors_that_it_needs(precision, bytes_an_element, is_frozen):
    x, weight = _draw(64, 128).requires_grad_(), _draw(32, 128).requires_grad_(not is_frozen)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda each: each):
        qsync.linear(x, weight, precision=precision)
    factors = [weight] if is_frozen else [x, weight]
    scales = 4 * sum(len(each) for each in factors) if bytes_an_element == 1 else 0
    expected = bytes_an_element * sum(each.numel() for each in factors) + scales
    assert sum(each.nbytes for each in saved) == expected


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(
    ("shape", "weight", "geometry"),
    [
        ((2, 3, 9), (4, 3, 3), ((1,), (1,), (1,), 1)),
        ((2, 4, 7, 8), (6, 4, 3, 2), ((2, 1), (1, 0), (1, 2), 1)),
        ((2, 4, 6, 6), (4, 2, 3, 3), ((1, 1), (1, 1), (1, 1), 2)),
        ((1, 2, 4, 4, 5), (3, 2, 2, 2, 2), ((1, 2, 1), (0, 1, 1), (1, 1, 1), 1)),
    ],
)
def test_convolution_is_float64_at_rounded_factors(precision, shape, weight, geometry):
    geometry = ConvolutionGeometry(*geometry)
    exact = (functional.conv1d, functional.conv2d, functional.conv3d)[len(shape) - 3]
    tensors = [_draw(*shape), _draw(*weight, seed=1), _draw(weight[0], seed=2)]
    rounded = [_round(tensors[0], precision), _round(tensors[1], precision), tensors[2].double()]
    _compare(
        lambda x, weight, bias: convolve(x, weight, bias, geometry, precision=precision),
        lambda *each: exact(*each, *geometry),
        tensors,
        rounded,
        precision,
    )


@pytest.mark.parametrize("asked", [(True, False), (False, True)])
def test_convolution_gives_the_gradients_that_are_asked_for(asked):
    geometry = ConvolutionGeometry((1, 1), (1, 1), (1, 1), 1)
    x, weight = _draw(2, 3, 5, 5), _draw(4, 3, 3, 3)
    both = [each.clone().requires_grad_() for each in (x, weight)]
    some = [
        each.clone().requires_grad_(is_asked)
        for each, is_asked in zip((x, weight), asked, strict=True)
    ]
    for first, second in (both, some):
        convolve(first, second, None, geometry, precision="int8").square().sum().backward()
    for full, part, is_asked in zip(both, some, asked, strict=True):
        assert (part.grad is not None) == is_asked
        if is_asked:
            assert torch.equal(part.grad, full.grad)


@pytest.mark.parametrize("precision", LOW)
def test_embedding_reads_rounded_rows_and_adds_gradients_in_float32(precision):
    table = _draw(10, 6).requires_grad_()
    indices = torch.tensor([[1, 1, 3], [0, 9, 1]])
    out = embed(indices, table, 0, False, precision=precision)
    assert torch.equal(out, _round(table.detach(), precision).float()[indices])
    direction = _draw(2, 3, 6, seed=4)
    out.backward(direction)
    expected = torch.zeros(10, 6)
    expected.index_add_(0, indices.flatten(), direction.flatten(0, 1))
    expected[0] = 0  # the padding
    torch.testing.assert_close(table.grad, expected)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(
    ("a", "b"), [((5, 16), (16, 4)), ((2, 3, 5, 16), (2, 3, 16, 4)), ((3, 1, 5, 8), (2, 8, 4))]
)
def test_matmul_is_float64_at_rounded_factors(precision, a, b):
    left, right = _draw(*a), _draw(*b, seed=1)
    columns = right.transpose(-1, -2)
    rounded = [
        _round(left.reshape(-1, a[-1]), precision).view(left.shape),
        _round(columns.reshape(-1, a[-1]), precision).view(columns.shape).transpose(-1, -2),
    ]
    _compare(
        lambda *each: matmul(*each, precision=precision),
        torch.matmul,
        [left, right],
        rounded,
        precision,
    )


def _convolve(groups):
    geometry = ConvolutionGeometry((1,), (1,), (1,), groups)
    return (
        lambda x, weight, precision: convolve(x, weight, None, geometry, precision=precision),
        lambda x, weight: functional.conv1d(x, weight, None, *geometry),
    )


KINDS = {
    "linear": ((4, 6), (5, 6), qsync.linear, functional.linear),
    "convolution": ((2, 4, 5), (6, 4, 3), *_convolve(1)),
    "groups": ((2, 4, 5), (6, 2, 3), *_convolve(2)),
    "product": ((3, 4), (4, 5), matmul, torch.matmul),
    "batched product": ((2, 3, 4), (2, 4, 5), matmul, torch.matmul),
}


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_never_becomes_finite(kind, precision):
    x, weight, low, exact = KINDS[kind]
    shapes = [x, weight, exact(_draw(*x), _draw(*weight)).shape]
    for place, bad in product(range(3), (torch.nan, torch.inf, -torch.inf)):
        *factors, direction = (_draw(*shape, seed=seed) for seed, shape in enumerate(shapes))
        (*factors, direction)[place].view(-1)[3] = bad
        lowered = lambda *each: low(*each, precision=precision)
        out, grads = _differentiate(lowered, factors, direction)
        expected, expected_grads = _differentiate(exact, factors, direction)
        for ours, theirs in zip([out, *grads], [expected, *expected_grads], strict=True):
            assert not ours[~theirs.isfinite()].isfinite().any()
        assert place == 2 or not expected.isfinite().all()


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_an_infinity_makes_its_row_nan_and_zeros_stay(precision):
    x = torch.zeros(3, 8)
    x[1, 2] = torch.inf
    out = qsync.linear(x, _draw(4, 8), precision=precision)
    assert out[1].isnan().all()
    assert not out[[0, 2]].any()


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("kind", KINDS)
def test_an_autocast_around_a_product_changes_nothing(kind, precision):
    x, weight, low, exact = KINDS[kind]
    tensors = [50 * _draw(*x), 50 * _draw(*weight, seed=1)]
    direction = _draw(*exact(*tensors).shape, seed=2)
    run = lambda: _differentiate(lambda *each: low(*each, precision=precision), tensors, direction)
    out, grads = run()
    with torch.autocast("cpu", torch.bfloat16 if precision == "fp16" else torch.float16):
        cast, cast_grads = run()
    for ours, expected in zip([cast, *cast_grads], [out, *grads], strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("kind", KINDS)
def test_empty_batches_have_gradients_of_zero(kind, precision):
    x, weight, low, exact = KINDS[kind]
    tensors = [torch.zeros(0, *x[1:]), _draw(*weight)]
    if kind == "batched product":
        tensors[1] = tensors[1][:0]
    expected = exact(*tensors)
    lowered = lambda *each: low(*each, precision=precision)
    out, grads = _differentiate(lowered, tensors, torch.zeros_like(expected))
    assert out.shape == expected.shape
    for grad, tensor in zip(grads, tensors, strict=True):
        assert torch.equal(grad, torch.zeros_like(tensor))


def test_half_precision_overflows_to_infinity():
    x = torch.full((1, 4), 1e5)
    assert qsync.linear(x, torch.ones(1, 4), precision="fp16").isinf().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_and_gradients_have_the_types_of_their_inputs(dtype):
    x, weight = _draw(4, 8).to(dtype).requires_grad_(), _draw(3, 8).requires_grad_()
    for precision in LOW:
        x.grad = weight.grad = None
        out = qsync.linear(x, weight, precision=precision)
        out.sum().backward()
        assert (out.dtype, x.grad.dtype, weight.grad.dtype) == (dtype, dtype, torch.float32)


@pytest.mark.unchecked
def test_mistakes_are_named():
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    with pytest.raises(ConfigError, match="precision: expected one of"):
        qsync.linear(x, weight, precision="int4")
    with pytest.raises(ConfigError, match="scales: expected 'tensor' or 'row', got 'column'"):
        qsync.linear(x, weight, precision="int8", scales="column")
    with pytest.raises(DataError, match=r"expected x of 5 columns for weight \[3, 5\]"):
        qsync.linear(x, torch.ones(3, 5), precision="int8")
    with pytest.raises(DataError, match=r"expected a \[..., rows, inner\]"):
        matmul(x, x, precision="int8")
    with pytest.raises(DataError, match=r"factors of a float type, got torch.int64"):
        qsync.linear(x.long(), weight, precision="int8")
