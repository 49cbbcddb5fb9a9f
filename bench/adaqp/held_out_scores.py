"""Held-out accuracy of policies on one partition, seed by seed, and how far each is from exact messages.

All policies of a seed start from the same weights and draw the same dropout. The learning rate falls
twice towards the end, so that a difference is one of what was learnt and not of the last steps.
Validation and test nodes are scored together, as nothing is chosen by either.
"""

from dataclasses import dataclass
from statistics import mean, stdev

import torch
from scipy.stats import t as student

import adaqp
from adaqp.policy import Policy
from adaqp.training.config import ModelConfig
from shared.comms import Group, all_gather_v
from shared.data.metrics import auc

__all__ = ["Gap", "gap", "score_in_rank"]

# Points that a policy may lose, and that dropping all messages has to lose for it to mean anything.
_MOST_LOST, _LEAST_LOST_BY_DROP = 0.3, 3.0
# Who has a claim to keep the score gets all seeds; what the others lose shows with fewer.
_PROMISING, _OTHERS_SEEDS = ("exact", "adaptive"), 5
# Learning rates, and the share of the epochs at each.
_RATES = ((1e-2, 0.7), (3e-3, 0.15), (1e-3, 0.15))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Points of a policy's score above that of exact messages.

    Attributes:
        score: mean over seeds, in points.
        exact: the same of exact messages.
        half: half the width of the 95 % interval of the mean paired difference (Student's t).
        by_seed: the paired differences.
    """

    score: float
    exact: float
    half: float
    by_seed: list[float]

    @property
    def mean(self) -> float:
        """Mean paired difference in points."""
        return mean(self.by_seed)

    @property
    def is_kept(self) -> bool:
        """Whether the whole interval lies above -0.3 points."""
        return self.mean - self.half > -_MOST_LOST

    @property
    def is_lost(self) -> bool:
        """Whether 3 points or more are lost, by the whole interval."""
        return self.mean + self.half <= -_LEAST_LOST_BY_DROP

    def __str__(self) -> str:
        return f"{self.mean:+.2f} +- {self.half:.2f} points ({len(self.by_seed)} seeds)"


def gap(scores: dict[str, list[tuple[float, float]]], policy: str, column: int = 0) -> Gap:
    """Compares a policy with "exact", seed by seed.

    Args:
        scores: what `score_in_rank` returned.
        policy: one of its names.
        column: 0 for accuracy, 1 for AUC.
    """
    ours = [100 * row[column] for row in scores[policy]]
    exact = [100 * row[column] for row in scores["exact"]]
    by_seed = [a - b for a, b in zip(ours, exact, strict=False)]
    quantile = float(student.ppf(0.975, len(by_seed) - 1))
    half = quantile * stdev(by_seed) / len(by_seed) ** 0.5
    return Gap(score=mean(ours), exact=mean(exact), half=half, by_seed=by_seed)


def score_in_rank(
    folder: str,
    policies: dict[str, Policy],
    epochs: int,
    config: ModelConfig,
    seeds: int,
    links: adaqp.LinkTable | None = None,
) -> dict[str, list[tuple[float, float]]]:
    """Accuracy and AUC of each policy, one pair a seed, after `epochs` of training.

    All `seeds` are of "exact" and "adaptive"; other policies get no more than five.

    A model that was trained without messages gets the better of its scores without and with them.
    Adaptive widths are chosen for `links`, or else for 100 Mbit/s between all ranks.
    """
    dg = adaqp.load(folder)
    links = links or adaqp.LinkTable.uniform(dg.num_parts, 12.5e6, 2e-4)
    scores: dict[str, list[tuple[float, float]]] = {name: [] for name in policies}
    for seed in range(seeds):
        for name, policy in policies.items():
            is_drop = isinstance(policy, adaqp.Drop)
            if name not in _PROMISING and seed >= _OTHERS_SEEDS:
                continue
            torch.manual_seed(seed)
            model = config.build(dg)
            with dg.messages(policy, seed=seed, links=links):
                optimizer = torch.optim.Adam(model.parameters())
                trainer = adaqp.Trainer(dg, model, optimizer, seed=seed)
                for rate, share in _RATES:
                    optimizer.param_groups[0]["lr"] = rate
                    trainer.fit(round(share * epochs))
                # A model trained without messages is tested without and with them.
                widths = (0, 32) if is_drop else (32,)
                found = [_score(dg, trainer.predict(bits=width)) for width in widths]
            scores[name].append((max(row[0] for row in found), max(row[1] for row in found)))
    return scores


def _score(dg: adaqp.DistGraph, logits: torch.Tensor) -> tuple[float, float]:
    """Accuracy and one-against-rest AUC, averaged over classes by size, on all ranks' rows."""
    mask = dg.val_mask | dg.test_mask
    logits = torch.cat(all_gather_v(Group.world(), logits[mask].contiguous()))
    label = torch.cat(all_gather_v(Group.world(), dg.label[mask].contiguous()))
    right = float((logits.argmax(1) == label).double().mean())
    if logits.shape[1] == 2:
        return right, _one_against_rest(logits[:, 1] - logits[:, 0], label == 1)
    probability = torch.log_softmax(logits, dim=1)
    counts = label.bincount(minlength=logits.shape[1])
    present = [c for c in range(logits.shape[1]) if 0 < counts[c] < len(label)]
    each = [_one_against_rest(probability[:, c], label == c) * float(counts[c]) for c in present]
    return right, sum(each) / float(counts[present].sum())


def _one_against_rest(score: torch.Tensor, is_one: torch.Tensor) -> float:
    return auc(score[is_one], score[~is_one])
