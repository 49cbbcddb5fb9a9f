import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gnnflow as gf
from gnnflow import profiler
from gnnflow.cli import main
from gnnflow.config import Recipe

BEGIN = 1_356_998_400  # 2013-01-01


def test_help_teaches_every_command_with_an_example(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for command in ("train", "continual", "predict", "partition", "bench", "info", "demo"):
        assert f"\n  gnnflow {command} " in text
    assert "Exit status" in text


def test_help_does_not_import_torch():
    program = (
        "import sys; from gnnflow.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print('heavy', sorted({'torch', 'numpy', 'matplotlib'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("heavy []\n")


def test_continual_writes_rounds_and_a_page(tmp_path, capsys):
    out = tmp_path / "report"
    arguments = ["continual", "zipf:60:900", "--every", "300", "--dim", "16", "--fanouts", "4", "4"]
    assert main([*arguments, "--out", str(out)]) == 0
    assert "rounds, mean AP" in capsys.readouterr().out
    rounds = json.loads((out / "rounds.json").read_text())
    assert sum(one["num_events"] for one in rounds) == 630
    assert "<svg" in (out / "continual.svg").read_text()
    assert "data:image/svg" in (out / "continual.html").read_text()


@pytest.mark.parametrize("model", ["tf-tgn", "tgat"])
def test_train_prints_both_halves(model, capsys):
    arguments = ["train", "zipf:60:600", "--model", model, "--dim", "16", "--epochs", "1"]
    fanouts = ["4"] if model == "tf-tgn" else ["4", "4"]
    assert main([*arguments, "--fanouts", *fanouts]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["half 1", "half 2"]


def test_partitions_old_file_stays_where_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    out = tmp_path / "parts.npy"
    out.write_bytes(b"old")

    def write_some(file, array):
        Path(getattr(file, "name", file)).write_bytes(b"new")
        raise OSError("no space left")

    monkeypatch.setattr(np, "save", write_some)
    assert main(["partition", "zipf:50:500", "--parts", "3", "--out", str(out)]) == 1
    assert out.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["parts.npy"]


def test_partition_writes_a_part_for_every_node(tmp_path, capsys):
    out = tmp_path / "parts.npy"
    assert main(["partition", "zipf:50:500", "--parts", "3", "--out", str(out)]) == 0
    assert np.load(out).shape == (50,)
    assert set(np.load(out).tolist()) <= {0, 1, 2}
    assert capsys.readouterr().out


def test_info_and_bench(tmp_path, capsys):
    assert main(["info", "zipf:50:500"]) == 0
    assert "500 events" in capsys.readouterr().out
    graph = gf.TemporalGraph()
    graph.add_edges([0], [1], [2])
    graph.save(tmp_path / "g.safetensors")
    assert main(["info", str(tmp_path / "g.safetensors")]) == 0
    assert "num_edges=1" in capsys.readouterr().out
    assert main(["bench", "zipf:50:500"]) == 0
    assert "M events/s" in capsys.readouterr().out


def test_the_order_of_a_files_rows_changes_nothing(tmp_path, capsys):
    noise = np.random.default_rng(0)
    columns = [
        noise.integers(0, 20, 400),
        noise.integers(20, 40, 400),
        np.sort(noise.permutation(900)[:400]),
    ]
    rows = [
        f"{s},{d},{t},{x:.4f}" for s, d, t, x in zip(*columns, noise.normal(size=400), strict=True)
    ]
    told = []
    for name, order in (("sorted", range(400)), ("mixed", noise.permutation(400))):
        (tmp_path / f"{name}.csv").write_text("\n".join(["src,dst,t,x", *(rows[i] for i in order)]))
        given = ["--every", "100", "--dim", "8", "--fanouts", "3", "--out", str(tmp_path / name)]
        assert main(["continual", str(tmp_path / f"{name}.csv"), *given, "--replay", "0"]) == 0
        found = json.loads((tmp_path / name / "rounds.json").read_text())
        told.append([one["num_events"] for one in found])
        events = gf.data.read_events(tmp_path / f"{name}.csv").sorted()
        parts = Recipe(dim=8).build(events)
        assert torch.equal(parts.features.gather("edge", events.eid), events.features)
    assert told[0] == told[1]
    capsys.readouterr()


def test_a_folder_that_cannot_be_made_is_told_before_the_work(tmp_path, capsys):
    (tmp_path / "afile").write_text("hi")
    assert main(["continual", "zipf:50:500", "--out", str(tmp_path / "afile")]) == 1
    assert "afile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["bench", "zipf:9:90", "--increment", "0"], "increment: expected 1"),
        (["train", "zipf:9:90", "--limit", "-5"], "limit: expected 1"),
        (["train", "zipf:9:90", "--cache", "2"], "cache: expected a share"),
        (["train", "zipf:9:90", "--model", "tf-tgn", "--fanouts", "3", "3"], "tf-tgn reads 1 hop"),
    ],
)
def test_numbers_out_of_range_name_their_option(args, told, capsys):
    assert main(args) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--share", "1.5"], "gnnflow: share: expected 0 or more and below 1, got 1.5\n"),
        (["--epochs", "0"], "gnnflow: epochs: expected 1 or more, got 0\n"),
    ],
)
def test_settings_out_of_range_are_wrong_usage(option, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "nowhere.csv", *option])
    assert (ended.value.code, capsys.readouterr().err) == (2, told)


