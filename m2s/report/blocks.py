"""What the templates of the HTML report render: tables, pictures, and the text of numbers.

Everything here is plain data. The templates escape it.
"""

import base64
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.image import imread

from m2s.report.style import DARK

UNKNOWN = "–"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: Its text.
        notes: Texts in small print below it.
    """

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table. The first cell of a row is its heading.

    Args:
        head: Headings of the columns.
        rows: The rows, one cell for each column. A value that is not a `Cell` is shown as its text.
        numeric: Indices of the columns that are aligned to the right.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    numeric: Sequence[int] = ()

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows as cells."""
        return [[value if isinstance(value, Cell) else Cell(str(value)) for value in row] for row in self.rows]


@dataclass(frozen=True)
class Picture:
    """An image in the page.

    Args:
        uri: The image as a data URI.
        alt: Its content in words.
        caption: The text below it. Where it is empty, the template supplies one.
        dark: The image for a dark page as a data URI; empty where the same image serves both.
    """

    uri: str
    alt: str
    caption: str = ""
    dark: str = ""


def format_number(value: Any, digits: int = 4) -> str:
    """Return a number as text.

    Args:
        value: The number; None and numbers that are not finite give a dash.
        digits: Decimals; at most two where the absolute value is 100 or more. Integers have none. A number that would be
            rounded to zero has an exponent.

    Returns:
        The text.
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) < 0.5 * 10**-digits:
        return f"{value:.2e}"
    return f"{value:,.{digits if abs(value) < 100 else min(digits, 2)}f}"


def format_percentage(count: int | None, total: int) -> str:
    """Return count / total in per cent.

    Args:
        count: The count; None where it is not known.
        total: The total.

    Returns:
        The text; a dash where the fraction is not known.
    """
    if count is None or not total:
        return UNKNOWN
    return f"{count / total:.4%}" if count else "0%"


def error_cell(value: Any, *errors: Any, digits: int = 4) -> Cell:
    """Return a cell with a value and its standard errors below.

    Args:
        value: The value.
        *errors: Standard errors. One that is None is left out.
        digits: Decimals.

    Returns:
        The cell.
    """
    known = " ".join(f"± {format_number(error, digits)}" for error in errors if error is not None)
    return Cell(format_number(value, digits), (known,) if known else ())


def interval_cell(interval: Mapping[str, Any], digits: int = 4) -> Cell:
    """Return a cell with a value and its interval below.

    Args:
        interval: `value`, `low` and `high`.
        digits: Decimals.

    Returns:
        The cell.
    """
    low, high = format_number(interval["low"], digits), format_number(interval["high"], digits)
    return Cell(format_number(interval["value"], digits), (f"[{low}, {high}]",))


def conjunction(words: Iterable[str]) -> str:
    """Join words by commas and "and".

    Args:
        words: At least one word.

    Returns:
        For example "a, b and c".
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def paragraphs(text: str) -> list[str]:
    """Split plain text into paragraphs.

    Args:
        text: The text. An empty line ends a paragraph.

    Returns:
        The paragraphs, with single spaces between words.
    """
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def figure_picture(figure: Figure, alt: str, caption: str = "") -> Picture:
    """Return a figure as a picture for light and dark pages.

    Args:
        figure: The figure.
        alt: Its content in words.
        caption: The text below it.

    Returns:
        The picture, as SVG.
    """
    light, dark = (data_uri("image/svg+xml", svg_text(figure, dark).encode()) for dark in (False, True))
    return Picture(light, alt, caption, dark)


def svg_text(figure: Figure, dark: bool = False) -> str:
    """Return a figure as SVG.

    Args:
        figure: The figure.
        dark: Replace the colors by those for a dark page (`m2s.report.style.DARK`).

    Returns:
        The text. Letters are outlines, and there is no date, so that the same figure gives the same bytes.
    """
    file = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "m2s", "svg.fonttype": "path"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue().decode()
    text = text[text.index("<svg") :]  # without the DOCTYPE, which names an address
    if not dark:
        return text
    # Glyphs of text have no color of their own where the text is black, which is the default of SVG.
    text = text.replace("<svg ", f'<svg fill="{DARK["#000000"]}" ', 1)
    return re.sub(r"#[0-9a-fA-F]{6}\b", lambda found: DARK.get(found[0].upper(), found[0]), text)


def png_uri(path: Path) -> str:
    """Return a PNG file as a data URI.

    Args:
        path: The file.

    Returns:
        The data URI.

    Raises:
        ValueError: The file is not a PNG picture.
    """
    try:
        content = path.read_bytes()
        imread(BytesIO(content), format="png")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"it cannot be read as a PNG picture ({error})") from error
    return data_uri("image/png", content)


def data_uri(media_type: str, content: bytes) -> str:
    """Return bytes as a data URI.

    Args:
        media_type: For example image/png.
        content: The bytes.

    Returns:
        The data URI, in base64.
    """
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
