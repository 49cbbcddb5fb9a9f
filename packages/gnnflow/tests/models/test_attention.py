"""Layers over sampled neighbours against projections of every occurrence, and against PyG."""

import math

import pytest
import torch
from torch.nn import functional as F

from gnnflow.models import TemporalAttention, TimeEncoding
from gnnflow.models.gat import GATLayer
from gnnflow.models.hops import Hop
from gnnflow.models.sage import SAGELayer
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def one_thread():
    """Handing such small tensors to other threads takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hop_of(counts, num_rows=7, edge_dim=3, seed=0, dtype=torch.float32, span=50.0):
    draw = torch.Generator().manual_seed(seed)
    num_edges = sum(counts)
    counts = torch.tensor(counts, dtype=torch.int64)
    return Hop(
        own=torch.randint(num_rows, (len(counts),), generator=draw),
        neighbors=torch.randint(num_rows, (num_edges,), generator=draw),
        starts=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        dt=torch.rand(num_edges, generator=draw, dtype=torch.float64) * span,
        edge_rows=torch.randn(5, edge_dim, generator=draw, dtype=dtype),
        edge_index=torch.randint(5, (num_edges,), generator=draw),
    )


def test_a_layers_gradients_by_finite_differences():
    hop = hop_of([3, 0, 2], edge_dim=2, dtype=torch.float64, span=2.0)
    torch.manual_seed(0)
    layer = TemporalAttention(3, 2, 3, 4, dropout=0).double()
    rows = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    names, values = zip(*layer.named_parameters(), strict=True)

    def output(rows, *values):
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, state, (rows, hop))

    assert torch.autograd.gradcheck(output, (rows, *values), fast_mode=True)


def projected_an_occurrence(layer, rows, hop):
    """The layer as it is written down: keys and values of every edge."""
    found = []
    for root in range(len(hop.own)):
        edges = slice(*hop.starts[root : root + 2].tolist())
        own = rows[hop.own[root]]
        inputs = [rows[hop.neighbors[edges]], hop.edge_rows[hop.edge_index[edges]]]
        asking = own
        if layer.time is not None:
            inputs.append(layer.time(hop.dt[edges]))
            asking = torch.cat([own, layer.time(torch.zeros(()))])
        inputs = torch.cat(inputs, 1)
        query = layer.query(asking if len(asking) else own.new_ones(1))
        heads = []
        for asked, key, value in zip(
            query.chunk(layer.num_heads),
            layer.key(inputs).chunk(layer.num_heads, 1),
            layer.value(inputs).chunk(layer.num_heads, 1),
            strict=True,
        ):
            heads.append(F.leaky_relu(key @ asked, layer.slope).softmax(0) @ value)
        out = layer.out(torch.cat([*heads, own]))
        found.append(layer.norm(F.relu(out)))
    return torch.stack(found)


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize(
    ("dim", "edge_dim", "time_dim"), [(6, 3, 5), (0, 0, 5), (0, 3, 0), (6, 0, 0)]
)
def test_the_layer_equals_projections_of_every_occurrence(dim, edge_dim, time_dim, num_heads):
    torch.manual_seed(0)
    layer = TemporalAttention(dim, edge_dim, time_dim, 12, num_heads=num_heads).eval()
    hop = hop_of([4, 0, 1, 7, 7, 0], num_rows=3, edge_dim=edge_dim)
    rows = torch.randn(3, dim)
    with torch.no_grad():
        out, expected = layer(rows, hop), projected_an_occurrence(layer, rows, hop)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_the_layer_equals_pygs_transformer_conv():
    conv = pytest.importorskip("torch_geometric.nn").TransformerConv
    torch.manual_seed(0)
    dim, edge_dim, time_dim, heads, out_dim = 6, 3, 4, 2, 10
    layer = TemporalAttention(dim, edge_dim, time_dim, out_dim, num_heads=heads, slope=1).eval()
    head_dim = out_dim // heads
    theirs = conv(dim, head_dim, heads, edge_dim=edge_dim + time_dim, root_weight=False)
    with torch.no_grad():
        # Theirs divides scores by the root of the width; its edges join keys and values alike.
        layer.query.weight[:, :dim] = theirs.lin_query.weight / math.sqrt(head_dim)
        layer.query.weight[:, dim:] = 0
        layer.query.bias[:] = theirs.lin_query.bias / math.sqrt(head_dim)
        for ours, of_rows in ((layer.key, theirs.lin_key), (layer.value, theirs.lin_value)):
            ours.weight[:] = torch.cat([of_rows.weight, theirs.lin_edge.weight], 1)
            ours.bias[:] = of_rows.bias
        layer.out.weight[:] = torch.eye(out_dim, out_dim + dim)
        layer.out.bias[:] = 0
        hop, rows = hop_of([4, 2, 1, 7], edge_dim=edge_dim), torch.randn(7, dim)
        row = torch.repeat_interleave(hop.starts.diff())
        encoded = torch.cos(hop.dt[:, None] * layer.time.frequency + layer.time.phase).float()
        edge_attr = torch.cat([hop.edge_rows[hop.edge_index], encoded], 1)
        edge_index = torch.stack([hop.neighbors, row])
        expected = theirs((rows, rows[hop.own]), edge_index, edge_attr)
        torch.testing.assert_close(
            layer(rows, hop), F.layer_norm(F.relu(expected), (out_dim,)), atol=1e-5, rtol=0
        )


def homogeneous(hop, rows):
    """Roots as nodes of their own before the rows, since a row may stand for several roots."""
    row = torch.repeat_interleave(hop.starts.diff())
    return torch.cat([rows[hop.own], rows]), torch.stack([hop.neighbors + len(hop.own), row])


def test_gat_equals_pygs():
    conv = pytest.importorskip("torch_geometric.nn").GATConv
    torch.manual_seed(0)
    ours, theirs = GATLayer(6, 0, 8, num_heads=2), conv(6, 4, 2)
    with torch.no_grad():
        ours.linear.weight[:] = theirs.lin.weight
        ours.of_neighbor[:], ours.of_root[:] = theirs.att_src[0], theirs.att_dst[0]
        ours.bias[:] = theirs.bias.normal_()
        hop, rows = hop_of([4, 0, 1, 7, 0], edge_dim=0), torch.randn(7, 6)
        expected = theirs(*homogeneous(hop, rows))[: len(hop.own)]
        torch.testing.assert_close(ours(rows, hop), expected, atol=1e-5, rtol=0)


def test_sage_equals_pygs():
    conv = pytest.importorskip("torch_geometric.nn").SAGEConv
    torch.manual_seed(0)
    ours, theirs = SAGELayer(6, 0, 8), conv(6, 8)
    with torch.no_grad():
        ours.own.weight[:] = theirs.lin_r.weight
        ours.neighbor.weight[:], ours.neighbor.bias[:] = theirs.lin_l.weight, theirs.lin_l.bias
        hop, rows = hop_of([4, 0, 1, 7, 0], edge_dim=0), torch.randn(7, 6)
        expected = theirs(*homogeneous(hop, rows))[: len(hop.own)]
        torch.testing.assert_close(ours(rows, hop), expected, atol=1e-5, rtol=0)


def test_loops_stand_last_among_a_roots_neighbours():
    hop = hop_of([2, 0, 3], edge_dim=2)
    looped = hop.with_loops()
    assert looped.starts.tolist() == [0, 3, 4, 8]
    for root in range(3):
        old, new = (slice(*h.starts[root : root + 2].tolist()) for h in (hop, looped))
        assert looped.neighbors[new].tolist() == [*hop.neighbors[old].tolist(), int(hop.own[root])]
        features = looped.edge_rows[looped.edge_index[new]]
        assert torch.equal(features[:-1], hop.edge_rows[hop.edge_index[old]])
        assert not features[-1].any()


def test_encoded_time_is_the_cosine_it_says():
    encoding = TimeEncoding(5)
    spans = torch.tensor([0, 1, 86_400, 31_536_000_017])
    expected = [[math.cos(s * 10 ** (-9 * i / 4)) for i in range(5)] for s in spans.tolist()]
    # Frequencies are float32, so angles of a thousand years are not those of decimal powers.
    torch.testing.assert_close(encoding(spans)[:3], torch.tensor(expected)[:3], atol=1e-2, rtol=0)
    exact = (spans.double()[:, None] * encoding.frequency.detach().double()).cos().float()
    assert torch.equal(encoding(spans), exact)
    assert TimeEncoding(1).frequency.tolist() == [1]
    assert not any(parameter.requires_grad for parameter in encoding.parameters())
    with pytest.raises(ConfigError, match="at least one component"):
        TimeEncoding(0)


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="num_heads to divide dim, got 3 and 10"):
        TemporalAttention(1, 1, 1, 10, num_heads=3)
    with pytest.raises(ConfigError, match="nothing to read"):
        TemporalAttention(0, 0, 0, 10)
    with pytest.raises(ConfigError, match="num_heads to divide dim, got 3 and 10"):
        GATLayer(1, 1, 10, num_heads=3)
