"""300 steps with five seeded kills: simulated seconds beside measured ones; then 128 machines, simulated.

Three ranks and five warm spares on one machine train 25 MB of parameters and states over gloo. What a step
takes is measured in a job without kills, what an outage takes in one with three; other jobs are then killed
in five times at drawn seconds, and their total is compared with what the simulator says for the same
seconds. Nothing is fitted to those jobs.

On 128 machines nothing was measured but the outage with a replica, which is taken from the job above
and multiplied by ten. Restarts from checkpoints take the seconds that are given below, which is little for
jobs of that size, at the interval of Young and Daly.
"""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import contest

from shared.claims import Claim
from swift.simulator import Recovery, Training, compare, draw_failures, simulate

STEPS, KILLS, RUNS = 300, 5, 3
KIND = "linear"
COMMAND = "hatch run bench swift/simulator"
MACHINES, LONG_STEPS, LONG_STEP_S = 128, 20_000, 10.0
CHECKPOINT_S, RESTART_S = 20.0, 120.0
MTBF_HOURS = (100, 1000, 10_000)
SEEDS = range(20)


def calibrate(root):
    """Seconds of a step, of a job without kills, and of an outage, of one with three."""
    quiet_s, _ = measure(root, [], random.Random(RUNS))
    kills_s = [quiet_s * part for part in (0.2, 0.45, 0.7)]
    killed_s, _ = measure(root, kills_s, random.Random(RUNS))
    step_s = quiet_s / (STEPS - 1)
    # A torn step, half done on average, is repeated from its begin: the rest of what is lost is the
    # outage, and what the start of another spare takes from the ranks on the same cores.
    return step_s, (killed_s - quiet_s) / len(kills_s) - step_s / 2


def measure(root, kills_s, draw):
    """Seconds from the end of the first step to that of the last, with kills at drawn seconds."""
    with (
        tempfile.TemporaryDirectory(dir=root) as folder,
        contest.swift(Path(folder), KIND, STEPS, spares=KILLS) as job,
    ):
        # Spares are warm before the first rank has lines: the run begins with all of them.
        begun = job.wait_for(1, set(), 90.0)
        dead = set()
        for at in kills_s:
            time.sleep(max(0.0, begun + at - time.monotonic()))
            job.look()
            working = {line["rank"]: line["pid"] for line in job.lines if line["pid"] not in dead}
            victim = working[draw.randrange(contest.RANKS[KIND])]
            os.kill(victim, signal.SIGKILL)
            dead.add(victim)
        job.wait_for(STEPS, dead, 120.0)
        job.wait(60.0)
        ends = {line["rank"]: line["at_s"] for line in job.lines if line["step"] == STEPS}
        return max(ends.values()) - begun, job.digests()


def bench_simulated_seconds(benchmark, record_claim):
    root = Path("/dev/shm")

    def run():
        step_s, outage_s = calibrate(root)
        rows = []
        for seed in range(RUNS):
            drawn = np.random.default_rng(seed).uniform(0.05, 0.95, KILLS)
            kills_s = sorted((drawn * STEPS * step_s).tolist())
            measured_s, digests = measure(root, kills_s, random.Random(seed))
            expected = simulate(
                Training(num_steps=STEPS - 1, step_s=step_s), Recovery(outage_s=outage_s), kills_s
            )
            rows.append((expected, measured_s, digests))
        undisturbed_s, quiet = measure(root, [], random.Random(0))
        return step_s, outage_s, rows, undisturbed_s, quiet

    step_s, outage_s, rows, undisturbed_s, quiet = benchmark.pedantic(run, rounds=1)
    errors = [abs(expected.total_s / measured_s - 1) for expected, measured_s, _ in rows]
    told = "; ".join(
        f"simulated {expected.total_s:.3g} s, measured {measured_s:.3g} s"
        for expected, measured_s, _ in rows
    )
    is_equal = len(quiet) == 1 and all(found == quiet for *_, found in rows)
    # A simulator that knew of no failure must not pass.
    blind = median(abs((STEPS - 1) * step_s / measured_s - 1) for _, measured_s, _ in rows)
    record_claim(
        Claim(
            name="seconds of 300 steps with five kills, simulated: error",
            ours=100 * median(errors),
            baseline=10.0,
            unit="%",
            higher_is_better=False,
            baseline_name="the aim",
            correct=is_equal
            and all(expected.num_failures == KILLS for expected, *_ in rows)
            and blind > median(errors),
            detail=f"a step {step_s * 1e3:.3g} ms, an outage {outage_s:.3g} s, of other jobs; {told}; without "
            f"kills {undisturbed_s:.3g} s; without failures the simulator would err by {100 * blind:.3g} %; "
            f"final states equal to the undisturbed run's: {is_equal}",
            source=COMMAND,
        ),
        aim=1.0,
        spread=(10 / (100 * max(errors)), 10 / max(100 * min(errors), 0.01)),
    )
    training = Training(num_steps=LONG_STEPS, step_s=LONG_STEP_S, checkpoint_s=CHECKPOINT_S)
    ways = {
        "swift": Recovery(outage_s=10 * outage_s),
        "checkpoints": Recovery(outage_s=RESTART_S, repeat_step_s=LONG_STEP_S),
    }
    for hours in MTBF_HOURS:
        found = compare(training, ways, 3600.0 * hours, MACHINES, SEEDS)
        totals = {name: [one.total_s for one in outcomes] for name, (_, outcomes) in found.items()}
        interval = found["checkpoints"][0]
        assert interval is not None, "restarts repeat steps"
        every = [b / a for a, b in zip(totals["swift"], totals["checkpoints"], strict=True)]

        def at(steps, hours=hours):
            planned = Training(
                num_steps=LONG_STEPS, step_s=LONG_STEP_S, checkpoint_s=CHECKPOINT_S, interval=steps
            )
            runs = [
                simulate(
                    planned, ways["checkpoints"], draw_failures(3600.0 * hours, MACHINES, seed)
                )
                for seed in SEEDS
            ]
            return median(one.total_s for one in runs)

        others = {steps: at(steps) for steps in (max(interval // 2, 1), 2 * interval)}
        num_failures = median(one.num_failures for one in found["checkpoints"][1])
        record_claim(
            Claim(
                name=f"simulated: 20,000 steps of 10 s, {MACHINES} machines that each fail every {hours:,} h",
                ours=median(totals["swift"]) / 3600,
                baseline=median(totals["checkpoints"]) / 3600,
                unit="h",
                higher_is_better=False,
                baseline_name=f"checkpoints every {interval} steps, after Young and Daly",
                correct=all(median(totals["checkpoints"]) <= 1.02 * one for one in others.values())
                and median(totals["swift"]) >= LONG_STEPS * LONG_STEP_S,
                kind="simulated",
                detail=f"{num_failures:.0f} failures; outage {10 * outage_s:.3g} s with a replica, {RESTART_S:.0f} s "
                f"for a restart; a checkpoint stops training for {CHECKPOINT_S:.0f} s; medians of {len(SEEDS)} draws; "
                "other intervals: "
                + ", ".join(f"{steps} steps {one / 3600:.3g} h" for steps, one in others.items()),
                source=COMMAND,
            ),
            spread=(min(every), max(every)),
        )
