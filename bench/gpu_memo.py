"""Rows of memo for bench/gpu.py: a Llama's steps in the memory of other ways of training, predictions, copies.

memo plans for the peak of the way it stands beside, with its store in pinned host memory. The model and the peers'
settings are in gpu_llama.py. Lengths and peers that cannot run are printed, with the reason.
"""

import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/memo/src"))

import torch

import memo
from gpu_clock import Figure, Row, measure, timed
from gpu_llama import FULL, PEERS, Llama, Unavailable, agree, check_length, train_step

__all__ = ["memo_rows", "memory_rows", "step_rows"]

HELD = 1.01
"""Of a limit: the allocator gives whole blocks, whose rest may be up to 1 MiB."""
STEP_S_AIM, PEAK_AIM, COPY_AIM, PEER_AIM = 0.95, 0.97, 0.85, 1.05
FULL_AIM, FULL_AIM_TOKENS = 1.22, (65_536, 131_072, 262_144)
TIMED_TOKENS = 262_144
"""Of all timed steps of a length, about."""


def step_rows(llama: Llama, num_tokens: int, peer: str, aim: float | None) -> list[Row | Figure]:
    """A step of memo in a way's peak beside that way, and what was predicted of it.

    Raises:
        Unavailable: the peer cannot run here.
    """
    model, batch = llama.shell(), llama.batch(num_tokens)
    theirs = partial(train_step, model, batch, PEERS[peer](model))
    want = llama.outcome(theirs)
    if peer == FULL:
        llama.full_peak = num_tokens, want.peak_bytes
    name, shape = f"step of memo in the peak of {peer}", f"{num_tokens} tokens, {llama.name}"
    # Where the device is RAM, a limit is one of the whole process, in which a tiny step is not seen.
    limit = want.peak_bytes if llama.is_cuda else want.peak_bytes + (64 << 20)
    with tempfile.TemporaryDirectory() as folder:
        store_at = "pinned" if llama.is_cuda else f"file:{folder}"
        budget = memo.Budget(
            device=limit, store="90GiB" if llama.is_cuda else "1GiB", store_at=store_at
        )
        turns = max(2, min(10, TIMED_TOKENS // num_tokens))
        # Both take turns where the device has room for what memo keeps between its steps beside the other's.
        is_tight = llama.is_cuda and 2 * limit > torch.cuda.mem_get_info()[1]
        before_s = timed({"theirs": theirs}, turns, 1)["theirs"] if is_tight else []
        mine = llama.shell()
        try:
            plan = memo.autotune(mine, batch, budget, optimizer_bytes=0)
        except memo.DoesNotFit as error:
            print(f"{name}, {shape}: NO PLAN, {error}", flush=True)
            return [_figure(name, shape, "GB", None, limit / 1e9, (peer, aim), False, str(error))]
        with memo.apply(mine, plan) as run:
            ours = partial(train_step, mine, batch, nullcontext())
            got = llama.outcome(ours)
            moved = (run.times.sent_bytes + run.times.fetched_bytes) // 2  # of one of two steps
            correct = agree(got, want, HELD * limit)
            row = measure(
                name, shape, ours,
                bytes_moved=moved, copy=_plain_copy(llama, 64 << 20 if llama.is_cuda else 1 << 20),
                copy_name="a copy into pinned memory", correct=correct,
                baseline=None if is_tight else (peer, theirs), turns=turns, warm_turns=1, package="memo",
                aim=aim,
                note=f"limit {limit / 1e9:.3g} GB, reached {got.peak_bytes / 1e9:.3g}, {run.store_bytes / 1e9:.3g} stored",
            )  # fmt: skip
    if is_tight:
        row = replace(
            row, baseline=peer, baseline_s=median(before_s), note=f"{row.note}; not in turns"
        )
    told = plan.prediction
    peaks = told["peak_bytes"] / 1e9, got.peak_bytes / 1e9
    return [
        row,
        _figure(f"peak of the {name}", shape, "GB", *peaks, ("measured", PEAK_AIM), correct),
        _figure(f"seconds of the {name}", shape, "s", told["step_s"], row.median_s, ("measured", STEP_S_AIM), correct),
    ]  # fmt: skip


def _figure(
    name: str, shape: str, unit: str, ours: float | None, theirs: float,
    against: tuple[str, float | None], correct: bool, note: str = "",
) -> Figure:  # fmt: skip
    """A figure whose ratio is the smaller of both to the larger: 0.97 is within 3 % of it."""
    ratio = None if ours is None else min(ours, theirs) / max(ours, theirs, 1e-12)
    print(f"{name}, {shape}: {ours} {unit}, {theirs} {against[0]}", flush=True)
    return Figure(
        name=name, shape=shape, unit=unit, ours=ours, baseline=theirs, baseline_name=against[0], ratio=ratio,
        correct=correct, note=note, package="memo", aim=against[1],
    )  # fmt: skip


def _plain_copy(llama: Llama, num_bytes: int) -> tuple[Callable[[], object], int]:
    near = torch.empty(num_bytes, dtype=torch.uint8, device=llama.device)
    far = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=llama.is_cuda)
    return (lambda: far.copy_(near, non_blocking=True)), num_bytes


class _Record:
    """What a copy's items belong to."""

    is_taken = True

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def run(self) -> Any:
        raise AssertionError("nothing runs here")


@contextmanager
def _side_stream(llama: Llama) -> Iterator[None]:
    """A stream of its own, which begins behind the current one, and for which that one waits in the end."""
    if not llama.is_cuda:
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield


def copy_rows(llama: Llama, num_bytes: int, turns: int) -> list[Row | Figure]:
    """A copy out by memo's mover into its store, alone and beside products, against a plain one into pinned memory."""
    from memo.runtime.moving import Buffers, open_mover
    from memo.runtime.recording.items import Item
    from memo.runtime.stores import open_store

    store = open_store("pinned" if llama.is_cuda else "memory", device=llama.device)
    mover = open_mover(llama.device, store, Buffers(1, llama.device))
    near = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=llama.device)
    plain = _plain_copy(llama, num_bytes)
    far = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=llama.is_cuda)
    width = 8192 if llama.is_cuda else 64
    square = torch.randn(width, width, device=llama.device, dtype=llama.model.dtype)

    def send(num_products: int) -> tuple[Any, Any]:
        item = Item.of("copied", [near])
        record = _Record([item])
        cargo = mover.load(record, [item])
        mover.send(cargo)
        for _ in range(num_products):
            torch.mm(square, square)
        mover.await_sent(cargo)
        return record, cargo

    def beside(num_products: int) -> None:
        with _side_stream(llama):
            far.copy_(near, non_blocking=True)
            done = torch.cuda.current_stream().record_event() if llama.is_cuda else None
        for _ in range(num_products):
            torch.mm(square, square)
        if done is not None:
            torch.cuda.current_stream().wait_event(done)

    record, cargo = send(0)
    mover.await_fetched(cargo)
    correct = torch.equal(record.items[0].tensors[0], near)
    del record, cargo
    rows: list[Row | Figure] = [
        measure(
            f"copy out into memo's store, {way}", f"{num_bytes} bytes", partial(send, num_products),
            bytes_moved=num_bytes, copy=plain, copy_name="a copy into pinned memory", correct=correct,
            baseline=("a plain copy into pinned memory", partial(beside, num_products)), turns=turns,
            package="memo", aim=COPY_AIM,
        )
        for way, num_products in (("alone", 0), ("beside products", 8))
    ]  # fmt: skip
    mover.close()
    store.close()
    return rows


