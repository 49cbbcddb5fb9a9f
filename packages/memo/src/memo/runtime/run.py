"""Carries a plan out on a model: its layers' forwards are recorded, and its training loop stays as it was."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

from memo.config import shown
from memo.planner.layer_plan import LayerPlan
from memo.planner.plan import Plan
from memo.planner.schedule import CopyStep, schedule
from memo.report import describe_run
from memo.runtime.attention import offer_attention
from memo.runtime.block_loss import offer_block_loss
from memo.runtime.device_memory import give_back_at_once, peak_bytes
from memo.runtime.layer_forward import LayerForward
from memo.runtime.layers import (
    attention_names,
    check_prefix,
    check_untouched,
    device_of,
    find_layers,
    kind_of,
    named_memory,
    without_cache,
)
from memo.runtime.moving import open_mover
from memo.runtime.moving.buffers import Buffers
from memo.runtime.moving.mover import Cargo, Times
from memo.runtime.recording.arguments import input_of
from memo.runtime.recording.fingerprint import fingerprints_of_turn
from memo.runtime.recording.record import ForwardRecord, LayerRecord
from memo.runtime.recording.whole import WholeRecord
from memo.runtime.stores import open_store
from memo.runtime.tiling.record import TiledRecord
from memo.runtime.tiling.row_locality import Proofs
from shared.errors import ConfigError

__all__ = ["Run", "apply"]

_log = logging.getLogger(__name__)


def apply(model: nn.Module, plan: Plan, layers: Iterable[nn.Module] | None = None) -> Run:
    """Applies a plan to a model; undone by `Run.close`, or at the end of a `with` block.

    The model's parameters, gradients, state dict and results are as without it. Forwards without
    gradients run as they were, and so do copies of the model. Where the device is RAM, glibc is told to give back
    what is freed, for this process from here on.

    Args:
        model: a Hugging Face model, or any other with `layers`; wrapped by DDP or FSDP2, or adapted by
            LoRA.
        plan: from `memo.autotune`, or `Plan.fixed`.
        layers: submodules that the plan's layers are, in the order of the forward; by default the decoder's.

    Returns:
        The run, which measures what the plan takes.

    Raises:
        ConfigError: the model's layers are of another number or kind than the plan's, have a plan applied, are
            compiled, or recompute activations themselves.
        DataError: the store cannot be opened.
    """
    return Run(model, plan, layers)


class Pass:
    """One forward through the layers, until its backward is over.

    Attributes:
        records: what layers left, by their numbers.
        begun_s: when it began.
    """

    __slots__ = ("__weakref__", "begun_s", "records")

    def __init__(self) -> None:
        self.records: dict[int, weakref.ref[ForwardRecord]] = {}
        self.begun_s = time.perf_counter()

    @property
    def is_alive(self) -> bool:
        """Whether a backward may still come."""
        return any(record() is not None for record in self.records.values())


class Run:
    """A plan at work on a model.

    Attributes:
        plan: with a plan for each layer.
        num_restored: times that a layer's saved tensors were made ready for its backward.
        step_s: seconds of each forward and backward so far that no other one came between, without what is before the
            first layer. Not measured on a GPU, which would have to be waited for.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, layers: Iterable[nn.Module] | None = None
    ) -> None:
        """See `apply`."""
        if not isinstance(plan, Plan):
            raise ConfigError(
                f"plan: expected a memo.Plan, got {shown(plan)}; give one from memo.autotune, Plan.fixed or "
                "Plan.load"
            )
        self._device = device_of(model)
        found = find_layers(model, layers)
        self.plan = plan.for_layers(len(found))
        check_untouched(model, found, _applied)
        plan.check_kinds(list(map(kind_of, found)))
        self._store = open_store(
            plan.store,
            plan.store_limit_bytes,
            int(plan.prediction.get("store_bytes", 0)),
            device=self._device,
        )
        self._buffers = Buffers(plan.num_buffers, self._device)
        self._mover = open_mover(self._device, self._store, self._buffers)
        self._schedule = schedule(
            self.plan.layers, max_sending=plan.max_sending, num_buffers=plan.num_buffers
        )
        self._cargos: weakref.WeakKeyDictionary[ForwardRecord, Cargo] = weakref.WeakKeyDictionary()
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._current, self._last_number = Pass(), len(found)
        self._in_backward: weakref.ref[ForwardRecord] | None = None
        self._is_closed = self._has_said_caches = False
        self._proofs = Proofs()
        names = {module: name for name, module in model.named_modules()}
        self._names = [f"{names[layer]} ({type(layer).__name__})" for layer in found]
        self._turns = [0] * len(found)
        self.num_restored = 0
        self.step_s: list[float] = []
        self._ended_s = 0.0
        self._changed = [
            (number, layer)
            for number, layer in enumerate(found)
            if self.plan.layers[number].mode != "keep"
            or self._schedule.after_forward[number]
            or (number == 0 and plan.input_shape is not None)
        ]
        if self._changed and self._device.type == "cpu":
            give_back_at_once()
        self._offered: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        if plan.has_block_loss:
            self._undo.append(offer_block_loss(model))
        self._applied = found
        _applied.update(found)
        self._forwards: list[LayerForward] = []
        for number, layer in self._changed:
            self._forwards.append(LayerForward(layer, partial(self._run_layer, number, layer)))

    @property
    def store_bytes(self) -> int:
        """Most bytes that were in the store at once."""
        return self._store.peak_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the plan's buffers, into which stored items come back; spare ones left out."""
        return self._buffers.num_bytes

    @property
    def num_spare_buffers(self) -> int:
        """Buffers that were made beyond the plan's, as forwards came before other forwards' backwards."""
        return self._buffers.num_spare

    @property
    def times(self) -> Times:
        """What moving took so far."""
        return self._mover.times

    def report(self) -> str:
        """Says what was measured beside what was predicted."""
        times = self._mover.times
        return describe_run(
            self.plan,
            store_bytes=self.store_bytes,
            device_bytes=peak_bytes(self._device),
            num_restored=self.num_restored,
            num_spare=self._buffers.num_spare,
            send_s=times.send_s,
            fetch_s=times.fetch_s,
            wait_s=times.wait_s,
            step_s=self.step_s,
            moved_bytes=times.sent_bytes + times.fetched_bytes,
        )

    def close(self) -> None:
        """Takes the plan off the model; what is still to be run backward cannot be restored afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        for forward in self._forwards:
            forward.close()
        for undo in self._undo:
            undo()
        for layer in self._applied:
            _applied.discard(layer)
        self._mover.close()
        self._store.close()

    def __enter__(self) -> Run:
        """The run itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()

    def _run_layer(
        self,
        number: int,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        is_first = number <= self._last_number
        if is_first:
            self._current = Pass()
            self._passes.add(self._current)
        self._last_number, current = number, self._current
        if number == 0 and self.plan.input_shape is not None:
            self.plan.check_input(input_of(args, kwargs).shape)
        self._do(self._schedule.before_forward[number], current)
        if self.plan.layers[number].mode == "keep":
            out = forward(*args, **kwargs)
        else:
            self._offer_attention(layer)
            record = self._make_record(number, layer, current, forward, args, kwargs)
            out = record.run()
            self._load(number, record, current)
            del record
        if is_first and self._device.type == "cpu":
            self._await_end(current, out)
        is_alone = not any(one.is_alive for one in self._passes if one is not current)
        moves = self._schedule.after_forward[number]
        # Forwards before other forwards' backwards: whose is first is not known.
        self._do([move for move in moves if is_alone or move.action != "fetch"], current)
        return out

    def _await_end(self, current: Pass, out: Any) -> None:
        """Notes a pass's seconds when its backward is over, of which the first layer's is among the last."""

        def note() -> None:
            ended_s = time.perf_counter()
            # Another forward or backward in between would be counted, too.
            if self._current is current and self._ended_s <= current.begun_s:
                self.step_s.append(ended_s - current.begun_s)
            self._ended_s = ended_s

        def queue(_: Tensor) -> None:
            Variable._execution_engine.queue_callback(note)

        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(queue)
                return

    def _offer_attention(self, layer: nn.Module) -> None:
        """Has calls of the layer's attention handed over; its name may be another one than before."""
        for name in attention_names([layer]):
            if name not in self._offered:
                self._offered.add(name)
                self._undo.append(offer_attention(name))

    def _load(self, number: int, record: ForwardRecord, current: Pass) -> None:
        """Takes room in the store for what a layer left."""
        if record.items:
            current.records[number] = weakref.ref(record)
            stored = _stored(self.plan.layers[number], record)
            if stored:
                self._cargos[record] = self._mover.load(record, stored)

    def _make_record(
        self,
        number: int,
        layer: nn.Module,
        current: Pass,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> LayerRecord | TiledRecord | WholeRecord:
        plan = self.plan.layers[number]
        memory = partial(named_memory, layer)
        fetch = partial(self._before_backward, number, current)
        check_prefix(layer, args, kwargs)
        args = tuple(None if isinstance(one, Cache) else one for one in args)
        given, kwargs = kwargs, without_cache(kwargs)
        if kwargs is not given and not self._has_said_caches:
            self._has_said_caches = True
            _log.info("memo: training needs no cache of keys and values; layers are run without it")
        if plan.mode == "whole":
            return WholeRecord(forward, args, kwargs, parameters=memory, fetch=fetch)
        checks: dict[str, Any] = {
            "name": self._names[number],
            "fingerprint": fingerprints_of_turn(self._turns[number], number),
        }
        self._turns[number] += 1
        if plan.mode == "tiles":
            return TiledRecord(
                layer, forward, args, kwargs, plan=plan, proofs=self._proofs, fetch=fetch, **checks
            )
        return LayerRecord(
            forward,
            args,
            kwargs,
            plan=plan,
            parameters=memory,
            cut=self.plan.cut,
            fetch=fetch,
            **checks,
        )

    def _do(self, moves: Sequence[CopyStep], current: Pass) -> None:
        for move in moves:
            reference = current.records.get(move.layer)
            record = None if reference is None else reference()
            cargo = None if record is None else self._cargos.get(record)
            if cargo is not None:
                getattr(self._mover, move.action)(cargo)

    def _before_backward(self, number: int, current: Pass, record: ForwardRecord) -> None:
        """Has a record's stored items ready, and the next ones on their way.

        Raises:
            RuntimeError: the run is closed.
        """
        if self._is_closed:
            raise RuntimeError(
                "memo: expected a backward before the plan is taken off its model, got one after; close the "
                "run, or leave its `with` block, when the step is over"
            )
        self.num_restored += 1
        before = None if self._in_backward is None else self._in_backward()
        if before is not None and before is not record and before.is_taken:
            cargo = self._cargos.get(before)
            if cargo is not None:  # its backward is over, as this one's begins
                self._mover.give_back(cargo)
        self._in_backward = weakref.ref(record)
        cargo = self._cargos.get(record)
        if cargo is not None and cargo.fetched is None:  # nobody fetched it: it goes before others
            self._mover.await_fetched(cargo)
        self._do(self._schedule.before_backward[number], current)
        if cargo is not None:
            self._mover.await_fetched(cargo)


_applied: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Layers that a plan is applied to."""


def _stored(plan: LayerPlan, record: ForwardRecord) -> list[Any]:
    """Items that go to the store."""
    moving = [item for item in record.items if item.can_move]
    if plan.mode == "whole":
        return moving
    return [item for item in moving if plan.fraction(item.name) > 0]
