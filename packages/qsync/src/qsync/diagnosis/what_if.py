"""Predicts a job's step under changes that nobody has made yet, by replaying its graph.

Unchanged, the replay gives the measured step back. A change scales durations, or (other buckets)
links collectives anew (`qsync.diagnosis.buckets`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from qsync.diagnosis.buckets import is_backward, rebucket
from qsync.diagnosis.collectives import MatchedCollective, share_link
from qsync.diagnosis.job_graph import GraphCollective, JobGraph, LanePiece
from qsync.diagnosis.traces.events import LOADER
from shared.errors import ConfigError
from shared.topology import Link, Timeline, fit_link

__all__ = ["JobChange", "JobForecast", "TracedJob"]

Number = float | int


@dataclass(frozen=True, kw_only=True)
class JobChange:
    """Changes of a job; the default changes nothing.

    Attributes:
        link_speed: factor on the links' rate; latency stays.
        rank_speed: factor on all that a rank does, by rank.
        operator_speed: factor on operators' own seconds, by rank and name; None for all ranks.
        gradient_share: bytes sent in all-reduces, as a share of the present ones.
        bucket_bytes: size from which a bucket is sent; None for the present buckets.
        accumulation: micro-batches whose gradients are added up before they are all-reduced.
        micro_batches: parts into which each batch is cut, with one all-reduce behind the last.
        recompute_share: part of the forward pass that runs again in the backward pass.

    Raises:
        ConfigError: a value is outside its range.
    """

    link_speed: Number = 1.0
    rank_speed: Mapping[int, Number] = field(default_factory=dict)
    operator_speed: Mapping[tuple[int | None, str], Number] = field(default_factory=dict)
    gradient_share: Number = 1.0
    bucket_bytes: int | None = None
    accumulation: int = 1
    micro_batches: int = 1
    recompute_share: Number = 0.0

    def __post_init__(self) -> None:
        positive = {
            "link_speed": self.link_speed,
            "gradient_share": self.gradient_share,
            **{f"rank_speed[{key}]": value for key, value in self.rank_speed.items()},
            **{f"operator_speed[{key}]": value for key, value in self.operator_speed.items()},
        }
        for key, value in positive.items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"{key}: expected a factor above 0, got {value}; 1 is no change")
        for key in ("accumulation", "micro_batches", "bucket_bytes"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise ConfigError(f"{key}: expected 1 or more, got {value}; raise it")
        if not 0 <= self.recompute_share <= 1:
            raise ConfigError(
                f"recompute_share: expected 0 to 1, got {self.recompute_share}; 0 is no change"
            )

    @property
    def activation_share(self) -> float:
        """Share of activations that is kept at a time."""
        return (1 - self.recompute_share) / self.micro_batches


@dataclass(frozen=True, kw_only=True)
class JobForecast:
    """A predicted step.

    Attributes:
        step_s: seconds a step, or a micro-batch with accumulation.
        timeline: the replay of all steps.
        graph: what was replayed.
        note: what the trace left open, and how it was taken; empty if nothing.
    """

    step_s: float
    timeline: Timeline = field(repr=False)
    graph: JobGraph = field(repr=False)
    note: str = ""

    @cached_property
    def critical_s(self) -> dict[tuple[int | None, str], float]:
        """Seconds a step on the critical path, by rank and operator, or None and collective."""
        seconds: dict[tuple[int | None, str], float] = defaultdict(float)
        for step in self.timeline.critical_path:
            label = self.graph.labels[step.name]
            seconds[label] += (step.end_s - step.start_s) / self.graph.step_ends.shape[1]
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


class TracedJob:
    """A traced job, ready to be replayed under changes.

    Args:
        lanes: operators by rank.
        collectives: on the common clock, in the order in which they take the link.

    Attributes:
        lanes: as given.
        exchanges: collectives as replayed.
    """

    def __init__(
        self, lanes: Sequence[Sequence[LanePiece]], collectives: Sequence[MatchedCollective]
    ) -> None:
        self.lanes = lanes
        self.exchanges = [
            GraphCollective(c.kind, c.step, c.num_bytes, seconds, c.enqueued_s)
            for c, seconds in zip(collectives, share_link(collectives), strict=True)
        ]
        self._graphs: dict[int | None, JobGraph] = {}

    @cached_property
    def measured_step_s(self) -> float:
        """Seconds a step as traced, from the first step's end to the last one's."""
        graph = self._build(None)
        begin_s = min(lane[0].start_s - lane[0].gap_s for lane in self.lanes)
        return _average_step_s(graph, np.array([p.end_s for p in graph.pieces]) - begin_s)

    @cached_property
    def link(self) -> Link:
        """The links' latency and rate, fitted to the means of all-reduces of equal size.

        One size tells no latency: it counts as rate. Without sizes nothing is told of the links.
        """
        means = self._means_s
        if len(means) > 1:
            return fit_link(list(means.items()), is_quiet=True).link
        size, seconds = next(iter(means.items()), (1, 0.0))
        return Link(alpha_s=0.0, beta_s_per_byte=seconds / size)

    @cached_property
    def _means_s(self) -> dict[int, float]:
        """Mean seconds of all-reduces by their bytes."""
        seconds: dict[int, list[float]] = defaultdict(list)
        for exchange in self.exchanges:
            if exchange.kind == "allreduce" and exchange.num_bytes:
                seconds[exchange.num_bytes].append(exchange.seconds)
        return {size: float(np.mean(times)) for size, times in seconds.items()}

    def predict(self, change: JobChange | None = None) -> JobForecast:
        """Replays the job under a change.

        Args:
            change: what differs from the traced run; nothing if None.

        Raises:
            ConfigError: it names a rank or operator that the job lacks.
            DataError: other buckets are asked for, but the trace lacks shapes or sizes.
        """
        change = change or JobChange()
        self._check(change)
        graph = self._build(change.bucket_bytes)
        durations_s = self._durations(graph, change)
        timeline = graph.replay.run(durations_s)
        step_s = _average_step_s(graph, timeline.end_s)
        if change.accumulation > 1:
            # Steps without an all-reduce run on; the last of each round waits as before.
            busy_s = np.bincount(graph.ranks, durations_s[: len(graph.pieces)])
            free_s = busy_s.max() / graph.step_ends.shape[1]
            step_s = ((change.accumulation - 1) * free_s + step_s) / change.accumulation
        needs_link = change.bucket_bytes or change.link_speed != 1 or change.gradient_share != 1
        note = ""
        if needs_link and len(self._means_s) == 1:
            note = "all all-reduces have one size, so that the link's latency counts as rate"
        return JobForecast(step_s=float(step_s), timeline=timeline, graph=graph, note=note)

    def _check(self, change: JobChange) -> None:
        for rank in [*change.rank_speed, *(rank for rank, _ in change.operator_speed)]:
            if rank is not None and not 0 <= rank < len(self.lanes):
                raise ConfigError(
                    f"expected a rank from 0 to {len(self.lanes) - 1}, got {rank}; name one of "
                    "these"
                )
        known = {piece.name for lane in self.lanes for piece in lane}
        for _, name in change.operator_speed:
            if name not in known:
                raise ConfigError(
                    f"expected an operator of the trace, got {name!r}; choose one of "
                    f"{', '.join(sorted(known))}"
                )

    def _build(self, bucket_bytes: int | None) -> JobGraph:
        if bucket_bytes not in self._graphs:
            lanes, exchanges = self.lanes, self.exchanges
            if bucket_bytes is not None:
                lanes, exchanges = rebucket(lanes, exchanges, self.link, bucket_bytes)
            self._graphs[bucket_bytes] = JobGraph.build(lanes, exchanges)
        return self._graphs[bucket_bytes]

    def _durations(self, graph: JobGraph, change: JobChange) -> np.ndarray:
        gap_s, busy_s = graph.gap_s.copy(), graph.busy_s.copy()
        for (rank, name), speed in change.operator_speed.items():
            chosen = graph.names == name
            busy_s[chosen if rank is None else chosen & (graph.ranks == rank)] /= speed
        for rank, speed in change.rank_speed.items():
            gap_s[graph.ranks == rank] /= speed
            busy_s[graph.ranks == rank] /= speed
        if change.micro_batches > 1 or change.recompute_share:
            _repeat(graph, gap_s, busy_s, change)
        seconds = np.array([exchange.seconds for exchange in graph.exchanges])
        alpha_s = np.minimum(seconds, self.link.alpha_s)
        is_sum = np.array([exchange.kind == "allreduce" for exchange in graph.exchanges])
        share = np.where(is_sum, float(change.gradient_share), 1.0) / float(change.link_speed)
        return np.concatenate([gap_s + busy_s, alpha_s + (seconds - alpha_s) * share])


def _repeat(graph: JobGraph, gap_s: np.ndarray, busy_s: np.ndarray, change: JobChange) -> None:
    """Changes own seconds where batches are cut, or parts of the forward pass run twice."""
    backward = np.array([is_backward(piece.name) for piece in graph.pieces])
    parts, ends = change.micro_batches, graph.step_ends.ravel() + 1
    for mine in np.split(np.arange(ends[-1]), ends[:-1]):
        back = mine[backward[mine]]
        ahead = mine[(np.cumsum(backward[mine]) == 0) & (graph.names[mine] != LOADER)]
        if not (len(back) and len(ahead)):
            continue
        ahead_s, back_s = busy_s[ahead].sum(), busy_s[back].sum()
        launch_s = gap_s[ahead].sum() + gap_s[back].sum()
        # All micro-batches but the last run before any gradient is ready.
        busy_s[back] /= parts
        busy_s[back[0]] += change.recompute_share * ahead_s
        busy_s[ahead[-1]] += (1 - 1 / parts) * back_s + (parts - 1) * launch_s


def _average_step_s(graph: JobGraph, end_s: np.ndarray) -> float:
    """Seconds a step, from the first step's end to the last one's, by ends of operations."""
    ends_s = end_s[graph.step_ends]
    if ends_s.shape[1] == 1:
        return float(end_s.max())
    return float(np.mean(ends_s[:, -1] - ends_s[:, 0])) / (ends_s.shape[1] - 1)
