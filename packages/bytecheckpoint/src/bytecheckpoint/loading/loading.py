"""Loads a checkpoint into a state of any layout, verified, on all ranks or on none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from bytecheckpoint.loading.destinations import Destinations, find_destinations
from bytecheckpoint.loading.rates import Rates, measure, pays
from bytecheckpoint.loading.reader import (
    Unit,
    copy_parts,
    find_held_boxes,
    list_wants,
    match_parts,
    plan_units,
    read_units,
)
from bytecheckpoint.loading.shared_reads import plan_shared, run_shared
from bytecheckpoint.loading.source import Source, Summary, open_source
from bytecheckpoint.ranks.failure import Failure
from bytecheckpoint.ranks.team import Team
from bytecheckpoint.ranks.trace import Trace
from bytecheckpoint.state.describe import pause_collection
from bytecheckpoint.storage import Storage
from shared.errors import ConfigError
from shared.topology.boxes import Box

__all__ = ["Dedupe", "LoadReport", "load_state"]

_MAX_NAMED = 20

Dedupe = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did on this rank.

    Attributes:
        step: step of the checkpoint, None where it does not say.
        num_bytes: number of bytes of the elements that went into this rank's tensors.
        num_bytes_read: bytes this rank read from storage, for tensors and their checksums.
        is_shared: whether ranks read data once and sent it to each other.
        missing: names in the state but not in the checkpoint; if strict, those of plain values in
            dictionaries, which were removed.
        unexpected: names in the checkpoint but not in the state; those of plain values in
            dictionaries were added.
        seconds: duration of the load.
        trace: times of its stages.
    """

    step: int | None
    num_bytes: int
    num_bytes_read: int
    is_shared: bool
    missing: list[str]
    unexpected: list[str]
    seconds: float
    trace: Trace


@torch.no_grad()
@pause_collection()
def load_state(
    team: Team,
    storage: Storage,
    path: str,
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
) -> LoadReport:
    """Loads a checkpoint into a state; called by all ranks.

    Args:
        team: the ranks.
        storage: storage that holds the checkpoint.
        path: path of its folder.
        state: as for saving, in any layout; tensors are written to in place.
        strict: whether the state and the checkpoint must have the same names.
        atomic: copy only when everything has been read and verified on all ranks, so that a load
            that fails leaves every tensor as it was; takes memory for a second copy. Objects get
            theirs after that, and may still refuse it in `load_state_dict`.
        verify: compare every block with its checksum before it is used.
        cast: convert elements whose type differs from the checkpoint's.
        rename: see `bytecheckpoint.load`.
        dedupe: whether data that several ranks need is read once and sent to the others: "always",
            "never", or "auto", which decides by `rates`.
        rates: rates of storage and network; by default a first read and exchange are timed.
        num_threads: number of parallel reads; None: chosen by kind of storage.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DataError: it is damaged, or does not fit the state; all ranks raise. The message names
            the tensors that were already overwritten: none with `atomic`, perhaps some without it
            if a data block is damaged.
        CommError: a rank is missing.
    """
    if dedupe not in ("auto", "always", "never"):
        raise ConfigError(f"dedupe: expected 'auto', 'always' or 'never', got {dedupe!r}")
    begin = time.perf_counter()
    trace = Trace(team.rank)
    with trace.span("open"):
        source = _open_together(team, storage, path, verify)
    found: Destinations | None = None
    try:
        with trace.span("plan"):
            found = _destinations(team, source, state, strict=strict, cast=cast, rename=rename)
            loading = _Loading.prepare(team, source, found, trace, num_threads, is_apart=atomic)
        is_shared = loading.read(dedupe, rates)
        loading.finish()
    except BaseException:
        if found is not None:
            found.take_back()
        raise
    finally:
        # Open files would keep the disk space of checkpoints that are removed later.
        storage.close()
    error = None
    try:
        found.restore_values()
    except Exception as caught:  # noqa: BLE001 - raised on all ranks together
        error = caught
    team.agree(error)
    return LoadReport(
        step=source.summary.step,
        num_bytes=sum(place.tensor.numel() * place.tensor.itemsize for place in found.places),
        num_bytes_read=source.num_bytes_read,
        is_shared=is_shared,
        missing=found.missing,
        unexpected=found.unexpected,
        seconds=time.perf_counter() - begin,
        trace=trace,
    )


