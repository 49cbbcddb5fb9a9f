"""Rows of a training set as documents, and their packing into one row of a micro-batch.

A row keeps what its own collator makes of it: labels, position ids and token types. Pads, which its
attention mask names, are cut off, but for one from which a document's first token is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shared.errors import ConfigError, DataError

__all__ = ["DocumentRows", "collate", "count_tokens"]

_NO_LABEL = -100
_PER_TOKEN = ("input_ids", "labels", "position_ids", "token_type_ids")
"""Values of a row that have one entry for each of its tokens."""
_NUM_CHECKED = 16
"""Rows that are compared with their lengths before training, evenly over the training set."""


class DocumentRows(Dataset):
    """A training set whose rows are documents: 1-D tensors without pads, of the planned lengths."""

    def __init__(
        self,
        rows: Any,
        lengths: np.ndarray,
        max_tokens: int,
        *,
        collator: Callable[[list[Any]], Any] | None,
        keeps_columns: bool,
        arguments: Collection[str],
        has_relative_positions: bool,
    ) -> None:
        """Compares a few rows with their lengths.

        Args:
            rows: the training set.
            lengths: tokens of each row, as steps are planned.
            max_tokens: to which longer documents are cut.
            collator: the user's, which is called with one row at a time; None takes rows as they are.
            keeps_columns: whether the collator is given columns that hold no numbers too.
            arguments: of the model's call.
            has_relative_positions: whether the model computes a document alike at any positions.

        Raises:
            ConfigError: the training set has another number of rows than there are lengths.
            DataError: a row that is compared has another length, or is no document.
        """
        if len(lengths) != len(rows):
            raise ConfigError(
                f"lengths: expected one for each of {len(rows)} rows, got {len(lengths)}"
            )
        self._rows, self._lengths, self._max_tokens = rows, lengths, max_tokens
        self._collator, self._keeps_columns = collator, keeps_columns
        self._has_relative_positions = has_relative_positions
        self._arguments = set(arguments) - {"attention_mask", *_PER_TOKEN}
        # Tokenisers make token types whether or not the model has any.
        ignored = {"token_type_ids"} - set(arguments)
        self._used = [name for name in (*_PER_TOKEN, "attention_mask") if name not in ignored]
        generator_state = torch.get_rng_state()  # a collator may draw random numbers
        for number in np.unique(np.linspace(0, len(rows) - 1, _NUM_CHECKED).astype(int)).tolist():
            self[number]
        torch.set_rng_state(generator_state)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._document(index, self._rows[index])

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Tensor]]:
        """Reads the documents of a micro-batch, at once where the training set can."""
        read = getattr(self._rows, "__getitems__", None)
        rows = [self._rows[i] for i in numbers] if read is None or not numbers else read(numbers)
        return [self._document(*pair) for pair in zip(numbers, rows, strict=True)]

    def _document(self, number: int, row: Any) -> dict[str, Tensor]:
        """Cuts off a row's pads and what is beyond `max_tokens`, and compares its length."""
        values = self._values(number, row)
        num_padded = len(values["input_ids"])
        mask = values.pop("attention_mask", torch.ones(num_padded, dtype=torch.int64))
        kept = _unpadded(number, mask)
        num_tokens = kept.stop - kept.start
        positions = values.get("position_ids")
        if kept.start and positions is None and not self._has_relative_positions:
            raise DataError(
                f"row {number}: expected pads after the tokens, got {kept.start} before them, from which "
                f"models count positions differently; pad on the right, or bring position_ids"
            )
        if positions is not None and not bool((positions[kept].diff() == 1).all()):
            raise DataError(
                f"row {number}: expected position_ids that rise by one, as of one document, got "
                f"{positions[kept][:16].tolist()}; give each document a row of its own"
            )
        # A column of lengths may count pads, which leaves micro-batches less full than planned.
        planned = int(self._lengths[number])
        if planned not in (num_tokens, num_padded):
            raise DataError(
                f"row {number}: expected {planned} tokens, as its length says, got {num_tokens}; give "
                f"`lengths` of these rows, in tokens"
            )
        kept = slice(kept.start, min(kept.stop, kept.start + self._max_tokens))
        if kept.start and "labels" in values and values["labels"][kept.start] != _NO_LABEL:
            # The pad before the first token sees nothing, and that token is learned from it.
            kept = slice(kept.start - 1, kept.stop)
            values["attention_mask"] = mask
        values.setdefault("labels", values["input_ids"])
        return {name: value[kept].long() for name, value in values.items()}

    def _values(self, number: int, row: Any) -> dict[str, Tensor]:
        """Reads what a row has for each of its tokens, as its collator makes it."""
        if self._collator is not None and not self._keeps_columns:
            row = {name: value for name, value in row.items() if _has_numbers(value)}
        given = row if self._collator is None else self._collator([row])
        unused = [name for name in given if name in self._arguments and given[name] is not None]
        if unused:
            raise DataError(
                f"row {number}: expected input_ids, labels, attention_mask, position_ids and "
                f"token_type_ids, got {', '.join(unused)} too, which cannot be packed; remove the column"
            )
        if "input_ids" not in given:
            raise DataError(
                f"row {number}: expected input_ids, got {', '.join(map(str, given))}; tokenise the "
                f"training set first"
            )
        values = {
            name: torch.as_tensor(given[name]) for name in self._used if given.get(name) is not None
        }
        if self._collator is not None:
            values = {name: value.squeeze(0) for name, value in values.items()}
        num_tokens = values["input_ids"].numel()
        for name, value in values.items():
            if value.shape != (num_tokens,) or value.dtype.is_floating_point:
                raise DataError(
                    f"row {number}: expected a whole number for each of its tokens as {name}, got "
                    f"{value.dtype} of shape {tuple(value.shape)} beside {num_tokens} input_ids"
                )
        return values


