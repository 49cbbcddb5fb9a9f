"""One update of actor and critic is the gradient of the objective that is written out here."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import hybridflow as hy
from hybridflow.models.config import read_config
from hybridflow.roles.state.export import export

# With so large an eps, AdamW's step is the gradient, to eight digits, for a rate of the same size.
DESCENT = hy.AdamW(lr=1e8, eps=1e8, weight_decay=0.0, max_grad_norm=None)
MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]
TEMPERATURE = 0.7


def rows(seed=0):
    """Five sequences of unlike lengths, with what an update reads; noise where nothing counts."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 64, (5, 9), generator=draw)
    lengths = torch.tensor([9, 5, 7, 3, 8])
    prompt_lengths = torch.tensor([2, 3, 1, 2, 4])
    at = torch.arange(9)
    mask = (at >= prompt_lengths[:, None]) & (at < lengths[:, None])
    mask[0, 4] = False  # a token that a tool said, amid those of the model

    def noise(scale, shift=0.0):
        return scale * torch.randn(5, 9, generator=draw, dtype=torch.float64) + shift

    return hy.Batch(
        tokens=tokens, mask=mask, lengths=lengths, advantages=noise(1.0),
        old_log_probs=noise(0.3, -4.1), ref_log_probs=noise(0.3, -4.1), values=noise(0.1),
        returns=noise(1.0), loss_weights=noise(0.2, 1.0).abs(),
    )  # fmt: skip


def weights(model, folder):
    """All weights of a group, in float64, by Hugging Face's names."""
    export(model, folder)
    return load_file(folder / "model.safetensors")


def peer_config():
    raw = {key: v for key, v in read_config("config:tiny-llama").raw.items() if key != "model_type"}
    return LlamaConfig(**raw, pad_token_id=0, bos_token_id=None, eos_token_id=None)


def mean(of_tokens, mask, mode, norm):
    """One number from those of tokens."""
    kept = [row[where] for row, where in zip(of_tokens, mask, strict=True)]
    if mode == "token-mean":
        return torch.cat(kept).mean()
    if mode == "token-sum":
        return torch.cat(kept).sum()
    of_rows = torch.stack(
        [row.mean() if mode == "seq-mean-token-mean" else row.sum() for row in kept]
    )
    return of_rows.mean() / (norm if mode == "seq-mean-token-sum-norm" else 1)


def before_tokens(values):
    """What was said before each token, at its place; 0 for the first."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)


DIVERGENCES = {
    "k1": lambda x: x,
    "abs": lambda x: x.abs(),
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: (-x).exp() + x - 1,
}


def actor_objective(model, batch, mode, norm, kl_coefficient, kind, entropy_coefficient):
    """PPO's clipped loss, weighed; a KL term; less an entropy bonus."""
    logits = model(batch["tokens"]).logits / TEMPERATURE
    every = before_tokens(logits.log_softmax(-1))
    log_p = every.gather(-1, batch["tokens"][..., None])[..., 0]
    entropy = -(every.exp() * every).sum(-1)
    ratio, advantages = (log_p - batch["old_log_probs"]).exp(), batch["advantages"]
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    loss = torch.where(advantages < 0, torch.minimum(loss, -3 * advantages), loss)
    x = log_p - batch["ref_log_probs"]
    value = DIVERGENCES[kind.removesuffix("+")](x)
    divergence = x**2 / 2 if kind.endswith("+") else value
    divergence = divergence + (value - divergence).detach()
    mask = batch["mask"]
    told = {"kl": value[mask].mean().item(), "entropy": entropy[mask].mean().item()}
    loss = loss * batch["loss_weights"]
    loss = loss + kl_coefficient * divergence - entropy_coefficient * entropy
    return mean(loss, mask, mode, norm), told


def is_step(before, after, model):
    """That weights have moved by their gradients, and by nothing else."""
    gradients = dict(model.named_parameters())
    assert before.keys() == gradients.keys()
    largest = max(weight.grad.abs().max() for weight in gradients.values())
    for name, weight in gradients.items():
        step = before[name] - after[name]
        # transformers' angles are of float32.
        torch.testing.assert_close(step, weight.grad, rtol=1e-5, atol=1e-7 * float(largest))


@pytest.mark.parametrize(
    ("mode", "norm", "kl_coefficient", "kind", "entropy_coefficient"),
    [
        *[(mode, 6.0, 0.3, "k3", 0.2) for mode in MODES],
        *[("token-mean", None, 0.7, kind, 0.0) for kind in ("k1", "abs", "k2", "k1+", "k3+")],
        ("token-mean", None, 0.0, "k3", 0.5),
        ("token-mean", None, 0.0, "k3", 0.0),
    ],
)
def test_an_actor_descends_its_objective(
    mode, norm, kl_coefficient, kind, entropy_coefficient, tmp_path
):
    batch = rows()
    with hy.Workers.inline() as workers:
        actor = hy.Actor(
            "config:tiny-llama", workers.pool(1), dtype="float64", optimizer=DESCENT, max_tokens=18
        )
        before = weights(actor, tmp_path / "before")
        told = actor.update(
            batch, mode=mode, norm=norm if mode == "seq-mean-token-sum-norm" else None,
            kl_coefficient=kl_coefficient, kl_kind=kind, entropy_coefficient=entropy_coefficient,
            temperature=TEMPERATURE,
        )  # fmt: skip
        told = dict(told)
        after = weights(actor, tmp_path / "after")
    model = LlamaForCausalLM(peer_config()).double().eval()
    model.load_state_dict(before)
    loss, means = actor_objective(
        model, batch, mode, norm, kl_coefficient, kind, entropy_coefficient
    )
    loss.backward()
    is_step(before, after, model)
    assert told["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert told["entropy"] == pytest.approx(means["entropy"], rel=1e-6)
    if kl_coefficient:
        assert told["kl"] == pytest.approx(means["kl"], rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", [0.05, None])
def test_a_critic_descends_its_objective(mode, clip, tmp_path):
    batch = rows()
    with hy.Workers.inline() as workers:
        critic = hy.Critic(
            "config:tiny-llama", workers.pool(1), dtype="float64", optimizer=DESCENT, max_tokens=18
        )
        before = weights(critic, tmp_path / "before")
        told = dict(critic.update(batch, clip=clip, mode=mode))
        after = weights(critic, tmp_path / "after")
    model = torch.nn.ModuleDict({
        "model": LlamaModel(peer_config()).double().eval(),
        "score": torch.nn.Linear(64, 1, bias=False).double(),
    })  # fmt: skip
    model.load_state_dict(before)
    hidden = model["model"](batch["tokens"]).last_hidden_state
    values = before_tokens(model["score"](hidden)[..., 0])
    error, old = (values - batch["returns"]) ** 2, batch["values"]
    if clip is not None:
        clipped = values.clamp(old - clip, old + clip)
        error = torch.maximum(error, (clipped - batch["returns"]) ** 2)
    loss = mean(error / 2, batch["mask"], mode, norm=batch["tokens"].shape[1])
    loss.backward()
    is_step(before, after, model)
    assert told["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
