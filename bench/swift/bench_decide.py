"""Deciding how 10,000 ranks come to one version, beside the limit set.

1,000 replica sets of ten ranks with 100 parameters each. In each set a rank is lost and the others are
torn: half their parameters are a step ahead, so that all of them undo and the lost ones fetch.
"""

import time
from statistics import median

import swift
from shared.claims import Claim

SETS, RANKS, PARAMETERS, REPEATS = 1000, 10, 100, 7
LIMIT_S = 1.0
COMMAND = "hatch run bench swift/decide"


def torn_sets():
    """Versions by rank, a mapping a set; rank 3 of each is lost."""
    half = PARAMETERS // 2
    return [
        {RANKS * i + j: None if j == 3 else [8] * half + [7] * half for j in range(RANKS)}
        for i in range(SETS)
    ]


def is_right(decision):
    """Whether every survivor undoes the first half, and every lost rank fetches all from its own set."""
    half = list(range(PARAMETERS // 2))
    lost = {RANKS * i + 3 for i in range(SETS)}
    return (
        decision.target == 7
        and not decision.from_checkpoint
        and set(decision.undo) == set(range(SETS * RANKS)) - lost
        and all(one == half for one in decision.undo.values())
        and set(decision.fetch) == lost
        and all(
            set(of) == set(range(PARAMETERS))
            and all(source // RANKS == rank // RANKS and source != rank for source in of.values())
            for rank, of in decision.fetch.items()
        )
    )


def bench_ten_thousand_ranks(benchmark, record_claim):
    sets = torn_sets()

    def measure():
        seconds, are_right = [], []
        for _ in range(REPEATS):
            start = time.perf_counter()
            decision = swift.decide(sets)
            seconds.append(time.perf_counter() - start)
            are_right.append(is_right(decision))
        return seconds, all(are_right)

    seconds, are_right = benchmark.pedantic(measure, rounds=1)
    record_claim(
        Claim(
            name="time to decide how 10,000 torn ranks recover",
            unit="s",
            ours=median(seconds),
            baseline=LIMIT_S,
            baseline_name="the limit set",
            higher_is_better=False,
            correct=are_right,
            detail=f"{SETS} sets of {RANKS} ranks, {PARAMETERS} parameters each, a rank of each set lost; "
            f"median of {REPEATS}, what each rank is to do compared with what it must",
            source=COMMAND,
        ),
        aim=1.0,
        spread=(LIMIT_S / max(seconds), LIMIT_S / min(seconds)),
    )
