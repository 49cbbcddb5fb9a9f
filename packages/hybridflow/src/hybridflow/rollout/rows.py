"""Responses that were made one by one, as the rows of a table.

Engines that are not ours give a list of tokens for each sample; this is where those become what
`hybridflow.rollout.native.generator` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn import functional as F

from hybridflow.models.sequences import generated_mask
from hybridflow.rollout.native.generator import Responses
from hybridflow.rollout.sampling import Sampling
from hybridflow.workers.batch.batch import PADDING, Batch
from shared.errors import DataError

__all__ = [
    "ServedResponses",
    "build_roll",
    "prompt_rows",
    "responses",
    "sample_ids",
    "samples",
    "take_greedy",
]


@dataclass(frozen=True, kw_only=True)
class ServedResponses(Responses):
    """Responses of a server that says which weights it has.

    Attributes:
        versions: of the weights, one for all tokens of a response; int64 [samples].
    """

    versions: Tensor


def samples(
    prompts: Sequence[Int64[Tensor, " _"]],
    sampling: Sampling,
    sample_ids: Int64[Tensor, " samples"] | None,
) -> tuple[list[Tensor], Int64[Tensor, " samples"]]:
    """The prompt and the name of each sample.

    Raises:
        DataError: if there is no prompt, one is empty, or there is not one name a sample.
    """
    empty = [k for k, prompt in enumerate(prompts) if not len(prompt)]
    if not prompts or empty:
        raise DataError(
            f"expected prompts of at least one token, got "
            f"{f'an empty one at {empty[0]}' if empty else 'none'}; begin them with a start token"
        )
    rows = [prompt for prompt in prompts for _ in range(sampling.num_samples)]
    ids = torch.arange(len(rows)) if sample_ids is None else sample_ids
    if len(ids) != len(rows):
        raise DataError(
            f"expected {len(rows)} sample_ids, {sampling.num_samples} for each prompt, got "
            f"{len(ids)}"
        )
    return rows, ids


def responses(
    prompts: Sequence[Int64[Tensor, " _"]],
    tokens: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    *,
    num_steps: int,
    versions: Sequence[int] | None = None,
) -> Responses:
    """Rows of prompt and response.

    Args:
        prompts: of each sample.
        tokens: of each response.
        log_probs: one for each token.
        num_steps: see `Responses`.
        versions: of the weights that made each response, where that is known.
    """
    rows = list(zip(prompts, tokens, log_probs, strict=True))
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    lengths = prompt_lengths + torch.tensor([len(made) for made in tokens])
    shape = (len(rows), int(lengths.max()))
    all_tokens, all_log_probs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    for k, (prompt, made, worth) in enumerate(rows):
        start, stop = int(prompt_lengths[k]), int(lengths[k])
        all_tokens[k, :start] = prompt
        all_tokens[k, start:stop] = torch.tensor(made)
        all_log_probs[k, start:stop] = torch.tensor(worth)
    columns = {
        "tokens": all_tokens,
        "prompt_lengths": prompt_lengths,
        "lengths": lengths,
        "log_probs": all_log_probs,
        "num_steps": num_steps,
    }
    if versions is None:
        return Responses(**columns)
    return ServedResponses(**columns, versions=torch.tensor(versions))


def prompt_rows(batch: Batch) -> list[Tensor]:
    """The tokens of each prompt of a batch."""
    lengths = batch["prompt_lengths"].tolist()
    return [row[:length] for row, length in zip(batch["prompts"], lengths, strict=True)]


def sample_ids(batch: Batch, num_samples: int) -> Int64[Tensor, " samples"]:
    """The name of each response to a batch's prompts, the same wherever it is drawn."""
    ids = batch["sample_ids"].repeat_interleave(num_samples) * num_samples
    return ids + torch.arange(num_samples).repeat(len(batch))


def build_roll(batch: Batch, found: Responses, sampling: Sampling, version: int) -> Batch:
    """A batch of prompts with its responses, as `Actor.generate` describes it.

    Args:
        batch: the prompts.
        found: `num_samples` responses to each, one after another.
        sampling: what was drawn.
        version: of the weights that drew.
    """
    # A width that does not depend on what was drawn, so that ranks' rows go together.
    width = batch["prompts"].shape[1] + sampling.max_new_tokens
    missing = width - found.tokens.shape[1]

    def widened(values: Tensor) -> Tensor:
        return F.pad(values, (0, missing)).cpu()

    mask = generated_mask(found.prompt_lengths, found.lengths, width).cpu()
    made = Batch(
        tokens=widened(found.tokens),
        lengths=found.lengths.cpu(),
        mask=mask,
        rollout_log_probs=widened(found.log_probs),
        versions=torch.where(mask, version, -1).to(torch.int32),
        group=batch["sample_ids"].repeat_interleave(sampling.num_samples),
    )
    return batch.repeat(sampling.num_samples) | made


def take_greedy(roll: Batch) -> Batch:
    """The columns of a greedy response, named so that they can be joined with a drawn one's."""
    kept = [PADDING] if PADDING in roll else []
    made = {f"greedy_{name}": roll[name] for name in ("tokens", "lengths", "mask")}
    return roll.select(*kept) | Batch(made)
