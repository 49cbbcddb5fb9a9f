"""The loop of a run whose ranks have done all steps."""

from types import SimpleNamespace

import pytest

from shared.errors import ConfigError
from swift.training.runtime import Run


def test_a_second_loop_is_refused():
    """Its ranks are released already: it would train nothing."""
    run = Run(SimpleNamespace(rank=0, world_size=1, is_released=True))
    with pytest.raises(
        ConfigError, match=r"expected one run.loop in a run, got a second one; train"
    ):
        run.loop(lambda step: None, None, until=1)
