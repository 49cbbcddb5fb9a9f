"""Any number of parts and replicas against one process: losses, logits, gradients and updates."""

from functools import partial

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
REST = [[WRITES, CITES, CITED_BY, HAS], []]  # the second part computes nothing
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


@pytest.fixture(scope="module")
def train_alone(parts_of):
    """train_alone(graph, name, layers, fanouts) -> a case trained in one process, once a graph."""
    trained = {}

    def run(graph, name, layers=2, fanouts=None):
        key = graph.fingerprint(), name, layers, tuple(fanouts or ())
        if key not in trained:
            model, uses_dst, own = CASES[name]
            folder = parts_of(graph, [graph.schema.roots], uses_dst=uses_dst, layers=layers)
            trained[key] = train(folder, model, BATCHES, fanouts, **own)
        return trained[key]

    return run


@pytest.fixture
def compare(open_pool, parts_of, train_alone):
    """compare(graph, assignment, names, ...) trains the cases on ranks, and as in one process."""

    def run(
        graph, assignment, names, ranks=None, layers=2, fanouts=None, owners=None, trainer=None,
        **shape,
    ):  # fmt: skip
        folders = {
            side: parts_of(graph, assignment, owners, uses_dst=side, layers=layers, **shape)
            for side in {CASES[name][1] for name in names}
        }
        cases = []
        for name in names:
            model, uses_dst, own = CASES[name]
            options = {"model": model, "batches": BATCHES, "fanouts": fanouts, **own}
            options["trainer"] = own.get("trainer", {}) | (trainer or {})
            cases.append((folders[uses_dst], options))
        results = open_pool(ranks or len(assignment)).run(train_cases, cases).results
        for name, result in zip(names, zip(*results, strict=True), strict=True):
            assert_same_training(result, [train_alone(graph, name, layers, fanouts)], 2e-5)

    return run


def test_two_parts_with_a_cut_relation_equal_one_process(compare):
    compare(scholars(), TWO, list(CASES))


def test_parts_draw_the_edges_of_one_process(compare):
    names = ["rgcn", "rgcn-without", "hgt", "max"]
    compare(scholars(), TWO, names, fanouts=[3, 2])


def test_three_parts_with_labels_missing_and_a_relation_without_edges(compare):
    names = ["rgcn", "rgat-without", "hgt", "sage", "max"]
    compare(hide(scholars(), CITES), THREE, names)


def test_one_layer(compare):
    names = ["rgcn", "sage-without", "stack", "bghgnn", "half"]
    compare(scholars(), TWO, names, layers=1)


# Heads are linear, and relations are summed or averaged.
LINEAR = ["rgcn", "rgcn-without", "rgat-without", "sage", "half", "gat"]


@pytest.mark.parametrize(
    ("assignment", "ranks", "names"),
    [
        (TWO, None, LINEAR),
        (THREE, None, ["rgcn-without", "half", "gat"]),
        (TWO, 4, ["rgcn", "gat"]),
        (REST, None, ["rgcn", "rgat-without", "gat"]),
        pytest.param(THREE, None, LINEAR, marks=pytest.mark.slow),
        pytest.param(REST, None, LINEAR, marks=pytest.mark.slow),
    ],
)
def test_merged_logits_equal_merged_rows(compare, assignment, ranks, names):
    compare(scholars(), assignment, names, ranks=ranks, head_dim=3)


@pytest.mark.parametrize(
    "names", [["rgcn-without", "half", "gat"], pytest.param(LINEAR, marks=pytest.mark.slow)]
)
def test_merged_logits_of_one_layer(compare, names):
    compare(scholars(), TWO, names, layers=1, head_dim=3)


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
def test_three_layers(compare):
    names = ["rgcn", "rgcn-without", "hgt", "stack", "gat"]
    compare(scholars(), TWO, names, layers=3)


@pytest.mark.slow
def test_four_parts_and_parts_with_replicas(compare):
    compare(scholars(), FOUR, list(CASES))
    compare(scholars(), TWO, list(CASES), ranks=4)


def test_parts_with_replicas(compare):
    # A batch of one leaves the second replica nothing.
    compare(scholars(), TWO, ["rgcn", "hgt"], ranks=4)


# Each merge, with and without rows of destinations.
MERGED = ["rgcn", "rgcn-without", "hgt", "max", "stack"]
MORE = [*MERGED, "sage", "bghgnn"]


@pytest.mark.parametrize(
    "names", [MERGED, pytest.param(MORE, marks=pytest.mark.slow)], ids=["merges", "more"]
)
def test_a_part_whose_roots_end_below_the_last_layer(compare, names):
    # Nothing comes from places in the second layer, if no relation goes into them.
    graph = scholars()
    named = ("place", "named", "paper")
    edges = {r: ends for r, ends in graph.edges.items() if r[2] != "place"}
    edges[named] = (torch.tensor([0, 3, 1]), torch.tensor([5, 9, 5]))
    assert PAID in edges
    graph = HeteroGraph(graph.num_nodes, edges, graph.feat, target="paper", label=graph.label)
    compare(graph, [REST[0], [named]], names)


@pytest.mark.parametrize(
    "names", [MERGED, pytest.param(MORE, marks=pytest.mark.slow)], ids=["merges", "more"]
)
def test_a_part_without_roots(compare, names):
    compare(scholars(), REST, names)


def test_replicas_of_one_part_equal_one_process(compare):
    graph = scholars()
    names = ["rgcn", "sage-without", "hgt"]
    compare(graph, [graph.schema.roots], names, ranks=2, strategy="replicate", hosts=2)


@pytest.mark.parametrize("cached", [None, Cache(200), Cache("1GiB")])
def test_edge_cut_equals_one_process(compare, cached):
    graph = scholars()
    owners = {name: torch.arange(n) * 7 % 3 % 2 for name, n in graph.num_nodes.items()}
    compare(
        graph, [graph.schema.roots], ["rgcn", "hgt"], ranks=2, owners=owners,
        trainer={"cache": cached}, strategy="edge-cut", hosts=2,
    )  # fmt: skip


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
