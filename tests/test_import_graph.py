"""The import graph sees every import, so that no circle of rooms hides."""

import pytest

from rules import checks
from rules.import_graph import find_home


@pytest.mark.parametrize(
    "line",
    [
        "from tiny.runtime import engine",
        "import tiny.runtime.engine",
        "def plan():\n    from tiny.runtime.engine import run",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tiny.runtime import run",
        "from .runtime import run",
        "from . import runtime",
        "from tiny import run",  # by the package's face
        "import tiny as t\ndef plan():\n    return t.run",
        "from importlib import import_module\nimport_module('tiny.runtime.engine')",
        "from importlib import import_module\nimport_module(f'tiny.runtime.{1}')",
    ],
)
def test_rooms_that_import_each_other(plant, line):
    package = plant({"planner.py": line})
    (circle,) = package.circles
    assert (circle.folder, circle.rooms) == ("tiny", ["planner", "runtime"])
    found = [str(each) for each in checks.check_circles(package)]
    assert "runtime/engine.py:1: runtime imports planner" in found[1]
    number = len(line.splitlines()) if "import tiny as t" not in line else 3
    assert f"tiny/planner.py:{number}: planner imports runtime" in found[0]


def test_a_circle_of_three_files_inside_a_room(plant):
    files = {
        "runtime/a.py": "import tiny.runtime.b",
        "runtime/b.py": "def f():\n    from tiny.runtime import c",
        "runtime/c.py": "from tiny.runtime import FROM_A",
        "runtime/__init__.py": "from tiny.runtime.a import FROM_A",
    }
    (circle,) = plant(files).circles
    assert (circle.folder, circle.rooms) == ("tiny.runtime", ["a", "b", "c"])


def test_a_file_that_imports_what_its_folders_init_defines(plant):
    init = "from tiny.runtime.engine import run\nclass Clock: ..."
    package = plant(
        {"runtime/__init__.py": init, "runtime/engine.py": "import tiny.runtime._clock"}
    )
    assert package.circles == []
    package = plant(
        {"runtime/__init__.py": init, "runtime/engine.py": "from tiny.runtime import Clock"}
    )
    assert [circle.rooms for circle in package.circles] == [["__init__", "engine"]]


def test_a_room_is_imported_even_for_a_name_of_another(plant):
    package = plant(
        {
            "runtime/__init__.py": "from tiny.data import ROWS",
            "planner.py": "from tiny.runtime import ROWS",
        }
    )
    assert [circle.rooms for circle in package.circles] == [["planner", "runtime"]]


def test_a_folders_init_that_imports_a_room_beside_it_by_dots(plant):
    files = {
        "runtime/__init__.py": "from ..planner import Plan",
        "runtime/engine.py": "STEPS = 1",
        "planner.py": "import tiny.runtime\nclass Plan: ...",
    }
    assert [circle.rooms for circle in plant(files).circles] == [["planner", "runtime"]]


def test_a_room_of_the_packages_name_is_a_room(plant):
    files = {"tiny.py": "import tiny.planner", "planner.py": "import tiny.tiny\nclass Plan: ..."}
    assert [circle.rooms for circle in plant(files).circles] == [["planner", "tiny"]]


def test_a_name_is_followed_through_all_faces_to_the_file_that_defines_it(plant):
    modules = plant({"__init__.py": "from tiny.runtime import run"}).modules
    assert find_home("tiny", "run", modules) == "tiny.runtime.engine"
    # Faces that import a name from each other have no end, and are none of its homes for sure.
    modules = plant(
        {"__init__.py": "from tiny.runtime import x", "runtime/__init__.py": "from tiny import x"}
    )
    assert find_home("tiny", "x", modules.modules) in ("tiny", "tiny.runtime")
