"""A random order of an epoch's samples with random access.

A balanced Feistel network permutes the numbers below a power of four for any round function; cycle
walking until a value is in range restricts it to any range (Black and Rogaway, "Ciphers with
arbitrary finite domains"). So a billion samples need no permutation of eight gigabytes in memory,
and resuming takes no time. Checkpoints rely on the order, which integer arithmetic fixes here,
independently of library versions.
"""

import hashlib

import numpy as np

__all__ = ["shuffle_samples"]

_ROUNDS = 6


def shuffle_samples(positions: np.ndarray, num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The samples at some positions of an epoch's random order.

    Args:
        positions: int64 [n], each in 0 .. num_samples - 1.
        num_samples: length of the epoch.
        seed: seed of the run.
        epoch: whose order.

    Returns:
        int64 [n]; over all positions every sample occurs once.
    """
    half = np.uint64(max(3, ((num_samples - 1).bit_length() + 1) // 2))
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    found = _permute(positions.astype(np.uint64), half, keys)
    while (beyond := np.flatnonzero(found >= np.uint64(num_samples))).size:
        found[beyond] = _permute(found[beyond], half, keys)
    return found.astype(np.int64)


def _permute(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = np.uint64((1 << int(half)) - 1)
    left, right = values >> half, values & mask
    for key in keys:
        # The round function is the finaliser of SplitMix64.
        mixed = right + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return (left << half) | right
