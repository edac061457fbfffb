"""The documentation site builds without warnings, its links lead somewhere, and it loads nothing from a network."""

import json
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from doc_pages import ROOT

import reference_pages
from built_site import Site

pytestmark = pytest.mark.docs

GOALS = {
    "training guide": "training.html",
    "first training notebook": "tutorials/compare-on-digits.html",
    "audit guide": "evaluation.html",
    "audit notebook": "tutorials/audit-and-repair.html",
    "lab": "lab/index.html",
}


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
            known = site.pages[file].anchors if file in site.pages else set()
            # The lab opens the tab that the address names.
            if file not in site.files or (anchor and file in site.pages and not {anchor, f"tab-{anchor}"} & known):
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
    from site_links import read_inventory  # it needs mkdocs, which is in the extra docs

    places = read_inventory((site.folder / "objects.inv").read_bytes())
    for name in reference_pages.documented().values():
        page, _, anchor = places[name.path].partition("#")
        assert anchor in site.pages[page].anchors, name.path
        assert {alias for alias in name.aliases if alias not in places} == set(), name.path


@pytest.mark.parametrize("goal", GOALS)
def test_goal_is_three_clicks_from_home(goal: str, site: Site) -> None:
    assert site.clicks().get(GOALS[goal], 99) <= 3, goal


def test_every_page_of_the_navigation_can_be_reached(site: Site) -> None:
    assert not set(site.pages) - set(site.clicks()) - {"lab/index.html"}


def requested_hosts(page: Path, chrome: str, folder: Path) -> set[str | None]:
    """Return the hosts that a page asks for, from the log of Chromium's network stack."""
    log = folder / "net.json"
    command = [chrome, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--log-net-log={log}", "--virtual-time-budget=3000", "--dump-dom", f"file://{page}"]
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    asked = [event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"]
    return {urlsplit(url).hostname for url in asked} - {None}


@pytest.mark.parametrize("page", ["index.html", "concepts/losses.html", "architecture.html", "lab/index.html"])
def test_a_browser_asks_for_no_host(page: str, site: Site, chrome: str, tmp_path: Path) -> None:
    assert not requested_hosts(site.folder / page, chrome, tmp_path)


def found_by_search(site: Site, page: str, words: str, chrome: str, folder: Path) -> list[str]:
    """Return the files that the search of a page lists, in a browser that reads the page from the disk."""
    command = [chrome, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--virtual-time-budget=10000", "--dump-dom", f"file://{site.folder / page}?q={words}"]
    shown = subprocess.run(command, capture_output=True, check=True, timeout=120, text=True).stdout
    links = re.findall(r'<a href="file://([^"?#]+)[^"]*" class="md-search-result__link"', shown)
    return [Path(link).relative_to(site.folder).as_posix() for link in dict.fromkeys(links)]


@pytest.mark.parametrize("page", ["index.html", "concepts/losses.html"])
def test_the_search_works_from_the_disk_and_finds_parts_of_names(page: str, site: Site, chrome: str, tmp_path: Path) -> None:
    found = found_by_search(site, page, "affine+inverse", chrome, tmp_path)
    assert {"reference/conversions.html", "tutorials/audit-and-repair.html", "faq.html"} <= set(found), found


def test_node_packages_name_no_host() -> None:
    assert not re.search(r"https?://", (ROOT / "web" / "package-lock.json").read_text()), "run `npm run lock` in web/"


def test_the_checks_find_what_they_look_for(tmp_path: Path, chrome: str) -> None:
    """A site with one error of each kind."""
    (tmp_path / "index.html").write_text(
        '<a href="a.html#here">1</a><a href="a.html#gone">2</a><a href="b.html">3</a><a href="https://">4</a>'
        '<img src="gone.png"><script src="https://m2s.invalid/x.js"></script><link rel="stylesheet" href="//m2s.invalid/x.css">'
        "<p>Some <code>code</code> text</p>"
    )
    (tmp_path / "a.html").write_text('<h1 id="here">1</h1><a href="sub/c.html">5</a>')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.html").write_text("")
    site = Site(tmp_path)
    checks = {
        test_links_lead_to_files_and_anchors_of_the_site: ("index.html: a.html#gone", "index.html: b.html"),
        test_nothing_is_loaded_from_outside: ("gone.png", "https://m2s.invalid/x.js", "//m2s.invalid/x.css"),
        test_links_out_of_the_site_are_well_formed: ("index.html: https://",),
    }
    for check, findings in checks.items():
        with pytest.raises(AssertionError) as error:
            check(site)
        for finding in findings:
            assert finding in str(error.value)
    assert site.clicks() == {"index.html": 0, "a.html": 1, "sub/c.html": 2}
    assert "".join(site.pages["index.html"].words) == "1234Some  text"
    assert requested_hosts(tmp_path / "index.html", chrome, tmp_path) == {"m2s.invalid"}
