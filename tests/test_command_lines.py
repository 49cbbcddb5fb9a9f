"""What every package's command line has: versions, log lines, JSON, completion, examples, defaults.

The commands of a package are read where it hands them to `shared.cli`, so that a new subcommand is
looked at too.
"""

import re
import shlex
import subprocess
import sys
import time
from dataclasses import fields
from importlib import import_module
from inspect import getdoc
from pathlib import Path

import pytest
import torch

import shared
from shared.cli import read_examples
from shared.training import progress

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# They print what a script of the user's prints, and serve until they are interrupted.
WITHOUT_RESULT = {("swift", "run"), ("mspipe", "serve-memory")}


def read_commands(package):
    """The program's name and its commands by name, as the package's `main` gives them."""
    cli = import_module(f"{package}.cli")
    given = {}

    def take(commands, *, prog, about, argv):
        given.update(prog=prog, commands=dict(commands))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "run_command", take)
        cli.main([])
    return given["prog"], given["commands"]


COMMANDS = [
    pytest.param(package, name, command, id=f"{package}-{name}")
    for package in PACKAGES
    for name, command in read_commands(package)[1].items()
]
every_package = pytest.mark.parametrize("package", PACKAGES)
every_command = pytest.mark.parametrize(("package", "name", "command"), COMMANDS)


def run(package, *words):
    main = import_module(f"{package}.cli").main
    try:
        return main(list(words))
    except SystemExit as ended:
        return ended.code or 0


def help_of(package, *words):
    """What `--help` prints on a wide terminal, in a process of its own as it starts for a user."""
    done = subprocess.run(
        [sys.executable, "-m", package, *words, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@every_package
def test_versions_are_told_without_importing_torch(package, tmp_path):
    program = (
        f"import sys; from {package}.cli import main\n"
        "status = main(['--version']); assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    number = import_module(package).__version__
    python = ".".join(map(str, sys.version_info[:3]))
    assert done.stdout.splitlines() == [
        f"{package} {number}",
        f"shared {shared.__version__}",
        f"torch {torch.__version__}",
        f"python {python}",
    ]
    assert done.stderr == ""


@every_package
def test_the_help_of_a_package_shows_a_line_of_every_command(package, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # no line is wrapped
    prog, commands = read_commands(package)
    assert run(package, "--help") == 0
    text = capsys.readouterr().out
    for option in ("--version", "-v, --verbose", "-q, --quiet"):
        assert option in text
    listed = text.partition("\nExamples:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.strip() for line in listed] == [read_examples(c)[0] for c in commands.values()]
    assert all(len(getdoc(command).partition("\n\n")[0]) < 160 for command in commands.values()), (
        "the first paragraph stands in the list of subcommands; keep it to a sentence"
    )
    assert prog in text


@every_command
def test_the_help_of_a_command_has_two_examples_that_parse(
    package, name, command, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("COLUMNS", "300")  # no line is wrapped
    # The script of the user's that examples name.
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert run(package, name, "--help") == 0
    text = capsys.readouterr().out
    examples = read_examples(command)
    assert len(examples) == len(set(examples)) == 2
    prog, commands = read_commands(package)
    came = []
    for kind in commands.values():
        monkeypatch.setattr(kind, "execute", lambda self: came.append(type(self)))
    for line in examples:
        assert f"    {line}\n" in text
        words = shlex.split(line)
        if words[0] == "torchrun":
            words = [prog, *words[words.index("-m") + 2 :]]
        assert words[:2] == [prog, name]
        assert run(package, *words[1:]) == 0, capsys.readouterr().err
    assert came == [command, command]


@every_command
def test_a_command_prints_json_if_asked(package, name, command):
    assert ("json" in {field.name for field in fields(command)}) != (
        (package, name) in WITHOUT_RESULT
    )


@every_command
def test_what_a_command_writes_by_default_lies_in_the_reports_folder(package, name, command):
    home = Path("report") / package
    for field in fields(command):
        if isinstance(field.default, Path):
            assert field.default.is_relative_to(home), f"{name} --{field.name}"


@every_package
def test_what_an_example_writes_by_default_lies_there_too(package):
    option = re.compile(
        r"add_argument\(\"--(?:out|folder|checkpoint)\".*default=(?:Path\()?\"([^\"]*)\""
    )
    scripts = sorted((ROOT / "packages" / package / "examples").glob("*.py"))
    defaults = [one for path in scripts for one in option.findall(path.read_text(encoding="utf-8"))]
    assert [one for one in defaults if not one.startswith(f"report/{package}/")] == []


@every_package
def test_shells_complete_a_command_line_and_the_guide_says_how(package, capsys):
    prog, commands = read_commands(package)
    assert run(package, "--tyro-print-completion", "bash") == 0
    script = capsys.readouterr().out
    assert all(re.search(rf"\b{re.escape(name)}\b", script) for name in commands)
    guide = (ROOT / "packages" / package / "docs" / "guide.md").read_text(encoding="utf-8")
    assert f"{prog} --tyro-print-completion bash" in guide


@every_package
def test_a_command_line_starts_in_half_a_second(package):
    taken = []
    for _ in range(3):  # the machine may do something else meanwhile
        begun = time.perf_counter()
        help_of(package, "demo")
        taken.append(time.perf_counter() - begun)
    assert min(taken) < 0.5


def test_progress_is_shown_by_one_piece_of_code():
    """Whatever shows it otherwise would be silent in a pipe, and shown in spite of -q."""
    word = re.compile(r"rich\.progress|rich import progress|\.status\(|tqdm\(")
    found = [
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.glob("packages/*/src/**/*.py"))
        if word.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


# Commands that a test can run at once; an argument of "{}" is a folder of its own.
LONG = {
    "gnnflow": ["train", "zipf:60:600", "--dim", "16", "--epochs", "1", "--fanouts", "4", "4"],
    "hybridflow": ["train", "grpo-sort", "--set", "steps=3"],
    "hydraulis": ["compare", "--gpus", "16", "--steps", "1", "--strategies", "packed, best fit"],
    "memo": ["fit", "--model", "llama-1b", "--tokens", "8192"],
    "mspipe": ["train", "zipf:60:600", "--dim", "16", "--epochs", "1", "--num-negatives", "5"],
}
TOLD = {
    "gnnflow": r"round 1, [\d,]+ events/s, ap [\d.]+, events: \d+ of 600 \(\d+%\), [\d.]+ m?s",
    "hybridflow": r"grpo, reward [\d.]+: \d of 3 \(\d+%\), [\d.]+ m?s",
    "hydraulis": r"simulating.*, [\d.]+ m?s",
    "memo": r"reading the model, [\d.]+ m?s",
    "mspipe": r"epoch 1, loss [\d.]+, events: \d+ of 420 \(\d+%\), [\d.]+ m?s",
}


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "package",
    [
        pytest.param(one, marks=() if one in ("hybridflow", "mspipe") else pytest.mark.slow)
        for one in LONG
    ],
)
def test_in_a_pipe_progress_is_lines_unless_it_is_hidden(package, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.003)
    assert run(package, *LONG[package]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(re.fullmatch(TOLD[package], line) for line in lines), lines[-5:]
    assert run(package, *LONG[package], "-q") == 0
    lines = capsys.readouterr().err.splitlines()
    assert not any(re.fullmatch(TOLD[package], line) for line in lines)
