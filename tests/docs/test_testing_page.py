"""The table and the figures of docs/testing.md are those of the stored counts."""

import importlib.util
import json
from types import ModuleType

import pytest
from doc_pages import ROOT

from m2s.report.blocks import svg_text


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/count_tests.py as a module."""
    spec = importlib.util.spec_from_file_location("count_tests", ROOT / "scripts" / "count_tests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_has_the_stored_counts(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    start, end = (page.index(mark) for mark in script.MARKS)
    counts = json.loads(script.COUNTS.read_text(encoding="utf-8"))
    assert page[start + len(script.MARKS[0]) : end].strip() == script.table(counts)


def test_every_kind_of_the_campaign_is_counted(script: ModuleType) -> None:
    counted = {title for titles in script.KINDS.values() for title in titles}
    uncounted = {"random bits and tokens on CPU and GPU", "order of writes, syncs and renames"}  # not run; no fault
    assert counted | uncounted == set(script.faults())


@pytest.mark.parametrize("dark", [False, True])
def test_figures_are_drawn_from_the_counts(script: ModuleType, dark: bool) -> None:
    counts = json.loads(script.COUNTS.read_text(encoding="utf-8"))
    for name, figure in (("tests", script.draw_tests(counts)), ("faults", script.draw_faults())):
        stored = script.FIGURES / f"{name}{'-dark' if dark else ''}.svg"
        assert stored.read_text(encoding="utf-8") == svg_text(figure, dark)


def test_mutants_are_those_of_the_mutation_tests(script: ModuleType) -> None:
    found = script.mutants()
    assert found["samplers"] > 10 and found["ops"] > 10 and sum(found.values()) > 50
