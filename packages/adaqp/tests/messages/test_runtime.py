"""Policies on two ranks: what each sends, what noise does, and what late messages are."""

from types import SimpleNamespace

import pytest
import torch

import adaqp
from adaqp.messages import runtime
from adaqp.policy import Adaptive, Drop, Exact, Fixed, Stale
from shared.errors import ConfigError
from shared.kernels.segment import spmm


def gcn(dg, hidden=16, dropout=0.0):
    torch.manual_seed(0)
    return adaqp.nn.gcn(dg, [dg.feat.shape[1], hidden, hidden, dg.num_classes], dropout=dropout)


def train(folder, policy, epochs, settings):
    dg = adaqp.load(folder)
    model = gcn(dg)
    with dg.messages(policy, **settings) as messages:
        trainer = adaqp.Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-2))
        history = trainer.fit(epochs)
        messages.settle()
        ledger = dg.group.ledger.snapshot().by_phase()
    sent = {name: cell.sent_bytes for name, cell in ledger.items()}
    return history, sent, messages.report(), [len(dg.pull.send_rows), dg.num_halo]


@pytest.mark.parametrize("backward", ["push", "pull"])
@pytest.mark.parametrize(("bits", "row_bytes"), [(8, 16 + 4), (4, 8 + 4), (2, 4 + 4), (1, 2 + 4)])
def test_fixed_sends_what_its_width_says(bits, row_bytes, backward, sbm, cut, pool2):
    settings = {"backward": backward}
    runs = pool2.run(train, cut(sbm, 2), Fixed(bits), 2, settings).results
    earlier = pool2.run(train, cut(sbm, 2), Fixed(bits), 2, settings).results
    for (_, before, _, _), (_, after, _, (num_send, num_halo)) in zip(runs, earlier, strict=True):
        for channel, num_rows in (
            ("forward0", num_send),
            ("backward0", num_send if backward == "pull" else num_halo),
        ):
            expected = 2 * (16 + row_bytes * num_rows)
            assert abs(after[channel] - before[channel] - expected) <= 2 * 8  # alignment


def test_noise_shrinks_with_the_width(sbm, cut, pool2):
    exact = pool2.run(train, cut(sbm, 2), Exact(), 1, {}).results[0][0].loss[0]
    gaps = []
    for bits in (1, 2, 4, 8):
        loss = pool2.run(train, cut(sbm, 2), Fixed(bits), 1, {}).results[0][0].loss[0]
        gaps.append(abs(loss - exact))
    assert gaps[0] > gaps[2] > gaps[3]
    assert gaps[3] < 1e-3


def mean_of_draws(folder, bits, draws):
    """Mean over seeds of an aggregation at `bits`, and the exact one."""
    dg = adaqp.load(folder)
    x = torch.randn(dg.num_nodes, 24, generator=torch.Generator().manual_seed(1))[dg.global_ids]
    x.requires_grad_()
    exact = dg.aggregate(x).detach()
    total, squared = torch.zeros_like(exact), 0.0
    for seed in range(draws):
        with dg.messages(Fixed(bits), seed=seed, wire_dtype=torch.float32):
            out = dg.aggregate(x).detach()
        total += out
        squared += float((out - exact).square().sum())
    alpha_sq = dg.operator("gcn").alpha_sq
    spread = dg.halo(x).detach()[dg.num_local :].aminmax(dim=1)
    step = (spread.max - spread.min) / (2**bits - 1)
    predicted = float((alpha_sq * step**2).sum()) * 22 / 6
    return float((total / draws - exact).norm() / exact.norm()), squared / draws, predicted


def test_aggregation_is_unbiased_and_its_variance_is_the_predicted_one(sbm, cut, pool2):
    for bits in (2, 4):
        for bias, variance, predicted in pool2.run(mean_of_draws, cut(sbm, 2), bits, 60).results:
            single = (predicted**0.5) / 10  # far below one draw's error
            assert bias < single
            assert variance == pytest.approx(predicted, rel=0.1)


