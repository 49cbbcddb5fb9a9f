"""Registers a method and runs the command line with it."""

import sys

import numpy as np

import lancet
from lancet.cli import main


def sum_blocks(values: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Sums each range in blocks of a thousand."""
    sums = [
        sum(int(block.sum()) for block in np.array_split(values[a:b], max(1, (b - a) // 1000)))
        for a, b in zip(starts, stops, strict=True)
    ]
    return np.array(sums, dtype=np.int64)


if __name__ == "__main__":
    lancet.METHODS.add("blocks", sum_blocks, "blocks of a thousand")
    sys.exit(main(["sum", "--start", "0", "--stop", "5000", "--method", "blocks", "--json"]))
