"""Entries are found by name, imported when asked for, and unknown names are told the known ones."""

import sys

import pytest

from shared.errors import ConfigError
from shared.registry import Registry


def colours():
    made = Registry("colour")
    made.add("red", 0xFF0000, "like a tomato")
    made.add("green", 0x00FF00, "like grass")
    return made


def test_entries_keep_their_order():
    known = colours()
    assert known.names() == tuple(known) == ("red", "green")
    assert (len(known), "red" in known, "blue" in known) == (2, True, False)
    assert (known.get("green"), known.about("green")) == (0x00FF00, "like grass")
    known.remove("red")
    assert known.names() == ("green",)


def test_a_place_is_imported_when_asked_for(tmp_path, monkeypatch):
    (tmp_path / "rarely_needed.py").write_text("class Blue:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    known = colours()
    known.add("blue", "rarely_needed:Blue", "like the sea")
    assert known.about("blue") == "like the sea"
    assert "rarely_needed" not in sys.modules
    assert known.get("blue").__name__ == "Blue"
    assert known.get("blue") is sys.modules["rarely_needed"].Blue
    # It is imported once: what was handed out stays the registry's.
    assert known.get("blue") is sys.modules.pop("rarely_needed").Blue is known.get("blue")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gren", "colour: expected one of red, green, got 'gren'; did you mean 'green'?"),
        ("xyz", "colour: expected one of red, green, got 'xyz'"),
        (7, "colour: expected one of red, green, got 7"),
    ],
)
def test_unknown_names_are_told_the_known(name, message):
    known = colours()
    for ask in (known.get, known.about, known.check, known.remove):
        with pytest.raises(ConfigError) as caught:
            ask(name)
        assert str(caught.value) == message


def test_numbers_are_names_too():
    widths = Registry("width")
    widths.add(4, object(), "half a byte")
    assert widths.parse("4") == 4
    with pytest.raises(ConfigError, match="width: expected one of 4, got '5'"):
        widths.parse("5")
    with pytest.raises(ConfigError, match="width '4' is registered already"):
        widths.add("4", object(), "again")


@pytest.mark.parametrize(
    ("name", "entry", "about", "message"),
    [
        ("red", 1, "again", "colour 'red' is registered already; choose another name"),
        ("blue", 1, " ", "colour 'blue': expected one line about it"),
        ("blue", 1, "two\nlines", "colour 'blue': expected one line about it"),
        ("blue", "module", "x", "colour 'blue': expected an object or 'module:attribute'"),
        ("blue", "module:", "x", "expected an object or 'module:attribute', got 'module:'"),
        ("blue", ":Blue", "x", "expected an object or 'module:attribute', got ':Blue'"),
    ],
)
def test_add_refuses(name, entry, about, message):
    known = colours()
    with pytest.raises(ConfigError, match=message):
        known.add(name, entry, about)
    assert known.names() == ("red", "green")
