"""The tour's report as one self-contained HTML file.

Everything is inline: the style, and the pictures (SVG, with their ids made unique so that two of
them can share a page). It reads in light and dark, on a telephone without sideways scrolling, and
prints.
"""

import datetime
import html
import os
import platform
import re
from pathlib import Path
from typing import Protocol

from machine import processor
from shared.claims import Claim, Demo
from summary import claim_ratio_text, figures_text, summary

__all__ = ["counted", "inline_svg", "render_page"]

_STYLE = Path(__file__).with_name("page.css")


class _Visit(Protocol):
    package: str
    purpose: str
    demo: Demo | None
    problems: list[str]
    seconds: float
    stderr_tail: str
    skipped: list[str]


def render_page(visits: list, *, full: bool) -> str:
    """Returns the report as an HTML document.

    Args:
        visits: what became of each package, in the order of the sections.
        full: whether the long form of the demos was run.
    """
    claims = [(visit.package, c) for visit in visits if visit.demo for c in visit.demo.claims]
    wrong = sum(not claim.correct for _, claim in claims)
    failed = sum(bool(visit.problems) for visit in visits)
    verdict = (
        '<span class="yes">all correct</span>'
        if not failed
        else f'<span class="no">{wrong} not correct, {counted(failed, "demo")} with problems</span>'
    )
    meta = [
        f"{counted(len(visits), 'package')}, {counted(len(claims), 'claim')}, {verdict}",
        html.escape(f"{platform.node()}: {processor()}, {os.cpu_count()} cores"),
        datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "<code>hatch run demo --full</code>" if full else "<code>hatch run demo</code>",
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Meshyard: the tour</title><style>{_STYLE.read_text(encoding='utf-8')}</style>",
            "</head><body><h1>Meshyard: the tour</h1>",
            (
                '<p class="lead">Each package did its main job on this machine, beside a baseline run '
                "in the same process tree on the same input. A simulated figure comes from the model "
                "named beside it, not from a run.</p>"
            ),
            f'<ul class="meta">{"".join(f"<li>{item}</li>" for item in meta)}</ul>',
            summary(claims) if claims else "",
            *(_section(visit) for visit in visits),
            "</body></html>",
        ]
    )


def counted(number: int, noun: str) -> str:
    """Writes a number of things: "1 package", "3 packages"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _section(visit: _Visit) -> str:
    name = html.escape(visit.package)
    parts = [
        (
            f'<section id="{name}"><header><h2>{name}</h2><p>{html.escape(visit.purpose)}</p>'
            f'<p class="detail">demo took {visit.seconds:.1f} s</p></header>'
        )
    ]
    if visit.demo is not None:
        picture = _picture(visit.demo)
        drawn = f"<figure>{inline_svg(picture, prefix=visit.package)}</figure>" if picture else ""
        parts.append(f'<div class="demo">{drawn}{_table(visit.demo.claims)}</div>')
    parts.extend(f'<p class="detail">{html.escape(line)}</p>' for line in visit.skipped)
    parts.extend(f'<p class="no">{html.escape(problem)}</p>' for problem in visit.problems)
    if visit.problems and visit.stderr_tail:
        parts.append(f"<pre>{html.escape(visit.stderr_tail)}</pre>")
    return "".join([*parts, "</section>"])


def _picture(demo: Demo) -> Path | None:
    """Returns the picture that `figures["picture"]` names, else the first by name."""
    pictures = demo.pictures()
    named = [path for path in pictures if path.name == demo.figures.get("picture")]
    return next(iter([*named, *pictures]), None)


def _table(claims: tuple[Claim, ...]) -> str:
    rows = []
    for claim in claims:
        notes = " ".join(filter(None, [claim.detail, f"[{claim.source}]" if claim.source else ""]))
        simulated = ' <span class="simulated">simulated</span>' if claim.kind == "simulated" else ""
        ours, baseline = map(html.escape, figures_text(claim))
        rows.append(
            f'<tr><td data-label="claim">{html.escape(claim.name)}{simulated}'
            f'<p class="detail">{html.escape(notes)}</p></td>'
            f'<td class="number" data-label="ours"><span class="figure">{ours}</span></td>'
            f'<td class="number" data-label="baseline"><span class="figure">{baseline}</span>'
            f'<p class="detail">{html.escape(claim.baseline_name)}</p></td>'
            f'<td class="number" data-label="ratio"><strong>{claim_ratio_text(claim)}</strong></td>'
            f'<td data-label="correct" class="{"yes" if claim.correct else "no"}">'
            f"{'yes' if claim.correct else 'NO'}</td></tr>"
        )
    return (
        '<table><thead><tr><th>claim</th><th class="number">ours</th>'
        '<th class="number">baseline</th><th class="number">ratio</th><th>correct</th>'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def inline_svg(path: Path, *, prefix: str) -> str:
    """Returns a picture's `<svg>` element, fit to share a page with other pictures.

    Args:
        path: the SVG file; its `<title>` is what is read out in its place.
        prefix: put before every id, which drawing libraries repeat from picture to picture.

    Returns:
        The element, or a sentence in its place when the file holds none.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    match = re.search(r"<svg\b.*</svg>", text, re.DOTALL)
    if match is None:
        return f"<p>{html.escape(path.name)} holds no picture.</p>"
    svg = re.sub(r"<metadata>.*?</metadata>", "", match[0], flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    return svg.replace("<svg", '<svg role="img"', 1)
