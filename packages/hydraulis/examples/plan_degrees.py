"""Gives long documents several ranks and short ones one, and says how far that is from the best.

    python plan_degrees.py lengths.txt --ranks 64 --cap 9000
    python plan_degrees.py                    # 600 drawn lengths, a few of them long

LENGTHS has a document's tokens on each line: those of one step.
"""

import argparse
from pathlib import Path

import numpy as np

import hydraulis as hy
from hydraulis.planner.baselines import best_homogeneous
from hydraulis.planner.degrees import DegreeCost, plan_degrees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("lengths", nargs="?", type=Path, help="text file of lengths")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--cap", type=int, default=9_000, help="most tokens that a rank holds")
    arguments = parser.parse_args()
    if arguments.lengths is None:
        draw = np.random.default_rng(0)
        lengths = np.clip(np.exp(draw.normal(5.95, 1.258, 600)), 1, 100_000).astype(int)
    else:
        lengths = hy.data.read_lengths(arguments.lengths)
    cost = DegreeCost(
        cost=hy.Cost(a=5.128e-9, b=1.8396e-4, c=0.629),
        cap=arguments.cap,
        message_s={2**power: 1e-5 for power in range(1, arguments.ranks.bit_length())},
    )
    plan = plan_degrees(lengths, arguments.ranks, cost)
    one = best_homogeneous(lengths, arguments.ranks, cost)
    print(f"groups of {sorted(set(plan.degree_of.tolist()))} ranks: {plan.makespan_s:.3g} s")
    print(f"all groups of {one.degree_of[0]} ranks: {one.makespan_s:.3g} s")
    print(f"at most {plan.gap:.2%} from the best")


if __name__ == "__main__":
    main()
