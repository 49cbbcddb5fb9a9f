"""Traces of a DDP job with planted causes and known clocks, as torch.profiler would export them."""

import gzip
import json
from dataclasses import dataclass, field

import numpy as np

BASE_NS = 1_760_000_000_000_000_000


@dataclass
class PlantedJob:
    """A job to be simulated, in seconds. Ranks run the same operators. Gradients of
    backward operators fill a bucket, which is all-reduced once it has its bytes.
    """

    num_ranks: int = 2
    num_steps: int = 6
    forward_s: dict[str, float] = field(
        default_factory=lambda: {
            "aten::embedding": 0.004,
            "aten::linear": 0.020,
            "aten::gelu": 0.006,
        }
    )
    backward_s: tuple[float, ...] = (0.012, 0.014, 0.010, 0.016)
    gradient_bytes: tuple[int, ...] = (400_000, 1_000_000, 1_000_000, 600_000)
    bucket_cap_bytes: int = 1
    gradient_share: float = 1.0
    optimizer_s: float = 0.003
    loader_s: float = 0.002
    gap_s: float = 20e-6
    alpha_s: float = 0.0005
    rate_bytes_per_s: float = 400e6
    rank_factor: dict[int, float] = field(default_factory=dict)
    operator_factor: dict[tuple[int, str], float] = field(default_factory=dict)
    late_loader_s: dict[int, float] = field(default_factory=dict)
    has_loader_mark: bool = True
    offset_s: dict[int, float] = field(default_factory=dict)
    drift: dict[int, float] = field(default_factory=dict)
    late_end_s: dict[int, float] = field(default_factory=dict)
    noise: float = 0.0
    has_shapes: bool = True
    has_marks: bool = True
    is_nccl: bool = False
    memory_bytes: tuple[int, int] | None = None
    seed: int = 0


