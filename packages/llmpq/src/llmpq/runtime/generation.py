"""What a model's generation_config asks for: rules that change greedy answers, and what is left out.

transformers' own processors apply the rules, to each prompt by itself and without its padding, so that
answers are those of its `generate` for that prompt alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process

from llmpq.data import read_generation_config
from shared.errors import ConfigError

__all__ = ["GenerationRules", "read_rules"]

_LOG = logging.getLogger(__name__)

_HONOURED = (
    "sequence_bias", "encoder_repetition_penalty", "repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
_IGNORED = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff",
    "eta_cutoff", "renormalize_logits", "num_beams", "num_beam_groups", "diversity_penalty",
    "length_penalty", "early_stopping", "penalty_alpha", "dola_layers", "guidance_scale",
    "watermarking_config", "constraints", "force_words_ids", "stop_strings", "token_healing",
    "max_length", "max_new_tokens", "max_time", "num_return_sequences",
)  # fmt: skip
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "temperature": (1.0,),
    "top_k": (50, 0),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "renormalize_logits": (False,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "guidance_scale": (1.0,),
    "token_healing": (False,),
    "max_length": (20,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "remove_invalid_values": (False,),
}
"""Values that ask for nothing, beside None and empty ones."""


class GenerationRules:
    """Rules that change which token is the most probable one, after transformers' `generate`.

    Attributes:
        fields: honoured fields of the generation config, by name.
    """

    def __init__(self, config: GenerationConfig | None = None) -> None:
        """Keeps what a generation config asks for; without one there are no rules."""
        self.fields = {} if config is None else _asked(config, _HONOURED)

    def __bool__(self) -> bool:
        return bool(self.fields)

    def start(
        self, prompts: Sequence[Tensor], max_new_tokens: int, ends: Sequence[int]
    ) -> list[LogitsProcessorList]:
        """Makes the processors of each prompt.

        Args:
            prompts: token ids of each prompt, without padding.
            max_new_tokens: most tokens of an answer.
            ends: tokens that end an answer; without any, rules on the end do not apply.

        Raises:
            ConfigError: transformers refuses a field; names all of them.
        """
        of_end = torch.tensor(list(ends), dtype=torch.int64)
        try:
            return [self._processors(prompt, max_new_tokens, of_end) for prompt in prompts]
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"generation_config.json: expected fields that transformers takes, got {self.fields}: "
                f"{error}"
            ) from error

    def _processors(self, prompt: Any, max_new_tokens: int, ends: Tensor) -> LogitsProcessorList:
        """Processors in the order in which `generate` applies them."""
        fields, length = self.fields, len(prompt)
        found = LogitsProcessorList()
        # transformers has rules on the end only where there is one.
        needs_end = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")
        for name in _HONOURED:
            if name not in fields or (name in needs_end and not len(ends)):
                continue
            value = fields[name]
            make: Mapping[str, Any] = {
                "sequence_bias": lambda v: logits_process.SequenceBiasLogitsProcessor(v),
                "encoder_repetition_penalty": lambda v: (
                    logits_process.EncoderRepetitionPenaltyLogitsProcessor(v, prompt[None])
                ),
                "repetition_penalty": logits_process.RepetitionPenaltyLogitsProcessor,
                "no_repeat_ngram_size": logits_process.NoRepeatNGramLogitsProcessor,
                "encoder_no_repeat_ngram_size": lambda v: (
                    logits_process.EncoderNoRepeatNGramLogitsProcessor(v, prompt[None])
                ),
                "bad_words_ids": lambda v: logits_process.NoBadWordsLogitsProcessor(v, ends),
                "min_length": lambda v: logits_process.MinLengthLogitsProcessor(v, ends),
                "min_new_tokens": lambda v: logits_process.MinNewTokensLengthLogitsProcessor(
                    length, v, ends
                ),
                "forced_bos_token_id": logits_process.ForcedBOSTokenLogitsProcessor,
                "forced_eos_token_id": lambda v: logits_process.ForcedEOSTokenLogitsProcessor(
                    length + max_new_tokens, v
                ),
                "remove_invalid_values": lambda v: logits_process.InfNanRemoveLogitsProcessor(),
                "exponential_decay_length_penalty": lambda v: (
                    logits_process.ExponentialDecayLengthPenalty(tuple(v), ends, length)
                ),
                "suppress_tokens": logits_process.SuppressTokensLogitsProcessor,
                "begin_suppress_tokens": lambda v: (
                    logits_process.SuppressTokensAtBeginLogitsProcessor(
                        v, length + (length <= 1 and "forced_bos_token_id" in fields)
                    )
                ),
            }
            found.append(make[name](value))
        return found


@lru_cache(maxsize=64)
def _tell_ignored(folder: str, text: str) -> None:
    _LOG.warning(
        "%s: its generation config asks for %s, which is not taken; --temperature, --top-p and "
        "--new-tokens decide",
        folder, text,
    )  # fmt: skip


def read_rules(folder: str | Path) -> GenerationRules:
    """Reads a model's rules, and logs once what its generation config asks for besides.

    Raises:
        ConfigError: the generation config is malformed, or a rule has a value that it may not have.
    """
    config = read_generation_config(folder)
    ignored = _asked(config, _IGNORED)
    if ignored:
        _tell_ignored(
            str(folder), ", ".join(f"{name}={value!r}" for name, value in ignored.items())
        )
    rules = GenerationRules(config)
    rules.start(
        [torch.zeros(1, dtype=torch.int64)], 1, [0]
    )  # fails where a field has a wrong value
    return rules


def _asked(config: GenerationConfig, names: Sequence[str]) -> dict[str, Any]:
    """Fields that ask for something, by name."""
    found = {name: getattr(config, name, None) for name in names}
    return {
        name: value
        for name, value in found.items()
        if value is not None and value not in ([], {}, ()) and value not in _DEFAULTS.get(name, ())
    }
