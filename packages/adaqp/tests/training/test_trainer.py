"""Training: equal on any number of ranks, resumable to the bit, single-label and multilabel."""

import json
import os
import time
from copy import deepcopy
from pathlib import Path

import pytest
import torch

import adaqp
from adaqp.graphs import generated
from adaqp.graphs.graph import from_edge_index
from adaqp.policy import Adaptive, Exact, Fixed, Stale
from adaqp.simulator.profiler import measure
from adaqp.training import checkpoint
from adaqp.training.checkpoint import find
from adaqp.training.config import ModelConfig
from adaqp.training.trainer import History
from shared.comms import RankPool
from shared.errors import ConfigError, DataError, RankFailure


def make(dg, policy, dropout=0.5, conv="gcn"):
    torch.manual_seed(0)
    dims = [dg.feat.shape[1], 16, 16, dg.num_classes]
    model = getattr(adaqp.nn, conv)(dg, dims, dropout=dropout)
    return adaqp.Trainer(dg, model, torch.optim.Adam(model.parameters(), 1e-2), seed=4)


def losses(folder, epochs, dropout, conv="gcn"):
    dg = adaqp.load(folder)
    trainer = make(dg, Exact(), dropout, conv)
    history = trainer.fit(epochs, eval_every=epochs)
    logits = torch.zeros(dg.num_nodes, dg.num_classes)
    logits.index_copy_(0, dg.global_ids, trainer.predict())
    assert history.evaluated_at == [epochs]
    return history.loss, {k: v[-1] for k, v in history.accuracy.items()}, logits


@pytest.mark.parametrize("conv", ["gcn", "sage", "gin", "gat"])
def test_two_ranks_train_like_one(conv, sbm, cut, pool2):
    one, accuracy, whole = losses(cut(sbm, 1), 4, 0.0, conv)
    runs = pool2.run(losses, cut(sbm, 2), 4, 0.0, conv).results
    for two, theirs, _ in runs:
        assert two == pytest.approx(one, rel=1e-4)
        assert theirs == pytest.approx(accuracy, abs=0.01)
    halves = runs[0][2] + runs[1][2]
    assert float((halves - whole).abs().max()) < 1e-2


def interrupted(folder, policy, checkpoint, stop_at, epochs):
    """Losses of one uninterrupted run, and of one that stops, is rebuilt, and resumes.

    Also whether the latter has the history that was saved.
    """
    dg = adaqp.load(folder)
    links = adaqp.LinkTable.uniform(dg.num_parts, 12.5e6, 2e-4)
    with dg.messages(policy, links=links):
        whole = make(dg, policy).fit(epochs).loss
    with dg.messages(policy, links=links):
        first = make(dg, policy)
        first.fit(stop_at, eval_every=stop_at)
        first.save(checkpoint)
        saved = deepcopy(first.history)
        first.fit(1)
    fresh = adaqp.load(folder)
    with fresh.messages(policy):
        second = make(fresh, policy)
        torch.manual_seed(99)
        second.resume(checkpoint)
        has_history = second.history == saved and len(saved.accuracy["val"]) == 1
        pieces = second.fit(epochs - stop_at).loss
    return whole, pieces, has_history


@pytest.mark.parametrize(
    "policy",
    [Exact(), Fixed(4), Stale(), Adaptive(every=6, first_at=2, group_size=10)],
    ids=["exact", "fixed", "stale", "adaptive"],
)
def test_resuming_mid_period_repeats_the_losses(policy, sbm, cut, pool2, tmp_path):
    args = (cut(sbm, 2), policy, str(tmp_path / "checkpoint"), 4, 9)
    for whole, pieces, has_history in pool2.run(interrupted, *args).results:
        assert pieces == whole
        assert has_history
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]


def resumed_with(folder, checkpoint, policy):
    dg = adaqp.load(folder)
    with dg.messages(policy):
        make(dg, policy).resume(checkpoint)


def test_a_checkpoint_of_another_run_is_refused(sbm, directed, cut, tmp_path):
    dg = adaqp.load(cut(sbm, 1))
    with dg.messages(Fixed(4)):
        make(dg, Fixed(4)).save(tmp_path / "here")
    with pytest.raises(DataError, match=r"was written with policy Fixed\(bits=4\)"):
        resumed_with(cut(sbm, 1), tmp_path / "here", Fixed(8))
    with pytest.raises(DataError, match="was written with fingerprint"):
        resumed_with(cut(directed, 1), tmp_path / "here", Fixed(4))
    with pytest.raises(DataError, match="holds no checkpoint"):
        resumed_with(cut(sbm, 1), tmp_path / "nowhere", Fixed(4))


