"""BG-HGNN: one set of parameters for any number of relations.

After Su et al., "BG-HGNN: Toward Efficient Learning for Complex Heterogeneous Graphs" (2024). Each
node's features, its type and the relations it takes part in are blended into one vector; a
homogeneous attention network with self loops then runs over the union of all relations. Types of
unequal width are mapped to one width by a matrix each, where the paper pads them with zeros. A node's
relation code is its sparse row of signed relation shares times fixed random vectors. All edges into
a type are attended to at once, whatever the number of relations.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from heta.graph.part import Part
from heta.graph.sampler import Batch
from heta.graph.schema import Relation
from heta.nn.hetero_model import HeteroModel
from heta.nn.relation_input import RelationInput
from heta.nn.rgat import check_heads
from shared.errors import ConfigError
from shared.kernels.neighbors import sample
from shared.kernels.segment import CSR, spmm

__all__ = ["BGHGNN"]

_CODE_DIM = 128
"""Width of the relations' random vectors: enough to tell hundreds apart. The paper takes 512, which
makes nine tenths of all parameters."""
_RANK = 4


class UnionAttention(nn.Module):
    """One layer's attention, for all relations and for self loops."""

    reads_edges = True

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.value = nn.Linear(dim, dim, bias=False)
        self.att_src = nn.Parameter(torch.empty(heads, dim // heads))
        self.att_dst = nn.Parameter(torch.empty(heads, dim // heads))
        for weight in self.parameters():
            nn.init.xavier_uniform_(weight)

    def project(self, rows: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Returns values [rows, heads, dim], and their products with a vector a head [rows, heads]."""
        values = self.value(rows).unflatten(1, (self.heads, -1))
        return values, (values * attention).sum(2)


class Blend(nn.Module):
    """Low-rank fusion of a node's features, type and relation code into one vector."""

    def __init__(self, num_types: int, num_relations: int, hidden: int) -> None:
        super().__init__()
        self.feature = nn.Parameter(torch.empty(_RANK, hidden + 1, hidden))
        self.kind = nn.Parameter(torch.empty(num_types, _RANK, hidden))
        self.relation = nn.Parameter(torch.empty(_RANK, _CODE_DIM + 1, hidden))
        self.weight = nn.Parameter(torch.full((_RANK,), 1.0 / _RANK))
        self.bias = nn.Parameter(torch.zeros(hidden))
        # Fixed random vectors of the relations. A buffer: a checkpoint holds them.
        self.register_buffer("code", torch.randn(num_relations, _CODE_DIM) / _CODE_DIM**0.5)
        nn.init.normal_(self.kind, 1.0, 0.1)
        for factor in (self.feature, self.relation):
            nn.init.normal_(factor, 0.0, factor.shape[1] ** -0.5)
            # A product of three factors passes a feature on only if the others are near 1.
            factor.data[:, -1] += 1.0

    def forward(self, rows: Tensor, number: int, code: CSR) -> Tensor:
        """Returns the vectors of nodes of type `number`.

        Args:
            rows: the nodes' features [nodes, hidden].
            number: the type.
            code: the nodes' signed relation shares, sparse [nodes, num_relations].
        """
        # The codes are constants: no gradient passes through the sparse product.
        relations = spmm(code, self.code)
        by_feature = torch.einsum("nd,rdh->nrh", rows, self.feature[:, :-1]) + self.feature[:, -1]
        by_relation = torch.einsum("nd,rdh->nrh", relations, self.relation[:, :-1])
        by_relation = by_relation + self.relation[:, -1]
        fused = by_feature * self.kind[number] * by_relation
        return torch.relu(torch.einsum("nrh,r->nh", fused, self.weight) + self.bias)


class BGHGNN(HeteroModel):
    """BG-HGNN over one part; its plan has `uses_dst=True`, since every node attends to itself.

    Args:
        part: the part.
        hidden: width of all layers, a multiple of the heads.
        num_classes: number of logits.
        heads: attention heads.

    Raises:
        ConfigError: `hidden` is no multiple of `heads` or not the width of the plan's learnable rows,
            or the plan's `uses_dst` is False.
    """

    def __init__(self, part: Part, hidden: int, num_classes: int, heads: int = 4) -> None:
        check_heads(hidden, heads)
        if not part.uses_dst:
            raise ConfigError(
                "BGHGNN: expected a plan with uses_dst=True, since every node has a self loop"
            )
        layers: dict[int, UnionAttention] = {}

        def attention(layer: int) -> UnionAttention:
            # The same module for all: one set of parameters, whose gradients add up.
            if layer not in layers:
                layers[layer] = UnionAttention(hidden, heads)
            return layers[layer]

        def conv(
            layer: int, relation: Relation, src_dim: int, dst_dim: int, out_dim: int
        ) -> UnionAttention:
            return attention(layer)

        super().__init__(
            part, conv, hidden, part.layers, num_classes, combine="softmax",
            activation=nn.functional.elu, uses_dst=True,
            self_term=lambda layer, node_type, in_dim, out_dim: attention(layer),
        )  # fmt: skip
        self._codes = part.codes
        self.widths = nn.ModuleList(
            nn.Linear(part.input_dim(node_type), hidden) for node_type in self.schema.types
        )
        self.blend = Blend(len(self.schema.types), len(self.schema.relations), hidden)

    def combine_relations(self, inputs: list[RelationInput], num_rows: int, num_slots: int) -> Any:
        """Attends over the edges of all relations at once, and over self loops."""
        module: Any = inputs[0].module
        lists = list({id(each.x_src): each.x_src for each in inputs}.values())
        starts = dict(zip(map(id, lists), _starts(lists), strict=True))
        values, from_src = module.project(torch.cat(lists), module.att_src)
        to_dst = {
            id(x): module.project(x, module.att_dst)[1]
            for x in {id(each.x_dst): each.x_dst for each in inputs}.values()
        }
        sources, rows, logits = [], [], []
        for each in inputs:
            own = torch.arange(len(each.x_dst), device=values.device)
            src, dst = (own, own) if each.edges is None else (each.edges.src, each.edges.dst)
            src = src + starts[id(each.x_src)]
            logits.append(from_src[src] + to_dst[id(each.x_dst)][dst])
            sources.append(src)
            rows.append(dst if each.rows is None else each.rows[dst])
        row, order = torch.cat(rows).sort(stable=True)
        logit = nn.functional.leaky_relu(torch.cat(logits)[order], 0.2)
        return self.merge.lift(logit, values[torch.cat(sources)[order]], row, num_rows)

    def embed(
        self, batch: Batch, inputs: dict[str, Tensor], seeds: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Blends features, types and relation codes."""
        rows = {t: self._embed_type(t, x, batch.inputs[t]) for t, x in inputs.items()}
        if seeds is not None:
            seeds = self._embed_type(self.schema.target, seeds, batch.seeds)
        return rows, seeds

    def _embed_type(self, node_type: str, rows: Tensor, nodes: Tensor) -> Tensor:
        number, code = self.schema.types.index(node_type), self._codes[node_type]
        indptr, entries = sample(code, nodes, -1, 0)
        assert code.weight is not None, "a code has values"
        chosen = CSR(indptr, code.indices[entries], code.num_cols, code.weight[entries])
        return self.blend(self.widths[number](rows), number, chosen.to(rows.device))


def _starts(lists: list[Tensor]) -> list[int]:
    """Where each list begins when they stand one after another."""
    return [0, *accumulate(len(rows) for rows in lists)][:-1]
