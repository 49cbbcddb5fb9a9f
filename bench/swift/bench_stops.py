"""A rank is stopped, or a host is cut off: how long the others stand still.

Nothing tells them: no connection ends. Heartbeats stop, and behind their limit the process is killed or
the host's ranks are replaced, and the others go on. The aim is the limit and 0.2 s more; heartbeats are
sent five times within the limit, so the last one came up to a fifth of it before. Stopped: SIGSTOP to one of three
ranks on loopback, drawn at random, at a random moment of a step. Cut off: two emulated hosts of two ranks
each, joined by 1 Gbit/s; the second one's link goes down, and four ranks go on on the first. All train 8 linear
layers (25 MB of parameters and states) with AdamW, and must end with the state of a run that was never
disturbed, to the bit.
"""

import random
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import contest

from shared.claims import Claim
from shared.comms import NetLab, netlab

KIND, HEARTBEAT_S, MORE_S = "linear", 1.0, 0.2
STOPS, STEPS_A_STOP = (4, 3), 600
CUTS, STEPS_A_CUT = 7, 600
"""A fault needs 450 steps where one takes 20 ms: 8 s of rest, and what it costs."""
OPTIONS = ("--heartbeat", str(HEARTBEAT_S))
ROOT = Path("/dev/shm")
COMMAND = "hatch run bench swift/stops"


def record(record_claim, what, failures, is_equal, where):
    """Records the others' stall beside the aim."""
    stalls = [one.stall_s for one in failures if one.stall_s is not None]
    aim_s = HEARTBEAT_S + MORE_S
    record_claim(
        Claim(
            name=f"survivors' stall when {what}",
            unit="s",
            ours=median(stalls),
            baseline=aim_s,
            baseline_name=f"the aim, the heartbeat limit of {HEARTBEAT_S:g} s and {MORE_S:g} s",
            higher_is_better=False,
            correct=is_equal,
            detail=f"{len(failures)} times, {where}; the longest that a survivor went without a step, less a "
            f"step of {median(one.step_s for one in failures):.3f} s: {min(stalls):.3f} to {max(stalls):.3f} s; "
            f"until all were at work again: {median(one.back_s for one in failures):.3f} s; final states equal "
            f"to the undisturbed run's: {is_equal}",
            source=COMMAND,
        ),
        aim=1.0,
        spread=(aim_s / max(stalls), aim_s / min(stalls)),
    )


def finish(job):
    """Digests of the final states of a job that has ended by itself."""
    job.wait(900.0)
    return job.digests()


def bench_stopped_rank(benchmark, record_claim):
    def measure():
        draw, failures, final = random.Random(0), [], []
        for turn in STOPS:
            steps = STEPS_A_STOP * turn
            with (
                tempfile.TemporaryDirectory(dir=ROOT) as folder,
                contest.swift(Path(folder), KIND, steps, options=OPTIONS) as job,
            ):
                failures += [job.fail(draw, signal.SIGSTOP) for _ in range(turn)]
                stopped = finish(job)
            with (
                tempfile.TemporaryDirectory(dir=ROOT) as folder,
                contest.swift(Path(folder), KIND, steps) as job,
            ):
                final.append((stopped, finish(job)))
        return failures, final

    failures, final = benchmark.pedantic(measure, rounds=1)
    is_equal = all(len(one) == 1 and one == quiet for one, quiet in final)
    record(record_claim, "a rank is stopped", failures, is_equal, "one of three ranks on loopback")


def bench_host_cut_off(benchmark, record_claim):
    if reason := netlab.available():
        pytest.skip(reason)

    def run(lab, cut):
        with (
            tempfile.TemporaryDirectory() as folder,  # each host has a /dev/shm of its own
            contest.swift_on_two_hosts(Path(folder), lab, KIND, STEPS_A_CUT, 2, OPTIONS) as job,
        ):
            failure = cut(job)
            lab.restore(1)  # it comes back with spares, and ends with the others
            return failure, finish(job)

    def measure():
        draw, failures, final = random.Random(0), [], []

        with NetLab(hosts=2, rate="1gbit") as lab:

            def cut_off(working):
                lab.cut(1)
                return {line["pid"] for line in working if line["rank"] >= 2}

            _, quiet = run(lab, lambda job: None)
            for _ in range(CUTS):
                failure, digests = run(lab, lambda job: job.disturb(draw, cut_off))
                failures.append(failure)
                final.append(digests)
        return failures, final, quiet

    failures, final, quiet = benchmark.pedantic(measure, rounds=1)
    is_equal = all(len(one) == 1 and one == quiet for one in final)
    where = "two of four ranks, on one of two hosts at 1 Gbit/s"
    record(record_claim, "a host is cut off", failures, is_equal, where)
