"""FlexSP's mixed-integer program: which groups of ranks there are, and what each gets of each bucket.

After FlexSP (arXiv 2412.01523): a binary for each group that there could be, and whole numbers of
documents by bucket and group. Groups of one degree are interchangeable and have variables of their
own all the same, as published. Three departures: HiGHS for SCIP; groups of one rank, which the
published code skips; and ranks may be left over. HiGHS takes no plan to start from, so the best of the
homogeneous plans, from which the published solver starts, is compared with what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from hydraulis.config import SequenceTooLong, check_lengths
from hydraulis.planner.baselines import best_homogeneous
from hydraulis.planner.degrees import DegreeCost, DegreePlan, group_seconds
from hydraulis.planner.flexsp.bucketing import buckets
from shared.errors import ConfigError

__all__ = ["plan"]

_SLACK = 1e-6
"""Of a bound by HiGHS, whose rows may be off by as much."""


def plan(
    lengths: Sequence[float] | np.ndarray,
    num_ranks: int,
    cost: DegreeCost,
    time_limit_s: float = 5.0,
    num_buckets: int = 16,
) -> DegreePlan:
    """Groups and their documents, for one micro-batch of all ranks, each charged its bucket's longest.

    Args:
        lengths: tokens of the documents.
        num_ranks: ranks in all.
        cost: of groups.
        time_limit_s: seconds for the program, after which the best that it has found is taken.
        num_buckets: buckets to begin with; doubled until documents are charged no more than halfway
            from their tokens to what all ranks hold.

    Returns:
        The plan. Its bound is that of the program where it was charged no token too much, and
        otherwise 0, as a bound for padded documents bounds nothing else.

    Raises:
        SequenceTooLong: a document exceeds what the largest group holds.
        ConfigError: no ranks or documents, no time, or no plan was found.
    """
    known = check_lengths(lengths)
    if num_ranks < 1 or not known.size or not time_limit_s > 0:
        raise ConfigError(
            f"flexsp.plan: expected ranks, documents and a time limit above 0, got {num_ranks}, "
            f"{known.size} and {time_limit_s} s"
        )
    degrees = cost.degrees(num_ranks)
    most = int(degrees[-1]) * cost.cap
    if known.max() > most:
        raise SequenceTooLong(int(known.argmax()), int(known.max()), most)
    room = num_ranks * cost.cap - int(known.sum())
    found = buckets(known, num_buckets)
    while found.error > max(room / 2, 0):
        num_buckets *= 2
        found = buckets(known, num_buckets)
    tops = np.array(found.boundaries)
    charged = tops[np.searchsorted(tops, known)]
    degree_of = np.concatenate([np.full(num_ranks // d, d) for d in degrees[::-1].tolist()])
    held, bound_s = _solve(
        tops, np.unique(charged, return_counts=True)[1], degree_of, num_ranks, cost, time_limit_s
    )
    plans = [] if held is None else [_assign(charged, degree_of, held)]
    for documents in (charged, known):
        try:
            start = best_homogeneous(documents, num_ranks, cost)
        except ConfigError:
            continue
        plans.append((start.degree_of, start.group_of))
        break
    if not plans:
        raise ConfigError(
            f"flexsp.plan: found no groups of {num_ranks} ranks for {known.sum()} tokens of {known.size} "
            f"documents, at most {cost.cap} a rank, in {time_limit_s} s; give more time or use more "
            f"micro-batches"
        )
    degree_of, group_of = min(plans, key=lambda one: group_seconds(charged, cost, *one).max())
    makespan_s = float(group_seconds(known, cost, degree_of, group_of).max())
    return DegreePlan(
        degree_of=degree_of, group_of=group_of, makespan_s=makespan_s,
        bound_s=0.0 if found.error else min(bound_s, makespan_s),
    )  # fmt: skip


def _solve(
    tops: np.ndarray,
    counts: np.ndarray,
    degree_of: np.ndarray,
    num_ranks: int,
    cost: DegreeCost,
    time_limit_s: float,
) -> tuple[np.ndarray | None, float]:
    """Documents of each bucket in each group [group, bucket], or None; and a bound of the seconds."""
    groups, size = len(degree_of), len(tops)
    seconds = np.stack([cost.seconds(tops, int(d)) for d in np.unique(degree_of)])
    seconds = seconds[np.unique(degree_of, return_inverse=True)[1]]
    unit_s = float(seconds.max() + cost.cost.c)
    # Columns: documents [group, bucket], whether a group is there [group], the makespan.
    number = np.arange(groups * size)
    group, bucket = np.divmod(number, size)
    is_there = groups * size + np.arange(groups)
    end = groups * size + groups
    each, total = np.arange(groups), int(counts.sum())
    ones = np.ones(groups)
    rows = [
        # Every document is in a group.
        (bucket, number, np.ones(number.size)),
        # Seconds of a group: c + sum - makespan <= 0.
        (size + group, number, seconds.ravel() / unit_s),
        (size + each, is_there, cost.cost.c / unit_s * ones),
        (size + each, np.full(groups, end), -ones),
        # Tokens of a group within what it holds; none if it is not there.
        (size + groups + group, number, tops[bucket].astype(float)),
        (size + groups + each, is_there, -degree_of * float(cost.cap)),
        # At least one document, and at most all, in a group that is there.
        (size + 2 * groups + group, number, np.ones(number.size)),
        (size + 2 * groups + each, is_there, -ones),
        (size + 3 * groups + group, number, np.ones(number.size)),
        (size + 3 * groups + each, is_there, -float(total) * ones),
        # Ranks.
        (np.full(groups, size + 4 * groups), is_there, degree_of.astype(float)),
    ]
    row, column, value = (np.concatenate(part) for part in zip(*rows, strict=True))
    height = size + 4 * groups + 1
    low, high = np.full(height, -np.inf), np.zeros(height)
    low[:size] = high[:size] = counts
    low[size + 2 * groups : size + 3 * groups] = 0.0
    high[size + 2 * groups : size + 3 * groups] = np.inf
    high[-1] = num_ranks
    fits = tops <= degree_of[:, None] * cost.cap
    aim = np.zeros(end + 1)
    aim[end] = 1.0
    solved = milp(
        aim,
        constraints=LinearConstraint(
            coo_array((value, (row, column)), shape=(height, end + 1)).tocsr(), low, high
        ),
        bounds=Bounds(0.0, np.concatenate((np.where(fits, counts, 0).ravel(), ones, [np.inf]))),
        integrality=np.concatenate((np.ones(end), [0])),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    bound_s = max(float(solved.mip_dual_bound or 0.0), 0.0) * unit_s * (1 - _SLACK)
    if solved.x is None:
        return None, bound_s
    # Whole numbers come as 0.999 or so: rounded, they have to keep every row anew.
    held = np.rint(solved.x[: groups * size]).astype(np.int64).reshape(groups, size)
    ranks = int(degree_of[held.any(axis=1)].sum())
    is_valid = (
        (held >= 0).all()
        and (held.sum(axis=0) == counts).all()
        and (held @ tops <= degree_of * cost.cap).all()
        and ranks <= num_ranks
    )
    return (held if is_valid else None), bound_s


def _assign(
    charged: np.ndarray, degree_of: np.ndarray, held: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Degrees of the groups that have documents, and the group of each document."""
    used = np.flatnonzero(held.any(axis=1))
    group_of = np.empty(len(charged), dtype=np.int64)
    for number, top in enumerate(np.unique(charged)):
        group_of[charged == top] = np.repeat(np.arange(len(used)), held[used, number])
    return degree_of[used], group_of
