"""What the pipeline makes of five stages whose times are given, against the closed form of the plan.

A stage lasts as long as it is told to: what it computes, a millisecond or two of a small model, is done
within that time, and the rest is slept (*simulated*). `stale` runs as published, rows written after the
training step, for a staleness k of 1 to 4; `forward` hands rows on. The period is the mean time from one
end of training to the next over the second half of the iterations, when `stale` has learnt how long
stages take; the plan has P(k) = max(P*, loop / k), and P* for `forward`. Where training is the longest
stage, it is to wait for nothing once k is the plan's k_min: what is left of the period is its stall. The
cases take turns; of each the turn further from its plan counts.
"""

import time
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any

import pytest
import torch

import mspipe as ms
from mspipe.pipeline.stages import Stages
from mspipe.planner import STAGES
from shared.claims import Claim

# Milliseconds of sample, features, memory, train and write.
CASES = {
    "training longest": (20, 30, 20, 80, 20),
    "training longest, k_min of 3": (15, 15, 40, 60, 55),
    "link in longest": (10, 40, 30, 40, 40),
    "link in longest, short training": (10, 50, 40, 20, 50),
}
STALENESS = (1, 2, 3, 4)
NUM_BATCHES, BATCH, NUM_NODES, DIM, EDGE_DIM = 32, 20, 200, 8, 4
TURNS = 2
PEERS = [
    {
        "peer": "the plan's closed form",
        "setting": "P(k) = max(P*, loop / k), P* the longest stage, of the times that stages are told",
        "why": "a bound: no schedule of these stages has a shorter period",
    },
]


def calibrated(stage_s):
    """Stages that last for given seconds; of a write the memory takes care."""
    seconds = dict(zip(STAGES, [*stage_s[:-1], 0.0], strict=True))

    class Calibrated(Stages):
        @contextmanager
        def timed(self, name, index):
            with super().timed(name, index), lasting(seconds[name]):
                yield

    return Calibrated


class SlowMemory(ms.NodeMemory):
    """Memory whose writes last: a stage of writing ends by saying that it is done."""

    write_s = 0.0

    def write_rows(self, nodes, rows):
        with lasting(self.write_s):
            super().write_rows(nodes, rows)


@contextmanager
def lasting(seconds):
    end_s = time.perf_counter() + seconds
    yield
    time.sleep(max(0.0, end_s - time.perf_counter()))


@dataclass(frozen=True)
class Run:
    """One case and what came of it; `k` is None in `forward`."""

    case: str
    k: int | None
    report: ms.Report

    @property
    def name(self):
        return f"{self.case}, {'forward' if self.k is None else f'k = {self.k}'}"

    @property
    def plan(self):
        return ms.plan([ms_ / 1e3 for ms_ in CASES[self.case]])

    @property
    def expected_s(self):
        return self.plan.ideal_period if self.k is None else self.plan.period(self.k)

    @property
    def excess(self):
        """How many times longer the period is than the plan's."""
        return self.report.period_s / self.expected_s

    @property
    def train_s(self):
        """Mean seconds of training over those iterations that the period is of."""
        seconds = self.report.seconds("train")
        return mean(seconds[len(seconds) // 2 + 1 :])

    def faults(self):
        """What speaks against the figures."""
        if self.report.num_iterations != NUM_BATCHES:
            yield f"{self.name}: {self.report.num_iterations} of {NUM_BATCHES} iterations"
        if max(self.report.staleness) > (self.k or 1):
            yield f"{self.name}: staleness {self.report.histogram}"
        if self.report.period_s < 0.99 * self.expected_s:
            yield f"{self.name}: {1e3 * self.report.period_s:.1f} ms, less than is possible"
        for name, told_s, took_s in zip(
            STAGES, self.plan.stage_s, self.report.stage_s, strict=True
        ):
            if took_s < told_s:
                yield f"{self.name}: {name} took {1e3 * took_s:.1f} ms of {1e3 * told_s:.0f}"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(events, stage_s, k):
    """The report of a pass, in `stale` with k, or in `forward` with none."""
    torch.manual_seed(0)
    model = ms.models.TGN(DIM, EDGE_DIM)
    memory = SlowMemory(NUM_NODES, DIM, model.mail_dim)
    memory.write_s = stage_s[-1]
    settings: dict[str, Any] = {"max_staleness": k, "is_early": False} if k else {}
    pipe = ms.Pipeline(
        model, memory, ms.Sampler(events, [5]), events.features,
        mode="stale" if k else "forward", stages=calibrated(stage_s), **settings,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for out in pipe.train(ms.batches(events, BATCH)):
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    return pipe.report()


def bench_stages(benchmark, record_claim):
    events = ms.data.zipf(NUM_NODES, BATCH * NUM_BATCHES, seed=0, edge_dim=EDGE_DIM)
    run(events, [0.0] * len(STAGES), 1)  # compiles
    turns = {}

    def take_turns():
        for _ in range(TURNS):
            for case, times_ms in CASES.items():
                for k in (*STALENESS, None):
                    one = Run(case, k, run(events, [t / 1e3 for t in times_ms], k))
                    turns.setdefault(one.name, []).append(one)

    benchmark.pedantic(take_turns, rounds=1)
    for name, each in turns.items():
        benchmark.extra_info[name] = "; ".join(
            f"{1e3 * one.report.period_s:.1f} ms of {1e3 * one.expected_s:.1f}, "
            f"staleness {one.report.histogram}, training "
            f"{100 * one.train_s / one.report.period_s:.1f} % of it"
            for one in each
        )
    faults = [fault for each in turns.values() for one in each for fault in one.faults()]
    about = (
        f"{len(CASES)} sets of stage times, {NUM_BATCHES} iterations each; no row staler than k, no stage "
        "shorter than told, no period shorter than the plan's"
    )

    def record(name, one, baseline, baseline_of, aim):
        ratios = [baseline_of(turn) / turn.report.period_s for turn in turns[one.name]]
        record_claim(
            Claim(
                name=f"a period of calibrated stages, {name}",
                unit="ms",
                ours=1e3 * one.report.period_s,
                baseline=1e3 * baseline_of(one),
                baseline_name=baseline,
                higher_is_better=False,
                kind="simulated",
                correct=not faults,
                detail="; ".join(faults) or f"{one.name}; {about}",
                source="hatch run bench mspipe/stages",
            ),
            aim=aim,
            spread=(min(ratios), max(ratios)),
        )

    worst = [max(each, key=lambda one: one.excess) for each in turns.values()]
    for mode, baseline in (("stale", "P(k) of the plan"), ("forward", "P* of the plan")):
        ours = [one for one in worst if (one.k is None) == (mode == "forward")]
        far = max(ours, key=lambda one: one.excess)
        record(
            f"{mode}, furthest from the plan", far, baseline, lambda one: one.expected_s, 1 / 1.05
        )
    for one in worst:
        if one.k == one.plan.k_min and one.case.startswith("training"):
            record(
                f"stall at k_min, {one.case}", one, "training without a wait",
                lambda one: one.train_s, 0.98,
            )  # fmt: skip
