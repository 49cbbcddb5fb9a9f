"""Divides the experts of a Hugging Face model over ranks.

A model's configuration says which modules hold experts and which of their weights are stacked by
expert (transformers' `base_model_ep_plan`). Those become DTensors, of which each rank keeps the rows
of its experts; everything else stays whole on every rank. transformers' own exchange branches on how
many rows arrive, so a compiler cannot capture it: `lancet.moe.dispatch` takes its turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from lancet.moe.dispatch import TokenDispatch, mark_end, mark_start
from lancet.moe.gradients import average_gradients, local_rows
from lancet.moe.layer import ExpertLayers
from shared.comms import Group, all_gather, broadcast
from shared.errors import ConfigError
from shared.kernels.digest import digest

__all__ = ["group_of", "parallelize"]

# By name of the process group, the ranks over which experts have been divided.
_groups: dict[str, Group] = {}
# The whole weights whose rows have replaced them; an optimizer that still has one trains nothing.
_replaced = WeakTensorKeyDictionary()


def parallelize(model: nn.Module, group: Group) -> nn.Module:
    """Divides a model's experts over the ranks of a group, in place.

    The model must hold the same weights on every rank; if it does not, all take rank 0's. Afterwards
    `model(...)` takes each rank's own batch, and `backward()` leaves in each parameter the gradient
    of the mean of the ranks' losses. Make optimizers after this call: experts' weights are new
    parameters.

    Args:
        model: a transformers model whose plan names experts, or a module that contains one.
        group: ranks; the experts are divided by rows, rank r gets the r-th part.

    Returns:
        The model.

    Raises:
        ConfigError: no plan names experts, their number does not divide by the ranks, or they are
            quantised, shared with other modules, or divided already; nothing is changed.
    """
    group.checked()
    layers = _find_experts(model)
    for name, (module, weights) in layers.items():
        _check(name, module, weights, group)
    _equalize(model, group)
    for name, (module, weights) in layers.items():
        _divide(name, module, weights, group)
    _groups[group.checked().group_name] = group
    for part in model.modules():
        # transformers hooks outputs as routers' logits under a lock, which no compiler captures.
        if isinstance(part, PreTrainedModel) and part.base_model is part:
            maybe_install_capturing_hooks(part)
    average_gradients(_list_replicated(model), group)
    model.forward = _AveragedForward(model)
    _watch_optimizers()
    return model


class _AveragedForward:
    """A model's forward, which also averages gradients of parameters added or unfrozen later."""

    def __init__(self, model: nn.Module) -> None:
        # A copy of the model copies these along: its forward runs the copy.
        self._model, self._compute = model, model.forward
        update_wrapper(self, self._compute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # a compiled graph averages by itself
            average_gradients(_list_replicated(self._model), group_of(self._model))
        return self._compute(*args, **kwargs)


def group_of(model: nn.Module) -> Group:
    """The ranks over which `parallelize` has divided a model, compiled or not.

    Raises:
        ConfigError: it has not been divided.
    """
    for weight in model.parameters():
        if isinstance(weight, DTensor):
            name = weight.device_mesh.get_group().group_name
            if name in _groups:
                return _groups[name]
    raise ConfigError(
        f"expected a model whose experts are divided over ranks, got a {type(model).__name__} that is "
        f"whole; call lancet.parallelize(model, group) first"
    )


def _find_experts(model: nn.Module) -> dict[str, tuple[nn.Module, list[str]]]:
    """By name, each module of experts and the names of its weights that are stacked by expert."""
    layers: dict[str, tuple[nn.Module, list[str]]] = {}
    for prefix, part in model.named_modules():
        if isinstance(part, ExpertLayers):
            layers[prefix] = part, [key for key, _ in part.named_parameters()]
        elif isinstance(part, PreTrainedModel) and part.ep_plan:
            for name, experts in _list_planned(part).items():
                layers.setdefault(f"{prefix}.{name}".removeprefix("."), experts)
    if not layers:
        raise ConfigError(
            f"expected a model whose configuration names its experts (base_model_ep_plan with "
            f"ep_dispatch_experts), got a {type(model).__name__} with none; use lancet.moe.Layer for "
            f"other models"
        )
    return layers


def _list_planned(model: PreTrainedModel) -> dict[str, tuple[nn.Module, list[str]]]:
    """Experts that a transformers model's plan names; as `_find_experts`."""
    plan = model.ep_plan
    return {
        name: (
            module,
            [
                key
                for key, _ in module.named_parameters(recurse=False)
                if plan.get(_with_wildcards(f"{name}.{key}")) == "grouped_gemm"
            ],
        )
        for name, module in model.named_modules()
        if plan.get(_with_wildcards(name)) == "ep_dispatch_experts"
    }


def _with_wildcards(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _check(name: str, module: nn.Module, weights: list[str], group: Group) -> None:
    num_experts = getattr(module, "num_experts", None)
    if not weights or not isinstance(num_experts, int):
        raise ConfigError(
            f"{name}: expected experts with stacked weights and num_experts, got the parameters "
            f"{[key for key, _ in module.named_parameters()]}; load the model without quantisation "
            f"and adapters on experts"
        )
    if num_experts % group.world_size:
        raise ConfigError(
            f"{name}: expected a number of experts that divides by {group.world_size} ranks, got "
            f"{num_experts}; run on a number of ranks that divides it"
        )
    for key in weights:
        weight = module.get_parameter(key)
        if isinstance(weight, DTensor):
            raise ConfigError(
                f"{name}.{key}: expected a whole weight, got a DTensor {weight.placements}; call "
                f"lancet.parallelize once, on a model that neither FSDP2 nor transformers has divided"
            )
        if not weight.is_floating_point() or weight.shape[0] != num_experts:
            raise ConfigError(
                f"{name}.{key}: expected floating-point weights of {num_experts} experts, got "
                f"{weight.dtype} of shape {list(weight.shape)}; load the model without quantisation"
            )


def _list_replicated(model: nn.Module) -> Iterator[nn.Parameter]:
    return (weight for weight in model.parameters() if not isinstance(weight, DTensor))


def _equalize(model: nn.Module, group: Group) -> None:
    """Copies rank 0's weights and buffers to ranks that hold others."""
    tensors = [*model.parameters(), *model.buffers()]
    # A digest has 64 bits, and int64 is what every backend moves.
    own = torch.tensor([digest(tensors) - 2**63], device=group.device)
    if any(bool(other != own) for other in all_gather(group, own)):
        for tensor in tensors:
            broadcast(group, tensor.detach(), 0)


def _divide(name: str, module: Any, weights: list[str], group: Group) -> None:
    size = group.world_size
    num_local = module.num_experts // size
    for key in weights:
        whole = module.get_parameter(key)
        rows = whole.detach().chunk(size)[group.rank].clone()
        part = nn.Parameter(group.shard_rows(rows, whole.detach()), whole.requires_grad)
        setattr(module, key, part)
        _replaced[whole] = f"{name}.{key}"
    module.num_experts = num_local
    module.forward = _DividedForward(module, weights, TokenDispatch(group, num_local, name), size)


class _DividedForward:
    """The forward of experts that are divided over ranks."""

    def __init__(
        self, module: nn.Module, weights: list[str], dispatch: TokenDispatch, world_size: int
    ) -> None:
        self._dispatch = dispatch
        # The module as its own forward sees it: with this rank's rows in place of DTensors. A
        # compiler captures no change of the module itself inside a checkpointed layer.
        kind = type(module)
        view = object.__new__(type(kind.__name__, (kind,), _read_rows(weights, world_size)))
        object.__setattr__(view, "__dict__", module.__dict__)
        self._view, self._compute = view, kind.forward

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        hidden, top_k_index, top_k_weights = mark_start(hidden_states, top_k_index, top_k_weights)
        rows = self._dispatch.send(hidden, top_k_index)
        ids = rows.expert_ids.unsqueeze(-1)
        # Weights of the choices are applied where the tokens come from.
        ones = torch.ones_like(ids, dtype=rows.values.dtype)
        results = self._compute(self._view, rows.values, ids, ones)
        sums = self._dispatch.bring_back(results, rows, top_k_weights).to(hidden_states.dtype)
        return mark_end(sums)


def _read_rows(weights: list[str], world_size: int) -> dict[str, property]:
    def make(key: str) -> property:
        return property(lambda module: local_rows(module._parameters[key], world_size))

    return {key: make(key) for key in weights}


def _watch_optimizers() -> None:
    global _watcher
    if _watcher is None:
        _watcher = register_optimizer_step_pre_hook(_refuse_replaced)


_watcher: Any = None


def _refuse_replaced(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _replaced:
                raise ConfigError(
                    f"expected an optimizer of the divided model's parameters, got a "
                    f"{type(optimizer).__name__} with the whole {_replaced[parameter]}, which the "
                    f"model no longer has; make the optimizer after lancet.parallelize"
                )
