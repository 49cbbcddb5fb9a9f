"""Groups of all-reduces give each gradient the bits of an all-reduce of its own, and send as much."""

import pytest
import torch
from lancet_models import RowsModel, SmallModel, divide, small_batch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import lancet
from lancet.graph.capture import CapturedGraph
from lancet.graph.fused_sums import list_sum_dtypes, pack, unpack
from lancet.graph.operations import LaunchOrder
from lancet.graph.rewrite import average_outputs
from lancet.runtime.executor import GraphExecutor
from shared.comms import Group, RankPool

SHAPES = ((5,), (3, 4), (), (2, 2, 8), (0,), (1,))


def _double(tensor):
    return tensor * 2


def _count_writes(gradient):
    return gradient._version


def _capture(group, dtypes):
    graph = fx.Graph()
    gradients = []
    for number, dtype in enumerate(dtypes):
        source = graph.placeholder(f"source{number}")
        gradient = graph.create_node("call_function", _double, (source,), name=f"dw{number}")
        gradient.meta["val"] = torch.empty(SHAPES[number], dtype=dtype)
        gradients.append(gradient)
    graph.output(tuple(gradients))
    name = group.checked().group_name
    average_outputs(graph, range(len(dtypes)), group.world_size, name)
    return CapturedGraph(fx.GraphModule({}, graph), "backward", {}), name


def _sum(dtypes, groups):
    """Outputs and messages of single all-reduces, and of groups by their numbers."""
    group = Group.world()
    captured, name = _capture(group, dtypes)
    fusible = list_sum_dtypes(captured.module.graph, name)
    executor = GraphExecutor(
        captured, group, "graph", lambda _: None, lambda _: None, None, lambda *_: True
    )
    draw = torch.Generator().manual_seed(group.rank)
    tensors = [
        torch.randn(shape, generator=draw).to(dtype)
        for shape, dtype in zip(SHAPES, dtypes, strict=False)
    ]
    names = list(fusible)
    fused = tuple(tuple(names[number] for number in own) for own in groups)
    rest = [op.name for op in executor.list_ops()]
    averages = [op for op in rest if op.startswith("div")]
    order = [op for op in rest if op not in names and op not in averages]
    order += [op for own in fused for op in own]
    order += [op for op in names if op not in order] + averages
    chosen = LaunchOrder(tuple(order), fused)
    following = GraphExecutor(
        captured, group, "graph", lambda _: None, lambda _: chosen, None, lambda *_: True
    )
    results = []
    for each in (executor, following):
        each.run(list(tensors))
        before = group.ledger.snapshot()
        outputs = each.run(list(tensors))
        sent = group.ledger.snapshot().diff(before)
        results.append(([*map(torch.clone, outputs)], sent.sent_bytes, list(each.waits_s)))
    if group.world_size == 2:
        # Averages are views of their group's buffer, and each counts the writes to it alone.
        buffers = {outputs[k].untyped_storage().data_ptr() for own in groups for k in own}
        assert len(buffers) == len(groups)
        first, second = (outputs[k] for k in groups[0][:2])
        num_writes = _count_writes(second)
        first.add_(1)
        assert _count_writes(second) == num_writes
        assert torch.equal(second, results[1][0][groups[0][1]])
    return fusible, [t * 2 for t in tensors], results


@pytest.fixture(
    scope="module", params=[2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))]
)
def ranks(request, pool):
    if request.param == 2:
        yield pool
    else:
        with RankPool(request.param) as more:
            yield more


def test_a_group_has_the_bits_of_single_sums(ranks):
    dtypes = [torch.float32] * 6
    results = ranks.run(_sum, dtypes, ((0, 1, 2), (4, 3, 5))).results
    own = [tensors for _, tensors, _ in results]
    for fusible, _, (single, fused) in results:
        assert set(fusible.values()) == {"float32"}
        for number, (one, other) in enumerate(zip(single[0], fused[0], strict=True)):
            assert one.shape == other.shape == SHAPES[number]
            assert torch.equal(one, other)
            mean = sum(tensors[number].double() for tensors in own) / len(own)
            torch.testing.assert_close(other.double(), mean, rtol=1e-6, atol=1e-6)
        assert len(single[2]) == 6
        assert fused[2] == ["all_reduce_default and 2 more", "all_reduce_default_4 and 2 more"]
        if len(own) == 2:
            assert single[1] == fused[1] > 0


