"""A fast planner: the rounded counts of a linear program, improved by moves of layers and widths.

LLM-PQ (arXiv 2403.01136) trades widths between its slowest stage and another in fixed ratios. Here
a move hands one layer from any stage to any other (the stages between pass one on) or changes its
width, and two moves may be made at once, such as one that saves time with one that pays the noise
back. A maximum over stages gives no direction while several are equally slow, so the search first
follows a norm that counts all of them, then the maximum itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from llmpq.planner.problem import Problem

__all__ = ["assign_counts", "improve", "round_counts"]

_PHASES = ((12.0, 1.0, 0.0), (12.0, 4.0, 0.02), (np.inf, 4.0, 0.02), (np.inf, 4.0, 10.0))
"""Norm over stages, then objectives charged for exceeding a limit once over, and for any excess."""
_NUM_PAIRED = 96
"""Moves of either sort that are tried in pairs."""
_NUM_CHECKED = 12
_MANY_DEVICES = 10
_MANY_MOVES = 600
"""Moves above which not every pair is tried."""


_Phase = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Placement:
    """Bounds and widths with their sums by device."""

    bounds: np.ndarray
    choice: np.ndarray
    prefill_s: np.ndarray
    decode_s: np.ndarray
    used_bytes: np.ndarray
    noise: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Moves:
    """What each move adds to a placement's sums: [move, device], and to its noise [move]."""

    prefill_s: np.ndarray
    decode_s: np.ndarray
    used_bytes: np.ndarray
    noise: np.ndarray
    steps: np.ndarray


def _hand_on(bounds: np.ndarray, giver: int, taker: int) -> np.ndarray:
    """Bounds after a layer has gone from one stage to another, all between passing one on."""
    bounds = bounds.copy()
    if giver < taker:
        bounds[giver + 1 : taker + 1] -= 1
    else:
        bounds[taker + 1 : giver + 1] += 1
    return bounds


