from dataclasses import replace
from itertools import product
from math import ceil
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
)
from hybridflow.mapping import memory as bytes_of
from hybridflow.mapping.degrees import generation_layouts, layouts
from shared.errors import ConfigError, TopologyError
from shared.topology import Cluster, Host, Link
from shared.topology.device import A100_80, H100
from shared.units import GB, Gbps

LOCAL = Link.from_rate(300.0 * GB, alpha_s=2e-6)
NETWORK = Link.from_rate(200.0 * Gbps, alpha_s=1e-5)
ACTOR = ModelSpec.llama("7B", "actor")
CRITIC = ModelSpec.llama("7B", "critic")
REWARD = ModelSpec.llama("7B", "reward")


def costs(num_hosts=2, devices=8, efficiency=None, local=LOCAL, network=NETWORK, **workload):
    cluster = Cluster.uniform(num_hosts, devices, A100_80, local=local, network=network)
    return CostModel(
        hardware=Hardware.of(cluster),
        workload=Workload(**workload),
        efficiency=efficiency or Efficiency(),
    )


def test_parameters_of_llamas():
    published = {"7B": 6_738_415_616, "13B": 13_015_864_320, "70B": 68_976_648_192}
    assert {s: ModelSpec.llama(s, "actor").num_params for s in published} == published
    assert 33.7e9 < ModelSpec.llama("34B", "actor").num_params < 33.8e9


def test_a_config_gives_the_same_model():
    config = SimpleNamespace(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=11008,
        vocab_size=32_000,
    )
    assert ModelSpec.from_config(config, "actor") == ACTOR
    config.tie_word_embeddings = True
    tied = ModelSpec.from_config(config, "actor", "policy")
    assert ACTOR.num_params - tied.num_params == 32_000 * 4096
    assert tied.name == "policy"
    assert ModelSpec.from_config(config, "actor", num_params=7).num_params == 7
    config.num_local_experts = 8
    with pytest.raises(ConfigError, match="mixture of experts"):
        ModelSpec.from_config(config, "actor")
    with pytest.raises(ConfigError, match="num_attention_heads"):
        ModelSpec.from_config(SimpleNamespace(hidden_size=8), "actor")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": "judge"}, "expected a role of"),
        ({"num_layers": 0}, "num_layers of at least 1"),
        ({"num_kv_heads": 5}, "multiple of num_kv_heads 5"),
    ],
)
def test_bad_models_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(ACTOR, **changes)


def test_an_unknown_llama_is_refused():
    with pytest.raises(ConfigError, match="7B, 13B, 34B, 70B"):
        ModelSpec.llama("8B", "actor")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "dpo"}, "expected one of ppo"),
        ({"response_tokens": 0}, "response_tokens: expected at least 1"),
        ({"algorithm": "grpo"}, "at least 2"),
        ({"group_size": 3}, "whole groups"),
        ({"num_updates": 2000}, "at most one update a sequence"),
    ],
)
def test_bad_workloads_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Workload(**changes)


@pytest.mark.parametrize(
    ("algorithm", "roles", "message"),
    [
        ("ppo", ["actor"], "1 of role 'critic'"),
        ("remax", ["actor", "critic"], "0 of role 'critic'"),
        ("safe_rlhf", ["actor", "critic"], "2 of role 'critic'"),
        ("ppo", ["actor", "critic", "cost"], "no cost model"),
        ("ppo", ["critic"], "1 of role 'actor'"),
    ],
)
def test_models_of_another_algorithm_are_refused(algorithm, roles, message):
    with pytest.raises(ConfigError, match=message):
        Workload(algorithm=algorithm).check([ModelSpec.llama("7B", role) for role in roles])


def test_names_must_differ():
    with pytest.raises(ConfigError, match="a name of its own"):
        Workload().check([ACTOR, ACTOR, CRITIC])


@pytest.mark.parametrize("changes", [{"training": 0.0}, {"memory": 1.5}, {"decode_step_s": -1.0}])
def test_bad_efficiencies_are_refused(changes):
    with pytest.raises(ConfigError, match="expected"):
        Efficiency(**changes)


