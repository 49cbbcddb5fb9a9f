"""The work of each command: the parent process's part, and the function that each rank runs.

Started by torchrun, a command is one rank and joins the others; started alone, it starts as many
ranks on this machine as the partition has parts.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from adaqp.messages.distgraph import load
from adaqp.messages.network import LinkTable, probe
from adaqp.policy import Exact, Policy
from adaqp.simulator.profiler import Profile, measure
from adaqp.simulator.simulator import predict
from adaqp.training.comparison import Timing, compare_in_rank
from adaqp.training.config import POLICIES, ModelConfig, PolicyConfig, RunConfig
from adaqp.training.trainer import History, Trainer
from shared.cli import draw_table
from shared.comms import Group, NetLab, RankPool, all_gather_v, init_from_env
from shared.data.frames import check_output, write_frame
from shared.errors import ConfigError, DataError
from shared.files import read_text, write_atomically
from shared.training import show_resumed
from shared.training.progress import ScalarWriter, is_progress_hidden, show_progress
from shared.units import parse_rate

__all__ = ["bench", "plan", "predict_classes", "probe_links", "profile_in_rank", "train"]

# How long one message may take, and a whole run (the longest wait that select knows is 24 days).
_MESSAGE_LIMIT, _RUN_LIMIT = timedelta(minutes=10), timedelta(days=20)
# What a command prints: a record for `--json`, and a text.
_Found = tuple[dict[str, Any], str]


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not path.exists():
        raise DataError(
            f"{folder} holds no partition; make one: adaqp partition sbm --out {folder}"
        )
    return json.loads(path.read_text())


def _num_parts(folder: Path) -> int:
    return _read_meta(folder)["parts"]


def _make_parent(file: Path | None) -> None:
    """Makes the folder of a file that is written after the work."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)


