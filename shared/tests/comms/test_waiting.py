"""Waits that end with their world: by works that behave as gloo's do, and for real ones under FSDP2."""

import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from shared.comms import Group, RankPool, init
from shared.comms.init import alone, sever
from shared.errors import CommError


@pytest.fixture
def process_group():
    with alone():
        pass  # a world that was left before is another one
    with alone() as group:
        yield group.checked()


AT_ONCE = timedelta(0)


class Work(dist.Work):
    """Ends at a look, or never."""

    def __init__(self, ends_at=None, failure=None, ends_between=False):
        super().__init__()
        self.looks, self.ends_at, self.failure = 0, ends_at, failure
        self.is_ended, self.ends_between = False, ends_between

    def wait(self, timeout=AT_ONCE):
        self.looks += 1
        if self.looks == self.ends_at:
            self.is_ended = True
            if self.ends_between:
                raise RuntimeError("Operation timed out!")
        if not self.is_ended:
            time.sleep(timeout.total_seconds())
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)
        return True

    def is_completed(self):
        return self.is_ended


@pytest.mark.parametrize(("ends_between", "looks"), [(False, 3), (True, 4)])
def test_an_end_is_seen_whenever_it_comes(process_group, ends_between, looks):
    work = Work(ends_at=3, ends_between=ends_between)
    init.wait(work, process_group)
    assert work.looks == looks


def test_a_message_that_fails_says_why(process_group):
    with pytest.raises(RuntimeError, match="closed by peer"):
        init.wait(Work(ends_at=2, failure="closed by peer"), process_group)


def test_a_message_that_gloo_forgets_ends_with_its_world(process_group):
    threading.Timer(0.3, sever).start()
    start = time.monotonic()
    with pytest.raises(CommError, match="the world was left"):
        init.wait(Work(), process_group)
    assert 0.3 < time.monotonic() - start < 3


def gradients_and_waits() -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    found = []
    num_waits = 0
    wait = init.wait

    def counted(work, process_group):
        nonlocal num_waits
        num_waits += 1
        wait(work, process_group)

    init.wait = counted
    for waits in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
        for layer in (*module, module):
            fully_shard(layer, mesh=Group.world().device_mesh())
        if waits:
            assert num_waits == 0
            init.wait_in(module)
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(Group.world().rank))
        module(x).square().sum().backward()
        found.append([one.grad.full_tensor() for one in module.parameters()])
    plain, waited = found
    return plain, waited, num_waits


@pytest.mark.slow
def test_fsdp_waits_so_for_all_its_messages():
    with RankPool(2) as pool:
        results = pool.run(gradients_and_waits).results
    for expected, found, num_waits in results:
        assert num_waits >= 4  # two layers are gathered, and their gradients scattered
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def longest_look() -> float:
    """Rank 1 comes to its gradients two seconds late."""
    longest, wait = 0.0, init.wait

    def looked(work, process_group):
        nonlocal longest
        start = time.monotonic()
        with suppress(RuntimeError):
            work.wait(timedelta(milliseconds=10))
        longest = max(longest, time.monotonic() - start)
        wait(work, process_group)

    init.wait = looked
    module = nn.Linear(5, 6)
    fully_shard(module, mesh=Group.world().device_mesh())
    init.wait_in(module)
    loss = module(torch.ones(4, 5)).sum()
    time.sleep(2.0 * Group.world().rank)
    loss.backward()
    init.wait = wait
    return longest


def test_a_look_at_any_of_its_messages_is_short():
    with RankPool(2) as pool:
        assert pool.run(longest_look).results[0] < 1.0
