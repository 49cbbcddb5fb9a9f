"""Checks that ranks hold parts of one plan, and that modules are what merging assumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from heta.graph.part import Part
from heta.graph.sampler import Batch
from heta.graph.schema import Relation, name_relation
from heta.nn.hetero_model import HeteroModel
from shared.comms import Group, all_gather_v
from shared.errors import ConfigError, DataError

__all__ = ["check_logits", "check_model", "check_modules", "check_ranks", "evaluating"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_ranks(part: Part, group: Group | None) -> None:
    """Checks that every rank holds the part that its number asks for, of one plan.

    Raises:
        ConfigError: the number of ranks does not fit the plan.
        DataError: a rank holds a part of another plan, or not the part of its number.
    """
    ranks = 1 if group is None else group.world_size
    if ranks % part.num_parts:
        raise ConfigError(
            f"expected a multiple of the plan's {part.num_parts} parts as ranks, got {ranks}; start as "
            f"many, or plan for {ranks} parts"
        )
    if part.strategy == "edge-cut" and ranks != part.num_hosts:
        raise ConfigError(
            f"expected one rank a host with a plan by edge-cut for {part.num_hosts} hosts, got {ranks} "
            f"ranks; plan for {ranks} hosts"
        )
    if group is None:
        return
    data = torch.tensor(
        list(f"{part.fingerprint} {part.index} {part.host}".encode()), dtype=torch.uint8
    )
    said = [bytes(each.tolist()).decode().split() for each in all_gather_v(group, data)]
    for other, (fingerprint, _, _) in enumerate(said):
        if fingerprint != said[0][0]:
            raise DataError(
                f"rank {other}: expected a part of the same plan as rank 0's, {said[0][0]}, got "
                f"{fingerprint}; give all ranks the folders of one plan"
            )
    num_replicas = ranks // part.num_parts
    for other, (_, index, host) in enumerate(said):
        wanted = other if part.strategy == "edge-cut" else other // num_replicas
        got = host if part.strategy == "edge-cut" else index
        if int(got) != wanted:
            raise DataError(
                f"rank {other}: expected part {wanted} of {part.num_hosts}, got part {got}; load the "
                f"part without a number, or the one of the rank"
            )


def check_model(model: HeteroModel, part: Part) -> None:
    """Checks that a model was made for this part, in the type in which rows and gradients travel.

    Raises:
        ConfigError: it was made for another part, or parameters are not of float32 or not all on the
            CPU or on the current GPU.
    """
    if model.made_for != (part.fingerprint, part.index):
        raise ConfigError(
            f"model: expected one over this part, {part.index}, got one over part {model.made_for[1]} of "
            f"plan {model.made_for[0]}; give the model and the trainer the same part"
        )
    device = next(model.parameters()).device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ConfigError(
            f"model: expected one on the current GPU, {torch.cuda.current_device()}, where kernels are "
            f"launched, got {device}; call torch.cuda.set_device({device.index}) first"
        )
    for name, parameter in model.named_parameters():
        if parameter.device.type not in ("cpu", "cuda") or parameter.device != device:
            raise ConfigError(
                f"parameter {name}: expected all parameters on the CPU or on one GPU, as the first on "
                f"{device}, got {parameter.device}; call model.cpu() or model.cuda()"
            )
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name}: expected torch.float32, as rows and gradients are, got "
                f"{parameter.dtype}; call model.float(), and choose `wire` for what travels"
            )


def check_logits(logits: Tensor, batch: Batch, part: Part) -> None:
    """Checks that a head gives logits of all classes for each seed.

    Raises:
        ConfigError: it does not.
    """
    if logits.ndim != 2 or len(logits) != len(batch.seeds) or logits.shape[1] < part.num_classes:
        raise ConfigError(
            f"head: expected logits [{len(batch.seeds)}, {part.num_classes} or more], a row for each "
            f"seed and a column for each class of the labels, got {list(logits.shape)}"
        )


def check_modules(model: HeteroModel) -> None:
    """Calls what the user brought on a few rows, and compares.

    Sampling gives a module some of a node's neighbours and a part gives it some of the seeds, so that
    a row must depend on its own edges only, and not on how nodes are numbered. Modules are in
    evaluation mode meanwhile; one that draws random numbers there too cannot be checked.

    Raises:
        ConfigError: a module fails, or its row depends on which other rows are computed with it.
    """
    for module in model.modules():
        if isinstance(module, _BATCH_NORMS):
            raise ConfigError(
                f"{type(module).__name__}: expected modules whose row depends on its own edges only, but "
                f"batch normalisation takes its statistics from all rows of a step, and each part has "
                f"others; use nn.LayerNorm"
            )
    device = next(model.parameters()).device
    drawing_on = [device] if device.type == "cuda" else []
    with evaluating(model), torch.random.fork_rng(devices=drawing_on), torch.no_grad():
        for (number, key), module in model.module_of.items():
            # The rows of this package's own modules are tested.
            if isinstance(key, tuple) and not getattr(module, "reads_edges", False):
                _check_conv(model, number, key, module)
        target = model.schema.target
        if model.num_layers > 1:
            _check_rows("activation", model.activation, device, model.dims[1][target])
        if model.stack_function is not None:
            num_slots = model.num_slots(model.num_layers, target)
            _check_rows("function of Stack", model.stack_function, device, num_slots, model.hidden)
        _check_rows("head", model.head, device, model.dims[-1][target])


def _check_conv(model: HeteroModel, number: int, relation: Relation, module: nn.Module) -> None:
    """Compares rows with those of fewer destinations, and of sources that are numbered otherwise."""
    name = f"the module of layer {number}, {name_relation(relation)}, {type(module).__name__}"
    dims = model.dims[number - 1]
    device = next(model.parameters()).device
    x_src = _draw_rows(device, 5, dims[relation[0]])
    x_dst = _draw_rows(device, 4, dims[relation[2]] if model.uses_dst else 0)
    src, dst = torch.tensor([[0, 3, 1, 4, 2, 0], [0, 0, 1, 2, 2, 2]]).to(device)
    order = torch.tensor([3, 0, 4, 1, 2]).to(device)

    def call(x_src: Tensor, x_dst: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        outputs = module((x_src, x_dst), torch.stack([src, dst]))
        return outputs[0] if isinstance(outputs, tuple) else outputs

    try:
        rows, again = (call(x_src, x_dst, src, dst) for _ in range(2))
        fewer = call(x_src, x_dst[:2], src[:3], dst[:3])
        moved = call(x_src[order], x_dst, order.argsort()[src], dst)
    except Exception as error:
        hint = (
            ""
            if model.uses_dst
            else "; uses_dst=False passes no rows of destinations, dst_dim is 0"
        )
        raise ConfigError(
            f"{name}: failed on x_src {list(x_src.shape)} and x_dst {list(x_dst.shape)}: {error}; make it "
            f"for the widths that are passed{hint}"
        ) from error
    if not _are_close(rows, again):
        return
    if not _are_close(rows[: len(fewer)], fewer):
        raise ConfigError(
            f"{name}: expected a destination's row to depend on its own edges only, but it changed with "
            f"the other destinations; leave out normalisation over rows"
        )
    if not _are_close(rows, moved):
        raise ConfigError(
            f"{name}: expected a destination's row not to depend on how nodes are numbered, but it does; "
            f"leave out self loops, by add_self_loops=False"
        )


def _draw_rows(device: torch.device, *shape: int) -> Tensor:
    """The same rows on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


def _check_rows(
    name: str, function: Callable[[Tensor], Tensor], device: torch.device, *shape: int
) -> None:
    """Compares a function's rows with those of fewer rows."""
    rows = _draw_rows(device, 4, *shape)
    try:
        whole, again, some = function(rows), function(rows), function(rows[:2])
    except Exception as error:
        raise ConfigError(
            f"{name}: failed on rows {list(rows.shape)}: {error}; make it for this width"
        ) from error
    if _are_close(whole, again) and not _are_close(whole[:2], some):
        raise ConfigError(
            f"{name}: expected each row to depend on itself only, but it changed with the other rows, of "
            f"which each part and each batch has others; leave out normalisation over rows"
        )


def _are_close(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second, rtol=1e-3, atol=1e-4)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block all modules are in evaluation mode, and afterwards in their own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
