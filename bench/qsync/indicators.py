"""Other indicators of how much an operator's precision matters, beside which the probe is measured."""

from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync.profiler.gradients import find_gradient
from qsync.profiler.graph_tracing import trace_model
from qsync.profiler.noise import backward_noise, forward_noise, rounding_variance, weigh_by_depth
from qsync.profiler.state import preserve_state
from qsync.runtime.modules import list_operators

__all__ = ["rank_by_variance", "weigh"]


def rank_by_variance(job, precisions, num_batches=2):
    """Every other indicator as [operator, precision], by its name."""
    operators: dict[str, Any] = list_operators(job.model)
    weights = [module.weight.detach() for module in operators.values()]
    variance = torch.tensor(
        [[float(rounding_variance(w, p).sum()) for p in precisions] for w in weights]
    )
    size = torch.tensor([[float(w.numel())] * len(precisions) for w in weights])
    return {
        **{mode: weigh(job, precisions, mode, num_batches) for mode in ("exact", "paper")},
        "weight variance": variance,
        "size": size,
        "Hessian trace": estimate_traces(job, num_batches)[:, None] * variance,
    }


def weigh(job, precisions, mode, num_batches=2):
    """Variances of products weighed by depth [operator, precision], in a mode of `forward_noise`."""
    operators, depths = list_operators(job.model), find_depths(job)
    found = torch.zeros(len(operators), len(precisions), dtype=torch.float64)
    for batch in job.batches[:num_batches]:
        factors = capture_factors(job, batch, operators)
        for i, (name, module) in enumerate(operators.items()):
            for k, precision in enumerate(precisions):
                both = vary(module, factors[name], precision, mode)
                found[i, k] += weigh_by_depth(*both, depths[name], max(depths.values()) + 1)
    return found


def find_depths(job):
    """Operators on the longest path from the input to each one."""
    graph = trace_model(job.model, job.batches[0], job.loss_fn).graph
    depths = []
    for i, sources in enumerate(graph.inputs):
        own = graph.ops[i].kind == "linear"
        depths.append(own + max((depths[j] for j in sources), default=0))
    return {op.name: depth for op, depth in zip(graph.ops, depths, strict=True)}


def capture_factors(job, batch, operators):
    """The input of each operator and the gradient of its output."""
    factors = {}

    def keep(name, _, inputs, output):
        factors[name] = [inputs[0].detach(), None]
        output.register_hook(partial(factors[name].__setitem__, 1))

    handles = [
        module.register_forward_hook(partial(keep, name)) for name, module in operators.items()
    ]
    with preserve_state(job.model):
        find_gradient(job.model, batch, job.loss_fn)
    for handle in handles:
        handle.remove()
    return factors


def vary(module, factors, precision, mode):
    """Variance of an operator's product and of its weight's gradient."""
    x, gradient = factors
    weight = module.weight.detach().flatten(1)
    if isinstance(module, torch.nn.Embedding):
        # Rows that are looked up; their gradients are added up in float32.
        variance = float(rounding_variance(weight, precision).mean())
        return variance * x.numel() * weight.shape[1], 0.0
    if isinstance(module, torch.nn.Conv2d):
        padding: Any = module.padding
        x = functional.unfold(x, module.kernel_size, 1, padding, module.stride)
        x, gradient = x.transpose(1, 2), gradient.flatten(2).transpose(1, 2)
    x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    return (
        forward_noise(x, weight, precision, mode=mode),
        backward_noise(x, gradient, precision, mode=mode),
    )


def estimate_traces(job, num_batches, num_signs=16):
    """The mean of the Hessian's diagonal over each operator's weight."""
    operators: dict[str, Any] = list_operators(job.model)
    weights = [module.weight for module in operators.values()]
    generator = torch.Generator().manual_seed(0)
    traces = torch.zeros(len(weights), dtype=torch.float64)
    for batch in job.batches[:num_batches]:
        with preserve_state(job.model), sdpa_kernel(SDPBackend.MATH):
            gradients = torch.autograd.grad(
                job.loss_fn(job.model, batch), weights, create_graph=True
            )
            for _ in range(num_signs):
                signs = [
                    torch.randint(0, 2, each.shape, generator=generator).float().mul_(2).sub_(1)
                    for each in weights
                ]
                products = torch.autograd.grad(gradients, weights, signs, retain_graph=True)
                for i, (sign, product) in enumerate(zip(signs, products, strict=True)):
                    traces[i] += float((sign * product).sum()) / sign.numel() / num_signs
    # The squared error of a weight counts by how strongly the loss bends.
    return traces.abs()
