"""Builds what is uploaded: a wheel and a source archive of every distribution.

In a checkout each package refers to `shared` by its path, so that it installs alone and no index is
asked for our names; such a reference must not be published. `python tools/build_dist.py` exports
the committed tree to a temporary folder, writes the pin `meshyard-shared==X.Y.*` in its place, drops
the classifier that blocks uploads, adds the licence's text, builds all there and reads the result.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

__all__ = ["main"]

_REFERENCE = re.compile(r'"meshyard-shared @ \{root:parent:parent:uri\}/shared"')
_PRIVATE = re.compile(r'^classifiers = \["Private :: Do Not Upload"\]\n', re.MULTILINE)


class BuildError(Exception):
    """The distributions cannot be built as they must be."""


def export(root: Path, target: Path) -> None:
    """Writes the committed tree to `target`.

    Raises:
        BuildError: when git cannot archive it.
    """
    done = subprocess.run(
        ["git", "archive", "--format=tar", "HEAD"], cwd=root, check=False, capture_output=True
    )
    if done.returncode != 0:
        raise BuildError(f"git archive failed in {root}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        # The argument came with 3.11.4; the attribute is ignored before that.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(target)


def homes(root: Path) -> list[Path]:
    """Returns the folders of all distributions, `shared` first."""
    return [
        root / "shared",
        *(path.parent for path in sorted(root.glob("packages/*/pyproject.toml"))),
    ]


def rewrite(home: Path) -> None:
    """Turns one exported distribution into its published form, in place.

    Raises:
        BuildError: when its pyproject.toml has not the lines to turn.
    """
    project = home / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    version = tomllib.loads(text)["project"]["version"]
    pin = f'"meshyard-shared=={version.rpartition(".")[0]}.*"'
    text, references = _REFERENCE.subn(pin, text)
    text, classifiers = _PRIVATE.subn("", text)
    if classifiers != 1 or (references == 0 and home.name != "shared"):
        raise BuildError(
            f"{project}: expected the classifier line 'Private :: Do Not Upload' and a reference to "
            f"shared by path, found {classifiers} and {references}; write both as in tools/template"
        )
    project.write_text(text, encoding="utf-8")


def build(home: Path, out: Path) -> None:
    """Builds one distribution's wheel and source archive into `out`.

    Raises:
        BuildError: with the builder's own words.
    """
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", out],
        cwd=home,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise BuildError(f"{home.name}: hatchling failed:\n{done.stdout}{done.stderr}")


def published_faults(wheel: Path) -> list[str]:
    """Reads a wheel's metadata and lists what must not be published."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    found = [
        f"{wheel.name}: refers to a path: {line}"
        for line in fields.get_all("Requires-Dist", [])
        if "file:" in line
    ]
    if any("Private" in line for line in fields.get_all("Classifier", [])):
        found.append(f"{wheel.name}: still marked private")
    if not any(name.endswith("/LICENSE") for name in names):
        found.append(f"{wheel.name}: holds no LICENSE")
    return found


def main(argv: list[str] | None = None) -> int:
    """Builds everything and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--out", type=Path, help="folder of the result; dist/ when left out")
    arguments = parser.parse_args(argv)
    root = arguments.root.resolve()
    out = (arguments.out or root / "dist").resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="meshyard-dist-") as folder:
            tree = Path(folder)
            export(root, tree)
            for home in homes(tree):
                rewrite(home)
                shutil.copy(tree / "LICENSE", home / "LICENSE")
                build(home, out)
                print(f"built {home.name}")
        found = [fault for wheel in sorted(out.glob("*.whl")) for fault in published_faults(wheel)]
        if found:
            raise BuildError("\n".join(found))
    except BuildError as error:
        print(f"build_dist: {error}", file=sys.stderr)
        return 1
    print(f"{len(list(out.iterdir()))} files in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
