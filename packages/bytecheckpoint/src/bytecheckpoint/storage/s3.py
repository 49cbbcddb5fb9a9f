"""Checkpoints in S3 and compatible stores: parallel multipart uploads, conditional puts.

Blocks of a file are the parts of a multipart upload, so that any thread can send any of them. The
manifest is put with `If-None-Match: *`, so that the store itself decides between two savers.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as BotoConnectionError

from bytecheckpoint.storage.base import WRITE_BYTES, Buffer
from bytecheckpoint.storage.fsspec import WAITS_S, FsspecStorage

__all__ = ["S3Storage"]

_MAX_PARTS = 10_000
_MAX_CONNECTIONS = 64
# Error codes that a retry may resolve, beside those of status 500 and above.
_PASSING_STATUS = {408, 409, 429}
_PASSING_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}
# s3fs maps this code to FileExistsError only if the answer names the condition that failed.
_THERE = "PreconditionFailed"


class S3Storage(FsspecStorage):
    """A bucket's prefix; credentials and endpoint as boto finds them (AWS_ENDPOINT_URL, ...).

    Uploads that a killed process left unfinished hold space until the bucket's lifecycle rule
    (AbortIncompleteMultipartUpload) removes them.
    """

    _has_conditional_puts = True
    _library_errors = (BotoCoreError, aiohttp.ClientError)

    def __init__(self, url: str, *, waits_s: Sequence[float] = WAITS_S, **options: object) -> None:
        # Only our layer retries. An instance of our own: fsspec shares instances of equal options.
        config = {"retries": {"total_max_attempts": 1}, "max_pool_connections": _MAX_CONNECTIONS}
        super().__init__(url, waits_s=waits_s, config_kwargs=config, **options)
        self._fs.retries = 1

    def create(self, path: str, num_bytes: int) -> S3Sink:
        """Begins an upload.

        Raises:
            OSError: the file has more parts than S3 accepts.
        """
        if num_bytes > WRITE_BYTES * _MAX_PARTS:
            raise OSError(
                errno.EFBIG,
                f"expected at most {_MAX_PARTS} parts of {WRITE_BYTES} bytes, got a file of "
                f"{num_bytes} bytes; save from more ranks",
                f"{self.url}/{path}",
            )
        return S3Sink(self, path, num_bytes)

    def remove_tree(self, path: str) -> None:
        """Removes all objects below a prefix, but never the bucket."""
        found = self.call(path, lambda: self._fs.find(self._make_full(path)))
        if found:
            self.call(path, lambda: self._fs.rm(found))

    def request(self, method: str, path: str, **arguments: object) -> dict[str, Any]:
        """Calls one of boto's methods on an object, with retries."""
        bucket, key, _ = self._fs.split_path(self._make_full(path))
        return self.call(
            path, lambda: self._fs.call_s3(method, Bucket=bucket, Key=key, **arguments)
        )

    def _can_pass(self, error: Exception) -> bool:
        answer = error.__cause__
        if isinstance(answer, ClientError):
            status = answer.response["ResponseMetadata"].get("HTTPStatusCode", 500)
            code = answer.response["Error"].get("Code")
            return status >= 500 or status in _PASSING_STATUS or code in _PASSING_CODES
        lost = (BotoConnectionError, HTTPClientError, aiohttp.ClientError, TimeoutError)
        return isinstance(error, (*lost, ConnectionError))

    def _name_error(self, path: str, error: Exception) -> OSError:
        answer = error.__cause__
        if isinstance(answer, ClientError) and answer.response["Error"].get("Code") == _THERE:
            return FileExistsError(errno.EEXIST, "there is an object", f"{self.url}/{path}")
        return super()._name_error(path, error)


class S3Sink:
    """An upload: one block as one put, several as parts."""

    def __init__(self, storage: S3Storage, path: str, num_bytes: int) -> None:
        self._storage = storage
        self._path = path
        self._num_bytes = num_bytes
        self._block = b""
        self._parts: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._upload: str | None = None
        if num_bytes > WRITE_BYTES:
            self._upload = storage.request("create_multipart_upload", path)["UploadId"]

    def write_at(self, offset: int, data: Buffer) -> None:
        """Sends a block; a file's only block waits for `finish`."""
        body = bytes(data)  # boto takes no memoryview
        if self._upload is None:
            self._block = body
            return
        number = offset // WRITE_BYTES + 1
        part = self._storage.request(
            "upload_part", self._path, UploadId=self._upload, PartNumber=number, Body=body
        )
        kept = {key: value for key, value in part.items() if key == "ETag" or "Checksum" in key}
        with self._lock:
            self._parts[number] = {"PartNumber": number, **kept}

    def finish(self) -> None:
        """Makes the object appear."""
        if self._upload is None:
            assert len(self._block) == self._num_bytes, f"{self._path}: no block came"
            self._storage.request("put_object", self._path, Body=self._block)
            return
        parts = [part for _, part in sorted(self._parts.items())]
        assert len(parts) == -(-self._num_bytes // WRITE_BYTES), f"{self._path}: blocks are missing"
        try:
            self._storage.request(
                "complete_multipart_upload",
                self._path,
                UploadId=self._upload,
                MultipartUpload={"Parts": parts},
            )
        except FileNotFoundError:
            # No such upload: completed by a request whose answer was lost?
            if self._storage.size(self._path) != self._num_bytes:
                raise
        self._upload = None

    def abort(self) -> None:
        """Frees the parts that were sent."""
        upload, self._upload = self._upload, None
        if upload is not None:
            with suppress(Exception):
                self._storage.request("abort_multipart_upload", self._path, UploadId=upload)
