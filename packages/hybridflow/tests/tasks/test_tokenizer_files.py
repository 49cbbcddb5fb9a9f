"""transformers reads our tokenizers as they are: the same ids, the same text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.tasks.digit_sort import make
from hybridflow.tasks.tokenizer_files import write_tokenizer
from hybridflow.tasks.tokenizers import ByteTokenizer, CharTokenizer, as_tokenizer
from shared.errors import DataError

transformers = pytest.importorskip("transformers", reason="reads the files")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    def read(tokenizer):
        folder = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(tokenizer, folder)
        return as_tokenizer(transformers.AutoTokenizer.from_pretrained(folder))

    return read


def test_bytes_have_their_ids(theirs):
    ours, found = ByteTokenizer(), theirs(ByteTokenizer())
    assert (found.vocab_size, found.end_token) == (ours.vocab_size, ours.end_token)

    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text):
        ids = ours.encode(text)
        assert found.encode(text) == ids
        assert found.decode([*ids, ours.end_token, ours.pad_token]) == text

    check()


def test_every_byte_has_its_id(theirs):
    found = theirs(ByteTokenizer())
    assert [found.decode([3 + byte]) for byte in range(128)] == [chr(byte) for byte in range(128)]


@pytest.mark.parametrize("alphabet", ["abc", "09 =>\n.\\\u00e9"])
def test_characters_have_their_ids(theirs, alphabet):
    ours, found = CharTokenizer(alphabet), theirs(CharTokenizer(alphabet))
    assert (found.vocab_size, found.end_token) == (ours.vocab_size, ours.end_token)
    text = alphabet + alphabet[::-1]
    assert found.encode(text) == ours.encode(text)
    assert found.decode([*ours.encode(text), 1, 0]) == text
    with pytest.raises(DataError, match=r"no tokens for 'x'.*give texts of the kind"):
        found.encode("x")


def test_a_tasks_tokenizer_is_written(theirs):
    task = make(2, 0)
    assert theirs(task.tokenizer).encode("12") == task.tokenizer.encode("12")


def test_a_tokenizer_of_transformers_is_left_to_its_own_files(theirs, tmp_path):
    write_tokenizer(theirs(CharTokenizer("ab")), tmp_path)
    assert not list(tmp_path.iterdir())
