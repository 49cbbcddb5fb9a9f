"""A rank is killed: seconds until all are at work again, beside torchft and torchrun.

All train the same model with AdamW, one thread a rank, over gloo on loopback: 8 linear layers (25 MB of
parameters and states), or a MiniLM of 22 million parameters from a config (270 MB), with dropout. A rank
drawn at random is killed by SIGKILL at a random moment of a step. The time ends when three ranks that
live have finished the step that was under way, or a later one. Contenders take turns: a job each,
killed in several times, turn after turn. Ours must end with the weights and states of its run that was
never disturbed, to the bit; torchft, whose dead replica's share of a step is dropped, must not: were its
result the same, the task would not tell them apart. A Llama of 14 million parameters, sharded by FSDP2 over
two ranks in two replicas, takes turns with the same under torchrun.
"""

import itertools
import math
import random
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import contest

from shared.claims import Claim

TURNS = (3, 2, 2)
"""Kills of each contender's job, turn by turn."""
STEPS_A_KILL = {
    "linear": {"swift": 600, "torchft": 1500},
    "minilm": {"swift": 60},
    "llama": {"swift": 60},
}
"""Steps of the jobs that are compared with undisturbed ones; the others run until they have been killed in. A
kill takes 8 s of rest and 12 steps, and of torchft some 15 s more, in which it goes on: these numbers are enough
for ours at 20 ms (linear) and 200 ms a step, and for torchft's at 20 ms."""
HEARTBEATS_MS = (100, 200, 500, 1000, 2000)
JOINS_MS = {"linear": (50, 200, 500), "minilm": (10000,)}
"""Join limits tried with each heartbeat limit; a step of MiniLM takes up to a second. A dead group is waited for
until the first of both limits has ended, so that pairs are tried by the shorter one."""
UNDISTURBED = {"linear": 1000, "minilm": 100}
"""Steps that a heartbeat limit has to survive: of MiniLM 300 last longer than 1,000 of the other."""
COMMAND = "hatch run bench swift/failures"
PEERS = [
    {
        "peer": "torchft, as its examples set it",
        "setting": "torchft 0.2.0, a group a process, lighthouse with its default heartbeat limit of 5 s, quorum "
        "tick 100 ms, join limit 10 s; a dead group's process is started again at once",
        "why": "what a user gets who follows its examples; starting again at once flatters it, as launchers look "
        "ten times a second at most",
    },
    {
        "peer": "torchft at its best",
        "setting": "a fourth group runs along as a hot spare (FIXED_WITH_SPARES), the pair of a heartbeat limit (100 ms to "
        "2 s) and a join limit (50, 200, 500 ms) whose shorter one is the shortest that 1,000 undisturbed steps survive (100 of MiniLM), "
        "quorum tick 10 ms, messages end after 1 s; of MiniLM a join limit of 10 s, as its groups end a step further "
        "apart, and messages end after 5 s",
        "why": "nothing has to start, and nothing waits longer than it must",
    },
    {
        "peer": "torchrun",
        "setting": "DDP, restarts of all ranks, monitor interval 0.1 s, a checkpoint of every step on a RAM disk, a "
        "store of its own for each attempt",
        "why": "loses no step and waits for no disk",
    },
]


