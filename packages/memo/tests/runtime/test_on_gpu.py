"""Streams, pinned memory, plans and their predictions on a CUDA device.

Written without one, and not run on one yet.
"""

import pytest
import torch

import memo
from memo import Plan, apply
from memo.planner.layer_plan import LayerPlan
from memo.profiler.autotune import measure_profile
from memo.runtime.moving.buffers import Buffers
from memo.runtime.moving.streams import CudaStreams, StreamMover
from memo.runtime.recording.items import Item
from memo.runtime.stores import open_store

from .models import assert_same_gradients, gradients, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.unchecked,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda")
MIB = 1 << 20


@pytest.fixture
def deterministic():
    """Has attention's backward add up in one order, so that two plain steps give the same bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_batch(tokens=512, number=0):
    ids = torch.randint(0, 96, (2, tokens), generator=torch.Generator().manual_seed(number))
    ids = ids.to(DEVICE)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def train(model, tokens=512):
    model.zero_grad()
    for number in range(2):
        model(**make_batch(tokens, number)).loss.backward()
    return gradients(model)


PLANS = {
    "all": Plan.fixed(alpha=1.0, store="pinned"),
    "half": Plan.fixed(alpha=0.5, store="pinned", cut=128),
    "none": Plan.fixed(alpha=0.0, store="pinned"),
    "pageable": Plan.fixed(alpha=1.0, store="memory"),
    "whole": Plan(layers=(LayerPlan(mode="whole"),), store="pinned"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.usefixtures("deterministic")
def test_gradients_are_autograds(name, dtype):
    model = make_model("llama", dtype, num_layers=5).to(DEVICE)
    expected = train(model)
    with apply(model, PLANS[name]) as run:
        for _ in range(3):  # buffers and slots serve again
            found = train(model)
        assert run.num_spare_buffers == 0
        assert run.times.sent_bytes == run.times.fetched_bytes > 0
    if name == "half":  # a product of fewer rows may run in another kernel
        for key, one in expected.items():
            assert (found[key].float() - one.float()).norm() <= 0.02 * one.float().norm(), key
    else:
        assert_same_gradients(found, expected)


@pytest.mark.usefixtures("deterministic")
def test_a_step_may_run_in_a_stream_of_ones_own():
    model = make_model("llama", torch.bfloat16, num_layers=5).to(DEVICE)
    expected = train(model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), apply(model, PLANS["all"]):
        found = train(model)
    side.synchronize()
    assert_same_gradients(found, expected)


def test_the_compute_queue_is_the_current_stream():
    streams, side = CudaStreams(DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        busy = streams.record("compute")
    idle = streams.record("compute")
    streams.wait("out", busy)
    behind = streams.record("out")
    idle.synchronize()
    assert not busy.query()
    assert not behind.query()
    torch.cuda.synchronize()
    assert busy.query()
    assert behind.query()


class Record:
    """What cargo belongs to: only whether it is alive counts."""

    is_taken = True

    def __init__(self, items):
        self.items = items

    def run(self):
        raise AssertionError("nothing runs here")


def test_copies_leave_the_host_and_the_compute_stream_free():
    store = open_store("pinned", reserve_bytes=256 * MIB, device=DEVICE)
    mover = StreamMover(store, Buffers(1, DEVICE), CudaStreams(DEVICE))
    data = torch.randint(0, 256, (256 * MIB,), dtype=torch.uint8, device=DEVICE)
    item = Item.of("x", [data.clone()])
    record = Record([item])
    cargo = mover.load(record, [item])
    torch.cuda.synchronize()
    mover.send(cargo)
    assert not cargo.sent.query(), "the host does not wait"
    data.sum()
    after = torch.cuda.current_stream().record_event()
    after.synchronize()
    assert not cargo.sent.query(), "the compute stream does not wait"
    mover.fetch(cargo)
    mover.await_fetched(cargo)
    assert torch.equal(item.tensors[0], data)
    mover.close()
    assert mover.times.send_s > 0
    assert mover.times.fetch_s > 0
    del record, cargo
    store.close()


def test_pages_of_the_store_are_pinned_and_given_back():
    store = open_store("pinned", reserve_bytes=3 * MIB, device=DEVICE)
    (piece,) = store.pieces(store.allocate(2 * MIB).offset, 2 * MIB)
    assert torch.from_numpy(piece).is_pinned()
    store.close()
    assert not torch.from_numpy(piece).is_pinned()


def make_long(**settings):
    model = make_model("llama", torch.bfloat16, num_layers=8, max_position_embeddings=1 << 15)
    return model.to(DEVICE), make_batch(16_384, **settings)


def test_a_plan_holds_its_limit_and_its_prediction():
    model, batch = make_long()
    for one in model.parameters():
        one.grad = torch.zeros_like(one)

    def peak():
        torch.cuda.reset_peak_memory_stats()
        model(**batch).loss.backward()
        return torch.cuda.max_memory_allocated()

    peak()
    plain, fixed = peak(), torch.cuda.memory_allocated()
    limit = fixed + (plain - fixed) * 2 // 3
    plan = memo.autotune(model, batch, memo.Budget(device=limit, store="2GiB"), optimizer_bytes=0)
    assert plan.store == "pinned"
    with apply(model, plan):
        peak()
        found = peak()
    assert found <= 1.02 * limit
    assert found == pytest.approx(plan.prediction["peak_bytes"], rel=0.1)


def test_layers_whose_attention_adds_up_in_any_order_may_run_again():
    model, batch = make_long()
    profile = measure_profile(model, batch, "pinned", optimizer_bytes=0)
    assert profile.layers[0].can_replay
    assert profile.send.time_s(1 << 30) < 1.0, "a gigabyte a second at least"
    assert profile.fetch.time_s(1 << 30) < 1.0
