"""The command line end to end on a small graph: plan, write, train, stop, resume, predict, compare."""

import json
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch

from heta import cli, profiler
from heta.config import TrainConfig
from heta.data.references import load_reference
from heta.graph.schema import Schema
from heta.partitioning.plan import Plan
from heta.partitioning.workload import StepRates
from heta.training.jobs import training_run

GRAPH = f"{Path(__file__).with_name('graphs.py')}:scholars"
SMALL = ("--hidden", "8", "--batch-size", "16", "--fanouts", "4", "4")


@pytest.fixture
def heta(capsys, monkeypatch):
    """heta(words, status=0) -> what the command prints on stdout and stderr."""
    # Folders of users' files, which a command adds, would keep pools from sharing a template.
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*words, status=0):
        try:
            got = cli.main([*map(str, words)])
        except SystemExit as ended:
            got = ended.code or 0
        output = capsys.readouterr()
        assert got == status, output
        return output

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Parts of one host."""
    path = tmp_path_factory.mktemp("parts") / "one"
    assert cli.main(["partition", GRAPH, "--parts", "1", *SMALL, "--out", str(path), "-q"]) == 0
    return path


def test_plan_explains_and_writes_what_partition_reads(heta, tmp_path):
    file = tmp_path / "new" / "plan.json"
    told = heta("plan", GRAPH, *SMALL, "--strategy", "raf", "--out", file).out
    assert told.startswith("raf on 2 hosts: a step takes")
    plan = Plan.from_json(file.read_text())
    assert (plan.hidden, plan.fanouts, plan.batch_size) == (8, (4, 4), 16)
    told = json.loads(
        heta("partition", GRAPH, "--plan", file, "--out", tmp_path / "p", "--json").out
    )
    assert told["strategy"] == "raf"
    assert list(told["bytes"]) == ["part0", "part1"]
    assert Plan.from_json((tmp_path / "p" / "plan.json").read_text()) == plan


def test_plan_takes_counts_rates_memory_and_the_network(heta, tmp_path, monkeypatch):
    schema = Schema({"a": 9, "b": 99}, {("a", "r", "b"): 50, ("b", "s", "a"): 50}, {"b": 3}, "b")
    counts, rates = tmp_path / "counts.json", tmp_path / "rates.json"
    counts.write_text(json.dumps(schema.to_json()))
    monkeypatch.setattr(profiler, "measure_rates", lambda: StepRates(step_s=5.0))
    heta("profile", "--out", rates)
    words = ("plan", counts, "--rates", rates, "--json", "--strategy", "raf")
    slow = json.loads(heta(*words, "--network-rate", "1Mbit/s").out)
    fast = json.loads(heta(*words, "--network-rate", "10Gbit/s").out)
    assert slow["step_s"] > fast["step_s"] + 1 > 6
    assert (
        "memory_bytes: expected at least" in heta("plan", counts, "--memory", "10B", status=1).err
    )
    rates.write_text('{"speed": 1}')
    assert "measure them again" in heta(*words, status=1).err


def test_training_saves_each_epoch_and_resumes(heta, folder, tmp_path, monkeypatch):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    words = ("train", folder, "--lr", "0.05", "--json", "--epochs")
    expected = heta(*words, "3", "--checkpoint", whole)
    assert expected.err.count("epoch ") >= 3
    # Killed after the second epoch's checkpoint.
    save = training_run.Trainer.save

    def stop_after_two(trainer, path):
        save(trainer, path)
        if trainer.epoch == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(training_run.Trainer, "save", stop_after_two)
    told = heta(*words, "3", "--checkpoint", parted, status=130).err
    assert told.endswith(f"interrupted; resume from {parted} by the same command\n")
    monkeypatch.undo()
    resumed = json.loads(heta(*words, "3", "--checkpoint", parted).out)
    wanted = json.loads(expected.out)
    assert resumed["epochs"][-1]["loss"] == wanted["epochs"][-1]["loss"]
    assert resumed["epochs"][-1]["val"] == wanted["epochs"][-1]["val"]
    told = heta("train", folder, "--lr", "0.1", "--checkpoint", parted, status=1).err
    assert "lr: expected 0.05, with which" in told


def test_predictions_have_probabilities_by_id(heta, folder, tmp_path):
    run, out, wanted = tmp_path / "run", tmp_path / "p.csv", tmp_path / "wanted.csv"
    heta("train", folder, "--epochs", "1", "--checkpoint", run)
    heta("predict", folder, "--checkpoint", run, "--out", out)
    table = pandas.read_csv(out)
    assert list(table.columns) == ["id", "class", "probability", "p_0", "p_1", "p_2"]
    assert table["id"].tolist() == list(range(60))
    scores = torch.tensor(table[["p_0", "p_1", "p_2"]].to_numpy())
    assert torch.allclose(scores.sum(1), torch.ones(60, dtype=torch.float64))
    assert (scores.argmax(1).numpy() == table["class"]).all()
    wanted.write_text("id\n7\n900\n3\n")
    told = heta(
        "predict", folder, "--checkpoint", run, "--out", out, "--nodes", wanted, "--json"
    ).out
    assert json.loads(told) == {"num_scored": 2, "num_unknown": 1, "out": str(out)}
    some = pandas.read_csv(out)
    assert some["id"].tolist() == [7, 900, 3]
    assert some["class"].isna().tolist() == [0, 1, 0]
    # What is drawn depends on the seed alone, so that other nodes beside it change nothing.
    assert some["p_1"][0] == pytest.approx(table["p_1"][7], abs=1e-6)


def test_a_run_of_a_gpu_predicts_where_there_is_none(heta, folder, tmp_path):
    run = tmp_path / "run"
    told = heta("train", folder, "--device", "tpu", "--checkpoint", run, status=1).err
    assert "device: expected cpu, cuda or cuda:N, got 'tpu'" in told
    heta("train", folder, "--epochs", "1", "--checkpoint", run)
    heta("predict", folder, "--checkpoint", run, "--out", tmp_path / "cpu.csv")
    about = json.loads((run / "run.json").read_text())
    about["config"] |= {"device": "cuda", "cache": "1MB"}
    (run / "run.json").write_text(json.dumps(about))
    heta("predict", folder, "--checkpoint", run, "--out", tmp_path / "gpu.csv")
    assert (tmp_path / "gpu.csv").read_text() == (tmp_path / "cpu.csv").read_text()


def test_ids_and_classes_of_tables_come_back(heta, tmp_path):
    (tmp_path / "papers.csv").write_text(
        "doi,venue,split\na,kdd,train\nb,vldb,train\nc,kdd,train\nd,,\n"
    )
    (tmp_path / "writes.csv").write_text("who,doi\nann,a\nbob,b\nann,c\nbob,d\n")
    (tmp_path / "graph.yaml").write_text(
        "target: paper\n"
        "nodes:\n  paper: {file: papers.csv, id: doi, label: venue, split: split}\n  author: {}\n"
        "edges:\n  - {relation: [author, writes, paper], file: writes.csv, src: who, dst: doi}\n"
    )
    words = ("--layers", "1", "--fanouts", "-1", "--parts", "1", "--hidden", "4")
    heta("partition", tmp_path / "graph.yaml", *words, "--out", tmp_path / "p")
    heta("train", tmp_path / "p", "--epochs", "2", "--checkpoint", tmp_path / "run")
    out = tmp_path / "p.csv"
    heta("predict", tmp_path / "p", "--checkpoint", tmp_path / "run", "--out", out)
    table = pandas.read_csv(out)
    assert table["id"].tolist() == ["a", "b", "c", "d"]
    assert set(table["class"]) <= {"kdd", "vldb"}
    assert list(table.columns[3:]) == ["p_kdd", "p_vldb"]


def test_a_model_of_ones_own_is_named_by_its_function(heta, folder, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import heta\n\n"
        "def narrow(part, hidden, num_classes):\n"
        "    return heta.nn.RGCN(part, 4, num_classes)\n\n"
        "def nothing(part, hidden, num_classes):\n    return None\n"
    )
    heta("train", folder, "--epochs", "1", "--model", f"{file}:narrow")
    told = heta("train", folder, "--model", f"{file}:nothing", status=1).err
    assert "to return a heta.nn.HeteroModel, got NoneType" in told
    told = heta("train", folder, "--model", f"{file}:absent", status=1).err
    assert "to have a function 'absent', got none" in told


@pytest.mark.unchecked
@pytest.mark.usefixtures("template")
def test_ranks_started_here_train_as_one_process(heta, folder, tmp_path):
    parts = tmp_path / "two"
    heta("partition", GRAPH, *SMALL, "--strategy", "raf", "--out", parts)
    words = ("--epochs", "1", "--json")
    two = json.loads(heta("train", parts, *words).out)
    one = json.loads(heta("train", folder, *words).out)
    assert two["epochs"][0]["loss"] == pytest.approx(one["epochs"][0]["loss"], rel=1e-5)
    assert two["epochs"][0]["sent_bytes"] > 0


@pytest.mark.slow
def test_bench_compares_all_strategies(heta):
    told = heta("bench", GRAPH, *SMALL, "--turns", "1", "--steps", "2", "--json").out
    record = json.loads(told)
    assert list(record) == ["raf", "replicate", "edge-cut", "one process"]
    for each in record.values():
        assert each["losses"] == pytest.approx(record["one process"]["losses"], rel=1e-5)


def test_simulate_predicts_published_counts(heta):
    told = json.loads(heta("simulate", "mag240m", "--hosts", "2", "4", "--json").out)
    assert [each["hosts"] for each in told["hosts"]] == [2, 4]
    assert "| 4 | raf" in heta("simulate", "mag240m", "--hosts", "4").out


MISTAKES = [
    (["plan", "flihgts"], 1, "graph: expected flights[:TASK[:DAYS]]"),
    (["plan", "no/graph.yaml"], 1, "no/graph.yaml: expected a graph's tables as YAML, there is"),
    (["plan", "no.py:graph"], 1, "and there is no file no.py"),
    (["plan", "no_such_module:graph"], 1, "and there is no module no_such_module"),
    (["plan", "flights:late15", "--strategy", "rfa"], 2, "strategy: expected one of auto, raf"),
    (["plan", "flights:late15", "--fanouts", "5"], 2, "fanouts: expected 2, one a layer, got 1"),
    (["plan", "flights:late15", "--network-rate", "fast"], 2, "expected a rate"),
    (["plan", "flights", "--rates", "no.json"], 1, "no.json: expected rates that `heta profile`"),
    (["train", "no"], 1, "no: expected a folder that `heta partition` wrote, there is nothing"),
    (["train", "no", "--model", "rgnc"], 1, "did you mean 'rgcn'?"),
    (["train", "no", "--recipe", "no.yaml"], 1, "no.yaml: expected a recipe as YAML, there is"),
    (["train", "no", "--ranks", "0"], 1, "ranks: expected 1 or more, got 0"),
    (["train", "no", "--epochs", "0"], 1, "epochs: expected 1 or more, got 0"),
    (["predict", "no", "--checkpoint", "no"], 1, "no: expected a folder that `heta partition`"),
]  # fmt: skip
PROGRAM = """
import contextlib, io, json, sys
from heta.cli import main

