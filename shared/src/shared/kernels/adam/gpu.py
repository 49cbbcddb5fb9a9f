"""Adam's step, its residual and its inverse in Triton, a block of elements a program.

Compiled with `enable_fp_fusion=False`, with divisions and roots rounded to nearest, so that the bits
are those of the other forms. Nobody knows how many escapes there will be: a block first reserves its
room in the list, and if there is none it leaves its elements alone. The host reads the counters once
for all tensors of a call, makes room and runs what was left.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.adam.factors import Factors
from shared.kernels.adam.layout import BLOCK, AdamTensors, Residual
from shared.kernels.adam.ulps import FARTHEST

__all__ = ["step", "undo"]

_NUM_WARPS = 4
_FARTHEST = tl.constexpr(FARTHEST)


@triton.jit
def _load(at, offsets, live, BF16: tl.constexpr):  # noqa: ANN001, ANN202
    word = tl.load(at + offsets, mask=live, other=0).to(tl.int32)
    if BF16:
        word = word << 16
    return word.to(tl.float32, bitcast=True)


@triton.jit
def _store(at, offsets, value, live, BF16: tl.constexpr):  # noqa: ANN001, ANN202
    word = value.to(tl.int32, bitcast=True)
    if BF16:
        tl.store(at + offsets, (word >> 16).to(tl.int16), mask=live)
    else:
        tl.store(at + offsets, word, mask=live)


@triton.jit
def _rounded(value, BF16: tl.constexpr):  # noqa: ANN001, ANN202
    """`value` as the tensors' type holds it."""
    if BF16:
        word = value.to(tl.int32, bitcast=True)
        rounded = (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000
        word = tl.where((word & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, rounded)
        value = word.to(tl.float32, bitcast=True)
    return value


@triton.jit
def _quotient(m, v, step_size, root_inverse, eps):  # noqa: ANN001, ANN202
    return tl.div_rn(step_size * m, tl.sqrt_rn(v) * root_inverse + eps)


@triton.jit
def _code(value, guess, live, BF16: tl.constexpr):  # noqa: ANN001, ANN202
    was = value.to(tl.int32, bitcast=True)
    word = guess.to(tl.int32, bitcast=True)
    broken = (word & 0x7FFFFFFF) > 0x7F800000
    if BF16:
        was = was >> 16
        word = word >> 16
    off = was - word
    fits = (off >= -_FARTHEST) & (off <= _FARTHEST) & (broken == 0)
    return tl.where(live, tl.where(fits, off, -128), 0)


@triton.jit
def _restored(guess, code, first, escapes, BF16: tl.constexpr):  # noqa: ANN001, ANN202
    """The value that a guess and its code stand for, and where the next row's escapes begin."""
    off = code
    if BF16:
        off = off << 16
    value = (guess.to(tl.int32, bitcast=True) + off).to(tl.float32, bitcast=True)
    escaped = code == -128
    rank = tl.cumsum(escaped.to(tl.int32), 0) - 1
    value = tl.where(escaped, _load(escapes, first + rank, escaped, BF16), value)
    return value, first + tl.sum(escaped.to(tl.int32), 0)


@triton.jit
def _list(value, code, first, escapes, live, BF16: tl.constexpr):  # noqa: ANN001, ANN202
    escaped = code == -128
    rank = tl.cumsum(escaped.to(tl.int32), 0) - 1
    _store(escapes, first + rank, value, escaped & live, BF16)
    return first + tl.sum(escaped.to(tl.int32), 0)


@triton.jit
def _step(  # noqa: ANN202
    param,  # noqa: ANN001  tensors as integers of their type's width
    grad,  # noqa: ANN001
    exp_avg,  # noqa: ANN001
    exp_avg_sq,  # noqa: ANN001
    codes,  # noqa: ANN001
    bases,  # noqa: ANN001  -1 where a block is still to be stepped
    escapes,  # noqa: ANN001
    capacity,  # noqa: ANN001
    counter,  # noqa: ANN001
    n,  # noqa: ANN001
    sign,  # noqa: ANN001
    l2,  # noqa: ANN001
    decay,  # noqa: ANN001
    mix,  # noqa: ANN001
    take,  # noqa: ANN001
    keep_sq,  # noqa: ANN001
    take_sq,  # noqa: ANN001
    step_size,  # noqa: ANN001
    root_inverse,  # noqa: ANN001
    eps,  # noqa: ANN001
    decay_inverse,  # noqa: ANN001
    keep_inverse,  # noqa: ANN001
    keep_sq_inverse,  # noqa: ANN001
    HAS_L2: tl.constexpr,
    FROM_GRAD: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    live = offsets < n
    base = tl.full([], -1, tl.int64)
    if RESIDUAL:
        base = tl.load(bases + block)
        live = offsets < tl.where(base < 0, n, 0)
    w0 = _load(param, offsets, live, BF16)
    g = sign * _load(grad, offsets, live, BF16)
    m0 = _load(exp_avg, offsets, live, BF16)
    v0 = _load(exp_avg_sq, offsets, live, BF16)
    if HAS_L2:
        g = g + l2 * w0
    near = m0
    if FROM_GRAD:
        near = g
    m = _rounded(near + mix * (g - m0), BF16)
    v = _rounded(v0 * keep_sq + (take_sq * g) * g, BF16)
    u = _quotient(m, v, step_size, root_inverse, eps)
    w = _rounded(w0 * decay - u, BF16)
    if RESIDUAL:
        before = (v - (take_sq * g) * g) * keep_sq_inverse
        code_w = _code(w0, _rounded((w + u) * decay_inverse, BF16), live, BF16)
        code_m = _code(m0, _rounded((m - take * g) * keep_inverse, BF16), live, BF16)
        code_v = _code(v0, _rounded(tl.where(before < 0, 0.0, before), BF16), live, BF16)
        escaped = (code_w == -128).to(tl.int32) + (code_m == -128).to(tl.int32)
        count = tl.sum(escaped + (code_v == -128).to(tl.int32), 0).to(tl.int64)
        first = tl.atomic_add(counter, count)
        end = tl.where(count == 0, 0, first + count)
        fits = end <= tl.where(base < 0, capacity, -1)
        tl.store(bases + block, tl.where(fits, first, base))
        live = offsets < tl.where(fits, n, 0)
        at = _list(w0, code_w, first, escapes, live, BF16)
        at = _list(m0, code_m, at, escapes, live, BF16)
        _list(v0, code_v, at, escapes, live, BF16)
        tl.store(codes + offsets, code_w.to(tl.int8), mask=live)
        tl.store(codes + n + offsets, code_m.to(tl.int8), mask=live)
        tl.store(codes + 2 * n + offsets, code_v.to(tl.int8), mask=live)
    _store(param, offsets, w, live, BF16)
    _store(exp_avg, offsets, m, live, BF16)
    _store(exp_avg_sq, offsets, v, live, BF16)


@triton.jit
def _undo(  # noqa: ANN202
    param,  # noqa: ANN001  tensors as integers of their type's width
    grad,  # noqa: ANN001
    exp_avg,  # noqa: ANN001
    exp_avg_sq,  # noqa: ANN001
    codes,  # noqa: ANN001
    bases,  # noqa: ANN001
    escapes,  # noqa: ANN001
    n,  # noqa: ANN001
    sign,  # noqa: ANN001
    l2,  # noqa: ANN001
    take,  # noqa: ANN001
    take_sq,  # noqa: ANN001
    step_size,  # noqa: ANN001
    root_inverse,  # noqa: ANN001
    eps,  # noqa: ANN001
    decay_inverse,  # noqa: ANN001
    keep_inverse,  # noqa: ANN001
    keep_sq_inverse,  # noqa: ANN001
    HAS_L2: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    live = offsets < n
    m = _load(exp_avg, offsets, live, BF16)
    v = _load(exp_avg_sq, offsets, live, BF16)
    g = sign * _load(grad, offsets, live, BF16)
    u = _quotient(m, v, step_size, root_inverse, eps)
    w = _rounded((_load(param, offsets, live, BF16) + u) * decay_inverse, BF16)
    at = tl.zeros([], tl.int64)
    if RESIDUAL:
        code = tl.load(codes + offsets, mask=live, other=0).to(tl.int32)
        w, at = _restored(w, code, tl.load(bases + block), escapes, BF16)
    if HAS_L2:
        g = g + l2 * w
    m = _rounded((m - take * g) * keep_inverse, BF16)
    v = (v - (take_sq * g) * g) * keep_sq_inverse
    v = _rounded(tl.where(v < 0, 0.0, v), BF16)
    if RESIDUAL:
        code = tl.load(codes + n + offsets, mask=live, other=0).to(tl.int32)
        m, at = _restored(m, code, at, escapes, BF16)
        code = tl.load(codes + 2 * n + offsets, mask=live, other=0).to(tl.int32)
        v, at = _restored(v, code, at, escapes, BF16)
    _store(param, offsets, w, live, BF16)
    _store(exp_avg, offsets, m, live, BF16)
    _store(exp_avg_sq, offsets, v, live, BF16)


def step(
    tensors: Sequence[AdamTensors],
    factors: Sequence[Factors],
    residuals: Sequence[Residual] | None,
) -> None:
    """Step in place, and fill the residuals; with residuals the host waits for the device once."""
    if residuals is None:
        for of, f in zip(tensors, factors, strict=True):
            _launch_step(of, f, None, of.param)
        return
    counters = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].param.device)
    for residual in residuals:
        residual.bases.fill_(-1)
    waiting = list(range(len(tensors)))
    while waiting:
        for place in waiting:
            _launch_step(tensors[place], factors[place], residuals[place], counters[place])
        wanted = counters.tolist()
        waiting = [p for p in waiting if wanted[p] > len(residuals[p].escapes)]
        for place in waiting:
            # Blocks that found room keep it; the others together want no more than all did.
            full = residuals[place].escapes
            residuals[place].escapes = full.new_empty(len(full) + wanted[place])
            residuals[place].escapes[: len(full)] = full
            counters[place] = len(full)


def undo(
    tensors: Sequence[AdamTensors],
    factors: Sequence[Factors],
    residuals: Sequence[Residual] | None,
) -> None:
    """Undo in place what `step` did with the same gradients and factors."""
    for place, (of, f) in enumerate(zip(tensors, factors, strict=True)):
        residual = None if residuals is None else residuals[place]
        words, n = _as_words(of.param), len(of.param)
        _undo[(triton.cdiv(n, BLOCK),)](
            words,
            _as_words(of.grad),
            _as_words(of.exp_avg),
            _as_words(of.exp_avg_sq),
            words if residual is None else residual.codes,
            words if residual is None else residual.bases,
            words if residual is None else _as_words(residual.escapes),
            n,
            f.sign,
            f.l2,
            f.take,
            f.take_sq,
            f.step_size,
            f.root_inverse,
            f.eps,
            f.decay_inverse,
            f.keep_inverse,
            f.keep_sq_inverse,
            HAS_L2=f.l2 != 0,
            RESIDUAL=residual is not None,
            BF16=of.param.dtype == torch.bfloat16,
            BLOCK=BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )


def _launch_step(of: AdamTensors, f: Factors, residual: Residual | None, counter: Tensor) -> None:
    words, n = _as_words(of.param), len(of.param)
    _step[(triton.cdiv(n, BLOCK),)](
        words,
        _as_words(of.grad),
        _as_words(of.exp_avg),
        _as_words(of.exp_avg_sq),
        words if residual is None else residual.codes,
        words if residual is None else residual.bases,
        words if residual is None else _as_words(residual.escapes),
        0 if residual is None else len(residual.escapes),
        counter,
        n,
        f.sign,
        f.l2,
        f.decay,
        f.mix,
        f.take,
        f.keep_sq,
        f.take_sq,
        f.step_size,
        f.root_inverse,
        f.eps,
        f.decay_inverse,
        f.keep_inverse,
        f.keep_sq_inverse,
        HAS_L2=f.l2 != 0,
        FROM_GRAD=f.from_grad,
        RESIDUAL=residual is not None,
        BF16=of.param.dtype == torch.bfloat16,
        BLOCK=BLOCK,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )


def _as_words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
