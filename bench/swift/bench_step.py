"""Steps without failures: what being able to lose a rank costs, beside torch's DDP with fused AdamW.

A MiniLM of 22 million parameters from a config, float32, 4 sequences of 32 tokens a rank, two ranks of one
thread each: on two hosts that an emulated network of 1 Gbit/s joins, and on one over loopback. Ways take
turns step by step in the same processes. All begin with the same weights and see the same inputs, and must
end with the same weights but for rounding; the weights that all began with must not pass for that. Biases of
attention's keys are left out: they add the same to all scores of a query, which softmax takes away again, so
their gradients are rounding alone, and AdamW divides it by its own size.
"""

import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import swift
from shared.claims import Claim
from shared.comms import Group, NetLab, RankPool, barrier, netlab

sys.path.insert(0, str(Path(__file__).parent))
import job

REVISION = 2
TURNS = 15
RATE = 1e-3
MOST_ERROR = 1e-3
"""Of the change that training made to a tensor, by Euclidean norms."""
COMMAND = "hatch run bench swift/step"
BUCKETS_MB = {"DDP": 25, "DDP, 8 MB": 8}
OURS = {"exact": "swift", "commit": "commit, a vote before each update"}
PEERS = [
    {
        "peer": "DDP",
        "setting": "torch 2.13, gradient_as_bucket_view, static_graph, buckets of 25 MB (its default) and of 8 MB: "
        "the faster; torch's fused AdamW; loses all ranks when one is lost",
        "why": "the fastest that torch offers for this on CPU ranks",
    },
    {
        "peer": "DDP and a warm snapshot",
        "setting": "the same, and parameters and both moments copied to memory that is there, each step",
        "why": "the other way of taking a step back",
    },
]


class Ddp:
    """DDP with fused AdamW, perhaps with a copy of all state after each step."""

    def __init__(self, bucket_mb, *, is_copied=False):
        self.model = job.make_model("minilm")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, fused=True)
        self.replicated = DistributedDataParallel(
            self.model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True
        )
        self.is_copied = is_copied
        self.copies = []

    def step(self, at, rank):
        self.optimizer.zero_grad(set_to_none=True)
        job.loss_of("minilm", self.replicated, job.inputs("minilm", at, rank)).backward()
        self.optimizer.step()
        if self.is_copied:
            state = [
                tensor
                for one in self.model.parameters()
                for tensor in (one.data, *list(self.optimizer.state[one].values())[1:])
            ]
            self.copies = self.copies or [torch.empty_like(one) for one in state]
            for kept, one in zip(self.copies, state, strict=True):
                kept.copy_(one)


class Place:
    """A rank's place, as a run gives it."""

    rank = 0
    world_size = 2


class Ours:
    """`swift.DataParallel` in a world that loses nobody, driven as `run.loop` drives it."""

    def __init__(self, mode):
        self.model = job.make_model("minilm")
        optimizer = swift.undoable(torch.optim.AdamW(self.model.parameters(), RATE), mode=mode)
        self.parallel = swift.DataParallel(self.model, optimizer, Place())
        self.parallel.regroup(Group.world())

    def step(self, at, rank):
        self.parallel.begin(at)
        loss = job.loss_of("minilm", self.parallel, job.inputs("minilm", at, rank))
        self.parallel.backward(loss)
        self.parallel.finish(at)


def take_turns(turns):
    """Seconds of each way's steps on this rank, and how far its weights end from DDP's."""
    torch.set_num_threads(1)
    group = Group.world()
    first = [one.detach().clone() for one in job.make_model("minilm").parameters()]
    ways = {
        **{name: Ddp(bucket_mb) for name, bucket_mb in BUCKETS_MB.items()},
        "DDP and a warm snapshot": Ddp(25, is_copied=True),
        **{name: Ours(mode) for mode, name in OURS.items()},
    }
    seconds = {name: [] for name in ways}
    for turn in range(turns + 2):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            torch.manual_seed(1000 * turn + group.rank)
            barrier(group)
            begun = time.perf_counter()
            ways[name].step(turn, group.rank)
            barrier(group)
            if turn >= 2:
                seconds[name].append(time.perf_counter() - begun)
    ends = {name: [one.detach() for one in way.model.parameters()] for name, way in ways.items()}
    ends["nothing done"] = first
    is_compared = [
        not name.endswith("key.bias") for name, _ in ways["DDP"].model.named_parameters()
    ]
    moved = [float((a - b).norm()) for a, b in zip(ends["DDP"], first, strict=True)]
    errors = {
        name: max(
            float((a - b).norm()) / most
            for a, b, most, counts in zip(found, ends["DDP"], moved, is_compared, strict=True)
            if counts and most > 0
        )
        for name, found in ends.items()
    }
    equal = all(
        torch.equal(a, b) for a, b in zip(*(ends[name] for name in OURS.values()), strict=True)
    )
    return seconds, errors, equal


@contextmanager
def ranks(network):
    """Two ranks on one host, or on two with a link of 1 Gbit/s."""
    if network == "loopback":
        with RankPool(2, timeout=timedelta(minutes=10)) as pool:
            yield pool
        return
    if reason := netlab.available():
        pytest.skip(reason)
    with (
        NetLab(hosts=2, rate="1gbit") as lab,
        lab.pool(timeout=timedelta(minutes=10)) as pool,
    ):
        yield pool


@pytest.mark.parametrize(("network", "aim"), [("1 Gbit/s", 1.02), ("loopback", 1.10)])
def bench_undisturbed_step(network, aim, benchmark, record_claim):
    with ranks(network) as pool:
        results = benchmark.pedantic(lambda: pool.run(take_turns, TURNS).results, rounds=1)
    seconds, errors, equal = results[0]
    assert errors["nothing done"] > 100 * MOST_ERROR, "weights that never moved must not pass"
    plain = min(BUCKETS_MB, key=lambda name: median(seconds[name]))
    told = "; ".join(f"{name} {median(found):.3g} s" for name, found in seconds.items())
    aim_beside_others = 1.0 if network != "loopback" else None
    for name, baseline_name, aims in (
        (plain, f"the faster DDP: buckets of {BUCKETS_MB[plain]} MB", 1 / aim),
        *((name, name, aim_beside_others) for name in (OURS["commit"], "DDP and a warm snapshot")),
    ):
        every = [b / a for a, b in zip(seconds["swift"], seconds[name], strict=True)]
        record_claim(
            Claim(
                name=f"step without failures, MiniLM, 2 ranks, {network}",
                unit="s",
                ours=median(seconds["swift"]),
                baseline=median(seconds[name]),
                baseline_name=baseline_name,
                higher_is_better=False,
                correct=equal and all(errors[one] <= MOST_ERROR for one in seconds),
                detail=f"{TURNS} turns; {told}; largest difference of a tensor from DDP's, of its "
                f"change, but for biases of keys: {max(errors[one] for one in seconds):.1e}; exact and commit "
                f"equal: {equal}",
                source=f"{COMMAND} -k {network.split()[0]}",
            ),
            aim=aims,
            spread=(min(every), max(every)),
        )
