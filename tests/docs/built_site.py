"""The built site as data: what its pages link to, load and say."""

import os
import posixpath
import subprocess
import sys
from collections import deque
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from doc_pages import ROOT

LOADS = {
    "img": "src",
    "script": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
}
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch", "manifest"}
NO_TEXT = {"script", "style", "pre", "code", "svg", "math", "kbd", "nav", "header", "footer", "title"}
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class PageReader(HTMLParser):
    """The anchors, links, loaded files and prose of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.content_links: list[str] = []
        self.loaded: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given and tag != "meta"}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADS and LOADS[tag] in given:
            self.loaded.append(given[LOADS[tag]])
        if "srcset" in given:
            self.loaded += [each.split()[0] for each in given["srcset"].split(",")]
        if tag == "link":
            (self.loaded if LOADED_LINKS & set(given.get("rel", "").split()) else self.links).append(given["href"])
        if tag not in VOID:
            silent = given.get("class", "").split()
            self._open.append("pre" if {"katex", "m2s-output", "doc-heading", "highlight"} & set(silent) else tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if not NO_TEXT & set(self._open):
            self.words.append(data)


class Site:
    """A folder with the built site.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = (file for file in folder.rglob("*") if file.is_file())
        self.files = {file.relative_to(folder).as_posix() for file in files}
        pages = sorted(name for name in self.files if name.endswith(".html") and name != "404.html")
        self.pages = {name: PageReader((folder / name).read_text()) for name in pages}

    def target(self, page: str, link: str) -> tuple[str, str] | None:
        """Return the file and the anchor that a link of a page leads to, None where it leads out of the site."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return None
        path = unquote(parts.path)
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        return (posixpath.join(file, "index.html") if path.endswith("/") or file == "." else file), unquote(parts.fragment)

    def clicks(self, start: str = "index.html") -> dict[str, int]:
        """Return the least number of clicks to every page that can be reached."""
        found, queue = {start: 0}, deque([start])
        while queue:
            page = queue.popleft()
            for link in self.pages[page].links:
                target = self.target(page, link)
                if target and target[0] in self.pages and target[0] not in found:
                    found[target[0]] = found[page] + 1
                    queue.append(target[0])
        return found


def build(folder: Path) -> str:
    """Build the site strictly, with every connection to a network failing, and return what MkDocs printed.

    Args:
        folder: Where the site is written.
    """
    nowhere = "http://127.0.0.1:9"
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), nowhere)
    environment = {**os.environ, **proxies, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT), "SITE_URL": ""}
    command = [sys.executable, "-W", "default", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
