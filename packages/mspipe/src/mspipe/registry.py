"""Registries of models, modes of overlap, and ways to cut a stream into batches.

The command line, the checks and the pipeline read them. Nothing heavy is imported here: an entry
given as "module:attribute" is imported when it is first used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError
from shared.registry import Registry

__all__ = ["CUTS", "MODELS", "MODES", "Mode"]

MODELS: Registry[str, Any] = Registry("model")
"""Subclasses of `MemoryModel`, created with `dim`, `edge_dim` and, if they take it, `fanout`."""
MODELS.add("tgn", "mspipe.models.tgn:TGN", "a GRU over messages, attention over neighbours")
MODELS.add("jodie", "mspipe.models.jodie:JODIE", "a recurrent cell, states that drift with time")
MODELS.add("apan", "mspipe.models.apan:APAN", "attention over a mailbox that neighbours fill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How the stages of different iterations overlap.

    Attributes:
        is_overlapped: stages of different iterations run at the same time.
        is_forwarding: rows whose write is under way are taken from the iteration that writes them,
            so that no fetch waits for the last `depth` writes; exact.
        is_stale: a fetch may miss the last `max_staleness` - 1 writes.

    Raises:
        ConfigError: both forwarding and stale.
    """

    is_overlapped: bool = True
    is_forwarding: bool = False
    is_stale: bool = False

    def __post_init__(self) -> None:
        if self.is_forwarding and self.is_stale:
            raise ConfigError(
                "Mode: expected at most one of is_forwarding and is_stale, got both; a forwarded row "
                "is never stale"
            )


MODES: Registry[str, Mode] = Registry("mode")
MODES.add("sync", Mode(is_overlapped=False), "one stage after another")
MODES.add("prefetch", Mode(), "memory is fetched ahead, once the write before it is done")
MODES.add("forward", Mode(is_forwarding=True), "exact, and no fetch waits for a write")
MODES.add("stale", Mode(is_stale=True), "a fetch may miss the last writes, as MSPipe has it")

CUTS: Registry[str, Any] = Registry("cut")
"""Functions of `Events`, batch size and seed that return the bounds of batches."""
CUTS.add("uniform", "mspipe.data.batching:uniform_bounds", "all batches of one size")
CUTS.add("random-start", "mspipe.data.batching:random_start_bounds", "a first batch of random size")
CUTS.add("adaptive", "mspipe.data.batching:adaptive_bounds", "as far as memory stays as fresh")
