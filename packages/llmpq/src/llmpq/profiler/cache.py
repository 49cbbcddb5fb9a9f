"""Measurements kept in a folder, so that a model is measured once on each kind of device."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmpq.config import ModelSpec, Workload
from llmpq.profiler.profile import MOST_PROMPTS, DeviceProfile
from llmpq.profiler.sensitivity import Sensitivity, sensitivity
from shared.errors import ConfigError
from shared.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["find_profile", "find_sensitivity", "profile_path"]


def profile_path(
    folder: str | Path, model: str | Path, kind: str, dtype: str, group: int, activations: str
) -> Path:
    """The file of one kind's profile: named by kind, model's shape, types and group size."""
    of_type = dtype if activations == "float" else f"{dtype}-{activations}"
    name = f"{kind}-{ModelSpec.from_hf(model).fingerprint}-{of_type}-{group}.json"
    return Path(folder) / name.replace("/", "_").replace(" ", "_")


def find_profile(
    folder: str | Path,
    model: str | Path,
    kind: str,
    *,
    bits: Sequence[int],
    group_size: int,
    dtype: str,
    activations: str = "float",
    workload: Workload,
    is_here: bool,
    force: bool = False,
    limit_s: float = 60.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> DeviceProfile:
    """Reads the profile of a kind of device, or measures it if this is such a device.

    Args:
        folder: where profiles are kept.
        model: the Hugging Face model.
        kind: name of the kind.
        bits: widths that are needed.
        group_size: columns that share a scale.
        dtype: of activations.
        activations: what products may round them to, see `choose_forms`.
        workload: bounds batches and tokens that are measured.
        is_here: whether this process runs on such a device, so that it may be measured.
        force: take a profile of another version of torch or another processor as it is.
        limit_s: seconds that measuring may take.
        on_progress: called with what is being measured.

    Returns:
        The profile; widths and lengths that its file lacked have been measured and added there.

    Raises:
        ConfigError: there is no profile and it cannot be measured here, or the profile is of
            something else; says what differs.
    """
    path = profile_path(folder, model, kind, dtype, group_size, activations)
    known = DeviceProfile.load(path) if path.exists() else None
    if known is not None:
        _check(known, path, model, dtype, group_size, is_here=is_here, force=force)
        bits = [width for width in bits if not known.covers([width], workload)]
        if not bits or (not is_here and set(bits) <= set(known.prefill)):
            return known  # elsewhere, longer prompts and larger batches are extrapolated to
    if not is_here:
        widths = " ".join(map(str, bits))
        command = (
            f"llmpq profile {shlex.quote(str(model))} --kind {shlex.quote(kind)} --bits {widths} --group-size {group_size} "
            f"--dtype {dtype} --activations {activations}"
        )
        raise ConfigError(
            f"no profile of the kind {kind!r} at {', '.join(map(str, bits))} bits: expected {path}; "
            f"run `{command}` on such a machine and copy its file here"
        )
    from llmpq.profiler.layer_times import measure_device

    found = measure_device(
        model,
        kind=kind,
        bits=bits,
        group_size=group_size,
        dtype=dtype,
        activations=activations,
        batches=_batches(workload.num_prompts),
        prompt_tokens=workload.prompt_tokens,
        new_tokens=workload.new_tokens,
        limit_s=limit_s,
        on_progress=on_progress,
    )
    found = found if known is None else known.merge(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save(path)
    return found


def _batches(num_prompts: int) -> list[int]:
    """Powers of two below the number of prompts, and that number, up to `MOST_PROMPTS`; two at least."""
    most = max(2, min(num_prompts, MOST_PROMPTS))
    return [*(size for size in (1, 2, 4, 8, 16, 32) if size < most), most]


def _check(
    known: DeviceProfile,
    path: Path,
    model: str | Path,
    dtype: str,
    group_size: int,
    *,
    is_here: bool,
    force: bool,
) -> None:
    """Compares a file's profile with what is planned, and with this device if it is one."""
    import torch

    from llmpq.profiler.layer_times import find_device, read_processor

    fixed = {
        "model": ModelSpec.from_hf(model).fingerprint, "dtype": dtype, "group_size": group_size,
    }  # fmt: skip
    wrong, hint = known.differences(**fixed), "it is another model's"
    if not wrong and not force:
        of_machine = {"torch": str(torch.__version__)}
        if is_here:
            of_machine["processor"] = read_processor(find_device())
        wrong = known.differences(**of_machine)
        hint = "delete it to measure anew, or take it as it is with --force"
    if wrong:
        raise ConfigError(
            f"{path}: the profile of {known.kind!r} was measured for something else: "
            f"{'; '.join(wrong)}; {hint}"
        )


def find_sensitivity(
    folder: str | Path,
    model: str | Path,
    texts: Sequence[Tensor],
    *,
    bits: Sequence[int],
    group_size: int,
    method: str = "fisher",
) -> Sensitivity:
    """Reads a model's noise on these texts, or measures it.

    Args:
        folder: where it is kept.
        model: the Hugging Face model.
        texts: batches of token ids to measure with.
        bits: widths.
        group_size: columns that share a scale.
        method: see `sensitivity`.

    Raises:
        ConfigError: the file that was kept is damaged.
    """
    files = sorted(Path(model).glob("*.safetensors"))
    facts = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    facts += [list(bits), group_size, method, [ids.tolist() for ids in texts]]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    path = Path(folder) / f"sensitivity-{name}.json"
    if path.exists():
        try:
            tree = json.loads(path.read_text())
            return Sensitivity(
                noise=np.array(tree["noise"], dtype=float),
                bits=tuple(tree["bits"]),
                group_size=tree["group_size"],
                method=tree["method"],
                num_tokens=tree["num_tokens"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: expected a measured sensitivity: {error!r}; delete the file to measure anew"
            ) from error
    from llmpq.runtime.loader import load_unrounded

    found = sensitivity(
        load_unrounded(model), texts, method,
        bits=bits, group_size=group_size,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {
        "noise": found.noise.tolist(), "bits": found.bits, "group_size": found.group_size,
        "method": found.method, "num_tokens": found.num_tokens,
    }  # fmt: skip
    write_atomically(path, json.dumps(tree) + "\n")
    return found
