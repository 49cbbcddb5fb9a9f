"""One Llama on a device for bench/gpu_memo.py: what a step of it finds, and how peers train it.

The layers are those of Llama 3.2 1B, in bfloat16; the vocabulary is of bytes, so that logits decide no peak. All
ways share parameters and gradients, and a step is forward and backward of one sequence. Each peer runs at the setting
that its own manual gives for the least time: attention's results kept where the rest is computed again; pinned memory;
two streams, where it has them.
"""

import copy
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/memo/src"))

__all__ = [
    "FULL",
    "PEERS",
    "Llama",
    "Outcome",
    "Unavailable",
    "agree",
    "check_length",
    "train_step",
]

FULL = "transformers' full checkpointing"
OFFLOADING = "TRL's offloading of all activations"
SAVED_BYTES = 92_160
"""That autograd saves of a token in one of these layers, in bfloat16."""


class Unavailable(Exception):
    """A peer that cannot run here; says why."""


@dataclass(frozen=True)
class Outcome:
    """What a step found: its loss, some gradients, and the most bytes of the device."""

    loss: float
    gradients: tuple[Tensor, ...]
    peak_bytes: int


class Llama:
    """One model on a device, whose parameters and gradients all ways of training share.

    Attributes:
        full_peak: tokens and most bytes of the longest step with full checkpointing so far.
    """

    def __init__(self, device: str) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        self.device, self.is_cuda = torch.device(device), device == "cuda"
        layers, width, inner, heads = (16, 2048, 8192, 32) if self.is_cuda else (2, 64, 176, 4)
        config = LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads // 4, max_position_embeddings=1 << 20,
        )  # fmt: skip
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.is_cuda else torch.float32
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).to(self.device)
        self.name = f"Llama of {layers} layers of {width}"
        last = f"model.layers.{layers - 1}.mlp.down_proj.weight"
        self.probed = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", last)
        self.full_peak: tuple[int, int] | None = None
        for one in self.model.parameters():
            one.grad = torch.zeros_like(one)

    def shell(self) -> Any:
        """The model's modules again, over the same parameters."""
        shared = {id(one): one for one in (*self.model.parameters(), *self.model.buffers())}
        return copy.deepcopy(self.model, shared).train()

    def batch(self, num_tokens: int) -> dict[str, Any]:
        """One sequence, the same for a length."""
        ids = torch.randint(0, 256, (1, num_tokens), generator=torch.Generator().manual_seed(1))
        ids = ids.to(self.device)
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    def outcome(self, step: Callable[[], Tensor]) -> Outcome:
        """One step that warms up, and what the next one finds."""
        step()
        for one in self.model.parameters():
            one.grad.zero_()
        losses: list[float] = []
        peak = self.peak_bytes(lambda: losses.append(float(step())))
        found = dict(self.model.named_parameters())
        # Copies: on the CPU these would be the gradients that the next step adds to.
        gradients = tuple(
            found[name].grad.to("cpu", torch.float32, copy=True) for name in self.probed
        )
        return Outcome(losses[0], gradients, peak)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Most bytes of the device; where that is RAM, what is resident and the storages that it makes."""
        from memo.profiler.storage_meter import StorageMeter
        from memo.runtime.device_memory import resident_bytes

        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            run()
            return torch.cuda.max_memory_allocated()
        before = resident_bytes(self.device)
        with StorageMeter() as meter:
            run()
        return before + meter.peak_bytes


def agree(ours: Outcome, theirs: Outcome, limit_bytes: float) -> bool:
    """Whether a step trained as the other did, within a limit."""
    pairs = zip(ours.gradients, theirs.gradients, strict=True)
    return (
        abs(ours.loss - theirs.loss) <= 1e-3 * abs(theirs.loss)
        and all(bool(b.norm() > 0 and (a - b).norm() <= 0.02 * b.norm()) for a, b in pairs)
        and ours.peak_bytes <= limit_bytes
    )


def train_step(
    model: nn.Module, batch: dict[str, Any], around: AbstractContextManager[Any]
) -> Tensor:
    """Forward and backward inside of a context; the loss."""
    with around:
        loss = model(**batch).loss
        loss.backward()
    return loss.detach()


def _full(model: Any) -> AbstractContextManager[Any]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return nullcontext()


def _offloaded(model: Any) -> AbstractContextManager[Any]:
    if not torch.cuda.is_available():
        raise Unavailable("it pins memory, which needs a GPU")
    model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)
    return nullcontext()


def _selective(model: Any) -> AbstractContextManager[Any]:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    kept = [
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
        for kernel in ("flash_attention", "efficient_attention", "cudnn_attention")
    ] + [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    return nullcontext()


def _trl(model: Any, *, is_checkpointed: bool) -> AbstractContextManager[Any]:
    if importlib.util.find_spec("trl") is None:
        raise Unavailable("trl is not installed (bench/peers/trl.txt)")
    if not torch.cuda.is_available():
        raise Unavailable("it copies by streams, which need a GPU")
    offloading = importlib.import_module("trl.models.activation_offloading")
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return offloading.get_act_offloading_ctx_manager(model)


def check_length(llama: Llama, num_tokens: int, peer: str) -> None:
    """Refuses a length whose step with full checkpointing is sure to fill the device, or a peer the host.

    Raises:
        Unavailable: with both figures.
    """
    from memo.runtime.host_memory import host_share_bytes

    if not llama.is_cuda:
        return
    pinned, host = (
        llama.model.config.num_hidden_layers * SAVED_BYTES * num_tokens,
        host_share_bytes(),
    )
    if peer == OFFLOADING and 2 * pinned > host:
        raise Unavailable(f"it pins {pinned / 1e9:.0f} GB and more, the host has {host / 1e9:.0f}")
    if llama.full_peak is None:
        return
    tokens, peak = llama.full_peak
    fixed = torch.cuda.memory_allocated()
    needed, total = fixed + (peak - fixed) * num_tokens / tokens, torch.cuda.mem_get_info()[1]
    if needed > total:
        raise Unavailable(f"it takes about {needed / 1e9:.0f} GB, the device has {total / 1e9:.0f}")


PEERS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    FULL: _full,
    "torch's selective checkpointing, attention kept": _selective,
    "transformers' offloaded checkpoints": _offloaded,
    OFFLOADING: partial(_trl, is_checkpointed=False),
    "TRL's offloading of checkpoints": partial(_trl, is_checkpointed=True),
}
