"""Responses that were made one by one, as the rows of a table.

Engines that are not ours give a list of tokens for each sample; this is where those become what
`hybridflow.rollout.native` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from hybridflow.rollout.native import Responses
from hybridflow.rollout.sampling import Sampling
from shared.errors import DataError

__all__ = ["ServedResponses", "responses", "samples"]


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
