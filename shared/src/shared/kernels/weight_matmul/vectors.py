"""Short vectors as values in numba functions: what the product of packed weights is made of.

numba leaves vectors to the compiler's guesses, which miss the products of 16-bit integers here. These
few operations say them in LLVM's own portable vector types, so that every processor gets its best
instruction (vpdpwssd, vpmaddwd, ...) and none needs a form of its own: LLVM splits what is too wide.
"""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

__all__ = [
    "add_scaled",
    "add_scaled_digits",
    "add_scaled_halves",
    "dot",
    "dot_bytes",
    "float_zeros",
    "int_zeros",
    "less_product",
    "load",
    "load_bytes",
    "load_halves",
    "multiply",
    "nibbles",
    "planes3",
    "planes4",
    "planes8",
    "prefetch",
    "store",
    "store_scaled",
    "subtract",
    "times_256",
    "total",
]


def _operation(function: Callable[..., Any]) -> Any:
    """An intrinsic, whose first argument numba passes: type checkers would ask callers for it."""
    return intrinsic(function)


_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_BYTES, _SHORTS, _INTS, _FLOATS = (
    ir.VectorType(_I8, 64),
    ir.VectorType(_I16, 32),
    ir.VectorType(_I32, 16),
    ir.VectorType(_F32, 16),
)


class VectorType(types.Type):
    """A vector that lives in registers."""

    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        super().__init__(name)
        self.llvm_type = llvm_type


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):
    """Tells numba how a vector is represented."""

    def __init__(self, manager, fe_type) -> None:
        super().__init__(manager, fe_type, fe_type.llvm_type)


_bytes, _shorts, _ints, _floats = (
    VectorType("bytes64", _BYTES),
    VectorType("shorts32", _SHORTS),
    VectorType("ints16", _INTS),
    VectorType("floats16", _FLOATS),
)


def _pointer(context, builder, array_type, array, at):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [at])


def _read(builder, pointer, llvm_type, align):
    value = builder.load(builder.bitcast(pointer, llvm_type.as_pointer()))
    value.align = align
    return value


def _splat(builder, value, vector_type):
    one = builder.insert_element(ir.Constant(vector_type, ir.Undefined), value, _I32(0))
    mask = ir.Constant(ir.VectorType(_I32, vector_type.count), [0] * vector_type.count)
    return builder.shuffle_vector(one, ir.Constant(vector_type, ir.Undefined), mask)


def _all(vector_type, value):
    return ir.Constant(vector_type, [value] * vector_type.count)


def _mask(places):
    return ir.Constant(ir.VectorType(_I32, len(places)), list(places))


def _planes(split):
    """An intrinsic (data, at) -> 4 planes of 32 codes, by split(builder, read)."""

    @_operation
    def planes(typing_context, data, at):
        def generate(context, builder, signature, args):
            def read(offset, count):
                place = builder.add(args[1], args[1].type(offset))
                pointer = _pointer(context, builder, signature.args[0], args[0], place)
                return _read(builder, pointer, ir.VectorType(_I8, count), 1)

            return context.make_tuple(builder, signature.return_type, split(builder, read))

        return types.UniTuple(_shorts, 4)(data, types.intp), generate

    return planes


def _split8(builder, read):
    return [builder.zext(read(32 * p, 32), _SHORTS) for p in range(4)]


def _split4(builder, read):
    planes = []
    for half in range(2):
        lanes = builder.zext(read(32 * half, 32), _SHORTS)
        planes.append(builder.and_(lanes, _all(_SHORTS, 15)))
        planes.append(builder.lshr(lanes, _all(_SHORTS, 4)))
    return planes


def _split3(builder, read):
    rest = read(32, 16)
    low = builder.and_(rest, _all(rest.type, 15))
    high = builder.lshr(rest, _all(rest.type, 4))
    rest = builder.zext(builder.shuffle_vector(low, high, _mask(range(32))), _SHORTS)
    lanes = builder.zext(read(0, 32), _SHORTS)
    lanes = builder.or_(lanes, builder.shl(rest, _all(_SHORTS, 8)))
    shifted = [builder.lshr(lanes, _all(_SHORTS, 3 * p)) for p in range(4)]
    return [builder.and_(plane, _all(_SHORTS, 7)) for plane in shifted]


