import pytest
import torch

from gnnflow.training.subnormal import flush_subnormals


def product():
    return float(torch.full((), 1e-310, dtype=torch.float64) * 1)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot")
def test_small_floats_are_zero_inside_only():
    assert product() > 0
    with flush_subnormals():
        assert product() == 0
        with flush_subnormals():
            assert product() == 0
        assert product() == 0
    assert product() > 0
    with pytest.raises(ValueError, match="inside"), flush_subnormals():
        raise ValueError("inside")
    assert product() > 0
