"""DataParallel against torch's DistributedDataParallel with torch's optimizer, clipping and scaler."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import swift
from shared.comms import Group
from shared.comms.init import alone
from shared.errors import ConfigError

WIDTH, STEPS, OVERFLOWS_AT = 8, 6, 2
CASES = [
    {},
    {"halves": 2},
    {"clip_norm": 0.05},
    {"mode": "commit", "clip_norm": 0.05},
    {"has_scaler": True},
    {"has_scaler": True, "halves": 2, "clip_norm": 0.05},
]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.tied = torch.nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.unused = torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, x):
        hidden = self.norm(self.first(x).tanh())
        return self.last(self.tied(hidden).tanh()).square().mean()


def batches(step, halves):
    draw = torch.Generator().manual_seed(100 * step + Group.world().rank)
    return torch.randn(12, WIDTH, generator=draw).chunk(halves)


def train(case, make_step):
    """Losses, gradients and weights of all steps, and the module's buffers."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        if case.get("has_scaler")
        else None
    )
    step = make_step(model, optimizer, scaler, case)
    told = []
    for at in range(STEPS):
        is_too_large = scaler is not None and at == OVERFLOWS_AT
        losses = step(at, 1e38 if is_too_large else 1.0)
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        weights = [p.detach().clone() for p in model.parameters()]
        told.append((losses, None if is_too_large else grads, weights))
    scale = None if scaler is None else scaler.get_scale()
    return told, [one.clone() for one in model.buffers()], scale


def ours(model, optimizer, scaler, case):
    run = SimpleNamespace(rank=Group.world().rank, world_size=2, reads_whole_batches=False)
    dp = swift.DataParallel(
        model,
        swift.undoable(optimizer, mode=case.get("mode", "exact")),
        run,
        bucket_mb=100e-6 * WIDTH,
        clip_norm=case.get("clip_norm"),
        scaler=scaler,
    )
    dp.regroup(Group.world())

    def step(at, factor):
        halves = batches(at, case.get("halves", 1))
        dp.begin(at)
        losses = []
        for number, x in enumerate(halves, 1):
            losses.append(dp(x) * factor / len(halves))
            dp.backward(losses[-1], update=number == len(halves))
        dp.finish(at)
        return [loss.item() for loss in losses]

    return step


def theirs(model, optimizer, scaler, case):
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)

    def step(at, factor):
        optimizer.zero_grad()
        halves = batches(at, case.get("halves", 1))
        losses = []
        for number, x in enumerate(halves, 1):
            ddp.require_backward_grad_sync = number == len(halves)
            losses.append(ddp(x) * factor / len(halves))
            scaler.scale(losses[-1]).backward()
        scaler.unscale_(optimizer)
        if "clip_norm" in case:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip_norm"])
        scaler.step(optimizer)
        scaler.update()
        return [loss.item() for loss in losses]

    return step


def train_both():
    return [(train(case, ours), train(case, theirs)) for case in CASES]


@pytest.fixture(scope="module")
def found(two_ranks):
    return two_ranks.run(train_both).results


def test_sparse_gradients_are_refused():
    run = SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False)
    model = torch.nn.Embedding(4, 2, sparse=True)
    dp = swift.DataParallel(model, swift.undoable(torch.optim.SGD(model.parameters(), 0.1)), run)
    with alone() as group:
        dp.regroup(group)
        dp.begin(0)
        with pytest.raises(ConfigError, match=r"weight: expected a dense gradient.*sparse=False"):
            dp.backward(dp(torch.tensor([1])).sum())


class UsedTwice(torch.nn.Module):
    """Its second layer twice, recomputed in the backward pass by torch's older way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.twice = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(lambda one: self.twice(one).tanh(), hidden, use_reentrant=True)
        return hidden.square().mean()


@pytest.mark.parametrize("is_in_one_bucket", [True, False])
def test_a_gradient_that_comes_in_parts_is_summed_whole_or_refused(is_in_one_bucket):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    model, twin = UsedTwice(), UsedTwice()
    twin(x).backward()
    run = SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False)
    opt = swift.undoable(torch.optim.SGD(model.parameters(), 0.1))
    dp = swift.DataParallel(model, opt, run, bucket_mb=1.0 if is_in_one_bucket else 1e-6)
    with alone() as group:
        dp.regroup(group)
        dp.begin(0)
        if is_in_one_bucket:
            dp.backward(dp(x))
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)
        else:
            with pytest.raises(
                ConfigError, match=r"twice\.bias: expected its whole gradient by one"
            ):
                dp.backward(dp(x))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_losses_gradients_and_weights_are_torchs(found, number):
    for rank in range(2):
        (told, buffers, scale), (expected, expected_buffers, expected_scale) = found[rank][number]
        torch.testing.assert_close(told, expected, rtol=1e-4, atol=1e-6)
        assert scale == expected_scale
        if rank == 0:  # torch's other ranks take its buffers in their next step
            torch.testing.assert_close(buffers, expected_buffers)
    # A step whose gradients overflow changes no weight; all others do.
    weights = [one[2] for one in found[0][number][0][0]]
    same = [torch.equal(weights[at][0], weights[at + 1][0]) for at in range(STEPS - 1)]
    assert same == [
        bool(CASES[number].get("has_scaler")) and at == OVERFLOWS_AT - 1 for at in range(5)
    ]


def test_frozen_parameters_tell_ranks_apart_that_have_others():
    run = SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False)
    told = []
    for change in (0.0, 0.0, 1.0):
        model = Net()
        model.unused.requires_grad_(False)
        model.unused.weight += change
        trained = [one for one in model.parameters() if one.requires_grad]
        dp = swift.DataParallel(model, swift.undoable(torch.optim.AdamW(trained)), run)
        told.append(dp.describe()["frozen"])
    assert told[0] == told[1] != told[2]
    assert all(one.startswith("2 parameters of digest ") for one in told)


def test_a_spare_has_memory_for_state_that_goes_where_no_step_was_made():
    model = Net()
    run = SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False)
    spare = SimpleNamespace(rank=None, world_size=1, reads_whole_batches=False)
    kept = []
    for place in (run, spare):
        dp = swift.DataParallel(model, swift.undoable(torch.optim.AdamW(model.parameters())), place)
        dp.warm()
        entries = range(len(dp.versions()) - 1)
        kept.append({len(dp.state_of(entry)) for entry in entries})
        assert dp.versions() == [0] * (len(entries) + 1)
    assert kept == [{1}, {4}]
    places = [dp.state_of(entry) for entry in entries]
    for entry in entries:
        dp.fill(entry, dict(list(places[entry].items())[:1]), 0)
    assert not dp.optimizer.optimizer.state
