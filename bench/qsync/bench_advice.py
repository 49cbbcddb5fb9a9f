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

REVISION = 1
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
    """Seconds of a step of each job by turns, by its name."""
    seconds = {name: [] for name in jobs}
    for turn in range(TURNS):
        names = list(jobs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(max(pool.run(train, jobs[name], STEPS_A_TURN).results))
    return seconds


def trace_default(pool, folder):
    """The default job's diagnosis."""
    pool.run(train, DEFAULT, 6, str(folder))
    return diagnose([folder / f"rank{rank}.json.gz" for rank in range(2)])


def record(record_claim, name, predicted, ratios, aim, source, detail):
    """A predicted gain beside the measured ones, by the larger over the smaller."""
    measured = median(ratios)
    record_claim(
        Claim(
            name=name,
            unit="gain",
            ours=max(predicted, measured) / min(predicted, measured),
            baseline=aim,
            baseline_name="the measured gain",
            higher_is_better=False,
            correct=measured > 0 and predicted > 0,
            detail=f"predicted {predicted:.2f}, measured {measured:.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) in {len(ratios)} turns; {detail}",
            source=source,
        ),
        aim=1.0,
        spread=(
            min(aim / max(predicted / r, r / predicted) for r in ratios),
            max(aim / max(predicted / r, r / predicted) for r in ratios),
        ),
    )


def bench_what_if(benchmark, record_claim, tmp_path):
    changes = {
        "buckets of 2 MiB": JobChange(bucket_bytes=2 * MiB),
        "bf16 gradients": JobChange(gradient_share=0.5),
        "two batches accumulated": JobChange(accumulation=2),
    }
    jobs = {"default": DEFAULT, **{name: make(change) for name, change in changes.items()}}

    def measure():
        with NetLab(hosts=2, rate=RATE) as lab, lab.pool(timeout=timedelta(minutes=10)) as pool:
            diagnosis = trace_default(pool, tmp_path)
            seconds = time_turns(pool, jobs)
        with NetLab(hosts=2, rate=FASTER) as lab, lab.pool(timeout=timedelta(minutes=10)) as pool:
            faster = [max(pool.run(train, DEFAULT, STEPS_A_TURN).results) for _ in range(TURNS)]
        return diagnosis, seconds | {"links of 200 Mbit/s": faster}

    diagnosis, seconds = benchmark.pedantic(measure, rounds=1)
    for name, change in {**changes, "links of 200 Mbit/s": JobChange(link_speed=2.0)}.items():
        predicted = diagnosis.replayed_step_s / diagnosis.job.predict(change).step_s
        ratios = [a / b for a, b in zip(seconds["default"], seconds[name], strict=True)]
        detail = (
            f"{median(seconds['default']):.2f} s a step before, {median(seconds[name]):.2f} after"
        )
        title = f"predicted gain of {name}, DDP at 100 Mbit/s"
        record(record_claim, title, predicted, ratios, 1.1, f"{COMMAND} -k what_if", detail)


def bench_first_advice(benchmark, record_claim, tmp_path):
    def measure():
        with NetLab(hosts=2, rate=RATE) as lab, lab.pool(timeout=timedelta(minutes=10)) as pool:
            advices = advise(trace_default(pool, tmp_path))
            # Precisions of products need another model; the first advice of another kind is made.
            advice = next(each for each in advices if each.strategy != "precision")
            jobs = {"default": DEFAULT, "advised": make(advice.change)}
            return advices, advice, time_turns(pool, jobs)

    advices, advice, seconds = benchmark.pedantic(measure, rounds=1)
    ratios = [a / b for a, b in zip(seconds["default"], seconds["advised"], strict=True)]
    source = f"{COMMAND} -k advice"
    title = "predicted gain of the first advice, DDP at 100 Mbit/s"
    record(record_claim, title, advice.gain, ratios, 1.1, source, advice.text)
    record_claim(
        Claim(
            name="step after the first advice, DDP at 100 Mbit/s",
            unit="s a batch",
            ours=median(seconds["advised"]),
            baseline=median(seconds["default"]),
            baseline_name="DDP with its default buckets",
            higher_is_better=False,
            correct=advice is advices[0],
            detail=f"first of {len(advices)}: {advice.text}",
            source=source,
        ),
        aim=1.3,
        spread=(min(ratios), max(ratios)),
    )
