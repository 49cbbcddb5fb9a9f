"""torch's own backward and step in place of dp.backward: on two ranks, the same bits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import swift
from shared.comms import Group
from shared.comms.init import alone
from shared.errors import ConfigError, DataError
from shared.kernels.digest import digest

STEPS, CLIP = 4, 0.1


class Net(torch.nn.Module):
    """The second layer has a gradient on one rank alone, and in odd steps on none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8)
        self.sometimes, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

    def forward(self, x, step):
        hidden = self.norm(self.first(x)).tanh()
        if step % 2 == 0 and Group.world().rank == 0:
            hidden = hidden + self.sometimes(hidden)
        return self.last(hidden)


class Wrapper(torch.optim.Optimizer):
    """Steps by an optimizer that it holds, as those do that look ahead or clip."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], 0.05)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def with_momentum(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def without_momentum(parameters):
    return torch.optim.SGD(parameters, 0.05)


def build(is_frozen=False, make=with_momentum, **settings):
    run = SimpleNamespace(rank=Group.world().rank, world_size=2, reads_whole_batches=False)
    model = Net()
    for parameter in (*model.first.parameters(), *model.norm.parameters()):
        parameter.requires_grad_(not is_frozen)
    opt = swift.undoable(make(model.parameters()))
    dp = swift.DataParallel(model, opt, run, bucket_mb=3e-4, **settings)
    dp.regroup(Group.world())
    return model, opt, dp


def losses_of(dp, step, parts=1):
    draw = torch.Generator().manual_seed(10 * step + Group.world().rank)
    x, y = torch.randn(8, 5, generator=draw), torch.randint(0, 3, (8,), generator=draw)
    for part in range(parts):
        yield cross_entropy(dp(x[part::parts], step), y[part::parts]) / parts


def own(model, opt, dp, step, parts=1):
    for part, loss in enumerate(losses_of(dp, step, parts)):
        dp.backward(loss, update=part == parts - 1)


def own_in_parts(model, opt, dp, step):
    own(model, opt, dp, step, 2)


def plain(model, opt, dp, step):
    opt.zero_grad()
    for loss in losses_of(dp, step):
        loss.backward()
    opt.step()


def by_torchs_optimizer(model, opt, dp, step):
    next(losses_of(dp, step)).backward()
    opt.optimizer.step()
    model.zero_grad()


def by_closure(model, opt, dp, step):
    def closure():
        opt.zero_grad(set_to_none=False)
        loss = next(losses_of(dp, step))
        loss.backward()
        return loss

    assert opt.step(closure).item() > 0


def by_hand(model, opt, dp, step):
    used = [one for one in model.parameters() if step % 2 == 0 or not is_sometimes(model, one)]
    loss = next(losses_of(dp, step))
    found = torch.autograd.grad(loss, used, allow_unused=True)
    for one, grad in zip(used, found, strict=True):
        one.grad = grad
    opt.step()


def is_sometimes(model, parameter):
    return any(parameter is one for one in model.sometimes.parameters())


def in_parts(model, opt, dp, step):
    first, second = losses_of(dp, step, 2)
    with dp.no_sync():
        first.backward()
    second.backward()
    opt.step()


def in_parts_without_sync(model, opt, dp, step):
    with dp.no_sync():
        for loss in losses_of(dp, step, 2):
            loss.backward()
    opt.step()


def mixed(model, opt, dp, step):
    with dp.no_sync():
        for loss in losses_of(dp, step, 2):
            dp.backward(loss)
    opt.step()


def in_parts_with_sync(model, opt, dp, step):
    for loss in losses_of(dp, step, 2):
        loss.backward()
    opt.step()


def in_parts_with_sync_first(model, opt, dp, step):
    first, second = losses_of(dp, step, 2)
    first.backward()
    with dp.no_sync():
        second.backward()
    opt.step()


def clipped(model, opt, dp, step):
    next(losses_of(dp, step)).backward()
    torch.nn.utils.clip_grad_norm_(dp.parameters(), CLIP)
    opt.step()


def thawed(model, opt, dp, step):
    """Trains what was frozen when it was given to DataParallel, and only that."""
    for layer in (model.first, model.norm, model.sometimes, model.last):
        layer.requires_grad_(layer is model.first)
    clipped(model, opt, dp, step)


def train_thawed(is_frozen):
    model, opt, dp = build(is_frozen=is_frozen)
    dp.begin(0)
    thawed(model, opt, dp, 0)
    dp.finish(0)
    return digest(one.detach() for one in model.parameters())


def train(step_fn, **settings):
    model, opt, dp = build(**settings)
    next(losses_of(dp, 0)).backward()  # a try before the first step leaves nothing
    for step in range(STEPS):
        dp.begin(step)
        step_fn(model, opt, dp, step)
        dp.finish(step)
    return model


def digest_of(*args, **settings):
    return digest(one.detach() for one in train(*args, **settings).parameters())


def scale(is_infinite):
    """A step that GradScaler leaves out changes nothing, and is none the less done."""
    model, opt, dp = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = [one.detach().clone() for one in model.parameters()]
    dp.begin(0)
    loss = next(losses_of(dp, 0)) * (float("inf") if is_infinite else 1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    dp.finish(0)
    assert set(opt.marks) == {1}
    return all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def refuse(error, act, **settings):
    model, opt, dp = build(**settings)

    def train():
        for step in range(3):
            dp.begin(step)
            act(model, opt, dp, step)
            dp.finish(step)

    with pytest.raises(error) as caught:
        train()
    return str(caught.value)


def without_step(model, opt, dp, step):
    next(losses_of(dp, step)).backward()


def by_both(model, opt, dp, step):
    dp.backward(next(losses_of(dp, step)), update=False)
    next(losses_of(dp, step)).backward()


def writes_aside(model, opt, dp, step):
    plain(model, opt, dp, step)
    if step == 1:
        model.last.bias.data[Group.world().rank] += 1


def by_a_second_optimizer(model, opt, dp, step):
    elsewhere = torch.nn.Parameter(torch.ones(1))
    elsewhere.grad = torch.ones(1)
    torch.optim.SGD([elsewhere], 0.1).step()  # it may do what it likes with what is not ours
    plain(model, opt, dp, step)
    torch.optim.SGD(model.last.parameters(), 0.1).step()


def moves(is_of_module):
    """Moves a frozen parameter of the module, or one that only the optimizer has."""
    run = SimpleNamespace(rank=Group.world().rank, world_size=2, reads_whole_batches=False)
    model, moved = Net(), torch.nn.Parameter(torch.zeros(3), requires_grad=not is_of_module)
    if is_of_module:
        model.frozen = moved
    trained = [one for one in (*model.parameters(), moved) if one.requires_grad]
    opt = swift.undoable(torch.optim.SGD(trained, 0.1))
    dp = swift.DataParallel(model, opt, run)
    dp.regroup(Group.world())
    dp.begin(0)
    plain(model, opt, dp, 0)
    moved.data += Group.world().rank
    with pytest.raises(DataError) as caught:
        dp.finish(0)
    return str(caught.value)


def repeat(is_equal):
    """What a step that is repeated says of the one that was torn."""
    model, opt, dp = build()
    dp.begin(0)
    next(losses_of(dp, 0)).backward()
    dp.regroup(Group.world())
    dp.begin(0)
    dp.regroup(Group.world())  # it is torn again, before it has gradients
    dp.begin(0)
    plain(model, opt, dp, 0 if is_equal else 2)
    difference = dp.finish(0)
    torch.optim.SGD(model.parameters(), 0.1).step()  # is free again, though a step was torn
    return difference


def do_all():
    same = {
        "own": [own, plain, by_torchs_optimizer, by_closure, by_hand],
        "parts": [own_in_parts, in_parts, in_parts_without_sync, mixed],
    }
    found = {name: [digest_of(one) for one in functions] for name, functions in same.items()}
    found["clipped"] = [
        digest_of(own, clip_norm=CLIP),
        digest_of(clipped),
        digest_of(plain, clip_norm=CLIP),
    ]
    expected = train(own_in_parts)
    for function in (in_parts_with_sync, in_parts_with_sync_first):
        pairs = zip(train(function).parameters(), expected.parameters(), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    return {
        **found,
        "wrapped": [digest_of(plain, make=make) for make in (without_momentum, Wrapper)],
        "thawed": [train_thawed(False), train_thawed(True)],
        "scaled": [scale(False), scale(True)],
        "refused": [
            refuse(DataError, without_step),
            refuse(ConfigError, by_both),
            refuse(DataError, writes_aside),
            refuse(ConfigError, by_a_second_optimizer),
            moves(is_of_module=True),
            moves(is_of_module=False),
        ],
        "repeated": [repeat(True), repeat(False)],
    }


@pytest.fixture(scope="module")
def found(two_ranks):
    return two_ranks.run(do_all).results


@pytest.mark.parametrize("name", ["own", "parts", "clipped", "wrapped", "thawed"])
def test_torchs_backward_and_step_give_the_same_bits_on_all_ranks(found, name):
    assert len({digest for ranks in found for digest in ranks[name]}) == 1


def test_a_step_that_a_scaler_leaves_out_is_done(found):
    assert [ranks["scaled"] for ranks in found] == [[False, True]] * 2


def test_what_parts_the_ranks_is_refused_in_the_first_step_that_shows_it(found):
    for ranks in found:
        no_step, both, written, second, frozen, elsewhere = ranks["refused"]
        assert "step 0: expected one update, got parameters with [0] steps" in no_step
        assert "optimizer.step() of swift.undoable's optimizer" in no_step
        assert "expected either dp.backward(loss) or loss.backward() in a step, got both" in both
        text = "expected equal parameters on all ranks, got another {} on ranks [1] than on rank 0"
        assert f"step 1: {text.format('last.bias')}" in written
        assert f"step 0: {text.format('frozen')}" in frozen
        assert f"step 0: {text.format('p8')}" in elsewhere
        assert "last.weight: expected steps by swift.undoable's SGD alone, got one by ano" in second


def test_a_repeated_step_with_other_gradients_is_said(found):
    for ranks in found:
        same, other = ranks["repeated"]
        assert same is None
        assert other.startswith("step 0 was repeated, but its gradients differ from those before")


def test_parameters_are_compared_early_and_then_now_and_then(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "swift.training.reducer.expect_equal_parameters", lambda *given: compared.append(given[2])
    )
    run = SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False)
    model = torch.nn.Linear(2, 1)
    opt = swift.undoable(torch.optim.SGD(model.parameters(), 0.1))
    dp = swift.DataParallel(model, opt, run, compare_every=6)

    def train(steps):
        for step in steps:
            dp.begin(step)
            dp(torch.ones(1, 2)).sum().backward()
            opt.step()
            dp.finish(step)

    with alone() as group:
        dp.regroup(group)
        train(range(13))
        dp.regroup(group)  # behind a recovery early again
        train(range(13, 15))
        with pytest.raises(ConfigError, match=r"inside run\.loop's step function, got it outside"):
            opt.step()
        torch.optim.SGD(model.parameters(), 0.1).step()  # is refused within steps only
    assert [step + 1 for step in compared] == [1, 2, 4, 6, 12, 14, 15]
    with pytest.raises(ConfigError, match="compare_every: expected at least one step, got 0"):
        swift.DataParallel(model, opt, run, compare_every=0)


def test_what_undoing_needs_is_let_go_at_the_first_sum(monkeypatch):
    """Who has added to it has the whole step before; at the last sum, others may begin to update."""
    run = SimpleNamespace(rank=0, world_size=1, reads_whole_batches=False)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    opt = swift.undoable(torch.optim.SGD(model.parameters(), 0.1))
    dp = swift.DataParallel(model, opt, run, bucket_mb=1e-6)
    told = []
    monkeypatch.setattr(
        "swift.training.buckets.reach", lambda point, bucket=None: told.append((point, bucket))
    )
    confirm = opt.confirm
    monkeypatch.setattr(opt, "confirm", lambda: (told.append("confirm"), confirm()))
    dp = swift.DataParallel(model, opt, run, bucket_mb=1e-6)
    with alone() as group:
        dp.regroup(group)
        dp.begin(0)
        dp.backward(dp(torch.ones(1, 2)).sum())
        dp.finish(0)
    assert told.count("confirm") == 1
    assert told.index("confirm") == told.index(("reduce", 0)) + 1 < told.index(("reduce", 1))
