"""Messages between the controller and a process arrive whole, however the bytes are cut."""

import os
import pickle
import socket
import struct
import threading

import pytest

from hybridflow.workers.engines.local import READ_BYTES, StreamLink


@pytest.fixture
def links():
    one, other = socket.socketpair()
    with one, other:
        yield StreamLink(one), StreamLink(other)


def test_messages_that_came_together_are_all_given(links):
    one, other = links
    for number in range(4):
        one.send((number, "x" * number))
    assert other.receive() == [(0, ""), (1, "x"), (2, "xx"), (3, "xxx")]
    other.send(None)
    assert one.receive() == [None]


@pytest.mark.parametrize("num_bytes", [0, 1, READ_BYTES, 10 * READ_BYTES + 1])
def test_a_message_of_any_length_arrives(links, num_bytes):
    one, other = links
    sender = threading.Thread(target=lambda: [one.send(bytes(num_bytes)), one.send("next")])
    sender.start()
    found = []
    while len(found) < 2:
        found += other.receive()
    sender.join()
    assert found == [bytes(num_bytes), "next"]


def test_a_message_that_comes_in_pieces_is_put_together(links):
    one, other = links
    data = pickle.dumps({"a": 1})
    whole = struct.pack("<Q", len(data)) + data
    raw = socket.socket(fileno=os.dup(one.fileno()))
    raw.sendall(whole + whole[:3])
    assert other.receive() == [{"a": 1}]
    raw.sendall(whole[3:12])
    late = threading.Thread(target=raw.sendall, args=(whole[12:],))
    late.start()
    assert other.receive() == [{"a": 1}]
    late.join()
    raw.close()


def test_the_end_of_the_other_side_is_told_after_its_last_message(links):
    one, other = links
    one.send("last")
    one.close()
    assert other.receive() == ["last"]
    with pytest.raises(EOFError, match="the other side closed the connection"):
        other.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        other.send("nobody there")
