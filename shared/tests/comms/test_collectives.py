import threading
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shared.comms import (
    Group,
    all_gather,
    all_gather_into,
    all_gather_v,
    all_reduce,
    all_to_all_v,
    barrier,
    broadcast,
    gather_v,
    scatter_v,
)
from shared.comms.courier import connect, post_rounds
from shared.comms.rounds import Round
from shared.errors import CommError, ConfigError
from shared.topology import Mesh


def reductions() -> None:
    group = Group.world()
    values = torch.arange(3.0) + group.rank
    assert all_reduce(group, values.clone()).tolist() == [6.0, 10.0, 14.0]
    assert all_reduce(group, values.clone(), "max").tolist() == [3.0, 4.0, 5.0]
    assert all_reduce(group, values.clone(), "min").tolist() == [0.0, 1.0, 2.0]
    assert all_reduce(group, torch.tensor(2.0), "product") == 16.0
    barrier(group)


def gathers() -> None:
    group = Group.world()
    rank = group.rank
    assert [t.tolist() for t in all_gather(group, torch.tensor([rank]))] == [[0], [1], [2], [3]]
    rows = torch.full((rank, 2), rank, dtype=torch.bfloat16)
    gathered = all_gather_v(group, rows)
    assert [tuple(t.shape) for t in gathered] == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert all((t == peer).all() for peer, t in enumerate(gathered))
    mine = torch.arange(rank, dtype=torch.int32 if rank % 2 else torch.float64)
    collected = gather_v(group, mine, root=2)
    if rank == 2:
        assert [t.tolist() for t in collected] == [[], [0], [0.0, 1.0], [0, 1, 2]]
        assert [t.dtype for t in collected] == [torch.float64, torch.int32] * 2
    else:
        assert collected is None
    shares = [torch.arange(peer, dtype=torch.uint8) for peer in range(4)] if rank == 1 else None
    share = scatter_v(group, shares, root=1)
    assert share.tolist() == list(range(rank))
    assert share.dtype == torch.uint8


def exchange_with_a_late_rank(path) -> None:
    group = Group.world()
    sends = [torch.full((5,), 10.0 * group.rank + peer) for peer in range(4)]
    recvs = [torch.full((5,), -1.0) for _ in range(4)]

    def come_when_the_others_are_through():
        while time.monotonic() < deadline and -1 in (recvs[1][-1], recvs[2][-1]):
            time.sleep(0.01)
        if time.monotonic() < deadline:
            path.touch()

    deadline = time.monotonic() + 60
    if group.rank == 0:
        threading.Thread(target=come_when_the_others_are_through).start()
    while group.rank == 3 and not path.exists():
        assert time.monotonic() < deadline, "the others wait for the late rank in turn"
        time.sleep(0.01)
    all_to_all_v(group, sends, recvs)
    assert [t.tolist() for t in recvs] == [[10.0 * peer + group.rank] * 5 for peer in range(4)]


def gathers_into_place() -> dict:
    group = Group.world()
    kinds = [
        ((3, 2), torch.float32),
        ((5,), torch.bfloat16),
        ((0, 4), torch.int8),
        ((), torch.int64),
    ]
    parts = [torch.full(shape, group.rank, dtype=dtype) for shape, dtype in kinds]
    flat = [torch.full((4 * part.numel() + 2,), 9, dtype=part.dtype) for part in parts]
    before = group.ledger.snapshot()
    all_gather_into(group, [(out[1:-1], part) for out, part in zip(flat, parts, strict=True)])
    for out, part in zip(flat, parts, strict=True):
        right = torch.arange(4).repeat_interleave(part.numel())
        assert out.tolist() == [9, *right.tolist(), 9]
    all_gather_into(group, [])
    alone = [Group.of([rank]) for rank in range(4)][group.rank]
    all_gather_into(alone, [(flat[0][1:7], torch.ones(2, 3))])
    assert flat[0][:8].tolist() == [9] + [1] * 7
    return group.ledger.snapshot().diff(before).by_peer()


def sizes(sender: int, receiver: int) -> int:
    return 0 if (sender, receiver) == (2, 0) else 3 * sender + receiver


def exchange() -> dict:
    group = Group.world()
    rank = group.rank
    before = group.ledger.snapshot()
    sends = [torch.full((sizes(rank, peer),), 10.0 * rank + peer) for peer in range(4)]
    recvs = [torch.empty(sizes(peer, rank)) for peer in range(4)]
    all_to_all_v(group, sends, recvs, "forward1")
    for peer in range(4):
        assert recvs[peer].tolist() == [10.0 * peer + rank] * sizes(peer, rank)
    return group.ledger.snapshot().diff(before).by_peer()


def reduced_bytes() -> dict:
    group = Group.world()
    before = group.ledger.snapshot()
    all_reduce(group, torch.ones(20, dtype=torch.float64))
    return group.ledger.snapshot().diff(before).by_peer()


