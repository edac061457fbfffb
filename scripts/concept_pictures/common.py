"""What all pictures use."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from m2s.report.style import INK, MUTED, SMALL, TEXT, TITLE, format_frame, new_figure

WIDTH = 7.8  # inches; the text of a page is about as wide, so that the fonts keep their size


def transparent_figure(height: float, layout: Any = "constrained", width: float = WIDTH) -> Figure:
    """Return a figure without a background, so that it fits a page of any color.

    Args:
        height: Inches.
        layout: Layout engine, as of `matplotlib.figure.Figure`.
        width: Inches.
    """
    figure = new_figure(width, height, layout)
    figure.patch.set_visible(False)
    return figure


def title(axes: Axes, text: str) -> None:
    """Set the title of a panel.

    Args:
        axes: The panel.
        text: The title.
    """
    axes.set_title(text, loc="left", fontsize=TITLE, color=INK, fontweight="bold", pad=10)


def label(axes: Axes, x: str, y: str) -> None:
    """Label the axes of a panel, and remove its background and two of its sides.

    Args:
        axes: The panel.
        x: Label of the x axis.
        y: Label of the y axis.
    """
    axes.set_xlabel(x, fontsize=TEXT, color=INK)
    axes.set_ylabel(y, fontsize=TEXT, color=INK)
    axes.patch.set_visible(False)
    axes.grid(color=MUTED, alpha=0.15, lw=0.7)
    axes.set_axisbelow(True)
    format_frame(axes)


def text(axes: Axes, place: tuple[float, float], words: str, color: str = INK, size: float = SMALL, **options: Any) -> None:
    """Write words at a place in data coordinates.

    Args:
        axes: The panel.
        place: Where.
        words: The words.
        color: Color.
        size: Font size in points.
        **options: More options of `Axes.text`.
    """
    axes.text(*place, words, color=color, fontsize=size, **options)
