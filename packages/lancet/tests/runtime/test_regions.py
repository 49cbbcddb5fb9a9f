"""Regions compiled by Inductor compute what their operators compute, once for all equal ones."""

import pytest
import torch
from lancet_models import (
    RowsModel,
    SmallModel,
    divide,
    largest_difference,
    small_batch,
    whole_gradients,
)
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import lancet
from lancet.graph.fused_sums import pack
from lancet.runtime import regions as regions_module
from lancet.runtime.regions import RegionCompiler, group_regions
from shared.comms import Group

pytestmark = pytest.mark.unchecked


def _trace():
    """Three layers, of which the last also returns a view, with draws of random numbers between them."""

    def layer(x):
        first, _ = torch.ops.aten.sort.default(x * 2)
        return first.sigmoid() + x.tanh()

    def function(x):
        hidden = layer(x)
        first = torch.ops.aten.rand_like.default(hidden)
        hidden = layer(hidden)
        second = torch.ops.aten.rand_like.default(hidden)
        hidden = layer(hidden)
        return hidden, hidden.t(), first, second, x.t()

    return make_fx(function, tracing_mode="fake")(torch.ones(6, 4))


def _group(module):
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    regions = group_regions(graph)
    graph.lint()
    return fx.GraphModule(module, graph), regions


def _run(module, x):
    torch.manual_seed(0)
    with torch.no_grad():
        return module(x)


def _draw():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def make_compiler(monkeypatch):
    """Makes a compiler on a rank that has nobody to wait for."""
    monkeypatch.setattr(regions_module, "share_texts", lambda _, text: [text])
    return lambda sentences: RegionCompiler(None, sentences.append)


def _run_operators(module, _arguments):
    """In Inductor's place, which takes seconds."""
    return module.forward


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_regions_compute_what_their_operators_compute(monkeypatch, make_compiler, inductor):
    if not inductor:
        monkeypatch.setattr(torch._inductor, "compile", _run_operators)
    module, sentences = _trace(), []
    compiler = make_compiler(sentences)
    divided, regions = _group(module)
    targets = [node.target for node in divided.graph.nodes]
    assert len(regions) == 3
    assert targets.count(torch.ops.aten.rand_like.default) == 2
    assert torch.ops.aten.tanh.default not in targets
    x = _draw()
    expected = _run(module, x)
    assert all(map(torch.equal, _run(divided, x), expected))
    compiler.compile(regions)
    outputs = _run(divided, x)
    for ours, operators in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, operators)
        assert ours.stride() == operators.stride()
    assert outputs[-1].data_ptr() == x.data_ptr()
    assert compiler.accept("graph", regions, None)
    assert sentences == []
    report = compiler.report()
    assert (report.num_regions, report.num_compiled) == (3, 2)
    assert report.compile_s > 0


@pytest.mark.parametrize(
    ("shape", "stride"), [((3, 2), (1, 3)), ((3, 2), (0, 1)), ((0, 2), (2, 1))]
)
def test_regions_are_compiled_for_the_layouts_that_they_ran_on(
    monkeypatch, make_compiler, shape, stride
):
    compiled_for = []
    monkeypatch.setattr(
        torch._inductor, "compile", lambda module, own: compiled_for.extend(own) or module.forward
    )
    _, (region, *_) = _group(_trace())
    region.run(torch.ones(6).as_strided(shape, stride))
    make_compiler([]).compile([region])
    (zeros,) = compiled_for
    assert (tuple(zeros.shape), zeros.stride()) == (shape, stride)
    assert not zeros.any()


def test_equal_operators_of_other_layouts_are_compiled_anew(monkeypatch, make_compiler):
    shapes = []
    monkeypatch.setattr(
        torch._inductor,
        "compile",
        lambda module, own: shapes.append(own[0].shape) or module.forward,
    )
    regions = [_group(_trace())[1][0] for _ in range(3)]
    for region, num_rows in zip(regions, (3, 5, 3), strict=True):
        region.run(torch.ones(num_rows, 2))
    make_compiler([]).compile(regions)
    assert shapes == [(3, 2), (5, 2)]


