"""A stage of a pipeline: computes its micro-batches one forward, one backward, and logs its messages.

The same code trains and replays. What differs is where messages come from: the neighbours, or logs of
what they sent (`BoundaryMessages` and its subclass in `replay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shared.comms import Group
from shared.comms.pipeline import run_1f1b
from shared.errors import ConfigError, DataError
from shared.kernels.philox import stream_key
from swift.injection import reach
from swift.pipeline.chunk_sums import ChunkSums, Gradients
from swift.pipeline.log import LogWriter
from swift.pipeline.records import Key, Kind
from swift.undo.undoable import Undoable

__all__ = ["BoundaryMessages", "Loss", "PipelineStage"]

Loss = Callable[[Any, Any], Tensor]
"""Of the last stage's output and a micro-batch's targets; the mean over its samples, a scalar."""


class BoundaryMessages:
    """The messages of one stage in one iteration of training, between living stages.

    Args:
        stage: this process's.
        group: ranks of the stages, in order; None if there is one.
        iteration: from 0.
    """

    keep_apart = False

    def __init__(self, stage: PipelineStage, group: Group | None, iteration: int) -> None:
        self.stage, self.group, self.iteration = stage, group, iteration
        self.micro_batches: Sequence[int] = range(stage.num_micro_batches)

    def receive(self, k: int) -> Tensor:
        """The input of micro-batch `k`, where no living stage sends it."""
        raise AssertionError("a stage before this one sends it")

    def received(self, kind: Kind, k: int, message: Tensor) -> None:
        """Logs the receipt of a message."""
        self.stage.log(Key(kind.receipt, self.iteration, k), message)

    def send(self, kind: Kind, k: int, message: Tensor) -> None:
        """Logs a message that is about to be sent."""
        self.stage.log(Key(kind, self.iteration, k), message)

    def close(self, k: int, out: Tensor) -> Tensor:
        """What the backward pass of micro-batch `k` begins with."""
        return out

    def add(self, sums: list[Gradients]) -> Gradients:
        """The step's gradients, from this rank's chunk sums."""
        return sums[0]


class PipelineStage:
    """A stage module, its optimizer, and its place in the pipeline.

    Args:
        module: any; it takes what the stage before returns, one tensor, the first one a micro-batch of
            the inputs: a tensor, a tuple (its arguments) or a mapping (its keyword arguments).
        opt: made by `swift.undoable`.
        index: of the stage.
        num_stages: of the pipeline.
        group: ranks of the stages, in order; None if there is one.
        loss: of the last stage.
        micro_batches: into which a batch is split, along each tensor's first dimension.
        chunk: micro-batches whose gradients are summed before they are added to the others'; None: all.
        log: the open log; None: nothing is logged.
        logged: for each boundary whether it is logged; None: all.
        seed: of dropout and other random numbers, which follow from it, the iteration, the stage and
            the micro-batch.

    Attributes:
        iteration: the next one, counted from 0.
        compute_s: seconds spent in forward and backward passes so far.
        sent_bytes: of activations and of gradients so far.

    Raises:
        ConfigError: a number is out of range, or the last stage has no loss.
    """

    def __init__(
        self, module: nn.Module, opt: Undoable, *, index: int, num_stages: int, group: Group | None,
        loss: Loss | None = None, micro_batches: int, chunk: int | None = None,
        log: LogWriter | None = None, logged: Sequence[bool] | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        chunk = micro_batches if chunk is None else chunk
        if micro_batches < 1 or not 1 <= chunk <= micro_batches:
            raise ConfigError(
                f"expected micro_batches of at least 1 and chunk of 1 to micro_batches, got "
                f"{micro_batches} and {chunk}"
            )
        if not 0 <= index < num_stages:
            raise ConfigError(f"expected a stage of 0..{num_stages - 1}, got {index}")
        if loss is None and index == num_stages - 1:
            raise ConfigError(f"stage {index} is the last and needs a loss; give loss=")
        if logged is not None and len(logged) != num_stages - 1:
            raise ConfigError(
                f"expected logged for each of {num_stages - 1} boundaries, got {len(logged)}"
            )
        self.module, self.opt, self.group = module, opt, group
        self.index, self.num_stages = index, num_stages
        self.num_micro_batches, self.chunk, self.seed = micro_batches, chunk, seed
        self.iteration = 0
        self.compute_s = 0.0
        self.sent_bytes = {Kind.ACTIVATION: 0, Kind.GRADIENT: 0}
        self._loss = loss
        self._messages: BoundaryMessages | None = None
        self.writer = log
        self._logged = (True,) * (num_stages - 1) if logged is None else tuple(logged)
        self._parameters = list(opt.parameters)

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the loss."""
        return self.index == self.num_stages - 1

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor | None:
        """One iteration: all micro-batches forward and backward, and the optimizer's step.

        Args:
            inputs: a whole batch, read by the first stage.
            targets: of the whole batch, read by the last stage.

        Returns:
            On the last stage the mean loss.

        Raises:
            ConfigError: the batch cannot be split.
            CommError: another stage died; nothing was stepped on this one.
        """
        messages = self._messages or BoundaryMessages(self, self.group, self.iteration)
        ks = messages.micro_batches
        parts = self._split(inputs, "inputs") if self.index == 0 else []
        wanted = self._split(targets, "targets") if self.is_last else []
        self.opt.zero_grad()
        sums = ChunkSums(
            self._parameters, self.chunk, self.num_micro_batches, keep_apart=messages.keep_apart
        )
        leaves: dict[int, Tensor] = {}
        grads: dict[int, list[Tensor]] = {k: [] for k in ks}
        losses: list[Tensor] = []
        begun_s: list[float] = []

        def forward(at: int, x: Tensor | None) -> Tensor:
            k = ks[at]
            if self.index:
                if x is None:
                    x = messages.receive(k).requires_grad_()
                leaves[k] = x
                messages.received(Kind.ACTIVATION, k, x)
            torch.manual_seed(stream_key(self.seed, messages.iteration, self.index, k))
            begun_s.append(time.perf_counter())
            out = _call(self.module, parts[k] if x is None else x)
            if self.is_last:
                assert self._loss is not None, "checked as the stage was made"
                out = self._loss(out, wanted[k]) / self.num_micro_batches
                losses.append(out.detach())
            self.compute_s += time.perf_counter() - begun_s.pop()
            out = _as_tensor(out, self.index)
            out.register_hook(lambda _: begun_s.append(time.perf_counter()))
            if self.is_last:
                return out
            self._send(messages, Kind.ACTIVATION, k, out)

            def receive(grad: Tensor) -> None:
                grads[k].append(grad)
                messages.received(Kind.GRADIENT, k, grad)

            out.register_hook(receive)
            return messages.close(k, out)

        def after_backward(at: int, grad: Tensor | None) -> None:
            k = ks[at]
            self.compute_s += time.perf_counter() - begun_s.pop()
            if self.index:
                x = leaves.pop(k)
                if grad is None:
                    grad = torch.zeros_like(x) if x.grad is None else x.grad.contiguous()
                grads[k].append(grad)
                self._send(messages, Kind.GRADIENT, k, grad)
            sums.close_micro_batch(k, grads.pop(k))
            reach("backward", bucket=k)

        run_1f1b(messages.group, len(ks), forward, after_backward=after_backward)
        for parameter, grad in zip(self._parameters, messages.add(sums.sums), strict=True):
            parameter.grad = grad
        # Messages of this iteration came from both sides: all stages have the step before.
        self.opt.confirm()
        self.opt.step()
        self.iteration += 1
        return torch.stack(losses).sum() if losses else None

    def _send(self, messages: BoundaryMessages, kind: Kind, k: int, message: Tensor) -> None:
        self.sent_bytes[kind] += message.numel() * message.element_size()
        messages.send(kind, k, message)

    @contextmanager
    def reading(self, messages: BoundaryMessages) -> Iterator[None]:
        """Takes the messages of the next step from elsewhere."""
        self._messages = messages
        try:
            yield
        finally:
            self._messages = None

    def log(self, key: Key, tensor: Tensor) -> None:
        """Logs a message or receipt if its boundary is logged."""
        crosses_next = key.kind in (Kind.ACTIVATION, Kind.GRADIENT_RECEIPT)
        boundary = self.index if crosses_next else self.index - 1
        if self.writer is not None and self.is_logged(boundary):
            self.writer.append(key, tensor)

    def is_logged(self, boundary: int) -> bool:
        """Whether messages between stages `boundary` and `boundary` + 1 are logged."""
        return self._logged[boundary]

    def _split(self, batch: Any, name: str) -> list[Any]:
        """The batch's micro-batches."""
        leaves, form = pytree.tree_flatten(batch)
        num = self.num_micro_batches
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) % num or not len(leaf):
                got = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ConfigError(
                    f"stage {self.index}: expected {name} of tensors whose first dimension splits "
                    f"into {num} equal micro-batches, got {got}; give a batch of such a size"
                )
        if not leaves:
            raise ConfigError(
                f"stage {self.index} reads the {name} and got none; pass the whole batch"
            )
        split = [leaf.chunk(num) for leaf in leaves]
        return [pytree.tree_unflatten([each[k] for each in split], form) for k in range(num)]


def _call(module: nn.Module, x: Any) -> Any:
    if isinstance(x, Mapping):
        return module(**x)
    return module(*x) if isinstance(x, (tuple, list)) else module(x)


def _as_tensor(out: Any, index: int) -> Tensor:
    """The one tensor that a stage returns, alone or, as torch's pipelining has it, in a tuple."""
    if isinstance(out, (tuple, list)) and len(out) == 1:
        out = out[0]
    if not isinstance(out, Tensor) or not out.requires_grad:
        got = "one that needs no gradient" if isinstance(out, Tensor) else type(out).__name__
        raise DataError(
            f"stage {index}: expected its module to return one tensor that depends on parameters or "
            f"input, got {got}; pack what the next stage needs into one tensor"
        )
    return out
