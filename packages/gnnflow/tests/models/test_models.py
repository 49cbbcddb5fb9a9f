"""Models of hops against one root at a time, walked by hand without any sharing of work."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gnnflow as gf
from gnnflow.features.inputs import Inputs, Rows, attach
from gnnflow.models import GAT, TGAT, DySAT, GraphSAGE
from gnnflow.sampling.sampler import TemporalSampler
from shared.errors import ConfigError, DataError

NODES, EVENTS, NODE_DIM, EDGE_DIM, DIM = 20, 300, 6, 3, 8


@pytest.fixture(autouse=True)
def one_thread():
    """Handing such small tensors to other threads takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def graph():
    noise = np.random.default_rng(0)
    graph = gf.TemporalGraph(undirected=True)
    src, dst = noise.integers(0, NODES - 2, (2, EVENTS))
    graph.add_edges(src, dst, np.sort(noise.integers(0, 100, EVENTS)))
    return graph


@pytest.fixture(scope="module")
def store():
    draw = torch.Generator().manual_seed(1)
    return gf.FeatureStore(
        node=torch.randn(NODES, NODE_DIM, generator=draw),
        edge=torch.randn(EVENTS, EDGE_DIM, generator=draw),
    )


# Equal roots, a node without edges, a time before all edges, and the newest.
ROOTS = torch.tensor([3, 0, 3, 19, 7, 3, 7, 11])
TIMES = torch.tensor([50, 90, 50, 50, 0, 20, 60, 1000])

MODELS = {
    "tgat": TGAT,
    "tgat of three hops": lambda *sizes: TGAT(*sizes, num_layers=3, time_dim=5, num_heads=4),
    "dysat": lambda *sizes: DySAT(*sizes, num_snapshots=2),
    "sage": GraphSAGE,
    "gat": GAT,
}


def made(name, node_dim=NODE_DIM, edge_dim=EDGE_DIM, seed=0):
    torch.manual_seed(seed)
    # Time asks for no gradient by itself.
    return MODELS[name](DIM, node_dim, edge_dim).eval().requires_grad_()


def sampler_of(model, graph, **options):
    options = {"policy": "uniform", **options}
    if model.num_snapshots > 1:
        options.update(snapshots=model.num_snapshots, window=25)
    return TemporalSampler(graph, [4, 3, 2][: model.num_layers], **options)


def attention(layer, own, inputs, dt):
    if layer.time is not None:
        inputs = torch.cat(
            [inputs, torch.cos(dt[:, None] * layer.time.frequency + layer.time.phase)], 1
        )
        own_time = layer.time.phase.cos()
    else:
        own_time = own[:0]
    asking = torch.cat([own, own_time]) if len(own) + len(own_time) else own.new_ones(1)
    query = layer.query(asking).unflatten(0, (layer.num_heads, -1))
    key = layer.key(inputs).unflatten(1, (layer.num_heads, -1))
    value = layer.value(inputs).unflatten(1, (layer.num_heads, -1))
    weight = F.leaky_relu((key * query).sum(-1), 0.2).softmax(0)
    mixed = (weight[..., None] * value).sum(0).flatten()
    return layer.norm(F.relu(layer.out(torch.cat([mixed, own]))))


def mean(layer, own, inputs, dt):
    found = inputs.mean(0) if len(inputs) else inputs.new_zeros(inputs.shape[1])
    return layer.neighbor(found) + (0 if layer.own is None else layer.own(own))


def graph_attention(layer, own, inputs, dt):
    heads = layer.of_root.shape[0]
    loop = torch.cat([own, own.new_zeros(inputs.shape[1] - len(own))])
    z = layer.linear(torch.cat([inputs, loop[None]])).view(len(inputs) + 1, heads, -1)
    score = (z * layer.of_neighbor).sum(-1) + (z[-1] * layer.of_root).sum(-1)
    weight = F.leaky_relu(score, 0.2).softmax(0)
    return (weight[..., None] * z).sum(0).flatten() + layer.bias


STEPS = {GraphSAGE: (mean, F.relu), GAT: (graph_attention, F.elu)}


