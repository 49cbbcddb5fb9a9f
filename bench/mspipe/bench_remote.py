"""TGN whose memory lies on another host, over real links of 100 and 200 Mbit/s.

A generated Zipf stream over two million nodes, of which those that occur have a row on a memory server in
one network namespace; training runs in another. Most of these rows are read in a pass; each claim says how
many. The ways take the same batches, and turns, a pass each; the first pass warms up and counts for nothing
but equality. A baseline gets every trick that is not the pipeline's own: `prefetch` samples and fetches
features ahead and hands rows to be written over before its backward pass. Like is set beside like: both
ways with a cache of the ring's bytes, or both without. `forward` must leave the losses and rows of `sync`,
to the bit, in all passes, with random delays of its reads and writes too.
"""

import hashlib
import math
import random
import subprocess
import sys
import time
from datetime import timedelta
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

import mspipe as ms
from shared.claims import Claim
from shared.comms import NetLab, netlab

pytestmark = [
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

NUM_DRAWN, BATCH, EDGE_DIM, NUM_BATCHES, PASSES = 2_000_000, 300, 16, 16, 4
PORT = 7031
WAYS: dict[str, dict[str, Any]] = {
    "forward": {"mode": "forward"},
    "sync": {"mode": "sync"},
    "prefetch, written after the step": {"mode": "prefetch", "is_early": False},
    "prefetch": {"mode": "prefetch"},
    "prefetch, with a cache": {"mode": "prefetch"},
    "forward, with a cache": {"mode": "forward"},
    "stale": {"mode": "stale"},
    "forward, with random delays": {"mode": "forward"},
}
WITHOUT = list(WAYS)[1:4]
# Ours, and the baselines that have what it has.
RIVALS = {
    "forward": WITHOUT,
    "stale": WITHOUT,
    "forward, with a cache": ["prefetch, with a cache"],
}
PEERS = [
    {
        "peer": "mspipe's prefetch",
        "setting": "samples and features ahead, memory once the last write has ended, rows handed over "
        "before the backward pass or after the step, whichever is faster",
        "why": "the most that overlaps without handing rows on",
    },
    {
        "peer": "mspipe's prefetch, with a cache",
        "setting": "an LRU cache of as many bytes as ours, taking turns with it",
        "why": "what is cached is not read over the link; ours has the same cache beside it",
    },
    {
        "peer": "mspipe's sync",
        "setting": "one stage after another, no cache",
        "why": "where nothing overlaps, no stage holds another up",
    },
]
EXACT = ["forward", "forward, with a cache", "forward, with random delays"]


class DelayedRows:
    """Rows whose reads and writes take up to 60 ms longer, each as drawn."""

    def __init__(self, rows):
        self._rows, self._draw = rows, random.Random(0)

    def __getattr__(self, name):
        return getattr(self._rows, name)

    def read(self, ids):
        time.sleep(0.06 * self._draw.random())
        return self._rows.read(ids)

    def write(self, ids, rows):
        time.sleep(0.06 * self._draw.random())
        self._rows.write(ids, rows)


class Way:
    """One way to train, and what it gave so far."""

    def __init__(self, name, address, events, cache_bytes):
        torch.manual_seed(0)
        self.model = ms.models.TGN(100, EDGE_DIM)
        self.memory = ms.NodeMemory(
            events.num_nodes, 100, self.model.mail_dim, place=address,
            cache_bytes=cache_bytes if "cache" in name else 0,
        )  # fmt: skip
        if "delays" in name:
            self.memory.rows = DelayedRows(self.memory.rows)  # type: ignore[bad-assignment]
        sampler = ms.Sampler(events, [10])
        self.pipe = ms.Pipeline(self.model, self.memory, sampler, events.features, **WAYS[name])
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3, fused=True)
        self.events = events
        self.losses, self.digests, self.seconds, self.stages, self.rings = [], [], [], [], []

    def learn(self, number):
        """A pass, from an empty memory; the first batches of the stream are only neighbours."""
        self.memory.reset()
        torch.manual_seed(number)  # of dropout, whoever had the turn before
        cut = islice(ms.batches(self.events, BATCH, seed=number), 3 * NUM_BATCHES, None)
        for out in self.pipe.train(cut):
            self.optimizer.zero_grad()
            out.loss.backward()
            self.optimizer.step()
            self.losses.append(out.loss.item())
        report = self.pipe.report()
        self.seconds.append(report.elapsed_s)
        self.stages.append([sum(report.seconds(stage)) for stage in ms.planner.STAGES])
        self.rings.append(report.ring_bytes)
        rows = self.memory.read_rows(written(self.events))
        self.digests.append(hashlib.sha256(rows.numpy().tobytes()).hexdigest())

    def found(self):
        report, cache = self.pipe.report(), self.memory.cache
        return {
            "losses": self.losses, "digests": self.digests, "seconds": self.seconds[1:],
            "stages": self.stages[1:], "rings": self.rings, "staleness": report.histogram,
            "dropped": report.dropped_share, "row_bytes": self.memory.layout.row_bytes,
            "kept": cache.num_found / cache.num_asked if cache else 0.0,
        }  # fmt: skip


def stream():
    """Events whose nodes are numbered anew, so that there is no row that no event has."""
    drawn = ms.data.zipf(NUM_DRAWN, NUM_BATCHES * BATCH * 4, seed=1, edge_dim=EDGE_DIM)
    nodes, ends = torch.cat([drawn.src, drawn.dst]).unique(return_inverse=True)
    src, dst = ends.split(len(drawn))
    events = ms.Events(src, dst, drawn.t, drawn.features, label=drawn.label)
    assert events.num_nodes == len(nodes)
    return events


