"""What a backend says when a model or its ranks are not as expected, and what runs then."""

import re
from dataclasses import replace

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
from torch import Tensor

import lancet
from lancet.planner.all_reduces import list_all_reduces_last
from lancet.planner.plan import make_plan
from lancet.runtime import backend as backend_module
from lancet.runtime.agreement import check_same
from shared.comms import Group
from shared.errors import ConfigError, DataError

pytestmark = pytest.mark.unchecked


def _expect(*batches_by_rank, kind=RowsModel):
    """Gradients of the mean of the ranks' losses, of the whole model."""
    model = kind()
    for batches in batches_by_rank:
        for tokens in batches:
            (model(tokens) / len(batches_by_rank)).backward()
    return whole_gradients(model)


def _compile(model, fullgraph=True, **settings):
    torch._dynamo.reset()
    backend = lancet.Backend(Group.world(), **settings)
    return torch.compile(model, backend=backend, fullgraph=fullgraph), backend


def _run_whole():
    model = RowsModel()
    step, backend = _compile(model)
    step(small_batch(0)).backward()
    return whole_gradients(model), backend.report().sentences


def test_a_model_without_all_to_alls_runs_unchanged(pool):
    expected = _expect([small_batch(0)])
    for gradients, sentences in pool.run(_run_whole).results:
        assert largest_difference(gradients, expected) < 2e-6
        assert any("no all-to-all" in sentence for sentence in sentences)


def _freeze_others():
    rank = Group.world().rank
    model = divide(RowsModel, Group.world())
    (model.inner, model.last)[rank].bias.requires_grad_(False)
    step, _ = _compile(model)
    loss = step(small_batch(rank))
    with pytest.raises(ConfigError) as raised:
        loss.backward()
    return str(raised.value)


def test_ranks_that_train_different_parameters_are_refused(pool):
    """Both biases have 16 numbers, so that sums over ranks would mix them."""
    for sentence in pool.run(_freeze_others).results:
        assert re.search(
            r"got one of \S*inner\S*bias\S* on the ranks \[1\] alone; freeze", sentence
        )


class _InTwoGraphs(RowsModel):
    def forward(self, tokens):
        halves = tokens / 2
        torch._dynamo.graph_break()
        return super().forward(halves * 2)


def _break():
    rank = Group.world().rank
    step, _ = _compile(divide(_InTwoGraphs, Group.world()))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"graph_break\(\)"):
        step(small_batch(rank))
    model = divide(_InTwoGraphs, Group.world())
    step, backend = _compile(model, fullgraph=False)
    step(small_batch(rank)).backward()
    return whole_gradients(model), backend.report()


def test_a_model_that_is_not_one_graph_runs_unchanged(pool):
    expected = _expect([small_batch(0)], [small_batch(1)])
    for gradients, report in pool.run(_break).results:
        assert largest_difference(gradients, expected) < 2e-6
        (sentence,) = report.sentences
        assert "not captured as one graph, and runs unchanged; compile it with" in sentence
        assert report.graphs == ()