def walked(model, mfg, store):
    """Every occurrence of every root by itself, in float64."""
    step, between = STEPS.get(type(model), (attention, lambda h: h))

    def features(kind, dim, ids):
        return store.gather(kind, ids).double() if dim else torch.zeros(len(ids), 0).double()

    def embed(blocks, layers, hop, root):
        if hop == len(blocks):
            return features("node", model.node_dim, mfg_nodes[root : root + 1])[0]
        block = blocks[hop]
        edges = (block.row == root).nonzero()[:, 0].tolist()
        below = [root, *(len(block.roots) + edge for edge in edges)]
        rows = torch.stack([embed(blocks, layers, hop + 1, at) for at in below])
        if hop + 1 < len(blocks):
            rows = between(rows)
        of_edges = features("edge", model.edge_dim, block.eids[edges])
        inputs = torch.cat([rows[1:], of_edges], 1)
        return step(layers[len(blocks) - 1 - hop], rows[0], inputs, block.dt[edges].double())

    states = []
    for at in range(mfg.num_snapshots):
        mfg_nodes = mfg.nodes(at)
        layers = model.layers[at * model.num_layers : (at + 1) * model.num_layers]
        roots = range(len(mfg.snapshot(at)[0].roots))
        states.append(torch.stack([embed(mfg.snapshot(at), layers, 0, root) for root in roots]))
    if mfg.num_snapshots == 1:
        return states[0]
    cell, h = model.recurrence, torch.zeros(1).double()
    for x in states:
        of_x = F.linear(x, cell.weight_ih_l0, cell.bias_ih_l0)
        h = torch.tanh(of_x + F.linear(h.expand_as(x), cell.weight_hh_l0, cell.bias_hh_l0))
    return h


