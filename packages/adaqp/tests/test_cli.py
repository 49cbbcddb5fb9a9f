"""The command line end to end: partition, train, interrupt, resume, plan, probe, bench."""

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from adaqp import LinkTable, commands, load
from adaqp.cli import main
from adaqp.graphs.formats import read
from adaqp.partitioning.partitioner import partition
from adaqp.policy import Exact
from adaqp.training.config import ModelConfig, PolicyConfig, RunConfig
from adaqp.training.predictions import Wanted, tabulate
from shared.errors import ConfigError, DataError


def run_here(*args, expect=0):
    """What the command line prints when it runs in this process, with its exit status checked."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        try:
            status = main([*map(str, args)])
        except SystemExit as ended:
            status = ended.code
    assert status == expect, text.getvalue()
    return text.getvalue()


def adaqp_cli(*args, expect=0):
    """What the command line prints as a process of its own, with its exit status checked."""
    done = subprocess.run(
        [sys.executable, "-m", "adaqp", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "parts"
    text = run_here("partition", "sbm", "--num-nodes", 4000, "--out", folder, "--parts", 2)
    assert "edges cut" in text
    return folder


def test_help_does_not_import_torch():
    script = "import sys, adaqp.cli; assert not {'torch', 'numba', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_a_run_that_was_interrupted_continues_and_ends_where_one_run_does(parts, tmp_path):
    links = tmp_path / "links.json"
    links.write_text(LinkTable.uniform(2, 12.5e6, 2e-4).to_json())
    common = ("--model.hidden", 16, "--eval-every", 0, "--save-every", 3, "--links", links)
    whole, pieces = tmp_path / "whole.json", tmp_path / "pieces.json"
    adaqp_cli("train", parts, "--epochs", 9, "--history", whole, *common)
    saved = ("--checkpoint", tmp_path / "saved")
    adaqp_cli("train", parts, "--epochs", 6, *saved, *common)
    text = adaqp_cli("train", parts, "--epochs", 9, "--history", pieces, *saved, *common)
    assert "epoch 9:" in text
    losses = json.loads(whole.read_text())["loss"]
    assert len(losses) == 9
    assert json.loads(pieces.read_text())["loss"] == losses, "epochs before the resume too"


@pytest.mark.slow
def test_plan_bench_and_probe_print_tables(parts, tmp_path):
    text = adaqp_cli("plan", parts, "--rate", "100mbit", "--model.hidden", 16)
    assert "adaptive" in text
    assert "fixed 2 bits" in text
    links = tmp_path / "links.json"
    assert "Mbit/s" in adaqp_cli("probe-links", "--ranks", 2, "--out", links, "--budget-s", 0.5)
    assert "adaptive" in adaqp_cli("plan", parts, "--links", links, "--model.hidden", 16)
    text = adaqp_cli(
        "bench",
        parts,
        "--policies",
        "exact-no-overlap",
        "fixed",
        "--epochs",
        3,
        "--model.hidden",
        16,
    )
    assert "exact no overlap" in text
    assert "fixed 4 bits" in text


def test_errors_say_what_to_do_and_exit_1(parts, tmp_path):
    text = run_here("train", tmp_path / "nowhere", expect=1)
    assert "holds no partition; make one: adaqp partition" in text
    text = run_here("partition", tmp_path / "graph.xyz", "--out", tmp_path / "p", expect=1)
    assert text.startswith("adaqp: ")
    assert "Traceback" not in text
    run_here("train", parts, "--epoch", 3, expect=2)


def test_an_error_of_a_process_is_one_sentence_and_status_1(tmp_path):
    text = adaqp_cli("train", tmp_path / "nowhere", expect=1)
    assert text.startswith("adaqp: ")
    assert text.count("\n") == 1


def test_settings_of_a_command_line_are_refused_in_one_sentence(parts):
    text = run_here("train", parts, "--epochs", 0, expect=2)
    assert text == ("adaqp: epochs, eval_every: expected 1 or more and 0 or more, got 0 and 10\n")
    text = run_here("train", parts, "--model.dropout", 1, expect=2)
    assert text == "adaqp: model.dropout: expected a share in [0, 1), got 1.0\n"


@pytest.fixture(scope="module")
def one_part(tmp_path_factory, sbm):
    folder = tmp_path_factory.mktemp("cli") / "one"
    partition(sbm, 1, method="random", out=folder)
    return folder


def test_a_resumed_run_says_from_where(one_part, tmp_path):
    argv = ("train", one_part, "--model.hidden", 8, "--checkpoint", tmp_path / "run1", "--epochs")
    assert "resumed" not in run_here(*argv, 2)
    text = run_here(*argv, 3)
    assert text.startswith(f"adaqp: resumed from step 2 of {tmp_path}/run1\nepoch 3: ")


def test_a_checkpoint_of_another_width_is_one_sentence_of_all_ranks(parts, tmp_path):
    argv = ("train", parts, "--epochs", 1, "--checkpoint", tmp_path / "run1", "--model.hidden")
    run_here(*argv, 8)
    assert run_here(*argv, 12, expect=1) == (
        f"adaqp: {tmp_path}/run1: expected model.0.weight of shape [128, 12] as in this run, got "
        "shape [128, 8]; resume with the model's settings that it was written with, or give "
        "another folder\n"
    )


@pytest.mark.parametrize("bits", [2, 32])
def test_a_learning_rate_that_diverges_is_told_with_the_epoch(parts, bits):
    argv = ("--policy.name", "fixed", "--policy.width", bits, "--lr", 1e30, "--epochs", 9)
    text = run_here("train", parts, *argv, expect=1)
    assert re.fullmatch(r"adaqp: epoch \d: .*lower the learning rate.*\n", text), text
    assert ("expected a finite loss, got nan" in text) == (bits == 32)


def test_a_full_disk_is_one_sentence_of_all_ranks(parts, small_disk):
    folder = small_disk(65_536) / "run1"
    argv = ("--model.hidden", 64, "--epochs", 1, "--checkpoint", folder)
    text = run_here("train", parts, *argv, expect=1)
    assert re.fullmatch(
        rf"adaqp: {folder}: expected room on the disk for what is written there, got [\d,]+ bytes "
        r"free; free some, or write to another disk\n",
        text,
    ), text


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="epochs, eval_every: expected 1 or more"):
        RunConfig(epochs=0)
    with pytest.raises(ConfigError, match="lr: expected a learning rate above 0, got -1"):
        RunConfig(lr=-1.0)
    with pytest.raises(ConfigError, match=r"model\.dropout: expected a share in"):
        ModelConfig(dropout=1.0)


def test_jobs_refuse_what_cannot_be_done(parts, tmp_path, monkeypatch):
    config = RunConfig(epochs=1)
    with pytest.raises(ConfigError, match="save_every: expected 1 or more epochs, got 0"):
        commands.train(parts, config, tmp_path / "saved", 0, None, None)
    with pytest.raises(
        DataError, match=r"nowhere\.json: expected what `adaqp probe-links --out` writes, there"
    ):
        commands.train(parts, config, None, 50, None, tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match=r"bench needs an epoch and a policy, got 0 and 1"):
        commands.bench(parts, ModelConfig(), [PolicyConfig()], 0, None)
    with pytest.raises(ConfigError, match="ranks: expected 2 or more, got 1"):
        commands.probe_links(1, None, 1.0, None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--rate builds hosts of its own"):
        commands.bench(parts, ModelConfig(), [PolicyConfig()], 3, "100mbit")


def test_one_part_has_no_plan(tmp_path, sbm):
    partition(sbm, 1, method="random", out=tmp_path / "one")
    with pytest.raises(DataError, match="expected 2 or more parts, got 1"):
        commands.plan(tmp_path / "one", ModelConfig(), None, None, 0.2)


def write_shop(folder, num_nodes=40):
    """Tables of a graph whose ids are texts: two rings, joined in two places."""
    folder.mkdir()
    names = [f"n{7 * at % num_nodes:03d}" for at in range(num_nodes)]
    rows = [
        f"{name},{at % 2},{('train', 'val', 'test', '')[at % 4]},{at / num_nodes},{at % 3}"
        for at, name in enumerate(names)
    ]
    edges = [(at, (at + 2) % num_nodes) for at in range(num_nodes)] + [(0, 1), (9, 20)]
    pairs = [f"{names[a]},{names[b]}\n{names[b]},{names[a]}" for a, b in edges]
    (folder / "nodes.csv").write_text("\n".join(["id,label,split,x,y", *rows]))
    (folder / "edges.csv").write_text("\n".join(["src,dst", *pairs]))
    return names


def score_directly(shop, checkpoint, folder, names):
    """Classes' probabilities by id, of the weights on the whole graph in one part."""
    partition(read(shop), 1, "random", out=folder)
    dg = load(folder)
    model = ModelConfig(hidden=8, dropout=0.0).build(dg)
    weights = {"model": dict(model.state_dict())}
    dcp.load(weights, checkpoint_id=str(checkpoint), no_dist=True)
    model.load_state_dict(weights["model"])
    model.eval()
    with torch.no_grad(), dg.messages(Exact()):
        scores = model(dg.feat).softmax(1)
    return {
        names[at]: row for at, row in zip(dg.part.global_ids.tolist(), scores.tolist(), strict=True)
    }