def reserved_figure(llama: Llama, num_tokens: int) -> Figure:
    """What the emulated caching allocator reserves for a step's trace, beside what the device's does."""
    batch = llama.batch(num_tokens)
    found = memo.emulate(memo.Trace.from_fake(llama.model, batch), allocator="caching")
    reserved = found.needed_bytes  # stands for it where nothing reserves
    if llama.is_cuda:
        for one in llama.model.parameters():
            one.grad = None
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        train_step(llama.model, batch, nullcontext())
        reserved = torch.cuda.max_memory_reserved() - before
    return _figure(
        "memory that the emulated allocator reserves for a plain step", f"{num_tokens} tokens, {llama.name}",
        "GB", found.reserved_bytes / 1e9, reserved / 1e9, ("reserved", None), 0 < found.needed_bytes <= found.reserved_bytes,
    )  # fmt: skip


def memory_rows(device: str, num_bytes: int, num_tokens: int) -> list[Row | Figure]:
    """Copies out, and what an allocator reserves for a plain step."""
    llama = Llama(device)
    return [*copy_rows(llama, num_bytes, 10), reserved_figure(llama, num_tokens)]


def memo_rows(
    device: str, lengths: tuple[int, ...], peer_lengths: tuple[int, ...]
) -> list[Row | Figure]:
    """Steps of these lengths beside full checkpointing, and of some beside all peers."""
    llama, rows = Llama(device), []
    for num_tokens in lengths:
        for peer in PEERS if num_tokens in peer_lengths else (FULL,):
            full_aim = FULL_AIM if num_tokens in FULL_AIM_TOKENS else None
            try:
                check_length(llama, num_tokens, peer)
                rows += step_rows(llama, num_tokens, peer, full_aim if peer == FULL else PEER_AIM)
            except (Unavailable, torch.OutOfMemoryError) as error:
                print(f"skipped: {peer} at {num_tokens} tokens: {error}", flush=True)
            gc.collect()
            if llama.is_cuda:
                torch.cuda.empty_cache()
    return rows
