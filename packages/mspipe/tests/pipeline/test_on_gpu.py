"""On a CUDA device: every mode and place trains as the CPU does."""

import pytest
import torch
from torch import nn

from mspipe.memory.node_memory import NodeMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def trained(toy, events, name, place, device, **settings):
    model = toy.models[name]()
    memory = NodeMemory(events.num_nodes, model.dim, model.mail_dim, model.slots, place)
    pipe = toy.pipeline(events, name, memory=memory, **settings)
    for module in pipe.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    pipe.model.to(device)
    losses = toy.train(pipe, events)
    return torch.tensor(losses), memory.read_rows(torch.arange(events.num_nodes)).cpu()


@pytest.mark.parametrize("name", ["tgn", "jodie", "apan"])
@pytest.mark.parametrize("place", ["cpu", "pinned", "cuda"])
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "sync"},
        {"mode": "prefetch"},
        {"mode": "forward"},
        {"mode": "forward", "depth": 1},
        {"mode": "stale", "max_staleness": 3, "is_fixed": True},
    ],
)
def test_the_gpu_trains_as_the_cpu(toy, name, place, settings):
    events = toy.stream()
    losses, rows = trained(toy, events, name, "cpu", "cpu", **settings)
    found, found_rows = trained(toy, events, name, place, "cuda", **settings)
    torch.testing.assert_close(found, losses, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found_rows, rows, rtol=1e-2, atol=1e-3)
