"""One part, and so any number of them, against PyG's HeteroConv and HGTConv on the whole graph."""

import pytest
import torch
from graphs import CITES, PAID, scholars
from running import HIDDEN, MODELS, distance, merge_rows, train
from torch import nn

from heta.graph.hetero_graph import HeteroGraph
from heta.graph.part import load
from heta.rows.tables import initial_rows

pyg = pytest.importorskip("torch_geometric.nn")
SEEDS = list(range(17, 60, 2))


class Relation(nn.Module):
    """Passes a pair of rows to a convolution, those of destinations without columns if not read."""

    def __init__(self, conv, uses_dst):
        super().__init__()
        self.conv, self.uses_dst = conv, uses_dst

    def forward(self, x, edge_index):
        x_src, x_dst = (x, x) if torch.is_tensor(x) else x
        return self.conv((x_src, x_dst if self.uses_dst else x_dst[:, :0]), edge_index)


def input_rows(graph):
    """Features, and the rows that types without features begin with; leaves of a graph of autograd."""
    rows = dict(graph.feat)
    for number, (name, count) in enumerate(graph.num_nodes.items()):
        if name not in rows:
            rows[name] = initial_rows(torch.arange(count), HIDDEN, 0, number).requires_grad_()
    return rows


def edge_index_of(graph):
    return {relation: torch.stack(ends) for relation, ends in graph.edges.items()}


def run_hetero_conv(graph, model, aggr, layers, uses_dst):
    """Runs a HeteroModel's own modules as PyG's HeteroConv would."""
    x, edges = input_rows(graph), edge_index_of(graph)
    leaves = {name: rows for name, rows in x.items() if rows.requires_grad}
    for number in range(1, layers + 1):
        convs = {
            relation: Relation(model.module(number, relation), uses_dst)
            for relation in edges
            if (number, relation) in model.module_of
            and relation[0] in x
            and (not uses_dst or relation[2] in x)
        }
        x_dst = {name: torch.empty(count, 0) for name, count in graph.num_nodes.items()}
        layer = pyg.HeteroConv(convs, aggr)
        x = layer({**x_dst, **x}, {relation: edges[relation] for relation in convs})
        if aggr is None:
            x = {name: model.stack_function(rows) for name, rows in x.items()}
        if number < layers:
            x = {name: model.activation(rows) for name, rows in x.items()}
    return model.head(x[graph.target]), leaves


def assert_equals(graph, result, model, logits, leaves):
    """Compares a heta training's first step with logits of plain autograd over the same weights."""
    assert distance(result["logits"], logits) <= 1e-5
    label = graph.label[SEEDS]
    loss = nn.functional.cross_entropy(logits[SEEDS], label)
    loss.backward()
    assert result["losses"][0] == pytest.approx(float(loss), rel=1e-5)
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert result["grads"].keys() == wanted.keys()
    for name, grad in wanted.items():
        assert distance(result["grads"][name], grad) <= 1e-5, name
    for name, rows in merge_rows([result], "row_grads").items():
        grad = torch.zeros_like(rows) if leaves[name].grad is None else leaves[name].grad
        assert distance(rows, grad) <= 1e-5, name


@pytest.mark.unchecked
@pytest.mark.parametrize("uses_dst", [True, False])
@pytest.mark.parametrize(
    ("name", "aggr"),
    [("sage-sum", "sum"), ("gat-mean", "mean"), ("graph-max", "max"), ("transformer-stack", None),
     ("sage-concatenated", "cat")],
)  # fmt: skip
def test_own_convolutions_equal_hetero_conv(parts_of, name, aggr, uses_dst):
    graph = scholars()
    for layers in (1, 2, 3) if name in ("sage-sum", "transformer-stack") else (2,):
        folder = parts_of(graph, [graph.schema.roots], layers=layers, uses_dst=uses_dst)
        result = train(folder, name, batches=[SEEDS], fanouts=[-1] * layers)
        model = MODELS[name](load(folder))
        model.load_state_dict(result["initial"])
        logits, leaves = run_hetero_conv(graph, model, aggr, layers, uses_dst)
        assert_equals(graph, result, model, logits, leaves)


