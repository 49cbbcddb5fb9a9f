"""An actor of hybridflow saved through bytecheckpoint's storage, beside DCP's own writer and reader.

Four ranks, one thread each: a Llama of 17 M weights with AdamW's state, trained by a step in 1-2-2.
Both ways go through `hy.Checkpoint`, the same planner and the same collectives, and both sync each
file; ours also computes checksums, and compares them when it loads. A save of `hy.Checkpoint` blocks
training to its end, so `dcp.async_save` of a copy of the state is timed as well, with either writer.
Loads go into 1-2-2 and into four replicas that share all weights out (FSDP2), from files that are in
memory and files that are not. DCP writes with as many threads as are fastest here, of 1, 2 and 4.
Ways take turns; before each, earlier files are on disk.
"""

import os
import shutil
import time
from concurrent.futures import Future
from functools import partial
from math import inf
from statistics import median, quantiles

import torch
import torch.distributed.checkpoint as dcp

import hybridflow as hy
from bytecheckpoint import DCPReader, DCPWriter
from hybridflow.roles.actor import ActorWorker
from hybridflow.roles.state.dcp_planners import BoxSavePlanner
from hybridflow.workers.worker_group import WorkerGroup
from shared.claims import Claim

MODEL = {
    **hy.PRESETS["small-llama"], "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408,
}  # fmt: skip
TURNS = 5
PEERS = [
    {
        "peer": "torch DCP, save, load and async_save through hy.Checkpoint",
        "setting": "FileSystemWriter with 1, 2 or 4 threads, each file synced",
        "why": "each is timed twice, the least time decides; ours syncs each file too",
    },
    {
        "peer": "torch DCP, async_save",
        "setting": "by thread, of a copy of the state",
        "why": "torch's default; the copy is timed with it, for both storages; no process was tried",
    },
]
COMMAND = "hatch run bench cross -k checkpoint"


class CheckedWorker(ActorWorker):
    """Tells what it holds, loses it, and saves without waiting."""

    under_way: Future

    @hy.remote()
    def parts(self):
        state = self._state("actor")
        held = [(part.name, part.box, part.values.detach().clone()) for part in state.parts]
        return state.shapes, held

    @hy.remote()
    def lose(self):
        with torch.no_grad():
            for part in self._state("actor").parts:
                part.values.zero_()

    @hy.remote()
    def begin_save(self, path, writer_of):
        state = self._state("actor")
        copied = [part._replace(values=part.values.detach().clone()) for part in state.parts]
        group = self.subgroup("all")
        assert group is not None, "there are four ranks"
        under_way = dcp.async_save(
            {},
            storage_writer=writer_of(path),
            planner=BoxSavePlanner(copied, state.shapes),
            process_group=group.checked(),
        )
        assert isinstance(under_way, Future), "a thread's, as no process was asked for"
        self.under_way = under_way

    @hy.remote()
    def end_save(self):
        self.under_way.result()


class CheckedActor(hy.Actor):
    """An actor of such workers."""

    def __init__(self, pool, layout, seed, *, is_sharded=False):
        WorkerGroup.__init__(
            self, CheckedWorker, pool, MODEL, layout=layout, seed=seed, is_sharded=is_sharded,
            optimizer=hy.AdamW(lr=1e-3),
        )  # fmt: skip


def trained(actor):
    """Takes a step, so that there is a state of the optimizer."""
    prompts = hy.Batch(
        prompts=torch.arange(1, 65).view(8, 8),
        prompt_lengths=torch.full((8,), 8),
        sample_ids=torch.arange(8),
    )
    batch = actor.generate(prompts, hy.Sampling(max_new_tokens=8)).result()
    draw = torch.Generator().manual_seed(0)
    batch["advantages"] = torch.randn(batch["tokens"].shape, generator=draw)
    batch["old_log_probs"] = batch["rollout_log_probs"]
    assert actor.update(batch)["grad_norm"] > 0
    return actor


def gathered(actor):
    """Whole tensors by name, put together from all ranks' parts; NaN where none has one."""
    whole = {}
    for shapes, held in actor.parts().result():
        for name, box, values in held:
            if name not in whole:
                fill = float("nan") if values.is_floating_point() else -1
                whole[name] = torch.full(shapes[name], fill, dtype=values.dtype)
            whole[name][box.within(type(box)((0,) * len(box.offsets), shapes[name]))] = values
    return whole


def is_same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], values) for name, values in expected.items()
    )