def test_adaptive_assigns_and_both_sides_agree(sbm, cut, pool2):
    policy = Adaptive(every=4, first_at=2, group_size=20)
    for history, _, bits, _ in pool2.run(train, cut(sbm, 2), policy, 10, {}).results:
        assert set(bits) == {"forward0", "forward1", "backward0", "backward1"}
        assert {b for shares in bits.values() for b in shares} <= {2, 4, 8}
        assigned = [e for e, s in enumerate(history.seconds["assign"]) if s > 0]
        assert assigned == [2, 4, 8]
        assert history.loss[-1] < history.loss[0]


def test_lam_goes_from_least_time_to_least_variance(sbm, cut, pool2):
    links = adaqp.LinkTable.uniform(2, 12.5e6, 2e-4)
    for lam, share_of_8 in ((0.0, 0.0), (1.0, 1.0)):
        policy = Adaptive(every=50, first_at=1, lam=lam)
        for _, _, bits, _ in pool2.run(train, cut(sbm, 2), policy, 3, {"links": links}).results:
            assert bits["forward0"].get(8, 0.0) == share_of_8
            # Rows whose gradient is zero have no noise at any width and stay narrow.
            assert (bits["backward1"].get(8, 0.0) > 0.5) == (lam == 1)


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("solver", ["greedy", "milp"])
@pytest.mark.parametrize("aware", [False, True])
def test_every_way_of_assigning_trains(scope, solver, aware, directed, cut, pool2):
    policy = Adaptive(
        every=3, first_at=1, scope=scope, solver=solver, overlap_aware=aware, bits=(2, 8, 32)
    )
    settings = {"links": adaqp.LinkTable.uniform(2, 12.5e6, 2e-4)}
    history = pool2.run(train, cut(directed, 2), policy, 5, settings).results[0][0]
    assert history.loss[-1] < history.loss[0]


def stale_by_hand(folder, steps):
    """Two aggregations a step with weights that change, late and exact, for comparison."""
    dg = adaqp.load(folder)
    results = []
    with dg.messages(Stale(), overlap="edges"):
        for step in range(steps):
            x = (dg.feat[:, :8] * (step + 1)).requires_grad_()
            out = dg.aggregate(x, "sum")
            (out * (step + 2)).sum().backward()
            results.append((out.detach(), x.grad))
    op = dg.operator("sum")
    expected = []
    for step in range(steps):
        late = max(step - 1, 0)
        with torch.no_grad():
            now = dg.aggregate(dg.feat[:, :8] * (step + 1), "sum")
            ones = torch.ones(dg.num_local, 8)
            grad_now = dg.aggregate(ones * (step + 2), "sum")
            halo = dg.halo(dg.feat[:, :8].contiguous())[dg.num_local :]
            ones_halo = torch.ones(dg.num_halo, 8)
        first = dg.num_central
        now[first:] += spmm(op.halo, halo) * (late - step)
        grad_now[first:] += spmm(op.halo, ones_halo) * (late - step)
        expected.append((now, grad_now))
    return [
        (float((a - b).abs().max()), float((c - d).abs().max()))
        for (a, c), (b, d) in zip(results, expected, strict=True)
    ]


def test_stale_uses_rows_and_gradients_of_the_step_before(sbm, cut, pool2):
    for errors in pool2.run(stale_by_hand, cut(sbm, 2), 4).results:
        for forward, backward in errors:
            assert forward < 1e-4
            assert backward < 1e-4


def test_drop_sends_nothing_and_sees_zeros(sbm, cut, pool2):
    _, sent, bits, _ = pool2.run(train, cut(sbm, 2), Drop(), 2, {}).results[0]
    again = pool2.run(train, cut(sbm, 2), Drop(), 2, {}).results[0]
    assert again[1].get("forward0", 0) == sent.get("forward0", 0)
    assert bits["forward0"] == {0: 1.0}


def aggregate_then_halo(folder):
    """Gradients of steps that aggregate and of steps that use halo rows, in turns and alone."""
    dg = adaqp.load(folder)

    def step(kind):
        x = dg.feat[:, :8].clone().requires_grad_()
        out = dg.aggregate(x) if kind == "aggregate" else dg.halo(x)
        out.square().sum().backward()
        return x.grad

    kinds = ["aggregate", "halo", "aggregate", "halo"]
    with dg.messages(Fixed(8)) as messages:
        in_turns = [step(kind) for kind in kinds]
        names = set(messages.report())
    alone = []
    for kind in kinds:
        with dg.messages(Exact()):
            alone.append(step(kind))
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(in_turns, alone, strict=True)]
    return errors, names


