"""Checks that packed documents get what each gets alone, by two short ones through the model itself.

A layer that mixes tokens outside of attention (a convolution, a recurrence, attention of its own) lets
documents see each other, and so does an argument of attention that is left out. Gradients show both: of
one document's last token, those of the other document's tokens must be exactly zero, and those of its
own earlier tokens, which come through such layers only, must be the same as without packing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydraulis.runtime.attention.by_document import CallRecord, attend, record_calls
from hydraulis.runtime.attention.packed import PackedDocuments
from shared.errors import ConfigError, MeshyardError

__all__ = ["DocumentLimits", "check_isolation"]

_LENGTHS = (6, 7)
"""Tokens of the documents: more than convolutions of four tokens reach back."""
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3}
"""Largest relative error by type; of 16-bit types rounding takes more."""
_NARROW_TOLERANCE = 0.2
_MIXING = re.compile("(attention|mixer|conv|deltanet|recurrentblock|lru)$", re.IGNORECASE)
"""End of the class names of layers that mix tokens."""


@dataclass(frozen=True, kw_only=True)
class DocumentLimits:
    """What documents a model computes when they are packed as when they are alone.

    Attributes:
        max_tokens: of a document; None for any.
        reason: what it is that longer ones would get otherwise.
        has_relative_positions: whether only differences of positions count.
    """

    max_tokens: int | None = None
    reason: str = ""
    has_relative_positions: bool = True

    def check(self, longest: int) -> None:
        """Refuses a document that is too long.

        Raises:
            ConfigError: its packed outputs would differ from its own; says why.
        """
        if self.max_tokens is not None and longest > self.max_tokens:
            raise ConfigError(
                f"attention by document: expected documents of at most {self.max_tokens} tokens, got "
                f"{longest}: {self.reason}; cut them, or train this model without packing"
            )


def check_isolation(model: nn.Module, *, is_engine: bool = False) -> DocumentLimits:
    """Compares two packed documents with each alone; weights, generators and settings stay as they are.

    Where parameters are sharded all ranks call it, and only outputs are compared.

    Args:
        model: a Hugging Face causal LM, on its device.
        is_engine: whether the model is called as the engine calls it.

    Raises:
        ConfigError: the model cannot be called with packed documents, or computes them otherwise.
    """
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"attention by document: expected a Hugging Face causal LM, got {type(model).__name__}"
        )
    check = _Isolation(model, is_engine=is_engine)
    with _undisturbed(model):
        try:
            return check.run()
        except (MeshyardError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ConfigError(
                f"attention by document: {type(model).__name__} does not take packed documents "
                f"({type(error).__name__}: {error}); train it without packing"
            ) from error


class _Isolation:
    """Passes of two documents, alone and packed."""

    def __init__(self, model: Any, *, is_engine: bool) -> None:
        self._model, self._is_engine = model, is_engine
        parameter = next(model.parameters())
        self._device = parameter.device
        self._has_gradients = not any(hasattr(p, "placements") for p in model.parameters())
        dtype = parameter.dtype
        # On a GPU attention by document takes 16 bits, as under the autocast of training.
        self._autocast: Any = nullcontext()
        if self._device.type == "cuda" and dtype == torch.float32:
            dtype = torch.bfloat16
            self._autocast = torch.autocast("cuda", dtype)
        self._tolerance = _TOLERANCES.get(dtype, _NARROW_TOLERANCE)
        self._ids = _token_ids(model, sum(_LENGTHS)).to(self._device)
        generator = torch.Generator().manual_seed(0)
        self._weights = torch.randn(model.config.get_text_config().vocab_size, generator=generator)

    def run(self) -> DocumentLimits:
        parts = self._ids.split(list(_LENGTHS))
        alone = [self._differentiate(part, (len(part),), is_packed=False)[0] for part in parts]
        with record_calls() as record, attend(self._model):
            packed = self._differentiate(self._ids, _LENGTHS, is_packed=True)
            self._try_training(record.modules)
        begin = 0
        for (logits, gradient), (all_logits, all_gradients), length in zip(
            alone, packed, _LENGTHS, strict=True
        ):
            own = slice(begin, begin + length)
            if gradient is not None:
                others = all_gradients.clone()
                others[own] = 0
                if bool(others.any()):
                    raise ConfigError(
                        f"attention by document: expected layers that mix tokens in attention alone, got "
                        f"{self._name(record)}, where a packed document sees another; train it without "
                        f"packing"
                    )
                self._compare(all_gradients[own][:-1], gradient[:-1], record)
            self._compare(all_logits[own], logits, record)
            begin += length
        return self._limits(record, packed[0][0])

    def _differentiate(
        self, ids: Tensor, lengths: tuple[int, ...], *, is_packed: bool
    ) -> list[tuple[Tensor, Any]]:
        """Logits of all tokens, and gradients of each document's last ones by all tokens' embeddings."""
        leaves: list[Tensor] = []

        def cut(_module: nn.Module, _args: Any, states: Tensor) -> Tensor:
            leaves.append(states.detach().requires_grad_())
            return leaves[-1].clone()  # some models write into it

        hook = None
        if self._has_gradients:
            hook = self._model.get_input_embeddings().register_forward_hook(cut)
        try:
            with torch.set_grad_enabled(self._has_gradients), self._autocast:
                logits = self._logits(ids, lengths, is_packed=is_packed)
        finally:
            if hook is not None:
                hook.remove()
        results = []
        weights, begin = self._weights.to(logits), 0
        for length in lengths:
            begin += length
            gradient = None
            if self._has_gradients:
                with torch.enable_grad():
                    last = logits[begin - 1] @ weights
                parts = torch.autograd.grad(last, leaves, retain_graph=True)
                gradient = torch.cat([part[0].flatten(1) for part in parts], dim=1)
            results.append((logits.detach(), gradient))
        return results

    def _logits(
        self, ids: Tensor, lengths: tuple[int, ...], *, is_packed: bool, shift: int = 0
    ) -> Tensor:
        positions = torch.cat([torch.arange(length) for length in lengths]) + shift
        inputs: dict[str, Any] = {"input_ids": ids[None]}
        if is_packed:
            inputs["position_ids"] = positions[None].to(self._device)
            inputs |= _packing(lengths, is_engine=self._is_engine)
        logits = self._model(**inputs).logits
        if logits.shape[:-1] != (1, len(ids)):
            raise ConfigError(
                f"attention by document: expected a causal LM with logits of each token, got "
                f"{type(self._model).__name__} with logits of shape {tuple(logits.shape)}"
            )
        return logits[0]

    @torch.no_grad()
    def _try_training(self, modules: list[nn.Module]) -> None:
        """Calls attention with the arguments that it has in training: dropout."""
        for module in modules:
            module.training = True
        with self._autocast:
            self._logits(self._ids, _LENGTHS, is_packed=True)

    def _compare(self, packed: Tensor, alone: Tensor, record: CallRecord) -> None:
        error = self._error(packed, alone)
        if not error <= self._tolerance:
            raise ConfigError(
                f"attention by document: expected packed documents to get what they get alone, got an "
                f"error of {error:.1%} in {self._name(record)}; train it without packing"
            )

    def _error(self, packed: Tensor, alone: Tensor) -> float:
        scale = float(alone.double().norm())
        return float((packed.double() - alone.double()).norm()) / scale if scale else 0.0

    def _name(self, record: CallRecord) -> str:
        """The model's class, and those of its layers that mix tokens without attention by document."""
        used = {id(module) for module in record.modules}
        parents = {
            id(m) for m in self._model.modules() for child in m.modules() if id(child) in used
        }
        other = {
            type(module).__name__
            for module in self._model.modules()
            if _MIXING.search(type(module).__name__) and id(module) not in parents
        }
        return f"{type(self._model).__name__}" + (f" ({', '.join(sorted(other))})" if other else "")

    def _limits(self, record: CallRecord, logits: Tensor) -> DocumentLimits:
        limits = [
            (window, f"a layer has a sliding window of {window}") for window in record.windows
        ]
        limits += _mask_limits(self._model.config.get_text_config(), record)
        limits += _rotation_limits(self._model)
        max_tokens, reason = min(limits, default=(None, ""))
        return DocumentLimits(
            max_tokens=max_tokens, reason=reason, has_relative_positions=self._is_relative(logits)
        )

    @torch.no_grad()
    def _is_relative(self, logits: Tensor) -> bool:
        """Whether positions that are all shifted give the same outputs."""
        with attend(self._model), self._autocast:
            shifted = self._logits(self._ids, _LENGTHS, is_packed=True, shift=3)
        return self._error(shifted, logits) <= self._tolerance


