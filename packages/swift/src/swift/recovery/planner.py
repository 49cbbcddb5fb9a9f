"""Decide how all ranks come to the same version after a failure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.errors import DataError

__all__ = ["Decision", "decide"]

# Ranks that a reason names before it counts the rest.
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What every rank has to do; undoing comes before fetching.

    Attributes:
        target: The version, in steps, that all will have; None if a checkpoint decides.
        undo: Rank -> parameters whose last step it takes back.
        fetch: Rank -> {parameter: rank that has it at the target}. Lost ranks fetch everything.
        replay: Places in `sets` of those that rebuild their state from logs.
        from_checkpoint: Whether all ranks start again from the last checkpoint.
        reason: Why, in a sentence.
    """

    target: int | None
    undo: dict[int, list[int]]
    fetch: dict[int, dict[int, int]]
    replay: list[int]
    from_checkpoint: bool
    reason: str


Versions = Mapping[int, Sequence[int] | None]


def decide(
    sets: Sequence[Versions],
    logged: Sequence[bool] | None = None,
    *,
    undo_is_exact: bool = True,
) -> Decision:
    """Choose the newest version that all replica sets can reach, and how each rank reaches it.

    Let t+1 be the newest version that any surviving parameter has. A set reaches t+1 when one of
    its ranks holds all parameters at t+1 (the others fetch), and t when every parameter is at t or
    t+1 on some rank (those at t+1 are undone, or fetched where undo is inexact, and those behind are
    fetched). A set whose ranks reach neither replays its logs, if they reach t+1. The target is the
    newest version that all sets reach; a set that reaches none leaves only the last checkpoint.

    After "SWIFT: Expedited Failure Recovery for Large-scale DNN Training" (arXiv 2302.06173), with
    versions a parameter in place of one a rank. O(number of versions).

    Args:
        sets: One mapping a replica set: rank -> version of each parameter, in steps, or None for a
            lost rank. Ranks are unique over all sets.
        logged: By set, whether its logs reach t+1; None: nothing is logged.
        undo_is_exact: Whether undoing restores every bit. If not (mode "arith"), a rank fetches what
            it would undo from a rank of its set that still is at the target, if there is one; else
            all that have it undo it, and come to the same bits.

    Returns:
        What each rank does. Who fetches a parameter shares its sources evenly with the others.

    Raises:
        DataError: No set, a set without ranks, a rank in two sets, ranks of a set that differ in
            the number of parameters, or `logged` of another length than `sets`.
    """
    logged = [False] * len(sets) if logged is None else list(logged)
    _check(sets, logged)
    held = [{r: v for r, v in ranks.items() if v is not None} for ranks in sets]
    newest = max((max(v) for ranks in held for v in ranks.values() if v), default=None)
    if newest is None:
        return _from_checkpoint("no rank has survived with a parameter")
    reached = [_reach(ranks, newest) for ranks in held]
    replay = [i for i, version in enumerate(reached) if version is None and logged[i]]
    for i, version in enumerate(reached):
        if version is None and not logged[i]:
            return _from_checkpoint(
                f"replica set {i} (ranks {_names(sets[i])}) has parameters that no survivor holds "
                f"at version {newest - 1} or {newest}, and no logs that reach {newest}"
            )
    target = min(newest if version is None else version for version in reached)
    undo: dict[int, list[int]] = {}
    fetch: dict[int, dict[int, int]] = {}
    for i, ranks in enumerate(sets):
        if i not in replay:
            _align(ranks, held[i], target, undo, fetch, undo_is_exact=undo_is_exact)
    return Decision(
        target=target,
        undo=undo,
        fetch=fetch,
        replay=replay,
        from_checkpoint=False,
        reason=_explain(sets, reached, target, newest, undo, fetch, replay),
    )


def _reach(held: Mapping[int, Sequence[int]], newest: int) -> int | None:
    if any(min(versions, default=newest) == newest for versions in held.values()):
        return newest
    if held and all(max(versions) >= newest - 1 for versions in zip(*held.values(), strict=True)):
        return newest - 1
    return None


