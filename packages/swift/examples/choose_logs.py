"""Which boundaries of a pipeline to log, for several budgets of disk.

python choose_logs.py
"""

import swift

replay_s = [4.2, 3.8, 3.1, 2.6, 2.2, 1.5, 0.9, 0.4]  # of a stage, an iteration
boundary_bytes = [3e8, 3e8, 2e8, 2e8, 2e8, 1e8, 1e8]  # of a boundary, an iteration
interval = 100  # iterations between checkpoints

for share in (1.0, 0.5, 0.25, 0.0):
    budget = share * interval * sum(boundary_bytes)
    chosen = swift.select_logs(
        replay_s, boundary_bytes, interval=interval, bytes_per_s=1e9, budget_bytes=budget
    )
    marks = "".join("|" if is_logged else "." for is_logged in chosen.logged)
    print(
        f"{budget / 1e9:6.0f} GB: boundaries {marks}, a lost stage is replayed in "
        f"{chosen.expected_replay_s:.2f} s an iteration on average"
    )
