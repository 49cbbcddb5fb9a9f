"""Bit assignment without a solver: steepest upgrades first, then every level of every round.

For a given round time Z each channel is a multiple-choice knapsack, whose linear relaxation takes
upgrades in the order of variance saved a second; V_c(Z) is convex and piecewise linear, so the best
Z lies where the slopes of the round's channels sum to the price of a second. Rounding down to whole
upgrades gives the first solution. The second lets the few groups next to each channel's break take
any option, which closes most of the rounding loss and is exhaustive on small problems. The lower
bound is the value of the relaxation's dual, checked by weak duality alone: it stands whether or not
the steps before it were right. O(groups log groups).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from adaqp.assignment import Assignment

__all__ = ["GreedyResult", "solve"]

# Points examined in the second step, over all channels: about 20 ms of sorting.
_CORE_POINTS = 200_000
_CORE_GROUPS = 8
_GOOD_GAP = 1e-7
_PASSES = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GreedyResult:
    """A choice of options [groups] and a proven lower bound of the objective."""

    choice: Int64[np.ndarray, " groups"]
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Upgrades:
    """Steps along each group's lower hull, sorted by channel, then steepest first."""

    base: np.ndarray  # [groups] option of fewest bytes
    group: np.ndarray  # [upgrades] and so below
    option: np.ndarray
    channel: np.ndarray
    position: np.ndarray  # rank within the channel
    drop: np.ndarray  # variance saved
    slope: np.ndarray  # variance saved a second, infinite where bytes cost no time
    end_s: np.ndarray  # time of the channel once this upgrade and all before it are taken


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Menu:
    """Levels of each channel: points sorted by channel, then time; variance falls along each."""

    channel: np.ndarray
    time_s: np.ndarray
    variance: np.ndarray

    def below(self, level_s: np.ndarray, num_channels: int) -> np.ndarray:
        """Number of points of each channel not later than the channel's level."""
        reached = self.time_s <= level_s[self.channel]
        return np.bincount(self.channel[reached], minlength=num_channels)


def solve(problem: Assignment) -> GreedyResult:
    """Choose an option for each group, near the optimum and with a proven bound.

    Args:
        problem: groups, channels and the weights of variance and time.

    Returns:
        The choice and a lower bound of the optimum's objective; they are equal when the problem
        was small enough to be searched exhaustively.
    """
    upgrades = _hull_upgrades(problem)
    rounds = problem.round_index()
    levels_s, price = _relaxation(problem, upgrades, rounds)
    bound = _dual_bound(problem, upgrades, rounds, levels_s, price)

    menu = _prefix_menu(problem, upgrades)
    levels_s = _choose_levels(problem, menu, rounds, levels_s)
    taken = menu.below(levels_s[rounds], problem.num_channels) - 1
    choice = upgrades.base.copy()
    done = upgrades.position < taken[upgrades.channel]
    # Upgrades of a group come in order of option, so the last one written is the one reached.
    choice[upgrades.group[done]] = upgrades.option[done]

    objective = problem.objective(choice)
    if objective - bound > _GOOD_GAP * objective:
        refined, is_exhaustive = _refine(problem, upgrades, rounds, levels_s, taken, choice)
        if problem.objective(refined) < objective:
            choice = refined
        if is_exhaustive:
            bound = problem.objective(choice)
    return GreedyResult(choice=choice, bound=bound)


def _hull_upgrades(problem: Assignment) -> _Upgrades:
    variance, num_bytes = problem.option_variance(), problem.bytes
    rows = np.arange(problem.num_groups)
    is_least = num_bytes == num_bytes.min(axis=1, keepdims=True, initial=np.inf)
    base = np.where(is_least, variance, np.inf).argmin(axis=1)

    current, steps, ceiling = base, [], np.full(rows.size, np.inf)
    for step in range(problem.bits.size - 1):
        more = num_bytes - num_bytes[rows, current][:, None]
        less = variance[rows, current][:, None] - variance
        useful = (more > 0) & (less > 0)
        slope = np.divide(less, more, out=np.zeros_like(less), where=useful)
        best = slope.argmax(axis=1)
        go = slope[rows, best] > 0
        if not go.any():
            break
        # Roundoff must not let a later step of a group sort before an earlier one.
        ceiling = np.minimum(ceiling, slope[rows, best])
        g, b = rows[go], best[go]
        steps.append((g, b, np.full(g.size, step), ceiling[go], more[g, b], less[g, b]))
        current = np.where(go, best, current)
    empty = [np.zeros(0, np.int64)] * 3 + [np.zeros(0)] * 3
    group, option, step, slope, more, drop = (
        [np.concatenate(column) for column in zip(*steps, strict=True)] if steps else empty
    )

    channel = problem.channel[group]
    order = np.lexsort((step, -slope, channel))
    group, option, channel = group[order], option[order], channel[order]
    count = np.bincount(channel, minlength=problem.num_channels)
    first = np.cumsum(count) - count
    running = np.concatenate(([0.0], np.cumsum(more[order])))
    gained = running[1:] - running[first[channel]]
    per_byte = problem.s_per_byte[channel]
    least = problem.channel_bytes(base)[channel]
    with np.errstate(divide="ignore"):
        slope_s = slope[order] / per_byte
    return _Upgrades(
        base=base,
        group=group,
        option=option,
        channel=channel,
        position=np.arange(group.size) - first[channel],
        drop=drop[order],
        slope=slope_s,
        end_s=problem.latency_s[channel] + per_byte * (least + gained),
    )


