"""Aggregations, losses and gradients on 1, 2 and 4 ranks against one process of DGL and PyG."""

from datetime import timedelta

import pytest
import torch
from torch.nn import functional as F

import adaqp
from adaqp.training import nn
from shared.comms import Group, RankPool, all_reduce

dgl = pytest.importorskip("dgl", reason="DGL is the independent implementation here")


@pytest.fixture(scope="module")
def pool4():
    with RankPool(4, timeout=timedelta(seconds=60)) as pool:
        yield pool


def forward_and_gradients(folder, conv, overlap, backward):
    """Rows in global order, the loss, and the gradients of weights and of input rows."""
    dg = adaqp.load(folder)
    torch.manual_seed(0)
    first = getattr(nn, conv)(dg, dg.feat.shape[1], 16)
    second = getattr(nn, conv)(dg, 16, 5)
    x = dg.feat.clone().requires_grad_()
    with dg.messages(adaqp.Exact(), overlap=overlap, backward=backward):
        out = second(torch.tanh(first(x)))
        # Every node counts, by its id, so that no gradient is trivially zero.
        loss = (out * torch.sin(dg.global_ids[:, None].float())).sum()
        loss.backward()
    rows = torch.zeros(dg.num_nodes, 5).index_copy(0, dg.global_ids, out.detach())
    grad = torch.zeros(dg.num_nodes, x.shape[1]).index_copy(0, dg.global_ids, x.grad)
    weights = torch.cat(
        [p.grad.flatten() for m in (first, second) for p in m.parameters()] + [loss.detach()[None]]
    )
    if dg.group is not None:
        for tensor in (rows, grad, weights):
            all_reduce(Group.world(), tensor)
    state = [m.state_dict() for m in (first, second)]
    return rows, grad, weights, state


def dgl_forward_and_gradients(graph, conv, state):
    own = dgl.graph((graph.src, graph.dst), num_nodes=graph.num_nodes)
    if conv == "GCNConv":
        own = dgl.add_self_loop(dgl.remove_self_loop(own))
    x = graph.feat.clone().requires_grad_()
    layers = []
    for weights, (in_dim, out_dim) in zip(state, ((x.shape[1], 16), (16, 5)), strict=True):
        if conv == "GCNConv":
            layer = dgl.nn.GraphConv(in_dim, out_dim, norm="both", allow_zero_in_degree=True)
            layer.load_state_dict(weights)
        else:
            layer = dgl.nn.SAGEConv(in_dim, out_dim, "mean")
            layer.fc_self.weight.data = weights["own.weight"]
            layer.fc_self.bias.data = weights["own.bias"]
            layer.fc_neigh.weight.data = weights["neighbour.weight"]
        layers.append(layer)
    out = layers[1](own, torch.tanh(layers[0](own, x)))
    loss = (out * torch.sin(torch.arange(graph.num_nodes)[:, None].float())).sum()
    loss.backward()
    if conv == "GCNConv":
        params = [p for layer in layers for p in (layer.weight, layer.bias)]
    else:
        params = [
            p
            for layer in layers
            for p in (layer.fc_self.weight, layer.fc_self.bias, layer.fc_neigh.weight)
        ]
    weights = torch.cat([p.grad.flatten() for p in params] + [loss.detach()[None]])
    return out.detach(), x.grad, weights