def _packing(lengths: tuple[int, ...], *, is_engine: bool) -> dict[str, Any]:
    """Arguments of a model's call that say where documents end."""
    if is_engine:
        return {"packing": PackedDocuments(lengths=lengths), "use_cache": False}
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
        "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip


def _mask_limits(config: Any, record: CallRecord) -> list[tuple[int, str]]:
    """Windows and chunks that only the model's masks have, which are not made."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        sizes = {size for size in record.local_sizes if size}
    else:
        names = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        used = {getattr(config, name, None) for kind, name in names.items() if kind in kinds}
        sizes = {size for size in used if size}
    return [(size, f"a layer's mask has windows or chunks of {size}") for size in sorted(sizes)]


def _rotation_limits(model: nn.Module) -> list[tuple[int, str]]:
    """Lengths up to which rotary angles do not depend on the longest document of a micro-batch."""
    limits = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            parameters: Any = (
                getattr(getattr(module, "config", None), "rope_parameters", None) or {}
            )
            parameters = parameters if layer is None else parameters[layer]
            tokens = None
            if kind == "longrope":
                tokens = parameters["original_max_position_embeddings"]
            elif kind is not None and "dynamic" in kind:
                tokens = getattr(module, "original_max_seq_len", None)
            if tokens is not None:
                reason = f"rope_type {kind!r} takes the angles of a micro-batch's longest document"
                limits.append((int(tokens), reason))
    return limits


def _token_ids(model: Any, count: int) -> Tensor:
    """Different tokens, none of them a special one where the vocabulary allows it."""
    config = model.config.get_text_config()
    special = set()
    for name, value in config.to_dict().items():
        if name.endswith(("token_id", "token_index")) and value is not None:
            special |= set(value) if isinstance(value, list) else {value}
    ids = [one for one in range(config.vocab_size) if one not in special][: 64 * count]
    ids = ids or list(range(config.vocab_size))
    return torch.tensor([ids[(7 * number + 3) % len(ids)] for number in range(count)])


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Runs a model in evaluation mode, and leaves modes and generators as they were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [p.device for p in model.parameters() if p.is_cuda][:1]
    with torch.random.fork_rng(devices):
        model.eval()
        try:
            yield
        finally:
            for module, is_training in modes:
                module.training = is_training
                # FSDP2 gathers its outermost parameters until a backward pass that does not come.
                reshard: Any = getattr(module, "reshard", None)
                if reshard is not None:
                    reshard()
