"""Any number of parts and replicas against one process: losses, logits, gradients and updates."""

from functools import partial
from typing import Any

import pytest
import torch
from graphs import CITED_BY, CITES, HAS, PAID, WRITES, scholars
from running import HIDDEN, MODELS, assert_same_training, train, train_cases

from heta.graph.hetero_graph import HeteroGraph
from heta.graph.part import load
from heta.nn.hetero_model import LocalExchange
from heta.rows.cache import Cache
from heta.rows.optimizers import RowAdagrad, RowAdam
from heta.training.trainer import Trainer
from shared.errors import ConfigError

pytestmark = pytest.mark.unchecked

TWO = [[WRITES, (CITES, 0, 2)], [CITED_BY, HAS, (CITES, 1, 2)]]
THREE = [[WRITES, (HAS, 1, 3)], [CITES, (HAS, 0, 3)], [CITED_BY, (HAS, 2, 3)]]
FOUR = [[WRITES], [CITES], [CITED_BY, (HAS, 1, 2)], [(HAS, 0, 2)]]
# Repeated seeds, one alone, a short last batch, and the papers without any edge.
BATCHES = [[5, 9, 5, 21], [30], [57, 58, 59, *range(4, 40, 3)]]
adam = partial(torch.optim.Adam, lr=0.01)
CASES = {
    "rgcn": ("rgcn", True, {"rows": RowAdam(lr=0.1), "trainer": {"optimizer": adam}}),
    "rgcn-without": ("rgcn", False, {"rows": RowAdagrad(lr=0.1)}),
    "rgat": ("rgat", True, {}),
    "rgat-without": ("rgat", False, {"trainer": {"check_every": 0}}),
    "hgt": ("hgt", True, {}),
    "bghgnn": ("bghgnn", True, {}),
    "sage": ("sage-sum", True, {"trainer": {"optimizer": adam}}),
    "sage-without": ("sage-sum", False, {}),
    "half": ("half-sum", True, {}),
    "gat": ("gat-mean", True, {}),
    "max": ("graph-max", True, {}),
    "half-max": ("half-max", True, {}),
    "stack": ("transformer-stack", True, {}),
    "concatenated": ("sage-concatenated", True, {}),
    "doubled": ("sage-doubled", True, {}),
}


def hide(graph, relation):
    """The graph without one relation's edges, but with the relation."""
    edges = {**graph.edges, relation: (torch.empty(0), torch.empty(0))}
    label = graph.label.clone()
    label[::7] = -1
    return HeteroGraph(graph.num_nodes, edges, graph.feat, target="paper", label=label)


def compare(
    open_pool, parts_of, graph, assignment, names, ranks=None, layers=2, fanouts=None, head_dim=None
):
    """Trains the cases on ranks and in one process, and compares."""
    one_parts, several_parts, options = {}, {}, []
    for name in names:
        model, uses_dst, own = CASES[name]
        if uses_dst not in one_parts:
            shape = {"uses_dst": uses_dst, "layers": layers}
            one_parts[uses_dst] = parts_of(graph, [graph.schema.roots], **shape)
            several_parts[uses_dst] = parts_of(graph, assignment, head_dim=head_dim, **shape)
        options.append({"model": model, "batches": BATCHES, "fanouts": fanouts, **own})
    sides = [CASES[name][1] for name in names]
    cases = [(several_parts[side], own) for side, own in zip(sides, options, strict=True)]
    results = open_pool(ranks or len(assignment)).run(train_cases, cases).results
    for i, (side, own) in enumerate(zip(sides, options, strict=True)):
        wanted = [train(one_parts[side], **own)]
        assert_same_training([result[i] for result in results], wanted, 2e-5)


def test_two_parts_with_a_cut_relation_equal_one_process(open_pool, parts_of):
    compare(open_pool, parts_of, scholars(), TWO, list(CASES))


def test_parts_draw_the_edges_of_one_process(open_pool, parts_of):
    names = ["rgcn", "rgcn-without", "hgt", "max"]
    compare(open_pool, parts_of, scholars(), TWO, names, fanouts=[3, 2])