def _align(
    ranks: Versions,
    held: Mapping[int, Sequence[int]],
    target: int,
    undo: dict[int, list[int]],
    fetch: dict[int, dict[int, int]],
    *,
    undo_is_exact: bool,
) -> None:
    num_parameters = len(next(iter(held.values())))
    # These need no undoing, as some rank still is at the target.
    kept = frozenset() if undo_is_exact else _kept(held, target)
    missing: dict[int, Sequence[int]] = {}
    for rank, versions in ranks.items():
        if versions is None:
            missing[rank] = range(num_parameters)
            continue
        # Most ranks hold all at the target: C tells so faster than a loop.
        is_behind = min(versions, default=target) < target
        if max(versions, default=target) > target:
            ahead = [p for p, version in enumerate(versions) if version > target]
            undone = [p for p in ahead if p not in kept] if kept else ahead
            if undone:
                undo[rank] = undone
            is_behind |= len(undone) < len(ahead)
        if is_behind:
            missing[rank] = [
                p
                for p, version in enumerate(versions)
                if version < target or (version > target and p in kept)
            ]
    complete = [rank for rank in held if rank not in missing]
    holders: dict[int, list[int]] = {}
    for turn, (rank, parameters) in enumerate(missing.items()):
        fetch[rank] = {}
        for p in parameters:
            if p not in holders:
                last = target if p in kept else target + 1
                others = [r for r in missing if r in held and target <= held[r][p] <= last]
                holders[p] = complete + others
            # Each parameter, and each rank that lacks it, begins with another source.
            fetch[rank][p] = holders[p][(p + turn) % len(holders[p])]


def _kept(held: Mapping[int, Sequence[int]], target: int) -> frozenset[int]:
    """Parameters that some rank holds at the target."""
    return frozenset(
        p for versions in held.values() for p, version in enumerate(versions) if version == target
    )


def _explain(
    sets: Sequence[Versions],
    reached: Sequence[int | None],
    target: int,
    newest: int,
    undo: Mapping[int, Sequence[int]],
    fetch: Mapping[int, Mapping[int, int]],
    replay: Sequence[int],
) -> str:
    if target == newest:
        why = f"every replica set can be at version {target}"
    else:
        short = next(i for i, version in enumerate(reached) if version == target)
        why = (
            f"no rank of replica set {short} (ranks {_names(sets[short])}) holds all parameters at "
            f"version {newest}, so all go to {target}"
        )
    deeds = [
        f"{_count(undo)} undone by {_named('rank', undo)}" if undo else "",
        f"{_count(fetch)} fetched by {_named('rank', fetch)}" if fetch else "",
        f"logs replayed by {_named('replica set', replay)}" if replay else "",
    ]
    return ": ".join([why, "; ".join(filter(None, deeds)) or "nothing is to be done"])


def _from_checkpoint(reason: str) -> Decision:
    return Decision(target=None, undo={}, fetch={}, replay=[], from_checkpoint=True, reason=reason)


def _count(entries: Mapping[int, Collection[int]]) -> str:
    number = sum(map(len, entries.values()))
    return f"{number} parameter{'' if number == 1 else 's'}"


def _named(what: str, numbers: Collection[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {_names(numbers)}"


def _names(numbers: Iterable[int]) -> str:
    shown = sorted(numbers)
    more = len(shown) - _SHOWN
    return ", ".join(map(str, shown[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _check(sets: Sequence[Versions], logged: Sequence[bool]) -> None:
    if not sets or not all(sets):
        raise DataError(
            f"expected replica sets of at least one rank, got {len(sets)} sets, of "
            f"{[len(ranks) for ranks in sets]} ranks: name every rank of the world"
        )
    if len(logged) != len(sets):
        raise DataError(
            f"expected `logged` to say something of each of {len(sets)} sets, got {len(logged)} "
            "values: give one a set"
        )
    seen: set[int] = set()
    for i, ranks in enumerate(sets):
        twice = seen & ranks.keys()
        if twice:
            raise DataError(
                f"expected every rank in one replica set, got rank {min(twice)} in set {i} and in "
                "one before: give each rank once"
            )
        seen |= ranks.keys()
        counts = {len(versions): rank for rank, versions in ranks.items() if versions is not None}
        if len(counts) > 1:
            raise DataError(
                f"expected ranks of replica set {i} to have the same parameters, got numbers of "
                f"parameters {counts} (number: rank): give versions in the optimizer's order"
            )