SMALL = ["zipf:60:900", "--dim", "8", "--fanouts", "3", "3"]


def test_a_resumed_run_says_from_where(tmp_path, capsys):
    given = ["train", *SMALL, "--epochs", "1", "--checkpoint", str(tmp_path / "run1")]
    assert main(given) == 0
    assert "resumed from" not in capsys.readouterr().err
    assert main(given) == 0
    assert f"gnnflow: resumed from step 2 of {tmp_path}/run1\n" in capsys.readouterr().err


def test_a_checkpoint_of_another_width_is_one_sentence(tmp_path, capsys):
    given = ["train", *SMALL, "--epochs", "1", "--checkpoint", str(tmp_path / "run1")]
    assert main(given) == 0
    capsys.readouterr()
    assert main([*given, "--dim", "12"]) == 1
    told = capsys.readouterr().err
    assert re.fullmatch(
        rf"gnnflow: {tmp_path}/run1: expected model\.\S+ of shape \[.*12.*\] as in this run, got shape "
        r"\[.*8.*\]; resume with the model's settings that it was written with, or give another "
        r"folder\n",
        told,
    ), told


def test_a_full_disk_is_one_sentence(small_disk, capsys):
    folder = small_disk(16_384) / "run1"
    assert main(["train", *SMALL, "--epochs", "1", "--checkpoint", str(folder)]) == 1
    told = capsys.readouterr().err
    assert re.fullmatch(
        rf"gnnflow: {folder}/after-\d+\.safetensors: expected room on the disk for what is written "
        r"there, got [\d,]+ bytes free; free some, or write to another disk\n",
        told,
    ), told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence(monkeypatch, capsys):
    monkeypatch.delenv("MESHYARD_KERNELS", raising=False)
    assert main(["train", *SMALL, "--placement", "cuda"]) == 1
    assert capsys.readouterr().err == (
        "gnnflow: placement: expected a GPU for 'cuda', got 0 that torch can use; give cpu, or "
        "install a driver and a build of torch with CUDA\n"
    )


def test_a_table_without_rows_is_a_stream_without_events(tmp_path, capsys):
    (tmp_path / "none.csv").write_text("src,dst,t,x\n")
    assert len(gf.data.read_events(tmp_path / "none.csv")) == 0
    assert main(["continual", str(tmp_path / "none.csv"), "--out", str(tmp_path)]) == 1
    assert "none.csv: expected at least one event" in capsys.readouterr().err


