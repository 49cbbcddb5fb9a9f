import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shared.comms import Group, Ledger, Round, all_reduce, barrier, post_rounds
from shared.errors import CommError, ConfigError


def swap(send, recv) -> Round:
    peer = 1 - dist.get_rank()
    return Round(send_to=peer, send=send, recv_from=peer, recv=recv)


def private_group(timeout: timedelta) -> Group:
    """A group with a courier of its own, which a test may break."""
    return Group(dist.group.WORLD, range(dist.get_world_size()), timeout, Ledger())


def rounds_in_order() -> None:
    group = Group.world()
    before = group.ledger.snapshot()
    received = [torch.full((5,), -1.0) for _ in range(6)]
    rounds = [swap(torch.full((5,), 10.0 * r + group.rank), received[r]) for r in range(6)]
    pending = post_rounds(group, rounds, "forward1")
    assert len(pending) == 6
    for index in reversed(range(6)):
        pending.wait(index)
        assert received[index].tolist() == [10.0 * index + 1 - group.rank] * 5
    pending.wait_all()
    assert pending.seconds_waited > 0
    assert all(seconds > 0 for seconds in pending.round_s)
    traffic = group.ledger.snapshot().diff(before).by_phase()["forward1"]
    assert (traffic.sent_bytes, traffic.received_bytes, traffic.calls) == (120, 120, 12)


def packed_for_its_round() -> list[int]:
    """How many earlier messages live when each round's is packed."""
    found, packed = [], []

    def pack() -> torch.Tensor:
        found.append(sum(message() is not None for message in packed))
        tensor = torch.ones(1000)
        packed.append(weakref.ref(tensor))
        return tensor

    received = [torch.empty(1000) for _ in range(5)]
    post_rounds(Group.world(), [swap(pack, into) for into in received], "packed").wait_all()
    return found


def schedules_in_a_row() -> None:
    group = Group.world()
    received = torch.zeros(40, dtype=torch.int64)
    pending = [
        post_rounds(group, [swap(torch.tensor([i + 100 * group.rank]), received[i : i + 1])])
        for i in range(40)
    ]
    for one in pending:
        one.wait_all()
    assert received.tolist() == [i + 100 * (1 - group.rank) for i in range(40)]


def callables_follow_the_rounds() -> None:
    group = Group.world()
    seen = []
    received = torch.zeros(3)

    def made(index: int):
        # Round i may only be packed when what round i - 1 receives is there.
        seen.append((index, received[:index].tolist(), threading.current_thread().name))
        return torch.tensor([float(index + 1)])

    rounds = [swap(lambda i=i: made(i), received[i : i + 1]) for i in range(3)]
    post_rounds(group, rounds, "p").wait_all()
    assert seen == [
        (0, [], "courier"),
        (1, [1.0], "courier"),
        (2, [1.0, 2.0], "courier"),
    ]


def nothing_to_send() -> None:
    group = Group.world()
    before = group.ledger.snapshot()
    received = torch.zeros(2)
    one_way = torch.ones(2) if group.rank == 0 else None
    rounds = [
        swap(torch.empty(0), torch.empty(0)),
        swap(None, None),
        swap(lambda: None, None),
        swap(one_way, received if group.rank == 1 else None),
    ]
    post_rounds(group, rounds, "p").wait_all()
    assert received.sum() == (2 if group.rank == 1 else 0)
    traffic = group.ledger.snapshot().diff(before).total
    assert traffic.calls == 1
    post_rounds(group, [], "p").wait_all()


def collectives_while_rounds_fly() -> None:
    group = Group.world()
    passed = threading.Event()

    def late() -> torch.Tensor:
        assert passed.wait(60)
        return torch.full((1 << 20,), float(group.rank))

    received = torch.empty(1 << 20)
    pending = post_rounds(group, [swap(late, received)], "p")
    # A courier that held the GIL in gloo, or shared its connections, would stop the ranks here.
    for _ in range(20):
        assert all_reduce(group, torch.ones(1000)).sum() == 2000
    barrier(group)
    passed.set()
    pending.wait_all()
    assert received.mean() == 1 - group.rank


