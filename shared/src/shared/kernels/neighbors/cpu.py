"""Samples of in-edges and numbers of nodes in numba.

Random words are drawn for a block of rows at once, so that the compiler computes several counters
in one vector. Up to 64 chosen positions are searched one by one and sorted by counting the smaller ones,
in vectors and without branches; more go into a hash table that is at most half full.
"""

# ruff: noqa: ANN001, ANN202
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shared.kernels.jit import compiled, inlined
from shared.kernels.philox import key_words
from shared.kernels.philox.cpu import philox_words
from shared.kernels.rows import over_rows

__all__ = ["relabel", "sample"]

_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
# Words that are drawn together, and rows: a few vectors of counters.
_BLOCK_WORDS = 2048
_BLOCK_ROWS = 32
# Most positions to search one by one, in vectors of this many.
_SHORT = 64
_LANES = 16
# Larger than any position.
_NONE = np.int32(2**31 - 1)
# What one row and one of its entries touch.
_ROW_BYTES = 64
_ENTRY_BYTES = 32


# Copied into the loop over rows: only then does the compiler compute it in vectors.
_philox_words = inlined(philox_words.py_func)


@compiled
def _count(indptr, rows, fanout, ends):
    """Fill `ends`; the largest degree."""
    total = np.int64(0)
    largest = np.int64(0)
    ends[0] = 0
    for i in range(rows.size):
        degree = indptr[rows[i] + 1] - indptr[rows[i]]
        largest = max(largest, degree)
        total += degree if fanout < 0 else min(degree, fanout)
        ends[i + 1] = total
    return largest


@compiled
def _multiply_high(low, high, size):
    """The high half of the product of a 64-bit word and a size below 2^32."""
    size = np.uint64(size)
    return np.int64((high * size + ((low * size) >> _32)) >> _32)


@compiled
def _draw_words(rows, calls, k0, k1, words):
    """Fill words[n, :, lane] with the low and the high word of draw n of each row."""
    zero = np.uint64(0)
    for call in range(calls):
        c2 = np.uint64(call)
        for lane in range(rows.size):
            row = rows[lane]
            w0, w1, w2, w3 = _philox_words(row & _MASK, row >> _32, c2, zero, k0, k1)
            words[2 * call, 0, lane] = w0
            words[2 * call, 1, lane] = w1
            words[2 * call + 1, 0, lane] = w2
            words[2 * call + 1, 1, lane] = w3


@inlined
def _choose_few(words, lane, first, degree, fanout, chosen, entries, output):
    """Fill entries[output:] with sorted entries; `chosen` is longer, a multiple of a vector."""
    for slot in range(chosen.size):
        chosen[slot] = _NONE
    for number in range(fanout):
        last = degree - fanout + number
        offset = _multiply_high(words[number, 0, lane], words[number, 1, lane], last + 1)
        count = np.int32(0)
        for slot in range(np.uint64(chosen.size)):
            count += np.int32(chosen[slot] == np.int32(offset))
        if count:
            offset = last
        chosen[number] = offset
    for number in range(fanout):
        offset = chosen[number]
        rank = np.int32(0)
        for slot in range(np.uint64(chosen.size)):
            rank += np.int32(chosen[slot] < offset)
        entries[output + rank] = first + offset


@compiled
def _choose_many(words, lane, first, degree, fanout, chosen, slots, out):
    """Fill out[:fanout] with sorted entries; `slots`, a power of 2 long, is all -1 and stays so."""
    mask = slots.size - 1
    for number in range(fanout):
        last = degree - fanout + number
        offset = _multiply_high(words[number, 0, lane], words[number, 1, lane], last + 1)
        slot = _slot_of(offset, slots, mask)
        if slots[slot] == offset:
            offset = last
            slot = _slot_of(offset, slots, mask)
        slots[slot] = offset
        chosen[number] = offset
    # The newest first: a search passes only slots that were filled before its own.
    for number in range(fanout - 1, -1, -1):
        slots[_slot_of(chosen[number], slots, mask)] = -1
    chosen[:fanout].sort()
    for number in range(fanout):
        out[number] = first + chosen[number]


