import copy
import logging
import threading

import pytest
import torch
from optimizers import COPIED, INVERTED, bits, make_parameters, set_gradients
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shared.comms.init import alone
from shared.errors import ConfigError, DataError
from swift.undo.undoable import undoable

DTYPES = [torch.float32, torch.bfloat16]


def run_steps(opt, steps):
    for step in steps:
        set_gradients(opt.parameters, step)
        opt.step()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*INVERTED, *COPIED])
def test_every_step_is_undone_to_the_bit_and_repeats_itself(name, dtype):
    make = (INVERTED | COPIED)[name]
    opt = undoable(make(make_parameters(dtype)))
    undisturbed = undoable(make(make_parameters(dtype)))
    held = [p.data_ptr() for p in opt.parameters]
    for step in range(4):
        before, keys = bits(opt.optimizer), set(opt.optimizer.state)
        run_steps(opt, [step])
        after = bits(opt.optimizer)
        assert after != before
        assert opt.marks == [step + 1] * len(opt.parameters)
        opt.zero_grad()
        opt.undo()
        assert bits(opt.optimizer) == before
        assert set(opt.optimizer.state) == keys
        assert opt.marks == [step] * len(opt.parameters)
        run_steps(opt, [step])
        assert bits(opt.optimizer) == after
        run_steps(undisturbed, [step])
    assert bits(opt.optimizer) == bits(undisturbed.optimizer)
    assert [p.data_ptr() for p in opt.parameters] == held


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", [name for name in INVERTED | COPIED if not name.startswith("adam") or name == "adamax"]
)
def test_the_step_is_torchs_own_to_the_bit(name, dtype):
    make = (INVERTED | COPIED)[name]
    opt, torchs = undoable(make(make_parameters(dtype))), make(make_parameters(dtype))
    theirs = [p for group in torchs.param_groups for p in group["params"]]
    for step in range(4):
        run_steps(opt, [step])
        set_gradients(theirs, step)
        torchs.step()
        assert bits(opt.optimizer) == bits(torchs)


@pytest.mark.parametrize("mode", ["exact", "arith", "commit"])
@pytest.mark.parametrize("name", ["adam", "adam-decay", "adamw", "adamw-fused"])
def test_adams_step_is_torchs_within_its_rounding_and_torch_resumes_from_it(name, mode):
    opt, torchs = (
        undoable(INVERTED[name](make_parameters()), mode),
        INVERTED[name](make_parameters()),
    )
    theirs = torchs.param_groups[0]["params"]
    for step in range(8):
        run_steps(opt, [step])
        set_gradients(theirs, step)
        torchs.step()
    ours = copy.deepcopy(opt.optimizer.state_dict())
    assert ours.keys() == torchs.state_dict().keys()
    for place, state in torchs.state_dict()["state"].items():
        assert ours["state"][place].keys() == state.keys()
        for key, value in state.items():
            mine = ours["state"][place][key]
            assert (mine.dtype, mine.shape, mine.stride()) == (
                value.dtype,
                value.shape,
                value.stride(),
            )
            torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-6)
    for mine, value in zip(opt.parameters, theirs, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6)
    # torch's own optimizer goes on from our state, and ours from torch's.
    fresh = INVERTED[name](opt.parameters)
    fresh.load_state_dict(ours)
    set_gradients(opt.parameters, 9)
    fresh.step()
    set_gradients(theirs, 9)
    torchs.step()
    for mine, value in zip(opt.parameters, theirs, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6)


def test_all_modes_step_alike():
    for name in ("adamw", "sgd-momentum", "rmsprop-all"):
        results = []
        for mode in ("exact", "arith", "commit"):
            opt = undoable(INVERTED[name](make_parameters()), mode)
            run_steps(opt, range(4))
            results.append(bits(opt.optimizer))
        assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "muon", "adagrad"])
def test_parameters_step_and_return_one_by_one(name):
    make = (INVERTED | COPIED)[name]
    opt, whole = undoable(make(make_parameters())), undoable(make(make_parameters()))
    run_steps(opt, [0])
    run_steps(whole, [0])
    set_gradients(opt.parameters, 1)
    before = bits(opt.optimizer)
    opt.update([1])
    opt.update([0])
    assert opt.marks[:2] == [2, 2]
    assert set(opt.marks[2:]) <= {1}
    torn = bits(opt.optimizer)
    assert torn[2:] == before[2:]
    opt.undo_only([1])
    assert opt.marks[:2] == [2, 1]
    assert bits(opt.optimizer) == [torn[0], *before[1:]]
    opt.update(range(1, len(opt.marks)))
    set_gradients(whole.parameters, 1)
    whole.step()
    assert bits(opt.optimizer) == bits(whole.optimizer)