def timed(call):
    os.sync()
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def drop_from_memory(folder):
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fastest_threads(actor, folder):
    """Of DCP's writer, by the better of two saves each."""
    least = {}
    for num_threads in (1, 2, 4) * 2:
        writer = partial(dcp.FileSystemWriter, thread_count=num_threads)
        checkpoint = hy.Checkpoint(folder, storage_writer=writer)
        seconds = timed(lambda kept=checkpoint: kept.save(0, {"actor": actor}, {}))
        least[num_threads] = min(seconds, least.get(num_threads, inf))
        shutil.rmtree(folder)
    return min(least, key=least.__getitem__)


class Ways:
    """Both storages, the actor that is saved, and one in another layout."""

    def __init__(self, folder, pool):
        self.folder = folder
        self.actors = {
            "the same layout": trained(CheckedActor(pool, "1-2-2", 0)),
            "another layout": trained(CheckedActor(pool, "1-1-4", 1, is_sharded=True)),
        }
        self.num_threads = fastest_threads(self.actors["the same layout"], folder / "tried")
        writer = partial(dcp.FileSystemWriter, thread_count=self.num_threads)
        self.storage = {"ours": (DCPWriter, DCPReader), "DCP": (writer, dcp.FileSystemReader)}
        self.checkpoints = {
            way: hy.Checkpoint(folder / way, storage_writer=writer, storage_reader=reader)
            for way, (writer, reader) in self.storage.items()
        }
        self.saved = gathered(self.actors["the same layout"])
        self.is_right = not is_same(gathered(self.actors["another layout"]), self.saved)
        self.seconds = {}

    def take_turns(self):
        for turn in range(TURNS + 1):
            for way in list(self.storage)[:: 1 if turn % 2 else -1]:
                for what, seconds in self.turn(way, turn):
                    if turn:  # the first warms up
                        self.seconds.setdefault((what, way), []).append(seconds)
                self.is_right &= self.checkpoints[way].steps == [turn]
                shutil.rmtree(self.folder / way)

    def turn(self, way, turn):
        """What was timed, one after the other."""
        checkpoint, first = self.checkpoints[way], self.actors["the same layout"]
        yield "save", timed(lambda: checkpoint.save(turn, {"actor": first}, {"turn": turn}))
        for layout, actor in self.actors.items():
            for files in ("not in memory", "in memory"):
                actor.lose().result()
                if files == "not in memory":
                    drop_from_memory(self.folder)
                yield (
                    f"load, {layout}, files {files}",
                    timed(lambda actor=actor: checkpoint.load({"actor": actor})),
                )
                if turn == TURNS:
                    self.is_right &= is_same(gathered(actor), self.saved)
        path, (writer, reader) = str(self.folder / f"async-{way}"), self.storage[way]
        os.sync()
        begun = time.perf_counter()
        first.begin_save(path, writer).result()
        yield "blocked, async_save", time.perf_counter() - begun
        first.end_save().result()
        yield "whole, async_save", time.perf_counter() - begun
        if turn == TURNS:
            first.lose().result()
            first.load_state("actor", path, reader).result()
            self.is_right &= is_same(gathered(first), self.saved)
        shutil.rmtree(path)


def spread(seconds):
    low, _, high = quantiles(seconds, n=4)
    return f"quartiles {low:.3f} and {high:.3f} s"


def bench_checkpoint(benchmark, record_claim, tmp_path):
    with hy.Workers.local(4) as workers:
        ways = Ways(tmp_path, workers.pool(4))
        benchmark.pedantic(ways.take_turns, rounds=1)
    num_bytes = sum(values.nbytes for values in ways.saved.values())
    for what in dict.fromkeys(name for name, _ in ways.seconds):
        ours, theirs = (ways.seconds[what, way] for way in ways.storage)
        ratios = [baseline / mine for mine, baseline in zip(ours, theirs, strict=True)]
        record_claim(
            Claim(
                name=f"an actor's state through bytecheckpoint's storage: {what}",
                unit="s",
                ours=median(ours),
                baseline=median(theirs),
                baseline_name="DCP's own storage, its best number of writing threads",
                higher_is_better=False,
                correct=ways.is_right,
                detail=f"{num_bytes / 1e6:.0f} MB, {TURNS} turns; {spread(ours)} against "
                f"{spread(theirs)}, which has {ways.num_threads} threads a rank; whole tensors gathered from both layouts equal to the bit those "
                f"that were saved",
                source=COMMAND,
            ),
            spread=(min(ratios), max(ratios)),
        )
