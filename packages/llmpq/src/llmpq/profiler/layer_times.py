"""Times one decoder layer, embedding and head of a model on this device, with made-up weights.

Times depend on shapes alone, so weights are never read. As many layers are built as no cache holds,
and they take turns, as they do when a model runs. First the forms of a product are timed on the
model's own matrices; layers are then timed with the form that is fastest for each number of tokens.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import nn

from llmpq.config import ModelSpec, columns_per_scale
from llmpq.profiler.latency import Latency, Work, best_rates, fit_decode, fit_prefill
from llmpq.profiler.profile import DeviceProfile
from llmpq.runtime.layers import StageModel, read_config
from llmpq.runtime.linear import (
    ACTIVATIONS,
    QuantLinear,
    Table,
    forms_table,
    measure_forms,
    synchronise,
)
from llmpq.runtime.sampling import Sampling
from llmpq.runtime.stage import LayerCache, allocate
from shared.comms import Group
from shared.errors import ConfigError
from shared.kernels import weight_matmul

__all__ = ["choose_forms", "find_device", "measure_device", "read_processor"]

_COLD_BYTES = 96 << 20
_MOST_COPIES = 16
_MANY_TOKENS = 1024
_MOST_TURNS = 8
_ENOUGH_SHARE = 0.005
"""Part of all time after which a call's turns end."""
_MOST_BITS_IN_BFLOAT16 = 4
_FORM_TOKENS = (1, 4, 16, 32, 64, 128, 512)
_FORMS_SHARE, _DECODE_SHARE = 0.2, 0.4
"""Parts of a width's time in which forms are timed, and decode steps."""

Sample = tuple[int, int, float]


