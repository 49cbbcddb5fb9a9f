"""Saving and loading beside torch's DCP, and beside the plain ways of moving the same bytes.

Four gloo ranks, one thread each, every state made of DTensors that are sharded over all of them. The
ways alternate within one run; a round's time is the slowest rank's. DCP gets its best settings of
threads 1, 2, 4, plan cache on and off, asynchronous by thread and by process: each is tried, those
within 1.5 times the best once more, and the least time decides; threads and plans are tried on a
quarter of the tensors. Files of earlier rounds are on disk before a round begins.
"""

import mmap
import os
import shutil
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint as bcp
from bytecheckpoint.saving import writer
from shared.claims import Claim
from shared.comms import RankPool
from shared.errors import RankFailure

NUM_RANKS = 4
ROUNDS = 5
SCREENING = timedelta(minutes=10)  # of one group of settings, on a loaded machine
PEERS = [
    {
        "peer": "torch DCP, save",
        "setting": "threads 1, 2 or 4; plan cached or made anew",
        "why": "each is timed on a quarter of the tensors, those within 1.5 times the best again; the least time decides",
    },
    {
        "peer": "torch DCP, async_save",
        "setting": "by thread or by process; plan cached or made anew",
        "why": "each is timed, those within 1.5 times the best again; the least time decides",
    },
]
STATES = {
    # tensors, rows and columns of each
    "small": (8_000, 4 * NUM_RANKS, 16),
    "large": (48, 1_365 * NUM_RANKS, 1_024),
}
SYNC = [(threads, cached) for threads in (1, 2, 4) for cached in (False, True)]
BY_THREAD, BY_PROCESS = [
    [(kind, cached) for cached in (False, True)]
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS)
]


