"""Order of copies, events and buffers on streams, with streams that copy as late as they may.

"compute" runs at once, as the CPU does; "out" and "back" run nothing before something waits for them.
So a copy that is not waited for leaves wrong bytes, and memory that is dropped before its copy is over is noticed:
a copy keeps none of it alive, as on a GPU.
"""

import weakref
from collections import deque

import pytest
import torch

from memo import Plan, apply
from memo.planner.layer_plan import LayerPlan
from memo.runtime import run as running
from memo.runtime.moving.streams import StreamMover
from shared.errors import ConfigError

from .models import assert_same_step, make_model, make_stack, train, train_stack

pytestmark = pytest.mark.unchecked  # models are trained


class LateStreams:
    """Queues of copies; an event is a queue and how much of it must have run."""

    def __init__(self):
        self.queues = {"out": deque(), "back": deque()}
        self.done = {"out": 0, "back": 0}
        self.given = {"out": 0, "back": 0}
        self.copies = {"out": 0, "back": 0}

    def _give(self, queue, task):
        self.queues[queue].append(task)
        self.given[queue] += 1

    def record(self, queue):
        return None if queue == "compute" else (queue, self.given[queue])

    def wait(self, queue, event):
        if event is None:  # the compute queue has run all that it was given
            return
        if queue == "compute":
            self._reach(event)
        else:
            self._give(queue, lambda: self._reach(event))

    def _reach(self, event):
        queue, count = event
        while self.done[queue] < count:
            self.done[queue] += 1
            self.queues[queue].popleft()()

    def copy(self, queue, target, source):
        assert target.shape == source.shape
        self.copies[queue] += 1
        # The store's memory is held by the store, whose tensors are made for a copy.
        if queue == "out":
            of = loosely(source)
            self._give(queue, lambda: target.copy_(of()))
        else:
            to = loosely(target)
            self._give(queue, lambda: to().copy_(source))

    def seconds(self, begin, end):
        return 1.0

    def synchronize(self):
        for queue in self.queues:
            self._reach((queue, self.given[queue]))


def loosely(memory):
    """What gives bytes again, as long as somebody holds them."""
    storage, at, length = (
        weakref.ref(memory.untyped_storage()),
        memory.storage_offset(),
        len(memory),
    )
    address = memory.data_ptr()

    def again():
        held = storage()
        assert held is not None, f"{length} bytes at {address:#x} were dropped before their copy"
        return torch.empty(0, dtype=torch.uint8).set_(held, at, (length,), (1,))

    return again


@pytest.fixture
def streams(monkeypatch):
    late = LateStreams()
    monkeypatch.setattr(
        running, "open_mover", lambda device, store, buffers: StreamMover(store, buffers, late)
    )
    return late


PLANS = {
    "half": Plan.fixed(alpha=0.5),
    "all": Plan.fixed(alpha=1.0),
    "whole": Plan(layers=(LayerPlan(mode="whole"),)),
    "one buffer": Plan(layers=Plan.fixed(alpha=1.0).layers, num_buffers=1, max_sending=1),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_gradients_are_autograds(plan, streams):
    model = make_model("llama", num_layers=5)
    expected = train(model)
    with apply(model, plan) as run:
        assert_same_step(train(model), expected)
        assert run.num_spare_buffers == 0
    assert streams.copies["out"] == streams.copies["back"] > 0


def test_several_forwards_before_their_backwards(streams):
    model = make_stack(num_layers=5)

    def step():
        model.zero_grad()
        losses = [model(torch.full((2, 64, 32), 0.1 * number)) for number in range(3)]
        for loss in losses:
            loss.backward()
        return [], {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = step()
    with apply(model, PLANS["half"]):
        assert_same_step(step(), expected)
        assert_same_step(step(), expected)


def test_forwards_without_backward_do_not_disturb_later_ones(streams):
    model = make_stack(num_layers=5)
    expected = train_stack(model)
    with apply(model, PLANS["half"]) as run:
        for _ in range(3):
            model(torch.ones(2, 64, 32))
        assert_same_step(train_stack(model), expected)
        assert run.num_spare_buffers == 0


def test_backward_may_run_twice(streams):
    model = make_stack(num_layers=5)

    def step():
        model.zero_grad()
        loss = model(torch.ones(2, 64, 32))
        loss.backward(retain_graph=True)
        loss.backward()
        return [], {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = step()
    with apply(model, PLANS["half"]):
        assert_same_step(step(), expected)


def test_the_loss_waits_for_no_copy_out(streams):
    """The last layers are sent while it is computed; their memory stays until the compute queue has waited."""
    model = make_stack(num_layers=5)
    with apply(model, PLANS["all"]) as run:
        loss = model(torch.ones(2, 64, 32))
        assert streams.queues["out"], "nothing has waited for the last copies"
        assert streams.queues["back"]
        waited = run.times.wait_s
        loss.backward()
        assert run.times.wait_s > waited
    assert run.times.send_s == run.times.fetch_s == 5.0, "a second a cargo, by this clock"


def test_the_late_streams_notice_memory_that_is_dropped_early(streams, monkeypatch):
    wait = streams.wait

    def leaky(queue, event):
        if event is None or (queue, event[0]) != ("compute", "out"):
            wait(queue, event)

    monkeypatch.setattr(streams, "wait", leaky)
    model = make_stack(num_layers=5)
    with pytest.raises(AssertionError, match="were dropped before"), apply(model, PLANS["all"]):
        train_stack(model)


def test_the_late_streams_notice_a_missing_wait(streams, monkeypatch):
    """That the tests above can fail: a wait is left out."""
    wait, left_out = streams.wait, []

    def leaky(queue, event):
        if event is not None and (queue, event[0]) == ("compute", "back"):
            left_out.append(event)
        else:
            wait(queue, event)

    model = make_stack(num_layers=5)
    monkeypatch.setattr(streams, "wait", leaky)
    monkeypatch.setitem(globals(), "loosely", lambda memory: lambda: memory)
    with (
        apply(model, PLANS["all"]),
        pytest.raises(ConfigError, match="computes other values the second time"),
    ):
        train_stack(model)
    assert left_out
