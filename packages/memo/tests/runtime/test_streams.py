"""Order of copies, events and buffers on streams, with streams that copy as late as they may.

"compute" runs at once, as the CPU does; "out" and "back" run nothing before something waits for them.
So a copy that is not waited for leaves wrong bytes. Memory that is dropped before its copy is over is not
noticed: only a GPU's allocator would give it away.
"""

from collections import deque

import pytest
import torch

from memo import Plan, apply
from memo.planner.layer_plan import LayerPlan
from memo.runtime import run as running
from memo.runtime.moving.streams import StreamMover

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
        self._give(queue, lambda: target.copy_(source))

    def synchronize(self):
        for queue in self.queues:
            self._reach((queue, self.given[queue]))


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


def test_the_late_streams_notice_a_missing_wait(streams, monkeypatch):
    """That the tests above can fail: a wait is left out."""
    wait, left_out = streams.wait, []

    def leaky(queue, event):
        if event is not None and (queue, event[0]) == ("compute", "back"):
            left_out.append(event)
        else:
            wait(queue, event)

    model = make_stack(num_layers=5)
    expected = train_stack(model)
    monkeypatch.setattr(streams, "wait", leaky)
    with apply(model, PLANS["all"]):
        found = train_stack(model)
    assert left_out
    assert not all(torch.equal(one, found[1][name]) for name, one in expected[1].items())


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(
    "store", [pytest.param("pinned", marks=gpu), pytest.param("memory", marks=gpu)]
)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_gradients_on_a_gpu_are_autograds(alpha, store):
    model = make_model("llama", num_layers=5).to("cuda")
    expected = _train_on_gpu(model)
    with apply(model, Plan.fixed(alpha=alpha, store=store, cut=128)):
        found = _train_on_gpu(model)
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        # A product of fewer rows may run in another kernel: rounding differs, nothing else.
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-5 if alpha % 1 else 0.0)


def _train_on_gpu(model):
    model.zero_grad()
    for number in range(2):
        ids = torch.randint(0, 96, (2, 512), generator=torch.Generator().manual_seed(number))
        ids = ids.to("cuda")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}
