"""A traced model in parts of its batch gives the whole batch's results and gradients."""

from collections import Counter
from functools import cache

import pytest
import torch
from lancet_models import FAMILIES, make_batch, make_model
from torch import nn

import lancet
from lancet.graph.batch_axes import find_batch_axes, fix_sizes, list_exchanges, mark_sizes
from lancet.graph.parts import cut, select
from lancet.moe.dispatch import mark_end, mark_start
from lancet.planner.partition import PartCosts, choose_ranges
from lancet.profiler import time_parts
from shared.comms import Group
from shared.errors import ConfigError


class Sorted(nn.Module):
    """Layers that sort rows and put them back, as an exchange of tokens does.

    Args:
        centers: whether each layer first subtracts the mean over the batch.
    """

    def __init__(self, centers=False, num_layers=2):
        super().__init__()
        self.centers = centers
        self.gates = nn.ModuleList(nn.Linear(6, 4) for _ in range(num_layers))
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(num_layers))

    def forward(self, x):
        batch, length, width = x.shape
        # Positions of the whole batch, which a part must not count anew.
        row = torch.arange(batch)[:, None, None]
        hidden = x * (1 + row)
        for gate, expert in zip(self.gates, self.experts, strict=True):
            if self.centers:
                hidden = hidden - hidden.mean(0)
            flat = hidden.view(-1, width)
            weights, ids = torch.softmax(gate(flat), -1).topk(2)
            weights /= weights.sum(-1, keepdim=True)
            rows, ids, weights = mark_start(flat, ids, weights)
            order = torch.argsort(ids[:, 0], stable=True)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(batch * length)
            rows = torch.tanh(expert(rows[order]))[inverse] * weights[:, :1]
            hidden = hidden + mark_end(rows).view(batch, length, width)
        return hidden.pow(2).mean(), hidden


def trace(model, *arguments, **named):
    """The graph of a model as torch.compile traces it, with its inputs."""
    traced = []

    def backend(module, inputs):
        traced.append((module, inputs, find_batch_axes(module, inputs)))
        fix_sizes(module)
        return module.forward

    with mark_sizes([*arguments, *named.values()]):
        torch.compile(model, backend=backend, fullgraph=True)(*arguments, **named)
    ((module, inputs, axes),) = traced
    return module, [int(v) if isinstance(v, torch.SymInt) else v for v in inputs], axes


def run(module, inputs):
    """Outputs of a graph, and the gradients of their sums, on this rank."""
    # Copies, as hooks of divided models average the gradients of the parameters themselves.
    inputs = [
        value.detach().clone().requires_grad_() if isinstance(value, nn.Parameter) else value
        for value in inputs
    ]
    leaves = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    outputs = module.forward(*inputs)
    total = sum(output.double().sum() for output in outputs)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return [getattr(value, "_local_tensor", value) for value in (*outputs, *gradients)]


def largest_error(results, others):
    """The largest difference, relative to the largest element of its tensor."""
    return max(
        float((one - other).detach().abs().max() / one.detach().abs().max())
        for one, other in zip(results, others, strict=True)
        if one is not None and one.numel()
    )


def span_of(module):
    """Numbers of the first node after the inputs, and of the output."""
    nodes = list(module.graph.nodes)
    return next(i for i, node in enumerate(nodes) if node.op != "placeholder"), len(nodes) - 1


