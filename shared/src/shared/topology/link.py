"""Linear cost model of a link: a message of n bytes takes alpha + beta * n seconds.

After Hockney's two-parameter model ("The communication challenge for MPP", 1994): alpha is a
message's latency, beta the time per byte. `fit_link` estimates both from measured messages and
never returns a negative value, which noise on short measurements would otherwise give.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import DataError, TopologyError

__all__ = ["Link", "LinkFit", "fit_link"]

# A real number, for the test-time type checker: it does not accept an int for a float.
Number = float | int | np.number

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Time of a message as a function of its size.

    Attributes:
        alpha_s: seconds that any message takes.
        beta_s_per_byte: seconds that each byte adds.

    Raises:
        TopologyError: a number is below 0 or not finite.
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
        """A link of rate `bytes_per_s` and latency `alpha_s` (seconds).

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
    """A fitted link and the quality of the fit.

    Attributes:
        link: the fit.
        residual_s: root mean square of measured minus fitted time, in seconds.
        clamped: whether alpha or beta was set to zero because unconstrained least squares gave a
            negative value.
    """

    link: Link
    residual_s: float
    clamped: bool


def fit_link(
    samples: Sequence[tuple[Number, Number]] | np.ndarray, *, is_quiet: bool = False
) -> LinkFit:
    """Fit alpha and beta to measured messages by non-negative least squares.

    Args:
        samples: size in bytes and time in seconds of each message, [num_messages, 2].
        is_quiet: whether no warning is wanted, as where latencies are too small to be seen.

    Returns:
        The fit; if a parameter was clamped to zero, `clamped` is set and a warning logged.

    Raises:
        DataError: if the samples are not pairs, have fewer than two different sizes, or a value is
            negative or not finite.
    """
    # Imported here to keep command lines fast: only fitting needs the solver.
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
    # Sizes are scaled by the largest, so that both columns have the same magnitude.
    scale = sizes.max()
    design = np.column_stack([np.ones_like(sizes), sizes / scale])
    (alpha, beta), norm = nnls(design, times)
    free = np.linalg.lstsq(design, times, rcond=None)[0]
    # Exact lines through the origin give tiny negative values by rounding alone.
    clamped = bool((free < -1e-9 * max(times.max(), 1e-300)).any())
    link = Link(alpha_s=float(alpha), beta_s_per_byte=float(beta / scale))
    if clamped and not is_quiet:
        _log.warning(
            "link fit: least squares gave alpha %.3g s and beta %.3g s/byte; the negative one is "
            "held at zero. Measure longer or larger messages",
            free[0],
            free[1] / scale,
        )
    return LinkFit(link=link, residual_s=float(norm / np.sqrt(len(sizes))), clamped=clamped)
