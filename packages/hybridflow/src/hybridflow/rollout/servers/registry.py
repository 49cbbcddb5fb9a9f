"""The servers that can draw responses; recipes, checks and `ServerRollout` read this list."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.registry import Registry

if TYPE_CHECKING:
    from hybridflow.rollout.servers.dialect import Dialect

__all__ = ["SERVERS"]

SERVERS: Registry[str, Callable[..., Dialect]] = Registry("server.kind")
"""By name, what makes the dialect of a connection, `load_timeout_s` and `log_probs_mode`."""
SERVERS.add("vllm", "hybridflow.rollout.servers.vllm:VLLM", "vllm serve")
SERVERS.add("sglang", "hybridflow.rollout.servers.sglang:SGLang", "sglang serve")