def relative(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("conv", ["GCNConv", "SAGEConv"])
@pytest.mark.parametrize("kind", ["sbm", "directed"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_rows_loss_and_gradients_equal_dgl(conv, kind, parts, request, cut, pool2, pool4):
    graph = request.getfixturevalue(kind)
    folder = cut(graph, parts)
    ways = [("edges", "auto"), (None, "push"), ("nodes", "push")]
    if kind == "sbm":
        ways += [("nodes", "pull"), (None, "pull")]
    for overlap, backward in ways:
        args = (folder, conv, overlap, backward)
        pool = {2: pool2, 4: pool4}.get(parts)
        if pool is None:
            rows, grad, weights, state = forward_and_gradients(*args)
        else:
            rows, grad, weights, state = pool.run(forward_and_gradients, *args).results[0]
        theirs = dgl_forward_and_gradients(graph, conv, state)
        assert relative(rows, theirs[0]) < 1e-5
        assert relative(grad, theirs[1]) < 1e-5
        assert relative(weights, theirs[2]) < 1e-5


def pyg_layers(folder, conv):
    """Output and input gradient of one layer whose weights the parent knows."""
    dg = adaqp.load(folder)
    torch.manual_seed(0)
    layer = getattr(nn, conv)(dg, dg.feat.shape[1], 8)
    x = dg.feat.clone().requires_grad_()
    out = layer(x)
    (out * torch.sin(dg.global_ids[:, None].float())).sum().backward()
    rows = torch.zeros(dg.num_nodes, 8).index_copy(0, dg.global_ids, out.detach())
    grad = torch.zeros(dg.num_nodes, x.shape[1]).index_copy(0, dg.global_ids, x.grad)
    for tensor in (rows, grad):
        all_reduce(Group.world(), tensor)
    return rows, grad, layer.state_dict()


@pytest.mark.parametrize("kind", ["sbm", "directed"])
def test_gat_equals_pyg(kind, request, cut, pool2):
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyG is the independent implementation")
    graph = request.getfixturevalue(kind)
    rows, grad, state = pool2.run(pyg_layers, cut(graph, 2), "GATConv").results[0]
    theirs = pyg.GATConv(graph.feat.shape[1], 2, heads=4)
    theirs.lin.weight.data = state["lin.weight"]
    theirs.att_src.data, theirs.att_dst.data = state["att_src"][None], state["att_dst"][None]
    x = graph.feat.clone().requires_grad_()
    out = theirs(x, torch.stack([graph.src, graph.dst]))
    (out * torch.sin(torch.arange(graph.num_nodes)[:, None].float())).sum().backward()
    assert relative(rows, out.detach()) < 1e-5
    assert relative(grad, x.grad) < 1e-5


@pytest.mark.parametrize("kind", ["sbm", "directed"])
def test_gin_equals_pyg(kind, request, cut, pool2):
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyG is the independent implementation")
    graph = request.getfixturevalue(kind)
    rows, grad, state = pool2.run(pyg_layers, cut(graph, 2), "GINConv").results[0]
    mlp = torch.nn.Sequential(
        torch.nn.Linear(graph.feat.shape[1], 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)
    )
    theirs = pyg.GINConv(mlp, train_eps=True)  # draws new weights for the MLP it is given
    mlp.load_state_dict({k.removeprefix("mlp."): v for k, v in state.items() if "mlp" in k})
    x = graph.feat.clone().requires_grad_()
    out = theirs(x, torch.stack([graph.src, graph.dst]))
    (out * torch.sin(torch.arange(graph.num_nodes)[:, None].float())).sum().backward()
    assert relative(rows, out.detach()) < 1e-5
    assert relative(grad, x.grad) < 1e-5


def halo_with_user_layer(folder):
    """A layer of the user's own over dg.halo and dg.edge_index."""
    dg = adaqp.load(folder)
    x = dg.feat.clone().requires_grad_()
    src, dst = dg.edge_index()
    far = dg.halo(x)
    out = torch.zeros(dg.num_local, x.shape[1]).index_add(0, dst, F.relu(far[src]))
    (out * torch.sin(dg.global_ids[:, None].float())).sum().backward()
    grad = torch.zeros(dg.num_nodes, x.shape[1]).index_copy(0, dg.global_ids, x.grad)
    all_reduce(Group.world(), grad)
    return grad


def test_a_users_layer_over_the_halo_has_the_gradient_of_one_process(directed, cut, pool2):
    grad = pool2.run(halo_with_user_layer, cut(directed, 2)).results[0]
    x = directed.feat.clone().requires_grad_()
    out = torch.zeros_like(x).index_add(0, directed.dst, F.relu(x[directed.src]))
    (out * torch.sin(torch.arange(directed.num_nodes)[:, None].float())).sum().backward()
    assert relative(grad, x.grad) < 1e-5
