"""Bytes and seconds of a step against sums by hand."""

import numpy as np
import pytest
from schemas import draw_schema

from heta import plan
from heta.graph.schema import Schema
from heta.partitioning.frontier import profile_counts
from heta.partitioning.prediction import Network
from heta.partitioning.workload import StepRates, Workload
from shared.errors import ConfigError
from shared.topology import Link

FREE = StepRates(
    sampled_edge_s=0, gathered_byte_s=0, aggregated_byte_s=0, flop_s=0, module_s=0,
    updated_byte_s=0, packed_byte_s=0, exchange_s=0, step_s=0,
)  # fmt: skip


def _network(num_parts, num_merges=1, rates=FREE, alpha_s=0.0):
    return Network(
        link=Link(alpha_s=alpha_s, beta_s_per_byte=1e-6),
        num_parts=num_parts,
        merged_bytes=(1000,) * num_merges,
        head_bytes=0,
        hidden=4,
        rates=rates,
    )


def test_raf_sends_merges_touched_rows_and_shared_gradients():
    # Row type 0: part 0 owns, part 1 fetches 30; type 1: part 1 owns, part 0 fetches 5.
    touched = np.array([[[50.0, 5.0], [30.0, 20.0]]])
    step = _network(2, num_merges=3).predict_raf(
        np.array([[1.0, 2.0]]), np.array([[0.5, 0.25]]), touched, np.array([160.0])
    )
    # In two parts each sends once what it merges; a row of 4 floats is 16 bytes, an id 8.
    merged = 3 * 1000 + 160
    assert step.sent_bytes[0] == pytest.approx(
        [merged + 5 * (8 + 16) + 30 * 16, merged + 30 * (8 + 16) + 5 * 16]
    )
    # A byte more compares digests.
    network_s = (merged + 1 + 30 * (8 + 16 + 16)) * 1e-6
    assert step.step_s[0] == pytest.approx(2.0 + max(0.25, network_s))
    assert step.compute_s[0] == pytest.approx([1.5, 2.25])


def test_a_ring_of_more_parts_sends_2_p_minus_1_over_p():
    step = _network(4).predict_raf(
        np.zeros((1, 4)), np.zeros((1, 4)), np.zeros((1, 4, 0)), np.zeros(1)
    )
    assert step.sent_bytes[0] == pytest.approx([1500.0] * 4)
    # A byte more is the comparison's.
    assert step.step_s[0] == pytest.approx(1501.5e-6)


def test_messages_have_latency_and_collectives_an_overhead():
    rates = StepRates(**{**_zero(), "exchange_s": 0.1})
    network = _network(3, rates=rates, alpha_s=0.01)
    bare = network.predict_raf(
        np.zeros((1, 3)), np.zeros((1, 3)), np.zeros((1, 3, 1)), np.zeros(1)
    ).step_s[0]
    # The merge, and the comparison of digests.
    assert bare == pytest.approx(2 * 0.1 + 4 * (2 * 0.01 + 1001 / 3 * 1e-6))
    touched = np.array([[[9.0], [4.0], [2.0]]])
    fetching = network.predict_raf(np.zeros((1, 3)), np.zeros((1, 3)), touched, np.zeros(1)).step_s[
        0
    ]
    # Counts, ids, rows and gradients: four exchanges of two rounds; the owner serves six rows.
    assert fetching - bare == pytest.approx(4 * (0.1 + 2 * 0.01) + 6 * 40e-6)


def _zero():
    return {
        "sampled_edge_s": 0, "gathered_byte_s": 0, "aggregated_byte_s": 0, "flop_s": 0,
        "module_s": 0, "updated_byte_s": 0, "packed_byte_s": 0, "exchange_s": 0, "step_s": 0,
    }  # fmt: skip


def test_owners_update_the_rows_that_they_touch():
    rates = StepRates(**{**_zero(), "updated_byte_s": 1e-3})
    step = _network(1, rates=rates).predict_raf(
        np.zeros((1, 1)), np.zeros((1, 1)), np.full((1, 1, 1), 7.0), np.zeros(1)
    )
    assert step.step_s[0] == pytest.approx(7 * 48e-3)
    assert step.sent_bytes.sum() == 0


def test_rows_are_packed_where_they_are_read_and_where_they_lie():
    touched = np.array([[[50.0, 5.0], [30.0, 20.0]]])
    network = _network(2, rates=StepRates(**{**_zero(), "packed_byte_s": 1e-3}))
    step = network.predict_raf(np.zeros((1, 2)), np.zeros((1, 2)), touched, np.zeros(1))
    # Either part reads or serves all that travels: 30 rows of one type and 5 of the other.
    assert step.compute_s[0] == pytest.approx([35 * (8 + 2 * 16) * 1e-3] * 2)


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_never_above_the_step(seed):
    random = np.random.default_rng(seed)
    network = _network(3, rates=StepRates())
    main_s, behind_s = random.uniform(0, 1e-2, (2, 100, 3))
    touched = random.uniform(0, 500, (100, 3, 2))
    step = network.predict_raf(main_s, behind_s, touched, random.uniform(0, 1000, 100))
    bound_s = network.bound_raf(main_s, behind_s, touched)
    assert (bound_s <= step.step_s + 1e-12).all()
    assert (bound_s > 0.5 * step.step_s).all()


def test_copies_fetch_learnable_rows_from_their_owners():
    step = _network(3).predict_copies(1.0, 0.0, touched=10.0, union=25.0, param_bytes=600.0)
    # Two thirds of the rows are another's: an id, the row and its gradient, of 4 floats each.
    sent = 600 * 4 / 3 + 10 * 2 / 3 * (8 + 2 * 16)
    assert step.sent_bytes[0] == pytest.approx([sent] * 3)
    # The loss is one more message of a byte.
    assert step.step_s[0] == pytest.approx(1.0 + (sent + 4 / 3) * 1e-6)


