"""Merges the parts' states of the seeds' rows, with gradients, and counts what travels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from heta.combine import Merge
from heta.training.agreement import check_same
from shared.comms import Group, all_reduce
from shared.comms.merging import merge_all_reduce
from shared.kernels.digest import digest
from shared.kernels.philox import stream_key

__all__ = ["PartExchange", "Wire", "choose_host_group"]

Wire = Literal["float32", "bfloat16", "int8"]


class PartExchange:
    """The exchange of one rank with the same replica of the other parts.

    Attributes:
        group: one rank of each part, in the parts' order.
        wire: "float32", "bfloat16" or "int8": the form in which states travel.
        epoch, step: the training step, which names random draws and errors.

    Args:
        group: these ranks.
        wire: see above.
        seed: of random draws that all parts share.
        check_every: steps between comparisons of merged states; 0 for never.
        device: where the model lies; states travel from the group's own device.
    """

    def __init__(
        self,
        group: Group,
        wire: Wire,
        seed: int,
        check_every: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.group, self.wire = group, wire
        self._host_group = choose_host_group(group)
        self._device = torch.device(device)
        self._seed, self._check_every = seed, check_every
        self.epoch = self.step = 0
        self._digests: dict[str, int] = {}

    def begin(self, epoch: int, step: int) -> None:
        """Begins a step."""
        self.epoch, self.step = epoch, step
        self._digests = {}

    @property
    def _is_checked(self) -> bool:
        return self._check_every > 0 and self.step % self._check_every == 0

    def merge(self, number: int, merge: Merge, state: Any, previous: Tensor | None) -> Any:
        """Merges the states of all parts, and routes gradients to this part's own.

        Raises:
            CommError: a rank died, or the timeout passed.
        """
        local = _move(state, self.group.device)
        with self.group.ledger.phase("merge"):
            merged = merge_all_reduce(self.group, local, merge.merge, wire=self.wire)
        merged = _move(merged, self._device)
        if self._is_checked:
            tensors = [merged] if isinstance(merged, Tensor) else list(merged)
            self._digests[f"layer {number}"] = digest(tensors)
        routed = merge.route(state, merged)
        if previous is None or not previous.requires_grad:
            return routed
        # Every part's backward pass must reach the exchange of the layer below.
        if isinstance(routed, Tensor):
            return _Reach.apply(routed, previous)
        parts = list(routed)
        # Autograd follows floats only, and a state may hold whole numbers beside them.
        last = max(i for i, part in enumerate(parts) if part.is_floating_point())
        parts[last] = _Reach.apply(parts[last], previous)
        return type(state)(*parts)

    def share_gradient(self, number: int, rows: Tensor) -> Tensor:
        """Sums the gradient of merged rows over the parts, each of which read them."""
        if torch.is_grad_enabled() and not rows.requires_grad:
            # Nothing below is trained here, but the other parts wait for this one's gradient.
            rows = rows.detach().requires_grad_()
        return _SumGradient.apply(rows, self.group)

    @contextmanager
    def same_random(self, number: int) -> Iterator[None]:
        """Draws by a seed that all parts share; other draws go on as if there had been none."""
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            # Python's and torch's seeds are 63 bits wide.
            # Replicas have other seeds, and should not drop the same entries.
            replica = self.group.ranks[0]
            key = stream_key(self._seed, self.epoch, self.step, number, replica)
            torch.manual_seed(key >> 1)
            yield

    def check(self) -> None:
        """Compares 64-bit digests of what was merged since `begin`, in one message.

        Raises:
            CommError: merged rows differ; names the step and the ranks.
        """
        if self._digests:
            check_same(self._host_group, self._digests, self.step)


def choose_host_group(group: Group) -> Group:
    """Returns the group for tensors in the host's memory: itself, or one of its ranks beside NCCL's."""
    return group if group.device.type == "cpu" else Group.control(group.process_group, name="heta")


def _move(state: Any, device: torch.device) -> Any:
    """A state without a graph, on a device."""
    if isinstance(state, Tensor):
        return state.detach().to(device)
    return type(state)(*(tensor.detach().to(device) for tensor in state))


class _Reach(torch.autograd.Function):
    """Gives the first tensor; backward, the second gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, previous: Tensor) -> Tensor:
        ctx.zeros = torch.zeros_like(previous)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore
        return grad, ctx.zeros


class _SumGradient(torch.autograd.Function):
    """Gives the tensor; its gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore
        with ctx.group.ledger.phase("merge"):
            # A copy: autograd may hold the gradient elsewhere.
            own = grad.to(ctx.group.device, copy=True, memory_format=torch.contiguous_format)
            return all_reduce(ctx.group, own).to(grad.device), None
