"""Steps of a package's first day, read from its README, guide, help texts and examples.

Nothing is imported from the package: it is installed later, alone.
"""

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from first_day.mistakes import MISTAKES

__all__ = ["Step", "read_steps"]

_FENCE = re.compile(r"(<!--- skip: next -->\n\n?)?^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"\s+#\s.*$")
_THEIRS = re.compile(
    r"\.\.\.|HOST:|\b10\.0\.0\.|\b0\.0\.0\.0|:29500|--nnodes|s3://|/nfs/|/models/|/local/"
    r"|\./my-model|\bmy\.yaml|\bsnapshot\.pickle|\bprofile\.json"
)
_NOT_NAME = re.compile(r"[^\w-]")
_ROOT = Path(__file__).parents[2]
_RUNNERS = ("python ", "torchrun ", "meshyard-swift run ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that a user runs.

    Attributes:
        kind: install, readme, guide, help, example or mistake.
        line: what is run, by bash; for a page's Python the name of a file.
        python: the text of that file; empty for a line.
        status: the exit status that is expected.
        expects: a text that the output has to contain; of a mistake, its last line.
        why_not: why the line is not run; empty if it is.
        may_lack: what the README does not install and the guide has an extra for: the line may end
            with a sentence that asks for one of them.
    """

    kind: str
    line: str
    python: str = ""
    status: int = 0
    expects: str = ""
    why_not: str = ""
    may_lack: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """What tells the step from others of its package."""
        return f"{self.kind}: {self.line}"


def read_steps(home: Path) -> list[Step]:
    """Reads the steps of the package whose folder is `home`, in the order in which they are run."""
    project = tomllib.loads((home / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (prog,) = project["scripts"]
    extras = _read_extras(home, project)
    told = [
        *_read_page(home, "docs/guide.md", "guide"),
        *(_line("help", line) for line in _read_examples(home)),
        *(step for script in sorted(home.glob("examples/*.py")) for step in _read_script(script)),
    ]
    steps = [
        *_read_page(home, "README.md", "readme"),
        *(replace(step, may_lack=extras) for step in told),
        *(
            Step(kind="mistake", line=line.replace("PROG", prog), status=status, expects=expects)
            for line, status, expects in (*MISTAKES["all"], *MISTAKES[home.name])
        ),
    ]
    first: dict[str, Step] = {}
    for step in steps:  # a line that stands in several places is run once
        first.setdefault(step.line, step)
    return sorted(first.values(), key=lambda step: step.kind != "install")


def _read_page(home: Path, page: str, kind: str) -> list[Step]:
    text = (home / page).read_text(encoding="utf-8")
    blocks = [(name, body) for skip, name, body in _FENCE.findall(text) if not skip]
    lines = [line for name, body in blocks if not name for line in body.splitlines()]
    steps = []
    for line in lines:
        if line.startswith("pip "):
            if kind == "readme":
                steps.append(Step(kind="install", line=line))
        elif line.strip():
            steps.append(_line(kind, line))
    python = "\n".join(body for name, body in blocks if name == "python")
    if python:
        steps.append(Step(kind=kind, line=f"python {kind}.py", python=python))
    return steps


def _read_extras(home: Path, project: dict[str, Any]) -> frozenset[str]:
    """What the extras that the guide names under `## Install` bring, and `NAME[EXTRA]` for each."""
    guide = (home / "docs" / "guide.md").read_text(encoding="utf-8")
    section = guide.partition("\n## Install\n")[2].partition("\n## ")[0]
    found = set()
    for extra, needed in project.get("optional-dependencies", {}).items():
        if f"`{extra}`" in section:
            found |= {f"{project['name']}[{extra}]", *(_NOT_NAME.split(one)[0] for one in needed)}
    return frozenset(found)


def _read_examples(home: Path) -> list[str]:
    """The lines of all sections `Examples:` in docstrings of commands."""
    found = []
    for path in sorted(home.glob("src/**/*.py")):
        if path.name in ("cli.py", "commands.py"):
            sections = re.findall(
                r"^    Examples:\n((?:        .*\n)+)",
                path.read_text(encoding="utf-8"),
                re.MULTILINE,
            )
            found += [line.strip() for section in sections for line in section.splitlines()]
    return found


def _read_script(script: Path) -> list[Step]:
    """The lines that a script's docstring names it by; without one, the script alone."""
    text = script.read_text(encoding="utf-8").split('"""')[1]
    lines = [line.strip() for line in text.splitlines() if script.name in line]
    lines = [line for line in lines if line.startswith(_RUNNERS)] or [f"python {script.name}"]
    # `[TEXT_FILE]` may be left out.
    lines = [re.sub(r"\s+\[[A-Z_]+\]", "", line) for line in lines]
    return [_line("example", line.replace(script.name, str(script))) for line in lines]


def _line(kind: str, line: str) -> Step:
    comment = _COMMENT.search(line)
    told = comment[0] if comment else ""
    line = _COMMENT.sub("", line).strip()
    # Lines of pages name scripts as they lie in the checkout.
    line = re.sub(r"(?<= )packages/", f"{_ROOT}/packages/", line)
    why_not = ""
    if _THEIRS.search(line):
        why_not = "names hosts, folders or files of the user's"
    elif "--full" in line.split():
        why_not = "the long form"
    elif "another terminal" in told or re.search(r"swift (inject|status)\b", line):
        why_not = "needs a run in another terminal"
    elif re.search(r"\b[A-Z]{4,}\b", line) and not line.startswith("export "):
        why_not = "names something of the user's"
    return Step(kind=kind, line=line, why_not=why_not)