def shortest_limits(kind, root):
    """The shortest of torchft's limits under which no group is taken for dead: heartbeat, then join, in ms.

    Args:
        kind: the model.
        root: folder for the runs.
    """
    pairs = itertools.product(HEARTBEATS_MS, JOINS_MS[kind])
    for beat_ms, join_ms in sorted(pairs, key=lambda pair: (min(pair), pair)):
        limits = {"heartbeat_timeout_ms": beat_ms, "join_timeout_ms": join_ms}
        with (
            tempfile.TemporaryDirectory(dir=root) as folder,
            contest.torchft(Path(folder), kind, UNDISTURBED[kind], **limits, has_spare=True) as job,
        ):
            end = time.monotonic() + 400.0
            reached, is_alive = 20, True
            while is_alive and reached < UNDISTURBED[kind]:
                with suppress(contest.Lost):
                    next_look = min(reached + 20, UNDISTURBED[kind])
                    job.wait_for(next_look, set(), end - time.monotonic())
                if time.monotonic() > end:
                    raise contest.Lost(
                        f"torchft's groups made {reached} of {UNDISTURBED[kind]} steps in 400 s, none was "
                        f"taken for dead at {beat_ms} ms, with joins of {join_ms} ms"
                    )
                places = defaultdict(set)
                for line in job.lines:
                    if "digest" not in line and line["step"] > 20:  # groups come one after another
                        places[line["rank"]].add(line["place"])
                        reached = max(reached, line["step"])
                is_alive = all(len(found) == 1 for found in places.values())
            if is_alive:
                return beat_ms, join_ms
    raise contest.Lost(
        f"torchft's groups were taken for dead at each of {HEARTBEATS_MS} ms, with joins of {JOINS_MS[kind]}"
    )


def kill(way, kind, count, draw, root):
    """Failures of a contender that need not come back: it is then said to have taken the seconds waited."""
    failures = []
    while len(failures) < count:
        with (
            tempfile.TemporaryDirectory(dir=root) as folder,
            way(Path(folder), kind, 10**6) as job,
        ):
            try:
                while len(failures) < count:
                    failures.append(job.fail(draw))
            except contest.Lost:
                if not job.lines:
                    raise
                failures.append(contest.Failure(contest.RECOVER_S, None, math.nan))
    return failures


def digests(way, kind, steps, root):
    """Digests of the final states of a run that is not disturbed."""
    with (
        tempfile.TemporaryDirectory(dir=root) as folder,
        way(Path(folder), kind, steps) as job,
    ):
        job.wait(900.0)
        return job.digests()


@pytest.mark.parametrize(("kind", "aim_s"), [("linear", 0.4), ("minilm", 1.0)])
def bench_killed_rank(kind, aim_s, benchmark, record_claim):
    root, compared = Path("/dev/shm"), STEPS_A_KILL[kind]

    def measure():
        limits = beat, join = shortest_limits(kind, root)
        ways = {
            "swift": contest.swift,
            "torchft": contest.torchft,
            "best": partial(
                contest.torchft, heartbeat_timeout_ms=beat, join_timeout_ms=join, has_spare=True
            ),
            "torchrun": contest.torchrun,
        }
        failures, final = defaultdict(list), defaultdict(list)
        draw = random.Random(0)
        for at, turn in enumerate(TURNS):
            for name, way in ways.items():
                # torchft goes on for long without the dead rank: one of its jobs is followed to its end.
                is_compared = name in compared and (name == "swift" or at == len(TURNS) - 1)
                if not is_compared:
                    failures[name] += kill(way, kind, turn, draw, root)
                    continue
                with (
                    tempfile.TemporaryDirectory(dir=root) as folder,
                    way(Path(folder), kind, compared[name] * turn) as job,
                ):
                    failures[name] += [job.fail(draw) for _ in range(turn)]
                    job.wait(900.0)
                    final[name].append((turn, job.digests()))
        quiet = {
            (name, turn): digests(ways[name], kind, compared[name] * turn, root)
            for name in compared
            for turn in {turn for turn, _ in final[name]}
        }
        return limits, failures, final, quiet

    (beat, join), failures, final, quiet = benchmark.pedantic(measure, rounds=1)
    is_equal = all(
        len(found) == 1 and found == quiet["swift", turn] for turn, found in final["swift"]
    )
    # The small model shows that the task tells them apart.
    differs = all(found != quiet["torchft", turn] for turn, found in final["torchft"])
    ours = [one.back_s for one in failures["swift"]]
    stalls = [one.stall_s for one in failures["swift"] if one.stall_s is not None]
    compares = str(differs) if final["torchft"] else "compared with the small model"
    told = (
        f"{len(ours)} kills each; ours {min(ours):.3f} to {max(ours):.3f} s, a step "
        f"{median(one.step_s for one in failures['swift']):.3f} s; final states equal to the undisturbed "
        f"run's: {is_equal}; torchft's differ: {compares}; "
        f"torchft at its best with a join limit of {join} ms"
    )
    rivals = [
        ("torchft", "torchft, as its examples set it", 5.0),
        ("best", f"torchft at its best, hot spare, heartbeat limit {beat} ms", 2.0),
        ("torchrun", "torchrun, a checkpoint every step", 12.0),
    ]
    for name, words, aim in [*rivals, ("aim", "the aim", 1.0)]:
        theirs = [aim_s] * len(ours) if name == "aim" else [one.back_s for one in failures[name]]
        every = [b / a for a, b in zip(ours, theirs, strict=True)]
        num_lost = sum(one == contest.RECOVER_S for one in theirs)
        lost = f", {num_lost} times not within that" if num_lost else ""
        record_claim(
            Claim(
                name=f"rank killed until three are at work again, {kind}",
                unit="s",
                ours=median(ours),
                baseline=median(theirs),
                baseline_name=words,
                higher_is_better=False,
                correct=is_equal and differs,
                detail=f"{told}; theirs {min(theirs):.3f} to {max(theirs):.3f} s{lost}",
                source=f"{COMMAND} -k {kind}",
            ),
            aim=aim,
            spread=(min(every), max(every)),
        )
    record_claim(
        Claim(
            name=f"survivors' stall when a rank is killed, {kind}",
            unit="s",
            ours=median(stalls),
            baseline=0.2,
            baseline_name="the aim",
            higher_is_better=False,
            correct=is_equal,
            detail=f"{told}; the longest a survivor went without a step, less a step: {max(stalls):.3f} s",
            source=f"{COMMAND} -k {kind}",
        ),
        aim=1.0,
        spread=(0.2 / max(stalls), 0.2 / max(min(stalls), 1e-3)),
    )


