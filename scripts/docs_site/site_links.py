"""MkDocs hook: a name such as `m2s.Posterior` in the text of any page leads to its place in the reference."""

import posixpath
import re
import zlib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

# A name in code, outside of links, headings and blocks of code: these are matched first and stay as they are.
NAME = re.compile(r"(?s)<(a|pre|h[1-6]|title|nav|script)\b[^>]*>.*?</\1>|<code>(?P<name>m2s(?:\.\w+)+)(?P<call>\(\))?</code>")


def read_inventory(inventory: bytes) -> dict[str, str]:
    """Return where every name of a Sphinx inventory is described.

    Args:
        inventory: The content of objects.inv.
    """
    lines = zlib.decompress(inventory[inventory.index(b"zlib.\n") + 6 :]).decode().splitlines()
    fields = [line.split(" ") for line in lines]
    return {name: place.replace("$", name) for name, _, _, place, _ in fields}


def with_names_linked(text: str, page: str, places: dict[str, str]) -> str:
    """Return the HTML of a page with links to the reference.

    Args:
        text: The page.
        page: Its path in the site.
        places: Where names are described.
    """

    def linked(match: re.Match[str]) -> str:
        if match["name"] is None or match["name"] not in places:
            return match[0]
        file, _, anchor = places[match["name"]].partition("#")
        link = f"{posixpath.relpath(file, posixpath.dirname(page) or '.')}#{anchor}"
        return f'<a class="m2s-name" href="{link}">{match[0]}</a>'

    return NAME.sub(linked, text)


@event_priority(-50)  # after mkdocstrings wrote the inventory
def on_post_build(config: MkDocsConfig) -> None:
    """Link the names on all pages."""
    site = Path(config.site_dir)
    places = read_inventory((site / "objects.inv").read_bytes())
    for path in sorted(site.rglob("*.html")):
        text = path.read_text()
        if (new := with_names_linked(text, path.relative_to(site).as_posix(), places)) != text:
            path.write_text(new)
