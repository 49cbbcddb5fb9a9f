"""Predictions: closed forms on made-up profiles, and what must hold for any."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from adaqp import Adaptive, Drop, Exact, Fixed, LinkTable, Stale
from adaqp.planner.widths import WIDTHS
from adaqp.simulator.profiler import ChannelProfile, Profile
from adaqp.simulator.simulator import predict


def profile(rows_to, *, compute_s=0.1, skew_s=0.0, hidden_s=0.02, channels=2):
    rows = sum(rows_to)
    channel = ChannelProfile(
        dim=100,
        itemsize=4,
        rows_to=rows_to,
        hidden_s=hidden_s,
        pack_s=dict.fromkeys(WIDTHS, 1e-7),
        unpack_s=dict.fromkeys(WIDTHS, 0.0),
        beta=torch.rand(rows, generator=torch.Generator().manual_seed(0)).double(),
    )
    names = [f"forward{n}" for n in range(channels)]
    return Profile(
        compute_s=compute_s,
        reduce_s=0.001,
        skew_s=skew_s,
        channels=dict.fromkeys(names, channel),
    )


def test_exact_without_overlap_is_the_sum_of_its_parts():
    profiles = [profile([0, 1000]), profile([2000, 0], compute_s=0.2)]
    links = LinkTable.uniform(2, 1e6, 0.01)
    guess = predict(profiles, links, Exact(), overlap=None)
    exchange_s = 0.01 + 2000 * 400 / 1e6
    assert guess.epoch_s == pytest.approx(0.2 + 0.001 + 2 * (exchange_s + 2000 * 1e-7))
    assert guess.num_bytes == 2 * 3000 * 400
    assert guess.mean_bits == 32


def test_an_exchange_lasts_as_long_as_its_busiest_rank():
    rows = np.array([[0, 10, 500], [20, 0, 30], [40, 1000, 0]])
    profiles = [profile(r.tolist(), channels=1) for r in rows]
    guess = predict(profiles, LinkTable.uniform(3, 1e6, 0.0), Exact(), overlap=None)
    # Rank 2 sends most; without its first message rank 1 receives most.
    assert guess.seconds["wait"] == pytest.approx((40 + 1000) * 400 / 1e6)
    profiles[2] = profile([0, 1000, 0], channels=1)
    guess = predict(profiles, LinkTable.uniform(3, 1e6, 0.0), Exact(), overlap=None)
    assert guess.seconds["wait"] == pytest.approx((10 + 1000) * 400 / 1e6)


def test_overlap_hides_what_stands_between_and_no_more():
    profiles = [profile([0, 1000]), profile([1000, 0])]
    for rate, hidden in ((1e6, 0.02), (1e9, 0.0004)):
        links = LinkTable.uniform(2, rate, 0.0)
        plain = predict(profiles, links, Exact(), overlap=None)
        hiding = predict(profiles, links, Exact())
        assert plain.epoch_s - hiding.epoch_s == pytest.approx(2 * hidden)


def test_stale_hides_behind_the_whole_step_and_drop_waits_for_nothing():
    profiles = [profile([0, 1000]), profile([1000, 0])]
    links = LinkTable.uniform(2, 1e7, 0.0)
    assert predict(profiles, links, Stale()).seconds["wait"] == 0
    slow = LinkTable.uniform(2, 1e6, 0.0)
    assert predict(profiles, slow, Stale()).seconds["wait"] == pytest.approx(0.8 - 0.1)
    assert predict(profiles, slow, Drop()).num_bytes == 0


def test_a_late_step_lasts_as_long_as_its_slowest_rank_or_all_that_it_sends():
    # Rank 0 computes less than it waits for others; what is sent hides behind both.
    profiles = [profile([0, 1000], skew_s=0.15), profile([1000, 0], compute_s=0.2)]
    for rate, expected in ((1e9, 0.25), (1e6, 0.8)):
        links = LinkTable.uniform(2, rate, 0.0)
        guess = predict(profiles, links, Stale())
        packing_s = guess.seconds["quantise"]
        assert guess.epoch_s == pytest.approx(expected + 0.001 + packing_s)
    assert predict(profiles, links, Drop()).epoch_s == pytest.approx(0.25 + 0.001)


def test_fewer_bits_never_take_longer_and_adaptive_lies_between():
    profiles = [profile([0, 1000, 0]), profile([500, 0, 800]), profile([0, 700, 0])]
    links = LinkTable.uniform(3, 1e6, 1e-4)
    times = [predict(profiles, links, Fixed(b)).epoch_s for b in WIDTHS]
    assert times == sorted(times)
    two, eight = (predict(profiles, links, Fixed(b)) for b in (2, 8))
    for lam in (0.0, 0.5, 1.0):
        guess = predict(profiles, links, Adaptive(lam=lam))
        assert two.epoch_s <= guess.epoch_s * (1 + 1e-9)
        assert guess.epoch_s <= eight.epoch_s * (1 + 1e-9)
    # Only time counts: pairs that no round waits for may still take wider rows for nothing.
    fastest = predict(profiles, links, Adaptive(lam=0.0))
    assert fastest.seconds["wait"] == pytest.approx(two.seconds["wait"], rel=0.01)
    assert fastest.mean_bits >= 2


def test_ranks_hide_reduce_and_unpack_differently_and_the_worst_counts():
    one = profile([0, 1000], hidden_s=0.02, channels=1)
    other = replace(profile([500, 0], hidden_s=0.3, channels=1), reduce_s=0.5)
    links = LinkTable.uniform(2, 1e6, 0.0)
    guess = predict([one, other], links, Exact())
    assert guess.seconds["reduce"] == 0.5
    assert guess.seconds["wait"] == pytest.approx(0.4 - 0.02)
    # Rank 0 packs 1000 rows; rank 1 packs 500 and unpacks 1000.
    slow = replace(other.channels["forward0"], unpack_s=dict.fromkeys(WIDTHS, 1e-5))
    guess = predict([one, replace(other, channels={"forward0": slow})], links, Exact())
    assert guess.seconds["quantise"] == pytest.approx(500 * 1e-7 + 1000 * 1e-5)
