"""Every file format gives back the graph that went in, and says what is wrong with the others."""

import gzip
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adaqp.graphs.generated import read, sbm
from adaqp.graphs.graph import from_edge_index, from_pyg
from shared.errors import DataError

MASKS = ("train_mask", "val_mask", "test_mask")


@pytest.fixture(scope="module")
def graph():
    return sbm(40, blocks=2, degree=3, feat=3)


def arrays(graph):
    names = ("src", "dst", "feat", "label", *MASKS)
    return {name: getattr(graph, name).numpy() for name in names}


def split_of(graph):
    names = np.array(["train", "val", "test"])
    return names[torch.stack([getattr(graph, name) for name in MASKS]).int().argmax(dim=0)]


def write_tables(folder, graph, suffix, ids=None):
    pandas = pytest.importorskip("pandas")
    folder.mkdir()
    src, dst = graph.src.numpy(), graph.dst.numpy()
    nodes = pandas.DataFrame(graph.feat.numpy(), columns=["a", "b", "c"])
    nodes = nodes.assign(label=graph.label.numpy(), split=split_of(graph))
    if ids is not None:
        src, dst, nodes["id"] = ids[src], ids[dst], ids
    edges = pandas.DataFrame({"src": src, "dst": dst})
    for name, table in (("edges", edges), ("nodes", nodes)):
        if suffix == ".parquet":
            table.to_parquet(folder / f"{name}.parquet")
        else:
            table.to_csv(folder / f"{name}{suffix}", index=False)
    return folder


def test_npz(tmp_path, graph):
    np.savez(tmp_path / "g.npz", **arrays(graph))
    assert read(tmp_path / "g.npz").fingerprint() == graph.fingerprint()


@pytest.mark.slow  # importing PyG alone takes some five seconds
def test_pyg_data(tmp_path, graph):
    data = pytest.importorskip("torch_geometric.data")
    saved = data.Data(
        edge_index=torch.stack([graph.src, graph.dst]),
        x=graph.feat,
        y=graph.label,
        **{name: getattr(graph, name) for name in MASKS},
    )
    torch.save(saved, tmp_path / "g.pt")
    assert read(str(tmp_path / "g.pt")).fingerprint() == graph.fingerprint()


