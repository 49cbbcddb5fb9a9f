"""The search for placements: its seconds, beside brute force where that ends, and what its plans save.

Brute force is the definition in plain loops that the tests are held to (`test_mapping_search`). What
a plan saves is simulated: the same cost model prices the search's plan and what one would write down
without a search. One layout for all models on all GPUs, generation's too, is the best of its kind,
and so is a set of GPUs for each model.
"""

import random
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from math import inf, isclose
from pathlib import Path
from statistics import median

import pytest

from hybridflow.mapping import (
    Choice,
    CostModel,
    Efficiency,
    GenerationLayout,
    Hardware,
    Layout,
    Mapping,
    ModelSpec,
    Workload,
    evaluate,
    search,
)
from hybridflow.mapping.degrees import layouts
from shared.claims import Claim
from shared.comms import RankPool
from shared.errors import TopologyError
from shared.topology import Cluster, Link
from shared.topology.device import A100_80
from shared.units import GB, MB, Gbps

TESTS = Path(__file__).parents[2] / "packages/hybridflow/tests/mapping"
ROLES = ("actor", "reference", "critic", "reward")
CASES = 4 * [(1, 4), (2, 2), (1, 8), (2, 4), (4, 2), (2, 8)]  # hosts, GPUs of each
ROUNDS = 5
COMMAND = "hatch run bench hybridflow -k mapping"
PEERS = [
    {
        "peer": "brute force",
        "setting": "every placement and layout, in plain loops",
        "why": "the definition of the least; it is there for its answers, not for its seconds",
    },
    {
        "peer": "all models on all GPUs in one layout",
        "setting": "the best of all layouts that every model allows, generation in the same one",
        "why": "the most that one layout for all can give under the same cost model",
    },
    {
        "peer": "a set of GPUs for each model",
        "setting": "the best sizes and layouts, from the same search",
        "why": "the most that standalone placement can give under the same cost model",
    },
]


def ppo(size, critic_size):
    return [
        ModelSpec.llama(size if role in ("actor", "reference") else critic_size, role)
        for role in ROLES
    ]


