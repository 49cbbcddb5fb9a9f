"""Gradients over micro-batches and replicas: used where, in which type, and in how many messages."""

import torch
from torch import nn

from diffusionpipe.runtime.stages import GradientSums
from shared.comms import Group


def sum_over_ranks(dtype_name, bucket_bytes):
    """Gradients of parameters that both ranks, one rank or no rank use, and the ledger's calls."""
    group = Group.world()
    dtype = getattr(torch, dtype_name)
    both, first, unused = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(3))
    sums = GradientSums({0: [both, first, unused]}, {0: group}, bucket_bytes)
    before = group.ledger.snapshot()
    for micro_batch in range(2):
        sums.begin_backward(0, is_final=micro_batch == 1)
        loss = both.sum() * (group.rank + 1)
        if group.rank == 0:
            loss = loss + 3 * first.sum()
        loss.backward()
    sums.flush(0)
    sums.wait()
    traffic = group.ledger.snapshot().diff(before).by_phase()
    grads = [p.grad if p.grad is None else p.grad.tolist() for p in (both, first, unused)]
    sums.clear()
    assert all(p.grad is None for p in (both, first, unused))
    return grads, {phase: cell.sent_bytes for phase, cell in traffic.items()}


def test_replicas_add_up_what_any_of_them_used(pair):
    for name in ("float32", "float64", "bfloat16"):
        for bucket_bytes in (8, 10**6):
            for grads, _ in pair.run(sum_over_ranks, name, bucket_bytes).results:
                assert grads == [[6.0] * 3, [6.0] * 3, None]


def test_buckets_hold_float32_at_least(pair):
    for name, width in (("float32", 4), ("float64", 8), ("bfloat16", 4)):
        for _, sent in pair.run(sum_over_ranks, name, 10**6).results:
            # A ring of two sends each element once from each, and who used each parameter.
            assert sent["gradients of stage 0"] == (9 + 3) * width


def test_many_small_gradients_are_not_lost_in_a_narrow_type():
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    sums = GradientSums({0: [parameter]}, {}, 100)
    for value in [256.0] + [0.5] * 64:
        sums.begin_backward(0, is_final=False)
        (parameter * value).sum().backward()
    sums.wait()
    assert float(parameter.grad) == 288.0


def test_stages_with_infinite_gradients_are_found():
    good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    sums = GradientSums({1: [good], 4: [bad]}, {}, 100)
    sums.begin_backward(1, is_final=False)
    (good.sum() + (bad * torch.tensor([1.0, float("inf")])).sum()).backward()
    sums.wait()
    assert sums.find_bad_stages() == [4]
