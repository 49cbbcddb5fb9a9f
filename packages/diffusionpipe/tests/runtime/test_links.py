"""Lanes: messages keep their order, are posted in time, and have the shapes that were laid out."""

from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.planner.plan import Action
from diffusionpipe.planner.traffic import PlannedMessage
from diffusionpipe.runtime.instructions import Instruction, Program
from diffusionpipe.runtime.links import Links, queue_messages
from diffusionpipe.runtime.shapes import Shapes, ValueShape
from shared.errors import DataError


def make_action(number):
    """Rank 0's action that makes or needs a message."""
    return Action("forward", 0, number)


def make_message(number=0, *, is_sent=True):
    """A message of rank 0 to or from rank 1."""
    ours, theirs = make_action(number), Action("forward", 1, number)
    actions, ranks = ((ours, theirs), (0, 1)) if is_sent else ((theirs, ours), (1, 0))
    return PlannedMessage(*actions, *ranks, ("h",), ((0, 4),), 0, number)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=12))
def test_no_message_waits_behind_one_that_is_needed_later(ends):
    """In one lane, as over NCCL, which posts in order: all that an instruction needs can be posted by then."""
    messages = [make_message(number, is_sent=is_sent) for number, (is_sent, _) in enumerate(ends)]
    positions = {make_action(number): position for number, (_, position) in enumerate(ends)}
    lanes = queue_messages(messages, 0, positions, lambda _: (1, ""))
    assert list(lanes) == [(1, "")]
    queue = lanes[1, ""]
    assert [one.message.number for one in queue] == list(range(len(ends)))
    for instruction in range(10):
        posted = 0
        while posted < len(queue) and queue[posted].deadline <= instruction:
            posted += 1
        needed = [number for number, (_, position) in enumerate(ends) if position <= instruction]
        # No more either: a receive that nobody needs yet would only take memory.
        assert posted == max(needed, default=-1) + 1


def test_lanes_are_lined_up_apart():
    messages = [make_message(number, is_sent=number % 2 == 0) for number in range(6)]
    positions = {make_action(number): 9 - number for number in range(6)}
    lanes = queue_messages(messages, 0, positions, lambda message: (1, str(message.sender)))
    assert {lane: [one.deadline for one in queue] for lane, queue in lanes.items()} == {
        (1, "0"): [5, 5, 5],
        (1, "1"): [4, 4, 4],
    }


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.zeros(4, 5), r"got \[4, 5\] and torch.float32; let shapes not depend on values"),
        (torch.zeros(4, 3, dtype=torch.float64), r"got \[4, 3\] and torch.float64"),
    ],
)
def test_a_value_of_another_shape_is_not_sent(value, told):
    """gloo ends a process that receives another number of bytes than it waits for."""
    message = make_message(2)
    instruction = Instruction(
        action=message.sent_by, samples=(0, 4), receives=(), sends=(message,), is_final=False
    )
    program = Program(
        rank=0, instructions=(instruction,), messages=(message,), num_readers=Counter(), edges={}
    )
    shapes = Shapes([{"h": ValueShape((0, 3), (1, 0), torch.float32)}], {}, torch.device("cpu"))
    links = Links([program], shapes, 4)

    with mock.patch.object(Links, "find_lane", return_value=(1, "")):
        links.begin(program, 4, None)
    told = (
        r"micro-batch 2, stage 0 to 1, rank 0 to 1: expected h of shape \[4, 3\] and torch.float32, .*"
        + told
    )
    with pytest.raises(DataError, match=told):
        links.send(message, {"h": value})
    links.send(message, {"h": torch.zeros(4, 3)})
    assert links.sent_bytes == {1: 4 * 3 * 4}
