"""What version 0.1.0 wrote is read as it was written; see `assets/write_formats.py`.

Only public names and command lines are used, so that files written before outlive every change of
where the code lies.
"""

import importlib.util
import json
import re
import shutil
import struct
import subprocess
import zipfile
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import adaqp
import bytecheckpoint as bcp
import gnnflow
import heta
import hybridflow as hy
import lancet
from shared.claims import read_demo
from shared.comms import RankPool
from shared.errors import MeshyardError
from shared.topology import Cluster

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "tests" / "assets"
# Losses of training that goes on may differ in the last digits on another processor.
CLOSE = {"rel": 1e-3, "abs": 1e-6}
NEAR_RANKS = 0.01


def _writer():
    spec = importlib.util.spec_from_file_location("write_formats", ASSETS / "write_formats.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer = _writer()
EXPECTED = json.loads((ASSETS / "expected.json").read_text())


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=writer.TIMEOUT) as ranks:
        yield ranks


# -- bytecheckpoint -------------------------------------------------------------------------


def load_run(folder):
    """What a rank of as many as there are finds in a run, and the samples it takes next."""
    is_alone = not torch.distributed.is_initialized()
    rank = 0 if is_alone else torch.distributed.get_rank()
    state = writer.bytecheckpoint_state(rank, 1 if is_alone else 2)
    with bcp.Checkpointer(folder) as checkpointer:
        step = checkpointer.load_latest(state)
    moments = {
        f"{at}.{key}": value
        for at, values in state["optimizer"].state_dict()["state"].items()
        for key, value in values.items()
    }
    table, flat = state["table"], state["flat"]
    return {
        "step": step,
        "numbers": writer.draw_numbers(),
        "model": writer.digests(state["model"].state_dict()),
        "optimizer": writer.digests(moments),
        "settings": state["optimizer"].param_groups[0]["lr"],
        "table": table if is_alone else table.full_tensor(),
        "flat": flat.flatten() if is_alone else flat.tensor,
        "extra": state["extra"],
        "next": list(state["data"]),
    }


def check_bytecheckpoint_run(folder, pool):
    expected = EXPECTED["bytecheckpoint"]
    random_state = bcp.rng_state().state_dict()
    alone = load_run(str(folder / "run"))
    bcp.rng_state().load_state_dict(random_state)
    both = pool.run(load_run, str(folder / "run")).results
    assert torch.equal(torch.cat([one["flat"] for one in both]), writer.FLAT.flatten())
    assert torch.equal(alone["flat"], writer.FLAT.flatten())
    assert [one["numbers"] for one in both] == expected["numbers"]
    # The check of signatures in this process, beartype's, draws from Python's own generator.
    assert alone["numbers"][1:] == expected["numbers"][0][1:]
    assert sorted(alone["next"]) == expected["left"]
    assert sorted(both[0]["next"] + both[1]["next"]) == expected["left"]
    for one in (alone, *both):
        assert one["step"] == 3
        assert one["settings"] == 0.01
        assert one["model"] == expected["model"]
        assert one["optimizer"] == expected["optimizer"]
        assert torch.equal(one["table"], writer.TABLE)
        array = one["extra"].pop("array")
        assert array.dtype == np.int16
        assert np.array_equal(array, writer.EXTRA["array"])
        assert one["extra"] == {k: v for k, v in writer.EXTRA.items() if k != "array"}


def test_a_run_of_bytecheckpoint_loads_on_one_rank_and_on_two(tmp_path, pool):
    folder = writer.unpack("bytecheckpoint", tmp_path)
    check_bytecheckpoint_run(folder, pool)
    with bcp.open(folder / "run" / "step_00000003") as checkpoint:
        assert (checkpoint.kind, checkpoint.step, checkpoint.world_size) == ("native", 3, 2)
        assert torch.equal(checkpoint["table"][1:4, 2], writer.TABLE[1:4, 2])
    status, _ = writer.run_command("bytecheckpoint", "verify", folder / "run", "--deep")
    assert status == 0


