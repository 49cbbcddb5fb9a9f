"""Words that mean one thing in all texts for users: what was stopped is resumed."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOMES = [ROOT / "shared", *(path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml")))]
OTHER_WORDS = re.compile(
    r"\b(?:(?:go(?:es|ing)?|went|gone|carr(?:y|ies|ying|ied)) on|continu(?:e|es|ing|ed)|"
    r"pick(?:s|ed|ing)? up where)\b",
    re.IGNORECASE,
)
# What a run that was stopped is resumed from, or by.
RESUMED = re.compile(
    r"from .*checkpoint|interrupt|\bsaved\b|\bloaded\b|where (?:it|another|the|a) .*(?:stopped|stood|left)|"
    r"same command|by itself",
    re.IGNORECASE,
)


def split_sentences(text):
    """Sentences and their parts between semicolons and colons, without line ends."""
    return re.split(r"(?<=[.;:!?])\s+|\n\s*\n|\n\s*[-|#]", text)


def find_other_words(text):
    """Sentences that say `go on` where they mean `resume`."""
    flat = (" ".join(sentence.split()) for sentence in split_sentences(text))
    return [one for one in flat if OTHER_WORDS.search(one) and RESUMED.search(one)]


def read_strings(path):
    """All strings of a module, docstrings included; an f-string as one, without its values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "...".join(str(one.value) for one in node.values if isinstance(one, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("home", HOMES, ids=lambda home: home.name)
def test_what_was_stopped_is_resumed(home):
    modules = [*home.glob("src/**/*.py"), *home.glob("examples/*.py")]
    texts = [text for path in modules for text in read_strings(path)]
    pages = [home / "README.md", *home.glob("docs/*.md")]
    texts += [page.read_text(encoding="utf-8") for page in pages]
    assert [one for text in texts for one in find_other_words(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "It goes on\nfrom its last checkpoint.",
        "A loader carries on where another loader stopped.",
        "Fine.\n\n`train` saves and continues by itself, too",
        "- fine; interrupted runs went on",
    ],
)
def test_another_word_is_found(text):
    assert len(find_other_words(text)) == 1


def test_work_that_was_never_stopped_may_go_on():
    assert find_other_words("A checkpoint is written. Training goes on; it was saved.") == []


def test_strings_are_read_whole(tmp_path):
    (tmp_path / "a.py").write_text('"""Doc."""\nx = f"it goes {n} on " "from a checkpoint"\n')
    assert {"Doc.", "it goes ... on from a checkpoint"} <= set(read_strings(tmp_path / "a.py"))
