"""Ranks that the tests of this folder share: to start them takes longer than most tests."""

import pytest

from shared.comms import RankPool

MODULES = ("diffusionpipe.runtime.engine", "diffusionpipe.runtime.virtual")


@pytest.fixture(scope="package")
def ranks():
    with RankPool(4, modules=MODULES) as pool:
        yield pool


@pytest.fixture(scope="package")
def pair():
    with RankPool(2, modules=MODULES) as pool:
        yield pool
