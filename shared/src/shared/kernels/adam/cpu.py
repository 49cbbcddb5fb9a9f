"""Adam's step, its residual and its inverse in numba, a block at a time in the first cache.

A block's values lie in the rows of one scratch array, at constant distances: LLVM then needs no
run-time test of whether arrays overlap, and every loop below becomes vectors.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.kernels.adam.factors import Factors
from shared.kernels.adam.layout import BLOCK, AdamTensors, Residual
from shared.kernels.jit import compiled
from shared.kernels.rows import over_rows

__all__ = ["step", "undo"]

# Rows of the scratch array.
_ROWS = 11
_W0, _G, _M0, _V0, _W1, _M1, _V1, _U, _GW, _GM, _GV = (np.uint64(r * BLOCK) for r in range(_ROWS))
_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INF = np.int32(0x7F800000)
_NAN = np.int32(0x7FC00000)
_HALF = np.int32(0x7FFF)
_HIGH = np.int32(-0x10000)
_1 = np.int32(1)
_16 = np.int32(16)
_WIDEST = np.int32(127)
_ESCAPE = np.int32(-128)
_ZERO = np.float32(0)
_ALL_ESCAPES = np.uint64(0x8080808080808080)
_LOW_BITS = np.uint64(0x0101010101010101)
_NO_CODES = np.empty((3, 0), np.int8)
_NO_BASES = np.empty(0, np.int64)


@compiled
def _load(source, start, size, words, row, shift):  # noqa: ANN001, ANN202
    for i in range(size):
        words[row + i] = np.int32(source[start + i]) << shift


@compiled
def _store(target, start, size, words, row, shift):  # noqa: ANN001, ANN202
    for i in range(size):
        target[start + i] = words[row + i] >> shift


@compiled
def _round_to_bf16(words, row, size):  # noqa: ANN001, ANN202
    for i in range(size):
        word = words[row + i]
        rounded = np.int32(word + _HALF + ((word >> _16) & _1)) & _HIGH
        words[row + i] = _NAN if (word & _MAGNITUDE) > _INF else rounded


@compiled
def _decay_gradient(s, param, size, f):  # noqa: ANN001, ANN202
    sign, l2 = f[0], f[1]
    for i in range(size):
        s[_G + i] = sign * s[_G + i]
    if l2 != _ZERO:
        for i in range(size):
            s[_G + i] += l2 * s[param + i]


@compiled
def _average(s, size, f):  # noqa: ANN001, ANN202
    from_grad, mix, keep_sq, take_sq = f[3] != _ZERO, f[4], f[6], f[7]
    for i in range(size):
        g = s[_G + i]
        m = s[_M0 + i]
        s[_M1 + i] = (g if from_grad else m) + mix * (g - m)
        s[_V1 + i] = s[_V0 + i] * keep_sq + (take_sq * g) * g


@compiled
def _quotient(s, size, f):  # noqa: ANN001, ANN202
    step_size, root, eps = f[8], f[9], f[10]
    for i in range(size):
        s[_U + i] = (step_size * s[_M1 + i]) / (np.sqrt(s[_V1 + i]) / root + eps)


@compiled
def _invert_param(s, size, f):  # noqa: ANN001, ANN202
    for i in range(size):
        s[_GW + i] = (s[_W1 + i] + s[_U + i]) * f[11]


@compiled
def _invert_averages(s, size, f):  # noqa: ANN001, ANN202
    take, take_sq, keep_inverse, keep_sq_inverse = f[5], f[7], f[12], f[13]
    for i in range(size):
        g = s[_G + i]
        s[_GM + i] = (s[_M1 + i] - take * g) * keep_inverse
        v = (s[_V1 + i] - (take_sq * g) * g) * keep_sq_inverse
        s[_GV + i] = _ZERO if v < _ZERO else v


@compiled
def _encode(words, old, guess, size, shift, codes):  # noqa: ANN001, ANN202
    for i in range(size):
        was = words[old + i]
        word = words[guess + i]
        broken = (word & _MAGNITUDE) > _INF
        was = np.int32(was ^ ((was >> _SIGN) & _MAGNITUDE)) >> shift
        word = np.int32(word ^ ((word >> _SIGN) & _MAGNITUDE)) >> shift
        off = np.int32(was - word)
        codes[i] = _ESCAPE if broken | (off > _WIDEST) | (off < -_WIDEST) else off


@compiled
def _decode(words, guess, size, shift, codes, start, escapes, at):  # noqa: ANN001, ANN202
    """Add the codes to a row of guesses; returns where the next row's escapes begin."""
    for i in range(size):
        word = words[guess + i]
        word = np.int32(word ^ ((word >> _SIGN) & _MAGNITUDE)) >> shift
        word = np.int32(word + codes[start + i]) << shift
        words[guess + i] = word ^ ((word >> _SIGN) & (_MAGNITUDE >> shift << shift))
    for i in range(size):
        if codes[start + i] == _ESCAPE:
            words[guess + i] = np.int32(escapes[at]) << shift
            at += 1
    return at


