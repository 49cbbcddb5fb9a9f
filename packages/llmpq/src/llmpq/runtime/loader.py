"""Reads a stage's own tensors from safetensors, a layer at a time, and rounds what the plan rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmpq.config import ModelSpec
from llmpq.planner.plan import Plan
from llmpq.runtime.gptq import read_codes
from llmpq.runtime.layers import StageModel, build, read_config
from llmpq.runtime.linear import QuantLinear
from shared.errors import ConfigError, DataError
from shared.kernels import weight_matmul

__all__ = ["WeightFiles", "check_plan", "fill_stage", "load", "load_stage"]

_BLOCK_BYTES = 8 << 20
"""Bytes of a tensor above which it is read some rows at a time."""


class WeightFiles:
    """The tensors of a model's folder by name; each is read when it is asked for.

    Attributes:
        read_bytes: bytes of tensors read so far.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Opens model.safetensors, or the files that model.safetensors.index.json lists."""
        self._folder, self._stack = folder, stack
        self._open: dict[str, Any] = {}
        self.read_bytes = 0
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self._file_of = dict(json.loads(index.read_text())["weight_map"])
        elif (folder / "model.safetensors").exists():
            names = self._file("model.safetensors").keys()
            self._file_of = dict.fromkeys(names, "model.safetensors")
        else:
            raise ConfigError(
                f"{folder}: expected model.safetensors or its index, got neither; convert the "
                f"model's weights to safetensors"
            )

    def read(self, name: str) -> Tensor:
        """Reads a tensor.

        Raises:
            DataError: no file has it.
        """
        known = self._known(name)
        tensor = self._file(self._file_of[known]).get_tensor(known)
        self.read_bytes += tensor.nbytes
        return tensor

    def copy(self, name: str, dtype: torch.dtype) -> Tensor:
        """Reads a tensor into memory of its own, a large one some rows at a time.

        Raises:
            DataError: no file has it, or it is not finite.
        """
        known = self._known(name)
        rows = self._file(self._file_of[known]).get_slice(known).get_shape()
        out = torch.empty(rows, dtype=dtype)
        if out.nbytes <= _BLOCK_BYTES:
            return out.copy_(_checked(self.read(name), known))
        step = max(1, _BLOCK_BYTES // out[:1].nbytes)
        for low in range(0, rows[0], step):
            part = self._file(self._file_of[known]).get_slice(known)[low : low + step]
            _checked(part, known)
            out[low : low + step] = part
            self.read_bytes += part.nbytes
            del part
            self.release()
        return out

    def release(self) -> None:
        """Closes the files; memory of tensors that nobody holds any more is returned.

        Files are mapped, and what has been read of a mapping counts as this process's memory until
        all of its tensors are gone. They are opened anew when more is read.
        """
        self._open.clear()
        self._stack.close()

    def _known(self, name: str) -> str:
        # Bare models are saved without the head's prefix.
        for known in (name, name.partition(".")[2]):
            if known in self._file_of:
                return known
        raise DataError(f"{self._folder}: expected the tensor {name}, but no file has it")

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._open:
            path = self._folder / name
            try:
                self._open[name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except Exception as error:
                raise DataError(f"{path}: expected a safetensors file: {error}") from error
        return self._open[name]


def _checked(part: Tensor, name: str) -> Tensor:
    """A tensor of finite numbers; no mask of its size is made."""
    if part.numel() and not all(bool(end.isfinite()) for end in part.aminmax()):
        raise DataError(f"{name}: expected finite weights, got NaN or infinity; repair the model")
    return part


@contextmanager
def open_weights(folder: str | Path) -> Iterator[WeightFiles]:
    """Opens a model's weights, and closes the files at the end."""
    with ExitStack() as stack:
        yield WeightFiles(Path(folder), stack)


def check_plan(plan: Plan, folder: str | Path) -> None:
    """Compares a plan with the model it is to run.

    Raises:
        ConfigError: the plan is of another model.
    """
    spec = ModelSpec.from_hf(folder)
    if spec.num_layers != plan.num_layers:
        raise ConfigError(
            f"{folder}: expected a model of {plan.num_layers} layers, for which the plan was made, "
            f"got {spec.num_layers}"
        )
    if plan.codes is not None and not Path(plan.codes).is_file():
        raise ConfigError(
            f"{plan.codes}: expected the codes of a plan rounded by GPTQ, found no such file; copy it "
            f"beside the plan, or plan anew with --method gptq"
        )
    if plan.model is not None and plan.model != spec.fingerprint:
        raise ConfigError(
            f"{folder}: expected the model whose shape is {plan.model}, got {spec.fingerprint}; "
            f"plan it anew"
        )