def _shard():
    from torch.distributed.fsdp import fully_shard

    rank = Group.world().rank
    whole = SmallModel()
    fully_shard(whole)
    with pytest.raises(ConfigError, match=r"got a DTensor .* neither FSDP2 nor transformers"):
        lancet.parallelize(whole, Group.world())
    model = divide(SmallModel, Group.world())
    fully_shard(model.last)
    step, _ = _compile(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_fully_shard"):
        step(small_batch(rank))
    step, backend = _compile(model, fullgraph=False)
    step(small_batch(rank)).backward()
    return whole_gradients(model), backend.report().sentences


@pytest.mark.slow
def test_a_model_that_fsdp2_wrapped_runs_unchanged(pool):
    expected = _expect([small_batch(0)], [small_batch(1)], kind=SmallModel)
    for gradients, sentences in pool.run(_shard).results:
        assert largest_difference(gradients, expected) < 2e-6
        (sentence,) = sentences
        assert "not captured as one graph, and runs unchanged" in sentence


def _run_other_shapes():
    rank = Group.world().rank
    model = divide(SmallModel, Group.world())
    step, backend = _compile(model)
    step(small_batch(rank, 12 + 4 * rank)).backward()
    return whole_gradients(model), backend.report()


@pytest.mark.slow
def test_ranks_with_different_graphs_run_in_captured_order(pool):
    expected = _expect([small_batch(0, 12)], [small_batch(1, 16)], kind=SmallModel)
    for gradients, report in pool.run(_run_other_shapes).results:
        assert largest_difference(gradients, expected) < 2e-6
        (sentence,) = report.sentences
        assert re.search(r"the same graph on all ranks, got the digests \w+, \w+;", sentence)
        assert all(graph.plan is None for graph in report.graphs)


def _plan_slowly(*arguments, memory_bytes, **settings):
    """A plan that takes 10 s, and 2 s more within a limit."""
    plan = make_plan(*arguments, memory_bytes=memory_bytes, **settings)
    return replace(plan, makespan_s=10.0 if memory_bytes is None else 12.0)


def _run_within(memory_bytes):
    model = divide(RowsModel, Group.world())
    step, backend = _compile(model, memory_bytes=memory_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_module, "make_plan", _plan_slowly)
        step(small_batch(Group.world().rank)).backward()
    return backend.report().sentences


def test_what_a_memory_limit_costs_is_said_by_the_rank_that_plans(pool):
    (sentence,), others = pool.run(_run_within, 0).results
    assert others == ()
    assert sentence.endswith(
        "memory_bytes is 0: 12.0 s replayed in place of 10.0 s without a limit"
    )
    assert pool.run(_run_within, None).results == [(), ()]


def _plan_sums_last(name, digest, version, ops, tensors, memory_bytes, sums, **settings):
    """A plan with all sums last, and half of them in a group."""
    plan = make_plan(name, digest, version, ops, tensors, memory_bytes, **settings)
    listed = list_all_reduces_last(ops)
    group = tuple(op.name for op in listed if op.name in sums.dtypes)[::2]
    assert len(group) > 1
    rest = [op for op in listed if op.name not in group]
    averages = [op for op in rest if {*op.after} & {*group}]
    names = [op.name for op in rest if op not in averages]
    order = (*names, *group, *(op.name for op in averages))
    return replace(plan, order=order, groups=(group,), sums=sums)


def _follow(kind, first_alone):
    """A first step, then one in which a rank or both have a smaller batch."""
    rank = Group.world().rank
    model = divide(kind, Group.world())
    step, backend = _compile(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_module, "make_plan", _plan_sums_last)
        step(small_batch(rank)).backward()
    for number in range(2):
        is_smaller = not (first_alone and rank)
        step(small_batch(rank + 2 * number, 8 if is_smaller else 12)).backward()
    return whole_gradients(model), backend.report()


@pytest.mark.parametrize(
    ("kind", "first_alone"),
    [
        (RowsModel, True),
        pytest.param(SmallModel, True, marks=pytest.mark.slow),
        pytest.param(SmallModel, False, marks=pytest.mark.slow),
    ],
)
def test_a_smaller_batch_takes_the_plan_without_a_message(pool, kind, first_alone):
    last = 12 if first_alone else 8
    expected = _expect(
        [small_batch(0), small_batch(0, 8), small_batch(2, 8)],
        [small_batch(1), small_batch(1, last), small_batch(3, last)],
        kind=kind,
    )
    results = pool.run(_follow, kind, first_alone).results
    for rank, (gradients, report) in enumerate(results):
        assert largest_difference(gradients, expected) < 2e-6
        assert report.sentences == ()
        backward = [graph for graph in report.graphs if graph.name.startswith("backward")]
        (planned,) = [graph.name for graph in backward if graph.plan]
        followed = [graph.followed for graph in backward[1:]]
        assert followed == ([] if first_alone and rank else [planned])
        assert ("operations in the order of backward" in str(report)) == bool(followed)


_num_runs = 0


@torch.library.custom_op("lancet_tests::count_runs", mutates_args=())
def _count_runs(gradient: Tensor) -> Tensor:
    global _num_runs
    _num_runs += 1
    return gradient + _num_runs


@_count_runs.register_fake
def _(gradient):
    return torch.empty_like(gradient)


class _Unsteady(torch.autograd.Function):
    """Returns another gradient in every call."""

    @staticmethod
    def forward(ctx, tokens):
        return tokens.clone()

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        return _count_runs(gradient)


class _Noisy(torch.autograd.Function):
    """Adds noise to gradients."""

    @staticmethod
    def forward(ctx, tokens):
        return tokens.clone()

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        return gradient + torch.rand_like(gradient)


class _WithBackward(RowsModel):
    def __init__(self, function, group):
        super().__init__(group)
        self._function = function

    def forward(self, tokens):
        return super().forward(self._function.apply(tokens))


def _run_with(function, path):
    group = Group.world()
    step, backend = _compile(_WithBackward(function, group))
    tokens = small_batch(group.rank).requires_grad_()
    for _ in range(2):
        step(tokens).backward()
    backend.save_plan(path)
    return backend.report(), backend.plans


def test_a_plan_that_gives_other_bits_is_listed_nowhere(pool, tmp_path):
    for report, plans in pool.run(_run_with, _Unsteady, tmp_path / "plan.json").results:
        (sentence,) = report.sentences
        assert re.match(
            r"backward \d: expected the captured order's bits .* on ranks \[0, 1\]", sentence
        )
        assert plans == {}
        assert [graph.plan for graph in report.graphs] == [None] * len(report.graphs)
        assert "planned" not in str(report).removeprefix(sentence)
    assert '"plans": []' in (tmp_path / "plan.json").read_text()


@pytest.mark.slow
def test_a_graph_that_draws_random_numbers_runs_in_captured_order(pool, tmp_path):
    for report, plans in pool.run(_run_with, _Noisy, tmp_path / "plan.json").results:
        (sentence,) = report.sentences
        assert re.match(r"backward \d: it draws random numbers .* captured order", sentence)
        assert plans == {}


def _disagree():
    rank = Group.world().rank
    step, _ = _compile(divide(SmallModel, Group.world()))
    share = backend_module.share_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_module, "share_text", lambda *args: share(*args) + " " * rank)
        loss = step(small_batch(rank))
        with pytest.raises(
            DataError, match=r"plan of backward \d: .* digests (\w{16}), (?!\1)\w{16}"
        ):
            loss.backward()


@pytest.mark.slow
def test_ranks_with_other_plans_launch_nothing(pool):
    pool.run(_disagree)


def _compare_plans():
    control = Group.control(name="test")
    check_same(control, "plan", "the same")
    with pytest.raises(
        DataError, match=r"plan: expected the same .* (\w{16}), (?!\1)\w{16} on ranks"
    ):
        check_same(control, "plan", f"of rank {control.rank}")


def test_plans_that_differ_are_refused_with_their_digests(pool):
    pool.run(_compare_plans)
