"""Balanced batches for transformers' Trainer, which keeps its loop, its optimizer and its callbacks.

A step of the Trainer is `gradient_accumulation_steps` micro-batches on each rank. Documents are packed into
exactly so many, without padding, so that the ranks of a step end together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, Trainer

from hydraulis.config import Cost, check_lengths, keep_fitting
from hydraulis.planner.steps import cut_evenly, plan_slots
from hydraulis.runtime.attention import use_document_attention
from shared.errors import ConfigError, DataError

__all__ = ["balance"]

log = logging.getLogger(__name__)

_FILLED = 0.85
"""Share of a step's room that is filled: what lets micro-batches of equal seconds have unequal tokens."""

TrainerT = TypeVar("TrainerT", bound=Trainer)


def balance(
    trainer: TrainerT,
    *,
    max_tokens: int,
    cost: Cost | None = None,
    lengths: Sequence[int] | None = None,
    too_long: str = "raise",
) -> TrainerT:
    """Makes a Trainer take balanced, packed batches; call it before `trainer.train()`.

    `per_device_train_batch_size` and the Trainer's own collator count no longer: documents' tokens
    fill the micro-batches. Attention goes by document, and the loss is over all tokens of a step (the
    Trainer's `average_tokens_across_devices`). `save_steps`, callbacks, resuming and evaluation are the
    Trainer's, as before.

    Args:
        trainer: with a training set of rows that have `input_ids`, and `labels` where not all tokens
            are learned.
        max_tokens: most tokens of a micro-batch.
        cost: seconds of a micro-batch; from the model's shape by default, see `measure_cost`.
        lengths: tokens of all documents; by default the data set's column that
            `args.length_column_name` names, else each row is asked.
        too_long: what becomes of documents of more than `max_tokens`: "raise", "drop", or "truncate".

    Returns:
        The same trainer.

    Raises:
        SequenceTooLong: a document exceeds `max_tokens`, unless it is to be dropped or cut.
        ConfigError: an argument outside its range, ranks that weigh tokens unlike, or the training set has no length, or fewer documents than a step needs.
        DataError: a row has no `input_ids`.
    """
    args, rows = trainer.args, trainer.train_dataset
    if rows is None or not hasattr(rows, "__len__"):
        raise ConfigError(
            f"balance: expected a training set with a length, got {type(rows).__name__}; documents "
            f"cannot be balanced before their lengths are known"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ConfigError(
            "balance: expected average_tokens_across_devices=True, got False; ranks have unlike numbers "
            "of tokens, and the loss would weigh them wrongly"
        )
    model: Any = trainer.model
    sampler = _StepSampler(
        _lengths(rows, args.length_column_name) if lengths is None else lengths,
        cost=Cost.of_model(model.config) if cost is None else cost,
        cap=max_tokens,
        num_ranks=args.world_size,
        rank=args.process_index,
        slots=args.gradient_accumulation_steps,
        seed=args.seed if args.data_seed is None else args.data_seed,
        too_long=too_long,
    )
    use_document_attention(model)
    loader = partial(
        _Loader, rows, sampler, collate_fn=partial(_collate, max_tokens=max_tokens),
        num_workers=args.dataloader_num_workers, pin_memory=args.dataloader_pin_memory,
    )  # fmt: skip
    trainer.get_train_dataloader = loader
    return trainer


class _Loader(DataLoader):
    """The Trainer tells it the epoch."""

    def __init__(self, rows: Any, sampler: _StepSampler, **settings: Any) -> None:
        super().__init__(rows, batch_sampler=sampler, **settings)
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)


class _StepSampler:
    """One rank's micro-batches, as many in every step: indices of documents; some may be empty."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        cost: Cost,
        cap: int,
        num_ranks: int,
        rank: int,
        slots: int,
        seed: int,
        too_long: str,
    ) -> None:
        if cap < 1:
            raise ConfigError(f"max_tokens: expected at least 1, got {cap}")
        known = check_lengths(lengths)
        self._kept = keep_fitting(known, cap, too_long)
        self.lengths = np.minimum(known, cap)
        if len(self._kept) < num_ranks:
            raise ConfigError(
                f"expected at least a document for each of {num_ranks} ranks, got {len(self._kept)} of "
                f"at most {cap} tokens"
            )
        room = _FILLED * cap * num_ranks * slots
        self.num_steps = min(ceil(int(self.lengths[self._kept].sum()) / room), len(self._kept))
        self.cost, self.cap, self.num_ranks, self.rank = cost, cap, num_ranks, rank
        self.slots, self.seed = slots, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self.num_steps * self.slots

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng((self.seed, self._epoch)).permutation(self._kept)
        num_taken = 0
        for step, planned in cut_evenly(self.lengths, order, self.num_steps, self._plan):
            num_taken += len(step)
            for part in planned[self.rank]:
                yield step[part].tolist()
        if num_taken < len(order):
            log.warning(
                "%d of %d documents did not fit into the last step of epoch %d, and are left out of it",
                len(order) - num_taken, len(order), self._epoch,
            )  # fmt: skip

    def _plan(self, step: np.ndarray) -> list[list[list[int]]] | None:
        return plan_slots(
            self.lengths[step], self.num_ranks, self.cost, self.cap, self.slots, may_be_empty=True
        )


def _lengths(rows: Any, column: str) -> list[int]:
    """Tokens of each row, read once."""
    if column in (getattr(rows, "column_names", None) or ()):
        return [int(length) for length in rows[column]]
    found = []
    for number in range(len(rows)):
        row = rows[number]
        if "input_ids" not in row:
            raise DataError(
                f"balance: expected row {number} to have input_ids, got {', '.join(map(str, row))}; "
                f"tokenise the training set first"
            )
        found.append(len(row["input_ids"]))
    return found


def _collate(rows: list[dict[str, Any]], *, max_tokens: int) -> dict[str, Any]:
    """A packed row with its documents' ends; where there are none, tokens that nothing is learned of."""
    nothing = {"input_ids": [0, 0], "labels": [-100, -100]}
    kept = [
        {name: row[name][:max_tokens] for name in ("input_ids", "labels") if name in row}
        for row in rows
    ]
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)(kept or [nothing])