def test_dgl_graphs(tmp_path, graph):
    dgl = pytest.importorskip("dgl")
    saved = dgl.graph((graph.src, graph.dst), num_nodes=40)
    saved.ndata.update({name: getattr(graph, name) for name in ("feat", "label", *MASKS)})
    dgl.save_graphs(str(tmp_path / "g.bin"), [saved])
    assert read(tmp_path / "g.bin").fingerprint() == graph.fingerprint()


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_tables(tmp_path, graph, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    found = read(write_tables(tmp_path / "t", graph, suffix))
    assert torch.allclose(found.feat, graph.feat, atol=1e-6)
    for name in ("src", "dst", "label", *MASKS):
        assert torch.equal(getattr(found, name), getattr(graph, name))


def test_tables_with_names_as_ids(tmp_path, graph):
    ids = np.array([f"node {i * 7 % 40}" for i in range(40)])
    found = read(write_tables(tmp_path / "t", graph, ".csv", ids))
    assert torch.equal(found.src, graph.src)
    assert torch.equal(found.dst, graph.dst)


def test_ids_of_tables_are_as_they_stand_there(tmp_path):
    pytest.importorskip("pandas")
    (tmp_path / "nodes.csv").write_text("id,label,split,a\n007,0,train,1\nNA,1,val,2\n7,0,,3\n")
    (tmp_path / "edges.csv").write_text("src,dst\nNA,007\n7,NA\n")
    found = read(tmp_path)
    assert found.ids.tolist() == ["007", "NA", "7"]
    assert found.src.tolist() == [1, 2]
    assert found.dst.tolist() == [0, 1]
    (tmp_path / "edges.csv").write_text("src,dst\n7,7\n")  # alone they look like numbers
    assert read(tmp_path).src.tolist() == [2]
    (tmp_path / "edges.csv").write_text("src,dst\n7,\n")
    with pytest.raises(DataError, match="dst of row 0 is nan, which is no id in nodes"):
        read(tmp_path)


def test_ogb_folder(tmp_path, graph):
    pytest.importorskip("pandas")
    label = graph.label.double().numpy()
    masked = ~graph.train_mask.numpy()
    files = {
        "raw/edge.csv.gz": np.stack([graph.src, graph.dst], axis=1),
        "raw/node-feat.csv.gz": graph.feat.numpy(),
        "raw/node-label.csv.gz": label[:, None],
    }
    for name, mask in zip(("train", "valid", "test"), MASKS, strict=True):
        files[f"split/time/{name}.csv.gz"] = getattr(graph, mask).nonzero().numpy()
    for name, rows in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(tmp_path / name, "wt") as file:
            file.writelines(",".join(f"{float(x):.9g}" for x in row) + "\n" for row in rows)
    found = read(tmp_path)
    assert found.fingerprint() == graph.fingerprint()
    assert masked.any()

    (tmp_path / "raw/node-label.csv.gz").unlink()
    with pytest.raises(DataError, match=r"node-label.csv.gz: missing; expected an OGB"):
        read(tmp_path)


def write_ogb(folder, edges, **files):
    """A folder of four nodes, each in a split, as OGB unpacks it."""
    rows = {
        "raw/edge": edges, "raw/node-feat": "1\n2\n3\n4\n", "raw/node-label": '0\n1\n""\n0\n',
        "split/time/train": "0\n", "split/time/valid": "1\n", "split/time/test": "3\n",
    }  # fmt: skip
    for name, text in (rows | files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    return folder


@pytest.mark.parametrize(
    ("name", "edges", "option", "pairs", "message"),
    [
        ("ogbn_products", "0,1\n1,2\n", None, [(0, 1), (1, 0), (1, 2), (2, 1)], "as OGB does"),
        ("ogbn-proteins", "2,2\n", None, [(2, 2), (2, 2)], "no reverse edges added"),
        ("ogbn_products_pyg", "0,1\n", None, [(0, 1), (1, 0)], "2 edges from 1"),
        ("ogbn_products", "0,1\n1,0\n", None, [(0, 1), (1, 0)], "no reverse edges added"),
        ("ogbn_products", "0,1\n", False, [(0, 1)], ""),
        ("ogbn_arxiv", "0,1\n", None, [(0, 1)], ""),
        ("mine", "0,1\n", None, [(0, 1)], "directed, as in the file"),
        ("mine", "0,1\n", True, [(0, 1), (1, 0)], "reverse edges added"),
        ("mine", "0,1\n1,0\n", True, [(0, 1), (1, 0)], "no reverse edges added"),
    ],
)
def test_reverse_edges_are_added_as_ogb_adds_them(
    tmp_path, caplog, name, edges, option, pairs, message
):
    graph = read(write_ogb(tmp_path / name, edges), add_reverse_edges=option)
    if name != "ogbn-proteins":  # a lone self loop is its own reverse
        assert list(zip(graph.src.tolist(), graph.dst.tolist(), strict=True)) == pairs
    assert (message in caplog.text) if message else not caplog.records


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"raw/edge-feat": "0.5\n"}, "edge-feat.csv.gz: expected edges without .*ignore_edge_data"),
        (
            {"raw/num-node-list": "5\n"},
            "num-node-list.csv.gz: expected 4, as there are rows, got 5",
        ),
        ({"raw/num-edge-list": "2\n"}, "num-edge-list.csv.gz: expected 1"),
        ({"raw/node-feat": "1\n2\nx\n4\n"}, "node-feat.csv.gz: expected numbers in each field"),
        ({"raw/node-feat": "1,1\n2,2\n3\n4,4\n"}, "node-feat.csv.gz, line 3: expected 2 fields"),
        ({"raw/edge": "0,\n"}, "edge.csv.gz: expected whole numbers without gaps"),
        ({"split/time/test": "4\n"}, "test.csv.gz: expected nodes from 0 to 3, got 4 to 4"),
        ({"split/time/test": "-1\n"}, "test.csv.gz: expected nodes from 0 to 3, got -1"),
    ],
)
def test_ogb_folders_refuse(tmp_path, files, message):
    with pytest.raises(DataError, match=message):
        read(write_ogb(tmp_path / "ogbn_arxiv", "0,1\n", **files))


