import copy
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import qsync
from qsync.planner.plan import RankPlan
from qsync.runtime.drift import DriftWatch
from qsync.runtime.modules import get_precision
from shared.comms.group import Group
from shared.comms.launch import RankPool
from shared.errors import CommError, ConfigError


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=timedelta(seconds=60)) as pool:
        yield pool


def _build(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def _plan_second_rank(model, precision):
    operators = qsync.Plan.uniform(model, "fp32").operators
    lowered = dict.fromkeys(operators, precision)
    return qsync.Plan(operators=operators, ranks=(RankPlan(lowered={}), RankPlan(lowered=lowered)))


def _batch(step):
    generator = torch.Generator().manual_seed(10 * step + distributed.get_rank())
    return torch.randn(5, 6, generator=generator)


def _train(ddp, num_steps=20):
    calls = []
    named = distributed.all_reduce
    ddp.register_comm_hook(None, _counting(calls))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = ddp(_batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert distributed.all_reduce is named
    return losses, [each.detach().clone() for each in ddp.parameters()], len(calls)


def _counting(calls):
    def hook(_state, bucket):
        calls.append(bucket.index())
        return (
            distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    return hook


def _count_collectives(make):
    """Collectives from building a wrapper to the end of three steps, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ddp = make()
        for step in range(3):
            ddp(_batch(step)).square().mean().backward()
    names = [event.name for event in profile.events()]
    return sorted(name for name in names if name.startswith(("gloo:", "c10d::")))


def _compare_with_torch():
    wrappers = []
    for wrap in (DistributedDataParallel, qsync.DDP):
        model = _build()
        if wrap is qsync.DDP:
            qsync.apply(model, qsync.Plan.uniform(model, "fp32"))
        wrappers.append(wrap(model))
    results = [_train(each) for each in wrappers]
    same = all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    counts = [
        _count_collectives(lambda wrap=wrap: wrap(_build()))
        for wrap in (DistributedDataParallel, qsync.DDP)
    ]
    return same, results[0][0] == results[1][0], results[0][2], results[1][2], counts


def test_an_all_float32_plan_is_torchs_ddp_to_the_bit_with_no_more_collectives(pool):
    for same, same_losses, calls, own_calls, (expected, own) in pool.run(
        _compare_with_torch
    ).results:
        assert same
        assert same_losses
        assert calls == own_calls == 20
        assert expected
        assert own == expected


def _run_mixed():
    """Rank 1 in int8: its gradient counts half, and all masters stay equal."""
    model = _build()
    ddp = qsync.DDP(qsync.apply(model, _plan_second_rank(model, "int8")))
    alone = copy.deepcopy(model)
    alone(_batch(0)).square().mean().backward()
    ddp(_batch(0)).square().mean().backward()
    mean = [each.grad.clone() for each in alone.parameters()]
    for grad in mean:
        distributed.all_reduce(grad.div_(2))
    equal = all(
        torch.allclose(grad, each.grad, atol=1e-7)
        for grad, each in zip(mean, ddp.parameters(), strict=True)
    )
    _, masters, _ = _train(qsync.DDP(model), 5)
    return equal, masters, get_precision(model[0]), ddp.make_scaler().is_enabled()


def test_ranks_of_unlike_precisions_average_their_gradients(pool):
    first, second = pool.run(_run_mixed).results
    assert first[0]
    assert second[0]
    assert (first[2], second[2]) == ("fp32", "int8")
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert not first[3]


class _Branches(nn.Module):
    """A model of which each rank uses another branch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return (self.first, self.second)[distributed.get_rank()](x)


def _leave_unused():
    torch.manual_seed(0)
    model = _Branches()
    qsync.apply(model, qsync.Plan.uniform(model, "int8"))
    alone = copy.deepcopy(model)
    alone(_batch(0)).square().mean().backward()
    ddp = qsync.DDP(model, find_unused_parameters=True)
    ddp(_batch(0)).square().mean().backward()
    near = []
    for own, grad in zip(alone.parameters(), model.parameters(), strict=True):
        mean = (torch.zeros_like(own) if own.grad is None else own.grad) / 2
        distributed.all_reduce(mean)
        near.append(torch.allclose(mean, torch.zeros_like(own) if grad.grad is None else grad.grad))
    return near, model.idle.weight.grad is None


def test_parameters_that_a_rank_does_not_use_are_found(pool):
    for near, is_idle in pool.run(_leave_unused).results:
        assert all(near)
        assert is_idle


def _disagree(what):
    rank = distributed.get_rank()
    model = _build(8 + (what == "shape" and rank))
    if what == "buffer":
        model.register_buffer("mask", torch.ones(4 + rank))
    if what == "extra" and rank:
        model.append(nn.Linear(3, 3))
    if what == "order" and rank:
        model = nn.ModuleDict({"2": model[2], "0": model[0]})
    if what == "plan":
        qsync.apply(model, qsync.Plan.uniform(model, ("fp32", "int8")[rank]))
    if what == "no plan" and rank:
        qsync.apply(model, qsync.Plan.uniform(model, "int8"))
    if what == "type" and rank:
        model = model.double()
    if what == "types":
        model = model.bfloat16()
    if what == "frozen" and rank:
        model[0].weight.requires_grad_(False)
    begun_s = time.monotonic()
    try:
        if what == "ranks":
            operators = qsync.Plan.uniform(model, "fp32").operators
            qsync.apply(model, qsync.Plan(operators=operators, ranks=(RankPlan(lowered={}),) * 3))
        qsync.DDP(model)
    except ConfigError as error:
        return str(error), time.monotonic() - begun_s
    return "", 0.0


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("plan", "plan: expected the same on all ranks"),
        ("no plan", "got none on rank 0"),
        ("shape", "parameter '0.weight': expected the same on all ranks, got float32 8x6 trained"),
        ("type", "parameter '0.weight': expected the same on all ranks, got float32"),
        ("types", "parameter '0.weight': expected float32, as gradients are summed in it"),
        ("frozen", "got float32 8x6 trained on rank 0 and float32 8x6 frozen on rank 1"),
        ("ranks", "plan: expected one of 1 or 2 ranks, got one made for 3"),
        ("buffer", "buffer 'mask': expected the same on all ranks, got float32 4 on rank 0 and"),
        ("extra", "parameter '3.weight': expected the same on all ranks, got missing on rank 0"),
        ("order", "parameters: expected rank 0's order on all ranks, got another on rank 1"),
    ],
)
def test_what_ranks_disagree_on_is_raised_on_all_of_them(pool, what, message):
    for text, spent_s in pool.run(_disagree, what).results:
        assert message in text
        assert spent_s < 10


def _build_in_other_orders():
    """Rank 0 has a group of its own before, and both build two wrappers, each in its own order."""
    rank = distributed.get_rank()
    alone = distributed.new_group([0])
    if rank == 0:
        qsync.DDP(_build(), device_mesh=DeviceMesh.from_group(alone, "cpu"))
    begun_s = time.monotonic()
    models = [_build(8), _build(9)]
    try:
        for model in models[:: 1 - 2 * rank]:
            qsync.DDP(model)
    except ConfigError as error:
        return str(error), time.monotonic() - begun_s
    return "", 0.0


def test_wrappers_that_ranks_build_in_other_orders_are_told_apart(pool):
    for text, spent_s in pool.run(_build_in_other_orders).results:
        assert "parameter '0.weight': expected the same on all ranks, got float32 8x6" in text
        assert spent_s < 10


def _stay_away():
    group = distributed.new_group([0, 1])
    if distributed.get_rank():
        return ""
    world = Group.world()
    before, world.timeout = world.timeout, timedelta(seconds=1)
    try:
        qsync.DDP(_build(), process_group=group)
    except CommError as error:
        return str(error)
    finally:
        world.timeout = before
    return ""


def test_a_rank_that_does_not_come_is_named(pool):
    text = pool.run(_stay_away).results[0]
    assert "handshake: expected rank 1 within 1 s" in text


def _come_late():
    """Rank 1 comes when rank 0 has given up; then both try again."""
    group, world = distributed.new_group([0, 1]), Group.world()
    board, rank = world.board("late"), distributed.get_rank()
    before, world.timeout = world.timeout, timedelta(seconds=60 if rank else 0.5)
    if rank:
        board.wait(["given up"])
    try:
        qsync.DDP(_build(), process_group=group)
    except CommError as error:
        text = str(error)
        board.set("given up", "")
    else:
        text = ""
    world.timeout = before
    ddp = qsync.DDP(_build(), process_group=group)
    return text, sum(1 for _ in ddp.parameters())


def test_a_handshake_that_one_rank_gave_up_fails_on_all_and_can_be_tried_again(pool):
    first, second = pool.run(_come_late).results
    assert "expected rank 1 within 0.5 s" in first[0]
    assert "another had given up" in second[0]
    assert first[1] == second[1] == 4


def _train_alone():
    """Each rank is a world of its own, with one operator whose bias is frozen."""
    rank = distributed.get_rank()
    groups = [distributed.new_group([each]) for each in range(2)]
    model = nn.Linear(6, 3)
    model.bias.requires_grad_(False)
    qsync.apply(model, qsync.Plan.uniform(model, "bf16"))
    alone = copy.deepcopy(model)
    for each in (alone, qsync.DDP(model, process_group=groups[rank])):
        each(_batch(0)).square().mean().backward()
    return torch.equal(alone.weight.grad, model.weight.grad), model.bias.grad is None


def test_a_world_of_one_rank_trains_one_operator_as_without_a_wrapper(pool):
    assert pool.run(_train_alone).results == [(True, True)] * 2


def _accumulate():
    """Two micro-batches, of which only the second sums gradients, through a norm with statistics."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3)
    model = qsync.apply(nn.Sequential(*layers), qsync.Plan.uniform(nn.Sequential(*layers), "int8"))
    alone = copy.deepcopy(model)
    for step in range(2):
        alone(_batch(step)).square().mean().backward()
    ddp = qsync.DDP(model)
    with ddp.no_sync():
        ddp(_batch(0)).square().mean().backward()
    ddp(_batch(1)).square().mean().backward()
    pairs = list(zip(alone.parameters(), model.parameters(), strict=True))
    for own, _ in pairs:
        distributed.all_reduce(own.grad.div_(2))
    near = all(torch.allclose(own.grad, each.grad, atol=1e-6) for own, each in pairs)
    return near, torch.equal(model[1].running_mean, alone[1].running_mean)


def test_micro_batches_add_up_and_statistics_are_those_of_each_rank(pool):
    for is_near, has_own_statistics in pool.run(_accumulate).results:
        assert is_near
        assert has_own_statistics


def _overflow():
    rank = distributed.get_rank()
    model = _build()
    ddp = qsync.DDP(qsync.apply(model, _plan_second_rank(model, "fp16")))
    scaler = ddp.make_scaler(init_scale=2.0**10)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    scales, masters = [], []
    for step in range(3):
        optimizer.zero_grad()
        batch = _batch(step) * (1e6 if rank and step == 1 else 1.0)
        scaler.scale(ddp(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        masters.append([each.detach().clone() for each in ddp.parameters()])
    return scales, masters


def test_an_overflow_of_one_rank_skips_the_step_on_all(pool):
    first, second = pool.run(_overflow).results
    for scales, masters in (first, second):
        assert scales == [1024.0, 512.0, 512.0]
        assert all(torch.equal(a, b) for a, b in zip(masters[0], masters[1], strict=True))
        assert not torch.equal(masters[1][0], masters[2][0])
    assert all(torch.equal(a, b) for a, b in zip(first[1][2], second[1][2], strict=True))


def _mean_square(model, batch):
    return model(batch).square().mean()


def _replan():
    model = _build()
    operators = qsync.Plan.uniform(model, "fp32").operators
    plan = qsync.Plan(operators=operators, ranks=(RankPlan(lowered={}),) * 2, step_s=1e-9)
    ddp = qsync.DDP(qsync.apply(model, plan), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def run(num_steps):
        for step in range(num_steps):
            optimizer.zero_grad()
            if step % 2:
                with ddp.no_sync():
                    _mean_square(ddp, _batch(step)).backward()
            _mean_square(ddp, _batch(step)).backward()
            optimizer.step()

    run(50)
    was_drifting = ddp.drift.is_drifting
    chosen = ddp.replan([_batch(0), _batch(1)], _mean_square, precisions=("fp32", "bf16"))
    run(3)
    masters = [each.detach().clone() for each in ddp.parameters()]
    return was_drifting, ddp.plan == chosen, chosen.fingerprint(), ddp.drift.predicted_s, masters


def test_drift_is_noticed_and_a_run_goes_on_by_a_new_plan(pool):
    first, second = pool.run(_replan).results
    for was_drifting, is_adopted, _, predicted_s, _ in (first, second):
        assert was_drifting
        assert is_adopted
        assert predicted_s > 1e-9
    assert first[2] == second[2]
    assert all(torch.equal(a, b) for a, b in zip(first[4], second[4], strict=True))


def _replan_for_half():
    model = _build()
    ddp = qsync.DDP(model)
    was_enabled = ddp.make_scaler().is_enabled()
    chosen = _plan_second_rank(model, "fp16")
    with mock.patch("qsync.profiler.planning.plan", return_value=chosen):
        ddp.replan([], _mean_square)
    return was_enabled, ddp.make_scaler().is_enabled()


def test_a_new_plan_in_half_precision_on_one_rank_scales_losses_on_all(pool):
    assert pool.run(_replan_for_half).results == [(False, True)] * 2


class _Steps(DriftWatch):
    def __init__(self):
        super().__init__(1.0)
        self.steps_s = []

    def record(self, step_s):
        self.steps_s.append(step_s)


def _watch():
    """Steps that are watched, of which one micro-batch is not summed and one is an evaluation."""

    def sum_late(_state, bucket):
        def wait(future):
            time.sleep(0.1)
            return future.value()[0]

        return distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(wait)

    ddp = qsync.DDP(_build())
    ddp.drift = steps = _Steps()
    ddp.register_comm_hook(None, sum_late)
    with ddp.no_sync():
        _mean_square(ddp, _batch(0)).backward()
    _mean_square(ddp, _batch(0)).backward()
    _mean_square(ddp.eval(), _batch(0)).backward()
    return steps.steps_s


def test_a_watched_step_ends_when_its_gradients_are_summed(pool):
    for steps_s in pool.run(_watch).results:
        assert len(steps_s) == 1
        assert steps_s[0] >= 0.1


def _shard():
    mesh = Group.world().device_mesh()

    def lower(precision):
        model = _build()
        return qsync.apply(model, qsync.Plan.uniform(model, precision))

    whole = qsync.DDP(lower("int8"))
    parts = lower("int8")
    for layer in (parts[0], parts[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(parts, mesh=mesh)
    ways = []
    for model in (whole, parts):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(_batch(step)).square().mean().backward()
            optimizer.step()
        ways.append([getattr(each, "full_tensor", each.clone)() for each in model.parameters()])
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*ways, strict=True))


def _overflow_in_parts():
    """Rank 1 alone computes in fp16, overflows in its second step, and holds the second halves."""
    rank = distributed.get_rank()
    model = _build()
    qsync.apply(model, _plan_second_rank(model, "fp16"))
    fully_shard(model, mesh=Group.world().device_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales, masters = [], []
    for step in range(3):
        optimizer.zero_grad()
        batch = _batch(step) * (1e6 if rank and step == 1 else 1.0)
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        masters.append([each.to_local().clone() for each in model.parameters()])
    return scales, masters


def test_an_overflow_skips_the_step_of_sharded_ranks_too(pool):
    for scales, masters in pool.run(_overflow_in_parts).results:
        assert scales == [1024.0, 512.0, 512.0]
        assert all(torch.equal(a, b) for a, b in zip(masters[0], masters[1], strict=True))
        assert not torch.equal(masters[1][0], masters[2][0])


def test_fully_shard_trains_a_lowered_model_as_ddp_does(pool):
    assert all(pool.run(_shard).results)
