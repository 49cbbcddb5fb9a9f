"""Bytes read and time taken when layouts change, from disk and from S3 behind a 1 Gbit/s link.

Bytes are what the kernel counts for a process's reads (`rchar` in /proc/self/io), ours and DCP's
alike, or what the server's link carries. Times are of the slowest rank; ways alternate.
"""

import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint as bcp
from bytecheckpoint.storage import open_storage
from shared.claims import Claim
from shared.comms import NetLab, RankPool, netlab

MIB = 1 << 20
ROUNDS = 7
SHAPE = (8_192, 4_096)  # 128 MiB of float32
GET_BYTES = 8 * MIB
PORT = 5_000
PEERS = [
    {
        "peer": "torch DCP, load",
        "setting": "its own checkpoint of the same tensor in the same layouts, FileSystemReader",
        "why": "it has no setting for what is read; each rank reads the items that it needs whole",
    },
    {
        "peer": "torch DCP, load from S3",
        "setting": "FsspecReader over the same s3fs",
        "why": "its only reader of S3; timed once, in the details alone",
    },
    {
        "peer": "plain GETs",
        "setting": "8 MiB a request, four at a time a rank, each byte once, nothing kept",
        "why": "the requests that ours makes too, without planning, checksums and exchange",
    },
    {
        "peer": "the faster of always and never",
        "setting": "both in turn with auto, by their medians",
        "why": "what a user would choose who knew both times",
    },
]


def pool_of(num_ranks):
    return RankPool(num_ranks, timeout=timedelta(minutes=10))


def values():
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)


def tensor(layout) -> Any:
    """The tensor in a layout on the ranks there are: the dimension cut, or "flat" ranges."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if layout == "flat":
        # Cut as ZeRO cuts what it has concatenated: not between rows.
        numel = SHAPE[0] * SHAPE[1]
        cuts = [0, *(at * numel // size + 1_001 * at for at in range(1, size)), numel]
        part = values().view(-1)[cuts[rank] : cuts[rank + 1]].clone()
        return bcp.FlatShard(part, SHAPE, cuts[rank])
    mesh = init_device_mesh("cpu", (size,))
    local = values().chunk(size, layout)[rank].contiguous()
    return DTensor.from_local(
        local, mesh, [Shard(layout)], shape=torch.Size(SHAPE), stride=(SHAPE[1], 1)
    )


def save(path, layout):
    held = tensor(layout)
    bcp.save(f"{path}/ours", {"m": {"w": held}})
    if layout != "flat":  # which DCP has no form for
        dcp.save({"m": {"w": held}}, storage_writer=dcp.FileSystemWriter(f"{path}/dcp"))


def rchar():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def read_by_all(load):
    """Runs a load; the bytes all ranks read, and the slowest rank's seconds."""
    dist.barrier()
    before, begin = rchar(), time.perf_counter()
    load()
    found = torch.tensor([rchar() - before, time.perf_counter() - begin], dtype=torch.float64)
    total = found.clone()
    dist.all_reduce(total)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return total[0].item(), found[1].item()


def load(path, layout, dedupe):
    target = tensor(layout)
    target.to_local().zero_()
    state = {"m": {"w": target}}
    if dedupe == "dcp":
        reader = dcp.FileSystemReader(f"{path}/dcp")
        num_bytes, _ = read_by_all(lambda: dcp.load(state, storage_reader=reader))
    else:
        num_bytes, _ = read_by_all(lambda: bcp.load(f"{path}/ours", state, dedupe=dedupe))
    correct = torch.equal(target.to_local(), tensor(layout).to_local())
    worst = torch.tensor(float(correct))
    dist.all_reduce(worst, dist.ReduceOp.MIN)
    return num_bytes, bool(worst.item())