def test_a_line_without_a_label_is_a_node_without_one(tmp_path):
    folder = write_ogb(tmp_path / "ogbn_arxiv", "0,1\n", **{"raw/node-label": "0\n1\n\n0\n"})
    assert read(folder).label.tolist() == [0, 1, -1, 0]


def test_tables_take_reverse_edges_empty_labels_and_blanks(tmp_path):
    (tmp_path / "nodes.csv").write_text("id,label,split,a\na,0,train ,1\nb,, ,2\n c,1,val,3,\n")
    (tmp_path / "edges.csv").write_text("src,dst\na, b\nb,c\n")
    graph = read(tmp_path, add_reverse_edges=True)
    assert graph.src.tolist() == [0, 1, 1, 2]
    assert graph.dst.tolist() == [1, 0, 2, 1]
    assert graph.label.tolist() == [0, -1, 1]
    assert graph.train_mask.tolist() == [True, False, False]
    (tmp_path / "edges.csv").write_text("src,dst\na,b\nb,a\n")
    assert read(tmp_path, add_reverse_edges=True).src.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        (",label,split\n1,0,train\n0,1,val\n", "0,1\n", "nodes: expected a column id, .* with 1;"),
        (",label,split\na,0,train\nb,1,val\n", "a,b\n", "nodes: expected a column id, .* with a;"),
        ("label,split\n0,train\n1,val\n", "a,b\n", "edges: expected rows of nodes as src, .* 'a'"),
        ("label,split\n0,train\n1,val\n", "0,1\n1,\n", "dst of row 1: expected an id, got none"),
    ],
)
def test_nodes_without_ids_are_known_by_their_rows(tmp_path, nodes, edges, message):
    (tmp_path / "nodes.csv").write_text(nodes)
    (tmp_path / "edges.csv").write_text(f"src,dst\n{edges}")
    with pytest.raises(DataError, match=message):
        read(tmp_path)
    (tmp_path / "nodes.csv").write_text(",label,split\n0,0,train\n1,1,val\n")
    (tmp_path / "edges.csv").write_text("src,dst\n0,1\n")
    assert read(tmp_path).label.tolist() == [0, 1]