# -- adaqp ----------------------------------------------------------------------------------


def load_part(folder):
    """A rank's share of the graph, and its sums over neighbours."""
    dg = adaqp.load(folder)
    masks = torch.stack([dg.train_mask, dg.val_mask, dg.test_mask])
    return dg.global_ids, dg.feat, dg.label, masks, dg.aggregate(dg.feat.clone(), "sum")


def check_adaqp_parts(folder, pool):
    graph = writer.adaqp_graph()
    sums = torch.zeros_like(graph.feat).index_add_(0, graph.dst, graph.feat[graph.src])
    masks = torch.stack([graph.train_mask, graph.val_mask, graph.test_mask])
    found = pool.run(load_part, str(folder / "parts")).results
    assert [ids.tolist() for ids, *_ in found] == EXPECTED["adaqp"]["nodes"]
    for ids, feat, label, mask, aggregated in found:
        assert torch.equal(feat, graph.feat[ids])
        assert torch.equal(label, graph.label[ids])
        assert torch.equal(mask, masks[:, ids])
        torch.testing.assert_close(aggregated, sums[ids], rtol=1e-5, atol=1e-5)


def resume_adaqp(parts, checkpoint):
    """The weights that a trainer resumes with, where it is, and what it loses from there on."""
    dg = adaqp.load(parts)
    with dg.messages(writer.adaqp_policy()):
        trainer = writer.adaqp_trainer(dg)
        trainer.resume(checkpoint)
        epoch, model = trainer.epoch, writer.digests(trainer.model.state_dict())
        return epoch, model, list(trainer.fit(4).loss)


def check_adaqp_checkpoint(folder, pool):
    paths = [str(folder / name) for name in ("parts", "checkpoint")]
    for epoch, model, losses in pool.run(resume_adaqp, *paths).results:
        assert epoch == 3
        assert model == EXPECTED["adaqp"]["model"]
        assert losses == pytest.approx(EXPECTED["adaqp"]["losses"][3:], **CLOSE)


def test_a_partition_of_adaqp_is_the_graph_that_was_cut(tmp_path, pool):
    check_adaqp_parts(writer.unpack("adaqp", tmp_path), pool)


def test_a_checkpoint_of_adaqp_goes_on_from_its_epoch(tmp_path, pool):
    check_adaqp_checkpoint(writer.unpack("adaqp", tmp_path), pool)


def test_json_of_adaqp_is_what_was_planned(tmp_path):
    folder = writer.unpack("adaqp", tmp_path)
    links = adaqp.LinkTable.from_json((folder / "links.json").read_text())
    rate, latency_s = writer.LINKS
    assert np.array_equal(links.s_per_byte, (1 - np.eye(2)) / rate)
    assert np.array_equal(links.latency_s, (1 - np.eye(2)) * latency_s)
    problem = adaqp.Assignment.from_json((folder / "assignment.json").read_text())
    assert problem.to_json() == writer.adaqp_assignment().to_json()
    solution = adaqp.Solution.from_json((folder / "solution.json").read_text())
    assert solution.bits.tolist() == EXPECTED["adaqp"]["bits"]
    choice = np.searchsorted(problem.bits, solution.bits)
    assert solution.objective == EXPECTED["adaqp"]["objective"]
    assert problem.objective(choice) == pytest.approx(solution.objective)


# -- gnnflow --------------------------------------------------------------------------------


def check_gnnflow_graph(folder, pool):
    graph = gnnflow.TemporalGraph.load(folder / "graph.safetensors")
    assert [column.tolist() for column in graph.edges()] == EXPECTED["gnnflow"]["edges"]
    assert writer.gnnflow_neighbors(graph) == EXPECTED["gnnflow"]["neighbors"]
    assert (graph.num_edges, graph.num_nodes, graph.undirected) == (110, 20, True)
    assert (graph.newest, graph.expired_before) == (60 * 119 + 1, 600)
    # It grows on as the graph that was saved would have.
    assert graph.add_edges([0], [19], [8000]) == 1
    assert graph.edges()[3].max() == 120


