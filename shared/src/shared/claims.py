"""Claims that a package makes about its performance, and the file to which its `demo` writes them.

A `Claim` compares a figure of ours with a baseline's, run in the same process tree on the same
input, and has their ratio and whether the results were correct. `write_demo` stores the claims of
one package as `demo.json`, which the tour (`hatch run demo`) reads with `read_demo`; `finish` does
so at the end of a demo and prints them; `faults` lists the reasons to reject such a file.

Ways whose seconds are compared take turns, so that other programs slow both alike: `pair_turns` makes
a claim's figures of the turns, and a ratio on which turns disagree is shown with its range.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from shared.errors import ConfigError, DataError
from shared.files import write_atomically

__all__ = ["Claim", "Demo", "faults", "finish", "pair_turns", "read_demo", "write_demo"]

_FORMAT = 1
_KINDS = ("measured", "simulated")
# Most that the highest turn's ratio may be of the lowest one's to be left unsaid.
_AGREEMENT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One figure of ours beside a baseline's, from one run.

    Attributes:
        name: what is claimed, as a short phrase ("epoch time at 100 Mbit/s").
        unit: unit of `ours` and `baseline` ("s", "GB/s", "points").
        ours: our figure.
        baseline: the figure of `baseline_name`, run in the same process tree on the same input.
        baseline_name: what it is compared with ("exact fp32 messages, same code").
        ratio: how many times better ours is; above 1 means ours is better, whichever way round
            the unit counts. Computed from the two figures when left out.
        higher_is_better: whether a larger figure is the better one.
        kind: "measured" on this machine, or "simulated" by a model.
        correct: whether our result passed its correctness check in that run.
        detail: how it was checked and on what input, in a sentence.
        source: the command, file or function that gave the figures.
        ratio_range: lowest and highest ratio of a turn, where ways took turns; None elsewhere.
    """

    name: str
    unit: str
    ours: float
    baseline: float
    baseline_name: str
    higher_is_better: bool
    correct: bool
    ratio: float = math.nan
    kind: str = "measured"
    detail: str = ""
    source: str = ""
    ratio_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Checks the fields and fills in the ratio."""
        for name in ("name", "baseline_name"):
            if not getattr(self, name).strip():
                raise ConfigError(
                    f"claim.{name}: expected a text, got an empty one; say what it is"
                )
        if self.kind not in _KINDS:
            raise ConfigError(
                f"claim.kind: expected one of {_KINDS}, got {self.kind!r} in claim {self.name!r}"
            )
        if math.isnan(self.ratio):
            object.__setattr__(self, "ratio", self._ratio())

    def _ratio(self) -> float:
        better, worse = self.ours, self.baseline
        if not self.higher_is_better:
            better, worse = worse, better
        # Both zero is a draw; zero on one side alone has no ratio, and `faults` says so.
        if better == worse:
            return 1.0
        return better / worse if worse else math.inf

    @property
    def disputed_range(self) -> tuple[float, float] | None:
        """The range of turns' ratios if they disagree by more than a factor of two; else None."""
        if self.ratio_range is None or self.ratio_range[1] <= _AGREEMENT * self.ratio_range[0]:
            return None
        return self.ratio_range

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as a dictionary that `json` can write; not-finite numbers as null.

        `ratio_range` is left out if there is none, and an infinite end of it is null.
        """

        def finite(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        record = {key: finite(value) for key, value in asdict(self).items()}
        if self.ratio_range is None:
            del record["ratio_range"]
        else:
            record["ratio_range"] = [finite(value) for value in self.ratio_range]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Claim":
        """Reads what `to_json` wrote.

        Args:
            record: the dictionary; null numbers become NaN.

        Raises:
            DataError: when a field is missing, unknown or of the wrong type.
        """
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(record) - set(known))
        missing = sorted(set(known) - set(record) - {"ratio_range"})
        if unknown or missing:
            raise DataError(
                f"claim {record.get('name', '?')!r}: unknown fields {unknown}, missing {missing}; "
                "write claims with shared.claims.write_demo"
            )
        values = dict(record)
        for key in ("ours", "baseline", "ratio"):
            value = math.nan if values[key] is None else values[key]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise DataError(f"claim {record['name']!r}: {key} must be a number, got {value!r}")
            values[key] = float(value)
        for key in ("correct", "higher_is_better"):
            if not isinstance(values[key], bool):
                raise DataError(
                    f"claim {record['name']!r}: {key} must be true or false, got {values[key]!r}"
                )
        for key in ("name", "unit", "baseline_name", "kind", "detail", "source"):
            if not isinstance(values[key], str):
                raise DataError(
                    f"claim {record['name']!r}: {key} must be a text, got {values[key]!r}"
                )
        if (turns := values.get("ratio_range")) is not None:
            is_pair = isinstance(turns, list) and len(turns) == 2
            if not is_pair or not all(type(end) in (int, float, type(None)) for end in turns):
                raise DataError(
                    f"claim {record['name']!r}: ratio_range must be two numbers, got {turns!r}"
                )
            values["ratio_range"] = tuple(math.inf if end is None else float(end) for end in turns)
        claim = cls(**values)
        # A stored ratio that was not finite must not come back as one computed anew.
        object.__setattr__(claim, "ratio", values["ratio"])
        return claim


def pair_turns(
    ours: Sequence[float], baseline: Sequence[float], *, higher_is_better: bool = False
) -> dict[str, Any]:
    """Makes the figures of a claim from two ways that took turns.

    A turn's two figures were measured next to each other, so their ratio suffers less from other
    programs than that of medians over all turns.

    Args:
        ours: our figure of each turn.
        baseline: the baseline's figures of the same turns.
        higher_is_better: whether a larger figure is the better one.

    Returns:
        Arguments of `Claim`: the medians `ours` and `baseline`; `ratio`, the median of the turns'
        ratios; their `ratio_range`; and `higher_is_better`.

    Raises:
        ConfigError: there is no turn, or not one figure of each way for every turn.
    """
    if not ours or len(ours) != len(baseline):
        raise ConfigError(
            f"turns: expected one figure of each way for every turn, got {len(ours)} of ours and "
            f"{len(baseline)} of the baseline"
        )
    pairs = zip(ours, baseline, strict=True)
    turns = [(mine, other) if higher_is_better else (other, mine) for mine, other in pairs]
    ratios = [better / worse if worse else math.inf for better, worse in turns]
    return {
        "ours": median(ours),
        "baseline": median(baseline),
        "ratio": median(ratios),
        "ratio_range": (min(ratios), max(ratios)),
        "higher_is_better": higher_is_better,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What one package's demo left behind.

    Attributes:
        package: import name of the package.
        claims: its claims, in the order in which they are shown.
        figures: the data behind its pictures: anything `json` can hold, by name.
        directory: folder of the file that was read; pictures (`*.svg`) lie beside it.
    """

    package: str
    claims: tuple[Claim, ...]
    figures: dict[str, Any]
    directory: Path

    def pictures(self) -> tuple[Path, ...]:
        """Returns the SVG files beside `demo.json`, sorted by name."""
        return tuple(sorted(self.directory.glob("*.svg")))


