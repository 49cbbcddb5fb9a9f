"""Generated streams of events, of any size, for measuring speed.

A stream depends on its arguments alone, and its label says that it is generated.
"""

import numpy as np

from shared.data.events import Events
from shared.errors import ConfigError

__all__ = ["zipf"]


def zipf(
    num_nodes: int, num_events: int, seed: int = 0, *, exponent: float = 1.0, edge_dim: int = 0
) -> Events:
    """Generates events whose ends follow Zipf's law, in order of time; only for measuring speed.

    The n-th likeliest node is an end with a chance in proportion to n ** -exponent, independently at
    both ends, but that none meets itself. Which node is the n-th is drawn, and differs between
    sources and destinations. There is an event a second on average.

    Args:
        num_nodes: at least 2.
        num_events: at least 0.
        seed: of everything random.
        exponent: 0 makes all nodes equally likely.
        edge_dim: columns of features, drawn from a normal distribution; the events are the same for
            any.

    Raises:
        ConfigError: a size is out of range, or the exponent is negative or not finite.
    """
    if num_nodes < 2 or num_events < 0 or edge_dim < 0:
        raise ConfigError(
            "zipf: expected 2 nodes or more, and 0 events and edge_dim or more, got "
            f"{num_nodes}, {num_events} and {edge_dim}"
        )
    if not 0 <= exponent < float("inf"):
        raise ConfigError(f"zipf: expected an exponent of 0 or more, got {exponent}")
    random = np.random.default_rng([seed, *b"zipf"])
    reached = np.cumsum(np.arange(1, num_nodes + 1, dtype=np.float64) ** -exponent)

    def ends() -> np.ndarray:
        rank = np.searchsorted(reached, random.random(num_events) * reached[-1], "right")
        return random.permutation(num_nodes)[np.minimum(rank, num_nodes - 1)]

    src, dst = ends(), ends()
    dst = np.where(src == dst, (dst + 1) % num_nodes, dst)
    t = np.sort(random.integers(0, max(num_events, 1), num_events))
    features = random.standard_normal((num_events, edge_dim), np.float32) if edge_dim else None
    label = f"generated: Zipf, exponent {exponent:g}, {num_nodes:,} nodes, seed {seed}"
    return Events(src, dst, t, None, features, label)
