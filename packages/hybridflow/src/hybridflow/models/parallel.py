"""The layers that a pipeline stage holds."""

__all__ = ["stage_layers"]


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """The layers of a stage: consecutive; the numbers of stages' layers differ by at most one.

    If a smaller number of stages divides `num_stages`, its stages are unions of these, which
    generation layouts require.
    """
    start, stop = (-(-k * num_layers // num_stages) for k in (stage, stage + 1))
    return range(start, stop)
