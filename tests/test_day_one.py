"""The first day's steps are all that pages, help texts and examples tell, and a difference is told."""

import json
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import numpy as np

import day_one
from adaqp.graphs.formats import read
from adaqp.training.predictions import read_wanted
from first_day.inputs import write_inputs
from first_day.steps import Step, read_steps
from hydraulis.data import read_lengths
from shared.data.formats import read_events

PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


@pytest.mark.parametrize("package", PACKAGES)
def test_steps_are_all_that_a_package_tells_its_users(package):
    home = ROOT / "packages" / package
    steps = read_steps(home)
    prog = "meshyard-swift" if package == "swift" else package
    assert steps[0].kind == "install"
    assert f"./packages/{package}" in steps[0].line
    assert f"{prog} demo" in [step.line for step in steps]
    assert len({step.key for step in steps}) == len(steps)
    lines = [step.line for step in steps]
    for script in home.glob("examples/*.py"):
        assert any(str(script) in line for line in lines), script
    scripts = [step for step in steps if step.python]
    assert [step.line for step in scripts] == ["python readme.py", "python guide.py"]
    for step in scripts:
        compile(step.python, step.line, "exec")
    mistakes = [step for step in steps if step.kind == "mistake"]
    assert len(mistakes) >= 8
    assert all(step.status and step.expects for step in mistakes)
    assert len([step for step in steps if step.kind == "help"]) >= 4


PAGES = {
    "pyproject.toml": """
[project]
name = "meshyard-swift"
scripts = {tiny = "tiny.cli:main"}
optional-dependencies = {more = ["pandas>=2", "dgl==1.1; python_version < '3.12'"], test = ["pytest"]}
""",
    "README.md": """
```
pip install ./packages/tiny
tiny demo
tiny show mine      # the first
```
```python
a = 1
```
""",
    "docs/guide.md": """# tiny: guide

## Install

`more` brings more.

## Use

`test` is no extra here.

```
pip install './packages/tiny[more]'
tiny show mine
torchrun ... train.py
tiny run MODEL
tiny kill 1      # in another terminal
```
```yaml
tiny: 1
```
```python
b = 2
```
<!--- skip: next -->
```python
c = 3
```
```python
d = 4
```
""",
    "src/tiny/cli.py": '''
class Show:
    """Shows.

    Examples:
        tiny show mine
        tiny show --full
    """
''',
    "examples/train.py": '"""Trains.\n\ntorchrun train.py [TEXT_FILE]   # on ranks\n"""\n',
    "examples/alone.py": '"""Does without words about how."""\n',
}


@pytest.fixture
def tiny(tmp_path):
    home = tmp_path / "swift"  # mistakes are listed by name
    for name, text in PAGES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return home


def test_a_line_is_run_once_and_what_is_the_users_own_is_not(tiny):
    steps = [step for step in read_steps(tiny) if step.kind != "mistake"]
    told = {step.key: step.why_not for step in steps}
    assert told == {
        "install: pip install ./packages/tiny": "",
        "readme: tiny demo": "",
        "readme: tiny show mine": "",
        "readme: python readme.py": "",
        "guide: torchrun ... train.py": "names hosts, folders or files of the user's",
        "guide: tiny run MODEL": "names something of the user's",
        "guide: tiny kill 1": "needs a run in another terminal",
        "guide: python guide.py": "",
        "help: tiny show --full": "the long form",
        f"example: python {tiny}/examples/alone.py": "",
        f"example: torchrun {tiny}/examples/train.py": "",
    }
    (guide,) = [step for step in steps if step.line == "python guide.py"]
    assert guide.python == "b = 2\n\nd = 4\n"
    for step in steps:
        extras = {"meshyard-swift[more]", "pandas", "dgl"}
        assert step.may_lack == (set() if step.kind in ("install", "readme") else extras), step.key


MAY_LACK = {"may_lack": frozenset({"pandas", "mine[more]"})}


def ended(kind, line, tmp_path, **more):
    step = Step(kind=kind, line=line, **more)
    return day_one.run_step(
        step, tmp_path, {"PATH": "/usr/bin:/bin"}, limit_s=more.pop("limit_s", 20)
    )


def test_a_line_that_ends_well_has_no_fault(tmp_path):
    found = ended("readme", "echo; echo one; echo two", tmp_path)
    assert (found.status, found.line, found.fault) == (0, "one", "")
    assert 0 < found.seconds < 20


