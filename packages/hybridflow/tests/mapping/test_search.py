import json
import subprocess
import sys
from dataclasses import replace
from itertools import permutations, product
from math import ceil, inf
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

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
from hybridflow.mapping import memory as bytes_of
from hybridflow.mapping.division import Curve, divide
from hybridflow.mapping.front import Ways
from shared.errors import ConfigError, TopologyError
from shared.topology import Cluster, Link
from shared.topology.device import A100_80
from shared.units import GB, MB, Gbps

ROLES = {
    "ppo": ("actor", "critic", "reference", "reward"),
    "grpo": ("actor", "reference", "reward"),
    "remax": ("actor", "reference", "reward"),
    "safe_rlhf": ("actor", "critic", "cost_critic", "reference", "reward", "cost"),
}


def llamas(size, algorithm="ppo"):
    return [
        ModelSpec.llama(size, name.removeprefix("cost_") if "critic" in name else name, name)
        for name in ROLES[algorithm]
    ]


def a100s(num_gpus, devices=8, rate=200.0, device=A100_80):
    return Cluster.uniform(
        num_gpus // devices,
        devices,
        device,
        local=Link.from_rate(300.0 * GB, alpha_s=2e-6),
        network=Link.from_rate(rate * Gbps, alpha_s=1e-5),
    )


def tiny(name, num_layers, num_heads=2):
    """A model so small that all its layouts can be gone through."""
    return ModelSpec(
        name=name,
        role="critic" if "critic" in name else name,
        num_params=20_000_000 * num_layers,
        num_layers=num_layers,
        hidden_size=512,
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=128,
        ffn_size=1024,
        vocab_size=1000,
    )


# What follows is the definition in plain loops: no fronts, bounds or arrays.


def brute_force_s(models, cluster, workload, efficiency):
    """Least seconds of a step over every placement and layout; infinite if none fits."""
    costs = CostModel(hardware=Hardware.of(cluster), workload=workload, efficiency=efficiency)
    devices, num_gpus = costs.hardware.devices_per_host, costs.hardware.num_gpus
    sizes = [n for n in range(1, num_gpus + 1) if n % devices == 0 or (devices % n == 0)]
    ways = {}
    least = inf
    for partition in every_partition(models):
        for division in product(sizes, repeat=len(partition)):
            if sum(division) > num_gpus:
                continue
            for key in zip(partition, division, strict=True):
                if key not in ways:
                    ways[key] = set(every_way(*key, costs))
            sets = [ways[key] for key in zip(partition, division, strict=True)]
            for combined in product(*sets):
                least = min(least, sum(max(stage) for stage in zip(*combined, strict=True)))
    return least


def every_partition(models):
    seen = set()
    for labels in product(range(len(models)), repeat=len(models)):
        groups = {}
        for model, label in zip(models, labels, strict=True):
            groups.setdefault(label, []).append(model)
        seen.add(frozenset(tuple(group) for group in groups.values()))
    return [tuple(groups) for groups in seen]


def every_layout(model, num_gpus, costs):
    devices = costs.hardware.devices_per_host
    limit = (
        costs.workload.sequences_per_update
        if model.is_trained
        else costs.workload.global_batch_size
    )
    degrees = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    return [
        Layout(pp=pp, tp=tp, dp=dp)
        for pp, tp, dp in product(degrees, repeat=3)
        if pp * tp * dp == num_gpus
        and devices % tp == 0
        and model.num_heads % tp == 0
        and pp <= model.num_layers
        and dp <= limit
    ]


