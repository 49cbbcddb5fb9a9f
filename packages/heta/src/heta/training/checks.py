"""Checks that ranks hold parts of one plan, and that modules are what merging assumes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from heta.graph.edges import Edges
from heta.graph.part import Part
from heta.graph.sampler import Batch
from heta.graph.schema import name_relation
from heta.nn.hetero_model import HeteroModel
from heta.rows.store import RowStore
from shared.comms import Group, all_gather_v
from shared.errors import ConfigError, DataError

__all__ = ["check_modules", "check_ranks"]

_CHECKED_ROWS = 4


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


def check_modules(model: HeteroModel, batch: Batch, store: RowStore) -> None:
    """Runs each module of the first layer on a few destinations alone, and compares.

    Sampling gives a module some of a node's neighbours and a part gives it some of the seeds, so that
    a row must depend on its own edges only. Random choices of a module are switched off meanwhile.

    Raises:
        ConfigError: a module's row depends on which other rows are computed with it.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"{type(module).__name__}: expected modules whose row depends on its own edges only, but "
                f"batch normalisation takes its statistics from all rows of a step, and each part has "
                f"others; use nn.LayerNorm"
            )
    layer = batch.layers[0]
    for relation, part in layer.seed_edges.items():
        _check_module(model, relation, part.edges, model.dims[0])
    for relation, edges in layer.edges.items():
        _check_module(model, relation, edges, model.dims[0])


def _check_module(model: HeteroModel, relation, edges: Edges, dims: dict[str, int]) -> None:  # noqa: ANN001
    has_edges = (edges.indptr.diff() > 0).nonzero()[:_CHECKED_ROWS, 0]
    num_rows = int(has_edges[-1]) + 1 if len(has_edges) else 0
    if num_rows == 0 or num_rows == edges.num_dst:
        return
    module = model.module(1, relation)
    if getattr(module, "reads_edges", False):
        return  # one of this package, whose rows are tested
    generator = torch.Generator().manual_seed(0)
    x_src = torch.randn(edges.num_src, dims[relation[0]], generator=generator)
    width = dims[relation[2]] if model.uses_dst else 0
    x_dst = torch.randn(edges.num_dst, width, generator=generator)
    fewer = Edges(
        edges.indptr[: num_rows + 1], edges.src[: int(edges.indptr[num_rows])], edges.num_src
    )
    with torch.no_grad(), _without_dropout(module):
        whole, some = (
            _first_output(module, x_src, rows, each)
            for rows, each in ((x_dst, edges), (x_dst[:num_rows], fewer))
        )
    if not torch.allclose(whole[: len(some)], some, rtol=1e-3, atol=1e-4):
        raise ConfigError(
            f"the module of {name_relation(relation)}, {type(module).__name__}: expected a destination's "
            f"row to depend on its own edges only, but it changed with the other destinations; leave out "
            f"normalisation over rows"
        )


def _first_output(module: nn.Module, x_src: Tensor, x_dst: Tensor, edges: Edges) -> Tensor:
    outputs = module((x_src, x_dst), edges.edge_index)
    return outputs[0] if isinstance(outputs, tuple) else outputs


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """Within the block nothing is dropped: neither by nn.Dropout, nor by a `dropout` attribute."""
    saved = []
    for each in module.modules():
        name = "p" if isinstance(each, nn.modules.dropout._DropoutNd) else "dropout"
        if isinstance(value := getattr(each, name, None), float):
            saved.append((each, name, value))
            setattr(each, name, 0.0)
    try:
        yield
    finally:
        for each, name, value in saved:
            setattr(each, name, value)
