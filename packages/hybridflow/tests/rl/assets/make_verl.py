"""Writes what verl 0.9.1 computes on seeded inputs, for test_against_verl.py to compare with.

    python -m venv verl && verl/bin/pip install torch==2.13.0 transformers==5.10.4
    verl/bin/pip install --no-deps verl==0.9.1
    verl/bin/pip install "tensordict<=0.10" ray==2.60.0 omegaconf hydra-core codetiming pandas
    verl/bin/python make_verl.py

The inputs are `inputs`, which the test calls too; this file imports verl only where it is run.
"""

import importlib.metadata
import json
from pathlib import Path

import numpy as np

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
KINDS = ("k1", "abs", "k2", "k3", "k1+", "k3+")
GAMMA, LAM, CLIP, DUAL_CLIP, VALUE_CLIP, CAP = 0.97, 0.9, (0.2, 0.28), 3.0, 0.2, 1.5
GREEDY = (0.5, -1.0, 0.25, 2.0, 0.0, 1.0)
GROUP = (7, 3, 7, 3, 3, 7)


def inputs() -> dict[str, np.ndarray]:
    """Six responses of at most eight tokens: one with a tool's tokens inside, one empty."""
    random = np.random.default_rng(0x5E71)
    names = ("rewards", "values", "old_values", "advantages", "old_logp", "step", "drift", "loss")
    found = {name: random.standard_normal((6, 8)) for name in names}
    found["old_logp"] -= 2
    # Steps wide enough for every branch of the clipping; far ones for the bounds to +-20 and 10.
    found["near_logp"] = found["old_logp"] + found.pop("step")
    found["logp"] = found["near_logp"].copy()
    found["logp"][1, :2] += (40, -40)
    found["advantages"][1, 0] = -1  # beyond the dual clip
    found["rollout_logp"] = found["old_logp"] + 0.3 * found.pop("drift")
    found["mask"] = np.arange(8) < np.array([8, 5, 7, 1, 0, 6])[:, None]
    found["mask"][0, 2:4] = False
    found["scores"] = random.standard_normal(6)
    return found


