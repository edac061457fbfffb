"""Fixtures of the evaluation tests."""

from pathlib import Path

import pytest

from m2s.evaluation.judge import Judge, load_judge
from small_judges import write_judges


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of small judges with random weights, by name."""
    pytest.importorskip("transformers", reason="no transformers here: pip install transformers gguf accelerate")
    return write_judges(tmp_path_factory.mktemp("judges"))


@pytest.fixture(scope="session")
def judges(folders: dict[str, Path]) -> dict[str, Judge]:
    """Return the small judges, by name."""
    return {name: load_judge(str(folder), "cpu") for name, folder in folders.items()}
