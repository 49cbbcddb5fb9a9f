"""Imports diffusers' StableDiffusionPipeline without a warning that concerns nothing here.

Its import makes transformers warn that image processors fall back to another form where torchvision
is missing. Training needs no image processor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["StableDiffusionPipeline"]


@contextmanager
def _drop_torchvision_warnings() -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return "requires torchvision" not in record.getMessage()

    logger = logging.getLogger("transformers.utils.import_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


with _drop_torchvision_warnings():
    from diffusers import StableDiffusionPipeline