def check_gnnflow_continual(folder, pool):
    expected = EXPECTED["gnnflow"]
    trainer = writer.gnnflow_trainer(folder / "continual")
    run = trainer.run(writer.gnnflow_events())
    rounds = [writer.gnnflow_round(next(run))]
    weights = writer.digests(trainer.model.state_dict() | trainer.head.state_dict())
    assert weights == expected["model"]
    rounds.append(writer.gnnflow_round(next(run)))
    assert rounds == expected["rounds"][:2]
    assert len(trainer.rounds) == 2, "the checkpoint was written after two rounds"
    for found, whole in zip(map(writer.gnnflow_round, run), expected["rounds"][2:], strict=True):
        assert found[:-3] == pytest.approx(whole[:-3], rel=1e-4)
        # Metrics of ranks: two of 21 events whose scores are as good as equal may change places.
        assert found[-3:] == pytest.approx(whole[-3:], abs=NEAR_RANKS)


def test_a_graph_of_gnnflow_has_the_same_neighbors(tmp_path):
    folder = writer.unpack("gnnflow", tmp_path)
    check_gnnflow_graph(folder, None)
    status, printed = writer.run_command("gnnflow", "info", folder / "graph.safetensors")
    assert status == 0
    assert "110" in printed


def test_a_continual_run_of_gnnflow_goes_on_after_its_round(tmp_path):
    check_gnnflow_continual(writer.unpack("gnnflow", tmp_path), None)


def test_features_and_parts_of_gnnflow_are_read_from_files(tmp_path):
    folder = writer.unpack("gnnflow", tmp_path)
    edges = f"{folder / 'edge.safetensors'}::edge"
    store = gnnflow.FeatureStore(node=str(folder / "node.npy"), edge=edges)
    assert torch.equal(store.gather("node", torch.arange(20)), writer.NODE_ROWS)
    events = writer.gnnflow_events()
    assert torch.equal(store.gather("edge", events.eid), events.features)
    parts = torch.from_numpy(np.load(folder / "parts.npy"))
    summary = gnnflow.summarize(events, parts, 2)
    assert summary.num_nodes == tuple(torch.bincount(parts, minlength=2).tolist())
    assert sum(summary.num_nodes) == 20


# -- mspipe ---------------------------------------------------------------------------------


def check_heta_run(folder, pool):
    losses = writer.train_heta(folder, 4)
    assert losses == pytest.approx(EXPECTED["heta"]["losses"], **CLOSE)


def test_a_run_of_heta_on_two_parts_is_resumed(tmp_path, pool):
    check_heta_run(writer.unpack("heta", tmp_path), pool)


def test_parts_of_heta_are_the_graphs_relations(tmp_path):
    folder, graph = writer.unpack("heta", tmp_path), writer.heta_graph()
    parts = [heta.load(folder / "parts", part=number) for number in (0, 1)]
    assert {root for part in parts for root in part.roots} == set(graph.schema.roots)
    for part in parts:
        assert torch.equal(part.label, graph.label)
        assert torch.equal(part.feat["paper"], graph.feat["paper"])
        for root in part.roots:
            assert torch.equal(part.csr(root).indices.long(), graph.csr(root).indices.long())


def check_mspipe_training(folder, pool):
    expected = EXPECTED["mspipe"]
    pipe, passes = writer.mspipe_run(folder / "training")
    resumed_at = []
    hook = pipe.model.register_forward_pre_hook(lambda *_: resumed_at.append(1))
    first = next(passes)
    assert not resumed_at, "the first pass is told as it was, not run again"
    assert writer.mspipe_pass(first) == expected["passes"][0]
    hook.remove()
    (second,) = passes
    index, losses, scores = writer.mspipe_pass(second)
    assert index == 2
    # Two batches were saved, to the bit; the others are computed.
    assert losses[:2] == expected["passes"][1][1][:2]
    assert losses == pytest.approx(expected["passes"][1][1], **CLOSE)
    assert scores == pytest.approx(expected["passes"][1][2], abs=0.02)


