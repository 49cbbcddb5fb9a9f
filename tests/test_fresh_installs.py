"""Each package alone, in an environment made by its README's own lines: its demo and its example.

The yard's environment has every extra, and would hide one that a README does not name.
`.ci/run` runs this for one package in turn.
"""

import os
import re
import shlex
import subprocess
import tomllib
import venv
from importlib import import_module
from pathlib import Path

import pytest

from shared.claims import faults, read_demo

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def told(package):
    """The README's lines for a shell, and its example."""
    blocks = FENCE.findall((ROOT / "packages" / package / "README.md").read_text())
    shell, example = ([text for kind, text in blocks if kind == which] for which in ("", "python"))
    return shell[0].splitlines(), example[0]


@pytest.fixture
def fresh(tmp_path):
    """Runs words in an empty folder, with nothing installed but what they install."""
    venv.create(tmp_path / "venv", with_pip=True)
    (tmp_path / "empty").mkdir()
    hidden = ("PYTHON", "HATCH", "VIRTUAL_ENV", "MESHYARD", "COVERAGE", "PYTEST")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    env["PATH"] = os.pathsep.join([str(tmp_path / "venv/bin"), env["PATH"]])
    # To compile all of torch takes a minute, and what is imported is compiled then.
    env["PIP_COMPILE"] = "0"
    # Where torch's CPU build may lie; hatch's environments know it by uv's name.
    links = env.get("PIP_FIND_LINKS") or env.get("UV_FIND_LINKS")
    if links:
        env["PIP_FIND_LINKS"] = links

    def run(words, folder=tmp_path / "empty"):
        done = subprocess.run(
            words, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}\n{done.stderr}"

    return run


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_does_what_its_readme_says_where_nothing_else_is(package, fresh, tmp_path):
    lines, example = told(package)
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    (command,) = project["scripts"]
    assert f"{command} demo" in lines
    for line in lines:
        words = shlex.split(line)
        # Its paths are those of the checkout.
        fresh(words, **({"folder": ROOT} if words[0] == "pip" else {}))
    # Claims beside a peer that only an extra brings are left out.
    assert faults(read_demo(tmp_path / "empty/report" / package), min_claims=1) == []
    (tmp_path / "example.py").write_text(example)
    fresh(["python", str(tmp_path / "example.py")])


@pytest.mark.parametrize("package", PACKAGES)
def test_readmes_say_how_to_install_before_how_to_run(package):
    lines, example = told(package)
    assert re.fullmatch(
        rf"pip install -c constraints\.txt '?\./packages/{package}(\[[\w,]+\])?'?", lines[0]
    )
    compile(example, f"{package}/README.md", "exec")


@pytest.mark.parametrize("package", PACKAGES)
def test_demos_write_where_all_run_time_files_go(package):
    assert import_module(f"{package}.cli").Demo().out == Path("report") / package


def test_ci_takes_another_package_with_each_commit():
    text = (ROOT / ".ci/run").read_text()
    assert f"tests/{Path(__file__).name}" in text
    assert "git rev-list --count HEAD" in text
