"""Reads the tensors of a graph, in any type that users have, into the one form that training reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from heta.graph.schema import Relation, name_relation
from shared.errors import DataError

__all__ = [
    "MASKS",
    "check_unused",
    "choose_target",
    "read_edges",
    "read_features",
    "read_labels",
    "read_mask",
    "select_seeds",
]

# What PyG and DGL call the masks, and their splits.
MASKS = {"train_mask": "train", "val_mask": "val", "test_mask": "test"}

# Below it, float32 holds every whole number exactly.
_MAX_WHOLE = 2**24


def read_edges(
    relation: Relation, ends: Any, num_nodes: Mapping[str, int]
) -> tuple[Int64[Tensor, " edges"], Int64[Tensor, " edges"]]:
    """Converts a relation's sources and destinations to int64.

    Raises:
        DataError: lengths differ, ids are no whole numbers, or an id is outside its type's nodes.
    """
    label = f"edges of {name_relation(relation)}"
    sides = (("source", relation[0]), ("destination", relation[2]))
    src, dst = (
        _read_ids(f"{label}: {side} ids", ids) for (side, _), ids in zip(sides, ends, strict=True)
    )
    if len(src) != len(dst):
        raise DataError(
            f"{label}: expected as many sources as destinations, got {len(src)} and {len(dst)}"
        )
    for (side, kind), ids in zip(sides, (src, dst), strict=True):
        if not len(ids):
            continue
        low, high = ids.aminmax()
        if low < 0 or high >= num_nodes[kind]:
            edge = int(((ids < 0) | (ids >= num_nodes[kind])).nonzero()[0])
            raise DataError(
                f"{label}: expected {side} ids from 0 to {num_nodes[kind] - 1}, the nodes of {kind!r}, "
                f"got {int(ids[edge])} at edge {edge}; number each type's nodes from 0, or correct "
                "num_nodes"
            )
    return src, dst


def read_features(kind: str, rows: Any) -> Float32[Tensor, "nodes dim"]:
    """Converts a type's features to float32.

    Raises:
        DataError: they are not two-dimensional numbers, not finite, or rounded by float32 although
            they are whole numbers; or they ask for gradients.
    """
    label = f"feat of {kind!r}"
    tensor = _to_tensor(label, rows)
    if tensor.ndim != 2 or not tensor.shape[1]:
        raise DataError(
            f"{label}: expected [num_nodes, dim] with dim of at least 1, got {list(tensor.shape)}; "
            "reshape it, or leave it out for learnable rows"
        )
    if tensor.is_complex():
        raise DataError(f"{label}: expected real numbers, got {tensor.dtype}")
    if tensor.requires_grad:
        raise DataError(
            f"{label}: expected features, which are not trained, got a tensor that requires grad; leave "
            "it out for learnable rows, or detach it"
        )
    values = tensor.to(torch.float32).contiguous()
    if not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.numel():
        low, high = (int(bound) for bound in tensor.to(torch.int64).aminmax())
        if low < -_MAX_WHOLE or high > _MAX_WHOLE:
            raise DataError(
                f"{label}: expected whole numbers up to 2^24, which float32 holds exactly, got "
                f"{high if high > _MAX_WHOLE else low}; scale them, or give them as floats"
            )
    finite = torch.isfinite(values)
    if not finite.all():
        row, column = (~finite).nonzero()[0].tolist()
        raise DataError(
            f"{label}, row {row}, column {column}: expected a finite float32, got "
            f"{tensor[row, column].item()}; fill such values, and mark them in a column of their own"
        )
    return values


def read_labels(label: Any, target: str, num_nodes: int) -> Int64[Tensor, " nodes"]:
    """Converts the target's labels to int64, missing ones to -1.

    Raises:
        DataError: there is not one for each node, or one is no class.
    """
    tensor = _to_tensor("label", label)
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tuple(tensor.shape) != (num_nodes,):
        raise DataError(
            f"label: expected a class for each of the {num_nodes} nodes of {target!r}, got shape "
            f"{list(tensor.shape)}"
        )
    if tensor.is_complex():
        raise DataError(f"label: expected whole numbers, got {tensor.dtype}")
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), -1.0, tensor.detach().to(torch.float64))
        wrong = (tensor != tensor.floor()) | tensor.isinf()
    else:
        wrong = torch.zeros(num_nodes, dtype=torch.bool)
    wrong |= tensor.to(torch.int64) < -1
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"label of node {row} of {target!r}: expected a class from 0, or -1 or NaN for a missing "
            f"one, got {tensor[row].item()}"
        )
    return tensor.to(torch.int64).contiguous()


def read_mask(split: str, mask: Any, target: str, num_nodes: int) -> Bool[Tensor, " nodes"]:
    """Converts a split's mask to bool; whole numbers count if all are 0 or 1.

    Raises:
        DataError: there is not one entry for each node, or an entry is neither true nor false.
    """
    tensor = _to_tensor(f"mask {split!r}", mask)
    is_mask = tensor.dtype == torch.bool or (
        not tensor.is_floating_point()
        and not tensor.is_complex()
        and bool(((tensor == 0) | (tensor == 1)).all())
    )
    if tuple(tensor.shape) != (num_nodes,) or not is_mask:
        raise DataError(
            f"mask {split!r}: expected a bool for each of the {num_nodes} nodes of {target!r}, got "
            f"{tensor.dtype} {list(tensor.shape)}; of ids make one by mask[ids] = True"
        )
    return tensor.to(torch.bool).contiguous()


def check_unused(label: str, names: Collection[Any], ignore: Collection[str]) -> None:
    """Refuses what training would leave out, unless the user said so.

    Args:
        label: what has it, for the error.
        names: what is not read.
        ignore: what the user leaves out.

    Raises:
        DataError: a name is not to be ignored.
    """
    if isinstance(ignore, str):
        raise DataError(f"ignore: expected a list of names, got {ignore!r}; give ({ignore!r},)")
    unused = sorted(str(name) for name in names if name not in ignore)
    if unused:
        raise DataError(
            f"{label}: expected only what training reads, got also {', '.join(unused)}; make features of "
            f"it, or leave it out by ignore={tuple(unused)!r}"
        )


def choose_target(
    label: str, kinds: Sequence[str], target: str | None, labelled: Sequence[str], name: str
) -> str:
    """Returns the target: the type that the user names, else the only one with labels.

    Raises:
        DataError: there is no such type, or not exactly one has labels and none is named.
    """
    if target is None and len(labelled) != 1:
        raise DataError(
            f"{label}: expected one type with {name!r}, got {list(labelled)} of the types {list(kinds)}; "
            "name the target"
        )
    target = labelled[0] if target is None else target
    if target not in kinds:
        raise DataError(f"target: expected one of the types {list(kinds)}, got {target!r}")
    return target


def _read_ids(label: str, ids: Any) -> Tensor:
    tensor = _to_tensor(label, ids)
    # An empty list or array has no type that says anything.
    if not tensor.numel() and tensor.ndim == 1:
        return torch.empty(0, dtype=torch.int64)
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if not whole or tensor.dtype in (torch.bool, torch.uint64) or tensor.ndim != 1:
        raise DataError(
            f"{label}: expected whole numbers [num_edges], signed or of at most 32 bits, got "
            f"{tensor.dtype} {list(tensor.shape)}; convert them to int64"
        )
    return tensor.to(torch.int64).contiguous()


def _to_tensor(label: str, values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{label}: expected a tensor or array of numbers, got {error}") from error
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise DataError(f"{label}: expected a dense tensor, got {tensor.layout}; call to_dense()")
    return tensor.cpu()


def select_seeds(
    split: str, label: Tensor | None, masks: Mapping[str, Tensor]
) -> Int64[Tensor, " seeds"]:
    """Selects the nodes of a split that have a label, in order of id.

    Raises:
        DataError: there are no labels, or no such split.
    """
    if label is None or split not in masks:
        raise DataError(
            f"split {split!r}: expected labels and a mask of this name, got "
            f"{'no labels' if label is None else f'masks {list(masks)}'}"
        )
    return (masks[split] & (label >= 0)).nonzero()[:, 0]
