"""Copies that bypass the processor's caches.

An ordinary store first reads the cache line it writes to. Training does not read the copy, so it is
written with non-temporal stores, which skip that read: two passes over memory instead of three, and
training's data stays in the caches. Neither torch nor the C library uses such stores for pieces of
this size, so the loop is written in LLVM IR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, c_int64, c_void_p, memmove
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["MIN_BYTES", "is_streamable", "prepare", "stream"]

# Smaller copies fit a cache, and cost less than the calls.
MIN_BYTES = 256 * 1024
# Number of bytes that a thread copies at a time.
_TASK_BYTES = 16 * 1024 * 1024
_LINE = 64
# The target address must be a multiple of 64. Non-temporal stores are not ordered: the fence makes
# them visible to threads that see that the copy has ended.
_CODE = """
define void @copy_lines(ptr %to, ptr %from, i64 %num_lines) {
entry:
  %any = icmp sgt i64 %num_lines, 0
  br i1 %any, label %line, label %done
line:
  %at = phi i64 [0, %entry], [%next, %line]
  %source = getelementptr <16 x i32>, ptr %from, i64 %at
  %target = getelementptr <16 x i32>, ptr %to, i64 %at
  %values = load <16 x i32>, ptr %source, align 1
  store <16 x i32> %values, ptr %target, align 64, !nontemporal !0
  %next = add i64 %at, 1
  %more = icmp slt i64 %next, %num_lines
  br i1 %more, label %line, label %done
done:
  fence seq_cst
  ret void
}
!0 = !{i32 1}
"""


@lru_cache(maxsize=1)
def prepare() -> Callable[[int, int, int], None]:
    """Compiles the loop for this processor, in about a tenth of a second; once a process."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    host = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_CODE), host)
    engine.finalize_object()
    kind = CFUNCTYPE(None, c_void_p, c_void_p, c_int64)  # whose calls let other threads run
    function = kind(engine.get_function_address("copy_lines"))
    _engines.append(engine)
    return function


# The code lives as long as what compiled it.
_engines: list[Any] = []


def is_streamable(target: Tensor, source: Tensor) -> bool:
    """Whether a copy is of plain bytes on the CPU, and long enough to gain."""
    return (
        source.dtype == target.dtype
        and source.device.type == target.device.type == "cpu"
        and source.is_contiguous()
        and target.is_contiguous()
        and not source.is_conj()
        and not source.is_neg()
        and source.numel() * source.itemsize >= MIN_BYTES
    )


def stream(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies the second of each pair to the first, by as many threads as torch uses.

    Args:
        pairs: streamable ones, of one size each; no memory is written twice.
    """
    tasks = [
        (target.data_ptr() + start, source.data_ptr() + start, min(_TASK_BYTES, num_bytes - start))
        for target, source in pairs
        for num_bytes in (target.numel() * target.itemsize,)
        for start in range(0, num_bytes, _TASK_BYTES)
    ]
    num_threads = min(torch.get_num_threads(), len(tasks))
    if num_threads <= 1:
        for task in tasks:
            _copy(*task)
        return
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(_copy, *zip(*tasks, strict=True)))


def _copy(target: int, source: int, num_bytes: int) -> None:
    head = min(-target % _LINE, num_bytes)
    num_lines = (num_bytes - head) // _LINE
    prepare()(target + head, source + head, num_lines)
    done = head + num_lines * _LINE
    for start, end in ((0, head), (done, num_bytes)):
        if start < end:
            memmove(target + start, source + start, end - start)
