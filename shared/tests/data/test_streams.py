"""Generated streams follow their law and depend on their arguments alone."""

import pytest
import torch

from shared.data.streams import zipf
from shared.errors import ConfigError


def test_zipf_is_skewed_sorted_and_says_what_it_is():
    events = zipf(1000, 50_000, seed=3)
    assert len(events) == 50_000
    assert events.is_sorted
    assert events.num_nodes <= 1000
    assert (events.src != events.dst).all()
    assert events.label.startswith("generated: Zipf")
    harmonic = sum(1 / n for n in range(1, 1001))
    counts = torch.bincount(events.src, minlength=1000).sort(descending=True).values
    for n in (1, 2, 10):
        share = 1 / n / harmonic
        assert float(counts[n - 1]) / 50_000 == pytest.approx(share, rel=0.1)
    assert zipf(1000, 500, 3).digest() == zipf(1000, 500, 3).digest()
    assert zipf(1000, 500, 3).digest() != zipf(1000, 500, 4).digest()
    even = zipf(10, 20_000, exponent=0)
    assert torch.bincount(even.src).min() > 1800
    assert len(zipf(2, 0)) == 0
    pairs = zipf(2, 100)
    assert pairs.num_nodes == 2
    assert torch.equal(pairs.dst, 1 - pairs.src)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": 1}, "got 1, 5 and 0"),
        ({"num_events": -1}, "got 5, -1 and 0"),
        ({"edge_dim": -1}, "got 5, 5 and -1"),
        ({"exponent": -1}, "expected an exponent of 0 or more, got -1"),
        ({"exponent": float("inf")}, "expected an exponent of 0 or more, got inf"),
        ({"exponent": float("nan")}, "expected an exponent of 0 or more, got nan"),
    ],
)
def test_zipf_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        zipf(**({"num_nodes": 5, "num_events": 5} | arguments))


def test_features_leave_the_events_as_they_are():
    plain, wide = zipf(9, 100, 5), zipf(9, 100, 5, edge_dim=3)
    for name in ("src", "dst", "t"):
        assert torch.equal(getattr(plain, name), getattr(wide, name))
    assert plain.features is None
    assert wide.features.shape == (100, 3)
    assert torch.equal(wide.features, zipf(9, 100, 5, edge_dim=3).features)
