"""Adam's step, its residual and its inverse in numba, a block at a time in the first cache.

The step is two loops over a block, codes included: the averages, then the parameter. Its root and division
are slow, and overlap with those of later elements only if its loop is short. What was there stays in rows of
one scratch array, at constant distances, for the loop that lists what escapes. The inverse's guesses lie there
too: loops over them need no run-time test of whether arrays overlap, and become vectors.

`narrow`, `has_l2`, `from_grad` and `keep` are True or None: None is a type of its own to numba, which
compiles a form for each choice that is used, without a branch in its loops.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from shared.kernels.adam.factors import Factors
from shared.kernels.adam.layout import BLOCK, AdamTensors, Residual
from shared.kernels.adam.ulps import ESCAPE, FARTHEST
from shared.kernels.jit import compiled, inlined
from shared.kernels.rows import over_rows

__all__ = ["step", "undo"]

# Rows of the scratch array: what was there, what the step makes, what the inverse guesses.
_ROWS = 10
# Rows that lie a power of two apart would contend for the same places of the cache.
_STRIDE = BLOCK + 16
_W0, _G, _M0, _V0, _W1, _M1, _V1, _GW, _GM, _GV = (np.uint64(r * _STRIDE) for r in range(_ROWS))
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INF = np.int32(0x7F800000)
_NAN = np.int32(0x7FC00000)
_HALF = np.int32(0x7FFF)
_HIGH = np.int32(-0x10000)
_1 = np.int32(1)
_16 = np.int32(16)
_LOWEST, _HIGHEST = np.int32(-128), np.int32(127)
_BEYOND = np.int32(-0x80000000)
_ESCAPE, _FARTHEST, _SPAN = np.int8(ESCAPE), np.int8(FARTHEST), np.uint8(2 * FARTHEST)
_ZERO = np.float32(0)
# Codes that are looked through together for one that escapes, and if there is one, again.
_MANY = np.uint64(256)
_FEW = np.uint64(32)
_NO_CODES = np.empty((3, 0), np.int8)
_NO_BASES = np.empty(0, np.int64)


def _bitcast(source: Any, target: Any, to: Any) -> Any:
    """Makes the intrinsic that reads a number's bits as another type."""

    def typed(context, number):  # noqa: ANN001, ANN202
        def cast(context, builder, signature, args):  # noqa: ANN001, ANN202
            return builder.bitcast(args[0], to)

        return target(source), cast

    return intrinsic(typed)


_bits = _bitcast(types.float32, types.int32, ir.IntType(32))
_float = _bitcast(types.int32, types.float32, ir.FloatType())


@inlined
def _held(number, narrow):  # noqa: ANN001, ANN202
    """A float32 as the tensors hold it: in bfloat16 if they are narrow."""
    if narrow is not None:
        word = _bits(number)
        rounded = np.int32(np.int32(word + _HALF + ((word >> _16) & _1)) & _HIGH)
        number = _float(_NAN if np.int32(word & _MAGNITUDE) > _INF else rounded)
    return number


@inlined
def _load(source, start, size, words, row, narrow):  # noqa: ANN001, ANN202
    if narrow is not None:
        for i in range(size):
            words[row + i] = np.int32(source[start + i]) << _16
    else:
        for i in range(size):
            words[row + i] = source[start + i]


@inlined
def _store(target, start, size, words, row, narrow):  # noqa: ANN001, ANN202
    if narrow is not None:
        for i in range(size):
            target[start + i] = words[row + i] >> _16
    else:
        for i in range(size):
            target[start + i] = words[row + i]


@inlined
def _widen(word, narrow):  # noqa: ANN001, ANN202
    """The float32 that a tensor's word stands for."""
    word = np.int32(word)
    if narrow is not None:
        word = np.int32(word << _16)
    return _float(word)


