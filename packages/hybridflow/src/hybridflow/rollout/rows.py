"""Conversion of responses generated one by one into rows of a table.

External engines return a list of tokens for each sample; the functions here turn those into the
`Responses` that `hybridflow.rollout.native.generator` returns.
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
    """Responses of a server that reports the version of its weights.

    Attributes:
        versions: of the weights that made each response; int64 [samples].
    """

    versions: Tensor


def samples(
    prompts: Sequence[Int64[Tensor, " _"]],
    sampling: Sampling,
    sample_ids: Int64[Tensor, " samples"] | None,
) -> tuple[list[Tensor], Int64[Tensor, " samples"]]:
    """The prompt and the id of each sample.

    Raises:
        DataError: if there is no prompt, one is empty, or there is not one id per sample.
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
        prompts: prompt of each sample.
        tokens: tokens of each response.
        log_probs: log-probability of each of these tokens.
        num_steps: number of decoding passes.
        versions: of the weights that made each response; None if unknown.
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
    """The id of each response to a batch's prompts; it does not depend on the rank or batch."""
    ids = batch["sample_ids"].repeat_interleave(num_samples) * num_samples
    return ids + torch.arange(num_samples).repeat(len(batch))


def build_roll(batch: Batch, found: Responses, sampling: Sampling, version: int) -> Batch:
    """A batch of prompts with its responses, as `Actor.generate` describes it.

    Args:
        batch: the prompts.
        found: `num_samples` responses to each, those of a prompt adjacent.
        sampling: settings they were drawn with.
        version: of the weights that made them.
    """
    # A width that does not depend on the responses, so that rows of all ranks can be joined.
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
    """The columns of greedy responses, renamed so that they can be joined with sampled ones."""
    kept = [PADDING] if PADDING in roll else []
    made = {f"greedy_{name}": roll[name] for name in ("tokens", "lengths", "mask")}
    return roll.select(*kept) | Batch(made)
