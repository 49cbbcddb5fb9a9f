"""Carries a plan out on a model: its layers' forwards are recorded, and its training loop stays as it was."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn

from memo.planner.layer_plan import LayerPlan
from memo.planner.plan import Plan
from memo.planner.schedule import Move, schedule
from memo.report import describe_run
from memo.runtime.attention import offer_attention
from memo.runtime.device_memory import peak_bytes
from memo.runtime.layers import attention_names, find_layers, named_memory, without_cache
from memo.runtime.moving.buffers import Buffers
from memo.runtime.moving.mover import Cargo, Mover, Times
from memo.runtime.recording.record import LayerRecord
from memo.runtime.stores import open_store
from shared.errors import ConfigError

__all__ = ["Run", "apply"]

_log = logging.getLogger(__name__)


def apply(model: nn.Module, plan: Plan, layers: Sequence[nn.Module] | None = None) -> Run:
    """Applies a plan to a model; undone by `Run.close`, or at the end of a `with` block.

    The model's parameters, gradients, state dict and results are as without it. Forwards without
    gradients run as they were.

    Args:
        model: a Hugging Face model, or any other with `layers`; wrapped by DDP or FSDP2, or adapted by
            LoRA.
        plan: from `memo.autotune`, or `Plan.fixed`.
        layers: submodules that the plan's layers are, in the order of the forward; by default the decoder's.

    Returns:
        The run, which measures what the plan takes.

    Raises:
        ConfigError: the model has other layers than the plan, has one applied already, or recomputes
            activations itself.
        DataError: the store cannot be opened.
    """
    return Run(model, plan, layers)


class Run:
    """A plan at work on a model."""

    def __init__(
        self, model: nn.Module, plan: Plan, layers: Sequence[nn.Module] | None = None
    ) -> None:
        """See `apply`."""
        found = find_layers(model, layers)
        self.plan = plan.for_layers(len(found))
        _check_untouched(model, found)
        self._store = open_store(
            plan.store, plan.store_limit_bytes, int(plan.prediction.get("store_bytes", 0))
        )
        self._device = next((one.device for one in model.parameters()), torch.device("cpu"))
        self._buffers = Buffers(plan.num_buffers, self._device)
        self._mover = Mover(self._store, self._buffers)
        self._schedule = schedule(
            self.plan.layers, max_sending=plan.max_sending, num_buffers=plan.num_buffers
        )
        self._cargos: weakref.WeakKeyDictionary[LayerRecord, Cargo] = weakref.WeakKeyDictionary()
        self._live: list[list[weakref.ref[LayerRecord]]] = [[] for _ in found]
        self._restored: weakref.ref[LayerRecord] | None = None
        self._undo = [offer_attention(name) for name in attention_names(found)]
        self._layers = found
        for number, layer in enumerate(found):
            layer.forward = self._wrap(number, layer, layer.forward)  # type: ignore[method-assign]
        self.num_restored = 0

    @property
    def store_bytes(self) -> int:
        """Most bytes that were in the store at once."""
        return self._store.peak_bytes

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
            moved_bytes=times.sent_bytes + times.fetched_bytes,
        )

    def close(self) -> None:
        """Takes the plan off the model; what is still to be run backward cannot be restored afterwards."""
        if not self._layers:
            return
        for layer in self._layers:
            del layer.forward
        self._layers = []
        for undo in self._undo:
            undo()
        self._mover.close()
        self._store.close()

    def __enter__(self) -> Self:
        """The run itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()

    def _wrap(
        self, number: int, layer: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        plan, moves = self.plan.layers[number], self._schedule

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self._do(moves.before_forward[number])
            out = self._record(number, plan, layer, forward, args, kwargs)
            self._do(moves.after_forward[number])
            return out

        return run

    def _record(
        self,
        number: int,
        plan: LayerPlan,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if plan.mode == "keep":
            return forward(*args, **kwargs)
        record = LayerRecord(
            forward,
            args,
            without_cache(kwargs),
            plan=plan,
            parameters=lambda: named_memory(layer),
            cut=self.plan.cut,
            fetch=lambda record: self._before_backward(number, record),
        )
        out = record.run()
        if record.items:
            stored = [item for item in record.items if plan.fraction(item.name) > 0]
            if stored:
                self._cargos[record] = self._mover.load(record, stored)
            alive = [one for one in self._live[number] if one() is not None]
            self._live[number] = [*alive, weakref.ref(record)]
        return out

    def _newest(self, number: int) -> LayerRecord | None:
        """The last forward of a layer that a backward may still come for."""
        while self._live[number]:
            record = self._live[number][-1]()
            if record is not None:
                return record
            self._live[number].pop()
        return None

    def _do(self, moves: Sequence[Move]) -> None:
        for move in moves:
            record = self._newest(move.layer)
            cargo = None if record is None else self._cargos.get(record)
            if cargo is None:
                continue
            if move.action == "send":
                self._mover.send(cargo)
            elif move.action == "await_sent":
                self._mover.await_sent(cargo)
            else:
                self._mover.fetch(cargo)

    def _before_backward(self, number: int, record: LayerRecord) -> None:
        """Has a record's stored items ready, and the next ones on their way."""
        self.num_restored += 1
        before = None if self._restored is None else self._restored()
        if before is not None and before is not record and before.is_taken:
            cargo = self._cargos.get(before)
            if cargo is not None:  # its backward is over, as this one's begins
                self._mover.give_back(cargo)
            if before in [one() for one in self._live[number]]:
                pass
        self._restored = weakref.ref(record)
        cargo = self._cargos.get(record)
        if cargo is not None:
            self._mover.await_fetched(cargo)
        self._do(self._schedule.before_backward[number])


def _check_untouched(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    for layer in layers:
        if "forward" in vars(layer):
            raise ConfigError(
                f"{type(layer).__name__}: expected a layer whose forward is its class's own, got one that "
                "was replaced; close the run that was applied before"
            )
    if getattr(model, "is_gradient_checkpointing", False):
        raise ConfigError(
            "expected a model that does not recompute activations itself, got one with gradient "
            "checkpointing on; do model.gradient_checkpointing_disable()"
        )
