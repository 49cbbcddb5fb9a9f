"""Graphs by name, for the command line: built-in ones, tables, or what a function returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heta.data.references import check_reference, load_reference
from shared.errors import ConfigError
from shared.files import check_exists
from shared.registry import Registry

if TYPE_CHECKING:
    from heta.graph.hetero_graph import HeteroGraph

__all__ = ["GRAPHS", "check_graph", "read_graph"]

_TABLES = (".yaml", ".yml")


def check_graph(source: str) -> None:
    """Refuses a graph that cannot be there, without importing what reads it.

    Raises:
        ConfigError: the text names no graph.
        DataError: a file of tables is missing.
    """
    if source.endswith(_TABLES):
        check_exists(source, "a graph's tables as YAML")
    elif source.partition(":")[0] not in GRAPHS:
        if ":" not in source:
            forms = ", ".join(GRAPHS.about(name) for name in GRAPHS)
            raise ConfigError(
                f"graph: expected {forms}, a .yaml file that names tables, or module:function, got "
                f"{source!r}"
            )
        check_reference(source, "graph")


def read_graph(source: str) -> HeteroGraph:
    """Reads a graph.

    Args:
        source: "flights", "flights:TASK" or "flights:TASK:DAYS"; "mag_like:SCALE"; a YAML file of
            `from_tables`; or "file.py:function" or "module:function" of a function without arguments
            that returns a `HeteroGraph`, a `HeteroData` or a DGL graph.

    Raises:
        ConfigError: the text names no graph, or an argument in it is invalid.
        DataError: the graph is invalid.
    """
    check_graph(source)
    if source.endswith(_TABLES):
        from heta.graph.tables import from_tables

        return from_tables(Path(source))
    name, _, argument = source.partition(":")
    if name in GRAPHS:
        return GRAPHS.get(name)(argument)
    return _convert(load_reference(source, "graph")(), source)


def _convert(graph: Any, source: str) -> HeteroGraph:
    from heta.graph.dgl import from_dgl
    from heta.graph.hetero_graph import HeteroGraph
    from heta.graph.pyg import from_pyg

    library = type(graph).__module__.partition(".")[0]
    if isinstance(graph, HeteroGraph):
        return graph
    if library == "torch_geometric":
        return from_pyg(graph)
    if library == "dgl":
        return from_dgl(graph)
    raise ConfigError(
        f"graph: expected {source} to return a HeteroGraph, a HeteroData or a DGL graph, got "
        f"{type(graph).__name__}"
    )


def _read_flights(argument: str) -> HeteroGraph:
    from heta.data.nycflights import flights

    task, _, days = argument.partition(":")
    if days and not days.isdecimal():
        raise ConfigError(f"graph: expected flights:TASK:DAYS, got {days!r} as days")
    return flights(task or "late15", days=int(days) if days else None)


def _make_mag(argument: str) -> HeteroGraph:
    from heta.data.mag import mag_like

    try:
        scale = float(argument)
    except ValueError:
        raise ConfigError(
            f"graph: expected mag_like:SCALE with a number as mag_like:0.05, got {argument!r}"
        ) from None
    return mag_like(scale)


# Functions of what stands behind the colon.
GRAPHS: Registry[str, Callable[[str], Any]] = Registry("graph")
GRAPHS.add("flights", _read_flights, "flights[:TASK[:DAYS]] (real flights of 2013)")
GRAPHS.add("mag_like", _make_mag, "mag_like:SCALE (generated)")
