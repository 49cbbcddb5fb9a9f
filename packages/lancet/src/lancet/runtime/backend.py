"""The backend of torch.compile that hides all-to-alls under a training step.

After Lancet (arXiv 2404.19429): both graphs of the step are captured whole, their operations timed,
and the backward graph's launched in an order that keeps computing while rows travel. In the first
step each rank times its graphs; rank 0 plans with all ranks' times, and every rank takes its plan.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import fx

from lancet.graph.capture import CapturedGraph, capture
from lancet.graph.fused_sums import list_sum_dtypes
from lancet.graph.operations import LaunchOrder, Op
from lancet.graph.rewrite import collectives, is_repeatable
from lancet.planner.batch_cut import MAX_PARTS, BatchCut
from lancet.planner.memory import KeptTensor
from lancet.planner.other_shapes import follow_plan
from lancet.planner.plan import Plan, Sums, load_plans, make_plan, save_plans
from lancet.report import GraphReport, StepReport
from lancet.runtime.agreement import check_same, share_text, share_texts
from lancet.runtime.cutting import BatchCutter
from lancet.runtime.executor import PLANNED, REGIONS, GraphExecutor
from lancet.runtime.regions import RegionCompiler
from lancet.runtime.verification import check_replicas
from shared.comms import Group
from shared.errors import ConfigError
from shared.units import format_s

__all__ = ["Backend"]

_log = logging.getLogger(__name__)
# Steps from one comparison of replicated parameters over the ranks to the next.
_CHECK_INTERVAL = 100
# Of torch, whose internals the capture of graphs uses.
_TESTED_RELEASE = "2.13."


class Backend:
    """What `torch.compile(model, backend=..., fullgraph=True)` takes.

    Args:
        group: ranks over which `lancet.parallelize` has divided the experts.
        dw: whether weight gradients are moved beside all-to-alls.
        partition: number of parts of the batch, 1 to 8; None keeps it whole, "auto" chooses 2, 4 or 8
            parts where they replay faster.
        memory_bytes: bytes by which the plan may exceed the captured order's peak of saved tensors;
            None for no limit.
        regions: whether Inductor compiles the operators between two collectives, which takes minutes;
            outputs are then the operators' up to rounding.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        group: Group,
        dw: bool = True,
        partition: int | str | None = "auto",
        memory_bytes: int | None = None,
        regions: bool = False,
    ) -> None:
        is_number = isinstance(partition, int) and not isinstance(partition, bool)
        if partition not in (None, "auto") and not (is_number and 1 <= partition <= MAX_PARTS):
            raise ConfigError(
                f"partition: expected 1 to {MAX_PARTS} parts, None, which keeps the batch whole, or "
                f"'auto', got {partition!r}"
            )
        if memory_bytes is not None and memory_bytes < 0:
            raise ConfigError(
                f"memory_bytes: expected 0 or more, got {memory_bytes}; 0 keeps the captured order's "
                f"peak, None sets no limit"
            )
        self._group = group
        self._dw, self._memory_bytes = dw, memory_bytes
        # Plans travel over connections of their own, so that no message of the model mixes with them.
        self._control = Group.control(group.checked(), name="lancet")
        self._cutter = None
        self._must_cut = partition != "auto"
        if partition not in (None, 1):
            num_parts = partition if isinstance(partition, int) else None
            self._cutter = BatchCutter(group, self._control, num_parts, memory_bytes)
        self._executors: list[GraphExecutor] = []
        self._plans: dict[str, str] = {}
        self._stored: list[Plan] = []
        # By direction, the graph that ran first is the one that is planned; the others' names by graph.
        self._first: dict[str, GraphExecutor] = {}
        self._followed: dict[str, str] = {}
        self._is_broken = False
        self._warnings: list[str] = []
        self._compiler = RegionCompiler(self._control, self._warn) if regions else None
        self._order_name = REGIONS if regions else PLANNED
        self._num_backwards, self._check_s = 0, 0.0
        if not torch.__version__.startswith(_TESTED_RELEASE):
            self._warn(
                f"expected torch {_TESTED_RELEASE}x, with which lancet is tested, got {torch.__version__}; "
                f"check that losses are those of the uncompiled model"
            )

    def backend_ctx_ctor(self) -> contextlib.AbstractContextManager[Any]:
        """What torch.compile enters around each call: sizes of exchanges are data, and are captured."""
        return torch._dynamo.config.patch(capture_scalar_outputs=True)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Captures a module that torch.compile has traced."""
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break and not self._is_broken:
            # Its other graphs come later, and run as this one does.
            self._is_broken = True
            self._warn(
                "the model was not captured as one graph, and runs unchanged; compile it with "
                "fullgraph=True, which names what cannot be captured, such as the hooks of FSDP2"
            )
        if self._is_broken:
            return module.forward
        if self._cutter is None:
            return self._capture(module, inputs)
        stored = [plan.cut for plan in self._stored if plan.torch == torch.__version__]
        run = self._cutter.compile(module, inputs, stored, self._capture)
        sentence = self._cutter.sentence
        if self._must_cut and not self._has_parts and sentence not in ("", *self._warnings):
            self._warn(sentence)
        return run

    def _capture(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture(module, inputs, self._group, self._add)

    @property
    def _has_parts(self) -> bool:
        return self._cutter is not None and bool(self._cutter.cut.ranges)

    def save_plan(self, path: str | Path) -> None:
        """Writes the plans of all graphs as JSON; they are the same on every rank."""
        save_plans(path, self.plans.values())

    def load_plan(self, path: str | Path) -> None:
        """Takes the plans of a file that `save_plan` wrote, in place of planning.

        Call it before the first step. Rank 0 reads the file, the others get its plans, which keep the
        memory that they were made for. For a graph of another model, batch or torch the report has a
        sentence, and it is planned anew.

        Raises:
            DataError: on rank 0: there is no file, or it holds no plans of this format.
        """
        if self._group.rank == 0:
            self._stored = load_plans(path)

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans by graph."""
        return {name: Plan.from_json(text) for name, text in self._plans.items()}

    def report(self) -> StepReport:
        """What the graphs have done so far, on this rank."""
        plans = self.plans
        graphs = tuple(
            GraphReport(
                name=executor.name,
                num_ops=len(executor.list_ops()),
                num_runs=executor.num_runs,
                plan=plans.get(executor.name),
                followed=self._followed.get(executor.name),
                captured_waits_s=executor.captured_waits_s,
                waits_s=executor.waits_s,
            )
            for executor in self._executors
        )
        batch = "" if self._cutter is None else self._cutter.sentence
        return StepReport(
            graphs=graphs,
            sentences=tuple(self._warnings),
            batch="" if batch in self._warnings else batch,
            replica_check_s=self._check_s,
            regions=None if self._compiler is None else self._compiler.report(),
        )

    @property
    def executors(self) -> tuple[GraphExecutor, ...]:
        """What runs the graphs, in the order of their capture."""
        return tuple(self._executors)

    def use_order(self, name: str) -> None:
        """Runs all graphs in another order from now on, to compare orders of one capture.

        Args:
            name: "captured", "planned", "regions" for the planned one in compiled regions, or a name
                given to the executors' `add_order`.
        """
        self._order_name = name
        for executor in self._executors:
            executor.order_name = name

    def _add(self, captured: CapturedGraph) -> Callable[[list[Any]], Any]:
        group_name = self._group.checked().group_name
        if not collectives(captured.module.graph, group_name):
            self._warn(
                f"a {captured.direction} graph has no all-to-all over the group's ranks, and runs "
                f"unchanged; call lancet.parallelize first, and compile the whole model"
            )
            return lambda arguments: captured.module.forward(*arguments)
        name = f"{captured.direction} {len(self._executors)}"
        plans = self._is_planned(captured.direction)
        if (
            plans
            and captured.direction not in self._first
            and not is_repeatable(captured.module.graph)
        ):
            plans = False
            self._warn(
                f"{name}: it draws random numbers or writes to its inputs, so it cannot be measured "
                f"before it runs, and runs in captured order"
            )
        executor = GraphExecutor(
            captured,
            self._group,
            name,
            self._check_replicas,
            self._follow,
            self._plan if plans else None,
            self._accept,
            self._find_compiler,
        )
        executor.order_name = self._order_name
        self._executors.append(executor)
        return executor.run

    def _is_planned(self, direction: str) -> bool:
        """Whether a graph may run in another order: parts have something beside exchanges in both."""
        return (direction == "backward" and self._dw) or (
            direction == "forward" and self._has_parts
        )

    def _check_replicas(self, executor: GraphExecutor) -> None:
        """Compares replicated parameters over the ranks, in every `_CHECK_INTERVAL`-th backward run.

        Before the first one, which of them have gradients.

        Raises:
            ConfigError: ranks have gradients of different parameters.
        """
        if executor.captured.direction != "backward":
            return
        # Ranks may run different graphs in a step, but each runs as many.
        self._num_backwards += 1
        if self._num_backwards == 1:
            self._check_trained(executor)
        if self._num_backwards % _CHECK_INTERVAL == 0:
            start_s = time.perf_counter()
            check_replicas(executor.parameters(), self._control)
            self._check_s = time.perf_counter() - start_s

    def _check_trained(self, executor: GraphExecutor) -> None:
        # Sums over ranks go by their order: those of equal sizes would be mixed without an error.
        own = sorted(name for name, _ in executor.captured.parameters.values())
        names = [{*json.loads(text)} for text in share_texts(self._control, json.dumps(own))]
        differing = sorted(set.union(*names) - set.intersection(*names))
        if differing:
            ranks = [rank for rank, own_names in enumerate(names) if differing[0] in own_names]
            raise ConfigError(
                f"expected gradients of the same parameters on all ranks, got one of {differing[0]} on the "
                f"ranks {ranks} alone; freeze the same parameters on all ranks"
            )

    def _follow(self, executor: GraphExecutor) -> LaunchOrder | None:
        """The order of a graph that is not the first of its direction, as of a last, smaller batch.

        Other ranks may run the planned graph meanwhile, so nothing is shared with them, and the graph is
        neither timed nor compiled.
        """
        direction = executor.captured.direction
        # A forward graph captured while the batch is whole is not the first of those in parts.
        is_planned = direction == "backward" or self._is_planned(direction)
        key = direction if is_planned else f"{direction} in captured order"
        first = self._first.setdefault(key, executor)
        if first is executor:
            return None
        ops = executor.list_ops()
        dtypes = list_sum_dtypes(executor.captured.module.graph, self._group.checked().group_name)
        for name, plan in self.plans.items():
            order = follow_plan(plan, ops, dtypes) if name == first.name else None
            if order is not None:
                self._followed[executor.name] = name
                return order
        return LaunchOrder(tuple(op.name for op in ops))

    def _find_compiler(self, executor: GraphExecutor) -> RegionCompiler | None:
        """What compiles the regions of a graph that `_follow` knows no order for, as all ranks run it."""
        if self._compiler is None or is_repeatable(executor.captured.module.graph):
            return self._compiler
        self._warn(
            f"{executor.name}: it draws random numbers or writes to its inputs, so its regions cannot "
            f"be compared with their operators, and it runs uncompiled"
        )
        return None

    def _plan(self, executor: GraphExecutor) -> LaunchOrder | None:
        """Plans with the other ranks; None: in captured order."""
        digest = executor.captured.digest()
        tensors = [asdict(t) for t in executor.tensors] if self._memory_bytes is not None else []
        own = json.dumps([digest, executor.time_s, tensors, executor.sum_latency_s])
        observed = [json.loads(text) for text in share_texts(self._control, own)]
        digests = [rank_digest[:8] for rank_digest, *_ in observed]
        if len({*digests}) > 1:
            self._warn(
                f"{executor.name}: expected the same graph on all ranks, got the digests "
                f"{', '.join(digests)}; it runs in captured order: give all ranks batches of one "
                f"shape in the first step"
            )
            return None
        text = None
        if self._group.rank == 0:
            plan = self._find_stored(executor)
            if plan is None:
                times = [rank_times for _, rank_times, *_ in observed]
                ops = [_average(op, times) for op in executor.list_ops()]
                kept = [[_read_tensor(values) for values in own] for _, _, own, _ in observed]
                sums = self._describe_sums(executor, min(latency_s for *_, latency_s in observed))
                cut = BatchCut() if self._cutter is None else self._cutter.cut
                slack_bytes = self._memory_bytes
                if slack_bytes is not None:
                    slack_bytes -= cut.extra_bytes
                name, version = executor.name, torch.__version__
                plan_within = partial(
                    make_plan, name, digest, version, ops, kept, sums=sums, cut=cut
                )
                plan = plan_within(memory_bytes=slack_bytes)
                if slack_bytes is not None:
                    self._say_what_limit_costs(plan, plan_within(memory_bytes=None))
            text = plan.to_json()
        text = share_text(self._control, text)
        check_same(self._control, f"plan of {executor.name}", text)
        self._plans[executor.name] = text
        return Plan.from_json(text).launches

    def _say_what_limit_costs(self, plan: Plan, free: Plan) -> None:
        # The search for groups ends by the clock: smaller gains may be noise.
        if free.makespan_s < 0.99 * plan.makespan_s:
            self._warn(
                f"{plan.graph}: operations stay earlier than they might, as memory_bytes is "
                f"{self._memory_bytes}: {format_s(plan.makespan_s)} replayed in place of "
                f"{format_s(free.makespan_s)} without a limit"
            )

    def _describe_sums(self, executor: GraphExecutor, latency_s: float) -> Sums:
        """What may run in groups: all averages of gradients, if their bits stay the same."""
        size = self._group.world_size
        graph, name = executor.captured.module.graph, self._group.checked().group_name
        dtypes = list_sum_dtypes(graph, name)
        if self._group.backend == "nccl" and size > 2:
            dtypes = {}
            self._warn(
                f"{executor.name}: each gradient has an all-reduce of its own, as NCCL adds up in "
                f"another order in larger ones; with two ranks or with gloo they run in groups"
            )
        return Sums(latency_s=latency_s, dtypes=dtypes, num_ranks=size)

    def _find_stored(self, executor: GraphExecutor) -> Plan | None:
        """The loaded plan of a graph, None if it has none."""
        if not self._stored:
            return None
        wanted = executor.captured.digest(), torch.__version__
        for plan in self._stored:
            if (plan.digest, plan.torch) == wanted:
                return replace(plan, graph=executor.name)
        graphs = [f"{plan.digest[:8]} of torch {plan.torch}" for plan in self._stored]
        self._warn(
            f"{executor.name}: expected a loaded plan of the graph {wanted[0][:8]} of torch "
            f"{wanted[1]}, got those of {', '.join(graphs)}; it is planned anew: load a plan of this "
            f"model, batch and number of ranks"
        )
        return None

    def _accept(self, executor: GraphExecutor, position: int | None) -> bool:
        """Whether the planned order gave the captured order's bits on all ranks."""
        positions = [json.loads(text) for text in share_texts(self._control, json.dumps(position))]
        differing = [rank for rank, output in enumerate(positions) if output is not None]
        if differing:
            del self._plans[executor.name]
            self._warn(
                f"{executor.name}: expected the captured order's bits from the planned one, got others "
                f"on ranks {differing} (outputs {[positions[rank] for rank in differing]}); the captured "
                f"order runs on: an operator of the model does not compute the same twice"
            )
        return not differing

    def _warn(self, sentence: str) -> None:
        self._warnings.append(sentence)
        _log.warning("lancet: %s", sentence)


def _read_tensor(values: dict[str, Any]) -> KeptTensor:
    return KeptTensor(
        num_bytes=values["num_bytes"],
        maker=values["maker"],
        readers=tuple(values["readers"]),
        is_kept=values["is_kept"],
    )


def _average(op: Op, times: Sequence[dict[str, float]]) -> Op:
    """The operation with its mean seconds over all ranks, which start a collective together."""
    return replace(op, time_s=mean(rank_times[op.name] for rank_times in times))
