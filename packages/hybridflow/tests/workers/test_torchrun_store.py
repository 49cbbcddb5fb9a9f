"""Processes of a torchrun job among themselves: who is let in, and what travels between machines."""

import pickle
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from hybridflow import Batch
from hybridflow.workers.engines.rank import take_rows
from hybridflow.workers.engines.tcp import Listener, PeerLink, connect
from hybridflow.workers.engines.torchrun_rank import Member
from hybridflow.workers.engines.torchrun_store import PlacedStore, StoreAddress
from shared.errors import CommError, DataError

_HERE = "127.0.0.1"
_KEY, _OTHER_KEY = b"k" * 32, b"o" * 32


# Who is let in.


def test_messages_and_bytes_arrive_as_they_were_sent():
    answered = threading.Event()

    def answer(link):
        link.send([link.receive(), bytes(link.receive_bytes(1 << 20))])
        answered.set()

    listener = Listener(_HERE, _KEY, answer)
    link = connect(("127.0.0.1", listener.port), _KEY, 60)
    data = bytes(range(256)) * 4096
    link.send({"a": 1})
    link.send_bytes(data)
    assert link.receive() == [{"a": 1}, data]
    assert answered.wait(60)
    listener.close()
    with pytest.raises(OSError, match="refused"):
        connect(("127.0.0.1", listener.port), _KEY, 60)
    link.close()


class _Bomb:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_caller_without_the_key_is_neither_answered_nor_read(tmp_path):
    answered = []
    listener = Listener(_HERE, _KEY, answered.append)
    address = ("127.0.0.1", listener.port)
    with pytest.raises(CommError, match="does not know its key"):
        connect(address, _OTHER_KEY, 60)
    bomb = pickle.dumps(_Bomb(tmp_path / "trace"))
    with socket.create_connection(address) as caller:
        caller.sendall(len(bomb).to_bytes(8, "little") + bomb + bytes(64))
        with suppress(ConnectionResetError):
            while caller.recv(1024):
                pass
    assert answered == []
    assert not (tmp_path / "trace").exists()
    connect(address, _KEY, 60).close()
    listener.close()
    pickle.loads(bomb)
    assert (tmp_path / "trace").exists()  # it does leave one


def test_a_caller_that_repeats_what_it_hears_is_refused():
    answered = []
    listener = Listener(_HERE, _KEY, answered.append)
    with socket.create_connection(("127.0.0.1", listener.port)) as caller:
        while heard := caller.recv(1024):
            caller.sendall(heard)
    assert answered == []
    listener.close()


def test_a_listener_is_reached_at_its_own_address_only():
    listener = Listener(_HERE, _KEY, lambda link: link.close())
    with pytest.raises(ConnectionRefusedError):
        connect(("127.0.0.2", listener.port), _KEY, 60)
    connect((_HERE, listener.port), _KEY, 60).close()
    listener.close()


def member_of(host, num_ranks):
    return Member(rank=0, num_ranks=num_ranks, local_rank=0, num_local_ranks=2, first_host=host)


def test_an_address_that_others_can_not_use_is_not_the_only_one():
    assert member_of(_HERE, num_ranks=2).listening_address() == _HERE
    assert member_of(_HERE, num_ranks=4).listening_address() == ""
    assert (
        member_of("192.0.2.1", num_ranks=4).listening_address() == ""
    )  # no address of this machine


def test_callers_that_say_nothing_keep_others_out_for_a_moment_only():
    listener = Listener(_HERE, _KEY, lambda link: link.close(), proof_s=0.3, max_unproven=2)
    silent = [socket.create_connection((_HERE, listener.port)) for _ in range(6)]
    dripping = socket.create_connection((_HERE, listener.port))
    dripping.sendall(b"x")
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(
            CommError, EOFError, OSError
        ):  # this one too may have been let in and be late
            connect((_HERE, listener.port), _KEY, 60).close()
            break
    else:
        pytest.fail("nobody is let in any more")
    for caller in (*silent, dripping):
        caller.close()
    listener.close()


def test_callers_that_say_nothing_hold_no_more_threads_than_are_allowed():
    before = set(threading.enumerate())
    listener = Listener(_HERE, _KEY, lambda link: link.close(), proof_s=60, max_unproven=2)
    silent = [socket.create_connection((_HERE, listener.port)) for _ in range(6)]
    until = time.monotonic() + 60
    while len(set(threading.enumerate()) - before) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)  # for a third caller, if it were let in
    assert len(set(threading.enumerate()) - before) == 3  # who listens, and two that are asked
    for caller in silent:
        caller.close()
    listener.close()


# Values across machines.


@pytest.fixture
def stores():
    """Of ranks 0 and 1, of which each believes the other to be on another machine."""
    stores = [PlacedStore(rank, _KEY) for rank in range(2)]
    listeners = [Listener(_HERE, _KEY, partial(_serve, store)) for store in stores]
    for store in stores:
        store.places = {
            rank: StoreAddress(rank, "127.0.0.1", listener.port, stores[rank].folder)
            for rank, listener in enumerate(listeners)
        }
    yield stores
    for store, listener in zip(stores, listeners, strict=True):
        listener.close()
        store.remove()


def _serve(store, link):
    assert link.receive() == "values"
    store.serve(link)


def test_only_what_is_wanted_is_sent(stores, monkeypatch):
    counted, receive_bytes = [], PeerLink.receive_bytes
    here = threading.get_ident()

    def counting(link, num_bytes):
        if threading.get_ident() == here:
            counted.append(num_bytes)
        return receive_bytes(link, num_bytes)

    monkeypatch.setattr(PeerLink, "receive_bytes", counting)
    y = torch.randn(1000, 5000)
    handle = stores[0].pack(Batch(x=torch.arange(1000), y=y, z=torch.ones(1000, 5000)))
    wanted = partial(take_rows, columns=("x", "y"), start=300, stop=310)
    for _ in range(2):
        found = stores[1].load(handle, wanted)
        assert found.keys() == ["x", "y"]
        assert found["x"].tolist() == list(range(300, 310))
        assert torch.equal(found["y"], y[300:310])
        assert 10 * 5000 * 4 < sum(counted) < 10 * 5000 * 4 + 2000
        counted.clear()
        found["y"] += 1  # the reader's own
    # On the machine itself nothing is sent.
    assert torch.equal(stores[0].load(handle, wanted)["y"], y[300:310])
    assert counted == []


def test_what_can_not_be_read_is_told_as_on_the_machine_itself(stores):
    handle = stores[0].pack(Batch(y=torch.ones(1000, 50)))
    wanted = partial(take_rows, columns=("nothing",), start=0, stop=None)
    errors = []
    for store in stores:
        with pytest.raises((DataError, KeyError)) as caught:
            store.load(handle, wanted)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
    assert len(stores[1].load(handle)) == 1000  # the connection is as good as before


def test_an_owner_that_is_gone_is_named():
    store, gone = (PlacedStore(rank, _KEY) for rank in (1, 3))
    listener = Listener(_HERE, _KEY, lambda link: link.close())
    store.places = {
        1: StoreAddress(1, "127.0.0.1", 0, store.folder),
        3: StoreAddress(3, "127.0.0.1", listener.port, gone.folder),
    }
    handle = gone.pack(torch.ones(100_000))
    with pytest.raises(CommError, match="a value of rank 3 cannot be read"):
        store.load(handle)
    listener.close()
    with pytest.raises(CommError, match="a value of rank 3 cannot be read"):
        store.load(handle)
    store.remove()
    gone.remove()
