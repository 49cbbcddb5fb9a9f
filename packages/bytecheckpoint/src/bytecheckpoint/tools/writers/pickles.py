"""The pickle in a file of torch.save, written without the tensors that it describes."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch import _utils
from torch.storage import UntypedStorage

from bytecheckpoint.formats.pickles import TYPED_STORAGES, StorageRecord, StoredTensor

__all__ = ["dump_tree"]


class _Writer(pickle.Pickler):
    # What torch's own restricted reader takes: protocol 2, and tensors rebuilt from storages.
    def persistent_id(self, obj: Any) -> tuple | None:
        if not isinstance(obj, StorageRecord):
            return None
        kind = UntypedStorage if obj.dtype is None else getattr(torch, TYPED_STORAGES[obj.dtype])
        return ("storage", kind, obj.key, "cpu", obj.num_elements)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, StoredTensor):
            return NotImplemented
        place = (obj.offset, obj.shape, obj.strides, False, OrderedDict())
        if obj.dtype in TYPED_STORAGES:
            storage = StorageRecord(obj.dtype, obj.key, obj.storage_bytes // obj.dtype.itemsize)
            return _utils._rebuild_tensor_v2, (storage, *place)
        storage = StorageRecord(None, obj.key, obj.storage_bytes)
        return _utils._rebuild_tensor_v3, (storage, *place, obj.dtype)


def dump_tree(tree: Any) -> bytes:
    """Writes the `data.pkl` of a tree of containers, plain values and `StoredTensor`."""
    buffer = io.BytesIO()
    _Writer(buffer, protocol=2).dump(tree)
    return buffer.getvalue()