def test_steps_that_aggregate_and_steps_that_use_halo_rows_take_turns(sbm, cut, pool2):
    for errors, names in pool2.run(aggregate_then_halo, cut(sbm, 2)).results:
        assert max(errors) < 0.02
        assert names == {"forward0", "backward0", "halo-forward0", "halo-backward0"}


def fused_and_plain(folder, overlap):
    """Largest differences of rows and gradients between one function and two, by case."""
    dg = adaqp.load(folder)
    g = torch.Generator().manual_seed(dg.rank)
    matrix = torch.randn(8, 12, generator=g).requires_grad_()
    bias = torch.randn(12, generator=g).requires_grad_()
    h = torch.randn(dg.num_local, 8, generator=g)
    found = {}
    for weight in ("gcn", "mean"):
        for case, b, x in (
            ("bias", bias, h.clone().requires_grad_()),
            ("no bias", None, h.clone().requires_grad_()),
            ("input without gradient", bias, h),
        ):
            inputs = [t for t in (x, matrix, b) if t is not None and t.requires_grad]
            with dg.messages(Exact(), overlap=overlap):
                ours = dg.aggregate_linear(x, matrix, b, weight)
                grads = torch.autograd.grad(ours.square().sum(), inputs)
                theirs = dg.aggregate(x, weight) @ matrix + (0 if b is None else b)
                expected = torch.autograd.grad(theirs.square().sum(), inputs)
            pairs = zip((ours, *grads), (theirs, *expected), strict=True)
            found[weight, case] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return found


@pytest.mark.parametrize("overlap", ["edges", "nodes", None])
@pytest.mark.parametrize("kind", ["sbm", "directed"])
def test_a_fused_layer_is_aggregation_and_layer(kind, overlap, request, cut, pool2):
    graph = request.getfixturevalue(kind)
    for found in pool2.run(fused_and_plain, cut(graph, 2), overlap).results:
        assert len(found) == 6
        assert max(found.values()) < 1e-5, found


def ranges_seen(folder, first_bits):
    """Moving averages of the ranges after some steps on the same rows."""
    dg = adaqp.load(folder)
    policy = Adaptive(first_bits=first_bits, first_at=10**6, every=10**6)
    with dg.messages(policy, wire_dtype=torch.float32) as messages:
        for _ in range(4):
            x = dg.feat[:, :8].clone().requires_grad_()
            dg.aggregate(x).sum().backward()
    return messages.sides["forward0"].spread_sq


def test_ranges_do_not_depend_on_the_width_rows_travel_at(sbm, cut, pool2):
    quantised = pool2.run(ranges_seen, cut(sbm, 2), 8).results
    for bits, tolerance in ((32, 1e-3), (16, 5e-2)):
        for ours, theirs in zip(
            pool2.run(ranges_seen, cut(sbm, 2), bits).results, quantised, strict=True
        ):
            assert bool((theirs > 0).all())
            assert float((ours / theirs - 1).abs().max()) < tolerance


def steps_on_constant_rows(folder, how):
    """Channels and steps of a model whose aggregated rows need no gradient and are not `feat`."""
    dg = adaqp.load(folder)
    matrix = torch.ones(dg.feat.shape[1], 3, requires_grad=True)
    links = adaqp.LinkTable.uniform(2, 12.5e6, 2e-4)
    with dg.messages(Adaptive(first_at=2, every=4), links=links) as messages:
        for _ in range(6):
            x = dg.feat * 2
            mixed = dg.aggregate(x) if how == "aggregate" else dg.halo(x)
            (mixed @ matrix).sum().backward()
    return sorted(messages.sides), messages.step, messages.num_assignments


@pytest.mark.parametrize(("how", "name"), [("aggregate", "forward0"), ("halo", "halo-forward0")])
def test_steps_end_where_rows_need_no_gradient(how, name, sbm, cut, pool2):
    for names, step, num_assignments in pool2.run(steps_on_constant_rows, cut(sbm, 2), how).results:
        assert (names, step, num_assignments) == ([name], 5, 2)


