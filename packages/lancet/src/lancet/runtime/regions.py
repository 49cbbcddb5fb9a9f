"""Compiles regions of a graph, the operators between two collectives in launch order, by Inductor.

A graph that runs operator by operator lacks Inductor's fusion of element-wise operators. Its regions
are compiled once the order of launches is chosen, for the shapes and strides that they got in a run;
equal regions share one compiled function. Collectives, random operators, operators that write to
their arguments or read numbers, and those with sizes that are known only as the graph runs stay
between the regions.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lancet.graph.fused_sums import pack
from lancet.graph.rewrite import is_random
from lancet.report import RegionsReport
from lancet.runtime.agreement import share_texts
from shared.comms import Group

__all__ = ["GraphRegion", "RegionCompiler", "group_regions"]

# Shorter regions save less than a call costs.
_MIN_NODES = 4


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a compiled function takes for granted of an argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make_zeros(self) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        # Elements may share memory, which torch would refuse to fill.
        num_elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        tensor.as_strided((num_elements,), (1,)).zero_()
        return tensor


class GraphRegion:
    """Operators in place of which a graph has one call.

    Args:
        module: the operators.

    Attributes:
        module: as given.
        layouts: of the arguments of the last run without a compiled function.
        compiled: runs in the operators' place; None: they run themselves.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.layouts: tuple[_Layout, ...] = ()
        self.compiled: Callable[..., Any] | None = None

    @property
    def num_nodes(self) -> int:
        """Operators of the region."""
        return sum(node.op == "call_function" for node in self.module.graph.nodes)

    def run(self, *arguments: Tensor) -> Sequence[Tensor]:
        """Computes what the operators compute; uncompiled, if the arguments have another layout."""
        layouts = tuple(_Layout(tuple(t.shape), t.stride(), t.dtype, t.device) for t in arguments)
        if self.compiled is None:
            self.layouts = layouts
        elif layouts == self.layouts:
            return self.compiled(*arguments)
        return self.module.forward(*arguments)


class RegionCompiler:
    """Compiles the regions of all graphs of a model, on each rank by itself.

    Args:
        control: a gloo group of the ranks.
        warn: takes sentences about what runs uncompiled, and why.
    """

    def __init__(self, control: Group, warn: Callable[[str], None]) -> None:
        self._control, self._warn = control, warn
        self._compiled: dict[tuple[str, tuple[_Layout, ...]], Callable[..., Any] | None] = {}
        self._errors: set[str] = set()
        self._num_regions, self._compile_s = 0, 0.0

    def report(self) -> RegionsReport:
        """What is compiled so far, on this rank."""
        return RegionsReport(
            num_regions=self._num_regions,
            num_compiled=sum(function is not None for function in self._compiled.values()),
            compile_s=self._compile_s,
        )

    def compile(self, regions: Iterable[GraphRegion]) -> None:
        """Compiles regions that have run, while no message of the graph is on its way.

        Every rank calls this. They wait for each other after each region, so that none waits longer
        than for one region of another rank.

        Raises:
            CommError: a rank died, or took longer for a region than the timeout.
        """
        start_s = time.perf_counter()
        left = list(regions)
        is_compiling = True
        while is_compiling:
            if left:
                self._compile(left.pop(0))
            is_compiling = any(share_texts(self._control, "more" if left else ""))
        self._compile_s += time.perf_counter() - start_s

    def accept(self, name: str, regions: Sequence[GraphRegion], position: int | None) -> bool:
        """Whether compiled regions gave their operators' outputs on all ranks, up to rounding.

        Args:
            name: the graph's.
            regions: all of the graph.
            position: of this rank's first output that differs, None if there is none.
        """
        positions = share_texts(self._control, "" if position is None else str(position))
        differing = [rank for rank, output in enumerate(positions) if output]
        if differing:
            self._warn(
                f"{name}: expected the operators' outputs from regions that Inductor compiled, up to "
                f"rounding, got others on ranks {differing} (outputs "
                f"{', '.join(filter(None, positions))}); it runs uncompiled: a choice, as of an expert, "
                f"may depend on the last bit"
            )
        else:
            self._num_regions += sum(region.compiled is not None for region in regions)
        return not differing

    def _compile(self, region: GraphRegion) -> None:
        key = region.module.code, region.layouts
        if key not in self._compiled:
            try:
                # A thread of its own: autograd runs forward graphs in a state in which torch cannot trace.
                with ThreadPoolExecutor(max_workers=1) as thread:
                    self._compiled[key] = thread.submit(_compile, region).result()
            except Exception as error:  # noqa: BLE001 - others wait for this rank; the report names it
                self._compiled[key] = None
                first_line = next(iter(str(error).splitlines()), "")
                self._explain(region, f"{type(error).__name__}: {first_line}")
        region.compiled = self._compiled[key]

    def _explain(self, region: GraphRegion, error: str) -> None:
        """Says why a region runs uncompiled, once for all with the same error."""
        if error not in self._errors:
            self._errors.add(error)
            self._warn(
                f"a region of {region.num_nodes} operators runs uncompiled, and so do others with the "
                f"same error: Inductor raised {error}"
            )


