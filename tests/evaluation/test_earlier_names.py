"""Result files of earlier versions: their keys are renamed when they are read."""

from m2s.evaluation.earlier_names import EARLIER_NAMES, with_current_names


def test_keys_are_renamed_at_every_depth() -> None:
    earlier = {"bound": {"bits": 1}, "against": [{"difference": {"bound": 2}}], "changes": {"distinct_free": 3}, "free": "free"}
    assert with_current_names(earlier) == {
        "nelbo": {"bits": 1},
        "against": [{"difference": {"nelbo": 2}}],
        "changes": {"distinct_unprojected": 3},
        "unprojected": "free",  # values are not names
    }


def test_current_results_are_unchanged() -> None:
    current = {name: {"value": [1, None, "free"]} for name in EARLIER_NAMES.values()}
    assert with_current_names(current) == current
    assert not EARLIER_NAMES.keys() & EARLIER_NAMES.values()
