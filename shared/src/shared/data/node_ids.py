"""The user's own ids of nodes, which tables have and models number from 0."""

from __future__ import annotations

import csv
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from shared.errors import DataError
from shared.files import write_atomically

if TYPE_CHECKING:
    from pandas import DataFrame, Series

__all__ = ["NodeIds", "Side", "parse_ids"]

Side = Literal["src", "dst"]

_PLAIN = re.compile("0|-?[1-9][0-9]{0,17}")  # all of them are in int64's range
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0*)?")


def parse_ids(columns: DataFrame) -> DataFrame:
    """Converts each column of texts to int64 if all of it are whole numbers; drops blanks.

    Args:
        columns: texts, and gaps.

    Returns:
        Columns of int64, or of texts without blanks around them. Whole numbers lose a decimal point
        if there is nothing else in any column; those of more than 18 digits are texts.

    Raises:
        DataError: among other texts a number is written in two ways, as 1 and 1.0.
    """
    import pandas

    rows, texts = {}, {}
    for name in columns:
        rows[name], distinct = pandas.factorize(columns[name].to_numpy())
        texts[name] = [text.strip() for text in distinct]
    pool = set().union(*texts.values()) - {""}
    if not all(map(_PLAIN.fullmatch, pool)):
        numbers = {text: _write_number(text) for text in pool}
        if all(numbers.values()):
            texts = {name: [numbers.get(text) for text in own] for name, own in texts.items()}
        else:
            _refuse_spellings(numbers)
    parsed = {}
    for name, own in texts.items():
        if own and (rows[name] >= 0).all() and all(text and _PLAIN.fullmatch(text) for text in own):
            values = np.array(own, object).astype(np.int64)
        else:
            # Row -1 is a gap's, and takes the last.
            values = np.array([text or np.nan for text in own] + [np.nan], object)
        parsed[name] = values[rows[name]]
    return pandas.DataFrame(parsed, index=columns.index)


def _write_number(text: str) -> str | None:
    """A whole number without its decimal point, None for other texts."""
    match = _WHOLE.fullmatch(text)
    return match and match[1].replace("-0", "0")


def _refuse_spellings(numbers: dict[str, str | None]) -> None:
    spellings: dict[str, str] = {}
    for text in sorted(numbers):
        if (number := numbers[text]) is None:
            continue
        if number in spellings:
            raise DataError(
                f"ids: expected one spelling of each number, got {spellings[number]!r} and {text!r} among "
                "texts; write it the same everywhere"
            )
        spellings[number] = text


@dataclass(frozen=True, slots=True, eq=False)
class NodeIds:
    """Ids by node: node `n` is called `ids[n]`.

    Attributes:
        ids: texts [num_nodes]; whole numbers as decimals.
        num_sources: where sources and destinations are of two kinds, which may have equal ids: the
            nodes below are the sources, the others the destinations. None for one kind.
    """

    ids: np.ndarray
    num_sources: int | None = None

    @classmethod
    def number(
        cls, src: Series, dst: Series, *, is_bipartite: bool
    ) -> tuple[np.ndarray, np.ndarray, NodeIds]:
        """Numbers the ends of events in the order in which their ids come up.

        Row by row, the source first; with two kinds all sources before all destinations. Rows that
        are appended to a table leave the numbers of one kind as they are.

        Args:
            src: ids [num_events], without gaps.
            dst: ids [num_events], without gaps.
            is_bipartite: whether sources and destinations are of two kinds.

        Returns:
            Sources and destinations, int64 [num_events] each, and their ids.
        """
        import pandas

        ends = [column.astype(str).to_numpy(object) for column in (src, dst)]
        if is_bipartite:
            (one, sources), (other, others) = (pandas.factorize(column) for column in ends)
            names = np.concatenate([sources, others])
            return (
                one.astype(np.int64),
                other.astype(np.int64) + len(sources),
                cls(names, len(sources)),
            )
        numbers, names = pandas.factorize(np.stack(ends, 1).reshape(-1))
        return numbers[::2].astype(np.int64), numbers[1::2].astype(np.int64), cls(names)

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Series, side: Side) -> np.ndarray:
        """Nodes by their ids.

        Args:
            ids: ids [num_rows].
            side: which ends they are.

        Returns:
            int64 [num_rows]; -1 for an id that no node has.
        """
        import pandas

        start, end = self._span(side)
        wanted = pandas.Index(ids.astype(str).to_numpy(object))
        found = pandas.Index(self.ids[start:end]).get_indexer(wanted)
        return np.where(found < 0, -1, found + start).astype(np.int64)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a CSV file with columns node and id, and side where there are two kinds.

        Raises:
            OSError: the file cannot be written.
        """
        text = io.StringIO()
        # A writer of lines that end in a line feed leaves carriage returns without quotes.
        is_quoted = any("\r" in name for name in self.ids)
        quoting = csv.QUOTE_ALL if is_quoted else csv.QUOTE_MINIMAL
        rows = csv.writer(text, lineterminator="\n", quoting=quoting)
        if self.num_sources is None:
            rows.writerow(["node", "id"])
            rows.writerows(enumerate(self.ids))
        else:
            rows.writerow(["node", "id", "side"])
            sides = ("src" if node < self.num_sources else "dst" for node in range(len(self)))
            rows.writerows(zip(range(len(self)), self.ids, sides, strict=True))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NodeIds:
        """Reads what `save` wrote.

        Raises:
            DataError: there is no such file, or it is something else.
        """
        try:
            with Path(path).open(newline="", encoding="utf-8") as file:
                header, *rows = csv.reader(file)
        except (OSError, ValueError, csv.Error) as error:
            raise DataError(
                f"{path}: expected a table of nodes and their ids, got {error}; check the path"
            ) from error
        is_known = header in (["node", "id"], ["node", "id", "side"])
        if not is_known or any(
            row[0] != str(n) or len(row) != len(header) for n, row in enumerate(rows)
        ):
            raise DataError(
                f"{path}: expected columns node and id, of nodes 0, 1, 2 and on, got columns {header}; "
                "give the file as it was written"
            )
        sources = sum(row[-1] == "src" for row in rows) if len(header) == 3 else None
        return cls(np.array([row[1] for row in rows], object), sources)

    def _span(self, side: Side) -> tuple[int, int]:
        if self.num_sources is None:
            return 0, len(self)
        return (0, self.num_sources) if side == "src" else (self.num_sources, len(self))
