"""Settings: of a training, in Python, a YAML recipe or the command line, and options of graph and plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro
import yaml

from heta.data.sources import check_graph
from heta.nn.registry import check_model
from heta.partitioning.plan import ASSIGNMENTS, STRATEGIES
from shared.cli import JsonOption, choice
from shared.errors import ConfigError, DataError
from shared.files import read_json, read_text
from shared.training.progress import show_progress
from shared.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    from heta.graph.hetero_graph import HeteroGraph
    from heta.graph.schema import Schema
    from heta.partitioning.plan import Plan
    from heta.partitioning.workload import StepRates

__all__ = [
    "COUNTS",
    "GraphOptions",
    "PlanOptions",
    "RowRule",
    "TrainConfig",
    "WireFormat",
    "read_counts",
    "read_rates",
    "read_recipe",
]

COUNTS = ".json"
"""Suffix of a file of counts."""

_WORDS = {"int": "a whole number", "float": "a number", "list": "a list of whole numbers"}

RowRule = Literal["adam", "adagrad"]
WireFormat = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of `heta train`.

    Attributes:
        model: a name of `heta.nn.registry`, or "file.py:function" or "module:function" of a function
            (part, hidden, num_classes) that makes one.
        epochs: passes over the labelled nodes of the split "train".
        lr: learning rate of Adam for the model's parameters.
        row_lr: learning rate of learnable rows.
        row_rule: their optimizer: "adam", or "adagrad" with one number a row.
        batch_size: seeds of a step over all ranks; None: the plan's.
        fanouts: in-edges drawn of a node and relation, the hop next to the seeds first, -1 for all;
            None: the plan's.
        wire: form in which merged rows travel.
        device: where the model lies: "cpu", "cuda" (each rank's GPU) or "cuda:N".
        cache: memory as "256MB": with "edge-cut" for other hosts' features, else on the GPU for rows of
            the host; None: no cache.
        seed: of initial values, the order of seeds and all draws.

    Raises:
        ConfigError: a setting is out of range, or the model is unknown.
    """

    model: str = "rgcn"
    epochs: int = 10
    lr: float = 1e-2
    row_lr: float = 1e-2
    row_rule: RowRule = "adam"
    batch_size: int | None = None
    fanouts: tuple[int, ...] | None = None
    wire: WireFormat = "float32"
    device: str = "cpu"
    cache: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_model(self.model)
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {value}")
        for name in ("lr", "row_lr"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        for name, kind in (("row_rule", RowRule), ("wire", WireFormat)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"{name}: expected one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}"
                )
        if self.cache is not None:
            parse_bytes(self.cache)

    def to_json(self) -> str:
        """Writes the settings as JSON text, for `from_mapping`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any], source: str) -> TrainConfig:
        """Makes the configuration of named settings; those left out have their defaults.

        Args:
            settings: values by name.
            source: where they come from, for messages.

        Raises:
            ConfigError: a name is unknown, or a value is invalid.
        """
        types = {field.name: str(field.type) for field in fields(cls)}
        values = {}
        for name, value in settings.items():
            if name not in types:
                near = get_close_matches(str(name), types, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"{source}: expected settings among {', '.join(types)}, got {name!r}{hint}"
                )
            values[name] = _read_value(value, types[name], f"{source}: {name}")
        return cls(**values)


def read_recipe(path: Path | None, settings: Mapping[str, Any]) -> TrainConfig:
    """Reads the settings of a YAML file, above which others stand.

    Args:
        path: the file; None: the defaults.
        settings: values by name that replace the file's.

    Raises:
        ConfigError: a name is unknown, or a value is invalid.
        DataError: the file is missing or empty.
    """
    if path is None:
        return TrainConfig.from_mapping(settings, "settings")
    try:
        tree = yaml.safe_load(read_text(path, "a recipe as YAML"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: expected a recipe as YAML, got {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected settings by name, as epochs: 5, got {tree!r}")
    return TrainConfig.from_mapping({**tree, **settings}, str(path))


def _read_value(value: Any, kind: str, key: str) -> Any:
    """Converts a value of YAML or JSON to a field's type, and refuses one of another type."""
    kind, _, none = kind.partition(" | ")
    if value is None and none:
        return None
    if kind == "int" and type(value) is int:
        return value
    if kind == "float":
        # YAML reads 1e-3 as a text.
        with suppress(TypeError, ValueError):
            return float("" if isinstance(value, bool) else value)
    if kind.startswith("tuple"):
        if isinstance(value, list | tuple) and all(type(each) is int for each in value):
            return tuple(value)
        kind = "list"
    if kind not in _WORDS and isinstance(value, str):
        return value
    raise ConfigError(f"{key}: expected {_WORDS.get(kind, 'a text')}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions(JsonOption):
    """A graph, and what is trained on it."""

    graph: Annotated[str, tyro.conf.Positional]
    """The graph; to plan only, also a .json file of counts that Schema.to_json gives."""
    parts: int = 2
    """Number of hosts."""
    layers: int = 2
    """Layers of the model."""
    fanouts: tuple[int, ...] = ()
    """In-edges drawn of a node and relation, the hop next to the seeds first, -1 for all; by default
    10 in each layer."""
    batch_size: int = 2048
    """Seeds of a step over all hosts."""
    hidden: int = 64
    """Width of hidden and learnable rows."""
    uses_dst: bool = True
    """Modules read their destination's row. Without, parts merge once a step."""
    head_dim: int | None = None
    """Logits of a linear head on summed or averaged rows: merged in place of wider rows."""
    assign: Annotated[str, choice(ASSIGNMENTS)] = "time"
    """Rule that assigns relations to hosts: by predicted time, or by size as the paper does."""
    seed: int = 0
    """Seed of METIS, which an edge-cut is made by."""

    def __post_init__(self) -> None:
        """Checks what needs no graph."""
        if self.parts < 1:
            raise ConfigError(f"parts: expected 1 or more, got {self.parts}")
        if self.fanouts and len(self.fanouts) != self.layers:
            raise ConfigError(
                f"fanouts: expected {self.layers}, one a layer, got {len(self.fanouts)}; give as many "
                f"numbers, as --fanouts {' '.join(['10'] * self.layers)}"
            )

    def read_graph(self) -> HeteroGraph:
        """Reads the graph; refuses counts."""
        if self.graph.endswith(COUNTS):
            raise ConfigError(f"graph: expected a graph with its edges, got counts, {self.graph}")
        check_graph(self.graph)
        from heta.data.sources import read_graph

        with show_progress(f"reading {self.graph}"):
            return read_graph(self.graph)

    def list_settings(self) -> dict[str, Any]:
        """The arguments of `plan` but for hosts, network and strategy."""
        return {
            "layers": self.layers,
            "fanouts": self.fanouts or None,
            "batch_size": self.batch_size,
            "hidden": self.hidden,
            "uses_dst": self.uses_dst,
            "head_dim": self.head_dim,
            "assign": self.assign,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(GraphOptions):
    """Options of plans."""

    strategy: str = "auto"
    """raf, replicate, edge-cut, or auto for the least predicted step."""
    network_rate: str = "10Gbit/s"
    """Rate of the slowest link between two hosts."""
    latency_us: float = 50.0
    """Microseconds that a message takes at least."""
    memory: str | None = None
    """Memory of each host for edges, features and rows, as 16GiB; by default without a limit."""
    rates: Path | None = None
    """JSON file of this kind of machine's rates, written by `heta profile`."""

    def __post_init__(self) -> None:
        """Checks what needs no graph."""
        super(PlanOptions, self).__post_init__()
        if self.strategy != "auto" and self.strategy not in STRATEGIES:
            raise ConfigError(
                f"strategy: expected one of auto, {', '.join(STRATEGIES)}, got {self.strategy!r}"
            )
        if not self.latency_us >= 0:
            raise ConfigError(f"latency-us: expected 0 or more, got {self.latency_us}")
        parse_rate(self.network_rate)
        if self.memory is not None:
            parse_bytes(self.memory)

    def make_plan(self, graph: HeteroGraph | Schema) -> Plan:
        """Plans for the graph."""
        from heta.partitioning.planner import plan
        from shared.topology import Cluster, Link
        from shared.topology.device import CPU

        rates = None if self.rates is None else read_rates(self.rates)
        link = Link.from_rate(parse_rate(self.network_rate), self.latency_us / 1e6)
        with show_progress("planning"):
            return plan(
                graph,
                parts=self.parts,
                strategy=self.strategy,
                cluster=Cluster.uniform(self.parts, 1, CPU, network=link),
                rates=rates,
                memory_bytes=None if self.memory is None else int(parse_bytes(self.memory)),
                **self.list_settings(),
            )


def read_counts(path: str) -> Schema:
    """Reads counts.

    Raises:
        DataError: the file is missing or has no counts.
    """
    record = read_json(path, "counts as Schema.to_json gives them")
    from heta.graph.schema import Schema

    return Schema.from_json(record)


def read_rates(path: Path) -> StepRates:
    """Reads rates that `heta profile` wrote.

    Raises:
        DataError: the file is missing or has no rates.
    """
    from heta.partitioning.workload import StepRates

    record = read_json(path, "rates that `heta profile` measured")
    try:
        return StepRates(**record)
    except TypeError as error:
        raise DataError(
            f"{path}: expected rates that `heta profile` measured, got {error}; measure them again"
        ) from error
