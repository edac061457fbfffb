"""The page in a browser: all figures appear, and nothing is requested. Run by `make test-docs`."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import m2s
from m2s.cli import main
from m2s.models import DiT, DiTConfig
from m2s.report.film_strip import FRAMES
from page_reader import Reader, read

pytestmark = pytest.mark.docs

CHROMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROBE = """<script>addEventListener("load", () => {
for (const image of document.images) image.dataset.width = image.naturalWidth;
document.documentElement.dataset.size = [innerWidth, document.documentElement.scrollWidth]; });</script>"""


@pytest.fixture(scope="module")
def chrome() -> str:
    found = next(filter(None, map(shutil.which, (os.environ.get("CHROME", ""), *CHROMES))), None)
    if found is None:
        pytest.fail("no browser: apt-get install chromium, or set CHROME to the path of one")
    return found


NARROW, WIDE = 400, 1200
FRAME = """<!DOCTYPE html><html lang="en"><meta name="color-scheme" content="light dark"><style>body{{margin:0}}
iframe{{border:0;color-scheme:light dark}}</style><iframe src="{page}" width="{width}" height="800"></iframe></html>"""
# Moves the slider to each of its places, and posts what the page then shows. The wrapper writes it into its own document.
MEASURE = r"""<script>addEventListener("load", () => {
const root = document.documentElement, input = document.querySelector("input"), seen = [];
for (let place = 0; place <= input.max; place++) {
  input.value = place; input.dispatchEvent(new Event("input"));
  const shown = [...document.querySelectorAll("[data-at]")].filter(one => one.offsetParent);
  seen.push([document.querySelector("output").textContent, shown.map(one => one.dataset.at)]); }
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const drawn = [...document.querySelectorAll("picture")].map(one => one.querySelector("img").currentSrc ===
  (dark ? one.querySelector("source").srcset : one.querySelector("img").src));
const command = document.querySelector("pre.made"), broken = [];
const texts = document.createTreeWalker(command, NodeFilter.SHOW_TEXT);
getSelection().selectAllChildren(command);
for (let text = texts.nextNode(); text; text = texts.nextNode())
  for (const word of text.data.matchAll(/(?<=^|\s)\S{1,20}(?=\s|$)/g)) for (let width = 220; width <= 360; width += 10) {
    const range = document.createRange();
    command.style.width = `${width}px`;
    range.setStart(text, word.index); range.setEnd(text, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(one => one.top)).size > 1) broken.push(word[0]); }
command.style.width = "";
parent.postMessage(JSON.stringify({width: innerWidth, scroll: root.scrollWidth, dark, seen, drawn,
  command: command.textContent, copied: getSelection().toString(), broken,
  cells: getComputedStyle(document.querySelector("td")).display, back: getComputedStyle(document.body).backgroundColor,
  images: [...document.images].map(one => one.naturalWidth)}), "*"); });</script>"""
# Moves the slider of a film to each of its places, then plays the film, and posts what the page shows.
WATCH = """<script>addEventListener("load", () => {
const root = document.documentElement, input = document.querySelector("input"), button = document.querySelector("button");
const state = () => [input.value, document.querySelector("output").textContent, image.src === sources[input.value]];
const seen = [state()], box = image.getBoundingClientRect();
for (let place = 0; place <= input.max; place++) {
  input.value = place; input.dispatchEvent(new Event("input")); seen.push(state()); }
button.click();
const played = [[button.textContent, ...state()]];
setTimeout(() => { played.push([button.textContent, ...state()]);
  parent.postMessage(JSON.stringify({width: innerWidth, scroll: root.scrollWidth, bottom: button.getBoundingClientRect().bottom,
  dark: matchMedia("(prefers-color-scheme: dark)").matches, back: getComputedStyle(document.body).backgroundColor,
  line: getComputedStyle(image).backgroundColor, pixels: image.naturalWidth, shown: [box.width, box.height],
  distinct: new Set(sources).size, seen, played}), "*"); }, 4000); });</script>"""
LISTEN = "<script>addEventListener('message', event => { document.documentElement.dataset.found = event.data; });</script>"


class Visit:
    """A page in a headless browser: the widths of its images, its console, and its requests."""

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
        # A page from the disk has the origin "null"; requests of the browser itself have none.
        self.requests = [params["url"] for params in asked if params.get("initiator") != "not an origin" and "url" in params]
        self.widths = [int(image["data-width"]) for image in self.dom.named("img")]
        self.size = tuple(map(int, self.dom.named("html")[0]["data-size"].split(",")))


def test_in_a_browser(chrome: str, page: Path, tmp_path: Path) -> None:
    """All figures appear, there is no error and no request; on a phone only tables scroll sideways."""
    text = page.read_text(encoding="utf-8")
    visit = Visit(chrome, text, tmp_path, width=500)
    assert visit.console == [] and visit.requests == []
    assert len(visit.widths) == text.count("<img") == 13 and min(visit.widths) > 0
    assert visit.size[0] >= visit.size[1]
    assert visit.dom.data == read(page).data


def test_browser_reports_requests_and_broken_images(chrome: str, page: Path, tmp_path: Path) -> None:
    """The test above would see a request, an error and a broken image; and the policy of the page blocks the request."""
    foreign = '<img src="http://127.0.0.1:9/x.png" alt="x">'
    text = page.read_text(encoding="utf-8").replace("<main>", f"<main>{foreign}", 1)
    stopped = Visit(chrome, text, tmp_path)
    assert stopped.requests == [] and len(stopped.console) == 1 and "Content Security Policy" in stopped.console[0]
    free = Visit(chrome, re.sub(r"<meta http-equiv[^>]*>", "", text), tmp_path)
    assert free.requests == ["http://127.0.0.1:9/x.png"] and min(free.widths) == 0


def measure(chrome: str, original: Path, script: str, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """What a script finds in a copy of a page, in a frame of this width and in this color scheme."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", original.read_text(encoding="utf-8"))  # which would forbid the script
    page, frame = folder / "page.html", folder / "frame.html"
    page.write_text(text.replace("<head>", f"<head>{script}", 1), encoding="utf-8")
    frame.write_text(FRAME.format(page=page.as_uri(), width=width).replace("<meta", f"{LISTEN}<meta", 1), encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += [f"--user-data-dir={folder / 'profile'}", "--window-size=1300,900", "--virtual-time-budget=5000"]
    options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", frame.as_uri()]
    done = subprocess.run([chrome, *options], capture_output=True, text=True, timeout=300)
    return json.loads(html.unescape(re.search(r'data-found="([^"]*)"', done.stdout)[1]))  # type: ignore[index]


@pytest.mark.parametrize("width", [NARROW, WIDE])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_comparison_on_phones_and_screens_in_both_color_schemes(
    chrome: str, compared: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    """Nothing scrolls sideways, figures are those of the scheme, tables are cards on a phone, and the slider works.

    The lines of a command break between its words, not after a hyphen, and it can be copied.
    """
    found = measure(chrome, compared, MEASURE, tmp_path, width, dark)
    assert found["copied"] == found["command"] and found["command"].startswith("m2s compare ") and found["broken"] == []
    assert found["dark"] is dark and found["width"] == width
    assert found["scroll"] <= width
    assert found["seen"] == [["2", ["2"] * 3], ["4", ["4"] * 3]]
    assert min(found["images"]) > 0 and all(found["drawn"])
    assert (found["cells"] == "flex") == (width == NARROW)
    assert (sum(map(int, re.findall(r"\d+", found["back"]))) < 384) is dark


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `m2s figure film`, of images whose pixels begin as masks."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("film")
    model = DiT(DiTConfig(states=4, width=16, depth=1, heads=2, condition_width=8, length=6))
    head = m2s.Posterior(m2s.Absorbing(3, m2s.Linear()))
    m2s.save(folder / "run", model, head, {"kind": "image", "shape": [2, 3], "levels": 3})
    main(["figure", "film", "--source", str(folder / "run"), "--out", str(folder / "film.html")])
    return folder / "film.html"


def brightness(color: str) -> int:
    """The sum of red, green and blue of a color such as rgb(0, 128, 255)."""
    return sum(map(int, re.findall(r"\d+", color)[:3]))


@pytest.mark.parametrize("width", [NARROW, WIDE])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_film_on_phones_and_screens_in_both_color_schemes(
    chrome: str, film: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    """Nothing scrolls, the lines between images suit the scheme, the slider shows each state, and the film plays once."""
    found = measure(chrome, film, WATCH, tmp_path, width, dark)
    assert found["dark"] is dark and found["width"] == width
    assert found["scroll"] <= width and found["bottom"] <= 800  # the height of the frame
    assert (brightness(found["back"]) < 384) is (brightness(found["line"]) < 384) is dark
    assert found["pixels"] > 0 and min(found["shown"]) > 200
    last = FRAMES - 1
    assert found["seen"] == [[str(place), f"{place / last:.0%}", True] for place in (last, *range(FRAMES))]
    assert found["played"] == [["Pause", "0", "0%", True], ["Play", str(last), "100%", True]]
    assert found["distinct"] > FRAMES // 2


@pytest.mark.parametrize(("name", "text"), [("compared", "4 steps"), ("film", "100%")])
def test_the_policy_lets_the_slider_run(
    chrome: str, name: str, text: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The page as it is: the checksum in its policy is that of its script, which sets `aria-valuetext`."""
    page = tmp_path / "page.html"
    page.write_text(request.getfixturevalue(name).read_text(encoding="utf-8"), encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--dump-dom", page.as_uri()]
    done = subprocess.run([chrome, *options], capture_output=True, text=True, timeout=300)
    assert f'aria-valuetext="{text}"' in done.stdout and ":CONSOLE" not in done.stderr