def main() -> None:
    """Runs verl's functions and writes their results beside this file."""
    import torch
    from omegaconf import OmegaConf  # pyrefly: ignore [missing-import]
    from verl.trainer.ppo import core_algos as verl  # pyrefly: ignore [missing-import]
    from verl.trainer.ppo import rollout_corr_helper  # pyrefly: ignore [missing-import]
    from verl.workers.config import ActorConfig  # pyrefly: ignore [missing-import]

    t = {name: torch.from_numpy(array) for name, array in inputs().items()}
    mask = t["mask"].double()
    results: dict[str, list | float] = {}

    def keep(name: str, value: torch.Tensor) -> None:
        results[name] = value.tolist()

    for name, value in zip(
        ("gae", "gae_returns"),
        verl.compute_gae_advantage_return(t["rewards"], t["values"], mask, GAMMA, LAM),
        strict=True,
    ):
        keep(name, value)
    scores = torch.zeros_like(mask)
    scores[:, 0] = t["scores"]
    whole, group = torch.ones_like(mask), np.array(GROUP)
    for name, of, options in (
        ("grpo", verl.compute_grpo_outcome_advantage, {}),
        ("dr_grpo", verl.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        ("rloo", verl.compute_rloo_outcome_advantage, {}),
    ):
        keep(name, of(scores.clone(), whole, group, **options)[0][:, 0])
    single = verl.compute_grpo_outcome_advantage(scores.clone(), whole, np.arange(6))[0][:, 0]
    keep("grpo_singletons", single)
    config = OmegaConf.create({"gamma": GAMMA})
    discounted = verl.compute_reinforce_plus_plus_outcome_advantage(
        t["rewards"], mask, config=config
    )
    keep("reinforce_plus_plus", discounted[0])
    keep("reward_to_go", discounted[1])
    greedy = torch.tensor(GREEDY, dtype=torch.float64)
    keep("remax", verl.compute_remax_outcome_advantage(t["rewards"], greedy, mask)[0])

    def with_gradient(name: str, of, at: torch.Tensor) -> None:
        leaf = at.clone().requires_grad_()
        value = of(leaf)
        keep(name, value.detach())
        keep(f"{name}_grad", torch.autograd.grad(value.sum(), leaf)[0])

    for kind in KINDS:
        with_gradient(
            f"kl_{kind}", lambda x, k=kind: verl.kl_penalty(x, t["old_logp"], k), t["logp"]
        )
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=CLIP[0],
        clip_ratio_high=CLIP[1],
        clip_ratio_c=DUAL_CLIP,
    )
    for name, policy_loss in (
        ("ppo", verl.compute_policy_loss_vanilla),
        ("gspo", verl.compute_policy_loss_gspo),
        ("cispo", verl.compute_policy_loss_cispo),
        ("reinforce", verl.compute_policy_loss_reinforce),
    ):
        for mode in AGGREGATIONS:

            def loss(x: torch.Tensor, of=policy_loss, mode: str = mode) -> torch.Tensor:
                return of(t["old_logp"], x, t["advantages"], mask, mode, actor)[0]

            with_gradient(f"{name}_{mode}", loss, t["near_logp" if name == "gspo" else "logp"])
    _, metrics = verl.compute_policy_loss_vanilla(
        t["old_logp"], t["logp"], t["advantages"], mask, "token-mean", actor
    )
    results["metrics"] = [
        metrics[f"actor/{name}"] for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")
    ]
    with_gradient(
        "value",
        lambda x: verl.compute_value_loss(x, t["rewards"], t["old_values"], mask, VALUE_CLIP)[0],
        t["values"],
    )
    for mode in AGGREGATIONS:
        keep(f"aggregate_{mode}", verl.agg_loss(t["loss"], mask, mode))
        keep(f"nothing_{mode}", verl.agg_loss(t["loss"], torch.zeros_like(mask), mode))
    dirty = torch.where(t["mask"], t["logp"], torch.nan)
    ppo = verl.compute_policy_loss_vanilla
    keep("dirty", ppo(t["old_logp"], dirty, t["advantages"], mask, AGGREGATIONS[2], actor)[0])
    lost = t["near_logp"].clone()
    lost[0, 0] = -torch.inf
    keep(
        "lost",
        verl.compute_policy_loss_gspo(t["old_logp"], lost, t["advantages"], mask, config=actor)[0],
    )
    equals = torch.full((7, 1), 0.1)
    keep("equals", verl.compute_grpo_outcome_advantage(equals, equals > 0, np.zeros(7))[0][:, 0])
    log_ratio = t["old_logp"] - t["rollout_logp"]
    for level in ("token", "sequence"):
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
            log_ratio, mask, rollout_is=level, rollout_is_threshold=CAP
        )
        keep(f"weights_{level}", weights)
    apart = rollout_corr_helper.compute_offpolicy_metrics(t["old_logp"], t["rollout_logp"], mask)
    results["mismatch"] = [apart[name] for name in ("kl", "k3_kl", "chi2_token")]
    controller = verl.AdaptiveKLController(0.2, 0.1, 1000)
    betas = []
    for kl in (0.05, 0.11, 0.5):
        controller.update(kl, 64)
        betas.append(float(controller.value))
    results["betas"] = betas

    def rounded(value: list | float) -> list | float:
        if isinstance(value, list):
            return [rounded(part) for part in value]
        return float(f"{value:.10g}")

    told = {"verl": importlib.metadata.version("verl"), "torch": torch.__version__}
    lines = [
        f"{json.dumps(n)}: {json.dumps(v)}"
        for n, v in [*told.items(), *((name, rounded(value)) for name, value in results.items())]
    ]
    path = Path(__file__).with_name("verl_0_9_1.json")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