results = []
for words in json.loads(sys.argv[1]):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            status = main(words)
        except SystemExit as ending:
            status = ending.code
    results.append((status, errors.getvalue(), "torch" in sys.modules))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    """Exit status, errors and whether torch was imported, of each mistake in one fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([words for words, _, _ in MISTAKES])],
        check=False, capture_output=True, text=True, cwd=tmp_path_factory.mktemp("mistakes"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda n: " ".join(MISTAKES[n][0]))
def test_a_mistake_is_one_sentence_before_torch_is_imported(mistakes, number):
    _, status, sentence = MISTAKES[number]
    got_status, errors, has_torch = mistakes[number]
    assert got_status == status, errors
    assert not has_torch
    assert errors.startswith("heta: ")
    assert sentence in errors
    assert errors.count("\n") == 1


def test_the_recipe_and_options_make_one_configuration(heta, folder, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(training_run, "train", lambda *args: seen.append(args))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("epochs: 7\nlr: 1e-3\nfanouts: [2, 2]\n")
    heta("train", folder, "--recipe", recipe, "--lr", "0.5")
    assert seen[0][1] == TrainConfig(epochs=7, lr=0.5, fanouts=(2, 2))


def test_a_users_folder_is_searched_once(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    for _ in range(2):
        load_reference(GRAPH, "graph")
    assert sys.path == [str(Path(__file__).parent)]