@pytest.fixture(scope="module")
def toy():
    @cache
    def trace_toy(centers=False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        draw = torch.randn(5, 3, 6, dtype=torch.float64)
        return trace(Sorted(centers).double(), draw)

    return trace_toy


@pytest.mark.parametrize("num_parts", [2, 3, 5])
def test_parts_give_the_whole_batchs_results(toy, num_parts):
    module, inputs, axes = toy()
    first, stop = span_of(module)
    assert axes.size == 5
    parts = cut(module, axes, [(first, stop, num_parts)])
    assert largest_error(run(module, inputs), run(parts, inputs)) < 1e-12
    targets = Counter(node.target for node in parts.graph.nodes)
    assert targets[mark_start] == targets[mark_end] == 2 * num_parts


def test_ranges_are_cut_one_by_one(toy):
    module, inputs, axes = toy()
    nodes = list(module.graph.nodes)
    exchanges = list_exchanges(module.graph)
    ranges = [
        (nodes.index(exchange[0]), nodes.index(exchange[-1]) + 1, num_parts)
        for exchange, num_parts in zip(exchanges, (2, 4), strict=True)
    ]
    parts = cut(module, axes, ranges)
    assert largest_error(run(module, inputs), run(parts, inputs)) < 1e-12
    assert Counter(node.target for node in parts.graph.nodes)[mark_end] == 6


def test_what_has_no_rule_runs_whole_and_is_named(toy):
    module, _, axes = toy()
    nodes = list(module.graph.nodes)
    assert "aten.arange.default" in axes.whole.values()
    assert "aten.mean.default" in axes.whole.values()
    first, stop = span_of(module)
    selection = select(nodes[first:stop], axes, list_exchanges(module.graph))
    whole = {axes.whole.get(node) for node in (*selection.before, *selection.after)}
    assert {"aten.arange.default", "aten.mean.default"} <= whole
    assert not {axes.whole.get(node) for node in selection.parts} & {"aten.mean.default"}


def test_a_mean_over_the_batch_between_exchanges_is_refused(toy):
    module, inputs, axes = toy(centers=True)
    first, stop = span_of(module)
    with pytest.raises(
        ConfigError, match=r"can run on parts of the batch, got aten\.mean\.dim at "
    ):
        cut(module, axes, [(first, stop, 2)])
    nodes = list(module.graph.nodes)
    exchange = list_exchanges(module.graph)[1]
    one = (nodes.index(exchange[0]), nodes.index(exchange[-1]) + 1, 2)
    assert largest_error(run(module, inputs), run(cut(module, axes, [one]), inputs)) < 1e-12


def test_a_batch_of_one_and_a_model_that_writes_to_its_input():
    torch._dynamo.reset()
    assert trace(Sorted(), torch.randn(1, 3, 6))[2] is None

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return (x * self.count,)

    with pytest.raises(
        Exception, match=r"writes to none of its inputs and buffers, got aten\.add_"
    ):
        trace(Counting(), torch.randn(4, 3))


def costs_of(module, exchange_s, compute_s):
    """Each exchange's seconds at its start mark, each layer's product at its own."""
    nodes = list(module.graph.nodes)
    kinds = ["all_to_all" if node.target is mark_start else "compute" for node in nodes]
    is_product = [node.target is torch._C._nn.linear for node in nodes]
    whole = [
        exchange_s if kind == "all_to_all" else compute_s * product
        for kind, product in zip(kinds, is_product, strict=True)
    ]
    time_s = {n: [seconds / n for seconds in whole] for n in (1, 2, 4)}
    return PartCosts(kinds, time_s, [0.0] * len(nodes), [8] * len(nodes))


def test_ranges_are_chosen_where_parts_hide_exchanges(toy):
    module, inputs, axes = toy()
    chosen = choose_ranges(module.graph, axes, costs_of(module, exchange_s=4.0, compute_s=4.0))
    assert chosen.whole_s == 24.0
    # Two exchanges of 4 s, each between products of 4 s: with two parts, all of it hides.
    assert chosen.cut_s == pytest.approx(16.0)
    assert largest_error(run(module, inputs), run(cut(module, axes, chosen.ranges), inputs)) < 1e-12
    nothing = choose_ranges(module.graph, axes, costs_of(module, exchange_s=0.0, compute_s=4.0))
    assert (nothing.ranges, nothing.cut_s) == ((), 16.0)
    assert nothing.reason.startswith("parts save too little of the forward pass in replay, 16.0 s")
    forced = choose_ranges(
        module.graph, axes, costs_of(module, exchange_s=0.0, compute_s=4.0), may_stay_whole=False
    )
    assert forced.ranges


def test_ranges_stop_at_a_mean_over_the_batch(toy):
    module, inputs, axes = toy(centers=True)
    chosen = choose_ranges(module.graph, axes, costs_of(module, exchange_s=4.0, compute_s=4.0))
    assert len(chosen.ranges) == 2
    assert largest_error(run(module, inputs), run(cut(module, axes, chosen.ranges), inputs)) < 1e-12


def _cut_family(family):
    torch._dynamo.reset()
    group = Group.world()
    model = lancet.parallelize(make_model(family).double(), group)
    batch = make_batch(0, 8).chunk(group.world_size)[group.rank]
    module, inputs, axes = trace(model, input_ids=batch, labels=batch)
    state = torch.get_rng_state()
    costs = time_parts(module, axes, inputs, group, [1, 2])
    assert torch.equal(state, torch.get_rng_state())
    # Not the measured seconds, by which each rank would choose its own ranges.
    chosen = choose_ranges(module.graph, axes, costs_of(module, 4.0, 1.0), may_stay_whole=False)
    parts = cut(module, axes, chosen.ranges)
    targets = Counter(node.target for node in parts.graph.nodes)
    return largest_error(run(module, inputs), run(parts, inputs)), targets[mark_end], costs


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_run_in_parts(pool, family):
    for error, num_exchanges, costs in pool.run(_cut_family, family).results:
        # DeepSeek's router computes in float32.
        assert error < (1e-6 if family == "deepseek" else 1e-12)
        assert num_exchanges > 2
        assert costs.kinds.count("all_to_all") == 6
        assert all(seconds > 0 for seconds in costs.time_s[2] if seconds)
