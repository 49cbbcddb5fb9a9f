"""Mini-batches against the whole graph, in PyG's form and in DGL's."""

import pytest
import torch

import shared.errors
from heta.graph.hetero_graph import HeteroGraph
from heta.graph.pyg import to_pyg
from heta.training.loader import loader

ConfigError, DataError = shared.errors.ConfigError, shared.errors.DataError
RELATIONS = [
    ("author", "writes", "paper"),
    ("paper", "by", "author"),
    ("paper", "cites", "paper"),
    ("paper", "beside", "paper"),
]
NUM_NODES = {"paper": 30, "author": 12, "idle": 2}


@pytest.fixture
def graph():
    ends = {
        relation: (
            torch.randint(NUM_NODES[relation[0]], (70,)),
            torch.randint(NUM_NODES[relation[2]] - 2, (70,)),
        )
        for relation in RELATIONS
    }
    feat = {node_type: torch.randn(count, 4) for node_type, count in NUM_NODES.items()}
    return HeteroGraph(NUM_NODES, ends, feat, target="paper", label=torch.randint(3, (30,)))


def make_conv(hidden=5):
    nn = pytest.importorskip("torch_geometric.nn")
    return nn.HeteroConv({r: nn.SAGEConv((-1, -1), hidden) for r in RELATIONS})


def test_full_fan_out_gives_the_embeddings_of_the_whole_graph(graph):
    data = to_pyg(graph)
    data["paper", "cites", "paper"].edge_attr = torch.arange(70)
    layers = [make_conv(), make_conv()]

    def embed(batch):
        x = batch.x_dict
        for layer in layers:
            x = layer({k: v for k, v in x.items() if k != "idle"}, batch.edge_index_dict)
        return x["paper"]

    with torch.no_grad():
        whole = embed(data)
        seen = []
        for batch in loader(data, [-1, -1], [3, 3, 5], 3):
            torch.testing.assert_close(embed(batch)[:3], whole[batch["paper"].n_id[:3]])
        for batch in loader(data, [-1, -1], torch.arange(7, 24), 8):
            paper = batch["paper"]
            seeds = paper.n_id[: paper.batch_size]
            torch.testing.assert_close(embed(batch)[: paper.batch_size], whole[seeds])
            assert torch.equal(seeds, paper.input_id + 7)
            assert torch.equal(paper.y, graph.label[paper.n_id])
            assert torch.equal(batch["author"].x, graph.feat["author"][batch["author"].n_id])
            assert len(paper.n_id.unique()) == len(paper.n_id) == paper.num_nodes
            assert len(batch["idle"].n_id) == 0
            cites = batch["paper", "cites", "paper"]
            assert torch.equal(cites.edge_attr, cites.e_id)
            seen.append(seeds)
    assert sorted(torch.cat(seen).tolist()) == list(range(7, 24))


def test_edges_are_those_of_the_graph_up_to_the_fan_out(graph):
    fanouts = [2, 3]
    for batch in loader(graph, fanouts, torch.arange(30), 6):
        for relation in RELATIONS:
            store = batch[relation]
            ids = [batch[relation[end]].n_id for end in (0, 2)]
            src, dst = (ids[i][store.edge_index[i]] for i in range(2))
            assert torch.equal(src, graph.edges[relation][0][store.e_id])
            assert torch.equal(dst, graph.edges[relation][1][store.e_id])
            assert len(store.e_id.unique()) == len(store.e_id)
            assert sum(store.num_sampled_edges) == len(store.e_id)
            # Nodes of hop h, in their order, have the fan-out of that hop or their whole degree.
            counts = batch[relation[2]].num_sampled_nodes
            limits = torch.tensor([*fanouts, 0]).repeat_interleave(torch.tensor(counts))
            degree = graph.edges[relation][1].bincount(minlength=NUM_NODES[relation[2]])
            drawn = store.edge_index[1].bincount(minlength=len(ids[1]))
            assert torch.equal(drawn, torch.minimum(limits, degree[ids[1]]))


def test_draws_cover_all_edges_and_differ_between_epochs(graph):
    batches = loader(graph, [1], torch.arange(30), 30, shuffle=False)
    drawn = [next(iter(batches))[RELATIONS[0]].e_id.tolist() for _ in range(60)]
    assert len(set(map(tuple, drawn))) > 10
    assert {edge for edges in drawn for edge in edges} == set(range(70))


def test_order_depends_on_seed_and_epoch_only(graph):
    def epochs(seed):
        batches = loader(graph, [1], torch.arange(30), 7, seed=seed)
        return [[batch["paper"].n_id[:7].tolist() for batch in batches] for _ in range(2)]

    first, second = epochs(seed=3)
    assert [first, second] == epochs(seed=3)
    assert first != second
    assert epochs(seed=4)[0] not in (first, second)


def test_last_batch_and_length(graph):
    sizes = {}
    for drop_last in (False, True):
        batches = loader(graph, [1], torch.arange(10), 4, shuffle=False, drop_last=drop_last)
        sizes[drop_last] = [batch["paper"].batch_size for batch in batches]
        assert len(batches) == len(sizes[drop_last])
    assert sizes == {False: [4, 4, 2], True: [4, 4]}
    assert len(loader(graph, [1], torch.arange(8), 4)) == 2


