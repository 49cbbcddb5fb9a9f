"""A plan: who runs which layers at which widths, in which micro-batches; and its JSON form."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.files import read_json, write_atomically

__all__ = ["BITS", "DTYPES", "METHODS", "Plan", "Stage"]

BITS = (3, 4, 8, 16)
"""Weight widths; 16 stands for weights that are left as they are, in the plan's dtype."""
DTYPES = ("float32", "bfloat16", "float16")
METHODS = ("nearest", "gptq")
"""How weights are rounded: each to its nearest step, or by GPTQ."""

_VERSION = 1
_PATHS = ("folder", "codes")
_FIGURES = ("seconds", "nats", "num_prompts", "new_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Consecutive decoder layers on one rank.

    Attributes:
        rank: the rank that runs them.
        layers: first layer and the one after the last.
    """

    rank: int
    layers: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Who runs which layers at which widths, and in which micro-batches.

    The first stage also holds the embedding, the final norm and the head.

    Attributes:
        stages: in pipeline order; together they hold every layer once. Ranks without a stage
            stay idle.
        bits: weight width of each layer: 3, 4, 8, or 16 for weights left as they are, in `dtype`.
        group_size: input columns that share a scale, -1 for a whole row; layers of 16 bits ignore it.
        prefill_size: prompts in a prefill micro-batch.
        decode_size: prompts in a decode micro-batch, a multiple of `prefill_size`.
        dtype: of activations, and of weights that are not quantised: "float32", "bfloat16", "float16".
        method: how weights are rounded: "nearest", or "gptq".
        model: fingerprint of the model's shape (`ModelSpec.fingerprint`), None if unknown.
        folder: of the model that it was made for, None if unknown. Commands read it where no other
            is given. Its file names it relative to itself, unless the path is absolute.
        codes: safetensors file of the rounded matrices' codes, for the method "gptq"; in the plan's
            file as `folder` is. Every rank with a stage reads its own layers' from it.
        forms: for each rank, the kernel's form by width and number of tokens, as the profiler
            measured it: {"0": {"4": [[1, "packed"], [32, "dense32"]]}} reads "from 1 token on
            packed, from 32 on dense32". Ranks without an entry measure nothing and use defaults.
        predicted: figures of the planner, for reports.

    Raises:
        ConfigError: stages do not hold every layer once, in order and on ranks of their own; `bits` is
            not a width for each layer; `decode_size` is no multiple of `prefill_size`; `codes` and
            `method` do not match; or a field has another type or value than it may have.
    """

    stages: tuple[Stage, ...]
    bits: tuple[int, ...]
    group_size: int = 128
    prefill_size: int
    decode_size: int
    dtype: str = "float32"
    method: str = "nearest"
    model: str | None = None
    folder: str | None = None
    codes: str | None = None
    forms: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "bits", tuple(self.bits))
        if not self.stages:
            raise ConfigError("Plan.stages: expected at least one stage, got none")
        next_layer, ranks = 0, set()
        for number, stage in enumerate(self.stages):
            low, high = stage.layers
            if low != next_layer or high <= low:
                raise ConfigError(
                    f"Plan.stages[{number}].layers: expected ({next_layer}, more), got "
                    f"({low}, {high}): stages hold every layer once, in order, and none is empty"
                )
            if stage.rank < 0 or stage.rank in ranks:
                raise ConfigError(
                    f"Plan.stages[{number}].rank: expected a rank of its own, got {stage.rank}"
                )
            next_layer = high
            ranks.add(stage.rank)
        if len(self.bits) != next_layer:
            raise ConfigError(
                f"Plan.bits: expected a width for each of {next_layer} layers, got {len(self.bits)}"
            )
        for layer, bits in enumerate(self.bits):
            if bits not in BITS:
                raise ConfigError(f"Plan.bits[{layer}]: expected one of {BITS}, got {bits!r}")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("method", self.method, METHODS)
        if (self.codes is None) != (self.method == "nearest"):
            raise ConfigError(
                f"Plan.codes: expected a file of codes for the method gptq alone, got "
                f"{self.codes!r} with {self.method}; `llmpq plan --method gptq` writes it"
            )
        for key in ("group_size", "prefill_size", "decode_size"):
            if type(getattr(self, key)) is not int:
                raise ConfigError(
                    f"Plan.{key}: expected a whole number, got {getattr(self, key)!r}"
                )
        for key in ("forms", "predicted"):
            if not isinstance(getattr(self, key), Mapping):
                raise ConfigError(f"Plan.{key}: expected a mapping, got {getattr(self, key)!r}")
        for rank, tables in self.forms.items():
            if not isinstance(tables, Mapping):
                raise ConfigError(
                    f"Plan.forms[{rank!r}]: expected forms by width, got {tables!r:.80}"
                )
        for key, value in self.predicted.items():
            is_figure = key in _FIGURES or key.endswith("_s")
            if is_figure and not all(
                map(_is_number, value if isinstance(value, list | tuple) else [value])
            ):
                raise ConfigError(
                    f"Plan.predicted[{key!r}]: expected numbers, got {value!r:.80}; make the plan anew"
                )
        if self.group_size < 1 and self.group_size != -1:
            raise ConfigError(
                f"Plan.group_size: expected at least 1, or -1 for a whole row, got {self.group_size}"
            )
        if self.prefill_size < 1 or self.decode_size % self.prefill_size or self.decode_size < 1:
            raise ConfigError(
                f"Plan.decode_size: expected a multiple of prefill_size, got {self.decode_size} "
                f"and {self.prefill_size}: a decode micro-batch is prefilled in whole ones"
            )

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.bits)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, replacing `path` at once."""
        tree: dict[str, Any] = {"version": _VERSION, **asdict(self)}
        for key in _PATHS:
            if tree[key] is not None and not os.path.isabs(tree[key]):
                tree[key] = os.path.relpath(tree[key], Path(path).parent)
        write_atomically(Path(path), (json.dumps(tree, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads and checks a plan.

        Raises:
            ConfigError: it is no plan, of another version, or contradicts itself; the message
                names file and key.
            DataError: there is no such file, or it is no JSON.
        """
        tree = read_json(path, "a plan")
        if not isinstance(tree, dict) or tree.get("version") != _VERSION:
            found = tree.get("version") if isinstance(tree, dict) else type(tree).__name__
            raise ConfigError(
                f"{path}: expected a plan of version {_VERSION}, got {found!r}; make it anew with "
                f"`llmpq plan`"
            )
        known = {entry.name for entry in fields(cls)}
        required = {"stages", "bits", "prefill_size", "decode_size"}
        if not required <= tree.keys() <= known | {"version"}:
            raise ConfigError(f"{path}: expected the keys {sorted(known)}, got {sorted(tree)}")
        del tree["version"]
        try:
            stages = tuple(
                Stage(rank=_whole(stage["rank"]), layers=_pair(stage["layers"]))
                for stage in tree.pop("stages")
            )
            bits = tuple(_whole(bits) for bits in tree.pop("bits"))
            for key in _PATHS:
                if tree.get(key) is not None:
                    tree[key] = os.path.normpath(Path(path).parent / tree[key])
            return cls(stages=stages, bits=bits, **tree)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError(
                f"{path}: malformed plan: {error!r}; make it anew with `llmpq plan`"
            ) from error


def _check_choice(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"Plan.{key}: expected one of {', '.join(allowed)}, got {value!r}")


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected a whole number, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _pair(value: Any) -> tuple[int, int]:
    low, high = (_whole(entry) for entry in value)
    return low, high
