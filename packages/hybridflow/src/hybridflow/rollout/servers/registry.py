"""Registry of rollout servers, read by recipes, checks and `ServerRollout`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.registry import Registry

if TYPE_CHECKING:
    from hybridflow.rollout.servers.dialect import Dialect

__all__ = ["SERVERS"]

SERVERS: Registry[str, Callable[..., Dialect]] = Registry("server.kind")
"""By name, a function of connection, `load_timeout_s` and `log_probs_mode` to a `Dialect`."""
SERVERS.add("vllm", "hybridflow.rollout.servers.vllm:VLLM", "vllm serve")
SERVERS.add("sglang", "hybridflow.rollout.servers.sglang:SGLang", "sglang serve")
