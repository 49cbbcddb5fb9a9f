"""Values on a CUDA device: copied behind training's back, and stored as they were at the save."""

import pytest
import torch
from torch import nn

import bytecheckpoint as bcp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def training():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1_024, 1_024) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.randn(64, 1_024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model, optimizer):
    state = [t for one in optimizer.state.values() for t in one.values()]
    return [t.detach().cpu().clone() for t in (*model.state_dict().values(), *state)]


def test_stored_bits_are_those_at_the_save_while_training_goes_on(tmp_path):
    model, optimizer = training()
    with bcp.Checkpointer(tmp_path) as ckpt:
        for number in range(3):
            expected = values(model, optimizer)
            handle = ckpt.save(number, {"model": model, "optimizer": optimizer})
            for _ in range(3):  # the first of these waits for the copy, on the device
                step(model, optimizer)
            handle.committed.result()
            again_model, again_optimizer = training()
            ckpt.load(number, {"model": again_model, "optimizer": again_optimizer})
            found = values(again_model, again_optimizer)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_an_optimizer_in_the_state_the_save_waits_itself(tmp_path):
    value = torch.full((4_000_000,), 1.0, device="cuda")
    with bcp.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": value})
        value.fill_(2.0)
        ckpt.close()
        into = torch.zeros(4_000_000)
        ckpt.load(1, {"x": into})
    assert into.unique().tolist() == [1.0]


def test_a_view_with_strides_and_a_value_on_the_cpu(tmp_path):
    base = torch.arange(60.0, device="cuda").view(6, 10)
    state = {"columns": base[:, ::2], "transposed": base.t(), "cpu": torch.arange(3)}
    bcp.save(tmp_path / "c", state)
    with bcp.open(tmp_path / "c") as checkpoint:
        assert all(torch.equal(checkpoint.read(k), v.cpu()) for k, v in state.items())