def test_edge_cut_fetches_remote_rows_and_returns_gradients_of_learnable_ones():
    remote = np.array([[6.0, 2.0], [0.0, 2.0]])
    step = _network(2).predict_edge_cut(
        1.0, 0.0, remote, np.array([10, 4]), np.array([False, True]), 0.0, 0.0
    )
    asked = [6 * 8 + 2 * (8 + 16), 2 * (8 + 16)]
    served = 6 * 40 + 2 * 16 + 2 * 16
    # Each of two ranks serves half of all answers.
    assert step.sent_bytes[0] == pytest.approx([asked[0] + served / 2, asked[1] + served / 2])


def test_features_of_the_next_batch_travel_over_the_same_link():
    remote = np.array([[6000.0], [6000.0]])
    widths, is_learnable = np.array([10]), np.array([False])
    network = _network(2)
    still = network.predict_edge_cut(0.0, 0.0, remote, widths, is_learnable, 0.0, 0.0)
    busy = network.predict_edge_cut(0.1, 0.3, remote, widths, is_learnable, 0.0, 0.0)
    features_s = 6000 * (8 + 40) * 1e-6
    assert still.step_s[0] == pytest.approx(features_s + 1e-6)
    assert busy.step_s[0] == pytest.approx(max(0.1 + 0.3, features_s + 0.3))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_rates_are_checked(value):
    with pytest.raises(ConfigError, match=r"rates.flop_s: expected a finite number"):
        StepRates(flop_s=value)


@pytest.mark.parametrize("uses_dst", [False, True])
def test_work_of_two_roots_is_that_of_each_less_what_they_share(uses_dst):
    schema = draw_schema(3, num_roots=4)
    workload = Workload(profile_counts(schema, [5, 5], 64, uses_dst=uses_dst), StepRates(), 16)
    sets = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0.5, 0, 0, 0], [0, 0, 0, 0.0]])
    loads = workload.evaluate(sets)
    for each in (loads.main_s - loads.main_s[4], loads.behind_s, *loads.touched.T):
        assert each[2] <= each[0] + each[1] + 1e-9
        assert each[2] >= max(each[0], each[1]) - 1e-9
        assert each[0] / 2 - 1e-9 <= each[3] <= each[0] + 1e-9
    assert (loads.modules[2] == loads.modules[0] | loads.modules[1]).all()
    held = workload.count_memory(sets)
    assert max(held[0], held[1]) <= held[2] <= held[0] + held[1]
    assert held[3] <= held[0]


def test_features_are_gathered_behind_the_step_and_learnable_rows_in_it():
    edges = {("a", "x", "t"): 50, ("b", "y", "a"): 30, ("a", "z", "a"): 20}
    schema = Schema({"t": 10, "a": 7, "b": 5}, edges, {"a": 3, "t": 2}, "t")
    profile = profile_counts(schema, [2, 2], 4, uses_dst=False)
    rates = StepRates(**{**_zero(), "gathered_byte_s": 1.0})
    loads = Workload(profile, rates, 8).evaluate(np.ones((1, 1)))
    assert loads.main_s == pytest.approx(loads.touched[:, 0] * 32)
    learnable = Workload(
        profile_counts(Schema(schema.num_nodes, edges, {"t": 2}, "t"), [2, 2], 4, uses_dst=False),
        rates, 8,
    ).evaluate(np.ones((1, 1)))  # fmt: skip
    rows_of_a = learnable.main_s / 32 - loads.touched[:, 0]
    assert rows_of_a > 1
    assert loads.behind_s == pytest.approx(rows_of_a * 12)
    assert learnable.behind_s.item() == 0


def test_merged_logits_and_the_heads_gradient_replace_rows():
    edges = {("a", "x", "t"): 500, ("b", "y", "t"): 400}
    schema = Schema({"t": 100, "a": 70, "b": 50}, edges, {"a": 3, "b": 4, "t": 2}, "t")
    options = {"parts": 2, "strategy": "raf", "uses_dst": False, "hidden": 16, "batch_size": 64}
    options |= {"layers": 1, "fanouts": [3]}
    rows, logits = (plan(schema, head_dim=dim, **options).sent_bytes for dim in (None, 5))
    # Each of two parts sends as much as it merges.
    assert rows == 2 * 64 * 16 * 4
    assert logits == 2 * (64 * 5 * 4 + 16 * 5 * 4)


def test_memory_counts_each_held_edge_and_row():
    edges = {("a", "x", "t"): 50, ("b", "y", "a"): 30, ("t", "z", "t"): 20}
    schema = Schema({"t": 10, "a": 7, "b": 5}, edges, {"a": 3, "t": 2}, "t")
    workload = Workload(profile_counts(schema, [2, 2], 4, uses_dst=False), StepRates(), 8)
    x, y, z = 4 * 50 + 8 * 11, 4 * 30 + 8 * 8, 4 * 20 + 8 * 11
    held = workload.count_memory(np.array([[1.0, 0], [0.5, 0], [0.5, 1]]))
    # The part with z holds all relations into t, whole; sources of a's relations have no features.
    assert held.tolist() == [x + y, x / 2 + y, x + y + z + 7 * 12 + 10 * 8]
    owner = np.array([[1]])
    rows = 5 * (3 * 8 * 4 + 4)
    assert workload.add_owned(np.zeros((1, 2)), owner).tolist() == [[0, rows]]
