"""The demo's claims are wrong where the plan is."""

import numpy as np

from hydraulis import demo
from hydraulis.planner.dispatch import Dispatch


def test_a_plan_that_is_far_from_the_bound_is_not_correct(monkeypatch):
    lengths = np.random.default_rng(0).integers(100, 5000, 200)
    right, loads = demo.make_claims(lengths, repeats=1)
    assert all(claim.correct for claim in right)
    assert {len(one) for one in loads.values()} == {demo.RANKS}

    def all_to_one(lengths, replicas):
        replica_of = np.zeros(len(lengths), dtype=np.int64)
        seconds = float(demo.COST.sequence_s(lengths).sum())
        return Dispatch(
            lengths=np.asarray(lengths), replicas=tuple(replicas), replica_of=replica_of,
            makespan_s=seconds,
        )  # fmt: skip

    monkeypatch.setattr(demo, "dispatch", all_to_one)
    wrong, _ = demo.make_claims(lengths, repeats=1)
    assert not any(claim.correct for claim in wrong)
