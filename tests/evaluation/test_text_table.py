"""The table of text metrics: rankings and marks of hand-made results."""

from typing import Any

from m2s.evaluation.text.metric import Column, TextMetric
from m2s.evaluation.text.table import Row, format_columns, format_marks, format_rows, rank_all

COLUMNS = (
    Column("low", "lowest", "a cost", ".1f"),
    Column("high", "highest", "a score"),
    Column("near", "closest", "a statistic", ".0f", printed=False),
)


def value(number: float, half: float | None = None) -> dict[str, float | None]:
    low, high = (None, None) if half is None else (number - half, number + half)
    return {"value": number, "low": low, "high": high}


def rows(numbers: dict[str, tuple[str, float]], half: float | None = None, group: str = "text") -> list[Row]:
    """Rows whose three columns have the same number."""
    made = []
    for name, (kind, number) in numbers.items():
        found: dict[str, Any] = {column.name: value(float(number), half) for column in COLUMNS}
        made.append(Row(name, kind, {group: {"m": found}}))  # type: ignore[arg-type]
    return made


def metric(needs: tuple[str, ...] = ()) -> dict[str, TextMetric]:
    return {"m": TextMetric(lambda text, context: {}, COLUMNS, frozenset(needs))}


def test_rankings_of_known_numbers() -> None:
    made = rows(
        {"a": ("samples", 4), "b": ("samples", 6), "x": ("adversary", 1), "y": ("adversary", 9), "real": ("held-out", 5)}
    )
    low, high, near = rank_all(made, metric(), [])
    assert low.order == ("x", "a", "b", "y") and high.order == ("y", "b", "a", "x")
    assert near.order[:2] == ("a", "b") and set(near.order[2:]) == {"x", "y"}
    assert (low.first_adversaries, high.first_adversaries, near.first_adversaries) == (("x",), ("y",), ())
    assert (low.above_real, high.above_real, near.above_real) == (("x",), ("y",), ())
    assert [one.is_fooled for one in (low, high, near)] == [True, True, False]
    printed = format_rows(made, [low, high, near])
    assert printed[0].split() == ["without", "a", "judge", "low!", "high!"] and printed[-1].split()[-2:] == ["5.0", "5.000"]
    assert [line.split()[:2] for line in format_marks([low, high, near])] == [["!", "low"], ["!", "high"]]
    assert "ranks x before all samples; x above held-out text" in format_marks([low])[0]
    assert format_columns([low, near]) == ["low: a cost; lowest is first"]
    assert low.to_dict()["order"] == ["x", "a", "b", "y"]


def test_an_adversary_between_samples_is_not_first() -> None:
    made = rows({"a": ("samples", 4), "x": ("adversary", 5), "b": ("samples", 6), "real": ("held-out", 4.5)})
    low, high, near = rank_all(made, metric(), [])
    assert not low.first_adversaries and not high.first_adversaries and near.first_adversaries == ()
    assert not low.above_real and high.above_real == ("x",)  # 5 is more than the 4.5 of held-out text, without intervals


def test_intervals_that_overlap_are_not_above_held_out_text() -> None:
    numbers = {"x": ("adversary", 5.0), "y": ("adversary", 2.0), "real": ("held-out", 6.0)}
    low, high, near = rank_all(rows(numbers, half=1.0), metric(), [])
    assert low.above_real == ("y",) and high.above_real == () and near.above_real == ()
    assert low.first_adversaries == ()  # there are no samples
    assert "±1.0" in format_rows(rows(numbers, half=1.0), [low])[1]


def test_values_are_grouped_by_judge_and_may_be_missing() -> None:
    made = rows({"a": ("samples", 4), "real": ("held-out", 5)}, group="judges/j")
    assert rank_all(made, metric(), []) == []
    rankings = rank_all(made, metric(("judge",)), ["judges/j"])
    assert [one.group for one in rankings] == ["judges/j"] * 3
    assert format_rows(made, rankings)[0].startswith("judge j")
    del made[0].values["judges/j"]["m"]["low"]
    rankings = rank_all(made, metric(("judge",)), ["judges/j"])
    assert [one.column.name for one in rankings] == ["high", "near"]
    del made[1].values["judges/j"]["m"]["near"]
    assert [one.column.name for one in rank_all(made, metric(("judge",)), ["judges/j"])] == ["high"]
