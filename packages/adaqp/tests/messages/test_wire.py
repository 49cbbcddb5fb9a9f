"""The message buffer: what is packed arrives, byte counts are exact, a wrong table is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaqp.messages.wire import HEADER_BYTES, BufferLayout, pack, row_bytes, unpack
from adaqp.planner.widths import DROPPED, WIDTHS
from shared.errors import CommError, DataError


def layout_of(bits, dim, dtype=torch.float32, wire_dtype=torch.bfloat16, version=3):
    return BufferLayout(torch.tensor(bits, dtype=torch.uint8), dim, dtype, wire_dtype, version)


@given(
    bits=st.lists(st.sampled_from([*WIDTHS, DROPPED]), max_size=40),
    dim=st.integers(1, 37),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]),
    wire_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_arrive_within_a_step_of_their_width(bits, dim, dtype, wire_dtype):
    x = torch.randn(60, dim, generator=torch.Generator().manual_seed(len(bits) + dim)).to(dtype)
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(0))[: len(bits)]
    layout = layout_of(bits, dim, dtype, wire_dtype)
    buffer, spread = pack(layout, x, rows, key=1)
    assert len(buffer) == layout.num_bytes
    out = torch.full((len(bits), dim), torch.nan, dtype=dtype)
    unpack(layout, buffer, out)
    for place, (width, row) in enumerate(zip(bits, rows.tolist(), strict=True)):
        sent, came = x[row].double(), out[place].double()
        if width == 0:
            assert not came.any()
        elif width == 32:
            assert torch.equal(sent, came)
        elif width == 16:
            assert torch.equal(sent.bfloat16().to(dtype).double(), came)
        else:
            step = float(spread[place]) / (2**width - 1)
            slack = 2.0**-9 * float(sent.abs().max()) if dtype == torch.float16 else 1e-5
            assert float((sent - came).abs().max()) <= step + slack
            assert float(sent.max() - sent.min()) <= float(spread[place]) * (1 + 1e-6)


@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
def test_num_bytes_is_rows_and_parameters_and_one_header(wire_dtype):
    dim = 13
    bits = [8] * 5 + [4] * 3 + [2] * 7 + [1] * 2 + [16] + [0] * 4
    rows = sum(row_bytes(b, dim, 4, wire_dtype) for b in bits)
    padding = -17 * 2 * wire_dtype.itemsize % 8
    assert layout_of(bits, dim, wire_dtype=wire_dtype).num_bytes == HEADER_BYTES + rows + padding


def test_rows_that_all_travel_as_they_are_have_no_header():
    assert layout_of([32] * 6, 10).num_bytes == 6 * 10 * 4
    assert layout_of([0] * 6, 10).num_bytes == 0
    assert layout_of([], 10).num_bytes == 0


def test_the_noise_of_a_row_does_not_depend_on_its_neighbours_in_the_list():
    x = torch.randn(30, 16)
    alone, _ = pack(layout_of([4], 16), x, torch.tensor([17]), key=9)
    among, _ = pack(layout_of([4] * 3, 16), x, torch.tensor([3, 17, 29]), key=9)
    first, second = torch.empty(1, 16), torch.empty(3, 16)
    unpack(layout_of([4], 16), alone, first)
    unpack(layout_of([4] * 3, 16), among, second)
    assert torch.equal(first[0], second[1])


def test_another_table_is_refused_before_unpacking():
    x = torch.randn(8, 4)
    buffer, _ = pack(layout_of([8] * 8, 4, version=3), x, torch.arange(8), key=0)
    out = torch.full((8, 4), 7.0)
    with pytest.raises(CommError, match=r"packed by bit table 4, got \d+ bytes packed by table 3"):
        unpack(layout_of([8] * 8, 4, version=4), buffer, out)
    assert bool((out == 7).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_named_by_its_place(bad):
    x = torch.randn(8, 4)
    x[5, 2] = bad
    with pytest.raises(DataError) as caught:
        pack(layout_of([8, 4, 2], 4), x, torch.tensor([1, 2, 5]), key=0)
    assert caught.value.args[1] == 2


def test_a_constant_row_arrives_exactly():
    x = torch.full((3, 9), 0.5)
    for bits in (1, 2, 4, 8):
        layout = layout_of([bits] * 3, 9)
        out = torch.empty(3, 9)
        unpack(layout, pack(layout, x, torch.arange(3), key=0)[0], out)
        assert torch.equal(out, x)
