import pytest

from shared.comms import RankPool


@pytest.fixture(scope="package")
def two_ranks():
    """Two processes, each a rank of a world."""
    with RankPool(2) as pool:
        yield pool
