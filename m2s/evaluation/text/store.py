"""Results of single metrics of single files, stored under the hash of everything that they depend on."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2s.io import parse_json, read_regular, write_json


@dataclass(frozen=True)
class ResultStore:
    """A folder of results, or nothing.

    Args:
        folder: The folder; None: nothing is stored.
    """

    folder: Path | None

    def find_or_compute(self, described: Mapping[str, Any], compute: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return a stored result, or compute and store it.

        Args:
            described: What the result depends on, as JSON can store it.
            compute: Computes the result, which JSON can store.

        Returns:
            The result.

        Raises:
            OSError: It cannot be stored.
        """
        if self.folder is None:
            return dict(compute())
        path = self.folder / f"{hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]}.json"
        try:
            stored = parse_json(read_regular(path))
            if stored["depends_on"] == json.loads(json.dumps(described)):
                return dict(stored["found"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # missing or damaged: it is computed again
        found = dict(compute())
        write_json(path, {"depends_on": described, "found": found})
        return found
