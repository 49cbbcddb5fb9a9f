"""Inverses of torch's SGD, RMSprop and Adagrad steps, and which steps have none.

After "SWIFT: Expedited Failure Recovery for Large-scale DNN Training" (arXiv 2302.06173), extended to
what torch's optimizers do. Every operation is one that IEEE 754 rounds correctly (+, -, *, /, square
root), one at a time in float32: the result is then the same however torch splits a tensor over
vectors and threads, and the residual that was stored for it fits whenever it is computed again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["INVERSES", "SQUARES", "obstacle"]

# Takes a tensor's name and the inverse's result; gives the value that the tensor had before.
Restore = Callable[[str, Tensor], Tensor]
# Takes torch's tensors after the step ("param" and its state), the step's gradient, hyperparameters,
# and whether it made the state; restores every tensor that had a value before.
Inverse = Callable[[Mapping[str, Tensor], Tensor, Mapping[str, Any], bool, Restore], None]

SQUARES = frozenset({"square_avg", "sum"})
"""Sums of squares: rounding alone can take their inverse below 0, and the next step would take its root."""

# |1 - lr * weight_decay| below this: the step nearly erased the weights.
_SINGULAR = 1e-6


def _invert_sgd(
    after: Mapping[str, Tensor],
    grad: Tensor,
    hyper: Mapping[str, Any],
    first: bool,
    restore: Restore,
) -> None:
    # d = g + wd w; b = d at first, then momentum b + (1 - dampening) d; w -= lr u, with
    # u = b, with nesterov d + momentum b, without momentum d.
    lr, decay, momentum = hyper["lr"], hyper["weight_decay"], hyper["momentum"]
    w, g = after["param"].float(), _signed(grad, hyper)
    if momentum == 0:
        restore("param", (w + g * lr) / (1 - lr * decay))
        return
    b = after["momentum_buffer"].float()
    if hyper["nesterov"]:
        w = restore("param", (w + (g + b * momentum) * lr) / (1 - lr * decay))
    else:
        w = restore("param", w + b * lr)
    if not first:
        d = g + w * decay
        restore("momentum_buffer", (b - d * (1 - hyper["dampening"])) / momentum)


def _invert_rmsprop(
    after: Mapping[str, Tensor],
    grad: Tensor,
    hyper: Mapping[str, Any],
    first: bool,
    restore: Restore,
) -> None:
    # d = g + wd w; s = alpha s + (1 - alpha) d^2; a = alpha a + (1 - alpha) d if centered;
    # q = d / (sqrt(s - a^2) + eps); b = momentum b + q; w -= lr b, without momentum lr q.
    lr, decay, momentum = hyper["lr"], hyper["weight_decay"], hyper["momentum"]
    alpha = hyper["alpha"]
    w, g, s = after["param"].float(), _signed(grad, hyper), after["square_avg"].float()
    a = after["grad_avg"].float() if hyper["centered"] else None
    b = after["momentum_buffer"].float() if momentum > 0 else None
    root = _root(s if a is None else s - a * a) + hyper["eps"]
    if b is not None:
        w = restore("param", w + b * lr)
    else:
        w = restore("param", (w + g / root * lr) / (1 - lr * decay / root))
    if first:
        return
    d = g + w * decay
    if b is not None:
        restore("momentum_buffer", (b - d / root) / momentum)
    if a is not None:
        restore("grad_avg", (a - d * (1 - alpha)) / alpha)
    restore("square_avg", (s - d * d * (1 - alpha)) / alpha)


def _invert_adagrad(
    after: Mapping[str, Tensor],
    grad: Tensor,
    hyper: Mapping[str, Any],
    first: bool,
    restore: Restore,
) -> None:
    # d = g + wd w; s += d^2; w -= lr / (1 + (step - 1) lr_decay) d / (sqrt(s) + eps)
    lr = hyper["lr"] / (1 + (float(after["step"]) - 1) * hyper["lr_decay"])
    decay = hyper["weight_decay"]
    w, g, s = after["param"].float(), _signed(grad, hyper), after["sum"].float()
    root = _root(s) + hyper["eps"]
    w = restore("param", (w + g / root * lr) / (1 - lr * decay / root))
    d = g + w * decay
    restore("sum", s - d * d)


def _signed(grad: Tensor, hyper: Mapping[str, Any]) -> Tensor:
    return -grad.float() if hyper["maximize"] else grad.float()


def _root(squares: Tensor) -> Tensor:
    # torch's own of float32 is not correctly rounded; through float64 it is.
    return squares.double().sqrt().float()


INVERSES: dict[type[Optimizer], Inverse] = {
    torch.optim.SGD: _invert_sgd,
    torch.optim.RMSprop: _invert_rmsprop,
    torch.optim.Adagrad: _invert_adagrad,
}


def obstacle(optimizer: Optimizer, hyper: Mapping[str, Any]) -> str | None:
    """Why a step with these hyperparameters has no arithmetic inverse; None if it has one."""
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        if hyper["amsgrad"]:
            return "amsgrad keeps a maximum only"
        if 0 in hyper["betas"]:
            return f"betas={hyper['betas']} keep nothing of an average"
        erased = hyper["decoupled_weight_decay"]
    elif kind is torch.optim.RMSprop:
        if hyper["alpha"] == 0:
            return "alpha=0 keeps nothing of the average"
        erased = False
    elif kind is torch.optim.SGD:
        erased = hyper["momentum"] == 0 or hyper["nesterov"]
    elif kind is torch.optim.Adagrad:
        erased = False
    else:
        return f"{kind.__name__} has no known inverse"
    if erased and abs(1 - hyper["lr"] * hyper["weight_decay"]) < _SINGULAR:
        return f"lr * weight_decay = {hyper['lr'] * hyper['weight_decay']} erases the weights"
    return None
