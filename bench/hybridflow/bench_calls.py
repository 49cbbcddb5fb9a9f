"""Calls on a group of two workers beside verl's worker group and raw Ray: empty ones, and 16 MiB.

The ways take turns: some calls of ours, as many of the peer's. All answers are compared.
"""

import multiprocessing
import os
import time
from pathlib import Path
from statistics import median, quantiles

import pytest
import torch

from hybridflow.workers.batch.batch import Batch
from hybridflow.workers.controller import Workers
from hybridflow.workers.protocols import remote
from hybridflow.workers.worker import Worker
from hybridflow.workers.worker_group import WorkerGroup
from shared.claims import Claim

TURNS = 12
COMMAND = "hatch run bench hybridflow -k calls"
PEERS = [
    {
        "peer": "verl 0.9.1",
        "setting": "RayWorkerGroup on one machine, colocated pool, task events, dashboard and logs to "
        "the driver off",
        "why": "as our Ray engine; events and logs are what Ray lets one leave out of a call",
    },
    {
        "peer": "verl 0.9.1",
        "setting": "DataProto of one tensor, DP_COMPUTE_PROTO, answers fetched in the call",
        "why": "its own way to split a batch and to join answers",
    },
    {
        "peer": "raw Ray",
        "setting": "two actors, num_cpus=0, enable_task_events=False, one ray.get for both answers",
        "why": "no reservation, event or second wait is left; with 34 bytes a call carries as much as "
        "ours",
    },
    {
        "peer": "bare pipes",
        "setting": "one write and one read of 42 bytes a process, both written before one is read",
        "why": "the fewest system calls with which two processes can be asked",
    },
]


class Calls(Worker):
    @remote()
    def noop(self):
        return None

    @remote(protocol="dp")
    def double(self, data):
        return Batch(y=torch.cat([data["x"], data["x"]], 1))


def timed(call, looks_right, rounds):
    """Seconds of each call, and whether all answers, looked at when the clock has stopped, are right."""
    taken, is_right = [], True
    for _ in range(rounds):
        begun = time.perf_counter()
        found = call()
        taken.append(time.perf_counter() - begun)
        is_right &= looks_right(found)
    return taken, is_right


def in_turns(ways, benchmark):
    """Seconds of 50 calls each way in turns, after one untimed turn, and whether all were right."""
    taken, right = {name: [] for name in ways}, []

    def turns():
        for turn in range(TURNS + 1):
            for name, way in ways.items():
                seconds, is_right = timed(way, is_nothing, 50)
                right.append(is_right)
                taken[name] += seconds if turn else []

    benchmark.pedantic(turns, rounds=1)
    return taken, all(right)