class _CountMoves:
    """Moves where layers differ in noise alone: counts by device and width, best assigned.

    A step is (giver, width there, taker, width there); giver and taker may be the same.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[tuple[int, ...], tuple[float, np.ndarray]] = {}
        devices, widths = problem.num_devices, problem.num_widths
        every = np.indices((devices, widths, devices, widths)).reshape(4, -1).T
        moving = (every[:, 0] != every[:, 2]) | (every[:, 1] != every[:, 3])
        self.every = every[moving]

    def assign(self, low: int, high: int, counts: tuple[int, ...]) -> tuple[float, np.ndarray]:
        """Least noise of the layers low to high with `counts` layers of each width, and how."""
        from scipy.optimize import linear_sum_assignment

        key = (low, high, *counts)
        if key not in self.known:
            widths = np.repeat(np.arange(len(counts)), counts)
            noise = self.problem.noise[low:high][:, widths]
            row, column = linear_sum_assignment(noise)
            self.known[key] = float(noise[row, column].sum()), widths[column]
        return self.known[key]

    def counts(self, bounds: np.ndarray, choice: np.ndarray) -> np.ndarray:
        """Layers by device and width."""
        problem = self.problem
        device = np.repeat(np.arange(problem.num_devices), np.diff(bounds))
        flat = np.bincount(
            device * problem.num_widths + choice, minlength=problem.num_devices * problem.num_widths
        )
        return flat.reshape(problem.num_devices, problem.num_widths)

    def moves(self, at: _Placement) -> _Moves:
        problem, bounds = self.problem, at.bounds
        counts = self.counts(bounds, at.choice)
        devices = problem.num_devices
        steps = self.every[counts[self.every[:, 0], self.every[:, 1]] > 0]
        if devices > _MANY_DEVICES:
            slow = np.isin(steps[:, 0], (at.prefill_s.argmax(), at.decode_s.argmax()))
            steps = steps[slow | (abs(steps[:, 0] - steps[:, 2]) <= 1)]
        giver, lost, taker, gained = steps.T
        rows = np.arange(len(steps))
        sums = []
        held = np.broadcast_to(problem.layer_bytes[0], (devices, problem.num_widths))
        for cost in (problem.prefill_s[0], problem.decode_s[0], held):
            delta = np.zeros((len(steps), devices))
            delta[rows, giver] -= cost[giver, lost]
            delta[rows, taker] += cost[taker, gained]
            sums.append(delta)
        return _Moves(
            prefill_s=sums[0],
            decode_s=sums[1],
            used_bytes=sums[2],
            noise=self._noise(at, counts, steps),
            steps=steps,
        )

    def _noise(self, at: _Placement, counts: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Noise that each step adds: a stage's depends on its own counts and how it shifts."""
        bounds, devices = at.bounds, self.problem.num_devices
        now, left, right = np.zeros((3, devices))
        for j in range(devices):
            low, high = int(bounds[j]), int(bounds[j + 1])
            held = tuple(counts[j].tolist())
            now[j] = self.assign(low, high, held)[0]
            # Stages between giver and taker move by one layer; the ends of the range never do.
            if high > low > 0:
                left[j] = self.assign(low - 1, high - 1, held)[0] - now[j]
            if high > low and high < self.problem.num_layers:
                right[j] = self.assign(low + 1, high + 1, held)[0] - now[j]
        to_left, to_right = (np.concatenate(([0.0], np.cumsum(part))) for part in (left, right))
        change: dict[tuple[int, ...], float] = {}
        noise = np.empty(len(steps))
        for number, (giver, lost, taker, gained) in enumerate(steps.tolist()):
            if giver == taker:
                noise[number] = (
                    self._changed(change, bounds, counts, giver, 0, lost, gained) - now[giver]
                )
                continue
            side = 1 if taker > giver else -1
            between = (
                to_left[taker] - to_left[giver + 1]
                if side > 0
                else to_right[giver] - to_right[taker + 1]
            )
            noise[number] = (
                self._changed(change, bounds, counts, giver, side, lost, -1)
                + self._changed(change, bounds, counts, taker, -side, -1, gained)
                - now[giver]
                - now[taker]
                + between
            )
        return noise

    def _changed(
        self,
        known: dict[tuple[int, ...], float],
        bounds: np.ndarray,
        counts: np.ndarray,
        device: int,
        side: int,
        lost: int,
        gained: int,
    ) -> float:
        """Noise of a stage that loses a layer at its upper end (1) or lower end, or gains one."""
        key = device, side, lost, gained
        if key not in known:
            held = counts[device].tolist()
            low, high = int(bounds[device]), int(bounds[device + 1])
            if lost >= 0:
                held[lost] -= 1
            if gained >= 0:
                held[gained] += 1
            if lost < 0 or gained < 0:
                grow = 1 if lost < 0 else -1
                if side > 0:
                    high += grow
                else:
                    low -= grow
            known[key] = self.assign(low, high, tuple(held))[0]
        return known[key]

    def make(
        self, step: np.ndarray, bounds: np.ndarray, choice: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        giver, lost, taker, gained = step.tolist()
        counts = self.counts(bounds, choice)
        if not counts[giver, lost]:
            return None
        counts[giver, lost] -= 1
        counts[taker, gained] += 1
        if giver != taker:
            bounds = _hand_on(bounds, giver, taker)
        choice = choice.copy()
        for j in range(min(giver, taker), max(giver, taker) + 1):
            low, high = int(bounds[j]), int(bounds[j + 1])
            choice[low:high] = self.assign(low, high, tuple(counts[j].tolist()))[1]
        return bounds, choice


class _LayerMoves:
    """Moves where layers differ in time or size too.

    A step is (layer, width, -1) to change a width, or (giver, width, taker) to hand a layer on.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def moves(self, at: _Placement) -> _Moves:
        problem, bounds, choice = self.problem, at.bounds, at.choice
        device = np.repeat(np.arange(problem.num_devices), np.diff(bounds))
        layers, widths = np.divmod(np.arange(problem.noise.size), problem.num_widths)
        keep = widths != choice[layers]
        layers, widths = layers[keep], widths[keep]
        own, rows = device[layers], np.arange(layers.size)
        before = choice[layers]
        held = np.repeat(problem.layer_bytes[:, None], problem.num_devices, axis=1)
        parts = []
        for cost in (problem.prefill_s, problem.decode_s, held):
            delta = np.zeros((layers.size, problem.num_devices))
            delta[rows, own] = cost[layers, own, widths] - cost[layers, own, before]
            parts.append([delta])
        noises = [problem.noise[layers, widths] - problem.noise[layers, before]]
        steps = [np.stack((layers, widths, np.full(layers.size, -1)), axis=1)]
        for giver, taker in self._hands(at):
            for width in range(problem.num_widths):
                step = np.array([giver, width, taker])
                made = self.make(step, bounds, choice)
                assert made is not None, "only stages with layers give one"
                prefill_s, decode_s = problem.stage_s(*made)
                parts[0].append((prefill_s - at.prefill_s)[None])
                parts[1].append((decode_s - at.decode_s)[None])
                parts[2].append((problem.used_bytes(*made) - at.used_bytes)[None])
                noises.append(np.array([problem.total_noise(made[1]) - at.noise]))
                steps.append(step[None])
        prefill_s, decode_s, used_bytes = (np.concatenate(part) for part in parts)
        return _Moves(
            prefill_s=prefill_s,
            decode_s=decode_s,
            used_bytes=used_bytes,
            noise=np.concatenate(noises),
            steps=np.concatenate(steps),
        )

    def _hands(self, at: _Placement) -> list[tuple[int, int]]:
        devices = range(self.problem.num_devices)
        slow = {int(at.prefill_s.argmax()), int(at.decode_s.argmax())}
        return [
            (giver, taker)
            for giver in devices
            for taker in devices
            if giver != taker
            and at.bounds[giver + 1] > at.bounds[giver]
            and (len(devices) <= _MANY_DEVICES or abs(giver - taker) == 1 or giver in slow)
        ]

    def make(
        self, step: np.ndarray, bounds: np.ndarray, choice: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        giver, width, taker = step.tolist()
        choice = choice.copy()
        if taker < 0:
            choice[giver] = width
            return bounds, choice
        if bounds[giver + 1] == bounds[giver]:
            return None
        # Stages between keep their widths, which move by one layer against their bounds.
        if giver < taker:
            low, high = bounds[giver + 1] - 1, bounds[taker]
            choice[low : high - 1] = choice[low + 1 : high]
            choice[high - 1] = width
        else:
            low, high = bounds[taker + 1], bounds[giver] + 1
            choice[low + 1 : high] = choice[low : high - 1]
            choice[low] = width
        return _hand_on(bounds, giver, taker), choice


class _Search:
    """Scores placements by a norm over stages and by what they exceed; steps to better ones."""

    def __init__(
        self, problem: Problem, neighbourhood: _CountMoves | _LayerMoves, phase: _Phase, unit: float
    ) -> None:
        self.problem = problem
        self.neighbourhood = neighbourhood
        self.norm, self.per_excess, self.any_excess = phase
        self.unit = unit
        self.noise_unit = max(float(problem.noise.mean()) * 1e-3, problem.max_noise or 0.0, 1e-300)

    def place(self, bounds: np.ndarray, choice: np.ndarray) -> _Placement:
        """Sums a placement up."""
        prefill_s, decode_s = self.problem.stage_s(bounds, choice)
        return _Placement(
            bounds=bounds,
            choice=choice,
            prefill_s=prefill_s,
            decode_s=decode_s,
            used_bytes=self.problem.used_bytes(bounds, choice),
            noise=self.problem.total_noise(choice),
        )

    def step(self, at: _Placement, pairs: bool) -> _Placement | None:
        """The best placement one move away, or two if no single one helps; None if none does."""
        moves = self.neighbourhood.moves(at)
        if not len(moves.steps):
            return None
        after = self._after(at, moves, np.arange(len(moves.steps)))
        scores = self._score(at.bounds, *after)
        every = np.arange(len(moves.steps))[:, None]
        better = self._first_better(at, scores, every, moves)
        if better is not None or not pairs:
            return better
        better = self._step_twice(at, moves, *self._pair_up(at, moves, after))
        if better is None and np.isinf(self.norm) and len(moves.steps) <= _MANY_MOVES:
            better = self._step_twice(at, moves, every[:, 0], every[:, 0])
        return better

    def _step_twice(
        self, at: _Placement, moves: _Moves, one: np.ndarray, other: np.ndarray
    ) -> _Placement | None:
        one, other = (part.ravel() for part in np.meshgrid(one, other, indexing="ij"))
        ordered = one < other if one.size == len(moves.steps) ** 2 else one != other
        one, other = one[ordered], other[ordered]
        first = self._after(at, moves, one)
        both = [
            sums + getattr(moves, key)[other]
            for sums, key in zip(
                first, ("prefill_s", "decode_s", "used_bytes", "noise"), strict=True
            )
        ]
        partners = np.stack((one, other), axis=1)
        return self._first_better(at, self._score(at.bounds, *both), partners, moves)

    def _after(self, at: _Placement, moves: _Moves, which: np.ndarray) -> list[np.ndarray]:
        return [
            at.prefill_s + moves.prefill_s[which],
            at.decode_s + moves.decode_s[which],
            at.used_bytes + moves.used_bytes[which],
            at.noise + moves.noise[which],
        ]

    def _pair_up(
        self, at: _Placement, moves: _Moves, after: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Moves that save time, and moves that pay noise or memory back for little time."""
        free = self._score(at.bounds, after[0], after[1], 0 * after[2], 0 * after[3])
        savers = np.argsort(free, kind="stable")[:_NUM_PAIRED]
        cost = free - free.min() + 1e-3 * self.unit
        gain = np.maximum(-moves.noise, 0.0) / self.noise_unit
        lighter = np.maximum(-moves.used_bytes, 0.0).max(axis=1)
        gain += 0.1 * lighter / max(float(self.problem.layer_bytes.mean()), 1e-300)
        payers = np.argsort(-gain / cost, kind="stable")[:_NUM_PAIRED]
        return savers, np.unique(np.concatenate((payers, savers[: _NUM_PAIRED // 2])))

    def _first_better(
        self, at: _Placement, scores: np.ndarray, partners: np.ndarray, moves: _Moves
    ) -> _Placement | None:
        """Makes the most promising moves in turn until one really lowers the score."""
        enough = self.score_one(at) * (1 - 1e-9)
        count = min(_NUM_CHECKED, len(scores))
        best = np.argpartition(scores, count - 1)[:count]
        for number in best[np.argsort(scores[best], kind="stable")]:
            if scores[number] >= enough:
                return None
            made = at.bounds, at.choice
            for move in partners[number]:
                made = self.neighbourhood.make(moves.steps[move], *made)
                if made is None:
                    break
            if made is not None:
                placed = self.place(*made)
                if self.score_one(placed) < enough:
                    return placed
        return None

    def score_one(self, at: _Placement) -> float:
        return float(
            self._score(
                at.bounds,
                at.prefill_s[None],
                at.decode_s[None],
                at.used_bytes[None],
                np.array([at.noise]),
            )[0]
        )

    def _score(
        self,
        bounds: np.ndarray,
        prefill_s: np.ndarray,
        decode_s: np.ndarray,
        held: np.ndarray,
        noise: np.ndarray,
    ) -> np.ndarray:
        """Scores of placements [move, device], with the messages of the stages in `bounds`."""
        problem = self.problem
        used = np.flatnonzero(np.diff(bounds))
        following = np.roll(used, -1)
        prefill_send_s = problem.prefill_send_s[used, following]
        decode_send_s = problem.decode_send_s[used, following]
        steps = problem.new_tokens - 1
        prefill_pace = np.maximum(self._slowest(prefill_s), prefill_send_s.max())
        decode_pace = np.maximum(self._slowest(decode_s), decode_send_s.max())
        lap = decode_s.sum(axis=1) + decode_send_s.sum()
        total = prefill_s.sum(axis=1) + prefill_send_s.sum() + problem.theta * noise
        total = total + (problem.num_prefill - 1) * prefill_pace
        if problem.formula == "paper":
            total = total + lap + (problem.num_decode - 1) * steps * decode_pace
        else:
            total = total + steps * np.maximum(problem.num_decode * decode_pace, lap)
        room = np.maximum(problem.memory_bytes, 1.0)
        excess = (np.maximum(held - problem.memory_bytes * (1 + 1e-9), 0.0) / room).sum(axis=1)
        if problem.max_noise is not None:
            limit = problem.max_noise * (1 + 1e-9) + 1e-15
            excess = excess + np.maximum(noise - limit, 0.0) / self.noise_unit
        return total + self.unit * (self.per_excess * excess + self.any_excess * (excess > 0))

    def _slowest(self, seconds: np.ndarray) -> np.ndarray:
        # Sums of two moves' changes can be impossible, with less than nothing on a stage.
        seconds = np.maximum(seconds, 0.0)
        most = seconds.max(axis=1)
        if np.isinf(self.norm):
            return most
        ratio = seconds / np.maximum(most, 1e-300)[:, None]
        return most * (ratio**self.norm).sum(axis=1) ** (1 / self.norm)


def round_counts(problem: Problem, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounds and widths close to a program's layers by device and width [device, width].

    In each stage the layers that lose most by rounding get the largest widths.
    """
    layers, devices = problem.num_layers, problem.num_devices
    ends = np.rint(np.cumsum(counts.sum(axis=1)) / max(counts.sum(), 1e-12) * layers)
    bounds = np.concatenate(([0], ends.astype(int)))
    bounds[-1] = layers
    choice = np.zeros(layers, dtype=int)
    best_first = np.argsort(problem.noise.mean(axis=0), kind="stable")
    for j in range(devices):
        block = np.arange(bounds[j], bounds[j + 1])
        if not block.size:
            continue
        share = np.maximum(counts[j, best_first], 0.0)
        share = share / share.sum() if share.sum() > 0 else np.eye(share.size)[-1]
        cuts = np.rint(np.cumsum(share) * block.size).astype(int)
        cuts[-1] = block.size
        widths = best_first[np.searchsorted(cuts, np.arange(block.size), side="right")]
        sensitive = np.argsort(-problem.noise[block].max(axis=1), kind="stable")
        choice[block[sensitive]] = widths
    return bounds, choice


def assign_counts(problem: Problem, bounds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Widths of least noise with `counts` layers of each width in each stage [device, width]."""
    moves = _CountMoves(problem)
    return np.concatenate(
        [
            moves.assign(int(low), int(high), tuple(held))[1]
            for low, high, held in zip(bounds[:-1], bounds[1:], counts.tolist(), strict=True)
        ]
    ).astype(int)


def improve(
    problem: Problem, bounds: np.ndarray, choice: np.ndarray, *, until: float, pairs: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Improves a placement until no move helps, or until `time.perf_counter()` is `until`.

    What exceeds memory or quality is repaired on the way if moves can.
    """
    neighbourhood = _CountMoves(problem) if problem.has_equal_layers else _LayerMoves(problem)
    bounds, choice = np.array(bounds), np.array(choice)
    unit = problem.objective(bounds, choice) or 1.0
    exact = _Search(problem, neighbourhood, _PHASES[-1], unit)
    best = exact.place(bounds, choice)
    for phase in _PHASES:
        search = _Search(problem, neighbourhood, phase, unit)
        at = search.place(bounds, choice)
        while time.perf_counter() < until:
            better = search.step(at, pairs)
            if better is None:
                break
            at = better
        bounds, choice = at.bounds, at.choice
        # A phase may have led away from a start that was better.
        best = min(best, at, key=exact.score_one)
    return best.bounds, best.choice
