"""The page of `m2s report` is well-formed, holds the numbers of the files, and needs no network."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from matplotlib.image import imread

from m2s.report.blocks import Cell, Table, format_number
from m2s.report.page import template_environment, write
from m2s.report.read_run import loss_unit, read_runs
from m2s.report.sections import SECTIONS
from page_reader import Reader, decoded, read

ADDRESSES = {"src", "href", "srcset", "poster", "action", "formaction", "data", "background", "xlink:href", "ping"}


def test_page_is_well_formed_and_runs_no_script(page: Path, parsed: Reader) -> None:
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>\n<html lang")
    assert parsed.content["title"] == parsed.content["h1"] == ["Three runs"]
    assert [script["type"] for script in parsed.named("script")] == ["application/json"]
    assert not any(name.startswith("on") for _, attributes in parsed.elements for name in attributes)
    identifiers = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    links = [attributes["href"] for attributes in parsed.named("a")]
    assert links and {link.removeprefix("#") for link in links} < set(identifiers)
    for part in ("runs", "training", "measures", "samples", "audit", "repair", "provenance"):
        assert part in identifiers
    assert "left-out" not in identifiers


def test_page_has_no_external_address(page: Path, parsed: Reader) -> None:
    text = page.read_text(encoding="utf-8")
    for tag, attributes in parsed.elements:
        for name in ADDRESSES & attributes.keys():
            assert attributes[name].startswith(("data:", "#")), (tag, attributes[name])
        assert "style" not in attributes
    (style,) = parsed.content["style"]
    assert not re.search(r"url\(|@import|image-set|src\(", style)
    assert "://" not in text
    (policy,) = [meta["content"] for meta in parsed.named("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:;") and "script" not in policy and "*" not in policy
    for image in parsed.named("img"):
        kind, content = decoded(image["src"])
        if kind == "image/svg+xml":
            drawing = content.decode()
            assert set(re.findall(r'(?<!xmlns:)(?:href|src)="(.)', drawing)) <= {"#"}
            assert set(re.findall(r"url\((.)", drawing)) <= {"#"}
            assert not re.search(r"<(script|image|foreignObject|!DOCTYPE|!ENTITY)", drawing)


def test_every_figure_is_an_image_with_alternative_text(parsed: Reader) -> None:
    images = parsed.named("img")
    kinds = []
    for image in images:
        assert len(image["alt"]) > 10
        kind, content = decoded(image["src"])
        kinds.append(kind)
        if kind == "image/png":
            assert imread(BytesIO(content), format="png").size > 0
        else:
            root = ElementTree.fromstring(content)
            assert root.tag == "{http://www.w3.org/2000/svg}svg" and float(root.attrib["width"].removesuffix("pt")) > 100
    # loss, norm, over t, frontier, four panels of an audit; two grids, film, odd, pairs
    assert (kinds.count("image/svg+xml"), kinds.count("image/png")) == (8, 5)
    assert len(parsed.content["figcaption"]) >= len(images)
    captions = " ".join(parsed.content["figcaption"])
    for words in ("m2s: 9 samples, 4 steps, bayes, cosine, seed 0", "m2s: from noise to samples", "sedd: odd.png", "in pairs"):
        assert words in captions


def test_unit_of_losses_is_that_of_the_data(runs: Path, parsed: Reader, tmp_path: Path) -> None:
    images, other = read_runs([runs / "m2s", runs / "sedd"]), read_runs([runs / "text"])
    assert loss_unit(images) == "bits per dimension"
    assert loss_unit([*images, *other]) == "bits per position" != loss_unit(images)
    assert "held-out NELBO, bits per position" in parsed.content["th"]
    write([runs / "m2s", runs / "sedd"], tmp_path / "images.html")
    page = read(tmp_path / "images.html")
    assert "held-out NELBO, bits per dimension" in page.content["th"]
    assert any("Loss in bits per dimension" in text for text in page.content["figcaption"])
    assert "bits per position" not in (tmp_path / "images.html").read_text(encoding="utf-8")


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_page_embeds_the_files_as_json(runs: Path, parsed: Reader) -> None:
    for name, found in zip(("m2s", "sedd", "text"), parsed.data["runs"], strict=True):
        folder = runs / name
        record = json.loads((folder / "train.json").read_text())
        for start in record["starts"]:
            del start["host"]
        assert found["name"] == name and found["train"] == record and found["log"] == lines(folder)
        assert found["config"] == json.loads((folder / "config.json").read_text())
        for result in found["results"]:
            assert result["value"] == json.loads((folder / result["file"]).read_text())
    kinds = [[result["kind"] for result in run["results"]] for run in parsed.data["runs"]]
    assert kinds == [["bpd", "fid", "audit"], ["bpd", "audit", "repair"], ["bpd", "genppl", "repair"]]


def test_table_of_runs(runs: Path, parsed: Reader) -> None:
    for method, head in (("m2s", "posterior"), ("sedd", "log-score")):
        row = parsed.after("run|method", method)
        last = lines(runs / method)[-1]
        count = sum(math.prod(shape) for shape in shapes(runs / method / "model.safetensors"))
        assert row[1] == f"{method}{head}, uniform noise"
        assert row[2] == f"U-Net, width 8{count:,} parameters"
        assert row[3] == "digits (1,541 examples of 8 × 8)vocabulary 17" and row[4] == "3"
        assert row[5] == f"{last['validation_bits']:.4f}± {last['validation_error']:.4f}"
        assert row[6] == f"{last['seconds']:.0f} s" and row[7].startswith("CPU, ")


def shapes(path: Path) -> list[list[int]]:
    """Return the shapes in the header of a safetensors file: a length of eight bytes, then JSON."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]


