"""Traces of an adaqp training, whose ranks exchange messages and all-reduce, diagnosed by qsync.

torch's traces of gloo show collectives, not messages between two ranks: waiting for a message counts
as seconds of the operator that receives it.
"""

import time

import pytest
import torch

import adaqp
from qsync import diagnose
from qsync.diagnosis.traces.recording import record_steps
from shared.comms import RankPool

DELAY_S = 0.06


def train(folder, traces, is_late_in_backward):
    """Traces epochs; rank 1 sleeps before each, or before it all-reduces the gradients of each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dg = adaqp.load(folder)
    model = adaqp.nn.sage(dg, [dg.feat.shape[1], 16, dg.num_classes])
    is_late = dg.rank == 1
    if is_late and is_late_in_backward:
        # The first layer's gradient comes last, behind all messages.
        next(model.parameters()).register_hook(lambda gradient: time.sleep(DELAY_S))
    with dg.messages(adaqp.Exact()):
        trainer = adaqp.Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-2))

        def run_step():
            if is_late and not is_late_in_backward:
                time.sleep(DELAY_S)
            trainer.fit(1)

        record_steps(run_step, f"{traces}/rank{dg.rank}.json.gz", num_steps=6)


@pytest.fixture(scope="module")
def diagnoses(tmp_path_factory):
    """By whether rank 1 is late in the backward pass."""
    folder = tmp_path_factory.mktemp("adaqp")
    graph = adaqp.data.sbm(600, blocks=4, degree=8, mix=0.2, feat=16)
    adaqp.partition(graph, 2, method="random", out=folder / "parts")
    made = {}
    with RankPool(2) as pool:
        for is_late_in_backward in (True, False):
            traces = folder / str(is_late_in_backward)
            pool.run(train, folder / "parts", traces, is_late_in_backward)
            made[is_late_in_backward] = diagnose([traces / f"rank{r}.json.gz" for r in (0, 1)])
    return made


def test_the_rank_that_is_late_for_gradients_is_named(diagnoses):
    diagnosis = diagnoses[True]
    assert diagnosis.slowest_rank == 1
    assert diagnosis.causes[0].rank == 1
    assert DELAY_S * 0.7 < diagnosis.wait_s[0] < DELAY_S * 1.5
    assert diagnosis.wait_s[1] < 0.3 * diagnosis.wait_s[0]
    assert "Waiting for rank 1 in each step: rank 0" in diagnosis.explain()


def test_waiting_for_messages_counts_as_their_operators(diagnoses):
    seconds = [
        sum(piece.busy_s for piece in lane if piece.name == "_Aggregate") / 6
        for lane in diagnoses[False].job.lanes
    ]
    assert seconds[0] - seconds[1] > 0.7 * DELAY_S


@pytest.mark.parametrize("is_late_in_backward", [True, False])
def test_the_replay_holds_without_ddp(diagnoses, is_late_in_backward):
    diagnosis = diagnoses[is_late_in_backward]
    assert diagnosis.replayed_step_s == pytest.approx(diagnosis.step_s, rel=0.05)
    assert abs(diagnosis.clock_offset_s[1]) < 0.02
