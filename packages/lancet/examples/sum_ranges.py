"""Sums random ranges of a long array, and checks a few of them by hand."""

import numpy as np

import lancet


def main() -> None:
    """Prints the largest sum."""
    random = np.random.default_rng(0)
    values = random.integers(-1000, 1000, 1_000_000)
    starts, stops = np.sort(random.integers(0, len(values) + 1, (2, 10_000)), axis=0)
    sums = lancet.range_sums(values, starts, stops)
    for at in range(0, len(sums), 1000):
        assert sums[at] == values[starts[at] : stops[at]].sum()
    best = int(sums.argmax())
    print(f"largest sum: {sums[best]:,} in {starts[best]}:{stops[best]}")


if __name__ == "__main__":
    main()
