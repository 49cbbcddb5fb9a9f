"""Refilling a newcomer: the share of its link that the state takes, at 1 Gbit/s.

A MiniLM of 22 million parameters with AdamW's state, 265 MB, moves from two survivors to a newcomer by
`swift.recovery.transfer`, each on an emulated host of its own whose link has 1 Gbit/s. The newcomer's link is
the limit: all bytes pass it.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
import torch

import swift
from shared.claims import Claim
from shared.comms import Group, NetLab, all_gather, barrier, netlab
from shared.comms.courier import post_rounds
from shared.comms.rounds import Round
from shared.kernels.digest import digest
from swift.recovery.transfer import list_fetches, move

sys.path.insert(0, str(Path(__file__).parent))
import job

RANKS, ROUNDS, LINK_BYTES_PER_S = 3, 7, 1e9 / 8
COMMAND = "hatch run bench swift/refill"


class Place(NamedTuple):
    """A rank's place, as a run gives it; without a rank on a spare."""

    rank: int | None
    world_size: int = RANKS
    reads_whole_batches: bool = False


def make(is_filled):
    """A rank's part: with state after a step, or as a spare has it that waits."""
    model = job.make_model("minilm")
    optimizer = swift.undoable(torch.optim.AdamW(model.parameters(), 1e-3))
    parallel = swift.DataParallel(model, optimizer, Place(0 if is_filled else None))
    draw = torch.Generator().manual_seed(0)
    for one in optimizer.parameters if is_filled else ():
        one.grad = torch.randn(one.shape, generator=draw)
    if is_filled:
        optimizer.step()
        optimizer.zero_grad()
        optimizer.confirm()
    else:
        for one in optimizer.parameters:
            one.data.zero_()
        parallel.warm()
    return parallel


def send_alone(group, lost, num_bytes):
    """Seconds in which gloo moves as many bytes from each survivor in turn, and nothing else is done."""
    parts = torch.ones(RANKS, num_bytes // (RANKS - 1), dtype=torch.uint8)
    rounds = [
        Round(
            send_to=lost if group.rank == source else source,
            send=parts[source] if group.rank == source else None,
            recv_from=source if group.rank == lost else lost,
            recv=parts[source] if group.rank == lost else None,
        )
        for source in range(RANKS)
        if source != lost and group.rank in (source, lost)
    ]
    barrier(group)
    begun = time.perf_counter()
    post_rounds(group, rounds).wait_all()
    return time.perf_counter() - begun


def refill(rounds):
    """Seconds of each refill and of gloo alone, bytes received here, and whether all ended equal."""
    torch.set_num_threads(1)
    group = Group.world()
    lost = RANKS - 1
    seconds, alone, received, is_equal = [], [], 0, True
    survivor = None if group.rank == lost else make(True)
    for _ in range(rounds):
        parallel = survivor or make(False)
        parallel.regroup(group)
        entries = range(len(parallel.versions()))
        sets = [{rank: None if rank == lost else [1] * len(entries) for rank in range(RANKS)}]
        decision = swift.decide(sets)
        counts = [len(parallel.state_of(entry)) for entry in entries]
        rows = all_gather(
            group, torch.tensor([parallel.state_of(entries[-1])["rest"].numel(), *counts])
        )
        barrier(group)
        begun = time.perf_counter()
        received = move(
            group,
            parallel,
            list_fetches(decision.fetch, [list(range(RANKS))]),
            1,
            is_lost=group.rank == lost,
            rest_bytes=[int(row[0]) for row in rows],
            num_tensors={rank: row[1:].tolist() for rank, row in enumerate(rows)},
        )
        seconds.append(time.perf_counter() - begun)
        received = int(all_gather(group, torch.tensor([received]))[lost])
        alone.append(send_alone(group, lost, received))
        state = [one for entry in entries for one in parallel.state_of(entry).values()]
        found = all_gather(group, torch.tensor([digest(state) >> 1]))
        is_equal &= len({int(one) for one in found}) == 1
    return seconds, alone, received, is_equal


def bench_refill_of_a_newcomer(benchmark, record_claim):
    if reason := netlab.available():
        pytest.skip(reason)
    with (
        NetLab(hosts=RANKS, rate="1gbit") as lab,
        lab.pool(timeout=timedelta(minutes=10), modules=["transformers"]) as pool,
    ):
        results = benchmark.pedantic(lambda: pool.run(refill, ROUNDS + 1).results, rounds=1)
    seconds, alone, received, is_equal = results[-1]
    rates = [received / one for one in seconds[1:]]
    record_claim(
        Claim(
            name="refill of a newcomer, MiniLM, two survivors, 1 Gbit/s",
            unit="GB/s",
            ours=median(rates) / 1e9,
            baseline=LINK_BYTES_PER_S / 1e9,
            baseline_name="the newcomer's link",
            higher_is_better=True,
            correct=is_equal,
            detail=f"{received / 1e6:.0f} MB in {median(seconds[1:]):.3f} s, {ROUNDS} times; digests equal "
            f"afterwards: {is_equal}; gloo alone moves as many in {median(alone[1:]):.3f} s, in turns with "
            "it; frames and TCP take 5 % of such a link",
            source=COMMAND,
        ),
        aim=0.9,
        spread=(min(rates) / LINK_BYTES_PER_S, max(rates) / LINK_BYTES_PER_S),
    )
