"""The site that `hatch run docs` builds: every link leads somewhere, every picture says what it shows."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from docs.api import find_named_modules, find_returned, read_exports
from docs.pages import PageError, find_pages, read_project, write_pages
from rules.package import find_packages

PACKAGES = find_packages(ROOT)
BUILD_LIMIT_S = 120


class Page(HTMLParser):
    """What a page of HTML links to, loads and can be linked at."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loaded, self.mute = Counter(), [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids.update([attributes["id"]] if "id" in attributes else [])
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag in {"img", "script"} and "src" in attributes:
            self.loaded.append(attributes["src"])
        if tag == "link" and attributes.get("rel") in {"stylesheet", "icon"}:
            self.loaded.append(attributes["href"])
        if tag == "img" and not (attributes.get("alt") or "").strip():
            self.mute.append(attributes.get("src"))


def faults(site):
    """What is wrong with the links and pictures of a site, a line each."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in page.links + page.loaded:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                found += [f"{name} loads {target}"] if target in page.loaded else []
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.is_file():
                found.append(f"{name} leads to {target}, which is not there")
            elif parts.fragment and unquote(parts.fragment) not in pages[file].ids:
                found.append(f"{name} leads to {target}, which has no such anchor")
        found += [f"{name} shows {source} without a text" for source in page.mute]
        found += [
            f"{name} has #{key} {count} times" for key, count in page.ids.items() if count > 1
        ]
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site, built as a user builds it, and the seconds that it took."""
    if not shutil.which("hatch"):
        pytest.skip("needs hatch on the path, which makes the environment of the site")
    out = tmp_path_factory.mktemp("docs") / "site"
    # The environment is made before the time counts.
    subprocess.run(["hatch", "run", "docs:python", "-c", ""], cwd=ROOT, check=True)
    begun = time.monotonic()
    done = subprocess.run(
        ["hatch", "run", "docs:site", "--out", out],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, time.monotonic() - begun


@pytest.fixture
def site(built):
    """The site."""
    return built[0]


@pytest.mark.slow
def test_the_site_is_built_in_two_minutes(built):
    """On a machine that does nothing else."""
    assert built[1] < BUILD_LIMIT_S


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_link_of_the_site_leads_somewhere_inside_it(site):
    assert faults(site) == []
    assert len(list(site.rglob("*.html"))) > 5 * len(PACKAGES)


@pytest.mark.slow
def test_start_page_lists_every_package_with_its_metadata(site):
    start = Page(site / "index.html")
    text = unescape((site / "index.html").read_text(encoding="utf-8"))
    for package in PACKAGES:
        assert read_project(package)["description"] in text
        pages = [page.with_suffix(".html") for page in find_pages(package)]
        assert {*map(str, pages), f"{pages[0].parent}/api/index.html"} <= set(start.links)
    assert "_images/yard.svg" in start.loaded


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_public_name_is_described_once(site, package):
    ids = Counter()
    for path in site.rglob("api/*.html"):
        ids += Page(path).ids
    for name, value in read_exports(import_module(package.name)).items():
        homes = {package.name, package.exported.get(name), getattr(value, "__module__", None)}
        places = {f"{home}.{name}" for home in homes}
        if isinstance(value, ModuleType):
            places = {f"module-{value.__name__}"}
        assert sum(ids[place] for place in places) == 1, name
    described = [path.stem for path in site.rglob("api/*.html")]
    for name in find_named_modules(PACKAGES):
        assert any(stem == name or stem.startswith(f"{name}.") for stem in described), name


@pytest.mark.slow
def test_classes_are_described_with_their_constructors_and_with_what_is_returned(site):
    page = site / "packages/swift/api/index.html"
    text = " ".join(unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))).split())
    for words in ("samples of a step, of all ranks together", "a checkpoint is step-<n> in it"):
        assert words in text
    loop, trainable = "swift.training.runtime.Run.loop", "swift.training.trainable"
    assert {loop, "swift.StepData"} <= set(Page(page).ids)
    assert f"{trainable}.html#{trainable}.Trainable" in Page(page).links


