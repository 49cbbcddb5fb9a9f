"""The cost of a message between any two ranks, measured under the traffic of an exchange.

AdaQP (arXiv 2306.01381) fits a straight line to each pair's times. Here all pairs of all ring rounds
send in one run, as an exchange of the halo does, because a pair timed alone does not share its
host's link. Times are the receiver's, because a send returns when the system has buffered it. A fit
with a negative latency or rate (noise) is replaced, marked and reported.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float64

from shared.comms.collectives import all_gather, all_reduce, barrier
from shared.comms.courier import post_rounds
from shared.comms.group import Group
from shared.comms.rounds import Round
from shared.errors import ConfigError
from shared.topology.link import fit_link
from shared.units import KiB, MiB

__all__ = ["LinkTable", "measure_rounds_s", "probe"]

_log = logging.getLogger(__name__)

_FORMAT = 1
_KEYS = {"format", "s_per_byte", "latency_s", "clamped"}
_GROWTH, _LARGEST_BYTES = 4, 16 * MiB
_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkTable:
    """Straight-line cost of a message from each rank (row) to each rank (column).

    Attributes:
        s_per_byte: [ranks, ranks] seconds a byte; 0 from a rank to itself.
        latency_s: [ranks, ranks] seconds a message.
        clamped: [ranks, ranks] whether the fitted line had a negative term and was corrected.

    Raises:
        ConfigError: the shapes differ, or a cost is negative or not finite.
    """

    s_per_byte: Float64[np.ndarray, "ranks ranks"]
    latency_s: Float64[np.ndarray, "ranks ranks"]
    clamped: Bool[np.ndarray, "ranks ranks"]

    def __post_init__(self) -> None:
        shape = (len(self.s_per_byte),) * 2
        for name in ("s_per_byte", "latency_s", "clamped"):
            table = getattr(self, name)
            if table.shape != shape or not (np.isfinite(table) & (table >= 0)).all():
                raise ConfigError(
                    f"{name}: expected a table {shape} of finite costs >= 0, got shape "
                    f"{table.shape} with values from {table.min(initial=0)} to "
                    f"{table.max(initial=0)}; probe the links again"
                )

    @classmethod
    def uniform(cls, ranks: int, bytes_per_s: float, latency_s: float = 0.0) -> "LinkTable":
        """The same link between every two different ranks.

        Args:
            ranks: number of ranks.
            bytes_per_s: rate of each pair.
            latency_s: seconds a message.

        Raises:
            ConfigError: there is no rank or the rate is not positive.
        """
        if ranks < 1 or not bytes_per_s > 0:
            raise ConfigError(
                f"expected 1 or more ranks and a rate > 0 bytes/s, got {ranks} ranks at "
                f"{bytes_per_s} bytes/s; see shared.units.parse_rate for rates such as '1gbit'"
            )
        others = 1.0 - np.eye(ranks)
        return cls(
            s_per_byte=others / bytes_per_s,
            latency_s=others * float(latency_s),
            clamped=np.zeros((ranks, ranks), dtype=bool),
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.s_per_byte)

    def time_s(self, src: int, dst: int, num_bytes: float) -> float:
        """Seconds that a message of `num_bytes` takes from rank `src` to rank `dst`."""
        return float(self.latency_s[src, dst] + self.s_per_byte[src, dst] * num_bytes)

    def to_json(self) -> str:
        """The table as JSON text with a format number."""
        return json.dumps(
            {
                "format": _FORMAT,
                "s_per_byte": self.s_per_byte.tolist(),
                "latency_s": self.latency_s.tolist(),
                "clamped": self.clamped.tolist(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "LinkTable":
        """Reads the text that `to_json` wrote.

        Raises:
            ConfigError: the format number differs, or keys are missing or unknown.
        """
        values = json.loads(text)
        if not isinstance(values, dict) or set(values) != _KEYS or values["format"] != _FORMAT:
            raise ConfigError(
                f"link table: expected format {_FORMAT} with the keys {sorted(_KEYS)}, got "
                f"{text[:80]!r}; write it with `adaqp probe-links`"
            )
        return cls(
            s_per_byte=np.array(values["s_per_byte"], dtype=np.float64),
            latency_s=np.array(values["latency_s"], dtype=np.float64),
            clamped=np.array(values["clamped"], dtype=bool),
        )


def measure_rounds_s(group: Group, num_bytes: int) -> np.ndarray:
    """Times messages of one size; every rank calls it together.

    Args:
        group: the ranks.
        num_bytes: size of each message.

    Returns:
        [world_size - 1] for each ring round, the median seconds it adds until its message arrives.
    """
    num_ranks, rank = group.world_size, group.rank
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=group.device)
    received = torch.empty_like(sent)
    rounds = [
        Round(
            send_to=(rank + shift) % num_ranks,
            send=sent,
            recv_from=(rank - shift) % num_ranks,
            recv=received,
        )
        for shift in range(1, num_ranks)
    ]
    landed_s = np.zeros((_REPEATS, num_ranks))
    for repeat in range(_REPEATS):
        barrier(group)
        landed_s[repeat, 0] = time.perf_counter()
        # All rounds in one run, as in an exchange: a rank ahead competes with other senders.
        pending = post_rounds(group, rounds, "probe")
        for index in range(len(rounds)):
            pending.wait(index)
            if group.device.type == "cuda":
                torch.cuda.synchronize()
            landed_s[repeat, index + 1] = time.perf_counter()
        pending.wait_all()
    # The first message of a pair opens its connection.
    return np.median(np.diff(landed_s, axis=1)[1:], axis=0)


def probe(
    group: Group,
    sizes_bytes: Sequence[int] | None = None,
    budget_s: float = 2.0,
    fallback_bytes_per_s: float | None = None,
    *,
    measure: Callable[[Group, int], np.ndarray] = measure_rounds_s,
) -> LinkTable:
    """Measures the cost of messages between all ranks; every rank calls it and gets the table.

    Round r pairs each rank i with i + r, all pairs at once, and the rounds follow each other. Sizes
    grow fourfold from 1 KiB; each is sent a few times, and the receiver's median time is kept.

    Args:
        group: the ranks.
        sizes_bytes: sizes to send, at least two different ones, all of them; None: growing sizes.
        budget_s: seconds; a larger size is skipped if it would probably end later than this.
        fallback_bytes_per_s: rate for pairs whose times do not rise with the size; None: the rate
            of the largest message.
        measure: function that times messages of one size.

    Returns:
        Seconds per byte and per message between all ranks, the same on every rank.

    Raises:
        ConfigError: fewer than two sizes, a size below 1, or a rate or budget that is not positive.
        CommError: a peer died or the timeout passed.
    """
    sizes = _checked_sizes(sizes_bytes, budget_s, fallback_bytes_per_s)
    if group.world_size == 1:
        return LinkTable.uniform(1, 1.0)
    num_ranks, rank = group.world_size, group.rank
    measured: list[np.ndarray] = []
    begun_s = time.perf_counter()
    for index, num_bytes in enumerate(sizes):
        started_s = time.perf_counter()
        measured.append(measure(group, num_bytes))
        if sizes_bytes is None and index:
            # The next size takes about _GROWTH times as long; all ranks must decide alike.
            now_s = time.perf_counter()
            expected_s = now_s - begun_s + _GROWTH * (now_s - started_s)
            expected = torch.tensor([expected_s], dtype=torch.float64, device=group.device)
            all_reduce(group, expected, "max")
            if float(expected) > budget_s:
                break
    times_s = np.stack(measured)
    fits = np.zeros((3, num_ranks))
    for shift in range(1, num_ranks):
        src = (rank - shift) % num_ranks
        fits[:, src] = _fit(sizes[: len(measured)], times_s[:, shift - 1], fallback_bytes_per_s)
    # Each rank has measured what it receives: one column of the table.
    columns = all_gather(group, torch.from_numpy(fits).to(group.device))
    table = np.stack([column.cpu().numpy() for column in columns], axis=2)
    clamped = table[2] > 0
    if rank == 0 and clamped.any():
        pairs = [f"{src}->{dst}" for src, dst in np.argwhere(clamped)]
        _log.warning(
            "links %s: the line through the measured times has a negative latency or rate; the "
            "smallest message's time and, for the rate, the fallback or the largest message's "
            "took its place. A larger budget_s measures larger messages",
            ", ".join(pairs),
        )
    return LinkTable(s_per_byte=table[0], latency_s=table[1], clamped=clamped)


def _checked_sizes(
    sizes_bytes: Sequence[int] | None, budget_s: float, fallback: float | None
) -> list[int]:
    if not budget_s > 0 or (fallback is not None and not fallback > 0):
        raise ConfigError(
            f"expected budget_s > 0 and fallback_bytes_per_s > 0 or None, got {budget_s} and "
            f"{fallback}; 2 seconds suit most networks"
        )
    if sizes_bytes is None:
        sizes = [1 * KiB]
        while sizes[-1] < _LARGEST_BYTES:
            sizes.append(sizes[-1] * _GROWTH)
        return sizes
    if len(set(sizes_bytes)) < 2 or min(sizes_bytes) < 1:
        raise ConfigError(
            f"sizes_bytes: expected two or more different sizes >= 1, got {list(sizes_bytes)}; "
            "a line needs two points, such as 1 KiB and 1 MiB"
        )
    return list(sizes_bytes)


def _fit(
    sizes: list[int], times_s: np.ndarray, fallback_bytes_per_s: float | None
) -> tuple[float, float, float]:
    with _one_warning_for_all():
        fit = fit_link(np.column_stack([sizes, times_s]))
    latency_s, s_per_byte = float(fit.link.alpha_s), float(fit.link.beta_s_per_byte)
    is_flat = s_per_byte <= 0
    if is_flat:
        largest = int(np.argmax(sizes))
        s_per_byte = 1 / fallback_bytes_per_s if fallback_bytes_per_s else 0.0
        s_per_byte = s_per_byte or float(times_s[largest]) / sizes[largest]
    if is_flat or fit.clamped:
        # Rate limiters pass the first bytes at once, which pulls the line's intercept below zero:
        # take the time of the smallest message as the latency.
        latency_s = float(times_s[int(np.argmin(sizes))])
    return s_per_byte, latency_s, float(fit.clamped or is_flat)


@contextmanager
def _one_warning_for_all() -> Iterator[None]:
    """Silences a warning per link: `probe` reports all corrected links in one line."""
    logger = logging.getLogger(fit_link.__module__)
    logger.addFilter(_is_no_warning)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno != logging.WARNING
