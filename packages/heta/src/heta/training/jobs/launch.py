"""Starts ranks on this machine, or joins those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from shared.comms import RankPool, init_from_env
from shared.errors import ConfigError

__all__ = ["MODULES", "run_in_ranks"]

MODULES = ("torch._dynamo", "heta.training.trainer")
"""Imported once, in the process that ranks are forked from; every optimizer imports the first."""

# How long one message may take, and a whole run.
_MESSAGE_LIMIT, _RUN_LIMIT = timedelta(minutes=10), timedelta(days=20)


def run_in_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on every rank and returns what the first returned, None on torchrun's others.

    Args:
        num_ranks: ranks to start here; under torchrun they run already.
        function: defined at the top level of a file.
        args: its arguments.

    Raises:
        ConfigError: the number of ranks is invalid.
        RankFailure: a rank failed.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        group = init_from_env(_MESSAGE_LIMIT)
        result = function(*args)
        return result if group.rank == 0 else None
    if num_ranks < 1:
        raise ConfigError(f"ranks: expected 1 or more, got {num_ranks}")
    if num_ranks == 1:
        return function(*args)
    with RankPool(num_ranks, timeout=_MESSAGE_LIMIT, modules=MODULES) as pool:
        return pool.run(function, *args, timeout=_RUN_LIMIT).results[0]
