"""What devices of each kind were measured to do with one model, as a file that planning reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmpq.config import Workload
from llmpq.profiler.latency import Latency
from shared.errors import ConfigError
from shared.files import read_json, write_atomically
from shared.topology.link import Link

__all__ = ["MOST_PROMPTS", "DeviceProfile", "Profile"]

MOST_PROMPTS = 64
"""Largest batch that is measured; beyond it, seconds grow by the fit."""

_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    """One kind of device and one model's shape.

    Attributes:
        kind: name of the kind, as in the cluster's description.
        processor: what the operating system calls it.
        torch: version that was measured.
        model: fingerprint of the model's shape.
        dtype: of activations.
        group_size: columns that share a scale.
        prefill, decode: by width, of one layer.
        embed: seconds of a call and of each token that is embedded.
        head: of final norm, head and sampling, as a decode behind 0 tokens.
        forms: kernel's form by width and tokens, as `Plan.forms` has it for a rank.
    """

    kind: str
    processor: str
    torch: str
    model: str
    dtype: str
    group_size: int
    prefill: Mapping[int, Latency]
    decode: Mapping[int, Latency]
    embed: tuple[float, float]
    head: Latency
    forms: Mapping[str, Any] = field(default_factory=dict)

    def explain(self, prompt_tokens: int) -> str:
        """A line on the device, and one on each width: milliseconds of a layer, and how well they fit."""
        lines = [f"{self.kind}: {self.processor}, torch {self.torch}, {self.dtype}"]
        for bits, prefill in self.prefill.items():
            decode = self.decode[bits]
            lines.append(
                f"{bits:>2} bits: a layer takes {1e3 * prefill.prefill_s(1, prompt_tokens):.3g} ms to "
                f"prefill {prompt_tokens} tokens, {1e3 * decode.decode_s(1, 128):.3g} ms for one token "
                f"(errors of the fit {prefill.error:.0%}, {decode.error:.0%})"
            )
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes it as JSON, replacing `path` at once."""
        text = json.dumps({"version": _VERSION, **asdict(self)}, indent=1)
        write_atomically(path, text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> DeviceProfile:
        """Reads a profile.

        Raises:
            ConfigError: it is none, or of another version; names the file.
            DataError: there is no such file, or it is no JSON.
        """
        tree = read_json(path, "a profile")
        try:
            if tree.pop("version") != _VERSION:
                raise ConfigError(f"{path}: expected a profile of version {_VERSION}; measure anew")
            for phase in ("prefill", "decode"):
                tree[phase] = {int(bits): _latency(found) for bits, found in tree[phase].items()}
            tree["embed"], tree["head"] = tuple(tree["embed"]), _latency(tree["head"])
            return cls(**tree)
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: expected a profile: {error!r}; measure anew") from error

    def differences(self, **expected: object) -> list[str]:
        """What was measured for something else: "torch: expected 2.13, got 2.12"; one line a field.

        Args:
            expected: fields by name, of those that are compared.
        """
        return [
            f"{name}: expected {value}, got {getattr(self, name)}"
            for name, value in expected.items()
            if getattr(self, name) != value
        ]

    def merge(self, other: DeviceProfile) -> DeviceProfile:
        """This profile with another's widths added; where both have one, the other's is kept."""
        return replace(
            other,
            prefill={**self.prefill, **other.prefill},
            decode={**self.decode, **other.decode},
            forms={**self.forms, **other.forms},
        )

    def covers(self, bits: Sequence[int], workload: Workload) -> bool:
        """Whether widths were measured, with half as long prompts and as large batches at least."""
        if not set(bits) <= set(self.prefill):
            return False
        batch = min(workload.num_prompts, MOST_PROMPTS)
        return all(
            2 * self.prefill[width].max_length >= workload.prompt_tokens
            and 2 * max(point[0] for point in self.decode[width].points) >= batch
            for width in bits
        )


def _latency(tree: Mapping[str, Any]) -> Latency:
    known = dict(tree)
    for key in ("coefficients", "compute_s", "memory_s"):
        known[key] = tuple(known[key])
    known["points"] = tuple(tuple(point) for point in known["points"])
    return Latency(**known)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The devices that a plan may use, by number; `planner.costs.Costs` for a planner.

    Attributes:
        devices: profile of each device; devices of a kind share one.
        memory: bytes that each device may hold.
        links: by sender and receiver; pairs that are missing cost nothing.

    Raises:
        ConfigError: a device has no bytes.
    """

    devices: tuple[DeviceProfile, ...]
    memory: Mapping[int, int]
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = set(range(len(self.devices))) - set(self.memory)
        if missing:
            raise ConfigError(
                f"Profile.memory: expected the bytes of each of {len(self.devices)} devices, got "
                f"none of {sorted(missing)}"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def bits(self) -> tuple[int, ...]:
        """Widths that every device was measured at, ascending."""
        return tuple(sorted(set.intersection(*(set(one.prefill) for one in self.devices))))

    def kind(self, device: int) -> str:
        """Name of a device's kind; devices of one kind with other bytes are of another."""
        name, budget = self.devices[device].kind, self.memory[device]
        alike = (self.memory[i] for i, one in enumerate(self.devices) if one.kind == name)
        return name if set(alike) == {budget} else f"{name} of {budget / 1e9:.6g} GB"

    @property
    def forms(self) -> dict[str, Mapping[str, Any]]:
        """Forms by rank, as `Plan.forms` has them."""
        return {str(rank): one.forms for rank, one in enumerate(self.devices) if one.forms}

    def prefill_s(self, device: int, bits: int, *, batch: int, tokens: int) -> float:
        """See `planner.costs.Costs`."""
        return self._latency("prefill", device, bits).prefill_s(batch, tokens)

    def decode_s(self, device: int, bits: int, *, batch: int, past: int) -> float:
        """See `planner.costs.Costs`."""
        return self._latency("decode", device, bits).decode_s(batch, past)

    def ends_s(self, device: int, *, batch: int, tokens: int) -> float:
        """See `planner.costs.Costs`."""
        found = self.devices[device]
        embed_s = found.embed[0] + found.embed[1] * batch * tokens
        return embed_s + found.head.decode_s(batch, 0)

    def send_s(self, sender: int, receiver: int, num_bytes: int) -> float:
        """See `planner.costs.Costs`."""
        link = self.links.get((sender, receiver)) or self.links.get((receiver, sender))
        return 0.0 if link is None or sender == receiver else link.time_s(num_bytes)

    def memory_bytes(self, device: int) -> int:
        """See `planner.costs.Costs`."""
        return self.memory[device]

    def _latency(self, phase: str, device: int, bits: int) -> Latency:
        found = getattr(self.devices[device], phase)
        if bits not in found:
            raise ConfigError(
                f"device {device} ({self.kind(device)}): expected a {phase} measured at {bits} "
                f"bits, got measurements at {sorted(found)}; profile it at {bits} bits too"
            )
        return found[bits]
