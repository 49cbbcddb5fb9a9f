"""Texts that all ranks share before they act on them."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.comms import Group, all_gather_v

__all__ = ["share_text", "share_texts"]


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


def _encode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else _EMPTY


def _decode(part: Tensor) -> str:
    return bytes(part.numpy()).decode()


_EMPTY = torch.empty(0, dtype=torch.uint8)
