"""The problem that rank 0 solves: whose rounds last together, what is hidden, what bytes are."""

import numpy as np
import pytest
import torch

import adaqp
from adaqp.messages.assigner import assign_widths, problem_of
from adaqp.messages.network import LinkTable
from adaqp.messages.wire import row_bytes
from adaqp.policy import Adaptive

# Channel, receiver, rows and beta of a group, by sender: two layers on three ranks.
TABLES = [
    np.array([[0, 1, 100, 2.0], [0, 2, 50, 1.0], [1, 1, 100, 4.0]]),
    np.array([[0, 2, 100, 3.0], [1, 0, 30, 1.0]]),
    np.array([[0, 0, 100, 5.0], [1, 1, 70, 6.0]]),
]
SHAPES = [(16, 4), (32, 4)]


def problem(scope_tables=TABLES, hidden_s=0.0, **settings):
    links = LinkTable(
        s_per_byte=np.array([[0, 1, 2], [3, 0, 4], [5, 6, 0]]) * 1e-8,
        latency_s=np.array([[0, 1, 2], [3, 0, 4], [5, 6, 0]]) * 1e-3,
        clamped=np.zeros((3, 3), dtype=bool),
    )
    policy = Adaptive(**settings)
    return problem_of(scope_tables, SHAPES, policy, links, torch.bfloat16, hidden_s)


def test_rounds_of_two_layers_follow_one_another():
    found = problem()
    # Two layers of two rounds each, three channels in a round.
    assert np.bincount(found.round_of).tolist() == [3, 3, 3, 3]
    choice = found.uniform(0)
    alone = [problem([table[table[:, 0] == layer] for table in TABLES]).round_s for layer in (0, 1)]
    each = [seconds(np.zeros(n, dtype=np.int64)) for seconds, n in zip(alone, (4, 3), strict=True)]
    assert found.round_s(choice).tolist() == pytest.approx(np.concatenate(each).tolist())


def test_a_group_goes_from_its_sender_to_its_receiver():
    found = problem()
    sender = [0, 0, 0, 1, 1, 2, 2]
    everything = np.concatenate(TABLES)
    for group, (layer, receiver, rows, beta) in enumerate(everything):
        channel = found.channel[group]
        cost = 3 * sender[group] + int(receiver)
        weights = [0, 1, 2, 3, 0, 4, 5, 6, 0]
        assert found.s_per_byte[channel] == pytest.approx(weights[cost] * 1e-8)
        assert found.latency_s[channel] == pytest.approx(weights[cost] * 1e-3)
        shift = (int(receiver) - sender[group]) % 3
        assert found.round_of[channel] == shift - 1 + 2 * int(layer)
        assert found.beta[group] == beta
        dim, itemsize = SHAPES[int(layer)]
        per_row = [row_bytes(b, dim, itemsize, torch.bfloat16) for b in (2, 4, 8)]
        assert found.bytes[group].tolist() == [rows * size for size in per_row]


def test_only_an_aware_policy_counts_hidden_seconds():
    assert problem(hidden_s=0.25).hidden_s == 0
    assert problem(hidden_s=0.25, overlap_aware=True).hidden_s == 0.25


def widest(folder, scope, hidden):
    """The most bits of each layer and direction where seconds count and hidden ones are free.

    Args:
        hidden: {rank: for each layer and direction, what it hides, in exchanges at 8 bits}.
    """
    dg = adaqp.load(folder)
    links = LinkTable.uniform(2, 1e5)
    policy = Adaptive(scope=scope, overlap_aware=True, first_at=100, lam=0.0)
    with dg.messages(policy, links=links, backward="pull") as messages:
        for _ in range(2):
            h = dg.feat[:, :8].clone().requires_grad_()
            dg.aggregate(dg.aggregate(h)).square().sum().backward()
        sides = messages.sides
        names = sorted(sides)
        for name, share in zip(names, hidden[dg.rank], strict=True):
            rows = max(len(dg.pull.send_rows), dg.num_halo)
            num_bytes = rows * row_bytes(8, 8, 4, torch.bfloat16)
            sides[name].hidden_s = share * links.time_s(0, 1, num_bytes)
        assign_widths(dg.group, sides, policy, links, torch.bfloat16)
    return [int(sides[name].send_bits.max()) for name in names]


def test_what_is_hidden_is_the_least_of_all_ranks(sbm, cut, pool2):
    hidden = {0: [1.1, 1.1, 0.0, 0.0], 1: [1.1, 0.0, 1.1, 0.0]}
    assert pool2.run(widest, cut(sbm, 2), "layer", hidden).results == [[8, 2, 2, 2]] * 2


@pytest.mark.parametrize(("share", "bits"), [(1.1, [8, 8, 8, 8]), (0.0, [2, 2, 2, 2])])
def test_layers_in_one_problem_add_up_what_is_hidden(share, bits, sbm, cut, pool2):
    hidden = {rank: [4 * share, 0.0, 0.0, 0.0] for rank in range(2)}
    assert pool2.run(widest, cut(sbm, 2), "global", hidden).results == [bits] * 2
    hidden = {rank: [share] * 4 for rank in range(2)}
    assert pool2.run(widest, cut(sbm, 2), "global", hidden).results == [bits] * 2
