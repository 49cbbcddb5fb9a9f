"""On a GPU: how long a save of 10 GB blocks, what it costs the next step, how fast it copies."""

import time
from statistics import median

import pytest
import torch

import bytecheckpoint as bcp
from shared.claims import Claim

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GB = 10**9
NUM_TENSORS = 100
STEP_MATRIX = 8_192


class _Steps(torch.optim.Optimizer):
    """An optimizer whose step multiplies matrices for a while, then changes every value."""

    def __init__(self, values):
        super().__init__(values, {})
        self.matrix = torch.randn(STEP_MATRIX, STEP_MATRIX, device="cuda", dtype=torch.bfloat16)

    @torch.no_grad()
    def step(self, closure=None):  # pyrefly: ignore
        torch._foreach_add_(self.param_groups[0]["params"], 1.0)


def bench_save_from_gpu(benchmark, record_claim, tmp_path):
    values = [
        torch.nn.Parameter(torch.randn(10 * GB // NUM_TENSORS // 4, device="cuda"))
        for _ in range(NUM_TENSORS)
    ]
    optimizer = _Steps(values)
    state = {"values": dict(enumerate(values)), "optimizer": optimizer}
    pinned = torch.empty(GB, dtype=torch.uint8, pin_memory=True)
    source = torch.empty(GB, dtype=torch.uint8, device="cuda")

    def step():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(40):
            optimizer.matrix @ optimizer.matrix
        optimizer.step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def copy():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        pinned.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return GB / (time.perf_counter() - begin)

    found = {key: [] for key in ("blocked", "step", "next step", "D2H", "pinned copy", "total")}
    correct = True
    with bcp.Checkpointer(tmp_path, keep=1) as checkpointer:

        def rounds():
            nonlocal correct
            for number in range(8):
                expected = values[-1].detach().cpu()
                plain, rate = step(), copy()
                values[-1].data.copy_(expected)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                handle = checkpointer.save(number, state)
                blocked = time.perf_counter() - begin
                following = step()
                handle.staged.wait()
                staged = time.perf_counter() - begin
                handle.committed.result()
                total = time.perf_counter() - begin
                with bcp.open(tmp_path / f"step_{number:08d}") as checkpoint:
                    stored = checkpoint.read(f"values.{NUM_TENSORS - 1}")
                correct = correct and torch.equal(stored, expected)
                if number:  # the first round allocates
                    row = (blocked, plain, following, 10 * GB / staged, rate, total)
                    for key, figure in zip(found, row, strict=True):
                        found[key].append(figure)

        benchmark.pedantic(rounds, rounds=1)
    middle = {key: median(figures) for key, figures in found.items()}
    common = {
        "correct": correct,
        "detail": f"10 GB in {NUM_TENSORS} tensors, {torch.cuda.get_device_name()}, median of 7; "
        f"the stored bits equal those at the save",
        "source": "hatch run bench bytecheckpoint -k save_from_gpu",
    }
    record_claim(
        Claim(
            name="blocked by a save of 10 GB",
            unit="ms",
            ours=1e3 * middle["blocked"],
            baseline=10.0,
            baseline_name="10 ms",
            higher_is_better=False,
            **common,
        ),
        aim=1.0,
    )
    record_claim(
        Claim(
            name="the step after a save",
            unit="s",
            ours=middle["next step"],
            baseline=middle["step"],
            baseline_name="a step without one",
            higher_is_better=False,
            **common,
        ),
        aim=1 / 1.03,
    )
    record_claim(
        Claim(
            name="device to host, until the last copy has ended",
            unit="GB/s",
            ours=middle["D2H"] / 1e9,
            baseline=middle["pinned copy"] / 1e9,
            baseline_name="one copy into pinned memory",
            higher_is_better=True,
            **common,
        ),
        aim=0.85,
    )