@inlined
def _word(number, narrow):  # noqa: ANN001, ANN202
    """The word by which a tensor holds a number that fits its type."""
    word = _bits(number)
    if narrow is not None:
        word = np.int32(word >> _16)
    return word


@inlined
def _off(number, guess, narrow):  # noqa: ANN001, ANN202
    """Units in the last place from a guess to a number.

    A float32 may be near a guess that is NaN: `_escape_nan` sees to those.
    """
    was, word = _bits(number), _bits(guess)
    if narrow is None:
        return np.int32(was - word)
    off = np.int32(np.int32(was >> _16) - np.int32(word >> _16))
    return _BEYOND if np.isnan(guess) else off


@inlined
def _code(off):  # noqa: ANN001, ANN202
    # So processors pack words into bytes, in one instruction. What is at an end may be farther off.
    return np.int8(min(max(off, _LOWEST), _HIGHEST))


@inlined
def _step_averages(  # noqa: ANN202
    param,  # noqa: ANN001
    grad,  # noqa: ANN001
    exp_avg,  # noqa: ANN001
    exp_avg_sq,  # noqa: ANN001
    start,  # noqa: ANN001
    size,  # noqa: ANN001
    f,  # noqa: ANN001
    narrow,  # noqa: ANN001
    has_l2,  # noqa: ANN001
    from_grad,  # noqa: ANN001
    keep,  # noqa: ANN001
    codes,  # noqa: ANN001
    s,  # noqa: ANN001
):
    """Step a block's averages in place; with `keep`, write their codes and what was there."""
    sign, l2, mix, take, keep_sq, take_sq = f[0], f[1], f[4], f[5], f[6], f[7]
    keep_inverse, keep_sq_inverse = f[12], f[13]
    for i in range(size):
        at = start + i
        m0 = _widen(exp_avg[at], narrow)
        v0 = _widen(exp_avg_sq[at], narrow)
        g = sign * _widen(grad[at], narrow)
        if has_l2 is not None:
            g = g + l2 * _widen(param[at], narrow)
        m = m0
        if from_grad is not None:
            m = g
        m = _held(m + mix * (g - m0), narrow)
        square = (take_sq * g) * g
        v = _held(v0 * keep_sq + square, narrow)
        exp_avg[at] = _word(m, narrow)
        exp_avg_sq[at] = _word(v, narrow)
        if keep is not None:
            s[_M0 + i] = m0
            s[_V0 + i] = v0
            before = (v - square) * keep_sq_inverse
            before = before if not before < _ZERO else _ZERO
            off_m = _off(m0, _held((m - take * g) * keep_inverse, narrow), narrow)
            off_v = _off(v0, _held(before, narrow), narrow)
            codes[1, at] = _code(off_m)
            codes[2, at] = _code(off_v)


@inlined
def _step_param(param, exp_avg, exp_avg_sq, start, size, f, narrow, keep, codes, s):  # noqa: ANN001, ANN202
    """Step a block's parameter after its averages; with `keep`, write its codes and what was there.

    Returns the parameter's largest magnitude, as a word. Whatever a NaN came in by, the old parameter,
    an average or the gradient, the new parameter is NaN then.
    """
    decay, step_size, root_inverse, eps, decay_inverse = f[2], f[8], f[9], f[10], f[11]
    largest = np.int32(0)
    for i in range(size):
        at = start + i
        w0 = _widen(param[at], narrow)
        m = _widen(exp_avg[at], narrow)
        v = _widen(exp_avg_sq[at], narrow)
        u = (step_size * m) / (np.sqrt(v) * root_inverse + eps)
        w = _held(w0 * decay - u, narrow)
        param[at] = _word(w, narrow)
        if keep is not None:
            s[_W0 + i] = w0
            codes[0, at] = _code(_off(w0, _held((w + u) * decay_inverse, narrow), narrow))
            largest = max(largest, np.int32(_bits(w) & _MAGNITUDE))
    return largest


