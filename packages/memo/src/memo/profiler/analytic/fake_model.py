"""One layer of a model and what is around it, of fake tensors: counted at a length, nothing computed.

The layer is run by the runtime's own recording, so that what autograd saves, what is an item and what
comes back is counted by the code that does it on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memo.planner.layer_plan import ATTENTION, CUT, INPUT, LayerPlan
from memo.planner.profile import PassBytes
from memo.profiler.analytic.roofline import Roofline, Seconds
from memo.profiler.calls import capture_call, count_given, replaced, structure_of
from memo.profiler.head import loss_of
from memo.profiler.layer_bytes import LayerBytes, count_passes, first_tensor
from memo.profiler.storage_meter import StorageMeter
from memo.profiler.timing.layer_tiles import tile_plan
from memo.profiler.timing.stopwatch import Stopwatch
from memo.runtime.attention import Answer, listening, offer_attention
from memo.runtime.block_loss import KNOWN
from memo.runtime.layers import find_layers, named_memory
from memo.runtime.recording.arguments import input_of
from memo.runtime.recording.calls import Products
from memo.runtime.recording.record import LayerRecord
from memo.runtime.tiling.arguments import TileArguments
from memo.runtime.tiling.record import TiledRecord
from memo.runtime.tiling.row_locality import Proofs
from memo.runtime.tiling.split_layer import SplitLayer
from shared.errors import ConfigError
from shared.topology.device import Device

__all__ = ["NUM_TILES", "FakeModel", "HeadCount", "LayerSeconds", "TilesCount", "check_alike"]

_ATTENTION_NAME = "memo-fake"

NUM_TILES = (2, 8)
"""Of lengths at which passes by tiles are counted."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """What a layer's passes take, see `LayerProfile`, and each product and attention by its name."""

    forward: Seconds
    backward: Seconds
    replay: Seconds
    calls: dict[str, Seconds]


@dataclass(frozen=True, slots=True)
class TilesCount:
    """What a layer's passes by tiles take, see `TilesProfile`.

    Attributes:
        tile_rows: tokens of a tile.
        forward, backward: seconds of two tiles.
        levels: bytes at each number of tiles in `NUM_TILES`.
    """

    tile_rows: int
    forward: Seconds
    backward: Seconds
    levels: tuple[tuple[PassBytes, PassBytes], ...]


@dataclass(frozen=True, slots=True)
class HeadCount:
    """What a step takes outside of its layers.

    Attributes:
        seconds, num_bytes: of embedding, last norm, logits and loss, forward and backward.
        inner_seconds, inner_bytes: of these without logits and loss.
    """

    seconds: Seconds
    num_bytes: int
    inner_seconds: Seconds
    inner_bytes: int