@pytest.mark.parametrize("name", ["adamw", "sgd-nesterov", "rmsprop-all", "adagrad-decay"])
def test_hyperparameters_of_the_step_are_used_whatever_became_of_them(name):
    opt = undoable(INVERTED[name](make_parameters()))
    for group in opt.param_groups:
        group["lr"] = torch.tensor(0.03)
    run_steps(opt, [0])
    before = bits(opt.optimizer)
    run_steps(opt, [1])
    for group in opt.param_groups:
        group["lr"].fill_(7.0)
        group["weight_decay"] = 0.9
        if "betas" in group:
            group["betas"] = (0.1, 0.2)
    opt.undo()
    assert bits(opt.optimizer) == before


def test_groups_have_hyperparameters_of_their_own():
    p = make_parameters()
    groups = [{"params": p[:1], "lr": 1e-3}, {"params": p[1:], "weight_decay": 0.4, "eps": 1e-4}]
    opt = undoable(torch.optim.AdamW(copy.copy(groups), lr=1e-2))
    torchs = torch.optim.AdamW([{**groups[0]}, {**groups[1]}], lr=1e-2)
    assert [id(x) for x in opt.parameters] == [id(x) for x in p]
    theirs = make_parameters()
    for group, start, end in zip(torchs.param_groups, (0, 1), (1, 4), strict=True):
        group["params"] = theirs[start:end]
    for step in range(3):
        run_steps(opt, [step])
        set_gradients(theirs, step)
        torchs.step()
    for mine, value in zip(opt.parameters, theirs, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6)
    before = bits(opt.optimizer)
    run_steps(opt, [3])
    opt.undo()
    assert bits(opt.optimizer) == before


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "muon"])
def test_a_parameter_without_gradient_passes_the_step(name):
    opt = undoable((INVERTED | COPIED)[name](make_parameters()))
    before = bits(opt.optimizer)
    set_gradients(opt.parameters, 0)
    opt.parameters[0].grad = None
    opt.step()
    assert opt.marks[0] == 1
    assert bits(opt.optimizer)[0] == before[0]
    opt.undo()
    assert bits(opt.optimizer) == before


def test_gradients_in_another_layout_serve():
    opt, straight = (undoable(INVERTED["adamw"](make_parameters())) for _ in range(2))
    for step in range(2):
        set_gradients(opt.parameters, step)
        for p in opt.parameters:
            p.grad = p.grad.t().contiguous().t() if p.dim() == 2 else p.grad
        before = bits(opt.optimizer)
        opt.step()
        run_steps(straight, [step])
        assert bits(opt.optimizer) == bits(straight.optimizer)
    opt.undo()
    assert bits(opt.optimizer) == before


@pytest.mark.parametrize("name", ["adam", "sgd", "adagrad"])
def test_other_types_and_sparse_gradients_go_by_copies(name, caplog):
    opt = undoable(INVERTED[name](make_parameters(torch.float64)))
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            before = bits(opt.optimizer)
            run_steps(opt, [step])
            opt.undo()
            assert bits(opt.optimizer) == before
            run_steps(opt, [step])
    assert caplog.text.count("by copies") == 1
    if name != "adam":
        opt = undoable(INVERTED[name](make_parameters()))
        set_gradients(opt.parameters, 0)
        for p in opt.parameters:
            p.grad = p.grad.to_sparse()
        before = bits(opt.optimizer)
        opt.step()
        assert bits(opt.optimizer) != before
        opt.undo()
        assert bits(opt.optimizer) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*INVERTED, *COPIED])
def test_a_newcomers_state_has_the_names_shapes_and_types_of_a_step(name, dtype):
    make = (INVERTED | COPIED)[name]
    stepped, fresh = (undoable(make(make_parameters(dtype))) for _ in range(2))
    run_steps(stepped, [0])
    for index in range(len(stepped.marks)):
        made, expected = fresh.prepare(index), stepped.state_of(index)
        assert list(made) == list(expected)
        for key, one in made.items():
            assert (one.shape, one.dtype) == (expected[key].shape, expected[key].dtype), key


