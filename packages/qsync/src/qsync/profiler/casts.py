"""Seconds of casts between precisions, as a constant and a slope by element."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from qsync.precisions import HIGHEST, PRECISIONS
from qsync.runtime.operators import quantize_rows
from qsync.runtime.quantizers import CODE_DTYPES, FLOAT_DTYPES
from shared.topology import Link, fit_link

__all__ = ["CastFits", "fit_casts"]

CastFits = dict[tuple[str, str], Link]
"""Fit by (source precision, target precision); its slope is by element, not by byte."""

_NUM_ELEMENTS = (2**14, 2**17, 2**20)
_ROW = 512
_NUM_REPEATS = 7


def fit_casts(precisions: Sequence[str], device: torch.device) -> CastFits:
    """Measures all casts that a plan with these precisions may need.

    Args:
        precisions: those allowed.
        device: where they run.

    Returns:
        Fits of every pair of a float type that outputs or gradients may have and another precision.
    """
    targets = dict.fromkeys([HIGHEST, *precisions, *(PRECISIONS[p].backward for p in precisions)])
    sources = [name for name in targets if name in FLOAT_DTYPES]
    return {
        (source, target): _fit(source, target, device)
        for source in sources
        for target in targets
        if source != target
    }


def _fit(source: str, target: str, device: torch.device) -> Link:
    samples = []
    for numel in _NUM_ELEMENTS:
        x = torch.randn(numel // _ROW, _ROW, device=device).to(FLOAT_DTYPES[source])
        cast = _choose_cast(x, target)
        cast()
        samples.append(
            (numel, float(np.median([_time(cast, device) for _ in range(_NUM_REPEATS)])))
        )
    return fit_link(samples, is_quiet=True).link


def _choose_cast(x: torch.Tensor, target: str) -> Callable[[], object]:
    if target in CODE_DTYPES:
        return lambda: quantize_rows(x.float(), CODE_DTYPES[target], False)
    return lambda: x.to(FLOAT_DTYPES[target])


def _time(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
