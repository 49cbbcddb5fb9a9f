"""`lancet demo`: a small Qwen3-MoE learns the Bible's bytes on two ranks, in captured and in planned order.

One capture runs in both orders, in turns, on the same batches and weights. With root the ranks are
hosts behind real links (network namespaces); without, they share this machine's loopback, where
there is little to hide, and no claim about seconds is made.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shared.claims import Claim, finish, pair_turns
from shared.comms import NetLab, RankPool, netlab
from shared.training.progress import show_progress

if TYPE_CHECKING:
    from lancet.report import OrdersRecord, StepReport

__all__ = ["FULL", "SHORT", "RankOrders", "Size", "judge", "run", "train"]

_RATE = "100mbit"
_NUM_RANKS = 2
_TIMEOUT = timedelta(minutes=5)
_SOURCE = "lancet demo"
_MODULES = (
    "lancet.runtime.comparison",
    "lancet.runtime.backend",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "torch.distributed.tensor",
)
"""What ranks import."""


class Size(NamedTuple):
    """How much the demo does.

    Attributes:
        hidden_size: of the model.
        num_layers: of attention and experts.
        expert_width: rows of an expert's inner layer.
        num_sequences: of a rank's batch.
        num_tokens: of a sequence.
        num_turns: timed steps of each order; one more captures, and one warms up.
    """

    hidden_size: int
    num_layers: int
    expert_width: int
    num_sequences: int
    num_tokens: int
    num_turns: int


SHORT = Size(128, 1, 512, num_sequences=4, num_tokens=128, num_turns=5)
FULL = Size(256, 4, 1024, num_sequences=4, num_tokens=128, num_turns=15)


class RankOrders(NamedTuple):
    """What one rank measured, and its backend's report at the end."""

    orders: OrdersRecord
    report: StepReport


def run(out: Path, *, is_full: bool) -> bool:
    """Runs the demo and writes demo.json, the report, a trace and a picture to `out`.

    Returns:
        Whether every claim's result was correct.

    Raises:
        ConfigError: the text is not installed.
    """
    unavailable = netlab.available()
    if unavailable:
        # The tour repeats lines that begin so.
        sys.stdout.write(f"skipped: seconds over {_RATE} links: {unavailable}\n")
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(show_progress("lancet: capturing a step and training in both orders"))
        if unavailable:
            pool = stack.enter_context(RankPool(_NUM_RANKS, timeout=_TIMEOUT, modules=_MODULES))
        else:
            lab = stack.enter_context(NetLab(hosts=_NUM_RANKS, rate=_RATE))
            pool = stack.enter_context(lab.pool(timeout=_TIMEOUT, modules=_MODULES))
        ranks = pool.run(train, FULL if is_full else SHORT).results
    report = ranks[0].report
    (out / "report.txt").write_text(f"{report}\n", encoding="utf-8")
    report.write_trace(out / "trace.json")
    report.draw(out / "queues.svg")
    figures = {
        "steps_s": [rank.orders.step_s for rank in ranks],
        "waits_s": [rank.orders.waits_s for rank in ranks],
        "losses": ranks[0].orders.losses,
    }
    return finish(out, "lancet", judge(ranks, is_networked=not unavailable), figures)


def train(size: Size) -> RankOrders:
    """Captures a training step and runs it in both orders in turns; every rank calls it."""
    import torch

    import lancet
    from lancet.data import build_qwen3_moe, load_text_batches
    from lancet.runtime.comparison import compare_orders
    from shared.comms import Group

    torch.set_num_threads(1)
    group = Group.world()
    model = build_qwen3_moe(
        hidden_size=size.hidden_size, num_layers=size.num_layers, expert_width=size.expert_width
    )
    lancet.parallelize(model, group)
    backend = lancet.Backend(group, partition=None)
    batches = load_text_batches(size.num_sequences, size.num_tokens, seed=group.rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    orders = compare_orders(model, group, backend, batches, size.num_turns, optimizer)
    return RankOrders(orders, backend.report())


def judge(ranks: Sequence[RankOrders], *, is_networked: bool) -> list[Claim]:
    """Makes the demo's claims of what the ranks measured.

    Args:
        ranks: by rank.
        is_networked: whether the ranks were joined by links; no claims about seconds are made else.
    """
    equal, losses = ranks[0].orders.equal, ranks[0].orders.losses
    is_equal = all(all(rank.orders.equal) and rank.orders.equal for rank in ranks)
    plans = [graph.plan for graph in ranks[0].report.graphs if graph.plan is not None]
    num_moved = sum(len(names) for plan in plans for names in plan.moved.values())
    detail = (
        f"{num_moved} operations moved; gradients of all turns equal to the bit: {bool(is_equal)}; "
        f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps"
    )
    is_correct = bool(is_equal) and losses[-1] < losses[0] and num_moved > 0
    claims = [
        Claim(
            name="gradients with the captured order's bits", unit="gradients", ours=sum(equal),
            baseline=len(equal), baseline_name="all of them", higher_is_better=True,
            correct=is_correct, detail=detail, source=_SOURCE,
        )
    ]  # fmt: skip
    if not is_networked:
        return claims
    for name, seconds in (
        ("forward and backward pass", [rank.orders.step_s for rank in ranks]),
        ("waiting for collectives, a step", [rank.orders.waits_s for rank in ranks]),
    ):
        # A step is the slower rank's.
        planned, captured = (
            [max(own) for own in zip(*(rank[order] for rank in seconds), strict=True)]
            for order in ("planned", "captured")
        )
        claims.append(
            Claim(
                name=f"{name}, two hosts at {_RATE}", unit="s",
                baseline_name="the captured order, same exchange",
                correct=is_correct, detail=detail, source=_SOURCE,
                **pair_turns(planned, captured),
            )
        )  # fmt: skip
    return claims
