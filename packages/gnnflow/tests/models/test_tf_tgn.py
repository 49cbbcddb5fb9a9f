"""TF-TGN against attention written out a sequence at a time, and sharded over ranks."""

import copy
import math
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gnnflow as gf
from gnnflow.features.inputs import Inputs, Rows, attach
from gnnflow.models import TFTGN, next_neighbors
from gnnflow.sampling.sampler import TemporalSampler
from shared.comms import RankPool
from shared.errors import ConfigError, DataError

NODES, EVENTS, NODE_DIM, EDGE_DIM, DIM = 20, 300, 6, 3, 8

# Equal roots, a node without edges, a time before all edges, one with few edges, and the newest.
ROOTS = torch.tensor([3, 0, 3, 19, 7, 3, 7, 11])
TIMES = torch.tensor([50, 90, 50, 50, 0, 6, 60, 1000])


@pytest.fixture(autouse=True)
def one_thread():
    """Handing such small tensors to other threads takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def graph():
    noise = np.random.default_rng(0)
    graph = gf.TemporalGraph(undirected=True)
    src, dst = noise.integers(0, NODES - 2, (2, EVENTS))
    graph.add_edges(src, dst, np.sort(noise.integers(0, 100, EVENTS)))
    return graph


def store():
    draw = torch.Generator().manual_seed(1)
    return gf.FeatureStore(
        node=torch.randn(NODES, NODE_DIM, generator=draw),
        edge=torch.randn(EVENTS, EDGE_DIM, generator=draw),
    )


def sampled(fanout=5, roots=ROOTS, times=TIMES):
    return TemporalSampler(graph(), [fanout]).sample(roots, times, layout="padded")


def made(node_dim=NODE_DIM, edge_dim=EDGE_DIM, seed=0, **options):
    torch.manual_seed(seed)
    # Time asks for no gradient by itself.
    return TFTGN(DIM, node_dim, edge_dim, **options).eval().requires_grad_()


def by_hand(model, sample, root, features):
    """What every place of one sequence gives that is a neighbour or the root; in float64."""
    there = sample.mask[root]
    nodes, eids, dt = (c[root][there] for c in (sample.nodes, sample.eids, sample.dt))
    x = torch.cos(dt.double()[:, None] * model.time.frequency + model.time.phase)
    if model.node is not None:
        x = x + model.node(features.gather("node", nodes).double())
    if model.edge is not None:
        x[:-1] += model.edge(features.gather("edge", eids[:-1]).double())
    x[-1] += model.suffix
    for block in model.blocks:
        read = block.attention_norm(x)
        out = []
        for at in range(len(x)):
            heads = []
            for query, key, value in zip(
                block.query(read[at]).chunk(block.num_heads),
                block.key(read[: at + 1]).chunk(block.num_heads, 1),
                block.value(read[: at + 1]).chunk(block.num_heads, 1),
                strict=True,
            ):
                heads.append((key @ query / math.sqrt(len(query))).softmax(0) @ value)
            out.append(block.out(torch.cat(heads)))
        x = x + torch.stack(out)
        first, last = block.mlp[0], block.mlp[2]
        x = x + last(F.gelu(first(block.mlp_norm(x))))
    return model.norm(x)


@pytest.mark.parametrize("dims", [(NODE_DIM, EDGE_DIM), (0, EDGE_DIM), (NODE_DIM, 0), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 1, "num_heads": 4}])
def test_it_equals_a_sequence_at_a_time(dims, options):
    model, sample, features = made(*dims, **options), sampled(), store()
    inputs = attach(sample, features)
    exact = copy.deepcopy(model).double()
    expected = [by_hand(exact, sample, root, features) for root in range(len(ROOTS))]
    out = model(sample, inputs)
    last = torch.stack([places[-1] for places in expected])
    torch.testing.assert_close(out.double(), last, atol=3e-5, rtol=0)
    out.sin().sum().backward()
    last.sin().sum().backward()
    for (where, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        scale = 1 + float(theirs.grad.abs().max())
        torch.testing.assert_close(
            ours.grad.double(), theirs.grad, atol=2e-5 * scale, rtol=0, msg=where
        )
    every = model(sample, inputs, every_position=True)
    assert every.shape == (len(ROOTS), 6, DIM)
    torch.testing.assert_close(every[sample.mask].double(), torch.cat(expected), atol=3e-5, rtol=0)


def test_later_neighbours_change_nothing_earlier():
    model, sample, features = made(), sampled(), store()
    before = model(sample, attach(sample, features), every_position=True)
    for place in range(6):
        nodes, dt = sample.nodes.clone(), sample.dt.clone()
        nodes[:, place] = (nodes[:, place] + 1) % NODES
        dt[:, place] += 3
        other = replace(sample, nodes=nodes, dt=dt)
        after = model(other, attach(other, features), every_position=True)
        is_same = (before - after).abs().amax(-1) < 1e-5
        assert is_same[:, :place][sample.mask[:, :place]].all()
        seen = sample.mask & sample.mask[:, place : place + 1]
        assert not is_same[:, place:][seen[:, place:]].any()


def test_padding_does_not_matter():
    model, features = made(), store()
    longest = sampled(40)
    few = longest.mask.sum(1) <= 6
    assert 2 <= int(few.sum()) < len(ROOTS)
    outs = []
    for fanout in (5, 9, 40):
        sample = sampled(fanout)
        outs.append(model(sample, attach(sample, features))[few])
        junk = torch.where(sample.mask, sample.dt, 77)
        other = replace(sample, nodes=torch.where(sample.mask, sample.nodes, 13), dt=junk)
        outs.append(model(other, attach(other, features))[few])
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=1e-6, rtol=0)


def test_a_root_does_not_see_the_others():
    model, features = made(), store()
    sample = sampled()
    out = model(sample, attach(sample, features))
    for at in range(len(ROOTS)):
        alone = sampled(5, ROOTS[at : at + 1], TIMES[at : at + 1])
        torch.testing.assert_close(
            model(alone, attach(alone, features))[0], out[at], atol=1e-6, rtol=0
        )
    model.train()
    out = model(sample, attach(sample, features))
    assert torch.equal(out[0], out[2]), "equal roots are computed once"
    assert not torch.equal(out[0], out[5])


@pytest.mark.parametrize("fanout", [0, 5])
def test_nothing_sampled(fanout):
    model, features = made(), store()
    sample = sampled(fanout, torch.tensor([19, 18]), torch.tensor([50, 50]))
    out = model(sample, attach(sample, features))
    exact = copy.deepcopy(model).double()
    for root in range(2):
        expected = by_hand(exact, sample, root, features)[-1]
        torch.testing.assert_close(out[root].double(), expected, atol=1e-5, rtol=0)
    out.sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    empty = sampled(fanout, ROOTS[:0], TIMES[:0])
    out = model(empty, attach(empty, features))
    assert out.shape == (0, DIM)
    out.sum().backward()


def test_next_neighbours_are_what_follows():
    sample = sampled(4)
    targets, is_target = next_neighbors(sample)
    assert targets.shape == is_target.shape == (len(ROOTS), 3)
    for root in range(len(ROOTS)):
        neighbors = sample.nodes[root][:-1][sample.mask[root][:-1]].tolist()
        assert targets[root][is_target[root]].tolist() == neighbors[1:]
        # A target belongs to the place before it.
        places = is_target[root].nonzero()[:, 0]
        assert sample.nodes[root][places].tolist() == neighbors[:-1]
    assert next_neighbors(sampled(0))[0].shape == (len(ROOTS), 0)


def test_prefixes_are_trained_on():
    model, sample, features = made(), sampled(), store()
    targets, is_target = next_neighbors(sample)
    every = model(sample, attach(sample, features), every_position=True)[:, : targets.shape[1]]
    scores = every[is_target] @ torch.randn(DIM, NODES)
    F.cross_entropy(scores, targets[is_target]).backward()
    assert all(
        parameter.grad is not None
        for parameter in model.parameters()
        if parameter is not model.suffix
    )


def test_state_goes_out_and_comes_back():
    model, other, sample = made(), made(seed=5), sampled()
    inputs = attach(sample, store())
    assert torch.equal(made()(sample, inputs), model(sample, inputs)), "a seed makes one model"
    assert not torch.equal(other(sample, inputs), model(sample, inputs))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(sample, inputs), model(sample, inputs))


def test_wrong_samples_and_features_are_refused(unchecked):
    model, sample = made(), sampled()
    inputs = attach(sample, store())
    mfg = TemporalSampler(graph(), [5]).sample(ROOTS, TIMES)
    with pytest.raises(ConfigError, match=r"TFTGN reads sequences, got MFG.*layout='padded'"):
        model(mfg, attach(mfg, store()))
    with pytest.raises(DataError, match="node_dim=6, got node features of 0 columns"):
        model(sample, Inputs(None, inputs.edges))
    with pytest.raises(DataError, match="edge_dim=3, got edge features of 0 columns"):
        model(sample, Inputs(inputs.nodes, None))
    short = Rows(inputs.nodes.values, inputs.nodes.index[1:])
    with pytest.raises(DataError, match="node features of 48 occurrences, got 47"):
        model(sample, Inputs(short, inputs.edges))
    with pytest.raises(ConfigError, match="num_heads to divide dim, got 3 and 8"):
        TFTGN(8, num_heads=3)
    with pytest.raises(ConfigError, match="num_blocks of at least 1"):
        TFTGN(8, num_blocks=0)


def sharded(roots, times):
    """Output, and gradients of its sum over all ranks' roots, of a model sharded block by block."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = made()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    half = slice(dist.get_rank(), None, 2)
    sample = sampled(5, roots[half], times[half])
    out = model(sample, attach(sample, store()))
    out.sin().sum().backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return out.detach(), grads, [p.to_local().numel() for p in model.parameters()]


@pytest.mark.slow
def test_fully_shard_wraps_it_block_by_block():
    with RankPool(2, timeout=timedelta(seconds=60)) as pool:
        results = pool.run(sharded, ROOTS, TIMES).results
    model, sample = made(), sampled()
    out = model(sample, attach(sample, store()))
    for rank, (theirs, _, num_local) in enumerate(results):
        torch.testing.assert_close(theirs, out[rank::2], atol=1e-6, rtol=0)
        assert sum(num_local) < 0.6 * sum(p.numel() for p in model.parameters())
    # Gradients are the mean over ranks.
    out.sin().sum().backward()
    for name, parameter in model.named_parameters():
        for _, grads, _ in results:
            torch.testing.assert_close(2 * grads[name], parameter.grad, atol=1e-5, rtol=1e-5)