def _run(num_ranks: int, function: Callable[..., Any], *args: Any, rate: str | None = None) -> list:
    """Results of all ranks; under torchrun this rank's only."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if rate is not None:
            raise ConfigError(
                "--rate builds hosts of its own, but torchrun has started the ranks outside them; "
                "run it without torchrun, or without --rate"
            )
        init_from_env()
        return [function(*args)]
    if num_ranks == 1 and rate is None:
        return [function(*args)]
    with ExitStack() as stack:
        if rate is None:
            pool = stack.enter_context(RankPool(num_ranks, timeout=_MESSAGE_LIMIT))
        else:
            lab = stack.enter_context(NetLab(hosts=num_ranks, rate=rate))
            pool = stack.enter_context(lab.pool(timeout=_MESSAGE_LIMIT))
        return pool.run(function, *args, timeout=_RUN_LIMIT).results


# -- train ----------------------------------------------------------------------------------


def train(
    folder: Path,
    config: RunConfig,
    checkpoint: Path | None,
    save_every: int,
    history_file: Path | None,
    links_file: Path | None,
    board: Path | None = None,
) -> _Found | None:
    """Trains and returns the outcome; resumes from `checkpoint` if that folder holds one."""
    if save_every < 1:
        raise ConfigError(f"save_every: expected 1 or more epochs, got {save_every}")
    links = _read_links(links_file)
    ScalarWriter(board)  # refuses a missing package before ranks start
    _make_parent(history_file)
    # Built here: the ranks' processes lack policies that were registered from outside.
    policy, settings = config.policy.build()
    settings |= {"seed": config.seed, "links": links}
    args = (folder, config, policy, settings, checkpoint, save_every, board, is_progress_hidden())
    history = _run(_num_parts(folder), _train_in_rank, *args)[0]
    if history is None:
        return None
    last = history.evaluated_at[-1]
    accuracy = {split: scores[-1] for split, scores in history.accuracy.items()}
    scores = ", ".join(
        f"{split} {'has no nodes' if score is None else f'{score:.4f}'}"
        for split, score in accuracy.items()
    )
    seconds = history.seconds_by_phase()
    phases = ", ".join(f"{p} {s:.1f} s" for p, s in seconds.items())
    if history_file is not None:
        write_atomically(history_file, json.dumps(history.to_json()))
    record = {"epoch": last, "accuracy": accuracy, "seconds": seconds}
    return record, f"epoch {last}: {scores}\nrank 0: {phases}"


def _train_in_rank(
    folder: Path,
    config: RunConfig,
    policy: Policy,
    settings: dict[str, Any],
    checkpoint: Path | None,
    save_every: int,
    board: Path | None,
    is_quiet: bool,
) -> History | None:
    dg = load(folder)
    torch.manual_seed(config.seed)
    model = config.model.build(dg)
    is_first = dg.rank == 0 and not is_quiet
    with (
        dg.messages(policy, **settings),
        show_progress("training", config.epochs, is_shown=is_first) as progress,
        ScalarWriter(board if dg.rank == 0 else None) as scalars,
    ):
        optimizer = torch.optim.Adam(model.parameters(), config.lr)

        def on_epoch(history: History) -> None:
            progress.advance(1, _describe_epoch(history))
            _write_epoch(scalars, history)

        trainer = Trainer(dg, model, optimizer, seed=config.seed, on_epoch=on_epoch)
        if checkpoint is not None and _has_checkpoint(checkpoint):
            with show_resumed("adaqp"):
                trainer.resume(checkpoint)
            progress.reach(trainer.epoch)
        while trainer.epoch < config.epochs:
            left = config.epochs - trainer.epoch
            trainer.fit(min(save_every, left) if checkpoint else left, config.eval_every)
            if checkpoint is not None:
                trainer.save(checkpoint, {"config": asdict(config)})
        if trainer.epoch not in trainer.history.evaluated_at:
            trainer.record_evaluation()
            _write_accuracy(scalars, trainer.history)
    return trainer.history if dg.rank == 0 else None


def _has_checkpoint(folder: Path) -> bool:
    from adaqp.training.checkpoint import find  # DCP takes most of a second to import

    return find(folder) is not None


def _write_epoch(scalars: ScalarWriter, history: History) -> None:
    found: dict[str, float] = {"loss": history.loss[-1], "bytes": history.bytes[-1]}
    found |= {f"seconds/{phase}": values[-1] for phase, values in history.seconds.items()}
    scalars.write(len(history.loss), found)
    if history.evaluated_at[-1:] == [len(history.loss)]:
        _write_accuracy(scalars, history)


def _write_accuracy(scalars: ScalarWriter, history: History) -> None:
    newest = {split: values[-1] for split, values in history.accuracy.items()}
    scores = {f"accuracy/{split}": score for split, score in newest.items() if score is not None}
    scalars.write(history.evaluated_at[-1], scores)


def _describe_epoch(history: History) -> str:
    seconds = sum(phase[-1] for phase in history.seconds.values())
    num_bytes = history.bytes[-1] / 1e6
    return f"training: loss {history.loss[-1]:.4f}, {seconds:.2f} s and {num_bytes:.1f} MB an epoch"


# -- predict --------------------------------------------------------------------------------


def predict_classes(
    folder: Path, checkpoint: Path, nodes: Path | None, out: Path
) -> tuple[dict[str, Any], str] | None:
    """Scores nodes by a checkpoint and writes a table; says on the first rank where it is."""
    from adaqp.partitioning.partitioner import NODES
    from adaqp.training.checkpoint import read_about
    from adaqp.training.predictions import read_wanted, tabulate

    check_output(out, [path for path in (nodes, folder / NODES) if path is not None])
    about = read_about(checkpoint)
    if "config" not in about:
        raise DataError(
            f"{checkpoint}: expected the model's settings in the checkpoint, there are none; save one "
            "by `adaqp train --checkpoint`"
        )
    config = RunConfig.from_json(about["config"])
    meta = _read_meta(folder)
    wanted = read_wanted(folder, meta["num_nodes"], nodes)  # before the ranks start
    outcome = _run(meta["parts"], _predict_in_rank, folder, config.model, checkpoint)[0]
    if outcome is None:
        return None
    table = tabulate(wanted, *outcome)
    write_frame(table, out)
    num_unknown = int(wanted.is_unknown.sum())
    num_scored = len(table) - num_unknown
    lines = [f"scores of {num_scored:,} nodes: {out}"]
    if num_unknown:
        lines.append(f"rows without a score, as the graph lacks their ids: {num_unknown:,}")
    record = {"num_scored": num_scored, "num_unknown": num_unknown, "out": str(out)}
    return record, "\n".join(lines)


def _predict_in_rank(
    folder: Path, model: ModelConfig, checkpoint: Path
) -> tuple[torch.Tensor, bool] | None:
    """On rank 0 the probabilities of all nodes, and whether a node may have several classes."""
    dg = load(folder)
    built = model.build(dg)
    with dg.messages(Exact()):
        # Nothing is trained, but a trainer wants an optimizer.
        trainer = Trainer(dg, built, torch.optim.SGD(built.parameters(), 0.0))
        trainer.load_weights(checkpoint)
        logits = trainer.predict().float()
    is_multilabel = bool(dg.meta["multilabel"])
    mine = logits.sigmoid() if is_multilabel else logits.softmax(1)
    ids = dg.part.global_ids[:, None]
    if dg.group is not None:
        device = dg.group.device
        ids, mine = (torch.cat(all_gather_v(dg.group, one.to(device))).cpu() for one in (ids, mine))
    scores = torch.empty(dg.meta["num_nodes"], mine.shape[1])
    scores[ids[:, 0].cpu()] = mine.cpu()
    return (scores, is_multilabel) if dg.rank == 0 else None


# -- bench ----------------------------------------------------------------------------------


def bench(
    folder: Path,
    model: ModelConfig,
    policies: list[PolicyConfig],
    epochs: int,
    rate: str | None,
) -> _Found | None:
    """Times policies against the first of them and returns a table."""
    if epochs < 1 or not policies:
        raise ConfigError(f"bench needs an epoch and a policy, got {epochs} and {len(policies)}")
    blocks = -(-epochs // 3)
    timings: list[Timing] = _run(
        _num_parts(folder), compare_in_rank, str(folder), model, policies, blocks, rate=rate
    )[0]
    if int(os.environ.get("RANK", "0")):
        return None
    phases = ("compute", "quantise", "wait", "reduce")
    table = Table(box=SIMPLE_HEAD)
    for name in ("policy", "epoch s", "min - max", "ratio", "MB", " + ".join(phases) + " s"):
        table.add_column(name, no_wrap=name == "policy")
    rows = []
    for timing in timings:
        rows.append(
            {
                "policy": timing.policy.label,
                "epoch_s": timing.epoch_s,
                "num_bytes": timing.num_bytes,
                "seconds": {phase: timing.seconds[phase] for phase in phases},
            }
        )
        table.add_row(
            timing.policy.label,
            f"{timing.median_s:.3f}",
            f"{min(timing.epoch_s):.3f} - {max(timing.epoch_s):.3f}",
            f"{timings[0].median_s / timing.median_s:.2f}",
            f"{timing.num_bytes / 1e6:.1f}",
            " + ".join(f"{timing.seconds[p]:.3f}" for p in phases),
        )
    return {"policies": rows}, draw_table(table)


# -- plan and probe -------------------------------------------------------------------------


def plan(
    folder: Path, model: ModelConfig, rate: str | None, links_file: Path | None, latency_ms: float
) -> _Found | None:
    """Predicts an epoch under each policy and returns a table."""
    num_parts = _num_parts(folder)
    if num_parts == 1:
        raise DataError(f"{folder}: expected 2 or more parts, got 1; cut the graph into more parts")
    links = _read_links(links_file)
    if links is None and rate is not None:
        links = LinkTable.uniform(num_parts, parse_rate(rate), latency_ms / 1e3)
    outcome = _run(num_parts, profile_in_rank, str(folder), model, links is None)
    profiles, probed = outcome[0]
    if int(os.environ.get("RANK", "0")):
        return None
    links = links or probed
    table = Table(
        "policy", "epoch s", "compute s", "quantise s", "wait s", "MB", "bits", box=SIMPLE_HEAD
    )
    rows = []
    for policy in _planned_policies():
        built, settings = policy.build()
        guess = predict(profiles, links, built, overlap=settings["overlap"])
        rows.append(
            {
                "policy": policy.label,
                "epoch_s": guess.epoch_s,
                "seconds": dict(guess.seconds),
                "num_bytes": guess.num_bytes,
                "mean_bits": guess.mean_bits,
            }
        )
        table.add_row(
            policy.label,
            f"{guess.epoch_s:.3f}",
            *[f"{guess.seconds[p]:.3f}" for p in ("compute", "quantise", "wait")],
            f"{guess.num_bytes / 1e6:.1f}",
            f"{guess.mean_bits:.1f}",
        )
    return {"policies": rows}, draw_table(table)


def _planned_policies() -> Iterator[PolicyConfig]:
    """Every policy except controls; one-width policies at each of the adaptive policy's widths."""
    for name in POLICIES:
        kind = POLICIES.get(name)
        if kind.has_width:
            yield from (PolicyConfig(name=name, width=b) for b in reversed(PolicyConfig().bits))
        elif not kind.is_control:
            yield PolicyConfig(name=name)


