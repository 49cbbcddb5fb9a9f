import socket

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


def test_what_is_sent_to_a_peer_that_has_ended_is_lost():
    ours, theirs = socket.socketpair()
    theirs.close()
    ControlChannel(ours).send({"kind": "a"})


def test_messages_end_with_the_peer():
    ours, theirs = socket.socketpair()
    ControlChannel(ours).send({"kind": "a"})
    ours.close()
    assert list(ControlChannel(theirs).messages()) == [{"kind": "a"}]
