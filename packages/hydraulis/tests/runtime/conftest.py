"""Ranks that the tests of this folder share: to start them takes longer than most tests."""

import pytest

from shared.comms import RankPool


@pytest.fixture(scope="package")
def ranks():
    with RankPool(4) as pool:
        yield pool