PICTURES = "[...document.images].map(e => [e.alt.trim(), e.complete && e.naturalWidth > 0])"
BEYOND = """[...document.querySelectorAll("body *")].filter(e =>
  e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 200))"""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 390])
def test_the_start_page_fits_a_screen_and_shows_its_picture(site, browser, width):
    tab = browser.open(site / "index.html", width)
    assert tab.errors() == []
    assert tab.evaluate("innerWidth") == width
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(BEYOND) == []
    assert tab.evaluate(PICTURES) == [["The yard: packages side by side on shared", True]]
    assert "Copyright" not in tab.evaluate("document.body.innerText"), "nobody is named behind it"


def test_the_yards_picture_names_every_package():
    picture = ElementTree.parse(ROOT / "bench/yard.svg")
    named = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {package.name for package in PACKAGES} <= named


@pytest.mark.slow
def test_search_needs_no_server(site):
    """Its index is a script that pages load, and no result is fetched for a summary."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    found = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)\s*", index, re.DOTALL)[1])
    guide = found["docnames"].index("packages/adaqp/docs/guide")
    assert guide in found["terms"]["halo"]
    assert "searchindex.js" in Page(site / "search.html").loaded
    settings = (site / "_static/documentation_options.js").read_text(encoding="utf-8")
    assert "SHOW_SEARCH_SUMMARY: false" in settings


@pytest.fixture
def yard(tmp_path):
    """A small yard with one package beside `shared`, and what its site begins from."""
    texts = {
        "README.md": "# Yard\n\nWhat it is.\n\n![The yard](yard.svg)\n\nMore.\n",
        "yard.svg": "<svg/>",
        "CONTRIBUTING.md": "# Contributing\n\n[Licence](LICENSE), [records](records/one.md#a)\n",
        "LICENSE": "Free.",
        "records/one.md": "# One\n\n## A\n\n[two](two.md), [out](https://example.org/x.md)\n",
        "records/two.md": "# Two\n",
        "CHANGELOG.md": "# Changelog\n",
        "tools/docs/which.md": (
            "# Which\n\n[tiny](../../packages/tiny/README.md) [shared](../../shared/README.md)\n"
        ),
        "packages/tiny/README.md": "# tiny\n\n[Guide](docs/guide.md), [examples](examples).\n",
        "packages/tiny/docs/measured.md": "# Measured\n",
        "packages/tiny/docs/format.md": "# Format\n",
        "packages/tiny/docs/guide.md": "# Guide\n\n[run](../examples/run.py) `x[0](examples/no.py)`\n",
        "packages/tiny/examples/run.py": '"""Runs."""\n',
        "packages/tiny/pyproject.toml": '[project]\ndescription = "Does tiny things"\n',
        "packages/tiny/src/tiny/__init__.py": "",
        "shared/README.md": "# shared\n",
        "shared/pyproject.toml": '[project]\ndescription = "What all share"\n',
        "shared/src/shared/__init__.py": "",
    }
    for name, text in texts.items():
        path = tmp_path / "yard" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "yard"


def staged(yard):
    out = yard.parent / "pages"
    write_pages(find_packages(yard)[::-1], out)
    return out


def test_pages_bring_along_what_they_link_to(yard):
    out = staged(yard)
    assert (out / "LICENSE").read_text() == "Free."
    assert (out / "yard.svg").is_file()
    assert (out / "CONTRIBUTING.md").read_text() == (yard / "CONTRIBUTING.md").read_text()
    for name in ("one", "two"):
        text = (out / f"records/{name}.md").read_text()
        assert text == "---\norphan: true\n---\n\n" + (yard / f"records/{name}.md").read_text()


def test_links_to_examples_lead_to_their_page(yard):
    out = staged(yard)
    page = (out / "packages/tiny/examples/index.md").read_text()
    assert page == '# tiny: examples\n\n## run.py\n\n```python\n"""Runs."""\n```\n'
    readme = (out / "packages/tiny/README.md").read_text()
    assert "[examples](examples/index.md)." in readme
    assert readme.endswith(
        "\n```{toctree}\n:hidden:\n\ndocs/guide.md\ndocs/format.md\ndocs/measured.md\n"
        "examples/index.md\napi/index\n```\n"
    )
    assert "[run](../examples/index.md#runpy)" in (out / "packages/tiny/docs/guide.md").read_text()
    assert "examples" not in (out / "shared/README.md").read_text()


def test_start_page_is_read_from_the_readme_and_the_metadata(yard):
    text = (staged(yard) / "index.md").read_text()
    assert text.startswith("# Yard\n\nWhat it is.\n\n![The yard](yard.svg)\n\n[Which package")
    assert "More." not in text
    tiny = "packages/tiny"
    assert (
        f"| [tiny]({tiny}/README.md) | Does tiny things | [guide]({tiny}/docs/guide.md), "
        f"[format]({tiny}/docs/format.md), [measured]({tiny}/docs/measured.md), "
        f"[API]({tiny}/api/index.rst) |\n"
    ) in text
    assert "| [shared](shared/README.md) | What all share | [API](shared/api/index.rst) |\n" in text


def test_what_a_page_lacks_is_told(yard):
    which, readme = yard / "tools/docs/which.md", yard / "README.md"
    text = which.read_text()
    which.write_text(text.replace("packages/tiny/README.md", ""))
    with pytest.raises(PageError, match=r"which\.md: expected a row .* packages/tiny/README\.md"):
        staged(yard)
    which.write_text(text)
    readme.write_text("# Yard\n\nWhat it is.\n\nIn a line: ![The yard](yard.svg)\n")
    with pytest.raises(PageError, match=r"README\.md: expected a picture"):
        staged(yard)


def test_faults_of_a_site_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a id="x" href="#x">1</a><a id="y" href="b.html#z">2</a><a href="gone.html">3</a>'
        '<a href="https://example.org">4</a><img src="p.svg"><img src="p.svg" alt="p">'
        '<script src="https://example.org/s.js"></script><i id="x"></i>'
    )
    (tmp_path / "b.html").write_text('<a href="a.html#y">1</a>')
    (tmp_path / "p.svg").write_text("<svg/>")
    assert sorted(faults(tmp_path)) == [
        "a.html has #x 2 times",
        "a.html leads to b.html#z, which has no such anchor",
        "a.html leads to gone.html, which is not there",
        "a.html loads https://example.org/s.js",
        "a.html shows p.svg without a text",
    ]


def test_modules_are_those_that_pages_and_docstrings_name(yard):
    tiny = yard / "packages/tiny"
    for name in ("one", "two", "three", "one_more"):
        (tiny / f"src/tiny/{name}.py").write_text("")
    (tiny / "src/tiny/__init__.py").write_text('"""See `tiny.two.Job.run`."""\n')
    (tiny / "docs/guide.md").write_text(
        "`from tiny.one import go`, three.py, untiny.three, tiny.four\n"
    )
    assert find_named_modules(find_packages(yard)) == {"tiny.one", "tiny.two"}


def test_classes_that_described_names_return_are_found_with_what_these_return(
    tmp_path, monkeypatch
):
    (tmp_path / "results_foreign.py").write_text("class Foreign: ...")
    (tmp_path / "results.py").write_text(
        """
from __future__ import annotations
from collections.abc import Iterator
from results_foreign import Foreign
class _Own: ...
class Known:
    def run(self) -> Run | None: ...
    def _run(self) -> NotPublic: ...
class Run:
    @property
    def report(self) -> dict[str, list[Report]]: ...
    @classmethod
    def make(cls) -> tuple[Known, Foreign, _Own, int]: ...
class Report:
    rows: list[NotReturned]
    @staticmethod
    def lines() -> Iterator[Line]: ...
class Line: ...
class NotPublic: ...
class NotReturned: ...
class Late: ...
def broken() -> OnlyForCheckers: ...
def plain(late: NotReturned) -> "type[Late]": ...
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    results = import_module("results")
    described = [results.Known, results.broken, results.plain]
    found = find_returned(described, "results")
    assert [value.__name__ for value in found] == ["Late", "Line", "Report", "Run"]
    assert find_returned([results.Report, results.Line], "results") == []
    assert find_returned(described, "results_foreign") == []
