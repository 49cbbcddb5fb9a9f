"""Two ranks for all tests of this folder that leave them alive."""

from datetime import timedelta

import pytest

from shared.comms import RankPool


@pytest.fixture(scope="session")
def pool():
    with RankPool(2, timeout=timedelta(seconds=60)) as ranks:
        yield ranks
