"""What is installed: wheels and their metadata, who is asked for what, and how imports behave."""

import io
import os
import re
import resource
import subprocess
import sys
import threading
import tomllib
import zipfile
from email.parser import Parser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
HOMES = [ROOT / "shared", *(path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml")))]
PACKAGES = [home for home in HOMES if home.name != "shared"]
by_name = {"argvalues": HOMES, "ids": [home.name for home in HOMES]}
packages_by_name = {"argvalues": PACKAGES, "ids": [home.name for home in PACKAGES]}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Every wheel of the yard, built from the checkout: folder name -> file."""
    built = {}
    for home in HOMES:
        out = tmp_path_factory.mktemp(home.name)
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out],
            cwd=home,
            check=True,
            capture_output=True,
        )
        (built[home.name],) = out.glob("*.whl")
    return built


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.parametrize("home", **by_name)
def test_wheel_says_what_it_is(wheels, home):
    fields = metadata(wheels[home.name])
    assert fields["Name"] == f"meshyard-{home.name}"
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.11"
    # An upload by mistake is refused: the metadata holds a path of this machine.
    assert fields.get_all("Classifier") == ["Private :: Do Not Upload"]
    assert (
        fields["Version"]
        == tomllib.loads((ROOT / "shared/pyproject.toml").read_text())["project"]["version"]
    )
    assert len(fields.get_payload()) > 100, "the README is part of the metadata"


@pytest.mark.parametrize("home", **by_name)
def test_wheel_holds_its_package_and_nothing_else(wheels, home):
    with zipfile.ZipFile(wheels[home.name]) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {home.name}
    assert f"{home.name}/py.typed" in names
    sources = (home / "src" / home.name).rglob("*.py")
    expected = {str(path.relative_to(home / "src")) for path in sources}
    assert expected <= set(names)


@pytest.mark.parametrize("home", **packages_by_name)
def test_shared_is_required_by_path(wheels, home):
    required = [Requirement(line) for line in metadata(wheels[home.name]).get_all("Requires-Dist")]
    (ours,) = (requirement for requirement in required if requirement.name == "meshyard-shared")
    assert ours.url == (ROOT / "shared").as_uri()
    assert not [r.name for r in required if r.name in {"shared", home.name}]


@pytest.mark.parametrize("home", **packages_by_name)
def test_wheel_brings_its_command(wheels, home):
    with zipfile.ZipFile(wheels[home.name]) as archive:
        name = next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
        lines = archive.read(name).decode().splitlines()
    assert f"{home.name} = {home.name}.__main__:main" in [
        line.removeprefix("meshyard-") for line in lines
    ]


@pytest.mark.parametrize("home", **by_name)
def test_test_extra_holds_what_the_root_settings_use(home):
    extras = tomllib.loads((home / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = {Requirement(line).name for line in extras["test"]}
    assert names >= {
        "pytest",
        "pytest-benchmark",
        "pytest-timeout",
        "hypothesis",
        "beartype",
        "sybil",
    }


def test_features_asked_of_members_exist():
    envs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]
    members = [member for env in envs.values() for member in env["workspace"]["members"]]
    asked = {f for member in members for f in member.get("features", [])}
    known = set()
    for home in HOMES:
        project = tomllib.loads((home / "pyproject.toml").read_text())["project"]
        known |= set(project["optional-dependencies"])
    assert asked <= known, "hatch ignores a misspelt feature silently"


def test_constraint_is_the_release_the_environments_pin():
    envs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    for env in envs.values():
        assert [pin for pin in pins if pin.startswith("torch==")] == [
            line for line in env["dependencies"] if line.startswith("torch==")
        ]


class Index(ThreadingHTTPServer):
    """A package index on the loopback that has every project, and notes what it is asked for."""

    def __init__(self, versions):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.versions = versions
        self.asked = []


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        parts = self.path.strip("/").split("/")
        if parts[0] == "simple":
            self.server.asked.append(parts[1])
            file = f"{parts[1].replace('-', '_')}-{self.server.versions.get(parts[1], '9999')}-py3-none-any.whl"
            self._send(f'<a href="/files/{file}">{file}</a>'.encode(), "text/html")
        else:
            self._send(stub_wheel(parts[1]), "application/octet-stream")

    def _send(self, body, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        """Keeps the test's output clean."""


def stub_wheel(file):
    name, version, *_ = file.split("-")
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        info = f"{name}-{version}.dist-info"
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return body.getvalue()


def asked_of_an_index(tmp_path, requirements, versions):
    """Lets pip resolve the requirements against `Index`; returns what it asked and would install."""
    index = Index(versions)
    threading.Thread(target=index.serve_forever, daemon=True).start()
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"),
                *("--no-build-isolation", "--no-cache-dir", "--disable-pip-version-check"),
                *("--index-url", f"http://127.0.0.1:{index.server_port}/simple", *requirements),
            ],
            cwd=tmp_path,
            env={**env, "PIP_CONFIG_FILE": os.devnull},
            check=False,
            capture_output=True,
            text=True,
        )
    finally:
        index.shutdown()
        index.server_close()
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = re.findall("^Would install (.*)$", done.stdout, re.MULTILINE)
    return set(index.asked), set(line.split())


