"""Our own tokenizers as the files of a Hugging Face folder, which transformers reads.

Both give the ids that they have in training: bytes are a byte-level BPE without merges, characters a
vocabulary of single ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybridflow.tasks.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer

__all__ = ["write_tokenizer"]

# Ids 0 on; CharTokenizer has the first two.
_SPECIAL = ("<|pad|>", "<|end|>", "<|begin|>")


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json; nothing for a tokenizer of somebody else's.

    Args:
        tokenizer: a `ByteTokenizer` or a `CharTokenizer`.
        folder: the model's folder.

    Raises:
        OSError: the files cannot be written.
    """
    if isinstance(tokenizer, ByteTokenizer):
        special, parts = _SPECIAL, _describe_bytes()
    elif isinstance(tokenizer, CharTokenizer):
        special, parts = _SPECIAL[:2], _describe_characters(tokenizer.alphabet)
    else:
        return
    added = [
        {
            "id": at, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for at, name in enumerate(special)
    ]  # fmt: skip
    tree = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    tree |= {"normalizer": None, "post_processor": None} | parts
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": special[0],
        "eos_token": special[1], "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tree, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _describe_bytes() -> dict[str, Any]:
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    # Special tokens stand in the vocabulary too; others would be numbered after it.
    vocab = {name: at for at, name in enumerate([*_SPECIAL, *_name_bytes()])}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
        "merges": [],
    }  # fmt: skip
    return {"pre_tokenizer": level, "decoder": level, "model": model}


def _name_bytes() -> list[str]:
    """The characters that stand for bytes in GPT-2's byte-level BPE: printable ones themselves."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in shown else next(rest)) for byte in range(256)]


def _describe_characters(alphabet: str) -> dict[str, Any]:
    vocab = dict(zip([*_SPECIAL[:2], *alphabet], range(2 + len(alphabet)), strict=True))
    each = {
        "type": "Split",
        "pattern": {"Regex": "[\\s\\S]"},
        "behavior": "Isolated",
        "invert": False,
    }
    # Its unknown token is none of the vocabulary, so that other characters are refused, as by ours.
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<|unknown|>"}
    return {"pre_tokenizer": each, "decoder": {"type": "Fuse"}, "model": model}
