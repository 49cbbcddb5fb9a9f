"""The demo: one Llama on the Bible's text under a limit of memory at which plain training fails.

Each way of training runs in a process of its own, whose data the kernel limits (RLIMIT_DATA), and has
the same seed and text: plain without a limit, for its losses and seconds; full recomputation, whose peak is the
limit of all that follow; plain again, which must fail; memo, with a file as its store. After a first step of each,
the processes take turns step by step, so that other programs slow them alike, with as many threads as cores are
free.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from memo.report import draw_memory
from shared.claims import Claim, finish, pair_turns
from shared.errors import DataError
from shared.training.cores import count_free_cores
from shared.training.progress import show_progress
from shared.units import MiB, format_bytes

__all__ = ["Outcome", "judge", "run", "take_turns"]

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
        num_threads: that torch uses.
    """

    way: str
    num_layers: int
    num_tokens: int
    num_steps: int
    limit_bytes: int | None
    folder: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a way of training took.

    Attributes:
        losses: of each step; empty where it failed.
        step_s: seconds of each step's forward and backward.
        growth_bytes: most resident bytes beyond those before the first step.
        samples: seconds since the last step began, and bytes beyond those before the first one.
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
    size = (16, 3072, 4) if is_full else (6, 1152, 3)
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
    num_threads = count_free_cores()
    limit = None
    with (
        tempfile.TemporaryDirectory(dir=out) as folder,
        show_progress("memo: training", len(_WAYS) + size[2] - 1) as progress,
        ExitStack() as stack,
    ):
        trainings: dict[str, _Training] = {}
        for way in _WAYS:
            progress.update(f"memo: first step, {way}")
            job = Contender(way, *size, limit, folder, num_threads)
            trainings[way] = stack.enter_context(_Training(context, job))
            outcome = trainings[way].step()
            if limit is None and outcome.error:  # nothing to compare with
                raise DataError(f"{way}: expected training without a limit, got: {outcome.error}")
            if way == "full recomputation":
                limit = int(outcome.growth_bytes * _SLACK) + 8 * MiB
            progress.advance()
        progress.update("memo: training in turns")
        found = take_turns(trainings, size[2] - 1, progress.advance)
    for way, outcome in found.items():
        if outcome.error and way != "plain under the limit":
            _log.warning("%s: expected training, got: %s", way, outcome.error)
    assert limit is not None
    (out / "plan.txt").write_text(found["memo"].plan + "\n", encoding="utf-8")
    shown = {way: found[way].samples for way in _WAYS if found[way].samples}
    draw_memory(shown, out / "memory.svg", limit_bytes=limit)
    claims = judge(found, limit, size)
    return finish(out, "memo", claims, {"ways": list(_WAYS), "limit_bytes": limit})


@runtime_checkable
class Steps(Protocol):
    """A training that takes a step when it is asked to."""

    def step(self) -> Outcome:
        """Takes a step; returns what all steps took so far."""


def take_turns(
    trainings: Mapping[str, Steps], num_turns: int, on_turn: Callable[[], Any] = lambda: None
) -> dict[str, Outcome]:
    """Has trainings take steps in turns.

    Args:
        trainings: by name, each with a step behind it already.
        num_turns: steps of each, at least one.
        on_turn: called after each turn.
    """
    found: dict[str, Outcome] = {}
    for turn in range(num_turns):
        # Every other turn goes backwards, so that no way always follows the same one.
        for way in list(trainings)[:: -1 if turn % 2 else 1]:
            found[way] = trainings[way].step()
        on_turn()
    return {way: found[way] for way in trainings}


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
    common: dict[str, Any] = {"detail": told, "source": "memo demo"}
    return [
        Claim(
            name="seconds a step under full recomputation's memory",
            unit="s",
            **_compare_turns(ours, again),
            baseline_name="full recomputation",
            correct=is_right and again.losses == plain.losses,
            **common,
        ),
        Claim(
            name="seconds a step under that limit, against no limit",
            unit="s",
            **_compare_turns(ours, plain),
            baseline_name="plain training without a limit",
            correct=is_right,
            **common,
        ),
        Claim(
            name="memory that a step adds",
            unit="MB",
            ours=ours.growth_bytes / 1e6,
            baseline=plain.growth_bytes / 1e6,
            baseline_name="plain training without a limit",
            higher_is_better=False,
            correct=is_right and ours.growth_bytes <= limit,
            **common,
        ),
    ]


def _compare_turns(ours: Outcome, other: Outcome) -> dict[str, Any]:
    """Figures of steps after the first one, which each way took before there were turns."""
    num_turns = min(len(ours.step_s), len(other.step_s))
    if num_turns < 2:  # one of them failed
        nothing = float("nan")
        return {"ours": nothing, "baseline": nothing, "higher_is_better": False}
    return pair_turns(ours.step_s[1:num_turns], other.step_s[1:num_turns])


class _Training:
    """A process that trains, a step whenever it is asked to."""

    def __init__(self, context: Any, job: Contender) -> None:
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=_train, args=(job, theirs))
        self._process.start()
        theirs.close()
        self._outcome = Outcome()

    def __enter__(self) -> _Training:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self._link.close()  # the process ends as nobody asks for a step any more
        self._process.join()

    def step(self) -> Outcome:
        """Takes a step, unless one has failed; returns what all steps took so far."""
        if self._outcome.error:
            return self._outcome
        try:
            self._link.send(None)
            self._outcome = self._link.recv()
        except (EOFError, OSError):
            self._process.join()
            error = f"the process ended with status {self._process.exitcode}"
            self._outcome = Outcome(error=error)
        return self._outcome


def _train(job: Contender, link: Connection) -> None:
    """In a process of its own: takes a step for each message, and sends what all took so far."""
    # The fork server ends with the process that runs the demo, and this one with the server.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        return
    try:
        outcomes = _outcomes(job)
        while True:
            link.recv()
            link.send(next(outcomes))
    except EOFError:  # nobody asks any more
        return
    except (MemoryError, RuntimeError, ValueError) as error:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        link.send(Outcome(error=first))


def _outcomes(job: Contender) -> Iterator[Outcome]:
    """Trains a step at a time; yields what all steps took so far."""
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
    torch.set_num_threads(job.num_threads)
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
    outcome = Outcome(
        plan="" if plan is None else plan.explain(),
        predicted_bytes=0 if plan is None else int(plan.prediction["peak_bytes"]) - before,
    )
    with applied:
        for ids in text[:, None]:
            with _sampled(lambda: resident_bytes(ram) - before) as samples:
                started = time.perf_counter()
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                seconds = time.perf_counter() - started
                loss_value = loss.item()
                del loss
                optimizer.zero_grad(set_to_none=False)
            peak = peak_bytes(ram)
            assert peak is not None
            outcome = replace(
                outcome,
                losses=(*outcome.losses, loss_value),
                step_s=(*outcome.step_s, seconds),
                growth_bytes=peak - before,
                samples=tuple(samples),
            )
            yield outcome


@contextmanager
def _sampled(growth_bytes: Callable[[], int]) -> Iterator[list[tuple[float, float]]]:
    """Seconds since the block began and bytes, a hundred times a second."""
    found: list[tuple[float, float]] = []
    stop = threading.Event()
    started = time.perf_counter()

    def look() -> None:
        while not stop.wait(0.01):
            found.append((time.perf_counter() - started, float(growth_bytes())))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
