"""BG-HGNN beside R-GCN as relations become many: parameters, seeds a second, and accuracy, in one process.

Nodes of four types, classes that neighbours share; the edges are dealt to 10, 100 or 400 relations.
"""

import tempfile
import time
from statistics import median

import pytest
import torch

import heta
from shared.claims import Claim

PEERS = [
    {
        "peer": "R-GCN",
        "setting": "a matrix for each relation, all relations into a type in one product, self term",
        "why": "the model whose parameters grow with the relations; the same trainer and sampler",
    }
]
NODES, EDGES, CLASSES, EPOCHS = 3_000, 120_000, 8, 5


def dealt_graph(num_relations: int, seed: int = 0):
    """Edges that mostly join nodes of one class, dealt to relations between four types."""
    generator = torch.Generator().manual_seed(seed)
    types = ["a", "b", "c", "d"]
    classes = {t: torch.randint(CLASSES, (NODES,), generator=generator) for t in types}
    centres = torch.randn(CLASSES, 16, generator=generator)
    feat = {
        t: centres[classes[t]] * 0.3 + torch.randn(NODES, 16, generator=generator) for t in types
    }
    edges = {}
    for number in range(num_relations):
        src, dst = types[number % 4], types[number // 4 % 4]
        count = EDGES // num_relations
        starts = torch.randint(NODES, (count,), generator=generator)
        ends = torch.randint(NODES, (4, count), generator=generator)
        # The first of four candidates of the source's class, if there is one.
        is_same = classes[dst][ends] == classes[src][starts]
        edges[src, f"r{number}", dst] = starts, ends.gather(0, is_same.float().argmax(0)[None])[0]
    is_train = torch.rand(NODES, generator=generator) < 0.5
    return heta.HeteroGraph(
        dict.fromkeys(types, NODES), edges, feat, target="a", label=classes["a"],
        masks={"train": is_train, "test": ~is_train},
    )  # fmt: skip


@pytest.mark.parametrize("num_relations", [10, 100, 400])
def bench_relations(benchmark, record_claim, num_relations):
    """Both models for some epochs, in turns."""
    torch.set_num_threads(1)
    graph = dealt_graph(num_relations)
    with tempfile.TemporaryDirectory() as folder:
        heta.plan(graph, parts=1, strategy="raf", batch_size=150).write(graph, f"{folder}/parts")
        part = heta.load(f"{folder}/parts")
    trainers = {}
    for name, kind in (("BG-HGNN", heta.nn.BGHGNN), ("R-GCN", heta.nn.RGCN)):
        torch.manual_seed(0)
        trainers[name] = heta.Trainer(part, kind(part, 64, CLASSES))
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    accuracy: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(EPOCHS):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            trainer.fit_epoch()
            seconds[name].append(time.perf_counter() - began)
            accuracy[name].append(trainer.evaluate("test").accuracy)
    benchmark.pedantic(lambda: None, rounds=1)
    # Each at its best epoch: R-GCN soon learns its training nodes by heart.
    scores = {name: max(values) for name, values in accuracy.items()}
    count = {
        name: sum(p.numel() for p in trainer.model.parameters())
        for name, trainer in trainers.items()
    }
    num_seeds = len(part.seeds("train"))
    speed = {name: num_seeds / median(s) for name, s in seconds.items()}
    for name in trainers:
        benchmark.extra_info[name] = (
            f"{count[name]:,} parameters, {speed[name]:,.0f} seeds/s, test accuracy {scores[name]:.3f}"
        )
    does_learn = scores["BG-HGNN"] > 2 / CLASSES
    for title, unit, values, aim, is_higher in (
        ("parameters", "values", count, 10.0 if num_relations == 400 else None, False),
        ("training", "seeds/s", speed, None, True),
        ("test accuracy, best epoch", "share", scores, None, True),
    ):
        record_claim(
            Claim(
                name=f"BG-HGNN with {num_relations} relations: {title}",
                unit=unit,
                ours=values["BG-HGNN"],
                baseline=values["R-GCN"],
                baseline_name="R-GCN",
                higher_is_better=is_higher,
                correct=does_learn,
                detail=f"accuracy {scores['BG-HGNN']:.3f}, R-GCN {scores['R-GCN']:.3f}",
            ),
            aim=aim,
        )
