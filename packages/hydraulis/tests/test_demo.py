"""The demo's claims are wrong where what they show is."""

from dataclasses import replace

import numpy as np

from hydraulis import demo
from hydraulis.config import Cost
from hydraulis.planner.degrees import DegreeCost
from hydraulis.planner.dispatch import Dispatch
from hydraulis.simulator import compare


def test_a_plan_that_is_far_from_the_bound_is_not_correct(monkeypatch):
    lengths = np.random.default_rng(0).integers(100, 5000, 200)
    assert demo.plan_claim(lengths, repeats=1).correct

    def all_to_one(lengths, replicas):
        replica_of = np.zeros(len(lengths), dtype=np.int64)
        seconds = float(replicas[0].cost.sequence_s(lengths).sum())
        return Dispatch(
            lengths=np.asarray(lengths), replicas=tuple(replicas), replica_of=replica_of,
            makespan_s=seconds,
        )  # fmt: skip

    monkeypatch.setattr(demo, "dispatch", all_to_one)
    assert not demo.plan_claim(lengths, repeats=1).correct


def test_training_counts_only_with_equal_losses_and_gradients():
    seconds = {"packed": [2.0, 3.0, 2.0, 3.0], "balanced": [1.0, 1.5, 1.0, 1.5]}
    losses = {name: [5.5, 5.4, 5.5, 5.4] for name in seconds}
    norms = {name: [0.3, 0.2, 0.3, 0.2] for name in seconds}
    claim = demo.trained_claim(seconds, losses, norms, 1000)
    assert claim.correct
    assert (claim.ours, claim.baseline) == (400.0, 200.0)
    nothing = [0.0] * 4
    for wrong in ([5.5, 5.41, 5.5, 5.4], [5.5] * 4, nothing):
        assert not demo.trained_claim(seconds, {**losses, "balanced": wrong}, norms, 1000).correct
    assert not demo.trained_claim(seconds, dict.fromkeys(seconds, nothing), norms, 1000).correct
    # Steps that learn nothing have the same losses.
    assert not demo.trained_claim(seconds, losses, {**norms, "balanced": nothing}, 1000).correct
    assert not demo.trained_claim(seconds, losses, dict.fromkeys(seconds, nothing), 1000).correct


def test_a_simulated_step_counts_only_near_the_bound_and_not_below():
    cost = DegreeCost(cost=Cost(a=1e-4, b=1e-2), cap=400)
    lengths = np.random.default_rng(0).integers(1, 300, 400)
    found = compare(
        lengths, 4, cost, tokens_per_step=20_000, num_steps=1,
        names=("packed, best fit", "hydraulis"),
    )  # fmt: skip
    assert demo.simulated_claim(found).correct
    packed, ours = found
    for wrong in ({"gap": -0.1}, {"gap": 0.5}, {"step_s": (packed.step_s[0] * 1.1,)}):
        assert not demo.simulated_claim([packed, replace(ours, **wrong)]).correct