@inlined
def _escape_nan(words, old, row, start, size, codes):  # noqa: ANN001, ANN202
    """Have those float32 of a block escape whose guess is NaN: their word less their code."""
    for i in range(size):
        if np.isnan(_float(np.int32(words[old + i] - codes[row, start + i]))):
            codes[row, start + i] = _ESCAPE


@inlined
def _retreat_param(s, size, f, narrow):  # noqa: ANN001, ANN202
    step_size, root_inverse, eps, decay_inverse = f[8], f[9], f[10], f[11]
    for i in range(size):
        u = (step_size * s[_M1 + i]) / (np.sqrt(s[_V1 + i]) * root_inverse + eps)
        s[_GW + i] = _held((s[_W1 + i] + u) * decay_inverse, narrow)


@inlined
def _retreat_averages(s, size, f, narrow):  # noqa: ANN001, ANN202
    sign, l2, take, take_sq = f[0], f[1], f[5], f[7]
    keep_inverse, keep_sq_inverse = f[12], f[13]
    has_l2 = l2 != _ZERO
    for i in range(size):
        g = sign * s[_G + i]
        g = g + l2 * s[_GW + i] if has_l2 else g
        s[_GM + i] = _held((s[_M1 + i] - take * g) * keep_inverse, narrow)
        before = (s[_V1 + i] - (take_sq * g) * g) * keep_sq_inverse
        s[_GV + i] = _held(max(before, _ZERO), narrow)


@inlined
def _any_escapes(codes, row, first, stop):  # noqa: ANN001, ANN202
    """Whether a code of [first, stop) is beyond the farthest; vectors tell it of all at once."""
    most = np.uint8(0)
    for at in range(first, stop):
        most = max(most, np.uint8(codes[row, at] + _FARTHEST))
    return most > _SPAN


@inlined
def _list_escapes(codes, row, start, size, words, old, narrow, escapes, at):  # noqa: ANN001, ANN202
    """Mark the codes that escape and list what was there; returns where the next row's begin."""
    end = start + size
    many = start
    while many < end:
        many_end = min(many + _MANY, end)
        few = many if _any_escapes(codes, row, many, many_end) else many_end
        while few < many_end:
            few_end = min(few + _FEW, many_end)
            if _any_escapes(codes, row, few, few_end):
                for i in range(few, few_end):
                    if np.uint8(codes[row, i] + _FARTHEST) > _SPAN:
                        codes[row, i] = _ESCAPE
                        word = words[old + i - start]
                        if narrow is not None:
                            word = np.int32(word >> _16)
                        escapes[at] = word
                        at += 1
            few = few_end
        many = many_end
    return at


