"""A step in parts of its batch is that of the whole batch, sends as many bytes, and says what stays whole."""

from itertools import pairwise

import pytest
import torch
from lancet_models import make_batch, make_model, whole_gradients
from torch._dynamo.exc import BackendCompilerFailed

import lancet
from shared.comms import Group

pytestmark = pytest.mark.unchecked


def _train(partition, sizes, dtype):
    """Gradients, bytes sent, sentences and plans of some steps, by batch size."""
    torch._dynamo.reset()
    group = Group.world()
    model = lancet.parallelize(make_model(num_hidden_layers=1).to(dtype), group)
    backend = lancet.Backend(group, partition=partition)
    step = torch.compile(model, backend=backend, fullgraph=True)
    steps = []
    for number, size in enumerate(sizes):
        ids = make_batch(number, 2 * size).chunk(group.world_size)[group.rank]
        before = group.ledger.snapshot()
        step(input_ids=ids, labels=ids).loss.backward()
        traffic = group.ledger.snapshot().diff(before).by_op()
        sent = {op: cell.sent_bytes for op, cell in traffic.items()}
        steps.append((whole_gradients(model), sent))
        model.zero_grad()
    return steps, backend.report(), backend


def _compare(sizes, dtype):
    whole, report, _ = _train(None, sizes, dtype)
    parts, cut_report, backend = _train(2, sizes, dtype)
    errors = [
        max(float((one[n] - other[n]).abs().max() / one[n].abs().max()) for n in one)
        for (one, _), (other, _) in zip(whole, parts, strict=True)
    ]
    sent = [(one, other) for (_, one), (_, other) in zip(whole[1:], parts[1:], strict=True)]
    kinds = [[op.kind for op in executor.list_ops()] for executor in backend.executors]
    counts = [own.count("all_to_all") for own in kinds]
    orders = [plan.order for plan in backend.plans.values()]
    return errors, sent, counts, report.sentences + cut_report.sentences, orders


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


def test_a_step_in_parts_has_the_whole_steps_gradients(pool):
    for errors, _, counts, sentences, _ in pool.run(_compare, (2,), torch.float64).results:
        assert max(errors) < 1e-12
        assert counts == [6, 4]
        assert sentences == ()


def _train_whole(sizes):
    _, report, backend = _train(2, sizes, torch.float32)
    kinds = [[op.kind for op in executor.list_ops()] for executor in backend.executors]
    return report.sentences, [own.count("all_to_all") for own in kinds]


@pytest.mark.slow
def test_a_batch_that_does_not_divide_stays_whole(pool):
    for sentences, counts in pool.run(_train_whole, (3,)).results:
        assert sentences == (
            "the batch stays whole: expected a batch that divides into 2 parts, got 3 sequences",
        )
        assert counts == [3, 2]


def _train_on_one_sequence(sizes):
    try:
        _train(2, sizes, torch.float32)
    except BackendCompilerFailed as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_later_batch_with_too_few_sequences_is_refused(pool):
    for text in pool.run(_train_on_one_sequence, (4, 1)).results:
        assert "expected 2 sequences or more in a batch after a first one in 2 parts, got 1" in text