def check_mspipe_memory(folder, pool):
    pipe, _ = writer.mspipe_run(None)
    pipe.memory.load(folder / "memory.safetensors")
    assert writer.digest(pipe.memory.snapshot()["rows"]) == EXPECTED["mspipe"]["memory"]


def test_an_interrupted_pass_of_mspipe_goes_on(tmp_path):
    check_mspipe_training(writer.unpack("mspipe", tmp_path), None)


def test_a_memory_of_mspipe_has_the_same_rows(tmp_path):
    check_mspipe_memory(writer.unpack("mspipe", tmp_path), None)


# -- hybridflow -----------------------------------------------------------------------------


def check_hybridflow_weights(folder, pool):
    with chdir(folder):
        options = [*writer.TRAIN, "--checkpoint", "run", "--out", "exported"]
        status, _ = writer.run_command("hybridflow", "export", *options)
    assert status == 0
    found = {}
    for file in (folder / "exported").glob("*.safetensors"):
        found |= writer.digests(load_file(file))
    assert found == EXPECTED["hybridflow"]["weights"]


def check_hybridflow_run(folder, pool):
    with chdir(folder):
        options = [*writer.TRAIN, "steps=4", "--checkpoint", "run", "--out", "went-on"]
        status, _ = writer.run_command("hybridflow", "train", *options)
    assert status == 0
    found, whole = writer.metrics_of(folder / "went-on"), EXPECTED["hybridflow"]["metrics"]
    assert [row[0] for row in found] == [2, 3]
    for row, theirs in zip(found, whole[2:], strict=True):
        assert row == pytest.approx(theirs, **CLOSE)


def check_hybridflow_extra(folder, pool):
    checkpoint, expected = hy.Checkpoint(folder / "extra"), writer.hybridflow_extra()
    assert checkpoint.latest() == 7
    found = checkpoint.load({})
    assert torch.equal(found["mask"], expected["mask"])
    batch, saved = found["nested"][0]["rolls"], expected["nested"][0]["rolls"]
    assert isinstance(batch, hy.Batch)
    assert batch.keys() == saved.keys()
    assert torch.equal(batch["tokens"], saved["tokens"])
    assert batch["response"] == saved["response"]
    assert (batch["text"], batch.meta) == (saved["text"], saved.meta)
    assert (found["step"], set(found)) == (7, set(expected))


def test_a_recipe_of_two_ranks_goes_on_on_one(tmp_path):
    folder = writer.unpack("hybridflow", tmp_path)
    check_hybridflow_weights(folder, None)
    check_hybridflow_run(folder, None)


def test_batches_of_hybridflow_are_those_that_were_saved(tmp_path):
    check_hybridflow_extra(writer.unpack("hybridflow", tmp_path), None)


def test_a_mapping_and_a_placed_recipe_of_hybridflow(tmp_path):
    folder = writer.unpack("hybridflow", tmp_path)
    text = (folder / "mapping.json").read_text()
    mapping = hy.mapping.Mapping.from_json(text)
    assert json.loads(mapping.to_json()) == json.loads(text)
    assert mapping.num_gpus == 16
    assert {model.name for one in mapping.sets for model in one.models} >= {"actor", "critic"}
    assert "Simulated step" in mapping.explain()
    again = [
        "map",
        "--recipe",
        folder / "placed.yaml",
        "--gpus",
        2,
        "--out",
        tmp_path / "again.yaml",
    ]
    status, _ = writer.run_command("hybridflow", *again)
    assert status == 0
    assert (tmp_path / "again.yaml").read_text() == (folder / "placed.yaml").read_text()


# -- lancet ---------------------------------------------------------------------------------


