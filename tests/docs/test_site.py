"""The documentation site builds without warnings, its links lead somewhere, and it loads nothing from a network."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from doc_pages import ROOT
from filelock import FileLock

import reference_pages
import site_links
from built_site import Site, build

pytestmark = pytest.mark.docs

GOALS = {
    "training guide": "training.html",
    "first training notebook": "tutorials/compare-on-digits.html",
    "audit guide": "evaluation.html",
    "audit notebook": "tutorials/audit-and-repair.html",
    "lab": "lab/index.html",
}


@pytest.fixture(scope="session")
def log_and_site(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Site]:
    """The site, built once for all processes that run tests."""
    shared = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else tmp_path_factory.mktemp("shared")
    log = shared / "site.log"
    with FileLock(shared / "site.lock"):
        if not log.exists():
            log.write_text(build(shared / "site"))
    return log.read_text(), Site(shared / "site")


@pytest.fixture(scope="session")
def site(log_and_site: tuple[str, Site]) -> Site:
    return log_and_site[1]


def test_it_builds_without_warnings(log_and_site: tuple[str, Site]) -> None:
    log, site = log_and_site
    assert not [line for line in log.splitlines() if "warn" in line.lower()], log
    assert len(site.pages) > 60


def test_links_lead_to_files_and_anchors_of_the_site(site: Site) -> None:
    broken = []
    for page, reader in site.pages.items():
        for link in dict.fromkeys(reader.links):
            target = site.target(page, link)
            if target is None:
                continue
            file, anchor = target
            if file not in site.files or (anchor and file in site.pages and anchor not in site.pages[file].anchors):
                broken.append(f"{page}: {link}")
    assert not broken, "\n".join(broken)


def test_nothing_is_loaded_from_outside(site: Site) -> None:
    """Every picture, script, style and font is a file of the site."""
    wrong = []
    for page, reader in site.pages.items():
        for link in reader.loaded:
            target = site.target(page, link)
            if not (link.startswith("data:") or (target and target[0] in site.files)):
                wrong.append(f"{page}: {link}")
    for style in [name for name in site.files if name.endswith(".css")]:
        for link in re.findall(r"url\(\s*[\"']?([^\"')]+)", (site.folder / style).read_text()):
            target = site.target(style, link)
            if not (link.startswith(("data:", "#")) or (target and target[0] in site.files)):
                wrong.append(f"{style}: {link}")
        assert "@import" not in (site.folder / style).read_text()
    assert not wrong, "\n".join(wrong)


def test_links_out_of_the_site_are_well_formed(site: Site) -> None:
    for page, reader in site.pages.items():
        for link in reader.links:
            parts = urlsplit(link)
            if site.target(page, link) is None:
                assert parts.scheme in ("https", "http", "mailto"), f"{page}: {link}"
                assert parts.scheme == "mailto" or re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc), f"{page}: {link}"
                assert not re.search(r"[\s<>\"]", link), f"{page}: {link}"


def test_formulas_are_typeset(site: Site) -> None:
    for page in site.pages:
        text = (site.folder / page).read_text()
        assert 'class="arithmatex"' not in text and "katex-error" not in text, page


def test_every_public_name_is_in_the_inventory_of_the_built_reference(site: Site) -> None:
    places = site_links.read_inventory((site.folder / "objects.inv").read_bytes())
    for name in reference_pages.documented().values():
        page, _, anchor = places[name.path].partition("#")
        assert anchor in site.pages[page].anchors, name.path
        assert {alias for alias in name.aliases if alias not in places} == set(), name.path


@pytest.mark.parametrize("goal", GOALS)
def test_goal_is_three_clicks_from_home(goal: str, site: Site) -> None:
    assert site.clicks().get(GOALS[goal], 99) <= 3, goal


def test_every_page_of_the_navigation_can_be_reached(site: Site) -> None:
    assert not set(site.pages) - set(site.clicks()) - {"lab/index.html"}


def test_a_browser_asks_for_files_only(site: Site, chrome: str, tmp_path: Path) -> None:
    """The log of Chromium's network stack has no request of a page for a host."""
    for page in ("index.html", "concepts/losses.html", "architecture.html"):
        log = tmp_path / "net.json"
        command = [chrome, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command += [f"--log-net-log={log}", "--virtual-time-budget=3000", "--dump-dom", f"file://{site.folder / page}"]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        events = json.loads(log.read_text())["events"]
        asked = [event["params"] for event in events if "initiator" in event.get("params", {})]
        assert not [params["url"] for params in asked if params["initiator"] != "not an origin"], page


@pytest.fixture(scope="session")
def chrome() -> str:
    names = (os.environ.get("CHROME", ""), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.fail("no browser: apt-get install chromium, or set CHROME to the path of one")
    return found


def test_node_packages_name_no_host() -> None:
    assert not re.search(r"https?://", (ROOT / "web" / "package-lock.json").read_text()), "run `npm run lock` in web/"