planes3, planes4, planes8 = _planes(_split3), _planes(_split4), _planes(_split8)


@_operation
def subtract(typing_context, codes, zeros, at):
    """codes - zeros[at], of 32 shorts."""

    def generate(context, builder, signature, args):
        codes, zeros, at = args
        zero = builder.load(_pointer(context, builder, signature.args[1], zeros, at))
        return builder.sub(codes, _splat(builder, zero, _SHORTS))

    return _shorts(_shorts, zeros, types.intp), generate


def _pair_products(context, builder, a, b):
    """a * b of 32 shorts, added up in neighbouring pairs."""
    # LLVM knows the instructions by this expression too, but not once it has moved parts of it
    # out of a loop.
    features = context.codegen().magic_tuple()[2].split(",")
    if "+avx512bw" in features:
        return _call(builder, "llvm.x86.avx512.pmaddw.d.512", _INTS, [a, b])
    if "+avx2" in features:
        halves = []
        for start in (0, 16):
            parts = (
                builder.shuffle_vector(
                    x, ir.Constant(_SHORTS, ir.Undefined), _mask(range(start, start + 16))
                )
                for x in (a, b)
            )
            eight = ir.VectorType(_I32, 8)
            halves.append(_call(builder, "llvm.x86.avx2.pmadd.wd", eight, list(parts)))
        return builder.shuffle_vector(*halves, _mask(range(16)))
    wide = ir.VectorType(_I32, 32)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide), flags=["nsw"])
    nothing = ir.Constant(wide, ir.Undefined)
    return builder.add(
        builder.shuffle_vector(products, nothing, _mask(range(0, 32, 2))),
        builder.shuffle_vector(products, nothing, _mask(range(1, 32, 2))),
    )


def _call(builder, name, result, args):
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(result, [arg.type for arg in args]), name
    )
    return builder.call(function, args)


@_operation
def dot(typing_context, sums, codes, x, at):
    """sums + the products of 32 codes with x[at:], added up in neighbouring pairs."""

    def generate(context, builder, signature, args):
        sums, codes, x, at = args
        other = _read(builder, _pointer(context, builder, signature.args[2], x, at), _SHORTS, 2)
        return builder.add(sums, _pair_products(context, builder, codes, other))

    return _ints(_ints, _shorts, x, types.intp), generate


@_operation
def nibbles(typing_context, data, at):
    """The low and the high 4 bits of 64 bytes."""

    def generate(context, builder, signature, args):
        both = _read(builder, _pointer(context, builder, signature.args[0], *args), _BYTES, 1)
        halves = builder.and_(both, _all(_BYTES, 15)), builder.lshr(both, _all(_BYTES, 4))
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(_bytes, 2)(data, types.intp), generate


def _quad_products(context, builder, sums, pairs):
    """sums + a * b of 64 bytes, a below 16, b signed, in neighbouring fours, for all (a, b)."""
    features = context.codegen().magic_tuple()[2].split(",")
    if "+avx512vnni" in features:
        for pair in pairs:
            a, b = (builder.bitcast(each, _INTS) for each in pair)
            sums = _call(builder, "llvm.x86.avx512.vpdpbusd.512", _INTS, [sums, a, b])
        return sums
    if "+avx512bw" in features:
        name = "llvm.x86.avx512.pmaddubs.w.512"
        shorts = [_call(builder, name, _SHORTS, list(pair)) for pair in pairs]
    elif "+avx2" in features:
        shorts = [_by_halves(builder, pair) for pair in pairs]
    else:
        wide = ir.VectorType(_I16, 64)
        nothing = ir.Constant(wide, ir.Undefined)
        shorts = []
        for a, b in pairs:
            products = builder.mul(builder.zext(a, wide), builder.sext(b, wide), flags=["nsw"])
            shorts.append(
                builder.add(
                    builder.shuffle_vector(products, nothing, _mask(range(0, 64, 2))),
                    builder.shuffle_vector(products, nothing, _mask(range(1, 64, 2))),
                )
            )
    # Two products of a code and a digit stay below 2**12, so that 16 bits hold two vectors' sums.
    words = builder.add(*shorts)
    return builder.add(sums, _pair_products(context, builder, words, _all(_SHORTS, 1)))


