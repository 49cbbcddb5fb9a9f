"""Exceptions that users of the yard meet.

Each message says what was expected, what came (value, rank, file or key) and what to do next.
Invariants of our own code are asserted instead.
"""

__all__ = ["CommError", "ConfigError", "DataError", "MeshyardError", "RankFailure", "TopologyError"]


class MeshyardError(Exception):
    """Base of every exception the yard raises on purpose."""


class ConfigError(MeshyardError, ValueError):
    """A setting is outside its range or contradicts another; the message gives its path."""


class TopologyError(MeshyardError, ValueError):
    """A cluster, mesh or partition does not describe what it is used for."""


class DataError(MeshyardError, ValueError):
    """Input data cannot be used as given: wrong shape, range, type or file content."""


class CommError(MeshyardError, RuntimeError):
    """A message did not arrive, or what arrived does not fit what was announced."""


class RankFailure(MeshyardError, RuntimeError):
    """A rank raised, died or ran out of time; the message carries the rank's own traceback."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