def _open_together(team: Team, storage: Storage, path: str, verify: bool) -> Source:
    """Opens the checkpoint; the coordinator reads its small files for all ranks."""
    sent, error = None, None
    if team.is_coordinator:
        try:
            sent = msgspec.msgpack.encode(open_source(storage, path))
        except Exception as caught:  # noqa: BLE001 - raised on all ranks together
            error = caught
    team.agree(error)
    summary = msgspec.msgpack.decode(team.broadcast(sent), type=Summary)
    return Source.of(storage, summary, verify=verify)


def _destinations(
    team: Team,
    source: Source,
    state: dict[str, Any],
    *,
    strict: bool,
    cast: bool,
    rename: Mapping[str, str] | None,
) -> Destinations:
    """Finds all destinations; raises on all ranks if the state of any rank does not fit."""
    found, error = None, None
    try:
        found = find_destinations(
            state, source, team.rank, team.world_size, strict=strict, cast=cast, rename=rename
        )
    except Exception as caught:  # noqa: BLE001 - raised on all ranks together
        error = caught
    try:
        team.agree(error)
        assert found is not None, "a rank without destinations has failed"
        # Names that this rank lacks may belong to another rank, such as a pipeline stage's.
        found.unexpected = team.in_all(found.unexpected)
        try:
            found.check(strict=strict)
        except Exception as caught:  # noqa: BLE001 - raised on all ranks together
            error = caught
        team.agree(error)
    except BaseException:
        if found is not None:
            found.take_back()
        raise
    return found


