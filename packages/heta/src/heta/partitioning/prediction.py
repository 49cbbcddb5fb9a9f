"""Predicted seconds and bytes of a step, for each strategy.

Bytes are what the runtime sends for the expected rows. A step is the slowest part's training plus the
longer of the network and of preparing the next batch, which goes on behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from heta.partitioning.workload import FLOAT_BYTES, ID_BYTES, NUM_MOMENTS, StepRates
from shared.topology.cost import ring_all_reduce_s
from shared.topology.link import Link

__all__ = ["Network", "Step", "find_owners"]

# Counts, ids, rows, and gradients on their way back.
_ROW_EXCHANGES = 4


class Step(NamedTuple):
    """A predicted step, or n of them.

    Attributes:
        step_s: [n] seconds.
        compute_s: [n, P] seconds of each part without the network.
        sent_bytes: [n, P] bytes that each part sends.
    """

    step_s: np.ndarray
    compute_s: np.ndarray
    sent_bytes: np.ndarray


def find_owners(touched: np.ndarray) -> np.ndarray:
    """Chooses each learnable type's owner: the part that touches most of its rows.

    Args:
        touched: [n, P, L] rows that each part touches.

    Returns:
        [n, L] parts.
    """
    return touched.argmax(axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What the parts of one plan exchange in a step.

    Attributes:
        link: the slowest link between two hosts.
        num_parts: number of hosts.
        merged_bytes: the seeds' states in each all-reduce of them, forward and backward.
        head_bytes: gradient of a head that parts apply before the last merge; 0 if they do so after.
        hidden: width of learnable rows.
        rates: seconds for each unit of work.
    """

    link: Link
    num_parts: int
    merged_bytes: tuple[int, ...]
    head_bytes: int
    hidden: int
    rates: StepRates

    @property
    def fetched_row_bytes(self) -> int:
        """Bytes of a fetched learnable row: its id, the row, and its gradient."""
        return ID_BYTES + 2 * self.hidden * FLOAT_BYTES

    @property
    def updated_row_bytes(self) -> int:
        """Bytes of a learnable row's weights and moments."""
        return (1 + NUM_MOMENTS) * self.hidden * FLOAT_BYTES

    @property
    def merge_s(self) -> float:
        """Seconds of all merges, and of comparing their digests."""
        check_s = self.all_reduce_s(1.0)
        return check_s + sum(map(self.all_reduce_s, self.merged_bytes))

    def all_reduce_s(self, num_bytes: float) -> float:
        """Seconds of one all-reduce; none for no bytes or one part."""
        if self.num_parts == 1 or not num_bytes:
            return 0.0
        return self.rates.exchange_s + ring_all_reduce_s(self.link, num_bytes, self.num_parts)

    def all_reduce_bytes(self, num_bytes: float) -> float:
        """Bytes that each part sends in an all-reduce."""
        return 2 * (self.num_parts - 1) * num_bytes / self.num_parts

    def predict_raf(
        self,
        main_s: np.ndarray,
        behind_s: np.ndarray,
        touched: np.ndarray,
        shared_bytes: np.ndarray,
    ) -> Step:
        """Predicts n assignments of relations to parts.

        Args:
            main_s: [n, P] seconds of training on each part.
            behind_s: [n, P] seconds of preparing the next batch, behind the step.
            touched: [n, P, L] rows of each learnable type.
            shared_bytes: [n] parameters of relations that several parts hold.
        """
        shared_bytes = shared_bytes + self.head_bytes
        owner = find_owners(touched)
        is_owner = owner[:, None, :] == np.arange(self.num_parts)[:, None]
        fetched = np.where(is_owner, 0.0, touched)
        of_type = fetched.sum(axis=1)
        received = fetched.sum(axis=2)
        served = (is_owner * of_type[:, None, :]).sum(axis=2)
        updated = np.where(is_owner, touched, 0.0).sum(axis=2)
        main_s = main_s + updated * self.updated_row_bytes * self.rates.updated_byte_s
        packed_bytes = (received + served) * self.fetched_row_bytes
        main_s = main_s + packed_bytes * self.rates.packed_byte_s
        ring_s = self.all_reduce_s(1.0) - self.link.beta_s_per_byte * self.all_reduce_bytes(1.0)
        per_byte_s = self.link.beta_s_per_byte * self.all_reduce_bytes(1.0)
        network_s = self.merge_s + np.where(shared_bytes > 0, ring_s + per_byte_s * shared_bytes, 0)
        busiest = np.maximum(received, served).max(axis=1)
        network_s = network_s + self.exchange_rows_s(
            busiest, self.fetched_row_bytes, _ROW_EXCHANGES
        )
        row_bytes = self.hidden * FLOAT_BYTES
        sent = received * (ID_BYTES + row_bytes) + served * row_bytes
        reduced = sum(self.merged_bytes) + shared_bytes
        sent = sent + self.all_reduce_bytes(1.0) * reduced[:, None]
        waits_s = np.maximum(behind_s, network_s[:, None])
        return Step((main_s + waits_s).max(axis=1), main_s + behind_s, sent)

    def bound_raf(
        self, main_s: np.ndarray, behind_s: np.ndarray, touched: np.ndarray
    ) -> np.ndarray:
        """Computes a lower bound of n assignments' steps, which more relations only raise.

        Args:
            main_s: [n, P] seconds of training on each part.
            behind_s: [n, P] seconds of preparing the next batch, behind the step.
            touched: [n, P, L] rows of each learnable type.
        """
        # A type's owner serves all others, and touches most of its rows.
        served = (touched.sum(axis=1) - touched.max(axis=1)).max(axis=1, initial=0.0)
        network_s = self.merge_s + self.exchange_rows_s(
            served, self.fetched_row_bytes, _ROW_EXCHANGES
        )
        return (main_s + np.maximum(behind_s, network_s[:, None])).max(axis=1)

    def predict_copies(
        self, main_s: float, behind_s: float, touched: float, union: float, param_bytes: float
    ) -> Step:
        """Predicts a step in which each rank holds all but learnable rows, which are dealt out by id.

        Each rank computes its share of the seeds.

        Args:
            main_s: seconds of training on each rank.
            behind_s: seconds of preparing the next batch, behind the step.
            touched: learnable rows that each rank touches.
            union: learnable rows that all ranks touch together; each is updated by its owner.
            param_bytes: parameters of the model.
        """
        main_s += union / self.num_parts * self.updated_row_bytes * self.rates.updated_byte_s
        fetched = touched * (self.num_parts - 1) / self.num_parts
        # Each rank serves as many rows as it fetches.
        main_s += 2 * fetched * self.fetched_row_bytes * self.rates.packed_byte_s
        # Gradients, and the loss beside them.
        network_s = self.all_reduce_s(param_bytes) + self.all_reduce_s(1.0)
        network_s += float(
            self.exchange_rows_s(np.array(fetched), self.fetched_row_bytes, _ROW_EXCHANGES)
        )
        sent = self.all_reduce_bytes(param_bytes) + fetched * self.fetched_row_bytes
        return self._equal_parts(main_s, behind_s, network_s, np.full(self.num_parts, sent))

    def predict_edge_cut(
        self,
        main_s: float,
        behind_s: float,
        remote: np.ndarray,
        widths: np.ndarray,
        is_learnable: np.ndarray,
        union: float,
        param_bytes: float,
    ) -> Step:
        """Predicts a step in which each rank computes its share of the seeds and fetches remote rows.

        Args:
            main_s: seconds of training on each rank.
            behind_s: seconds of preparing the next batch, behind the step.
            remote: [P, T] rows that each rank fetches, served by the others in equal parts.
            widths: [T] numbers of an input row.
            is_learnable: [T] whether a gradient goes back.
            union: learnable rows that all ranks touch; each is updated by its owner.
            param_bytes: parameters of the model.
        """
        main_s += union / self.num_parts * self.updated_row_bytes * self.rates.updated_byte_s
        asked = remote * (ID_BYTES + widths * FLOAT_BYTES * is_learnable)
        answered = remote * widths * FLOAT_BYTES

        def exchange(kinds: np.ndarray) -> tuple[np.ndarray, float]:
            """Bytes that each rank sends for some types, and the seconds of the exchange."""
            sent = asked[:, kinds].sum(axis=1) + answered[:, kinds].sum() / self.num_parts
            busiest = np.maximum(sent, answered[:, kinds].sum(axis=1)).max(keepdims=True)
            is_sent = self.num_parts > 1
            return sent, float(
                self.exchange_rows_s(busiest, 1.0, _ROW_EXCHANGES)[0]
            ) if is_sent else 0.0

        row_sent, rows_s = exchange(is_learnable)
        feature_sent, features_s = exchange(~is_learnable)
        # What one rank packs another unpacks.
        main_s += 2 * float(row_sent.mean()) * self.rates.packed_byte_s
        behind_s += 2 * float(feature_sent.mean()) * self.rates.packed_byte_s
        network_s = self.all_reduce_s(param_bytes) + self.all_reduce_s(1.0) + rows_s
        sent = row_sent + feature_sent + self.all_reduce_bytes(param_bytes)
        step = self._equal_parts(main_s, behind_s, network_s, sent)
        # Features of the next batch travel behind the step, over the same link.
        least_s = features_s + max(behind_s, network_s)
        return step._replace(step_s=np.maximum(step.step_s, least_s))

    def exchange_rows_s(self, rows: np.ndarray, row_bytes: float, num_exchanges: int) -> np.ndarray:
        """Seconds of all-to-all exchanges in which the busiest host sends or receives some rows."""
        start_s = self.link.alpha_s * (self.num_parts - 1) + self.rates.exchange_s
        sent_s = self.link.beta_s_per_byte * row_bytes * rows
        return np.where(rows > 0, num_exchanges * start_s + sent_s, 0.0)

    def _equal_parts(
        self, main_s: float, behind_s: float, network_s: float, sent: np.ndarray
    ) -> Step:
        compute_s = np.full((1, self.num_parts), main_s + behind_s)
        step_s = np.array([main_s + max(behind_s, network_s)])
        return Step(step_s, compute_s, sent[None])
