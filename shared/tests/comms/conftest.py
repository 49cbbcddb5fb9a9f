"""Pools that the tests of this folder share; starting one takes seconds.

The fixtures are no generators because the import hook, which takes this file for a part of
`shared`, wraps their functions so that pytest would not see them as such.
"""

from contextlib import ExitStack

import pytest

from shared.comms import RankPool


@pytest.fixture(scope="module")
def entered(request):
    """Enters a context manager until the end of the file."""
    stack = ExitStack()
    request.addfinalizer(stack.close)  # noqa: PT021 - see above
    return stack.enter_context


@pytest.fixture(scope="module")
def pool(entered):
    """Two ranks for all tests of one file."""
    return entered(RankPool(2))


@pytest.fixture(scope="module")
def pool_of_four(entered):
    """Four ranks, where two would not show a ring or a tree."""
    return entered(RankPool(4))
