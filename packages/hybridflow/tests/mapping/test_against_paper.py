"""The search against what "HybridFlow" (arXiv 2409.19256) measured on 16 hosts of 8 A100-80GB.

Every number of ours is simulated with default efficiencies that were not fitted to the paper. Where
the two disagree, the row says by how much and why, and the test holds the disagreement as well, so
that a change of the model shows.
"""

from typing import NamedTuple

import pytest

from hybridflow.mapping import (
    Choice,
    CostModel,
    Efficiency,
    GenerationLayout,
    Hardware,
    Layout,
    ModelSpec,
    Workload,
    evaluate,
    search,
)
from hybridflow.mapping.division import Curve, divide
from hybridflow.mapping.front import Ways
from shared.topology import Cluster, Link
from shared.topology.device import A100_80
from shared.units import GB, Gbps

# Prompts and responses of 1,024 tokens, 1,024 sequences, 8 updates.
STEP = Workload()
COLOCATED = (("actor", "critic", "reference", "reward"),)
SPLIT = (("actor", "reference"), ("critic", "reward"))
STANDALONE = (("actor",), ("critic",), ("reference",), ("reward",))


def paper_cluster(num_gpus):
    # NVLink's 600 GB/s are both directions together. Start-up times are usual ones.
    return Cluster.uniform(
        num_gpus // 8,
        8,
        A100_80,
        local=Link.from_rate(300.0 * GB, alpha_s=2e-6),
        network=Link.from_rate(200.0 * Gbps, alpha_s=1e-5),
    )


def ppo(size, critic_size=None):
    sizes = {"critic": critic_size or size, "reward": critic_size or size}
    return [ModelSpec.llama(sizes.get(role, size), role) for role in COLOCATED[0]]


def step_s(models, num_gpus, groups, sizes=None):
    """Best step of a partition into whole hosts or given sizes, and the sizes of its sets."""
    hardware = Hardware.of(paper_cluster(num_gpus))
    ways = Ways(CostModel(hardware=hardware, workload=STEP))
    by_role = {model.role: model for model in models}
    curves = []
    for index, group in enumerate(groups):
        members = tuple(by_role[role] for role in group)
        whole = range(8, num_gpus + 1, 8) if len(groups) > 1 else [num_gpus]
        allowed = [sizes[index]] if sizes else whole
        curves.append(Curve.over({size: ways.front(members, size) for size in allowed}))
    found = divide(curves, hardware)
    return found.step_s, {way[0].model.role: way[0].layout.num_ranks for way in found.choices}


# Placement: where colocation is the best.


@pytest.mark.parametrize(
    ("size", "num_gpus"),
    [
        *[("7B", 16), ("13B", 16), ("34B", 32), ("70B", 64)],
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("7B", 32), ("7B", 64), ("13B", 32), ("13B", 64), ("34B", 64))
        ],
    ],
)
def test_colocation_is_best_on_16_to_64_gpus(size, num_gpus):
    plan = search(ppo(size), paper_cluster(num_gpus), STEP)
    assert [len(found.models) for found in plan.sets] == [4]


# Generation: tensor parallelism with a training layout of 1-8-2.


def generate_s(size, generation_tp, models=("actor",), efficiency=None):
    costs = CostModel(
        hardware=Hardware.of(paper_cluster(16)),
        workload=STEP,
        efficiency=efficiency or Efficiency(),
    )
    layout = Layout(pp=1, tp=8, dp=2)
    generation = GenerationLayout(pp=1, tp=generation_tp)
    choices = [
        Choice(
            model=ModelSpec.llama(size, role),
            layout=layout,
            generation=generation if role == "actor" else None,
        )
        for role in models
    ]
    return evaluate(costs, choices).stage_s[0]


@pytest.mark.parametrize(("size", "best"), [("7B", 2), ("13B", 4)])
def test_generation_parallelism_that_is_best(size, best):
    assert min((1, 2, 4, 8), key=lambda tp: generate_s(size, tp)) == best


# Disagreements.

