"""Choosing logged boundaries: brute force's optimum at 16 stages, time at 128, the greedy's gap.

Stages' replay falls from 4.2 to 0.2 s as in the published profile of a ViT, or is drawn; boundaries have
0.1 to 4 GB a step. The published greedy chooses on the same chains within the same budgets.
"""

import itertools
import time
from statistics import median

import numpy as np

import swift
from shared.claims import Claim

RATE, INTERVAL, SEEDS = 1e9, 10, 8
SHARES = (0.1, 0.3, 0.5, 0.8)
COMMAND = "hatch run bench swift/logs"


def draw_chain(num, seed):
    draw = np.random.default_rng(seed)
    replay_s = draw.uniform(0.2, 4.2, num)
    if seed % 2:
        replay_s = np.sort(replay_s)[::-1]
    return replay_s.tolist(), draw.integers(10**8, 4 * 10**9, num - 1).tolist()


def best_by_trying(replay_s, sizes, budget):
    """The least expected replay of all choices of 16 stages, by numpy over all of them."""
    num = len(replay_s)
    choices = np.array(list(itertools.product([False, True], repeat=num - 1)))
    fits = INTERVAL * (choices @ np.array(sizes)) <= budget
    choices = choices[fits]
    total, start = np.zeros(len(choices)), np.zeros(len(choices), int)
    replay = np.concatenate([[0.0], np.cumsum(replay_s)])
    resent = np.concatenate([[0.0], np.cumsum(np.array(sizes) / RATE)])
    for end in range(1, num + 1):
        ends = np.ones(len(choices), bool) if end == num else choices[:, end - 1]
        cost = (end - start) * (replay[end] - replay[start] + resent[end - 1] - resent[start])
        total += np.where(ends, cost, 0.0)
        start = np.where(ends, end, start)
    return total.min() / num


def choose(num):
    """Seconds, and expected replays of exact and greedy, by chain and budget."""
    found = []
    for seed, share in itertools.product(range(SEEDS), SHARES):
        replay_s, sizes = draw_chain(num, seed)
        budget = share * INTERVAL * sum(sizes)
        start = time.perf_counter()
        exact = swift.select_logs(replay_s, sizes, INTERVAL, RATE, budget)
        taken_s = time.perf_counter() - start
        greedy = swift.select_logs(replay_s, sizes, INTERVAL, RATE, budget, "greedy")
        best = best_by_trying(replay_s, sizes, budget) if num == 16 else exact.expected_replay_s
        found.append((taken_s, exact.expected_replay_s, greedy.expected_replay_s, best))
    return np.array(found)


def bench_log_selection(benchmark, record_claim):
    """Time is beside the limit set, expected replay beside the greedy's."""
    swift.select_logs(*draw_chain(8, 0), INTERVAL, RATE, 1e10)  # imports
    every = benchmark.pedantic(lambda: {num: choose(num) for num in (16, 128)}, rounds=1)
    for num, limit_s in ((16, 0.05), (128, 2.0)):
        taken_s, exact, greedy, best = every[num].T
        is_best = bool((exact <= best * (1 + 1e-9)).all() and (exact <= greedy * (1 + 1e-9)).all())
        record_claim(
            Claim(
                name=f"time to choose the logged boundaries of {num} stages, slowest of {len(exact)}",
                unit="s",
                ours=float(taken_s.max()),
                baseline=limit_s,
                baseline_name="the limit set",
                higher_is_better=False,
                correct=is_best,
                detail="equal to the best of all 32,768 choices"
                if num == 16
                else "never above greedy's",
                source=COMMAND,
            ),
            aim=1.0,
            spread=(limit_s / float(taken_s.max()), limit_s / float(taken_s.min())),
        )
        gaps = greedy / exact
        record_claim(
            Claim(
                name=f"expected replay of a lost stage, {num} stages, over budgets",
                unit="s",
                ours=float(median(exact)),
                baseline=float(median(exact) * median(gaps)),
                baseline_name="the published greedy",
                higher_is_better=False,
                correct=is_best,
                detail=f"greedy above the optimum: median {median(gaps) - 1:.1%}, at most "
                f"{gaps.max() - 1:.1%}, over {SEEDS} chains and budgets of {SHARES} of all bytes",
                source=COMMAND,
            ),
            spread=(float(gaps.min()), float(gaps.max())),
        )
