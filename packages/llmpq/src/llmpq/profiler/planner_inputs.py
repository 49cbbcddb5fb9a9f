"""Everything that a plan is made from, read and measured: model, devices, prompts, sensitivity."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmpq.config import ModelSpec, Quality, Workload
from llmpq.data import read_prompts, tokenise
from llmpq.planner.candidates import Candidates
from llmpq.planner.costs import FreeCosts
from llmpq.planner.explanation import PlanResult
from llmpq.planner.plan import Plan
from llmpq.planner.waves import cut_waves
from llmpq.profiler.cache import find_sensitivity
from llmpq.profiler.cluster_profile import profile_cluster
from llmpq.profiler.profile import Profile
from llmpq.profiler.sensitivity import divergence, predict, read_batches
from llmpq.runtime.layers import most_positions
from llmpq.runtime.loader import check_weights, count_own_head, load
from shared.comms import Group, tree
from shared.errors import ConfigError, MeshyardError
from shared.topology.cluster import Cluster

__all__ = ["PlannerInputs", "calibration_batches", "loss_of_plans", "measure_inputs"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannerInputs:
    """What `plan` and `plan_baseline` take.

    Attributes:
        given: model, profile, noise, workload and quality, the arguments by position.
        settings: widths, group size and dtype, the arguments by name.
        profile: of the cluster's devices, among `given` too.
        texts: token ids of all prompts.
    """

    given: tuple[ModelSpec, Profile, np.ndarray, Workload, Quality]
    settings: dict[str, Any]
    profile: Profile
    texts: list[list[int]]

    @property
    def noise(self) -> np.ndarray:
        """Expected loss of quality, in nats a token [layer, width]."""
        return self.given[2]

    @property
    def planned_texts(self) -> list[list[int]]:
        """Token ids of the prompts of the planned batch, the longest first."""
        workload = self.given[3]
        usable = [ids for ids in self.texts if len(ids) <= workload.prompt_tokens]
        return sorted(usable, key=len, reverse=True)[: workload.num_prompts]

    def plan_by(self, make: Callable[..., PlanResult], noise: np.ndarray) -> PlanResult:
        """Calls `plan` or `plan_baseline` with these inputs, and this noise in place of what was measured."""
        return make(*self.given[:2], noise, *self.given[3:], **self.settings)


def measure_inputs(
    model: str | Path,
    cluster: str | Path,
    prompts: str | Path,
    *,
    bits: Sequence[int],
    group_size: int,
    dtype: str,
    activations: str = "float",
    max_kl: float | None,
    num_prompts: int,
    new_tokens: int,
    profiles: str | Path,
    force: bool = False,
    on_progress: Callable[[str], None] = lambda what: None,
) -> PlannerInputs | None:
    """Reads model, cluster and prompts, and measures devices and sensitivity where that is missing.

    Every rank of the world calls it alike, if there is a world: see `profile_cluster`.

    Args:
        model: folder of a Hugging Face model.
        cluster: YAML file of hosts, devices and links; read on rank 0.
        prompts: JSON Lines, see `read_prompts`; read on rank 0.
        bits: widths to choose from.
        group_size: columns that share a scale.
        dtype: of activations, and of weights of 16 bits.
        activations: "int8" lets products round activations to 8 bits where that is fastest; what it
            costs is measured then, and part of a width's noise.
        max_kl: highest expected loss in nats a token; None for no limit.
        num_prompts: prompts in a batch, at most.
        new_tokens: tokens of each answer.
        profiles: folder of measurements.
        force: take measurements that another torch or processor gave.
        on_progress: called with what is being measured.

    Returns:
        What a plan is made from, on rank 0; None elsewhere.

    Raises:
        ConfigError: a file or setting is not as expected, or a device's profile is missing.
        DataError: the prompts are none, or a tensor of the model is not as it has to be.
        InfeasiblePlan: the model does not fit in the devices' memory.
    """
    spec, quality = ModelSpec.from_hf(model), Quality(max_kl=max_kl)
    described, texts, num_own_head_weights = _on_first_rank(
        lambda: _read_inputs(model, cluster, prompts)
    )
    spec = replace(spec, num_own_head_weights=num_own_head_weights)
    workload = _workload(list(map(len, texts)), num_prompts, new_tokens)
    longest, most = max(map(len, texts)), most_positions(model)
    if most is not None and longest + new_tokens > most:
        raise ConfigError(
            f"{model}: expected at most {most} tokens of prompt and answer, for which the model has "
            f"positions, got {longest} + {new_tokens}; shorten prompts or --new-tokens"
        )
    memory = [described.device(rank).memory_bytes for rank in range(described.num_ranks)]
    Candidates(
        model=spec, costs=FreeCosts(bits, memory), noise=np.zeros((spec.num_layers, len(bits))),
        workload=workload, quality=quality, bits=tuple(bits), group_size=group_size, dtype=dtype,
    ).check_memory()  # fmt: skip
    common: dict[str, Any] = {"bits": tuple(bits), "group_size": group_size}
    profile = profile_cluster(
        profiles, model, described, dtype=dtype, activations=activations, workload=workload,
        force=force,
        on_progress=lambda what: on_progress(f"measuring {what}"), **common,
    )  # fmt: skip
    if profile is None:
        return None
    on_progress("measuring sensitivity")
    text = calibration_batches(texts)
    noise = find_sensitivity(profiles, model, text, **common).noise
    in_8_bits = [
        width for width in common["bits"]
        if any(form == "int8" for one in profile.devices for _, form in one.forms.get(str(width), ()))
    ]  # fmt: skip
    if in_8_bits:
        on_progress("measuring what products in 8 bits cost")
        found = find_sensitivity(
            profiles, model, text, bits=in_8_bits, group_size=group_size, method="int8"
        )
        noise[:, [common["bits"].index(width) for width in in_8_bits]] += found.noise
    return PlannerInputs(
        given=(spec, profile, noise, workload, quality),
        settings=common | {"dtype": dtype},
        profile=profile,
        texts=texts,
    )


def loss_of_plans(
    model: str | Path,
    inputs: PlannerInputs,
    *,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Callable[[Plan], float]:
    """A function that rounds the model by a plan and measures its loss in nats a token.

    It holds what the unrounded model predicts, [tokens, vocabulary], and loads the whole model for each
    plan. The text is prompts between those that sensitivity was measured on.

    Args:
        model: folder of a Hugging Face model.
        inputs: what the plans are made from.
        on_progress: called with what is being measured.
    """
    batches = read_batches(calibration_batches(inputs.texts, between=True))
    expected: list[Tensor] = []

    def measure(plan: Plan) -> float:
        if not expected:
            on_progress("predicting with the unrounded model")
            expected.extend(
                predict(load(model, replace(plan, bits=(16,) * len(plan.bits))), batches)
            )
        on_progress("measuring what the plan loses")
        rounded = load(model, replace(plan, forms=inputs.profile.forms))
        return divergence(rounded, batches, expected)

    return measure


def _workload(lengths: Sequence[int], num_prompts: int, new_tokens: int) -> Workload:
    """Chooses the batch to plan for: of the waves that are at least half full, the one of most tokens."""
    waves = {(len(wave), lengths[wave[0]]) for wave in cut_waves(lengths, num_prompts, new_tokens)}
    # Micro-batches are sized for it: those of a few long prompts would be too small for all others.
    most_rows = max(rows for rows, _ in waves)
    full = [wave for wave in waves if 2 * wave[0] >= most_rows]
    rows, tokens = max(full, key=lambda wave: (wave[0] * (wave[1] + new_tokens), wave))
    return Workload(
        num_prompts=rows, prompt_tokens=tokens, new_tokens=new_tokens, waves=tuple(sorted(waves))
    )


def _read_inputs(
    model: str | Path, cluster: str | Path, prompts: str | Path
) -> tuple[Cluster, list[list[int]], int]:
    """The cluster, token ids of the prompts, and weights of a head of the model's own; all are checked."""
    described = Cluster.from_yaml(cluster)
    texts = tokenise(model, read_prompts(prompts))
    check_weights(model)
    return described, texts, count_own_head(model)


