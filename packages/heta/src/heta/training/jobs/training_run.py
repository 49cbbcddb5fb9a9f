"""The work of `heta train`: epochs, scores and checkpoints on every rank.

A run's folder has `state`, the newest checkpoint, and `run.json`, its settings and the epochs so far,
which is written after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from heta.config import TrainConfig
from heta.graph.part import Part, load
from heta.nn.registry import build_model
from heta.rows.cache import Cache
from heta.rows.optimizers import RowAdagrad, RowAdam
from heta.training.jobs.launch import run_in_ranks
from heta.training.trainer import Trainer
from shared.comms import Group
from shared.errors import ConfigError, DataError
from shared.files import read_json, write_atomically
from shared.kernels.philox import stream_key
from shared.training import check_device, show_resumed
from shared.training.progress import hidden_progress, is_progress_hidden

__all__ = ["STATE", "Epoch", "make_trainer", "read_run", "train"]

STATE, _RUN = "state", "run.json"
_FREE = ("epochs", "device", "cache")
"""Settings that may differ where a run goes on."""

# An epoch's numbers by name: "epoch", "loss", "seconds", "sent_bytes", and of validation.
Epoch = dict[str, Any]


def train(
    folder: str,
    config: TrainConfig,
    checkpoint: Path | None,
    num_ranks: int,
    on_epoch: Callable[[Epoch], None],
) -> tuple[list[Epoch], dict[str, Any] | None] | None:
    """Trains, saving after each epoch, and resumes where an earlier run of the same settings stopped.

    Args:
        folder: the parts.
        config: the settings.
        checkpoint: the run's folder; None saves nothing.
        num_ranks: ranks to start where torchrun has started none.
        on_epoch: called on the first rank after each epoch; defined at the top level of a file.

    Returns:
        All epochs, and the scores of the split "test" if there is one; None on ranks of torchrun's
        other than the first.

    Raises:
        ConfigError: settings do not fit the parts, or are not those of the run to resume.
        DataError: there are no parts, or no labelled nodes.
        CommError: a rank died.
    """
    if checkpoint is not None and (checkpoint / _RUN).exists():
        _check_same(checkpoint, config)
    args = (folder, config, checkpoint, on_epoch, is_progress_hidden())
    return run_in_ranks(num_ranks, _train_in_rank, *args)


def _check_same(checkpoint: Path, config: TrainConfig) -> None:
    """Refuses other settings than those of the run, but for those that change no step."""
    before, wanted = asdict(read_run(checkpoint)[0]), asdict(config)
    for name, value in wanted.items():
        if name not in _FREE and value != before[name]:
            raise ConfigError(
                f"{name}: expected {before[name]!r}, with which {checkpoint} was begun, got {value!r}; "
                "use that, or another folder as --checkpoint"
            )


def read_run(checkpoint: Path) -> tuple[TrainConfig, list[Epoch]]:
    """Reads the settings and the epochs of a run's folder.

    Raises:
        DataError: the folder has no run.
    """
    about = read_json(checkpoint / _RUN, "a run that `heta train --checkpoint` saved")
    try:
        return TrainConfig.from_mapping(about["config"], str(checkpoint)), about["epochs"]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{checkpoint / _RUN}: expected config and epochs, got {error!r}; it is of another program"
        ) from error


def make_trainer(part: Part, config: TrainConfig) -> Trainer:
    """Makes model and trainer over a part; the caller closes it.

    Raises:
        ConfigError: settings do not fit the part.
        DataError: the graph has no labels, or ranks hold parts of different plans.
    """
    device = _choose_device(config.device)
    torch.manual_seed(config.seed)
    rules = {"adam": RowAdam, "adagrad": RowAdagrad}
    trainer = Trainer(
        part,
        build_model(config.model, part).to(device),
        config.fanouts,
        config.batch_size,
        optimizer=lambda parameters: torch.optim.Adam(parameters, config.lr),
        rows=rules[config.row_rule](lr=config.row_lr),
        cache=None if config.cache is None else Cache(config.cache),
        wire=config.wire,
        seed=config.seed,
    )
    if trainer.num_replicas > 1:
        # Replicas should not drop the same entries.
        torch.manual_seed(stream_key(config.seed, trainer.replica) >> 1)
    return trainer


def _choose_device(name: str) -> torch.device:
    """The device of a name, made the current one; "cuda" deals this machine's GPUs out to its ranks."""
    check_device("device", name)
    device = torch.device(name)
    if device.type == "cuda":
        if device.index is None:
            rank = Group.world().rank if Group.exists() else 0
            local_rank = int(os.environ.get("LOCAL_RANK", rank))
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def _train_in_rank(
    folder: str,
    config: TrainConfig,
    checkpoint: Path | None,
    on_epoch: Callable[[Epoch], None],
    is_quiet: bool,
) -> tuple[list[Epoch], dict[str, Any] | None]:
    part = load(folder)
    trainer = make_trainer(part, config)
    is_first = trainer.group is None or trainer.group.rank == 0
    epochs: list[Epoch] = []
    try:
        if checkpoint is not None and (checkpoint / STATE).exists():
            with show_resumed("heta"):
                trainer.load(checkpoint / STATE)
            if (checkpoint / _RUN).exists():
                epochs = read_run(checkpoint)[1][: trainer.epoch]
        with hidden_progress(is_quiet):
            while trainer.epoch < config.epochs:
                report = trainer.fit_epoch()
                epoch = {
                    "epoch": report.epoch + 1,
                    "loss": report.loss,
                    "seconds": report.seconds,
                    "sent_bytes": report.sent_bytes,
                    "val": _score(trainer, "val"),
                }
                epochs.append(epoch)
                if checkpoint is not None:
                    _save(trainer, checkpoint, config, epochs, is_first=is_first)
                if is_first:
                    on_epoch(epoch)
        return epochs, _score(trainer, "test")
    finally:
        trainer.close()


def _score(trainer: Trainer, split: str) -> dict[str, Any] | None:
    """The scores of a split; None if no labelled node is in it."""
    if split not in trainer.part.masks or not len(trainer.part.seeds(split)):
        return None
    return asdict(trainer.evaluate(split))


def _save(
    trainer: Trainer, checkpoint: Path, config: TrainConfig, epochs: list[Epoch], *, is_first: bool
) -> None:
    if is_first:
        checkpoint.mkdir(parents=True, exist_ok=True)
    trainer.save(checkpoint / STATE)
    if is_first:
        about = {"config": json.loads(config.to_json()), "epochs": epochs}
        write_atomically(checkpoint / _RUN, json.dumps(about, indent=1) + "\n")
