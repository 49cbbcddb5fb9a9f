"""Orders of passes that suit a shape, some of them with more micro-batches in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diffusionpipe.planner.plan import Action, Kind
from diffusionpipe.planner.schedule import Order, order_1f1b, order_by_events, order_opposite
from diffusionpipe.planner.search.shape import Shape

__all__ = ["list_orders"]

# Further forward passes for each later stage of a chain; one hides messages as long as a pass.
_AHEAD = (0.0, 0.5, 1.0)
# Messages shorter than this share of a stage's passes need none.
_SHORT = 0.02


def list_orders(
    shape: Shape,
    seconds: Sequence[tuple[float, float]],
    message_s: float,
    *,
    has_estimate: bool = False,
) -> Iterator[Order]:
    """Yields orders of the passes of one pipeline by device, those with the fewest in flight first.

    Args:
        shape: stages on ranks.
        seconds: forward and backward seconds of a micro-batch by virtual stage.
        message_s: seconds of a message between two stages.
        has_estimate: each micro-batch has a forward pass without gradient before its own.
    """
    count = shape.num_micro_batches
    if shape.placement == "opposite":
        devices = shape.num_stages
        yield order_opposite(seconds[:devices], seconds[devices:], count)
    elif shape.placement == "data":
        kinds: list[Kind] = ["forward", "backward"]
        if has_estimate:
            kinds.insert(0, "estimate")
        stages = range(len(shape.spans))
        passes = [Action(kind, v, m) for m in range(count) for v in stages for kind in kinds]
        yield (tuple(passes),)
    elif shape.placement == "chain" and not has_estimate:
        mean_s = sum(map(sum, seconds)) / len(seconds)
        for ahead in _AHEAD if message_s > _SHORT * mean_s else (0.0,):
            yield order_1f1b(len(shape.spans), count, ahead=ahead)
    else:
        device_of = list(range(len(shape.spans)))
        if shape.placement == "folded":
            device_of = [min(v, len(device_of) - 1 - v) for v in device_of]
        forward_s, backward_s = zip(*seconds, strict=True)
        yield order_by_events(
            device_of, forward_s, backward_s, count, has_estimate=has_estimate, message_s=message_s
        )