def profile_in_rank(
    folder: str, model: ModelConfig, probes: bool, overlap: str | None = "edges"
) -> tuple[list[Profile], LinkTable | None]:
    """Profiles of all ranks, and the link costs if they are to be probed."""
    dg = load(folder)
    torch.manual_seed(0)
    mine = measure(dg, model.build(dg), overlap=overlap)
    if dg.group is None:
        return [mine], None
    packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    everyone = all_gather_v(dg.group, packed.to(dg.group.device))
    profiles = [pickle.loads(one.cpu().numpy().tobytes()) for one in everyone]
    return profiles, probe(dg.group) if probes else None


def probe_links(
    ranks: int, out: Path | None, budget_s: float, fallback_rate: str | None
) -> _Found | None:
    """Probes the links, writes their costs, and returns a table of them."""
    if ranks < 2:
        raise ConfigError(f"ranks: expected 2 or more, got {ranks}; links join two ranks")
    _make_parent(out)
    links: LinkTable = _run(ranks, _probe_in_rank, budget_s, fallback_rate)[0]
    if int(os.environ.get("RANK", "0")):
        return None
    table = Table("from", "to", "Mbit/s", "latency us", "fit", box=SIMPLE_HEAD)
    for sender in range(len(links.s_per_byte)):
        for receiver in range(len(links.s_per_byte)):
            if sender == receiver:
                continue
            per_byte = links.s_per_byte[sender, receiver]
            table.add_row(
                str(sender),
                str(receiver),
                f"{8e-6 / per_byte:.1f}" if per_byte else "no cost seen",
                f"{links.latency_s[sender, receiver] * 1e6:.0f}",
                "clamped" if links.clamped[sender, receiver] else "good",
            )
    if out is not None:
        write_atomically(out, links.to_json())
    return json.loads(links.to_json()), draw_table(table)


def _probe_in_rank(budget_s: float, fallback_rate: str | None) -> LinkTable:
    fallback = None if fallback_rate is None else parse_rate(fallback_rate)
    return probe(Group.world(), budget_s=budget_s, fallback_bytes_per_s=fallback)


def _read_links(file: Path | None) -> LinkTable | None:
    if file is None:
        return None
    return LinkTable.from_json(read_text(file, "what `adaqp probe-links --out` writes"))
