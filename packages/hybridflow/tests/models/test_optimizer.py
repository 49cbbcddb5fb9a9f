"""A step on a decoder: against torch's AdamW, clipping and schedules; on several ranks too."""

import copy
import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from hybridflow.models.config import DecoderConfig
from hybridflow.models.decoder import Decoder, Shard
from hybridflow.models.optimizer import AdamW, Optimizer
from hybridflow.models.pieces import initialize, pieces
from hybridflow.models.pipeline import train
from shared.comms.group import Group
from shared.errors import ConfigError, DivergenceError

TREE = {
    "model_type": "qwen3",
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "initializer_range": 0.3,
}


def decoder(**changed):
    model = Decoder(DecoderConfig.parse({**TREE, **changed}), dtype=torch.float64)
    initialize(model, 1)
    return model


def write_grads(model, step, scale=1.0):
    draw = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * scale
        if parameter.grad is None:
            parameter.grad = values
        else:
            parameter.grad.copy_(values)


SETTINGS = [
    AdamW(lr=1e-2, max_grad_norm=None),
    AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=0.5),
    AdamW(lr=1e-2, schedule="linear", num_warmup_steps=3, num_steps=7, max_grad_norm=1e9),
    AdamW(lr=1e-2, schedule="cosine", num_warmup_steps=2, num_steps=8),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "decay", "linear", "cosine"])
def test_steps_are_those_of_torch_with_clipping_and_a_schedule(settings):
    model, twin = decoder(), decoder()
    ours = Optimizer(model, settings)
    theirs = torch.optim.AdamW(
        twin.parameters(),
        lr=1.0,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    schedule = LambdaLR(theirs, settings.rate)
    for step in range(6):
        ours.zero_grad()
        assert not any(parameter.grad.any() for parameter in model.parameters())
        for one in (model, twin):
            write_grads(one, step, scale=10.0**-step)
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), settings.max_grad_norm or math.inf)
        rate = schedule.get_last_lr()[0]
        theirs.step()
        schedule.step()
        told = ours.step()
        assert told["grad_norm"] == pytest.approx(float(norm), rel=1e-12)
        assert told["lr"] == rate
        assert told["is_skipped"] == 0
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_the_norm_of_coarse_gradients_is_a_fine_number():
    model = decoder().to(torch.bfloat16)
    optimizer = Optimizer(model, AdamW(max_grad_norm=None))
    optimizer.zero_grad()
    write_grads(model, 0)
    grads = torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])
    assert optimizer.step()["grad_norm"] == pytest.approx(float(grads.norm()), rel=1e-6)


def test_rates_rise_stay_and_fall():
    linear = AdamW(lr=2.0, schedule="linear", num_warmup_steps=4, num_steps=8)
    assert [linear.rate(k) for k in range(10)] == [0.5, 1, 1.5, 2, 2, 1.5, 1, 0.5, 0, 0]
    cosine = AdamW(lr=2.0, schedule="cosine", num_steps=4)
    wanted = [1 + math.cos(math.pi * k / 4) for k in range(5)]
    assert [cosine.rate(k) for k in range(5)] == pytest.approx(wanted)
    assert cosine.rate(9) == 0
    constant = AdamW(lr=2.0, num_warmup_steps=2, num_steps=3)
    assert [constant.rate(k) for k in (0, 1, 2, 99)] == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"schedule": "step"}, "expected one of constant, linear, cosine, got 'step'"),
        ({"schedule": "cosine"}, "a cosine schedule needs a length"),
        ({"lr": -1.0}, "lr and num_warmup_steps of 0 or more"),
        ({"lr": math.nan}, "lr and num_warmup_steps of 0 or more"),
        ({"num_warmup_steps": -1}, "lr and num_warmup_steps of 0 or more"),
    ],
)
def test_settings_that_can_not_be_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        AdamW(**settings)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_change_nothing_and_are_counted(wrong):
    model = decoder()
    ours = Optimizer(model, AdamW(lr=1e-2, max_skipped=2))
    write_grads(model, 0)
    ours.step()
    kept = copy.deepcopy(model.state_dict())
    state = copy.deepcopy({name: ours.state_of(name) for name, _ in model.named_parameters()})
    for skipped in range(2):
        ours.zero_grad()
        write_grads(model, skipped)
        model.get_parameter("layers.1.down").grad[3, 2] = wrong
        told = ours.step()
        assert told["is_skipped"] == 1
        assert not math.isfinite(told["grad_norm"])
    assert ours.counters == {"num_steps": 3, "num_skipped": 2, "num_skipped_in_a_row": 2}
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name])
    for name, values in state.items():
        now = ours.state_of(name)
        assert all(torch.equal(value, now[key]) for key, value in values.items())
    told = r"step 4: expected finite gradients, got (nan|inf) in 3 steps in a row, .* rate of 0\.01"
    with pytest.raises(DivergenceError, match=told):
        ours.step()


