"""Seconds of planning: twelve roots exactly, and a thousand relations on a thousand parts."""

import time
from statistics import median

import heta
from shared.claims import Claim

PEERS = [
    {
        "peer": "an aim in seconds",
        "setting": "1 s for all assignments of 12 roots to two parts, 10 s for 1,000 relations on 1,024 parts",
        "why": "nobody else plans by relations; a plan is made before each training",
    }
]


def many_relations(count: int, num_types: int = 40) -> heta.Schema:
    """A schema whose target has a tenth of all relations."""
    names = [f"t{number}" for number in range(num_types)]
    relations = {}
    for number in range(count):
        dst = names[0] if number % 10 == 0 else names[1 + number % (num_types - 1)]
        src = names[1 + (7 * number) % (num_types - 1)]
        relations[src, f"r{number}", dst] = 10_000 + 997 * number % 90_000
    return heta.Schema(
        dict.fromkeys(names, 50000), relations, dict.fromkeys(names[:30], 64), names[0]
    )


def twelve_roots() -> heta.Schema:
    """A schema with twelve relations into the target."""
    names = ["target", *(f"t{number}" for number in range(12))]
    relations = {}
    for number, name in enumerate(names[1:]):
        relations[name, f"into{number}", "target"] = 100_000 * (1 + number)
        relations["target", f"from{number}", name] = 100_000 * (1 + number)
    return heta.Schema(dict.fromkeys(names, 50_000), relations, {"target": 64, "t0": 128}, "target")


def bench_planning(benchmark, record_claim):
    """Median of five, and of three."""
    for name, schema, parts, repeats, aim_s in (
        ("12 roots on 2 parts", twelve_roots(), 2, 5, 1.0),
        ("1,000 relations on 1,024 parts", many_relations(1_000), 1_024, 3, 10.0),
    ):
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            plan = heta.plan(schema, parts=parts, strategy="raf")
            seconds.append(time.perf_counter() - began)
        roots = [root for part in plan.parts for root in part.roots]
        record_claim(
            Claim(
                name=f"planning {name}",
                unit="s",
                ours=median(seconds),
                baseline=aim_s,
                baseline_name="what we aim at",
                higher_is_better=False,
                correct=set(roots) == set(schema.roots) and all(part.roots for part in plan.parts),
                detail=f"{len(schema.roots)} roots, predicted step {plan.step_s:.3f} s",
            ),
            aim=1.0,
            spread=(aim_s / max(seconds), aim_s / min(seconds)),
        )
    benchmark.pedantic(lambda: None, rounds=1)
