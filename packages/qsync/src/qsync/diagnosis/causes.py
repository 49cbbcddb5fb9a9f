"""Names why a step takes long: a slow rank, operator, loader or link.

The rank that others wait for is compared with the median of the others, operator by operator. If
its loader, or one operator that lags behind more than the rest do, makes up half of its excess or
more, that is the cause; else the rank is slow at everything. A cause acts in every step, while a busy
core preempts long operators in some: what the scatter of steps explains is no operator's. Collectives that
no computing hides are the link's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from qsync.diagnosis.collectives import MatchedCollective, merge
from qsync.diagnosis.job_graph import LanePiece
from qsync.diagnosis.traces.events import LOADER
from shared.units import format_rate, format_s

__all__ = ["DelayCause", "find_rank_cause", "link_cause"]

CauseKind = Literal["slow rank", "slow operator", "late loader", "slow link"]

# Share of a rank's excess that makes one part of it the cause.
_MAIN_SHARE = 0.5
# Ranks whose seconds differ by less over all steps are equally fast.
_ALIKE = 0.01
# Largest relative lag of all other operators, as a share of the lag of the one that is the cause, and
# by itself. A throttled core delays long operators more than short ones; it makes no loader sleep, so
# that the second bound does not hold for loaders.
_REST_SHARE = 0.25
_MAX_REST = 0.5
# Standard errors over the steps that an operator's lag must exceed.
_STEADY = 5.0


class DelayCause(NamedTuple):
    """Why ranks wait.

    Attributes:
        kind: what is slow.
        seconds: of each step in which those who wait compute nothing.
        rank: the rank concerned; None for the link, which all share.
        operator: the operator concerned, if one is.
        text: a sentence.
    """

    kind: CauseKind
    seconds: float
    rank: int | None
    operator: str | None
    text: str


def find_rank_cause(
    lanes: Sequence[Sequence[LanePiece]], rank: int, seconds: float, num_steps: int
) -> DelayCause:
    """Finds why others wait for a rank.

    Args:
        lanes: operators by rank.
        rank: the rank that others wait for.
        seconds: of each step that it costs the others.
        num_steps: steps in the lanes.
    """
    tables = [_sum_by_name(lane, num_steps) for lane in lanes]
    mine = tables.pop(rank)
    names = sorted({name for table in [mine, *tables] for name in table})
    usual = {name: np.median([table[name] for table in tables], axis=0) for name in names}
    mine_s = {name: float(mine[name].mean()) for name in names}
    usual_s = {name: float(usual[name].mean()) for name in names}
    worst = max(names, key=lambda name: mine_s[name] - usual_s[name])
    lag_s, lag = mine_s[worst] - usual_s[worst], mine_s[worst] / max(usual_s[worst], 1e-12)
    # Operators that are faster by chance make up for those that are slower by chance.
    total_s, total_usual_s = sum(mine_s.values()), sum(usual_s.values())
    ratio = total_s / max(total_usual_s, 1e-12)
    rest = (total_s - mine_s[worst]) / max(total_usual_s - usual_s[worst], 1e-12)
    most = float("inf") if worst == LOADER else _MAX_REST
    scatter_s = np.std(mine[worst] - usual[worst], ddof=1) if num_steps > 1 else 0.0
    is_main = (
        lag_s >= _MAIN_SHARE * (total_s - total_usual_s)
        and rest - 1 <= min(_REST_SHARE * (lag - 1), most)
        and lag_s > _STEADY * scatter_s / num_steps**0.5
    )
    spent = f"{format_s(mine_s[worst])} a step against {format_s(usual_s[worst])} on the others"
    if is_main and worst == LOADER:
        return DelayCause(
            "late loader", seconds, rank, None, f"the loader of rank {rank} is late: {spent}"
        )
    if is_main:
        text = f"operator {worst} is slow on rank {rank}: {spent}"
        return DelayCause("slow operator", seconds, rank, worst, text)
    text = f"rank {rank} is slow at everything: {ratio:.2f} times the seconds of the others"
    if ratio < 1 + _ALIKE:
        text = f"rank {rank} is late in single steps, and as fast as the others over all"
    return DelayCause("slow rank", seconds, rank, None, text)


def link_cause(collectives: Sequence[MatchedCollective], exposed_s: float) -> DelayCause:
    """Describes the links' share of a step, with the rate at which they carried gradients."""
    text = f"the links hold up each step for {format_s(exposed_s)} that no computing hides"
    sizes = [collective.num_bytes or 0 for collective in collectives]
    busy_s = sum(end_s - start_s for start_s, end_s in merge(c.transfer for c in collectives))
    if all(sizes) and busy_s > 0:
        text += f", at {format_rate(sum(sizes) / busy_s)} of gradients"
    return DelayCause("slow link", exposed_s, None, None, text)


def _sum_by_name(
    lane: Sequence[LanePiece], num_steps: int
) -> defaultdict[str, Float[np.ndarray, " steps"]]:
    seconds = defaultdict(lambda: np.zeros(num_steps))
    for piece in lane:
        # The rest of a gap after a collective is the rank's wake-up, not this operator's time.
        own_s = piece.busy_s if piece.behind else piece.gap_s + piece.busy_s
        seconds[piece.name][piece.step] += own_s
    return seconds
