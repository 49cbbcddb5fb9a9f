"""Items, their geometry and watches, and the buffers they come back into."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from memo.planner.layer_plan import LayerPlan
from memo.runtime.layers import named_memory
from memo.runtime.moving.buffers import Buffers, aligned_bytes
from memo.runtime.recording.calls import find_views
from memo.runtime.recording.dense import Geometry, is_dense, raw_bytes
from memo.runtime.recording.items import Item, Watch
from memo.runtime.recording.record import LayerRecord
from memo.runtime.stores.base import ALIGN

from .models import Block, assert_same_gradients, gradients, make_input, same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_a_dense_tensor_comes_back_with_its_strides(dtype, order):
    base = torch.randn(3, 4, 5) > 0 if dtype is torch.bool else (torch.randn(3, 4, 5) * 9).to(dtype)
    tensor = base.permute(order)
    assert is_dense(tensor)
    memory = torch.zeros(aligned_bytes(tensor.nbytes), dtype=torch.uint8)
    memory[: tensor.nbytes] = torch.from_numpy(raw_bytes(tensor, tensor.nbytes).copy())
    back = Geometry.of(tensor).view(memory)
    assert back.stride() == tensor.stride()
    assert same_bits(back, tensor)


def test_raw_bytes_begin_where_the_tensor_does():
    tensor = torch.arange(12.0).view(3, 4)[1:]
    assert raw_bytes(tensor, 8).view("float32").tolist() == [4.0, 5.0]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_dense_is_what_fills_its_stretch(shape, data):
    base = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    order = data.draw(st.permutations(range(len(shape))))
    assert is_dense(base.permute(order))
    step = data.draw(st.integers(1, 3))
    sliced = base.permute(order)[::step]
    stretch = 1 + sum((n - 1) * s for n, s in zip(sliced.shape, sliced.stride(), strict=True))
    assert is_dense(sliced) == (stretch == sliced.numel())


def test_expanded_and_empty_tensors_are_not_dense():
    assert not is_dense(torch.ones(1, 3).expand(2, 3))
    assert not is_dense(torch.ones(0, 3))
    assert not Item.of("x", [torch.ones(4, 4)[:, :2]]).can_move
    assert Item.of("x", [torch.ones(4, 4).t()]).can_move


def test_a_watch_notices_changes_and_keeps_no_memory():
    tensor = torch.ones(3)
    watch, view = Watch(tensor), tensor[1:]
    watch.check("x")
    view.mul_(2)
    assert watch.has_changed
    with pytest.raises(RuntimeError, match="x is at version 1; expected version 0"):
        watch.check("x")
    storage = tensor.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)
    kept = [Watch(tensor) for _ in range(3)]
    assert torch._C._storage_Use_Count(storage._cdata) == before
    assert not any(one.has_changed for one in kept)


def test_rows_are_bytes_of_the_first_rows():
    item = Item.of("x", [torch.zeros(2, 4, 8)], rows=3, num_rows=8)
    assert item.stored_bytes == [3 * 8 * 4]


def test_saved_tensors_are_found_in_their_sources():
    rows, weight = torch.randn(6, 4), torch.randn(5, 4)
    saved = [rows[1:3], weight.t(), torch.randn(6, 4), rows.to(torch.bfloat16)]
    found = find_views(saved, [rows, weight])
    assert [None if one is None else one.source for one in found] == [0, 1, None, 0]
    others = [rows + 1, weight + 1]
    assert torch.equal(found[0].of(others), others[0][1:3])
    assert torch.equal(found[1].of(others), others[1].t())
    assert torch.equal(found[3].of(others), others[0].to(torch.bfloat16))


def test_buffers_are_used_in_turns():
    buffers = Buffers(2, torch.device("cpu"))
    first, second = buffers.take(100), buffers.take(2 * ALIGN)
    assert first.memory.data_ptr() % ALIGN == 0
    assert not buffers.has_free()
    spare = buffers.take(10)
    assert spare.is_spare
    assert buffers.num_spare == 1
    buffers.give_back(spare)
    assert not buffers.has_free()
    buffers.give_back(first)
    buffers.give_back(second)
    assert buffers.take(2 * ALIGN) is second, "the one that is long enough"
    longer = buffers.take(2 * ALIGN)
    assert longer is not first
    assert not longer.is_spare
    assert not buffers.has_free()
    assert buffers.num_bytes == 4 * ALIGN, "the spare one and the shorter one left out"


def test_places_in_a_buffer_begin_at_pages_and_do_not_overlap():
    buffer = Buffers(1, torch.device("cpu")).take(5 * ALIGN)
    places = buffer.places([1, ALIGN, ALIGN + 1])
    begins = [one.data_ptr() - buffer.memory.data_ptr() for one in places]
    assert begins == [0, ALIGN, 2 * ALIGN]
    assert [len(one) for one in places] == [ALIGN, ALIGN, 2 * ALIGN]


class CountedProducts(TorchDispatchMode):
    """Counts matrix products that are computed."""

    def __init__(self):
        super().__init__()
        self.num_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kept", "computed"), [((), 1), (("up.weight",), 0)])
def test_only_products_that_something_needs_are_computed_again(kept, computed):
    """The last one's result is no part of what autograd saves."""
    block, x = Block(), make_input().requires_grad_()
    record = LayerRecord(
        block.forward,
        (x,),
        {},
        plan=LayerPlan(mode="restore", resident=frozenset({"input", *kept})),
        parameters=lambda: named_memory(block),
        cut=16,
        fetch=lambda _: None,
    )
    with CountedProducts() as forward:
        out = record.run()
    with torch.no_grad(), CountedProducts() as again:
        record.restore()
    assert (forward.num_products, again.num_products) == (2, computed)
    out.sum().backward()
    found = gradients(block)
    block.zero_grad()
    block(x).sum().backward()
    assert_same_gradients(found, gradients(block))
