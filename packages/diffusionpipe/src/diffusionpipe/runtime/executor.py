"""Runs a rank's program: one step of passes, frozen jobs of the next batch, and their messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffusionpipe.job.layers import ESTIMATE, OUTPUT
from diffusionpipe.planner.traffic import PlannedMessage, Rows, join_ranges
from diffusionpipe.runtime.frozen_rows import FrozenRows
from diffusionpipe.runtime.instructions import (
    Instruction,
    Program,
    StageFlow,
    describe_action,
    scale_rows,
)
from diffusionpipe.runtime.links import Links
from diffusionpipe.runtime.records import StepRecorder
from diffusionpipe.runtime.shapes import check_shape
from shared.errors import MeshyardError

if TYPE_CHECKING:
    from diffusionpipe.runtime.stages import StageCompute
    from diffusionpipe.runtime.stages.sleeper import VirtualCompute

__all__ = ["Executor"]

_ESTIMATES = -1
"""In place of a backbone's number: values of the pass that predicts without gradients first."""
_STEPS_WEIGHED = 3
"""Most steps by which waits that were there may outnumber those that were not, or the reverse."""


class Executor:
    """One rank's run of a plan.

    Attributes:
        recorder: when it did what.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        stages: Sequence[StageFlow],
        links: Links,
        compute: StageCompute | VirtualCompute,
    ) -> None:
        """Takes a rank's programs.

        Args:
            programs: what to run, the plain step first.
            stages: all virtual stages.
            links: to other ranks.
            compute: computes the actions: by torch, or as a device that only takes time.
        """
        self.recorder = StepRecorder()
        self._programs, self._stages, self._links = list(programs), stages, links
        self._compute, self._shapes, self._batch_size = compute, links.shapes, links.batch_size
        readers = [
            instruction
            for instruction in programs[0].instructions
            if instruction.action.kind == "forward" and stages[instruction.action.stage].frozen
        ]
        self._names = {name for each in readers for name in stages[each.action.stage].frozen}
        self._needed = join_ranges(each.samples for each in readers)
        self._reads_estimates = ESTIMATE in self._names
        self._names.discard(ESTIMATE)
        self._program, self._number = self._programs[0], 0
        self._num_rows = 0
        self._num_next: int | None = None
        self._agree: Callable[[], None] | None = None
        self._frozen = self._ahead = FrozenRows()
        # By backbone (or _ESTIMATES), micro-batch and key: a value for each reader here that has not
        # run, and gradients that readers here have added up for the writer.
        self._values: dict[tuple[int, int, str], list[Tensor]] = {}
        self._gradients: dict[tuple[int, int, str], Tensor] = {}
        self._estimates: dict[int, Tensor] = {}
        # By program and position: steps in which frozen jobs found a wait, less those in which they did not.
        self._num_waits: Counter[tuple[int, int]] = Counter()

    def encode_ahead(self, num_next: int) -> None:
        """Encodes this rank's share of the first batch, which no step precedes.

        Args:
            num_next: rows of that batch.
        """
        self._begin(0, 0, num_next, None, lambda: None)
        self._open()
        for instruction in self._program.instructions:
            if instruction.action.kind == "encode":
                self._encode(instruction)
        self._links.finish()

    def run(
        self,
        num_rows: int,
        num_next: int | None,
        *,
        program: int = 0,
        agree: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs a step up to the update.

        Args:
            num_rows: of the batch, whose frozen outputs were encoded before.
            num_next: of the next batch; None behind the last.
            program: index of the program.
            agree: waits until all ranks are known to have the same next batch. It is called behind
                the first pass, or before the first wait for a message: so it hardly takes time.

        Raises:
            CommError: another rank died or the timeout passed; names the edge, and in a note this
                rank's action. Or what `agree` raises, and then nothing was sent.
        """
        self._begin(program, num_rows, num_next, num_rows, agree)
        late: list[Instruction] = []
        action, is_late, was_encode = self._program.instructions[0].action, False, False
        try:
            for index, instruction in enumerate(self._program.instructions):
                action = instruction.action
                if index or instruction.receives:
                    self._open()
                self._links.look_ahead(index)
                # Decided once for jobs in a row, before the first.
                is_encode = action.kind == "encode"
                is_late = is_encode and (is_late if was_encode else self._is_late(index))
                was_encode = is_encode
                if is_late:
                    late.append(instruction)
                else:
                    self._run(instruction, late)
            self._wait("messages to be sent", self._links.finish)
        except MeshyardError as error:
            step = self.recorder.current.step
            error.add_note(
                f"rank {self._program.rank} was at {describe_action(action)} in step {step}"
            )
            raise

    def _begin(
        self,
        program: int,
        num_rows: int,
        num_next: int | None,
        num_passing: int | None,
        agree: Callable[[], None] | None,
    ) -> None:
        self._program, self._number = self._programs[program], program
        self._num_rows, self._num_next, self._agree = num_rows, num_next, agree
        self._frozen, self._ahead = self._ahead, FrozenRows()
        for values in (self._values, self._gradients, self._estimates):
            values.clear()
        for message in self._links.begin(self._program, num_passing, num_next):
            self._ahead.expect(self._links.cut_ranges(message), self._links.receive(message))

    def _open(self) -> None:
        """Waits for the agreement, once, and lets messages go."""
        if self._agree is not None:
            self._wait("the same next batch", self._agree)
            self._agree = None
            self._links.open()

    def _wait(self, name: str, wait: Callable[[], None]) -> None:
        with self.recorder.time("wait", name=name):
            wait()

    def _run(self, instruction: Instruction, late: Sequence[Instruction]) -> None:
        kind = instruction.action.kind
        if kind == "encode":
            self._encode(instruction)
        elif kind in ("forward", "estimate"):
            self._forward(instruction, is_estimate=kind == "estimate")
        elif kind == "backward":
            self._backward(instruction)
            if instruction.is_final:
                # Also where a short batch left this rank no rows: its replicas wait for it.
                self._compute.flush(instruction.action.stage)
        elif kind == "step":
            self.recorder.current.num_late = len(late)
            for each in late:
                self._encode(each)

    def _is_late(self, index: int) -> bool:
        """Whether the wait that encode actions fill is over before they begin, unlike in most steps before.

        Where it always is, the plan fills beyond the wait because that delays nobody.
        """
        following = (
            each for each in self._program.instructions[index:] if each.action.kind != "encode"
        )
        receives = next(following).receives if self._num_next is not None else ()
        if not receives:
            return False
        is_over = all(self._links.has_arrived(message) for message in receives)
        job = self._number, index
        balance = self._num_waits[job]
        moved = balance - 1 if is_over else balance + 1
        self._num_waits[job] = min(max(moved, -_STEPS_WEIGHED), _STEPS_WEIGHED)
        return is_over and balance > 0

    def _encode(self, instruction: Instruction) -> None:
        if self._num_next is None:
            return
        rows = scale_rows(instruction.samples, self._batch_size, self._num_next)
        if rows[0] == rows[1]:
            return
        name = instruction.action.name
        with self.recorder.time("encode", name=name):
            outputs = self._compute.encode(name, rows)
        for key, value in outputs.items():
            shape = self._shapes.frozen[key]
            label = f"samples {rows[0]} to {rows[1] - 1} of the next batch: expected {key}"
            check_shape(label, value, shape.of(rows[1] - rows[0]), shape.dtype)
        for message in instruction.sends:
            self._send(message, rows, outputs)
        kept = {key: value for key, value in outputs.items() if key in self._names}
        for needed in self._needed if kept else ():
            first, stop = scale_rows(needed, self._batch_size, self._num_next)
            first, stop = max(first, rows[0]), min(stop, rows[1])
            if first < stop:
                cut = [(first - rows[0], stop - rows[0])]
                self._ahead.add((first, stop), {key: cut_rows(kept[key], cut) for key in kept})

    def _forward(self, instruction: Instruction, *, is_estimate: bool) -> None:
        action, rows = instruction.action, self._scale(instruction)
        if rows[0] == rows[1]:
            return
        flow, micro_batch = self._stages[action.stage], action.micro_batch
        space = _ESTIMATES if is_estimate else flow.backbone
        pieces: dict[str, list[Tensor]] = {}
        # Messages stand in the order of their senders, and so of their rows.
        for message in sorted(instruction.receives, key=lambda message: message.ranges):
            for key, tensor in self._take(message).items():
                pieces.setdefault(key, []).append(tensor)
        for key, parts in pieces.items():
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            self._keep(space, micro_batch, key, whole)
        if flow.is_prepared and not self._compute.is_prepared(micro_batch, is_estimate=is_estimate):
            self._prepare(action.stage, micro_batch, rows, is_estimate=is_estimate)
        values = {key: self._read(space, micro_batch, key) for key in flow.imports}
        run = self._compute.estimate if is_estimate else self._compute.forward
        with self.recorder.time(action.kind, action.stage, micro_batch):
            exports = run(action.stage, micro_batch, rows, values)
        for key, value in exports.items():
            self._keep(space, micro_batch, key, value)
        for message in instruction.sends:
            self._send(message, rows, exports)

    def _prepare(self, stage: int, micro_batch: int, rows: Rows, *, is_estimate: bool) -> None:
        with self.recorder.time("wait", stage, micro_batch, "frozen outputs"):
            frozen = self._frozen.read(self._names, rows)
        filled = self._shapes.fill_frozen(frozen, rows[1] - rows[0])
        if not is_estimate and micro_batch in self._estimates:
            filled[ESTIMATE] = self._estimates.pop(micro_batch)
        self._compute.prepare(micro_batch, rows, filled, is_estimate=is_estimate)

    def _backward(self, instruction: Instruction) -> None:
        action, rows = instruction.action, self._scale(instruction)
        if rows[0] == rows[1]:
            return
        flow, micro_batch = self._stages[action.stage], action.micro_batch
        for message in instruction.receives:
            for key, tensor in self._take(message).items():
                ((first, stop),) = self._links.cut_ranges(message)
                if (first, stop) != rows:
                    shape = self._shapes.values[flow.backbone][key]
                    whole = tensor.new_zeros(shape.of(rows[1] - rows[0]))
                    whole[first - rows[0] : stop - rows[0]] = tensor
                    tensor = whole
                self._add_gradient(flow.backbone, micro_batch, key, tensor)
        keys = [(key, (flow.backbone, micro_batch, key)) for key in flow.exports]
        gradients = {key: self._gradients.pop(k) for key, k in keys if k in self._gradients}
        with self.recorder.time("backward", action.stage, micro_batch):
            results = self._compute.backward(
                action.stage, micro_batch, rows, gradients, is_final=instruction.is_final
            )
        for key, tensor in results.items():
            self._add_gradient(flow.backbone, micro_batch, key, tensor)
        for message in instruction.sends:
            totals = {key: self._gradients[flow.backbone, micro_batch, key] for key in message.keys}
            self._send(message, rows, totals)
        for key in {key for message in instruction.sends for key in message.keys}:
            del self._gradients[flow.backbone, micro_batch, key]

    def _scale(self, instruction: Instruction) -> Rows:
        return scale_rows(instruction.samples, self._batch_size, self._num_rows)

    def _take(self, message: PlannedMessage) -> dict[str, Tensor]:
        with self.recorder.time(
            "wait", message.stages[1], message.sent_by.micro_batch, message.label
        ):
            return self._links.take(message)

    def _send(self, message: PlannedMessage, rows: Rows, tensors: Mapping[str, Tensor]) -> None:
        ranges = self._links.cut_ranges(message)
        if not ranges:
            return
        self._open()
        own = {key: tensors[key] for key in message.keys}
        # Only whole values may have another shape than a row a sample.
        if ranges != [rows]:
            cuts = [(first - rows[0], stop - rows[0]) for first, stop in ranges]
            own = {key: cut_rows(value, cuts) for key, value in own.items()}
        self._links.send(message, own)

    def _keep(self, space: int, micro_batch: int, key: str, value: Tensor) -> None:
        # Only a job of one backbone estimates, whose number is 0.
        num_readers = self._program.num_readers.get((max(space, 0), key), 0)
        if num_readers:
            self._values[space, micro_batch, key] = [value] * num_readers
        elif key == OUTPUT and self._reads_estimates:
            self._estimates[micro_batch] = value

    def _read(self, space: int, micro_batch: int, key: str) -> Tensor:
        return self._values[space, micro_batch, key].pop()

    def _add_gradient(self, backbone: int, micro_batch: int, key: str, value: Tensor) -> None:
        total = self._gradients.get((backbone, micro_batch, key))
        # Not in place: autograd or a message may hold the first one.
        self._gradients[backbone, micro_batch, key] = value if total is None else total + value


def cut_rows(value: Tensor, cuts: Sequence[Rows]) -> Tensor:
    """Rows of a value, range behind range; a copy unless they are all of it."""
    if list(cuts) == [(0, len(value))]:
        return value
    return torch.cat([value[first:stop] for first, stop in cuts])