class _Loading:
    """The reads of one load: into the destinations, or into a second copy first."""

    def __init__(
        self,
        team: Team,
        source: Source,
        found: Destinations,
        trace: Trace,
        num_threads: int | None,
        *,
        is_apart: bool,
    ) -> None:
        self._team = team
        self._source = source
        self._found = found
        self._trace = trace
        self._num_threads = num_threads
        self._is_apart = is_apart
        self._error: Exception | None = None
        self._touched: set[int] = set()
        # Elements of another type are converted by a separate copy.
        self._targets = [
            (place.box, torch.empty(place.box.sizes, dtype=place.dtype))
            if is_apart or place.dtype != place.tensor.dtype
            else (place.box, place.tensor)
            for place in found.places
        ]
        self._wants = list_wants(source.index, [(p.name, p.box) for p in found.places])

    @classmethod
    def prepare(
        cls,
        team: Team,
        source: Source,
        found: Destinations,
        trace: Trace,
        num_threads: int | None,
        *,
        is_apart: bool,
    ) -> _Loading:
        """Creates one, on all ranks or on none: a second copy may exceed one rank's memory."""
        made, error = None, None
        try:
            made = cls(team, source, found, trace, num_threads, is_apart=is_apart)
            for device in {p.tensor.device for p in found.places if p.tensor.is_cuda}:
                # Reading threads do not wait for the work on the caller's streams.
                torch.cuda.synchronize(device)
        except Exception as caught:  # noqa: BLE001 - raised on all ranks together
            error = caught
        team.agree(error)
        assert made is not None, "a rank that made none has failed"
        return made

    def read(self, dedupe: Dedupe, rates: Rates | None) -> bool:
        """Reads everything; returns whether ranks shared their reads."""
        team, source = self._team, self._source
        with self._trace.span("plan"):
            alone = plan_units(source, self._wants)
            group, plan = team.group, None
            if group is not None and self._is_shared(dedupe, rates, alone):
                everyone = [list_wants(source.index, p) for p in self._gather_places()]
                plan = plan_shared(source, everyone)
        if group is None or plan is None:
            self._check_fronts()
            self._read_alone(alone)
            return False
        self._error = run_shared(
            group,
            source,
            plan,
            self._targets,
            self._touched.add,
            self._check_fronts,
            self._trace,
            self._num_threads,
        )
        return True

    def _check_fronts(self) -> None:
        """Raises on all ranks if the header or checksum table of a file is damaged."""
        error = None
        try:
            self._source.check_fronts(self._team.rank, self._team.world_size)
        except Exception as caught:  # noqa: BLE001 - raised on all ranks together
            error = caught
        self._team.agree(error)

    def finish(self) -> None:
        """Raises the error of any rank, or else copies the second copy, if any, to its place."""
        if self._team.maximum([self._error is not None])[0]:
            names: set[str] = set()
            if not self._is_apart:
                names = {self._found.places[at].name for at in self._touched}
            self._raise_everywhere(names)
        error = None
        try:
            with self._trace.span("copy"):
                for place, (_, target) in zip(self._found.places, self._targets, strict=True):
                    if target is not place.tensor:
                        place.tensor.copy_(target)
        except Exception as caught:  # noqa: BLE001 - raised on all ranks together
            error = caught
        self._team.agree(error)

    def _raise_everywhere(self, overwritten: set[str]) -> None:
        """Raises the same error on all ranks, with the names of overwritten tensors."""
        failure = None if self._error is None else Failure.of(self._error, self._team.rank)
        own = msgspec.msgpack.encode((failure, sorted(overwritten)))
        told = [
            msgspec.msgpack.decode(data, type=tuple[Failure | None, list[str]])
            for data in self._team.all(own)
        ]
        first = next(failure for failure, _ in told if failure is not None)
        names = sorted({name for _, of_rank in told for name in of_rank})
        if names:
            shown = ", ".join(names[:_MAX_NAMED])
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            text = f"{first.text}. Overwritten before that was found: {shown}{more}"
        else:
            text = f"{first.text}. No tensor was overwritten"
        raise msgspec.structs.replace(first, text=text).exception(self._team.world_size) from (
            self._error
        )

    def _read_alone(self, units: list[Unit]) -> None:
        """Reads for this rank alone."""

        def use(unit: Unit, buffer: Tensor) -> None:
            parts = []
            for at in unit.wants:
                want = self._wants[at]
                box, target = self._targets[want.place]
                held = find_held_boxes(self._source, unit, want.row, buffer)
                parts += match_parts(held, want, box, target)
            self._touched.update(self._wants[at].place for at in unit.wants)
            copy_parts(parts)

        try:
            read_units(self._source, units, use, self._trace, self._num_threads)
        except Exception as error:  # noqa: BLE001 - raised on all ranks together by `finish`
            self._error = error

    def _is_shared(self, dedupe: Dedupe, rates: Rates | None, alone: list[Unit]) -> bool:
        """Whether ranks share their reads; all ranks get the same answer."""
        team, source = self._team, self._source
        if team.world_size == 1 or dedupe != "auto":
            return team.world_size > 1 and dedupe == "always"
        row_bytes = source.index.num_bytes
        counts = torch.zeros(len(row_bytes) + 2, dtype=torch.int64)
        counts[list({want.row for want in self._wants})] += 1
        counts[-2] = sum(unit.stop - unit.start for unit in alone)
        counts[-1] = len(self._wants)
        *wanted, alone_bytes, num_boxes = team.total(counts).tolist()
        if max(wanted, default=0) < 2:
            return False
        # An estimate: rows of which ranks want disjoint parts count as shared.
        once_bytes = int(row_bytes[[count > 0 for count in wanted]].sum())
        return pays(
            rates or measure(team, source, alone),
            alone_bytes=alone_bytes,
            once_bytes=min(once_bytes, alone_bytes),
            num_boxes=num_boxes,
            num_ranks=team.world_size,
        )

    def _gather_places(self) -> list[list[tuple[str, Box]]]:
        own = [(place.name, place.box) for place in self._found.places]
        return [
            [(name, Box(*box)) for name, box in msgspec.msgpack.decode(data, type=_Boxes)]
            for data in self._team.all(msgspec.msgpack.encode(own))
        ]


_Boxes = list[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]]
