"""The tokens that end a response: those asked for, or else those that the model names.

All generators resolve `Sampling.end_token` here before they start, so that each of them ends
responses at the same tokens, and refuses the same mistakes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from hybridflow.models.config import DecoderConfig
from hybridflow.models.end_tokens import find_token
from hybridflow.rollout.sampling import EndTokens, Sampling
from shared.errors import ConfigError

__all__ = ["resolve_by_config", "resolve_end_tokens"]

log = logging.getLogger(__name__)


def resolve_end_tokens(
    sampling: Sampling,
    named: Iterable[int],
    *,
    vocab_size: int | None = None,
    token_of: Callable[[str], int] | None = None,
) -> Sampling:
    """Replaces the end tokens of a sampling by ids.

    Args:
        sampling: settings, as a user gave them or resolved already.
        named: ids that the model and its tokenizer name; used if the sampling names none itself.
            Those outside the vocabulary are left out, with a warning, as no model generates them.
        vocab_size: number of ids of the model; None if unknown.
        token_of: function from a text to the id of its only token; None without a tokenizer.

    Returns:
        The same settings, with `end_token` None or ascending ids.

    Raises:
        ConfigError: an end token that was asked for is outside the vocabulary, or is a text and
            there is no tokenizer, or the text is not one token.
    """
    asked = sampling.end_token
    if asked is None:
        return sampling
    if asked is EndTokens.OF_MODEL:
        ids = sorted(set(named))
        usable = [
            token for token in ids if token >= 0 and (vocab_size is None or token < vocab_size)
        ]
        if len(usable) < len(ids):
            log.warning(
                "the model names the end tokens %s, and has %s ids; %s end a response",
                ids, vocab_size, usable or "none of them",
            )  # fmt: skip
        return replace(sampling, end_token=tuple(usable) or None)
    wanted = asked if isinstance(asked, tuple) else (asked,)
    ids = sorted({token if isinstance(token, int) else _read(token, token_of) for token in wanted})
    outside = [token for token in ids if vocab_size is not None and token >= vocab_size]
    if outside:
        raise ConfigError(
            f"sampling.end_token: expected ids below {vocab_size}, the model's vocabulary, got "
            f"{outside[0]}, which no response would ever contain; give the id of a token that the "
            "model can generate"
        )
    return replace(sampling, end_token=tuple(ids))


def resolve_by_config(
    sampling: Sampling, config: DecoderConfig, prompts_end: Iterable[int] = ()
) -> Sampling:
    """As `resolve_end_tokens`, with a decoder's configuration.

    Args:
        sampling: settings, as a user gave them or resolved already.
        config: of the model that generates.
        prompts_end: ids that the prompts' tokenizer names.

    Raises:
        ConfigError: an end token is not one of the model's.
    """
    return resolve_end_tokens(
        sampling,
        (*config.end_tokens, *prompts_end),
        vocab_size=config.vocab_size,
        token_of=None if config.folder is None else partial(find_token, config.folder),
    )


def _read(text: str, token_of: Callable[[str], int] | None) -> int:
    if token_of is None:
        raise ConfigError(
            f"sampling.end_token: expected ids, as the model has no folder with a tokenizer, got "
            f"the text {text!r}; give the token's id, such as tokenizer.end_token or eos_token_id"
        )
    return token_of(text)