def _by_halves(builder, pair):
    """Products of bytes, added up in neighbouring pairs, by instructions of 32 bytes."""
    found, short = [], ir.VectorType(_I16, 16)
    for start in (0, 32):
        parts = [
            builder.shuffle_vector(
                each, ir.Constant(_BYTES, ir.Undefined), _mask(range(start, start + 32))
            )
            for each in pair
        ]
        found.append(_call(builder, "llvm.x86.avx2.pmadd.ub.sw", short, parts))
    return builder.shuffle_vector(*found, _mask(range(32)))


@_operation
def dot_bytes(typing_context, sums, first, second, x, at):
    """sums + the products of 2 * 64 codes below 16 with x[at:], added up in neighbouring fours."""

    def generate(context, builder, signature, args):
        sums, first, second, x, at = args
        pointers = (
            _pointer(context, builder, signature.args[3], x, place)
            for place in (at, builder.add(at, at.type(64)))
        )
        pairs = [
            (codes, _read(builder, pointer, _BYTES, 1))
            for codes, pointer in zip((first, second), pointers, strict=True)
        ]
        return _quad_products(context, builder, sums, pairs)

    return _ints(_ints, _bytes, _bytes, x, types.intp), generate


@_operation
def times_256(typing_context, values):
    """256 times 16 integers."""

    def generate(context, builder, signature, args):
        return builder.shl(args[0], _all(_INTS, 8))

    return _ints(_ints), generate


@_operation
def int_zeros(typing_context):
    """16 integers, all 0."""
    return _ints(), lambda context, builder, signature, args: _all(_INTS, 0)


@_operation
def float_zeros(typing_context):
    """16 floats, all 0."""
    return _floats(), lambda context, builder, signature, args: _all(_FLOATS, 0.0)


def _multiply_add(builder, a, b, c):
    return _call(builder, "llvm.fma.v16f32", _FLOATS, [a, b, c])


def _factor(context, builder, signature, args):
    """The last two arguments, an array of floats and a place, as 16 times the float there."""
    pointer = _pointer(context, builder, signature.args[-2], *args[-2:])
    return _splat(builder, builder.load(pointer), _FLOATS)


@_operation
def add_scaled(typing_context, sums, values, factors, at):
    """sums + values * factors[at]."""

    def generate(context, builder, signature, args):
        values = builder.sitofp(args[1], _FLOATS)
        factor = _factor(context, builder, signature, args)
        return _multiply_add(builder, values, factor, args[0])

    return _floats(_floats, _ints, factors, types.intp), generate


@_operation
def add_scaled_halves(typing_context, sums, values, factors, at):
    """sums + values times factors[at] in the first 8 lanes, factors[at + 1] in the others."""

    def generate(context, builder, signature, args):
        two = ir.VectorType(_F32, 2)
        pair = _read(builder, _pointer(context, builder, signature.args[2], *args[2:]), two, 4)
        places = _mask([0] * 8 + [1] * 8)
        factor = builder.shuffle_vector(pair, ir.Constant(two, ir.Undefined), places)
        return _multiply_add(builder, builder.sitofp(args[1], _FLOATS), factor, args[0])

    return _floats(_floats, _ints, factors, types.intp), generate


@_operation
def multiply(typing_context, a, b):
    """a * b, of 16 floats."""
    return _floats(_floats, _floats), lambda context, builder, signature, args: builder.fmul(*args)


@_operation
def less_product(typing_context, sums, a, b):
    """sums - a * b, of 16 floats."""

    def generate(context, builder, signature, args):
        return _multiply_add(builder, builder.fneg(args[1]), args[2], args[0])

    return _floats(_floats, _floats, _floats), generate