@pytest.mark.parametrize(
    ("kind", "line", "expected", "fault"),
    [
        ("readme", "echo no >&2; exit 3", {}, "expected status 0, got 3: no"),
        ("guide", "echo 'expected it; pip install pandas'; exit 1", MAY_LACK, ""),
        ("guide", "echo 'needs it; do `pip install '\\''pandas>=2'\\''`'; exit 1", MAY_LACK, ""),
        (
            "guide",
            "echo 'pip install '\\''mine[more]'\\'', or pip install pandas'; exit 1",
            MAY_LACK,
            "",
        ),
        (
            "guide",
            "echo 'expected it; pip install scipy'; exit 1",
            MAY_LACK,
            "expected status 0, got 1: expected it; pip install scipy",
        ),
        ("guide", "echo 'pip install pandas'; exit 2", MAY_LACK, "expected status 0, got 2"),
        ("readme", "echo 'pip install pandas'; exit 1", {}, "expected status 0, got 1"),
        (
            "install",
            "echo Successfully installed nvidia-cublas torch",
            {},
            "expected torch's CPU build, got CUDA's packages",
        ),
        ("install", "echo Successfully installed torch", {}, ""),
        (
            "guide",
            "echo Traceback; echo 'pip install pandas'; exit 1",
            MAY_LACK,
            "expected status 0, got 1",
        ),
        ("mistake", "echo rows: no; exit 1", {"status": 1, "expects": "rows"}, ""),
        (
            "mistake",
            "echo no; exit 1",
            {"status": 1, "expects": "rows"},
            "expected 'rows' in it, got: no",
        ),
        (
            "mistake",
            "echo rows; exit 2",
            {"status": 1, "expects": "rows"},
            "expected status 1, got 2",
        ),
        ("mistake", "echo rows", {"status": 1, "expects": "rows"}, "expected status 1, got 0"),
        (
            "mistake",
            "echo Traceback rows; exit 1",
            {"status": 1, "expects": "rows"},
            "expected a sentence, got a traceback",
        ),
    ],
)
def test_a_difference_is_told(tmp_path, kind, line, expected, fault):
    found = ended(kind, line, tmp_path, **expected)
    assert found.fault.startswith(fault)
    assert bool(found.fault) == bool(fault)


def test_a_line_that_does_not_end_is_ended(tmp_path):
    step = Step(kind="readme", line="echo begun; sleep 60 & sleep 60")
    found = day_one.run_step(step, tmp_path, {"PATH": "/usr/bin:/bin"}, limit_s=0.3)
    assert found.status is None
    assert found.line == "begun"
    assert found.fault.startswith("expected an end within")
    assert found.seconds < 20


def test_a_server_is_interrupted_and_that_is_right(tmp_path, monkeypatch):
    monkeypatch.setattr(day_one, "SERVE_S", 0.5)
    line = "exec python3 -c 'import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: pass' serve-memory"
    found = ended("guide", line, tmp_path)
    assert (found.status, found.fault) == (0, "")


def test_what_a_step_leaves_running_is_ended_with_it(tmp_path):
    found = ended("readme", "sleep 60 & echo $! > pid", tmp_path)
    assert (found.status, found.fault) == (0, "")
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_that_does_not_end_when_interrupted_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(day_one, "SERVE_S", 0.3)
    step = Step(kind="guide", line="trap '' INT; echo serve-memory; sleep 60; sleep 60")
    found = day_one.run_step(step, tmp_path, {"PATH": "/usr/bin:/bin"}, limit_s=0.3)
    assert found.status is None
    assert found.fault.startswith("expected an end within")
    assert found.seconds < 20


def test_a_server_that_fails_at_once_is_a_fault(tmp_path):
    found = ended("guide", "echo serve-memory: no; exit 1", tmp_path)
    assert (found.status, found.fault) == (1, "expected status 0, got 1: serve-memory: no")


def test_what_is_not_run_says_why_and_is_no_fault(tmp_path):
    found = ended("guide", "exit 1", tmp_path, why_not="the long form")
    assert (found.status, found.line, found.fault) == (None, "not run: the long form", "")


def test_a_run_resumes_after_the_steps_that_are_done(tmp_path):
    console = Console(quiet=True)
    steps = [Step(kind="readme", line=f"echo {at} >> lines; exit {at}") for at in (0, 1)]
    env = {"PATH": "/usr/bin:/bin"}
    first = day_one.run_steps(steps[:1], tmp_path, env, console)
    both = day_one.run_steps(steps, tmp_path, env, console)
    assert day_one.run_steps(steps, tmp_path, env, console) == both
    assert both[0] == first[0]
    assert [one.status for one in both] == [0, 1]
    assert [bool(one.fault) for one in both] == [False, True]
    assert (tmp_path / "lines").read_text() == "0\n1\n"


