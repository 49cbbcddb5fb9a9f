"""What diagnosis predicts of a change, beside making it: DDP over two hosts at 100 Mbit/s.

3.2 million parameters in DDP's default buckets, 1,024 rows a rank, one thread. In each turn the job is
traced, then it and the changed ones run untraced: a busy core changes how much of a step the links
take, so that the gain that a turn's trace predicts is compared with that turn's gain.
"""

import sys
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest

from qsync import diagnose
from qsync.diagnosis.advise import advise
from qsync.diagnosis.what_if import JobChange
from shared.claims import Claim
from shared.comms import NetLab, netlab
from shared.units import MiB

sys.path.insert(0, str(Path(__file__).parent))

from traced_job import PlantedDelay, train

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available())),
]

REVISION = 4
PEERS = [
    {
        "peer": "DDP",
        "setting": "torch 2.13, its default buckets, gloo",
        "why": "what the advice is given for",
    },
]
RATE, FASTER = "100mbit", "200mbit"
DEFAULT = PlantedDelay(num_layers=12, rows=1024, bucket_mb=None)
TURNS, STEPS_A_TURN, TRACED_STEPS = 4, 2, 4
COMMAND = "hatch run bench qsync/advice"


def make(change):
    """The job with a change made, as its advice says."""
    return replace(
        DEFAULT,
        bucket_mb=DEFAULT.bucket_mb if change.bucket_bytes is None else change.bucket_bytes / MiB,
        has_bf16_gradients=change.gradient_share == 0.5,
        accumulation=change.accumulation,
    )


def measure_turns(pool, jobs, folder):
    """Traces the default job and times all jobs, by turns.

    Args:
        pool: of the default job.
        jobs: pool and job by name.
        folder: of the traces.

    Returns:
        The diagnosis of each turn; by job and turn, what the slowest rank did.
    """
    diagnoses, runs = [], {name: [] for name in jobs}
    for turn in range(TURNS):
        traces = folder / str(turn)
        pool.run(train, DEFAULT, TRACED_STEPS, str(traces))
        diagnoses.append(diagnose([traces / f"rank{rank}.json.gz" for rank in range(2)]))
        names = list(jobs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            of_job, job = jobs[name]
            runs[name].append(max(of_job.run(train, job, STEPS_A_TURN).results))
    return diagnoses, runs


def is_done(change, runs, changed_runs):
    """Whether changed jobs sent what the change says, and learned as much as the default one."""
    share = change.gradient_share / change.accumulation
    return all(
        abs(sum(changed.sent_bytes) / sum(run.sent_bytes) - share) < 0.01
        and (len(changed.sent_bytes) > len(run.sent_bytes)) == (change.bucket_bytes is not None)
        and run.learned > 0
        and abs(changed.learned / run.learned - 1) < 0.1
        for run, changed in zip(runs, changed_runs, strict=True)
    )


def record(record_claim, name, diagnoses, change, runs, changed_runs, source):
    """The gain that each turn's trace predicts beside that turn's gain, the larger over the smaller."""
    predicted = [each.replayed_step_s / each.job.predict(change).step_s for each in diagnoses]
    measured = [run.step_s / new.step_s for run, new in zip(runs, changed_runs, strict=True)]
    errors = [max(a / b, b / a) for a, b in zip(predicted, measured, strict=True)]
    is_side_right = (median(predicted) > 1) == (median(measured) > 1)
    record_claim(
        Claim(
            name=f"predicted gain of {name}, DDP at 100 Mbit/s",
            unit="gain",
            ours=median(errors),
            baseline=1.1,
            baseline_name="the measured gain",
            higher_is_better=False,
            correct=is_done(change, runs, changed_runs) and is_side_right,
            detail=f"predicted {median(predicted):.2f} ({min(predicted):.2f} to "
            f"{max(predicted):.2f}), measured {median(measured):.2f} ({min(measured):.2f} to "
            f"{max(measured):.2f}) in {len(runs)} turns; {median(r.step_s for r in runs):.2f} s a "
            f"step before, {median(r.step_s for r in changed_runs):.2f} after, "
            f"{median(each.step_s for each in diagnoses):.2f} traced",
            source=f"{COMMAND} -k {source}",
        ),
        aim=1.0,
        spread=(1.1 / max(errors), 1.1 / min(errors)),
    )


@contextmanager
def start_ranks(rate):
    """Starts two ranks."""
    with NetLab(hosts=2, rate=rate) as lab, lab.pool(timeout=timedelta(minutes=10)) as pool:
        yield pool


def bench_what_if(benchmark, record_claim, tmp_path):
    changes = {
        "buckets of 2 MiB": JobChange(bucket_bytes=2 * MiB),
        "bf16 gradients": JobChange(gradient_share=0.5),
        "two batches accumulated": JobChange(accumulation=2),
        "links of 200 Mbit/s": JobChange(link_speed=2.0),
    }

    def measure():
        with start_ranks(RATE) as pool, start_ranks(FASTER) as faster:
            jobs = {
                name: (pool if change.link_speed == 1 else faster, make(change))
                for name, change in changes.items()
            }
            return measure_turns(pool, {"default": (pool, DEFAULT), **jobs}, tmp_path)

    diagnoses, runs = benchmark.pedantic(measure, rounds=1)
    for name, change in changes.items():
        record(record_claim, name, diagnoses, change, runs["default"], runs[name], "what_if")


def bench_first_advice(benchmark, record_claim, tmp_path):
    def measure():
        with start_ranks(RATE) as pool:
            pool.run(train, DEFAULT, TRACED_STEPS, str(tmp_path))
            # Those that this job can do: precisions of products need another model.
            advice, *_ = advise(
                diagnose([tmp_path / f"rank{rank}.json.gz" for rank in range(2)]),
                strategies=["buckets", "bf16 gradients", "accumulation"],
            )
            jobs = {"default": (pool, DEFAULT), "advised": (pool, make(advice.change))}
            return advice, *measure_turns(pool, jobs, tmp_path)

    advice, diagnoses, runs = benchmark.pedantic(measure, rounds=1)
    default, advised, change = runs["default"], runs["advised"], advice.change
    record(record_claim, "the first advice", diagnoses, change, default, advised, "first_advice")
    ratios = [run.step_s / new.step_s for run, new in zip(default, advised, strict=True)]
    record_claim(
        Claim(
            name="step after the first advice, DDP at 100 Mbit/s",
            unit="s a batch",
            ours=median(run.step_s for run in advised),
            baseline=median(run.step_s for run in default),
            baseline_name="DDP with its default buckets",
            higher_is_better=False,
            correct=change.accumulation == 1 and is_done(change, default, advised),
            detail=advice.text,
            source=f"{COMMAND} -k first_advice",
        ),
        aim=1.3,
        spread=(min(ratios), max(ratios)),
    )
