"""Balances Python's own source files over four ranks, an epoch of steps."""

import numpy as np

import hydraulis as hy


def main() -> None:
    """Prints how long the slowest rank takes in each step, beside the mean of all."""
    lengths = [len(text) for text in hy.data.python_source(limit=400)]
    lengths = [length for length in lengths if length <= 65_536]
    cost = hy.Cost(a=5.128e-9, b=1.8396e-4, c=0.05)
    samplers = [
        hy.BalancedBatchSampler(
            lengths, tokens_per_step=2**20, num_ranks=4, rank=rank, cost=cost, cap=65_536
        )
        for rank in range(4)
    ]
    for number, ranks in enumerate(zip(*(sampler.steps() for sampler in samplers), strict=True)):
        seconds = np.array(
            [sum(cost.micro_batch_s(np.array(lengths)[part]) for part in mine) for mine in ranks]
        )
        print(f"step {number}: {seconds.max():.3g} s, {seconds.mean() / seconds.max():.1%} busy")


if __name__ == "__main__":
    main()
