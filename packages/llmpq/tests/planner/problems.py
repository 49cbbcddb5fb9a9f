"""Small random problems, their optimum by brute force, and devices of a data sheet."""

from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product

import numpy as np

from llmpq.planner.problem import Problem
from shared.errors import ConfigError


def random_problem(seed: int, max_layers: int = 5) -> Problem:
    """A problem of up to `max_layers` layers, 3 devices and 3 widths; every option may occur."""
    draw = np.random.default_rng(seed)
    layers, devices, widths = (int(draw.integers(1, top)) for top in (max_layers + 1, 4, 4))
    alike = 1 if draw.random() < 0.5 else layers
    times = (alike, devices, widths)
    options = {}
    apart = 1 - np.eye(devices)
    if draw.random() < 0.5:
        options["prefill_send_s"] = 2 * draw.random((devices, devices)) * apart
        options["decode_send_s"] = 0.5 * draw.random((devices, devices)) * apart
    if draw.random() < 0.5:
        options["ends_prefill_s"] = draw.random(devices)
        options["ends_decode_s"] = 0.2 * draw.random(devices)
        options["ends_bytes"] = float(draw.integers(0, 10))
    return Problem(
        np.broadcast_to(draw.random(times) + 0.1, (layers, devices, widths)),
        np.broadcast_to(0.3 * draw.random(times), (layers, devices, widths)),
        np.broadcast_to(np.sort(draw.integers(1, 20, (alike, widths)), 1), (layers, widths)),
        np.broadcast_to(draw.integers(0, 4, alike), (layers,)),
        draw.integers(10, 80, devices),
        -np.sort(-draw.random((layers, widths)), 1),
        int(draw.integers(1, 6)),
        int(draw.integers(1, 5)),
        int(draw.integers(1, 10)),
        theta=float(draw.choice([0.0, 1.0, 5.0])),
        max_noise=None if draw.random() < 0.3 else float(0.6 * layers * draw.random()),
        formula=str(draw.choice(["ring", "paper"])),
        **options,
    )


def best_by_brute_force(problem: Problem) -> float:
    """The least objective over every split and choice of widths, infinite if none is feasible."""
    layers, devices = problem.num_layers, problem.num_devices
    best = np.inf
    for cuts in combinations_with_replacement(range(layers + 1), devices - 1):
        bounds = (0, *cuts, layers)
        for choice in product(range(problem.num_widths), repeat=layers):
            if problem.is_feasible(bounds, choice):
                best = min(best, problem.objective(bounds, choice))
    return best


@dataclass
class SheetCosts:
    """Devices by kind, with the kind's speed and memory; seconds follow from them."""

    kinds: tuple[str, ...]
    speed: dict[str, float] = field(default_factory=lambda: {"fast": 1.0, "slow": 0.3})
    memory: dict[str, int] = field(default_factory=lambda: {"fast": 2_500_000, "slow": 2_500_000})
    byte_s: float = 0.0
    bits: tuple[int, ...] = (4, 8, 16)

    @property
    def num_devices(self) -> int:
        return len(self.kinds)

    def kind(self, device: int) -> str:
        return self.kinds[device]

    def prefill_s(self, device: int, bits: int, *, batch: int, tokens: int) -> float:
        if bits not in self.bits:
            raise ConfigError(f"device {device}: expected a width of {self.bits}, got {bits}")
        return (0.02 + 1e-3 * batch * tokens * (1 + 1 / bits)) / self.speed[self.kinds[device]]

    def decode_s(self, device: int, bits: int, *, batch: int, past: int) -> float:
        seconds = 1e-3 * bits + 1e-5 * batch * past + 1e-3 * batch
        return seconds / self.speed[self.kinds[device]]

    def ends_s(self, device: int, *, batch: int, tokens: int) -> float:
        return 1e-4 * batch / self.speed[self.kinds[device]]

    def send_s(self, sender: int, receiver: int, num_bytes: int) -> float:
        return 0.0 if sender == receiver else self.byte_s * num_bytes

    def memory_bytes(self, device: int) -> int:
        return self.memory[self.kinds[device]]