def _on_first_rank(
    read: Callable[[], tuple[Cluster, list[list[int]], int]],
) -> tuple[Cluster, list[list[int]], int]:
    """What rank 0's files say, or its error, on every rank: other machines need not have the files."""
    group = Group.world() if Group.exists() else None
    if group is None or group.world_size == 1:
        return read()
    told: bytes | Exception | None = None
    if group.rank == 0:
        try:
            told = pickle.dumps(read())
        except MeshyardError as error:
            told = error
    return pickle.loads(tree.broadcast(group.control(), told))


def calibration_batches(
    texts: Sequence[Sequence[int]],
    *,
    num_tokens: int = 1536,
    length: int = 96,
    between: bool = False,
) -> list[Tensor]:
    """Some of the prompts' own tokens, a sequence each, from all over their file.

    Args:
        texts: token ids of prompts.
        num_tokens: about as many in all: a few hundred order layers, more settle the sum of noise.
        length: most tokens of a sequence; with short ones rounding seems to cost less than it does.
        between: take prompts halfway between those that are taken otherwise: others, unless there
            are too few.
    """
    usable = [ids[:length] for ids in texts if len(ids) >= 2]
    # Neighbours in a file are often of one kind, and noise depends on the text.
    all_tokens = sum(map(len, usable))
    count = -(-len(usable) * num_tokens // max(all_tokens, num_tokens, 1))
    places = [(2 * at + between) * len(usable) // (2 * count) for at in range(count)]
    return [torch.tensor([usable[place]]) for place in places]
