"""Makes a new package that passes `hatch run check` and `hatch run test` at once.

`python tools/new_package.py NAME` copies tools/template, a complete package with a placeholder
job, to packages/NAME under its new name, and enters it wherever packages are listed: the layers
and the type checker's search path in pyproject.toml, the tables in README.md and
tools/docs/which.md, and CHANGELOG.md.
"""

import argparse
import keyword
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

__all__ = ["main"]

PLACEHOLDER = "newborn"


class CannotMakeError(Exception):
    """The package cannot be made; nothing was changed."""


def check_name(root: Path, name: str) -> None:
    """Refuses a name that is no module name, is taken here, or hides another module.

    Raises:
        CannotMakeError: with the reason and a way out.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*", name) or keyword.iskeyword(name):
        raise CannotMakeError(f"expected a lower-case module name, got {name!r}; use a-z and 0-9")
    if (root / "packages" / name).exists():
        raise CannotMakeError(f"packages/{name} is there already; choose another name")
    if (
        name in {"shared", "tests", "bench", "tools", PLACEHOLDER}
        or name in sys.stdlib_module_names
    ):
        raise CannotMakeError(f"{name!r} would hide another module; choose another name")
    if find_spec(name) is not None:
        raise CannotMakeError(
            f"a module {name!r} is installed in this environment already; choose another name"
        )


def copy_template(root: Path, name: str) -> Path:
    """Copies the template under its new name and returns the package's folder."""
    template = root / "tools" / "template"
    target = root / "packages" / name
    for source in sorted(template.rglob("*")):
        inside = source.relative_to(template).parts
        if source.is_dir() or "__pycache__" in inside or inside[0].startswith("."):
            continue
        parts = [name if part == PLACEHOLDER else part for part in inside]
        copy = target.joinpath(*parts)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(
            source.read_text(encoding="utf-8").replace(PLACEHOLDER, name), encoding="utf-8"
        )
    return target


def replace_once(
    text: str, pattern: str, replacement: str | Callable[[re.Match[str]], str], file: Path
) -> str:
    """Replaces the one place in a listed file that names the packages.

    Raises:
        CannotMakeError: when the file no longer has that place, or has it twice.
    """
    text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
    if count != 1:
        raise CannotMakeError(
            f"{file}: expected one line that matches {pattern!r}, found {count}; "
            "restore that line or change tools/new_package.py with it"
        )
    return text


def entries(root: Path, name: str) -> dict[Path, str]:
    """Returns the new text of each file that lists the packages."""
    project = root / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    for pattern, between in (
        (r'^(root_packages = \["shared", ")(.*)("\])$', '", "'),
        (r'^(modules = \[")(.*)("\])$', '", "'),
        (r'^(layers = \[")([a-z0-9| ]+)(", "shared"\])$', " | "),
    ):

        def enter(line: re.Match[str], between: str = between) -> str:
            return line[1] + between.join(sorted([*line[2].split(between), name])) + line[3]

        text = replace_once(text, pattern, enter, project)
    own = rf'\1, "packages/{name}/src"]'
    text = replace_once(text, r"^(search-path = \[.*)\]$", own, project)
    readme, which = root / "README.md", root / "tools" / "docs" / "which.md"
    pain = f"| Sums of many ranges (placeholder) | [{name}](../../packages/{name}/README.md) |"
    row = rf"| [`{name}`](packages/{name}/README.md) | sums of many ranges (placeholder) | |"
    changelog = root / "CHANGELOG.md"
    return {
        project: text,
        **{
            page: replace_once(
                page.read_text(encoding="utf-8"),
                r"^<!-- new packages above this line -->$",
                f"{line}\n<!-- new packages above this line -->",
                page,
            )
            for page, line in ((readme, row), (which, pain))
        },
        changelog: replace_once(
            changelog.read_text(encoding="utf-8"),
            r"^## Unreleased$",
            f"## Unreleased\n\n### {name}\n\n- The package begins.",
            changelog,
        ),
    }


def tidy(root: Path, package: Path) -> None:
    """Sorts imports and formats anew: both depend on how the name reads and how long it is."""
    if find_spec("ruff") is None:
        print("new_package: ruff is not here; run `hatch run ruff check --fix` and `... format`")
        return
    for arguments in (["check", "--quiet", "--fix"], ["format", "--quiet"]):
        subprocess.run([sys.executable, "-m", "ruff", *arguments, package], cwd=root, check=True)


def main(argv: list[str] | None = None) -> int:
    """Makes the package and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="import name: lower-case letters and digits")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    arguments = parser.parse_args(argv)
    root, name = arguments.root.resolve(), arguments.name
    try:
        check_name(root, name)
        changed = entries(root, name)
    except CannotMakeError as error:
        print(f"new_package: {error}", file=sys.stderr)
        return 1
    package = copy_template(root, name)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    tidy(root, package)
    print(f"Made packages/{name}. Next: `hatch run check`, `hatch run test packages/{name}`, then")
    print(
        f"replace the placeholder job in packages/{name}/src/{name}/summing, demo.py, docs and examples."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
