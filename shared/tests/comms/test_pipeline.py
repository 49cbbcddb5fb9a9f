"""Micro-batches through stages, against one process's autograd in float64."""

from weakref import WeakSet

import pytest
import torch

from shared.comms import Group
from shared.comms.pipeline import run_1f1b, run_forward
from shared.errors import DataError

DIM = 4
ROWS = (3, 1, 7, 0, 2, 5)
"""Of micro-batches: none is like the one before, and one is empty."""
COUNTS = (0, 1, 2, 3, 6)
DTYPE = torch.float64


def weights(num_stages):
    draw = torch.Generator().manual_seed(num_stages)
    made = [torch.randn(DIM, DIM, generator=draw, dtype=DTYPE) for _ in range(num_stages)]
    return [weight.requires_grad_() for weight in made]


def inputs(count):
    draw = torch.Generator().manual_seed(count)
    return [torch.randn(rows, DIM, generator=draw, dtype=DTYPE) for rows in ROWS[:count]]


def compute(weight, x):
    return torch.sin(torch.tanh(x @ weight))


def loss_of(k, states):
    return (states * torch.linspace(-1, 1, DIM, dtype=DTYPE)).sum() * (k + 1)


class Saved:
    """A tensor that autograd keeps for a micro-batch's backward pass."""

    def __init__(self, k, tensor):
        self.k, self.tensor = k, tensor


class Recorded:
    """A stage's computation, with what it was asked for and what was alive."""

    def __init__(self, weight, first_inputs, is_last):
        self.weight, self.inputs, self.is_last = weight, first_inputs, is_last
        self.order, self.losses, self.seen = [], [], []
        self.saved, self.most_alive = WeakSet(), 0

    def __call__(self, k, x):
        self.order.append(("forward", k))
        self.seen.append(None if x is None else x.detach().clone())
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self.save(k, tensor), lambda kept: kept.tensor
        )
        with hooks:
            out = compute(self.weight, self.inputs[k] if x is None else x)
            if self.is_last:
                out = loss_of(k, out)
                self.losses.append(out.detach())
        out.register_hook(lambda _: self.order.append(("backward", k)))
        return out

    def save(self, k, tensor):
        kept = Saved(k, tensor.detach())
        self.saved.add(kept)
        self.most_alive = max(self.most_alive, len({one.k for one in self.saved}))
        return kept


def shapes(count):
    return [(rows, DIM) for rows in ROWS[:count]]


def on_a_stage(num_stages):
    """Runs on each rank, of which the first ones are stages; what each number of inputs gave."""
    group = Group.of(range(num_stages))
    return None if group.rank < 0 else [trained(group, count) for count in COUNTS]


def trained(group, count):
    weight = weights(group.world_size)[group.rank]
    stage = Recorded(weight, inputs(count), group.rank == group.world_size - 1)
    before = group.ledger.snapshot()
    run_1f1b(group, shapes(count), stage, dtype=DTYPE)
    sent = group.ledger.snapshot().diff(before).by_peer()
    bytes_sent = {peer: traffic.sent_bytes for peer, traffic in sent.items()}
    rest = len(stage.saved)
    return weight.grad, stage.losses, stage.order, stage.most_alive, rest, bytes_sent


def by_one_process(num_stages, count):
    """Gradients by stage, and losses."""
    made, losses = weights(num_stages), []
    for k, states in enumerate(inputs(count)):
        for weight in made:
            states = compute(weight, states)
        losses.append(loss_of(k, states))
    grads = torch.autograd.grad(sum(losses), made) if losses else [None] * num_stages
    return grads, [loss.detach() for loss in losses]


def order_of_1f1b(num_later, count):
    """Forward passes ahead, then pairs, then backward passes."""
    ahead = min(num_later, count)
    order = [("forward", k) for k in range(ahead)]
    for k in range(ahead, count):
        order += [("forward", k), ("backward", k - ahead)]
    return order + [("backward", k) for k in range(count - ahead, count)]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_have_one_processs_losses_and_gradients_in_the_order_of_1f1b(
    num_stages, pool_of_four
):
    found = pool_of_four.run(on_a_stage, num_stages).results
    assert found[num_stages:] == [None] * (4 - num_stages)
    for at, count in enumerate(COUNTS):
        grads, wanted_losses = by_one_process(num_stages, count)
        for rank in range(num_stages):
            num_later = num_stages - 1 - rank
            grad, losses, order, most_alive, rest, bytes_sent = found[rank][at]
            if grads[rank] is None:
                assert grad is None
            else:
                torch.testing.assert_close(grad, grads[rank], rtol=1e-10, atol=1e-10)
            expected = [] if num_later else wanted_losses
            torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
            assert order == order_of_1f1b(num_later, count)
            assert most_alive == min(num_later + 1, count)
            assert rest == 0
            one_way = DIM * DTYPE.itemsize * sum(ROWS[:count])
            peers = {peer for peer in (rank - 1, rank + 1) if 0 <= peer < num_stages}
            assert bytes_sent == {peer: one_way for peer in peers if one_way}


