"""What may come over the first supervisor's port: kinds of messages, and what each must have."""

from __future__ import annotations

from typing import Any

__all__ = ["is_known"]

_Types = type | tuple[type, ...]
_RANK = (int, type(None))
_FIELDS: dict[str, dict[str, _Types]] = {
    # Of other hosts' supervisors.
    "hello": {
        "host": int,
        "start": str,
        "world_size": int,
        "num_ranks": int,
        "heartbeat_s": (int, float),
        "starts": list,
    },
    "started": {"name": str, "rank": _RANK},
    "from": {"name": str, "message": dict},
    "gone": {
        "name": str,
        "how": str,
        "status": (int, type(None)),
        "silent_s": (int, float),
    },
    "beat": {},
    # Of commands.
    "status": {},
    "inject": {"fault": str, "rank": int, "seconds": (int, float)},
}


def is_known(message: dict[str, Any]) -> bool:
    """Whether a message is of a kind that a supervisor or a command sends, with all its fields."""
    fields = _FIELDS.get(str(message.get("kind")))
    return fields is not None and all(
        name in message and isinstance(message[name], types) for name, types in fields.items()
    )