def test_terms_of_the_nelbo(runs: Path, parsed: Reader) -> None:
    value = json.loads((runs / "sedd" / "bpd.json").read_text())
    row = parsed.after("run|data|bits per", "sedd")
    assert row[1:3] == ["digitstest", "dimension"]
    for cell, term in ((3, "nelbo"), (5, "integral"), (7, "reconstruction")):
        bits = value[term]["bits"]
        assert (
            row[cell] == f"{format_number(bits['value'])}± {format_number(bits['error'])} ± {format_number(bits['rows_error'])}"
        )
    assert row[6].startswith(f"{value['prior']['bits']['value']:.2e}") and row[8] == "6× 2 passes"
    low, high = value["nelbo"]["bits"]["low"], value["nelbo"]["bits"]["high"]
    assert row[4] == f"{format_number(low)} … {format_number(high)}"
    assert [cell[:6] for cell in parsed.after("run|bits per byte", "text")[1:]] == ["7.2500"] * 3 + ["7.2500"]


def test_distances_and_perplexities(runs: Path, parsed: Reader) -> None:
    fid = json.loads((runs / "m2s" / "fid.json").read_text())
    row = parsed.after("run|samples|against", "m2s")
    assert row[1] == "9 of samples.npz4 steps, bayes, cosine, seed 0" and row[2] == "9 of digits:testprotocol none"
    assert row[4] == format_number(fid["fid"], 2)
    assert row[5] == f"{format_number(1000 * fid['kid']['mean'], 3)}± {format_number(1000 * fid['kid']['error'], 3)}"
    for one in json.loads((runs / "text" / "genppl.json").read_text())["results"]:
        p, nats = one["perplexity"], one["nats_per_token"]
        how = "16 steps, bayes, cosine, " + ("temperature 0.8, " if "cold" in one["file"] else "") + "seed 0"
        row = parsed.row("text", f"6 of {Path(one['file']).name}{how}")
        assert row[2] == "tinyprotocol mdlm"
        assert row[3] == f"{p['value']:.2f}[{p['low']:.2f}, {p['high']:.2f}]"
        assert row[4] == f"{nats['value']:.4f}[{nats['low']:.4f}, {nats['high']:.4f}]"
        assert row[5].startswith(f"{one['entropy_bits']['value']:.3f}[") and row[6] == "6"
    (gap,) = json.loads((runs / "text" / "genppl.json").read_text())["differences"]
    row = parsed.row("text", "cold.npz less warm.npz")
    assert row[4].startswith(f"{gap['nats_per_token']['value']:.4f}[") and row[5] == "yes"
    assert row[2] == Path(gap["judge"]).name
    assert any("the judge is tiny, not" in text for text in parsed.content["p"])


