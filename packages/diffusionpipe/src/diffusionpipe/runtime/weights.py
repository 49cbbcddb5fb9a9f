"""Which rank keeps which of a job's weights: those that it computes with, and no others.

Every rank begins with the whole job, which the checks before step 0 run. Then the weights of stages on
other ranks, and of frozen functions that other ranks run, give their memory back: a rank needs what
its plan says. In place of such a weight stands one NaN, seen in its shape, so that a use of it would be
noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from diffusionpipe.job.checks.rows import find_parameters
from diffusionpipe.job.draws import Draw
from diffusionpipe.job.job import Batch, Job
from diffusionpipe.planner.plan import Plan
from diffusionpipe.runtime.shapes import pack, unpack
from shared.comms import Group, gather_v
from shared.errors import ConfigError

__all__ = ["WeightShares", "is_freed"]


class WeightShares:
    """A job's weights by name, and the ranks that need them.

    Attributes:
        trained: by virtual stage, names of the weights that it trains, in the order of its layers.
    """

    def __init__(self, job: Job, plan: Plan) -> None:
        """Takes the weights of the backbones' layers.

        Raises:
            ConfigError: the plan has more backbones than the job, or weights were given away before.
        """
        self._job, self._plan = job, plan
        self._weights: dict[str, nn.Parameter] = {}
        self._needed: list[set[str]] = [set() for _ in range(plan.num_ranks)]
        self.trained: list[list[str]] = []
        for stage, ranks in enumerate(plan.devices):
            own = self._list_weights(stage)
            self._weights |= own
            self.trained.append([name for name, weight in own.items() if weight.requires_grad])
            for rank in ranks:
                self._needed[rank].update(own)
        _check_present(self._weights)

    def add_frozen(self, batch: Batch) -> None:
        """Adds the weights of frozen functions, which some rows of a batch find.

        Raises:
            ConfigError: weights of one were given away before.
        """
        draw = Draw(0, 0, range(self._job.num_samples(batch)))
        for component in self._job.components:
            used = find_parameters(self._job.list_functions(component), batch, draw)
            weights = [weight for own in used.values() for weight in own]
            named = {f"{component}: {index}": weight for index, weight in enumerate(weights)}
            _check_present({f"frozen[{n!r}]": w for n, own in used.items() for w in own})
            self._weights |= named
            for needed, order in zip(self._needed, self._plan.order, strict=True):
                if any(action.name == component for action in order if action.kind == "encode"):
                    needed.update(named)

    def free(self, rank: int) -> None:
        """Gives the memory of weights back that a rank does not need; their shapes stay."""
        needed = {id(self._weights[name]) for name in self._needed[rank]}
        for weight in self._weights.values():
            if id(weight) not in needed and weight.numel() > 1:
                value = torch.nan if weight.is_floating_point() else 0
                single = torch.full((1,), value, dtype=weight.dtype, device=weight.device)
                weight.data, weight.grad = single.expand(weight.shape), None

    @torch.no_grad()
    def gather(self, group: Group | None) -> None:
        """Copies to rank 0 the weights that other ranks have and it does not need; every rank calls it.

        Args:
            group: all ranks, for CPU tensors; None in one process, where all weights lie already.

        Raises:
            CommError: another rank died.
        """
        if group is None:
            return
        gathered = set(self._needed[0])
        # A rank's weights after another's, so that rank 0 has room for them and one message.
        for rank in range(1, len(self._needed)):
            # The types with the most bytes first, as `unpack` wants it.
            names = sorted(
                self._needed[rank] - gathered,
                key=lambda name: (-self._weights[name].element_size(), name),
            )
            gathered.update(names)
            mine = [self._weights[name].detach().cpu() for name in names if rank == group.rank]
            received = gather_v(group, pack([torch.empty(0, dtype=torch.uint8), *mine]))
            if received is not None:
                self._take(names, received[rank])

    def _take(self, names: Sequence[str], payload: Tensor) -> None:
        layout = [(tuple(self._weights[name].shape), self._weights[name].dtype) for name in names]
        for name, value in zip(names, unpack(payload, layout), strict=True):
            # A copy: files of weights want tensors with memory of their own.
            self._weights[name].data = value.clone().to(self._weights[name].device)

    def _list_weights(self, stage: int) -> dict[str, nn.Parameter]:
        """A stage's weights by the names of `Job.trained`, in the order of its layers."""
        chains, backbone = self._job.chains, self._plan.backbones[stage]
        if backbone >= len(chains):
            raise ConfigError(
                f"plan.backbones: expected at most {len(chains)} backbones, got stage {stage} of "
                f"backbone {backbone}; make the plan from this job"
            )
        prefix = f"{backbone}." if len(chains) > 1 else ""
        # A plan for another job is refused when its stages are cut.
        first, stop = self._plan.spans[stage]
        return {
            f"{prefix}{name}": weight
            for layer in range(first, min(stop, len(chains[backbone])))
            for name, weight in chains[backbone].list_parameters(layer).items()
        }


def is_freed(weight: Tensor) -> bool:
    """Whether a weight has given its memory back."""
    return weight.untyped_storage().nbytes() < weight.nbytes


def _check_present(weights: Mapping[str, Tensor]) -> None:
    missing = [name for name, weight in weights.items() if is_freed(weight)]
    if missing:
        raise ConfigError(
            f"job: expected all weights before step 0, got none of {', '.join(missing[:3])}: an "
            "engine before this one has given them to other ranks; make each engine of a job of "
            "its own, with its own model and frozen parts"
        )
