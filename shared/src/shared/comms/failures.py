"""Which errors are those of messages, as torch's own collectives raise them."""

from __future__ import annotations

from torch import distributed as dist

from shared.errors import CommError

__all__ = ["is_message_failure"]


def is_message_failure(error: BaseException | None) -> bool:
    """Whether an error, or one that it follows from, is a message's that failed.

    gloo's are plain RuntimeErrors, which name the line of gloo's code that they come from.
    """
    while error is not None:
        if isinstance(error, CommError | dist.DistError) or "gloo" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False
