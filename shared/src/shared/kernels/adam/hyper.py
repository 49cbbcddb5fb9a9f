"""Hyperparameters of Adam's step."""

from dataclasses import dataclass

__all__ = ["Hyper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """Hyperparameters of a step, under torch's names.

    Attributes:
        decoupled: Whether the decay acts on the weights (AdamW) or on the gradient (Adam).
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False
