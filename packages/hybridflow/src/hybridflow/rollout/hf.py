"""Generation by a Hugging Face model's own `generate`, for models that our decoder lacks.

Slower than `hybridflow.rollout.native.generator`: each sample prefills its prompt again, and a
batch lasts as long as its longest response. A logits processor draws each token from the same
random numbers as there and masks all others, so that greedy search takes it; `generate`'s own
sampling uses one generator for the whole batch. The model's generation settings (penalties,
truncations, forced tokens) are ignored, because its log-probabilities would then be of another
distribution than the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from hybridflow.models.end_tokens import find_token, find_tokenizer_end, list_ids
from hybridflow.rollout.end_tokens import resolve_end_tokens
from hybridflow.rollout.native.generator import Responses
from hybridflow.rollout.rows import responses, samples
from hybridflow.rollout.sampling import Sampling, draw, uniforms
from shared.errors import ConfigError

__all__ = ["generate", "resolve_by_model"]


class _Drawer:
    """A logits processor that draws the token itself, and masks all others.

    Attributes:
        log_probs: of the drawn tokens, [rows] for each step.
    """

    def __init__(
        self, sampling: Sampling, numbers: Tensor | None, after: Callable[[int], None]
    ) -> None:
        self._sampling, self._numbers, self._after = sampling, numbers, after
        self._is_done: Tensor | None = None
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draws from the logits of the next token, [rows, vocabulary]; returns masked ones."""
        if not self._sampling.is_greedy:
            scores = scores / self._sampling.temperature
        step = len(self.log_probs)
        tokens, log_probs = draw(scores, None if self._numbers is None else self._numbers[:, step])
        self.log_probs.append(log_probs)
        is_over = torch.full_like(tokens, step + 1 >= self._sampling.max_new_tokens).bool()
        for end in self._sampling.end_tokens:
            is_over |= tokens == end
        self._is_done = is_over if self._is_done is None else self._is_done | is_over
        self._after(int(self._is_done.sum()))
        only = torch.full_like(scores, float("-inf"))
        return only.scatter_(1, tokens[:, None], 0.0)


def generate(
    model: Any,
    prompts: Sequence[Int64[Tensor, " _"]],
    sampling: Sampling,
    *,
    sample_ids: Int64[Tensor, " samples"] | None = None,
    step: int = 0,
    num_places: int = 256,
    on_token: Callable[[int], None] | None = None,
) -> Responses:
    """Generates responses to prompts; arguments and result as of `native.generate`.

    Args:
        model: a causal language model of `transformers`, in evaluation mode.
        prompts: tokens of each; none may be empty.
        sampling: how tokens are drawn.
        sample_ids: ids of the samples, prompt by prompt; 0, 1, ... when not given.
        step: training step; random numbers differ between steps.
        num_places: samples in a batch.
        on_token: called after each step with the number of samples that are done.

    Raises:
        DataError: if there is no prompt, or one is empty.
        ConfigError: if the model has an encoder or too few positions, or an end token is not one of
            its tokens.
    """
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"{type(model).__name__}: expected a decoder alone, got an encoder-decoder model"
        )
    sampling = resolve_by_model(sampling, model)
    rows, ids = samples(prompts, sampling, sample_ids)
    longest = max(map(len, rows)) + sampling.max_new_tokens
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ConfigError(
            f"prompts of up to {longest - sampling.max_new_tokens} tokens and "
            f"{sampling.max_new_tokens} new ones take {longest} positions, and the model has "
            f"{positions}"
        )
    made: list[list[int]] = []
    worth: list[list[float]] = []
    num_steps = 0
    for start in range(0, len(rows), num_places):
        stop = min(start + num_places, len(rows))

        def after(num_done: int, start: int = start) -> None:
            if on_token is not None:
                on_token(start + num_done)

        tokens, log_probs = _batch(model, rows[start:stop], sampling, ids[start:stop], step, after)
        # The prefill yields the first token of a batch.
        num_steps += tokens.shape[1] - 1
        for row, values in zip(tokens.tolist(), log_probs.tolist(), strict=True):
            ends = (k for k, token in enumerate(row, 1) if token in sampling.end_tokens)
            count = next(ends, len(row))
            made.append(row[:count])
            worth.append(values[:count])
    return responses(rows, made, worth, num_steps=num_steps)


def resolve_by_model(sampling: Sampling, model: Any) -> Sampling:
    """Replaces end tokens by ids.

    By default they are those of the model's generation settings, and of the tokenizer in the folder
    that it was loaded from.

    Args:
        sampling: settings, as a user gave them or resolved already.
        model: a causal language model of `transformers`.

    Raises:
        ConfigError: an end token is not one of the model's.
    """
    name = getattr(model.config, "name_or_path", "")
    folder, is_folder = Path(name), bool(name) and Path(name, "config.json").is_file()
    named = list_ids(model.generation_config.eos_token_id, "generation_config")
    if is_folder:
        named += find_tokenizer_end(folder)
    return resolve_end_tokens(
        sampling,
        named,
        vocab_size=getattr(model.config.get_text_config(), "vocab_size", None),
        token_of=partial(find_token, folder) if is_folder else None,
    )


def _batch(
    model: Any,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    ids: Tensor,
    step: int,
    after: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities [rows, steps]; values after a row's end token are undefined."""
    from transformers import GenerationConfig, LogitsProcessorList

    device = model.device
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    mask = torch.arange(width) >= width - lengths[:, None]
    numbers = None
    if not sampling.is_greedy:
        numbers = uniforms(sampling.seed, step, ids.to(device), sampling.max_new_tokens)
    drawer = _Drawer(sampling, numbers, after)
    own = model.generation_config
    # `generate` fills unset settings from the model's generation_config, so that must be empty.
    model.generation_config = GenerationConfig()
    try:
        found = model.generate(
            tokens.to(device),
            attention_mask=mask.long().to(device),
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,
                eos_token_id=list(sampling.end_tokens) or None,
                pad_token_id=0,
            ),
            logits_processor=LogitsProcessorList([drawer]),
        )
    finally:
        model.generation_config = own
    return found[:, width:].cpu(), torch.stack(drawer.log_probs, 1).cpu()