@pytest.mark.parametrize(
    ("from_layout", "from_ranks", "to_layout", "to_ranks"),
    [(0, 4, 1, 4), (0, 4, 0, 2), (0, 2, 0, 3), ("flat", 4, 0, 4)],
    ids=["shard0-shard1", "4-2", "2-3", "flat-dtensor"],
)
def bench_reshard_bytes(
    benchmark, record_claim, tmp_path, from_layout, from_ranks, to_layout, to_ranks
):
    with pool_of(from_ranks) as pool:
        pool.run(save, str(tmp_path), from_layout)
    useful = SHAPE[0] * SHAPE[1] * 4
    with pool_of(to_ranks) as pool:
        ours, correct = benchmark.pedantic(
            lambda: pool.run(load, str(tmp_path), to_layout, "always").results[0], rounds=1
        )
        plain, also = pool.run(load, str(tmp_path), to_layout, "never").results[0]
        if from_layout == "flat":
            theirs, baseline, agrees = plain, "each rank reads for itself", also
        else:
            theirs, agrees = pool.run(load, str(tmp_path), to_layout, "dcp").results[0]
            baseline = "torch DCP"
    name = f"{from_layout} on {from_ranks} ranks to {to_layout} on {to_ranks}"
    record_claim(
        Claim(
            name=f"bytes read a useful byte, shard {name}",
            unit="bytes",
            ours=ours / useful,
            baseline=theirs / useful,
            baseline_name=baseline,
            higher_is_better=False,
            correct=correct and also and agrees and ours <= 1.05 * useful,
            detail=f"one tensor of {useful / MIB:.0f} MiB, rchar of all ranks, dedupe='always', at "
            f"most 1.05; each for itself {plain / useful:.2f}; equal bits in all",
            source="hatch run bench bytecheckpoint -k reshard_bytes",
        )
    )


def replicated(path, num_bytes, dedupes, rounds):
    """Each rank loads everything: bytes and seconds by way and round."""
    torch.manual_seed(0)
    count = num_bytes // (16 * MIB)
    expected = {f"w{at}": torch.randn(4 * MIB) for at in range(count)}
    if not path.startswith("s3://"):
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
    bcp.save(f"{path}/ours", {"m": expected})
    if "dcp" in dedupes:
        dcp.save({"m": expected}, storage_writer=FsspecWriter(f"{path}/dcp"))
    found = {dedupe: [] for dedupe in dedupes}
    for number in range(rounds + 1):
        for dedupe in dedupes:
            target = {name: torch.zeros_like(value) for name, value in expected.items()}
            state = {"m": target}
            if dedupe == "dcp":
                reader = FsspecReader(f"{path}/dcp")
                figures = read_by_all(lambda s=state, r=reader: dcp.load(s, storage_reader=r))
            else:
                run = lambda s=state, d=dedupe: bcp.load(f"{path}/ours", s, dedupe=d)
                figures = read_by_all(run)
            correct = all(torch.equal(target[name], value) for name, value in expected.items())
            if number:  # the first round warms up
                found[dedupe].append((*figures, correct))
    return found


def plain_gets(url, rounds):
    """The same ranks fetch the same objects, each byte once, and do nothing with them."""
    storage = open_storage(url)
    folder = next(name for name in storage.list("") if name.startswith("data-"))
    objects = storage.sizes(folder).items()
    ranges = [
        (f"{folder}/{n}", at, size) for n, size in objects for at in range(0, size, GET_BYTES)
    ]
    mine = ranges[dist.get_rank() :: dist.get_world_size()]

    def get(one):
        path, start, size = one
        storage.read_into(path, start, memoryview(bytearray(min(GET_BYTES, size - start))))

    def get_all():
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(get, mine))

    return [read_by_all(get_all)[1] for _ in range(rounds)]


def medians(found):
    return {
        dedupe: [median(c) for c in list(zip(*rows, strict=True))[:2]]
        for dedupe, rows in found.items()
    }


def bench_replicated_local(benchmark, record_claim, tmp_path):
    num_bytes = 256 * MIB
    ways = ["always", "never", "auto"]
    with pool_of(4) as pool:
        found = benchmark.pedantic(
            lambda: pool.run(replicated, str(tmp_path / "r"), num_bytes, ways, ROUNDS).results[0],
            rounds=1,
        )
    correct = all(row[2] for rows in found.values() for row in rows)
    figures = medians(found)
    record_claim(
        Claim(
            name="4 ranks load everything: bytes read a byte stored, dedupe='always'",
            unit="bytes",
            ours=figures["always"][0] / num_bytes,
            baseline=figures["never"][0] / num_bytes,
            baseline_name="dedupe='never'",
            higher_is_better=False,
            correct=correct and figures["always"][0] <= 1.02 * num_bytes,
            detail="256 MiB, rchar of all ranks",
            source="hatch run bench bytecheckpoint -k replicated_local",
        ),
        spread=ratios(found, "always", "never", 0),
    )
    record_claim(
        Claim(
            name="4 ranks load everything from disk: bytes read a byte stored, dedupe='auto' "
            "(the default)",
            unit="bytes",
            ours=figures["auto"][0] / num_bytes,
            baseline=figures["always"][0] / num_bytes,
            baseline_name="dedupe='always'",
            higher_is_better=False,
            correct=correct,
            detail="256 MiB, rchar of all ranks; auto lets each rank read for itself where that is "
            "predicted to be faster",
            source="hatch run bench bytecheckpoint -k replicated_local",
        ),
        spread=ratios(found, "auto", "always", 0),
    )
    claim, spread = _auto("disk, page cache warm", found, figures, correct)
    record_claim(claim, aim=1 / 1.1, spread=spread)