def measure_device(
    folder: str | Path,
    *,
    kind: str,
    bits: Sequence[int] = (3, 4, 8, 16),
    group_size: int = 128,
    dtype: str = "float32",
    activations: str = "float",
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    prompt_tokens: int = 128,
    new_tokens: int = 32,
    limit_s: float = 60.0,
    device: str | torch.device | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> DeviceProfile:
    """Measures a device of this process.

    Args:
        folder: the Hugging Face model; its configuration alone is read.
        kind: name for the profile.
        bits: widths.
        group_size: columns that share a scale.
        dtype: of activations.
        activations: see `choose_forms`.
        batches: prompts in a micro-batch.
        prompt_tokens: longest prompts; shorter ones are measured too.
        new_tokens: tokens generated, which bounds the keys and values read.
        limit_s: seconds that measuring may take, once libraries are loaded; fewer batches are
            measured when it is short.
        device: what is measured; by default that of `find_device`.
        on_progress: called with what is being measured.

    Raises:
        ConfigError: the model's family is unknown, or a width is.
    """
    device = find_device() if device is None else torch.device(device)
    for width in bits:
        if width not in (*weight_matmul.BITS, 16):
            raise ConfigError(f"bits: expected some of 3, 4, 8 and 16, got {width}")
    spec, torch_dtype = ModelSpec.from_hf(folder), getattr(torch, dtype)
    _load_libraries(folder)
    end, enough_s = time.perf_counter() + limit_s, _ENOUGH_SHARE * limit_s
    lengths = sorted({max(1, prompt_tokens // 4), max(1, prompt_tokens // 2), prompt_tokens})
    pasts = sorted({max(1, prompt_tokens // 2), prompt_tokens + new_tokens})
    forms: dict[str, Table] = {}
    prefills: dict[int, list[Sample]] = {}
    decodes: dict[int, list[Sample]] = {}
    for at, width in enumerate(bits):
        on_progress(f"{width} bits")
        begin = time.perf_counter()
        share_s = (end - begin) / (len(bits) - at + 0.25)
        if width < 16:
            forms[str(width)] = choose_forms(
                spec, width, group_size=group_size, dtype=dtype, activations=activations,
                limit_s=_FORMS_SHARE * share_s, device=device,
            )  # fmt: skip
        layers = _Layers(folder, width, group_size, dtype, forms.get(str(width)), enough_s, device)
        stop = begin + (_FORMS_SHARE + _DECODE_SHARE) * share_s
        decodes[width] = _sample(layers.decode_s, batches, pasts, stop)
        prefills[width] = _sample(layers.prefill_s, batches, lengths, begin + share_s)
    work = {width: _least_work(spec, width, group_size, torch_dtype.itemsize) for width in bits}
    rates = best_rates(
        [(prefills[width], work[width][0]) for width in bits],
        [(decodes[width], work[width][1]) for width in bits],
    )
    on_progress("embedding and head")
    embed, head = _time_ends(folder, torch_dtype, batches, enough_s, device)
    return DeviceProfile(
        kind=kind,
        processor=read_processor(device),
        torch=str(torch.__version__),
        model=spec.fingerprint,
        dtype=dtype,
        group_size=group_size,
        prefill={b: fit_prefill(prefills[b], work[b][0], rates) for b in bits},
        decode={b: fit_decode(decodes[b], work[b][1], rates) for b in bits},
        embed=embed,
        head=head,
        forms=forms,
    )


def choose_forms(
    spec: ModelSpec,
    bits: int,
    *,
    group_size: int,
    dtype: str,
    activations: str = "float",
    limit_s: float = 10.0,
    device: str | torch.device = "cpu",
) -> Table:
    """The fastest form of a layer's products by number of tokens, measured on this device.

    Seconds of a form are summed over the layer's matrices. In float32, only products with weights of 3
    and 4 bits may be computed in bfloat16: its rounding, of 2^-9, adds about a hundredth to the squared
    error of 4 bits, but as much again to that of 8.

    Args:
        spec: the model, whose matrices are timed.
        bits: weight width, below 16.
        group_size: columns that share a scale.
        dtype: of activations.
        activations: one of `ACTIVATIONS`; "int8" has the form timed too that multiplies integers of 8
            bits. Its loss is no part of a width's noise: see the sensitivity "int8".
        limit_s: seconds; when they are over, larger numbers of tokens are left out.
        device: where products are computed.

    Returns:
        [[from_tokens, form], ...], as `QuantLinear` takes it.

    Raises:
        ConfigError: activations are none of `ACTIVATIONS`.
    """
    if activations not in ACTIVATIONS:
        raise ConfigError(
            f"activations: expected one of {', '.join(ACTIVATIONS)}, got {activations!r}"
        )
    end = time.perf_counter() + limit_s
    is_exact = dtype == "float32" and bits > _MOST_BITS_IN_BFLOAT16
    forms = ("packed", "dense32") if is_exact else ("packed", "dense16", "dense32")
    forms += ("int8",) * (activations == "int8")
    shapes = Counter((matrix.in_features, matrix.out_features) for matrix in spec.matrices)
    found: dict[int, dict[str, float]] = {}
    for tokens in _FORM_TOKENS:
        begin = time.perf_counter()
        found[tokens] = dict.fromkeys(forms, 0.0)
        for (columns, rows), count in shapes.items():
            times = measure_forms(
                bits=bits, tokens=(tokens,), in_features=columns, out_features=rows, forms=forms,
                group_size=group_size, dtype=getattr(torch, dtype), device=device,
            )[tokens]  # fmt: skip
            for form in forms:
                found[tokens][form] += count * times[form]
        spent_s = time.perf_counter() - begin
        if time.perf_counter() + 2 * spent_s > end:
            break
    return forms_table(found)


def find_device() -> torch.device:
    """The device of this rank's group; in one process a CUDA device if there is one."""
    if Group.exists():
        return torch.device(Group.world().device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_processor(device: torch.device) -> str:
    """The processor's name; with a CPU's, the instruction set that torch is held to."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _load_libraries(folder: str | Path) -> None:
    """Imports the model's code and compiles the kernel, which takes seconds the first time."""
    read_config(folder)
    measure_forms(bits=4, tokens=(1,), in_features=64, out_features=64, forms=("packed",))


def _sample(
    seconds: Callable[[int, int], float],
    batches: Sequence[int],
    lengths: Sequence[int],
    stop: float,
) -> list[Sample]:
    """Measures the smallest and largest batch and then those between, as long as time is left.

    A step's seconds bend with its rows, so that between two points is safer than beyond them.
    """
    found: list[Sample] = []
    each_s = 0.0
    for batch in _spread(sorted(set(batches))):
        begin = time.perf_counter()
        if found and begin + each_s * batch > stop and len(found) >= 3:
            continue  # a smaller one may be in time
        found += [(batch, length, seconds(batch, length)) for length in lengths]
        each_s = (time.perf_counter() - begin) / batch
    return found


def _spread(values: list[int]) -> list[int]:
    """The ends, then what halves the gaps."""
    found, gaps = [values[0], values[-1]][: len(values)], [(0, len(values) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle < high:
            found.append(values[middle])
            gaps += [(low, middle), (middle, high)]
    return found


def _least_work(spec: ModelSpec, bits: int, group_size: int, item: int) -> tuple[Work, Work]:
    """What a layer cannot do without, in prefill and in decode; scores of later tokens are not."""
    weights = sum(matrix.in_features * matrix.out_features for matrix in spec.matrices)
    num_bytes = spec.layer_bytes(bits, group_size) * (item / 2 if bits == 16 else 1)
    heads = spec.num_heads * spec.head_dim
    states = 2.0 * item * spec.hidden_size
    prefill = Work(flops=(0.0, 2.0 * weights, 2.0 * heads), num_bytes=(num_bytes, states, 0.0))
    of_key = spec.kv_bytes(1, 1) * item / 2
    decode = Work(flops=(0.0, 2.0 * weights, 4.0 * heads), num_bytes=(num_bytes, states, of_key))
    return prefill, decode


class _Layers:
    """Layers of one width that no cache holds together, with made-up weights."""

    def __init__(
        self,
        folder: str | Path,
        bits: int,
        group_size: int,
        dtype: str,
        forms: Table | None,
        enough_s: float,
        device: torch.device,
    ) -> None:
        self._device = device
        self._shape, self._dtype = ModelSpec.from_hf(folder), getattr(torch, dtype)
        self._enough_s = enough_s
        copies = 1 + _COLD_BYTES // max(1, self._shape.layer_bytes(bits, group_size))
        copies = min(copies, _MOST_COPIES, self._shape.num_layers)
        self._stage = StageModel(read_config(folder), 0, copies, has_ends=False)
        for module in list(self._stage.layers.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and bits < 16:
                    setattr(module, name, _make_linear(child, bits, group_size, self._dtype, forms))
        _make_up(self._stage.layers, self._dtype)
        self._stage.to_device(device)
        self._whole = self._stage.layers
        self.prefill_s(1, 4)  # compiles, and touches the weights

    def prefill_s(self, batch: int, tokens: int) -> float:
        """Seconds of a layer for `batch` prompts of `tokens` tokens."""
        # Arithmetic bounds many tokens, whatever a cache holds; a few layers will do.
        return self._layer_s(batch, tokens, 0, most=max(1, _MANY_TOKENS // (batch * tokens)))

    def decode_s(self, batch: int, past: int) -> float:
        """Seconds of a layer for one token of each of `batch` prompts behind `past` tokens."""
        return self._layer_s(batch, 1, past, most=_MOST_COPIES)

    @torch.no_grad()
    def _layer_s(self, batch: int, tokens: int, past: int, most: int) -> float:
        self._stage.layers = self._whole[:most]
        count = len(self._stage.layers)
        spec = self._shape
        shape = (batch, spec.num_kv_heads, past + tokens, spec.head_dim)
        cache = allocate(count, shape, self._dtype, self._device)
        for layer in cache.layers:
            assert isinstance(layer, LayerCache)
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys.zero_()  # fresh memory would be slow, and hold any numbers
            layer.values.zero_()
        x = torch.randn(batch, tokens, spec.hidden_size, device=self._device).to(self._dtype)
        mask = torch.ones(batch, past + tokens, dtype=torch.int64, device=self._device)
        mask[0, 0] = past + tokens == 1  # prompts are padded, as a rule
        positions = torch.arange(past, past + tokens, device=self._device).expand(batch, -1)

        def call() -> None:
            for layer in cache.layers:
                assert isinstance(layer, LayerCache)
                layer.length = past
            self._stage(x, mask, positions, cache)

        return _median_s(call, self._enough_s, self._device) / count


def _make_linear(
    like: nn.Linear, bits: int, group_size: int, dtype: torch.dtype, forms: Table | None
) -> QuantLinear:
    group_size = columns_per_scale(group_size, like.in_features)
    groups = (like.out_features, -(-like.in_features // group_size))
    packed = weight_matmul.from_codes(
        torch.randint(0, 1 << bits, (like.out_features, like.in_features), dtype=torch.uint8),
        torch.full(groups, 1e-3),
        torch.full(groups, 1 << (bits - 1)),
        bits,
        group_size=group_size,
    )
    bias = None if like.bias is None else torch.zeros(like.out_features, dtype=dtype)
    return QuantLinear(packed, bias, forms)


def _make_up(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives parameters on the meta device memory."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            fresh = torch.full(parameter.shape, 0.01, dtype=dtype)
            setattr(owner, name, nn.Parameter(fresh, requires_grad=False))


@torch.no_grad()
def _time_ends(
    folder: str | Path,
    dtype: torch.dtype,
    batches: Sequence[int],
    enough_s: float,
    device: torch.device,
) -> tuple[tuple[float, float], Latency]:
    """Seconds of a call and of a token of the embedding, and of rows of the head."""
    config = read_config(folder)
    stage = StageModel(config, 0, 1, has_ends=True)
    for part in (stage.before, stage.after):
        _make_up(part, dtype)
    assert stage.head is not None
    if stage.is_tied:
        stage.head.weight = stage.before[0].weight
    _make_up(stage.head, dtype)
    stage.before.to(device)
    stage.after.to(device)
    stage.head.to(device)
    sampling, num_rows = Sampling(), sorted({1, 2, 8, max(batches), 2 * max(batches)})

    def head(rows: int) -> Callable[[], object]:
        hidden = torch.full(
            (rows, ModelSpec.from_hf(config).hidden_size), 0.5, dtype=dtype, device=device
        )
        numbers = torch.arange(rows)
        return lambda: sampling.choose(stage.logits(hidden), numbers, 0)

    def embed(tokens: int) -> Callable[[], object]:
        ids = torch.arange(tokens, device=device) % config.vocab_size
        return lambda: stage.before[0](ids)

    few_s, many_s = _median_s(embed(1), enough_s, device), _median_s(embed(4096), enough_s, device)
    each_s = max(0.0, many_s - few_s) / 4095
    samples = [(rows, 0, _median_s(head(rows), enough_s, device)) for rows in num_rows]
    return (max(0.0, few_s - each_s), each_s), fit_decode(samples)


def _median_s(call: Callable[[], object], enough_s: float, device: torch.device) -> float:
    """Median seconds of a call's turns; the first counts only if it is alone, as it warms up."""
    found: list[float] = []
    while len(found) <= _MOST_TURNS and sum(found) < enough_s:
        begin = time.perf_counter()
        call()
        synchronise(device)
        found.append(time.perf_counter() - begin)
    return median(found[1:] or found)
