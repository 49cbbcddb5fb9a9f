"""Texts that all ranks share before they act on them."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

import torch
from torch import Tensor

from shared.comms import Group, all_gather_v
from shared.errors import CommError, ConfigError, DataError

__all__ = ["check_same", "run_on_all", "share_text", "share_texts"]

_Result = TypeVar("_Result")


def share_texts(group: Group, text: str) -> list[str]:
    """Each rank's text, on every rank of a gloo group.

    Raises:
        CommError: a rank died or the timeout passed.
    """
    return [_decode(part) for part in all_gather_v(group, _encode(text))]


def share_text(group: Group, text: str | None) -> str:
    """The text of the group's first rank, on every rank; other ranks pass None.

    Raises:
        CommError: a rank died or the timeout passed.
    """
    return share_texts(group, text or "")[0]


def check_same(group: Group, name: str, text: str) -> None:
    """Checks that all ranks of a gloo group have the same text, by digest.

    Args:
        group: the ranks, all of which call this.
        name: what the text is, for the error.
        text: this rank's.

    Raises:
        DataError: a rank has another one; raised on every rank, with all digests.
        CommError: a rank died or the timeout passed.
    """
    digests = share_texts(group, sha256(text.encode()).hexdigest()[:16])
    if len({*digests}) > 1:
        raise DataError(
            f"{name}: expected the same on all ranks, got the digests {', '.join(digests)} on ranks 0 "
            f"to {len(digests) - 1}; nothing was launched: start all ranks again, with one release of "
            f"lancet and torch"
        )


def run_on_all(group: Group, function: Callable[[], _Result]) -> _Result:
    """Result of a function on this rank, once it has ended on all ranks of a gloo group.

    Raises:
        ConfigError: it failed on a rank, with whatever error; raised on every rank.
        CommError: a rank died or the timeout passed.
    """
    results, reason = [], ""
    try:
        results.append(function())
    except CommError:
        raise
    except Exception as error:  # noqa: BLE001 - the others wait for this rank
        reason = str(error) if isinstance(error, ConfigError) else repr(error)
    reasons = share_texts(group, reason)
    if len({*reasons}) > 1:
        reason = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text)
    if reason:
        raise ConfigError(reason)
    return results[0]


def _encode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else _EMPTY


def _decode(part: Tensor) -> str:
    return bytes(part.numpy()).decode()


_EMPTY = torch.empty(0, dtype=torch.uint8)