def check_lancet_plan(folder, pool):
    expected = EXPECTED["lancet"]
    status, printed = writer.run_command("lancet", "explain", folder / "plan.json", "--json")
    assert status == 0
    assert json.loads(printed)["plans"] == expected["plans"]
    plans = json.loads((folder / "plan.json").read_text())["plans"]
    assert [plan["order"] for plan in plans] == expected["orders"]
    for plan, seconds in zip(plans, expected["plans"], strict=True):
        ops = {
            op["name"]: lancet.Op(op["name"], op["kind"], op["time_s"], tuple(op["after"]))
            for op in plan["ops"]
        }
        assert lancet.simulate(ops.values()).makespan_s == seconds["before_s"]
        planned = lancet.simulate(ops[name] for name in plan["order"])
        assert planned.makespan_s == seconds["makespan_s"]


def test_a_plan_of_lancet_is_explained_and_replayed_as_it_was_planned(tmp_path):
    check_lancet_plan(writer.unpack("lancet", tmp_path), None)


# -- shared ---------------------------------------------------------------------------------


def test_claims_and_a_cluster_of_shared(tmp_path):
    folder = writer.unpack("shared", tmp_path)
    demo = read_demo(folder)
    assert (demo.package, demo.figures) == ("toy", writer.FIGURES)
    found, saved = demo.claims, writer.shared_claims()
    assert found[0] == saved[0]
    assert found[0].ratio == 2.5
    assert found[1].to_json() == saved[1].to_json()
    assert Cluster.from_yaml(folder / "cluster.yaml") == writer.shared_cluster()


# -- of all ---------------------------------------------------------------------------------


def flip(file, tensor):
    """Inverts the bytes of a tensor of a safetensors file; without one, a stretch of the middle."""
    data = bytearray(file.read_bytes())
    at, count = len(data) // 2, min(2048, len(data) // 4)
    if tensor:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        start, end = header[tensor]["data_offsets"]
        at, count = 8 + length + start, end - start
    data[at : at + count] = bytes(255 - byte for byte in data[at : at + count])
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("package", "file", "tensor", "check"),
    [
        ("bytecheckpoint", "run/*/*/rank-00001.safetensors", None, check_bytecheckpoint_run),
        ("adaqp", "parts/part1.safetensors", "feat", check_adaqp_parts),
        ("gnnflow", "graph.safetensors", "eids", check_gnnflow_graph),
        ("gnnflow", "continual/*.safetensors", "head.src.weight", check_gnnflow_continual),
        ("heta", "parts/part0/tensors.safetensors", "feat:0", check_heta_run),
        ("mspipe", "training/training.pt", None, check_mspipe_training),
        ("mspipe", "memory.safetensors", "rows", check_mspipe_memory),
        ("hybridflow", "run/*/actor/__1_0.distcp", None, check_hybridflow_weights),
        ("hybridflow", "extra/*/extra.pt", None, check_hybridflow_extra),
        ("lancet", "plan.json", None, check_lancet_plan),
    ],
)
def test_flipped_bytes_are_noticed(tmp_path, pool, package, file, tensor, check):
    folder = writer.unpack(package, tmp_path)
    (found,) = folder.glob(file)
    flip(found, tensor)
    with pytest.raises((AssertionError, MeshyardError)):
        check(folder, pool)


def test_no_file_names_a_module_of_ours():
    ours = re.compile(rf"\b({'|'.join(writer.PACKAGES)})\.[a-z_]+".encode())
    named = []
    for package in writer.PACKAGES:
        with zipfile.ZipFile(ASSETS / f"{package}.zip") as archive:
            named += [
                (package, name, match[0])
                for name in archive.namelist()
                if (match := ours.search(archive.read(name)))
            ]
    assert named == []


def test_assets_are_small():
    files = [path for path in ASSETS.iterdir() if path.is_file()]
    written = {f"{package}.zip" for package in writer.PACKAGES}
    assert {path.name for path in files} == {"write_formats.py", "expected.json", *written}
    assert sum(path.stat().st_size for path in files) <= 200_000


def test_git_keeps_the_assets():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone: an unpacked archive has no list of tracked files")
    listed = subprocess.run(
        [git, "ls-files", "tests/assets"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    written = [f"tests/assets/{package}.zip" for package in writer.PACKAGES]
    assert {*written, "tests/assets/expected.json"} <= set(listed.stdout.splitlines())
