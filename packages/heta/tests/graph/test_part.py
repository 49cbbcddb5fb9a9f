"""Folders of parts: what each holds, and what is refused when one is read or written."""

import json
import shutil

import pytest
import torch
from graphs import CITED_BY, CITES, HAD, HAS, PAID, PAYS, WRITES, WRITTEN, plan_by_hand, scholars

import heta
import heta.graph.part_files
from heta.graph.hetero_graph import HeteroGraph
from heta.graph.part import load
from heta.graph.part_files import write_parts
from shared.errors import ConfigError, DataError

TWO = [[WRITES, (CITES, 0, 2)], [CITED_BY, HAS, (CITES, 1, 2)]]


@pytest.fixture(scope="module")
def graph():
    return scholars()


@pytest.fixture
def folder(graph, tmp_path):
    write_parts(plan_by_hand(graph, TWO), graph, tmp_path / "parts")
    return tmp_path / "parts"


def test_a_part_holds_its_closure_its_shares_and_whole_types(graph, folder):
    first, second = load(folder, 0), load(folder, 1)
    assert set(first.structure) == {WRITES, CITES, CITED_BY, HAS, WRITTEN, PAID}
    assert set(second.structure) == {WRITES, CITES, CITED_BY, HAS, HAD}
    # Both need all of `cites` below the seeds, so that nothing of it is left out.
    for relation in first.structure:
        assert torch.equal(first.csr(relation).indices.long(), graph.csr(relation).indices)
    assert first.schema == second.schema == graph.schema
    assert torch.equal(first.feat["paper"], graph.feat["paper"])
    assert first.num_classes == 3
    assert torch.equal(first.masks["train"], graph.masks["train"])
    assert first.fingerprint == second.fingerprint
    with pytest.raises(
        DataError, match=r"part 0: expected one of its relations .*got author -rev_pays"
    ):
        first.csr(PAYS)
    assert torch.equal(first.seeds("train"), graph.seeds("train"))
    with pytest.raises(DataError, match="split 'test': expected labels and a mask"):
        first.seeds("test")


def test_a_share_holds_its_own_destinations_only(graph, tmp_path):
    assignment = [[(HAS, 0, 3)], [(HAS, 1, 3)], [(HAS, 2, 3), WRITES, CITES, CITED_BY]]
    write_parts(plan_by_hand(graph, assignment, layers=1), graph, tmp_path / "parts")
    whole, lengths = graph.csr(HAS).indptr.diff(), []
    for index in range(2):
        lengths.append(load(tmp_path / "parts", index).csr(HAS).indptr.diff())
        rows = torch.arange(60) % 3 == index
        assert torch.equal(lengths[index], whole * rows)


def test_a_graph_other_than_the_planned_one_is_refused(graph, tmp_path):
    plan = plan_by_hand(graph, TWO)
    edges = {**graph.edges, HAS: tuple(ids[1:] for ids in graph.edges[HAS])}
    other = HeteroGraph(graph.num_nodes, edges, graph.feat, target="paper")
    with pytest.raises(DataError, match="expected the one that was planned"):
        write_parts(plan, other, tmp_path / "parts")
    changed = scholars()
    changed.fingerprint()
    changed.feat["paper"][0, 0] += 1
    with pytest.raises(DataError, match="its tensors were changed after it"):
        write_parts(plan, changed, tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


def test_a_graph_that_was_changed_after_its_plan_is_refused(graph, tmp_path):
    changed = scholars()
    made = heta.plan(changed, parts=2, strategy="raf", hidden=8)
    changed.edges[HAS][0][0] = (changed.edges[HAS][0][0] + 1) % changed.num_nodes[HAS[0]]
    with pytest.raises(DataError, match="its tensors were changed after it"):
        made.write(changed, tmp_path / "parts")


def test_incomplete_and_damaged_folders_are_refused(graph, folder, tmp_path):
    with pytest.raises(ConfigError, match="part: expected 0 to 1, got 2"):
        load(folder, 2)
    tensors = folder / "part0/tensors.safetensors"
    data = tensors.read_bytes()
    tensors.write_bytes(data[:-10])
    with pytest.raises(
        DataError, match=rf"part0/tensors.safetensors: expected {len(data)} bytes, got"
    ):
        load(folder, 0)
    tensors.write_bytes(b"\xff" * len(data))
    with pytest.raises(DataError, match=r"part0/tensors.safetensors: cannot be read"):
        load(folder, 0)
    tensors.unlink()
    with pytest.raises(DataError, match="got 0"):
        load(folder, 0)
    about = folder / "part1/part.json"
    fields = json.loads(about.read_text())
    about.write_text(json.dumps({**fields, "format": 99}))
    with pytest.raises(DataError, match="expected format 1, got 99"):
        load(folder, 1)
    about.write_text(about.read_text()[:50])
    with pytest.raises(DataError, match="part1"):
        load(folder, 1)
    about.unlink()
    with pytest.raises(DataError, match="part1"):
        load(folder, 1)
    with pytest.raises(DataError, match="nowhere"):
        load(tmp_path / "nowhere", 0)


def test_tensors_of_another_plan_are_refused(graph, folder, tmp_path):
    write_parts(plan_by_hand(graph, TWO, fanouts=[4, 4]), graph, tmp_path / "other")
    shutil.copy(tmp_path / "other/part0/tensors.safetensors", folder / "part0")
    with pytest.raises(DataError, match=r"part0: expected tensors.safetensors of the same plan"):
        load(folder, 0)


def test_an_interrupted_write_leaves_the_earlier_parts_or_nothing(
    graph, folder, tmp_path, monkeypatch
):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    save, calls = heta.graph.part_files.save_file, []

    def fail(*arguments):
        calls.append(0)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save(*arguments)

    monkeypatch.setattr(heta.graph.part_files, "save_file", fail)
    for target in (folder, tmp_path / "new"):
        calls.clear()
        with pytest.raises(OSError, match="expected room on the disk"):
            write_parts(plan_by_hand(graph, TWO), graph, target)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_a_full_disk_leaves_no_part(graph, small_disk):
    folder = small_disk(16 << 10)
    with pytest.raises(OSError, match="expected room on the disk"):
        write_parts(plan_by_hand(graph, TWO), graph, folder / "parts")
    assert not (folder / "parts").exists()


def test_other_files_are_not_overwritten(graph, folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("text")
    (tmp_path / "file").write_text("text")
    for name in ("mine", "file"):
        with pytest.raises(DataError, match="expected a new folder or one with an earlier plan"):
            write_parts(plan_by_hand(graph, TWO), graph, tmp_path / name)
    write_parts(plan_by_hand(graph, [graph.schema.roots]), graph, folder)
    assert sorted(path.name for path in folder.glob("part*")) == ["part0"]


def test_a_url_holds_the_same_parts(graph, folder):
    fsspec = pytest.importorskip("fsspec")
    write_parts(plan_by_hand(graph, TWO), graph, "memory://heta-parts")
    there, here = load("memory://heta-parts", 1), load(folder, 1)
    assert there.fingerprint == here.fingerprint
    assert all(torch.equal(there.csr(r).indices, here.csr(r).indices) for r in here.structure)
    fsspec.filesystem("memory").rm("/heta-parts/part0", recursive=True)
    assert load("memory://heta-parts", 1).fingerprint == here.fingerprint
    with pytest.raises(DataError, match=r"heta-parts/part0/part.json: expected a part's file"):
        load("memory://heta-parts", 0)
