"""A step's documents, and the rows of tokens that ranks compute of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from hydraulis.config import keep_fitting
from hydraulis.planner.replicas import ReplicaPlan
from hydraulis.planner.schedule import StepPlan
from hydraulis.runtime.attention import PackedDocuments
from hydraulis.runtime.loss import NO_LABEL
from shared.comms import Group
from shared.errors import DataError

__all__ = ["PlannedStep", "Row", "make_row", "to_tokens"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """A step's documents and who computes them.

    Attributes:
        documents: all documents; those of the step are read.
        indices: numbers of the step's documents.
        plan: of the step; its documents are places in `indices`.
        epoch: number of the pass over all documents, from 0.
        number: of the step in its epoch, from 0.
        too_long: what becomes of documents longer than all ranks hold together: "raise", "drop" or
            "truncate".
        cut_at: tokens to which longer documents were cut; None where none is.
        is_late: whether the plan was not there in time.
        vocab_size: token ids are below it; None where nothing is known of them.
        texts: token ids of documents that were read already, by their place.
    """

    documents: Sequence[Any]
    indices: tuple[int, ...]
    plan: StepPlan | ReplicaPlan
    epoch: int = 0
    number: int = 0
    too_long: str = "raise"
    cut_at: int | None = None
    is_late: bool = False
    vocab_size: int | None = None
    texts: Mapping[int, Tensor] = field(default_factory=dict)

    def tokens(self, place: int) -> Tensor:
        """Token ids of a document of the step [tokens].

        Raises:
            DataError: it is no row of token ids, not of the length that was planned, or has an id
                outside the vocabulary; names the document.
        """
        if place in self.texts:
            return self.texts[place]
        number, length = self.indices[place], self.plan.lengths[place]
        found = to_tokens(self.documents[number], number)
        kept = found[: self.cut_at]
        if len(kept) != length:
            raise DataError(
                f"document {number}: expected {length} tokens, as was planned, got {len(found)}; give "
                f"`lengths` of these documents"
            )
        if self.vocab_size is not None and len(kept):
            low, high = (int(one) for one in kept.aminmax())
            if low < 0 or high >= self.vocab_size:
                raise DataError(
                    f"document {number}: expected token ids from 0 to {self.vocab_size - 1}, as the model "
                    f"has {self.vocab_size}, got {low if low < 0 else high}; is it another tokenizer's?"
                )
        return kept

    def planned_anew(
        self, plan: Callable[[Sequence[int]], StepPlan | ReplicaPlan], most: int
    ) -> PlannedStep:
        """The same step where ranks hold fewer tokens than when it was planned.

        Args:
            plan: of documents of these lengths.
            most: tokens of the longest document that all ranks hold together now.

        Raises:
            SequenceTooLong: a document exceeds them, and is neither to be dropped nor cut.
            ConfigError: no document is left.
        """
        lengths = np.array(self.plan.lengths)
        kept = keep_fitting(lengths, most, self.too_long)
        return replace(
            self, indices=tuple(self.indices[place] for place in kept),
            plan=plan(lengths[kept].clip(max=most).tolist()),
            cut_at=most if self.too_long == "truncate" else None, texts={},
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """This rank's tokens of a micro-batch.

    Attributes:
        ids: of the tokens.
        positions: their places in their documents.
        labels: each one's next token; NO_LABEL where there is none.
        packing: the documents.
    """

    ids: Int64[Tensor, " tokens"]
    positions: Int64[Tensor, " tokens"]
    labels: Int64[Tensor, " tokens"]
    packing: PackedDocuments


def make_row(
    step: PlannedStep,
    documents: Sequence[int],
    device: torch.device,
    *,
    ring: Group | None = None,
    ulysses: Group | None = None,
) -> Row:
    """This rank's row of a micro-batch; no rank's is without a token.

    Args:
        step: whose documents they are.
        documents: places of the micro-batch's documents in the step.
        device: on which the row is to lie.
        ring, ulysses: the ranks that the micro-batch lies over, see `PackedDocuments`.
    """
    texts = [step.tokens(place) for place in documents]
    labels = [torch.cat((ids[1:], ids.new_full((1,), NO_LABEL))) for ids in texts]
    degree = 1
    for group in (ring, ulysses):
        degree *= 1 if group is None else group.world_size
    # Tokens that nothing is learned of, where a rank would have none: all have to take part.
    if max(map(len, texts), default=0) < 2 * degree:
        texts.append(torch.zeros(2 * degree, dtype=torch.int64))
        labels.append(torch.full_like(texts[-1], NO_LABEL))
    packing = PackedDocuments(lengths=tuple(map(len, texts)), ring=ring, ulysses=ulysses)
    local = packing.tokens()
    parts = torch.cat(texts), packing.positions(), torch.cat(labels)
    ids, positions, learned = (one[local].to(device) for one in parts)
    return Row(ids=ids, positions=positions, labels=learned, packing=packing)


def to_tokens(document: Any, number: int) -> Tensor:
    """Token ids of a document: a 1-D tensor or array, a list of numbers, or bytes.

    Raises:
        DataError: it is none of these; names its number.
    """
    if isinstance(document, bytes):
        return torch.frombuffer(bytearray(document), dtype=torch.uint8).long()
    if isinstance(document, str):
        raise DataError(
            f"document {number}: expected one row of token ids, got text; tokenise it before"
        )
    try:
        found = torch.as_tensor(document)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"document {number}: expected one row of token ids, got {type(document).__name__}: {error}; "
            f"of a data set's rows give `input_ids`"
        ) from error
    if not found.numel() and found.ndim == 1:
        return found.long()
    if found.ndim != 1 or found.dtype.is_floating_point or found.dtype.is_complex:
        raise DataError(
            f"document {number}: expected one row of token ids, got {list(found.shape)} of {found.dtype}"
        )
    return found.long().cpu()