def read_in_a_pass(events):
    """How many different rows the last pass's batches read."""
    sampler = ms.Sampler(events, [10])
    cut = islice(ms.batches(events, BATCH, seed=PASSES - 1), 3 * NUM_BATCHES, None)
    return len(torch.cat([sampler.sample(*batch.roots).nodes for batch in cut]).unique())


def written(events):
    """Nodes that a pass writes."""
    last = events[-NUM_BATCHES * BATCH :]
    return torch.unique(torch.cat([last.src, last.dst]))


def take_turns(address):
    torch.set_num_threads(1)
    events, ways, ring = stream(), {}, 0
    for number in range(PASSES):
        for name in WAYS:
            if name not in ways:
                ways[name] = Way(name, address, events, ring)
            ways[name].learn(number)
            ring = ring or max(ways["forward"].rings)
    return {name: way.found() for name, way in ways.items()}


@pytest.mark.parametrize("rate", ["200mbit", "100mbit"])
def bench_remote(benchmark, record_claim, rate):
    with NetLab(hosts=2, rate=rate) as lab:
        address = f"{lab.address(1)}:{PORT}"
        server = subprocess.Popen(
            [*lab.command(1), sys.executable, "-m", "mspipe", "serve-memory", "--bind", address],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None, "it is a pipe"
            assert "serving" in server.stdout.readline()
            with lab.pool(hosts=[0], timeout=timedelta(minutes=20)) as pool:
                found = benchmark.pedantic(
                    lambda: pool.run(take_turns, f"tcp://{address}").results[0], rounds=1
                )
        finally:
            server.kill()
            server.communicate()
    record(benchmark, record_claim, rate, found)


def record(benchmark, record_claim, rate, found):
    for way, one in found.items():
        stages = ", ".join(f"{s / NUM_BATCHES * 1e3:.0f}" for s in np.median(one["stages"], 0))
        benchmark.extra_info[way] = (
            f"{' '.join(f'{s:.2f}' for s in one['seconds'])} s (stages {stages} ms), staleness "
            f"{one['staleness']}, dropped {100 * one['dropped']:.1f} %, cached {100 * one['kept']:.0f} %"
        )
    sync, forward = found["sync"], found["forward"]
    is_same = all(found[way][what] == sync[what] for way in EXACT for what in ("losses", "digests"))
    # A pass writes other rows than the one before, as weights have moved; losses are of all batches.
    has_learnt = len(set(sync["digests"])) == PASSES and all(
        len(one["losses"]) == PASSES * NUM_BATCHES and all(map(math.isfinite, one["losses"]))
        for one in found.values()
    )
    events, row_bytes = stream(), forward["row_bytes"]
    num_read = read_in_a_pass(events)
    about = (
        f"{events.label}, {events.num_nodes:,} nodes of it, {events.num_nodes * row_bytes / 1e6:.0f} MB on "
        f"the server, of which a pass reads {num_read / events.num_nodes:.0%}; {NUM_BATCHES} batches of "
        f"{BATCH}, median of {PASSES - 1} passes; losses and rows of sync and forward, with random delays "
        f"and with a cache too, are the same to the bit in {PASSES}"
    )
    source = "hatch run bench mspipe/remote"
    for ours, rivals in RIVALS.items():
        mine = found[ours]["seconds"]
        best = min(rivals, key=lambda way: median(found[way]["seconds"]))
        is_cached = "cache" in ours
        alike = "prefetch, with the same cache" if is_cached else "the best without a cache"
        rows: list[tuple[str, list[float], float | None]]
        rows = [(alike, found[best]["seconds"], 1.3)]
        if not is_cached:
            longest_each = [max(p[0], p[1] + p[2], p[3], p[4]) for p in sync["stages"]]
            rows.append(("the longest stage alone, in sync", longest_each, 1 / 1.1))
            rows.append(("sync", sync["seconds"], None))
        for baseline, seconds, aim in rows:
            ratios = [theirs / our for theirs, our in zip(seconds, mine, strict=True)]
            record_claim(
                Claim(
                    name=f"a pass with memory over {rate}, {ours}",
                    unit="s",
                    ours=median(mine),
                    baseline=float(median(seconds)),
                    baseline_name=baseline,
                    higher_is_better=False,
                    correct=is_same and has_learnt,
                    detail=f"{about}; the baseline is {best}" if baseline == alike else about,
                    source=source,
                ),
                aim=aim,
                spread=(min(ratios), max(ratios)),
            )
    parts = list(ms.batches(events, BATCH))[3 * NUM_BATCHES :]
    most = max(len(torch.cat([p.events.src, p.events.dst]).unique()) for p in parts)
    expected = 3 * most * row_bytes
    record_claim(
        Claim(
            name=f"rows kept for later iterations, {rate}",
            unit="MB",
            ours=max(forward["rings"]) / 1e6,
            baseline=expected / 1e6,
            baseline_name="depth x rows that a batch writes x bytes of a row",
            higher_is_better=False,
            correct=is_same and has_learnt,
            detail=f"depth 3, at most {most} rows a batch of {row_bytes:,} bytes",
            source=source,
        ),
        aim=1.0,
        spread=(expected / max(forward["rings"]), expected / min(forward["rings"])),
    )
