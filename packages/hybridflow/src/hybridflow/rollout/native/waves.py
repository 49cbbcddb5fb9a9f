"""Prompts whose keys and values fit into a budget together: waves, generated one after another.

A prompt's keys and values lie there until the last of its samples has ended, so that what all prompts
of a batch take grows with the batch: terabytes for hundreds of long prompts of a large model. What a
place takes for a sample's own tokens is used again and again.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from hybridflow.models.decoder import Decoder
from hybridflow.rollout.sampling import Sampling
from shared.errors import ConfigError

__all__ = ["Wave", "cache_bytes", "plan_waves"]

log = logging.getLogger(__name__)


class Wave(NamedTuple):
    """Consecutive prompts, and samples of theirs under way at once."""

    prompts: slice
    num_places: int


def cache_bytes(
    model: Decoder, num_prompts: int, prompt_width: int, num_places: int, num_own: int
) -> int:
    """Bytes that keys and values take on a rank of the stage with the most layers.

    Args:
        model: of any stage.
        num_prompts, prompt_width: prompts, and the tokens that each is filled up to.
        num_places, num_own: samples under way at once, and the tokens of its own that each reads.
    """
    shard = model.shard
    num_layers = -(-model.config.num_layers // shard.num_stages)
    a_token = 2 * num_layers * shard.num_kv_heads * model.config.head_dim * model.cos.element_size()
    return a_token * (num_prompts * prompt_width + num_places * num_own)


def plan_waves(
    model: Decoder,
    num_prompts: int,
    prompt_width: int,
    sampling: Sampling,
    num_places: int,
    budget_bytes: int | None,
) -> list[Wave]:
    """As few waves as a budget allows, alike on all ranks of a replica; one where there is none.

    Args:
        model: as of `cache_bytes`, and so is `prompt_width`.
        num_prompts: in all.
        sampling: of each.
        num_places: samples under way at once, at most; fewer where a prompt alone leaves no room.
        budget_bytes: of keys and values on a rank.

    Raises:
        ConfigError: if one prompt and one of its samples take more.
    """
    n, num_own = sampling.num_samples, max(1, sampling.max_new_tokens - 1)

    def taken(prompts: int, places: int) -> int:
        return cache_bytes(model, prompts, prompt_width, places, num_own)

    size, places = num_prompts, min(num_places, num_prompts * n)
    if budget_bytes is not None and taken(size, places) > budget_bytes:
        if taken(1, 1) > budget_bytes:
            raise ConfigError(
                f"cache_bytes: a prompt of {prompt_width} tokens and a sample of {num_own} take "
                f"{taken(1, 1):,} bytes of keys and values, and the budget is {budget_bytes:,}; "
                f"raise it, or cut the model's layers and heads over more ranks"
            )
        size = next(
            (
                k
                for k in range(num_prompts - 1, 0, -1)
                if taken(k, min(num_places, k * n)) <= budget_bytes
            ),
            1,
        )
        room = (budget_bytes - taken(size, 0)) // taken(0, 1)
        places = min(num_places, size * n, room)
        log.info(
            "generation: %d prompts in %d waves of up to %d, %d samples at once: keys and values "
            "take %.2f GB of %.2f GB, and all at once would take %.2f GB",
            num_prompts, -(-num_prompts // size), size, places, taken(size, places) / 1e9,
            budget_bytes / 1e9, taken(num_prompts, min(num_places, num_prompts * n)) / 1e9,
        )  # fmt: skip
    starts = range(0, num_prompts, size)
    return [Wave(slice(start, min(start + size, num_prompts)), places) for start in starts]
