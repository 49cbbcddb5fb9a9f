"""Prompts from a file or a list, as batches that are a function of the step alone.

The rows of all epochs form one endless stream, and step s takes the rows from s * batch_size on: so
each prompt comes once per epoch whatever the batch size, and a run resumes from the number of its
next step alone. Each epoch's order is a function of seed and epoch.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from hybridflow.tasks.tokenizers import ChatTokenizer, Tokenizer, as_tokenizer
from hybridflow.workers.batch.batch import Batch
from shared.errors import ConfigError, DataError
from shared.files import check_not_empty
from shared.kernels.philox import philox, stream_key

__all__ = ["END_TOKENS", "Prompts", "prompt_batch"]

END_TOKENS = "end_tokens"
"""Name in a batch's `meta` of the ids that its prompts' tokenizer ends responses with."""

log = logging.getLogger(__name__)

_RESERVED = frozenset(
    [
        "prompts",
        "prompt_lengths",
        "sample_ids",
        "tokens",
        "lengths",
        "mask",
        "group",
        "response_tokens",
    ]
)
# Separates this stream of random numbers from those that draw tokens with the same seed.
_SHUFFLE = 0x5348


class Prompts:
    """Prompts in an order that depends only on seed and epoch.

    Attributes:
        num_too_long: prompts left out because they have more tokens than allowed.
    """

    def __init__(
        self,
        source: str | PathLike[str] | Sequence[Any],
        tokenizer: Any,
        *,
        column: str = "prompt",
        batch_size: int,
        seed: int,
        max_prompt_tokens: int,
        shuffle: bool = True,
    ) -> None:
        """Reads and tokenizes all prompts.

        A prompt is a string, or a conversation: a list of messages with role and content.

        Args:
            source: a .jsonl or .parquet file, a list of rows (dicts), or a list of prompts.
            tokenizer: a `Tokenizer`, or one of transformers; for conversations one that has a chat
                template.
            column: name of the prompts' column. It and all other columns become object columns of
                the batches, with None for a missing value.
            batch_size: rows of a batch.
            seed: of the epochs' orders.
            max_prompt_tokens: longest prompt in tokens; longer ones are left out, counted and
                logged once.
            shuffle: whether each epoch has its own order, or that of the source.

        Raises:
            ConfigError: a size is below 1, the file is of no known kind, or pyarrow is missing.
            DataError: a row cannot be used, or no prompt is left.
        """
        if batch_size < 1 or max_prompt_tokens < 1:
            raise ConfigError(
                f"prompts: expected batch_size and max_prompt_tokens of at least 1, got "
                f"{batch_size} and {max_prompt_tokens}"
            )
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self._tokens: list[list[int]] = []
        self._rows: list[Mapping[str, Any]] = []
        self.num_too_long = 0
        tokenizer, num_rows = as_tokenizer(tokenizer), 0
        self._end_tokens = (tokenizer.end_token,)
        name = str(source) if isinstance(source, str | PathLike) else "the list"
        for where, row in _read(source, column):
            num_rows += 1
            if column not in row:
                raise DataError(
                    f"{where}: no column {column!r}; there are {', '.join(row) or 'none'}; name "
                    "one by column="
                )
            tokens = _tokenize(where, row[column], tokenizer)
            if len(tokens) > max_prompt_tokens:
                self.num_too_long += 1
            else:
                self._tokens.append(tokens)
                self._rows.append(row)
        if not self._tokens:
            raise DataError(
                f"prompts: expected at least one of up to {max_prompt_tokens} tokens, and "
                f"{name} has {num_rows} rows, {self.num_too_long} of them too long"
            )
        if self.num_too_long:
            log.warning(
                "%s: %d of %d prompts have more than %d tokens and are left out",
                name,
                self.num_too_long,
                num_rows,
                max_prompt_tokens,
            )
        # A dict keeps the names in their first order.
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row))
        if taken := sorted(_RESERVED.intersection(self._columns)):
            raise DataError(
                f"{name}: column {taken[0]!r} has a name that batches use themselves; rename it"
            )

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batch(self, step: int) -> Batch:
        """The batch of a step, from 0 on; sample_ids are the rows' positions in the stream.

        Raises:
            ConfigError: the step is negative.
        """
        if step < 0:
            raise ConfigError(f"step: expected 0 or more, got {step}")
        first = step * self.batch_size
        places = range(first, first + self.batch_size)
        rows = [self._row(place) for place in places]
        objects = {name: [self._rows[k].get(name) for k in rows] for name in self._columns}
        batch = prompt_batch([self._tokens[k] for k in rows], places, **objects)
        batch.meta[END_TOKENS] = self._end_tokens
        return batch

    def batches(self, steps: int | None = None, start: int = 0) -> Iterator[Batch]:
        """The batches of `steps` steps, from `start` on; endless if `steps` is None."""
        numbers = itertools.count(start) if steps is None else range(start, start + steps)
        return map(self.batch, numbers)

    def _row(self, place: int) -> int:
        epoch, at = divmod(place, len(self))
        return int(_order(self.seed, epoch, len(self))[at]) if self.shuffle else at


def prompt_batch(
    tokens: Sequence[Sequence[int]], sample_ids: Iterable[int], **objects: Any
) -> Batch:
    """Makes a rollout's input columns from prompts.

    Args:
        tokens: tokens of each prompt.
        sample_ids: id of each row.
        **objects: further columns.

    Returns:
        prompts, int64 [B, P], padded with 0 on the right; prompt_lengths and sample_ids, int64 [B];
        and the further columns.
    """
    rows = [torch.tensor(row, dtype=torch.int64) for row in tokens]
    return Batch(
        prompts=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        prompt_lengths=torch.tensor([len(row) for row in rows]),
        sample_ids=torch.tensor(list(sample_ids)),
        **objects,
    )


# A batch may span two epochs, and each of its rows needs its epoch's order.
@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num: int) -> Int64[Tensor, " num"]:
    """Sorts prompts by a random word each; ties, which are rare, stay in order."""
    counter = torch.zeros(num, 4, dtype=torch.int64)
    counter[:, 0] = torch.arange(num)
    return philox(counter, stream_key(seed, epoch, _SHUFFLE))[:, 0].argsort(stable=True)


def _read(source: Any, column: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields rows, each with its place for messages."""
    if not isinstance(source, str | PathLike):
        for k, row in enumerate(source):
            yield f"row {k}", row if isinstance(row, Mapping) else {column: row}
        return
    path = Path(source)
    readers = {".jsonl": _read_json_lines, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: expected {' or '.join(readers)}, got {path.suffix!r}")
    check_not_empty(path, "prompts")
    yield from readers[path.suffix](path)


def _read_json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # of JSON, or of UTF-8
                told = f"{path}:{number}: expected a JSON object on one line: {error}"
                raise DataError(told) from error
            if not isinstance(row, dict):
                got = type(row).__name__
                raise DataError(f"{path}:{number}: expected a JSON object, got {got}; fix the row")
            yield f"{path}:{number}", row


def _read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path}: Parquet needs pyarrow; run: pip install pyarrow") from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except ValueError as error:  # pyarrow's own are among these
        raise DataError(f"{path}: expected a Parquet file: {error}") from error
    for k, row in enumerate(rows):
        yield f"{path}: row {k}", row


def _tokenize(where: str, prompt: Any, tokenizer: Tokenizer) -> list[int]:
    try:
        if isinstance(prompt, str):
            tokens = tokenizer.encode(prompt)
        elif not (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
            raise DataError(f"expected a string or a list of messages, got {prompt!r}")
        elif not isinstance(tokenizer, ChatTokenizer):
            raise DataError(
                "a list of messages needs a tokenizer with a chat template, and "
                f"{type(tokenizer).__name__} has none; give a string"
            )
        else:
            tokens = tokenizer.encode_chat(prompt)
        if not tokens:
            raise DataError("expected a prompt of at least one token, got an empty one")
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    return tokens
