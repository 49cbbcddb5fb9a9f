"""The demo: one Llama on the Bible's text under a limit of memory at which plain training fails.

Each way of training runs in a process of its own, whose data the kernel limits (RLIMIT_DATA), and has
the same seed and text: plain without a limit, for its losses and seconds; full recomputation, whose peak is the
limit of all that follow; plain again, which must fail; memo, with a file as its store.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import resource
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from memo.report import draw_memory
from shared.claims import Claim, finish
from shared.errors import DataError
from shared.training.progress import show_progress
from shared.units import MiB, format_bytes

__all__ = ["Outcome", "judge", "run"]

_log = logging.getLogger(__name__)

_WAYS = ("plain", "full recomputation", "plain under the limit", "memo")
_PR_SET_PDEATHSIG = 1
_SLACK = 1.25
"""The limit over full recomputation's growth of resident pages: the kernel counts pages that are mapped, too."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of training.

    Attributes:
        way: one of those that the module names.
        num_layers, num_tokens, num_steps: size.
        limit_bytes: growth that the kernel allows; None: no limit.
        folder: of memo's store.
    """

    way: str
    num_layers: int
    num_tokens: int
    num_steps: int
    limit_bytes: int | None
    folder: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a way of training took.

    Attributes:
        losses: of each step; empty where it failed.
        step_s: seconds of each step's forward and backward.
        growth_bytes: most resident bytes beyond those before the first step.
        samples: seconds since the last step began, and bytes beyond those before.
        error: the first line of what it raised; empty where it did not.
        plan: memo's explanation.
        predicted_bytes: memo's, of the same growth.
    """

    losses: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    growth_bytes: int = 0
    samples: tuple[tuple[float, float], ...] = ()
    error: str = ""
    plan: str = ""
    predicted_bytes: int = 0


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json, the plan and a picture to `out`.

    Args:
        out: folder, made when missing.
        is_full: the long form: more layers, tokens and steps.

    Returns:
        Whether every claim's result was correct.

    Raises:
        DataError: training without a limit fails, for instance as the text is not
            installed.
    """
    out.mkdir(parents=True, exist_ok=True)
    size = (16, 3072, 4) if is_full else (6, 1536, 3)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["memo.demo", "torch", "transformers.models.llama.modeling_llama"]
    )
    # What trains leaves Ctrl-C to this process, which ends it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    found: dict[str, Outcome] = {}
    limit = None
    with (
        tempfile.TemporaryDirectory(dir=out) as folder,
        show_progress("memo: training", len(_WAYS)) as progress,
    ):
        for way in _WAYS:
            progress.update(f"memo: training, {way}")
            found[way] = _in_child(context, Contender(way, *size, limit, folder))
            if limit is None and found[way].error:  # nothing to compare with
                raise DataError(
                    f"{way}: expected training without a limit, got: {found[way].error}"
                )
            if found[way].error and way != "plain under the limit":
                _log.warning("%s: expected training, got: %s", way, found[way].error)
            if way == "full recomputation":
                limit = int(found[way].growth_bytes * _SLACK) + 8 * MiB
            progress.advance()
    assert limit is not None
    (out / "plan.txt").write_text(found["memo"].plan + "\n", encoding="utf-8")
    shown = {way: found[way].samples for way in _WAYS if found[way].samples}
    draw_memory(shown, out / "memory.svg", limit_bytes=limit)
    claims = judge(found, limit, size)
    return finish(out, "memo", claims, {"ways": list(_WAYS), "limit_bytes": limit})


def judge(found: dict[str, Outcome], limit: int, size: tuple[int, int, int]) -> list[Claim]:
    """What the ways of training show, by name of the way; `size` is layers, tokens and steps."""
    plain, again, failed, ours = (found[way] for way in _WAYS)
    is_right = bool(ours.losses) and ours.losses == plain.losses and bool(failed.error)
    told = (
        f"{size[0]} layers, {size[1]:,} tokens; losses "
        f"{'equal plain training to the bit' if ours.losses == plain.losses else 'DIFFER'}; plain training "
        f"under the limit of {format_bytes(limit)}: {failed.error or 'did NOT fail'}"
        + (f"; memo: {ours.error}" if ours.error else "")
    )
    step_s = {
        way: median(one.step_s[1:] or one.step_s or (float("nan"),)) for way, one in found.items()
    }

    def claim(
        name: str, unit: str, mine: float, other: float, baseline: str, correct: bool
    ) -> Claim:
        return Claim(
            name=name,
            unit=unit,
            ours=mine,
            baseline=other,
            baseline_name=baseline,
            higher_is_better=False,
            correct=correct,
            detail=told,
            source="memo demo",
        )

    return [
        claim(
            "seconds a step under full recomputation's memory",
            "s",
            step_s["memo"],
            step_s["full recomputation"],
            "full recomputation",
            is_right and again.losses == plain.losses,
        ),
        claim(
            "seconds a step under that limit, against no limit",
            "s",
            step_s["memo"],
            step_s["plain"],
            "plain training without a limit",
            is_right,
        ),
        claim(
            "memory that a step adds",
            "MB",
            ours.growth_bytes / 1e6,
            plain.growth_bytes / 1e6,
            "plain training without a limit",
            is_right and ours.growth_bytes <= limit,
        ),
    ]


def _in_child(context: Any, job: Contender) -> Outcome:
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_train, args=(job, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        child.join()
        return Outcome(error=f"the process ended with status {child.exitcode}")
    except KeyboardInterrupt:
        child.kill()
        raise
    finally:
        child.join()


def _train(job: Contender, sender: Connection) -> None:
    """In a process of its own: trains, and sends what it took."""
    # The fork server ends with the process that runs the demo, and this one with the server.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        return
    try:
        sender.send(_outcome(job))
    except (MemoryError, RuntimeError, ValueError) as error:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        sender.send(Outcome(error=first))


def _outcome(job: Contender) -> Outcome:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import memo
    from memo.data import bible_bytes
    from memo.profiler.autotune import measure_profile
    from memo.runtime.device_memory import (
        data_bytes,
        give_back_at_once,
        peak_bytes,
        resident_bytes,
    )

    give_back_at_once()  # for all ways alike
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=job.num_layers,
        num_attention_heads=4, vocab_size=256, max_position_embeddings=job.num_tokens,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text = bible_bytes(job.num_steps, job.num_tokens)
    short = text[:1, :64]
    model(input_ids=short, labels=short, use_cache=False).loss.backward()  # makes all gradients
    optimizer.zero_grad(set_to_none=False)
    if job.way == "memo":  # code that planning loads is no activation
        measure_profile(model, {"input_ids": short, "labels": short}, f"file:{job.folder}")
    ram = torch.device("cpu")
    before = resident_bytes(ram)
    if job.limit_bytes is not None:
        mapped = data_bytes()
        assert mapped is not None
        allowed = mapped + job.limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    if job.way == "full recomputation":
        with warnings.catch_warnings():  # its name changes between versions of transformers
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    applied, plan = nullcontext(), None
    if job.way == "memo":
        assert job.limit_bytes is not None
        budget = memo.Budget(
            device=before + int(job.limit_bytes / _SLACK),
            store="4GiB",
            store_at=f"file:{job.folder}",
        )
        batch = {"input_ids": text[:1], "labels": text[:1], "use_cache": False}
        plan = memo.autotune(model, batch, budget, optimizer_bytes=0)
        applied = memo.apply(model, plan)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is not a step's
    losses, seconds = [], []
    with applied, _sampled(lambda: resident_bytes(ram) - before) as samples:
        for ids in text[:, None]:
            started = time.perf_counter()
            samples.clear()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            seconds.append(time.perf_counter() - started)
            losses.append(loss.item())
            del loss
            optimizer.zero_grad(set_to_none=False)
        shown = tuple(samples)
    peak = peak_bytes(ram)
    assert peak is not None
    return Outcome(
        losses=tuple(losses),
        step_s=tuple(seconds),
        growth_bytes=peak - before,
        samples=shown,
        plan="" if plan is None else plan.explain(),
        predicted_bytes=0 if plan is None else int(plan.prediction["peak_bytes"]) - before,
    )


@contextmanager
def _sampled(growth_bytes: Callable[[], int]) -> Iterator[list[tuple[float, float]]]:
    """Seconds and bytes, a hundred times a second, since the list was last cleared."""
    found: list[tuple[float, float]] = []
    stop = threading.Event()
    started = [time.perf_counter()]

    def look() -> None:
        while not stop.wait(0.01):
            now = time.perf_counter()
            if not found:
                started[0] = now
            found.append((now - started[0], float(growth_bytes())))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
