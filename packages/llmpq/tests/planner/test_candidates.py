"""The problems that a plan is sought among: their bytes, seconds and messages, item by item."""

import re
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoConfig

from llmpq.config import ModelSpec, Quality, Workload
from llmpq.planner.baselines import plan_baseline
from llmpq.planner.candidates import Candidates
from llmpq.planner.milp import solve_counts, solve_layers
from llmpq.planner.plan import Plan, Stage
from llmpq.planner.problem import InfeasiblePlan
from llmpq.planner.search import find_best, plan
from llmpq.runtime.loader import load

from ..runtime.tiny_models import make
from .problems import SheetCosts, best_by_brute_force, random_problem

BITS = (4, 8, 16)
WORKLOAD = Workload(num_prompts=4, prompt_tokens=8, new_tokens=5)
SPEC = ModelSpec.from_hf(
    AutoConfig.for_model(
        "llama", num_hidden_layers=4, hidden_size=128, intermediate_size=256, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=1,
    )
)  # fmt: skip
NOISE = np.array([[0.03, 1e-4, 0], [0.01, 2e-4, 0], [0.02, 1e-4, 0], [0.01, 1e-4, 0]])


def candidates(dtype="float32", workload=WORKLOAD, **sheet):
    return Candidates(
        model=SPEC, costs=SheetCosts(("fast", "slow"), **sheet), noise=NOISE, workload=workload,
        quality=Quality(max_kl=0.02), bits=BITS, group_size=16, dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_a_problem_has_the_seconds_bytes_and_messages_of_its_micro_batches(dtype, item_bytes):
    found = candidates(dtype, byte_s=1.0).problem((1, 0), (2, 4))
    costs = SheetCosts(("fast", "slow"), byte_s=1.0)
    for place, device in enumerate((1, 0)):
        for width, bits in enumerate(BITS):
            prefill_s = costs.prefill_s(device, bits, batch=2, tokens=8)
            # Half way through the answer, the cache has as many tokens as on average.
            decode_s = costs.decode_s(device, bits, batch=4, past=8 + 2)
            assert found.prefill_s[0, place, width] == prefill_s
            assert found.decode_s[3, place, width] == decode_s
    assert (found.num_prefill, found.num_decode) == (2, 1)
    # Keys and values of every token of every prompt, one head of 64.
    assert found.kv_bytes.tolist() == [2 * 4 * (8 + 5) * 64 * item_bytes] * 4
    temporary = max(SPEC.activation_bytes(2, 8), SPEC.activation_bytes(4, 1)) * item_bytes // 2
    assert (costs.memory_bytes(0) - found.memory_bytes == temporary).all()
    assert temporary > 0
    # Hidden states of all tokens go on; the last position alone goes back to the head.
    assert found.prefill_send_s.tolist() == [
        [0, 2 * 8 * 128 * item_bytes],
        [2 * 128 * item_bytes, 0],
    ]
    assert found.decode_send_s.tolist() == [[0, 4 * 128 * item_bytes], [4 * 128 * item_bytes, 0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_bytes_of_a_layer_are_those_that_are_loaded(family, dtype, tmp_path):
    folder = make(family, tmp_path / family)
    spec, bits = ModelSpec.from_hf(folder), (16, 8, 4, 3, 16)
    known = Candidates(
        model=spec, costs=SheetCosts(("fast",)), noise=np.zeros((5, 4)), workload=WORKLOAD,
        quality=Quality(), bits=(3, 4, 8, 16), group_size=16, dtype=dtype,
    )  # fmt: skip
    stages = (Stage(rank=0, layers=(0, 5)),)
    rounded = Plan(
        stages=stages, bits=bits, group_size=16, prefill_size=1, decode_size=1, dtype=dtype
    )
    model = load(folder, rounded)
    layers = model.model.layers if family == "llama" else model.model.decoder.layers
    for layer, width in zip(layers, bits, strict=True):
        held = sum(one.nbytes for one in [*layer.parameters(), *layer.buffers()])
        assert held == pytest.approx(known.weight_bytes(width), rel=0.02)
    held = sum(one.nbytes for one in model.parameters()) - sum(
        one.nbytes for one in layers.parameters()
    )
    assert held == pytest.approx(known.ends_bytes, rel=0.02)


def test_the_batch_that_would_fit_is_the_largest_one():
    sheet = {"memory": {"fast": 600_000, "slow": 500_000}}

    def attempt(num_prompts):
        workload = Workload(num_prompts=num_prompts, prompt_tokens=8, new_tokens=5)
        costs = SheetCosts(("fast", "slow"), **sheet)
        return plan(
            SPEC, costs, NOISE[:, :1], workload, Quality(), bits=(4,), group_size=16
        )  # fmt: skip

    with pytest.raises(InfeasiblePlan) as caught:
        attempt(64)
    (fits,) = re.findall(r"(\d+) prompts at a time would fit", str(caught.value))
    assert attempt(int(fits)).plan.num_layers == 4
    with pytest.raises(InfeasiblePlan):
        attempt(int(fits) + 1)


class TwoHosts(SheetCosts):
    """The first half of the devices in one host, the others in another, with a slow link between."""

    def send_s(self, sender, receiver, num_bytes):
        half = self.num_devices // 2
        is_far = (sender < half) != (receiver < half)
        return 0.0 if sender == receiver else num_bytes * (1e-4 if is_far else 1e-9)


def test_devices_of_a_host_are_side_by_side_where_hosts_are_far_apart():
    workload = Workload(num_prompts=2, prompt_tokens=8, new_tokens=20)
    known = Candidates(
        model=SPEC, costs=TwoHosts(("fast", "slow") * 2), noise=NOISE[:, 2:], workload=workload,
        quality=Quality(), bits=(16,), group_size=16, dtype="bfloat16",
    )  # fmt: skip
    # Room for a layer and the ends: all devices are needed.
    temporary = 2_500_000 - known.problem((0, 1, 2, 3), (1, 2)).memory_bytes[0]
    layer = known.weight_bytes(16) + known.kv_bytes(2)
    memory = dict.fromkeys(("fast", "slow"), int(temporary + known.ends_bytes + 1.2 * layer))
    known = replace(known, costs=TwoHosts(("fast", "slow") * 2, memory=memory))
    assert {(0, 1, 2, 3), (2, 3, 0, 1), (1, 0, 3, 2), (0, 2, 1, 3)} <= set(known.orders)
    found = find_best(known, solver="milp")
    assert min(np.diff(found.solution.bounds)) > 0, "memory is short: every device has layers"
    pairs = zip(found.order, np.roll(found.order, -1), strict=True)
    assert sum((one < 2) != (to < 2) for one, to in pairs) == 2, "there and back"
    near = SheetCosts(("fast", "slow") * 2, memory=memory, byte_s=1e-9)
    assert len(replace(known, costs=near).orders) == 2


def test_ends_that_fit_nowhere_are_told_with_the_largest_device():
    known = candidates(memory={"fast": 30_000, "slow": 20_000})
    text = known.explain_shortage(known.problem((0, 1), (1, 1)))
    assert "embedding and head take 0.066 MB on one device, but the largest, device 0" in text
    assert "prompts at a time" not in text


@pytest.mark.parametrize("seed", range(12))
def test_programs_bound_what_brute_force_finds(seed):
    problem = random_problem(seed, max_layers=4)
    best = best_by_brute_force(problem)
    exact = solve_layers(problem)
    if np.isinf(best):
        assert np.isinf(exact.lower_bound)
        return
    assert exact.lower_bound == pytest.approx(best, rel=1e-5)
    assert solve_layers(problem, relaxed=True).lower_bound <= best * (1 + 1e-6)
    if problem.has_equal_layers:
        assert solve_counts(problem).lower_bound <= best * (1 + 1e-6)
        assert solve_counts(problem, relaxed=True).lower_bound <= best * (1 + 1e-6)


def test_the_bound_of_a_plan_holds_for_all_micro_batches():
    known = candidates()
    bounds = [
        solve_counts(known.problem(known.orders[0], sizes), relaxed=True).lower_bound
        for sizes in known.sizes()
    ]
    found = find_best(known, solver="heuristic").solution
    assert found.lower_bound == pytest.approx(min(bounds))
    assert found.lower_bound < max(bounds)


def test_an_even_split_takes_its_best_width_order_and_micro_batches():
    known = candidates()
    best = np.inf
    for order in ((0, 1), (1, 0)):
        for sizes in known.sizes():
            problem = known.problem(order, sizes)
            for width in range(3):
                placed = (0, 2, 4), (width,) * 4
                if problem.is_feasible(*placed):
                    best = min(best, problem.objective(*placed))
    found = plan_baseline(
        "even", SPEC, known.costs, NOISE, WORKLOAD, known.quality, bits=BITS, group_size=16
    )
    assert found.objective == pytest.approx(best)
