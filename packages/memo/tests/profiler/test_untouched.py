"""Whatever a layer changes while it is measured is put back, however measuring ends."""

import random
from collections import Counter, deque

import numpy as np
import pytest
import torch
from torch import nn

import memo
from memo.profiler.autotune import measure_profile
from memo.profiler.untouched import untouched, watch_writes

from .inputs import batch_of

pytestmark = pytest.mark.unchecked  # checks of signatures draw from Python's random numbers

BUDGET = memo.Budget(device="1TiB")


class Changing(nn.Module):
    """Changes all that a forward may change."""

    def __init__(self, width=16):
        super().__init__()
        self.up, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("replaced", torch.zeros(width))
        self.aside, self.scale = torch.zeros(3), np.ones(2)
        self.calls, self.history, self.sizes = 0, [], deque(maxlen=4)
        self.counts, self.seen = {"calls": Counter()}, set()
        self.generator, self.draws = torch.Generator(), np.random.default_rng(1)
        self.dice = random.Random(1)

    def forward(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
            self.up.bias.data = self.up.bias.data * 0.5
        y = self.norm(self.up(x).transpose(1, 2)).transpose(1, 2)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean((0, 1)))
            self.replaced = self.replaced + 1
            self.aside += torch.rand(3, generator=self.generator)
        self.calls += 1
        self.scale *= self.draws.random() + self.dice.random()
        self.history.append(self.calls)
        self.sizes.append(x.shape[1])
        self.counts["calls"]["forward"] += 1
        self.seen.add(self.calls)
        random.random()
        np.random.rand()
        return x + y * torch.rand(()) * float(self.scale.sum() > 0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(9, 16), nn.Linear(16, 9)
        self.layers = nn.ModuleList([Changing() for _ in range(2)])
        self.table = {}

    def forward(self, ids, labels):
        x = self.embed(ids)
        labels.masked_fill_(labels == 3, -100)
        self.table.setdefault("lengths", []).append(ids.shape[1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def state_of(model, batch):
    """All that may change, as values that can be compared."""
    state = {}
    for name, one in (*model.state_dict().items(), *batch.items()):
        state[name] = (id(one), one.clone()) if name in batch else one.clone()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, dict):
                value = list(value.items()) if not key.startswith("_") else list(value)
            elif isinstance(value, torch.Generator):
                value = value.get_state()
            elif isinstance(value, np.random.Generator):
                value = value.bit_generator.state
            elif isinstance(value, random.Random):
                value = value.getstate()
            state[name, key] = repr(value)
    for name, one in model.named_parameters():
        state[name, "itself"] = (id(one), one.requires_grad, id(one.grad), repr(one.grad))
    state["random"] = (torch.get_rng_state(), random.getstate(), repr(np.random.get_state()))
    return {key: repr(value) for key, value in state.items()}


def make():
    model, stepped, calls = Model(), [], [0]
    ids = torch.randint(0, 9, (2, 80))
    batch = {"ids": ids, "labels": ids.clone()}
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.layers[1].up.weight.grad = torch.ones(16, 16)

    def step(parameter):  # as optimizers do that run in the backward
        stepped.append(parameter)
        parameter.data.sub_(1.0)

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(step)

    def count(*_):
        calls[0] += 1

    model.layers[0].register_forward_hook(count)
    return model, batch, stepped, calls


def test_planning_changes_nothing_of_the_model_the_batch_and_random_numbers():
    model, batch, stepped, calls = make()
    before = state_of(model, batch)
    memo.autotune(model, batch, BUDGET)
    after = state_of(model, batch)
    assert [key for key in before if before[key] != after[key]] == []
    assert before.keys() == after.keys()
    assert stepped == []
    assert calls == [0]


@pytest.mark.parametrize(
    ("error", "num_forwards"), [(KeyboardInterrupt, 0), (KeyboardInterrupt, 3), (MemoryError, 2)]
)
def test_planning_that_is_interrupted_changes_nothing_either(error, num_forwards, monkeypatch):
    model, batch, _, _ = make()
    before, own, left = state_of(model, batch), Changing.forward, [num_forwards]

    def forward(self, x):
        out = own(self, x)
        left[0] -= 1
        if left[0] < 0:
            raise error
        return out

    monkeypatch.setattr(Changing, "forward", forward)
    with pytest.raises(error):
        memo.autotune(model, batch, BUDGET)
    after = state_of(model, batch)
    assert [key for key in before if before[key] != after[key]] == []


def test_parameters_are_copied_only_where_they_are_written():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleList([first, second])
    wanted = [one.clone() for one in model.parameters()]
    with untouched(model), torch.no_grad():
        with watch_writes():
            torch._foreach_add_([first.weight, first.bias], 1.0)
            second.weight.data.view(-1)[:3].copy_(torch.ones(3))
            torch.add(second.weight, 1.0)
        first.weight.add_(1.0)  # a run that is timed follows one that was watched
    assert all(map(torch.equal, model.parameters(), wanted))


def test_large_buffers_are_copied_only_where_they_are_written():
    model = nn.Module()
    written, left = torch.zeros(1 << 18), torch.zeros(1 << 18)
    model.register_buffer("written", written)
    model.register_buffer("left", left)
    with untouched(model):
        with watch_writes():
            written.add_(1.0)
        left.add_(1.0)
    assert written.eq(0).all()
    assert left.eq(1).all()


def test_measuring_draws_nothing_from_the_training(model, monkeypatch):
    def draw(*_):
        torch.rand(3)
        raise KeyError("drawn")

    monkeypatch.setattr("memo.profiler.autotune.capture_calls", draw)
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="drawn"):
        measure_profile(model, batch_of(16), None)
    assert torch.equal(state, torch.get_rng_state())
