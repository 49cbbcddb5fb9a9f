"""An optimizer whose last step can be taken back, parameter by parameter."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import islice
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shared.errors import ConfigError, DataError
from swift.injection import reach
from swift.undo.adam_step import AdamStep, has_fused_step, run_adam_steps
from swift.undo.applied_step import AppliedStep, SteppedWithoutGradient, UndoMemory
from swift.undo.copied_step import CopiedStep
from swift.undo.inverses import obstacle
from swift.undo.inverted_step import InvertedStep, has_inverse
from swift.undo.torch_step import Group, local, new_state, numbers, state_tensors, step_only
from swift.undo.trial import find_coupling

__all__ = ["Mode", "Undoable", "undoable"]

log = logging.getLogger(__name__)

Mode = Literal["exact", "arith", "commit"]

# Steps back that "arith" knows the hyperparameters of.
_MEMORY = 32


def undoable(optimizer: Optimizer, mode: Mode = "exact") -> "Undoable":
    """Wrap a torch optimizer so that its last step can be undone.

    Adam and AdamW (float32 and bfloat16, without amsgrad) then step by our fused kernel in every
    mode: torch's formulas, rounded within a few units in the last place of torch's own forms, which
    differ among themselves as well. Everything else steps by torch's own code, to the bit.

    An optimizer that is not torch's is tried on small parameters first. Where its step of one parameter
    depends on others, as by a norm of all gradients, all parameters are stepped at once.

    `optimizer.step()` of the torch optimizer does the same as that of what is returned.

    Args:
        optimizer: Any torch optimizer that steps from gradients, with state in its state and groups.
        mode: "exact" restores every bit: SGD, Adam, AdamW, RMSprop and Adagrad by the step's
            inverse and its error in units in the last place, one byte a value; every other
            optimizer, and values of other types than float32 and bfloat16, by copies of what the
            step changes, which one log line says. "arith" is the published arithmetic: no memory,
            right up to rounding. "commit" keeps nothing and cannot undo: the ranks vote before they
            update.

    Raises:
        ConfigError: The mode is unknown; the optimizer needs a closure, is differentiable or has
            hooks on its step, or keeps state that cannot be undone or sent to a peer; or the mode is
            "arith" and a group's step has no inverse (the message names the group).
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"expected mode 'exact', 'arith' or 'commit', got {mode!r}")
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "expected an optimizer that steps from gradients, got LBFGS, which calls a closure "
            "several times a step: use another optimizer"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ConfigError(
            f"expected {name} without hooks on its step, which would run once a parameter: remove "
            "them, or call them around the step yourself"
        )
    for place, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigError(
                f"expected differentiable=False, got True in group {place} of {name}: a step that "
                "autograd records cannot be undone in place"
            )
        reason = obstacle(optimizer, numbers(group))
        dtypes = {parameter.dtype for parameter in group["params"]} - {torch.float32}
        if reason is None and dtypes:
            reason = f"{dtypes.pop()} loses more in a step than arithmetic restores"
        if mode == "arith" and reason is not None:
            raise ConfigError(
                f"expected steps that arithmetic can undo, got group {place} of {name}, where {reason}: "
                "use mode='exact'"
            )
    coupling = find_coupling(optimizer)
    if coupling is not None:
        log.info("%s steps all parameters at once: %s", name, coupling)
    return Undoable(optimizer, mode, is_coupled=coupling is not None)


