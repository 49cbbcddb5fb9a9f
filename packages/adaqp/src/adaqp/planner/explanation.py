"""Describes an assignment of bits in text: shares, slowest channels, seconds and variance."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from adaqp.planner.problem import Assignment
from shared.units import format_bytes, format_s

__all__ = ["UniformVariance", "explain", "uniform_variance"]

_ROUNDS_SHOWN = 8


class UniformVariance(NamedTuple):
    """Variance of uniform bits at the cost of a given choice.

    A cost between two bit-widths is matched by sending a random share of the messages at each.

    Attributes:
        channel_bytes: variance at the same bytes on each channel.
        total_bytes: variance at the same bytes summed over all channels. This also counts bytes
            that cost no time because their channel ends before its round does.
        time_s: variance at the same seconds summed over all rounds.
    """

    channel_bytes: float
    total_bytes: float
    time_s: float


def uniform_variance(problem: Assignment, choice: Int64[np.ndarray, " groups"]) -> UniformVariance:
    """Variance of uniform bits at the bytes or time of a choice.

    Args:
        problem: groups, channels and options.
        choice: [groups] option of each group, as an index into `problem.bits`.

    Returns:
        The variance of uniform bits at equal bytes on each channel, in total, and at equal time.
    """
    ends = [problem.uniform(option) for option in range(problem.bits.size)]
    options = problem.option_variance()
    sizes = np.stack([problem.channel_bytes(end) for end in ends])
    channels = range(problem.num_channels)
    variances = np.stack(
        [np.bincount(problem.channel, column, problem.num_channels) for column in options.T]
    )
    mine = problem.channel_bytes(choice)
    times_s = np.array([problem.round_s(end).sum() for end in ends])
    total = variances.sum(axis=1)
    return UniformVariance(
        channel_bytes=sum(_between(mine[c], sizes[:, c], variances[:, c]) for c in channels),
        total_bytes=_between(mine.sum(), sizes.sum(axis=1), total),
        time_s=_between(problem.round_s(choice).sum(), times_s, total),
    )


def explain(
    problem: Assignment, choice: Int64[np.ndarray, " groups"], solver: str, gap: float
) -> str:
    """Describe a choice in a few lines.

    Args:
        problem: groups, channels and options.
        choice: [groups] option of each group, as an index into `problem.bits`.
        solver: name of the solver that made the choice.
        gap: upper bound of the choice's relative distance from the optimum.

    Returns:
        Share of messages at each bit-width, the channel that bounds each round, seconds saved
        against the highest bits, and variance against uniform bits.
    """
    if problem.num_groups == 0:
        return "No messages to assign bits to."
    lines = [_shares(problem, choice), *_rounds(problem, choice), _seconds(problem, choice)]
    lines.append(_variance(problem, choice))
    lines.append(f"Solver: {solver}; at most {gap:.2g} (relative) from the optimum.")
    return "\n".join(lines)


def _between(cost: float, costs: np.ndarray, values: np.ndarray) -> float:
    order = np.argsort(costs, kind="stable")
    return float(np.interp(cost, costs[order], values[order]))


def _shares(problem: Assignment, choice: np.ndarray) -> str:
    # Groups differ in length: their bytes at one bit-width are proportional to their messages.
    size = problem.bytes[:, -1] if problem.bytes[:, -1].any() else np.ones(problem.num_groups)
    share = np.bincount(choice, weights=size, minlength=problem.bits.size) / size.sum()
    parts = [f"{s:.1%} at {b} bits" for s, b in zip(share, problem.bits.tolist(), strict=True)]
    return f"Messages: {', '.join(parts)}."


def _rounds(problem: Assignment, choice: np.ndarray) -> list[str]:
    rounds, channel_s = problem.round_index(), problem.channel_s(choice)
    round_s, num_bytes = problem.round_s(choice), problem.channel_bytes(choice)
    lines = []
    for r, name in enumerate(np.unique(problem.round_of)[:_ROUNDS_SHOWN].tolist()):
        members = np.flatnonzero(rounds == r)
        slowest = int(members[channel_s[members].argmax()])
        carried = format_bytes(round(float(num_bytes[slowest])))
        lines.append(
            f"Round {name}: {format_s(float(round_s[r]))}, bound by channel {slowest} ({carried})."
        )
    if round_s.size > _ROUNDS_SHOWN:
        rest_s = float(round_s[_ROUNDS_SHOWN:].sum())
        lines.append(f"{round_s.size - _ROUNDS_SHOWN} more rounds: {format_s(rest_s)} together.")
    return lines


def _seconds(problem: Assignment, choice: np.ndarray) -> str:
    time_s = float(problem.round_s(choice).sum())
    saved_s = float(problem.round_s(problem.uniform(-1)).sum()) - time_s
    word = "less" if saved_s >= 0 else "more"
    text = f"Time: {format_s(time_s)}, {format_s(abs(saved_s))} {word} than all at "
    text += f"{problem.bits[-1]} bits"
    if problem.hidden_s:
        exposed_s = max(0.0, time_s - problem.hidden_s)
        text += f"; {format_s(exposed_s)} of it not hidden behind compute"
    return f"{text}."


def _variance(problem: Assignment, choice: np.ndarray) -> str:
    variance = problem.variance(choice)
    if variance == 0:
        return "Variance: none."
    uniform = uniform_variance(problem, choice)
    return (
        f"Variance: {variance:.4g}. Uniform bits would have {uniform.channel_bytes / variance:.2f}x"
        f" at equal bytes on each channel, {uniform.total_bytes / variance:.2f}x at equal bytes in"
        f" total, {uniform.time_s / variance:.2f}x at equal time."
    )