@compiled
def _slot_of(offset, slots, mask):
    """The slot that holds a position, or the free one where it belongs."""
    slot = (offset * 0x9E3779B1 >> 7) & mask
    while slots[slot] >= 0 and slots[slot] != offset:
        slot = (slot + 1) & mask
    return slot


@compiled
def _sample(indptr, rows, fanout, k0, k1, ends, entries, start, stop):
    calls = (fanout + 1) // 2
    block = max(1, min(_BLOCK_ROWS, _BLOCK_WORDS // (fanout + 1)))
    words = np.empty((2 * calls, 2, block), np.uint64)
    chosen = np.empty((fanout + _LANES - 1) // _LANES * _LANES, np.int32)
    num_slots = 2
    while num_slots < 2 * fanout:
        num_slots *= 2
    slots = np.full(num_slots if fanout > _SHORT else 1, -1, np.int32)
    drawn = np.zeros(block, np.uint64)
    outputs = np.empty(block, np.int64)
    for begin in range(start, stop, block):
        count = 0
        for i in range(begin, min(begin + block, stop)):
            row = rows[i]
            first = indptr[row]
            degree = indptr[row + 1] - first
            if degree > fanout:
                drawn[count] = row
                outputs[count] = ends[i]
                count += 1
            else:
                for offset in range(degree):
                    entries[ends[i] + offset] = first + offset
        if count:
            _draw_words(drawn, calls, k0, k1, words)
        for lane in range(count):
            row = np.int64(drawn[lane])
            first = indptr[row]
            degree = indptr[row + 1] - first
            out = entries[outputs[lane] : outputs[lane] + fanout]
            if fanout <= _SHORT:
                _choose_few(words, lane, first, degree, fanout, chosen, entries, outputs[lane])
            else:
                _choose_many(words, lane, first, degree, fanout, chosen, slots, out)


@compiled
def _take_all(indptr, rows, ends, entries, start, stop):
    for i in range(start, stop):
        first = indptr[rows[i]]
        for offset in range(ends[i + 1] - ends[i]):
            entries[ends[i] + offset] = first + offset


@compiled
def _relabel(ids, first, table, unique, positions):
    count = np.int32(0)
    for i in range(first.size):
        unique[i] = first[i]
        if table[first[i]] < 0:
            table[first[i]] = count
        count += 1
    for i in range(ids.size):
        number = table[ids[i]]
        if number < 0:
            number = count
            table[ids[i]] = number
            unique[number] = ids[i]
            count += 1
        positions[i] = number
    for i in range(count):
        table[unique[i]] = -1
    return count


def sample(indptr: Tensor, rows: Tensor, fanout: int, key: int) -> tuple[Tensor, Tensor]:
    """Up to `fanout` entries of each row (-1: all), ascending, and where each row's begin."""
    starts, asked = indptr.numpy(), rows.numpy()
    ends = np.empty(len(asked) + 1, np.int64)
    largest = _count(starts, asked, fanout, ends)
    entries = np.empty(ends[-1], np.int64)
    if fanout < 0 or fanout >= largest:
        run = partial(_take_all, starts, asked, ends, entries)
    else:
        words = [np.uint64(word) for word in key_words(key)]
        run = partial(_sample, starts, asked, fanout, *words, ends, entries)
    over_rows(run, len(asked), _ROW_BYTES * len(asked) + _ENTRY_BYTES * len(entries))
    return torch.from_numpy(ends), torch.from_numpy(entries)


def relabel(
    ids: Tensor, num_nodes: int, first: Tensor, table: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`first` and the new ids in order of first appearance, and each id's position in them."""
    if table is None:
        table = torch.full((num_nodes,), -1, dtype=torch.int32)
    unique = torch.empty(len(first) + min(len(ids), num_nodes), dtype=torch.int64)
    positions = torch.empty_like(ids)
    count = _relabel(ids.numpy(), first.numpy(), table.numpy(), unique.numpy(), positions.numpy())
    return unique[:count], positions
