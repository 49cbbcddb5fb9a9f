"""Turns a plan's static orders into calls with their messages, in one global order.

All ranks derive all messages, so that both ends of an edge agree on their order, and a plan whose
ranks would wait for each other is refused before anything runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from diffusionpipe.planner.plan import Action, Plan
from diffusionpipe.planner.traffic import PlannedMessage, Rows, list_messages
from diffusionpipe.runtime.instructions.dataflow import Dataflow
from diffusionpipe.runtime.instructions.messages import find_samples, name_lane, order_messages
from diffusionpipe.runtime.instructions.plan_check import check_orders

__all__ = ["Instruction", "Program", "compile_programs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """An action of a rank with its messages.

    Attributes:
        action: what is computed.
        samples: rows of the plan's batch that it computes; (0, 0) for a sum or step.
        receives: messages that it needs.
        sends: messages that it completes.
        is_final: it is this rank's last backward pass of its stage, behind which gradients are
            complete.
    """

    action: Action
    samples: Rows
    receives: tuple[PlannedMessage, ...]
    sends: tuple[PlannedMessage, ...]
    is_final: bool


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one rank does in every step.

    Attributes:
        rank: whose it is.
        instructions: in order.
        messages: all that this rank sends or receives, in the global order.
        num_readers: by backbone and value, how many stages of this rank read it.
        edges: by pair of ranks, the lower one first, the lanes that it needs; of all ranks.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    messages: tuple[PlannedMessage, ...]
    num_readers: Counter[tuple[int, str]]
    edges: dict[tuple[int, int], tuple[str, ...]]


def compile_programs(plan: Plan, flow: Dataflow) -> list[Program]:
    """Derives every rank's program.

    O(actions + messages); of messages there are at most stages x micro-batches x replicas twice.

    Raises:
        ConfigError: the plan does not fit the job, or its ranks would wait for each other.
    """
    stages = flow.cut_stages(plan)
    check_orders(plan, flow)
    edges: dict[tuple[int, int], set[str]] = defaultdict(set)
    receives: dict[tuple[int, Action | None], list[PlannedMessage]] = defaultdict(list)
    sends: dict[tuple[int, Action], list[PlannedMessage]] = defaultdict(list)
    own: dict[int, list[PlannedMessage]] = defaultdict(list)
    messages = list_messages(plan, flow.backbones, flow.components, plan.order)
    for message in order_messages(plan.order, messages):
        pair = message.sender, message.receiver
        edges[min(pair), max(pair)].add(name_lane(message))
        receives[message.receiver, message.used_by].append(message)
        sends[message.sender, message.sent_by].append(message)
        for rank in pair:
            own[rank].append(message)
    lanes = {pair: tuple(sorted(edges[pair])) for pair in sorted(edges)}
    programs = []
    for rank, order in enumerate(plan.order):
        final = {action.stage: i for i, action in enumerate(order) if action.kind == "backward"}
        imports = [
            (stages[stage].backbone, key)
            for stage in plan.stages_of(rank)
            for key in stages[stage].imports
        ]
        instructions = tuple(
            Instruction(
                action=action,
                samples=find_samples(plan, rank, action),
                receives=tuple(receives[rank, action]),
                sends=tuple(sends[rank, action]),
                is_final=action.kind == "backward" and final[action.stage] == index,
            )
            for index, action in enumerate(order)
        )
        programs.append(
            Program(
                rank=rank,
                instructions=instructions,
                messages=tuple(own[rank]),
                num_readers=Counter(imports),
                edges=lanes,
            )
        )
    return programs
