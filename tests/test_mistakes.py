"""The same mistake has the same sentence in every package, and Ctrl-C ends every command in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

PROGRAMS = {
    "adaqp": "adaqp", "bytecheckpoint": "bytecheckpoint", "diffusionpipe": "diffusionpipe",
    "gnnflow": "gnnflow", "heta": "heta", "hybridflow": "hybridflow", "hydraulis": "hydraulis", "lancet": "lancet", "llmpq": "llmpq", "memo": "memo",
    "mspipe": "mspipe", "qsync": "qsync", "swift": "meshyard-swift",
}  # fmt: skip
# A file of the user's by the package that reads it: its name, what it should hold, the command.
FILES = [
    ("adaqp", "graph.npz", "a graph", ["partition", "FILE", "--out", "DIR/parts"]),
    (
        "diffusionpipe",
        "profile.json",
        "a profile",
        ["plan", "--profile", "FILE", "--cluster", "DIR/cluster.yaml", "--batch-size", "8"],
    ),
    (
        "diffusionpipe",
        "plan.json",
        "a plan",
        ["trace", "--plan", "FILE", "--cluster", "DIR/cluster.yaml"],
    ),
    ("gnnflow", "events.csv", "a table", ["info", "FILE"]),
    ("heta", "graph.yaml", "a graph's tables as YAML", ["plan", "FILE"]),
    ("heta", "recipe.yaml", "a recipe as YAML", ["train", "parts", "--recipe", "FILE"]),
    (
        "heta",
        "rates.json",
        "rates that `heta profile` measured",
        ["plan", "flights", "--rates", "FILE"],
    ),
    ("hybridflow", "recipe.yaml", "a recipe as YAML", ["train", "FILE"]),
    (
        "hydraulis",
        "lengths.txt",
        "lengths, a number on each line",
        ["plan", "FILE", "--ranks", "2", "--cap", "8"],
    ),
    (
        "hydraulis",
        "cost.json",
        "a cost",
        ["plan", "DIR/lengths.txt", "--ranks", "2", "--cap", "8", "--cost", "FILE"],
    ),
    ("lancet", "plan.json", "a plan", ["explain", "FILE"]),
    (
        "llmpq",
        "prompts.jsonl",
        "prompts as JSON Lines",
        ["sensitivity", "DIR/model", "--prompts", "FILE"],
    ),
    (
        "llmpq",
        "cluster.yaml",
        "a cluster as YAML",
        ["plan", "DIR/model", "--cluster", "FILE", "--prompts", "DIR/prompts.jsonl"],
    ),
    ("llmpq", "plan.json", "a plan", ["simulate", "FILE"]),
    ("memo", "trace.csv", "intervals", ["pack", "FILE"]),
    ("memo", "snapshot.pickle", "a CUDA memory snapshot", ["replay", "FILE"]),
    ("mspipe", "events.csv", "a table", ["train", "FILE"]),
    ("qsync", "rank0.json", "a trace of torch.profiler", ["diagnose", "FILE", "FILE"]),
    (
        "swift",
        "profile.json",
        "a profile of swift.profiler.measure",
        ["plan-logs", "FILE", "--budget", "2GB"],
    ),
]
# What may be named in place of a file.
OTHERS = {
    ("adaqp", "a graph"): "a file or folder",
    ("gnnflow", "a table"): "a file or folder",
    ("mspipe", "a table"): "a file or folder",
    ("hybridflow", "a recipe as YAML"): "a recipe as YAML, or one of RECIPES",
}
TEXTS = [one for one in FILES if one[1].endswith((".yaml", ".json", ".jsonl", ".txt"))]


@pytest.fixture
def tell(tmp_path, monkeypatch, capsys):
    """Runs a package's command, which fails, and returns what it says without the name."""
    config = {"model_type": "llama", "vocab_size": 8, "num_hidden_layers": 2}
    config |= {"hidden_size": 8, "intermediate_size": 8}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(config | {"num_attention_heads": 2, "num_key_value_heads": 2})
    )
    (tmp_path / "lengths.txt").write_text("5\n")
    (tmp_path / "prompts.jsonl").write_text('"one"\n')
    monkeypatch.chdir(tmp_path)

    def run(package, words, file="", status=1):
        argv = [word.replace("FILE", str(file)).replace("DIR/", "") for word in words]
        assert import_module(f"{package}.cli").main(argv) == status
        told = capsys.readouterr().err
        assert told.startswith(f"{PROGRAMS[package]}: ")
        return told.partition(": ")[2]

    return run