@pytest.mark.parametrize("replaced", ["here.replaced", "here.old"])
def test_a_crash_between_two_renames_loses_nothing(replaced, sbm, cut, tmp_path):
    dg = adaqp.load(cut(sbm, 1))
    with dg.messages(Fixed(4)):
        trainer = make(dg, Fixed(4))
        trainer.fit(2)
        trainer.save(tmp_path / "here")
        # As a process leaves it that is killed after the first rename; release 0.1.0 named it .old.
        (tmp_path / "here").rename(tmp_path / replaced)
        (tmp_path / "here.new").mkdir()
        assert find(tmp_path / "here") == tmp_path / replaced
        again = make(dg, Fixed(4))
        again.resume(tmp_path / "here")
        assert again.epoch == 2
        again.fit(1)
        again.save(tmp_path / "here")
    assert [p.name for p in tmp_path.iterdir()] == ["here"]
    assert find(tmp_path / "here") == tmp_path / "here"


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(sbm, cut, tmp_path, monkeypatch):
    seen, real_fsync, real_rename = [], os.fsync, os.rename

    def synced(descriptor):
        real_fsync(descriptor)
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        seen.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)

    def renamed(source, target, **kwargs):
        real_rename(source, target, **kwargs)
        seen.append(f"now {Path(target).name}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    umask = os.umask(0o027)
    try:
        make(adaqp.load(cut(sbm, 1)), Exact()).save(tmp_path / "here")
    finally:
        os.umask(umask)
    files = list((tmp_path / "here").iterdir())
    before = seen[: seen.index("now here")]
    assert {".metadata", "about.json", "__0_0.distcp"} == {path.name for path in files}
    assert {path.name for path in files} <= set(before)
    assert tmp_path.name in seen[seen.index("now here") :]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


def test_two_runs_with_one_folder_write_apart(sbm, cut, tmp_path, monkeypatch):
    """Another run saves while this one does: each writes its own, and the last one stays."""
    trainer = make(adaqp.load(cut(sbm, 1)), Exact())
    trainer.fit(1)
    save, written = checkpoint.dcp.save, []

    def save_with_another(*args, **settings):
        written.append(Path(settings["checkpoint_id"]))
        if len(written) == 1:
            trainer.save(tmp_path / "here")
            assert find(tmp_path / "here") == tmp_path / "here"
        save(*args, **settings)

    monkeypatch.setattr(checkpoint.dcp, "save", save_with_another)
    trainer.save(tmp_path / "here")
    assert len(set(written)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    trainer.resume(tmp_path / "here")


def resumed_otherwise(folder, checkpoint):
    """A run saved without links or channels, resumed with both at hand."""
    dg = adaqp.load(folder)
    policy = Adaptive(every=6, first_at=3, group_size=10)
    with dg.messages(policy, links=None):
        make(dg, policy).save(checkpoint)
    links = adaqp.LinkTable.uniform(2, 12.5e6, 2e-4)
    with dg.messages(policy, links=links) as messages:
        trainer = make(dg, policy)
        trainer.fit(2)
        trainer.resume(checkpoint)
        trainer.fit(1)
    return trainer.epoch, messages.links is links


def pushed_then_pulled(folder, checkpoint):
    dg = adaqp.load(folder)
    with dg.messages(Fixed(4), backward="push"):
        trainer = make(dg, Fixed(4))
        trainer.fit(1)
        trainer.save(checkpoint)
    with dg.messages(Fixed(4), backward="pull"):
        make(dg, Fixed(4)).resume(checkpoint)


def test_a_checkpoint_decides_what_a_rank_holds(sbm, cut, pool2, tmp_path):
    folder = cut(sbm, 2)
    assert pool2.run(resumed_otherwise, folder, tmp_path / "a").results == [(1, True)] * 2
    with (
        RankPool(2) as pool,
        pytest.raises(RankFailure, match="was written with backward push, this run has pull"),
    ):
        pool.run(pushed_then_pulled, folder, tmp_path / "b")


def evaluated_each_epoch(folder):
    """Wall seconds of each epoch of training alone, and the phases that the history gives it."""
    dg = adaqp.load(folder)
    ends = []
    with dg.messages(Exact()):
        trainer = make(dg, Exact())
        predict = trainer.predict

        def slow_predict(**settings):
            with dg.current_messages.evaluation(), dg.current_messages.clock.phase("wait"):
                time.sleep(0.2)
            return predict(**settings)

        trainer.predict = slow_predict
        for _ in range(4):
            start = time.perf_counter()
            trainer.fit(1)
            ends.append(time.perf_counter() - start)
            trainer.record_evaluation()
    return ends, [sum(step) for step in zip(*trainer.history.seconds.values(), strict=True)]


@pytest.mark.parametrize("is_multilabel", [False, True])
def test_a_split_without_nodes_has_no_accuracy(cut, tmp_path, is_multilabel):
    none, some = [False] * 4, [True, True, False, False]
    label = [[1.0], [0.0], [1.0], [1.0]] if is_multilabel else [0, 1, 0, 1]
    feat = torch.eye(4)
    graph = from_edge_index([0, 1, 2], [1, 2, 3], 4, feat, label, some, none, none)
    dg = adaqp.load(cut(graph, 1))
    with dg.messages(Exact()):
        trainer = make(dg, Exact(), 0.0)
        history = trainer.fit(2, eval_every=1)
        assert history.accuracy["val"] == history.accuracy["test"] == [None, None]
        assert all(0 <= score <= 1 for score in history.accuracy["train"])
        again = History.from_tensors(history.to_tensors())
        assert again == history
        assert "NaN" not in json.dumps(history.to_json())


def test_an_evaluation_is_on_no_epochs_clock(sbm, cut, pool2):
    for wall_s, phases_s in pool2.run(evaluated_each_epoch, cut(sbm, 2)).results:
        for whole, parts in zip(wall_s, phases_s, strict=True):
            assert parts <= whole


def test_multilabel_targets_train(cut, pool2):
    draw = torch.Generator().manual_seed(2)
    base = generated.sbm(400, blocks=4, degree=8, feat=10, seed=1)
    target = torch.nn.functional.one_hot(base.label, 4).float()
    target = torch.maximum(
        target, target.roll(1, dims=1) * (torch.rand(400, 1, generator=draw) < 0.5)
    )
    graph = from_edge_index(
        base.src, base.dst, 400, base.feat, target, base.train_mask, base.val_mask, base.test_mask
    )
    one, f1, _ = losses(cut(graph, 1), 30, 0.0)
    assert one[-1] < one[0]
    assert f1["train"] > 0.5
    two, theirs, _ = pool2.run(losses, cut(graph, 2), 30, 0.0).results[0]
    assert two[:5] == pytest.approx(one[:5], rel=1e-4)
    assert theirs["train"] == pytest.approx(f1["train"], abs=0.05)


def rows_of_training(folder):
    dg = adaqp.load(folder)
    return int(dg.train_mask.sum()), losses(folder, 3, 0.0)[0]


def test_a_part_without_training_nodes_and_without_cut_edges_trains(cut, pool2):
    # Two components, METIS cuts none of their edges, and only the first holds training nodes.
    ring = torch.arange(40)
    src = torch.cat([ring, ring + 40])
    dst = torch.cat([ring.roll(-1), ring.roll(-1) + 40])
    src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    is_first = torch.arange(80) < 40
    graph = from_edge_index(
        src,
        dst,
        80,
        torch.randn(80, 6),
        torch.arange(80) % 3,
        is_first,
        ~is_first,
        ~is_first & False,
    )
    for method in ("metis", "random"):
        one = losses(cut(graph, 1), 3, 0.0)[0]
        runs = pool2.run(rows_of_training, cut(graph, 2, method)).results
        assert sum(num for num, _ in runs) == 40
        if method == "metis":
            assert 0 in {num for num, _ in runs}
        for _, two in runs:
            assert two == pytest.approx(one, rel=1e-4)


def as_configured(folder, steps):
    """Losses of the model that the command line builds, on float64 features."""
    dg = adaqp.load(folder)
    dg.feat = dg.feat.double()
    torch.manual_seed(0)
    model = ModelConfig(hidden=16, dropout=0.0).build(dg)
    with dg.messages(Exact()):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return adaqp.Trainer(dg, model, optimizer).fit(steps).loss


def test_float64_features_train_in_float64(sbm, cut, pool2):
    one = as_configured(cut(sbm, 1), 5)
    two = pool2.run(as_configured, cut(sbm, 2), 5).results[0]
    assert two == pytest.approx(one, rel=1e-12)


def profiled_then_aggregated(folder):
    dg = adaqp.load(folder)
    measure(dg, ModelConfig(hidden=8).build(dg), overlap="edges", steps=1)
    with torch.no_grad():
        after = dg.aggregate(dg.feat)
        return float((after - adaqp.load(folder).aggregate(dg.feat.clone())).abs().max())


def test_a_profile_leaves_the_graph_as_it_was(sbm, cut, pool2):
    assert max(pool2.run(profiled_then_aggregated, cut(sbm, 2)).results) < 1e-6


def in_dtype(folder, dtype, policy):
    dg = adaqp.load(folder)
    dg.feat = dg.feat.to(dtype)
    torch.manual_seed(0)
    model = adaqp.nn.gcn(dg, [dg.feat.shape[1], 16, dg.num_classes], dropout=0.0).to(dtype)
    with dg.messages(policy):
        trainer = adaqp.Trainer(dg, model, torch.optim.SGD(model.parameters(), 0.1))
        return trainer.fit(3).loss, trainer.predict().dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", [Exact(), Fixed(8)], ids=["exact", "fixed"])
def test_other_float_types_train(dtype, policy, sbm, cut, pool2):
    reference = pool2.run(in_dtype, cut(sbm, 2), torch.float32, Exact()).results[0][0]
    loss, out = pool2.run(in_dtype, cut(sbm, 2), dtype, policy).results[0]
    assert out == dtype
    rel = 1e-3 if dtype == torch.float64 else 0.05
    assert loss == pytest.approx(reference, rel=rel)


def test_a_graph_without_training_nodes_is_refused(cut):
    none = torch.zeros(10, dtype=torch.bool)
    graph = from_edge_index(
        torch.arange(9),
        torch.arange(1, 10),
        10,
        torch.randn(10, 3),
        torch.arange(10) % 2,
        none,
        ~none,
        none,
    )
    dg = adaqp.load(cut(graph, 1))
    with pytest.raises(ConfigError, match="no node of the graph is a training node"):
        make(dg, Exact())
