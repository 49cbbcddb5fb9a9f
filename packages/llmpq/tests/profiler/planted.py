"""A device's profile without measuring."""

from itertools import product

from llmpq.profiler.latency import fit_decode, fit_prefill
from llmpq.profiler.profile import DeviceProfile


def planted_profile(bits=(4, 16), *, slow=1.0, longest=64, **fields):
    """Seconds that are linear in tokens, with `slow` times those of a device of the kind "a"."""
    grid = list(product((1, 4, 16), (longest // 4, longest // 2, longest)))
    prefill = [(b, n, slow * (1e-4 + 1e-6 * b * n)) for b, n in grid]
    decode = [(b, n, slow * (1e-4 + 1e-5 * b)) for b, n in grid]
    known = {
        "kind": "a", "processor": "P", "torch": "2", "model": "m", "dtype": "float32",
        "group_size": 64, "embed": (1e-5, 1e-8), "head": fit_decode(decode),
        "prefill": {width: fit_prefill(prefill) for width in bits},
        "decode": {width: fit_decode(decode) for width in bits},
        "forms": {str(width): [[1, "packed"]] for width in bits if width < 16},
    }  # fmt: skip
    return DeviceProfile(**{**known, **fields})