@pytest.mark.parametrize(("package", "name", "what", "words"), FILES)
def test_an_empty_file_is_said_to_be_empty(package, name, what, words, tell):
    Path(name).write_text("")
    told = f"{name}: expected {what}, the file is empty; check what wrote it\n"
    assert tell(package, words, name) == told


@pytest.mark.parametrize(("package", "name", "what", "words"), FILES)
def test_a_missing_file_is_said_to_be_missing(package, name, what, words, tell):
    from hybridflow.training.config import built_in

    what = OTHERS.get((package, what), what).replace("RECIPES", ", ".join(built_in()))
    told = f"no/{name}: expected {what}, there is nothing; check the path\n"
    assert tell(package, words, f"no/{name}") == told


# Refuses the words of the command, and says whether torch was imported on the way.
REFUSED = """
import sys
from importlib import import_module

package, *words = sys.argv[1:]
try:
    status = import_module(f"{package}.cli").main(words)
except SystemExit as ending:
    status = ending.code
assert status in (1, 2), status
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("package", "words"),
    [(package, words) for package, _, _, words in FILES if "DIR/model" not in words]
    + [("swift", ["run", "FILE"])],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[:1]),
)
def test_a_missing_file_is_refused_before_torch_is_imported(package, words, tmp_path):
    (tmp_path / "lengths.txt").write_text("5\n")
    argv = [word.replace("FILE", "no/file.py").replace("DIR/", "") for word in words]
    subprocess.run(
        [sys.executable, "-c", REFUSED, package, *argv], check=True, cwd=tmp_path, timeout=60
    )


@pytest.mark.parametrize(("package", "name", "what", "words"), TEXTS)
def test_bytes_in_place_of_a_text_are_told(package, name, what, words, tell):
    Path(name).write_bytes(b"abc\xff")
    told = (
        f"{name}: expected {what}, got bytes that are no UTF-8 text, first at byte 3; name another "
        "file, or save it as UTF-8\n"
    )
    assert tell(package, words, name) == told


MODELS = {
    "hybridflow": ["train", "grpo-sort", "--set", "model=FILE"],
    "hydraulis": ["compare", "--model", "FILE"],
    "llmpq": ["sensitivity", "FILE", "--prompts", "DIR/prompts.jsonl"],
    "memo": ["fit", "--model", "FILE"],
}


@pytest.mark.parametrize("package", MODELS)
def test_a_models_folder_that_is_none_is_told(package, tell):
    Path("prompts.jsonl").write_text('"one"\n')
    Path("bare").mkdir()
    for model, what in (("none", "there is nothing"), ("bare", "got a folder without it")):
        told = tell(package, MODELS[package], model)
        assert told.startswith(f"{model}: expected a model's folder with config.json, ")
        assert told.endswith(
            f"{what}; give a folder that save_pretrained or an export wrote, as nothing is downloaded\n"
        )


@pytest.mark.parametrize("package", PROGRAMS)
def test_a_demo_is_not_written_over_a_file(package, tell):
    Path("mine").write_text("mine")
    told = "mine: expected a folder, got a file; name another\n"
    assert tell(package, ["demo", "--out", "FILE"], "mine") == told
    assert Path("mine").read_text() == "mine"


def is_at_work(pid):
    """Whether a process has imported torch or started others, as commands do when executed."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return bool(children) or "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def interrupt(words, is_begun, folder):
    """What a command says when Ctrl-C comes once it has begun, and its exit status."""
    command = [sys.executable, "-m", *words]
    # As in a terminal, all processes of its group get the signal.
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 120
        while not is_begun(process.pid):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    return errors, process.returncode


