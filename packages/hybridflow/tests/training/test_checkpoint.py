"""A run that was saved and loaded goes on as if nothing had been, in any layout."""

import errno
import json
import re
import shutil
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import hybridflow as hy
from hybridflow.training.checkpoints.checkpoint import Checkpoint
from shared.errors import ConfigError, DataError, DiskFullError, RankFailure

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

# Fewer key heads than shards have, biases, and one matrix for embedding and head: what the parts of
# a checkpoint come from is held twice in all the ways there are.
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
LAYOUTS = [("1-2-1", False), ("2-1-1", False), ("1-1-2", False), ("1-1-2", True)]


def models(workers, train=None, is_sharded=False, generate=None, **changed):
    """An actor and a critic that share a pool."""
    pool = workers.pool(workers.num_ranks)
    return on(pool, train, is_sharded, generate, **changed)


def on(pool, train=None, is_sharded=False, generate=None, **changed):
    settings = {"train": train, "dtype": "float64", "max_tokens": 40, **changed}
    if generate is None and train is not None and train[0] != "1":
        generate = "1-1"  # which has one stage
    # A rate that depends on how many steps there were.
    adam = hy.AdamW(lr=3e-3, max_grad_norm=0.5, schedule="linear", num_steps=10)
    settings.setdefault("optimizer", adam)
    model = settings.pop("model", MODEL)
    more = {"generate": generate, "is_sharded": is_sharded}
    return {
        "actor": hy.Actor(model, pool, **more, **settings),
        "critic": hy.Critic(model, pool, **settings),
    }


def prompts():
    draw = torch.Generator().manual_seed(1)
    lengths = torch.tensor([5, 3, 7, 4])
    tokens = torch.randint(1, 48, (4, 7), generator=draw)
    tokens[torch.arange(7) >= lengths[:, None]] = 0
    return hy.Batch(prompts=tokens, prompt_lengths=lengths, sample_ids=torch.arange(4))