def write_demo(
    out_dir: str | os.PathLike[str],
    package: str,
    claims: Iterable[Claim],
    figures: Mapping[str, Any],
) -> Path:
    """Writes `demo.json`; pictures are SVG files that the caller puts into the same folder.

    Args:
        out_dir: folder, made when missing.
        package: import name of the package.
        claims: what the package claims, in the order in which it is to be shown.
        figures: data of the pictures by name, anything `json` can hold.

    Returns:
        The path of the file, which appears whole or not at all.

    Raises:
        DataError: when `figures` holds something that `json` cannot write.
    """
    directory = Path(out_dir)
    directory.mkdir(parents=True, exist_ok=True)
    record = {
        "package": package,
        "format": _FORMAT,
        "claims": [claim.to_json() for claim in claims],
        "figures": dict(figures),
    }
    try:
        text = json.dumps(record, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"figures of {package!r}: expected numbers, texts, lists and dictionaries, finite; "
            f"{error}; convert tensors with .tolist() and drop what is not finite"
        ) from error
    target = directory / "demo.json"
    write_atomically(target, text + "\n")
    return target


def finish(
    out_dir: str | os.PathLike[str],
    package: str,
    claims: Iterable[Claim],
    figures: Mapping[str, Any],
) -> bool:
    """Ends a demo: writes `demo.json`, and prints a line a claim to stderr.

    Args:
        out_dir: as for `write_demo`.
        package: as for `write_demo`.
        claims: as for `write_demo`.
        figures: as for `write_demo`.

    Returns:
        Whether every claim's result was correct; a demo that was not exits with 1.

    Raises:
        DataError: as for `write_demo`.
    """
    claims = list(claims)
    write_demo(out_dir, package, claims, figures)
    for claim in claims:
        verdict = "" if claim.correct else "  NOT CORRECT"
        if turns := claim.disputed_range:
            verdict = f" (turns {turns[0]:.2f} to {turns[1]:.2f}){verdict}"
        sys.stderr.write(
            f"{package}: {claim.name}: {claim.ours:.4g} {claim.unit} against {claim.baseline:.4g} "
            f"({claim.baseline_name}), {claim.ratio:.2f}x{verdict}\n"
        )
    return all(claim.correct for claim in claims)


