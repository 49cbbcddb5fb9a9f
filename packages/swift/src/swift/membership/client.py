"""Questions to a run's first supervisor, from another process."""

from __future__ import annotations

import select
import tempfile
from pathlib import Path
from typing import Any

from shared.errors import CommError, ConfigError
from shared.process_mark import is_alive
from swift.membership.channel import ControlChannel

__all__ = ["RUN_PREFIX", "ask", "describe_stranger"]

RUN_PREFIX = "meshyard-swift-"
"""Folders of runs, in the folder for temporary files, begin with it."""
WAIT_S = 5.0


def ask(address: str | None, request: dict[str, Any]) -> dict[str, Any]:
    """Asks a run.

    Args:
        address: "host:port" of its first supervisor; None: the newest run of this host.
        request: of kind "status" or "inject".

    Returns:
        The answer.

    Raises:
        ConfigError: there is no such run, or it cannot do what was asked.
        CommError: it does not answer, or something else does.
    """
    host, _, port = (address or _newest()).rpartition(":")
    try:
        channel = ControlChannel.connect((host, int(port)), WAIT_S)
    except (OSError, ValueError) as error:
        raise CommError(
            f"expected a run's first supervisor at {host}:{port}, got {error}; is it running?"
        ) from error
    channel.send(request)
    if not select.select([channel], [], [], WAIT_S)[0]:
        raise CommError(describe_stranger(host, port, f"no answer in {WAIT_S:g} s"))
    for answer in channel.messages():
        channel.close()
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer
    if channel.stray:
        raise CommError(describe_stranger(host, port, repr(channel.stray[:40])))
    raise CommError(f"the run at {host}:{port} ended before it answered; ask again if it runs")


def describe_stranger(host: str, port: int | str, gave: str) -> str:
    """The sentence on a port where something else listens than a run's first supervisor."""
    return (
        f"{host}:{port}: expected a run's first supervisor, something else listens there and gave "
        f"{gave}; give the address of `meshyard-swift run`"
    )


def _newest() -> str:
    folders = [
        path
        for path in Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*")
        if is_alive(path.name.removeprefix(RUN_PREFIX)) and (path / "address").is_file()
    ]
    if not folders:
        raise ConfigError(
            "expected a run on this host, got none; start one by meshyard-swift run, or give --at "
            "host:port of a run elsewhere"
        )
    newest = max(folders, key=lambda path: path.stat().st_mtime)
    return (newest / "address").read_text()
