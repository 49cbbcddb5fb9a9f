"""Gives long documents several of 64 ranks and short ones one, and says how far that is from the best."""

import numpy as np

from hydraulis import Cost
from hydraulis.planner.baselines import best_homogeneous
from hydraulis.planner.degrees import DegreeCost, plan_degrees


def main() -> None:
    """Prints the groups, beside the best single degree."""
    draw = np.random.default_rng(0)
    lengths = np.clip(np.exp(draw.normal(5.95, 1.258, 600)), 1, 100_000).astype(int)
    cost = DegreeCost(
        cost=Cost(a=5.128e-9, b=1.8396e-4, c=0.629), cap=9_000,
        message_s={2**power: 1e-5 for power in range(1, 7)},
    )  # fmt: skip
    plan = plan_degrees(lengths, 64, cost)
    one = best_homogeneous(lengths, 64, cost)
    print(f"groups of {sorted(set(plan.degree_of.tolist()))} ranks: {plan.makespan_s:.3g} s")
    print(f"all groups of {one.degree_of[0]} ranks: {one.makespan_s:.3g} s")
    print(f"at most {plan.gap:.2%} from the best")


if __name__ == "__main__":
    main()
