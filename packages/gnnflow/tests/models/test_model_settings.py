"""What models refuse, what trainers ask of them, and the heads."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import gnnflow as gf
from gnnflow.features.inputs import Inputs
from gnnflow.models import GAT, TFTGN, TGAT, DySAT, GraphSAGE, LinkHead, NodeHead
from gnnflow.sampling.sampler import TemporalSampler
from shared.errors import ConfigError

DIM = 8


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TGAT(0), "dim of at least 1, got 0"),
        (lambda: TGAT(8, -1), "node_dim of at least 0"),
        (lambda: TGAT(8, num_layers=0), "num_layers of at least 1"),
        (lambda: TGAT(8, num_heads=3), "num_heads to divide dim"),
        (lambda: DySAT(8, 0, 0), "nothing to read"),
        (lambda: DySAT(8, 1, num_snapshots=0), "num_snapshots of at least 1"),
        (lambda: GraphSAGE(8, 0, 0), "GraphSAGE without features"),
        (lambda: GAT(8, 0, 0), "GAT without features"),
        (lambda: GAT(8, 2, num_heads=3), "num_heads to divide dim"),
    ],
)
def test_settings_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_what_trainers_ask_models():
    kinds = {kind: kind(DIM, 1, 1) for kind in (TGAT, DySAT, GraphSAGE, GAT, TFTGN)}
    assert {kind for kind, model in kinds.items() if model.uses_time} == {TGAT, DySAT, TFTGN}
    assert {kind for kind, model in kinds.items() if model.layout == "padded"} == {TFTGN}
    assert all(model.dim == DIM for model in kinds.values())
    assert [kinds[kind].num_layers for kind in (TGAT, DySAT, TFTGN)] == [2, 2, 1]
    assert kinds[DySAT].num_snapshots == 3


def test_link_heads_score_pairs_and_candidates():
    torch.manual_seed(0)
    head = LinkHead(4)
    src, dst, others = torch.randn(5, 4), torch.randn(5, 4), torch.randn(5, 3, 4)
    out = head(src, dst)
    expected = [head.out(F.relu(head.src(s) + head.dst(d))) for s, d in zip(src, dst, strict=True)]
    torch.testing.assert_close(out, torch.cat(expected))
    each = head(src[:, None], others)
    assert each.shape == (5, 3)
    torch.testing.assert_close(each[:, 1], head(src, others[:, 1]))
    assert not torch.allclose(head(src, dst), head(dst, src))
    assert NodeHead(4, 7)(src).shape == (5, 7)


def test_a_node_class_is_learned():
    """From when a node was last active, which only time tells."""
    noise = np.random.default_rng(0)
    graph = gf.TemporalGraph(undirected=True)
    src, dst = noise.integers(0, 18, (2, 300))
    graph.add_edges(src, dst, np.sort(noise.integers(0, 100, 300)))
    torch.manual_seed(0)
    model, head = TGAT(16, num_layers=1), NodeHead(16, 2)
    sampler = TemporalSampler(graph, [5])
    nodes = torch.arange(18).repeat(4)
    times = torch.arange(40, 100, 15).repeat_interleave(18)
    mfg = sampler.sample(nodes, times)
    block = mfg.layers[0]
    newest = torch.full((len(nodes),), 99).scatter_reduce(0, block.row, block.dt, "amin")
    is_active = (newest <= newest.median()).long()
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.03)
    for _ in range(50):
        loss = F.cross_entropy(head(model(mfg, Inputs(None, None))), is_active)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = head(model.eval()(mfg, Inputs(None, None))).argmax(1) == is_active
    assert float(right.float().mean()) > 0.9
