import pytest
import torch
from optimizers import INVERTED, bits, make_parameters, set_gradients

from shared.errors import ConfigError, DataError
from swift.undo.undoable import undoable


def snapshot(opt):
    return [{name: t.clone() for name, t in opt.state_of(i).items()} for i in range(len(opt.marks))]


def set_calm_gradients(opt, step):
    g = torch.Generator().manual_seed(step)
    for p in opt.parameters:
        p.grad = torch.randn(p.shape, generator=g)


@pytest.mark.parametrize("name", list(INVERTED))
def test_three_steps_back_are_right_up_to_rounding(name):
    opt = undoable(INVERTED[name](make_parameters()), mode="arith")
    states, gradients = [], []
    for step in range(5):
        for group in opt.param_groups:
            group["lr"] = 1e-2 * (step + 1)
        states.append(snapshot(opt))
        set_calm_gradients(opt, step)
        gradients.append([p.grad.clone() for p in opt.parameters])
        opt.step()
    assert opt.undo_bytes == 0
    opt.undo()
    opt.undo(gradients[3])
    opt.undo(gradients[2])
    assert opt.marks == [2] * 4
    for now, then, grads in zip(snapshot(opt), states[2], gradients[2], strict=True):
        assert now.keys() == then.keys()
        for key, value in then.items():
            # What was added and taken away again leaves roundings of its own size.
            scale = float(value.abs().max() + grads.square().max())
            torch.testing.assert_close(now[key], value, rtol=1e-4, atol=1e-5 * scale)
    # The published arithmetic is not exact: this is what the residuals are for.
    if name != "sgd":
        assert any(
            not torch.equal(now[k], then[k])
            for now, then in zip(snapshot(opt), states[2], strict=True)
            for k in then
        )
    opt.undo(gradients[1])
    opt.undo(gradients[0])
    empty = 1 if "adagrad" not in name else 3
    assert all(len(now) == empty for now in snapshot(opt))
    with pytest.raises(DataError, match="got none"):
        opt.undo(gradients[0])


@pytest.mark.parametrize(
    ("make", "key"), [(torch.optim.Adam, "exp_avg_sq"), (torch.optim.RMSprop, "square_avg")]
)
def test_second_moments_never_fall_below_zero(make, key, caplog):
    """With decay in the gradient, the weights' own rounding makes the inverse negative for some."""
    g = torch.Generator().manual_seed(3)
    p = torch.nn.Parameter(torch.randn(50_000, generator=g))
    opt = undoable(make([p], weight_decay=0.1), mode="arith")
    p.grad = -0.1 * p.detach()
    opt.step()
    assert float(opt.optimizer.state[p][key].max()) < 1e-12
    p.grad = torch.randn(p.shape, generator=g)
    opt.step()
    after = opt.optimizer.state[p][key].clone()
    opt.undo()
    grad, share = p.grad + 0.1 * p.detach(), 0.001 if make is torch.optim.Adam else 0.01
    taken = (share * grad) * grad if make is torch.optim.Adam else grad * grad * (1 - 0.99)
    unheld = after - taken
    num_below_zero = int((unheld < 0).sum())
    assert num_below_zero
    told = f"{num_below_zero} squared averages of {make.__name__} came out below 0 as arithmetic"
    assert [record.message.startswith(told) for record in caplog.records] == [True]
    held = opt.optimizer.state[p][key]
    assert float(held.min()) == 0
    assert float(held.max()) < share * 1e-3


class OwnAdamW(torch.optim.AdamW):
    """Its step may be another."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "group 0 of AdamW, where amsgrad"),
        (lambda p: torch.optim.Adam(p, betas=(0.0, 0.9)), "betas"),
        (lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=1.0), "erases the weights"),
        (lambda p: torch.optim.SGD(p, lr=2.0, weight_decay=0.5), "erases the weights"),
        (lambda p: torch.optim.RMSprop(p, alpha=0.0), "alpha=0"),
        (lambda p: torch.optim.NAdam(p), "NAdam has no known inverse"),
        (lambda p: OwnAdamW(p), "OwnAdamW has no known inverse"),
        (
            lambda p: torch.optim.SGD(
                [{"params": p[:2]}, {"params": p[2:], "lr": 1, "weight_decay": 1}]
            ),
            "group 1 of SGD",
        ),
    ],
)
def test_steps_without_inverse_are_refused_when_wrapped(make, words):
    with pytest.raises(ConfigError, match=f"{words}.*use mode='exact'"):
        undoable(make(make_parameters()), mode="arith")
    undoable(make(make_parameters()), mode="exact")


def test_types_that_lose_too_much_are_refused():
    with pytest.raises(ConfigError, match="bfloat16 loses more"):
        undoable(torch.optim.SGD(make_parameters(torch.bfloat16)), mode="arith")
    opt = undoable(torch.optim.SGD(make_parameters()), mode="arith")
    set_gradients(opt.parameters, 0)
    opt.parameters[1].grad = opt.parameters[1].grad.to_sparse()
    before = bits(opt.optimizer)
    with pytest.raises(DataError, match="sparse"):
        opt.step()
    assert bits(opt.optimizer) == before
    assert opt.marks == [0] * 4


def test_gradients_of_other_shapes_are_refused():
    opt = undoable(torch.optim.SGD(make_parameters()), mode="arith")
    set_gradients(opt.parameters, 0)
    opt.step()
    with pytest.raises(DataError, match="a gradient for each parameter"):
        opt.undo([torch.zeros(1)])
    with pytest.raises(DataError, match="a gradient for each parameter"):
        opt.undo([torch.zeros(9) for _ in range(4)])
    with pytest.raises(DataError, match="gradient is gone"):
        opt.undo([None] * 4)
    assert opt.marks == [1] * 4


def test_infinite_results_ask_for_a_fetch():
    p = torch.nn.Parameter(torch.tensor([1e38]))
    opt = undoable(torch.optim.SGD([p], lr=1.0), mode="arith")
    p.grad = torch.tensor([-3e38])
    opt.step()
    with pytest.raises(DataError, match="infinite or NaN: fetch"):
        opt.undo()


def test_commit_keeps_nothing():
    opt = undoable(torch.optim.AdamW(make_parameters()), mode="commit")
    set_gradients(opt.parameters, 0)
    opt.step()
    assert opt.marks == [1] * 4
    assert opt.undo_bytes == 0
    with pytest.raises(ConfigError, match="keeps nothing"):
        opt.undo()
    opt.undo_only([])