def bench_killed_sharded(benchmark, record_claim):
    """One of 2 x 2 ranks of a Llama under FSDP2; the aim is 1.5 s."""
    root, aim_s, steps_a_kill = Path("/dev/shm"), 1.5, STEPS_A_KILL["llama"]["swift"]
    ways = {"swift": contest.swift, "torchrun": contest.torchrun}

    def measure():
        failures, final = defaultdict(list), []
        draw = random.Random(0)
        for turn in TURNS:
            for name, way in ways.items():
                steps = steps_a_kill * turn if name == "swift" else 10**6
                with (
                    tempfile.TemporaryDirectory(dir=root) as folder,
                    way(Path(folder), "llama", steps) as job,
                ):
                    failures[name] += [job.fail(draw) for _ in range(turn)]
                    if name == "swift":
                        job.wait(900.0)
                        final.append((steps, job.digests()))
        quiet = {
            steps: digests(contest.swift, "llama", steps, root)
            for steps in {steps for steps, _ in final}
        }
        return failures, final, quiet

    failures, final, quiet = benchmark.pedantic(measure, rounds=1)
    is_equal = all(len(found) == 2 and found == quiet[steps] for steps, found in final)
    ours = [one.back_s for one in failures["swift"]]
    stalls = [one.stall_s for one in failures["swift"] if one.stall_s is not None]
    for words, theirs in (
        ("torchrun, a checkpoint every step", [one.back_s for one in failures["torchrun"]]),
        ("the aim", [aim_s] * len(ours)),
    ):
        every = [b / a for a, b in zip(ours, theirs, strict=True)]
        record_claim(
            Claim(
                name="rank of 2 x 2 killed until all are at work again, sharded Llama",
                unit="s",
                ours=median(ours),
                baseline=median(theirs),
                baseline_name=words,
                higher_is_better=False,
                correct=is_equal,
                detail=f"{len(ours)} kills each; ours {min(ours):.3f} to {max(ours):.3f} s, a step "
                f"{median(one.step_s for one in failures['swift']):.3f} s, the longest a survivor went "
                f"without a step, less a step: {max(stalls):.3f} s; final states equal to the undisturbed "
                f"run's: {is_equal}; theirs {min(theirs):.3f} to {max(theirs):.3f} s",
                source=f"{COMMAND} -k sharded",
            ),
            aim=1.0,
            spread=(min(every), max(every)),
        )
