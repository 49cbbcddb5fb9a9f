"""Context-parallel degrees that follow the documents: short ones on a rank, long ones on several.

The problem of FlexSP (its published solver, arXiv 2412.01523): ranks form groups of powers of two; a group of d ranks
takes c + sum((a s^2 + b s) / d + m_d s) for its documents, m_d the seconds of messages for each token, and
holds d times a rank's tokens. Here groups are filled by first fit, the longest documents first, under a
limit that is halved in; the bound is what every document needs at least of ranks times seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from hydraulis.config import Cost, SequenceTooLong, check_lengths
from hydraulis.planner.groups_compiled import fill_groups
from shared.errors import ConfigError

__all__ = ["DegreeCost", "DegreePlan", "group_seconds", "plan_degrees"]

_HALVINGS = 24
_TOLERANCE = 5e-4
_MOST_OVER_BOUND = 64
_FEW_GROUPS = 16
"""Groups of the largest degree needed, up to which the bound counts what they leave for others."""


@dataclass(frozen=True, kw_only=True)
class DegreeCost:
    """Seconds and tokens of groups of ranks.

    Attributes:
        cost: of one rank alone; its c is paid once by each group.
        cap: most tokens that a rank holds.
        message_s: seconds of messages for each token by degree; none for degrees that are left out.
        max_degree: most ranks of a group; None for no limit (attention heads limit Ulysses).
        min_degree: fewest ranks of a group, a power of two.

    Raises:
        ConfigError: a cap below 1 or negative seconds.
    """

    cost: Cost
    cap: int
    message_s: Mapping[int, float] = field(default_factory=dict)
    max_degree: int | None = None
    min_degree: int = 1

    def __post_init__(self) -> None:
        wrong = {d: s for d, s in self.message_s.items() if not (d >= 1 and 0 <= s < np.inf)}
        if self.cap < 1 or wrong:
            raise ConfigError(
                f"DegreeCost: expected a cap of at least 1 and finite seconds of messages by degree, "
                f"got {self.cap} and {wrong or dict(self.message_s)}"
            )

    def degrees(self, num_ranks: int) -> np.ndarray:
        """Powers of two from the smallest degree up to the ranks and the largest degree."""
        most = min(num_ranks, self.max_degree or num_ranks)
        found = 2 ** np.arange(int(np.log2(max(most, 1))) + 1)
        return found[found >= self.min_degree]

    def seconds(self, lengths: np.ndarray, degree: int) -> np.ndarray:
        """Seconds that each document adds to a group of `degree` ranks."""
        alone = self.cost.sequence_s(lengths) / degree
        return alone + self.message_s.get(int(degree), 0.0) * lengths if degree > 1 else alone


@dataclass(frozen=True, kw_only=True, eq=False)
class DegreePlan:
    """Groups of ranks that work at the same time, each on documents of its own.

    Attributes:
        degree_of: ranks of each group [group], falling.
        group_of: group of each document [document].
        makespan_s: seconds until the slowest group ends.
        bound_s: no groups end before.
    """

    degree_of: Int[np.ndarray, " group"]
    group_of: Int[np.ndarray, " document"]
    makespan_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Share of the makespan by which the best plan may be shorter."""
        return 1 - self.bound_s / self.makespan_s if self.makespan_s else 0.0

    def seconds(self, lengths: Sequence[float] | np.ndarray, cost: DegreeCost) -> np.ndarray:
        """Seconds of each group [group]; 0 without documents."""
        return group_seconds(np.asarray(lengths), cost, self.degree_of, self.group_of)


def group_seconds(
    lengths: np.ndarray, cost: DegreeCost, degree_of: np.ndarray, group_of: np.ndarray
) -> np.ndarray:
    """Seconds of each group for its documents; 0 without any."""
    degrees, place = np.unique(degree_of, return_inverse=True)
    table = np.stack([cost.seconds(lengths, int(degree)) for degree in degrees])
    taken = table[place[group_of], np.arange(len(lengths))]
    counts = np.bincount(group_of, minlength=len(degree_of))
    return np.bincount(group_of, taken, len(degree_of)) + np.where(counts > 0, cost.cost.c, 0.0)


def plan_degrees(
    lengths: Sequence[float] | np.ndarray, num_ranks: int, cost: DegreeCost
) -> DegreePlan:
    """Groups and their documents, for one micro-batch of all ranks.

    Args:
        lengths: tokens of the documents.
        num_ranks: ranks in all.
        cost: of groups.

    Raises:
        SequenceTooLong: a document exceeds what the largest group holds.
        ConfigError: documents exceed all ranks' tokens together, or there are none or no ranks.
    """
    known = check_lengths(lengths)
    if num_ranks < 1 or not known.size:
        raise ConfigError(
            f"plan_degrees: expected ranks and documents, got {num_ranks} and {known.size}"
        )
    degrees = cost.degrees(num_ranks)
    most = int(degrees[-1]) * cost.cap
    if known.max() > most:
        raise SequenceTooLong(int(known.argmax()), int(known.max()), most)
    if known.sum() > num_ranks * cost.cap:
        raise ConfigError(
            f"plan_degrees: expected at most {num_ranks * cost.cap} tokens for {num_ranks} ranks, got "
            f"{known.sum()}; use more ranks or several micro-batches"
        )
    search = _Search(np.sort(known)[::-1], num_ranks, cost, degrees)
    bound_s = search.bound()
    degree_of, group_of = search.fill_best(bound_s)
    # Back to the order that was given; groups by falling degree.
    placed = np.empty(len(known), dtype=np.int64)
    placed[np.argsort(-known, kind="stable")] = group_of
    ranked = np.argsort(-degree_of, kind="stable")
    number = np.empty(len(ranked), dtype=np.int64)
    number[ranked] = np.arange(len(ranked))
    degree_of, placed = degree_of[ranked], number[placed]
    makespan_s = float(group_seconds(known, cost, degree_of, placed).max())
    return DegreePlan(
        degree_of=degree_of, group_of=placed, makespan_s=makespan_s,
        bound_s=min(bound_s, makespan_s),
    )  # fmt: skip