class PlantedRun:
    """The simulated run: `write` exports it; the rest is the truth.

    One thread of gloo a rank carries all collectives, one after another, and each transfers from
    its last rank's arrival. Truth is summed while simulating, by nothing that the package computes.
    """

    def __init__(self, job: PlantedJob) -> None:
        self.job = job
        self.random = np.random.default_rng(job.seed)
        ranks = range(job.num_ranks)
        self.events: list[list[dict]] = [[] for _ in ranks]
        self.wait_s = [0.0 for _ in ranks]
        self.transfer_s = 0.0
        self.step_ends: list[list[float]] = []
        now = [0.010 for _ in ranks]
        for step in range(job.num_steps):
            begin = list(now)
            for rank in ranks:
                now[rank] = self._forward(rank, now[rank])
            calls: list[list[float]] = [[] for _ in ranks]
            sizes: list[int] = []
            filled = 0
            for i, (seconds, size) in enumerate(
                zip(job.backward_s, job.gradient_bytes, strict=True)
            ):
                filled += size
                is_full = filled >= job.bucket_cap_bytes or i + 1 == len(job.backward_s)
                if is_full:
                    sizes.append(filled)
                    filled = 0
                for rank in ranks:
                    now[rank] = self._backward(rank, now[rank], i, seconds, size)
                    if is_full:
                        calls[rank].append(now[rank] - 5e-6)
                        self._operator(rank, "c10d::allreduce_", now[rank] - 5e-6, now[rank])
            end, join = 0.0, [0.0 for _ in ranks]
            for bucket, size in enumerate(sizes):
                # gloo's thread takes a bucket up when it is called and the one before is done.
                join = [max(calls[rank][bucket], end) for rank in ranks]
                begin_transfer = max(join)
                end = (
                    begin_transfer + job.alpha_s + size * job.gradient_share / job.rate_bytes_per_s
                )
                self.transfer_s += (end - begin_transfer) / job.num_steps
                for rank in ranks:
                    self.wait_s[rank] += (begin_transfer - join[rank]) / job.num_steps
                    late = end + abs(self.random.normal(0, 20e-6)) * bool(job.noise)
                    late += job.late_end_s.get(rank, 0.0)
                    self._collective(rank, size, join[rank], late)
            for rank in ranks:
                now[rank] = max(now[rank], end) + job.gap_s * self._factor(rank)
                start = now[rank]
                now[rank] += job.optimizer_s * self._factor(rank)
                self._operator(rank, "aten::_foreach_add_", start, now[rank])
                now[rank] += job.gap_s * self._factor(rank)
                if job.memory_bytes:
                    self._memory(rank, start, job.memory_bytes[0])
                if job.has_marks:
                    self._add(
                        rank, f"ProfilerStep#{step + 3}", "user_annotation", begin[rank], now[rank]
                    )
            self.step_ends.append(list(now))

    @property
    def step_s(self) -> float:
        """Seconds a step, from the first step's end to the last one's."""
        ends = np.array(self.step_ends)
        return float((ends[-1] - ends[0]).mean() / (len(ends) - 1))

    def _factor(self, rank: int) -> float:
        return self.job.rank_factor.get(rank, 1.0)

    def _noise(self) -> float:
        return float(np.exp(self.random.normal(0, self.job.noise)))

    def _forward(self, rank: int, now: float) -> float:
        job = self.job
        loads = job.loader_s * self._factor(rank) + job.late_loader_s.get(rank, 0.0)
        if job.has_loader_mark:
            name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            self._add(rank, name, "user_annotation", now + 1e-6, now + loads)
        now += loads
        started = now
        if job.memory_bytes:
            self._memory(rank, now, job.memory_bytes[0])
        for name, seconds in job.forward_s.items():
            now += job.gap_s * self._factor(rank)
            start = now
            factor = job.operator_factor.get((rank, name), 1.0)
            now += seconds * self._factor(rank) * factor * self._noise()
            self._operator(rank, name, start, now)
            # Nested within the operator, so that it must not count twice.
            self._operator(rank, "aten::empty", start + 1e-6, start + 2e-6)
            if job.memory_bytes:
                self._memory(rank, (start + now) / 2, job.memory_bytes[1])
        self._add(rank, "DistributedDataParallel.forward", "user_annotation", started, now)
        return now

    def _backward(self, rank: int, now: float, i: int, seconds: float, size: int) -> float:
        now += self.job.gap_s * self._factor(rank)
        end = now + seconds * self._factor(rank) * self._noise()
        prefix = "autograd::engine::evaluate_function: "
        self._operator(rank, f"{prefix}Mm{i}Backward0", now, end - 10e-6)
        shapes = {"Input Dims": [[size // 4]], "Input type": ["float"]}
        name = f"{prefix}torch::autograd::AccumulateGrad"
        self._operator(rank, name, end - 10e-6, end, **(shapes if self.job.has_shapes else {}))
        return end

    def _clock_us(self, rank: int, time_s: float) -> float:
        job = self.job
        return (time_s + job.offset_s.get(rank, 0.0) + job.drift.get(rank, 0.0) * time_s) * 1e6

    def _add(self, rank: int, name: str, cat: str, start: float, end: float, **arguments) -> None:
        begin_us, end_us = self._clock_us(rank, start), self._clock_us(rank, end)
        self.events[rank].append(
            {"ph": "X", "cat": cat, "name": name, "pid": 100 + rank, "tid": cat, "ts": begin_us,
             "dur": end_us - begin_us, "args": arguments}
        )  # fmt: skip

    def _operator(self, rank: int, name: str, start: float, end: float, **arguments) -> None:
        if not self.job.is_nccl:
            self._add(rank, name, "cpu_op", start, end, **arguments)
        elif not name.startswith("c10d"):
            self._add(rank, name, "kernel", start, end, stream=7)

    def _collective(self, rank: int, size: int, start: float, end: float) -> None:
        if self.job.is_nccl:
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long)"
            about = {"Collective name": "allreduce", "In msg nelems": size // 4, "dtype": "Float"}
            self._add(rank, name, "kernel", start, end, stream=20, **about)
            return
        shapes = (
            {"Input Dims": [[size // 4]], "Input type": ["float"]} if self.job.has_shapes else {}
        )
        self._add(rank, "gloo:all_reduce", "user_annotation", start, end, **shapes)

    def _memory(self, rank: int, time_s: float, total: int) -> None:
        self.events[rank].append(
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "s": "t", "pid": 100 + rank,
             "tid": 1, "ts": self._clock_us(rank, time_s),
             "args": {"Total Allocated": total, "Bytes": 1, "Device Id": -1, "Device Type": 0}}
        )  # fmt: skip

    def write(self, folder, *, is_gz: bool = False) -> list[str]:
        """Writes rank0.json and so on; returns the paths in reversed order of ranks."""
        paths = []
        for rank, events in enumerate(self.events):
            content = {
                "schemaVersion": 1,
                "distributedInfo": {
                    "backend": "gloo", "rank": rank, "world_size": self.job.num_ranks,
                },
                "baseTimeNanoseconds": BASE_NS,
                "traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {}}, *events],
            }  # fmt: skip
            path = folder / f"rank{rank}.json{'.gz' if is_gz else ''}"
            data = json.dumps(content).encode()
            path.write_bytes(gzip.compress(data) if is_gz else data)
            paths.append(str(path))
        return paths[::-1]
