"""The key that a row server and its clients may share, and the proof that a client has it.

The key itself is never sent: the server sends random bytes, and the client answers with their
HMAC-SHA256 under the key. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import ConfigError

__all__ = [
    "DIGEST_BYTES",
    "KEY",
    "KEY_FILE",
    "answer_to",
    "check_key",
    "is_answer",
    "new_challenge",
    "read_key",
]

KEY, KEY_FILE = "MSPIPE_KEY", "MSPIPE_KEY_FILE"
"""Environment variables: the key, and the path of a file that holds it."""
DIGEST_BYTES = 32
_LEAST_BYTES = 16


def read_key(path: Path | None = None) -> bytes | None:
    """Reads the key from a file, or from where the environment says.

    Args:
        path: the file; without it, that of MSPIPE_KEY_FILE, and else MSPIPE_KEY is the key.

    Returns:
        The key without white space around it; None where none is named.

    Raises:
        ConfigError: the file cannot be read, or the key is shorter than 16 bytes.
    """
    if path is None and os.environ.get(KEY_FILE):
        path = Path(os.environ[KEY_FILE])
    try:
        key = os.environ.get(KEY, "").encode() if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"key: expected a file with the key, got {error}; write one: openssl rand -hex 32"
        ) from error
    if path is None and not key:
        return None
    return check_key(key.strip(), KEY if path is None else str(path))


def check_key(key: bytes, source: str) -> bytes:
    """Returns the key if it is long enough not to be guessed; `source` names it in the error."""
    if len(key) < _LEAST_BYTES:
        raise ConfigError(
            f"{source}: expected a key of at least {_LEAST_BYTES} bytes, got {len(key)}; "
            "make one: openssl rand -hex 32"
        )
    return key


def new_challenge() -> Tensor:
    """Random bytes that no other connection gets: uint8 [32]."""
    return torch.frombuffer(bytearray(secrets.token_bytes(DIGEST_BYTES)), dtype=torch.uint8)


def answer_to(challenge: Tensor, key: bytes) -> Tensor:
    """The proof of who has the key: uint8 [32]."""
    digest = hmac.digest(key, bytes(challenge.tolist()), "sha256")
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def is_answer(answer: Tensor, challenge: Tensor, key: bytes) -> bool:
    """Whether the proof is right, found in a time that tells nothing about the right one."""
    expected = answer_to(challenge, key)
    return hmac.compare_digest(bytes(answer.tolist()), bytes(expected.tolist()))