def read_demo(path: str | os.PathLike[str]) -> Demo:
    """Reads a `demo.json`.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        DataError: when the file is missing, is no such file, or has another format.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "demo.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"expected {file}, found no such file; the demo must end with shared.claims.write_demo"
        ) from error
    except ValueError as error:
        raise DataError(f"{file}: expected JSON, {error}; run the demo again") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{file}: expected format {_FORMAT}, got {found!r}; run the demo again")
    if set(record) != {"package", "format", "claims", "figures"}:
        raise DataError(
            f"{file}: expected package, format, claims and figures, got {sorted(record)}; "
            "write it with shared.claims.write_demo"
        )
    return Demo(
        package=record["package"],
        claims=tuple(Claim.from_json(claim) for claim in record["claims"]),
        figures=record["figures"],
        directory=file.parent,
    )


def faults(demo: Demo, *, min_claims: int = 3) -> list[str]:
    """Lists why a demo is not to be accepted; an empty list accepts it.

    Args:
        demo: what `read_demo` returned.
        min_claims: fewest claims a package may make.

    Returns:
        One sentence per fault: too few claims, a claim that is not correct, a figure or ratio
        that is not finite, a missing or empty picture, one without words for it.
    """
    found = []
    if len(demo.claims) < min_claims:
        found.append(f"{len(demo.claims)} claims, expected at least {min_claims}")
    for claim in demo.claims:
        if not claim.correct:
            found.append(
                f"claim {claim.name!r} is not correct: {claim.detail or 'no detail given'}"
            )
        for name in ("ours", "baseline", "ratio"):
            value = getattr(claim, name)
            if not math.isfinite(value):
                found.append(f"claim {claim.name!r}: {name} is not a finite number")
    pictures = demo.pictures()
    if not pictures:
        found.append("no picture: expected at least one *.svg beside demo.json")
    for picture in pictures:
        text = picture.read_text(encoding="utf-8", errors="replace")
        if "<svg" not in text:
            found.append(f"picture {picture.name} is empty or no SVG")
        elif "<title>" not in text:
            found.append(
                f"picture {picture.name} has no <title>, which is read out where it is not seen; "
                "write it with shared.training.pictures.save_picture"
            )
    return found
