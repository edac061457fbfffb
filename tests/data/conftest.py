"""Fixtures of the data tests."""

from pathlib import Path

import pytest

from packed_text import write_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, dict[str, list[str]]]:
    """Return a folder of every kind of file, the documents to divide, and those of the test split."""
    folder = tmp_path / "corpus"
    return folder, write_corpus(folder)