def broadcasts() -> list[dict]:
    """Traffic by peer of a broadcast from each rank."""
    group = Group.world()
    found = []
    for src in range(4):
        before = group.ledger.snapshot()
        assert broadcast(group, torch.full((8,), float(group.rank)), src).tolist() == [src] * 8
        found.append(group.ledger.snapshot().diff(before).by_peer())
    return found


class Awaited:
    """A message of gloo's that may be waited for again, as one on a stream may."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        work, self.work = self.work, None
        if work is not None:
            work.wait()


@contextmanager
def enqueued_as_on_gpus():
    """Has the world's messages take NCCL's way, gloo carrying them; yields the size of batches."""
    batches, real = [], dist.batch_isend_irecv

    def counted(ops):
        batches.append(len(ops))
        return [Awaited(work) for work in real(ops)]

    with (
        mock.patch.object(Group.world(), "backend", "nccl"),
        mock.patch.object(dist, "batch_isend_irecv", counted),
    ):
        yield batches


def exchanges_on_a_stream() -> tuple[dict, list[int]]:
    with enqueued_as_on_gpus() as batches:
        by_peer = exchange()
    return by_peer, batches


def gathers_on_a_stream() -> None:
    with enqueued_as_on_gpus():
        gathers()
        assert gathers_into_place()


def posted_rounds_on_a_stream() -> tuple[list[int], list[int]]:
    """Two rounds, in the second of which ranks 2 and 3 have nothing to do."""
    group = Group.world()
    rank, others = group.rank, [1, 0, 3, 2]
    made = []

    def packed():
        made.append(len(batches))  # how many rounds have been enqueued before
        return torch.tensor([float(rank)])

    landed = [torch.zeros(1), torch.zeros(1)]
    rounds = [
        Round(send_to=others[rank], send=packed, recv_from=others[rank], recv=landed[0]),
        Round(
            send_to=others[rank],
            send=packed if rank < 2 else None,
            recv_from=others[rank],
            recv=landed[1] if rank < 2 else None,
        ),
    ]
    with enqueued_as_on_gpus() as batches:
        pending = post_rounds(group, rounds, "stream")
        pending.wait(0)
        assert landed[0].item() == others[rank]
        pending.wait_all()
        assert landed[1].item() == (others[rank] if rank < 2 else 0)
    return made, batches


def joins() -> list[int]:
    """How many collectives `connect` and the first rounds of a group run."""
    group = Group.of([0, 1])
    seen = []
    if group.rank < 0:
        return seen
    real = dist.all_reduce
    message = [Round(send_to=1 - group.rank, send=None, recv_from=1 - group.rank, recv=None)]
    with (
        mock.patch.object(group, "backend", "nccl"),
        mock.patch.object(dist, "all_reduce", lambda *a, **k: (seen.append(1), real(*a, **k))),
    ):
        for step in (connect, connect, lambda group: post_rounds(group, message).wait_all()):
            step(group)
            seen.append(0)
    return seen


def subgroups() -> tuple:
    groups = [Group.of(ranks) for ranks in Mesh(axes={"dp": 2, "tp": 2}).groups("dp")]
    assert groups[0] is Group.of([2, 0])
    assert Group.of(range(4)) is Group.world()
    mine, other = groups if groups[0].rank >= 0 else reversed(groups)
    assert other.rank == -1
    with pytest.raises(ConfigError, match="is not in the group of ranks"):
        barrier(other)
    before = mine.ledger.snapshot()
    total = all_reduce(mine, torch.tensor([float(dist.get_rank())]))
    peer = mine.ranks[1 - mine.rank]
    assert set(mine.ledger.snapshot().diff(before).by_peer()) == {peer}
    received = [torch.empty(1), torch.empty(1)]
    all_to_all_v(mine, [torch.tensor([float(dist.get_rank())])] * 2, received)
    assert [t.item() for t in received] == list(mine.ranks)
    return mine.ranks, total.item()


def device_mesh() -> tuple:
    mesh = Mesh(axes={"dp": 2, "tp": 2}).to_device_mesh("cpu")
    return mesh.mesh_dim_names, mesh.get_local_rank("dp"), mesh.get_local_rank("tp")


def sharded_rows(whole: torch.Tensor) -> torch.Tensor:
    group = Group.world()
    parts = whole.chunk(group.world_size)
    rows = parts[group.rank] if group.rank < len(parts) else whole[:0]
    return group.shard_rows(rows, whole).full_tensor()


def refusals() -> None:
    group = Group.world()
    with pytest.raises(ConfigError, match="op must be one of sum, max, min, product, got 'mean'"):
        all_reduce(group, torch.ones(1), "mean")
    with pytest.raises(ConfigError, match=r"src must be a rank of 0\.\.1, got 2"):
        broadcast(group, torch.ones(1), 2)
    with pytest.raises(ConfigError, match="one tensor for each of 2 ranks in recvs, got 1"):
        all_to_all_v(group, [torch.ones(1)] * 2, [torch.ones(1)])
    with pytest.raises(ConfigError, match="first dimension"):
        all_gather_v(group, torch.tensor(1.0))
    with pytest.raises(ConfigError, match="one-dimensional tensor"):
        gather_v(group, torch.ones(2, 2))
    with pytest.raises(ConfigError, match=r"different ranks of 0\.\.1, got"):
        Group.of([0, 0])
    with pytest.raises(ConfigError, match=r"2 parts \[3\] of torch.float32 do not make \[5\]"):
        all_gather_into(group, [(torch.ones(5), torch.ones(3))])
    with pytest.raises(ConfigError, match="a message must be contiguous"):
        all_gather_into(group, [(torch.ones(4, 6)[:, :2], torch.ones(2, 2))])
    if group.rank == 0:
        with pytest.raises(ConfigError, match="each of 2 ranks, got None"):
            scatter_v(group, None)


@pytest.mark.parametrize("function", [reductions, gathers], ids=lambda function: function.__name__)
def test_values_on_four_ranks(pool_of_four, function):
    pool_of_four.run(function)


def test_refusals(pool):
    pool.run(refusals)


def check_conserved(by_peer: list[dict]) -> None:
    for rank, peers in enumerate(by_peer):
        for peer, traffic in peers.items():
            assert traffic.sent_bytes == by_peer[peer][rank].received_bytes
            assert traffic.received_bytes == by_peer[peer][rank].sent_bytes


def test_an_exchange_waits_for_a_late_rank_with_its_messages_alone(pool_of_four, tmp_path):
    pool_of_four.run(exchange_with_a_late_rank, tmp_path / "come")


def test_all_to_all_of_unequal_sizes(pool_of_four):
    by_peer = pool_of_four.run(exchange).results
    check_conserved(by_peer)
    assert by_peer[1][3].sent_bytes == 4 * sizes(1, 3)
    assert by_peer[2][0].sent_bytes == 0


def test_gathering_into_place_takes_the_ring(pool_of_four):
    by_peer = pool_of_four.run(gathers_into_place).results
    check_conserved(by_peer)
    part = 6 * 4 + 5 * 2 + 8
    for rank, peers in enumerate(by_peer):
        assert peers[(rank - 1) % 4].sent_bytes == 3 * part == peers[(rank + 1) % 4].received_bytes
        assert sum(traffic.sent_bytes for traffic in peers.values()) == 3 * part


def test_broadcast_sends_each_rank_one_copy(pool_of_four):
    results = pool_of_four.run(broadcasts).results
    for src in range(4):
        by_peer = [found[src] for found in results]
        check_conserved(by_peer)
        received = [sum(t.received_bytes for t in peers.values()) for peers in by_peer]
        assert received == [0 if rank == src else 32 for rank in range(4)]
        # A tree of two levels: its root sends to two ranks, one of which sends to the fourth.
        sent = [sum(t.sent_bytes for t in peers.values()) for peers in by_peer]
        assert sent[src] == 64
        assert sorted(sent) == [0, 0, 32, 64]


def test_all_reduce_takes_the_ring_twice(pool_of_four):
    """Of 160 bytes each rank sends three of four parts to reduce them and three to spread them."""
    by_peer = pool_of_four.run(reduced_bytes).results
    check_conserved(by_peer)
    for rank, peers in enumerate(by_peer):
        assert sum(traffic.sent_bytes for traffic in peers.values()) == 2 * 3 * 40
        assert peers[(rank - 1) % 4].sent_bytes == peers[(rank + 1) % 4].received_bytes == 240


def test_messages_on_a_stream_are_those_of_rounds(pool_of_four):
    """NCCL's way, with gloo below: all-to-all is one batch, and what is counted stays the same."""
    results = pool_of_four.run(exchanges_on_a_stream).results
    assert [by_peer for by_peer, _ in results] == pool_of_four.run(exchange).results
    assert [batches for _, batches in results] == [[5], [6], [5], [6]]
    pool_of_four.run(gathers_on_a_stream)


def test_rounds_on_a_stream_are_packed_one_after_another(pool_of_four):
    results = pool_of_four.run(posted_rounds_on_a_stream).results
    assert results == [([0, 1], [2, 2])] * 2 + [([0], [2])] * 2


def test_a_group_is_joined_once_before_its_first_rounds(pool_of_four):
    """Else the ranks that a first round leaves out would keep the others waiting."""
    assert pool_of_four.run(joins).results == [[1, 0, 0, 0]] * 2 + [[]] * 2


def test_subgroups(pool_of_four):
    results = pool_of_four.run(subgroups).results
    assert results == [((0, 2), 2.0), ((1, 3), 4.0)] * 2


def test_mesh_becomes_a_device_mesh(pool_of_four):
    results = pool_of_four.run(device_mesh).results
    assert results[2] == (("dp", "tp"), 1, 0)


def test_rows_make_a_dtensor(pool_of_four):
    for count in (9, 8, 2):
        whole = torch.arange(count * 3.0).view(count, 3)
        for found in pool_of_four.run(sharded_rows, whole).results:
            assert torch.equal(found, whole)


def test_world_needs_torch_distributed():
    with pytest.raises(CommError, match="not initialised in this process"):
        Group.world()
