"""References to functions and classes by module and file, resolved in another process.

Pickle refers to a module by name, under which another process cannot import a test file, a script
or a benchmark. These references carry the file too: a module that can be imported is imported, any
other is loaded from its path, once, under its original name.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shared.errors import ConfigError

__all__ = ["found", "shipped"]


def shipped(target: Callable[..., Any]) -> tuple[str, str | None, str]:
    """The module name, file and qualified name of a function or class.

    Raises:
        ConfigError: if it is not defined at the top level of a file.
    """
    name = getattr(target, "__module__", None)
    qualname = getattr(target, "__qualname__", None)
    module = sys.modules.get(name) if name else None
    if qualname is None or module is None or "<" in qualname:
        raise ConfigError(
            f"a rank runs functions defined at the top level of a file, got {target!r}; move it "
            f"there and pass what it closes over as arguments"
        )
    file = getattr(module, "__file__", None)
    if name == "__main__":
        if file is None:
            raise ConfigError(
                f"{qualname} was defined in an interactive session, which a rank cannot read; "
                f"put it in a file and import it"
            )
        # `python -m package.module` knows the name under which a rank can import it.
        if module.__spec__ is not None:
            name = module.__spec__.name
    return str(name), None if file is None else os.path.abspath(file), qualname


def found(name: str, file: str | None, qualname: str) -> Any:
    """The function or class that `shipped` described, in this process.

    Raises:
        ImportError: if its module can neither be imported nor loaded.
    """
    target: Any = _module(name, file)
    for part in qualname.split("."):
        target = getattr(target, part)
    return target


def _module(name: str, file: str | None) -> ModuleType:
    """The module that defines a function: imported if possible, else loaded from its path."""
    if name == "__main__":
        ours = getattr(sys.modules[name], "__file__", None)
        if file is not None and ours is not None and os.path.abspath(ours) == file:
            return sys.modules[name]  # this process runs the same script
        # As multiprocessing does, so that the script's `__main__` guard does not run it again.
        name = "__mp_main__"
        if not _replaced:
            # multiprocessing registers this process's own main module under that name.
            sys.modules.pop(name, None)
    if name in sys.modules:
        return sys.modules[name]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and (file is None or spec.origin == file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file) if file else None
    if file is None or spec is None or spec.loader is None:
        raise ImportError(f"cannot load module {name!r} from {file!r}")
    _load_parent(name, file)
    module = importlib.util.module_from_spec(spec)
    # Under the parent's name, so that pickled instances of the file's classes find them.
    sys.modules[name] = module
    if name == "__mp_main__":
        _replaced.append(sys.modules["__main__"])
        sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    if name == "__mp_main__":
        module.__spec__ = None  # as for a script; else multiprocessing imports it by that name
    return module


def _load_parent(name: str, file: str) -> None:
    """Loads or makes the parent package that a module's relative imports need, from its folder."""
    parent = name.rpartition(".")[0]
    path = Path(file)
    folder = path.parent.parent if path.stem == "__init__" else path.parent
    if not parent or parent in sys.modules or folder.name != parent.rpartition(".")[2]:
        return
    init = folder / "__init__.py"
    if init.exists():
        _module(parent, str(init))
        return
    _load_parent(parent, str(init))
    sys.modules[parent] = ModuleType(parent)
    sys.modules[parent].__path__ = [str(folder)]


_replaced: list[ModuleType] = []  # keeps this process's replaced main module alive