def make(kind, seed, share=1):
    """The state of one kind, or one tensor of every `share`."""
    count, rows, columns = STATES[kind]
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    torch.manual_seed(seed + dist.get_rank())
    return {
        f"layer{at}.weight": DTensor.from_local(
            torch.randn(rows // NUM_RANKS, columns), mesh, [Shard(0)]
        )
        for at in range(count // share)
    }


class Ways:
    """Everything that is measured, on one rank: each method returns its figures in seconds."""

    def __init__(self, folder, kind, share=1):
        if kind == "small":
            # DCP's process takes each tensor as an open file, and no limit here allows so many.
            torch.multiprocessing.set_sharing_strategy("file_system")
        self.folder = folder
        self.state = make(kind, 0, share)
        self.local = [tensor.to_local() for tensor in self.state.values()]
        self.num_bytes = sum(t.numel() * t.itemsize for t in self.local)
        self.checkpointer = bcp.Checkpointer(f"{folder}/ours")
        self.step = 0
        self.warm = [torch.zeros_like(tensor) for tensor in self.local]
        pages = -(-self.num_bytes // 4096) * 4096
        self.image = torch.frombuffer(mmap.mmap(-1, pages), dtype=torch.uint8).fill_(1)
        self.planners = {}

    def slowest(self, *seconds):
        worst = torch.tensor(seconds)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.tolist()

    def begin(self):
        dist.barrier()
        if dist.get_rank() == 0:
            os.sync()
        dist.barrier()
        return time.perf_counter()

    def ours(self):
        if dist.get_rank() == 0:
            shutil.rmtree(f"{self.folder}/ours/step_{self.step:08d}", ignore_errors=True)
        self.step += 1
        start = self.begin()
        handle = self.checkpointer.save(self.step, {"m": self.state})
        blocked = time.perf_counter() - start
        handle.committed.result()
        total = time.perf_counter() - start
        return self.slowest(blocked, total)

    def unhashed(self):
        """A save whose checksums are not computed, to see what they cost."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "hash_blocks", lambda *_: None)
            return self.ours()

    def memcpy(self):
        start = self.begin()
        torch._foreach_copy_(self.warm, self.local)
        return self.slowest(time.perf_counter() - start)

    def raw(self, flags=0):
        """The same bytes by the same ranks, one thread each, into new files."""
        path = f"{self.folder}/raw-{dist.get_rank()}"
        if os.path.exists(path):
            os.unlink(path)
        view = self.image.numpy().data
        start = self.begin()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
        for offset in range(0, len(view), 16 << 20):
            os.pwrite(file, view[offset : offset + (16 << 20)], offset)
        os.fsync(file)
        os.close(file)
        return self.slowest(time.perf_counter() - start)

    def _writer(self, name, threads):
        path = f"{self.folder}/{name}"
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        return dcp.FileSystemWriter(path, thread_count=threads)

    def _planner(self, name, cached):
        return DefaultSavePlanner(enable_plan_caching=cached)

    def dcp_save(self, threads, cached):
        writer = self._writer("dcp", threads)
        planner = self._planner("sync", cached)
        start = self.begin()
        dcp.save({"m": self.state}, storage_writer=writer, planner=planner)
        return self.slowest(time.perf_counter() - start)

    def dcp_async(self, kind, cached):
        writer = self._writer("dcp-async", 1)
        planner = self._planner("async", cached)
        start = self.begin()
        future = dcp.async_save(
            {"m": self.state},
            storage_writer=writer,
            planner=planner,
            async_checkpointer_type=kind,
        )
        blocked = time.perf_counter() - start
        assert isinstance(future, Future)
        future.result()
        return self.slowest(blocked, time.perf_counter() - start)

    def _empty(self):
        return {
            name: DTensor.from_local(torch.zeros_like(t.to_local()), t.device_mesh, t.placements)
            for name, t in self.state.items()
        }

    def _is_equal(self, loaded):
        return float(
            all(
                torch.equal(loaded[name].to_local(), tensor.to_local())
                for name, tensor in self.state.items()
            )
        )

    def _load(self, load):
        """Seconds with an empty page cache, then with a full one, and whether all is equal."""
        figures, correct = [], 1.0
        for is_cold in (True, False):
            target = self._empty()
            dist.barrier()
            if is_cold:
                _drop_from_cache(self.folder)
            start = self.begin()
            load({"m": target})
            figures.append(time.perf_counter() - start)
            correct = min(correct, self._is_equal(target))
        return [*self.slowest(*figures), -self.slowest(-correct)[0]]

    def load(self):
        return self._load(lambda state: self.checkpointer.load(self.step, state))

    def dcp_load(self):
        reader = dcp.FileSystemReader(f"{self.folder}/dcp")
        return self._load(lambda state: dcp.load(state, storage_reader=reader))


def _drop_from_cache(folder):
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def screen(folder, kind, share, way, options):
    """The least seconds that each of DCP's options took the slowest rank."""
    ways = Ways(folder, kind, share)
    method = getattr(ways, way)
    method(*options[0])  # the first of all pays for imports
    least = [method(*option)[0] for option in options]
    near = [at for at, seconds in enumerate(least) if seconds <= 1.5 * min(least)]
    for at in near:
        least[at] = min(least[at], method(*options[at])[0])
    ways.checkpointer.close()
    return least


def choose(folder, kind):
    """DCP's best settings, and what each of those tried took, in words."""
    chosen, told = {}, []
    # Its process may fail with thousands of tensors: all are there when that is found out.
    for name, way, share, groups in (
        ("save", "dcp_save", 4, [SYNC]),
        ("blocked", "dcp_async", 1, [BY_THREAD, BY_PROCESS]),
    ):
        timed = []
        for options in groups:
            try:
                with RankPool(NUM_RANKS, timeout=SCREENING) as pool:
                    least = pool.run(screen, folder, kind, share, way, options).results[0]
            except RankFailure as error:  # its process does not survive thousands of tensors
                if options is not BY_PROCESS:
                    raise
                told.append(f"asynchronous by process failed: {str(error).splitlines()[0]:.200}")
                continue
            timed += zip(least, options, strict=True)
        chosen[name] = min(timed, key=lambda one: one[0])[1]
        told += [f"{in_words(option)} {seconds:.2f} s" for seconds, option in timed]
    return chosen, told


def in_words(option):
    kind, cached = option
    how = f"{kind} threads" if isinstance(kind, int) else f"asynchronous by {kind.value}"
    return f"{how}, plan {'cached' if cached else 'made anew'}"


def measure(folder, kind, rounds, chosen):
    """Alternates the ways; figures by way and round, and how many bytes a rank has."""
    ways = Ways(folder, kind)
    found = {}
    for number in range(rounds + 1):
        figures = [
            ("unhashed", ways.unhashed()),
            ("ours", ways.ours()),
            (
                "ours",
                ways.ours(),
            ),  # twice in the other order: checksums cost less than the disk varies
            ("unhashed", ways.unhashed()),
            ("memcpy", ways.memcpy()),
            ("raw", ways.raw()),
            ("raw direct", ways.raw(os.O_DIRECT)),
            ("save", ways.dcp_save(*chosen["save"])),
            ("async", ways.dcp_async(*chosen["blocked"])),
            ("load", ways.load()),
            ("dcp load", ways.dcp_load()),
        ]
        for name, values in figures:
            if number:  # the first round warms up
                found.setdefault(name, []).append(values)
    ways.checkpointer.close()
    return found, ways.num_bytes


@pytest.mark.parametrize("kind", ["small", "large"])
def bench_against_dcp(benchmark, record_claim, tmp_path, kind):
    chosen, told = choose(str(tmp_path), kind)
    with RankPool(NUM_RANKS, timeout=timedelta(minutes=25)) as pool:
        found, num_bytes = benchmark.pedantic(
            lambda: pool.run(measure, str(tmp_path), kind, ROUNDS, chosen).results[0], rounds=1
        )
    columns = {name: list(zip(*rounds, strict=True)) for name, rounds in found.items()}
    benchmark.extra_info.update(rounds=found, screened=told, bytes_per_rank=num_bytes)
    count, rows, columns_of = STATES[kind]
    what = f"{count:,} tensors of {rows}x{columns_of} float32 sharded over {NUM_RANKS} ranks"
    correct = all(min(columns[name][2]) == 1.0 for name in ("load", "dcp load"))

    def claim(name, ours, baseline, baseline_name, aim, setting=""):
        seconds = [f"{min(figures):.3f}-{max(figures):.3f}" for figures in (ours, baseline)]
        each = len(ours) // len(baseline)  # ours is timed twice a round
        ratios = [baseline[at // each] / mine for at, mine in enumerate(ours)]
        record_claim(
            Claim(
                name=name,
                unit="s",
                ours=median(ours),
                baseline=median(baseline),
                baseline_name=baseline_name,
                higher_is_better=False,
                correct=correct,
                detail=f"{what}; median of {len(ours)}, seconds {seconds[0]} against {seconds[1]}; "
                f"what was loaded equals what was saved, in both"
                + (f"; DCP with {setting}" if setting else ""),
                source=f"hatch run bench bytecheckpoint -k {kind}",
            ),
            aim=aim,
            spread=(min(ratios), max(ratios)),
        )

    blocked, total = columns["ours"]
    small = kind == "small"
    dcp_save, dcp_async = (in_words(chosen[name]) for name in ("save", "blocked"))
    aim = 20 if small else 1 / 1.1
    said = f"{count:,} {kind} tensors on {NUM_RANKS} ranks"
    named = f"{said}: seconds until a save is on disk"
    claim(named, total, columns["save"][0], "torch DCP's save", aim, dcp_save)
    aim = 10 if small else 1 / 0.35
    named = f"{said}: seconds that a save blocks training"
    claim(named, blocked, columns["async"][0], "torch DCP's async_save", aim, dcp_async)
    aim = 10 if small else None
    for at, cache in enumerate(("cold", "warm")):
        ours, theirs = columns["load"][at], columns["dcp load"][at]
        named = f"{said}: seconds to load, {cache} page cache"
        claim(named, ours, theirs, "torch DCP's load", aim)
    if not small:
        warm, raw, direct = (columns[name][0] for name in ("memcpy", "raw", "raw direct"))
        named = f"{said}: seconds that a save blocks training"
        claim(named, blocked, warm, "copy of the same tensors into mapped memory", 1 / 1.3)
        named = f"{said}: seconds until a save is on disk"
        claim(named, total, raw, "pwrite and fsync of the same bytes", 1 / 1.15)
        claim(named, total, direct, "pwrite with O_DIRECT and fsync of the same bytes", None)
        unhashed = columns["unhashed"][1]
        claim(f"{named}, with checksums", total, unhashed, "our save without checksums", 1 / 1.03)
