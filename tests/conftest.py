"""A package to plant violations in, for the tests of `tools/rules`, and a browser for pages."""

import sys
import textwrap
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "tools"), str(Path(__file__).parent)]

from browser import Browser, find_browser

from rules.package import find_packages

# A package that keeps all rules: its face, a plan and a runtime that uses it.
CLEAN = {
    "__init__.py": """
        from importlib import import_module
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from tiny import data
            from tiny.planner import Plan
            from tiny.runtime.engine import run
        __all__ = ["Plan", "data", "run"]
        def __getattr__(name):
            if name == "data":
                return import_module("tiny.data")
            home = {"Plan": "tiny.planner", "run": "tiny.runtime.engine"}.get(name)
            if home is None:
                raise AttributeError(name)
            return getattr(import_module(home), name)
    """,
    "data.py": "ROWS = 3",
    "planner.py": """
        class Plan:
            _count = 0
            def __init__(self):
                self._steps = []
            def __eq__(self, other):
                return self._steps == other._steps
    """,
    "runtime/__init__.py": "from tiny.runtime.engine import run",
    "runtime/engine.py": """
        from tiny.planner import Plan
        from tiny.runtime import _clock
        def run(plan: Plan):
            return plan, _clock
    """,
    "runtime/_clock.py": "NOW = 0",
}


@pytest.fixture
def plant(tmp_path):
    """Writes the clean package with files replaced or added, and returns it."""

    def write(files=(), name="tiny"):
        home = tmp_path / "packages" / name / "src" / name
        for file, text in {**CLEAN, **dict(files)}.items():
            path = home / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text.replace("tiny", name)).strip("\n") + "\n")
        return next(p for p in find_packages(tmp_path) if p.name == name)

    return write


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A running Chromium; skips where none is installed."""
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium is installed")
    running = Browser(program, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()
