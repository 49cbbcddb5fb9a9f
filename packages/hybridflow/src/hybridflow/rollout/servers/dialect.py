"""What a rollout server is asked, whatever its make.

A server's weights have a label, which it tells: an integer for weights that were loaded from here,
`LOADING` before one while they are loaded, and something else for those it was started with.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple, Protocol, runtime_checkable

from hybridflow.rollout.sampling import Sampling
from shared.errors import CommError

__all__ = ["LOADING", "Completion", "Dialect", "Weights", "swap"]

LOADING = "loading-"
"""Begins the label of a server whose weights are being replaced, or were left half replaced."""


class Completion(NamedTuple):
    """One response.

    Attributes:
        tokens: its end token included.
        log_probs: one for each token.
        reason: why it ended, as the server says.
        label: of the weights that the server had when it ended, or of all that it had meanwhile.
    """

    tokens: list[int]
    log_probs: list[float]
    reason: str
    label: str

    def check(self, sampling: Sampling, before: str, where: str) -> None:
        """Refuses a response that is not whole, or not of one version of the weights.

        Args:
            sampling: what was asked for.
            before: the label of the weights when it began.
            where: begins the message.

        Raises:
            CommError: if it is either.
        """
        if self.label != before:
            raise CommError(
                f"{where} began with weights {before!r} and ended with {self.label!r}; let nobody "
                f"else load weights while responses are under way"
            )
        count = len(self.tokens)
        has_ended = count and self.tokens[-1] == sampling.end_token
        is_whole = count == sampling.max_new_tokens or (
            has_ended and count < sampling.max_new_tokens
        )
        if not is_whole or len(self.log_probs) != count:
            raise CommError(
                f"{where} has {count} tokens and {len(self.log_probs)} log-probabilities, and ends "
                f"with {self.tokens[-1:]} because of {self.reason!r}; expected end token "
                f"{sampling.end_token} or {sampling.max_new_tokens} tokens. Is the model's own end "
                f"token another?"
            )


class Weights(NamedTuple):
    """Where weights lie, as the server sees it and if that is known, and what they are called."""

    folder: str | None
    label: str


@runtime_checkable
class Dialect(Protocol):
    """One make of server."""

    def check(self, sampling: Sampling) -> None:
        """Raises ConfigError if the server would draw from another distribution than asked."""

    def weights(self) -> Weights:
        """What the server has now."""
        ...

    def complete(self, prompt: list[int], sampling: Sampling, seed: int) -> Completion:
        """Draws one response."""
        ...

    def hold(self) -> None:
        """Waits until no response is under way, and lets none begin."""

    def release(self) -> None:
        """Lets responses begin again."""

    def read(self, folder: str) -> None:
        """Replaces the weights by a folder's; if that fails they may be partly replaced."""

    def name(self, label: str) -> None:
        """Gives the weights a label."""


def swap(server: Dialect, old: Weights, new: Weights) -> None:
    """Replaces a server's weights when no response is under way.

    If that fails the old ones are put back, where it is known how; otherwise the label keeps saying
    that weights are being loaded.

    Raises:
        CommError: if they were not replaced.
    """
    try:
        server.hold()
    except CommError:
        # It may yet hold, when the responses under way have ended.
        with suppress(CommError):
            server.release()
        raise
    try:
        # A crash from here on is seen by whoever asks next.
        server.name(LOADING + new.label)
        server.read(str(new.folder))
        server.name(new.label)
    except CommError:
        if old.folder is not None:
            server.read(old.folder)
            server.name(old.label)
            server.release()
        raise
    server.release()
