"""Seconds of a decoder layer as a function of its tokens, from measurements of one device.

A prefill of `batch` prompts of `tokens` tokens costs a fixed part, one for each token, and one for
each pair of tokens that attend to each other. A decode step costs a fixed part (reading the weights),
one for each row, and one for each key and value that is read (the linear features of LLM-PQ, arXiv
2403.01136). Coefficients are found by non-negative least squares on relative errors, so that no time
is negative and small batches count as much as large ones.

A line alone is too coarse: kernels change their form with the number of tokens, and products of few
rows run at a rate of their own. So between the points that were measured the line is bent to go
through them: measured over fitted is interpolated in the logarithms of batch and length, and kept
beyond the outermost points. No prediction lies below a roofline (Williams et al., 2009) of the best
rate of operations and of bytes that any measurement of the device reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import DataError

__all__ = ["Latency", "Work", "best_rates", "fit_decode", "fit_prefill"]

Sample = tuple[int, int, float]
Triple = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Least operations and bytes of a layer's call, for each of the three features of its phase.

    Attributes:
        flops: additions and multiplications.
        num_bytes: bytes read or written.
    """

    flops: Triple = (0.0, 0.0, 0.0)
    num_bytes: Triple = (0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Seconds of one decoder layer in one phase; a length is prompt tokens, or those before a new one.

    Attributes:
        coefficients: fitted seconds of each of the phase's three features.
        points: batch, length, and measured over fitted seconds; by batch, then length.
        compute_s: seconds of each feature at the device's best rate of operations.
        memory_s: likewise at its best rate of bytes.
        error: mean relative error of the fit, unbent, at the points.
    """

    coefficients: Triple
    points: tuple[Triple, ...]
    compute_s: Triple = (0.0, 0.0, 0.0)
    memory_s: Triple = (0.0, 0.0, 0.0)
    error: float = 0.0

    def prefill_s(self, batch: int, tokens: int) -> float:
        """Seconds for `batch` prompts of `tokens` tokens."""
        return self._seconds(_prefill_features(batch, tokens), batch, tokens)

    def decode_s(self, batch: int, past: int) -> float:
        """Seconds for one token of each of `batch` prompts, behind `past` tokens."""
        return self._seconds(_decode_features(batch, past), batch, past)

    @property
    def max_length(self) -> int:
        """Longest length that was measured."""
        return int(max(length for _, length, _ in self.points))

    def _seconds(self, features: np.ndarray, batch: int, length: int) -> float:
        floor_s = max(float(features @ self.compute_s), float(features @ self.memory_s))
        bent_s = float(features @ self.coefficients) * self._bend(batch, length)
        return max(floor_s, bent_s)

    def _bend(self, batch: int, length: int) -> float:
        """Measured over fitted, between the points around a batch and a length."""
        points = np.array(self.points)
        batches, at = np.unique(points[:, 0]), np.log(1 + length)
        of_batches = []
        for of_batch in batches:
            row = points[points[:, 0] == of_batch]
            of_batches.append(np.interp(at, np.log(1 + row[:, 1]), np.log(row[:, 2])))
        return float(np.exp(np.interp(np.log(batch), np.log(batches), of_batches)))


def best_rates(
    prefills: Iterable[tuple[Sequence[Sample], Work]],
    decodes: Iterable[tuple[Sequence[Sample], Work]],
) -> tuple[float, float]:
    """Most operations and most bytes a second that any measurement of a device reached.

    Args:
        prefills: samples (batch, tokens, seconds) of a width, and its least work.
        decodes: samples (batch, past, seconds) of a width, and its least work.
    """
    flops, num_bytes = [0.0], [0.0]
    for features_of, phase in ((_prefill_features, prefills), (_decode_features, decodes)):
        for samples, work in phase:
            for batch, length, seconds in samples:
                features = features_of(batch, length)
                flops.append(float(features @ work.flops) / seconds)
                num_bytes.append(float(features @ work.num_bytes) / seconds)
    return max(flops), max(num_bytes)


def fit_prefill(
    samples: Sequence[Sample], work: Work | None = None, rates: tuple[float, float] | None = None
) -> Latency:
    """Fits measurements (batch, tokens, seconds).

    Args:
        samples: batch, tokens, seconds.
        work: least work of a call, for the floor; without it there is none.
        rates: operations and bytes a second of the floor, see `best_rates`; needed with `work`.

    Raises:
        DataError: there are fewer than three samples, or a time is not positive.
    """
    features = np.array([_prefill_features(batch, tokens) for batch, tokens, _ in samples])
    return _fit(samples, features, work, rates)


def fit_decode(
    samples: Sequence[Sample], work: Work | None = None, rates: tuple[float, float] | None = None
) -> Latency:
    """Fits measurements (batch, past, seconds); see `fit_prefill`."""
    features = np.array([_decode_features(batch, past) for batch, past, _ in samples])
    return _fit(samples, features, work, rates)


def _prefill_features(batch: int, tokens: int) -> np.ndarray:
    """1, tokens, and pairs of tokens of one prompt."""
    return np.array([1.0, batch * tokens, batch * tokens**2])


def _decode_features(batch: int, past: int) -> np.ndarray:
    """1, rows, and keys and values that are read."""
    return np.array([1.0, batch, batch * (1 + past)])


def _fit(
    samples: Sequence[Sample],
    features: np.ndarray,
    work: Work | None,
    rates: tuple[float, float] | None,
) -> Latency:
    from scipy.optimize import nnls

    measured = np.array([seconds for *_, seconds in samples], dtype=float)
    if len(measured) < 3 or not (np.isfinite(measured).all() and (measured > 0).all()):
        raise DataError(
            f"a layer's latency is fitted to at least 3 positive times, got {measured.tolist()}"
        )
    design = features / measured[:, None]
    scale = design.max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(design / scale, np.ones(len(measured)))
    coefficients = found / scale
    fitted = design @ coefficients  # over measured
    points = sorted(
        (float(batch), float(length), float(1 / ratio))
        for (batch, length, _), ratio in zip(samples, fitted, strict=True)
    )
    flops_per_s, bytes_per_s = rates or (np.inf, np.inf)
    work = work or Work()
    return Latency(
        coefficients=_triple(coefficients),
        points=tuple(points),
        compute_s=_triple(np.array(work.flops) / flops_per_s),
        memory_s=_triple(np.array(work.num_bytes) / bytes_per_s),
        error=float(np.abs(fitted - 1).mean()),
    )


def _triple(values: np.ndarray) -> Triple:
    first, second, third = (float(value) for value in values)
    return first, second, third
