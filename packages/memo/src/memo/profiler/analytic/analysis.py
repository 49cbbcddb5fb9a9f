"""What a training step takes on devices that are not there, from a model's configuration alone.

Seconds are the data sheet's, see `Roofline`; bytes are those of fake tensors, see `FakeModel`. Two
lengths are counted. Between them seconds are exact: all but attention's are linear in the length, and
attention's go with its square. Most bytes at once are the largest of several lines, so that between two
lengths the straight line is never below them.

Ranks share each sequence (context parallelism by ring attention: a rank's queries meet the keys of all,
and twice the keys and values of a rank are on their way) and parameters, gradients and optimizer states
(FSDP: two layers are gathered at once, and what is outside of the layers stays gathered). That these
messages hide behind compute is an assumption, good for long sequences inside one host.

The link to the store is pinned memory's over PCIe: 0.8 of the raw rate of 16 lanes of the generation that
the device's data sheet names, 15.75 GB/s for the third, 31.5 and 63 for the next two (nvbandwidth gives
24.8 GB/s on an A100, NVIDIA developer forums, thread 352186). Where ranks share lanes it is less.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING

import torch

from memo.planner.layer_plan import INPUT, LayerPlan
from memo.planner.profile import (
    ItemProfile,
    LayerProfile,
    PassBytes,
    StepProfile,
    TilesProfile,
)
from memo.profiler.analytic.fake_model import NUM_TILES, FakeModel, TilesCount, check_alike
from memo.profiler.analytic.roofline import ATTENTION_SHARE, PRODUCT_SHARE, Seconds
from memo.profiler.layer_bytes import LayerBytes
from memo.profiler.timing.layer_tiles import TILE_ROWS
from shared.errors import ConfigError
from shared.topology.device import PRESETS, Device
from shared.topology.link import Link

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["LINKS", "OPTIMIZERS", "Analysis"]

OPTIMIZERS = {"adamw": 8, "sgd": 4, "none": 0}
"""Bytes of states a parameter: two float32 of AdamW, one of momentum."""

_MASTER_BYTES = 4
"""Of a float32 copy of each parameter, where parameters are of a half type and an optimizer has states."""

_PCIE = {3: 0.8 * 15.75e9, 4: 0.8 * 31.5e9, 5: 0.8 * 63e9}
LINKS = {
    "H200": _PCIE[5], "H100": _PCIE[5], "A100_80": _PCIE[4], "A100_40": _PCIE[4], "A800": _PCIE[4],
    "L4": _PCIE[4], "V100_32": _PCIE[3], "P100_12": _PCIE[3], "T4": _PCIE[3], "CPU": 1e9,
}  # fmt: skip
"""Bytes a second to the store and back by device; for RAM a local disk's, in round numbers."""

_ANCHORS = (1 << 9, 1 << 20)
"""Tokens of a rank that are counted."""

_BLOCK_BYTES = 1 << 27
"""Slopes of logits that `shared.kernels.token_log_probs` has at once on a GPU."""


