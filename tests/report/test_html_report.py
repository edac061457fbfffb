"""`m2s report`: a page that parses, holds the numbers of the files, escapes what they say, and asks nothing of a network."""

import base64
import json
import math
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread, imsave

from m2s.cli import main
from m2s.data import Characters
from m2s.evaluation.genppl import PROTOCOLS, Samples, Scores, difference, summary
from m2s.report.curves import apart, gradient, label, loss, over_time, smooth, window
from m2s.report.markup import number, prose, svg, table
from m2s.report.page import Section, write
from m2s.report.read_run import Run, read_runs
from m2s.training import train
from small_runs import random_rows, small

VOID = {"meta", "link", "br", "img", "hr", "input", "source", "wbr"}
ADDRESSES = {"src", "href", "srcset", "poster", "action", "formaction", "data", "background", "xlink:href", "ping"}
QUICK = [
    "--steps",
    "3",
    "--batch",
    "8",
    "--network.width",
    "8",
    "--validation-samples",
    "4",
    "--log-every",
    "1",
    "--device",
    "cpu",
]
LETTERS = Characters(" abcdefg")


class Reader(HTMLParser):
    """A page as a list of elements; tags must balance, attributes must not repeat."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.content: dict[str, list[str]] = {}  # text of every element of a name, in order, with what is inside
        self.rows: list[list[str]] = []
        self._building: list[tuple[str, list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
            self._building.append((tag, []))
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes {self.open[-1:]}"
        _, parts = self._building.pop()
        self.content.setdefault(tag, []).append("".join(parts))
        if tag in ("td", "th"):
            self.rows[-1].append("".join(parts))

    def handle_data(self, data: str) -> None:
        for tag, parts in self._building:
            if data.strip() or tag == "pre":
                parts.append(data)

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def row(self, *beginning: str) -> list[str]:
        """The one row whose cells begin so."""
        (found,) = [row for row in self.rows if row[: len(beginning)] == list(beginning)]
        return found

    def after(self, heading: str, first: str) -> list[str]:
        """The first row that begins with `first` below the row of headings that begins with `heading`."""
        start = next(i for i, row in enumerate(self.rows) if row[: len(heading.split("|"))] == heading.split("|"))
        return next(row for row in self.rows[start + 1 :] if row[0] == first)

    @property
    def data(self) -> Any:
        return json.loads(self.content["script"][-1])


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


def decoded(uri: str) -> tuple[str, bytes]:
    kind, content = re.fullmatch(r"data:([\w/+]+);base64,([\w+/=]+)", uri).groups()  # type: ignore[union-attr]
    return kind, base64.b64decode(content, validate=True)


def picture_file(path: Path, side: int = 6) -> Path:
    imsave(path, np.arange(side * side).reshape(side, side), format="png")
    return path


class Averages(torch.nn.Module):
    """Stands in for Inception: 16 numbers of an image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(images.mean(1, keepdim=True), 4).flatten(1)


def judged(folder: Path) -> dict[str, Any]:
    """What `m2s evaluate genppl` writes of two files, from numbers that stand in for a judge's."""
    generator = np.random.default_rng(0)

    def scores(name: str, temperature: float) -> Scores:
        settings = {"steps": 16, "sampler": "bayes", "grid": "cosine", "seed": 0, "start": 0, "temperature": temperature}
        tokens = generator.integers(8, size=(6, 10))
        samples = Samples(
            folder / name, PROTOCOLS["mdlm"], [LETTERS.decode(row) for row in tokens.tolist()], tokens, LETTERS, settings
        )
        count = np.full(6, 9.0)
        entropy = generator.uniform(1, 2, 6)
        return Scores(samples, {"name": "tiny"}, 20 + generator.uniform(0, 9, 6), count, count, entropy, 2.0, "sample", 6)

    cold, warm = scores("cold.npz", 0.8), scores("warm.npz", 1.0)
    return {"m2s": "0", "results": [summary(cold, 100), summary(warm, 100)], "differences": [difference(cold, warm, 100)]}


