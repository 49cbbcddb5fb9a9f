import socket
import threading

import pytest

from swift.membership.channel import ControlChannel


def test_messages_arrive_whole_in_order_however_they_are_cut():
    ours, theirs = socket.socketpair()
    channel = ControlChannel(ours)
    text = b'{"kind": "a", "n": 1}\n{"kind": "b"}\n'
    found = []
    for byte in text:
        theirs.sendall(bytes([byte]))
        found += channel.receive()
    assert found == [{"kind": "a", "n": 1}, {"kind": "b"}]
    theirs.close()
    assert channel.receive() == []
    assert channel.is_closed


def test_a_peer_that_speaks_otherwise_is_a_stranger():
    ours, theirs = socket.socketpair()
    channel = ControlChannel(ours)
    theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert channel.receive() == []
    assert channel.is_closed
    assert channel.stray == b"HTTP/1.1 400 Bad Request\r"


@pytest.mark.parametrize("line", [b"[1, 2]", b"7", b"null", b"", b"[" * 100_000])
def test_json_that_is_no_message_is_a_strangers(line):
    ours, theirs = socket.socketpair()
    channel = ControlChannel(ours)
    sender = threading.Thread(target=theirs.sendall, args=(b'{"kind": "a"}\n' + line + b"\n",))
    sender.start()
    assert list(channel.messages()) == [{"kind": "a"}]
    sender.join()
    assert channel.stray.strip() == line


def test_a_message_that_is_torn_is_the_last_one():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.settimeout(0.05)
    channel = ControlChannel(near)
    channel.send({"kind": "long", "text": "x" * 50_000_000})
    channel.send({"kind": "short"})
    found = b""
    while data := far.recv(1 << 20):
        found += data
    assert found.startswith(b'{"kind": "long"')
    assert b"short" not in found
    assert channel.receive() == []
    assert channel.is_closed


def test_what_was_said_before_a_torn_message_is_heard():
    ours, theirs = socket.socketpair()
    theirs.sendall(b'{"kind": "failed"}\n')
    theirs.close()
    channel = ControlChannel(ours)
    channel.send({"kind": "a"})
    assert list(channel.messages()) == [{"kind": "failed"}]


def test_what_is_sent_to_a_peer_that_has_ended_is_lost():
    ours, theirs = socket.socketpair()
    theirs.close()
    ControlChannel(ours).send({"kind": "a"})


def test_messages_end_with_the_peer():
    ours, theirs = socket.socketpair()
    ControlChannel(ours).send({"kind": "a"})
    ours.close()
    assert list(ControlChannel(theirs).messages()) == [{"kind": "a"}]
