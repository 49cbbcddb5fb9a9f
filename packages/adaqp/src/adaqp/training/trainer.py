"""Full-batch training: one step an epoch, gradients summed over ranks, exact evaluation.

The loss is the mean over all training nodes of the graph, so it does not depend on the number of
ranks. A checkpoint holds everything the next step depends on (weights, optimiser, widths, moving
averages, random state) and the history, so a resumed run has the same losses as an uninterrupted one.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import isnan, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adaqp.messages.clock import PHASES
from adaqp.messages.distgraph import DistGraph
from adaqp.planner.widths import AS_IS
from shared.comms import all_reduce, broadcast
from shared.errors import ConfigError, DivergenceError
from shared.training import check_loss, log_resumed

__all__ = ["History", "Trainer"]

SPLITS = ("train", "val", "test")
# Begin of the history's names in a checkpoint.
_HISTORY = "history."
# A prefix that no entry of a checkpoint has.
_NOTHING = "\0"

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class History:
    """Losses, bytes, seconds and accuracies of a training run.

    Attributes:
        loss: mean loss over training nodes before the update, one value per epoch.
        bytes: bytes this rank sent, one value per epoch, with gradients and assignments but
            without probing the links; a late message counts in the epoch in which it left.
        seconds: seconds by phase (compute, quantise, wait, reduce, assign, compile), one value per epoch.
        accuracy: accuracy by split (train, val, test), or micro F1 on multilabel graphs; one value
            per evaluation, None of a split without nodes.
        evaluated_at: number of epochs trained before each evaluation.
    """

    loss: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})
    accuracy: dict[str, list[float | None]] = field(default_factory=lambda: {s: [] for s in SPLITS})
    evaluated_at: list[int] = field(default_factory=list)

    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of all epochs by phase."""
        return {phase: sum(values) for phase, values in self.seconds.items()}

    def to_json(self) -> dict[str, Any]:
        """The history as plain lists and dictionaries."""
        return asdict(self)

    def to_tensors(self) -> dict[str, Tensor]:
        """The history as one tensor a list, by name, for `from_tensors`."""
        lists = {"loss": self.loss, "bytes": self.bytes, "evaluated_at": self.evaluated_at}
        lists |= {f"seconds.{phase}": values for phase, values in self.seconds.items()}
        for split, scores in self.accuracy.items():
            # A tensor has no None.
            lists[f"accuracy.{split}"] = [nan if score is None else score for score in scores]
        counts = ("bytes", "evaluated_at")
        return {
            name: torch.tensor(values, dtype=torch.int64 if name in counts else torch.float64)
            for name, values in lists.items()
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "History":
        """Makes the history that `to_tensors` was called on; of lists left out it has none."""
        history = cls()
        for name, tensor in tensors.items():
            field_name, _, key = name.partition(".")
            if key:
                values = [None if isnan(value) else value for value in tensor.tolist()]
                getattr(history, field_name)[key] = values
            else:
                setattr(history, field_name, tensor.tolist())
        return history


class Trainer:
    """Trains a model on the whole graph, all ranks together.

    Args:
        dg: this rank's share.
        model: module called with `dg.feat`; its weights are set to rank 0's.
        optimizer: optimiser of the model's parameters.
        loss: function of (logits, labels) that returns the sum over the given nodes; None: cross
            entropy for class labels, binary cross entropy for multilabel ones.
        seed: seed of dropout; each rank combines it with its number.
        on_epoch: called on every rank after each epoch with the history so far.

    Raises:
        ConfigError: the graph has no training node.
    """

    def __init__(
        self,
        dg: DistGraph,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss | None = None,
        seed: int = 0,
        on_epoch: Callable[[History], None] | None = None,
    ) -> None:
        self.dg, self.model, self.optimizer = dg, model, optimizer
        self.loss = loss or _default_loss(dg.label)
        self.on_epoch = on_epoch
        self.epoch = 0
        self.history = History()
        self._num_train = int(self._sum(dg.train_mask.sum().reshape(1)))
        if not self._num_train:
            raise ConfigError("no node of the graph is a training node; set train_mask")
        torch.manual_seed(seed * 10_007 + dg.rank)
        if dg.group is not None:
            for tensor in [*model.parameters(), *model.buffers()]:
                on_wire = tensor.data.to(dg.group.device)
                broadcast(dg.group, on_wire, 0)
                tensor.data.copy_(on_wire)

    def fit(self, epochs: int, eval_every: int = 0) -> History:
        """Trains for `epochs` more epochs.

        Args:
            epochs: steps to take; each uses every training node once.
            eval_every: epochs between exact evaluations of all splits; 0: never.

        Returns:
            The history since the first epoch, those before a `resume` included.

        Raises:
            CommError: a peer died or sent nothing within the timeout.
            DivergenceError: the loss or a quantised message is not finite.
        """
        for _ in range(epochs):
            try:
                self._step()
            except DivergenceError as error:
                raise DivergenceError(f"epoch {self.epoch + 1}: {error}") from error
            if eval_every and self.epoch % eval_every == 0:
                self.record_evaluation()
            if self.on_epoch:
                self.on_epoch(self.history)
        return self.history

    def _step(self) -> None:
        dg, messages = self.dg, self.dg.current_messages
        sent_before = self.sent_bytes()
        with messages.clock.step():
            self.model.train()
            self.optimizer.zero_grad(set_to_none=False)
            logits = self.model(dg.feat)
            mask = dg.train_mask
            # Without local training nodes the loss is an empty sum; the exchanges still take place.
            local = self.loss(logits[mask], dg.label[mask]) / self._num_train
            (local + 0 * logits.sum()).backward()
            with messages.clock.phase("reduce"):
                loss = self._reduce_gradients(local.detach())
            check_loss(loss)
            self.optimizer.step()
        self.epoch += 1
        self.history.loss.append(loss)
        for phase, seconds in messages.clock.take().items():
            self.history.seconds[phase].append(seconds)
        self.history.bytes.append(self.sent_bytes() - sent_before)

    def sent_bytes(self) -> int:
        """Bytes this rank has sent so far, without those that probed the links."""
        if self.dg.group is None:
            return 0
        by_phase = self.dg.group.ledger.snapshot().by_phase()
        return sum(cell.sent_bytes for phase, cell in by_phase.items() if phase != "probe")

    def _reduce_gradients(self, loss: Tensor) -> float:
        """Sums gradients and loss over ranks, in one message; returns the loss."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in params if p.grad is not None]
        # Half types are summed in float32, so that no rank's share is rounded away.
        wide = torch.promote_types(torch.float32, loss.dtype)
        flat = torch.cat([part.flatten().to(wide) for part in (loss, *grads)])
        flat = self._sum(flat)
        start = 1
        for grad in grads:
            grad.copy_(flat[start : start + grad.numel()].view_as(grad))
            start += grad.numel()
        return float(flat[0])

    def _sum(self, tensor: Tensor) -> Tensor:
        if self.dg.group is None:
            return tensor
        on_wire = tensor.to(self.dg.group.device)
        all_reduce(self.dg.group, on_wire)
        return on_wire.to(tensor.device)

    def predict(self, *, bits: int = AS_IS) -> Tensor:
        """Logits of this rank's rows, computed over the whole graph, [num_local, num_classes].

        Args:
            bits: width of the messages; 32 is exact, 0 sends nothing.
        """
        self.model.eval()
        with torch.no_grad(), self.dg.current_messages.evaluation(bits):
            return self.model(self.dg.feat)

    def evaluate(self) -> dict[str, float | None]:
        """Accuracy (micro F1 for multilabel graphs) of train, val and test, over all ranks.

        A split without nodes has None.
        """
        logits = self.predict()
        masks = [getattr(self.dg, f"{split}_mask") for split in SPLITS]
        tallies = torch.stack([_tally(logits[m], self.dg.label[m]) for m in masks])
        num_nodes = torch.tensor([[int(mask.sum())] for mask in masks])
        counts = self._sum(torch.cat([tallies, num_nodes], 1).double()).tolist()
        return {
            split: right / max(total, 1) if count else None
            for split, (right, total, count) in zip(SPLITS, counts, strict=True)
        }

    def record_evaluation(self) -> None:
        """Runs `evaluate()` and adds the result to the history."""
        for split, score in self.evaluate().items():
            self.history.accuracy[split].append(score)
        self.history.evaluated_at.append(self.epoch)

    def save(self, folder: str | Path, notes: Mapping[str, Any] | None = None) -> None:
        """Writes a DCP checkpoint, which replaces `folder` only when it is complete.

        All ranks call it together; `folder` must be one they all see.

        Args:
            folder: folder to write.
            notes: values for JSON that go into the checkpoint's about.json.

        Raises:
            OSError: the folder cannot be written.
        """
        from adaqp.training import checkpoint

        about = dict(notes or {}) | self._run_identity() | {"epoch": self.epoch}
        checkpoint.save(
            Path(folder), self._shared_state() | self._own_state(), about, self.dg.group
        )

    def load_weights(self, folder: str | Path) -> None:
        """Takes the weights alone from a checkpoint of `save`, whatever its policy was.

        Raises:
            DataError: no checkpoint there, or one of another graph or partition.
        """
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            set_model_state_dict,
        )

        from adaqp.training import checkpoint

        state = {"model": get_model_state_dict(self.model)}
        identity = {name: self._run_identity()[name] for name in ("fingerprint", "parts")}
        checkpoint.load(Path(folder), state, identity, _NOTHING, self.dg.group)
        set_model_state_dict(self.model, state["model"])

    def resume(self, folder: str | Path) -> None:
        """Resumes from a checkpoint of `save` with the same graph, partition, model and policy.

        Raises:
            DataError: no checkpoint there, or one of another graph, partition, policy or model.
        """
        from torch.distributed.checkpoint.state_dict import (
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        from adaqp.training import checkpoint

        state = self._shared_state()
        about = checkpoint.load(
            Path(folder), state, self._run_identity(), self._own_prefix, self.dg.group
        )
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        own = {
            name.removeprefix(self._own_prefix): tensor
            for name, tensor in state.items()
            if name.startswith(self._own_prefix)
        }
        torch.set_rng_state(own.pop("rng"))
        device = self.dg.device
        device_rng = own.pop("device_rng", None)
        if device_rng is not None and device.type == "cuda":
            torch.cuda.set_rng_state(device_rng, device)
        self.history = History.from_tensors(
            {
                name.removeprefix(_HISTORY): own.pop(name)
                for name in list(own)
                if name.startswith(_HISTORY)
            }
        )
        self.dg.current_messages.load_state_dict({k: v.to(device) for k, v in own.items()})
        self.epoch = about["epoch"]
        if not self.dg.rank:
            log_resumed(self.epoch, folder)

    @property
    def _own_prefix(self) -> str:
        return f"rank{self.dg.rank}."

    def _run_identity(self) -> dict[str, Any]:
        """Properties that a resumed run must share with the run that saved."""
        messages = self.dg.current_messages
        return {
            "fingerprint": self.dg.meta["fingerprint"],
            "parts": self.dg.num_parts,
            "policy": f"{messages.policy} {messages.wire_dtype} seed {messages.seed}",
            "backward": "pull" if messages.pulls else "push",
        }

    def _shared_state(self) -> dict[str, Any]:
        """Weights and optimiser, equal on all ranks."""
        # Importing DCP takes most of a second.
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def _own_state(self) -> dict[str, Tensor]:
        """Widths, moving averages, late messages, random state and history of this rank."""
        own = self.dg.current_messages.state_dict() | {"rng": torch.get_rng_state()}
        history = self.history.to_tensors()
        own |= {f"{_HISTORY}{name}": tensor for name, tensor in history.items() if len(tensor)}
        if self.dg.device.type == "cuda":
            own["device_rng"] = torch.cuda.get_rng_state(self.dg.device)
        return {f"{self._own_prefix}{name}": tensor.cpu() for name, tensor in own.items()}


def _default_loss(label: Tensor) -> Loss:
    if label.ndim == 1:
        return lambda logits, target: F.cross_entropy(logits, target, reduction="sum")
    return lambda logits, target: (
        F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="sum")
        / target.shape[1]
    )


def _tally(logits: Tensor, label: Tensor) -> Tensor:
    """Numerator and denominator of accuracy, or of micro F1, so that ranks' shares add up."""
    if label.ndim == 1:
        return torch.tensor([int((logits.argmax(1) == label).sum()), len(label)])
    predicted, true = logits > 0, label > 0.5
    return torch.stack([2 * (predicted & true).sum(), predicted.sum() + true.sum()]).cpu()
