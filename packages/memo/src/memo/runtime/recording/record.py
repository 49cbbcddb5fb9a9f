"""What one forward of a layer leaves for its backward, instead of what autograd would save.

The layer's own forward runs under hooks for saved tensors, which keep a tensor's place in the order
of saving and nothing else. When the backward first asks for one, the layer's forward runs again with
items answered from where they were kept (after MEMO's token-wise recomputation, arXiv 2407.12117), and
what autograd saves then, in the same order, is what it gets. The second forward sees what the first one saw
(`LayerState`), and what it saves is compared with what the first one saved (`Fingerprint`).

Departure: all rows run again, but of matrix products only those that were not kept. So saved tensors
come out in their own geometry, element-wise results are never stored, and a layer needs no proof
that its rows are independent: only those of a matrix product are taken apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memo.planner.layer_plan import INPUT, LayerPlan
from memo.runtime.attention import listening
from memo.runtime.recording.arguments import Arguments, Outside
from memo.runtime.recording.calls import NotRepeatable, Products, address
from memo.runtime.recording.fingerprint import Fingerprint
from memo.runtime.recording.items import Item, is_plain
from memo.runtime.recording.layer_state import LayerState
from memo.runtime.recording.recorder import Recorder
from memo.runtime.recording.replayer import Complete, Replayer

__all__ = ["ForwardRecord", "LayerRecord", "Memory", "other_values", "refuse_differentiation"]

Memory = Mapping[int, tuple[str, Tensor]]
"""Parameters and buffers of a layer with their names, by the address of their storage."""


@runtime_checkable
class ForwardRecord(Protocol):
    """What one forward of a layer leaves for its backward.

    Attributes:
        items: what is kept, filled when the forward is over; empty where autograd saved nothing.
    """

    items: list[Item]

    def run(self) -> Any:
        """Runs the layer's forward and records it."""
        ...

    @property
    def is_taken(self) -> bool:
        """Whether nothing that was made ready for the backward is still to be asked for."""
        ...