@compiled
def _list_escapes(codes, codes8, size, words, old, shift, escapes, at):  # noqa: ANN001, ANN202
    for word in range((size + 7) // 8):
        flipped = codes8[word] ^ _ALL_ESCAPES
        if ((flipped - _LOW_BITS) & ~flipped & _ALL_ESCAPES) != 0:
            for i in range(word * 8, min(word * 8 + 8, size)):
                if codes[i] == _ESCAPE:
                    escapes[at] = words[old + np.uint64(i)] >> shift
                    at += 1
    return at


@compiled
def _step(  # noqa: ANN202
    param,  # noqa: ANN001
    grad,  # noqa: ANN001
    exp_avg,  # noqa: ANN001
    exp_avg_sq,  # noqa: ANN001
    begin,  # noqa: ANN001
    end,  # noqa: ANN001
    f,  # noqa: ANN001
    shift,  # noqa: ANN001
    s,  # noqa: ANN001
    words,  # noqa: ANN001
    codes,  # noqa: ANN001
    bases,  # noqa: ANN001
    escapes,  # noqa: ANN001
    listed,  # noqa: ANN001
    code,  # noqa: ANN001
    code8,  # noqa: ANN001
):
    """Step the blocks [begin, end) or as many as `escapes` has room for.

    Escapes are counted from `listed`. Returns the next block and the number of escapes.
    """
    n = param.size
    residual = codes.size != 0
    at = 0
    for block in range(begin, end):
        start = block * BLOCK
        size = np.uint64(min(BLOCK, n - start))
        start = np.uint64(start)
        if residual and at + 3 * BLOCK > escapes.size:
            return block, at
        _load(param, start, size, words, _W0, shift)
        _load(grad, start, size, words, _G, shift)
        _load(exp_avg, start, size, words, _M0, shift)
        _load(exp_avg_sq, start, size, words, _V0, shift)
        _decay_gradient(s, _W0, size, f)
        _average(s, size, f)
        if shift:
            _round_to_bf16(words, _M1, size)
            _round_to_bf16(words, _V1, size)
        _quotient(s, size, f)
        decay = f[2]
        for i in range(size):
            s[_W1 + i] = s[_W0 + i] * decay - s[_U + i]
        if shift:
            _round_to_bf16(words, _W1, size)
        if residual:
            bases[block] = listed + at
            _invert_param(s, size, f)
            _invert_averages(s, size, f)
            for row in range(3):
                guess = _GW + np.uint64(row * BLOCK)
                if shift:
                    _round_to_bf16(words, guess, size)
                old = _W0
                if row == 1:
                    old = _M0
                elif row == 2:
                    old = _V0
                _encode(words, old, guess, size, shift, code)
                at = _list_escapes(code, code8, size, words, old, shift, escapes, at)
                for i in range(size):
                    codes[row, start + i] = code[i]
        _store(param, start, size, words, _W1, shift)
        _store(exp_avg, start, size, words, _M1, shift)
        _store(exp_avg_sq, start, size, words, _V1, shift)
    return end, at


@compiled
def _undo(  # noqa: ANN202
    param,  # noqa: ANN001
    grad,  # noqa: ANN001
    exp_avg,  # noqa: ANN001
    exp_avg_sq,  # noqa: ANN001
    begin,  # noqa: ANN001
    end,  # noqa: ANN001
    f,  # noqa: ANN001
    shift,  # noqa: ANN001
    s,  # noqa: ANN001
    words,  # noqa: ANN001
    codes,  # noqa: ANN001
    bases,  # noqa: ANN001
    escapes,  # noqa: ANN001
):
    n = param.size
    residual = codes.size != 0
    at = 0
    for block in range(begin, end):
        start = block * BLOCK
        size = np.uint64(min(BLOCK, n - start))
        start = np.uint64(start)
        _load(param, start, size, words, _W1, shift)
        _load(grad, start, size, words, _G, shift)
        _load(exp_avg, start, size, words, _M1, shift)
        _load(exp_avg_sq, start, size, words, _V1, shift)
        _quotient(s, size, f)
        _invert_param(s, size, f)
        if shift:
            _round_to_bf16(words, _GW, size)
        if residual:
            at = _decode(words, _GW, size, shift, codes[0], start, escapes, bases[block])
        _decay_gradient(s, _GW, size, f)
        _invert_averages(s, size, f)
        if shift:
            _round_to_bf16(words, _GM, size)
            _round_to_bf16(words, _GV, size)
        if residual:
            at = _decode(words, _GM, size, shift, codes[1], start, escapes, at)
            _decode(words, _GV, size, shift, codes[2], start, escapes, at)
        _store(param, start, size, words, _GW, shift)
        _store(exp_avg, start, size, words, _GM, shift)
        _store(exp_avg_sq, start, size, words, _GV, shift)


def step(
    tensors: Sequence[AdamTensors],
    factors: Sequence[Factors],
    residuals: Sequence[Residual] | None,
) -> None:
    """Step in place, and fill the residuals."""
    for place, (of, f) in enumerate(zip(tensors, factors, strict=True)):
        _step_one(of, f, None if residuals is None else residuals[place])


def undo(
    tensors: Sequence[AdamTensors],
    factors: Sequence[Factors],
    residuals: Sequence[Residual] | None,
) -> None:
    """Undo in place what `step` did with the same gradients and factors."""
    for place, (of, f) in enumerate(zip(tensors, factors, strict=True)):
        _undo_one(of, f, None if residuals is None else residuals[place])


def _step_one(of: AdamTensors, f: Factors, residual: Residual | None) -> None:
    words = _words_of(of)
    codes, bases = _NO_CODES, _NO_BASES
    if residual is not None:
        codes, bases = residual.codes.numpy(), residual.bases.numpy()
    numbers = np.array(f, np.float32)
    shift = _shift(of)
    pieces: dict[int, list[NDArray]] = {}

    def run(begin: int, end: int) -> None:
        scratch = np.empty(_ROWS * BLOCK, np.float32)
        code = np.empty(BLOCK, np.int8)
        pieces[begin] = found = []
        block, listed = begin, 0
        while block < end:
            # Nobody knows how many escapes there will be; untouched memory costs nothing.
            room = 3 * BLOCK + (end - block) * BLOCK // 8 if residual is not None else 0
            escapes = np.empty(room, words[0].dtype)
            block, count = _step(
                *words,
                block,
                end,
                numbers,
                shift,
                scratch,
                scratch.view(np.int32),
                codes,
                bases,
                escapes,
                listed,
                code,
                code.view(np.uint64),
            )
            found.append(escapes[:count])
            listed += count

    num_blocks = -(-len(of.param) // BLOCK)
    over_rows(run, num_blocks, 7 * of.param.nbytes)
    if residual is not None:
        first = 0
        begins = sorted(pieces)
        for begin, end in zip(begins, [*begins[1:], num_blocks], strict=True):
            bases[begin:end] += first
            first += sum(len(piece) for piece in pieces[begin])
        listed = np.concatenate([piece for begin in begins for piece in pieces[begin]])
        residual.escapes = torch.from_numpy(listed).view(of.param.dtype)


def _undo_one(of: AdamTensors, f: Factors, residual: Residual | None) -> None:
    words = _words_of(of)
    codes, bases, escapes = _NO_CODES, _NO_BASES, words[0]
    if residual is not None:
        codes, bases = residual.codes.numpy(), residual.bases.numpy()
        escapes = _as_words(residual.escapes)
    numbers = np.array(f, np.float32)
    shift = _shift(of)

    def run(begin: int, end: int) -> None:
        scratch = np.empty(_ROWS * BLOCK, np.float32)
        as_words = scratch.view(np.int32)
        _undo(*words, begin, end, numbers, shift, scratch, as_words, codes, bases, escapes)

    over_rows(run, -(-len(of.param) // BLOCK), 7 * of.param.nbytes)


def _words_of(of: AdamTensors) -> list[NDArray]:
    return [_as_words(tensor) for tensor in of]


def _as_words(tensor: Tensor) -> NDArray:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()


def _shift(of: AdamTensors) -> np.int32:
    return _16 if of.param.dtype == torch.bfloat16 else np.int32(0)
