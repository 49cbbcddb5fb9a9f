"""The tour's report as one self-contained HTML file.

Everything is inline: the style, the pictures (SVG, with their ids made unique so that two of them
can share a page) and the bars of the claims. It reads in light and dark, and prints.
"""

import datetime
import html
import math
import os
import platform
import re
from pathlib import Path
from typing import Protocol

from machine import processor
from shared.claims import Claim, Demo

__all__ = ["counted", "inline_svg", "render_page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6875; --line: #d9dee4; --ground: #f6f7f9;
  --card: #fff; --ours: #0b7285; --base: #b6bfc9; --good: #2b8a3e; --bad: #c92a2a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa5b1; --line: #323a44;
  --ground: #14181d; --card: #1c2229; --ours: #3bc9db; --base: #4b5663; --good: #69db7c; --bad: #ff8787; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 68rem; background: var(--ground);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 2rem; letter-spacing: -.02em; }
h2 { margin: 0; font-size: 1.35rem; }
a { color: inherit; }
.lead, .meta, .detail, footer { color: var(--soft); }
.meta { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: .75rem 0 2rem; padding: 0;
  list-style: none; font-size: .9rem; }
section, .summary { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.25rem 1.5rem; margin: 0 0 1.5rem; }
section header { display: flex; justify-content: space-between; align-items: baseline; gap: 1rem;
  margin-bottom: .75rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .8rem; }
th, td { padding: .45rem .75rem .45rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.yes { color: var(--good); } .no { color: var(--bad); font-weight: 700; }
.kind { font-size: .78rem; border: 1px solid var(--line); border-radius: 99px; padding: .05rem .5rem; }
.detail { font-size: .85rem; margin: .15rem 0 0; }
figure { margin: 0 0 1rem; padding: .75rem; background: #fff; border-radius: 8px;
  border: 1px solid var(--line); }
figure svg { display: block; width: 100%; height: auto; max-height: 34rem; }
pre { overflow-x: auto; font-size: .8rem; background: var(--ground); padding: .75rem; border-radius: 8px; }
.bars text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.bars .soft { fill: var(--soft); } .bars .ours { fill: var(--ours); }
.bars .bad { fill: var(--bad); } .bars line { stroke: var(--base); stroke-dasharray: 3 3; }
@media print { body { background: none; } section, .summary { break-inside: avoid; } }
"""


class _Visit(Protocol):
    package: str
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
        else f'<span class="no">{wrong} not correct, {failed} demos with problems</span>'
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
            f"<title>Meshyard: the tour</title><style>{_STYLE}</style></head><body>",
            "<h1>Meshyard: the tour</h1>",
            (
                '<p class="lead">Each package did its main job on this machine, beside a baseline run '
                "in the same process tree on the same input.</p>"
            ),
            f'<ul class="meta">{"".join(f"<li>{item}</li>" for item in meta)}</ul>',
            f'<div class="summary">{_bars(claims)}</div>' if claims else "",
            *(_section(visit) for visit in visits),
            (
                "<footer>A ratio above 1 means ours is better. A simulated figure comes from the model "
                "named beside it, not from a run.</footer></body></html>"
            ),
        ]
    )


def counted(number: int, noun: str) -> str:
    """Writes a number of things: "1 package", "3 packages"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _bars(claims: list[tuple[str, Claim]]) -> str:
    """Draws each claim's ratio on a logarithmic axis around 1."""
    finite = [claim.ratio for _, claim in claims if 0 < claim.ratio < math.inf]
    high = math.log2(max([2.0, *finite]))
    low = math.log2(min([0.5, *finite])) if min([1.0, *finite]) < 1 else 0.0
    left, width, row = 460.0, 460.0, 24

    def x(ratio: float) -> float:
        return left + width * (math.log2(ratio) - low) / (high - low)

    parts = []
    for index, (package, claim) in enumerate(claims):
        y = index * row
        is_drawn = 0 < claim.ratio < math.inf
        start, end = sorted((x(1.0), x(claim.ratio))) if is_drawn else (x(1.0), x(1.0))
        label = claim.name if len(claim.name) <= 56 else claim.name[:55] + "..."
        parts.append(
            f'<text x="0" y="{y + 16}" class="soft">{html.escape(package)}</text>'
            f'<text x="{left - 12}" y="{y + 16}" text-anchor="end">{html.escape(label)}</text>'
            f'<rect x="{start:.1f}" y="{y + 5}" width="{max(end - start, 2):.1f}" height="14" '
            f'rx="3" class="{"ours" if claim.correct else "bad"}"/>'
            f'<text x="{end + 8:.1f}" y="{y + 16}">{claim.ratio:.2f}x</text>'
        )
    height = len(claims) * row
    return (
        f'<svg class="bars" viewBox="0 0 {left + width + 70:.0f} {height + 20}" role="img" '
        'aria-label="Ratio of each claim to its baseline">'
        f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="0" y2="{height}"/>{"".join(parts)}'
        f'<text x="{x(1):.1f}" y="{height + 15}" text-anchor="middle" class="soft">'
        "baseline = 1 (logarithmic)</text></svg>"
    )


def _section(visit: _Visit) -> str:
    name = html.escape(visit.package)
    parts = [
        (
            f'<section id="{name}"><header><h2>{name}</h2>'
            f'<span class="detail">demo took {visit.seconds:.1f} s</span></header>'
        )
    ]
    if visit.demo is not None:
        picture = _picture(visit.demo)
        if picture is not None:
            parts.append(f"<figure>{inline_svg(picture, prefix=visit.package)}</figure>")
        parts.append(_table(visit.demo.claims))
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
        rows.append(
            f'<tr><td>{html.escape(claim.name)}<p class="detail">{html.escape(notes)}</p></td>'
            f'<td class="number">{html.escape(_figure(claim.ours, claim.unit))}</td>'
            f'<td class="number">{html.escape(_figure(claim.baseline, claim.unit))}'
            f'<p class="detail">{html.escape(claim.baseline_name)}</p></td>'
            f'<td class="number"><strong>{claim.ratio:.2f}x</strong></td>'
            f'<td><span class="kind">{html.escape(claim.kind)}</span></td>'
            f'<td class="{"yes" if claim.correct else "no"}">{"yes" if claim.correct else "NO"}</td></tr>'
        )
    return (
        '<div class="scroll"><table><thead><tr><th>claim</th><th class="number">ours</th>'
        '<th class="number">baseline</th><th class="number">ratio</th><th>kind</th><th>correct</th>'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _figure(value: float, unit: str) -> str:
    return f"{value:,.4g} {unit}".rstrip()


def inline_svg(path: Path, *, prefix: str) -> str:
    """Returns a picture's `<svg>` element, fit to share a page with other pictures.

    Args:
        path: the SVG file.
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
    return re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
