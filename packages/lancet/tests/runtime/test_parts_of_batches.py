"""A step in parts of its batch is that of the whole batch, sends as many bytes, and says what stays whole."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from lancet_models import (
    RowsModel,
    divide,
    largest_difference,
    make_batch,
    make_model,
    small_batch,
    whole_gradients,
)

import lancet
from lancet.graph.operations import OpGraph
from lancet.moe.dispatch import mark_end, mark_start
from lancet.planner.memory import LiveBytes
from lancet.planner.plan import load_plans
from lancet.runtime import cutting
from shared.comms import Group

pytestmark = pytest.mark.unchecked


def _train(partition, sizes, dtype=torch.float32, plan=None, **settings):
    """Gradients and bytes sent of some steps, by batch sizes of the ranks; the report and the backend."""
    torch._dynamo.reset()
    group = Group.world()
    model = lancet.parallelize(make_model(num_hidden_layers=1).to(dtype), group)
    backend = lancet.Backend(group, partition=partition, **settings)
    if plan:
        backend.load_plan(plan)
    step = torch.compile(model, backend=backend, fullgraph=True)
    steps = []
    for number, size in enumerate(sizes):
        own, other = (size, size) if isinstance(size, int) else size
        ids = make_batch(number, own + other).split([own, other])[group.rank]
        before = group.ledger.snapshot()
        step(input_ids=ids, labels=ids).loss.backward()
        traffic = group.ledger.snapshot().diff(before).by_op()
        sent = {op: cell.sent_bytes for op, cell in traffic.items()}
        steps.append((whole_gradients(model), sent))
        model.zero_grad()
    return steps, backend.report(), backend


def _count_exchanges(backend):
    kinds = [[op.kind for op in executor.list_ops()] for executor in backend.executors]
    return [own.count("all_to_all") for own in kinds]


def _list_errors(whole, parts):
    return [
        max(float((one[n] - other[n]).abs().max() / one[n].abs().max()) for n in one)
        for (one, _), (other, _) in zip(whole, parts, strict=True)
    ]


def _compare(sizes, dtype):
    whole, report, _ = _train(None, sizes, dtype)
    parts, cut_report, backend = _train(2, sizes, dtype)
    sent = [(one, other) for (_, one), (_, other) in zip(whole[1:], parts[1:], strict=True)]
    orders = [plan.order for plan in backend.plans.values()]
    sentences = report.sentences + cut_report.sentences
    return _list_errors(whole, parts), sent, _count_exchanges(backend), sentences, orders


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_parts_train_like_the_whole_batch(pool, dtype, tolerance):
    # The third batch has another size, and unequal parts.
    results = pool.run(_compare, (4, 4, 3), dtype).results
    for errors, sent, counts, sentences, orders in results:
        assert max(errors) < tolerance
        for whole, parts in sent:
            assert parts["all_reduce"] == whole["all_reduce"]
            # Another part tells the other rank the rows for its four experts, 8 bytes each.
            assert parts["exchange"] == whole["exchange"] + 4 * 8
        # Rows there and back, and their numbers, of each part: forward, backward, and once more.
        assert counts == [6, 4, 6, 4]
        assert sentences == ()
        assert len(orders) == 2
    assert all(one == other for one, other in pairwise(r[4] for r in results))


@pytest.mark.slow
def test_a_step_in_parts_has_the_whole_steps_gradients(pool):
    for errors, _, counts, sentences, _ in pool.run(_compare, (2,), torch.float64).results:
        assert max(errors) < 1e-12
        assert counts == [6, 4]
        assert sentences == ()


class _MarkedRows(RowsModel):
    """Rows that travel as those of experts do, marked where they leave and come back."""

    def forward(self, tokens):
        ids = 3 * (tokens[:, :1] > 0).long()
        hidden, ids, ones = mark_start(self.inner(tokens), ids, torch.ones_like(tokens[:, :1]))
        rows = self.dispatch.send(hidden, ids)
        hidden = mark_end(self.dispatch.bring_back(rows.values.relu(), rows, ones))
        return self.last(hidden).square().mean()


def _cut_rows(partition):
    torch._dynamo.reset()
    model = divide(_MarkedRows, Group.world())
    backend = lancet.Backend(Group.world(), partition=partition)
    step = torch.compile(model, backend=backend, fullgraph=True)
    step(small_batch(Group.world().rank)).backward()
    return whole_gradients(model), _count_exchanges(backend), backend.report().sentences


def test_rows_that_travel_in_parts_give_the_whole_batchs_gradients(pool):
    whole, parts = (pool.run(_cut_rows, partition).results for partition in (None, 2))
    for (expected, num_whole, _), (gradients, num_parts, sentences) in zip(
        whole, parts, strict=True
    ):
        assert largest_difference(gradients, expected) < 1e-6
        assert num_parts == [2 * number for number in num_whole]
        assert sentences == ()


@pytest.mark.slow
def test_ranks_run_the_whole_batch_where_one_has_too_few_sequences(pool):
    # All ranks have one sequence, which is captured whole; then one rank has, and no rank compiles.
    for errors, sent, counts, sentences, _ in pool.run(
        _compare, (4, 1, (1, 4), 4), torch.float64
    ).results:
        assert max(errors) < 1e-12
        assert sentences == ()
        assert counts[:4] == [6, 4, 3, 2]
        one, _, last = sent
        assert one[0]["exchange"] == one[1]["exchange"]
        assert last[1]["exchange"] == last[0]["exchange"] + 4 * 8


def _train_whole(partition, sizes, **settings):
    _, report, backend = _train(partition, sizes, **settings)
    digests = [executor.captured.digest() for executor in backend.executors]
    return report.sentences, report.batch, _count_exchanges(backend), digests


@pytest.mark.slow
def test_a_batch_that_does_not_divide_stays_whole(pool):
    for sentences, batch, counts, _ in pool.run(_train_whole, 2, (3,)).results:
        assert sentences == (
            "the batch stays whole: expected a batch that divides into 2 parts, got 3 sequences",
        )
        assert batch == ""
        assert counts == [3, 2]


@pytest.mark.slow
def test_costs_leave_a_small_batch_whole(pool):
    whole = pool.run(_train_whole, None, (4, 2)).results
    auto = pool.run(_train_whole, "auto", (4, 2)).results
    for (sentences, batch, counts, digests), (_, _, _, expected) in zip(auto, whole, strict=True):
        assert sentences == ()
        assert batch.startswith("the batch stays whole: parts save too little of the forward pass")
        assert counts == [3, 2, 3, 2]
        assert digests == expected


def _slow_exchanges(module, axes, inputs, group, numbers, *, time_parts=cutting.time_parts):
    """The measured costs, in which exchanges take as long as everything else."""
    costs = time_parts(module, axes, inputs, group, numbers)
    is_exchange = [kind == "all_to_all" for kind in costs.kinds]
    time_s = {n: [(1.0 if sends else 0.01) / n for sends in is_exchange] for n in numbers}
    return replace(costs, time_s=time_s)


def _train_with(time_parts, *arguments, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "time_parts", time_parts)
        return _train(*arguments, **settings)


def _load(folder):
    plan, again = f"{folder}/plan.json", f"{folder}/again.json"
    whole, _, _ = _train(None, (4, 4), torch.float64)
    parts, report, backend = _train_with(_slow_exchanges, "auto", (4, 4), torch.float64)
    rank = Group.world().rank
    if rank == 0:
        backend.save_plan(plan)
    # Measured, the batch would stay whole.
    loaded, loaded_report, backend = _train("auto", (4, 4), torch.float64, plan=plan)
    if rank == 0:
        backend.save_plan(again)
    others = _train(2, (4,), torch.float64, plan=plan)[1]
    cuts = [[p.cut for p in load_plans(path)] for path in (plan, again)] if rank == 0 else []
    errors = _list_errors(whole, parts) + _list_errors(whole, loaded)
    return errors, report, loaded_report, others, cuts


@pytest.mark.slow
def test_costs_cut_a_batch_and_a_plan_cuts_it_again(pool, tmp_path):
    results = pool.run(_load, str(tmp_path)).results
    for errors, report, loaded, others, _ in results:
        assert max(errors) < 1e-12
        assert report.sentences == loaded.sentences == ()
        assert report.batch.startswith("the batch is cut, each range of operators into its parts")
        assert loaded.batch.endswith("as in the loaded plan")
        assert report.batch in str(report)
        assert "(4" in report.batch
        assert "(2" in others.batch
    plan, again = results[0][4]
    assert plan == again
    assert len(plan) == 2
    assert len({*plan}) == 1
    assert plan[0].ranges
    assert any("it is planned anew" in sentence for sentence in results[0][3].sentences)


def _fail_on_rank_1(module, axes, inputs, group, numbers):
    if group.rank == 1:
        raise ValueError("no time")
    return _slow_exchanges(module, axes, inputs, group, [])


def _fail():
    _, report, backend = _train_with(_fail_on_rank_1, "auto", (4,))
    return report, _count_exchanges(backend)


@pytest.mark.slow
def test_an_error_of_one_rank_leaves_the_batch_whole_on_all(pool):
    for report, counts in pool.run(_fail).results:
        assert report.batch == "the batch stays whole: rank 1: ValueError('no time')"
        assert counts == [3, 2]


def _find_peak(backend):
    """Most bytes of a backward graph in captured order."""
    executor = backend.executors[1]
    graph = OpGraph(executor.list_ops())
    return LiveBytes(graph, executor.tensors).peak_bytes(range(len(graph.ops)))


def _limit(memory_bytes):
    _, report, whole = _train(None, (4,), memory_bytes=memory_bytes)
    _, report, parts = _train(2, (4,), memory_bytes=memory_bytes)
    (cut,) = {plan.cut for plan in parts.plans.values()}
    return report.sentences, _find_peak(parts) - _find_peak(whole), cut


@pytest.mark.slow
def test_parts_take_no_more_memory_than_is_given(pool):
    for (sentence, *others), _, cut in pool.run(_limit, 0).results:
        # Rank 0 may say what the limit costs.
        assert all("memory_bytes is 0" in other for other in others)
        assert "the batch stays whole: parts may take " in sentence
        assert sentence.endswith("more memory, and memory_bytes allows 0 B")
        assert not cut.ranges
    for sentences, more_bytes, cut in pool.run(_limit, 1 << 30).results:
        assert sentences == ()
        assert more_bytes <= cut.extra_bytes
        assert cut.ranges
