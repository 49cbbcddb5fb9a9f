"""Waves of prompts, beside every way to cut them."""

from itertools import product

import pytest

from llmpq.planner.waves import cut_waves


def work_of(lengths, waves, new_tokens):
    return sum(
        len(wave) * max(lengths[number] for number in wave) + 32 * new_tokens for wave in waves
    )


def test_a_long_prompt_pads_no_short_ones():
    lengths = [20] * 15 + [1500] + [20] * 16
    assert cut_waves(lengths, 32, 32) == [[15], [n for n in range(32) if n != 15]]


def test_prompts_of_like_lengths_fill_their_waves():
    assert cut_waves([5, 9, 7, 9, 8], 2, 16) == [[1, 3], [4, 2], [0]]
    assert cut_waves([], 4, 16) == []
    assert cut_waves([3], 4, 16) == [[0]]


def test_waves_stay_full_where_cuts_save_little():
    lengths = [100, 90, 85]  # 349 tokens of work in full waves, 344 with the longest prompt alone
    assert cut_waves(lengths, 2, 1) == [[0, 1], [2]]
    assert cut_waves([100, 30, 25], 2, 1) == [[0], [1, 2]]


@pytest.mark.parametrize("lengths", [(900, 5, 5, 300, 280, 4, 4), (7, 600, 8, 590, 1, 2, 3)])
def test_cuts_take_as_little_work_as_any(lengths):
    new_tokens, most = 4, 4
    waves = cut_waves(lengths, most, new_tokens)
    assert sorted(number for wave in waves for number in wave) == list(range(7))
    assert max(map(len, waves)) <= most
    order, least = sorted(range(7), key=lambda n: -lengths[n]), float("inf")
    for cuts in product([0, 1], repeat=6):
        cut, begin = [], 0
        for end in [n + 1 for n in range(6) if cuts[n]] + [7]:
            cut.append(order[begin:end])
            begin = end
        if max(map(len, cut)) <= most:
            least = min(least, work_of(lengths, cut, new_tokens))
    assert work_of(lengths, waves, new_tokens) == least
