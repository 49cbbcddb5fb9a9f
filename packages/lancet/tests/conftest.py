"""Lets tests import the models that several of them use, and gives them two ranks."""

import sys
from datetime import timedelta
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def pool():
    from lancet_models import MODULES

    from shared.comms import RankPool

    with RankPool(2, timeout=timedelta(minutes=5), modules=MODULES) as ranks:
        yield ranks