def test_other_layouts_run_the_operators():
    _, (region, *_) = _group(_trace())
    x = torch.rand(3, 2)
    expected = region.run(x)
    region.compiled = lambda *_: "compiled"
    assert region.run(x + 1) == "compiled"
    for other in (x.t().contiguous().t(), x.double()):
        outputs = region.run(other)
        assert all(map(torch.allclose, outputs, [e.to(other.dtype) for e in expected]))
    assert region.run(x) == "compiled"


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, KeyError])
def test_errors_of_inductor_leave_regions_uncompiled(monkeypatch, make_compiler, kind):
    def refuse(*_):
        raise kind("no compiler")

    monkeypatch.setattr(torch._inductor, "compile", refuse)
    module, sentences = _trace(), []
    compiler = make_compiler(sentences)
    divided, regions = _group(module)
    x = _draw()
    for _ in range(2):
        assert all(map(torch.equal, _run(divided, x), _run(module, x)))
        compiler.compile(regions)
    (sentence,) = sentences
    assert "operators runs uncompiled" in sentence
    assert f"{kind.__name__}: " in sentence
    assert "no compiler" in sentence
    assert compiler.accept("graph", regions, None)
    assert (compiler.report().num_regions, compiler.report().num_compiled) == (0, 0)


def test_copies_into_a_buffer_do_not_divide_a_region():
    def function(x):
        first = x.tanh()
        buffer = pack(None, first, 0, (1, 48))
        second = (first * 2).sin().cos()
        return pack(buffer, second, 24, (1, 48)), second

    graph, x = fx.Graph(), _draw()
    tracer = make_fx(lambda x: ((first := x.tanh()), (first * 2).sin().cos()), tracing_mode="fake")
    traced = tracer(x)
    copies = {}
    first, second = graph.graph_copy(traced.graph, copies)
    with graph.inserting_after(first):
        buffer = graph.call_function(pack, (None, first, 0, (1, 48)))
    buffer = graph.call_function(pack, (buffer, second, 24, (1, 48)))
    graph.output((buffer, second))
    (region,) = group_regions(graph)
    graph.lint()
    assert region.num_nodes == 4
    assert all(map(torch.equal, fx.GraphModule({}, graph)(x), function(x)))


def _train(kind, scale_on_last, inductor, shapes):
    """Gradients and losses by order, for a batch of each shape; and the report.

    Args:
        scale_on_last: by what losses that "compiled" regions return are wrong on the second rank.
        inductor: whether it compiles; else the operators run.
        shapes: numbers of tokens, the first step's first.
    """
    group = Group.world()
    torch._dynamo.reset()

    def pretend(module, _arguments):
        scale = scale_on_last if group.rank else 1.0

        def run(*arguments):
            return [
                value * scale if value.ndim == 0 and value.is_floating_point() else value
                for value in module.forward(*arguments)
            ]

        return run

    with pytest.MonkeyPatch.context() as patch:
        if not inductor:
            patch.setattr(torch._inductor, "compile", pretend)
        model = divide(kind, group)
        backend = lancet.Backend(group, partition=None, regions=True)
        step = torch.compile(model, backend=backend, fullgraph=True)
        step(small_batch(group.rank, shapes[0])).backward()
        results = []
        for number, num_tokens in enumerate(shapes):
            own = {}
            for order in ("captured", "planned", "regions"):
                model.zero_grad()
                backend.use_order(order)
                loss = step(small_batch(group.rank + 2 * number, num_tokens))
                loss.backward()
                own[order] = {"loss": loss.detach(), **whole_gradients(model)}
            results.append(own)
    return results, backend.report()


def test_all_ranks_run_a_graph_uncompiled_if_one_has_other_outputs(pool):
    """The second rank's loss is wrong, which the backward graph does not compute."""
    for (own,), report in pool.run(_train, RowsModel, 1.01, False, [12]).results:
        (sentence,) = report.sentences
        assert sentence.startswith("forward 0: expected the operators' outputs from regions")
        assert "got others on ranks [1] (outputs 0)" in sentence
        assert report.regions.num_regions > 0
        assert largest_difference(own["planned"], own["captured"]) == 0
        assert largest_difference(own["regions"], own["captured"]) == 0


@pytest.mark.slow
def test_compiled_regions_train_as_their_operators_do(pool):
    for results, report in pool.run(_train, SmallModel, 1.0, True, [12, 8]).results:
        assert report.sentences == ()
        assert report.regions.num_regions >= report.regions.num_compiled > 2
        assert "regions between collectives run compiled, by" in str(report)
        first, other_shape = results
        assert 0 < largest_difference(first["regions"], first["planned"]) < 2e-6
        assert largest_difference(other_shape["regions"], other_shape["planned"]) == 0
