"""Raises the one version that all distributions of the yard share.

`python tools/bump.py minor` (or `major`, `patch`, or a version such as `0.3.0`) rewrites `version`
in every pyproject.toml and the `__version__` literal beside it; `--check` changes nothing and fails
when they differ. Literals, because the yard also runs from source on PYTHONPATH, not installed.
"""

import argparse
import re
import sys
from pathlib import Path

__all__ = ["main"]

_VERSION = r"\d+\.\d+\.\d+"
_PROJECT = re.compile(rf'^(version = ")({_VERSION})(")$', re.MULTILINE)
_LITERAL = re.compile(rf'^(__version__ = ")({_VERSION})(")$', re.MULTILINE)


class VersionError(Exception):
    """The versions cannot be read or do not agree."""


def places(root: Path) -> dict[Path, re.Pattern[str]]:
    """Returns each file that holds the version, with the pattern that finds it there."""
    found: dict[Path, re.Pattern[str]] = {}
    homes = [root / "shared", *sorted(root.glob("packages/*")), root / "tools" / "template"]
    for home in homes:
        if (home / "pyproject.toml").is_file():
            found[home / "pyproject.toml"] = _PROJECT
            found.update((path, _LITERAL) for path in home.glob("src/*/__init__.py"))
    return found


def current(root: Path) -> str:
    """Returns the version all places agree on.

    Raises:
        VersionError: when a place has none, or two differ.
    """
    versions = {}
    for path, pattern in places(root).items():
        matches = pattern.findall(path.read_text(encoding="utf-8"))
        if len(matches) != 1:
            raise VersionError(f"{path}: expected one version line, found {len(matches)}; add it")
        versions[path] = matches[0][1]
    if len(set(versions.values())) != 1:
        lines = "\n".join(f"  {path.relative_to(root)}: {v}" for path, v in versions.items())
        raise VersionError(f"expected one version everywhere, got\n{lines}\nwrite the same in all")
    return next(iter(versions.values()))


def raised(version: str, how: str) -> str:
    """Returns the version after `how`: major, minor, patch, or itself a version.

    Raises:
        VersionError: when `how` is neither.
    """
    if re.fullmatch(_VERSION, how):
        return how
    numbers = [int(number) for number in version.split(".")]
    if how not in ("major", "minor", "patch"):
        raise VersionError(f"expected major, minor, patch or a version like 0.3.0, got {how!r}")
    index = ("major", "minor", "patch").index(how)
    return ".".join(str(n) for n in [*numbers[:index], numbers[index] + 1, *[0] * (2 - index)])


def main(argv: list[str] | None = None) -> int:
    """Rewrites or checks the versions and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("how", nargs="?", help="major, minor, patch or a version like 0.3.0")
    parser.add_argument("--check", action="store_true", help="only compare the versions")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    arguments = parser.parse_args(argv)
    if bool(arguments.how) == arguments.check:
        parser.error("give either a version step or --check")
    root = arguments.root.resolve()
    try:
        version = current(root)
        if arguments.how:
            new = raised(version, arguments.how)
            for path, pattern in places(root).items():
                text = pattern.sub(rf"\g<1>{new}\g<3>", path.read_text(encoding="utf-8"))
                path.write_text(text, encoding="utf-8")
            version = new
    except VersionError as error:
        print(f"bump: {error}", file=sys.stderr)
        return 1
    print(version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
