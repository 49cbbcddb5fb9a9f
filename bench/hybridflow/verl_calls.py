"""verl's worker group on two CPU workers: a call that does nothing, and 16 MiB out, 32 MiB back.

Reads one JSON object a line, {"what": "noop" | "bulk", "rounds": n}, and answers with its seconds.
"""

import json
import os
import sys
import tempfile
import time

os.environ["HOME"] = tempfile.mkdtemp()  # Ray leaves a token there
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ["RAY_task_events_report_interval_ms"] = "0"  # noqa: SIM112 - as Ray spells it

import ray
import torch
from tensordict import TensorDict  # pyrefly: ignore
from verl import DataProto  # pyrefly: ignore
from verl.single_controller.base import Worker  # pyrefly: ignore
from verl.single_controller.base.decorator import Dispatch, register  # pyrefly: ignore
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # pyrefly: ignore


class Calls(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def noop(self):
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data):
        x = data.batch["x"]
        return DataProto(batch=TensorDict({"y": torch.cat([x, x], 1)}, batch_size=[len(x)]))


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    ray.init(num_cpus=4, include_dashboard=False, logging_level=40, log_to_driver=False)
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Calls)))
    x = torch.randn(1024, 4096)
    data = DataProto(batch=TensorDict({"x": x}, batch_size=[1024]))
    for line in sys.stdin:
        asked = json.loads(line)
        taken, is_right = [], True
        for _ in range(asked["rounds"]):
            begun = time.perf_counter()
            found = group.noop() if asked["what"] == "noop" else group.double(data)
            taken.append(time.perf_counter() - begun)
            if asked["what"] == "noop":
                is_right &= found == [None, None]
            else:
                is_right &= torch.equal(found.batch["y"][:, :4096], x)
        print(json.dumps({"seconds": taken, "is_right": is_right}), file=answers, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