@pytest.mark.parametrize("num_parts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_predict_scores_nodes_as_the_model_called_directly(num_parts, tmp_path):
    pandas = pytest.importorskip("pandas", reason="tables are read by pandas")
    shop, cut, saved = tmp_path / "shop", tmp_path / "cut", tmp_path / "saved"
    names = write_shop(shop)
    run_here("partition", shop, "--out", cut, "--parts", num_parts, "--method", "random")
    settings = ("--model.hidden", 8, "--model.dropout", 0, "--policy.name", "fixed", "--epochs", 5)
    run_here("train", cut, *settings, "--checkpoint", saved)
    direct = score_directly(shop, saved, tmp_path / "whole", names)

    out = tmp_path / "deep" / "scores.csv"
    text = run_here("predict", cut, "--checkpoint", saved, "--out", out)
    assert f"scores of 40 nodes: {out}" in text
    found = pandas.read_csv(out)
    assert [*found.columns] == ["id", "class", "score", "score_0", "score_1"]
    assert found["id"].tolist() == names
    for name, label, best, *scores in found.itertuples(index=False):
        assert scores == pytest.approx(direct[name], abs=1e-6)
        assert (label, best) == (int(scores[1] > scores[0]), max(scores))

    wanted = tmp_path / "wanted.csv"
    wanted.write_text("id\nn003\nzoe\nn001\n")
    told = run_here("predict", cut, "--checkpoint", saved, "--out", out, "--nodes", wanted)
    assert "scores of 2 nodes" in told
    assert "rows without a score, as the graph lacks their ids: 1" in told
    some = pandas.read_csv(out)
    assert some["id"].tolist() == ["n003", "zoe", "n001"]
    assert some["score_1"][0] == pytest.approx(direct["n003"][1], abs=1e-6)
    assert some[["class", "score", "score_0"]].isna().all(axis=1).tolist() == [False, True, False]


def test_predict_says_what_is_wrong(tmp_path):
    pytest.importorskip("pandas", reason="tables are read by pandas")
    shop, cut, saved = tmp_path / "shop", tmp_path / "cut", tmp_path / "saved"
    write_shop(shop)
    run_here("partition", shop, "--out", cut, "--parts", 1, "--method", "random")
    again = run_here("partition", shop, "--out", cut, "--parts", 1, "--method", "random")
    assert "edges cut" in again, "a partition with ids is replaced as one without"
    predict = ("predict", cut, "--checkpoint", saved, "--out", tmp_path / "scores.csv")
    assert "holds no checkpoint" in run_here(*predict, expect=1)
    run_here("train", cut, "--epochs", 1, "--model.hidden", 8, "--checkpoint", saved)
    assert "expected a table named" in run_here(*predict[:-1], tmp_path / "x.txt", expect=1)
    wanted = tmp_path / "wanted.csv"
    wanted.write_text("name\nn001\n")
    asked = (*predict, "--nodes", wanted)
    assert "expected a column 'id', got ['name']; rename" in run_here(*asked, expect=1)
    wanted.write_text("id\nzoe\n")
    assert "none of 1 is one; check them" in run_here(*asked, expect=1)
    assert not (tmp_path / "scores.csv").exists()


def test_nodes_without_ids_are_scored_by_their_numbers(one_part, tmp_path):
    pandas = pytest.importorskip("pandas", reason="tables are read by pandas")
    num_nodes = load(one_part).meta["num_nodes"]
    saved, wanted, out = tmp_path / "saved", tmp_path / "wanted.csv", tmp_path / "scores.csv"
    run_here("train", one_part, "--epochs", 1, "--model.hidden", 8, "--checkpoint", saved)
    predict = ("predict", one_part, "--checkpoint", saved, "--out", out)
    run_here(*predict)
    everyone = pandas.read_csv(out)
    assert everyone["id"].tolist() == [*range(num_nodes)]
    wanted.write_text(f"id\n1\n{num_nodes}\n{num_nodes - 1}\n")
    told = json.loads(run_here(*predict, "--nodes", wanted, "--json"))
    assert told == {"num_scored": 2, "num_unknown": 1, "out": str(out)}
    some = pandas.read_csv(out)
    assert some["id"].tolist() == [1, num_nodes, num_nodes - 1]
    assert some["score"].isna().tolist() == [False, True, False]
    assert some["score"][2] == everyone["score"][num_nodes - 1]
    wanted.write_text(f"id\n{num_nodes}\n")
    told = run_here(*predict, "--nodes", wanted, expect=1)
    assert "wanted.csv: id: expected ids of the graph's nodes, none of 1 is one" in told
    wanted.write_text("id\n007\n")
    told = run_here(*predict, "--nodes", wanted, expect=1)
    assert "expected numbers of nodes, as the graph has no ids, got texts" in told


def test_what_predict_reads_is_not_written_over(one_part, tmp_path):
    wanted = tmp_path / "wanted.csv"
    wanted.write_text("id\n1\n")
    predict = ("predict", one_part, "--checkpoint", tmp_path / "saved", "--nodes", wanted)
    for out in (wanted, one_part / "nodes.csv"):
        told = run_here(*predict, "--out", out, expect=1)
        assert f"got one that would replace {out}, which is read" in told
    assert wanted.read_text() == "id\n1\n"


def test_predict_without_pandas_says_so_before_it_scores(one_part, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    out = tmp_path / "scores.csv"
    told = run_here("predict", one_part, "--checkpoint", tmp_path, "--out", out, expect=1)
    assert told == (
        f"adaqp: {out}: needs pandas, and pyarrow for Parquet; run: pip install pandas pyarrow\n"
    )


def test_folders_of_results_are_made_before_the_work(one_part, tmp_path):
    history = tmp_path / "new" / "history.json"
    argv = ("train", one_part, "--model.hidden", 8, "--epochs", 1, "--history")
    run_here(*argv, history)
    assert json.loads(history.read_text())["loss"]
    (tmp_path / "file").write_text("")
    told = run_here(*argv, tmp_path / "file" / "history.json", expect=1)
    assert "epoch 1" not in told
    assert ".partial" not in told
    told = run_here("probe-links", "--out", tmp_path / "file" / "links.json", expect=1)
    assert ".partial" not in told


def test_several_classes_a_node_have_no_column_of_one():
    scores = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    table = tabulate(Wanted(None, None), scores, is_multilabel=False)
    assert table["class"].tolist() == [1, 0]
    some = tabulate(Wanted(np.array([1, 2]), np.array([1, -1])), scores, is_multilabel=True)
    assert [*some.columns] == ["id", "score_0", "score_1"]
    assert some["score_1"].isna().tolist() == [False, True]
