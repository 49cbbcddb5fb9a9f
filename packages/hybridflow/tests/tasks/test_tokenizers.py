"""Tokenizers: exact round trips, what they refuse, and one of transformers behind the protocol."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.tasks.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    ChatTokenizer,
    Tokenizer,
    as_tokenizer,
)
from shared.errors import ConfigError, DataError

BYTES, CHARS = ByteTokenizer(), CharTokenizer("0123456789>")
# Surrogates without their other half are no Unicode text, and yet a str may hold them.
ANY_TEXT = st.text(st.characters(exclude_categories=()))


@given(ANY_TEXT)
def test_bytes_bring_any_text_back(text):
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    assert all(3 <= token < BYTES.vocab_size for token in ids)
    assert ids == [byte + 3 for byte in text.encode("utf-8", "surrogatepass")]


@given(st.lists(st.integers(0, 400)))
def test_bytes_decode_whatever_a_policy_draws(ids):
    text = BYTES.decode(ids)
    assert BYTES.decode([token for token in ids if token > 2]) == text
    data = bytes(min(token - 3, 255) for token in ids if token > 2)
    try:
        assert text == data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        assert text == data.decode("utf-8", "replace")


@given(st.data(), st.text(min_size=1).map(lambda text: "".join(dict.fromkeys(text))))
def test_characters_bring_text_of_their_alphabet_back(data, alphabet):
    tokenizer = CharTokenizer(alphabet)
    text = data.draw(st.text(st.sampled_from(alphabet)))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [alphabet[token - 2] for token in ids] == list(text)
    noisy = [token for real in ids for token in (0, real, 1)]
    assert tokenizer.decode(noisy) == text
    assert tokenizer.vocab_size == len(alphabet) + 2 > max(ids, default=0)


def test_special_tokens_differ_and_padding_is_zero():
    assert (BYTES.pad_token, BYTES.end_token, BYTES.begin_token) == (0, 1, 2)
    assert (CHARS.pad_token, CHARS.end_token, CHARS.encode("0")) == (0, 1, [2])


def test_ids_beyond_the_alphabet_are_shown():
    assert CHARS.decode([2, CHARS.vocab_size, 3]) == "0\ufffd1"
    assert BYTES.decode([3 + 65, BYTES.vocab_size, 3 + 66]) == "A\ufffdB"


def test_an_unknown_character_is_named():
    with pytest.raises(DataError, match="character 'x' at 2 of '12x>'"):
        CHARS.encode("12x>")


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_alphabets_that_are_none(alphabet):
    with pytest.raises(ConfigError, match="each once"):
        CharTokenizer(alphabet)


@pytest.mark.parametrize("tokenizer", [BYTES, CHARS])
def test_tokenizers_pickle_and_compare(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again == tokenizer
    assert hash(again) == hash(tokenizer)
    assert again != CharTokenizer("ab")
    assert isinstance(tokenizer, Tokenizer)
    assert not isinstance(tokenizer, ChatTokenizer)
    assert as_tokenizer(tokenizer) is tokenizer


def test_objects_that_are_no_tokenizer():
    with pytest.raises(ConfigError, match="got list"):
        as_tokenizer([])


def make_theirs(**specials):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<unk>", "<s>", "</s>", "user:", "model:", "red", "blue"]
    model = tokenizers.models.WordLevel({name: k for k, name in enumerate(names)}, "<unk>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", **specials)


def test_a_tokenizer_of_transformers_fits():
    theirs = make_theirs(eos_token="</s>")
    ours = as_tokenizer(theirs)
    assert isinstance(ours, ChatTokenizer)
    assert (ours.vocab_size, ours.pad_token, ours.end_token) == (7, 0, 2)
    assert ours.encode("red blue") == [1, 5, 6]
    assert ours.decode([1, 5, 6, 2]) == "red blue"
    messages = [{"role": "user", "content": "red"}]
    with pytest.raises(DataError, match="chat_template"):
        ours.encode_chat(messages)
    theirs.chat_template = (
        "<s> {% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}model:{% endif %}"
    )
    # One begin token: the template's.
    assert ours.encode_chat(messages) == [1, 3, 5, 4]
    assert pickle.loads(pickle.dumps(ours)).encode("red") == [1, 5]


def test_a_tokenizer_without_an_end_is_refused():
    with pytest.raises(ConfigError, match="eos_token"):
        as_tokenizer(make_theirs())
