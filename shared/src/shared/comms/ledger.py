"""Which rank sent and received how many bytes, by operation, peer and phase of the program.

Every collective and every round of `shared.comms` records here the payload it hands to the
transport, so that a report's figures can be compared with the network's own counters (frame headers
and acknowledgements are not counted). Peers are ranks of the world.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from shared.errors import ConfigError

__all__ = ["Ledger", "LedgerSnapshot", "Traffic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Payload bytes and messages of one cell (operation, peer, phase) of the ledger.

    Attributes:
        sent_bytes: bytes this rank handed to the transport.
        received_bytes: bytes this rank got from it.
        calls: messages sent and received, counted one by one.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    calls: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            received_bytes=self.received_bytes + other.received_bytes,
            calls=self.calls + other.calls,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(
            sent_bytes=self.sent_bytes - other.sent_bytes,
            received_bytes=self.received_bytes - other.received_bytes,
            calls=self.calls - other.calls,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerSnapshot:
    """A ledger's content at one moment; `diff` of two gives the traffic between them.

    Attributes:
        cells: traffic by (operation, peer, phase).
    """

    cells: Mapping[tuple[str, int, str], Traffic] = field(default_factory=dict)

    @property
    def total(self) -> Traffic:
        """Sum over all cells."""
        return sum(self.cells.values(), Traffic())

    @property
    def sent_bytes(self) -> int:
        """Bytes sent, all operations, peers and phases together."""
        return self.total.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes received, all operations, peers and phases together."""
        return self.total.received_bytes

    def by_op(self) -> dict[str, Traffic]:
        """Traffic by operation, as "all_reduce" or "rounds"."""
        return self._grouped(0)

    def by_peer(self) -> dict[int, Traffic]:
        """Traffic by the other end's rank in the world."""
        return self._grouped(1)

    def by_phase(self) -> dict[str, Traffic]:
        """Traffic by phase; traffic recorded outside any phase is under ""."""
        return self._grouped(2)

    def diff(self, earlier: LedgerSnapshot) -> LedgerSnapshot:
        """Traffic added since `earlier`, a snapshot of the same ledger."""
        cells = {key: cell - earlier.cells.get(key, Traffic()) for key, cell in self.cells.items()}
        return LedgerSnapshot(cells={key: cell for key, cell in cells.items() if cell.calls})

    def to_json(self) -> str:
        """JSON array of cells with op, peer, phase, sent_bytes, received_bytes and calls."""
        rows = [
            {
                "op": op,
                "peer": peer,
                "phase": phase,
                "sent_bytes": cell.sent_bytes,
                "received_bytes": cell.received_bytes,
                "calls": cell.calls,
            }
            for (op, peer, phase), cell in sorted(self.cells.items())
        ]
        return json.dumps(rows)

    def _grouped(self, position: int) -> dict:
        grouped: dict = {}
        for key, cell in sorted(self.cells.items()):
            grouped[key[position]] = grouped.get(key[position], Traffic()) + cell
        return grouped


class Ledger:
    """Adds up payload bytes; safe to write from several threads.

    Example:
        >>> ledger = Ledger()
        >>> with ledger.phase("forward1"):
        ...     ledger.record("rounds", 1, 4096, direction="sent")
        >>> ledger.snapshot().by_phase()["forward1"].sent_bytes
        4096
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[str, int, str], Traffic] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def record(
        self,
        op: str,
        peer: int,
        num_bytes: int,
        phase: str | None = None,
        *,
        direction: Literal["sent", "received"] = "sent",
    ) -> None:
        """Add one message.

        Args:
            op: name of the operation.
            peer: the other end's rank in the world.
            num_bytes: payload of the message.
            phase: name of the program's phase; the thread's open phase when None.
            direction: whether this rank sent or received it.

        Raises:
            ConfigError: if the direction is neither or the bytes are negative.
        """
        if direction not in ("sent", "received") or num_bytes < 0:
            raise ConfigError(
                f"a ledger takes a non-negative number of bytes 'sent' or 'received', "
                f"not {num_bytes} {direction!r}"
            )
        key = (op, peer, self.current_phase if phase is None else phase)
        sent = num_bytes if direction == "sent" else 0
        cell = Traffic(sent_bytes=sent, received_bytes=num_bytes - sent, calls=1)
        with self._lock:
            self._cells[key] = self._cells.get(key, Traffic()) + cell

    @property
    def current_phase(self) -> str:
        """The innermost phase open in this thread, "" outside any."""
        return getattr(self._local, "phase", "")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record this thread's traffic inside the block under the phase `name`."""
        outer = self.current_phase
        self._local.phase = name
        try:
            yield
        finally:
            self._local.phase = outer

    def snapshot(self) -> LedgerSnapshot:
        """The content now; later messages do not change it."""
        with self._lock:
            return LedgerSnapshot(cells=dict(self._cells))

    @property
    def sent_bytes(self) -> int:
        """Bytes sent so far."""
        return self.snapshot().sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes received so far."""
        return self.snapshot().received_bytes

    def to_json(self) -> str:
        """The content now as JSON, in the form of `LedgerSnapshot.to_json`."""
        return self.snapshot().to_json()
