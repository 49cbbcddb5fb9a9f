"""Optimizers that are not torch's: which are stepped whole, which are refused, and what a trial leaves."""

import copy
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from optimizers import COPIED, INVERTED, bits, make_parameters, set_gradients

from shared.errors import ConfigError
from swift import undoable
from swift.undo.trial import find_coupling


class ByNorm(torch.optim.Optimizer):
    """Scales all gradients to a norm of at most 1, over all parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            state = self.state[p]
            state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad / norm.clamp(min=1)
            state["count"] = state.get("count", 0) + 1
            p.sub_(state["sum"], alpha=0.1)


class CountsInItsGroup(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


class KeepsLists(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            state.setdefault("seen", []).append(len(state["seen"]))
            state["by_name"] = {"lr": 0.1, "is_odd": len(state["seen"]) % 2 == 1, "none": None}
            p.sub_(p.grad, alpha=state["by_name"]["lr"])


class KeepsListsAndTensors(KeepsLists):
    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
        return super().step(closure)


class CountsItself(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        return super().step(closure)


class NeedsClosure(torch.optim.SGD):
    # pyrefly: ignore[bad-override]: what is tested is that a closure is needed
    def step(self, closure):
        return super().step(closure)


class MakesStateLater(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if self.state[p].setdefault("count", torch.zeros(())).add_(1) > 1:
                self.state[p]["slow"] = p.detach().clone()
        return super().step(closure)


class KeepsFunctions(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["function"] = lambda: None
        return super().step(closure)


class HoldsItsParameters(torch.optim.SGD):
    """Steps what it was built with, whatever its groups say."""

    def __init__(self, parameters, lr):
        self.held = parameters
        super().__init__(parameters, lr)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.held:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


def run(step_from, parameters, steps):
    for number in steps:
        set_gradients(parameters, number)
        step_from()


@pytest.mark.parametrize(
    "make", [ByNorm, lambda p: CountsInItsGroup(p, 0.1), lambda p: HoldsItsParameters(p, 0.1)]
)
def test_parameters_that_change_each_others_steps_are_stepped_at_once(make):
    ours, theirs = make_parameters(), make_parameters()
    opt, plain = undoable(make(ours)), make(theirs)
    assert opt.is_coupled
    for number in range(6):
        before, groups = bits(opt.optimizer), [dict(group) for group in opt.param_groups]
        run(opt.step, ours, [number])
        if number:
            opt.undo()
            assert bits(opt.optimizer) == before
            assert [{**group} for group in opt.param_groups] == [
                {**opt.param_groups[at], **groups[at]} for at in range(len(groups))
            ]
            run(opt.step, ours, [number])
        run(plain.step, theirs, [number])
    assert bits(opt.optimizer) == bits(plain)
    assert opt.marks == [6] * 4
    with pytest.raises(
        ConfigError, match="expected a step of all 4 parameters at once, got one of 2"
    ):
        opt.update([0, 1])
    opt.confirm()
    commit = undoable(make(make_parameters()), mode="commit")
    run(commit.step, commit.parameters, range(6))
    assert bits(commit.optimizer) == bits(plain)


@pytest.mark.parametrize("kind", [KeepsLists, KeepsListsAndTensors])
def test_numbers_lists_and_dictionaries_of_a_state_are_undone(kind):
    opt = undoable(kind(make_parameters(), 0.1))
    assert not opt.is_coupled
    run(opt.step, opt.parameters, range(2))
    opt.confirm()
    before = copy.deepcopy(bits(opt.optimizer))
    run(opt.step, opt.parameters, [2])
    assert opt.optimizer.state[opt.parameters[0]]["seen"] == [0, 1, 2]
    opt.undo()
    assert bits(opt.optimizer) == before


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (CountsItself, r"steps change its attributes \['num_steps'\]"),
        (NeedsClosure, "whose step needs a closure"),
        (MakesStateLater, r"which makes \['slow'\] later"),
        (KeepsFunctions, "with a value that cannot be sent to a peer"),
    ],
)
def test_what_cannot_be_undone_or_sent_is_refused_by_name(kind, text):
    with pytest.raises(ConfigError, match=f"got {kind.__name__}.*{text}"):
        undoable(kind(make_parameters(), 0.1))


@pytest.mark.parametrize("name", [*INVERTED, *COPIED])
def test_a_trial_of_torchs_optimizers_finds_each_parameter_stepped_by_itself(name):
    theirs = (INVERTED | COPIED)[name](make_parameters())
    theirs.__class__ = type("Foreign", (type(theirs),), {"__module__": "foreign"})
    assert find_coupling(theirs) is None


@pytest.mark.unchecked  # checks of signatures draw from Python's generator
def test_a_trial_changes_nothing(caplog):
    caplog.set_level(logging.INFO, "swift")

    class Noisy(ByNorm):
        def step(self, closure=None):
            random.random(), np.random.rand(), torch.rand(1)
            return super().step(closure)

    optimizer = Noisy(make_parameters())
    run(optimizer.step, optimizer.param_groups[0]["params"], range(2))
    before = bits(optimizer)
    kept = {name: value for name, value in vars(optimizer).items() if name != "state"}
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    assert find_coupling(optimizer) is not None
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())
    assert bits(optimizer) == before
    assert {name: value for name, value in vars(optimizer).items() if name != "state"} == kept
    undoable(optimizer)
    assert "Noisy steps all parameters at once: parameters change each other's" in caplog.text


def test_an_optimizer_that_cannot_be_tried_is_stepped_at_once():
    class WantsLarge(torch.optim.SGD):
        def step(self, closure=None):
            assert self.param_groups[0]["params"][0].numel() > 36, "too small"
            return super().step(closure)

    parameters = [torch.nn.Parameter(torch.ones(40)), torch.nn.Parameter(torch.ones(2))]
    holder = WantsLarge(parameters, 0.1)
    vars(holder)["slow"] = {"weights": [torch.ones(40)]}
    with pytest.raises(ConfigError, match=r"got WantsLarge with some in its attributes \['slow'\]"):
        undoable(holder)
    opt = undoable(WantsLarge(parameters, 0.1))
    assert opt.is_coupled
    for one in parameters:
        one.grad = torch.ones_like(one)
    opt.step()
    assert parameters[1].tolist() == pytest.approx([0.9, 0.9])


def test_a_closure_and_torchs_own_step_step_too():
    model = torch.nn.Linear(3, 1)
    opt = undoable(torch.optim.AdamW(model.parameters(), 0.1, fused=True))
    before = bits(opt.optimizer)

    def closure():
        opt.zero_grad(set_to_none=True)
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert opt.step(closure).requires_grad
    assert opt.marks == [1, 1]
    opt.undo()
    assert bits(opt.optimizer) == before
    scheduler = torch.optim.lr_scheduler.StepLR(opt.optimizer, 1)
    assert opt.optimizer.step(closure) is not None
    scheduler.step()
    assert opt.marks == [1, 1]
    opt.confirm()
    # With unscaled gradients, though torch's own fused AdamW would unscale them itself.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt.zero_grad(set_to_none=False)
    assert model.weight.grad.tolist() == [[0.0, 0.0, 0.0]]
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    scaler.step(opt.optimizer)
    assert model.weight.grad.tolist() == [[2.0, 2.0, 2.0]]
    assert opt.marks == [2, 2]
    opt.zero_grad(set_to_none=False)
    opt.undo()  # zeros are others, so that the gradient is there
    assert opt.marks == [1, 1]