# torch does not step shards by the other two.
@pytest.mark.parametrize(
    "name", [name for name in INVERTED | COPIED if name not in ("adafactor", "rprop")]
)
def test_a_newcomers_state_of_a_shard_is_sharded_as_that_of_a_step(name):
    make = (INVERTED | COPIED)[name]
    with alone() as group:
        mesh = group.device_mesh()
        stepped, fresh = (
            undoable(
                make(
                    [
                        torch.nn.Parameter(
                            distribute_tensor(p, mesh, [Shard(0) if p.dim() else Replicate()])
                        )
                        for p in make_parameters()
                    ]
                )
            )
            for _ in range(2)
        )
        for p in stepped.parameters:
            p.grad = torch.ones_like(p)
        stepped.step()
        for index, (mine, theirs) in enumerate(
            zip(fresh.parameters, stepped.parameters, strict=True)
        ):
            fresh.prepare(index)
            made, expected = (
                opt.optimizer.state[p] for opt, p in ((fresh, mine), (stepped, theirs))
            )
            assert list(made) == list(expected)
            for key, one in made.items():
                other = expected[key]
                assert type(one) is type(other), key
                if isinstance(one, torch.Tensor):
                    assert (one.shape, one.dtype) == (other.shape, other.dtype), key
                    assert (one.stride(), one.device) == (other.stride(), other.device), key
                    assert not one.requires_grad, key
                assert getattr(one, "placements", None) == getattr(other, "placements", None), key


def test_memory_for_undoing_is_as_said():
    count = 100_000
    opt = undoable(torch.optim.AdamW([torch.nn.Parameter(torch.randn(count))], lr=1e-3))
    assert opt.undo_bytes == 0
    g = torch.Generator().manual_seed(0)
    for _ in range(8):
        opt.parameters[0].grad = torch.randn(count, generator=g)
        opt.step()
        assert 3 * count <= opt.undo_bytes <= 3.5 * count
    opt.confirm()
    assert opt.undo_bytes >= 3 * count
    sgd = undoable(torch.optim.SGD([torch.nn.Parameter(torch.randn(count))], lr=1e-3))
    run_steps(sgd, [0])
    assert count <= sgd.undo_bytes <= 1.1 * count
    muon = undoable(torch.optim.Muon([torch.nn.Parameter(torch.randn(100, 100))]))
    run_steps(muon, [0, 1])
    assert muon.undo_bytes == 2 * 4 * 10_000


@pytest.mark.parametrize("name", list(INVERTED))
def test_in_bfloat16_too_a_value_takes_a_byte_and_no_copy(name):
    count = 50_000
    parameter = torch.nn.Parameter(torch.randn(count).to(torch.bfloat16))
    opt = undoable(INVERTED[name]([parameter]))
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(count, generator=draw).to(torch.bfloat16)
        opt.step()
    values = sum(one.numel() for key, one in opt.state_of(0).items() if key != "step")
    assert values <= opt.undo_bytes <= 1.3 * values


def test_what_cannot_be_undone_any_more_says_so_and_changes_nothing():
    opt = undoable(INVERTED["adamw"](make_parameters()))
    with pytest.raises(DataError, match="parameter 0 to undo, got none"):
        opt.undo()
    run_steps(opt, [0])
    opt.undo()
    with pytest.raises(DataError, match="got none"):
        opt.undo()
    for spoil, words in [
        (lambda p: p.grad.zero_(), "'grad' was changed"),
        (lambda p: p.detach().add_(1), "'param' was changed"),
        (lambda p: opt.optimizer.state[p]["exp_avg"].mul_(2), "'exp_avg' was changed"),
        (
            lambda p: opt.optimizer.load_state_dict(copy.deepcopy(opt.optimizer.state_dict())),
            "'step'",
        ),
        (lambda p: setattr(p, "data", p.data.clone()), "'param' was changed"),
    ]:
        run_steps(opt, [1])
        spoil(opt.parameters[2])
        now = bits(opt.optimizer)
        with pytest.raises(DataError, match=words):
            opt.undo()
        assert bits(opt.optimizer) == now
    run_steps(opt, [2])
    opt.confirm()
    with pytest.raises(DataError, match="confirmed"):
        opt.undo()
    run_steps(opt, [3])
    opt.mark(1, 40)
    assert opt.marks[1] == 40
    with pytest.raises(DataError, match="at version 40"):
        opt.undo()
    opt.undo_only([0, 2, 3])


