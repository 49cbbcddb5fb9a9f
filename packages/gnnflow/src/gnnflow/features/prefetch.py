"""A memory prefetch instruction for numba, which has none of its own."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["prefetch"]


@intrinsic
def prefetch(typing_context: Any, array: Any, row: Any) -> Any:
    """Prefetches the cache line in which a row begins."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        view = context.make_array(kind)(context, builder, args[0])
        place = [args[1], *[args[1].type(0)] * (kind.ndim - 1)]
        pointer = cgutils.get_item_pointer(context, builder, kind, view, place)
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        form = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        call = builder.module.declare_intrinsic("llvm.prefetch", (byte,), form)
        # For reading, into every level of the cache, data.
        builder.call(call, [builder.bitcast(pointer, byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
