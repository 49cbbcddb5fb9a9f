"""Calls on a group of two workers beside verl's worker group and raw Ray: empty ones, and 16 MiB.

The ways take turns: some calls of ours, as many of the peer's. Answers are checked in each call.
"""

import time
from pathlib import Path
from statistics import median, quantiles

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.controller import Workers
from hybridflow.group import WorkerGroup
from hybridflow.protocols import remote
from hybridflow.worker import Worker
from shared.claims import Claim

TURNS = 12
COMMAND = "hatch run bench hybridflow -k calls"


class Calls(Worker):
    @remote()
    def noop(self):
        return None

    @remote(protocol="dp")
    def double(self, data):
        return Batch(y=torch.cat([data["x"], data["x"]], 1))


def timed(call, rounds):
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return taken


def spread(seconds):
    low, _, high = quantiles(seconds, n=4)
    return f"quartiles {1e3 * low:.3g} and {1e3 * high:.3g} ms"


def bulk(group):
    x = torch.randn(1024, 4096)
    batch = Batch(x=x)

    def call():
        found = group.double(batch).result()
        assert torch.equal(found["y"][:, :4096], x)

    return call


@pytest.mark.parametrize(("what", "rounds", "aim"), [("noop", 50, 10.0), ("bulk", 3, 15.0)])
def bench_local_calls_against_verl(what, rounds, aim, peer, benchmark, record_claim):
    ours, theirs = [], []
    with Workers.local(2) as workers, peer("verl", Path(__file__).with_name("verl_calls.py")) as it:
        group = WorkerGroup(Calls, workers.pool(2))
        call = bulk(group) if what == "bulk" else lambda: group.noop().result()
        is_right = it.ask({"what": what, "rounds": 5})["is_right"]
        timed(call, 5)

        def turns():
            right = True
            for _ in range(TURNS):
                ours.extend(timed(call, rounds))
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
    )


def bench_ray_calls_against_raw_ray(benchmark, record_claim, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray leaves a token there

    class Raw:
        def noop(self):
            return None

    with Workers.ray(num_ranks=2) as workers:
        group = WorkerGroup(Calls, workers.pool(2))
        actors = [ray.remote(Raw).options(num_cpus=0).remote() for _ in range(2)]
        ways = {
            "ours": lambda: group.noop().result(),
            "raw": lambda: ray.get([actor.noop.remote() for actor in actors]),
        }
        taken = {name: [] for name in ways}

        def turns():
            for turn in range(TURNS + 1):
                for name, way in ways.items():
                    seconds = timed(way, 50)
                    taken[name] += seconds if turn else []

        benchmark.pedantic(turns, rounds=1)
        is_right = ways["ours"]() == [None, None] == ways["raw"]()
    record_claim(
        Claim(
            name="a call that does nothing, Ray engine, two workers",
            unit="ms",
            ours=1e3 * median(taken["ours"]),
            baseline=1e3 * median(taken["raw"]),
            baseline_name="raw Ray, two actors",
            higher_is_better=False,
            correct=is_right,
            detail=f"{len(taken['ours'])} calls each in {TURNS} turns; ours "
            f"{spread(taken['ours'])}, raw {spread(taken['raw'])}",
            source=COMMAND,
        ),
        aim=1 / 1.1,
    )
