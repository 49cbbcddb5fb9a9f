"""Copies the yard's pages to a folder that Sphinx reads, and writes those that no file holds.

Every page keeps its path in the repository, so that links between pages hold as they are. What a page
links to comes along, beginning from the packages' own pages: other pages, pictures and other files. A
package's examples become one page, to which links to the scripts lead. The start page and its table
are read from the root README and from the packages' metadata.
"""

import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

from rules.package import Package

__all__ = ["EXAMPLES", "PageError", "find_pages", "read_linked", "read_project", "write_pages"]

WHICH = Path("tools/docs/which.md")
YARD = (Path("README.md"), Path("CONTRIBUTING.md"), Path("CHANGELOG.md"), WHICH)
EXAMPLES = "examples/index.md"
# A link or a picture of Markdown, and where it leads.
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_TO_EXAMPLES = re.compile(r"\]\(([./\w]*?)examples(?:/(\w+)\.py)?\)")


class PageError(Exception):
    """A page lacks what the site takes from it."""


def find_pages(package: Package) -> list[Path]:
    """Returns a package's pages below the root in reading order: README, guide, method, measured."""
    ranks = {"guide": 0, "how-it-works": 1, "measured": 3}
    pages = sorted(package.folder.glob("docs/*.md"), key=lambda p: (ranks.get(p.stem, 2), p.name))
    return [path.relative_to(package.root) for path in (package.folder / "README.md", *pages)]


def find_examples(package: Package) -> list[Path]:
    """Returns a package's example scripts by name."""
    return sorted(package.folder.glob("examples/*.py"))


def read_project(package: Package) -> dict[str, str]:
    """Returns a package's metadata, the table `project` of its pyproject.toml."""
    return tomllib.loads((package.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read_linked(page: Path, root: Path) -> Iterator[Path]:
    """Yields the files and folders below the root that a page below it links to, relative to it."""
    for target in _LINK.findall((root / page).read_text(encoding="utf-8")):
        path = (root / page.parent / target.partition("#")[0]).resolve()
        if not target.startswith("#") and path.exists() and path.is_relative_to(root):
            yield path.relative_to(root)


def write_pages(packages: list[Package], out: Path) -> None:
    """Writes all pages of the site but the API reference, and the files that they link to.

    Args:
        packages: as the site lists them.
        out: folder to write to.

    Raises:
        PageError: the root README has no picture, or `WHICH` no row for a package.
    """
    root = packages[0].root
    lists = {find_pages(package)[0]: _list_pages(package) for package in packages}
    waiting = [*YARD, *(page for package in packages for page in find_pages(package))]
    num_listed = len(waiting)
    for number, page in enumerate(waiting):
        head = "" if number < num_listed else "---\norphan: true\n---\n\n"
        text = _lead_to_examples((root / page).read_text(encoding="utf-8"))
        _write(out / page, head + text + lists.get(page, ""))
        for linked in read_linked(page, root):
            if linked.suffix == ".md" and linked not in waiting:
                waiting.append(linked)
            elif linked.suffix != ".md" and (root / linked).is_file():
                (out / linked).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / linked, out / linked)
    for package in packages:
        if find_examples(package):
            _write(out / package.folder.relative_to(root) / EXAMPLES, _show_examples(package))
    _write(out / "index.md", _write_start(packages))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _list_pages(package: Package) -> str:
    """The navigation below a package's README: its other pages."""
    pages = [f"docs/{page.name}" for page in find_pages(package)[1:]]
    pages += [EXAMPLES] if find_examples(package) else []
    return "\n".join(["", "```{toctree}", ":hidden:", "", *pages, "api/index", "```", ""])


def _lead_to_examples(text: str) -> str:
    """Leads links to a package's examples, the folder or a script, to the page that shows them."""

    def lead(match: re.Match[str]) -> str:
        anchor = f"#{match[2]}py" if match[2] else ""
        return f"]({match[1]}{EXAMPLES}{anchor})"

    return _TO_EXAMPLES.sub(lead, text)


def _show_examples(package: Package) -> str:
    """The page of a package's examples."""
    parts = [f"# {package.name}: examples"]
    for path in find_examples(package):
        parts += [f"## {path.name}", f"```python\n{path.read_text(encoding='utf-8').strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _write_start(packages: list[Package]) -> str:
    """The start page: the root README's title, first paragraph and picture, and all packages."""
    root = packages[0].root
    title, intro, *rest = (root / "README.md").read_text(encoding="utf-8").split("\n\n")
    picture = next((part for part in rest if part.startswith("![") and _LINK.fullmatch(part)), None)
    if picture is None:
        raise PageError("README.md: expected a picture in a paragraph of its own; add one")
    linked = set(read_linked(WHICH, root))
    rows, names = [], []
    for package in packages:
        readme, *pages = find_pages(package)
        if readme not in linked:
            raise PageError(f"{WHICH}: expected a row that links to {readme}, got none; add one")
        links = [f"[{page.stem.replace('-', ' ')}]({page})" for page in pages]
        links.append(f"[API]({readme.parent}/api/index.rst)")
        about = read_project(package)["description"]
        rows.append(f"| [{package.name}]({readme}) | {about} | {', '.join(links)} |")
        names.append(str(readme))
    ways = f"[Which package for which pain]({WHICH}), [about the yard](README.md)"
    return "\n".join(
        [
            *(title, "", intro, "", picture, "", ways, ""),
            *("| package | what it does | pages |", "| --- | --- | --- |", *rows, ""),
            *("```{toctree}", ":hidden:", "", f"Which package? <{WHICH}>"),
            *("About the yard <README.md>", "CONTRIBUTING.md", "CHANGELOG.md", "```", ""),
            *("```{toctree}", ":hidden:", ":caption: Packages", "", *names, "```", ""),
        ]
    )