def load_stage(folder: str | Path, plan: Plan, number: int) -> tuple[StageModel, int]:
    """Loads one stage.

    Returns:
        The stage, and the bytes of the tensors that were read.
    """
    config, (low, high) = read_config(folder), plan.stages[number].layers
    stage = StageModel(config, low, high, has_ends=number == 0)
    forms = plan.forms.get(str(plan.stages[number].rank), {})
    with open_weights(folder) as files:
        for here, layer in enumerate(stage.layers):
            name = stage.names[f"layers.{here}"]
            _round_layer(layer, name, files, plan, low + here, forms)
            files.release()
        fill_stage(stage, files, getattr(torch, plan.dtype))
        return stage, files.read_bytes


def fill_stage(stage: StageModel, files: WeightFiles, dtype: torch.dtype) -> None:
    """Reads embedding, final norm and head, on the stage that has them."""
    for here, name in stage.names.items():
        if not here.startswith("layers."):
            _fill(stage.get_submodule(here), name, files, dtype)
    if stage.has_ends and stage.is_tied:
        assert stage.head is not None
        stage.head.weight = stage.before[0].weight


def load(folder: str | Path, plan: Plan) -> Any:
    """Loads the whole model into this process, rounded as the plan says.

    Args:
        folder: a Hugging Face model with safetensors.
        plan: widths, dtype, and the forms of each stage's rank, so that products are rounded as on
            the ranks; where stages lie makes no other difference.

    Returns:
        The transformers model, whose `generate` works.

    Raises:
        ConfigError: the plan is of another model.
        DataError: a tensor is missing, or not finite.
    """
    check_plan(plan, folder)
    config, dtype = read_config(folder), getattr(torch, plan.dtype)
    model: Any = build(config)
    stage = StageModel(config, 0, plan.num_layers, has_ends=True)
    layers = next(
        m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == plan.num_layers
    )
    with open_weights(folder) as files:
        for number, layer in enumerate(layers):
            name = stage.names[f"layers.{number}"]
            rank = next(one.rank for one in plan.stages if number < one.layers[1])
            _round_layer(layer, name, files, plan, number, plan.forms.get(str(rank), {}))
        for here, name in stage.names.items():
            if not here.startswith("layers."):
                _fill(model.get_submodule(name), name, files, dtype)
    if stage.is_tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


def _round_layer(
    layer: nn.Module, name: str, files: WeightFiles, plan: Plan, number: int, forms: Any
) -> None:
    """Reads one layer; its matrices are rounded one by one, so that few are held in full."""
    bits, dtype = plan.bits[number], getattr(torch, plan.dtype)
    if bits < 16:
        for inside, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                packed = _packed(files, f"{name}.{inside}", bits, plan)
                files.release()  # a layer's pages would be twice as many bytes as its rounding needs
                shape = packed.out_features, packed.in_features
                if shape != (module.out_features, module.in_features):
                    raise DataError(
                        f"{name}.{inside}: expected a matrix of {module.out_features} x "
                        f"{module.in_features}, as config.json says, got {shape[0]} x {shape[1]}"
                    )
                bias = None
                if module.bias is not None:
                    bias = files.read(f"{name}.{inside}.bias").to(dtype)
                owner, _, last = inside.rpartition(".")
                table = forms.get(str(bits))
                setattr(layer.get_submodule(owner), last, QuantLinear(packed, bias, table))
    _fill(layer, name, files, dtype)


def _packed(files: WeightFiles, name: str, bits: int, plan: Plan) -> weight_matmul.PackedWeight:
    """A matrix by its codes where the plan has some, else rounded to nearest."""
    if plan.codes is not None:
        from safetensors import safe_open

        with safe_open(plan.codes, framework="pt") as file:
            packed = read_codes(file, name, bits, group_size=plan.group_size)
        rows, columns = packed.out_features, packed.in_features
        # A byte a code, and 3 a group.
        files.read_bytes += rows * (columns + 3 * packed.scale.shape[1])
        return packed
    weight = files.read(f"{name}.weight")
    try:
        return weight_matmul.pack(weight, bits, group_size=plan.group_size)
    except DataError as error:
        raise DataError(f"{name}.weight: {error}") from error


def _fill(module: nn.Module, name: str, files: WeightFiles, dtype: torch.dtype) -> None:
    """Reads the parameters that are still on the meta device."""
    for inside, parameter in list(module.named_parameters()):
        if not parameter.is_meta:
            continue
        # A copy: a view would keep all that was read of the file in memory.
        found = files.copy(f"{name}.{inside}" if inside else name, dtype)
        if found.shape != parameter.shape:
            raise DataError(
                f"{name}.{inside}: expected {list(parameter.shape)}, got {list(found.shape)}"
            )
        owner, _, last = inside.rpartition(".")
        fresh = nn.Parameter(found, requires_grad=False)
        setattr(module.get_submodule(owner), last, fresh)
