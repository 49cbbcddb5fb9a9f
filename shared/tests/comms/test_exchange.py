import os
import random
import re
import signal
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shared.comms import Group, RankPool, barrier, courier, start_exchange
from shared.comms.courier import connect
from shared.errors import CommError, ConfigError, RankFailure

# How many rows rank i of four sends to rank j: uneven, and 1 gets nothing, 2 sends nothing.
UNEVEN = [[3, 0, 5, 1], [7, 0, 2, 11], [0, 0, 0, 0], [40, 0, 1, 6]]


def sizes_of(group: Group, table) -> tuple[list[int], list[int]]:
    """This rank's rows for each rank, and those from each."""
    peers = range(group.world_size)
    return [table[group.rank][j] for j in peers], [table[i][group.rank] for i in peers]


def draw_rows(count: int, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank)
    return torch.randint(-100, 100, (count, *shape), generator=g).to(dtype)


def exchange_by_torch(group: Group, rows, sends, recvs) -> torch.Tensor:
    """The rows received, by torch's own all-to-all of their bytes."""
    width = rows.new_empty((1, *rows.shape[1:])).nbytes
    raw = rows.contiguous().view(-1).view(torch.uint8).view(len(rows), width)
    out = torch.empty(sum(recvs), width, dtype=torch.uint8)
    dist.all_to_all_single(out, raw, recvs, sends, group=group.checked())
    return out.view(rows.dtype).view(sum(recvs), *rows.shape[1:])


def equal_to_torch(num_ranks: int) -> None:
    group = Group.of(range(num_ranks))
    if group.rank < 0:
        return
    rng = random.Random(num_ranks)
    tables = [
        UNEVEN,
        [[0] * 4 for _ in range(4)],
        [[2] * 4 for _ in range(4)],
        *([[rng.randrange(50) for _ in range(4)] for _ in range(4)] for _ in range(3)),
    ]
    kinds = [
        ((), torch.int64),
        ((), torch.int32),
        ((6,), torch.float32),
        ((3, 5), torch.bfloat16),
        ((1,), torch.uint8),
    ]
    for table in tables:
        sends, recvs = sizes_of(group, table)
        for shape, dtype in kinds:
            rows = draw_rows(sum(sends), shape, dtype, group.rank)
            before = rows.clone()
            pending = start_exchange(group, rows, sends, recvs, phase="tokens")
            received = pending.wait()
            assert received is pending.rows
            assert (received.dtype, received.shape) == (dtype, (sum(recvs), *shape))
            assert torch.equal(received, exchange_by_torch(group, rows, sends, recvs))
            assert torch.equal(rows, before)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_rows_are_those_of_torchs_all_to_all(pool_of_four, num_ranks):
    pool_of_four.run(equal_to_torch, num_ranks)


def several_in_flight() -> None:
    group = Group.world()
    sends, recvs = sizes_of(group, UNEVEN)
    rows = [draw_rows(sum(sends), (4,), torch.float32, 10 * group.rank + i) for i in range(7)]
    pending = [
        start_exchange(group, each, sends, recvs, phase=f"layer {i}") for i, each in enumerate(rows)
    ]
    order = list(range(7))
    random.Random(group.rank).shuffle(order)
    received = {index: pending[index].wait() for index in order}
    for index, each in enumerate(rows):
        assert torch.equal(received[index], exchange_by_torch(group, each, sends, recvs))
        assert torch.equal(pending[index].wait(), received[index])
    assert all(each.seconds_waited >= 0 for each in pending)
    assert pending[order[0]].seconds_waited > 0


