"""Every package has the shape of the template: command line, demo, pages, examples, README."""

import ast
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "tools" / "template"
PLACEHOLDER = "newborn"
HOMES = [path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]


def imports(path):
    """What a file imports from where, anywhere in it: ("shared.cli", "run_command")."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update((alias.name, "") for alias in node.names)
    return found


def calls(path):
    """Names that a file calls, without what stands before a dot."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {getattr(name, "attr", None) or getattr(name, "id", None) for name in names}


def sections(page):
    return re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def pages(home):
    return {path.name for path in home.glob("docs/*.md")}


def faults(home, name):
    """Where a package's shape differs from the template's."""
    source = home / "src" / name
    needed = [
        *(source / file for file in ("__init__.py", "__main__.py", "cli.py", "py.typed")),
        *(home / "docs" / page for page in sorted(pages(TEMPLATE))),
        *(home / file for file in ("README.md", "pyproject.toml", "tests/test_cli.py")),
    ]
    found = [
        f"{path.relative_to(home)}: expected this file" for path in needed if not path.exists()
    ]
    if found:
        return found
    cli = source / "cli.py"
    if ("shared.cli", "run_command") not in imports(cli) or "run_command" not in calls(cli):
        found.append("cli.py: expected main to return shared.cli.run_command(...)")
    found += [
        f"cli.py: expected shared.cli to do what {name} does"
        for name in sorted({"cli", "subcommand_cli_from_dict"} & calls(cli))
    ]
    demos = [*source.glob("demo.py"), *source.glob("demo/*.py")]
    if not any(("shared.claims", "finish") in imports(demo) for demo in demos):
        found.append("demo: expected it to end with shared.claims.finish(...)")
    if any("write_demo" in calls(demo) for demo in demos):
        found.append("demo: expected shared.claims.finish to write demo.json, not write_demo")
    main = (TEMPLATE / "src" / PLACEHOLDER / "__main__.py").read_text(encoding="utf-8")
    if (source / "__main__.py").read_text(encoding="utf-8") != main.replace(PLACEHOLDER, name):
        found.append("__main__.py: expected that of the template under this name")
    wanted, came = sections(TEMPLATE / "README.md"), sections(home / "README.md")
    if [section for section in came if section in wanted] != wanted:
        found.append(f"README.md: expected the sections {wanted} in this order, got {came}")
    if "(docs/limits.md" not in (home / "README.md").read_text(encoding="utf-8"):
        found.append("README.md: expected a link to docs/limits.md")
    if not 2 <= len(list(home.glob("examples/*.py"))) <= 3:
        found.append("examples: expected two or three scripts")
    return found


@pytest.mark.parametrize("home", HOMES, ids=[home.name for home in HOMES])
def test_package_has_the_shape_of_the_template(home):
    assert faults(home, home.name) == []


def test_template_has_its_own_shape():
    assert faults(TEMPLATE, PLACEHOLDER) == []
    assert pages(TEMPLATE) == {"guide.md", "how-it-works.md", "limits.md", "measured.md"}


def drop(file):
    return lambda home: (home / file).unlink()


def edit(file, old, new):
    def plant(home):
        text = (home / file).read_text(encoding="utf-8")
        assert old in text
        (home / file).write_text(text.replace(old, new), encoding="utf-8")

    return plant


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (drop("src/newborn/py.typed"), "src/newborn/py.typed: expected this file"),
        (drop("docs/guide.md"), "docs/guide.md: expected this file"),
        (
            edit("src/newborn/cli.py", "return run_command(", "return tyro.cli("),
            "cli.py: expected main to return shared.cli.run_command(...)",
        ),
        (
            edit("src/newborn/demo.py", "finish", "write_demo"),
            "demo: expected it to end with shared.claims.finish(...)",
        ),
        (
            edit("src/newborn/__main__.py", "sys.exit(main())", "main()"),
            "__main__.py: expected that of the template under this name",
        ),
        (edit("README.md", "## Limits", "## Bounds"), "README.md: expected the sections"),
        (edit("README.md", "## Install", "## Example"), "README.md: expected the sections"),
        (
            edit("README.md", "docs/limits.md", "docs/guide.md"),
            "README.md: expected a link to docs/limits.md",
        ),
        (drop("examples/sum_ranges.py"), "examples: expected two or three scripts"),
    ],
)
def test_another_shape_is_told(tmp_path, plant, fault):
    home = Path(shutil.copytree(TEMPLATE, tmp_path / PLACEHOLDER))
    plant(home)
    assert any(told.startswith(fault) for told in faults(home, PLACEHOLDER)), faults(
        home, PLACEHOLDER
    )
