"""Two ranks read each other's cached outputs, and train as without them."""

import pytest

import diffusionpipe as dp
from diffusionpipe.runtime.engine import Engine
from shared.errors import MeshyardError

from .toy import BATCH, PLANS, encode_ids, encode_pixels, make_batch, make_job, make_sgd


def name_samples(number):
    return make_batch(number) | {"keys": [f"{number}/{row}" for row in range(BATCH)]}


def turn(batch):
    """The same samples, each where another rank encodes it."""
    return {
        name: value[::-1] if isinstance(value, list) else value.flip(0)
        for name, value in batch.items()
    }


def train(name, folder):
    """Losses of both epochs, and the rows encoded in each."""
    encoded = []

    def encode(batch):
        encoded.append(len(batch["pixels"]))
        return encode_pixels(batch)

    job = make_job(frozen={"z": encode, "text": encode_ids})
    epochs = [[name_samples(0), name_samples(1)], [turn(name_samples(1)), turn(name_samples(0))]]
    if folder is not None:
        job = dp.cache(job, epochs[0][0], folder)
    engine, losses, counts = Engine(job, PLANS[name](), make_sgd), [], []
    for batches in epochs:
        encoded.clear()
        losses += engine.steps(batches)
        counts.append(sum(encoded))
    weights = {key: value.detach().clone() for key, value in engine.job.trained.items()}
    return losses, counts, weights


@pytest.mark.parametrize("name", ["data 2", "chain of 2", "folded 2"])
def test_two_ranks_train_as_without_a_cache(name, pair, tmp_path):
    plain = pair.run(train, name, None).results
    cached = pair.run(train, name, tmp_path).results
    for (losses, counts, weights), (got, got_counts, got_weights) in zip(
        plain, cached, strict=True
    ):
        assert got == losses
        # A rank's share of both batches; the first epoch has the checks' rows too.
        assert (counts[1], got_counts[1]) == (BATCH, 0)
        assert got_counts[0] >= BATCH
        assert all(
            value.isnan().all() or value.equal(weights[k]) for k, value in got_weights.items()
        )


def train_without_keys(folder):
    job = dp.cache(make_job(), name_samples(0), folder)
    engine = Engine(job, PLANS["chain of 2"](), make_sgd)
    try:
        list(engine.steps([make_batch(0)]))
    except MeshyardError as error:  # the pool goes on to the next test
        return str(error)


def test_a_batch_without_keys_ends_all_ranks(pair, tmp_path):
    for message in pair.run(train_without_keys, tmp_path).results:
        assert "batch['keys']: expected a list of texts" in message