def starts_without_its_peers() -> None:
    """A start that waited for the others' would keep rank 0 from the barrier that they wait for."""
    group = Group.world()
    rows = torch.full((4 << 18, 1), float(group.rank))
    sizes = [1 << 18] * 4
    connect(group, ["own"])
    if group.rank == 0:
        pending = start_exchange(group, rows, sizes, sizes, phase="ahead", lane="own")
        barrier(group)
    else:
        barrier(group)
        pending = start_exchange(group, rows, sizes, sizes, phase="ahead", lane="own")
    assert pending.wait()[:: 1 << 18, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def rows_that_require_a_gradient() -> None:
    group = Group.world()
    rows = torch.ones(4, 2, requires_grad=True)
    received = start_exchange(group, rows * 2, [1] * 4, [1] * 4, phase="p").wait()
    assert not received.requires_grad
    assert received.tolist() == [[2.0, 2.0]] * 4


def alone() -> None:
    group = [Group.of([rank]) for rank in range(4)][Group.world().rank]
    before = group.ledger.snapshot()
    rows = torch.arange(6).view(3, 2)
    pending = start_exchange(group, rows, [3], [3], phase="p")
    rows_received = pending.wait()
    assert torch.equal(rows_received, rows)
    assert rows_received.data_ptr() != rows.data_ptr()
    assert not group.ledger.snapshot().diff(before).cells


@pytest.mark.parametrize(
    "function",
    [several_in_flight, starts_without_its_peers, rows_that_require_a_gradient, alone],
    ids=lambda function: function.__name__,
)
def test_on_four_ranks(pool_of_four, function):
    pool_of_four.run(function, timeout=timedelta(seconds=60))


def count_bytes(backend: str) -> dict:
    group = Group.world()
    sends, recvs = sizes_of(group, UNEVEN)
    rows = draw_rows(sum(sends), (3,), torch.bfloat16, group.rank)
    before = group.ledger.snapshot()
    with mock.patch.object(group, "backend", backend):
        received = start_exchange(group, rows, sends, recvs, phase="layer 3").wait()
    cells = group.ledger.snapshot().diff(before).cells
    assert torch.equal(received, exchange_by_torch(group, rows, sends, recvs))
    return {key: (cell.sent_bytes, cell.received_bytes, cell.calls) for key, cell in cells.items()}


# NCCL's branch runs over gloo here, whose `all_to_all_single` it calls in the same way.
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_ledger_counts_rows_for_others_and_nothing_else(pool_of_four, backend):
    for rank, cells in enumerate(pool_of_four.run(count_bytes, backend).results):
        expected = {}
        for peer in range(4):
            sent, received = UNEVEN[rank][peer], UNEVEN[peer][rank]
            if peer != rank and sent + received:
                calls = (sent > 0) + (received > 0)
                expected["exchange", peer, "layer 3"] = 6 * sent, 6 * received, calls
        assert cells == expected


def messages_of_bad_input() -> list[str]:
    group, texts = Group.world(), []
    for rows, sends, recvs in (
        (torch.ones(4, 2), [1, 1, 1], [1] * 4),
        (torch.ones(4, 2), [1] * 4, [1, 1, 1, -1]),
        (torch.ones(5, 2), [1] * 4, [1] * 4),
        (torch.tensor(1.0), [0] * 4, [0] * 4),
        (torch.ones(4, 2), [1] * 4, [2] * 4),
        (torch.ones(2, 4).t(), [1] * 4, [1] * 4),
    ):
        with pytest.raises(ConfigError) as caught:
            start_exchange(group, rows, sends, recvs, phase="layers.0: tokens")
        texts.append(str(caught.value))
    # Nothing was sent, so that the next exchange is in step.
    assert start_exchange(group, torch.ones(4, 2), [1] * 4, [1] * 4, phase="p").wait().sum() == 8
    return texts


def test_bad_input_is_refused_with_rank_and_phase(pool_of_four):
    texts = pool_of_four.run(messages_of_bad_input).results[2]
    assert all(text.startswith("rank 2, phase 'layers.0: tokens': expected ") for text in texts)
    for text, part in zip(
        texts,
        [
            "send_sizes to be 4 numbers of rows of 0 or more, one for each rank, got [1, 1, 1]",
            "recv_sizes to be 4 numbers of rows of 0 or more, one for each rank, got [1, 1, 1, -1]",
            "send_sizes [1, 1, 1, 1] add up to, 4, got a tensor of shape [5, 2]",
            "add up to, 0, got a tensor of shape []",
            "that this rank keeps, got 1 in send_sizes and 2 in recv_sizes",
            "contiguous rows, got shape [4, 2] with strides (1, 4); call .contiguous()",
        ],
        strict=True,
    ):
        assert part in text


def receives_too_few(dtype: torch.dtype) -> str:
    """Every rank sends rank 1 two rows, which waits for three of rank 0."""
    group = Group.world()
    rows, sends = torch.ones(7, 2, dtype=dtype), [3, 2, 1, 1]
    recvs = [sends[group.rank]] * 4
    text = ""
    if group.rank == 1:
        recvs[0] = 3
    pending = start_exchange(group, rows, sends, recvs, phase="layers.1: tokens")
    if group.rank == 1:
        with pytest.raises(CommError) as caught:
            pending.wait()
        text = str(caught.value)
    else:
        pending.wait()
    barrier(group)
    return text


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_peer_that_sends_fewer_rows_is_named(pool_of_four, dtype):
    text = pool_of_four.run(receives_too_few, dtype).results[1]
    assert text.startswith("rank 1: expected 3 rows from rank 0 in phase 'layers.1: tokens'")


def failure_of(num_ranks: int, function, *args) -> str:
    """The failure of a run in a pool of its own, which does not survive it."""
    with (
        RankPool(num_ranks, timeout=timedelta(seconds=60)) as pool,
        pytest.raises(RankFailure) as caught,
    ):
        pool.run(function, *args)
    return str(caught.value)


def killed_in_an_exchange() -> None:
    group = Group.world()
    # More than the sockets' buffers hold, so that no message ends without its receiver.
    rows, sizes = torch.zeros(3 << 20, 4), [1 << 20] * 3
    start_exchange(group, rows, sizes, sizes, phase="layers.0: tokens").wait()
    if group.rank == 1:
        end = courier.wait_for_end

        def die(*args):
            os.kill(os.getpid(), signal.SIGKILL)
            end(*args)

        mock.patch.object(courier, "wait_for_end", die).start()
    start_exchange(group, rows, sizes, sizes, phase="layers.1: tokens").wait()


def test_a_killed_rank_is_named_by_the_others():
    text = failure_of(3, killed_in_an_exchange)
    assert text.startswith("rank 1 of 3 failed running killed_in_an_exchange: killed by SIGKILL")
    for rank in (0, 2):
        where = r"failed in round [01] of 2 of phase 'layers.1: tokens' \(exchange\)"
        assert re.search(f"CommError: rank {rank}: .* rank [012] {where}", text)


def one_rank_expects_nothing() -> None:
    world = Group.world()
    impatient = Group(dist.group.WORLD, range(2), timedelta(seconds=3), world.ledger)
    sends = [0, 2] if world.rank == 0 else [0, 0]
    rows = torch.ones(sum(sends), 1 << 20)
    start_exchange(impatient, rows, sends, [0, 0], phase="layers.2: tokens").wait()
    barrier(world)


def test_rows_that_nobody_expects_end_in_a_timeout_that_names_the_peer():
    text = failure_of(2, one_rank_expects_nothing)
    where = "sending to rank 1 failed in round 0 of 1 of phase 'layers.2: tokens' (exchange)"
    assert where in text
    assert "Rank 1 died, hangs or disagrees on the message" in text
