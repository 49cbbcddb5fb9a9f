"""Balances documents over ranks, an epoch of steps, and says how busy the ranks are.

    python balance_ranks.py lengths.txt --ranks 8 --tokens-per-step 4194304
    python balance_ranks.py                   # Python's own source files, a token a byte

LENGTHS has a document's tokens on each line. For costs of your machine see the guide.
"""

import argparse
from pathlib import Path

import numpy as np

import hydraulis as hy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("lengths", nargs="?", type=Path, help="text file of lengths")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens-per-step", type=int, default=2**20, help="over all ranks")
    parser.add_argument("--cap", type=int, default=65_536, help="most tokens that a rank holds")
    arguments = parser.parse_args()
    if arguments.lengths is None:
        lengths = np.array([len(text) for text in hy.data.python_source(limit=400)])
    else:
        lengths = hy.data.read_lengths(arguments.lengths)
    is_short = lengths <= arguments.cap
    if not is_short.all():
        print(f"left out {int((~is_short).sum())} documents above {arguments.cap:,} tokens")
    lengths = lengths[is_short]

    cost = hy.Cost(a=5.128e-9, b=1.8396e-4, c=0.05)
    samplers = [
        hy.BalancedBatchSampler(
            lengths, tokens_per_step=arguments.tokens_per_step, num_ranks=arguments.ranks,
            rank=rank, cost=cost, cap=arguments.cap,
        )
        for rank in range(arguments.ranks)
    ]  # fmt: skip
    for number, ranks in enumerate(zip(*(sampler.steps() for sampler in samplers), strict=True)):
        seconds = np.array(
            [sum(cost.micro_batch_s(lengths[part]) for part in one) for one in ranks]
        )
        print(f"step {number}: {seconds.max():.3g} s, {seconds.mean() / seconds.max():.1%} busy")


if __name__ == "__main__":
    main()