def dropped(folder):
    """Rows and gradients under Drop, of features and of others, against local edges alone."""
    dg = adaqp.load(folder)
    op = dg.operator("gcn")
    found = []
    with dg.messages(Drop()):
        for x in (dg.feat, (dg.feat * 2).requires_grad_()):
            out = dg.aggregate(x)
            local = torch.cat([spmm(op.central, x.detach()), spmm(op.marginal, x.detach())])
            found.append(float((out.detach() - local).abs().max()))
    with torch.no_grad():
        exact = dg.aggregate(dg.feat)
    return found, bool((exact - dg.aggregate(dg.feat)).any()), float((exact - local / 2).norm())


def test_drop_sees_local_rows_only_and_leaves_no_trace(sbm, cut, pool2):
    for found, differs, missing in pool2.run(dropped, cut(sbm, 2)).results:
        assert max(found) < 1e-5
        assert not differs
        assert missing > 1


def test_hidden_seconds_are_those_between_sending_and_waiting_averaged(sbm, cut, monkeypatch):
    # Start and end of a forward and of a backward exchange's local work, in two steps.
    ticks = iter([0.0, 2.0, 5.0, 6.0, 10.0, 14.0, 20.0, 23.0])
    monkeypatch.setattr(runtime, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    dg = adaqp.load(cut(sbm, 1))
    with dg.messages(Exact()) as messages:
        for _ in range(2):
            dg.aggregate(dg.feat[:, :8].clone().requires_grad_()).sum().backward()
    assert messages.sides["forward0"].hidden_s == 0.5 * (2 + 4)
    assert messages.sides["backward0"].hidden_s == 0.5 * (1 + 3)


def assign_without_channels(folder):
    dg = adaqp.load(folder)
    with dg.messages(Adaptive(), links=adaqp.LinkTable.uniform(2, 1e6)) as messages:
        messages.assign()
    return messages.report()


def test_a_model_without_messages_has_nothing_to_assign(sbm, cut, pool2):
    assert pool2.run(assign_without_channels, cut(sbm, 2)).results == [{}, {}]


def repeated(folder, seed):
    return train(folder, Fixed(2), 3, {"seed": seed})[0].loss


def test_the_seed_decides_the_noise(sbm, cut, pool2):
    first = pool2.run(repeated, cut(sbm, 2), 1).results[0]
    assert first == pool2.run(repeated, cut(sbm, 2), 1).results[0]
    assert first != pool2.run(repeated, cut(sbm, 2), 2).results[0]


def test_settings_are_checked(sbm, directed, cut, tmp_path):
    dg = adaqp.load(cut(directed, 1))
    with (
        pytest.raises(ConfigError, match="pull' needs a symmetric graph"),
        dg.messages(Exact(), backward="pull"),
    ):
        pass
    with pytest.raises(
        ConfigError, match="links: expected costs between 1 ranks, one per part, got 2"
    ):
        dg.messages(Adaptive(), links=adaqp.LinkTable.uniform(2, 1e6)).__enter__()
    with pytest.raises(ConfigError, match=r"assign\(\) needs Adaptive\(\) and several ranks"):
        dg.current_messages.assign()
    with pytest.raises(ConfigError, match="overlap: expected 'edges', 'nodes' or None, got 'all'"):
        dg.messages(Exact(), overlap="all").__enter__()
    with pytest.raises(ConfigError, match="weight: expected 'gcn', 'mean' or 'sum', got 'max'"):
        dg.aggregate(dg.feat, "max")
    with pytest.raises(ConfigError, match=r"Fixed.bits: expected one of .* got 3"):
        Fixed(3)
    with pytest.raises(ConfigError, match=r"Adaptive.bits: expected ascending widths"):
        Adaptive(bits=())
    with pytest.raises(ConfigError, match=r"Adaptive.bits: expected ascending widths"):
        Adaptive(bits=(2, 3))
    with pytest.raises(ConfigError, match=r"Adaptive.lam: expected a number in \[0, 1\], got 1.5"):
        Adaptive(lam=1.5)
    with pytest.raises(ConfigError, match=r"Adaptive.group_size: expected 1 or more, got 0"):
        Adaptive(group_size=0)