def test_an_index_of_parquet_names_no_rows(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")
    nodes = pandas.DataFrame({"label": [0, 1], "split": ["train", "val"]}, index=[1, 0])
    nodes.to_parquet(tmp_path / "nodes.parquet")
    pandas.DataFrame({"src": [0], "dst": [1]}, index=[5]).to_parquet(tmp_path / "edges.parquet")
    with pytest.raises(DataError, match=r"nodes: expected a column id, .* begins with 1"):
        read(tmp_path)


@pytest.mark.parametrize("column", ["weight", "since"])
def test_edge_columns_are_refused_or_left_out_on_request(tmp_path, column):
    (tmp_path / "nodes.csv").write_text("label,split,a\n0,train,1\n1,val,2\n")
    (tmp_path / "edges.csv").write_text(f"src,dst,{column}\n0,1,0.5\n")
    with pytest.raises(
        DataError, match=f"edges: expected edges without weights .* got {column}; take"
    ):
        read(tmp_path)
    assert read(tmp_path, ignore_edge_data=True).num_edges == 1
    (tmp_path / "edges.csv").write_text(f"src,dst,{column}\n0,1,1\n")
    assert read(tmp_path).num_edges == 1  # all alike, as without weights


def test_an_edge_with_one_field_more_is_refused(tmp_path):
    (tmp_path / "nodes.csv").write_text("label,split,a\n0,train,1\n1,val,2\n0,test,3\n")
    (tmp_path / "edges.csv").write_text("src,dst\n0,1,2\n1,2,0\n")
    with pytest.raises(DataError, match=r"edges.csv, line 2: expected 2 fields"):
        read(tmp_path)


def test_arrays_and_dgl_graphs_with_weights_are_refused(tmp_path, graph):
    columns = arrays(graph)
    np.savez(
        tmp_path / "g.npz", edge_weight=np.ones(graph.num_edges), class_weight=[0.5], **columns
    )
    assert read(tmp_path / "g.npz").num_edges == graph.num_edges
    np.savez(tmp_path / "g.npz", edge_weight=np.linspace(0, 1, graph.num_edges), **columns)
    with pytest.raises(
        DataError, match=r"g.npz: expected edges without weights .* got edge_weight"
    ):
        read(tmp_path / "g.npz")
    assert read(tmp_path / "g.npz", ignore_edge_data=True).num_edges == graph.num_edges
    dgl = pytest.importorskip("dgl")
    saved = dgl.graph((graph.src, graph.dst), num_nodes=40)
    saved.ndata.update({name: getattr(graph, name) for name in ("feat", "label", *MASKS)})
    saved.edata["_ID"] = torch.arange(graph.num_edges)
    saved.edata["norm"] = torch.ones(graph.num_edges, 1)
    dgl.save_graphs(str(tmp_path / "g.bin"), [saved])
    assert read(tmp_path / "g.bin").num_edges == graph.num_edges
    saved.edata["w"] = torch.rand(graph.num_edges)
    dgl.save_graphs(str(tmp_path / "g.bin"), [saved])
    with pytest.raises(DataError, match=r"graph.edata: expected edges without weights .* got w;"):
        read(tmp_path / "g.bin")
    assert read(tmp_path / "g.bin", ignore_edge_data=True).num_edges == graph.num_edges


class PygData(SimpleNamespace):
    """A stand-in, as importing PyG takes seconds."""

    num_nodes = 40


def pyg_data(graph, **changes):
    fields = {"edge_index": torch.stack([graph.src, graph.dst]), "x": graph.feat, "y": graph.label}
    masks = {name: getattr(graph, name) for name in MASKS}
    return PygData(**(fields | masks | changes))


@pytest.mark.parametrize("name", ["edge_weight", "edge_attr", "edge_type"])
def test_pyg_data_with_edge_weights_is_refused(graph, name):
    data = pyg_data(graph, **{name: torch.rand(graph.num_edges)})
    with pytest.raises(DataError, match=f"data: expected edges without weights .* got {name};"):
        from_pyg(data)
    assert from_pyg(data, ignore_edge_data=True).fingerprint() == graph.fingerprint()
    assert from_pyg(pyg_data(graph, **{name: torch.ones(graph.num_edges, 1)})).num_edges


def test_rows_of_pairs_are_refused_as_an_edge_index(graph):
    data = pyg_data(graph, edge_index=torch.stack([graph.src, graph.dst], 1))
    with pytest.raises(
        DataError, match=rf"shape \[2, num_edges\], got \[{graph.num_edges}, 2\]; edge"
    ):
        from_pyg(data)


def test_numbers_that_int64_lacks_are_refused_by_value():
    ends = np.array([0, 2**63 + 5], np.uint64)
    mask = [True, False]
    with pytest.raises(DataError, match=r"src: expected less than 2\^63, got 9223372036854775813"):
        from_edge_index(ends, [0, 1], 2, [[1.0], [2.0]], [0, 1], mask, mask, mask)


def test_parquet_names_what_to_install(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")

    def without_pyarrow(*_):
        raise ImportError("pyarrow")

    monkeypatch.setattr(pandas, "read_parquet", without_pyarrow)
    (tmp_path / "edges.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"edges.parquet: needs pandas, .* pip install pandas py"):
        read(tmp_path)


def test_missing_path_and_unknown_format(tmp_path):
    with pytest.raises(DataError, match=r"gone.npz: expected a file or folder, there is nothing"):
        read(tmp_path / "gone.npz")
    (tmp_path / "g.xyz").write_text("")
    with pytest.raises(DataError, match=r"expected .pt, .bin, .npz or a folder .* got '.xyz'"):
        read(tmp_path / "g.xyz")


def test_npz_refuses(tmp_path, graph):
    some = arrays(graph)
    del some["label"], some["val_mask"]
    np.savez(tmp_path / "g.npz", **some)
    with pytest.raises(DataError, match="missing label, val_mask"):
        read(tmp_path / "g.npz")
    np.savez(tmp_path / "p.npz", **(arrays(graph) | {"label": np.array([Path()], dtype=object)}))
    with pytest.raises(DataError, match="expected an npz file of plain arrays"):
        read(tmp_path / "p.npz")
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(DataError, match="expected an npz file of plain arrays"):
        read(tmp_path / "torn.npz")


@pytest.mark.slow
def test_pyg_refuses_what_is_not_data(tmp_path):
    pytest.importorskip("torch_geometric")
    torch.save(Path("anything"), tmp_path / "g.pt")
    with pytest.raises(DataError, match=r"expected a PyG Data of tensors saved by torch.save"):
        read(tmp_path / "g.pt")
    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(DataError, match="expected a PyG Data of tensors"):
        read(tmp_path / "torn.pt")
    torch.save((torch.ones(1), {}), tmp_path / "pair.pt")
    with pytest.raises(DataError, match="expected a PyG Data, got tuple; save dataset"):
        read(tmp_path / "pair.pt")


def test_dgl_refuses_what_is_not_a_graph(tmp_path):
    pytest.importorskip("dgl")
    (tmp_path / "g.bin").write_bytes(b"not a graph at all")
    with pytest.raises(DataError, match=r"expected a file of dgl.save_graphs"):
        read(tmp_path / "g.bin")


@pytest.mark.parametrize(
    ("edges", "nodes", "message"),
    [
        (
            None,
            "label,split,a\n0,train,1\n",
            r"expected edges.parquet, .* there is \['nodes.csv'\]",
        ),
        (
            "src,to\n",
            "label,split,a\n",
            r"edges: expected a column 'dst', got \['src', 'to'\]",
        ),
        ("src,dst\n0,0\n", "label,a\n0,1\n", "nodes: expected a column 'split'"),
        (
            "src,dst\n0,0\n",
            "label,split,a\n0,dev,1\n",
            r"split is train, val, test .* got \['dev'\]",
        ),
        ("src,dst\n0,0\n", "label,split,a\n0,train,x\n", "features must be numbers, 'a' is not"),
        (
            "src,dst\n7,8\n",
            "id,label,split,a\n7,0,train,1\n",
            "dst of row 0 is .*8.* no id in nodes",
        ),
        ("src,dst\n", "id,label,split,a\n7,0,train,1\n7,0,,1\n", "expected each id once"),
        ("src,dst\n0,4\n", "label,split,a\n0,train,1\n", r"edge 0 \(0 -> 4\)"),
        ("", "label,split,a\n", "edges.csv: expected a table"),
    ],
)
def test_tables_refuse(tmp_path, edges, nodes, message):
    pytest.importorskip("pandas")
    for name, text in (("edges", edges), ("nodes", nodes)):
        if text is not None:
            (tmp_path / f"{name}.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read(tmp_path)
