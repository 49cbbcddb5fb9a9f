"""Draws of the rounding noise: which exchanges share one, how large it is, and whom it reaches."""

import pytest
import torch

import adaqp
from adaqp.messages.channel import noise_per_step_sq
from adaqp.messages.wire import BufferLayout, pack, unpack
from adaqp.policy import Adaptive, Fixed

DIM = 64


def pattern():
    """A row whose values lie between levels; every node has it, so that only noise differs."""
    return torch.linspace(0, 1, DIM).square()


def halo_rows(folder, seed, steps):
    """Rows that came in two exchanges of each step, and the senders' rows that they are.

    Returns:
        ({(step, exchange, sender): {place in the sender's rows: row as it came}}, by sender).
    """
    dg = adaqp.load(folder)
    places = [dg.pull.send_rows[dg.pull.sent_to(p)].tolist() for p in range(dg.num_parts)]
    came = {}
    with dg.messages(Fixed(1), seed=seed):
        for step in range(steps):
            x = pattern().expand(dg.num_local, DIM).clone().requires_grad_()
            two = [dg.halo(x), dg.halo(x)]
            sum(rows.sum() for rows in two).backward()
            for exchange, rows in enumerate(two):
                halo = rows.detach()[dg.num_local :]
                for sender in range(dg.num_parts):
                    came[step, exchange, sender] = halo[dg.pull.received_from(sender)]
    return came, places


@pytest.fixture(scope="module")
def draws(sbm, cut, pool3):
    """{(seed, step, exchange, sender, receiver): {row of the sender: as it came}}."""
    found = {}
    for seed in (5, 6):
        ranks = pool3.run(halo_rows, cut(sbm, 3), seed, 2).results
        places = [sent for _, sent in ranks]
        for receiver, (came, _) in enumerate(ranks):
            for (step, exchange, sender), rows in came.items():
                if sender != receiver:
                    names = places[sender][receiver]
                    key = (seed, step, exchange, sender, receiver)
                    found[key] = dict(zip(names, rows, strict=True))
    return found


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("seed", (6, 0, 0, 0, 1)),
        ("step", (5, 1, 0, 0, 1)),
        ("exchange", (5, 0, 1, 0, 1)),
        ("sender", (5, 0, 0, 2, 1)),
        ("receiver", (5, 0, 0, 0, 2)),
    ],
)
def test_rows_of_equal_place_and_values_get_noise_of_their_own(draws, what, other):
    one, other = draws[5, 0, 0, 0, 1], draws[other]
    shared = sorted(set(one) & set(other))
    assert len(shared) > 20
    # With one bit a value, and all values between the two levels, rows would be equal or far apart.
    apart = torch.stack([(one[row] != other[row]).float().mean() for row in shared])
    assert float(apart.mean()) > 0.2, what
    assert float(apart.min()) > 0, what


def test_rows_of_one_message_get_noise_of_their_own(draws):
    rows = torch.stack(list(draws[5, 0, 0, 0, 1].values()))
    assert len(rows.unique(dim=0)) == len(rows)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_noise_is_as_large_as_the_planner_takes_it_for(bits):
    """For rows whose smallest and largest values lie on levels and the others anywhere."""
    x = torch.rand(4_000, 12, generator=torch.Generator().manual_seed(bits))
    layout = BufferLayout(torch.full((len(x),), bits), 12, x.dtype, torch.float32)
    out = torch.empty_like(x)
    buffer, spread = pack(layout, x, torch.arange(len(x)), key=3)
    unpack(layout, buffer, out)
    step = spread / (2**bits - 1)
    measured = float(((out - x).square().sum(1) / step.square()).mean())
    # Uniform values lie less evenly between the two levels of one bit.
    assert measured == pytest.approx(noise_per_step_sq(12), rel=0.02 if bits > 2 else 0.1)


def weights_seen(folder, weight, backward):
    """alpha_sq of both sides after a step, and the squared weights in the operators' matrices."""
    dg = adaqp.load(folder)
    found = {}
    links = adaqp.LinkTable.uniform(2, 12.5e6)
    with dg.messages(Adaptive(), backward=backward, links=links) as messages:
        x = dg.feat[:, :8].clone().requires_grad_()
        dg.aggregate(x, weight).sum().backward()
        found = {name: side.alpha_sq for name, side in messages.sides.items()}
    op = dg.operator(weight)
    dense = torch.zeros(op.halo.num_rows, op.halo.num_cols)
    counts = op.halo.indptr.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    values = torch.ones(op.halo.nnz) if op.halo.weight is None else op.halo.weight
    dense.index_put_((rows, op.halo.indices.long()), values, accumulate=True)
    sent = dg.global_ids[dg.pull.send_rows]
    received = dict(zip(dg.part.halo_ids.tolist(), dense.square().sum(0).tolist(), strict=True))
    return found, sent.tolist(), received


@pytest.mark.parametrize("graph", ["sbm", "directed"])
@pytest.mark.parametrize("weight", ["gcn", "mean", "sum"])
def test_noise_counts_as_often_as_receivers_add_the_row(graph, weight, request, cut, pool2):
    folder = cut(request.getfixturevalue(graph), 2)
    ranks = pool2.run(weights_seen, folder, weight, "push").results
    for (found, sent, _), (_, _, received) in zip(ranks, reversed(ranks), strict=True):
        expected = [received[node] for node in sent]
        assert found["forward0"].tolist() == pytest.approx(expected, rel=1e-5)
        assert len(set(expected)) > 1
        # A gradient pushed home is added once, as it is.
        assert set(found["backward0"].tolist()) == {1.0}


def widths_by_weight(folder):
    """Mean alpha_sq of the rows at the least and at the most bits; all rows have one range."""
    dg = adaqp.load(folder)
    links = adaqp.LinkTable.uniform(2, 12.5e6)
    policy = Adaptive(bits=(2, 8), group_size=1, first_at=1, every=100)
    with dg.messages(policy, links=links, backward="pull") as messages:
        for _ in range(2):
            x = pattern().expand(dg.num_local, DIM).clone().requires_grad_()
            (dg.aggregate(x) * pattern()).sum().backward()
    return {
        name: [float(side.alpha_sq[side.send_bits == b].mean()) for b in (2, 8)]
        for name, side in messages.sides.items()
    }


def test_rows_that_receivers_weigh_more_get_more_bits(sbm, cut, pool2):
    for found in pool2.run(widths_by_weight, cut(sbm, 2)).results:
        for name in ("forward0", "backward0"):
            low, high = found[name]
            assert high > 1.5 * low, (name, low, high)
