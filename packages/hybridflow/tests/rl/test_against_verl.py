"""The same numbers as verl 0.9.1 on seeded inputs, and where they are meant to differ.

`assets/make_verl.py` wrote verl's results; the inputs are computed again by the same function.
"""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

from hybridflow.rl import advantages, aggregate, correction, kl, losses
from shared.errors import ConfigError

ASSETS = Path(__file__).parent / "assets"
MADE = runpy.run_path(str(ASSETS / "make_verl.py"))
VERL = json.loads((ASSETS / "verl_0_9_1.json").read_text())
GIVEN = {name: torch.from_numpy(array) for name, array in MADE["inputs"]().items()}
MASK, GROUP = GIVEN["mask"], torch.tensor(MADE["GROUP"])
POLICY = {
    "ppo": (losses.ppo, {"clip": MADE["CLIP"], "dual_clip": MADE["DUAL_CLIP"]}),
    "gspo": (losses.gspo, {"clip": MADE["CLIP"]}),
    "cispo": (losses.cispo, {"clip": MADE["CLIP"]}),
    "reinforce": (losses.reinforce, {}),
}


def verl(name: str) -> torch.Tensor:
    return torch.tensor(VERL[name], dtype=torch.float64)


def same(ours: torch.Tensor, name: str, where: torch.Tensor | None = None) -> None:
    """To 1e-6, where a token counts if `where` is given."""
    theirs = verl(name)
    if where is not None:
        ours, theirs = ours[where], theirs[where]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_it_is_that_version():
    assert VERL["verl"] == "0.9.1"


def test_gae():
    found, returns = advantages.gae(
        GIVEN["rewards"], GIVEN["values"], MASK, MADE["GAMMA"], MADE["LAM"]
    )
    same(returns, "gae_returns", MASK)
    # Ours are whitened by whom they are to be whitened, as ranks have to agree on the moments.
    same(advantages.whiten(found, MASK), "gae", MASK)
    # verl leaves A + V of the next token where masked, we 0.
    assert (verl("gae_returns")[~MASK] != 0).any()
    assert (returns[~MASK] == 0).all()


def test_groups():
    for name in ("grpo", "dr_grpo", "rloo"):
        same(getattr(advantages, name)(GIVEN["scores"], GROUP), name)


def test_a_group_of_one_is_refused_where_verl_takes_its_score_for_an_advantage():
    same(GIVEN["scores"] / (1 + 1e-6), "grpo_singletons")
    with pytest.raises(ConfigError, match="group 0"):
        advantages.grpo(GIVEN["scores"], torch.arange(6))


def test_equal_scores_are_0_where_verl_divides_what_rounding_left_by_1e_6():
    assert verl("equals").abs().max() > 1e-3
    assert (advantages.grpo(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)) == 0).all()


def test_reward_to_go_and_what_is_made_of_it():
    rewards = GIVEN["rewards"]
    same(advantages.reward_to_go(rewards, MASK, MADE["GAMMA"]), "reward_to_go")
    same(advantages.reinforce_plus_plus(rewards, MASK, MADE["GAMMA"]), "reinforce_plus_plus")
    greedy = torch.tensor(MADE["GREEDY"], dtype=torch.float64)
    # verl gives masked tokens what is still to come, we 0.
    same(advantages.remax(rewards, MASK, greedy), "remax", MASK)


@pytest.mark.parametrize("kind", MADE["KINDS"])
def test_estimates_of_the_divergence(kind):
    logp = GIVEN["logp"].clone().requires_grad_()
    found = kl.estimate(logp, GIVEN["old_logp"], kind=kind)
    same(found.detach(), f"kl_{kind}")
    found.sum().backward()
    same(logp.grad, f"kl_{kind}_grad")


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("mode", MADE["AGGREGATIONS"])
def test_losses_of_policies_and_their_gradients(name, mode):
    loss, options = POLICY[name]
    # Far steps are left out of GSPO's: see below.
    logp = GIVEN["near_logp" if name == "gspo" else "logp"].clone().requires_grad_()
    tokens = loss(logp, GIVEN["old_logp"], GIVEN["advantages"], MASK, **options)
    found = aggregate.aggregate(tokens, MASK, mode)
    same(found.detach(), f"{name}_{mode}")
    found.backward()
    same(logp.grad, f"{name}_{mode}_grad")


def test_diagnostics():
    sums = losses.diagnostics(
        GIVEN["logp"],
        GIVEN["old_logp"],
        GIVEN["advantages"],
        MASK,
        MADE["CLIP"],
        MADE["DUAL_CLIP"],
    )
    found = torch.stack([sums[name] for name in ("clipped", "dual_clipped", "k1")])
    same(found / sums["tokens"], "metrics")


def test_a_token_that_cannot_be_is_bounded_where_verls_gspo_is_nan():
    """verl bounds the mean of a sequence's log-ratios from above alone, we also each by +-20."""
    assert verl("lost").isnan()
    lost = GIVEN["near_logp"].clone()
    lost[0, 0] = -math.inf
    assert losses.gspo(lost, GIVEN["old_logp"], GIVEN["advantages"], MASK).isfinite().all()


def test_what_is_masked_does_not_show_where_verl_multiplies_it_by_0():
    assert verl("dirty").isnan()
    dirty = torch.where(MASK, GIVEN["logp"], math.nan)
    loss, options = POLICY["ppo"]
    found = loss(dirty, GIVEN["old_logp"], GIVEN["advantages"], MASK, **options)
    same(aggregate.aggregate(found, MASK, "seq-mean-token-sum"), "ppo_seq-mean-token-sum")


def test_the_critics_loss():
    values = GIVEN["values"].clone().requires_grad_()
    found = losses.value(values, GIVEN["old_values"], GIVEN["rewards"], MASK, MADE["VALUE_CLIP"])
    total = aggregate.aggregate(found, MASK, "token-mean")
    same(total.detach(), "value")
    total.backward()
    same(values.grad, "value_grad")


@pytest.mark.parametrize("mode", MADE["AGGREGATIONS"])
def test_aggregation(mode):
    same(aggregate.aggregate(GIVEN["loss"], MASK, mode), f"aggregate_{mode}")
    nothing = aggregate.aggregate(GIVEN["loss"], torch.zeros_like(MASK), mode)
    assert nothing == 0
    # verl divides by the number of what counts even where that is 0.
    assert verl(f"nothing_{mode}").isnan() == (mode != "token-sum")


def test_correction_of_the_rollout():
    pair = (GIVEN["old_logp"], GIVEN["rollout_logp"], MASK)
    for level in ("token", "sequence"):
        same(correction.weights(*pair, level=level, cap=MADE["CAP"]), f"weights_{level}")
    sums = correction.mismatch(*pair)
    found = torch.stack([sums["k1"], sums["k3"], sums["square_ratio"]]) / sums["tokens"]
    same(found - torch.tensor([0, 0, 1]), "mismatch")


def test_the_adaptive_coefficient():
    controller = kl.AdaptiveKL(beta=0.2, target=0.1, horizon=1000)
    for measured, beta in zip((0.05, 0.11, 0.5), VERL["betas"], strict=True):
        controller = controller.update(measured, 64)
        assert controller.beta == pytest.approx(beta, rel=1e-9)
