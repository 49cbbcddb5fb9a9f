"""The same training on a CUDA device: ranks share it, and gloo carries messages through the host."""

import pytest
import torch

import adaqp
from adaqp.policy import Adaptive, Exact, Fixed
from shared.comms import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def train(folder, policy, device):
    dg = adaqp.load(folder, device=device)
    torch.manual_seed(0)
    model = adaqp.nn.gcn(dg, [dg.feat.shape[1], 16, 16, dg.num_classes], dropout=0.0).to(device)
    links = adaqp.LinkTable.uniform(dg.num_parts, 12.5e6, 2e-4) if dg.num_parts > 1 else None
    with dg.messages(policy, links=links):
        trainer = adaqp.Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-2))
        return trainer.fit(6).loss


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [(Exact(), 1e-4), (Fixed(4), 1e-3), (Adaptive(first_at=2, group_size=20), 5e-2)],
    ids=["exact", "fixed", "adaptive"],
)
def test_losses_are_those_of_the_cpu(parts, policy, tolerance, sbm, cut):
    folder = cut(sbm, parts)
    with RankPool(parts) as pool:
        on_gpu = pool.run(train, folder, policy, "cuda").results[0]
        on_cpu = pool.run(train, folder, policy, "cpu").results[0]
    assert on_gpu == pytest.approx(on_cpu, rel=tolerance)


def interrupted(folder, saved):
    """Losses of six epochs, and of the last three resumed by a new trainer; dropout is on."""
    dg = adaqp.load(folder, device="cuda")

    def trainer():
        torch.manual_seed(0)
        model = adaqp.nn.gcn(dg, [dg.feat.shape[1], 16, dg.num_classes], dropout=0.5).cuda()
        return adaqp.Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-2))

    with dg.messages(Fixed(8)):
        whole = trainer()
        whole.fit(3)
        whole.save(saved)
        losses = list(whole.fit(3).loss)
    with dg.messages(Fixed(8)):
        again = trainer()
        again.resume(saved)
        return losses[3:], list(again.fit(3).loss)


def test_a_checkpoint_holds_the_devices_random_state(sbm, cut, tmp_path):
    with RankPool(1) as pool:
        whole, resumed = pool.run(interrupted, cut(sbm, 1), tmp_path / "saved").results[0]
    assert resumed == pytest.approx(whole, rel=1e-6)