def test_audit_and_repair(runs: Path, parsed: Reader) -> None:
    audit = json.loads((runs / "sedd" / "audit" / "audit.json").read_text())
    overall = audit["overall"]
    assert overall["position_steps"] == 2 * 64 * 4
    (mine,) = [row for row in parsed.rows if row[0] == "outside C"]
    strict = overall["before"]["strict"]["outside"]
    assert strict > 0 and mine[1] == "a score outside [ρ, 1/ρ]"
    assert mine[2:4] == [f"{strict / overall['position_steps']:.4%}", f"{strict:,}"]
    # The audit of m2s has no violation: a sentence says so in the place of tables full of zeros.
    assert any(text.startswith("All 512 scores of 2 samples") for text in parsed.content["p"])
    (steps,) = [text.splitlines()[0] for text in parsed.content["pre"] if "unreal. proj." in text]
    assert steps.endswith(audit["head"])
    repair = json.loads((runs / "sedd" / "repair" / "repair.json").read_text())
    rows = [row for row in parsed.rows if row[0] == "score as it is"]
    assert [row[1][:7] for row in rows[:1]] == [format_number(repair["measure"]["unprojected"])[:7]]
    classes = repair["audits"]["unprojected"]["overall"]
    share = classes["before"]["classes"]["material"] / classes["position_steps"]
    assert rows[1][2] == (f"{share:.4%}" if share else "0%")
    gap = json.loads((runs / "text" / "repair" / "repair.json").read_text())["measure"]["difference"]["nats_per_token"]
    cells = [row[1] for row in parsed.rows if row[0] == "projected minus as it is"]
    assert cells[1] == f"{gap['value']:.4f}[{gap['low']:.4f}, {gap['high']:.4f}]"


def test_commands_and_versions(runs: Path, parsed: Reader, tmp_path: Path) -> None:
    commands = parsed.content["pre"]
    start = json.loads((runs / "m2s" / "train.json").read_text())["starts"][0]
    said = [text for text in parsed.content["p"] if text.startswith("train.json")]
    assert start["git"] in said[0] and f"torch {start['torch']}" in said[0] and start["started"] in said[0]
    assert any('"validation_samples": 4' in text for text in commands)
    assert any(text == "a <b>bad</b> cab" for text in commands)
    words = ["/usr/bin/m2s", "train", "digits", "--out", "a run"]
    folder = tmp_path / "typed"
    folder.mkdir()
    record = json.loads((runs / "m2s" / "train.json").read_text())
    record["starts"][0]["command"] = words
    (folder / "train.json").write_text(json.dumps(record))
    write([folder], tmp_path / "typed.html")
    assert "m2s train digits --out 'a run'" in read(tmp_path / "typed.html").content["pre"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.inf, "–"),
        (0.0, "0"),
        (1234567, "1,234,567"),
        (1.23456, "1.2346"),
        (123.456, "123.46"),
        (-2e-7, "-2.00e-07"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_templates_escape_and_reject_unknown_names() -> None:
    environment = template_environment()
    assert environment.autoescape is True
    assert {section.template for section in SECTIONS} <= set(environment.list_templates())
    render = environment.from_string("{{ text }}{{ data | tojson }}").render
    assert render(text="<b>&'", data={"b": "</script>", "a": 1}) == r'&lt;b&gt;&amp;&#39;{"b":"\u003c/script\u003e","a":1}'
    with pytest.raises(ValueError, match="JSON"):
        render(text="", data=float("nan"))
    with pytest.raises(UndefinedError):
        render(data=1)


def test_table_cells() -> None:
    macro = template_environment().get_template("macros.html.jinja").module
    page = Reader(str(macro.table(Table(("a", "b"), [("x & y", Cell("1", ("± 2", "")))], (1,)))))
    assert page.rows == [["a", "b"], ["x & y", "1± 2"]] and page.content["small"] == ["± 2"]
    assert [(tag, attributes.get("class")) for tag, attributes in page.elements if tag in ("td", "th")] == [
        ("th", None),
        ("th", "number"),
        ("th", None),
        ("td", "number"),
    ]
    assert "figcaption" not in page.content
