"""The demo's claims are computed from what ran, and one that is not correct makes it fail."""

from datetime import timedelta
from pathlib import Path

import pytest

from adaqp import demo
from adaqp.graphs import generated
from adaqp.partitioning.partitioner import partition
from shared.claims import faults, read_demo
from shared.comms import RankPool


@pytest.mark.slow
def test_the_demo_reports_acceptable_claims_and_a_picture(tmp_path):
    assert demo.run(tmp_path, is_full=False)
    result = read_demo(tmp_path)
    assert not faults(result)
    assert len(result.claims) >= 3
    assert "<svg" in Path(result.pictures()[0]).read_text()


@pytest.mark.slow
@pytest.mark.unchecked
def test_training_without_messages_is_not_taken_for_ours(tmp_path):
    graph = generated.hard_sbm(demo.SHORT.num_nodes)
    partition(graph, 4, method="random", out=tmp_path / "parts")
    exact, _, dropped = demo.SCORED
    args = (str(tmp_path / "parts"), demo.SHORT.epochs, (exact, dropped, dropped))
    with RankPool(4, timeout=timedelta(minutes=2)) as pool:
        scores = pool.run(demo.train_in_rank, *args).results[0]
    assert scores[1].num_bytes < scores[0].num_bytes / 10
    assert not any(claim.correct for claim in demo.claim_accuracy(scores, demo.SHORT))


@pytest.mark.parametrize(
    ("adaptive", "dropped", "is_correct"),
    [
        (0.7, 0.6, True),
        (0.695, 0.665, True),
        (0.685, 0.6, False),
        (0.7, 0.68, False),
        (0.7, 0.7, False),
    ],
)
def test_accuracy_stays_and_needs_the_messages_or_no_claim_is_correct(
    adaptive, dropped, is_correct
):
    exact = demo.Score(policy="exact", accuracy=0.7, num_bytes=10)
    others = [
        demo.Score(policy="adaptive", accuracy=adaptive, num_bytes=1),
        demo.Score(policy="drop", accuracy=dropped, num_bytes=0),
    ]
    claims = demo.claim_accuracy([exact, *others], demo.SHORT)
    assert [claim.correct for claim in claims] == [is_correct] * 2
