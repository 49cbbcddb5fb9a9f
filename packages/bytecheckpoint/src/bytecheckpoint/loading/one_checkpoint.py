"""Loads one checkpoint from a path, without a run around it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.loading.loading import Dedupe, LoadReport, load_state
from bytecheckpoint.loading.rates import Rates
from bytecheckpoint.loading.source import split_url
from bytecheckpoint.ranks.team import Team
from bytecheckpoint.storage import open_storage
from shared.comms import ProcessGroup

__all__ = ["load"]


def load(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    strict: bool = True,
    atomic: bool = False,
    verify: bool = True,
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
    dedupe: Dedupe = "auto",
    rates: Rates | None = None,
    num_threads: int | None = None,
    process_group: ProcessGroup | None = None,
) -> LoadReport:
    """Loads one checkpoint into a state in any layout; called by all ranks.

    Args:
        path: path of its folder: ours, torch DCP's, or one of safetensors files ("hf://" may stand
            before it).
        state: as for saving; tensors are written to in place. A state with only some of the saved
            keys loads only those.
        strict: whether state and checkpoint must have the same names below these keys.
        atomic: leave every destination as it was if the load fails; takes memory for a second copy.
        verify: compare every block with its checksum before it is used.
        cast: convert elements whose type differs from the checkpoint's.
        rename: beginnings of names in the state by those in the checkpoint, as
            {"model.encoder.": "model.backbone."}; an optimizer's state follows its parameters.
        dedupe: "always": data that several ranks need is read once and sent to the others;
            "never": each rank reads all it needs; "auto": whichever `rates` predict to be faster.
        rates: rates of storage and network, for "auto"; measured by default.
        num_threads: number of parallel reads per rank; None: chosen by kind of storage.
        process_group: the ranks that load together; None: all of the world.

    Returns:
        A report of what was read, and how.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DataError: it is damaged or does not fit; all ranks raise.
    """
    root, name = split_url(os.fspath(path))
    return load_state(
        Team(process_group),
        open_storage(root),
        name,
        state,
        strict=strict,
        atomic=atomic,
        verify=verify,
        cast=cast,
        rename=rename,
        dedupe=dedupe,
        rates=rates,
        num_threads=num_threads,
    )
