"""What every test of the yard needs, in hatch's environment and in a package's own.

Runs before any test file is imported: it decides how Triton kernels run, gives torch one thread,
has the shapes and types in signatures checked at call time, lets pools wait for their ranks, seeds
each test, spares the garbage collector what was imported, gives Hypothesis no deadlines and,
without the slow tests, fewer examples and always the same, binds the name `shared` to the installed
package and lets Sybil run READMEs and pages. Each part steps aside when its library is not
installed, so that one package can be tested with nothing but its own `test` extra.
"""

import gc
import os
import random
import shutil
import subprocess
import sys
from contextlib import ExitStack
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# The mode is fixed for a process by the first import of triton, so it is set before all else.
if not shutil.which("nvidia-smi"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tensors of tests are small: OpenMP's threads would wait for one another far longer than they compute,
# and would take the cores from the ranks beside them. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_ROOT = Path(__file__).parent
_OURS = ["shared", *(path.parent.name for path in _ROOT.glob("packages/*/src/*/__init__.py"))]
# The hook wraps every function, which neither numba nor Triton can compile, and fixtures that yield
# are not what their signatures say.
_COMPILED = (".cpu", ".gpu", ".philox", "_compiled")

if find_spec("jaxtyping") and find_spec("beartype"):
    from beartype import BeartypeConf, beartype
    from jaxtyping import install_import_hook

    # The hook takes its checker by name. An int is a float to type checkers (PEP 484), so it is one
    # here, which beartype's own default is not.
    _checker: Any = ModuleType("_checked_signatures")
    _checker.check = beartype(conf=BeartypeConf(is_pep484_tower=True))
    sys.modules[_checker.__name__] = _checker
    _hook: Any = install_import_hook(_OURS, f"{_checker.__name__}.check").hook
    _takes = _hook.should_instrument
    _hook.should_instrument = lambda name: (
        _takes(name) and ".tests." not in name and not name.endswith(_COMPILED)
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Leaves signatures unchecked in tests marked so, fixtures included: checks multiply a training's time."""
    if item.get_closest_marker("unchecked") is None or not find_spec("jaxtyping"):
        return (yield)
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    try:
        return (yield)
    finally:
        config.update("jaxtyping_disable", False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Begins every test with the same random numbers, whatever tests have run before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Takes what imports have made out of the garbage collector's sight: a sixth of the tests' time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure():
    """Lets libraries clean up what they have made, or they complain of it at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _patient_pools():
    """Gives ranks long to report once another has failed, and to end: this machine may be busy."""
    pool = sys.modules.get("shared.comms.launch.pool")
    if pool is None:
        yield
        return
    before, pool.GRACE_S = pool.GRACE_S, 60.0
    yield
    pool.GRACE_S = before


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of so many bytes and gives its folder; where that is not allowed, skips the test."""
    with ExitStack() as mounted:

        def mount(num_bytes: int) -> Path:
            folder = tmp_path / f"disk-of-{num_bytes}"
            folder.mkdir()
            words = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"mounting a small disk needs root: {done.stderr.strip()}")
            mounted.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
            return folder

        yield mount


@pytest.fixture
def visits(tmp_path):
    """Writes so many visits as a user's table, and gives it and the options that name its columns.

    Users meet items of their own kind, every ten minutes; ids are texts, times dates.
    """

    def write(count: int = 240) -> tuple[Path, list[str]]:
        start = datetime(2024, 5, 1, 9)
        rows = [
            f"u{n % 9},{'apple' if n % 3 else 'bread'}{n % 4},"
            f"{(start + timedelta(minutes=10 * n)).isoformat()},{n % 5},x"
            for n in range(count)
        ]
        path = tmp_path / "visits.csv"
        path.write_text("\n".join(["user,item,when,amount,note", *rows]))
        return path, ["--src", "user", "--dst", "item", "--t", "when"]

    return write


if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # An example that takes long while the machine does something else is no failure.
    settings.register_profile(
        "many", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    # Always the same ones: who has changed nothing is told of nothing new.
    settings.register_profile(
        "few", settings.get_profile("many"), max_examples=30, derandomize=True, database=None
    )


def pytest_configure(config):
    """Gives properties few and fixed examples without the slow tests, and a hundred beside them."""
    if find_spec("hypothesis"):
        settings.load_profile("few" if "not slow" in config.option.markexpr else "many")


# Collecting shared/tests in importlib mode would otherwise bind the name to the folder shared/.
import shared  # noqa: F401

if find_spec("sybil"):
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

    pytest_collect_file = Sybil(
        parsers=[SkipParser(), PythonCodeBlockParser()], patterns=["README.md", "docs/*.md"]
    ).pytest()
