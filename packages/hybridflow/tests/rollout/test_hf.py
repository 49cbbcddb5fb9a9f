"""Generation through a Hugging Face model's own `generate`, against ours."""

from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hybridflow.models import pieces
from hybridflow.models.config import read_config
from hybridflow.models.decoder import Decoder
from hybridflow.rollout import hf
from hybridflow.rollout.native import generator as native
from hybridflow.rollout.sampling import Sampling
from shared.errors import ConfigError, DataError

VOCABULARY = 61
LENGTHS = [3, 9, 1, 5, 9, 2]


def hugging_face(family, **more):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "initializer_range": 0.3, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": None, **more,
    }  # fmt: skip
    config = CONFIG_MAPPING[family](**sizes)
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.fixture(scope="module")
def pair():
    theirs = hugging_face(
        "llama", hidden_size=32, intermediate_size=56, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    ours = Decoder(read_config(theirs), dtype=torch.float64).requires_grad_(False)
    state = theirs.state_dict()
    assert not pieces.load(ours, lambda name, box: state[name][_slices(box)])
    return theirs, ours


def _slices(box):
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


def prompts_of(lengths):
    chosen = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (length,), generator=chosen) for length in lengths]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("num_places", [4, 256])
def test_responses_are_those_of_ours(pair, temperature, num_places):
    theirs, ours = pair
    n = 1 if temperature == 0 else 3
    sampling = Sampling(max_new_tokens=9, num_samples=n, temperature=temperature, seed=2)
    ids = torch.arange(n * len(LENGTHS)) * 5
    asked = {"sample_ids": ids, "step": 3, "num_places": num_places}
    # A token that ends one of them early, so that ending is looked at too.
    end = int(native.generate(ours, prompts_of(LENGTHS), sampling, **asked).tokens[0, 7])
    sampling = replace(sampling, end_token=end)
    done = []
    found = hf.generate(theirs, prompts_of(LENGTHS), sampling, on_token=done.append, **asked)
    expected = native.generate(ours, prompts_of(LENGTHS), sampling, **asked)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.prompt_lengths, expected.prompt_lengths)
    # It hands logits on in float32.
    torch.testing.assert_close(
        found.log_probs.double(), expected.log_probs, rtol=0, atol=2e-5, check_dtype=False
    )
    assert len(set((found.lengths - found.prompt_lengths).tolist())) > 1
    assert done == sorted(done)
    assert done[-1] == len(ids)
    assert found.num_steps >= 8


def test_a_model_that_ours_does_not_know_generates():
    model = hugging_face("gpt2", n_embd=32, n_layer=2, n_head=2, n_positions=32)
    with pytest.raises(ConfigError, match="gpt2"):
        read_config(model)
    sampling = Sampling(max_new_tokens=5, num_samples=2, temperature=1.3, end_token=7)
    found = hf.generate(model, prompts_of(LENGTHS), sampling)
    for row, start, stop, worth in zip(
        found.tokens, found.prompt_lengths, found.lengths, found.log_probs, strict=True
    ):
        with torch.no_grad():
            logits = model(row[None, :stop]).logits[0] / 1.3
        expected = torch.log_softmax(logits, -1)[start - 1 : stop - 1]
        expected = expected.gather(1, row[start:stop, None])[:, 0]
        torch.testing.assert_close(worth[start:stop].double(), expected, rtol=0, atol=2e-5)
        assert not worth[:start].any()
        assert not worth[stop:].any()


def test_the_models_own_settings_are_put_aside_and_come_back(pair):
    theirs, ours = pair
    own = theirs.generation_config
    own.repetition_penalty, own.top_k, own.eos_token_id, own.min_length = 5.0, 1, 7, 3
    try:
        sampling = Sampling(max_new_tokens=9, num_samples=2)
        found = hf.generate(theirs, prompts_of(LENGTHS), sampling)
        assert theirs.generation_config is own
    finally:
        own.repetition_penalty, own.top_k, own.eos_token_id, own.min_length = None, None, None, None
    assert torch.equal(found.tokens, native.generate(ours, prompts_of(LENGTHS), sampling).tokens)
    assert (found.lengths - found.prompt_lengths == 9).all()


def test_bad_prompts_are_refused(pair):
    theirs, _ = pair
    sampling = Sampling(max_new_tokens=4, num_samples=2)
    with pytest.raises(DataError, match="got an empty one at 1"):
        hf.generate(theirs, [torch.tensor([1]), torch.tensor([], dtype=torch.int64)], sampling)
    with pytest.raises(DataError, match="got none"):
        hf.generate(theirs, [], sampling)
    with pytest.raises(DataError, match="expected 4 sample_ids"):
        hf.generate(theirs, prompts_of([2, 3]), sampling, sample_ids=torch.arange(2))
    with pytest.raises(ConfigError, match="65 positions, and the model has 64"):
        hf.generate(theirs, prompts_of([61]), sampling)


def test_an_encoder_is_refused(pair):
    class Both:
        class config:
            is_encoder_decoder = True

    with pytest.raises(ConfigError, match="expected a decoder alone"):
        hf.generate(Both(), prompts_of([2]), Sampling(max_new_tokens=2))
