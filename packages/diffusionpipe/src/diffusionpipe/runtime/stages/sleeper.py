"""A device that only takes time: what it computes is slept, and values have their sizes alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diffusionpipe.job.layers import OUTPUT
from diffusionpipe.planner.plan import Plan
from diffusionpipe.planner.traffic import Rows
from diffusionpipe.profiler.job_profile import JobProfile
from diffusionpipe.runtime.instructions import StageFlow
from shared.comms import Group
from shared.comms.collectives import Reduction, start_all_reduce

__all__ = ["VirtualCompute", "sleep_until"]

_MOST_OVERSLEPT_S = 1e-3
"""Timers are late by a tenth of this; what is longer is a machine that is busy."""


class VirtualCompute:
    """Takes the time that a rank's actions would take, and returns values of their sizes."""

    def __init__(
        self,
        plan: Plan,
        profile: JobProfile,
        stages: Sequence[StageFlow],
        own_stages: Sequence[int],
        groups: Mapping[int, Group],
    ) -> None:
        """Takes a rank's stages.

        Args:
            plan: plan.
            profile: seconds and bytes.
            stages: all virtual stages.
            own_stages: those of this rank.
            groups: by stage, ranks that hold it, of this rank's stages that others hold too.
        """
        self._profile, self._stages, self._groups = profile, stages, groups
        self._bucket_bytes = plan.bucket_bytes
        self._reductions: list[Reduction] = []
        self._overslept_s = 0.0
        self._step_s = profile.step_s_per_byte * sum(
            count
            for stage in own_stages
            for count in profile.chains[stages[stage].backbone].gradient_bytes[
                stages[stage].first : stages[stage].stop
            ]
        )

    def is_prepared(self, micro_batch: int, *, is_estimate: bool) -> bool:
        """Never: so that frozen outputs are waited for at each stage that reads inputs."""
        return False

    def prepare(
        self, micro_batch: int, samples: Rows, frozen: Mapping[str, Tensor], *, is_estimate: bool
    ) -> None:
        """Takes no time, as in a profile."""

    def forward(
        self, stage: int, micro_batch: int, samples: Rows, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Sleeps as long as a stage's layers would run."""
        flow, num_rows = self._stages[stage], samples[1] - samples[0]
        chain = self._profile.chains[flow.backbone]
        rows = chain.forward_s[flow.first : flow.stop]
        self._sleep(sum(self._profile.seconds(row, num_rows) for row in rows))
        return {key: make_value(num_rows, chain.value_bytes[key]) for key in flow.exports}

    def estimate(
        self, stage: int, micro_batch: int, samples: Rows, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Sleeps as for a forward pass; the last stage returns the backbone's output too."""
        exports = self.forward(stage, micro_batch, samples, values)
        flow, num_rows = self._stages[stage], samples[1] - samples[0]
        if flow.is_last:
            row_bytes = self._profile.chains[flow.backbone].value_bytes[OUTPUT]
            exports[OUTPUT] = make_value(num_rows, row_bytes)
        return exports

    def backward(
        self,
        stage: int,
        micro_batch: int,
        samples: Rows,
        gradients: Mapping[str, Tensor],
        *,
        is_final: bool,
    ) -> dict[str, Tensor]:
        """Sleeps as long as a stage's layers would run backward, and starts full buckets."""
        flow, num_rows = self._stages[stage], samples[1] - samples[0]
        chain = self._profile.chains[flow.backbone]
        group = self._groups.get(stage) if is_final else None
        seconds, unsummed_bytes = 0.0, 0
        for layer in reversed(range(flow.first, flow.stop)):
            seconds += self._profile.seconds(chain.backward_s[layer], num_rows)
            unsummed_bytes += chain.gradient_bytes[layer]
            is_full = unsummed_bytes >= self._bucket_bytes or layer == flow.first
            if group is not None and is_full and unsummed_bytes:
                self._sleep(seconds)
                self._start_sum(stage, group, unsummed_bytes)
                seconds, unsummed_bytes = 0.0, 0
        self._sleep(seconds)
        keys = set(flow.imports) & set(chain.differentiable)
        return {key: make_value(num_rows, chain.value_bytes[key]) for key in keys}

    def flush(self, stage: int) -> None:
        """Nothing is left: a batch is never short here."""

    def encode(self, component: str, samples: Rows) -> dict[str, Tensor]:
        """Sleeps as long as a frozen component would run."""
        num_rows = samples[1] - samples[0]
        seconds = self._profile.seconds(self._profile.frozen_s[component], num_rows)
        self._sleep(seconds)
        names = self._profile.frozen_outputs[component]
        return {name: make_value(num_rows, self._profile.frozen_bytes[name]) for name in names}

    def wait(self) -> None:
        """Waits for all sums.

        Raises:
            CommError: a replica died or the timeout passed.
        """
        for reduction in self._reductions:
            reduction.wait()
        self._reductions.clear()

    def update(self) -> None:
        """Sleeps as long as an optimizer's step would take."""
        self._sleep(self._step_s)

    def _sleep(self, seconds: float) -> None:
        """Sleeps; by how much a sleep was too long, but for stalls, the next one is shorter."""
        until_s = time.perf_counter() + seconds - self._overslept_s
        sleep_until(until_s)
        self._overslept_s = min(time.perf_counter() - until_s, _MOST_OVERSLEPT_S)

    def _start_sum(self, stage: int, group: Group, num_bytes: int) -> None:
        flat = torch.zeros(max(num_bytes // 4, 1))
        with group.ledger.phase(f"gradients of stage {stage}"):
            self._reductions.append(start_all_reduce(group, flat))


def make_value(num_rows: int, row_bytes: int) -> Tensor:
    """Returns a value of so many bytes a row, whose memory is not touched."""
    return torch.empty(num_rows, row_bytes, dtype=torch.uint8)


def sleep_until(moment_s: float) -> None:
    """Sleeps until a moment of the performance counter."""
    remaining_s = moment_s - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)
