"""A pipeline that can lose a stage: what logging costs, and what replaying saves.

Logging: four stages of a Hugging Face Llama from a config, 8 micro-batches, on four emulated hosts that
links of 1 Gbit/s join; steps with and without a log take turns in the same processes. Replay: the same
stages on one host; a stage is rebuilt from logs over half an interval, beside all stages doing the same
steps again from the checkpoint. Helpers: stages sleep for what a micro-batch takes, as two cores cannot
show four machines computing at once.
"""

import copy
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import swift
from shared.claims import Claim
from shared.comms import Group, NetLab, RankPool, barrier, netlab
from shared.kernels.digest import digest
from swift.pipeline.holes import find_holes
from swift.pipeline.replay import agree, make_groups, replay, serve

STAGES, MICRO_BATCHES, TOKENS, TURNS = 4, 8, 128, 12
STEPS = 4
"""Half an interval of 8 steps."""
SLEEP_S = 0.01
COMMAND = "hatch run bench swift/pipeline"
CONFIG = LlamaConfig(
    hidden_size=384, intermediate_size=1024, num_attention_heads=6, num_key_value_heads=6,
    num_hidden_layers=8, vocab_size=1024,
)  # fmt: skip


class LlamaStage(nn.Module):
    """Two layers, behind the embedding on the first stage, before the head on the last."""

    def __init__(self, index):
        super().__init__()
        self.rotary = LlamaRotaryEmbedding(CONFIG)
        self.table = nn.Embedding(CONFIG.vocab_size, CONFIG.hidden_size) if index == 0 else None
        self.layers = nn.ModuleList(LlamaDecoderLayer(CONFIG, 2 * index + at) for at in range(2))
        is_last = index == STAGES - 1
        self.head = nn.Linear(CONFIG.hidden_size, CONFIG.vocab_size) if is_last else None

    def forward(self, x):
        x = x if self.table is None else self.table(x)
        places = torch.arange(x.shape[1]).unsqueeze(0)
        embeddings = self.rotary(x, places)
        for layer in self.layers:
            out = layer(x, position_embeddings=embeddings, position_ids=places)
            x = out[0] if isinstance(out, tuple) else out
        return x if self.head is None else self.head(x)


class Sleep(torch.autograd.Function):
    """Takes a fixed time in both passes, without a core."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(SLEEP_S)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        time.sleep(SLEEP_S)
        return grads[0]


class SleepingStage(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return Sleep.apply(self.layer(x))


KINDS = {"llama": LlamaStage, "sleeping": SleepingStage}


def token_loss(out, targets):
    return nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())


def square_loss(out, targets):
    return ((out - targets) ** 2).mean()


def make_stage(kind, index, group, folder=None):
    torch.manual_seed(index)
    module = KINDS[kind](index)
    opt = swift.undoable(torch.optim.AdamW(module.parameters(), 1e-3))
    return swift.PipelineStage(
        module, opt, index=index, num_stages=STAGES, group=group,
        loss=token_loss if kind == "llama" else square_loss, micro_batches=MICRO_BATCHES, chunk=1,
        log=None if folder is None else swift.BoundaryLog(folder).open("bench", index),
    )  # fmt: skip


def batch(kind, step):
    draw = torch.Generator().manual_seed(step)
    if kind == "sleeping":
        return torch.randn(MICRO_BATCHES, 16, generator=draw), torch.zeros(MICRO_BATCHES, 16)
    ids = torch.randint(CONFIG.vocab_size, (MICRO_BATCHES, TOKENS + 1), generator=draw)
    return ids[:, :-1], ids[:, 1:]


def state_of(stage):
    opt = stage.opt
    return digest(one for i in range(len(opt.parameters)) for one in opt.state_of(i).values())


def log_in_turns(folder):
    """Seconds of steps with and without a log, bytes logged in a step, and whether all is there."""
    torch.set_num_threads(1)
    group = Group.world()
    stage = make_stage("llama", group.rank, group, folder)
    writer = stage.writer
    seconds = {True: [], False: []}
    for turn in range(2 * TURNS + 4):
        # The order changes in pairs, so that what drifts meets both alike.
        is_logged = bool((turn + turn // 2) % 2)
        stage.writer = writer if is_logged else None
        barrier(group)
        start = time.perf_counter()
        stage.step(*batch("llama", turn))
        if is_logged:
            writer.flush()  # in a longer run the next step would pay for what waits
        barrier(group)
        if turn >= 4:
            seconds[is_logged].append(time.perf_counter() - start)
    is_whole = writer.unreplayable is None
    num_steps = TURNS + 2
    logged_bytes = writer.logged_bytes / num_steps
    writer.close(remove=True)
    return seconds, logged_bytes, is_whole, writer.waited_s


def bench_pipeline_logging(benchmark, record_claim):
    if reason := netlab.available():
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory() as folder,
        NetLab(hosts=STAGES, rate="1gbit") as lab,
        lab.pool(timeout=timedelta(minutes=5), modules=["transformers"]) as pool,
    ):
        results = benchmark.pedantic(lambda: pool.run(log_in_turns, folder).results, rounds=1)
    seconds = results[0][0]
    every = [plain / logged for logged, plain in zip(seconds[True], seconds[False], strict=True)]
    total = sum(one[1] for one in results)
    record_claim(
        Claim(
            name="pipeline step with all boundaries logged, 4 stages of a Llama, 1 Gbit/s",
            unit="s",
            ours=median(seconds[True]),
            baseline=median(seconds[False]),
            baseline_name="the same steps without a log",
            higher_is_better=False,
            correct=all(one[2] for one in results),
            detail=f"{TURNS} turns; {total / 1e6:.1f} MB logged a step, with digests of all messages "
            f"received; training waited {max(one[3] for one in results):.3f} s for room in the queue",
            source=f"{COMMAND} -k logging",
        ),
        aim=1 / 1.02,
        spread=(min(every), max(every)),
    )


def lose_a_stage(folder, kind, lost, num_helpers, rounds):
    """Seconds of the steps since the checkpoint by all stages and by replay, and whether they are equal."""
    torch.set_num_threads(1)
    group = Group.world()
    again_s, replay_s, equal = [], [], True
    for _ in range(rounds):
        stage = make_stage(kind, group.rank, group, folder)
        stage.step(*batch(kind, 0))
        stage.opt.confirm()
        barrier(group)
        start = time.perf_counter()
        for step in range(1, 1 + STEPS):
            stage.step(*batch(kind, step))
        barrier(group)
        again_s.append(time.perf_counter() - start)
        expected = state_of(stage)
        hole = find_holes(STAGES, {lost}, None, num_helpers)[0]
        groups = make_groups(group, [hole])[0]
        made = None
        if group.rank in hole.replayers:
            made = make_stage(kind, lost, None, folder if group.rank == lost else None)
        fill_from_start(made, kind, lost, group)
        barrier(group)
        start = time.perf_counter()
        served = replayed = None
        if made is not None:
            replayed = replay(
                made, hole, groups, 1 + STEPS, lambda step, made=made: made.step(*batch(kind, step))
            )
        else:
            served = serve(
                stage.writer,
                group.rank,
                hole,
                groups,
                STAGES,
                1,
                MICRO_BATCHES,
                range(1, 1 + STEPS),
            )
        equal &= agree(group, served, replayed) is None
        replay_s.append(time.perf_counter() - start)
        equal &= made is None or group.rank != lost or state_of(made) == expected
        stage.writer.close(remove=group.rank != lost)
        if made is not None and made.writer is not None:
            made.writer.close(remove=True)
    return again_s, replay_s, equal


def fill_from_start(made, kind, lost, group):
    """The lost stage's state after the first step, by taking that step once more with all stages."""
    mine = make_stage(kind, group.rank, group)
    mine.step(*batch(kind, 0))
    held = (
        [mine.module.state_dict(), mine.opt.optimizer.state_dict()] if group.rank == lost else None
    )
    shared: list[Any] = [held]
    torch.distributed.broadcast_object_list(shared, src=lost)
    if made is not None:
        module, optimizer = copy.deepcopy(shared[0])
        made.module.load_state_dict(module)
        made.opt.optimizer.load_state_dict(optimizer)
        for at in range(len(made.opt.parameters)):
            made.opt.mark(at, 1)
        made.iteration = 1


