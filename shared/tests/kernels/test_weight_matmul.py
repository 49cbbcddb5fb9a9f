import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, DataError
from shared.kernels import weight_matmul as wm
from shared.kernels.weight_matmul import reference

GROUPS = [1, 16, 32, 40, 64, 100, 128, 200, 256, 2000]


def rebuilt(packed: wm.PackedWeight) -> torch.Tensor:
    """The weight by its definition, in float64."""
    group = torch.arange(packed.in_features) // packed.group_size
    zero, scale = packed.zero.double()[:, group], packed.scale.double()[:, group]
    return (wm.codes(packed).double() - zero) * scale


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 400),
    group_size=st.sampled_from(GROUPS),
    bits=st.sampled_from(wm.BITS),
)
def test_codes_go_in_and_come_out(rows, columns, group_size, bits):
    g = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=g, dtype=torch.uint8)
    groups = -(-columns // group_size)
    scale = torch.rand(rows, groups, generator=g).half()
    zero = torch.randint(0, 1 << bits, (rows, groups), generator=g, dtype=torch.uint8)
    packed = wm.from_codes(codes, scale, zero, bits, group_size=group_size)
    assert torch.equal(wm.codes(packed), codes)
    assert wm.packed_bytes(rows, columns, bits, group_size=group_size) == packed.num_bytes
    assert torch.equal(packed.scale, scale)
    assert torch.equal(packed.zero, zero)
    assert torch.equal(wm.unpack(packed).double(), rebuilt(packed))


@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("bits", wm.BITS)
def test_weights_are_rounded_to_the_nearest_step(bits, group_size):
    w = draw(7, 331) + 0.3
    w[0] = 0
    w[1] = w[1].abs()
    w[2, :200] = -w[2, :200].abs()
    packed = wm.pack(w, bits, group_size=group_size)
    step = packed.scale.double()[:, torch.arange(331) // group_size]
    # Half a step for rounding, and half where the zero point's took the end of the range.
    assert bool(((rebuilt(packed) - w).abs() <= step * 1.0001).all())
    inside = (wm.codes(packed) > 0) & (wm.codes(packed) < (1 << bits) - 1)
    assert bool(((rebuilt(packed) - w).abs() <= step * 0.5001)[inside].all())
    assert torch.equal(wm.unpack(packed)[0], torch.zeros(331))


def test_codes_reach_as_far_as_weights_do():
    """Where float16 has few digits, its nearest step would end far below the largest weight."""
    w = torch.tensor([[0.0, 36.0, 18.0]]) * 2.0**-24
    packed = wm.pack(w, 4)
    assert float((wm.unpack(packed) - w).abs().max()) <= 0.5 * float(packed.scale)


def test_weights_on_the_grid_are_exact():
    codes = torch.arange(256, dtype=torch.float32).view(1, 256) % 16
    w = (codes - 5) * 0.25
    packed = wm.pack(w, 4, group_size=64)
    assert torch.equal(wm.unpack(packed), w)
    assert torch.equal(wm.codes(packed)[0].float(), codes[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [16, 40, 64, 256])
@pytest.mark.parametrize("bits", wm.BITS)
def test_every_form_unpacks_alike(form, bits, group_size, dtype):
    packed = wm.pack(draw(5, 331), bits, group_size=group_size)
    exact = torch.empty(5, 331)
    reference.unpack(packed, exact)
    assert torch.equal(exact.double(), rebuilt(packed))
    out = torch.full((5, 331), 7.0, dtype=dtype, device=form.device)
    form.of("weight_matmul").unpack(packed.to(form.device), out)
    if form.name == "cpu":
        assert torch.equal(out, exact.to(dtype))
    else:
        # The interpreter truncates where a device rounds to nearest: one unit in the last place.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.cpu().float(), exact, rtol=eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [16, 64, 100, 256])
@pytest.mark.parametrize("bits", wm.BITS)
def test_products_err_at_most_twice_as_much_as_torch(form, bits, group_size, dtype):
    tokens, rows, columns = (5, 65, 256) if group_size == 64 else (1, 3, 331)
    packed = wm.pack(draw(rows, columns), bits, group_size=group_size)
    x = (draw(tokens, columns, seed=1) * draw(columns, seed=2)).to(dtype)
    out = torch.full((tokens, rows), 7.0, dtype=dtype, device=form.device)
    form.of("weight_matmul").matmul(x.to(form.device), packed.to(form.device), out)
    weight = rebuilt(packed)
    exact = x.double() @ weight.t()
    plain = (x @ weight.t().to(dtype)).double()
    most = 2 * (plain - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert float((out.cpu().double() - exact).abs().max()) <= float(most)


def test_a_row_of_the_result_does_not_depend_on_its_neighbours():
    packed = wm.pack(draw(66, 300), 4)
    for dtype in (torch.float32, torch.bfloat16):
        x = draw(70, 300, seed=3).to(dtype)
        together = wm.matmul(x, packed)
        assert torch.equal(together, torch.cat([wm.matmul(row[None], packed) for row in x]))


def test_small_and_large_activations_keep_their_digits():
    packed = wm.pack(draw(4, 256), 4)
    for factor in (1e-30, 1e-20, 1.0, 1e20, 1e35):
        x = draw(2, 256, seed=4) * factor
        exact = x.double() @ rebuilt(packed).t()
        found = wm.matmul(x, packed).double()
        assert float((found - exact).abs().max()) <= 1e-6 * float(exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_activations_spoil_their_own_rows_only(dtype):
    packed = wm.pack(draw(4, 256), 4)
    x = draw(3, 256).to(dtype)
    x[1, 7] = torch.nan
    x[2, 200] = torch.inf
    found = wm.matmul(x, packed)
    assert bool(found[0].isfinite().all())
    assert not bool(found[1:].isfinite().any())


@pytest.mark.parametrize("tokens", [1, 2])
def test_one_column_and_one_row(form, tokens):
    packed = wm.pack(draw(1, 1), 4)
    out = torch.full((tokens, 1), 7.0, device=form.device)
    x = draw(tokens, 1)
    form.of("weight_matmul").matmul(x.to(form.device), packed.to(form.device), out)
    torch.testing.assert_close(out.cpu(), x * wm.unpack(packed))


def test_batches_empty_inputs_and_float64():
    packed = wm.pack(draw(6, 70), 3)
    x = draw(2, 3, 70)
    torch.testing.assert_close(wm.matmul(x, packed), x @ wm.unpack(packed).t())
    assert wm.matmul(x[:0], packed).shape == (0, 3, 6)
    exact = x.double() @ rebuilt(packed).t()
    torch.testing.assert_close(wm.matmul(x.double(), packed), exact, rtol=1e-12, atol=1e-12)


def test_two_threads_share_the_rows(two_threads):
    packed = wm.pack(draw(1001, 4096), 8)
    x = draw(3, 4096)
    exact = x.double() @ rebuilt(packed).t()
    assert float((wm.matmul(x, packed) - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


def test_bytes_are_those_of_the_codes_and_two_numbers_a_group():
    for bits in wm.BITS:
        packed = wm.pack(draw(8, 256), bits, group_size=64)
        assert packed.num_bytes == 8 * (256 * bits // 8 + 4 * 3)
        packed = wm.pack(draw(8, 256), bits, group_size=32)
        assert packed.num_bytes == 8 * (256 * bits // 8 + 8 * 3), "no slot is empty"


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_broken_weights_are_named(broken):
    w = draw(4, 50)
    w[2, 31] = broken
    with pytest.raises(DataError, match=r"finite weights, got -?(nan|inf) in row 2, column 31"):
        wm.pack(w, 4)


def test_bad_input_is_refused():
    w = draw(4, 50)
    with pytest.raises(ConfigError, match="one of"):
        wm.pack(w, 5)
    with pytest.raises(ConfigError, match="at least 1"):
        wm.pack(w, 4, group_size=0)
    with pytest.raises(DataError, match=r"float16.*row 3, columns from 32"):
        wm.pack(torch.cat([w[:3], torch.cat([w[3:, :32], w[3:, 32:] * 1e8], 1)]), 3, group_size=32)
    packed = wm.pack(w, 4)
    with pytest.raises(DataError, match="50 columns"):
        wm.matmul(draw(2, 49), packed)
    with pytest.raises(ConfigError, match="float32"):
        wm.unpack(packed, torch.float64)
    codes, one = wm.codes(packed), torch.ones(4, 1)
    with pytest.raises(DataError, match="4 bits"):
        wm.from_codes(codes + 16, one, one.to(torch.uint8), 4)
    with pytest.raises(DataError, match="zero points"):
        wm.from_codes(codes, one, 16 * one.to(torch.uint8), 4)
    with pytest.raises(DataError, match="zero points of 4 bits, got -1 to 3"):
        wm.from_codes(codes, one, torch.tensor([[3], [0], [-1], [0]]), 4)
    with pytest.raises(DataError, match="scale and zero"):
        wm.from_codes(codes, torch.ones(4, 2), one.to(torch.uint8), 4)
    with pytest.raises(DataError, match="finite in float16"):
        wm.from_codes(codes, one * 1e6, one.to(torch.uint8), 4)


def test_float16_is_served(form):
    packed = wm.pack(draw(5, 200), 4)
    x, exact = draw(2, 200).half(), rebuilt(packed)
    weight = torch.empty(5, 200, dtype=torch.float16, device=form.device)
    out = torch.empty(2, 5, dtype=torch.float16, device=form.device)
    form.of("weight_matmul").unpack(packed.to(form.device), weight)
    form.of("weight_matmul").matmul(x.to(form.device), packed.to(form.device), out)
    torch.testing.assert_close(weight.cpu().double(), exact, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(out.cpu().double(), x.double() @ exact.t(), rtol=2e-3, atol=2e-3)