def test_three_parts_with_labels_missing_and_a_relation_without_edges(open_pool, parts_of):
    names = ["rgcn", "rgat-without", "hgt", "sage", "max"]
    compare(open_pool, parts_of, hide(scholars(), CITES), THREE, names)


def test_one_layer(open_pool, parts_of):
    names = ["rgcn", "sage-without", "stack", "bghgnn", "half"]
    compare(open_pool, parts_of, scholars(), TWO, names, layers=1)


# Heads are linear, and relations are summed or averaged.
LINEAR = ["rgcn", "rgcn-without", "rgat-without", "sage", "half", "gat"]


@pytest.mark.parametrize(("assignment", "ranks"), [(TWO, None), (THREE, None), (TWO, 4)])
def test_merged_logits_equal_merged_rows(open_pool, parts_of, assignment, ranks):
    names = LINEAR if ranks is None else ["rgcn", "gat"]
    compare(open_pool, parts_of, scholars(), assignment, names, ranks=ranks, head_dim=3)


def test_merged_logits_of_one_layer_and_of_a_part_without_roots(open_pool, parts_of):
    rest = [WRITES, CITES, CITED_BY, HAS]
    compare(open_pool, parts_of, scholars(), TWO, LINEAR, layers=1, head_dim=3)
    compare(open_pool, parts_of, scholars(), [rest, []], LINEAR, head_dim=3)


def sent_in_step(folder):
    """Bytes by phase that this rank sends in a step of R-GCN."""
    part = load(folder)
    trainer = Trainer(part, MODELS["rgcn"](part), check_every=0)
    before = trainer.group.ledger.snapshot()
    trainer.step(range(40))
    sent = trainer.group.ledger.snapshot().diff(before)
    return {phase: traffic.sent_bytes for phase, traffic in sent.by_phase().items()}


def test_logits_are_what_travels_where_they_are_narrower_than_rows(open_pool, parts_of):
    shape = {"uses_dst": False}
    pool = open_pool(2)
    rows, logits = (
        pool.run(sent_in_step, parts_of(scholars(), TWO, head_dim=n, **shape)).results[0]
        for n in (None, 3)
    )
    # Of two ranks, each sends a state once in an all-reduce.
    assert rows["merge"] == 40 * HIDDEN * 4
    assert logits["merge"] == 40 * 3 * 4
    # A head before the merge has another gradient on each part.
    assert logits.get("gradients", 0) > rows.get("gradients", 0)


@pytest.mark.parametrize(
    ("model", "head_dim"), [("hgt", 3), ("graph-max", 3), ("transformer-stack", 3), ("rgcn", 2)]
)
def test_heads_that_may_not_stand_before_the_merge_are_refused(parts_of, model, head_dim):
    part = load(parts_of(scholars(), TWO, head_dim=head_dim), 0)
    with pytest.raises(ConfigError, match=r"head: the plan's head_dim=.*plan with head_dim=None"):
        MODELS[model](part)


def test_a_head_that_was_replaced_after_the_plan_is_refused(parts_of):
    part = load(parts_of(scholars(), TWO, uses_dst=False, head_dim=3), 0)
    model = MODELS["rgcn"](part)
    model.head.register_forward_hook(lambda module, args, output: 2 * output)
    batch = part.sample(torch.arange(40))
    inputs = {n: torch.randn(len(ids), part.input_dim(n)) for n, ids in batch.inputs.items()}
    with pytest.raises(ConfigError, match="without hooks"):
        model(batch, inputs, exchange=LocalExchange())


def test_a_part_of_several_gives_no_logits_without_an_exchange(parts_of):
    part = load(parts_of(scholars(), TWO, uses_dst=False), 0)
    batch = part.sample(torch.arange(40))
    inputs = {n: torch.randn(len(ids), part.input_dim(n)) for n, ids in batch.inputs.items()}
    with pytest.raises(ConfigError, match="expected an exchange that merges the 2 parts"):
        MODELS["rgcn"](part)(batch, inputs)


@pytest.mark.slow
def test_three_layers(open_pool, parts_of):
    names = ["rgcn", "rgcn-without", "hgt", "stack", "gat"]
    compare(open_pool, parts_of, scholars(), TWO, names, layers=3)


