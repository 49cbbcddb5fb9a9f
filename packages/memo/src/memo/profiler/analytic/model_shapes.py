"""Models by a folder, a config.json, or the name of a published shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["SHAPES", "read_config"]

SHAPES: dict[str, dict[str, Any]] = {
    "llama-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Shapes that are known without a file: the published ones of Llama 2 7B, 3.1 8B and 3.2 1B."""


def read_config(model: str | Path) -> PretrainedConfig:
    """A model's configuration.

    Args:
        model: a folder with a config.json, such a file, or one of `SHAPES`.

    Raises:
        ConfigError: there is none, or transformers does not know its kind.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if str(model) in SHAPES:
        return AutoConfig.for_model("llama", **SHAPES[str(model)])
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return AutoConfig.for_model(**tree)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(
            f"{path}: expected a model's folder, its config.json with a model_type that transformers knows, "
            f"or one of {', '.join(SHAPES)}, got: {reason}; name one of these"
        ) from error