def silent_peer() -> str:
    group = private_group(timedelta(seconds=3))  # for the rounds before too
    received = torch.empty(1)
    post_rounds(group, [swap(torch.ones(1), received)], "warm").wait_all()
    text = ""
    if group.rank == 0:
        pending = post_rounds(group, [swap(None, None), swap(None, received)], "backward1")
        pending.wait(0)
        start = time.monotonic()
        with pytest.raises(CommError) as caught:
            pending.wait_all()
        assert time.monotonic() - start < 40
        text = str(caught.value)
        with pytest.raises(CommError):
            post_rounds(group, [swap(None, None)], "later").wait(0)
    dist.barrier()
    return text


def failing_callable() -> None:
    group = private_group(timedelta(seconds=60))
    received = torch.empty(1)
    post_rounds(group, [swap(torch.ones(1), received)], "warm").wait_all()

    def fails() -> torch.Tensor:
        raise LookupError("no row 7")

    pending = post_rounds(group, [swap(fails, None)], "p")
    with pytest.raises(LookupError, match="no row 7"):
        pending.wait_all()


def bad_rounds() -> None:
    group = Group.world()
    with pytest.raises(ConfigError, match="another rank of the group as its peer, got 2"):
        post_rounds(group, [Round(send_to=2, send=torch.ones(1), recv_from=0, recv=None)])
    me = group.rank
    with pytest.raises(ConfigError, match="as its peer, got"):
        post_rounds(group, [Round(send_to=me, send=torch.ones(1), recv_from=me, recv=None)])
    with pytest.raises(ConfigError, match=r"contiguous, got shape \(2, 2\)"):
        post_rounds(group, [swap(None, torch.ones(2, 3)[:, :2])])
    with pytest.raises(ConfigError, match="moves cpu tensors, got one on meta"):
        post_rounds(group, [swap(torch.ones(1, device="meta"), None)])


def half_types() -> None:
    group = Group.world()
    for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.float64):
        received = torch.empty(7, dtype=dtype)
        post_rounds(group, [swap(torch.ones(7).to(dtype), received)], "p").wait_all()
        assert received.float().sum() == 7


def test_a_message_is_let_go_when_its_round_has_ended(pool):
    # The last one is being taken down while the next is packed.
    assert all(max(found) <= 1 for found in pool.run(packed_for_its_round).results)


@pytest.mark.parametrize(
    "function",
    [
        rounds_in_order,
        schedules_in_a_row,
        callables_follow_the_rounds,
        nothing_to_send,
        collectives_while_rounds_fly,
        failing_callable,
        bad_rounds,
        half_types,
    ],
    ids=lambda function: function.__name__,
)
def test_on_two_ranks(pool, function):
    pool.run(function, timeout=timedelta(seconds=60))


def test_silent_peer_ends_in_an_error_that_names_peer_round_and_phase(pool):
    text = pool.run(silent_peer, timeout=timedelta(seconds=100)).results[0]
    assert "rank 0: receiving from rank 1 failed in round 1 of 2 of phase 'backward1'" in text
    assert "timeout (3 s)" in text


def couriers_left():
    """Threads of couriers with a private group, and at the moment that it is gone."""

    def alive():
        return sum(thread.name == "courier" for thread in threading.enumerate())

    before = alive()
    group = private_group(timedelta(seconds=30))
    for number in range(4):
        lane = f"lane{number}"
        post_rounds(group, [swap(torch.ones(2), torch.zeros(2))], "x", lane=lane).wait_all()
    held = alive() - before
    del group
    return held, alive() - before


def test_idle_couriers_have_ended_when_their_group_has(pool):
    # A thread that frees its connections while the interpreter ends would take the process with it.
    assert pool.run(couriers_left).results == [(4, 0)] * 2
