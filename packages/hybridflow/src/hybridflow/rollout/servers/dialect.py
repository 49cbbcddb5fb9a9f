"""Interface to a rollout server, whatever its software.

A server's weights have a label, which it reports: an integer for weights loaded from here,
`LOADING` and the integer while they are being loaded, and any other text for the initial weights.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple, Protocol, runtime_checkable

from hybridflow.rollout.sampling import Sampling
from shared.errors import CommError

__all__ = ["LOADING", "Completion", "Dialect", "Weights", "swap"]

LOADING = "loading-"
"""Prefix of the label while weights are being replaced, or if replacing them was interrupted."""


class Completion(NamedTuple):
    """One response.

    Attributes:
        tokens: of the response, its end token included.
        log_probs: one for each token.
        reason: why it ended, as the server reports.
        label: of the weights when it ended, or the labels of all weights used for it.
    """

    tokens: list[int]
    log_probs: list[float]
    reason: str
    label: str

    def check(self, sampling: Sampling, before: str, where: str) -> None:
        """Checks that the response is complete, and made by one version of the weights.

        Args:
            sampling: the settings requested.
            before: the label of the weights when it began.
            where: prefix of the error message.

        Raises:
            CommError: if the response fails either check.
        """
        if self.label != before:
            raise CommError(
                f"{where} began with weights {before!r} and ended with {self.label!r}; load no "
                f"weights from elsewhere while responses are in progress"
            )
        count = len(self.tokens)
        has_ended = count and self.tokens[-1] in sampling.end_tokens
        is_whole = count == sampling.max_new_tokens or (
            has_ended and count < sampling.max_new_tokens
        )
        if not is_whole or len(self.log_probs) != count:
            raise CommError(
                f"{where} has {count} tokens and {len(self.log_probs)} log-probabilities, and ends "
                f"with {self.tokens[-1:]} because of {self.reason!r}; expected an end "
                f"token of {list(sampling.end_tokens)} or {sampling.max_new_tokens} tokens; check that "
                f"the server's own end tokens are the same"
            )


class Weights(NamedTuple):
    """Folder of weights as the server sees it, None if unknown, and their label."""

    folder: str | None
    label: str


@runtime_checkable
class Dialect(Protocol):
    """The requests of one kind of server software."""

    def check(self, sampling: Sampling) -> None:
        """Raises ConfigError if the server would draw from another distribution than asked."""

    def weights(self) -> Weights:
        """Folder and label of the server's current weights."""
        ...

    def complete(self, prompt: list[int], sampling: Sampling, seed: int) -> Completion:
        """Generates one response."""
        ...

    def hold(self) -> None:
        """Waits until no response is in progress, and starts no more until `release`."""

    def release(self) -> None:
        """Allows responses to start again."""

    def read(self, folder: str) -> None:
        """Loads weights from a folder; if that fails they may be partly replaced."""

    def name(self, label: str) -> None:
        """Sets the label of the weights."""


def swap(server: Dialect, old: Weights, new: Weights) -> None:
    """Replaces a server's weights while no response is in progress.

    If that fails the old weights are loaded again, if their folder is known; otherwise the label
    keeps the prefix `LOADING`, and a server that can pause stays paused, as its weights may be torn.

    Raises:
        CommError: if the weights were not replaced.
    """
    try:
        server.hold()
        # From here on the label shows a crash to the next caller.
        server.name(LOADING + new.label)
    except CommError:
        # No weights were touched. The server may still pause later, once its responses have ended.
        with suppress(CommError):
            server.release()
        raise
    try:
        server.read(str(new.folder))
        server.name(new.label)
    except CommError:
        if old.folder is not None:
            server.read(old.folder)
            server.name(old.label)
            server.release()
        raise
    server.release()
