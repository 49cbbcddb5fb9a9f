"""Replayed batches, beside closed forms and a plain clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.planner.plan import Plan, Stage
from llmpq.planner.problem import batch_s
from llmpq.simulator import simulate, simulate_plan
from shared.errors import ConfigError

SECONDS = st.floats(0.01, 10)


def by_clock(prefill_s, decode_s, num_prefill, num_decode, new_tokens):
    """Each stage takes what came first; a clock that is moved from event to event."""
    num_stages = len(prefill_s)
    of = [chunk * num_decode // num_prefill for chunk in range(num_prefill)]
    left = [of.count(number) for number in range(num_decode)]
    lines = [[] for _ in range(num_stages)]
    lines[0] = [(0.0, k, ("prefill", of[k], 0)) for k in range(num_prefill)]
    free, count, end = [0.0] * num_stages, num_prefill, 0.0
    while any(lines):
        starts = [
            max(free[j], min(line)[0]) if line else float("inf") for j, line in enumerate(lines)
        ]
        stage = starts.index(min(starts))
        job = min(lines[stage])
        lines[stage].remove(job)
        _, _, (kind, number, token) = job
        done = starts[stage] + (prefill_s if kind == "prefill" else decode_s)[stage]
        free[stage], end = done, max(end, done)
        if stage + 1 < num_stages:
            lines[stage + 1].append((done, count, (kind, number, token)))
        else:
            left[number] -= kind == "prefill"
            if not left[number] and token + 1 < new_tokens:
                lines[0].append((done, count, ("decode", number, token + 1)))
        count += 1
    return end


@given(
    st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=4),
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 6),
)  # fmt: skip
def test_a_batch_takes_what_a_plain_clock_says(stages, num_decode, chunks, new_tokens):
    prefill_s, decode_s = zip(*stages, strict=True)
    num_prefill = num_decode * chunks
    found = simulate(
        prefill_s, decode_s, num_prefill=num_prefill, num_decode=num_decode, new_tokens=new_tokens
    ).makespan_s
    assert found == pytest.approx(
        by_clock(prefill_s, decode_s, num_prefill, num_decode, new_tokens)
    )
    formula = batch_s(
        prefill_s, decode_s, num_prefill=num_prefill, num_decode=num_decode, new_tokens=new_tokens
    )
    if num_decode == 1:
        assert found == pytest.approx(formula)
    slack = sum(prefill_s) + num_prefill * max(prefill_s) + num_decode * sum(decode_s)
    assert found <= formula + slack


def test_the_ring_is_what_a_long_batch_tends_to():
    sizes = {"num_prefill": 8, "num_decode": 4, "new_tokens": 400}
    for stages in (([4.0, 3.0, 2.0], [1.0, 0.7, 0.9]), ([1.0, 1.0], [0.2, 1.0])):
        assert simulate(*stages, **sizes).makespan_s == pytest.approx(
            batch_s(*stages, **sizes), rel=0.01
        )


def test_messages_delay_and_pace():
    sizes = {"num_prefill": 1, "num_decode": 1, "new_tokens": 3}
    found = simulate([1.0, 2.0], [0.5, 0.25], **sizes, prefill_send_s=[0.1, 0.2],
                     decode_send_s=[0.03, 0.04])  # fmt: skip
    assert found.makespan_s == pytest.approx(3.3 + 2 * 0.82)
    assert "link1" in found.queues


def test_a_micro_batch_waits_for_its_own_prefills():
    found = simulate([0.1, 2.0], [5.0, 0.1], num_prefill=4, num_decode=2, new_tokens=2)
    # The second of its two prefills is back at 4.1; the other one's token waits for stage 0.
    assert found.makespan_s == pytest.approx(4.1 + 5 + 5 + 0.1)


def test_several_micro_batches_begin_after_one_prefill():
    found = simulate([2.0], [1.0], num_prefill=1, num_decode=3, new_tokens=2, formula="paper")
    assert found.makespan_s == pytest.approx(2 + 3)
    found = simulate([2.0, 1.0], [1.0, 1.0], num_prefill=1, num_decode=2, new_tokens=2)
    assert found.makespan_s == pytest.approx(3 + 2 + 1), "both wait until it is back at 3"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"decode_s": [1.0]}, "same stages"),
        ({"num_decode": 0}, "one micro-batch in each phase"),
        ({"formula": "lap"}, "formula: expected one of ring, paper, got 'lap'"),
        ({"new_tokens": 0}, "at least one token"),
        ({"decode_send_s": [1.0]}, "decode_send_s: expected a message of each stage, got 1"),
    ],
)
def test_bad_input(changed, told):
    given_ = {
        "prefill_s": [1.0, 1.0], "decode_s": [1.0, 1.0], "num_prefill": 2, "num_decode": 2,
        "new_tokens": 3, **changed,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=told):
        simulate(**given_)


def test_a_plan_is_replayed_in_its_micro_batches_with_its_messages():
    seconds = [1.0, 2.0], [0.5, 0.25]
    sends = {"prefill_send_s": [0.1, 0.2], "decode_send_s": [0.03, 0.04]}
    plan = Plan(
        stages=(Stage(rank=1, layers=(0, 1)), Stage(rank=0, layers=(1, 2))), bits=(16, 16),
        prefill_size=2, decode_size=4,
        predicted={
            "stage_prefill_s": seconds[0], "stage_decode_s": seconds[1], "num_prompts": 5,
            "new_tokens": 3, **sends,
        },
    )  # fmt: skip
    expected = simulate(*seconds, num_prefill=3, num_decode=2, new_tokens=3, **sends)
    assert simulate_plan(plan).makespan_s == expected.makespan_s
    assert simulate_plan(plan).queues.keys() == expected.queues.keys()


def test_a_plan_whose_figures_are_missing_is_refused():
    figures = {"stage_prefill_s": [1.0], "stage_decode_s": [0.5]}
    plan = Plan(
        stages=(Stage(rank=0, layers=(0, 1)),), bits=(16,), prefill_size=1, decode_size=1,
        predicted=figures,
    )  # fmt: skip
    assert simulate_plan(plan, num_prompts=1, new_tokens=2).makespan_s == pytest.approx(1.5)
    with pytest.raises(ConfigError, match=r"without num_prompts, new_tokens; make it with"):
        simulate_plan(plan)
