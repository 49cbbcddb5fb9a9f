"""Loads the machine code of AdamW's kernels and of digests, which takes some tenths of a second.

Templates import this module, so that the ranks and spares that are forked from them have it when they
begin. The kernels run on a few values of its own, on the CPU; no thread is started, and a GPU is not
looked for, as a process that has done so cannot be forked.
"""

from contextlib import suppress

import torch

from shared.kernels import adam
from shared.kernels.digest import digest

__all__: list[str] = []


def _load() -> None:
    tensors = adam.AdamTensors(*(torch.zeros(8) for _ in adam.AdamTensors._fields))
    residuals = [adam.new_residual(tensors.param)]
    hyper = adam.Hyper(
        lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, maximize=False
    )
    adam.step([tensors], [1], hyper, residuals)
    adam.undo([tensors], [1], hyper, residuals)
    digest(tensors.param)


with suppress(Exception):  # ranks say it, when they come to their kernels
    _load()
