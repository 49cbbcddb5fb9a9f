"""Models by a folder, a config.json, or the name of a published shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError
from shared.files import read_model_config

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
        DataError: there is none.
        ConfigError: transformers does not know its kind.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if str(model) in SHAPES:
        return AutoConfig.for_model("llama", **SHAPES[str(model)])
    tree, path = read_model_config(model, f"one of {', '.join(SHAPES)}")
    try:
        return AutoConfig.for_model(**tree)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConfigError(
            f"{path}: expected the configuration of a model that transformers knows, got: "
            f"{' '.join(str(error).split())}; save it anew"
        ) from error
