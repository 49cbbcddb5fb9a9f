"""Fixtures that several test files share."""

from .s3server import s3, s3_server

__all__ = ["s3", "s3_server"]
