"""Mini-batches of PyG and DGL graphs on one host, for training loops of the user's own.

They are sampled by the kernels that `Trainer` uses: PyG's own loaders need wheels that pip does not
offer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from heta.graph.checks import choose_target
from heta.graph.hetero_graph import HeteroGraph
from heta.graph.pyg import to_pyg
from heta.graph.sampler import check_fanouts
from heta.training.batch_forms import DglForm, PygForm, Seeds
from shared.errors import ConfigError, DataError
from shared.kernels.philox import stream_key

__all__ = ["Loader", "loader"]


def loader(
    data: Any,
    fanouts: Sequence[int],
    seeds: Any,
    batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
) -> Loader:
    """Makes mini-batches of a graph on this host; each pass over them is another epoch.

    For a `HeteroData` or `HeteroGraph` a batch is the `HeteroData` that PyG's `NeighborLoader` gives:
    attributes of the sampled nodes and edges, with `n_id`, `e_id`, `num_sampled_nodes` and
    `num_sampled_edges`, and `batch_size` and `input_id` of the seeds. For a DGL graph it is
    (input nodes, output nodes, blocks), as `dgl.dataloading` gives: ids by type, which blocks keep as
    `dgl.NID` and `dgl.EID`.

    Args:
        data: a `HeteroData`, `HeteroGraph` or DGL graph.
        fanouts: most in-edges of a node and relation, the hop next to the seeds first (for DGL graphs
            too); -1 takes all.
        seeds: ids or a mask of the type with labels; (type, ids or mask), {type: ids or mask} or a type
            for another one.
        batch_size: most seeds of a batch.
        seed: names the order and the draws.
        shuffle: whether seeds are in another order each epoch.
        drop_last: whether a last batch of fewer seeds is left out.

    Raises:
        ConfigError: a fan-out or the batch size is invalid.
        DataError: `data` is of another kind, its edges are invalid, or `seeds` are no nodes of it.
    """
    fanouts = check_fanouts(fanouts, len(fanouts))
    if not fanouts or batch_size < 1:
        raise ConfigError(
            f"loader: expected a fan-out for each hop and a batch size of at least 1, got "
            f"{list(fanouts)} and {batch_size}"
        )
    form = _read_form(to_pyg(data) if isinstance(data, HeteroGraph) else data)
    node_type, ids = _read_seeds(form, seeds)
    return Loader(form, fanouts, node_type, ids, batch_size, seed, shuffle, drop_last)


@dataclass(frozen=True, slots=True, eq=False)
class Loader:
    """Batches of a graph, epoch after epoch; `loader` describes them.

    Attributes:
        form: the graph.
        fanouts: of each hop, the seeds' first.
        node_type: type of the seeds.
        seeds: ids of the seeds.
        batch_size: most seeds of a batch.
        seed: names the order and the draws.
        shuffle: whether each epoch has another order.
        drop_last: whether a last batch of fewer seeds is left out.
    """

    form: PygForm | DglForm
    fanouts: tuple[int, ...]
    node_type: str
    seeds: Tensor
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    _epochs: Iterator[int] = field(default_factory=count, init=False, repr=False)

    def __len__(self) -> int:
        full, rest = divmod(len(self.seeds), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        epoch = next(self._epochs)
        order = torch.arange(len(self.seeds))
        if self.shuffle:
            generator = torch.Generator().manual_seed(stream_key(self.seed, epoch))
            order = torch.randperm(len(self.seeds), generator=generator)
        for step in range(len(self)):
            positions = order[step * self.batch_size : (step + 1) * self.batch_size]
            key = stream_key(self.seed, epoch, step)
            seeds = Seeds(self.node_type, self.seeds[positions], positions, key)
            yield self.form.make_batch(seeds, self.fanouts)


def _read_form(data: Any) -> PygForm | DglForm:
    # Whoever made the object has imported its library already.
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(data).__mro__}
    if "torch_geometric.HeteroData" in kinds:
        return PygForm(data)
    if "dgl.DGLGraph" in kinds and not data.is_block:
        return DglForm(data)
    raise DataError(
        f"data: expected a HeteroData, a HeteroGraph or a DGLGraph, got {type(data).__name__}"
    )


def _read_seeds(form: PygForm | DglForm, seeds: Any) -> tuple[str, Tensor]:
    """The seeds' type and ids."""
    if isinstance(seeds, Mapping):
        if len(seeds) != 1:
            raise DataError(f"seeds: expected one type, got {list(seeds)}")
        seeds = next(iter(seeds.items()))
    if isinstance(seeds, str):
        seeds = (seeds, None)
    is_pair = isinstance(seeds, tuple) and len(seeds) == 2 and isinstance(seeds[0], str)
    node_type, ids = seeds if is_pair else (None, seeds)
    counts = form.edges.num_nodes
    node_type = choose_target("seeds", list(counts), node_type, form.labelled, "labels")
    num_nodes = counts[node_type]
    ids = torch.arange(num_nodes) if ids is None else torch.as_tensor(ids).cpu()
    if ids.dtype == torch.bool and ids.shape == (num_nodes,):
        ids = ids.nonzero()[:, 0]
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise DataError(
            f"seeds: expected ids, or a mask of the {num_nodes} nodes of {node_type!r}, got {ids.dtype} "
            f"{list(ids.shape)}"
        )
    if len(ids) and (ids.min() < 0 or ids.max() >= num_nodes):
        raise DataError(
            f"seeds: expected ids from 0 to {num_nodes - 1}, the nodes of {node_type!r}, got "
            f"{int(ids.min())} to {int(ids.max())}"
        )
    return node_type, ids.long()
