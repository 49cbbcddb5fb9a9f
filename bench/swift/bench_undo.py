"""Exact undo of AdamW on one core: its memory, and the time it adds to a step, beside a snapshot.

8 million float32 parameters, gradients drawn anew each step, our step with residual, torch's fused
step and a copy of parameters and both averages into warm memory in turns, on the calling thread,
whose own processor time is counted. After every step of ours it is undone, compared with the bits
from before, and made again.
"""

import time

import numpy as np
import pytest
import torch

import swift
from shared.claims import Claim

NUM_PARAMETERS = 8_000_000
WARM_UP, TURNS = 4, 11
COMMAND = "hatch run bench swift -k undo"
PEERS = [
    {
        "peer": "a snapshot",
        "setting": "copies of parameters, exp_avg and exp_avg_sq into memory of an earlier snapshot",
        "why": "no pages to map: the least that keeping the state of before can take",
    },
    {
        "peer": "torch's fused AdamW",
        "setting": "fused=True on the CPU, one flat parameter",
        "why": "torch's fastest step: for-loops and foreach take several passes",
    },
]


@pytest.fixture(autouse=True)
def _one_thread(request):
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))  # noqa: PT021
    torch.set_num_threads(1)


def timed(function):
    start = time.thread_time()
    function()
    return time.thread_time() - start


def make(**options):
    p = torch.nn.Parameter(torch.randn(NUM_PARAMETERS, generator=torch.Generator().manual_seed(0)))
    return p, torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1, **options)


def state_of(opt):
    """Live parameters, exp_avg and exp_avg_sq; before the first step only the first."""
    return [tensor for name, tensor in opt.state_of(0).items() if name != "step"]


def bench_undo_against_a_snapshot(benchmark, record_claim):
    generator = torch.Generator().manual_seed(1)
    exact, ours = make()
    plain, unkept = make()
    theirs, torchs = make(fused=True)
    opt, unkept = swift.undoable(ours, "exact"), swift.undoable(unkept, "commit")
    snapshot = [torch.zeros(NUM_PARAMETERS) for _ in range(3)]
    seconds = {name: [] for name in ("exact", "undo", "commit", "torch", "snapshot")}
    num_bytes, same = [], []

    def turn():
        grad = torch.randn(NUM_PARAMETERS, generator=generator) * 1e-2
        for p in (exact, plain, theirs):
            p.grad = grad
        before = [tensor.clone() for tensor in state_of(opt)]
        seconds["exact"].append(timed(opt.step))
        num_bytes.append(opt.undo_bytes)
        seconds["undo"].append(timed(opt.undo))
        same.append(
            all(
                torch.equal(now.view(torch.int32), then.view(torch.int32))
                for now, then in zip(state_of(opt), before, strict=True)
            )
        )
        opt.step()
        seconds["commit"].append(timed(unkept.step))
        seconds["torch"].append(timed(torchs.step))
        live = state_of(opt)
        seconds["snapshot"].append(
            timed(lambda: [one.copy_(now) for one, now in zip(snapshot, live, strict=True)])
        )

    for _ in range(WARM_UP):
        turn()
    for times in seconds.values():
        times.clear()
    benchmark.pedantic(turn, rounds=TURNS)

    times = {name: np.array(values) for name, values in seconds.items()}
    medians = {name: float(np.median(values)) for name, values in times.items()}
    off = (exact.detach() - theirs.detach()).abs().max()
    correct = all(same) and float(off) < 1e-5 and torch.equal(exact, plain)
    detail = "; ".join(f"{name} {value * 1e3:.1f} ms" for name, value in medians.items())
    most = max(num_bytes[1:]) / NUM_PARAMETERS

    added = times["exact"] - times["torch"]
    ratios = times["snapshot"] / added
    record_claim(
        Claim(
            name="time that exact undo adds to torch's fused AdamW step, 8 M parameters",
            ours=float(np.median(added)),
            baseline=medians["snapshot"],
            unit="s",
            higher_is_better=False,
            baseline_name="a warm copy of w, m and v",
            correct=correct,
            detail=detail,
            source=COMMAND,
        ),
        aim=1 / 0.6,
        spread=(float(ratios.min()), float(ratios.max())),
    )
    record_claim(
        Claim(
            name="time that the residual adds to our own fused AdamW step, 8 M parameters",
            ours=float(np.median(times["exact"] - times["commit"])),
            baseline=medians["snapshot"],
            unit="s",
            higher_is_better=False,
            baseline_name="a warm copy of w, m and v",
            correct=correct,
            detail=detail,
            source=COMMAND,
        ),
        aim=1 / 0.6,
    )
    record_claim(
        Claim(
            name="memory of exact undo of AdamW, float32, most of all steps",
            ours=most,
            baseline=12.0,
            unit="B",
            higher_is_better=False,
            baseline_name="a snapshot of w, m and v, a parameter",
            correct=correct,
            detail=f"{most:.3f} B a parameter at most, {num_bytes[-1] / NUM_PARAMETERS:.3f} at the end",
            source=COMMAND,
        ),
        aim=12 / 3.5,
    )
