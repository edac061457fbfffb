"""The table of `m2s evaluate text`: rows are files, columns are numbers of metrics, and every column ranks the files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from m2s.evaluation.text.metric import Column, TextMetric, Value

WITHOUT_JUDGE = "text"
"""The group of the metrics that need no judge. The others are grouped by the name of the judge."""
MARK = "!"


@dataclass(frozen=True)
class Row:
    """The results of one file.

    Args:
        name: The name that is printed.
        kind: Samples of a model, an adversary, or held-out text.
        values: What each metric returned, by the name of the metric within a group.
    """

    name: str
    kind: Literal["samples", "adversary", "held-out"]
    values: dict[str, dict[str, dict[str, Any]]]

    def value(self, group: str, metric: str, column: str) -> Value | None:
        """Return a measured value.

        Args:
            group: "text" or the name of a judge.
            metric: The name of the metric.
            column: The name of the column.

        Returns:
            The value; None where it was not measured, such as 8-grams of sequences of 4 tokens.
        """
        return self.values.get(group, {}).get(metric, {}).get(column)


@dataclass(frozen=True)
class Ranking:
    """How a column ranks the files.

    Args:
        group: "text" or the name of a judge.
        metric: The name of the metric.
        column: The column.
        order: The names of the files, the best first. Held-out text is not ranked.
        first_adversaries: The adversaries that are ranked before all samples of models. Empty where there are no samples.
        above_real: The adversaries that are better than held-out text, with intervals that do not overlap. Empty where the
            column compares with held-out text.
    """

    group: str
    metric: str
    column: Column
    order: tuple[str, ...]
    first_adversaries: tuple[str, ...]
    above_real: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what a result stores, as JSON can hold it."""
        return {
            "group": self.group,
            "metric": self.metric,
            "column": self.column.name,
            "better": self.column.better,
            "order": list(self.order),
            "adversaries_before_all_samples": list(self.first_adversaries),
            "adversaries_above_held_out_text": list(self.above_real),
        }

    @property
    def is_fooled(self) -> bool:
        """Whether the column ranks an adversary before all samples, or above held-out text."""
        return bool(self.first_adversaries or self.above_real)


def rank_all(rows: Sequence[Row], metrics: Mapping[str, TextMetric], judges: Sequence[str]) -> list[Ranking]:
    """Rank the files by every column.

    Args:
        rows: The results of all files.
        metrics: The metrics that were computed, by name.
        judges: The names of the judges.

    Returns:
        One ranking for each column of each group.
    """
    return [
        ranking
        for group, name, column in _columns(metrics, judges)
        if (ranking := _rank(rows, group, name, column)) is not None
    ]


def _columns(metrics: Mapping[str, TextMetric], judges: Sequence[str]) -> Iterator[tuple[str, str, Column]]:
    """Yield the group, the metric and the column of everything that was measured."""
    for group in (*judges, WITHOUT_JUDGE):
        for name, metric in metrics.items():
            if ("judge" in metric.needs) == (group != WITHOUT_JUDGE):
                for column in metric.columns:
                    yield group, name, column


def _rank(rows: Sequence[Row], group: str, metric: str, column: Column) -> Ranking | None:
    """Rank the files by one column; None where it was not measured."""
    found = {row.name: value for row in rows if (value := row.value(group, metric, column.name)) is not None}
    real = next((found[row.name] for row in rows if row.kind == "held-out" and row.name in found), None)
    target = None if real is None else real["value"]
    if column.better == "closest" and target is None:
        return None

    def cost(name: str) -> float:
        value = found[name]["value"]
        assert value is not None  # every measured value is a number
        if column.better == "closest":
            assert target is not None  # checked above
            return abs(value - target)
        return value if column.better == "lowest" else -value

    kinds = {row.name: row.kind for row in rows}
    order = sorted((name for name in found if kinds[name] != "held-out"), key=cost)
    if not order:
        return None
    adversaries = [name for name in order if kinds[name] == "adversary"]
    best = min((cost(name) for name in order if kinds[name] == "samples"), default=None)
    before = tuple(name for name in adversaries if best is not None and cost(name) < best)
    above = tuple(name for name in adversaries if real is not None and _is_better(found[name], real, column))
    return Ranking(group, metric, column, tuple(order), before, above)


def _is_better(value: Value, other: Value, column: Column) -> bool:
    """Return whether a value is better than another, and so is every value of its interval."""
    (low, high), (other_low, other_high) = (
        [one["value"] if one.get(end) is None else one[end] for end in ("low", "high")] for one in (value, other)
    )
    assert low is not None and high is not None and other_low is not None and other_high is not None
    return {"lowest": high < other_low, "highest": low > other_high, "closest": False}[column.better]


def format_rows(rows: Sequence[Row], rankings: Sequence[Ranking]) -> list[str]:
    """Format the results: one table for each judge, and one for the metrics that need none.

    Args:
        rows: The results of all files.
        rankings: The rankings of all columns.

    Returns:
        Lines of text. A column that ranks an adversary first is marked.
    """
    lines: list[str] = []
    for group in dict.fromkeys(ranking.group for ranking in rankings):
        shown = [ranking for ranking in rankings if ranking.group == group and ranking.column.printed]
        title = "without a judge" if group == WITHOUT_JUDGE else f"judge {Path(group).name}"
        heads = [one.column.name + (MARK if one.is_fooled else "") for one in shown]
        cells = [[_cell(row, one) for one in shown] for row in rows]
        names = [f"{row.name} ({row.kind})" if row.kind == "adversary" else row.name for row in rows]
        widths = [max(len(head), *(len(line[at]) for line in cells)) for at, head in enumerate(heads)]
        first = max(len(title), *map(len, names))
        for name, texts in [(title, heads), *zip(names, cells, strict=True)]:
            lines.append(
                "  ".join([name.ljust(first), *(text.rjust(width) for text, width in zip(texts, widths, strict=True))])
            )
        lines.append("")
    return lines[:-1]


def _cell(row: Row, ranking: Ranking) -> str:
    """Format one value with its interval."""
    found = row.value(ranking.group, ranking.metric, ranking.column.name)
    if found is None:
        return "-"
    spec, low, high = ranking.column.format, found.get("low"), found.get("high")
    half = "" if low is None or high is None else f" ±{format((high - low) / 2, spec)}"
    return format(found["value"], spec) + half


def format_marks(rankings: Sequence[Ranking]) -> list[str]:
    """Explain the marks: which adversaries each marked column ranks first.

    Args:
        rankings: The rankings of all columns.

    Returns:
        One line for each marked column, also for those that are in the file only.
    """
    lines = []
    for one in rankings:
        judge = "" if one.group == WITHOUT_JUDGE else f" by {Path(one.group).name}"
        said = []
        if one.first_adversaries:
            said.append(f"{', '.join(one.first_adversaries)} before all samples")
        if one.above_real:
            said.append(f"{', '.join(one.above_real)} above held-out text")
        if said:
            lines.append(f"{MARK} {one.column.name}{judge} ({one.column.better} is first) ranks {'; '.join(said)}")
    return lines


def format_columns(rankings: Sequence[Ranking]) -> list[str]:
    """Explain the columns.

    Args:
        rankings: The rankings of all columns.

    Returns:
        One line for each printed column.
    """
    printed = {one.column.name: one.column for one in rankings if one.column.printed}
    return [f"{name}: {column.description}; {column.better} is first" for name, column in printed.items()]
