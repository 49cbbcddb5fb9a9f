"""JSON over HTTP, with timeouts, retries and errors that say what to do.

Python's own client is enough: a request to a rollout server lasts seconds, so connections need not
be reused. Proxy settings of the environment are ignored, as rollout servers are on the run's own
network.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from shared.errors import CommError, ConfigError

__all__ = ["Connection"]

_AGAIN = frozenset({429, 502, 503, 504})
"""Status codes of a server that is overloaded or still starting; such requests are retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Address of a server, and how requests to it are retried.

    Attributes:
        url: http://HOST:PORT or https://HOST:PORT, with a path prefix if there is one.
        timeout_s: seconds without a byte from the server after which a try fails.
        num_tries: tries of a request that changes nothing on the server.
        backoff_s: seconds before the second try; doubled before each further one.
        api_key: sent as a bearer token; None: none is sent.
        max_answer_bytes: most bytes of one answer; a longer one is refused.
    """

    url: str
    timeout_s: float = 600.0
    num_tries: int = 5
    backoff_s: float = 0.5
    api_key: str | None = None
    max_answer_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url: expected http://HOST:PORT, got {self.url!r}")
        if self.timeout_s <= 0 or self.num_tries < 1 or self.backoff_s < 0:
            raise ConfigError(
                f"expected timeout_s above 0, num_tries of at least 1 and backoff_s of at least 0, "
                f"got {self.timeout_s}, {self.num_tries} and {self.backoff_s}"
            )

    def get(self, path: str) -> Any:
        """The parsed JSON at a path; raises as `post`."""
        return self._ask("GET", path, None, self.timeout_s, self.num_tries)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        num_tries: int | None = None,
    ) -> Any:
        """Posts a body, and returns the answer.

        Args:
            path: appended to the url.
            body: sent as JSON.
            timeout_s, num_tries: replace the connection's; None keeps those.

        Returns:
            The parsed JSON; None for an empty answer.

        Raises:
            CommError: if there is no answer after all tries, the server refuses, or its answer is
                not JSON or too long.
        """
        return self._ask(
            "POST", path, body or {}, timeout_s or self.timeout_s, num_tries or self.num_tries
        )

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        num_tries: int,
    ) -> Any:
        began, reason = time.monotonic(), ""
        for attempt in range(num_tries):
            if attempt:
                # With jitter, because many requests fail together when a server stops.
                time.sleep(self.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            try:
                status, text = self._once(method, path, body, timeout_s)
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if status in _AGAIN:
                reason = f"status {status}: {text[:300]!r}"
                continue
            if status != 200:
                raise CommError(
                    f"{method} {self.url}{path}: the server refused with status {status}: "
                    f"{text[:500]!r}"
                )
            try:
                return json.loads(text) if text.strip() else None
            except ValueError as error:
                raise CommError(
                    f"{method} {self.url}{path}: expected JSON, got {text[:200]!r}; is there "
                    f"another service at this address?"
                ) from error
        raise CommError(
            f"{method} {self.url}{path}: no answer in {num_tries} tries and "
            f"{time.monotonic() - began:.1f} s, at last {reason}; start the server, or fix the url"
        )

    def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, str]:
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        assert parts.hostname is not None, "looked at when made"
        connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(
                method,
                parts.path.rstrip("/") + path,
                None if body is None else json.dumps(body).encode(),
                headers,
            )
            answer = connection.getresponse()
            text = answer.read(self.max_answer_bytes + 1)
            if len(text) > self.max_answer_bytes:
                raise CommError(
                    f"{method} {self.url}{path}: expected an answer of at most "
                    f"{self.max_answer_bytes:,} bytes (max_answer_bytes), got a longer one; is "
                    f"there another service at this address?"
                )
            return answer.status, text.decode("utf-8", "replace")
        finally:
            connection.close()
