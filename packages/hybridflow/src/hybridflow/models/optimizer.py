"""Optimizer steps on a sharded decoder: reduction of gradients, their norm, AdamW, a schedule.

All gradients are views of one buffer, so that replicas reduce them in one message. A step whose
gradients are not finite changes nothing and is counted; several in a row raise an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hybridflow.models.decoder import Decoder
from hybridflow.models.pieces import local
from hybridflow.models.sharding import is_sharded
from shared.comms.collectives import all_reduce
from shared.comms.group import Group
from shared.errors import ConfigError, DivergenceError

__all__ = ["AdamW", "Optimizer"]

_SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Settings of AdamW and of its learning rate.

    Attributes:
        lr: learning rate after the warm-up.
        betas, eps, weight_decay: as in `torch.optim.AdamW`.
        max_grad_norm: norm to which larger gradients are scaled down; None: no clipping.
        schedule: "constant", or decay "linear" or "cosine" to 0 at `num_steps`.
        num_warmup_steps: optimizer steps over which the rate rises from 0.
        num_steps: length of the schedule in optimizer steps.
        max_skipped: most steps in a row that may be skipped because gradients are not finite.

    Raises:
        ConfigError: the schedule is unknown or has no length, or a number is below 0.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    schedule: str = "constant"
    num_warmup_steps: int = 0
    num_steps: int | None = None
    max_skipped: int = 5

    def __post_init__(self) -> None:
        if self.schedule not in _SCHEDULES:
            raise ConfigError(
                f"optimizer.schedule: expected one of {', '.join(_SCHEDULES)}, got "
                f"{self.schedule!r}"
            )
        if self.schedule != "constant" and self.num_steps is None:
            raise ConfigError(
                f"optimizer.num_steps: a {self.schedule} schedule needs a length, got None; set it"
            )
        if not self.lr >= 0 or self.num_warmup_steps < 0:
            raise ConfigError(
                f"optimizer: expected lr and num_warmup_steps of 0 or more, got {self.lr} and "
                f"{self.num_warmup_steps}"
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.num_warmup_steps:
            return self.lr * (step + 1) / self.num_warmup_steps
        if self.num_steps is None or self.schedule == "constant":
            return self.lr
        length = max(1, self.num_steps - self.num_warmup_steps)
        share = min(1.0, (step - self.num_warmup_steps) / length)
        if self.schedule == "linear":
            return self.lr * (1 - share)
        return self.lr * 0.5 * (1 + math.cos(math.pi * share))


class Optimizer:
    """AdamW over one rank's part of a decoder.

    Attributes:
        num_steps: number of steps taken.
        num_skipped: how many of those were skipped because gradients were not finite.
    """

    def __init__(
        self, model: Decoder, settings: AdamW, dp: Group | None = None, pp: Group | None = None
    ) -> None:
        """Allocates gradients and state.

        Args:
            model: the model to train.
            settings: of AdamW.
            dp: the replicas of this rank's part; None if there is only one.
            pp: the ranks of this shard's pipeline stages; None if there is one stage.
        """
        self.model, self.settings, self._dp, self._pp = model, settings, dp, pp
        self._named = dict(model.named_parameters())
        self._parameters = list(self._named.values())
        self._is_sharded = is_sharded(model)
        self._grads = torch.zeros(0) if self._is_sharded else _one_buffer(self._parameters)
        self._state: dict[str, dict[str, Tensor]] = {}
        self.num_steps = self.num_skipped = self._in_a_row = 0
        self._kv_twins, self._tied = self._twins(), self._tied_stages()

    def _twins(self) -> Group | None:
        """The ranks that hold the same key heads, if there are fewer heads than shards."""
        shard, config = self.model.shard, self.model.config
        copies = shard.num_shards // config.num_kv_heads
        if copies <= 1 or shard.group is None:
            return None
        start = shard.tp // copies * copies
        ranks = [shard.group.ranks[k] for k in range(start, start + copies)]
        return Group.of(ranks, members_only=True)

    def _tied_stages(self) -> Group | None:
        """The first and the last stage, if both hold the embedding."""
        shard, is_tied = self.model.shard, self.model.config.is_tied
        is_end = shard.is_first or shard.is_last
        if self._pp is None or not is_tied or not is_end or self.model.head_kind != "vocabulary":
            return None
        return Group.of([self._pp.ranks[0], self._pp.ranks[-1]], members_only=True)

    def zero_grad(self) -> None:
        """Sets gradients to zero."""
        if self._is_sharded:
            for parameter in self._parameters:
                parameter.grad = None
        self._grads.zero_()

    def _local_grad(self, name: str) -> tuple[Tensor, int]:
        """This rank's part of a gradient, and its first row."""
        grad = self._named[name].grad
        assert grad is not None, "a step follows a backward"
        if not self._is_sharded:
            return grad, 0
        assert self._dp is not None, "several replicas"
        return local(grad), self._dp.rank * -(-len(grad) // self._dp.world_size)

    def _kv_rows(self, name: str) -> Tensor:
        """The rows of keys and values in a fused gradient of queries, keys and values."""
        grad, start = self._local_grad(name)
        first = self.model.shard.num_heads * self.model.config.head_dim
        return grad[min(max(0, first - start), len(grad)) :]

    def step(self) -> dict[str, float]:
        """Sums gradients over replicas and takes a step; skips it if they are not finite.

        Returns:
            "grad_norm", "lr", and "is_skipped" as 0 or 1.

        Raises:
            DivergenceError: if more steps in a row were skipped than `max_skipped`.
        """
        for name in self._named:
            leaf = name.rpartition(".")[2]
            if self._kv_twins is not None and leaf.startswith("qkv"):
                all_reduce(self._kv_twins, self._kv_rows(name))
            if self._tied is not None and leaf == "embedding":
                all_reduce(self._tied, self._local_grad(name)[0])
            if self.model.shard.group is not None and leaf in ("q_norm", "k_norm"):
                # Each shard has the gradient of its own heads only.
                all_reduce(self.model.shard.group, self._local_grad(name)[0])
        if self._dp is not None and not self._is_sharded:
            all_reduce(self._dp, self._grads)
        norm = float(self._norm())
        rate = self.settings.rate(self.num_steps)
        self.num_steps += 1
        is_finite = math.isfinite(norm)
        if is_finite:
            limit = self.settings.max_grad_norm
            if limit is not None and norm > limit:
                for grad in [self._grads] if not self._is_sharded else self._all_local():
                    grad.mul_(limit / (norm + 1e-6))
            self._adam(rate)
            self._in_a_row = 0
        else:
            self.num_skipped += 1
            self._in_a_row += 1
            if self._in_a_row > self.settings.max_skipped:
                raise DivergenceError(
                    f"step {self.num_steps}: expected finite gradients, got {norm} in "
                    f"{self._in_a_row} steps in a row, whose weights stay; lower the learning rate "
                    f"of {rate:g}, or look at rewards and log-probabilities"
                )
        return {"grad_norm": norm, "lr": rate, "is_skipped": float(not is_finite)}

    @torch.no_grad()
    def _adam(self, rate: float) -> None:
        states = [self.state_of(name) for name in self._named]
        beta1, beta2 = self.settings.betas
        # The function behind torch.optim.AdamW; the class would import torch's compiler, which
        # takes four seconds of every rank's start.
        adamw(
            [local(parameter.data) for parameter in self._parameters], self._all_local(),
            [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states],
            [], [state["step"] for state in states], fused=True, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=rate, weight_decay=self.settings.weight_decay,
            eps=self.settings.eps,
        )  # fmt: skip

    def _norm(self) -> Tensor:
        """Norm of the whole model's gradients; values that several shards hold count once."""
        shard, config = self.model.shard, self.model.config
        dp = self._dp if self._is_sharded else None
        if shard.group is None and self._pp is None and dp is None:
            wide = torch.promote_types(self._grads.dtype, torch.float32)
            return torch.linalg.vector_norm(self._grads, dtype=wide)
        copies = max(1, shard.num_shards // config.num_kv_heads)
        total = torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)
        for name in self._named:
            square = self._local_grad(name)[0].double().square().sum()
            leaf = name.rpartition(".")[2]
            if leaf.endswith("norm") or (leaf == "head" and self.model.head_kind == "scalar"):
                square /= shard.num_shards
            elif leaf.startswith("qkv") and copies > 1:
                square -= self._kv_rows(name).double().square().sum() * (1 - 1 / copies)
            elif leaf == "embedding" and self._tied is not None:
                square /= 2
            total += square
        for group in (shard.group, self._pp, dp):
            if group is not None:
                all_reduce(group, total)
        return total.sqrt()

    def _all_local(self) -> list[Tensor]:
        return [self._local_grad(name)[0] for name in self._named]

    def state_of(self, name: str) -> dict[str, Tensor]:
        """AdamW's state of a parameter by torch's names, without a copy; allocated if missing."""
        if name not in self._state:
            held = local(self._named[name].data)
            self._state[name] = {
                "step": torch.zeros((), dtype=torch.float32, device=held.device),
                "exp_avg": torch.zeros_like(held),
                "exp_avg_sq": torch.zeros_like(held),
            }
        return self._state[name]

    @property
    def counters(self) -> dict[str, int]:
        """Counters that a resumed run needs besides AdamW's state."""
        return {"num_steps": self.num_steps, "num_skipped": self.num_skipped,
                "num_skipped_in_a_row": self._in_a_row}  # fmt: skip

    def resume(self, counters: dict[str, int]) -> None:
        """Restores counters; AdamW's state must have been restored before."""
        self.num_steps, self.num_skipped = counters["num_steps"], counters["num_skipped"]
        self._in_a_row = counters["num_skipped_in_a_row"]


def _one_buffer(parameters: list[torch.nn.Parameter]) -> Tensor:
    """Sets the parameters' gradients to views of one tensor, and returns that."""
    total = sum(parameter.numel() for parameter in parameters)
    grads = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
    at = 0
    for parameter in parameters:
        parameter.grad = grads[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    return grads
