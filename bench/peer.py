"""Peers that cannot share our environment, driven as child processes in the same run.

A peer's pins stand in bench/peers/NAME.txt and `python tools/peer_env.py NAME` makes its
environment. Its script reads one JSON object a line and answers each with one, so that a benchmark
can take turns with it: ours, the peer, ours, the peer, on the same input.
"""

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Peer", "missing_peer"]

HOME = Path(__file__).parent


def missing_peer(name: str, home: Path = HOME) -> str | None:
    """Returns why a peer cannot run, or None when its environment is complete."""
    if (home / ".peers" / name / "complete").is_file():
        return None
    return f"peer {name!r} is not installed: python tools/peer_env.py {name}"


class Peer:
    """A running peer; a context manager that ends it.

    Args:
        name: the peer, as in bench/peers.
        script: what runs in its environment.
        home: the folder of bench; another one in tests.
    """

    def __init__(self, name: str, script: Path, home: Path = HOME) -> None:
        reason = missing_peer(name, home)
        if reason:
            raise FileNotFoundError(reason)
        self.name = name
        self._child = subprocess.Popen(
            [home / ".peers" / name / "bin" / "python", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends one message and returns the answer.

        Args:
            message: anything `json` can write on one line.

        Raises:
            RuntimeError: when the peer ended or answered with something else than JSON.
        """
        assert self._child.stdin is not None, "the child was started with pipes"
        assert self._child.stdout is not None, "the child was started with pipes"
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
            return json.loads(self._child.stdout.readline())
        except (BrokenPipeError, ValueError) as error:
            status = self._child.poll()
            raise RuntimeError(
                f"peer {self.name!r}: expected one line of JSON, got none that reads "
                f"(exit status {status}); its stderr stands above"
            ) from error

    def __enter__(self) -> "Peer":
        """Returns the peer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the peer's input, which ends it, and kills one that stays."""
        assert self._child.stdin is not None, "the child was started with pipes"
        try:
            self._child.stdin.close()
            self._child.wait(timeout=5.0)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._child.kill()
            self._child.wait()
        finally:
            assert self._child.stdout is not None, "the child was started with pipes"
            self._child.stdout.close()
