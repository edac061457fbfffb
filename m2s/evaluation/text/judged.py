"""What a judge gives for a set of texts, stored in a file, so that the judge reads every text once."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from m2s.data.files import BadData
from m2s.evaluation.genppl import Samples, Scores, score
from m2s.evaluation.judge import Judge
from m2s.io import atomic_write

FORMAT = 1
ARRAYS = ("nll", "tokens", "bytes", "entropy", "last", "mean")
FOLDER = "judged"
"""The folder beside samples that holds these files."""


def content_hash(samples: Samples) -> str:
    """Return the SHA-256 of the tokens and texts of some samples.

    Args:
        samples: The samples.
    """
    digest = hashlib.sha256(json.dumps(samples.texts).encode())
    if samples.tokens is not None:
        digest.update(f"{samples.tokens.shape}".encode() + samples.tokens.astype(np.int64).tobytes())
    return digest.hexdigest()


def judged_key(samples: Samples, judge: Judge, weights: str) -> str:
    """Return the SHA-256 of everything that the scores depend on.

    Args:
        samples: The samples.
        judge: The judge.
        weights: The fingerprint of its weights, from `m2s.provenance.fingerprint`.
    """
    described = [FORMAT, content_hash(samples), asdict(samples.protocol), judge.describe(), weights, judge.device.type]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def judged_scores(samples: Samples, judge: Judge, weights: str, path: Path | None, batch_size: int = 8) -> Scores:
    """Return the scores and embeddings of samples from a file, or let the judge read them and write the file.

    Args:
        samples: The samples.
        judge: The judge.
        weights: The fingerprint of its weights.
        path: The file, whose folder exists; None: nothing is stored.
        batch_size: Sequences that the judge reads at once.

    Returns:
        The scores.

    Raises:
        UserError: The judge cannot read the samples.
        OSError: The file cannot be written.
    """
    key = judged_key(samples, judge, weights)
    if path is not None and path.is_file():
        try:
            return _load(path, key, samples, judge)
        except BadData:
            pass  # of other samples, another judge or another version: it is replaced
    found = score(samples, judge, batch_size)
    if path is not None:
        rest = json.dumps({"corpus_entropy": found.corpus_entropy, "entropy_of": found.entropy_of, "distinct": found.distinct})
        with atomic_write(path) as temporary:
            save_file({name: getattr(found, name) for name in ARRAYS}, temporary, {"key": key, "rest": rest})
    return found


def _load(path: Path, key: str, samples: Samples, judge: Judge) -> Scores:
    """Read the file. BadData where it is damaged or has another key."""
    try:
        with safe_open(path, framework="numpy") as file:
            held = file.metadata() or {}
            if held.get("key") != key:
                raise BadData(f"{path} is of other samples or of another judge")
            arrays: dict[str, Any] = {name: np.array(file.get_tensor(name)) for name in ARRAYS}
        return Scores(samples=samples, judge=judge.describe(), **arrays, **json.loads(held["rest"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        raise BadData(f"{path} is damaged ({type(error).__name__}: {error})") from error
