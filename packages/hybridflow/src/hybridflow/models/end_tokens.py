"""End tokens that a Hugging Face folder names, and ids of texts by its tokenizer.

transformers ends responses at the ids in generation_config.json, or without that file at those in
config.json. A tokenizer names one token by its text; vLLM ends responses at it too, and so do we.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

__all__ = ["find_token", "find_tokenizer_end", "list_ids", "read_end_tokens"]


def list_ids(named: Any, where: str) -> tuple[int, ...]:
    """The ids in an `eos_token_id`: a number, a list of them, or None.

    Raises:
        ConfigError: it is none of these.
    """
    ids = () if named is None else named if isinstance(named, list | tuple) else (named,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(f"{where}: expected eos_token_id to be a number or a list, got {named!r}")
    return tuple(ids)


def read_end_tokens(folder: Path, tree: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens that a folder names, ascending.

    Args:
        folder: a model's folder.
        tree: its config.json.

    Raises:
        ConfigError: a file names them in another form.
    """
    path = folder / "generation_config.json"
    named = (_read(path) if path.is_file() else tree).get("eos_token_id")
    ids = list_ids(named, str(path if path.is_file() else folder / "config.json"))
    return tuple(sorted({*ids, *find_tokenizer_end(folder)}))


def find_tokenizer_end(folder: Path) -> tuple[int, ...]:
    """The id of the `eos_token` in a tokenizer's files; none if they do not tell."""
    settings = _read(folder / "tokenizer_config.json")
    end = settings.get("eos_token") or _read(folder / "special_tokens_map.json").get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    if not isinstance(text, str):
        return ()
    for token, entry in (settings.get("added_tokens_decoder") or {}).items():
        if entry.get("content") == text:
            return (int(token),)
    tokenizer = _read(folder / "tokenizer.json")
    ids = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", ())}
    vocabulary = tokenizer.get("model", {}).get("vocab")
    for names in (
        ids,
        vocabulary,
        _read(folder / "vocab.json"),
        _read(folder / "added_tokens.json"),
    ):
        if isinstance(names, dict) and isinstance(names.get(text), int):
            return (names[text],)
    return ()


def _read(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty if there is no file, or no object in it."""
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON, got {error}; save the folder anew") from error
    return tree if isinstance(tree, dict) else {}


def find_token(folder: Path, text: str) -> int:
    """The id of a text that is one token of a folder's tokenizer.

    Raises:
        ConfigError: the text is several tokens or none, the folder has no tokenizer, or
            transformers, which reads it, is not installed.
    """
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:
        # The library raises no narrower one.
        raise ConfigError(
            f"sampling.end_token: the text {text!r} needs the tokenizer in {folder}, and transformers "
            f"could not read one: {error}; give the token's id"
        ) from error
    is_unknown = ids == [tokenizer.unk_token_id] and text != tokenizer.unk_token
    if len(ids) != 1 or is_unknown:
        raise ConfigError(
            f"sampling.end_token: expected a text that is one token of {folder}, got {text!r}, which "
            f"is {'none' if is_unknown or not ids else len(ids)}; give one token, or its id"
        )
    return ids[0]
