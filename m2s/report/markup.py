"""The parts of a page that stands alone: escaped text, tables, and figures that lie in the page itself.

Nothing here makes an address: pictures are data URIs, links lead to places on the page, and the policy at the top of the page
forbids the browser everything else. What comes as `str` is plain text and is escaped; what returns is HTML.
"""

import base64
import html
import json
import math
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.image import imread

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #5a5a5a; --line: #d8d8d4; --page: #fdfdfb; --shade: #f4f4f0;
  --link: #004f8a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e6e1; --quiet: #a9a69e; --line: #3d3c39; --page: #181817;
  --shade: #232221; --link: #8fc1ee; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { max-width: 70rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; overflow-wrap: break-word; }
h1, h2, h3 { font-family: Charter, "Bitstream Charter", "Iowan Old Style", Georgia, serif; line-height: 1.25;
  font-weight: 600; }
h1 { font-size: 1.9rem; margin: .5rem 0 .75rem; }
h2 { font-size: 1.4rem; margin: 2.75rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.1rem; margin: 1.75rem 0 .5rem; }
p, ul { max-width: 46rem; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin: 1rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; line-height: 1.4; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { border-bottom: 1.5px solid var(--quiet); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 600; }
th.number, td.number { text-align: right; white-space: nowrap; }
td small, .step small { display: block; color: var(--quiet); font-size: .85em; }
figure { margin: 1rem 0; min-width: 0; }
figure .card { background: #fff; border: 1px solid var(--line); border-radius: 4px; padding: .5rem; overflow-x: auto; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figure.wide img { min-width: 44rem; }
figcaption { color: var(--quiet); font-size: .875rem; margin-top: .45rem; max-width: 46rem; }
.side { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 0 1.5rem;
  align-items: start; }
.side figure { max-width: 36rem; }
pre, code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .85rem; }
pre { background: var(--shade); border: 1px solid var(--line); border-radius: 4px; padding: .65rem .8rem; overflow-x: auto;
  line-height: 1.45; }
pre.flow { white-space: pre-wrap; }
details { margin: .75rem 0; }
summary { cursor: pointer; color: var(--link); }
.problems { border-left: 4px solid #d55e00; padding: .1rem 1rem; background: var(--shade); }
@media (max-width: 48rem) { th:not(.number), td:not(.number) { min-width: 7rem; } }
@media (max-width: 34rem) { body { padding: 1rem .9rem 3rem; } h1 { font-size: 1.55rem; } h2 { font-size: 1.25rem; } }
@media print { :root { color-scheme: light; --ink: #000; --quiet: #444; --line: #bbb; --page: #fff; --shade: #fff;
  --link: #000; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; } h2, h3 { break-after: avoid; }
  figure, tr { break-inside: avoid; } .scroll, .card, pre { overflow: visible; } pre { white-space: pre-wrap; }
  figure.wide img { min-width: 0; } }
"""


def escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def prose(text: str) -> str:
    """Plain text as paragraphs; an empty line ends one."""
    return "\n".join(f"<p>{escape(' '.join(part.split()))}</p>" for part in text.split("\n\n") if part.strip())


def number(value: Any, digits: int = 4) -> str:
    """`value` to `digits` decimals, two at 100 and more; 0 is nought itself, and what would round to it has an exponent."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) < 0.5 * 10**-digits:
        return f"{value:.2e}"
    return f"{value:,.{digits if abs(value) < 100 else min(digits, 2)}f}"


def share(count: int | None, of: int) -> str:
    """count / of in per cent, where both are known."""
    if count is None or not of:
        return "–"
    return f"{count / of:.4%}" if count else "0%"


def give_or_take(value: Any, *errors: Any, digits: int = 4) -> tuple[str, ...]:
    """A cell with a value and, below, its errors as ± number; an error that is not known is left out."""
    known = " ".join(f"± {number(error, digits)}" for error in errors if error is not None)
    return (number(value, digits), known) if known else (number(value, digits),)


def interval(of: Any, digits: int = 4) -> tuple[str, str]:
    """A cell with a value and, below, its interval."""
    return number(of["value"], digits), f"[{number(of['low'], digits)}, {number(of['high'], digits)}]"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "", numbers: Sequence[int] = ()) -> str:
    """Rows of plain text below `head`; the columns in `numbers` are set to the right. A row's first cell is its heading.

    Of a cell that is a tuple the first text is set as usual, what follows small and below it.
    """

    def cell(column: int, value: object, scope: str = "") -> str:
        first, *below = value if isinstance(value, tuple) else (value,)
        name = f'th scope="{scope}"' if scope else "td"
        aligned = ' class="number"' if column in numbers else ""
        small = "".join(f"<small>{escape(text)}</small>" for text in below)
        return f"<{name}{aligned}>{escape(first)}{small}</{name[:2]}>"

    lines = ['<figure><div class="scroll" tabindex="0"><table>']
    lines.append(f"<thead><tr>{''.join(cell(i, name, 'col') for i, name in enumerate(head))}</tr></thead>")
    lines.append("<tbody>")
    for row in rows:
        lines.append(f"<tr>{''.join(cell(i, value, '' if i else 'row') for i, value in enumerate(row))}</tr>")
    said = f"\n<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return "\n".join([*lines, f"</tbody></table></div>{said}</figure>"])


def svg(figure: Figure) -> str:
    """A figure as a data URI: letters as outlines, no date, the same bytes every time."""
    file = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "m2s", "svg.fonttype": "path"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue().decode()
    return data_uri("image/svg+xml", text[text.index("<svg") :].encode())


def png(path: Path) -> str:
    """A picture on the disk as a data URI; ValueError where it is none."""
    try:
        content = path.read_bytes()
        imread(BytesIO(content), format="png")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"it cannot be read as a PNG picture ({error})") from error
    return data_uri("image/png", content)


def data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def picture(uri: str, alt: str, caption: str, wide: bool = False) -> str:
    """A figure on a white card. A wide one can be moved to the side on a narrow screen instead of becoming too small."""
    kind, focus = (' class="wide"', ' tabindex="0"') if wide else ("", "")
    return (
        f'<figure{kind}><div class="card"{focus}><img src="{escape(uri)}" alt="{escape(alt)}"></div>\n'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def side_by_side(figures: Iterable[str]) -> str:
    return '<div class="side">\n' + "\n".join(figures) + "\n</div>"


def folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>"


def literal(text: str, flow: bool = False) -> str:
    """Text as it is, in a fixed pitch; with `flow` long lines are broken."""
    kind = 'class="flow"' if flow else 'tabindex="0"'
    return f"<pre {kind}>{escape(text)}</pre>"


def page(title: str, sections: Sequence[tuple[str, str, str]], opening: str, data: Any) -> str:
    """A whole page of (name, heading, HTML) below an opening, with `data` as JSON. A link says a heading up to its colon."""
    links = "\n".join(f'<a href="#{escape(name)}">{escape(heading.partition(":")[0])}</a>' for name, heading, _ in sections)
    body = "\n".join(
        f'<section id="{escape(name)}">\n<h2>{escape(heading)}</h2>\n{text}\n</section>' for name, heading, text in sections
    )
    raw = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("&", r"\u0026").replace("<", r"\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{opening}
<nav aria-label="On this page">
{links}
</nav>
</header>
<main>
{body}
</main>
<script type="application/json" id="m2s-data">{raw}</script>
</body>
</html>
"""
