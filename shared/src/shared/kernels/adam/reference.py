"""Adam's step, its residual and its inverse in plain torch: the definition, to the bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.kernels.adam.factors import Factors
from shared.kernels.adam.layout import BLOCK, AdamTensors, Residual
from shared.kernels.adam.ulps import ESCAPE, add_ulps, ulps_between

__all__ = ["step", "undo"]


def step(
    tensors: Sequence[AdamTensors],
    factors: Sequence[Factors],
    residuals: Sequence[Residual] | None,
) -> None:
    """Step in place, and fill the residuals."""
    for place, (of, f) in enumerate(zip(tensors, factors, strict=True)):
        before = torch.stack([of.param, of.exp_avg, of.exp_avg_sq])
        w, g, m, v = (tensor.float() for tensor in of)
        g = _gradient(of, w, f)
        of.exp_avg.copy_((g if f.from_grad else m) + f.mix * (g - m))
        of.exp_avg_sq.copy_(v * f.keep_sq + (f.take_sq * g) * g)
        of.param.copy_(w * f.decay - _quotient(of, f))
        if residuals is not None:
            guess = torch.stack([_param_before(of, f), *_averages_before(of, before[0], f)])
            _fill(residuals[place], before, guess)


def undo(
    tensors: Sequence[AdamTensors],
    factors: Sequence[Factors],
    residuals: Sequence[Residual] | None,
) -> None:
    """Undo in place what `step` did with the same gradients and factors."""
    for place, (of, f) in enumerate(zip(tensors, factors, strict=True)):
        param = _param_before(of, f)
        if residuals is None:
            averages = _averages_before(of, param, f)
        else:
            codes, listed = residuals[place].codes, _at_their_places(residuals[place])
            param = torch.where(codes[0] == ESCAPE, listed[0], add_ulps(param, codes[0]))
            guess = torch.stack(_averages_before(of, param, f))
            averages = torch.where(codes[1:] == ESCAPE, listed[1:], add_ulps(guess, codes[1:]))
        of.param.copy_(param)
        of.exp_avg.copy_(averages[0])
        of.exp_avg_sq.copy_(averages[1])


def _gradient(of: AdamTensors, param: Tensor, f: Factors) -> Tensor:
    g = f.sign * of.grad.float()
    return g + f.l2 * param.float() if f.l2 else g


def _quotient(of: AdamTensors, f: Factors) -> Tensor:
    # torch's square root of float32 is not correctly rounded; through float64 it is.
    root = of.exp_avg_sq.double().sqrt().float()
    return (f.step_size * of.exp_avg.float()) / (root * f.root_inverse + f.eps)


def _param_before(of: AdamTensors, f: Factors) -> Tensor:
    return ((of.param.float() + _quotient(of, f)) * f.decay_inverse).to(of.param.dtype)


def _averages_before(of: AdamTensors, param: Tensor, f: Factors) -> tuple[Tensor, Tensor]:
    """Both averages before the step, given the parameter before it."""
    g = _gradient(of, param, f)
    m = (of.exp_avg.float() - f.take * g) * f.keep_inverse
    v = (of.exp_avg_sq.float() - (f.take_sq * g) * g) * f.keep_sq_inverse
    return m.to(param.dtype), torch.where(v < 0, 0.0, v).to(param.dtype)


def _fill(residual: Residual, before: Tensor, guess: Tensor) -> None:
    residual.codes.copy_(ulps_between(before, guess))
    escaped = residual.codes == ESCAPE
    blocks = zip(before.split(BLOCK, 1), escaped.split(BLOCK, 1), strict=True)
    listed = [values[mask] for values, mask in blocks]
    counts = torch.tensor([len(values) for values in listed], dtype=torch.int64)
    residual.bases.copy_(counts.cumsum(0) - counts)
    residual.escapes = torch.cat([before[0, :0], *listed])


def _at_their_places(residual: Residual) -> Tensor:
    escaped = residual.codes == ESCAPE
    values = torch.zeros_like(residual.codes, dtype=residual.escapes.dtype)
    blocks = zip(values.split(BLOCK, 1), escaped.split(BLOCK, 1), strict=True)
    for first, (part, mask) in zip(residual.bases.tolist(), blocks, strict=True):
        part[mask] = residual.escapes[first : first + int(mask.sum())]
    return values