class Undoable:
    """Steps parameters and takes their last step back; made by `undoable`.

    Steps of different parameters may run in different threads.

    Attributes:
        optimizer: The torch optimizer. Its state stays under torch's keys, so that torch can resume
            from it.
        mode: "exact", "arith" or "commit".
        marks: Steps applied, by parameter in the optimizer's order. A parameter without gradient
            passes a step unchanged, and its mark counts it.
        is_coupled: Whether parameters change each other's steps, so that all are stepped at once.
    """

    def __init__(self, optimizer: Optimizer, mode: Mode, *, is_coupled: bool = False) -> None:
        self.optimizer, self.mode, self.is_coupled = optimizer, mode, is_coupled
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.marks = [0] * len(self._parameters)
        depth = _MEMORY if mode == "arith" else 1
        self._applied: list[deque[AppliedStep]] = [deque(maxlen=depth) for _ in self.marks]
        self._buffers: list[UndoMemory | None] = [None] * len(self.marks)
        # Parameters with state from the start: a checkpoint's, or Adagrad's.
        self._begun = {i for i, p in enumerate(self._parameters) if optimizer.state.get(p)}
        self._told_of_copies = False
        # Values of groups from before the last step, where that has changed them.
        self._group_values: list[Group] = []
        self._take_step: Callable[[], None] = lambda: self.update(range(len(self.marks)))
        self._take_over()

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters, in the optimizer's order."""
        return list(self._parameters)

    @property
    def param_groups(self) -> list[Group]:
        """The optimizer's groups, as schedulers, clipping and GradScaler read them."""
        return self.optimizer.param_groups

    @property
    def undo_bytes(self) -> int:
        """Bytes held for undoing, gradients aside: they live until the next step anyway."""
        return sum(buffers.num_bytes for buffers in self._buffers if buffers is not None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set every gradient to None, or to new zeros; undoing keeps the old ones until `confirm`."""
        for parameter in self._parameters:
            is_kept = parameter.grad is None or set_to_none
            parameter.grad = None if is_kept else torch.zeros_like(parameter.grad)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters from their gradients and advance all marks; errors as `update`.

        Args:
            closure: Called first, to compute the gradients.

        Returns:
            The closure's result; None without one.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._take_step()
        return result

    def hand_over_steps(self, take_step: Callable[[], None]) -> None:
        """Make `step` call a function that averages gradients over ranks, and then `update`."""
        self._take_step = take_step

    @torch.no_grad()
    def update(self, indices: Sequence[int]) -> None:
        """Step exactly these parameters, with the hyperparameters of now; advance their marks.

        Args:
            indices: Places in `parameters`.

        Raises:
            ConfigError: Parameters were added to the optimizer since it was wrapped; or it steps all
                parameters at once, and these are some.
            DataError: In "arith", a gradient has no inverse (it is sparse, or its type is not that
                of the parameter); nothing is stepped then.
        """
        # Schedulers warn where no step of torch's was seen before theirs.
        optimizer: Any = self.optimizer
        optimizer._opt_called = True
        if self.is_coupled:
            self._step_whole(indices)
            return
        work = list(self._by_group(indices))
        if self.mode == "arith":
            for group, members in work:
                self._refuse_without_inverse(group, members)
        for group, members in work:
            if self.mode == "commit":
                self._step_for_good(group, members)
            else:
                self._step(group, members)
        reach("mark")
        for index in indices:
            self.marks[index] += 1

    def undo(self, grads: Sequence[Tensor | None] | None = None) -> None:
        """Take back the last step of all parameters.

        Args:
            grads: In "arith" only: the gradients of the step to undo, one a parameter in the
                optimizer's order, to go a further step back than the last.

        Raises:
            ConfigError: The mode cannot undo, or takes no gradients.
            DataError: As for `undo_only`; or `grads` do not fit the parameters.
        """
        if grads is None:
            self.undo_only(range(len(self.marks)))
            return
        if self.mode != "arith":
            raise ConfigError(
                f"expected gradients in mode 'arith' only, got them in {self.mode!r}: call undo() "
                "without them"
            )
        given = [None if grad is None else tuple(grad.shape) for grad in grads]
        shapes = [tuple(parameter.shape) for parameter in self._parameters]
        if len(given) != len(shapes) or any(
            shape not in (None, own) for shape, own in zip(given, shapes, strict=True)
        ):
            raise DataError(
                f"expected a gradient for each parameter, of shapes {shapes}, got {given}: give them "
                "in the optimizer's order"
            )
        self._take_back(range(len(self.marks)), grads)

    def undo_only(self, indices: Sequence[int]) -> None:
        """Take back the last step of exactly these parameters, if any; in "exact" every bit is restored.

        A parameter whose first step is undone has no state afterwards, as before it.

        Raises:
            ConfigError: The mode is "commit".
            DataError: A parameter has no step to undo (confirmed, undone already, never stepped),
                or its gradient or state was changed in place since; nothing is undone then. In
                "arith", a value came out infinite or NaN: fetch the parameter.
        """
        if indices:
            self._take_back(indices, None)

    def confirm(self) -> None:
        """All ranks have the step: let go what undoing it needs; buffers stay for the next."""
        for steps in self._applied:
            steps.clear()
        self._group_values = []

    def state_of(self, index: int) -> dict[str, Tensor]:
        """What a peer needs to continue parameter `index`: "param", then torch's state tensors.

        The tensors are the live ones, without autograd; of a DTensor its local part. What is no tensor
        goes by `swift.undo.torch_step.plain_values`.
        """
        return state_tensors(self.optimizer, self._parameters[index])

    @torch.no_grad()
    def prepare(self, index: int) -> dict[str, Tensor]:
        """Make torch's state of a parameter that never stepped, to be filled by a transfer.

        Returns:
            `state_of(index)`, with arbitrary values in the state made here.
        """
        parameter = self._parameters[index]
        if not self.optimizer.state.get(parameter) and (state := self._new_state(index)):
            self.optimizer.state[parameter] = state
        return self.state_of(index)

    @torch.no_grad()
    def allocate(self, index: int) -> dict[str, Tensor]:
        """As `prepare`, in contiguous memory of its own: parameter and state stay as they are."""
        parameter = self._parameters[index]
        state = self.optimizer.state.get(parameter) or self._new_state(index)
        tensors = {"param": parameter, **state}
        return {
            name: torch.empty_like(local(one), memory_format=torch.contiguous_format)
            for name, one in tensors.items()
            if isinstance(one, Tensor)
        }

    def rebind(self, parameters: Sequence[Parameter], states: Sequence[dict[str, Any]]) -> None:
        """Step other parameters from now on, as many and in the same order; marks stay.

        What undoing the last step needs is let go.

        Args:
            parameters: In the optimizer's order.
            states: Torch's state of each; empty where it has none.
        """
        self.confirm()
        self._parameters = list(parameters)
        ordered = iter(parameters)
        for group in self.optimizer.param_groups:
            group["params"] = list(islice(ordered, len(group["params"])))
        self.optimizer.state.clear()
        for parameter, state in zip(parameters, states, strict=True):
            if state:
                self.optimizer.state[parameter] = state

    def mark(self, index: int, steps: int) -> None:
        """Say that parameter `index` has had `steps` steps; its last one cannot be undone.

        With 0, state that torch makes in a first step is removed.
        """
        self.marks[index] = steps
        self._applied[index].clear()
        if steps == 0 and index not in self._begun:
            self.optimizer.state.pop(self._parameters[index], None)

    def _take_over(self) -> None:
        """Makes torch's optimizer step through this one, whoever calls it."""
        optimizer: Any = self.optimizer

        # Wrapped, as schedulers note on the method that they have seen it.
        @wraps(optimizer.step)
        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        # GradScaler leaves unscaling to fused optimizers that say so; ours takes unscaled gradients.
        vars(optimizer).update(step=MethodType(step, optimizer), _step_supports_amp_scaling=False)

    def _step_whole(self, indices: Sequence[int]) -> None:
        if len(indices) != len(self.marks):
            raise ConfigError(
                f"expected a step of all {len(self.marks)} parameters at once, got one of {len(indices)}: "
                f"{type(self.optimizer).__name__} cannot step some of them"
            )
        steps: list[AppliedStep] = []
        for group, members in self._by_group(indices):
            for index in members if self.mode == "exact" else ():
                steps.append(self._plan_copied(group, index))
        before = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        type(self.optimizer).step(self.optimizer)
        self._group_values = [
            {name: value for name, value in old.items() if group[name] is not value}
            for old, group in zip(before, self.param_groups, strict=True)
        ]
        for step in steps:
            step.seal(exact=True)
        reach("mark")
        self.marks = [mark + 1 for mark in self.marks]

    def _plan_copied(self, group: Group, index: int) -> AppliedStep:
        parameter, buffers = self._parameters[index], self._buffers[index]
        for before in self._applied[index]:
            before.grad = None
        step: AppliedStep
        if parameter.grad is None:
            step = SteppedWithoutGradient(self.optimizer, group, parameter, buffers)
        else:
            step = copied = CopiedStep(self.optimizer, group, parameter, buffers)
            copied.copy()
        self._buffers[index] = step.buffers
        self._applied[index].append(step)
        return step

    def _new_state(self, index: int) -> dict[str, Any]:
        group = next(group for group, _ in self._by_group([index]))
        return new_state(self.optimizer, group, self._parameters[index])

    def _by_group(self, indices: Sequence[int]) -> Iterator[tuple[Group, list[int]]]:
        wanted, first = sorted(indices), 0
        for group in self.optimizer.param_groups:
            end = first + len(group["params"])
            members = [index for index in wanted if first <= index < end]
            if members:
                yield group, members
            first = end
        if first != len(self.marks):
            raise ConfigError(
                f"expected the {len(self.marks)} parameters that were wrapped, got {first}: wrap the "
                "optimizer anew after adding parameters"
            )

    def _refuse_without_inverse(self, group: Group, members: list[int]) -> None:
        for index in members:
            parameter = self._parameters[index]
            if not (
                has_fused_step(self.optimizer, group, parameter)
                or has_inverse(self.optimizer, parameter)
            ):
                raise DataError(
                    f"expected a dense float32 gradient in mode 'arith', got {_describe(parameter.grad)} "
                    f"for parameter {index}: use mode='exact'"
                )

    def _step_for_good(self, group: Group, members: list[int]) -> None:
        having = [p for p in map(self._parameters.__getitem__, members) if p.grad is not None]
        fused = [p for p in having if has_fused_step(self.optimizer, group, p)]
        run_adam_steps([AdamStep(self.optimizer, group, p, exact=False) for p in fused])
        others = [p for p in having if not any(p is one for one in fused)]
        if others:
            step_only(self.optimizer, group, others)

    def _step(self, group: Group, members: list[int]) -> None:
        steps = []
        for index in members:
            for before in self._applied[index]:
                before.grad = None
            step = self._plan(group, index)
            if not isinstance(step, AdamStep):
                step.run()
            self._buffers[index] = step.buffers
            self._applied[index].append(step)
            steps.append(step)
        run_adam_steps([step for step in steps if isinstance(step, AdamStep)])
        for step in steps:
            step.seal(exact=self.mode == "exact")

    def _plan(self, group: Group, index: int) -> AppliedStep:
        parameter, buffers, exact = (
            self._parameters[index],
            self._buffers[index],
            self.mode == "exact",
        )
        if parameter.grad is None:
            return SteppedWithoutGradient(self.optimizer, group, parameter, buffers)
        if has_fused_step(self.optimizer, group, parameter):
            return AdamStep(self.optimizer, group, parameter, exact=exact, buffers=buffers)
        if has_inverse(self.optimizer, parameter):
            return InvertedStep(self.optimizer, group, parameter, exact=exact, buffers=buffers)
        if not self._told_of_copies:
            self._told_of_copies = True
            log.warning(
                "%s of parameter %d, %s, is undone by copies of the parameter and its state, not by "
                "its inverse; so are others like it",
                type(self.optimizer).__name__,
                index,
                _describe(parameter),
            )
        return CopiedStep(self.optimizer, group, parameter, buffers)

    @torch.no_grad()
    def _take_back(self, indices: Sequence[int], grads: Sequence[Tensor | None] | None) -> None:
        if self.mode == "commit":
            raise ConfigError(
                "expected mode 'exact' or 'arith' to undo a step, got 'commit', which keeps nothing: "
                "vote before updating, or wrap with mode='exact'"
            )
        work: list[tuple[int, AppliedStep, Tensor | None]] = []
        for index in indices:
            applied = self._applied[index]
            if not applied:
                raise DataError(
                    f"expected a step of parameter {index} to undo, got none (at version "
                    f"{self.marks[index]}; a step can be undone once, until it is confirmed, and not "
                    "if it was fetched): fetch the parameter or load a checkpoint"
                )
            grad = applied[-1].grad if grads is None else grads[index]
            reason = applied[-1].why_not(grad)
            if reason is not None:
                raise DataError(
                    f"expected parameter {index} as its last step left it, with the step's gradient, "
                    f"but {reason}: fetch the parameter or load a checkpoint"
                )
            work.append((index, applied[-1], grad))
        for index, step, grad in work:
            step.undo(grad)
            self._applied[index].pop()
            self.marks[index] -= 1
        for group, values in zip(self.param_groups, self._group_values, strict=False):
            group.update(values)
        self._group_values = []
        if self.mode == "arith":
            self._tell_of_zeros([step for _, step, _ in work])
            for index, _, _ in work:
                self._expect_finite(index)

    def _tell_of_zeros(self, undone: Sequence[AppliedStep]) -> None:
        num_below_zero = sum(step.num_below_zero for step in undone)
        if num_below_zero:
            log.warning(
                "%d squared averages of %s came out below 0 as arithmetic undid them, and are 0 in place "
                "of what they were; mode='exact' restores them",
                num_below_zero,
                type(self.optimizer).__name__,
            )

    def _expect_finite(self, index: int) -> None:
        for name, tensor in state_tensors(self.optimizer, self._parameters[index]).items():
            if not bool(tensor.isfinite().all()):
                raise DataError(
                    f"expected finite values after undoing in 'arith', got {name!r} of parameter "
                    f"{index} with {int((~tensor.isfinite()).sum())} infinite or NaN: fetch the "
                    "parameter from another rank, resume the run from its last checkpoint, or use "
                    "mode='exact', which restores such values too"
                )


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{tensor.dtype} {list(tensor.shape)} ({tensor.layout})"
