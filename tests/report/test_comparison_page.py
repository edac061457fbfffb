"""The page of a comparison: its opening, its slider and its policy; and figures for dark pages."""

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from m2s.cli import main
from m2s.report.blocks import svg_text
from m2s.report.comparison import arm_label, plot_distances
from m2s.report.sections.provenance import format_command
from m2s.report.style import DARK
from page_reader import Reader, decoded, read


@pytest.fixture(scope="session")
def result(compared: Path) -> dict:
    return json.loads((compared.parent / "m2s" / "compare" / "compare.json").read_text())


def test_page_opens_with_one_sentence_and_one_plot(compared: Path, result: dict) -> None:
    text, parsed = compared.read_text(), read(compared)
    header = text[text.index("<header>") : text.index("<nav")]
    first = result["steps"][-1]
    assert first["steps"] == 4
    sentence = parsed.content["p"][0]
    for arm in result["arms"]:
        assert f"{first['distances'][arm['name']]['value']:.3f} for {arm_label(arm)}" in sentence
    assert header.index("<picture>") < header.index("About both.") and header.count("<img") == 1
    assert parsed.content["pre"][0] == format_command(result)
    sections = [attributes["id"] for name, attributes in parsed.elements if name == "section"]
    assert sections[:2] == ["comparison", "measures"] and "a&lt;b" in text and "a<b" not in text


def test_only_the_script_of_the_slider_may_run(compared: Path) -> None:
    parsed = read(compared)
    script, _ = parsed.content["script"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [meta["content"] for meta in parsed.named("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.endswith(f"script-src 'sha256-{digest}'") and "unsafe-inline'; script" not in policy.replace("style-src", "")
    assert not re.search(r"fetch|XMLHttp|import|eval|innerHTML", script)


def test_samples_are_shown_for_every_number_of_steps(compared: Path, result: dict) -> None:
    parsed = read(compared)
    shown = [attributes for name, attributes in parsed.elements if name == "figure" and "data-at" in attributes]
    assert [attributes["data-at"] for attributes in shown] == ["2", "4"] * 3
    assert [("hidden" in attributes) for attributes in shown] == [True, False] * 3
    (slider,) = parsed.named("input")
    assert (slider["data-steps"], slider["value"], slider["max"]) == ("2 4", "1", "1")
    row = parsed.row("4 steps")
    assert row[1].startswith(f"{result['steps'][1]['distances']['a<b']['value']:.3f}")
    assert parsed.row("t = 0.1")[2] == f"{result['projection']['mean_scores'][1]['projected']:.3f}"


def test_likelihoods_have_their_paired_difference(compared: Path) -> None:
    found = json.loads((compared.parent / "m2s" / "bpd.json").read_text())["against"]
    row = read(compared).row("m2s − a<b")
    bits = found["difference"]["nelbo"]["bits"]
    assert row[1].startswith(f"{bits['value']:.4f}") and row[2] == f"{bits['low']:.4f} … {bits['high']:.4f}"
    assert read(compared).row("a<b", "digitstest")[3].startswith(f"{found['nelbo']['bits']['value']:.4f}")


def test_every_cell_names_its_column(compared: Path) -> None:
    """On a narrow screen a row becomes a card, whose entries have the names of their columns."""
    cells = read(compared).named("td")
    assert cells and all(cell["data-label"] for cell in cells)


def luminance(color: str) -> float:
    """The relative luminance of WCAG 2."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_figures_have_dark_variants(compared: Path, result: dict) -> None:
    """Every figure of the page has one, and every text and line in it is readable on the dark card."""
    parsed = read(compared)
    drawings = [image for image in parsed.named("img") if image["src"].startswith("data:image/svg")]
    sources = parsed.named("source")
    assert len(drawings) == len(sources) >= 4
    assert {source["media"] for source in sources} == {"(prefers-color-scheme: dark)"}
    for source in sources:
        assert "#ffffff" not in decoded(source["srcset"])[1].decode().lower()
    ground = luminance(DARK["#FFFFFF"])
    dark = svg_text(plot_distances(result), dark=True)
    colors = set(re.findall(r"#[0-9a-fA-F]{6}\b", dark)) - {DARK["#FFFFFF"]}
    assert colors <= set(DARK.values())
    for color in colors:
        assert (luminance(color) + 0.05) / (ground + 0.05) > 3, color


def test_a_missing_file_of_samples_is_listed(compared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs"
    shutil.copytree(compared.parent, copy)
    (copy / "m2s" / "compare" / "m2s-2.npz").unlink()
    main(["report", str(copy / "m2s"), "--out", str(tmp_path / "page.html")])
    parsed: Reader = read(tmp_path / "page.html")
    assert any("m2s-2.npz" in text for text in parsed.content["li"])
    assert sum("data-at" in attributes for _, attributes in parsed.elements) == 5
