"""A step in parts of its batch is that of the whole batch, sends as many bytes, and says what stays whole."""

from itertools import pairwise

import pytest
import torch
from lancet_models import make_batch, make_model, whole_gradients

import lancet
from shared.comms import Group
from shared.errors import ConfigError

pytestmark = pytest.mark.unchecked


def _train(partition, sizes, dtype, path=None):
    """Gradients, bytes sent, sentences and plans of some steps, by batch size."""
    torch._dynamo.reset()
    group = Group.world()
    model = lancet.parallelize(make_model(num_hidden_layers=1).to(dtype), group)
    backend = lancet.Backend(group, partition=partition)
    if path:
        backend.load_plan(path)
    step = torch.compile(model, backend=backend, fullgraph=True)
    steps = []
    for number, size in enumerate(sizes):
        ids = make_batch(number, 2 * size).chunk(group.world_size)[group.rank]
        before = group.ledger.snapshot()
        step(input_ids=ids, labels=ids).loss.backward()
        traffic = group.ledger.snapshot().diff(before).by_op()
        sent = {op: cell.sent_bytes for op, cell in traffic.items()}
        steps.append((whole_gradients(model), sent["all_reduce"]))
        model.zero_grad()
    return steps, backend.report(), backend


def _compare(sizes, dtype):
    whole, report, _ = _train(None, sizes, dtype)
    parts, cut_report, backend = _train(2, sizes, dtype)
    errors = []
    for (one, _), (other, _) in zip(whole, parts, strict=True):
        assert one.keys() == other.keys()
        errors.append(max(float((one[n] - other[n]).abs().max() / one[n].abs().max()) for n in one))
    counts = [
        sum(op.kind == "all_to_all" for op in executor.list_ops()) for executor in backend.executors
    ]
    orders = [plan.order for plan in backend.plans.values()]
    return errors, [w[1] == p[1] for w, p in zip(whole[1:], parts[1:], strict=True)], counts, (
        report.sentences, cut_report.sentences), orders


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_parts_train_like_the_whole_batch(pool, dtype, tolerance):
    results = pool.run(_compare, (4, 4, 3), dtype).results
    for errors, same_bytes, counts, sentences, orders in results:
        assert max(errors) < tolerance
        assert all(same_bytes)
        assert sentences == ((), ())
        assert all(count % 2 == 0 and count >= 4 for count in counts)
        assert len(orders) == 2  # forward and backward
    assert all(one == other for one, other in pairwise(r[4] for r in results))
