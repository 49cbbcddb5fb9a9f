"""Names of element types: torch's in the index, safetensors' in the shards' headers."""

import torch

from shared.errors import DataError

__all__ = ["SAFETENSORS_NAMES", "get_dtype_name", "get_safetensors_name", "parse_dtype"]

# Types with a name in strict safetensors headers; any other type is stored as bytes (U8).
SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

_EXTRA = (
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*SAFETENSORS_NAMES, *_EXTRA)}


def get_dtype_name(dtype: torch.dtype) -> str:
    """The index's name of an element type, as "bfloat16".

    Raises:
        DataError: if the type has no plain bytes (quantised types).
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _BY_NAME:
        raise DataError(
            f"expected tensors of one of {', '.join(_BY_NAME)}, got {name}; store its parts "
            f"(integers, scales) as plain tensors"
        )
    return name


def parse_dtype(name: str) -> torch.dtype:
    """The element type of an index's name.

    Raises:
        DataError: if there is none.
    """
    if name not in _BY_NAME:
        raise DataError(f"unknown element type {name!r}; expected one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def get_safetensors_name(dtype: torch.dtype) -> str | None:
    """The name of the type in safetensors, None if it has none."""
    return SAFETENSORS_NAMES.get(dtype)
