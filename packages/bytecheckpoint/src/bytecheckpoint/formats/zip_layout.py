"""The structures of zip archives as torch.save writes them: uncompressed records, zip64 where needed.

Fields that are too small for a value hold their largest number, and the value stands in an extra
field (PKWARE's APPNOTE, sections 4.3 and 4.5.3).
"""

import struct

__all__ = [
    "CENTRAL",
    "CENTRAL_SIGN",
    "COUNT_LIMIT",
    "END",
    "END64",
    "END64_LOCATOR",
    "END64_SIGN",
    "END_SIGN",
    "LIMIT",
    "LOCAL",
    "LOCAL_SIGN",
    "LOCATOR_SIGN",
    "ZIP64",
]

LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
END64_LOCATOR = struct.Struct("<4sLQL")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCAL_SIGN, CENTRAL_SIGN, END_SIGN = b"PK\3\4", b"PK\1\2", b"PK\5\6"
LOCATOR_SIGN, END64_SIGN = b"PK\6\7", b"PK\6\6"
ZIP64 = 0x0001
LIMIT, COUNT_LIMIT = 0xFFFFFFFF, 0xFFFF
