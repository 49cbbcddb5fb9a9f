import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.comms.ledger import Ledger, LedgerSnapshot, Traffic
from shared.errors import ConfigError

messages = st.lists(
    st.tuples(
        st.sampled_from(["all_reduce", "rounds"]),
        st.integers(0, 3),
        st.integers(0, 10**12),
        st.sampled_from(["", "forward1", "backward2"]),
        st.sampled_from(["sent", "received"]),
    )
)


def filled(entries) -> Ledger:
    ledger = Ledger()
    for op, peer, num_bytes, phase, direction in entries:
        ledger.record(op, peer, num_bytes, phase, direction=direction)
    return ledger


@given(messages)
def test_every_grouping_adds_up_to_the_total(entries):
    snapshot = filled(entries).snapshot()
    assert snapshot.sent_bytes == sum(entry[2] for entry in entries if entry[4] == "sent")
    assert snapshot.received_bytes == sum(entry[2] for entry in entries if entry[4] == "received")
    assert snapshot.total.calls == len(entries)
    for grouped in (snapshot.by_op(), snapshot.by_peer(), snapshot.by_phase()):
        assert sum(grouped.values(), Traffic()) == snapshot.total


@given(messages, messages)
def test_diff_is_what_came_in_between(before, after):
    ledger = filled(before)
    earlier = ledger.snapshot()
    for op, peer, num_bytes, phase, direction in after:
        ledger.record(op, peer, num_bytes, phase, direction=direction)
    assert ledger.snapshot().diff(earlier) == filled(after).snapshot()


def test_phases_nest_and_belong_to_their_thread():
    ledger = Ledger()
    with ledger.phase("outer"):
        with ledger.phase("inner"):
            ledger.record("rounds", 1, 10)
            other = threading.Thread(target=ledger.record, args=("rounds", 1, 1))
            other.start()
            other.join()
        ledger.record("rounds", 1, 100)
    ledger.record("rounds", 1, 1000)
    sent = {phase: traffic.sent_bytes for phase, traffic in ledger.snapshot().by_phase().items()}
    assert sent == {"inner": 10, "outer": 100, "": 1001}


def test_phase_ends_with_a_failing_block():
    ledger = Ledger()
    with pytest.raises(KeyError), ledger.phase("forward1"):
        raise KeyError
    assert ledger.current_phase == ""


def test_threads_lose_no_message():
    ledger = Ledger()

    def record_many() -> None:
        for _ in range(2000):
            ledger.record("rounds", 1, 3, "p")

    threads = [threading.Thread(target=record_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.snapshot().total == Traffic(sent_bytes=24000, calls=8000)


def test_json_holds_every_cell():
    ledger = filled([("rounds", 1, 5, "a", "sent"), ("rounds", 1, 7, "a", "received")])
    assert json.loads(ledger.to_json()) == [
        {
            "op": "rounds",
            "peer": 1,
            "phase": "a",
            "sent_bytes": 5,
            "received_bytes": 7,
            "calls": 2,
        }
    ]


def test_empty_ledger_is_zero():
    assert Ledger().snapshot() == LedgerSnapshot()
    assert Ledger().sent_bytes == Ledger().received_bytes == 0


def test_negative_bytes_are_refused():
    with pytest.raises(ConfigError, match=r"non-negative number of bytes.*-1"):
        Ledger().record("rounds", 0, -1)
