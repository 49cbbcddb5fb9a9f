"""When each stage works on each micro-batch: a batch replayed event by event, from stage seconds.

The first stage takes all prefills first and then tokens as they return; a decode micro-batch begins
when all of its prefills are back, and its next token waits for the one before. So a pipeline that
the closed form of `batch_s` describes can be looked at, drawn, and compared with what was measured.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from llmpq.planner.plan import Plan
from llmpq.planner.problem import FORMULAS
from shared.errors import ConfigError
from shared.topology.replay import Operation, Replay, Timeline

__all__ = ["simulate", "simulate_plan"]


def simulate(
    prefill_s: Sequence[float],
    decode_s: Sequence[float],
    *,
    num_prefill: int,
    num_decode: int,
    new_tokens: int,
    formula: str = "ring",
    prefill_send_s: Sequence[float] = (),
    decode_send_s: Sequence[float] = (),
) -> Timeline:
    """Replays the generation of a batch; takes what `batch_s` takes.

    Args:
        prefill_s: seconds of one prefill micro-batch on each stage.
        decode_s: seconds of one token of one decode micro-batch on each stage.
        num_prefill: prefill micro-batches, dealt to the decode micro-batches in order; where these are
            more, several begin after one.
        num_decode: decode micro-batches.
        new_tokens: tokens generated for each prompt; the prefill yields the first.
        formula: "ring" or "paper"; events follow neither, so it changes nothing.
        prefill_send_s: seconds of each stage's message after prefill, the last one's to the first
            stage; none are free.
        decode_send_s: likewise for a token.

    Returns:
        Start and end of each operation, by queues "stage0", ... and "link0", ...; `.makespan_s` is
        the batch's seconds.

    Raises:
        ConfigError: counts of stages differ, or a number is below 1.
    """
    num_stages = len(prefill_s)
    if not num_stages or len(decode_s) != num_stages:
        raise ConfigError(
            f"expected the seconds of the same stages, at least one, in both phases, got "
            f"{num_stages} in prefill_s and {len(decode_s)} in decode_s"
        )
    for name, sends in (("prefill_send_s", prefill_send_s), ("decode_send_s", decode_send_s)):
        if sends and len(sends) != num_stages:
            raise ConfigError(f"{name}: expected a message of each stage, got {len(sends)}")
    if formula not in FORMULAS:
        raise ConfigError(f"formula: expected one of {', '.join(FORMULAS)}, got {formula!r}")
    if min(num_prefill, num_decode, new_tokens) < 1:
        raise ConfigError(
            f"expected at least one token and one micro-batch in each phase, got {new_tokens} tokens, "
            f"{num_prefill} prefills and {num_decode} decode micro-batches"
        )
    operations: list[Operation] = []
    prefilled = [
        _add_lap(operations, ("prefill", chunk), prefill_s, prefill_send_s, ())
        for chunk in range(num_prefill)
    ]
    for number in range(num_decode):
        first, end = (at * num_prefill // num_decode for at in (number, number + 1))
        after = prefilled[first : max(end, first + 1)]
        for token in range(1, new_tokens):
            name = ("decode", number, token)
            after = [_add_lap(operations, name, decode_s, decode_send_s, after)]
    queues = {queue: "readiness" for one in operations for queue in _queues(one)}
    return Replay(operations, queues).run()  # type: ignore[arg-type]


def simulate_plan(
    plan: Plan, *, num_prompts: int | None = None, new_tokens: int | None = None
) -> Timeline:
    """Replays a batch under a plan, from the stage seconds that the planner predicted.

    Args:
        plan: as the planner wrote it.
        num_prompts: prompts in the batch; those planned for by default.
        new_tokens: tokens of each answer; those planned for by default.

    Raises:
        ConfigError: the plan carries no predictions, or a number is below 1.
    """
    known = plan.predicted
    needed = {
        "stage_prefill_s": True, "stage_decode_s": True,
        "num_prompts": num_prompts is None, "new_tokens": new_tokens is None,
    }  # fmt: skip
    missing = [key for key, is_needed in needed.items() if is_needed and key not in known]
    if missing:
        raise ConfigError(
            f"expected a plan with predicted figures, got one without {', '.join(missing)}; "
            f"make it with `llmpq plan`"
        )
    prompts = int(known["num_prompts"]) if num_prompts is None else num_prompts
    return simulate(
        known["stage_prefill_s"],
        known["stage_decode_s"],
        num_prefill=-(-prompts // plan.prefill_size),
        num_decode=-(-prompts // plan.decode_size),
        new_tokens=int(known["new_tokens"]) if new_tokens is None else new_tokens,
        prefill_send_s=known.get("prefill_send_s", ()),
        decode_send_s=known.get("decode_send_s", ()),
    )


def _add_lap(
    operations: list[Operation],
    name: tuple[Hashable, ...],
    stage_s: Sequence[float],
    send_s: Sequence[float],
    after: Sequence[Hashable],
) -> Hashable:
    """Adds a micro-batch's way through all stages and back; returns the name of its end."""
    for stage, seconds in enumerate(stage_s):
        work = (*name, stage)
        operations.append(Operation(work, f"stage{stage}", seconds, tuple(after)))
        after = [work]
        if send_s:
            message = (*name, stage, "send")
            operations.append(Operation(message, f"link{stage}", send_s[stage], (work,)))
            after = [message]
    return after[0]


def _queues(operation: Operation) -> Iterator[str]:
    yield from (operation.queue,) if isinstance(operation.queue, str) else operation.queue
