"""Where the codes of a weight lie in memory.

Columns become slots: a group takes whole planes of 32 slots, namely 1, 2 or a multiple of 4, so that
a plane has one scale; what a group does not fill holds code 0, and all slots together fill chunks of
128, four planes. Groups of 32, 64 or a multiple of 128 columns leave no slot empty but in the end.

Lane j of a chunk, 0 <= j < 32, is the integer of 4 * bits bits whose p-th code, from its lowest bits,
is slot 32 p + j. A chunk stores the lanes' low bytes, one a lane, then their next bytes, and so on;
the last 4 bits of a 12-bit lane share a byte: lane i in its low half, lane i + 16 in its high one.
So unpacking is byte loads, shifts and masks over 32 lanes, and each plane meets 32 neighbouring
columns of x.
"""

import torch
from torch import Tensor

__all__ = [
    "CHUNK",
    "PLANE",
    "codes_from_slots",
    "num_chunks",
    "pack_slots",
    "slots_from_codes",
    "slots_per_group",
    "unpack_slots",
]

PLANE = 32
"""Slots of a plane: lanes of a chunk."""
CHUNK = 128
"""Slots of a chunk."""


def slots_per_group(group_size: int) -> int:
    """Slots that a whole group takes."""
    if group_size <= 2 * PLANE:
        return PLANE if group_size <= PLANE else 2 * PLANE
    return -(-group_size // CHUNK) * CHUNK


def num_chunks(columns: int, group_size: int) -> int:
    """Chunks of a row of codes."""
    width = slots_per_group(group_size)
    slots = columns
    if width != group_size and columns > group_size:
        slots = -(-columns // group_size) * width
    return -(-slots // CHUNK)


def slots_from_codes(codes: Tensor, group_size: int) -> Tensor:
    """Columns [rows, columns] of any type to slots [rows, chunks * 128], empty ones 0."""
    rows, columns = codes.shape
    width = slots_per_group(group_size)
    if width != group_size and columns > group_size:
        groups = -(-columns // group_size)
        codes = torch.nn.functional.pad(codes, (0, groups * group_size - columns))
        codes = codes.view(rows, groups, group_size)
        codes = torch.nn.functional.pad(codes, (0, width - group_size)).view(rows, groups * width)
    rest = -codes.shape[1] % CHUNK
    return torch.nn.functional.pad(codes, (0, rest)) if rest else codes


def codes_from_slots(slots: Tensor, columns: int, group_size: int) -> Tensor:
    """The inverse of `slots_from_codes`."""
    width = slots_per_group(group_size)
    if width != group_size and columns > group_size:
        groups = -(-columns // group_size)
        slots = slots[:, : groups * width].view(len(slots), groups, width)
        slots = slots[..., :group_size].reshape(len(slots), groups * group_size)
    return slots[:, :columns].contiguous()


def pack_slots(slots: Tensor, bits: int) -> Tensor:
    """Codes uint8 [rows, chunks * 128] to bytes [rows, chunks, 16 * bits]."""
    planes = slots.view(len(slots), -1, 4, PLANE)
    if bits == 8:
        return planes.reshape(len(slots), -1, CHUNK).contiguous()
    lanes = planes[:, :, 0].to(torch.int32)
    for p in range(1, 4):
        lanes |= planes[:, :, p].to(torch.int32) << (bits * p)
    high = lanes >> 8
    if bits == 3:
        high = high[..., :16] | (high[..., 16:] << 4)
    return torch.cat([lanes & 255, high], 2).to(torch.uint8)


def unpack_slots(data: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_slots`."""
    rows, chunks = data.shape[:2]
    if bits == 8:
        return data.reshape(rows, -1)
    high = data[..., PLANE:]
    if bits == 3:
        high = torch.cat([high & 15, high >> 4], 2)
    lanes = data[..., :PLANE].to(torch.int32) | (high.to(torch.int32) << 8)
    planes = torch.stack([(lanes >> (bits * p)) & ((1 << bits) - 1) for p in range(4)], 2)
    return planes.to(torch.uint8).view(rows, chunks * CHUNK)