@inlined
def _decode(words, guess, size, narrow, codes, row, start, escapes, at):  # noqa: ANN001, ANN202
    """Correct a row of guesses; returns where the next row's escapes begin."""
    lowest = np.int8(0)
    for i in range(size):
        code = codes[row, start + i]
        lowest = min(lowest, code)
        off = np.int32(code)
        if narrow is not None:
            off = np.int32(off << _16)
        words[guess + i] += off
    if lowest == _ESCAPE:
        for i in range(size):
            if codes[row, start + i] == _ESCAPE:
                word = np.int32(escapes[at])
                if narrow is not None:
                    word = np.int32(word << _16)
                words[guess + i] = word
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
    narrow,  # noqa: ANN001
    has_l2,  # noqa: ANN001
    from_grad,  # noqa: ANN001
    keep,  # noqa: ANN001
    s,  # noqa: ANN001
    words,  # noqa: ANN001
    codes,  # noqa: ANN001
    bases,  # noqa: ANN001
    escapes,  # noqa: ANN001
    listed,  # noqa: ANN001
):
    """Step the blocks [begin, end) or as many as `escapes` has room for.

    Escapes are counted from `listed`. Returns the next block and the number of escapes.
    """
    n = param.size
    at = 0
    for block in range(begin, end):
        if keep is not None and at + 3 * BLOCK > escapes.size:
            return block, at
        first = block * BLOCK
        size = np.uint64(min(BLOCK, n - first))
        start = np.uint64(first)
        _step_averages(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            start,
            size,
            f,
            narrow,
            has_l2,
            from_grad,
            keep,
            codes,
            s,
        )
        largest = _step_param(param, exp_avg, exp_avg_sq, start, size, f, narrow, keep, codes, s)
        if keep is not None:
            if narrow is None and largest > _INF:
                _escape_nan(words, _W0, 0, start, size, codes)
                _escape_nan(words, _M0, 1, start, size, codes)
                _escape_nan(words, _V0, 2, start, size, codes)
            bases[block] = listed + at
            at = _list_escapes(codes, 0, start, size, words, _W0, narrow, escapes, at)
            at = _list_escapes(codes, 1, start, size, words, _M0, narrow, escapes, at)
            at = _list_escapes(codes, 2, start, size, words, _V0, narrow, escapes, at)
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
    narrow,  # noqa: ANN001
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
        first = block * BLOCK
        size = np.uint64(min(BLOCK, n - first))
        start = np.uint64(first)
        _load(param, start, size, words, _W1, narrow)
        _load(grad, start, size, words, _G, narrow)
        _load(exp_avg, start, size, words, _M1, narrow)
        _load(exp_avg_sq, start, size, words, _V1, narrow)
        _retreat_param(s, size, f, narrow)
        if residual:
            at = _decode(words, _GW, size, narrow, codes, 0, start, escapes, bases[block])
        _retreat_averages(s, size, f, narrow)
        if residual:
            at = _decode(words, _GM, size, narrow, codes, 1, start, escapes, at)
            _decode(words, _GV, size, narrow, codes, 2, start, escapes, at)
        _store(param, start, size, words, _GW, narrow)
        _store(exp_avg, start, size, words, _GM, narrow)
        _store(exp_avg_sq, start, size, words, _GV, narrow)


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
    narrow, keep = _narrow(of), _chosen(residual is not None)
    has_l2, from_grad = _chosen(numbers[1] != 0), _chosen(f.from_grad)
    pieces: dict[int, list[NDArray]] = {}

    def run(begin: int, end: int) -> None:
        scratch = _new_scratch()
        pieces[begin] = found = []
        block, listed = begin, 0
        while block < end:
            # Nobody knows how many escapes there will be; untouched memory costs nothing.
            room = 3 * BLOCK + (end - block) * BLOCK // 8 if keep else 0
            escapes = np.empty(room, words[0].dtype)
            block, count = _step(
                *words,
                block,
                end,
                numbers,
                narrow,
                has_l2,
                from_grad,
                keep,
                scratch,
                scratch.view(np.int32),
                codes,
                bases,
                escapes,
                listed,
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
    narrow = _narrow(of)

    def run(begin: int, end: int) -> None:
        scratch = _new_scratch()
        as_words = scratch.view(np.int32)
        _undo(*words, begin, end, numbers, narrow, scratch, as_words, codes, bases, escapes)

    over_rows(run, -(-len(of.param) // BLOCK), 7 * of.param.nbytes)


def _words_of(of: AdamTensors) -> list[NDArray]:
    return [_as_words(tensor) for tensor in of]


def _as_words(tensor: Tensor) -> NDArray:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()


def _new_scratch() -> NDArray:
    # Begins with a line of the cache, as its rows then do: no vector lies in two lines.
    room = np.empty(_ROWS * _STRIDE + 16, np.float32)
    return room[-(room.ctypes.data // 4) % 16 :][: _ROWS * _STRIDE]


def _narrow(of: AdamTensors) -> bool | None:
    return _chosen(of.param.dtype == torch.bfloat16)


def _chosen(choice: bool) -> bool | None:
    return True if choice else None
