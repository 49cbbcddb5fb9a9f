"""Which form of a kernel runs: the one place where that is decided.

Triton serves CUDA tensors and the CPU form every other device. `MESHYARD_KERNELS` set to
`reference`, `cpu` or `triton` forces one form; a forced form that cannot serve the tensors at hand
raises. Nothing falls back silently: the first choice for a kernel is logged once.
"""

import logging
import os
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from shared.errors import ConfigError

__all__ = ["KERNELS", "SWITCH", "Kernel", "select"]

log = logging.getLogger(__name__)

SWITCH = "MESHYARD_KERNELS"
"""Name of the environment variable that forces one form of every kernel."""
_FORMS = ("reference", "cpu", "triton")


@dataclass(frozen=True, slots=True)
class Kernel:
    """The three forms of one operator, as module paths that are imported on first use.

    Attributes:
        name: What logs and errors call it.
        reference: Module of the plain torch form.
        cpu: Module of the numba form.
        gpu: Module of the Triton form.
    """

    name: str
    reference: str
    cpu: str
    gpu: str


def _in_folder(name: str) -> Kernel:
    package = f"shared.kernels.{name}"
    return Kernel(name, f"{package}.reference", f"{package}.cpu", f"{package}.gpu")


KERNELS = {
    name: _in_folder(name)
    for name in (
        "adam",
        "attention",
        "decode",
        "digest",
        "edge_softmax",
        "gather",
        "neighbors",
        "quantize",
        "route",
        "row_adam",
        "scaled_matmul",
        "segment",
        "temporal",
        "token_log_probs",
        "weight_matmul",
    )
}
"""The operators by name."""
chosen_forms: dict[tuple[Kernel, str, str], ModuleType] = {}


def select(kernel: str | Kernel, device: torch.device | str) -> ModuleType:
    """The module that holds the form of `kernel` for tensors on `device`.

    Args:
        kernel: A kernel, or the name of one in `KERNELS`.
        device: Where the tensors lie.

    Raises:
        ConfigError: The name is unknown, or `MESHYARD_KERNELS` asks for a form that does not exist
            or cannot serve this device.
    """
    device_type = torch.device(device).type
    if isinstance(kernel, str):
        if kernel not in KERNELS:
            raise ConfigError(f"expected a kernel among {sorted(KERNELS)}, got {kernel!r}")
        kernel = KERNELS[kernel]
    forced = os.environ.get(SWITCH, "")
    key = (kernel, device_type, forced)
    module = chosen_forms.get(key)
    if module is None:
        form = _form(kernel, device_type, forced)
        module = _load(kernel, form, device_type)
        chosen_forms[key] = module
        why = f" ({SWITCH})" if forced else ""
        log.info("kernel %s on %s: the %s form%s", kernel.name, device_type, form, why)
    return module


def _form(kernel: Kernel, device_type: str, forced: str) -> str:
    if forced and forced not in _FORMS:
        raise ConfigError(f"expected {SWITCH} to be one of {', '.join(_FORMS)}, got {forced!r}")
    if forced == "cpu" and device_type != "cpu":
        raise ConfigError(
            f"{SWITCH}=cpu asks for the CPU form of {kernel.name}, but the tensors lie on "
            f"{device_type}: move them to the CPU or unset {SWITCH}"
        )
    if forced:
        return forced
    return "triton" if device_type == "cuda" else "cpu"


def _load(kernel: Kernel, form: str, device_type: str) -> ModuleType:
    path = {"reference": kernel.reference, "cpu": kernel.cpu, "triton": kernel.gpu}[form]
    try:
        module = import_module(path)
    except ImportError as error:
        raise ConfigError(
            f"the {form} form of {kernel.name} cannot be loaded ({error}): install what is "
            f"missing, or set {SWITCH} to another of {', '.join(_FORMS)}"
        ) from error
    if form == "triton" and device_type == "cpu" and not _is_interpreted(module):
        raise ConfigError(
            f"expected CUDA tensors for the Triton form of {kernel.name}, got tensors on the CPU: "
            f"set TRITON_INTERPRET=1 before anything imports triton, or unset {SWITCH}"
        )
    return module


def _is_interpreted(module: ModuleType) -> bool:
    # Triton binds the mode when a kernel is decorated, so the environment of today proves nothing.
    from triton.runtime.interpreter import InterpretedFunction

    return any(isinstance(value, InterpretedFunction) for value in vars(module).values())