def test_unequal_clusters_are_refused():
    equal = Host(name="a", devices=(A100_80,) * 2)
    for other in (
        Host(name="b", devices=(H100,) * 2),
        Host(name="b", devices=(A100_80,)),
        Host(name="b", devices=(A100_80,) * 2, link=LOCAL),
    ):
        with pytest.raises(TopologyError, match="'b' differs"):
            Hardware.of(Cluster(hosts=(equal, other)))
    cluster = Cluster(hosts=(equal, replace(equal, name="b")), links={("a", "b"): LOCAL})
    with pytest.raises(TopologyError, match="one network link"):
        Hardware.of(cluster)


@pytest.mark.parametrize(
    ("devices", "sizes"),
    [(8, [1, 2, 4, 8, 16, 24]), (6, [1, 3, 6, 12, 18]), (1, [1, 2, 3]), (5, [1, 5, 10, 15])],
)
def test_sizes_of_sets(devices, sizes):
    assert costs(3, devices).hardware.set_sizes() == sizes


@given(st.sampled_from([1, 2, 4, 6, 8, 12]), st.lists(st.integers(0, 99), max_size=6))
def test_sets_by_falling_size_never_straddle_hosts(devices, picks):
    sizes = costs(3, devices).hardware.set_sizes()
    chosen = sorted((sizes[pick % len(sizes)] for pick in picks), reverse=True)
    first = 0
    for size in chosen:
        assert first % min(size, devices) == 0
        assert size >= devices or first // devices == (first + size - 1) // devices
        first += size


