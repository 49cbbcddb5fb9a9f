"""Cost of a training step by the precision of each operator, updated where a precision changes.

After the cost mapper of QSync (arXiv 2407.02327): lowering an operator changes its kernels, the casts
of its inputs and weight, the casts of its consumers' inputs, and the casts of gradients on both sides.
Operators that follow their inputs change along with them. An int8 product leaves float32, since its
sums are dequantised, and takes and gives bf16 gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import fsum, isfinite

from qsync.planner.graph import Graph, Op
from qsync.precisions import HIGHEST, PRECISIONS, check_precision
from shared.errors import ConfigError, DataError

__all__ = ["OUTPUTS", "Casts", "CostMapper", "follow_inputs"]

OUTPUTS = {name: name for name in PRECISIONS} | {"int8": HIGHEST, "fp8": "bf16"}
"""Precision of an operator's output by the precision that it computes in."""

Casts = set[tuple[str, str, str]]
"""Casts of a step as (pass, from, to)."""


def follow_inputs(precisions: Iterable[str]) -> str:
    """Returns the precision of an operator that follows inputs of these precisions.

    Unlike inputs are promoted to float32, as torch promotes float16 with bfloat16.
    """
    distinct = {OUTPUTS[precision] for precision in precisions}
    return distinct.pop() if len(distinct) == 1 else HIGHEST


