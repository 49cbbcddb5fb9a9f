"""Plans around models on gloo ranks: FSDP2, DDP and tensors of other classes."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from memo import Plan, apply
from memo.planner.layer_plan import LayerPlan
from shared.comms import RankPool

from ..runtime.models import make_batch, make_model

PLANS = [Plan.fixed(alpha=alpha) for alpha in (0.0, 0.5, 1.0)]
PLANS.append(Plan(layers=(LayerPlan(mode="whole"),)))

_MODULES = (
    "memo.runtime.run",
    "transformers.models.llama.modeling_llama",
)
"""What both ranks import, here once for both."""


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, modules=_MODULES) as pool:
        yield pool


def _steps(model, parameters, num_batches=2):
    """Losses and local gradients of two accumulated batches, which ranks have of their own."""
    for one in parameters:
        one.grad = None
    torch.manual_seed(dist.get_rank())
    losses = []
    for number in range(num_batches):
        ids = make_batch(10 * dist.get_rank() + number)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    local = [
        one.grad.to_local() if hasattr(one.grad, "to_local") else one.grad for one in parameters
    ]
    return losses, [one.clone() for one in local]


def _compare(model, plans):
    """For each plan whether losses and gradients are the same as without, to the bit."""
    parameters = list(model.parameters())
    losses, expected = _steps(model, parameters)
    same = []
    for plan in plans:
        with apply(model, plan) as run:
            for _ in range(2):
                found, grads = _steps(model, parameters)
            pairs = zip(grads, expected, strict=True)
            same.append(
                (found == losses, all(torch.equal(a, b) for a, b in pairs), run.num_restored)
            )
    return same


def under_fsdp(plans):
    from torch.distributed.fsdp import fully_shard

    model = make_model("llama")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return _compare(model, plans)


def under_fsdp_with_mixed_precision(plans):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model("qwen3")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return _compare(model, plans)


def under_ddp(plans):
    model = make_model("gpt2")
    return _compare(torch.nn.parallel.DistributedDataParallel(model), plans)


def with_sharded_tensors(plans):
    """Attention and MLP sharded by DTensor inside of each layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = make_model("llama")
    mesh = init_device_mesh("cpu", (2,))
    styles = {
        "mlp.gate_proj": ColwiseParallel(use_local_output=False),
        "mlp.up_proj": ColwiseParallel(use_local_output=False),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, styles)
    torch.manual_seed(0)
    return _compare(model, plans)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [under_fsdp, under_ddp, with_sharded_tensors, under_fsdp_with_mixed_precision],
)
def test_losses_and_gradients_are_those_without_a_plan(ranks, function):
    for rank in ranks.run(function, PLANS, timeout=timedelta(minutes=3)).results:
        _check(rank)


def test_a_rank_alone_has_the_losses_and_gradients_that_it_has_without_a_plan():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _check(under_fsdp(PLANS))
    finally:
        dist.destroy_process_group()


def _check(found):
    for same_loss, same_gradients, num_restored in found:
        assert same_loss
        assert same_gradients
        assert num_restored == 3 * 2 * 2