def every_way(models, num_gpus, costs):
    for found in product(*(every_layout(model, num_gpus, costs) for model in models)):
        pairs = list(zip(models, found, strict=True))
        resident = sum(bytes_of.resident_bytes(*pair) for pair in pairs)
        working = max(bytes_of.working_bytes(*pair, costs.workload) for pair in pairs)
        prepare_s = sum(costs.prepare_s(*pair) for pair in pairs)
        train_s = sum(costs.train_s(*pair) for pair in pairs)
        if resident + working > costs.usable_bytes:
            continue
        actors = [pair for pair in pairs if pair[0].role == "actor"]
        if not actors:
            yield (0.0, prepare_s + len(models) * costs.transfer_s(num_gpus), train_s)
            continue
        ((actor, layout),) = actors
        for pp, tp in product(range(1, layout.pp + 1), range(1, layout.tp + 1)):
            if layout.pp % pp or layout.tp % tp:
                continue
            generation = GenerationLayout(pp=pp, tp=tp)
            cache = costs.usable_bytes - resident
            cache -= bytes_of.generation_bytes(actor, layout, generation)
            per_sequence = bytes_of.kv_bytes_per_sequence(actor, generation, costs.workload)
            capacity = cache // per_sequence
            if capacity >= 1:
                num_sequences = ceil(costs.workload.num_generated / (num_gpus // (pp * tp)))
                num_waves = ceil(num_sequences / capacity)
                seconds = costs.generate_s(actor, layout, generation, num_waves)
                yield (seconds, prepare_s, train_s)


EFFICIENCY = Efficiency(decode_step_s=1e-5, decode_sequence_s=1e-6)


@settings(max_examples=5, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (1, 4), (2, 2), (1, 8), (2, 4), (4, 2), (2, 8)]),
    algorithm=st.sampled_from(["grpo", "remax"]),
    layers=st.tuples(*[st.sampled_from([1, 2, 3])] * 3),
    memory_mb=st.sampled_from([200, 400, 800, 3000]),
    rate=st.sampled_from([0.5, 20.0]),
    num_updates=st.sampled_from([1, 4]),
)
def test_three_models_equal_brute_force(shape, algorithm, layers, memory_mb, rate, num_updates):
    models = [tiny(name, depth) for name, depth in zip(ROLES[algorithm], layers, strict=True)]
    workload = Workload(
        algorithm=algorithm,
        global_batch_size=32,
        group_size=2 if algorithm == "grpo" else 1,
        prompt_tokens=64,
        response_tokens=64,
        micro_batch_tokens=256,
        num_updates=num_updates,
    )
    device = replace(A100_80, memory_bytes=memory_mb * MB)
    cluster = a100s(shape[0] * shape[1], shape[1], rate, device)
    least = brute_force_s(models, cluster, workload, EFFICIENCY)
    if least == inf:
        with pytest.raises(TopologyError):
            search(models, cluster, workload, EFFICIENCY)
    else:
        assert search(models, cluster, workload, EFFICIENCY).step_s == pytest.approx(least)


