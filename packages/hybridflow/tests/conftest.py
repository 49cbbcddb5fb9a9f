"""What several of hybridflow's test files share."""

from datetime import timedelta

import pytest


@pytest.fixture(scope="session")
def pools():
    """Two processes, each a pool of its own; started once, as each imports torch."""
    import hybridflow as hy

    with hy.Workers.local(2, timeout=timedelta(seconds=100)) as workers:
        yield workers.pool(1), workers.pool(1)
