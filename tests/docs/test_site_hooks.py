"""The hooks of the site: links, names, diagrams and notebooks as pages. They need mkdocs, which is in the extra docs."""

import base64
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.docs


def hook(name: str) -> ModuleType:
    return importlib.import_module(f"site_{name}")


@pytest.mark.parametrize(
    ("src_uri", "markdown", "expected"),
    [
        ("training.md", "[a](../RESULTS.md#b)", "[a](results.md#b)"),
        (
            "results.md",
            "[a](docs/training.md) ![b](experiments/results/mnist.png)",
            "[a](training.md) ![b](source/experiments/results/mnist.png)",
        ),
        ("extending/data.md", "[a](../../m2s/data/mnist.py)", "[a](../source/m2s/data/mnist.py.md)"),
        ("extending/data.md", "[`a`](../training.md)", "[`a`](../training.md)"),
        ("contributing.md", "[a](docs/architecture.md)", "[a](architecture.md)"),
        ("training.md", "[a](../m2s/hub/weights)", "[a](source/m2s/hub/weights/index.md)"),
        ("source/experiments/PLAN.md", "[a](../RESULTS.md)", "[a](../../results.md)"),
        ("training.md", "[a](https://arxiv.org/abs/1) [b](#c) `[d](../RESULTS.md)`", None),
        ("training.md", "```text\n[a](../RESULTS.md)\n```\n", None),
        ("training.md", "[a](../m2s/absent.py)", None),
    ],
)
def test_links_lead_to_pages_of_the_site(src_uri: str, markdown: str, expected: str | None) -> None:
    assert hook("pages").with_links(markdown, src_uri) == (expected or markdown)


@pytest.mark.parametrize(
    ("title", "anchor"),
    [
        ("A sampler", "a-sampler"),
        ("Losses, and what is a bound", "losses-and-what-is-a-bound"),
        ("M2S - SEDD", "m2s---sedd"),
        ("x_t", "x_t"),
    ],
)
def test_anchors_are_those_of_github(title: str, anchor: str) -> None:
    assert hook("pages").github_slug(title, "-") == anchor


def test_names_lead_to_the_reference() -> None:
    places = {"m2s.sample": "reference/samplers.html#m2s.sample"}
    name = "<code>m2s.sample</code>"
    text = f"{name} <code>m2s.other</code> <a href=x>{name}</a> <pre>{name}</pre>"
    linked = '<a class="m2s-name" href="../reference/samplers.html#m2s.sample"><code>m2s.sample</code></a>'
    assert hook("links").with_names_linked(text, "concepts/a.html", places) == text.replace(
        "<code>m2s.sample</code>", linked, 1
    )


@pytest.mark.parametrize(
    ("path", "meta", "boost"),
    [
        ("tutorials/text.ipynb", {}, 4),
        ("reference/cli.md", {}, 0.5),
        ("training.md", {}, 2),
        ("source/a.py.md", {"search": {"exclude": True}}, 2),
        ("faq.md", {"search": {"boost": 9}}, 9),
    ],
)
def test_the_search_lists_explanations_first(path: str, meta: dict[str, Any], boost: float) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=path), meta=meta)
    assert hook("pages").on_page_markdown("text", page, None, None) == "text"
    assert page.meta["search"]["boost"] == boost


@pytest.mark.parametrize(
    ("tex", "mark", "joined"), [("k = 0", ".", True), ("k = 0", "", False), ("k = 0", " so", False), ("x + " * 20, ",", False)]
)
def test_a_mark_stays_on_the_line_of_a_short_formula(tex: str, mark: str, joined: bool) -> None:
    assets = hook("assets")
    text = rf'<p>With <span class="arithmatex">\({tex}\)</span>{mark}</p>'
    new = assets.FORMULA.sub(lambda match: assets.with_mark("<b>typeset</b>", match), text)
    shown = f'<span class="m2s-formula"><b>typeset</b>{mark}</span>' if joined else f"<b>typeset</b>{mark}"
    assert new == f"<p>With {shown}</p>"


def test_a_chain_is_a_row_of_boxes() -> None:
    chart = 'flowchart LR\n    a["first, second"] --> b\n    b --> c & d\n    c & d --> e\n'
    boxes = hook("assets").chain_of_boxes(chart)
    assert (
        boxes.count("<li>") == 4 and "<span>first, second</span>" in boxes and "<li><span>c</span><span>d</span></li>" in boxes
    )


@pytest.mark.parametrize("chart", ["flowchart LR\na --> b\nc --> d\n", "flowchart LR\na --x--> {b}\n"])
def test_another_chart_is_an_error(chart: str) -> None:
    from mkdocs.exceptions import PluginError

    with pytest.raises(PluginError, match="flow chart"):
        hook("assets").chain_of_boxes(chart)


def notebook(*outputs: dict[str, Any]) -> dict[str, Any]:
    title = {"cell_type": "markdown", "metadata": {}, "source": ["# Title\n", "\n", "Text."]}
    return {"cells": [title, {"cell_type": "code", "metadata": {}, "source": "f(1 < 2)", "outputs": list(outputs)}]}


def test_outputs_of_a_notebook_are_shown() -> None:
    printed = {"output_type": "stream", "name": "stdout", "text": ["\x1b[31m 1 %\r", "100 %\n", "<b>\n"]}
    shown = {"output_type": "display_data", "data": {"text/html": "<table></table>", "text/plain": "a table"}}
    drawn = {
        "output_type": "execute_result",
        "data": {"image/png": base64.b64encode(b"picture").decode(), "text/plain": "a figure"},
    }
    text, pictures = hook("notebooks").to_markdown(notebook(printed, shown, drawn), "tutorials/name.ipynb")
    assert text.startswith("# Title\n") and 'href="files/name.ipynb"' in text and "````python\nf(1 < 2)\n````" in text
    assert "<pre>100 %\n&lt;b&gt;</pre>" in text and "<table></table>" in text and "a table" not in text
    assert list(pictures.values()) == [b"picture"] and all(f'src="files/{name}"' in text for name in pictures)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"output_type": "error", "ename": "ValueError"}, "ValueError: repair the notebook"),
        ({"output_type": "display_data", "data": {"application/x": ""}}, "application/x"),
    ],
)
def test_what_cannot_be_shown_is_an_error(output: dict[str, Any], message: str) -> None:
    from mkdocs.exceptions import PluginError

    with pytest.raises(PluginError, match=message):
        hook("notebooks").to_markdown(notebook(output), "tutorials/name.ipynb")
