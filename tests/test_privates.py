"""Accesses to private names are found, and none is seen where there is none."""

import textwrap

import pytest

from rules.checks import check_privates
from rules.privates import find_private_accesses


def accesses(tmp_path, text, file="src/tiny/room.py"):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return list(find_private_accesses(path, frozenset({"tiny"})))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("plan._steps", "plan._steps"),
        ("plan.runtime._clock", "plan.runtime._clock"),
        ("make()._steps", "(...)._steps"),
        ("plan._steps = 3", "plan._steps"),
        ("plan._count()", "plan._count"),
        ("from tiny.planner import _count", "tiny.planner._count"),
        ("from tiny._clock import now", "tiny._clock.now"),
        ("from tiny import planner\nplanner._count", "tiny.planner._count"),
        ("import tiny.planner as p\np._count", "tiny.planner._count"),
        ('getattr(plan, "_steps", None)', "plan._steps"),
        ('setattr(plan, "_steps", 3)', "plan._steps"),
        ('object.__setattr__(plan, "_steps", 3)', "plan._steps"),
        ('monkeypatch.setattr(plan, "_steps", 3)', "plan._steps"),
        ('monkeypatch.delattr(plan, "_steps")', "plan._steps"),
        ('monkeypatch.setattr("tiny.planner._count", 3)', "tiny.planner._count"),
        ('mock.patch("tiny.planner._count")', "tiny.planner._count"),
        ('mock.patch.object(plan, "_count")', "plan._count"),
        ('vars(plan)["_steps"]', "plan._steps"),
        ('vars(plan).pop("_steps", None)', "plan._steps"),
        ('plan.__dict__["_steps"] = 3', "plan._steps"),
        ('plan.runtime.__dict__.get("_steps")', "plan.runtime._steps"),
        # A module's own names are no names of a class that happens to have the same.
        (
            """
            from tiny import planner
            class Own:
                def _count(self): ...
            planner._count
            """,
            "tiny.planner._count",
        ),
        ("import torch\ntorch._secret", "torch._secret"),
    ],
)
def test_an_access_to_another_objects_privates(tmp_path, text, name):
    (found,) = accesses(tmp_path, text)
    assert found.name == name
    assert found.foreign is None
    assert found.line == len(textwrap.dedent(text).rstrip().splitlines())
    (shown,) = check_privates([tmp_path / "src/tiny/room.py"], tmp_path, frozenset({"tiny"}))
    assert str(shown) == f"rule 8: src/tiny/room.py:{found.line}: {name} is private"


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self):\n        return self._steps",
        "class A(B):\n    @classmethod\n    def f(cls):\n        return cls._made, super()._made",
        "class A:\n    def f(self):\n        return type(self)._made, getattr(self, '_made')",
        # Classes of a file know each other.
        "class A:\n    def __init__(self):\n        self._x = 1\n\n\ndef f(a):\n    return a._x",
        "class A:\n    _x: int\n\n\ndef f(a):\n    return a._x",
        "class A:\n    __slots__ = ('_x',)\n\n\ndef f(a):\n    return a._x",
        "class A:\n    def _x(self): ...\n\n\nA()._x()",
        "plan.__class__, plan.__dict__",
        "_, rest = plan",
        "from tiny.planner import count as _count\n_count",
        'getattr(plan, "steps")',
        'setattr(plan, "__doc__", "")',
        'print("plan._steps")',
    ],
)
def test_own_names_and_public_ones_are_no_violation(tmp_path, text):
    assert accesses(tmp_path, text) == []


def test_a_private_file_belongs_to_its_folder(tmp_path):
    (tmp_path / "src/tiny/runtime").mkdir(parents=True)
    (tmp_path / "src/tiny/runtime/_clock.py").touch()
    for text in ("from tiny.runtime import _clock", "from tiny.runtime._clock import now"):
        assert accesses(tmp_path, text, "src/tiny/runtime/engine.py") == []
        assert accesses(tmp_path, text, "src/tiny/runtime/ranks/rank.py") == []
        assert len(accesses(tmp_path, text, "src/tiny/planner.py")) == 1
        assert len(accesses(tmp_path, text, "tests/runtime/test_clock.py")) == 1
    text = "from tiny.runtime._clock import _now"
    assert len(accesses(tmp_path, text, "src/tiny/runtime/engine.py")) == 1


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("import os\nos._exit(3)", "os._exit"),
        ("from os import _exit", "os._exit"),
        ('monkeypatch.setattr("os._exit", stop)', "os._exit"),
        ("import torch as t\nt._utils._rebuild", "torch._utils"),
        ("pair._replace(a=1)", "._replace"),
    ],
)
def test_listed_privates_of_others_are_allowed(tmp_path, text, entry):
    found = accesses(tmp_path, text)
    assert found
    assert {access.foreign for access in found} == {entry}
    assert (
        list(check_privates([tmp_path / "src/tiny/room.py"], tmp_path, frozenset({"tiny"}))) == []
    )


def test_privates_of_ours_are_not_allowed_by_a_name_of_others(tmp_path):
    (found,) = accesses(tmp_path, "import hook\nhook._update")
    assert found.foreign == "hook._update"
    path = tmp_path / "src/tiny/room.py"
    (found,) = find_private_accesses(path, frozenset({"tiny", "hook"}))
    assert found.foreign is None