def test_a_step_that_succeeds_begins_the_count_anew():
    model = decoder()
    ours = Optimizer(model, AdamW(lr=1e-2, max_skipped=1))
    for wrong in (math.nan, 1.0, math.nan, 1.0):
        ours.zero_grad()
        model.get_parameter("norm").grad[0] = wrong
        assert ours.step()["is_skipped"] == math.isnan(wrong)
    assert ours.counters == {"num_steps": 4, "num_skipped": 2, "num_skipped_in_a_row": 0}
    strict = Optimizer(decoder(), AdamW(max_skipped=0))
    strict.model.get_parameter("norm").grad[0] = math.nan
    with pytest.raises(DivergenceError, match="got nan in 1 steps in a row"):
        strict.step()


def test_a_resumed_optimizer_goes_on_as_if_it_had_not_stopped():
    settings = AdamW(lr=1e-2, schedule="cosine", num_steps=9, num_warmup_steps=2)
    model = decoder()
    first = Optimizer(model, settings)
    for step in range(3):
        write_grads(model, step)
        first.step()
    copied = decoder()
    copied.load_state_dict(model.state_dict())
    second = Optimizer(copied, settings)
    for name, _ in model.named_parameters():
        assert sorted(second.state_of(name)) == ["exp_avg", "exp_avg_sq", "step"]
        for key, value in first.state_of(name).items():
            assert not second.state_of(name)[key].any()
            second.state_of(name)[key].copy_(value)
    second.resume(first.counters)
    for step in range(3, 6):
        answers = []
        for one in (first, second):
            write_grads(one.model, step)
            answers.append(one.step())
        assert answers[0] == answers[1]
    assert all(map(torch.equal, model.parameters(), copied.parameters()))
    assert first.counters == second.counters


def test_gradients_are_one_buffer_that_backward_adds_to():
    model = decoder()
    Optimizer(model, AdamW())
    count = sum(parameter.numel() for parameter in model.parameters())
    for times in (1, 2):
        sum(parameter.sum() for parameter in model.parameters()).backward()
        buffers = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
        assert len(buffers) == 1
        buffer = next(model.parameters()).grad.untyped_storage()
        grads = torch.tensor([], dtype=torch.float64).set_(buffer)
        assert torch.equal(grads, torch.full((count,), float(times), dtype=torch.float64))


def loss_of(model, tokens):
    """A loss of hidden states that is the same on all shards."""
    draw = torch.Generator().manual_seed(7)
    slopes = torch.randn(*tokens.shape, 8, generator=draw, dtype=torch.float64)
    return lambda k, hidden: (hidden * slopes).sum() * (k + 1)


def stepped_on_shards(changed, num_shards, num_stages):
    """Runs on each rank, of which the first ones have a share: two steps of one rank's share; its weights by piece, and what was told."""
    rank = Group.world().rank
    if rank >= num_shards * num_stages:
        return None
    pp, tp = divmod(rank, num_shards)
    by_tp = [[s * num_shards + k for k in range(num_shards)] for s in range(num_stages)]
    by_pp = [[s * num_shards + k for s in range(num_stages)] for k in range(num_shards)]
    of_tp = Group.of(by_tp[pp], members_only=True) if num_shards > 1 else None
    of_pp = Group.of(by_pp[tp], members_only=True) if num_stages > 1 else None
    config = DecoderConfig.parse({**TREE, **changed})
    shard = Shard(config, pp, num_stages, tp, num_shards, of_tp)
    model = Decoder(config, shard, dtype=torch.float64)
    initialize(model, 1)
    optimizer = Optimizer(model, AdamW(lr=0.05, max_grad_norm=0.5), None, of_pp)
    told = []
    for step in range(2):
        told.append(stepped(model, optimizer, of_pp, step))
    return told, [(piece.name, piece.box, piece.view(model).clone()) for piece in pieces(model)]


def stepped(model, optimizer, of_pp, step):
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 12, (2, 5), generator=draw)
    optimizer.zero_grad()
    train(model, of_pp, [tokens, tokens.flip(1)], loss_of(model, tokens))
    if model.head is not None:  # which the loss does not see; vocabulary rows of all shards alike
        model.head.grad.fill_(0.01)
    return optimizer.step()["grad_norm"]


SHARED = {
    "norms of heads": ({}, 2, 1),
    "key heads that two shards hold": ({"num_key_value_heads": 1}, 2, 1),
    "biases": ({"model_type": "qwen2", "num_key_value_heads": 1}, 2, 1),
    "an embedding on both stages": ({"tie_word_embeddings": True}, 1, 2),
    "stages": ({}, 1, 2),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_several_ranks_hold_is_trained_alike_and_as_by_one(name, ranks):
    changed, num_shards, num_stages = SHARED[name]
    model = decoder(**changed)
    optimizer = Optimizer(model, AdamW(lr=0.05, max_grad_norm=0.5))
    wanted = [stepped(model, optimizer, None, step) for step in range(2)]
    whole = {piece.name: piece.view(model) for piece in pieces(model)}
    answers = ranks.run(stepped_on_shards, changed, num_shards, num_stages).results
    for told, held in answers[: num_shards * num_stages]:
        assert told == pytest.approx(wanted, rel=1e-10)
        for weight, box, found in held:
            part = whole[weight][tuple(slice(o, o + s) for o, s in zip(*box, strict=True))]
            torch.testing.assert_close(found, part, rtol=1e-8, atol=1e-10, msg=weight)
