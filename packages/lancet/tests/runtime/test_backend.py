"""Compiled training equals one process, sends nothing twice, and moves weight gradients exactly."""

import json

import pytest
import torch
from lancet_models import (
    largest_difference,
    make_batch,
    make_model,
    train_alone,
    whole_gradients,
    whole_state,
)

import lancet
from shared.comms import Group


def _train(num_layers, num_steps, folder):
    group = Group.world()
    model = lancet.parallelize(make_model(num_hidden_layers=num_layers), group)
    backend = lancet.Backend(group, partition=None)
    step = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sent_bytes = []
    for number in range(num_steps):
        batch = make_batch(number).chunk(group.world_size)[group.rank]
        before = group.ledger.snapshot()
        step(input_ids=batch, labels=batch).loss.backward()
        traffic = group.ledger.snapshot().diff(before).by_op()
        sent_bytes.append({op: cell.sent_bytes for op, cell in traffic.items()})
        optimizer.step()
        optimizer.zero_grad()
    backend.save_plan(f"{folder}/plan{group.rank}.json")
    lancet.export(step, f"{folder}/out")
    report = backend.report()
    if group.rank == 0:
        report.write_trace(f"{folder}/trace.json")
        report.draw(f"{folder}/queues.svg")
    return whole_state(model), sent_bytes, report


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def num_layers(request):
    return request.param


@pytest.fixture(scope="module")
def trained(pool, num_layers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, pool.run(_train, num_layers, 4, str(folder)).results


def test_training_equals_one_process(trained, num_layers):
    expected = train_alone(4, num_hidden_layers=num_layers)
    for weights, _, _ in trained[1]:
        assert largest_difference(weights, expected) < 2e-6


def test_each_row_travels_once_in_each_direction(trained, num_layers):
    model = make_model(num_hidden_layers=num_layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    chosen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, outputs: chosen.append(outputs[2]))
    experts = [weight for name, weight in model.named_parameters() if "experts" in name]
    replicated_bytes = sum(
        weight.nbytes for name, weight in model.named_parameters() if "experts" not in name
    )
    num_local, row_bytes, num_counts_bytes = len(experts[0]) // 2, 32 * 4, 8
    for number in range(4):
        batch = make_batch(number)
        chosen.clear()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Pairs of both ranks whose expert lies on the other one, over all layers: their tokens and
        # the results' gradients leave this rank, or the results and the tokens' gradients do.
        num_leaving = sum(
            int((choices.chunk(2)[rank] // num_local != rank).sum())
            for choices in chosen
            for rank in range(2)
        )
        expected = {
            "exchange": 2 * num_leaving * row_bytes + num_layers * num_local * num_counts_bytes,
            "all_reduce": replicated_bytes,
        }
        if number > 0:  # the first step is measured and checked, and sends its rows more than once
            for _, sent_bytes, _ in trained[1]:
                assert sent_bytes[number] == expected


def test_plan_is_the_same_on_all_ranks(trained):
    texts = {(trained[0] / f"plan{rank}.json").read_text() for rank in range(2)}
    (text,) = texts
    (plan,) = json.loads(text)["plans"]
    captured = [op["name"] for op in plan["ops"]]
    assert sorted(plan["order"]) == sorted(captured)
    assert plan["order"] != captured
    assert plan["makespan_s"] < plan["before_s"]


def test_report_names_each_all_to_all(trained, num_layers):
    for _, _, report in trained[1]:
        assert report.sentences == ()
        text = str(report)
        (planned,) = [graph for graph in report.graphs if graph.plan]
        kinds = [op.kind for op in planned.plan.ops]
        assert kinds.count("all_to_all") == 2 * num_layers
        fused = planned.plan.fused_ops
        for op in fused:
            assert (f"  {op.name}: " in text) == (op.kind != "compute")
        assert planned.num_runs == 4
        assert report.exposed_s > 0
        assert set(planned.waits_s) == {op.name for op in fused if op.kind != "compute"}


def test_report_draws_both_queues(trained):
    events = json.loads((trained[0] / "trace.json").read_text())["traceEvents"]
    assert any("all_to_all" in event["name"] for event in events)
    assert "<svg" in (trained[0] / "queues.svg").read_text()


def test_export_after_compiled_training(trained):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(trained[0] / "out")
    assert largest_difference(whole_state(loaded), trained[1][0][0]) == 0


def _both_orders(settings):
    """Gradients of the captured and of the planned order, after some steps."""
    gradients = []
    for dw in (False, True):
        torch._dynamo.reset()
        group = Group.world()
        model = lancet.parallelize(make_model(**settings), group)
        backend = lancet.Backend(group, dw=dw, partition=None)
        step = torch.compile(model, backend=backend, fullgraph=True)
        for number in range(3):
            batch = make_batch(number).chunk(group.world_size)[group.rank]
            step(input_ids=batch, labels=batch).loss.backward()
        gradients.append(whole_gradients(model))
        moved = sum(len(names) for plan in backend.plans.values() for names in plan.moved.values())
    return largest_difference(*gradients), moved


@pytest.mark.slow
def test_moving_weight_gradients_changes_no_bit(pool):
    for difference, moved in pool.run(_both_orders, {}).results:
        assert difference == 0
        assert moved > 0
