"""What diagnosis predicts of a change, beside making it: DDP over two hosts at 100 Mbit/s.

3.2 million parameters in DDP's default buckets, 1,024 rows a rank, one thread. One trace predicts all;
then the job as traced and the changed ones take turns in the same ranks, untraced. A trace makes
steps longer, so that predicted gains are compared with measured gains.
"""

import sys
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

REVISION = 2
PEERS = [
    {
        "peer": "DDP",
        "setting": "torch 2.13, buckets of 25 MB (its default), gloo",
        "why": "what the advice is given for",
    },
]
RATE, FASTER = "100mbit", "200mbit"
DEFAULT = PlantedDelay(num_layers=12, rows=1024, bucket_mb=25)
TURNS, STEPS_A_TURN = 4, 2
COMMAND = "hatch run bench qsync/advice"


def make(change):
    """The job with a change made, as its advice says."""
    return replace(
        DEFAULT,
        bucket_mb=DEFAULT.bucket_mb if change.bucket_bytes is None else change.bucket_bytes / MiB,
        has_bf16_gradients=change.gradient_share == 0.5,
        accumulation=change.accumulation,
    )


def time_turns(pool, jobs):
    """What each job's slowest rank did, by turns, by the job's name."""
    runs = {name: [] for name in jobs}
    for turn in range(TURNS):
        names = list(jobs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            runs[name].append(max(pool.run(train, jobs[name], STEPS_A_TURN).results))
    return runs


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


def trace_default(pool, folder):
    """The default job's diagnosis."""
    pool.run(train, DEFAULT, 6, str(folder))
    return diagnose([folder / f"rank{rank}.json.gz" for rank in range(2)])


def record(record_claim, name, predicted, change, runs, changed_runs, source):
    """A predicted gain beside the measured ones, by the larger over the smaller."""
    ratios = [run.step_s / new.step_s for run, new in zip(runs, changed_runs, strict=True)]
    measured = median(ratios)
    errors = [max(predicted / ratio, ratio / predicted) for ratio in ratios]
    record_claim(
        Claim(
            name=f"predicted gain of {name}, DDP at 100 Mbit/s",
            unit="gain",
            ours=max(predicted / measured, measured / predicted),
            baseline=1.1,
            baseline_name="the measured gain",
            higher_is_better=False,
            correct=is_done(change, runs, changed_runs) and (predicted > 1) == (measured > 1),
            detail=f"predicted {predicted:.2f}, measured {measured:.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) in {len(ratios)} turns; "
            f"{median(run.step_s for run in runs):.2f} s a step before, "
            f"{median(run.step_s for run in changed_runs):.2f} after",
            source=f"{COMMAND} -k {source}",
        ),
        aim=1.0,
        spread=(1.1 / max(errors), 1.1 / min(errors)),
    )


def bench_what_if(benchmark, record_claim, tmp_path):
    changes = {
        "buckets of 2 MiB": JobChange(bucket_bytes=2 * MiB),
        "bf16 gradients": JobChange(gradient_share=0.5),
        "two batches accumulated": JobChange(accumulation=2),
        "links of 200 Mbit/s": JobChange(link_speed=2.0),
    }
    jobs = {name: make(change) for name, change in changes.items() if change.link_speed == 1}

    def measure():
        with NetLab(hosts=2, rate=RATE) as lab, lab.pool(timeout=timedelta(minutes=10)) as pool:
            diagnosis = trace_default(pool, tmp_path)
            runs = time_turns(pool, {"default": DEFAULT, **jobs})
        with NetLab(hosts=2, rate=FASTER) as lab, lab.pool(timeout=timedelta(minutes=10)) as pool:
            faster = time_turns(pool, {"links of 200 Mbit/s": DEFAULT})
        return diagnosis, runs | faster

    diagnosis, runs = benchmark.pedantic(measure, rounds=1)
    for name, change in changes.items():
        predicted = diagnosis.replayed_step_s / diagnosis.job.predict(change).step_s
        record(record_claim, name, predicted, change, runs["default"], runs[name], "what_if")


def bench_first_advice(benchmark, record_claim, tmp_path):
    def measure():
        with NetLab(hosts=2, rate=RATE) as lab, lab.pool(timeout=timedelta(minutes=10)) as pool:
            # Those that this job can do: precisions of products need another model.
            advice, *_ = advise(
                trace_default(pool, tmp_path),
                strategies=["buckets", "bf16 gradients", "accumulation"],
            )
            return advice, time_turns(pool, {"default": DEFAULT, "advised": make(advice.change)})

    advice, runs = benchmark.pedantic(measure, rounds=1)
    default, advised = runs["default"], runs["advised"]
    record(record_claim, "the first advice", advice.gain, advice.change, default, advised, "advice")
    ratios = [run.step_s / new.step_s for run, new in zip(default, advised, strict=True)]
    record_claim(
        Claim(
            name="step after the first advice, DDP at 100 Mbit/s",
            unit="s a batch",
            ours=median(run.step_s for run in advised),
            baseline=median(run.step_s for run in default),
            baseline_name="DDP with its default buckets",
            higher_is_better=False,
            correct=advice.change.accumulation == 1 and is_done(advice.change, default, advised),
            detail=advice.text,
            source=f"{COMMAND} -k first_advice",
        ),
        aim=1.3,
        spread=(min(ratios), max(ratios)),
    )
