"""Fixtures that several test files share."""

from datetime import timedelta

import pytest

from shared.comms import RankPool

from .s3server import s3, s3_server

__all__ = ["pool", "s3", "s3_server"]


@pytest.fixture(scope="session")
def pool():
    """Two ranks for the tests that leave them alive."""
    with RankPool(2, timeout=timedelta(seconds=60)) as ranks:
        yield ranks