def test_reads_seeds_in_any_form(graph):
    mask = torch.zeros(30, dtype=torch.bool)
    mask[[4, 9]] = True
    for seeds in (
        mask,
        [4, 9],
        ("paper", mask),
        {"paper": torch.tensor([4, 9], dtype=torch.int32)},
    ):
        batch = next(iter(loader(graph, [1], seeds, 5, shuffle=False)))
        assert batch["paper"].n_id[:2].tolist() == [4, 9]
    batch = next(iter(loader(graph, [1], "author", 20, shuffle=False)))
    assert batch["author"].n_id[:12].tolist() == list(range(12))
    assert batch["author"].batch_size == 12


def test_blocks_of_dgl_give_the_embeddings_of_the_whole_graph(graph):
    dgl = pytest.importorskip("dgl")
    g = dgl.heterograph(dict(graph.edges), NUM_NODES)
    for node_type, rows in graph.feat.items():
        g.nodes[node_type].data["feat"] = rows
    weight = {relation: torch.rand(70) for relation in RELATIONS}
    function = dgl.function

    def convolve(block, x, weights):
        # A sum of weighted rows over relations, and the destination's own.
        with block.local_scope():
            for node_type, rows in x.items():
                block.srcnodes[node_type].data["x"] = rows
            for relation in RELATIONS:
                block.edges[relation].data["w"] = weights[relation]
            calls = {
                r: (function.u_mul_e("x", "w", "m"), function.sum("m", "y")) for r in RELATIONS
            }
            block.multi_update_all(calls, "sum")
            sums = block.dstdata["y"]
        return {t: rows + x[t][: block.num_dst_nodes(t)] for t, rows in sums.items()}

    whole = dict(graph.feat)
    edge_weights = {r: weight[r][:, None] for r in RELATIONS}
    for _ in range(2):
        whole = {**whole, **convolve(g, whole, edge_weights)}
    for inputs, outputs, blocks in loader(g, [-1, -1], {"paper": torch.arange(5, 20)}, 6):
        x = {node_type: graph.feat[node_type][ids] for node_type, ids in inputs.items()}
        for block in blocks:
            edge_ids = {r: block.edges[r].data[dgl.EID] for r in RELATIONS}
            assert torch.equal(
                block.srcnodes["paper"].data[dgl.NID][: block.num_dst_nodes("paper")],
                block.dstnodes["paper"].data[dgl.NID],
            )
            x = convolve(block, x, {r: edge_weights[r][ids] for r, ids in edge_ids.items()})
        torch.testing.assert_close(x["paper"], whole["paper"][outputs["paper"]])
        assert torch.equal(blocks[-1].dstnodes["paper"].data[dgl.NID], outputs["paper"])
        assert torch.equal(blocks[0].srcnodes["author"].data[dgl.NID], inputs["author"])


def test_blocks_of_dgl_have_the_fan_out_of_their_hop(graph):
    dgl = pytest.importorskip("dgl")
    g = dgl.heterograph(dict(graph.edges), NUM_NODES)
    _, _, blocks = next(iter(loader(g, [1, 2], ("paper", None), 30)))
    assert [int(block.in_degrees(etype="cites").max()) for block in blocks] == [2, 1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"fanouts": []}, ConfigError, r"a fan-out for each hop .* got \[\] and 4"),
        ({"fanouts": [0]}, ConfigError, r"fanouts: expected whole numbers from 1, or -1"),
        ({"batch_size": 0}, ConfigError, "batch size of at least 1, got .* and 0"),
        ({"seeds": [30]}, DataError, "seeds: expected ids from 0 to 29, .*'paper', got 30 to 30"),
        ({"seeds": torch.zeros(3)}, DataError, "seeds: expected ids, or a mask .* got torch.float32"),
        ({"seeds": torch.zeros(3, dtype=torch.bool)}, DataError, r"a mask of the 30 .* \[3\]"),
        ({"seeds": "book"}, DataError, "target: expected one of the types .* got 'book'"),
        ({"seeds": {"paper": [0], "author": [0]}}, DataError, "seeds: expected one type"),
        ({"data": {}}, DataError, "expected a HeteroData, a HeteroGraph or a DGLGraph, got dict"),
    ],
)  # fmt: skip
def test_refuses(graph, changes, error, message):
    options = {"data": graph, "fanouts": [1], "seeds": [0], "batch_size": 4} | changes
    with pytest.raises(error, match=message):
        loader(**options)


def test_refuses_broken_data(graph):
    data = to_pyg(graph)
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0], [30]])
    with pytest.raises(
        DataError, match=r"paper -cites-> paper: expected ids from 0 to 29, .* got 30"
    ):
        loader(data, [1], [0], 4)
    del data["paper", "cites", "paper"].edge_index
    with pytest.raises(DataError, match=r"expected an edge_index \[2, num_edges\]"):
        loader(data, [1], [0], 4)
    data = to_pyg(graph)
    del data["author"].x
    del data["author"].num_nodes
    with pytest.raises(DataError, match=r"set data\['author'\].num_nodes"):
        loader(data, [1], [0], 4)


def test_two_types_with_labels_need_a_named_one(graph):
    data = to_pyg(graph)
    data["author"].y = torch.zeros(12)
    with pytest.raises(
        DataError, match=r"seeds: expected one type with 'labels', .* name the target"
    ):
        loader(data, [1], [0], 4)
    assert len(loader(data, [1], ("author", None), 4)) == 3