class FakeModel:
    """A causal language model with one of its layers.

    Attributes:
        layer_parameters: of one layer, how many.
        other_parameters: of all else.
        head_size: of the matrix that makes logits, rows and columns.
        has_block_loss: whether its loss can be computed in blocks.
        has_tiles: whether its layers are known to be row-local but for attention, and draw no random numbers.
        key_value_bytes: of a token's keys and values in a layer.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        """Builds the model; no memory is allocated.

        Args:
            config: of the whole model.
            dtype: of its parameters.
        """
        config = deepcopy(config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            for one in self._model.parameters():
                one.grad = torch.zeros_like(one)
        config = self._model.config
        config._attn_implementation = _ATTENTION_NAME
        self._layers = find_layers(self._model)
        self._layer = self._layers[0]
        self.layer_parameters = sum(one.numel() for one in self._layer.parameters())
        total = sum(one.numel() for one in self._model.parameters())
        self.other_parameters = total - self.layer_parameters
        head = self._model.get_output_embeddings()
        self.head_size: tuple[int, int] = tuple(head.weight.shape)
        self.has_block_loss = type(self._model).__name__ in KNOWN
        draws = any(isinstance(one, nn.Dropout) and one.p > 0 for one in self._layer.modules())
        self.has_tiles = self.has_block_loss and not draws
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        heads = getattr(config, "num_key_value_heads", None) or heads
        self.key_value_bytes = 2 * heads * width * dtype.itemsize

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Fake tensors, and attention that keeps no scores, whose calls listeners see."""
        ALL_ATTENTION_FUNCTIONS[_ATTENTION_NAME] = _attend
        restore = offer_attention(_ATTENTION_NAME)
        try:
            with self._mode, torch.enable_grad():
                yield
        finally:
            restore()
            del ALL_ATTENTION_FUNCTIONS[_ATTENTION_NAME]

    def _call(self, num_tokens: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the layer is called with: its input requires gradients, as in a model."""
        tokens = torch.zeros(1, num_tokens, dtype=torch.long)
        return capture_call(self._model, self._layers, {"input_ids": tokens, "use_cache": False})

    def count_layer(self, num_tokens: int, plan: LayerPlan) -> LayerBytes:
        """Bytes of the layer's passes under a plan."""
        with self._running():
            args, kwargs = self._call(num_tokens)
            return count_passes(self._layer, args, kwargs, plan)

    def count_given(self, num_tokens: int) -> int:
        """Bytes of what all layers are called with beside their inputs."""
        with self._running():
            return count_given([self._call(num_tokens)], {})

    def time_layer(self, num_tokens: int, device: Device) -> LayerSeconds:
        """Seconds of the layer's passes on a device."""
        with self._running(), Roofline(device) as clock:
            args, kwargs = self._call(num_tokens)
            names = [name for name, _ in self._layer.named_parameters()]
            record = LayerRecord(
                self._layer.forward,
                args,
                kwargs,
                plan=LayerPlan(mode="restore", resident=frozenset([INPUT, ATTENTION, *names])),
                parameters=lambda: named_memory(self._layer),
                cut=CUT,
                fetch=lambda _: None,
            )
            begun = clock.total
            kept = record.run()
            forward = clock.total - begun
            begun = clock.total
            with torch.no_grad():
                record.restore()
            replay = clock.total - begun
            del record, kept
            memory = named_memory(self._layer).items()
            watch = Stopwatch({at: name for at, (name, _) in memory}, lambda: clock.total)
            with listening(watch), Products(watch.product):
                out = first_tensor(self._layer(*args, **kwargs))
            begun = clock.total
            out.backward(torch.ones_like(out))
            return LayerSeconds(forward, clock.total - begun, replay, watch.spent)

    def count_tiles(self, tile_rows: int, device: Device) -> TilesCount:
        """Seconds and bytes of the layer's passes by tiles; not where `has_tiles` is False."""
        num_tokens = 2 * tile_rows
        with self._running():
            args, kwargs = self._call(num_tokens)
            proofs = self._proofs(args, kwargs)
            with Roofline(device) as clock:
                record = TiledRecord(
                    self._layer,
                    self._layer.forward,
                    args,
                    kwargs,
                    plan=tile_plan(tile_rows, 2),
                    proofs=proofs,
                    fetch=lambda _: None,
                )
                out = first_tensor(record.run())
                forward = clock.total
                out.backward(torch.ones_like(out))
            backward = clock.total - forward
            del record, out
        levels = tuple(self.count_tiles_at(one * tile_rows, tile_rows) for one in NUM_TILES)
        return TilesCount(tile_rows, forward, backward, levels)

    def count_tiles_at(self, num_tokens: int, tile_rows: int) -> tuple[PassBytes, PassBytes]:
        """Bytes of passes by tiles, see `TilesProfile.levels`."""
        with self._running():
            args, kwargs = self._call(num_tokens)
            proofs = self._proofs(args, kwargs)
            found = [
                count_passes(self._layer, args, kwargs, tile_plan(tile_rows, num), proofs)
                for num in (1, 2)
            ]
        return found[0].passes, found[1].passes

    def _proofs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proofs:
        """What is known of layers of the known kinds: products before attention are queries, keys and values."""
        source = input_of(args, kwargs)
        parts = SplitLayer(self._layer, self._layer.forward)
        tile = TileArguments(args, kwargs, source).tile(source[:, :1], 0)
        proofs = Proofs()
        proofs.assume(self._layer, frozenset(range(parts.num_products(tile))))
        return proofs

    def count_head(self, num_tokens: int, device: Device) -> HeadCount:
        """Seconds and bytes of what is outside of the layers."""
        with self._running(), replaced(self._layers, [_pass_on]):
            tokens = torch.zeros(1, num_tokens, dtype=torch.long)
            with Roofline(device) as clock, StorageMeter() as meter:
                given = {"input_ids": tokens, "use_cache": False}
                loss_of(self._model(**given, labels=tokens)).backward()
            with Roofline(device) as inner, StorageMeter() as inner_meter:
                out = first_tensor(self._model.base_model(**given)[0])
                out.backward(torch.ones_like(out))
            return HeadCount(clock.total, meter.peak_bytes, inner.total, inner_meter.peak_bytes)


def _pass_on(*args: Any, **kwargs: Any) -> Tensor:
    """A layer's forward that returns its input."""
    return input_of(args, kwargs)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **settings: Any
) -> Answer:
    """Causal attention that saves its result and a sum a row, as all fused ones do."""
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True, scale=settings.get("scaling")
    )[0]
    return out.transpose(1, 2).contiguous(), None


def check_alike(config: PretrainedConfig) -> None:
    """Refuses a model whose layers differ, as one of them is counted for all.

    Raises:
        ConfigError: a layer differs from the first.
    """
    with torch.device("meta"):
        first, *others = find_layers(AutoModelForCausalLM.from_config(config))
    wanted = structure_of(first)
    for number, layer in enumerate(others, 1):
        if structure_of(layer) != wanted:
            raise ConfigError(
                f"{type(config).__name__}: expected layers that are alike, got layer {number} "
                f"({type(layer).__name__}) of another kind than layer 0, in modules, shapes or attributes; plan for the "
                "model itself by memo.autotune"
            )