def a100s(num_gpus):
    """As `hybridflow map` has them."""
    local, network = (
        Link.from_rate(300 * GB, alpha_s=1e-5),
        Link.from_rate(200 * Gbps, alpha_s=2e-5),
    )
    return Cluster.uniform(num_gpus // 8, 8, A100_80, local=local, network=network)


def choice_of(found, model):
    generation = None
    if found.generation_tp:
        generation = GenerationLayout(pp=found.generation_pp, tp=found.generation_tp)
    layout = Layout(pp=found.pp, tp=found.tp, dp=found.dp)
    return Choice(model=model, layout=layout, generation=generation)


def holds(plan, models, cluster):
    """Whether a plan's sets are disjoint, fit into memory and, priced anew, take what it says."""
    costs = CostModel(hardware=Hardware.of(cluster), workload=Workload())
    by_name = {model.name: model for model in models}
    ranks = [rank for found in plan.sets for rank in found.ranks]
    placed = sorted(model.name for found in plan.sets for model in found.models)
    again = [
        evaluate(costs, [choice_of(model, by_name[model.name]) for model in found.models])
        for found in plan.sets
    ]
    stages = zip(*(found.stage_s for found in again), strict=True)
    return (
        len(set(ranks)) == len(ranks)
        and set(ranks) <= set(range(cluster.num_ranks))
        and placed == sorted(by_name)
        and all(found.peak_bytes <= costs.usable_bytes for found in again)
        and isclose(plan.step_s, sum(max(stage) for stage in stages), rel_tol=1e-12)
    )


@pytest.mark.parametrize(("num_gpus", "limit_s"), [(128, 5.0), (1024, 60.0)])
def bench_mapping_command(num_gpus, limit_s, benchmark, record_claim):
    models, cluster = ppo("7B", "7B"), a100s(num_gpus)
    command = [sys.executable, "-m", "hybridflow", "map", "--gpus", str(num_gpus), "--json"]
    whole_s, alone_s, plans = [], [], []

    def both():
        begun = time.perf_counter()
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        whole_s.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        found = search(models, cluster, Workload())
        alone_s.append(time.perf_counter() - begun)
        plans.append((Mapping.from_json(told), found))

    def turns():
        for _ in range(ROUNDS):
            both()

    benchmark.pedantic(turns, rounds=1)
    record_claim(
        Claim(
            name=f"`hybridflow map`, four 7B models on {num_gpus:,} GPUs, the whole command",
            unit="s",
            ours=median(whole_s),
            baseline=limit_s,
            baseline_name="the aim",
            higher_is_better=False,
            correct=all(a == b == plans[0][0] and holds(a, models, cluster) for a, b in plans),
            detail=f"{ROUNDS} times, {min(whole_s):.2f}-{max(whole_s):.2f} s; the search alone "
            f"{median(alone_s):.2f} s ({min(alone_s):.2f}-{max(alone_s):.2f} s), "
            f"{plans[0][0].num_placements:,} placements; plans equal, and priced anew they take "
            f"what they say",
            source=COMMAND,
        ),
        aim=1.0,
        spread=(limit_s / max(whole_s), limit_s / min(whole_s)),
    )


def against_brute_force():
    """GPUs, seconds of both ways, and the steps that they find (infinite: none fits), by case."""
    sys.path.insert(0, str(TESTS))
    definition = import_module("test_search")
    draw = random.Random(0)
    efficiency = Efficiency(decode_step_s=1e-5, decode_sequence_s=1e-6)
    told = []
    for hosts, devices in CASES:
        models = [definition.tiny(role, draw.choice([1, 2, 3])) for role in ROLES]
        workload = Workload(
            global_batch_size=48, prompt_tokens=64, response_tokens=64, micro_batch_tokens=256,
            num_updates=draw.choice([1, 3]),
        )  # fmt: skip
        device = replace(A100_80, memory_bytes=draw.choice([400, 600, 2000]) * MB)
        rate = draw.choice([0.5, 20.0])
        cluster = definition.a100s(hosts * devices, devices, rate, device)
        begun = time.perf_counter()
        try:
            found = search(models, cluster, workload, efficiency).step_s
        except TopologyError:
            found = inf
        middle = time.perf_counter()
        least = definition.brute_force_s(models, cluster, workload, efficiency)
        ended = time.perf_counter()
        told.append((cluster.num_ranks, middle - begun, ended - middle, found, least))
    return told


def bench_mapping_against_brute_force(benchmark, record_claim):
    # The tests' file is loaded in a process of its own: benchmarks do not know its marks.
    with RankPool(1, timeout=timedelta(minutes=10)) as pool:
        told = benchmark.pedantic(lambda: pool.run(against_brute_force).results[0], rounds=1)
    sizes, _, _, found, least = zip(*told, strict=True)
    most = [case for case in told if case[0] == max(sizes)]
    is_same = all(a == b or isclose(a, b, rel_tol=1e-9) for a, b in zip(found, least, strict=True))
    ratios = [case[2] / case[1] for case in most]
    num_fitting = sum(seconds < inf for seconds in least)
    record_claim(
        Claim(
            name=f"search, four small models on {max(sizes)} GPUs",
            unit="s",
            ours=median(case[1] for case in most),
            baseline=median(case[2] for case in most),
            baseline_name="brute force over every placement and layout",
            higher_is_better=False,
            correct=is_same and num_fitting > len(told) / 2,
            detail=f"{len(told)} cases on {min(sizes)} to {max(sizes)} GPUs, of which {num_fitting} fit "
            f"into memory: the same seconds of a step in all",
            source=COMMAND,
        ),
        spread=(min(ratios), max(ratios)),
    )


def one_layout_s(models, cluster):
    """Least seconds of a step with all models on all GPUs in one layout, generation's too."""
    costs = CostModel(hardware=Hardware.of(cluster), workload=Workload())
    possible = [
        set(layouts(model, cluster.num_ranks, 8, costs.workload.max_dp(model))) for model in models
    ]
    least = inf
    for layout in set.intersection(*possible):
        generation = GenerationLayout(pp=layout.pp, tp=layout.tp)
        choices = [
            Choice(
                model=model,
                layout=layout,
                generation=generation if model.role == "actor" else None,
            )
            for model in models
        ]
        try:
            least = min(least, sum(evaluate(costs, choices).stage_s))
        except TopologyError:
            continue
    return least


@pytest.mark.parametrize(
    ("size", "critic_size", "num_gpus"), [("7B", "7B", 16), ("7B", "7B", 128), ("13B", "70B", 128)]
)
def bench_mapping_plans(size, critic_size, num_gpus, benchmark, record_claim):
    models, cluster = ppo(size, critic_size), a100s(num_gpus)
    plan = benchmark.pedantic(lambda: search(models, cluster, Workload()), rounds=1)
    stages = {other.kind: other.stage_s for other in plan.alternatives}
    others = {
        "all models on all GPUs in the best one layout": one_layout_s(models, cluster),
        "the best set of GPUs for each model": sum(stages["standalone"] or [inf]),
    }
    for name, seconds in others.items():
        if seconds == inf:
            continue  # does not fit into memory, and explain() says so
        record_claim(
            Claim(
                name=f"a step of PPO, {size} and {critic_size}, on {num_gpus} A100s",
                unit="s",
                ours=plan.step_s,
                baseline=seconds,
                baseline_name=name,
                higher_is_better=False,
                kind="simulated",
                correct=holds(plan, models, cluster) and plan.step_s <= seconds * (1 + 1e-12),
                detail="chosen: "
                + "; ".join(
                    f"{', '.join(model.name for model in found.models)} on {found.num_gpus}"
                    for found in plan.sets
                ),
                source=COMMAND,
            )
        )