@pytest.mark.parametrize(
    ("algorithm", "names", "memory_mb", "rate", "layers"),
    [
        ("ppo", ROLES["ppo"], 300, 20.0, (2, 1, 2, 1)),
        pytest.param("ppo", ROLES["ppo"], 2000, 0.5, (1, 2, 1, 1), marks=pytest.mark.slow),
        pytest.param(
            *("safe_rlhf", ("actor", "critic", "cost_critic", "cost"), 1000, 0.5, (1, 2, 1, 1)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("safe_rlhf", ("actor", "critic", "cost_critic", "cost"), 600, 20.0, (1, 1, 3, 1)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_four_models_on_sixteen_gpus_equal_brute_force(algorithm, names, memory_mb, rate, layers):
    models = [tiny(name, depth) for name, depth in zip(names, layers, strict=True)]
    workload = Workload(
        algorithm=algorithm,
        global_batch_size=48,
        prompt_tokens=64,
        response_tokens=64,
        micro_batch_tokens=256,
        num_updates=3,
        recomputes_log_probs=True,
    )
    cluster = a100s(16, 8, rate, replace(A100_80, memory_bytes=memory_mb * MB))
    least = brute_force_s(models, cluster, workload, EFFICIENCY)
    assert least < inf
    assert search(models, cluster, workload, EFFICIENCY).step_s == pytest.approx(least)


# Properties.

SIZES = st.sampled_from(["7B", "13B", "34B"])


def searched(*arguments):
    try:
        return search(*arguments)
    except TopologyError:
        assume(False)
        raise


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(SIZES, st.sampled_from(list(ROLES)[:3]), st.integers(2, 3), st.sampled_from([10.0, 200.0]))
def test_more_hosts_or_bandwidth_are_never_slower(size, algorithm, hosts, rate):
    # From two hosts on: alone, a host has no network that transfers would have to take.
    models = llamas(size, algorithm)
    workload = Workload(algorithm=algorithm, group_size=2 if algorithm == "grpo" else 1)
    before = searched(models, a100s(8 * hosts, rate=rate), workload)
    more = search(models, a100s(8 * hosts + 8, rate=rate), workload)
    faster = search(models, a100s(8 * hosts, rate=2 * rate), workload)
    assert max(more.step_s, faster.step_s) <= before.step_s * (1 + 1e-12)


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(SIZES, SIZES, st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_plan_holds_what_it_says(size, other, hosts, random):
    models = llamas(size)[::2] + llamas(other)[1::2]
    cluster, workload = a100s(8 * hosts), Workload()
    plan = searched(models, cluster, workload)
    random.shuffle(models)
    assert search(models, cluster, workload) == plan
    assert Mapping.from_json(plan.to_json()) == plan

    costs = CostModel(hardware=Hardware.of(cluster), workload=workload)
    by_name = {model.name: model for model in models}
    again = [evaluate(costs, choices_of(found, by_name), found.first_rank) for found in plan.sets]
    assert again == list(plan.sets)
    stages = zip(*(found.stage_s for found in again), strict=True)
    assert plan.stage_s == tuple(max(stage) for stage in stages)

    ranks = [rank for found in plan.sets for rank in found.ranks]
    assert len(set(ranks)) == len(ranks)
    assert set(ranks) <= set(range(cluster.num_ranks))
    assert sorted(model.name for found in plan.sets for model in found.models) == sorted(by_name)
    for found in plan.sets:
        assert found.peak_bytes <= plan.usable_bytes
        for model in found.models:
            assert model.pp * model.tp * model.dp == found.num_gpus
            assert by_name[model.name].num_heads % model.tp == 0
    times = [sum(kind.stage_s) for kind in plan.alternatives if kind.stage_s]
    assert plan.step_s <= min(times) * (1 + 1e-12)


def choices_of(found, by_name):
    return [
        Choice(
            model=by_name[model.name],
            layout=Layout(pp=model.pp, tp=model.tp, dp=model.dp),
            generation=GenerationLayout(pp=model.generation_pp, tp=model.generation_tp)
            if model.generation_tp
            else None,
        )
        for model in found.models
    ]


def test_equal_models_in_any_order_give_one_plan():
    models = llamas("7B", "grpo")
    workload = Workload(algorithm="grpo", group_size=8)
    expected = search(models, a100s(24), workload)
    for order in list(permutations(range(3)))[1:]:
        permuted = [models[index] for index in order]
        assert search(permuted, a100s(24), workload) == expected, order


# Plans as text.


def test_a_plan_explains_itself():
    text = str(search(llamas("7B"), a100s(32), Workload()))
    assert text.startswith("Simulated step: ")
    for part in ("p-t-d", "generation p-t", "GPUs 0-", "Best colocated", "Best split", "ruled out"):
        assert part in text
    assert "Best standalone: does not fit" in str(search(llamas("34B"), a100s(32), Workload()))
    assert "GiB a GPU at most" in text


def test_an_actor_alone_takes_all_gpus():
    plan = search([ModelSpec.llama("7B", "actor")], a100s(16), Workload(algorithm="remax"))
    assert [found.num_gpus for found in plan.sets] == [16]
    assert [other.kind for other in plan.alternatives] == ["colocated"]


def test_idle_gpus_are_told():
    # One sequence an update makes one replica, of which nine stages are no better than eight.
    workload = Workload(
        algorithm="remax",
        global_batch_size=16,
        num_updates=16,
        prompt_tokens=8,
        response_tokens=8,
    )
    plan = search(llamas("7B", "remax"), a100s(72), workload)
    assert [found.num_gpus for found in plan.sets] == [64]
    assert "Idle: 8 GPUs" in str(plan)


@pytest.fixture(scope="module")
def plan_json():
    return search(llamas("7B"), a100s(16), Workload()).to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.update(format=2), "expected a mapping of format 1"),
        (lambda tree: tree.update(colour="red"), "mapping: expected the keys"),
        (lambda tree: tree.pop("sets"), "mapping: expected the keys"),
        (lambda tree: tree["sets"][0].update(gpus=1), r"mapping.sets\[0\]: expected the keys"),
        (lambda tree: tree["sets"][0]["models"][1].pop("tp"), r"sets\[0\].models\[1\]: expected"),
        (lambda tree: tree["alternatives"].append(7), r"alternatives\[3\]: expected the keys"),
    ],
)
def test_other_json_is_refused(change, message, plan_json):
    tree = json.loads(plan_json)
    change(tree)
    with pytest.raises(ConfigError, match=message):
        Mapping.from_json(json.dumps(tree))


def test_text_that_is_no_json_is_refused():
    with pytest.raises(ConfigError, match="expected JSON"):
        Mapping.from_json("{")


# Faults.


def test_a_cluster_that_is_too_small_is_told_what_would_do():
    with pytest.raises(TopologyError) as raised:
        search(llamas("34B"), a100s(16), Workload())
    message = str(raised.value)
    assert "on 16 x A100_80: expected at most 67.1 GiB" in message
    assert "got 84.1 GiB" in message
    assert "take 24 such GPUs or more" in message
    assert search(llamas("34B"), a100s(24), Workload()).sets


@pytest.mark.slow
def test_models_that_fit_nowhere_are_told_so():
    device = replace(A100_80, memory_bytes=100 * MB)
    with pytest.raises(TopologyError, match="even 520 such GPUs"):
        search(llamas("7B"), a100s(8, device=device), Workload())


def test_no_models_are_refused():
    with pytest.raises(ConfigError, match="got none"):
        search([], a100s(8), Workload())


# Speed, and what the restriction of sizes costs.


# In a process of its own, where signatures are not checked.
TIMED = """
import sys, time
sys.path.insert(0, {folder!r})
import test_search as tests
algorithm, num_gpus = {algorithm!r}, {num_gpus}
models, cluster = tests.llamas("7B", algorithm), tests.a100s(num_gpus)
workload = tests.Workload(algorithm=algorithm)
started = time.perf_counter()
tests.search(models, cluster, workload)
print(time.perf_counter() - started)
"""


@pytest.mark.parametrize(
    ("algorithm", "num_gpus", "limit_s"),
    [
        pytest.param("ppo", 128, 5, marks=pytest.mark.slow),
        pytest.param("ppo", 1024, 60, marks=pytest.mark.slow),
        pytest.param("safe_rlhf", 128, 60, marks=pytest.mark.slow),
    ],
)
def test_a_search_takes_seconds(algorithm, num_gpus, limit_s):
    folder = str(Path(__file__).parent)
    code = TIMED.format(folder=folder, algorithm=algorithm, num_gpus=num_gpus)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=110
    )
    assert float(done.stdout) < limit_s


@pytest.mark.parametrize(
    ("num_gpus", "size"),
    [
        (8, "1B"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((8, "3B"), (16, "7B"), (24, "7B"))
        ],
    ],
)
def test_sets_of_any_size_would_gain_little(num_gpus, size):
    """Any number of GPUs a set, as if tensor groups could straddle hosts at no cost."""
    hidden = {"1B": 2048, "3B": 3072, "7B": 4096}[size]
    models = [
        replace(
            model,
            hidden_size=hidden,
            head_size=hidden // 32,
            num_params=model.num_params * hidden**2 // 4096**2,
        )
        for model in llamas("7B")
    ]
    costs = CostModel(hardware=Hardware.of(a100s(num_gpus)), workload=Workload())
    ways = Ways(costs)
    models.sort(key=lambda model: model.name)
    least = inf
    for partition in every_partition(models):
        curves = [
            Curve.over({size: ways.front(group, size) for size in range(1, num_gpus + 1)})
            for group in partition
        ]
        found = divide(curves, costs.hardware) if all(map(len, curves)) else None
        least = min(least, found.step_s if found else inf)
    plan = search(models, a100s(num_gpus), Workload())
    assert least <= plan.step_s * (1 + 1e-12)
    assert plan.step_s <= 1.001 * least


def test_sizes_that_are_possible_are_all_in_the_space():
    """The number of placements is that of enumerating them."""
    plan = search(llamas("7B", "remax"), a100s(16), Workload(algorithm="remax"))
    sizes = (1, 2, 4, 8, 16)
    by_sets = [
        sum(sum(division) <= 16 for division in product(sizes, repeat=number))
        for number in (1, 2, 3)
    ]
    assert plan.num_placements == by_sets[0] + 3 * by_sets[1] + by_sets[2]