@_operation
def add_scaled_digits(typing_context, sums, high, low, factors, at):
    """sums + (high * 65536 + low) * factors[at]."""

    def generate(context, builder, signature, args):
        high, low = (builder.sitofp(values, _FLOATS) for values in args[1:3])
        both = _multiply_add(builder, high, _all(_FLOATS, 65536.0), low)
        factor = _factor(context, builder, signature, args)
        return _multiply_add(builder, both, factor, args[0])

    return _floats(_floats, _ints, _ints, factors, types.intp), generate


@_operation
def store_scaled(typing_context, out, at, codes, factor):
    """out[at:] = 32 codes * factor; an `out` of int16 takes the bits of bfloat16, to nearest even."""

    def generate(context, builder, signature, args):
        out, at, codes, factor = args
        element = context.get_data_type(signature.args[0].dtype)
        factor = _splat(builder, factor, ir.VectorType(_F32, 32))
        values = builder.fmul(builder.sitofp(codes, factor.type), factor)
        if element == _I16:
            words = builder.bitcast(values, ir.VectorType(_I32, 32))
            last = builder.and_(builder.lshr(words, _all(words.type, 16)), _all(words.type, 1))
            words = builder.add(builder.add(words, _all(words.type, 0x7FFF)), last)
            values = builder.trunc(builder.lshr(words, _all(words.type, 16)), _SHORTS)
        pointer = _pointer(context, builder, signature.args[0], out, at)
        written = builder.store(values, builder.bitcast(pointer, values.type.as_pointer()))
        written.align = 2 if element == _I16 else 4
        return context.get_dummy_value()

    return types.void(out, types.intp, _shorts, types.float32), generate


@_operation
def load(typing_context, array, at):
    """The 16 floats array[at:]."""

    def generate(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], *args)
        return _read(builder, pointer, _FLOATS, 4)

    return _floats(array, types.intp), generate


@_operation
def load_bytes(typing_context, array, at):
    """The 16 bytes array[at:] as floats."""

    def generate(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], *args)
        return builder.uitofp(_read(builder, pointer, ir.VectorType(_I8, 16), 1), _FLOATS)

    return _floats(array, types.intp), generate


@_operation
def load_halves(typing_context, array, at):
    """The 16 float16 in array[at:], integers to numpy, as floats; finite ones only."""

    def generate(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], *args)
        words = builder.sext(_read(builder, pointer, ir.VectorType(_I16, 16), 2), _INTS)
        number = builder.shl(builder.and_(words, _all(_INTS, 0x7FFF)), _all(_INTS, 13))
        sign = builder.and_(words, _all(_INTS, -(1 << 31)))
        # The exponent's bias is 127 in place of 15; subnormal numbers come right too.
        found = builder.bitcast(builder.or_(number, sign), _FLOATS)
        return builder.fmul(found, _all(_FLOATS, 2.0**112))

    return _floats(array, types.intp), generate


@_operation
def prefetch(typing_context, array, at):
    """Begins to fetch array[at] into the second cache; any place will do, in the array or not."""

    def generate(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], *args)
        hints = [_I32(0), _I32(2), _I32(1)]
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *hints])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@_operation
def store(typing_context, array, at, values):
    """array[at:] = 16 floats."""

    def generate(context, builder, signature, args):
        array, at, values = args
        pointer = _pointer(context, builder, signature.args[0], array, at)
        written = builder.store(values, builder.bitcast(pointer, _FLOATS.as_pointer()))
        written.align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, _floats), generate


@_operation
def total(typing_context, values):
    """The sum of 16 floats, halves first."""

    def generate(context, builder, signature, args):
        values, count = args[0], 16
        while count > 1:
            count //= 2
            nothing = ir.Constant(values.type, ir.Undefined)
            low = builder.shuffle_vector(values, nothing, _mask(range(count)))
            high = builder.shuffle_vector(values, nothing, _mask(range(count, 2 * count)))
            values = builder.fadd(low, high)
        return builder.extract_element(values, _I32(0))

    return types.float32(_floats), generate
