"""A folder in the compressed-tensors format, which transformers and vLLM load.

Codes are written as the plan's kernels have them: asymmetric, in groups or rows, with integer zero points,
so the loaded model's weights equal ours bit for bit where it runs in the plan's dtype and that holds
float16 scales exactly (float32, float16). For engines without zero points at a width, codes are rounded
anew around 0. Codes may be stored in more bits than they need, which
changes no weight: transformers reads all matrices of a model at one width.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from llmpq.config import ModelSpec
from llmpq.planner.plan import Plan
from llmpq.runtime.linear import QuantLinear
from llmpq.runtime.loader import load
from shared.errors import ConfigError
from shared.files import atomic_folder
from shared.kernels import weight_matmul
from shared.kernels.weight_matmul import PackedWeight

__all__ = ["export", "quantization_config", "round_around_zero", "write_folder"]

_OF_WEIGHTS = ("quantization_config", "compression_config", "transformers_weights")
"""Keys of config.json on how the model's own files are stored, which the written ones are not."""
_NOT_COPIED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that say the same."""


def export(plan: Plan, folder: Path, out: Path) -> list[str]:
    """Writes the model, rounded as planned, to the folder `out`; see `llmpq.integrations.export`."""
    widths = sorted({bits for bits in plan.bits if bits < 16})
    write_folder(plan, folder, out, dict.fromkeys(widths, max(widths, default=16)))
    lines = [f"wrote {out}; load it with AutoModelForCausalLM.from_pretrained({str(out)!r})"]
    if plan.dtype == "bfloat16" and widths:
        lines.append(
            "scales are rounded to bfloat16, so that logits differ a little from those of `llmpq run`; "
            "plan with --dtype float32 or float16 for the same ones"
        )
    if len(widths) > 1:
        lines.append(
            f"all rounded layers are stored in {widths[-1]} bits, as transformers reads one width a "
            f"model; their weights are those of {', '.join(map(str, widths))} bits"
        )
    return lines


def write_folder(
    plan: Plan,
    folder: Path,
    out: Path,
    stored_bits: Mapping[int, int],
    *,
    symmetric_bits: Collection[int] = (),
    dequantize: bool = True,
) -> None:
    """Writes a folder in which each width's codes take `stored_bits[width]` bits.

    Args:
        plan: the plan.
        folder: the model it is for.
        out: folder to write, new or empty.
        stored_bits: bits that codes of each width take, at least as many.
        symmetric_bits: stored widths without zero points. Codes whose steps from 0 need more bits are
            rounded anew, to a larger scale.
        dequantize: whether transformers turns codes into weights while it loads. Otherwise it expects
            zero points unpacked, which the format does not store; other engines do not care.

    Raises:
        ConfigError: the plan is of another model, its group size does not divide columns, or there are
            files in the folder already.
        DataError: a weight is missing or not finite.
    """
    try:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    except ImportError as error:
        raise ConfigError(
            "this export needs compressed-tensors 0.15 or newer; do "
            "`pip install 'compressed-tensors>=0.15'`"
        ) from error
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out}: expected a new or empty folder to write to, but there are files, which would be "
            f"lost; name another folder, or delete it first"
        )
    group_size = _group_size(ModelSpec.from_hf(folder), plan)
    model = load(folder, plan)
    tensors: dict[str, Tensor] = {}
    rounded: dict[str, int] = {}
    dtype = getattr(torch, plan.dtype)
    for name, module in model.named_modules():
        if not isinstance(module, QuantLinear):
            continue
        packed = module.packed
        bits = rounded[name] = stored_bits[packed.bits]
        scale = packed.scale
        if bits in symmetric_bits:
            codes, scale = round_around_zero(packed, bits)
        else:
            # The format has signed codes: all are lower by half of their range.
            codes, zero = (
                (each.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
                for each in (weight_matmul.codes(packed), packed.zero)
            )
            tensors[f"{name}.weight_zero_point"] = pack_to_int32(zero, bits, packed_dim=0)
        tensors[f"{name}.weight_packed"] = pack_to_int32(codes, bits)
        tensors[f"{name}.weight_scale"] = scale.to(dtype)
        shape = [packed.out_features, packed.in_features]
        tensors[f"{name}.weight_shape"] = torch.tensor(shape)
        if module.bias is not None:
            tensors[f"{name}.bias"] = module.bias.to(dtype)
    # Each parameter once: a tied head is written as the embedding.
    tensors |= {name: value.detach() for name, value in model.named_parameters()}
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config["dtype"] = plan.dtype
    for key in _OF_WEIGHTS:
        config.pop(key, None)
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        config["tie_word_embeddings"] = False
    if rounded:
        config["quantization_config"] = quantization_config(
            model, rounded, group_size, symmetric_bits=symmetric_bits, dequantize=dequantize
        )
    with atomic_folder(out) as partial:
        for path in folder.iterdir():
            is_weight = path.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth")
            is_index = path.name.endswith(".index.json")
            if path.is_file() and not is_weight and not is_index and path.name not in _NOT_COPIED:
                shutil.copy(path, partial / path.name)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        contiguous = {name: value.contiguous() for name, value in tensors.items()}
        save_file(contiguous, partial / "model.safetensors", metadata={"format": "pt"})


def quantization_config(
    model: nn.Module,
    rounded: Mapping[str, int],
    group_size: int,
    *,
    symmetric_bits: Collection[int] = (),
    dequantize: bool,
) -> dict[str, Any]:
    """The `quantization_config` of a model's configuration.

    Args:
        model: the model, for the names of what is not rounded.
        rounded: stored bits of each rounded matrix, by its module's name.
        group_size: columns that share a scale, -1 for a row.
        symmetric_bits: see `write_folder`.
        dequantize: see `write_folder`.
    """
    groups = {}
    for bits in sorted(set(rounded.values())):
        groups[f"group_{bits}"] = {
            "targets": [name for name, width in rounded.items() if width == bits],
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": bits in symmetric_bits,
                "strategy": "channel" if group_size == -1 else "group",
                "group_size": None if group_size == -1 else group_size,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    kept = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in rounded
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "dequantize": dequantize,
        "config_groups": groups,
        "ignore": kept,
        "kv_cache_scheme": None,
    }


def round_around_zero(packed: PackedWeight, bits: int) -> tuple[Tensor, Tensor]:
    """Turns codes with zero points into signed codes without, exactly where they fit.

    Args:
        packed: the weight.
        bits: of the signed codes.

    Returns:
        Codes [out, in] in int8, and scales [out, groups] in float32.
    """
    group = torch.arange(packed.in_features) // packed.group_size
    steps = weight_matmul.codes(packed).to(torch.float32) - packed.zero.float()[:, group]
    most = torch.zeros(packed.scale.shape).scatter_reduce(
        1, group.expand_as(steps), steps.abs(), "amax"
    )
    factor = (most / ((1 << (bits - 1)) - 1)).clamp_(min=1.0)
    return (steps / factor[:, group]).round_().to(torch.int8), packed.scale.float() * factor


def _group_size(spec: ModelSpec, plan: Plan) -> int:
    """Columns of a group as the format has them: a divisor of all matrices' columns, or -1 for a row."""
    columns = [matrix.in_features for matrix in spec.matrices]
    if all(bits == 16 for bits in plan.bits) or not 0 < plan.group_size < max(columns):
        return -1
    for matrix in spec.matrices:
        if matrix.in_features % plan.group_size:
            raise ConfigError(
                f"group size: compressed-tensors needs groups of one size, expected a divisor of "
                f"{matrix.in_features} (columns of {matrix.name}), or -1 for a row, got "
                f"{plan.group_size}; plan with another --group-size"
            )
    return plan.group_size