def test_nothing_is_run_where_the_installation_failed(tmp_path):
    steps = [Step(kind="install", line="exit 1"), Step(kind="readme", line="touch here")]
    found = day_one.run_steps(steps, tmp_path, {"PATH": "/usr/bin:/bin"}, Console(quiet=True))
    assert len(found) == 1
    assert not (tmp_path / "here").exists()


@pytest.fixture
def one_package(tmp_path, monkeypatch):
    """Runs `main` for a package with given steps and no environment."""
    monkeypatch.setattr(day_one, "FOLDER", tmp_path)
    monkeypatch.setattr(day_one, "find_links", lambda: "links")
    monkeypatch.setattr(day_one, "read_commit", lambda: "abc")

    def prepare(package, folder, links):
        folder.mkdir(exist_ok=True)
        return {"PATH": "/usr/bin:/bin"}

    monkeypatch.setattr(day_one, "prepare", prepare)

    def run(steps, *words):
        monkeypatch.setattr(day_one, "read_steps", lambda home: steps)
        return day_one.main(["memo", *words])

    return run


def test_the_table_names_all_steps_and_the_status_tells_faults(one_package, capsys):
    good = Step(kind="readme", line="echo [fine]; exit 0")
    bad = Step(kind="guide", line="echo broken; exit 4")
    assert one_package([good]) == 0
    text = capsys.readouterr().out
    assert "readme: echo [fine]; exit 0" in text
    assert "memo: 1 steps, 0 not run, 0 differ from what is expected\n" in text
    left = Step(kind="help", line="long", why_not="the long form")
    assert one_package([good, bad, left]) == 1
    text = capsys.readouterr().out
    assert "DIFFERS, expected status 0, got 4: broken" in text
    assert "memo at abc" in text
    assert "memo: 3 steps, 1 not run, 1 differ from what is expected\n" in text


def test_only_what_differed_is_run_again_after_an_installation(
    one_package, tmp_path, monkeypatch, capsys
):
    steps = [
        Step(kind="install", line=f"echo install >> {tmp_path}/done"),
        Step(kind="readme", line="echo good >> ../done"),
        Step(kind="readme", line="echo bad >> ../done; test -e ../mended"),
    ]
    assert one_package(steps) == 1
    monkeypatch.setattr(day_one, "read_commit", lambda: "def")
    (tmp_path / "mended").touch()
    capsys.readouterr()
    assert one_package(steps, "--differing") == 0
    lines = (tmp_path / "done").read_text().split()
    assert lines == ["install", "good", "bad", "install", "bad"]
    told = "memo: 3 steps, 0 not run, 0 differ from what is expected; 1 ran at an earlier commit\n"
    assert told in capsys.readouterr().out


def test_another_commit_or_again_begins_anew(one_package, tmp_path, monkeypatch):
    steps = [Step(kind="readme", line="echo x >> ../count")]
    for _ in range(2):
        assert one_package(steps) == 0
    assert (tmp_path / "count").read_text() == "x\n"
    assert one_package(steps, "--again") == 0
    assert (tmp_path / "count").read_text() == "x\nx\n"
    monkeypatch.setattr(day_one, "read_commit", lambda: "def")
    assert one_package(steps) == 0
    assert (tmp_path / "count").read_text() == "x\nx\nx\n"


def test_without_find_links_nothing_is_fetched(one_package, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(day_one, "find_links", lambda: "")
    with pytest.raises(SystemExit) as ended:
        one_package([Step(kind="install", line="touch ../fetched")])
    assert ended.value.code == 2
    assert "set PIP_FIND_LINKS" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_inputs_are_what_packages_read(tmp_path):
    write_inputs(tmp_path)
    assert len(read_lengths(tmp_path / "lengths.txt")) == 200
    assert read(tmp_path / "graph.npz").num_nodes == 400
    for name in ("events.csv", "events.parquet"):
        assert len(read_events(tmp_path / name)) == 600
    visits = read_events(tmp_path / "visits.csv", src="user", dst="item", t="when")
    assert len(visits) == 600
    new = read_events(tmp_path / "new.csv", src="user", dst="item", t="when")
    assert set(new.nodes.ids) <= set(visits.nodes.ids)
    assert new.t.min() > visits.t.max()
    assert np.loadtxt(tmp_path / "table.csv", delimiter=",", skiprows=1).shape == (400, 3)
    assert read_wanted(tmp_path, 400, tmp_path / "wanted.csv").nodes.tolist() == list(range(20))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["vocab_size"] % 4 == 0
    write_inputs(tmp_path)  # again, as each run does
    assert (tmp_path / "empty.csv").read_text() == ""
