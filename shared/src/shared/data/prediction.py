"""Scores of new rows from a saved run, by the user's own ids.

A command that trains leaves `run.json` beside its checkpoint: its own options, by which `predict`
reads the events again and makes the model. Nothing heavy is imported before that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
    runtime_checkable,
)

import tyro

from shared.cli import JsonOption
from shared.data.cli import EventOptions, TimeUnit, check_times
from shared.errors import DataError
from shared.files import write_atomically

if TYPE_CHECKING:
    import numpy as np
    from pandas import DataFrame, Series
    from torch import Tensor

    from shared.data.events import Events
    from shared.data.node_ids import NodeIds, Side
    from shared.data.tables import Columns

__all__ = ["Past", "PredictOptions", "Queries", "Run", "save_run"]

_FORMAT = "meshyard run 1"
_Command = TypeVar("_Command", bound=EventOptions)


@runtime_checkable
class Past(Protocol):
    """Events that a run has learnt from, of any package's type."""

    @property
    def src(self) -> Tensor:
        """Nodes, int64 [num_events]."""
        ...

    @property
    def dst(self) -> Tensor:
        """Nodes, int64 [num_events]."""
        ...

    @property
    def t(self) -> Tensor:
        """Times, int64 or float64 [num_events]."""
        ...

    @property
    def nodes(self) -> NodeIds | None:
        """The user's own ids of the nodes; None where they are the numbers themselves."""
        ...

    def digest(self) -> str:
        """A hash of all columns, in hexadecimal."""
        ...


