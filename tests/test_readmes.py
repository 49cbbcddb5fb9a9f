"""What the pages promise is there. Sybil runs their Python blocks beside this."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from rules.package import read_words
from shared.training.pictures import WIDTH_IN

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
HOMES = [ROOT / "shared", *(path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml")))]
READMES = [ROOT / "README.md", *(home / "README.md" for home in HOMES)]
PAGES = [
    *READMES,
    *(page for home in HOMES for page in sorted(home.glob("docs/*.md"))),
    *(
        ROOT / name
        for name in (
            "CONTRIBUTING.md",
            "CHANGELOG.md",
            "bench/peers/README.md",
            "tools/docs/which.md",
        )
    ),
]


PICTURES = sorted(ROOT.glob("packages/*/docs/*.svg"))


def named(paths):
    return {"argvalues": paths, "ids": [str(path.relative_to(ROOT)) for path in paths]}


@pytest.mark.parametrize("picture", **named(PICTURES))
def test_pictures_are_as_wide_as_the_common_style_and_have_a_title(picture):
    """Text has its one size there, so that equal widths mean equal letters on a page."""
    text = picture.read_text(encoding="utf-8")
    assert re.search(r'<svg [^>]*\bwidth="([\d.]+)pt"', text)[1] == f"{72 * WIDTH_IN:g}"
    assert re.search(r"<title>[^<]{10,}</title>", text)


@pytest.mark.parametrize("page", **named(PAGES))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    inside = [target for target in targets if "://" not in target]
    assert [target for target in inside if not (page.parent / target).exists()] == []
    for target in inside:
        assert (page.parent / target).resolve().is_relative_to(ROOT), (
            "nothing outside is referred to"
        )


@pytest.mark.parametrize("page", **named(PAGES))
def test_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    scripts = set(SETTINGS["hatch"]["envs"]["default"]["scripts"]) | {"ruff", "pytest", "python"}
    assert set(re.findall(r"hatch run ([a-z][\w-]*)", text)) <= scripts
    for path in re.findall(r"python ((?:tools|bench)/[\w/]+\.py)", text):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", **named(READMES))
def test_readme_has_a_title_and_no_badge(page):
    text = page.read_text(encoding="utf-8")
    name = "Meshyard" if page.parent == ROOT else page.parent.name
    assert text.splitlines()[0] == f"# {name}"
    assert "badge" not in text.lower()
    assert "shields" not in text.lower()


@pytest.mark.parametrize("home", **named([home for home in HOMES if home.name != "shared"]))
def test_package_is_listed_and_says_how_to_run(home):
    assert (
        f"| [`{home.name}`](packages/{home.name}/README.md) |" in (ROOT / "README.md").read_text()
    )
    assert re.search(rf"^### {home.name}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    text = (home / "README.md").read_text()
    assert f"pip install -c constraints.txt ./packages/{home.name}" in text
    assert f"{home.name} demo" in text


PINNED = (
    "`-c constraints.txt` pins the release of torch that the yard is tested with, not a build of it: "
    "pip takes CUDA's where it finds no other. On a machine without a GPU, `pip install --find-links "
    "WHEELS -c constraints.txt ./packages/{name}` takes the CPU build, where WHEELS is a page or "
    "folder of torch's CPU wheels. On a GPU machine install your torch first and leave the "
    "constraint out."
)


@pytest.mark.parametrize("home", **named([home for home in HOMES if home.name != "shared"]))
def test_a_guide_says_what_the_constraint_does_and_what_extras_bring(home):
    guide = (home / "docs" / "guide.md").read_text(encoding="utf-8")
    section = guide.partition("\n## Install\n")[2].partition("\n## ")[0]
    assert PINNED.format(name=home.name) in " ".join(section.split())
    project = tomllib.loads((home / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name for name, needed in project["optional-dependencies"].items() if needed} - {
        "test"
    }
    listed = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", " ".join(listed))) == extras


def test_no_page_says_that_the_constraint_chooses_a_build():
    for page in PAGES:
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert not re.search(r"selects the CPU build|Without the constraint", text), page


def test_the_two_commands_stand_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert "pip install hatch && hatch run demo\nhatch run test\n" in text
    assert "pip install -c constraints.txt" in text


@pytest.mark.parametrize("home", **named(HOMES))
def test_a_readme_of_a_package_can_be_read_at_once(home):
    assert len(read_words((home / "README.md").read_text(encoding="utf-8"))) <= 500


def test_words_are_counted_outside_code():
    text = "one two\n```python\nx = 1\n```\n<!-- claims -->\nthree\n"
    assert len(read_words(text)) == 6
