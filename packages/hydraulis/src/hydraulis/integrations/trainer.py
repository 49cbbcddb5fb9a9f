"""Balanced batches for transformers' Trainer, which keeps its loop, its optimizer and its callbacks.

A step of the Trainer is `gradient_accumulation_steps` micro-batches on each rank. Documents are packed into
exactly so many, without padding, so that the ranks of a step end together.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    Trainer,
    default_data_collator,
)

from hydraulis.config import Cost, check_cost, check_count
from hydraulis.integrations.rows import DocumentRows, collate, count_tokens
from hydraulis.integrations.step_sampler import StepSampler
from hydraulis.runtime.attention import check_isolation, hook_documents
from shared.errors import ConfigError

__all__ = ["balance"]

TrainerT = TypeVar("TrainerT", bound=Trainer)

log = logging.getLogger(__name__)


def balance(
    trainer: TrainerT,
    *,
    max_tokens: int,
    cost: Cost | None = None,
    lengths: Sequence[int] | None = None,
    too_long: str = "raise",
) -> TrainerT:
    """Makes a Trainer take balanced, packed batches; call it before `trainer.train()`.

    Every document is in exactly one step of each epoch, and all epochs have the same number of steps.
    `per_device_train_batch_size` does not count: documents' tokens fill the micro-batches. A sampler of
    your own is replaced, with a warning. Attention goes by document, and the loss is over all tokens of a
    step (the Trainer's `average_tokens_across_devices`). `save_steps`, callbacks, resuming and evaluation are the Trainer's.

    A collator of your own is called with one row at a time, and what it makes of it is packed. Pads that
    an attention mask names are cut off, on either side.

    Args:
        trainer: with a training set of rows that have `input_ids`, and `labels` where not all tokens
            are learned; with `attention_mask` where they are padded.
        max_tokens: most tokens of a micro-batch.
        cost: seconds of a micro-batch; from the model's shape by default, see `measure_cost`.
        lengths: tokens of all documents, which rows are compared with as they are read; by default
            the data set's column that `args.length_column_name` names, else each row is asked.
        too_long: what becomes of documents of more than `max_tokens`: "raise", "drop", or "truncate".

    Returns:
        The same trainer.

    Raises:
        SequenceTooLong: a document exceeds `max_tokens`, unless it is to be dropped or cut.
        ConfigError: an argument is invalid, ranks weigh tokens differently, the training set has no
            length, the model's loss is no sum over tokens, or its layers let packed documents see one
            another; see `use_document_attention`.
        DataError: a row has no `input_ids`, is not as long as `lengths` says, or brings what cannot be
            packed.
    """
    args, rows = trainer.args, trainer.train_dataset
    check_count("max_tokens", max_tokens)
    check_cost(cost)
    if rows is None or not hasattr(rows, "__len__"):
        raise ConfigError(
            f"balance: expected a training set with a length, got {type(rows).__name__}; documents "
            f"cannot be balanced before their lengths are known"
        )
    _check_loss(trainer)
    _warn_of_order(trainer)
    model: Any = trainer.model
    limits = check_isolation(model)
    sampler = StepSampler(
        count_tokens(rows, args.length_column_name) if lengths is None else lengths,
        cost=Cost.of_model(model.config) if cost is None else cost,
        cap=max_tokens,
        num_ranks=args.world_size,
        rank=args.process_index,
        slots=args.gradient_accumulation_steps,
        seed=args.seed if args.data_seed is None else args.data_seed,
        too_long=too_long,
    )
    limits.check(sampler.longest)
    documents = DocumentRows(
        rows, sampler.all_lengths, max_tokens, collator=_own_collator(trainer),
        keeps_columns=not args.remove_unused_columns, arguments=inspect.signature(_causal_model(model).forward).parameters,
        has_relative_positions=limits.has_relative_positions,
    )  # fmt: skip
    hook_documents(model, limits)
    trainer.get_train_dataloader = partial(
        _Loader, documents, sampler, collate_fn=collate,
        num_workers=args.dataloader_num_workers, pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
    )  # fmt: skip
    trainer.get_batch_samples = partial(_batch_samples, trainer.get_batch_samples)
    return trainer


def _check_loss(trainer: Trainer) -> None:
    """Refuses a Trainer whose loss is not summed over tokens and divided by the step's tokens."""
    args = trainer.args
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ConfigError(
            "balance: expected average_tokens_across_devices=True, got False; ranks have different "
            "numbers of tokens, and the loss would weigh them wrongly"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"balance: expected one GPU a process, got {args.n_gpu}; start a process for each by torchrun, "
            f"or hide the others by CUDA_VISIBLE_DEVICES"
        )
    is_sum = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func
    is_mean = not is_sum or trainer.loss_is_scaled_for_ga is False
    if is_mean and args.world_size * args.gradient_accumulation_steps > 1:
        raise ConfigError(
            f"balance: expected a model whose loss takes num_items_in_batch, got "
            f"{type(trainer.model).__name__}, which means over each micro-batch of several in a step; give "
            f"the Trainer a compute_loss_func that divides by num_items_in_batch"
        )


def _warn_of_order(trainer: Trainer) -> None:
    """Logs that documents do not come in the order that the user asked for."""
    own = [
        f"{type(trainer).__name__}.{name}"
        for name in ("get_train_dataloader", "_get_train_sampler")
        if getattr(type(trainer), name) is not getattr(Trainer, name)
    ]
    if trainer.args.train_sampling_strategy == "sequential":
        own.append("train_sampling_strategy='sequential'")
    if own:
        log.warning(
            "balance: documents are shuffled and balanced in place of %s", " and ".join(own)
        )


def _causal_model(model: Any) -> Any:
    """The model itself, without adapters around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _own_collator(trainer: Trainer) -> Callable[[list[Any]], Any] | None:
    """The collator that the user gave; None for those that only pad or flatten rows."""
    collator: Any = trainer.data_collator
    plain = (DataCollatorWithFlattening, DataCollatorWithPadding)
    if collator is default_data_collator or type(collator) in plain:
        return None
    return collator


def _batch_samples(
    take: Callable[..., tuple[list[Any], Any]], *args: Any, **settings: Any
) -> tuple[list[Any], Any]:
    """Takes a step's micro-batches, whose losses are divided by 1 where no token has a label."""
    batches, num_labels = take(*args, **settings)
    return batches, num_labels.clamp(min=1) if torch.is_tensor(num_labels) else num_labels


class _Loader(DataLoader):
    """A loader that passes the Trainer's epoch on to its sampler."""

    def __init__(self, rows: Any, sampler: StepSampler, **settings: Any) -> None:
        super().__init__(rows, batch_sampler=sampler, **settings)
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)
