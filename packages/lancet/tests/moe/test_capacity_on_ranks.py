"""Gates with capacity over ranks: the slots of each rank's own batch, as in a process of its own."""

from datetime import timedelta

import pytest
import torch
from lancet_models import MODULES, largest_difference, whole_gradients, whole_state
from torch import Tensor, nn

import lancet
from lancet.moe.gates import GATES
from lancet.moe.layer import Layer
from shared.comms import Group, RankPool

DIM, HIDDEN_DIM, NUM_EXPERTS, VOCABULARY = 16, 24, 8, 50
NUM_STEPS, NUM_TOKENS = 3, 21
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-12}


class GatedModel(nn.Module):
    """A residual block for each gate, between an embedding and a head."""

    def __init__(self, gates):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.dense = nn.ModuleList(nn.Linear(DIM, DIM) for _ in gates)
        self.layers = nn.ModuleList(
            Layer(
                DIM,
                HIDDEN_DIM,
                NUM_EXPERTS,
                gate=gate,
                k=GATES.get(gate).max_k or 2,
                capacity_factor=0.75,
            )
            for gate in gates
        )
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and what each layer adds to each token [gates, rows, tokens, dim]."""
        hidden = self.embedding(input_ids)
        balance, outputs = hidden.new_zeros(()), []
        for dense, layer in zip(self.dense, self.layers, strict=True):
            added, loss = layer(nn.functional.layer_norm(hidden, (DIM,)), input_ids)
            mixed = nn.functional.dropout(dense(hidden).tanh(), 0.1, self.training)
            hidden = hidden + mixed + added
            balance = balance + loss
            outputs.append(added.detach())
        logits = self.head(hidden).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels.flatten())
        return loss + 0.01 * balance, torch.stack(outputs)


def new_model(gates, dtype):
    torch.manual_seed(0)
    return GatedModel(gates).to(dtype)


def step(model, number, rank):
    """Loss and layers' outputs of a rank's own batch; seeds what dropout and the random gate draw."""
    draw = torch.Generator().manual_seed(10 * number + rank)
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, NUM_TOKENS), generator=draw)
    torch.manual_seed(1000 + 10 * number + rank)
    loss, outputs = model(ids, labels)
    return loss, outputs.clone()


def train_on_ranks(num_ranks, gates, dtype, is_compiled):
    """By step, this rank's loss and outputs; gradients of the first step, and weights at the end."""
    group = Group.of(range(num_ranks))
    if group.rank < 0:
        return None
    model = run = lancet.parallelize(new_model(gates, dtype), group)
    backend = lancet.Backend(group, partition=None)
    if is_compiled:
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, outputs, gradients = [], [], {}
    for number in range(NUM_STEPS):
        loss, output = step(run, number, group.rank)
        loss.backward()
        gradients = gradients or whole_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        outputs.append(output)
    return losses, outputs, gradients, whole_state(model), backend.report()


def train_alone(num_ranks, gates, dtype):
    """The same in this process: each rank's batch through the whole model, one after another."""
    model = new_model(gates, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, outputs, gradients = [], [], {}
    for number in range(NUM_STEPS):
        results = [step(model, number, rank) for rank in range(num_ranks)]
        torch.stack([loss for loss, _ in results]).mean().backward()
        gradients = gradients or whole_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss, _ in results])
        outputs.append([output for _, output in results])
    return losses, outputs, gradients, whole_state(model)


def check(results, num_ranks, gates, dtype, *, is_compiled):
    tolerance = TOLERANCES[dtype]
    losses, outputs, gradients, weights = train_alone(num_ranks, gates, dtype)
    num_dropped = torch.stack([(output == 0).all(-1).sum((1, 2)) for output in outputs[0]]).sum(0)
    assert (num_dropped > 0).all(), f"a gate of {gates} drops no token: {num_dropped}"
    for rank, (own_losses, own_outputs, own_gradients, own_weights, report) in enumerate(results):
        for number in range(NUM_STEPS):
            assert own_losses[number] == pytest.approx(losses[number][rank], abs=tolerance)
            expected = outputs[number][rank]
            # A token that is dropped by all of its experts gets exact zeros.
            assert torch.equal(own_outputs[number] == 0, expected == 0)
            torch.testing.assert_close(own_outputs[number], expected, rtol=0, atol=tolerance)
        assert largest_difference(own_gradients, gradients) < tolerance
        assert largest_difference(own_weights, weights) < tolerance
        assert report.sentences == ()
        if is_compiled:
            check_graphs(report)


def check_graphs(report):
    forward, backward = report.graphs
    # The numbers of kept and received rows change from step to step; one graph takes them all.
    assert (forward.num_runs, backward.num_runs) == (NUM_STEPS, NUM_STEPS)
    names = [op.name for op in backward.plan.ops]
    assert backward.plan.order != tuple(names)
    # Nothing of the forward pass is computed again, and nothing is drawn again.
    again = ("grouped_mm_fallback", "assign_slots", "rand", "bernoulli", "sort", "topk")
    assert [name for name in names if name.startswith(again)] == []


@pytest.mark.unchecked
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_gates_over_ranks_train_as_alone(pool, num_ranks):
    gates = GATES.names()
    results = pool.run(train_on_ranks, num_ranks, gates, torch.float32, False).results[:num_ranks]
    check(results, num_ranks, gates, torch.float32, is_compiled=False)


@pytest.mark.unchecked
def test_all_gates_over_ranks_train_as_alone_in_float64(pool):
    gates = GATES.names()
    results = pool.run(train_on_ranks, 2, gates, torch.float64, False).results
    check(results, 2, gates, torch.float64, is_compiled=False)


@pytest.mark.unchecked
def test_a_compiler_captures_a_gate_over_ranks(pool):
    gates = ("top_k",)
    results = pool.run(train_on_ranks, 2, gates, torch.float32, True).results
    check(results, 2, gates, torch.float32, is_compiled=True)


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("num_ranks", "dtype"), [(1, torch.float32), (2, torch.float32), (2, torch.float64)]
)
def test_a_compiler_captures_all_gates(pool, num_ranks, dtype):
    gates = GATES.names()
    results = pool.run(train_on_ranks, num_ranks, gates, dtype, True).results[:num_ranks]
    check(results, num_ranks, gates, dtype, is_compiled=True)


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_all_gates_train_over_four_ranks(is_compiled):
    gates = GATES.names()
    with RankPool(4, timeout=timedelta(minutes=5), modules=MODULES) as ranks:
        for dtype in TOLERANCES:
            results = ranks.run(train_on_ranks, 4, gates, dtype, is_compiled).results
            check(results, 4, gates, dtype, is_compiled=is_compiled)