@pytest.mark.unchecked
def test_types_without_relations_into_them_are_left_out_above_the_first_layer(parts_of):
    full = scholars()
    edges = {r: ends for r, ends in full.edges.items() if r[2] != "place"}
    graph = HeteroGraph(full.num_nodes, edges, full.feat, target="paper", label=full.label)
    assert PAID in edges
    for uses_dst in (True, False):
        folder = parts_of(graph, [graph.schema.roots], layers=3, uses_dst=uses_dst)
        result = train(folder, "sage-mean", batches=[SEEDS])
        model = MODELS["sage-mean"](load(folder))
        model.load_state_dict(result["initial"])
        logits, leaves = run_hetero_conv(graph, model, "mean", 3, uses_dst)
        assert_equals(graph, result, model, logits, leaves)


class PeerHGT(nn.Module):
    """Two of PyG's HGTConv with the weights of a heta model."""

    def __init__(self, model, graph, heads):
        super().__init__()
        self.head, self.layers, self.graph = model.head, [], graph
        types, relations = list(graph.num_nodes), list(graph.edges)
        for number, below in enumerate(model.dims[:-1]):
            conv = pyg.HGTConv(below, HIDDEN, (types, relations), heads=heads)
            with torch.no_grad():
                for i, name in enumerate(types):
                    key, value = model.keys_values[number][i].weight.split(HIDDEN)
                    key_bias, value_bias = model.keys_values[number][i].bias.split(HIDDEN)
                    query = model.queries[number][i]
                    own = conv.kqv_lin.lins[name]
                    own.weight.copy_(torch.cat([key, query.weight, value]))
                    own.bias.copy_(torch.cat([key_bias, query.bias, value_bias]))
                    output = model.outputs[number][i]
                    conv.out_lin.lins[name].weight.copy_(output.linear.weight)
                    conv.out_lin.lins[name].bias.copy_(output.linear.bias)
                    if output.skip is not None:
                        conv.skip[name].fill_(output.skip)
                for r, relation in enumerate(relations):
                    module = model.module_of.get((number + 1, relation))
                    if module is None:  # nothing above needs it
                        continue
                    for head in range(heads):
                        conv.k_rel.weight[head * len(relations) + r] = module.key[head]
                        conv.v_rel.weight[head * len(relations) + r] = module.value[head]
                    conv.p_rel["__".join(relation)].copy_(module.prior[None])
            self.layers.append(conv)

    def forward(self, x):
        for conv in self.layers:
            x = conv(x, edge_index_of(self.graph))
        return self.head(x[self.graph.target])


@pytest.mark.unchecked
def test_hgt_equals_hgt_conv(parts_of):
    graph = scholars()
    folder = parts_of(graph, [graph.schema.roots])
    torch.manual_seed(0)
    model = MODELS["hgt"](load(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            # Priors and shares of ones would hide where they are used.
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    peer = PeerHGT(model, graph, heads=2)
    x = input_rows(graph)
    logits = peer(x)
    result = train(folder, "hgt", batches=[SEEDS], state=state)
    assert distance(result["logits"], logits) <= 1e-5
    loss = nn.functional.cross_entropy(logits[SEEDS], graph.label[SEEDS])
    loss.backward()
    assert result["losses"][0] == pytest.approx(float(loss), rel=1e-5)
    for name, rows in merge_rows([result], "row_grads").items():
        assert distance(rows, x[name].grad) <= 1e-5, name
    number = list(graph.edges).index(CITES)
    for layer, conv in enumerate(peer.layers):
        prefix = f"convs.{layer + 1}.paper|cites|paper"
        key, prior = result["grads"][f"{prefix}.key"], result["grads"][f"{prefix}.prior"]
        assert distance(key[1], conv.k_rel.weight.grad[len(graph.edges) + number]) <= 1e-5
        assert distance(prior[None], conv.p_rel["__".join(CITES)].grad) <= 1e-5
        queries = result["grads"][f"queries.{layer}.0.weight"]
        grad = conv.kqv_lin.lins["paper"].weight.grad[HIDDEN : 2 * HIDDEN]
        assert distance(queries, grad) <= 1e-5
