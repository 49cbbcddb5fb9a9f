"""Questions to a run's first supervisor, from another process."""

from __future__ import annotations

import select
import tempfile
from pathlib import Path
from typing import Any

from shared.errors import CommError, ConfigError
from shared.process_mark import is_alive
from swift.membership.channel import ControlChannel

__all__ = ["RUN_PREFIX", "ask", "describe_stranger", "parse_address"]

RUN_PREFIX = "meshyard-swift-"
"""Folders of runs, in the folder for temporary files, begin with it."""
WAIT_S = 5.0
START_S = 60.0
"""Longest wait for a run of this host, which answers once it has imported torch and started its processes."""


def ask(address: str | None, request: dict[str, Any]) -> dict[str, Any]:
    """Asks a run.

    Args:
        address: "host:port" of its first supervisor; None: the newest run of this host.
        request: of kind "status" or "inject".

    Returns:
        The answer.

    Raises:
        ConfigError: the address cannot be parsed, there is no such run, or it cannot do what was asked.
        CommError: it does not answer, or something else does.
    """
    host, port = parse_address(address or _newest())
    try:
        channel = ControlChannel.connect((host, port), WAIT_S)
    except OSError as error:
        raise CommError(
            f"expected a run's first supervisor at {host}:{port}, got {error}; is it running?"
        ) from error
    channel.send(request)
    limit_s = START_S if address is None else WAIT_S
    if not select.select([channel], [], [], limit_s)[0]:
        if address is None:
            raise CommError(
                f"the run at {host}:{port} lives, but has not answered in {limit_s:g} s; it is starting, or "
                f"stopped: ask again later"
            )
        gave = f"no answer in {limit_s:g} s, or it is a run that is starting: then ask again"
        raise CommError(describe_stranger(host, port, gave))
    for answer in channel.messages():
        channel.close()
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer
    if channel.stray:
        raise CommError(describe_stranger(host, port, repr(channel.stray[:40])))
    raise CommError(f"the run at {host}:{port} ended before it answered; ask again if it runs")


def parse_address(text: str) -> tuple[str, int]:
    """Reads "host:port"; an IPv6 host stands in brackets.

    Raises:
        ConfigError: it is no such text.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ConfigError(
            f"expected an address host:port, got {text!r}; give it as in 10.0.0.1:29500 or [::1]:29500"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


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
