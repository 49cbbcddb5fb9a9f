"""Tokenizers: bytes, characters of an alphabet, and those of transformers behind one protocol.

Token 0 is padding only, so that batches are padded without a tokenizer. Special tokens have no
text: decoding leaves them out. A model's vocabulary may be larger than its tokenizer's; ids that
the tokenizer lacks decode to U+FFFD, as invalid bytes do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shared.errors import ConfigError, DataError

__all__ = [
    "ByteTokenizer",
    "CharTokenizer",
    "ChatTokenizer",
    "HuggingFaceTokenizer",
    "Tokenizer",
    "as_tokenizer",
]

_UNKNOWN = "\ufffd"


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of tokenizers to prompts, rewards and tasks."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        ...

    @property
    def pad_token(self) -> int:
        """The padding token, 0."""
        ...

    @property
    def end_token(self) -> int:
        """The token that ends a response."""
        ...

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without an end token."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, special ones left out."""
        ...


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer with a model's chat template."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation, up to the start of the model's answer."""
        ...


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """The bytes of UTF-8, after three special tokens.

    Decoding restores any str exactly, lone surrogates included.
    """

    pad_token = 0
    end_token = 1
    begin_token = 2
    vocab_size = 3 + 256

    def encode(self, text: str) -> list[int]:
        """One token per byte."""
        return [3 + byte for byte in text.encode("utf-8", "surrogatepass")]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; invalid UTF-8 becomes U+FFFD."""
        # 0xFF never occurs in UTF-8, so ids beyond the vocabulary decode to U+FFFD.
        data = bytes(
            token - 3 if token < self.vocab_size else 0xFF
            for token in ids
            if token > self.begin_token
        )
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class CharTokenizer:
    """One token for each character of an alphabet, after the two special tokens.

    Attributes:
        alphabet: the characters, in the order of their ids, from 2 on.

    Raises:
        ConfigError: the alphabet is empty, or has a character twice.
    """

    alphabet: str
    pad_token = 0
    end_token = 1

    def __post_init__(self) -> None:
        if not self.alphabet or len(set(self.alphabet)) < len(self.alphabet):
            raise ConfigError(
                f"alphabet: expected one character or more, each once, got {self.alphabet!r}"
            )

    @property
    def vocab_size(self) -> int:
        """Number of ids, the two special ones included."""
        return 2 + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """One token per character.

        Raises:
            DataError: a character is not in the alphabet.
        """
        ids = [2 + self.alphabet.find(char) for char in text]
        if 1 in ids:
            at = ids.index(1)
            raise DataError(
                f"character {text[at]!r} at {at} of {text!r}: expected those of "
                f"{self.alphabet!r}; add it to the alphabet, or use ByteTokenizer"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; ids beyond the alphabet become U+FFFD."""
        return "".join(
            self.alphabet[token - 2] if token < self.vocab_size else _UNKNOWN
            for token in ids
            if token > self.end_token
        )


@dataclass(frozen=True, slots=True)
class HuggingFaceTokenizer:
    """Adapts a tokenizer of `transformers` to `Tokenizer`; made by `as_tokenizer`.

    Rows are padded with 0 instead of its own padding token; lengths and masks mark real tokens.
    Encoded text has the special tokens that the tokenizer adds by itself, such as a start token.
    """

    tokenizer: Any
    pad_token = 0

    @property
    def vocab_size(self) -> int:
        """Number of ids, added ones included."""
        return len(self.tokenizer)

    @property
    def end_token(self) -> int:
        """The tokenizer's `eos_token_id`."""
        return self.tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without the end token that some tokenizers add.

        Raises:
            DataError: the tokenizer has no tokens for the text.
        """
        try:
            ids = self.tokenizer.encode(text)
        except Exception as error:
            # The library raises no narrower one.
            raise DataError(
                f"the tokenizer has no tokens for {text!r:.80}: {error}; give texts of the kind that "
                "the model was trained on"
            ) from error
        return ids[:-1] if ids and ids[-1] == self.end_token else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, special ones left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation by the tokenizer's chat template.

        Raises:
            DataError: the template is missing, or does not take these messages.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # A template is a program, which may raise any exception.
            raise DataError(
                f"the tokenizer's chat template cannot format {list(messages)!r}: {error}; set "
                "tokenizer.chat_template, fix the messages, or give prompts as strings"
            ) from error
        # The template has written the special tokens already.
        return self.tokenizer.encode(text, add_special_tokens=False)


def as_tokenizer(obj: Any) -> Tokenizer:
    """The object itself if it is a `Tokenizer`, else an adapter to one of `transformers`.

    Raises:
        ConfigError: it is neither, or has no end token.
    """
    if isinstance(obj, Tokenizer):
        return obj
    if not all(hasattr(obj, name) for name in ("encode", "decode", "eos_token_id")):
        raise ConfigError(
            f"tokenizer: expected one with encode, decode, vocab_size, pad_token and end_token, or "
            f"one of transformers, got {type(obj).__name__}"
        )
    if obj.eos_token_id is None:
        raise ConfigError(
            f"tokenizer: {type(obj).__name__} has no end token; set its eos_token to the one that "
            "ends the model's responses"
        )
    return HuggingFaceTokenizer(obj)
