"""The loop of a run whose ranks have done all steps."""

import pytest
import torch

import swift
from shared.errors import ConfigError
from swift.membership.member import Membership
from swift.training.runtime import Run


def test_a_second_loop_is_refused(monkeypatch):
    """Its ranks are released already: it would train nothing."""
    member = object.__new__(Membership)
    member.rank, member.world_size = 0, 1
    monkeypatch.setattr(Membership, "is_released", True)
    run = Run(member)
    model = torch.nn.Linear(2, 2)
    dp = swift.DataParallel(model, swift.undoable(torch.optim.SGD(model.parameters())), run)
    with pytest.raises(
        ConfigError, match=r"expected one run.loop in a run, got a second one; train"
    ):
        run.loop(lambda step: None, dp, until=1)
