"""`mspipe demo`: TGN on real flights, its memory behind a slow link, with and without overlap.

The link is modelled: reads and writes of rows sleep for the time that their bytes take at its rate.
Claims about time are therefore labelled "simulated". Everything else is real.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mspipe.data.batching import batches
from mspipe.data.events import Events
from mspipe.data.sampler import Sampler
from mspipe.data.streams import flights
from mspipe.evaluation import EdgeBank, evaluate
from mspipe.memory.node_memory import NodeMemory
from mspipe.memory.rows import LocalRows
from mspipe.models import TGN
from mspipe.pipeline import figure
from mspipe.pipeline.pipeline import Pipeline
from mspipe.pipeline.report import Report
from shared.claims import Claim, finish, pair_turns
from shared.training.progress import show_progress

__all__ = ["LinkedRows", "compare_modes", "compare_with_edgebank", "run", "run_pass", "take_turns"]

_SOURCE = "mspipe demo"
_LATENCY_S = 2e-4
_MODES = ("forward", "sync", "prefetch")
_TURNS = 3

Pass = tuple[Report, list[float], Tensor]
"""What `run_pass` returns."""


class LinkedRows(LocalRows):
    """Rows behind a full-duplex link of a given rate, modelled by sleeping."""

    def __init__(self, num_rows: int, fresh: Tensor, bytes_per_s: float) -> None:
        super().__init__(num_rows, fresh, torch.device("cpu"))
        self._bytes_per_s = bytes_per_s

    def _sleep(self, num_bytes: int) -> None:
        time.sleep(_LATENCY_S + num_bytes / self._bytes_per_s)

    def read(self, ids: Tensor) -> Tensor:
        """Copies of rows, after the time that their transfer takes."""
        rows = super().read(ids)
        self._sleep(rows.nbytes)
        return rows

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replaces rows, after the time that their transfer takes."""
        self._sleep(rows.nbytes)
        super().write(ids, rows)


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json and a picture to `out`.

    Returns:
        Whether every claim's result was correct.
    """
    out.mkdir(parents=True, exist_ok=True)
    events = flights(120_000 if is_full else 15_000)
    train, rest = events.split(0.85)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with show_progress("mspipe: passes over flights, the memory behind 200 Mbit/s"):
            part = train if is_full else train[:4_200]
            turns = take_turns(partial(run_pass, events, part, bytes_per_s=200e6 / 8))
        with show_progress("mspipe: training TGN for link prediction on flights"):
            learnt = _learn_links(events, train, rest, 4 if is_full else 5)
    finally:
        torch.set_num_threads(before)
    reports = {mode: report for mode, (report, _, _) in turns[-1].items()}
    claims = [*compare_modes(turns), learnt]
    named = {"one stage after another (sync)": reports["sync"], "forward": reports["forward"]}
    figure.draw(
        named, out / "stages.svg", "TGN on flights, memory behind a modelled link of 200 Mbit/s"
    )
    figures = {mode: {"period_s": r.period_s, "stage_s": r.stage_s} for mode, r in reports.items()}
    return finish(out, "mspipe", claims, figures)


def _pipeline(events: Events, mode: Any, seed: int = 0) -> Pipeline:
    torch.manual_seed(seed)
    model = TGN(100, events.edge_dim)
    memory = NodeMemory(events.num_nodes, 100, model.mail_dim, start=events.t[0].item())
    return Pipeline(model, memory, Sampler(events, [10]), events.features, mode=mode)


def _learn(
    pipe: Pipeline, train: Events, seed: int, optimizer: torch.optim.Optimizer
) -> list[float]:
    losses = []
    for out in pipe.train(batches(train, 600, seed=seed)):
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    return losses


def run_pass(
    events: Events, train: Events, mode: str, bytes_per_s: float
) -> tuple[Report, list[float], Tensor]:
    """Trains one pass behind a modelled link.

    Args:
        events: the whole stream, from which neighbours are sampled.
        train: the events of the pass.
        mode: mode of the pipeline.
        bytes_per_s: rate of the link in each direction.

    Returns:
        The pipeline's report, the losses, and the rows of the memory that the pass leaves.
    """
    pipe = _pipeline(events, mode)
    fresh = pipe.memory.read_rows(torch.zeros(1, dtype=torch.int64))[0]
    pipe.memory.rows = LinkedRows(events.num_nodes, fresh, bytes_per_s)
    optimizer = torch.optim.Adam(pipe.model.parameters(), 1e-3, fused=True)
    losses = _learn(pipe, train, 0, optimizer)
    return pipe.report(), losses, pipe.memory.snapshot()["rows"]


def take_turns(run_mode: Callable[..., Pass]) -> list[dict[str, Pass]]:
    """Runs a short pass in each mode in turns, so that other programs slow all modes alike.

    Args:
        run_mode: runs the pass in `mode`; a pipeline works ahead between its iterations, so turns are
            of whole passes.

    Returns:
        What it returned in each turn, by mode.
    """
    turns = []
    for turn in range(_TURNS):
        # Every other turn goes backwards, so that no mode always follows the same one.
        modes = _MODES[:: -1 if turn % 2 else 1]
        turns.append({mode: run_mode(mode=mode) for mode in modes})
    return turns


def compare_modes(turns: list[dict[str, Pass]]) -> list[Claim]:
    """Makes the claims about overlap, which are correct if all modes give the same losses and rows.

    Args:
        turns: what `run_pass` returned in each turn, by mode; "forward", "sync" and "prefetch".
    """
    report, losses, rows = turns[-1]["forward"]
    is_same = all(
        one[1] == losses and torch.equal(one[2], rows) for turn in turns for one in turn.values()
    )
    periods_ms = {mode: [1e3 * turn[mode][0].period_s for turn in turns] for mode in _MODES}
    ideal_ms = [1e3 * turn["forward"][0].plan.ideal_period for turn in turns]
    about = (
        f"{len(losses)} batches of 600 in {len(turns)} turns, median stages "
        f"{', '.join(f'{1e3 * s:.0f}' for s in report.stage_s)} ms; losses and memory are the same to the bit"
    )
    common: dict[str, Any] = {
        "unit": "ms",
        "kind": "simulated",
        "correct": is_same,
        "detail": about,
        "source": _SOURCE,
    }
    names = {"sync": "one stage after another", "prefetch": "memory fetched ahead, as exactly"}
    return [
        Claim(
            name=f"an iteration of TGN, memory behind 200 Mbit/s, against {mode}",
            **pair_turns(periods_ms["forward"], periods_ms[mode]),
            baseline_name=name,
            **common,
        )
        for mode, name in names.items()
    ] + [
        Claim(
            name="an iteration of TGN, memory behind 200 Mbit/s, against the bound of all overlap",
            **pair_turns(periods_ms["forward"], ideal_ms),
            baseline_name="the longest stage alone, at most 1x",
            **common,
        )
    ]


def _learn_links(events: Events, train: Events, rest: Events, epochs: int) -> Claim:
    pipe = _pipeline(events, "forward")
    optimizer = torch.optim.Adam(pipe.model.parameters(), 1e-3, fused=True)
    for epoch in range(epochs):
        pipe.memory.reset()
        _learn(pipe, train, epoch, optimizer)
    scores = [evaluate(pipe, rest, history=train) for _ in range(2)]
    return compare_with_edgebank(
        scores,
        EdgeBank().evaluate(train, rest),
        f"TGN, {epochs} passes over {len(train):,} departures; one random negative an event; evaluated "
        f"twice alike",
    )


def compare_with_edgebank(
    scores: list[dict[str, float]], bank: dict[str, float], about: str
) -> Claim:
    """Makes the claim of average precision, correct if it repeats and is above EdgeBank's.

    Args:
        scores: what `evaluate` returned, each time it was called.
        bank: what `EdgeBank.evaluate` returned for the same events.
        about: what was trained, for the claim's detail.
    """
    ours = scores[0]["ap"]
    return Claim(
        name="average precision on the last 15 % of events",
        unit="of 1",
        ours=ours,
        baseline=bank["ap"],
        baseline_name="EdgeBank, which remembers pairs",
        higher_is_better=True,
        correct=all(one == scores[0] for one in scores) and ours > bank["ap"],
        detail=about,
        source=_SOURCE,
    )