def test_each_dtype_has_its_name(pool):
    dtypes = [torch.float32, torch.bfloat16, torch.float32]
    for fusible, _, (single, fused) in pool.run(_sum, dtypes, ((0, 2),)).results:
        assert list(fusible.values()) == ["float32", "bfloat16", "float32"]
        assert all(map(torch.equal, single[0], fused[0]))


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_columns_of_a_buffer_hold_what_was_packed(num_rows):
    tensors = [torch.arange(float(n)) + 1 for n in (5, 12, 1, 0, 4)]
    widths = [-(-len(tensor) // num_rows) for tensor in tensors]
    offsets = [sum(widths[:k]) for k in range(len(widths))]
    buffer = None
    for tensor, offset in zip(tensors, offsets, strict=True):
        buffer = pack(buffer, tensor, offset, (num_rows, sum(widths)))
    assert buffer.shape == (num_rows, sum(widths))
    assert buffer.isfinite().all()
    assert buffer.sum() == sum(tensor.sum() for tensor in tensors)  # padding is zero
    for tensor, offset in zip(tensors, offsets, strict=True):
        mean = unpack(buffer, offset, tuple(tensor.shape), num_rows, 2)
        assert torch.equal(mean, tensor / 2)
        # A gradient of one column would be a view, too, with gaps that keep the buffer.
        assert mean.is_contiguous()
        is_view = mean.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert is_view == (num_rows == 1)


def test_sums_of_integers_and_of_data_s_shape_run_alone():
    graph = fx.Graph()
    gradients = []
    sizes = ShapeEnv()
    with FakeTensorMode(shape_env=sizes):
        of_data = torch.empty(sizes.create_unbacked_symint())
    for value in (torch.empty(3), torch.empty(3, dtype=torch.int64), of_data, torch.empty(2)):
        gradients.append(graph.call_function(_double, (graph.placeholder("source"),)))
        gradients[-1].meta["val"] = value
    gradients.append(graph.placeholder("input"))
    gradients[-1].meta["val"] = torch.empty(3)
    graph.output(tuple(gradients))
    average_outputs(graph, range(5), 2, "ranks")
    assert list(list_sum_dtypes(graph, "ranks")) == ["all_reduce_default", "all_reduce_default_3"]
    assert list_sum_dtypes(graph, "others") == {}
    output = graph.output_node()
    first = output.args[0][0]
    first.args = (first.args[0], gradients[0])  # divided by data, it is no average
    assert list(list_sum_dtypes(graph, "ranks")) == ["all_reduce_default_3"]


class _Shared(nn.Module):
    """Has a parameter without a gradient, and two that share theirs."""

    def __init__(self, *group):
        super().__init__(*group)
        self.scale, self.one, self.other = (nn.Parameter(torch.ones(16)) for _ in range(3))

    def forward(self, tokens):
        penalty = (self.one + self.other).square().sum()
        return super().forward(tokens * self.scale.detach()) + penalty


class _Rows(_Shared, RowsModel):
    pass


class _Experts(_Shared, SmallModel):
    pass


def _largest():
    """Sums of two gradients in a group, and between them a maximum over the ranks."""
    group = Group.world()
    captured, name = _capture(group, [torch.float32] * 2)
    graph = captured.module.graph
    (last,) = (node for node in graph.nodes if node.name == "dw1")
    reduce = torch.ops._c10d_functional
    with graph.inserting_before(last):
        start = graph.call_function(reduce.all_reduce.default, (last.args[0], "max", name))
        largest = graph.call_function(reduce.wait_tensor.default, (start,))
        largest = graph.call_function(torch.ops.aten.div.Tensor, (largest, 2))
    for node in (start, largest):
        node.meta["val"] = torch.empty(SHAPES[1])
    output = graph.output_node()
    output.args = ((*output.args[0], largest),)
    fusible = tuple(list_sum_dtypes(graph, name))
    executor = GraphExecutor(
        captured, group, "graph", lambda _: None, lambda _: None, None, lambda *_: True
    )
    names = [op.name for op in executor.list_ops() if not op.name.startswith("div")]
    averages = [op.name for op in executor.list_ops() if op.name.startswith("div")]
    order = [name for name in names if name not in fusible] + [*fusible, *averages]
    chosen = LaunchOrder(tuple(order), (fusible,))
    following = GraphExecutor(
        captured, group, "graph", lambda _: None, lambda _: chosen, None, lambda *_: True
    )
    tensors = [torch.full(SHAPES[number], 1.0 + group.rank) for number in range(2)]
    return [each.run(list(tensors)) for each in (executor, following)], following.waits_s


def test_torch_runs_all_reduces_that_are_no_sums(pool):
    for results, waits_s in pool.run(_largest).results:
        assert list(waits_s) == ["all_reduce_default and 1 more"]
        for outputs in results:
            assert [float(output.unique()) for output in outputs] == [3.0, 3.0, 1.0]


def _train(kind):
    """By order: gradients of three steps, and what sums send; the plans, and what is not planned."""
    group = Group.world()
    torch._dynamo.reset()
    model = divide(kind, group)
    backend = lancet.Backend(group)
    step = torch.compile(model, backend=backend, fullgraph=True)
    step(small_batch(group.rank)).backward()
    results = {}
    for order in ("captured", "planned"):
        backend.use_order(order)
        held, sums = [], []
        # The first step's gradients are held, the last one's are added to those of the one before.
        for number, num_tokens in enumerate((12, 12, 10)):
            if number < 2:
                model.zero_grad()
            before = group.ledger.snapshot()
            step(small_batch(group.rank + 2 * number, num_tokens)).backward()
            cell = group.ledger.snapshot().diff(before).by_op()["all_reduce"]
            sums.append((cell.sent_bytes, cell.calls))
            held += [p.grad for p in model.parameters() if p.grad is not None]
        results[order] = [g.to_local() if hasattr(g, "to_local") else g for g in held], sums
    assert model.scale.grad is None
    return results, backend.plans, backend.report().sentences


@pytest.mark.parametrize(
    ("kind", "num_gradients"), [(_Rows, 6), pytest.param(_Experts, 9, marks=pytest.mark.slow)]
)
def test_a_planned_step_sums_in_groups(pool, kind, num_gradients):
    for results, plans, sentences in pool.run(_train, kind).results:
        (gradients, sums), (fused_gradients, fused_sums) = results.values()
        assert len(gradients) == 3 * num_gradients
        assert all(map(torch.equal, gradients, fused_gradients))
        (plan,) = plans.values()
        assert sentences == ()
        assert sum(len(own) - 1 for own in plan.groups) > 0
        # A sum over two ranks is two messages of each; the last step's graph follows the plan.
        for (num_bytes, num_messages), (fused_bytes, num_fused) in zip(
            sums, fused_sums, strict=True
        ):
            assert fused_bytes == num_bytes
            assert num_fused < num_messages
