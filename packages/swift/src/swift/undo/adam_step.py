"""Steps of Adam and AdamW by our fused kernel, with torch's state under torch's keys."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shared.kernels import adam
from shared.kernels.adam.factors import factors
from swift.undo.applied_step import AppliedStep, UndoMemory
from swift.undo.torch_step import Group, local, new_state

__all__ = ["AdamStep", "has_fused_step", "run_adam_steps"]

_DTYPES = (torch.float32, torch.bfloat16)


def has_fused_step(optimizer: Optimizer, group: Group, parameter: Parameter) -> bool:
    """Whether the kernel can step this parameter: dense float32 or bfloat16, without amsgrad."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or group["amsgrad"]:
        return False
    memory = local(parameter)
    state = optimizer.state.get(parameter, {})
    averages = [local(state[name]) for name in ("exp_avg", "exp_avg_sq") if name in state]
    like = (memory.dtype, memory.stride(), memory.device)
    return (
        memory.dtype in _DTYPES
        and memory.device.type in ("cpu", "cuda")
        # Without gaps and overlaps: such strides are kept by a copy.
        and torch.empty_like(memory, device="meta").stride() == memory.stride()
        and all((one.dtype, one.stride(), one.device) == like for one in averages)
        and (parameter.grad is None or _is_plain(parameter.grad, memory))
    )


def _is_plain(grad: Tensor, memory: Tensor) -> bool:
    return grad.layout == torch.strided and grad.dtype == memory.dtype


class AdamStep(AppliedStep):
    """Adam's step of one parameter; `run_adam_steps` runs many at once."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: Group,
        parameter: Parameter,
        buffers: UndoMemory | None = None,
        *,
        exact: bool,
    ) -> None:
        super().__init__(optimizer, group, parameter)
        if self.first:
            state = new_state(optimizer, group, parameter)
            state["step"].zero_()
            optimizer.state[parameter] = state
        state = optimizer.state[parameter]
        self._count: Tensor = state["step"]
        self._memory = local(parameter)
        self._averages = [local(state["exp_avg"]), local(state["exp_avg_sq"])]
        if self.grad is not None:
            self.grad = _laid_out_like(self._memory, self.grad)
        self.number = int(self._count) + 1
        self.buffers = self.residual = None
        if exact:
            held = isinstance(buffers, adam.Residual) and buffers.fits(self._memory)
            self.residual = buffers if held else adam.new_residual(_flat(self._memory))
            self.buffers = self.residual

    @property
    def kernel_hyper(self) -> adam.Hyper:
        """Hyperparameters as the kernel takes them."""
        beta1, beta2 = self.hyper["betas"]
        return adam.Hyper(
            lr=self.hyper["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=self.hyper["eps"],
            weight_decay=self.hyper["weight_decay"],
            decoupled=self.hyper["decoupled_weight_decay"],
            maximize=self.hyper["maximize"],
        )

    def tensors(self, grad: Tensor) -> adam.AdamTensors:
        """Flat views of what the step reads and writes."""
        memory = (self._memory, _laid_out_like(self._memory, grad), *self._averages)
        return adam.AdamTensors(*(_flat(tensor) for tensor in memory))

    def count(self, steps: int) -> None:
        """Add to torch's count of steps; tell autograd that the kernel wrote to the tensors."""
        self._count += steps
        torch.autograd.graph.increment_version([self._memory, *self._averages])

    def restore(self, grad: Tensor) -> None:
        """See `AppliedStep`."""
        tensors = self.tensors(grad)
        if self.residual is None:
            after_sq = tensors.exp_avg_sq.clone()
            adam.undo([tensors], [self.number], self.kernel_hyper)
            self.num_below_zero = self._count_below_zero(tensors, after_sq)
        else:
            adam.undo([tensors], [self.number], self.kernel_hyper, [self.residual])
        self.count(-1)

    def _count_below_zero(self, undone: adam.AdamTensors, after_sq: Tensor) -> int:
        """Values of `exp_avg_sq` that the inverse takes below 0, where the kernel holds them."""
        f = factors(self.kernel_hyper, self.number)
        g = f.sign * undone.grad
        g = g + f.l2 * undone.param if f.l2 else g
        return int((after_sq - (f.take_sq * g) * g < 0).sum())


def run_adam_steps(steps: Sequence[AdamStep]) -> None:
    """Run prepared steps of one group by one call of the kernel."""
    if not steps:
        return
    residuals = [step.residual for step in steps if step.residual is not None]
    tensors = [step.tensors(step.grad) for step in steps if step.grad is not None]
    numbers = [step.number for step in steps]
    adam.step(tensors, numbers, steps[0].kernel_hyper, residuals or None)
    for step in steps:
        step.count(1)


def _laid_out_like(memory: Tensor, grad: Tensor) -> Tensor:
    return grad if grad.stride() == memory.stride() else torch.empty_like(memory).copy_(grad)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
