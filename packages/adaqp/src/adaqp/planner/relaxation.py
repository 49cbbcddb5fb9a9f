"""The linear relaxation of bit assignment, solved by sorting, and a lower bound from its dual.

Each group moves along the lower hull of its (bytes, variance) points; a channel takes these upgrades
steepest first, which makes its variance V_c(Z) convex and piecewise linear in its time. A round of
length Z saves the sum of what its channels save, so the best length is where their slopes sum to
the price of a second. The bound follows from the prices alone, by weak duality: it is valid even
where the prices are not optimal.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from adaqp.planner.problem import Assignment

__all__ = ["Upgrades", "dual_bound", "hull_upgrades", "relax", "round_max"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Upgrades:
    """Steps along each group's lower hull, sorted by channel, then steepest first."""

    base: np.ndarray  # [groups] option of fewest bytes
    group: np.ndarray  # [upgrades] and so below
    option: np.ndarray
    channel: np.ndarray
    position: np.ndarray  # rank within the channel
    drop: np.ndarray  # variance saved
    slope: np.ndarray  # variance saved per second, infinite where bytes cost no time
    end_s: np.ndarray  # time of the channel once this upgrade and all before it are taken


def hull_upgrades(problem: Assignment) -> Upgrades:
    """All upgrades of a problem, each channel's steepest first. O(groups log groups)."""
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
        # Rounding errors must not make a later step of a group sort before an earlier one.
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
    return Upgrades(
        base=base,
        group=group,
        option=option,
        channel=channel,
        position=np.arange(group.size) - first[channel],
        drop=drop[order],
        slope=slope_s,
        end_s=problem.latency_s[channel] + per_byte * (least + gained),
    )


def round_max(values: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """Largest of the channels' values [channels] in each round, at least 0."""
    most = np.zeros(int(rounds.max(initial=-1)) + 1)
    np.maximum.at(most, rounds, values)
    return most


def relax(problem: Assignment, up: Upgrades, rounds: np.ndarray) -> tuple[np.ndarray, float]:
    """Round times [rounds] of the relaxation's optimum, and its price of a second."""
    per_variance, per_s = problem.prices()
    levels_s = round_max(problem.channel_s(up.base), rounds)
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
    slope = np.empty_like(change)
    edges = np.searchsorted(round_of, np.arange(levels_s.size + 1)).tolist()
    for a, b in pairwise(edges):
        slope[a:b] = np.cumsum(change[a:b][::-1])[::-1]
    is_first = np.append(True, round_of[1:] != round_of[:-1])[: round_of.size]
    length_s = end_s - np.where(is_first, levels_s[round_of], np.roll(end_s, 1))

    worth = per_variance * slope
    paid = worth > per_s
    np.maximum.at(levels_s, round_of[paid], end_s[paid])
    free_s = problem.hidden_s - levels_s.sum()
    if free_s <= 0 or paid.all():
        return levels_s, (per_s if free_s <= 0 else 0.0)
    # Hidden seconds remain: spend them where they save most.
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


def dual_bound(
    problem: Assignment, up: Upgrades, rounds: np.ndarray, levels_s: np.ndarray, price: float
) -> float:
    """Lower bound by weak duality, from any channel prices that sum to `price` a round or less."""
    per_variance = problem.prices()[0]
    level_s = levels_s[rounds]
    channels = problem.num_channels
    least_s = problem.channel_s(up.base)

    # Upgrades whose bytes cost no time do not contribute to the bound.
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
    # A channel at its fewest bytes bounds the round at any price: it takes the rest of the price.
    share = np.divide(missing, rooms, out=np.zeros_like(rooms), where=rooms > 0).clip(max=1.0)
    weight += np.where(floors[rounds] > 0, 0.0, share[rounds] * room)
    weight += np.where(is_floor, missing[rounds] / np.maximum(floors[rounds], 1), 0.0)
    total = per_round(weight)
    weight *= np.divide(price, total, out=np.ones_like(total), where=total > price)[rounds]

    per_byte = (weight * problem.s_per_byte)[problem.channel]
    cheapest = per_variance * problem.option_variance() + per_byte[:, None] * problem.bytes
    groups = cheapest.min(axis=1, initial=np.inf).sum()
    return max(0.0, float(groups + weight @ problem.latency_s - price * problem.hidden_s))
