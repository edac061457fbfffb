"""A reader of HTML pages for the tests: it checks that tags balance, and collects texts, tables and images."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imsave

VOID = {"meta", "link", "br", "img", "hr", "input", "source", "wbr"}
ADDRESSES = {"src", "href", "srcset", "poster", "action", "formaction", "data", "background", "xlink:href", "ping"}


class Reader(HTMLParser):
    """A page as a list of elements. Tags must balance, and attributes must not repeat."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.content: dict[str, list[str]] = {}  # the texts of all elements of each name, nested ones included
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
        """Return the attributes of all elements of a name."""
        return [attributes for name, attributes in self.elements if name == tag]

    def row(self, *beginning: str) -> list[str]:
        """Return the only row that begins with these cells."""
        (found,) = [row for row in self.rows if row[: len(beginning)] == list(beginning)]
        return found

    def after(self, heading: str, first: str) -> list[str]:
        """Return the first row that begins with `first` below the head that begins with `heading`, cells separated by |."""
        start = next(i for i, row in enumerate(self.rows) if row[: len(heading.split("|"))] == heading.split("|"))
        return next(row for row in self.rows[start + 1 :] if row[0] == first)

    @property
    def data(self) -> Any:
        """The JSON in the page."""
        return json.loads(self.content["script"][-1])


def read(path: Path) -> Reader:
    """Read a page."""
    return Reader(path.read_text(encoding="utf-8"))


def decoded(uri: str) -> tuple[str, bytes]:
    """Return the media type and the content of a data URI."""
    kind, content = re.fullmatch(r"data:([\w/+]+);base64,([\w+/=]+)", uri).groups()  # type: ignore[union-attr]
    return kind, base64.b64decode(content, validate=True)


def picture_file(path: Path, side: int = 6) -> Path:
    """Write a small PNG file."""
    imsave(path, np.arange(side * side).reshape(side, side), format="png")
    return path