@pytest.mark.parametrize("cache", [0.0, 0.5])
def test_a_recipe_has_the_rows_of_its_events(cache):
    features = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    events = gf.Events(range(50), range(50), range(50), features=features)
    parts = Recipe(dim=8, cache=cache).build(events)
    ids = gf.Events([4], [2], [1], eid=[31]).eid
    rows = parts.features.fetch("edge", ids) if cache else parts.features.gather("edge", ids)
    assert rows.tolist() == features[[31]].tolist()


def test_bench_divides_what_was_done_by_the_median_of_the_seconds(monkeypatch):
    events = gf.Events([0] * 3_000_000, [1] * 3_000_000, np.arange(3_000_000))
    graph = gf.TemporalGraph()
    graph.add_edges([0], [1], [2])
    spans = iter([99, 2, 1, 3, 2, 2])
    monkeypatch.setattr(profiler, "time_insertion", lambda *_: (next(spans), graph))
    seconds = iter([99, 4, 4, 4, 5, 4, 99, 8, 8, 8, 8, 2])
    monkeypatch.setattr(profiler, "time_sampling", lambda *_: (next(seconds), 20_000_000))
    found = profiler.measure(events, 1000, 10)
    insertion, recent, uniform, blocks = str(found).splitlines()
    assert insertion == "insertion by 1,000: 1.50 M events/s"
    assert recent.endswith("a root: 5.0 M neighbours/s")
    assert uniform.endswith("a root: 2.5 M neighbours/s")
    assert blocks.startswith("1 blocks, 25.0 % full")


@pytest.mark.parametrize("args", [["info", "zipf:5"], ["info", "no/such/file.csv"]])
def test_what_cannot_be_done_says_why(args, capsys):
    assert main(args) == 1
    assert capsys.readouterr().err.startswith("gnnflow: ")


@pytest.mark.parametrize("args", [[], ["grow"], ["partition", "zipf:5:5"], ["demo", "--fast"]])
def test_wrong_usage(args):
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2


def test_the_command_line_asks_for_the_unit_and_prints_dates(tmp_path, capsys):
    path = tmp_path / "clicks.csv"
    rows = [f"{n % 7},{7 + n % 5},{(BEGIN + 3600 * n) * 1000}" for n in range(120)]
    path.write_text("\n".join(["src,dst,t", *rows]))
    options = ["--dim", "8", "--fanouts", "2", "--model", "tf-tgn", "--out", str(tmp_path / "out")]
    run = ["continual", str(path), "--every", "1D", *options]
    assert main(run) == 1
    assert "give --time-unit ms" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*run, "--time-unit", "ms"]) == 0
    told = capsys.readouterr()
    assert "clicks.csv: 2013-01-01 00:00 to 2013-01-05 23:00 UTC" in told.err
    # Of five days the first and a half are learnt first; the rest lies in four days of increments.
    assert told.out.startswith("4 rounds")
    assert main(["info", str(path), "--time-unit", "ms"]) == 0
    assert "2013-01-01 00:00 to 2013-01-05 23:00 UTC" in capsys.readouterr().out


UNSEEN = "rows without a score, as the run has not seen their ids"


def write_new(path, rows):
    path.write_text("\n".join(["item,user,when", *(",".join(row) for row in rows)]))


