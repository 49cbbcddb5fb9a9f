"""Steps of several plans of one graph, in turns, inside of the ranks of one pool."""

import time
from dataclasses import dataclass, field

import torch

import heta
from heta.nn.hetero_model import LocalExchange
from heta.training.exchange import Wire
from shared.comms import Group, barrier


@dataclass
class Timed:
    """What a way of training took.

    Attributes:
        step_s: seconds of a step, a number a turn; the slowest rank's.
        sent_bytes: bytes of a step, all ranks.
        by_phase: bytes of a step that this rank sent, by phase of the ledger.
        phases: seconds of a step by phase on this rank.
        losses: of all steps.
        held_bytes: edges, features and rows of the rank that holds most.
    """

    step_s: list[float] = field(default_factory=list)
    sent_bytes: float = 0.0
    by_phase: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    held_bytes: int = 0


class AloneTrainer(heta.Trainer):
    """A part that merges with nobody: what a step takes without the network, whatever it learns."""

    def _make_exchange(self, ranks: int, wire: Wire, check_every: int) -> LocalExchange:
        return LocalExchange()


def make_trainer(folder: str, settings: dict, kind: type[heta.Trainer] = heta.Trainer):
    """A trainer of R-GCN over this rank's part."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    part = heta.load(folder)
    model = heta.nn.RGCN(part, part.hidden, part.num_classes)
    return kind(part, model, **settings)


_TRAINERS: dict[str, heta.Trainer] = {}
"""Of this rank, between turns."""


def open_ways(ways: dict[str, tuple]) -> dict[str, int]:
    """Makes a trainer for each way, of its folder, settings and class; bytes that each holds."""
    for trainer in _TRAINERS.values():
        trainer.close()
    _TRAINERS.clear()
    _TRAINERS.update({name: make_trainer(*way) for name, way in ways.items()})
    return {name: held_bytes(trainer) for name, trainer in _TRAINERS.items()}


def train_turn(name: str, turn: int, steps: int) -> dict:
    """Trains one way for the steps of a turn: seconds and bytes a step, and losses."""
    group, trainer = Group.world(), _TRAINERS[name]
    batches = trainer.batches()
    first = turn * steps % max(len(batches) - steps, 1)
    chosen = batches[first : first + steps]
    trainer.phases = {}
    before = group.ledger.snapshot()
    barrier(group)
    began = time.perf_counter()
    losses = list(trainer.steps(chosen))
    barrier(group)
    seconds = time.perf_counter() - began
    sent = group.ledger.snapshot().diff(before)
    return {
        "step_s": seconds / len(chosen),
        "losses": losses,
        "sent_bytes": sent.sent_bytes / len(chosen),
        "by_phase": {k: t.sent_bytes / len(chosen) for k, t in sent.by_phase().items()},
        "phases": {k: s / len(chosen) for k, s in trainer.phases.items()},
    }


def time_in_turns(
    pool,
    ways: dict[str, tuple],
    turns: int,
    steps: int = 4,
    others: dict | None = None,
    warm: int = 1,
) -> dict[str, Timed]:
    """Takes turns with all ways, and with what runs beside them.

    Args:
        pool: ranks.
        ways: folder, the trainer's settings and, if another one's, its class, by name.
        turns: measured turns.
        steps: steps of a turn.
        others: functions that train a turn's steps some other way: (seconds a step, losses).
        warm: turns before the measured ones.
    """
    held = pool.run(open_ways, ways).results
    timed = {name: Timed(held_bytes=max(h[name] for h in held)) for name in ways}
    timed |= {name: Timed() for name in others or {}}
    for turn in range(turns + warm):
        for name, mine in timed.items():
            if others and name in others:
                step_s, losses = others[name]()
                mine.losses += losses
                mine.step_s += [step_s] * (turn >= warm)
                continue
            ranks = pool.run(train_turn, name, turn, steps).results
            mine.losses += ranks[0]["losses"]
            if turn < warm:
                continue
            mine.step_s.append(max(rank["step_s"] for rank in ranks))
            mine.sent_bytes += sum(rank["sent_bytes"] for rank in ranks) / turns
            for kept, key in ((mine.by_phase, "by_phase"), (mine.phases, "phases")):
                for phase, value in ranks[0][key].items():
                    kept[phase] = kept.get(phase, 0.0) + value / turns
    return timed


def held_bytes(trainer: heta.Trainer) -> int:
    """Edges, features, learnable rows and their optimizer state."""
    part = trainer.part
    edges = sum(csr.indptr.nbytes + csr.indices.nbytes for csr in part.structure.values())
    rows = sum(
        table.rows.nbytes + sum(value.nbytes for value in table.state.values())
        for table in trainer.store.tables.values()
    )
    return edges + rows