class Analysis:
    """A model on a number of devices, whose step is known at any length.

    Attributes:
        device: one of them.
        ranks: how many.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        device: str,
        *,
        dtype: str = "bfloat16",
        ranks: int = 1,
        optimizer: str = "adamw",
        link_bytes_per_s: float | None = None,
    ) -> None:
        """Builds the model of fake tensors.

        Args:
            config: of a causal language model of transformers.
            device: a preset of `shared.topology`.
            dtype: "bfloat16", "float16" or "float32", of parameters and activations.
            ranks: devices that share each sequence and the parameters.
            optimizer: one of `OPTIMIZERS`.
            link_bytes_per_s: to the store, each way; by default that of `LINKS`.

        Raises:
            ConfigError: a name is unknown, a number is out of range, the model cannot be built, or its layers differ.
        """
        for name, value, known in (
            ("device", device, PRESETS),
            ("optimizer", optimizer, OPTIMIZERS),
            ("dtype", dtype, ("bfloat16", "float16", "float32")),
        ):
            if value not in known:
                raise ConfigError(
                    f"{name}: expected one of {', '.join(known)}, got {value!r}; take the nearest"
                )
        if ranks < 1:
            raise ConfigError(f"ranks: expected at least 1, got {ranks}; count the devices")
        self.device: Device = PRESETS[device]
        self.ranks, self._dtype = ranks, getattr(torch, dtype)
        try:
            self._model = FakeModel(config, self._dtype)
            self._times = tuple(self._model.time_layer(one, self.device) for one in _ANCHORS)
            self._given_bytes = tuple(self._model.count_given(one) for one in _ANCHORS)
            self._heads = tuple(self._model.count_head(one, self.device) for one in _ANCHORS)
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"{type(config).__name__}: expected a causal language model that transformers builds from its "
                f"configuration, and that takes {_ANCHORS[1]:,} tokens, got: {str(error).splitlines()[0]}"
            ) from error
        check_alike(config)
        self._num_layers = config.num_hidden_layers
        self._state_bytes = OPTIMIZERS[optimizer]
        if self._state_bytes and self._dtype.itemsize < _MASTER_BYTES:
            self._state_bytes += _MASTER_BYTES
        self._link = Link.from_rate(link_bytes_per_s or LINKS[device])
        self._known: dict[frozenset[str] | None, tuple[LayerBytes, ...]] = {}
        self._tile_rows = TILE_ROWS["cpu" if device == "CPU" else "cuda"]
        self._tiled: TilesCount | None = None

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return self._model.layer_parameters * self._num_layers + self._model.other_parameters

    def profile(self, num_tokens: int, *, has_tiles: bool = False) -> StepProfile:
        """What a step of one sequence takes on each of the ranks.

        Args:
            num_tokens: of the sequence; a multiple of the ranks.
            has_tiles: whether passes by tiles are counted too, which takes a few seconds once.

        Raises:
            ConfigError: they cannot be shared.
        """
        rows, rest = divmod(num_tokens, self.ranks)
        if rows < 1:
            raise ConfigError(
                f"tokens: expected at least one a rank, got {num_tokens} for {self.ranks}; ask for a longer sequence"
            )
        if rest:
            raise ConfigError(
                f"tokens: expected a multiple of the {self.ranks} ranks, got {num_tokens}; ask for "
                f"{rows * self.ranks} or {(rows + 1) * self.ranks}"
            )
        inner = self._heads[0].inner_bytes, self._heads[1].inner_bytes
        rows_at, columns = self._model.head_size
        logits = 2 * rows * rows_at * columns / (self._peak() * PRODUCT_SHARE)
        # Forward once, in the backward again, and a product each for the gradients of states and weight.
        block_s = self._seconds(rows, lambda at: self._heads[at].inner_seconds) + 4 * logits
        sums = 4 * columns * (rows + rows_at)  # gradients in float32
        layer = self._layer(rows, has_tiles)
        return StepProfile(
            layers=(layer,) * self._num_layers,
            num_tokens=rows,
            head_s=self._seconds(rows, lambda at: self._heads[at].seconds),
            head_bytes=_between(rows, *(one.num_bytes for one in self._heads)),
            block_head_s=block_s if self._model.has_block_loss else None,
            block_head_bytes=(
                _between(rows, *inner) + sums + _BLOCK_BYTES if self._model.has_block_loss else None
            ),
            fixed_bytes=self._fixed_bytes(),
            given_bytes=_between(rows, *self._given_bytes),
            forward_bytes=layer.input_bytes,
            send=self._link,
            fetch=self._link,
            details={"device": self.device.name, "seconds": "simulated, from the data sheet"},
        )

    def step_operations(self, num_tokens: int) -> float:
        """Operations of a step of one sequence on all ranks: of products and causal attention, none twice."""
        longest, (rows, columns) = self._times[1], self._model.head_size
        share = num_tokens / _ANCHORS[1]
        attention = longest.forward.attention * ATTENTION_SHARE * share**2
        products = sum(one.other for one in longest.calls.values()) * PRODUCT_SHARE * share
        layers = self._num_layers * (attention + products) * self._peak()
        return 3 * (layers + 2 * rows * columns * num_tokens)

    def _peak(self) -> float:
        is_half = self._dtype.itemsize <= 2
        return self.device.flops_per_s if is_half else self.device.flops_fp32_per_s

    def _seconds(self, rows: int, of: Callable[[int], Seconds]) -> float:
        """Seconds of a rank, whose queries meet the keys of all."""
        low, high = of(0), of(1)
        other = low.other + (high.other - low.other) * _share(rows)
        return other + high.attention * (rows / _ANCHORS[1]) ** 2 * self.ranks

    def _layer(self, rows: int, has_tiles: bool) -> LayerProfile:
        names = list(self._times[0].calls)
        whole = self._counted(frozenset([INPUT, *names]))
        items = [
            ItemProfile(
                name=name,
                num_bytes=_between(rows, *(one.item_bytes[name] for one in whole)),
                recompute_s=0.0
                if name == INPUT
                else self._seconds(rows, lambda at, name=name: self._times[at].calls[name]),
            )
            for name in whole[0].item_bytes
        ]
        first, *others = items
        others.sort(key=lambda one: -one.recompute_s / max(one.num_bytes, 1))
        ordered = [first, *others]
        kept = [frozenset(one.name for one in ordered[: num + 1]) for num in range(len(ordered))]
        plain = self._counted(None)
        return LayerProfile(
            num_tokens=rows,
            input_bytes=first.num_bytes,
            items=tuple(ordered),
            saved_bytes=_between(rows, *(one.held_bytes for one in plain)),
            forward_s=self._seconds(rows, lambda at: self._times[at].forward),
            backward_s=self._seconds(rows, lambda at: self._times[at].backward),
            replay_s=self._seconds(rows, lambda at: self._times[at].replay),
            kept=self._passes(rows, None),
            levels=tuple(self._passes(rows, one) for one in kept),
            tiles=self._tiles(rows) if has_tiles and self._model.has_tiles else None,
        )

    def _tiles(self, rows: int) -> TilesProfile:
        """Passes by tiles: whole tensors grow with the length, a tile does not."""
        if self._tiled is None:
            self._tiled = self._model.count_tiles(self._tile_rows, self.device)
        known = self._tiled
        ring, num_tiles = self._ring_bytes(rows), rows / self._tile_rows
        low, high = NUM_TILES
        share = max(0.0, (num_tiles - low) / (high - low))

        def seconds(spent: Seconds) -> float:
            times = num_tiles / NUM_TILES[0]
            return spent.other * times + spent.attention * times**2 * self.ranks

        def grown(first: int, last: int) -> int:
            # The largest of several lines, none of which begins below zero: the chord is never below them
            # between counts, nor is a line through the origin beyond the last.
            beyond = last * num_tiles / high
            return ceil(beyond if num_tiles > high else first + (last - first) * share)

        def passes(level: int) -> PassBytes:
            first, last = (at[level] for at in known.levels)
            return PassBytes(
                forward=grown(first.forward, last.forward) + ring,
                backward=grown(first.backward, last.backward) + 2 * ring,
            )

        return TilesProfile(
            tile_rows=self._tile_rows,
            forward_s=seconds(known.forward),
            backward_s=seconds(known.backward),
            levels=(passes(0), passes(1)),
        )

    def _counted(self, resident: frozenset[str] | None) -> tuple[LayerBytes, ...]:
        """Bytes at both lengths where these items stay; None: where autograd keeps all."""
        if resident not in self._known:
            plan = LayerPlan()
            if resident is not None:
                plan = LayerPlan(mode="restore", resident=resident)
            self._known[resident] = tuple(self._model.count_layer(one, plan) for one in _ANCHORS)
        return self._known[resident]

    def _passes(self, rows: int, resident: frozenset[str] | None) -> PassBytes:
        found = [one.passes for one in self._counted(resident)]
        ring = self._ring_bytes(rows)
        return PassBytes(
            forward=_between(rows, *(one.forward for one in found)) + ring,
            backward=_between(rows, *(one.backward for one in found)) + 2 * ring,
        )

    def _ring_bytes(self, rows: int) -> int:
        """Keys and values of other ranks that are there at once."""
        return 2 * self._model.key_value_bytes * rows if self.ranks > 1 else 0

    def _fixed_bytes(self) -> int:
        itemsize, model = self._dtype.itemsize, self._model
        sharded = self.num_parameters * (2 * itemsize + self._state_bytes)
        if self.ranks == 1:
            return sharded
        gathered = 3 * model.layer_parameters + 2 * model.other_parameters
        return ceil(sharded / self.ranks) + gathered * itemsize


def _share(rows: int) -> float:
    low, high = _ANCHORS
    return (rows - low) / (high - low)


def _between(rows: int, low: int, high: int) -> int:
    return max(0, ceil(low + (high - low) * _share(rows)))
