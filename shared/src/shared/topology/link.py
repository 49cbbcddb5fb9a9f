"""A link as a straight line: a message of n bytes takes alpha + beta * n seconds.

After Hockney's two-parameter model ("The communication challenge for MPP", 1994): alpha is what a
message costs before its first byte, beta what each byte adds. `fit_link` finds both from measured
messages and never returns a negative one, which noise on short measurements would otherwise give.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import DataError, TopologyError

__all__ = ["Link", "LinkFit", "fit_link"]

# What a test-time type checker takes for a real number: an int is no float to it.
Number = float | int | np.number

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Time of a message by its size.

    Attributes:
        alpha_s: seconds that any message takes.
        beta_s_per_byte: seconds that each byte adds.
    """

    alpha_s: Number
    beta_s_per_byte: Number

    def __post_init__(self) -> None:
        values = (self.alpha_s, self.beta_s_per_byte)
        if not all(np.isfinite(value) and value >= 0 for value in values):
            raise TopologyError(
                f"a link's alpha_s and beta_s_per_byte must be finite and not negative, got "
                f"{self.alpha_s} and {self.beta_s_per_byte}"
            )

    @classmethod
    def from_rate(cls, bytes_per_s: Number, alpha_s: Number = 0.0) -> Link:
        """The link that moves `bytes_per_s` once a message has begun.

        Raises:
            TopologyError: if the rate is not positive.
        """
        if not bytes_per_s > 0:
            raise TopologyError(f"a link's rate must be positive, got {bytes_per_s} bytes/s")
        return cls(alpha_s=alpha_s, beta_s_per_byte=1.0 / float(bytes_per_s))

    @property
    def bytes_per_s(self) -> float:
        """Rate that a long message approaches; infinite when bytes cost nothing."""
        return 1.0 / float(self.beta_s_per_byte) if self.beta_s_per_byte else float("inf")

    def time_s(self, num_bytes: Number) -> float:
        """Seconds that a message of `num_bytes` takes."""
        return float(self.alpha_s) + float(self.beta_s_per_byte) * float(num_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFit:
    """A fitted link and how far it is to be trusted.

    Attributes:
        link: the fit.
        residual_s: root mean square of measured minus fitted time, in seconds.
        clamped: whether alpha or beta came out at zero because the best line had it negative.
    """

    link: Link
    residual_s: float
    clamped: bool


def fit_link(samples: Sequence[tuple[Number, Number]] | np.ndarray) -> LinkFit:
    """Fit alpha and beta to measured messages by non-negative least squares.

    Args:
        samples: size in bytes and time in seconds of each message, [num_messages, 2].

    Returns:
        The fit; `clamped` and a warning in the log tell when a parameter was held at zero.

    Raises:
        DataError: if the samples are no pairs, there are fewer than two different sizes, or a value
            is negative or not finite.
    """
    # Planning alone needs no solver, and command lines wait for no import of one.
    from scipy.optimize import nnls

    pairs = np.asarray(samples, dtype=float)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or len(np.unique(pairs[:, 0])) < 2:
        raise DataError(
            "a link is fitted to (bytes, seconds) of messages of at least two different sizes; got "
            f"an array {list(pairs.shape)}"
            + (f" with {len(np.unique(pairs[:, 0]))} different sizes" if pairs.ndim == 2 else "")
        )
    sizes, times = pairs.T
    if not (np.isfinite([sizes, times]).all() and (sizes >= 0).all() and (times >= 0).all()):
        raise DataError("sizes and times of messages must be finite and not negative")
    # Sizes in units of the largest: the two columns are then of one magnitude.
    scale = sizes.max()
    design = np.column_stack([np.ones_like(sizes), sizes / scale])
    (alpha, beta), norm = nnls(design, times)
    free = np.linalg.lstsq(design, times, rcond=None)[0]
    # Exact lines through the origin give tiny negative values by rounding alone.
    clamped = bool((free < -1e-9 * max(times.max(), 1e-300)).any())
    link = Link(alpha_s=float(alpha), beta_s_per_byte=float(beta / scale))
    if clamped:
        _log.warning(
            "link fit: least squares gave alpha %.3g s and beta %.3g s/byte; the negative one is "
            "held at zero. Measure longer or larger messages",
            free[0],
            free[1] / scale,
        )
    return LinkFit(link=link, residual_s=float(norm / np.sqrt(len(sizes))), clamped=clamped)
