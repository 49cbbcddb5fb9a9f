"""Planning as a mixed-integer linear program, solved by HiGHS through scipy.

After LLM-PQ (arXiv 2403.01136): a variable for each layer, device and width, and times that no
stage exceeds. Two departures. A prefix of layers on the devices before j is a step function of the
layer, which makes stages contiguous with one binary a layer and device. And where layers differ in
their noise alone, dropping contiguity leaves whole numbers of layers by device and width ("counts"):
a far smaller program whose optimum bounds all orders of the devices at once.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmpq.planner.problem import Problem

__all__ = ["MilpResult", "prints_to_stderr", "solve_counts", "solve_layers"]

# HiGHS stops at an absolute gap of 1e-6, which scipy does not expose: scaling the objective up
# lowers that gap.
_SCALE = 1e3
_NUM_ROUNDS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class MilpResult:
    """What HiGHS found.

    Attributes:
        held: share of each layer on each device at each width [layer, device, width], or layers by
            device and width [device, width]; None if nothing was found.
        lower_bound: proven lower bound of the objective, infinite if nothing is feasible.
    """

    held: np.ndarray | None
    lower_bound: float


class _Program:
    """Columns and rows of a program under construction, times in units of `unit_s`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cost: list[np.ndarray] = []
        self.upper: list[np.ndarray] = []
        self.is_whole: list[np.ndarray] = []
        self.num_columns = 0
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.limits: list[tuple[np.ndarray, np.ndarray]] = []
        self.num_rows = 0
        steps = problem.new_tokens - 1
        self.unit_s = float(
            problem.prefill_s.min(axis=(1, 2)).sum()
            + steps * problem.decode_s.min(axis=(1, 2)).sum()
        )
        self.unit_s = self.unit_s or 1.0

    def columns(
        self, *shape: int, cost: float = 0.0, upper: float = np.inf, whole: bool = False
    ) -> np.ndarray:
        """Adds columns; returns their numbers in the shape asked for."""
        size = int(np.prod(shape, dtype=int))
        self.cost.append(np.full(size, cost))
        self.upper.append(np.full(size, upper))
        self.is_whole.append(np.full(size, whole))
        self.num_columns += size
        return np.arange(self.num_columns - size, self.num_columns).reshape(shape)

    def price(self, columns: np.ndarray, cost: np.ndarray | float) -> None:
        """Adds to the cost of columns."""
        whole = np.concatenate(self.cost)
        np.add.at(whole, columns.ravel(), np.broadcast_to(cost, columns.shape).ravel())
        self.cost = [whole]

    def rows(
        self,
        *terms: tuple[np.ndarray, np.ndarray | float],
        low: np.ndarray | float = -np.inf,
        high: np.ndarray | float = np.inf,
    ) -> None:
        """Adds rows low <= sum of the terms <= high; a term's first axis counts the rows."""
        count = terms[0][0].shape[0]
        for columns, factors in terms:
            flat = columns.reshape(count, -1)
            values = np.broadcast_to(factors, columns.shape).reshape(count, -1)
            row = np.repeat(np.arange(count) + self.num_rows, flat.shape[1])
            self.entries.append((row, flat.ravel(), values.ravel()))
        self.limits.append(
            (np.broadcast_to(low, count).astype(float), np.broadcast_to(high, count).astype(float))
        )
        self.num_rows += count

    def run(
        self,
        time_limit_s: float,
        gap: float = 0.0,
        *,
        relaxed: bool = False,
        aim: np.ndarray | None = None,
    ) -> Any:
        """Solves the program, or its relaxation to fractions; `aim` replaces the cost."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        row, column, value = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        matrix = coo_array((value, (row, column)), shape=(self.num_rows, self.num_columns)).tocsc()
        low, high = (np.concatenate(part) for part in zip(*self.limits, strict=True))
        whole = np.concatenate(self.is_whole) & (not relaxed)
        with prints_to_stderr():
            return milp(
                _SCALE * np.concatenate(self.cost) if aim is None else aim,
                integrality=whole.astype(int),
                bounds=Bounds(0.0, np.concatenate(self.upper)),
                constraints=LinearConstraint(matrix, low, high),
                options={"time_limit": max(time_limit_s, 0.01), "mip_rel_gap": gap},
            )

    def result(self, solved: Any, held: np.ndarray) -> MilpResult:
        """Reads HiGHS's answer; status 2 is an infeasible program."""
        bound = solved.get("mip_dual_bound")
        if bound is None and solved.status == 0:
            bound = solved.fun
        if solved.status == 2:
            bound = np.inf
        elif bound is None or not np.isfinite(bound):
            bound = 0.0
        return MilpResult(
            held=None if solved.x is None else solved.x[held],
            lower_bound=float(bound) / _SCALE * self.unit_s,
        )

    def add_times(
        self, held: np.ndarray, first: np.ndarray | None, arcs: np.ndarray | None
    ) -> None:
        """Adds times, memory and their costs.

        Args:
            held: columns of a unit of layer [device, ..., width]; axis 1 the layer if there.
            first: columns that are one where a device is the first stage [device], or None.
            arcs: columns of messages [sender, receiver] or None.
        """
        problem, unit_s, devices = self.problem, self.unit_s, self.problem.num_devices
        prefill, decode, held_bytes = (
            np.moveaxis(problem.prefill_s, 1, 0),
            np.moveaxis(problem.decode_s, 1, 0),
            np.broadcast_to(problem.layer_bytes, (devices, *problem.layer_bytes.shape)),
        )
        if held.ndim == 2:
            prefill, decode, held_bytes = prefill[:, 0], decode[:, 0], held_bytes[:, 0]
        held, prefill, decode, held_bytes = (
            array.reshape(devices, -1) for array in (held, prefill, decode, held_bytes)
        )
        steps = problem.new_tokens - 1
        each_lap = 1.0 if problem.formula == "paper" else 0.0
        to_fill = problem.num_prefill - 1
        to_pace = steps * (problem.num_decode - (problem.formula == "paper"))
        self.price(held, (prefill + each_lap * decode) / unit_s)
        fill, pace = self.columns(1, cost=1.0), self.columns(1, cost=1.0)
        every_fill, every_pace = np.repeat(fill, devices), np.repeat(pace, devices)
        ends_prefill, ends_decode = problem.ends_prefill_s, problem.ends_decode_s
        none = np.zeros((devices, 0), dtype=int)
        at_first = none if first is None else first.reshape(devices, 1)
        if first is not None:
            self.price(first, (ends_prefill + each_lap * ends_decode) / unit_s)
        spread = slice(None), None
        for every, share, times, ends in (
            (every_fill, to_fill / unit_s, prefill, ends_prefill),
            (every_pace, to_pace / unit_s, decode, ends_decode),
        ):
            extra = 0.0 if first is None else share * ends[spread]
            self.rows((held, share * times), (at_first, extra), (every[spread], -1.0), high=0.0)
        if problem.formula == "ring" and steps:
            terms = [(held.reshape(1, -1), steps / unit_s * decode.reshape(1, -1))]
            if first is not None:
                terms.append((first.reshape(1, -1), steps / unit_s * ends_decode[None]))
            if arcs is not None:
                terms.append(
                    (arcs.reshape(1, -1), steps / unit_s * problem.decode_send_s.reshape(1, -1))
                )
            self.rows(*terms, (pace[:, None], -1.0), high=0.0)
        if arcs is not None:
            sends = problem.prefill_send_s + each_lap * problem.decode_send_s
            self.price(arcs, sends / unit_s)
            count = arcs.size
            for column, share, seconds in (
                (fill, to_fill, problem.prefill_send_s),
                (pace, to_pace, problem.decode_send_s),
            ):
                slowest = share / unit_s * seconds.reshape(count, 1)
                self.rows(
                    (arcs.reshape(count, 1), slowest),
                    (np.repeat(column, count)[spread], -1.0),
                    high=0.0,
                )
        limited = np.flatnonzero(np.isfinite(problem.memory_bytes))
        if limited.size:
            room = np.maximum(problem.memory_bytes[limited, None], 1.0)
            extra = 0.0 if first is None else problem.ends_bytes / room
            high = (problem.memory_bytes[limited, None] / room).ravel()
            self.rows(
                (held[limited], held_bytes[limited] / room), (at_first[limited], extra), high=high
            )

    def add_noise(self, chosen: np.ndarray, noise: np.ndarray) -> None:
        """Adds the limit of noise and its cost, for columns [layer, ...] of a layer's width."""
        problem = self.problem
        if problem.theta:
            self.price(chosen, problem.theta * noise / self.unit_s)
        if problem.max_noise is not None:
            unit = max(problem.max_noise, float(noise.mean()) * 1e-3, 1e-300)
            each = np.broadcast_to(noise / unit, chosen.shape)
            self.rows((chosen.reshape(1, -1), each.reshape(1, -1)), high=problem.max_noise / unit)

    def add_route(self, used: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Adds messages between consecutive used devices, and from the last to the first."""
        devices = self.problem.num_devices
        arcs = self.columns(devices, devices, upper=1.0)
        for j in range(devices):
            one = np.array([[j]])
            self.rows(
                (arcs[None, :j, j], 1.0), (first[one], 1.0), (used[one], -1.0), low=0.0, high=0.0
            )
            self.rows(
                (arcs[None, j, j + 1 :], 1.0),
                (last[one], 1.0),
                (used[one], -1.0),
                low=0.0,
                high=0.0,
            )
            for k in range(j):
                back = np.array([[k]])
                self.rows((arcs[one, back], 1.0), (last[one], -1.0), (first[back], -1.0), low=-1.0)
        return arcs


class _StdoutSwitch:
    """Whether this process's stdout goes to stderr; how many solvers ask for it."""

    lock = threading.Lock()
    num_solvers = 0
    stdout = -1


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Sends to stderr what HiGHS prints now and then, whatever its options: stdout may be a record."""
    with _StdoutSwitch.lock:
        _StdoutSwitch.num_solvers += 1
        if _StdoutSwitch.num_solvers == 1:
            sys.stdout.flush()
            _StdoutSwitch.stdout = os.dup(1)
            os.dup2(2, 1)
    try:
        yield
    finally:
        with _StdoutSwitch.lock:
            _StdoutSwitch.num_solvers -= 1
            if not _StdoutSwitch.num_solvers:
                ctypes.CDLL(None).fflush(None)  # C keeps what it printed to a pipe
                os.dup2(_StdoutSwitch.stdout, 1)
                os.close(_StdoutSwitch.stdout)


def solve_counts(
    problem: Problem, *, gap: float = 0.0, time_limit_s: float = 20.0, relaxed: bool = False
) -> MilpResult:
    """Bounds a problem with equal layers: whole numbers of layers, contiguity dropped.

    Sends are left out too, and the first stage is the device where embedding and head cost least,
    so that the bound holds for every order of the devices.
    """
    program = _Program(problem)
    layers, devices, widths = problem.num_layers, problem.num_devices, problem.num_widths
    counts = program.columns(devices, widths, upper=layers, whole=True)
    chosen = program.columns(layers, widths, upper=1.0)
    program.rows((chosen, 1.0), low=1.0, high=1.0)
    program.rows((counts.T, 1.0), (chosen.T, -1.0), low=0.0, high=0.0)
    first = None
    if problem.has_ends:
        first = program.columns(devices, upper=1.0, whole=True)
        program.rows((first[None], 1.0), low=1.0, high=1.0)
    program.add_times(counts, first, None)
    program.add_noise(chosen, problem.noise)
    return program.result(program.run(time_limit_s, gap, relaxed=relaxed), counts)


def solve_layers(
    problem: Problem,
    *,
    gap: float = 0.0,
    time_limit_s: float = 20.0,
    relaxed: bool = False,
    cutoff: float = np.inf,
) -> MilpResult:
    """Solves a problem exactly, or its linear relaxation.

    Args:
        problem: what to solve.
        gap: between solution and bound, at which HiGHS may stop.
        time_limit_s: seconds that it may take.
        relaxed: whether layers and stages may be split.
        cutoff: only objectives up to this are of interest: stages that cannot begin or end at a
            layer below it are ruled out first, and if nothing is left, this is the lower bound.
    """
    end = time.perf_counter() + time_limit_s
    ranges = None
    if np.isfinite(cutoff) and problem.num_devices > 1:
        ranges = _tighten(problem, cutoff, end)
        if ranges is None:
            return MilpResult(held=None, lower_bound=cutoff)
    program, held, _ = _layers_program(problem, ranges, cutoff)
    solved = program.run(end - time.perf_counter(), gap, relaxed=relaxed)
    result = program.result(solved, held)
    if result.lower_bound > cutoff:
        return MilpResult(held=result.held, lower_bound=cutoff)
    return result


def _tighten(problem: Problem, cutoff: float, end: float) -> np.ndarray | None:
    """Ranges of the bounds between stages [device - 1, 2] below a cutoff; None if there are none.

    Each bound is minimised and maximised over the linear relaxation. Where a layer's stage is
    settled, the relaxation can no longer split it, so that ranges shrink from round to round.
    """
    inner = problem.num_devices - 1
    ranges = np.repeat([[0, problem.num_layers]], inner, axis=0)
    for _ in range(_NUM_ROUNDS):
        before = ranges.copy()
        for j in range(inner):
            for side, sign in ((0, 1.0), (1, -1.0)):
                if time.perf_counter() > end or ranges[j, 0] == ranges[j, 1]:
                    continue
                program, _, ends = _layers_program(problem, ranges, cutoff)
                aim = np.zeros(program.num_columns)
                aim[ends[:, j]] = sign
                solved = program.run(end - time.perf_counter(), relaxed=True, aim=aim)
                if solved.status == 2:
                    return None
                if solved.status == 0:
                    # Ranges hold whole numbers: a bound at least 20.3 is at least 21.
                    least = np.ceil(solved.fun - 1e-5)
                    ranges[j, side] = (
                        max(ranges[j, 0], least) if side == 0 else min(ranges[j, 1], -least)
                    )
                    if ranges[j, 0] > ranges[j, 1]:
                        return None
        if (before == ranges).all():
            break
    return ranges


def _layers_program(
    problem: Problem, ranges: np.ndarray | None, cutoff: float
) -> tuple[_Program, np.ndarray, np.ndarray]:
    """The program, its columns [layer, device, width], and those before each bound."""
    program = _Program(problem)
    layers, devices, widths = problem.num_layers, problem.num_devices, problem.num_widths
    equal = problem.has_equal_layers
    upper = np.ones((devices, layers))
    number = np.arange(layers)
    for j, (low, high) in enumerate(() if ranges is None else ranges.tolist()):
        upper[j, number >= high] = 0.0
        upper[j + 1, number < low] = 0.0
    # Given the bounds and the counts, assigning layers to widths is a transport: whole of itself.
    held = program.columns(devices, layers, widths, whole=not equal)
    program.upper[-1] = np.repeat(upper.ravel(), widths)
    by_layer = np.moveaxis(held, 1, 0)
    program.rows((by_layer.reshape(layers, -1), 1.0), low=1.0, high=1.0)
    # before[i, j]: layer i lies on a device before j + 1; a step from 1 down to 0 over the layers.
    before = program.columns(layers, devices - 1, upper=1.0, whole=True)
    for j in range(devices - 1):
        program.rows((by_layer[:, : j + 1], 1.0), (before[:, j : j + 1], -1.0), low=0.0, high=0.0)
    if layers > 1 and devices > 1:
        later, earlier = before[1:].reshape(-1, 1), before[:-1].reshape(-1, 1)
        program.rows((earlier, 1.0), (later, -1.0), low=0.0)
    if equal:
        counts = program.columns(devices * widths, 1, upper=layers, whole=True)
        members = np.swapaxes(held, 1, 2).reshape(devices * widths, layers)
        program.rows((members, 1.0), (counts, -1.0), low=0.0, high=0.0)
    first = arcs = None
    if problem.has_ends or problem.has_sends:
        first, last = program.columns(devices, upper=1.0), program.columns(devices, upper=1.0)
        program.rows((held[:, 0], 1.0), (first[:, None], -1.0), low=0.0, high=0.0)
        program.rows((held[:, -1], 1.0), (last[:, None], -1.0), low=0.0, high=0.0)
        if problem.has_sends:
            used = program.columns(devices, upper=1.0, whole=True)
            every = held.reshape(devices * layers, widths)
            program.rows((every, 1.0), (np.repeat(used, layers)[:, None], -1.0), high=0.0)
            program.rows((held.reshape(devices, -1), 1.0), (used[:, None], -1.0), low=0.0)
            arcs = program.add_route(used, first, last)
    program.add_times(held, first, arcs)
    program.add_noise(by_layer, problem.noise[:, None])
    if np.isfinite(cutoff):
        cost = np.concatenate(program.cost)
        priced = np.flatnonzero(cost)
        program.rows((priced[None], cost[priced][None]), high=cutoff / program.unit_s)
    return program, by_layer, before
