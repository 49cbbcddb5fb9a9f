"""R-GCN, RGAT and BG-HGNN against dense matrices in plain torch, PyG's GATConv and DGL's layers."""

import pytest
import torch
from graphs import scholars
from running import HIDDEN, MODELS, distance, train
from torch import nn

from heta.graph.part import load
from heta.graph.relation_codes import relation_code
from heta.rows.tables import initial_rows

pytestmark = pytest.mark.unchecked
SEEDS = list(range(17, 60, 2))


def prepare(parts_of, name, uses_dst=True):
    """A model with random parameters, a training's first step from them, and the graph's input rows."""
    graph = scholars()
    folder = parts_of(graph, [graph.schema.roots], uses_dst=uses_dst)
    torch.manual_seed(0)
    model = MODELS[name](load(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    result = train(folder, name, batches=[SEEDS], state=state)
    rows = dict(graph.feat)
    for number, (kind, count) in enumerate(graph.num_nodes.items()):
        if kind not in rows:
            rows[kind] = initial_rows(torch.arange(count), HIDDEN, 0, number)
    return graph, model, result, rows


def assert_equals(graph, model, result, logits):
    assert distance(result["logits"], logits) <= 1e-5
    loss = nn.functional.cross_entropy(logits[SEEDS], graph.label[SEEDS])
    loss.backward()
    assert result["losses"][0] == pytest.approx(float(loss), rel=1e-5)
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert wanted
    for name, grad in wanted.items():
        assert distance(result["grads"][name], grad) <= 1e-5, name


def adjacency(graph, relation):
    """How often each pair of nodes is joined [destinations, sources]."""
    src, dst = graph.edges[relation]
    matrix = torch.zeros(graph.num_nodes[relation[2]], graph.num_nodes[relation[0]])
    return matrix.index_put((dst, src), torch.ones(len(src)), accumulate=True)


def run_layers(graph, model, rows, compute, activation):
    """Runs all layers, whose sums over relations `compute` adds to."""
    for number in (1, 2):
        above = {}
        for (layer, key), module in model.module_of.items():
            if layer == number:
                kind = key if isinstance(key, str) else key[2]
                out = module(rows[key]) if isinstance(key, str) else compute(key, module, rows)
                above[kind] = above.get(kind, 0) + out
        rows = {k: x if number == 2 else activation(x) for k, x in above.items()}
    return model.head(rows[graph.target])


@pytest.mark.parametrize("uses_dst", [True, False])
def test_rgcn_averages_each_relation(parts_of, uses_dst):
    graph, model, result, rows = prepare(parts_of, "rgcn", uses_dst)

    def compute(relation, module, rows):
        matrix = adjacency(graph, relation)
        return matrix / matrix.sum(1, keepdim=True).clamp(min=1) @ rows[relation[0]] @ module.weight

    logits = run_layers(graph, model, rows, compute, torch.relu)
    assert_equals(graph, model, result, logits)


@pytest.mark.parametrize("uses_dst", [True, False])
def test_rgat_is_gat_conv_by_relation(parts_of, uses_dst):
    pyg = pytest.importorskip("torch_geometric.nn")
    graph, model, result, rows = prepare(parts_of, "rgat", uses_dst)

    def compute(relation, module, rows):
        x_src, x_dst = rows[relation[0]], rows[relation[2]] if uses_dst else None
        dims = (x_src.shape[1], x_dst.shape[1]) if uses_dst else x_src.shape[1]
        conv = pyg.GATConv(dims, HIDDEN // 2, heads=2, add_self_loops=False, bias=False)
        # The peer's parameters are made from the module's, so that gradients reach these.
        for name, parameter in (
            ("lin_src.weight" if uses_dst else "lin.weight", module.src.weight),
            ("att_src", module.att_src[None]),
            ("lin_dst.weight", None if module.dst is None else module.dst.weight),
            ("att_dst", None if module.dst is None else module.att_dst[None]),
        ):
            if parameter is not None:
                owner, _, key = name.rpartition(".")
                owner = conv.get_submodule(owner)
                delattr(owner, key)
                setattr(owner, key, parameter)
        if not uses_dst:
            conv.att_dst.data.zero_()
        edges = torch.stack(graph.edges[relation])
        size = (len(x_src), graph.num_nodes[relation[2]])
        return conv((x_src, x_dst), edges, size=size)

    logits = run_layers(graph, model, rows, compute, torch.relu)
    assert_equals(graph, model, result, logits)


def test_bghgnn_is_one_attention_over_the_union_graph_with_self_loops(parts_of):
    graph, model, result, rows = prepare(parts_of, "bghgnn")
    kinds = list(graph.num_nodes)
    starts, total = {}, 0
    for kind in kinds:
        starts[kind], total = total, total + graph.num_nodes[kind]
    blended = []
    code = relation_code(graph)
    for number, kind in enumerate(kinds):
        ones = torch.ones(graph.num_nodes[kind], 1)
        x = torch.cat([model.widths[number](rows[kind]), ones], 1)
        r = torch.cat([code[kind].float() @ model.blend.code, ones], 1)
        fused = 0
        for rank in range(len(model.blend.weight)):
            by_rank = (x @ model.blend.feature[rank]) * model.blend.kind[number, rank]
            fused = fused + model.blend.weight[rank] * by_rank * (r @ model.blend.relation[rank])
        blended.append(torch.relu(fused + model.blend.bias))
    x = torch.cat(blended)
    pairs = [(s + starts[a], d + starts[c]) for (a, _, c), (s, d) in graph.edges.items()]
    src, dst = (torch.cat([*ends, torch.arange(total)]) for ends in zip(*pairs, strict=True))
    for number in (1, 2):
        module = model.module(number, graph.schema.roots[0])
        values = module.value(x).unflatten(1, (2, -1))
        logits = (values * module.att_src).sum(2)[src] + (values * module.att_dst).sum(2)[dst]
        powers = nn.functional.leaky_relu(logits, 0.2).exp()
        weighted = torch.zeros(total, 2, HIDDEN // 2)
        weighted = weighted.index_add(0, dst, powers[..., None] * values[src])
        sums = torch.zeros(total, 2).index_add(0, dst, powers)
        x = (weighted / sums[..., None]).flatten(1)
        x = nn.functional.elu(x) if number == 1 else x
    first = starts[graph.target]
    logits = model.head(x[first : first + graph.num_nodes[graph.target]])
    assert_equals(graph, model, result, logits)


def test_rgcn_equals_dgls_hetero_graph_conv(parts_of):
    dgl = pytest.importorskip("dgl")
    dglnn = pytest.importorskip("dgl.nn.pytorch")
    graph, model, result, rows = prepare(parts_of, "rgcn", uses_dst=False)
    # DGL's names of relations may not repeat, nor have dots.
    names = {r: (r[0], f"r{i}", r[2]) for i, r in enumerate(graph.edges)}
    block = dgl.heterograph({names[r]: ends for r, ends in graph.edges.items()}, graph.num_nodes)
    for number in (1, 2):
        convs = {}
        for (layer, relation), module in model.module_of.items():
            if layer == number:
                dims = module.weight.shape
                conv = dglnn.GraphConv(
                    *dims, norm="right", weight=False, bias=False, allow_zero_in_degree=True
                )
                convs[names[relation][1]] = Weighted(conv, module.weight)
        used = block.edge_type_subgraph([e for e in block.canonical_etypes if e[1] in convs])
        rows = dglnn.HeteroGraphConv(convs, aggregate="sum")(used, rows)
        rows = {kind: torch.relu(x) if number == 1 else x for kind, x in rows.items()}
    assert_equals(graph, model, result, model.head(rows[graph.target]))


class Weighted(nn.Module):
    """Passes a weight from outside to DGL's GraphConv."""

    def __init__(self, conv, weight):
        super().__init__()
        self.conv, self.weight = conv, weight

    def forward(self, graph, rows):
        return self.conv(graph, rows, weight=self.weight)
