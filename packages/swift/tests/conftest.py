import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "faults")]

import launching


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """Does runs of `meshyard-swift run`; all tests share its templates."""
    found = launching.Driver(tmp_path_factory.mktemp("driver"))
    yield found
    found.close()
