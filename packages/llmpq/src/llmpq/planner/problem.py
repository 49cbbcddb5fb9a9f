"""One planning problem, a fixed order of devices and fixed micro-batches, and its objective.

After LLM-PQ (arXiv 2403.01136), whose objective counts decoding as if a token's micro-batches
followed each other freely ("paper"). Generation is a ring: the next token of a micro-batch waits
for its last one, so a token of the whole batch takes the slower of all micro-batches on the
slowest stage and one micro-batch through all stages ("ring", the default).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shared.errors import ConfigError

__all__ = ["FORMULAS", "InfeasiblePlan", "Problem", "Solution", "batch_s"]

FORMULAS = ("ring", "paper")
_Numbers = Sequence[int] | np.ndarray
_SLACK = 1e-9
"""Relative excess over a limit that is rounding, not a violation."""


class InfeasiblePlan(ConfigError):
    """No plan keeps within memory and quality; the message names what is short, and by how much."""


def batch_s(
    prefill_s: Sequence[float] | np.ndarray,
    decode_s: Sequence[float] | np.ndarray,
    *,
    num_prefill: int,
    num_decode: int,
    new_tokens: int,
    formula: str = "ring",
    prefill_send_s: Sequence[float] | np.ndarray = (),
    decode_send_s: Sequence[float] | np.ndarray = (),
) -> float:
    """Seconds to generate `new_tokens` tokens for a whole batch.

    Sends run beside the computation: a message delays the micro-batch it carries, and paces the
    pipeline only where it takes longer than every stage.

    Args:
        prefill_s: seconds of one prefill micro-batch on each stage.
        decode_s: seconds of one token of one decode micro-batch on each stage.
        num_prefill: prefill micro-batches in the batch.
        num_decode: decode micro-batches in the batch.
        new_tokens: tokens generated for each prompt; the prefill yields the first.
        formula: "ring", or "paper" for LLM-PQ's own.
        prefill_send_s: seconds of each stage's message after prefill, the last one's to the first
            stage; none are free.
        decode_send_s: likewise for a token.

    Raises:
        ConfigError: an unknown formula, a count below 1, or counts of stages that differ.
    """
    if formula not in FORMULAS:
        raise ConfigError(f"formula: expected one of {', '.join(FORMULAS)}, got {formula!r}")
    if len(prefill_s) != len(decode_s) or not len(prefill_s):
        raise ConfigError(
            f"expected the seconds of the same stages, at least one, in both phases, got "
            f"{len(prefill_s)} in prefill_s and {len(decode_s)} in decode_s"
        )
    if min(num_prefill, num_decode, new_tokens) < 1:
        raise ConfigError(
            f"expected at least one token and one micro-batch in each phase, got {new_tokens} tokens, "
            f"{num_prefill} prefills and {num_decode} decode micro-batches"
        )
    for name, sends in (("prefill_send_s", prefill_send_s), ("decode_send_s", decode_send_s)):
        if len(sends) not in (0, len(prefill_s)):
            raise ConfigError(f"{name}: expected a message of each stage, got {len(sends)}")
    prefill_pace = max(*prefill_s, *prefill_send_s, 0.0)
    decode_pace = max(*decode_s, *decode_send_s, 0.0)
    first = sum(prefill_s) + sum(prefill_send_s) + (num_prefill - 1) * prefill_pace
    lap = sum(decode_s) + sum(decode_send_s)
    if formula == "paper":
        return float(first + lap + (num_decode - 1) * (new_tokens - 1) * decode_pace)
    return float(first + (new_tokens - 1) * max(num_decode * decode_pace, lap))


def _nothing() -> np.ndarray:
    """A zero that stands for an array of zeros."""
    return np.zeros(())


@dataclass(frozen=True, eq=False)
class Problem:
    """Layers to place on devices in a fixed order, each at one of a few widths.

    Device j takes consecutive layers, after those of the devices before it; it may take none.

    Attributes:
        prefill_s: seconds of one prefill micro-batch in a layer [layer, device, width].
        decode_s: seconds of one token of one decode micro-batch [layer, device, width].
        weight_bytes: bytes of a layer's weights [layer, width].
        kv_bytes: bytes of a layer's cache for the whole batch [layer].
        memory_bytes: bytes that layers and their caches may take [device].
        noise: loss of quality by layer and width [layer, width]; adds up over layers.
        num_prefill: prefill micro-batches in the batch.
        num_decode: decode micro-batches in the batch.
        new_tokens: tokens generated for each prompt.
        theta: seconds that a unit of noise is worth.
        max_noise: highest sum of noise, None for no limit.
        formula: "ring" or "paper", see `batch_s`.
        prefill_send_s: seconds of a prefill message [sender, receiver]: above the diagonal to the
            next stage, below it from the last stage back to the first. Free by default.
        decode_send_s: likewise for a token of a decode micro-batch.
        ends_prefill_s: seconds of embedding and head that the first stage adds to each prefill
            micro-batch, if this device is the first that holds layers [device]. Nothing by default.
        ends_decode_s: likewise for a token.
        ends_bytes: bytes of embedding and head, held by the first stage.

    Raises:
        ConfigError: shapes that differ, or a time, size or noise that is negative or not finite;
            the message names its layer, device and width.
    """

    prefill_s: np.ndarray
    decode_s: np.ndarray
    weight_bytes: np.ndarray
    kv_bytes: np.ndarray
    memory_bytes: np.ndarray
    noise: np.ndarray
    num_prefill: int
    num_decode: int
    new_tokens: int
    theta: float = 0.0
    max_noise: float | None = None
    formula: str = "ring"
    prefill_send_s: np.ndarray = field(default_factory=_nothing)
    decode_send_s: np.ndarray = field(default_factory=_nothing)
    ends_prefill_s: np.ndarray = field(default_factory=_nothing)
    ends_decode_s: np.ndarray = field(default_factory=_nothing)
    ends_bytes: float = 0.0

    def __post_init__(self) -> None:
        shape = np.shape(self.prefill_s)
        if len(shape) != 3 or 0 in shape:
            raise ConfigError(
                f"Problem.prefill_s: expected [layer, device, width], got the shape {shape}"
            )
        layers, devices, widths = shape
        for key, expected in {
            "prefill_s": shape,
            "decode_s": shape,
            "weight_bytes": (layers, widths),
            "kv_bytes": (layers,),
            "memory_bytes": (devices,),
            "noise": (layers, widths),
            "prefill_send_s": (devices, devices),
            "decode_send_s": (devices, devices),
            "ends_prefill_s": (devices,),
            "ends_decode_s": (devices,),
        }.items():
            given = getattr(self, key)
            object.__setattr__(self, key, _checked(key, given, expected))
        for key in ("num_prefill", "num_decode", "new_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"Problem.{key}: expected at least 1, got {getattr(self, key)}")
        for key in ("theta", "max_noise", "ends_bytes"):
            given = getattr(self, key)
            if given is not None and not (np.isfinite(given) and given >= 0):
                raise ConfigError(f"Problem.{key}: expected 0 or more, got {given}")
        if self.formula not in FORMULAS:
            raise ConfigError(
                f"Problem.formula: expected one of {', '.join(FORMULAS)}, got {self.formula!r}"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.prefill_s.shape[0]

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.prefill_s.shape[1]

    @property
    def num_widths(self) -> int:
        """Number of widths."""
        return self.prefill_s.shape[2]

    @cached_property
    def layer_bytes(self) -> np.ndarray:
        """Bytes of weights and cache [layer, width]."""
        return self.weight_bytes + self.kv_bytes[:, None]

    @cached_property
    def has_equal_layers(self) -> bool:
        """Whether layers differ in their noise alone."""
        arrays = (self.prefill_s, self.decode_s, self.layer_bytes)
        return all(np.allclose(array, array[:1], rtol=1e-12, atol=0.0) for array in arrays)

    @cached_property
    def has_sends(self) -> bool:
        """Whether any message takes time."""
        return bool(self.prefill_send_s.any() or self.decode_send_s.any())

    @cached_property
    def has_ends(self) -> bool:
        """Whether embedding and head take time or memory."""
        return bool(self.ends_prefill_s.any() or self.ends_decode_s.any() or self.ends_bytes)

    def objective(self, bounds: _Numbers, choice: _Numbers) -> float:
        """Seconds of the batch plus theta times the noise, for layers placed by `bounds`.

        Args:
            bounds: device j holds layers bounds[j] to bounds[j + 1] [device + 1].
            choice: width number of each layer [layer].
        """
        return self.seconds(bounds, choice) + self.theta * self.total_noise(choice)

    def seconds(self, bounds: _Numbers, choice: _Numbers) -> float:
        """Seconds of the batch: `batch_s` of the stages that hold layers."""
        prefill_s, decode_s = self.stage_s(bounds, choice)
        used = [j for j in range(self.num_devices) if bounds[j + 1] > bounds[j]]
        following = [*used[1:], used[0]]
        return batch_s(
            prefill_s[used],
            decode_s[used],
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            new_tokens=self.new_tokens,
            formula=self.formula,
            prefill_send_s=self.prefill_send_s[used, following],
            decode_send_s=self.decode_send_s[used, following],
        )

    def stage_s(self, bounds: _Numbers, choice: _Numbers) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a prefill and of a decode micro-batch on each device, sends apart."""
        device, layer = self._device(bounds), np.arange(self.num_layers)
        choice, first = np.asarray(choice), device[0]
        sums = []
        for times, ends in (
            (self.prefill_s, self.ends_prefill_s),
            (self.decode_s, self.ends_decode_s),
        ):
            stage = np.bincount(device, times[layer, device, choice], self.num_devices)
            stage[first] += ends[first]
            sums.append(stage)
        return sums[0], sums[1]

    def used_bytes(self, bounds: _Numbers, choice: _Numbers) -> np.ndarray:
        """Bytes of layers, caches, embedding and head on each device."""
        device, layer = self._device(bounds), np.arange(self.num_layers)
        held = np.bincount(device, self.layer_bytes[layer, np.asarray(choice)], self.num_devices)
        held[device[0]] += self.ends_bytes
        return held

    def total_noise(self, choice: _Numbers) -> float:
        """Sum of the layers' noise at the chosen widths."""
        return float(self.noise[np.arange(self.num_layers), np.asarray(choice)].sum())

    def is_feasible(self, bounds: _Numbers, choice: _Numbers) -> bool:
        """Whether memory and quality are kept."""
        if (
            self.max_noise is not None
            and self.total_noise(choice) > self.max_noise * (1 + _SLACK) + 1e-15
        ):
            return False
        return bool((self.used_bytes(bounds, choice) <= self.memory_bytes * (1 + _SLACK)).all())

    def _device(self, bounds: _Numbers) -> np.ndarray:
        return np.repeat(np.arange(self.num_devices), np.diff(bounds))

    def explain_shortage(self) -> str:
        """Says why no plan is feasible: which memory or quality is short, and by how much."""
        least_noise = float(self.noise.min(axis=1).sum())
        if self.max_noise is not None and least_noise > self.max_noise * (1 + _SLACK):
            return (
                f"expected a noise of at most {self.max_noise:.4g}, got {least_noise:.4g} with "
                f"every layer at its best width; allow more or offer a larger width"
            )
        if self.ends_bytes > self.memory_bytes.max():
            return (
                f"embedding and head take {self.ends_bytes / 1e6:.3g} MB on one device, but the largest, "
                f"device {int(self.memory_bytes.argmax())}, holds "
                f"{max(float(self.memory_bytes.max()), 0.0) / 1e6:.3g} MB; use more memory or a smaller "
                f"batch"
            )
        smallest = self.layer_bytes.min(axis=1)
        room, layer = np.maximum(self.memory_bytes, 0.0), 0
        room[0] -= self.ends_bytes
        for device in range(self.num_devices):
            while layer < self.num_layers and smallest[layer] <= room[device]:
                room[device] -= smallest[layer]
                layer += 1
        if layer < self.num_layers:
            missing = float(smallest[layer:].sum())
            device = int(self.memory_bytes.argmax())
            return (
                f"layers {layer} to {self.num_layers - 1} do not fit at the smallest width: devices "
                f"hold {np.maximum(self.memory_bytes, 0).sum() / 1e6:.3g} MB, and device {device}, the largest, "
                f"is {max(missing - float(room[device]), 0.0) / 1e6:.3g} MB short; use more "
                f"memory, a smaller width or a smaller batch"
            )
        limit = "" if self.max_noise is None else f", with a noise of at most {self.max_noise:.4g}"
        return (
            f"layers fit in {self.memory_bytes.sum() / 1e6:.3g} MB all together at the smallest width, "
            f"but not as devices hold whole layers{limit}; allow more noise, or use more memory"
        )