def count_tokens(rows: Any, column: str) -> list[int]:
    """Counts each row's tokens without pads, or takes a column of lengths.

    Args:
        rows: the training set.
        column: of lengths, in case the training set has it.

    Raises:
        DataError: a row has no `input_ids`, or an attention mask with gaps.
    """
    if column in (getattr(rows, "column_names", None) or ()):
        return [int(length) for length in rows[column]]
    lengths = []
    for number in range(len(rows)):
        row = rows[number]
        if "input_ids" not in row:
            raise DataError(
                f"balance: expected row {number} to have input_ids, got {', '.join(map(str, row))}; "
                f"tokenise the training set first"
            )
        mask, num_tokens = row.get("attention_mask"), len(row["input_ids"])
        if mask is not None and len(mask) == num_tokens:
            kept = _unpadded(number, torch.as_tensor(mask))
            num_tokens = len(range(*kept.indices(num_tokens)))
        lengths.append(num_tokens)
    return lengths


def collate(documents: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Packs documents into one row with their ends; without any, two tokens that nothing is learned of.

    Raises:
        DataError: some documents have position ids or token types and others have none.
    """
    names = set(documents[0]) - {"attention_mask"} if documents else {"input_ids", "labels"}
    for document in documents:
        if names != set(document) - {"attention_mask"}:
            raise DataError(
                f"expected rows of one micro-batch with the same values, got {sorted(names)} and "
                f"{sorted(document)}; give all rows the same columns"
            )
    if not documents:
        ids = torch.zeros(2, dtype=torch.int64)
        documents = [{"input_ids": ids, "labels": torch.full_like(ids, _NO_LABEL)}]
    labels = [document["labels"].clone() for document in documents]
    for label in labels:
        label[:1] = _NO_LABEL  # the token before it is another document's
    lengths, positions = [], []
    for document in documents:
        num_pads = int("attention_mask" in document)
        num_tokens = len(document["input_ids"]) - num_pads
        lengths += [1] * num_pads + [num_tokens]
        counted = torch.cat((torch.zeros(num_pads), torch.arange(num_tokens))).long()
        positions.append(document.get("position_ids", counted))
    ends = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    batch: dict[str, Any] = {
        "input_ids": torch.cat([document["input_ids"] for document in documents])[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat(positions)[None],
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
        "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip
    if "token_type_ids" in names:
        batch["token_type_ids"] = torch.cat([row["token_type_ids"] for row in documents])[None]
    if any("attention_mask" in document for document in documents):
        masks = [
            document.get("attention_mask", torch.ones_like(document["input_ids"]))
            for document in documents
        ]
        batch["attention_mask"] = torch.cat(masks)[None]
    return batch


def _has_numbers(value: Any) -> bool:
    """Whether a collator can make a tensor of a column's value."""
    if isinstance(value, list | tuple) and len(value):
        return _has_numbers(value[0])
    return value is not None and not isinstance(value, str | bytes | dict)


def _unpadded(number: int, mask: Tensor) -> slice:
    """The tokens between the pads on both sides.

    Raises:
        DataError: the mask has other values than 0 and 1, gaps, or only zeros; names the row.
    """
    ones = mask.nonzero()[:, 0] if mask.ndim == 1 else mask.new_zeros(0)
    if (
        not len(ones)
        or len(ones) != int(ones[-1] - ones[0]) + 1
        or not bool((mask[ones] == 1).all())
    ):
        raise DataError(
            f"row {number}: expected an attention_mask of ones without gaps, and zeros at pads before "
            f"and after them, got {mask.flatten()[:16].tolist()}; give each document a row of its own"
        )
    return slice(int(ones[0]), int(ones[-1]) + 1)
