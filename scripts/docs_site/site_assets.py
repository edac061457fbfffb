"""MkDocs hook: mathematics is typeset when the site is built, and nothing is loaded from a network.

KaTeX is an npm package of web/. Its style sheet and fonts are copied into the site. Formulas are typeset by
web/typeset.mjs, so that a wrong formula stops the build and pages need no script for them.
"""

import html
import json
import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from m2s.report.lab import FILES, lab_file

WEB = Path(__file__).parents[2] / "web"
FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\((.*?)\\\)|\\\[(.*?)\\\])</\1>(?P<mark>[.,;:!?)]?)', re.DOTALL)
SHORT = 40  # characters of TeX in a formula that fits on a line of a phone
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the lab, the style sheet and fonts of KaTeX, and the replacement of workers that search needs on file://."""
    katex = WEB / "node_modules" / "katex" / "dist"
    if not katex.is_dir():
        raise PluginError("web/node_modules has no katex: run `make docs`, or `npm ci` in web/")
    style = re.sub(r",url\([^)]*\.(?:woff|ttf)\) format\(\"\w+\"\)", "", (katex / "katex.min.css").read_text())
    files.append(File.generated(config, "assets/katex/katex.min.css", content=style))
    for font in sorted((katex / "fonts").glob("*.woff2")):
        files.append(File.generated(config, f"assets/katex/fonts/{font.name}", abs_src_path=str(font)))
    for name in FILES:
        files.append(File.generated(config, f"lab/{name}", content=lab_file(name, documentation=True)))
    shim = WEB / "node_modules" / "iframe-worker" / "shim" / "index.js"
    files.append(File.generated(config, "assets/iframe-worker.js", abs_src_path=str(shim)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw the flow charts of a page, which GitHub draws from the same text."""
    return DIAGRAM.sub(lambda match: chain_of_boxes(match[1]), markdown)


def chain_of_boxes(chart: str) -> str:
    """Return a Mermaid flow chart that is a chain as a row of boxes.

    Args:
        chart: Lines such as `a[label] --> b --> c & d`, behind `flowchart LR`.

    Raises:
        PluginError: A line does not begin with the last boxes of the line before.
    """
    labels: dict[str, str] = {}
    chain: list[list[str]] = []
    for line in filter(None, map(str.strip, chart.splitlines()[1:])):
        groups = []
        for part in line.split("-->"):
            found = [re.fullmatch(r"(\w+)(?:\[\"?(.*?)\"?\])?", each.strip()) for each in part.split("&")]
            if not all(found):
                raise PluginError(f"{line!r} of a flow chart is not a chain of boxes: extend scripts/docs_site/site_assets.py")
            groups.append([match[1] for match in found if match])
            labels |= {match[1]: match[2] for match in found if match and match[2]}
        if chain and groups[0] != chain[-1]:
            raise PluginError(f"{line!r} of a flow chart does not continue the line before it")
        chain += groups[1:] if chain else groups
    boxes = "".join(f"<li>{''.join(f'<span>{labels.get(name, name)}</span>' for name in group)}</li>" for group in chain)
    return f'<ol class="m2s-chain">{boxes}</ol>'


def with_mark(typeset: str, formula: re.Match[str]) -> str:
    """Return a formula with the mark that follows it, on one line where the formula is short.

    Args:
        typeset: The formula as HTML.
        formula: Where it is in the page.
    """
    if formula["mark"] and len(formula[2] or "") in range(1, SHORT):
        return f'<span class="m2s-formula">{typeset}{formula["mark"]}</span>'
    return typeset + formula["mark"]


def on_post_build(config: MkDocsConfig) -> None:
    """Typeset the formulas of all pages."""
    pages = {path: path.read_text() for path in sorted(Path(config.site_dir).rglob("*.html"))}
    found = [
        {"page": path.name, "tex": html.unescape(match[2] or match[3]), "display": match[2] is None}
        for path, text in pages.items()
        for match in FORMULA.finditer(text)
    ]
    command = ["node", str(WEB / "typeset.mjs")]
    done = subprocess.run(command, input=json.dumps(found), capture_output=True, text=True, check=False)
    if done.returncode:
        raise PluginError(f"KaTeX: {done.stderr.strip()}")
    typeset = iter(json.loads(done.stdout))
    for path, text in pages.items():
        if (new := FORMULA.sub(lambda match: with_mark(next(typeset), match), text)) != text:
            path.write_text(new)