def _checked(key: str, given: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    array = np.array(given, dtype=np.float64)
    if not array.any() and not array.shape:
        array = np.zeros(shape)
    if array.shape != shape:
        raise ConfigError(f"Problem.{key}: expected the shape {shape}, got {array.shape}")
    # A device may be left with less than nothing, or have memory without limit.
    wrong = np.isnan(array) if key == "memory_bytes" else ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        at = tuple(int(axis) for axis in np.argwhere(wrong)[0])
        raise ConfigError(
            f"Problem.{key}{list(at)}: expected a finite number, 0 or more, got {array[at]}"
        )
    return array


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """Layers placed, and how far from the optimum they can be.

    Attributes:
        bounds: device j holds layers bounds[j] to bounds[j + 1] [device + 1].
        choice: width number of each layer [layer].
        objective: seconds of the batch plus theta times the noise.
        lower_bound: no placement has a lower objective.
        target_gap: gap that was asked for.
    """

    bounds: tuple[int, ...]
    choice: tuple[int, ...]
    objective: float
    lower_bound: float
    target_gap: float

    @property
    def gap(self) -> float:
        """Share of the objective by which the optimum may be lower."""
        return max(0.0, 1 - self.lower_bound / self.objective) if self.objective else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether the gap that was asked for is proven."""
        return self.gap <= self.target_gap + 1e-6
