import copy
import json
import time

import pytest
import torch
from small_models import text_unet
from torch import nn

import diffusionpipe as dp
from diffusionpipe.profiler import measure
from diffusionpipe.profiler.saved import count_saved_bytes, count_working_bytes
from shared.errors import ConfigError, DataError


def _mean(output, target):
    return (output - target).square().mean(1)


class _Clock:
    """Stands in for the module `time`: only what layers announce takes time."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, forward_s, backward_s):
        ctx.clock, ctx.backward_s = clock, backward_s * len(x)
        clock.wait(forward_s * len(x))
        return x * 1.0

    @staticmethod
    def backward(ctx, *gradients):
        ctx.clock.wait(ctx.backward_s)
        return gradients[0], None, None, None


def _waiting_job(clock):
    linears = [nn.Linear(4, 4), nn.Linear(4, 4)]
    linears[0].requires_grad_(False)

    def make(index, forward_s, backward_s, read, written):
        def call(state):
            hidden = linears[index](state[read])
            return {written: _Wait.apply(hidden, clock, forward_s, backward_s)}

        return dp.ChainLayer(f"layer{index}", call, (read,), (written,), (linears[index],))

    layers = [make(0, 2.0, 9.0, "x", "h"), make(1, 1.0, 3.0, "h", "output")]

    def encode(batch):
        clock.wait(4.0 * len(batch["x"]))
        return batch["x"].double()

    return dp.Job(
        dp.chain(layers),
        {"wide": encode},
        lambda b, f, d: {"x": f["wide"].float(), "target": b["x"]},
        _mean,
    )


def test_seconds_are_those_of_each_part(clock):
    profile = dp.profile(_waiting_job(clock), {"x": torch.randn(8, 4)}, sizes=[2, 8])
    assert profile.forward_s == ((4.0, 16.0), (2.0, 8.0))
    # Nothing trains before the second layer, so the first has no backward.
    assert profile.backward_s == ((0.0, 0.0), (6.0, 24.0))
    assert profile.frozen_s == {"wide": (8.0, 32.0)}
    assert profile.sizes == (2, 8)
    assert profile.differentiable == ("output",)
    assert profile.gradient_bytes == (0, 80)
    assert profile.parameter_bytes == (80, 80)
    assert profile.value_bytes == {"x": 16, "h": 16, "output": 16, "target": 16}
    assert profile.frozen_bytes == {"wide": 32}
    assert profile.frozen_outputs == {"wide": ("wide",)}
    assert profile.frozen_parameter_bytes == {"wide": 0}
    assert profile.feeds == {"x": ("wide",), "target": ()}
    assert profile.step_s_per_byte == 0


def test_what_belongs_to_no_layer_is_spread_over_all(clock):
    job = _waiting_job(clock)

    def inputs(batch, frozen, draw):
        clock.wait(6.0)
        return job.inputs(batch, frozen, draw)

    def loss(output, target):
        clock.wait(3.0)
        return _mean(output, target)

    slow = dp.Job(job.backbone, job.frozen, inputs, loss)
    profile = dp.profile(slow, {"x": torch.randn(2, 4)}, sizes=[2])
    # Layers alone take 4 and 2 s; inputs and the loss another 9.
    assert [row[0] for row in profile.forward_s] == pytest.approx([10.0, 5.0])
    assert profile.backward_s == ((0.0,), (6.0,))


def test_seconds_are_interpolated(clock):
    profile = dp.profile(_waiting_job(clock), {"x": torch.randn(8, 4)}, sizes=[2, 4, 8], repeats=1)
    row = (2.0, 3.0, 7.0)
    assert [profile.seconds(row, size) for size in (1, 2, 3, 4, 6, 8, 10)] == [
        2,
        2,
        2.5,
        3,
        5,
        7,
        9,
    ]
    alone = dp.profile(_waiting_job(clock), {"x": torch.randn(8, 4)}, sizes=[4], repeats=1)
    assert alone.seconds((2.0,), 8) == 4.0
    assert alone.seconds((2.0,), 2) == 2.0


def test_sizes_default_to_parts_of_the_batch_and_are_checked(clock):
    job, batch = _waiting_job(clock), {"x": torch.randn(8, 4)}
    assert dp.profile(job, batch, repeats=1).sizes == (1, 2, 4, 8)
    assert dp.profile(job, {"x": torch.randn(1, 4)}, repeats=1).sizes == (1,)
    for sizes in ([0, 4], [9], []):
        with pytest.raises(ConfigError, match="sizes: expected numbers of samples from 1 to 8"):
            dp.profile(job, batch, sizes=sizes)


def test_a_batch_of_one_sample_is_checked_too(clock):
    job = _waiting_job(clock)
    dropped = dp.Job(
        job.backbone, {"wide": lambda b: b["x"].double().bernoulli()}, job.inputs, job.loss
    )
    with pytest.raises(ConfigError, match="expected the same values of the same rows"):
        dp.profile(dropped, {"x": torch.full((1, 4), 0.5)}, repeats=1)


def test_weights_and_gradients_are_left_as_they_were(clock):
    job = _waiting_job(clock)
    before = copy.deepcopy({n: p.detach() for n, p in job.trained.items()})
    for parameter in job.trained.values():
        parameter.grad = torch.full_like(parameter, 3.0)
    dp.profile(job, {"x": torch.randn(4, 4)}, repeats=1)
    for name, parameter in job.trained.items():
        assert torch.equal(parameter, before[name])
        assert torch.equal(parameter.grad, torch.full_like(parameter, 3.0))


def test_kept_memory_is_counted_once_at_the_first_layer_that_keeps_it():
    linears = [nn.Linear(4, 6), nn.Linear(6, 6)]
    layers = [
        # Keeps its input, which belongs to the backbone's inputs, and its own output (tanh).
        dp.ChainLayer(
            "a", lambda s: {"a": linears[0](s["x"]).tanh()}, ("x",), ("a",), (linears[0],)
        ),
        # Keeps the first one's output again, and nothing else: an addition needs no operands.
        dp.ChainLayer(
            "b",
            lambda s: {"output": linears[1](s["a"]) + s["a"]},
            ("a",),
            ("output",),
            (linears[1],),
        ),
    ]
    saved, values = count_saved_bytes(dp.chain(layers), {"x": torch.randn(5, 4)})
    assert saved == [5 * 6 * 4, 0]
    assert values["output"].shape == (5, 6)


def test_what_the_loss_keeps_counts_at_the_last_layer():
    linear = nn.Linear(4, 6)
    chain = dp.chain([
        dp.ChainLayer("a", lambda s: {"output": linear(s["x"])}, ("x",), ("output",), (linear,))
    ])  # fmt: skip
    target = torch.randn(5, 6)
    saved, _ = count_saved_bytes(
        chain, {"x": torch.randn(5, 4)}, lambda output: (output - target).square().mean(1)
    )
    assert saved == [5 * 6 * 4]  # the difference, which the square keeps


def test_working_memory_is_the_most_at_once():
    weight, x = torch.randn(1000, 10), torch.randn(3, 10)

    def run():
        wide = x @ weight.T  # 12,000 bytes
        other = wide.view(-1) * 2.0  # 12,000 more
        del wide
        narrow = other.view(3, 1000)[:, :5].clone()  # 60 bytes
        return {"z": narrow}

    assert count_working_bytes(run) == 24_000
    assert count_working_bytes(lambda: {"z": weight[:2]}) == 0


def test_a_unets_kept_memory_is_what_autograd_keeps():
    torch.manual_seed(0)
    model = text_unet()
    chain = dp.chain(model)
    state = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([1, 2]),
        "encoder_hidden_states": torch.randn(2, 5, 12),
    }
    saved, _ = count_saved_bytes(chain, state)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *state.values())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept.setdefault(storage.data_ptr(), (storage.nbytes(), tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**state)
    assert sum(saved) == pytest.approx(sum(size for size, _ in kept.values()), rel=0.02)


def test_profiles_survive_json(clock, tmp_path):
    profile, path = (
        dp.profile(_waiting_job(clock), {"x": torch.randn(4, 4)}, repeats=1),
        tmp_path / "p",
    )
    profile.save(path)
    assert dp.JobProfile.load(path) == profile
    raw = json.loads(profile.to_json())
    (chain,) = raw["chains"]
    for change in ({"version": 2}, {"extra": 1}, {"chains": [{**chain, "extra": 1}]}):
        path.write_text(json.dumps({**raw, **change}))
        with pytest.raises(DataError, match="p: expected a profile of version 1 as"):
            dp.JobProfile.load(path)
    path.write_text("{")
    with pytest.raises(DataError, match="expected a profile"):
        dp.JobProfile.load(path)


@pytest.mark.slow  # on a machine that does nothing else
def test_a_profile_of_a_unet_adds_up_to_its_step():
    """Layers timed one by one take about what the whole forward and backward take."""
    torch.manual_seed(0)
    model = text_unet(channels=(32, 64), layers_per_block=2, groups=8)
    inputs, loss = dp.losses.epsilon(_scheduler(), latents="z", text="h")
    batch = {"z": torch.randn(8, 4, 16, 16), "h": torch.randn(8, 5, 12)}
    job = dp.Job(dp.chain(model), {}, inputs, loss)
    profile = dp.profile(job, batch, sizes=[8])
    total = sum(row[0] for row in (*profile.forward_s, *profile.backward_s))
    runs = []
    for step in range(3):
        started = time.perf_counter()
        job.compute_loss(batch, seed=0, step=step).backward()
        runs.append(time.perf_counter() - started)
    assert 0.4 < total / sorted(runs)[1] < 2.5
    assert sum(profile.gradient_bytes) == sum(p.nbytes for p in model.parameters())


def _scheduler():
    from diffusers import DDPMScheduler

    return DDPMScheduler()


def test_sums_of_narrow_weights_are_wide_and_values_without_a_row_a_sample_are_named():
    first, last = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)

    def double(state):
        hidden = first(state["x"].bfloat16()).float()
        return {"h": torch.cat([hidden, 2 * hidden])}

    def join(state):
        one, other = last(state["h"]).chunk(2)
        return {"output": one + other}

    layers = [
        dp.ChainLayer("double", double, ("x",), ("h",), (first,)),
        dp.ChainLayer("join", join, ("h",), ("output",), (last,)),
    ]
    job = dp.Job(
        dp.chain(layers), {"z": lambda b: b["x"] * 2},
        lambda b, f, d: {"x": f["z"], "target": b["x"]}, _mean,
    )  # fmt: skip
    profile = dp.profile(job, {"x": torch.randn(4, 4)}, sizes=[2], repeats=1)
    # Twenty parameters a layer, in bfloat16 and in float32.
    assert profile.gradient_bytes == (40, 80)
    assert profile.sum_bytes == (80, 80)
    assert profile.whole == ("h",)