def turns_apart(ours, theirs):
    """The lowest and the highest of the turns' ratios, each of the median calls of a turn."""
    middles = [
        [
            median(calls[at : at + len(calls) // TURNS])
            for at in range(0, len(calls), len(calls) // TURNS)
        ]
        for calls in (ours, theirs)
    ]
    ratios = [their_s / our_s for our_s, their_s in zip(*middles, strict=True)]
    return min(ratios), max(ratios)


def spread(seconds):
    low, _, high = quantiles(seconds, n=4)
    return f"quartiles {1e3 * low:.3g} and {1e3 * high:.3g} ms"


def claim_of(name, taken, other, baseline_name, is_right):
    """What `in_turns` has taken, ours beside the other way."""
    return Claim(
        name=name,
        unit="ms",
        ours=1e3 * median(taken["ours"]),
        baseline=1e3 * median(taken[other]),
        baseline_name=baseline_name,
        higher_is_better=False,
        correct=is_right,
        detail=f"{len(taken['ours'])} calls each in {TURNS} turns; ours {spread(taken['ours'])}, "
        f"{other} {spread(taken[other])}",
        source=COMMAND,
    )


def is_nothing(found):
    return found == [None, None]


def noop(group):
    return lambda: group.noop().result(), is_nothing


def bulk(group):
    x = torch.randn(1024, 4096)
    batch = Batch(x=x)

    return lambda: group.double(batch).result(), lambda found: torch.equal(found["y"][:, :4096], x)


@pytest.mark.parametrize(("what", "rounds", "aim"), [("noop", 50, 10.0), ("bulk", 3, 15.0)])
def bench_local_calls_against_verl(what, rounds, aim, peer, benchmark, record_claim):
    ours, theirs = [], []
    with Workers.local(2) as workers, peer("verl", Path(__file__).with_name("verl_calls.py")) as it:
        group = WorkerGroup(Calls, workers.pool(2))
        call, looks_right = bulk(group) if what == "bulk" else noop(group)
        is_right = it.ask({"what": what, "rounds": 5})["is_right"]
        is_right &= timed(call, looks_right, 5)[1]

        def turns():
            right = True
            for _ in range(TURNS):
                seconds, is_ours_right = timed(call, looks_right, rounds)
                ours.extend(seconds)
                right &= is_ours_right
                answer = it.ask({"what": what, "rounds": rounds})
                theirs.extend(answer["seconds"])
                right &= answer["is_right"]
            return right

        is_right &= benchmark.pedantic(turns, rounds=1)
    name = "a call that does nothing" if what == "noop" else "16 MiB split, 32 MiB back"
    record_claim(
        Claim(
            name=f"{name}, local engine, two workers",
            unit="ms",
            ours=1e3 * median(ours),
            baseline=1e3 * median(theirs),
            baseline_name="verl 0.9.1, Ray on this machine",
            higher_is_better=False,
            correct=is_right,
            detail=f"{len(ours)} calls each in {TURNS} turns; ours {spread(ours)}, verl's "
            f"{spread(theirs)}; answers compared in every call",
            source=COMMAND,
        ),
        aim=aim,
        spread=turns_apart(ours, theirs),
    )


def bench_ray_calls_against_raw_ray(benchmark, record_claim, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray leaves a token there

    class Raw:
        def noop(self):
            return None

        def take(self, data):
            return None

    said = bytes(34)  # as many as ours says: which method of which group, and of which call
    with Workers.ray(num_ranks=2) as workers:
        group = WorkerGroup(Calls, workers.pool(2))
        settings = {"num_cpus": 0, "enable_task_events": False}  # as our own
        actors = [ray.remote(Raw).options(**settings).remote() for _ in range(2)]
        ways = {
            "ours": noop(group)[0],
            "raw": lambda: ray.get([actor.noop.remote() for actor in actors]),
            "raw, told": lambda: ray.get([actor.take.remote(said) for actor in actors]),
        }
        taken, is_right = in_turns(ways, benchmark)
    what = "a call that does nothing, Ray engine, two workers"
    record_claim(
        claim_of(what, taken, "raw", "raw Ray, two actors", is_right),
        aim=1 / 1.1,
        spread=turns_apart(taken["ours"], taken["raw"]),
    )
    told = "raw Ray, two actors, calls that carry 34 bytes"
    record_claim(
        claim_of(what, taken, "raw, told", told, is_right),
        spread=turns_apart(taken["ours"], taken["raw, told"]),
    )


def echo(link):
    """Answers with what it was asked, until that is to stop; a system call each."""
    while (data := os.read(link.fileno(), 4096)) != b"stop":
        os.write(link.fileno(), data)


def bench_local_calls_against_bare_pipes(benchmark, record_claim):
    """The limit: a message of as many bytes to each of two processes, and back."""
    start = multiprocessing.get_context("spawn")
    links, others = zip(*(start.Pipe() for _ in range(2)), strict=True)
    processes = [start.Process(target=echo, args=(other,)) for other in others]
    for process in processes:
        process.start()
    data = bytes(42)

    def bare():
        for link in links:
            os.write(link.fileno(), data)
        return [None if os.read(link.fileno(), 4096) == data else data for link in links]

    with Workers.local(2) as workers:
        ways = {"ours": noop(WorkerGroup(Calls, workers.pool(2)))[0], "bare": bare}
        taken, is_right = in_turns(ways, benchmark)
    for link in links:
        os.write(link.fileno(), b"stop")
    for process in processes:
        process.join()
    what = "a call that does nothing, local engine, against its limit"
    told = "42 bytes by pipes to two processes and back"
    record_claim(
        claim_of(what, taken, "bare", told, is_right),
        spread=turns_apart(taken["ours"], taken["bare"]),
    )