TRAINING = {
    "adaqp": ["train", "parts", "--epochs", "9999999", "--save-every", "1", "--model.hidden", "8"],
    "gnnflow": [
        "train",
        "zipf:1000:400000",
        "--dim",
        "8",
        "--share",
        "0.001",
        "--fanouts",
        "9",
        "9",
    ],
    "heta": ["train", "parts", "--epochs", "9999999"],
    "hybridflow": ["train", "grpo-sort", "--set", "steps=9999999", "batch_size=16", "--every", "1"],
    "mspipe": ["train", "zipf:1000:40000", "--dim", "8", "--epochs", "9999"],
}


# What trains on parts makes them first, of this.
PARTED = {
    "adaqp": ["sbm", "--num-nodes", "4000"],
    "heta": ["flights:late15:8", "--hidden", "8", "--strategy", "raf"],
}


@pytest.mark.slow
@pytest.mark.parametrize("package", TRAINING)
def test_an_interrupted_training_says_how_to_resume(package, tmp_path):
    if package in PARTED:
        made = [package, "partition", *PARTED[package], "--out", "parts"]
        subprocess.run(
            [sys.executable, "-m", *made], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL
        )
    saved = tmp_path / "run1"
    words = [package, *TRAINING[package], "--checkpoint", "run1"]

    def is_saved(_):
        # A file that is being written is no checkpoint yet: an interrupt removes it.
        return saved.is_dir() and any(path.suffix != ".partial" for path in saved.iterdir())

    errors, status = interrupt(words, is_saved, tmp_path)
    told = f"{package}: interrupted; resume from run1 by the same command\n"
    assert errors.endswith(told)
    assert errors.count("interrupted") == 1
    assert "Traceback" not in errors
    assert status == 130


@pytest.mark.slow
@pytest.mark.parametrize("package", PROGRAMS)
def test_an_interrupted_demo_ends_in_one_line(package, tmp_path):
    errors, status = interrupt([package, "demo", "--out", "out"], is_at_work, tmp_path)
    told = f"{PROGRAMS[package]}: interrupted; start again by the same command\n"
    assert errors.splitlines(keepends=True)[-1:] == [told], errors
    assert errors.count("interrupted") == 1
    assert "Traceback" not in errors
    assert status == 130


# Ctrl-C at the n-th module that is looked for once the program has begun.
AT_IMPORT = """
import os, signal, sys

class Interrupt:
    left = int(sys.argv.pop(1))

    def find_spec(self, name, path=None, target=None):
        Interrupt.left -= 1
        if not Interrupt.left:
            os.kill(os.getpid(), signal.SIGINT)

from {package}.__main__ import main
sys.meta_path.insert(0, Interrupt())
sys.argv[0] = "/usr/bin/{prog}"
sys.exit(main())
"""


def interrupt_an_import(package, number, folder, **env):
    program = AT_IMPORT.format(package=package, prog=PROGRAMS[package])
    return subprocess.run(
        [sys.executable, "-c", program, str(number), "demo", "--out", "out"],
        capture_output=True, text=True, check=False, cwd=folder, env=os.environ | env,
    )  # fmt: skip


@pytest.mark.parametrize("package", PROGRAMS)
@pytest.mark.parametrize(
    "number", [1, *(pytest.param(number, marks=pytest.mark.slow) for number in (9, 40, 120, 200))]
)
def test_a_command_interrupted_in_its_first_imports_ends_in_one_line(package, number, tmp_path):
    done = interrupt_an_import(package, number, tmp_path)
    told = f"{PROGRAMS[package]}: interrupted; start again by the same command\n"
    lines = done.stderr.splitlines(keepends=True)
    assert done.stderr.count("interrupted") == 1
    assert done.returncode == 130
    if number < 200:
        assert lines == [told]
        assert not (tmp_path / "out").exists()
    else:  # within torch's import, which is ended first: the demo has begun by then
        assert lines[-1] == told
        assert not (tmp_path / "out" / "demo.json").exists()


def test_of_torchruns_ranks_that_are_interrupted_early_one_tells_it(tmp_path):
    assert interrupt_an_import("adaqp", 40, tmp_path, RANK="0").stderr
    done = interrupt_an_import("adaqp", 40, tmp_path, RANK="1")
    assert (done.stderr, done.returncode) == ("", 130)
