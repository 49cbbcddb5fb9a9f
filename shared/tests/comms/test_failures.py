from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from shared.comms.init import alone, is_message_failure
from shared.errors import CommError, ConfigError


def test_gloos_and_the_stores_errors_are_those_of_messages():
    with alone() as group:
        work = group.checked().recv_anysource([torch.empty(1)], 7)
        with pytest.raises(RuntimeError) as caught:
            work.wait(timedelta(milliseconds=1))
    assert is_message_failure(caught.value)
    with pytest.raises(RuntimeError) as caught:
        dist.TCPStore("127.0.0.1", 1, timeout=timedelta(milliseconds=10))
    assert is_message_failure(caught.value)


def test_what_follows_from_one_counts_too():
    for link in ("__cause__", "__context__"):
        error = KeyError("x")
        setattr(error, link, CommError("rank 0: all_reduce failed"))
        assert is_message_failure(error)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), ConfigError("n: got 0"), None])
def test_others_are_not(error):
    assert not is_message_failure(error)
