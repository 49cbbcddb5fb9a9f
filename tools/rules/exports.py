"""Imports every module of packages in a fresh process, and says what that changed.

Importing a module binds its name in the package around it: a room `load` would take the place of an
exported function `load`, from the first import on and for everybody.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from rules.package import Package

__all__ = ["Imported", "import_all"]

_PROGRAM = """
import importlib, json, sys
answer = {}
for name, modules in json.load(sys.stdin).items():
    package = importlib.import_module(name)
    before = {each: getattr(package, each) for each in package.__all__}
    missing = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] in sys.argv[1:]:
                raise
            missing[module] = error.name
    changed = [each for each in before if getattr(package, each) is not before[each]]
    answer[name] = [changed, missing]
print(json.dumps(answer))
"""


class Imported(NamedTuple):
    """The exported names that are no longer what they were, and modules not imported.

    `missing` holds the library that is not installed, by the module that needs it.
    """

    changed: list[str]
    missing: dict[str, str]


def import_all(packages: list[Package], sources: list[Path]) -> dict[str, Imported]:
    """Imports all modules of packages, in one process as no package imports another.

    Args:
        packages: What is imported; a `__main__` is left out, as importing one runs it.
        sources: The folders that the packages and what they need are imported from.

    Returns:
        For each package, by name, what importing its modules changed.

    Raises:
        RuntimeError: A module of ours cannot be imported, and not for want of a library.
    """
    asked = {
        package.name: [name for name in package.modules if not name.endswith(".__main__")]
        for package in packages
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *asked],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"expected all modules to be importable, got\n{done.stderr}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return {name: Imported(*each) for name, each in answer.items()}
