"""Names of a checkpoint in a state whose modules are called something else by now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.errors import DataError

__all__ = ["Renaming"]


class Renaming:
    """Replaces the beginnings of names.

    Args:
        beginnings: new beginnings of names by old ones, from the state's root on, as
            {"model.encoder.": "model.backbone."}. Of several that fit a name the longest counts.
    """

    def __init__(self, beginnings: Mapping[str, str] | None = None) -> None:
        self._beginnings = dict(beginnings or {})
        self._by_length = sorted(self._beginnings, key=len, reverse=True)

    def __call__(self, name: str) -> str:
        """The name in the state."""
        old = next((one for one in self._by_length if name.startswith(one)), "")
        return self._beginnings.get(old, "") + name.removeprefix(old) if old else name

    def rename_parameter(self, name: str, modules: Iterable[str]) -> str:
        """The name of a parameter in an optimizer's state, which torch begins below its module.

        Args:
            name: the name in the checkpoint.
            modules: paths of the state's modules.
        """
        for prefix in ("", *(f"{path}." for path in modules if path)):
            new = self(f"{prefix}{name}")
            if new != f"{prefix}{name}":
                return new.removeprefix(prefix)
        return name

    def apply(self, names: Iterable[str]) -> dict[str, str]:
        """The checkpoint's names by those in the state.

        Raises:
            DataError: two names would become one, or a beginning is that of no name.
        """
        found: dict[str, str] = {}
        names = list(names)
        for name in names:
            new = self(name)
            if new in found:
                raise DataError(
                    f"rename: {found[new]!r} and {name!r} would both be {new!r}; give them different "
                    "beginnings"
                )
            found[new] = name
        for old in self._by_length:
            if not any(name.startswith(old) for name in names):
                raise DataError(
                    f"rename: expected names that begin with {old!r}, the checkpoint has "
                    f"{', '.join(names[:3])}, ...; `bytecheckpoint inspect` lists them"
                )
        return found