def pins(wheel):
    found = {}
    for line in metadata(wheel).get_all("Requires-Dist"):
        requirement = Requirement(line)
        exact = re.match(r"==([\d.]+)$", str(requirement.specifier))
        if exact:
            found[requirement.name] = exact[1]
    return found


@pytest.mark.slow
def test_no_index_is_asked_for_our_names(tmp_path, wheels):
    """All packages with all extras in one request, which also shows that they can be installed together."""
    wanted, versions = [], {}
    for home in PACKAGES:
        extras = ",".join(metadata(wheels[home.name]).get_all("Provides-Extra"))
        wanted.append(f"{home}[{extras}]")
        versions |= pins(wheels[home.name])
    asked, chosen = asked_of_an_index(tmp_path, wanted, versions)
    assert {"torch", "numpy", "pytest"} <= asked, "the index did not note what it was asked"
    assert asked & {name for h in HOMES for name in (h.name, f"meshyard-{h.name}")} == set()
    version = metadata(wheels["shared"])["Version"]
    assert {f"meshyard-{home.name}-{version}" for home in HOMES} <= chosen


def test_the_index_would_have_noted_our_names(tmp_path):
    asked, chosen = asked_of_an_index(tmp_path, ["meshyard-shared"], {})
    assert asked == {"meshyard-shared"}
    assert chosen == {"meshyard_shared-9999"}


@pytest.mark.parametrize("planted", ["", "__project__ = 'other'", None])
@pytest.mark.parametrize("home", **packages_by_name)
def test_a_strangers_shared_is_refused(tmp_path, home, planted):
    stranger = tmp_path / "shared"
    stranger.mkdir()
    if planted is not None:
        (stranger / "__init__.py").write_text(planted)
    # -S: without site-packages, where the namespace folder would lose to the real package.
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import {home.name}"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{home / 'src'}"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"ImportError: {home.name} needs Meshyard's own module 'shared'")
    assert str(stranger) in message
    assert "pip uninstall shared" in message


def _children_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("home", **packages_by_name)
def test_help_comes_at_once_and_without_torch(home):
    program = (
        f"import sys; sys.argv = [{home.name!r}, '--help']\n"
        f"from {home.name}.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'triton', 'dgl', 'numba', 'scipy', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    # The processor's seconds: a busy machine makes an answer late, and says nothing about the program.
    best_s = float("inf")
    for _ in range(6):
        before_s = _children_s()
        done = subprocess.run(
            [sys.executable, "-c", program], check=False, capture_output=True, text=True
        )
        best_s = min(best_s, _children_s() - before_s)
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout.lower()
        if best_s < 1.0:
            break
    # Torch alone would take more.
    assert best_s < 1.0, f"{home.name} --help took {best_s:.2f} s at best"


@pytest.mark.parametrize("home", **packages_by_name)
def test_runs_as_a_module_and_refuses_an_unknown_flag(home):
    done = subprocess.run(
        [sys.executable, "-m", home.name, "demo", "--no-such-flag"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
