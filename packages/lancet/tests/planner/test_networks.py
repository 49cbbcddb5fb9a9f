"""Plans at other speeds of the network, beside closed forms."""

import pytest

from lancet.graph.operations import Op
from lancet.planner.networks import scale_communication, sweep_communication
from shared.errors import ConfigError

# A backward pass of one exchange, whose weight gradient may run beside it.
OPS = [
    Op("dw", "compute", 2.0),
    Op("rows", "all_to_all", 1.0),
    Op("dx", "compute", 2.0, after=("rows",)),
]


@pytest.mark.parametrize(("ratio", "exposed_s"), [(0.25, 0.0), (0.5, 0.0), (1.0, 2.0), (2.0, 6.0)])
def test_a_longer_exchange_is_hidden_as_long_as_its_cover_lasts(ratio, exposed_s):
    (point,) = sweep_communication([Op("first", "compute", 0.0), OPS[1], OPS[0], OPS[2]], [ratio])
    assert point.exposed_s == pytest.approx(exposed_s)
    assert point.makespan_s == pytest.approx(4 + exposed_s)


def test_the_captured_order_exposes_what_nothing_follows_it():
    chain = [OPS[0], Op("rows", "all_to_all", 1.0, after=("dw",)), OPS[2]]
    (point,) = sweep_communication(chain, [0.5])
    assert (point.before_s, point.exposed_before_s) == (6.0, 2.0)
    assert point.exposed_s == 2.0  # nothing can run beside it


def test_only_collectives_are_scaled():
    assert [op.time_s for op in scale_communication(OPS, 3.0)] == [2.0, 3.0, 2.0]


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_factors_out_of_range_are_refused(factor):
    with pytest.raises(ConfigError, match="expected a factor of 0 or more"):
        scale_communication(OPS, factor)


@pytest.mark.parametrize("ops", [OPS[:1], OPS[1:2]])
def test_programs_of_one_kind_are_refused(ops):
    with pytest.raises(ConfigError, match="expected operations that compute and collectives"):
        sweep_communication(ops, [1.0])