@torch.no_grad()
def _compile(region: GraphRegion) -> Callable[..., Any]:
    arguments: list[Any] = [layout.make_zeros() for layout in region.layouts]
    compiled = torch._inductor.compile(region.module, arguments)
    # Some errors come with the first call.
    compiled(*arguments)
    return compiled


def group_regions(graph: fx.Graph) -> list[GraphRegion]:
    """Puts one call in place of the operators of each region.

    Args:
        graph: in launch order, with collectives started and awaited by Python functions; changed in
            place.
    """
    for node in graph.nodes:
        # A region returns tensors, not tuples of them.
        if _is_compilable(node) and isinstance(node.meta.get("val"), (tuple, list)):
            for item in [user for user in node.users if user.target is operator.getitem]:
                node.append(item)
    _pack_last(graph)
    nodes: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if _is_compilable(node):
            nodes[-1].append(node)
        elif nodes[-1]:
            nodes.append([])
    return [_replace(graph, own) for own in nodes if len(own) >= _MIN_NODES]


def _pack_last(graph: fx.Graph) -> None:
    """Copies gradients into buffers behind the operators that follow, which a copy would divide."""
    copies: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.target is pack:
            copies.append(node)
        elif not _is_compilable(node):
            for copy in copies:
                node.prepend(copy)
            copies.clear()


def _replace(graph: fx.Graph, nodes: Sequence[fx.Node]) -> GraphRegion:
    inside = {*nodes}
    inputs = list(
        dict.fromkeys(
            other for node in nodes for other in node.all_input_nodes if other not in inside
        )
    )
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    body = fx.Graph()
    copies = {node: body.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    for i, node in enumerate(nodes):
        copies[node] = body.node_copy(node, copies.__getitem__)
        # Equal regions get equal code.
        copies[node].name = f"node_{i}"
        copies[node].meta = {}
    body.output(tuple(copies[node] for node in outputs))
    region = GraphRegion(fx.GraphModule({}, body))
    with graph.inserting_after(nodes[-1]):
        call = graph.create_node("call_function", region.run, tuple(inputs), name="region")
    with graph.inserting_after(call):
        for position, node in reversed([*enumerate(outputs)]):
            result = graph.call_function(operator.getitem, (call, position))
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)
    return region


def _is_compilable(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_compilable(source)
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "aten"
        and not node.target._schema.is_mutable
        and not is_random(node)
        and all(_is_static(value) for value in (node, *node.all_input_nodes))
    )


def _is_static(node: fx.Node) -> bool:
    """Whether a node returns tensors of constant shapes, and nothing else."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    tensors = [each for each in values if each is not None]
    return bool(tensors) and all(
        isinstance(each, Tensor) and all(isinstance(size, int) for size in each.shape)
        for each in tensors
    )
