"""The objective against closed forms, and what a problem refuses."""

import numpy as np
import pytest

from llmpq.planner.problem import Problem, batch_s
from shared.errors import ConfigError


def make_problem(**changes) -> Problem:
    settings = {
        "prefill_s": np.ones((4, 2, 2)),
        "decode_s": np.ones((4, 2, 2)),
        "weight_bytes": np.tile([1.0, 2.0], (4, 1)),
        "kv_bytes": np.ones(4),
        "memory_bytes": np.array([20.0, 20.0]),
        "noise": np.tile([1.0, 0.0], (4, 1)),
        "num_prefill": 2,
        "num_decode": 2,
        "new_tokens": 3,
    }
    return Problem(**(settings | changes))


def test_a_ring_waits_for_its_slowest_stage_or_for_a_whole_lap():
    counts = {"num_prefill": 4, "num_decode": 2, "new_tokens": 11}
    # 3 + 3 x 2 of prefill; a token takes two micro-batches of 0.5 on the slowest stage.
    assert batch_s([1.0, 2.0], [0.3, 0.5], **counts) == pytest.approx(9 + 10 * 1.0)
    # With one micro-batch a token takes a lap through both stages.
    counts["num_decode"] = 1
    assert batch_s([1.0, 2.0], [0.3, 0.5], **counts) == pytest.approx(9 + 10 * 0.8)


def test_the_papers_formula_counts_decode_once_with_one_micro_batch():
    counts = {"num_prefill": 1, "num_decode": 1, "new_tokens": 100}
    assert batch_s([100.0], [10.0], **counts, formula="paper") == pytest.approx(110)
    assert batch_s([100.0], [10.0], **counts) == pytest.approx(1090)


def test_messages_delay_a_lap_and_pace_only_where_they_are_slowest():
    counts = {"num_prefill": 3, "num_decode": 4, "new_tokens": 2}
    quick = batch_s(
        [1.0, 1.0], [1.0, 1.0], **counts, prefill_send_s=[0.5, 0.5], decode_send_s=[0.5, 0.5]
    )
    assert quick == pytest.approx((2 + 1 + 2 * 1) + 4 * 1)
    slow = batch_s(
        [1.0, 1.0], [1.0, 1.0], **counts, prefill_send_s=[3.0, 0.0], decode_send_s=[2.0, 0.0]
    )
    assert slow == pytest.approx((2 + 3 + 2 * 3) + 4 * 2)


def test_one_token_needs_no_decoding():
    assert batch_s([1.0], [9.0], num_prefill=2, num_decode=2, new_tokens=1) == pytest.approx(2)


@pytest.mark.parametrize(
    ("prefill_s", "decode_s", "formula"), [([1.0], [], "ring"), ([], [], "ring"), ([1], [1], "x")]
)
def test_stages_that_do_not_match_are_refused(prefill_s, decode_s, formula):
    with pytest.raises(ConfigError, match="expected"):
        batch_s(prefill_s, decode_s, num_prefill=1, num_decode=1, new_tokens=1, formula=formula)


@pytest.mark.parametrize("wrong", [{"num_prefill": 0}, {"num_decode": 0}, {"new_tokens": 0}])
def test_counts_below_one_are_refused(wrong):
    with pytest.raises(ConfigError, match="at least one token and one micro-batch"):
        batch_s([1.0], [1.0], **{"num_prefill": 1, "num_decode": 1, "new_tokens": 1, **wrong})


def test_messages_of_other_stages_are_refused():
    with pytest.raises(ConfigError, match="decode_send_s: expected a message of each stage, got 1"):
        batch_s(
            [1.0, 1.0], [1.0, 1.0], num_prefill=1, num_decode=1, new_tokens=1, decode_send_s=[1.0]
        )


def test_empty_stages_take_no_part():
    problem = make_problem(
        prefill_send_s=np.array([[0.0, 7.0], [5.0, 0.0]]), ends_prefill_s=np.array([1.0, 2.0])
    )
    alone = problem.seconds((0, 0, 4), (0, 0, 0, 0))
    assert alone == pytest.approx(batch_s([6.0], [4.0], num_prefill=2, num_decode=2, new_tokens=3))
    both = problem.seconds((0, 2, 4), (0, 0, 0, 0))
    expected = batch_s(
        [3.0, 2.0],
        [2.0, 2.0],
        num_prefill=2,
        num_decode=2,
        new_tokens=3,
        prefill_send_s=[7.0, 5.0],
    )
    assert both == pytest.approx(expected)


def test_memory_counts_weights_caches_and_the_first_stages_ends():
    problem = make_problem(ends_bytes=3.0)
    assert problem.used_bytes((0, 1, 4), (1, 0, 0, 1)).tolist() == [6.0, 7.0]
    assert problem.used_bytes((0, 0, 4), (1, 0, 0, 1)).tolist() == [0.0, 13.0]
    assert problem.is_feasible((0, 1, 4), (1, 0, 0, 1))
    assert not make_problem(memory_bytes=np.array([20.0, 6.9])).is_feasible((0, 1, 4), (1, 0, 0, 1))
    assert not make_problem(max_noise=1.9).is_feasible((0, 1, 4), (1, 0, 0, 1))


def test_an_entry_that_was_not_measured_is_named():
    prefill_s = np.ones((4, 2, 2))
    prefill_s[2, 1, 0] = np.inf
    with pytest.raises(ConfigError, match=r"prefill_s\[2, 1, 0\].*inf"):
        make_problem(prefill_s=prefill_s)
    with pytest.raises(ConfigError, match=r"noise\[3, 0\].*-1"):
        make_problem(noise=np.array([[1.0, 0.0]] * 3 + [[-1.0, 0.0]]))


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_s": np.ones((4, 2))},
        {"kv_bytes": np.ones(3)},
        {"num_prefill": 0},
        {"theta": -1.0},
        {"max_noise": float("nan")},
        {"formula": "other"},
        {"ends_prefill_s": np.ones(3)},
    ],
)
def test_settings_outside_their_range_are_named(change):
    (key,) = change
    with pytest.raises(ConfigError, match=key):
        make_problem(**change)
