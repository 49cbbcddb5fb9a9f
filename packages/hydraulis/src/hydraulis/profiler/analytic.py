"""Seconds of groups of ranks from data sheets: operations over a peak, bytes over links."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydraulis.config import Cost
from hydraulis.planner.degrees import DegreeCost
from shared.errors import ConfigError
from shared.files import read_model_config
from shared.topology.device import PRESETS

__all__ = ["SHAPES", "degree_cost", "read_config"]

SHAPES = {
    "llama-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    },
}  # fmt: skip
"""Models whose shape is known without a file (Llama 2 7B's published configuration)."""

_ITEM_BYTES = 2
_TRANSFERS = 3
"""Times that keys and values cross each link: forward, backward, and their gradients."""


def read_config(model: str | Path) -> Any:
    """A model's configuration, from a folder, a config.json or the name of one of `SHAPES`.

    Raises:
        DataError: there is none.
        ConfigError: it lacks what a decoder's seconds depend on; names the key.
    """
    if str(model) in SHAPES:
        return SimpleNamespace(**SHAPES[str(model)])
    tree, path = read_model_config(model, f"one of {', '.join(SHAPES)}")
    needed = [key for key in SHAPES["llama-7b"] if key != "num_key_value_heads"]
    missing = [key for key in needed if key not in tree]
    if missing:
        raise ConfigError(f"{path}: expected a decoder of the Llama kind, got no {missing[0]!r}")
    return SimpleNamespace(**tree)


def degree_cost(
    config: Any,
    *,
    device: str,
    efficiency: float,
    max_tokens: int,
    num_ranks: int,
    ranks_per_node: int,
    node_bytes_per_s: float,
    network_bytes_per_s: float,
    fixed_s: float,
) -> DegreeCost:
    """The cost of groups of context parallelism by ring attention.

    A rank of a ring passes on the keys and values of all others' tokens, forward and backward, and their
    gradients: of a document of s tokens (d - 1) / d of its bytes, over the slowest link of the group.
    That none of it is hidden behind attention is an assumption, on the safe side.

    Args:
        config: see `training_operations`.
        device: a preset of `shared.topology`.
        efficiency: share of its 16-bit peak that is reached, in (0, 1].
        max_tokens: most tokens that a rank holds.
        num_ranks: ranks in all.
        ranks_per_node: ranks that the faster link connects.
        node_bytes_per_s, network_bytes_per_s: of a rank, inside a node and between nodes.
        fixed_s: seconds of any micro-batch.

    Raises:
        ConfigError: an unknown device, or a number outside its range.
    """
    if device not in PRESETS:
        raise ConfigError(f"device: expected one of {', '.join(PRESETS)}, got {device!r}")
    if not 0 < efficiency <= 1:
        raise ConfigError(f"efficiency: expected a share in (0, 1], got {efficiency}")
    for name, value in {
        "ranks": num_ranks, "ranks_per_node": ranks_per_node,
        "node_bytes_per_s": node_bytes_per_s, "network_bytes_per_s": network_bytes_per_s,
    }.items():  # fmt: skip
        if not value > 0:
            raise ConfigError(f"{name}: expected more than 0, got {value}")
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    token_bytes = _TRANSFERS * 2 * _ITEM_BYTES * config.num_hidden_layers * kv_heads * head_dim
    message_s = {}
    for power in range(1, num_ranks.bit_length()):
        degree = 2**power
        rate = node_bytes_per_s if degree <= ranks_per_node else network_bytes_per_s
        message_s[degree] = token_bytes * (degree - 1) / degree / rate
    return DegreeCost(
        cost=Cost.of_model(config, efficiency * PRESETS[device].flops_per_s, fixed_s),
        cap=max_tokens,
        message_s=message_s,
    )
