"""The runs that `bench_staleness` sets side by side, each kept in a file as soon as it is done."""

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import mspipe as ms
from mspipe.training import Settings, fit
from shared.files import write_atomically

SHARES = (0.7, 0.15)
EPOCHS, BATCH, DIM, FANOUT, RATE = 3, 600, 100, 10, 3e-3
NUM_NEGATIVES, TEST_SEED = 10, 0
KINDS = ("random", "historical", "inductive")
EDGEBANK = "EdgeBank"


@dataclass(frozen=True)
class Variant:
    """A way of training: `staleness` 1 is sync."""

    staleness: int = 1
    is_mitigated: bool = False

    @property
    def name(self):
        if self.staleness == 1:
            return "sync"
        return f"stale K={self.staleness}" + (", mitigated" if self.is_mitigated else "")

    def settings(self, past: ms.Events) -> dict[str, Any]:
        """The pipeline's; similar nodes are those of the past."""
        if self.staleness == 1:
            return {"mode": "sync"}
        mitigation = ms.Mitigation(past) if self.is_mitigated else None
        return {
            "mode": "stale",
            "max_staleness": self.staleness,
            "is_fixed": True,
            "mitigation": mitigation,
        }


VARIANTS = (Variant(), Variant(2), Variant(2, True), Variant(4), Variant(4, True))


@dataclass(frozen=True)
class Found:
    """What a run gave; lists have an entry a pass.

    Attributes:
        scores: AP, AUC and MRR on the test part by kind of negatives.
        validation: AP and AUC for random ones on the part before it.
        losses: means.
        staleness: of each iteration.
        dropped: share of rows whose update replaced one that it did not know.
        weights: of the own state in the mix at the end; None where nothing is mixed.
        seconds: of the whole run.
    """

    scores: dict[str, dict[str, float]]
    validation: dict[str, float]
    losses: list[float]
    staleness: list[list[int]]
    dropped: list[float]
    weights: list[float | None]
    seconds: float


def found_or_run(events: ms.Events, variant: Variant, seed: int, folder: Path) -> Found:
    """What an earlier run of the same settings left in the folder, or else a run's."""
    settings = (
        _code(),
        *(len(events), events.t[-1].item(), SHARES, EPOCHS, BATCH, DIM, FANOUT, RATE),
        *(NUM_NEGATIVES, TEST_SEED, asdict(variant), seed),
    )
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    path = folder / f"{variant.name.replace(', ', '-').replace(' ', '-')}-{seed}.json"
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["digest"] == digest:
            return Found(**kept["found"])
    found = run(events, variant, seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"digest": digest, "found": asdict(found)}))
    return found


@cache
def _code() -> str:
    """Digest of the package's own files."""
    files = sorted(Path(ms.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def run(events: ms.Events, variant: Variant, seed: int) -> Found:
    """Trains, has memory pass through the validation part, and tests."""
    begin = time.perf_counter()
    train, validate, test = events.split(*SHARES)
    torch.manual_seed(seed)
    model = ms.models.TGN(DIM, events.edge_dim, fanout=FANOUT)
    memory = ms.NodeMemory(events.num_nodes, DIM, model.mail_dim, start=events.t[0].item())
    pipe = ms.Pipeline(
        model, memory, ms.Sampler(events, [FANOUT]), events.features, **variant.settings(train)
    )
    optimizer = torch.optim.Adam(model.parameters(), RATE, fused=True)
    # Never stopped for a checkpoint, so that a pass is one run of the pipeline.
    settings = Settings(epochs=EPOCHS, batch_size=BATCH, seed=seed, save_every=len(train))
    passes = [
        (epoch.loss, pipe.report())
        for epoch in fit(pipe, optimizer, train, settings=settings, progress=False)
    ]
    validation = ms.evaluate(
        pipe, validate, history=train, batch_size=BATCH, seed=TEST_SEED, metrics=("ap", "auc"),
        commits=True,
    )  # fmt: skip
    past = events[: len(train) + len(validate)]
    scores = {
        kind: ms.evaluate(
            pipe, test, history=past, negatives=kind, num_negatives=NUM_NEGATIVES,
            batch_size=BATCH, seed=TEST_SEED,
        )
        for kind in KINDS
    }  # fmt: skip
    return Found(
        scores=scores,
        validation=validation,
        losses=[loss for loss, _ in passes],
        staleness=[report.staleness for _, report in passes],
        dropped=[report.dropped_share for _, report in passes],
        weights=[report.weight for _, report in passes],
        seconds=time.perf_counter() - begin,
    )


def edgebank(events: ms.Events) -> dict[str, dict[str, float]]:
    """The same tests for who only remembers pairs, forever or as long as the test lasts, the better."""
    test = events.split(*SHARES)[2]
    first = len(events) - len(test)
    banks = [ms.EdgeBank(), ms.EdgeBank(window=float(test.t[-1] - test.t[0]))]
    scores = {
        kind: [
            bank.evaluate(
                events[:first], test, negatives=kind, num_negatives=NUM_NEGATIVES,
                batch_size=BATCH, seed=TEST_SEED,
            )
            for bank in banks
        ]
        for kind in KINDS
    }  # fmt: skip
    return {
        kind: {name: max(one[name] for one in each) for name in each[0]}
        for kind, each in scores.items()
    }
