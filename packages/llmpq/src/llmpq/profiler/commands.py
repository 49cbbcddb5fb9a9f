"""Subcommands that measure: profile and sensitivity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from llmpq.checks import check_at_least, check_group_size, check_inputs, check_output
from llmpq.profiler import SENSITIVITIES
from shared.cli import JsonOption, choice
from shared.training.progress import show_progress

__all__ = ["PROFILES", "Activations", "Dtype", "MeasureDevice", "MeasureSensitivity", "Width"]

PROFILES = Path("report/llmpq/profiles")
"""Folder of measurements, of this command line and of plans."""
Width = Literal[3, 4, 8, 16]
Activations = Literal["float", "int8"]
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureDevice(JsonOption):
    """Measure this device with a model's shape, for plans made elsewhere.

    Examples:
        llmpq profile ./model --kind T4
        llmpq profile ./model --kind CPU --bits 4 8 --batch 8
    """

    model: tyro.conf.Positional[Path]
    """Folder of the Hugging Face model; config.json is enough."""
    kind: str
    """Name of the kind of device, as in the cluster's description."""
    bits: tuple[Width, ...] = (3, 4, 8, 16)
    """Weight widths."""
    group_size: int = 128
    """Input columns that share a scale; -1 gives each row one."""
    dtype: Dtype = "float32"
    """Type of activations."""
    activations: Activations = "float"
    """int8 has products timed too that round activations to 8 bits."""
    batch: int = 32
    """Most prompts at once."""
    prompt_tokens: int = 512
    """Longest prompts."""
    new_tokens: int = 128
    """Most tokens generated."""
    profiles: Path = PROFILES
    """Folder where the measurement is written."""

    def __post_init__(self) -> None:
        check_at_least(
            1, batch=self.batch, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens
        )
        check_group_size(self.group_size)

    def execute(self) -> None:
        """Measures and writes the profile."""
        check_output("profiles", self.profiles, is_folder=True)

        from llmpq.config import Workload
        from llmpq.profiler.cache import find_profile, profile_path

        workload = Workload(
            num_prompts=self.batch, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens
        )
        path = profile_path(
            self.profiles, self.model, self.kind, self.dtype, self.group_size, self.activations
        )
        with show_progress(f"measuring {self.kind}") as status:
            found = find_profile(
                self.profiles, self.model, self.kind, bits=self.bits, group_size=self.group_size,
                dtype=self.dtype, activations=self.activations, workload=workload, is_here=True,
                on_progress=status.update,
            )  # fmt: skip
        self.print_result({"file": str(path)}, f"{found.explain(self.prompt_tokens)}\nwrote {path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSensitivity(JsonOption):
    """Measure how much each layer's rounding costs, in nats a token.

    Examples:
        llmpq sensitivity ./model --prompts prompts.jsonl
        llmpq sensitivity ./model --prompts prompts.jsonl --bits 3 4
    """

    model: tyro.conf.Positional[Path]
    """Folder of the Hugging Face model."""
    prompts: Path
    """JSON Lines of text like that to come."""
    method: Annotated[str, choice(SENSITIVITIES)] = "fisher"
    """How noise is measured."""
    bits: tuple[Width, ...] = (3, 4, 8)
    """Weight widths."""
    group_size: int = 128
    """Input columns that share a scale; -1 gives each row one."""
    profiles: Path = PROFILES
    """Folder of measurements."""

    def __post_init__(self) -> None:
        check_group_size(self.group_size)

    def execute(self) -> None:
        """Prints a line for each layer."""
        check_inputs(prompts=(self.prompts, "prompts as JSON Lines"))
        check_output("profiles", self.profiles, is_folder=True)

        from llmpq.data import read_prompts, tokenise
        from llmpq.profiler.cache import find_sensitivity
        from llmpq.profiler.planner_inputs import calibration_batches
        from llmpq.runtime.loader import check_weights

        check_weights(self.model)
        texts = tokenise(self.model, read_prompts(self.prompts))
        with show_progress("measuring"):
            found = find_sensitivity(
                self.profiles, self.model, calibration_batches(texts),
                bits=self.bits, group_size=self.group_size, method=self.method,
            )  # fmt: skip
        lines = ["layer  " + "  ".join(f"{f'{width} bits':>9}" for width in found.bits)]
        for layer, row in enumerate(found.noise):
            lines.append(f"{layer:>5}  " + "  ".join(f"{value:>9.3g}" for value in row))
        lines.append("  all  " + "  ".join(f"{value:>9.3g}" for value in found.noise.sum(axis=0)))
        record = {"bits": list(found.bits), "noise": found.noise.tolist(), "method": found.method}
        self.print_result(record, "\n".join(lines))
