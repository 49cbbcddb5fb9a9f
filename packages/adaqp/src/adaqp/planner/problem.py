"""The bit-assignment problem of one layer and direction, as plain arrays.

After AdaQP ("Adaptive Message Quantization and Parallelization for Distributed Full-graph GNN
Training", arXiv 2306.01381): a bit-width is chosen for each group of messages, and each group goes
over one channel (a directed pair of ranks). Fewer bits mean more variance, more bits a longer
round. Departures: bytes are exact, with parameters and short last groups; the time term is scaled
by the slowest channel of each round, at the lowest and at the highest bits alike (utopia and
nadir); and time that hides behind compute may be free (`hidden_s`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol, SupportsFloat, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64

from adaqp.planner.widths import WIDTHS
from shared.errors import ConfigError

__all__ = ["Assignment"]

_FORMAT = 1


@runtime_checkable
class HasArray(Protocol):
    """Anything numpy can convert, such as its own arrays and CPU tensors."""

    def __array__(self) -> np.ndarray: ...


Numbers = Sequence | HasArray


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Assignment:
    """Groups, channels and the trade-off between variance and time.

    Channel c needs `latency_s[c] + s_per_byte[c] * bytes` seconds and belongs to one round; the
    rounds run one after another, each as long as its slowest channel. A group costs
    `beta / (2**bits - 1)**2` variance, and none at widths that are not quantised, such as 16 and 32
    bits.

    The objective is `lam * V / dV + (1 - lam) * max(0, sum_r Z_r - hidden_s) / dT`, where V is the
    total variance, Z_r the time of round r, and dV and dT how much V and the sum of Z_r change
    between all groups at the lowest and all at the highest bits. The term of a quantity that does
    not change is zero.

    Args:
        beta: [groups] variance of each group at one bit, not negative.
        channel: [groups] channel of each group, 0 <= channel < channels.
        bytes: [groups, options] bytes of each group at each bit-width, parameters included; they
            need not be convex or monotone in the bits.
        bits: [options] the bit-widths to choose from, ascending, out of
            `adaqp.planner.widths.WIDTHS`.
        round_of: [channels] any integer naming the round of each channel.
        s_per_byte: [channels] seconds a byte.
        latency_s: [channels] seconds a message, counted for every channel listed here.
        lam: weight of variance against time, 0 (only time counts) to 1 (only variance).
        hidden_s: seconds of communication that cost nothing because compute runs meanwhile.

    Raises:
        ConfigError: a shape, range or order is not as above.
    """

    beta: Float64[np.ndarray, " groups"]
    channel: Int64[np.ndarray, " groups"]
    bytes: Float64[np.ndarray, "groups options"]
    bits: Int64[np.ndarray, " options"]
    round_of: Int64[np.ndarray, " channels"]
    s_per_byte: Float64[np.ndarray, " channels"]
    latency_s: Float64[np.ndarray, " channels"]
    lam: float
    hidden_s: float
    _prices: tuple[float, float] = field(init=False, repr=False)

    # Not generated: it accepts lists and any numeric type, and stores arrays of fixed types.
    def __init__(
        self,
        beta: Numbers,
        channel: Numbers,
        bytes: Numbers,
        bits: Numbers,
        round_of: Numbers,
        s_per_byte: Numbers,
        latency_s: Numbers,
        lam: SupportsFloat,
        hidden_s: SupportsFloat = 0.0,
    ) -> None:
        integers = {"channel": channel, "bits": bits, "round_of": round_of}
        costs = {"beta": beta, "bytes": bytes, "s_per_byte": s_per_byte, "latency_s": latency_s}
        values = {
            **{name: _integers(name, given) for name, given in integers.items()},
            **{name: _costs(name, given) for name, given in costs.items()},
            "lam": float(lam),
            "hidden_s": float(hidden_s),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_options()
        self._check_shapes()
        object.__setattr__(self, "_prices", self._weigh())

    def _check_options(self) -> None:
        bits = self.bits
        known = np.isin(bits, WIDTHS.names()).all()
        if bits.ndim != 1 or bits.size == 0 or not known or (np.diff(bits) <= 0).any():
            raise ConfigError(
                f"bits: expected one or more of {WIDTHS.names()}, ascending, got {bits.tolist()}; "
                "list the bit-widths to choose from, such as (2, 4, 8)"
            )
        if not 0.0 <= self.lam <= 1.0:
            raise ConfigError(
                f"lam: expected a number from 0 (only time) to 1 (only variance), got {self.lam}; "
                "0.5 weighs both alike"
            )
        if not 0.0 <= self.hidden_s < np.inf:
            raise ConfigError(
                f"hidden_s: expected finite seconds >= 0, got {self.hidden_s}; "
                "give 0 when nothing hides the messages"
            )

    def _check_shapes(self) -> None:
        groups, options, channels = self.beta.shape[:1], self.bits.size, self.round_of.shape[:1]
        if self.bytes.size == 0 and groups == (0,):
            object.__setattr__(self, "bytes", np.zeros((0, options)))
        for name, expected in (
            ("beta", groups),
            ("channel", groups),
            ("bytes", (*groups, options)),
            ("round_of", channels),
            ("s_per_byte", channels),
            ("latency_s", channels),
        ):
            shape = getattr(self, name).shape
            if shape != expected or not expected:
                raise ConfigError(
                    f"{name}: expected shape {expected} (one entry a group, option or channel), "
                    f"got {shape}; build all arrays over the same groups and channels"
                )
        if self.channel.size and not 0 <= self.channel.min() <= self.channel.max() < channels[0]:
            wrong = int(((self.channel < 0) | (self.channel >= channels[0])).argmax())
            raise ConfigError(
                f"channel[{wrong}]: expected 0 <= channel < {channels[0]} (the length of "
                f"round_of), got {self.channel[wrong]}; list every channel that carries a group"
            )

    @property
    def num_groups(self) -> int:
        """Number of groups to choose bits for."""
        return self.beta.size

    @property
    def num_channels(self) -> int:
        """Number of directed pairs of ranks."""
        return self.round_of.size

    def round_index(self) -> Int64[np.ndarray, " channels"]:
        """Rounds numbered 0, 1, ... in ascending order of `round_of`, for each channel."""
        return np.unique(self.round_of, return_inverse=True)[1].astype(np.int64)

    def option_variance(self) -> Float64[np.ndarray, "groups options"]:
        """Variance of each group at each bit-width."""
        steps = (2.0**self.bits - 1.0) ** 2
        is_quantised = np.array([WIDTHS.get(b).is_quantised for b in self.bits.tolist()])
        return np.where(is_quantised, self.beta[:, None] / steps, 0.0)

    def channel_bytes(
        self, choice: Int64[np.ndarray, " groups"]
    ) -> Float64[np.ndarray, " channels"]:
        """Bytes on each channel when group g takes option `choice[g]`."""
        chosen = np.take_along_axis(self.bytes, choice[:, None], axis=1)[:, 0]
        # Without groups bincount returns integers.
        total = np.bincount(self.channel, weights=chosen, minlength=self.num_channels)
        return total.astype(np.float64, copy=False)

    def channel_s(self, choice: Int64[np.ndarray, " groups"]) -> Float64[np.ndarray, " channels"]:
        """Seconds of each channel when group g takes option `choice[g]`."""
        return self.latency_s + self.s_per_byte * self.channel_bytes(choice)

    def round_s(self, choice: Int64[np.ndarray, " groups"]) -> Float64[np.ndarray, " rounds"]:
        """Seconds of each round: its slowest channel, when group g takes option `choice[g]`."""
        index = self.round_index()
        slowest = np.zeros(int(index.max(initial=-1)) + 1)
        np.maximum.at(slowest, index, self.channel_s(choice))
        return slowest

    def variance(self, choice: Int64[np.ndarray, " groups"]) -> float:
        """Total variance when group g takes option `choice[g]`."""
        return float(np.take_along_axis(self.option_variance(), choice[:, None], axis=1).sum())

    def uniform(self, option: int) -> Int64[np.ndarray, " groups"]:
        """The choice that gives every group the same option (-1: the highest bits)."""
        return np.full(self.num_groups, option % self.bits.size, dtype=np.int64)

    def prices(self) -> tuple[float, float]:
        """Weight in the objective of a unit of variance, and of a second beyond `hidden_s`."""
        return self._prices

    def _weigh(self) -> tuple[float, float]:
        low, high = self.uniform(0), self.uniform(-1)
        # Of narrow rows, 8 bits with parameters can take more bytes than 16 without: the absolute
        # difference is the scale, whichever end is slower.
        spread_s = abs(float(self.round_s(high).sum() - self.round_s(low).sum()))
        spread = self.variance(low) - self.variance(high)
        return (
            self.lam / spread if spread > 0 else 0.0,
            (1.0 - self.lam) / spread_s if spread_s > 0 else 0.0,
        )

    def objective(self, choice: Int64[np.ndarray, " groups"]) -> float:
        """The weighted sum that is minimised, when group g takes option `choice[g]`."""
        per_variance, per_s = self.prices()
        exposed_s = max(0.0, float(self.round_s(choice).sum()) - self.hidden_s)
        return per_variance * self.variance(choice) + per_s * exposed_s

    def to_json(self) -> str:
        """The problem as JSON text with a format number."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        lists = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
        return json.dumps({"format": _FORMAT, **lists})

    @classmethod
    def from_json(cls, text: str) -> "Assignment":
        """Reads the text that `to_json` wrote.

        Raises:
            ConfigError: the format number differs, or keys are missing or unknown.
        """
        return cls(**fields_from_json(text, cls, _FORMAT))


def fields_from_json(text: str, record: type, number: int) -> dict:
    """The fields of a dataclass, read from JSON text that also holds a format number.

    Raises:
        ConfigError: the format number differs, or keys are missing or unknown.
    """
    values = json.loads(text)
    expected = {f.name for f in fields(record) if f.init} | {"format"}
    if not isinstance(values, dict) or set(values) != expected or values["format"] != number:
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ConfigError(
            f"{record.__name__}: expected format {number} with the keys {sorted(expected)}, got "
            f"{found}; read it with the release that wrote it"
        )
    del values["format"]
    return values


def _integers(name: str, values: object) -> np.ndarray:
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iuf" or (array % 1 != 0).any()):
        raise ConfigError(
            f"{name}: expected integers, got {array.dtype} {array}; give whole numbers"
        )
    return array.astype(np.int64)


def _costs(name: str, values: object) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    bad = ~np.isfinite(array) | (array < 0)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ConfigError(
            f"{name}{list(first)}: expected a finite number >= 0, got {array[first]}; "
            "look for NaN or infinity in the traced variances or probed link costs"
        )
    return array
