"""Progress of a long computation: a bar on a terminal or in a notebook, elsewhere a line now and then."""

import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0  # seconds between two lines; each pause is twice the one before
FRACTIONS = "{l_bar}{bar}| {n:.1f}/{total:.0f} [{elapsed}<{remaining}, {rate_fmt}]"
Item = TypeVar("Item")


def bar_class() -> Any:
    """Return the class of bars: a widget in a notebook that has ipywidgets, otherwise a line of text.

    In a notebook without ipywidgets tqdm warns when it is imported, also where no bar is shown. Text is as good there.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        from tqdm.auto import tqdm  # imported late: few commands need it
    return tqdm


class Progress:
    """How much of a computation is done, on stderr. Use it as a context.

    Args:
        total: How much there is to do.
        title: What is done, such as "sampling".
        unit: What is counted, in the singular.
        quiet: Show nothing.

    Example:
        >>> with Progress(len(batches), "judging", "batch") as progress:
        ...     for batch in batches:
        ...         progress.update(1)
    """

    def __init__(self, total: int | float, title: str, unit: str, quiet: bool = False) -> None:
        tqdm = bar_class()
        in_notebook = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)  # tqdm.auto chose a widget
        hidden = quiet or not (sys.stderr.isatty() or in_notebook)
        layout: dict[str, Any] = {"bar_format": FRACTIONS} if isinstance(total, float) else {}
        self.total, self.done = total, 0.0
        self.title, self.unit = title, unit
        self._lines = hidden and not quiet
        self._bar = tqdm(total=total, desc=title, unit=unit, dynamic_ncols=True, disable=hidden, **layout)
        self._started = self._shown = time.monotonic()
        self._pause = FIRST_PAUSE

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, count: int | float) -> None:
        """Count what was done since the last call.

        Args:
            count: How much it is. The sum does not exceed the total.
        """
        count = min(count, self.total - self.done)
        self.done += count
        self._bar.update(count)
        now = time.monotonic()
        if self._lines and now - self._shown >= self._pause:
            self._shown, self._pause = now, min(LONGEST_PAUSE, 2 * self._pause)
            seconds = now - self._started
            text = f"{self.title}: {self.done:,.0f} of {self.total:,.0f} {self.unit}s after {seconds:,.0f} s"
            print(text, file=sys.stderr, flush=True)

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items, and count each as done when the next one is asked for.

        Args:
            items: The items.

        Yields:
            The items, in their order.
        """
        for item in items:
            yield item
            self.update(1)
