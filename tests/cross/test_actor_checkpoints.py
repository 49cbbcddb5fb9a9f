"""An actor of hybridflow saved through bytecheckpoint's storage, and gone on with in another layout."""

import pytest
import torch

import hybridflow as hy
from bytecheckpoint import DCPReader, DCPWriter
from shared.errors import MeshyardError

MODEL = {**hy.PRESETS["tiny-llama"], "vocab_size": 16, "num_key_value_heads": 2}
SAMPLING = hy.Sampling(max_new_tokens=2, temperature=0)


def actor_on(workers, train=None):
    optimizer = hy.AdamW(lr=1e-2)
    return hy.Actor(
        MODEL, workers.pool(workers.num_ranks), train=train, dtype="float64", optimizer=optimizer
    )


def step(actor, number):
    """A step on greedy responses; what it tells."""
    batch = actor.generate(hy.tasks.DigitSort(k=2).batch(number, 8), SAMPLING).result()
    draw = torch.Generator().manual_seed(number)
    batch["advantages"] = torch.randn(batch["tokens"].shape, generator=draw).double()
    batch["old_log_probs"] = batch["rollout_log_probs"]
    return actor.update(batch).result()


@pytest.mark.slow
def test_an_actor_goes_on_in_another_layout_from_bytecheckpoints_files(tmp_path):
    storage = {"storage_writer": DCPWriter, "storage_reader": DCPReader}
    checkpoint = hy.Checkpoint(tmp_path, **storage)
    with hy.Workers.local(2) as workers:
        actor = actor_on(workers, "1-2-1")
        step(actor, 0)
        checkpoint.save(1, {"actor": actor}, {"next": 1})
        expected = step(actor, 1)
    with hy.Workers.inline() as workers:
        actor = actor_on(workers)
        assert hy.Checkpoint(tmp_path, **storage).load({"actor": actor}) == {"next": 1}
        found = step(actor, 1)
    for name in ("loss", "grad_norm", "entropy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-10), name


def test_a_flipped_bit_is_found(tmp_path):
    checkpoint = hy.Checkpoint(tmp_path, storage_writer=DCPWriter, storage_reader=DCPReader)
    with hy.Workers.inline() as workers:
        actor = actor_on(workers)
        path = checkpoint.save(1, {"actor": actor}, {})
        largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(data)
        with pytest.raises(MeshyardError):
            checkpoint.load({"actor": actor})
