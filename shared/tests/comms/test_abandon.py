"""A world whose peer hangs is left from outside, and the next one is joined under its epoch."""

import itertools
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shared.comms import Group, RankPool, Round, all_reduce, post_rounds
from shared.comms.collectives import start_all_reduce
from shared.comms.init import abandon, join, sever
from shared.errors import CommError

LIMIT, SHORT = timedelta(seconds=60), timedelta(seconds=10)


def next_world(store, epoch: int, rank: int | None = None, size: int | None = None) -> Group:
    rank = dist.get_rank() if rank is None else rank
    size = dist.get_world_size() if size is None else size
    abandon()
    return join(rank, size, store, backend="gloo", timeout=LIMIT, epoch=epoch)


def freed_from_a_peer_that_hangs(path: str, how: str) -> tuple[float, float]:
    """Rank 2 answers nobody; the others wait for it until their connections are severed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(path, size)
    group = next_world(store, 0, rank, size)
    waited = 0.0
    if rank < 2:
        threading.Timer(0.3, sever).start()
        start = time.monotonic()
        message = Round(send_to=2, send=torch.ones(4), recv_from=2, recv=torch.empty(4))
        wait = {
            "collective": lambda: start_all_reduce(group, torch.ones(1 << 16)).wait(),
            "rounds": lambda: post_rounds(group, [message]).wait_all(),
        }
        told = {"collective": "", "rounds": "the world of ranks was left"}
        with pytest.raises(CommError, match=told[how]):
            wait[how]()
        waited = time.monotonic() - start
    else:
        time.sleep(1.0)
    group = next_world(store, 1, rank, size)
    total = all_reduce(group, torch.tensor([float(rank)])).item()
    message = Round(
        send_to=(rank + 1) % size,
        send=torch.tensor([rank]),
        recv_from=(rank - 1) % size,
        recv=(got := torch.empty(1, dtype=torch.int64)),
    )
    post_rounds(group, [message]).wait_all()
    assert got.item() == (rank - 1) % size
    return waited, total


@pytest.mark.parametrize("how", ["collective", "rounds"])
def test_waiting_ranks_are_freed_and_join_the_next_world(tmp_path, how):
    with RankPool(3, timeout=LIMIT) as pool:
        found = pool.run(freed_from_a_peer_that_hangs, str(tmp_path / "store"), how).results
    assert [total for _, total in found] == [3.0] * 3
    assert all(0.2 < waited < 5 for waited, _ in found[:2])


def freed_behind_an_unread_message(path: str) -> float:
    """What rank 1 sends meets a freed buffer, as that of a failed sum; rank 0 waits for it behind that."""
    rank = dist.get_rank()
    store = dist.FileStore(path, 2)
    next_world(store, 0, rank, 2)
    waited = 0.0
    if rank == 0:
        dist.irecv(torch.empty(1 << 16), 1)
        time.sleep(0.3)
        threading.Timer(0.3, sever).start()
        start = time.monotonic()
        # torch's own wait: ours also ends by itself, a while after the world was severed.
        work = dist.all_reduce(torch.ones(4), async_op=True)
        with pytest.raises(RuntimeError):
            work.wait(LIMIT)
        waited = time.monotonic() - start
    else:
        sending = dist.isend(torch.ones(1 << 16), 0)
        time.sleep(1.0)
        del sending
    total = all_reduce(next_world(store, 1, rank, 2), torch.ones(1)).item()
    assert total == 2.0
    return waited


def test_a_rank_is_freed_behind_a_message_that_nobody_reads(tmp_path):
    with RankPool(2, timeout=LIMIT) as pool:
        waited = pool.run(freed_behind_an_unread_message, str(tmp_path / "store")).results[0]
    assert 0.2 < waited < 5


def freed_from_a_join(path: str) -> float:
    """A join that waits for a rank which never comes is severed too."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    abandon()

    def keep_severing() -> None:
        for _ in range(20):
            time.sleep(0.05)
            sever()

    threading.Thread(target=keep_severing, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        join(0, 2, ("127.0.0.1", store.port), backend="gloo", timeout=LIMIT, epoch=0)
    waited = time.monotonic() - start
    time.sleep(1.1)
    # The next world meets under the same names as a fresh process would.
    abandon()
    group = join(0, 1, dist.FileStore(path, 1), backend="gloo", timeout=LIMIT)
    assert all_reduce(group, torch.ones(1)).item() == 1.0
    return waited


def test_a_join_under_way_is_freed(tmp_path):
    with RankPool(1, timeout=LIMIT) as pool:
        (waited,) = pool.run(freed_from_a_join, str(tmp_path / "store")).results
    assert waited < 5


def freed_from_peers_that_died_joining() -> list[float]:
    """Rank 1 says where it listens and is gone; rank 0 then waits for its connection, or connects to it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    abandon()
    waited = []
    # Who connects to whom depends on ports, which the system draws.
    for epoch, (rank, size) in itertools.product(range(8), [(1, 3), (0, 2)]):
        is_free = threading.Event()

        def keep_severing(is_free: threading.Event = is_free) -> None:
            while not is_free.wait(0.05):
                sever()

        thread = threading.Thread(target=keep_severing)
        thread.start()
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            join(rank, size, ("127.0.0.1", store.port), backend="gloo", timeout=SHORT, epoch=epoch)
        waited.append(time.monotonic() - start)
        is_free.set()
        thread.join()
        abandon()
    return waited


def test_a_rank_whose_peer_died_while_both_joined_is_freed():
    with RankPool(1, timeout=LIMIT) as pool:
        (waited,) = pool.run(freed_from_peers_that_died_joining).results
    assert max(waited) < SHORT.total_seconds() / 2


def severed_with_connections_of_its_own() -> str:
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    own = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    sever()
    own.sendall(b"whole")
    return other.recv(5).decode()


def test_a_store_that_is_not_reached_is_named():
    limit = timedelta(seconds=0.2)
    with pytest.raises(
        CommError, match=r"ranks meet at 127\.0\.0\.1:1 within 0\.2 s, got .*; have"
    ):
        join(0, 1, ("127.0.0.1", 1), backend="gloo", timeout=limit)


def test_connections_of_others_are_left_alone():
    with RankPool(2, timeout=LIMIT) as pool:
        assert pool.run(severed_with_connections_of_its_own).results == ["whole"] * 2


def test_sums_that_are_started_end_in_order():
    with RankPool(2, timeout=LIMIT) as pool:
        assert pool.run(started_sums).results == [[3.0, 30.0]] * 2


def started_sums() -> list[float]:
    group = Group.world()
    tensors = [torch.tensor([scale * (group.rank + 1.0)]) for scale in (1, 10)]
    for reduction in [start_all_reduce(group, tensor) for tensor in tensors]:
        reduction.wait()
    return [tensor.item() for tensor in tensors]