def test_a_peer_continues_from_what_it_is_given():
    for name in ("adamw", "sgd-momentum", "rmsprop-all", "adagrad", "nadam", "muon"):
        make = (INVERTED | COPIED)[name]
        opt, peer = undoable(make(make_parameters())), undoable(make(make_parameters(seed=1)))
        run_steps(opt, range(3))
        for index in range(len(opt.parameters)):
            given, taken = opt.state_of(index), peer.prepare(index)
            assert next(iter(given)) == "param"
            assert given.keys() == taken.keys()
            for key, value in given.items():
                assert not value.requires_grad
                taken[key].copy_(value)
            peer.mark(index, 3)
        assert bits(peer.optimizer) == bits(opt.optimizer)
        run_steps(opt, [3])
        run_steps(peer, [3])
        assert bits(peer.optimizer) == bits(opt.optimizer)
        peer.undo()
        assert peer.marks == [3] * len(peer.parameters)
        opt.mark(0, 0)
        kept = 0 if name != "adagrad" else 2
        assert len(opt.optimizer.state.get(opt.parameters[0], {})) == kept


def test_buckets_step_in_threads_of_their_own():
    opt, whole = (undoable(INVERTED["adamw"](make_parameters())) for _ in range(2))
    for step in range(5):
        set_gradients(opt.parameters, step)
        threads = [threading.Thread(target=opt.update, args=([i],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run_steps(whole, [step])
    assert opt.marks == [5] * 4
    assert bits(opt.optimizer) == bits(whole.optimizer)


def test_autograd_notices_our_steps():
    p = torch.nn.Parameter(torch.ones(3))
    opt = undoable(torch.optim.AdamW([p]))
    y = (p * p).sum()
    p.grad = torch.ones(3)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_schedulers_and_scalers_take_it(recwarn):
    opt = undoable(INVERTED["adamw"](make_parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(opt.optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = scaler.scale(sum(p.square().sum() for p in opt.parameters))
    loss.backward()
    scaler.unscale_(opt)
    torch.testing.assert_close(opt.parameters[0].grad, 2 * opt.parameters[0].detach())
    scaler.step(opt)
    scaler.update()
    schedule.step()
    assert opt.marks == [1] * 4
    assert opt.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.unchecked
def test_what_cannot_be_wrapped_is_refused():
    parameters = make_parameters()
    with pytest.raises(ConfigError, match="got 'fast'"):
        undoable(torch.optim.SGD(parameters), mode="fast")
    with pytest.raises(ConfigError, match="closure"):
        undoable(torch.optim.LBFGS(parameters))
    with pytest.raises(ConfigError, match="group 0 of SGD"):
        undoable(torch.optim.SGD(parameters, differentiable=True))
    hooked = torch.optim.SGD(parameters)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="hooks"):
        undoable(hooked)
    opt = undoable(torch.optim.SGD(parameters))
    opt.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ConfigError, match="4 parameters that were wrapped, got 5"):
        opt.step()
    with pytest.raises(ConfigError, match="'arith' only"):
        undoable(torch.optim.SGD(parameters)).undo([p.detach() for p in parameters])


class KeepsNumbers(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1


def test_numbers_that_an_optimizer_keeps_are_undone():
    opt = undoable(KeepsNumbers(make_parameters(), lr=0.1, momentum=0.9))
    assert not opt.is_coupled
    for step in range(3):
        before = bits(opt.optimizer)
        run_steps(opt, [step])
        opt.undo()
        assert bits(opt.optimizer) == before
        run_steps(opt, [step])
    assert opt.optimizer.state[opt.parameters[0]]["count"] == 3
    assert set(opt.state_of(0)) == {"param", "momentum_buffer"}


@pytest.mark.parametrize("name", [*INVERTED, *COPIED])
def test_other_tensors_take_the_parameters_places(name):
    opt, undisturbed = (undoable((INVERTED | COPIED)[name](make_parameters())) for _ in range(2))
    schedules = [
        torch.optim.lr_scheduler.StepLR(one.optimizer, 1, 0.5) for one in (opt, undisturbed)
    ]
    run_steps(opt, [0, 1])
    run_steps(undisturbed, [0, 1])
    others = [torch.nn.Parameter(one.detach().clone()) for one in opt.parameters]
    opt.rebind(others, [opt.optimizer.state[one] for one in opt.parameters])
    assert opt.marks == [2] * len(others)
    with pytest.raises(DataError, match="to undo, got none"):
        opt.undo()
    for one, schedule in zip((opt, undisturbed), schedules, strict=True):
        schedule.step()
        run_steps(one, [2])
    assert all(one is other for one, other in zip(opt.parameters, others, strict=True))
    assert bits(opt.optimizer) == bits(undisturbed.optimizer)
