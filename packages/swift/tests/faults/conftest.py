import json

import launching
import pytest
from launching import STEPS


@pytest.fixture(scope="session")
def undisturbed(driver, tmp_path_factory):
    """Digest of each step of a run without faults, by optimizer and options; each once."""
    known = {}

    def states(**given):
        key = json.dumps(given, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            driver.train(folder, "-n", "3", "--spares", "0", steps=STEPS, **given)
            assert launching.failures(folder) == []
            known[key] = launching.states(folder)
            assert sorted(known[key]) == list(range(STEPS + 1))
            assert all(len(found) == 1 for found in known[key].values())
        return known[key]

    return states
