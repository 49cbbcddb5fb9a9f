"""Registry of named choices of one kind: policies, algorithms, widths, models.

The command line (`shared.cli.choice`), checks, reports and pages read the registry, so that a new
entry needs only its own file and the line that registers it. An entry given as "module:attribute"
is imported when it is first used, so that a command line that only prints its help stays fast.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Generic, TypeVar

from shared.errors import ConfigError

__all__ = ["Registry"]

Name = TypeVar("Name", str, int)
Entry = TypeVar("Entry")


class Registry(Generic[Name, Entry]):
    """Entries by name, in the order in which they were added.

    Args:
        noun: what an entry is, as messages call it ("policy").
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._entries: dict[Name, Entry | str] = {}
        self._about: dict[Name, str] = {}

    def add(self, name: Name, entry: Entry | str, about: str) -> None:
        """Adds an entry.

        Args:
            name: name that users give, not registered yet.
            entry: the object, or a reference "module:attribute" to it.
            about: one line that describes it.

        Raises:
            ConfigError: the name is taken, `about` is not one line, or the reference is malformed.
        """
        if str(name) in map(str, self._entries):
            raise ConfigError(f"{self.noun} {name!r} is registered already; choose another name")
        if not about.strip() or "\n" in about:
            raise ConfigError(f"{self.noun} {name!r}: expected one line about it, got {about!r}")
        if isinstance(entry, str) and not all(entry.partition(":")):
            raise ConfigError(
                f"{self.noun} {name!r}: expected an object or 'module:attribute', got {entry!r}"
            )
        self._entries[name] = entry
        self._about[name] = about

    def remove(self, name: Name) -> None:
        """Removes an entry.

        Raises:
            ConfigError: there is none of that name.
        """
        self.check(name)
        del self._entries[name], self._about[name]

    def get(self, name: Name) -> Entry:
        """The entry of a name, imported if it was given as a reference.

        Raises:
            ConfigError: there is none of that name; the message lists those there are.
        """
        self.check(name)
        entry: Any = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self._entries[name] = getattr(import_module(module), attribute)
        return entry

    def check(self, name: object) -> None:
        """Refuses a name that is not registered.

        Raises:
            ConfigError: there is none of that name; the message lists those there are.
        """
        if name in self._entries:
            return
        known = [str(one) for one in self._entries]
        near = get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{self.noun}: expected one of {', '.join(known)}, got {name!r}{hint}")

    def parse(self, text: str) -> Name:
        """The name that a text spells, as a command line or a file has it.

        Raises:
            ConfigError: it spells none; the message lists those there are.
        """
        for name in self._entries:
            if str(name) == text:
                return name
        self.check(text)
        raise AssertionError("a text that is a name was found above")

    def names(self) -> tuple[Name, ...]:
        """All names, in order."""
        return tuple(self._entries)

    def about(self, name: Name) -> str:
        """The line that says what an entry is.

        Raises:
            ConfigError: there is none of that name.
        """
        self.check(name)
        return self._about[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Name]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