IDEAL = (
    "most likely: ours works at one share of the peak whatever a set's size and finds pipelines "
    "across hosts that spare gradients' way, so large sets lose less than the paper's did; the "
    "same crossing comes at two to three times the GPUs (34B by 192, 13B by 256)"
)
ENGINE = (
    "host work of a decode step is 20 us a sequence here; engines of 2024 took about ten times "
    "that, which weighs on replicas with many sequences (0.2 ms gives 0.5 for 7B)"
)
UNSHARDED = (
    "optimizer states are not sharded over replicas here: two trained models leave the cache 3 to "
    "6 GiB of each GPU, and the highest degree has the most room"
)


class Disagreement(NamedTuple):
    """What the paper has over our best (or over the value named), in seconds, and why."""

    what: str
    paper: str
    ours: str
    ratio: float
    cause: str


PLACEMENTS = {
    ("13B", None, 96, SPLIT, None): Disagreement(
        "13B on 96 GPUs", "actor + ref | critic + reward", "colocated", 1.13, IDEAL
    ),
    ("34B", None, 96, SPLIT, None): Disagreement(
        "34B on 96 GPUs", "actor + ref | critic + reward", "colocated", 1.08, IDEAL
    ),
    ("34B", None, 128, SPLIT, None): Disagreement(
        "34B on 128 GPUs", "actor + ref | critic + reward", "colocated", 1.05, IDEAL
    ),
    ("13B", None, 128, STANDALONE, (64, 32, 16, 16)): Disagreement(
        "13B on 128 GPUs", "standalone 64, 32, 16, 16", "colocated", 1.59, IDEAL
    ),
    ("13B", "70B", 128, (("actor", "reference", "reward"), ("critic",)), (64, 64)): Disagreement(
        "13B actor and reference, 70B critic and reward on 128 GPUs",
        "actor + ref + reward on 64 | critic on 64",
        "colocated",
        1.30,
        IDEAL,
    ),
}
GENERATION = {
    ("7B", 2, ("actor",)): Disagreement("7B, t_g 2 against 8", "0.40", "0.88", 0.88, ENGINE),
    ("13B", 4, ("actor",)): Disagreement("13B, t_g 4 against 8", "0.64", "0.94", 0.94, ENGINE),
    ("13B", 4, COLOCATED[0]): Disagreement(
        "13B, t_g 4 against 8 beside the other models", "0.64", "1.65", 1.65, UNSHARDED
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case[2] > 64 else (), id=found.what)
        for case, found in PLACEMENTS.items()
    ],
)
def test_placements_that_disagree(case):
    size, critic_size, num_gpus, groups, sizes = case
    models = ppo(size, critic_size)
    best_s, _ = step_s(models, num_gpus, COLOCATED)
    their_s, _ = step_s(models, num_gpus, groups, sizes)
    assert their_s / best_s == pytest.approx(PLACEMENTS[case].ratio, abs=0.02)


@pytest.mark.parametrize("case", GENERATION, ids=lambda case: GENERATION[case].what)
def test_generation_that_disagrees(case):
    size, generation_tp, models = case
    ratio = generate_s(size, generation_tp, models) / generate_s(size, 8, models)
    assert ratio == pytest.approx(GENERATION[case].ratio, abs=0.02)


def test_slower_host_work_explains_the_gain_of_small_generation_groups():
    slow = Efficiency(decode_sequence_s=2e-4)
    ratio = generate_s("7B", 2, efficiency=slow) / generate_s("7B", 8, efficiency=slow)
    assert ratio == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
def test_standalone_divides_the_gpus_alike_for_models_that_only_score():
    _, sizes = step_s(ppo("13B"), 128, STANDALONE)
    assert sizes == {"actor": 48, "critic": 48, "reference": 16, "reward": 16}


@pytest.mark.slow
@pytest.mark.parametrize("size", ["13B", "34B"])
def test_colocation_loses_its_lead_as_the_cluster_grows(size):
    """The paper's trend: a large set wastes more, so splitting it pays from some size on."""
    leads = []
    for num_gpus in (32, 64, 96):
        best_s, _ = step_s(ppo(size), num_gpus, COLOCATED)
        leads.append(step_s(ppo(size), num_gpus, SPLIT)[0] / best_s)
    assert leads[0] > leads[1] > leads[2] > 1


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_gpus"), [("34B", 256), ("13B", 384)])
def test_splitting_is_best_at_last(size, num_gpus):
    best_s, _ = step_s(ppo(size), num_gpus, COLOCATED)
    assert step_s(ppo(size), num_gpus, SPLIT)[0] < best_s
