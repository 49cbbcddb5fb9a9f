"""Which prompts may be drawn for: the bound holds, every prompt is learnt from once and in order."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.loops.buffer import Buffer, admitted
from shared.errors import ConfigError


@given(
    batch_size=st.integers(1, 5),
    eta=st.integers(0, 3),
    max_running=st.none() | st.integers(1, 12),
    start=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_the_buffer_keeps_its_bound_and_loses_nothing(batch_size, eta, max_running, start, seed):
    source = random.Random(seed)
    sizes = {"batch_size": batch_size, "eta": eta, "max_running": max_running}
    buffer = Buffer(**sizes, version=start)
    version, running, learnt = start, {}, []
    while len(learnt) < 6 * batch_size:
        chosen = source.choice(["admit", "finish", "finish", "return", "resume"])
        if chosen == "admit" or not running:
            room = buffer.room(version)
            positions = buffer.admit(version, source.randint(1, 6))
            assert len(positions) <= room
            assert bool(positions) == bool(room)
            assert positions == sorted(positions)
            assert len({position // batch_size for position in positions}) <= 1
            running.update(dict.fromkeys(positions, version))
        elif chosen in ("finish", "return"):
            position = source.choice(sorted(running))
            drawn = running.pop(position)
            if chosen == "finish":
                buffer.finish(position, drawn, position)
            else:
                buffer.give_back([position])
        elif chosen == "resume":
            state = buffer.state()
            buffer = Buffer(**sizes)
            buffer.load_state(state)
            running.clear()
        assert buffer.num_running == len(running)
        assert max_running is None or len(running) <= max_running
        if (found := buffer.take(version)) is not None:
            assert all(0 <= version - drawn <= eta for drawn in found[1])
            learnt += found[0]
            version += 1
    first = start * batch_size
    assert learnt == list(range(first, first + len(learnt)))


@given(
    numbers=st.tuples(*[st.integers(0, 50)] * 3, st.integers(1, 9), st.integers(0, 4)),
    max_running=st.none() | st.integers(1, 50),
)
def test_admission_is_the_rule(numbers, max_running):
    running, accepted, version, batch_size, eta = numbers
    found = admitted(
        running=running, accepted=accepted, version=version, batch_size=batch_size, eta=eta,
        max_running=max_running,
    )  # fmt: skip
    assert running + accepted + found <= max(running + accepted, (eta + version + 1) * batch_size)
    assert max_running is None or found <= max(0, max_running - running)
    if max_running is None and running + accepted < (eta + version + 1) * batch_size:
        assert running + accepted + found == (eta + version + 1) * batch_size


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"eta": -1}, {"max_running": 0}])
def test_a_buffer_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match="at least"):
        Buffer(**{"batch_size": 2, "eta": 0, **wrong})