@pytest.fixture(scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept of data sets is kept in a folder of this test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("M2S_DATA", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="module")
def runs(own_data: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small runs with results of every kind: written by the commands, but for those that need a judge."""
    folder = tmp_path_factory.mktemp("report")
    network = folder / "network.pt"
    torch.jit.save(torch.jit.script(Averages()), str(network))
    for method in ("m2s", "sedd"):
        run = str(folder / method)
        main(["train", "digits", "--method", method, "--optimizer.lr", "0.03", "--optimizer.warmup", "0", "--out", run, *QUICK])
        main(
            [
                "evaluate",
                "bpd",
                run,
                "--limit",
                "6",
                "--passes",
                "2",
                "--bins",
                "5",
                "--out",
                f"{run}/bpd.json",
                "--device",
                "cpu",
            ]
        )
        main(["audit", run, "--n", "2", "--steps", "4", "--out", f"{run}/audit", "--device", "cpu"])
        sampler = "bayes" if method == "m2s" else "euler"
        main(
            ["sample", run, "--n", "9", "--steps", "4", "--sampler", sampler, "--out", f"{run}/samples.png", "--device", "cpu"]
        )
    fid = ["--inception", str(network), "--few", "--device", "cpu"]
    main(
        [
            "evaluate",
            "fid",
            f"{folder}/m2s/samples.npz",
            "--against",
            "digits:test",
            "--limit",
            "9",
            *fid,
            "--out",
            f"{folder}/m2s/fid.json",
        ]
    )
    main(
        [
            "repair",
            f"{folder}/sedd",
            "--n",
            "8",
            "--steps",
            "4",
            "--against",
            "digits:test",
            *fid,
            "--out",
            f"{folder}/sedd/repair",
        ]
    )
    picture_file(folder / "m2s" / "film.png")
    picture_file(folder / "sedd" / "odd.png")

    train(small(folder / "text"), random_rows())
    text = folder / "text"
    genppl = judged(folder)
    (text / "genppl.json").write_text(json.dumps(genppl))
    audit = json.loads((folder / "sedd" / "repair" / "repair.json").read_text())
    gap, (free, projected) = genppl["differences"][0], genppl["results"]
    audit["measure"] = {"kind": "genppl", "free": free, "projected": projected, "difference": gap}
    (text / "repair").mkdir()
    (text / "repair" / "repair.json").write_text(json.dumps(audit))
    bpd = json.loads((folder / "m2s" / "bpd.json").read_text()) | {"unit": "token"}
    for term in ("bound", "integral"):
        bpd[term] |= {
            name: {**bpd[term]["bits"], "value": 7.25} for name in ("bits_per_byte", "bits_per_character", "perplexity")
        }
    (text / "bpd.json").write_text(json.dumps(bpd))
    (text / "samples.txt").write_text("--- sample 0 ---\na <b>bad</b> cab\n\n--- sample 1 ---\nfed\n")
    return folder


@pytest.fixture(scope="module")
def page(runs: Path) -> Path:
    out = runs / "page" / "report.html"
    main(["report", *(str(runs / name) for name in ("m2s", "sedd", "text")), "--out", str(out), "--title", "Three runs"])
    return out


@pytest.fixture(scope="module")
def parsed(page: Path) -> Reader:
    return read(page)


# what the page is


def test_it_is_a_well_formed_page_without_scripts_of_its_own(page: Path, parsed: Reader) -> None:
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>\n<html lang")
    assert parsed.content["title"] == parsed.content["h1"] == ["Three runs"]
    assert [script["type"] for script in parsed.named("script")] == ["application/json"]
    assert not any(name.startswith("on") for _, attributes in parsed.elements for name in attributes)
    identifiers = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    links = [attributes["href"] for attributes in parsed.named("a")]
    assert links and {link.removeprefix("#") for link in links} < set(identifiers)
    for part in ("runs", "training", "measures", "samples", "audit", "repair", "made"):
        assert part in identifiers
    assert "left-out" not in identifiers


def test_no_external_address(page: Path, parsed: Reader) -> None:
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


def test_every_figure_has_words_and_is_an_image(parsed: Reader) -> None:
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
    # loss, norm, over t, frontier, two audits; two grids, film, odd, pairs
    assert (kinds.count("image/svg+xml"), kinds.count("image/png")) == (6, 5)
    assert len(parsed.content["figcaption"]) >= len(images)
    captions = " ".join(parsed.content["figcaption"])
    for words in ("m2s: 9 samples, 4 steps, bayes, cosine, seed 0", "m2s: from noise to samples", "sedd: odd.png", "in pairs"):
        assert words in captions


# the numbers


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_the_page_is_data_too(runs: Path, parsed: Reader) -> None:
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


def test_the_table_of_runs(runs: Path, parsed: Reader) -> None:
    for method, head in (("m2s", "posterior"), ("sedd", "log-score")):
        row = parsed.after("run|method", method)
        last = lines(runs / method)[-1]
        count = sum(math.prod(shape) for shape in shapes(runs / method / "model.safetensors"))
        assert row[1] == f"{method}{head}, uniform noise"
        assert row[2] == f"U-Net, width 8{count:,} parameters"
        assert row[3] == "digits (1,541 rows of 8 × 8)vocabulary 17" and row[4] == "3"
        assert row[5] == f"{last['validation_bits']:.4f}± {last['validation_error']:.4f}"
        assert row[6] == f"{last['seconds']:.0f} s" and row[7].startswith("CPU, ")


def shapes(path: Path) -> list[list[int]]:
    """Of the tensors of a safetensors file, from its header: a length of eight bytes, then JSON."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]


def test_the_terms_of_the_bound(runs: Path, parsed: Reader) -> None:
    value = json.loads((runs / "sedd" / "bpd.json").read_text())
    row = parsed.after("run|data|bits per", "sedd")
    assert row[1:3] == ["digitstest", "dimension"]
    for cell, term in ((3, "bound"), (5, "integral"), (7, "reconstruction")):
        bits = value[term]["bits"]
        assert row[cell] == f"{number(bits['value'])}± {number(bits['error'])} ± {number(bits['rows_error'])}"
    assert row[6].startswith(f"{value['prior']['bits']['value']:.2e}") and row[8] == "6× 2 passes"
    low, high = value["bound"]["bits"]["low"], value["bound"]["bits"]["high"]
    assert row[4] == f"{number(low)} … {number(high)}"
    assert [cell[:6] for cell in parsed.after("run|bits per byte", "text")[1:]] == ["7.2500"] * 3 + ["7.2500"]


def test_distances_and_perplexities(runs: Path, parsed: Reader) -> None:
    fid = json.loads((runs / "m2s" / "fid.json").read_text())
    row = parsed.after("run|samples|against", "m2s")
    assert row[1] == "9 of samples.npz4 steps, bayes, cosine, seed 0" and row[2] == "9 of digits:testprotocol none"
    assert row[4] == number(fid["fid"], 2)
    assert row[5] == f"{number(1000 * fid['kid']['mean'], 3)}± {number(1000 * fid['kid']['error'], 3)}"
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
    assert row[3].startswith(f"{gap['nats_per_token']['value']:.4f}[") and row[4] == "yes"
    assert any("the judge is tiny, not" in text for text in parsed.content["p"])


def test_the_audit_and_the_repair(runs: Path, parsed: Reader) -> None:
    audit = json.loads((runs / "sedd" / "audit" / "audit.json").read_text())
    overall = audit["overall"]
    assert overall["position_steps"] == 2 * 64 * 4
    mine = [row for row in parsed.rows if row[0] == "outside C"][1]
    strict = overall["before"]["strict"]["outside"]
    assert strict > 0 and mine[1] == "a score outside [ρ, 1/ρ]"
    assert mine[2:4] == [f"{strict / overall['position_steps']:.4%}", f"{strict:,}"]
    posterior = next(row for row in parsed.rows if row[0] == "in P")
    assert posterior[2:] == ["100.0000%", "512", "512", "512"]
    assert [text.splitlines()[0] for text in parsed.content["pre"] if "unreal. proj." in text][1].endswith(audit["head"])
    repair = json.loads((runs / "sedd" / "repair" / "repair.json").read_text())
    rows = [row for row in parsed.rows if row[0] == "score as it is"]
    assert [row[1][:7] for row in rows[:1]] == [number(repair["measure"]["free"])[:7]]
    classes = repair["audits"]["free"]["overall"]
    share = classes["before"]["classes"]["material"] / classes["position_steps"]
    assert rows[1][2] == (f"{share:.4%}" if share else "0%")
    gap = json.loads((runs / "text" / "repair" / "repair.json").read_text())["measure"]["difference"]["nats_per_token"]
    cells = [row[1] for row in parsed.rows if row[0] == "projected less free"]
    assert cells[1] == f"{gap['value']:.4f}[{gap['low']:.4f}, {gap['high']:.4f}]"


def test_how_it_was_made(runs: Path, parsed: Reader) -> None:
    commands = parsed.content["pre"]
    start = json.loads((runs / "m2s" / "train.json").read_text())["starts"][0]
    said = [text for text in parsed.content["p"] if text.startswith("train.json")]
    assert start["git"] in said[0] and f"torch {start['torch']}" in said[0] and start["started"] in said[0]
    assert any('"validation_samples": 4' in text for text in commands)
    assert any(text == "a <b>bad</b> cab" for text in commands)
    words = ["/usr/bin/m2s", "train", "digits", "--out", "a run"]
    folder = runs / "typed"
    folder.mkdir()
    record = json.loads((runs / "m2s" / "train.json").read_text())
    record["starts"][0]["command"] = words
    (folder / "train.json").write_text(json.dumps(record))
    write([folder], runs / "typed.html")
    assert "m2s train digits --out 'a run'" in read(runs / "typed.html").content["pre"]


# hostile, damaged and missing files


def test_names_and_texts_are_escaped(runs: Path, tmp_path: Path) -> None:
    name = r"""<script>alert(1)<!-- & "q" 'a' $\frac{ </title> _x""".replace("/", "∕")
    run = tmp_path / name
    shutil.copytree(runs / "text", run)
    with (run / "log.jsonl").open("a") as log:
        log.write(json.dumps({"step": 13, "note": "</script><script>alert(2)</script>"}) + "\n")
    bpd = json.loads((run / "bpd.json").read_text())
    bpd["data"]["name"] = "<img src=x onerror=alert(3)>"
    (run / "bpd.json").write_text(json.dumps(bpd))
    picture_file(run / '"><b>.png')
    (run / "audit").mkdir()
    audit = json.loads((runs / "sedd" / "audit" / "audit.json").read_text()) | {"checkpoint": r"<b>$\frac{$</b>"}
    (run / "audit" / "audit.json").write_text(json.dumps(audit))
    shutil.copytree(run, tmp_path / "_hidden")
    problems = write([run, tmp_path / "_hidden"], tmp_path / "a.html", title="a </title> & <b>", notes="1 < 2\n\n<i>two</i>")
    page = read(tmp_path / "a.html")
    assert problems == [] and page.content["title"] == ["a </title> & <b>"]
    assert page.content["p"][:2] == ["1 < 2", "<i>two</i>"]
    assert len(page.named("script")) == 1 and not page.named("b") and not page.named("i")
    assert page.data["runs"][0]["name"] == name and page.data["runs"][0]["log"][-1]["note"].startswith("</script>")
    assert page.after("run|method", name)[1].startswith("m2s") and page.row(name, "<img src=x onerror=alert(3)>test")
    assert all(image["src"].startswith("data:") for image in page.named("img"))
    assert f'{name}: "><b>.png' in page.content["figcaption"]


def test_names_are_shown_in_a_legend_as_they_are() -> None:
    assert label("$a$") == r"\$a\$" and label("_a") == " _a"
    log = [{"step": step, "bits": 2.0, "grad_norm": 1.0, "grad_norm_max": 2.0} for step in range(3)]
    runs = [Run(Path(), name, {}, log=log) for name in (r"$\frac{", "_a")]
    for figure in (loss(runs), gradient(runs)):
        assert figure is not None
        texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        assert texts == [r"\$\frac{", " _a"] and svg(figure).startswith("data:")


def test_what_cannot_be_read_is_named_and_the_rest_is_there(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "sedd", run)
    (run / "bpd.json").write_text('{"bound": ')
    audit = json.loads((run / "audit" / "audit.json").read_text())
    del audit["overall"]["before"]["signed"]
    (run / "audit" / "audit.json").write_text(json.dumps(audit))
    (run / "samples.npz").write_bytes((run / "samples.npz").read_bytes()[:200])
    (run / "odd.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    (run / "other.json").write_text('{"a": [1, 2]}')
    (run / "config.json").write_text("[]")
    (run / "model.safetensors").write_bytes(b"none")
    (run / "fid.json").write_text('{"fid": NaN, "samples": 1, "reference": 2, "network": 3, "kid": null}')
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "bits": NaN}\n{"step": 5, "bi')
    main(["report", str(run), "--out", str(tmp_path / "a.html")])
    page = read(tmp_path / "a.html")
    named = " ".join(page.content["li"])
    for file in (
        "bpd.json",
        "audit.json",
        "samples.npz",
        "odd.png",
        "other.json",
        "config.json",
        "model.safetensors",
        "fid.json",
    ):
        assert file in named, file
    assert "no record in line 6" in named and "it has no 'signed'" in named and len(page.content["li"]) == 9
    assert page.after("run|method", "run")[4] == "4" and "repair" in {e.get("id") for e in page.named("section")}
    assert page.data["runs"][0]["log"][-1] == {"step": 4, "bits": None}


def begun(runs: Path, folder: Path) -> Path:
    """A run that holds its train.json and nothing else."""
    (folder / "run").mkdir()
    shutil.copy(runs / "m2s" / "train.json", folder / "run")
    return folder / "run"


def test_a_run_that_has_only_begun(runs: Path, tmp_path: Path) -> None:
    run = begun(runs, tmp_path)
    (run / "a.npz.parts").mkdir()
    (run / "a.npz.parts" / "settings.json").write_text("{")
    assert write([run], tmp_path / "a.html") == []
    page = read(tmp_path / "a.html")
    assert [section["id"] for section in page.named("section")] == ["runs", "made"]
    assert page.after("run|method", "run")[4:7] == ["0of 3", "–", "0 s"]


def test_a_run_that_diverged(runs: Path, tmp_path: Path) -> None:
    run = begun(runs, tmp_path)
    value = {"step": 2, "loss": "nan", "grad_norm": "inf", "bad": [1], "batch": [1, 2]}
    (run / "nan.json").write_text(json.dumps(value))
    assert write([run], tmp_path / "a.html") == []
    assert "run: at step 2 the loss was nan and the gradient's norm inf." in read(tmp_path / "a.html").content["p"]


def test_samples_of_text_that_have_tokens_beside_them(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "text", tmp_path / "run")
    settings = json.dumps({"steps": 7, "sampler": "bayes", "data": {"kind": "text"}})
    for name in ("samples", "alone"):
        np.savez(tmp_path / "run" / f"{name}.npz", tokens=np.zeros((9, 4), np.int32), settings=settings)
    (problem,) = write([tmp_path / "run"], tmp_path / "a.html")
    assert "alone.npz holds tokens but no text" in problem
    assert "run: 2 of 9 samples, 7 steps, bayes (samples.npz)" in read(tmp_path / "a.html").content["h3"]


# the command


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as exit_:
        main(["report", *arguments])
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and err.startswith("m2s: ") and err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
    return err


def test_refusals(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, out = str(runs / "m2s"), str(tmp_path / "new" / "a.html")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "train.json").write_text('{"config": {}')
    (tmp_path / "page.html").mkdir()
    capsys.readouterr()
    assert "no run was given" in refused(capsys, tmp_path, "--out", out)
    assert "empty is no run, for it holds no train.json" in refused(
        capsys, tmp_path, good, str(tmp_path / "empty"), "--out", out
    )
    assert "there is no such folder" in refused(capsys, tmp_path, str(tmp_path / "none"), "--out", out)
    assert "train.json is damaged" in refused(capsys, tmp_path, good, str(tmp_path / "bad"), "--out", out)
    for text in ("[]", '{"config": 1, "data": {}, "starts": []}', '{"config": {}, "data": {}, "starts": [1]}'):
        (tmp_path / "bad" / "train.json").write_text(text)
        assert "train.json is damaged" in refused(capsys, tmp_path, str(tmp_path / "bad"), "--out", out)
    assert "must end in .html" in refused(capsys, tmp_path, good, "--out", str(tmp_path / "a.pdf"))
    assert "is a folder" in refused(capsys, tmp_path, good, "--out", str(tmp_path / "page.html"))
    (tmp_path / "mine.html").write_text("mine")
    assert "mine.html is there already" in refused(capsys, tmp_path, good, "--out", str(tmp_path / "mine.html"))
    assert (tmp_path / "mine.html").read_text() == "mine"
    main(
        ["report", str(begun(runs, tmp_path)), "--out", str(tmp_path / "mine.html"), "--notes", "Seen & noted.", "--overwrite"]
    )
    page = read(tmp_path / "mine.html")
    assert page.data["runs"][0]["name"] == "run" and page.content["p"][0] == "Seen & noted."


def test_the_same_files_give_the_same_bytes(runs: Path, page: Path, tmp_path: Path) -> None:
    for name in ("text", "m2s", "sedd"):
        shutil.copytree(runs / name, tmp_path / name)
    order = [tmp_path / name for name in ("m2s", "sedd", "text")]
    write(order, tmp_path / "a.html", title="Three runs")
    assert (tmp_path / "a.html").read_bytes() == page.read_bytes()


def test_runs_are_named_apart_and_taken_once(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "m2s", tmp_path / "m2s")
    given = [runs / "m2s", tmp_path / "m2s", runs / "sedd", runs / "sedd" / ".." / "m2s"]
    assert [run.name for run in read_runs(given)] == [str(runs / "m2s"), str(tmp_path / "m2s"), "sedd"]


def test_sections_of_the_caller(runs: Path, tmp_path: Path) -> None:
    shown = picture_file(tmp_path / "shown.png")
    own = Section("Our <own>: part", prose("one & two") + table(("a", "b"), [("x", 1)]), ((shown, "what is shown"),))
    lost = Section("Lost", "", ((tmp_path / "none.png", "nothing"),))
    (problem,) = write([begun(runs, tmp_path)], tmp_path / "a.html", sections=[own, lost])
    page = read(tmp_path / "a.html")
    assert (
        "none.png" in problem and page.content["h2"][:2] == ["Our <own>: part", "Lost"] and page.content["a"][0] == "Our <own>"
    )
    assert "one & two" in page.content["p"] and page.row("x", "1")
    assert decoded(page.named("img")[0]["src"]) == ("image/png", shown.read_bytes())


# the curves


def test_smoothing_is_a_mean_about_each_place() -> None:
    values = np.random.default_rng(0).normal(size=40)
    for width in (1, 3, 9):
        half = width // 2
        expected = [values[max(0, i - half) : i + half + 1].mean() for i in range(40)]
        assert np.allclose(smooth(values, width), expected, atol=1e-12)
    assert [window(n) for n in (1, 24, 49, 50, 1000)] == [1, 1, 1, 3, 41]


def test_time_is_summed_over_starts() -> None:
    run = Run(Path(), "a", {}, log=[{"step": i, "seconds": s} for i, s in enumerate([10.0, 20.0, 20.0, 5.0, 15.0, 3.0])])
    assert run.seconds == 20 + 15 + 3


def test_curves_show_the_log(runs: Path) -> None:
    (run,) = read_runs([runs / "m2s"])
    axes = loss([run]).axes[0]  # type: ignore[union-attr]
    drawn = {line.get_label(): line for line in axes.lines}
    log = lines(runs / "m2s")
    assert np.allclose(drawn["m2s"].get_ydata(), [line["bits"] for line in log if "bits" in line])
    (held,) = axes.containers
    assert np.allclose(held.lines[0].get_ydata(), [line["validation_bits"] for line in log if "validation_bits" in line])
    curve = json.loads((runs / "m2s" / "bpd.json").read_text())["curve"]
    curve[1] |= {"bits": None, "error": None}
    (stairs,) = over_time([("a", "token", curve)]).axes[0].patches
    values, edges, _ = stairs.get_data()
    assert np.isnan(values[1]) and values[0] == curve[0]["bits"] and edges[-1] == curve[-1]["to"] and len(values) == 5


@pytest.mark.parametrize(
    ("value", "said"),
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
def test_numbers(value: float | None, said: str) -> None:
    assert number(value) == said


# in a browser

CHROMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROBE = """<script>addEventListener("load", () => {
for (const image of document.images) image.dataset.width = image.naturalWidth;
document.documentElement.dataset.size = [innerWidth, document.documentElement.scrollWidth]; });</script>"""


@pytest.fixture(scope="module")
def chrome() -> str:
    found = next(filter(None, map(shutil.which, (os.environ.get("CHROME", ""), *CHROMES))), None)
    if found is None:
        pytest.skip("no browser: apt-get install chromium, or set CHROME to the path of one")
    return found


class Visit:
    """What a browser without a window makes of a page: the widths of its images, its console, and what the page asked for."""

    def __init__(self, chrome: str, text: str, folder: Path, width: int = 1200) -> None:
        page, requests = folder / "visited.html", folder / "requests.json"
        page.write_text(text.replace("<head>", f"<head>{PROBE}", 1), encoding="utf-8")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"]
        options += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", f"--log-net-log={requests}"]
        command = [chrome, *options, "--enable-logging=stderr", "--dump-dom", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        self.dom = Reader(done.stdout)
        self.console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        log = json.loads(requests.read_text())
        kind = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
        asked = [event["params"] for event in log["events"] if event["type"] == kind and "params" in event]
        # a page from the disk has the origin "null"; what the browser asks for itself has none
        self.requests = [params["url"] for params in asked if params.get("initiator") != "not an origin" and "url" in params]
        self.widths = [int(image["data-width"]) for image in self.dom.named("img")]
        self.size = tuple(map(int, self.dom.named("html")[0]["data-size"].split(",")))


def test_in_a_browser(chrome: str, page: Path, tmp_path: Path) -> None:
    """All figures appear, nothing is complained of, nothing is asked for; on a phone nothing but tables scrolls aside."""
    text = page.read_text(encoding="utf-8")
    visit = Visit(chrome, text, tmp_path, width=500)
    assert visit.console == [] and visit.requests == []
    assert len(visit.widths) == text.count("<img") == 11 and min(visit.widths) > 0
    assert visit.size[0] >= visit.size[1]
    assert visit.dom.data == read(page).data


def test_the_browser_would_have_noticed(chrome: str, page: Path, tmp_path: Path) -> None:
    """The same eyes see a request, a complaint and a broken picture where they are; and the page's policy stops the request."""
    foreign = '<img src="http://127.0.0.1:9/x.png" alt="x">'
    text = page.read_text(encoding="utf-8").replace("<main>", f"<main>{foreign}", 1)
    stopped = Visit(chrome, text, tmp_path)
    assert stopped.requests == [] and len(stopped.console) == 1 and "Content Security Policy" in stopped.console[0]
    free = Visit(chrome, re.sub(r"<meta http-equiv[^>]*>", "", text), tmp_path)
    assert free.requests == ["http://127.0.0.1:9/x.png"] and min(free.widths) == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_labels_stand_apart_as_near_to_their_lines_as_they_can(places: list[float]) -> None:
    least = 0.1
    found = np.array(apart(places, least))
    assert found.min() >= 0 and found.max() <= 1 + 1e-12
    order = np.argsort(places, kind="stable")
    assert np.all(np.diff(found[order]) >= least - 1e-12)
    # the nearest: no small step of any run of neighbours, alone or together, that stays allowed comes nearer
    for first in range(len(places)):
        for last in range(first, len(places)):
            for step in (-1e-4, 1e-4):
                moved = found.copy()
                moved[order[first : last + 1]] += step
                if moved.min() >= 0 and moved.max() <= 1 and np.all(np.diff(moved[order]) >= least):
                    assert np.sum((moved - places) ** 2) >= np.sum((found - places) ** 2) - 1e-12
