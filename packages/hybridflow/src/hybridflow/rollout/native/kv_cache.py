"""Keys and values of a generation: each prompt's, shared by its samples, and each sample's own.

Shapes: N prompts, P tokens of the longest, S slots for samples, M generated positions of a sample,
K key heads of this shard, E a head's size.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.models.decoder import Attend, Decoder, Layer, see_causally
from hybridflow.models.rotary import rotate
from shared.kernels.decode import Places, attend

__all__ = ["KVCache"]


class KVCache:
    """The key-value cache of this stage's layers; keys at index 0, values at 1, positions last."""

    def __init__(
        self, model: Decoder, num_prompts: int, prompt_width: int, num_slots: int, num_own: int
    ) -> None:
        """Allocates [2, N, K, E, P] and [2, S, K, E, M] per layer."""
        weight, heads = model.get_parameter("layers.0.qkv"), model.shard.num_kv_heads
        self._first = model.shard.layers.start

        def empty(rows: int, positions: int) -> list[Tensor]:
            shape = (2, rows, heads, model.config.head_dim, positions)
            return [weight.new_empty(shape) for _ in model.shard.layers]

        self._prompts, self._own = empty(num_prompts, prompt_width), empty(num_slots, num_own)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(tensor.nbytes for tensor in (*self._prompts, *self._own))

    def reading(self, rows: slice) -> Attend:
        """Causal attention over some prompts, which writes their keys and values to the cache."""

        def read(layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            q, k, v = rotate(qkv, cos, sin, layer.num_heads, layer.num_kv_heads)
            kept = self._prompts[layer.index - self._first][:, rows]
            kept[0], kept[1] = k.permute(0, 2, 3, 1), v.permute(0, 2, 3, 1)
            return see_causally(q, k, v)

        return read

    def decoding(self, places: Places) -> Attend:
        """Attention of one new token per place, which writes its key and value to the cache."""

        def decode(layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            at = layer.index - self._first
            turn = (cos[:, 0, 0], sin[:, 0, 0])
            return attend(qkv[:, 0], *turn, self._prompts[at], self._own[at], places)[:, None]

        return decode