class CostMapper:
    """Seconds of each operator's forward and backward pass, casts included.

    All operators start in float32. A change costs time in proportion to the operators that it
    touches, not to the graph.

    Args:
        graph: operators.
        kernel_s: (op, precision) -> seconds of the operator's kernels; those of the forward pass
            alone if `backward_kernel_s` is given.
        cast_s: (source precision, target precision, elements) -> seconds of a cast.
        backward_kernel_s: (op, precision) -> seconds of the backward kernels; None if `kernel_s` has
            them.

    Attributes:
        graph: operators.
        forward_s, backward_s: by operator, seconds with casts; read only.

    Raises:
        DataError: a price is negative or not finite.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        kernel_s: Callable[[Op, str], float],
        cast_s: Callable[[str, str, int], float],
        backward_kernel_s: Callable[[Op, str], float] | None = None,
    ) -> None:
        self.graph = graph
        self._kernel_s, self._cast_s, self._backward_kernel_s = kernel_s, cast_s, backward_kernel_s
        self._precisions = [HIGHEST] * len(graph.ops)
        self._journal: list[list[tuple[int, str]]] = []
        self.forward_s = [self._price_forward(i) for i in range(len(graph.ops))]
        self.backward_s = [self._price_backward(i) for i in range(len(graph.ops))]

    @property
    def total_s(self) -> float:
        """Seconds of all operators; equal to the bit however the precisions were reached."""
        return fsum(self.forward_s) + fsum(self.backward_s)

    def precision(self, name: str) -> str:
        """Returns the precision that an operator computes in.

        Raises:
            DataError: the name is unknown.
        """
        return self._precisions[self.graph.position(name)]

    def set(self, name: str, precision: str) -> list[int]:
        """Changes the precision of a linear operator.

        Args:
            name: operator.
            precision: one of `PRECISIONS`.

        Returns:
            Positions of all operators whose costs were priced anew.

        Raises:
            ConfigError: the precision is unknown, or the operator is not linear.
            DataError: the operator is unknown, or a price is negative or not finite.
        """
        check_precision(precision)
        first = self.graph.position(name)
        op = self.graph.ops[first]
        if op.kind != "linear":
            raise ConfigError(
                f"operator {name!r}: expected a linear operator, got a {op.kind} one; set the "
                "operators that it reads"
            )
        changes: list[tuple[int, str]] = []
        if precision == self._precisions[first]:
            self._journal.append(changes)
            return []
        changes.append((first, self._precisions[first]))
        self._precisions[first] = precision
        # In the order of the graph, an operator is visited once, after all that it follows.
        pending = sorted(self.graph.consumers[first])
        while pending:
            i = heappop(pending)
            if (pending and pending[0] == i) or self.graph.ops[i].kind != "dependent":
                continue
            followed = follow_inputs(self._precisions[j] for j in self.graph.inputs[i])
            if followed != self._precisions[i]:
                changes.append((i, self._precisions[i]))
                self._precisions[i] = followed
                for j in self.graph.consumers[i]:
                    heappush(pending, j)
        try:
            touched = self._price(changes)
        except BaseException:
            self._restore(changes)
            raise
        self._journal.append(changes)
        return touched

    def undo(self) -> list[int]:
        """Takes back the latest `set` that was not taken back yet.

        Returns:
            Positions of all operators whose costs were priced anew.

        Raises:
            ConfigError: there is nothing to take back.
        """
        if not self._journal:
            raise ConfigError("undo: expected a change to take back, got none; call set first")
        changes = self._journal.pop()
        self._restore(changes)
        return self._price(changes)

    def casts(self) -> Casts:
        """Returns all casts of a step.

        Returns:
            (pass, from, to): "forward" from a producer to its consumer, "weight" with the operator
            named twice, "backward" from a consumer to its producer.
        """
        ops = self.graph.ops
        casts: Casts = set()
        for i, op in enumerate(ops):
            if self._casts_weight(i):
                casts.add(("weight", op.name, op.name))
            for j in self.graph.inputs[i]:
                if OUTPUTS[self._precisions[j]] != self._precisions[i]:
                    casts.add(("forward", ops[j].name, op.name))
                if self._gradient(i) != self._gradient(j):
                    casts.add(("backward", op.name, ops[j].name))
        return casts

    def _gradient(self, i: int) -> str:
        return PRECISIONS[self._precisions[i]].backward

    def _casts_weight(self, i: int) -> bool:
        return self.graph.ops[i].weight_numel > 0 and self._precisions[i] != HIGHEST

    def _restore(self, changes: list[tuple[int, str]]) -> None:
        for i, precision in changes:
            self._precisions[i] = precision

    def _price(self, changes: list[tuple[int, str]]) -> list[int]:
        """Prices the changed operators and their neighbours; leaves all as it was on an error."""
        changed = [i for i, _ in changes]
        forward, backward = set(changed), set(changed)
        for i in changed:
            forward.update(self.graph.consumers[i])
            backward.update(self.graph.inputs[i])
        forward_s = {i: self._price_forward(i) for i in forward}
        backward_s = {i: self._price_backward(i) for i in backward}
        for i, seconds in forward_s.items():
            self.forward_s[i] = seconds
        for i, seconds in backward_s.items():
            self.backward_s[i] = seconds
        return sorted(forward | backward)

    def _price_forward(self, i: int) -> float:
        """Seconds of an operator's forward kernel and of the casts of its inputs and weight."""
        op, precision = self.graph.ops[i], self._precisions[i]
        seconds = self._kernel_s(op, precision)
        for j in self.graph.inputs[i]:
            output = OUTPUTS[self._precisions[j]]
            if output != precision:
                seconds += self._cast_s(output, precision, self.graph.ops[j].numel)
        if self._casts_weight(i):
            seconds += self._cast_s(HIGHEST, precision, op.weight_numel)
        return _check_s(op, precision, seconds)

    def _price_backward(self, i: int) -> float:
        """Seconds of an operator's backward kernels and of the casts of gradients that reach it."""
        op, precision = self.graph.ops[i], self._precisions[i]
        kernel_s = self._backward_kernel_s
        seconds = 0.0 if kernel_s is None else kernel_s(op, precision)
        gradient = self._gradient(i)
        for j in self.graph.consumers[i]:
            if self._gradient(j) != gradient:
                seconds += self._cast_s(self._gradient(j), gradient, op.numel)
        return _check_s(op, precision, seconds)


def _check_s(op: Op, precision: str, seconds: float) -> float:
    if not (isfinite(seconds) and seconds >= 0):
        raise DataError(
            f"operator {op.name!r} in {precision}: expected finite seconds of 0 or more, got "
            f"{seconds}; measure its kernels and casts again"
        )
    return float(seconds)
