"""Builds the site of the yard: `hatch run docs`, then open site/index.html; it needs no server.

Pages and docstrings are put together in a temporary folder and read by Sphinx, for which a warning is
an error. The site replaces an older one only when all of it is there.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from shared.files import atomic_folder

SETTINGS = Path(__file__).parent
ROOT = SETTINGS.parents[1]
sys.path.insert(0, str(SETTINGS.parent))

from docs.api import write_api
from docs.pages import PageError, write_pages
from rules.package import find_packages

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Builds the site and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site")
    arguments = parser.parse_args(argv)
    try:
        build(arguments.out)
    except PageError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    return 0


def build(out: Path) -> None:
    """Builds the site in a folder, which is empty or holds an earlier site.

    Raises:
        PageError: a page lacks something, Sphinx warned, or the folder holds something else.
    """
    if out.exists() and any(out.iterdir()) and not (out / "objects.inv").exists():
        raise PageError(f"{out}: expected an empty folder or an earlier site; choose another one")
    packages = sorted(find_packages(ROOT), key=lambda package: package.name == "shared")
    with TemporaryDirectory() as folder, atomic_folder(out) as site:
        pages, trees = Path(folder, "pages"), Path(folder, "trees")
        write_pages(packages, pages)
        write_api(packages, pages)
        options = ["--fail-on-warning", "--jobs", "auto", "--quiet", "--conf-dir", SETTINGS]
        command = [sys.executable, "-m", "sphinx", *options, "--doctree-dir", trees, pages, site]
        if subprocess.run(command, check=False).returncode:
            raise PageError(
                "expected no warning of Sphinx; mend the pages or docstrings named above"
            )


if __name__ == "__main__":
    sys.exit(main())
