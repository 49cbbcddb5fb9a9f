import pytest
import torch

from shared.errors import ConfigError, DataError
from shared.kernels.quantize import BITS, dequantize, packed_width, quantize, reference
from shared.kernels.quantize.reference import MIN_SCALE

WIRE = [torch.float32, torch.bfloat16]
DIMS = [1, 3, 50, 127, 128, 129]
# The interpreter computes with numpy, which warns of what a flagged row holds.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
KEY = 0x9E3779B97F4A7C15


def awkward_rows(dim: int, seed: int = 0) -> torch.Tensor:
    """Random rows and, among them, every kind of row that needs care."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(19, dim, generator=g) * 3
    x[1] = 2.5
    x[2, 0] = torch.nan
    x[3, dim // 2] = -torch.inf
    x[4] = 0
    x[5] = 1e-41 * torch.arange(dim)
    x[6] *= 1e38
    x[7] = -0.0
    x[8, 0] = -torch.nan
    x[9] = torch.arange(dim) % 256
    x[10] = -x[10].abs() - 1e4
    x[11, -1] = torch.inf
    x[12] = 3.3e38
    x[13] = -3.4e38
    x[14, ::2] = 1e-30
    return x


def run(module, device, x, bits, wire, stochastic, index=None):
    num_rows = len(x) if index is None else len(index)
    width = packed_width(x.shape[1], bits)
    data = torch.full((num_rows, width), 0xAA, dtype=torch.uint8, device=device)
    params = torch.full((num_rows, 2), 7.0, dtype=wire, device=device)
    index = None if index is None else index.to(device)
    module.quantize(x.to(device), bits, KEY, index, stochastic, data, params)
    return data.cpu(), params.cpu()


def codes_of(data: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    ones = torch.tensor([[0.0, 1.0]]).expand(len(data), 2)
    return dequantize(data, ones, bits, dim)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("wire", WIRE)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_every_form_gives_the_same_integers_and_parameters(form, dim, bits, wire, stochastic):
    x = awkward_rows(dim)
    index = torch.tensor([5, 5, 0, 18, 3, 12, *range(19)])
    expected = run(reference, "cpu", x, bits, wire, stochastic, index)
    data, params = run(form.of("quantize"), form.device, x, bits, wire, stochastic, index)
    assert torch.equal(data, expected[0])
    assert torch.equal(params.view(torch.int16), expected[1].view(torch.int16))
    if not stochastic:
        plain = run(form.of("quantize"), form.device, x, bits, wire, stochastic)
        assert torch.equal(plain[0], expected[0][6:])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_every_form_unpacks_to_the_same_floats(form, dim, bits):
    x = awkward_rows(dim)[[0, 1, 4, 9, 10]]
    for wire in WIRE:
        data, params = run(reference, "cpu", x, bits, wire, True)
        expected = torch.empty(5, dim)
        reference.dequantize(data, params, bits, expected)
        for index in (None, torch.tensor([6, 0, 3, 1, 5])):
            out = torch.full((5 if index is None else 7, dim), 9.0, device=form.device)
            form.of("quantize").dequantize(
                data.to(form.device),
                params.to(form.device),
                bits,
                out,
                None if index is None else index.to(form.device),
            )
            out = out.cpu()
            assert torch.equal(out if index is None else out[index], expected)
            if index is not None:
                assert bool((out[[2, 4]] == 9.0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_quantised_in_float32(form, dtype):
    x = awkward_rows(37)[[0, 1, 9, 15, 16]].to(dtype)
    index = torch.tensor([4, 0, 0, 2])
    for chosen in (None, index):
        expected = run(reference, "cpu", x.to(torch.float32), 4, torch.float32, True, chosen)
        data, params = run(form.of("quantize"), form.device, x, 4, torch.float32, True, chosen)
        assert torch.equal(data, expected[0])
        assert torch.equal(params, expected[1])


@pytest.mark.parametrize("layout", ["transposed", "every_second_row", "every_second_column"])
def test_non_contiguous_rows(form, layout):
    x = torch.randn(24, 26, generator=torch.Generator().manual_seed(1))
    x = {
        "transposed": x.t(),
        "every_second_row": x[::2],
        "every_second_column": x[:, ::2],
    }[layout]
    expected = run(reference, "cpu", x.contiguous(), 2, torch.float32, True)
    device_x = x if form.device == "cpu" else x.to(form.device)
    data, params = run(form.of("quantize"), form.device, device_x, 2, torch.float32, True)
    assert torch.equal(data, expected[0])
    assert torch.equal(params, expected[1])


def test_half_type_output_is_the_rounded_float32(form):
    x = torch.randn(9, 33, generator=torch.Generator().manual_seed(2))
    data, params = run(reference, "cpu", x, 8, torch.float32, True)
    exact = dequantize(data, params, 8, 33)
    for dtype in (torch.float16, torch.bfloat16):
        out = torch.empty(9, 33, dtype=dtype, device=form.device)
        form.of("quantize").dequantize(data.to(form.device), params.to(form.device), 8, out)
        # The interpreter truncates where a device rounds to nearest: one unit in the last place.
        torch.testing.assert_close(out.cpu().float(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_non_contiguous_output(form):
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))
    data, params = run(reference, "cpu", x, 4, torch.float32, True)
    expected = dequantize(data, params, 4, 10)
    out = torch.zeros(10, 6, device=form.device).t()
    form.of("quantize").dequantize(data.to(form.device), params.to(form.device), 4, out)
    assert torch.equal(out.cpu(), expected)


def test_offsets_beyond_32_bits(form):
    # 4 GiB of address space of which two pages are touched.
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=form.device)
    x = storage.as_strided((2, 8), (2**31, 1))
    values = torch.arange(16, dtype=torch.float16).view(2, 8)
    x.copy_(values)
    expected = run(reference, "cpu", values, 4, torch.float32, True)
    data, _ = run(form.of("quantize"), form.device, x, 4, torch.float32, True)
    assert torch.equal(data, expected[0])


@pytest.mark.parametrize("offset", [0, 1, 3, 13])
@pytest.mark.parametrize("bits", BITS)
def test_codes_may_lie_at_any_byte_of_a_larger_buffer(bits, offset):
    x = torch.randn(5, 50, generator=torch.Generator().manual_seed(4))
    plain = quantize(x, bits, key=KEY)
    buffer = torch.full((offset + plain.data.numel() + 7,), 0x55, dtype=torch.uint8)
    place = buffer[offset : offset + plain.data.numel()].view_as(plain.data)
    packed = quantize(x, bits, key=KEY, data=place)
    assert packed.data is place
    assert torch.equal(place, plain.data)
    assert bool((buffer[:offset] == 0x55).all())
    assert bool((buffer[-7:] == 0x55).all())
    assert torch.equal(
        dequantize(place, packed.params, bits, 50), dequantize(plain.data, plain.params, bits, 50)
    )


def test_outputs_may_be_strided():
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(4))
    plain = quantize(x, 4, key=KEY)
    data = torch.zeros(4, 11, dtype=torch.uint8)[:, 2:8]
    params = torch.zeros(2, 4).t()
    packed = quantize(x, 4, key=KEY, data=data, params=params)
    assert torch.equal(data, plain.data)
    assert torch.equal(params, plain.params)
    assert packed.data is data
    assert torch.equal(dequantize(data, params, 4, 12), dequantize(*plain))


def test_planes_are_laid_out_as_documented():
    x = torch.tensor([[0.0, 1, 2, 3, 3, 2]])
    packed = quantize(x, 2, key=KEY, rounding="nearest")
    # width 2: byte 0 holds columns 0, 2, 4 and byte 1 columns 1, 3, 5; the fourth plane is empty.
    assert packed.data.tolist() == [[0 | 2 << 2 | 3 << 4, 1 | 3 << 2 | 2 << 4]]
    assert packed.params.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("dim", "bits", "width"), [(128, 2, 32), (128, 8, 128), (50, 2, 13), (1, 1, 1), (9, 4, 5)]
)
def test_packed_width(dim, bits, width):
    assert packed_width(dim, bits) == width


@pytest.mark.parametrize("bits", BITS)
def test_integer_rows_come_back_exactly(bits):
    levels = 2**bits - 1
    x = (torch.arange(3 * 64) % (levels + 1)).view(3, 64).float()
    x[:, 0], x[:, 1] = 0, levels
    for rounding in ("stochastic", "nearest"):
        assert torch.equal(dequantize(*quantize(x, bits, key=KEY, rounding=rounding)), x)


@pytest.mark.parametrize("bits", BITS)
def test_constant_rows_are_exact(bits):
    values = torch.tensor([0.0, -0.0, 1 / 3, -1e38, 1e-45, 3.4e38])
    packed = quantize(values[:, None].expand(-1, 21), bits, key=KEY)
    assert bool((packed.params[:, 1] == 0).all())
    assert bool((packed.data == 0).all())
    assert torch.equal(dequantize(*packed), values[:, None].expand(-1, 21))


def test_constant_rows_are_exact_in_bfloat16_when_their_value_is():
    x = torch.tensor([0.5, -3.0, 0.0])[:, None].expand(-1, 9)
    packed = quantize(x, 2, key=KEY, wire_dtype=torch.bfloat16)
    assert bool((packed.params[:, 1] == 0).all())
    assert torch.equal(dequantize(*packed), x)


def test_one_column_is_exact(form):
    x = torch.tensor([[1.5], [-2.0], [0.0]])
    data, params = run(form.of("quantize"), form.device, x, 2, torch.float32, True)
    assert torch.equal(dequantize(data, params, 2, 1), x)


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_flagged_and_touches_no_other(form, bad):
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(5))
    clean = run(reference, "cpu", x, 4, torch.float32, True)
    x[2, 39] = bad
    data, params = run(form.of("quantize"), form.device, x, 4, torch.float32, True)
    assert params.isfinite().all(1).tolist() == [True, True, False, True, True]
    assert bool(params[2].isnan().all())
    assert bool((data[2] == 0).all())
    others = [0, 1, 3, 4]
    assert torch.equal(data[others], clean[0][others])


def test_a_range_beyond_float32_is_flagged():
    x = torch.tensor([[-3e38, 3e38], [0.0, 1.0]])
    assert quantize(x, 8, key=KEY).params.isfinite().all(1).tolist() == [False, True]


def test_a_tiny_range_is_coded_on_a_coarser_grid():
    packed = quantize(torch.tensor([[0.0, 1e-40, 2e-40]]), 8, key=KEY)
    assert packed.params[0, 1] == MIN_SCALE
    assert dequantize(*packed).abs().max() <= MIN_SCALE


@pytest.mark.parametrize("dim", [0, 1, 5])
@pytest.mark.parametrize("num_rows", [0, 3])
def test_empty_input(num_rows, dim):
    for index in (None, torch.zeros(0, dtype=torch.int64)):
        packed = quantize(torch.ones(num_rows, dim), 4, key=KEY, index=index)
        count = num_rows if index is None else 0
        assert packed.data.shape == (count, packed_width(dim, 4))
        assert dequantize(*packed).shape == (count, dim)


def test_a_row_draws_the_same_noise_wherever_it_stands():
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(6))
    whole = quantize(x, 2, key=KEY)
    index = torch.randperm(30, generator=torch.Generator().manual_seed(7))[:11]
    some = quantize(x, 2, key=KEY, index=index)
    assert torch.equal(some.data, whole.data[index])
    assert not torch.equal(quantize(x, 2, key=KEY + 1).data, whole.data)


def test_the_noise_of_a_column_does_not_depend_on_the_width():
    # Codes at 4 bits of rows 0..15 that differ in a fraction only show who was rounded up.
    fraction = 0.37
    ups = {}
    for bits in (2, 4, 8):
        levels = 2**bits - 1
        x = torch.full((50, 40), 1 + fraction)
        x[:, 0], x[:, 1] = 0, levels
        ups[bits] = codes_of(quantize(x, bits, key=KEY).data, bits, 40)[:, 2:] == 2
    assert torch.equal(ups[2], ups[4])
    assert torch.equal(ups[2], ups[8])


def test_several_threads_give_the_same_bits(two_threads):
    x = torch.randn(9001, 128, generator=torch.Generator().manual_seed(8))
    packed = quantize(x, 4, key=KEY)
    values = dequantize(*packed)
    torch.set_num_threads(1)
    serial = quantize(x, 4, key=KEY)
    assert torch.equal(packed.data, serial.data)
    assert torch.equal(packed.params, serial.params)
    assert torch.equal(values, dequantize(*serial))


def test_no_gradient_is_recorded():
    x = torch.randn(3, 8, requires_grad=True)
    packed = quantize(x, 8, key=KEY)
    assert not dequantize(*packed).requires_grad


@pytest.mark.parametrize("bits", [0, 3, 16, -1])
def test_other_widths_are_refused(bits):
    with pytest.raises(ConfigError, match=rf"bits to be one of \(1, 2, 4, 8\), got {bits}"):
        quantize(torch.ones(2, 2), bits, key=KEY)


def test_other_wire_types_are_refused():
    with pytest.raises(ConfigError, match="wire_dtype"):
        quantize(torch.ones(2, 2), 2, key=KEY, wire_dtype=torch.float16)
    with pytest.raises(ConfigError, match="params"):
        dequantize(torch.zeros(2, 1, dtype=torch.uint8), torch.zeros(2, 2).half(), 4, 2)


def test_outputs_of_another_shape_or_type_are_refused():
    x = torch.ones(3, 8)
    with pytest.raises(DataError, match=r"data to be torch.uint8 \[3, 4\].*got.*\[3, 5\]"):
        quantize(x, 4, key=KEY, data=torch.zeros(3, 5, dtype=torch.uint8))
    with pytest.raises(DataError, match=r"params to be torch\.bfloat16"):
        quantize(x, 4, key=KEY, wire_dtype=torch.bfloat16, params=torch.zeros(3, 2))
    packed = quantize(x, 4, key=KEY)
    with pytest.raises(DataError, match=r"data to be torch.uint8 \[3, 2\]"):
        dequantize(packed.data, packed.params, 2, 8)
    with pytest.raises(DataError, match=r"out to be .*\[3, 8\], got .*\[3, 9\]"):
        dequantize(packed.data, packed.params, 4, 8, out=torch.zeros(3, 9))
    with pytest.raises(ConfigError, match="expected `out`, whose rows"):
        dequantize(packed.data, packed.params, 4, 8, index=torch.arange(3))


@pytest.mark.parametrize("index", [[0, 3], [-1, 0]])
def test_an_index_outside_is_refused(index):
    low, high = min(index), max(index)
    with pytest.raises(DataError, match=rf"index in \[0, 3\), got {low} to {high}"):
        quantize(torch.ones(3, 8), 4, key=KEY, index=torch.tensor(index))
    packed = quantize(torch.ones(2, 8), 4, key=KEY)
    with pytest.raises(DataError, match=rf"index in \[0, 3\), got {low} to {high}"):
        dequantize(
            packed.data, packed.params, 4, 8, out=torch.zeros(3, 8), index=torch.tensor(index)
        )