def run_losses(kind, lost, num_helpers, rounds):
    with (
        tempfile.TemporaryDirectory() as folder,
        RankPool(STAGES, timeout=timedelta(minutes=5), modules=["transformers"]) as pool,
    ):
        results = pool.run(lose_a_stage, Path(folder), kind, lost, num_helpers, rounds).results
    return results[0][0], results[0][1], all(one[2] for one in results)


def bench_pipeline_lost_stage(benchmark, record_claim):
    again_s, replay_s, equal = benchmark.pedantic(lambda: run_losses("llama", 1, 0, 7), rounds=1)
    every = [a / b for a, b in zip(again_s, replay_s, strict=True)]
    record_claim(
        Claim(
            name=f"stage lost {STEPS} steps after a checkpoint, 4 stages of a Llama, until all are there",
            unit="s",
            ours=median(replay_s),
            baseline=median(again_s),
            baseline_name="all stages from the checkpoint",
            higher_is_better=False,
            correct=equal,
            detail="replayed by the newcomer alone; parameters and optimizer state equal to the bit; the "
            "reading of the checkpoint is in neither; four ranks share two cores, which are idle in a replay",
            source=f"{COMMAND} -k lost",
        ),
        aim=11 / 8,
        spread=(min(every), max(every)),
    )


def bench_pipeline_helpers(benchmark, record_claim):
    found = benchmark.pedantic(
        lambda: [run_losses("sleeping", 0, helpers, 7) for helpers in (0, 1)], rounds=1
    )
    (again_s, alone_s, is_equal), (_, helped_s, is_equal_too) = found
    every = [a / b for a, b in zip(alone_s, helped_s, strict=True)]
    record_claim(
        Claim(
            name=f"replay of {STEPS} steps by two ranks, stages that sleep",
            unit="s",
            ours=median(helped_s),
            baseline=median(alone_s),
            baseline_name="by the newcomer alone",
            higher_is_better=False,
            correct=is_equal and is_equal_too,
            detail=f"each pass of a micro-batch sleeps {SLEEP_S * 1e3:g} ms and computes little, as two cores "
            f"cannot show more machines; equal to the bit; all from the checkpoint: {median(again_s):.3g} s",
            source=f"{COMMAND} -k helpers",
        ),
        aim=1.7,
        spread=(min(every), max(every)),
    )
