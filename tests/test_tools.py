"""The tools' real entries, on copies of the tree."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(
    *(".git", "__pycache__", ".*_cache", ".hypothesis", ".results", ".peers", "report", "dist"),
    *(".venv*", "site"),
)
sys.path.insert(0, str(ROOT / "bench"))

from peer import Peer, missing_peer


@pytest.fixture
def tree(tmp_path):
    """A copy of the checkout, without what git ignores."""
    return Path(shutil.copytree(ROOT, tmp_path / "yard", ignore=LEFT_OUT))


def tool(name, *arguments, root):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / f"{name}.py", *arguments, "--root", root],
        check=False,
        capture_output=True,
        text=True,
    )


def run(tree, *command):
    """Runs a command of this environment on the copy, with the copy's sources before ours."""
    sources = [tree / "shared/src", *sorted(tree.glob("packages/*/src"))]
    done = subprocess.run(
        [Path(sys.executable).with_name(command[0]), *command[1:]],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("name", [pytest.param("zeta", marks=pytest.mark.slow), "ab"])
def test_new_package_is_formatted_and_passes_its_tests(tree, name):
    done = tool("new_package", name, root=tree)
    assert done.returncode == 0, done.stderr
    home = tree / "packages" / name
    assert not [path for path in home.rglob("*") if "newborn" in path.name]
    files = [path for path in home.rglob("*") if path.is_file()]
    assert not [path for path in files if "newborn" in path.read_text(encoding="utf-8")]
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]
    listed = [layers["root_packages"][1:], layers["contracts"][0]["modules"]]
    listed.append(layers["contracts"][1]["layers"][0].split(" | "))
    assert all(names == sorted(names) and name in names for names in listed)
    run(tree, "ruff", "check", str(home))
    run(tree, "ruff", "format", "--check", str(home))
    if name == "zeta":
        assert "passed" in run(tree, "pytest", "-q", str(home))


@pytest.mark.slow
def test_yard_with_a_new_package_passes_check_and_the_yards_tests(tree):
    assert tool("new_package", "zeta", root=tree).returncode == 0
    run(tree, "ruff", "check", ".")
    run(tree, "ruff", "format", "--check", ".")
    run(tree, "pyrefly", "check")
    assert "2 kept, 0 broken" in run(tree, "lint-imports", "--no-cache")
    tests = [f"tests/test_{name}.py" for name in ("layers", "readmes", "packaging")]
    run(tree, "pytest", "-q", *tests, "packages/zeta", "README.md")
    run(tree, "pytest", "-q", "-m", "not slow", "tests/test_tour.py")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adaqp", "there already"),
        ("My-Pkg", "lower-case module name"),
        ("class", "lower-case module name"),
        ("json", "would hide another module"),
        ("numpy", "installed in this environment already"),
    ],
)
def test_new_package_refuses_a_name_and_changes_nothing(tree, name, message):
    before = sorted(tree.glob("packages/*"))
    done = tool("new_package", name, root=tree)
    assert done.returncode == 1
    assert message in done.stderr
    assert sorted(tree.glob("packages/*")) == before


def test_new_package_stops_when_a_list_is_not_where_it_was(tree):
    project = tree / "pyproject.toml"
    project.write_text(project.read_text().replace("root_packages = [", "root_packages=["))
    done = tool("new_package", "zeta", root=tree)
    assert done.returncode == 1
    assert "expected one line" in done.stderr
    assert not (tree / "packages/zeta").exists()


def versions(tree):
    files = [*tree.glob("shared/pyproject.toml"), *tree.glob("packages/*/pyproject.toml")]
    return {tomllib.loads(path.read_text())["project"]["version"] for path in files}


def test_bump_raises_every_version_together(tree):
    assert tool("bump", "--check", root=tree).stdout == "0.1.0\n"
    assert tool("bump", "minor", root=tree).stdout == "0.2.0\n"
    assert versions(tree) == {"0.2.0"}
    for path in [
        *tree.glob("shared/src/*/__init__.py"),
        *tree.glob("packages/*/src/*/__init__.py"),
    ]:
        assert '__version__ = "0.2.0"' in path.read_text()
    assert tool("bump", "patch", root=tree).stdout == "0.2.1\n"
    assert tool("bump", "major", root=tree).stdout == "1.0.0\n"
    assert tool("bump", "3.4.5", root=tree).stdout == "3.4.5\n"
    assert versions(tree) == {"3.4.5"}


def test_bump_refuses_versions_that_differ(tree):
    init = tree / "shared/src/shared/__init__.py"
    init.write_text(init.read_text().replace("0.1.0", "0.1.1"))
    for arguments in (["--check"], ["minor"]):
        done = tool("bump", *arguments, root=tree)
        assert done.returncode == 1
        assert "shared/src/shared/__init__.py: 0.1.1" in done.stderr
    assert versions(tree) == {"0.1.0"}
    assert tool("bump", "--check", "minor", root=tree).returncode == 2


