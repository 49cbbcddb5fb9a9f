"""The problems among which a plan is sought: orders of devices and micro-batches of both phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations

import numpy as np

from llmpq.config import ModelSpec, Quality, Workload, columns_per_scale
from llmpq.planner.costs import Costs
from llmpq.planner.problem import InfeasiblePlan, Problem
from shared.errors import ConfigError
from shared.kernels.weight_matmul import packed_bytes

__all__ = ["Candidates"]

_MANY_KINDS = 4
_SLOW_LINK = 1.5
"""How many times slower than another a link has to be for the order of hosts to matter."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """The problems among which a plan is sought.

    Attributes:
        model: shape of the model.
        costs: seconds and bytes of the devices.
        noise: loss of quality by layer and width [layer, width], widths as in `bits`.
        workload: prompts and tokens.
        quality: limit of noise, and its price.
        bits: weight widths to choose from.
        group_size: input columns that share a scale.
        dtype: of activations and of weights that are not quantised.
        formula: "ring" or "paper".

    Raises:
        ConfigError: no device, or noise of another shape than layers by widths.
    """

    model: ModelSpec
    costs: Costs
    noise: np.ndarray
    workload: Workload
    quality: Quality
    bits: tuple[int, ...]
    group_size: int
    dtype: str
    formula: str = "ring"

    def __post_init__(self) -> None:
        expected = (self.model.num_layers, len(self.bits))
        if np.shape(self.noise) != expected or not self.bits:
            raise ConfigError(
                f"noise: expected [layer, width] of the shape {expected} for the widths "
                f"{self.bits}, got {np.shape(self.noise)}"
            )
        if self.costs.num_devices < 1:
            raise ConfigError("costs.num_devices: expected at least 1, got 0")

    @cached_property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """Orders of the devices: kinds permuted, devices of one kind side by side.

        With more than four kinds, each kind comes first once and the others follow by speed. Where
        some links are far slower than others, devices behind fast ones are side by side too: such
        hosts are permuted, and in each of them the kinds.
        """
        kinds: dict[str, list[int]] = {}
        for device in range(self.costs.num_devices):
            kinds.setdefault(self.costs.kind(device), []).append(device)
        names = sorted(kinds, key=lambda kind: self._layer_s(kinds[kind][0]))
        if len(names) <= _MANY_KINDS:
            ordered: list[tuple[str, ...]] = list(permutations(names))
        else:
            ordered = [(name, *(other for other in names if other != name)) for name in names]
            ordered.append(tuple(reversed(names)))
        found = [tuple(device for kind in order for device in kinds[kind]) for order in ordered]
        hosts = self._hosts()
        if 1 < len(hosts) < self.costs.num_devices:
            by_host = permutations(hosts) if len(hosts) <= _MANY_KINDS else [hosts, hosts[::-1]]
            found += [
                tuple(
                    device
                    for host in way
                    for kind in order
                    for device in host
                    if self.costs.kind(device) == kind
                )
                for way in by_host
                for order in ordered
            ]
        return tuple(dict.fromkeys(found))

    def _hosts(self) -> list[list[int]]:
        """Devices in groups whose links are fast; one group if no link is far slower than another."""
        number = range(self.costs.num_devices)
        prompt_bytes = 2 * self._unit * self.model.hidden_size * self.workload.prompt_tokens
        seconds = {
            (one, to): self.costs.send_s(one, to, prompt_bytes)
            for one, to in combinations(number, 2)
        }
        if not seconds or max(seconds.values()) <= _SLOW_LINK * min(seconds.values()):
            return [list(number)]
        middle_s = float(np.sqrt(max(min(seconds.values()), 1e-12) * max(seconds.values())))
        hosts = [[device] for device in number]
        for (one, to), taken_s in seconds.items():
            first, second = (next(host for host in hosts if at in host) for at in (one, to))
            if taken_s <= middle_s and first is not second:
                first += second
                hosts.remove(second)
        return [sorted(host) for host in hosts]

    def _layer_s(self, device: int) -> float:
        tokens = self.workload.prompt_tokens
        return self.costs.prefill_s(device, max(self.bits), batch=1, tokens=tokens)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Prompts in a prefill and in a decode micro-batch, the first dividing the second."""
        prompts, devices = self.workload.num_prompts, self.costs.num_devices
        numbers = range(1, 2 * devices + 1)
        for decode in sorted({-(-prompts // number) for number in numbers}):
            for prefill in range(1, decode + 1):
                if decode % prefill == 0:
                    yield prefill, decode

    @cached_property
    def _unit(self) -> int:
        """Bytes of the dtype over those of 16 bits, in which models are described."""
        return 2 if self.dtype == "float32" else 1

    def weight_bytes(self, bits: int) -> int:
        """Bytes of a layer at a width as they lie in memory, norms and biases in the plan's dtype."""
        model = self.model
        if bits == 16:
            return self._unit * model.layer_bytes(16, None)
        packed = sum(
            packed_bytes(
                one.out_features,
                one.in_features,
                bits,
                group_size=columns_per_scale(self.group_size, one.in_features),
            )
            for one in model.matrices
        )
        return packed + self._unit * model.layer_bytes(0, None)

    @property
    def ends_bytes(self) -> int:
        """Bytes of embedding and head."""
        return self._unit * (self.model.embedding_bytes + self.model.head_bytes)

    def kv_bytes(self, prompts: int) -> int:
        """Bytes of one layer's cache, for the largest batch of at most so many prompts."""
        new_tokens = self.workload.new_tokens
        return self._unit * max(
            self.model.kv_bytes(min(rows, prompts), tokens + new_tokens)
            for rows, tokens in self.workload.batches
        )

    def problem(self, order: Sequence[int], sizes: tuple[int, int]) -> Problem:
        """The problem of one order of devices and one pair of micro-batches."""
        workload, costs, model, layers = self.workload, self.costs, self.model, self.noise.shape[0]
        prefill, decode = sizes
        past = workload.prompt_tokens + workload.new_tokens // 2
        kind_times: dict[str, tuple[list[float], list[float], float, float]] = {}
        for device in order:
            if (kind := costs.kind(device)) not in kind_times:
                tokens = workload.prompt_tokens
                kind_times[kind] = (
                    [costs.prefill_s(device, b, batch=prefill, tokens=tokens) for b in self.bits],
                    [costs.decode_s(device, b, batch=decode, past=past) for b in self.bits],
                    costs.ends_s(device, batch=prefill, tokens=tokens),
                    costs.ends_s(device, batch=decode, tokens=1),
                )
        times = [kind_times[costs.kind(device)] for device in order]
        token_bytes = 2 * self._unit * model.hidden_size
        temporary = self._unit * max(
            model.activation_bytes(decode, 1),
            *(
                model.activation_bytes(min(prefill, rows), tokens)
                for rows, tokens in workload.batches
            ),
        )
        whole = (layers, len(order), len(self.bits))
        weights = np.array([self.weight_bytes(bits) for bits in self.bits])
        return Problem(
            prefill_s=np.broadcast_to(np.array([one[0] for one in times]), whole),
            decode_s=np.broadcast_to(np.array([one[1] for one in times]), whole),
            weight_bytes=np.broadcast_to(weights, (layers, weights.size)),
            kv_bytes=np.full(layers, self.kv_bytes(workload.most_prompts)),
            memory_bytes=np.array([costs.memory_bytes(device) - temporary for device in order]),
            noise=self.noise,
            num_prefill=-(-workload.num_prompts // prefill),
            num_decode=-(-workload.num_prompts // decode),
            new_tokens=workload.new_tokens,
            theta=self.quality.theta,
            max_noise=self.quality.max_kl,
            formula=self.formula,
            # The ring closes with the last position alone, whatever the prompt's length.
            prefill_send_s=self._sends(
                order, token_bytes * prefill * workload.prompt_tokens, token_bytes * prefill
            ),
            decode_send_s=self._sends(order, token_bytes * decode, token_bytes * decode),
            ends_prefill_s=np.array([one[2] for one in times]),
            ends_decode_s=np.array([one[3] for one in times]),
            ends_bytes=self.ends_bytes,
        )

    def _sends(self, order: Sequence[int], forward: int, back: int) -> np.ndarray:
        devices = range(len(order))
        return np.array(
            [
                [
                    self.costs.send_s(order[one], order[to], forward if to > one else back)
                    for to in devices
                ]
                for one in devices
            ]
        )

    def check_memory(self) -> None:
        """Refuses a model whose embedding and head, or layers at the smallest width, fit nowhere.

        Raises:
            InfeasiblePlan: memory is short whatever devices can do; says by how much.
        """
        problem = self.problem(self.orders[0], next(iter(self.sizes())))
        rooms = np.maximum(problem.memory_bytes, 0.0)
        least = problem.ends_bytes + float(problem.layer_bytes.min(axis=1).sum())
        if problem.ends_bytes > rooms.max() or least > rooms.sum():
            raise InfeasiblePlan(self.explain_shortage(problem))

    def explain_shortage(self, problem: Problem) -> str:
        """What is short, and the largest batch that would fit."""
        text = problem.explain_shortage()
        smallest = min(self.weight_bytes(bits) for bits in self.bits)
        for prompts in range(self.workload.most_prompts - 1, 0, -1):
            each = smallest + self.kv_bytes(prompts)
            temporary = self.problem(self.orders[0], (1, 1)).memory_bytes
            held = [int(max(room, 0) // each) for room in temporary]
            with_ends = [
                sum(held) - own + int((room - self.ends_bytes) // each)
                for own, room in zip(held, temporary, strict=True)
                if room >= self.ends_bytes
            ]
            if max(with_ends, default=0) >= self.model.num_layers:
                return f"{text}; {prompts} prompts at a time would fit at the smallest width"
        return text
