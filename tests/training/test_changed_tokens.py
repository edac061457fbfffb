"""Packed tokens that were changed without meta.json: a run does not start on them."""

import hashlib
import json

import numpy as np
import pytest

from m2s.data import Bytes, prepare_text
from m2s.data.source import TextSource
from m2s.errors import UserError
from m2s.training import train
from small_runs import small


@pytest.fixture
def packed(tmp_path):
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(f"document {i}\n" for i in range(40)))
    prepare_text(tmp_path / "a.txt", tmp_path / "packed", Bytes())
    return tmp_path / "packed"


def test_changed_tokens_are_noticed_on_resume(tmp_path, packed):
    config = small(tmp_path / "run", steps=1)
    train(config, TextSource(str(packed), 4))
    path = packed / "train-00000.bin"
    path.write_bytes(path.read_bytes()[::-1])  # the same size
    for out in (tmp_path / "run", tmp_path / "new"):
        with pytest.raises(UserError, match=r"train-00000\.bin has SHA-256"):
            train(small(out, steps=1), TextSource(str(packed), 4))
    assert not (tmp_path / "new").exists()


def test_tokens_above_the_vocabulary(tmp_path, packed):
    path, meta = packed / "validation-00000.bin", json.loads((packed / "meta.json").read_text())
    tokens = np.fromfile(path, "<u2")
    tokens[-1] = 300
    path.write_bytes(tokens.tobytes())
    meta["splits"]["validation"]["shards"][0]["sha256"] = hashlib.sha256(tokens.tobytes()).hexdigest()
    (packed / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="has the token 300, expected less than 257"):
        train(small(tmp_path / "new", steps=1), TextSource(str(packed), 4))
    assert not (tmp_path / "new").exists()