@pytest.mark.slow
def test_four_parts_and_parts_with_replicas(open_pool, parts_of):
    compare(open_pool, parts_of, scholars(), FOUR, list(CASES))
    compare(open_pool, parts_of, scholars(), TWO, list(CASES), ranks=4)


def test_parts_with_replicas(open_pool, parts_of):
    # A batch of one leaves the second replica nothing.
    compare(open_pool, parts_of, scholars(), TWO, ["rgcn", "hgt"], ranks=4)


def test_a_part_whose_roots_end_below_the_last_layer_and_one_without_roots(open_pool, parts_of):
    # Nothing comes from places in the second layer, if no relation goes into them.
    graph = scholars()
    named = ("place", "named", "paper")
    edges = {r: ends for r, ends in graph.edges.items() if r[2] != "place"}
    edges[named] = (torch.tensor([0, 3, 1]), torch.tensor([5, 9, 5]))
    assert PAID in edges
    graph = HeteroGraph(graph.num_nodes, edges, graph.feat, target="paper", label=graph.label)
    rest = [WRITES, CITES, CITED_BY, HAS]
    names = ["rgcn", "rgcn-without", "hgt", "sage", "max", "stack", "bghgnn"]
    compare(open_pool, parts_of, graph, [rest, [named]], names)
    compare(open_pool, parts_of, scholars(), [rest, []], names)


def compare_replicas(open_pool, folders, names, trainer):
    """Trains the cases on two ranks that share a batch out, and compares with one process."""
    options: list[dict[str, Any]] = [
        {"model": CASES[n][0], "batches": BATCHES, **CASES[n][2]} for n in names
    ]
    cases = [
        (folders[CASES[n][1]][1], {**own, "trainer": {**own.get("trainer", {}), **trainer}})
        for n, own in zip(names, options, strict=True)
    ]
    results = open_pool(2).run(train_cases, cases).results
    for i, (name, own) in enumerate(zip(names, options, strict=True)):
        wanted = [train(folders[CASES[name][1]][0], **own)]
        assert_same_training([result[i] for result in results], wanted, 2e-5)


def test_replicas_of_one_part_equal_one_process(open_pool, parts_of):
    graph = scholars()
    whole = [graph.schema.roots]
    folders = {
        u: (
            parts_of(graph, whole, uses_dst=u),
            parts_of(graph, whole, uses_dst=u, strategy="replicate", hosts=2),
        )
        for u in (True, False)
    }
    compare_replicas(open_pool, folders, ["rgcn", "sage-without", "hgt"], {})


@pytest.mark.parametrize("cached", [None, Cache(200), Cache("1GiB")])
def test_edge_cut_equals_one_process(open_pool, parts_of, cached):
    graph = scholars()
    whole = [graph.schema.roots]
    owners = {name: torch.arange(n) * 7 % 3 % 2 for name, n in graph.num_nodes.items()}
    folders = {
        True: (parts_of(graph, whole), parts_of(graph, whole, owners, strategy="edge-cut", hosts=2))
    }
    compare_replicas(open_pool, folders, ["rgcn", "hgt"], {"cache": cached})


def test_seeds_without_edges_have_rows_of_zeros(open_pool, parts_of):
    folder = parts_of(scholars(), TWO, uses_dst=False)
    for (result,) in open_pool(2).run(train_cases, [(folder, {"model": "rgcn"})]).results:
        bias = result["initial"]["head.bias"]
        assert torch.equal(result["logits"][57:], bias.expand(3, -1))


def test_narrow_wires_give_the_same_bits_on_every_rank_and_nearly_those_of_float32(
    open_pool, parts_of
):
    folder = parts_of(scholars(), TWO)
    wires = ["float32", "bfloat16", "int8"]
    cases = [(folder, {"model": m, "trainer": {"wire": w}}) for m in ("max", "hgt") for w in wires]
    cases = [(f, {**o, "model": "graph-max" if o["model"] == "max" else "hgt"}) for f, o in cases]
    first, second = open_pool(2).run(train_cases, cases).results
    for i in range(0, len(cases), 3):
        exact = first[i]["logits"]
        for one, other in zip(first[i : i + 3], second[i : i + 3], strict=True):
            assert torch.equal(one["logits"], other["logits"])
            assert (one["logits"] - exact).abs().max() < 0.1 * exact.abs().max()
