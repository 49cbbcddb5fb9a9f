"""Data parallelism whose torn step can be taken back: each bucket is updated behind the next one's sum.

Gradients are averaged over ranks bucket by bucket while the backward pass goes on; afterwards each
bucket's parameters are updated while the next bucket's sum is under way (wait-free updates, after
Swift, arXiv 2302.06173). A failure leaves some parameters a step ahead: their marks say which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from shared.comms import Group
from shared.comms.collectives import Reduction, all_reduce, broadcast, start_all_reduce
from shared.errors import CommError, ConfigError, DataError
from shared.kernels.digest import digest
from swift.injection import reach
from swift.training.buckets import plan_buckets
from swift.training.data import Placed
from swift.training.entries import Entries
from swift.training.rest import Rest, Stateful
from swift.training.trainable import Load, Repeat
from swift.undo.torch_step import local
from swift.undo.undoable import Undoable, undoable

__all__ = ["DataParallel"]


class DataParallel:
    """A module whose gradients are averaged over the ranks of a run, and its optimizer.

    Example::

        dp = swift.DataParallel(model, swift.undoable(torch.optim.AdamW(model.parameters())), run)
        def step(i):
            batch = data[i]
            dp.backward(loss_of(dp(batch.x), batch.y))
        run.loop(step, dp, until=1000)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Undoable,
        run: Placed,
        *,
        bucket_mb: float = 8.0,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        stateful: Sequence[Stateful] = (),
    ) -> None:
        """Takes over a module's gradients.

        Args:
            module: of the same shapes on all ranks, which begin with rank 0's values.
            optimizer: of `swift.undoable`, over parameters of the module.
            run: of `swift.join`.
            bucket_mb: millions of bytes of gradients that are reduced in one message.
            clip_norm: gradients are scaled to at most this global norm; all updates then wait for
                the last sum.
            scaler: scales the loss; a step whose gradients are not finite changes nothing. All
                updates then wait for the last sum.
            stateful: schedulers and whatever else the step function changes: taken back with a
                step, and given to newcomers.

        Raises:
            ConfigError: a size is not positive, or the module has parameters that need gradients
                and that the optimizer does not have.
        """
        if bucket_mb <= 0 or (clip_norm is not None and clip_norm <= 0):
            raise ConfigError(
                f"expected a positive bucket_mb and clip_norm, got {bucket_mb} and {clip_norm}"
            )
        known = {id(one) for one in optimizer.parameters}
        names = {id(one): name for name, one in module.named_parameters()}
        missing = [
            name
            for name, one in module.named_parameters()
            if one.requires_grad and id(one) not in known
        ]
        if missing:
            raise ConfigError(
                f"optimizer: expected all parameters of the module that need gradients, got none of "
                f"{', '.join(missing[:3])}{', ...' if missing[3:] else ''}; give them to it or call "
                f"requires_grad_(False)"
            )
        self.module = module
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.scaler = scaler
        self._run = run
        self._names = [names.get(id(one), f"p{i}") for i, one in enumerate(optimizer.parameters)]
        more = (scaler,) if scaler is not None else ()
        self._rest = Rest(module, optimizer.optimizer, (*stateful, *more))
        self._entries = Entries(self._names, optimizer, self._rest)
        self._is_in_step = False
        self._world: Group | None = None
        self._replicas: Group | None = None
        self._bucket_bytes = int(bucket_mb * 1e6)
        self._reductions: list[Reduction] = []
        self._is_last = True
        self._missing: list[set[int]] = []
        self._take_gradients()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, *, update: bool = True) -> None:
        """Runs the backward pass, averages gradients over ranks and updates all parameters.

        Args:
            loss: mean over this rank's samples. With several micro-batches a step, divide each by
                their number.
            update: False adds gradients only; the step's last call has True.

        Raises:
            CommError: a rank was lost; `run.loop` recovers from it.
            ConfigError: a gradient is sparse, or was added to after its bucket's sum had begun.
        """
        replicas = _joined(self._replicas)
        self._is_last = update
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        (scaled / replicas.world_size).backward()
        if not update:
            return
        for missing in self._missing:
            missing.clear()
        self._start_reductions()
        if self._waits_for() is None:
            for at in range(len(self._buckets)):
                self._await(at)
                self._update(at)
            return
        for at in range(len(self._buckets)):
            self._await(at)
        self._update_together()

    def _describe_frozen(self) -> str:
        """Parameters that no step changes: they are not sent, as each rank loads its model's base."""
        known = {id(one) for one in self.optimizer.parameters}
        frozen = [one for one in self.module.parameters() if id(one) not in known]
        return f"{len(frozen)} parameters of digest {digest(frozen):016x}"

    def _waits_for(self) -> str | None:
        """What makes all updates wait for the last sum; None where each waits for its own."""
        if self.clip_norm is not None:
            return "clip_norm"
        if self.scaler is not None:
            return "a scaler"
        return "the vote of mode='commit'" if self.optimizer.mode == "commit" else None

    def _take_gradients(self) -> None:
        """Has the gradients of the parameters that there are now come into buckets."""
        self._buckets = plan_buckets(self.optimizer.parameters, self._bucket_bytes)
        for at, bucket in enumerate(self._buckets):
            for slot, index in enumerate(bucket.indices):
                parameter = self.optimizer.parameters[index]
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._hook(at, slot))

    def _hook(self, at: int, slot: int) -> Any:
        bucket = self._buckets[at]
        name = self._names[bucket.indices[slot]]

        def arrived(parameter: Tensor) -> None:
            assert parameter.grad is not None, "the hook runs behind its accumulation"
            if parameter.grad.layout is not torch.strided:
                raise ConfigError(
                    f"{name}: expected a dense gradient, got {parameter.grad.layout}, "
                    f"which cannot be summed in a bucket; make its module with sparse=False"
                )
            if at < len(self._reductions):
                raise ConfigError(
                    f"{name}: expected its whole gradient by one backward pass a step, got more of it "
                    f"after its sum over ranks had begun; call dp.backward with update=True once a "
                    f"step, and torch.utils.checkpoint with use_reentrant=False"
                )
            if parameter.grad is not bucket.grads[slot]:
                bucket.views[slot].copy_(_part(parameter, parameter.grad))
                parameter.grad = bucket.grads[slot]
                bucket.used[slot] = 1
            if self._is_last:
                self._missing[at].discard(slot)  # a layer that is used twice comes here twice
                self._start_reductions()

        return arrived

    def _start_reductions(self) -> None:
        # All ranks start their sums in the order of the buckets, whatever order gradients come in.
        replicas = _joined(self._replicas)
        while len(self._reductions) < len(self._buckets):
            at = len(self._reductions)
            if self._missing[at]:
                return
            bucket = self._buckets[at]
            for slot, index in enumerate(bucket.indices):
                if self.optimizer.parameters[index].grad is not bucket.grads[slot]:
                    bucket.views[slot].zero_()
                    bucket.used[slot] = 0
            reach("start", bucket=at)
            self._reductions.append(start_all_reduce(replicas, bucket.buffer))

    def _await(self, at: int) -> None:
        reach("reduce", bucket=at)
        self._reductions[at].wait()
        if at == 0:
            # All ranks have added to this sum, so all have the whole step before: it stays.
            self.optimizer.confirm()
        bucket = self._buckets[at]
        used = bucket.used.tolist()
        for slot, index in enumerate(bucket.indices):
            self.optimizer.parameters[index].grad = bucket.grads[slot] if used[slot] else None

    def _update(self, at: int) -> None:
        self.optimizer.update(self._buckets[at].indices)
        reach("update", bucket=at)

    def _update_together(self) -> None:
        world = _joined(self._world)
        is_finite = True
        if self.scaler is not None:
            is_finite = self._unscale(self.scaler)
        if self.clip_norm is not None and is_finite:
            torch.nn.utils.clip_grad_norm_(self.optimizer.parameters, self.clip_norm)
        if self.optimizer.mode == "commit":
            # Behind the vote nothing is sent: who has it has the whole step.
            self._share_buffers(self._rest.shared_buffers)
            reach("vote")
            all_reduce(world, torch.zeros(1, device=world.device))
        if not is_finite:
            for parameter in self.optimizer.parameters:
                parameter.grad = None
        for at in range(len(self._buckets)):
            self._update(at)

    def _unscale(self, scaler: torch.amp.GradScaler) -> bool:
        # Sums are equal on all ranks, and so is what follows from them.
        scaler.unscale_(self.optimizer.optimizer)
        scaler.update()
        grads = [one.grad for one in self.optimizer.parameters if one.grad is not None]
        return all(bool(torch.isfinite(grad).all()) for grad in grads)

    # What the training loop calls (`swift.training.trainable`).

    def describe(self) -> Mapping[str, Any]:
        """See `Trainable`."""
        optimizer = self.optimizer.optimizer
        self._rest.frozen = self._describe_frozen()
        shapes = [
            f"{name} {list(one.shape)} {str(one.dtype).removeprefix('torch.')}"
            for name, one in zip(self._names, self.optimizer.parameters, strict=True)
        ]
        return {
            "parameters": shapes,
            "frozen": self._rest.frozen,
            "buckets": [len(bucket.indices) for bucket in self._buckets],
            "optimizer": f"{type(optimizer).__name__}, {self.optimizer.mode}",
            "clip_norm": self.clip_norm,
            "waits_for": self._waits_for(),
            "undo_is_exact": self.optimizer.mode != "arith",
            "can_shrink": True,
        }

    def warm(self) -> None:
        """See `Trainable`."""
        first = self.optimizer.parameters[0]
        self._try(torch.zeros(2, 4, dtype=first.dtype, device=first.device))
        if self._run.rank is None and first.device.type == "cpu":
            # The system takes longer to give memory than a transfer to fill it. A GPU does not.
            for entry in range(len(self._names)):
                self.prepare(entry)

    def _try(self, value: Tensor) -> None:
        """Steps a parameter of its own and takes the step back."""
        optimizer = self.optimizer.optimizer
        sample = torch.nn.Parameter(value)
        group = {name: one for name, one in optimizer.param_groups[0].items() if name != "params"}
        make: Any = type(optimizer)
        # An optimizer with a constructor of its own starts cold.
        with suppress(TypeError):
            trial = undoable(make([{"params": [sample], **group}]), self.optimizer.mode)
            sample.grad = torch.ones_like(sample)
            trial.update([0])
            if trial.mode != "commit":
                trial.undo_only([0])

    def replica_sets(self, world_size: int) -> list[list[int]]:
        """See `Trainable`."""
        return [list(range(world_size))]

    def assign(self, rank: int, world_size: int) -> None:
        """See `Trainable`."""

    def regroup(self, group: Group) -> None:
        """See `Trainable`."""
        for reduction in self._reductions:
            with suppress(CommError):
                reduction.wait()  # gloo may still write to the bucket until then
        self._reductions = []
        self._world = self._replicas = group
        if self._is_in_step:
            self._is_in_step = False
            self._rest.restore(self._entries.rest_version)

    def versions(self) -> list[int]:
        """See `Trainable`."""
        return self._entries.versions()

    def undo(self, entries: Sequence[int]) -> None:
        """See `Trainable`."""
        self._entries.undo(entries)

    def state_of(self, entry: int) -> dict[str, Tensor]:
        """See `Trainable`."""
        return self._entries.state_of(entry)

    def prepare(self, entry: int) -> dict[str, Tensor]:
        """See `Trainable`."""
        return self._entries.prepare(entry)

    def allocate(self, entry: int) -> dict[str, Tensor]:
        """See `Trainable`."""
        return self._entries.allocate(entry)

    def fill(self, entry: int, tensors: Mapping[str, Tensor], version: int) -> None:
        """See `Trainable`."""
        self._entries.fill(entry, tensors, version)

    def begin(self, step: int) -> None:
        """See `Trainable`."""
        self._rest.keep(step)
        self._is_in_step = True
        self._reductions = []
        for parameter in self.optimizer.parameters:
            parameter.grad = None
        self._missing = [
            {
                slot
                for slot, index in enumerate(bucket.indices)
                if self.optimizer.parameters[index].requires_grad
            }
            for bucket in self._buckets
        ]

    def finish(self, step: int) -> None:
        """See `Trainable`.

        Raises:
            DataError: the step function has not called `backward` exactly once with an update.
        """
        if set(self.optimizer.marks) != {step + 1}:
            raise DataError(
                f"step {step}: expected one dp.backward(loss) that updates, got parameters with "
                f"{sorted(set(self.optimizer.marks))} steps; call it once a step, the calls before "
                f"it with update=False"
            )
        if self.optimizer.mode != "commit":
            self._share_buffers(self._rest.shared_buffers)
        self._entries.rest_version = step + 1
        self._is_in_step = False
        reach("finish")

    def confirm(self, step: int) -> None:
        """See `Trainable`."""
        self.optimizer.confirm()

    def replay(
        self, target: int, lost: Sequence[int], checkpoint_step: int, load: Load, repeat: Repeat
    ) -> str | None:
        """See `Trainable`."""
        raise AssertionError("replicas are never replayed: nothing is logged")

    def find_log_gap(self, target: int, checkpoint_step: int) -> str:
        """See `Trainable`."""
        return "replicas log no messages"

    def committed(self, step: int) -> None:
        """See `Trainable`."""

    def close(self) -> None:
        """See `Trainable`."""

    def _share_buffers(self, buffers: Sequence[Tensor]) -> None:
        if not buffers:
            return
        flat = torch.cat([one.reshape(-1).view(torch.uint8) for one in buffers])
        broadcast(_joined(self._world), flat, 0)
        sizes = [one.numel() * one.element_size() for one in buffers]
        for buffer, part in zip(buffers, flat.split(sizes), strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _part(parameter: Any, grad: Any) -> Tensor:
    """This rank's part of a gradient, placed as its parameter is."""
    if getattr(grad, "placements", None) != getattr(parameter, "placements", None):
        grad = grad.redistribute(placements=parameter.placements)
    return local(grad)


def _joined(group: Group | None) -> Group:
    if group is None:
        raise ConfigError(
            "expected backward inside run.loop, got it before; call run.loop(step_fn, trainable, ...)"
        )
    return group
