"""Bytes of a training step: what is predicted from one float32 step beside what plans keep and what a process takes.

Saved bytes are counted by `saved_tensors_hooks`, storages once. A process's peak is how far VmHWM grows beyond what
is resident before the model is built, over steps with AdamW whose gradients stay where they are, as in DDP's
buckets; predicted are masters, gradients, both moments and what is saved.
"""

import gc
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import qsync
from qsync.planner.memory import count_saved_bytes
from qsync.profiler.saved_tensors import measure_saved_bytes, record_saved_tensors
from shared.claims import Claim
from shared.comms import RankPool
from shared.units import format_bytes

# What lies beside a benchmark is no module of a package.
sys.path.insert(0, str(Path(__file__).parent))

from real_models import MODELS, Job, build_job, draw_precisions

PEERS = [
    {
        "peer": "torch's float32 layer",
        "setting": "functional.linear on the same tensors; its weight counts as kept, as ours does",
        "why": "what a plan replaces",
    }
]
UNIFORM = ("fp32", "bf16", "fp16", "int8", "fp8")
NUM_PLANS, NUM_STEPS = 10, 3
TOKENS, PEAK_TOKENS = 512, 2048
PARAMETER_COPIES = 4
"""Masters, gradients and AdamW's two moments."""
COMMAND = "hatch run bench qsync/memory"


@pytest.mark.parametrize("name", MODELS)
def bench_saved(benchmark, record_claim, name):
    """Uniform and mixed plans: bytes that a forward pass keeps."""
    torch.set_num_threads(1)
    job = build_job(name, num_batches=1, tokens=TOKENS)
    batch = job.batches[0]
    operators = list(qsync.Plan.uniform(job.model, "fp32").operators)
    generator = torch.Generator().manual_seed(0)
    plans = [dict.fromkeys(operators, precision) for precision in UNIFORM]
    plans += [draw_precisions(operators, UNIFORM, generator) for _ in range(NUM_PLANS)]

    def run():
        saved = record_saved_tensors(job.model, batch, job.loss_fn)
        found = []
        for chosen in plans:
            qsync.apply(job.model, qsync.Plan.uniform(job.model, "fp32", chosen))
            measured = measure_saved_bytes(job.model, batch, job.loss_fn)
            predicted = count_saved_bytes(saved, lambda op, chosen=chosen: chosen.get(op, "fp32"))
            found.append((predicted, measured))
        return found

    found = benchmark.pedantic(run, rounds=1)
    errors = [abs(predicted / measured - 1) for predicted, measured in found]
    kept = [measured for _, measured in found]
    shares = ", ".join(
        f"{precision} {measured / found[0][1]:.2f}"
        for precision, (_, measured) in zip(UNIFORM, found, strict=False)
    )
    record_claim(
        Claim(
            name=f"largest error of predicted saved bytes, {name}",
            unit="%",
            ours=100 * max(errors),
            baseline=2.0,
            baseline_name="the aim",
            higher_is_better=False,
            # Plans differ by more than the aim, so that one guess for all of them would not pass.
            correct=max(kept) > 1.05 * min(kept),
            ratio=2.0 / max(100 * max(errors), 0.01),
            detail=f"{len(plans)} plans; float32 keeps {format_bytes(found[0][1])}, of it: {shares}",
            source=f'{COMMAND} -k "saved and {name}"',
        ),
        aim=1.0,
    )


def bench_layers(benchmark, record_claim):
    """What int8 keeps of a linear layer's factors, over MiniLM's shapes at 2,048 tokens."""
    shapes = [(384, 384)] * 4 + [(384, 1536), (1536, 384)]

    def count(precision):
        kept = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage
            return tensor

        total = 0
        for inner, outer in shapes:
            kept.clear()
            x = torch.randn(PEAK_TOKENS, inner, requires_grad=True)
            weight = torch.randn(outer, inner, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                if precision is None:
                    out = functional.linear(x, weight)
                else:
                    out = qsync.linear(x, weight, precision=precision)
            total += sum(storage.nbytes() for storage in kept.values())
            out.sum().backward()
            assert weight.grad is not None
            assert weight.grad.dtype == torch.float32
        return total

    low, full = benchmark.pedantic(lambda: (count("int8"), count(None)), rounds=1)
    record_claim(
        Claim(
            name="bytes that a linear layer keeps in int8",
            unit="bytes",
            ours=low,
            baseline=full,
            baseline_name="float32",
            higher_is_better=False,
            correct=0 < low < full,
            detail=f"{low / full:.3f} of float32's, factors and scales of the {len(shapes)} linears of a layer of MiniLM",
            source=f"{COMMAND} -k layers",
        ),
        aim=1 / 0.27,
    )


def read_status(key):
    """A size of this process as the kernel gives it, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def train(job, precision):
    """Some steps in a precision, with AdamW and gradients that stay."""
    qsync.apply(job.model, qsync.Plan.uniform(job.model, precision))
    optimizer = torch.optim.AdamW(job.model.parameters(), fused=True)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=False)
        job.loss_fn(job.model, job.batches[0]).backward()
        optimizer.step()


def train_alone(precision):
    """Bytes by which this process grows over some steps in a precision."""
    torch.set_num_threads(1)
    # Libraries take their own memory at first use.
    train(build_job("MiniLM", num_batches=1, tokens=128), precision)
    gc.collect()
    batches = build_job("MiniLM", num_batches=1, tokens=PEAK_TOKENS).batches
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = read_status("VmRSS")
    job = build_job("MiniLM", num_batches=0)
    train(Job(model=job.model, batches=batches, loss_fn=job.loss_fn), precision)
    return read_status("VmHWM") - before


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def bench_peak(benchmark, record_claim, precision):
    """A fresh process for each precision."""
    job = build_job("MiniLM", num_batches=1, tokens=PEAK_TOKENS)
    saved = record_saved_tensors(job.model, job.batches[0], job.loss_fn)
    operators = dict.fromkeys(qsync.Plan.uniform(job.model, "fp32").operators, precision)
    parameters = sum(each.nbytes for each in job.model.parameters())
    kept = count_saved_bytes(saved, lambda op: operators.get(op, "fp32"))
    predicted = PARAMETER_COPIES * parameters + kept

    def run():
        # Pages that malloc keeps would count as use; large blocks go straight back.
        with RankPool(
            1, timeout=timedelta(minutes=5), env={"MALLOC_MMAP_THRESHOLD_": "65536"}
        ) as pool:
            return pool.run(train_alone, precision).results[0]

    measured = benchmark.pedantic(run, rounds=1)
    error = abs(predicted / measured - 1)
    record_claim(
        Claim(
            name=f"error of a predicted process peak, MiniLM, {precision}",
            unit="%",
            ours=100 * error,
            baseline=8.0,
            baseline_name="the aim",
            higher_is_better=False,
            correct=measured > PARAMETER_COPIES * parameters,
            ratio=8.0 / max(100 * error, 0.01),
            detail=f"predicted {format_bytes(predicted)}, of it {format_bytes(kept)} saved tensors; measured "
            f"{format_bytes(measured)} over {NUM_STEPS} steps of {PEAK_TOKENS} tokens with AdamW",
            source=f'{COMMAND} -k "peak and {precision}"',
        ),
        aim=1.0,
    )
