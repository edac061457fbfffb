"""The golden vectors of the lab are what the library computes."""

import json
from typing import Any

import pytest
from lab_golden import FILE, vectors


def test_simplex_vectors_are_those_of_the_library() -> None:
    compare(vectors(), json.loads(FILE.read_text()), "vectors")


def compare(computed: Any, stored: Any, where: str) -> None:
    """Compare two structures of numbers."""
    if isinstance(stored, dict):
        assert computed.keys() == stored.keys(), where
        for key, value in stored.items():
            compare(computed[key], value, f"{where}.{key}")
    elif isinstance(stored, list):
        assert len(computed) == len(stored), where
        for index, value in enumerate(stored):
            compare(computed[index], value, f"{where}[{index}]")
    else:
        assert computed == pytest.approx(stored, rel=1e-9, abs=1e-13), where
