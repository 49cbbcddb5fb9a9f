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

NUM_STEPS = 6


def train(folder, traces, is_late_in_backward):
    """Traces epochs; rank 1 sleeps before each, or before it all-reduces the gradients of each.

    Returns:
        The seconds for which it sleeps: several epochs of this machine, however busy it is.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dg = adaqp.load(folder)
    model = adaqp.nn.sage(dg, [dg.feat.shape[1], 16, dg.num_classes])
    is_late = dg.rank == 1
    with dg.messages(adaqp.Exact()):
        trainer = adaqp.Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-2))
        trainer.fit(1)
        started = time.perf_counter()
        trainer.fit(3)
        delay_s = max(0.06, time.perf_counter() - started)
        if is_late and is_late_in_backward:
            # The first layer's gradient comes last, behind all messages.
            next(model.parameters()).register_hook(lambda gradient: time.sleep(delay_s))

        def run_step():
            if is_late and not is_late_in_backward:
                time.sleep(delay_s)
            trainer.fit(1)

        record_steps(run_step, f"{traces}/rank{dg.rank}.json.gz", num_steps=NUM_STEPS)
    return delay_s


@pytest.fixture(scope="module")
def diagnoses(tmp_path_factory):
    """By whether rank 1 is late in the backward pass: the diagnosis, and by how many seconds it is."""
    folder = tmp_path_factory.mktemp("adaqp")
    graph = adaqp.data.sbm(600, blocks=4, degree=8, mix=0.2, feat=16)
    adaqp.partition(graph, 2, method="random", out=folder / "parts")
    made = {}
    with RankPool(2) as pool:
        for is_late_in_backward in (True, False):
            traces = folder / str(is_late_in_backward)
            delay_s = pool.run(train, folder / "parts", traces, is_late_in_backward).results[1]
            paths = [traces / f"rank{rank}.json.gz" for rank in (0, 1)]
            made[is_late_in_backward] = diagnose(paths), delay_s
    return made


def test_the_rank_that_is_late_for_gradients_is_named(diagnoses):
    diagnosis, delay_s = diagnoses[True]
    assert diagnosis.slowest_rank == 1
    assert diagnosis.causes[0].rank == 1
    assert delay_s * 0.7 < diagnosis.wait_s[0] < delay_s * 1.5
    assert diagnosis.wait_s[1] < 0.3 * diagnosis.wait_s[0]
    assert "Waiting for rank 1 in each step: rank 0" in diagnosis.explain()


def test_waiting_for_messages_counts_as_their_operators(diagnoses):
    diagnosis, delay_s = diagnoses[False]
    seconds = [
        sum(piece.busy_s for piece in lane if piece.name == "_Aggregate") / NUM_STEPS
        for lane in diagnosis.job.lanes
    ]
    assert seconds[0] - seconds[1] > 0.7 * delay_s


@pytest.mark.parametrize("is_late_in_backward", [True, False])
def test_the_replay_holds_without_ddp(diagnoses, is_late_in_backward):
    diagnosis, delay_s = diagnoses[is_late_in_backward]
    assert diagnosis.replayed_step_s == pytest.approx(diagnosis.step_s, rel=0.05)
    assert abs(diagnosis.clock_offset_s[1]) < delay_s / 3