class LayerRecord:
    """One forward of a layer, which restores what autograd saved in it by running it again.

    Attributes:
        items: what is kept, the layer's input first.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        plan: LayerPlan,
        parameters: Callable[[], Memory],
        cut: int,
        fetch: Callable[[LayerRecord], None],
        name: str = "",
        fingerprint: Callable[[Tensor], Fingerprint] = Fingerprint,
    ) -> None:
        """Prepares the recording of one forward.

        Args:
            forward: the layer's own, a method of it.
            args, kwargs: what it is called with.
            plan: what is kept of it.
            parameters: the layer's parameters and buffers, now.
            cut: a product's kept rows are a multiple of it, or all.
            fetch: brings items back that were stored.
            name: of the layer, for errors.
            fingerprint: makes what saved tensors are compared by.

        Raises:
            ConfigError: no floating-point tensor is among the arguments.
        """
        self.items: list[Item] = []
        self._forward, self._arguments = forward, Arguments(args, kwargs)
        self._given = args, kwargs
        self._layer: nn.Module = forward.__self__  # type: ignore[attr-defined]
        self._name = name or type(self._layer).__name__
        self._fingerprint = fingerprint
        self._parameters, self._fetch = parameters, fetch
        self._plan, self._cut = plan, cut
        self._restored: dict[int, Tensor] = {}

    def run(self) -> Any:
        """Runs the layer's forward and records it.

        Raises:
            NotRepeatable: running it again would not do the same, as far as one forward shows.
        """
        try:
            return self._run()
        except NotRepeatable as error:
            raise NotRepeatable(error.what, self._name) from error

    def _run(self) -> Any:
        source = self._arguments.source
        assert source is not None
        memory = self._parameters()
        outside = {*memory, *map(address, self._arguments.others())}
        self._state = LayerState(self._layer, source)
        self._versions = _versions(memory)
        begun = Item.of(INPUT, [source])

        def pack(tensor: Tensor) -> object:
            if not is_plain(tensor) or address(tensor) in outside:
                return Outside(tensor)
            return self, recorder.save(tensor)

        names = {at: name for at, (name, _) in memory.items()}
        recorder = Recorder(self._plan, names, self._cut, pack, self._fingerprint)
        args, kwargs = self._given
        del self._given
        with (
            saved_tensors_hooks(pack, _unpack),
            listening(recorder),
            Products(recorder.product),
        ):
            out = self._forward(*args, **kwargs)
        self._state.finish()
        self._fingerprints, self._calls = recorder.fingerprints, recorder.finished_calls()
        if self._fingerprints:
            self._check_repeatable(begun, memory)
            items = [call.item for call in self._calls if call.item is not None]
            self.items = [begun, *items]
        self._arguments.release_source()
        return out

    def _check_repeatable(self, source: Item, memory: Memory) -> None:
        now = _versions(memory)
        changed = [name for name, version in self._versions.items() if now[name] != version]
        changed.extend(self._state.written)
        if source.has_changed:
            changed.append("its input")
        if changed:
            raise NotRepeatable(f"writes to {changed[0]} in place")

    @property
    def is_taken(self) -> bool:
        """Whether nothing that was restored is still to be asked for."""
        return not self._restored

    def take(self, index: int) -> Tensor:
        """The saved tensor of a place, once; restores all when it is not there."""
        if index not in self._restored:
            self.restore()
        return self._restored.pop(index)

    def restore(self) -> None:
        """Runs the layer's forward again, as far as something is saved, with items answered.

        Raises:
            NotRepeatable: it saves something else than the first time.
            RuntimeError: a parameter, a buffer or an item was changed in place since.
        """
        refuse_differentiation()
        self._fetch(self)
        for item in self.items:
            item.check_unchanged()
        is_exact = not self.items[0].tensors[0].is_cuda
        replayer = Replayer(self._calls, self._fingerprints, is_exact=is_exact)
        try:
            self._state.run(lambda: self._run_again(replayer))
        except NotRepeatable as error:
            raise NotRepeatable(error.what, self._name) from error
        self._check_same(replayer)
        self._restored = dict(enumerate(replayer.saved))

    def _run_again(self, replayer: Replayer) -> None:
        memory = self._parameters()
        self._check_versions(memory)
        args, kwargs = self._arguments.filled(*self.items[0].tensors)
        outside = {*memory, *map(address, self._arguments.others())}

        def capture(tensor: Tensor) -> None:
            if is_plain(tensor) and address(tensor) not in outside:
                replayer.save(tensor)

        try:
            with (
                contextlib.suppress(Complete),
                saved_tensors_hooks(capture, _never),
                listening(replayer),
                Products(replayer.product),
            ):
                self._forward(*args, **kwargs)
        except Exception as error:
            error.add_note(f"memo: raised while {self._name} ran again for its backward")
            raise

    def _check_versions(self, memory: Memory) -> None:
        now = _versions(memory)
        for name, version in self._versions.items():
            if now.get(name) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: {name} is at version {now.get(name)}; expected version {version} "
                    "instead; step the optimizer after the backward"
                )

    def _check_same(self, replayer: Replayer) -> None:
        num_first, num_saved = len(self._fingerprints), len(replayer.saved)
        if replayer.differs:
            tensor = replayer.saved[-1]
            raise other_values(
                self._name,
                f"saved tensor {num_saved} of {num_first}, {tensor.dtype} {list(tensor.shape)}",
                [*self._arguments.changed, *self._state.suspects()],
            )
        if num_saved != num_first:
            raise NotRepeatable(
                f"saved {num_first} tensors at first, and {num_saved} the second time", self._name
            )


def other_values(name: str, what: str, suspects: list[str]) -> NotRepeatable:
    """The error that says that a layer computed something else when it ran again.

    Args:
        name: the layer's.
        what: the first tensor that differs.
        suspects: names of what changed since.
    """
    reason = (
        f"as {', '.join(suspects)} changed since"
        if suspects
        else "as it depends on more than its arguments and its modules' attributes, such as a global"
    )
    return NotRepeatable(f"computes other values the second time, {reason} ({what})", name)


def refuse_differentiation() -> None:
    """Refuses a backward that is to be differentiated again.

    Raises:
        RuntimeError: it was called with create_graph=True.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "memo: expected a backward that is not differentiated again, got create_graph=True; run it "
            "outside of memo.apply"
        )


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Outside):
        return packed.unpack()
    record, index = packed
    return record.take(index)


def _never(_: object) -> Tensor:
    raise AssertionError("a graph that only served to save tensors was run backward")


def _versions(memory: Memory) -> dict[str, int]:
    return {name: tensor._version for name, tensor in memory.values()}