def save_run(folder: Path, name: str, command: EventOptions, data: str, past: Past) -> None:
    """Writes `run.json`, by which the run is made again, and `nodes.csv`, if nodes have ids.

    Args:
        folder: folder of the run's checkpoint; made if there is none.
        name: name of the command.
        command: its options.
        data: what it read its events from.
        past: the events.

    Raises:
        OSError: the files cannot be written.
    """
    options = asdict(command) | {"data": _absolute(data)}
    if command.edge_features is not None:
        options["edge_features"] = command.edge_features.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if past.nodes is not None:
        past.nodes.save(folder / "nodes.csv")
    about = {"format": _FORMAT, "command": name, "options": options, "events": _digest(past)}
    write_atomically(folder / "run.json", json.dumps(about, default=_encode, indent=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Generic[_Command]):
    """A run that has ended.

    Attributes:
        command: its command, with its options.
        data: what the command read its events from.
        events: hash of these events.
    """

    command: _Command
    data: str
    events: str


def _load_run(folder: Path, commands: Mapping[str, type[_Command]]) -> Run[_Command]:
    """The run that is in a folder.

    Args:
        folder: as for `save_run`.
        commands: commands by name.

    Raises:
        DataError: there is no run that has ended, or it is another package's.
    """
    path = folder / "run.json"
    try:
        about = json.loads(path.read_text())
        name, options, events = about["command"], about["options"], about["events"]
        is_known = about["format"] == _FORMAT and name in commands
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: expected the folder of a run that has ended, there is no such file; give the "
            "folder that the run had as --checkpoint"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: expected a run's options, got {error!r}; train again") from error
    if not is_known or {*options} != {field.name for field in fields(commands[name])}:
        raise DataError(
            f"{path}: expected a run of {', '.join(commands)} of this version, got one of {name!r} in "
            f"the format {about['format']!r}; train again"
        )
    command = commands[name](**{key: _decode(one) for key, one in options.items()})
    return Run(command=command, data=options["data"], events=events)


class Queries(NamedTuple):
    """Rows to score.

    Attributes:
        table: the rows as they are in the file.
        events: those whose ends the run knows, by time.
        rows: row of the table of each event.
    """

    table: DataFrame
    events: Events
    rows: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions(JsonOption):
    """Options of `predict`."""

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NEW")]
    """Table of rows to score, with the ids of the run's data."""
    run: Path
    """Folder of the run: what it had as --checkpoint."""
    out: Path
    """Table to write, .csv or .parquet: ends, time and score of each row."""
    src: str | None = None
    """Column of sources. The run's own by default."""
    dst: str | None = None
    """Column of destinations. The run's own by default."""
    t: str | None = None
    """Column of the times as of which rows are scored. The run's own by default."""
    time_unit: TimeUnit | None = None
    """Unit of times that are numbers. The run's own by default."""

    def open_run(self, commands: Mapping[str, type[_Command]]) -> Run[_Command]:
        """Loads the run, and checks that its scores can be written.

        Raises:
            DataError: there is no run that has ended, or it is another package's; or the output is no
                table, cannot be written for want of a library, or is what is read.
        """
        from shared.data.frames import check_output

        run = _load_run(self.run, commands)
        inputs = [self.data, run.data, run.command.edge_features, self.run / "nodes.csv"]
        check_output(self.out, [path for path in inputs if path is not None])
        return run

    def read_queries(self, run: Run[Any], past: Past) -> Queries:
        """Reads the rows to score; says on stderr which dates they have.

        Args:
            run: what `open_run` gave.
            past: the events that its command reads.

        Raises:
            DataError: these are not the events that the run learnt from; or the input is no table,
                has no row, none whose ends the run knows, or times that are no seconds.
        """
        from shared.data.frames import read_frame

        if _digest(past) != run.events:
            raise DataError(
                f"{self.run}: expected the events that the run learnt from, {run.data} has changed "
                "since; give it back as it was, or train again"
            )
        columns = replace(
            run.command.columns,
            src=self.src or run.command.src,
            dst=self.dst or run.command.dst,
            t=self.t or run.command.t,
            features=(),
        )
        table = read_frame(self.data, ids=(columns.src, columns.dst))
        try:
            columns = columns.match(table)
            # Dates have no unit, whatever the run's own times had.
            is_number = table[columns.t].dtype.kind in "iuf"
            unit = self.time_unit or (columns.time_unit if is_number else None)
            events = _find_events(table, replace(columns, time_unit=unit), past)
            check_times(events, Path(self.data).name, unit)
        except DataError as error:
            raise DataError(f"{self.data}: {error}") from error
        kept = [
            name for name in (columns.eid, columns.src, columns.dst, columns.t) if name in table
        ]
        return Queries(table[kept], events, events.eid.numpy())

    def write_scores(self, queries: Queries, scores: Any) -> None:
        """Writes the table, and prints where it is; rows that cannot be scored have no score.

        Args:
            queries: what `read_queries` gave.
            scores: of its events, in their order.

        Raises:
            OSError: the table cannot be written.
        """
        import numpy as np

        from shared.data.frames import write_frame

        column = np.full(len(queries.table), np.nan)
        column[queries.rows] = scores
        write_frame(queries.table.assign(score=column), self.out)
        num_unknown = len(column) - len(queries.rows)
        text = f"scores of {len(queries.rows):,} rows: {self.out}"
        if num_unknown:
            text += f"\nrows without a score, as the run has not seen their ids: {num_unknown:,}"
        record = {"num_scored": len(queries.rows), "num_unknown": num_unknown, "out": str(self.out)}
        self.print_result(record, text)


def _digest(past: Past) -> str:
    """A hash of events and of their nodes' ids, in hexadecimal."""
    found = hashlib.sha256(past.digest().encode())
    if past.nodes is not None:
        found.update("\n".join(past.nodes.ids).encode())
    return found.hexdigest()


def _find_events(table: DataFrame, columns: Columns, past: Past) -> Events:
    """Rows whose ends the run knows, by time; an event's id is its row."""
    import numpy as np

    from shared.data.events import Events
    from shared.data.tables import read_times

    src = _find_nodes(past, table[columns.src], "src")
    dst = _find_nodes(past, table[columns.dst], "dst")
    t = read_times(table, columns)
    rows = np.flatnonzero((src >= 0) & (dst >= 0))
    if not len(rows):
        wrong = f"got {len(table)} rows whose {columns.src} or {columns.dst} it has not seen"
        raise DataError(
            "expected ids of the data that the run learnt from, "
            f"{wrong if len(table) else 'got a table without rows'}; check the columns"
        )
    # "Earlier than 5.5" is "earlier than 6" where all times are whole.
    t = t.astype(np.float64) if past.t.is_floating_point() else np.ceil(t).astype(np.int64)
    return Events(src[rows], dst[rows], t[rows], rows, nodes=past.nodes).sorted()


def _find_nodes(past: Past, ids: Series, side: Side) -> np.ndarray:
    """Nodes of the events by the user's ids; -1 for ids that they do not have."""
    import numpy as np
    import torch

    from shared.data.tables import read_ids

    column = read_ids(ids)
    if past.nodes is not None:
        return past.nodes.find(column, side)
    if column.dtype.kind != "i":
        raise DataError(
            f"{column.name}: expected whole numbers, as the run's ids are, got texts; check the column"
        )
    nodes = column.to_numpy()
    return np.where(np.isin(nodes, torch.cat([past.src, past.dst]).numpy()), nodes, -1)


def _encode(path: Path) -> dict[str, str]:
    return {"path": str(path)}


def _decode(option: Any) -> Any:
    """An option as it was: JSON has neither tuples nor paths."""
    if isinstance(option, dict):
        return Path(option["path"])
    return tuple(option) if isinstance(option, list) else option


def _absolute(data: str) -> str:
    return str(Path(data).resolve()) if Path(data).exists() else data