@pytest.mark.parametrize("is_group", [False, True])
def test_one_stage_needs_no_other(is_group, pool):
    grads, wanted = by_one_process(1, 6)
    found = pool.run(on_one_rank).results[0] if is_group else trained_alone(None)
    torch.testing.assert_close(found[0], grads[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[1], wanted)
    assert found[2:] == (order_of_1f1b(0, 6), 1)


def on_one_rank():
    groups = [Group.of([rank]) for rank in range(2)]
    return trained_alone(groups[Group.world().rank])


def trained_alone(group):
    (weight,) = weights(1)
    stage = Recorded(weight, inputs(6), is_last=True)
    run_1f1b(group, shapes(6), stage, dtype=DTYPE)
    return weight.grad, stage.losses, stage.order, stage.most_alive


def accumulated():
    """Two runs, the second of a loss that does not depend on the states, and one without any."""
    group = Group.world()
    weight = weights(2)[group.rank]
    stage = Recorded(weight, inputs(3), is_last=group.rank == 1)

    def constant(k, x):
        return weight.sum() if group.rank else compute(weight, stage.inputs[k])

    for forward, count in ((stage, 3), (stage, 3), (constant, 2), (stage, 0)):
        run_1f1b(group, shapes(count), forward, dtype=DTYPE)
    return weight.grad


def test_gradients_of_further_runs_are_added(pool):
    first, last = by_one_process(2, 3)[0]
    found = pool.run(accumulated).results
    torch.testing.assert_close(found[0], 2 * first, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[1], 2 * last + 2, rtol=1e-10, atol=1e-10)


def evaluated():
    group = Group.world()
    weight = weights(2)[group.rank]
    first, kept = inputs(6), []

    def forward(k, x):
        out = compute(weight, first[k] if x is None else x)
        kept.append((k, out))
        return out

    run_forward(group, shapes(6), forward, dtype=DTYPE)
    assert not any(out.requires_grad for _, out in kept)
    return kept


def test_forward_passes_alone_leave_no_graph(pool):
    first, last = weights(2)
    found = pool.run(evaluated).results
    assert [[k for k, _ in kept] for kept in found] == [list(range(6))] * 2
    for states, (_, one), (_, two) in zip(inputs(6), *found, strict=True):
        torch.testing.assert_close(one, compute(first, states).detach())
        torch.testing.assert_close(two, compute(last, compute(first, states)).detach())


def strided_and_narrow():
    """States that do not lie in order, in a half type; what came and its gradient."""
    group = Group.world()
    leaf = torch.arange(6.0, dtype=torch.bfloat16).view(3, 2).requires_grad_()
    came = []

    def forward(_, x):
        if x is None:
            return leaf.t()
        came.append(x.detach().clone())
        return (x * torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).sum()

    run_1f1b(group, [(2, 3)], forward, dtype=torch.bfloat16)
    return came, leaf.grad


def test_states_of_any_strides_and_type_arrive(pool):
    (_, grad), (came, _) = pool.run(strided_and_narrow).results
    assert came[0].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert came[0].dtype == grad.dtype == torch.bfloat16
    assert grad.tolist() == [[1, 4], [2, 5], [3, 6]]


def announced():
    """Stages between which shape and type differ, told by nobody beforehand; in two runs."""
    group, came, grads, num_rows = Group.world(), [], [], []
    leaf = torch.arange(12.0).view(3, 4).requires_grad_()

    def forward(k, x):
        if x is None:
            return (leaf * (k + 1))[: num_rows[-1]].to(torch.bfloat16)
        came.append((tuple(x.shape), x.dtype, x.tolist()))
        return x.float().sum() * (k + 1)

    for rows in (2, 3):
        num_rows.append(rows)
        run_1f1b(
            group, 2, forward,
            after_backward=lambda k, grad: grads.append((k, None if grad is None else grad.tolist())),
        )  # fmt: skip
    return came, grads, leaf.grad


def test_shapes_and_types_that_only_the_sender_knows_are_announced(pool):
    (_, order, grad), (came, sent, _) = pool.run(announced).results
    whole = torch.arange(12.0).view(3, 4)
    rows_and_k = [(2, 0), (2, 1), (3, 0), (3, 1)]
    expected = [
        ((rows, 4), torch.bfloat16, (whole * (k + 1))[:rows].tolist()) for rows, k in rows_and_k
    ]
    assert came == expected
    assert order == [(k, None) for _, k in rows_and_k]
    assert sent == [(k, [[k + 1.0] * 4] * rows) for rows, k in rows_and_k]
    # d/dleaf of (k + 1)^2 leaf, over both micro-batches of both runs.
    assert grad.tolist() == [[10.0] * 4] * 2 + [[5.0] * 4]


def unannounceable():
    if Group.world().rank:
        return
    for out in (torch.ones(1, dtype=torch.int32), torch.ones([1] * 9)):
        with pytest.raises(
            DataError, match=r"at most 8 dimensions and a type among torch\.float32"
        ):
            run_1f1b(Group.world(), 1, lambda k, x, out=out: out)


def test_states_that_no_header_announces_are_refused(pool):
    pool.run(unannounceable)


def refusals():
    if Group.world().rank:
        return
    for out, text in (
        (
            torch.ones(2, 4),
            r"micro-batch 0: expected states \[3, 4\] of torch.float64 for the next",
        ),
        (torch.ones(2, 4, dtype=DTYPE), r"got \[2, 4\] of torch.float64; give the runner"),
        (torch.ones(3, 4), r"got \[3, 4\] of torch.float32"),
    ):
        for run in (run_1f1b, run_forward):
            with pytest.raises(DataError, match=text):
                run(Group.world(), [(3, 4)], lambda k, x, out=out: out, dtype=DTYPE)


def test_states_that_the_next_stage_does_not_expect_are_refused_before_they_are_sent(pool):
    pool.run(refusals)
