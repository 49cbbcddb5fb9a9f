"""Reads a stage's own tensors from safetensors, a layer at a time, and rounds what the plan rounds."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmpq.config import ModelSpec, columns_per_scale
from llmpq.data import read_generation_config
from llmpq.planner.plan import DTYPES, Plan, Stage
from llmpq.runtime.gptq import read_codes, round_model, write_codes
from llmpq.runtime.layers import HEAD, StageModel, build, read_config
from llmpq.runtime.linear import QuantLinear
from llmpq.runtime.weights.files import WeightFiles, digest_file, open_weights
from shared.errors import ConfigError, DataError
from shared.kernels import weight_matmul

__all__ = [
    "WeightFiles",
    "check_codes_path",
    "check_plan",
    "check_weights",
    "count_own_head",
    "digest_weights",
    "fill_stage",
    "load",
    "load_stage",
    "load_unrounded",
    "round_for",
]

_LOG = logging.getLogger(__name__)


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


def check_weights(folder: str | Path) -> None:
    """Compares a model's files with its configuration, without reading weights.

    Raises:
        ConfigError: the model is of a family, or stored in a form, that is not read.
        DataError: a tensor is missing, has another shape or type, or belongs to a form of storage that
            is not read; names it and its file.
    """
    model: Any = build(read_config(folder))
    with open_weights(folder) as files:
        is_tied = _is_tied(model)
        if is_tied:
            files.tie(_embedding_name(model), f"{HEAD}.weight")
        files.check(model, f"{HEAD}.weight" if is_tied else None)


def digest_weights(folder: str | Path, plan: Plan) -> str:
    """16 hexadecimal digits of all weights that a plan's answers come from.

    All bytes are read, once in a process: of the model's files, and of the plan's codes.
    """
    files = [
        *sorted(Path(folder).glob("*.safetensors")),
        *([Path(plan.codes)] if plan.codes else []),
    ]
    facts = tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    return _digest_weights(str(folder), plan.codes, facts)


@lru_cache(maxsize=16)
def _digest_weights(folder: str, codes: str | None, facts: object) -> str:
    """Digests files; `facts` tells contents of the same names apart."""
    with open_weights(folder) as files:
        digests = [files.digest()]
    if codes is not None:
        digests.append(digest_file(codes))
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def count_own_head(folder: str | Path) -> int:
    """Counts the weights of a head that the files hold although the configuration ties it; 0 if none."""
    model: Any = build(read_config(folder))
    if not _is_tied(model):
        return 0
    with open_weights(folder) as files:
        is_own = _has_own_head(files, _embedding_name(model))
    return is_own * model.get_output_embeddings().weight.numel()


def _is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _embedding_name(model: Any) -> str:
    weight = model.get_input_embeddings().weight
    return next(name for name, value in model.named_parameters() if value is weight)


def _has_own_head(files: WeightFiles, embedding: str) -> bool:
    """Whether the files hold a head that differs from the embedding it is tied to."""
    head = f"{HEAD}.weight"
    return files.has(head) and files.has(embedding) and not files.are_equal(head, embedding)


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
    ends = {here: name for here, name in stage.names.items() if not here.startswith("layers.")}
    if stage.has_ends and stage.is_tied:
        files.tie(f"{ends['before.0']}.weight", f"{HEAD}.weight")
    for here, name in ends.items():
        _fill(stage.get_submodule(here), name, files, dtype)
    if stage.has_ends and stage.is_tied:
        assert stage.head is not None
        stage.head.weight = _tied_head(files, stage.before[0], ends["before.0"], dtype)


def _tied_head(files: WeightFiles, embedding: Any, name: str, dtype: torch.dtype) -> nn.Parameter:
    """Returns the weight of a tied head: the embedding's, unless the files hold another, as transformers."""
    if not _has_own_head(files, f"{name}.weight"):
        return embedding.weight
    _LOG.warning(
        "config.json ties the head to the embedding, but the files hold a head that differs; it is "
        "taken, as transformers takes it"
    )
    return nn.Parameter(files.copy(f"{HEAD}.weight", dtype), requires_grad=False)


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
    check_weights(folder)
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
        if stage.is_tied:
            files.tie(f"{stage.names['before.0']}.weight", f"{HEAD}.weight")
        for here, name in stage.names.items():
            if not here.startswith("layers."):
                _fill(model.get_submodule(name), name, files, dtype)
        if stage.is_tied:
            embedding = model.get_input_embeddings()
            head = _tied_head(files, embedding, stage.names["before.0"], dtype)
            model.get_output_embeddings().weight = head
    model.generation_config = read_generation_config(folder)
    return model


def load_unrounded(folder: str | Path, dtype: str | None = None) -> Any:
    """Loads the whole model as it is.

    Args:
        folder: a Hugging Face model with safetensors.
        dtype: of its weights; by default that of its configuration.

    Returns:
        The transformers model.

    Raises:
        ConfigError: the model is of a family, or stored in a form, that is not read.
        DataError: a tensor is missing, or not finite.
    """
    named = str(read_config(folder).dtype).removeprefix("torch.")
    num_layers = ModelSpec.from_hf(folder).num_layers
    plan = Plan(
        stages=(Stage(rank=0, layers=(0, num_layers)),), bits=(16,) * num_layers,
        prefill_size=1, decode_size=1, dtype=dtype or (named if named in DTYPES else "float32"),
    )  # fmt: skip
    return load(folder, plan)


def check_codes_path(path: str | Path, folder: str | Path) -> None:
    """Refuses to write GPTQ's codes among a model's own files.

    Raises:
        ConfigError: the file would lie in the model's folder, whose weights are safetensors too.
    """
    if Path(path).resolve().parent == Path(folder).resolve():
        raise ConfigError(
            f"{path}: expected a place outside the model's folder, whose weights are safetensors too; "
            f"name another with --out"
        )


def round_for(
    plan: Plan,
    folder: str | Path,
    batches: Iterable[Tensor],
    path: str | Path,
    *,
    on_layer: Callable[[int], None] = lambda number: None,
) -> Plan:
    """Rounds a model by GPTQ for a plan, and writes the codes that its stages load.

    The whole model is held here in float32. A plan of 16 bits alone is returned as it is.

    Args:
        plan: its widths and group size count.
        folder: a Hugging Face model with safetensors.
        batches: token ids [sequences, tokens] of calibration text, some thousand tokens.
        path: safetensors file to write, replaced at once; not in the model's folder.
        on_layer: called with the number of each layer before its turn.

    Returns:
        The plan with these codes.

    Raises:
        ConfigError: the file would lie among the model's own.
        DataError: there is no text, or a weight is not finite; names the matrix.
    """
    if min(plan.bits) == 16:
        return plan
    check_codes_path(path, folder)
    model = load_unrounded(folder, "float32")
    packed = round_model(model, batches, plan.bits, group_size=plan.group_size, on_layer=on_layer)
    write_codes(path, packed)
    return replace(plan, method="gptq", codes=str(path))


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
        columns = columns_per_scale(plan.group_size, weight.shape[1])
        return weight_matmul.pack(weight, bits, group_size=columns)
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
