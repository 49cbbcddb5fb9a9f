"""Epochs, predictions between steps, and checkpoints: on ranks and in one process."""

import pytest
import torch
from graphs import CITED_BY, CITES, HAS, WRITES, scholars
from running import HIDDEN, MODELS
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from heta.graph.part import load
from heta.nn import RGCN, HeteroModel
from heta.rows.cache import Cache
from heta.training.trainer import Trainer
from shared.errors import ConfigError, DataError

pytestmark = pytest.mark.unchecked
TWO = [[WRITES, (CITES, 0, 2)], [CITED_BY, HAS, (CITES, 1, 2)]]


def make(folder, model="rgcn", **options):
    torch.manual_seed(0)
    part = load(folder)
    return Trainer(part, MODELS[model](part), batch_size=8, **options)


def go_through(folder, cache):
    """Losses of an epoch, with predictions between the steps, beside an abandoned one."""
    other = make(folder, cache=cache)
    abandoned = other.steps(other.batches())
    next(abandoned)
    trainer = make(folder, cache=cache)
    losses, scores = [], []
    for loss in trainer.steps(trainer.batches()):
        losses.append(loss)
        # Of more chunks than there are buffers, while the next batch is prepared.
        scores.append(trainer.predict(range(60)))
    other.close()
    trainer.close()
    return losses, torch.stack(scores)


@pytest.mark.parametrize("strategy", ["raf", "edge-cut"])
def test_epochs_with_predictions_in_between_equal_one_process(open_pool, parts_of, strategy):
    graph = scholars()
    whole = [graph.schema.roots]
    owners = {name: torch.arange(n) * 7 % 3 % 2 for name, n in graph.num_nodes.items()}
    cut = {"strategy": "edge-cut", "hosts": 2}
    cache = Cache(200) if strategy == "edge-cut" else None
    folder = parts_of(graph, TWO) if cache is None else parts_of(graph, whole, owners, **cut)
    losses, scores = go_through(parts_of(graph, whole), None)
    assert len(losses) > 3
    for own_losses, own_scores in open_pool(2).run(go_through, folder, cache).results:
        assert own_losses == pytest.approx(losses, rel=1e-4)
        assert torch.allclose(own_scores, scores, rtol=1e-3, atol=1e-4)


def test_predictions_leave_each_modules_mode(parts_of):
    trainer = make(parts_of(scholars(), [scholars().schema.roots]))
    trainer.model.head.eval()
    trainer.predict([1, 2])
    assert trainer.model.training
    assert not trainer.model.head.training


def test_a_checkpoint_of_before_any_step_brings_back_a_fresh_optimizer(parts_of, tmp_path):
    folder = parts_of(scholars(), [scholars().schema.roots])
    trainer, again = make(folder), make(folder)
    trainer.save(tmp_path / "fresh")
    first = [trainer.step(batch) for batch in trainer.batches()[:3]]
    trainer.backward(range(8))
    trainer.load(tmp_path / "fresh")
    with pytest.raises(ConfigError, match="expected gradients"):
        trainer.update()
    assert [trainer.step(batch) for batch in trainer.batches()[:3]] == first
    assert [again.step(batch) for batch in again.batches()[:3]] == first


class RecordingReader(FileSystemReader):
    """Notes what is read."""

    def __init__(self, path):
        super().__init__(path)
        self.keys = set()

    def read_data(self, plan, planner):
        self.keys |= {item.storage_index.fqn for item in plan.items}
        return super().read_data(plan, planner)


def save_and_load(folder, path):
    trainer = make(folder)
    trainer.step(range(8))
    trainer.save(path)
    reader = RecordingReader(path)
    trainer.load(path, reader=reader)
    owned = {name for name, table in trainer.store.tables.items() if len(table.rows)}
    trainer.close()
    return owned & set(trainer.store.learnable), reader.keys


def test_a_rank_reads_its_own_rows_of_a_checkpoint(open_pool, parts_of, tmp_path):
    # Two replicas of one part: each owns half the rows of every learnable type.
    folder = parts_of(scholars(), [scholars().schema.roots])
    for rank, (owned, keys) in enumerate(
        open_pool(2).run(save_and_load, folder, tmp_path / "state").results
    ):
        assert owned
        rows = [key.split(".") for key in keys if key.startswith("rows.")]
        data = {(name, int(owner)) for _, name, owner, what in rows if what != "ids"}
        assert data == {(name, rank) for name in owned}
        assert {what for *_, what in rows} == {"ids", "weight", "exp_avg", "exp_avg_sq", "steps"}


class LosingReader(FileSystemReader):
    """Knows nothing of one owner's rows."""

    def read_metadata(self):
        metadata = super().read_metadata()
        kept = metadata.state_dict_metadata
        lost = [key for key in kept if key.startswith("rows.author.0.")]
        assert lost
        for key in lost:
            del kept[key]
        return metadata


def test_a_checkpoint_without_some_rows_is_refused(parts_of, tmp_path):
    trainer = make(parts_of(scholars(), [scholars().schema.roots]))
    trainer.save(tmp_path / "state")
    before = trainer.store.tables["author"].rows.clone()
    with pytest.raises(DataError, match=r"rows of 'author': expected \d+ of this rank, got 0"):
        trainer.load(tmp_path / "state", reader=LosingReader(tmp_path / "state"))
    assert torch.equal(trainer.store.tables["author"].rows, before)
    trainer.close()


def _mean(part):
    def conv(layer, relation, src_dim, dst_dim, out_dim):
        from torch_geometric.nn import SAGEConv

        return SAGEConv((src_dim, dst_dim), out_dim)

    return HeteroModel(part, conv, HIDDEN, 2, 3, combine="mean")


def test_a_checkpoint_of_another_model_is_refused(parts_of, tmp_path):
    graph = scholars()
    make(parts_of(graph, [graph.schema.roots])).save(tmp_path / "own")
    without = make(parts_of(graph, [graph.schema.roots], uses_dst=False))
    with pytest.raises(DataError, match=r"expected .* does not read .*, got .* reads destinations"):
        without.load(tmp_path / "own")
    make(parts_of(graph, [graph.schema.roots]), "sage-sum").save(tmp_path / "sum")
    part = load(parts_of(graph, [graph.schema.roots]))
    with pytest.raises(DataError, match=r"by Mean .*, got .* by Sum"):
        Trainer(part, _mean(part)).load(tmp_path / "sum")


def test_heads_for_another_width_and_models_elsewhere_are_refused(parts_of):
    part = load(parts_of(scholars(), [scholars().schema.roots]))
    model = RGCN(part, HIDDEN, 3)
    model.head = nn.Linear(16, 3)
    with pytest.raises(ConfigError, match=r"head: failed on rows \[4, 8\]"):
        Trainer(part, model).step(range(4))
    with pytest.raises(ConfigError, match="expected all parameters on the CPU or on one GPU"):
        Trainer(part, RGCN(part, HIDDEN, 3).to("meta"))
