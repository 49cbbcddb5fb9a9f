"""The floors of the yard, and house rules that no linter has."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
SOURCES = sorted([*ROOT.glob("shared/src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")])
EVERYTHING = [
    *SOURCES,
    *sorted([*ROOT.glob("shared/tests/**/*.py"), *ROOT.glob("packages/*/tests/**/*.py")]),
    *sorted(
        p
        for name in ("tests", "bench", "tools")
        for p in (ROOT / name).rglob("*.py")
        if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)
    ),
]


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path):
    """Returns the modules a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_every_package_is_under_the_contracts():
    contracts = {c["type"]: c for c in SETTINGS["importlinter"]["contracts"]}
    assert sorted(SETTINGS["importlinter"]["root_packages"]) == sorted(["shared", *PACKAGES])
    assert sorted(contracts["independence"]["modules"]) == PACKAGES
    upper, lower = contracts["layers"]["layers"]
    assert sorted(upper.split(" | ")) == PACKAGES
    assert lower == "shared"
    assert {f"packages/{name}/src" for name in PACKAGES} <= set(SETTINGS["pyrefly"]["search-path"])


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("alpha/src/alpha/__init__.py", "import beta", "packages never import one another"),
        ("beta/src/beta/deep/inner.py", "from alpha import x", "packages never import one another"),
        ("shared/src/shared/low.py", "import alpha", "packages sit on shared"),
    ],
)
def test_linter_breaks_the_contract_when_a_floor_is_crossed(tmp_path, file, line, contract):
    """Plants two packages and a crossing import under the yard's own contracts."""
    for name in ("alpha", "beta", "shared"):
        package = tmp_path / name / "src" / name / "deep"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package.parent / "__init__.py").write_text("x = 1\n")
    (tmp_path / file).write_text(line + "\n")
    text = (ROOT / "pyproject.toml").read_text()
    layers = " | ".join(PACKAGES)
    quoted = ", ".join(f'"{name}"' for name in PACKAGES)
    text = text.replace(f'"{layers}", "shared"', '"alpha | beta", "shared"')
    text = text.replace(f'["shared", {quoted}]', '["shared", "alpha", "beta"]')
    text = text.replace(f"modules = [{quoted}]", 'modules = ["alpha", "beta"]')
    (tmp_path / "pyproject.toml").write_text(text)
    path = os.pathsep.join(str(tmp_path / name / "src") for name in ("alpha", "beta", "shared"))
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in " ".join(done.stdout.split())


def test_shared_has_three_rooms_of_substance_and_two_small_ones():
    home = ROOT / "shared/src/shared"
    names = {path.name for path in home.iterdir() if path.name != "__pycache__"}
    assert names == {
        *("topology", "comms", "kernels", "data"),
        *("claims.py", "cli", "errors.py", "files.py"),
        *("process_mark.py", "registry.py"),
        *("__init__.py", "py.typed", "training", "units.py"),
    }


@pytest.mark.parametrize("module", ["triton", "torch.distributed", "torch.multiprocessing"])
def test_what_lives_only_in_shared(module):
    offenders = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if "packages" in path.parts
        and any(
            name == module or name.startswith(module + ".")
            for name in imported(path)
            # Files of a training state are no process group, nor is a wrapper of a user's model, a
            # tensor that lies on several ranks, or a collective that a captured graph only names.
            if not name.startswith(
                (
                    "torch.distributed.checkpoint",
                    "torch.distributed.fsdp",
                    "torch.distributed.tensor",
                    "torch.distributed._functional_collectives",
                )
            )
        )
    ]
    assert offenders == []


def test_no_file_has_a_name_that_says_nothing():
    names = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    assert [str(path) for path in EVERYTHING if path.name in names] == []


def test_no_package_of_tests_hides_another():
    assert [str(p) for p in EVERYTHING if p.name == "__init__.py" and "tests" in p.parts] == []


def test_code_is_ascii():
    offenders = []
    for path in EVERYTHING:
        lines = path.read_text(encoding="utf-8").splitlines()
        offenders += [
            f"{path.relative_to(ROOT)}:{number}"
            for number, line in enumerate(lines, start=1)
            if not line.isascii()
        ]
    assert offenders == []


def test_no_pyplot_in_library_code():
    assert [str(path) for path in SOURCES if "matplotlib.pyplot" in imported(path)] == []


def test_pictures_are_begun_where_they_get_their_width_and_text_size():
    """Another width has the picture of seconds by rank and stage, whose columns are many."""
    offenders = {path.name for path in SOURCES if "matplotlib.figure.Figure" in imported(path)} - {
        "pictures.py"
    }
    assert offenders == {"report.py"}
    (other,) = [
        path
        for path in SOURCES
        if path.name == "report.py" and "matplotlib.figure" in imported(path)
    ]
    assert other == ROOT / "packages/bytecheckpoint/src/bytecheckpoint/tools/report.py"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_says_what_it_is_and_what_is_public(path):
    tree = parsed(path)
    assert ast.get_docstring(tree), "a module begins with what it is"
    is_private = path.name.startswith("_")
    is_public = any(
        isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        for node in tree.body
    )
    if is_public and not is_private:
        assigned = [
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        assert "__all__" in assigned, "a public module lists its names in __all__"


def test_top_level_is_what_it_should_be():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone: an unpacked archive has no list of tracked files")
    listed = subprocess.run([git, "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == {
        *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
        *("SECURITY.md", "CITATION.cff"),
        *("constraints.txt", "conftest.py", "packages", "shared", "tests", "bench", "tools"),
        "examples",
    }
