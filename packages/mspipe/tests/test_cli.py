import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mspipe as ms
from mspipe.cli import main
from mspipe.data.batching import uniform_bounds
from mspipe.memory.server import MemoryServer
from mspipe.models import JODIE
from mspipe.registry import CUTS, MODELS, MODES, Mode
from shared.errors import ConfigError

SMALL = ["zipf:60:900", "--dim", "8", "--batch-size", "100"]


def test_help_teaches_every_command_with_an_example(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for command in (
        "train",
        "predict",
        "plan",
        "simulate",
        "profile",
        "serve-memory",
        "trace",
        "demo",
    ):
        assert f"\n  mspipe {command}" in text
    assert "Exit status" in text


def test_help_does_not_import_torch():
    program = (
        "import sys; from mspipe.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print('heavy', sorted({'torch', 'numpy', 'matplotlib'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "heavy []" in done.stdout


def test_plan_and_simulate(tmp_path, capsys):
    assert main(["plan", "--stages", "2,3,2,8,2"]) == 0
    told = capsys.readouterr().out
    assert "ideal 8, least staleness for it 2" in told
    assert "k = 1: 12 (exact, prefetched)" in told
    path = tmp_path / "deep" / "trace.json"
    given = ["simulate", "--stages", "2,3,2,8,2", "--iterations", "50", "--trace", str(path)]
    assert main(given) == 0
    assert "period 8, training waits 0.0 %" in capsys.readouterr().out
    assert json.loads(path.read_text())["traceEvents"]
    assert main([*given[:5], "--mode", "sync"]) == 0
    assert "period 17" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["tgn", "jodie", "apan"])
def test_train_tells_epochs_and_the_test(model, tmp_path, capsys):
    given = ["train", *SMALL, "--model", model, "--epochs", "2", "--checkpoint", str(tmp_path)]
    assert main(given) == 0
    first = capsys.readouterr().out
    assert "epoch 2: loss" in first
    assert "test, inductive negatives (EdgeBank's in brackets): AP" in first
    assert main(given) == 0
    again = capsys.readouterr().out
    tests = [[line for line in told.splitlines() if "test," in line] for told in (first, again)]
    assert tests[0] == tests[1]
    assert len(tests[0]) == 3


def test_profile_and_trace(tmp_path, capsys):
    assert main(["profile", *SMALL, "--num-batches", "5"]) == 0
    assert "plan, in s:" in capsys.readouterr().out
    path = tmp_path / "deep" / "trace.json"
    given = ["trace", *SMALL, "--mode", "stale", "--num-batches", "5", "--out", str(path)]
    assert main(given) == 0
    assert "staleness" in capsys.readouterr().out
    assert json.loads(path.read_text())["traceEvents"]


def test_results_as_json(capsys):
    assert main(["plan", "--stages", "2,3,2,8,2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["k_min"], told["periods"]) == (2, {"1": 12, "2": 8})
    given = ["--stages", "2,3,2,8,2", "--iterations", "50", "--mode", "prefetch", "--json"]
    assert main(["simulate", *given]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["period"], told["staleness"]) == (12, {"1": 50})
    assert main(["profile", *SMALL, "--num-batches", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plan"]["stages"] == told["stage_s"]
    assert main(["train", *SMALL, "--model", "jodie", "--epochs", "1", "--json"]) == 0
    told, lines = capsys.readouterr()
    assert f"loss {json.loads(told)['epochs'][0]['loss']:.4f}" in lines
    assert set(json.loads(told)["test"]) == {"random", "historical", "inductive"}


class Loud(JODIE):
    """A model of somebody else's."""

    num_updates = 0

    def update(self, state):
        type(self).num_updates += 1
        return super().update(state)


@pytest.mark.parametrize("command", ["train", "profile", "trace"])
def test_a_model_from_outside_is_in_the_help_and_trains(command, tmp_path, capsys):
    MODELS.add("loud", Loud, "counts its batches")
    try:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert "{tgn,jodie,apan,loud}" in capsys.readouterr().out
        before = Loud.num_updates
        given = [command, *SMALL, "--model", "loud"]
        if command == "trace":
            given += ["--out", str(tmp_path / "trace.json")]
        given += ["--epochs", "1"] if command == "train" else ["--num-batches", "1"]
        assert main(given) == 0
        assert Loud.num_updates > before
    finally:
        MODELS.remove("loud")
    with pytest.raises(SystemExit) as stopped:
        main([command, "--model", "loud", *SMALL])
    assert stopped.value.code == 2
    assert "loud" in capsys.readouterr().err


def test_modes_and_cuts_from_outside_are_taken(capsys):
    MODES.add("eager", Mode(is_stale=True), "as stale")
    sizes = []

    def halves(events, size, seed):
        sizes.append(size)
        return uniform_bounds(events, size // 2)

    CUTS.add("halves", halves, "batches of half the size")
    try:
        with pytest.raises(SystemExit):
            main(["train", "--help"])
        text = capsys.readouterr().out
        assert "{sync,prefetch,forward,stale,eager}" in text
        assert "{uniform,random-start,adaptive,halves}" in text
        given = ["--model", "jodie", "--epochs", "1", "--mode", "eager", "--cut", "halves"]
        assert main(["train", *SMALL, *given, "--max-staleness", "2"]) == 0
        told = capsys.readouterr().out
        # 70 % of 900 events in batches of 50.
        assert "eager: 13 iterations" in told
        assert "staleness {" in told
        assert sizes == [100]
        found = ["simulate", "--stages", "2,3,2,8,2", "--iterations", "50", "--mode"]
        assert main([*found, "eager"]) == main([*found, "stale"]) == 0
        told = capsys.readouterr().out
        assert told[: len(told) // 2] == told[len(told) // 2 :]
    finally:
        MODES.remove("eager")
        CUTS.remove("halves")


def test_a_mode_that_forwards_and_is_stale_is_refused():
    with pytest.raises(ConfigError, match="at most one of is_forwarding and is_stale"):
        Mode(is_forwarding=True, is_stale=True)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ["plan", "--stages", "2,3,2"],
            "features, memory, train, write), got 3; give all five, 0 for a stage that takes no time",
        ),
        (["simulate", "--stages", "2,3,2"], "stages: expected five numbers"),
        (
            ["plan", "--stages", "2,x"],
            "five numbers, got '2,x'; give them with commas, as in 2,3,2,8,2",
        ),
        (["simulate", "--stages", "1,1,1,1,1", "--jitter", "2"], "jitter: expected a share"),
        (["train", "zipf:5"], "expected zipf:NODES:EVENTS"),
        (["train", "zipf:5:50", "--limit", "0"], "limit: expected 1"),
        (["train", "no/such/file.csv"], "no/such/file.csv"),
        (["train", *SMALL, "--place", "moon"], "place: expected 'cpu'"),
        (["train", *SMALL, "--max-staleness", "0", "--mode", "stale"], "at least 1"),
        (["serve-memory", "--bind", "nowhere"], "bind: expected host:port"),
    ],
)
def test_what_cannot_be_done_says_why(args, told, capsys):
    assert main(args) == 1
    assert told in capsys.readouterr().err


def test_no_epoch_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "nowhere.csv", "--epochs", "0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "mspipe: epochs: expected 1 or more, got 0\n"


def test_a_resumed_run_says_from_where(tmp_path, capsys):
    given = ["train", *SMALL, "--checkpoint", str(tmp_path / "run1"), "--epochs"]
    assert main([*given, "1"]) == 0
    assert "resumed from" not in capsys.readouterr().err
    assert main([*given, "2"]) == 0
    # 70 % of 900 events in batches of 100.
    assert capsys.readouterr().err == (
        f"mspipe: resumed from step 7 of {tmp_path}/run1\n"
        f"to score new rows: mspipe predict NEW --run {tmp_path}/run1\n"
    )


def test_a_checkpoint_of_another_width_is_one_sentence(tmp_path, capsys):
    given = ["train", *SMALL, "--checkpoint", str(tmp_path / "run1"), "--epochs", "1"]
    assert main(given) == 0
    capsys.readouterr()
    assert main([*given, "--dim", "12"]) == 1
    told = capsys.readouterr().err
    assert re.fullmatch(
        rf"mspipe: {tmp_path}/run1: expected model\.\S+ of shape \[.*12.*\] as in this run, got shape "
        r"\[.*8.*\]; resume with the model's settings that it was written with, or give another "
        r"folder\n",
        told,
    ), told


def test_a_full_disk_is_one_sentence(small_disk, capsys):
    folder = small_disk(16_384) / "run1"
    assert main(["train", *SMALL, "--epochs", "1", "--checkpoint", str(folder)]) == 1
    told = capsys.readouterr().err
    assert re.fullmatch(
        rf"mspipe: {folder}/training\.pt: expected room on the disk for what is written there, got "
        r"[\d,]+ bytes free; free some, or write to another disk\n",
        told,
    ), told


def test_a_learning_rate_that_diverges_is_told_with_the_batch(capsys):
    name = f"diverges-{os.getpid()}"
    assert main(["train", *SMALL, "--rate", "1e30", "--place", f"shm:{name}"]) == 1
    assert not Path(f"/dev/shm/mspipe-{name}").exists(), "it would take the machine's memory"
    told = capsys.readouterr().err
    assert re.fullmatch(
        r"mspipe: epoch 1, batch \d: expected a finite loss, got (nan|inf); lower the learning "
        r"rate, .*\n",
        told,
    ), told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("option", ["device", "place"])
def test_a_gpu_that_is_not_there_is_one_sentence(option, capsys):
    assert main(["train", *SMALL, f"--{option}", "cuda"]) == 1
    assert capsys.readouterr().err == (
        f"mspipe: {option}: expected a GPU for 'cuda', got 0 that torch can use; give cpu, or "
        "install a driver and a build of torch with CUDA\n"
    )


def test_clients_are_accepted_in_one_thread(capsys, monkeypatch):
    def refused(server):
        raise AssertionError("a second thread would accept beside the command's own")

    def stopped(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryServer, "start", refused)
    monkeypatch.setattr(MemoryServer, "serve_forever", stopped)
    assert main(["serve-memory", "--bind", "127.0.0.1:0"]) == 130
    told = capsys.readouterr()
    assert "serving at tcp://127.0.0.1:" in told.out
    assert told.err == (
        "mspipe: interrupted; its tables are gone: start again by the same command, and resume the "
        "training\n"
    )


@pytest.mark.slow
def test_torchrun_trains_as_one_process(capsys):
    given = ["train", *SMALL, "--model", "jodie", "--epochs", "2"]
    assert main(given) == 0
    alone = capsys.readouterr().out
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "mspipe",
    ]
    done = subprocess.run(
        [*command, *given], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for begin in ("epoch", "test,"):
        one, two = (
            [line.split(", AP")[0] for line in told.splitlines() if line.startswith(begin)]
            for told in (alone, done.stdout)
        )
        assert one == two, "one worker tells, and of the same losses"


UNSEEN = "rows without a score, as the run has not seen their ids"


def write_new(path, rows):
    path.write_text("\n".join(["item,user,when", *(",".join(row) for row in rows)]))


@pytest.mark.parametrize("model", ["tgn", "apan"])
def test_predict_scores_rows_as_the_model_called_directly(model, tmp_path, capsys, visits):
    pandas = pytest.importorskip("pandas", reason="tables are read by pandas")
    run, new = tmp_path / "run", tmp_path / "new.csv"
    data, names = visits()
    sizes = ["--dim", "8", "--fanout", "3", "--batch-size", "40", "--epochs", "1", "--model", model]
    assert main(["train", str(data), *names, *sizes, "--checkpoint", str(run)]) == 0
    assert f"mspipe predict NEW --run {run}" in capsys.readouterr().err
    rows = [
        ("apple1", "u1", "2024-05-09T00:00:00"),
        ("bread0", "zoe", "2024-05-09T00:00:00"),
        ("apple2", "u8", "2024-05-04T00:00:00"),
    ]
    write_new(new, rows)
    out = tmp_path / "scores.csv"
    assert main(["predict", str(new), "--run", str(run), "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert told.out == f"scores of 2 rows: {out}\n{UNSEEN}: 1\n"
    assert "resumed" not in told.err
    found = pandas.read_csv(out)
    assert found[["item", "user", "when"]].to_numpy().tolist() == [[*row] for row in rows]

    # Called directly: the run's weights and memory, the events after those it learnt from, and then
    # the rows as one more batch.
    events = ms.data.read_events(data, src="user", dst="item", t="when")
    kind = MODELS.get(model)(8, events.edge_dim, fanout=3)
    saved = torch.load(run / "training.pt", weights_only=True)
    kind.load_state_dict(saved["model"])
    memory = ms.NodeMemory(
        events.num_nodes, kind.dim, kind.mail_dim, kind.slots, start=events.t[0].item()
    )
    pipe = ms.Pipeline(kind, memory, ms.Sampler(events, [3]), events.features)
    memory.restore(saved["memory"])
    for part in events.split(0.7, 0.15)[1:]:
        for _ in pipe.score(ms.batches(part, 40, num_negatives=0)):
            pass
    nodes = pandas.read_csv(run / "nodes.csv").set_index("id")["node"]
    asked = [row for row in rows if row[1] != "zoe"]
    times = [np.datetime64(row[2], "s").astype(np.int64) for row in asked]
    batch = ms.Events(
        [nodes[row[1]] for row in asked], [nodes[row[0]] for row in asked], times, sort=True,
        features=np.zeros((2, events.edge_dim)),
    )  # fmt: skip
    (output,) = pipe.score(ms.batches(batch, 40, num_negatives=0))
    by_time = [found["score"][2], found["score"][0]]
    assert output.pos.sigmoid().tolist() == pytest.approx(by_time, rel=1e-5)
    assert found["score"].isna().tolist() == [False, True, False]


def test_predict_wants_a_run_that_has_ended_and_rows_after_it(tmp_path, capsys, visits):
    pytest.importorskip("pandas", reason="tables are read by pandas")
    run, new = tmp_path / "run", tmp_path / "new.csv"
    data, names = visits(120)
    sizes = ["--model", "jodie", "--dim", "8", "--epochs", "1"]
    assert main(["train", str(data), *names, *sizes, "--checkpoint", str(run)]) == 0
    write_new(new, [("apple1", "u1", "2024-05-01T09:30:00")])

    def told():
        capsys.readouterr()
        out = tmp_path / "scores.csv"
        assert main(["predict", str(new), "--run", str(run), "--out", str(out)]) == 1
        assert not out.exists()
        return capsys.readouterr().err

    assert "new.csv: expected times from 1714625400 on, when the run's data ends" in told()
    write_new(new, [("apple1", "u1", "2024-05-09")])
    about = json.loads((run / "run.json").read_text())
    about["options"]["epochs"] = 2
    (run / "run.json").write_text(json.dumps(about))
    assert "expected a run that has ended, it has done 1 of 2 passes; resume it" in told()