def train(groups, steps):
    """Generates and trains; everything that came out, in order."""
    told = []
    sampling = hy.Sampling(max_new_tokens=4, num_samples=2, seed=5)
    for step in steps:
        batch = groups["actor"].generate(prompts(), sampling, step=step).result()
        batch |= groups["critic"].values(batch).result()
        draw = torch.Generator().manual_seed(step)
        batch["old_log_probs"] = batch["rollout_log_probs"].double()
        batch["advantages"] = torch.randn(batch["tokens"].shape, generator=draw).double()
        batch["returns"] = batch["advantages"] + batch["values"]
        updates = [groups[name].update(batch) for name in groups]
        numbers = [found[key] for found in updates for key in ("loss", "grad_norm", "lr")]
        told += [batch["tokens"], batch["versions"], batch["rollout_log_probs"]]
        told += [batch["values"], torch.tensor(numbers, dtype=torch.float64)]
    return told


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As ranks have: threads that wait for one another take long where other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Four steps of one rank with a checkpoint after two, and what came out of the last two."""
    checkpoint = Checkpoint(tmp_path_factory.mktemp("alone"))
    with hy.Workers.inline() as workers:
        groups = models(workers)
        train(groups, range(2))
        checkpoint.save(2, groups, {"next_step": 2})
        return checkpoint, train(groups, range(2, 4))


def test_a_resumed_run_is_the_same_bit_for_bit(saved):
    checkpoint, wanted = saved
    with hy.Workers.inline() as workers:
        groups = models(workers, seed=7)
        step = checkpoint.load(groups)["next_step"]
        assert groups["actor"].num_updates().result() == 2
        found = train(groups, range(step, 4))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("layout", "is_sharded"), LAYOUTS)
def test_what_one_rank_saved_goes_on_in_another_layout(saved, pair, layout, is_sharded):
    checkpoint, wanted = saved
    groups = on(pair, layout, is_sharded, seed=7)
    checkpoint.load(groups)
    close(train(groups, range(2, 4)), wanted)


def test_what_two_ranks_saved_goes_on_in_the_same_and_in_other_layouts(pair, tmp_path):
    checkpoint = Checkpoint(tmp_path)
    # Saved while the weights lie as generation has them.
    first = on(pair, "1-2-1", generate="1-1")
    train(first, range(2))
    first["actor"].generate(prompts(), hy.Sampling(max_new_tokens=1)).result()
    checkpoint.save(2, first, {})
    wanted = train(first, range(2, 3))
    again = on(pair, "1-2-1", generate="1-1", seed=7)
    checkpoint.load(again)
    found = train(again, range(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    other = on(pair, "1-1-2", seed=7)
    checkpoint.load(other)
    close(train(other, range(2, 3)), wanted)
    with hy.Workers.inline() as workers:
        alone = models(workers, seed=7)
        checkpoint.load(alone)
        close(train(alone, range(2, 3)), wanted)


def test_plain_torch_reads_whole_tensors_and_nothing_is_there_twice(pair, tmp_path):
    """Saved by two ranks that share everything out, against what a rank alone has loaded."""
    groups = on(pair, "1-1-2", is_sharded=True)
    train(groups, range(1))
    path = Checkpoint(tmp_path).save(1, groups, {}) / "actor"
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["actor.version"] == 1
    name = "model.layers.1.self_attn.o_proj.weight"
    some = {key: torch.zeros_like(whole[key]) for key in whole if key.endswith(name)}
    kinds = ["", "optimizer.exp_avg.", "optimizer.exp_avg_sq.", "optimizer.step."]
    assert some.keys() == {f"actor.{kind}{name}" for kind in kinds}
    dcp.load(some, checkpoint_id=path)
    with hy.Workers.inline() as workers:
        alone = models(workers, seed=7)
        Checkpoint(tmp_path).load(alone)
        again = Checkpoint(tmp_path / "alone").save(1, alone, {}) / "actor"
    dcp_to_torch_save(again, tmp_path / "alone.pt")
    wanted = torch.load(tmp_path / "alone.pt", weights_only=True)
    assert whole.keys() == wanted.keys()
    assert all(torch.equal(whole[key], wanted[key]) for key in whole)
    assert all(torch.equal(some[key], whole[key]) for key in some)
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for key, tensor in whole.items():
        assert sum(torch.Size(c.sizes).numel() for c in stored[key].chunks) == tensor.numel()


def test_other_storage_can_be_passed(pair, saved, tmp_path):
    writer = partial(dcp.FileSystemWriter, single_file_per_rank=False)
    groups = on(pair, "1-2-1")
    path = Checkpoint(tmp_path, storage_writer=writer).save(0, groups, {})
    assert len(list((path / "actor").iterdir())) > 20
    Checkpoint(tmp_path, storage_reader=dcp.FileSystemReader).load(groups)


def test_extra_comes_back(saved, tmp_path):
    rows = hy.Ragged.of([torch.arange(3), torch.arange(1)])
    buffered = hy.Batch(x=torch.randn(2, 3), rows=rows, text=["a", "b"], meta={"temperature": 0.5})
    extra = {
        "next_step": 3,
        "beta": 0.1,
        "buffer": [buffered, None],
        "nested": {"rng": torch.get_rng_state(), "order": [3, 1]},
    }
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(3, {}, extra)
    found = checkpoint.load({})
    batch, none = found["buffer"]
    assert none is None
    assert (found["next_step"], found["beta"]) == (3, 0.1)
    assert torch.equal(batch["x"], buffered["x"])
    assert torch.equal(batch["rows"].values, rows.values)
    assert torch.equal(batch["rows"].lengths, rows.lengths)
    assert (batch["text"], batch.meta) == (["a", "b"], {"temperature": 0.5})
    assert torch.equal(found["nested"]["rng"], torch.get_rng_state())
    assert found["nested"]["order"] == [3, 1]


@pytest.mark.parametrize("value", [object(), hy.Batch(x=[object()]), {(1, 2): 3}])
def test_extra_that_could_not_come_back_is_refused(tmp_path, value):
    with pytest.raises(DataError, match="extra: expected JSON values"):
        Checkpoint(tmp_path).save(0, {}, {"value": value})
    assert not list(tmp_path.iterdir())


def test_the_newest_are_kept(tmp_path, caplog):
    checkpoint = Checkpoint(tmp_path / "run", keep=2)
    assert checkpoint.latest() is None
    for step in (1, 2, 10, 300):
        checkpoint.save(step, {}, {"step": step})
    assert checkpoint.steps == [10, 300]
    assert checkpoint.load({}, step=10) == {"step": 10}
    checkpoint.save(10, {}, {"step": "again"})
    assert checkpoint.load({}, step=10) == {"step": "again"}
    assert checkpoint.steps == [10, 300]
    assert "newer than what was saved now" in caplog.text
    with pytest.raises(ConfigError, match="keep: expected at least 1"):
        Checkpoint(tmp_path, keep=0)
    with pytest.raises(ConfigError, match="got step -1"):
        checkpoint.save(-1, {}, {})


def test_what_was_cut_short_is_not_seen_and_is_removed(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1, {}, {"step": 1})
    (tmp_path / "step-000002.partial" / "actor").mkdir(parents=True)
    # Ended between the two renames of a step that was saved again.
    (tmp_path / "step-000001").rename(tmp_path / "step-000001.replaced")
    assert checkpoint.latest() == 1
    assert checkpoint.load({}) == {"step": 1}
    checkpoint.save(3, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]
    shutil.copytree(tmp_path / "step-000003", tmp_path / "step-000003.replaced")
    checkpoint.save(4, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


class _FullDisk(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        super().write_data(plan, planner)
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_loses_nothing(saved, tmp_path):
    with hy.Workers.inline() as workers:
        groups = models(workers)
        Checkpoint(tmp_path).save(1, groups, {})
        full = Checkpoint(tmp_path, storage_writer=_FullDisk)
        told = r"step-000002: expected room on the disk .*, got [\d,]+ bytes free"
        with pytest.raises(DiskFullError, match=told):
            full.save(2, groups, {})
        with pytest.raises(DiskFullError, match="step-000001: expected room"):
            full.save(1, groups, {})
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
        full.load(groups)


def test_a_failed_rank_does_not_end_the_others(pair, tmp_path):
    groups = on(pair, "1-2-1")
    writer = partial(dcp.FileSystemWriter, thread_count="none")
    with pytest.raises(RankFailure, match=r"cannot be written: TypeError.*\(rank 0\)"):
        Checkpoint(tmp_path, storage_writer=writer).save(1, groups, {})
    assert groups["actor"].num_updates().result() == 0


@pytest.mark.parametrize("layout", ["1-2-1", "2-1-1"])
def test_another_model_is_refused_before_anything_changes(saved, pair, layout):
    checkpoint, _ = saved
    for change, told in [
        (
            {"model": {**MODEL, "intermediate_size": 64}},
            r"of shape \[64, 32\] as in this run, got shape \[48, 32\]; resume with",
        ),
        ({"model": {**MODEL, "num_hidden_layers": 3}}, "model.layers.2.*, got none; resume with"),
        ({"dtype": "float32"}, r"of torch\.float32, got torch\.float64; .* that it was saved from"),
    ]:
        actor = on(pair, layout, **change)["actor"]
        with pytest.raises(RankFailure, match=told) as failure:
            checkpoint.load({"actor": actor})
        assert re.search(told, failure.value.mistake)
        assert "\n" not in failure.value.mistake
        assert actor.num_updates().result() == 0


def test_fewer_layers_and_no_optimizer(saved):
    checkpoint, _ = saved
    with hy.Workers.inline() as workers:
        pool = workers.pool(1)
        with pytest.raises(
            RankFailure, match=r"expected actor.model.layers.1.* of none as in this run, got shape"
        ):
            checkpoint.load({"actor": on(pool, model={**MODEL, "num_hidden_layers": 1})["actor"]})
        asked = on(pool, optimizer=None)
        checkpoint.load(asked)
        assert asked["actor"].num_updates().result() == 2


def test_a_checkpoint_that_is_not_there(tmp_path, saved):
    checkpoint, _ = saved
    with pytest.raises(DataError, match="expected a checkpoint, got none; check the folder"):
        Checkpoint(tmp_path / "nowhere").load({})
    with pytest.raises(DataError, match=r"expected step-000007, got \[2\]"):
        checkpoint.load({}, step=7)
    with hy.Workers.inline() as workers:
        groups = {"cost": models(workers)["critic"]}
        told = r"expected the groups \['cost'\], got \['actor', 'critic'\]"
        with pytest.raises(DataError, match=told):
            checkpoint.load(groups)


def test_damage_is_found(tmp_path, saved):
    folder = tmp_path / "run"
    checkpoint = Checkpoint(folder)
    with hy.Workers.inline() as workers:
        groups = models(workers)

        def damaged(name, change, told, error=DataError):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(saved[0].folder, folder)
            file = folder / "step-000002" / name
            change(file)
            with pytest.raises(error, match=told):
                checkpoint.load(groups)

        def cut(file):
            file.write_bytes(file.read_bytes()[:-1])

        def spoil(file):
            file.write_bytes(b"x" * file.stat().st_size)

        damaged("actor/__0_0.distcp", cut, r"__0_0.distcp: expected \d+ bytes, got \d+ bytes")
        damaged("critic/.metadata", lambda file: file.unlink(), "got no file; load an earlier one")
        damaged("critic/.metadata", spoil, "cannot be read: ", RankFailure)
        damaged("actor/__0_0.distcp", spoil, "cannot be read: ", RankFailure)
        damaged("checkpoint.json", cut, "checkpoint.json cannot be read")
        damaged("extra.pt", spoil, "extra.pt cannot be read")

        def age(file):
            file.write_text(json.dumps({**json.loads(file.read_text()), "format": 0}))

        damaged("checkpoint.json", age, "expected format 1, got 0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [(("1-4-1", False), ("2-1-2", True)), (("1-2-2", True), ("2-2-1", False))],
)
def test_four_ranks(tmp_path, first, second):
    checkpoint = Checkpoint(tmp_path)
    with hy.Workers.local(4, timeout=timedelta(seconds=100)) as workers:
        pool = workers.pool(4)
        groups = on(pool, *first)
        train(groups, range(2))
        checkpoint.save(2, groups, {})
        wanted = train(groups, range(2, 4))
        for layout in (first, second):
            other = on(pool, *layout, seed=7)
            checkpoint.load(other)
            close(train(other, range(2, 4)), wanted)
