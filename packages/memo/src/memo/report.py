"""What a run took beside what was predicted, and memory over a step as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from memo.planner.explanation import describe_disturbance, describe_layers
from memo.planner.plan import Plan
from shared.training.pictures import new_picture, save_picture
from shared.units import GB, format_bytes, format_s

__all__ = ["TOO_LONG", "describe_run", "draw_memory"]

TOO_LONG = 1.5
"""Times the predicted seconds: a plan whose steps take more was made from other seconds than these."""


def describe_run(
    plan: Plan,
    *,
    store_bytes: int,
    device_bytes: int | None,
    num_restored: int,
    num_spare: int,
    send_s: float,
    fetch_s: float,
    wait_s: float,
    moved_bytes: int,
    step_s: Sequence[float] = (),
) -> str:
    """What a plan took, beside what it was predicted to take.

    Args:
        plan: as it was applied.
        store_bytes: most bytes that were in the store.
        device_bytes: most bytes that the process held on the device; None where it was not measured.
        num_restored: layers' backwards that were prepared.
        num_spare: buffers beyond those planned.
        send_s, fetch_s: seconds of copies, wherever they hid.
        wait_s: seconds for which layers waited for copies.
        moved_bytes: bytes copied, both ways.
        step_s: seconds of steps' forward and backward; the quickest counts, as what else runs only adds to it.
    """
    predicted = plan.prediction

    def beside(measured: str, name: str) -> str:
        value = predicted.get(name)
        return measured if value is None else f"{measured} (predicted {format_bytes(value)})"

    device = "not measured" if device_bytes is None else format_bytes(device_bytes)
    expected = "expected_peak_bytes" if "expected_peak_bytes" in predicted else "peak_bytes"
    lines = [
        *describe_layers(plan.layers),
        f"device    {beside(device, expected)}",
        f"store     {beside(format_bytes(store_bytes), 'store_bytes')}",
        f"copies    {format_bytes(moved_bytes)} in {format_s(send_s)} out and {format_s(fetch_s)} back",
        f"waits     {format_s(wait_s)} for copies, over {num_restored} layers' backwards",
    ]
    if step_s:
        lines += _describe_steps(step_s, predicted.get("step_s"))
    if num_spare:
        lines.append(
            f"buffers   {num_spare} more than planned were made: backwards came in another order"
        )
    return "\n".join([*lines, *describe_disturbance(predicted)])


def _describe_steps(step_s: Sequence[float], predicted_s: float | None) -> list[str]:
    """Seconds of the quickest step, and whether it takes far longer than predicted."""
    line = f"step      {format_s(min(step_s))}, the quickest of {len(step_s)}"
    if predicted_s is None:
        return [line]
    lines = [f"{line} (predicted {format_s(predicted_s)})"]
    if min(step_s) > TOO_LONG * predicted_s:
        lines.append("longer    than predicted: the plan was made for other seconds; plan again")
    return lines


def draw_memory(
    runs: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    limit_bytes: float | None = None,
) -> None:
    """Draws memory over one step, a line a run.

    Args:
        runs: seconds since the step began and bytes above what was held before, by the run's name.
        path: of the SVG file.
        limit_bytes: a line across; None draws none.
    """
    figure = new_picture(3.2)
    axes = figure.subplots()
    for (name, samples), style in zip(runs.items(), ("-", "--", "-.", ":"), strict=False):
        axes.plot(
            [seconds for seconds, _ in samples],
            [num_bytes / GB for _, num_bytes in samples],
            style,
            label=name,
        )
    if limit_bytes is not None:
        axes.axhline(limit_bytes / GB, color="0.4", linewidth=0.8)
        axes.text(0, limit_bytes / GB, " limit", va="bottom", color="0.3")
    axes.set_xlabel("seconds since the step began")
    axes.set_ylabel("GB of activations and gradients")
    axes.set_ylim(bottom=0)
    if runs:
        figure.legend(ncols=3, loc="outside lower center", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_picture(figure, path, "Memory over one training step, by the way of training")
