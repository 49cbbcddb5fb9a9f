import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.kernels.philox import cpu, key_words, philox, stream_key

ALL = 0xFFFFFFFF
# Known answers that Random123 publishes for philox4x32 with ten rounds (kat_vectors).
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ALL] * 4, [ALL] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
words = st.integers(0, ALL)


def numba_words(counter: list[int], key: list[int]) -> list[int]:
    return [int(w) for w in cpu.philox_words(*(np.uint64(w) for w in counter + key))]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_torch_gives_the_published_words(counter, key, answer):
    assert philox(torch.tensor(counter), key[0] | key[1] << 32).tolist() == answer


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_numba_gives_the_published_words(counter, key, answer):
    assert numba_words(counter, key) == answer


@given(st.lists(words, min_size=4, max_size=4), st.lists(words, min_size=2, max_size=2))
def test_torch_and_numba_agree(counter, key):
    expected = philox(torch.tensor(counter), key[0] | key[1] << 32).tolist()
    assert numba_words(counter, key) == expected


def test_numba_fills_a_row_as_the_reference_does():
    from shared.kernels.quantize.reference import noise

    key = stream_key(11, 5)
    k0, k1 = (np.uint64(word) for word in key_words(key))
    filled = np.zeros(384, np.uint16)
    for row in (0, 7, 2**32 - 1, 2**32 + 3, 2**40):
        cpu.fill_noise(filled, np.uint64(row), k0, k1)
        expected = noise(torch.tensor([row]), 384, key)[0]
        assert filled.tolist() == expected.tolist()


def test_noise_is_uniform_and_uncorrelated():
    from shared.kernels.quantize.reference import noise

    drawn = noise(torch.arange(2000), 128, stream_key(1)).double() / 65536
    count = drawn.numel()
    assert abs(float(drawn.mean()) - 0.5) < 5 * (1 / 12 / count) ** 0.5
    assert abs(float(drawn.var()) - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    centred = drawn - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(16, 1)):
        assert abs(float((centred * other).mean()) * 12) < 5 / count**0.5
    other = noise(torch.arange(2000), 128, stream_key(1, 0)).double() / 65536 - 0.5
    assert abs(float((centred * other).mean()) * 12) < 5 / count**0.5


@given(st.integers(), st.lists(st.integers(-(2**40), 2**70), max_size=5))
def test_a_key_is_64_bits_and_repeats(seed, indices):
    key = stream_key(seed, *indices)
    assert 0 <= key < 2**64
    assert key == stream_key(seed, *indices)
    low, high = key_words(key)
    assert low | high << 32 == key


def test_keys_of_nearby_streams_are_all_different():
    keys = {
        stream_key(seed, *indices)
        for seed in range(4)
        for indices in [(), (0,), (0, 0)]
        + [(a, b, c) for a in range(20) for b in range(10) for c in range(10)]
    }
    assert len(keys) == 4 * (3 + 2000)


def test_a_key_depends_on_the_order_of_indices():
    assert stream_key(0, 1, 2) != stream_key(0, 2, 1)
    assert stream_key(1, 0) != stream_key(0, 1)


def test_flipping_one_bit_of_an_index_flips_half_of_the_key():
    flips = [
        (stream_key(3, 1234) ^ stream_key(3, 1234 ^ (1 << bit))).bit_count() for bit in range(32)
    ]
    assert 26 < sum(flips) / len(flips) < 38