@given(
    num_gpus=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 80]),
    heads=st.sampled_from([1, 2, 12, 32]),
    num_layers=st.sampled_from([1, 3, 32]),
    max_dp=st.sampled_from([1, 4, 1024]),
)
def test_layouts_are_all_that_obey_the_rules(num_gpus, heads, num_layers, max_dp):
    model = replace(ACTOR, num_heads=heads, num_kv_heads=1, num_layers=num_layers)
    found = {(at.pp, at.tp, at.dp) for at in layouts(model, num_gpus, 8, max_dp)}
    degrees = range(1, num_gpus + 1)
    assert found == {
        (pp, tp, num_gpus // (pp * tp))
        for pp, tp in product(degrees, degrees)
        if num_gpus % (pp * tp) == 0
        and pp <= num_layers
        and heads % tp == 0
        and 8 % tp == 0
        and num_gpus // (pp * tp) <= max_dp
    }


def test_one_gpu_trains_at_the_arithmetic_and_the_optimizer():
    model = costs(1, 1, micro_batch_tokens=2048)
    tokens = 1024 * 2048
    attention = 3 * 2 * 32 * 4096 * 2048
    arithmetic_s = tokens * (6 * ACTOR.num_params + attention) / (312e12 * 0.5)
    optimizer_s = 8 * 30 * ACTOR.num_params / (2039 * GB * 0.8)
    one = Layout(pp=1, tp=1, dp=1)
    assert model.train_s(ACTOR, one) == pytest.approx(arithmetic_s + optimizer_s)
    assert model.prepare_s(REWARD, one) == pytest.approx(arithmetic_s / 3)
    assert model.train_s(REWARD, one) == 0
    assert model.prepare_s(ACTOR, one) == 0


def test_a_pipeline_adds_its_bubble():
    free = Link(alpha_s=0.0, beta_s_per_byte=0.0)
    model = costs(1, 8, local=free, micro_batch_tokens=2048, num_updates=64)
    # 16 sequences an update: 16 micro-batches in 16 + 3 turns of a quarter each.
    flat = model.train_s(ACTOR, Layout(pp=1, tp=1, dp=1))
    assert model.train_s(ACTOR, Layout(pp=4, tp=1, dp=1)) < flat
    forward = model.prepare_s(CRITIC, Layout(pp=1, tp=1, dp=1))
    piped = model.prepare_s(CRITIC, Layout(pp=4, tp=1, dp=1))
    assert piped == pytest.approx(forward / 4 * (1024 + 3) / 1024)


def test_gradients_count_where_they_do_not_hide():
    slow = Link.from_rate(1.0 * Gbps)
    one_host = costs(1, 8).train_s(ACTOR, Layout(pp=1, tp=8, dp=1))
    model = costs(2, 8, network=slow)
    two_hosts = model.train_s(ACTOR, Layout(pp=1, tp=8, dp=2))
    # Eight rings of an eighth of the gradients share a network card, and each sends half twice.
    reduce_s = 8 * 4 * ACTOR.num_params / (1 * Gbps)
    assert two_hosts > one_host / 2
    assert two_hosts == pytest.approx(reduce_s, rel=0.1)


def test_rings_of_a_host_share_its_network():
    hardware = costs(4, 8).hardware
    beta = NETWORK.beta_s_per_byte
    assert hardware.ring(8, 1) == LOCAL
    assert hardware.ring(2, 4) == LOCAL
    assert hardware.ring(16, 1).beta_s_per_byte == pytest.approx(beta)
    assert hardware.ring(8, 4).beta_s_per_byte == pytest.approx(4 * beta)
    assert hardware.ring(4, 8).beta_s_per_byte == pytest.approx(8 * beta)
    assert hardware.ring(2, 16).beta_s_per_byte == pytest.approx(8 * beta)


def test_a_decode_step_reads_weights_and_half_of_the_responses():
    model = costs(1, 1, Efficiency(decode_step_s=0.0, decode_sequence_s=0.0), prompt_tokens=1)
    model = replace(model, workload=replace(model.workload, global_batch_size=8, num_updates=1))
    one, alone = Layout(pp=1, tp=1, dp=1), GenerationLayout(pp=1, tp=1)
    kv_bytes = 2 * 2 * 32 * 4096 * (1 + 1024 / 2)
    read_s = (2 * ACTOR.num_params + 8 * kv_bytes) / (2039 * GB * 0.8)
    prefill_s = 8 * (2 * ACTOR.num_params + 2 * 32 * 4096) / (312e12 * 0.5)
    in_one = model.generate_s(ACTOR, one, alone, 1)
    assert in_one == pytest.approx(1024 * read_s + prefill_s)
    # A second wave reads the weights again, and the caches only once.
    again_s = 1024 * 2 * ACTOR.num_params / (2039 * GB * 0.8)
    assert model.generate_s(ACTOR, one, alone, 2) == pytest.approx(in_one + again_s)


def test_waves_follow_the_cache():
    model, layout = costs(2, 8), Layout(pp=1, tp=8, dp=2)
    two = GenerationLayout(pp=1, tp=2)
    per_sequence = 2 * 2 * 32 * 16 * 128 * 2048
    assert bytes_of.kv_bytes_per_sequence(ACTOR, two, model.workload) == per_sequence
    assert model.replica_sequences(layout, two) == 128
    assert model.num_waves(ACTOR, layout, two, 128 * per_sequence) == 1
    assert model.num_waves(ACTOR, layout, two, 128 * per_sequence - 1) == 2
    assert model.num_waves(ACTOR, layout, two, per_sequence - 1) is None


def test_remax_generates_and_scores_greedy_responses():
    plain = Workload(algorithm="remax", global_batch_size=64)
    reference = ModelSpec.llama("7B", "reference")
    assert (plain.num_generated, plain.num_prepared(REWARD)) == (128, 128)
    assert (plain.num_prepared(reference), plain.sequences_per_update) == (64, 8)
    assert Workload(recomputes_log_probs=True).num_prepared(ACTOR) == 1024


def test_a_group_prefills_its_prompt_once():
    one, alone = Layout(pp=1, tp=1, dp=1), GenerationLayout(pp=1, tp=1)
    single, group = (
        costs(1, 1, response_tokens=1, group_size=size).generate_s(ACTOR, one, alone, 1)
        for size in (1, 8)
    )
    assert group < single / 4


@pytest.mark.parametrize("layout", [(1, 8, 2), (4, 2, 2), (2, 8, 1), (4, 4, 1), (1, 4, 4)])
def test_resharding_receives_what_the_formula_says(layout):
    """Ranks are enumerated; the link takes a second a byte so that seconds are bytes."""
    pp, tp, dp = layout
    unit = Link(alpha_s=0.0, beta_s_per_byte=1.0)
    model = costs(1, 16, local=unit)
    at = Layout(pp=pp, tp=tp, dp=dp)
    weights = 2 * ACTOR.num_params
    for generation in generation_layouts(at):
        merged_pp, merged_tp = pp // generation.pp, tp // generation.tp
        groups = {}
        for replica, stage, rank in product(range(dp), range(pp), range(tp)):
            groups.setdefault((replica, stage // merged_pp, rank // merged_tp), []).append(rank)
        (size,) = {len(group) for group in groups.values()}
        received = (size - 1) * weights / (pp * tp)
        formula = (tp * pp - generation.tp * generation.pp) / (
            generation.tp * generation.pp * tp * pp
        )
        assert received == pytest.approx(formula * weights)
        assert model.reshard_s(ACTOR, at, generation) == pytest.approx(received)


def test_bytes_of_training_and_inference():
    layout = Layout(pp=3, tp=2, dp=1)
    share = ceil(32 / 3) / 32 / 2
    assert bytes_of.resident_bytes(ACTOR, layout) == pytest.approx(18 * ACTOR.num_params * share)
    assert bytes_of.resident_bytes(REWARD, layout) == pytest.approx(2 * REWARD.num_params * share)
    # A stage that keeps three micro-batches of eleven layers has about what one of all has.
    whole = bytes_of.working_bytes(ACTOR, Layout(pp=1, tp=2, dp=1), Workload())
    assert bytes_of.working_bytes(ACTOR, layout, Workload()) == pytest.approx(whole, rel=0.05)
    assert bytes_of.working_bytes(REWARD, layout, Workload()) < whole / 30


def test_kv_heads_are_replicated_when_ranks_are_more():
    model = ModelSpec.llama("70B", "actor")
    workload = Workload()
    by_ranks = [
        bytes_of.kv_bytes_per_sequence(model, GenerationLayout(pp=1, tp=tp), workload)
        for tp in (4, 8, 16)
    ]
    assert by_ranks[0] == 2 * by_ranks[1] == 2 * by_ranks[2]


def test_transfers_are_shared_by_the_hosts_of_a_set():
    one, two = costs(4, 8).transfer_s(8), costs(4, 8).transfer_s(16)
    num_bytes = 1024 * (2048 * 8 + 1024 * 4)
    assert one == pytest.approx(1e-5 + num_bytes / (200 * Gbps))
    assert two == pytest.approx(1e-5 + num_bytes / 2 / (200 * Gbps))
    assert costs(1, 8).transfer_s(4) == pytest.approx(2e-6 + num_bytes / (300 * GB))


def test_a_set_is_the_sum_of_its_models():
    model, layout = costs(2, 8), Layout(pp=1, tp=8, dp=2)
    actor = Choice(model=ACTOR, layout=layout, generation=GenerationLayout(pp=1, tp=2))
    reward = Choice(model=REWARD, layout=layout)
    found = evaluate(model, [actor, reward], first_rank=16)
    assert list(found.ranks) == list(range(16, 32))
    assert found.stage_s == tuple(map(sum, zip(*(m.stage_s for m in found.models), strict=True)))
    apart = evaluate(model, [reward])
    assert apart.stage_s[1] == pytest.approx(model.prepare_s(REWARD, layout) + model.transfer_s(16))


def test_sets_that_cannot_be_are_refused():
    model, layout = costs(1, 8), Layout(pp=1, tp=1, dp=8)
    actor = Choice(model=ACTOR, layout=layout, generation=GenerationLayout(pp=1, tp=1))
    with pytest.raises(TopologyError, match="choose more shards"):
        evaluate(model, [actor])
    with pytest.raises(TopologyError, match=r"at most 67.*critic"):
        evaluate(model, [Choice(model=CRITIC, layout=layout)])
    other = Choice(model=REWARD, layout=Layout(pp=1, tp=1, dp=4))
    with pytest.raises(TopologyError, match="one number of GPUs"):
        evaluate(model, [actor, other])


@given(
    st.sampled_from(["7B", "70B"]),
    st.sampled_from([(1, 8), (2, 8), (4, 4)]),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.integers(1, 5),
)
def test_twice_the_bandwidth_is_never_slower(size, shape, pick, pick_generation, waves):
    model = ModelSpec.llama(size, "actor")
    possible = layouts(model, shape[0] * shape[1], shape[1], 128)
    layout = possible[pick % len(possible)]
    pairs = generation_layouts(layout)
    generation = pairs[pick_generation % len(pairs)]

    def times(local, network):
        found = costs(*shape, local=local, network=network)
        return (
            found.generate_s(model, layout, generation, waves),
            found.prepare_s(replace(model, role="critic"), layout),
            found.train_s(model, layout),
            found.transfer_s(layout.num_ranks),
        )

    before = times(LOCAL, NETWORK)
    for faster in ((_doubled(LOCAL), NETWORK), (LOCAL, _doubled(NETWORK))):
        after = times(*faster)
        assert all(x <= y * (1 + 1e-12) for x, y in zip(after, before, strict=True))


def _doubled(link):
    return replace(link, beta_s_per_byte=link.beta_s_per_byte / 2)
