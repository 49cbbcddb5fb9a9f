"""The rules of rooms and names find what is planted, and pass a package that keeps them."""

from pathlib import Path

import pytest

from rules import checks
from rules.docstrings import find_raised_errors
from rules.exports import import_all


def texts(violations):
    return [str(violation) for violation in violations]


def test_a_clean_package_breaks_no_rule(plant):
    package = plant()
    assert texts(checks.check_package(package, None, frozenset({"tiny"}))) == []
    assert import_all([package], [package.home.parent])["tiny"] == ([], {})


def test_a_room_that_takes_the_place_of_an_exported_function(plant):
    package = plant({"run.py": "STEPS = 1"})
    (found,) = texts(checks.check_room_names(package))
    assert "run.py: has the name of tiny.runtime.engine.run, which tiny exports" in found
    assert import_all([package], [package.home.parent])["tiny"].changed == ["run"]


def test_modules_that_need_a_library_are_named_and_broken_ones_refused(plant):
    package = plant({"extras.py": "import no_such_library"})
    sources = [package.home.parent]
    assert import_all([package], sources)["tiny"] == ([], {"tiny.extras": "no_such_library"})
    package = plant({"extras.py": "import tiny.no_such_room"})
    with pytest.raises(RuntimeError, match=r"no_such_room"):
        import_all([package], sources)


def test_a_crowded_top_level_and_a_crowded_folder(plant):
    files = {f"room{number}.py": "X = 1" for number in range(9)}
    assert texts(checks.check_entries(plant(files))) == []  # 3 + 9 entries
    package = plant({"room9.py": "X = 1"})
    (found,) = texts(checks.check_entries(package))
    assert found.endswith("src/tiny: expected at most 12 entries at the top level, got 13")
    # Thirteen files are too many entries, and not too many files as well.
    (found,) = texts(checks.check_entries(plant({"room10.py": "X = 1"})))
    assert found.endswith("at the top level, got 14")
    (package.home / "room10.py").unlink()
    (package.home / "room9.py").unlink()
    (package.home / "left/__pycache__").mkdir(parents=True)
    (package.home / "left/__pycache__/a.pyc").touch()  # what a moved folder leaves behind
    files = {f"runtime/step{number}.py": "X = 1" for number in range(10)}
    assert texts(checks.check_entries(plant(files))) == []
    (found,) = texts(checks.check_entries(plant({"runtime/step10.py": "X = 1"})))
    assert found.endswith("tiny/runtime: expected at most 12 files, got 13")


@pytest.mark.parametrize(
    ("file", "role"), [("settings.py", "config"), ("simulate/__init__.py", "simulator")]
)
def test_a_second_word_for_a_role(plant, file, role):
    (found,) = texts(checks.check_entries(plant({file: "X = 1"})))
    assert found.endswith(f"{file.split('/')[0]}: expected the name {role!r}")


@pytest.mark.parametrize("file", ["seat.py", "runtime/ray_places.py", "past/__init__.py"])
def test_a_file_name_that_says_nothing(plant, file):
    (found,) = texts(checks.check_file_names(plant({file: "X = 1"})))
    assert f"tiny/{file}: " in found


@pytest.mark.parametrize(
    "before",
    [
        "try:",
        "try:\n    pass\nexcept OSError:",
        "if 0:\n    pass\nelse:",
        "try:\n    pass\nfinally:",
    ],
)
def test_a_class_name_that_exists_twice(plant, before):
    text = f"{before}\n    class Plan: ..."
    package = plant({"runtime/plans.py": text + "\nfinally:\n    pass" * (before == "try:")})
    ((owner, found),) = checks.check_class_names([package])
    assert owner == "tiny"
    place = f"runtime/plans.py:{len(text.splitlines())}"
    assert f"{place}: class Plan stands in packages/tiny/src/tiny/planner.py:1" in str(found)


def test_a_class_name_that_two_packages_have(plant, monkeypatch):
    monkeypatch.setattr(checks, "SAME_ROLE", {"Plan": "what a planner decided"})
    packages = [
        plant({"data.py": "class Table: ..."}),
        plant({"cli.py": "class Table: ..."}, "two"),
    ]
    assert list(checks.check_class_names(packages)) == []  # a command, and a shared role
    packages[1] = plant({"cli.py": "", "data.py": "class Table: ..."}, "two")
    found = dict(checks.check_class_names(packages))
    assert sorted(found) == ["tiny", "two"]
    assert "class Table is also in packages/tiny/src/tiny/data.py:1" in str(found["two"])
    # An exported name stays, and the other makes room for it.
    face = (packages[0].home / "__init__.py").read_text()
    face = face.replace("from tiny import data", "from tiny.data import Table")
    face = face.replace('"data", "run"', '"Table", "run"')
    packages[0] = plant({"__init__.py": face, "data.py": "class Table: ..."})
    assert [owner for owner, _ in checks.check_class_names(packages)] == ["two"]
    # Of two exported names neither has the right of way.
    both = [packages[0], plant({"__init__.py": face, "data.py": "class Table: ..."}, "two")]
    assert [owner for owner, _ in checks.check_class_names(both)] == ["tiny", "two"]
    monkeypatch.setattr(
        checks, "EXPORTED_CLASHES", {"Table": {"tiny": "of rows", "two": "of contents"}}
    )
    assert list(checks.check_class_names(packages)) == []
    assert checks.unused_names(packages) == []
    assert checks.unused_names(packages[:1]) == ["Plan", "Table"]


def test_errors_of_exported_names_stand_in_their_docstrings(plant):
    package = plant(
        {
            "planner.py": """
                class Plan:
                    '''A plan.

                    Raises:
                        ConfigError: it is empty.
                    '''
                    def __init__(self, steps):
                        if not steps:
                            raise ConfigError("empty")
                        if len(steps) > 9:
                            raise DataError("long")
                    @property
                    def steps(self):
                        '''Steps.

                        Raises:
                            ValueError: when set.
                        '''
                        return self._check(1)
                    @steps.setter
                    def steps(self, steps):
                        raise ValueError(steps)
                    def _check(self, steps):
                        raise TypeError(steps)
                    def show(self):
                        '''Shows. A ConfigError: no more.'''
                        try:
                            self.steps = 1
                        except ValueError as error:
                            raise errors.ConfigError("shown") from error
                class Other:
                    def run(self):
                        raise TypeError
            """,
            "runtime/engine.py": """
                def run(plan):
                    '''Runs.

                    Raises:
                        DataErrors: of data.
                    '''
                    def inner():
                        raise ValueError
                    if plan:
                        raise
                    for step in plan:
                        raise step
                    assert inner
                    raise NotImplementedError
                    raise DataError
            """,
        }
    )
    found = [
        (Path(raised.place).name, raised.function, raised.error, raised.is_described)
        for raised in find_raised_errors(package)
    ]
    assert sorted(found) == [
        ("engine.py:15", "run", "DataError", False),
        ("planner.py:11", "Plan.__init__", "DataError", False),
        ("planner.py:22", "Plan.steps", "ValueError", True),
        ("planner.py:30", "Plan.show", "ConfigError", False),
        ("planner.py:9", "Plan.__init__", "ConfigError", True),
    ]
    assert len(list(checks.check_raises(package))) == 3
    (text,) = [text for text in texts(checks.check_raises(package)) if "engine.py" in text]
    place = "packages/tiny/src/tiny/runtime/engine.py:15"
    assert text == f"rule 10: {place}: run raises DataError: describe it under Raises"
