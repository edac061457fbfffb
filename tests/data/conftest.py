"""Fixtures of the data tests."""

from pathlib import Path

import pytest

from packed_text import write_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, dict[str, list[str]]]:
    """Return a folder of every kind of file, and the documents of each split when every 10th is for validation."""
    folder = tmp_path / "corpus"
    return folder, write_corpus(folder)