def test_bump_refuses_an_unknown_step(tree):
    done = tool("bump", "tiny", root=tree)
    assert done.returncode == 1
    assert "'tiny'" in done.stderr


def test_yards_own_versions_agree():
    assert tool("bump", "--check", root=ROOT).returncode == 0


def committed(tree):
    if shutil.which("git") is None:
        pytest.skip("needs git: what is uploaded is built from a commit")
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "All"]):
        subprocess.run(["git", *command], cwd=tree, check=True, capture_output=True)


@pytest.mark.slow
def test_build_dist_pins_shared_and_can_be_built_again(tree, tmp_path):
    committed(tree)
    out = tmp_path / "dist"
    done = tool("build_dist", "--out", out, root=tree)
    assert done.returncode == 0, done.stderr
    homes = ["shared", *(path.parent.name for path in tree.glob("packages/*/pyproject.toml"))]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"meshyard_{name}-0.1.0{end}" for name in homes for end in ("-py3-none-any.whl", ".tar.gz")
    )
    # A source archive builds without the checkout around it, to the same requirement.
    with tarfile.open(out / "meshyard_adaqp-0.1.0.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
        text = archive.extractfile("meshyard_adaqp-0.1.0/PKG-INFO").read().decode()
    source = tmp_path / "meshyard_adaqp-0.1.0"
    assert "Requires-Dist: meshyard-shared==0.1.*\n" in text
    assert "Private" not in text
    assert (source / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    run(source, "python", "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again"))
    assert len(list((tmp_path / "again").glob("*.whl"))) == 1
    # The checkout itself keeps its reference by path.
    assert "{root:parent:parent:uri}" in (tree / "packages/adaqp/pyproject.toml").read_text()


def test_build_dist_refuses_a_package_that_it_cannot_turn(tree, tmp_path):
    project = tree / "packages/adaqp/pyproject.toml"
    project.write_text(project.read_text().replace("{root:parent:parent:uri}", "{root:parent:uri}"))
    committed(tree)
    done = tool("build_dist", "--out", tmp_path / "dist", root=tree)
    assert done.returncode == 1
    assert "packages/adaqp/pyproject.toml: expected" in done.stderr


def test_sizes_names_long_files_and_repeated_names(tree):
    assert tool("sizes", "--check", root=tree).returncode == 0
    long = tree / "packages/adaqp/src/adaqp/long.py"
    long.write_text('"""Long."""\n' + "x = 1\n" * 600)
    inner = tree / "packages/adaqp/src/adaqp/inner"
    inner.mkdir()
    (inner / "long.py").write_text('"""Short."""\n')
    done = tool("sizes", "--check", root=tree)
    assert done.returncode == 1
    assert "adaqp/long.py: over 500 lines" in done.stdout
    assert "twice in packages/adaqp/src: long.py: inner, adaqp" in done.stdout
    long.write_text('"""Long: its 600 lines are one table."""\n' + "x = 1\n" * 600)
    assert tool("sizes", "--check", root=tree).returncode == 0


ECHO = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"answer": json.loads(line)["n"] * 2}), flush=True)
"""


@pytest.mark.slow
def test_peer_takes_turns_in_an_environment_of_its_own(tmp_path):
    """An empty pin file makes an environment that needs no index."""
    (tmp_path / "bench/peers").mkdir(parents=True)
    (tmp_path / "bench/peers/echo.txt").write_text("# nothing but Python\n")
    home = tmp_path / "bench"
    assert (
        missing_peer("echo", home) == "peer 'echo' is not installed: python tools/peer_env.py echo"
    )
    with pytest.raises(FileNotFoundError, match="peer 'echo' is not installed"):
        Peer("echo", tmp_path / "echo.py", home)
    assert tool("peer_env", root=tmp_path).stdout == "echo: not installed\n1 peers\n"
    done = tool("peer_env", "echo", root=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tool("peer_env", root=tmp_path).stdout == "echo: installed\n1 peers\n"
    assert missing_peer("echo", home) is None
    (tmp_path / "echo.py").write_text(ECHO)
    with Peer("echo", tmp_path / "echo.py", home) as peer:
        assert [peer.ask({"n": n}) for n in (1, 2)] == [{"answer": 2}, {"answer": 4}]
        with pytest.raises(RuntimeError, match="peer 'echo': expected one line of JSON"):
            peer.ask({})


def test_peer_env_names_what_is_pinned_and_what_python_is_missing(tmp_path):
    (tmp_path / "bench/peers").mkdir(parents=True)
    (tmp_path / "bench/peers/old.txt").write_text("# python: 2.1\n")
    done = tool("peer_env", "new", root=tmp_path)
    assert done.returncode == 2
    assert "expected one of ['old'], got 'new'" in done.stderr
    done = tool("peer_env", "old", root=tmp_path)
    assert done.returncode == 1
    assert "not on PATH" in done.stderr
