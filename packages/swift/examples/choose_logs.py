"""Which boundaries of a pipeline to log, for several budgets of disk.

    python choose_logs.py profile.json --interval 100
    python choose_logs.py                     # an invented pipeline of eight stages

PROFILE is what `swift.profiler.measure(...).to_json()` wrote on your ranks.
"""

import argparse
from pathlib import Path

import swift
from swift.pipeline.profile import Profile

INVENTED = Profile(
    replay_s=[4.2, 3.8, 3.1, 2.6, 2.2, 1.5, 0.9, 0.4],
    boundary_bytes=[300_000_000, 300_000_000, *[200_000_000] * 3, *[100_000_000] * 2],
    bytes_per_s=1e9,
    step_s=6.0,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("profile", nargs="?", type=Path, help="a measured pipeline, as JSON")
    parser.add_argument("--interval", type=int, default=100, help="steps between checkpoints")
    arguments = parser.parse_args()
    profile = INVENTED
    if arguments.profile is not None:
        profile = Profile.from_json(arguments.profile.read_text())
    for share in (1.0, 0.5, 0.25, 0.0):
        budget_bytes = share * arguments.interval * sum(profile.boundary_bytes)
        chosen = swift.select_logs(
            profile.replay_s,
            profile.boundary_bytes,
            interval=arguments.interval,
            bytes_per_s=profile.bytes_per_s,
            budget_bytes=budget_bytes,
        )
        marks = "".join("|" if is_logged else "." for is_logged in chosen.logged)
        print(
            f"{budget_bytes / 1e9:6.1f} GB: boundaries {marks}, a lost stage is replayed in "
            f"{chosen.expected_replay_s:.2f} s a step on average"
        )


if __name__ == "__main__":
    main()