def _round_max(values: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    most = np.zeros(int(rounds.max(initial=-1)) + 1)
    np.maximum.at(most, rounds, values)
    return most


def _slices(sorted_rounds: np.ndarray, num_rounds: int) -> list[slice]:
    edges = np.searchsorted(sorted_rounds, np.arange(num_rounds + 1))
    return [slice(a, b) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]


def _relaxation(problem: Assignment, up: _Upgrades, rounds: np.ndarray) -> tuple[np.ndarray, float]:
    """Round times [rounds] of the relaxation's optimum, and its price of a second."""
    per_variance, per_s = problem.prices()
    levels_s = _round_max(problem.channel_s(up.base), rounds)
    round_of = rounds[up.channel]
    is_inside = up.end_s > levels_s[round_of]
    same = np.append(up.channel[1:] == up.channel[:-1], False)[: up.channel.size]
    following = np.where(same, np.append(up.slope[1:], 0.0)[: up.slope.size], 0.0)
    change = up.slope[is_inside] - following[is_inside]
    end_s, round_of = up.end_s[is_inside], round_of[is_inside]

    order = np.lexsort((end_s, round_of))
    end_s, round_of, change = end_s[order], round_of[order], change[order]
    # The round's slope left of each breakpoint, summed from the flat end: all terms are positive,
    # so nothing cancels although slopes span many orders of magnitude.
    slope, length_s = np.empty_like(change), np.empty_like(end_s)
    for r, part in enumerate(_slices(round_of, levels_s.size)):
        slope[part] = np.cumsum(change[part][::-1])[::-1]
        length_s[part] = np.diff(end_s[part], prepend=levels_s[r])

    worth = per_variance * slope
    paid = worth > per_s
    np.maximum.at(levels_s, round_of[paid], end_s[paid])
    free_s = problem.hidden_s - levels_s.sum()
    if free_s <= 0 or paid.all():
        return levels_s, (per_s if free_s <= 0 else 0.0)
    # Hidden seconds are left over: spend them where they save most.
    rest = np.flatnonzero(~paid)
    rest = rest[np.argsort(-slope[rest], kind="stable")]
    used_s = np.cumsum(length_s[rest])
    whole = int(np.searchsorted(used_s, free_s, side="right"))
    np.maximum.at(levels_s, round_of[rest[:whole]], end_s[rest[:whole]])
    if whole == rest.size:
        return levels_s, 0.0
    cut = rest[whole]
    levels_s[round_of[cut]] = end_s[cut] - (used_s[whole] - free_s)
    return levels_s, min(per_s, float(worth[cut]))


def _dual_bound(
    problem: Assignment, up: _Upgrades, rounds: np.ndarray, levels_s: np.ndarray, price: float
) -> float:
    """Lower bound by weak duality, from any channel prices that sum to `price` a round or less."""
    per_variance = problem.prices()[0]
    level_s = levels_s[rounds]
    channels = problem.num_channels
    least_s = problem.channel_s(up.base)

    # Bytes that cost no time bound nothing, whatever they save.
    slope = per_variance * np.where(np.isfinite(up.slope), up.slope, 0.0)
    count = np.bincount(up.channel, minlength=channels)

    def slope_after(is_taken: np.ndarray) -> np.ndarray:
        taken = np.bincount(up.channel[is_taken], minlength=channels)
        is_left = taken < count
        after = np.zeros(channels)
        after[is_left] = slope[(np.cumsum(count) - count + taken)[is_left]]
        return after

    weight = slope_after(up.end_s <= level_s[up.channel])
    left = slope_after(up.end_s < level_s[up.channel])
    is_floor = least_s >= level_s
    room = np.where(is_floor, 0.0, np.maximum(left - weight, 0.0))
    num_rounds = levels_s.size

    def per_round(values: np.ndarray) -> np.ndarray:
        return np.bincount(rounds, weights=values, minlength=num_rounds)

    missing = np.maximum(price - per_round(weight), 0.0)
    floors, rooms = per_round(is_floor), per_round(room)
    # A channel at its least bytes holds the round up whatever the price: it takes all the rest.
    share = np.divide(missing, rooms, out=np.zeros_like(rooms), where=rooms > 0).clip(max=1.0)
    weight += np.where(floors[rounds] > 0, 0.0, share[rounds] * room)
    weight += np.where(is_floor, missing[rounds] / np.maximum(floors[rounds], 1), 0.0)
    total = per_round(weight)
    weight *= np.divide(price, total, out=np.ones_like(total), where=total > price)[rounds]

    per_byte = (weight * problem.s_per_byte)[problem.channel]
    cheapest = per_variance * problem.option_variance() + per_byte[:, None] * problem.bytes
    groups = cheapest.min(axis=1, initial=np.inf).sum()
    return max(0.0, float(groups + weight @ problem.latency_s - price * problem.hidden_s))


def _prefix_menu(problem: Assignment, up: _Upgrades) -> _Menu:
    channels = np.arange(problem.num_channels)
    chosen = np.take_along_axis(problem.option_variance(), up.base[:, None], axis=1)[:, 0]
    start = np.bincount(problem.channel, weights=chosen, minlength=channels.size)
    channel = np.concatenate((channels, up.channel))
    order = np.argsort(channel, kind="stable")
    channel = channel[order]
    time_s = np.concatenate((problem.channel_s(up.base), up.end_s))[order]
    change = np.concatenate((start, -up.drop))[order]
    variance = np.empty_like(change)
    for part in _slices(channel, channels.size):
        variance[part] = np.cumsum(change[part])
    return _Menu(channel=channel, time_s=time_s, variance=variance)


def _choose_levels(
    problem: Assignment, menu: _Menu, rounds: np.ndarray, start_s: np.ndarray
) -> np.ndarray:
    """Best time of each round, the others held, over all levels of its channels' menus."""
    per_variance, per_s = problem.prices()
    is_first = np.append(True, menu.channel[1:] != menu.channel[:-1])[: menu.channel.size]
    floor_s = _round_max(menu.time_s[is_first], rounds)
    last = menu.variance[np.append(is_first[1:], True)[: is_first.size]]
    least = np.bincount(rounds, weights=last, minlength=floor_s.size)

    drop = -np.diff(menu.variance, prepend=0.0)[~is_first]
    round_of = rounds[menu.channel[~is_first]]
    time_s = np.maximum(menu.time_s[~is_first], floor_s[round_of])
    order = np.lexsort((time_s, round_of))
    round_of, time_s, drop = round_of[order], time_s[order], drop[order]
    options = []
    for r, part in enumerate(_slices(round_of, floor_s.size)):
        after = np.cumsum(drop[part][::-1])[::-1]
        at_s = np.append(floor_s[r], time_s[part])
        options.append((at_s, least[r] + np.append(after, 0.0)))

    levels_s = np.maximum(start_s, floor_s)
    for _ in range(_PASSES):
        before_s = levels_s.copy()
        for r, (at_s, variance) in enumerate(options):
            other_s = levels_s.sum() - levels_s[r] - problem.hidden_s
            cost = per_variance * variance + per_s * np.maximum(at_s + other_s, 0.0)
            # Among equals (time that is hidden, weights of zero) the least variance.
            best = np.flatnonzero(cost <= cost.min())
            levels_s[r] = at_s[best[variance[best].argmin()]]
        if problem.hidden_s == 0 or np.array_equal(before_s, levels_s):
            break
    return levels_s


def _refine(
    problem: Assignment,
    up: _Upgrades,
    rounds: np.ndarray,
    levels_s: np.ndarray,
    taken: np.ndarray,
    choice: np.ndarray,
) -> tuple[np.ndarray, bool]:
    """Free the groups next to each channel's break; returns the choice, and whether all were."""
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
        # An empty slot has one option; the others are dominated at once.
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
    menu = _Menu(channel=channel, time_s=time_s[is_point], variance=total[is_point])
    levels_s = _choose_levels(problem, menu, rounds, levels_s)

    count = np.bincount(channel, minlength=rows.size)
    at = np.cumsum(count) - count + menu.below(levels_s[rounds], rows.size) - 1
    code = order[rows, column[at]]
    refined = choice.copy()
    for slot in reversed(range(core.shape[1])):
        code, digit = np.divmod(code, options)
        refined[core[used[:, slot], slot]] = digit[used[:, slot]]
    has_upgrade = np.unique(up.group)
    is_separable = problem.hidden_s == 0 or levels_s.size == 1
    return refined, bool(is_separable and not is_fixed[has_upgrade].any())


def _core_groups(problem: Assignment, up: _Upgrades, taken: np.ndarray) -> np.ndarray:
    """Groups next to the break of each channel: [channels, slots], -1 where a slot is empty."""
    distance = np.full(problem.num_groups, np.inf)
    np.minimum.at(distance, up.group, np.abs(up.position + 0.5 - taken[up.channel]))
    order = np.lexsort((distance, problem.channel))
    order = order[np.isfinite(distance[order])]
    channel = problem.channel[order]
    count = np.bincount(channel, minlength=problem.num_channels)
    rank = np.arange(order.size) - (np.cumsum(count) - count)[channel]

    points = _CORE_POINTS / max(1, problem.num_channels)
    slots = int(np.log(max(points, 1.0)) / np.log(max(problem.bits.size, 2)))
    slots = max(1, min(slots, _CORE_GROUPS, int(count.max(initial=0))))
    core = np.full((problem.num_channels, slots), -1)
    near = rank < slots
    core[channel[near], rank[near]] = order[near]
    return core
