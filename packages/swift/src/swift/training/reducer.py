"""Data parallelism whose torn step can be taken back: each bucket is updated behind the next one's sum.

Gradients are averaged over ranks bucket by bucket while the backward pass goes on; afterwards each
bucket's parameters are updated while the next bucket's sum is under way (wait-free updates, after
Swift, arXiv 2302.06173). A failure leaves some parameters a step ahead: their marks say which.

torch's own `loss.backward(); optimizer.step()` does the same in two parts: hooks average the gradients
by the end of each backward pass, as DistributedDataParallel does, and the optimizer's step updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shared.comms import Group
from shared.comms.collectives import all_reduce, broadcast
from shared.errors import ConfigError, DataError
from shared.kernels.digest import digest
from swift.injection import reach
from swift.training.agreement import expect_equal_parameters
from swift.training.buckets import Averager, Sample
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
        compare_every: int = 50,
    ) -> None:
        """Takes over a module's gradients and its optimizer's `step`.

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
            compare_every: steps between two comparisons of all parameters over the ranks, by digests;
                after a start or a recovery also behind steps 1, 2, 4, ...

        Raises:
            ConfigError: a size is not positive, or the module has parameters that need gradients
                and that the optimizer does not have.
        """
        if not bucket_mb > 0 or not (clip_norm is None or clip_norm > 0):
            raise ConfigError(
                f"expected a positive bucket_mb and clip_norm, got {bucket_mb} and {clip_norm}"
            )
        if compare_every < 1:
            raise ConfigError(
                f"compare_every: expected at least one step, got {compare_every}; a large number "
                f"makes comparisons rare"
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
        self._world: Group | None = None
        self._replicas: Group | None = None
        self._bucket_bytes = int(bucket_mb * 1e6)
        self._averager = Averager(
            self._names,
            self._bucket_bytes,
            on_backward=self._begin_backward,
            # Who has added to a sum has the whole step before: it stays.
            on_first_sum=optimizer.confirm,
        )
        self._compare_every = compare_every
        self._num_steps = 0  # of this world
        self._torn: Sample | None = None
        self._guard: Any = None  # of the step that has begun
        optimizer.hand_over_steps(self._step)
        self._averager.take_gradients(optimizer.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Gives what the module has, as `parameters`, `train` and `state_dict`."""
        if name == "module":  # it is not set yet
            raise AttributeError(name)
        return getattr(self.module, name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Makes backward passes in the block add gradients only, as DistributedDataParallel's does.

        They are averaged by the next backward pass behind the block, or by the optimizer's step.
        """
        averager = self._averager
        before, averager.is_synchronised = averager.is_synchronised, False
        try:
            yield
        finally:
            averager.is_synchronised = before

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
        replicas, averager = _joined(self._replicas), self._averager
        is_last = update and averager.is_synchronised
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        with averager.backward(is_last=is_last):
            (scaled / replicas.world_size).backward()
        if not is_last:
            return
        if self._waits_for() is not None:
            averager.average()
            self._update_together()
            return
        averager.start_all()
        for at in range(len(averager.buckets)):
            averager.wait(at)
            self._update(at)

    def _begin_backward(self) -> None:
        """Called as a backward pass begins, or brings its first gradient."""

    def _step(self) -> None:
        """Updates all parameters: the optimizer's own `step`."""
        if not self._averager.is_in_step:
            raise ConfigError(
                "expected optimizer.step() inside run.loop's step function, got it outside, where "
                "other ranks would not make it; call run.loop(step_fn, trainable, ...)"
            )
        if not self._averager.is_averaged:
            self._averager.average()
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
        if self.optimizer.is_coupled:
            return type(self.optimizer.optimizer).__name__
        return "the vote of mode='commit'" if self.optimizer.mode == "commit" else None

    def _update(self, at: int) -> None:
        self.optimizer.update(self._averager.buckets[at].indices)
        reach("update", bucket=at)

    def _update_together(self) -> None:
        world = _joined(self._world)
        is_finite = True
        if (
            self.scaler is not None and self._averager.is_loss_divided
        ):  # else the user's code unscales
            is_finite = self._unscale(self.scaler)
        if self.clip_norm is not None and is_finite:
            torch.nn.utils.clip_grad_norm_(self.optimizer.parameters, self.clip_norm)
        if self.optimizer.mode == "commit":
            # Behind the vote nothing is sent: who has it has the whole step.
            self._share_buffers(self._rest.shared_buffers)
            reach("vote")
            all_reduce(world, torch.zeros(1, device=world.device))
        if not is_finite:
            self._drop_gradients()
        if self.optimizer.is_coupled:
            self.optimizer.update(range(len(self._names)))
            return
        for at in range(len(self._averager.buckets)):
            self._update(at)

    def _drop_gradients(self) -> None:
        for parameter in self.optimizer.parameters:
            parameter.grad = None

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
            "buckets": [len(bucket.indices) for bucket in self._averager.buckets],
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
        make: Any = type(optimizer)
        if not make.__module__.startswith("torch.optim."):
            return  # constructors of others take what they like: they start cold
        sample = torch.nn.Parameter(value)
        group = {name: one for name, one in optimizer.param_groups[0].items() if name != "params"}
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
        self._num_steps = 0
        self._remove_guard()
        if self._torn is None or self._torn.step != self._averager.sample.step:
            self._torn = self._averager.sample
        self._world = self._replicas = group
        if self._averager.join(group):
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
        world = _joined(self._world)
        self._averager.begin(Sample(step, (world.rank, world.world_size)))
        self._guard = register_optimizer_step_pre_hook(self._refuse_second)

    def finish(self, step: int) -> str | None:
        """See `Trainable`.

        Raises:
            DataError: the step function has not updated exactly once, or ranks have other parameters.
        """
        self._remove_guard()
        if set(self.optimizer.marks) == {step} and self._is_left_out():
            self._drop_gradients()
            self.optimizer.update(range(len(self._names)))
        if set(self.optimizer.marks) != {step + 1}:
            raise DataError(
                f"step {step}: expected one update, got parameters with "
                f"{sorted(set(self.optimizer.marks))} steps; call dp.backward(loss) once a step, the "
                f"calls before it with update=False; or loss.backward() and once optimizer.step() of "
                f"swift.undoable's optimizer, all micro-batches of an update in one call of the step "
                f"function"
            )
        if self.optimizer.mode != "commit":
            self._share_buffers(self._rest.shared_buffers)
        self._entries.rest_version = step + 1
        self._averager.is_in_step = False
        reach("finish")
        self._num_steps += 1
        if _is_due(self._num_steps, self._compare_every):
            expect_equal_parameters(_joined(self._replicas), self._list_parameters(), step)
        if self._torn is None or self._torn.step > step:
            return None
        torn, self._torn = self._torn, None
        return self._averager.sample.describe_difference(torn)

    def _refuse_second(self, other: Optimizer, *_: Any) -> None:
        """Refuses the step of another optimizer over our parameters."""
        ours = self.optimizer.optimizer
        # A step of some parameters runs on a copy with the same state; a wrapper may step what it holds.
        if other.state is ours.state or any(other is value for value in vars(ours).values()):
            return
        stepped = {id(one) for group in other.param_groups for one in group["params"]}
        for name, parameter in zip(self._names, self.optimizer.parameters, strict=True):
            if id(parameter) in stepped:
                raise ConfigError(
                    f"{name}: expected steps by swift.undoable's {type(ours).__name__} alone, got one by "
                    f"another {type(other).__name__}, which is not undone or sent to a newcomer; give all "
                    f"parameters to one optimizer, in groups of their own settings"
                )

    def _remove_guard(self) -> None:
        if self._guard is not None:
            self._guard.remove()

    def _is_left_out(self) -> bool:
        """Whether the step function means to change nothing, as GradScaler does of infinite gradients."""
        grads = [one.grad for one in self.optimizer.parameters if one.grad is not None]
        is_finite = all(bool(torch.isfinite(local(grad)).all()) for grad in grads)
        averager = self._averager
        is_theirs = averager.is_loss_divided is False and averager.is_averaged
        return is_theirs and not (grads and is_finite)

    def _list_parameters(self) -> dict[str, Tensor]:
        """All parameters by name, the frozen ones too, as this rank has them."""
        trained = dict(zip(self._names, self.optimizer.parameters, strict=True))
        named = {**trained, **dict(self.module.named_parameters())}
        return {name: local(one) for name, one in named.items()}

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


def _is_due(num_steps: int, every: int) -> bool:
    """Whether parameters are compared: behind steps 1, 2, 4, ... of a world, and behind every so many."""
    is_power_of_two = num_steps & (num_steps - 1) == 0
    return num_steps % every == 0 or (num_steps < every and is_power_of_two)


def _joined(group: Group | None) -> Group:
    if group is None:
        raise ConfigError(
            "expected backward inside run.loop, got it before; call run.loop(step_fn, trainable, ...)"
        )
    return group