@pytest.mark.parametrize("dims", [(NODE_DIM, EDGE_DIM), (0, EDGE_DIM), (NODE_DIM, 0)])
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_each_root_by_itself(name, dims, graph, store):
    model = made(name, *dims)
    mfg = sampler_of(model, graph).sample(ROOTS, TIMES)
    exact = copy.deepcopy(model).double()
    out, expected = model(mfg, attach(mfg, store)), walked(exact, mfg, store)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for (where, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        scale = 1 + float(theirs.grad.abs().max())
        torch.testing.assert_close(
            ours.grad.double(),
            theirs.grad,
            atol=2e-5 * scale,
            rtol=0,
            msg=where,
        )


def test_tgat_needs_no_features(graph, store):
    model = made("tgat", 0, 0)
    mfg = sampler_of(model, graph).sample(ROOTS, TIMES)
    out = model(mfg, Inputs(None, None))
    torch.testing.assert_close(
        out.double(), walked(copy.deepcopy(model).double(), mfg, store), atol=1e-5, rtol=0
    )
    assert torch.equal(out, model(mfg, attach(mfg, store))), "features of width 0 are not read"


@pytest.mark.parametrize("name", MODELS)
def test_a_root_does_not_see_the_others(name, graph, store):
    model = made(name)
    sampler = sampler_of(model, graph)
    together = sampler.sample(ROOTS, TIMES)
    out = model(together, attach(together, store))
    for at in range(len(ROOTS)):
        alone = sampler.sample(ROOTS[at : at + 1], TIMES[at : at + 1])
        torch.testing.assert_close(
            model(alone, attach(alone, store))[0], out[at], atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("name", MODELS)
def test_equal_roots_are_one(name, graph, store):
    """In training too, where dropout would tell them apart."""
    model = made(name).train()
    mfg = sampler_of(model, graph).sample(ROOTS, TIMES)
    out = model(mfg, attach(mfg, store))
    assert torch.equal(out[0], out[2])
    assert not torch.equal(out[0], out[5])


@pytest.mark.parametrize("name", MODELS)
def test_a_root_without_neighbours_depends_on_itself_alone(name, graph, store):
    model = made(name, NODE_DIM, EDGE_DIM)
    sampler = sampler_of(model, graph)
    mfg = sampler.sample([19, 18, 19], [50, 50, 2000])
    before = model(mfg, attach(mfg, store))
    assert torch.equal(before[0], before[2])
    assert not torch.equal(before[0], before[1])
    rows = store.gather("node", torch.arange(NODES))
    rows[:18] = 0
    other = gf.FeatureStore(node=rows, edge=torch.zeros(EVENTS, EDGE_DIM))
    assert torch.equal(model(mfg, attach(mfg, other)), before)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_sampled(name, graph, store):
    model = made(name)
    none = TemporalSampler(
        graph, [0] * model.num_layers, snapshots=model.num_snapshots, window=25
    ).sample(ROOTS, TIMES)
    out = model(none, attach(none, store))
    torch.testing.assert_close(
        out.double(), walked(copy.deepcopy(model).double(), none, store), atol=1e-5, rtol=0
    )
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    empty = sampler_of(model, graph).sample(ROOTS[:0], TIMES[:0])
    out = model(empty, attach(empty, store))
    assert out.shape == (0, DIM)
    out.sum().backward()


@pytest.mark.parametrize("name", MODELS)
def test_state_goes_out_and_comes_back(name, graph, store):
    model, other = made(name), made(name, seed=5)
    mfg = sampler_of(model, graph).sample(ROOTS, TIMES)
    inputs = attach(mfg, store)
    assert torch.equal(made(name)(mfg, inputs), model(mfg, inputs)), "a seed makes one model"
    assert not torch.equal(other(mfg, inputs), model(mfg, inputs))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(mfg, inputs), model(mfg, inputs))


def test_snapshots_are_read_oldest_first(graph, store):
    model = made("dysat")
    mfg = sampler_of(model, graph).sample(ROOTS, TIMES)
    inputs = attach(mfg, store)
    turned = gf.MFG([layer[::-1] for layer in mfg.layers])
    turned_inputs = Inputs(inputs.nodes[::-1], [layer[::-1] for layer in inputs.edges])
    out, turned_out = model(mfg, inputs), model(turned, turned_inputs)
    # Without edges both snapshots are alike to the recurrence but for their layers.
    assert not torch.allclose(out[0], turned_out[0])
    with torch.no_grad():
        for ours, theirs in zip(model.layers[:2], model.layers[2:], strict=True):
            ours.load_state_dict(theirs.state_dict())
        model.recurrence.weight_hh_l0.zero_()
    newest = [layer[-1] for layer in mfg.layers]
    alone = TGAT(DIM, NODE_DIM, EDGE_DIM).eval()
    alone.layers = model.layers[2:]
    of_newest = alone(
        gf.MFG(newest), Inputs(inputs.nodes[-1], [edges[-1] for edges in inputs.edges])
    )
    cell = model.recurrence
    expected = torch.tanh(F.linear(of_newest, cell.weight_ih_l0, cell.bias_ih_l0) + cell.bias_hh_l0)
    torch.testing.assert_close(model(mfg, inputs), expected, atol=1e-6, rtol=0)


def test_wrong_samples_and_features_are_refused(graph, store, unchecked):
    model = made("tgat")
    mfg = sampler_of(model, graph).sample(ROOTS, TIMES)
    inputs = attach(mfg, store)
    sequences = TemporalSampler(graph, [4]).sample(ROOTS, TIMES, layout="padded")
    with pytest.raises(ConfigError, match=r"TGAT reads hops, got Sequences.*layout='mfg'"):
        model(sequences, attach(sequences, store))
    with pytest.raises(ConfigError, match="2 layers over 1 snapshots, got 1 hops of 1"):
        model(gf.MFG(mfg.layers[:1]), inputs)
    with pytest.raises(ConfigError, match="got 2 hops of 2"):
        model(gf.MFG([[layer, layer] for layer in mfg.layers]), inputs)
    with pytest.raises(DataError, match="node_dim=6, got node features of 0 columns"):
        model(mfg, Inputs(None, inputs.edges))
    with pytest.raises(DataError, match="edge_dim=3, got edge features of 0 columns"):
        model(mfg, Inputs(inputs.nodes, None))
    wide = Rows(torch.zeros(1, 7), torch.zeros_like(inputs.nodes.index))
    with pytest.raises(DataError, match="node_dim=6, got node features of 7 columns"):
        model(mfg, Inputs(wide, inputs.edges))
    short = Rows(inputs.nodes.values, inputs.nodes.index[1:])
    with pytest.raises(
        DataError, match=r"occurrences, got .*: attach features to this very sample"
    ):
        model(mfg, Inputs(short, inputs.edges))
    for bad in (-1, 99):
        index = inputs.edges[1].index.clone()
        index[-1] = bad
        edges = [inputs.edges[0], Rows(inputs.edges[1].values, index)]
        with pytest.raises(DataError, match=r"indices of edge features in \[0, "):
            model(mfg, Inputs(inputs.nodes, edges))


def test_half_precision_runs_padded(graph, store):
    """Any other type than float32 takes the form that GPUs take."""
    model = made("tgat")
    mfg = sampler_of(model, graph).sample(ROOTS, TIMES)
    exact = model(mfg, attach(mfg, store))
    half = copy.deepcopy(model).bfloat16()(mfg, attach(mfg, store))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, atol=0.1, rtol=0.1)
