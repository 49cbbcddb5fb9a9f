"""Exceptions that Meshyard raises for users.

Each message says what was expected, what was got (value, rank, file or key) and what to do next.
Invariants of the code itself are asserted instead.
"""

__all__ = ["CommError", "ConfigError", "DataError", "MeshyardError", "RankFailure", "TopologyError"]


class MeshyardError(Exception):
    """Base class of all of Meshyard's exceptions."""


class ConfigError(MeshyardError, ValueError):
    """A setting is outside its range or contradicts another; the message gives its path."""


class TopologyError(MeshyardError, ValueError):
    """A cluster, mesh or partition is malformed or does not match its use."""


class DataError(MeshyardError, ValueError):
    """Input data cannot be used as given: wrong shape, range, type or file content."""


class CommError(MeshyardError, RuntimeError):
    """A message between ranks was not delivered, or does not match what was announced."""


class RankFailure(MeshyardError, RuntimeError):
    """A rank raised, died or ran out of time; the message carries the rank's own traceback."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
