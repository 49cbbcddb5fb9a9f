"""A GPU where there is none: tensors that say that they lie there, and refuse to meet others.

Values are computed on the CPU. What a real one would refuse is refused: an operator on tensors of
both kinds, `numpy`, and reading rows of the host that are not pinned.
"""

from concurrent.futures import Future
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda:0")
# Copies are there to cross over, and a tensor on a GPU may be indexed by the host's.
_COPIES = {"_to_copy", "copy_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


RECORDED = []
"""Tensors of which the allocator was told that another stream reads them."""


class Stream:
    def synchronize(self):
        pass


class OnGpu(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        own = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
        )  # fmt: skip
        own.inner = inner
        return own

    @property
    def device(self):  # pyrefly: ignore[bad-override]
        return GPU

    # torch itself takes both kinds for tensors of the CPU, of which these would give themselves.
    def to(self, *args, **kwargs):
        if args and str(args[0]) == "cpu":
            return self.detach().inner.clone()
        return super().to(*args, **kwargs)

    def record_stream(self, s):
        RECORDED.append(self)

    def cpu(self):  # pyrefly: ignore[bad-override]
        return self.to("cpu")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # pyrefly: ignore[bad-override]
        return _run(func, args, kwargs or {})


def _run(function, args, kwargs):
    name = function.overloadpacket.__name__
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    is_there = [isinstance(x, OnGpu) for x in tensors]
    if any(is_there) and name not in _COPIES:
        values = tensors
        if name in _INDEXING and is_there[0]:
            values = [args[0], *args[2:3]]
        elif name == "index_put":
            values = args[2:3]  # autograd in C++ makes the zeros, where it thinks it is
        strangers = [x for x in values if not isinstance(x, OnGpu) and x.ndim]
        assert not strangers, f"{name}: tensors on the GPU met {[x.shape for x in strangers]}"
    goes_there = any(is_there)
    if kwargs.get("device") is not None:
        goes_there = torch.device(kwargs["device"]).type == "cuda"
        kwargs = {**kwargs, "device": "cpu"}
    if name.endswith("_"):  # in place: the result lies where the first argument does
        goes_there = isinstance(args[0], OnGpu)
    args, kwargs = tree_map(lambda x: x.inner if isinstance(x, OnGpu) else x, (args, kwargs))
    results = function(*args, **kwargs)

    def wrap(x):
        return OnGpu(x) if goes_there and isinstance(x, torch.Tensor) else x

    if name.endswith("_") and goes_there:
        return OnGpu(results)
    return tree_map(wrap, results)


class _SameThread:
    """An executor without a thread, as the pretence holds in one thread only."""

    def __init__(self, num_threads, thread_name_prefix):
        assert num_threads == 1, thread_name_prefix

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future

    def shutdown(self):
        pass


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


@contextmanager
def pretended_gpu(patch):
    """Within the block, device "cuda:0" is there; kernels run in plain torch."""
    pinned: dict[int, torch.Tensor] = {}  # kept, so that no other memory has their addresses
    RECORDED.clear()

    def pin(x):
        rows = x.clone()
        pinned[rows.data_ptr()] = rows
        return rows

    patch.setenv("MESHYARD_KERNELS", "reference")
    patch.setattr(torch.cuda, "is_initialized", lambda: True)
    patch.setattr(torch.cuda, "Stream", lambda device: Stream())
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    patch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    patch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    patch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    patch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    patch.setattr(torch.Tensor, "pin_memory", pin)
    patch.setattr(torch.Tensor, "is_pinned", lambda x: x.numel() > 0 and x.data_ptr() in pinned)
    patch.setattr("heta.training.prefetch.ThreadPoolExecutor", _SameThread)
    with _Mode():
        yield
