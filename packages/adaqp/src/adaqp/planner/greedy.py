"""Greedy solver of bit assignment: round the relaxation, then search its neighbourhood.

The problem is AdaQP's (arXiv 2306.01381); greedy upgrades under a price per round are our addition.
1. Each channel takes its upgrades steepest first, and every possible length of every round is
   tried. This rounds the relaxation down to whole groups.
2. The few groups that are cheapest to change may take any option, and every length is tried again.
   This recovers most of the rounding loss; on small problems it searches all choices.
Hidden time couples the rounds: a beam search over them distributes it. The first step takes
O(groups log groups), and the size of the neighbourhood is bounded.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from adaqp.planner.problem import Assignment
from adaqp.planner.relaxation import Upgrades, dual_bound, hull_upgrades, relax, round_max

__all__ = ["GreedyResult", "solve"]

# Points examined in the second step: at least so many in all (about 20 ms of sorting), and more
# for large problems, by the number of groups.
_CORE_POINTS = 200_000
_CORE_POINTS_PER_GROUP = 6
_CORE_GROUPS = 8
_GOOD_GAP = 1e-7
_HALVINGS = 50
_TIE = 1e-9
# Limits of the beam search where hidden time couples the rounds: fewest and most combinations kept,
# combinations times rounds, and points tried in a round.
_BEAM, _BEAM_POINTS, _POINTS = (16, 2000), 100_000, 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GreedyResult:
    """A choice of options [groups] and a proven lower bound of the objective."""

    choice: Int64[np.ndarray, " groups"]
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Menu:
    """Times each channel can take, sorted by channel, then time."""

    channel: np.ndarray  # [points]
    time_s: np.ndarray
    drop: np.ndarray  # variance saved against the level before, 0 for the first

    def below(self, level_s: np.ndarray, num_channels: int) -> np.ndarray:
        """Number of points of each channel whose time is at most `level_s` of the channel."""
        reached = self.time_s <= level_s[self.channel]
        return np.bincount(self.channel[reached], minlength=num_channels)


def solve(problem: Assignment) -> GreedyResult:
    """Choose an option for each group, near the optimum and with a proven bound.

    Args:
        problem: groups, channels and the weights of variance and time.

    Returns:
        The choice and a lower bound of the optimum's objective. On a problem small enough to be
        searched exhaustively, and without hidden time, the bound is at most `_GOOD_GAP` below.
    """
    if not problem.num_groups:
        nothing = problem.uniform(0)
        return GreedyResult(choice=nothing, bound=problem.objective(nothing))
    upgrades = hull_upgrades(problem)
    rounds = problem.round_index()
    levels_s, price = relax(problem, upgrades, rounds)
    bound = dual_bound(problem, upgrades, rounds, levels_s, price)

    menu = _prefix_menu(problem, upgrades)
    levels_s, _ = _choose_levels(problem, menu, rounds)
    taken = menu.below(levels_s[rounds], problem.num_channels) - 1
    choice = upgrades.base.copy()
    done = upgrades.position < taken[upgrades.channel]
    # Upgrades of a group come in order of option, so the last one written is the one reached.
    choice[upgrades.group[done]] = upgrades.option[done]

    objective = problem.objective(choice)
    if objective - bound > _GOOD_GAP * objective:
        refined, sharper = _refine(problem, upgrades, rounds, taken, choice)
        if problem.objective(refined) < objective:
            choice = refined
        bound = max(bound, sharper)
    return GreedyResult(choice=choice, bound=bound)


def _prefix_menu(problem: Assignment, up: Upgrades) -> _Menu:
    channels = np.arange(problem.num_channels)
    channel = np.concatenate((channels, up.channel))
    order = np.argsort(channel, kind="stable")
    return _Menu(
        channel=channel[order],
        time_s=np.concatenate((problem.channel_s(up.base), up.end_s))[order],
        drop=np.concatenate((np.zeros(channels.size), up.drop))[order],
    )


def _choose_levels(
    problem: Assignment, menu: _Menu, rounds: np.ndarray
) -> tuple[np.ndarray, float]:
    """Chooses the time of each round among the levels of its channels.

    Returns:
        The times [rounds], and a lower bound of the objective over the menus' levels, less the
        variance of each channel's last level.
    """
    per_variance, per_s = problem.prices()
    is_first = np.append(True, menu.channel[1:] != menu.channel[:-1])[: menu.channel.size]
    floor_s = round_max(menu.time_s[is_first], rounds)
    round_of = rounds[menu.channel]
    time_s = np.maximum(menu.time_s, floor_s[round_of])
    order = np.lexsort((time_s, round_of))
    round_of, time_s, drop = round_of[order], time_s[order], menu.drop[order]
    # Variance still above the last levels, once the round lasts until each point.
    left = drop.sum() - np.cumsum(drop)
    starts = np.searchsorted(round_of, np.arange(floor_s.size))
    ends = np.append(starts[1:], round_of.size)
    left = np.maximum(left - left[ends - 1][round_of], 0.0)
    position = np.arange(left.size)

    # Where only time counts, variance still decides among levels of equal time.
    scale = per_s * time_s.max() / drop.sum() if drop.any() else 0.0
    weight = per_variance or _TIE * scale

    def cheapest(price: float) -> np.ndarray:
        cost = weight * left + price * time_s
        is_best = cost <= np.minimum.reduceat(cost, starts)[round_of]
        return np.maximum.reduceat(np.where(is_best, position, -1), starts)

    price, at = per_s, cheapest(per_s)
    if time_s[at].sum() < problem.hidden_s:
        # Time is free up to hidden_s: find the lowest price at which the rounds fit into it.
        low, at = 0.0, cheapest(0.0)
        price = 0.0 if time_s[at].sum() <= problem.hidden_s else per_s
        for _ in range(_HALVINGS if price else 0):
            middle = (low + price) / 2
            if time_s[cheapest(middle)].sum() <= problem.hidden_s:
                price = middle
            else:
                low = middle
        at = cheapest(price)
    bound = per_s * max(0.0, floor_s.sum() - problem.hidden_s)
    if per_variance:
        bound = (weight * left[at] + price * time_s[at]).sum() - price * problem.hidden_s
    if 0 < price < per_s:
        excess = weight * left + price * time_s
        excess -= excess[at][round_of]
        at = _combine(problem.hidden_s, at, starts, ends, time_s, weight * left, excess, price)
    return time_s[at], float(bound)


def _combine(
    hidden_s: float,
    at: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    time_s: np.ndarray,
    cost: np.ndarray,
    excess: np.ndarray,
    price: float,
) -> np.ndarray:
    """The cheapest points, one a round, whose times fit into the hidden seconds together.

    A combination costs more than the lower bound by its points' `excess` plus `price` times the
    seconds it leaves unused. Combinations that cannot beat `at` are dropped, and so are dominated
    ones. Exact unless a round has more than `_POINTS` points or the beam overflows.
    """
    slack = price * (hidden_s - time_s[at].sum())
    beam = int(np.clip(_BEAM_POINTS // at.size, *_BEAM))
    used_s, paid, over = np.zeros(1), np.zeros(1), np.zeros(1)
    steps = []
    for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
        points = first + np.argsort(excess[first:end], kind="stable")[:_POINTS]
        total_s = (used_s[:, None] + time_s[points]).ravel()
        total = (paid[:, None] + cost[points]).ravel()
        total_over = (over[:, None] + excess[points]).ravel()
        kept = np.flatnonzero((total_over <= slack) & (total_s <= hidden_s))
        kept = kept[np.lexsort((total[kept], total_s[kept]))]
        before = np.minimum.accumulate(np.append(np.inf, total[kept]))[:-1]
        kept = kept[total[kept] < before]
        kept = kept[np.argsort(total_over[kept], kind="stable")[:beam]]
        steps.append((kept // points.size, points[kept % points.size]))
        used_s, paid, over = total_s[kept], total[kept], total_over[kept]
    if not paid.size or paid.min() >= cost[at].sum():
        return at
    best, chosen = int(paid.argmin()), []
    for parent, point in reversed(steps):
        chosen.append(point[best])
        best = int(parent[best])
    return np.array(chosen[::-1])


def _refine(
    problem: Assignment,
    up: Upgrades,
    rounds: np.ndarray,
    taken: np.ndarray,
    choice: np.ndarray,
) -> tuple[np.ndarray, float]:
    """Lets the groups next to each channel's break take any option, and keeps the others fixed.

    Returns:
        The choice, and a lower bound of any assignment's objective; the bound is 0 unless every
        group that has upgrades was free.
    """
    core = _core_groups(problem, up, taken)
    used = core >= 0
    options = problem.bits.size
    rows = np.arange(problem.num_channels)
    is_fixed = np.ones(problem.num_groups, dtype=bool)
    is_fixed[core[used]] = False

    picked = choice[:, None]
    variance = problem.option_variance()
    fixed_bytes = np.take_along_axis(problem.bytes, picked, axis=1)[:, 0] * is_fixed
    fixed_variance = np.take_along_axis(variance, picked, axis=1)[:, 0] * is_fixed
    total_bytes = np.bincount(problem.channel, fixed_bytes, rows.size)[:, None]
    total = np.bincount(problem.channel, fixed_variance, rows.size)[:, None]
    for slot in range(core.shape[1]):
        here = used[:, slot, None]
        # An empty slot has one option: infinite variance excludes the others.
        spare = np.where(np.arange(options) == 0, 0.0, np.inf)
        add_bytes = np.where(here, problem.bytes[core[:, slot]], 0.0)
        add = np.where(here, variance[core[:, slot]], spare)
        total_bytes = (total_bytes[:, :, None] + add_bytes[:, None, :]).reshape(rows.size, -1)
        total = (total[:, :, None] + add[:, None, :]).reshape(rows.size, -1)

    time_s = problem.latency_s[:, None] + problem.s_per_byte[:, None] * total_bytes
    order = np.argsort(time_s, axis=1, kind="stable")
    time_s = np.take_along_axis(time_s, order, axis=1)
    total = np.take_along_axis(total, order, axis=1)
    best = np.minimum.accumulate(total, axis=1)
    is_point = np.concatenate((np.isfinite(best[:, :1]), best[:, 1:] < best[:, :-1]), axis=1)
    channel, column = np.nonzero(is_point)
    drop = np.zeros_like(total)
    drop[:, 1:] = np.where(is_point[:, 1:], best[:, :-1] - best[:, 1:], 0.0)
    menu = _Menu(channel=channel, time_s=time_s[is_point], drop=drop[is_point])
    levels_s, bound = _choose_levels(problem, menu, rounds)

    count = np.bincount(channel, minlength=rows.size)
    at = np.cumsum(count) - count + menu.below(levels_s[rounds], rows.size) - 1
    code = order[rows, column[at]]
    refined = choice.copy()
    for slot in reversed(range(core.shape[1])):
        code, digit = np.divmod(code, options)
        refined[core[used[:, slot], slot]] = digit[used[:, slot]]
    if is_fixed[up.group].any():
        return refined, 0.0
    return refined, bound + problem.prices()[0] * float(variance.min(axis=1, initial=np.inf).sum())


def _core_groups(problem: Assignment, up: Upgrades, taken: np.ndarray) -> np.ndarray:
    """The groups that are cheapest to change, [channels, slots], -1 where a slot is empty."""
    count = np.bincount(up.channel, minlength=problem.num_channels)
    last = np.cumsum(count) - 1
    at = np.clip(last - count + 1 + taken, 0, last)[count > 0]
    # How much variance taking or dropping an upgrade costs at the price of its channel's break:
    # least next to the break, and for short groups.
    breaks = np.zeros(problem.num_channels)
    breaks[count > 0] = np.where(np.isfinite(up.slope[at]), up.slope[at], 0.0)
    loss = np.abs(up.drop - breaks[up.channel] * (up.drop / up.slope))
    distance = np.full(problem.num_groups, np.inf)
    np.minimum.at(distance, up.group, loss)
    order = np.lexsort((distance, problem.channel))
    order = order[np.isfinite(distance[order])]
    channel = problem.channel[order]
    count = np.bincount(channel, minlength=problem.num_channels)
    rank = np.arange(order.size) - (np.cumsum(count) - count)[channel]

    points = max(_CORE_POINTS, _CORE_POINTS_PER_GROUP * problem.num_groups)
    points /= max(1, problem.num_channels)
    slots = int(np.log(max(points, 1.0)) / np.log(max(problem.bits.size, 2)))
    slots = max(1, min(slots, _CORE_GROUPS, int(count.max(initial=0))))
    core = np.full((problem.num_channels, slots), -1)
    near = rank < slots
    core[channel[near], rank[near]] = order[near]
    return core