def ratios(found, ours, baseline, column):
    """The lowest and the highest ratio of one turn; column 0 has bytes, 1 seconds."""
    each = [b[column] / o[column] for o, b in zip(found[ours], found[baseline], strict=True)]
    return min(each), max(each)


def _auto(where, found, figures, correct):
    """The claim of auto against the faster of both ways, and its spread."""
    best = min("always", "never", key=lambda way: figures[way][1])
    told = ", ".join(
        f"{way} {min(r[1] for r in rows):.2f}-{max(r[1] for r in rows):.2f} s"
        for way, rows in found.items()
    )
    claim = Claim(
        name=f"4 ranks load everything from {where}: dedupe='auto'",
        unit="s",
        ours=figures["auto"][1],
        baseline=figures[best][1],
        baseline_name="the faster of always and never",
        higher_is_better=False,
        correct=correct,
        detail=f"256 MiB, medians; {told}",
        source="hatch run bench bytecheckpoint -k replicated",
    )
    return claim, ratios(found, "auto", best, 1)


@contextmanager
def s3_behind(lab):
    """A moto server on host 0 of a lab; yields what ranks need in their environment."""
    command = [
        *lab.command(0),
        sys.executable,
        "-m",
        "moto.server",
        "-H",
        "0.0.0.0",
        "-p",
        str(PORT),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{lab.address(0)}:{PORT}",
        }
    finally:
        server.kill()
        server.wait()


def make_bucket():
    import s3fs

    if dist.get_rank() == 0:
        for _ in range(100):
            try:
                s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bench")
                break
            except OSError:
                time.sleep(0.2)
    dist.barrier()


@pytest.mark.netns
@pytest.mark.skipif(netlab.available() is not None, reason=str(netlab.available()))
def bench_replicated_s3(benchmark, record_claim):
    num_bytes = 256 * MIB
    with (
        NetLab(hosts=2, rate="1gbit", ranks_per_host=4) as lab,
        s3_behind(lab) as env,
        lab.pool(hosts=[1], env=env, timeout=timedelta(minutes=20)) as pool,
    ):
        pool.run(make_bucket)
        ways = ["always", "never", "auto"]
        found = benchmark.pedantic(
            lambda: pool.run(replicated, "s3://bench/r", num_bytes, ways, ROUNDS).results[0],
            rounds=1,
        )
        plain = pool.run(plain_gets, "s3://bench/r/ours", ROUNDS).results[0]
        from_dcp = pool.run(replicated, "s3://bench/d", num_bytes, ["dcp"], 1).results[0]
        limit = num_bytes / lab.bytes_per_s
    correct = all(row[2] for rows in found.values() for row in rows)
    figures = medians(found)
    seconds = [row[1] for row in found["always"]]
    for baselines, name, aim in (
        ([limit] * ROUNDS, "bytes over bandwidth", 1 / 1.2),
        (plain, "plain GETs of the same bytes, 4 at a time a rank", None),
    ):
        each = [theirs / mine for mine, theirs in zip(seconds, baselines, strict=True)]
        record_claim(
            Claim(
                name="4 ranks load everything from S3 at 1 Gbit/s",
                unit="s",
                ours=median(seconds),
                baseline=median(baselines),
                baseline_name=name,
                higher_is_better=False,
                correct=correct,
                detail=f"256 MiB from a moto server in a host of its own, dedupe='always', spread "
                f"{min(seconds):.2f}-{max(seconds):.2f} s; torch DCP {from_dcp['dcp'][0][1]:.2f} s "
                f"(once)",
                source="hatch run bench bytecheckpoint -k replicated_s3",
            ),
            aim=aim,
            spread=(min(each), max(each)),
        )
    claim, spread = _auto("S3 at 1 Gbit/s", found, figures, correct)
    record_claim(claim, aim=1 / 1.1, spread=spread)
