import pytest

from qsync.simulator import SimulatedPlan, build_bert, format_simulation, simulate
from shared.errors import ConfigError
from shared.topology import Link
from shared.topology.device import T4, V100_32

FAST = Link.from_rate(1e15)


def test_bert_base_has_its_published_size():
    graph = build_bert(1)
    weights = sum(op.weight_numel for op in graph.ops)
    assert weights == 12 * 12 * 768**2  # 85 million in the encoder's products
    assert len(graph.linears) == 72


def test_a_step_without_links_is_the_slow_devices_operations_over_its_rate():
    float32 = simulate((V100_32, T4), link=FAST)[0]
    num_tokens = 12 * 384
    flops = 3 * 2 * num_tokens * 85e6
    products_s = flops / (0.5 * T4.flops_fp32_per_s)
    # What is not a product moves its output four times over forward and backward in all.
    others = sum(op.numel for op in build_bert(num_tokens).ops if op.kind == "fixed")
    expected_s = products_s + 3 * 8 * others / T4.memory_bytes_per_s
    assert float32.step_s == pytest.approx(expected_s, rel=0.01)


def test_a_plan_is_as_fast_as_lowering_all_and_lowers_fewer():
    float32, half, low, planned = simulate((V100_32,) * 2 + (T4,) * 2)
    assert planned.step_s <= 1.03 * min(half.step_s, low.step_s) < 0.7 * float32.step_s
    assert 0 < planned.num_lowered < half.num_lowered == 72
    assert planned.noise < half.noise < low.noise
    assert planned.idle_share < 0.1 < float32.idle_share


def test_equal_devices_keep_float32():
    assert simulate((V100_32,) * 2)[-1].num_lowered == 0


def test_a_table_says_that_it_is_simulated():
    rows = [
        SimulatedPlan("T4 in fp32", 0.5, 0.25, 0, 0.0),
        SimulatedPlan("planned", 0.3, 0.0, 9, 1e-4),
    ]
    lines = format_simulation(rows).splitlines()
    assert lines[0] == "Simulated from data sheets; nothing here was measured."
    assert lines[-2:] == [
        "| T4 in fp32 | 500 ms | 25% | 0 | 0 |",
        "| planned | 300 ms | 0% | 9 | 0.0001 |",
    ]


def test_no_device_is_refused():
    with pytest.raises(ConfigError, match="devices: expected one for each rank"):
        simulate(())
