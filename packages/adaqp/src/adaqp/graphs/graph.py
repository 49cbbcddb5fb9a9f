"""The input graph: edges, features, labels and split, checked once.

Partitioning and training rely on the checks made here. Edges are directed, messages flow from src
to dst; self loops and duplicate edges are kept as given. A label of -1 marks an unlabelled node,
which must not be in any of the three masks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.errors import DataError

__all__ = [
    "ArrayLike",
    "Graph",
    "add_reverse_edges",
    "check_edge_data",
    "from_dgl",
    "from_edge_index",
    "from_pyg",
]

ArrayLike = Tensor | np.ndarray | Sequence[Any]

MASKS = ("train_mask", "val_mask", "test_mask")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Graph:
    """A whole graph in memory, with features, labels and masks for node classification.

    Attributes:
        src: int64 [edges], source node of each edge.
        dst: int64 [edges], target node of each edge; messages flow src -> dst.
        num_nodes: number of nodes.
        feat: [nodes, dim] features, float16, bfloat16, float32 or float64, all finite.
        label: int64 [nodes] class ids (-1: none), or floats [nodes, classes] for multilabel.
        train_mask: bool [nodes].
        val_mask: bool [nodes], disjoint from train_mask.
        test_mask: bool [nodes], disjoint from both.
        ids: texts [nodes], the user's own ids; None where they are the numbers of nodes.

    Raises:
        DataError: anything above does not hold; the message names the edge or node.
    """

    src: Tensor
    dst: Tensor
    num_nodes: int
    feat: Tensor
    label: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    ids: np.ndarray | None = None
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise DataError(f"num_nodes: expected at least 1, got {self.num_nodes}")
        self._check_edges()
        self._check_feat()
        self._check_masks()
        self._check_label()
        if self.ids is not None and len(self.ids) != self.num_nodes:
            raise DataError(f"ids: expected {self.num_nodes} (num_nodes), got {len(self.ids)}")

    def _check_edges(self) -> None:
        for name in ("src", "dst"):
            ids = getattr(self, name)
            if ids.dtype != torch.int64 or ids.dim() != 1:
                raise DataError(
                    f"{name}: expected int64 [num_edges], got {ids.dtype} {tuple(ids.shape)}; "
                    "adaqp.from_edge_index converts"
                )
        if len(self.src) != len(self.dst):
            raise DataError(
                "src and dst: expected one entry an edge in both, "
                f"got {len(self.src)} and {len(self.dst)}"
            )
        for ids in (self.src, self.dst):
            if len(ids) and (ids.min() < 0 or ids.max() >= self.num_nodes):
                edge = int(((ids < 0) | (ids >= self.num_nodes)).nonzero()[0])
                raise DataError(
                    f"edge {edge} ({int(self.src[edge])} -> {int(self.dst[edge])}): "
                    f"expected node ids from 0 to {self.num_nodes - 1}; "
                    "correct the edge or num_nodes, or number the nodes from 0, as pandas.factorize does"
                )

    def _check_feat(self) -> None:
        if not self.feat.is_floating_point() or self.feat.dim() != 2:
            raise DataError(
                "feat: expected floating point [num_nodes, dim], "
                f"got {self.feat.dtype} {tuple(self.feat.shape)}"
            )
        self._check_length("feat", self.feat)
        finite = torch.isfinite(self.feat)
        if not finite.all():
            node, column = (~finite).nonzero()[0].tolist()
            raise DataError(
                f"feat of node {node}, column {column}: expected a finite number, "
                f"got {float(self.feat[node, column])}; fill or drop such values first"
            )

    def _check_masks(self) -> None:
        for name in MASKS:
            mask = getattr(self, name)
            if mask.dtype != torch.bool or mask.dim() != 1:
                raise DataError(
                    f"{name}: expected bool [num_nodes], got {mask.dtype} {tuple(mask.shape)}; "
                    "adaqp.from_edge_index converts"
                )
            self._check_length(name, mask)
        for one, other in (MASKS[:2], MASKS[1:], MASKS[::2]):
            both = getattr(self, one) & getattr(self, other)
            if both.any():
                raise DataError(
                    f"node {int(both.nonzero()[0])} is in {one} and in {other} "
                    f"(one of {int(both.sum())} such nodes); expected disjoint masks"
                )

    def _check_label(self) -> None:
        self._check_length("label", self.label)
        used = self.train_mask | self.val_mask | self.test_mask
        if self.label.dim() == 1 and self.label.dtype == torch.int64:
            bad = used & (self.label < 0)
        elif self.label.dim() == 2 and self.label.is_floating_point():
            bad = used & ~torch.isfinite(self.label).all(dim=1)
        else:
            raise DataError(
                "label: expected int64 [num_nodes] class ids or, for multilabel, floating point "
                f"[num_nodes, num_classes], got {self.label.dtype} {tuple(self.label.shape)}"
            )
        if bad.any():
            node = int(bad.nonzero()[0])
            raise DataError(
                f"node {node} is in a mask, but its label is {self.label[node].tolist()}; "
                "give it a label or take it out of the masks"
            )
        if self.label.dim() == 1 and self.num_classes > 1000:
            num_used = len(self.label.unique())
            if self.num_classes > 10 * num_used + 1000:
                raise DataError(
                    f"label: expected class numbers close to 0, got {num_used} different ones up to "
                    f"{self.num_classes - 1}, for each of which a model has an output; number the classes "
                    "from 0, as pandas.factorize does"
                )

    def _check_length(self, name: str, value: Tensor) -> None:
        if len(value) != self.num_nodes:
            raise DataError(f"{name}: expected {self.num_nodes} rows (num_nodes), got {len(value)}")

    @property
    def num_edges(self) -> int:
        """Number of directed edges, self loops and duplicates counted."""
        return len(self.src)

    @property
    def num_feat(self) -> int:
        """Number of feature columns."""
        return self.feat.shape[1]

    @property
    def is_multilabel(self) -> bool:
        """Whether a node may belong to several classes at once."""
        return self.label.dim() == 2

    @property
    def num_classes(self) -> int:
        """Number of classes: label columns if multilabel, else the largest class id plus one."""
        if self.is_multilabel:
            return self.label.shape[1]
        return max(int(self.label.max()) + 1, 1)

    @property
    def is_symmetric(self) -> bool:
        """Whether every edge occurs as often as its reverse; computed once.

        O(edges log edges).
        """
        if "symmetric" not in self._known:
            src, dst = self.src.numpy(), self.dst.numpy()
            forward = np.sort(src * self.num_nodes + dst)
            backward = np.sort(dst * self.num_nodes + src)
            self._known["symmetric"] = bool(np.array_equal(forward, backward))
        return self._known["symmetric"]

    def fingerprint(self) -> str:
        """A hash of all values, shapes and types, 32 hexadecimal digits; computed once."""
        if "fingerprint" not in self._known:
            digest = hashlib.blake2b(digest_size=16)
            digest.update(str(self.num_nodes).encode())
            for name in ("src", "dst", "feat", "label", *MASKS):
                value = getattr(self, name).contiguous()
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                # One row may be contiguous under any stride, which a view as bytes refuses.
                flat = value.as_strided((value.numel(),), (1,))
                digest.update(flat.view(torch.uint8).numpy())
            self._known["fingerprint"] = digest.hexdigest()
        return self._known["fingerprint"]


def from_edge_index(
    src: ArrayLike,
    dst: ArrayLike,
    num_nodes: int,
    feat: ArrayLike,
    label: ArrayLike,
    train_mask: ArrayLike,
    val_mask: ArrayLike,
    test_mask: ArrayLike,
    *,
    ids: Sequence[Any] | None = None,
) -> Graph:
    """Builds a graph from tensors, numpy arrays or lists, converting integer types.

    Args:
        src: integers [num_edges], source of each edge.
        dst: integers [num_edges], target of each edge.
        num_nodes: number of nodes; ids run from 0.
        feat: floats [num_nodes, dim]; half types are kept as they are.
        label: integers [num_nodes] (-1: none), or 0/1 values [num_nodes, num_classes].
        train_mask: bool or 0/1 [num_nodes].
        val_mask: bool or 0/1 [num_nodes].
        test_mask: bool or 0/1 [num_nodes].
        ids: [num_nodes], your own ids of the nodes, kept as texts; None for their numbers.

    Returns:
        The checked graph, on the CPU.

    Raises:
        DataError: wrong types, lengths or ranges, overlapping masks, non-finite features.
    """
    targets = _tensor("label", label)
    if targets.dim() == 2:
        targets = targets if targets.is_floating_point() else targets.float()
    else:
        targets = _integers("label", targets)
    return Graph(
        src=_integers("src", _tensor("src", src)),
        dst=_integers("dst", _tensor("dst", dst)),
        num_nodes=int(num_nodes),
        feat=_tensor("feat", feat),
        label=targets,
        train_mask=_mask("train_mask", train_mask),
        val_mask=_mask("val_mask", val_mask),
        test_mask=_mask("test_mask", test_mask),
        ids=None if ids is None else np.array([str(one) for one in ids], object),
    )


def from_dgl(
    graph: Any,  # a dgl.DGLGraph; DGL is optional, so the annotation cannot name it
    *,
    feat: str = "feat",
    label: str = "label",
    train_mask: str = "train_mask",
    val_mask: str = "val_mask",
    test_mask: str = "test_mask",
    ignore_edge_data: bool = False,
) -> Graph:
    """Converts a homogeneous DGL graph; the names are keys of its `ndata`.

    Args:
        graph: the DGL graph.
        feat, label, train_mask, val_mask, test_mask: keys of `ndata`.
        ignore_edge_data: convert a graph with weights or features in `edata`, without these.

    Raises:
        DataError: a key is missing, the graph is heterogeneous, it has edge data, or its content is
            unusable.
    """
    if not graph.is_homogeneous:
        raise DataError(
            f"graph: expected one node type and one edge type, got {graph.ntypes} and "
            f"{graph.etypes}; dgl.to_homogeneous converts"
        )
    keys = (feat, label, train_mask, val_mask, test_mask)
    for key in keys:
        if key not in graph.ndata:
            raise DataError(
                f"graph.ndata: expected key {key!r}, got {sorted(graph.ndata)}; name it by keyword"
            )
    weights = [key for key, value in graph.edata.items() if key[0] != "_" and not _is_one(value)]
    check_edge_data(weights, "graph.edata", ignore_edge_data)
    src, dst = graph.edges(order="eid")
    return from_edge_index(src, dst, graph.num_nodes(), *(graph.ndata[key] for key in keys))


def from_pyg(data: Any, *, split: int = 0, ignore_edge_data: bool = False) -> Graph:
    """Converts a `torch_geometric.data.Data` with edge_index, x, y and the three masks.

    Args:
        data: the PyG object; y may be [nodes], [nodes, 1] or multilabel [nodes, classes].
        split: column to use where masks are [nodes, splits].
        ignore_edge_data: convert a graph with edge_weight or edge_attr, without these.

    Raises:
        DataError: a field is missing, there is edge data, or the content is unusable.
    """
    for key in ("edge_index", "x", "y", *MASKS):
        if getattr(data, key, None) is None:
            raise DataError(f"data.{key}: missing; expected edge_index, x, y, {', '.join(MASKS)}")
    label = data.y.squeeze(1) if data.y.dim() == 2 and data.y.shape[1] == 1 else data.y
    masks = []
    for key in MASKS:
        mask = getattr(data, key)
        if mask.dim() == 2 and not 0 <= split < mask.shape[1]:
            raise DataError(f"split: expected 0 to {mask.shape[1] - 1}, got {split}")
        masks.append(mask[:, split] if mask.dim() == 2 else mask)
    edge_index = data.edge_index
    if edge_index.dim() != 2 or len(edge_index) != 2:
        raise DataError(
            f"data.edge_index: expected shape [2, num_edges], got {list(edge_index.shape)}; "
            "edge_index.t() turns rows of pairs around"
        )
    weights = [
        key
        for key in ("edge_weight", "edge_attr", "edge_type")
        if getattr(data, key, None) is not None and not _is_one(getattr(data, key))
    ]
    check_edge_data(weights, "data", ignore_edge_data)
    src, dst = edge_index
    return from_edge_index(src, dst, int(data.num_nodes), data.x, label, *masks)


def add_reverse_edges(graph: Graph) -> Graph:
    """Returns the graph with the reverse of each edge behind it, self loops included, as OGB does."""
    both = torch.stack([graph.src, graph.dst], 1), torch.stack([graph.dst, graph.src], 1)
    return replace(graph, src=both[0].flatten(), dst=both[1].flatten())


def check_edge_data(names: Sequence[str], where: str, is_ignored: bool) -> None:
    """Refuses weights and features of edges, unless the user knows that they are left out.

    Args:
        names: what edges have, other than weights that are all 1.
        where: what has them, for the error.
        is_ignored: the user asked to leave them out.

    Raises:
        DataError: there are some.
    """
    if names and not is_ignored:
        raise DataError(
            f"{where}: expected edges without weights or features, which no layer here uses, got "
            f"{', '.join(names)}; take them out, or give ignore_edge_data=True (--ignore-edge-data)"
        )


def _is_one(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0 and bool((value == 1).all())


def _tensor(name: str, value: ArrayLike) -> Tensor:
    try:
        return torch.as_tensor(value).detach().cpu().contiguous()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name}: expected an array of numbers, got {error}") from error


def _integers(name: str, value: Tensor) -> Tensor:
    if value.is_floating_point() and value.numel():
        raise DataError(f"{name}: expected integers, got {value.dtype} {tuple(value.shape)}")
    if value.dtype == torch.uint64 and bool((value.long() < 0).any()):
        largest = int(value.long()[value.long() < 0].max()) + 2**64
        raise DataError(
            f"{name}: expected less than 2^63, got {largest}; number from 0, as pandas.factorize does"
        )
    return value.long()


def _mask(name: str, value: ArrayLike) -> Tensor:
    mask = _tensor(name, value)
    if mask.dtype != torch.bool and ((mask != 0) & (mask != 1)).any():
        raise DataError(
            f"{name}: expected bool or 0/1 a node, got values up to {mask.max().item()}; "
            "turn a list of node ids into a mask first"
        )
    return mask.bool()
