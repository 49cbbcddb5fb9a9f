"""A clock that benchmarks of spawned ranks read instead of the parent's."""

__all__ = ["RankClock"]


class RankClock:
    """Gives the total of the seconds it was advanced by, as pytest-benchmark's timer.

    Each reading also moves it by a nanosecond: pytest-benchmark reads a timer until it changes in
    order to find its precision, and a frozen clock would hang it.
    """

    def __init__(self) -> None:
        self._total_s = 0.0

    def __call__(self) -> float:
        """Returns the total in seconds."""
        self._total_s += 1e-9
        return self._total_s

    def advance(self, seconds: float) -> None:
        """Adds what the slowest rank measured for one round."""
        self._total_s += seconds