class _Search:
    """Limits of seconds halved in, for documents with the longest first."""

    def __init__(
        self, lengths: np.ndarray, num_ranks: int, cost: DegreeCost, degrees: np.ndarray
    ) -> None:
        self.lengths, self.num_ranks, self.cost, self.degrees = lengths, num_ranks, cost, degrees
        self.seconds = np.stack([cost.seconds(lengths, int(d)) for d in degrees], axis=1)
        self.fits = lengths[:, None] <= degrees * cost.cap
        self.tokens = lengths.astype(float)

    def least_degrees(self, limit_s: float) -> np.ndarray | None:
        """Number of the least degree at which each document fits and ends in time; None if one has none."""
        possible = self.fits & (self.seconds <= limit_s)
        return possible.argmax(axis=1) if possible.any(axis=1).all() else None

    def bound(self) -> float:
        """The least time in which ranks times seconds suffice, each document at its best degree."""
        areas = np.where(self.fits, self.seconds * self.degrees, np.inf)
        alone = np.where(self.fits, self.seconds, np.inf).min(axis=1).max()
        low = max(float(alone), float(areas.min(axis=1).sum()) / self.num_ranks)
        high = max(float(areas[self.fits].max()), low) * len(self.lengths)
        for _ in range(80):
            if high - low <= _TOLERANCE / 50 * low:
                break
            middle = (low + high) / 2 if high < 4 * low else 2 * low
            low, high = (low, middle) if self._may_suffice(areas, middle) else (middle, high)
        return low + self.cost.cost.c

    def _may_suffice(self, areas: np.ndarray, limit_s: float) -> bool:
        """False where no groups can end in time, whatever their number.

        Each document takes at least its least product of ranks and seconds. The longest ones take groups
        that may be most of the ranks: then others go into what these groups have left, at their degree,
        or into the ranks beside them; documents cut at will, as in a fractional knapsack.
        """
        possible = np.where(self.fits & (self.seconds <= limit_s), areas, np.inf)
        beside = possible.min(axis=1)
        room = self.num_ranks * limit_s
        if beside.sum() > room:
            return False
        number = int(np.isfinite(possible).argmax(axis=1).max())
        degree = int(self.degrees[number])
        if self.num_ranks > _FEW_GROUPS * degree:
            return True
        must = np.isfinite(possible).argmax(axis=1) == number
        inside = possible[:, number:].min(axis=1)
        # First beside go those that lose most by a place inside.
        order = np.argsort(-(inside / beside)[~must], kind="stable")
        outer, inner = beside[~must][order], inside[~must][order]
        held, own = np.cumsum(outer), float(inside[must].sum())
        rest = np.concatenate((np.cumsum(inner[::-1])[::-1], [0.0]))
        for groups in range(1, self.num_ranks // degree + 1):
            left = (self.num_ranks - groups * degree) * limit_s
            at = int(np.searchsorted(held, left, side="right"))
            kept = float(rest[at])
            if at < len(held):
                cut = (left - (held[at - 1] if at else 0.0)) / outer[at]
                kept = float(rest[at + 1] + inner[at] * (1 - cut))
            if own + kept <= groups * degree * limit_s * (1 + 1e-12):
                return True
        return False

    def fill(self, limit_s: float) -> tuple[np.ndarray, np.ndarray] | None:
        """Degrees of groups, and groups of documents, under a limit without c."""
        least = self.least_degrees(limit_s)
        if least is None:
            return None
        group_of = np.empty(len(self.lengths), dtype=np.int64)
        numbers = np.empty(self.num_ranks, dtype=np.int64)
        count = fill_groups(
            self.seconds, self.tokens, least, self.degrees, float(self.cost.cap), self.num_ranks,
            limit_s, group_of, numbers,
        )  # fmt: skip
        return None if count < 0 else (self.degrees[numbers[:count]], group_of)

    def fill_best(self, bound_s: float) -> tuple[np.ndarray, np.ndarray]:
        """The groups under the least limit at which they were found to suffice."""
        low = bound_s - self.cost.cost.c
        # Often one document alone settles the bound, and the others find room beside it.
        found = self.fill(low * (1 + 1e-12))
        if found is not None:
            return found
        high = low * 1.02
        found = self.fill(high)
        while found is None:
            # Where tokens are short and not seconds, no limit helps.
            if high > _MOST_OVER_BOUND * low:
                raise ConfigError(
                    f"plan_degrees: found no groups of {self.num_ranks} ranks that hold "
                    f"{int(self.tokens.sum())} tokens of {len(self.tokens)} documents, at most "
                    f"{self.cost.cap} a rank; use more ranks or several micro-batches"
                )
            high *= 1.25
            found = self.fill(high)
        for _ in range(_HALVINGS):
            if high - low <= _TOLERANCE * low:
                break
            middle = (low + high) / 2
            tried = self.fill(middle)
            if tried is None:
                low = middle
            else:
                found, high = tried, middle
        return found