@pytest.mark.parametrize(
    ("command", "more"),
    [("train", ["--epochs", "1"]), ("continual", ["--every", "80", "--cache", "0.5"])],
)
def test_predict_scores_rows_as_the_model_called_directly(command, more, tmp_path, capsys, visits):
    pandas = pytest.importorskip("pandas", reason="tables are read by pandas")
    run, new = tmp_path / "run", tmp_path / "new.csv"
    data, names = visits()
    sizes = ["--dim", "8", "--fanouts", "3", "2", "--batch-size", "50"]
    more = [*more, "--out", str(tmp_path / "out")] if command == "continual" else more
    assert main([command, str(data), *names, *sizes, *more, "--checkpoint", str(run)]) == 0
    assert f"gnnflow predict NEW --run {run}" in capsys.readouterr().err
    nodes = pandas.read_csv(run / "nodes.csv").set_index("id")["node"]
    if command == "continual":
        assert (tmp_path / "out" / "nodes.csv").read_text() == (run / "nodes.csv").read_text()
    # The order of rows is the user's; one is within the data's time, one of nobody known.
    rows = [
        ("apple1", "u1", "2024-05-09T00:00:00"),
        ("bread0", "u3", "2024-05-01T12:00:00.500"),
        ("bread0", "zoe", "2024-05-09T00:00:00"),
        ("apple2", "u8", "2024-05-02T00:00:00"),
    ]
    write_new(new, rows)
    out = tmp_path / "deep" / "scores.csv"
    assert main(["predict", str(new), "--run", str(run), "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert told.out == f"scores of 3 rows: {out}\n{UNSEEN}: 1\n"
    assert "resumed" not in told.err
    found = pandas.read_csv(out)
    assert [*found.columns] == ["user", "item", "when", "score"]
    assert found[["item", "user", "when"]].to_numpy().tolist() == [[*row] for row in rows]
    assert found["score"].isna().tolist() == [False, False, True, False]

    # Called directly: a graph of all events, the run's weights, and one link at a time.
    events = gf.data.read_events(data, src="user", dst="item", t="when")
    parts = Recipe(dim=8, fanouts=(3, 2)).build(events)
    parts.graph.add_edges(events.src, events.dst, events.t, events.eid)
    (file,) = run.glob("after-*.safetensors")
    weights = load_file(file)
    for module, start in ((parts.model, "model."), (parts.head, "head.")):
        own = {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}
        module.load_state_dict(own)
        module.eval()
    for row, score in zip(rows, found["score"], strict=True):
        if row[1] == "zoe":
            continue
        ends = torch.tensor([int(nodes[row[1]]), int(nodes[row[0]])])
        t = int(np.ceil(np.datetime64(row[2], "ms").astype(np.int64) / 1000))
        sample = parts.sampler.sample(ends, torch.tensor([t, t]))
        with torch.no_grad():
            src, dst = parts.model(sample, gf.attach(sample, parts.features))
            assert torch.sigmoid(parts.head(src[None], dst[None])).item() == pytest.approx(score)


def test_predict_wants_a_run_that_has_ended(tmp_path, capsys, visits):
    pytest.importorskip("pandas", reason="tables are read by pandas")
    run, new = tmp_path / "run", tmp_path / "new.csv"
    data, names = visits(120)
    sizes = ["--model", "tf-tgn", "--dim", "8", "--fanouts", "3", "--epochs", "1"]
    assert main(["train", str(data), *names, *sizes, "--checkpoint", str(run)]) == 0
    write_new(new, [("apple1", "u1", "2024-05-09")])
    state = json.loads((run / "state.json").read_text())
    (run / "state.json").write_text(json.dumps(state | {"done": 100}))
    capsys.readouterr()
    out = tmp_path / "scores.csv"
    assert main(["predict", str(new), "--run", str(run), "--out", str(out)]) == 1
    told = capsys.readouterr().err
    assert "expected a run that has ended, it has learnt from 100 of 120 events" in told
    assert not out.exists()


def test_partitions_of_texts_come_with_their_ids(tmp_path, capsys, visits):
    pytest.importorskip("pandas", reason="tables are read by pandas")
    data, names = visits()
    out = tmp_path / "deep" / "parts.npy"
    assert main(["partition", str(data), *names, "--parts", "2", "--out", str(out)]) == 0
    ids = (tmp_path / "deep" / "parts.nodes.csv").read_text().splitlines()
    assert len(ids) == len(np.load(out)) + 1
