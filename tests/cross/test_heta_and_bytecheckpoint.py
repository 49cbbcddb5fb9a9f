"""heta's training, saved through bytecheckpoint by two parts and resumed by one and by three."""

import pytest
import torch

import bytecheckpoint as bcp
import heta
from shared.comms import RankPool

WRITES, CITES, WRITTEN = (
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "written", "author"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Parts of a small graph by the number of parts."""
    random = torch.Generator().manual_seed(0)
    nodes = {"paper": 50, "author": 20}
    edges = {
        relation: tuple(torch.randint(nodes[t], (120,), generator=random) for t in relation[::2])
        for relation in (WRITES, CITES, WRITTEN)
    }
    graph = heta.HeteroGraph(
        nodes,
        edges,
        {"paper": torch.randn(50, 6, generator=random)},
        target="paper",
        label=torch.randint(3, (50,), generator=random),
        masks={"train": torch.ones(50, dtype=torch.bool)},
    )
    made = {}
    for parts in (1, 2, 3):
        made[parts] = tmp_path_factory.mktemp("parts") / str(parts)
        plan = heta.plan(
            graph, parts=parts, strategy="raf", hidden=8, batch_size=16, fanouts=[-1, -1]
        )
        plan.write(graph, made[parts])
    return made


def train(folder, saved, resumes):
    """Losses of an epoch's steps; saved or resumed after the second."""
    torch.manual_seed(0)
    part = heta.load(folder)
    trainer = heta.Trainer(part, heta.nn.RGCN(part, 8, 3))
    if resumes:
        trainer.load(saved, reader=bcp.DCPReader(saved))
    losses = []
    for number, seeds in enumerate(trainer.batches()):
        if number < trainer.step_number:
            continue
        if number == 2 and not resumes:
            trainer.save(saved, writer=bcp.DCPWriter(saved))
        losses.append(trainer.step(seeds))
    trainer.close()
    return losses


@pytest.mark.slow
def test_other_numbers_of_parts_resume_what_two_have_saved(folders, tmp_path):
    saved = str(tmp_path / "saved")
    with RankPool(2) as pool:
        whole = pool.run(train, folders[2], saved, False).results[0]
    for parts in (1, 3):
        with RankPool(parts) as pool:
            resumed = pool.run(train, folders[parts], saved, True).results[0]
        assert resumed == pytest.approx(whole[2:], rel=1e-5)
        assert len(resumed) == 2
